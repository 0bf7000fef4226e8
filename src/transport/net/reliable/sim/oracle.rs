//! The expected deliveries. A *stream* is the messages that one incarnation of an endpoint sends to one address until
//! it learns that the peer is gone. They reach one incarnation there, each once, in order, unchanged.
//!
//! A message carries the number of its stream and its own; everything else in it follows from these two, so no copies
//! of messages in flight are kept.

use super::super::MESSAGE_MAX;
use super::network::Slot;
use super::rng::{bytes, mix};
use crate::transport::MAX_HEADER;

/// Bytes of a header that identify the message.
const HEADER_MIN: usize = 8;

/// Longer than a datagram is in flight, nanoseconds.
pub(super) const UNDER_WAY_NS: u64 = 100_000_000;

/// The lengths of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sizes {
    /// Up to so many bytes of payload, all lengths equally likely.
    UpTo(u32),
    /// Mostly small ones, sometimes up to the longest.
    Mixed,
    /// The shortest header, and so many bytes.
    Exactly(u32),
}

/// An incarnation of an endpoint.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) slot: Slot,
    /// Nanoseconds; `u64::MAX`: it still runs.
    pub(super) ended: u64,
    /// It sent CLOSE.
    pub(super) closed: bool,
    /// Its job.
    pub(super) job: u8,
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) from: Slot,
    pub(super) from_life: u32,
    pub(super) to: Slot,
    sizes: Sizes,
    pub(super) accepted: u32,
    pub(super) delivered: u32,
    /// The incarnation that reads it.
    pub(super) reader: Option<u32>,
    /// The sender does not know that the peer is gone.
    pub(super) open: bool,
    /// The last time that a message moved while there were messages to move.
    moved_at: u64,
}

/// A message to send.
pub(super) struct Message {
    pub(super) header: [u8; MAX_HEADER],
    pub(super) header_len: usize,
    pub(super) payload: &'static [u8],
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    seed: u64,
    pub(super) streams: Vec<Stream>,
    pub(super) lives: Vec<Life>,
    pub(super) messages: u64,
    pub(super) payload: u64,
    /// When the last message arrived, nanoseconds.
    pub(super) delivered_at: u64,
    /// Messages from and to this slot are not checked.
    pub(super) hostile: Option<Slot>,
    /// From here on nothing hinders any endpoint, nanoseconds.
    pub(super) calm_from: u64,
    /// The longest time from there on in which a stream did not move although it had messages to move, nanoseconds.
    pub(super) longest_stall: u64,
}

impl Oracle {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    pub(super) fn born(&mut self, slot: Slot, job: u8) -> u32 {
        self.lives.push(Life { slot, ended: u64::MAX, closed: false, job });
        self.lives.len() as u32 - 1
    }

    /// How many incarnations at `slot` have ended of which one that began at `born` could hear.
    pub(super) fn ends(&self, slot: Slot, born: u64) -> usize {
        let heard = |l: &&Life| l.ended.saturating_add(UNDER_WAY_NS) >= born;
        let ended = self.lives.iter().filter(|l| l.slot == slot && l.ended != u64::MAX);
        ended.filter(heard).count()
    }

    pub(super) fn open(
        &mut self,
        (from, from_life): (Slot, u32),
        to: Slot,
        sizes: Sizes,
        now: u64,
    ) -> u32 {
        self.streams.push(Stream {
            from,
            from_life,
            to,
            sizes,
            accepted: 0,
            delivered: 0,
            reader: None,
            open: true,
            moved_at: now,
        });
        self.streams.len() as u32 - 1
    }

    /// The next message of a stream.
    #[inline]
    pub(super) fn compose(&self, stream: u32) -> Message {
        self.message(stream, self.streams[stream as usize].accepted)
    }

    #[inline]
    pub(super) fn accepted(&mut self, stream: u32, now: u64) {
        let stream = &mut self.streams[stream as usize];
        if stream.accepted == stream.delivered {
            stream.moved_at = now;
        }
        stream.accepted += 1;
    }

    fn message(&self, id: u32, number: u32) -> Message {
        let draw = mix(self.seed ^ mix(u64::from(id) << 32 | u64::from(number)));
        let more = mix(draw);
        let spare = (MAX_HEADER - HEADER_MIN + 1) as u64;
        let mut header_len = HEADER_MIN + (draw % spare) as usize;
        let len = match self.streams[id as usize].sizes {
            Sizes::UpTo(most) => more % (u64::from(most) + 1),
            Sizes::Mixed => match more % 64 {
                0 => MESSAGE_MAX as u64 - (more >> 8) % 3,
                1..4 => (more >> 8) % (MESSAGE_MAX as u64 + 1),
                4..16 => (more >> 8) % 4096,
                16..24 => 0,
                _ => (more >> 8) % 256,
            },
            Sizes::Exactly(len) => {
                header_len = HEADER_MIN;
                u64::from(len)
            }
        };
        let at = (draw >> 32) as usize % MESSAGE_MAX;
        let mut header = [0; MAX_HEADER];
        header[..4].copy_from_slice(&id.to_le_bytes());
        header[4..8].copy_from_slice(&number.to_le_bytes());
        header[8..header_len].copy_from_slice(bytes(at / 2, header_len - 8));
        Message { header, header_len, payload: bytes(at, len as usize) }
    }

    /// `reader`, at `slot`, has received a message over a connection to `peer`, on which `inbound` has come so far.
    /// Returns its stream, if that is known.
    pub(super) fn deliver(
        &mut self,
        (slot, reader): (Slot, u32),
        peer: Slot,
        inbound: Option<u32>,
        (header, payload): (&[u8], &[u8]),
        now: u64,
    ) -> Option<u32> {
        if self.hostile == Some(peer) || self.hostile == Some(slot) {
            return None;
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert!(
            header.len() >= HEADER_MIN,
            "{slot} got a header of {} B from {peer}",
            header.len()
        );
        let (id, number) = (word(0), word(4));
        assert!((id as usize) < self.streams.len(), "{slot} got what nobody has sent from {peer}");
        let expected = self.message(id, number);
        let reader_job = self.lives[reader as usize].job;
        let stream = &mut self.streams[id as usize];
        let what = || format!("message {number} of stream {id}, at {slot} from {peer}");
        assert_eq!((stream.from, stream.to), (peer, slot), "{}: by the wrong way", what());
        assert_eq!(
            self.lives[stream.from_life as usize].job,
            reader_job,
            "{}: of a stranger",
            what()
        );
        match inbound {
            Some(inbound) => assert_eq!(inbound, id, "{}: in the middle of another", what()),
            None => {
                assert_eq!(stream.reader, None, "{}: of a stream that was read before", what());
                stream.reader = Some(reader);
            }
        }
        assert_eq!(number, stream.delivered, "{}: out of order", what());
        assert!(number < stream.accepted, "{}: before it was sent", what());
        assert!(header == &expected.header[..expected.header_len], "{}: header differs", what());
        assert!(payload.len() == expected.payload.len(), "{}: length differs", what());
        assert!(payload == expected.payload, "{}: payload differs", what());
        stream.delivered += 1;
        let waited = now.saturating_sub(stream.moved_at.max(self.calm_from));
        self.longest_stall = self.longest_stall.max(waited);
        stream.moved_at = now;
        self.messages += 1;
        self.delivered_at = now;
        self.payload += payload.len() as u64;
        Some(id)
    }

    /// The sender has learnt that the peer is gone.
    pub(super) fn end(&mut self, stream: u32) {
        self.streams[stream as usize].open = false;
    }
}
