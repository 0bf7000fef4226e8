//! Memory that the application has registered (fi_mr(3)). Who transfers from one part of a region will
//! transfer from others, so what a device has to know of the one may as well be said of its surroundings.
//!
//! It is a hint: nothing goes wrong where a region is missing here, or is no longer what it was.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Regions that are looked at for one question: those that begin last before an address.
const LOOKS: usize = 8;

/// The end of each region, by its beginning and a number of its own.
static REGIONS: Mutex<Regions> = Mutex::new(Regions { ends: BTreeMap::new(), last: 0 });

#[derive(Debug)]
struct Regions {
    ends: BTreeMap<(usize, u64), usize>,
    last: u64,
}

fn regions() -> MutexGuard<'static, Regions> {
    REGIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A region of the application, until this is dropped.
#[derive(Debug)]
pub(crate) struct Declaration {
    key: (usize, u64),
}

/// The application has registered `len` bytes at `addr`.
pub(crate) fn declare(addr: usize, len: usize) -> Declaration {
    let mut regions = regions();
    regions.last += 1;
    let key = (addr, regions.last);
    regions.ends.insert(key, addr.saturating_add(len));
    Declaration { key }
}

impl Drop for Declaration {
    fn drop(&mut self) {
        regions().ends.remove(&self.key);
    }
}

/// A region with all of `len` bytes at `addr` in it: its first address, and the one behind its last.
pub(crate) fn around(addr: usize, len: usize) -> Option<(usize, usize)> {
    let end = addr.checked_add(len)?;
    let regions = regions();
    let before = regions.ends.range(..=(addr, u64::MAX)).rev().take(LOOKS);
    before.map(|((start, _), region_end)| (*start, *region_end)).find(|(_, to)| end <= *to)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Addresses that nothing else in this process has.
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
