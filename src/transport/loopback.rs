//! Messages of an endpoint to itself: a bounded queue in this process, and plain copies between buffers.
//!
//! # Safety
//! `get` and `put` move bytes between two buffers that the application of this process lent to a send
//! and to a receive of one endpoint; their ranges come back unchanged in packets that this endpoint
//! wrote itself.
#![allow(unsafe_code)]

use super::peers::PeerTable;
use super::{
    Access, Address, BCOPY_LEAST, Caps, Contact, ELSEWHERE, Handler, MAX_HEADER, Messages, Mode,
    OneSided, Opening, Pack, PeerId, Put, Remote, RemoteKey, SendError, Sharing, Streaming,
    Transport,
};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::sys::event::Doorbell;
use crate::sys::late_set::LateSet;
use std::collections::VecDeque;
use std::sync::Arc;

/// Messages in flight before the sender must make progress.
const QUEUE_LEN: usize = 256;
/// Largest bcopy payload, bytes. Larger messages are copied once, from buffer to buffer.
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

/// The transport from an endpoint to itself.
#[derive(Debug)]
pub(crate) struct Loopback {
    my_id: PeerId,
    queue: VecDeque<Message>,
    spare: Vec<Vec<u8>>,
    /// The endpoint is short of memory for payload: senders should send descriptions instead.
    pressure: bool,
    /// Wakes a thread that sleeps; made before the first sleep.
    doorbell: Option<Doorbell>,
    epoll: Arc<LateSet>,
    sleeping: bool,
    /// The doorbell rings.
    rings: bool,
}

impl Loopback {
    pub(crate) fn copy(from: &SegmentList, to: &SegmentList) -> usize {
        from.copy_to(0, to, 0, from.len().min(to.len()))
    }

    /// The endpoint's own ranges, as they came back in a packet.
    pub(crate) fn list(ranges: &[Range]) -> Option<SegmentList> {
        let mut parts = [(std::ptr::null::<u8>(), 0usize); crate::memory::MAX_SEGMENTS];
        let n = ranges.len();
        for (to, from) in parts.iter_mut().zip(ranges) {
            *to = (std::ptr::with_exposed_provenance(from.addr as usize), from.len as usize);
        }
        // SAFETY: this process's application lent the ranges to the operation that put them into the
        // packet, and that operation is still pending (see the module's safety note).
        unsafe { SegmentList::gather(parts.get(..n)?) }
    }

    #[inline(never)]
    fn deliver(&mut self, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        while n < BATCH {
            let Some(mut message) = self.queue.pop_front() else { break };
            let header = message.header.get(..message.header_len).unwrap_or(&[]);
            handler.on_message(self.my_id, header, &message.payload);
            message.payload.clear();
            if self.spare.len() < 16 {
                self.spare.push(message.payload);
            }
            n += 1;
        }
        n
    }
}

impl Messages for Loopback {
    fn caps(&self, _: PeerId) -> Caps {
        Caps {
            short_max: MAX_HEADER + 64,
            bcopy_max: BCOPY_MAX,
            fragment_max: BCOPY_MAX,
            get: true,
            put: true,
            itself: true,
            one_sided: true,
            atomics: Some(true),
            collectives: Some(true),
            ..Caps::UNKNOWN
        }
    }

    fn send(
        &mut self,
        _: PeerId,
        _: Mode,
        header: &[u8],
        len: usize,
        mut pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        self.push(header, len, &mut pack)
    }

    fn under_pressure(&self, _: PeerId) -> bool {
        self.pressure
    }

    fn set_pressure(&mut self, on: bool) {
        self.pressure = on;
    }
}

impl Loopback {
    /// See [`Messages::send`].
    fn push(&mut self, header: &[u8], len: usize, pack: &mut Pack<'_>) -> Result<(), SendError> {
        if self.queue.len() >= QUEUE_LEN {
            return Err(SendError::Again);
        }
        self.rouse();
        let mut payload = self.spare.pop().unwrap_or_default();
        payload.try_reserve(len).map_err(|_| SendError::Again)?;
        let header_len = header.len().min(MAX_HEADER);
        let mut message = Message { header: [0; MAX_HEADER], header_len, payload };
        for (to, from) in message.header.iter_mut().zip(header) {
            *to = *from;
        }
        message.payload.resize(len, 0);
        pack(0, &mut message.payload);
        self.queue.push_back(message);
        Ok(())
    }

    /// Memory of this process.
    fn at(place: &Remote, len: usize) -> Result<SegmentList, SendError> {
        let list = Self::list(&[Range { addr: place.offset, len: len as u64 }]);
        list.filter(|_| place.key == RemoteKey::ADDRESSES)
            .ok_or(SendError::Unreachable(Errno(libc::EINVAL)))
    }
}

impl OneSided for Loopback {
    fn put(
        &mut self,
        _: PeerId,
        local: &SegmentList,
        to: &Remote,
        _: Put,
    ) -> Result<Access, SendError> {
        Ok(Access::Moved(Self::copy(local, &Self::at(to, local.len())?)))
    }

    fn get(
        &mut self,
        _: PeerId,
        local: &SegmentList,
        from: &Remote,
        _: u64,
    ) -> Result<Access, SendError> {
        Ok(Access::Moved(Self::copy(&Self::at(from, local.len())?, local)))
    }
}

impl Streaming for Loopback {}
impl Sharing for Loopback {}

impl Transport for Loopback {
    const NAME: &'static str = "loopback";
    const TWO_WAY: bool = true;

    fn open(opening: &mut Opening<'_>) -> Result<Option<Self>, Errno> {
        Ok(Some(Self {
            my_id: opening.my_id,
            queue: VecDeque::new(),
            spare: Vec::new(),
            pressure: false,
            doorbell: None,
            epoll: opening.epoll.clone(),
            sleeping: false,
            rings: false,
        }))
    }

    fn connect(&mut self, peer: PeerId, _: &Address, _: bool) -> Result<Contact, SendError> {
        Ok(if peer == self.my_id { Contact::Linked } else { Contact::Elsewhere })
    }

    #[inline]
    fn is_connected(&self, peer: PeerId) -> bool {
        peer == self.my_id
    }

    #[inline]
    fn poll(&mut self, handler: &mut impl Handler) -> usize {
        if self.queue.is_empty() { 0 } else { self.deliver(handler) }
    }

    fn turn(&mut self, _: &mut PeerTable, handler: &mut impl Handler) -> usize {
        self.poll(handler)
    }

    fn every_ns(_: bool, _: bool) -> u64 {
        u64::MAX
    }

    fn sleep(&mut self) -> bool {
        if !self.queue.is_empty() {
            return false;
        }
        if self.doorbell.is_none() {
            let added = |bell: &Doorbell| self.epoll.add_lasting(bell.fd(), ELSEWHERE).is_ok();
            self.doorbell = Doorbell::new().ok().filter(added);
        }
        let Some(doorbell) = &self.doorbell else { return false };
        if std::mem::take(&mut self.rings) {
            doorbell.silence();
        }
        self.sleeping = true;
        true
    }

    fn awake(&mut self) {
        self.sleeping = false;
        if std::mem::take(&mut self.rings) {
            self.doorbell.iter().for_each(|bell| _ = bell.silence());
        }
    }

    fn rouse(&mut self) {
        if self.sleeping && !self.rings {
            self.rings = true;
            self.doorbell.iter().for_each(Doorbell::ring);
        }
    }
}
