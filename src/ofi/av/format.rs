//! Addresses in the memory layout of applications.

use crate::sys::net;
use crate::transport::Address;
use libfabric_sys::{FI_ADDR_STR, FI_EINVAL, FI_ETOOSMALL, FI_SOCKADDR_IN6};
use std::ffi::{CStr, c_char, c_void};

/// Bytes of one address of `format` in an application's array.
pub(super) fn stride(format: u32) -> usize {
    match format {
        FI_SOCKADDR_IN6 => size_of::<libc::sockaddr_in6>(),
        FI_ADDR_STR => size_of::<*const c_char>(),
        _ => size_of::<libc::sockaddr_in>(),
    }
}

/// Reads one address in the domain's format.
///
/// # Safety
/// `at` points to one element of the application's array.
pub(super) unsafe fn read_address(format: u32, at: *const u8) -> Option<Address> {
    if format == FI_ADDR_STR {
        // SAFETY: an array of C strings (fi_av.3).
        unsafe {
            let text = at.cast::<*const c_char>().read_unaligned();
            if text.is_null() {
                return None;
            }
            return Address::from_text(CStr::from_ptr(text).to_str().ok()?);
        }
    }
    // SAFETY: an array of socket addresses of the domain's format; the family is read first.
    unsafe {
        let family = i32::from(at.cast::<libc::sa_family_t>().read_unaligned());
        let len = match family {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 if stride(format) >= size_of::<libc::sockaddr_in6>() => {
                size_of::<libc::sockaddr_in6>()
            }
            _ => return None,
        };
        Address::from_bytes(std::slice::from_raw_parts(at, len))
    }
}

/// Writes an address in `format` to a caller's buffer of `*len` bytes and sets `*len` to the bytes that
/// the whole address needs. FI_ETOOSMALL if there is less room: the address is truncated.
///
/// # Safety
/// `len` is valid, and `buffer` has `*len` bytes or is null.
pub(crate) unsafe fn write_address(
    format: u32,
    address: &Address,
    buffer: *mut c_void,
    len: *mut usize,
) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let room = unsafe { len.as_mut() }.ok_or(FI_EINVAL)?;
    let text;
    let (bytes, socket_len) = net::socket_addr_to_bytes(&address.0);
    let bytes = if format == FI_ADDR_STR {
        text = format!("{address}\0");
        text.as_bytes()
    } else {
        bytes.get(..socket_len).unwrap_or(&[])
    };
    let have = if buffer.is_null() { 0 } else { *room };
    // SAFETY: at most `have` bytes, which the caller's buffer has.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len().min(have));
    }
    *room = bytes.len();
    if have < bytes.len() { Err(FI_ETOOSMALL) } else { Ok(()) }
}
