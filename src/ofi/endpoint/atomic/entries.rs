//! `struct fi_ops_atomic`.

use super::{Elements, message, one_place, start, valid};
use crate::memory::atomic::Form;
use crate::ofi::endpoint::state::endpoint;
use crate::ofi::endpoint::transfer::Flags;
use crate::ofi::guard::{code, entries};
use crate::ofi::table::{Operations, Table};
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
    ..fi_ops_atomic::STUBS
});

const NONE: Elements = Elements::NONE;

entries! { data_entry -> isize;
    write "fi_atomic" (
        ep: *mut fid_ep, buf: *const c_void, count: usize, _desc: *mut c_void, peer: fi_addr_t, addr: u64, key: u64,
        datatype: fi_datatype, op: fi_op, context: *mut c_void,
    ) => start(endpoint(ep), one_place(
        (Form::Base, datatype, op), (Elements::one(buf, count), NONE, NONE), (peer, addr, key), (context, Flags::Default),
    ));
    writev "fi_atomicv" (
        ep: *mut fid_ep, iov: *const fi_ioc, _desc: *mut *mut c_void, parts: usize, peer: fi_addr_t, addr: u64, key: u64,
        datatype: fi_datatype, op: fi_op, context: *mut c_void,
    ) => start(endpoint(ep), one_place(
        (Form::Base, datatype, op), (Elements::several(iov, parts), NONE, NONE), (peer, addr, key), (context, Flags::Default),
    ));
    writemsg "fi_atomicmsg" (ep: *mut fid_ep, msg: *const fi_msg_atomic, flags: u64)
        => message(ep, Form::Base, msg, NONE, NONE, flags);
    inject "fi_inject_atomic" (
        ep: *mut fid_ep, buf: *const c_void, count: usize, peer: fi_addr_t, addr: u64, key: u64, datatype: fi_datatype,
        op: fi_op,
    ) => start(endpoint(ep), one_place(
        (Form::Base, datatype, op), (Elements::one(buf, count), NONE, NONE), (peer, addr, key), (null_mut(), Flags::Inject),
    ));
    readwrite "fi_fetch_atomic" (
        ep: *mut fid_ep, buf: *const c_void, count: usize, _desc: *mut c_void, result: *mut c_void,
        _result_desc: *mut c_void, peer: fi_addr_t, addr: u64, key: u64, datatype: fi_datatype, op: fi_op,
        context: *mut c_void,
    ) => start(endpoint(ep), one_place(
        (Form::Fetch, datatype, op), (Elements::one(buf, count), NONE, Elements::one(result, count)), (peer, addr, key),
        (context, Flags::Default),
    ));
    readwritev "fi_fetch_atomicv" (
        ep: *mut fid_ep, iov: *const fi_ioc, _desc: *mut *mut c_void, parts: usize, resultv: *mut fi_ioc,
        _result_desc: *mut *mut c_void, result_parts: usize, peer: fi_addr_t, addr: u64, key: u64,
        datatype: fi_datatype, op: fi_op, context: *mut c_void,
    ) => start(endpoint(ep), one_place(
        (Form::Fetch, datatype, op), (Elements::several(iov, parts), NONE, Elements::several(resultv, result_parts)), (peer, addr, key),
        (context, Flags::Default),
    ));
    readwritemsg "fi_fetch_atomicmsg" (
        ep: *mut fid_ep, msg: *const fi_msg_atomic, resultv: *mut fi_ioc, _result_desc: *mut *mut c_void,
        result_parts: usize, flags: u64,
    ) => message(ep, Form::Fetch, msg, NONE, Elements::several(resultv, result_parts), flags);
    compwrite "fi_compare_atomic" (
        ep: *mut fid_ep, buf: *const c_void, count: usize, _desc: *mut c_void, compare: *const c_void,
        _compare_desc: *mut c_void, result: *mut c_void, _result_desc: *mut c_void, peer: fi_addr_t, addr: u64,
        key: u64, datatype: fi_datatype, op: fi_op, context: *mut c_void,
    ) => start(endpoint(ep), one_place(
        (Form::Compare, datatype, op), (Elements::one(buf, count), Elements::one(compare, count), Elements::one(result, count)), (peer, addr, key),
        (context, Flags::Default),
    ));
    compwritev "fi_compare_atomicv" (
        ep: *mut fid_ep, iov: *const fi_ioc, _desc: *mut *mut c_void, parts: usize, comparev: *const fi_ioc,
        _compare_desc: *mut *mut c_void, compare_parts: usize, resultv: *mut fi_ioc, _result_desc: *mut *mut c_void,
        result_parts: usize, peer: fi_addr_t, addr: u64, key: u64, datatype: fi_datatype, op: fi_op,
        context: *mut c_void,
    ) => start(endpoint(ep), one_place(
        (Form::Compare, datatype, op),
        (Elements::several(iov, parts), Elements::several(comparev, compare_parts), Elements::several(resultv, result_parts)), (peer, addr, key),
        (context, Flags::Default),
    ));
    compwritemsg "fi_compare_atomicmsg" (
        ep: *mut fid_ep, msg: *const fi_msg_atomic, comparev: *const fi_ioc, _compare_desc: *mut *mut c_void,
        compare_parts: usize, resultv: *mut fi_ioc, _result_desc: *mut *mut c_void, result_parts: usize, flags: u64,
    ) => message(ep, Form::Compare, msg, Elements::several(comparev, compare_parts), Elements::several(resultv, result_parts), flags);
}

entries! { data_entry -> c_int;
    writevalid "fi_atomicvalid" (ep: *mut fid_ep, datatype: fi_datatype, op: fi_op, count: *mut usize)
        => code(valid(ep, datatype, op, Form::Base, count));
    readwritevalid "fi_fetch_atomicvalid" (ep: *mut fid_ep, datatype: fi_datatype, op: fi_op, count: *mut usize)
        => code(valid(ep, datatype, op, Form::Fetch, count));
    compwritevalid "fi_compare_atomicvalid" (ep: *mut fid_ep, datatype: fi_datatype, op: fi_op, count: *mut usize)
        => code(valid(ep, datatype, op, Form::Compare, count));
}
