//! The endpoint's state and its turn of work.

use super::arrival::Leaving;
use super::collective::{CollectivePacket, Collectives};
use super::cooperate::Assist;
use super::index_list::{IndexList, Key};
use super::packet::{EagerHeader, Packet, PieceHeader};
use super::pushed::{Announcement, PushedMessages};
use super::receive::{Active, Unexpected};
use super::receives::{Posted, Receives};
use super::rma::{Rma, RmaPacket};
use super::send::TxRequest;
use super::spaces::{Space, Spaces};
use super::windows::{Due, Lent, OF_A_MESSAGE};
use super::{Cause, Host, UNKNOWN_SOURCE};
use crate::memory::SegmentList;
use crate::transport::{
    Address, Chunk, Departure, Handler, Iface, Mark, PeerId, StreamEnd, Ticket,
};
use std::collections::{HashMap, VecDeque};

/// Bounds and thresholds of one endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Longest message sent eagerly, bytes; longer ones go by rendezvous.
    pub(crate) eager_max: usize,
    /// Sends that may pend (rendezvous, delivery-complete, fenced) before FI_EAGAIN.
    pub(crate) tx_max: usize,
    /// Receives that may be posted before FI_EAGAIN.
    pub(crate) rx_max: usize,
    /// Shortest message whose pieces are stored around the caches, bytes.
    pub(crate) past_caches_min: usize,
    /// Payload bytes of unexpected messages held before peers are asked to hold theirs.
    pub(crate) unexpected_max: usize,
    /// Bytes of one message moved by one turn of work.
    pub(crate) bulk_chunk: usize,
    /// One-sided operations of fewer bytes are left to the target.
    pub(crate) alone_min: usize,
    /// Receive contexts.
    pub(crate) contexts: usize,
    /// Receives are posted to a queue that the host has, for several endpoints.
    pub(crate) shares_receives: bool,
}

/// What has happened so far; plain counts since the endpoint was enabled.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) eager_sent: u64,
    pub(crate) rendezvous_sent: u64,
    pub(crate) unexpected: u64,
    pub(crate) pulled_bytes: u64,
    pub(crate) pushed_bytes: u64,
    /// Bytes that this endpoint wrote of messages that it and their receiver copied together.
    pub(crate) assisted_bytes: u64,
    /// Bytes that this endpoint moved to and from regions of its peers by itself.
    pub(crate) reached_bytes: u64,
    pub(crate) fragment_bytes: u64,
    pub(crate) stream_bytes: u64,
    /// Messages whose stream or windows failed, and that went on as fragments.
    pub(crate) resumed: u64,
    /// Bytes that this endpoint wrote into windows of its peers.
    pub(crate) window_bytes: u64,
    /// Windows that this endpoint had lent when their connection ended.
    pub(crate) windows_lost: u64,
    /// Bytes that this endpoint read of messages that it and their senders moved together.
    pub(crate) read_bytes: u64,
    /// Messages that this endpoint could not write into the windows it was lent.
    pub(crate) declined: u64,
    pub(crate) dropped: u64,
    /// Pushed packets that the receive had no room for, or whose message was discarded.
    pub(crate) surplus: u64,
}

/// What the engine knows of a peer.
#[derive(Debug)]
pub(super) struct PeerState {
    address: Option<Address>,
    source: u64,
    /// Epoch of the address book at which `source` was looked up.
    epoch: u64,
    /// Pending sends that have left this endpoint.
    pub(super) outstanding: u32,
    /// Pending sends that wait for earlier ones.
    pub(super) deferred: u32,
    /// It is among the dead ([`Core::dead`]).
    pub(super) dead: bool,
    /// The turn in which a piece of a long message came last; 0: none did.
    pub(super) fed: u64,
}

impl PeerState {
    /// Nothing that was sent earlier waits, and the peer was there when it was heard of last.
    #[inline(always)]
    pub(super) fn is_ready(&self) -> bool {
        self.deferred == 0 && !self.dead
    }
}

/// Everything but the interface, so that messages can be handled while the interface delivers.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) limits: Limits,
    pub(super) peers: Vec<PeerState>,
    pub(super) tx: IndexList<TxRequest>,
    /// Bytes of those that were injected.
    pub(super) copied: usize,
    /// What the next message is called that is complete when it is announced.
    pub(super) passing: Key,
    /// Sends behind a fence, in order.
    pub(super) deferred: VecDeque<Key>,
    /// One of them could start if its ring had room: nobody tells us when it has.
    pub(super) deferred_starved: bool,
    /// Sends that a CTS has released.
    pub(super) streams: VecDeque<Key>,
    pub(super) unexpected: Spaces<Unexpected>,
    pub(super) unexpected_bytes: usize,
    /// Messages that were set aside, by receive context and the application's context.
    pub(super) claimed: HashMap<(u8, u64), Unexpected>,
    /// Our own, unless they are shared ([`Core::receives`]).
    pub(super) own: Receives,
    pub(super) active: IndexList<Active>,
    /// Messages of which bytes still come unasked.
    pub(super) pushed: PushedMessages,
    /// Rendezvous receives that are ours to move.
    pub(super) pulls: VecDeque<Key>,
    /// Turns in which there were some, and one.
    pub(super) turn: u64,
    /// Parts of receives that their senders may write, or that we read. The key of each is its token.
    pub(super) lent: IndexList<Lent>,
    /// Those of them that we are to read instead.
    pub(super) reads: VecDeque<Key>,
    /// Offers of ours that nobody reads any more.
    pub(super) withdrawn: Vec<(PeerId, Ticket)>,
    /// Windows of peers that our bytes are to be written into, in order.
    pub(super) due: VecDeque<Due>,
    /// Messages that their receivers share with us.
    pub(super) assists: VecDeque<Assist>,
    /// Sends that are complete when their peers' endpoints have them.
    pub(super) leaving: Vec<Leaving>,
    /// Answers to peers; one per pending request at most, and one for each window that is lent.
    pub(super) outbox: VecDeque<(PeerId, Packet)>,
    /// Answers that nobody waits for.
    pub(super) late: VecDeque<(PeerId, Packet)>,
    /// Peers that died and have not been heard of since, and how operations on them end.
    pub(super) dead: Vec<(PeerId, i32, Cause)>,
    /// One-sided operations.
    pub(super) rma: Rma,
    /// Groups.
    pub(super) collectives: Collectives,
    pub(super) counts: Counts,
    pub(super) pressure: bool,
    /// Bytes were announced that may come by stream.
    pub(super) attentive: bool,
}

impl Core {
    /// The record of `peer`, made if it is new.
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

    /// The address book's number of `peer`.
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

/// One endpoint's protocol over one interface.
#[derive(Debug)]
pub(crate) struct Engine<I> {
    pub(super) iface: I,
    pub(super) core: Core,
}

/// Handles what the interface delivers.
struct Delivery<'a, H> {
    core: &'a mut Core,
    host: &'a mut H,
    /// A send has ended that its receiver had to answer.
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
            // What is not taken is decoded again: to keep it meanwhile costs all others more.
            if !self.core.try_fill(peer, envelope, payload, self.host) {
                self.on_any(peer, header, payload);
            }
        } else if let Some((tx, offset)) = PieceHeader::decode_pushed(header) {
            self.core.on_pushed(peer, tx, offset, payload, self.host);
        } else {
            self.on_any(peer, header, payload);
        }
    }

    /// Who waited for the delivery of a message may receive the answer to it next, and the answer may be here
    /// already: taken now, it would be copied twice.
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
    /// All but unsolicited fragments and the eager messages that are taken as they are.
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

    /// All matching spaces.
    pub(super) fn spaces(&self) -> impl Iterator<Item = Space> + use<> {
        Space::all(self.limits.contexts)
    }

    /// The peer, or its next life, is there.
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

    /// What has happened so far.
    pub(crate) fn counts(&self) -> Counts {
        self.core.counts
    }

    /// The peer at `address`, contacted if this is the first time.
    pub(crate) fn connect(&mut self, address: &Address) -> Result<PeerId, super::OpError> {
        let peer = self.iface.connect(address).map_err(super::send::op_error)?;
        if let Some(known) = self.iface.address_of(peer) {
            self.core.meet(peer, &known);
        }
        Ok(peer)
    }

    /// A turn of work: takes what has arrived, moves what can move. Returns how much happened.
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

    /// Messages the application believes sent, or answers a peer waits for, are still here.
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
        // What we receive comes first: our peers help with that, too.
        if n == 0 {
            n += self.advance_assists();
        }
        n += self.advance_leaving(host);
        n += self.flush_outbox(host) + self.flush_late(host);
        // What the senders are to do is under way.
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
        // One question instead of many: this is asked whenever somebody looks.
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
    /// True when this endpoint must be polled although nothing arrives.
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
    /// Sends that may still pend.
    pub(crate) fn room_for_sends(&self) -> usize {
        let pending = self.core.tx.len() + self.core.rma.pending();
        self.core.limits.tx_max.saturating_sub(pending)
    }

    /// Operations of a transmit context that have still to be reported.
    pub(crate) fn pending_of(&self, context: u8) -> usize {
        let sends = self.core.tx.iter();
        let sends = sends.filter(|(_, tx)| !tx.completed && tx.report.context() == context);
        sends.count() + self.core.rma.pending_of(context)
    }

    /// Receives that may still be posted to a receive context of our own.
    pub(crate) fn room_for_receives(&self, context: u8) -> usize {
        self.core.limits.rx_max.saturating_sub(self.core.own.posted.len_of(context))
    }
}
