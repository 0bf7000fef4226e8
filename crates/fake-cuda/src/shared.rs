//! Memory that is exported by descriptors: cuMemCreate with its addresses, and pools.

use crate::memory::{Allocation, Kind, POSIX_FD, Physical, Pool};
use crate::model::{
    Answer, Handle, INVALID_CONTEXT, INVALID_VALUE, Model, NOT_SUPPORTED, OUT_OF_MEMORY,
};
use crate::sys::{self, Mapping};
use crate::verify::violation;
use std::collections::HashMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// cuMemCreate takes multiples of this, bytes.
pub(crate) const GRANULARITY: usize = 2 << 20;
/// The driver 580.126.20 dies of SIGSEGV at the import of a longer allocation of a pool, bytes.
const POOL_IMPORT_MAX: u64 = 5248 << 20;

/// The handles of both.
#[derive(Default)]
pub(crate) struct Shared {
    physical: HashMap<usize, Arc<Physical>>,
    pools: HashMap<usize, Arc<Pool>>,
    /// Those that were destroyed, with their handles, which others get when nothing of them is left.
    ended: Vec<(usize, Weak<Pool>)>,
    /// The reservations by their begin, with their lengths.
    reserved: HashMap<usize, usize>,
}

impl Model {
    fn keep(&mut self, physical: Arc<Physical>) -> usize {
        let handle = self.fresh() + 0x1000;
        self.shared.physical.insert(handle, physical);
        handle
    }

    pub(crate) fn create(&mut self, len: usize, types: u32, device: i32) -> Answer<usize> {
        let ordinal = self.device(device)?;
        if len == 0 || len % GRANULARITY != 0 {
            return Err(INVALID_VALUE);
        }
        let file = sys::file(len).ok_or(OUT_OF_MEMORY)?;
        let id = self.fresh() as u64;
        Ok(self.keep(Arc::new(Physical { id, file, len, types, ordinal })))
    }

    pub(crate) fn physical(&self, handle: usize) -> Answer<&Arc<Physical>> {
        self.shared.physical.get(&handle).ok_or(INVALID_VALUE)
    }

    pub(crate) fn release_handle(&mut self, handle: usize) -> Answer {
        self.shared.physical.remove(&handle).map(|_| ()).ok_or(INVALID_VALUE)
    }

    /// A handle of what is mapped at an address.
    pub(crate) fn retain_handle(&mut self, addr: usize) -> Answer<usize> {
        match self.find(addr).map(|found| &found.kind) {
            Some(Kind::Mapped(_, physical, ..)) => {
                let physical = Arc::clone(physical);
                Ok(self.keep(physical))
            }
            _ => Err(INVALID_VALUE),
        }
    }

    pub(crate) fn export_handle(&self, handle: usize) -> Answer<OwnedFd> {
        let physical = self.physical(handle)?;
        if physical.types & POSIX_FD == 0 {
            return Err(NOT_SUPPORTED);
        }
        physical.file.try_clone().map_err(|_| OUT_OF_MEMORY)
    }

    /// The device is the one of the current context, or the first.
    pub(crate) fn import_handle(&mut self, file: OwnedFd) -> Answer<usize> {
        let len = sys::len_of(&file).filter(|len| len % GRANULARITY == 0 && *len > 0);
        let len = len.ok_or(INVALID_VALUE)?;
        let ordinal = self.context().map_or(0, |(_, ordinal)| ordinal);
        let id = self.fresh() as u64;
        Ok(self.keep(Arc::new(Physical { id, file, len, types: POSIX_FD, ordinal })))
    }

    pub(crate) fn reserve(&mut self, len: usize) -> Answer<usize> {
        if len == 0 || len % GRANULARITY != 0 {
            return Err(INVALID_VALUE);
        }
        let at = sys::reserve(len).ok_or(OUT_OF_MEMORY)?;
        self.shared.reserved.insert(at, len);
        Ok(at)
    }

    /// Nothing is mapped there.
    pub(crate) fn free_addresses(&mut self, at: usize, len: usize) -> Answer {
        let has = |n: usize| self.find(at + n).is_some();
        if self.shared.reserved.get(&at) != Some(&len) || (0..len).step_by(GRANULARITY).any(has) {
            return Err(INVALID_VALUE);
        }
        self.shared.reserved.remove(&at);
        sys::release(at, len);
        Ok(())
    }

    pub(crate) fn map(&mut self, at: usize, len: usize, handle: usize) -> Answer {
        let physical = Arc::clone(self.physical(handle)?);
        let within = |(begin, size): (&usize, &usize)| *begin <= at && at + len <= begin + size;
        let reservation = self.shared.reserved.iter().find(|&range| within(range));
        let (begin, size) =
            reservation.map(|(begin, size)| (*begin, *size)).ok_or(INVALID_VALUE)?;
        if len != physical.len || at % GRANULARITY != 0 || self.find(at).is_some() {
            return Err(INVALID_VALUE);
        }
        let mapping = Mapping::within(&physical.file, len, at).ok_or(OUT_OF_MEMORY)?;
        let place = (0, physical.ordinal);
        let kind = Kind::Mapped(mapping, physical, AtomicBool::new(false), (begin, size));
        self.add_at(at, len, place, kind);
        Ok(())
    }

    /// The mappings that make up a range; none without gaps is a failure.
    fn mapped(&self, at: usize, len: usize) -> Answer<Vec<Arc<Allocation>>> {
        let (mut all, mut end) = (Vec::new(), at);
        while end < at + len {
            let found = self.find(end).filter(|found| found.is_mapped() && found.base == end);
            let found = found.ok_or(INVALID_VALUE)?;
            end += found.len;
            all.push(Arc::clone(found));
        }
        if end == at + len { Ok(all) } else { Err(INVALID_VALUE) }
    }

    pub(crate) fn unmap(&mut self, at: usize, len: usize) -> Answer {
        for found in self.mapped(at, len)? {
            self.allocations.take(found.base, |_| true);
        }
        Ok(())
    }

    pub(crate) fn set_access(&mut self, at: usize, len: usize, is: bool) -> Answer {
        for found in self.mapped(at, len)? {
            if let Kind::Mapped(_, _, open, _) = &found.kind {
                open.store(is, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    pub(crate) fn create_pool(&mut self, types: u32, device: i32) -> Answer<usize> {
        let ordinal = self.device(device)?;
        let file = sys::file(0).ok_or(OUT_OF_MEMORY)?;
        let owner = (std::process::id(), self.fresh() as u64);
        let mut writer = std::fs::File::from(file.try_clone().map_err(|_| OUT_OF_MEMORY)?);
        let words = [u64::from(owner.0).to_ne_bytes(), owner.1.to_ne_bytes()].concat();
        writer.write_all(&words).map_err(|_| OUT_OF_MEMORY)?;
        Ok(self.keep_pool(Pool { file, owner, types, ordinal, exported: AtomicBool::new(false) }))
    }

    fn keep_pool(&mut self, pool: Pool) -> usize {
        let is_free = |(_, pool): &(usize, Weak<Pool>)| pool.strong_count() == 0;
        let free = self.shared.ended.iter().position(is_free);
        let handle = match free {
            Some(at) => self.shared.ended.swap_remove(at).0,
            None => self.fresh() + 0x1000,
        };
        self.shared.pools.insert(handle, Arc::new(pool));
        handle
    }

    pub(crate) fn pool(&self, handle: usize) -> Answer<&Arc<Pool>> {
        self.shared.pools.get(&handle).ok_or(INVALID_VALUE)
    }

    /// Allocations from it stay.
    pub(crate) fn destroy_pool(&mut self, handle: usize) -> Answer {
        let pool = self.shared.pools.remove(&handle).ok_or(INVALID_VALUE)?;
        self.shared.ended.push((handle, Arc::downgrade(&pool)));
        Ok(())
    }

    pub(crate) fn export_pool(&self, handle: usize) -> Answer<OwnedFd> {
        let pool = self.pool(handle)?;
        if pool.types & POSIX_FD == 0 || pool.owner.0 != std::process::id() {
            return Err(INVALID_VALUE);
        }
        pool.exported.store(true, Ordering::Relaxed);
        pool.file.try_clone().map_err(|_| OUT_OF_MEMORY)
    }

    pub(crate) fn import_pool(&mut self, file: OwnedFd) -> Answer<usize> {
        let mut words = [[0; 8]; 2];
        let reader = std::fs::File::from(file.try_clone().map_err(|_| OUT_OF_MEMORY)?);
        reader.read_exact_at(words.as_flattened_mut(), 0).map_err(|_| INVALID_VALUE)?;
        let [process, number] = words.map(u64::from_ne_bytes);
        let owner = (process as u32, number);
        let ordinal = self.context().map_or(0, |(_, ordinal)| ordinal);
        let exported = AtomicBool::new(false);
        Ok(self.keep_pool(Pool { file, owner, types: POSIX_FD, ordinal, exported }))
    }

    /// `handle`: 0 for the default pool.
    pub(crate) fn allocate_in_pool(&mut self, len: usize, handle: usize) -> Answer<usize> {
        let (_, ordinal) = self.context()?;
        let pool = if handle == 0 { None } else { Some((handle, Arc::clone(self.pool(handle)?))) };
        if pool.as_ref().is_some_and(|(_, pool)| pool.owner.0 != std::process::id()) {
            return Err(INVALID_VALUE);
        }
        let ordinal = pool.as_ref().map_or(ordinal, |(_, pool)| pool.ordinal);
        let mapping = self.bytes(len, false)?;
        Ok(self.add_at(mapping.base, len, (0, ordinal), Kind::Pool(mapping, pool)))
    }

    pub(crate) fn free_in_pool(&mut self, base: usize) -> Answer {
        let right = |kind: &Kind| matches!(kind, Kind::Pool(..) | Kind::OfPool(_));
        self.allocations.take(base, right).map(|_| ()).ok_or(INVALID_VALUE)
    }

    pub(crate) fn import_of_pool(&mut self, handle: usize, what: &Handle) -> Answer<usize> {
        self.context().map_err(|_| INVALID_CONTEXT)?;
        let pool = Arc::clone(self.pool(handle)?);
        if pool.owner != (what.pid, what.pool) {
            violation("a pointer is imported from another pool than its own");
        }
        if what.len > POOL_IMPORT_MAX {
            violation("an allocation of a pool is imported that is longer than a driver survives");
        }
        let place = (0, pool.ordinal);
        let mapping = self.mapping_of(what)?;
        if !mapping.hold() {
            return Err(OUT_OF_MEMORY);
        }
        Ok(self.add_at(mapping.base, what.len as usize, place, Kind::OfPool(mapping)))
    }
}
