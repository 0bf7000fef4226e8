//! The variable of the rv module.

use crate::config::variable::{Group, Kind, Reader, Variable, set};

/// Whether the kernel's rv module carries long messages (FI_UDRV_RV).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum RvPolicy {
    /// It is used if it works.
    #[default]
    Auto,
    Off,
    /// An endpoint is opened only if it works.
    Require,
}

impl Group for RvPolicy {
    const VARIABLES: &'static [Variable] = &[Variable {
        name: "RV",
        kind: Kind::Text,
        help: "The kernel's rv module (/dev/rv) for long messages to peers that have it: auto (where it works), off, or require (without it there is no endpoint) (default: auto)",
    }];

    fn read(&mut self, from: &Reader<'_>) {
        let policies = [
            ("auto", Self::Auto),
            ("1", Self::Auto),
            ("off", Self::Off),
            ("0", Self::Off),
            ("require", Self::Require),
        ];
        set(self, from.choice("RV", "auto, off or require", &policies));
    }
}
