//! What the path to a peer carries. The interfaces at both ends do not tell: a tunnel between them
//! may carry less, and then some routers say so, and some drop what is long without a word
//! (RFC 2923). IPv6 cuts nothing on its way.
//!
//! So a connection begins with what every network carries. When messages want more, an INIT of the
//! full length asks for it, which the other side answers as any other; packets become longer when
//! the answer is here (RFC 8899 calls this probing).
//!
//! A path may become narrower later. Loss alone does not show it: a peer that is short of memory
//! drops long packets too, and answers handshakes. So a peer that answers while long packets stay
//! unacknowledged is asked again in that way. If the path carried it, the packets are lost for
//! another reason.

use super::DATAGRAM_START;
use super::connection::{Connection, INIT, PROBE, Phase};
use super::packet::HELLO_LEN;
use super::sending::State;
use super::timers::NEVER;

/// What is asked for when the full length is not answered, bytes: what IPv6 has in 1500, which most
/// of the paths carry that are narrower than their ends.
const COMMON: u16 = 1452;
/// Time to wait for the answer to a probe, nanoseconds; twice as long each time.
const PROBE_NS: u64 = 20_000_000;
const SILENCE_NS: u64 = 200_000_000;
/// So many are not answered: the path does not carry it.
const PROBES: u8 = 4;
/// Then the full length is asked for again, nanoseconds: bad luck should not last, and paths change.
const RAISE_NS: u64 = 60_000_000_000;
/// Unanswered long INITs after which a short one is asked again.
const LONG_TRIES: u8 = 3;
/// Timeouts in a row after which an answer says that something may be wrong with the path.
const ATTEMPTS: u8 = 3;

/// How far the question has come whether the path has become narrower.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Question {
    /// Nothing is wrong, as far as is known.
    #[default]
    None,
    /// Short INITs are answered: so many long ones were sent since.
    Long(u8),
    /// Long ones were not answered: is the peer still there?
    Short,
}

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Path {
    /// Longest datagram that both sides take, and that no router has refused; bytes.
    limit: u16,
    /// Messages want more than what is carried for certain.
    wanted: bool,
    /// The length that is asked for, bytes, or 0; how often in vain, and since which packet.
    probe: u16,
    unanswered: u8,
    probe_base: u32,
    /// When to ask again, nanoseconds.
    probe_at: u64,
    question: Question,
    /// The first unacknowledged packet when the question began: once it has arrived there is none.
    base: u64,
    /// The link has to be told that what is too long leaves in parts.
    cut: bool,
}

impl Path {
    /// True once after the path was found to drop what is long.
    #[inline]
    pub(super) fn take_cut(&mut self) -> bool {
        std::mem::take(&mut self.cut)
    }

    /// `take_cut` has something to say.
    #[inline]
    pub(super) fn is_cut(&self) -> bool {
        self.cut
    }

    /// When [`Connection::probe_again`] has something to do.
    #[inline]
    pub(super) fn due(&self) -> u64 {
        if self.probe == 0 { NEVER } else { self.probe_at }
    }
}

impl Connection {
    /// Both sides take datagrams of `limit` bytes. Nothing is known of the path between them.
    pub(super) fn both_take(&mut self, limit: u16) {
        self.datagram_max = limit.min(DATAGRAM_START as u16);
        self.path = Path { limit, wanted: self.path.wanted, ..Path::default() };
    }

    /// A message fills what the path carries for certain, or several that share a packet do.
    #[inline]
    pub(super) fn want_long(&mut self, now: u64) {
        if self.phase != Phase::Established {
            self.path.wanted = true;
        } else if self.datagram_max < self.path.limit
            && self.path.probe == 0
            && self.path.probe_at <= now
        {
            self.probe(self.path.limit, now);
        }
    }

    /// The other side is there.
    pub(super) fn on_established(&mut self, now: u64) {
        if self.path.wanted && self.datagram_max < self.path.limit {
            self.probe(self.path.limit, now);
        }
    }

    fn probe(&mut self, len: u16, now: u64) {
        let path = &mut self.path;
        (path.probe, path.unanswered, path.probe_base) = (len, 0, self.base as u32);
        path.probe_at = now + PROBE_NS;
        self.hello |= PROBE;
    }

    /// A probe was not answered in time.
    pub(super) fn probe_again(&mut self, now: u64) {
        let path = &mut self.path;
        if path.probe_base == self.base as u32 && !self.window.is_empty() {
            // While nothing at all arrives, length is not to blame.
            path.probe_at = now + SILENCE_NS;
            return;
        }
        path.probe_base = self.base as u32;
        path.unanswered += 1;
        if path.unanswered < PROBES {
            path.probe_at = now + (PROBE_NS << path.unanswered);
            self.hello |= PROBE;
        } else if path.probe > COMMON && self.datagram_max < COMMON {
            self.probe(COMMON, now);
        } else {
            path.probe = 0;
            path.probe_at = now + RAISE_NS;
        }
    }

    /// An INIT of `len` bytes is answered. False: no probe was that long.
    pub(super) fn on_probe_answer(&mut self, len: u16, now: u64) -> bool {
        let path = &mut self.path;
        if path.probe == 0 || len < path.probe {
            return false;
        }
        self.datagram_max = path.probe.max(self.datagram_max);
        path.probe = 0;
        path.probe_at = now + RAISE_NS;
        self.hello &= !PROBE;
        true
    }

    /// No datagram has more than `carried` bytes from now on, but what every network carries.
    /// Returns true if packets exist that have.
    pub(super) fn carry_at_most(&mut self, carried: usize) -> bool {
        let carried = u16::try_from(carried.max(DATAGRAM_START)).unwrap_or(u16::MAX);
        let path = &mut self.path;
        path.limit = path.limit.min(carried);
        self.datagram_max = self.datagram_max.min(carried);
        if path.probe > path.limit {
            // That was the probe: a shorter one passes.
            path.probe = if self.datagram_max < path.limit { path.limit } else { 0 };
            path.unanswered = 0;
            self.hello |= if path.probe > 0 { PROBE } else { 0 };
        }
        let carried = usize::from(carried);
        self.window.iter().any(|packet| packet.bytes.len() > carried)
    }

    /// Length of the first packet that is not acknowledged, if the path may be why.
    fn suspect(&self) -> Option<usize> {
        let first = self.window.front()?;
        let sent = matches!(first.state, State::InFlight | State::Lost);
        let len = first.bytes.len();
        let untested = usize::from(self.datagram_max) > DATAGRAM_START;
        (sent && len > DATAGRAM_START && untested).then_some(len)
    }

    /// A timeout: asks again, if there is a question.
    pub(super) fn ask_path(&mut self) {
        if self.path.question == Question::None {
            return;
        }
        if self.path.base != self.base || self.suspect().is_none() {
            self.path.question = Question::None;
            return;
        }
        if self.path.question == Question::Long(LONG_TRIES) {
            self.path.question = Question::Short;
        }
        self.hello |= INIT;
    }

    /// The handshake packet `bytes`, as long as it is to be; `None`: as it is.
    pub(super) fn padded(&mut self, hello: u8, bytes: &[u8]) -> Option<Vec<u8>> {
        let len = match (hello, self.path.question) {
            (PROBE, _) => usize::from(self.path.probe),
            (INIT, Question::Long(sent)) => {
                let len = self.suspect()?;
                self.path.question = Question::Long(sent.saturating_add(1).min(LONG_TRIES));
                len
            }
            _ => return None,
        };
        let mut packet = bytes.to_vec();
        packet.resize(len.max(bytes.len()), 0);
        Some(packet)
    }

    /// The other side answers an INIT of `len` bytes while packets are not acknowledged.
    pub(super) fn on_path_answer(&mut self, len: u16) {
        let long = usize::from(len) > HELLO_LEN;
        let asked_for_this = self.path.base == self.base;
        match self.path.question {
            Question::Short if asked_for_this && !long && self.suspect().is_some() => {
                self.carry_at_most(0);
                self.path = Path { limit: self.path.limit, cut: true, ..Path::default() };
            }
            Question::Long(_) if long => self.path.question = Question::None,
            Question::Long(_) => {}
            Question::None if self.attempts >= ATTEMPTS && self.suspect().is_some() => {
                self.path.question = Question::Long(0);
                self.path.base = self.base;
            }
            Question::None | Question::Short => self.path.question = Question::None,
        }
    }
}

#[cfg(test)]
mod tests;
