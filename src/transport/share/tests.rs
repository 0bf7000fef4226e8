//! Every order in which receiver and sender can meet in a work descriptor, and then both at full speed.

use super::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU8};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    /// The receiver takes a run, and copies it.
    Take,
    /// The receiver gives the message up.
    Stop,
    /// The sender takes a run.
    Begin,
    /// The sender has copied its run (`Done`), or could not (`Fail`).
    Done,
    Fail,
    /// A sender of an earlier message arrives late.
    Late,
    /// The sender takes a run, and sends it as messages.
    Send,
    /// A chunk that the sender sent arrives.
    Come,
}

const ACTIONS: [Action; 8] = [
    Action::Take,
    Action::Stop,
    Action::Begin,
    Action::Done,
    Action::Fail,
    Action::Late,
    Action::Send,
    Action::Come,
];

struct Scene<'a> {
    cell: Cell<'a>,
    table: CellTable,
    share: Share,
    old: Share,
    /// Chunks that have arrived.
    there: BTreeSet<usize>,
    in_hand: BTreeSet<usize>,
    /// Chunks that were sent and have not arrived.
    sent: BTreeSet<usize>,
    /// Whether the sender sends its chunks or copies them: never both. `None`: undecided.
    sends: Option<bool>,
    stopped: bool,
    over: bool,
}

impl Scene<'_> {
    fn units(&self, offset: usize, len: usize) -> BTreeSet<usize> {
        let unit = self.share.unit as usize;
        (offset / unit..(offset + len).div_ceil(unit)).collect()
    }

    fn take(&mut self) -> Taken {
        assert!(!self.over);
        let taken = self.table.take(&self.share, self.cell, PART_MAX);
        match taken {
            Taken::Part { offset, len } => {
                let part = self.units(offset, len);
                assert!(!self.stopped && len > 0 && part.is_disjoint(&self.in_hand));
                assert!(part.is_disjoint(&self.there), "{part:?} is copied twice");
                self.there.extend(part);
            }
            Taken::Wait => {
                assert!(!self.in_hand.is_empty() || !self.sent.is_empty(), "nobody will end that");
            }
            Taken::Over => {
                self.over = true;
                assert!(self.in_hand.is_empty(), "the sender still writes");
                assert!(self.sent.is_empty(), "something still comes");
                let all = self.share.units().unwrap() as usize;
                assert!(self.stopped || self.there.len() == all, "only {:?}", self.there);
            }
        }
        taken
    }

    fn late(&mut self) {
        let assisted = self.cell.assist(&self.old, |_, _| panic!("an old message is copied"));
        assert_eq!(assisted, Assisted::Over);
        assert_eq!(self.cell.begin_assist(&self.old, PART_MAX), None);
    }

    fn send(&mut self) {
        let part = self.cell.begin_assist(&self.share, 2);
        let part = part.map(|(offset, len)| self.units(offset, len)).unwrap_or_default();
        assert!(part.len() <= 2 && part.is_disjoint(&self.there), "{part:?} is sent twice");
        assert!(part.is_empty() || !self.over && !self.stopped);
        self.sent.extend(part);
    }

    fn come(&mut self) {
        if let Some(unit) = self.sent.pop_first() {
            assert!(self.there.insert(unit) && !self.over);
            self.table.arrived(&self.share, 1);
        }
    }

    /// Does the actions until the sender's run ends; true: the sender has copied it.
    fn run(&mut self, actions: &mut impl Iterator<Item = Action>, holds: bool) -> Option<bool> {
        while let Some(action) = actions.next() {
            match action {
                Action::Take if !self.over => drop(self.take()),
                Action::Stop if !self.over => {
                    self.stopped = true;
                    self.table.stop(&self.share, self.cell);
                }
                Action::Late if self.in_hand.is_empty() => self.late(),
                Action::Done if holds => return Some(true),
                Action::Fail if holds => return Some(false),
                Action::Begin if !holds && !*self.sends.get_or_insert(false) => {
                    self.assist(actions)
                }
                Action::Send if !holds && *self.sends.get_or_insert(true) => self.send(),
                Action::Come => self.come(),
                _ => {}
            }
        }
        holds.then_some(true)
    }

    fn assist(&mut self, actions: &mut impl Iterator<Item = Action>) {
        let (cell, share) = (self.cell, self.share);
        let mut reported = false;
        cell.assist(&share, |offset, len| {
            assert!(!self.over && !self.stopped, "a share that has ended is copied");
            let part = self.units(offset, len);
            assert!(len > 0 && part.is_disjoint(&self.there), "{part:?} is copied twice");
            self.in_hand = part;
            reported = true;
            let copied = self.run(actions, true)?;
            let part = std::mem::take(&mut self.in_hand);
            if copied {
                self.there.extend(part);
            }
            copied.then_some(len)
        });
    }
}

fn play(units: u64, actions: impl IntoIterator<Item = Action>) {
    let words = [AtomicU64::new(0), AtomicU64::new(0)];
    let [left, status] = &words;
    let cell = Cell { left, status };
    let mut table = CellTable::default();
    let begin =
        |table: &mut CellTable, len| table.begin(len, 10, |at| (at == 0).then_some(cell)).unwrap();
    let old = begin(&mut table, 50);
    while table.take(&old, cell, PART_MAX) != Taken::Over {}
    let share = begin(&mut table, units as usize * 10 - 3);
    let (there, in_hand, sent) = Default::default();
    let mut scene = Scene {
        cell,
        table,
        share,
        old,
        there,
        in_hand,
        sent,
        sends: None,
        stopped: false,
        over: false,
    };
    scene.run(&mut actions.into_iter(), false);
    for _ in 0..100 {
        if scene.over {
            break;
        }
        scene.come();
        scene.take();
    }
    assert!(scene.over);
    scene.late();
    let after = scene.table.begin(10, 10, |at| (at == 0).then_some(cell));
    assert!(after.is_some(), "the cell is free again");
}

#[test]
fn every_order_of_two_ends() {
    const LEN: u32 = 6;
    let count = ACTIONS.len();
    for units in [1, 6, 11] {
        for n in 0..count.pow(LEN) {
            let actions = (0..LEN).map(|at| ACTIONS[n / count.pow(at) % count]);
            play(units, actions);
        }
    }
}

#[test]
fn a_sender_that_dies_is_waited_for() {
    let words = [AtomicU64::new(0), AtomicU64::new(0)];
    let [left, status] = &words;
    let cell = Cell { left, status };
    let mut table = CellTable::default();
    let share = table.begin(100, 10, |_| Some(cell)).unwrap();
    cell.take(share.generation, End::Sender, PART_MAX).unwrap();
    while table.take(&share, cell, PART_MAX) != Taken::Wait {}
    assert!(table.stop_all(|at| (at == 0).then_some(cell)), "it has something in hand");
    assert_eq!(table.take(&share, cell, PART_MAX), Taken::Wait);
}

#[test]
fn the_chunk_of_a_sender_is_short_however_long_the_message() {
    for len in [8usize << 20, 4 << 30, 1 << 40] {
        let words = [AtomicU64::new(0), AtomicU64::new(0)];
        let cell = Cell { left: &words[0], status: &words[1] };
        let mut table = CellTable::default();
        let share = table.begin(len, 64 << 10, |_| Some(cell)).unwrap();
        let mut hand = 0;
        let assisted = cell.assist(&share, |_, part| {
            hand = part;
            Some(part)
        });
        assert_eq!(assisted, Assisted::Moved(hand));
        assert!((1..=(2 << 20).max(share.unit as usize)).contains(&hand), "{hand} of {len}");
    }
}

#[test]
fn two_ends_meet_in_the_middle() {
    let (mut word, mut at) = (join(7, pack(0, 1000)), [0, 1000]);
    for n in 0.. {
        let who = [End::Receiver, End::Sender][n % 2];
        let Some((part, next)) = next_part(word, 7, who, PART_MAX) else { break };
        assert!((1..=PART_MAX).contains(&part.count));
        let (less, _) = next_part(word, 7, who, 3).unwrap();
        assert_eq!(less.count, part.count.min(3));
        match who {
            End::Receiver => {
                assert_eq!(part.first, at[0]);
                at[0] += part.count;
            }
            End::Sender => {
                at[1] -= part.count;
                assert_eq!(part.first, at[1]);
            }
        }
        word = next;
    }
    assert_eq!(at[0], at[1]);
    for who in [End::Receiver, End::Sender] {
        assert_eq!(next_part(join(8, pack(0, 1000)), 7, who, PART_MAX), None);
        assert_eq!(next_part(join(7, pack(9, 8)), 7, who, PART_MAX), None);
    }
}

#[test]
fn lengths_that_cannot_be_are_refused() {
    let share = |unit, len| Share { cell: 0, generation: 1, unit, len }.units();
    assert_eq!(share(0, 10), None);
    assert_eq!(share(1, u64::MAX), None);
    assert_eq!(share(1, 0x1_0000), None);
    assert_eq!(share(4096, 4097), Some(2));
    let words = [AtomicU64::new(0), AtomicU64::new(0)];
    let [left, status] = &words;
    let mut table = CellTable::default();
    let long = table.begin(1 << 40, 16, |_| Some(Cell { left, status })).unwrap();
    assert_eq!((long.unit, long.units()), (1 << 25, Some(1 << 15)));
}

#[test]
fn two_threads_copy_each_unit_once() {
    let cells: Vec<[AtomicU64; 2]> = (0..CellTable::LEN).map(|_| Default::default()).collect();
    let cell = |at: usize| cells.get(at).map(|[left, status]| Cell { left, status });
    let (to_sender, offers) = std::sync::mpsc::channel::<(Share, std::sync::Arc<Vec<AtomicU8>>)>();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (cell, ended) = (&cell, &ended);
        scope.spawn(move || {
            let mut n = 0u32;
            for (share, bytes) in offers {
                let at = cell(share.cell as usize).unwrap();
                while let Assisted::Moved(_) = at.assist(&share, |offset, len| {
                    assert!(!ended.load(Ordering::Relaxed));
                    n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    if n >> 28 == 0 {
                        return None; // the receiver writes the run again
                    }
                    let len = 1 + (n >> 8) as usize % len;
                    for byte in &bytes[offset..offset + len] {
                        byte.fetch_add(1, Ordering::Relaxed);
                    }
                    Some(len)
                }) {}
            }
        });
        let mut table = CellTable::default();
        for n in 0..3000 {
            let len = 1 + n * 7 % 4000;
            let bytes: std::sync::Arc<Vec<AtomicU8>> =
                std::sync::Arc::new((0..len).map(|_| AtomicU8::new(0)).collect());
            let share = table.begin(len, 16, cell).unwrap();
            to_sender.send((share, bytes.clone())).unwrap();
            let at = cell(share.cell as usize).unwrap();
            loop {
                match table.take(&share, at, PART_MAX) {
                    Taken::Part { offset, len } => {
                        for byte in &bytes[offset..offset + len] {
                            byte.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    Taken::Wait => std::thread::yield_now(),
                    Taken::Over => break,
                }
            }
            // A run that failed midway was begun by the sender and copied by the receiver.
            let twice = bytes.iter().filter(|b| b.load(Ordering::Relaxed) == 2).count();
            assert!(bytes.iter().all(|b| (1..=2).contains(&b.load(Ordering::Relaxed))));
            assert!(twice <= 16 * PART_MAX as usize);
        }
        drop(to_sender);
    });
    ended.store(true, Ordering::Relaxed);
}
