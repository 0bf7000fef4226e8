//! Node, service, flags and addresses of the hints.

use super::*;
use crate::sys::net::{interfaces, socket_addr_to_bytes};
use crate::transport::address::{Address, LocalHost};
use std::net::SocketAddr;

fn place(
    node: Option<&str>,
    service: Option<&str>,
    flags: u64,
    hints: &Hints,
    config: &Config,
) -> Result<Place, String> {
    let request = Request { version: NEW, node, service, flags };
    place::find(&request, hints, config).map_err(|refusal| refusal.to_string())
}

fn plain(node: Option<&str>, service: Option<&str>, flags: u64) -> Result<Place, String> {
    place(node, service, flags, &Hints::none(), &Config::default())
}

fn socket(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn sockaddr(text: &str) -> Option<Vec<u8>> {
    let (bytes, len) = socket_addr_to_bytes(&socket(text));
    Some(bytes[..len].to_vec())
}

fn preferred() -> SocketAddr {
    SocketAddr::new(LocalHost::detect().preferred(None, None).unwrap().ip, 0)
}

fn has_v6_loopback() -> bool {
    interfaces().iter().any(|i| i.loopback && i.ip.is_ipv6())
}

#[test]
fn without_any_names_the_preferred_interface_is_offered() {
    let place = plain(None, None, 0).unwrap();
    assert_eq!(place.source.0, preferred());
    assert_eq!(place.dest, None);
    assert_eq!(place.reason, place::why(&LocalHost::detect().preferred(None, None).unwrap()));
    let loopback = place.source.0.ip().is_loopback();
    assert_eq!(place.reason == "no other is up", loopback);
    place::probe(&place, &Config::default()).unwrap();
}

#[test]
fn a_source_is_one_of_ours() {
    let place = plain(Some("127.0.0.1"), Some("7471"), FI_SOURCE | FI_NUMERICHOST).unwrap();
    assert_eq!(place.source.0, socket("127.0.0.1:7471"));
    assert_eq!((place.dest, place.interface.as_str()), (None, "lo"));
    assert_eq!(place.format, FI_SOCKADDR_IN);
    // Only a service, or the wildcard: any address of this host.
    for node in [None, Some("0.0.0.0")] {
        let place = plain(node, Some("7471"), FI_SOURCE).unwrap();
        assert_eq!(place.source.0.port(), 7471);
        assert_eq!(place.source.0.ip(), preferred().ip());
    }
    let foreign = plain(Some("203.0.113.77"), None, FI_SOURCE).unwrap_err();
    assert!(foreign.starts_with("src_addr: wanted 203.0.113.77, offered "), "{foreign}");
}

#[test]
fn a_destination_brings_a_source_that_reaches_it() {
    let place = plain(Some("127.0.0.1"), Some("9228"), 0).unwrap();
    assert_eq!(place.dest, Some(Address(socket("127.0.0.1:9228"))));
    assert_eq!(place.source.0, socket("127.0.0.1:0"));
    // A port alone means this host.
    let place = plain(None, Some("9228"), 0).unwrap();
    assert_eq!(place.dest.unwrap().0, SocketAddr::new(preferred().ip(), 9228));
    assert_eq!(place.source.0, preferred());
    // An address elsewhere is offered too; it fails when it is used.
    let place = plain(Some("203.0.113.77"), Some("9228"), 0).unwrap();
    assert_eq!(place.dest.unwrap().0, socket("203.0.113.77:9228"));
    assert!(LocalHost::detect().owns(place.source.0.ip()));
}

#[test]
fn names_prefer_ipv4_unless_the_format_says_otherwise() {
    let place = plain(Some("localhost"), None, FI_SOURCE).unwrap();
    assert_eq!(place.source.0, socket("127.0.0.1:0"));
    if has_v6_loopback() {
        let place = plain(Some("::1"), Some("5"), 0).unwrap();
        assert_eq!((place.format, place.source.0), (FI_SOCKADDR_IN6, socket("[::1]:0")));
        let mut hints = Hints::none();
        hints.addr_format = FI_SOCKADDR_IN6;
        let place = super::places::place(None, Some("5"), FI_SOURCE, &hints, &Config::default());
        assert!(place.unwrap().source.0.is_ipv6());
    }
    let mut hints = Hints::none();
    hints.addr_format = FI_SOCKADDR_IN;
    let refusal = place_with("::1", &hints).unwrap_err();
    assert_eq!(refusal, "node: wanted ::1, offered names and numbers with an IPv4 address");
}

fn place_with(node: &str, hints: &Hints) -> Result<Place, String> {
    place(Some(node), None, 0, hints, &Config::default())
}

#[test]
fn nonsense_is_named() {
    let refusal = plain(Some("no.such.host"), None, FI_NUMERICHOST).unwrap_err();
    assert_eq!(refusal, "node: wanted no.such.host, offered names and numbers with an IP address");
    let refusal = plain(Some("127.0.0.1"), Some("nosuchservice"), 0).unwrap_err();
    assert_eq!(refusal, "service: wanted nosuchservice, offered a port or a known service");
    let refusal = plain(Some("127.0.0.1"), Some("65536"), 0).unwrap_err();
    assert_eq!(refusal, "service: wanted 65536, offered a port or a known service");
}

#[test]
fn addresses_of_the_hints_count_where_the_call_names_none() {
    let mut hints = Hints::none();
    hints.source = sockaddr("127.0.0.1:1111");
    hints.dest = sockaddr("127.0.0.1:2222");
    let find = |node, service, flags| {
        let place = place(node, service, flags, &hints, &Config::default()).unwrap();
        (place.source.0.port(), place.dest.map(|dest| dest.0.port()))
    };
    assert_eq!(find(None, None, 0), (1111, Some(2222)));
    // Ignored: the destination when there is a node, and the source under FI_SOURCE.
    assert_eq!(find(Some("127.0.0.1"), Some("3333"), 0), (1111, Some(3333)));
    assert_eq!(find(Some("127.0.0.1"), Some("3333"), FI_SOURCE), (3333, Some(2222)));
    assert_eq!(find(None, Some("3333"), FI_SOURCE), (3333, Some(2222)));
}

#[test]
fn a_wildcard_source_becomes_an_address() {
    let mut hints = Hints::none();
    hints.source = sockaddr("0.0.0.0:1111");
    let place = place(None, None, 0, &hints, &Config::default()).unwrap();
    assert_eq!(place.source.0, SocketAddr::new(preferred().ip(), 1111));
}

#[test]
fn both_addresses_are_of_one_family() {
    let mut hints = Hints::none();
    hints.source = sockaddr("127.0.0.1:1");
    hints.dest = sockaddr("[::1]:2");
    let refusal = place(None, None, 0, &hints, &Config::default()).unwrap_err();
    assert_eq!(refusal, "dest_addr: wanted [::1]:2, offered addresses like 127.0.0.1:1");
}

#[test]
fn a_domain_name_chooses_the_interface() {
    let mut hints = Hints::none();
    hints.domain_name = Some("lo".to_owned());
    let mut config = Config::default();
    config.endpoint.iface = Some("nosuch0".to_owned());
    let place = place(None, None, 0, &hints, &config).unwrap();
    assert_eq!((place.interface.as_str(), place.source.0), ("lo", socket("127.0.0.1:0")));
    if let Some(other) = interfaces().iter().find(|i| !i.loopback && i.ip.is_ipv4()) {
        hints.domain_name = Some(other.name.clone());
        let towards_me = place_with("127.0.0.1", &hints).unwrap();
        assert_eq!(towards_me.interface, other.name);
        hints.source = sockaddr("127.0.0.1:0");
        let refusal = super::places::place(None, None, 0, &hints, &config).unwrap_err();
        assert_eq!(
            refusal,
            format!("domain_attr->name: wanted {}, offered lo, which has 127.0.0.1", other.name)
        );
    }
}

#[test]
fn the_user_chooses_the_interface_where_the_application_does_not() {
    let choose = |iface: &str| {
        let mut config = Config::default();
        config.endpoint.iface = Some(iface.to_owned());
        config
    };
    let none = Hints::none();
    for iface in ["lo", "127.0.0.1"] {
        let place = place(None, None, 0, &none, &choose(iface)).unwrap();
        assert_eq!(place.source.0, socket("127.0.0.1:0"));
        assert_eq!(place.reason, "FI_UDRV_IFACE names it");
    }
    let refusal = place(None, None, 0, &none, &choose("nosuch0")).unwrap_err();
    assert!(refusal.starts_with("FI_UDRV_IFACE: wanted nosuch0, offered "));
}

#[test]
fn strings_are_addresses_too() {
    let text = |info: &Info| {
        let hints = info.as_hints();
        let string = |bytes: Option<Vec<u8>>| bytes.map(|b| String::from_utf8(b).unwrap());
        (hints.addr_format, string(hints.source), string(hints.dest))
    };
    let mut hints = Hints::none();
    hints.addr_format = FI_ADDR_STR;
    hints.source = Some(b"fi_sockaddr_in://127.0.0.1:5\0".to_vec());
    hints.dest = Some(b"fi_sockaddr_in://127.0.0.1:6".to_vec());
    let first = CHints::new(hints).ask(NEW).unwrap();
    let expected = (
        FI_ADDR_STR,
        Some("fi_sockaddr_in://127.0.0.1:5\0".to_owned()),
        Some("fi_sockaddr_in://127.0.0.1:6\0".to_owned()),
    );
    assert_eq!(text(&first), expected);
    let second = ask(NEW, None, None, 0, first.0).unwrap();
    assert_eq!(text(&second), expected);

    // As a node, in either address format; then without a service.
    let node = "fi_sockaddr_in://127.0.0.1:7";
    let place = plain(Some(node), None, FI_SOURCE).unwrap();
    assert_eq!((place.format, place.source.0), (FI_SOCKADDR_IN, socket("127.0.0.1:7")));
    let refusal = plain(Some(node), Some("8"), 0).unwrap_err();
    assert_eq!(refusal, "service: wanted 8, offered none beside an FI_ADDR_STR node");
    assert!(plain(Some("fi_shm://x"), None, 0).is_err());
}

#[test]
fn a_place_that_cannot_be_opened_is_not_offered() {
    let place = Place {
        format: FI_SOCKADDR_IN,
        source: Address(socket("203.0.113.77:5")),
        dest: None,
        interface: "nosuch0".to_owned(),
        domain: "nosuch0".to_owned(),
        reason: "",
    };
    let refusal = place::probe(&place, &Config::default()).unwrap_err().to_string();
    assert!(refusal.starts_with("src_addr: wanted a UDP port, offered no endpoint: "), "{refusal}");
}
