//! `struct fi_ops_msg`.

use super::device;
use super::entries::{
    device_entries, more_sends, receives, send_calls, sends, tables, vector_receives,
};
use super::state::endpoint;
use super::transfer::{Flags, Tagging, receive, segment, send, vector};
use crate::ofi::guard::entries;
use crate::ofi::table::{Operations, Table};
use libc::iovec;
use libfabric_sys::{FI_EINVAL, FI_REMOTE_CQ_DATA, fi_addr_t, fi_msg, fi_ops_msg, fid_ep};
use std::convert::identity;
use std::ffi::c_void;
use std::ptr::null_mut;

tables!(fi_ops_msg);

receives!(
    receive(endpoint), () Tagging::PLAIN, fi_msg, Tagging::plain;
    recv "fi_recv" recvv "fi_recvv" recvmsg "fi_recvmsg" any_recv any_recvv any_recvmsg
);

sends!(
    () Tagging::PLAIN, fi_msg, Tagging::plain;
    "fi_send" "fi_sendv" "fi_sendmsg" "fi_inject" "fi_senddata" "fi_injectdata"
);
