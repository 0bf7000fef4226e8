//! Long messages that went to and came from each peer, by the scheme that carried them at the end. Those that failed are
//! left out, and so are eager messages: to count the bytes of each peer's took five instructions more a message.

use crate::sys::numbers::NumberMap;
use crate::transport::PeerId;

/// How a message went, as users see it; each scheme of `schemes/` is one of these.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Carried {
    /// Unsolicited data behind an announcement.
    Unsolicited,
    /// Fragments that the receiver has asked for.
    Fragments,
    /// The receiver, or its device, has read it.
    Read,
    /// The sender, or its device, has written it into the receiver's buffer.
    Written,
    /// Both have copied parts of it.
    Split,
}

pub(crate) const WAYS: usize = 5;

/// Messages, and their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
}

/// By [`Carried`].
pub(crate) type Tallies = [Tally; WAYS];

/// What went to a peer, and what came from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) sent: Tallies,
    pub(crate) received: Tallies,
}

/// Long messages of each peer, in one direction. Only what there was takes memory.
#[derive(Debug, Default)]
pub(super) struct LongMessages(NumberMap<u64, Tally>);

fn place(peer: PeerId, way: usize) -> u64 {
    u64::from(peer.0) << 3 | way as u64
}

impl LongMessages {
    /// A message of `len` bytes has ended well.
    pub(super) fn count(&mut self, peer: PeerId, carried: Carried, len: usize) {
        let tally = self.0.entry(place(peer, carried as usize)).or_default();
        tally.messages += 1;
        tally.bytes += len as u64;
    }

    pub(super) fn of(&self, peer: PeerId) -> Tallies {
        std::array::from_fn(|way| self.0.get(&place(peer, way)).copied().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_counted_by_peer_and_way() {
        let mut long = LongMessages::default();
        long.count(PeerId(3), Carried::Read, 100);
        long.count(PeerId(3), Carried::Read, 50);
        long.count(PeerId(1), Carried::Split, 7);
        let (three, one) = (long.of(PeerId(3)), long.of(PeerId(1)));
        assert_eq!(three[Carried::Read as usize], Tally { messages: 2, bytes: 150 });
        assert_eq!(one[Carried::Split as usize], Tally { messages: 1, bytes: 7 });
        assert_eq!(one[Carried::Read as usize], Tally::default());
        assert_eq!(long.of(PeerId(99)), long.of(PeerId(0)));
    }
}
