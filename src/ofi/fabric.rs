//! The part of a fabric that its objects use. The calls that open these are in `ops::fabric`.

use super::table::Slack;
use crate::sys::process::Home;
use libfabric_sys::fid_fabric;
use std::sync::Arc;

/// The object that an application knows as a `fid_fabric`.
#[repr(C)]
pub(super) struct FabricFid {
    pub(super) fid: fid_fabric,
    pub(super) slack: Slack,
    pub(super) shared: Arc<Fabric>,
}

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
