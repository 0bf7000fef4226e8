//! The part of a fabric that its objects use. The calls that open these are in `ops::fabric`.

use crate::sys::process::Home;

/// The part of a fabric that its children share.
#[derive(Debug)]
pub(crate) struct Fabric {
    /// The API version that the application asked for, as the core passed it on.
    pub(super) api_version: u32,
    pub(crate) home: Home,
}

impl Fabric {
    /// API version that the application was built for.
    pub(crate) fn api_version(&self) -> u32 {
        self.api_version
    }
}
