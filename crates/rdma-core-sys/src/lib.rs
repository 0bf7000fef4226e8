// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only

//! libibverbs' public interface: structures and constants under their C names, and the calls that
//! its header makes through the tables of a context, a queue pair or a completion queue.
//!
//! No function of the library is declared and nothing is linked: a program that must run without
//! libibverbs looks its symbols up at run time. Functions that the header defines inline have no
//! symbol, and are written again in `inline.rs`; the whole data path is among them.
//!
//! `bindings.rs` is generated from the headers of rdma-core 44 (see `generate/`) and committed, so
//! that building needs neither libclang nor libibverbs-dev. libibverbs moves no member of a public
//! structure, it only adds at the end, and in front of [`verbs_context`].
//!
//! The crate supports Linux with 64-bit pointers. The layouts were generated on x86-64. Processors differ only where a
//! structure contains a lock of the C library, for which this crate uses the `libc` crate's type.

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
mod inline;

pub use bindings::*;
pub use inline::*;

#[cfg(test)]
mod tests;
