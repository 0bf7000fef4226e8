//! The C functions, and the tables through which inline functions of `infiniband/verbs.h` call.
//!
//! An object's `handle` member is its number in the tables of `nic`. The memory of destroyed objects is kept, so that
//! their use is found out.
//!
//! # Safety
//! What holds for all of them: the program calls as the man page of the name says; pointers are to live structures of
//! the type in the declaration.
#![allow(clippy::missing_safety_doc)] // above, for all of them

mod device;
mod events;
mod extended;
mod memory;
mod pair;
mod post;
mod queue;
mod stubs;

use crate::nic::{self, Nic};
use crate::sys::set_errno;
use crate::verify::violation;
use std::ffi::c_int;
use std::time::{Duration, Instant};

/// Null, with `errno`.
fn null<T>(errno: i32) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}

/// An error number, which is also the thread's `errno`.
fn refused(errno: i32) -> c_int {
    set_errno(errno);
    errno
}

/// 0, or the error number.
fn code(result: Option<Result<(), i32>>) -> c_int {
    match result {
        Some(Ok(())) => 0,
        Some(Err(errno)) => refused(errno),
        None => refused(libc::ENODEV),
    }
}

/// Calls `act`, if the environment names a run. Error: ENODEV, or that of `act`.
fn attempt<T>(act: impl FnOnce(&mut Nic) -> Result<T, i32>) -> Result<T, i32> {
    nic::with(act).unwrap_or(Err(libc::ENODEV))
}

/// Waits until all events of an object that the program has taken are acknowledged, as the library does before it destroys
/// the object. A violation: they never are.
fn settled(what: &str, events: impl Fn(&Nic) -> u32) {
    const PATIENCE: Duration = Duration::from_secs(5);
    let begin = Instant::now();
    loop {
        match nic::with(|nic| events(nic)) {
            None | Some(0) => return,
            Some(left) if begin.elapsed() > PATIENCE => violation(&format!(
                "an object is destroyed whose {what} ({left}) are not acknowledged"
            )),
            Some(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// A structure that lives until the process ends.
fn kept<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// The number by which `nic` knows a program's object.
fn address<T>(object: *mut T) -> u64 {
    object.expose_provenance() as u64
}

/// All zeroes, as drivers begin with.
///
/// # Safety
/// A C structure of numbers, pointers and optional functions.
unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller vouches.
    unsafe { std::mem::zeroed() }
}
