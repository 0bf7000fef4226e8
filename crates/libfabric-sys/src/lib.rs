// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only

//! libfabric's public interface as a provider sees it: structures, ops tables
//! and constants, under their C names.
//!
//! No function of libfabric is declared and nothing is linked. The loader hands
//! a provider its work through `fi_prov_ini`, and the few functions of the core
//! that a provider calls are looked up at run time.
//!
//! `bindings.rs` is generated from the headers of libfabric 1.17 (see
//! `generate/`) and committed, so that building needs neither libclang nor
//! libfabric. `newer.rs` adds by hand what later releases appended: libfabric
//! moves no member of a public structure, it only adds at the end. The API
//! version of an object, not this crate, decides which of the appended members
//! may be accessed.
//!
//! Types of the constants:
//!
//! | constants | type |
//! |---|---|
//! | capabilities, mode bits, operation flags, orderings | `u64` |
//! | `FI_E*`, `FI_MR_*` mode bits, `FI_OPT_*`, control commands | `i32` |
//! | enumerators of a named enum, as `FI_EP_RDM` | an alias of `c_uint`, as `fi_ep_type` |
//! | address formats, protocols, traffic classes, EQ events, versions | `u32` |
//! | `FI_CLASS_*`, `FI_SHARED_CONTEXT`, `FI_AV_AUTH_KEY` | `usize` |
//! | `FI_ADDR_UNSPEC`, `FI_ADDR_NOTAVAIL`, `FI_KEY_NOTAVAIL` | `u64` |
//!
//! The crate supports Linux with 64-bit pointers, where all processors have these layouts.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("the layouts in this crate are those of 64-bit Linux");

#[allow(
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unsafe_code,
    clippy::all,
    clippy::nursery,
    clippy::pedantic,
    clippy::restriction
)]
#[rustfmt::skip]
mod bindings;
mod newer;

pub use bindings::*;
pub use newer::*;

/// An API version as libfabric packs it: `FI_VERSION(major, minor)`.
#[must_use]
pub const fn fi_version(major: u32, minor: u32) -> u32 {
    (major << 16) | minor
}

/// `FI_MAJOR(version)`.
#[must_use]
pub const fn fi_major(version: u32) -> u32 {
    version >> 16
}

/// `FI_MINOR(version)`.
#[must_use]
pub const fn fi_minor(version: u32) -> u32 {
    version & 0xffff
}

#[cfg(test)]
mod tests;
