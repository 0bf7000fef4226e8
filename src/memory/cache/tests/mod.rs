//! The cache with the kernel of this machine, on simulated and real devices.
#![allow(unsafe_code)] // memory is mapped, unmapped and moved here

mod device;
mod figures;
mod fork;
mod kinds;
mod limits;
mod memory;
mod model;
mod module;
mod process;
mod races;
mod rdma;
mod torture;
mod uring;
mod vigils;

use super::{Access, Cache, Limits, Monitor, Registrar};
use std::sync::Arc;

pub(super) const PAGE: usize = 4096;
pub(super) const PLENTY: Limits = Limits { count: 1 << 20, bytes: 1 << 40 };

/// The monitor of this process, or the reason to skip a test. A test that runs as root on a kernel with userfaultfd is
/// never skipped, unless UDRV_TEST_NO_MONITOR says that there is no monitor.
pub(super) fn monitor() -> Option<Arc<Monitor>> {
    let monitor = Monitor::shared().ok();
    if monitor.is_none() {
        assert!(
            std::env::var_os("UDRV_TEST_NO_MONITOR").is_some()
                || !std::path::Path::new("/proc/sys/vm/unprivileged_userfaultfd").exists(),
            "this kernel has userfaultfd, and the monitor does not start"
        );
        eprintln!("skipped: no userfaultfd");
    }
    monitor
}

/// A monitor that no other test shares, so that other tests' changes do not unsettle this one.
pub(super) fn own_monitor() -> Option<Arc<Monitor>> {
    monitor()?;
    Monitor::for_test(crate::sys::mappings::Mappings::open().unwrap())
}

pub(super) fn cache_of<R: Registrar>(registrar: R, monitor: Option<Arc<Monitor>>) -> Cache<R> {
    Cache::new(registrar, monitor, PLENTY, Access::WRITE).unwrap()
}
