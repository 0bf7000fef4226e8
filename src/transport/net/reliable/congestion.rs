//! Congestion control: how much may be in flight to one peer, and the retransmission timeout.
//!
//! After a slow start the window grows by a packet per round trip. Once per round trip it shrinks by the fraction of
//! packets lost in it: chance losses cost little, and where too many packets are sent, that fraction is the excess.
//! Loss with long round trips means a full queue, and halves the window (RFC 5681). Congestion marks count as in DCTCP
//! (RFC 8257).

/// Smallest window, packets.
const WINDOW_MIN: u32 = 2;
/// Window of a new connection, packets.
const WINDOW_START: u32 = 16;
/// Largest window, packets: what a selective acknowledgement covers.
pub(super) const WINDOW_MAX: u32 = 1024;
/// The unit of fixed-point fractions. Integers, because they are calculated for every packet.
const ONE: u32 = 1 << 16;
/// Bounds of the retransmission timeout, nanoseconds.
pub(super) const TIMEOUT_MIN_NS: u64 = 1_000_000;
pub(super) const TIMEOUT_MAX_NS: u64 = 1_000_000_000;
/// Time to wait for a peer whose core is busy, beyond the time of the network, nanoseconds.
const CROWDED_NS: u64 = 8_000_000;
/// How often the timeout's variation can double; round trips without an early timeout after which it halves.
const EARLY_MAX: u8 = 2;
const IN_TIME: u8 = 200;
/// The timeout before the first round trip was measured.
const TIMEOUT_START_NS: u64 = 20_000_000;
/// The recent longest answer time shrinks by 1/`ANSWER_STEP` with each answer.
const ANSWER_STEP: u32 = 32;
/// How long a shortest round trip counts, nanoseconds.
const SHORTEST_AGE_NS: u64 = 10_000_000_000;
/// Smallest and largest reduction of the window after a round with loss, in units of [`ONE`].
const CUT_MIN: u32 = ONE / 50;
const CUT_MAX: u32 = ONE / 2;
/// Weight of a round in the smoothed fraction of marked packets, as a divisor.
const MARKS_STEP: u32 = 16;
/// A round trip above twice the shortest and this much means a full queue, nanoseconds.
const QUEUE_NS: u64 = 50_000;

/// The congestion state of the path to one peer.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Congestion {
    /// Packets, times [`ONE`].
    window: u32,
    slow_start: bool,
    /// Smoothed round trip and its variation (RFC 6298), nanoseconds; 0: none measured.
    rtt_ns: u32,
    variation_ns: u32,
    shortest_ns: u32,
    shortest_at: u64,
    /// The peer's recent longest time to answer, beside the round trip, nanoseconds.
    answer_ns: u32,
    /// How often answers recently came after the timeout, and the samples since the last one.
    early: u8,
    in_time: u8,
    /// The round ends when this transmission is acknowledged.
    round_end: u64,
    acked: u32,
    lost: u32,
    marked: u32,
    /// Smoothed fraction of marked packets, in units of [`ONE`].
    marks: u32,
}

impl Congestion {
    pub(super) fn new() -> Self {
        let window = WINDOW_START * ONE;
        Self { window, slow_start: true, shortest_ns: u32::MAX, ..Self::default() }
    }

    /// Packets that may be in flight.
    #[inline]
    pub(super) fn window(&self) -> u32 {
        self.window / ONE
    }

    /// Smoothed round trip, nanoseconds; 0: not measured.
    pub(super) fn round_trip_ns(&self) -> u64 {
        u64::from(self.rtt_ns)
    }

    /// The retransmission timeout, nanoseconds.
    #[inline]
    pub(super) fn timeout_ns(&self) -> u64 {
        if self.rtt_ns == 0 {
            return TIMEOUT_START_NS;
        }
        let variation = u64::from(self.variation_ns) << (2 + self.early);
        let wait = u64::from(self.rtt_ns) + variation + u64::from(self.answer_ns);
        // Round trips and answers much longer than the shortest are time slices of a crowded node. A timeout that is
        // too early costs a packet; one that covers every time slice costs that time after each loss.
        let most = 4 * u64::from(self.shortest_ns) + CROWDED_NS;
        wait.min(most).clamp(TIMEOUT_MIN_NS, TIMEOUT_MAX_NS)
    }

    /// A packet was answered `sample_ns` after the link was asked to send it.
    pub(super) fn on_round_trip(&mut self, sample_ns: u64, now: u64) {
        self.in_time = self.in_time.saturating_add(1);
        if self.in_time == IN_TIME {
            self.in_time = 0;
            self.early = self.early.saturating_sub(1);
        }
        let sample = u32::try_from(sample_ns.max(1)).unwrap_or(u32::MAX);
        if sample <= self.shortest_ns || now.saturating_sub(self.shortest_at) > SHORTEST_AGE_NS {
            self.shortest_ns = sample;
            self.shortest_at = now;
        }
        if self.rtt_ns == 0 {
            (self.rtt_ns, self.variation_ns) = (sample, sample / 2);
            return;
        }
        if sample < self.rtt_ns / 2 {
            // The peer was busy before. After a loss a timeout that is too late costs more than one that is too early,
            // which costs one packet.
            self.rtt_ns -= (self.rtt_ns - sample) / 2;
            self.variation_ns /= 2;
            return;
        }
        let off = self.rtt_ns.abs_diff(sample);
        self.variation_ns = self.variation_ns - self.variation_ns / 4 + off / 4;
        self.rtt_ns = self.rtt_ns - self.rtt_ns / 8 + sample / 8;
    }

    /// The peer answered `delay_ns` after the packet had arrived there.
    #[inline]
    pub(super) fn on_answer(&mut self, delay_ns: u64) {
        let delay = delay_ns.min(CROWDED_NS) as u32;
        self.answer_ns = delay.max(self.answer_ns - self.answer_ns.div_ceil(ANSWER_STEP));
    }

    /// A packet that was sent again after a timeout had arrived the first time: the timeout was too early.
    pub(super) fn on_early(&mut self) {
        self.in_time = 0;
        self.early = (self.early + 1).min(EARLY_MAX);
    }

    fn queues(&self) -> bool {
        u64::from(self.rtt_ns) > 2 * u64::from(self.shortest_ns) + QUEUE_NS
    }

    /// `packets` have arrived, `marked` of them with a congestion mark; `full`: the window was in use.
    #[inline]
    pub(super) fn on_acknowledged(&mut self, packets: u32, marked: u32, full: bool) {
        self.acked = self.acked.saturating_add(packets);
        self.marked = self.marked.saturating_add(marked);
        if !full {
            return;
        }
        let packets = packets.min(WINDOW_MAX) * ONE;
        let grow = if self.slow_start {
            packets
        } else {
            (u64::from(packets) * u64::from(ONE) / u64::from(self.window)) as u32
        };
        self.window = (self.window + grow).min(WINDOW_MAX * ONE);
    }

    /// A packet was lost.
    pub(super) fn on_lost(&mut self) {
        self.lost = self.lost.saturating_add(1);
        self.slow_start = false;
    }

    /// Packets that were declared lost have arrived.
    pub(super) fn on_late(&mut self, packets: u32) {
        self.lost = self.lost.saturating_sub(packets);
    }

    /// `echo` is the highest transmission that has arrived, `next` the next one to be made.
    #[inline]
    pub(super) fn on_echo(&mut self, echo: u64, next: u64) {
        if echo < self.round_end {
            return;
        }
        self.round_end = next;
        if self.lost > 0 {
            let fraction = self.fraction(self.lost);
            let cut = if self.queues() { CUT_MAX } else { fraction.clamp(CUT_MIN, CUT_MAX) };
            self.window -= self.part(cut);
        } else if self.queues() {
            self.slow_start = false;
        }
        if self.marked > 0 || self.marks > 0 {
            let marks = self.fraction(self.marked);
            self.marks = self.marks - self.marks.div_ceil(MARKS_STEP) + marks / MARKS_STEP;
        }
        if self.marked > 0 {
            self.slow_start = false;
            self.window -= self.part(self.marks / 2);
        }
        self.window = self.window.max(WINDOW_MIN * ONE);
        (self.acked, self.lost, self.marked) = (0, 0, 0);
    }

    /// The fraction that `packets` are of this round, in units of [`ONE`].
    fn fraction(&self, packets: u32) -> u32 {
        let all = u64::from(self.acked.saturating_add(self.lost).max(1));
        (u64::from(packets) * u64::from(ONE) / all).min(u64::from(ONE)) as u32
    }

    /// `fraction`, in units of [`ONE`], of the window.
    fn part(&self, fraction: u32) -> u32 {
        (u64::from(self.window) * u64::from(fraction) / u64::from(ONE)) as u32
    }

    /// No answer has come for several timeouts.
    pub(super) fn on_silence(&mut self) {
        self.window = WINDOW_MIN * ONE;
        self.slow_start = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(c: &mut Congestion, n: u32, lost: u32, sample_ns: u64) {
        for i in 0..n {
            let w = c.window();
            c.on_round_trip(sample_ns, u64::from(i));
            for _ in 0..lost.min(w) {
                c.on_lost();
            }
            c.on_acknowledged(w - lost.min(w), 0, true);
            let end = c.round_end;
            c.on_echo(end, end + u64::from(w));
        }
    }

    #[test]
    fn a_busy_peer_is_waited_for() {
        let mut c = Congestion::new();
        rounds(&mut c, 50, 0, 500_000);
        let quick = c.timeout_ns();
        c.on_answer(4_000_000);
        assert!((4_000_000..6_000_000).contains(&c.timeout_ns()), "{}", c.timeout_ns());
        // It waits neither longer than a crowded node's time slice, nor without end.
        c.on_answer(1 << 40);
        assert!(c.timeout_ns() <= 2_000_000 + CROWDED_NS, "{}", c.timeout_ns());
        for _ in 0..600 {
            c.on_answer(0);
        }
        assert!(c.timeout_ns() <= quick + 100, "{} {quick}", c.timeout_ns());
    }

    #[test]
    fn a_peer_that_was_asked_too_early_is_waited_for_longer_for_a_while() {
        let mut c = Congestion::new();
        for i in 0..100 {
            c.on_round_trip(900_000 + 400_000 * (i % 2), i);
        }
        let before = c.timeout_ns();
        c.on_early();
        let once = c.timeout_ns();
        assert!(once > before + 500_000, "{before} {once}");
        (0..10).for_each(|_| c.on_early());
        assert!(c.timeout_ns() < 4 * before, "{before} {}", c.timeout_ns());
        for i in 0..1000 {
            c.on_round_trip(900_000 + 400_000 * (i % 2), i);
        }
        assert!(c.timeout_ns().abs_diff(before) < before / 10, "{before} {}", c.timeout_ns());
    }

    #[test]
    fn the_window_opens_and_stays_within_its_bounds() {
        let mut c = Congestion::new();
        rounds(&mut c, 20, 0, 20_000);
        assert_eq!(c.window(), 1024);
        rounds(&mut c, 100, 1000, 20_000);
        assert!(c.window() >= 2 && c.window() < 10, "{}", c.window());
    }

    #[test]
    fn chance_losses_cost_little_and_queues_much() {
        let mut c = Congestion::new();
        rounds(&mut c, 20, 0, 20_000);
        rounds(&mut c, 1, 1, 20_000);
        assert!(c.window() > 990, "{}", c.window());
        rounds(&mut c, 30, 0, 500_000);
        rounds(&mut c, 1, 1, 500_000);
        assert!(c.window() < 520, "{}", c.window());
    }

    #[test]
    fn the_timeout_follows_the_round_trip() {
        let mut c = Congestion::new();
        assert_eq!(c.timeout_ns(), TIMEOUT_START_NS);
        for i in 0..100 {
            c.on_round_trip(5_000_000, i);
        }
        assert!((5_000_000..6_000_000).contains(&c.timeout_ns()), "{}", c.timeout_ns());
        for i in 0..100 {
            c.on_round_trip(10_000, i);
        }
        assert_eq!(c.timeout_ns(), TIMEOUT_MIN_NS);
    }
}
