//! Messages to oneself: a bounded queue in this process, and plain copies between buffers.
//!
//! # Safety
//! `get` and `put` move bytes between two buffers that the application of this very process lent to
//! a send and to a receive of one endpoint; their ranges come back to us unchanged in our own
//! packets.
#![allow(unsafe_code)]

use super::{BCOPY_LEAST, Caps, Handler, MAX_HEADER, PeerId, SendError};
use crate::memory::SegmentList;
use crate::sys::cma::Range;
use std::collections::VecDeque;

/// Messages in flight to oneself before the sender is asked to progress.
const QUEUE_LEN: usize = 256;
/// Largest bcopy payload, bytes; larger messages are copied once, from buffer to buffer.
const BCOPY_MAX: usize = 16 * 1024;
const _: () = assert!(BCOPY_MAX >= BCOPY_LEAST);
/// Messages delivered by one poll.
const BATCH: usize = 16;

#[derive(Debug)]
struct Message {
    header: [u8; MAX_HEADER],
    header_len: usize,
    payload: Vec<u8>,
}

/// The interface to this endpoint itself.
#[derive(Debug, Default)]
pub(crate) struct Loopback {
    queue: VecDeque<Message>,
    spare: Vec<Vec<u8>>,
    /// This endpoint is short of memory for payload: prefer descriptions.
    pub(crate) pressure: bool,
}

impl Loopback {
    pub(crate) const CAPS: Caps = Caps {
        short_max: MAX_HEADER + 64,
        bcopy_max: BCOPY_MAX,
        fragment_max: BCOPY_MAX,
        push_max: 0,
        stream_max: 0,
        stream_min: 0,
        window_max: 0,
        window_min: 0,
        get: true,
        put: true,
        one_sided: true,
        reach_read: false,
        reach_write: false,
        reach_read_min: usize::MAX,
        reach_write_min: usize::MAX,
        expose_max: 0,
        atomics: Some(true),
        collectives: Some(true),
        announces_room: false,
        outlives: false,
    };

    pub(crate) fn send(
        &mut self,
        header: &[u8],
        len: usize,
        mut pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        if self.queue.len() >= QUEUE_LEN {
            return Err(SendError::Again);
        }
        let mut message = Message {
            header: [0; MAX_HEADER],
            header_len: header.len().min(MAX_HEADER),
            payload: self.spare.pop().unwrap_or_default(),
        };
        for (to, from) in message.header.iter_mut().zip(header) {
            *to = *from;
        }
        message.payload.resize(len, 0);
        pack(0, &mut message.payload);
        self.queue.push_back(message);
        Ok(())
    }

    pub(crate) fn copy(from: &SegmentList, to: &SegmentList) -> usize {
        from.copy_to(0, to, 0, from.len().min(to.len()))
    }

    /// Our own ranges, back from a packet.
    pub(crate) fn list(ranges: &[Range]) -> Option<SegmentList> {
        let mut parts = [(std::ptr::null::<u8>(), 0usize); crate::memory::MAX_SEGMENTS];
        let n = ranges.len();
        for (to, from) in parts.iter_mut().zip(ranges) {
            *to = (std::ptr::with_exposed_provenance(from.addr as usize), from.len as usize);
        }
        // SAFETY: the ranges were lent by this process's application to the operation that put them
        // into the packet, which is still pending (see the module's safety note).
        unsafe { SegmentList::gather(parts.get(..n)?) }
    }

    #[inline(never)]
    pub(crate) fn poll(&mut self, me: PeerId, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        while n < BATCH {
            let Some(mut message) = self.queue.pop_front() else { break };
            let header = message.header.get(..message.header_len).unwrap_or(&[]);
            handler.on_message(me, header, &message.payload);
            message.payload.clear();
            if self.spare.len() < 16 {
                self.spare.push(message.payload);
            }
            n += 1;
        }
        n
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }
}
