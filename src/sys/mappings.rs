//! The mappings of this process: from /proc/self/maps, by a query for addresses if the kernel supports it
//! (PROCMAP_QUERY, Linux 6.11), otherwise as text.

use super::cancel::Shield;
use super::errno::{Errno, Result, check};
use super::process::page_size;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// `_IOWR('f', 17, struct procmap_query)`.
const QUERY: libc::Ioctl = 0xc068_6611;
const SHARED: u64 = 0x8;
const COVERING_OR_NEXT: u64 = 0x10;
/// The name of the file of private anonymous memory with pages of hugetlbfs. It is in a file system that is mounted
/// nowhere, so no other file there has this name.
const HUGE: &str = "/anon_hugepage (deleted)";
/// Most mappings that one call of `each` may visit.
const MOST: usize = 256;

/// `struct procmap_query` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    vma_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

/// What a mapping maps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Memory without a file that any process can open: private anonymous memory, with pages of hugetlbfs too. Only the
    /// process itself can change which pages it has.
    Private,
    /// A shared mapping of a file. Shared memory belongs to a file even if that has no name.
    Shared,
    /// A private mapping of a file.
    Copy,
}

/// One mapping, from `start` up to but excluding `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapping {
    /// Its first address.
    pub(crate) start: usize,
    /// The first address after it.
    pub(crate) end: usize,
    pub(crate) kind: Kind,
}

/// The mappings of this process.
#[derive(Debug)]
pub(crate) struct Mappings {
    maps: File,
    by_text: AtomicBool,
}

impl Mappings {
    /// Opens /proc/self/maps. Errors: ENOENT and others if /proc cannot be read.
    pub(crate) fn open() -> Result<Self> {
        Ok(Self { maps: open()?, by_text: AtomicBool::new(false) })
    }

    /// Makes it use the text, as with an older kernel.
    #[cfg(test)]
    pub(crate) fn by_text(self) -> Self {
        self.by_text.store(true, Ordering::Relaxed);
        self
    }

    /// Calls `show` for each mapping that has an address in `start..end`, in order. Takes about 1 µs for
    /// each, or at least 20 µs in all if the text is read. Errors: those of reading /proc; E2BIG for more
    /// than [`MOST`] mappings.
    pub(crate) fn each(
        &self,
        start: usize,
        end: usize,
        mut show: impl FnMut(Mapping),
    ) -> Result<()> {
        let _shield = Shield::raise();
        let mut at = start;
        for _ in 0..MOST {
            if self.by_text.load(Ordering::Relaxed) {
                let mut text = String::new();
                open()?.read_to_string(&mut text)?;
                let all = text.lines().map(parse);
                all.filter(|m| m.start < end && m.end > at).for_each(show);
                return Ok(());
            }
            match self.query(at) {
                Ok(Some(mapping)) if mapping.start < end => {
                    show(mapping);
                    at = mapping.end;
                }
                Ok(_) => return Ok(()),
                // The text works for any mapping.
                Err(_) => self.by_text.store(true, Ordering::Relaxed),
            }
            if at >= end {
                return Ok(());
            }
        }
        Err(Errno(libc::E2BIG))
    }

    /// The mapping at an address, or the next one. Errors: ENOTTY before Linux 6.11.
    fn query(&self, address: usize) -> Result<Option<Mapping>> {
        let query = match self.ask(address, &mut []) {
            Err(Errno(libc::ENOENT)) => return Ok(None),
            asked => asked?,
        };
        let file = query.inode != 0 || query.device != [0, 0];
        let kind = match query.vma_flags & SHARED != 0 {
            true => Kind::Shared,
            false if !file || self.is_huge(&query) => Kind::Private,
            false => Kind::Copy,
        };
        Ok(Some(Mapping { start: query.start as usize, end: query.end as usize, kind }))
    }

    /// Whether a private mapping is anonymous memory with pages of hugetlbfs, which has a file of its own.
    fn is_huge(&self, found: &Query) -> bool {
        let mut name = [0; HUGE.len() + 1];
        found.page_size > page_size() as u64
            && self
                .ask(found.start as usize, &mut name)
                .is_ok_and(|again| again.start == found.start)
            && name.strip_suffix(&[0]) == Some(HUGE.as_bytes())
    }

    /// Error: ENAMETOOLONG if there is a name for which `name` has no room (and `name` is not empty); else as `query`.
    fn ask(&self, address: usize, name: &mut [u8]) -> Result<Query> {
        let mut query = Query {
            size: size_of::<Query>() as u64,
            flags: COVERING_OR_NEXT,
            address: address as u64,
            name_size: name.len() as u32,
            name: if name.is_empty() { 0 } else { name.as_mut_ptr().expose_provenance() as u64 },
            ..Query::default()
        };
        // SAFETY: the argument is what PROCMAP_QUERY takes, with room for a name as it says.
        check(unsafe { libc::ioctl(self.maps.as_raw_fd(), QUERY, &raw mut query) })?;
        Ok(query)
    }
}

fn open() -> Result<File> {
    Ok(File::open("/proc/self/maps")?)
}

/// Parses a line of proc_pid_maps(5). An unparsable line counts as a file that covers all addresses.
fn parse(line: &str) -> Mapping {
    let mut fields = line.split_ascii_whitespace();
    let range = fields.next().and_then(|range| range.split_once('-'));
    let address = |text| usize::from_str_radix(text, 16);
    let Some((Ok(start), Ok(end))) = range.map(|(from, to)| (address(from), address(to))) else {
        return Mapping { start: 0, end: usize::MAX, kind: Kind::Copy };
    };
    let private = fields.next().is_some_and(|flags| flags.ends_with('p'));
    let (device, inode) = (fields.nth(1), fields.next());
    let kind = match private {
        false => Kind::Shared,
        true if device == Some("00:00") && inode == Some("0") => Kind::Private,
        true if fields.eq(HUGE.split(' ')) => Kind::Private,
        true => Kind::Copy,
    };
    Mapping { start, end, kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let kind = |line: &str| parse(line).kind;
        let heap = parse("1000-9000 rw-p 00000000 00:00 0          [heap]");
        assert_eq!(heap, Mapping { start: 0x1000, end: 0x9000, kind: Kind::Private });
        for (line, expected) in [
            ("2000-3000 rw-p 00000000 00:00 0", Kind::Private),
            ("3000-9000 rw-s 00000000 00:01 1029       /dev/zero (deleted)", Kind::Shared),
            ("3000-9000 rw-s 00000000 00:00 0", Kind::Shared),
            ("3fff-9000 r-xp 00000000 fd:00 77         /lib/libc.so.6", Kind::Copy),
            ("200000-400000 rw-p 00000000 00:11 55  /anon_hugepage (deleted)", Kind::Private),
            ("200000-400000 rw-p 00000000 00:11 55  /memfd:anon_hugepage (deleted)", Kind::Copy),
            ("200000-400000 rw-p 00000000 00:11 55  /anon_hugepage", Kind::Copy),
        ] {
            assert_eq!(kind(line), expected, "{line}");
        }
        assert_eq!(parse("rubbish").end, usize::MAX);
    }

    #[test]
    fn both_ways_tell_the_same() {
        let (mappings, text) = (Mappings::open().unwrap(), Mappings::open().unwrap().by_text());
        let code = parse as *const () as usize;
        let local = 0u64;
        let stack = (&raw const local).expose_provenance();
        for (at, kind) in [(code, Kind::Copy), (stack, Kind::Private)] {
            let mut found = [None; 2];
            for (mappings, found) in [&mappings, &text].into_iter().zip(&mut found) {
                mappings.each(at, at + 1, |mapping| *found = Some(mapping)).unwrap();
            }
            assert_eq!(found[0], found[1]);
            let mapping = found[0].unwrap();
            assert!(mapping.start <= at && at < mapping.end);
            assert_eq!(mapping.kind, kind);
        }
        let mut none = true;
        mappings.each(0, 4096, |_| none = false).unwrap();
        text.each(0, 4096, |_| none = false).unwrap();
        assert!(none, "nothing is at zero");
    }
}
