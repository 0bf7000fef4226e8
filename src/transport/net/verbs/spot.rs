//! The port that an endpoint uses, which its datagrams and its bulk path share.

use super::introduction::Place;
use crate::sys::rv::Here;
use crate::sys::verbs::{Gid, Marks, OpenDevice, Partition, Port};
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
    /// The address of the UD queue pair; its number is 0 if the device has none.
    pub(super) place: Place,
}

impl At {
    pub(super) fn is(&self, here: &Here) -> bool {
        (self.device.name(), self.port.number, self.place.gid)
            == (&here.device, here.port, here.gid)
    }

    /// Whether the port still has the same state and address. Error: what changed.
    pub(super) fn fits(&self) -> Result<(), String> {
        let Self { device, place, .. } = self;
        let number = self.port.number;
        let port = device.port(number).map_err(|errno| format!("its port: {errno}"))?;
        if !port.active {
            return Err("its port is down".to_owned());
        }
        if port.mtu < usize::from(place.mtu) {
            return Err(format!("its port carries {} bytes only", port.mtu));
        }
        if let Network::InfiniBand { pkey, .. } = place.network {
            if port.lid != place.lid {
                return Err(format!("its LID is {:#x} now", port.lid));
            }
            let same = Partition { index: self.pkey_index, key: pkey };
            if !device.partitions(&port).contains(&same) {
                return Err(format!("its partition {} is another one", same.index));
            }
        }
        let gids = device.gids(number).map_err(|errno| format!("its GIDs: {errno}"))?;
        let same = |gid: &Gid| gid.index == self.gid_index && gid.raw == place.gid;
        if !gids.iter().any(same) {
            return Err(format!("GID {} is another one", self.gid_index));
        }
        Ok(())
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
