//! Owner and visitor under loom, in every order that they may see each other's words (scripts/models).

use super::*;
use loom::cell::UnsafeCell;
use loom::thread;

/// A number that loom watches: who changes it while another does ends the model.
struct Watched(UnsafeCell<u32>);

// SAFETY: loom tells when two threads are at it.
unsafe impl Send for Watched {}

impl Watched {
    fn add(&self) {
        // SAFETY: as above.
        self.0.with_mut(|count| unsafe { *count += 1 });
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(model);
}

/// The visitor comes, leaves and comes again. The two are never inside together, and each sees what the other has done.
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

/// Several visits without leaving: the barrier of the first one holds for those after it.
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
