//! `struct fid_av`: the address vector. An `fi_addr_t` is an index, for FI_AV_MAP too.

mod auth_key;
mod format;
mod insert;
mod named;
pub(super) mod set;
mod state;
mod vector;

use super::domain::Domain;
use super::guard::entry;
use super::lock::Locked;
use super::table::{Operations, SLACK, Table};
use crate::sys::Errno;
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::address::LocalHost;
use format::read_address;
pub(crate) use format::write_address;
use libfabric_sys::{
    FI_ADDR_STR, FI_AUTH_KEY, FI_AV_MAP, FI_AV_TABLE, FI_AV_UNSPEC, FI_CLASS_AV, FI_EINVAL,
    FI_ETOOSMALL, FI_EVENT, FI_READ, FI_SYMMETRIC, fi_addr_t, fi_av_attr, fi_ops_av, fi_ops_av_2_7,
    fid, fid_av,
};
use named::Board;
use state::{AvState, RX_BITS_MAX};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
pub(crate) use vector::{AddressVector, NO_SUCH_ADDRESS, named, shared};
use vector::{AvFid, FID_OPS};

static OPS: Table<fi_ops_av_2_7> = Table::new(fi_ops_av_2_7 {
    base: fi_ops_av {
        insert: Some(insert::insert),
        insertsvc: Some(insert::insert_service),
        insertsym: Some(insert::insert_symmetric),
        remove: Some(remove),
        lookup: Some(lookup),
        straddr: Some(straddr),
        av_set: Some(set::open),
        ..fi_ops_av_2_7::STUBS.base
    },
    insert_auth_key: Some(auth_key::insert),
    lookup_auth_key: Some(auth_key::lookup),
    ..fi_ops_av_2_7::STUBS
});

/// The bits of an `fi_addr` that name a receive context. Errors: EINVAL for more than are offered.
fn rx_bits(attr: &fi_av_attr) -> Result<u8, i32> {
    let bits = u8::try_from(attr.rx_ctx_bits).ok().filter(|bits| *bits <= RX_BITS_MAX);
    bits.ok_or_else(|| {
        log::warn(format_args!(
            "fi_av_attr->rx_ctx_bits refused: {}, offered 0 to {RX_BITS_MAX}",
            attr.rx_ctx_bits
        ));
        FI_EINVAL
    })
}

/// The memory of a named vector, and whether it is only read. fi_av.3: without FI_READ it "will be created, if it does not
/// already exist"; one that exists is changed by its keeper alone. Errors: as [`open`].
fn named_board(name: &str, attr: &fi_av_attr) -> Result<(Board, bool), i32> {
    let reads = attr.flags & FI_READ != 0;
    let found = || Board::open(name).map(|board| (board, true));
    let board = match found() {
        Err(Errno(libc::ENOENT)) if !reads => match Board::create(name, attr.count) {
            // Another process was faster.
            Err(Errno(libc::EADDRINUSE)) => found(),
            created => created.map(|board| (board, false)),
        },
        found => found,
    };
    match &board {
        Ok((_, true)) if !reads => log::info(format_args!(
            "the address vector called {name} exists: only the process that has created it inserts addresses"
        )),
        Ok(_) => {}
        Err(e) => log::info(format_args!("cannot open the address vector called {name}: {e}")),
    }
    board.map_err(|e| e.0)
}

/// `fi_av_open`. Errors: EINVAL; for a named vector ENOENT (FI_READ, and no process has created it; or the process that
/// has is not to be seen from here), EACCES (it belongs to another user), ENAMETOOLONG, ENOMEM.
///
/// # Safety
/// As libfabric calls `fi_av_open`.
pub(crate) unsafe fn open(
    domain: &Arc<Domain>,
    attr: *mut fi_av_attr,
    out: *mut *mut fid_av,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: the application's attributes, valid during the call.
    let attr = unsafe { attr.as_mut() }.ok_or(FI_EINVAL)?;
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    if attr.flags & !(FI_EVENT | FI_READ | FI_SYMMETRIC) != 0 {
        log::warn(format_args!(
            "fi_av_open refused: flags {:#x}, offered FI_EVENT, FI_READ and FI_SYMMETRIC",
            attr.flags
        ));
        return Err(FI_EINVAL);
    }
    match attr.type_ {
        FI_AV_UNSPEC => attr.type_ = FI_AV_TABLE,
        FI_AV_MAP | FI_AV_TABLE => {}
        _ => return Err(FI_EINVAL),
    }
    let rx_bits = rx_bits(attr)?;
    let mut state = AvState::new(LocalHost::detect(), attr.count).with_rx_bits(rx_bits);
    if !attr.name.is_null() {
        // SAFETY: the application's C string.
        let name = unsafe { CStr::from_ptr(attr.name) }.to_string_lossy();
        let (board, reads) = named_board(&name, attr)?;
        if attr.map_addr.is_null() {
            attr.map_addr = board.map_addr().cast();
        }
        state = state.with_board(board, reads);
    } else if attr.flags & FI_READ != 0 {
        return Err(FI_EINVAL); // FI_READ without a name
    }
    let av = Box::new(AvFid {
        fid: fid_av {
            fid: fid { fclass: FI_CLASS_AV, context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr().cast(),
        },
        slack: SLACK,
        shared: Arc::new(AddressVector {
            domain: domain.clone(),
            state: Locked::new(state),
            auth_key: Locked::new(None),
        }),
        asynchronous: attr.flags & FI_EVENT != 0,
        eq: None,
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(av).cast() };
    Ok(())
}

unsafe extern "C" fn remove(
    av: *mut fid_av,
    fi_addr: *mut fi_addr_t,
    count: usize,
    flags: u64,
) -> c_int {
    entry("fi_av_remove", || {
        // SAFETY: an address vector of this provider; `fi_addr` has `count` elements.
        unsafe {
            let av = &*av.cast::<AvFid>();
            if fi_addr.is_null() && count > 0 {
                return -FI_EINVAL;
            }
            let guard = av.shared.domain.lock.control();
            for i in 0..count {
                let fi_addr = *fi_addr.add(i);
                let removed = if flags & FI_AUTH_KEY != 0 {
                    av.shared.remove_key(fi_addr, &guard)
                } else {
                    let heir = av.shared.state.get(&guard).remove(fi_addr);
                    heir.map(|heir| av.shared.inherit(fi_addr, heir, &guard))
                };
                if let Err(error) = removed {
                    return -error;
                }
            }
        }
        0
    })
}

unsafe extern "C" fn lookup(
    av: *mut fid_av,
    fi_addr: fi_addr_t,
    addr: *mut c_void,
    len: *mut usize,
) -> c_int {
    entry("fi_av_lookup", || {
        // SAFETY: an address vector of this provider.
        let av = unsafe { &*av.cast::<AvFid>() };
        let guard = av.shared.domain.lock.control();
        av.shared.follow(&guard);
        // SAFETY: the guard belongs to the domain of this vector.
        let found = unsafe { av.shared.state.get(&guard) }.address(fi_addr);
        let Some(address) = found else { return -FI_EINVAL };
        let format = av.shared.domain.addr_format;
        // fi_av_lookup truncates without an error, and returns the size (fi_av.3).
        // SAFETY: the application's buffer and length.
        match unsafe { write_address(format, &address, addr, len) } {
            Ok(()) | Err(FI_ETOOSMALL) => 0,
            Err(error) => -error,
        }
    })
}

unsafe extern "C" fn straddr(
    av: *mut fid_av,
    addr: *const c_void,
    buffer: *mut c_char,
    len: *mut usize,
) -> *const c_char {
    entry("fi_av_straddr", || {
        // SAFETY: an address vector of this provider; `addr` is one address in its format; `buffer` has `*len` bytes.
        unsafe {
            let av = &*av.cast::<AvFid>();
            if addr.is_null() || len.is_null() {
                return std::ptr::null();
            }
            let format = av.shared.domain.addr_format;
            let address = if format == FI_ADDR_STR {
                CStr::from_ptr(addr.cast()).to_str().ok().and_then(Address::from_text)
            } else {
                read_address(format, addr.cast())
            };
            let Some(address) = address else { return std::ptr::null() };
            let text = format!("{address}\0");
            let room = *len;
            *len = text.len();
            if buffer.is_null() || room == 0 {
                return std::ptr::null();
            }
            let n = text.len().min(room);
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, n);
            *buffer.add(n - 1) = 0;
            buffer.cast_const()
        }
    })
}
