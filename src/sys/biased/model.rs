//! The biased lock under loom: every order in which owner and visitors may see each other's words (scripts/models).

use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc as Shared;
use loom::thread;

/// A number that loom watches: the model fails if two threads change it at a time.
struct Watched(UnsafeCell<u32>);

// SAFETY: loom reports two threads that access it at a time.
unsafe impl Send for Watched {}

impl Watched {
    fn add(&self) {
        // SAFETY: loom reports two threads that access it at a time.
        self.0.with_mut(|count| unsafe { *count += 1 });
    }
}

/// A lock, and a number that loom watches: two threads that access it at once fail the model.
struct Domain {
    lock: Biased,
    count: UnsafeCell<u32>,
}

// SAFETY: loom reports two threads that access the number at once.
unsafe impl Sync for Domain {}
// SAFETY: loom reports two threads that access the number at once.
unsafe impl Send for Domain {}

impl Domain {
    fn new() -> Shared<Self> {
        Shared::new(Self { lock: Biased::new(false), count: UnsafeCell::new(0) })
    }

    fn add(&self, _entry: &Entry<'_>) {
        // SAFETY: loom reports two threads that access the number at once.
        self.count.with_mut(|count| unsafe { *count += 1 });
    }
}

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// The visitor comes, leaves and comes again. The sides are never inside together, and each sees the other's writes.
#[test]
fn nobody_is_inside_together() {
    explore(4, || {
        let (owner, mut visitor) = visited(Watched(UnsafeCell::new(0)));
        let visits = thread::spawn(move || {
            let mut visits = 0;
            for _ in 0..2 {
                if let Some(count) = visitor.visit() {
                    count.add();
                    visits += 1;
                }
                visitor.leave();
            }
            visits
        });
        for _ in 0..2 {
            owner.enter().unwrap().add();
        }
        let visits: u32 = visits.join().unwrap();
        // SAFETY: the visitor has ended.
        assert_eq!(owner.enter().unwrap().0.with(|count| unsafe { *count }), visits + 2);
    });
}

/// Several visits without leaving: the barrier of the first one suffices for the later ones.
#[test]
fn a_visitor_that_stays_needs_no_other_barrier() {
    explore(4, || {
        let (owner, mut visitor) = visited(Watched(UnsafeCell::new(0)));
        let thread = thread::spawn(move || {
            for _ in 0..2 {
                if let Some(count) = visitor.visit() {
                    count.add();
                }
            }
        });
        for _ in 0..2 {
            owner.enter().unwrap().add();
        }
        thread.join().unwrap();
    });
}

#[test]
fn a_visitor_and_the_application_are_never_inside_together() {
    explore(4, || {
        let domain = Domain::new();
        let visited = domain.clone();
        let visits = thread::spawn(move || {
            (0..2)
                .map(|_| {
                    visited.lock.visit().map_or(0, |entry| {
                        visited.add(&entry);
                        1
                    })
                })
                .sum::<u32>()
        });
        for _ in 0..2 {
            domain.add(&domain.lock.enter());
        }
        let visits = visits.join().unwrap();
        let _entry = domain.lock.enter();
        // SAFETY: the visitor has ended.
        assert_eq!(domain.count.with(|count| unsafe { *count }), visits + 2);
    });
}

/// The application polls while another thread makes control calls, each of which waits until it is inside.
#[test]
fn a_visitor_that_waits_gets_in_alone() {
    explore(3, || {
        let domain = Domain::new();
        let visited = domain.clone();
        let visitor = thread::spawn(move || {
            for _ in 0..2 {
                visited.add(&visited.lock.enter_visiting());
            }
        });
        for _ in 0..2 {
            domain.add(&domain.lock.enter());
        }
        visitor.join().unwrap();
        let _entry = domain.lock.enter();
        // SAFETY: the visitor has ended.
        assert_eq!(domain.count.with(|count| unsafe { *count }), 4);
    });
}

#[test]
fn a_visitor_that_waits_and_one_that_does_not_exclude_each_other() {
    explore(2, || {
        let domain = Domain::new();
        let visited = domain.clone();
        let waits = thread::spawn(move || visited.add(&visited.lock.enter_visiting()));
        let visited = domain.clone();
        let goes_on = thread::spawn(move || {
            if let Some(entry) = visited.lock.visit() {
                visited.add(&entry);
            }
        });
        domain.add(&domain.lock.enter());
        waits.join().unwrap();
        goes_on.join().unwrap();
    });
}

/// A control call lets a thread of the provider in while the application polls.
#[test]
fn an_owner_that_joins_waits_for_the_first_one() {
    explore(3, || {
        let domain = Domain::new();
        let joined = domain.clone();
        let second = thread::spawn(move || {
            joined.lock.need();
            joined.add(&joined.lock.enter());
        });
        for _ in 0..2 {
            domain.add(&domain.lock.enter());
        }
        second.join().unwrap();
    });
}

#[test]
fn two_visitors_exclude_each_other() {
    explore(2, || {
        let domain = Domain::new();
        let visitors: [_; 2] = std::array::from_fn(|_| {
            let visited = domain.clone();
            thread::spawn(move || {
                if let Some(entry) = visited.lock.visit() {
                    visited.add(&entry);
                }
            })
        });
        domain.add(&domain.lock.enter());
        visitors.into_iter().for_each(|visitor| visitor.join().unwrap());
    });
}
