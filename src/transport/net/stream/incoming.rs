//! The reading end of a stream.

use super::member::Member;
use super::sink::StreamSink;
use super::wire::{HEADER_LEN, HEADER_TAG_AT, Header, KEPT};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::tcp::Received;
use crate::transport::PeerId;
use crate::transport::job_key::same;
use crate::transport::net::reliable::Reliable;

/// Most reads in one turn.
const READS: usize = 16;

/// A stream from a peer.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) member: Member,
    pub(super) peer: PeerId,
    /// This endpoint's number of the connection that it belongs to.
    pub(super) id: u32,
    /// The sender's number of the stream.
    pub(super) number: u32,
    /// Its next frame waits for messages that come as datagrams.
    pub(super) waits: bool,
    sequence: u64,
    head: [u8; HEADER_LEN],
    filled: usize,
    frame: Option<Frame>,
    /// Payload whose destination is not known yet, or that has none.
    bounce: Vec<u8>,
}

/// A frame whose payload is arriving.
#[derive(Debug)]
struct Frame {
    header: Header,
    done: usize,
    target: Option<SegmentList>,
}

/// How a turn of reading ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// This many frames were delivered; the stream goes on.
    Goes(usize),
    /// It ended at a frame boundary.
    Closed,
    /// It broke.
    Lost(Errno),
}

impl Incoming {
    pub(super) fn new(member: Member, peer: PeerId, id: u32, number: u32) -> Self {
        Self {
            member,
            peer,
            id,
            number,
            waits: false,
            sequence: 0,
            head: [0; HEADER_LEN],
            filled: 0,
            frame: None,
            bounce: Vec::new(),
        }
    }

    /// A frame of it was delivered, or is arriving.
    pub(super) fn has_begun(&self) -> bool {
        self.sequence > 0
    }

    /// Reads a bounded amount.
    pub(super) fn read(&mut self, machine: &Reliable, sink: &mut impl StreamSink) -> Turn {
        let mut frames = 0;
        self.waits = false;
        for _ in 0..READS {
            if self.frame.is_none() && self.filled == HEADER_LEN {
                match self.begin(machine, sink) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(errno) => return Turn::Lost(errno),
                }
            }
            let received = match self.fill() {
                Ok(received) => received,
                Err(errno) => return Turn::Lost(errno),
            };
            let bytes = match received {
                Received::Bytes(bytes) => bytes,
                Received::Nothing => break,
                Received::End if self.frame.is_none() && self.filled == 0 => return Turn::Closed,
                Received::End => return Turn::Lost(Errno(libc::ECONNRESET)),
            };
            self.advance(bytes);
            if self.frame.as_ref().is_some_and(|frame| frame.done == frame.header.len) {
                self.deliver(sink);
                frames += 1;
            }
        }
        Turn::Goes(frames)
    }

    /// A header is complete. False: messages that come before it have not arrived yet.
    fn begin(&mut self, machine: &Reliable, sink: &mut impl StreamSink) -> Result<bool, Errno> {
        let broken = Errno(libc::EPROTO);
        let header = Header::decode(&self.head).ok_or(broken)?;
        let signed = self.head.get(..HEADER_TAG_AT).ok_or(broken)?;
        // Without a connection its key is unknown, and the tag cannot be checked.
        let tag = machine.sign(self.id, false, signed).ok_or(Errno(libc::ECONNRESET))?;
        if !same(tag, header.tag) || header.sequence != self.sequence {
            return Err(broken);
        }
        let delivered = machine.delivered(self.id).ok_or(Errno(libc::ECONNRESET))?;
        if delivered < header.after {
            self.waits = true;
            return Ok(false);
        }
        let target = sink.place(self.peer, header.message(), header.len);
        let kept = target.as_ref().map_or(0, SegmentList::len);
        if kept < header.len && self.bounce.len() < header.len {
            let more = header.len - self.bounce.len();
            self.bounce.try_reserve(more).map_err(|_| Errno(libc::ENOMEM))?;
            self.bounce.resize(header.len, 0);
        }
        self.sequence += 1;
        self.filled = 0;
        self.frame = Some(Frame { header, done: 0, target });
        Ok(true)
    }

    /// One system call: reads the rest of the payload, and the next header if it is there.
    fn fill(&mut self) -> Result<Received, Errno> {
        let Some(frame) = &self.frame else {
            let tail = self.head.get_mut(self.filled..).unwrap_or_default();
            return SegmentList::EMPTY.fill_from(self.member.fd(), tail);
        };
        let (len, done) = (frame.header.len, frame.done);
        let kept = frame.target.as_ref().map_or(0, SegmentList::len);
        match &frame.target {
            Some(target) if kept >= len => {
                target.slice(done, len - done).fill_from(self.member.fd(), &mut self.head)
            }
            Some(target) if done < kept => {
                target.slice(done, kept - done).fill_from(self.member.fd(), &mut [])
            }
            _ => {
                let rest = self.bounce.get_mut(done..len).unwrap_or_default();
                SegmentList::EMPTY.fill_from(self.member.fd(), rest)
            }
        }
    }

    fn advance(&mut self, bytes: usize) {
        match &mut self.frame {
            Some(frame) => {
                let rest = frame.header.len - frame.done;
                frame.done += bytes.min(rest);
                self.filled = bytes.saturating_sub(rest);
            }
            None => self.filled += bytes,
        }
    }

    fn deliver(&mut self, sink: &mut impl StreamSink) {
        let Some(Frame { header, target, .. }) = self.frame.take() else { return };
        match target {
            Some(_) => sink.on_placed(self.peer, header.message(), header.len),
            None => {
                let payload = self.bounce.get(..header.len).unwrap_or(&[]);
                sink.on_message(self.peer, header.message(), payload);
            }
        }
        // Each of many streams would keep the size of its longest frame.
        if self.bounce.capacity() > KEPT {
            self.bounce = Vec::new();
        }
    }

    /// Bytes of memory that it has beside its frames' destinations.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.bounce.capacity()
    }
}
