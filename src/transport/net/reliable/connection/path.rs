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

use super::super::packet::{DATAGRAM_START, HELLO_LEN};
use super::super::timers::NEVER;
use super::handshake::{INIT, PROBE};

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
    /// Short INITs are answered: so many long ones were sent since. Once packet `base` has arrived there is no question.
    Long { sent: u8, base: u64 },
    /// Long ones were not answered: is the peer still there?
    Short { base: u64 },
}

/// Whether the path carries more.
#[derive(Clone, Copy, Debug)]
enum Search {
    /// It is not asked for before this time, nanoseconds.
    Rests { until: u64 },
    /// An INIT of `len` bytes asks for it, so often in vain, again at `at`, nanoseconds; `base` was the first
    /// unacknowledged packet.
    Probes { len: u16, unanswered: u8, base: u32, at: u64 },
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    /// Longest datagram to this peer, bytes.
    carried: u16,
    /// Longest datagram that both sides take, and that no router has refused; bytes.
    limit: u16,
    /// Messages want more than what is carried for certain.
    wanted: bool,
    search: Search,
    question: Question,
    /// The path was found to drop what is long: the link has to be told that such packets leave in parts.
    pub(super) cut: bool,
}

/// How far a connection has come with its packets.
#[derive(Clone, Copy)]
pub(super) struct Front {
    /// The first packet that is not acknowledged.
    pub(super) base: u64,
    /// Its length, if it was sent, bytes.
    pub(super) sent: Option<usize>,
}

impl Path {
    /// Datagrams of `carried` bytes pass.
    pub(super) fn new(carried: usize) -> Self {
        Self {
            carried: carried as u16,
            limit: 0,
            wanted: false,
            search: Search::Rests { until: 0 },
            question: Question::None,
            cut: false,
        }
    }

    /// As if datagrams of `carried` bytes had been found to pass.
    #[cfg(test)]
    pub(crate) fn know(&mut self, carried: usize) {
        self.carried = carried as u16;
    }

    /// Longest datagram, bytes.
    pub(crate) fn carried(&self) -> usize {
        usize::from(self.carried)
    }

    /// When [`Self::probe_again`] has something to do.
    pub(super) fn due(&self) -> u64 {
        match self.search {
            Search::Probes { at, .. } => at,
            Search::Rests { .. } => NEVER,
        }
    }

    /// Both sides take datagrams of `limit` bytes. Nothing is known of the path between them.
    pub(super) fn both_take(&mut self, limit: u16) {
        let wanted = self.wanted;
        *self = Self { limit, wanted, ..Self::new(usize::from(limit).min(DATAGRAM_START)) };
    }

    /// A message fills what the path carries for certain, or several that share a packet do.
    pub(super) fn want_long(&mut self, established: bool, base: u64, now: u64, hellos: &mut u8) {
        if !established {
            self.wanted = true;
        } else if self.carried < self.limit
            && matches!(self.search, Search::Rests { until } if until <= now)
        {
            self.probe(self.limit, base, now, hellos);
        }
    }

    /// The other side is there.
    pub(super) fn on_established(&mut self, base: u64, now: u64, hellos: &mut u8) {
        if self.wanted {
            self.want_long(true, base, now, hellos);
        }
    }

    fn probe(&mut self, len: u16, base: u64, now: u64, hellos: &mut u8) {
        let base = base as u32;
        self.search = Search::Probes { len, unanswered: 0, base, at: now + PROBE_NS };
        *hellos |= PROBE;
    }

    /// A probe was not answered in time. `waiting`: packets are not acknowledged.
    pub(super) fn probe_again(&mut self, psn: u64, waiting: bool, now: u64, hellos: &mut u8) {
        let Search::Probes { len, unanswered, base, at } = &mut self.search else { return };
        if *base == psn as u32 && waiting {
            // While nothing at all arrives, length is not to blame.
            *at = now + SILENCE_NS;
            return;
        }
        *base = psn as u32;
        *unanswered += 1;
        if *unanswered < PROBES {
            *at = now + (PROBE_NS << *unanswered);
            *hellos |= PROBE;
        } else if *len > COMMON && self.carried < COMMON {
            self.probe(COMMON, psn, now, hellos);
        } else {
            self.search = Search::Rests { until: now + RAISE_NS };
        }
    }

    /// An INIT of `answered` bytes is answered. False: no probe was that long.
    pub(crate) fn on_probe_answer(&mut self, answered: u16, now: u64, hellos: &mut u8) -> bool {
        let Search::Probes { len, .. } = self.search else { return false };
        if answered < len {
            return false;
        }
        self.carried = self.carried.max(len);
        self.search = Search::Rests { until: now + RAISE_NS };
        *hellos &= !PROBE;
        true
    }

    /// No datagram has more than `most` bytes from now on, but what every network carries. Returns how many that are.
    pub(super) fn carry_at_most(&mut self, most: usize, hellos: &mut u8) -> usize {
        let carried = u16::try_from(most.max(DATAGRAM_START)).unwrap_or(u16::MAX);
        self.limit = self.limit.min(carried);
        self.carried = self.carried.min(carried);
        match &mut self.search {
            // That was the probe: a shorter one passes.
            Search::Probes { len, unanswered, .. }
                if *len > self.limit && self.carried < self.limit =>
            {
                (*len, *unanswered) = (self.limit, 0);
                *hellos |= PROBE;
            }
            Search::Probes { len, at, .. } if *len > self.limit => {
                self.search = Search::Rests { until: *at };
            }
            _ => {}
        }
        usize::from(carried)
    }

    /// Length of the first packet that is not acknowledged, if the path may be why.
    fn suspect(&self, front: Front) -> Option<usize> {
        let untested = self.carried() > DATAGRAM_START;
        front.sent.filter(|len| *len > DATAGRAM_START && untested)
    }

    /// A timeout: asks again, if there is a question.
    pub(super) fn ask(&mut self, front: Front, hellos: &mut u8) {
        let (Question::Long { base, .. } | Question::Short { base }) = self.question else {
            return;
        };
        if base != front.base || self.suspect(front).is_none() {
            self.question = Question::None;
            return;
        }
        if matches!(self.question, Question::Long { sent: LONG_TRIES, .. }) {
            self.question = Question::Short { base };
        }
        *hellos |= INIT;
    }

    /// How long this handshake packet is to be, bytes; `None`: as it is.
    pub(super) fn padding(&mut self, hello: u8, front: Front) -> Option<usize> {
        match (hello, self.search, self.question) {
            (PROBE, Search::Probes { len, .. }, _) => Some(usize::from(len)),
            (INIT, _, Question::Long { sent, base }) => {
                let len = self.suspect(front)?;
                self.question =
                    Question::Long { sent: sent.saturating_add(1).min(LONG_TRIES), base };
                Some(len)
            }
            _ => None,
        }
    }

    /// The other side answers an INIT of `len` bytes while packets are not acknowledged, after so many `attempts`.
    pub(super) fn on_answer(&mut self, len: u16, attempts: u8, front: Front, hellos: &mut u8) {
        let long = usize::from(len) > HELLO_LEN;
        let suspect = self.suspect(front).is_some();
        match self.question {
            Question::Short { base } if base == front.base && !long && suspect => {
                self.carry_at_most(0, hellos);
                let (carried, limit) = (self.carried(), self.limit);
                *self = Self { limit, cut: true, ..Self::new(carried) };
            }
            Question::Long { .. } if long => self.question = Question::None,
            Question::Long { .. } => {}
            Question::None if attempts >= ATTEMPTS && suspect => {
                self.question = Question::Long { sent: 0, base: front.base };
            }
            Question::None | Question::Short { .. } => self.question = Question::None,
        }
    }
}

#[cfg(test)]
mod tests;
