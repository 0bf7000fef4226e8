//! The table in which a process publishes handles of its device memory. A handle does not fit into a remote key, so the key
//! says where in the owner's memory the record with the handle is, and a peer that does not have the allocation open yet
//! reads it by cross-memory attach.

use crate::sys::cuda::{Allocation, Cuda, Failure, IpcHandle};
use crate::sys::process::{self, random_u64};
use crate::sys::{Errno, cma};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Allocations that a process publishes at a time. A key whose record was replaced serves those who have it open.
const RECORDS: usize = 256;
/// Words of a record: its tag; where the allocation begins at its owner, and its length, bytes; the handle; the tag again.
const WORDS: usize = 12;
/// A record's address is a multiple of this.
const ALIGN: u64 = 128;
/// The bits of a place that are the address, in units of [`ALIGN`]; the others are the process id, which has 22 bits.
const ADDRESS_BITS: u32 = 42;

#[repr(align(128))]
struct Slot([AtomicU64; WORDS]);

static SLOTS: [Slot; RECORDS] = [const { Slot([const { AtomicU64::new(0) }; WORDS]) }; RECORDS];
/// The slot that is replaced next.
static NEXT: Mutex<usize> = Mutex::new(0);

/// Where a record is: a process of this node, and an address in its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place(pub(super) u64);

/// What a record says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    /// Where the allocation begins at its owner, and its length, bytes.
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) handle: IpcHandle,
}

impl Place {
    fn of(slot: &Slot) -> Self {
        let addr = (&raw const slot.0).expose_provenance() as u64;
        Self(((process::pid() as u64) << ADDRESS_BITS) | (addr / ALIGN))
    }

    pub(super) fn pid(self) -> i32 {
        (self.0 >> ADDRESS_BITS) as i32
    }

    fn address(self) -> u64 {
        (self.0 & ((1 << ADDRESS_BITS) - 1)) * ALIGN
    }

    /// Reads the record. Errors: those of the attach; ESTALE: it is not there any more, or the place is none of a process
    /// that this one sees by that id.
    pub(super) fn read(self, tag: u64) -> Result<Record, Errno> {
        let words: [u64; WORDS] = cma::words(self.pid(), self.address())?;
        let [first, start, len, h0, h1, h2, h3, h4, h5, h6, h7, last] = words;
        // A record is replaced from one end to the other: both ends say that the middle is the tag's.
        if first != tag || last != tag {
            return Err(Errno(libc::ESTALE));
        }
        let handle = IpcHandle([h0, h1, h2, h3, h4, h5, h6, h7]);
        Ok(Record { start, len, handle })
    }
}

/// Names an allocation among all that processes of this node have had: BUFFER_ID counts from a number drawn at random.
fn tag_of(id: u64) -> u64 {
    static FIRST: OnceLock<u64> = OnceLock::new();
    FIRST.get_or_init(random_u64).wrapping_add(id)
}

/// Publishes the allocation that has the address, unless it is published. Its place, its tag, and the address within it.
/// Failures: those of the driver; of memory without a handle, too.
pub(super) fn publish(addr: u64) -> Result<(Place, u64, u64), Failure> {
    const NONE: Failure = Failure(1);
    let cuda = Cuda::get().ok_or(NONE)?;
    let found = cuda.find(addr).ok_or(NONE)?;
    let tag = tag_of(found.id);
    let place = publish_as(tag, &found, || cuda.export(&found))?;
    Ok((place, tag, addr - found.start))
}

fn publish_as(
    tag: u64,
    found: &Allocation,
    export: impl FnOnce() -> Result<IpcHandle, Failure>,
) -> Result<Place, Failure> {
    let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
    let known = |slot: &&Slot| {
        let [first, ..] = &slot.0;
        first.load(Ordering::Relaxed) == tag
    };
    if let Some(slot) = SLOTS.iter().find(known) {
        return Ok(Place::of(slot));
    }
    let handle = export()?;
    let Some(slot) = SLOTS.get(*next % RECORDS) else { return Err(Failure(1)) };
    *next += 1;
    slot.fill(tag, [found.start, found.len as u64], handle);
    Ok(Place::of(slot))
}

impl Slot {
    /// Peers may read it meanwhile: the middle changes only while the ends have no tag.
    fn fill(&self, tag: u64, [start, len]: [u64; 2], IpcHandle(handle): IpcHandle) {
        let [first, middle @ .., last] = &self.0;
        for end in [first, last] {
            end.store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        for (to, from) in middle.iter().zip([start, len].into_iter().chain(handle)) {
            to.store(from, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        for end in [last, first] {
            end.store(tag, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_where_its_key_says() {
        let handle = IpcHandle([1, 2, 3, 4, 5, 6, 7, 8]);
        let tags = [tag_of(1), tag_of(2)];
        let publish = |tag: u64, start: u64| {
            let found = Allocation::test(start, 4096);
            publish_as(tag, &found, || Ok(handle)).unwrap()
        };
        let [one, other] = [publish(tags[0], 100), publish(tags[1], 200)];
        assert_eq!(one.pid(), process::pid());
        assert_eq!(one.read(tags[0]), Ok(Record { start: 100, len: 4096, handle }));
        assert_eq!(other.read(tags[1]).map(|record| record.start), Ok(200));
        assert_eq!(one.read(tags[1]), Err(Errno(libc::ESTALE)), "not the record of that tag");
        let exported = |found: &Allocation| publish_as(tags[0], found, || panic!("a second time"));
        assert_eq!(exported(&Allocation::test(100, 4096)), Ok(one));
        // Many allocations later its record is another's.
        (0..RECORDS as u64).for_each(|n| _ = publish(tag_of(1000 + n), n));
        assert_eq!(one.read(tags[0]), Err(Errno(libc::ESTALE)));
    }

    #[test]
    fn memory_without_a_handle_is_not_published() {
        let found = Allocation::test(0, 1);
        assert_eq!(publish_as(tag_of(99), &found, || Err(Failure(801))), Err(Failure(801)));
        assert!(SLOTS.iter().all(|slot| slot.0[0].load(Ordering::Relaxed) != tag_of(99)));
    }
}
