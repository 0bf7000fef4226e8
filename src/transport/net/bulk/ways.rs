//! All bulk paths of an endpoint as one: the kernel's rv module first; RC queue pairs of the process where a peer has
//! no module, or its module and this one cannot connect (PROTOCOL.md §7.15).

use super::{Bulk, BulkCounts, BulkSink, STALE};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::event::Epoll;
use crate::transport::net::agreement::message::{Control, Message, Way};
use crate::transport::{Chunk, Exposed, PeerId, Reach, SendError, Spot, Ticket, Windows};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

/// Most refusals that may wait to be sent.
const REFUSALS_MAX: usize = 4096;

/// One of the bulk paths, if it exists.
type Path = Option<Box<dyn Bulk>>;

/// All bulk paths of an endpoint.
#[derive(Debug)]
pub(crate) struct Ways {
    rv: Path,
    rc: Path,
    epoll: Epoll,
    /// Messages about kinds of paths that do not exist here, and messages that could not be sent before.
    controls: VecDeque<(PeerId, Control)>,
}

/// Sink of one of the paths. A layer that is told that remote buffers of a peer are lost takes back all of that peer's:
/// so those on the other path end first.
struct Guard<'a> {
    other: &'a mut Path,
    sink: &'a mut dyn BulkSink,
}

impl BulkSink for Guard<'_> {
    fn on_filled(&mut self, peer: PeerId, token: u64) {
        self.sink.on_filled(peer, token);
    }

    fn on_written(&mut self, peer: PeerId, chunk: Chunk) {
        self.sink.on_written(peer, chunk);
    }

    fn on_lost(&mut self, peer: PeerId) {
        if let Some(other) = self.other {
            other.leave(peer);
        }
        self.sink.on_lost(peer);
    }

    fn on_reached(&mut self, peer: PeerId, token: u64) {
        self.sink.on_reached(peer, token);
    }

    fn on_concealed(&mut self, region: u64) {
        self.sink.on_concealed(region);
    }
}

const NO_WAY: SendError = SendError::Unreachable(Errno(libc::EOPNOTSUPP));

impl Ways {
    /// The two paths as one; `None`: neither exists. Errors: EMFILE, ENFILE.
    pub(crate) fn of(rv: Path, rc: Path) -> Result<Path, Errno> {
        if rv.is_none() && rc.is_none() {
            return Ok(None);
        }
        let epoll = Epoll::new()?;
        for way in [&rv, &rc].into_iter().flatten() {
            epoll.add(way.fd(), 0)?;
        }
        Ok(Some(Box::new(Self { rv, rc, epoll, controls: VecDeque::new() })))
    }

    fn all(&self) -> impl Iterator<Item = &Box<dyn Bulk>> {
        self.rv.iter().chain(&self.rc)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn Bulk>> {
        self.rv.iter_mut().chain(&mut self.rc)
    }

    fn of_connection(&mut self, number: u32) -> &mut Path {
        match Way::of_connection(number) {
            Way::Rc => &mut self.rc,
            Way::Rv | Way::Stream => &mut self.rv,
        }
    }
}

impl Bulk for Ways {
    fn sizes(&self) -> (usize, usize) {
        let smaller = |a: (usize, usize), b: (usize, usize)| (a.0.min(b.0), a.1.max(b.1));
        self.all().map(|way| way.sizes()).reduce(smaller).unwrap_or_default()
    }

    fn windows(&mut self, peer: PeerId, now: u64) -> Windows {
        let by_rv = self.rv.as_mut().map_or(Windows::No, |rv| rv.windows(peer, now));
        match (by_rv, &mut self.rc) {
            (Windows::No, Some(rc)) => rc.windows(peer, now),
            // RC serves until the rv module's connection is ready.
            (Windows::Later, Some(rc)) if rc.is_ready(peer) => Windows::Ready,
            (by_rv, _) => by_rv,
        }
    }

    fn lend(
        &mut self,
        peer: PeerId,
        part: &SegmentList,
        token: u64,
        now: u64,
    ) -> Result<Ticket, SendError> {
        let by = self.all_mut().find(|way| way.is_ready(peer));
        by.ok_or(NO_WAY)?.lend(peer, part, token, now)
    }

    fn take_back(&mut self, peer: PeerId, ticket: &Ticket) {
        if let Some(way) = self.of_connection(ticket.connection) {
            way.take_back(peer, ticket);
        }
    }

    fn write(
        &mut self,
        peer: PeerId,
        payload: &SegmentList,
        ticket: &Ticket,
        chunk: Chunk,
        now: u64,
    ) -> Result<(), SendError> {
        let way = self.of_connection(ticket.connection).as_mut().ok_or(NO_WAY)?;
        way.write(peer, payload, ticket, chunk, now)
    }

    /// As for `expose`: only RC, and not where the module serves the peer.
    fn offer(
        &mut self,
        peer: PeerId,
        payload: &SegmentList,
        near: bool,
        now: u64,
    ) -> Option<Ticket> {
        if self.rv.as_mut().is_some_and(|rv| rv.windows(peer, now) != Windows::No) {
            return None;
        }
        self.rc.as_mut()?.offer(peer, payload, near, now)
    }

    fn withdraw(&mut self, peer: PeerId, ticket: &Ticket) {
        if let Some(way) = self.of_connection(ticket.connection) {
            way.withdraw(peer, ticket);
        }
    }

    fn sees_writes(&mut self, ticket: &Ticket) -> bool {
        let way = self.of_connection(ticket.connection).as_mut();
        way.is_some_and(|way| way.sees_writes(ticket))
    }

    /// The module has no writes without an immediate, and where it serves a peer, no queue pair of the process is made.
    fn expose(
        &mut self,
        peer: PeerId,
        region: (u64, u32),
        memory: &SegmentList,
        rights: (bool, bool),
        now: u64,
    ) -> Exposed {
        if self.rv.as_mut().is_some_and(|rv| rv.windows(peer, now) != Windows::No) {
            return Exposed::No;
        }
        let rc = self.rc.as_mut();
        rc.map_or(Exposed::No, |rc| rc.expose(peer, region, memory, rights, now))
    }

    fn epoch(&self, peer: PeerId) -> Option<u32> {
        self.rc.as_ref()?.epoch(peer)
    }

    fn conceal(&mut self, region: u64) {
        if let Some(rc) = &mut self.rc {
            rc.conceal(region);
        }
    }

    fn reach(
        &mut self,
        peer: PeerId,
        spot: &Spot,
        local: &SegmentList,
        how: Reach,
        now: u64,
    ) -> Result<(), SendError> {
        let way = self.of_connection(spot.epoch).as_mut().ok_or(STALE)?;
        way.reach(peer, spot, local, how, now)
    }

    fn flush(&mut self) {
        if let Some(rc) = &mut self.rc {
            rc.flush();
        }
    }

    fn on_control(&mut self, peer: PeerId, message: &[u8], now: u64, sink: &mut dyn BulkSink) {
        let Self { rv, rc, controls, .. } = self;
        let (way, other) = match Way::byte_of(message) {
            Some(byte) if byte == Way::Rv as u8 => (rv, rc),
            Some(byte) if byte == Way::Rc as u8 => (rc, rv),
            _ => (&mut None, rc),
        };
        if let Some(way) = way {
            return way.on_control(peer, message, now, &mut Guard { other, sink });
        }
        let refusal = Message::refuse_unknown(message);
        if let Some(refusal) = refusal.filter(|_| controls.len() < REFUSALS_MAX) {
            controls.push_back((peer, refusal));
        }
    }

    fn is_ready(&self, peer: PeerId) -> bool {
        self.all().any(|way| way.is_ready(peer))
    }

    fn leave(&mut self, peer: PeerId) {
        self.all_mut().for_each(|way| way.leave(peer));
    }

    fn next_control(&mut self) -> Option<(PeerId, Control)> {
        let first = self.controls.pop_front();
        first.or_else(|| self.all_mut().find_map(|way| way.next_control()))
    }

    fn put_back(&mut self, control: (PeerId, Control)) {
        self.controls.push_front(control);
    }

    #[inline]
    fn has_work(&self) -> bool {
        !self.controls.is_empty() || self.all().any(|way| way.has_work())
    }

    fn poll(&mut self, now: u64, sink: &mut dyn BulkSink) -> usize {
        let Self { rv, rc, .. } = self;
        let mut n = 0;
        if let Some(rv) = rv {
            n += rv.poll(now, &mut Guard { other: rc, sink });
        }
        if let Some(rc) = rc {
            n += rc.poll(now, &mut Guard { other: rv, sink });
        }
        n
    }

    fn renew(&mut self, now: u64, sink: &mut dyn BulkSink) {
        let Self { rv, rc, .. } = self;
        if let Some(rv) = rv {
            rv.renew(now, &mut Guard { other: rc, sink });
        }
        if let Some(rc) = rc {
            rc.renew(now, &mut Guard { other: rv, sink });
        }
    }

    fn settle(&mut self, now: u64, sink: &mut dyn BulkSink) {
        let Self { rv, rc, .. } = self;
        if let Some(rc) = rc {
            rc.settle(now, &mut Guard { other: rv, sink });
        }
    }

    fn forget(&mut self, peer: PeerId) {
        self.all_mut().for_each(|way| way.forget(peer));
        self.controls.retain(|(to, _)| *to != peer);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.fd()
    }

    fn sleep(&mut self) -> bool {
        self.controls.is_empty() && self.all_mut().all(|way| way.sleep())
    }

    fn counts(&self) -> BulkCounts {
        let mut sum = BulkCounts::default();
        self.all().for_each(|way| sum += way.counts());
        sum
    }

    fn registrations(&self) -> Option<String> {
        let all: Vec<String> = self.all().filter_map(|way| way.registrations()).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}
