//! Registered memory, and what a key allows.
//!
//! Memory of a dma-buf is not at the addresses under which it is registered: the program cannot touch it there. The double
//! maps the descriptor itself. What is written to it is late, as on a bus: it is held until a device reads that memory, or
//! the program asks for it (`fake_verbs_flush`, which the double of CUDA calls). The end of the registration, and what is
//! read of other memory, push nothing there.

use crate::counters::{Counter, count};
use crate::sys::{self, Shown};
use crate::verify::{checksum, violation};
use rdma_core_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_RELAXED_ORDERING,
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_access_flags,
};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// A piece of memory of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) key: u32,
}

#[derive(Clone, Copy, Debug)]
struct Region {
    domain: u32,
    addr: u64,
    len: u64,
    access: ibv_access_flags,
    /// The range that peers have written.
    written: Option<(u64, u64)>,
}

impl Region {
    /// Bytes that are locked for it: none if they are paged on demand.
    fn locked(&self) -> u64 {
        if self.access & IBV_ACCESS_ON_DEMAND != 0 { 0 } else { self.len }
    }

    /// Whether peers could write beside what they have written, and nothing else.
    fn is_too_wide(&self) -> bool {
        let whole = (self.addr, self.addr + self.len);
        let reads = self.access & IBV_ACCESS_REMOTE_READ != 0;
        !reads && self.written.is_some_and(|written| written != whole)
    }
}

/// Memory of a GPU.
#[derive(Debug)]
struct Buffer {
    /// The address under which it is registered.
    addr: u64,
    len: u64,
    /// `None`: it was freed, and had been registered by its address.
    shown: Option<Shown>,
    /// It was registered by its address.
    by_address: bool,
    /// Writes that are not in the memory yet.
    held: Vec<(u64, Vec<u8>)>,
}

/// Registrations of dma-bufs by key, of all devices of the process.
static BUFFERS: LazyLock<Mutex<HashMap<u32, Buffer>>> = LazyLock::new(Mutex::default);

/// Those that have ended before what was written to them was there.
static ENDED: LazyLock<Mutex<Vec<Buffer>>> = LazyLock::new(Mutex::default);

fn buffers() -> MutexGuard<'static, HashMap<u32, Buffer>> {
    BUFFERS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ended() -> MutexGuard<'static, Vec<Buffer>> {
    ENDED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Buffer {
    /// Where the double has the bytes of a segment; `None`: they are of other memory.
    fn find(&self, addr: u64, len: usize) -> Option<u64> {
        let at = addr.checked_sub(self.addr).filter(|at| at + len as u64 <= self.len)?;
        if self.shown.is_none() && len > 0 {
            violation(&format!(
                "{len} bytes at {addr:#x} are accessed after they were freed, which ends a registration by nvidia-peermem"
            ));
        }
        self.shown.as_ref().map(|shown| shown.addr() + at)
    }

    fn flush(&mut self) {
        for (at, bytes) in self.held.drain(..) {
            sys::write_memory(at, &bytes);
        }
    }
}

/// What devices have written to memory of dma-bufs is there.
pub(crate) fn flush() {
    ended().drain(..).for_each(|mut buffer| buffer.flush());
    buffers().values_mut().for_each(Buffer::flush);
}

/// Memory is freed: devices lose what they have registered of it by its address, and what they have written there is gone.
pub(crate) fn revoke(addr: u64, len: u64) {
    let mut buffers = buffers();
    let all = buffers.values_mut().filter(|buffer| buffer.by_address);
    for buffer in all.filter(|its| its.addr < addr + len && addr < its.addr + its.len) {
        buffer.held.clear();
        buffer.shown = None;
    }
}

/// What a device wants to do with memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    Read,
    Write,
    RemoteRead,
    RemoteWrite,
}

impl Access {
    fn flag(self) -> ibv_access_flags {
        match self {
            Self::Read => 0,
            Self::Write => IBV_ACCESS_LOCAL_WRITE,
            Self::RemoteRead => IBV_ACCESS_REMOTE_READ,
            Self::RemoteWrite => IBV_ACCESS_REMOTE_WRITE,
        }
    }
}

/// The registrations of this process, by key: the local and the remote key of one are the same number, which is never
/// used again.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    by_key: HashMap<u32, Region>,
    last: u32,
    locked: u64,
}

impl Regions {
    /// Its key. Errors: EINVAL for rights that exclude each other; ENOMEM above `limit` bytes, if that is not 0; EFAULT
    /// for memory that is not there, or cannot be written.
    pub(super) fn add(
        &mut self,
        domain: u32,
        (addr, len): (u64, u64),
        access: ibv_access_flags,
        limit: u64,
    ) -> Result<u32, i32> {
        let remote_write = access & IBV_ACCESS_REMOTE_WRITE != 0;
        if remote_write && access & IBV_ACCESS_LOCAL_WRITE == 0 {
            return Err(libc::EINVAL);
        }
        if access & IBV_ACCESS_RELAXED_ORDERING != 0 && access & IBV_ACCESS_REMOTE_READ != 0 {
            violation("memory that peers read is registered with relaxed ordering");
        }
        let region = Region { domain, addr, len, access, written: None };
        if limit > 0 && self.locked + region.locked() > limit {
            count(Counter::Refusals);
            return Err(libc::ENOMEM);
        }
        let mut byte = [0];
        let last = addr + len.saturating_sub(1);
        let writes = access & IBV_ACCESS_LOCAL_WRITE != 0;
        let mut is_there =
            |at| sys::read_memory(at, &mut byte) && (!writes || sys::is_writable(at));
        if len > 0 && !(is_there(addr) && is_there(last)) {
            return Err(libc::EFAULT);
        }
        Ok(self.insert(region))
    }

    /// The same for `len` bytes of a dma-buf from `offset` on, under the address `addr`. Errors: EINVAL also for an offset
    /// that is elsewhere in its page than the address, and for bytes beyond the end; EBADF. `by_address`: it is no dma-buf, but shows
    /// memory of a GPU that is registered by its address.
    pub(super) fn add_buffer(
        &mut self,
        domain: u32,
        (addr, len): (u64, u64),
        (fd, offset): (BorrowedFd<'_>, u64),
        (access, by_address): (ibv_access_flags, bool),
    ) -> Result<u32, i32> {
        const PAGE: u64 = 4096;
        let remote_write = access & IBV_ACCESS_REMOTE_WRITE != 0;
        let refused = remote_write && access & IBV_ACCESS_LOCAL_WRITE == 0
            || access & IBV_ACCESS_ON_DEMAND != 0
            || len == 0
            || addr % PAGE != offset % PAGE;
        if refused {
            return Err(libc::EINVAL);
        }
        if access & IBV_ACCESS_RELAXED_ORDERING != 0 && access & IBV_ACCESS_REMOTE_READ != 0 {
            violation("memory that peers read is registered with relaxed ordering");
        }
        let shown = Some(Shown::map(fd, offset, len)?);
        // Nothing of it is locked memory of the process.
        let region = Region { domain, addr, len: 0, access, written: None };
        let key = self.insert(region);
        if let Some(region) = self.by_key.get_mut(&key) {
            region.len = len;
        }
        buffers().insert(key, Buffer { addr, len, shown, by_address, held: Vec::new() });
        Ok(key)
    }

    fn insert(&mut self, region: Region) -> u32 {
        // As a device's: an index, and a byte that changes.
        self.last = self.last.wrapping_add(0x0101);
        self.locked += region.locked();
        count(Counter::Registrations);
        self.by_key.insert(self.last, region);
        self.last
    }

    pub(super) fn remove(&mut self, key: u32) {
        match self.by_key.remove(&key) {
            Some(region) => {
                match buffers().remove(&key) {
                    Some(buffer) if buffer.held.is_empty() => {}
                    Some(buffer) => ended().push(buffer),
                    None => self.locked -= region.locked(),
                }
                if region.is_too_wide() {
                    count(Counter::Wide);
                }
            }
            None => violation(&format!("registration {key:#x} is ended twice")),
        }
    }

    /// Peers write this.
    pub(super) fn note_written(&mut self, segment: Segment) {
        let Segment { addr, len, key } = segment;
        let end = addr + u64::from(len);
        if let Some(region) = self.by_key.get_mut(&key) {
            let (first, last) = region.written.unwrap_or((addr, end));
            region.written = Some((first.min(addr), last.max(end)));
        }
    }

    /// Whether any registration is of `domain`.
    pub(super) fn has(&self, domain: u32) -> bool {
        self.by_key.values().any(|region| region.domain == domain)
    }

    /// Why `key` of `domain` does not allow it; `None`: it does.
    pub(super) fn refusal(&self, domain: u32, segment: Segment, access: Access) -> Option<String> {
        let Segment { addr, len, key } = segment;
        let what = format!("{len} bytes at {addr:#x} under key {key:#x} to {access:?}");
        let Some(region) = self.by_key.get(&key) else {
            return Some(format!("{what}: there is no such registration"));
        };
        let end = addr.checked_add(len.into());
        let inside = addr >= region.addr && end.is_some_and(|end| end <= region.addr + region.len);
        if !inside {
            let (from, len) = (region.addr, region.len);
            return Some(format!("{what}: the registration is {len} bytes at {from:#x}"));
        }
        if region.domain != domain {
            return Some(format!("{what}: the registration is of another protection domain"));
        }
        let flag = access.flag();
        (region.access & flag != flag)
            .then(|| format!("{what}: it allows {:#x} only", region.access))
    }

    /// Demands that the local keys of `segments` allow it.
    pub(super) fn demand(&self, domain: u32, segments: &[Segment], access: Access, when: &str) {
        // No byte, no key (InfiniBand 1.7, 10.6.3.1).
        for segment in segments.iter().filter(|segment| segment.len > 0) {
            if let Some(why) = self.refusal(domain, *segment, access) {
                violation(&format!("{when}: {why}"));
            }
        }
    }

    /// The bytes of `segments`, as a device reads them.
    pub(super) fn read(&self, domain: u32, segments: &[Segment], when: &str) -> Vec<u8> {
        self.demand(domain, segments, Access::Read, when);
        read(segments, when)
    }

    /// Writes `bytes` into `segments` from `offset` on, as a device does.
    pub(super) fn write(&self, domain: u32, segments: &[Segment], offset: usize, bytes: &[u8]) {
        self.demand(domain, segments, Access::Write, "at the transfer");
        let (mut skip, mut rest) = (offset, bytes);
        for segment in segments {
            let len = segment.len as usize;
            let room = len.saturating_sub(skip).min(rest.len());
            let Some((now, later)) = rest.split_at_checked(room) else { return };
            let addr = segment.addr + skip.min(len) as u64;
            place(Segment { addr, ..*segment }, now);
            (skip, rest) = (skip.saturating_sub(len), later);
        }
        if !rest.is_empty() {
            violation("a transfer is longer than the memory of its request");
        }
    }
}

/// Writes memory that the program has lent to a device: the bytes at the begin of a segment.
pub(super) fn place(segment: Segment, bytes: &[u8]) {
    let Segment { addr, key, .. } = segment;
    if let Some(buffer) = buffers().get_mut(&key) {
        if let Some(at) = buffer.find(addr, bytes.len()) {
            buffer.held.push((at, bytes.to_vec()));
            if sys::is_ordered() {
                buffer.flush();
            }
            return;
        }
    }
    if !bytes.is_empty() && !sys::write_memory(addr, bytes) {
        violation(&format!("{} bytes at {addr:#x} are registered, and not mapped", bytes.len()));
    }
}

/// Reads the bytes at the begin of a segment. False: some of them are not mapped.
pub(super) fn fetch(segment: Segment, into: &mut [u8]) -> bool {
    let Segment { addr, key, .. } = segment;
    if let Some(buffer) = buffers().get_mut(&key) {
        if let Some(at) = buffer.find(addr, into.len()) {
            buffer.flush();
            return sys::read_memory(at, into);
        }
    }
    sys::read_memory(addr, into)
}

fn read(segments: &[Segment], when: &str) -> Vec<u8> {
    let mut all = Vec::with_capacity(total(segments) as usize);
    for segment in segments {
        let Segment { addr, len, .. } = segment;
        let from = all.len();
        all.resize(from + *len as usize, 0);
        let room = all.get_mut(from..).unwrap_or_default();
        if *len > 0 && !fetch(*segment, room) {
            violation(&format!("{when}: {len} bytes at {addr:#x} are registered, and not mapped"));
        }
    }
    all
}

/// The checksum of what is in `segments`.
pub(super) fn sum_of(segments: &[Segment], when: &str) -> u64 {
    checksum(&read(segments, when))
}

/// Bytes of all of them.
pub(crate) fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_allows_what_was_registered_and_no_more() {
        let memory = vec![1u8; 4096];
        let addr = memory.as_ptr().expose_provenance() as u64;
        let mut regions = Regions::default();
        let key = regions.add(1, (addr, 4096), IBV_ACCESS_REMOTE_READ, 0).unwrap();
        let refusal = |regions: &Regions, domain, from, len, key, access| {
            regions.refusal(domain, Segment { addr: from, len, key }, access)
        };
        assert_eq!(refusal(&regions, 1, addr, 4096, key, Access::RemoteRead), None);
        assert_eq!(refusal(&regions, 1, addr, 4096, key, Access::Read), None);
        for (domain, from, len, key, access, word) in [
            (1, addr, 4097, key, Access::Read, "the registration is"),
            (1, addr - 1, 2, key, Access::Read, "the registration is"),
            (1, u64::MAX, 2, key, Access::Read, "the registration is"),
            (2, addr, 1, key, Access::Read, "another protection domain"),
            (1, addr, 1, key, Access::Write, "allows"),
            (1, addr, 1, key, Access::RemoteWrite, "allows"),
            (1, addr, 1, key + 1, Access::Read, "no such"),
        ] {
            let why = refusal(&regions, domain, from, len, key, access).unwrap();
            assert!(why.contains(word), "{why}");
        }
        regions.remove(key);
        assert!(refusal(&regions, 1, addr, 1, key, Access::Read).is_some());
    }

    #[test]
    fn a_key_that_reaches_beside_what_was_written_is_too_wide() {
        let (whole, part) = ((100, 200), (100, 199));
        for (access, written, wide) in [
            (IBV_ACCESS_REMOTE_WRITE, Some(whole), false),
            (IBV_ACCESS_REMOTE_WRITE, Some(part), true),
            (IBV_ACCESS_REMOTE_WRITE, None, false),
            (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, Some(part), false),
        ] {
            let region = Region { domain: 1, addr: 100, len: 100, access, written };
            assert_eq!(region.is_too_wide(), wide, "{access:#x} {written:?}");
        }
    }

    #[test]
    fn registrations_are_refused_as_the_kernel_does() {
        let memory = vec![1u8; 4096];
        let addr = memory.as_ptr().expose_provenance() as u64;
        let mut regions = Regions::default();
        let errors = [
            regions.add(1, (addr, 4096), IBV_ACCESS_REMOTE_WRITE, 0),
            regions.add(1, (addr, 4096), 0, 4095),
            regions.add(1, (8, 4096), 0, 0),
        ];
        assert_eq!(errors, [Err(libc::EINVAL), Err(libc::ENOMEM), Err(libc::EFAULT)]);
        let constant = "constant".as_ptr().expose_provenance() as u64;
        assert!(regions.add(1, (constant, 8), 0, 0).is_ok());
        assert_eq!(regions.add(1, (constant, 8), IBV_ACCESS_LOCAL_WRITE, 0), Err(libc::EFAULT));
        assert!(regions.add(1, (addr, 4096), IBV_ACCESS_ON_DEMAND, 4095).is_ok(), "not locked");
    }

    #[test]
    #[should_panic(expected = "relaxed ordering")]
    fn memory_that_peers_read_has_a_strict_order() {
        let memory = vec![1u8; 4096];
        let addr = memory.as_ptr().expose_provenance() as u64;
        let mut regions = Regions::default();
        let relaxed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING;
        assert!(regions.add(1, (addr, 4096), relaxed, 0).is_ok());
        let _ = regions.add(1, (addr, 4096), relaxed | IBV_ACCESS_REMOTE_READ, 0);
    }

    #[test]
    fn memory_of_a_descriptor_gets_its_bytes_when_they_are_asked_for() {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileExt;
        const AT: u64 = 0x7000_0000_1000;
        let path = std::env::temp_dir().join(format!("fake-verbs-{}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(8192).unwrap();
        // A key that no other test of this process has.
        let mut regions = Regions { last: 0x7700_0000, ..Regions::default() };
        let mut add = |at, len, offset| {
            let access = (IBV_ACCESS_LOCAL_WRITE, false);
            regions.add_buffer(1, (at, len), (file.as_fd(), offset), access)
        };
        assert_eq!(add(AT + 1, 10, 0), Err(libc::EINVAL), "another place in its page");
        assert_eq!(add(AT, 8193, 0), Err(libc::EINVAL), "beyond the end");
        let key = add(AT, 4096, 4096).unwrap();
        let segment = Segment { addr: AT + 5, len: 3, key };
        let there = || {
            let mut bytes = [0; 3];
            file.read_exact_at(&mut bytes, 4096 + 5).unwrap();
            bytes
        };
        regions.write(1, &[segment], 0, &[1, 2, 3]);
        assert_eq!(there(), [0; 3]);
        flush();
        assert_eq!(there(), [1, 2, 3]);
        regions.write(1, &[segment], 0, &[4, 5, 6]);
        assert_eq!(regions.read(1, &[segment], "now"), [4, 5, 6]);
        assert_eq!(there(), [4, 5, 6], "a device that reads pushes what was written");
        regions.write(1, &[segment], 0, &[7]);
        regions.remove(key);
        assert_eq!(there(), [4, 5, 6], "the end of a registration pushes nothing");
        flush();
        assert_eq!(there(), [7, 5, 6]);
    }

    #[test]
    #[should_panic(expected = "accessed after they were freed")]
    fn memory_that_is_registered_by_its_address_is_lost_when_it_is_freed() {
        use std::os::fd::AsFd;
        const AT: u64 = 0x7100_0000_0000;
        let name = format!("fake-verbs-peer-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(4096).unwrap();
        let mut regions = Regions { last: 0x7600_0000, ..Regions::default() };
        let access = (IBV_ACCESS_LOCAL_WRITE, true);
        let key = regions.add_buffer(1, (AT, 4096), (file.as_fd(), 0), access).unwrap();
        let segment = Segment { addr: AT, len: 1, key };
        regions.write(1, &[segment], 0, &[1]);
        revoke(AT + 4096, 4096);
        assert_eq!(regions.read(1, &[segment], "other memory was freed"), [1]);
        revoke(AT, 1);
        regions.write(1, &[segment], 0, &[1]);
    }

    #[test]
    fn bytes_go_into_the_segments_from_an_offset_on() {
        let mut memory = vec![0u8; 16];
        let addr = memory.as_mut_ptr().expose_provenance() as u64;
        let mut regions = Regions::default();
        let key = regions.add(1, (addr, 16), IBV_ACCESS_LOCAL_WRITE, 0).unwrap();
        let segment = |at, len| Segment { addr: addr + at, len, key };
        regions.write(1, &[segment(0, 3), segment(8, 4)], 2, &[1, 2, 3]);
        let want = [0, 0, 1, 0, 0, 0, 0, 0, 2, 3, 0, 0, 0, 0, 0, 0];
        assert_eq!(regions.read(1, &[segment(0, 16)], "now"), want);
        assert_eq!(memory, want);
    }
}
