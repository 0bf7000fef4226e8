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

/// The numbers of the first two paths; those of the rails come behind them.
const RV: usize = 0;
const RC: usize = 1;
const RAILS: usize = 2;

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
/// so those on the other paths end first.
struct Guard<'a> {
    others: [&'a mut [Box<dyn Bulk>]; 4],
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
        for other in self.others.iter_mut().flat_map(|paths| paths.iter_mut()) {
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

    /// The path of this number, with a sink for it.
    fn guarded<'a>(
        &'a mut self,
        number: usize,
        now: u64,
        sink: &'a mut dyn BulkSink,
    ) -> Option<(&'a mut Box<dyn Bulk>, Guard<'a>)> {
        let (rv, rc) = (self.rv.as_mut_slice(), self.rc.as_mut_slice());
        let rails = self.rails.as_mut_slice();
        let (way, others) = match number {
            RV => (rv.first_mut()?, [rc, rails, &mut [], &mut []]),
            RC => (rc.first_mut()?, [rv, rails, &mut [], &mut []]),
            rail => {
                let (before, from) = rails.split_at_mut_checked(rail - RAILS)?;
                let (way, behind) = from.split_first_mut()?;
                (way, [rv, rc, before, behind])
            }
        };
        Some((way, Guard { others, now, sink }))
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

    /// The module takes memory of the host only, and may carry any message where it is.
    fn takes_gpus(&self) -> bool {
        self.rv.is_none() && self.all().any(|way| way.takes_gpus())
    }

    fn takes(&mut self, peer: PeerId, memory: &SegmentList) -> bool {
        self.rv.is_none() && self.rc_of(peer).is_some_and(|rc| rc.takes(peer, memory))
    }

    fn lends(&mut self, peer: PeerId, now: u64) -> Prepared {
        let by = self.all_mut().find(|way| way.is_ready(peer));
        by.map_or(Prepared::No, |way| way.lends(peer, now))
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

    fn await_writes(&mut self, peer: PeerId) -> bool {
        let mut there = true;
        self.all_mut().for_each(|way| there &= way.await_writes(peer)); // also behind one that fails
        there
    }

    fn on_control(&mut self, peer: PeerId, message: &[u8], now: u64, sink: &mut dyn BulkSink) {
        let number = match Way::byte_of(message) {
            Some(byte) if byte == Way::Rv as u8 => Some(RV),
            Some(byte) if byte == Way::Rc as u8 => {
                Some(RC + self.at.get(&peer).copied().unwrap_or(0))
            }
            _ => None,
        };
        if let Some((way, mut guard)) = number.and_then(|number| self.guarded(number, now, sink)) {
            return way.on_control(peer, message, now, &mut guard);
        }
        let refusal = Message::refuse_unknown(message);
        if let Some(refusal) = refusal.filter(|_| self.controls.len() < REFUSALS_MAX) {
            self.controls.push_back((peer, refusal));
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
    ) -> bool {
        while self.rc.is_some() && self.rails.len() < rail {
            let Some(new) = open(self.rails.len() + 1) else { return false };
            if self.epoll.add(new.fd(), 0).is_err() {
                return false;
            }
            self.rails.push(new);
        }
        if self.at.get(&peer).copied().unwrap_or(0) == rail {
            return true;
        }
        // Keys and messages of the connection there would be taken for those of one here.
        if let Some(old) = self.rc_of(peer) {
            let had_keys = old.is_ready(peer);
            old.leave(peer, now, sink); // it may also be on the way
            if had_keys {
                self.rv.iter_mut().for_each(|rv| rv.leave(peer, now, sink));
                sink.on_lost(peer);
            }
        }
        match rail {
            0 => self.at.remove(&peer),
            rail => self.at.insert(peer, rail),
        };
        true
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

    fn tend(&mut self, now: u64) {
        self.all_mut().for_each(|way| way.tend(now));
    }

    fn next_timeout(&self) -> Option<u64> {
        self.all().filter_map(|way| way.next_timeout()).min()
    }

    fn poll(&mut self, now: u64, sink: &mut dyn BulkSink) -> usize {
        let mut n = 0;
        for number in 0..RAILS + self.rails.len() {
            if let Some((way, mut guard)) = self.guarded(number, now, sink) {
                n += way.poll(now, &mut guard);
            }
        }
        n
    }

    fn renew(&mut self, rail: usize, now: u64, sink: &mut dyn BulkSink) {
        // The rv module's path is at the first port.
        for number in if rail == 0 { RV..=RC } else { RC + rail..=RC + rail } {
            if let Some((way, mut guard)) = self.guarded(number, now, sink) {
                way.renew(rail, now, &mut guard);
            }
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

    fn rearm(&mut self) -> bool {
        self.controls.is_empty() && self.all_mut().all(|way| way.rearm())
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

#[cfg(test)]
mod tests {
    use super::super::no_way::NoWay;
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const PEER: PeerId = PeerId(3);

    /// How often a peer was lost.
    #[derive(Default)]
    struct Losses(usize);

    impl BulkSink for Losses {
        fn on_notify(&mut self, _: PeerId, _: u64) {}
        fn on_done(&mut self, _: PeerId, _: u64) {}
        fn on_lost(&mut self, _: PeerId) {
            self.0 += 1;
        }
        fn on_key_void(&mut self, _: PeerId, _: &RemoteKey) {}
    }

    /// The rv module, RC, and RC at two more ports, of which path number `loser` loses the peer in each poll; and how
    /// often each had to leave the peer, or to begin anew.
    fn ways(loser: Option<usize>, losses: &mut Losses) -> (Box<dyn Bulk>, Vec<Arc<AtomicUsize>>) {
        let path = |number| NoWay::losing((loser == Some(number)).then_some(PEER));
        let (paths, left): (Vec<_>, Vec<_>) = (0..4).map(path).unzip();
        let mut paths = paths.into_iter();
        let mut ways = Ways::of(paths.next(), paths.next()).unwrap().unwrap();
        assert!(ways.on_rail(PEER, 2, &mut |_| paths.next(), (7, losses)));
        (ways, left)
    }

    fn counts(left: &[Arc<AtomicUsize>]) -> Vec<usize> {
        left.iter().map(|left| left.swap(0, Ordering::Relaxed)).collect()
    }

    #[test]
    fn the_paths_beside_one_that_is_lost_end_with_it() {
        for loser in 0..4 {
            let mut losses = Losses::default();
            let (mut ways, left) = ways(Some(loser), &mut losses);
            counts(&left);
            assert_eq!((ways.poll(8, &mut losses), losses.0), (1, 1));
            let others: Vec<_> = (0..4).map(|path| usize::from(path != loser)).collect();
            assert_eq!(counts(&left), others);
        }
    }

    #[test]
    fn a_connection_that_is_on_the_way_ends_with_a_change_of_the_port() {
        let mut losses = Losses::default();
        let (mut ways, left) = ways(None, &mut losses);
        assert_eq!(counts(&left), [0, 1, 0, 0]);
        ways.on_rail(PEER, 1, &mut |_| None, (8, &mut losses));
        ways.on_rail(PEER, 1, &mut |_| None, (9, &mut losses));
        assert_eq!((counts(&left), losses.0), (vec![0, 0, 0, 1], 0), "there were no keys");
    }

    #[test]
    fn a_port_that_begins_anew_takes_no_other_along() {
        let mut losses = Losses::default();
        let (mut ways, left) = ways(None, &mut losses);
        counts(&left);
        let renewed = [vec![1, 1, 0, 0], vec![0, 0, 1, 0], vec![0, 0, 0, 1], vec![0; 4]];
        for (rail, expected) in renewed.into_iter().enumerate() {
            ways.renew(rail, 8, &mut losses);
            assert_eq!(counts(&left), expected);
        }
    }

    #[test]
    fn a_peer_whose_port_has_no_path_yet_stays_where_it_is() {
        let mut losses = Losses::default();
        let ((rc, left), (there, _)) = (NoWay::losing(None), NoWay::losing(None));
        let mut ways = Ways::of(None, Some(rc)).unwrap().unwrap();
        assert!(!ways.on_rail(PEER, 1, &mut |_| None, (7, &mut losses)));
        assert_eq!(left.swap(0, Ordering::Relaxed), 0, "it is where it was");
        let mut there = Some(there);
        assert!(ways.on_rail(PEER, 1, &mut |_| there.take(), (8, &mut losses)));
        assert_eq!((left.load(Ordering::Relaxed), there.is_none()), (1, true));
    }
}
