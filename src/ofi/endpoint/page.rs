//! What other processes see of an endpoint: its records in the page of the process (`telemetry::page`).

use crate::protocol::Standing;
use crate::telemetry::page::{Slot, State};
use crate::transport::{Address, Figures, PeerFigures};

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
        })
    }

    /// Copies counts, in the order of the names in `telemetry::page`. `awaited`: the peer that a receive waits for.
    #[inline(never)]
    pub(super) fn show(
        &mut self,
        standing: &Standing,
        figures: &Figures,
        awaited: Option<Address>,
    ) {
        self.held_peak = self.held_peak.max(standing.held as u64);
        let text = |peer: Option<Address>| peer.map_or(String::new(), |peer| peer.0.to_string());
        let (to, from) = (text(figures.oldest.map(|(peer, _)| peer)), text(awaited));
        self.slot.write(State::Open, &self.words(standing, figures), [&to, &from]);
        figures.peers.iter().for_each(|peer| self.show_peer(peer));
    }

    fn show_peer(&mut self, peer: &PeerFigures) {
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
        let counts = [counts.sent, counts.received, counts.rtt_ns, unanswered];
        self.slot.write_peer_counts(record, counts);
    }

    fn still_unanswered(&mut self, record: usize, unanswered: bool) -> u64 {
        self.unanswered.resize(self.unanswered.len().max(record + 1), 0);
        let Some(reports) = self.unanswered.get_mut(record) else { return 0 };
        *reports = if unanswered { *reports + 1 } else { 0 };
        *reports
    }

    /// From the next time that counts are copied.
    pub(super) fn sleep(&mut self) {
        self.asleep = true;
    }

    pub(super) fn wake(&mut self) {
        if std::mem::take(&mut self.asleep) {
            self.slot.write_one(ASLEEP, 0);
        }
    }

    fn words(&self, standing: &Standing, figures: &Figures) -> [u64; 35] {
        let (counts, held, packets) = (&standing.counts, standing.held, &figures.packets);
        [
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
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::page::endpoint_names;

    #[test]
    fn every_word_of_an_endpoint_has_a_name() {
        let record = PageRecord::open(Address("127.0.0.1:1".parse().unwrap())).unwrap();
        let words = record.words(&Standing::default(), &Figures::default());
        assert_eq!(endpoint_names().count(), words.len() + 2);
        let last = endpoint_names().last();
        assert_eq!(last, Some("receive_waits_for:64"));
        assert_eq!(endpoint_names().nth(ASLEEP), Some("asleep"));
    }
}
