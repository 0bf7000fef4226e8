//! The interface of a transport, in groups of methods: [`Messages`], [`OneSided`], [`Streaming`] and
//! [`Sharing`]. A transport implements the methods that it supports. The router has the same groups, and passes each
//! call on to the transport that carries messages to the peer; the protocol layer drives it as an [`Iface`]. Methods
//! that only transports have are in [`Transport`].

use super::peers::PeerTable;
use super::share::{Assisted, Share, Taken};
use super::{
    Address, BCOPY_LEAST, JobKey, LaneId, Lanes, LocalHost, MAX_HEADER, PeerId, RemoteKey, Source,
};
use crate::config::Config;
use crate::memory::{MAX_SEGMENTS, Segment, SegmentList};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::sys::late_set::LateSet;
use crate::sys::net::Nic;
use crate::sys::udp::UdpPort;
use crate::telemetry::histogram::Histogram;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

/// The capabilities of the transport that carries messages to one peer. Those of its lanes for bulk are [`LaneCaps`].
///
/// [`LaneCaps`]: super::LaneCaps
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caps {
    /// Most bytes of header plus payload in one short message.
    pub(crate) short_max: usize,
    /// Most payload bytes in one bcopy message.
    pub(crate) bcopy_max: usize,
    /// Most payload bytes in one fragment of a long message ([`piece_of`](super::piece_of)).
    pub(crate) fragment_max: usize,
    /// Most bytes of a long message that are worth sending unsolicited, before the receiver asks for them.
    pub(crate) push_max: usize,
    /// Most payload bytes of one message by stream; 0: there are no streams.
    pub(crate) stream_max: usize,
    /// Shortest long message that is worth a stream, bytes.
    pub(crate) stream_min: usize,
    /// One-sided reads from the peer's application buffers work.
    pub(crate) get: bool,
    /// One-sided writes into the peer's application buffers work.
    pub(crate) put: bool,
    /// The peer is this endpoint: the processor moves the bytes, and an address without memory raises a signal.
    pub(crate) itself: bool,
    /// `get` or `put` works, or may work later: it is worth telling the peer where buffers are.
    pub(crate) one_sided: bool,
    /// Whether the peer supports atomic operations; `None`: the peer has not said yet.
    pub(crate) atomics: Option<bool>,
    /// The same for collective operations.
    pub(crate) collectives: Option<bool>,
    /// After `SendError::Again` a packet arrives, and wakes a sleeping thread, as soon as there is room again.
    pub(crate) announces_room: bool,
    /// Data taken from a buffer arrives, even if this endpoint closes or its process ends.
    pub(crate) outlives: bool,
}

impl Caps {
    /// The capabilities towards a peer before there is contact with it.
    pub(crate) const UNKNOWN: Self = Self {
        short_max: MAX_HEADER,
        bcopy_max: BCOPY_LEAST,
        fragment_max: BCOPY_LEAST,
        push_max: 0,
        stream_max: 0,
        stream_min: 0,
        get: false,
        put: false,
        itself: false,
        one_sided: false,
        atomics: None,
        collectives: None,
        announces_room: false,
        outlives: false,
    };
}

/// The header of a message, in a fixed number of words, so that it is written without a loop over its length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Head {
    /// In wire form; the bytes beyond `len` have no meaning.
    pub(crate) words: [u64; Self::WORDS],
    /// Length, bytes.
    pub(crate) len: usize,
}

impl Head {
    pub(crate) const WORDS: usize = 3;
}

/// A sequence tag: a position in the sequence of packets sent to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    /// Our number of the connection: each connection has its own sequence.
    pub(crate) connection: u32,
    /// The low half of a packet's sequence number.
    pub(crate) psn: u32,
}

impl Mark {
    /// Whether this comes before `upto`. False for marks of two connections, which have no order.
    pub(crate) fn is_before(self, upto: Self) -> bool {
        self.connection == upto.connection && (upto.psn.wrapping_sub(self.psn) as i32) > 0
    }
}

/// Why a message was not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SendError {
    /// No room now: make progress, then try again.
    Again,
    /// The peer cannot be reached; the system's error.
    Unreachable(Errno),
}

impl SendError {
    /// `None`: the same call may succeed later, because there is no room now, or a shortage of descriptors or memory.
    /// Else the system's error.
    pub(crate) fn lasting(self) -> Option<Errno> {
        match self {
            Self::Unreachable(errno) if !errno.is_shortage() => Some(errno),
            _ => None,
        }
    }
}

/// How a peer went away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Departure {
    /// The peer closed its endpoint; all messages it had sent were delivered.
    Closed,
    /// The peer died, or violated the protocol.
    Failed(Errno),
}

/// How a message is to be carried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// In one slot: header and payload have at most `short_max` bytes.
    Short,
    /// Through the transport's buffers: at most `bcopy_max` bytes of payload.
    Bulk,
    /// One fragment of a long message, at most `fragment_max` bytes of payload. The transport may hold it until `flush`
    /// or the next poll, to send it together with others.
    Fragment,
    /// Without payload and not urgent: it may be sent with the next message to the peer, or at the next poll.
    Late,
    /// Without payload; it announces another message. While many such messages follow each other, the transport may
    /// hold it until the next poll, to coalesce them.
    Announcement,
}

/// Whether there is a lane on which receives can be registered for a peer, and the peer's filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Prepared {
    /// No, or not soon enough to be worth waiting for.
    No,
    /// It is being set up. This takes milliseconds; if it takes longer, the answer becomes `No`.
    Later,
    /// Now, in both directions.
    Ready,
}

/// What a peer may do with memory for which it gets a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// A range of the region with this id (PROTOCOL.md §4.18): the peer reads, or writes, any of it at any time.
    Region { id: u64, reads: bool, writes: bool },
    /// A remote buffer, one range of a receive (PUT rendezvous): the peer writes all of it by one put with notice, which
    /// `Handler::on_notify` reports with this token. That ends the key.
    Receive { token: u64 },
    /// A message in one range (GET rendezvous): the peer reads it.
    Send,
}

/// A key that was made for one peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Registration {
    pub(crate) key: RemoteKey,
    /// What the peer may do: at most what was asked for.
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    /// The peer can find out whether its puts have reached memory: by a flush read, or, of a put with notice, by
    /// `Handler::on_done` (sender-side delivery completion).
    pub(crate) confirms: bool,
}

/// The result of a request for a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Registered {
    Yes(Registration),
    /// It is being set up, which takes milliseconds, or as many keys exist as may.
    Later,
    /// Not to this peer at present.
    No,
    /// This memory can never be registered.
    Never,
}

impl Registered {
    /// The key, if there is one.
    pub(crate) fn key(self) -> Option<RemoteKey> {
        match self {
            Self::Yes(registration) => Some(registration.key),
            Self::Later | Self::No | Self::Never => None,
        }
    }
}

/// A location in a peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Remote {
    pub(crate) key: RemoteKey,
    /// From the beginning of the memory under the key, bytes. The caller knows the length of that memory.
    pub(crate) offset: u64,
}

/// Data of at most this length, bytes, goes through the transport's bounce buffers in `OneSided::put` and `get`. For
/// longer data the device accesses the application's memory.
pub(crate) const STAGED_MAX: usize = 4096;

/// What the caller wants of `OneSided::put`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Put {
    /// The peer is notified ([`Purpose::Receive`]): the put fills all of the memory under the key.
    pub(crate) notify: bool,
    /// It completes when its bytes, and those of all earlier puts, are in the peer's memory; otherwise when the peer's
    /// device has them.
    pub(crate) delivered: bool,
    /// The local memory is the engine's, and lives as long as the transport: a persistent registration suffices.
    pub(crate) stays: bool,
    /// The caller has to hear of the end of a put with notice that works ([`Access::Begun`], [`Access::Unsure`]), even of a transport that
    /// could do without.
    pub(crate) reports: bool,
    /// Passed to `Handler::on_done`.
    pub(crate) token: u64,
}

/// The result of an access to a peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// So many bytes were moved, at least one.
    Moved(usize),
    /// The whole access is under way. The memory of both sides is in use until `Handler::on_done` or
    /// `Handler::on_lane_lost`, or until the peer has departed.
    Begun,
    /// As `Begun`, of a put with notice. `Handler::on_done` says only that the local memory is free: the peer may not be notified.
    /// The local memory may be read after `Handler::on_lane_lost` too, though not written anywhere any more once the peer knows of that.
    Unsure,
    /// A put with notice is under way, or its key is void and it has no effect. Only the peer is told.
    Silent,
}

impl Access {
    /// The number of bytes moved. Errors: it is not complete.
    pub(crate) fn moved(self) -> Result<usize, SendError> {
        match self {
            Self::Moved(bytes) => Ok(bytes),
            Self::Begun | Self::Unsure | Self::Silent => Err(UNSUPPORTED),
        }
    }
}

/// One end of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamEnd {
    /// The sending end.
    Outgoing,
    /// The receiving end.
    Incoming,
}

/// Receives the events of `Iface::poll` and of the transports' polls.
pub(crate) trait Handler {
    /// A peer made contact. Called before any message of the peer is reported.
    fn on_peer(&mut self, peer: PeerId, address: &Address);
    /// An active message. The slices are valid during the call only.
    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]);
    /// Whether the application must run before the next message is delivered, because the previous message may make
    /// it post the receive for the next one. Asked once a message; the transport may ignore `true`.
    fn wants_pause(&mut self) -> bool {
        false
    }
    /// Where in application memory the `len` payload bytes belong that follow this header by stream. `None`: they are
    /// delivered with `on_message`. A shorter list takes only the first bytes. It stays valid until `on_placed` or
    /// `on_stream_lost`, or until the peer has departed.
    fn place(&mut self, peer: PeerId, header: &[u8], len: usize) -> Option<SegmentList> {
        let _ = (peer, header, len);
        None
    }
    /// The payload is where `place` told the transport to put it.
    fn on_placed(&mut self, peer: PeerId, header: &[u8], len: usize) {
        let _ = (peer, header, len);
    }
    /// A stream from or to `peer` broke: data sent on it has arrived in part, or not at all.
    fn on_stream_lost(&mut self, peer: PeerId, end: StreamEnd) {
        let _ = (peer, end);
    }
    /// The peer has filled the remote buffer that was registered with `token`; the buffer is ours again.
    fn on_notify(&mut self, peer: PeerId, token: u64) {
        let _ = (peer, token);
    }
    /// The access that was begun with `token` is complete; the peer will be notified of a put with notice whatever
    /// happens, unless that is [unsure](Access::Unsure). Reported in the order of their start, by lane.
    fn on_done(&mut self, peer: PeerId, token: u64) {
        let _ = (peer, token);
    }
    /// All keys of both sides that this lane between `peer` and us had are void; those of other lanes are not. Remote
    /// buffers that the peer had by it are ours again, and it does not write them any more. Any part of the accesses that
    /// were begun by it may have been done, and no more will be, nor will `on_done` come.
    fn on_lane_lost(&mut self, peer: PeerId, lane: LaneId) {
        let _ = (peer, lane);
    }
    /// A key that was made for `peer` is void: its memory was remapped or released. The peer does not know that.
    fn on_key_void(&mut self, peer: PeerId, key: &RemoteKey) {
        let _ = (peer, key);
    }
    /// The peer, which is about to depart, has acknowledged everything before `upto` ([`Messages::tracked`]).
    fn on_acknowledged(&mut self, peer: PeerId, upto: Mark) {
        let _ = (peer, upto);
    }
    /// A peer has departed. Everything it sent before has been reported.
    fn on_departure(&mut self, peer: PeerId, departure: Departure);
    /// Whether an operation waits for `peer`: only then is its silence worth a check.
    fn is_owed(&self, peer: PeerId) -> bool;
    /// The send that has been pending for longest, as a number that no other one has soon, and its peer.
    fn oldest_send(&self) -> Option<(u64, PeerId)> {
        None
    }
    /// Some time has passed: what the transports have done until now.
    fn on_turns(&mut self, figures: &Figures) {
        let _ = figures;
    }
}

/// What an endpoint's transports have done, for people.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    /// Polls, modulo 2^32, and those since one delivered a message.
    pub(crate) polls: u64,
    pub(crate) empty_polls: u64,
    /// Preparations for sleep.
    pub(crate) sleeps: u64,
    pub(crate) packets: PacketCounts,
    /// Requests for a registration of memory with a device that found one, and those that made one.
    pub(crate) cache: (u64, u64),
    /// Times between two polls, of 16 us and more, without sleep.
    pub(crate) gaps: Histogram,
    /// When this was, and the peer that the oldest pending send goes to, and since when it is the oldest; nanoseconds of
    /// the monotonic clock.
    pub(crate) now: u64,
    pub(crate) oldest: Option<(Address, u64)>,
    /// Some of the peers, the next ones each time; none before a thread sleeps.
    pub(crate) peers: Vec<PeerFigures>,
}

/// Counts of the packets of transports that have some.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct PacketCounts {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) retransmitted: u64,
    pub(crate) timeouts: u64,
    pub(crate) duplicates: u64,
    pub(crate) no_room: u64,
    pub(crate) forged: u64,
    pub(crate) stray: u64,
    pub(crate) connected: u64,
}

/// What is known of one peer.
#[derive(Clone, Debug)]
pub(crate) struct PeerFigures {
    pub(crate) peer: PeerId,
    pub(crate) address: Address,
    /// The transport of messages to it, why there is no better one (may be empty), and its counts. `None`: it is not
    /// connected, or between two transports.
    pub(crate) by: Option<(&'static str, &'static str, PeerCounts)>,
}

/// Counts of one peer; those that a transport does not have are [`PeerCounts::UNKNOWN`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PeerCounts {
    /// Messages each way since contact was made; modulo 2^32 in shared memory.
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// Smoothed round trip, nanoseconds.
    pub(crate) rtt_ns: u64,
    /// The peer has not answered the first contact yet.
    pub(crate) unanswered: bool,
}

impl PeerCounts {
    pub(crate) const UNKNOWN: u64 = u64::MAX;
}

impl Default for PeerCounts {
    fn default() -> Self {
        let unknown = Self::UNKNOWN;
        Self { sent: unknown, received: unknown, rtt_ns: unknown, unanswered: false }
    }
}

/// Copies payload from the given offset on. Behind a pointer but on the fast path: each caller has a type of its own, and
/// would have a copy of the code that sends.
pub(crate) type Pack<'a> = dyn FnMut(usize, &mut [u8]) + 'a;

/// Reliable messages, in order from one peer to another. A transport without room refuses a message; it never queues
/// one internally.
pub(crate) trait Messages {
    /// The capabilities towards `peer` now; `get` and `put` may become true later.
    fn caps(&self, peer: PeerId) -> Caps {
        let _ = peer;
        Caps::UNKNOWN
    }

    /// Sends `header` and `len` payload bytes. `pack` copies payload from the given offset; it is called once, or once
    /// for each fragment.
    fn send(
        &mut self,
        peer: PeerId,
        mode: Mode,
        header: &[u8],
        len: usize,
        pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        let _ = (peer, mode, header, len, pack);
        Err(UNSUPPORTED)
    }

    /// The fast path: sends a message if the transport has a fast path to `peer` and can use it now. False:
    /// nothing was done, and the caller uses `send`, which tells why. `payload.len() <= bcopy_max`.
    #[inline]
    fn send_at_once(&mut self, peer: PeerId, head: &Head, payload: Segment) -> bool {
        let _ = (peer, head, payload);
        false
    }

    /// Sends a whole long message unsolicited, if the transport has a fast path for that and room for all of it: first
    /// `first`, then the payload in fragments, each with the header that `next` makes for its offset. False: nothing
    /// was done. True: all of it arrives ([`Caps::outlives`]).
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

    /// No more fragments will join those that the transport holds back.
    fn flush(&mut self) {}

    /// The arrival of the next message to `peer` matters to the caller. False: once this transport has accepted a
    /// message it needs nothing more of this process, so there is nothing to wait for.
    fn track(&mut self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// The position behind the last message to `peer`; `None`: the peer's endpoint already has it.
    fn tracked(&self, peer: PeerId) -> Option<Mark> {
        let _ = peer;
        None
    }

    /// The peer's endpoint has everything before this position; `None`: unknown.
    fn acknowledged(&mut self, peer: PeerId) -> Option<Mark> {
        let _ = peer;
        None
    }

    /// True while the peer asks for descriptions instead of payload, which it would have to buffer.
    fn under_pressure(&self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// Asks all peers to send descriptions instead of payload, or to send payload again.
    fn set_pressure(&mut self, on: bool) {
        let _ = on;
    }
}

/// Access to a peer's memory without the peer's participation.
pub(crate) trait OneSided: Messages {
    /// The lanes for bulk to `peer`, as far as they exist in both directions or may be set up.
    fn lanes(&self, peer: PeerId) -> Lanes {
        let _ = peer;
        Lanes::default()
    }

    /// Whether receives can be registered and filled on a lane to `peer`. If this may be so later, this starts its
    /// set-up.
    fn prepare(&mut self, peer: PeerId, lane: LaneId) -> Prepared {
        let _ = (peer, lane);
        Prepared::No
    }

    /// Whether a lane that is ready and takes memory of devices takes this one: not each can be registered.
    fn takes(&mut self, peer: PeerId, lane: LaneId, memory: &SegmentList) -> bool {
        let _ = (peer, lane, memory);
        true
    }

    /// Whether a receive may be registered on a lane that is ready now, or later, as far as that does not depend on its memory.
    fn lends(&mut self, peer: PeerId, lane: LaneId) -> Prepared {
        let _ = (peer, lane);
        Prepared::Ready
    }

    /// Makes a key of a lane to `memory`, one range that the lane takes, for `peer`. It is valid until `invalidate`,
    /// `Handler::on_key_void`, `on_lane_lost` or the peer's departure, which is reported only when the peer has no access
    /// any more.
    fn register(
        &mut self,
        peer: PeerId,
        lane: LaneId,
        memory: &SegmentList,
        purpose: Purpose,
    ) -> Registered {
        let _ = (peer, lane, memory, purpose);
        Registered::No
    }

    /// Ends a key that was made for `peer`. The peer accesses a region no more once `is_settled` returns true; other
    /// memory it must have promised not to access. A key of an earlier connection to the peer is void already. True: all
    /// keys of this kind that the peer has are void, and it finds that out by itself. False: only this one; the caller
    /// has to tell the peer, in order, that it ends.
    fn invalidate(&mut self, peer: PeerId, key: &RemoteKey) -> bool {
        let _ = (peer, key);
        false
    }

    /// Whether a key that `peer` has made is one of the lane as it is now: keys of a lane that was lost are void.
    fn is_current(&self, peer: PeerId, key: &RemoteKey) -> bool {
        let _ = (peer, key);
        true
    }

    /// Whether no peer is still in a copy that it began before an `invalidate`. `insists`: also keep peers from starting
    /// copies that have not begun, whatever else that disables.
    fn is_settled(&mut self, insists: bool) -> bool {
        let _ = insists;
        true
    }

    /// `read_min` if `reads`, else `write_min`, of the lane to `peer` that made the key.
    #[inline]
    fn direct_min(&self, peer: PeerId, key: &RemoteKey, reads: bool) -> Option<usize> {
        let lane = *self.lanes(peer).iter().find(|lane| lane.lane.made(key))?;
        if reads { lane.read_min } else { lane.write_min }
    }

    /// Writes `local` to the peer's memory. Puts, gets and flushes of one lane take effect in the order in which they were
    /// begun, in memory too; before the first of another lane, the caller flushes. ESTALE: the key is void; EFAULT: the
    /// local memory is not fit for this.
    ///
    /// With [`RemoteKey::ADDRESSES`] the offset is an address of the peer's process, and no order is kept: such an access
    /// is complete, with at least one byte, or fails. [`Caps::put`] and [`Caps::get`] say whether it works.
    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        to: &Remote,
        how: Put,
    ) -> Result<Access, SendError> {
        let _ = (peer, local, to, how);
        Err(UNSUPPORTED)
    }

    /// Reads from the peer's memory into `local`. Errors as for `put`.
    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        from: &Remote,
        token: u64,
    ) -> Result<Access, SendError> {
        let _ = (peer, local, from, token);
        Err(UNSUPPORTED)
    }

    /// Is complete when all puts that were begun before are in the peer's memory. A device reads the byte `at` for that:
    /// one that earlier puts had the right to write. Errors as for `put`.
    fn flush_puts(&mut self, peer: PeerId, at: &Remote, token: u64) -> Result<Access, SendError> {
        let _ = (peer, at, token);
        Err(UNSUPPORTED)
    }
}

/// The transport has no such access.
const UNSUPPORTED: SendError = SendError::Unreachable(Errno(libc::EOPNOTSUPP));

/// Byte streams beside the messages; their bytes land in the receiver's buffer.
pub(crate) trait Streaming {
    /// Whether `send_by_stream` to `peer` works now. If it may work later, this starts its set-up.
    fn has_stream(&mut self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// Sends `header`, of at most 32 bytes, and at most `stream_max` bytes of `payload`, straight from application
    /// memory that is free again afterwards. It arrives after all messages sent before, and possibly after some sent
    /// later. Accepted does not mean arrived: see `Handler::on_stream_lost`.
    fn send_by_stream(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &SegmentList,
    ) -> Result<(), SendError> {
        let _ = (peer, header, payload);
        Err(UNSUPPORTED)
    }

    /// Data by stream is expected soon.
    fn attend(&mut self) {}
}

/// Split copies: long messages that both ends copy.
pub(crate) trait Sharing {
    /// Begins a split copy of `len` bytes that `peer` sends; the caller has to tell the peer. `None`: not worth it, not
    /// possible, or the most that may be under way are.
    fn share(&mut self, peer: PeerId, len: usize) -> Option<Share> {
        let _ = (peer, len);
        None
    }

    /// Shortest message from `peer` that is worth a split copy, bytes; `None`: none is.
    fn share_min(&self, peer: PeerId) -> Option<usize> {
        let _ = peer;
        None
    }

    /// What this receiver copies next, at most `most` chunks; with 0 it only learns whether the split copy is over.
    /// To be called until it returns [`Taken::Over`].
    fn take(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        let _ = (peer, share, most);
        Taken::Over
    }

    /// So many chunks of a split copy arrived as messages.
    fn arrived(&mut self, peer: PeerId, share: &Share, units: u32) {
        let _ = (peer, share, units);
    }

    /// Withdraws the chunks of a split copy that are not taken. It is over when the peer has finished the chunks
    /// that it is copying.
    fn stop_sharing(&mut self, peer: PeerId, share: &Share) {
        let _ = (peer, share);
    }

    /// The sender takes a run of chunks of a split copy and writes it. `part` returns, for an offset and a length,
    /// where the bytes are and where they go in the peer's memory. No chunk is in progress when this returns.
    fn assist(
        &mut self,
        peer: PeerId,
        share: &Share,
        part: impl Fn(usize, usize) -> (SegmentList, [Range; MAX_SEGMENTS], usize),
    ) -> Assisted {
        let _ = (peer, share, part);
        Assisted::Over
    }

    /// The sender takes a run of chunks, at most `most` and no more than can be sent now as fragments of one chunk
    /// each. Returns which bytes they are. `Wait`: nothing can be sent now.
    fn begin_assist(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        let _ = (peer, share, most);
        Taken::Over
    }
}

/// All transports to all peers, as the protocol layer sees them.
pub(crate) trait Iface: Messages + OneSided + Streaming + Sharing {
    /// The peer at `address`, contacted now if this is the first time.
    fn connect(&mut self, address: &Address) -> Result<PeerId, SendError>;

    /// The address of `peer`.
    fn address_of(&self, peer: PeerId) -> Option<Address>;

    /// The peer at `address`, if messages of it arrive.
    fn heard(&self, address: &Address) -> Option<PeerId> {
        let _ = address;
        None
    }

    /// Name of the transport that carries messages to `peer`, for people.
    fn way(&self, peer: PeerId) -> &'static str {
        let _ = peer;
        ""
    }

    /// What the transports have done, without the peers. `oldest`: see [`Handler::oldest_send`].
    fn figures(&mut self, oldest: Option<(u64, PeerId)>) -> Figures {
        let _ = oldest;
        Figures::default()
    }

    /// Delivers arrived messages, a bounded number; returns the number of events.
    fn poll(&mut self, handler: &mut impl Handler) -> usize;
}

/// The arguments of [`Transport::open`].
#[derive(Debug)]
pub(crate) struct Opening<'a> {
    /// The endpoint's address, with its port.
    pub(crate) me: Address,
    /// The endpoint's number among its own peers.
    pub(crate) my_id: PeerId,
    pub(crate) host: &'a LocalHost,
    pub(crate) config: &'a Config,
    pub(crate) key: JobKey,
    /// Where the job key came from.
    pub(crate) key_source: Source,
    /// The set of descriptors on which waiting threads sleep. Descriptors that only wake them have the token [`ELSEWHERE`].
    pub(crate) epoll: &'a Arc<LateSet>,
    /// Keeps the endpoint's UDP port, for the transport that uses it.
    pub(crate) port: Option<UdpPort>,
}

/// The token of descriptors that only wake a waiting thread.
pub(crate) const ELSEWHERE: u64 = u64::MAX;

/// The result of a transport's attempt to contact a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Contact {
    /// Messages may be sent.
    Linked,
    /// Messages may be sent once [`Transport::is_settling`] returns false.
    Settling,
    /// The peer cannot be asked yet, for a reason that is not the peer's, and that passes.
    Later,
    /// This transport does not reach the peer.
    Elsewhere,
    /// This transport found no usable endpoint at the address; a later transport may find one.
    Missing(Errno),
    /// The peer refuses our messages by any transport.
    Refused(Errno),
}

/// One message that is to be sent by another transport.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Vec<u8>,
    pub(crate) payload: Vec<u8>,
}

/// Messages that a transport accepted and cannot deliver.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) peer: PeerId,
    /// The peer's process, and why it did not take the messages.
    pub(crate) pid: i32,
    pub(crate) errno: Errno,
    pub(crate) messages: VecDeque<Message>,
}

/// What the last turn of a transport polled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum LookedAt {
    #[default]
    Everything,
    /// Only a device with hardware of its own.
    Device,
    /// A device that kernel threads emulate.
    Threads,
}

/// A means to move bytes between endpoints. Every folder beside this file has one; [`super::router`] lists them.
pub(crate) trait Transport: Messages + OneSided + Streaming + Sharing + Sized {
    /// Its name, for people.
    const NAME: &'static str;
    /// It carries messages. Otherwise it only has lanes for bulk, to peers that [`Transport::meet`] has named.
    const CARRIES: bool = true;
    /// A peer that made contact by this transport can also be sent to by it.
    const TWO_WAY: bool = false;
    /// The kinds of its remote keys ([`RemoteKey::kind`]): no other transport has keys of these kinds.
    const KEYS: &'static [u8] = &[];

    /// `None`: the configuration disables it. Errors: EADDRINUSE when the port is taken, and those of the system.
    fn open(opening: &mut Opening<'_>) -> Result<Option<Self>, Errno>;

    /// Whether peers may be reached by this transport. If not, it may still exist to tell peers so.
    fn is_open(&self) -> bool {
        true
    }

    /// Contacts `peer` at `address`, if this transport reaches it. `missing`: an earlier transport found no endpoint
    /// there. Errors: Again, and Unreachable when this process lacks a resource.
    fn connect(
        &mut self,
        peer: PeerId,
        address: &Address,
        missing: bool,
    ) -> Result<Contact, SendError> {
        let _ = (peer, address, missing);
        Ok(Contact::Elsewhere)
    }

    /// Messages to `peer` can be sent.
    fn is_connected(&self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// There is contact with `peer`, by any transport. May be called more than once.
    fn meet(&mut self, peer: PeerId, address: &Address) {
        let _ = (peer, address);
    }

    /// There is contact with `peer`, but the peer has not accepted it yet.
    fn is_settling(&self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// Messages of `peer` arrive by this transport. When they end, a departure is reported.
    fn hears(&self, peer: PeerId) -> bool {
        self.is_connected(peer)
    }

    /// Fast poll: delivers messages that have arrived, without a system call, and reports no other event. A bounded
    /// number; returns how many.
    fn poll(&mut self, handler: &mut impl Handler) -> usize {
        let _ = handler;
        0
    }

    /// Whether each poll should include a `turn` now. `still`: no transport has received anything lately.
    fn has_its_turn(&mut self, still: bool) -> bool {
        let _ = still;
        false
    }

    /// Full progress: delivers messages, reports arrivals and departures of peers, and sends what may be sent. Makes
    /// system calls. A bounded number; returns the number of events.
    fn turn(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) -> usize;

    /// What the last turn polled.
    fn looked_at(&self) -> LookedAt {
        LookedAt::Everything
    }

    /// Time between two turns, nanoseconds, unless each poll has one. `still`: nothing has arrived lately; `busy`: some
    /// transport has traffic that needs a turn with each poll.
    fn every_ns(still: bool, busy: bool) -> u64;

    /// The next turn should not wait.
    fn is_urgent(&self) -> bool {
        false
    }

    /// There is traffic that needs a turn with each poll.
    fn has_traffic(&self) -> bool {
        false
    }

    /// Makes the next turn poll everything.
    fn hasten(&mut self) {}

    /// `peer` has departed by another transport. Delivers everything that it has sent so far by this one, then ends the
    /// contact with it, and its access to memory of this endpoint. If it lives, it is told. Its departure is not reported
    /// again.
    fn drain(&mut self, peer: PeerId, handler: &mut impl Handler) {
        let _ = (peer, handler);
    }

    /// How `peer` has departed, if this transport can see that it has, and has not reported it yet. Another transport has
    /// just met it: that may be the next process at its address.
    fn gone(&self, peer: PeerId) -> Option<Departure> {
        let _ = peer;
        None
    }

    /// The configuration of a domain that has the name of a device of this transport: it uses no other device. `None`:
    /// no device has this name. Errors: the variable with which the user excludes the device.
    fn with_device(config: &Config, name: &str) -> Option<Result<Config, &'static str>> {
        let _ = (config, name);
        None
    }

    /// The IP addresses of the ports of the device `name`.
    fn addresses_of(name: &str) -> Vec<IpAddr> {
        let _ = name;
        Vec::new()
    }

    /// The device that an endpoint at `ip` would use beside its interface, opened and tested. Errors: the variable that
    /// requires one, if none works.
    fn device_at(config: &Config, ip: IpAddr) -> Result<Option<Nic>, &'static str> {
        let _ = (config, ip);
        Ok(None)
    }

    /// No peer is still in a copy from or to memory of an endpoint that has closed.
    fn are_left_settled() -> bool {
        true
    }

    /// Messages that were accepted and turned out undeliverable since the last call.
    fn returned(&mut self) -> Vec<Returned> {
        Vec::new()
    }

    /// No other transport takes the messages that this one returned, and the reason is permanent: operations to `peer`
    /// fail with `errno`.
    fn give_up(&mut self, peer: PeerId, errno: Errno) {
        let _ = (peer, errno);
    }

    /// Messages that the peers' endpoints may not have yet, in units of the transport.
    fn unacknowledged(&self) -> usize {
        0
    }

    /// Counts of its packets.
    fn packet_counts(&self) -> PacketCounts {
        PacketCounts::default()
    }

    /// Counts of one peer's messages.
    fn peer_counts(&self, peer: PeerId) -> PeerCounts {
        let _ = peer;
        PeerCounts::default()
    }

    /// Requests for a registration of memory with a device that found one, and those that made one.
    fn cache_counts(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Why messages to this peer take no better way, in a few words; empty: this transport is not the reason.
    /// `carries`: they take this transport, else a later one.
    fn shortfall(&self, peer: PeerId, address: &Address, carries: bool) -> &'static str {
        let _ = (peer, address, carries);
        ""
    }

    /// Whether a thread that polls, with so many endpoints in this process, may keep others from a processor they need.
    fn is_crowded(&self, endpoints: usize) -> bool {
        let _ = endpoints;
        false
    }

    /// Whether the processes that communicate with this endpoint outnumber the processors: most of the time it does not run.
    fn is_outnumbered(&self) -> bool {
        false
    }

    /// From now on a thread may sleep.
    fn enable_waiting(&mut self) {}

    /// Prepares for sleep. `true`: an arrival from now on makes the endpoint's epoll set ready; `false`: there is work.
    fn sleep(&mut self) -> bool {
        true
    }

    /// Ends the state that `sleep` began.
    fn awake(&mut self) {}

    /// Makes the endpoint's epoll set ready for those that sleep. One transport does it for all.
    fn rouse(&mut self) {}
}
