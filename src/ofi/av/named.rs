//! Named address vectors: one process fills the vector, other processes of the same user on the node read
//! it (fi_av.3, name and FI_READ).
//!
//! The entries are in a memfd. Its keeper, the process that fills it, holds an abstract socket of the vector's
//! name. Readers learn the keeper's pid from that socket and open the memfd through /proc: the keeper answers no
//! requests, and its death leaves nothing behind. Readers that have mapped the memfd keep the entries. The background
//! thread of the keeper accepts the readers' connections and closes them: the kernel keeps those that nobody accepts,
//! also when the reader has closed its end, and has room for so many only.
//!
//! The memfd consists of 64-bit words. The first four: the magic number, the capacity in entries, the number of
//! entries ever used, the number of changes to used entries. From byte 4096 on each entry has four words: a tag (0 if
//! vacant, else a number that changes with each use), and an address as in PROTOCOL.md §1. Behind the entries is the
//! table that `map_addr` points to: the `fi_addr_t` of each entry.

#![forbid(unsafe_code)]

use crate::sys::event::Watched;
use crate::sys::hub::{self, Rest, Task, Ticket};
use crate::sys::shared_memory::{self, SharedMemory};
use crate::sys::{Errno, clock, process, unix, user};
use crate::telemetry::log;
use crate::transport::Address;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// "UDRVAV" and the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"UDRVAV\x00\x01");
const ENTRIES_AT: usize = 4096;
const ENTRY_LEN: usize = 32;
/// Longest name, bytes: with its prefix it has to fit into a socket address.
const NAME_MAX: usize = 80;
/// Default number of entries of a vector, and the maximum.
const CAPACITY: usize = 16 * 1024;
const CAPACITY_MAX: usize = 1 << 24;

/// Time to the next connection when none can be accepted: no descriptor is left, nanoseconds.
const SHORT_NS: u64 = 100_000_000;

/// The shared memory of a named vector, as its keeper and all readers have mapped it.
#[derive(Debug)]
pub(super) struct Board {
    memory: SharedMemory,
    capacity: usize,
    _keeper: Option<Keeper>,
}

/// What the keeper has beside: its fields are held.
#[derive(Debug)]
struct Keeper {
    _memory: OwnedFd,
    /// The socket that reserves the name.
    _listener: Arc<OwnedFd>,
    /// `None`: there is no thread.
    _ticket: Option<Ticket>,
}

/// The task of the background thread.
struct Porter(Arc<OwnedFd>);

impl Task for Porter {
    fn turn(&mut self) -> Rest {
        loop {
            match unix::accept(self.0.as_fd()) {
                Ok(Some(reader)) => drop(reader),
                Ok(None) => return Rest { until: None, watches: true },
                Err(_) => {
                    return Rest { until: Some(clock::now_ns() + SHORT_NS), watches: false };
                }
            }
        }
    }
}

impl Keeper {
    /// Errors: EADDRINUSE if the name is taken.
    fn begin(label: &str, memory: OwnedFd) -> Result<Self, Errno> {
        let listener = Arc::new(unix::listen(label)?);
        let links: Vec<Watched> = vec![listener.clone()];
        let ticket = hub::add(Box::new(Porter(listener.clone())), links);
        if let Err(e) = &ticket {
            log::info(format_args!(
                "an address vector can be opened a few thousand times only: {e}"
            ));
        }
        Ok(Self { _memory: memory, _listener: listener, _ticket: ticket.ok() })
    }
}

/// The state that a reader has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    pub(super) entries: usize,
    removals: u64,
}

fn label(name: &str) -> Result<String, Errno> {
    if name.is_empty() || name.len() > NAME_MAX || name.contains('\0') {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    Ok(format!("udrv-av/{}/{name}", process::effective_uid()))
}

impl Board {
    /// Creates a vector with room for at least `count` entries. Errors: EADDRINUSE if the name is taken,
    /// ENAMETOOLONG, ENOMEM.
    pub(super) fn create(name: &str, count: usize) -> Result<Self, Errno> {
        let label = label(name)?;
        let capacity = count.saturating_mul(2).clamp(CAPACITY, CAPACITY_MAX);
        let len = ENTRIES_AT + capacity * (ENTRY_LEN + 8);
        let (memory, fd) = SharedMemory::create_labelled(&label, len)?;
        let mut board = Self { memory, capacity, _keeper: None };
        for entry in 0..capacity {
            board.store(board.map_at() + 8 * entry, entry as u64);
        }
        board.store(8, capacity as u64);
        board.store(0, MAGIC);
        // The socket comes last: a reader that finds it finds the memory complete.
        board._keeper = Some(Keeper::begin(&label, fd)?);
        Ok(board)
    }

    /// Opens a vector of another process. Errors: ENOENT, EACCES for another user's, EPROTO for another
    /// version of the layout.
    pub(super) fn open(name: &str) -> Result<Self, Errno> {
        let label = label(name)?;
        let socket = unix::connect(&label).map_err(|e| match e.0 {
            libc::ECONNREFUSED => Errno(libc::ENOENT),
            _ => e,
        })?;
        let keeper = unix::credentials(socket.as_fd())?;
        if !user::is_ours(&keeper) {
            return Err(Errno(libc::EACCES));
        }
        let fd = shared_memory::find(keeper.pid, &label)?;
        let head = SharedMemory::attach(&fd, ENTRIES_AT)?;
        let word = |offset| head.atomic(offset).map_or(0, |word| word.load(Ordering::Acquire));
        if word(0) != MAGIC {
            return Err(Errno(libc::EPROTO));
        }
        let capacity = usize::try_from(word(8)).ok().filter(|n| *n <= CAPACITY_MAX);
        let capacity = capacity.ok_or(Errno(libc::EPROTO))?;
        let memory = SharedMemory::attach(&fd, ENTRIES_AT + capacity * (ENTRY_LEN + 8))?;
        Ok(Self { memory, capacity, _keeper: None })
    }

    fn map_at(&self) -> usize {
        ENTRIES_AT + self.capacity * ENTRY_LEN
    }

    /// Address of the table with the `fi_addr_t` of each entry.
    pub(super) fn map_addr(&self) -> *mut u8 {
        self.memory.base().as_ptr().wrapping_add(self.map_at())
    }

    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        self.memory.atomic(offset)
    }

    fn store(&self, offset: usize, value: u64) {
        if let Some(word) = self.word(offset) {
            word.store(value, Ordering::Release);
        }
    }

    fn load(&self, offset: usize) -> u64 {
        self.word(offset).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Whether this entry is below the capacity.
    pub(super) fn has(&self, entry: usize) -> bool {
        entry < self.capacity
    }

    /// Publishes that an entry has this address, or none. Called by the keeper only.
    pub(super) fn publish(&self, entry: usize, address: Option<&Address>) {
        if !self.has(entry) {
            return;
        }
        let at = ENTRIES_AT + entry * ENTRY_LEN;
        // A concurrent reader notices the change by the tag of the entry, and then by the counts.
        self.store(at, 0);
        match address {
            Some(address) => {
                let wire = address.to_wire();
                for (i, bytes) in wire.chunks_exact(8).enumerate() {
                    let bytes: [u8; 8] = bytes.try_into().unwrap_or_default();
                    self.store(at + 8 * (i + 1), u64::from_le_bytes(bytes));
                }
                // The count of changes differs for each use of an entry, so the tag does too.
                self.store(at, self.load(24) << 1 | 1);
                if entry as u64 >= self.load(16) {
                    self.store(16, entry as u64 + 1);
                } else {
                    self.store(24, self.load(24) + 1);
                }
            }
            None => self.store(24, self.load(24) + 1),
        }
    }

    /// The address of an entry. `None`: vacant, or changing at this moment, which shows in [`Board::progress`]
    /// afterwards.
    pub(super) fn read(&self, entry: usize) -> Option<Address> {
        if !self.has(entry) {
            return None;
        }
        let at = ENTRIES_AT + entry * ENTRY_LEN;
        let used = self.load(at);
        let mut wire = [0; 24];
        for (i, to) in wire.chunks_exact_mut(8).enumerate() {
            to.copy_from_slice(&self.load(at + 8 * (i + 1)).to_le_bytes());
        }
        if used == 0 || self.load(at) != used {
            return None;
        }
        Address::from_wire(&wire)
    }

    /// The state that there is to read.
    #[inline]
    pub(super) fn progress(&self) -> Progress {
        let removals = self.load(24);
        Progress { entries: usize::try_from(self.load(16)).unwrap_or(0), removals }
    }
}

impl Progress {
    /// The first entry that a reader with this state has to read again.
    pub(super) fn first(self, now: Self) -> usize {
        if self.removals == now.removals { self.entries } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> Address {
        Address::from_text(&format!("127.0.0.1:{port}")).unwrap()
    }

    fn name(what: &str) -> String {
        format!("{what}-{}", process::random_u64())
    }

    #[test]
    fn a_reader_sees_what_the_keeper_does() {
        let name = name("board");
        assert_eq!(Board::open(&name).unwrap_err().0, libc::ENOENT);
        let keeper = Board::create(&name, 0).unwrap();
        assert_eq!(Board::create(&name, 0).unwrap_err().0, libc::EADDRINUSE);
        let reader = Board::open(&name).unwrap();
        let begin = reader.progress();
        keeper.publish(0, Some(&address(1)));
        keeper.publish(1, Some(&address(2)));
        assert_eq!((reader.read(0), reader.read(1)), (Some(address(1)), Some(address(2))));
        assert_eq!(reader.read(2), None);
        let now = reader.progress();
        assert_eq!((now.entries, begin.first(now), now.first(now)), (2, 0, 2));
        keeper.publish(0, None);
        assert_eq!((reader.read(0), now.first(reader.progress())), (None, 0));
        keeper.publish(0, Some(&address(3)));
        assert_eq!(reader.read(0), Some(address(3)));
        drop(keeper);
        assert_eq!(Board::open(&name).unwrap_err().0, libc::ENOENT);
        assert_eq!(reader.read(1), Some(address(2)));
    }

    #[test]
    fn a_vector_is_opened_any_number_of_times() {
        let name = name("often");
        let _keeper = Board::create(&name, 0).unwrap();
        let begun = std::time::Instant::now();
        for _ in 0..unix::BACKLOG + 2 {
            // The thread may not have had its turn.
            while let Err(e) = unix::connect(&label(&name).unwrap()) {
                assert!(e.is_would_block() && begun.elapsed().as_secs() < 60, "{e}");
                process::yield_now();
            }
        }
        assert!(Board::open(&name).is_ok());
    }

    #[test]
    fn names_and_entries_are_bounded() {
        assert_eq!(Board::create("", 0).unwrap_err().0, libc::ENAMETOOLONG);
        assert_eq!(Board::open(&"x".repeat(NAME_MAX + 1)).unwrap_err().0, libc::ENAMETOOLONG);
        let keeper = Board::create(&name("bounds"), 0).unwrap();
        assert!(keeper.has(CAPACITY - 1) && !keeper.has(CAPACITY));
        keeper.publish(CAPACITY, Some(&address(1)));
        assert_eq!((keeper.read(CAPACITY), keeper.read(usize::MAX)), (None, None));
        keeper.publish(CAPACITY - 1, Some(&address(1)));
        assert_eq!(keeper.read(CAPACITY - 1), Some(address(1)));
    }

    /// A reader never sees a mixture of two addresses, even if an entry changes all the time.
    #[test]
    fn an_entry_is_one_of_those_it_was() {
        let name = name("race");
        let keeper = Board::create(&name, 0).unwrap();
        let reader = Board::open(&name).unwrap();
        let a = Address::from_text("[2001:db8::aaaa]:43690").unwrap();
        let b = Address::from_text("[fe80::bbbb%7]:48059").unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let until = &stop;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while !until.load(Ordering::Relaxed) {
                    keeper.publish(0, Some(&a));
                    keeper.publish(0, Some(&b));
                    keeper.publish(0, None);
                }
            });
            let mut seen = [0u32; 3];
            for _ in 0..200_000 {
                match reader.read(0) {
                    None => seen[0] += 1,
                    Some(x) if x == a => seen[1] += 1,
                    Some(x) if x == b => seen[2] += 1,
                    Some(other) => panic!("{other}"),
                }
            }
            stop.store(true, Ordering::Relaxed);
            assert!(seen.iter().sum::<u32>() == 200_000);
        });
    }
}
