//! The state of the shared-memory transport of an endpoint. The operations on it are in the files of their subjects.

use super::budget::Budget;
use super::config::CmaPolicy;
use super::crowd::Crowd;
use super::door::Door;
use super::inbound::{Inbound, Links};
use super::outbound::{Outbound, Outbounds};
use super::refusals::Refusals;
use super::unsettled::Reaching;
use super::watching::Watches;
use crate::sys::Errno;
use crate::sys::bell::Bell;
use crate::sys::late_set::LateSet;
use crate::sys::process::{self, Home};
use crate::telemetry::log;
use crate::transport::address::LocalHost;
use crate::transport::{Address, Contact, PeerId, Returned};
use std::sync::Arc;

/// Time from when a sender is asked to check for sleepers until we may sleep, nanoseconds. Before the sender sees that
/// request, it publishes messages without ringing the doorbell, and we may not see those at once either
/// (`ring::model`). After this time both have happened.
pub(super) const SETTLES_NS: u64 = 50_000;

/// Settings of the user and the job key that apply to links.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) cma: CmaPolicy,
    /// Fingerprint of the application's job key; 0 without one.
    pub(super) mark: u64,
    pub(super) push_max: Option<usize>,
    pub(super) share_min: Option<usize>,
    pub(super) budget: Arc<Budget>,
}

impl Settings {
    pub(super) fn new(cma: CmaPolicy, memory: usize) -> Self {
        let budget = Arc::new(Budget::new(memory));
        Self { cma, mark: 0, push_max: None, share_min: None, budget }
    }
}

/// Work for the next turn.
#[derive(Debug, Default)]
pub(super) struct Due {
    /// Peers that violated the protocol in `poll`.
    pub(super) broken: Vec<PeerId>,
    /// Peers whose incoming link belongs to an earlier incarnation.
    pub(super) stale: Vec<PeerId>,
    /// Processes that have ended: a copy did not find them, or links with their successors wait to be made.
    pub(super) ended: Vec<i32>,
    /// The next poll has to run a turn.
    pub(super) urgent: bool,
}

impl Due {
    /// `peer` violated the protocol.
    pub(super) fn end(&mut self, peer: PeerId) {
        self.broken.push(peer);
        self.urgent = true;
    }

    /// The links to `peer` have ended.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.broken.retain(|broken| *broken != peer);
        self.stale.retain(|stale| *stale != peer);
    }
}

/// Whether a thread sleeps until a ring has a message.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Senders were asked to check for sleepers.
    pub(super) asked: bool,
    /// No sleep before this time, nanoseconds.
    pub(super) settles_at: u64,
    pub(super) sleeping: bool,
}

/// The shared-memory interface of one endpoint.
#[derive(Debug)]
pub(crate) struct Shm {
    pub(super) me: Address,
    pub(super) host: LocalHost,
    pub(super) nonce: u64,
    pub(super) settings: Settings,
    pub(super) door: Door,
    pub(super) epoll: Arc<LateSet>,
    /// `None`: the endpoint takes no links.
    pub(super) bell: Option<Arc<Bell>>,
    pub(super) reaching: Reaching,
    pub(super) crowd: Crowd,
    pub(super) outbound: Outbounds,
    pub(super) inbound: Links,
    /// Messages from the rings of refused links, for the endpoint to send another way.
    pub(super) returned: Vec<Returned>,
    pub(super) refusals: Refusals,
    pub(super) watches: Watches,
    pub(super) due: Due,
    pub(super) pressure: bool,
    pub(super) waiting: Waiting,
    pub(super) owner: Home,
}

impl Shm {
    /// False in a forked child, which must not act for its parent when it closes or exits.
    pub(super) fn is_owner(&self) -> bool {
        self.owner.is_here()
    }

    pub(super) fn out(&self, peer: PeerId) -> Option<&Outbound> {
        self.outbound.get(peer.index())?.as_deref()
    }

    pub(super) fn inbound_of(&self, peer: PeerId) -> Option<&Inbound> {
        self.inbound.of(peer)
    }
}

/// The port belongs to another user.
pub(super) fn stranger(address: &Address, uid: u32) -> Contact {
    log::limited!("{address} belongs to user {uid}, not to {}: refused", process::effective_uid());
    Contact::Missing(Errno(libc::EPERM))
}
