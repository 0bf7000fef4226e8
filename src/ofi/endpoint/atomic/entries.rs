//! `struct fi_ops_atomic`.

use super::{Call, Elements, Target, count_of, message, start, valid};
use crate::memory::atomic::Form;
use crate::ofi::endpoint::state::endpoint;
use crate::ofi::endpoint::transfer::Flags;
use crate::ofi::guard::{code, data_entry};
use crate::ofi::table::{Table, stubs};
use libfabric_sys::{fi_addr_t, fi_datatype, fi_ioc, fi_msg_atomic, fi_op, fi_ops_atomic, fid_ep};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

pub(in crate::ofi::endpoint) static OPS: Table<fi_ops_atomic> = Table::new(fi_ops_atomic {
    write: Some(write),
    writev: Some(writev),
    writemsg: Some(writemsg),
    inject: Some(inject),
    readwrite: Some(readwrite),
    readwritev: Some(readwritev),
    readwritemsg: Some(readwritemsg),
    compwrite: Some(compwrite),
    compwritev: Some(compwritev),
    compwritemsg: Some(compwritemsg),
    writevalid: Some(writevalid),
    readwritevalid: Some(readwritevalid),
    compwritevalid: Some(compwritevalid),
    // SAFETY: fi_ops_atomic has thirteen slots.
    ..unsafe { stubs::<fi_ops_atomic, 13>() }
});

// SAFETY of all entries: `ep` is an open endpoint of ours; buffers and lists are as fi_atomic.3 says.

unsafe extern "C" fn write(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    peer: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_atomic", || unsafe {
        let call = Call {
            form: Form::Base,
            op,
            datatype,
            operand: Elements::one(buf, count),
            compare: Elements::NONE,
            result: Elements::NONE,
            target: Target::One { addr, key },
            count,
            data: None,
            peer,
            context,
            flags: Flags::Default,
        };
        start(endpoint(ep), call)
    })
}

unsafe extern "C" fn writev(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    parts: usize,
    peer: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_atomicv", || unsafe {
        let call = Call {
            form: Form::Base,
            op,
            datatype,
            operand: Elements::several(iov, parts),
            compare: Elements::NONE,
            result: Elements::NONE,
            target: Target::One { addr, key },
            count: count_of(iov, parts),
            data: None,
            peer,
            context,
            flags: Flags::Default,
        };
        start(endpoint(ep), call)
    })
}

unsafe extern "C" fn writemsg(ep: *mut fid_ep, msg: *const fi_msg_atomic, flags: u64) -> isize {
    // SAFETY: see above.
    data_entry("fi_atomicmsg", || unsafe {
        message(ep, Form::Base, msg, Elements::NONE, Elements::NONE, flags)
    })
}

unsafe extern "C" fn inject(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    peer: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_inject_atomic", || unsafe {
        let call = Call {
            form: Form::Base,
            op,
            datatype,
            operand: Elements::one(buf, count),
            compare: Elements::NONE,
            result: Elements::NONE,
            target: Target::One { addr, key },
            count,
            data: None,
            peer,
            context: null_mut(),
            flags: Flags::Inject,
        };
        start(endpoint(ep), call)
    })
}

unsafe extern "C" fn readwrite(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    result: *mut c_void,
    _result_desc: *mut c_void,
    peer: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_fetch_atomic", || unsafe {
        let call = Call {
            form: Form::Fetch,
            op,
            datatype,
            operand: Elements::one(buf, count),
            compare: Elements::NONE,
            result: Elements::one(result, count),
            target: Target::One { addr, key },
            count,
            data: None,
            peer,
            context,
            flags: Flags::Default,
        };
        start(endpoint(ep), call)
    })
}

unsafe extern "C" fn readwritev(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    parts: usize,
    resultv: *mut fi_ioc,
    _result_desc: *mut *mut c_void,
    result_parts: usize,
    peer: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_fetch_atomicv", || unsafe {
        let call = Call {
            form: Form::Fetch,
            op,
            datatype,
            operand: Elements::several(iov, parts),
            compare: Elements::NONE,
            result: Elements::several(resultv, result_parts),
            target: Target::One { addr, key },
            count: count_of(resultv, result_parts),
            data: None,
            peer,
            context,
            flags: Flags::Default,
        };
        start(endpoint(ep), call)
    })
}

unsafe extern "C" fn readwritemsg(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    resultv: *mut fi_ioc,
    _result_desc: *mut *mut c_void,
    result_parts: usize,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_fetch_atomicmsg", || unsafe {
        let result = Elements::several(resultv, result_parts);
        message(ep, Form::Fetch, msg, Elements::NONE, result, flags)
    })
}

unsafe extern "C" fn compwrite(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    compare: *const c_void,
    _compare_desc: *mut c_void,
    result: *mut c_void,
    _result_desc: *mut c_void,
    peer: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_compare_atomic", || unsafe {
        let call = Call {
            form: Form::Compare,
            op,
            datatype,
            operand: Elements::one(buf, count),
            compare: Elements::one(compare, count),
            result: Elements::one(result, count),
            target: Target::One { addr, key },
            count,
            data: None,
            peer,
            context,
            flags: Flags::Default,
        };
        start(endpoint(ep), call)
    })
}

unsafe extern "C" fn compwritev(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    parts: usize,
    comparev: *const fi_ioc,
    _compare_desc: *mut *mut c_void,
    compare_parts: usize,
    resultv: *mut fi_ioc,
    _result_desc: *mut *mut c_void,
    result_parts: usize,
    peer: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_compare_atomicv", || unsafe {
        let call = Call {
            form: Form::Compare,
            op,
            datatype,
            operand: Elements::several(iov, parts),
            compare: Elements::several(comparev, compare_parts),
            result: Elements::several(resultv, result_parts),
            target: Target::One { addr, key },
            count: count_of(iov, parts),
            data: None,
            peer,
            context,
            flags: Flags::Default,
        };
        start(endpoint(ep), call)
    })
}

unsafe extern "C" fn compwritemsg(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    comparev: *const fi_ioc,
    _compare_desc: *mut *mut c_void,
    compare_parts: usize,
    resultv: *mut fi_ioc,
    _result_desc: *mut *mut c_void,
    result_parts: usize,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    data_entry("fi_compare_atomicmsg", || unsafe {
        let compare = Elements::several(comparev, compare_parts);
        let result = Elements::several(resultv, result_parts);
        message(ep, Form::Compare, msg, compare, result, flags)
    })
}

unsafe extern "C" fn writevalid(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: see above.
    data_entry("fi_atomicvalid", || code(unsafe { valid(ep, datatype, op, Form::Base, count) }))
}

unsafe extern "C" fn readwritevalid(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    data_entry("fi_fetch_atomicvalid", || {
        // SAFETY: see above.
        code(unsafe { valid(ep, datatype, op, Form::Fetch, count) })
    })
}

unsafe extern "C" fn compwritevalid(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    data_entry("fi_compare_atomicvalid", || {
        // SAFETY: see above.
        code(unsafe { valid(ep, datatype, op, Form::Compare, count) })
    })
}
