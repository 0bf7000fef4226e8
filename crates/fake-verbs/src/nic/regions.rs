//! Registered memory, and what a key allows.

use crate::counters::{Counter, count};
use crate::sys;
use crate::verify::{checksum, violation};
use rdma_core_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_RELAXED_ORDERING,
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_access_flags,
};
use std::collections::HashMap;

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
    /// for memory that is not there.
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
        if len > 0 && !(sys::read_memory(addr, &mut byte) && sys::read_memory(last, &mut byte)) {
            return Err(libc::EFAULT);
        }
        // As a device's: an index, and a byte that changes.
        self.last = self.last.wrapping_add(0x0101);
        self.locked += region.locked();
        count(Counter::Registrations);
        self.by_key.insert(self.last, region);
        Ok(self.last)
    }

    pub(super) fn remove(&mut self, key: u32) {
        match self.by_key.remove(&key) {
            Some(region) => {
                self.locked -= region.locked();
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
            place(segment.addr + skip.min(len) as u64, now);
            (skip, rest) = (skip.saturating_sub(len), later);
        }
        if !rest.is_empty() {
            violation("a transfer is longer than the memory of its request");
        }
    }
}

/// Writes memory that the program has lent to a device.
pub(super) fn place(addr: u64, bytes: &[u8]) {
    if !bytes.is_empty() && !sys::write_memory(addr, bytes) {
        violation(&format!("{} bytes at {addr:#x} are registered, and not mapped", bytes.len()));
    }
}

fn read(segments: &[Segment], when: &str) -> Vec<u8> {
    let mut all = Vec::with_capacity(total(segments) as usize);
    for Segment { addr, len, .. } in segments {
        let from = all.len();
        all.resize(from + *len as usize, 0);
        let room = all.get_mut(from..).unwrap_or_default();
        if *len > 0 && !sys::read_memory(*addr, room) {
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
