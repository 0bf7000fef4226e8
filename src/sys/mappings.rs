//! The mappings of this process: from /proc/self/maps, by a query for addresses if the kernel supports it
//! (PROCMAP_QUERY, Linux 6.11), otherwise as text.

use super::cancel::Shield;
use super::errno::{Errno, Result};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// `_IOWR('f', 17, struct procmap_query)`.
const QUERY: libc::Ioctl = 0xc068_6611;
const SHARED: u64 = 0x8;
const COVERING_OR_NEXT: u64 = 0x10;
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

/// One mapping, from `start` up to but excluding `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapping {
    /// Its first address.
    pub(crate) start: usize,
    /// The first address after it.
    pub(crate) end: usize,
    /// Whether it is private anonymous memory. Shared memory belongs to a file even if that has no
    /// name.
    pub(crate) anonymous: bool,
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
        let mut query = Query {
            size: size_of::<Query>() as u64,
            flags: COVERING_OR_NEXT,
            address: address as u64,
            ..Query::default()
        };
        // SAFETY: the argument is what PROCMAP_QUERY takes; no name is asked for.
        if unsafe { libc::ioctl(self.maps.as_raw_fd(), QUERY, &raw mut query) } == 0 {
            let file = query.inode != 0 || query.device != [0, 0] || query.vma_flags & SHARED != 0;
            let (start, end) = (query.start as usize, query.end as usize);
            return Ok(Some(Mapping { start, end, anonymous: !file }));
        }
        match Errno::last() {
            Errno(libc::ENOENT) => Ok(None),
            error => Err(error),
        }
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
        return Mapping { start: 0, end: usize::MAX, anonymous: false };
    };
    let private = fields.next().is_some_and(|flags| flags.ends_with('p'));
    let (device, inode) = (fields.nth(1), fields.next());
    let anonymous = private && device == Some("00:00") && inode == Some("0");
    Mapping { start, end, anonymous }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let anonymous = |line: &str| parse(line).anonymous;
        let heap = parse("1000-9000 rw-p 00000000 00:00 0          [heap]");
        assert_eq!(heap, Mapping { start: 0x1000, end: 0x9000, anonymous: true });
        assert!(anonymous("2000-3000 rw-p 00000000 00:00 0"));
        assert!(!anonymous("3000-9000 rw-s 00000000 00:01 1029       /dev/zero (deleted)"));
        assert!(!anonymous("3000-9000 rw-s 00000000 00:00 0"), "shared");
        assert!(!anonymous("3fff-9000 r-xp 00000000 fd:00 77         /lib/libc.so.6"));
        assert_eq!(parse("rubbish").end, usize::MAX);
    }

    #[test]
    fn both_ways_tell_the_same() {
        let (mappings, text) = (Mappings::open().unwrap(), Mappings::open().unwrap().by_text());
        let code = parse as *const () as usize;
        let local = 0u64;
        let stack = (&raw const local).expose_provenance();
        for (at, anonymous) in [(code, false), (stack, true)] {
            let mut found = [None; 2];
            for (mappings, found) in [&mappings, &text].into_iter().zip(&mut found) {
                mappings.each(at, at + 1, |mapping| *found = Some(mapping)).unwrap();
            }
            assert_eq!(found[0], found[1]);
            let mapping = found[0].unwrap();
            assert!(mapping.start <= at && at < mapping.end);
            assert_eq!(mapping.anonymous, anonymous);
        }
        let mut none = true;
        mappings.each(0, 4096, |_| none = false).unwrap();
        text.each(0, 4096, |_| none = false).unwrap();
        assert!(none, "nothing is at zero");
    }
}
