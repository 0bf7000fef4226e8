//! Two sides that agree over a network that keeps the order of messages, or loses them where a test says so.

use super::*;
use crate::transport::net::network::Network;
use crate::transport::net::reliable::sim::rng::Rng;

const PEER: PeerId = PeerId(7);

/// A side whose ends are numbers.
struct Double {
    agreement: Agreement<u32>,
    next: u32,
    /// It can make no end, or join none.
    refuses: bool,
    fails: bool,
    /// Joining takes longer than the call.
    slow: bool,
    full: bool,
    /// Ends that exist, and the peer's end that each is joined to.
    ends: Vec<(u32, Option<u32>)>,
    told: usize,
    firsts: usize,
    lost: usize,
}

fn end(number: u32) -> End {
    End { number, psn: 1, mtu: 4096, network: Network::Roce, lid: 0, gid: [3; 16], serves: 0 }
}

impl Side for Double {
    type Link = u32;
    type Why = ();

    fn agreement(&mut self) -> &mut Agreement<u32> {
        &mut self.agreement
    }

    fn has_place(&mut self, _: u64) -> bool {
        !self.full
    }

    fn prepare(&mut self, _: PeerId, to: Option<&End>, _: u64) -> Result<(u32, End), ()> {
        if self.refuses {
            return Err(());
        }
        self.next += 1;
        self.ends.push((self.next, to.map(|to| to.number)));
        Ok((self.next, end(self.next)))
    }

    fn join(&mut self, peer: PeerId, to: Option<&End>, _: u64) -> Result<bool, ()> {
        if self.fails {
            return Err(());
        }
        let link = self.agreement.get(peer).unwrap().link;
        let joined = self.ends.iter_mut().find(|(end, _)| *end == link).unwrap();
        joined.1 = to.map(|to| to.number).or(joined.1);
        Ok(!self.slow)
    }

    fn release(&mut self, _: PeerId, link: u32) {
        let before = self.ends.len();
        self.ends.retain(|(end, _)| *end != link);
        assert_eq!(self.ends.len() + 1, before, "an end is released once");
    }

    fn tell(&mut self, (): ()) {
        self.told += 1;
    }

    fn tell_first(&mut self, _: PeerId) {
        self.firsts += 1;
    }
}

struct Pair {
    sides: [Double; 2],
    /// Messages in flight to each side.
    to: [VecDeque<Control>; 2],
    now: u64,
}

impl Pair {
    /// The first connections that they ask for have these numbers.
    fn new(first: u32, second: u32) -> Self {
        let side = |number: u32, next| Double {
            agreement: Agreement::new(Way::Rc, number.wrapping_sub(1)),
            next,
            refuses: false,
            fails: false,
            slow: false,
            full: false,
            ends: Vec::new(),
            told: 0,
            firsts: 0,
            lost: 0,
        };
        let to = [VecDeque::new(), VecDeque::new()];
        Self { sides: [side(first, 100), side(second, 200)], to, now: 1 }
    }

    fn contact(&mut self, at: usize) -> Prepared {
        let answer = self.sides[at].contact(PEER, self.now);
        self.send(at);
        answer
    }

    /// Puts what side `at` has to say on the way.
    fn send(&mut self, at: usize) {
        while let Some((_, message)) = self.sides[at].agreement.next_control() {
            self.to[1 - at].push_back(message);
        }
    }

    /// The next message to side `at` arrives.
    fn deliver(&mut self, at: usize) -> bool {
        let Some(message) = self.to[at].pop_front() else { return false };
        let message = Message::decode(&message, Way::Rc).unwrap();
        let mut lost = 0;
        self.sides[at].on_message(PEER, &message, self.now, &mut |_| lost += 1);
        self.sides[at].lost += lost;
        self.send(at);
        true
    }

    /// Delivers all messages.
    fn settle(&mut self) {
        for _ in 0..100 {
            let (first, second) = (self.deliver(0), self.deliver(1));
            if !first && !second {
                return;
            }
        }
        panic!("they never fall silent");
    }

    fn fail(&mut self, at: usize) {
        self.sides[at].agreement.doom(PEER);
        let mut lost = 0;
        self.sides[at].lose_doomed(self.now, &mut |_| lost += 1);
        self.sides[at].lost += lost;
        self.send(at);
    }

    /// The connection's number, if both sides have the same one ready, and its ends know each other.
    fn agreed(&self) -> Option<u32> {
        let [first, second] = [0, 1].map(|at| self.sides[at].agreement.ready(PEER));
        let (first, second) = (first?, second?);
        assert_eq!(first.id, second.id);
        for (side, other) in [(0, second.link), (1, first.link)] {
            let [(_, joined)] = self.sides[side].ends[..] else { panic!("one end each") };
            assert_eq!(joined, Some(other));
        }
        Some(first.id)
    }

    fn is_idle(&self, at: usize) -> bool {
        self.sides[at].agreement.len() == 0 && self.sides[at].ends.is_empty()
    }
}

#[test]
fn one_side_asks_and_both_agree() {
    let mut pair = Pair::new(5, 9);
    assert_eq!(pair.contact(0), Prepared::Later);
    pair.deliver(1);
    assert!(pair.sides[1].agreement.is(PEER, 5, Phase::Agreed));
    assert_eq!(pair.contact(1), Prepared::Later, "it does not ask as well");
    pair.deliver(0);
    assert_eq!((pair.contact(0), pair.agreed()), (Prepared::Ready, None), "GO is on its way");
    pair.settle();
    assert_eq!((pair.contact(1), pair.agreed()), (Prepared::Ready, Some(5)));
    assert_eq!(
        pair.sides.each_ref().map(|side| (side.firsts, side.agreement.counts.made)),
        [(1, 1); 2]
    );
}

#[test]
fn a_failure_ends_no_later_connection() {
    let mut pair = Pair::new(5, 9);
    pair.contact(0);
    pair.settle();
    // Both sides see the failure. The one that computes reads the other's OVER and new ASK before it acts on its own.
    pair.sides[1].agreement.doom(PEER);
    pair.fail(0);
    pair.now += 2 * PATIENCE_NS;
    assert_eq!(pair.contact(0), Prepared::Later);
    pair.settle();
    let lost = pair.sides[1].lost;
    assert_eq!(pair.sides[1].lose_doomed(pair.now, &mut |_| panic!("lost")), 0);
    assert_eq!((lost, pair.agreed()), (1, Some(6)));
}

#[test]
fn a_request_is_withdrawn_even_without_room_for_another() {
    let mut pair = Pair::new(5, 9);
    pair.contact(0);
    pair.deliver(1);
    pair.to[0].clear(); // READY is lost
    pair.now += PAUSE_MAX_NS + PATIENCE_NS;
    pair.sides[0].full = true;
    assert_eq!(pair.contact(0), Prepared::No);
    pair.settle();
    assert!(pair.is_idle(0) && pair.is_idle(1), "no end is left without its peer");
}

#[test]
fn of_two_requests_the_smaller_number_stands() {
    for (numbers, order) in [((5, 9), [0, 1]), ((9, 5), [0, 1]), ((5, 9), [1, 0]), ((9, 5), [1, 0])]
    {
        let mut pair = Pair::new(numbers.0, numbers.1);
        assert_eq!([pair.contact(0), pair.contact(1)], [Prepared::Later; 2]);
        for at in order {
            pair.deliver(at);
        }
        pair.settle();
        assert_eq!(pair.agreed(), Some(5));
        assert_eq!(pair.sides.each_ref().map(|side| side.lost), [0; 2], "nothing was in use");
    }
}

#[test]
fn a_link_that_takes_time_becomes_ready_later() {
    let mut pair = Pair::new(1, 2);
    pair.sides[1].slow = true;
    pair.contact(0);
    pair.settle();
    assert!(pair.sides[1].agreement.is(PEER, 1, Phase::Joining));
    pair.now += PAUSE_MAX_NS + PATIENCE_NS;
    assert_eq!(pair.contact(1), Prepared::No, "nor is it given up: that is for the link to say");
    assert_eq!(pair.sides[1].firsts, 0);
    pair.sides[1].begin(PEER, pair.now);
    assert_eq!((pair.agreed(), pair.sides[1].firsts), (Some(1), 1));
}

#[test]
fn a_refusal_pauses_the_next_request() {
    let mut pair = Pair::new(1, 2);
    pair.sides[1].refuses = true;
    pair.contact(0);
    pair.settle();
    assert!(pair.is_idle(0) && pair.is_idle(1));
    assert_eq!((pair.sides[0].agreement.counts.refused, pair.sides[1].told), (1, 1));
    assert_eq!(pair.contact(0), Prepared::No);
    pair.now += pause::PAUSE_NS;
    pair.sides[1].refuses = false;
    assert_eq!(pair.contact(0), Prepared::Later);
    pair.settle();
    assert!(pair.agreed().is_some());
}

#[test]
fn a_side_without_ends_does_not_ask() {
    let mut pair = Pair::new(1, 2);
    pair.sides[0].refuses = true;
    assert_eq!((pair.contact(0), pair.sides[0].told, pair.to[1].len()), (Prepared::No, 1, 0));
    pair.sides[0].refuses = false;
    assert_eq!(pair.contact(0), Prepared::No, "for a while");
    pair.now += pause::PAUSE_NS;
    pair.sides[0].full = true;
    assert_eq!(pair.contact(0), Prepared::No);
    pair.sides[0].full = false;
    assert_eq!(pair.contact(0), Prepared::Later, "a lack of room is no failure");
}

#[test]
fn an_end_that_cannot_be_joined_ends_both() {
    for failing in [0, 1] {
        let mut pair = Pair::new(1, 2);
        pair.sides[failing].fails = true;
        pair.contact(0);
        pair.settle();
        assert!(pair.is_idle(0) && pair.is_idle(1), "{failing}");
        assert_eq!(pair.sides[failing].told, 1);
        assert_eq!([pair.contact(0), pair.contact(1)], [Prepared::No; 2]);
    }
}

#[test]
fn an_answer_that_never_comes_is_asked_for_again() {
    // Of a peer with too much to say, which drops the request, or whose answer was dropped.
    for dropped in [1, 0] {
        let mut pair = Pair::new(1, 2);
        pair.contact(0);
        if dropped == 0 {
            pair.deliver(1);
        }
        assert!(pair.to[dropped].pop_front().is_some());
        pair.now += PATIENCE_NS;
        assert_eq!(pair.contact(0), Prepared::No, "messages do not wait for it any longer");
        pair.now += PAUSE_MAX_NS;
        assert_eq!(pair.contact(0), Prepared::Later);
        pair.settle();
        assert_eq!(pair.agreed(), Some(2));
    }
    let mut pair = Pair::new(1, 2);
    let full = std::iter::repeat_n((PeerId(1), [0; 44]), OUTBOX_MAX).collect();
    pair.contact(0);
    pair.sides[1].agreement.outbox = full;
    pair.deliver(1);
    assert!(pair.is_idle(1), "a flood of requests fills no memory");
}

#[test]
fn a_side_that_forgot_and_asks_again_gets_a_new_connection() {
    let mut pair = Pair::new(1, 2);
    pair.contact(0);
    pair.settle();
    pair.sides[0].erase(PEER);
    assert!(pair.is_idle(0));
    pair.contact(0);
    pair.settle();
    assert_eq!(pair.agreed(), Some(2));
    assert_eq!(
        pair.sides.each_ref().map(|side| side.lost),
        [0, 1],
        "the peer's old one was in use"
    );
}

#[test]
fn what_is_about_another_connection_changes_nothing() {
    let mut pair = Pair::new(1, 2);
    pair.contact(0);
    pair.deliver(1);
    let answer = pair.to[0].pop_front().unwrap();
    // The asker gives the connection up, and asks anew.
    assert!(pair.sides[0].retire(PEER));
    pair.contact(0);
    pair.to[0].push_back(answer);
    pair.deliver(0);
    assert!(pair.sides[0].agreement.is(PEER, 2, Phase::Asked), "a stale answer");
    pair.settle();
    assert_eq!(pair.agreed(), Some(2));
    let said = [
        Message::Go(1),
        Message::Go(2),
        Message::Ready(1, end(9)),
        Message::Ready(2, end(9)),
        Message::Refuse(2),
        Message::Over { connection: 1, broken: true },
    ];
    for message in said {
        pair.to[1].push_back(message.encode(Way::Rc));
    }
    pair.settle();
    assert_eq!(pair.agreed(), Some(2));
}

#[test]
fn a_failure_ends_both_ends_and_pauses() {
    let mut pair = Pair::new(1, 2);
    pair.contact(0);
    pair.settle();
    pair.fail(1);
    pair.settle();
    assert!(pair.is_idle(0) && pair.is_idle(1));
    assert_eq!(
        pair.sides.each_ref().map(|side| (side.lost, side.agreement.counts.broken)),
        [(1, 1); 2]
    );
    assert_eq!([pair.contact(0), pair.contact(1)], [Prepared::No; 2]);
    pair.now += pause::PAUSE_NS;
    pair.sides[0].agreement.note_success(PEER);
    assert_eq!(pair.contact(0), Prepared::Later);
    pair.settle();
    assert!(pair.agreed().is_some());
    // One that is closed to make room may be asked for at once.
    assert!(pair.sides[0].retire(PEER));
    pair.send(0);
    pair.settle();
    assert!(pair.is_idle(0) && pair.is_idle(1));
    assert_eq!(pair.contact(1), Prepared::Later);
}

#[test]
fn one_that_gives_way_is_reported_here_and_has_not_failed() {
    for hears in [false, true] {
        let mut pair = Pair::new(1, 2);
        pair.contact(0);
        pair.settle();
        pair.sides[0].evict(PEER);
        assert!(pair.sides[0].agreement.has_news());
        pair.send(0);
        assert_eq!(pair.to[1].len(), 1, "OVER");
        assert!(pair.sides[0].agreement.has_news(), "this side was not told yet");
        if hears {
            // The peer asks again before this side looks: what it lost is the old connection.
            assert!(pair.deliver(1));
            assert_eq!((pair.sides[1].lost, pair.contact(1)), (1, Prepared::Later));
            assert!(pair.deliver(0));
            assert_eq!(pair.sides[0].lost, 1);
            assert!(pair.sides[0].agreement.ready(PEER).is_none());
        }
        let mut lost = 0;
        let n = pair.sides[0].lose_doomed(pair.now, &mut |_| lost += 1);
        assert_eq!((lost, n), (usize::from(!hears), usize::from(!hears)));
        pair.settle();
        let Counts { evicted, broken, .. } = pair.sides[0].agreement.counts;
        assert_eq!((evicted, broken, pair.sides[1].agreement.counts.broken), (1, 0, 0));
        assert!(!pair.sides[0].agreement.has_news());
        assert_eq!(pair.sides[1].lost, 1, "one OVER");
        assert_ne!(pair.contact(0), Prepared::No, "it may be asked for at once");
    }
}

#[test]
fn one_that_was_never_made_gives_way_unreported() {
    let mut pair = Pair::new(1, 2);
    pair.contact(0);
    pair.sides[0].evict(PEER);
    assert_eq!(pair.sides[0].lose_doomed(pair.now, &mut |_| panic!("lost")), 0);
}

#[test]
fn one_that_ends_with_another_is_reported_too() {
    let mut pair = Pair::new(1, 2);
    pair.contact(0);
    pair.settle();
    let link = pair.sides[0].agreement.end_too(PEER).unwrap();
    pair.sides[0].release(PEER, link);
    assert!(pair.sides[0].agreement.has_news());
    pair.fail(0);
    pair.settle();
    assert!(pair.is_idle(1));
    assert_eq!(pair.sides.each_ref().map(|side| side.lost), [1, 1]);
}

#[test]
fn whatever_happens_they_agree_in_the_end() {
    for seed in 0..2000 {
        let mut rng = Rng::new(seed);
        let mut pair =
            Pair::new(rng.below(1 << 20) as u32 + 1, rng.below(1 << 20) as u32 + (1 << 21));
        for _ in 0..rng.below(60) {
            let at = rng.below(2) as usize;
            match rng.below(12) {
                0..=1 => drop(pair.contact(at)),
                2..=6 => drop(pair.deliver(at)),
                7 => pair.fail(at),
                8 => drop(pair.sides[at].retire(PEER)),
                9 => pair.sides[at].refuses ^= true,
                10 => pair.sides[at].fails ^= true,
                _ => pair.now += rng.below(PAUSE_MAX_NS),
            }
            pair.send(at);
        }
        for side in &mut pair.sides {
            (side.refuses, side.fails) = (false, false);
        }
        pair.settle();
        // Only a connection whose messages are all delivered may be ready at one side.
        let ready = pair.sides.each_ref().map(|side| side.agreement.ready(PEER).is_some());
        assert_eq!(ready[0], ready[1], "seed {seed}");
        pair.now += 40 * PAUSE_MAX_NS;
        assert_ne!(pair.contact(0), Prepared::No, "seed {seed}");
        pair.settle();
        assert!(pair.agreed().is_some(), "seed {seed}");
    }
}
