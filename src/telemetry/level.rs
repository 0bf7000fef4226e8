//! The levels of lines.

use std::fmt;

/// How much a line matters, the most severe first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Level {
    /// The provider does not do what it is for.
    Error,
    /// A condition that the user must know about.
    Warn,
    /// A decision of the provider, and its reason.
    Info,
    /// What helps to find a mistake of the provider, or of a peer.
    Debug,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warn => "warning",
            Self::Info => "info",
            Self::Debug => "debug",
        })
    }
}
