//! C names of bits and enumerators, for the log.

use libfabric_sys::*;

/// The names of the bits of one kind of 64-bit set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bits(&'static [(u64, &'static str)]);

macro_rules! bits {
    ($($name:ident),* $(,)?) => { Bits(&[$(($name as u64, stringify!($name))),*]) };
}

impl Bits {
    /// The set as text, such as `FI_MSG|FI_SEND|0x8000`, or `0`.
    pub(super) fn text(self, set: u64) -> String {
        let mut rest = set;
        let mut parts = Vec::new();
        for (bit, name) in self.0 {
            if rest & bit != 0 {
                rest &= !bit;
                parts.push((*name).to_owned());
            }
        }
        if rest != 0 || parts.is_empty() {
            parts.push(if rest == 0 { "0".to_owned() } else { format!("{rest:#x}") });
        }
        parts.join("|")
    }
}

/// Capabilities.
pub(super) const CAPS: Bits = bits![
    FI_MSG,
    FI_RMA,
    FI_TAGGED,
    FI_ATOMIC,
    FI_MULTICAST,
    FI_COLLECTIVE,
    FI_READ,
    FI_WRITE,
    FI_RECV,
    FI_SEND,
    FI_REMOTE_READ,
    FI_REMOTE_WRITE,
    FI_MULTI_RECV,
    FI_TRIGGER,
    FI_FENCE,
    FI_AV_USER_ID,
    FI_PEER,
    FI_XPU,
    FI_TAGGED_DIRECTED_RECV,
    FI_TAGGED_MULTI_RECV,
    FI_HMEM,
    FI_EXACT_DIRECTED_RECV,
    FI_RMA_PMEM,
    FI_SOURCE_ERR,
    FI_LOCAL_COMM,
    FI_REMOTE_COMM,
    FI_SHARED_AV,
    FI_RMA_EVENT,
    FI_SOURCE,
    FI_NAMED_RX_CTX,
    FI_DIRECTED_RECV,
];

/// Default operation flags.
pub(super) const OP_FLAGS: Bits = bits![
    FI_MULTICAST,
    FI_MULTI_RECV,
    FI_COMPLETION,
    FI_INJECT,
    FI_INJECT_COMPLETE,
    FI_TRANSMIT_COMPLETE,
    FI_DELIVERY_COMPLETE,
    FI_COMMIT_COMPLETE,
    FI_MATCH_COMPLETE,
    FI_FENCE,
    FI_MORE,
    FI_TRIGGER,
];

/// Message and completion orders.
pub(super) const ORDER: Bits = bits![
    FI_ORDER_RAR,
    FI_ORDER_RAW,
    FI_ORDER_RAS,
    FI_ORDER_WAR,
    FI_ORDER_WAW,
    FI_ORDER_WAS,
    FI_ORDER_SAR,
    FI_ORDER_SAW,
    FI_ORDER_SAS,
    FI_ORDER_DATA,
    FI_ORDER_RMA_RAR,
    FI_ORDER_RMA_RAW,
    FI_ORDER_RMA_WAR,
    FI_ORDER_RMA_WAW,
    FI_ORDER_ATOMIC_RAR,
    FI_ORDER_ATOMIC_RAW,
    FI_ORDER_ATOMIC_WAR,
    FI_ORDER_ATOMIC_WAW,
];

/// Memory registration modes.
pub(super) const MR_MODE: Bits = bits![
    FI_MR_BASIC,
    FI_MR_SCALABLE,
    FI_MR_LOCAL,
    FI_MR_RAW,
    FI_MR_VIRT_ADDR,
    FI_MR_ALLOCATED,
    FI_MR_PROV_KEY,
    FI_MR_MMU_NOTIFY,
    FI_MR_RMA_EVENT,
    FI_MR_ENDPOINT,
    FI_MR_HMEM,
    FI_MR_COLLECTIVE,
];

/// An endpoint type.
pub(super) fn ep_type(value: fi_ep_type) -> String {
    match value {
        FI_EP_MSG => "FI_EP_MSG".to_owned(),
        FI_EP_DGRAM => "FI_EP_DGRAM".to_owned(),
        FI_EP_RDM => "FI_EP_RDM".to_owned(),
        FI_EP_SOCK_STREAM => "FI_EP_SOCK_STREAM".to_owned(),
        FI_EP_SOCK_DGRAM => "FI_EP_SOCK_DGRAM".to_owned(),
        other => other.to_string(),
    }
}
