//! The port that an endpoint uses, which its datagrams and its bulk path share.

use super::introduction::Place;
use crate::sys::rv::Here;
use crate::sys::verbs::{Marks, OpenDevice, Port};
use crate::transport::JobKey;
use crate::transport::net::network::Network;
use std::sync::{Arc, Mutex};

/// A port in use, for further queue pairs on it.
#[derive(Clone, Debug)]
pub(super) struct At {
    pub(super) device: OpenDevice,
    pub(super) port: Port,
    pub(super) gid_index: u8,
    pub(super) pkey_index: u16,
    pub(super) marks: Marks,
    /// The address of the UD queue pair.
    pub(super) place: Place,
}

impl At {
    pub(super) fn is(&self, here: &Here) -> bool {
        (self.device.name(), self.port.number, self.place.gid)
            == (&here.device, here.port, here.gid)
    }

    /// The port, as the rv module names it.
    pub(super) fn here(&self, key: &JobKey) -> Here {
        Here {
            device: self.device.name().to_owned(),
            port: self.port.number,
            gid_index: self.gid_index,
            gid: self.place.gid,
            lid: if self.place.network == Network::Roce { 0 } else { self.place.lid },
            service_level: self.marks.service_level,
            job: key.for_rv(),
        }
    }
}

/// The present port of an endpoint; `None`: its device is gone, or fails.
pub(super) type Spot = Arc<Mutex<Option<At>>>;
