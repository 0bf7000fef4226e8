//! What other processes see of an endpoint: its records in the page of the process (`telemetry::page`).

use crate::protocol::{Standing, Traffic};
use crate::telemetry::page::{ENDPOINT_COUNTS, PEER_COUNTS, Slot, State};
use crate::telemetry::ranks;
use crate::telemetry::trace::{self, About, Kind};
use crate::transport::{Address, Figures, PeerCounts, PeerFigures, PeerId};
use std::net::SocketAddr;

/// The number of the word that says whether the endpoint is asleep.
const ASLEEP: usize = 3;

/// The records of one endpoint.
#[derive(Debug)]
pub(super) struct PageRecord {
    slot: Slot,
    /// Most bytes of unexpected messages that were seen.
    held_peak: u64,
    /// No thread has to poll: the next message wakes one.
    asleep: bool,
    /// By record: the texts that a peer's record has.
    texts: Vec<Option<(Address, &'static str, &'static str)>>,
    /// By record: reports in a row that found the peer's answer to the first contact missing.
    unanswered: Vec<u64>,
    /// The port of the endpoint, and while events are kept the addresses of its peers.
    port: u16,
    met: Vec<Option<SocketAddr>>,
}

impl PageRecord {
    /// `None`: this process has no page, or no record is free.
    pub(super) fn open(address: Address) -> Option<Self> {
        Some(Self {
            slot: Slot::take(&address.0.to_string())?,
            held_peak: 0,
            asleep: false,
            texts: Vec::new(),
            unanswered: Vec::new(),
            port: address.port(),
            met: Vec::new(),
        })
    }

    /// Copies counts, in the order of the names in `telemetry::page`. `traffic`: of the peers of the figures, in their
    /// order. `awaited`: the peer that a receive waits for.
    #[inline(never)]
    pub(super) fn show(
        &mut self,
        standing: &Standing,
        figures: &Figures,
        traffic: &[Traffic],
        awaited: Option<Address>,
    ) {
        self.held_peak = self.held_peak.max(standing.held as u64);
        let text = |peer: Option<Address>| peer.map_or(String::new(), |peer| peer.0.to_string());
        let (to, from) = (text(figures.oldest.map(|(peer, _)| peer)), text(awaited));
        let words = self.words(standing, figures).into_iter();
        self.slot.write(State::Open, words, [&to, &from]);
        figures.peers.iter().zip(traffic).for_each(|(peer, traffic)| self.show_peer(peer, traffic));
    }

    fn show_peer(&mut self, peer: &PeerFigures, traffic: &Traffic) {
        let number = peer.peer.index();
        let Some((transport, reason, counts)) = peer.by else {
            let record = self.slot.close_peer(number);
            if let Some(texts) = record.and_then(|record| self.texts.get_mut(record)) {
                *texts = None;
            }
            return;
        };
        let Some(record) = self.slot.record_of(number) else { return };
        let texts = Some((peer.address, transport, reason));
        // To write the texts takes longer than everything else here.
        if self.texts.get(record) != Some(&texts) {
            self.slot.write_peer(record, &peer.address.0.to_string(), transport, reason);
            self.texts.resize(self.texts.len().max(record + 1), None);
            if let Some(written) = self.texts.get_mut(record) {
                *written = texts;
            }
        }
        let unanswered = self.still_unanswered(record, counts.unanswered);
        let rank = ranks::of(&peer.address.0).map_or(PeerCounts::UNKNOWN, u64::from);
        let known = [counts.sent, counts.received, counts.rtt_ns, unanswered, rank];
        self.slot.write_peer_counts(record, peer_words(known, traffic));
    }

    fn still_unanswered(&mut self, record: usize, unanswered: bool) -> u64 {
        self.unanswered.resize(self.unanswered.len().max(record + 1), 0);
        let Some(reports) = self.unanswered.get_mut(record) else { return 0 };
        *reports = if unanswered { *reports + 1 } else { 0 };
        *reports
    }

    /// A peer has this number now.
    pub(super) fn met(&mut self, peer: PeerId, address: &Address) {
        if trace::is_on() {
            self.met.resize(self.met.len().max(peer.index() + 1), None);
            if let Some(known) = self.met.get_mut(peer.index()) {
                *known = Some(address.0);
            }
        }
    }

    /// Something has happened to a message.
    pub(super) fn trace(&self, kind: Kind, peer: PeerId, number: u64, bytes: usize) {
        let peer = self.met.get(peer.index()).copied().flatten();
        trace::event(kind, About { port: self.port, peer }, number, bytes as u64);
    }

    /// From the next time that counts are copied.
    pub(super) fn sleep(&mut self) {
        self.asleep = true;
    }

    #[cfg(test)]
    pub(super) fn is_asleep(&self) -> bool {
        self.asleep
    }

    pub(super) fn wake(&mut self) {
        if std::mem::take(&mut self.asleep) {
            self.slot.write_one(ASLEEP, 0);
        }
    }

    fn words(&self, standing: &Standing, figures: &Figures) -> [u64; ENDPOINT_COUNTS] {
        let (counts, held, packets) = (&standing.counts, standing.held, &figures.packets);
        let before = [
            figures.polls,
            figures.empty_polls,
            figures.sleeps,
            u64::from(self.asleep),
            held as u64,
            self.held_peak,
            counts.eager_sent,
            counts.rendezvous_sent,
            counts.unexpected,
            counts.pulled_bytes,
            counts.pushed_bytes,
            counts.fragment_bytes,
            counts.dropped,
            counts.surplus,
            counts.stream_bytes,
            counts.resumed,
            counts.window_bytes,
            counts.windows_lost,
            counts.declined,
            counts.assisted_bytes,
            counts.reached_bytes,
            counts.read_bytes,
            figures.cache.0,
            figures.cache.1,
        ];
        let times = [&standing.late_receivers, &standing.early_senders, &figures.gaps];
        let after = [
            packets.sent,
            packets.received,
            packets.retransmitted,
            packets.timeouts,
            packets.duplicates,
            packets.no_room,
            packets.forged,
            packets.stray,
            packets.connected,
            standing.receives as u64,
            standing.sends as u64,
            figures.now,
            figures.oldest.map_or(0, |(_, since)| since),
        ];
        let times = times.into_iter().flat_map(|times| times.0);
        filled(before.into_iter().chain(times).chain(after))
    }
}

/// The counts of a peer: those that its transport has, and the messages that went and came.
fn peer_words(known: [u64; 5], traffic: &Traffic) -> [u64; PEER_COUNTS] {
    let tallies = traffic.sent.iter().chain(&traffic.received);
    let tallies = tallies.flat_map(|tally| [tally.messages, tally.bytes]);
    filled(known.into_iter().chain(tallies))
}

/// The numbers in an array, which has as many.
fn filled<const N: usize>(mut numbers: impl Iterator<Item = u64>) -> [u64; N] {
    std::array::from_fn(|_| numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Tally;
    use crate::telemetry::histogram::{CLASSES, Histogram};
    use crate::telemetry::page::endpoint_names;

    #[test]
    fn every_word_of_an_endpoint_has_a_name() {
        let record = PageRecord::open(Address("127.0.0.1:1".parse().unwrap())).unwrap();
        let mut gaps = Histogram::default();
        gaps.count(u64::MAX);
        let figures = Figures { gaps, now: 77, ..Figures::default() };
        let words = record.words(&Standing::default(), &figures);
        // The last class of the last histogram, and the time before the last word.
        let histograms =
            endpoint_names().position(|name| name.starts_with("late_receivers")).unwrap();
        assert_eq!(words.iter().position(|word| *word == 1), Some(histograms + 3 * CLASSES - 1));
        let behind = endpoint_names().position(|name| name == "renewed_ns").unwrap();
        assert_eq!(words[behind + 3 * (CLASSES - 1)], 77);
        assert_eq!(endpoint_names().last(), Some("receive_waits_for:64"));
        assert_eq!(endpoint_names().nth(ASLEEP), Some("asleep"));
    }

    #[test]
    fn a_peers_messages_are_behind_its_other_counts() {
        let mut traffic = Traffic::default();
        traffic.sent[0] = Tally { messages: 5, bytes: 6 };
        traffic.received[4] = Tally { messages: 7, bytes: 8 };
        let words = peer_words([1, 2, 3, 4, 0], &traffic);
        assert_eq!(words[..7], [1, 2, 3, 4, 0, 5, 6]);
        assert_eq!(words[PEER_COUNTS - 2..], [7, 8]);
    }
}
