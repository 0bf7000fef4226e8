//! The connections of an endpoint, found by slot, by number and by peer.

use super::connection::Connection;
use crate::transport::PeerId;

/// Bits of a connection's number that are its slot; the others are its generation.
const PLACE_BITS: u32 = 20;
/// Bit beside a slot: this endpoint was connected to the peer. Slots have fewer bits.
const MET: u32 = 1 << 31;

/// A slot for a connection.
#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    connection: Option<Box<Connection>>,
}

/// The connections of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slot of each peer's connection, plus one, and [`MET`].
    by_peer: Vec<u32>,
}

impl Table {
    /// The number of connections.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// All connections.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.slots.iter_mut().filter_map(|slot| slot.connection.as_deref_mut())
    }

    /// The slots in which there may be connections.
    pub(super) fn places(&self) -> std::ops::Range<u32> {
        0..self.slots.len() as u32
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.slots.iter().filter_map(|slot| slot.connection.as_deref())
    }

    /// Slot of the connection that `peer` is reached by.
    pub(super) fn place_of(&self, peer: PeerId) -> Option<u32> {
        (self.by_peer.get(peer.index())? & !MET).checked_sub(1)
    }

    pub(super) fn at(&mut self, place: u32) -> Option<&mut Connection> {
        self.slots.get_mut(place as usize)?.connection.as_deref_mut()
    }

    /// The connection that `peer` is reached by.
    pub(super) fn of(&self, peer: PeerId) -> Option<&Connection> {
        self.slots.get(self.place_of(peer)? as usize)?.connection.as_deref()
    }

    /// The connection with this endpoint's number `id`, and its slot.
    pub(super) fn numbered(&mut self, id: u32) -> Option<(u32, &mut Connection)> {
        let place = id & ((1 << PLACE_BITS) - 1);
        self.at(place).filter(|c| c.id == id).map(|c| (place, c))
    }

    /// The connection with number `id`, if it is established.
    pub(super) fn established(&self, id: u32) -> Option<&Connection> {
        let slot = self.slots.get((id & ((1 << PLACE_BITS) - 1)) as usize)?;
        slot.connection.as_deref().filter(|c| c.id == id && c.handshake.is_established())
    }

    /// Inserts a new connection under its peer; if it is the `main` one, the peer is reached by it.
    pub(super) fn insert(&mut self, mut connection: Box<Connection>, main: bool) -> Option<u32> {
        let place = match self.free.pop() {
            Some(place) => place,
            None if self.slots.len() < 1 << PLACE_BITS => {
                self.slots.push(Slot::default());
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        let slot = self.slots.get_mut(place as usize)?;
        slot.generation = slot.generation.wrapping_add(1);
        connection.id = place | slot.generation << PLACE_BITS;
        let peer = connection.peer;
        slot.connection = Some(connection);
        if main {
            self.set_main(peer, place);
        }
        Some(place)
    }

    /// From now on `peer` is reached by the connection at `place`.
    pub(super) fn set_main(&mut self, peer: PeerId, place: u32) {
        if self.by_peer.len() <= peer.index() {
            self.by_peer.resize(peer.index() + 1, 0);
        }
        if let Some(entry) = self.by_peer.get_mut(peer.index()) {
            *entry = (place + 1) | (*entry & MET);
        }
    }

    /// Removes the connection at `place`; its peer is no longer reached by it.
    pub(super) fn remove(&mut self, place: u32) -> Option<Box<Connection>> {
        let connection = self.slots.get_mut(place as usize)?.connection.take()?;
        self.free.push(place);
        if self.place_of(connection.peer) == Some(place) {
            if let Some(entry) = self.by_peer.get_mut(connection.peer.index()) {
                *entry &= MET;
            }
        }
        Some(connection)
    }

    /// This endpoint is or was connected to `peer`.
    pub(super) fn was_met(&self, peer: PeerId) -> bool {
        self.by_peer.get(peer.index()).is_some_and(|entry| entry & MET != 0)
    }

    pub(super) fn note_met(&mut self, peer: PeerId) {
        if let Some(entry) = self.by_peer.get_mut(peer.index()) {
            *entry |= MET;
        }
    }
}
