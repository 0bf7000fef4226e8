//! Interface addresses, name resolution and port numbers.

mod kind;
mod nic;

pub(crate) use nic::{Nic, PciAddress, RdmaFacts};

use super::cancel::Shield;
use super::errno::{Errno, Result, check};
use std::ffi::{CStr, CString};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};

/// One address of one interface that is up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Interface {
    /// Such as `eth0`.
    pub(crate) name: String,
    /// The address, without port.
    pub(crate) ip: IpAddr,
    /// IPv6 scope (interface index) of a link-local address, else 0.
    pub(crate) scope: u32,
    /// True for the loopback interface.
    pub(crate) loopback: bool,
    /// Longest IP packet of the interface, bytes; the MTU of any Ethernet if it is unknown.
    pub(crate) mtu: u32,
    /// The interface has a carrier.
    pub(crate) carrier: bool,
    /// A tunnel, or another link to one host only.
    pub(crate) point_to_point: bool,
    /// It leads only to containers or virtual machines of this host ([`kind`]).
    pub(crate) internal: bool,
    /// The default route uses this interface and this address.
    pub(crate) has_default_route: bool,
}

impl Interface {
    /// An interface with a carrier, and otherwise default properties.
    pub(crate) fn plain(name: &str, ip: IpAddr, mtu: u32) -> Self {
        Self {
            name: name.to_owned(),
            ip,
            scope: 0,
            loopback: ip.is_loopback(),
            mtu,
            carrier: true,
            point_to_point: false,
            internal: false,
            has_default_route: false,
        }
    }

    /// Its address with `port`, and with the scope that a link-local one needs.
    pub(crate) fn address(&self, port: u16) -> SocketAddr {
        match self.ip {
            IpAddr::V4(_) => SocketAddr::new(self.ip, port),
            IpAddr::V6(ip) => SocketAddr::V6(SocketAddrV6::new(ip, port, 0, self.scope)),
        }
    }
}

/// The MTU of an interface whose MTU is unknown.
const MTU_UNKNOWN: u32 = 1500;

/// All addresses of all interfaces that are up, in the kernel's order; empty on an error.
pub(crate) fn interfaces() -> Vec<Interface> {
    list_interfaces().unwrap_or_default()
}

/// Like [`interfaces`]. Errors: those of a netlink socket (getifaddrs(3)).
pub(crate) fn list_interfaces() -> Result<Vec<Interface>> {
    let _shield = Shield::raise();
    let mut list = std::ptr::null_mut();
    // SAFETY: fills `list` with a heap list that is freed below.
    check(unsafe { libc::getifaddrs(&mut list) })?;
    let mut found = Vec::new();
    let queries = nic::Queries::new();
    let far = FAR.map(|address| source_towards(SocketAddr::new(address, 0)));
    let mut next = list;
    // SAFETY: the list is valid until freeifaddrs; its strings and addresses are as getifaddrs(3)
    // documents.
    unsafe {
        while let Some(entry) = next.as_ref() {
            next = entry.ifa_next;
            let up = entry.ifa_flags & libc::IFF_UP as u32 != 0;
            if entry.ifa_addr.is_null() || entry.ifa_name.is_null() || !up {
                continue;
            }
            let len = match i32::from((*entry.ifa_addr).sa_family) {
                libc::AF_INET => size_of::<libc::sockaddr_in>(),
                libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
                _ => continue,
            };
            let bytes = std::slice::from_raw_parts(entry.ifa_addr.cast::<u8>(), len);
            let Some(address) = socket_addr_from_bytes(bytes) else { continue };
            let name = CStr::from_ptr(entry.ifa_name).to_string_lossy().into_owned();
            let has = |flag: libc::c_int| entry.ifa_flags & flag as u32 != 0;
            found.push(Interface {
                carrier: has(libc::IFF_RUNNING),
                point_to_point: has(libc::IFF_POINTOPOINT),
                internal: kind::is_internal(&name),
                has_default_route: far.contains(&Some(address.ip())),
                mtu: queries.as_ref().and_then(|q| q.mtu(&name)).unwrap_or(MTU_UNKNOWN),
                name,
                ip: address.ip(),
                scope: if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 },
                loopback: has(libc::IFF_LOOPBACK),
            });
        }
        libc::freeifaddrs(list);
    }
    Ok(found)
}

/// Addresses that no host has (RFC 5737, RFC 3849): they are routed by the default route, if there is one.
const FAR: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// The source address that the kernel uses for `dest`; `None` without a route. Connecting a UDP socket sends nothing.
pub(crate) fn source_towards(dest: SocketAddr) -> Option<IpAddr> {
    let any = match dest {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let (socket, _) = reserve_port(&SocketAddr::new(any, 0)).ok()?;
    // Port 0 cannot be connected to; the port does not affect the route.
    let mut dest = dest;
    dest.set_port(9);
    socket.connect(dest).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Reads a `sockaddr_in` or `sockaddr_in6`; `None` for any other family or too few bytes.
pub(crate) fn socket_addr_from_bytes(bytes: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    match i32::from(family) {
        libc::AF_INET if bytes.len() >= size_of::<libc::sockaddr_in>() => {
            let ip: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            Some(SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::from(ip), port)))
        }
        libc::AF_INET6 if bytes.len() >= size_of::<libc::sockaddr_in6>() => {
            let flow = u32::from_be_bytes(bytes.get(4..8)?.try_into().ok()?);
            let ip: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            let scope = u32::from_ne_bytes(bytes.get(24..28)?.try_into().ok()?);
            Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, flow, scope)))
        }
        _ => None,
    }
}

/// The bytes of a `sockaddr_in` (16) or `sockaddr_in6` (28), and how many there are.
pub(crate) fn socket_addr_to_bytes(address: &SocketAddr) -> ([u8; 28], usize) {
    let mut bytes = [0u8; 28];
    let mut put = |at: usize, from: &[u8]| {
        for (to, b) in bytes.iter_mut().skip(at).zip(from) {
            *to = *b;
        }
    };
    put(2, &address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            put(0, &(libc::AF_INET as u16).to_ne_bytes());
            put(4, &v4.ip().octets());
            (bytes, size_of::<libc::sockaddr_in>())
        }
        SocketAddr::V6(v6) => {
            put(0, &(libc::AF_INET6 as u16).to_ne_bytes());
            put(4, &v6.flowinfo().to_be_bytes());
            put(8, &v6.ip().octets());
            put(24, &v6.scope_id().to_ne_bytes());
            (bytes, size_of::<libc::sockaddr_in6>())
        }
    }
}

/// Resolves a node (name or numeric address) and a service (name or number), either of which may
/// be missing. `numeric` forbids name look-ups. Errors: EINVAL for an unknown service, ENOENT for a
/// node without an address (fi_getinfo(3) returns -FI_ENODATA then).
pub(crate) fn resolve(
    node: Option<&str>,
    service: Option<&str>,
    numeric: bool,
) -> Result<Vec<SocketAddr>> {
    let port = match service {
        None | Some("") => 0,
        Some(text) => match text.parse::<u16>() {
            Ok(port) => port,
            // The resolver would take a number that is too large modulo 65536.
            Err(_) if text.bytes().all(|b| b.is_ascii_digit()) => {
                return Err(Errno(libc::EINVAL));
            }
            Err(_) => service_port(text).ok_or(Errno(libc::EINVAL))?,
        },
    };
    let Some(node) = node else {
        return Ok(vec![SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))]);
    };
    if let Ok(ip) = node.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let found = lookup(node, port, numeric);
    if found.is_empty() { Err(Errno(libc::ENOENT)) } else { Ok(found) }
}

fn service_port(name: &str) -> Option<u16> {
    let name = CString::new(name).ok()?;
    let mut list = std::ptr::null_mut();
    // SAFETY: C strings; the result list is read while valid and freed.
    unsafe {
        if libc::getaddrinfo(std::ptr::null(), name.as_ptr(), std::ptr::null(), &mut list) != 0 {
            return None;
        }
        let port = first_addresses(list).first().map(SocketAddr::port);
        libc::freeaddrinfo(list);
        port
    }
}

/// `numeric`: also an IPv6 address with the name of its interface.
fn lookup(node: &str, port: u16, numeric: bool) -> Vec<SocketAddr> {
    let Ok(name) = CString::new(node) else { return Vec::new() };
    let mut list = std::ptr::null_mut();
    // SAFETY: all zeroes is a valid `addrinfo`.
    let mut hints: libc::addrinfo = unsafe { std::mem::zeroed() };
    hints.ai_socktype = libc::SOCK_DGRAM;
    hints.ai_flags = if numeric { libc::AI_NUMERICHOST } else { 0 };
    // SAFETY: C strings; the result list is read while valid and freed.
    unsafe {
        if libc::getaddrinfo(name.as_ptr(), std::ptr::null(), &hints, &mut list) != 0 {
            return Vec::new();
        }
        let mut found = first_addresses(list);
        libc::freeaddrinfo(list);
        for address in &mut found {
            address.set_port(port);
        }
        found
    }
}

/// # Safety
/// `list` is a valid result of getaddrinfo.
unsafe fn first_addresses(mut list: *mut libc::addrinfo) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    // SAFETY: the caller guarantees that the list is valid.
    unsafe {
        while let Some(entry) = list.as_ref() {
            list = entry.ai_next;
            if entry.ai_addr.is_null() {
                continue;
            }
            let bytes =
                std::slice::from_raw_parts(entry.ai_addr.cast::<u8>(), entry.ai_addrlen as usize);
            if let Some(address) = socket_addr_from_bytes(bytes) {
                if !found.contains(&address) {
                    found.push(address);
                }
            }
        }
    }
    found
}

/// Reserves a UDP port: the given one, or any free one for 0. The port stays reserved while the
/// socket lives. Errors: EADDRINUSE, EADDRNOTAVAIL, EACCES.
pub(crate) fn reserve_port(address: &SocketAddr) -> Result<(UdpSocket, u16)> {
    let socket = UdpSocket::bind(address)?;
    let port = socket.local_addr()?.port();
    Ok((socket, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_addresses_survive_their_bytes() {
        for text in ["127.0.0.1:9228", "[::1]:7471", "[fe80::1%3]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            let (bytes, len) = socket_addr_to_bytes(&address);
            assert_eq!(socket_addr_from_bytes(&bytes[..len]), Some(address));
            assert_eq!(socket_addr_from_bytes(&bytes[..len - 1]), None);
        }
        assert_eq!(socket_addr_from_bytes(&[]), None);
        assert_eq!(socket_addr_from_bytes(&[9; 28]), None);
    }

    #[test]
    fn resolves_what_needs_no_server() {
        let list = resolve(Some("127.0.0.1"), Some("9228"), true).unwrap();
        assert_eq!(list, ["127.0.0.1:9228".parse().unwrap()]);
        let loopback = interfaces().into_iter().find(|interface| interface.loopback).unwrap().name;
        let list = resolve(Some(&format!("fe80::1%{loopback}")), Some("9228"), true).unwrap();
        let [SocketAddr::V6(address)] = &list[..] else { panic!("{list:?}") };
        assert!(*address.ip() == "fe80::1".parse::<Ipv6Addr>().unwrap() && address.scope_id() > 0);
        assert_eq!(address.port(), 9228);
        assert_eq!(resolve(Some("no.such.host"), None, true).unwrap_err(), Errno(libc::ENOENT));
        assert_eq!(resolve(None, Some("bogus-service"), true).unwrap_err(), Errno(libc::EINVAL));
        assert_eq!(resolve(None, Some("65536"), true).unwrap_err(), Errno(libc::EINVAL));
        assert!(!resolve(Some("localhost"), None, false).unwrap().is_empty());
    }

    #[test]
    fn loopback_is_there() {
        let loopback = interfaces().into_iter().find(|i| i.loopback).unwrap();
        let mtu = std::fs::read_to_string(format!("/sys/class/net/{}/mtu", loopback.name));
        assert!(mtu.is_ok_and(|mtu| mtu.trim() == loopback.mtu.to_string()));
    }
}
