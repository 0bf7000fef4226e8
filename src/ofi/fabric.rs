//! What the objects of a fabric know of it. What opens them is above them (`ops::fabric`).

use crate::sys::process::Home;

/// What the children of a fabric share.
#[derive(Debug)]
pub(crate) struct Fabric {
    /// Where the core keeps the API version that the application asked for.
    pub(super) api_version: u32,
    pub(crate) home: Home,
}

impl Fabric {
    /// API version that the application was built for.
    pub(crate) fn api_version(&self) -> u32 {
        self.api_version
    }
}
