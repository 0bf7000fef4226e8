//! Sends that are pending.

use super::flow::{Flow, Onward};
use super::index_list::{IndexList, Key};
use super::limits::Counts;
use super::message::Outbound;
use super::outbox::Outbox;
use super::packet::{Packet, Ranges};
use super::peers::Peers;
use super::schemes::{eager, fragments, push, put, split, write};
use super::traffic::{Carried, LongMessages};
use super::{Cause, Failure, Host};
use crate::telemetry::histogram::Histogram;
use crate::telemetry::trace::Kind;
use crate::transport::{LaneId, PeerId, RemoteKey, Share};
use std::collections::VecDeque;

/// A pending send.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) message: Outbound,
    pub(super) scheme: Sender,
}

/// The sender's side of the scheme by which a message goes.
#[derive(Debug)]
pub(super) enum Sender {
    /// Behind a fence; nothing was sent. It is complete when the message is in the receiver's buffer (`delivery`), or
    /// when the receiver's endpoint has it (`transmitted`).
    Deferred {
        delivery: bool,
        transmitted: bool,
    },
    /// The transport has the message, and the peer has not acknowledged it yet.
    Leaving,
    /// Announced, and the receiver chooses. `sees`: the RTS announced sender-side delivery completion.
    Announced {
        sees: bool,
    },
    Push(push::Sender),
    Fragments(fragments::Sender),
    Write(write::Sender),
    Put(put::Sender),
    Split(split::Sender),
    /// All of it is sent, and the receiver's FIN is due. With what carried it, unless that was counted when it was sent.
    Sent(Option<Carried>),
    /// The receiver's FIN is here, with this status, but the device has not reported all of its writes: it may read the
    /// message to send a part of it again.
    Finished(u32),
}

impl Sender {
    /// How a send goes that ends now. `None`: it was counted when it was sent, or was not sent.
    pub(super) fn carried(&self) -> Option<Carried> {
        match self {
            Self::Deferred { .. } | Self::Leaving => None,
            Self::Sent(carried) => *carried,
            Self::Announced { .. } => Some(Carried::Read),
            Self::Push(_) => Some(Carried::Unsolicited),
            Self::Fragments(_) => Some(Carried::Fragments),
            Self::Write(_) | Self::Put(_) | Self::Finished(_) => Some(Carried::Written),
            Self::Split(_) => Some(Carried::Split),
        }
    }
}

/// Something that waits for earlier operations on its peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Deferred {
    pub(super) peer: PeerId,
    /// It waits until all earlier operations have completed.
    pub(super) fence: bool,
    pub(super) what: What,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    Send(Key),
    /// A one-sided operation.
    Access(Key),
}

/// All pending sends.
#[derive(Debug)]
pub(super) struct Sends {
    pub(super) pending: IndexList<Pending>,
    /// Bytes of the copies that pending injected sends own.
    pub(super) copied: usize,
    /// The number of the next message that is complete when it is announced, and so needs no entry in `pending`.
    pub(super) passing: Key,
    /// Operations behind earlier ones, in order.
    pub(super) deferred: VecDeque<Deferred>,
    /// A deferred send could start if its ring had room. The ring does not notify when it has.
    pub(super) deferred_starved: bool,
    /// Sends of which this endpoint has to send or write bytes. Some may have ended meanwhile.
    pub(super) streams: VecDeque<Key>,
    /// Remote buffers that bytes of this endpoint are to be written into, in order.
    pub(super) due: VecDeque<put::Due>,
    /// What the device is writing into such buffers, where it reports the end. The key is the token.
    pub(super) wrote: IndexList<put::Wrote>,
    /// Messages of this endpoint that their receivers copy with it (split copy). Some may have ended meanwhile.
    pub(super) assists: VecDeque<Key>,
    /// Sends that are complete when their peers' endpoints have them.
    pub(super) leaving: eager::Tracked,
    /// Messages that this endpoint advertised for reading and whose keys are to be invalidated.
    pub(super) withdrawn: Vec<(PeerId, RemoteKey)>,
    /// Long messages that were sent.
    pub(super) long: LongMessages,
    /// See [`super::Standing::late_receivers`].
    pub(super) late: Histogram,
}

impl Sends {
    pub(super) fn new() -> Self {
        Self {
            pending: IndexList::default(),
            copied: 0,
            passing: Key::NAMELESS,
            deferred: VecDeque::new(),
            deferred_starved: false,
            streams: VecDeque::new(),
            due: VecDeque::new(),
            wrote: IndexList::default(),
            assists: VecDeque::new(),
            leaving: eager::Tracked::default(),
            withdrawn: Vec::new(),
            long: LongMessages::default(),
            late: Histogram::default(),
        }
    }

    #[inline]
    pub(super) fn work(&self) -> usize {
        self.streams.len()
            | self.due.len()
            | self.assists.len()
            | self.deferred.len()
            | self.withdrawn.len()
    }

    /// The receiver of a pending send.
    pub(super) fn receiver(&self, key: Key) -> Option<PeerId> {
        self.pending.get(key).map(|pending| pending.message.peer)
    }

    /// Whether unsolicited bytes of a send are being sent.
    pub(super) fn pushes(&self, key: Key) -> bool {
        self.pending.get(key).is_some_and(|pending| matches!(pending.scheme, Sender::Push(_)))
    }

    /// A pending send to `peer` that a packet names.
    fn of(&mut self, peer: PeerId, tx: u64) -> Option<&mut Pending> {
        let pending = self.pending.get_mut(Key::from_wire(tx));
        pending.filter(|pending| pending.message.peer == peer)
    }

    /// A send was announced.
    pub(super) fn await_answer(&mut self, key: Key, host: &impl Host) {
        if let Some(pending) = self.pending.get_mut(key) {
            let message = &mut pending.message;
            message.announced_ns = host.now_ns();
            host.trace(Kind::SendBegin, message.peer, key.to_wire(), message.payload.len());
        }
    }

    /// The receiver has said the first word about a send. Returns when it was announced, nanoseconds.
    pub(super) fn answered(&mut self, peer: PeerId, tx: u64) -> Option<u64> {
        let announced_ns = &mut self.of(peer, tx)?.message.announced_ns;
        Some(std::mem::take(announced_ns)).filter(|announced_ns| *announced_ns > 0)
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<Outbound> {
        let Pending { message, .. } = self.pending.remove(key)?;
        self.withdrawn.extend(message.offer.map(|offer| (message.peer, offer)));
        self.copied -= message.payload.owned_len();
        Some(message)
    }

    /// Ends a pending send. `error`: the error number and the cause, or `None` for success. The caller keeps the
    /// per-peer counts.
    pub(super) fn finish(&mut self, key: Key, error: Option<(i32, Cause)>, host: &mut impl Host) {
        let carried = self.pending.get(key).and_then(|pending| pending.scheme.carried());
        let Some(message) = self.remove(key) else { return };
        if carried.is_some() {
            host.trace(Kind::SendEnd, message.peer, key.to_wire(), message.payload.len());
        }
        if let (Some(carried), None) = (carried, error) {
            self.long.count(message.peer, carried, message.payload.len());
        }
        if message.completed {
            return;
        }
        let completion = message.completion();
        match error {
            None => host.complete(&completion),
            Some(error) => host.fail(&Failure::new(completion, error)),
        }
    }

    /// Whether the device that has the message has failed.
    fn is_unreadable(&self, key: Key) -> bool {
        self.pending.get(key).is_some_and(|pending| pending.message.unreadable)
    }

    /// How a send ends of which a FIN says that: one that could not be read has failed by its own device.
    pub(super) fn error_of(&self, key: Key, status: u32) -> Option<(i32, Cause)> {
        let refused = (status as i32, Cause::ReceiverRefused);
        (status != 0).then(|| if self.is_unreadable(key) { UNREADABLE } else { refused })
    }

    /// Whether a copy has to be waited for, of whose end nothing but a question tells.
    pub(super) fn is_staged(&self, key: Key) -> bool {
        let scheme = self.pending.get(key).map(|pending| &pending.scheme);
        matches!(scheme, Some(Sender::Fragments(fragments)) if fragments.is_staged())
    }

    /// Keeps a send that its receiver has finished with while the device may read the message. False: it does not.
    pub(super) fn keep_for_device(&mut self, key: Key, status: u32) -> bool {
        let reads = self.wrote.iter().any(|(_, wrote)| wrote.tx == key);
        let kept = self.pending.get_mut(key).filter(|p| reads && !p.message.completed);
        kept.map(|pending| pending.scheme = Sender::Finished(status)).is_some()
    }

    /// The status of a send that its receiver has finished with, if the device does not read the message any more.
    pub(super) fn released(&self, key: Key) -> Option<u32> {
        match self.pending.get(key)?.scheme {
            Sender::Finished(status) => {
                self.wrote.iter().all(|(_, wrote)| wrote.tx != key).then_some(status)
            }
            _ => None,
        }
    }

    /// The peer has departed: its sends end.
    pub(super) fn end_all(
        &mut self,
        peer: PeerId,
        error: (i32, Cause),
        peers: &mut Peers,
        host: &mut impl Host,
    ) {
        self.leaving.forget(peer);
        self.forget_writes(peer, None);
        let Self { pending, due, assists, streams, deferred, .. } = self;
        let goes_on = |key: &Key| pending.get(*key).is_some_and(|p| p.message.peer != peer);
        assists.retain(goes_on);
        streams.retain(goes_on);
        due.retain(|due| goes_on(&due.tx));
        let waiting = deferred.len();
        deferred.retain(|deferred| deferred.peer != peer);
        peers.count_deferred(peer, -((waiting - deferred.len()) as i32));
        for key in self.pending.keys_where(|pending| pending.message.peer == peer) {
            let waits =
                self.pending.get(key).is_some_and(|p| matches!(p.scheme, Sender::Deferred { .. }));
            if !waits {
                peers.count_outstanding(peer, -1);
            }
            let status = self.released(key);
            let ended = status.map_or(Some(error), |status| self.error_of(key, status));
            self.finish(key, ended, host);
        }
    }

    /// Whether `key` named a message of this endpoint that needs no FIN any more.
    fn has_left(&self, key: Key) -> bool {
        key.is_nameless_before(self.passing) || self.pending.is_gone(key)
    }

    /// FIN: the receiver has finished with a message. Returns the send that it ends.
    pub(super) fn on_fin(&mut self, peer: PeerId, tx: u64, counts: &mut Counts) -> Option<Key> {
        let key = Key::from_wire(tx);
        let scheme = self.of(peer, tx).map(|pending| &pending.scheme);
        if scheme.is_none_or(|s| matches!(s, Sender::Deferred { .. } | Sender::Leaving)) {
            // A send that needed no FIN may have completed before the receiver's FIN.
            counts.dropped += u64::from(!self.has_left(key));
            return None;
        }
        Some(key)
    }

    /// CTS: the receiver wants the first `len` bytes. Returns what follows.
    pub(super) fn on_cts(
        &mut self,
        peer: PeerId,
        (tx, rx): (u64, u64),
        (len, faulted): (u64, bool),
        ranges: Ranges,
        counts: &mut Counts,
    ) -> Option<(Key, Onward)> {
        let key = Key::from_wire(tx);
        let onward = self.of(peer, tx).and_then(|Pending { message, scheme }| {
            let segments = message.payload.segments();
            let end = segments.len().min(len as usize);
            let asks =
                matches!(scheme, Sender::Push(_) | Sender::Announced { .. } | Sender::Split(_));
            if asks && faulted && !segments.is_accessible(0, end, false) {
                // The receiver's FIN ends the send.
                return Some(Onward::Reply(Packet::Fault { rx }));
            }
            match scheme {
                Sender::Push(push) => push.on_cts(rx, end),
                Sender::Announced { .. } | Sender::Split(_) if ranges.as_slice().is_empty() => {
                    Some(Onward::Fragments { rx, flow: Flow { offset: 0, end, carrier: None } })
                }
                Sender::Announced { .. } | Sender::Split(_) => {
                    *scheme = Sender::Write(write::Sender::new(rx, end, ranges));
                    Some(Onward::Moved)
                }
                _ => None,
            }
        });
        if onward.is_none() {
            // A send that needs no FIN may have completed before this CTS came.
            counts.dropped += u64::from(!self.has_left(key));
        }
        onward.map(|onward| (key, onward))
    }

    /// RESUME: the receiver says from which byte on it wants fragments. `None`: it is dropped. Else what follows.
    pub(super) fn on_resume(
        &mut self,
        peer: PeerId,
        (tx, rx): (u64, u64),
        (from, len): (u64, u64),
        outbox: &mut Outbox,
    ) -> Option<(Key, Onward)> {
        let key = Key::from_wire(tx);
        let Pending { message, scheme } = self.of(peer, tx)?;
        match scheme {
            Sender::Put(put @ put::Sender::Over { .. }) => {
                put.say_gone(peer, rx, outbox);
                return Some((key, Onward::Waits));
            }
            Sender::Put(put) => put.end(peer, outbox),
            Sender::Deferred { .. } | Sender::Leaving | Sender::Write(_) | Sender::Finished(_) => {
                return None;
            }
            _ => {}
        }
        let end = message.payload.len().min(len as usize);
        let flow = Flow::fragments(end.min(from as usize), end);
        self.streams.retain(|k| *k != key);
        Some((
            key,
            if flow.is_over() { Onward::Sent(None) } else { Onward::Fragments { rx, flow } },
        ))
    }

    /// The outgoing stream to `peer` broke: the messages that it carried wait for the receiver's RESUME.
    pub(super) fn park_streamed(&mut self, peer: PeerId) {
        let Self { pending, streams, .. } = self;
        streams.retain(|key| {
            let Some(Pending { message, scheme }) = pending.get_mut(*key) else { return false };
            if message.peer != peer {
                return true;
            }
            match scheme {
                Sender::Push(push) => !push.park(),
                Sender::Fragments(fragments) if fragments.is_by_stream() => {
                    *scheme = Sender::Sent(Some(Carried::Fragments));
                    false
                }
                _ => true,
            }
        });
    }

    /// COOPERATE: the receiver begins a split copy of a message. False: it is dropped.
    pub(super) fn on_cooperate(
        &mut self,
        peer: PeerId,
        tx: u64,
        offset: u64,
        share: Share,
        ranges: Ranges,
    ) -> bool {
        let Some(Pending { message, scheme: scheme @ Sender::Announced { .. } }) =
            self.of(peer, tx)
        else {
            return false;
        };
        let Some(split) = split::Sender::new(message.payload.len(), offset, share, ranges) else {
            return false;
        };
        *scheme = Sender::Split(split);
        self.assists.push_back(Key::from_wire(tx));
        true
    }

    /// WINDOW: the receiver advertises a remote buffer.
    pub(super) fn on_window(
        &mut self,
        peer: PeerId,
        (tx, rx): (u64, u64),
        (offset, len): (u64, u64),
        remote: RemoteKey,
        (outbox, counts): (&mut Outbox, &mut Counts),
    ) {
        let inside = |message: &Outbound| {
            let end = offset.checked_add(len).filter(|_| len > 0);
            end.is_some_and(|end| end <= message.payload.len() as u64)
        };
        let pending = self.of(peer, tx).filter(|pending| inside(&pending.message));
        let Some(Pending { scheme, .. }) = pending else {
            counts.dropped += 1;
            return;
        };
        if let Sender::Announced { sees } = *scheme {
            let seen = sees.then_some(0);
            *scheme = Sender::Put(put::Sender::Writing { rx, queued: 0, seen });
        }
        let Sender::Put(put) = scheme else {
            counts.dropped += 1;
            return;
        };
        let place = (offset as usize, len as usize);
        let due = put.on_window((peer, Key::from_wire(tx), rx), place, remote, (outbox, counts));
        self.due.extend(due);
    }

    /// The device, or that of one lane, reports no write to `peer` any more. Returns the sends that it wrote. Their copies stay until they
    /// end: queue pairs of the kernel may outlive the lane and read them still, for a peer that does not know yet that it is lost.
    pub(super) fn forget_writes(&mut self, peer: PeerId, lane: Option<LaneId>) -> Vec<Key> {
        let by_it = |wrote: &put::Wrote| lane.is_none_or(|lane| lane.has(wrote.kind));
        let gone = self.wrote.keys_where(|wrote| wrote.peer == peer && by_it(wrote));
        let mut sends = Vec::with_capacity(gone.len());
        for token in gone {
            let Some(mut wrote) = self.wrote.remove(token) else { continue };
            if let Some(pending) = self.pending.get_mut(wrote.tx) {
                pending.message.lent.append(&mut wrote.parts);
            }
            sends.push(wrote.tx);
        }
        sends
    }

    /// What this endpoint has written is read, and delivered if that is confirmed. Returns the send.
    pub(super) fn on_written(
        &mut self,
        peer: PeerId,
        token: u64,
        counts: &mut Counts,
        host: &mut impl Host,
    ) -> Option<Key> {
        let key = Key::from_wire(token);
        let known = self.wrote.get(key).is_some_and(|wrote| wrote.peer == peer);
        let Some(wrote) = known.then(|| self.wrote.remove(key)).flatten() else {
            counts.dropped += 1;
            return None;
        };
        let Some(Pending { message, scheme: Sender::Put(put) }) = self.of(peer, wrote.tx.to_wire())
        else {
            return Some(wrote.tx);
        };
        if wrote.confirms
            && put.on_written(&wrote, message.payload.len())
            && !std::mem::replace(&mut message.completed, true)
        {
            host.complete(&message.completion());
        }
        Some(wrote.tx)
    }
}

/// Why a send ends whose device has failed.
pub(super) const UNREADABLE: (i32, Cause) = (libc::EIO, Cause::SenderUnreadable);
