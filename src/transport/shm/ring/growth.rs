//! The bulk space of a segment grows with what the link carries, and shrinks when it is idle.
//!
//! The sender alone decides, because only it writes there before the receiver reads. Its segment has room for the
//! largest sizes from the beginning, but pages are reserved before they are first used, and given back to the system
//! when the link is idle. Offsets in the bulk space are computed modulo its present length, so that the length changes
//! only while the receiver has consumed everything, or where that leaves what is in flight at its offsets.

use super::super::budget::Budget;
use super::super::layout::{Geometry, ROOMS, SLOT, SLOTS, SLOTS_STEP};
use super::super::storage::Storage;
use crate::telemetry::log;
use std::sync::Arc;

/// Slots that are reserved beyond those in use when more are needed: enough for the longest unsolicited message.
const AHEAD: u32 = 64;
/// A link grows after so many laps through the room it has.
const LAPS: u32 = 2;
/// Links that can still grow to their largest sizes where payload buffers are taken early, which are not given back.
const PLENTY: usize = 4;
/// Checks without payload after which a link is idle.
const IDLE: u32 = 10;

/// Messages wait until there is memory for them.
#[cold]
fn say_short() {
    log::limited!(
        "the system gives no memory for messages to peers of this node (vm.overcommit_memory, a limit of the control group): they wait until it does"
    );
}

#[derive(Debug)]
pub(super) struct Growth {
    budget: Arc<Budget>,
    /// Slots that are reserved.
    slots: u32,
    /// Bytes of bulk space that are reserved; 0 before the first payload.
    pub(super) room: u32,
    /// Bytes taken from the budget for bulk space, and for payload buffers.
    taken: usize,
    kept: usize,
    /// The payload buffers are reserved.
    pub(super) places: bool,
    /// Bytes sent when it last grew or tried to.
    pub(super) since: u32,
    /// Payloads sent at the last check, and checks since they were fewer.
    seen: u32,
    quiet: u32,
}

impl Growth {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self {
            budget,
            slots: SLOTS_STEP,
            room: 0,
            taken: 0,
            kept: 0,
            places: false,
            since: 0,
            seen: 0,
            quiet: 0,
        }
    }

    /// Slots that may be used from index `at` on before a later look. Reserves more if there are less than `wanted`. Before
    /// all are reserved, one stays free: the receiver looks at the slot behind the last message.
    pub(super) fn slots_after<M: Storage>(
        &mut self,
        at: u32,
        wanted: u32,
        memory: &M,
        of: Geometry,
    ) -> u32 {
        let ahead = if self.slots - at <= wanted { wanted + AHEAD } else { 0 };
        while self.slots < of.slots && self.slots - at < ahead {
            let start = SLOTS + self.slots as usize * SLOT;
            if !memory.reserve(start, SLOTS_STEP as usize * SLOT) {
                say_short();
                break;
            }
            self.slots += SLOTS_STEP;
        }
        if self.slots < of.slots { (self.slots - at).saturating_sub(1) } else { of.slots }
    }

    /// Whether the link has carried enough since it grew.
    pub(super) fn is_due(&self, sent: u32) -> bool {
        self.room == 0 || sent.wrapping_sub(self.since) >= LAPS * self.room
    }

    /// Reserves `room` bytes. The first ones are not counted. `must`: even if the budget has less.
    pub(super) fn grow<M: Storage>(&mut self, memory: &M, of: Geometry, room: u32, must: bool) {
        if room <= self.room {
            return;
        }
        let bytes = (room - self.room) as usize;
        let taken = match (room > ROOMS[0], must) {
            (false, _) => 0,
            (true, true) => self.budget.take_some(bytes),
            (true, false) if self.budget.take(bytes) => bytes,
            (true, false) => return,
        };
        if memory.reserve(of.bulk_at() + self.room as usize, bytes) {
            self.room = room;
            self.taken += taken;
        } else {
            say_short();
            self.budget.give(taken);
        }
    }

    /// Whether other links can grow although this one takes what it keeps.
    pub(super) fn has_plenty(&self, of: Geometry) -> bool {
        self.budget.has(PLENTY * of.len())
    }

    /// Reserves the payload buffers, which stay: the peer may own some. False: they were reserved before, or cannot be.
    pub(super) fn reserve_places<M: Storage>(&mut self, memory: &M, of: Geometry) -> bool {
        let bytes = of.len() - of.places_at();
        if self.places || !self.budget.take(bytes) {
            return false;
        }
        self.places = memory.reserve(of.places_at(), bytes);
        match self.places {
            true => self.kept = bytes,
            false => self.budget.give(bytes),
        }
        self.places
    }

    /// Whether nothing was sent for some checks.
    pub(super) fn is_idle(&mut self, sent: u32) -> bool {
        self.quiet = if sent == self.seen { self.quiet.saturating_add(1) } else { 0 };
        self.seen = sent;
        self.quiet >= IDLE
    }

    /// Whether the budget has enough for all of the bulk space.
    pub(super) fn may_have(&self, bulk: u32) -> bool {
        self.budget.has(bulk.saturating_sub(self.room) as usize)
    }

    /// Keeps the first room alone, unless the system refuses to take the rest back.
    pub(super) fn shrink<M: Storage>(&mut self, memory: &M, of: Geometry) {
        if memory.release(of.bulk_at() + ROOMS[0] as usize, (self.room - ROOMS[0]) as usize) {
            self.budget.give(std::mem::take(&mut self.taken));
            self.room = ROOMS[0];
        }
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        self.budget.give(self.taken + self.kept);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::layout::LAVISH;
    use super::super::{Area, Consumer, Popped, Producer};
    use super::*;
    use crate::sys::shared_memory::{ALONE, SharedMemory};
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::sync::atomic::Ordering;

    const FIRST: usize = SLOTS + SLOTS_STEP as usize * SLOT;

    struct Link {
        tx: Producer,
        rx: Consumer,
        file: OwnedFd,
        budget: Arc<Budget>,
    }

    fn link(budget: usize) -> Link {
        let (all, head) = (LAVISH.len(), LAVISH.bulk_at());
        let (memory, file) = SharedMemory::create_in_parts(all, head, FIRST).unwrap();
        let other = SharedMemory::attach_in_parts(&file, all, head).unwrap();
        let budget = Arc::new(Budget::new(budget));
        let mut tx = Producer::frugal(Arc::new(memory), LAVISH, budget.clone());
        tx.settle();
        tx.allow_restarts();
        Link { tx, rx: Consumer::new(Arc::new(other), LAVISH), file, budget }
    }

    impl Link {
        /// Bytes of memory that the segment has.
        fn bytes(&self) -> usize {
            let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap());
            blocks as usize * 512
        }

        fn push(&mut self, len: usize, byte: u8) -> bool {
            let fill = |to: &mut [u8]| to.fill(byte);
            match len <= 100 {
                true => self.tx.push_short(&[], len, fill).is_ok(),
                false => self.tx.push_bulk(&[], len, fill).is_ok(),
            }
        }

        fn pop(&mut self) -> Option<(usize, u8)> {
            let mut got = None;
            let popped = self.rx.pop(|_, payload| {
                let byte = payload.first().copied().unwrap_or(0);
                assert!(payload.iter().all(|one| *one == byte));
                got = Some((payload.len(), byte));
            });
            assert!(!matches!(popped, Popped::Malformed));
            got
        }

        fn carry(&mut self, bytes: usize) {
            for _ in 0..bytes / 4096 {
                assert!(self.push(4096, 1));
                assert_eq!(self.pop(), Some((4096, 1)));
            }
        }

        fn rest(&mut self) {
            (0..=IDLE).for_each(|_| self.tx.rest());
        }
    }

    #[test]
    fn a_link_that_carries_little_at_a_time_stays_in_its_first_pages() {
        let mut link = link(4 << 20);
        for i in 0..10_000_u32 {
            // As many at a time as may be unread where a lap ends.
            let count = i % 2 + 1;
            (0..count).for_each(|j| assert!(link.push(8, j as u8)));
            (0..count).for_each(|j| assert_eq!(link.pop(), Some((8, j as u8))));
            assert_eq!(link.pop(), None);
        }
        assert_eq!(link.bytes(), FIRST);
        // A burst has all slots, and then they are few again.
        let burst = (0..1000).take_while(|i| link.push(8, *i as u8)).count();
        assert!((200..=256).contains(&burst), "{burst}");
        (0..burst).for_each(|i| assert_eq!(link.pop(), Some((8, i as u8))));
        assert_eq!(link.pop(), None);
        link.rx.announce();
        for i in 0..600 {
            assert!(link.push(8, i as u8) && link.pop() == Some((8, i as u8)));
            assert_eq!(link.pop(), None);
        }
        assert!(link.tx.laps.at < SLOTS_STEP);
    }

    #[test]
    fn a_busy_link_has_all_slots_after_a_short_lap() {
        let mut link = link(4 << 20);
        let mut calm = 0;
        while calm < 40 || link.tx.laps.at != SLOTS_STEP - 1 {
            assert!(link.push(8, 0) && link.pop().is_some() && link.pop().is_none());
            calm += 1;
        }
        let (mut unread, mut most) = (0, 0);
        for _ in 0..50 {
            unread += (0..300).take_while(|_| link.push(8, 0)).count();
            most = most.max(unread);
            (0..16).for_each(|_| assert!(link.pop().is_some()));
            unread -= 16;
        }
        assert!(most > 200, "{most}");
    }

    #[test]
    fn a_link_begins_frugal_grows_and_shrinks() {
        let mut link = link(4 << 20);
        assert_eq!(link.bytes(), FIRST);
        for i in 0..31 {
            assert!(link.push(8, i) && link.pop() == Some((8, i)));
            assert_eq!(link.pop(), None);
            link.rest();
        }
        assert_eq!(link.bytes(), FIRST, "one page of slots is enough");
        for i in 31..200 {
            assert!(link.push(8, i) && link.pop() == Some((8, i)));
            let reserved = link.bytes();
            assert_eq!((link.pop(), link.bytes()), (None, reserved), "an empty look takes no page");
        }
        link.carry(32 << 10);
        assert!(link.bytes() <= FIRST + (64 << 10) && link.tx.sizes().bulk == ROOMS[0]);
        link.carry(96 << 10);
        assert_eq!(link.tx.sizes().bulk, ROOMS[1]);
        link.carry(600 << 10);
        assert_eq!(link.tx.sizes().bulk, LAVISH.bulk);
        assert!(link.bytes() > 2 << 20);
        assert!(!link.budget.take(2 << 20), "it has taken that");
        link.rest();
        assert_eq!(link.tx.sizes().bulk, ROOMS[0]);
        assert!(link.bytes() < 400 << 10, "{}", link.bytes());
        assert!(link.budget.take(2 << 20), "it has given that back");
        link.budget.give(2 << 20);
        link.carry(700 << 10);
        assert_eq!(link.tx.sizes().bulk, LAVISH.bulk);
        let budget = link.budget.clone();
        drop(link);
        assert!(budget.has(4 << 20), "an ended link takes nothing");
    }

    #[test]
    fn the_man_page_tells_what_a_link_takes() {
        let page = include_str!("../../../../man/fi_udrv.7").split_whitespace();
        let page = page.collect::<Vec<_>>().join(" ");
        let says = |words: String| assert!(page.contains(&words), "{words}");
        let mut link = link(4 << 20);
        assert!(link.push(8, 1) && link.pop() == Some((8, 1)));
        says(format!("takes {} KiB of shared memory for each peer", link.bytes() >> 10));
        let first = link.bytes();
        for i in 0..600 {
            assert!(link.push(8, i as u8) && link.pop() == Some((8, i as u8)));
            assert_eq!(link.pop(), None);
        }
        // From here on a lap does not end before the messages below are read.
        assert!(link.tx.laps.at < SLOTS_STEP - 5);
        assert_eq!(link.bytes(), first, "messages that are read at once");
        link.rx.announce();
        let unread = (0..256).take_while(|i| link.push(8, *i as u8)).count();
        (0..unread).for_each(|i| assert_eq!(link.pop(), Some((8, i as u8))));
        let slots = link.bytes();
        says(format!("up to {} KiB once they came faster than they were read", slots >> 10));
        assert!(link.push(101, 1) && link.pop() == Some((101, 1)));
        says(format!("{} KiB more once one was longer", (link.bytes() - slots) >> 10));
        link.carry(100 << 10);
        says(format!("grows to {} KiB", link.bytes() >> 10));
        link.carry(1 << 20);
        says(format!("and then to {:.1} MiB", link.bytes() as f64 / f64::from(1 << 20)));
    }

    #[test]
    fn a_payload_that_cannot_be_mapped_waits() {
        let mut link = link(4 << 20);
        assert!(link.push(8, 1) && link.push(4096, 2) && link.push(8, 3));
        ALONE.set(true);
        assert_eq!((link.pop(), link.pop(), link.pop()), (Some((8, 1)), None, None));
        assert!(link.rx.has_message());
        let consumed = link.tx.memory().atomic(0).unwrap().load(Ordering::Relaxed);
        assert_eq!(consumed, 1, "the sender knows what was consumed");
        ALONE.set(false);
        assert_eq!((link.pop(), link.pop()), (Some((4096, 2)), Some((8, 3))));
    }

    #[test]
    fn a_link_without_budget_stays_frugal_and_takes_what_it_must() {
        let mut link = link(0);
        link.carry(4 << 20);
        assert_eq!(link.tx.sizes().bulk, ROOMS[0]);
        link.tx.grow_for(1 << 20, false);
        assert_eq!(link.tx.sizes().bulk, ROOMS[0]);
        // A message that was promised while there was room.
        assert!(link.push(64 << 10, 3));
        assert_eq!(link.pop(), Some((64 << 10, 3)));
    }

    #[test]
    fn a_link_grows_although_its_receiver_does_not_look() {
        let mut link = link(4 << 20);
        let count = (0..).take_while(|i| link.push(8000, *i as u8)).count();
        assert!(count * 8000 > 1 << 20, "{count}");
        for i in 0..count {
            assert_eq!(link.pop(), Some((8000, i as u8)));
        }
        assert_eq!(link.pop(), None);
        // A lap that begins where no longer one does has to be consumed first.
        let mut other = self::link(4 << 20);
        other.carry(40 << 10);
        let sizes = other.tx.sizes();
        let count = (0..).take_while(|i| other.push(8000, *i as u8)).count();
        assert!((3..10).contains(&count) && other.tx.sizes() == sizes, "{count}");
        for i in 0..count {
            assert_eq!(other.pop(), Some((8000, i as u8)));
        }
    }

    #[test]
    fn messages_that_have_room_do_not_put_off_growth() {
        let mut link = link(4 << 20);
        for _ in 0..12 {
            link.tx.grow_for(256 << 10, false);
            assert!(link.push(64 << 10, 1));
            assert_eq!((link.pop(), link.pop()), (Some((64 << 10, 1)), None));
        }
        assert_eq!(link.tx.sizes().bulk, LAVISH.bulk);
    }

    #[test]
    fn ends_that_answer_each_other_need_no_more_than_the_payload_buffers() {
        let (mut a, mut b) = (link(24 << 20), link(24 << 20));
        for ((tx, rx), end) in [((&mut a.tx, &mut b.rx), 1), ((&mut b.tx, &mut a.rx), 2)] {
            let ours = Area::new(tx.memory().clone(), LAVISH, end);
            let theirs = Area::new(rx.memory().clone(), LAVISH, 3 - end);
            tx.share_places(ours.clone(), theirs.clone());
            rx.share_places(theirs, ours);
        }
        let send = |tx: &mut Producer, rx: &mut Consumer, back: &mut Producer| {
            tx.push_bulk(&[], 4096, |to: &mut [u8]| to.fill(7)).unwrap();
            let popped = rx.pop(|_, payload| assert_eq!(payload, [7; 4096]));
            assert!(matches!(popped, Popped::Handed(handed) if back.receive(&handed)));
            assert!(matches!(rx.pop(|_, _| ()), Popped::Empty));
        };
        for _ in 0..2000 {
            send(&mut a.tx, &mut a.rx, &mut b.tx);
            send(&mut b.tx, &mut b.rx, &mut a.tx);
        }
        for link in [&a, &b] {
            assert_eq!(link.tx.sizes().bulk, ROOMS[0]);
            assert!(link.tx.recycles && link.bytes() < 400 << 10, "{}", link.bytes());
        }
    }

    #[test]
    fn many_links_that_answer_leave_room_for_one_to_grow() {
        let mut links: Vec<Link> = (0..100).map(|_| link(0)).collect();
        let shared = Arc::new(Budget::new(24 << 20));
        for link in &mut links {
            link.tx.growth = Some(Growth::new(shared.clone()));
            let [ours, theirs] = [1, 2].map(|end| Area::new(link.tx.memory().clone(), LAVISH, end));
            link.tx.share_places(ours.clone(), theirs.clone());
            link.rx.share_places(ours, theirs);
            link.carry(70 << 10);
            link.rest();
        }
        let last = &mut links[99];
        for _ in 0..20 {
            last.carry(100 << 10);
        }
        assert_eq!(last.tx.sizes().bulk, LAVISH.bulk);
    }

    #[test]
    fn a_link_with_messages_in_it_does_not_shrink() {
        let mut link = link(4 << 20);
        link.carry(700 << 10);
        assert!(link.push(8, 1));
        link.rest();
        assert_eq!(link.tx.sizes().bulk, LAVISH.bulk);
        assert_eq!(link.pop(), Some((8, 1)));
        assert_eq!(link.pop(), None);
        link.rx.announce();
        link.rest();
        assert_eq!(link.tx.sizes().bulk, ROOMS[0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// Whatever grows and shrinks meanwhile, each message arrives as it was sent, in order.
        #[test]
        fn growing_and_shrinking_lose_nothing(
            budget in prop::sample::select(vec![0usize, 300 << 10, 4 << 20]),
            ops in prop::collection::vec((0u8..40, 1usize..16 * 1024), 1..800)
        ) {
            let mut link = link(budget);
            let mut oracle = VecDeque::new();
            for (i, (op, len)) in ops.into_iter().enumerate() {
                match op {
                    0..20 => if link.push(len, i as u8) {
                        oracle.push_back((len, i as u8));
                    },
                    20..37 => prop_assert_eq!(link.pop(), oracle.pop_front()),
                    37 => link.rest(),
                    38 => link.tx.grow_for(64 * len, len % 2 == 0),
                    _ => link.tx.set_lap(if len % 2 == 0 { 1 << 18 } else { 1 << 30 }),
                }
            }
            while let Some(sent) = oracle.pop_front() {
                prop_assert_eq!(link.pop(), Some(sent));
            }
        }
    }
}
