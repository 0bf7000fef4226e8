//! Results of runs, and bounds for their costs.

use super::super::Counts;
use super::network::Fates;
use super::node::Node;
use std::fmt;
use std::time::Instant;

/// Bounds for the ratios of [`Outcome`].
const AGAIN: f64 = 1.5;
const HELLOS: f64 = 3.0;
const ACKS: f64 = 1.5;
const STALL_NS: u64 = 6_000_000_000;

/// The results of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    pub(super) fates: Fates,
    pub(super) counts: Counts,
    pub(super) messages: u64,
    /// Bytes.
    pub(super) payload: u64,
    pub(super) departures: u64,
    /// Virtual time, nanoseconds.
    pub(super) ended: u64,
    /// When the last message arrived, nanoseconds.
    pub(super) delivered_at: u64,
    /// The longest time that a stream waited without a reason, nanoseconds.
    pub(super) longest_stall: u64,
    pub(super) memory_peak: usize,
    pub(super) socket_peak: u64,
    pub(super) port_peak: u64,
    pub(super) turns: u64,
    pub(super) lives: u64,
    pub(super) slots: u64,
    pub(super) fragile: bool,
}

impl Outcome {
    /// Adds the counts of an incarnation that has ended.
    pub(super) fn tally(&mut self, node: &Node) {
        self.counts = sum(&self.counts, node.counts());
        self.lives += 1;
        self.departures += node.app.departures;
        self.turns += node.turns;
        self.memory_peak = self.memory_peak.max(node.memory_peak);
        self.socket_peak = self.socket_peak.max(node.socket_peak);
        self.port_peak = self.port_peak.max(node.port_peak);
    }

    /// Retransmissions for each packet that was lost, reordered, dropped for lack of memory, or not acknowledged in
    /// time.
    pub(super) fn again(&self) -> f64 {
        let causes = self.fates.gone()
            + self.fates.reordered
            + self.fates.duplicated
            + self.fates.forged
            + self.counts.no_room
            + self.counts.timeouts;
        self.counts.retransmitted as f64 / (causes + 100) as f64
    }

    /// Handshake packets for each connection that was made or tried, for each fourth timeout, and for each second and
    /// pair.
    pub(super) fn hellos(&self) -> f64 {
        let seconds = self.ended as f64 / 1e9;
        let pairs = (self.slots * (self.slots - 1)) as f64;
        let occasions = 2 * self.counts.connected + self.departures + self.fates.forged;
        let silences = self.counts.timeouts / 4;
        let all = (occasions + silences + 10) as f64 + 2.0 * seconds * pairs;
        self.counts.hellos_sent as f64 / all
    }

    /// Acknowledgements for each packet that asks for one.
    pub(super) fn acks(&self) -> f64 {
        let hellos = self.counts.hellos_sent + self.fates.duplicated + self.fates.forged;
        let packets = self.counts.data_received + hellos;
        self.counts.acks_sent as f64 / (packets + 10) as f64
    }

    /// Checks that there are no excessive retransmissions and no long stalls. The worst of 10^8 packets in 40,000 cases
    /// came close to two thirds of these bounds.
    pub(super) fn assert_no_storm(&self) {
        assert!(self.again() < AGAIN, "{:.2} sent again for each lost: {self:?}", self.again());
        assert!(self.hellos() < HELLOS, "{:.2} handshakes: {self:?}", self.hellos());
        assert!(self.acks() < ACKS, "{:.2} acknowledgements: {self:?}", self.acks());
        assert!(self.fragile || self.longest_stall < STALL_NS, "a long wait: {self:?}");
    }
}

fn sum(a: &Counts, b: &Counts) -> Counts {
    Counts {
        data_sent: a.data_sent + b.data_sent,
        retransmitted: a.retransmitted + b.retransmitted,
        acks_sent: a.acks_sent + b.acks_sent,
        hellos_sent: a.hellos_sent + b.hellos_sent,
        data_received: a.data_received + b.data_received,
        duplicates: a.duplicates + b.duplicates,
        early: a.early + b.early,
        no_room: a.no_room + b.no_room,
        timeouts: a.timeouts + b.timeouts,
        forged: a.forged + b.forged,
        stray: a.stray + b.stray,
        malformed: a.malformed + b.malformed,
        strangers: a.strangers + b.strangers,
        versions: a.versions + b.versions,
        connected: a.connected + b.connected,
        departed: a.departed + b.departed,
    }
}

/// The outcomes of many runs.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) total: Outcome,
    began: Instant,
    cases: u64,
    /// The worst results, and their seeds.
    worst: [(f64, u64); 5],
}

type Measure = (&'static str, fn(&Outcome) -> f64);

/// The measures for which the worst results are kept.
const MEASURES: [Measure; 5] = [
    ("sent again for each packet lost", Outcome::again),
    ("handshakes for each occasion", Outcome::hellos),
    ("acknowledgements for each packet", Outcome::acks),
    ("s without progress, nothing wrong", |o| {
        if o.fragile { 0.0 } else { o.longest_stall as f64 / 1e9 }
    }),
    ("s without progress, much lost", |o| o.longest_stall as f64 / 1e9),
];

impl Default for Report {
    fn default() -> Self {
        let total = Outcome::default();
        Self { total, began: Instant::now(), cases: 0, worst: [(0.0, 0); 5] }
    }
}

impl Report {
    pub(super) fn add(&mut self, seed: u64, one: &Outcome) {
        let all = &mut self.total;
        all.counts = sum(&all.counts, &one.counts);
        all.fates = all.fates.sum(&one.fates);
        all.messages += one.messages;
        all.payload += one.payload;
        all.departures += one.departures;
        all.ended += one.ended;
        all.turns += one.turns;
        all.lives += one.lives;
        self.cases += 1;
        for (worst, (_, measure)) in self.worst.iter_mut().zip(MEASURES) {
            if measure(one) > worst.0 {
                *worst = (measure(one), seed);
            }
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { fates, counts, .. } = &self.total;
        let seconds = self.began.elapsed().as_secs_f64();
        writeln!(
            f,
            "{} cases, {} lives, {} packets, {} messages, {} MB, {} departures, {:.0} s of virtual time; {seconds:.1} s, {:.2} million packets a second",
            self.cases,
            self.total.lives,
            fates.sent,
            self.total.messages,
            self.total.payload / 1_000_000,
            self.total.departures,
            self.total.ended as f64 / 1e9,
            fates.sent as f64 / seconds / 1e6
        )?;
        writeln!(f, "  {fates:?}")?;
        write!(f, "  {counts:?}")?;
        for ((worst, seed), (name, _)) in self.worst.iter().zip(MEASURES) {
            write!(f, "\n  worst: {worst:.2} {name} (seed {seed})")?;
        }
        Ok(())
    }
}
