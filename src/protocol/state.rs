//! What an endpoint's protocol consists of.

use super::arrivals::Arrivals;
use super::collective::Collectives;
use super::limits::{Counts, Limits, Standing};
use super::matching::Matching;
use super::outbox::Outbox;
use super::owed::Owed;
use super::peers::Peers;
use super::rma::Rma;
use super::sends::Sends;
use super::spaces::Space;
use super::traffic::Traffic;
use crate::transport::PeerId;

/// The protocol of one endpoint over one interface.
#[derive(Debug)]
pub(crate) struct Engine<I> {
    pub(super) iface: I,
    pub(super) core: Core,
}

/// All state but the interface: a type of its own, so that messages can be handled while the interface delivers them.
#[derive(Debug)]
pub(super) struct Core {
    /// There may be work that no turn has tried: since the last turn something has run that may have left some, or that
    /// turn itself has moved something.
    pub(super) stirred: bool,
    /// The last turn has left work.
    pub(super) waits: bool,
    /// A send has ended in the last poll for which the receiver's answer was needed.
    pub(super) paused: bool,
    /// Polls since the last turn, and the events that they brought, if another poll precedes the next one.
    pub(super) polls: usize,
    pub(super) taken: usize,
    pub(super) limits: Limits,
    pub(super) counts: Counts,
    pub(super) peers: Peers,
    pub(super) outbox: Outbox,
    pub(super) matching: Matching,
    pub(super) arrivals: Arrivals,
    pub(super) sends: Sends,
    /// One-sided operations.
    pub(super) rma: Rma,
    /// Collective groups.
    pub(super) collectives: Collectives,
    pub(super) owed: Owed,
}

impl Core {
    pub(super) fn standing(&self) -> Standing {
        Standing {
            counts: self.counts,
            held: self.matching.bytes,
            receives: self.matching.own.posted.len(),
            sends: self.sends.pending.len(),
            awaited: self.matching.own.awaited(),
            late_receivers: self.sends.late,
            early_senders: self.matching.early,
        }
    }

    /// The long messages that have gone to the peer, and come from it.
    pub(super) fn traffic(&self, peer: PeerId) -> Traffic {
        Traffic { sent: self.sends.long.of(peer), received: self.arrivals.long.of(peer) }
    }

    /// The send that has been pending for longest, as a number that no other one has soon, and its peer.
    pub(super) fn oldest_send(&self) -> Option<(u64, PeerId)> {
        let (key, pending) = self.sends.pending.iter().next()?;
        Some((key.to_wire(), pending.message.peer))
    }
}

impl<I> Engine<I> {
    pub(crate) fn new(iface: I, limits: Limits) -> Self {
        Self {
            iface,
            core: Core {
                stirred: false,
                waits: false,
                paused: false,
                polls: 0,
                taken: 0,
                limits,
                counts: Counts::default(),
                peers: Peers::new(limits.traced),
                outbox: Outbox::default(),
                matching: Matching::new(limits.contexts),
                arrivals: Arrivals::default(),
                sends: Sends::new(),
                rma: Rma::default(),
                collectives: Collectives::default(),
                owed: Owed::default(),
            },
        }
    }
}

impl Core {
    /// All matching spaces of the endpoint.
    pub(super) fn spaces(&self) -> impl Iterator<Item = Space> + use<> {
        Space::all(self.limits.contexts)
    }
}
