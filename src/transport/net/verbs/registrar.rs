//! Registrations of the application's memory for the connections of an endpoint, and the cache of
//! them.

use crate::config::{CachePolicy, CacheSettings};
use crate::memory::cache::{self, Access, Cache, Limits, Monitor};
use crate::sys::verbs::{Permission, RcPort, Registrar, Registration, fork_hazard};
use crate::sys::{Errno, process};
use crate::telemetry::log;
use std::sync::OnceLock;

/// What the connections of one endpoint may read and write.
pub(super) type Memory = Cache<Registrar>;

/// The least that is kept where nothing else is said, bytes.
const KEPT_MIN: usize = 64 << 20;

impl cache::Registrar for Registrar {
    type Handle = Registration;

    fn register(&self, addr: usize, len: usize, access: Access) -> Result<Registration, Errno> {
        let permission = if access.contains(Access::REMOTE_READ) {
            let writes = access.contains(Access::WRITE) || access.contains(Access::REMOTE_WRITE);
            Permission::Exposed { reads: true, writes }
        } else if access.contains(Access::REMOTE_WRITE) {
            Permission::RemoteWrite
        } else if access.contains(Access::WRITE) {
            Permission::Write
        } else {
            Permission::Read
        };
        self.register(addr, len, permission)
    }
}

/// Whether the application's memory may be registered. Where that would be a danger to an application
/// that forks, the log says so.
pub(super) fn is_safe() -> bool {
    let hazard = fork_hazard();
    if let Some(why) = &hazard {
        log::info(format_args!(
            "no RDMA for long messages: memory is not registered, because {why}"
        ));
    }
    hazard.is_none()
}

/// Why a device has no more memory of ours, and what to do; `limit`: bytes that this process may lock, if that is bounded.
pub(super) fn reason(errno: Errno, limit: Option<usize>) -> String {
    match limit {
        Some(limit) if errno.0 == libc::ENOMEM => format!(
            "{errno}; this process may lock {} KiB: raise `ulimit -l`, or LimitMEMLOCK of the service that starts it",
            limit / 1024
        ),
        _ => errno.to_string(),
    }
}

/// A device does not take memory that long messages or one-sided operations were to use: one line for each cause.
#[cold]
pub(super) fn tell_refused(errno: Errno) {
    /// The limit of a process changes rarely, and to ask for it takes system calls.
    static LIMIT: OnceLock<Option<usize>> = OnceLock::new();
    let limit = *LIMIT.get_or_init(process::locked_memory_limit);
    log::limited!(
        cause: errno.0,
        "an RDMA device cannot register memory ({}): what would use it goes as datagrams",
        reason(errno, limit)
    );
}

/// The registrations of `port`; `offers`: peers read some of it. Errors: ENOMEM.
pub(super) fn memory(
    port: &RcPort,
    settings: &CacheSettings,
    offers: bool,
) -> Result<Memory, Errno> {
    let monitor = match settings.policy {
        CachePolicy::Userfaultfd => Monitor::shared(),
        CachePolicy::Off => None,
    };
    let limits = limits(settings, process::machine(), process::locked_memory_limit());
    // One registration serves sends and receives from the same buffer.
    let generous = Access::WRITE.union(Access::REMOTE_WRITE);
    let generous = if offers { generous.union(Access::REMOTE_READ) } else { generous };
    Cache::new(port.registrar(), monitor, limits, generous)
}

/// How much is kept. A node is shared by as many processes as it has processors, and half of its
/// memory is theirs to compute in; what is locked beyond the limit is refused to others too.
fn limits(
    settings: &CacheSettings,
    (bytes, processors): (usize, usize),
    may_lock: Option<usize>,
) -> Limits {
    let sensible = || {
        let share = (bytes / 2 / processors).max(KEPT_MIN);
        may_lock.map_or(share, |may_lock| share.min(may_lock / 2))
    };
    Limits { count: settings.count, bytes: settings.bytes.unwrap_or_else(sensible) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_lock_too_little_hears_how_much_it_is() {
        let text = reason(Errno(libc::ENOMEM), Some(64 << 10));
        assert!(text.contains("64 KiB") && text.contains("ulimit -l"), "{text}");
        let enough = [(libc::ENOMEM, None), (libc::EFAULT, Some(64 << 10))];
        assert!(enough.iter().all(|(e, limit)| !reason(Errno(*e), *limit).contains("KiB")));
    }

    #[test]
    fn what_is_kept_is_a_share_of_what_there_is() {
        let bytes = |bytes, may_lock| {
            let settings = CacheSettings { policy: CachePolicy::Userfaultfd, bytes, count: 9 };
            let limits = limits(&settings, (256 << 30, 128), may_lock);
            assert_eq!(limits.count, 9);
            limits.bytes
        };
        assert_eq!(bytes(None, None), 1 << 30);
        assert_eq!(bytes(None, Some(8 << 20)), 4 << 20);
        assert_eq!(bytes(Some(0), None), 0);
        assert_eq!(bytes(Some(8 << 40), Some(1)), 8 << 40, "who says so has it");
        let (memory, processors) = process::machine();
        assert!(memory > 64 << 20 && processors >= 1);
    }
}
