//! The largest datagram that the path to a peer carries. The interfaces at both ends do not tell: a tunnel between them
//! may carry less. Some routers then report that, others drop long packets silently (RFC 2923); IPv6 routers do not
//! fragment.
//!
//! So a connection begins with a length that every network carries. When messages want more, an INIT padded to the full
//! length probes the path; the peer answers it like any other. After the answer packets become longer (RFC 8899).
//!
//! A path may become narrower later. Loss alone does not show it: a peer that is short of memory also drops long
//! packets, and answers handshakes. So a peer that answers while long packets stay unacknowledged is probed again with
//! a long INIT. If the path carries that, the packets are lost for another reason. If it does not, the packets that are
//! already that long are fragmented; if fragments do not pass either, the connection ends in time.

use super::super::packet::{DATAGRAM_LEAST, DATAGRAM_START, HELLO_LEN};
use super::super::timers::NEVER;
use super::handshake::{INIT, PROBE};

/// The length that is probed when the full length is not answered, bytes: that of IPv6 in 1500, which most paths carry
/// that are narrower than their ends.
const COMMON: u16 = 1452;
/// Time to wait for the answer to a probe, nanoseconds; it doubles with each attempt.
const PROBE_NS: u64 = 20_000_000;
const SILENCE_NS: u64 = 200_000_000;
/// After this many unanswered probes the path does not carry the length.
const PROBES: u8 = 4;
/// Then the full length is probed again after this time, nanoseconds: the loss may have been chance, and paths change.
const RAISE_NS: u64 = 60_000_000_000;
/// Unanswered long INITs after which a short one is sent.
const LONG_TRIES: u8 = 3;
/// Timeouts in a row after which an answer suggests that something may be wrong with the path.
const ATTEMPTS: u8 = 3;

/// No packet is blocked: none has this number.
const NOT_BLOCKED: (u64, u64) = (u64::MAX, 0);

/// The stages of finding out whether the path has become narrower.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Question {
    /// Nothing is suspected.
    #[default]
    None,
    /// Short INITs are answered: `sent` long ones were sent since. The suspicion ends once packet `base` has arrived.
    Long { sent: u8, base: u64 },
    /// Long INITs were not answered: a short one asks whether the peer is still there.
    Short { base: u64 },
}

/// The search for a longer datagram that the path carries.
#[derive(Clone, Copy, Debug)]
enum Search {
    /// There is no probe before this time, nanoseconds.
    Rests { until: u64 },
    /// An INIT of `len` bytes probes the path. It was not answered `unanswered` times, and is sent again at `at`,
    /// nanoseconds; `base` was the first unacknowledged packet.
    Probes { len: u16, unanswered: u8, base: u32, at: u64 },
}

/// The largest datagram that the path to a peer carries, and the search for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    /// Longest datagram to this peer, bytes.
    carried: u16,
    /// Longest datagram that both sides take, and that no router has refused; bytes.
    limit: u16,
    /// Longest packet over a path that is not probed, now, and at most; bytes. 0: there is none.
    direct: u16,
    direct_limit: u16,
    /// Messages want longer packets than the path is known to carry.
    wanted: bool,
    search: Search,
    question: Question,
    /// The path was found to drop long packets: the link must be told that such packets are to be fragmented.
    pub(super) cut: bool,
    /// That was said before: packets that are too long are fragmented.
    fragments: bool,
    /// This packet does not pass as fragments either: its number, and since when, by the clock `Shared::patience`,
    /// nanoseconds.
    blocked: (u64, u64),
}

/// The oldest packet of a connection that is not acknowledged.
#[derive(Clone, Copy)]
pub(super) struct Front {
    /// Its number, or that of the next packet if all are acknowledged.
    pub(super) base: u64,
    /// Its length, if it was sent, bytes.
    pub(super) sent: Option<usize>,
}

impl Path {
    /// The path carries datagrams of `carried` bytes.
    pub(super) fn new(carried: usize) -> Self {
        Self {
            carried: carried as u16,
            limit: 0,
            direct: 0,
            direct_limit: 0,
            wanted: false,
            search: Search::Rests { until: 0 },
            question: Question::None,
            cut: false,
            fragments: false,
            blocked: NOT_BLOCKED,
        }
    }

    /// Assumes that the path carries datagrams of `carried` bytes.
    #[cfg(test)]
    pub(crate) fn know(&mut self, carried: usize) {
        self.carried = carried as u16;
    }

    /// Longest packet, bytes.
    #[inline]
    pub(crate) fn carried(&self) -> usize {
        usize::from(if self.direct > 0 { self.direct } else { self.carried })
    }

    /// Packets go over a path that is not probed.
    pub(super) fn is_direct(&self) -> bool {
        self.direct > 0
    }

    /// Packets of `len` bytes go over a path that is not probed; 0: none do.
    #[inline]
    pub(super) fn go_direct(&mut self, len: usize) {
        let len = if len < DATAGRAM_LEAST { 0 } else { len };
        self.direct = u16::try_from(len).unwrap_or(u16::MAX).min(self.direct_limit);
    }

    /// When [`Self::probe_again`] has something to do.
    pub(super) fn due(&self) -> u64 {
        match self.search {
            Search::Probes { at, .. } => at,
            Search::Rests { .. } => NEVER,
        }
    }

    /// Both sides take datagrams of `limit` bytes, and packets of `direct_limit` bytes over a path that is not probed.
    /// Nothing is known of the path between them.
    pub(crate) fn both_take(&mut self, limit: u16, direct_limit: u16) {
        let known = Self::new(usize::from(limit).min(DATAGRAM_START));
        *self = Self { limit, direct_limit, wanted: self.wanted, ..known };
    }

    /// A message, or several that share a packet, fill the longest packet that the path is known to carry.
    pub(super) fn want_long(&mut self, established: bool, base: u64, now: u64, hellos: &mut u8) {
        if !established {
            self.wanted = true;
        } else if self.carried < self.limit
            && self.direct == 0
            && matches!(self.search, Search::Rests { until } if until <= now)
        {
            self.probe(self.limit, base, now, hellos);
        }
    }

    /// The connection is established.
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

    /// A probe was not answered in time. `waiting`: there are unacknowledged packets.
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

    /// Limits datagrams to `most` bytes, but not below what every network carries. Returns the limit.
    pub(super) fn carry_at_most(&mut self, most: usize, hellos: &mut u8) -> usize {
        let carried = u16::try_from(most.max(DATAGRAM_START)).unwrap_or(u16::MAX);
        self.limit = self.limit.min(carried);
        self.carried = self.carried.min(carried);
        match &mut self.search {
            // The router refused the probe: a shorter one passes.
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

    /// Length of the first unacknowledged packet, if the path may be the reason.
    fn suspect(&self, front: Front) -> Option<usize> {
        let carried = usize::from(self.carried);
        // Packets for a path that is not probed, and those made before the path was cut, may be longer than this one is
        // known to carry.
        let longer = |len| (self.direct_limit > 0 || self.fragments) && len > carried;
        let untested = |len| carried > DATAGRAM_START || longer(len);
        front.sent.filter(|len| *len > DATAGRAM_START && untested(*len))
    }

    /// A retransmission timeout: sends an INIT again, if the path is suspect.
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

    /// The length to pad this handshake packet to, bytes; `None`: no padding.
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

    /// For how long the peer has answered although packet `base` does not pass as fragments either, nanoseconds.
    pub(super) fn blocked_for(&self, base: u64, patience: u64) -> u64 {
        let (blocked, since) = self.blocked;
        if blocked == base { patience.saturating_sub(since) } else { 0 }
    }

    /// The peer answers an INIT of `len` bytes, at `patience`, while packets are unacknowledged, after `attempts`
    /// timeouts.
    pub(super) fn on_answer(
        &mut self,
        len: u16,
        attempts: u8,
        front: Front,
        patience: u64,
        hellos: &mut u8,
    ) {
        let long = usize::from(len) > HELLO_LEN;
        let suspect = self.suspect(front).is_some();
        match self.question {
            Question::Short { base }
                if base == front.base && !long && suspect && self.fragments =>
            {
                self.question = Question::None;
                if self.blocked.0 != base {
                    self.blocked = (base, patience);
                }
            }
            Question::Short { base } if base == front.base && !long && suspect => {
                self.carry_at_most(0, hellos);
                let Self { carried, limit, direct_limit, .. } = *self;
                let known = Self::new(carried.into());
                *self = Self { limit, direct_limit, cut: true, fragments: true, ..known };
            }
            Question::Long { .. } if long => {
                (self.question, self.blocked) = (Question::None, NOT_BLOCKED);
            }
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
