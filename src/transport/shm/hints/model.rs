//! The words under loom: their own code and a ring's, in every order in which both ends may see each other's words
//! (scripts/models).

use super::super::layout::{FLAG_PARKED, FLAG_SLEEPING};
use super::{GROUPS, Words};
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::sync::{Arc, Notify};
use loom::thread;
use std::sync::atomic::Ordering;

/// Words of two groups; loom watches no more of them than it needs.
struct Few {
    summary: AtomicU64,
    groups: [AtomicU64; 2],
}

impl Words for Few {
    type Word = AtomicU64;

    fn summary(&self) -> &AtomicU64 {
        &self.summary
    }

    fn group(&self, group: usize) -> Option<&AtomicU64> {
        const { assert!(GROUPS > 2) };
        self.groups.get(group)
    }
}

/// A receiver's words, and the rings of its links: of each the number of messages that were published.
struct Endpoint {
    words: Few,
    rings: [AtomicU64; 2],
    /// As the flags of a ring.
    flags: [AtomicU32; 2],
    bell: Notify,
}

/// The bits of the two links, in different groups.
const NUMBERS: [u32; 2] = [5, 64];

impl Endpoint {
    fn new(flags: u32) -> Arc<Self> {
        let word = || AtomicU64::new(0);
        Arc::new(Self {
            words: Few { summary: word(), groups: [word(), word()] },
            rings: [word(), word()],
            flags: [AtomicU32::new(flags), AtomicU32::new(flags)],
            bell: Notify::new(),
        })
    }

    /// As `Producer::publish` and `Outbound::tell` do.
    fn send(&self, link: usize) {
        self.rings[link].fetch_add(1, Ordering::Release);
        let flags = &self.flags[link];
        if flags.load(Ordering::Relaxed) & FLAG_PARKED != 0 {
            if self.words.raise(NUMBERS[link]) {
                self.bell.notify();
            }
            return;
        }
        crate::sys::order::fence();
        if flags.load(Ordering::Relaxed) & FLAG_SLEEPING != 0
            && flags.fetch_and(!FLAG_SLEEPING, Ordering::AcqRel) & FLAG_SLEEPING != 0
        {
            self.bell.notify();
        }
    }

    /// As `Shm::poll` does: how many messages were received. `direct`: the links that are looked at.
    fn poll(&self, got: &mut [u64; 2], direct: [bool; 2]) -> u64 {
        let before = got.iter().sum::<u64>();
        let mut look = |link: usize| got[link] = self.rings[link].load(Ordering::Acquire);
        (0..2).filter(|link| direct[*link]).for_each(&mut look);
        if self.words.is_raised() {
            self.words.take(|number| look(NUMBERS.iter().position(|n| *n == number).unwrap()));
        }
        got.iter().sum::<u64>() - before
    }

    /// As `Shm::sleep` does.
    fn sleep(&self, got: [u64; 2], direct: [bool; 2]) -> bool {
        self.words.sleep()
            && (0..2).filter(|link| direct[*link]).all(|link| {
                self.flags[link].fetch_or(FLAG_SLEEPING, Ordering::AcqRel);
                crate::sys::order::fence();
                self.rings[link].load(Ordering::Acquire) == got[link]
            })
    }

    fn awake(&self) {
        self.words.awake();
        for flags in &self.flags {
            flags.fetch_and(!FLAG_SLEEPING, Ordering::AcqRel);
        }
    }

    /// Receives so many messages, asleep where there are none. Loom reports a lost one as a deadlock.
    fn receive(&self, all: u64, mut direct: [bool; 2], unpark: Option<usize>) {
        let mut got = [0; 2];
        while got.iter().sum::<u64>() < all {
            if self.poll(&mut got, direct) > 0 {
                if let Some(link) = unpark.filter(|link| got[*link] > 0) {
                    self.flags[link].fetch_and(!FLAG_PARKED, Ordering::AcqRel);
                    direct[link] = true;
                }
                continue;
            }
            if self.sleep(got, direct) {
                self.bell.wait();
            }
            self.awake();
        }
    }
}

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    builder.check(model);
}

/// Two senders of parked links, and a receiver that sleeps whenever it sees nothing.
#[test]
fn no_parked_link_is_forgotten() {
    explore(3, || {
        let here = Endpoint::new(FLAG_PARKED);
        let senders = [0, 1].map(|link| {
            let there = here.clone();
            thread::spawn(move || there.send(link))
        });
        here.receive(2, [false; 2], None);
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}

/// One sender goes on while the receiver begins to look at its ring directly.
#[test]
fn a_link_that_gets_busy_loses_nothing() {
    explore(3, || {
        let here = Endpoint::new(FLAG_PARKED);
        let there = here.clone();
        let sender = thread::spawn(move || (0..3).for_each(|_| there.send(0)));
        here.receive(3, [false; 2], Some(0));
        sender.join().unwrap();
    });
}

/// While its ring is still looked at, a link may be parked at any moment.
#[test]
fn a_link_that_is_being_parked_loses_nothing() {
    explore(3, || {
        let here = Endpoint::new(0);
        let there = here.clone();
        let sender = thread::spawn(move || (0..2).for_each(|_| there.send(0)));
        here.flags[0].fetch_or(FLAG_PARKED, Ordering::AcqRel);
        here.receive(2, [true; 2], None);
        sender.join().unwrap();
    });
}

/// A ring that is no longer looked at as soon as its link is parked may be missed: hence `SETTLES_NS`.
#[test]
#[should_panic(expected = "deadlock")]
fn parking_takes_time() {
    explore(3, || {
        let here = Endpoint::new(0);
        let there = here.clone();
        let sender = thread::spawn(move || there.send(0));
        here.flags[0].fetch_or(FLAG_PARKED, Ordering::AcqRel);
        here.receive(1, [false; 2], None);
        sender.join().unwrap();
    });
}
