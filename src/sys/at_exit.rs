//! Work to do at an orderly end of the process: exit(3), or a return from `main`.
//!
//! The loader calls the finalizers of a shared object after the handlers registered with atexit(3), so messages sent by
//! those handlers are included. The provider is linked with `-z nodelete`: no finalizer runs before the process ends.
//! Neither _exit(2) nor a signal runs them.

use std::sync::OnceLock;

static HOOK: OnceLock<fn()> = OnceLock::new();

/// Calls `hook` once at an orderly end of this process, and of each forked child. Only the first call registers.
pub(crate) fn call(hook: fn()) {
    let _ = HOOK.set(hook);
}

extern "C" fn finalize() {
    if let Some(hook) = HOOK.get() {
        // A panic must not leave the finalizer; it was reported where it occurred.
        let _ = std::panic::catch_unwind(hook);
    }
}

#[used]
// SAFETY: an entry of this section is the address of a function without arguments, which is what this is (ELF gABI,
// "Initialization and Termination Functions").
#[unsafe(link_section = ".fini_array")]
static FINALIZE: extern "C" fn() = finalize;
