//! The incoming links of an endpoint: those whose rings are looked at directly, and those that are parked (`hints`).

use super::attach::Entrance;
use super::hints::{Hints, LINKS_MAX, Words};
use super::ring::{Area, Consumer};
use crate::sys::bell::{Bell, BellAddress, Ring};
use crate::sys::shared_memory::SharedMemory;
use crate::sys::{Errno, clock, unix};
use crate::transport::PeerId;
use crate::transport::share::CellTable;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Links of an endpoint of which none is parked: to look at so few costs little. And so many that are looked at directly
/// leave no room for a parked one.
const FEW: usize = 8;
/// Time between two checks which links are idle, nanoseconds. A link is looked at for that long after it is parked, which
/// is longer than `SETTLES_NS`.
const CHECK_NS: u64 = 1_000_000;
/// Checks without a message after which a link is parked.
const QUIET: u32 = 2;
/// How long a process is taken for the one that it has proved to be, nanoseconds: the system does not give its id to another
/// one as soon.
const PROVEN_NS: u64 = 1_000_000;
/// Messages within the time of a check with which a parked link counts as busy.
const BUSY: u32 = 3;

#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) peer: PeerId,
    pub(super) consumer: Consumer,
    /// The connection, between processes that do not both see each other's id.
    pub(super) socket: Option<OwnedFd>,
    pub(super) pid: i32,
    pub(super) nonce: u64,
    /// The receiver's doorbell, and the sender's.
    pub(super) bell: Arc<Bell>,
    pub(super) theirs: BellAddress,
    /// Address of the sender's gate, and whether we have found it closed.
    pub(super) gate: u64,
    pub(super) shut: AtomicBool,
    /// Until when the sender's process need not be asked who it is before a write, nanoseconds.
    pub(super) proven_until: AtomicU64,
    pub(super) can_get: bool,
    pub(super) can_put: bool,
    /// The sender takes part in split copies.
    pub(super) assists: bool,
    /// The sender can use direct RMA on our regions.
    pub(super) reaches: bool,
    /// The payload buffers of its segment, if the sender supports recycled ones.
    pub(super) places: Option<Area<Arc<SharedMemory>>>,
    pub(super) cells: CellTable,
    pub(super) attention: Attention,
}

/// How busy a link is, and whether its ring is looked at directly.
#[derive(Debug, Default)]
pub(super) struct Attention {
    /// The number of its bit in the words of the endpoint.
    number: u32,
    /// Slots consumed at the last check, and checks since they were fewer.
    consumed: u32,
    quiet: u32,
    /// The sender was told to set its bit.
    parked: bool,
    /// Looks that found a message since check `since`, while it was parked.
    found: u32,
    since: u32,
}

impl Inbound {
    /// Whether we may copy from the sender's memory, and to it.
    pub(super) fn reach(&self) -> (bool, bool) {
        let open = !self.shut.load(Ordering::Relaxed);
        (self.can_get && open, self.can_put && open)
    }

    /// Rings the sender's doorbell: this side of the link has ended.
    pub(super) fn ring(&self) {
        self.bell.ring(self.theirs, Ring::End);
    }

    pub(super) fn entrance(&self) -> Entrance {
        Entrance { pid: self.pid, gate: self.gate, name: self.nonce }
    }

    /// The process with the sender's id is the sender, or was a short time ago. Errors: as [`Entrance::read`].
    pub(super) fn prove(&self) -> Result<(), Errno> {
        let now = clock::now_ns();
        if now >= self.proven_until.load(Ordering::Relaxed) {
            self.entrance().prove()?;
            self.proven_until.store(now + PROVEN_NS, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The sender has closed, or its process has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.consumer.producer_closed()
            || self.bell.is_gone(self.theirs)
            || self.socket.as_ref().is_some_and(|socket| unix::is_over(socket.as_fd()))
    }
}

impl Inbound {
    /// One check of a link whose ring is looked at: an idle one is parked, and left to the words in a later check. `many`:
    /// the endpoint parks links. True: the ring need not be looked at.
    fn may_be_left(&mut self, many: bool) -> bool {
        let Self { consumer, attention, .. } = self;
        let consumed = consumer.consumed();
        if !many || consumed != attention.consumed || consumer.has_message() {
            if attention.parked {
                consumer.set_parked(false);
            }
            (attention.consumed, attention.quiet, attention.parked) = (consumed, 0, false);
            return false;
        }
        if attention.parked {
            return true;
        }
        attention.quiet += 1;
        attention.parked = attention.quiet >= QUIET && consumer.is_hinted();
        if attention.parked {
            consumer.set_parked(true);
        }
        false
    }
}

/// Where a link with a number is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Free,
    Direct(u32),
    Parked(u32),
}

/// No number.
const NONE: u32 = u32::MAX;

/// All incoming links of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Links {
    direct: Vec<Inbound>,
    parked: Vec<Inbound>,
    /// By number.
    places: Vec<Place>,
    /// Numbers whose place is free.
    free: Vec<u32>,
    /// By peer.
    numbers_of: Vec<u32>,
    /// `None`: no link is parked.
    hints: Option<Hints>,
    /// Empty: room for numbers.
    numbers: Vec<u32>,
    /// Senders were told to set their bits since there were few links.
    told: bool,
    /// When the last check was, nanoseconds, and how many there were.
    checked_at: u64,
    checks: u32,
}

impl Links {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Inbound> {
        self.direct.iter().chain(&self.parked)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Inbound> {
        self.direct.iter_mut().chain(&mut self.parked)
    }

    /// The link from `peer`.
    #[inline]
    pub(super) fn of(&self, peer: PeerId) -> Option<&Inbound> {
        match self.place_of(peer)? {
            Place::Free => None,
            Place::Direct(at) => self.direct.get(at as usize),
            Place::Parked(at) => self.parked.get(at as usize),
        }
    }

    pub(super) fn of_mut(&mut self, peer: PeerId) -> Option<&mut Inbound> {
        match self.place_of(peer)? {
            Place::Free => None,
            Place::Direct(at) => self.direct.get_mut(at as usize),
            Place::Parked(at) => self.parked.get_mut(at as usize),
        }
    }

    fn place_of(&self, peer: PeerId) -> Option<Place> {
        let number = *self.numbers_of.get(peer.index())?;
        self.places.get(number as usize).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.direct.len() + self.parked.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those that are looked at directly.
    #[inline]
    pub(super) fn direct(&mut self) -> &mut [Inbound] {
        &mut self.direct
    }

    /// Whether there are parked links.
    pub(super) fn are_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Whether some parked link may have something.
    #[inline]
    pub(super) fn is_raised(&self) -> bool {
        !self.parked.is_empty() && self.hints.as_ref().is_some_and(Words::is_raised)
    }

    /// The numbers of the parked links that may have something, which [`Self::reuse`] takes back.
    pub(super) fn take_raised(&mut self) -> Vec<u32> {
        let mut numbers = std::mem::take(&mut self.numbers);
        if let Some(hints) = &self.hints {
            hints.take(|number| numbers.push(number));
        }
        numbers
    }

    pub(super) fn reuse(&mut self, mut numbers: Vec<u32>) {
        numbers.clear();
        self.numbers = numbers;
    }

    /// The parked link with this number.
    pub(super) fn parked(&mut self, number: u32) -> Option<&mut Inbound> {
        match self.places.get(number as usize) {
            Some(Place::Parked(at)) => self.parked.get_mut(*at as usize),
            _ => None,
        }
    }

    /// The processor fetches the next slots of these parked links.
    #[inline]
    pub(super) fn fetch<'n>(&self, numbers: impl Iterator<Item = &'n u32>) {
        for number in numbers {
            if let Some(Place::Parked(at)) = self.places.get(*number as usize) {
                self.parked.get(*at as usize).iter().for_each(|link| link.consumer.fetch());
            }
        }
    }

    /// What the sender of the next link has to know to set its bit: the words, and the number of the bit.
    pub(super) fn next_hint(&mut self) -> Option<(&Hints, u32)> {
        if self.hints.is_none() {
            self.hints = Hints::new().ok();
        }
        let number = self.next_number();
        let few = |_: &&Hints| (number as usize) < LINKS_MAX;
        self.hints.as_ref().filter(few).map(|hints| (hints, number))
    }

    fn next_number(&self) -> u32 {
        self.free.last().copied().unwrap_or(self.places.len() as u32)
    }

    /// Adds a link, with the number that [`Self::next_hint`] has told.
    pub(super) fn push(&mut self, mut link: Inbound) {
        let number = self.next_number();
        if self.free.pop().is_none() {
            self.places.push(Place::Free);
        }
        let peer = link.peer.index();
        if self.numbers_of.len() <= peer {
            self.numbers_of.resize(peer + 1, NONE);
        }
        if let Some(of) = self.numbers_of.get_mut(peer) {
            *of = number;
        }
        link.attention = Attention { number, ..Attention::default() };
        self.look_at(link);
    }

    /// From now on the ring of this link is looked at directly.
    fn look_at(&mut self, link: Inbound) {
        self.put(link.attention.number, Place::Direct(self.direct.len() as u32));
        self.direct.push(link);
    }

    /// Removes the link from `peer`.
    pub(super) fn remove(&mut self, peer: PeerId) -> Option<Inbound> {
        let link = self.take(self.place_of(peer)?)?;
        self.put(link.attention.number, Place::Free);
        self.free.push(link.attention.number);
        if let Some(number) = self.numbers_of.get_mut(peer.index()) {
            *number = NONE;
        }
        Some(link)
    }

    fn put(&mut self, number: u32, place: Place) {
        if let Some(to) = self.places.get_mut(number as usize) {
            *to = place;
        }
    }

    /// Takes the link out of its list, where the last one takes its place.
    fn take(&mut self, place: Place) -> Option<Inbound> {
        let (list, at) = match place {
            Place::Free => return None,
            Place::Direct(at) => (&mut self.direct, at as usize),
            Place::Parked(at) => (&mut self.parked, at as usize),
        };
        let link = (at < list.len()).then(|| list.swap_remove(at))?;
        if let Some(moved) = list.get(at).map(|link| link.attention.number) {
            self.put(moved, place);
        }
        Some(link)
    }

    /// A look at the parked link with this number has found messages. A busy one is looked at directly from now on.
    /// `sleeping`: a thread sleeps, and its sender is to ring.
    pub(super) fn found(&mut self, number: u32, sleeping: bool) {
        let (checks, room) = (self.checks, self.direct.len() < FEW);
        let Some(Place::Parked(at)) = self.places.get(number as usize).copied() else {
            return;
        };
        let Some(link) = self.parked.get_mut(at as usize) else { return };
        let attention = &mut link.attention;
        if attention.since != checks {
            (attention.since, attention.found) = (checks, 0);
        }
        attention.found += 1;
        if attention.found < BUSY || !room {
            return;
        }
        let Some(mut link) = self.take(Place::Parked(at)) else { return };
        // In this order: the sender sees one of the two, or both.
        if sleeping {
            link.consumer.sleep();
        }
        link.consumer.set_parked(false);
        link.attention =
            Attention { number, consumed: link.consumer.consumed(), ..Attention::default() };
        self.look_at(link);
    }

    /// The parked link with this number has more messages than were taken, or one that cannot be mapped now. A thread that
    /// sleeps is still to be woken by the next sender.
    pub(super) fn set_again(&self, number: u32) {
        if let Some(hints) = &self.hints {
            hints.set(number);
        }
    }

    /// Parks links that are idle. Called now and then.
    #[inline]
    pub(super) fn check(&mut self, now: u64) {
        let many = self.len() > FEW;
        if (many || self.told) && now.saturating_sub(self.checked_at) >= CHECK_NS {
            self.park_idle(many);
            // Not `now`: a thread may lose its processor after that, and what it parked would have less time to settle.
            self.checked_at = clock::now_ns();
        }
    }

    #[cold]
    fn park_idle(&mut self, many: bool) {
        self.checks = self.checks.wrapping_add(1);
        if self.hints.is_none() {
            return;
        }
        self.told = many;
        let mut at = 0;
        while let Some(link) = self.direct.get_mut(at) {
            if !link.may_be_left(many) {
                at += 1;
            } else if let Some(link) = self.take(Place::Direct(at as u32)) {
                self.put(link.attention.number, Place::Parked(self.parked.len() as u32));
                self.parked.push(link);
            }
        }
    }

    /// Announces sleep to the senders. False: a message is there.
    pub(super) fn sleep(&self) -> bool {
        if let Some(hints) = &self.hints {
            if self.parked.is_empty() {
                // Of links that are looked at directly by now.
                hints.take(|_| ());
            }
            if !hints.sleep() {
                return false;
            }
        }
        self.direct.iter().all(|link| link.consumer.sleep())
    }

    /// Has the senders ring for their next message, although a message may be there.
    pub(super) fn watch(&self) {
        if let Some(hints) = &self.hints {
            hints.sleep();
        }
        self.direct.iter().for_each(|link| {
            link.consumer.sleep();
        });
    }

    /// Withdraws the announcement.
    pub(super) fn awake(&self) {
        if let Some(hints) = &self.hints {
            hints.awake();
        }
        self.direct.iter().for_each(|link| link.consumer.awake());
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Heard::Message;
    use super::super::fixture::{Deaf, Ears, End, end};
    use super::*;
    use crate::patience;
    use crate::sys::shared_memory::ALONE;
    use crate::transport::shm::config::CmaPolicy;
    use crate::transport::shm::watching::LIVENESS_NS;
    use crate::transport::{Messages, Mode, Transport};
    use std::time::Instant;

    const MANY: usize = FEW + 4;

    /// Links to `here` from so many new endpoints.
    fn others(here: &mut End, count: usize) -> Vec<(End, PeerId)> {
        let link = |_| {
            let mut other = end(CmaPolicy::Off);
            let peer = other.connect(here);
            // A reply that cannot have its descriptor now is sent in a later turn: see `in_flight`.
            let (links, begun) = (here.shm.inbound.len(), Instant::now());
            while here.shm.inbound.len() == links {
                here.turn(&mut Deaf);
                assert!(begun.elapsed() < patience::seconds(20), "no link");
            }
            other.turn(&mut Deaf);
            (other, peer)
        };
        (0..count).map(link).collect()
    }

    /// Whether a thread that sleeps there would wake.
    fn rings(here: &End) -> bool {
        here.shm.bell.as_ref().unwrap().rings()
    }

    /// An endpoint with links from many others, all of them parked.
    fn quiet() -> (End, Vec<(End, PeerId)>) {
        let mut here = end(CmaPolicy::Off);
        let others = others(&mut here, MANY);
        rest(&mut here);
        assert_eq!(here.shm.inbound.len(), MANY);
        assert!(here.shm.inbound.direct().is_empty());
        (here, others)
    }

    /// Some checks, without messages.
    fn rest(end: &mut End) {
        for _ in 0..QUIET + 2 {
            end.shm.inbound.checked_at = 0;
            end.shm.inbound.check(u64::MAX);
        }
    }

    fn send((end, peer): &mut (End, PeerId), len: usize) {
        end.shm.send(*peer, Mode::Short, b"header", len, |_, _| ()).unwrap();
    }

    fn polled(end: &mut End) -> Vec<super::super::fixture::Heard> {
        let mut ears = Ears::default();
        end.shm.poll(&mut ears);
        ears.0
    }

    #[test]
    fn a_parked_link_is_heard_at_once_and_a_busy_one_is_looked_at() {
        let (mut here, mut others) = quiet();
        assert!(polled(&mut here).is_empty());
        for (len, other) in others.iter_mut().enumerate() {
            send(other, len);
        }
        assert!(here.shm.inbound.is_raised());
        let all: Vec<_> = (0..MANY).map(Message).collect();
        let mut heard = polled(&mut here);
        heard.sort_by_key(|heard| if let Message(len) = heard { *len } else { 0 });
        assert_eq!(heard, all);
        assert!(!here.shm.inbound.is_raised());
        for len in 1..=BUSY as usize {
            send(&mut others[3], len);
            assert_eq!(polled(&mut here), [Message(len)]);
        }
        assert_eq!(here.shm.inbound.direct().len(), 1);
        send(&mut others[3], 9);
        assert!(!here.shm.inbound.is_raised(), "the sender knows");
        assert_eq!(polled(&mut here), [Message(9)]);
        rest(&mut here);
        assert!(here.shm.inbound.direct().is_empty());
    }

    #[test]
    fn more_than_a_batch_of_a_parked_link_comes_in_several_polls() {
        let (mut here, mut others) = quiet();
        (0..20).for_each(|len| send(&mut others[0], len));
        let mut heard = polled(&mut here);
        assert!(heard.len() < 20);
        heard.extend(polled(&mut here));
        assert_eq!(heard, (0..20).map(Message).collect::<Vec<_>>());
    }

    #[test]
    fn a_message_of_a_parked_link_that_cannot_be_mapped_is_looked_at_again() {
        let (mut here, mut others) = quiet();
        let (sender, peer) = &mut others[0];
        sender.shm.send(*peer, Mode::Bulk, b"header", 5000, |_, _| ()).unwrap();
        ALONE.set(true);
        let heard = polled(&mut here);
        assert!(heard.is_empty() || heard == [Message(5000)]);
        if heard.is_empty() {
            assert!(!here.shm.sleep(), "nobody would wake the thread");
        }
        ALONE.set(false);
        if !heard.is_empty() {
            eprintln!("skipped: this system maps a segment as a whole");
            return;
        }
        assert_eq!(polled(&mut here), [Message(5000)]);
        assert!(!here.shm.inbound.is_raised());
    }

    #[test]
    fn a_message_while_it_is_parked_keeps_a_link() {
        let (mut here, mut others) = quiet();
        for len in 0..=BUSY as usize {
            send(&mut others[0], len);
            polled(&mut here);
        }
        for _ in 0..=QUIET {
            here.shm.inbound.checked_at = 0;
            here.shm.inbound.check(u64::MAX);
        }
        assert!(here.shm.inbound.direct()[0].attention.parked);
        send(&mut others[0], 7);
        here.shm.inbound.checked_at = 0;
        here.shm.inbound.check(u64::MAX);
        assert!(!here.shm.inbound.direct()[0].attention.parked);
        assert_eq!(polled(&mut here), [Message(7)]);
    }

    #[test]
    fn parked_links_wake_a_sleeper_and_keep_one_awake() {
        let (mut here, mut others) = quiet();
        send(&mut others[5], 1);
        assert!(!here.shm.sleep(), "something is there");
        assert_eq!(polled(&mut here), [Message(1)]);
        assert!(here.shm.sleep() && !rings(&here));
        send(&mut others[6], 2);
        assert!(rings(&here));
        here.shm.awake();
        assert_eq!(polled(&mut here), [Message(2)]);
    }

    #[test]
    fn a_sender_that_stops_before_it_rings_delays_the_others_by_half_a_second_only() {
        let (mut here, mut others) = quiet();
        // The checks are rare.
        here.shm.watches.expect(usize::MAX, u64::MAX);
        assert!(here.shm.sleep());
        let (stopped, peer) = &others[0];
        assert!(stopped.shm.out(*peer).unwrap().hint.as_ref().unwrap().raise());
        send(&mut others[1], 1);
        assert!(!rings(&here), "the other one was to ring");
        let latest = clock::now_ns() + LIVENESS_NS;
        let at = here.shm.watches.wakes_at();
        assert!(at > 0 && at <= latest);
        here.shm.awake();
        assert_eq!(polled(&mut here), [Message(1)]);
    }

    #[test]
    fn another_thread_that_takes_a_batch_does_not_let_a_sleeper_sleep_on() {
        let (mut here, mut others) = quiet();
        assert!(here.shm.sleep());
        (0..20).for_each(|len| send(&mut others[0], len));
        here.shm.poll_sockets(&mut here.peers, &mut Deaf);
        assert!(
            rings(&here),
            "the ring that was silenced was for the messages that are still there"
        );
        assert!(polled(&mut here).len() < 20);
        here.shm.poll_sockets(&mut here.peers, &mut Deaf);
        while !polled(&mut here).is_empty() {}
        here.shm.poll_sockets(&mut here.peers, &mut Deaf);
        assert!(!rings(&here));
        send(&mut others[1], 1);
        assert!(rings(&here));
    }

    #[test]
    fn a_thread_that_began_to_sleep_without_links_is_woken_by_parked_ones() {
        let mut here = end(CmaPolicy::Off);
        assert!(here.shm.sleep());
        let mut others = others(&mut here, MANY);
        rest(&mut here);
        assert!(here.shm.inbound.direct().is_empty() && !rings(&here));
        send(&mut others[0], 1);
        assert!(rings(&here));
    }

    #[test]
    fn a_link_that_was_parked_late_has_its_time_to_settle() {
        let mut here = end(CmaPolicy::Off);
        // No checks so far.
        here.shm.inbound.checked_at = u64::MAX;
        let _others = others(&mut here, MANY);
        let begun = clock::now_ns();
        for _ in 0..QUIET {
            here.shm.inbound.checked_at = 0;
            here.shm.inbound.check(begun - 10 * CHECK_NS);
        }
        assert!(here.shm.inbound.direct().iter().all(|link| link.attention.parked));
        here.shm.inbound.check(begun + CHECK_NS - 1);
        assert_eq!(here.shm.inbound.direct().len(), MANY);
        here.shm.inbound.check(u64::MAX);
        assert!(here.shm.inbound.direct().is_empty());
    }

    #[test]
    fn numbers_are_used_again_and_links_end_in_any_order() {
        let (mut here, mut others) = quiet();
        for at in [0, 4, MANY - 3] {
            drop(others.remove(at));
        }
        let mut ears = Ears::default();
        (0..5).for_each(|_| here.turn(&mut ears));
        assert_eq!((ears.0.len(), here.shm.inbound.len()), (3, MANY - 3));
        others.extend(self::others(&mut here, 3));
        assert_eq!(here.shm.inbound.places.len(), MANY);
        rest(&mut here);
        for other in &mut others {
            send(other, 5);
            assert_eq!(polled(&mut here), [Message(5)]);
        }
    }

    #[test]
    fn few_links_are_never_parked() {
        let mut here = end(CmaPolicy::Off);
        let others = others(&mut here, FEW);
        rest(&mut here);
        assert_eq!(here.shm.inbound.direct().len(), others.len());
    }
}
