//! `fi_getinfo`: what udrv offers, checked against what the application wants.
//!
//! The C arguments become one Rust value ([`hints`]), two safe files decide ([`attributes`] about
//! everything but addresses, [`place`] about addresses), and two write the answer in memory that
//! libfabric frees ([`reply`], and [`nic`] for the device). What does not match is named in one line of the log with the wanted
//! and the offered value.

mod attributes;
mod hints;
mod names;
mod nic;
mod place;
mod reply;
#[cfg(test)]
mod tests;

use crate::config::{Config, NicName};
use crate::sys::Errno;
use crate::sys::net::Nic;
use crate::telemetry::log;
use crate::transport::net::verbs::{NamedDevice, RdmaSettings};
use crate::transport::net::{job_key, verbs};
use attributes::Attributes;
use hints::Hints;
use libfabric_sys::{
    FI_ATOMIC, FI_COLLECTIVE, FI_COMPLETION, FI_DELIVERY_COMPLETE, FI_DIRECTED_RECV, FI_EINVAL,
    FI_ENODATA, FI_ENOMEM, FI_FENCE, FI_INJECT, FI_INJECT_COMPLETE, FI_LOCAL_COMM, FI_MSG,
    FI_MULTI_RECV, FI_NAMED_RX_CTX, FI_ORDER_ATOMIC_RAR, FI_ORDER_ATOMIC_RAW, FI_ORDER_ATOMIC_WAR,
    FI_ORDER_ATOMIC_WAW, FI_ORDER_RAR, FI_ORDER_RAW, FI_ORDER_RMA_RAR, FI_ORDER_RMA_RAW,
    FI_ORDER_RMA_WAW, FI_ORDER_SAS, FI_ORDER_WAW, FI_PROV_ATTR_ONLY, FI_READ, FI_RECV,
    FI_REMOTE_COMM, FI_REMOTE_READ, FI_REMOTE_WRITE, FI_RMA, FI_RMA_EVENT, FI_SEND, FI_SHARED_AV,
    FI_SOURCE, FI_TAGGED, FI_TRANSMIT_COMPLETE, FI_TRIGGER, FI_WRITE, fi_info,
};
use place::Place;
use std::ffi::{c_char, c_int};
use std::fmt;

/// Name of the one fabric.
pub(crate) const FABRIC_NAME: &str = "udrv";
/// `fi_ep_attr.protocol`: ours alone, "udrv" in ASCII. Without the bit of FI_PROV_SPECIFIC, as the protocols
/// of all other providers: with it the number is negative in an `int`, and Mercury refuses it.
pub(crate) const PROTOCOL: u32 = 0x7564_7276;
const _: () = assert!(PROTOCOL <= i32::MAX as u32);
/// `fi_ep_attr.protocol_version`.
pub(crate) const PROTOCOL_VERSION: u32 = 1;

/// All capabilities, which an application gets that names none. Without a network (FI_UDRV_NET=0)
/// FI_REMOTE_COMM is granted to those who ask, and not offered to others: Open MPI insists on it.
pub(crate) const CAPS: u64 = TX_CAPS | RX_CAPS | DOMAIN_CAPS;
/// Those of [`CAPS`] that a transmit context has (fi_endpoint(3), fi_tx_attr).
pub(crate) const TX_CAPS: u64 = FI_MSG
    | FI_TAGGED
    | FI_RMA
    | FI_ATOMIC
    | FI_COLLECTIVE
    | FI_SEND
    | FI_READ
    | FI_WRITE
    | FI_FENCE
    | FI_NAMED_RX_CTX
    | FI_TRIGGER;
/// Those of [`CAPS`] that a receive context has (fi_endpoint(3), fi_rx_attr).
pub(crate) const RX_CAPS: u64 = FI_MSG
    | FI_TAGGED
    | FI_RMA
    | FI_ATOMIC
    | FI_COLLECTIVE
    | FI_RECV
    | FI_REMOTE_READ
    | FI_REMOTE_WRITE
    | FI_MULTI_RECV
    | FI_DIRECTED_RECV
    | FI_SOURCE
    | FI_RMA_EVENT
    | FI_TRIGGER;
/// Capabilities of a domain, of which fi_domain(3) knows only these.
pub(crate) const DOMAIN_CAPS: u64 = FI_LOCAL_COMM | FI_REMOTE_COMM | FI_SHARED_AV;

/// Default operation flags that a transmit context may have.
pub(crate) const TX_OP_FLAGS: u64 = FI_INJECT
    | FI_COMPLETION
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_TRIGGER;
/// Default operation flags that a receive context may have.
pub(crate) const RX_OP_FLAGS: u64 = FI_MULTI_RECV | FI_COMPLETION | FI_TRIGGER;
/// Message orders that are kept: messages among themselves, and of one-sided operations all but
/// writes after reads.
pub(crate) const MSG_ORDER: u64 = FI_ORDER_SAS
    | FI_ORDER_RAR
    | FI_ORDER_RAW
    | FI_ORDER_WAW
    | FI_ORDER_RMA_RAR
    | FI_ORDER_RMA_RAW
    | FI_ORDER_RMA_WAW
    | FI_ORDER_ATOMIC_RAR
    | FI_ORDER_ATOMIC_RAW
    | FI_ORDER_ATOMIC_WAR
    | FI_ORDER_ATOMIC_WAW;

/// Transmit and receive contexts of an endpoint.
pub(crate) const MAX_CONTEXTS: usize = super::endpoint::MAX_CONTEXTS;
/// Authorization keys of an endpoint: whom it talks to has the same one.
pub(crate) const MAX_EP_AUTH_KEY: usize = 1;
/// Longest message of `fi_inject`, bytes. MPICH and Intel MPI ask for delivery of all that is longer, and wait for that.
pub(crate) const INJECT_SIZE: usize = 16 * 1024;
/// Longest write that is better injected than written from where it is, bytes: to copy what is longer takes more than
/// to tell of its end.
pub(crate) const INJECT_RMA_SIZE: usize = 4096;
/// Elements of a scatter-gather list.
pub(crate) const IOV_LIMIT: usize = 4;
/// Elements of a remote scatter-gather list.
pub(crate) const RMA_IOV_LIMIT: usize = crate::protocol::MAX_RANGES;
/// Parts of a memory region.
pub(crate) const MR_IOV_LIMIT: usize = crate::memory::MAX_SEGMENTS;
/// Size of a transmit or receive context when none is asked for, operations.
pub(crate) const CONTEXT_SIZE: usize = 1024;
/// Bytes of remote CQ data.
pub(crate) const CQ_DATA_SIZE: usize = 8;
/// Bytes of a memory registration key.
pub(crate) const MR_KEY_SIZE: usize = 8;
/// Endpoints of a domain: each has one of the 65535 ports of the node.
pub(crate) const EP_COUNT: usize = 65535;
/// Objects of other kinds that a domain is comfortable with.
pub(crate) const OBJECT_COUNT: usize = 65536;

/// Why there is no match: the one line for the log, and what `fi_getinfo` returns.
#[derive(Debug)]
struct Refusal {
    /// The attribute as C programmers spell it.
    attribute: &'static str,
    wanted: String,
    offered: String,
    /// Positive `FI_E*`.
    error: i32,
    /// The system refused what any endpoint needs: that is a warning, not only a match that failed.
    by_system: bool,
}

impl Refusal {
    /// No match: FI_ENODATA.
    fn new(attribute: &'static str, wanted: impl fmt::Display, offered: impl fmt::Display) -> Self {
        Self {
            attribute,
            wanted: wanted.to_string(),
            offered: offered.to_string(),
            error: FI_ENODATA,
            by_system: false,
        }
    }

    /// The system does not let us have what an endpoint needs: FI_ENODATA.
    fn by_system(attribute: &'static str, wanted: impl fmt::Display, errno: Errno) -> Self {
        let offered = format_args!("no endpoint: {errno}").to_string();
        Self { by_system: true, ..Self::new(attribute, wanted, offered) }
    }

    /// A call that fi_getinfo(3) does not allow: FI_EINVAL.
    fn invalid(
        attribute: &'static str,
        wanted: impl fmt::Display,
        offered: impl fmt::Display,
    ) -> Self {
        Self { error: FI_EINVAL, ..Self::new(attribute, wanted, offered) }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: wanted {}, offered {}", self.attribute, self.wanted, self.offered)
    }
}

/// Everything that one `fi_info` says.
#[derive(Debug)]
struct Offer {
    attributes: Attributes,
    place: Option<Place>,
    /// The device of `place`.
    nic: Option<Nic>,
}

/// The arguments of one call beside the hints.
#[derive(Clone, Copy, Debug)]
struct Request<'a> {
    version: u32,
    node: Option<&'a str>,
    service: Option<&'a str>,
    flags: u64,
}

/// `fi_getinfo` of the provider: one info or none.
/// Returns 0, -FI_ENODATA (no match, the log says why), -FI_EINVAL, -FI_ENOMEM.
///
/// # Safety
/// Arguments as fi_getinfo(3) has them; `hints` points to structures of API version `version`.
pub(crate) unsafe fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const fi_info,
    out: *mut *mut fi_info,
) -> c_int {
    if out.is_null() {
        return -FI_EINVAL;
    }
    // SAFETY: the caller's C strings and structures, valid during this call.
    let (node, service, hints) =
        unsafe { (hints::text(node), hints::text(service), Hints::read(version, hints)) };
    let request = Request { version, node: node.as_deref(), service: service.as_deref(), flags };
    let (rc, info) = match answer(&request, &hints, &Config::from_environment()) {
        Ok(offer) => match reply::write(&offer, &hints) {
            Some(info) => (0, info.as_ptr()),
            None => (-FI_ENOMEM, std::ptr::null_mut()),
        },
        Err(refusal) => {
            if refusal.by_system {
                log::limited!("fi_getinfo: no match: {refusal}");
            } else {
                log::info(format_args!("fi_getinfo: no match: {refusal}"));
            }
            (-refusal.error, std::ptr::null_mut())
        }
    };
    // SAFETY: checked not to be null; the caller wants the list there.
    unsafe { *out = info };
    rc
}

fn answer(request: &Request<'_>, hints: &Hints, config: &Config) -> Result<Offer, Refusal> {
    if request.flags & FI_PROV_ATTR_ONLY != 0 {
        // Asks what providers exist, usable or not: default values (fi_getinfo(3)).
        let attributes = attributes::negotiate(request.version, &Hints::none(), config)?;
        return Ok(Offer { attributes, place: None, nic: None });
    }
    let attributes = attributes::negotiate(request.version, hints, config)?;
    job_key::of_environment(config).map_err(|bad| {
        Refusal::new("job key", format_args!("{} {}", bad.source, bad.fault), bad.wanted())
    })?;
    // A domain that has the name of a device is on that device.
    let device = hints.domain_name.as_deref().and_then(verbs::device_named);
    let named = match device {
        Some(nic) => Some((insist(config, &nic)?, on_device(hints, nic))),
        None => None,
    };
    let (config, hints) = named.as_ref().map_or((config, hints), |(config, hints)| (config, hints));
    let place = place::find(request, hints, config)?;
    place::probe(&place)?;
    place.explain();
    if attributes.caps & FI_REMOTE_COMM != 0 && !config.net {
        log::info(format_args!(
            "FI_REMOTE_COMM is granted because it was asked for, but only peers of this node are reached: FI_UDRV_NET=0"
        ));
    }
    let rdma = if config.net { rdma_device(&place, hints, config)? } else { None };
    let nic = rdma.or_else(|| nic::behind(&place.interface));
    Ok(Offer { attributes, place: Some(place), nic })
}

fn insist(config: &Config, nic: &NicName) -> Result<Config, Refusal> {
    verbs::insisting(config, nic).map_err(|offered| Refusal::new("domain_attr->name", nic, offered))
}

fn on_device(hints: &Hints, nic: NicName) -> Hints {
    Hints { device: Some(NamedDevice::new(nic)), ..hints.clone() }
}

/// The RDMA device that an endpoint at `place` would use beside its interface.
fn rdma_device(place: &Place, hints: &Hints, config: &Config) -> Result<Option<Nic>, Refusal> {
    let settings = RdmaSettings::of(config);
    verbs::offer(&settings, place.source.0.ip()).map_err(|_| {
        let none = "no RDMA device that works for this address";
        match &hints.device {
            Some(device) => Refusal::new("domain_attr->name", &device.nic, none),
            None => Refusal::new("FI_UDRV_RDMA", "require", none),
        }
    })
}
