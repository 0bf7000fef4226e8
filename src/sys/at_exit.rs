//! What is to be done when the process ends in order: exit(3), or a return from `main`.
//!
//! The loader calls the finalizers of a shared object after the handlers that atexit(3) has entered, so that what these send
//! counts as well. The provider is linked with `-z nodelete`: nothing is finalized before the process ends. Neither _exit(2)
//! nor a signal comes by here.

use super::process;
use std::sync::OnceLock;

/// The process that asked, and what for.
static HOOK: OnceLock<(i32, fn())> = OnceLock::new();

/// `hook` is called once when the process ends in order; in a forked child it is not. The first one counts.
pub(crate) fn call(hook: fn()) {
    let _ = HOOK.set((process::pid(), hook));
}

extern "C" fn finalize() {
    if let Some((_, hook)) = HOOK.get().filter(|(owner, _)| *owner == process::pid()) {
        // A panic must not leave the finalizer; it was reported where it began.
        let _ = std::panic::catch_unwind(hook);
    }
}

#[used]
// SAFETY: an entry of this section is the address of a function without arguments, which is what this is (ELF gABI,
// "Initialization and Termination Functions").
#[unsafe(link_section = ".fini_array")]
static FINALIZE: extern "C" fn() = finalize;
