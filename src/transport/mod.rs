//! How bytes move. Each device is one folder; all are seen through [`Iface`].
//!
//! After UCT: a transport offers *short* (header and payload in one slot), *bcopy* (payload packed
//! into the transport's own memory by a callback) and *zcopy* (one-sided `get` and `put` between
//! application buffers), says what it can in [`Caps`], and the protocol layer chooses. Active
//! messages are reliable and ordered per peer; what a transport cannot take now it refuses with
//! [`SendError::Again`] and queues nothing in secret.

pub(crate) mod address;
pub(crate) mod address_index;
pub(crate) mod loopback;
pub(crate) mod mux;
pub(crate) mod net;
pub(crate) mod packed_address;
pub(crate) mod peers;
pub(crate) mod share;
pub(crate) mod shm;

use crate::memory::{MAX_SEGMENTS, Segment, SegmentList};
use crate::sys::Errno;
use crate::sys::cma::Range;
pub(crate) use address::Address;
pub(crate) use share::{Assisted, Share, Taken};

/// A peer endpoint, numbered at first contact by the interface that talks to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub(crate) struct PeerId(pub(crate) u32);

impl PeerId {
    /// As an index into tables by peer.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Longest active-message header, bytes. Every transport takes headers up to this length.
pub(crate) const MAX_HEADER: usize = 104;

/// Pieces of a message of at most [`PIECES`], bytes.
const PIECE: usize = 16 * 1024;
const PIECES: usize = 32 * PIECE;

/// Payload that every transport takes in one bcopy message to anybody, bytes.
pub(crate) const BCOPY_LEAST: usize = 9000;

/// What a transport can do towards one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caps {
    /// Most bytes of header plus payload in one short message.
    pub(crate) short_max: usize,
    /// Most payload bytes in one bcopy message.
    pub(crate) bcopy_max: usize,
    /// Most payload bytes in one of many messages that carry a long one ([`piece_of`]).
    pub(crate) fragment_max: usize,
    /// Bytes of a long message that are worth sending before the receiver has asked for them.
    pub(crate) push_max: usize,
    /// Most payload bytes of one message by stream; 0: there are no streams.
    pub(crate) stream_max: usize,
    /// Shortest long message that is worth a stream, bytes.
    pub(crate) stream_min: usize,
    /// Most bytes of one window; 0: there are no windows ([`Iface::windows`]).
    pub(crate) window_max: usize,
    /// Shortest long message that is worth windows, bytes.
    pub(crate) window_min: usize,
    /// One-sided reads from the peer's application buffers work.
    pub(crate) get: bool,
    /// One-sided writes into the peer's application buffers work.
    pub(crate) put: bool,
    /// `get` or `put` work or may yet: it is worth saying where buffers are.
    pub(crate) one_sided: bool,
    /// Regions that the peer has exposed may be read, and written, by `reach`.
    pub(crate) reach_read: bool,
    pub(crate) reach_write: bool,
    /// Shortest read, and shortest write, that is worth it where no messages are under way, bytes; others are as long as
    /// all of one-sided operations that the initiator carries out alone.
    pub(crate) reach_read_min: usize,
    pub(crate) reach_write_min: usize,
    /// Bytes of a region that are exposed as one part; the last part may be shorter. 0: none are.
    pub(crate) expose_max: usize,
    /// The peer knows atomic operations; `None`: it has not said yet.
    pub(crate) atomics: Option<bool>,
    /// The same of collective operations.
    pub(crate) collectives: Option<bool>,
    /// After `SendError::Again` something arrives, and wakes a sleeper, when there is room again.
    pub(crate) announces_room: bool,
    /// What was taken from a buffer arrives, whatever becomes of this endpoint and its process.
    pub(crate) outlives: bool,
}

impl Caps {
    /// `reach_read_min` if `reads`, else `reach_write_min`; `None` if that is not done at all.
    #[inline]
    fn reach_min(&self, reads: bool) -> Option<usize> {
        match reads {
            true => self.reach_read.then_some(self.reach_read_min),
            false => self.reach_write.then_some(self.reach_write_min),
        }
    }
}

/// How long the pieces of `len` bytes are, at most `most`, bytes: short enough that both ends copy at once, long enough
/// that what each costs beside its bytes does not count.
#[inline]
pub(crate) fn piece_of(len: usize, most: usize) -> usize {
    let eighth = 1 << (len / 8).max(1).ilog2();
    (if len > PIECES { eighth } else { PIECE }).min(most)
}

/// The header of a message in a few words, to be written without looking how many they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Head {
    /// In their wire form; what is beyond `len` does not matter.
    pub(crate) words: [u64; Self::WORDS],
    /// Bytes.
    pub(crate) len: usize,
}

impl Head {
    pub(crate) const WORDS: usize = 3;
}

/// A place in the sequence of what is sent to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    /// Our number of the connection: each has a sequence of its own.
    pub(crate) connection: u32,
    /// The low half of a packet's number.
    pub(crate) psn: u32,
}

impl Mark {
    /// Whether this comes before `upto`; not known between two connections, and then it does not.
    pub(crate) fn is_before(self, upto: Self) -> bool {
        self.connection == upto.connection && (upto.psn.wrapping_sub(self.psn) as i32) > 0
    }
}

/// Why a message was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SendError {
    /// No room now; progress, then try again.
    Again,
    /// The peer cannot be reached: the system's reason.
    Unreachable(Errno),
}

/// How a peer went away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Departure {
    /// It closed its endpoint; everything it had sent was delivered.
    Closed,
    /// It died, or broke the protocol.
    Failed(Errno),
}

/// Whether windows to a peer work: parts of a receiver's buffer that its peer writes into.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Windows {
    /// No; or not soon enough to wait for.
    No,
    /// They are being made ready. It takes milliseconds, and if it takes longer the answer becomes `No`.
    Later,
    /// Now, in both directions.
    Ready,
}

/// What a peer has to know of a window that it is lent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Ticket {
    /// The connection that it was lent by: with that one it ends.
    pub(crate) connection: u32,
    /// Comes back with the bytes: which window it is.
    pub(crate) slot: u32,
    /// Where it is in the receiver's memory, as the device knows it.
    pub(crate) addr: u64,
    pub(crate) key: u32,
}

/// A part of a message that is written into a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Chunk {
    /// The sender's number of the message.
    pub(crate) tx: u64,
    /// Where in it the bytes are, and how many.
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// How a peer may reach a region of ours by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Exposure {
    /// What it has to name: when that is void, so is all that it was told with it.
    pub(crate) epoch: u32,
    /// The transport's key of each range; `None`: it needs none.
    pub(crate) keys: Option<[u32; MAX_SEGMENTS]>,
    /// What it may do: no more than was asked for.
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    /// It can find out whether what it wrote has arrived in memory.
    pub(crate) echoes: bool,
}

/// What becomes of the wish to expose a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exposed {
    Yes(Exposure),
    /// It is being made ready, which takes milliseconds.
    Later,
    /// Not to this peer, at present.
    No,
    /// Not this memory.
    Never,
}

/// Where in a region of a peer something is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Spot {
    /// As the peer has told them.
    pub(crate) epoch: u32,
    pub(crate) key: u32,
    /// As long as what is moved; of a write without bytes 1 byte.
    pub(crate) range: Range,
}

/// Up to so many bytes a device reads from, or writes to, memory of the transport's own for `Iface::reach`; what is longer
/// it takes from, or puts, where the application has it.
pub(crate) const STAGED_MAX: usize = 4096;

/// What is wanted of `Iface::reach`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reach {
    /// From the peer's memory into ours; else the other way.
    pub(crate) reads: bool,
    /// A write is done when its bytes, and those of all that were begun before it, are in the peer's memory; else when the
    /// peer's device has them. With no bytes it asks for that alone.
    pub(crate) delivered: bool,
    /// Our side is memory of the engine's that stays as long as the transport: to register it once is enough.
    pub(crate) stays: bool,
    /// What `Handler::on_reached` names.
    pub(crate) token: u64,
}

/// How a transport reaches a peer's region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reached {
    /// So many bytes have been moved, at least one.
    Moved(usize),
    /// All of it is under way, and both sides' memory in use, until `Handler::on_reached`, or
    /// `Handler::on_windows_lost`, or until the peer has departed.
    Begun,
}

/// An end of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamEnd {
    /// The one that sends.
    Outgoing,
    /// The one that receives.
    Incoming,
}

/// What `Iface::poll` reports to.
pub(crate) trait Handler {
    /// A peer made contact; its address, before anything it sent.
    fn on_peer(&mut self, peer: PeerId, address: &Address);
    /// An active message. The slices are valid during the call only.
    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]);
    /// Whether the message before was one after which the application has to have its turn, because the next one
    /// may be what it posts a receive for only then. Asked once a message; `true` may be ignored.
    fn wants_pause(&mut self) -> bool {
        false
    }
    /// Where in application memory the `len` bytes of payload belong that come by stream behind this
    /// header. `None`: they come with `on_message`. A list that is shorter takes the first of them.
    /// It stays valid until `on_placed` or `on_stream_lost`, or until the peer has departed.
    fn place(&mut self, peer: PeerId, header: &[u8], len: usize) -> Option<SegmentList> {
        let _ = (peer, header, len);
        None
    }
    /// The payload is where `place` wanted it.
    fn on_placed(&mut self, peer: PeerId, header: &[u8], len: usize) {
        let _ = (peer, header, len);
    }
    /// A stream from or to `peer` broke: what was sent on it has arrived in part, if at all.
    fn on_stream_lost(&mut self, peer: PeerId, end: StreamEnd) {
        let _ = (peer, end);
    }
    /// The peer has written all of the window that was lent with `token`, which is ours again.
    fn on_filled(&mut self, peer: PeerId, token: u64) {
        let _ = (peer, token);
    }
    /// What we have written into windows of the peer is there, and it hears of that whatever comes. In the order in
    /// which it was written.
    fn on_written(&mut self, peer: PeerId, chunk: Chunk) {
        let _ = (peer, chunk);
    }
    /// Windows between `peer` and us are void: those that it was lent are ours again, and nobody
    /// writes them any more; what it has lent to us it will offer anew, or ask for in another way. So are exposed
    /// regions: of what `reach` has begun, any part may have been done, and no more will be.
    fn on_windows_lost(&mut self, peer: PeerId) {
        let _ = peer;
    }
    /// What `Iface::reach` has begun with `token` is done. In the order in which they were begun.
    fn on_reached(&mut self, peer: PeerId, token: u64) {
        let _ = (peer, token);
    }
    /// A region of which a part was exposed is so no more: its memory is no longer what it was.
    fn on_concealed(&mut self, region: u64) {
        let _ = region;
    }
    /// The peer, which is about to depart, has acknowledged everything before `upto` ([`Iface::tracked`]).
    fn on_acknowledged(&mut self, peer: PeerId, upto: Mark) {
        let _ = (peer, upto);
    }
    /// A peer is gone; everything it sent before was reported before.
    fn on_departure(&mut self, peer: PeerId, departure: Departure);
    /// Whether an operation waits for `peer`: its silence is worth looking into then.
    fn is_owed(&self, peer: PeerId) -> bool;
}

/// A device as the protocol layer sees it.
pub(crate) trait Iface {
    /// The peer at `address`, contacted now if this is the first time.
    fn connect(&mut self, address: &Address) -> Result<PeerId, SendError>;

    /// Whose number `peer` is.
    fn address_of(&self, peer: PeerId) -> Option<Address>;

    /// What works towards `peer` at this moment; `get` and `put` may become true later.
    fn caps(&self, peer: PeerId) -> Caps;

    /// Sends `header` and `len` payload bytes in one slot; `header.len() + len <= short_max`.
    /// `pack` copies payload from the offset that it is given, once or piece by piece.
    fn am_short(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError>;

    /// Sends `header` and `len` payload bytes through the transport's buffers; `len <= bcopy_max`.
    fn am_bcopy(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError>;

    /// Sends a message at once, if the transport has a short way to `peer` and that is open. False:
    /// nothing was done, and `am_short` or `am_bcopy` knows why. `payload.len() <= bcopy_max`.
    #[inline]
    fn am_at_once(&mut self, peer: PeerId, head: &Head, payload: Segment) -> bool {
        let _ = (peer, head, payload);
        false
    }

    /// Sends a long message as a whole, if the transport has a short way for that and room for all of it: `first`, and
    /// behind it the payload in pieces, each with the header that `next` makes for its offset. False: nothing was
    /// done. All of it arrives ([`Caps::outlives`]).
    #[inline]
    fn am_whole(
        &mut self,
        peer: PeerId,
        first: &[u8],
        payload: Segment,
        next: impl Fn(usize) -> Head,
    ) -> bool {
        let _ = (peer, first, payload, next);
        false
    }

    /// Sends one of many messages that carry a long one; `len <= fragment_max`. It may wait for
    /// `flush` or the next poll, to leave together with others.
    fn am_fragment(
        &mut self,
        peer: PeerId,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        self.am_bcopy(peer, header, len, pack)
    }

    /// Sends a message that nobody waits for: it may leave with the next one to `peer`, or the next poll.
    fn am_late(&mut self, peer: PeerId, header: &[u8]) -> Result<(), SendError> {
        self.am_short(peer, header, 0, |_, _| ())
    }

    /// Sends a message that announces another one: where many follow each other, it may wait for company until the
    /// next poll.
    fn am_announce(&mut self, peer: PeerId, header: &[u8]) -> Result<(), SendError> {
        self.am_short(peer, header, 0, |_, _| ())
    }

    /// Whether `am_stream` to `peer` works now. If it may work later, that begins.
    fn has_stream(&mut self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// Sends `header`, of at most 32 bytes, and at most `stream_max` bytes of `payload` straight
    /// from application memory, which is the caller's again afterwards. It comes after the messages sent before, and may come after those
    /// sent later. Taken is not arrived: `Handler::on_stream_lost`.
    fn am_stream(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &SegmentList,
    ) -> Result<(), SendError> {
        let _ = (peer, header, payload);
        Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP)))
    }

    /// Whether `lend` and `write` to `peer` work. If they may later, that begins.
    fn windows(&mut self, peer: PeerId) -> Windows {
        let _ = peer;
        Windows::No
    }

    /// Lends `part`, one contiguous piece of 1 to `window_max` bytes, to `peer` until
    /// `Handler::on_filled` (with `token`), `Handler::on_windows_lost` or `take_back`; a peer that
    /// departs has no windows any more when that is reported. `Again`: as many as may be are lent.
    /// `Unreachable`: not this memory, or no windows at all (any more).
    fn lend(&mut self, peer: PeerId, part: &SegmentList, token: u64) -> Result<Ticket, SendError> {
        let _ = (peer, part, token);
        Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP)))
    }

    /// A window ends that the peer has promised not to write.
    fn take_back(&mut self, peer: PeerId, ticket: &Ticket) {
        let _ = (peer, ticket);
    }

    /// Fills the peer's window with `payload`, straight from application memory, which may be read
    /// until the operation it belongs to has ended. Taken is not written: the receiver hears of
    /// that, or of `on_windows_lost`, and we by `Handler::on_written`, where `sees_writes`; a ticket
    /// of a connection that has ended is taken and means
    /// nothing. `Unreachable`: not this memory; the window stays lent.
    fn write(
        &mut self,
        peer: PeerId,
        payload: &SegmentList,
        ticket: &Ticket,
        chunk: Chunk,
    ) -> Result<(), SendError> {
        let _ = (peer, payload, ticket, chunk);
        Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP)))
    }

    /// Lets `peer` read `payload`, one contiguous piece, by `reach`, with the ticket's connection as epoch, until
    /// `withdraw`, or until windows between us and it are lost, or it has departed. `None`: it is not worth it, or does not work.
    fn offer(&mut self, peer: PeerId, payload: &SegmentList) -> Option<Ticket> {
        let _ = (peer, payload);
        None
    }

    /// An offer ends that the peer has promised not to read.
    fn withdraw(&mut self, peer: PeerId, ticket: &Ticket) {
        let _ = (peer, ticket);
    }

    /// Whether who writes into the window of this ticket hears that it is filled.
    fn sees_writes(&mut self, ticket: &Ticket) -> bool {
        let _ = ticket;
        false
    }

    /// Begins to share the copying of `len` bytes with `peer`, who sends them and has to be told. `None`:
    /// it is not worth it, does not work, or as much is shared as may be.
    fn share(&mut self, peer: PeerId, len: usize) -> Option<Share> {
        let _ = (peer, len);
        None
    }

    /// Shortest message from `peer` that is worth sharing, bytes; `None`: none is shared.
    fn share_min(&self, peer: PeerId) -> Option<usize> {
        let _ = peer;
        None
    }

    /// What carries messages to `peer`, for people.
    fn way(&self, peer: PeerId) -> &'static str {
        let _ = peer;
        ""
    }

    /// What of a share is to be copied here next, of `most` units; 0: whether it is over. It goes on until it
    /// is.
    fn take(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        let _ = (peer, share, most);
        Taken::Over
    }

    /// So many units of a share came as messages.
    fn arrived(&mut self, peer: PeerId, share: &Share, units: u32) {
        let _ = (peer, share, units);
    }

    /// Nothing more of a share is to be copied by anybody; it is over when the peer has put down what
    /// it has in hand.
    fn stop_sharing(&mut self, peer: PeerId, share: &Share) {
        let _ = (peer, share);
    }

    /// Takes a part of what `peer` shares and writes it: `part` says of an offset and a length where
    /// the bytes are, and where they go in the peer's memory. Nothing is in hand when this returns.
    fn assist(
        &mut self,
        peer: PeerId,
        share: &Share,
        part: impl Fn(usize, usize) -> (SegmentList, [Range; MAX_SEGMENTS], usize),
    ) -> Assisted {
        let _ = (peer, share, part);
        Assisted::Over
    }

    /// Takes a part of what `peer` shares, of at most so many units as can leave now as fragments of one unit each,
    /// and of at most `most`: which bytes they are. `Wait`: nothing can leave now.
    fn begin_assist(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        let _ = (peer, share, most);
        Taken::Over
    }

    /// Lets `peer` reach a part of a region of ours, by their numbers, by itself (PROTOCOL.md §4.18): read it, write it,
    /// or both.
    fn expose(
        &mut self,
        peer: PeerId,
        region: (u64, u32),
        memory: &SegmentList,
        (reads, writes): (bool, bool),
    ) -> Exposed {
        let _ = (peer, region, memory, reads, writes);
        Exposed::No
    }

    /// The epoch that regions are exposed to `peer` with at present; `None`: there is none.
    fn epoch(&self, peer: PeerId) -> Option<u32> {
        let _ = peer;
        None
    }

    /// A region that `peer` was told of ends. True: what it was told with that epoch is void, and it touches
    /// nothing of it any more once `is_settled` says so; false: the peer should hear of that region's end, in order.
    fn revoke(&mut self, peer: PeerId) -> bool {
        let _ = peer;
        true
    }

    /// Whether no peer is in the middle of a copy any more that it began before a `revoke`. `insists`: none that has not
    /// begun shall begin, whatever else that takes away.
    fn is_settled(&mut self, insists: bool) -> bool {
        let _ = insists;
        true
    }

    /// Nobody reaches this region by itself any more when this returns.
    fn conceal(&mut self, region: u64) {
        let _ = region;
    }

    /// [`Caps::reach_min`] of its caps, of which nothing else is asked for then.
    #[inline]
    fn reach_min(&self, peer: PeerId, reads: bool) -> Option<usize> {
        self.caps(peer).reach_min(reads)
    }

    /// Moves bytes between `local` and the peer's `spot`. What is begun later comes
    /// later, in memory too. ESTALE: the epoch is void.
    fn reach(
        &mut self,
        peer: PeerId,
        spot: &Spot,
        local: &SegmentList,
        how: Reach,
    ) -> Result<Reached, SendError> {
        let _ = (peer, spot, local, how);
        Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP)))
    }

    /// Something is to come by stream soon.
    fn attend(&mut self) {}

    /// Nothing more will join the fragments that wait.
    fn flush(&mut self) {}

    /// Reads from the peer's `remote` ranges into `local`; returns bytes moved (> 0).
    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        remote: &[Range],
    ) -> Result<usize, SendError>;

    /// Writes `local` into the peer's `remote` ranges; returns bytes moved (> 0).
    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        remote: &[Range],
    ) -> Result<usize, SendError>;

    /// The next message to `peer` is one whose arrival matters. False: no message to it needs anything of this process once it
    /// was taken, so that there is nothing to wait for.
    fn track(&mut self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// Where the last message to `peer` ends; `None`: the peer's endpoint has it.
    fn tracked(&self, peer: PeerId) -> Option<Mark> {
        let _ = peer;
        None
    }

    /// Everything before this mark is with the peer's endpoint; `None`: nothing is known of it.
    fn acknowledged(&mut self, peer: PeerId) -> Option<Mark> {
        let _ = peer;
        None
    }

    /// True when the peer asks for small descriptions instead of payload it must buffer.
    fn under_pressure(&self, peer: PeerId) -> bool;

    /// Asks every peer to send (or no longer to send) descriptions instead of payload.
    fn set_pressure(&mut self, on: bool);

    /// Delivers what has arrived, a bounded number of messages; returns how many events.
    fn poll(&mut self, handler: &mut impl Handler) -> usize;
}

/// Skips `offset` bytes of `ranges` and keeps `len`: the part of a peer's buffer to move next.
pub(crate) fn slice_ranges(ranges: &[Range], offset: u64, len: u64, out: &mut [Range]) -> usize {
    let (mut skip, mut want, mut n) = (offset, len, 0);
    for range in ranges {
        if want == 0 {
            break;
        }
        if skip >= range.len {
            skip -= range.len;
            continue;
        }
        let take = (range.len - skip).min(want);
        let Some(slot) = out.get_mut(n) else { break };
        *slot = Range { addr: range.addr.wrapping_add(skip), len: take };
        n += 1;
        want -= take;
        skip = 0;
    }
    n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_an_eighth_within_bounds() {
        const K: usize = 1024;
        let of = |len| piece_of(len, 64 * K);
        assert_eq!([0, 1, 16 * K, 512 * K].map(of), [16 * K; 4]);
        assert_eq!([512 * K + 1, K * K, usize::MAX].map(of), [64 * K; 3]);
        assert_eq!([0, 512 * K, usize::MAX].map(|len| piece_of(len, 1300)), [1300; 3]);
    }

    #[test]
    fn slices_of_ranges() {
        let ranges = [Range { addr: 100, len: 10 }, Range { addr: 500, len: 5 }];
        let mut out = [Range::default(); 4];
        assert_eq!(slice_ranges(&ranges, 8, 4, &mut out), 2);
        assert_eq!(out[..2], [Range { addr: 108, len: 2 }, Range { addr: 500, len: 2 }]);
        assert_eq!(slice_ranges(&ranges, 15, 4, &mut out), 0);
    }
}
