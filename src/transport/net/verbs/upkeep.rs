//! Maintenance of the device's part: processes its events, replaces a queue pair that broke, and sends peers address
//! updates (PROTOCOL.md §7.13). UDP carries data meanwhile.

use super::config::RdmaPolicy;
use super::hybrid::Rdma;
use super::introduction::{Call, CallKind};
use super::link::UdLink;
use super::silence::Step;
use super::{At, Made, reopen};
use crate::sys::verbs::{About, DeviceEvent, OpenDevice};
use crate::sys::{clock, process};
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::net::link::Link;
use crate::transport::net::udp::UdpLink;
use std::io::IoSlice;
use std::sync::PoisonError;

/// Time between two checks for device events while the application polls, nanoseconds: each takes a system call. A
/// sleeping thread is woken by events.
const LOOK_NS: u64 = 100_000_000;
/// Most events in one check.
const EVENTS: usize = 64;
/// Most peers that are told in one turn.
const NEWS: usize = 32;

impl Rdma {
    /// Does the maintenance that is due. `udp` carries address updates.
    #[cold]
    pub(super) fn tend(&mut self, now: u64, udp: &mut UdpLink) {
        if self.upkeep.deaf.is_some_and(|at| at <= now) {
            self.watch_bell();
        }
        self.hear(now);
        if let Some(errno) = self.link.as_ref().and_then(UdLink::broken) {
            self.give_up(&format!("its queue pair broke: {errno}"), now);
        }
        if self.upkeep.recovery.due_at().is_some_and(|at| at <= now) {
            self.remake(now);
        }
        self.try_next(now);
        self.tell(udp);
        self.upkeep.judge = self.silence.due_at().is_some_and(|at| at <= now);
        self.upkeep.tend_at = self.wake_at(now).unwrap_or(u64::MAX).min(now + LOOK_NS);
        if let Some(next) = &mut self.next {
            next.set_now(now);
            next.tend(now, udp);
            self.upkeep.judge |= next.upkeep.judge;
            self.upkeep.tend_at = self.upkeep.tend_at.min(next.upkeep.tend_at);
        }
    }

    /// When there is something to do even if nothing arrives, nanoseconds.
    pub(super) fn wake_at(&self, now: u64) -> Option<u64> {
        if self.upkeep.untold.is_some() || !self.unreached.is_empty() {
            return Some(now);
        }
        let next = self.next.as_ref().and_then(|next| next.wake_at(now));
        let (recovers, judges) = (self.upkeep.recovery.due_at(), self.silence.due_at());
        let own = [recovers, judges, self.opening.due_at(), self.upkeep.deaf, next];
        own.into_iter().flatten().min()
    }

    /// Challenges peers again that have not answered, and reports those that do not; to be called when everything that has
    /// arrived is received.
    #[cold]
    pub(super) fn hear_silence(&mut self, now: u64) {
        self.upkeep.judge = false;
        for step in self.silence.steps(now) {
            match step {
                Step::Challenge(peer) => self.ways.ask(&peer),
                Step::Report(peer) => self.report(&peer, now),
            }
        }
        self.call();
        if let Some(next) = self.next.as_mut().filter(|next| next.upkeep.judge) {
            next.hear_silence(now);
        }
    }

    /// `peer` has a device, and UDP hears it, but it answers no challenge.
    #[cold]
    fn report(&mut self, peer: &Address, now: u64) {
        let Some(place) = self.ways.place(peer).filter(|_| self.link.is_some()) else { return };
        if self.hand_on(peer, place, now) {
            return;
        }
        self.counts.silent += 1;
        let cause = self.place.obstacle(&place).unwrap_or(
            "path challenges get no answer: look at rails (FI_UDRV_NIC), VLANs, the MTU of switches, and filters of UDP port 4791",
        );
        let name = self.port.device.as_ref().map_or("", |device| device.name());
        if self.own.settings.policy == RdmaPolicy::Require {
            log::limited!(
                "FI_UDRV_RDMA=require cannot be met for {peer}: {name} does not reach its device; {cause}"
            );
            self.unreached.push(*peer);
            self.given_up.insert(*peer, place);
        } else {
            log::limited!(
                "{peer} is reached over UDP only: {name} does not reach its device; {cause}"
            );
            self.opening.strand(peer);
        }
    }

    fn hear(&mut self, now: u64) {
        for _ in 0..EVENTS {
            let Some(device) = &self.port.device else { return };
            match device.take_event() {
                Ok(Some(event)) => self.on_event(event, now),
                Ok(None) if device.is_there() => return,
                Ok(None) => self.lose_device("it was removed", now),
                Err(errno) => self.lose_device(&errno.to_string(), now),
            }
        }
    }

    fn on_event(&mut self, event: DeviceEvent, now: u64) {
        let name = event.name;
        match event.about {
            About::BrokenQueuePair(number) if number == self.place.number => {
                self.give_up(name, now);
            }
            About::BrokenQueue => self.give_up(name, now),
            About::Device => self.lose_device(name, now),
            About::PortUp(_) | About::Port(_) => {
                if matches!(event.about, About::PortUp(_)) {
                    self.upkeep.recovery.hint(now);
                }
                let at = self.at();
                if let Some(what) = at.and_then(|at| at.fits().err()) {
                    self.give_up(&format!("{what} ({name})"), now);
                }
            }
            About::BrokenQueuePair(_) | About::Nothing => {}
        }
    }

    /// The device cannot be used any more.
    fn lose_device(&mut self, why: &str, now: u64) {
        self.give_up(why, now);
        if let Some(device) = self.port.device.take() {
            self.unwatch(&device);
        }
    }

    /// Ends the queue pair: data goes over UDP.
    fn give_up(&mut self, why: &str, now: u64) {
        if self.at().is_none() {
            return;
        }
        let name = self.port.device.as_ref().map_or("", |device| device.name());
        log::limited!("{}: {name} is left ({why}): data goes over UDP", self.own.me);
        if let Some(link) = self.link.take() {
            self.counts.datagrams = self.counts.datagrams.plus(link.counts());
            link.close(&self.port.watch).into_iter().for_each(|crew| self.upkeep.leaving.add(crew));
        }
        self.place = self.place.gone();
        self.upkeep.recovery.broke(now);
        self.settle(None);
        self.start_over();
        if let Some(next) = &mut self.next {
            next.step_in();
        }
    }

    /// Forgets paths that were validated with the last queue pair.
    fn start_over(&mut self) {
        self.ways.reset(process::random_u64);
        self.silence.clear();
        self.called.clear();
        self.source.0 = u32::MAX;
        self.upkeep.untold = Some(0);
    }

    fn remake(&mut self, now: u64) {
        match reopen(&self.own.settings, &self.own.me, self.own.spread, &self.own.key) {
            Ok(made) => {
                self.adopt(made);
                self.upkeep.recovery.made(now);
                self.counts.made += 1;
                self.upkeep.why.clear();
                self.start_over();
            }
            Err(why) => {
                self.upkeep.recovery.failed(now);
                if why != self.upkeep.why {
                    log::info(format_args!("still no RDMA at {}: {why}", self.own.me));
                    self.upkeep.why = why;
                }
            }
        }
    }

    /// Takes over a new queue pair.
    fn adopt(&mut self, mut made: Made) {
        if let (Some(pool), Some(link)) = (&self.pool, &mut made.link) {
            link.lend(pool.clone());
        }
        if let Some(old) = self.port.device.replace(made.at.device.clone()) {
            self.unwatch(&old);
        }
        self.place = made.at.place;
        self.settle(Some(made.at));
        self.link = made.link;
        self.watch_device();
    }

    /// The endpoint's port; `None`: its device is gone, or fails.
    pub(super) fn at(&self) -> Option<At> {
        self.port.spot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on the endpoint's port is `at`, or none.
    pub(super) fn settle(&mut self, at: Option<At>) {
        self.port.connects_only = at.as_ref().is_some_and(|at| at.place.number == 0);
        *self.port.spot.lock().unwrap_or_else(PoisonError::into_inner) = at;
        self.port.moves += 1;
    }

    /// Registers the device's descriptors, so that they wake sleepers.
    pub(super) fn watch_device(&mut self) {
        let add = |fd| self.port.watch.add(fd, 0);
        let datagrams = self.link.as_ref().map_or(Ok(()), |link| add(link.fd()));
        let events = self.port.device.as_ref().map_or(Ok(()), |device| add(device.events()));
        if let Err(errno) = datagrams.and(events) {
            log::limited!(cause: errno.0, "{} is not woken by its device: {errno}", self.own.me);
        }
        self.watch_bell();
    }

    /// The same for the bell. Without one, which takes a descriptor, only the events wake it that no other endpoint has
    /// taken: it is tried again.
    fn watch_bell(&mut self) {
        let add = |bell| self.port.watch.add(bell, 0);
        let rings = self.port.device.as_ref().map_or(Ok(()), |it| it.bell().and_then(add));
        self.upkeep.deaf = rings.is_err().then(|| clock::now_ns() + LOOK_NS);
        if let Err(errno) = rings {
            log::limited!(
                cause: errno.0,
                "{} hears late of events of its device that other endpoints have taken: {errno}",
                self.own.me
            );
        }
    }

    /// The events of `device` wake no sleeper any more.
    fn unwatch(&self, device: &OpenDevice) {
        for fd in [Ok(device.events()), device.bell()].into_iter().flatten() {
            self.port.watch.remove(fd);
        }
    }

    /// Sends peers address updates over UDP. A peer that misses its update notices that nothing arrives.
    fn tell(&mut self, udp: &mut UdpLink) {
        for _ in 0..NEWS {
            let Some(at) = self.upkeep.untold else { return };
            let Some(to) = self.ways.peer(at).copied() else {
                self.upkeep.untold = None;
                return;
            };
            let (address, place) = (self.own.me, self.place);
            let news = Call { kind: CallKind::News, nonce: process::random_u64(), address, place };
            if udp.send(&to, &[IoSlice::new(&news.encode(&self.own.key))]) == 0 {
                return;
            }
            self.counts.news += 1;
            self.upkeep.untold = Some(at + 1);
        }
    }

    /// The peer at `address` is not connected to any more. That it was given up, if it was, stays known.
    #[cold]
    pub(super) fn forget(&mut self, address: &Address) {
        if let Some(next) = &mut self.next {
            next.forget(address);
        }
        self.silence.forget(address);
        self.opening.forget(address);
        self.source.0 = u32::MAX;
        if let Some(at) = self.ways.forget(address) {
            // Another peer has its number now, and may not have been told yet.
            self.upkeep.untold = self.upkeep.untold.map(|untold| untold.min(at));
        }
    }

    /// A peer's queue pair was replaced, is gone, or its device has only connections now.
    #[cold]
    pub(super) fn on_news(&mut self, news: &Call) {
        let Call { address, place, .. } = news;
        if *address == self.own.me {
            return;
        }
        if place.is_gone() {
            if let Some(next) = &mut self.next {
                next.on_news(news);
            }
            if !self.ways.is_at(address, place) {
                return; // it is reached at another port of its own
            }
            self.silence.forget(address);
            if self.ways.lose(address, *place, process::random_u64()) {
                log::info(format_args!("{address} has no queue pair now: data goes over UDP"));
            }
        } else {
            self.learn(address, *place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::net::verbs::introduction::Place;

    #[test]
    fn a_peer_whose_device_is_gone_is_not_connected_to() {
        let (mut rdma, peer) = (Rdma::connecting(), Address::from_text("10.0.0.1:1").unwrap());
        let here = rdma.place;
        let place = |number| Place { number, ..here };
        for (number, gone) in [(5, false), (5, true), (0, false), (0, true), (6, false)] {
            let there = if gone { place(number).gone() } else { place(number) };
            let news = Call { kind: CallKind::News, nonce: 1, address: peer, place: there };
            rdma.learn(&peer, place(5));
            rdma.on_news(&news);
            assert_eq!(rdma.connects(&peer), !gone, "{there:?}");
            assert_eq!(rdma.ways.place(&peer), Some(there));
        }
    }

    #[test]
    fn a_peer_that_is_gone_is_told_nothing_and_the_others_are() {
        let mut rdma = Rdma::connecting();
        rdma.next = Some(Box::new(Rdma::connecting()));
        let peers = [1, 2, 3].map(|n| Address::from_text(&format!("10.0.0.{n}:1")).unwrap());
        let place = Place { number: 5, ..rdma.place };
        for peer in &peers {
            rdma.learn(peer, place);
            rdma.next.as_mut().unwrap().learn(peer, place);
            rdma.opening.strand(peer);
            rdma.opening.yielded.insert(*peer);
        }
        rdma.upkeep.untold = Some(2);
        rdma.forget(&peers[0]);
        let untold: Vec<_> = (0..4).map_while(|n| rdma.ways.peer(n)).copied().collect();
        assert_eq!((untold, rdma.upkeep.untold), (vec![peers[2], peers[1]], Some(0)));
        peers.iter().for_each(|peer| rdma.forget(peer));
        let next = rdma.next.as_ref().unwrap();
        assert_eq!((rdma.ways.peer(0), next.ways.peer(0)), (None, None));
        assert!(rdma.opening.stranded.is_empty() && rdma.opening.yielded.is_empty());
    }

    #[test]
    fn a_peer_whose_device_is_gone_is_gone_at_all_ports() {
        let (mut rdma, peer) = (Rdma::connecting(), Address::from_text("10.0.0.1:1").unwrap());
        let place = Place { number: 5, ..rdma.place };
        rdma.next = Some(Box::new(Rdma::connecting()));
        rdma.learn(&peer, place);
        rdma.next.as_mut().unwrap().learn(&peer, place);
        let news = Call { kind: CallKind::News, nonce: 1, address: peer, place: place.gone() };
        rdma.on_news(&news);
        assert_eq!(rdma.next.unwrap().ways.place(&peer), Some(place.gone()));
    }

    #[test]
    fn a_port_of_a_peer_that_is_gone_takes_no_other_along() {
        let (mut rdma, peer) = (Rdma::connecting(), Address::from_text("10.0.0.1:1").unwrap());
        let place = |number, gid| Place { number, gid: [gid; 16], ..Rdma::connecting().place };
        let (mut next, healthy) = (Rdma::connecting(), place(6, 2));
        next.ways.learn(&peer, healthy, 9);
        assert!(next.ways.answered(&peer, &healthy, 9).is_some());
        rdma.learn(&peer, place(5, 1));
        rdma.next = Some(Box::new(next));
        for gone in [place(5, 1).gone(), place(6, 2).gone()] {
            rdma.on_news(&Call { kind: CallKind::News, nonce: 1, address: peer, place: gone });
            let next = rdma.next.as_mut().unwrap();
            assert_eq!(next.ways.open(&peer).is_some(), gone.gid == [1; 16], "{gone:?}");
            assert_eq!(rdma.ways.place(&peer), Some(place(5, 1).gone()));
        }
    }

    #[test]
    fn a_peer_whose_device_comes_back_is_challenged_there() {
        let (mut rdma, peer) = (Rdma::connecting(), Address::from_text("10.0.0.1:1").unwrap());
        let here = rdma.place;
        let place = |number| Place { number, ..here };
        for (old, new) in [(5, 6), (6, 7)] {
            rdma.ways.learn(&peer, place(old), 9);
            assert!(old == 6 || rdma.ways.answered(&peer, &place(old), 9).is_some());
            let gone = place(old).gone();
            rdma.on_news(&Call { kind: CallKind::News, nonce: 1, address: peer, place: gone });
            rdma.ways.learn(&peer, place(new), 10);
            assert_eq!(rdma.ways.place(&peer), Some(place(new)));
            assert!(rdma.ways.answered(&peer, &place(new), 10).is_some());
            assert!(rdma.ways.open(&peer).is_some());
        }
    }

    #[test]
    fn a_peer_that_was_given_up_stays_so_until_its_device_answers_or_is_another() {
        let (mut rdma, peer) = (Rdma::connecting(), Address::from_text("10.0.0.1:1").unwrap());
        let here = rdma.place;
        let place = |number| Place { number, ..here };
        rdma.given_up.insert(peer, place(5));
        rdma.learn(&peer, place(5));
        assert_eq!((rdma.unreached.pop(), rdma.given_up.len()), (Some(peer), 1));
        rdma.learn(&peer, place(6));
        assert_eq!((rdma.unreached.pop(), rdma.given_up.len()), (None, 0));
    }

    #[test]
    fn a_peer_that_is_to_be_given_up_waits_for_nothing() {
        let mut rdma = Rdma::connecting();
        assert_eq!(rdma.wake_at(7), None);
        rdma.unreached.push(Address::from_text("10.0.0.1:1").unwrap());
        assert_eq!(rdma.wake_at(7), Some(7));
    }
}
