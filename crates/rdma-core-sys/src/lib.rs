// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only

//! libibverbs' public interface: structures and constants under their C names, and the calls that
//! its header makes through the tables of a context, a queue pair or a completion queue.
//!
//! No function of the library is declared and nothing is linked: a program that may have to live
//! without libibverbs looks its symbols up at run time. What the header defines inline has no
//! symbol, and is written again in `inline.rs`; among it is everything on the data path.
//!
//! `bindings.rs` is generated from the headers of rdma-core 44 (see `generate/`) and committed, so
//! that building needs neither libclang nor libibverbs-dev. libibverbs moves no member of a public
//! structure, it only adds at the end, and in front of [`verbs_context`].
//!
//! All of it is for Linux with 64-bit pointers. The layouts were read on x86-64; processors differ only where a
//! structure holds a lock of the C library, which is the `libc` crate's type here.

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
