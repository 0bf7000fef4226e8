//! `struct fid_ep` of type FI_EP_RDM.

pub(super) mod atomic;
mod bind;
mod cm;
pub(super) mod collective;
mod contexts;
pub(super) mod deferred;
mod device;
mod enable;
mod entries;
mod handle;
mod host;
mod kept;
mod msg;
mod none;
mod options;
mod page;
mod progress;
mod rma;
mod shared;
mod state;
mod tagged;
#[cfg(test)]
mod tests;
mod thresholds;
mod transfer;

pub(super) use contexts::Role;
pub(super) use handle::open;
pub(super) use shared::{
    open_receive as open_shared_receive, open_transmit as open_shared_transmit,
};
pub(super) use state::{Endpoint, EndpointFid, endpoint};
