//! Which port of which device an endpoint uses, and with which of its addresses: decided from the devices' attributes,
//! so that it can be tested without any.

use super::config::NicName;
use super::spread::Spread;
use crate::sys::few;
use crate::sys::verbs::{Gid, GidKind, LinkLayer, Partition, Port};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// Least MTU that a port must have to be used, bytes.
const MTU_MIN: usize = 1024;

/// A port that might be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Candidate {
    pub(super) device: String,
    pub(super) port: Port,
    pub(super) gids: Vec<Gid>,
    pub(super) partitions: Vec<Partition>,
    /// Distance from the calling processor, 10 is nearest; `None`: unknown.
    pub(super) distance: Option<u32>,
    /// What it shares with the GPU of the calling thread of the way on the bus ([`shared_way`]); `None`: there is no GPU, or it is
    /// unknown.
    ///
    /// [`shared_way`]: crate::sys::topology::shared_way
    pub(super) beside_gpu: Option<u32>,
}

/// A port to use, if it works.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Choice {
    pub(super) device: String,
    pub(super) port: Port,
    pub(super) gid: Gid,
    pub(super) partition: Partition,
    /// Why it was chosen.
    pub(super) reason: String,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, port, gid, .. } = self;
        write!(f, "{device}:{}", port.number)?;
        match port.link {
            LinkLayer::InfiniBand => {
                let partition = self.partition.key;
                write!(f, ", InfiniBand, LID {:#x}, P_Key {partition:#06x}", port.lid)
            }
            LinkLayer::Ethernet => {
                write!(f, ", RoCE v2, GID {} {}", gid.index, Ipv6Addr::from(gid.raw))
            }
        }
    }
}

/// The requirements of an endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish<'a> {
    /// FI_UDRV_NIC; empty: any.
    pub(super) nics: &'a [NicName],
    /// FI_UDRV_PKEY, without the membership; `None`: any.
    pub(super) pkey: Option<u16>,
    /// The endpoint's address, and those of all interfaces of this network namespace.
    pub(super) ip: IpAddr,
    pub(super) own: &'a [IpAddr],
    /// Tells the endpoint's turn, where several ports are equally good.
    pub(super) spread: Spread,
}

/// The ports that fit, best first, and why the others do not. A RoCE port is there once for each address that may work,
/// behind all others with an earlier one.
pub(super) fn choose(candidates: &[Candidate], wish: &Wish<'_>) -> (Vec<Choice>, Vec<String>) {
    let mut fit = Vec::new();
    let mut refused = Vec::new();
    for candidate in candidates {
        let named = wish.nics.iter().any(|nic| names(nic, candidate));
        match judge(candidate, wish, named) {
            Ok(choices) => {
                let near = candidate.distance.unwrap_or(u32::MAX);
                let slow = slowness(candidate.port.speed_bps);
                let far = u32::MAX - candidate.beside_gpu.unwrap_or(0);
                for (nth, (rank, choice)) in choices.into_iter().enumerate() {
                    fit.push(((slow, far, near, nth, rank), choice));
                }
            }
            Err(why) => {
                let Candidate { device, port, .. } = candidate;
                refused.push(format!("{device}:{} {why}", port.number));
            }
        }
    }
    few::sort(&mut fit, |(a, _), (b, _)| a < b);
    // The endpoints of a node take the best ones in turn.
    if let Some(best) = fit.first().map(|(key, _)| *key) {
        let equal = fit.iter().take_while(|(key, _)| *key == best).count();
        if let Some(equal) = fit.get_mut(..equal).filter(|equal| equal.len() > 1) {
            let (of, by) = (equal.len(), wish.spread.reason());
            equal.rotate_left(wish.spread.turn(of));
            if let Some((_, first)) = equal.first_mut() {
                first.reason = format!("{}, the turn of {by} among {of} as good", first.reason);
            }
        }
    }
    let absent = wish.nics.iter().filter(|nic| !candidates.iter().any(|c| names(nic, c)));
    refused.extend(absent.map(|nic| format!("{nic} does not exist")));
    (fit.into_iter().map(|(_, choice)| choice).collect(), refused)
}

fn names(nic: &NicName, candidate: &Candidate) -> bool {
    nic.device == candidate.device && nic.port.is_none_or(|port| port == candidate.port.number)
}

/// Orders ports by speed, the fastest first, and an unknown speed (0) last.
fn slowness(speed_bps: u64) -> u64 {
    u64::MAX - speed_bps
}

/// How a port would be used, and how near that is to the endpoint's address (0 is best), the best way first; or why it
/// cannot be used.
fn judge(
    candidate: &Candidate,
    wish: &Wish<'_>,
    named: bool,
) -> Result<Vec<(u32, Choice)>, &'static str> {
    let Candidate { device, port, gids, partitions, distance, beside_gpu } = candidate;
    if !named && !wish.nics.is_empty() {
        return Err("is not in FI_UDRV_NIC");
    }
    if !named && wish.ip.is_loopback() {
        return Err("is not needed on the loopback interface");
    }
    if !port.active {
        return Err("is not active");
    }
    if port.mtu < MTU_MIN {
        return Err("carries less than 1024 bytes");
    }
    let mut partition = Partition { index: 0, key: FULL_MEMBER | DEFAULT };
    let ways = match port.link {
        LinkLayer::InfiniBand => {
            let gid = gids.iter().find(|gid| gid.kind == GidKind::InfiniBand);
            if port.lid == 0 {
                return Err("has no LID");
            }
            partition = partition_of(partitions, wish.pkey)?;
            let what = if passes_default(partitions, partition, wish.pkey) {
                "InfiniBand, passing over the default partition, where it is a limited member (FI_UDRV_PKEY)"
            } else {
                "InfiniBand"
            };
            vec![(1, *gid.ok_or("has no GID")?, what)]
        }
        LinkLayer::Ethernet => {
            let way = |(same, gid)| match same {
                true => (0, gid, "it has the endpoint's address"),
                false => (2, gid, "it is routable"),
            };
            roce_gids(gids, wish)?.into_iter().map(way).collect()
        }
    };
    let by = if named { "FI_UDRV_NIC names it, " } else { "" };
    let near = distance.map(|distance| format!(", NUMA distance {distance}")).unwrap_or_default();
    let beside = match beside_gpu {
        Some(shared) => format!(", {shared} bridges or ports in common with the GPU"),
        None => String::new(),
    };
    let choice = |(rank, gid, what): (u32, Gid, &str)| {
        let reason = format!("{by}{what}{beside}{near}");
        (rank, Choice { device: device.clone(), port: *port, gid, partition, reason })
    };
    Ok(ways.into_iter().map(choice).collect())
}

/// The bit of a P_Key that marks a full member, and the default partition.
const FULL_MEMBER: u16 = 0x8000;
const DEFAULT: u16 = 0x7fff;

/// The partition of an InfiniBand port to use: the first that it is a full member of, because limited members do not
/// reach each other (InfiniBand 1.7, 10.9.1.2), or the one that the user wants.
fn partition_of(all: &[Partition], wanted: Option<u16>) -> Result<Partition, &'static str> {
    let allowed = |one: &&Partition| wanted.is_none_or(|key| one.key & !FULL_MEMBER == key);
    let limited = |one: &&Partition| one.key & FULL_MEMBER == 0;
    let best = all.iter().filter(allowed).min_by_key(limited);
    best.copied().ok_or(match wanted {
        Some(_) => "is not in the partition of FI_UDRV_PKEY",
        None => "is in no partition",
    })
}

/// Whether a port is used in another partition than the default one only because it is a limited member of that: peers
/// that are full members of it would have been reached there.
fn passes_default(all: &[Partition], chosen: Partition, wanted: Option<u16>) -> bool {
    let full = DEFAULT | FULL_MEMBER;
    let limited = |all: &[Partition]| {
        all.iter().any(|one| one.key == DEFAULT) && !all.iter().any(|one| one.key == full)
    };
    wanted.is_none() && chosen.key & !FULL_MEMBER != DEFAULT && limited(all)
}

/// The addresses of a RoCE port to use, the best first, and whether each is the endpoint's. Link-local ones usually do
/// not work: address handles cannot be made, or do not reach peers behind a router. Nor do those of interfaces in other
/// network namespaces, which the kernel may show as well.
fn roce_gids(gids: &[Gid], wish: &Wish<'_>) -> Result<Vec<(bool, Gid)>, &'static str> {
    let ip_of = |gid: &Gid| {
        let ip = Ipv6Addr::from(gid.raw);
        ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
    };
    let routable = |gid: &&Gid| match ip_of(gid) {
        IpAddr::V4(ip) => !ip.is_link_local() && !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_unicast_link_local() && !ip.is_multicast() && !ip.is_loopback(),
    };
    let is_own = |gid: &Gid| wish.own.contains(&ip_of(gid));
    let here = |gid: &&Gid| gid.interface == 0 || is_own(gid);
    // IPv4 is preferred, unless the endpoint's address is IPv6.
    let family = |gid: &Gid| ip_of(gid).is_ipv4() != wish.ip.is_ipv4();
    let v2 = || gids.iter().filter(|gid| gid.kind == GidKind::RoceV2);
    let same = |gid: &Gid| ip_of(gid) == wish.ip;
    let usable = v2().filter(|gid| same(gid) || routable(gid));
    let mut found: Vec<_> = usable.clone().filter(here).map(|gid| (same(gid), *gid)).collect();
    let key = |(same, gid): &(bool, Gid)| (!same, !is_own(gid), family(gid));
    few::sort(&mut found, |a, b| key(a) < key(b));
    match () {
        () if !found.is_empty() => Ok(found),
        () if usable.clone().next().is_some() => {
            Err("has addresses of other network namespaces only")
        }
        () if v2().next().is_some() => Err("has link-local addresses only"),
        () => Err("has no RoCE v2 address"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(number: u8, link: LinkLayer) -> Port {
        Port {
            number,
            link,
            active: true,
            mtu: 4096,
            speed_bps: 100_000_000_000,
            lid: if link == LinkLayer::InfiniBand { 5 } else { 0 },
            routed: false,
            partitions: 1,
        }
    }

    const MEMBER: Partition = Partition { index: 0, key: 0xffff };

    fn gid(index: u8, ip: &str, kind: GidKind) -> Gid {
        let raw = match ip.parse().unwrap() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        Gid { index, raw, kind, interface: 0 }
    }

    fn roce(device: &str, ip: &str, distance: Option<u32>) -> Candidate {
        let gids = vec![
            gid(0, "fe80::1", GidKind::RoceV1),
            gid(1, "fe80::1", GidKind::RoceV2),
            gid(2, ip, GidKind::RoceV1),
            gid(3, ip, GidKind::RoceV2),
        ];
        let port = port(1, LinkLayer::Ethernet);
        let partitions = vec![MEMBER];
        Candidate { device: device.to_owned(), port, gids, partitions, distance, beside_gpu: None }
    }

    fn infiniband(device: &str, distance: Option<u32>) -> Candidate {
        let gids = vec![gid(0, "fe80::2:3", GidKind::InfiniBand)];
        let port = port(1, LinkLayer::InfiniBand);
        let partitions = vec![MEMBER];
        Candidate { device: device.to_owned(), port, gids, partitions, distance, beside_gpu: None }
    }

    fn spread(rank: u32) -> Spread {
        Spread { local_rank: Some(rank), nth: 0, port: 1 }
    }

    fn wish(ip: &str) -> Wish<'static> {
        Wish { nics: &[], pkey: None, ip: ip.parse().unwrap(), own: &[], spread: spread(0) }
    }

    fn order(candidates: &[Candidate], nics: &str, ip: &str, rank: u32) -> Vec<String> {
        let nics = if nics.is_empty() { Vec::new() } else { NicName::list(nics).unwrap() };
        let wish = Wish { nics: &nics, spread: spread(rank), ..wish(ip) };
        choose(candidates, &wish).0.into_iter().map(|choice| choice.device).collect()
    }

    #[test]
    fn the_fastest_port_comes_first_wherever_the_endpoints_address_is() {
        let mut management = roce("management", "10.0.0.1", Some(10));
        management.port.speed_bps = 25_000_000_000;
        let mut next = infiniband("next", Some(20));
        next.port.speed_bps = 800_000_000_000;
        let mut unknown = roce("unknown", "10.0.0.1", Some(10));
        unknown.port.speed_bps = 0;
        let all = [unknown, management, infiniband("ib", Some(20)), next];
        assert_eq!(order(&all, "", "10.0.0.1", 0), ["next", "ib", "management", "unknown"]);
        assert_eq!(order(&all, "management,ib", "10.0.0.1", 0), ["ib", "management"]);
        assert_eq!(order(&all, "management", "10.0.0.1", 0), ["management"]);
    }

    #[test]
    fn the_first_partition_with_a_full_membership_is_used() {
        let entry = |index, key| Partition { index, key };
        let all = [entry(0, 0x7fff), entry(2, 0x8012), entry(3, 0x0013), entry(4, 0xffff)];
        for (wanted, index) in [(None, 2), (Some(0x7fff), 4), (Some(0x13), 3)] {
            assert_eq!(partition_of(&all, wanted).unwrap().index, index, "{wanted:x?}");
        }
        assert_eq!(partition_of(&all[..1], None), Ok(all[0]), "better than none");
        assert!(!passes_default(&all, all[1], None), "it is a full member as well");
        assert!(!passes_default(&all[..1], all[0], None), "it is used");
        assert!(passes_default(&all[..3], all[1], None));
        assert!(!passes_default(&all[..3], all[1], Some(0x12)), "as the user wants");
        assert!(partition_of(&all, Some(0x14)).is_err() && partition_of(&[], None).is_err());
    }

    #[test]
    fn the_port_with_the_endpoints_address_comes_first_among_equals() {
        let all = [
            roce("far", "10.1.0.1", Some(30)),
            infiniband("ib", Some(30)),
            roce("own", "10.0.0.1", Some(30)),
        ];
        assert_eq!(order(&all, "", "10.0.0.1", 0), ["own", "ib", "far"]);
        assert_eq!(order(&all, "", "10.9.0.1", 0), ["ib", "far", "own"]);
        let best = choose(&all, &wish("10.0.0.1")).0.remove(0);
        assert_eq!(best.gid.index, 3, "the routable RoCE v2 one");
        assert_eq!(best.reason, "it has the endpoint's address, NUMA distance 30");
        assert_eq!(best.to_string(), "own:1, RoCE v2, GID 3 ::ffff:10.0.0.1");
    }

    #[test]
    fn the_nearest_of_equals_and_the_equally_near_in_turn() {
        let all = [
            infiniband("a", Some(20)),
            infiniband("b", Some(10)),
            infiniband("c", None),
            infiniband("d", Some(10)),
        ];
        assert_eq!(order(&all, "", "10.0.0.1", 0), ["b", "d", "a", "c"]);
        assert_eq!(order(&all, "", "10.0.0.1", 1), ["d", "b", "a", "c"]);
        assert_eq!(order(&all, "", "10.0.0.1", 3), ["b", "d", "a", "c"]);
        let wish = Wish { spread: spread(1), ..wish("10.0.0.1") };
        let reason = &choose(&all, &wish).0[0].reason;
        assert_eq!(
            reason,
            "InfiniBand, NUMA distance 10, the turn of local rank 1 among 2 as good"
        );
        assert_eq!(order(&all, "a,c", "10.0.0.1", 1), ["a", "c"], "nearer than the other one");
        assert_eq!(order(&all, "d,b,a", "10.0.0.1", 1), ["d", "b", "a"], "named ones too");
    }

    #[test]
    fn among_equally_fast_ports_that_beside_the_gpu_comes_first() {
        let beside = |name, shared, distance| Candidate {
            beside_gpu: shared,
            ..infiniband(name, Some(distance))
        };
        let mut all = [
            beside("same-node", Some(1), 10),
            beside("same-switch", Some(3), 20),
            beside("other-node", Some(0), 20),
            beside("also-same-switch", Some(3), 20),
        ];
        let expected = ["same-switch", "also-same-switch", "same-node", "other-node"];
        assert_eq!(order(&all, "", "10.0.0.1", 0), expected);
        assert_eq!(order(&all, "", "10.0.0.1", 1)[0], "also-same-switch", "in turn");
        let best = choose(&all, &wish("10.0.0.1")).0.remove(0);
        assert!(best.reason.starts_with("InfiniBand, 3 bridges or ports in common with the GPU,"));
        all[0].port.speed_bps = 800_000_000_000;
        assert_eq!(order(&all, "", "10.0.0.1", 0)[0], "same-node", "it is faster");
    }

    #[test]
    fn named_devices_alone_are_taken_the_nearest_first() {
        let mut all =
            [roce("a", "10.0.0.1", Some(20)), infiniband("b", Some(10)), infiniband("c", None)];
        assert_eq!(order(&all, "a,b", "10.0.0.1", 0), ["b", "a"]);
        assert_eq!(order(&all, "a", "127.0.0.1", 0), ["a"], "on the loopback interface too");
        assert_eq!(order(&all, "", "127.0.0.1", 0), [""; 0]);
        assert_eq!(order(&all, "a:2", "10.0.0.1", 0), [""; 0]);
        all[0].port.number = 2;
        assert_eq!(order(&all, "a:2", "10.0.0.1", 0), ["a"]);
        let nics = NicName::list("a:1,b").unwrap();
        let wish = Wish { nics: &nics, ..wish("10.0.0.1") };
        let refused = choose(&all, &wish).1;
        assert_eq!(
            refused,
            ["a:2 is not in FI_UDRV_NIC", "c:1 is not in FI_UDRV_NIC", "a:1 does not exist"]
        );
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let mut all = vec![infiniband("ok", None); 5];
        all[1].port.active = false;
        all[2].port.mtu = 512;
        all[3].port.lid = 0;
        all[4].gids.clear();
        let mut local = roce("local", "10.0.0.1", None);
        local.gids.truncate(2);
        let mut old = roce("old", "10.0.0.1", None);
        old.gids.retain(|gid| gid.kind == GidKind::RoceV1);
        all.extend([local, old]);
        let (fit, refused) = choose(&all, &wish("10.0.0.1"));
        assert_eq!(fit.len(), 1);
        assert_eq!(
            refused,
            [
                "ok:1 is not active",
                "ok:1 carries less than 1024 bytes",
                "ok:1 has no LID",
                "ok:1 has no GID",
                "local:1 has link-local addresses only",
                "old:1 has no RoCE v2 address"
            ]
        );
    }

    #[test]
    fn addresses_of_this_namespace_alone_are_tried_in_turn() {
        let mut pods = roce("pods", "10.7.0.1", None);
        for (index, ip, interface) in
            [(3, "10.7.0.1", 31), (4, "10.8.0.1", 32), (5, "10.9.0.1", 33), (6, "10.10.0.1", 34)]
        {
            pods.gids.push(Gid { interface, ..gid(index, ip, GidKind::RoceV2) });
        }
        pods.gids.remove(3);
        let own = ["10.9.0.1".parse().unwrap(), "10.8.0.1".parse().unwrap()];
        let of = |own: &[IpAddr], ip: &str| {
            let (fit, refused) = choose(&[pods.clone()], &Wish { own, ..wish(ip) });
            (fit.iter().map(|choice| choice.gid.index).collect::<Vec<_>>(), refused)
        };
        assert_eq!(of(&own, "10.9.0.1"), (vec![5, 4], vec![]));
        assert_eq!(of(&own, "10.1.0.1"), (vec![4, 5], vec![]));
        let none = ["pods:1 has addresses of other network namespaces only".to_owned()];
        assert_eq!(of(&[], "10.1.0.1"), (vec![], none.to_vec()));
    }

    #[test]
    fn the_family_of_the_endpoint_comes_first() {
        let mut both = roce("both", "10.7.0.1", None);
        both.gids.push(gid(4, "fd00::7", GidKind::RoceV2));
        for (ip, index) in [("10.0.0.1", 3), ("fd00::1", 4), ("fd00::7", 4), ("10.7.0.1", 3)] {
            assert_eq!(roce_gids(&both.gids, &wish(ip)).unwrap()[0].1.index, index, "{ip}");
        }
    }
}
