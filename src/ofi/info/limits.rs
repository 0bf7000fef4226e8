//! The offer of this provider: names, capabilities, flags, orders and sizes.

use libfabric_sys::{
    FI_ATOMIC, FI_COLLECTIVE, FI_COMPLETION, FI_DELIVERY_COMPLETE, FI_DIRECTED_RECV, FI_FENCE,
    FI_INJECT, FI_INJECT_COMPLETE, FI_LOCAL_COMM, FI_MSG, FI_MULTI_RECV, FI_NAMED_RX_CTX,
    FI_ORDER_ATOMIC_RAR, FI_ORDER_ATOMIC_RAW, FI_ORDER_ATOMIC_WAR, FI_ORDER_ATOMIC_WAW,
    FI_ORDER_RAR, FI_ORDER_RAW, FI_ORDER_RMA_RAR, FI_ORDER_RMA_RAW, FI_ORDER_RMA_WAW, FI_ORDER_SAS,
    FI_ORDER_WAW, FI_READ, FI_RECV, FI_REMOTE_COMM, FI_REMOTE_READ, FI_REMOTE_WRITE, FI_RMA,
    FI_RMA_EVENT, FI_SEND, FI_SHARED_AV, FI_SOURCE, FI_TAGGED, FI_TRANSMIT_COMPLETE, FI_TRIGGER,
    FI_WRITE,
};

/// Name of the one fabric.
pub(crate) const FABRIC_NAME: &str = "udrv";
/// `fi_ep_attr.protocol`: "udrv" in ASCII, used by this provider only. Without the bit FI_PROV_SPECIFIC, as in
/// all other providers' protocols: with it the number is negative in an `int`, and Mercury refuses it.
pub(crate) const PROTOCOL: u32 = 0x7564_7276;
const _: () = assert!(PROTOCOL <= i32::MAX as u32);
/// `fi_ep_attr.protocol_version`.
pub(crate) const PROTOCOL_VERSION: u32 = 1;

/// All capabilities. An application that asks for none gets all of them. Without a network (FI_UDRV_NET=0),
/// FI_REMOTE_COMM is granted on request, because Open MPI insists on it, and is not offered otherwise.
pub(crate) const CAPS: u64 = TX_CAPS | RX_CAPS | DOMAIN_CAPS;
/// The bits of [`CAPS`] that a transmit context has (fi_endpoint(3), fi_tx_attr).
pub(crate) const TX_CAPS: u64 = FI_MSG
    | FI_TAGGED
    | FI_RMA
    | FI_ATOMIC
    | FI_COLLECTIVE
    | FI_SEND
    | FI_READ
    | FI_WRITE
    | FI_FENCE
    | FI_NAMED_RX_CTX
    | FI_TRIGGER;
/// The bits of [`CAPS`] that a receive context has (fi_endpoint(3), fi_rx_attr).
pub(crate) const RX_CAPS: u64 = FI_MSG
    | FI_TAGGED
    | FI_RMA
    | FI_ATOMIC
    | FI_COLLECTIVE
    | FI_RECV
    | FI_REMOTE_READ
    | FI_REMOTE_WRITE
    | FI_MULTI_RECV
    | FI_DIRECTED_RECV
    | FI_SOURCE
    | FI_RMA_EVENT
    | FI_TRIGGER;
/// Capabilities of a domain: the only ones that fi_domain(3) allows.
pub(crate) const DOMAIN_CAPS: u64 = FI_LOCAL_COMM | FI_REMOTE_COMM | FI_SHARED_AV;

/// Default operation flags that a transmit context may have.
pub(crate) const TX_OP_FLAGS: u64 = FI_INJECT
    | FI_COMPLETION
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_TRIGGER;
/// Default operation flags that a receive context may have.
pub(crate) const RX_OP_FLAGS: u64 = FI_MULTI_RECV | FI_COMPLETION | FI_TRIGGER;
/// Message orders that are kept: all orders among messages, and all orders of one-sided operations except
/// writes after reads.
pub(crate) const MSG_ORDER: u64 = FI_ORDER_SAS
    | FI_ORDER_RAR
    | FI_ORDER_RAW
    | FI_ORDER_WAW
    | FI_ORDER_RMA_RAR
    | FI_ORDER_RMA_RAW
    | FI_ORDER_RMA_WAW
    | FI_ORDER_ATOMIC_RAR
    | FI_ORDER_ATOMIC_RAW
    | FI_ORDER_ATOMIC_WAR
    | FI_ORDER_ATOMIC_WAW;

/// Most transmit and most receive contexts of an endpoint: their numbers and their count have 8 bits.
pub(crate) const MAX_CONTEXTS: usize = 255;
/// Authorization keys of an endpoint: all of its peers have the same one.
pub(crate) const MAX_EP_AUTH_KEY: usize = 1;
/// Longest message of `fi_inject`, bytes. MPICH and Intel MPI wait for the delivery completion of a longer message.
pub(crate) const INJECT_SIZE: usize = 16 * 1024;
/// Longest write that is faster injected than written from its buffer, bytes: copying a longer one costs more than
/// reporting its completion.
pub(crate) const INJECT_RMA_SIZE: usize = 4096;
/// Elements of a scatter-gather list.
pub(crate) const IOV_LIMIT: usize = 4;
/// Elements of a remote scatter-gather list.
pub(crate) const RMA_IOV_LIMIT: usize = crate::protocol::MAX_RANGES;
/// Parts of a memory region.
pub(crate) const MR_IOV_LIMIT: usize = crate::memory::MAX_SEGMENTS;
/// Size of a transmit or receive context when none is asked for, operations.
pub(crate) const CONTEXT_SIZE: usize = 1024;
/// Bytes of remote CQ data.
pub(crate) const CQ_DATA_SIZE: usize = 8;
/// Bytes of a memory registration key.
pub(crate) const MR_KEY_SIZE: usize = 8;
/// Endpoints of a domain: each takes one of the 65535 ports of the node.
pub(crate) const EP_COUNT: usize = 65535;
/// Objects of each other kind that a domain is expected to handle well.
pub(crate) const OBJECT_COUNT: usize = 65536;
