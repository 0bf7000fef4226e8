//! The allocations of other processes that this process has open, which all of its endpoints share: to open one costs as
//! much as many copies.
//!
//! An allocation of a pool is open during accesses only, because its owner must not free it while others have it open. The pool
//! stays open, so that its owner is asked for a descriptor once.

use super::door::{Answer, Asked};
use super::published::{Foreign, Place, Record};
use crate::memory::mover::{Import, Site};
use crate::sys::cuda::{Failure, Kind, Part};
use crate::sys::per_process::PerProcess;
use crate::sys::{Errno, clock};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, MutexGuard};

/// CUDA_ERROR_ALREADY_MAPPED: an older allocation at the owner's addresses is still open here.
const ALREADY_MAPPED: Failure = Failure(208);
/// An access waits this long for the end of another allocation, nanoseconds, and is then refused.
const PATIENCE_NS: u64 = 300_000_000;
/// A longer pause between two looks counts as this one, nanoseconds: the closer may have had no processor meanwhile either.
const PAUSE_NS: u64 = 1_000_000;
/// One that was not used for this time is closed, nanoseconds.
const UNUSED_NS: u64 = 5_000_000_000;
/// Pools of one process that are open at most.
const POOLS_MAX: usize = 4;

/// Why there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    /// As many as may are open and in use, one has to be closed before, or the owner has not answered yet.
    NotYet,
    /// One that has to be closed before is not closed for long: that waits for the application's kernels.
    Busy,
    /// The record could not be read.
    Record(Errno),
    /// The driver does not open it, or does not copy.
    Driver(Failure),
    /// The driver does not open it, which has no handle, or gives its owner no descriptor. That says nothing of memory that has one.
    Descriptor(Failure),
}

/// An allocation of another process: where its record is, and its tag. Or a pool: [`Place::of_pools`], and its number.
pub(super) type Name = (Place, u64);

/// The kinds of imports, by how long they stay open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sort {
    /// An allocation, for later accesses too.
    Memory,
    /// An allocation of a pool, during accesses.
    OfPool,
    /// A pool.
    Pool,
}

/// Addresses of an allocation at its owner.
#[derive(Clone, Copy, Debug)]
struct Extent {
    start: u64,
    len: u64,
}

impl Extent {
    fn overlaps(&self, other: &Self) -> bool {
        let end = |extent: &Self| extent.start.saturating_add(extent.len);
        self.start < end(other) && other.start < end(self)
    }
}

/// One that is open, in the context of a site.
#[derive(Debug)]
struct Entry<T> {
    name: Name,
    site: Site,
    extent: Extent,
    open: Arc<T>,
    /// When it was last used, nanoseconds. A pool and memory of it may be used at once, and no other two.
    used_ns: u64,
    sort: Sort,
}

impl<T> Entry<T> {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.open) == 1
    }

    fn pid(&self) -> i32 {
        self.name.0.pid()
    }
}

/// One that the [`closer`](super::closer) closes once no copy uses it.
#[derive(Debug)]
struct Closing<T> {
    number: u64,
    pid: i32,
    extent: Extent,
    /// `None`: it is at that.
    open: Option<Arc<T>>,
    sort: Sort,
    /// How long accesses have waited for its end, nanoseconds.
    waited_ns: u64,
}

#[derive(Debug)]
pub(super) struct Imports<T> {
    entries: Vec<Entry<T>>,
    closing: Vec<Closing<T>>,
    /// The number of the last one of those.
    last: u64,
    /// There is something to close, or the closer ends.
    changed: Arc<Condvar>,
    /// The last time of use, and when an access last waited.
    now_ns: u64,
    waited_at_ns: u64,
    /// For which others were closed, because the driver had something at its addresses.
    in_the_way: Option<Name>,
    /// The descriptors that owners were asked for.
    asked: Vec<Question>,
}

/// A question for the descriptor of an allocation, or of its pool.
#[derive(Debug)]
struct Question {
    name: Name,
    /// The number of the pool; 0: none.
    pool: u64,
    asked: Asked,
}

static IMPORTS: PerProcess<Imports<Import>> = PerProcess::new();

/// Those of this process.
pub(super) fn of_process() -> MutexGuard<'static, Imports<Import>> {
    IMPORTS.lock()
}

impl Imports<Import> {
    /// The allocation, opened now if it is not, and by a descriptor only if `opens`. At most `most` are open.
    pub(super) fn get(
        &mut self,
        (name, table): (Name, &Foreign),
        (site, opens): (Site, bool),
        most: usize,
    ) -> Result<Arc<Import>, Refusal> {
        if let Some(open) = self.known(name, site) {
            return Ok(open);
        }
        let (place, tag) = name;
        let record = table.read(place, tag).map_err(Refusal::Record)?;
        let Record { start, len, handle, kind, .. } = record;
        if kind != Kind::Handle && !opens {
            return Err(Refusal::Record(Errno(libc::ESTALE)));
        }
        let extent = Extent { start, len };
        // Before its owner is asked for a descriptor, which may be for nothing.
        self.make_way((name, &extent), most)?;
        let pool;
        let (part, sort) = match kind {
            Kind::Handle => (Part::Handle(handle), Sort::Memory),
            Kind::Mapped => (Part::Mapped(self.descriptor(name, &record)?), Sort::Memory),
            Kind::Pool => {
                pool = self.pool(name, &record, site)?;
                (Part::OfPool(pool.handle(), handle), Sort::OfPool)
            }
        };
        let what = (name, site, extent, sort);
        let added = self.add(what, || Import::open(site, &part, len as usize));
        added.map_err(|refusal| match refusal {
            Refusal::Driver(failure) if kind != Kind::Handle => {
                let its_pool = (place.of_pools(), record.pool);
                self.entries.retain(|entry| entry.name != its_pool);
                Refusal::Descriptor(failure)
            }
            refusal => refusal,
        })
    }

    fn known(&mut self, name: Name, site: Site) -> Option<Arc<Import>> {
        let found = self.find(name, site)?;
        if found.exists() {
            return Some(found);
        }
        // A context that has ended has closed what was open in it.
        self.entries.retain(|entry| entry.open.exists());
        None
    }

    /// The pool of an allocation.
    fn pool(&mut self, name: Name, record: &Record, site: Site) -> Result<Arc<Import>, Refusal> {
        let its_name = (name.0.of_pools(), record.pool);
        if let Some(open) = self.known(its_name, site) {
            return Ok(open);
        }
        let part = Part::Pool(self.descriptor(name, record)?);
        let pool = Arc::new(Import::open(site, &part, 0).map_err(Refusal::Descriptor)?);
        if record.pool != 0 {
            self.keep_pool(its_name, site, Arc::clone(&pool));
        }
        Ok(pool)
    }

    /// The descriptor of an allocation, or of its pool, which its owner is asked for. The question may be that of another
    /// allocation of the pool.
    fn descriptor(&mut self, name: Name, record: &Record) -> Result<OwnedFd, Refusal> {
        let ((place, tag), pool) = (name, record.pool);
        self.asked.retain(|question| question.name == name || !question.asked.is_over());
        let serves = |question: &Question| {
            let of_pool = question.name.0.pid() == place.pid() && question.pool == pool;
            question.name == name || pool != 0 && of_pool
        };
        let Some(at) = self.asked.iter().position(serves) else {
            match Asked::new(place.pid(), record.door, place.number(), tag) {
                Ok(asked) => {
                    self.asked.push(Question { name, pool, asked });
                    // The closer forgets it if nobody comes for the answer.
                    self.wake();
                }
                Err(errno) if errno.is_would_block() => {}
                // By the host, this time.
                Err(errno) if errno.is_shortage() => {
                    return Err(Refusal::Record(Errno(libc::ESTALE)));
                }
                Err(errno) => return Err(Refusal::Record(errno)),
            }
            return Err(Refusal::NotYet);
        };
        let question = self.asked.swap_remove(at);
        match question.asked.answer() {
            Answer::NotYet => {
                self.asked.push(question);
                Err(Refusal::NotYet)
            }
            Answer::Descriptor(fd) => Ok(fd),
            // The other allocation is freed.
            _ if question.name != name => Err(Refusal::NotYet),
            Answer::Refused(failure) => Err(Refusal::Descriptor(failure)),
            // The owner may only have been stopped for long.
            Answer::Lost => Err(Refusal::Record(Errno(libc::ESTALE))),
        }
    }
}

impl<T> Default for Imports<T> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            closing: Vec::new(),
            last: 0,
            changed: Arc::default(),
            now_ns: 0,
            waited_at_ns: 0,
            in_the_way: None,
            asked: Vec::new(),
        }
    }
}

impl<T> Imports<T> {
    fn find(&mut self, name: Name, site: Site) -> Option<Arc<T>> {
        self.now_ns = clock::now_ns().max(self.now_ns + 1);
        let is = |entry: &&mut Entry<T>| entry.name == name && entry.site == site;
        let entry = self.entries.iter_mut().find(is)?;
        entry.used_ns = self.now_ns;
        Some(Arc::clone(&entry.open))
    }

    /// Closes what has to be closed before another one is opened.
    fn make_way(&mut self, (name, extent): (Name, &Extent), most: usize) -> Result<(), Refusal> {
        let pid = name.0.pid();
        // The owner has freed what it had at these addresses before.
        self.close(|old| old.name != name && old.pid() == pid && old.extent.overlaps(extent));
        let overlaps = |old: &&Closing<T>| old.pid == pid && old.extent.overlaps(extent);
        if let Some(old) = self.closing.iter().find(overlaps).map(|old| old.number) {
            return Err(self.wait(old));
        }
        let memory = self.entries.iter().filter(|entry| entry.sort != Sort::Pool);
        if memory.count() + self.closing.len() >= most.max(1) {
            if self.closing.is_empty() {
                self.close_oldest();
            }
            return Err(self.wait_for_any());
        }
        Ok(())
    }

    fn add(
        &mut self,
        (name, site, extent, sort): (Name, Site, Extent, Sort),
        mut open: impl FnMut() -> Result<T, Failure>,
    ) -> Result<Arc<T>, Refusal> {
        let mut opened = open();
        if opened.as_ref().err() == Some(&ALREADY_MAPPED) && self.in_the_way != Some(name) {
            self.close(Entry::is_idle);
            self.in_the_way = Some(name);
            if self.closing.is_empty() {
                // All are in use. The driver may have closed one late.
                opened = open();
            }
        }
        if opened.as_ref().err() == Some(&ALREADY_MAPPED) && !self.closing.is_empty() {
            return Err(self.wait_for_any());
        }
        self.in_the_way = self.in_the_way.filter(|other| *other != name || opened.is_err());
        let open = Arc::new(opened.map_err(Refusal::Driver)?);
        self.keep((name, site, extent, sort), Arc::clone(&open));
        // The closer looks from now on how long it is unused.
        self.wake();
        Ok(open)
    }

    fn keep(&mut self, (name, site, extent, sort): (Name, Site, Extent, Sort), open: Arc<T>) {
        self.entries.push(Entry { name, site, extent, open, used_ns: self.now_ns, sort });
    }

    /// Keeps a pool. The one of its process that was not used for longest gives way, at once: that waits for nothing.
    fn keep_pool(&mut self, name: Name, site: Site, open: Arc<T>) {
        let is = |entry: &Entry<T>| entry.sort == Sort::Pool && entry.pid() == name.0.pid();
        let used: Vec<_> =
            self.entries.iter().filter(|entry| is(entry)).map(|entry| entry.used_ns).collect();
        let oldest = used.iter().min().filter(|_| used.len() >= POOLS_MAX);
        self.entries.retain(|entry| !(is(entry) && Some(&entry.used_ns) == oldest));
        self.keep((name, site, Extent { start: 0, len: 0 }, Sort::Pool), open);
    }

    /// The answer to an access that has to wait for the end of one, and of that which the closer is at.
    fn wait(&mut self, number: u64) -> Refusal {
        let waited_ns = (self.now_ns - self.waited_at_ns).min(PAUSE_NS);
        self.waited_at_ns = self.now_ns;
        let mut is_busy = false;
        for one in self.closing.iter_mut().filter(|one| one.number == number || one.open.is_none())
        {
            one.waited_ns += waited_ns;
            is_busy |= one.waited_ns > PATIENCE_NS;
        }
        if is_busy { Refusal::Busy } else { Refusal::NotYet }
    }

    fn wait_for_any(&mut self) -> Refusal {
        let first = self.closing.first().map(|one| one.number);
        first.map_or(Refusal::NotYet, |first| self.wait(first))
    }

    /// Gives those for which `is` holds to the closer. Memory of pools is closed here, now or by [`Self::release`]: before the
    /// owner learns that an access has ended.
    fn close(&mut self, is: impl Fn(&Entry<T>) -> bool) {
        let (closing, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.entries).into_iter().partition(is);
        self.entries = kept;
        let left = |entry: &Entry<T>| entry.sort != Sort::OfPool || !entry.is_idle();
        for entry in closing.into_iter().filter(left) {
            self.last += 1;
            self.closing.push(Closing {
                number: self.last,
                pid: entry.pid(),
                extent: entry.extent,
                sort: entry.sort,
                open: Some(entry.open),
                waited_ns: 0,
            });
        }
        if !self.closing.is_empty() {
            self.wake();
        }
    }

    /// Wakes the closer.
    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// What the closer waits for.
    pub(super) fn changed(&self) -> Arc<Condvar> {
        Arc::clone(&self.changed)
    }

    fn close_oldest(&mut self) {
        let can = |entry: &&Entry<T>| entry.is_idle() && entry.sort != Sort::Pool;
        let oldest = self.entries.iter().filter(can).map(|entry| entry.used_ns).min();
        self.close(|entry| can(&entry) && Some(entry.used_ns) == oldest);
    }

    /// Gives all that no access uses to the closer.
    pub(super) fn close_idle(&mut self) {
        self.close(Entry::is_idle);
    }

    /// Closes those of pools that no access uses: before the owner learns that an access has ended.
    pub(super) fn release(&mut self) {
        self.entries.retain(|entry| entry.sort != Sort::OfPool || !entry.is_idle());
        let is_used = |open: &Arc<T>| Arc::strong_count(open) > 1;
        self.closing
            .retain(|one| one.sort != Sort::OfPool || one.open.as_ref().is_some_and(is_used));
        if !self.closing.is_empty() {
            self.wake();
        }
    }

    /// Gives the closer those that no access has used for long, and forgets answers for which none has come: the memory of their
    /// owners is in use as long.
    pub(super) fn expire(&mut self, now_ns: u64) {
        self.now_ns = now_ns.max(self.now_ns);
        self.asked.retain(|question| !question.asked.is_over());
        self.close(|entry| entry.is_idle() && now_ns > entry.used_ns + UNUSED_NS);
    }

    /// The next one to be dropped, without the lock, and its number, for which [`Self::closed`] is called then.
    pub(super) fn next_to_close(&mut self) -> Option<(u64, Arc<T>)> {
        let is = |one: &&mut Closing<T>| {
            one.sort != Sort::OfPool
                && one.open.as_ref().is_some_and(|open| Arc::strong_count(open) == 1)
        };
        let one = self.closing.iter_mut().find(is)?;
        Some((one.number, one.open.take()?))
    }

    pub(super) fn closed(&mut self, number: u64) {
        self.closing.retain(|one| one.number != number);
    }

    pub(super) fn are_none(&self) -> bool {
        self.entries.is_empty() && self.closing.is_empty() && self.asked.is_empty()
    }

    /// Closes those of a process that are idle: an endpoint of it, or of one that had its id, has departed.
    pub(super) fn forget(&mut self, pid: i32) {
        self.asked.retain(|question| question.name.0.pid() != pid);
        self.close(|entry| entry.pid() == pid && entry.is_idle());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::mover::DOUBLE;
    use crate::sys::per_process::tests::in_child;
    use std::cell::RefCell;
    use std::collections::HashSet;
    use std::sync::Mutex;

    /// The driver: the names that are open.
    type Driver<'a> = &'a RefCell<HashSet<u64>>;

    struct Mapping<'a>(Driver<'a>, u64);

    impl Drop for Mapping<'_> {
        fn drop(&mut self) {
            assert!(self.0.borrow_mut().remove(&self.1), "closed once");
        }
    }

    fn name(pid: u64, tag: u64) -> Name {
        (Place(pid << 32 | 1), tag)
    }

    /// What the closer does.
    fn close_all<T>(imports: &mut Imports<T>) {
        while let Some((number, open)) = imports.next_to_close() {
            drop(open);
            imports.closed(number);
        }
    }

    /// Opens it, again if others have to be closed before.
    fn open<'a>(
        imports: &mut Imports<Mapping<'a>>,
        driver: Driver<'a>,
        what: (Name, u64),
        most: usize,
    ) -> Result<Arc<Mapping<'a>>, Refusal> {
        let first = open_at_once(imports, driver, what, most);
        if first.is_ok() || imports.closing.is_empty() {
            return first;
        }
        close_all(imports);
        open_at_once(imports, driver, what, most)
    }

    fn open_at_once<'a>(
        imports: &mut Imports<Mapping<'a>>,
        driver: Driver<'a>,
        (name, start): (Name, u64),
        most: usize,
    ) -> Result<Arc<Mapping<'a>>, Refusal> {
        if let Some(open) = imports.find(name, DOUBLE) {
            return Ok(open);
        }
        let sort = if name.1 % 10 == 9 { Sort::OfPool } else { Sort::Memory };
        let extent = Extent { start, len: 100 };
        imports.make_way((name, &extent), most)?;
        imports.add((name, DOUBLE, extent, sort), || {
            assert!(driver.borrow_mut().insert(name.1), "opened twice");
            Ok(Mapping(driver, name.1))
        })
    }

    #[test]
    fn the_least_recently_used_one_that_is_idle_gives_way() {
        let driver = RefCell::default();
        let mut imports = Imports::default();
        let held = open(&mut imports, &driver, (name(1, 1), 0), 2).unwrap();
        for tag in [2, 3, 1, 3] {
            open(&mut imports, &driver, (name(1, tag), tag * 1000), 2).unwrap();
        }
        assert_eq!(*driver.borrow(), HashSet::from([1, 3]), "1 is in use");
        let other = open(&mut imports, &driver, (name(1, 3), 3000), 2).unwrap();
        assert_eq!(open(&mut imports, &driver, (name(1, 4), 9000), 2).err(), Some(Refusal::NotYet));
        drop((held, other));
        imports.forget(2);
        close_all(&mut imports);
        assert_eq!(driver.borrow().len(), 2);
        imports.forget(1);
        close_all(&mut imports);
        assert!(driver.borrow().is_empty());
    }

    fn keep_pool<T>(imports: &mut Imports<T>, name: Name, pool: T) {
        imports.keep_pool(name, DOUBLE, Arc::new(pool));
    }

    #[test]
    fn pools_stay_open_beside_allocations_and_the_oldest_gives_way_at_once() {
        let driver: RefCell<HashSet<u64>> = RefCell::default();
        let mut imports = Imports::default();
        for number in [101, 102, 103, 104, 101, 105] {
            let name = (Place(1 << 32).of_pools(), number);
            if imports.find(name, DOUBLE).is_none() {
                driver.borrow_mut().insert(number);
                keep_pool(&mut imports, name, Mapping(&driver, number));
            }
        }
        assert_eq!(*driver.borrow(), HashSet::from([101, 103, 104, 105]));
        // They count among none, and give way to none.
        for tag in [1, 2] {
            open(&mut imports, &driver, (name(1, tag), tag * 1000), 1).unwrap();
        }
        assert_eq!(*driver.borrow(), HashSet::from([101, 103, 104, 105, 2]));
        imports.forget(1);
        close_all(&mut imports);
        assert!(driver.borrow().is_empty());
    }

    #[test]
    fn a_pool_that_gives_way_takes_no_memory_with_it() {
        let driver: RefCell<HashSet<u64>> = RefCell::default();
        let mut imports = Imports::default();
        let pool = |number| (Place(1 << 32).of_pools(), number);
        let held = open(&mut imports, &driver, (name(1, 9), 0), 9).unwrap();
        // Used at the same time.
        driver.borrow_mut().insert(101);
        keep_pool(&mut imports, pool(101), Mapping(&driver, 101));
        for number in 102..=105 {
            assert!(imports.find(pool(number), DOUBLE).is_none());
            driver.borrow_mut().insert(number);
            keep_pool(&mut imports, pool(number), Mapping(&driver, number));
        }
        assert_eq!(*driver.borrow(), HashSet::from([9, 102, 103, 104, 105]));
        assert!(imports.find(name(1, 9), DOUBLE).is_some());
        drop((held, imports));
    }

    #[test]
    fn memory_of_pools_is_not_left_to_the_closer() {
        let driver = RefCell::default();
        let mut imports = Imports::default();
        let held = open(&mut imports, &driver, (name(1, 9), 0), 9).unwrap();
        // It is published at another place now.
        let again = ((Place(1 << 32 | 2), 9), 0);
        assert!(matches!(open_at_once(&mut imports, &driver, again, 9), Err(Refusal::NotYet)));
        assert!(imports.next_to_close().is_none());
        drop(held);
        imports.release();
        assert!(driver.borrow().is_empty() && imports.are_none());
        drop(open(&mut imports, &driver, again, 9).unwrap());
        imports.forget(1);
        assert!(driver.borrow().is_empty() && imports.are_none());
    }

    #[test]
    fn an_import_that_is_not_used_for_long_is_closed() {
        let driver = RefCell::default();
        let mut imports = Imports::default();
        let held = open(&mut imports, &driver, (name(1, 1), 0), 9).unwrap();
        open(&mut imports, &driver, (name(1, 2), 1000), 9).unwrap();
        imports.expire(imports.now_ns + UNUSED_NS / 2);
        close_all(&mut imports);
        assert_eq!(driver.borrow().len(), 2);
        imports.expire(imports.now_ns + UNUSED_NS);
        close_all(&mut imports);
        assert_eq!(*driver.borrow(), HashSet::from([1]), "1 is in use");
        drop(held);
        imports.expire(imports.now_ns + 1);
        close_all(&mut imports);
        assert!(imports.are_none());
    }

    #[test]
    fn an_access_waits_briefly_for_one_that_is_not_closed() {
        let driver = RefCell::default();
        let mut imports = Imports::default();
        drop(open(&mut imports, &driver, (name(1, 1), 0), 9).unwrap());
        drop(open(&mut imports, &driver, (name(1, 3), 500), 9).unwrap());
        let try_next = |imports: &mut Imports<_>, tag, start| {
            imports.now_ns += 1_000_000_000;
            open_at_once(imports, &driver, (name(1, tag), start), 9).err()
        };
        assert_eq!(try_next(&mut imports, 2, 50), Some(Refusal::NotYet));
        let (number, closes) = imports.next_to_close().unwrap();
        let looks = (0..1000).find(|_| try_next(&mut imports, 2, 50) == Some(Refusal::Busy));
        let least = (PATIENCE_NS / PAUSE_NS) as usize;
        assert!(looks.is_some_and(|looks| looks + 2 >= least), "{looks:?}: its kernels go on");
        assert_eq!(try_next(&mut imports, 4, 550), Some(Refusal::Busy), "the closer is at another");
        drop(closes);
        imports.closed(number);
        assert_eq!(try_next(&mut imports, 2, 50), None);
    }

    #[test]
    fn the_closer_wakes_when_something_is_open() {
        let imports = Arc::new(Mutex::new((Imports::<()>::default(), false)));
        let theirs = Arc::clone(&imports);
        let closer = std::thread::spawn(move || {
            let mut imports = theirs.lock().unwrap();
            imports.1 = true;
            let changed = imports.0.changed();
            let patience = std::time::Duration::from_secs(20);
            changed.wait_timeout(imports, patience).unwrap().1.timed_out()
        });
        let mut held = imports.lock().unwrap();
        while !held.1 {
            drop(held);
            held = imports.lock().unwrap();
        }
        let what = (name(1, 1), DOUBLE, Extent { start: 0, len: 1 }, Sort::Memory);
        held.0.add(what, || Ok(())).unwrap();
        drop(held);
        assert!(!closer.join().unwrap());
    }

    #[test]
    fn an_answer_that_nobody_fetches_is_forgotten() {
        let mut imports = Imports::<()>::default();
        imports.asked.push(Question { name: name(1, 1), pool: 0, asked: Asked::over() });
        assert!(!imports.are_none(), "the closer looks after it");
        imports.expire(0);
        assert!(imports.are_none());
    }

    #[test]
    fn a_forked_child_waits_for_no_thread_of_its_parent() {
        let mut held = of_process();
        held.now_ns = 7;
        assert!(in_child(|| of_process().now_ns == 0));
    }

    #[test]
    fn an_import_that_its_owner_has_freed_is_closed_before_its_addresses_are_opened_again() {
        let driver = RefCell::default();
        let mut imports = Imports::default();
        let held = open(&mut imports, &driver, (name(1, 1), 1000), 9).unwrap();
        for (pid, tag, start) in [(1, 2, 1100), (2, 3, 1000)] {
            open(&mut imports, &driver, (name(pid, tag), start), 9).unwrap();
        }
        // 4 overlaps 1, which a copy still uses, and 2; 3 is of another process.
        let mut last = || open(&mut imports, &driver, (name(1, 4), 1099), 9).map(drop);
        assert_eq!(last(), Err(Refusal::NotYet));
        assert_eq!(*driver.borrow(), HashSet::from([1, 3]));
        drop(held);
        assert_eq!(last(), Ok(()));
        assert_eq!(*driver.borrow(), HashSet::from([3, 4]));
    }

    #[test]
    fn memory_of_a_pool_is_open_while_accesses_use_it() {
        let driver = RefCell::default();
        let mut imports = Imports::default();
        let use_it = |imports: &mut Imports<_>| open(imports, &driver, (name(1, 9), 0), 9);
        let [one, other] = [(); 2].map(|()| use_it(&mut imports).unwrap());
        open(&mut imports, &driver, (name(1, 1), 1000), 9).unwrap();
        drop(one);
        imports.release();
        assert_eq!(*driver.borrow(), HashSet::from([1, 9]), "another access uses it");
        drop(other);
        imports.release();
        assert_eq!(*driver.borrow(), HashSet::from([1]));
    }

    #[test]
    fn older_openings_that_are_in_the_way_are_closed() {
        let driver = RefCell::default();
        let mut imports = Imports::default();
        open(&mut imports, &driver, (name(1, 1), 0), 9).unwrap();
        let extent = Extent { start: 0, len: 1 };
        let answers = [Err(ALREADY_MAPPED), Ok(())].map(|answer: Result<(), _>| {
            let opened = imports.add((name(2, 2), DOUBLE, extent, Sort::Memory), || {
                answer.map(|()| {
                    driver.borrow_mut().insert(2);
                    Mapping(&driver, 2)
                })
            });
            close_all(&mut imports);
            opened.map(drop)
        });
        assert_eq!(answers, [Err(Refusal::NotYet), Ok(())]);
        assert_eq!(*driver.borrow(), HashSet::from([2]));
        let mut answers = [Err(ALREADY_MAPPED), Ok(Mapping(&driver, 5))].into_iter();
        driver.borrow_mut().insert(5);
        let held = imports.find(name(2, 2), DOUBLE);
        let at_once =
            imports.add((name(5, 5), DOUBLE, extent, Sort::Memory), || answers.next().unwrap());
        assert!(at_once.is_ok() && held.is_some(), "nothing can be closed");
        drop((at_once, held));
        let still = [(); 3].map(|()| {
            let what = (name(4, 4), DOUBLE, extent, Sort::Memory);
            let opened = imports.add(what, || Err(ALREADY_MAPPED)).map(drop);
            close_all(&mut imports);
            opened
        });
        let refused = Err(Refusal::Driver(ALREADY_MAPPED));
        assert_eq!(still, [Err(Refusal::NotYet), refused, refused]);
        let refused = imports
            .add((name(3, 3), DOUBLE, Extent { start: 0, len: 1 }, Sort::Memory), || {
                Err(Failure(217))
            });
        assert_eq!(refused.err(), Some(Refusal::Driver(Failure(217))));
    }

    /// Owners free and allocate at few addresses, copies begin and end, processes go: an allocation is never open twice, and
    /// no more are open than may.
    #[test]
    fn storms_of_allocations_leave_nothing_open() {
        const MOST: usize = 5;
        let (driver, mut state) = (RefCell::default(), 1_u64);
        let mut below = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % n
        };
        let mut imports = Imports::default();
        let mut copies = Vec::new();
        for step in 0..20_000 {
            let (pid, at) = (1 + below(3), below(8));
            match below(10) {
                0 => imports.forget(pid as i32),
                1..4 if !copies.is_empty() => {
                    copies.swap_remove(below(copies.len() as u64) as usize);
                }
                _ => {
                    let tag = (step / 50) * 1000 + pid * 100 + at;
                    match open(&mut imports, &driver, (name(pid, tag), at * 100), MOST) {
                        Ok(open) => copies.push(open),
                        Err(refusal) => assert_eq!(refusal, Refusal::NotYet),
                    }
                    copies.truncate(MOST - 1);
                }
            }
            assert!(imports.entries.len() <= MOST);
            assert!(driver.borrow().len() <= MOST + copies.len());
        }
        drop(copies);
        (1..=3).for_each(|pid| imports.forget(pid));
        close_all(&mut imports);
        assert!(driver.borrow().is_empty());
    }
}
