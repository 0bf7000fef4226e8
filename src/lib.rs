//! udrv: a libfabric provider.
//!
//! The source has four layers; each uses only the layers below it (ARCHITECTURE.md):
//! `ofi` (the fid objects) → `protocol` (what to send next) → `transport` (how bytes move) →
//! `memory` and `sys`. The shared object exports one symbol, [`fi_prov_ini`].
#![deny(unsafe_code)]

#[cfg(test)]
mod alone;
mod config;
#[cfg(all(test, fuzzing))]
#[allow(unsafe_code)] // calls libFuzzer
mod fuzzing;
mod memory;
mod ofi;
#[cfg(test)]
mod patience;
mod protocol;
#[cfg(test)]
mod random;
mod sys;
mod telemetry;
mod transport;

use libfabric_sys::fi_provider;

#[global_allocator]
static ALLOCATOR: sys::reserve::Reserved = sys::reserve::Reserved;

/// The entry point of a dynamically loaded provider (fi_provider.3). The core may call it again after it
/// has closed and reopened the library: each call initialises everything afresh.
#[allow(unsafe_code)] // the symbol that the core looks up
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut fi_provider {
    std::panic::catch_unwind(ofi::provider::initialise).unwrap_or(std::ptr::null_mut())
}
