//! The C structures of the answer.

use super::attributes::Attributes;
use super::hints::Hints;
use super::limits::FABRIC_NAME;
use super::nic;
use super::parts::Parts;
use super::place::Place;
use crate::sys::net::{Nic, socket_addr_to_bytes};
use crate::transport::address::Address;
use libfabric_sys::{FI_ADDR_STR, FI_SOCKADDR_IN, fi_fabric_attr, fi_info};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

/// Name of the domain when only the provider was asked for (FI_PROV_ATTR_ONLY).
const NO_INTERFACE: &str = "none";

/// The contents of one `fi_info`.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) attributes: Attributes,
    pub(super) place: Option<Place>,
    /// The device of `place`.
    pub(super) nic: Option<Nic>,
}

/// The C structure, or `None` without memory.
pub(super) fn write(offer: &Offer, hints: &Hints) -> Option<NonNull<fi_info>> {
    let mut parts = Parts::default();
    let info = parts.write(offer, hints)?;
    parts.give();
    Some(info)
}

impl Parts {
    fn write(&mut self, offer: &Offer, hints: &Hints) -> Option<NonNull<fi_info>> {
        let attributes = &offer.attributes;
        let place = offer.place.as_ref();
        let (mut ep, mut domain) = (attributes.ep, attributes.domain);
        ep.base.auth_key = self.auth_key(&attributes.ep_auth_key)?;
        domain.base.auth_key = self.auth_key(&attributes.domain_auth_key)?;
        domain.base.name = self.text(place.map_or(NO_INTERFACE, |p| &p.domain))?;
        let fabric = fi_fabric_attr {
            fabric: null_mut(),
            name: self.text(FABRIC_NAME)?,
            // The core fills in the rest.
            prov_name: null_mut(),
            prov_version: 0,
            api_version: 0,
        };
        let (src_addr, src_addrlen) = self.address(place, place.map(|p| p.source))?;
        let nic = match &offer.nic {
            Some(nic) => nic::write(self, nic)?,
            None => null_mut(),
        };
        let (dest_addr, dest_addrlen) = self.address(place, place.and_then(|p| p.dest))?;
        let info = fi_info {
            next: null_mut(),
            caps: attributes.caps,
            mode: 0,
            addr_format: place.map_or(FI_SOCKADDR_IN, |p| p.format),
            src_addrlen,
            dest_addrlen,
            src_addr,
            dest_addr,
            handle: hints.handle,
            tx_attr: self.structure(attributes.tx)?,
            rx_attr: self.structure(attributes.rx)?,
            ep_attr: self.structure(ep)?.cast(),
            domain_attr: self.structure(domain)?.cast(),
            fabric_attr: self.structure(fabric)?,
            nic,
        };
        NonNull::new(self.structure(info)?)
    }

    /// A copy of the key, or a null pointer for none.
    fn auth_key(&mut self, key: &[u8]) -> Option<*mut u8> {
        if key.is_empty() {
            return Some(null_mut());
        }
        Some(self.bytes(key)?.as_ptr().cast())
    }

    /// An address in the format of the info, or a null pointer for none.
    fn address(
        &mut self,
        place: Option<&Place>,
        address: Option<Address>,
    ) -> Option<(*mut c_void, usize)> {
        let (Some(place), Some(address)) = (place, address) else { return Some((null_mut(), 0)) };
        let bytes: Vec<u8> = if place.format == FI_ADDR_STR {
            address.to_string().bytes().chain([0]).collect()
        } else {
            let (bytes, len) = socket_addr_to_bytes(&address.0);
            bytes.into_iter().take(len).collect()
        };
        Some((self.bytes(&bytes)?.as_ptr(), bytes.len()))
    }
}
