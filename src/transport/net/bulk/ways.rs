//! All bulk paths of an endpoint as one: the kernel's rv module first; RC queue pairs of the process where a peer has
//! no module, or its module and this one cannot connect (PROTOCOL.md §7.15).

use super::key::Key;
use super::{Bulk, BulkCounts, BulkSink, STALE, What};
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::event::Epoll;
use crate::sys::numbers::NumberMap;
use crate::transport::net::agreement::message::{Control, Message, Way};
use crate::transport::{
    Access, PeerId, Prepared, Purpose, Registered, Remote, RemoteKey, SendError,
};
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
    /// RC queue pairs at further ports of the endpoint, and the number of the port at which a peer is reached, if it is not
    /// the first.
    rails: Vec<Box<dyn Bulk>>,
    at: NumberMap<PeerId, usize>,
    epoll: Epoll,
    /// Messages about kinds of paths that do not exist here, and messages that could not be sent before.
    controls: VecDeque<(PeerId, Control)>,
}

/// Sink of one of the paths. A layer that is told that remote buffers of a peer are lost takes back all of that peer's:
/// so those on the other path end first.
struct Guard<'a> {
    other: &'a mut Path,
    now: u64,
    sink: &'a mut dyn BulkSink,
}

impl BulkSink for Guard<'_> {
    fn on_notify(&mut self, peer: PeerId, token: u64) {
        self.sink.on_notify(peer, token);
    }

    fn on_done(&mut self, peer: PeerId, token: u64) {
        self.sink.on_done(peer, token);
    }

    fn on_lost(&mut self, peer: PeerId) {
        if let Some(other) = self.other {
            other.leave(peer, self.now, self.sink);
        }
        self.sink.on_lost(peer);
    }

    fn on_key_void(&mut self, peer: PeerId, key: &RemoteKey) {
        self.sink.on_key_void(peer, key);
    }
}

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
        let (rails, at, controls) = (Vec::new(), NumberMap::default(), VecDeque::new());
        Ok(Some(Box::new(Self { rv, rc, rails, at, epoll, controls })))
    }

    fn all(&self) -> impl Iterator<Item = &Box<dyn Bulk>> {
        self.rv.iter().chain(&self.rc).chain(&self.rails)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn Bulk>> {
        self.rv.iter_mut().chain(&mut self.rc).chain(&mut self.rails)
    }

    /// RC queue pairs at the port where `peer` is reached.
    fn rc_of(&mut self, peer: PeerId) -> Option<&mut Box<dyn Bulk>> {
        match self.at.get(&peer) {
            Some(rail) => self.rails.get_mut(rail - 1),
            None => self.rc.as_mut(),
        }
    }

    /// The path to `peer` whose key this is.
    fn of_key(&mut self, peer: PeerId, key: &RemoteKey) -> Option<&mut Box<dyn Bulk>> {
        match Way::of_connection(Key::decode(key)?.connection) {
            Way::Rc => self.rc_of(peer),
            Way::Rv | Way::Stream => self.rv.as_mut(),
        }
    }
}

impl Bulk for Ways {
    fn sizes(&self) -> (usize, usize) {
        let smaller = |a: (usize, usize), b: (usize, usize)| (a.0.min(b.0), a.1.max(b.1));
        self.all().map(|way| way.sizes()).reduce(smaller).unwrap_or_default()
    }

    fn lane(&mut self, peer: PeerId, now: u64) -> Prepared {
        let by_rv = self.rv.as_mut().map_or(Prepared::No, |rv| rv.lane(peer, now));
        match (by_rv, self.rc_of(peer)) {
            (Prepared::No, Some(rc)) => rc.lane(peer, now),
            // RC serves until the rv module's connection is ready.
            (Prepared::Later, Some(rc)) if rc.is_ready(peer) => Prepared::Ready,
            (by_rv, _) => by_rv,
        }
    }

    /// The module has neither writes without an immediate nor reads; and where it serves a peer, no queue pair of the
    /// process is made.
    fn register(
        &mut self,
        peer: PeerId,
        memory: &SegmentList,
        purpose: Purpose,
        near: bool,
        now: u64,
    ) -> Registered {
        let by = match purpose {
            Purpose::Receive { .. } => self.all_mut().find(|way| way.is_ready(peer)),
            _ if self.rv.as_mut().is_some_and(|rv| rv.lane(peer, now) != Prepared::No) => None,
            _ => self.rc_of(peer),
        };
        by.map_or(Registered::No, |way| way.register(peer, memory, purpose, near, now))
    }

    fn invalidate(&mut self, peer: PeerId, key: &RemoteKey) {
        if let Some(way) = self.of_key(peer, key) {
            way.invalidate(peer, key);
        }
    }

    fn is_current(&self, peer: PeerId, key: &RemoteKey) -> bool {
        self.all().any(|way| way.is_current(peer, key))
    }

    fn access(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        at: &Remote,
        what: What,
        now: u64,
    ) -> Result<Access, SendError> {
        self.of_key(peer, &at.key).ok_or(STALE)?.access(peer, local, at, what, now)
    }

    fn flush(&mut self) {
        self.rc.iter_mut().chain(&mut self.rails).for_each(|rc| rc.flush());
    }

    fn on_control(&mut self, peer: PeerId, message: &[u8], now: u64, sink: &mut dyn BulkSink) {
        let Self { rv, rc, rails, at, controls, .. } = self;
        let by_rail = at.get(&peer).copied();
        let (way, other) = match (Way::byte_of(message), by_rail) {
            (Some(byte), _) if byte == Way::Rv as u8 => (rv.as_mut(), rc),
            (Some(byte), Some(rail)) if byte == Way::Rc as u8 => (rails.get_mut(rail - 1), rv),
            (Some(byte), None) if byte == Way::Rc as u8 => (rc.as_mut(), rv),
            _ => (None, rc),
        };
        if let Some(way) = way {
            return way.on_control(peer, message, now, &mut Guard { other, now, sink });
        }
        let refusal = Message::refuse_unknown(message);
        if let Some(refusal) = refusal.filter(|_| controls.len() < REFUSALS_MAX) {
            controls.push_back((peer, refusal));
        }
    }

    fn is_ready(&self, peer: PeerId) -> bool {
        self.all().any(|way| way.is_ready(peer))
    }

    fn on_rail(
        &mut self,
        peer: PeerId,
        rail: usize,
        open: &mut dyn FnMut(usize) -> Option<Box<dyn Bulk>>,
        (now, sink): (u64, &mut dyn BulkSink),
    ) {
        while self.rails.len() < rail {
            let Some(new) = open(self.rails.len() + 1) else { break };
            if self.epoll.add(new.fd(), 0).is_err() {
                break;
            }
            self.rails.push(new);
        }
        if self.at.get(&peer).copied().unwrap_or(0) == rail {
            return;
        }
        // Keys and messages of the connection there would be taken for those of one here.
        if let Some(old) = self.rc_of(peer).filter(|old| old.is_ready(peer)) {
            old.leave(peer, now, sink);
            self.rv.iter_mut().for_each(|rv| rv.leave(peer, now, sink));
            sink.on_lost(peer);
        }
        match rail {
            0 => self.at.remove(&peer),
            rail => self.at.insert(peer, rail),
        };
    }

    fn leave(&mut self, peer: PeerId, now: u64, sink: &mut dyn BulkSink) {
        self.all_mut().for_each(|way| way.leave(peer, now, sink));
    }

    fn next_control(&mut self) -> Option<(PeerId, Control)> {
        let first = self.controls.pop_front();
        first.or_else(|| self.all_mut().find_map(|way| way.next_control()))
    }

    #[inline]
    fn has_work(&self) -> bool {
        !self.controls.is_empty() || self.all().any(|way| way.has_work())
    }

    fn poll(&mut self, now: u64, sink: &mut dyn BulkSink) -> usize {
        let Self { rv, rc, rails, .. } = self;
        let mut n = 0;
        if let Some(rv) = rv {
            n += rv.poll(now, &mut Guard { other: rc, now, sink });
        }
        for rc in rc.iter_mut().chain(rails) {
            n += rc.poll(now, &mut Guard { other: rv, now, sink });
        }
        n
    }

    fn renew(&mut self, now: u64, sink: &mut dyn BulkSink) {
        let Self { rv, rc, rails, .. } = self;
        if let Some(rv) = rv {
            rv.renew(now, &mut Guard { other: rc, now, sink });
        }
        for rc in rc.iter_mut().chain(rails) {
            rc.renew(now, &mut Guard { other: rv, now, sink });
        }
    }

    fn forget(&mut self, peer: PeerId, now: u64, sink: &mut dyn BulkSink) {
        self.all_mut().for_each(|way| way.forget(peer, now, sink));
        self.at.remove(&peer);
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
