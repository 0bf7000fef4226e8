//! Long messages with unsolicited data, which arrives before any CTS (PROTOCOL.md §4.10).

use crate::protocol::engine::Core;
use crate::protocol::index_list::Key;
use crate::protocol::packet::{Packet, Ranges};
use crate::protocol::receive::Body;
use crate::protocol::spaces::Space;
use crate::protocol::{Cause, Host};
use crate::transport::{PeerId, Ticket};
use std::collections::HashMap;

/// The contents of an RTS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::protocol) struct Announcement {
    /// The sender's number of the message.
    pub(in crate::protocol) tx: u64,
    /// Length of the message, bytes.
    pub(in crate::protocol) len: u64,
    /// The number of unsolicited bytes.
    pub(in crate::protocol) pushed: u64,
    /// The sender needs no FIN.
    pub(in crate::protocol) leaves: bool,
    /// Sender-side delivery completion: a FIN may be late.
    pub(in crate::protocol) sees: bool,
    /// The stream with the bytes broke: the rest has to be requested as fragments.
    pub(in crate::protocol) broken: bool,
    /// The remote key under which the sender advertises the message (GET rendezvous).
    pub(in crate::protocol) offer: Option<Ticket>,
    /// The message's ranges in the sender's memory.
    pub(in crate::protocol) ranges: Ranges,
}

/// Where the unsolicited bytes of a message go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::protocol) enum Place {
    /// To the buffer of its receive.
    Active(Key),
    /// To an unexpected message.
    Unexpected(Space, Key),
    /// To a message that a peek has claimed: its receive context, and the application's context.
    Claimed((u8, u64)),
}

/// Messages whose unsolicited bytes are still arriving, by peer and number.
#[derive(Debug, Default)]
pub(in crate::protocol) struct PushedMessages {
    /// The message of the last look-up: usually the only one, and the next bytes are for it too.
    last: Option<((PeerId, u64), Place)>,
    /// All other messages.
    places: HashMap<(PeerId, u64), Place>,
}

impl PushedMessages {
    pub(in crate::protocol) fn insert(&mut self, peer: PeerId, tx: u64, place: Place) {
        self.remove(peer, tx);
        if let Some((key, other)) = self.last.replace(((peer, tx), place)) {
            self.places.insert(key, other);
        }
    }

    pub(in crate::protocol) fn remove(&mut self, peer: PeerId, tx: u64) {
        if self.last.is_some_and(|(key, _)| key == (peer, tx)) {
            self.last = None;
        } else if !self.places.is_empty() {
            self.places.remove(&(peer, tx));
        }
    }

    /// Changes the place of a message, if bytes of it are still to come.
    pub(in crate::protocol) fn moved(&mut self, peer: PeerId, tx: u64, place: Place) {
        if self.find(peer, tx).is_some() {
            self.last = Some(((peer, tx), place));
        }
    }

    pub(in crate::protocol) fn find(&mut self, peer: PeerId, tx: u64) -> Option<Place> {
        if let Some((_, place)) = self.last.filter(|(key, _)| *key == (peer, tx)) {
            return Some(place);
        }
        let place = self.places.remove(&(peer, tx))?;
        if let Some((key, other)) = self.last.replace(((peer, tx), place)) {
            self.places.insert(key, other);
        }
        Some(place)
    }

    /// Forgets the messages of a peer that has departed.
    pub(in crate::protocol) fn forget(&mut self, peer: PeerId) {
        self.places.retain(|(from, _), _| *from != peer);
        self.last = self.last.filter(|((from, _), _)| *from != peer);
    }
}

impl Core {
    /// Unsolicited bytes of a message have come.
    #[inline]
    pub(in crate::protocol) fn on_pushed(
        &mut self,
        peer: PeerId,
        tx: u64,
        offset: u64,
        payload: &[u8],
        host: &mut impl Host,
    ) {
        if !self.try_place_next((peer, tx), offset, payload, host) {
            self.take_pushed(peer, tx, offset, payload, host);
        }
    }

    /// The fast path: the next bytes of the message of the last look-up, which has its receive. False: nothing was
    /// done.
    #[inline]
    fn try_place_next(
        &mut self,
        message: (PeerId, u64),
        offset: u64,
        payload: &[u8],
        host: &mut impl Host,
    ) -> bool {
        let Some((whose, Place::Active(key))) = self.pushed.last else { return false };
        let Some(active) = self.active.get_mut(key).filter(|active| {
            whose == message
                && !active.placing
                && active.sharing.is_none()
                && active.received as u64 == offset
                && payload.len() <= active.want - active.received
                && active.want < self.limits.past_caches_min
        }) else {
            return false;
        };
        if !active.target.segments.copy_in_one(active.received, payload) {
            return false;
        }
        active.received += payload.len();
        if active.received == active.want {
            self.finish_active(key, host);
        }
        true
    }

    #[inline(never)]
    fn take_pushed(
        &mut self,
        peer: PeerId,
        tx: u64,
        offset: u64,
        payload: &[u8],
        host: &mut impl Host,
    ) {
        let message = match self.pushed.find(peer, tx) {
            Some(Place::Active(key)) => return self.place_pushed(key, offset, payload, host),
            Some(Place::Unexpected(space, key)) => self.unexpected.of(space).get_mut(key),
            Some(Place::Claimed(context)) => self.claimed.get_mut(&context),
            None => {
                self.counts.surplus += 1;
                return;
            }
        };
        match message.map_or(Appended::No, |message| message.body.append(offset, payload)) {
            Appended::No => self.counts.dropped += 1,
            Appended::More => self.unexpected_bytes += payload.len(),
            Appended::All => {
                self.unexpected_bytes += payload.len();
                self.pushed.remove(peer, tx);
            }
            Appended::NoMemory { kept, waits } => {
                self.keep_less();
                self.unexpected_bytes -= kept;
                self.pushed.remove(peer, tx);
                if waits {
                    let status = libc::ENOMEM as u32;
                    self.outbox.push_back((peer, Packet::Fin { tx, status }));
                }
            }
        }
    }

    /// Unsolicited bytes, or chunks of a split copy, for a message that has its receive.
    fn place_pushed(&mut self, key: Key, offset: u64, payload: &[u8], host: &mut impl Host) {
        if self.active.get(key).is_some_and(|active| active.sharing.is_some()) {
            return self.place_piece(key, offset, payload);
        }
        let active = self
            .active
            .get_mut(key)
            .filter(|active| !active.placing && active.received as u64 == offset);
        let Some(active) = active else {
            self.counts.dropped += 1;
            return;
        };
        let fits = payload.get(..payload.len().min(active.want - active.received)).unwrap_or(&[]);
        active.received += active.place(active.received, fits, &self.limits);
        if active.received == active.want {
            self.finish_active(key, host);
        }
    }

    /// Sends a CTS for the bytes that the sender does not send unsolicited, or has stopped sending.
    pub(in crate::protocol) fn ask_for_rest(&mut self, key: Key) {
        let Some(active) = self.active.get_mut(key).filter(|active| !active.asked) else { return };
        active.asked = true;
        let packet = Packet::Cts {
            tx: active.tx,
            rx: key.to_wire(),
            len: active.want as u64,
            faulted: false,
            ranges: Ranges::NONE,
        };
        self.outbox.push_back((active.peer, packet));
        self.attentive = true;
    }

    /// A CTS could not be sent. Returns whether its receive completes without it: all bytes that it wants are
    /// unsolicited, so that they arrive from the ring, or the sender's departure ends the receive.
    pub(in crate::protocol) fn needs_no_cts(&mut self, key: Key) -> bool {
        let active = self.active.get_mut(key).filter(|active| {
            active.asked && !active.resumed && active.want as u64 <= active.pushed
        });
        let Some(active) = active else { return false };
        active.asked = false;
        true
    }

    /// PRESSURE is set, and senders stop sending unsolicited bytes: requests those of messages that have their receive.
    pub(in crate::protocol) fn ask_for_pushed(&mut self) {
        for key in self.active.keys_where(|active| active.cleared && !active.asked) {
            let pushes = self.active.get(key).map(|active| (active.peer, active.tx));
            if let Some((peer, tx)) = pushes {
                if self.pushed.find(peer, tx) == Some(Place::Active(key)) {
                    self.ask_for_rest(key);
                }
            }
        }
    }
}

#[cfg(test)]
impl Core {
    /// Bytes of unexpected long messages that are kept here.
    pub(in crate::protocol) fn pushed_bytes(&mut self) -> usize {
        let held = |body: &Body| match body {
            Body::Rts { bytes, .. } | Body::Whole(bytes) => bytes.len(),
            _ => 0,
        };
        let claimed: usize = self.claimed.values().map(|m| held(&m.body)).sum();
        let lists = self.spaces().map(|space| {
            self.unexpected.of(space).iter().map(|(_, m)| held(&m.body)).sum::<usize>()
        });
        claimed + lists.sum::<usize>()
    }
}

/// The outcome of appending a fragment to an unexpected message.
enum Appended {
    /// Refused: it is not the next fragment.
    No,
    /// Appended, and more unsolicited bytes will come (`More`) or this was the last fragment (`All`).
    More,
    All,
    /// The message is lost, with `kept` bytes that were here. `waits`: its sender waits for a FIN.
    NoMemory {
        kept: usize,
        waits: bool,
    },
}

impl Body {
    /// Appends a fragment to an unexpected message.
    fn append(&mut self, offset: u64, payload: &[u8]) -> Appended {
        let Self::Rts { rts, bytes } = self else { return Appended::No };
        let end = offset.saturating_add(payload.len() as u64);
        if bytes.len() as u64 != offset || end > rts.pushed {
            return Appended::No;
        }
        if bytes.try_reserve(payload.len()).is_err() {
            let (kept, waits, len) = (bytes.len(), !rts.leaves, rts.len);
            *self = Self::Lost { len, error: libc::ENOMEM, cause: Cause::ReceiverRefused };
            return Appended::NoMemory { kept, waits };
        }
        bytes.extend_from_slice(payload);
        if end == rts.pushed { Appended::All } else { Appended::More }
    }
}
