//! At which of several ports (rails) a peer is reached: for the bulk path, whose connections follow the peers.
//!
//! A connection that follows a peer ends at the old port with all its keys, so it moves only for a reason. When a peer was
//! suspect, its paths answer one after the other. One that answers at a further port waits for the one in use before, until
//! that has answered too or has had its time.

use crate::transport::Address;
use crate::transport::net::agreement::pause::PAUSE_NS;

/// How long a path that was in use may take to answer after another one has, nanoseconds: its challenge is repeated twice.
const GRACE_NS: u64 = 250_000_000;
/// How long a connection waits that cannot follow its peer, nanoseconds.
const LATER_NS: u64 = 10 * PAUSE_NS;

/// Where a peer is reached.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reached {
    /// The number of the first port that reaches it.
    pub(super) rail: usize,
    /// One before that was in use, and may still answer.
    pub(super) waits: bool,
}

/// Peers that have answered at a port, and when each is passed on, nanoseconds; `None`: the other ports were not looked at
/// yet.
#[derive(Debug, Default)]
pub(super) struct Found(Vec<(Address, Option<u64>)>);

impl Found {
    /// `peer` has answered.
    pub(super) fn note(&mut self, peer: &Address) {
        self.0.push((*peer, None));
    }

    /// The connection to `peer` could not follow it at `now`: it is passed on again later.
    pub(super) fn again(&mut self, peer: &Address, now: u64) {
        self.0.push((*peer, Some(now + LATER_NS)));
    }

    /// Takes over those of another port.
    #[inline]
    pub(super) fn gather(&mut self, other: &mut Self) {
        self.0.append(&mut other.0);
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A peer that is to be passed on at `now`, and the number of its port; `reached` says where a peer is reached.
    #[cold]
    pub(super) fn take(
        &mut self,
        now: u64,
        mut reached: impl FnMut(&Address) -> Option<Reached>,
    ) -> Option<(Address, usize)> {
        let mut taken = None;
        self.0.retain_mut(|(peer, due)| {
            if taken.is_some_and(|(taken, _)| taken != *peer) {
                return true;
            }
            let Some(Reached { rail, waits }) = reached(peer) else { return false };
            let due = *due.get_or_insert(now + if waits { GRACE_NS } else { 0 });
            taken = taken.or_else(|| (due <= now).then_some((*peer, rail)));
            taken.is_none()
        });
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::net::verbs::hybrid::Rdma;
    use crate::transport::net::verbs::introduction::Place;

    fn peer() -> Address {
        Address::from_text("10.0.0.1:1").unwrap()
    }

    fn there() -> Place {
        Place { number: 5, ..Rdma::connecting().place }
    }

    /// The path to the peer at this port is validated.
    fn answer(port: &mut Rdma) {
        while let Some(ask) = port.ways.next_ask() {
            if port.ways.answered(&peer(), &ask.to, ask.nonce).is_some() {
                port.note_found(&peer());
            }
        }
    }

    /// An endpoint with two ports, which both reach the peer, and which has told of that.
    fn two_ports() -> Rdma {
        let (mut rdma, mut next) = (Rdma::connecting(), Rdma::connecting());
        next.rail = 1;
        next.ways.learn(&peer(), there(), 7);
        rdma.ways.learn(&peer(), there(), 8);
        answer(&mut next);
        rdma.next = Some(Box::new(next));
        assert_eq!(found(&mut rdma, 0), [1], "the path at the first port was never in use");
        answer(&mut rdma);
        assert_eq!(found(&mut rdma, 0), [0]);
        rdma
    }

    fn found(rdma: &mut Rdma, now: u64) -> Vec<usize> {
        std::iter::from_fn(|| rdma.take_found(now)).map(|(_, rail)| rail).collect()
    }

    fn doubt(rdma: &mut Rdma) {
        rdma.ways.doubt(&peer(), 9);
        rdma.next.as_mut().unwrap().ways.doubt(&peer(), 10);
    }

    #[test]
    fn a_peer_that_answers_everywhere_stays_where_it_is() {
        for first in [0, 1] {
            let mut rdma = two_ports();
            doubt(&mut rdma);
            if first == 1 {
                answer(rdma.next.as_mut().unwrap());
                assert_eq!(
                    found(&mut rdma, 20),
                    [],
                    "the other path was in use, and may answer too"
                );
            }
            answer(&mut rdma);
            assert_eq!(found(&mut rdma, 20), [0]);
            answer(rdma.next.as_mut().unwrap());
            assert!(found(&mut rdma, GRACE_NS + 20).iter().all(|rail| *rail == 0));
        }
    }

    #[test]
    fn a_peer_that_answers_at_the_next_port_only_is_followed() {
        let mut rdma = two_ports();
        doubt(&mut rdma);
        answer(rdma.next.as_mut().unwrap());
        assert_eq!(found(&mut rdma, 20), []);
        assert_eq!(found(&mut rdma, GRACE_NS + 19), []);
        assert_eq!(found(&mut rdma, GRACE_NS + 20), [1]);
        assert_eq!(found(&mut rdma, GRACE_NS + 30), [], "once");
    }

    #[test]
    fn a_port_that_is_down_or_a_device_that_is_gone_is_not_waited_for() {
        for ours in [false, true] {
            let mut rdma = two_ports();
            doubt(&mut rdma);
            match ours {
                true => rdma.place = rdma.place.gone(),
                false => assert!(!rdma.ways.lose(&peer(), there().gone(), 11)),
            }
            answer(rdma.next.as_mut().unwrap());
            assert_eq!(found(&mut rdma, 20), [1]);
        }
    }

    #[test]
    fn connections_follow_to_the_next_port_when_this_one_is_gone() {
        let mut rdma = two_ports();
        let other = Address::from_text("10.0.0.2:1").unwrap();
        rdma.next.as_mut().unwrap().ways.learn(&other, there(), 12);
        rdma.place = rdma.place.gone();
        rdma.ways.reset(|| 13);
        rdma.next.as_mut().unwrap().step_in();
        assert_eq!(rdma.take_found(20), Some((peer(), 1)));
        assert_eq!(rdma.take_found(20), None, "the other peer does not answer there");
        assert_eq!(rdma.next.unwrap().upkeep.untold, Some(0), "it has to know where to answer");
    }

    #[test]
    fn a_peer_that_could_not_be_followed_is_passed_on_later() {
        let mut rdma = two_ports();
        rdma.found.again(&peer(), 30);
        assert_eq!(found(&mut rdma, 29 + LATER_NS), []);
        assert_eq!(found(&mut rdma, 30 + LATER_NS), [0]);
    }
}
