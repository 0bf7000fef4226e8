//! Moving the bytes of long messages. The receiver reads them where it can. Otherwise it advertises remote buffers, or
//! sends a CTS, and the sender writes the bytes or sends fragments.

use crate::protocol::engine::{Core, Engine};
use crate::protocol::index_list::Key;
use crate::protocol::packet::{Packet, PieceHeader, Ranges};
use crate::protocol::receive::{Active, Outcome};
use crate::protocol::send::{Carrier, TxState, streams};
use crate::protocol::{Cause, Host};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::{Iface, Mode, PeerId, SendError, piece_of, slice_ranges};
use std::collections::VecDeque;

/// Fragments of one message that are sent in one progress pass.
const FRAGMENT_BATCH: usize = 64;
/// Stream frames of one message that are sent in one progress pass.
const STREAM_BATCH: usize = 4;
/// Fragments after which the transport is flushed, so that the receiver works while the rest is sent.
const FLUSH_AFTER: usize = 16;

/// Outcome of one step of a transfer.
pub(in crate::protocol) enum Step {
    /// Nothing moved; more to do later.
    Again,
    /// Something moved; more to do.
    Moved,
    /// No further step is needed here.
    Done,
}

/// Whether process_vm_readv or process_vm_writev is not permitted or not available: another method may work.
pub(in crate::protocol) fn is_refusal(errno: Errno) -> bool {
    matches!(errno.0, libc::EPERM | libc::EACCES | libc::ENOSYS | libc::EOPNOTSUPP)
}

impl<I: Iface> Engine<I> {
    /// Advances the rendezvous receives whose bytes this endpoint has to move.
    pub(in crate::protocol) fn advance_pulls(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        self.core.turn += u64::from(!self.core.pulls.is_empty());
        for _ in 0..self.core.pulls.len() {
            let Some(key) = self.core.pulls.pop_front() else { break };
            // Also the next receive, so that its sender can copy before its turn comes.
            self.begin_sharing(key);
            if let Some(next) = self.core.pulls.front() {
                self.begin_sharing(*next);
            }
            match self.pull(key, host) {
                Step::Again => self.core.pulls.push_back(key),
                Step::Moved => {
                    n += 1;
                    self.core.pulls.push_back(key);
                }
                Step::Done => n += 1,
            }
        }
        n
    }

    fn pull(&mut self, key: Key, host: &mut impl Host) -> Step {
        let Some(active) = self.core.active.get(key) else { return Step::Done };
        if active.sharing.is_some() {
            return self.pull_shared(key, host);
        }
        if active.received == active.want {
            self.core.finish_active(key, host);
            return Step::Done;
        }
        let peer = active.peer;
        if active.lending.gone {
            self.take_back_declined(key);
            if self.core.active.get(key).is_some_and(|active| active.lending.out > 0) {
                return Step::Done; // the device is still reading, and its completion goes on
            }
            self.core.fail_active(key, libc::EIO, Cause::LinkBroke, host);
            return Step::Done;
        }
        if self.core.is_fed(peer) {
            return Step::Again; // the sender's fragments come, which cost less
        }
        let caps = self.iface.caps(peer);
        if !caps.get || active.ranges.as_slice().is_empty() || active.lending.begun {
            if let Some(step) = self.lend_windows(key, &caps) {
                return step;
            }
            self.core.clear_to_send(key, caps.one_sided, false);
            return Step::Done;
        }
        let chunk = (active.want - active.received).min(self.core.limits.bulk_chunk);
        let local = active.target.segments.slice(active.received, chunk);
        let mut remote = [Range::default(); crate::memory::MAX_SEGMENTS];
        let count = slice_ranges(
            active.ranges.as_slice(),
            active.received as u64,
            chunk as u64,
            &mut remote,
        );
        match self.iface.get(peer, &local, remote.get(..count).unwrap_or(&[])) {
            Ok(moved) => {
                self.core.counts.pulled_bytes += moved as u64;
                let Some(active) = self.core.active.get_mut(key) else { return Step::Done };
                active.received = (active.received + moved).min(active.want);
                if active.received < active.want {
                    return Step::Moved;
                }
                self.core.finish_active(key, host);
                Step::Done
            }
            Err(SendError::Again) => Step::Again,
            Err(SendError::Unreachable(errno)) => self.pull_failed(key, errno, host),
        }
    }

    /// The sender's memory cannot be read: asks the sender to send the bytes, if that may work.
    pub(in crate::protocol) fn pull_failed(
        &mut self,
        key: Key,
        errno: Errno,
        host: &mut impl Host,
    ) -> Step {
        let Some(active) = self.core.active.get(key) else { return Step::Done };
        let (from, want) = (active.received, active.want);
        // A sender may be able to read memory that other processes cannot: memfd_secret(2), device memory. Which side's
        // address was wrong, each side checks for its own buffer (PROTOCOL.md §4.5).
        let faulted = errno.0 == libc::EFAULT;
        if faulted && !active.target.segments.is_accessible(from, want - from, true) {
            self.core.fail_active(key, errno.0, Cause::BufferUnwritable, host);
        } else if faulted || is_refusal(errno) {
            let one_sided = self.iface.caps(active.peer).one_sided;
            self.core.clear_to_send(key, one_sided, faulted);
        } else {
            self.core.fail_active(key, errno.0, Cause::SenderUnreadable, host);
        }
        Step::Done
    }

    /// Advances the sends that a CTS has released, and those with unsolicited bytes left.
    pub(in crate::protocol) fn advance_streams(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        for _ in 0..self.core.streams.len() {
            let Some(key) = self.core.streams.pop_front() else { break };
            let step = match self.core.tx.get(key).map(|tx| &tx.state) {
                Some(TxState::Pushing { .. }) => self.push(key),
                Some(TxState::Streaming { .. } | TxState::Announced { .. }) => {
                    self.stream(key, host)
                }
                _ => Step::Done,
            };
            match step {
                Step::Again => self.core.streams.push_back(key),
                Step::Moved => {
                    n += 1;
                    self.core.streams.push_back(key);
                }
                Step::Done => n += 1,
            }
        }
        n
    }

    /// Writes a chunk into the receiver's buffer.
    fn push(&mut self, key: Key) -> Step {
        let chunk_max = self.core.limits.bulk_chunk;
        let Some(request) = self.core.tx.get_mut(key) else { return Step::Done };
        let peer = request.peer;
        let TxState::Pushing { rx, offset, end, ranges } = &mut request.state else {
            return Step::Done;
        };
        let (rx, end) = (*rx, *end);
        let chunk = (end - *offset).min(chunk_max);
        let mut remote = [Range::default(); crate::memory::MAX_SEGMENTS];
        let count = slice_ranges(ranges.as_slice(), *offset as u64, chunk as u64, &mut remote);
        let local = request.payload.segments().slice(*offset, chunk);
        let put = if self.iface.caps(peer).put {
            self.iface.put(peer, &local, remote.get(..count).unwrap_or(&[]))
        } else {
            Err(SendError::Unreachable(Errno(libc::EPERM)))
        };
        match put {
            Ok(moved) => {
                self.core.counts.pushed_bytes += moved as u64;
                *offset = (*offset + moved).min(end);
                if *offset < end {
                    return Step::Moved;
                }
                request.state = TxState::AwaitingAnswer;
                self.core.outbox.push_back((peer, Packet::PutDone { rx }));
                Step::Done
            }
            Err(SendError::Again) => Step::Again,
            // This process cannot read its own buffer either.
            Err(SendError::Unreachable(errno))
                if errno.0 == libc::EFAULT
                    && !request.payload.segments().is_accessible(0, end, false) =>
            {
                request.state = TxState::AwaitingAnswer;
                self.core.outbox.push_back((peer, Packet::Fault { rx }));
                Step::Done
            }
            Err(SendError::Unreachable(_)) => {
                // The receiver counts the bytes of fragments only: start from offset 0.
                request.state = TxState::Streaming { rx, offset: 0, end };
                Step::Moved
            }
        }
    }

    /// Sends fragments while there is room.
    fn stream(&mut self, key: Key, host: &mut impl Host) -> Step {
        let Some(request) = self.core.tx.get(key) else { return Step::Done };
        let peer = request.peer;
        let caps = self.iface.caps(peer);
        let piece = piece_of(request.payload.segments().len(), caps.fragment_max);
        for i in 0..FRAGMENT_BATCH {
            if i == FLUSH_AFTER {
                self.iface.flush();
            }
            let Some(request) = self.core.tx.get_mut(key) else { return Step::Done };
            let pushed = request.pushed;
            let (header, offset, end) = match &mut request.state {
                TxState::Streaming { rx, offset, end } => {
                    (PieceHeader::fragment(*rx, *offset as u64), offset, *end)
                }
                TxState::Announced { offset, asked } if *offset == pushed => {
                    if let Some((rx, end)) = asked.filter(|(_, end)| *end > pushed) {
                        request.state = TxState::Streaming { rx, offset: pushed, end };
                        continue;
                    }
                    if request.leaves {
                        // All of it is in the ring: the buffer is the application's again.
                        self.core.count_outstanding(peer, -1);
                        self.core.finish_send(key, None, host);
                    } else {
                        request.state = TxState::AwaitingAnswer;
                    }
                    return Step::Done;
                }
                // The receiver is short of memory for unsolicited bytes.
                TxState::Announced { asked: None, .. } if self.iface.under_pressure(peer) => {
                    return Step::Again;
                }
                TxState::Announced { offset, .. } => {
                    (PieceHeader::pushed(key.to_wire(), *offset as u64), offset, pushed)
                }
                _ => return Step::Done,
            };
            let at = *offset;
            if request.carrier == Carrier::Undecided {
                let streams = streams(&mut self.iface, &caps, peer, end - at);
                request.carrier = if streams { Carrier::Stream } else { Carrier::Fragments };
            }
            let streams = request.carrier == Carrier::Stream;
            if streams && i >= STREAM_BATCH {
                break;
            }
            let len = (end - at).min(if streams { caps.stream_max } else { piece });
            if streams {
                let part = request.payload.segments().slice(at, len);
                if self.iface.send_by_stream(peer, header.as_slice(), &part).is_err() {
                    // A broken stream is reported by `on_stream_lost`.
                    return if i > 0 { Step::Moved } else { Step::Again };
                }
                *offset = at + len;
                self.core.counts.stream_bytes += len as u64;
                if at + len == end && matches!(request.state, TxState::Streaming { .. }) {
                    request.state = TxState::AwaitingAnswer;
                    return Step::Done;
                }
                continue;
            }
            let payload = &request.payload;
            let sent = self.iface.send(peer, Mode::Fragment, header.as_slice(), len, |from, to| {
                payload.copy_out(at + from, to);
            });
            match sent {
                Ok(()) => {
                    *offset = at + len;
                    self.core.counts.fragment_bytes += len as u64;
                    if at + len == end && matches!(request.state, TxState::Streaming { .. }) {
                        request.state = TxState::AwaitingAnswer;
                        return Step::Done;
                    }
                }
                Err(SendError::Again) => return Step::Again,
                Err(SendError::Unreachable(errno)) => {
                    self.core.count_outstanding(peer, -1);
                    let error = Some((errno.0, Cause::PeerUnreachable));
                    self.core.finish_send(key, error, host);
                    return Step::Done;
                }
            }
        }
        Step::Moved
    }

    /// Sends the first unsolicited bytes of a message that was just announced.
    pub(in crate::protocol) fn begin_push(&mut self, key: Key, host: &mut impl Host) {
        if self.core.tx.get(key).is_some_and(|request| request.carrier == Carrier::Stream) {
            self.iface.flush(); // the announcement
        }
        if !matches!(self.stream(key, host), Step::Done) {
            self.core.streams.push_back(key);
        }
        self.iface.flush();
    }

    /// Sends the queued replies while there is room.
    pub(in crate::protocol) fn flush_outbox(&mut self, host: &mut impl Host) -> usize {
        let mut answers = std::mem::take(&mut self.core.outbox);
        let n = self.send_answers(&mut answers, host);
        answers.append(&mut self.core.outbox);
        self.core.outbox = answers;
        if n > 0 {
            self.iface.flush();
        }
        n
    }

    /// Sends the replies that are not urgent: they are not flushed, and may share a packet with others.
    pub(in crate::protocol) fn flush_late(&mut self, host: &mut impl Host) -> usize {
        let mut answers = std::mem::take(&mut self.core.late);
        let n = self.send_answers(&mut answers, host);
        self.core.late = answers;
        n
    }

    /// Sends those of `answers` that there is room for, in order for each peer. They may be coalesced with others until
    /// the next `flush`.
    fn send_answers(
        &mut self,
        answers: &mut VecDeque<(PeerId, Packet)>,
        host: &mut impl Host,
    ) -> usize {
        let mut n = 0;
        let mut full: Vec<PeerId> = Vec::new();
        for _ in 0..answers.len() {
            let Some((peer, packet)) = answers.pop_front() else { break };
            if full.contains(&peer) {
                answers.push_back((peer, packet));
                continue;
            }
            match self.iface.send(peer, Mode::Late, packet.encode().as_slice(), 0, |_, _| ()) {
                Ok(()) => n += 1,
                Err(SendError::Again) => {
                    full.push(peer);
                    answers.push_back((peer, packet));
                }
                // The peer needs this reply. Later there will be resources for it, or the peer departs.
                Err(SendError::Unreachable(errno)) if errno.is_shortage() => {
                    full.push(peer);
                    answers.push_back((peer, packet));
                }
                Err(SendError::Unreachable(errno)) => {
                    n += 1;
                    self.answer_failed(peer, packet, errno, host);
                }
            }
        }
        n
    }

    fn answer_failed(&mut self, peer: PeerId, packet: Packet, errno: Errno, host: &mut impl Host) {
        match packet {
            Packet::Cts { rx, .. } => {
                let key = Key::from_wire(rx);
                if !self.core.needs_no_cts(key) {
                    self.core.fail_unanswered(key, errno, host);
                }
            }
            Packet::Window { rx, ticket, .. } => {
                let key = Key::from_wire(rx);
                if self.take_back_untold(peer, key, &ticket) {
                    self.core.fail_unanswered(key, errno, host);
                }
            }
            // The peer that waited for this reply has departed.
            _ => self.core.counts.dropped += 1,
        }
    }
}

impl Core {
    /// Sends a CTS. `one_sided`: the sender may be able to write to the buffer. `faulted`: the sender has to check
    /// whether it can read its own buffer.
    fn clear_to_send(&mut self, key: Key, one_sided: bool, faulted: bool) {
        let Some(active) = self.active.get_mut(key) else { return };
        active.cleared = true;
        active.received = 0;
        self.attentive = true;
        let packet = Packet::Cts {
            tx: active.tx,
            rx: key.to_wire(),
            len: active.want as u64,
            faulted,
            ranges: if one_sided {
                Ranges::new(active.target.segments.ranges())
            } else {
                Ranges::NONE
            },
        };
        self.outbox.push_back((active.peer, packet));
    }

    pub(in crate::protocol) fn finish_active(&mut self, key: Key, host: &mut impl Host) {
        let Some(active) = self.active.remove(key) else { return };
        self.pushed.remove(active.peer, active.tx);
        let fin = (active.peer, Packet::Fin { tx: active.tx, status: 0 });
        if active.sees && active.lending.seen as u64 == active.len {
            self.late.push_back(fin);
        } else if !active.leaves || active.len > active.want as u64 {
            // A sender whose unsolicited bytes do not all fit may stop sending them.
            self.outbox.push_back(fin);
        }
        let overflow = (active.len as usize).saturating_sub(active.want);
        let Active { peer, envelope, target, received, .. } = active;
        let outcome = Outcome { len: received, overflow, error: None };
        self.finish_receive(peer, &envelope, &target, outcome, host);
    }

    /// Ends a rendezvous receive with an error and tells the sender.
    pub(in crate::protocol) fn fail_active(
        &mut self,
        key: Key,
        error: i32,
        cause: Cause,
        host: &mut impl Host,
    ) {
        let Some(active) = self.active.remove(key) else { return };
        self.pushed.remove(active.peer, active.tx);
        let status = error.unsigned_abs();
        self.outbox.push_back((active.peer, Packet::Fin { tx: active.tx, status }));
        let Active { peer, envelope, target, received, .. } = active;
        let outcome = Outcome::failed(received, error, cause);
        self.finish_receive(peer, &envelope, &target, outcome, host);
    }

    /// The sender cannot be reached, so the bytes of a receive cannot be requested.
    fn fail_unanswered(&mut self, key: Key, errno: Errno, host: &mut impl Host) {
        if let Some(active) = self.active.remove(key) {
            self.pushed.remove(active.peer, active.tx);
            let Active { peer, envelope, target, received, .. } = active;
            let outcome = Outcome::failed(received, errno.0, Cause::PeerUnreachable);
            self.finish_receive(peer, &envelope, &target, outcome, host);
        }
    }

    pub(in crate::protocol) fn on_cts(
        &mut self,
        peer: PeerId,
        (tx, rx): (u64, u64),
        len: u64,
        faulted: bool,
        ranges: Ranges,
    ) {
        let key = Key::from_wire(tx);
        let request = self.tx.get_mut(key).filter(|request| {
            request.peer == peer
                && matches!(
                    request.state,
                    TxState::AwaitingAnswer | TxState::Announced { asked: None, .. }
                )
        });
        let Some(request) = request else {
            // A send that needs no FIN may have completed before this CTS came.
            self.counts.dropped += u64::from(!self.has_left(key));
            return;
        };
        let segments = request.payload.segments();
        let end = segments.len().min(len as usize);
        if faulted && !segments.is_accessible(0, end, false) {
            // The receiver's FIN ends the send.
            self.outbox.push_back((peer, Packet::Fault { rx }));
            return;
        }
        if let TxState::Announced { asked, .. } = &mut request.state {
            *asked = Some((rx, end));
            return; // it is in `streams` already
        }
        if request.pushed > 0 {
            if end > request.pushed {
                request.state = TxState::Streaming { rx, offset: request.pushed, end };
                self.streams.push_back(key);
            }
            return;
        }
        request.state = if ranges.as_slice().is_empty() {
            TxState::Streaming { rx, offset: 0, end }
        } else {
            TxState::Pushing { rx, offset: 0, end, ranges }
        };
        self.streams.push_back(key);
    }

    pub(in crate::protocol) fn on_fragment(
        &mut self,
        peer: PeerId,
        rx: u64,
        offset: u64,
        payload: &[u8],
        host: &mut impl Host,
    ) {
        let key = Key::from_wire(rx);
        let received = self.active.get(key).map_or(0, |active| active.received as u64);
        // After a RESUME fragments may repeat bytes that are here (PROTOCOL.md §4.11).
        let known = usize::try_from(received.saturating_sub(offset)).unwrap_or(usize::MAX);
        let payload = payload.get(known..).unwrap_or(&[]);
        let active = self.active.get_mut(key).filter(|active| {
            active.peer == peer
                && active.cleared
                && !active.placing
                && offset <= received
                && (known == 0 || active.resumed)
                && active.received + payload.len() <= active.want
        });
        let Some(active) = active else {
            self.counts.dropped += 1;
            return;
        };
        active.received += active.place(active.received, payload, &self.limits);
        if active.received == active.want {
            self.finish_active(key, host);
        }
    }

    /// FAULT: the sender cannot read its own memory.
    pub(in crate::protocol) fn on_fault(&mut self, peer: PeerId, rx: u64, host: &mut impl Host) {
        let key = Key::from_wire(rx);
        if self.active.get(key).is_some_and(|a| a.peer == peer && a.cleared && !a.placing) {
            self.fail_active(key, libc::EFAULT, Cause::SenderUnreadable, host);
        } else {
            self.counts.dropped += 1;
        }
    }

    pub(in crate::protocol) fn on_put_done(&mut self, peer: PeerId, rx: u64, host: &mut impl Host) {
        let key = Key::from_wire(rx);
        let active = self.active.get_mut(key).filter(|a| a.peer == peer && a.cleared && !a.placing);
        let Some(active) = active else {
            self.counts.dropped += 1;
            return;
        };
        active.received = active.want;
        self.finish_active(key, host);
    }
}
