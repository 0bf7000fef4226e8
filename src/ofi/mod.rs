//! The libfabric objects: what an application sees. Checks arguments, translates flags, owns the C
//! layouts; holds no protocol.
//!
//! # Safety
//!
//! Every `extern "C"` function here is called by libfabric or by an application through a table of
//! function pointers, with the pointers and lifetimes that the man pages promise: a `fid` stays valid
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
mod lock;
mod mr;
mod own;
mod poll_set;
mod progress;
pub(crate) mod provider;
mod source;
mod table;
mod trigger;
mod wait;
mod wait_set;

use libfabric_sys::{
    FI_CLASS_CNTR, FI_CLASS_CQ, FI_CLASS_EQ, FI_CLASS_WAIT, FI_EAGAIN, FI_EINVAL, FI_ENOSYS, fid,
};

/// `fi_trywait` for one object: EAGAIN if it has something to report. Errors: EINVAL for what is not ours,
/// ENOSYS for objects that nobody waits for.
///
/// # Safety
/// `object` is null or an open object.
unsafe fn trywait(object: *mut fid) -> Result<(), i32> {
    // SAFETY: the caller vouches; the class tells the type.
    let may_sleep = unsafe {
        match object.as_ref().ok_or(FI_EINVAL)?.fclass {
            FI_CLASS_CQ => {
                let cq = cq::shared(object)?;
                cq.try_wait(&cq.domain.lock.lock())
            }
            FI_CLASS_CNTR => {
                let cntr = cntr::shared(object)?;
                cntr.try_wait(&cntr.domain.lock.lock())
            }
            FI_CLASS_EQ => !eq::shared(object)?.has_events(),
            FI_CLASS_WAIT => wait_set::shared(object)?.try_wait(),
            _ => return Err(FI_ENOSYS),
        }
    };
    if may_sleep { Ok(()) } else { Err(FI_EAGAIN) }
}
