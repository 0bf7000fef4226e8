//! The biased lock under loom: every order in which owner and visitor may see each other's words (scripts/models).

use super::*;
use loom::cell::UnsafeCell;
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

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(model);
}

/// The visitor comes, leaves and comes again. The sides are never inside together, and each sees the other's writes.
#[test]
fn nobody_is_inside_together() {
    explore(|| {
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
fn who_stays_needs_no_other_barrier() {
    explore(|| {
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
