//! Direct access to a region and its end, under loom: in every order in which both ends may see each other's word
//! (scripts/models).
#![allow(unsafe_code)] // touches what loom watches

use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

/// The words of a link, and a region: the model fails if two threads access it at a time.
struct Link {
    epoch: AtomicU64,
    closed: AtomicU64,
    reaching: AtomicU64,
    region: UnsafeCell<()>,
}

// SAFETY: loom reports two threads that access the region at a time.
unsafe impl Sync for Link {}
// SAFETY: loom reports two threads that access the region at a time.
unsafe impl Send for Link {}

impl Link {
    fn words(&self) -> Words<'_, AtomicU64> {
        Words { epoch: &self.epoch, reaching: &self.reaching }
    }
}

/// `may`: whether the sender may copy, after it has begun. `end`: what the receiver does first.
fn check(may: fn(&Link) -> bool, end: fn(&Link)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(move || {
        let link = Arc::new(Link {
            epoch: AtomicU64::new(7),
            closed: AtomicU64::new(0),
            reaching: AtomicU64::new(0),
            region: UnsafeCell::new(()),
        });
        let there = link.clone();
        let sender = thread::spawn(move || {
            for _ in 0..2 {
                there.words().begin();
                if may(&there) {
                    there.region.with_mut(|_| ());
                }
                there.words().end();
            }
        });
        end(&link);
        if let Some(seen) = link.words().void() {
            while !link.words().has_ended(seen) {
                thread::yield_now();
            }
        }
        link.region.with_mut(|_| ());
        sender.join().unwrap();
    });
}

/// Once a region is closed no peer accesses it, and earlier writes are visible.
#[test]
fn a_closed_region_is_not_reached() {
    check(|link| link.words().is_valid(7), |_| ());
}

/// Once a link is taken down the peer accesses nothing through it, and earlier writes are visible.
#[test]
fn nothing_is_reached_over_a_link_that_was_taken_down() {
    check(
        |link| link.closed.load(Ordering::Acquire) == 0,
        |link| {
            link.closed.fetch_or(1, Ordering::AcqRel);
        },
    );
}
