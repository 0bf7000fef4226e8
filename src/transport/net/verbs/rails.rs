//! Further ports of an endpoint (rails): a peer that does not answer at one port is tried at the next.
//!
//! An endpoint begins with one port. Another one is opened when a peer that UDP hears does not answer there, as on rails
//! that are not joined. The peer is told that this endpoint is at the other port (an address update), and challenged
//! from there: the peer needs nothing but its own port. So that not both sides change ports at the same time, the one
//! with the higher address waits for another round.

use super::candidates::adapters;
use super::config::{NicName, RdmaSettings};
use super::found::Reached;
use super::hybrid::Rdma;
use super::introduction::Place;
use super::reopen;
use super::spot::Spot;
use crate::transport::Address;
use crate::transport::net::agreement::pause::PAUSE_NS;

impl Rdma {
    /// Lets `peer` be tried at the next port: it is at `there`, and does not answer here. False: no other port
    /// opens.
    #[cold]
    pub(super) fn hand_on(&mut self, peer: &Address, there: Place, now: u64) -> bool {
        if self.own.me.to_wire() > peer.to_wire() && self.opening.yielded.insert(*peer) {
            self.silence.expect(peer, now);
            return true;
        }
        if self.next.is_none() && !self.opening.tried.pause(now) {
            self.next = self.open_next();
            self.opening.tried.again(now, PAUSE_NS); // it may come up later
        }
        let Some(next) = &mut self.next else { return false };
        if next.ways.open(peer).is_none() {
            next.take_over(peer, there, now);
            self.upkeep.tend_at = 0;
        }
        true
    }

    /// Tries again to open the next port, if that is due, for the peers that wait for it.
    pub(super) fn try_next(&mut self, now: u64) {
        if self.opening.due_at().is_none_or(|at| now < at) {
            return;
        }
        for peer in std::mem::take(&mut self.opening.stranded) {
            let there = self.ways.place(&peer).filter(|place| place.number != 0);
            let Some(there) = there.filter(|_| self.ways.open(&peer).is_none()) else { continue };
            if !self.hand_on(&peer, there, now) {
                self.opening.strand(&peer);
            }
        }
    }

    /// A port that is not this one, nor one that is used before it.
    fn open_next(&mut self) -> Option<Box<Self>> {
        let at = self.at()?;
        let (name, ports) = (at.device.name(), at.device.facts().ok()?.ports);
        let nics = others(&adapters()?, &self.own.settings.nics, (name, at.port.number, ports));
        self.opening.alone = nics.is_empty();
        if self.opening.alone {
            return None;
        }
        let own = &self.own;
        let settings = RdmaSettings { nics, ..own.settings.clone() };
        let made = reopen(&settings, &own.me, own.spread, &own.key).ok()?;
        made.link.as_ref()?;
        let next = Self::new(made, Spot::default(), settings, own.spread, own.key, own.me).ok()?;
        self.port.watch.add(next.port.watch.fd(), 0).ok()?;
        Some(self.behind(next))
    }

    /// `next` as the port behind this one. That it was opened is no move of any port in use.
    fn behind(&self, mut next: Self) -> Box<Self> {
        next.rail = self.rail + 1;
        next.port.moves = 0;
        Box::new(next)
    }

    /// From now on `peer`, which is at `there`, is told of this port, and challenged from here.
    fn take_over(&mut self, peer: &Address, there: Place, now: u64) {
        self.set_now(now);
        self.learn(peer, there);
        let at = self.ways.position(peer);
        self.upkeep.untold = self.upkeep.untold.map_or(at, |untold| at.map(|at| at.min(untold)));
        self.upkeep.tend_at = 0;
    }

    /// `peer` has answered at this port.
    pub(super) fn note_found(&mut self, peer: &Address) {
        if self.rail > 0 || self.next.is_some() {
            self.found.note(peer);
        }
    }

    /// A peer that has answered, and the number of the port at which it is reached now.
    #[inline]
    pub(super) fn take_found(&mut self, now: u64) -> Option<(Address, usize)> {
        self.next.as_ref()?;
        self.gather_found();
        if self.found.is_empty() {
            return None;
        }
        let mut found = std::mem::take(&mut self.found);
        let taken = found.take(now, |peer| self.reached(peer, false));
        self.found = found;
        taken
    }

    fn gather_found(&mut self) {
        if let Some(next) = &mut self.next {
            next.gather_found();
            self.found.gather(&mut next.found);
        }
    }

    /// Where `peer` is reached. `waits`: one before this port was in use, and may still answer.
    fn reached(&mut self, peer: &Address, waits: bool) -> Option<Reached> {
        if self.ways.open(peer).is_some() {
            return Some(Reached { rail: self.rail, waits });
        }
        let waits = waits || !self.place.is_gone() && self.ways.is_suspect(peer);
        self.next.as_mut()?.reached(peer, waits)
    }

    /// The port before this one is gone: connections follow the peers that this one reaches, which are told of it.
    pub(super) fn step_in(&mut self) {
        for peer in self.ways.peers() {
            if self.ways.open(&peer).is_some() {
                self.note_found(&peer);
            }
        }
        (self.upkeep.untold, self.upkeep.tend_at) = (Some(0), 0);
        if let Some(next) = &mut self.next {
            next.step_in();
        }
    }

    /// The place at which `peer` finds this endpoint.
    pub(super) fn home_for(&mut self, peer: &Address) -> Place {
        let open = self.ways.open(peer).is_some();
        match &mut self.next {
            Some(next) if !open && next.ways.position(peer).is_some() => next.home_for(peer),
            _ => self.place,
        }
    }
}

/// The ports that `wanted` names (empty: any), without the one in use (`here`: its device, its number, and how many the
/// device has). Also devices that are down now, or do not open, are among them.
fn others(listed: &[String], wanted: &[NicName], here: (&str, u8, u8)) -> Vec<NicName> {
    let (device, number, ports) = here;
    let any = |name: &String| NicName { device: name.clone(), port: None };
    let named = listed.iter().flat_map(|name| {
        let of = |nic: &&NicName| nic.device == *name;
        let all: Vec<_> = wanted.iter().filter(of).cloned().collect();
        if wanted.is_empty() { vec![any(name)] } else { all }
    });
    let each = |nic: NicName| match nic.port {
        None if nic.device == device => {
            (1..=ports).map(|port| NicName { port: Some(port), ..nic.clone() }).collect()
        }
        _ => vec![nic],
    };
    let is_here = |nic: &NicName| nic.device == device && nic.port == Some(number);
    named.flat_map(each).filter(|nic| !is_here(nic)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_sides_one_waits_for_the_other_once() {
        for (peer, waits) in [("[::1]:1", false), ("1.0.0.1:1", true)] {
            let (mut rdma, peer) = (Rdma::connecting(), Address::from_text(peer).unwrap());
            let waited = rdma.own.me.to_wire() > peer.to_wire();
            assert_eq!(waited, waits);
            let there = rdma.place;
            let tried: Vec<bool> = (0..3).map(|_| rdma.hand_on(&peer, there, 7)).collect();
            assert_eq!(tried, [waits, false, false], "there is no other port");
            assert_eq!(rdma.silence.due_at().is_some(), waits, "its time begins anew");
        }
    }

    #[test]
    fn a_further_port_that_does_not_open_is_tried_again() {
        let (mut rdma, peer) = (Rdma::connecting(), Address::from_text("[::1]:1").unwrap());
        let there = rdma.place;
        let mut tries = |now| {
            assert!(!rdma.hand_on(&peer, there, now));
            (rdma.opening.alone, rdma.opening.tried.count)
        };
        assert_eq!(tries(7), (false, 1), "its own port is down: the others are not known");
        assert_eq!(tries(8), (false, 1), "not at once");
        assert_eq!(tries(7 + PAUSE_NS), (false, 2));
    }

    #[test]
    fn peers_wait_for_a_port_that_does_not_open() {
        let (mut rdma, peer) = (Rdma::connecting(), Address::from_text("[::1]:1").unwrap());
        let there = Place { number: 5, ..rdma.place };
        rdma.learn(&peer, there);
        assert!(!rdma.hand_on(&peer, there, 7));
        assert_eq!((rdma.opening.due_at(), rdma.wake_at(7)), (None, None));
        rdma.opening.strand(&peer);
        rdma.opening.strand(&peer);
        assert_eq!((rdma.opening.stranded.len(), rdma.wake_at(7)), (1, Some(7 + PAUSE_NS)));
        rdma.try_next(8);
        assert_eq!(rdma.opening.tried.count, 1, "not yet");
        rdma.try_next(7 + PAUSE_NS);
        assert_eq!((rdma.opening.tried.count, rdma.opening.stranded.len()), (2, 1), "it waits on");
        let mut next = Rdma::connecting();
        next.place = Place { number: 2, ..rdma.place };
        rdma.next = Some(Box::new(next));
        rdma.try_next(7 + 9 * PAUSE_NS);
        assert_eq!((rdma.opening.stranded.len(), rdma.opening.due_at()), (0, None));
        assert_eq!(rdma.home_for(&peer).number, 2);
        rdma.opening.alone = true;
        rdma.opening.strand(&peer);
        assert!(rdma.opening.stranded.is_empty(), "there is no other port");
    }

    #[test]
    fn further_ports_are_all_that_are_listed_whether_they_open_or_not() {
        let listed = ["a", "b", "c"].map(str::to_owned);
        let names = |wanted: &str, here| {
            let wanted = NicName::list(wanted).unwrap_or_default();
            let found = others(&listed, &wanted, here);
            found.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
        };
        assert_eq!(names("", ("a", 1, 1)), "b,c");
        assert_eq!(names("", ("b", 2, 3)), "a,b:1,b:3,c");
        assert_eq!(names("c:2,b,d", ("b", 1, 2)), "b:2,c:2");
        assert_eq!(names("b:1", ("b", 1, 2)), "");
    }

    #[test]
    fn a_port_that_is_opened_moves_no_other() {
        let (rdma, mut next) = (Rdma::connecting(), Rdma::connecting());
        next.settle(None);
        let next = rdma.behind(next);
        assert_eq!((next.port.moves, next.rail), (0, 1), "a move would end all connections");
    }

    #[test]
    fn a_peer_is_told_of_the_port_that_reaches_it() {
        let (mut rdma, peer) = (Rdma::connecting(), Address::from_text("10.0.0.1:1").unwrap());
        let place = |number| Place { number, ..Rdma::connecting().place };
        let mut next = Rdma::connecting();
        (rdma.place, next.place, next.rail) = (place(1), place(2), 1);
        rdma.next = Some(Box::new(next));
        rdma.learn(&peer, place(5));
        assert_eq!(rdma.home_for(&peer), place(1));
        assert!(rdma.hand_on(&peer, place(5), 7) && rdma.hand_on(&peer, place(5), 8));
        assert_eq!(rdma.home_for(&peer), place(2));
        assert_eq!(rdma.next.as_ref().and_then(|next| next.upkeep.untold), Some(0));
        rdma.ways.learn(&peer, place(5), 9);
        let nonce = rdma.ways.next_ask().unwrap().nonce;
        assert!(rdma.ways.answered(&peer, &place(5), nonce).is_some());
        assert_eq!(rdma.home_for(&peer), place(1), "it answers at the first one after all");
    }
}
