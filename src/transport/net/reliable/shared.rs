//! State that all connections of an endpoint share.

use super::buffers::Buffers;
use super::congestion::WINDOW_MAX;
use super::connection::coalescer::Backoff;
use super::interface::{Counts, Settings};
use super::lateness::Lateness;
use super::receiver::Assembly;
use super::tag::BlockHash;
use crate::transport::JobKey;

/// Purpose of the secret that cookies are made with, for [`JobKey::from_secret`].
const COOKIE_SECRET: u64 = 5;
/// Length of an epoch, as a power of two of nanoseconds: peers that send within one count as sending at once.
const EPOCH_SHIFT: u32 = 23;

/// State that all connections of an endpoint share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) hash: BlockHash,
    /// The key that cookies are made with.
    pub(super) cookies: JobKey,
    pub(super) buffers: Buffers,
    pub(super) counts: Counts,
    /// Random numbers drawn so far.
    draws: u64,
    pub(super) pressure: bool,
    /// Packets that are not acknowledged.
    pub(super) unacknowledged: usize,
    /// Connections whose peer has not yet proven that it is there.
    pub(super) half_open: usize,
    /// Clock for a peer's silence, nanoseconds: it stands still while the application does not poll.
    pub(super) patience: u64,
    /// Until when the endpoint could not send, nanoseconds.
    pub(super) back_at: u64,
    senders: Senders,
    pub(super) lateness: Lateness,
    pub(super) backoff: Backoff,
    /// Numbers of connections whose peers were looked at while the layer above could not say whether it waits for them.
    pub(super) unasked: Vec<u32>,
    /// Memory in which the last message of several packets was reassembled, kept for the next one.
    pub(super) spare: Option<Box<Assembly>>,
}

impl Shared {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            hash: BlockHash::new(&settings.key),
            cookies: JobKey::from_secret(COOKIE_SECRET, &settings.seed),
            buffers: Buffers::new(settings.packet_max(), settings.buffer_bytes),
            settings,
            counts: Counts::default(),
            draws: 0,
            pressure: false,
            unacknowledged: 0,
            half_open: 0,
            patience: 0,
            back_at: 0,
            senders: Senders::default(),
            lateness: Lateness::default(),
            backoff: Backoff::default(),
            unasked: Vec::new(),
            spare: None,
        }
    }

    /// A random number.
    pub(super) fn random(&mut self) -> u64 {
        self.draws += 1;
        JobKey::from_bytes(self.settings.seed).tag(&self.draws.to_le_bytes())
    }

    /// `ns` plus up to a quarter of it.
    pub(super) fn jittered(&mut self, ns: u64) -> u64 {
        ns + self.random() % (ns / 4 + 1)
    }

    /// Packets that one peer may have in flight to this endpoint: its fair share of the receive window.
    pub(super) fn credit(&self) -> u16 {
        let senders = self.senders.now.max(self.senders.before).max(1);
        (self.settings.receive_window / senders).clamp(4, WINDOW_MAX) as u16
    }

    /// A connection delivers data. Counts it once an epoch; `seen` is the epoch in which it was last counted.
    pub(super) fn count_sender(&mut self, now: u64, seen: &mut u64) {
        let (epoch, senders) = (now >> EPOCH_SHIFT, &mut self.senders);
        if epoch != senders.epoch {
            senders.before = if epoch == senders.epoch + 1 { senders.now } else { 0 };
            (senders.now, senders.epoch) = (0, epoch);
        }
        if *seen != epoch {
            *seen = epoch;
            senders.now += 1;
        }
    }
}

/// Peers that sent data in this epoch, and in the one before.
#[derive(Debug, Default)]
struct Senders {
    epoch: u64,
    now: u32,
    before: u32,
}
