//! The table in which a process publishes handles of its device memory. A handle does not fit into a remote key, so the key
//! says which record of the owner's table has it, and a peer that does not have the allocation open yet reads it there. The
//! table is shared memory, which peers find by the owner's process id: a process may be forbidden to attach to another one, by
//! Yama or a container, and may open its memory all the same.

use crate::sys::Errno;
use crate::sys::cuda::{Allocation, Cuda, Failure, IpcHandle};
use crate::sys::process::{self, random_u64};
use crate::sys::shared_memory::{self, SharedMemory};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The name of the table among the memory of its process.
const LABEL: &str = "udrv-cuda";
/// Allocations that a process publishes at a time. A key whose record was replaced serves those who have it open.
const RECORDS: usize = 256;
/// Words of a record: its tag; where the allocation begins at its owner, and its length, bytes; the handle; the tag again.
const WORDS: usize = 12;
/// From one record to the next, bytes.
const STRIDE: usize = 128;
const LEN: usize = RECORDS * STRIDE;
/// The bits of a place that are the number of the record; the others are the process id.
const NUMBER_BITS: u32 = 32;

/// The table of this process, with the descriptor by which peers find it.
struct Table {
    memory: SharedMemory,
    _fd: OwnedFd,
    /// The record that is replaced next.
    next: Mutex<usize>,
}

/// Where a record is: a process of this node, and the number of the record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place(pub(super) u64);

/// A record of a table.
struct Slot<'a>(&'a SharedMemory, usize);

/// What a record says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    /// Where the allocation begins at its owner, and its length, bytes.
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) handle: IpcHandle,
}

impl Place {
    fn of(number: usize) -> Self {
        Self(((process::pid() as u64) << NUMBER_BITS) | number as u64)
    }

    pub(super) fn pid(self) -> i32 {
        (self.0 >> NUMBER_BITS) as i32
    }

    /// Reads the record. Errors: ENOENT, and those of /proc, for a table that cannot be found; ESTALE: the record is not there
    /// any more.
    pub(super) fn read(self, tag: u64) -> Result<Record, Errno> {
        let fd = shared_memory::find(self.pid(), LABEL)?;
        let memory = SharedMemory::attach(&fd, LEN)?;
        let number = (self.0 & ((1 << NUMBER_BITS) - 1)) as usize;
        Slot(&memory, number).read(tag).ok_or(Errno(libc::ESTALE))
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
    let found = cuda.find(addr)?.ok_or(NONE)?;
    let tag = tag_of(found.id);
    let place = publish_as(tag, &found, || cuda.export(&found))?;
    Ok((place, tag, addr - found.start))
}

fn publish_as(
    tag: u64,
    found: &Allocation,
    export: impl FnOnce() -> Result<IpcHandle, Failure>,
) -> Result<Place, Failure> {
    const NONE: Failure = Failure(1);
    let table = table().ok_or(NONE)?;
    let mut next = table.next.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = |number| Slot(&table.memory, number);
    if let Some(number) = (0..RECORDS).find(|number| slot(*number).has(tag)) {
        return Ok(Place::of(number));
    }
    let handle = export()?;
    let number = *next % RECORDS;
    *next += 1;
    slot(number).fill(tag, [found.start, found.len as u64], handle);
    Ok(Place::of(number))
}

/// `None`: there is no memory, or no descriptor.
fn table() -> Option<&'static Table> {
    static TABLE: OnceLock<Option<Table>> = OnceLock::new();
    let made = || {
        let (memory, fd) = SharedMemory::create_labelled(LABEL, LEN).ok()?;
        Some(Table { memory, _fd: fd, next: Mutex::new(0) })
    };
    TABLE.get_or_init(made).as_ref()
}

impl Slot<'_> {
    /// Its words. None for a number that no record has.
    fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        let at = self.1.saturating_mul(STRIDE);
        (0..WORDS).filter_map(move |word| self.0.atomic(at.saturating_add(word * size_of::<u64>())))
    }

    fn has(&self, tag: u64) -> bool {
        self.words().next().is_some_and(|first| first.load(Ordering::Relaxed) == tag)
    }

    /// Peers may read it meanwhile: the middle changes only while the ends have no tag.
    fn fill(&self, tag: u64, [start, len]: [u64; 2], IpcHandle(handle): IpcHandle) {
        let ends = || self.words().step_by(WORDS - 1);
        ends().for_each(|end| end.store(0, Ordering::Relaxed));
        fence(Ordering::SeqCst);
        let values = [start, len].into_iter().chain(handle);
        self.words().skip(1).zip(values).for_each(|(to, from)| to.store(from, Ordering::Relaxed));
        fence(Ordering::SeqCst);
        ends().for_each(|end| end.store(tag, Ordering::Relaxed));
    }

    /// `None`: it is not that of the tag, or was replaced meanwhile.
    fn read(&self, tag: u64) -> Option<Record> {
        if !self.has(tag) {
            return None;
        }
        fence(Ordering::SeqCst);
        let mut words = [0; WORDS];
        for (to, from) in words.iter_mut().zip(self.words()) {
            *to = from.load(Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        let [_, start, len, handle @ .., last] = words;
        (last == tag && self.has(tag)).then_some(Record { start, len, handle: IpcHandle(handle) })
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
        let memory = &table().unwrap().memory;
        assert!((0..RECORDS).all(|number| !Slot(memory, number).has(tag_of(99))));
    }
}
