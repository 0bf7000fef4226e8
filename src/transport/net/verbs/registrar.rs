//! Registrations of the application's memory for the connections of an endpoint, and their cache.

use crate::memory::cache::{self, Access, Cache, CachePolicy, CacheSettings, Limits, Monitor};
use crate::sys::made_once::MadeOnce;
use crate::sys::verbs::{Permission, RcPort, Registrar, Registration, fork_hazard};
use crate::sys::{Errno, process};
use crate::telemetry::log;

/// The registration cache of one endpoint.
pub(super) type Memory = Cache<Registrar>;

/// Bytes kept at least, where no setting says otherwise.
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

    fn follows(&self) -> bool {
        self.follows()
    }
}

/// Whether the application's memory may be registered. Logs where that would endanger an application that forks.
pub(super) fn is_safe() -> bool {
    let hazard = fork_hazard();
    if let Some(why) = &hazard {
        log::info(format_args!(
            "no RDMA for long messages: memory is not registered, because {why}"
        ));
    }
    hazard.is_none()
}

/// Why a device refuses memory, and what to do; `limit`: bytes that this process may lock, if that is limited.
pub(super) fn reason(errno: Errno, limit: Option<usize>) -> String {
    match limit {
        Some(limit) if errno.0 == libc::ENOMEM => format!(
            "{errno}; this process may lock {} KiB: raise `ulimit -l`, or LimitMEMLOCK of the service that starts it",
            limit / 1024
        ),
        _ => errno.to_string(),
    }
}

/// A device refuses memory for long messages or one-sided operations: logs one line per cause.
#[cold]
pub(super) fn tell_refused(errno: Errno) {
    /// The limit of a process rarely changes, and reading it takes system calls.
    static LIMIT: MadeOnce<Option<usize>> = MadeOnce::new();
    let limit = *LIMIT.get_or_make(process::locked_memory_limit);
    log::limited!(
        cause: errno.0,
        "an RDMA device cannot register memory ({}): what would use it goes as datagrams",
        reason(errno, limit)
    );
}

/// The registration cache for `port`. Peers read some of the memory (`offers`), and its bytes may be placed in any order
/// before a completion (`any_order`). Errors: ENOMEM.
pub(super) fn memory(
    port: &RcPort,
    settings: &CacheSettings,
    (offers, any_order): (bool, bool),
) -> Result<Memory, Errno> {
    let monitor = match settings.policy {
        CachePolicy::Userfaultfd => Some(Monitor::shared()),
        CachePolicy::Off => None,
    };
    let on_demand = match &monitor {
        Some(Err(lack)) if port.pages_on_demand() => {
            log::info(format_args!(
                "the RDMA device pages memory on demand, and its registrations are kept: the system reports no changes ({lack})"
            ));
            true
        }
        Some(Err(lack)) => {
            lack.tell();
            false
        }
        _ => false,
    };
    let limits = limits(settings, process::machine(), process::locked_memory_limit());
    // One registration serves sends and receives from the same buffer.
    let generous = Access::WRITE.union(Access::REMOTE_WRITE);
    let generous = if offers { generous.union(Access::REMOTE_READ) } else { generous };
    let registrar = port.registrar().in_any_order(any_order).on_demand(on_demand);
    Cache::new(registrar, monitor.and_then(Result::ok), limits, generous)
}

/// How much is kept. A node is shared by as many processes as it has processors, and they need half of its memory for
/// computing. Memory locked here counts against the process's limit, so at most half of that is used.
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
