// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only

use super::*;
use core::mem::{align_of, offset_of, size_of};

/// Numbers from a C program compiled against the 1.17 headers.
macro_rules! sizes {
    ($($ty:ty = $size:literal,)*) => {$(
        assert_eq!(size_of::<$ty>(), $size, stringify!($ty));
        assert_eq!(align_of::<$ty>(), 8, stringify!($ty));
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
fn attribute_and_entry_sizes() {
    sizes! {
        fi_info = 120, fi_provider = 72, fi_tx_attr = 80, fi_rx_attr = 64, fi_ep_attr = 96,
        fi_domain_attr = 192, fi_fabric_attr = 32, fi_cq_attr = 40, fi_cntr_attr = 24,
        fi_eq_attr = 32, fi_av_attr = 48, fi_mr_attr = 80, fi_cq_err_entry = 80,
        fi_cq_tagged_entry = 48, fi_eq_err_entry = 48, fi_msg = 48, fi_msg_tagged = 64,
        fi_msg_rma = 64, fi_msg_atomic = 72, fi_context = 32, fi_context2 = 64, fid_nic = 56,
        fi_fid_var = 16,
    }
}

#[test]
fn object_sizes() {
    sizes! {
        fid = 24, fid_fabric = 40, fid_domain = 40, fid_ep = 80, fid_pep = 40, fid_av = 32,
        fid_cq = 32, fid_cntr = 32, fid_eq = 32, fid_mr = 40, fid_stx = 32, fid_mc = 32,
        fid_av_set = 32,
    }
}

#[test]
fn ops_table_sizes() {
    sizes! {
        fi_ops = 56, fi_ops_fabric = 56, fi_ops_domain = 96, fi_ops_mr = 32, fi_ops_ep = 64,
        fi_ops_cm = 80, fi_ops_msg = 80, fi_ops_tagged = 80, fi_ops_rma = 80,
        fi_ops_atomic = 112, fi_ops_collective = 96, fi_ops_av = 64, fi_ops_av_set = 56,
        fi_ops_cq = 64, fi_ops_cntr = 64, fi_ops_eq = 48, fi_ops_wait = 16, fi_ops_poll = 32,
    }
}

#[test]
fn sizes_after_the_additions() {
    sizes! {
        fi_ep_attr_2_7 = 104, fi_domain_attr_2_7 = 232, fi_cq_err_entry_1_20 = 88,
        fi_cq_attr_2_7 = 48, fi_cntr_attr_2_7 = 32, fi_mr_attr_2_0 = 112,
        fi_ops_domain_2_7 = 104, fi_ops_ep_2_7 = 72, fi_ops_av_2_7 = 96, fi_ops_cq_2_7 = 72,
        fi_ops_cntr_2_7 = 72, fi_mr_dmabuf = 32, fi_mr_auth_key = 16,
    }
}

#[test]
fn member_offsets() {
    offsets! {
        fi_info.next = 0, fi_info.caps = 8, fi_info.addr_format = 24, fi_info.src_addr = 48,
        fi_info.handle = 64, fi_info.tx_attr = 72, fi_info.domain_attr = 96, fi_info.nic = 112,
        fi_provider.fi_version = 4, fi_provider.context = 8, fi_provider.getinfo = 48,
        fi_provider.cleanup = 64, fi_domain_attr.mr_mode = 36, fi_domain_attr.caps = 136,
        fi_domain_attr.tclass = 184, fi_cq_err_entry.err = 56, fi_cq_err_entry.err_data = 64,
        fi_cq_err_entry.err_data_size = 72, fi_ops_av.straddr = 48,
        fi_ops_domain.query_collective = 80, fi_mr_attr.iface = 64, fi_mr_attr.device = 72,
    }
}

#[test]
fn flag_values() {
    let flags: [(u64, u32); 12] = [
        (FI_MSG, 1),
        (FI_RMA, 2),
        (FI_TAGGED, 3),
        (FI_MATCH_COMPLETE, 31),
        (FI_PEER_TRANSFER, 36),
        (FI_AV_USER_ID, 41),
        (FI_PEER, 43),
        (FI_HMEM, 47),
        (FI_DIRECTED_RECV, 59),
        (FI_CLAIM, 59),
        (FI_CONTEXT, 59),
        (FI_CONTEXT2, 52),
    ];
    for (flag, bit) in flags {
        assert_eq!(flag, 1 << bit);
    }
    assert_eq!(FI_ORDER_STRICT, 0x1ff);
    assert_eq!(FI_EVENT, FI_COMPLETION);
    // Bits with two meanings, one before and one after a release.
    assert_eq!(FI_EXACT_DIRECTED_RECV, FI_VARIABLE_MSG);
    assert_eq!(FI_XPU, FI_XPU_TRIGGER);
    assert_eq!(FI_TAGGED_DIRECTED_RECV, FI_HMEM_HOST_ALLOC);
    assert_eq!(FI_TAGGED_MULTI_RECV, FI_HMEM_DEVICE_ONLY);
}

#[test]
fn all_ones_values() {
    assert_eq!(FI_ADDR_UNSPEC, u64::MAX);
    assert_eq!(FI_ADDR_NOTAVAIL, u64::MAX);
    assert_eq!(FI_KEY_NOTAVAIL, u64::MAX);
    assert_eq!(FI_SHARED_CONTEXT, usize::MAX);
    assert_eq!(FI_AV_AUTH_KEY, usize::MAX);
}

#[test]
fn error_numbers_are_those_of_libc() {
    assert_eq!(FI_SUCCESS, 0);
    assert_eq!(FI_EAGAIN, libc::EAGAIN);
    assert_eq!(FI_ENODATA, libc::ENODATA);
    assert_eq!(FI_ECANCELED, libc::ECANCELED);
    assert_eq!(FI_EPROTO, libc::EPROTO);
    assert_eq!(FI_EOTHER, FI_ERRNO_OFFSET);
    assert_eq!(FI_ETRUNC, 265);
    assert_eq!(FI_ENOMR, FI_ERRNO_MAX);
}

#[test]
fn additions_continue_their_enums() {
    assert_eq!(FI_OPT_CUDA_API_PERMITTED, FI_OPT_XPU_TRIGGER + 1);
    assert_eq!(FI_CLASS_PEER_CNTR, FI_CLASS_PEER_AV_SET + 1);
    assert_eq!(FI_GET_FD, FI_EXPORT_FID + 1);
    assert_eq!(FI_TYPE_AV_ATTR, FI_TYPE_LOG_SUBSYS + 1);
    assert_eq!(FI_PROTO_COLL, FI_PROTO_XNET + 1);
    assert_eq!(FI_ADDR_UCX, FI_ADDR_CXI + 1);
    assert_eq!(FI_PROGRESS_CONTROL_UNIFIED, FI_PROGRESS_MANUAL + 1);
    assert_eq!(FI_CNTR_EVENTS_BYTES, FI_CNTR_EVENTS_COMP + 1);
    assert_eq!(FI_DIFF, FI_MSWAP + 1);
    assert_eq!(FI_FLOAT16, FI_UINT128 + 1);
}

#[test]
fn packed_versions() {
    let version = fi_version(FI_MAJOR_VERSION, FI_MINOR_VERSION);
    assert_eq!(version, 0x0001_0011);
    assert_eq!((fi_major(version), fi_minor(version)), (1, 17));
    assert!(fi_version(2, 0) > fi_version(1, 22));
}
