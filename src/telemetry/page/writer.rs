//! The page of this process, and which thread writes which part: an endpoint has a record of its own and records of peers, and
//! writes them under its domain's lock.

use super::notes::{self, NOTES, Note};
use super::record::{
    self, ADDRESS, ENDPOINT, ENDPOINT_WORDS, FIRST, NOTE, NOTE_WORDS, PEER, PEER_COUNTS,
    PEER_WORDS, REASON, State, TRANSPORT, packed,
};
use super::{ENDPOINTS, LABEL, LAYOUT, MAGIC, NO_RANK, PEERS};
use crate::sys::cancel::Shield;
use crate::sys::output;
use crate::sys::process::{self, Home};
use crate::sys::shared_memory::SharedMemory;
use crate::telemetry::cause::Cause;
use crate::telemetry::identity::{COMMIT, VERSION};
use crate::telemetry::launcher::Launcher;
use crate::telemetry::level::Level;
use crate::telemetry::soon;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;

/// Where the words of the head are, by number; the module's page describes them.
const MISSED: usize = 12;
const TEXTS: usize = 16;
const TEXT_WORDS: usize = 8;
const NAMES: usize = 64;
/// Bytes of the head, with the names.
const HEAD: usize = 4096;

/// Which records are taken.
#[derive(Debug, Default)]
struct Taken {
    endpoints: [bool; ENDPOINTS],
    peers: Vec<bool>,
    /// Bytes at the beginning of the page that may be touched.
    reserved: usize,
    /// Those for notes may be touched.
    notes: bool,
}

/// The page of this process.
#[derive(Debug)]
struct Page {
    memory: SharedMemory,
    /// Where notes begin, bytes: at a page of memory of its own, which is touched when there are some.
    notes_at: usize,
    /// By which other processes find it.
    _fd: OwnedFd,
    taken: Mutex<Taken>,
    /// A forked child shares the memory, and writes nothing.
    home: Home,
}

/// Where the record of an endpoint begins, bytes.
const fn endpoint_at(number: usize) -> usize {
    HEAD + number * 8 * ENDPOINT_WORDS
}

/// The same of a peer.
const fn peer_at(number: usize) -> usize {
    endpoint_at(ENDPOINTS) + number * 8 * PEER_WORDS
}

impl Page {
    /// `None`: the system gives no memory or no descriptor. Nothing else depends on the page.
    fn make() -> Option<Self> {
        let (endpoint, peer) = (8 * ENDPOINT_WORDS, 8 * PEER_WORDS);
        let peers_at = peer_at(0);
        let notes_at = (peers_at + PEERS * peer).next_multiple_of(process::page_size());
        let note = 8 * NOTE_WORDS;
        let len = (notes_at + NOTES * note).next_multiple_of(process::page_size());
        let (memory, fd) = SharedMemory::create_page(LABEL, len, peers_at).ok()?;
        let taken = Taken { reserved: peers_at, ..Taken::default() };
        let page = Self { memory, notes_at, _fd: fd, taken: Mutex::new(taken), home: Home::here() };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let numbers =
            [len, HEAD, endpoint, ENDPOINTS, peers_at, peer, PEERS, process::pid() as usize];
        for (at, number) in numbers.into_iter().enumerate() {
            page.store(2 + at, number as u64);
        }
        page.store(10, now.as_nanos() as u64);
        for (at, number) in [notes_at, note, NOTES].into_iter().enumerate() {
            page.store(13 + at, number as u64);
        }
        page.store(11, Launcher::here().rank.map_or(NO_RANK, u64::from));
        let texts = [
            VERSION.to_owned(),
            output::host(),
            std::fs::read_to_string("/proc/self/comm").unwrap_or_default().trim().to_owned(),
            COMMIT.to_owned(),
        ];
        for (number, text) in texts.iter().enumerate() {
            page.store_text(TEXTS + number * TEXT_WORDS, text, TEXT_WORDS);
        }
        page.store_text(NAMES, &format!("{ENDPOINT}\n{PEER}\n{NOTE}"), HEAD / 8 - NAMES);
        page.store(1, LAYOUT);
        page.store(0, MAGIC);
        Some(page)
    }

    fn store(&self, word: usize, value: u64) {
        if let Some(place) = self.memory.atomic(8 * word) {
            place.store(value, Relaxed);
        }
    }

    fn store_text(&self, word: usize, text: &str, words: usize) {
        for (at, value) in packed(text, words).enumerate() {
            self.store(word + at, value);
        }
    }

    /// A free record for an endpoint. `None`: all are taken.
    fn take_endpoint(&self) -> Option<usize> {
        let mut taken = self.taken();
        let free = taken.endpoints.iter().position(|taken| !taken)?;
        *taken.endpoints.get_mut(free)? = true;
        Some(free)
    }

    /// A free record for a peer. `None`: all are taken, or there is no memory for more.
    fn take_peer(&self) -> Option<usize> {
        let mut taken = self.taken();
        let free = taken.peers.iter().position(|taken| !taken).unwrap_or(taken.peers.len());
        let end = peer_at(free + 1);
        if free >= PEERS {
            return None;
        }
        if end > taken.reserved {
            let page = process::page_size();
            let from = taken.reserved.next_multiple_of(page).min(end);
            let to = end.next_multiple_of(page).min(self.notes_at);
            self.memory.reserve_more(from, to - from).ok()?;
            taken.reserved = to;
        }
        if free == taken.peers.len() {
            taken.peers.push(false);
        }
        *taken.peers.get_mut(free)? = true;
        Some(free)
    }

    /// Writes a note of this process. The caller keeps other writers away.
    fn write_note(&self, number: usize, note: &Note) {
        // Nothing is written where the system gives no memory.
        if number < NOTES && self.has_notes() {
            let at = self.notes_at + number * 8 * NOTE_WORDS;
            record::write(&self.memory, at, State::Open, FIRST, note.words());
        }
    }

    /// Whether there is memory for notes, which is reserved with the first one.
    fn has_notes(&self) -> bool {
        let mut taken = self.taken();
        let len = self.memory.len() - self.notes_at;
        taken.notes = taken.notes || self.memory.reserve_more(self.notes_at, len).is_ok();
        taken.notes
    }

    fn give_back(&self, peer: usize) {
        record::write(&self.memory, peer_at(peer), State::Closed, FIRST, std::iter::empty());
        if let Some(taken) = self.taken().peers.get_mut(peer) {
            *taken = false;
        }
    }

    fn miss(&self) {
        if let Some(missed) = self.memory.atomic(8 * MISSED) {
            missed.fetch_add(1, Relaxed);
        }
    }

    fn taken(&self) -> std::sync::MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(|broken| broken.into_inner())
    }
}

/// Which process has tried to make a page, and what became of it.
static PAGE: Mutex<(Option<Home>, Option<&'static Page>)> = Mutex::new((None, None));

/// Keeps a line of the log. `cause`: the same for lines about the same thing, in all processes of one build.
pub(crate) fn note(level: Level, cause: Cause, text: &str) {
    let Some(kept) = notes::keep(level, cause, text) else { return };
    // The page may have been made meanwhile, with this note or without it.
    let Some(page) = made() else { return };
    notes::each(|number, note| {
        if number == kept {
            page.write_note(number, note);
        }
    });
}

/// The page of this process, if it has one already.
fn made() -> Option<&'static Page> {
    let known = soon::lock(&PAGE)?;
    known.1.filter(|page| page.home.is_here())
}

/// The page of this process, made with its first endpoint, and never unmade.
fn page() -> Option<&'static Page> {
    let _shield = Shield::raise();
    let mut known = soon::lock(&PAGE)?;
    if !known.0.is_some_and(Home::is_here) {
        // What a forked child finds there is its parent's.
        *known = (Some(Home::here()), Page::make().map(|page| &*Box::leak(Box::new(page))));
        if let Some(page) = known.1 {
            notes::each(|number, note| page.write_note(number, note));
        }
    }
    known.1
}

/// The records of one endpoint.
#[derive(Debug)]
pub(crate) struct Slot {
    page: &'static Page,
    number: usize,
    /// Where the endpoint's record is, bytes.
    at: usize,
    /// By peer number: the number of its record, plus one; 0: it has none yet.
    peers: Vec<u16>,
    /// A peer found no record free.
    missed: bool,
}

impl Slot {
    /// `None`: there is no page, or all records are taken.
    pub(crate) fn take(address: &str) -> Option<Self> {
        Self::of(page()?, address)
    }

    fn of(page: &'static Page, address: &str) -> Option<Self> {
        let Some(number) = page.take_endpoint() else {
            page.miss();
            return None;
        };
        let at = endpoint_at(number);
        let slot = Self { page, number, at, peers: Vec::new(), missed: false };
        let counts = std::iter::repeat_n(0, ENDPOINT_WORDS - FIRST - ADDRESS);
        let all = packed(address, ADDRESS).chain(counts);
        record::write(&page.memory, at, State::Open, FIRST, all);
        Some(slot)
    }

    /// Copies the endpoint's counts, in the order of the names after the address, and the addresses of the peers that a
    /// send and a receive wait for.
    pub(crate) fn write(
        &self,
        state: State,
        counts: impl Iterator<Item = u64>,
        waits_for: [&str; 2],
    ) {
        if !self.page.home.is_here() {
            return;
        }
        let texts = waits_for.into_iter().flat_map(|address| packed(address, ADDRESS));
        let words = counts.chain(texts);
        record::write(&self.page.memory, self.at, state, FIRST + ADDRESS, words);
    }

    /// Replaces one of the counts.
    pub(crate) fn write_one(&self, number: usize, value: u64) {
        if self.page.home.is_here() {
            let at = FIRST + ADDRESS + number;
            record::write(&self.page.memory, self.at, State::Open, at, std::iter::once(value));
        }
    }

    /// Replaces the texts of a peer's record: its address, what carries messages to it, and why nothing better does.
    pub(crate) fn write_peer(&self, record: usize, address: &str, transport: &str, reason: &str) {
        let words = std::iter::once(self.number as u64)
            .chain(packed(address, ADDRESS))
            .chain(packed(transport, TRANSPORT))
            .chain(packed(reason, REASON));
        self.write_peer_words(record, FIRST, words);
    }

    /// Copies a peer's counts, in the order of the names.
    pub(crate) fn write_peer_counts(&self, record: usize, counts: [u64; PEER_COUNTS]) {
        self.write_peer_words(record, PEER_WORDS - PEER_COUNTS, counts.into_iter());
    }

    fn write_peer_words(&self, record: usize, first: usize, words: impl Iterator<Item = u64>) {
        if self.page.home.is_here() {
            record::write(&self.page.memory, peer_at(record), State::Open, first, words);
        }
    }

    /// The peer is not connected any more: its record, which is returned, goes to another one.
    pub(crate) fn close_peer(&mut self, peer: usize) -> Option<usize> {
        let record = std::mem::take(self.peers.get_mut(peer)?);
        let record = usize::from(record).checked_sub(1)?;
        if self.page.home.is_here() {
            self.missed = false;
            self.page.give_back(record);
        }
        Some(record)
    }

    /// The record of a peer, taken now if it has none. `None`: all are taken, or this is a forked child.
    pub(crate) fn record_of(&mut self, peer: usize) -> Option<usize> {
        if let Some(record) = self.peers.get(peer).filter(|record| **record > 0) {
            return Some(usize::from(*record) - 1);
        }
        // Peers that once found none free stay without: to look again would cost each turn.
        if self.missed || !self.page.home.is_here() {
            return None;
        }
        let Some(free) = self.page.take_peer() else {
            self.missed = true;
            self.page.miss();
            return None;
        };
        self.peers.resize(self.peers.len().max(peer + 1), 0);
        *self.peers.get_mut(peer)? = free as u16 + 1;
        Some(free)
    }
}

impl Drop for Slot {
    /// Gives the records back; what is in them stays until the next one takes them.
    fn drop(&mut self) {
        if !self.page.home.is_here() {
            return;
        }
        let mut taken = self.page.taken();
        if let Some(mine) = taken.endpoints.get_mut(self.number) {
            *mine = false;
        }
        record::write(&self.page.memory, self.at, State::Closed, FIRST, std::iter::empty());
        drop(taken);
        for record in self.peers.iter().filter(|record| **record > 0) {
            self.page.give_back(usize::from(*record) - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of the test's own.
    fn another_page() -> &'static Page {
        Box::leak(Box::new(Page::make().unwrap()))
    }

    #[test]
    fn the_names_fit_before_the_records() {
        assert!(8 * NAMES + ENDPOINT.len() + PEER.len() + NOTE.len() + 3 < HEAD);
    }

    #[test]
    fn records_are_taken_and_given_back() {
        let page = another_page();
        let word = |at: usize| page.memory.atomic(at).unwrap().load(Relaxed);
        let mut slot = Slot::of(page, "a").unwrap();
        let at = endpoint_at(slot.number);
        assert_eq!(word(0), MAGIC);
        assert_eq!(word(at + 8), State::Open as u64);
        let first = slot.record_of(70).unwrap();
        slot.write_peer_counts(first, std::array::from_fn(|at| at as u64));
        slot.write_peer(first, "b", "t", "r");
        let last = peer_at(first) + 8 * (PEER_WORDS - 1);
        let counts = PEER_COUNTS as u64;
        assert_eq!((word(last), word(last - 8 * PEER_COUNTS).to_ne_bytes()[7]), (counts - 1, 0));
        assert_eq!(word(peer_at(first) + 8 * (FIRST + 1)).to_ne_bytes()[0], b'b');
        assert_ne!(slot.record_of(3).unwrap(), first);
        assert_eq!(slot.record_of(70).unwrap(), first);
        let second = slot.close_peer(3);
        assert_eq!((second.is_some(), slot.close_peer(3), slot.close_peer(9)), (true, None, None));
        let mut other = Slot::of(page, "c").unwrap();
        assert_eq!(other.record_of(5), second);
        assert_eq!(slot.record_of(70).unwrap(), first);
        slot.write_one(1, 6);
        assert_eq!(word(at + 8 * 11), 6);
        slot.write(State::Closed, std::iter::once(5), ["", ""]);
        assert_eq!((word(at + 8), word(at + 8 * 10)), (State::Closed as u64, 5));
        drop(slot);
        assert_eq!(word(peer_at(first) + 8), State::Closed as u64);
    }

    #[test]
    fn thousands_of_peers_and_endpoints_take_no_more_memory() {
        let page = another_page();
        let missed = || page.memory.atomic(8 * MISSED).unwrap().load(Relaxed);
        let mut slot = Slot::of(page, "a").unwrap();
        let given = (0..5000).filter_map(|peer| slot.record_of(peer)).count();
        assert_eq!(given, PEERS);
        assert_eq!((page.taken().peers.len(), missed()), (PEERS, 1));
        assert!(slot.peers.len() <= PEERS && page.memory.len() <= 160 << 10);
        slot.close_peer(7);
        assert_eq!(slot.record_of(4000), Some(7), "the record of a peer that has gone");
        let others: Vec<Slot> = (0..1000).filter_map(|_| Slot::of(page, "x")).collect();
        assert_eq!((others.len(), missed()), (ENDPOINTS - 1, 1 + 1000 - ENDPOINTS as u64 + 1));
        drop(slot);
        assert!(page.taken().peers.iter().all(|taken| !taken), "all are given back");
    }

    #[test]
    fn nobody_else_may_write_the_page() {
        use std::io::Write;
        use std::os::fd::AsRawFd;
        let page = page().unwrap();
        let fd = page._fd.as_raw_fd();
        let path = format!("/proc/self/fd/{fd}");
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&path).unwrap());
        assert_eq!(mode & 0o777, 0o400);
        // Root may open it for writing, and cannot write: the seal forbids it.
        let writer = std::fs::OpenOptions::new().write(true).open(&path);
        assert!(writer.is_err() || writer.is_ok_and(|mut file| file.write_all(b"x").is_err()));
        assert_eq!(std::fs::read(&path).unwrap().get(..8), Some(&b"udrvpage"[..]));
        assert!(std::ptr::eq(page, super::page().unwrap()), "one page for a process");
    }
}
