//! `struct fi_ops_tagged`.

use super::device;
use super::entries::{
    device_entries, more_sends, receives, send_calls, sends, tables, vector_receives,
};
use super::state::endpoint;
use super::transfer::{Flags, Tagging, receive, segment, send, vector};
use crate::ofi::guard::entries;
use crate::ofi::table::{Operations, Table};
use libc::iovec;
use libfabric_sys::{
    FI_EINVAL, FI_REMOTE_CQ_DATA, fi_addr_t, fi_msg_tagged, fi_ops_tagged, fid_ep,
};
use std::convert::identity;
use std::ffi::c_void;
use std::ptr::null_mut;

tables!(fi_ops_tagged);

receives!(
    receive(endpoint), (tag ignore) Tagging::tagged(tag, ignore), fi_msg_tagged, Tagging::wanted;
    recv "fi_trecv" recvv "fi_trecvv" recvmsg "fi_trecvmsg" any_recv any_recvv any_recvmsg
);

sends!(
    (tag) Tagging::tagged(tag, 0), fi_msg_tagged, Tagging::sent;
    "fi_tsend" "fi_tsendv" "fi_tsendmsg" "fi_tinject" "fi_tsenddata" "fi_tinjectdata"
);
