//! How two endpoints agree on a connection beside their messages, such as one of queue pairs (PROTOCOL.md §7.14).
//!
//! One side asks and describes its end. The other prepares its own end, joins it to the first and answers; the first
//! joins too and says GO. Either may refuse, and either may end the connection later. The messages travel through the
//! reliable state machine, in order, but both sides can ask at the same time, and an answer can be about a connection
//! that was given up since. Two rules decide those cases: of two requests the one with the smaller number stands, and
//! a message about any other connection than the current one is ignored.
//!
//! [`Agreement`] is the state: the connections of an endpoint, its failures, and the messages to send. [`Side`] is the
//! conversation: a path that implements it says how its ends are made, joined and released. Neither has a clock.

pub(crate) mod message;
pub(crate) mod pause;
#[cfg(test)]
mod tests;

use crate::sys::numbers::NumberMap;
use crate::transport::{PeerId, Prepared};
use message::{Control, End, Message, Way};
use pause::{Failures, PAUSE_MAX_NS, PAUSE_NS};
use std::collections::VecDeque;

/// How long the sender of a message waits for a connection, nanoseconds.
const PATIENCE_NS: u64 = 1_000_000_000;
/// Most messages that may wait to be sent; a peer that asks then gets no answer.
const OUTBOX_MAX: usize = 4096;

/// The phases of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// This side has asked for it.
    Asked,
    /// This side has agreed; its end accepts what the peer sends.
    Agreed,
    /// Both have agreed, and this side's end is being joined to the peer's.
    Joining,
    /// Both ends may be used.
    Ready,
}

/// A connection, and this side's end of it.
#[derive(Debug)]
pub(crate) struct Connection<L> {
    /// Its number, which the side that asked has chosen.
    pub(crate) id: u32,
    pub(crate) phase: Phase,
    /// When the phase began, nanoseconds.
    pub(crate) since: u64,
    pub(crate) link: L,
}

impl<L> Connection<L> {
    /// Whether this is connection `id`, and may be used.
    #[inline]
    pub(crate) fn is_ready(&self, id: u32) -> bool {
        self.id == id && self.phase == Phase::Ready
    }

    /// The agreement was not completed for so long that it never will be: an answer was dropped.
    pub(crate) fn is_stale(&self, now: u64) -> bool {
        matches!(self.phase, Phase::Asked | Phase::Agreed)
            && now.saturating_sub(self.since) > PAUSE_MAX_NS
    }
}

/// Counts of events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) made: u64,
    /// Connections that were closed to make room, that a side refused, and that broke.
    pub(crate) evicted: u64,
    pub(crate) refused: u64,
    pub(crate) broken: u64,
}

/// The connections of one kind that an endpoint has.
#[derive(Debug)]
pub(crate) struct Agreement<L> {
    connections: NumberMap<PeerId, Connection<L>>,
    way: Way,
    next_id: u32,
    failures: NumberMap<PeerId, Failures>,
    outbox: VecDeque<(PeerId, Control)>,
    /// Connections that failed and have to end.
    doomed: Vec<PeerId>,
    /// Connections that have ended together with another one, of which nobody was told yet.
    ended: Vec<(PeerId, u32)>,
    /// Peers whose connection was closed to make room, which this side was not told of yet.
    evicted: Vec<PeerId>,
    pub(crate) counts: Counts,
}

impl<L> Agreement<L> {
    /// Connections of this kind, whose numbers begin behind `number`.
    pub(crate) fn new(way: Way, number: u32) -> Self {
        Self {
            connections: NumberMap::default(),
            way,
            next_id: number,
            failures: NumberMap::default(),
            outbox: VecDeque::new(),
            doomed: Vec::new(),
            ended: Vec::new(),
            evicted: Vec::new(),
            counts: Counts::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.connections.len()
    }

    #[inline]
    pub(crate) fn get(&self, peer: PeerId) -> Option<&Connection<L>> {
        self.connections.get(&peer)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, peer: PeerId) -> Option<&mut Connection<L>> {
        self.connections.get_mut(&peer)
    }

    /// The connection to `peer`, if it may be used.
    #[inline]
    pub(crate) fn ready(&self, peer: PeerId) -> Option<&Connection<L>> {
        self.get(peer).filter(|connection| connection.phase == Phase::Ready)
    }

    /// The same, to change it.
    #[inline]
    pub(crate) fn ready_mut(&mut self, peer: PeerId) -> Option<&mut Connection<L>> {
        self.get_mut(peer).filter(|connection| connection.phase == Phase::Ready)
    }

    /// Whether the connection to `peer` is `id`, and in this phase.
    pub(crate) fn is(&self, peer: PeerId, id: u32, phase: Phase) -> bool {
        self.get(peer).is_some_and(|connection| connection.id == id && connection.phase == phase)
    }

    /// All connections.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PeerId, &Connection<L>)> {
        self.connections.iter().map(|(peer, connection)| (*peer, connection))
    }

    /// The peers of the connections that `which` selects.
    pub(crate) fn peers(&self, which: impl Fn(&Connection<L>) -> bool) -> Vec<PeerId> {
        self.iter().filter(|(_, connection)| which(connection)).map(|(peer, _)| peer).collect()
    }

    fn insert(&mut self, peer: PeerId, id: u32, phase: Phase, link: L, now: u64) {
        self.connections.insert(peer, Connection { id, phase, since: now, link });
    }

    fn say(&mut self, peer: PeerId, message: &Message) {
        self.outbox.push_back((peer, message.encode(self.way)));
    }

    /// Refuses connection `id`, for which `peer` has asked.
    pub(crate) fn refuse(&mut self, peer: PeerId, id: u32) {
        self.say(peer, &Message::Refuse(id));
    }

    /// Asks `peer` to end the connection, for which others wait, unless it uses it.
    pub(crate) fn ask_back(&mut self, peer: PeerId) {
        if let Some(id) = self.get(peer).map(|known| known.id) {
            self.say(peer, &Message::Yield(id));
        }
    }

    /// Connection `id`, for which `peer` has asked, does not come to be, for a reason that has passed.
    pub(crate) fn turn_away(&mut self, peer: PeerId, id: u32) {
        self.say(peer, &Message::Over { connection: id, broken: false });
    }

    /// No connection to `peer` is tried for a while.
    pub(crate) fn note_failure(&mut self, peer: PeerId, now: u64) {
        self.failures.entry(peer).or_default().again(now, PAUSE_NS);
    }

    /// The connection to `peer` works.
    #[inline]
    pub(crate) fn note_success(&mut self, peer: PeerId) {
        if !self.failures.is_empty() {
            self.failures.remove(&peer);
        }
    }

    /// Forgets all failures: the device is another one.
    pub(crate) fn forget_failures(&mut self) {
        self.failures.clear();
    }

    /// The connection to `peer` has failed: [`Side::lose_doomed`] ends it.
    pub(crate) fn doom(&mut self, peer: PeerId) {
        if !self.is_doomed(peer) {
            self.doomed.push(peer);
        }
    }

    #[inline]
    pub(crate) fn is_doomed(&self, peer: PeerId) -> bool {
        self.doomed.contains(&peer)
    }

    /// The peers of connections that failed, without the first `known` ones.
    pub(crate) fn doomed(&self, known: usize) -> Vec<PeerId> {
        self.doomed.iter().skip(known).copied().collect()
    }

    /// The connection to `peer` has to end with another one that was released: removes it.
    pub(crate) fn end_too(&mut self, peer: PeerId) -> Option<L> {
        let Connection { id, link, .. } = self.connections.remove(&peer)?;
        self.ended.push((peer, id));
        Some(link)
    }

    /// The next message to send, and its peer; they must be sent in this order.
    pub(crate) fn next_control(&mut self) -> Option<(PeerId, Control)> {
        self.outbox.pop_front()
    }

    /// There are messages to send, or connections to end or to report.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        let reports = !self.ended.is_empty() || !self.evicted.is_empty();
        !self.outbox.is_empty() || !self.doomed.is_empty() || reports
    }
}

/// A path that makes connections by agreement. Callbacks named `lost` report the peer of a connection that was in use.
pub(crate) trait Side {
    /// This side's end of a connection.
    type Link;
    /// Why an end cannot be made or joined.
    type Why;

    fn agreement(&mut self) -> &mut Agreement<Self::Link>;

    /// Whether one more connection may be asked for; may [`evict`](Self::evict) an idle one for it.
    fn has_place(&mut self, now: u64) -> bool;

    /// Whether this side has nothing under way on its ready connection to `peer`, which may end for others of the peer.
    fn is_idle(&self, _peer: PeerId, _now: u64) -> bool {
        false
    }

    /// Makes an end, and its description for `peer`. `to`: the end of the peer, which asked; its messages may arrive
    /// from now on. Errors: it cannot be made, or the peer's end cannot be reached.
    fn prepare(
        &mut self,
        peer: PeerId,
        to: Option<&End>,
        now: u64,
    ) -> Result<(Self::Link, End), Self::Why>;

    /// Joins this side's end to the peer's: `to`, or for `None` the end that `prepare` was told. True: the connection is
    /// ready; false: [`begin`](Self::begin) will be called. Errors: that is impossible.
    fn join(&mut self, peer: PeerId, to: Option<&End>, now: u64) -> Result<bool, Self::Why>;

    /// Ends a link. When this returns, nothing is read or written through it any more.
    fn release(&mut self, peer: PeerId, link: Self::Link);

    /// An end could not be made or joined.
    fn tell(&mut self, why: Self::Why);

    /// The first connection of this endpoint is made: `peer`'s.
    fn tell_first(&mut self, peer: PeerId);

    /// Whether there is a connection to `peer`; asks for one if there is none.
    fn contact(&mut self, peer: PeerId, now: u64) -> Prepared {
        let agreement = self.agreement();
        match agreement.get(peer) {
            Some(connection) if connection.phase == Phase::Ready => return Prepared::Ready,
            Some(connection) if now.saturating_sub(connection.since) < PATIENCE_NS => {
                return Prepared::Later;
            }
            Some(connection) if !connection.is_stale(now) => return Prepared::No,
            None if agreement.failures.get(&peer).is_some_and(|failures| failures.pause(now)) => {
                return Prepared::No;
            }
            Some(_) => drop(self.retire(peer)),
            None => {}
        }
        self.ask(peer, now)
    }

    /// Asks `peer` for a connection.
    fn ask(&mut self, peer: PeerId, now: u64) -> Prepared {
        if !self.has_place(now) {
            return Prepared::No;
        }
        match self.prepare(peer, None, now) {
            Ok((link, own)) => {
                let agreement = self.agreement();
                agreement.next_id = agreement.way.numbered(agreement.next_id.wrapping_add(1));
                let id = agreement.next_id;
                agreement.insert(peer, id, Phase::Asked, link, now);
                agreement.say(peer, &Message::Ask(id, own));
                Prepared::Later
            }
            Err(why) => {
                self.tell(why);
                self.agreement().note_failure(peer, now);
                Prepared::No
            }
        }
    }

    /// A message of `peer` about a connection of this kind.
    fn on_message(
        &mut self,
        peer: PeerId,
        message: &Message,
        now: u64,
        lost: &mut dyn FnMut(PeerId),
    ) {
        self.report_evicted(lost); // before the message can make another connection ready
        match *message {
            Message::Ask(id, end) => self.on_ask(peer, id, &end, now, lost),
            Message::Ready(id, end) => self.on_answer(peer, (id, Phase::Asked), Some(&end), now),
            Message::Go(id) => self.on_answer(peer, (id, Phase::Agreed), None, now),
            Message::Refuse(id) => {
                if self.agreement().is(peer, id, Phase::Asked) {
                    self.end(peer);
                    self.agreement().counts.refused += 1;
                    self.agreement().note_failure(peer, now);
                }
            }
            Message::Over { connection, broken } => {
                if self.agreement().get(peer).is_none_or(|known| known.id != connection) {
                    return;
                }
                self.end(peer);
                if broken {
                    self.agreement().counts.broken += 1;
                    self.agreement().note_failure(peer, now);
                }
                lost(peer);
            }
            Message::Yield(id) => {
                if self.agreement().is(peer, id, Phase::Ready) && self.is_idle(peer, now) {
                    self.evict(peer);
                    self.report_evicted(lost);
                }
            }
        }
    }

    /// The peer asks for a connection.
    fn on_ask(&mut self, peer: PeerId, id: u32, end: &End, now: u64, lost: &mut dyn FnMut(PeerId)) {
        if let Some(known) = self.agreement().get(peer) {
            let asked = known.phase == Phase::Asked;
            // Both have asked: the connection with the smaller number is made, and both sides know that.
            if asked && known.id < id {
                return;
            }
            self.end(peer);
            if !asked {
                lost(peer); // the peer has forgotten the old connection
            }
        }
        if self.agreement().outbox.len() >= OUTBOX_MAX {
            return;
        }
        match self.prepare(peer, Some(end), now) {
            Ok((link, own)) => {
                self.agreement().insert(peer, id, Phase::Agreed, link, now);
                self.agreement().say(peer, &Message::Ready(id, own));
            }
            Err(why) => {
                self.tell(why);
                self.agreement().refuse(peer, id);
            }
        }
    }

    /// The peer's end is ready, and so this side's can be joined to it.
    fn on_answer(&mut self, peer: PeerId, (id, phase): (u32, Phase), end: Option<&End>, now: u64) {
        if !self.agreement().is(peer, id, phase) {
            return; // given up since: the peer was told, or will be
        }
        match self.join(peer, end, now) {
            Ok(ready) => {
                if ready {
                    self.begin(peer, now);
                } else if let Some(connection) = self.agreement().get_mut(peer) {
                    (connection.phase, connection.since) = (Phase::Joining, now);
                }
                if phase == Phase::Asked {
                    self.agreement().say(peer, &Message::Go(id));
                }
            }
            Err(why) => {
                self.end(peer);
                self.tell(why);
                self.agreement().note_failure(peer, now);
                self.agreement().say(peer, &Message::Over { connection: id, broken: true });
            }
        }
    }

    /// Both ends may be used.
    fn begin(&mut self, peer: PeerId, now: u64) {
        let agreement = self.agreement();
        let Some(connection) = agreement.get_mut(peer) else { return };
        (connection.phase, connection.since) = (Phase::Ready, now);
        agreement.counts.made += 1;
        if agreement.counts.made == 1 {
            self.tell_first(peer);
        }
    }

    /// Ends the connection to `peer`; no one is told. Returns its number.
    fn end(&mut self, peer: PeerId) -> Option<u32> {
        let agreement = self.agreement();
        agreement.doomed.retain(|doomed| *doomed != peer); // the peer's next connection has not failed
        let Connection { id, link, .. } = agreement.connections.remove(&peer)?;
        self.release(peer, link);
        Some(id)
    }

    /// Ends the connection to `peer`, and tells the peer.
    fn retire(&mut self, peer: PeerId) -> bool {
        let Some(connection) = self.end(peer) else { return false };
        self.agreement().say(peer, &Message::Over { connection, broken: false });
        true
    }

    /// Ends the connection to `peer` to make room, tells the peer, and notes it for [`lose_doomed`](Self::lose_doomed).
    fn evict(&mut self, peer: PeerId) {
        let used = self.agreement().get(peer).is_some_and(|known| known.phase != Phase::Asked);
        self.retire(peer);
        self.agreement().counts.evicted += 1;
        if used {
            self.agreement().evicted.push(peer);
        }
    }

    /// Reports connections that were closed to make room: keys that were made for them are void on this side too.
    /// Returns their number.
    fn report_evicted(&mut self, lost: &mut dyn FnMut(PeerId)) -> usize {
        let evicted = std::mem::take(&mut self.agreement().evicted);
        evicted.iter().for_each(|peer| lost(*peer));
        evicted.len()
    }

    /// Ends a connection that failed, and reports it.
    fn lose(&mut self, peer: PeerId, now: u64, lost: &mut dyn FnMut(PeerId)) {
        if let Some(id) = self.end(peer) {
            self.report(peer, id, now, lost);
        }
    }

    /// Ends all connections as failed, and reports them.
    fn lose_all(&mut self, now: u64, lost: &mut dyn FnMut(PeerId)) {
        for peer in self.agreement().peers(|_| true) {
            self.lose(peer, now, lost);
        }
    }

    /// Ends and reports connections that failed or were evicted since the last call. Returns their number.
    fn lose_doomed(&mut self, now: u64, lost: &mut dyn FnMut(PeerId)) -> usize {
        let mut n = self.report_evicted(lost);
        for peer in std::mem::take(&mut self.agreement().doomed) {
            self.lose(peer, now, lost);
            n += 1;
        }
        for (peer, id) in std::mem::take(&mut self.agreement().ended) {
            self.report(peer, id, now, lost);
            n += 1;
        }
        n
    }

    /// A connection in use has failed, and ended here.
    fn report(&mut self, peer: PeerId, connection: u32, now: u64, lost: &mut dyn FnMut(PeerId)) {
        let agreement = self.agreement();
        agreement.counts.broken += 1;
        agreement.note_failure(peer, now);
        agreement.say(peer, &Message::Over { connection, broken: true });
        lost(peer);
    }

    /// `peer` is gone, and everything about it.
    fn erase(&mut self, peer: PeerId) {
        self.end(peer);
        let agreement = self.agreement();
        agreement.failures.remove(&peer);
        agreement.outbox.retain(|(to, _)| *to != peer);
        agreement.ended.retain(|(ended, _)| *ended != peer);
        agreement.evicted.retain(|evicted| *evicted != peer);
    }
}
