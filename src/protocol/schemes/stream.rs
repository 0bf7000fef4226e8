//! Long messages whose bytes arrive by stream (PROTOCOL.md §4.11): placed without a copy, and requested again as
//! fragments when the stream breaks.

use crate::memory::SegmentList;
use crate::protocol::Host;
use crate::protocol::engine::Core;
use crate::protocol::index_list::Key;
use crate::protocol::packet::Packet;
use crate::protocol::receive::Body;
use crate::protocol::schemes::push::Place;
use crate::protocol::send::{Carrier, TxRequest, TxState};
use crate::transport::PeerId;

impl Core {
    /// The receive that the payload behind `header` is for, if it has been matched, and the payload's offset in the
    /// message.
    pub(in crate::protocol) fn by_stream(
        &mut self,
        peer: PeerId,
        header: &[u8],
    ) -> Option<(Key, u64)> {
        match Packet::decode(header)? {
            Packet::Pushed { tx, offset } => match self.pushed.find(peer, tx)? {
                Place::Active(key) => Some((key, offset)),
                _ => None,
            },
            Packet::Fragment { rx, offset } => Some((Key::from_wire(rx), offset)),
            _ => None,
        }
    }

    /// Where the next `len` bytes of a message belong. `None`: the bytes at `offset` are not the next ones.
    pub(in crate::protocol) fn place_streamed(
        &mut self,
        peer: PeerId,
        key: Key,
        offset: u64,
        len: usize,
    ) -> Option<SegmentList> {
        let active = self.active.get_mut(key).filter(|active| {
            active.peer == peer
                && active.cleared
                && !active.resumed
                && !active.placing
                && active.received as u64 == offset
        })?;
        active.placing = true;
        let room = len.min(active.want - active.received);
        Some(active.target.segments.slice(active.received, room))
    }

    /// The stream has written `len` bytes to where [`Core::place_streamed`] said.
    pub(in crate::protocol) fn on_streamed(&mut self, key: Key, len: usize, host: &mut impl Host) {
        let Some(active) = self.active.get_mut(key) else { return };
        active.placing = false;
        active.received += len.min(active.want - active.received);
        if active.received == active.want {
            self.finish_active(key, host);
        }
    }

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
        for key in self.active.keys_where(|active| active.peer == peer && active.cleared) {
            self.resume(key);
        }
        let claimed = self.claimed.values_mut();
        for message in claimed.filter(|message| message.peer == peer) {
            message.body.end_push();
        }
        for space in self.spaces() {
            let list = self.unexpected.of(space);
            for key in list.keys_where(|message| message.peer == peer) {
                if let Some(message) = list.get_mut(key) {
                    message.body.end_push();
                }
            }
        }
        self.pushed.forget(peer);
    }

    /// Asks for the rest of a message as fragments.
    pub(in crate::protocol) fn resume(&mut self, key: Key) {
        let Some(active) = self.active.get_mut(key).filter(|active| !active.resumed) else {
            return;
        };
        active.resumed = true;
        active.cleared = true;
        active.placing = false;
        active.asked = true;
        let packet = Packet::Resume {
            tx: active.tx,
            rx: key.to_wire(),
            from: active.received as u64,
            len: active.want as u64,
        };
        self.counts.resumed += 1;
        self.outbox.push_back((active.peer, packet));
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
            self.outbox.retain(|(to, packet)| {
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

impl Body {
    /// No more unsolicited bytes of this message will come.
    fn end_push(&mut self) {
        if let Self::Rts { rts, bytes } = self {
            if (bytes.len() as u64) < rts.pushed {
                rts.pushed = bytes.len() as u64;
                rts.broken = true;
            }
        }
    }
}
