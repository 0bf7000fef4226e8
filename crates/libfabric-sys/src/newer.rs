// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only

//! The public definitions that libfabric added after 1.17.
//!
//! A structure that grew appears a second time, as `name_MAJOR_MINOR` after the
//! release of its last addition: the 1.17 structure under `base`, then the new
//! members. A pointer to it is also a pointer to the older one.
//!
//! Additions marked 2.7 are on libfabric's main branch and in no release yet.
//! Their position follows from the rule that members are only appended.

#![allow(non_camel_case_types)]

use crate::bindings::*;
use core::ffi::{c_int, c_void};
use core::marker::{PhantomData, PhantomPinned};

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _data: [u8; 0],
            _marker: PhantomData<(*mut u8, PhantomPinned)>,
        }
    )*};
}

opaque! {
    /// 2.7: context of an accelerator; a null pointer where there is none.
    fid_xpu_ctx;
    /// 2.7: endpoint handle that an accelerator uses.
    fid_xpu_ep;
    /// 2.7: completion queue handle that an accelerator uses.
    fid_xpu_cq;
    /// 2.7: counter handle that an accelerator uses.
    fid_xpu_cntr;
    /// 2.7: argument of `fi_ops_domain_2_7::xpu_ctx`.
    fi_xpu_attr;
}

// Capabilities and operation flags.

/// 2.2: flag of `fi_getinfo`, search for devices again.
pub const FI_RESCAN: u64 = 1 << 35;
/// 2.2: capability and `fi_av_insert` flag, the peer cannot be connected to from here.
pub const FI_FIREWALL_ADDR: u64 = 1 << 42;
/// 2.7: capability, accelerators start transfers. 1.17 has `FI_XPU_TRIGGER` here.
pub const FI_XPU: u64 = 1 << 44;
/// 2.0: capability, `FI_DIRECTED_RECV` for tagged messages only.
pub const FI_TAGGED_DIRECTED_RECV: u64 = 1 << 45;
/// 2.0: capability, `FI_MULTI_RECV` on tagged receives.
pub const FI_TAGGED_MULTI_RECV: u64 = 1 << 46;
/// 2.0: capability, directed receives with no wildcard source. 1.17 has `FI_VARIABLE_MSG` here.
pub const FI_EXACT_DIRECTED_RECV: u64 = 1 << 48;
/// 1.20: flag of AV insertion and memory registration, the argument carries an authorization key.
pub const FI_AUTH_KEY: u64 = 1 << 57;
/// 1.20: registration flag, `fi_mr_attr` describes a dmabuf (see [`fi_mr_dmabuf`]).
pub const FI_MR_DMABUF: u64 = 1 << 40;
/// 2.0: registration flag, the key serves one operation.
pub const FI_MR_SINGLE_USE: u64 = 1 << 41;

// Memory registration mode bits.

/// 2.7: accelerators need descriptors of their own.
pub const FI_MR_XPU_DESC: i32 = 1 << 12;

// Address formats, protocols, tag formats.

/// 1.18: address of the ucx provider.
pub const FI_ADDR_UCX: u32 = 16;
/// 2.3: either of `FI_SOCKADDR_IN` and `FI_SOCKADDR_IN6`.
pub const FI_SOCKADDR_IP: u32 = 17;
/// 1.18: the coll provider.
pub const FI_PROTO_COLL: u32 = 26;
/// 1.18: the ucx provider.
pub const FI_PROTO_UCX: u32 = 27;
/// 1.19: the sm2 provider.
pub const FI_PROTO_SM2: u32 = 28;
/// 1.21: the cxi provider with receiver-not-ready flow control.
pub const FI_PROTO_CXI_RNR: u32 = 29;
/// 2.0: the lpp provider.
pub const FI_PROTO_LPP: u32 = 30;
/// 2.0: the lnx provider.
pub const FI_PROTO_LNX: u32 = 31;
/// 2.0: `mem_tag_format`, bit fields as before 2.0.
pub const FI_TAG_BITS: u64 = 0;
/// 2.0: `mem_tag_format`, an MPI tag and one byte of payload.
pub const FI_TAG_MPI: u64 = 1;
/// 2.0: `mem_tag_format`, collective libraries.
pub const FI_TAG_CCL: u64 = 2;
/// 2.0: `mem_tag_format` values from here on are bit fields.
pub const FI_TAG_MAX_FORMAT: u64 = 1 << 16;
/// All releases (in no public header): `mem_tag_format` of a provider that gives all 64 bits to the application.
pub const FI_TAG_GENERIC: u64 = 0xaaaa_aaaa_aaaa_aaaa;
/// 2.0: ignore mask of `FI_TAG_MPI` for any tag.
pub const FI_MPI_IGNORE_TAG: u64 = 0xffff_ffff;
/// 2.0: ignore mask of `FI_TAG_MPI` for any payload.
pub const FI_MPI_IGNORE_PAYLOAD: u64 = 0xff_0000_0000;

// Values of other enums and integer members.

/// 1.20: `auth_key_size` that stands for keys kept in the AV.
pub const FI_AV_AUTH_KEY: usize = usize::MAX;
/// 1.21: control and data progress in one, made by the caller of either.
pub const FI_PROGRESS_CONTROL_UNIFIED: fi_progress = 3;
/// 1.21: the counter counts bytes.
pub const FI_CNTR_EVENTS_BYTES: fi_cntr_events = 1;
/// 2.0: IEEE half precision.
pub const FI_FLOAT16: fi_datatype = 16;
/// 2.0: bfloat16.
pub const FI_BFLOAT16: fi_datatype = 17;
/// 2.0: 8-bit float, 4 bits exponent.
pub const FI_FLOAT8_E4M3: fi_datatype = 18;
/// 2.0: 8-bit float, 5 bits exponent.
pub const FI_FLOAT8_E5M2: fi_datatype = 19;
/// 2.0: atomic subtraction.
pub const FI_DIFF: fi_op = 19;
/// 1.19: peer counter.
pub const FI_CLASS_PEER_CNTR: usize = 29;
/// 1.20: profiling object.
pub const FI_CLASS_PROFILE: usize = 30;
/// 2.7: accelerator context.
pub const FI_CLASS_XPU_CTX: usize = 31;
/// 2.2: control command, argument `int *`.
pub const FI_GET_FD: i32 = 20;
/// 2.7: control command, accelerator descriptor of a registration.
pub const FI_GET_MR_XPU_DESC: i32 = 21;
/// 1.19: `struct fi_av_attr`.
pub const FI_TYPE_AV_ATTR: fi_type = 29;
/// 1.19: `struct fi_cq_attr`.
pub const FI_TYPE_CQ_ATTR: fi_type = 30;
/// 1.19: `struct fi_mr_attr`.
pub const FI_TYPE_MR_ATTR: fi_type = 31;
/// 1.19: `struct fi_cntr_attr`.
pub const FI_TYPE_CNTR_ATTR: fi_type = 32;
/// 1.20: `struct fi_cq_err_entry`.
pub const FI_TYPE_CQ_ERR_ENTRY: fi_type = 33;
/// 2.5: `enum fi_cq_wait_cond`.
pub const FI_TYPE_CQ_WAIT_COND: fi_type = 34;
/// 2.5: `enum fi_wait_obj`.
pub const FI_TYPE_WAIT_OBJ: fi_type = 35;

// Endpoint options (level `FI_OPT_ENDPOINT`).

/// 1.18: `bool`, CUDA calls allowed on behalf of the endpoint.
pub const FI_OPT_CUDA_API_PERMITTED: i32 = 10;
/// 1.21: `bool`, shared memory allowed within the host.
pub const FI_OPT_SHARED_MEMORY_PERMITTED: i32 = 11;
/// 1.22: `size_t`, limit of untagged messages.
pub const FI_OPT_MAX_MSG_SIZE: i32 = 12;
/// 1.22: `size_t`, limit of tagged messages.
pub const FI_OPT_MAX_TAGGED_SIZE: i32 = 13;
/// 1.22: `size_t`, limit of RMA operations.
pub const FI_OPT_MAX_RMA_SIZE: i32 = 14;
/// 1.22: `size_t`, limit of atomic operations.
pub const FI_OPT_MAX_ATOMIC_SIZE: i32 = 15;
/// 1.22: `size_t`, inject limit of untagged messages.
pub const FI_OPT_INJECT_MSG_SIZE: i32 = 16;
/// 1.22: `size_t`, inject limit of tagged messages.
pub const FI_OPT_INJECT_TAGGED_SIZE: i32 = 17;
/// 1.22: `size_t`, inject limit of RMA writes.
pub const FI_OPT_INJECT_RMA_SIZE: i32 = 18;
/// 1.22: `size_t`, inject limit of atomic operations.
pub const FI_OPT_INJECT_ATOMIC_SIZE: i32 = 19;
/// 2.2: `bool`, this side cannot be connected to.
pub const FI_OPT_FIREWALL_ADDR: i32 = 20;

// Error numbers.

/// 2.0: protocol error.
pub const FI_EPROTO: i32 = 71;
/// 1.19: no registration left. In 1.17 `FI_ERRNO_MAX` had this value.
pub const FI_ENOMR: i32 = 270;
/// 2.2: the peer is behind a firewall.
pub const FI_EFIREWALLADDR: i32 = 271;

// Structures.

/// 1.20: what `fi_mr_attr.mr_iov` points to under [`FI_MR_DMABUF`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_mr_dmabuf {
    /// The dmabuf.
    pub fd: c_int,
    /// Offset of the region in it, bytes.
    pub offset: u64,
    /// Length of the region, bytes.
    pub len: usize,
    /// Address of the dmabuf's first byte.
    pub base_addr: *mut c_void,
}

const _: () = {
    assert!(size_of::<fi_mr_dmabuf>() == 32);
    assert!(core::mem::offset_of!(fi_mr_dmabuf, fd) == 0);
    assert!(core::mem::offset_of!(fi_mr_dmabuf, offset) == 8);
    assert!(core::mem::offset_of!(fi_mr_dmabuf, len) == 16);
    assert!(core::mem::offset_of!(fi_mr_dmabuf, base_addr) == 24);
};

/// 1.20: what `fi_mr_attr.auth_key` points to when the key is kept in an AV.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_mr_auth_key {
    /// The AV.
    pub av: *mut fid_av,
    /// Address of the key in it.
    pub src_addr: fi_addr_t,
}

const _: () = {
    assert!(size_of::<fi_mr_auth_key>() == 16);
    assert!(core::mem::offset_of!(fi_mr_auth_key, av) == 0);
    assert!(core::mem::offset_of!(fi_mr_auth_key, src_addr) == 8);
};

/// `fi_cq_err_entry`. The buffer of a caller on an API below 1.20 ends after `base`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_cq_err_entry_1_20 {
    /// The members of 1.17.
    pub base: fi_cq_err_entry,
    /// 1.20: source address, with `FI_SOURCE_ERR` that of the authorization key.
    pub src_addr: fi_addr_t,
}

const _: () = {
    assert!(size_of::<fi_cq_err_entry_1_20>() == 88);
    assert!(core::mem::offset_of!(fi_cq_err_entry_1_20, src_addr) == 80);
};

/// `fi_domain_attr`. From 2.0 on `base.data_progress` is also called `progress`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_domain_attr_2_7 {
    /// The members of 1.17.
    pub base: fi_domain_attr,
    /// 1.20: authorization keys per endpoint.
    pub max_ep_auth_key: usize,
    /// 2.0: largest group id.
    pub max_group_id: u32,
    /// 2.5: largest value of a counter.
    pub max_cntr_value: u64,
    /// 2.5: largest error value of a counter.
    pub max_err_cntr_value: u64,
    /// 2.7: accelerator contexts per domain.
    pub max_xpu_ctx_cnt: usize,
}

const _: () = {
    assert!(size_of::<fi_domain_attr_2_7>() == 232);
    assert!(core::mem::offset_of!(fi_domain_attr_2_7, max_ep_auth_key) == 192);
    assert!(core::mem::offset_of!(fi_domain_attr_2_7, max_group_id) == 200);
    assert!(core::mem::offset_of!(fi_domain_attr_2_7, max_cntr_value) == 208);
    assert!(core::mem::offset_of!(fi_domain_attr_2_7, max_err_cntr_value) == 216);
    assert!(core::mem::offset_of!(fi_domain_attr_2_7, max_xpu_ctx_cnt) == 224);
};

/// `fi_ep_attr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_ep_attr_2_7 {
    /// The members of 1.17.
    pub base: fi_ep_attr,
    /// 2.7: accelerator context.
    pub xpu_ctx: *mut fid_xpu_ctx,
}

const _: () = {
    assert!(size_of::<fi_ep_attr_2_7>() == 104);
    assert!(core::mem::offset_of!(fi_ep_attr_2_7, xpu_ctx) == 96);
};

/// `fi_mr_attr`. From 1.20 on `base.mr_iov` may be a `*const fi_mr_dmabuf`, from 2.5 on
/// `base.device` has a member `rocr` of type `int` at its start.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_mr_attr_2_0 {
    /// The members of 1.17.
    pub base: fi_mr_attr,
    /// 1.19: data for the memory interface.
    pub hmem_data: *mut c_void,
    /// 1.22: page size, 0 for unknown.
    pub page_size: usize,
    /// 2.0: the registration of which this one is a part.
    pub base_mr: *const fid_mr,
    /// 2.0: number of parts of this one that will be registered.
    pub sub_mr_cnt: usize,
}

const _: () = {
    assert!(size_of::<fi_mr_attr_2_0>() == 112);
    assert!(core::mem::offset_of!(fi_mr_attr_2_0, hmem_data) == 80);
    assert!(core::mem::offset_of!(fi_mr_attr_2_0, page_size) == 88);
    assert!(core::mem::offset_of!(fi_mr_attr_2_0, base_mr) == 96);
    assert!(core::mem::offset_of!(fi_mr_attr_2_0, sub_mr_cnt) == 104);
};

/// `fi_cq_attr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_cq_attr_2_7 {
    /// The members of 1.17.
    pub base: fi_cq_attr,
    /// 2.7: accelerator context.
    pub xpu_ctx: *mut fid_xpu_ctx,
}

const _: () = {
    assert!(size_of::<fi_cq_attr_2_7>() == 48);
    assert!(core::mem::offset_of!(fi_cq_attr_2_7, xpu_ctx) == 40);
};

/// `fi_cntr_attr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_cntr_attr_2_7 {
    /// The members of 1.17.
    pub base: fi_cntr_attr,
    /// 2.7: accelerator context.
    pub xpu_ctx: *mut fid_xpu_ctx,
}

const _: () = {
    assert!(size_of::<fi_cntr_attr_2_7>() == 32);
    assert!(core::mem::offset_of!(fi_cntr_attr_2_7, xpu_ctx) == 24);
};

// Ops tables. `base.size` is the size of the whole table.

/// `fi_ops_av`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_ops_av_2_7 {
    /// The members of 1.17.
    pub base: fi_ops_av,
    /// 1.20.
    pub insert_auth_key: Option<
        unsafe extern "C" fn(
            av: *mut fid_av,
            auth_key: *const c_void,
            auth_key_size: usize,
            fi_addr: *mut fi_addr_t,
            flags: u64,
        ) -> c_int,
    >,
    /// 1.20.
    pub lookup_auth_key: Option<
        unsafe extern "C" fn(
            av: *mut fid_av,
            fi_addr: fi_addr_t,
            auth_key: *mut c_void,
            auth_key_size: *mut usize,
        ) -> c_int,
    >,
    /// 1.20.
    pub set_user_id: Option<
        unsafe extern "C" fn(
            av: *mut fid_av,
            fi_addr: fi_addr_t,
            user_id: fi_addr_t,
            flags: u64,
        ) -> c_int,
    >,
    /// 2.7.
    pub lookup2: Option<
        unsafe extern "C" fn(
            av: *mut fid_av,
            fi_addr: fi_addr_t,
            buf: *mut c_void,
            len: *mut usize,
            flags: u64,
            ctx: *mut fid_xpu_ctx,
        ) -> c_int,
    >,
}

const _: () = {
    assert!(size_of::<fi_ops_av_2_7>() == 96);
    assert!(core::mem::offset_of!(fi_ops_av_2_7, insert_auth_key) == 64);
    assert!(core::mem::offset_of!(fi_ops_av_2_7, lookup_auth_key) == 72);
    assert!(core::mem::offset_of!(fi_ops_av_2_7, set_user_id) == 80);
    assert!(core::mem::offset_of!(fi_ops_av_2_7, lookup2) == 88);
};

/// `fi_ops_domain`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_ops_domain_2_7 {
    /// The members of 1.17.
    pub base: fi_ops_domain,
    /// 2.7.
    pub xpu_ctx: Option<
        unsafe extern "C" fn(
            domain: *mut fid_domain,
            attr: *mut fi_xpu_attr,
            ctx: *mut *mut fid_xpu_ctx,
            context: *mut c_void,
        ) -> c_int,
    >,
}

const _: () = {
    assert!(size_of::<fi_ops_domain_2_7>() == 104);
    assert!(core::mem::offset_of!(fi_ops_domain_2_7, xpu_ctx) == 96);
};

/// `fi_ops_ep`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_ops_ep_2_7 {
    /// The members of 1.17.
    pub base: fi_ops_ep,
    /// 2.7, called without a check for null.
    pub export_xpu:
        Option<unsafe extern "C" fn(ep: *mut fid_ep, flags: u64, xpu_ep: *mut fid_xpu_ep) -> c_int>,
}

const _: () = {
    assert!(size_of::<fi_ops_ep_2_7>() == 72);
    assert!(core::mem::offset_of!(fi_ops_ep_2_7, export_xpu) == 64);
};

/// `fi_ops_cq`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_ops_cq_2_7 {
    /// The members of 1.17.
    pub base: fi_ops_cq,
    /// 2.7, called without a check for null.
    pub export_xpu:
        Option<unsafe extern "C" fn(cq: *mut fid_cq, flags: u64, xpu_cq: *mut fid_xpu_cq) -> c_int>,
}

const _: () = {
    assert!(size_of::<fi_ops_cq_2_7>() == 72);
    assert!(core::mem::offset_of!(fi_ops_cq_2_7, export_xpu) == 64);
};

/// `fi_ops_cntr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_ops_cntr_2_7 {
    /// The members of 1.17.
    pub base: fi_ops_cntr,
    /// 2.7, called without a check for null.
    pub export_xpu: Option<
        unsafe extern "C" fn(cntr: *mut fid_cntr, flags: u64, xpu_cntr: *mut fid_xpu_cntr) -> c_int,
    >,
}

const _: () = {
    assert!(size_of::<fi_ops_cntr_2_7>() == 72);
    assert!(core::mem::offset_of!(fi_ops_cntr_2_7, export_xpu) == 64);
};
