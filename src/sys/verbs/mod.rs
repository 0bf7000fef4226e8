//! RDMA devices: libibverbs, opened at run time if there is a device, and its objects with owners that
//! cannot be misused from safe code.
//!
//! **Fork.** A forked child has the descriptors of its parent's devices, and would destroy the parent's
//! queue pairs with them. So every object remembers its process, and does nothing in another one.
//!
//! `ibv_fork_init` changes the whole process, which belongs to the application, so it is called on kernels before 5.12
//! only (`fork.rs`). MADV_DONTFORK keeps this library's rings from children, on any kernel.

mod context;
mod cq;
mod device;
mod events;
mod fork;
mod lent;
mod library;
mod marks;
mod memory;
mod mr;
mod owned;
mod port;
mod qp;
mod rc;
mod rc_qp;
mod rc_shared;
mod srq;
mod ud;

pub(crate) use device::{Device, DeviceList, OpenDevice};
pub(crate) use events::{About, DeviceEvent};
pub(crate) use fork::{copies_at_fork, fork_hazard};
pub(crate) use library::{has_peer_memory, names, present, shows, sysfs};
pub(crate) use marks::{Marks, flow_label};
pub(crate) use mr::{Permission, Registrar, Registration, prefers_any_order};
pub(crate) use port::{Gid, GidKind, LinkLayer, Partition, Port};
pub(crate) use qp::{Ah, AhSettings};
pub(crate) use rc::{RcEvent, RcPort};
pub(crate) use rc_qp::{RcAddress, RcQp, RcRequest};
pub(crate) use rc_shared::RcSettings;
pub(crate) use ud::{Arrival, IpVersion, UdCounts, UdPort, UdSettings};

#[cfg(test)]
mod tests;
