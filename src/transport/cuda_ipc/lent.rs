//! What the peers of an endpoint may access: its regions, and remote buffers of its receives.

use super::permits::State;
use super::published::Given;
use crate::telemetry::log;
use crate::transport::settling::settle;
use crate::transport::{PeerId, RemoteKey};

/// Memory under one key.
#[derive(Debug)]
struct Lent {
    peer: PeerId,
    key: RemoteKey,
    permit: Given,
    /// Of a remote buffer: the receive that it is of.
    token: Option<u64>,
    /// Its key is invalid, and an access may be in progress.
    ended: bool,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Lendings(Vec<Lent>);

/// What has happened to a remote buffer.
pub(super) enum Event {
    Filled(PeerId, u64),
    /// The peer's device has failed.
    Failed(PeerId),
}

impl Lent {
    fn state(&self) -> State {
        self.permit.permit().map_or(State::Failed, |permit| permit.state())
    }

    fn end(&mut self) {
        self.ended = true;
        self.permit.permit().into_iter().for_each(|permit| permit.end());
    }

    fn is_unused(&self) -> bool {
        self.permit.permit().is_none_or(|permit| permit.is_unused())
    }
}

impl Lendings {
    pub(super) fn add(&mut self, peer: PeerId, key: RemoteKey, permit: Given, token: Option<u64>) {
        self.0.push(Lent { peer, key, permit, token, ended: false });
    }

    /// Ends a key. Returns whether it was one of a remote buffer, which was not filled.
    pub(super) fn end(&mut self, peer: PeerId, key: &RemoteKey) -> bool {
        let is = |lent: &&mut Lent| lent.peer == peer && lent.key == *key && !lent.ended;
        let Some(lent) = self.0.iter_mut().find(is) else { return false };
        lent.end();
        let unfilled = lent.token.is_some();
        self.is_settled();
        unfilled
    }

    /// No access is in progress under a key that has ended.
    pub(super) fn is_settled(&mut self) -> bool {
        self.0.retain(|lent| !lent.ended || !lent.is_unused());
        self.0.iter().all(|lent| !lent.ended)
    }

    /// Ends all keys of a peer, or (`None`) of all peers, and waits for accesses in progress.
    pub(super) fn end_all(&mut self, peer: Option<PeerId>) {
        let is = |lent: &Lent| peer.is_none_or(|peer| peer == lent.peer);
        self.0.iter_mut().filter(|lent| is(lent)).for_each(Lent::end);
        if !settle(|_| self.0.iter().all(|lent| !is(lent) || lent.is_unused())) {
            log::warn(format_args!(
                "a process of this node does not end its access to device memory, which may change that memory later"
            ));
        }
        self.0.retain(|lent| !is(lent));
    }

    /// The next remote buffer that a peer is done with.
    pub(super) fn next(&mut self) -> Option<Event> {
        let is_over =
            |lent: &Lent| lent.token.is_some() && !lent.ended && lent.state() != State::Lent;
        let at = self.0.iter().position(is_over)?;
        let lent = self.0.swap_remove(at);
        Some(match (lent.state(), lent.token) {
            (State::Filled, Some(token)) => Event::Filled(lent.peer, token),
            _ => Event::Failed(lent.peer),
        })
    }

    /// A peer may be filling a remote buffer, or is still in an access: nobody would wake a thread at its end.
    pub(super) fn are_awaited(&self) -> bool {
        self.0.iter().any(|lent| lent.token.is_some() || lent.ended)
    }
}
