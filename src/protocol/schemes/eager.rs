//! Transmit-complete: sends that are complete when the peer's endpoint has them (fi_cq.3, FI_TRANSMIT_COMPLETE).
//!
//! Some transports keep a message until the peer acknowledges it, and lose it if this process ends. There an eager send
//! of that level waits for the acknowledgement. Elsewhere, and for long messages, which are answered, nothing is added.

use crate::protocol::engine::{Core, Engine};
use crate::protocol::index_list::Key;
use crate::protocol::packet::Envelope;
use crate::protocol::send::{SendOp, TxState, op_error, send_eager};
use crate::protocol::{Host, OpError};
use crate::transport::{Iface, Mark, PeerId};
use std::collections::VecDeque;

/// Sends that wait for the acknowledgement of one peer.
#[derive(Debug)]
pub(in crate::protocol) struct Leaving {
    peer: PeerId,
    /// In the order of sending.
    sends: VecDeque<(Mark, Key)>,
}

impl<I: Iface> Engine<I> {
    /// Sends an eager message that is complete when the peer's endpoint has it.
    pub(in crate::protocol) fn send_tracked(
        &mut self,
        op: &SendOp,
        envelope: Envelope,
        host: &mut impl Host,
    ) -> Result<(), OpError> {
        let key = self.request_without_bytes(op, envelope).ok_or(OpError::Again)?;
        if let Err(e) = send_eager(&mut self.iface, op.peer, &envelope, None, &op.payload) {
            self.core.tx.remove(key);
            return Err(op_error(e));
        }
        self.core.peers.mark_alive(op.peer);
        self.core.counts.eager_sent += 1;
        self.core.peers.count_outstanding(op.peer, 1);
        self.await_arrival(op.peer, key, host);
        Ok(())
    }

    /// Waits for the acknowledgement of a send that the transport has taken. The send is counted as outstanding.
    pub(in crate::protocol) fn await_arrival(
        &mut self,
        peer: PeerId,
        key: Key,
        host: &mut impl Host,
    ) {
        let Some(mark) = self.iface.tracked(peer) else {
            self.core.peers.count_outstanding(peer, -1);
            return self.core.finish_send(key, None, host);
        };
        if let Some(request) = self.core.tx.get_mut(key) {
            request.state = TxState::Leaving;
        }
        let of_peer = self.core.leaving.iter_mut().find(|leaving| leaving.peer == peer);
        match of_peer {
            Some(leaving) => leaving.sends.push_back((mark, key)),
            None => self.core.leaving.push(Leaving { peer, sends: [(mark, key)].into() }),
        }
    }

    /// Completes the sends that have been acknowledged.
    pub(in crate::protocol) fn advance_leaving(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        for at in (0..self.core.leaving.len()).rev() {
            let Some(peer) = self.core.leaving.get(at).map(|leaving| leaving.peer) else { break };
            if let Some(upto) = self.iface.acknowledged(peer).filter(|_| host.has_room()) {
                n += self.core.on_acknowledged(peer, upto, host);
            }
        }
        n
    }
}

impl Core {
    /// The peer has acknowledged everything before `upto`. Returns how many sends that completes.
    pub(in crate::protocol) fn on_acknowledged(
        &mut self,
        peer: PeerId,
        upto: Mark,
        host: &mut impl Host,
    ) -> usize {
        let Some(at) = self.leaving.iter().position(|leaving| leaving.peer == peer) else {
            return 0;
        };
        let mut n = 0;
        while let Some(leaving) = self.leaving.get_mut(at) {
            let first = leaving.sends.front().filter(|(mark, _)| mark.is_before(upto));
            let Some((_, key)) = first.copied() else { break };
            leaving.sends.pop_front();
            self.peers.count_outstanding(peer, -1);
            self.finish_send(key, None, host);
            n += 1;
        }
        if self.leaving.get(at).is_some_and(|leaving| leaving.sends.is_empty()) {
            self.leaving.swap_remove(at);
        }
        n
    }

    /// The peer has departed: no acknowledgements will come.
    pub(in crate::protocol) fn forget_leaving(&mut self, peer: PeerId) {
        self.leaving.retain(|leaving| leaving.peer != peer);
    }
}
