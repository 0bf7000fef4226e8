//! The last events of the process's messages, for `udrv trace`: a ring in a sealed memfd with the label [`LABEL`], which
//! another process of the same user reads without help, also while this one hangs. FI_UDRV_TRACE is the number of events;
//! without it there is no ring, and no message costs an instruction for it: endpoints of a process with a ring take no fast
//! path, and the general path asks whether there is one.
//!
//! All of it is 64-bit words of this machine's byte order:
//!
//! | word | contents |
//! |---|---|
//! | 0, 1 | [`MAGIC`], [`LAYOUT`] |
//! | 2 to 4 | where events begin, bytes of one, and how many there is room for |
//! | 5 | events so far: event `n` is at place `n` modulo that number |
//! | 6, 7 | process id; rank in the job, or 2^64 - 1 |
//! | 16 | host, a text of 64 bytes |
//! | 32 | the names of kinds, from 0 on, a text of 256 bytes |
//!
//! An event is eight words: its number and one more (0 while it changes), its time (nanoseconds of the monotonic clock), its
//! kind and from bit 32 on the port of its endpoint, the number of the message, bytes, and the peer: its IPv6 address in the
//! order of the network (two words; zeros: none), and its port.

use super::launcher::Launcher;
use super::page::words_of;
use crate::sys::process::{self, Home};
use crate::sys::shared_memory::SharedMemory;
use crate::sys::{clock, output};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::fence;

/// Label of the memfd.
const LABEL: &str = "udrv-trace";
/// "udrvring", as bytes.
const MAGIC: u64 = u64::from_ne_bytes(*b"udrvring");
const LAYOUT: u64 = 1;
/// Where events begin, and the length of one, bytes.
const HEAD: usize = 1024;
const EVENT: usize = 64;
/// Words of the head.
const NEXT: usize = 5;
const HOST: usize = 16;
const NAMES: usize = 32;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// An eager message was sent.
    EagerSent,
    /// A message was announced, its receiver has said the first word about it, and the send has ended.
    SendBegin,
    SendAnswered,
    SendEnd,
    /// An eager message came that a receive waited for.
    EagerReceived,
    /// A message came, or was announced, before its receive; and a receive took it.
    Unexpected,
    Matched,
    /// An announced message has its receive, and the receive has ended.
    ReceiveBegin,
    ReceiveEnd,
    /// Packets were sent again (their number instead of bytes), and an acknowledgement was waited for too long.
    Resent,
    Timeout,
    /// A thread (the number) sleeps until something happens, and goes on.
    SleepBegin,
    SleepEnd,
}

/// The names of kinds, in their order.
const KINDS: &str = "eager_sent send_begin send_answered send_end eager_received unexpected matched receive_begin \
    receive_end resent timeout sleep_begin sleep_end";

/// Whom an event is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About {
    /// The port of the endpoint; 0: of all.
    pub(crate) port: u16,
    pub(crate) peer: Option<SocketAddr>,
}

#[derive(Debug)]
struct Ring {
    memory: SharedMemory,
    /// By which other processes find it.
    _fd: OwnedFd,
    events: u64,
    /// A forked child shares the memory, and writes nothing.
    owner: Home,
}

static RING: OnceLock<Option<Ring>> = OnceLock::new();

/// Makes the ring of the process, with its first endpoint. `events`: how many it keeps; 0: there is none.
pub(crate) fn open(events: usize) {
    RING.get_or_init(|| (events > 0).then(|| Ring::make(events)).flatten());
}

/// Whether events are kept.
#[inline]
pub(crate) fn is_on() -> bool {
    matches!(RING.get(), Some(Some(_)))
}

/// Keeps an event, if events are kept.
pub(crate) fn event(kind: Kind, about: About, number: u64, bytes: u64) {
    if let Some(Some(ring)) = RING.get() {
        if ring.owner.is_here() {
            ring.write(clock::now_ns(), kind, about, number, bytes);
        }
    }
}

/// Keeps an event of the calling thread, if events are kept.
pub(crate) fn of_thread(kind: Kind) {
    if is_on() {
        event(kind, About { port: 0, peer: None }, process::thread(), 0);
    }
}

impl Ring {
    /// `None`: the system gives no memory or no descriptor.
    fn make(events: usize) -> Option<Self> {
        let len = (HEAD + events * EVENT).next_multiple_of(process::page_size());
        let (memory, fd) = SharedMemory::create_page(LABEL, len, len).ok()?;
        let ring = Self { memory, _fd: fd, events: events as u64, owner: Home::here() };
        let rank = Launcher::here().rank.map_or(u64::MAX, u64::from);
        let numbers =
            [LAYOUT, HEAD as u64, EVENT as u64, ring.events, 0, process::pid() as u64, rank];
        let texts = [(HOST, output::host(), 64), (NAMES, KINDS.to_owned(), 256)];
        for (word, text, bytes) in texts {
            words_of(&text, bytes / 8)
                .enumerate()
                .for_each(|(at, value)| ring.store(word + at, value));
        }
        numbers.into_iter().enumerate().for_each(|(at, value)| ring.store(1 + at, value));
        ring.store(0, MAGIC);
        Some(ring)
    }

    fn store(&self, word: usize, value: u64) {
        if let Some(place) = self.memory.atomic(8 * word) {
            place.store(value, Relaxed);
        }
    }

    fn write(&self, now: u64, kind: Kind, about: About, number: u64, bytes: u64) {
        let Some(next) = self.memory.atomic(8 * NEXT) else { return };
        let own = next.fetch_add(1, Relaxed);
        let first = (HEAD + EVENT * (own % self.events) as usize) / 8;
        let Some(state) = self.memory.atomic(8 * first) else { return };
        state.store(0, Relaxed);
        fence(Release);
        let [high, low] = about.peer.map_or([0; 2], |peer| halves(peer.ip()));
        let port = about.peer.map_or(0, |peer| u64::from(peer.port()));
        let kind = kind as u64 | u64::from(about.port) << 32;
        for (at, value) in [now, kind, number, bytes, high, low, port].into_iter().enumerate() {
            self.store(first + 1 + at, value);
        }
        state.store(own + 1, Release);
    }
}

/// An address as two words.
fn halves(ip: IpAddr) -> [u64; 2] {
    let ip = match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let all = u128::from(ip);
    [(all >> 64) as u64, all as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_events_are_kept() {
        let ring = Ring::make(4).unwrap();
        let word = |at: usize| ring.memory.atomic(8 * at).unwrap().load(Relaxed);
        let about = About { port: 7, peer: Some("192.0.2.1:5".parse().unwrap()) };
        for n in 0..6 {
            ring.write(100 + n, Kind::SendEnd, about, n, 1000 * n);
        }
        assert_eq!((word(0), word(4), word(NEXT)), (MAGIC, 4, 6));
        let fifth = HEAD / 8 + 8;
        let wanted = [6, 105, Kind::SendEnd as u64 | 7 << 32, 5, 5000, 0, 0xffff_c000_0201, 5];
        assert_eq!(std::array::from_fn(|at| word(fifth + at)), wanted);
        assert_eq!(word(fifth + 8), 3, "the oldest that is left");
    }

    #[test]
    fn every_kind_has_its_name() {
        let names: Vec<&str> = KINDS.split(' ').collect();
        assert_eq!(names.len(), Kind::SleepEnd as usize + 1);
        assert_eq!(
            (names[Kind::Matched as usize], names[Kind::Resent as usize]),
            ("matched", "resent")
        );
        assert!(KINDS.len() < 256);
    }

    #[test]
    fn without_the_variable_there_is_no_ring() {
        open(0);
        assert!(!is_on());
        event(Kind::Timeout, About { port: 0, peer: None }, 0, 0);
    }
}
