//! Whether registered memory survives a fork of the application.
//!
//! Before Linux 5.12 the kernel does not copy pinned pages for the child at the fork: the parent gets a copy at its next
//! write, and the device goes on with the page that the child has. `ibv_fork_init` makes libibverbs keep registered
//! pages from children (MADV_DONTFORK), as other users of RDMA do on such kernels. It must come before the first
//! registration of the process.

use super::library::Verbs;
use crate::sys::made_once::MadeOnce;
use crate::sys::process;
use crate::telemetry::log;
use rdma_core_sys::{IBV_FORK_DISABLED, IBV_FORK_UNNEEDED, ibv_fork_status};

/// Whether the kernel copies pinned pages for a forked child; and why the application's memory must not be registered, if
/// a fork would endanger it.
static FORKS: MadeOnce<(bool, Option<&'static str>)> = MadeOnce::new();

/// To be called before the first registration.
pub(super) fn prepare(verbs: &Verbs) {
    FORKS.get_or_make(|| {
        // SAFETY: the call asks for nothing; it may ask the kernel.
        let status = verbs.is_fork_initialized.map(|status| unsafe { status() });
        let copies = copies(process::kernel_is_at_least(5, 12), status);
        let hazard = hazard(copies, status, || {
            // SAFETY: the call takes nothing.
            verbs.fork_init.is_some_and(|init| unsafe { init() } == 0)
        });
        (copies, hazard)
    });
}

/// Why registering the application's memory would be unsafe if the application forks; `None`: it is safe.
pub(crate) fn fork_hazard() -> Option<&'static str> {
    FORKS.get().and_then(|(_, hazard)| *hazard)
}

/// Whether the kernel copies pinned pages for a forked child. False before there was a list of devices.
pub(crate) fn copies_at_fork() -> bool {
    FORKS.get().is_some_and(|(copies, _)| *copies)
}

/// `recent`: the kernel is Linux 5.12 or later. Earlier ones of some distributions copy as well, which the library knows.
fn copies(recent: bool, status: Option<ibv_fork_status>) -> bool {
    recent || status == Some(IBV_FORK_UNNEEDED)
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
    use rdma_core_sys::IBV_FORK_ENABLED;

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

    #[test]
    fn a_kernel_that_copies_is_known_by_its_version_or_by_the_library() {
        let all = [None, Some(IBV_FORK_DISABLED), Some(IBV_FORK_ENABLED), Some(IBV_FORK_UNNEEDED)];
        assert_eq!(all.map(|status| copies(false, status)), [false, false, false, true]);
        assert_eq!(all.map(|status| copies(true, status)), [true; 4]);
    }
}
