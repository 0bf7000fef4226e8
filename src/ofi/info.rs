//! `fi_getinfo`: what udrv offers, matched with the application's hints.
//!
//! The C arguments become one Rust value ([`hints`]). Two safe files decide: [`attributes`] about everything but
//! addresses, [`place`] about addresses. Two write the answer in memory that libfabric frees ([`reply`], and [`nic`]
//! for the device). A refused hint is named in one line of the log, with the wanted and the offered value.

mod attributes;
mod hints;
mod limits;
mod names;
mod nic;
mod parts;
mod place;
mod refusal;
mod reply;
#[cfg(test)]
mod tests;

use crate::config::Config;
use crate::sys::net::Nic;
use crate::telemetry::log;
use crate::transport::{job_key, router};
use hints::{Hints, NamedDevice};
use libfabric_sys::{
    FI_EINVAL, FI_ENOMEM, FI_PROV_ATTR_ONLY, FI_REMOTE_COMM, fi_info, fi_rx_attr, fi_tx_attr,
};
pub(crate) use limits::*;
use place::Place;
use refusal::{Refusal, Request};
use reply::Offer;
use std::ffi::{c_char, c_int};

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
            if refusal.by_system || refusal.by_user {
                log::limited!(cause: refusal.by_user, "fi_getinfo: no match: {refusal}");
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

/// What `call` asks for after fi_getinfo: more than that offers is refused in the same words. Errors: EINVAL.
fn offered(call: &str, met: Result<(), Refusal>) -> Result<(), i32> {
    met.map_err(|refusal| {
        log::warn(format_args!("{call} refused: {refusal}"));
        FI_EINVAL
    })
}

/// Errors: EINVAL for attributes of a transmit context that are not offered.
pub(crate) fn offers_transmit(call: &str, attr: &fi_tx_attr, config: &Config) -> Result<(), i32> {
    offered(call, attributes::check_transmit(attr, config))
}

/// Errors: EINVAL for attributes of a receive context that are not offered.
pub(crate) fn offers_receive(call: &str, attr: &fi_rx_attr, config: &Config) -> Result<(), i32> {
    offered(call, attributes::check_receive(attr, config))
}

/// Errors: EINVAL for default flags that are not offered, of a transmit context (`transmits`) or a receive context.
pub(crate) fn offers_flags(call: &str, transmits: bool, flags: u64) -> Result<(), i32> {
    offered(call, attributes::check_flags(transmits, flags))
}

fn answer(request: &Request<'_>, hints: &Hints, config: &Config) -> Result<Offer, Refusal> {
    if request.flags & FI_PROV_ATTR_ONLY != 0 {
        // The caller asks which providers exist, usable or not: default values (fi_getinfo(3)).
        let attributes = attributes::negotiate(request.version, &Hints::none(), config)?;
        return Ok(Offer { attributes, place: None, nic: None });
    }
    let attributes = attributes::negotiate(request.version, hints, config)?;
    job_key::of_environment(config.endpoint.job_key.as_ref()).map_err(|bad| {
        Refusal::new("job key", format_args!("{} {}", bad.source, bad.fault), bad.wanted())
    })?;
    // A domain named like a transport's device uses that device.
    let named = match &hints.domain_name {
        Some(name) => on_device(config, hints, name)?,
        None => None,
    };
    let (config, hints) = named.as_ref().map_or((config, hints), |(config, hints)| (config, hints));
    let place = place::find(request, hints, config)?;
    place::probe(&place, config)?;
    place.explain();
    if attributes.caps & FI_REMOTE_COMM != 0 && !config.net.on {
        log::info(format_args!(
            "FI_REMOTE_COMM is granted because it was asked for, but only peers of this node are reached: FI_UDRV_NET=0"
        ));
    }
    let device = device_at(&place, hints, config)?;
    let nic = device.or_else(|| nic::behind(&place.interface));
    Ok(Offer { attributes, place: Some(place), nic })
}

/// Configuration and hints of a domain that has the name of a transport's device; `None`: no device has this name.
fn on_device(
    config: &Config,
    hints: &Hints,
    name: &str,
) -> Result<Option<(Config, Hints)>, Refusal> {
    let Some(config) = router::with_device(config, name) else { return Ok(None) };
    let config = config.map_err(|offered| Refusal::new("domain_attr->name", name, offered))?;
    let device = NamedDevice { name: name.to_owned(), ips: router::addresses_of(name) };
    Ok(Some((config, Hints { device: Some(device), ..hints.clone() })))
}

/// The device that an endpoint at `place` would use beside its interface.
fn device_at(place: &Place, hints: &Hints, config: &Config) -> Result<Option<Nic>, Refusal> {
    router::device_at(config, place.source.0.ip()).map_err(|variable| {
        let none = "no RDMA device that works for this address";
        match &hints.device {
            Some(device) => Refusal::new("domain_attr->name", &device.name, none),
            None => Refusal::new(variable, "require", none),
        }
    })
}
