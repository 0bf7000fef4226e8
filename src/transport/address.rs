//! The address of an endpoint: an IP address and a port, in the forms that network transports and users need.
//! Within a node only the port counts, because a port is unique on a node.

use crate::sys::net::{self, Interface};
use crate::telemetry::log;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};

/// Bytes of an address inside packets of this provider.
pub(crate) const WIRE_LEN: usize = 24;

/// An endpoint's address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Address(pub(crate) SocketAddr);

impl Address {
    /// From a `sockaddr_in` or `sockaddr_in6`.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        net::socket_addr_from_bytes(bytes).map(Self)
    }

    /// From the string form: `fi_sockaddr_in://1.2.3.4:5`, `fi_sockaddr_in6://[::1]:5`, or the part
    /// after `://` alone. FI_ADDR_STR of fi_getinfo(3).
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let rest = match text.split_once("://") {
            Some(("fi_sockaddr_in" | "fi_sockaddr_in6" | "fi_sockaddr" | "fi_udrv", rest)) => rest,
            Some(_) => return None,
            None => text,
        };
        rest.parse().ok().map(Self)
    }

    /// The form in packets: family, port, scope, IP.
    pub(crate) fn to_wire(self) -> [u8; WIRE_LEN] {
        let (family, ip, scope) = match self.0 {
            SocketAddr::V4(v4) => (4u16, v4.ip().to_ipv6_mapped().octets(), 0),
            SocketAddr::V6(v6) => (6u16, v6.ip().octets(), v6.scope_id()),
        };
        let mut bytes = [0; WIRE_LEN];
        let parts = family
            .to_le_bytes()
            .into_iter()
            .chain(self.0.port().to_le_bytes())
            .chain(scope.to_le_bytes())
            .chain(ip);
        for (to, from) in bytes.iter_mut().zip(parts) {
            *to = from;
        }
        bytes
    }

    /// The inverse of [`Address::to_wire`]; `None` for bytes that no endpoint sends.
    pub(crate) fn from_wire(bytes: &[u8]) -> Option<Self> {
        let family = u16::from_le_bytes(bytes.get(..2)?.try_into().ok()?);
        let port = u16::from_le_bytes(bytes.get(2..4)?.try_into().ok()?);
        let scope = u32::from_le_bytes(bytes.get(4..8)?.try_into().ok()?);
        let ip: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
        let ip = std::net::Ipv6Addr::from(ip);
        match family {
            4 => Some(Self(SocketAddr::new(IpAddr::V4(ip.to_ipv4_mapped()?), port))),
            6 => Some(Self(SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope)))),
            _ => None,
        }
    }

    /// This address as its owner has named it in a packet, as this host must name it: the scope of a link-local address
    /// is the number of an interface of its owner. `near` is an address on the same link, with the scope of this host.
    pub(crate) fn on_link_of(self, near: &Self) -> Self {
        match (self.0, near.0) {
            (SocketAddr::V6(mut owner), SocketAddr::V6(near))
                if owner.ip().is_unicast_link_local() && near.ip().is_unicast_link_local() =>
            {
                owner.set_scope_id(near.scope_id());
                Self(SocketAddr::V6(owner))
            }
            _ => self,
        }
    }

    /// The port.
    pub(crate) fn port(&self) -> u16 {
        self.0.port()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            SocketAddr::V4(v4) => write!(f, "fi_sockaddr_in://{v4}"),
            SocketAddr::V6(v6) => write!(f, "fi_sockaddr_in6://{v6}"),
        }
    }
}

/// The addresses of this host: they tell whether a peer is on the same node.
#[derive(Clone, Debug, Default)]
pub(crate) struct LocalHost {
    interfaces: Vec<Interface>,
}

/// An address with all addresses of this host folded into one: a peer reached as 127.0.0.1 is the same peer when it is
/// reached at any other address of the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum CanonicalAddress {
    /// On this host, by port.
    Local(u16),
    /// On another host.
    Remote(Address),
}

impl LocalHost {
    /// Reads the interfaces of this host.
    pub(crate) fn detect() -> Self {
        let interfaces = net::list_interfaces().unwrap_or_else(|errno| {
            log::limited!("cannot list the addresses of this host (getifaddrs: {errno})");
            Vec::new()
        });
        Self { interfaces }
    }

    /// With these interfaces.
    #[cfg(test)]
    pub(crate) fn of(interfaces: Vec<Interface>) -> Self {
        Self { interfaces }
    }

    /// True if `ip` is this host's, the wildcard and the whole loopback network included.
    pub(crate) fn owns(&self, ip: IpAddr) -> bool {
        ip.is_loopback() || ip.is_unspecified() || self.interfaces.iter().any(|i| i.ip == ip)
    }

    /// See [`CanonicalAddress`].
    pub(crate) fn canonical(&self, address: &Address) -> CanonicalAddress {
        if self.owns(address.0.ip()) {
            CanonicalAddress::Local(address.port())
        } else {
            CanonicalAddress::Remote(*address)
        }
    }

    /// The address to use when the application names none: of the interface that most probably leads to other hosts
    /// ([`rank`]), else loopback. `wanted` (FI_UDRV_IFACE) restricts the choice to an interface name or an address.
    pub(crate) fn preferred(&self, wanted: Option<&str>, v6: Option<bool>) -> Option<Interface> {
        let found = self
            .interfaces
            .iter()
            .filter(|i| wanted.is_none_or(|w| i.name == w || i.ip.to_string() == w))
            .filter(|i| v6.is_none_or(|v6| i.ip.is_ipv6() == v6))
            .min_by_key(|i| rank(i))
            .cloned();
        if found.is_none() && wanted.is_none() && v6 != Some(true) {
            return Some(Interface::plain("lo", IpAddr::V4(Ipv4Addr::LOCALHOST), 65_536));
        }
        found
    }

    /// The interface that has `ip`.
    pub(crate) fn interface_of(&self, ip: IpAddr) -> Option<&Interface> {
        self.interfaces
            .iter()
            .find(|i| i.ip == ip)
            .or_else(|| self.interfaces.iter().find(|i| ip.is_loopback() && i.loopback))
    }
}

/// Lower is better; the first of equals wins. An interface without a carrier reaches no host; one of containers or VMs
/// reaches no other host, even if every host has its address; a point-to-point one reaches one host. A link-local
/// address is not unique, more peers have IPv4 than IPv6, and distant hosts are reached over the default route.
fn rank(i: &Interface) -> impl Ord + use<> {
    let link_local = match i.ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(_) => i.scope != 0,
    };
    let reaches = (i.loopback, !i.carrier, i.internal, i.point_to_point);
    (reaches, link_local, i.ip.is_ipv6(), !i.has_default_route)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_wire_forms_are_inverse() {
        for text in ["fi_sockaddr_in://10.0.0.1:7471", "fi_sockaddr_in6://[fe80::1%3]:9"] {
            let address = Address::from_text(text).unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(Address::from_wire(&address.to_wire()), Some(address));
        }
        assert_eq!(Address::from_text("127.0.0.1:1"), Address::from_text("fi_udrv://127.0.0.1:1"));
        assert_eq!(Address::from_text("fi_shm://x"), None);
        assert_eq!(Address::from_text("nonsense"), None);
        assert_eq!(Address::from_wire(&[9; 24]), None);
        assert_eq!(Address::from_wire(&[4; 3]), None);
    }

    #[test]
    fn names_of_this_host_are_one() {
        let host = LocalHost::detect();
        let a = Address::from_text("127.0.0.1:5").unwrap();
        let b = Address::from_text("127.0.0.2:5").unwrap();
        let c = Address::from_text("[::1]:5").unwrap();
        assert_eq!(host.canonical(&a), host.canonical(&b));
        assert_eq!(host.canonical(&a), host.canonical(&c));
        let remote = Address::from_text("203.0.113.77:5").unwrap();
        assert_eq!(host.canonical(&remote), CanonicalAddress::Remote(remote));
    }

    /// An interface for tests: name, address, and its properties as words.
    fn entry(name: &str, ip: &str, words: &str) -> Interface {
        let has = |word: &str| words.split(' ').any(|other| other == word);
        let ip: IpAddr = ip.parse().unwrap();
        Interface {
            scope: u32::from(has("link-local")),
            carrier: !has("down"),
            point_to_point: has("point-to-point"),
            internal: has("internal"),
            has_default_route: has("default"),
            ..Interface::plain(name, ip, 1500)
        }
    }

    #[test]
    fn the_interface_is_the_one_that_leads_to_other_hosts() {
        let lo = || entry("lo", "127.0.0.1", "");
        let docker = || entry("docker0", "172.17.0.1", "down internal");
        let busy_docker = || entry("docker0", "172.17.0.1", "internal");
        let virbr = || entry("virbr0", "192.168.122.1", "down internal");
        let tun = || entry("tun0", "100.64.0.1", "point-to-point");
        let vpn = || entry("tun0", "100.64.0.1", "point-to-point default");
        let eth0 = || entry("eth0", "10.5.0.1", "");
        let eth1 = || entry("eth1", "10.6.0.1", "default");
        let pulled = || entry("eth2", "10.7.0.1", "down");
        let v6 = || entry("eth0", "fd00::1", "default");
        let local = || entry("eth0", "fe80::1", "link-local");
        for (list, best) in [
            (vec![lo(), docker(), eth0()], "10.5.0.1"),
            (vec![lo(), busy_docker(), virbr(), eth0()], "10.5.0.1"),
            (vec![tun(), lo(), eth0()], "10.5.0.1"),
            (vec![vpn(), eth0()], "10.5.0.1"),
            (vec![pulled(), docker(), vpn()], "100.64.0.1"),
            (vec![pulled(), eth0()], "10.5.0.1"),
            (vec![eth0(), eth1()], "10.6.0.1"),
            (vec![eth0(), entry("eth3", "10.8.0.1", "")], "10.5.0.1"),
            (vec![lo(), v6(), eth0()], "10.5.0.1"),
            (vec![lo(), local(), v6()], "fd00::1"),
            (vec![lo(), busy_docker(), local()], "fe80::1"),
            (vec![lo(), docker()], "172.17.0.1"),
            (vec![lo()], "127.0.0.1"),
            (vec![], "127.0.0.1"),
        ] {
            let host = LocalHost { interfaces: list };
            let found = host.preferred(None, None).unwrap();
            assert_eq!(found.ip.to_string(), best, "of {:?}", host.interfaces);
        }
        let host = LocalHost { interfaces: vec![eth0(), docker(), v6()] };
        assert_eq!(host.preferred(Some("docker0"), None), Some(docker()), "named");
        assert_eq!(host.preferred(None, Some(true)), Some(v6()));
        assert_eq!(host.preferred(Some("docker0"), Some(true)), None);
    }
}
