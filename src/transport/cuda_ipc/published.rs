//! The table in which a process publishes handles of its device memory. A handle does not fit into a remote key, so the key
//! says which record of the owner's table has it, and a peer that does not have the allocation open yet reads it there. The
//! table is shared memory, which peers find by the owner's process id: a process may be forbidden to attach to another one, by
//! Yama or a container, and may open its memory all the same.

use super::permits::{self, Permit};
use crate::sys::Errno;
use crate::sys::cuda::{Allocation, Cuda, Failure, IpcHandle};
use crate::sys::process::{self, random_u64};
use crate::sys::shared_memory::{self, SharedMemory};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The name of the table among the memory of its process.
const LABEL: &str = "udrv-cuda";
/// Allocations that a process publishes at a time. A key whose record was replaced serves those who have it open.
const RECORDS: usize = 256;
/// Words of a record: its tag; where the allocation begins at its owner, and its length, bytes; the handle; the tag again.
const WORDS: usize = 12;
/// From one record to the next, bytes.
const STRIDE: usize = 128;
/// Behind the records are the permits.
const PERMITS: usize = RECORDS * STRIDE;
const LEN: usize = PERMITS + permits::LEN;
/// The process id of a place is above these bits.
const PID_SHIFT: u32 = 32;

/// The table of this process, with the descriptor by which peers find it.
struct Table {
    memory: SharedMemory,
    _fd: OwnedFd,
    /// The record that is replaced next.
    next: Mutex<usize>,
    /// The numbers of the permits that nobody has.
    free: Mutex<Vec<u8>>,
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
        Self(((process::pid() as u64) << PID_SHIFT) | number as u64)
    }

    /// The place, with the name of a permit, as one word of a key.
    pub(super) fn with(self, permits::Name { number, generation }: permits::Name) -> u64 {
        self.0 | u64::from(generation) << 16 | u64::from(number) << 8
    }

    /// The two of such a word.
    pub(super) fn and_permit(word: u64) -> (Self, permits::Name) {
        let [_, number, low, high, ..] = word.to_le_bytes();
        let generation = u16::from_le_bytes([low, high]);
        (Self(word & !0xffff_ff00), permits::Name { number, generation })
    }

    pub(super) fn pid(self) -> i32 {
        (self.0 >> PID_SHIFT) as i32
    }

    fn number(self) -> usize {
        (self.0 & ((1 << PID_SHIFT) - 1)) as usize
    }
}

/// The table of another process.
#[derive(Debug)]
pub(super) struct Foreign(SharedMemory);

impl Foreign {
    /// Errors: ENOENT, and those of /proc, for a table that cannot be found, and where /proc is that of other process ids than
    /// this process has: the owner could not tell whether it runs.
    pub(super) fn find(pid: i32) -> Result<Self, Errno> {
        let me = std::fs::read_link("/proc/self");
        if !me.is_ok_and(|me| me.as_os_str() == process::pid().to_string().as_str()) {
            return Err(Errno(libc::ENOENT));
        }
        let fd = shared_memory::find(pid, LABEL)?;
        SharedMemory::attach(&fd, LEN).map(Self)
    }

    /// Errors: ESTALE: the record is not there any more.
    pub(super) fn read(&self, place: Place, tag: u64) -> Result<Record, Errno> {
        Slot(&self.0, place.number()).read(tag).ok_or(Errno(libc::ESTALE))
    }

    pub(super) fn permit(&self, name: permits::Name) -> Option<Permit<'_>> {
        Permit::at(&self.0, PERMITS, name)
    }
}

/// A permit of this process, until it is dropped.
#[derive(Debug)]
pub(super) struct Given(pub(super) permits::Name);

impl Given {
    /// `None`: no more than `spare` are left.
    pub(super) fn new(spare: usize) -> Option<Self> {
        let table = table()?;
        let mut free = locked(&table.free);
        let number = if free.len() > spare { free.pop()? } else { return None };
        Permit::renew(&table.memory, PERMITS, number).map(Self)
    }

    pub(super) fn permit(&self) -> Option<Permit<'static>> {
        Permit::at(&table()?.memory, PERMITS, self.0)
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        if let Some(table) = table() {
            locked(&table.free).push(self.0.number);
        }
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
    let mut next = locked(&table.next);
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `None`: there is no memory, or no descriptor.
fn table() -> Option<&'static Table> {
    static TABLE: OnceLock<Option<Table>> = OnceLock::new();
    let made = || {
        let (memory, fd) = SharedMemory::create_labelled(LABEL, LEN).ok()?;
        let free = Mutex::new((0..permits::COUNT).map(|number| number as u8).collect());
        Some(Table { memory, _fd: fd, next: Mutex::new(0), free })
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
        let table = Foreign::find(process::pid()).unwrap();
        assert_eq!(one.pid(), process::pid());
        assert_eq!(table.read(one, tags[0]), Ok(Record { start: 100, len: 4096, handle }));
        assert_eq!(table.read(other, tags[1]).map(|record| record.start), Ok(200));
        assert_eq!(
            table.read(one, tags[1]),
            Err(Errno(libc::ESTALE)),
            "not the record of that tag"
        );
        let exported = |found: &Allocation| publish_as(tags[0], found, || panic!("a second time"));
        assert_eq!(exported(&Allocation::test(100, 4096)), Ok(one));
        // Many allocations later its record is another's.
        (0..RECORDS as u64).for_each(|n| _ = publish(tag_of(1000 + n), n));
        assert_eq!(table.read(one, tags[0]), Err(Errno(libc::ESTALE)));
    }

    #[test]
    fn a_key_names_a_record_and_a_permit() {
        let table = Foreign::find({
            let _ = super::table();
            process::pid()
        });
        let (table, given) = (table.unwrap(), Given::new(0).unwrap());
        let (place, name) = Place::and_permit(Place::of(200).with(given.0));
        assert_eq!((place, place.number(), name), (Place::of(200), 200, given.0));
        // What a peer does to it is seen here.
        assert!(table.permit(name).unwrap().enter());
        assert!(!given.permit().unwrap().is_unused());
    }

    #[test]
    fn memory_without_a_handle_is_not_published() {
        let found = Allocation::test(0, 1);
        assert_eq!(publish_as(tag_of(99), &found, || Err(Failure(801))), Err(Failure(801)));
        let memory = &table().unwrap().memory;
        assert!((0..RECORDS).all(|number| !Slot(memory, number).has(tag_of(99))));
    }
}
