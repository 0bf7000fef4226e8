//! The table in which a process publishes handles of its device memory. A handle does not fit into a remote key, so the key
//! says which record of the owner's table has it, and a peer that does not have the allocation open yet reads it there. The
//! table is shared memory, which peers find by the owner's process id: a process may be forbidden to attach to another one, by
//! Yama or a container, and may open its memory all the same.

use super::permits::{self, Permit};
use crate::sys::Errno;
use crate::sys::cuda::{Allocation, Cuda, Exported, Failure, IpcHandle, Kind};
use crate::sys::process::{self, random_u64};
use crate::sys::shared_memory::{self, SharedMemory};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The name of the table among the memory of its process.
const LABEL: &str = "udrv-cuda";
/// Allocations that a process publishes at a time. A key whose record was replaced serves peers that have it open.
const RECORDS: usize = 256;
/// Words of a record: its tag; where the allocation begins at its owner, and its length, bytes; the handle; the tag again;
/// its kind; the door where its descriptor is had; the place and tag of the allocation behind it, or 0 and the number of its pool.
const WORDS: usize = 16;
/// The second of its tags.
const AGAIN: usize = 11;
/// From one record to the next, bytes.
const STRIDE: usize = WORDS * size_of::<u64>();
/// Allocations that are remembered for their pools.
const OF_POOLS_MAX: usize = 16;
/// Allocations of one message or region.
pub(super) const PARTS_MAX: usize = 64;
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
    /// The newest last.
    of_pools: Mutex<Vec<OfPool>>,
}

/// An allocation that tells which pool a handle of the driver is. The driver may give the handle to another pool, but not while
/// allocations of the first one are left (cuMemPoolDestroy).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct OfPool {
    handle: u64,
    /// The number by which other processes know the pool.
    number: u64,
    /// Address and BUFFER_ID of the allocation.
    start: u64,
    id: u64,
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
    pub(super) kind: Kind,
    /// The name of the door; 0: the handle is enough.
    pub(super) door: u64,
    /// The allocation that continues it, in messages that go on there.
    pub(super) next: Option<(Place, u64)>,
    /// The number of its pool; 0: it is of none, or that is not known.
    pub(super) pool: u64,
}

const KINDS: [Kind; 3] = [Kind::Handle, Kind::Mapped, Kind::Pool];

impl Record {
    fn of(words: &[u64; WORDS]) -> Option<Self> {
        let [_, start, len, handle @ .., _, kind, door, place, tag] = *words;
        let kind = *KINDS.get(usize::try_from(kind).ok()?)?;
        let (pool, tag) = if kind == Kind::Pool { (tag, 0) } else { (0, tag) };
        let next = (tag != 0).then_some((Place(place), tag));
        Some(Self { start, len, handle: IpcHandle(handle), kind, door, next, pool })
    }

    fn words(&self, tag: u64) -> [u64; WORDS] {
        let Self { start, len, handle: IpcHandle([a, b, c, d, e, f, g, h]), kind, door, .. } =
            *self;
        let kind = KINDS.iter().position(|known| *known == kind).unwrap_or(0) as u64;
        let (Place(place), then) = self.next.unwrap_or((Place(0), self.pool));
        [tag, start, len, a, b, c, d, e, f, g, h, tag, kind, door, place, then]
    }
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

    /// Where the pools of its process are said to be: no record is there.
    pub(super) fn of_pools(self) -> Self {
        Self(self.0 | u64::from(u32::MAX))
    }

    pub(super) fn number(self) -> usize {
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

/// Publishes the allocations that have the `len` bytes at `addr`, unless they are published. The place of the first one, its
/// tag, and the address within it. `door`: the name of the door, or 0 for none. Failures: those of the driver; of memory that
/// other processes cannot open, too.
pub(super) fn publish(
    addr: u64,
    len: usize,
    door: impl FnOnce() -> u64,
) -> Result<(Place, u64, u64), Failure> {
    let cuda = Cuda::get().ok_or(NONE)?;
    let (mut all, mut at) = (Vec::new(), addr);
    while at < addr.saturating_add(len as u64) || all.is_empty() {
        let found = cuda.find(at)?.filter(|found| found.end() > at).ok_or(NONE)?;
        if all.len() == PARTS_MAX {
            return Err(NONE);
        }
        at = found.end();
        all.push(found);
    }
    let door = if all.iter().any(Allocation::is_mapped) { door() } else { 0 };
    let mut next = None;
    // Each names the one behind it.
    for found in all.iter().rev() {
        let tag = tag_of(found.id);
        let export = || {
            let exported = cuda.export(found)?;
            let pool = table().filter(|_| exported.pool != 0);
            let number = pool.map_or(0, |table| {
                let is_there = |of: &OfPool| is_there(cuda, of);
                number_of(&mut locked(&table.of_pools), exported.pool, found, is_there)
            });
            Ok(Exported { pool: number, ..exported })
        };
        next = Some((publish_as(tag, found, (door, next), export)?, tag));
    }
    let (place, tag) = next.ok_or(NONE)?;
    Ok((place, tag, addr - all.first().map_or(addr, |first| first.start)))
}

const NONE: Failure = Failure(1);

fn is_there(cuda: &Cuda, of: &OfPool) -> bool {
    let found = cuda.find(of.start).ok().flatten().filter(|found| found.id == of.id);
    found.is_some_and(|found| cuda.pool_of(&found) == Ok(of.handle))
}

/// The number of the pool that has a handle and `found`: a new one, unless an earlier allocation of it is left.
fn number_of(
    known: &mut Vec<OfPool>,
    handle: u64,
    found: &Allocation,
    is_there: impl Fn(&OfPool) -> bool,
) -> u64 {
    let mut number = None;
    while let Some(at) = known.iter().rposition(|of| of.handle == handle && number.is_none()) {
        let of = known.get(at).copied().filter(|of| is_there(of));
        number = of.map(|of| of.number);
        if of.is_none() {
            known.remove(at);
        }
    }
    let number = number.unwrap_or_else(|| random_u64().max(1));
    if known.len() >= OF_POOLS_MAX {
        known.remove(0);
    }
    known.push(OfPool { handle, number, start: found.start, id: found.id });
    number
}

fn publish_as(
    tag: u64,
    found: &Allocation,
    (door, next): (u64, Option<(Place, u64)>),
    export: impl FnOnce() -> Result<Exported, Failure>,
) -> Result<Place, Failure> {
    let table = table().ok_or(NONE)?;
    let mut turn = locked(&table.next);
    let slot = |number| Slot(&table.memory, number);
    let known = (0..RECORDS).find(|number| slot(*number).has(tag));
    let mut record = match known.and_then(|number| slot(number).read(tag)) {
        Some(record) => record,
        None => {
            let (Exported { kind, handle, pool }, len) = (export()?, found.len as u64);
            Record { start: found.start, len, handle, kind, door: 0, next: None, pool }
        }
    };
    let door = if record.kind == Kind::Handle { 0 } else { door };
    if door == 0 && record.kind != Kind::Handle {
        return Err(NONE);
    }
    // A peer opens this kind for one access alone, and could never have both open.
    if record.kind == Kind::Pool && next.is_some() {
        return Err(Failure::NOT_SUPPORTED);
    }
    let stays = known.is_some() && record.door == door && (next.is_none() || record.next == next);
    let number = known.unwrap_or(*turn % RECORDS);
    *turn += usize::from(known.is_none());
    if !stays {
        (record.door, record.next) = (door, next.or(record.next));
        slot(number).fill(&record.words(tag));
    }
    Ok(Place::of(number))
}

/// The descriptor of an allocation that this process has published, and still has. Failures: those of the driver.
pub(super) fn descriptor(number: usize, tag: u64) -> Result<OwnedFd, Failure> {
    let (cuda, table) = (Cuda::get().ok_or(NONE)?, table().ok_or(NONE)?);
    let record = Slot(&table.memory, number).read(tag).ok_or(NONE)?;
    let found = cuda.find(record.start)?.filter(|found| tag_of(found.id) == tag).ok_or(NONE)?;
    cuda.descriptor(&found)
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
        Some(Table { memory, _fd: fd, next: Mutex::new(0), free, of_pools: Mutex::default() })
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

    /// Peers may read it meanwhile: the other words change only while it has no tag.
    fn fill(&self, words: &[u64; WORDS]) {
        let tags = || self.words().step_by(AGAIN).take(2);
        tags().for_each(|tag| tag.store(0, Ordering::Relaxed));
        fence(Ordering::SeqCst);
        let others = self.words().zip(words).enumerate().filter(|(at, _)| at % AGAIN != 0);
        others.for_each(|(_, (to, from))| to.store(*from, Ordering::Relaxed));
        fence(Ordering::SeqCst);
        let [tag, ..] = *words;
        tags().for_each(|to| to.store(tag, Ordering::Relaxed));
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
        let is_whole = words.get(AGAIN) == Some(&tag) && self.has(tag);
        Record::of(&words).filter(|_| is_whole)
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
            let exported = Exported { kind: Kind::Handle, handle, pool: 0 };
            publish_as(tag, &found, (0, None), || Ok(exported)).unwrap()
        };
        let [one, other] = [publish(tags[0], 100), publish(tags[1], 200)];
        let table = Foreign::find(process::pid()).unwrap();
        assert_eq!(one.pid(), process::pid());
        let (kind, door, next, pool) = (Kind::Handle, 0, None, 0);
        let record = Record { start: 100, len: 4096, handle, kind, door, next, pool };
        assert_eq!(table.read(one, tags[0]), Ok(record));
        assert_eq!(table.read(other, tags[1]).map(|record| record.start), Ok(200));
        assert_eq!(
            table.read(one, tags[1]),
            Err(Errno(libc::ESTALE)),
            "not the record of that tag"
        );
        let exported =
            |found: &Allocation| publish_as(tags[0], found, (0, None), || panic!("a second time"));
        assert_eq!(exported(&Allocation::test(100, 4096)), Ok(one));
        // Many allocations later its record is another's.
        (0..RECORDS as u64).for_each(|n| _ = publish(tag_of(1000 + n), n));
        assert_eq!(table.read(one, tags[0]), Err(Errno(libc::ESTALE)));
    }

    fn exported(kind: Kind, pool: u64) -> Exported {
        Exported { kind, handle: IpcHandle::default(), pool }
    }

    #[test]
    fn a_record_names_its_pool() {
        let found = Allocation::test(61, 4096);
        let tag = tag_of(61);
        let place = publish_as(tag, &found, (7, None), || Ok(exported(Kind::Pool, 99))).unwrap();
        let record = Foreign::find(process::pid()).unwrap().read(place, tag).unwrap();
        assert_eq!((record.kind, record.pool, record.next), (Kind::Pool, 99, None));
        assert!(place.of_pools().pid() == place.pid() && place.of_pools() != place);
    }

    #[test]
    fn a_handle_names_the_pool_of_an_allocation_that_is_left() {
        let mut known = Vec::new();
        let mut number = |start: u64, handle: u64, left: &[u64]| {
            let found = Allocation::test(start, 1);
            number_of(&mut known, handle, &found, |of| left.contains(&of.start))
        };
        let first = number(1, 5, &[]);
        assert_eq!([number(2, 5, &[1]), number(3, 5, &[2])], [first; 2]);
        assert_ne!(number(4, 6, &[1, 2, 3]), first, "another pool");
        assert_eq!(number(7, 5, &[1]), first, "1 is left");
        let second = number(8, 5, &[4]);
        assert_ne!(second, first, "it may have ended, and the handle be another one's");
        assert_eq!(number(9, 5, &[1, 2, 8]), second);
        (10..100).for_each(|start| assert_eq!(number(start, 5, &[start - 1]), second));
        assert!(known.len() <= OF_POOLS_MAX);
    }

    #[test]
    fn a_record_names_what_continues_it() {
        let publish = |tag: u64, door: u64, next: Option<(Place, u64)>| {
            let found = Allocation::test(tag, 4096);
            publish_as(tag, &found, (door, next), || Ok(exported(Kind::Mapped, 0))).unwrap()
        };
        let tags = [51, 52, 53].map(tag_of);
        let [second, third] = [1, 2].map(|at: usize| publish(tags[at], 7, None));
        let first = publish(tags[0], 7, Some((second, tags[1])));
        let table = Foreign::find(process::pid()).unwrap();
        let read =
            || table.read(first, tags[0]).map(|record| (record.kind, record.door, record.next));
        assert_eq!(read(), Ok((Kind::Mapped, 7, Some((second, tags[1])))));
        // A shorter message does not end another one that is on its way.
        assert_eq!(
            (publish(tags[0], 7, None), read().unwrap().2),
            (first, Some((second, tags[1])))
        );
        // Other memory is there by now, and another door.
        assert_eq!(publish(tags[0], 8, Some((third, tags[2]))), first);
        assert_eq!(read(), Ok((Kind::Mapped, 8, Some((third, tags[2])))));
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
        let refused = || Err(Failure(801));
        assert_eq!(publish_as(tag_of(99), &found, (0, None), refused), Err(Failure(801)));
        // Nor is memory whose descriptor nobody could ask for.
        let mapped = || Ok(exported(Kind::Mapped, 0));
        assert_eq!(publish_as(tag_of(99), &found, (0, None), mapped), Err(NONE));
        let memory = &table().unwrap().memory;
        assert!((0..RECORDS).all(|number| !Slot(memory, number).has(tag_of(99))));
    }
}
