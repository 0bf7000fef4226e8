//! The order in which threads and processes see each other's words, and what scripts/models puts in its place: under
//! loom the atomics, the mutex and the fences below are loom's, so that the code that uses them is checked itself.
//!
//! Two sides that each write a word and then read the other's ("I am inside", "keep out") must not both miss what the
//! other wrote. No processor promises that without a full barrier between the two steps of each side:
//!
//! * between processes both make one, [`fence`];
//! * within a process, where one side does it all the time and the other hardly ever, the first makes [`light`], which
//!   keeps the compiler alone from reordering, and the second [`heavy`]: membarrier(2) has every thread of the process
//!   pass a full barrier, at whichever of its two steps it is. Under loom both are full fences, which is what the pair
//!   amounts to.
//!
//! Words that two threads or processes share without a lock, and what orders them on processors that reorder more than x86-64
//! does. Those with a model are run by `scripts/models` in every order that the memory model allows:
//!
//! | shared by | words | what orders them | model |
//! |---|---|---|---|
//! | the two ends of a ring | a slot's sequence, the progress counter | release when stored, acquire when loaded: payload and slot are between | yes |
//! | a ring's sender and a sleeper | sequence and SLEEPING | a full fence in both; the first sleep waits until the sender has seen WAITS (`SETTLES_NS`) | yes |
//! | the ends of a split copy | the cell (`transport::share`) | release and acquire; what is copied by the kernel comes before the release of the thread that called it | yes |
//! | a sender that reaches a region, and its end | REACHING, EPOCH (`shm::reaching`) | a full fence in both | yes |
//! | a domain's application and a visitor; the network's owner and the background thread | `inside`, `shares` or `reasons` (`ofi::lock`, `sys::visited`) | the compiler's fence in the one, membarrier(2) in the other (`sys::order`) | yes |
//! | the readers of a named address vector and its keeper | an entry and its number (`ofi::av::named`) | release and acquire of every word; the number is read twice | no |
//! | the cache and its monitor | `applying`, and the kernel's count of changes under way | the locks of userfaultfd between the two, then an acquire fence | no |
//! | the background thread and the application | when it polled, whether it sleeps or dozes | none: hints, each bounded by a timer; `armed` is behind `sys::visited` | no |
//! | the application and a device | buffers, completions | the barriers of libibverbs in posting and polling | no |

#[cfg(all(loom, test))]
mod imp {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8};
    pub(crate) use loom::sync::{Mutex, MutexGuard};

    pub(crate) fn fence() {
        loom::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    pub(crate) fn light() {
        fence();
    }

    pub(crate) fn heavy() -> bool {
        fence();
        true
    }
}

#[cfg(not(all(loom, test)))]
mod imp {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8};
    pub(crate) use std::sync::{Mutex, MutexGuard};

    /// A fence that is in one order with all others.
    #[inline(always)]
    pub(crate) fn fence() {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// The side of a pair that comes often.
    #[inline(always)]
    pub(crate) fn light() {
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// The side that comes hardly ever: it interrupts all threads of the process that run. False where the kernel has
    /// no such barrier; then [`light`] is not enough.
    pub(crate) fn heavy() -> bool {
        crate::sys::process::barrier_for_all()
    }
}

pub(crate) use imp::*;
use std::sync::atomic::Ordering;

/// A word of 64 bits that two processes share: std's, or loom's.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn swap(&self, value: u64, order: Ordering) -> u64;
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    fn compare_exchange_weak(
        &self,
        now: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;
}

macro_rules! word {
    ($atomic:ty) => {
        impl Word for $atomic {
            #[inline(always)]
            fn load(&self, order: Ordering) -> u64 {
                Self::load(self, order)
            }

            #[inline(always)]
            fn store(&self, value: u64, order: Ordering) {
                Self::store(self, value, order);
            }

            #[inline(always)]
            fn swap(&self, value: u64, order: Ordering) -> u64 {
                Self::swap(self, value, order)
            }

            #[inline(always)]
            fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
                Self::fetch_add(self, value, order)
            }

            #[inline(always)]
            fn compare_exchange_weak(
                &self,
                now: u64,
                new: u64,
                success: Ordering,
                failure: Ordering,
            ) -> Result<u64, u64> {
                Self::compare_exchange_weak(self, now, new, success, failure)
            }
        }
    };
}

word!(std::sync::atomic::AtomicU64);
#[cfg(all(loom, test))]
word!(loom::sync::atomic::AtomicU64);
