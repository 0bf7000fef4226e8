//! Moving the bytes of long messages. The receiver reads them where it can. Otherwise it advertises remote buffers, or
//! sends a CTS, and the sender writes the bytes or sends fragments.

use crate::protocol::engine::{Core, Engine};
use crate::protocol::index_list::Key;
use crate::protocol::packet::{Packet, PieceHeader, Ranges};
use crate::protocol::send::{Carrier, TxState, streams};
use crate::protocol::{Cause, Host};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::{Iface, Mode, PeerId, SendError, piece_of, slice_ranges};

/// Fragments of one message that are sent in one progress pass.
const FRAGMENT_BATCH: usize = 64;
/// Stream frames of one message that are sent in one progress pass.
const STREAM_BATCH: usize = 4;
/// Fragments after which the transport is flushed, so that the receiver works while the rest is sent.
const FLUSH_AFTER: usize = 16;

/// The receiver's side: it has asked for fragments.
#[derive(Debug)]
pub(in crate::protocol) struct Receiver {
    asked: Asked,
    /// See [`stream`](super::stream).
    pub(in crate::protocol) placing: bool,
}

/// How the receiver has asked for fragments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::protocol) enum Asked {
    /// By CTS: for all bytes.
    Cts,
    /// By RESUME, after a stream: for the missing bytes.
    AfterStream,
    /// By RESUME, after remote buffers.
    AfterPut,
}

impl Receiver {
    pub(in crate::protocol) fn new(asked: Asked) -> Self {
        Self { asked, placing: false }
    }

    pub(in crate::protocol) fn is_resumed(&self) -> bool {
        self.asked != Asked::Cts
    }

    /// Remote buffers were advertised to the sender before.
    pub(in crate::protocol) fn is_after_put(&self) -> bool {
        self.asked == Asked::AfterPut
    }
}

/// Outcome of one step of a send.
pub(in crate::protocol) enum Step {
    /// Nothing moved; more to do later.
    Again,
    /// Something moved; more to do.
    Moved,
    /// No further step is needed here.
    Done,
}

impl<I: Iface> Engine<I> {
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
                self.core.outbox.reply(peer, Packet::PutDone { rx });
                Step::Done
            }
            Err(SendError::Again) => Step::Again,
            // This process cannot read its own buffer either.
            Err(SendError::Unreachable(errno))
                if errno.0 == libc::EFAULT
                    && !request.payload.segments().is_accessible(0, end, false) =>
            {
                request.state = TxState::AwaitingAnswer;
                self.core.outbox.reply(peer, Packet::Fault { rx });
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
                        self.core.peers.count_outstanding(peer, -1);
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
                    self.core.peers.count_outstanding(peer, -1);
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
}

impl Core {
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
            self.outbox.reply(peer, Packet::Fault { rx });
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
}
