//! What the peers of an endpoint may access: its regions, and remote buffers of its receives.

use super::permits::State;
use super::published::Given;
use crate::sys::per_process::PerProcess;
use crate::telemetry::log;
use crate::transport::settling::settle;
use crate::transport::{PeerId, RemoteKey};
use std::sync::PoisonError;

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

/// All of it, in the order in which it was lent.
#[derive(Debug, Default)]
pub(super) struct Lendings(Vec<Lent>);

/// Permits of endpoints that have ended, or of peers that were given up, which a process has not left.
static LEFT: PerProcess<Vec<Given>> = PerProcess::new();

/// No process is still in an access to such memory.
pub(super) fn are_left_settled() -> bool {
    let Some(left) = LEFT.known() else { return true };
    let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
    left.retain(|permit| !is_unused(permit));
    left.is_empty()
}

fn is_unused(permit: &Given) -> bool {
    permit.permit().is_none_or(|permit| permit.is_unused())
}

/// The end of a remote buffer.
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
        is_unused(&self.permit)
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

    /// Ends all keys of a peer, or (`None`) of all peers, and waits for accesses in progress. Returns the remote buffers that
    /// are filled, and were not reported.
    pub(super) fn end_all(&mut self, peer: Option<PeerId>) -> Vec<(PeerId, u64)> {
        let is = |lent: &Lent| peer.is_none_or(|peer| peer == lent.peer);
        let (mut ending, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.0).into_iter().partition(is);
        self.0 = kept;
        for lent in &mut ending {
            // One that had ended is not the peer's to fill any more.
            lent.token = lent.token.filter(|_| !lent.ended);
            lent.end();
        }
        if !settle(|_| ending.iter().all(Lent::is_unused)) {
            log::warn(format_args!(
                "a process of this node does not end its access to device memory, which may change that memory later"
            ));
        }
        let (filled, others): (Vec<_>, Vec<_>) =
            ending.into_iter().partition(|lent| lent.state() == State::Filled);
        let mut busy = others.into_iter().filter(|lent| !lent.is_unused()).peekable();
        if busy.peek().is_some() {
            LEFT.lock().extend(busy.map(|lent| lent.permit));
        }
        filled.into_iter().filter_map(|lent| Some((lent.peer, lent.token?))).collect()
    }

    /// The next remote buffer that a peer is done with: first those that are filled.
    pub(super) fn next(&mut self) -> Option<Event> {
        let at = |state| {
            let is = |lent: &Lent| lent.token.is_some() && !lent.ended && lent.state() == state;
            self.0.iter().position(is)
        };
        if let Some(at) = at(State::Filled) {
            let lent = self.0.remove(at);
            return lent.token.map(|token| Event::Filled(lent.peer, token));
        }
        let at = at(State::Failed)?;
        Some(Event::Failed(self.0.remove(at).peer))
    }

    /// A peer may be filling a remote buffer, or is still in an access: nobody would wake a thread at its end.
    pub(super) fn are_awaited(&self) -> bool {
        self.0.iter().any(|lent| lent.token.is_some() || lent.ended)
    }
}
