//! The libfabric objects, as applications see them. This layer checks arguments, translates flags and
//! owns the C layouts; it holds no protocol.
//!
//! The objects know each other downwards only: a queue, a counter and the domain know an endpoint as a `dyn Progress`, a domain
//! knows a counter as a `dyn Count`, a wait set its members as `dyn Waitable`.
//!
//! # Safety
//!
//! Every `extern "C"` function here is called by libfabric or by an application through a table of
//! function pointers. Its pointers and lifetimes are those that the man pages promise: a `fid` stays valid
//! until `fi_close`, buffers until their operation completes, attribute structures during the call.
//! Each entry turns its arguments into references once, at its top, inside [`guard::entry`].
#![allow(unsafe_code)]

mod av;
mod blocking;
mod cntr;
mod core;
mod cq;
mod domain;
mod elsewhere;
mod endpoint;
mod eq;
mod ext;
mod fabric;
mod guard;
mod info;
mod keys;
mod lock;
mod mr;
mod ops;
mod own;
mod poll_set;
mod profile;
mod progress;
pub(crate) mod provider;
mod slots;
mod source;
mod table;
mod trigger;
mod wait;
mod wait_set;
