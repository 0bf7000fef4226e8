//! Whether registered memory survives a fork of the application.
//!
//! Before Linux 5.12 the kernel does not copy pinned pages for the child at the fork: the parent gets a copy at its next
//! write, and the device goes on with the page that the child has. `ibv_fork_init` makes libibverbs keep registered
//! pages from children (MADV_DONTFORK), as other users of RDMA do on such kernels. It must come before the first
//! registration of the process.

use super::library::Verbs;
use crate::sys::process;
use crate::telemetry::log;
use rdma_core_sys::{IBV_FORK_DISABLED, ibv_fork_status};
use std::sync::OnceLock;

/// Why the application's memory must not be registered, if a fork would endanger it.
static HAZARD: OnceLock<Option<&'static str>> = OnceLock::new();

/// To be called before the first registration.
pub(super) fn prepare(verbs: &Verbs) {
    HAZARD.get_or_init(|| {
        // SAFETY: the call asks for nothing; it may ask the kernel.
        let status = verbs.is_fork_initialized.map(|status| unsafe { status() });
        hazard(process::kernel_is_at_least(5, 12), status, || {
            // SAFETY: the call takes nothing.
            verbs.fork_init.is_some_and(|init| unsafe { init() } == 0)
        })
    });
}

/// Why registering the application's memory would be unsafe if the application forks; `None`: it is safe.
pub(crate) fn fork_hazard() -> Option<&'static str> {
    HAZARD.get().copied().flatten()
}

/// `copies`: the kernel copies pinned pages for a child; `status`: what the library says, if it can; `init` makes the
/// library keep registered pages from children, if it can.
fn hazard(
    copies: bool,
    status: Option<ibv_fork_status>,
    init: impl FnOnce() -> bool,
) -> Option<&'static str> {
    if copies || status.is_some_and(|status| status != IBV_FORK_DISABLED) {
        return None;
    }
    if !init() {
        return Some("memory was registered before libibverbs could be told (RDMAV_FORK_SAFE=1)");
    }
    log::info(format_args!(
        "the kernel does not copy pinned pages at a fork: memory under RDMA is kept from forked children (ibv_fork_init)"
    ));
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_core_sys::{IBV_FORK_ENABLED, IBV_FORK_UNNEEDED};

    #[test]
    fn the_library_is_told_where_the_kernel_does_not_copy() {
        for (copies, status, asks) in [
            (true, None, false),
            (true, Some(IBV_FORK_DISABLED), false),
            (false, Some(IBV_FORK_UNNEEDED), false),
            (false, Some(IBV_FORK_ENABLED), false),
            (false, Some(IBV_FORK_DISABLED), true),
            (false, None, true),
        ] {
            let mut asked = false;
            let safe = hazard(copies, status, || {
                asked = true;
                true
            });
            assert_eq!((safe, asked), (None, asks), "{copies} {status:?}");
        }
        assert!(hazard(false, None, || false).is_some(), "too late");
    }
}
