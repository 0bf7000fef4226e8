//! Mappings kept in reserve for when the system allows the process no other (vm.max_map_count).

use super::per_process::PerProcess;
use super::process;
use std::ptr::null_mut;

/// Neighbours are protected in two ways, so that each page is a mapping. Linux asks for room for four where one is
/// duplicated, and the first and the last page may become part of what is beside them.
const PAGES: usize = 9;

/// Address of the first page; 0: there are none.
static BASE: PerProcess<usize> = PerProcess::new();

/// Whether the next call of [`give`] will return true.
pub(super) fn are_there() -> bool {
    let mut base = BASE.lock();
    if *base == 0 {
        *base = make().unwrap_or(0);
    }
    *base != 0
}

/// Ends them, so that other mappings can be made instead. False: there are none.
pub(super) fn give() -> bool {
    match std::mem::take(&mut *BASE.lock()) {
        0 => false,
        base => end(base),
    }
}

fn make() -> Option<usize> {
    let page = process::page_size();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice, which nobody accesses.
    let base = unsafe { libc::mmap(null_mut(), PAGES * page, libc::PROT_NONE, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    let base = base as usize;
    // SAFETY: a page of the mapping made above.
    let part = |n: usize| unsafe {
        libc::mprotect((base + n * page) as *mut libc::c_void, page, libc::PROT_READ) == 0
    };
    if !(1..PAGES).step_by(2).all(part) {
        end(base);
        return None;
    }
    Some(base)
}

/// Unmaps the pages that `make` made at this address.
fn end(base: usize) -> bool {
    // SAFETY: exactly those, and nobody accesses them.
    unsafe { libc::munmap(base as *mut libc::c_void, PAGES * process::page_size()) == 0 }
}
