//! The roles of an endpoint's handles, and its transmit and receive contexts.

use crate::ofi::info::MAX_CONTEXTS;
use crate::ofi::lock::Locked;
use crate::telemetry::log;
use libfabric_sys::{
    FI_CLASS_CQ, FI_CLASS_EP, FI_CLASS_RX_CTX, FI_CLASS_SEP, FI_CLASS_TX_CTX, FI_EINVAL, FI_RECV,
    FI_TRANSMIT,
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
    transmit: [u64; 4],
    receive: [u64; 4],
}

const _: () = assert!(MAX_CONTEXTS <= 4 * 64 && MAX_CONTEXTS <= u8::MAX as usize);

impl Marks {
    fn of(&mut self, role: Role, number: u8) -> (&mut u64, u64) {
        let of = if role == Role::Transmit { &mut self.transmit } else { &mut self.receive };
        let [a, b, c, d] = of;
        let word = match number / 64 {
            0 => a,
            1 => b,
            2 => c,
            _ => d,
        };
        (word, 1 << (number % 64))
    }

    pub(super) fn has(&mut self, role: Role, number: u8) -> bool {
        let (word, bit) = self.of(role, number);
        *word & bit != 0
    }

    pub(super) fn has_any(&self) -> bool {
        self.transmit.iter().chain(&self.receive).any(|word| *word != 0)
    }

    pub(super) fn set(&mut self, role: Role, number: u8, on: bool) {
        let (word, bit) = self.of(role, number);
        if on { *word |= bit } else { *word &= !bit }
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

    /// The contexts for `fi_endpoint`: one of each kind. Chapel makes ordinary and scalable endpoints from one info, whose
    /// counts are those of the scalable ones.
    pub(super) fn ordinary() -> Self {
        Self::new(1, 1)
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
