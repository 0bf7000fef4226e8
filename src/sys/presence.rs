//! Whether there is memory at an address, and the processor may access it: an access where there is none would raise a
//! signal.
//!
//! The kernel compares or changes a word there (futex(2)). It can do that also where processes may not attach to each
//! other, or to themselves.

use super::cma::Range;
use super::errno::Errno;
use super::process::page_size;
use std::sync::atomic::AtomicU32;

/// Whether the processor can read the byte at an address.
pub(crate) fn may_read(addr: usize) -> bool {
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let word = std::ptr::with_exposed_provenance::<u32>(addr & !3);
    let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // A number that is rarely there: then the kernel does not even prepare to wait.
    let other = 0x9e37_79b9u32;
    // SAFETY: the kernel checks the address, and waits for no time.
    let result = unsafe { libc::syscall(libc::SYS_futex, word, wait, other, &raw const at_once) };
    result == 0 || Errno::last().0 != libc::EFAULT
}

/// Whether the processor can write the byte at an address. The kernel sets no bit of the word there, in one step, so no
/// change that another thread makes meanwhile is lost. A thread that waits at the word (futex(2)) may wake up.
fn may_write(addr: usize) -> bool {
    static OTHER: AtomicU32 = AtomicU32::new(0);
    /// FUTEX_OP_OR with 0, then FUTEX_OP_CMP_LT with the least number that there is room for.
    const SET_NOTHING: u32 = 2 << 28 | 2 << 24 | 0x800;
    let word = std::ptr::with_exposed_provenance::<u32>(addr & !3);
    let wake = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    let other = OTHER.as_ptr();
    // SAFETY: the kernel checks the addresses; the word stays as it is.
    let result =
        unsafe { libc::syscall(libc::SYS_futex, other, wake, 0, 0usize, word, SET_NOTHING) };
    result >= 0 || Errno::last().0 != libc::EFAULT
}

/// Whether the processor can read all of a range, and write it if `writes`. Costs a system call a page.
pub(crate) fn is_accessible(range: Range, writes: bool) -> bool {
    let page = page_size() as u64;
    let Some(end) = range.addr.checked_add(range.len) else { return false };
    let mut at = range.addr;
    while at < end {
        let there = if writes { may_write(at as usize) } else { may_read(at as usize) };
        if !there {
            return false;
        }
        at = (at / page + 1).saturating_mul(page);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn an_address_that_is_not_mapped_cannot_be_accessed() {
        let there = [1u8; 3];
        let addr = |byte: &u8| std::ptr::from_ref(byte).expose_provenance();
        assert!(there.iter().all(|byte| may_read(addr(byte)) && may_write(addr(byte))));
        assert_eq!(there, [1; 3]);
        for none in [0, page_size() - 1, usize::MAX] {
            assert!(!may_read(none) && !may_write(none));
        }
    }

    #[test]
    fn memory_that_is_not_there_is_told_without_a_signal() {
        let page = page_size();
        let len = 700 * page;
        let map = |prot| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
            assert_ne!(at, libc::MAP_FAILED);
            at
        };
        let at = map(libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: within the mapping that was just made.
        unsafe { at.cast::<u8>().add(300 * page + 5).write(7) };
        let start = at.expose_provenance();
        let range =
            |from: usize, len: usize| Range { addr: (start + from) as u64, len: len as u64 };
        let there = |from, len, writes| is_accessible(range(from, len), writes);
        assert!(there(5, len - 5, false) && there(5, len - 5, true) && there(len, 0, true));
        // SAFETY: the byte that was written before, in a mapping that is still there.
        assert_eq!(unsafe { at.cast::<u8>().add(300 * page + 5).read() }, 7, "it stays");
        // SAFETY: a page of the mapping.
        unsafe { libc::mprotect(at.byte_add(600 * page), page, libc::PROT_READ) };
        assert!(there(0, len, false) && !there(0, len, true) && there(601 * page, 99 * page, true));
        // SAFETY: the same page.
        unsafe { libc::mprotect(at.byte_add(600 * page), page, libc::PROT_NONE) };
        assert!(!there(0, len, false) && !there(601 * page - 1, 2, false));
        assert!(there(0, 600 * page, true));
        assert!(!there(100, usize::MAX - start, false), "to the end of all addresses");
        // SAFETY: exactly the mapping.
        unsafe { libc::munmap(at, len) };
    }

    /// The memory may be the application's, whose threads change it at any time.
    #[test]
    fn no_change_of_another_thread_is_lost() {
        let (word, ends) = (AtomicU32::new(0), AtomicBool::new(false));
        let range = Range { addr: word.as_ptr().expose_provenance() as u64, len: 4 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    assert!(is_accessible(range, true));
                }
            });
            for n in 0..100_000 {
                assert_eq!(word.fetch_add(1, Ordering::Relaxed), n);
            }
            ends.store(true, Ordering::Relaxed);
        });
    }
}
