//! Whether the peer is still there: when to ask it, and when to give up.
//!
//! Silence counts only while the peer owes something, and only in time in which it could be heard (`Shared::patience`).
//! An ICMP message that the port is closed may be forged, so it is only a reason to ask. It counts if it quotes an INIT
//! of this endpoint, whose nonce only those that saw the INIT can know (PROTOCOL.md §7.10).

use super::super::timers::NEVER;
use super::handshake::{DOUBT, INIT};

/// Time between two checks of a silent peer that owes something, and of any other, nanoseconds.
const OWED_LOOK_NS: u64 = 500_000_000;
const IDLE_LOOK_NS: u64 = 5_000_000_000;
/// Time between two INITs to a silent peer, nanoseconds. While its host does not answer ARP, the kernel keeps what is sent
/// there for three seconds (arp(7), unres_qlen_bytes), in the send buffer that packets to all other peers need too.
const SILENT_NS: u64 = 1_000_000_000;
/// A peer that does not answer INITs gets a packet with data after so many of them.
const DATA_EVERY: u8 = 16;
/// Time between two checks of a peer that has not yet proven that it is there, nanoseconds.
const HALF_OPEN_LOOK_NS: u64 = 2_000_000_000;
/// Time between two INITs to a peer that the network says is not there, nanoseconds. After `QUESTIONS` of them the time
/// doubles with each one, up to a limit.
const QUESTION_NS: u64 = 70_000_000;
const QUESTIONS: u8 = 3;
const QUESTION_MAX_NS: u64 = OWED_LOOK_NS;
/// This many refused INITs without an answer in between mean that the peer is gone. More would take seconds: systems
/// send six such messages at once, and then one a second (net.ipv4.icmp_ratelimit, icmp(7)).
const REFUSALS: u8 = 2;

/// The liveness of one peer.
#[derive(Debug, Default)]
pub(crate) struct Liveness {
    /// When to check next, nanoseconds.
    pub(super) look_at: u64,
    /// By the clock `Shared::patience`.
    heard_at: u64,
    /// [`NEVER`]: nothing is owed.
    owed_since: u64,
    /// The layer above waited for the peer when it last said so.
    owed: bool,
    /// It has not said so since the peer was last looked at.
    unasked: bool,
    /// When it was last sent an INIT because of its silence, by the same clock, and how often it was.
    questioned: u64,
    inits: u8,
    /// A long wait for its first answer was told.
    reported: bool,
    /// INITs that were refused since the peer was last heard, and when the first one was, nanoseconds.
    pub(super) refusals: u8,
    refused_at: u64,
    /// When the peer was last asked for that reason, nanoseconds, and how often since it was last heard.
    asked_at: u64,
    questions: u8,
}

impl Liveness {
    pub(super) fn new(half_open: bool, patience: u64, now: u64) -> Self {
        Self {
            look_at: now + if half_open { HALF_OPEN_LOOK_NS } else { OWED_LOOK_NS },
            heard_at: patience,
            owed_since: patience,
            ..Self::default()
        }
    }

    /// The peer was heard.
    pub(crate) fn heard(&mut self, patience: u64) {
        self.heard_at = patience;
        self.refusals = 0;
        self.questions = 0;
    }

    /// The peer is silent, and is sent an INIT.
    pub(super) fn note_init(&mut self, patience: u64) {
        self.questioned = patience;
        self.inits = self.inits.wrapping_add(1);
    }

    /// The peer has not been heard since it was last sent such an INIT: there is no use in sending it more than the next
    /// one. If it answers, data follows. False now and then, for a peer that cannot answer.
    pub(super) fn is_unanswered(&self) -> bool {
        self.heard_at < self.questioned && self.inits % DATA_EVERY != 0
    }

    /// The peer owes something from now on.
    pub(crate) fn owe(&mut self, patience: u64, now: u64) {
        self.owed_since = patience;
        self.look_at = self.look_at.min(now + OWED_LOOK_NS);
    }

    /// Whether the layer above waits for the peer, as far as it is there to say so.
    pub(super) fn told(&mut self, owed: Option<bool>) -> Option<bool> {
        self.owed = owed.unwrap_or(self.owed);
        owed
    }

    /// Nobody is there to say whether the peer owes something. If it did, it is asked, but not given up: what it owed
    /// may have come since. True: the layer above must be asked when it is back.
    pub(super) fn look_alone(
        &mut self,
        patience: u64,
        timeout: u64,
        now: u64,
        hellos: &mut u8,
    ) -> bool {
        self.look_at = now + IDLE_LOOK_NS;
        if self.owed {
            self.look_at_debtor(patience, timeout, now, hellos);
        }
        !std::mem::replace(&mut self.unasked, true)
    }

    /// The layer above is back.
    pub(crate) fn look_soon(&mut self) {
        (self.look_at, self.unasked) = (0, false);
    }

    /// The peer owes nothing.
    pub(super) fn rest(&mut self, now: u64) {
        self.owed_since = NEVER;
        self.look_at = now + IDLE_LOOK_NS;
    }

    /// A half-open peer that owes nothing. Returns for how long it was silent, nanoseconds.
    pub(super) fn look_at_half_open(&mut self, patience: u64, now: u64) -> u64 {
        self.look_at = now + HALF_OPEN_LOOK_NS;
        patience - self.heard_at.min(patience)
    }

    /// A peer that owes something. False: it was silent for `timeout`, nanoseconds.
    pub(super) fn look_at_debtor(
        &mut self,
        patience: u64,
        timeout: u64,
        now: u64,
        hellos: &mut u8,
    ) -> bool {
        self.owed_since = self.owed_since.min(patience);
        let silent = patience - self.heard_at.max(self.owed_since).min(patience);
        let every = OWED_LOOK_NS.min(timeout / 8).max(1_000_000);
        let pause = SILENT_NS.min(timeout / 8);
        // A host that refuses is no silent one: a few more refusals show that nobody is there.
        let asked = self.refusals == 0
            && self.heard_at < self.questioned
            && patience < self.questioned + pause;
        if silent >= every && !asked {
            *hellos |= INIT | DOUBT;
            self.note_init(patience);
        }
        self.look_at = now + every;
        silent < timeout
    }

    /// Whether a peer that was never heard has kept this endpoint waiting for `span`, nanoseconds. True once.
    pub(super) fn is_late(&mut self, patience: u64, span: u64) -> bool {
        let since = self.owed_since.min(patience).max(self.heard_at);
        let late = !self.reported && patience.saturating_sub(since) >= span;
        self.reported |= late;
        late
    }

    /// The port is closed; `ours`: an INIT of this endpoint is quoted. True: it goes on for `span`, nanoseconds.
    pub(crate) fn on_refused(&mut self, ours: bool, span: u64, now: u64) -> bool {
        if ours && self.refusals == 0 {
            self.refused_at = now;
        }
        self.refusals = self.refusals.saturating_add(u8::from(ours));
        self.refusals >= REFUSALS && now.saturating_sub(self.refused_at) >= span
    }

    /// Asks the peer whether it is there, with increasing pauses. Once an INIT was refused as well, the next one is
    /// sent without waiting for another ICMP message.
    pub(crate) fn ask(&mut self, now: u64, hellos: &mut u8) {
        let pause = |questions: u8| {
            (QUESTION_NS << questions.saturating_sub(QUESTIONS).min(3)).min(QUESTION_MAX_NS)
        };
        if self.asked_at == 0 || self.asked_at + pause(self.questions) <= now {
            // As long as no INIT was refused the message may be forged: the device's path is not suspected.
            *hellos |= INIT | if self.refusals > 0 { DOUBT } else { 0 };
            self.asked_at = now;
            self.questions = self.questions.saturating_add(1);
        }
        if self.refusals > 0 {
            self.look_at = self.look_at.min(self.asked_at + pause(self.questions));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn silence_counts_while_something_is_owed() {
        let (mut liveness, mut hellos) = (Liveness::new(false, 0, 0), 0);
        liveness.rest(0);
        assert_eq!(liveness.look_at, IDLE_LOOK_NS);
        let timeout = 4000 * MS;
        assert!(liveness.look_at_debtor(9000 * MS, timeout, 9000 * MS, &mut hellos));
        assert!(hellos == 0, "it has only now begun to owe");
        assert!(liveness.look_at_debtor(9500 * MS, timeout, 9500 * MS, &mut hellos));
        assert!(hellos & INIT != 0 && hellos & DOUBT != 0);
        liveness.heard(10_000 * MS);
        assert!(liveness.look_at_debtor(13_999 * MS, timeout, 13_999 * MS, &mut hellos));
        assert!(!liveness.look_at_debtor(14_000 * MS, timeout, 14_000 * MS, &mut hellos));
    }

    #[test]
    fn a_peer_is_late_once() {
        let mut liveness = Liveness::new(false, 1000 * MS, 0);
        let late = [1000, 3999, 4000, 4001, 9000].map(|ms| liveness.is_late(ms * MS, 3000 * MS));
        assert_eq!(late, [false, false, true, false, false]);
    }

    #[test]
    fn refusals_count_if_they_are_ours_and_go_on() {
        let mut liveness = Liveness::new(false, 0, 0);
        assert!(!(0..10).any(|n| liveness.on_refused(false, 0, n * MS)), "anybody may say so");
        assert!(!liveness.on_refused(true, 200 * MS, 10 * MS));
        assert!(!liveness.on_refused(true, 200 * MS, 209 * MS));
        assert!(liveness.on_refused(true, 200 * MS, 210 * MS));
        liveness.heard(0);
        assert!(!liveness.on_refused(true, 200 * MS, 500 * MS), "it has answered");
    }

    #[test]
    fn questions_become_rarer() {
        let mut liveness = Liveness::new(false, 0, 0);
        liveness.on_refused(true, 0, 0);
        let asked = (1..3000).filter(|ms| {
            let mut hellos = 0;
            liveness.ask(ms * MS, &mut hellos);
            hellos & INIT != 0
        });
        assert_eq!(
            asked.collect::<Vec<u64>>(),
            [1, 71, 141, 211, 351, 631, 1131, 1631, 2131, 2631]
        );
        assert_eq!(liveness.look_at, 71 * MS, "it is asked again by itself");
    }
}
