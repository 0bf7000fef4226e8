//! The split copy under loom: every order in which both ends may see the words of a work descriptor (scripts/models).
#![allow(unsafe_code)] // touches what loom watches

use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

/// Chunks of one byte; a run has four of them.
const LEN: usize = 8;

/// The words of a descriptor, and two messages that are copied with it. Loom watches each byte: the model fails if two
/// threads access one at a time, or if a byte is read before the other end's copy of it is known to have ended.
struct Link {
    left: AtomicU64,
    status: AtomicU64,
    messages: [[UnsafeCell<()>; LEN]; 2],
}

// SAFETY: loom reports two threads that access one byte at a time.
unsafe impl Sync for Link {}
// SAFETY: loom reports two threads that access one byte at a time.
unsafe impl Send for Link {}

impl Link {
    fn new() -> Arc<Self> {
        let bytes = || std::array::from_fn(|_| UnsafeCell::new(()));
        let (left, status) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { left, status, messages: [bytes(), bytes()] })
    }

    fn cell(&self) -> Cell<'_, AtomicU64> {
        Cell { left: &self.left, status: &self.status }
    }

    fn write(&self, message: usize, offset: usize, len: usize) {
        self.messages[message][offset..offset + len].iter().for_each(|byte| byte.with_mut(|_| ()));
    }

    /// The receiver copies its runs until the message is complete, and reads all of it.
    fn receive(&self, table: &mut CellTable, share: &Share, message: usize) {
        loop {
            match table.take(share, self.cell(), 32) {
                Taken::Part { offset, len } => self.write(message, offset, len),
                Taken::Wait => thread::yield_now(),
                Taken::Over => break,
            }
        }
        self.messages[message].iter().for_each(|byte| byte.with(|_| ()));
    }

    fn begin(&self, table: &mut CellTable) -> Share {
        table.begin(LEN, 1, |at| (at == 0).then(|| self.cell())).unwrap()
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(model);
}

/// Each byte is copied by one end, and the receiver reads what the sender copied. A sender that comes too late does not
/// touch the message that uses the descriptor next.
#[test]
fn a_message_is_whole_and_the_next_one_is_another() {
    explore(|| {
        let link = Link::new();
        let mut table = CellTable::default();
        let share = link.begin(&mut table);
        let there = link.clone();
        let sender = thread::spawn(move || {
            for _ in 0..2 {
                there.cell().assist(&share, |offset, len| {
                    there.write(0, offset, len);
                    Some(len)
                });
            }
        });
        link.receive(&mut table, &share, 0);
        let next = link.begin(&mut table);
        link.receive(&mut table, &next, 1);
        sender.join().unwrap();
    });
}

/// The receiver copies the run that the sender could not copy, after the sender has reported the failure.
#[test]
fn a_part_that_fails_is_copied_by_the_receiver() {
    explore(|| {
        let link = Link::new();
        let mut table = CellTable::default();
        let share = link.begin(&mut table);
        let there = link.clone();
        let sender = thread::spawn(move || {
            there.cell().assist(&share, |offset, _| {
                there.write(0, offset, 1);
                None
            });
        });
        link.receive(&mut table, &share, 0);
        sender.join().unwrap();
    });
}

/// After a message is given up, the receiver may reuse its memory once the sender is copying no run of it.
#[test]
fn a_message_that_is_given_up_is_not_touched() {
    explore(|| {
        let link = Link::new();
        let mut table = CellTable::default();
        let share = link.begin(&mut table);
        let there = link.clone();
        let sender = thread::spawn(move || {
            there.cell().assist(&share, |offset, len| {
                there.write(0, offset, len);
                Some(len)
            });
        });
        while table.stop_all(|at| (at == 0).then(|| link.cell())) {
            thread::yield_now();
        }
        link.write(0, 0, LEN);
        sender.join().unwrap();
    });
}
