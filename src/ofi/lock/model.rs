//! The lock of a domain under loom, in every order in which the application and a visitor may see each other's
//! stores (scripts/models).
#![allow(unsafe_code)] // counts what loom watches

use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// A lock, and a number that loom watches: two threads that access it at once fail the model.
struct Domain {
    lock: DomainLock,
    count: UnsafeCell<u32>,
}

// SAFETY: loom reports two threads that access the number at once.
unsafe impl Sync for Domain {}
// SAFETY: loom reports two threads that access the number at once.
unsafe impl Send for Domain {}

impl Domain {
    fn new() -> Arc<Self> {
        Arc::new(Self { lock: DomainLock::new(false), count: UnsafeCell::new(0) })
    }

    fn add(&self, _guard: &Guard<'_>) {
        // SAFETY: loom reports two threads that access the number at once.
        self.count.with_mut(|count| unsafe { *count += 1 });
    }
}

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

#[test]
fn a_visitor_and_the_application_are_never_inside_together() {
    explore(4, || {
        let domain = Domain::new();
        let visited = domain.clone();
        let visits = thread::spawn(move || {
            (0..2)
                .map(|_| {
                    visited.lock.visit().map_or(0, |guard| {
                        visited.add(&guard);
                        1
                    })
                })
                .sum::<u32>()
        });
        for _ in 0..2 {
            domain.add(&domain.lock.lock());
        }
        let visits = visits.join().unwrap();
        let _guard = domain.lock.lock();
        // SAFETY: the visitor has ended.
        assert_eq!(domain.count.with(|count| unsafe { *count }), visits + 2);
    });
}

#[test]
fn two_visitors_exclude_each_other() {
    explore(2, || {
        let domain = Domain::new();
        let visitors: [_; 2] = std::array::from_fn(|_| {
            let visited = domain.clone();
            thread::spawn(move || {
                if let Some(guard) = visited.lock.visit() {
                    visited.add(&guard);
                }
            })
        });
        domain.add(&domain.lock.lock());
        visitors.into_iter().for_each(|visitor| visitor.join().unwrap());
    });
}
