//! Pending sends: each step of their schemes, and what follows from it.

use super::flow::Onward;
use super::index_list::Key;
use super::packet::{Packet, Ranges};
use super::schemes::fragments;
use super::sends::{Pending, Sender};
use super::state::{Core, Engine};
use super::{Cause, Host};
use crate::sys::numbers::NumberSet;
use crate::telemetry::trace::Kind;
use crate::transport::{Iface, Mark, PeerId, SendError};

/// The packets that a send needs to go on, and nothing else: for this peer, unsolicited ones or not.
type Packets = (PeerId, bool);

/// `None`: a step of this send may be refused for another reason than a lack of room for packets to its peer.
fn packets_of(Pending { message, scheme }: &Pending) -> Option<Packets> {
    let unsolicited = match scheme {
        Sender::Push(push) if push.needs_packets() => push.is_unsolicited(),
        Sender::Fragments(fragments) if fragments.needs_packets() => false,
        _ => return None,
    };
    Some((message.peer, unsolicited))
}

/// The peers that take no more packets in this pass. One with thousands of long sends is asked once or twice, and room that comes
/// meanwhile goes to the first of them.
#[derive(Default)]
struct Full {
    /// They take no unsolicited ones: those also stop while the receiver is short of memory.
    unsolicited: NumberSet<PeerId>,
    any: NumberSet<PeerId>,
}

impl Full {
    fn holds(&self, (peer, unsolicited): Packets) -> bool {
        self.any.contains(&peer) || unsolicited && self.unsolicited.contains(&peer)
    }

    fn add(&mut self, (peer, unsolicited): Packets) {
        if unsolicited {
            self.unsolicited.insert(peer);
        } else {
            self.any.insert(peer);
        }
    }
}

impl<I: Iface> Engine<I> {
    /// Advances the sends of which this endpoint has to send or write bytes.
    pub(super) fn advance_streams(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        let mut full = Full::default();
        for left in (0..self.core.sends.streams.len()).rev() {
            let Some(key) = self.core.sends.streams.pop_front() else { break };
            let packets = self.core.sends.pending.get(key).and_then(packets_of);
            if packets.is_some_and(|packets| full.holds(packets)) {
                self.core.sends.streams.push_back(key);
                continue;
            }
            let onward = self.transmit(key);
            n += usize::from(onward != Onward::Again);
            if let (Onward::Again, Some(packets), true) = (onward, packets, left > 0) {
                full.add(packets);
            }
            self.core.go_on(key, onward, host);
        }
        n
    }

    /// One step of a send.
    fn transmit(&mut self, key: Key) -> Onward {
        let Self { iface, core } = self;
        let Some(Pending { message, scheme }) = core.sends.pending.get_mut(key) else {
            return Onward::Waits;
        };
        match scheme {
            Sender::Push(push) => push.step(iface, message, key, &mut core.counts),
            Sender::Fragments(fragments) => fragments.step(iface, message, &mut core.counts),
            Sender::Write(write) => {
                write.step(iface, message, core.limits.bulk_chunk, &mut core.counts)
            }
            _ => Onward::Waits,
        }
    }

    /// Sends the first unsolicited bytes of a message that was just announced.
    pub(super) fn begin_push(&mut self, key: Key, host: &mut impl Host) {
        if let Some(Pending { scheme: Sender::Push(push), .. }) = self.core.sends.pending.get(key) {
            if push.is_by_stream() {
                self.iface.flush(); // the announcement
            }
        }
        let onward = self.transmit(key);
        self.core.go_on(key, onward, host);
        self.iface.flush();
    }

    /// Invalidates the keys of finished sends.
    pub(super) fn withdraw_offers(&mut self) {
        for (peer, offer) in self.core.sends.withdrawn.drain(..) {
            self.iface.invalidate(peer, &offer);
        }
    }

    /// Writes into the remote buffers that peers have advertised, in order.
    pub(super) fn advance_writes(&mut self) -> usize {
        let Core { sends, outbox, counts, .. } = &mut self.core;
        let mut n = 0;
        let mut full: NumberSet<PeerId> = NumberSet::default();
        for _ in 0..sends.due.len() {
            let Some(mut due) = sends.due.pop_front() else { break };
            let Some(Pending { message, scheme: Sender::Put(put) }) = sends.pending.get_mut(due.tx)
            else {
                continue;
            };
            let peer = message.peer;
            if full.contains(&peer) {
                let _ = due.copy(&mut self.iface, message, true);
                sends.due.push_back(due);
                continue;
            }
            match put.write(&mut self.iface, message, &mut due, (&mut sends.wrote, counts)) {
                Ok(()) => n += 1,
                Err(SendError::Again) => {
                    full.insert(peer);
                    sends.due.push_back(due);
                }
                Err(SendError::Unreachable(_)) => {
                    n += 1;
                    counts.declined += 1;
                    put.decline(peer, &due, sends.due.iter(), outbox);
                }
            }
        }
        n
    }

    /// Copies chunks of a message that its receiver has split.
    pub(super) fn advance_assists(&mut self) -> usize {
        let Core { sends, arrivals, counts, .. } = &mut self.core;
        let receives = !arrivals.pulls.is_empty();
        while let Some(key) = sends.assists.front().copied() {
            if let Some(Pending { message, scheme }) = sends.pending.get_mut(key) {
                if let Sender::Split(split) = scheme {
                    if let Some(bytes) = split.step(&mut self.iface, message, key, receives) {
                        counts.assisted_bytes += bytes as u64;
                        return usize::from(bytes > 0);
                    }
                    *scheme = Sender::Announced { sees: false };
                }
            }
            sends.assists.pop_front();
        }
        0
    }

    /// Waits for the acknowledgement of a send that the transport has taken. The send is counted as outstanding.
    pub(super) fn await_arrival(&mut self, peer: PeerId, key: Key, host: &mut impl Host) {
        let Some(mark) = self.iface.tracked(peer) else {
            self.core.peers.count_outstanding(peer, -1);
            return self.core.sends.finish(key, None, host);
        };
        if let Some(pending) = self.core.sends.pending.get_mut(key) {
            pending.scheme = Sender::Leaving;
        }
        self.core.sends.leaving.add(peer, mark, key);
    }

    /// Completes the sends that have been acknowledged.
    pub(super) fn advance_leaving(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        for at in (0..self.core.sends.leaving.len()).rev() {
            let Some(peer) = self.core.sends.leaving.peer_at(at) else { break };
            if let Some(upto) = self.iface.acknowledged(peer).filter(|_| host.takes_arrivals()) {
                n += self.core.on_acknowledged(peer, upto, host);
            }
        }
        n
    }
}

impl Core {
    /// Carries out what a step of a send, or a packet for it, leads to.
    fn go_on(&mut self, key: Key, onward: Onward, host: &mut impl Host) {
        let Self { sends, outbox, peers, .. } = self;
        let Some(Pending { message, scheme }) = sends.pending.get_mut(key) else { return };
        let peer = message.peer;
        match onward {
            Onward::Again | Onward::Moved => sends.streams.push_back(key),
            Onward::Waits => {}
            Onward::Reply(packet) => outbox.reply(peer, packet),
            Onward::Sent(packet) => {
                *scheme = Sender::Sent(scheme.carried());
                outbox.urgent.extend(packet.map(|packet| (peer, packet)));
            }
            // The receiver's FIN ends the send.
            Onward::Unreadable { rx } => {
                (*scheme, message.unreadable) = (Sender::Sent(None), true);
                outbox.reply(peer, Packet::Fault { rx });
            }
            Onward::Fragments { rx, flow } => {
                *scheme = Sender::Fragments(fragments::Sender::new(rx, flow, message));
                sends.streams.push_back(key);
            }
            Onward::Complete => {
                peers.count_outstanding(peer, -1);
                sends.finish(key, None, host);
            }
            Onward::Lost(errno) => {
                peers.count_outstanding(peer, -1);
                sends.finish(key, Some((errno.0, Cause::PeerUnreachable)), host);
            }
        }
    }

    /// The receiver of an announced message has said something about it.
    pub(super) fn note_answer(&mut self, peer: PeerId, tx: u64, host: &impl Host) {
        if let Some(announced_ns) = self.sends.answered(peer, tx) {
            self.sends.late.count(host.now_ns().saturating_sub(announced_ns));
            host.trace(Kind::SendAnswered, peer, tx, 0);
        }
    }

    pub(super) fn on_cts(
        &mut self,
        peer: PeerId,
        numbers: (u64, u64),
        wanted: (u64, bool),
        ranges: Ranges,
        host: &mut impl Host,
    ) {
        self.note_answer(peer, numbers.0, host);
        let Self { sends, counts, .. } = self;
        if let Some((key, onward)) = sends.on_cts(peer, numbers, wanted, ranges, counts) {
            self.go_on(key, onward, host);
        }
    }

    pub(super) fn on_resume(
        &mut self,
        peer: PeerId,
        numbers: (u64, u64),
        wanted: (u64, u64),
        host: &mut impl Host,
    ) {
        match self.sends.on_resume(peer, numbers, wanted, &mut self.outbox) {
            Some((key, onward)) => self.go_on(key, onward, host),
            None => self.counts.dropped += 1,
        }
    }

    /// FIN. Returns whether a pending send ended.
    pub(super) fn on_fin(
        &mut self,
        peer: PeerId,
        tx: u64,
        status: u32,
        host: &mut impl Host,
    ) -> bool {
        self.note_answer(peer, tx, host);
        let Some(key) = self.sends.on_fin(peer, tx, &mut self.counts) else { return false };
        if !self.sends.keep_for_device(key, status) {
            self.peers.count_outstanding(peer, -1);
            self.sends.finish(key, self.sends.error_of(key, status), host);
        }
        true
    }

    /// The device has reported, or lost, a write of a send to `peer`: ends it if that was all that it waited for.
    pub(super) fn on_released(&mut self, peer: PeerId, key: Key, host: &mut impl Host) {
        if let Some(status) = self.sends.released(key) {
            self.peers.count_outstanding(peer, -1);
            self.sends.finish(key, self.sends.error_of(key, status), host);
        }
    }

    /// The peer has acknowledged everything before `upto`. Returns how many sends that completes.
    pub(super) fn on_acknowledged(
        &mut self,
        peer: PeerId,
        upto: Mark,
        host: &mut impl Host,
    ) -> usize {
        let mut n = 0;
        while let Some(key) = self.sends.leaving.take(peer, upto) {
            self.peers.count_outstanding(peer, -1);
            self.sends.finish(key, None, host);
            n += 1;
        }
        n
    }
}
