//! The arguments of `fi_getinfo`, and the reasons why a call gets no answer.

use crate::sys::Errno;
use libfabric_sys::{FI_EINVAL, FI_ENODATA};
use std::fmt;

/// The arguments of one call beside the hints.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) version: u32,
    pub(super) node: Option<&'a str>,
    pub(super) service: Option<&'a str>,
    pub(super) flags: u64,
}

/// Why there is no match: the line for the log, and the result of `fi_getinfo`.
#[derive(Debug)]
pub(super) struct Refusal {
    /// The attribute, as C programs spell it.
    pub(super) attribute: &'static str,
    pub(super) wanted: String,
    pub(super) offered: String,
    /// `offered` are the bits of `wanted` that are not offered.
    pub(super) lacks: bool,
    /// Positive `FI_E*`.
    pub(super) error: i32,
    /// The system refused a resource that any endpoint needs: this is logged as a warning.
    pub(super) by_system: bool,
    /// A variable of the user excludes any endpoint: this is logged as a warning too.
    pub(super) by_user: bool,
}

impl Refusal {
    /// No match: FI_ENODATA.
    pub(super) fn new(
        attribute: &'static str,
        wanted: impl fmt::Display,
        offered: impl fmt::Display,
    ) -> Self {
        Self {
            attribute,
            wanted: wanted.to_string(),
            offered: offered.to_string(),
            lacks: false,
            error: FI_ENODATA,
            by_system: false,
            by_user: false,
        }
    }

    /// Not all wanted bits are offered.
    pub(super) fn of_bits(attribute: &'static str, wanted: String, missing: String) -> Self {
        Self { lacks: true, ..Self::new(attribute, wanted, missing) }
    }

    /// A variable of the user is the cause, whatever an application asks for.
    pub(super) fn by_user(self) -> Self {
        Self { by_user: true, ..self }
    }

    /// The system refuses a resource that an endpoint needs: FI_ENODATA.
    pub(super) fn by_system(
        attribute: &'static str,
        wanted: impl fmt::Display,
        errno: Errno,
    ) -> Self {
        let offered = format_args!("no endpoint: {errno}").to_string();
        Self { by_system: true, ..Self::new(attribute, wanted, offered) }
    }

    /// A call that fi_getinfo(3) does not allow: FI_EINVAL.
    pub(super) fn invalid(
        attribute: &'static str,
        wanted: impl fmt::Display,
        offered: impl fmt::Display,
    ) -> Self {
        Self { error: FI_EINVAL, ..Self::new(attribute, wanted, offered) }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { attribute, wanted, offered, .. } = self;
        let not = if self.lacks { "not " } else { "" };
        write!(f, "{attribute}: wanted {wanted}, {not}offered {offered}")
    }
}
