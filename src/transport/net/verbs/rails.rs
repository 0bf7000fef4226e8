//! Further ports of an endpoint (rails): a peer that does not answer at one port is tried at the next.
//!
//! An endpoint begins with one port. Another one is opened when a peer that UDP hears does not answer there, as on rails
//! that are not joined. The peer is told that this endpoint is at the other port (an address update), and challenged
//! from there: the peer needs nothing but its own port. So that not both sides change ports at the same time, the one
//! with the higher address waits for another round.

use super::config::{NicName, RdmaSettings};
use super::hybrid::Rdma;
use super::introduction::Place;
use super::spot::Spot;
use super::{candidates, reopen};
use crate::transport::Address;
use crate::transport::net::agreement::pause::PAUSE_NS;

impl Rdma {
    /// Lets `peer` be tried at the next port: it is at `there`, and does not answer here. False: there is no other port.
    #[cold]
    pub(super) fn hand_on(&mut self, peer: &Address, there: Place, now: u64) -> bool {
        if self.own.me.to_wire() > peer.to_wire() && self.yielded.insert(*peer) {
            self.silence.expect(peer, now);
            return true;
        }
        if self.next.is_none() && !self.alone && !self.opening.pause(now) {
            self.next = self.open_next();
            self.opening.again(now, PAUSE_NS); // it may come up later
        }
        let Some(next) = &mut self.next else { return false };
        if next.ways.open(peer).is_none() {
            next.take_over(peer, there, now);
            self.upkeep.tend_at = 0;
        }
        true
    }

    /// A port that is not this one, nor one that is used before it.
    fn open_next(&mut self) -> Option<Box<Self>> {
        let at = self.at()?;
        let own = &self.own;
        let is_this = |nic: &NicName| {
            nic.device == at.device.name() && nic.port.is_none_or(|port| port == at.port.number)
        };
        let (ports, _) = candidates(&own.settings.nics);
        let name = |device: &str, port| NicName { device: device.to_owned(), port: Some(port) };
        let all = ports.iter().map(|(device, port)| name(device.name(), port.port.number));
        let allowed = |nic: &NicName| {
            let names = |one: &NicName| {
                one.device == nic.device && (one.port.is_none() || one.port == nic.port)
            };
            own.settings.nics.is_empty() || own.settings.nics.iter().any(names)
        };
        let nics: Vec<_> = all.filter(|nic| allowed(nic) && !is_this(nic)).collect();
        if nics.is_empty() {
            self.alone = true;
            return None;
        }
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

    /// The place at which `peer` finds this endpoint.
    pub(super) fn home_for(&mut self, peer: &Address) -> Place {
        let open = self.ways.open(peer).is_some();
        match &mut self.next {
            Some(next) if !open && next.ways.position(peer).is_some() => next.home_for(peer),
            _ => self.place,
        }
    }
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
            (rdma.alone, rdma.opening.count)
        };
        assert_eq!(tries(7), (false, 1), "its own port is down: the others are not known");
        assert_eq!(tries(8), (false, 1), "not at once");
        assert_eq!(tries(7 + PAUSE_NS), (false, 2));
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
