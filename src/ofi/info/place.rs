//! Where an endpoint would be and which peer it would reach: node, service and the addresses in the
//! hints, combined as fi_getinfo(3) says.

use super::hints::Hints;
use super::refusal::{Refusal, Request};
use crate::config::Config;
use crate::sys::net::{self, Interface};
use crate::sys::per_process::PerProcess;
use crate::sys::shared_memory::SharedMemory;
use crate::sys::{Errno, unix};
use crate::telemetry::log;
use crate::transport::address::{Address, LocalHost};
use libfabric_sys::{
    FI_ADDR_STR, FI_FORMAT_UNSPEC, FI_NUMERICHOST, FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6,
    FI_SOCKADDR_IP, FI_SOURCE,
};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The addresses of an info.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Place {
    /// FI_SOCKADDR_IN, FI_SOCKADDR_IN6 or FI_ADDR_STR.
    pub(super) format: u32,
    /// One of this host's addresses.
    pub(super) source: Address,
    pub(super) dest: Option<Address>,
    /// Interface of `source`.
    pub(super) interface: String,
    /// The domain's name: the name of the interface, or of the device that was asked for.
    pub(super) domain: String,
    /// Why this interface was chosen, for the log.
    pub(super) reason: &'static str,
}

impl Place {
    /// Logs one line about the interface, unless the last one said the same: an application and libfabric's
    /// layering providers call fi_getinfo many times.
    pub(super) fn explain(&self) {
        static LAST: PerProcess<String> = PerProcess::new();
        let (interface, ip) = (&self.interface, self.source.0.ip());
        let others = net::interfaces().into_iter().filter(|i| i.ip != ip);
        let others: Vec<String> =
            others.map(|i| format!("{} {}{}", i.name, i.ip, against(&i))).collect();
        let others = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
        let reason = self.reason;
        let hint = if reason == BY_USER { "" } else { "; FI_UDRV_IFACE chooses another" };
        let line = format!("interface {interface} ({ip}) chosen: {reason}; others: {others}{hint}");
        let mut last = LAST.lock();
        if *last != line {
            log::info(format_args!("{line}"));
            *last = line;
        }
    }
}

/// Why an interface is the best of the interfaces that are up.
pub(super) fn why(interface: &Interface) -> &'static str {
    match against(interface) {
        _ if interface.loopback => "no other is up",
        "" if interface.has_default_route => "it has a carrier and the default route",
        "" => "the first that is up, has a carrier and leads to other hosts",
        _ => "none that is up is better",
    }
}

/// The drawback of an interface, as text to follow its address.
fn against(interface: &Interface) -> &'static str {
    match interface {
        Interface { loopback: true, .. } => "",
        Interface { carrier: false, .. } => " (no carrier)",
        Interface { internal: true, .. } => " (of containers or virtual machines)",
        Interface { point_to_point: true, .. } => " (point to point)",
        _ => "",
    }
}

/// Where an endpoint would be: address, interface, and the reason.
type Choice = (SocketAddr, String, &'static str);

const BY_VARIABLE: &str = "FI_UDRV_IFACE";
const BY_USER: &str = "FI_UDRV_IFACE names it";
const BY_DEVICE: &str = "the application names the device that has its address";
const BY_ADDRESS: &str = "it has the address that was asked for";

/// Finds the addresses that meet node, service and hints.
pub(super) fn find(
    request: &Request<'_>,
    hints: &Hints,
    config: &Config,
) -> Result<Place, Refusal> {
    let named = request.node.is_some() || request.service.is_some();
    let is_source = request.flags & FI_SOURCE != 0;
    if is_source && !named {
        return Err(Refusal::invalid("flags", "FI_SOURCE", "FI_SOURCE with a node or a service"));
    }
    let format = Format::new(hints.addr_format)?;
    let hinted_source =
        if is_source { None } else { format.read("src_addr", hints.source.as_deref())? };
    let hinted_dest =
        if named && !is_source { None } else { format.read("dest_addr", hints.dest.as_deref())? };
    // The address family that all other addresses must have.
    let v6 = format.v6.or_else(|| hinted_source.or(hinted_dest).map(|a| a.is_ipv6()));
    let finder = Finder { host: LocalHost::detect(), hints, config, v6 };

    let (source, dest) = if is_source {
        (Some(finder.local_name(request)?), hinted_dest)
    } else if named {
        (hinted_source, Some(finder.remote_name(request)?))
    } else {
        (hinted_source, hinted_dest)
    };
    let dest = match dest {
        // A wildcard destination means this host.
        Some(dest) if dest.ip().is_unspecified() => Some(finder.here(dest)?.0),
        dest => dest,
    };
    let (source, interface, reason) = match (source, dest) {
        (Some(source), _) => finder.own(source)?,
        (None, Some(dest)) => finder.towards(dest)?,
        (None, None) => finder.preferred(v6, 0)?,
    };
    if let Some(dest) = dest.filter(|dest| dest.is_ipv6() != source.is_ipv6()) {
        return Err(Refusal::new("dest_addr", dest, format_args!("addresses like {source}")));
    }
    let by_family = if source.is_ipv6() { FI_SOCKADDR_IN6 } else { FI_SOCKADDR_IN };
    let device = hints.device.as_ref().map(|device| device.name.clone());
    Ok(Place {
        domain: device.unwrap_or_else(|| interface.clone()),
        format: if format.is_text { FI_ADDR_STR } else { by_family },
        source: Address(source),
        dest: dest.map(Address),
        interface,
        reason,
    })
}

/// Opens and closes everything that an endpoint at this place needs, because an info is a promise.
pub(super) fn probe(place: &Place, config: &Config) -> Result<(), Refusal> {
    let failed =
        |what: &'static str| move |errno: Errno| Refusal::by_system("src_addr", what, errno);
    let any_port = with_port(place.source.0, 0);
    let (_socket, port) = net::reserve_port(&any_port).map_err(failed("a UDP port"))?;
    // This process holds the port at this moment, which makes the name unique.
    unix::listen(&format!("udrv-probe-{port}-{}", std::process::id()))
        .map_err(failed("a unix socket"))?;
    // Without shared memory (RLIMIT_FSIZE, a filter of system calls) the network reaches the peers of this node.
    if config.shm.on && !config.net.on {
        SharedMemory::create(4096, 4096).map_err(failed("shared memory"))?;
    }
    Ok(())
}

/// The address format that the hints ask for.
#[derive(Clone, Copy, Debug)]
struct Format {
    is_text: bool,
    /// IPv6, IPv4, or either.
    v6: Option<bool>,
}

impl Format {
    fn new(addr_format: u32) -> Result<Self, Refusal> {
        let (is_text, v6) = match addr_format {
            FI_FORMAT_UNSPEC | FI_SOCKADDR | FI_SOCKADDR_IP => (false, None),
            FI_SOCKADDR_IN => (false, Some(false)),
            FI_SOCKADDR_IN6 => (false, Some(true)),
            FI_ADDR_STR => (true, None),
            other => {
                return Err(Refusal::new(
                    "addr_format",
                    other,
                    "FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_ADDR_STR",
                ));
            }
        };
        Ok(Self { is_text, v6 })
    }

    /// Reads an address of the hints.
    fn read(
        self,
        attribute: &'static str,
        bytes: Option<&[u8]>,
    ) -> Result<Option<SocketAddr>, Refusal> {
        let Some(bytes) = bytes else { return Ok(None) };
        let address = if self.is_text {
            let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
            std::str::from_utf8(text).ok().and_then(Address::from_text)
        } else {
            Address::from_bytes(bytes)
        };
        let refuse =
            |offered: &'static str| Refusal::new(attribute, format_args!("{bytes:02x?}"), offered);
        match (address, self.v6) {
            (None, _) if self.is_text => Err(refuse("fi_sockaddr_in://ADDRESS:PORT")),
            (None, _) => Err(refuse("a sockaddr_in or sockaddr_in6")),
            (Some(address), Some(v6)) if address.0.is_ipv6() != v6 => {
                Err(refuse(if v6 { "an IPv6 address" } else { "an IPv4 address" }))
            }
            (Some(address), _) => Ok(Some(address.0)),
        }
    }
}

struct Finder<'a> {
    host: LocalHost,
    hints: &'a Hints,
    config: &'a Config,
    v6: Option<bool>,
}

impl Finder<'_> {
    /// The interface that the application (by domain name) or else the user demands.
    fn pinned(&self) -> Option<String> {
        let by_user = self.config.endpoint.iface.clone();
        match &self.hints.device {
            // The address of a device's port is the address of the interface of that port.
            Some(device) => by_user.or_else(|| {
                let fits = |ip: &&IpAddr| self.v6.is_none_or(|v6| ip.is_ipv6() == v6);
                let own = device.ips.iter().filter(fits).filter(|ip| self.host.owns(**ip));
                own.min_by_key(|ip| ip.is_ipv6()).map(ToString::to_string)
            }),
            None => self.hints.domain_name.clone().or(by_user),
        }
    }

    /// The interface that the application names as the domain.
    fn named(&self) -> Option<&str> {
        self.hints.domain_name.as_deref().filter(|_| self.hints.device.is_none())
    }

    /// The best of this host's addresses, and its interface.
    fn preferred(&self, v6: Option<bool>, port: u16) -> Result<Choice, Refusal> {
        let pinned = self.pinned();
        let attribute = match (self.named(), &self.config.endpoint.iface) {
            (Some(_), _) => "domain_attr->name",
            (None, Some(_)) => BY_VARIABLE,
            (None, None) => "src_addr",
        };
        let family = match v6 {
            Some(true) => " with an IPv6 address",
            Some(false) => " with an IPv4 address",
            None => "",
        };
        let interface = self.host.preferred(pinned.as_deref(), v6).ok_or_else(|| {
            let wanted = format!("{}{family}", pinned.as_deref().unwrap_or("an interface"));
            let refusal = Refusal::new(attribute, wanted, self.interfaces());
            // With an address of the other family this application gets no match, others do.
            let is_absent = self.host.preferred(pinned.as_deref(), None).is_none();
            if attribute == BY_VARIABLE && is_absent { refusal.by_user() } else { refusal }
        })?;
        let reason = match (self.named(), &self.config.endpoint.iface) {
            (Some(_), _) => "the application names it",
            (None, Some(_)) => BY_USER,
            (None, None) if pinned.is_some() => BY_DEVICE,
            (None, None) => why(&interface),
        };
        Ok((interface.address(port), interface.name, reason))
    }

    /// Replaces the wildcard by the preferred address; the port is kept.
    fn here(&self, wildcard: SocketAddr) -> Result<Choice, Refusal> {
        self.preferred(Some(self.v6.unwrap_or_else(|| wildcard.is_ipv6())), wildcard.port())
    }

    /// An explicit source address with its interface: it must be one of this host's.
    fn own(&self, source: SocketAddr) -> Result<Choice, Refusal> {
        if source.ip().is_unspecified() {
            return self.here(source);
        }
        if !self.host.owns(source.ip()) {
            return Err(Refusal::new("src_addr", source.ip(), self.interfaces()));
        }
        let Some(interface) = self.host.interface_of(source.ip()) else {
            // Loopback exists even if no interface is listed with it.
            return self.on("lo", source);
        };
        self.on(&interface.name, with_scope(source, interface))
    }

    fn on(&self, interface: &str, source: SocketAddr) -> Result<Choice, Refusal> {
        match self.named() {
            Some(name) if name != interface => Err(Refusal::new(
                "domain_attr->name",
                name,
                format_args!("{interface}, which has {}", source.ip()),
            )),
            _ => Ok((source, interface.to_owned(), BY_ADDRESS)),
        }
    }

    /// A source address that reaches `dest`: `dest` itself if it is this host's, else the one that the kernel
    /// would choose for the route.
    fn towards(&self, dest: SocketAddr) -> Result<Choice, Refusal> {
        let v6 = Some(dest.is_ipv6());
        if self.pinned().is_some() {
            return self.preferred(v6, 0);
        }
        if self.host.owns(dest.ip()) {
            return self.own(with_port(dest, 0));
        }
        match net::source_towards(dest).filter(|ip| self.host.owns(*ip)) {
            Some(ip) => {
                let (source, interface, _) = self.own(SocketAddr::new(ip, 0))?;
                Ok((source, interface, "it leads to the destination"))
            }
            None => self.preferred(v6, 0),
        }
    }

    /// Resolves node and service under FI_SOURCE.
    fn local_name(&self, request: &Request<'_>) -> Result<SocketAddr, Refusal> {
        let found = self.resolve(request)?;
        found
            .iter()
            .find(|address| self.host.owns(address.ip()))
            .or_else(|| found.first())
            .copied()
            .ok_or_else(|| self.unknown(request))
    }

    /// Resolves node and service of a peer.
    fn remote_name(&self, request: &Request<'_>) -> Result<SocketAddr, Refusal> {
        self.resolve(request)?.first().copied().ok_or_else(|| self.unknown(request))
    }

    /// All addresses of node and service in the wanted family, IPv4 first.
    fn resolve(&self, request: &Request<'_>) -> Result<Vec<SocketAddr>, Refusal> {
        if let Some(text) = request.node.filter(|node| node.contains("://")) {
            if let Some(service) = request.service {
                return Err(Refusal::invalid(
                    "service",
                    service,
                    "none beside an FI_ADDR_STR node",
                ));
            }
            let address = Address::from_text(text).ok_or_else(|| self.unknown(request))?;
            return Ok(self.family(vec![address.0]));
        }
        let numeric = request.flags & FI_NUMERICHOST != 0;
        let service = request.service.unwrap_or("");
        let no_service = || Refusal::new("service", service, "a port or a known service");
        if service.parse::<u16>().is_err() && service.parse::<u64>().is_ok() {
            return Err(no_service()); // getaddrinfo(3) would reduce it modulo 65536
        }
        let mut found = net::resolve(request.node, request.service, numeric).map_err(|errno| {
            if errno == Errno(libc::EINVAL) { no_service() } else { self.unknown(request) }
        })?;
        if request.node.is_none() && self.v6 == Some(true) {
            for address in &mut found {
                address.set_ip(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
            }
        }
        Ok(self.family(found))
    }

    fn family(&self, mut found: Vec<SocketAddr>) -> Vec<SocketAddr> {
        found.retain(|address| self.v6.is_none_or(|v6| address.is_ipv6() == v6));
        // Not `sort_by_key`: a stable sort takes 4 KiB of the stack.
        let (four, six): (Vec<_>, Vec<_>) = found.into_iter().partition(SocketAddr::is_ipv4);
        [four, six].concat()
    }

    fn unknown(&self, request: &Request<'_>) -> Refusal {
        let offered = match self.v6 {
            Some(true) => "names and numbers with an IPv6 address",
            Some(false) => "names and numbers with an IPv4 address",
            None => "names and numbers with an IP address",
        };
        Refusal::new("node", request.node.unwrap_or(""), offered)
    }

    /// This host's addresses, for the log.
    fn interfaces(&self) -> String {
        let list: Vec<String> =
            net::interfaces().iter().map(|i| format!("{} {}", i.name, i.ip)).collect();
        list.join(", ")
    }
}

/// Adds the scope to a link-local address, which is ambiguous without its interface.
fn with_scope(mut address: SocketAddr, interface: &Interface) -> SocketAddr {
    if let SocketAddr::V6(v6) = &mut address {
        if v6.scope_id() == 0 {
            v6.set_scope_id(interface.scope);
        }
    }
    address
}

fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}
