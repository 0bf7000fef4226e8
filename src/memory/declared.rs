//! Memory that the application has registered (fi_mr(3)). An application that transfers from one part of a region will
//! transfer from others, so a device may as well register the surroundings of a buffer at once.
//!
//! These regions are hints: nothing goes wrong if one is missing here, or has been unmapped.

#![forbid(unsafe_code)]

use crate::sys::per_process::PerProcess;
use std::collections::BTreeMap;

/// Regions that one look-up examines: those with the highest starts at or below an address.
const LOOKS: usize = 8;

/// The end of each region, by its start and a number that makes the key unique.
static REGIONS: PerProcess<Regions> = PerProcess::new();

#[derive(Debug, Default)]
struct Regions {
    ends: BTreeMap<(usize, u64), usize>,
    last: u64,
}

/// The entry of a region of the application, until this is dropped.
#[derive(Debug)]
pub(crate) struct Declaration {
    key: (usize, u64),
}

/// Records that the application has registered `len` bytes at `addr`.
pub(crate) fn declare(addr: usize, len: usize) -> Declaration {
    let mut regions = REGIONS.lock();
    regions.last += 1;
    let key = (addr, regions.last);
    regions.ends.insert(key, addr.saturating_add(len));
    Declaration { key }
}

impl Drop for Declaration {
    fn drop(&mut self) {
        REGIONS.lock().ends.remove(&self.key);
    }
}

/// A region that contains the `len` bytes at `addr`: its first address, and the one after its last.
pub(crate) fn around(addr: usize, len: usize) -> Option<(usize, usize)> {
    let end = addr.checked_add(len)?;
    let regions = REGIONS.lock();
    let before = regions.ends.range(..=(addr, u64::MAX)).rev().take(LOOKS);
    before.map(|((start, _), region_end)| (*start, *region_end)).find(|(_, to)| end <= *to)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Addresses that no other code in this process uses.
    const BASE: usize = 1 << 62;

    #[test]
    fn a_region_is_known_until_it_is_closed() {
        let outer = declare(BASE, 1000);
        let inner = declare(BASE + 100, 100);
        let twin = declare(BASE + 100, 100);
        assert_eq!(around(BASE + 100, 100), Some((BASE + 100, BASE + 200)));
        assert_eq!(around(BASE + 150, 51), Some((BASE, BASE + 1000)));
        assert_eq!(around(BASE, 1000), Some((BASE, BASE + 1000)));
        assert_eq!(around(BASE, 1001), None);
        assert_eq!(around(BASE - 1, 1), None);
        assert_eq!(around(usize::MAX, 2), None);
        drop(inner);
        assert_eq!(around(BASE + 199, 1), Some((BASE + 100, BASE + 200)));
        drop(twin);
        assert_eq!(around(BASE + 199, 1), Some((BASE, BASE + 1000)));
        drop(outer);
        assert_eq!(around(BASE + 199, 1), None);
    }
}
