//! Long messages whose bytes arrive by stream (PROTOCOL.md §4.11): placed without a copy, and requested again as
//! fragments when the stream breaks.

use crate::protocol::engine::Core;
use crate::protocol::index_list::Key;
use crate::protocol::packet::Packet;
use crate::protocol::send::{Carrier, TxRequest, TxState};
use crate::transport::PeerId;

impl Core {
    /// The outgoing stream to `peer` broke: the messages that it carried wait for the receiver's RESUME.
    pub(in crate::protocol) fn park_streamed(&mut self, peer: PeerId) {
        let Self { tx, streams, .. } = self;
        streams.retain(|key| {
            let Some(request) = tx.get_mut(*key) else { return false };
            if request.peer != peer || request.carrier != Carrier::Stream {
                return true;
            }
            request.carrier = Carrier::Fragments;
            request.state = TxState::AwaitingAnswer;
            false
        });
    }

    /// The stream from `peer` broke: the missing bytes of each message are requested, now or when its receive is found.
    pub(in crate::protocol) fn resume_streamed(&mut self, peer: PeerId) {
        self.arrivals.resume_streamed(peer, &mut self.outbox, &mut self.counts);
        self.matching.change_messages_of(peer, |message| message.body.end_push());
    }

    /// RESUME: the receiver says from which byte on it wants fragments.
    pub(in crate::protocol) fn on_resume(
        &mut self,
        peer: PeerId,
        tx: u64,
        rx: u64,
        from: u64,
        len: u64,
    ) {
        let key = Key::from_wire(tx);
        let over = |request: &TxRequest| matches!(request.state, TxState::Over { .. });
        if self.tx.get(key).is_some_and(|request| request.peer == peer && over(request)) {
            return self.say_gone(peer, key, rx);
        }
        let request = self.tx.get_mut(key).filter(|request| {
            use TxState::{Announced, AwaitingAnswer, Declined, Streaming, Writing};
            let moves = matches!(
                request.state,
                AwaitingAnswer
                    | Announced { .. }
                    | Streaming { .. }
                    | Writing { .. }
                    | Declined { .. }
            );
            request.peer == peer && moves
        });
        let Some(request) = request else {
            self.counts.dropped += 1;
            return;
        };
        let end = request.payload.segments().len().min(len as usize);
        let offset = end.min(from as usize);
        request.carrier = Carrier::Fragments;
        if let TxState::Declined { rx, .. } = request.state {
            // The DECLINE answers WINDOWs that are void now, and the fragments would overtake it.
            self.outbox.urgent.retain(|(to, packet)| {
                let declines = matches!(packet, Packet::Decline { rx: other, .. } if *other == rx);
                *to != peer || !declines
            });
        }
        self.streams.retain(|k| *k != key);
        if offset == end {
            request.state = TxState::AwaitingAnswer;
            return;
        }
        request.state = TxState::Streaming { rx, offset, end };
        self.streams.push_back(key);
    }
}
