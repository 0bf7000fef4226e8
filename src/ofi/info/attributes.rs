//! All parts of an info but its addresses: which hints are met, and with which values.
//!
//! The rule of fi_getinfo(3): every hint that is not zero is met, or the call fails. Without a hint the
//! most that is offered is returned. So asking for exactly what was returned succeeds and returns the
//! same.

use super::hints::Hints;
use super::limits::{
    CAPS, CONTEXT_SIZE, CQ_DATA_SIZE, DOMAIN_CAPS, EP_COUNT, FABRIC_NAME, INJECT_SIZE, IOV_LIMIT,
    MAX_CONTEXTS, MAX_EP_AUTH_KEY, MR_IOV_LIMIT, MR_KEY_SIZE, MSG_ORDER, OBJECT_COUNT, PROTOCOL,
    PROTOCOL_VERSION, RMA_IOV_LIMIT, RX_CAPS, RX_OP_FLAGS, TX_CAPS, TX_OP_FLAGS,
};
use super::names;
use super::refusal::Refusal;
use crate::config::Config;
use crate::memory::atomic::MAX_BYTES;
use crate::memory::settings::HmemPolicy;
use crate::ofi::domain::DomainFid;
use crate::ofi::fabric::FabricFid;
use crate::ofi::own::is_foreign;
use crate::transport::job_key::SECRET_MAX;
use libfabric_sys::{
    FI_ATOMIC, FI_AV_AUTH_KEY, FI_AV_TABLE, FI_EP_RDM, FI_EP_UNSPEC, FI_FENCE, FI_HMEM,
    FI_LOCAL_COMM, FI_MR_BASIC, FI_MR_HMEM, FI_MR_SCALABLE, FI_MR_UNSPEC, FI_MSG, FI_MULTI_RECV,
    FI_NAMED_RX_CTX, FI_PROGRESS_CONTROL_UNIFIED, FI_PROGRESS_MANUAL, FI_PROTO_UNSPEC, FI_READ,
    FI_RECV, FI_REMOTE_COMM, FI_REMOTE_READ, FI_REMOTE_WRITE, FI_RM_ENABLED, FI_RMA, FI_SEND,
    FI_SHARED_AV, FI_SHARED_CONTEXT, FI_TAG_GENERIC, FI_TAGGED, FI_THREAD_ENDPOINT, FI_THREAD_SAFE,
    FI_WRITE, fi_domain_attr, fi_domain_attr_2_7, fi_ep_attr, fi_ep_attr_2_7, fi_rx_attr,
    fi_tx_attr, fi_version,
};
use std::ptr::null_mut;

/// The attributes of an info. Their pointers are null.
#[derive(Debug)]
pub(super) struct Attributes {
    pub(super) caps: u64,
    pub(super) tx: fi_tx_attr,
    pub(super) rx: fi_rx_attr,
    pub(super) ep: fi_ep_attr_2_7,
    pub(super) domain: fi_domain_attr_2_7,
    /// `auth_key` of `ep` and of `domain`; empty: no key.
    pub(super) ep_auth_key: Vec<u8>,
    pub(super) domain_auth_key: Vec<u8>,
}

/// Meets all hints, or returns the first that cannot be met.
pub(super) fn negotiate(
    version: u32,
    hints: &Hints,
    config: &Config,
) -> Result<Attributes, Refusal> {
    // First, because libfabric's layering providers ask every provider for endpoints of other types.
    let ep = endpoint(&hints.ep)?;
    names_of_ours(hints)?;
    objects_of_ours(hints)?;
    let caps = capabilities(hints, config)?;
    if caps & (FI_RMA | FI_ATOMIC) != 0 {
        at_most("ep_attr->max_order_war_size", hints.ep.max_order_war_size, MAX_BYTES)?;
    }
    Ok(Attributes {
        caps,
        tx: transmit(caps, &hints.tx, config)?,
        rx: receive(caps, &hints.rx, config)?,
        ep,
        domain: domain(version, caps, &hints.domain)?,
        ep_auth_key: endpoint_auth_key(version, hints)?,
        domain_auth_key: domain_auth_key(version, hints)?,
    })
}

/// Fails unless `wanted` is at most `offered`.
fn at_most(attribute: &'static str, wanted: usize, offered: usize) -> Result<(), Refusal> {
    if wanted > offered { Err(Refusal::new(attribute, wanted, offered)) } else { Ok(()) }
}

/// Fails unless all bits of `wanted` are `offered`.
fn subset(
    attribute: &'static str,
    wanted: u64,
    offered: u64,
    bits: names::Bits,
) -> Result<(), Refusal> {
    match wanted & !offered {
        0 => Ok(()),
        missing => Err(Refusal::of_bits(attribute, bits.text(wanted), bits.text(missing))),
    }
}

fn names_of_ours(hints: &Hints) -> Result<(), Refusal> {
    match hints.fabric_name.as_deref() {
        None | Some(FABRIC_NAME) => {}
        Some(name) => return Err(Refusal::new("fabric_attr->name", name, FABRIC_NAME)),
    }
    match hints.prov_name.as_deref() {
        // The core has decided already about lists ("udrv;ofi_x") and exclusions ("^tcp").
        Some(name) if !name.contains([';', '^']) && !name.eq_ignore_ascii_case("udrv") => {
            Err(Refusal::new("fabric_attr->prov_name", name, "udrv"))
        }
        _ => Ok(()),
    }
}

/// fi_domain(3), fi_fabric(3): an open domain or fabric restricts the answer to it.
fn objects_of_ours(hints: &Hints) -> Result<(), Refusal> {
    let (fabric, domain) = (hints.fabric, hints.domain.base.domain);
    let refused = |attribute| Err(Refusal::new(attribute, "another provider's", "udrv's"));
    if !fabric.is_null() && is_foreign::<FabricFid>(fabric.cast()) {
        return refused("fabric_attr->fabric");
    }
    if !domain.is_null() && is_foreign::<DomainFid>(domain.cast()) {
        return refused("domain_attr->domain");
    }
    Ok(())
}

/// Primary capabilities are granted only on request, secondary ones also when they cost nothing
/// (fi_getinfo(3), "Capabilities may be grouped"). FI_SOURCE costs a lookup per message.
fn capabilities(hints: &Hints, config: &Config) -> Result<u64, Refusal> {
    // Only on request, and where there may be device memory: to look for it loads a library. Intel MPI asks for what an info
    // without hints has; the user has to want it then.
    let wanted = hints.caps & FI_HMEM != 0 || hints.caps == 0 && config.hmem == HmemPolicy::On;
    let device = if wanted && config.hmem.is_offered() { FI_HMEM } else { 0 };
    subset("caps", hints.caps, CAPS | device, names::CAPS)?;
    subset("domain_attr->caps", hints.domain.base.caps, DOMAIN_CAPS, names::CAPS)?;
    let all = CAPS & !FI_REMOTE_COMM;
    let mut caps = if hints.caps == 0 { all | device } else { with_directions(hints.caps) };
    if caps & FI_MSG != 0 && caps & FI_RECV != 0 {
        caps |= FI_MULTI_RECV;
    }
    if caps & (FI_SEND | FI_READ | FI_WRITE) != 0 {
        caps |= FI_FENCE;
    }
    let reach =
        if config.net.on { FI_REMOTE_COMM } else { hints.domain.base.caps & FI_REMOTE_COMM };
    Ok(caps | FI_LOCAL_COMM | reach | hints.domain.base.caps & FI_SHARED_AV)
}

/// The direction bits of messages, and those of one-sided operations.
const MESSAGE_DIRECTIONS: u64 = FI_SEND | FI_RECV;
const RMA_DIRECTIONS: u64 = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

/// A capability without any of its directions has all of them.
fn with_directions(caps: u64) -> u64 {
    let mut all = caps;
    if caps & (FI_MSG | FI_TAGGED) != 0 && caps & MESSAGE_DIRECTIONS == 0 {
        all |= MESSAGE_DIRECTIONS;
    }
    if caps & (FI_RMA | FI_ATOMIC) != 0 && caps & RMA_DIRECTIONS == 0 {
        all |= RMA_DIRECTIONS;
    }
    all
}

/// Capabilities of one direction: those that its hints ask for, or those of the endpoint. `offered` are
/// all of this direction, `messages` and `rma` are its direction bits, `extra` is granted with messages
/// without a request.
fn context_caps(
    attribute: &'static str,
    wanted: u64,
    endpoint: u64,
    offered: u64,
    messages: u64,
    rma: u64,
    extra: u64,
) -> Result<u64, Refusal> {
    // Bits of the other direction are ignored, because applications copy all capabilities here.
    let foreign = (TX_CAPS | RX_CAPS | DOMAIN_CAPS | FI_HMEM) & !offered;
    let mut available = endpoint & offered;
    subset(attribute, wanted & !foreign, available, names::CAPS)?;
    if available & messages == 0 {
        available &= !(FI_MSG | FI_TAGGED);
    }
    if available & rma == 0 {
        available &= !(FI_RMA | FI_ATOMIC);
    }
    let mut caps = wanted & available;
    if caps == 0 {
        return Ok(available);
    }
    if caps & (FI_MSG | FI_TAGGED) != 0 {
        caps |= available & (messages | extra);
    }
    if caps & (FI_RMA | FI_ATOMIC) != 0 && caps & rma == 0 {
        caps |= available & rma;
    }
    Ok(caps)
}

/// Default flags of operations.
pub(super) fn check_flags(transmits: bool, flags: u64) -> Result<(), Refusal> {
    match transmits {
        true => subset("tx_attr->op_flags", flags, TX_OP_FLAGS, names::OP_FLAGS),
        false => subset("rx_attr->op_flags", flags, RX_OP_FLAGS, names::OP_FLAGS),
    }
}

/// What every transmit context offers, whatever its capabilities are.
pub(super) fn check_transmit(wanted: &fi_tx_attr, config: &Config) -> Result<(), Refusal> {
    check_flags(true, wanted.op_flags)?;
    subset("tx_attr->msg_order", wanted.msg_order, MSG_ORDER, names::ORDER)?;
    subset("tx_attr->comp_order", wanted.comp_order, 0, names::ORDER)?;
    at_most("tx_attr->inject_size", wanted.inject_size, INJECT_SIZE)?;
    at_most("tx_attr->size", wanted.size, config.endpoint.tx_max)?;
    at_most("tx_attr->iov_limit", wanted.iov_limit, IOV_LIMIT)?;
    at_most("tx_attr->rma_iov_limit", wanted.rma_iov_limit, RMA_IOV_LIMIT)
}

/// The same for receive contexts.
pub(super) fn check_receive(wanted: &fi_rx_attr, config: &Config) -> Result<(), Refusal> {
    check_flags(false, wanted.op_flags)?;
    subset("rx_attr->msg_order", wanted.msg_order, MSG_ORDER, names::ORDER)?;
    subset("rx_attr->comp_order", wanted.comp_order, 0, names::ORDER)?;
    at_most("rx_attr->size", wanted.size, config.endpoint.rx_max)?;
    at_most("rx_attr->iov_limit", wanted.iov_limit, IOV_LIMIT)
}

fn transmit(caps: u64, hints: &fi_tx_attr, config: &Config) -> Result<fi_tx_attr, Refusal> {
    let caps = context_caps(
        "tx_attr->caps",
        hints.caps,
        caps,
        TX_CAPS | caps & FI_HMEM,
        FI_SEND,
        FI_READ | FI_WRITE,
        FI_FENCE | FI_NAMED_RX_CTX,
    )?;
    check_transmit(hints, config)?;
    Ok(fi_tx_attr {
        caps,
        mode: 0,
        op_flags: hints.op_flags,
        msg_order: MSG_ORDER,
        comp_order: 0,
        inject_size: INJECT_SIZE,
        size: context_size(hints.size, config.endpoint.tx_max),
        iov_limit: IOV_LIMIT,
        rma_iov_limit: RMA_IOV_LIMIT,
        tclass: hints.tclass,
    })
}

fn receive(caps: u64, hints: &fi_rx_attr, config: &Config) -> Result<fi_rx_attr, Refusal> {
    let extra = if caps & FI_MSG != 0 { FI_MULTI_RECV } else { 0 };
    let caps = context_caps(
        "rx_attr->caps",
        hints.caps,
        caps,
        RX_CAPS | caps & FI_HMEM,
        FI_RECV,
        FI_REMOTE_READ | FI_REMOTE_WRITE,
        extra,
    )?;
    check_receive(hints, config)?;
    Ok(fi_rx_attr {
        caps,
        mode: 0,
        op_flags: hints.op_flags,
        msg_order: MSG_ORDER,
        comp_order: 0,
        // An obsolete hint, which "the provider may adjust or ignore".
        total_buffered_recv: 0,
        size: context_size(hints.size, config.endpoint.rx_max),
        iov_limit: IOV_LIMIT,
    })
}

fn context_size(wanted: usize, most: usize) -> usize {
    if wanted == 0 { CONTEXT_SIZE.min(most) } else { wanted }
}

fn endpoint(hints: &fi_ep_attr) -> Result<fi_ep_attr_2_7, Refusal> {
    if hints.type_ != FI_EP_UNSPEC && hints.type_ != FI_EP_RDM {
        return Err(Refusal::new("ep_attr->type", names::ep_type(hints.type_), "FI_EP_RDM"));
    }
    if hints.protocol != FI_PROTO_UNSPEC && hints.protocol != PROTOCOL {
        return Err(Refusal::new(
            "ep_attr->protocol",
            format_args!("{:#x}", hints.protocol),
            format_args!("{PROTOCOL:#x}"),
        ));
    }
    at_most(
        "ep_attr->protocol_version",
        hints.protocol_version as usize,
        PROTOCOL_VERSION as usize,
    )?;
    let contexts = |attribute, count| match count {
        0 => Ok(1),
        FI_SHARED_CONTEXT => Ok(count),
        _ => at_most(attribute, count, MAX_CONTEXTS).map(|()| count),
    };
    let tx_ctx_cnt = contexts("ep_attr->tx_ctx_cnt", hints.tx_ctx_cnt)?;
    let rx_ctx_cnt = contexts("ep_attr->rx_ctx_cnt", hints.rx_ctx_cnt)?;
    Ok(fi_ep_attr_2_7 {
        base: fi_ep_attr {
            type_: FI_EP_RDM,
            protocol: PROTOCOL,
            protocol_version: PROTOCOL_VERSION,
            max_msg_size: usize::MAX,
            msg_prefix_size: 0,
            max_order_raw_size: usize::MAX,
            // Of the offered orders, only atomic operations have WAR.
            max_order_war_size: MAX_BYTES,
            max_order_waw_size: usize::MAX,
            // All tag bits are compared, which serves every format of fields.
            mem_tag_format: FI_TAG_GENERIC,
            tx_ctx_cnt,
            rx_ctx_cnt,
            auth_key_size: hints.auth_key_size,
            auth_key: null_mut(),
        },
        xpu_ctx: null_mut(),
    })
}

/// Fails for a domain attribute that no domain of this provider offers.
fn check_domain(hints: &fi_domain_attr_2_7) -> Result<(), Refusal> {
    let wanted = &hints.base;
    known("domain_attr->threading", wanted.threading, FI_THREAD_ENDPOINT)?;
    known("domain_attr->control_progress", wanted.control_progress, FI_PROGRESS_CONTROL_UNIFIED)?;
    known("domain_attr->data_progress", wanted.data_progress, FI_PROGRESS_CONTROL_UNIFIED)?;
    known("domain_attr->resource_mgmt", wanted.resource_mgmt, FI_RM_ENABLED)?;
    known("domain_attr->av_type", wanted.av_type, FI_AV_TABLE)?;
    at_most("domain_attr->mr_key_size", wanted.mr_key_size, MR_KEY_SIZE)?;
    at_most("domain_attr->cq_data_size", wanted.cq_data_size, CQ_DATA_SIZE)?;
    at_most("domain_attr->cq_cnt", wanted.cq_cnt, OBJECT_COUNT)?;
    at_most("domain_attr->ep_cnt", wanted.ep_cnt, EP_COUNT)?;
    at_most("domain_attr->tx_ctx_cnt", wanted.tx_ctx_cnt, EP_COUNT)?;
    at_most("domain_attr->rx_ctx_cnt", wanted.rx_ctx_cnt, EP_COUNT)?;
    at_most("domain_attr->max_ep_tx_ctx", wanted.max_ep_tx_ctx, MAX_CONTEXTS)?;
    at_most("domain_attr->max_ep_rx_ctx", wanted.max_ep_rx_ctx, MAX_CONTEXTS)?;
    at_most("domain_attr->max_ep_stx_ctx", wanted.max_ep_stx_ctx, EP_COUNT)?;
    at_most("domain_attr->max_ep_srx_ctx", wanted.max_ep_srx_ctx, EP_COUNT)?;
    at_most("domain_attr->cntr_cnt", wanted.cntr_cnt, OBJECT_COUNT)?;
    at_most("domain_attr->mr_iov_limit", wanted.mr_iov_limit, MR_IOV_LIMIT)?;
    at_most("domain_attr->max_err_data", wanted.max_err_data, 0)?;
    at_most("domain_attr->mr_cnt", wanted.mr_cnt, OBJECT_COUNT)?;
    at_most("domain_attr->max_ep_auth_key", hints.max_ep_auth_key, MAX_EP_AUTH_KEY)?;
    at_most("domain_attr->max_group_id", hints.max_group_id as usize, 0)
}

fn domain(
    version: u32,
    caps: u64,
    hints: &fi_domain_attr_2_7,
) -> Result<fi_domain_attr_2_7, Refusal> {
    let wanted = &hints.base;
    check_domain(hints)?;
    let or = |wanted: u32, default: u32| if wanted == 0 { default } else { wanted };
    Ok(fi_domain_attr_2_7 {
        base: fi_domain_attr {
            domain: null_mut(),
            name: null_mut(),
            threading: or(wanted.threading, FI_THREAD_SAFE),
            control_progress: or(wanted.control_progress, FI_PROGRESS_MANUAL),
            data_progress: or(wanted.data_progress, FI_PROGRESS_MANUAL),
            resource_mgmt: or(wanted.resource_mgmt, FI_RM_ENABLED),
            av_type: wanted.av_type,
            mr_mode: mr_mode(version, caps, wanted.mr_mode)?,
            mr_key_size: MR_KEY_SIZE,
            cq_data_size: CQ_DATA_SIZE,
            cq_cnt: OBJECT_COUNT,
            ep_cnt: EP_COUNT,
            tx_ctx_cnt: EP_COUNT,
            rx_ctx_cnt: EP_COUNT,
            max_ep_tx_ctx: MAX_CONTEXTS,
            max_ep_rx_ctx: MAX_CONTEXTS,
            max_ep_stx_ctx: EP_COUNT,
            max_ep_srx_ctx: EP_COUNT,
            cntr_cnt: OBJECT_COUNT,
            mr_iov_limit: MR_IOV_LIMIT,
            caps: caps & DOMAIN_CAPS,
            mode: 0,
            auth_key: null_mut(),
            auth_key_size: wanted.auth_key_size,
            max_err_data: 0,
            mr_cnt: OBJECT_COUNT,
            tclass: wanted.tclass,
        },
        max_ep_auth_key: MAX_EP_AUTH_KEY,
        max_group_id: 0,
        max_cntr_value: u64::MAX,
        max_err_cntr_value: u64::MAX,
        max_xpu_ctx_cnt: 0,
    })
}

/// Whether the authorization keys are to be in the address vectors.
fn has_keys_in_vectors(version: u32, hints: &Hints) -> bool {
    version >= fi_version(1, 20) && hints.domain.base.auth_key_size == FI_AV_AUTH_KEY
}

fn endpoint_auth_key(version: u32, hints: &Hints) -> Result<Vec<u8>, Refusal> {
    let size = hints.ep.auth_key_size;
    if has_keys_in_vectors(version, hints) && size > 0 {
        return Err(Refusal::new("ep_attr->auth_key_size", size, "0, with FI_AV_AUTH_KEY"));
    }
    at_most("ep_attr->auth_key_size", size, SECRET_MAX)?;
    auth_key("ep_attr->auth_key", size, hints.ep_auth_key.as_deref())
}

fn domain_auth_key(version: u32, hints: &Hints) -> Result<Vec<u8>, Refusal> {
    let (attribute, size) = ("domain_attr->auth_key", hints.domain.base.auth_key_size);
    if has_keys_in_vectors(version, hints) {
        return match hints.domain_auth_key {
            None => Ok(Vec::new()),
            Some(_) => Err(Refusal::new(attribute, "a key", "a null pointer, with FI_AV_AUTH_KEY")),
        };
    }
    at_most("domain_attr->auth_key_size", size, SECRET_MAX)?;
    auth_key(attribute, size, hints.domain_auth_key.as_deref())
}

/// The key to offer, which is the wanted one: empty, or `size` bytes.
fn auth_key(
    attribute: &'static str,
    size: usize,
    wanted: Option<&[u8]>,
) -> Result<Vec<u8>, Refusal> {
    match wanted {
        Some(key) => Ok(key.to_vec()),
        None if size == 0 => Ok(Vec::new()),
        None => Err(Refusal::new(attribute, "a null pointer", "a pointer to auth_key_size bytes")),
    }
}

/// Fails for an enumerator above `last`, the last known one; all others are supported.
fn known(attribute: &'static str, wanted: u32, last: u32) -> Result<(), Refusal> {
    if wanted > last {
        return Err(Refusal::new(attribute, wanted, format_args!("0 to {last}")));
    }
    Ok(())
}

/// Registration needs nothing from the application, so every set of mode bits is answered with none, but for FI_MR_HMEM:
/// an application that marks device memory by its region saves a look-up of each buffer. The
/// two values of before 1.5 stand alone and are returned unchanged (fi_domain(3), mr_mode). Before 1.5 no
/// other value exists, and 0 asks for either.
fn mr_mode(version: u32, caps: u64, wanted: i32) -> Result<i32, Refusal> {
    let old = version < fi_version(1, 5);
    match wanted {
        FI_MR_UNSPEC if old => Ok(FI_MR_SCALABLE),
        FI_MR_BASIC | FI_MR_SCALABLE => Ok(wanted),
        _ if old || wanted & (FI_MR_BASIC | FI_MR_SCALABLE) != 0 => Err(Refusal::new(
            "domain_attr->mr_mode",
            names::MR_MODE.text(u64::from(wanted as u32)),
            "FI_MR_BASIC or FI_MR_SCALABLE, alone",
        )),
        _ if caps & FI_HMEM != 0 => Ok(wanted & FI_MR_HMEM),
        _ => Ok(0),
    }
}
