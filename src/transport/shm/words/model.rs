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

/// Once a region is closed no peer accesses it, and earlier writes are visible.
#[test]
fn a_closed_region_is_not_reached() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(|| {
        let link = Arc::new(Link {
            epoch: AtomicU64::new(7),
            reaching: AtomicU64::new(0),
            region: UnsafeCell::new(()),
        });
        let there = link.clone();
        let sender = thread::spawn(move || {
            for _ in 0..2 {
                there.words().begin();
                if there.words().is_valid(7) {
                    there.region.with_mut(|_| ());
                }
                there.words().end();
            }
        });
        if let Some(seen) = link.words().void() {
            while !link.words().has_ended(seen) {
                thread::yield_now();
            }
        }
        link.region.with_mut(|_| ());
        sender.join().unwrap();
    });
}
