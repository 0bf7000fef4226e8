//! Eager: the whole message in one packet. Its send is complete at once, or when the receiver's FIN comes, or when the
//! peer's endpoint has it (fi_cq.3, FI_TRANSMIT_COMPLETE).
//!
//! Some transports keep a message until the peer acknowledges it, and lose it if this process ends. There an eager send
//! of the last level waits for the acknowledgement. Elsewhere, and for long messages, which are answered, nothing is
//! added.

use crate::memory::SegmentList;
use crate::protocol::index_list::Key;
use crate::protocol::packet::{EagerHeader, Envelope};
use crate::sys::numbers::NumberMap;
use crate::transport::{Iface, MAX_HEADER, Mark, Mode, PeerId, SendError};
use std::collections::VecDeque;

/// Sends one eager message: in a slot if it fits there beside its header, else through the bulk space.
#[inline]
pub(in crate::protocol) fn send<I: Iface>(
    iface: &mut I,
    peer: PeerId,
    envelope: &Envelope,
    ack: Option<u64>,
    payload: &SegmentList,
) -> Result<(), SendError> {
    let header = EagerHeader::new(envelope, ack);
    let header = header.as_slice();
    debug_assert!(header.len() <= MAX_HEADER);
    let len = payload.len();
    let pack = |at: usize, to: &mut [u8]| {
        payload.copy_out(at, to);
    };
    if header.len() + len <= iface.caps(peer).short_max {
        iface.send(peer, Mode::Short, header, len, pack)
    } else {
        iface.send(peer, Mode::Bulk, header, len, pack)
    }
}

/// Sends that wait for the acknowledgement of one peer, in the order of sending.
#[derive(Debug)]
struct Leaving {
    peer: PeerId,
    sends: VecDeque<(Mark, Key)>,
}

/// All sends that are complete when their peers' endpoints have them.
#[derive(Debug, Default)]
pub(in crate::protocol) struct Tracked {
    list: Vec<Leaving>,
    /// By peer: its place in `list`.
    places: NumberMap<PeerId, usize>,
}

impl Tracked {
    #[inline]
    pub(in crate::protocol) fn len(&self) -> usize {
        self.list.len()
    }

    /// Waits for the acknowledgement of everything before and at `mark`.
    pub(in crate::protocol) fn add(&mut self, peer: PeerId, mark: Mark, key: Key) {
        let at = *self.places.entry(peer).or_insert(self.list.len());
        match self.list.get_mut(at) {
            Some(leaving) => leaving.sends.push_back((mark, key)),
            None => self.list.push(Leaving { peer, sends: [(mark, key)].into() }),
        }
    }

    /// One of the peers that acknowledgements are due from.
    pub(in crate::protocol) fn peer_at(&self, at: usize) -> Option<PeerId> {
        self.list.get(at).map(|leaving| leaving.peer)
    }

    /// A send to the peer that is complete, once the peer has acknowledged everything before `upto`.
    pub(in crate::protocol) fn take(&mut self, peer: PeerId, upto: Mark) -> Option<Key> {
        let sends = &mut self.list.get_mut(*self.places.get(&peer)?)?.sends;
        let (_, key) = *sends.front().filter(|(mark, _)| mark.is_before(upto))?;
        sends.pop_front();
        if sends.is_empty() {
            self.forget(peer);
        }
        Some(key)
    }

    /// No acknowledgement of the peer is waited for: all its sends are complete, or it has departed.
    pub(in crate::protocol) fn forget(&mut self, peer: PeerId) {
        let Some(at) = self.places.remove(&peer) else { return };
        self.list.swap_remove(at);
        if let Some(moved) = self.list.get(at) {
            self.places.insert(moved.peer, at);
        }
    }
}
