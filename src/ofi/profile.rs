//! `fi_profile` (rdma/fi_profile.h, libfabric 1.21 and newer): the counts of an endpoint as variables that tools can ask
//! for by number or by name. There are no events.
#![allow(non_camel_case_types)] // C names

use super::endpoint::{Endpoint, endpoint};
use super::ext::{self, fi_udrv_counts};
use super::guard::entry;
use super::own::{self, close as close_object};
use super::table::{Operations, Table};
use libfabric_sys::{
    FI_CLASS_UNSPEC, FI_EINVAL, FI_ENOSYS, FI_EOPBADSTATE, FI_ETOOSMALL, FI_UINT64, fi_ops, fid,
    fid_ep,
};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::offset_of;
use std::sync::{Arc, Weak};

/// The name for `fi_open_ops`.
const NAME: &CStr = c"fi_profile_ops";

/// Number of libfabric's own variable: unexpected messages that are held now.
const UNEXPECTED: u32 = 0;
/// Our variables begin here ("ud" in the upper half, which is the provider's).
const OURS: u32 = 0x7564_0000;

/// `struct fi_profile_desc` of a variable of type uint64_t.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct fi_profile_desc {
    id: u32,
    /// 0: the type is one of `enum fi_datatype`.
    datatype_sel: u32,
    datatype: u32,
    flags: u64,
    size: usize,
    name: *const c_char,
    desc: *const c_char,
}

type Query = unsafe extern "C" fn(*mut fid_profile, *mut fi_profile_desc, *mut usize) -> isize;
type Note = unsafe extern "C" fn(*mut fid_profile, u64);

#[repr(C)]
#[derive(Debug)]
struct fi_profile_ops {
    size: usize,
    reset: Note,
    query_vars: Query,
    query_events: Query,
    read_var: unsafe extern "C" fn(*mut fid_profile, u32, *mut c_void, *mut usize) -> isize,
    reg_callback: unsafe extern "C" fn(*mut fid_profile, u32, *mut c_void, *mut c_void) -> c_int,
    start_reads: Note,
    end_reads: Note,
}

/// `struct fid_profile`, with the endpoint, which may be closed before.
#[repr(C)]
#[derive(Debug)]
struct fid_profile {
    fid: fid,
    ops: *const fi_profile_ops,
    endpoint: Weak<Endpoint>,
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops { close: Some(close), ..fi_ops::STUBS });

static OPS: fi_profile_ops = fi_profile_ops {
    size: size_of::<fi_profile_ops>(),
    reset: nothing,
    query_vars,
    query_events,
    read_var,
    reg_callback,
    start_reads: nothing,
    end_reads: nothing,
};

/// A variable: its name, what it is, and where it lies among the counts.
type Variable = (&'static CStr, &'static CStr, usize);

macro_rules! counts {
    ($($field:ident: $name:literal, $what:literal;)*) => {
        [$(($name, $what, offset_of!(fi_udrv_counts, $field) / size_of::<u64>()),)*]
    };
}

/// The counts of fi_ext_udrv.h, which has more words on each.
const VARIABLES: [Variable; size_of::<fi_udrv_counts>() / size_of::<u64>()] = counts! {
    eager_sent: c"udrv_eager_sent", c"Messages sent eagerly";
    rendezvous_sent: c"udrv_rendezvous_sent", c"Messages sent by rendezvous";
    unexpected: c"udrv_unexpected", c"Messages that arrived before their receive was posted";
    pulled_bytes: c"udrv_pulled_bytes", c"Bytes read from peers' buffers as a receiver";
    pushed_bytes: c"udrv_pushed_bytes", c"Bytes written into peers' buffers as a sender";
    fragment_bytes: c"udrv_fragment_bytes", c"Bytes of rendezvous messages sent as fragments";
    dropped: c"udrv_dropped", c"Packets that nothing could be done with";
    surplus: c"udrv_surplus", c"Packets of unsolicited data without a place";
    stream_bytes: c"udrv_stream_bytes", c"Bytes of rendezvous messages sent by stream";
    resumed: c"udrv_resumed", c"Messages that went on as fragments after a failure";
    window_bytes: c"udrv_window_bytes", c"Bytes written into remote buffers by RDMA";
    windows_lost: c"udrv_windows_lost", c"Remote buffers lent to peers when their connection ended";
    declined: c"udrv_declined", c"Messages that could not be written into remote buffers";
    assisted_bytes: c"udrv_assisted_bytes", c"Bytes of split copies that the sender wrote";
    reached_bytes: c"udrv_reached_bytes", c"Bytes read and written by direct RMA in the node";
    read_bytes: c"udrv_read_bytes", c"Bytes read from remote buffers by RDMA as a receiver";
};

fn describe(id: u32, name: &'static CStr, what: &'static CStr) -> fi_profile_desc {
    fi_profile_desc {
        id,
        datatype_sel: 0,
        datatype: FI_UINT64,
        flags: 0,
        size: size_of::<u64>(),
        name: name.as_ptr(),
        desc: what.as_ptr(),
    }
}

fn variables() -> impl Iterator<Item = fi_profile_desc> {
    let common = describe(
        UNEXPECTED,
        c"pvar_unexp_msg_cnt",
        c"Unexpected messages that wait for a receive now",
    );
    let ours = (OURS..).zip(VARIABLES).map(|(id, (name, what, _))| describe(id, name, what));
    std::iter::once(common).chain(ours)
}

/// `fi_open_ops` of an endpoint. Errors: those of [`ext::ops_open`], which has all other names.
pub(super) unsafe extern "C" fn ops_open(
    object: *mut fid,
    name: *const c_char,
    flags: u64,
    ops: *mut *mut c_void,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a C string where it is not null, as libfabric calls fi_open_ops.
    let is_ours = !name.is_null() && unsafe { CStr::from_ptr(name) } == NAME;
    if !is_ours || ops.is_null() || flags != 0 {
        // SAFETY: as this one.
        return unsafe { ext::ops_open(object, name, flags, ops, context) };
    }
    entry("fi_open_ops", || {
        // SAFETY: an endpoint of this provider, and room for a pointer.
        unsafe { *ops = open(object, context) };
        0
    })
}

/// Opens the profile of an endpoint: what `fi_open_ops` gives is the address of its table, from which
/// rdma/fi_profile.h goes back to the object. Flags are reserved.
///
/// # Safety
/// `object` is an open endpoint of this provider.
unsafe fn open(object: *mut fid, context: *mut c_void) -> *mut c_void {
    // SAFETY: the caller vouches; a fid_ep begins with its fid.
    let shared = unsafe { &endpoint(object.cast::<fid_ep>()).shared };
    let fid = fid { fclass: FI_CLASS_UNSPEC, context, ops: FID_OPS.as_mut_ptr() };
    let profile = fid_profile { fid, ops: &OPS, endpoint: Arc::downgrade(shared) };
    let profile = Box::into_raw(Box::new(profile));
    // SAFETY: the box was just made.
    unsafe { (&raw mut (*profile).ops).cast() }
}

unsafe extern "C" fn close(object: *mut fid) -> c_int {
    // SAFETY: an object of this table, closed once.
    entry("fi_profile_close", || unsafe { close_object::<fid_profile>(object, |_| Ok(())) })
}

unsafe extern "C" fn nothing(_: *mut fid_profile, _: u64) {}

unsafe extern "C" fn query_vars(
    _: *mut fid_profile,
    list: *mut fi_profile_desc,
    count: *mut usize,
) -> isize {
    // SAFETY: as fi_profile(3) says; null is looked at there.
    unsafe { tell(variables(), list, count) }
}

unsafe extern "C" fn query_events(
    _: *mut fid_profile,
    list: *mut fi_profile_desc,
    count: *mut usize,
) -> isize {
    // SAFETY: as fi_profile(3) says.
    unsafe { tell(std::iter::empty(), list, count) }
}

/// Writes as many descriptions as there is room for, and into `count` how many there are. Returns how many were written.
///
/// # Safety
/// `list` is null or has room for `count` descriptions; `count` is null or a number.
unsafe fn tell(
    all: impl Iterator<Item = fi_profile_desc>,
    list: *mut fi_profile_desc,
    count: *mut usize,
) -> isize {
    // SAFETY: the caller vouches.
    let Some(count) = (unsafe { count.as_mut() }) else { return -(FI_EINVAL as isize) };
    let room = if list.is_null() { 0 } else { *count };
    *count = 0;
    for description in all {
        if *count < room {
            // SAFETY: within the room that the caller vouches for.
            unsafe { list.add(*count).write(description) };
        }
        *count += 1;
    }
    room.min(*count) as isize
}

unsafe extern "C" fn read_var(
    profile: *mut fid_profile,
    id: u32,
    data: *mut c_void,
    size: *mut usize,
) -> isize {
    let read = || {
        // SAFETY: an object of this table, and a number, as fi_profile(3) says.
        let (profile, size) = unsafe { (own::ours::<fid_profile>(profile.cast()), size.as_mut()) };
        let size = size.filter(|_| !data.is_null()).ok_or(FI_EINVAL)?;
        if std::mem::replace(size, size_of::<u64>()) < size_of::<u64>() {
            return Err(FI_ETOOSMALL);
        }
        let value = profile.value(id)?;
        // SAFETY: there is room for so much.
        unsafe { data.cast::<u64>().write_unaligned(value) };
        Ok(())
    };
    let code = entry("fi_profile_read", || super::guard::code(read()));
    if code == 0 { size_of::<u64>() as isize } else { code as isize }
}

unsafe extern "C" fn reg_callback(
    _: *mut fid_profile,
    _: u32,
    _: *mut c_void,
    _: *mut c_void,
) -> c_int {
    -FI_ENOSYS
}

impl fid_profile {
    /// Errors: EINVAL: there is no such variable; EOPBADSTATE: the endpoint is not enabled, or closed.
    fn value(&self, id: u32) -> Result<u64, i32> {
        let place = id.wrapping_sub(OURS) as usize;
        if id != UNEXPECTED && place >= VARIABLES.len() {
            return Err(FI_EINVAL);
        }
        let endpoint = self.endpoint.upgrade().ok_or(FI_EOPBADSTATE)?;
        if id == UNEXPECTED {
            let guard = endpoint.domain.lock.control();
            let engine = endpoint.engine(&guard).ok_or(FI_EOPBADSTATE)?;
            return Ok(engine.unexpected() as u64);
        }
        let counts = ext::counts_of(&endpoint)?;
        let at = VARIABLES.get(place).map_or(0, |(.., at)| *at);
        // SAFETY: the structure is made of such words, and the place is one of its members.
        Ok(unsafe { (&raw const counts).cast::<u64>().add(at).read() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_count_is_a_variable_once() {
        let mut places: Vec<usize> = VARIABLES.iter().map(|(.., at)| *at).collect();
        places.sort_unstable();
        assert!(places.iter().copied().eq(0..VARIABLES.len()), "{places:?}");
        let mut count = 0;
        // SAFETY: null is no list.
        assert_eq!(unsafe { tell(variables(), std::ptr::null_mut(), &mut count) }, 0);
        assert_eq!(count, VARIABLES.len() + 1);
    }

    #[test]
    fn a_list_has_what_it_has_room_for() {
        let mut list = [describe(9, c"", c""); 2];
        let mut count = 1;
        // SAFETY: a list of two, of which one is offered.
        assert_eq!(unsafe { tell(variables(), list.as_mut_ptr(), &mut count) }, 1);
        assert_eq!((count, list[0].id, list[1].id), (VARIABLES.len() + 1, UNEXPECTED, 9));
        // SAFETY: null is refused.
        assert!(unsafe { tell(variables(), list.as_mut_ptr(), std::ptr::null_mut()) } < 0);
    }

    #[test]
    fn a_profile_outlives_its_endpoint() {
        let fid = fid { fclass: 0, context: std::ptr::null_mut(), ops: FID_OPS.as_mut_ptr() };
        let profile = fid_profile { fid, ops: &OPS, endpoint: Weak::new() };
        assert_eq!(profile.value(UNEXPECTED), Err(FI_EOPBADSTATE));
        assert_eq!(profile.value(OURS), Err(FI_EOPBADSTATE));
        assert_eq!(profile.value(OURS + VARIABLES.len() as u32), Err(FI_EINVAL));
        assert_eq!(profile.value(1), Err(FI_EINVAL));
    }
}
