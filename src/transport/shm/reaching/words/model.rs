//! Direct access to a region and its end, under loom: in every order that both ends may see each other's word
//! (scripts/models).
#![allow(unsafe_code)] // touches what loom watches

use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

/// The words of a link, and a region: two threads at it end the model.
struct Link {
    epoch: AtomicU64,
    reaching: AtomicU64,
    region: UnsafeCell<()>,
}

// SAFETY: loom tells when two threads are at the region.
unsafe impl Sync for Link {}
// SAFETY: as above.
unsafe impl Send for Link {}

impl Link {
    fn words(&self) -> Words<'_, AtomicU64> {
        Words { epoch: &self.epoch, reaching: &self.reaching }
    }
}

/// Once the region is closed nobody reaches it, and what was written there before is seen.
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
