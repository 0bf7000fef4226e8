//! The allocations of other processes that this process has open, which all of its endpoints share: to open one costs as
//! much as many copies.

use super::door::{Answer, Asked};
use super::published::{Foreign, Place, Record};
use crate::memory::mover::{Import, Site};
use crate::sys::Errno;
use crate::sys::cuda::{Failure, Kind, Part};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// CUDA_ERROR_ALREADY_MAPPED: an older allocation at the owner's addresses is still open here.
const ALREADY_MAPPED: Failure = Failure(208);

/// Why there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    /// As many as may are open and in use, or the owner has not answered yet.
    NotYet,
    /// The record could not be read.
    Record(Errno),
    /// The driver does not open it, or does not copy.
    Driver(Failure),
    /// The driver does not open it, which has no handle, or gives its owner no descriptor. That says nothing of memory that has one.
    Descriptor(Failure),
}

/// An allocation of another process: where its record is, and its tag.
pub(super) type Name = (Place, u64);

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
    used: u64,
    /// It stays open when no access uses it. Memory of a pool does not: its owner must not free it before.
    kept: bool,
}

impl<T> Entry<T> {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.open) == 1
    }

    fn pid(&self) -> i32 {
        self.name.0.pid()
    }
}

#[derive(Debug)]
pub(super) struct Imports<T> {
    entries: Vec<Entry<T>>,
    clock: u64,
    /// The descriptors that owners were asked for.
    asked: Vec<(Name, Asked)>,
}

static IMPORTS: Mutex<Imports<Import>> = Mutex::new(Imports::new());

/// Those of this process.
pub(super) fn of_process() -> MutexGuard<'static, Imports<Import>> {
    IMPORTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Imports<Import> {
    /// The allocation, opened now if it is not, and by a descriptor only if `opens`. At most `most` are open.
    pub(super) fn get(
        &mut self,
        (name, table): (Name, &Foreign),
        (site, opens): (Site, bool),
        most: usize,
    ) -> Result<Arc<Import>, Refusal> {
        match self.find(name, site) {
            Some(open) if open.exists() => return Ok(open),
            // A context that has ended has closed what was open in it.
            Some(_) => self.entries.retain(|entry| entry.open.exists()),
            None => {}
        }
        let (place, tag) = name;
        let record = table.read(place, tag).map_err(Refusal::Record)?;
        let Record { start, len, handle, kind, .. } = record;
        let fd = match kind {
            Kind::Handle => None,
            _ if opens => Some(self.descriptor(name, &record)?),
            _ => return Err(Refusal::Record(Errno(libc::ESTALE))),
        };
        let part = Part { kind, handle, fd, len: len as usize };
        let kept = kind != Kind::Pool;
        let added =
            self.add((name, site, Extent { start, len }, kept), most, || Import::open(site, &part));
        added.map_err(|refusal| match refusal {
            Refusal::Driver(failure) if kind != Kind::Handle => Refusal::Descriptor(failure),
            refusal => refusal,
        })
    }

    /// The descriptor of an allocation, which its owner is asked for.
    fn descriptor(&mut self, name: Name, record: &Record) -> Result<OwnedFd, Refusal> {
        self.asked.retain(|(other, asked)| *other == name || !asked.is_over());
        let Some(at) = self.asked.iter().position(|(other, _)| *other == name) else {
            let (place, tag) = name;
            match Asked::new(place.pid(), record.door, place.number(), tag) {
                Ok(asked) => self.asked.push((name, asked)),
                Err(errno) if errno.is_shortage() || errno.is_would_block() => {}
                Err(errno) => return Err(Refusal::Record(errno)),
            }
            return Err(Refusal::NotYet);
        };
        let answer = self.asked.get(at).map_or(Answer::Lost, |(_, asked)| asked.answer());
        if !matches!(answer, Answer::NotYet) {
            self.asked.swap_remove(at);
        }
        match answer {
            Answer::NotYet => Err(Refusal::NotYet),
            Answer::Descriptor(fd) => Ok(fd),
            Answer::Refused(failure) => Err(Refusal::Descriptor(failure)),
            // The owner may only have been stopped for long.
            Answer::Lost => Err(Refusal::Record(Errno(libc::ESTALE))),
        }
    }
}

impl<T> Imports<T> {
    const fn new() -> Self {
        Self { entries: Vec::new(), clock: 0, asked: Vec::new() }
    }

    fn find(&mut self, name: Name, site: Site) -> Option<Arc<T>> {
        self.clock += 1;
        let is = |entry: &&mut Entry<T>| entry.name == name && entry.site == site;
        let entry = self.entries.iter_mut().find(is)?;
        entry.used = self.clock;
        Some(Arc::clone(&entry.open))
    }

    fn add(
        &mut self,
        (name, site, extent, kept): (Name, Site, Extent, bool),
        most: usize,
        mut open: impl FnMut() -> Result<T, Failure>,
    ) -> Result<Arc<T>, Refusal> {
        let pid = name.0.pid();
        // The owner has freed what it had at these addresses before. Copies from it close it at their end.
        self.entries
            .retain(|old| old.name == name || old.pid() != pid || !old.extent.overlaps(&extent));
        while self.entries.len() >= most.max(1) {
            if !self.close_oldest() {
                return Err(Refusal::NotYet);
            }
        }
        let mut opened = open();
        if opened.as_ref().err() == Some(&ALREADY_MAPPED) {
            self.entries.retain(|old| !old.is_idle());
            opened = open();
        }
        let open = Arc::new(opened.map_err(Refusal::Driver)?);
        let entry = Entry { name, site, extent, open: Arc::clone(&open), used: self.clock, kept };
        self.entries.push(entry);
        Ok(open)
    }

    /// False: all are in use.
    fn close_oldest(&mut self) -> bool {
        let idle = self.entries.iter().enumerate().filter(|(_, entry)| entry.is_idle());
        let Some((at, _)) = idle.min_by_key(|(_, entry)| entry.used) else { return false };
        self.entries.swap_remove(at);
        true
    }

    /// Closes those that no access uses, and that are not kept: before the owner learns that an access has ended.
    pub(super) fn release(&mut self) {
        self.entries.retain(|entry| entry.kept || !entry.is_idle());
    }

    /// Closes those of a process that are idle: an endpoint of it, or of one that had its id, has departed.
    pub(super) fn forget(&mut self, pid: i32) {
        self.asked.retain(|((place, _), _)| place.pid() != pid);
        self.entries.retain(|entry| entry.pid() != pid || !entry.is_idle());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::mover::DOUBLE;
    use std::cell::RefCell;
    use std::collections::HashSet;

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

    fn open<'a>(
        imports: &mut Imports<Mapping<'a>>,
        driver: Driver<'a>,
        (name, start): (Name, u64),
        most: usize,
    ) -> Result<Arc<Mapping<'a>>, Refusal> {
        if let Some(open) = imports.find(name, DOUBLE) {
            return Ok(open);
        }
        let kept = name.1 % 10 != 9;
        imports.add((name, DOUBLE, Extent { start, len: 100 }, kept), most, || {
            assert!(driver.borrow_mut().insert(name.1), "opened twice");
            Ok(Mapping(driver, name.1))
        })
    }

    #[test]
    fn the_least_recently_used_one_that_is_idle_gives_way() {
        let driver = RefCell::default();
        let mut imports = Imports::new();
        let held = open(&mut imports, &driver, (name(1, 1), 0), 2).unwrap();
        for tag in [2, 3, 1, 3] {
            open(&mut imports, &driver, (name(1, tag), tag * 1000), 2).unwrap();
        }
        assert_eq!(*driver.borrow(), HashSet::from([1, 3]), "1 is in use");
        let other = open(&mut imports, &driver, (name(1, 3), 3000), 2).unwrap();
        assert_eq!(open(&mut imports, &driver, (name(1, 4), 9000), 2).err(), Some(Refusal::NotYet));
        drop((held, other));
        imports.forget(2);
        assert_eq!(driver.borrow().len(), 2);
        imports.forget(1);
        assert!(driver.borrow().is_empty());
    }

    #[test]
    fn what_the_owner_has_freed_is_closed_before_its_addresses_are_opened_again() {
        let driver = RefCell::default();
        let mut imports = Imports::new();
        let held = open(&mut imports, &driver, (name(1, 1), 1000), 9).unwrap();
        for (pid, tag, start) in [(1, 2, 1100), (2, 3, 1000), (1, 4, 1099)] {
            open(&mut imports, &driver, (name(pid, tag), start), 9).unwrap();
        }
        // 4 overlaps 1, which a copy still uses, and 2; 3 is of another process.
        assert_eq!(*driver.borrow(), HashSet::from([1, 3, 4]));
        drop(held);
        assert_eq!(*driver.borrow(), HashSet::from([3, 4]));
    }

    #[test]
    fn memory_of_a_pool_is_open_while_accesses_use_it() {
        let driver = RefCell::default();
        let mut imports = Imports::new();
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
        let mut imports = Imports::new();
        open(&mut imports, &driver, (name(1, 1), 0), 9).unwrap();
        let mut answers = [Err(ALREADY_MAPPED), Ok(())].into_iter();
        let opened =
            imports.add((name(2, 2), DOUBLE, Extent { start: 0, len: 1 }, true), 9, || {
                answers.next().unwrap().map(|()| {
                    driver.borrow_mut().insert(2);
                    Mapping(&driver, 2)
                })
            });
        assert!(opened.is_ok() && *driver.borrow() == HashSet::from([2]));
        let refused =
            imports.add((name(3, 3), DOUBLE, Extent { start: 0, len: 1 }, true), 9, || {
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
        let mut imports = Imports::new();
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
        assert!(driver.borrow().is_empty());
    }
}
