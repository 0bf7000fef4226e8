//! The endpoint's protocol state and its progress function.

use super::collective::{CollectivePacket, Collectives};
use super::index_list::{IndexList, Key};
use super::packet::{EagerHeader, Packet, PieceHeader};
use super::receive::{Active, Unexpected};
use super::receives::{Posted, Receives};
use super::rma::{Rma, RmaPacket};
use super::schemes::eager::Leaving;
use super::schemes::push::{Announcement, PushedMessages};
use super::schemes::put::{Due, Lent, OF_A_MESSAGE};
use super::schemes::split::Assist;
use super::send::TxRequest;
use super::spaces::{Space, Spaces};
use super::{Cause, Host, UNKNOWN_SOURCE};
use crate::memory::SegmentList;
use crate::transport::{
    Address, Chunk, Departure, Handler, Iface, Mark, PeerId, StreamEnd, Ticket,
};
use std::collections::{HashMap, VecDeque};

/// Bounds and thresholds of one endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Longest message sent eagerly, bytes. Longer messages go by rendezvous.
    pub(crate) eager_max: usize,
    /// Sends that may be pending (rendezvous, delivery-complete, fenced) before FI_EAGAIN.
    pub(crate) tx_max: usize,
    /// Receives that may be posted before FI_EAGAIN.
    pub(crate) rx_max: usize,
    /// Shortest message whose fragments are stored with non-temporal stores (past the caches), bytes.
    pub(crate) past_caches_min: usize,
    /// Payload bytes of unexpected messages that are kept before peers are asked to hold theirs back.
    pub(crate) unexpected_max: usize,
    /// Bytes of one message that are moved in one progress pass.
    pub(crate) bulk_chunk: usize,
    /// Shortest one-sided operation that the initiator carries out by direct RMA, bytes.
    pub(crate) alone_min: usize,
    /// Number of receive contexts.
    pub(crate) contexts: usize,
    /// Receives are posted to a queue of the host that several endpoints share.
    pub(crate) shares_receives: bool,
}

/// Event counts since the endpoint was enabled.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) eager_sent: u64,
    pub(crate) rendezvous_sent: u64,
    pub(crate) unexpected: u64,
    pub(crate) pulled_bytes: u64,
    pub(crate) pushed_bytes: u64,
    /// Bytes that this endpoint sent or wrote as the sender of split copies.
    pub(crate) assisted_bytes: u64,
    /// Bytes that this endpoint moved to and from regions of its peers by direct RMA.
    pub(crate) reached_bytes: u64,
    pub(crate) fragment_bytes: u64,
    pub(crate) stream_bytes: u64,
    /// Messages whose stream or remote buffers failed, and that continued as fragments.
    pub(crate) resumed: u64,
    /// Bytes that this endpoint wrote into remote buffers (PUT rendezvous).
    pub(crate) window_bytes: u64,
    /// Buffers that this endpoint had advertised when the connection ended.
    pub(crate) windows_lost: u64,
    /// Bytes that this endpoint read from messages that their senders had advertised (GET rendezvous).
    pub(crate) read_bytes: u64,
    /// Messages that this endpoint could not write into the buffers that the receiver had advertised.
    pub(crate) declined: u64,
    pub(crate) dropped: u64,
    /// Unsolicited packets that the receive had no room for, or whose message was discarded.
    pub(crate) surplus: u64,
}

/// The engine's record of a peer.
#[derive(Debug)]
pub(super) struct PeerState {
    address: Option<Address>,
    source: u64,
    /// Epoch of the address book at which `source` was looked up.
    epoch: u64,
    /// Pending sends of which this endpoint has sent something.
    pub(super) outstanding: u32,
    /// Pending sends that wait for earlier ones.
    pub(super) deferred: u32,
    /// The peer is listed in [`Core::dead`].
    pub(super) dead: bool,
    /// The last pass ([`Core::turn`]) in which a fragment of a long message came from this peer; 0: none has come.
    pub(super) fed: u64,
}

impl PeerState {
    /// No earlier send to the peer waits, and the peer is not known to be dead.
    #[inline(always)]
    pub(super) fn is_ready(&self) -> bool {
        self.deferred == 0 && !self.dead
    }
}

/// All state but the interface: a type of its own, so that messages can be handled while the interface delivers them.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) limits: Limits,
    pub(super) peers: Vec<PeerState>,
    pub(super) tx: IndexList<TxRequest>,
    /// Bytes of the copies that pending injected sends own.
    pub(super) copied: usize,
    /// The number of the next message that is complete when it is announced, and so needs no entry in `tx`.
    pub(super) passing: Key,
    /// Sends behind a fence, in order.
    pub(super) deferred: VecDeque<Key>,
    /// A deferred send could start if its ring had room. The ring does not notify when it has.
    pub(super) deferred_starved: bool,
    /// Sends that a CTS has released, or whose unsolicited bytes are being sent.
    pub(super) streams: VecDeque<Key>,
    pub(super) unexpected: Spaces<Unexpected>,
    pub(super) unexpected_bytes: usize,
    /// Messages that a peek has claimed, by receive context and the application's context.
    pub(super) claimed: HashMap<(u8, u64), Unexpected>,
    /// The endpoint's own receive queue, unused if the queue is shared ([`Core::receives`]).
    pub(super) own: Receives,
    pub(super) active: IndexList<Active>,
    /// Messages whose unsolicited bytes are still arriving.
    pub(super) pushed: PushedMessages,
    /// Rendezvous receives whose bytes this endpoint has to move.
    pub(super) pulls: VecDeque<Key>,
    /// One more than the number of passes in which `pulls` had an entry.
    pub(super) turn: u64,
    /// Parts of receives that are advertised to their senders, or that this endpoint reads. The key is the token.
    pub(super) lent: IndexList<Lent>,
    /// The entries of `lent` that this endpoint has to read.
    pub(super) reads: VecDeque<Key>,
    /// Messages that this endpoint advertised for reading and whose keys are to be invalidated.
    pub(super) withdrawn: Vec<(PeerId, Ticket)>,
    /// Remote buffers that bytes of this endpoint are to be written into, in order.
    pub(super) due: VecDeque<Due>,
    /// Messages of this endpoint that their receivers copy with it (split copy).
    pub(super) assists: VecDeque<Assist>,
    /// Sends that are complete when their peers' endpoints have them.
    pub(super) leaving: Vec<Leaving>,
    /// Replies to peers: at most one per pending request, and one for each buffer that is advertised.
    pub(super) outbox: VecDeque<(PeerId, Packet)>,
    /// Replies that are not urgent.
    pub(super) late: VecDeque<(PeerId, Packet)>,
    /// Peers that died and have not been heard of since, with the error and cause of operations on them.
    pub(super) dead: Vec<(PeerId, i32, Cause)>,
    /// One-sided operations.
    pub(super) rma: Rma,
    /// Collective groups.
    pub(super) collectives: Collectives,
    pub(super) counts: Counts,
    pub(super) pressure: bool,
    /// Bytes were announced that may come by stream.
    pub(super) attentive: bool,
}

impl Core {
    /// The record of `peer`, created if it is new.
    pub(super) fn peer(&mut self, peer: PeerId) -> Option<&mut PeerState> {
        while self.peers.len() <= peer.index() {
            self.peers.push(PeerState {
                address: None,
                source: UNKNOWN_SOURCE,
                epoch: u64::MAX,
                outstanding: 0,
                deferred: 0,
                dead: false,
                fed: 0,
            });
        }
        self.peers.get_mut(peer.index())
    }

    /// The index of `peer` in the address book.
    #[inline]
    pub(super) fn source(&mut self, peer: PeerId, host: &impl Host) -> u64 {
        lookup_source(&mut self.peers, peer, host)
    }
}

#[inline]
pub(super) fn lookup_source(peers: &mut [PeerState], peer: PeerId, host: &impl Host) -> u64 {
    let Some(state) = peers.get_mut(peer.index()) else { return UNKNOWN_SOURCE };
    if state.epoch != host.book_epoch() {
        state.look_up(host);
    }
    state.source
}

impl PeerState {
    #[cold]
    fn look_up(&mut self, host: &impl Host) {
        self.epoch = host.book_epoch();
        self.source = self.address.map_or(UNKNOWN_SOURCE, |a| host.source_of(&a));
    }
}

/// The protocol of one endpoint over one interface.
#[derive(Debug)]
pub(crate) struct Engine<I> {
    pub(super) iface: I,
    pub(super) core: Core,
}

/// Handles what the interface delivers during one poll.
struct Delivery<'a, H> {
    core: &'a mut Core,
    host: &'a mut H,
    /// A send has ended for which the receiver's answer was needed.
    answered: bool,
}

impl<H: Host> Handler for Delivery<'_, H> {
    fn on_peer(&mut self, peer: PeerId, address: &Address) {
        self.core.meet(peer, address);
        self.core.mark_alive(peer);
    }

    #[inline]
    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]) {
        if let Some(envelope) = EagerHeader::decode_head(header) {
            // A message that `try_fill` refuses is decoded again: to keep the envelope would slow down all others.
            if !self.core.try_fill(peer, envelope, payload, self.host) {
                self.on_any(peer, header, payload);
            }
        } else if let Some((tx, offset)) = PieceHeader::decode_pushed(header) {
            self.core.on_pushed(peer, tx, offset, payload, self.host);
        } else {
            self.on_any(peer, header, payload);
        }
    }

    /// An application that waited for a message's delivery may receive the reply to it next, and the reply may have
    /// arrived already. Taken before that receive is posted, it would be copied twice.
    #[inline]
    fn wants_pause(&mut self) -> bool {
        std::mem::take(&mut self.answered)
    }

    fn place(&mut self, peer: PeerId, header: &[u8], len: usize) -> Option<SegmentList> {
        let (key, offset) = self.core.by_stream(peer, header)?;
        self.core.place_streamed(peer, key, offset, len)
    }

    fn on_placed(&mut self, peer: PeerId, header: &[u8], len: usize) {
        if let Some((key, _)) = self.core.by_stream(peer, header) {
            self.core.on_streamed(key, len, self.host);
        }
    }

    fn on_stream_lost(&mut self, peer: PeerId, end: StreamEnd) {
        match end {
            StreamEnd::Outgoing => self.core.park_streamed(peer),
            StreamEnd::Incoming => self.core.resume_streamed(peer),
        }
    }

    fn on_filled(&mut self, peer: PeerId, token: u64) {
        self.core.on_filled(peer, token, self.host);
    }

    fn on_written(&mut self, peer: PeerId, chunk: Chunk) {
        self.core.on_written(peer, chunk, self.host);
    }

    fn on_windows_lost(&mut self, peer: PeerId) {
        self.core.lose_windows(peer);
        self.core.lose_reaches(peer);
    }

    fn on_reached(&mut self, peer: PeerId, token: u64) {
        match token & OF_A_MESSAGE {
            0 => self.core.on_reached(peer, token, self.host),
            _ => self.core.on_part_read(peer, token & !OF_A_MESSAGE, self.host),
        }
    }

    fn on_concealed(&mut self, region: u64) {
        self.core.on_concealed(region);
    }

    fn on_acknowledged(&mut self, peer: PeerId, upto: Mark) {
        self.core.on_acknowledged(peer, upto, self.host);
    }

    fn on_departure(&mut self, peer: PeerId, departure: Departure) {
        self.core.on_departure(peer, departure, self.host);
    }

    fn is_owed(&self, peer: PeerId) -> bool {
        self.core.is_owed(peer, self.host)
    }
}

impl<H: Host> Delivery<'_, H> {
    /// Everything but unsolicited fragments and the eager messages of the fast path.
    #[inline(never)]
    fn on_any(&mut self, peer: PeerId, header: &[u8], payload: &[u8]) {
        match Packet::decode(header) {
            Some(Packet::Eager { envelope, ack }) => {
                self.core.on_eager(peer, &envelope, ack, payload, self.host);
            }
            Some(Packet::Rts { envelope, tx, len, pushed, leaves, sees, offer, ranges }) => {
                let (pushed, broken) = (pushed.min(len), false);
                let rts = Announcement { tx, len, pushed, leaves, sees, broken, offer, ranges };
                self.core.on_rts(peer, &envelope, rts, payload, self.host);
            }
            Some(Packet::Pushed { tx, offset }) => {
                self.core.on_pushed(peer, tx, offset, payload, self.host);
            }
            Some(Packet::Cts { tx, rx, len, faulted, ranges }) => {
                self.core.on_cts(peer, (tx, rx), len, faulted, ranges);
            }
            Some(Packet::Resume { tx, rx, from, len }) => {
                self.core.on_resume(peer, tx, rx, from, len);
            }
            Some(Packet::Fragment { rx, offset }) => {
                self.core.on_fragment(peer, rx, offset, payload, self.host);
            }
            Some(Packet::PutDone { rx }) => self.core.on_put_done(peer, rx, self.host),
            Some(Packet::Fin { tx, status }) => {
                self.answered = self.core.on_fin(peer, tx, status, self.host);
            }
            Some(Packet::Window { tx, rx, offset, len, ticket }) => {
                self.core.on_window(peer, tx, rx, offset, len, ticket);
            }
            Some(Packet::Cooperate { tx, offset, share, ranges }) => {
                self.core.on_cooperate(peer, tx, offset, share, ranges);
            }
            Some(Packet::Decline { rx, offset }) => self.core.on_decline(peer, rx, offset),
            Some(Packet::Gone { rx }) => self.core.on_gone(peer, rx),
            Some(Packet::Fault { rx }) => self.core.on_fault(peer, rx, self.host),
            None if RmaPacket::is_one(header) => {
                self.core.on_rma(peer, header, payload, self.host);
            }
            None if CollectivePacket::is_one(header) => {
                self.core.on_collective(peer, header, payload);
            }
            None => self.core.counts.dropped += 1,
        }
    }
}

impl Core {
    /// The queue that receives are posted to.
    #[inline]
    pub(super) fn receives<'a, H: Host>(&'a mut self, host: &'a mut H) -> &'a mut Receives {
        if self.limits.shares_receives {
            if let Some(shared) = host.shared_receives() {
                return shared;
            }
        }
        &mut self.own
    }

    /// All matching spaces of the endpoint.
    pub(super) fn spaces(&self) -> impl Iterator<Item = Space> + use<> {
        Space::all(self.limits.contexts)
    }

    /// The peer, or its next incarnation, is alive.
    #[inline]
    pub(super) fn mark_alive(&mut self, peer: PeerId) {
        if let Some(state) = self.peers.get_mut(peer.index()).filter(|state| state.dead) {
            state.dead = false;
            self.dead.retain(|(dead, ..)| *dead != peer);
        }
    }

    fn meet(&mut self, peer: PeerId, address: &Address) {
        if let Some(state) = self.peer(peer) {
            state.address = Some(*address);
            state.epoch = u64::MAX;
        }
    }
}

impl<I: Iface> Engine<I> {
    pub(crate) fn new(iface: I, limits: Limits) -> Self {
        Self {
            iface,
            core: Core {
                limits,
                peers: Vec::new(),
                tx: IndexList::default(),
                copied: 0,
                passing: Key::NAMELESS,
                deferred: VecDeque::new(),
                deferred_starved: false,
                streams: VecDeque::new(),
                unexpected: Spaces::new(limits.contexts),
                unexpected_bytes: 0,
                claimed: HashMap::new(),
                own: Receives::new(limits.contexts),
                active: IndexList::default(),
                pushed: PushedMessages::default(),
                pulls: VecDeque::new(),
                turn: 1,
                lent: IndexList::default(),
                reads: VecDeque::new(),
                withdrawn: Vec::new(),
                due: VecDeque::new(),
                assists: VecDeque::new(),
                leaving: Vec::new(),
                outbox: VecDeque::new(),
                late: VecDeque::new(),
                dead: Vec::new(),
                rma: Rma::default(),
                collectives: Collectives::default(),
                counts: Counts::default(),
                pressure: false,
                attentive: false,
            },
        }
    }

    /// The interface, for waiting.
    pub(crate) fn iface_mut(&mut self) -> &mut I {
        &mut self.iface
    }

    /// The interface.
    pub(crate) fn iface(&self) -> &I {
        &self.iface
    }

    /// Event counts so far.
    pub(crate) fn counts(&self) -> Counts {
        self.core.counts
    }

    /// The peer at `address`; makes contact if this is the first call for it.
    pub(crate) fn connect(&mut self, address: &Address) -> Result<PeerId, super::OpError> {
        let peer = self.iface.connect(address).map_err(super::send::op_error)?;
        if let Some(known) = self.iface.address_of(peer) {
            self.core.meet(peer, &known);
        }
        Ok(peer)
    }

    /// One progress pass: receives what has arrived and moves what can be moved. Returns the number of events.
    #[inline]
    pub(crate) fn progress(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        if host.has_room() {
            n += self.iface.poll(&mut Delivery { core: &mut self.core, host, answered: false });
        }
        if self.core.attentive {
            self.core.attentive = false;
            self.iface.attend();
        }
        if self.core.has_work() {
            n += self.advance(host);
        }
        n
    }

    /// Whether this process still holds messages that the application believes sent, or replies that a peer waits for.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.core.outbox.is_empty()
            || !self.core.late.is_empty()
            || self.core.tx.iter().any(|(_, tx)| tx.is_owned())
            || self.core.rma.has_unsent()
            || self.core.collectives.has_unsent()
    }

    #[cold]
    fn advance(&mut self, host: &mut impl Host) -> usize {
        let mut n = self.advance_pulls(host);
        n += self.advance_streams(host);
        n += self.advance_writes();
        // Receives come first: their senders help with those.
        if n == 0 {
            n += self.advance_assists();
        }
        n += self.advance_leaving(host);
        n += self.flush_outbox(host) + self.flush_late(host);
        // After the outbox: the senders' chunks are advertised before this endpoint begins to read its own.
        n += self.advance_reads();
        n += self.advance_deferred(host);
        if self.core.rma.work() > 0 {
            n += self.advance_rma(host);
        }
        if self.core.collectives.work() > 0 {
            n += self.advance_collectives(host);
        }
        self.update_pressure();
        n
    }

    fn update_pressure(&mut self) {
        let core = &mut self.core;
        let on = if core.pressure {
            core.unexpected_bytes > core.limits.unexpected_max / 2
        } else {
            core.unexpected_bytes > core.limits.unexpected_max
        };
        if on != core.pressure {
            core.pressure = on;
            self.iface.set_pressure(on);
            if on {
                self.core.ask_for_pushed();
            }
        }
    }
}

impl Core {
    #[inline]
    fn has_work(&self) -> bool {
        // One comparison instead of many: every progress call asks this.
        let items = self.outbox.len()
            | self.late.len()
            | self.leaving.len()
            | self.pulls.len()
            | self.streams.len()
            | self.due.len()
            | self.reads.len()
            | self.withdrawn.len()
            | self.assists.len()
            | self.deferred.len()
            | self.rma.work()
            | self.collectives.work();
        items > 0 || self.pressure || self.unexpected_bytes > self.limits.unexpected_max
    }

    /// Whether an operation waits for `peer`.
    fn is_owed(&self, peer: PeerId, host: &impl Host) -> bool {
        let Some(state) = self.peers.get(peer.index()) else { return false };
        let receives = host.see_shared_receives().unwrap_or(&self.own);
        let from_it = |posted: &Posted| posted.source == state.source;
        state.outstanding > 0
            || state.deferred > 0
            || self.active.iter().any(|(_, active)| active.peer == peer)
            || self.rma.awaits(peer)
            || self.collectives.awaits(peer)
            || state.source != UNKNOWN_SOURCE && receives.posted.first_few().any(from_it)
    }
}

impl<I: Iface> Engine<I> {
    /// Whether this endpoint must be polled although nothing arrives.
    pub(crate) fn is_busy(&self) -> bool {
        let core = &self.core;
        let silent = |peer: PeerId| !self.iface.caps(peer).announces_room;
        let receiver = |key: &Key| core.tx.get(*key).map(|tx| tx.peer);
        !core.pulls.is_empty()
            || !core.assists.is_empty()
            || core.outbox.iter().chain(&core.late).any(|(peer, _)| silent(*peer))
            || core.streams.iter().filter_map(receiver).any(silent)
            || core.due.iter().filter_map(|due| receiver(&due.tx)).any(silent)
            || core
                .reads
                .iter()
                .filter_map(|part| core.lent.get(*part))
                .any(|lent| silent(lent.peer))
            || core.deferred.iter().filter_map(receiver).any(|peer| core.rma.asks(peer))
            || core.deferred_starved && core.deferred.iter().filter_map(receiver).any(silent)
            || core.rma.is_busy(silent)
            || core.collectives.is_busy(silent)
    }
}

impl<I> Engine<I> {
    /// How many more sends may be pending.
    pub(crate) fn room_for_sends(&self) -> usize {
        let pending = self.core.tx.len() + self.core.rma.pending();
        self.core.limits.tx_max.saturating_sub(pending)
    }

    /// Operations of a transmit context that have not been reported yet.
    pub(crate) fn pending_of(&self, context: u8) -> usize {
        let sends = self.core.tx.iter();
        let sends = sends.filter(|(_, tx)| !tx.completed && tx.report.context() == context);
        sends.count() + self.core.rma.pending_of(context)
    }

    /// How many more receives may be posted to a receive context of the endpoint's own queue.
    pub(crate) fn room_for_receives(&self, context: u8) -> usize {
        self.core.limits.rx_max.saturating_sub(self.core.own.posted.len_of(context))
    }
}
