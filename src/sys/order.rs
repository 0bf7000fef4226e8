//! The order in which threads and processes see each other's words, and its replacement under scripts/models: under
//! loom the atomics, the mutex and the fences below are loom's, so that the code that uses them is checked itself.
//!
//! Two sides that each write a word and then read the other's ("I am inside", "keep out") must not both miss the
//! other's write. No processor guarantees that without a full barrier between the two steps of each side:
//!
//! * between processes both sides use [`fence`];
//! * within a process, if one side runs all the time and the other rarely, the frequent side uses [`light`], which
//!   stops only the compiler from reordering, and the rare side uses [`heavy`]: membarrier(2) makes every thread of the
//!   process pass a full barrier, at whichever of its two steps it is. Under loom both are full fences, which is the
//!   combined effect of the pair.
//!
//! These words are shared by two threads or processes without a lock, with what orders them on processors that reorder
//! more than x86-64. `scripts/models` checks those with a model in every order that the memory model allows:
//!
//! | shared by | words | ordered by | model |
//! |---|---|---|---|
//! | the ends of a ring | slot sequence, progress counter | release store, acquire load around slot and payload | yes |
//! | ring sender, sleeper | sequence, SLEEPING | full fences; the first sleep waits for WAITS (`SETTLES_NS`) | yes |
//! | senders of parked links, their receiver (`shm::hints`) | bits of links, summary | read-modify-writes, the summary last, and first to be taken; a link is looked at for `SETTLES_NS` after it is parked | yes |
//! | ends of a split copy | work descriptor | release, acquire; the kernel copies before its caller's release | yes |
//! | direct access, its end | REACHING, EPOCH or CLOSED (`shm::words`) | a full fence in both | yes |
//! | owner, visitor (`sys::biased`) | `inside`, `reasons` | [`light`], [`heavy`] | yes |
//! | monitor, owner of a domain (`sys::alarm`) | `reasons`, `applying` | read-modify-writes; the kernel orders the alarm before the end of the call that changed memory | no |
//! | fi_cq_signal, a blocking read (`ofi::source`) | `signaled` | eventfd's lock: it is set before the ring, and read after the silence | no |
//! | readers, keeper of `ofi::av::named` | entry, its number | release and acquire; the number is read twice | no |
//! | cache, its monitor | `applying`, kernel's count of changes | userfaultfd's locks, then an acquire fence | no |
//! | background thread, application | last poll, asleep, dozing (not `armed`) | none: hints bounded by timers | no |
//! | application, device | buffers, completions | libibverbs' barriers in post and poll | no |

#[cfg(all(loom, test))]
mod imp {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8};
    pub(crate) use loom::sync::{Mutex, MutexGuard};

    pub(crate) fn fence() {
        loom::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Loom's read-modify-writes are not in one order.
    pub(crate) fn ordered() {
        fence();
    }

    pub(crate) fn light() {
        fence();
    }

    pub(crate) fn heavy() -> bool {
        fence();
        true
    }

    pub(crate) fn wait_a_little(_: u32) {
        loom::thread::yield_now();
    }
}

#[cfg(not(all(loom, test)))]
mod imp {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8};
    pub(crate) use std::sync::{Mutex, MutexGuard};

    /// A fence in one total order with all others.
    #[inline(always)]
    pub(crate) fn fence() {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Between accesses that are all SeqCst, which are in one order by that.
    #[inline(always)]
    pub(crate) fn ordered() {}

    /// The fence of the frequent side.
    #[inline(always)]
    pub(crate) fn light() {
        match cfg!(miri) {
            true => std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst),
            false => std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst),
        }
    }

    /// The fence of the rare side: it interrupts all running threads of the process. False if the kernel lacks this
    /// barrier; then [`light`] is not sufficient.
    pub(crate) fn heavy() -> bool {
        if cfg!(miri) {
            // It knows no membarrier(2): both sides have a fence.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            return true;
        }
        crate::sys::process::barrier_for_all()
    }

    /// Lets others run, after so many looks: by a short sleep in the end, because a thread of a real-time class would keep
    /// its processor from the one that it waits for.
    pub(crate) fn wait_a_little(looks: u32) {
        match looks {
            0..100 => crate::sys::process::yield_now(),
            _ => std::thread::sleep(std::time::Duration::from_micros(50)),
        }
    }
}

pub(crate) use imp::*;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The fence of the rare side where the kernel had that barrier before. A filter that forbids it since then leaves a pause:
/// what the frequent side stored is visible long before its end.
pub(crate) fn heavy_or_pause() {
    if !heavy() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A 64-bit word that two processes share: std's, or loom's.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn swap(&self, value: u64, order: Ordering) -> u64;
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64;
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64;
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
            fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
                Self::fetch_or(self, bits, order)
            }

            #[inline(always)]
            fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
                Self::fetch_and(self, bits, order)
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
