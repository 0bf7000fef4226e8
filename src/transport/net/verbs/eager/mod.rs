//! Eager RDMA: packets for the few peers that most go to are written into a ring of theirs by RDMA Write, on an
//! RC queue pair each, and found there by looking at memory (PROTOCOL.md §7.17). No completion is waited for
//! on either side, which is what a datagram costs most.
//!
//! To the machine above this is one way more for the same packets. Whatever happens to a channel, packets
//! are lost at worst, and go through the UD queue pair from then on.

mod device;
mod message;
mod ring;
#[cfg(test)]
mod tests;

pub(super) use device::{Port, open};
pub(crate) use message::{Control, EAGER_CONTROL, EAGER_LEN};
pub(super) use ring::{LONG_MAX, PACKET_MAX};

use crate::sys::packets::Pool;
use crate::sys::verbs::EagerWrite;
use crate::sys::{Errno, process};
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::net::link::Takes;
use message::{End, Message};
use ring::{BURST, Mark, SLOTS, STATE_AT, State, Words};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

/// Packets, or bursts of them, sent to a peer while nothing else was under way to it after which a channel to it is asked
/// for, and how many more have to come after each time that it was in vain, or ended.
pub(super) const BUSY: u32 = 16;
const BUSY_AGAIN: u32 = 128 * BUSY;
/// A channel that nothing was sent on for so long gives way to another one, nanoseconds.
const IDLE_NS: u64 = 1_000_000_000;
/// A channel that is not ready after so long never will be, nanoseconds.
const PATIENCE_NS: u64 = 2_000_000_000;
/// How long a peer's device may take to take the word that we sleep, nanoseconds.
const TELLING_NS: u64 = 5_000_000;
/// After that word, when the rings are looked at once more: what was under way then tells nobody; nanoseconds.
const LAST_LOOKS_NS: [u64; 3] = [2_000_000, 20_000_000, 200_000_000];
/// Packets that nothing was written after for so long are asked about, nanoseconds.
const UNSURE_NS: u64 = 5_000_000;
/// Long packets that the device is not known to have read before it is asked.
const MANY: usize = 8;
/// Packets that are sent without a sleep between them before peers are told that we are awake.
const AWAKE: u32 = 4;
/// Packets that are taken from one ring in one go: what was taken of a ring is told when it is half of it.
const BATCH: usize = SLOTS as usize;
/// Messages that may wait to be sent.
const CONTROLS_MAX: usize = 64;

/// Where a peer writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Ring {
    pub(super) addr: u64,
    pub(super) rkey: u32,
}

/// A queue pair and its ring. Ends when it is dropped: nobody writes there any more.
pub(super) trait Qp: Send {
    fn number(&self) -> u32;
    /// What a peer has to know of it, whose first packet has the number `psn`.
    fn end(&self, psn: u32) -> End;
    /// Ready to write to `to`, and to be written by it. Errors: the driver's.
    fn connect(&mut self, to: &End, own_psn: u32) -> Result<(), Errno>;
    /// The mark at `at`, as it is now.
    fn mark(&self, at: usize) -> Option<Words>;
    /// What is there, which its peer leaves alone now.
    fn bytes(&self, at: usize, len: usize) -> Option<&[u8]>;
    /// Writes that may be posted.
    fn room(&self) -> usize;
    /// Posts those, as many as there is room for; the last reports its completion if `told`. Returns how many.
    /// Errors: it has failed.
    fn write<'a>(
        &mut self,
        to: Ring,
        writes: impl Iterator<Item = EagerWrite<'a>>,
        told: bool,
    ) -> Result<usize, Errno>;
    /// Writes posted so far, and complete.
    fn progress(&self) -> (u64, u64);
    /// The oldest write that reports it is complete.
    fn on_complete(&mut self);
}

/// A device, as much of it as is needed here.
pub(super) trait Device: Send {
    type Qp: Qp;
    /// The queue pairs made from now on send packets of `pool` from where they are.
    fn lend(&mut self, pool: Arc<Pool>);
    /// A queue pair that is not connected. Errors: EAGAIN (as many as may be), ENOMEM, the driver's.
    fn channel(&mut self) -> Result<Self::Qp, Errno>;
    /// Whether `end` can be reached from here at all.
    fn reaches(&self, end: &End) -> bool;
    /// Reports a bounded number of events: a queue pair, and whether it has failed. Errors: it is of no use.
    fn poll(&mut self, each: impl FnMut(u32, bool)) -> Result<usize, Errno>;
}

/// How a device is opened: when the first channel is wanted.
pub(super) type Opener<D> = Box<dyn FnMut() -> Result<D, Errno> + Send>;

/// Where a channel stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// We have asked for it.
    Asked,
    /// We have agreed, and look at our ring.
    Agreed,
    /// Both do.
    Ready,
}

/// Whether the peer knows that we do not look at our ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Told {
    Awake,
    /// Once so many writes are complete. Since when, nanoseconds.
    Asleep {
        write: u64,
        since: u64,
    },
}

#[derive(Debug)]
struct Channel<Q> {
    peer: Address,
    id: u32,
    qp: Q,
    psn: u32,
    phase: Phase,
    /// Since when it is in the making, and when something was sent on it last, nanoseconds.
    since: u64,
    used: u64,
    /// The peer's.
    ring: Ring,
    /// Numbers of the last page written, and of the last one that the peer has taken.
    sent: u32,
    acknowledged: u32,
    /// The peer's state as it was read last, and what it says.
    state: Words,
    peer_sleeps: bool,
    /// Numbers of the last page taken, and of the last one that the peer knows to be.
    taken: u32,
    reported: u32,
    told: Told,
    /// Writes that the device reads from the pool and that are not known to be complete: how many had been posted with each,
    /// and how many of all such ones of the device.
    lent: VecDeque<(u64, u64)>,
    /// A completion was asked for that says that they are.
    asked: bool,
}

/// What has happened so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct EagerCounts {
    /// Channels that exist.
    pub(crate) channels: usize,
    /// Channels that became ready, that broke, and that were not to be had.
    pub(crate) made: u64,
    pub(crate) broken: u64,
    pub(crate) refused: u64,
    /// Packets that were written, and that were found.
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// Packets that went as datagrams although there is a channel.
    pub(crate) detours: u64,
    /// Times that peers were told that we sleep.
    pub(crate) sleeps: u64,
}

/// A channel: its place, and its number, because another one may have that place later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChannelId {
    place: usize,
    id: u32,
}

/// Something that whoever knows the peers has to hear.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum News {
    /// Packets to a peer may go by this channel.
    Open(Address, ChannelId),
    /// They do no more.
    Closed(Address),
}

/// See the module.
pub(super) struct Eager<D: Device> {
    // Queue pairs end before the device.
    channels: Vec<Option<Channel<D::Qp>>>,
    device: Option<D>,
    opener: Opener<D>,
    /// Channels at most: FI_UDRV_EAGER_RDMA.
    limit: usize,
    /// What long packets are made in, and how many writes of such were posted.
    pool: Option<Arc<Pool>>,
    lent: u64,
    me: Address,
    controls: VecDeque<(Address, Control)>,
    news: VecDeque<News>,
    /// Peers that a channel is wanted to.
    wishes: Vec<Address>,
    /// Packets sent since the last sleep, and whether peers know of one.
    since_sleep: u32,
    asleep: bool,
    counts: EagerCounts,
}

impl<D: Device> std::fmt::Debug for Eager<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "eager RDMA: {:?}", self.counts())
    }
}

impl<Q: Qp> Channel<Q> {
    /// The peer has taken all up to `number`, as it says.
    #[inline]
    fn on_taken(&mut self, number: u32) {
        let behind = |n: u32| n.wrapping_sub(self.acknowledged);
        if behind(number) <= behind(self.sent) {
            self.acknowledged = number;
        }
    }

    /// Reads what the peer says of itself.
    #[inline]
    fn read_state(&mut self) {
        let Some(words) = self.qp.mark(STATE_AT) else { return };
        if words == self.state {
            return;
        }
        if let Some(state) = State::decode(words, self.id) {
            self.state = words;
            self.peer_sleeps = state.sleeps;
            self.on_taken(state.taken);
        }
    }

    /// Tells the peer what we have taken, and whether we sleep; that this is complete is reported if `told`. Returns whether
    /// there was room for that. Errors: it has failed.
    fn tell(&mut self, sleeps: bool, told: bool) -> Result<bool, Errno> {
        let mark = State { taken: self.taken, sleeps }.encode(self.id);
        let write = EagerWrite { at: STATE_AT, packet: &[], mark };
        let written = self.qp.write(self.ring, std::iter::once(write), told)? > 0;
        if written {
            self.reported = self.taken;
        }
        Ok(written)
    }

    /// The oldest write that reports it is complete.
    fn on_complete(&mut self) {
        self.qp.on_complete();
        let (_, complete) = self.qp.progress();
        while self.lent.front().is_some_and(|(posted, _)| *posted <= complete) {
            self.lent.pop_front();
        }
    }

    /// The mark of the next packet, if that is there, and where it begins.
    #[inline]
    fn next(&self) -> Option<(Mark, usize)> {
        let number = self.taken.wrapping_add(1);
        let end = ring::end_of(number);
        let mark = Mark::decode(self.qp.mark(end)?, number, self.id)?;
        Some((mark, end - usize::from(mark.len).min(LONG_MAX)))
    }

    /// Pages that may be written.
    #[inline]
    fn free(&self) -> u32 {
        SLOTS - self.sent.wrapping_sub(self.acknowledged).min(SLOTS)
    }

    /// Pages that the peer does not know to be free.
    #[inline]
    fn untold(&self) -> u32 {
        self.taken.wrapping_sub(self.reported)
    }

    /// They are half of its ring.
    #[inline]
    fn owes(&self) -> bool {
        self.untold() >= SLOTS / 2
    }

    #[inline]
    fn receives(&self) -> bool {
        self.phase != Phase::Asked
    }
}

impl<D: Device> Eager<D> {
    pub(super) fn new(opener: Opener<D>, limit: usize, me: Address) -> Self {
        Self {
            channels: Vec::new(),
            device: None,
            opener,
            limit,
            pool: None,
            lent: 0,
            me,
            controls: VecDeque::new(),
            news: VecDeque::new(),
            wishes: Vec::new(),
            since_sleep: 0,
            asleep: false,
            counts: EagerCounts::default(),
        }
    }

    pub(super) fn counts(&self) -> EagerCounts {
        EagerCounts { channels: self.channels.iter().flatten().count(), ..self.counts }
    }

    /// Packets of `pool` are sent from where they are, once there is a device.
    pub(super) fn lend(&mut self, pool: Arc<Pool>) {
        self.pool = Some(pool);
    }

    /// There may be a channel to somebody.
    pub(super) fn is_on(&self) -> bool {
        self.limit > 0
    }

    fn place_of(&self, peer: &Address) -> Option<usize> {
        self.channels.iter().position(|c| c.as_ref().is_some_and(|c| c.peer == *peer))
    }

    fn at(&mut self, place: usize) -> Option<&mut Channel<D::Qp>> {
        self.channels.get_mut(place)?.as_mut()
    }

    /// A channel to `peer` would be of use. Returns after how many more packets it may be said again.
    #[cold]
    pub(super) fn wish(&mut self, peer: &Address) -> u32 {
        if self.limit > 0 && self.wishes.len() < self.limit {
            self.wishes.push(*peer);
        }
        BUSY_AGAIN
    }

    /// What whoever knows the peers has to hear, in this order.
    pub(super) fn next_news(&mut self) -> Option<News> {
        self.news.pop_front()
    }

    /// Something to be said to a peer, in this order.
    pub(super) fn next_control(&mut self) -> Option<(Address, Control)> {
        self.controls.pop_front()
    }

    /// It could not be said now.
    pub(super) fn put_back(&mut self, control: (Address, Control)) {
        self.controls.push_front(control);
    }

    fn say(&mut self, peer: Address, message: Message) {
        if self.controls.len() < CONTROLS_MAX {
            self.controls.push_back((peer, message.encode()));
        }
    }

    /// Makes the channels that are wanted, and looks what became of writes.
    pub(super) fn tend(&mut self, now: u64) {
        for peer in std::mem::take(&mut self.wishes) {
            if self.place_of(&peer).is_none() {
                self.ask(peer, now);
            }
        }
        self.reap();
        for place in 0..self.channels.len() {
            let Some(c) = self.at(place) else { continue };
            if c.phase != Phase::Ready && now.saturating_sub(c.since) > PATIENCE_NS {
                self.end(place, true);
            } else if c.owes() {
                self.tell(place);
            } else if !c.lent.is_empty() && !c.asked && now.saturating_sub(c.used) > UNSURE_NS {
                self.ask_complete(place);
            }
        }
        self.note_complete();
    }

    /// Nothing more was written for a while: has the device say that it has read what was.
    #[cold]
    fn ask_complete(&mut self, place: usize) {
        let Some(c) = self.at(place) else { return };
        match c.tell(c.told != Told::Awake, true) {
            Ok(told) => c.asked = told,
            Err(errno) => self.break_channel(place, errno),
        }
    }

    /// Tells the pool which of its packets the device is done with.
    fn note_complete(&mut self) {
        let Some(pool) = &self.pool else { return };
        let first = self.channels.iter().flatten().filter_map(|c| Some(c.lent.front()?.1)).min();
        pool.set_complete(first.map_or(self.lent, |first| first - 1));
    }

    /// Tells the peer what was taken, if there is room for that.
    fn tell(&mut self, place: usize) {
        let Some(c) = self.at(place) else { return };
        let sleeps = c.told != Told::Awake;
        if let Err(errno) = c.tell(sleeps, sleeps) {
            self.break_channel(place, errno);
        }
    }

    fn ask(&mut self, peer: Address, now: u64) {
        let id = process::random_u64() as u32;
        let Some(place) = self.begin(peer, id, Phase::Asked, now) else {
            self.counts.refused += 1;
            return;
        };
        let Some(c) = self.at(place) else { return };
        let ask = Message::Ask(id, c.qp.end(c.psn));
        self.say(peer, ask);
    }

    /// A channel that is not connected, and its place. `None`: none is to be had.
    fn begin(&mut self, peer: Address, id: u32, phase: Phase, now: u64) -> Option<usize> {
        let qp = self.queue_pair(now)?;
        let psn = process::random_u64() as u32 & 0x00ff_ffff;
        let channel = Channel {
            peer,
            id,
            qp,
            psn,
            phase,
            since: now,
            used: now,
            ring: Ring::default(),
            sent: 0,
            acknowledged: 0,
            state: [0; 2],
            peer_sleeps: false,
            taken: 0,
            reported: 0,
            told: Told::Awake,
            lent: VecDeque::new(),
            asked: false,
        };
        let free = self.channels.iter().position(Option::is_none);
        let place = free.unwrap_or(self.channels.len());
        match self.channels.get_mut(place) {
            Some(slot) => *slot = Some(channel),
            None => self.channels.push(Some(channel)),
        }
        Some(place)
    }

    fn queue_pair(&mut self, now: u64) -> Option<D::Qp> {
        if self.channels.iter().flatten().count() >= self.limit {
            let idle = |c: &Channel<D::Qp>| now.saturating_sub(c.used) > IDLE_NS;
            let taken = self.channels.iter().enumerate();
            let all = taken.filter_map(|(place, c)| Some((place, c.as_ref()?)));
            let (oldest, _) = all.filter(|(_, c)| idle(c)).min_by_key(|(_, c)| c.used)?;
            self.end(oldest, true);
        }
        if self.device.is_none() {
            match (self.opener)() {
                Ok(mut device) => {
                    if let Some(pool) = &self.pool {
                        device.lend(pool.clone());
                    }
                    self.device = Some(device);
                }
                Err(errno) => {
                    log::info(format_args!("no eager RDMA: {errno}"));
                    self.limit = 0;
                    return None;
                }
            }
        }
        match self.device.as_mut()?.channel() {
            Ok(qp) => Some(qp),
            Err(errno) => {
                if self.counts.refused.is_power_of_two() || self.counts.refused == 0 {
                    log::info(format_args!("no eager RDMA to one more peer: {errno}"));
                }
                None
            }
        }
    }

    /// A peer says something.
    pub(super) fn on_control(&mut self, peer: &Address, message: &[u8], now: u64) {
        let Some(message) = Message::decode(message) else { return };
        let place = self.place_of(peer);
        let known = place.and_then(|place| self.at(place)).map(|c| (c.id, c.phase));
        match (message, place, known) {
            (Message::Ask(id, end), _, Some((ours, Phase::Asked))) => {
                // Both have asked: the one with the lower address is heard.
                let yields = (peer.to_wire(), id) < (self.me.to_wire(), ours);
                match place {
                    Some(place) if yields => self.end(place, false),
                    _ => return,
                }
                self.agree(*peer, id, &end, now);
            }
            (Message::Ask(id, end), Some(place), Some(_)) => {
                // It knows nothing of the one that is there.
                self.end(place, false);
                self.agree(*peer, id, &end, now);
            }
            (Message::Ask(id, end), ..) => self.agree(*peer, id, &end, now),
            (Message::Ready(id, end), Some(place), Some((ours, Phase::Asked))) if id == ours => {
                if self.connect(place, &end) {
                    self.say(*peer, Message::Go(id));
                    self.open(place);
                } else {
                    self.end(place, true);
                }
            }
            (Message::Ready(id, _), ..) => self.say(*peer, Message::Over(id)),
            (Message::Go(id), Some(place), Some((ours, Phase::Agreed))) if id == ours => {
                self.open(place);
            }
            (Message::Over(id), Some(place), Some((ours, _))) if id == ours => {
                self.end(place, false);
            }
            (Message::Go(_) | Message::Over(_), ..) => {}
        }
    }

    fn agree(&mut self, peer: Address, id: u32, end: &End, now: u64) {
        let place = if self.limit > 0 { self.begin(peer, id, Phase::Agreed, now) } else { None };
        let connected = place.filter(|place| self.connect(*place, end));
        match connected.and_then(|place| self.at(place)) {
            Some(c) => {
                let ready = Message::Ready(id, c.qp.end(c.psn));
                self.say(peer, ready);
            }
            None => {
                self.counts.refused += 1;
                match place {
                    Some(place) => self.end(place, true),
                    None => self.say(peer, Message::Over(id)),
                }
            }
        }
    }

    fn connect(&mut self, place: usize, end: &End) -> bool {
        let reaches = self.device.as_ref().is_some_and(|device| device.reaches(end));
        let Some(c) = self.at(place).filter(|_| reaches) else { return false };
        c.ring = end.ring;
        match c.qp.connect(end, c.psn) {
            Ok(()) => true,
            Err(errno) => {
                log::info(format_args!("no eager RDMA to {}: {errno}", c.peer));
                false
            }
        }
    }

    fn open(&mut self, place: usize) {
        let Some(c) = self.at(place) else { return };
        c.phase = Phase::Ready;
        let (peer, id) = (c.peer, c.id);
        self.counts.made += 1;
        self.news.push_back(News::Open(peer, ChannelId { place, id }));
        if self.counts.made.is_power_of_two() {
            log::info(format_args!("packets to {peer} are written into its ring from now on"));
        }
    }

    /// Ends a channel; the peer hears of it if `told`.
    fn end(&mut self, place: usize, told: bool) {
        let Some(c) = self.channels.get_mut(place).and_then(Option::take) else { return };
        while self.channels.last().is_some_and(Option::is_none) {
            self.channels.pop();
        }
        self.news.push_back(News::Closed(c.peer));
        if told {
            self.say(c.peer, Message::Over(c.id));
        }
    }

    /// Nothing is to be sent to `peer` this way any more.
    pub(super) fn close(&mut self, peer: &Address, told: bool) {
        if let Some(place) = self.place_of(peer) {
            self.end(place, told);
        }
    }

    /// Ends the channels to those that are not to be `kept`.
    pub(super) fn retain(&mut self, mut kept: impl FnMut(&Address) -> bool) {
        for place in 0..self.channels.len() {
            if self.at(place).is_some_and(|c| c.phase == Phase::Ready && !kept(&c.peer)) {
                self.end(place, true);
            }
        }
    }

    /// The device is another one, or gone.
    pub(super) fn clear(&mut self) {
        for place in 0..self.channels.len() {
            self.end(place, true);
        }
        self.device = None;
        self.note_complete();
    }

    fn break_channel(&mut self, place: usize, errno: Errno) {
        if let Some(c) = self.at(place) {
            log::info(format_args!(
                "eager RDMA to {} is over ({errno}): datagrams go there",
                c.peer
            ));
            self.counts.broken += 1;
            self.end(place, true);
        }
    }

    /// Takes completions of writes.
    fn reap(&mut self) {
        let Some(device) = &mut self.device else { return };
        let (channels, mut failed) = (&mut self.channels, None);
        let polled = device.poll(|number, fails| {
            let of =
                |c: &Option<Channel<D::Qp>>| c.as_ref().is_some_and(|c| c.qp.number() == number);
            let Some(place) = channels.iter().position(of) else { return };
            match channels.get_mut(place).and_then(Option::as_mut) {
                Some(c) if !fails => c.on_complete(),
                _ => failed = Some(place),
            }
        });
        if let Some(place) = failed {
            self.break_channel(place, Errno(libc::EIO));
        }
        if let Err(errno) = polled {
            log::info(format_args!("eager RDMA is over: {errno}"));
            self.clear();
        }
    }

    /// What there is room for in the ring of the peer that this channel is to, in packets of up to `len` bytes.
    #[inline]
    pub(super) fn takes(&mut self, ChannelId { place, id }: ChannelId, len: usize) -> Takes {
        // Of the writes one is left for the word that we are awake.
        let spare = |c: &Channel<D::Qp>| c.qp.room().saturating_sub(1).min(BURST);
        let c = self.channels.get(place).and_then(Option::as_ref);
        if c.is_some_and(|c| spare(c) == 0 || c.lent.len() >= MANY) {
            self.reap();
            self.note_complete();
        }
        let Some(c) = self.at(place).filter(|c| c.id == id) else { return Takes::Never };
        c.read_state();
        if len > LONG_MAX || c.peer_sleeps {
            return Takes::Never;
        }
        match spare(c).min((c.free() / ring::pages(len)) as usize) {
            0 => Takes::Later,
            n => Takes::Some(n),
        }
    }

    /// Writes `packets` into the ring of the peer that this channel is to. Returns how many. `None`: they have to go
    /// as datagrams.
    #[inline]
    pub(super) fn send(
        &mut self,
        ChannelId { place, id }: ChannelId,
        packets: &[IoSlice<'_>],
        now: u64,
    ) -> Option<usize> {
        self.note_sent(packets.len());
        if self.channels.get(place)?.as_ref()?.qp.room() < packets.len() {
            self.reap();
        }
        let c = self.channels.get_mut(place)?.as_mut().filter(|c| c.id == id)?;
        c.read_state();
        let longest = packets.first().map_or(0, |first| first.len());
        let fits = packets.len() <= BURST.min(c.qp.room())
            && longest <= LONG_MAX
            && ring::pages(longest).saturating_mul(packets.len() as u32) <= c.free();
        if !fits || c.peer_sleeps {
            self.counts.detours += packets.len() as u64;
            return None;
        }
        let (taken, key, mut last) = (c.taken, c.id, c.sent);
        let writes = packets.iter().map(|packet| {
            let number = last.wrapping_add(1);
            let mark = Mark { number, len: packet.len() as u16, taken: taken as u16 };
            last = mark.last();
            let at = ring::end_of(number) - packet.len();
            EagerWrite { at, packet, mark: mark.encode(key) }
        });
        match c.qp.write(c.ring, writes, false) {
            Ok(0) => None,
            Ok(n) => {
                c.sent = last;
                (c.reported, c.used) = (taken, now);
                self.counts.sent += n as u64;
                let lent = |pool: &&Arc<Pool>| packets.iter().any(|p| pool.part_of(p).is_some());
                if let Some(pool) = self.pool.as_ref().filter(lent) {
                    self.lent += 1;
                    c.lent.push_back((c.qp.progress().0, self.lent));
                    c.asked = false;
                    pool.set_posted(self.lent);
                }
                Some(n)
            }
            Err(errno) => {
                self.break_channel(place, errno);
                None
            }
        }
    }

    /// A packet to the peer of this channel would tell it of much that was taken.
    #[inline]
    pub(super) fn has_to_tell(&mut self, ChannelId { place, id }: ChannelId) -> bool {
        self.at(place).is_some_and(|c| c.id == id && c.untold() >= SLOTS / 4)
    }

    /// A packet is in some ring.
    #[inline]
    pub(super) fn has_arrived(&self) -> bool {
        self.channels.iter().flatten().any(|c| c.receives() && c.next().is_some())
    }

    /// Takes packets, a bounded number of each ring. Returns how many.
    #[inline]
    pub(super) fn receive(&mut self, mut each: impl FnMut(&Address, &[u8])) -> usize {
        let mut total = 0;
        for place in 0..self.channels.len() {
            let Some(c) = self.channels.get_mut(place).and_then(Option::as_mut) else { continue };
            if !c.receives() {
                continue;
            }
            let mut n = 0;
            while n < BATCH {
                let Some((mark, at)) = c.next() else { break };
                // What is longer than a packet can be is none: the next one may be.
                if usize::from(mark.len) <= LONG_MAX {
                    if let Some(bytes) = c.qp.bytes(at, usize::from(mark.len)) {
                        each(&c.peer, bytes);
                    }
                    c.taken = mark.last();
                } else {
                    c.taken = mark.number;
                }
                let low = c.acknowledged as u16;
                c.on_taken(c.acknowledged.wrapping_add(u32::from(mark.taken.wrapping_sub(low))));
                n += 1;
            }
            total += n;
        }
        self.counts.received += total as u64;
        total
    }

    /// Peers are told that nobody looks at the rings. False: something is there, or not all know it yet.
    pub(super) fn sleep(&mut self, now: u64) -> bool {
        self.since_sleep = 0;
        if self.channels.iter().flatten().next().is_none() {
            return true;
        }
        self.asleep = true;
        self.reap();
        let mut all = true;
        for place in 0..self.channels.len() {
            let Some(c) = self.at(place).filter(|c| c.receives()) else { continue };
            all &= c.next().is_none();
            match c.told {
                Told::Awake => {
                    match c.tell(true, true) {
                        Ok(true) => {
                            c.told = Told::Asleep { write: c.qp.progress().0, since: now };
                            self.counts.sleeps += 1;
                        }
                        Ok(false) => {}
                        Err(errno) => self.break_channel(place, errno),
                    }
                    all = false;
                }
                Told::Asleep { write, since } => {
                    let known = c.qp.progress().1 >= write;
                    all &= known || now.saturating_sub(since) > TELLING_NS;
                }
            }
        }
        all
    }

    /// When the rings are to be looked at though nobody is told, nanoseconds.
    pub(super) fn look_at(&self, now: u64) -> Option<u64> {
        let next = |c: &Channel<D::Qp>| match c.told {
            Told::Awake => None,
            Told::Asleep { since, .. } => {
                LAST_LOOKS_NS.iter().map(|ns| since + ns).find(|at| *at > now)
            }
        };
        self.channels.iter().flatten().filter_map(next).min()
    }

    /// Packets are sent, this way or as datagrams.
    #[inline]
    pub(super) fn note_sent(&mut self, packets: usize) {
        if self.asleep {
            self.count_awake(packets);
        }
    }

    /// They are although peers think that we sleep.
    #[cold]
    fn count_awake(&mut self, packets: usize) {
        self.since_sleep = self.since_sleep.saturating_add(packets as u32);
        if self.since_sleep < AWAKE {
            return;
        }
        self.asleep = false;
        for place in 0..self.channels.len() {
            let Some(c) = self.at(place).filter(|c| c.told != Told::Awake) else { continue };
            match c.tell(false, false) {
                Ok(true) => c.told = Told::Awake,
                Ok(false) => self.asleep = true,
                Err(errno) => self.break_channel(place, errno),
            }
        }
    }
}
