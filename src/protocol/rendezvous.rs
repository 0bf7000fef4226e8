//! Receives of long messages: each step of its scheme, and what follows from it.

use super::arrivals::{Active, Receiver};
use super::index_list::Key;
use super::matching::{Appended, Outcome};
use super::message::{Inbound, Next};
use super::outbox::{Failed, Outbox};
use super::packet::Packet;
use super::schemes::push::Place;
use super::schemes::{fragments, put, split};
use super::select::{self, Buffers, Fetch};
use super::state::{Core, Engine};
use super::{Cause, Host};
use crate::sys::Errno;
use crate::telemetry::trace::Kind;
use crate::transport::{Iface, PeerId, SendError};

impl<I: Iface> Engine<I> {
    /// Advances the receives for which this endpoint has something to do.
    pub(super) fn advance_pulls(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        self.core.arrivals.full = false;
        if !self.core.arrivals.pulls.is_empty() {
            self.core.peers.begin_turn();
        }
        for _ in 0..self.core.arrivals.pulls.len() {
            let Some(key) = self.core.arrivals.next_pull() else { break };
            // Also the next receive, so that its sender can copy before its turn comes.
            self.begin_sharing(key);
            if let Some(next) = self.core.arrivals.pulls.front() {
                self.begin_sharing(*next);
            }
            let next = self.pull(key);
            n += usize::from(next != Next::Again);
            self.follow(key, next, host);
        }
        n
    }

    /// Begins a split copy of the missing bytes of a receive, if that is worth it.
    fn begin_sharing(&mut self, key: Key) {
        let arrivals = &mut self.core.arrivals;
        let Some(Active { message, scheme }) = arrivals.active.get_mut(key) else { return };
        let Receiver::Get(get) = scheme else { return };
        if let Some(split) = split::Receiver::begin(&mut self.iface, message, &get.ranges) {
            *scheme = Receiver::Split(split);
            arrivals.pushed.insert(message.peer, message.tx, Place::Active(key));
        }
    }

    /// One step of a receive.
    fn pull(&mut self, key: Key) -> Next {
        let Self { iface, core } = self;
        let (most, arrivals, outbox) =
            (core.limits.bulk_chunk, &mut core.arrivals, &mut core.outbox);
        let Some(Active { message, scheme }) = arrivals.active.get_mut(key) else {
            return Next::Waits;
        };
        let fed = core.peers.is_fed(message.peer);
        if let Receiver::Split(split) = scheme {
            return split.step(iface, message, (most, fed), &mut core.counts);
        }
        let awaited = message.awaited(&mut arrivals.full);
        if let Receiver::Put(put) = scheme {
            let chunks = &mut arrivals.chunks;
            return match awaited {
                Some(next) if message.is_whole() || next == Next::Again && put.is_busy() => next,
                _ => step_put(iface, (chunks, outbox), (key, message), put, awaited),
            };
        }
        if let Some(next) = awaited {
            return next;
        }
        let memory = message.target.segments;
        let what = (message.want, &memory);
        if fed {
            return Next::Again; // the sender's fragments come, which cost less
        }
        let caps = iface.caps(message.peer);
        let known = match scheme {
            Receiver::Get(_) => (true, None),
            Receiver::Announced(announced) => (false, announced.offer.as_ref()),
            _ => (false, None),
        };
        match (select::fetch(iface, &caps, message.peer, what, known), &*scheme) {
            (Fetch::Read, Receiver::Get(get)) => get.step(iface, message, most, &mut core.counts),
            (Fetch::Later, _) => Next::Again,
            (Fetch::RemoteBuffers(lane), now) => {
                let announced = match now {
                    Receiver::Announced(announced) => *announced,
                    _ => put::Announced::default(),
                };
                let by = (announced, &lane);
                let chunks = &mut arrivals.chunks;
                match put::Receiver::begin(iface, chunks, outbox, (key, message), by) {
                    Ok(put) => {
                        *scheme = Receiver::Put(put);
                        Next::Waits
                    }
                    Err(SendError::Again) => Next::Again,
                    Err(SendError::Unreachable(_)) => Next::Ask { faulted: false },
                }
            }
            (Fetch::Read | Fetch::Request, _) => Next::Ask { faulted: false },
        }
    }

    /// Carries out what a step leads to.
    fn follow(&mut self, key: Key, next: Next, host: &mut impl Host) {
        let core = &mut self.core;
        match next {
            Next::Again | Next::Moved => core.arrivals.queue_pull(key),
            Next::Waits => {}
            Next::Whole => core.finish_active(key, host),
            Next::Failed(error, cause) => core.fail_active(key, error, cause, host),
            Next::Ask { faulted } => {
                let Some(active) = core.arrivals.active.get(key) else { return };
                let one_sided = self.iface.caps(active.message.peer).one_sided;
                core.arrivals.clear_to_send(key, one_sided, faulted, &mut core.outbox);
            }
            Next::Resume => {
                let asked = fragments::Asked::AfterPut;
                core.arrivals.resume(key, asked, &mut core.outbox, &mut core.counts);
            }
        }
    }

    /// Sends the urgent replies while there is room.
    pub(super) fn flush_outbox(&mut self, host: &mut impl Host) -> usize {
        let mut failed = Vec::new();
        let n = self.core.outbox.send(&mut self.iface, &mut failed);
        self.answers_failed(failed, host);
        n
    }

    /// Sends the other replies while there is room.
    pub(super) fn flush_late(&mut self, host: &mut impl Host) -> usize {
        let mut failed = Vec::new();
        let n = self.core.outbox.send_late(&mut self.iface, &mut failed);
        self.answers_failed(failed, host);
        n
    }

    fn answers_failed(&mut self, failed: Vec<Failed>, host: &mut impl Host) {
        for (_, packet, errno) in failed {
            let (core, iface) = (&mut self.core, &mut self.iface);
            let rx = match packet {
                Packet::Cts { rx, .. } | Packet::Window { rx, .. } => Key::from_wire(rx),
                // The peer that waited for this reply has departed.
                _ => {
                    core.counts.dropped += 1;
                    continue;
                }
            };
            let active = core.arrivals.active.get_mut(rx);
            let goes_on = match (packet, active.map(|a| (&mut a.scheme, &a.message))) {
                (Packet::Cts { .. }, Some((Receiver::Push(push), message))) => {
                    push.needs_no_cts(message)
                }
                (Packet::Window { remote, .. }, Some((Receiver::Put(put), _))) => {
                    !put.take_back_untold(iface, &mut core.arrivals.chunks, rx, &remote)
                }
                (Packet::Window { .. }, Some((Receiver::Fragments(fragments), _))) => {
                    !fragments.is_after_put()
                }
                (packet, _) => matches!(packet, Packet::Window { .. }),
            };
            if !goes_on {
                core.fail_unanswered(rx, errno, host);
            }
        }
    }
}

/// One step of a receive through remote buffers. Further ones are advertised while the bytes of earlier ones are copied to a
/// device (`awaited`). After a failure, those that the sender may write are waited for.
fn step_put(
    iface: &mut impl Iface,
    (chunks, outbox): (&mut put::Chunks, &mut Outbox),
    (key, message): (Key, &Inbound),
    put: &mut put::Receiver,
    awaited: Option<Next>,
) -> Next {
    let by = match put.is_open() && message.failed.is_none() {
        true => {
            let (what, offer) = ((message.want, &message.target.segments), put.offer.as_ref());
            select::offered(iface, message.peer, what, offer, put.bound_to())
        }
        false => Buffers::No, // to ask might connect to the peer for nothing
    };
    match (put.step(iface, chunks, outbox, (key, message), by), message.failed) {
        (Next::Waits, _) if awaited == Some(Next::Again) => Next::Again,
        (Next::Waits, _) => Next::Waits,
        (_, Some((error, cause))) => Next::Failed(error, cause),
        (next, None) => next,
    }
}

impl Core {
    /// Unsolicited bytes of a message have come.
    #[inline]
    pub(super) fn on_pushed(
        &mut self,
        peer: PeerId,
        tx: u64,
        offset: u64,
        payload: &[u8],
        host: &mut impl Host,
    ) {
        // The fast path: the next bytes of the message of the last look-up, which has its receive.
        if let Some(key) = self.arrivals.pushed.last_active(peer, tx) {
            if let Some(Active { message, scheme: Receiver::Push(push) }) =
                self.arrivals.active.get_mut(key)
            {
                match push.try_take(message, offset, payload, &self.limits) {
                    Some(true) => return self.finish_active(key, host),
                    Some(false) => return,
                    None => {}
                }
            }
        }
        self.take_pushed(peer, tx, offset, payload, host);
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
        let message = match self.arrivals.pushed.find(peer, tx) {
            Some(Place::Active(key)) => {
                let placed = self.arrivals.place_pushed(key, offset, payload, &self.limits);
                if let Some(Active { scheme: Receiver::Split(_), .. }) =
                    self.arrivals.active.get(key)
                {
                    if placed.is_some() {
                        self.peers.note_fed(peer);
                    }
                }
                return self.placed(key, placed, host);
            }
            Some(Place::Unexpected(space, key)) => self.matching.unexpected.of(space).get_mut(key),
            Some(Place::Claimed(context)) => self.matching.claimed.get_mut(&context),
            None => {
                self.counts.surplus += 1;
                return;
            }
        };
        match message.map_or(Appended::No, |message| message.body.append(offset, payload)) {
            Appended::No => self.counts.dropped += 1,
            Appended::More => self.matching.bytes += payload.len(),
            Appended::All => {
                self.matching.bytes += payload.len();
                self.arrivals.pushed.remove(peer, tx);
            }
            Appended::NoMemory { kept, waits } => {
                self.keep_less();
                self.matching.bytes -= kept;
                self.arrivals.pushed.remove(peer, tx);
                if waits {
                    self.outbox.finish(peer, tx, libc::ENOMEM);
                }
            }
        }
    }

    /// Bytes of a receive have come. `None`: they were dropped. Else whether it is whole.
    fn placed(&mut self, key: Key, placed: Option<bool>, host: &mut impl Host) {
        match placed {
            Some(true) => self.finish_active(key, host),
            Some(false) => {}
            None => self.counts.dropped += 1,
        }
    }

    pub(super) fn on_fragment(
        &mut self,
        peer: PeerId,
        rx: u64,
        offset: u64,
        payload: &[u8],
        host: &mut impl Host,
    ) {
        let key = Key::from_wire(rx);
        let placed = self.arrivals.on_fragment(peer, key, offset, payload, &self.limits);
        self.placed(key, placed, host);
    }

    /// FAULT: the sender cannot read its own memory.
    pub(super) fn on_fault(&mut self, peer: PeerId, rx: u64, host: &mut impl Host) {
        let key = Key::from_wire(rx);
        match self.arrivals.on_fault(peer, key) {
            Some(true) => self.finish_active(key, host),
            Some(false) => {}
            None => self.counts.dropped += 1,
        }
    }

    /// PUT_DONE: the sender has written everything.
    pub(super) fn on_put_done(&mut self, peer: PeerId, rx: u64, host: &mut impl Host) {
        let key = Key::from_wire(rx);
        let written = self.arrivals.on_put_done(peer, key);
        self.placed(key, written.then_some(true), host);
    }

    /// The sender has written a remote buffer, or (`read`) the device has read a chunk of a message.
    pub(super) fn on_part(&mut self, peer: PeerId, token: u64, read: bool, host: &mut impl Host) {
        match self.arrivals.on_part(peer, Key::from_wire(token), read) {
            Some((key, true)) => self.finish_active(key, host),
            Some((key, false)) => self.arrivals.queue_pull(key),
            None => self.counts.dropped += 1,
        }
    }

    /// GONE: the sender has completed the message as delivered, and has none of its bytes any more.
    pub(super) fn on_gone(&mut self, peer: PeerId, rx: u64, host: &mut impl Host) {
        let key = Key::from_wire(rx);
        let active = self.arrivals.active.get_mut(key);
        match active.filter(|a| a.message.peer == peer).map(|active| &mut active.scheme) {
            Some(Receiver::Put(put)) => {
                put.on_gone();
                self.arrivals.queue_pull(key);
            }
            Some(Receiver::Fragments(fragments)) if fragments.is_after_put() => {
                self.fail_active(key, libc::EIO, Cause::LinkBroke, host);
            }
            _ => self.counts.dropped += 1,
        }
    }

    pub(super) fn finish_active(&mut self, key: Key, host: &mut impl Host) {
        let failed = self.arrivals.active.get(key).and_then(|active| active.message.failed);
        if let Some((error, cause)) = failed {
            return self.fail_active(key, error, cause, host);
        }
        let Some(Active { message, scheme }) = self.arrivals.remove(key) else { return };
        let Inbound { peer, tx, len, want, leaves, .. } = message;
        self.arrivals.long.count(peer, scheme.carried(), message.received);
        match scheme {
            _ if message.is_orphaned() => {}
            Receiver::Put(put) if put.is_seen(&message) => self.outbox.finish_late(peer, tx),
            // A sender whose unsolicited bytes do not all fit may stop sending them.
            _ if !leaves || len > want as u64 => self.outbox.finish(peer, tx, 0),
            _ => {}
        }
        let overflow = (len as usize).saturating_sub(want);
        self.end_active(&message, Outcome { len: message.received, overflow, error: None }, host);
    }

    /// Ends a rendezvous receive with an error and tells the sender.
    pub(super) fn fail_active(&mut self, key: Key, error: i32, cause: Cause, host: &mut impl Host) {
        let Some(Active { message, .. }) = self.arrivals.remove(key) else { return };
        if !message.is_orphaned() {
            self.outbox.finish(message.peer, message.tx, error);
        }
        self.end_active(&message, Outcome::failed(message.received, (error, cause)), host);
    }

    /// The sender cannot be reached, so the bytes of a receive cannot be requested.
    fn fail_unanswered(&mut self, key: Key, errno: Errno, host: &mut impl Host) {
        let Some(Active { message, .. }) = self.arrivals.remove(key) else { return };
        let outcome = Outcome::failed(message.received, (errno.0, Cause::PeerUnreachable));
        self.end_active(&message, outcome, host);
    }

    pub(super) fn end_active(&mut self, message: &Inbound, outcome: Outcome, host: &mut impl Host) {
        host.trace(Kind::ReceiveEnd, message.peer, message.tx, outcome.len);
        let Inbound { peer, envelope, target, .. } = message;
        self.finish_receive(*peer, envelope, target, outcome, host);
    }
}
