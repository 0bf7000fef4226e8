// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only

use super::*;
use core::mem::{MaybeUninit, offset_of, size_of};

/// Numbers from a C program compiled against the headers.
macro_rules! sizes {
    ($($ty:ty = $size:literal,)*) => {$(
        assert_eq!(size_of::<$ty>(), $size, stringify!($ty));
    )*};
}

macro_rules! offsets {
    ($($ty:ident.$member:ident = $offset:literal,)*) => {$(
        assert_eq!(
            offset_of!($ty, $member),
            $offset,
            concat!(stringify!($ty), ".", stringify!($member)),
        );
    )*};
}

#[test]
fn object_sizes() {
    sizes! {
        verbs_context = 648, ibv_context = 328, ibv_qp = 160, ibv_qp_ex = 352, ibv_cq = 128,
        ibv_cq_ex = 288, ibv_mr = 48, ibv_pd = 16, ibv_ah = 24, ibv_comp_channel = 16,
        ibv_device = 664,
    }
}

#[test]
fn request_and_attribute_sizes() {
    sizes! {
        ibv_send_wr = 128, ibv_recv_wr = 32, ibv_wc = 48, ibv_sge = 16, ibv_ah_attr = 32,
        ibv_qp_attr = 144, ibv_qp_init_attr = 64, ibv_qp_init_attr_ex = 136,
        ibv_cq_init_attr_ex = 56, ibv_port_attr = 52, ibv_device_attr = 232, ibv_gid_entry = 32,
        ibv_grh = 40,
    }
}

#[test]
fn members_that_calls_go_through() {
    offsets! {
        verbs_context.query_port = 0, verbs_context.create_cq_ex = 200,
        verbs_context.create_qp_ex = 264, verbs_context.sz = 312, verbs_context.context = 320,
        ibv_context.cmd_fd = 264, ibv_context.abi_compat = 320, ibv_qp_ex.wr_start = 320,
        ibv_qp_ex.wr_set_ud_addr = 272, ibv_qp.qp_num = 52, ibv_cq_ex.start_poll = 144,
        ibv_cq_ex.read_slid = 224, ibv_send_wr.wr = 40, ibv_mr.lkey = 36,
        ibv_qp_init_attr_ex.send_ops_flags = 128,
    }
}

#[test]
fn constants_of_the_headers() {
    assert_eq!((IBV_QPT_UD, IBV_QPS_RTS, IBV_WR_SEND), (4, 3, 2));
    assert_eq!((IBV_SEND_SIGNALED, IBV_SEND_INLINE, IBV_WC_RECV), (2, 8, 128));
    assert_eq!((IBV_LINK_LAYER_ETHERNET, IBV_GID_TYPE_ROCE_V2), (2, 2));
    assert_eq!((IBV_QP_EX_WITH_SEND, IBV_ACCESS_LOCAL_WRITE), (4, 1));
}

/// A context whose driver reports a table of `size` bytes.
fn context(size: usize, compat: usize) -> Box<verbs_context> {
    // SAFETY: all zeroes is a valid verbs_context: no operation, null pointers.
    let mut context: Box<verbs_context> = unsafe { Box::new(MaybeUninit::zeroed().assume_init()) };
    context.sz = size;
    context.context.abi_compat = core::ptr::without_provenance_mut(compat);
    context
}

unsafe extern "C" fn three_polled(
    _: *mut ibv_cq,
    entries: core::ffi::c_int,
    _: *mut ibv_wc,
) -> core::ffi::c_int {
    entries.min(3)
}

unsafe extern "C" fn no_cq(_: *mut ibv_context, _: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
    core::ptr::null_mut()
}

#[test]
fn operations_that_a_driver_is_too_old_for_are_not_called() {
    let full = size_of::<verbs_context>();
    for (size, compat, there) in [
        (full, usize::MAX, true),
        (full - 200, usize::MAX, true),
        (full - 208, usize::MAX, false),
        (full, 0, false),
    ] {
        let mut context = context(size, compat);
        context.create_cq_ex = Some(no_cq);
        let base: *mut verbs_context = &raw mut *context;
        // SAFETY: the whole table exists, and the operation reads no argument.
        unsafe {
            let inner = &raw mut (*base).context;
            assert_eq!(ibv_create_cq_ex(inner, core::ptr::null_mut()).is_some(), there);
            assert_eq!(verbs_get_ctx(inner).is_null(), compat == 0);
            assert!(ibv_create_qp_ex(inner, core::ptr::null_mut()).is_none(), "an empty slot");
        }
    }
}

#[test]
fn the_data_path_goes_through_the_context() {
    let mut context = context(0, 0);
    context.context.ops.poll_cq = Some(three_polled);
    // SAFETY: all zeroes is a valid ibv_cq; the operation reads no argument.
    unsafe {
        let mut cq: ibv_cq = MaybeUninit::zeroed().assume_init();
        cq.context = &raw mut context.context;
        assert_eq!(ibv_poll_cq(&raw mut cq, 8, core::ptr::null_mut()), 3);
        assert_eq!(ibv_req_notify_cq(&raw mut cq, 0), libc::EOPNOTSUPP);
    }
}
