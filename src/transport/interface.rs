//! The interface of a transport, in groups of methods of which a transport implements what it can: [`Messages`],
//! [`OneSided`], [`Lending`], [`Streaming`], [`Sharing`]. The router has the same groups, and passes each call on to the
//! transport that carries messages to the peer ([`Iface`] is what the protocol drives); what only a transport has is in
//! [`Transport`].

use super::peers::PeerTable;
use super::share::{Assisted, Share, Taken};
use super::{Address, BCOPY_LEAST, JobKey, LocalHost, MAX_HEADER, PeerId, Source};
use crate::config::Config;
use crate::memory::{MAX_SEGMENTS, Segment, SegmentList};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::sys::event::Epoll;
use crate::sys::udp::UdpPort;
use std::collections::VecDeque;
use std::sync::Arc;

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
    /// Most bytes of one window; 0: there are no windows ([`Lending::windows`]).
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
    /// Of a peer that there is no contact with.
    pub(crate) const UNKNOWN: Self = Self {
        short_max: MAX_HEADER,
        bcopy_max: BCOPY_LEAST,
        fragment_max: BCOPY_LEAST,
        push_max: 0,
        stream_max: 0,
        stream_min: 0,
        window_max: 0,
        window_min: 0,
        get: false,
        put: false,
        one_sided: false,
        reach_read: false,
        reach_write: false,
        reach_read_min: usize::MAX,
        reach_write_min: usize::MAX,
        expose_max: 0,
        atomics: None,
        collectives: None,
        announces_room: false,
        outlives: false,
    };

    /// `reach_read_min` if `reads`, else `reach_write_min`; `None` if that is not done at all.
    #[inline]
    fn reach_min(&self, reads: bool) -> Option<usize> {
        match reads {
            true => self.reach_read.then_some(self.reach_read_min),
            false => self.reach_write.then_some(self.reach_write_min),
        }
    }
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

/// How a message is to be carried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// In one slot: header and payload have at most `short_max` bytes.
    Short,
    /// Through the transport's buffers: at most `bcopy_max` bytes of payload.
    Bulk,
    /// One of many that carry a long one, at most `fragment_max` bytes of payload. It may wait for `flush` or the next
    /// poll, to leave together with others.
    Fragment,
    /// Without payload. Nobody waits for it: it may leave with the next one to the peer, or with the next poll.
    Late,
    /// Without payload. It announces another one: where many follow each other, it may wait for company until the next
    /// poll.
    Announcement,
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

/// Up to so many bytes a device reads from, or writes to, memory of the transport's own for `OneSided::reach`; what is longer
/// it takes from, or puts, where the application has it.
pub(crate) const STAGED_MAX: usize = 4096;

/// What is wanted of `OneSided::reach`.
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

/// What `Iface::poll` and the polls of transports reports to.
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
    /// What `OneSided::reach` has begun with `token` is done. In the order in which they were begun.
    fn on_reached(&mut self, peer: PeerId, token: u64) {
        let _ = (peer, token);
    }
    /// A region of which a part was exposed is so no more: its memory is no longer what it was.
    fn on_concealed(&mut self, region: u64) {
        let _ = region;
    }
    /// The peer, which is about to depart, has acknowledged everything before `upto` ([`Messages::tracked`]).
    fn on_acknowledged(&mut self, peer: PeerId, upto: Mark) {
        let _ = (peer, upto);
    }
    /// A peer is gone; everything it sent before was reported before.
    fn on_departure(&mut self, peer: PeerId, departure: Departure);
    /// Whether an operation waits for `peer`: its silence is worth looking into then.
    fn is_owed(&self, peer: PeerId) -> bool;
}

/// Messages: reliable, and in order from one peer to another. What there is no room for is refused, and nothing is
/// queued in secret.
pub(crate) trait Messages {
    /// What works towards `peer` at this moment; `get` and `put` may become true later.
    fn caps(&self, peer: PeerId) -> Caps;

    /// Sends `header` and `len` payload bytes. `pack` copies payload from the offset that it is given, once or piece by
    /// piece.
    fn send(
        &mut self,
        peer: PeerId,
        mode: Mode,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError>;

    /// Sends a message at once, if the transport has a short way to `peer` and that is open. False:
    /// nothing was done, and `send` knows why. `payload.len() <= bcopy_max`.
    #[inline]
    fn send_at_once(&mut self, peer: PeerId, head: &Head, payload: Segment) -> bool {
        let _ = (peer, head, payload);
        false
    }

    /// Sends a long message as a whole, if the transport has a short way for that and room for all of it: `first`, and
    /// behind it the payload in pieces, each with the header that `next` makes for its offset. False: nothing was
    /// done. All of it arrives ([`Caps::outlives`]).
    #[inline]
    fn send_whole(
        &mut self,
        peer: PeerId,
        first: &[u8],
        payload: Segment,
        next: impl Fn(usize) -> Head,
    ) -> bool {
        let _ = (peer, first, payload, next);
        false
    }

    /// Nothing more will join the fragments that wait.
    fn flush(&mut self) {}

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
    fn under_pressure(&self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// Asks every peer to send (or no longer to send) descriptions instead of payload.
    fn set_pressure(&mut self, on: bool) {
        let _ = on;
    }
}

/// Access to memory of a peer that takes no part in it.
pub(crate) trait OneSided: Messages {
    /// Reads from the peer's `remote` ranges into `local`; returns bytes moved (> 0).
    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        remote: &[Range],
    ) -> Result<usize, SendError> {
        let _ = (peer, local, remote);
        Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP)))
    }

    /// Writes `local` into the peer's `remote` ranges; returns bytes moved (> 0).
    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        remote: &[Range],
    ) -> Result<usize, SendError> {
        let _ = (peer, local, remote);
        Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP)))
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
}

/// Parts of a receiver's buffer that are lent to the peer, which writes into them; and of a sender's that it reads.
pub(crate) trait Lending {
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
}

/// Byte streams beside the messages, whose bytes land in the receiver's buffer.
pub(crate) trait Streaming {
    /// Whether `send_by_stream` to `peer` works now. If it may work later, that begins.
    fn has_stream(&mut self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// Sends `header`, of at most 32 bytes, and at most `stream_max` bytes of `payload` straight
    /// from application memory, which is the caller's again afterwards. It comes after the messages sent before, and may come after those
    /// sent later. Taken is not arrived: `Handler::on_stream_lost`.
    fn send_by_stream(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &SegmentList,
    ) -> Result<(), SendError> {
        let _ = (peer, header, payload);
        Err(SendError::Unreachable(Errno(libc::EOPNOTSUPP)))
    }

    /// Something is to come by stream soon.
    fn attend(&mut self) {}
}

/// Long messages that both ends copy.
pub(crate) trait Sharing {
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
}

/// All ways to all peers, as the protocol layer sees them.
pub(crate) trait Iface: Messages + OneSided + Lending + Streaming + Sharing {
    /// The peer at `address`, contacted now if this is the first time.
    fn connect(&mut self, address: &Address) -> Result<PeerId, SendError>;

    /// Whose number `peer` is.
    fn address_of(&self, peer: PeerId) -> Option<Address>;

    /// What carries messages to `peer`, for people.
    fn way(&self, peer: PeerId) -> &'static str {
        let _ = peer;
        ""
    }

    /// Delivers what has arrived, a bounded number of messages; returns how many events.
    fn poll(&mut self, handler: &mut impl Handler) -> usize;
}

/// What an endpoint opens its transports with.
#[derive(Debug)]
pub(crate) struct Opening<'a> {
    /// The endpoint's address, with its port.
    pub(crate) me: Address,
    /// The endpoint's number among its own peers.
    pub(crate) my_id: PeerId,
    pub(crate) host: &'a LocalHost,
    pub(crate) config: &'a Config,
    pub(crate) key: JobKey,
    /// What the key was made of.
    pub(crate) key_source: Source,
    /// Who waits for the endpoint sleeps on this. Descriptors that only wake have the token [`ELSEWHERE`].
    pub(crate) epoll: &'a Arc<Epoll>,
    /// Keeps the endpoint's UDP port, for the transport that wants it.
    pub(crate) port: Option<UdpPort>,
}

/// The token of descriptors that only wake.
pub(crate) const ELSEWHERE: u64 = u64::MAX;

/// What a transport makes of a peer's address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Contact {
    /// Messages may be sent.
    Linked,
    /// They may once [`Transport::is_settling`] says no.
    Settling,
    /// Not this way.
    Elsewhere,
    /// Not this way, and nobody who can be talked to seems to be there; a later transport may know better.
    Missing(Errno),
    /// The peer wants none of our messages, whatever way they come.
    Refused(Errno),
}

/// One message that is to go another way.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Vec<u8>,
    pub(crate) payload: Vec<u8>,
}

/// Messages that were taken and cannot be delivered this way.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) peer: PeerId,
    /// The process of the peer, and why it did not take them.
    pub(crate) pid: i32,
    pub(crate) errno: Errno,
    pub(crate) messages: VecDeque<Message>,
}

/// What a turn of a transport looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum LookedAt {
    #[default]
    Everything,
    /// A device only, which has hardware of its own.
    Device,
    /// One that is threads of the kernel.
    Threads,
}

/// One way to move bytes between endpoints. Every folder beside this file has one; [`super::router`] lists them.
pub(crate) trait Transport:
    Messages + OneSided + Lending + Streaming + Sharing + Sized
{
    /// For people.
    const NAME: &'static str;
    /// A peer that has made contact can be sent to.
    const TWO_WAY: bool;

    /// `None`: not wanted. Errors: EADDRINUSE when the port is taken, and those of the system.
    fn open(opening: &mut Opening<'_>) -> Result<Option<Self>, Errno>;

    /// Whether peers may be reached this way; if not, others may be told here that they are not.
    fn is_open(&self) -> bool {
        true
    }

    /// Makes contact with `peer` at `address`, if it is to be reached this way. `missing`: an earlier transport has found
    /// nobody there. Errors: Again, and Unreachable when this process lacks what that takes.
    fn connect(
        &mut self,
        peer: PeerId,
        address: &Address,
        missing: bool,
    ) -> Result<Contact, SendError>;

    /// Messages to `peer` can be sent.
    fn is_connected(&self, peer: PeerId) -> bool;

    /// There is contact with `peer`, which has not taken it up yet.
    fn is_settling(&self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// Messages of `peer` come this way.
    fn hears(&self, peer: PeerId) -> bool {
        self.is_connected(peer)
    }

    /// Delivers messages that have come, without a system call; nothing else is reported here. A bounded number; returns
    /// how many.
    fn poll(&mut self, handler: &mut impl Handler) -> usize {
        let _ = handler;
        0
    }

    /// Whether each poll is to have a `turn` at present. `still`: nothing has come lately by any transport.
    fn has_its_turn(&mut self, still: bool) -> bool {
        let _ = still;
        false
    }

    /// Delivers what has come, peers that come and go included, and sends what may leave; takes system calls. A bounded
    /// number; returns how many events.
    fn turn(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) -> usize;

    /// What the last turn looked at.
    fn looked_at(&self) -> LookedAt {
        LookedAt::Everything
    }

    /// Time between two turns, nanoseconds, where not each poll has one. `still`: nothing has come lately; `busy`: there
    /// is traffic that takes a turn each poll.
    fn every_ns(still: bool, busy: bool) -> u64;

    /// The next turn should not wait.
    fn is_urgent(&self) -> bool {
        false
    }

    /// There is traffic that takes a turn each poll.
    fn has_traffic(&self) -> bool {
        false
    }

    /// The next turn looks at everything.
    fn hasten(&mut self) {}

    /// Delivers what `peer` has sent so far: it has departed by another transport.
    fn drain(&mut self, peer: PeerId, handler: &mut impl Handler) {
        let _ = (peer, handler);
    }

    /// No peer is in the middle of a copy from or to memory of an endpoint that has closed.
    fn are_left_settled() -> bool {
        true
    }

    /// What cannot be delivered this way and was taken, since this was asked last.
    fn returned(&mut self) -> Vec<Returned> {
        Vec::new()
    }

    /// There is no other way for what this transport has returned, and the reason does not pass: operations to `peer` end
    /// with it.
    fn give_up(&mut self, peer: PeerId, errno: Errno) {
        let _ = (peer, errno);
    }

    /// Messages that the peers' endpoints may not have yet, in the transport's own units.
    fn unacknowledged(&self) -> usize {
        0
    }

    /// Whether who polls, with so many endpoints in this process, may keep others from a processor that they need.
    fn is_crowded(&self, endpoints: usize) -> bool {
        let _ = endpoints;
        false
    }

    /// From now on somebody may sleep.
    fn enable_waiting(&mut self) {}

    /// Prepares for sleep: after `true`, whatever comes makes the endpoint's epoll set ready. `false`: there is work.
    fn sleep(&mut self) -> bool {
        true
    }

    /// Ends the state that `sleep` began.
    fn awake(&mut self) {}
}
