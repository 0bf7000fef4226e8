//! Registrations of the application's memory for the connections of an endpoint, and their cache.

use crate::memory::cache::{
    self, Access, Cache, CachePolicy, CacheSettings, Lack, Limits, Monitor,
};
use crate::sys::made_once::MadeOnce;
use crate::sys::rv::{Refusal, UserCache};
use crate::sys::verbs::{
    OpenDevice, Permission, RcPort, Registrar, Registration, copies_at_fork, fork_hazard,
};
use crate::sys::{Errno, process};
use crate::telemetry::log;
use crate::transport::net::rv::config::RvPolicy;
use std::sync::atomic::{AtomicBool, Ordering};

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
        self.register_for_use(addr, len, permission)
    }

    fn follows(&self) -> bool {
        self.follows()
    }

    fn shares(&self) -> bool {
        self.module().is_some()
    }

    fn let_go(&self, bytes: usize) -> bool {
        self.module().is_some_and(|module| module.let_go(bytes as u64))
    }

    fn found(&self) -> Option<(u64, u64)> {
        self.module().map(UserCache::found)
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

/// How registrations are kept where the system does not report changes of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unwatched {
    /// By the rv module: the version of its ABI behind the 1, and MiB at most.
    Module(u16, u64),
    /// By the cache, because the device pages memory on demand.
    OnDemand,
    /// Not at all.
    Nothing,
}

/// The registration cache for `port`. Peers read some of the memory (`offers`), and its bytes may be placed in any order
/// before a completion (`any_order`). Errors: ENOMEM.
pub(super) fn memory(
    (device, port): (&OpenDevice, &RcPort),
    (settings, rv): (&CacheSettings, RvPolicy),
    (offers, any_order): (bool, bool),
) -> Result<Memory, Errno> {
    let monitor = match settings.policy {
        CachePolicy::Userfaultfd => Some(Monitor::shared()),
        CachePolicy::Off => None,
    };
    let limits = limits(settings, process::machine(), process::locked_memory_limit());
    // One registration serves sends and receives from the same buffer.
    let generous = Access::WRITE.union(Access::REMOTE_WRITE);
    let generous = if offers { generous.union(Access::REMOTE_READ) } else { generous };
    let mut registrar = port.registrar().in_any_order(any_order);
    if let Some(Err(lack)) = &monitor {
        let open = |bytes| registrar.clone().kept_by_module(bytes);
        let kept = match UserCache::is_there() {
            true => through_module(rv, limits, || hindrance(device), open),
            false => Err(None),
        };
        let (way, why_not) = match kept {
            Ok(kept) => {
                registrar = kept;
                let of = registrar.module().map_or((0, 0), |m| (m.minor(), m.bytes() >> 20));
                (Unwatched::Module(of.0, of.1), None)
            }
            Err(why) if port.pages_on_demand() => (Unwatched::OnDemand, why),
            Err(why) => (Unwatched::Nothing, why),
        };
        registrar = registrar.on_demand(way == Unwatched::OnDemand);
        tell(way, lack, why_not.as_deref());
    }
    Cache::new(registrar, monitor.and_then(Result::ok), limits, generous)
}

/// What `open` makes of the rv module for so many bytes, if it is wanted and nothing hinders it. Errors: why not; `None`:
/// nobody need know.
fn through_module<T>(
    rv: RvPolicy,
    limits: Limits,
    hindrance: impl FnOnce() -> Option<&'static str>,
    open: impl FnOnce(usize) -> Result<T, Refusal>,
) -> Result<T, Option<String>> {
    if rv == RvPolicy::Off || limits.count == 0 || limits.bytes < 1 << 20 {
        return Err(None);
    }
    match hindrance() {
        None => open(limits.bytes).map_err(|refusal| Some(refusal.to_string())),
        Some(why) => Err(Some(why.to_owned())),
    }
}

/// Why the rv module must not keep registrations with `device`.
fn hindrance(device: &OpenDevice) -> Option<&'static str> {
    // Unlike libibverbs it keeps no memory from forked children.
    if !copies_at_fork() {
        return Some("the kernel does not copy pinned pages at a fork (Linux 5.12 does)");
    }
    // The kernel's own verbs set the length behind the driver's call, on which soft-RoCE relies since Linux 6.3.
    device.is_soft().then_some("soft-RoCE does not know how long its registrations are")
}

/// Says what is chosen, once each.
fn tell(way: Unwatched, lack: &Lack, why_not: Option<&str>) {
    static TOLD: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];
    let [module, on_demand, refused] = &TOLD;
    let first = |told: &AtomicBool| !told.swap(true, Ordering::Relaxed);
    if let Some(why) = why_not.filter(|_| first(refused)) {
        log::info(format_args!("the rv module does not keep registrations: {why}"));
    }
    match way {
        Unwatched::Module(minor, mib) if first(module) => log::info(format_args!(
            "the rv module, ABI 1.{minor}, keeps registrations of up to {mib} MiB with the RDMA device: the system reports no changes to the process ({lack})"
        )),
        Unwatched::OnDemand if first(on_demand) => log::info(format_args!(
            "the RDMA device pages memory on demand, and its registrations are kept: the system reports no changes ({lack})"
        )),
        Unwatched::Nothing => lack.tell(),
        Unwatched::Module(..) | Unwatched::OnDemand => {}
    }
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
    fn the_reason_says_how_much_memory_may_be_locked() {
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
        assert_eq!(bytes(Some(8 << 40), Some(1)), 8 << 40, "a setting decides");
        let (memory, processors) = process::machine();
        assert!(memory > 64 << 20 && processors >= 1);
    }

    const SOME: Limits = Limits { count: 9, bytes: 64 << 20 };

    #[test]
    fn the_rv_module_keeps_registrations_where_it_may_and_can() {
        let may = |rv, limits, hindrance| through_module(rv, limits, || hindrance, Ok);
        assert_eq!(may(RvPolicy::Auto, SOME, None), Ok(64 << 20));
        assert_eq!(may(RvPolicy::Require, SOME, None), Ok(64 << 20));
        assert_eq!(may(RvPolicy::Off, SOME, None), Err(None));
        assert_eq!(may(RvPolicy::Auto, Limits { count: 0, ..SOME }, None), Err(None));
        assert_eq!(may(RvPolicy::Auto, Limits { bytes: 1, ..SOME }, None), Err(None));
        assert_eq!(may(RvPolicy::Auto, SOME, Some("forks")), Err(Some("forks".to_owned())));
        let old = Refusal::Stale { minor: 5 };
        let not = through_module::<()>(RvPolicy::Auto, SOME, || None, |_| Err(old));
        assert!(not.unwrap_err().unwrap().contains("ABI 1.5"));
    }

    #[test]
    fn what_keeps_registrations_is_said_once() {
        log::captured::begin();
        let lack = Lack::for_test("no monitor for this test", Errno(libc::EPERM));
        for _ in 0..3 {
            tell(Unwatched::Module(6, 64), &lack, None);
            tell(Unwatched::OnDemand, &lack, Some("too old for this test"));
            tell(Unwatched::Nothing, &lack, Some("too old for this test"));
        }
        let lines = log::captured::lines_with("no monitor for this test");
        let with = |words: &str| lines.iter().filter(|line| line.contains(words)).count();
        assert_eq!(with("ABI 1.6, keeps registrations of up to 64 MiB"), 1, "{lines:?}");
        assert_eq!((with("on demand"), with("not cached"), lines.len()), (1, 1, 3), "{lines:?}");
        assert_eq!(log::captured::lines_with("too old for this test").len(), 1);
    }
}
