//! What the path to a peer carries. Most routers say what is too long for them; some drop it without
//! a word, and then every packet of that length is lost, however often it is sent (RFC 2923).
//!
//! Loss alone does not show it: a peer that is short of memory drops long packets too, and answers
//! handshakes. So a peer that answers while long packets stay unacknowledged is asked again, with an
//! INIT of their length, which it answers as any other. If the path carried it, the packets are lost
//! for another reason.

use super::DATAGRAM_START;
use super::connection::{Connection, INIT};
use super::packet::HelloKind;
use super::sending::State;

/// Unanswered long INITs after which a short one is asked again.
const LONG_TRIES: u8 = 3;
/// Timeouts in a row after which an answer says that something may be wrong with the path.
const ATTEMPTS: u8 = 3;

/// How far the question has come.
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
}

impl Connection {
    /// New packets have at most `carried` bytes, but no fewer than every network carries.
    pub(super) fn carry_at_most(&mut self, carried: usize) {
        let carried = u16::try_from(carried.max(DATAGRAM_START)).unwrap_or(u16::MAX);
        self.datagram_max = self.datagram_max.min(carried);
    }

    /// Length of the first packet that is not acknowledged, if the path may be why.
    fn suspect(&self) -> Option<usize> {
        let first = self.window.front()?;
        let sent = matches!(first.state, State::InFlight | State::Lost);
        let long = first.bytes.len() > DATAGRAM_START;
        let untested = usize::from(self.datagram_max) > DATAGRAM_START;
        (sent && long && untested).then_some(first.bytes.len())
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

    /// The INIT `bytes`, as long as the packets in question; `None`: as it is.
    pub(super) fn padded(&mut self, kind: HelloKind, bytes: &[u8]) -> Option<Vec<u8>> {
        let Question::Long(sent) = self.path.question else { return None };
        if kind != HelloKind::Init {
            return None;
        }
        let mut packet = bytes.to_vec();
        packet.resize(self.suspect()?, 0);
        self.path.question = Question::Long(sent.saturating_add(1).min(LONG_TRIES));
        Some(packet)
    }

    /// The other side answers an INIT while packets are not acknowledged.
    pub(super) fn on_path_answer(&mut self) {
        let asked_for_this = self.path.base == self.base;
        match self.path.question {
            Question::Short if asked_for_this && self.suspect().is_some() => {
                self.carry_at_most(0);
                self.path = Path { cut: true, ..Path::default() };
            }
            // It has got a long one.
            Question::Long(sent) if sent > 0 => self.path.question = Question::None,
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
