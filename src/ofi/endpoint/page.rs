//! What other processes see of an endpoint: its records in the page of the process (`telemetry::page`).

use crate::protocol::Counts;
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
}

impl PageRecord {
    /// `None`: this process has no page, or no record is free.
    pub(super) fn open(address: Address) -> Option<Self> {
        Some(Self {
            slot: Slot::take(&address.0.to_string())?,
            held_peak: 0,
            asleep: false,
            texts: Vec::new(),
        })
    }

    /// Copies counts, in the order of the names in `telemetry::page`.
    #[inline(never)]
    pub(super) fn show(&mut self, counts: &Counts, held: usize, figures: &Figures) {
        self.held_peak = self.held_peak.max(held as u64);
        self.slot.write(State::Open, &self.words(counts, held, figures));
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
        self.slot.write_peer_counts(record, [counts.sent, counts.received, counts.rtt_ns]);
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

    fn words(&self, counts: &Counts, held: usize, figures: &Figures) -> [u64; 31] {
        let packets = &figures.packets;
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
        let words = record.words(&Counts::default(), 0, &Figures::default());
        assert_eq!(endpoint_names().count(), words.len());
        let last = endpoint_names().last();
        assert_eq!(last, Some("connected"));
        assert_eq!(endpoint_names().nth(ASLEEP), Some("asleep"));
    }
}
