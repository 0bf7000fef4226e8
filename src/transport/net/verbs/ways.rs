//! Which peers are reached through the device (path validation): the decisions, without device and clock.
//!
//! A path is validated, and then used, once a path challenge over it was answered over it. When the state machine
//! suspects that a peer is gone (it sends INIT), the path is suspect too: data goes over UDP until a challenge is
//! answered again. So a path that fails, at either end, costs no more than a few lost packets.

use super::introduction::Place;
use crate::transport::Address;
use std::collections::HashMap;

/// At most this many packets go over UDP before a peer whose path is not validated is challenged again.
const CALL_EVERY: u32 = 1024;
/// The same for a peer that gets few packets: the time since the last such challenge, nanoseconds.
const CALL_NS: u64 = 5_000_000_000;

/// The state of the path to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It was never validated.
    Asked,
    Proven,
    /// It was validated, and is suspect now.
    Doubted,
}

/// A path challenge to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ask {
    pub(super) to: Place,
    pub(super) nonce: u64,
}

/// The path to a peer.
#[derive(Debug)]
struct Way<H> {
    address: Address,
    place: Place,
    /// The device's handle for it, once there is one.
    handle: Option<H>,
    nonce: u64,
    state: State,
    /// The peer has since announced another queue-pair address, which is not validated: the packet may be an old one.
    next: Option<Ask>,
    /// Packets that went over UDP since the first challenge, and when one last triggered another, nanoseconds.
    detours: u32,
    called_at: u64,
}

/// A path that may be used.
#[derive(Debug)]
pub(super) struct Open<'a, H> {
    pub(super) place: &'a Place,
    pub(super) handle: &'a mut Option<H>,
}

/// What the answer to a challenge validates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Opened {
    /// A path that was never used.
    First,
    /// A path that was suspect.
    Again,
}

/// The paths to all peers.
#[derive(Debug)]
pub(super) struct Ways<H> {
    list: Vec<Way<H>>,
    by_address: HashMap<Address, usize>,
    /// The path that was last looked up: mostly it is the next one too.
    last: (Option<Address>, usize),
    /// Address by queue-pair number, for the log only: two hosts may use the same number.
    by_number: HashMap<u32, Address>,
    /// Challenges to send.
    asks: Vec<Ask>,
    /// How often a path was validated, and how often it became suspect afterwards.
    pub(super) proven: u64,
    pub(super) doubted: u64,
}

impl<H> Default for Ways<H> {
    fn default() -> Self {
        Self {
            list: Vec::new(),
            by_address: HashMap::new(),
            last: (None, 0),
            by_number: HashMap::new(),
            asks: Vec::new(),
            proven: 0,
            doubted: 0,
        }
    }
}

impl<H> Ways<H> {
    #[inline]
    fn find(&mut self, address: &Address) -> Option<&mut Way<H>> {
        if self.last.0.as_ref() != Some(address) {
            let at = *self.by_address.get(address)?;
            self.last = (Some(*address), at);
        }
        self.list.get_mut(self.last.1)
    }

    /// The path to `address` if it may be used.
    #[inline]
    pub(super) fn open(&mut self, address: &Address) -> Option<Open<'_, H>> {
        let way = self.find(address)?;
        let usable = way.state == State::Proven && way.next.is_none();
        usable.then_some(Open { place: &way.place, handle: &mut way.handle })
    }

    /// Whether the path to `address` was in use, is not now, and may answer a challenge.
    pub(super) fn is_suspect(&mut self, address: &Address) -> bool {
        let is_closed = self.open(address).is_none();
        self.find(address)
            .is_some_and(|way| is_closed && way.state != State::Asked && way.place.number != 0)
    }

    /// The peer at `address` says that its queue pair is at `place`. `nonce` is random.
    pub(super) fn learn(&mut self, address: &Address, place: Place, nonce: u64) {
        let ask = Ask { to: place, nonce };
        let Some(way) = self.find(address) else {
            self.by_address.insert(*address, self.list.len());
            self.by_number.insert(place.number, *address);
            self.asks.push(ask);
            self.list.push(Way {
                address: *address,
                place,
                handle: None,
                nonce,
                state: State::Asked,
                next: None,
                detours: 0,
                called_at: 0,
            });
            return;
        };
        if place.number == 0 {
            // It has no datagrams now: there is nothing to validate.
            (way.place, way.nonce, way.handle) = (place, nonce, None);
            (way.state, way.next) = (State::Asked, None);
            return;
        }
        let known = Ask { to: way.place, nonce: way.nonce };
        let asks = match (way.state, way.place == place) {
            (State::Proven, true) if way.next.is_none() => return,
            (_, true) => [Some(known), None],
            (State::Asked, false) => {
                (way.place, way.nonce, way.handle) = (place, nonce, None);
                [Some(ask), None]
            }
            // It was gone. The one that it had before may answer all the same.
            (_, false) if way.place.number == 0 => {
                (way.place, way.nonce, way.handle) = (place, nonce, None);
                way.state = State::Asked;
                [Some(ask), way.next]
            }
            // The peer is at the one that answers.
            (State::Proven | State::Doubted, false) => {
                let next = way.next.filter(|next| next.to == place).unwrap_or(ask);
                way.next = Some(next);
                [Some(known), Some(next)]
            }
        };
        self.asks.extend(asks.into_iter().flatten());
    }

    /// A challenge was answered from `address`, whose queue pair is at `place`. Returns what that validates.
    pub(super) fn answered(
        &mut self,
        address: &Address,
        place: &Place,
        nonce: u64,
    ) -> Option<Opened> {
        let way = self.find(address)?;
        let moved = way.next == Some(Ask { to: *place, nonce });
        if moved {
            (way.place, way.nonce, way.handle) = (*place, nonce, None);
        } else if way.place != *place || way.nonce != nonce {
            return None;
        }
        let opened = match way.state {
            State::Asked => Opened::First,
            _ if moved => Opened::First,
            State::Proven if way.next.is_none() => return None,
            State::Proven | State::Doubted => Opened::Again,
        };
        way.next = None;
        way.state = State::Proven;
        self.proven += 1;
        self.by_number.insert(place.number, *address);
        Some(opened)
    }

    /// The peer may be gone: its path is suspect. `nonce` is random. Returns whether the path was in use until now.
    pub(super) fn doubt(&mut self, address: &Address, nonce: u64) -> bool {
        let Some(way) = self.find(address) else { return false };
        let was_open = way.state == State::Proven;
        if was_open {
            (way.state, way.nonce, way.detours) = (State::Doubted, nonce, 0);
        }
        let ask = Ask { to: way.place, nonce: way.nonce };
        self.asks.push(ask);
        self.doubted += u64::from(was_open);
        was_open
    }

    /// The peer says that its queue pair is gone, and it is at `gone`. The packet may be an old one: the queue pair is
    /// challenged with `nonce`, and used again if it answers. Returns whether the path was in use until now.
    pub(super) fn lose(&mut self, address: &Address, gone: Place, nonce: u64) -> bool {
        let was_open = self.doubt(address, nonce);
        if let Some(way) = self.find(address) {
            let last = Ask { to: way.place, nonce: way.nonce };
            if last.to.number != 0 {
                way.next.get_or_insert(last);
            }
            (way.place, way.handle) = (gone, None);
        }
        was_open
    }

    /// This endpoint's queue pair was replaced: no path is validated any more, and no handle is known. `nonce` draws
    /// random numbers.
    pub(super) fn reset(&mut self, mut nonce: impl FnMut() -> u64) {
        self.asks.clear();
        for way in &mut self.list {
            way.handle = None;
            if way.state == State::Proven {
                (way.state, way.nonce, way.detours) = (State::Doubted, nonce(), 0);
            }
        }
    }

    /// The peer at `address` is gone: forgets it. Returns its number, which is that of another peer now.
    pub(super) fn forget(&mut self, address: &Address) -> Option<usize> {
        let at = self.by_address.remove(address)?;
        self.last = (None, 0);
        let way = self.list.swap_remove(at);
        for place in [Some(way.place), way.next.map(|next| next.to)].into_iter().flatten() {
            if self.by_number.get(&place.number) == Some(address) {
                self.by_number.remove(&place.number);
            }
        }
        if let Some(moved) = self.list.get(at) {
            self.by_address.insert(moved.address, at);
        }
        Some(at)
    }

    /// The number of a peer.
    pub(super) fn position(&self, address: &Address) -> Option<usize> {
        self.by_address.get(address).copied()
    }

    /// All peers.
    pub(super) fn peers(&self) -> Vec<Address> {
        self.list.iter().map(|way| way.address).collect()
    }

    /// The peer number `at`, if there are so many.
    pub(super) fn peer(&self, at: usize) -> Option<&Address> {
        self.list.get(at).map(|way| &way.address)
    }

    /// The device cannot send to `address`: closes its path. `nonce` is random.
    pub(super) fn close(&mut self, address: &Address, nonce: u64) {
        if let Some(way) = self.find(address) {
            way.handle = None;
        }
        self.doubt(address, nonce);
        // The challenge is not sent at once: it would be refused again.
        self.asks.pop();
    }

    /// A packet to `address` goes over UDP at `now`: now and then that triggers another challenge.
    #[inline]
    pub(super) fn detour(&mut self, address: &Address, now: u64) {
        let Some(way) = self.find(address) else { return };
        way.detours = way.detours.saturating_add(1);
        let few = now.saturating_sub(way.called_at) >= CALL_NS;
        if few || way.detours.is_power_of_two() || way.detours % CALL_EVERY == 0 {
            way.called_at = now;
            self.ask(address);
        }
    }

    /// The path to `address` is to be challenged again, unless it is open.
    pub(super) fn ask(&mut self, address: &Address) {
        let Some(way) = self.find(address) else { return };
        let (known, next) = (Ask { to: way.place, nonce: way.nonce }, way.next);
        if way.state != State::Proven || next.is_some() {
            self.asks.push(known);
            self.asks.extend(next);
        }
    }

    /// The queue-pair address of the peer at `address`.
    pub(super) fn place(&mut self, address: &Address) -> Option<Place> {
        self.find(address).map(|way| way.place)
    }

    /// Whether the peer at `address` has said that it is at the port of `gone` ([`Place::gone`]), and of no other since
    /// that has answered.
    pub(super) fn is_at(&mut self, address: &Address, gone: &Place) -> bool {
        self.find(address).is_some_and(|way| {
            let next = way.next.map(|next| next.to);
            next.into_iter().chain([way.place]).any(|place| place.gone() == *gone)
        })
    }

    /// The next challenge to send.
    #[inline]
    pub(super) fn next_ask(&mut self) -> Option<Ask> {
        std::iter::from_fn(|| self.asks.pop()).find(|ask| ask.to.number != 0)
    }

    /// The peer with this queue-pair number: for the log only.
    pub(super) fn by_number(&self, number: u32) -> Option<&Address> {
        self.by_number.get(&number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::net::network::Network;

    fn place(number: u32) -> Place {
        Place { network: Network::Roce, mtu: 1024, number, lid: 0, gid: [1; 16] }
    }

    fn address(port: u16) -> Address {
        Address::from_text(&format!("10.0.0.1:{port}")).unwrap()
    }

    fn asks(ways: &mut Ways<()>) -> Vec<(u32, u64)> {
        let mut all: Vec<_> =
            std::iter::from_fn(|| ways.next_ask()).map(|ask| (ask.to.number, ask.nonce)).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn a_way_is_used_once_it_has_answered() {
        let (mut ways, a) = (Ways::<()>::default(), address(1));
        assert!(ways.open(&a).is_none());
        ways.detour(&a, 7);
        assert_eq!(asks(&mut ways), [], "nothing is known");
        ways.learn(&a, place(5), 77);
        assert_eq!(asks(&mut ways), [(5, 77)]);
        assert!(ways.open(&a).is_none());
        assert_eq!(ways.answered(&a, &place(5), 78), None, "to another call");
        assert_eq!(ways.answered(&a, &place(6), 77), None, "of another place");
        assert_eq!(ways.answered(&address(2), &place(5), 77), None, "of another peer");
        assert_eq!(ways.answered(&a, &place(5), 77), Some(Opened::First));
        assert_eq!(ways.open(&a).unwrap().place, &place(5));
        assert_eq!(ways.answered(&a, &place(5), 77), None, "once");
        ways.learn(&a, place(5), 99);
        assert_eq!(asks(&mut ways), [], "known");
        assert_eq!((ways.proven, ways.by_number(5)), (1, Some(&a)));
    }

    #[test]
    fn a_lost_call_is_made_again_less_and_less_often() {
        let (mut ways, a) = (Ways::<()>::default(), address(1));
        ways.learn(&a, place(5), 77);
        asks(&mut ways);
        let mut calls = Vec::new();
        for n in 1..=5000 {
            ways.detour(&a, 7);
            if !asks(&mut ways).is_empty() {
                calls.push(n);
            }
        }
        assert_eq!(calls, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]);
    }

    /// Its path may have failed for a minute, and carry packets again.
    #[test]
    fn a_peer_that_gets_few_packets_is_called_within_seconds() {
        let (mut ways, a) = (Ways::<()>::default(), address(1));
        ways.learn(&a, place(5), 77);
        asks(&mut ways);
        let mut calls = Vec::new();
        for second in 0..200 {
            ways.detour(&a, second * 1_000_000_000);
            if !asks(&mut ways).is_empty() {
                calls.push(second);
            }
        }
        assert!(calls.windows(2).all(|two| two[1] - two[0] <= 5), "{calls:?}");
        assert!(calls.len() < 50, "{calls:?}");
    }

    #[test]
    fn peers_that_are_gone_leave_nothing() {
        let (mut ways, [a, b, c]) = (Ways::<()>::default(), [1, 2, 3].map(address));
        for (peer, number) in [(&a, 5), (&b, 6), (&c, 7)] {
            ways.learn(peer, place(number), 1);
            assert!(ways.answered(peer, &place(number), 1).is_some());
        }
        ways.learn(&b, place(8), 2);
        assert_eq!((ways.forget(&b), ways.forget(&b)), (Some(1), None));
        assert_eq!((ways.peer(1), ways.position(&c), ways.peer(2)), (Some(&c), Some(1), None));
        assert!(ways.open(&a).is_some() && ways.open(&b).is_none());
        assert_eq!(ways.open(&c).unwrap().place, &place(7));
        assert_eq!(ways.forget(&c), Some(1));
        ways.forget(&a);
        assert!(ways.list.is_empty() && ways.by_address.is_empty() && ways.by_number.is_empty());
        ways.learn(&b, place(6), 3);
        assert_eq!(ways.answered(&b, &place(6), 3), Some(Opened::First));
    }

    #[test]
    fn doubt_closes_a_way_until_it_answers() {
        let (mut ways, a) = (Ways::<()>::default(), address(1));
        ways.learn(&a, place(5), 1);
        ways.answered(&a, &place(5), 1);
        asks(&mut ways);
        assert!(ways.doubt(&a, 2));
        assert!(!ways.doubt(&a, 3), "doubted already");
        assert_eq!(asks(&mut ways), [(5, 2), (5, 2)]);
        assert!(ways.open(&a).is_none());
        assert_eq!(ways.answered(&a, &place(5), 1), None, "an answer of before");
        assert_eq!(ways.answered(&a, &place(5), 2), Some(Opened::Again));
        assert!(ways.open(&a).is_some());
        assert_eq!((ways.proven, ways.doubted), (2, 1));
    }

    #[test]
    fn a_peer_that_moves_is_followed_and_an_old_packet_is_not() {
        for moves in [true, false] {
            let (mut ways, a) = (Ways::<()>::default(), address(1));
            ways.learn(&a, place(5), 1);
            ways.answered(&a, &place(5), 1);
            asks(&mut ways);
            ways.learn(&a, place(6), 2);
            assert_eq!(asks(&mut ways), [(5, 1), (6, 2)]);
            assert!(ways.open(&a).is_none(), "over UDP until it is clear");
            ways.learn(&a, place(6), 3);
            assert_eq!(asks(&mut ways), [(5, 1), (6, 2)], "the same question");
            let (right, nonce) = if moves { (6, 2) } else { (5, 1) };
            let opened = if moves { Opened::First } else { Opened::Again };
            assert_eq!(ways.answered(&a, &place(right), nonce), Some(opened));
            assert_eq!(ways.open(&a).unwrap().place, &place(right));
        }
    }

    #[test]
    fn a_place_that_was_never_proven_is_simply_replaced() {
        let (mut ways, a) = (Ways::<()>::default(), address(1));
        ways.learn(&a, place(5), 1);
        ways.learn(&a, place(6), 2);
        assert_eq!(ways.answered(&a, &place(5), 1), None);
        assert_eq!(ways.answered(&a, &place(6), 2), Some(Opened::First));
    }

    #[test]
    fn a_peer_without_datagrams_is_known_and_not_asked() {
        let (mut ways, a) = (Ways::<()>::default(), address(1));
        ways.learn(&a, place(0), 1);
        ways.detour(&a, 7);
        ways.doubt(&a, 2);
        assert_eq!((asks(&mut ways), ways.place(&a)), (vec![], Some(place(0))));
        ways.learn(&a, place(5), 3);
        assert_eq!(asks(&mut ways), [(5, 3)], "it has now");
        ways.answered(&a, &place(5), 3);
        ways.learn(&a, place(0), 4);
        assert!(ways.open(&a).is_none(), "and no longer");
        assert_eq!((asks(&mut ways), ways.place(&a)), (vec![], Some(place(0))));
    }

    #[test]
    fn a_peer_is_at_the_port_that_answered_and_at_one_that_may() {
        let (mut ways, a) = (Ways::<()>::default(), address(1));
        let [one, two] = [1, 2].map(|gid| Place { gid: [gid; 16], ..place(5) });
        let at = |ways: &mut Ways<()>| [one, two].map(|place| ways.is_at(&a, &place.gone()));
        assert_eq!(at(&mut ways), [false, false], "it is not known");
        ways.learn(&a, one, 1);
        ways.answered(&a, &one, 1);
        assert_eq!(at(&mut ways), [true, false]);
        ways.learn(&a, two, 2);
        assert_eq!(at(&mut ways), [true, true]);
        ways.answered(&a, &two, 2);
        assert_eq!(at(&mut ways), [false, true]);
        ways.lose(&a, two.gone(), 3);
        assert_eq!(at(&mut ways), [false, true]);
    }

    #[test]
    fn a_queue_pair_that_is_said_to_be_gone_may_still_answer() {
        for back in [5, 6] {
            let (mut ways, a) = (Ways::<()>::default(), address(1));
            ways.learn(&a, place(5), 1);
            ways.answered(&a, &place(5), 1);
            asks(&mut ways);
            assert!(ways.lose(&a, place(5).gone(), 2));
            assert!(!ways.lose(&a, place(5).gone(), 3), "known");
            assert_eq!(asks(&mut ways), [(5, 2)]);
            assert!(ways.open(&a).is_none());
            assert_eq!(ways.place(&a), Some(place(5).gone()));
            let nonce = if back == 5 { 2 } else { 4 };
            ways.learn(&a, place(back), 4);
            assert!(asks(&mut ways).contains(&(back, nonce)));
            assert_eq!(ways.answered(&a, &place(back), nonce), Some(Opened::First));
            assert_eq!(ways.open(&a).unwrap().place, &place(back));
        }
    }

    #[test]
    fn a_new_queue_pair_of_ours_proves_all_ways_again() {
        let (mut ways, a, b) = (Ways::<u8>::default(), address(1), address(2));
        for (peer, number) in [(&a, 5), (&b, 6)] {
            ways.learn(peer, place(number), 1);
        }
        ways.answered(&a, &place(5), 1);
        *ways.open(&a).unwrap().handle = Some(77);
        assert_eq!((ways.peer(0), ways.peer(1), ways.peer(2)), (Some(&a), Some(&b), None));
        ways.reset(|| 9);
        assert!(ways.next_ask().is_none() && ways.open(&a).is_none());
        ways.detour(&a, 7);
        assert_eq!(ways.next_ask(), Some(Ask { to: place(5), nonce: 9 }), "when there is traffic");
        assert_eq!(ways.answered(&a, &place(5), 1), None, "an answer to the old one");
        assert_eq!(ways.answered(&a, &place(5), 9), Some(Opened::Again));
        assert_eq!(*ways.open(&a).unwrap().handle, None, "of the old one");
        ways.detour(&b, 7);
        assert_eq!(ways.next_ask(), Some(Ask { to: place(6), nonce: 1 }));
    }

    #[test]
    fn what_the_device_refuses_is_not_asked_at_once() {
        let (mut ways, a) = (Ways::<()>::default(), address(1));
        ways.learn(&a, place(5), 1);
        ways.answered(&a, &place(5), 1);
        asks(&mut ways);
        ways.close(&a, 2);
        assert_eq!(asks(&mut ways), []);
        assert!(ways.open(&a).is_none());
        ways.detour(&a, 7);
        assert_eq!(asks(&mut ways), [(5, 2)]);
    }
}
