//! The roles of an endpoint's handles, and its transmit and receive contexts.

use crate::ofi::info::MAX_CONTEXTS;
use crate::ofi::lock::Locked;
use crate::telemetry::log;
use libfabric_sys::{
    FI_CLASS_CQ, FI_CLASS_EP, FI_CLASS_RX_CTX, FI_CLASS_SEP, FI_CLASS_TX_CTX, FI_EINVAL, FI_RECV,
    FI_SHARED_CONTEXT, FI_TRANSMIT,
};

/// The role of a handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ofi) enum Role {
    Endpoint,
    /// A scalable endpoint, whose contexts transfer the data.
    Scalable,
    /// A transmit context of a scalable endpoint.
    Transmit,
    /// A receive context of a scalable endpoint.
    Receive,
}

impl Role {
    /// Of the flags of a binding, those that are for this role: Chapel binds the queue of a transmit context for receives
    /// too, which other providers ignore.
    pub(super) fn own_flags(self, class: usize, flags: u64) -> u64 {
        match self {
            Self::Transmit if class == FI_CLASS_CQ => flags & !FI_RECV,
            Self::Receive if class == FI_CLASS_CQ => flags & !FI_TRANSMIT,
            _ => flags,
        }
    }

    pub(super) fn class(self) -> usize {
        match self {
            Self::Endpoint => FI_CLASS_EP,
            Self::Scalable => FI_CLASS_SEP,
            Self::Transmit => FI_CLASS_TX_CTX,
            Self::Receive => FI_CLASS_RX_CTX,
        }
    }
}

/// A set of contexts, one bit for each number.
#[derive(Debug, Default)]
pub(super) struct Marks {
    transmit: u64,
    receive: u64,
}

impl Marks {
    pub(super) fn of(&mut self, role: Role) -> &mut u64 {
        if role == Role::Transmit { &mut self.transmit } else { &mut self.receive }
    }
}

/// The contexts of an endpoint.
#[derive(Debug)]
pub(super) struct Contexts {
    transmit: u8,
    receive: u8,
    pub(super) open: Locked<Marks>,
    pub(super) enabled: Locked<Marks>,
    /// fi_enable was called for the scalable endpoint itself.
    pub(super) begun: Locked<bool>,
}

impl Contexts {
    fn new(transmit: u8, receive: u8) -> Self {
        Self {
            transmit,
            receive,
            open: Locked::new(Marks::default()),
            enabled: Locked::new(Marks::default()),
            begun: Locked::new(false),
        }
    }

    /// The contexts for `fi_endpoint`. Errors: EINVAL for more than one of a kind.
    pub(super) fn ordinary(counts: (usize, usize)) -> Result<Self, i32> {
        let single = |count: usize| count <= 1 || count == FI_SHARED_CONTEXT;
        if !single(counts.0) || !single(counts.1) {
            log::warn(format_args!(
                "fi_endpoint refused: {} transmit and {} receive contexts are for fi_scalable_ep",
                counts.0, counts.1
            ));
            return Err(FI_EINVAL);
        }
        Ok(Self::new(1, 1))
    }

    /// The contexts for `fi_scalable_ep`. Errors: EINVAL for too many, and for shared ones.
    pub(super) fn scalable(counts: (usize, usize)) -> Result<Self, i32> {
        let number = |name: &str, count: usize| {
            u8::try_from(count.max(1)).ok().filter(|n| usize::from(*n) <= MAX_CONTEXTS).ok_or_else(
                || {
                    log::warn(format_args!(
                        "fi_scalable_ep refused: {name} {count}, offered 1 to {MAX_CONTEXTS}"
                    ));
                    FI_EINVAL
                },
            )
        };
        Ok(Self::new(
            number("ep_attr->tx_ctx_cnt", counts.0)?,
            number("ep_attr->rx_ctx_cnt", counts.1)?,
        ))
    }

    /// One more than the highest number of a context.
    #[inline]
    pub(super) fn count(&self) -> u8 {
        self.transmit.max(self.receive)
    }

    pub(super) fn transmit(&self) -> u8 {
        self.transmit
    }

    pub(super) fn receive(&self) -> u8 {
        self.receive
    }
}
