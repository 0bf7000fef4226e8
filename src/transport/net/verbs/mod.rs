//! InfiniBand and RoCE: datagrams through a UD queue pair, for peers that it reaches.
//!
//! The socket stays. Its address is the one that peers know, and it carries handshakes; behind those both sides append
//! their queue-pair addresses, and validate the path. Everything that cannot go through the device goes through the
//! socket.

mod allocations;
mod aside;
mod candidates;
mod choice;
pub(crate) mod config;
mod found;
mod gpu;
mod handles;
mod hybrid;
mod introduction;
mod link;
mod named;
mod opening;
mod rails;
mod rc;
mod recovery;
mod registrar;
mod silence;
mod spot;
mod spread;
mod upkeep;
mod ways;

#[cfg(test)]
pub(crate) use hybrid::RdmaCounts;
pub(crate) use hybrid::{HybridLink, Rdma};
pub(super) use named::{addresses_of, with_device};

use crate::sys::net::{Nic, RdmaFacts, interfaces};
use crate::sys::per_process::PerProcess;
use crate::sys::verbs::{
    AhSettings, Device, DeviceList, GidKind, IpVersion, LinkLayer, Marks, OpenDevice, Port, UdPort,
    UdSettings, flow_label, names, present,
};
use crate::sys::{Errno, clock, process};
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::JobKey;
use crate::transport::net::bulk::Bulk;
use crate::transport::net::bulk::ways::Ways;
use crate::transport::net::network::Network;
use crate::transport::net::rv;
use crate::transport::net::rv::config::RvPolicy;
use candidates::{Listed, listed, opened};
use choice::{Candidate, Choice, Wish, choose};
use config::{NicName, RdmaPolicy, RdmaSettings};
use introduction::{Place, qkey};
use link::UdLink;
use spot::{At, Spot};
use spread::Spread;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::PoisonError;

/// Send and receive slots of an endpoint; a fast port fills fewer before a processor has looked.
const SEND_SLOTS: u32 = 256;
const RECEIVE_SLOTS: u32 = 1024;
const FAST_SLOTS: u32 = 4096;
/// From this speed on a port is fast, bits a second.
const FAST_BPS: u64 = 100_000_000_000;
/// The usual traffic class of lossless RoCE: DSCP 26, which switches map to the priority of RDMA.
const ROCE_CLASS: u8 = 106;
/// Slots of a queue pair that is only opened to test a device.
const TRIED_SLOTS: u32 = 64;
/// How long a device found for `fi_nic` counts as present, nanoseconds.
const OFFER_NS: u64 = 5_000_000_000;

/// The device's parts of an endpoint: its datagrams, and its bulk path.
pub(crate) type Parts = (Box<Rdma>, Option<Box<dyn Bulk>>);

/// Opens the device of the endpoint `me`. `None`: not wanted, or none works and none is required. Errors: ENODEV, if
/// one is required; EMFILE, ENFILE.
pub(crate) fn open(
    settings: &RdmaSettings,
    me: &Address,
    key: &JobKey,
) -> Result<Option<Parts>, Errno> {
    let spread = Spread::new(me.port(), true);
    match found_by(settings, me, spread, key)? {
        Some(found) => through(*found, settings, me, spread, key).map(Some),
        None => {
            report_unused(settings, me);
            without_device(settings).map(|()| None)
        }
    }
}

/// How many slots a queue pair at a port has: to send, and to receive.
type Slots = fn(&Port) -> (u32, u32);

/// Slots of an endpoint on `port`.
fn working_slots(port: &Port) -> (u32, u32) {
    (SEND_SLOTS, if port.speed_bps >= FAST_BPS { FAST_SLOTS } else { RECEIVE_SLOTS })
}

/// A function of its own, like the next one: both take much stack.
#[inline(never)]
fn found_by(
    settings: &RdmaSettings,
    me: &Address,
    spread: Spread,
    key: &JobKey,
) -> Result<Option<Box<Found>>, Errno> {
    Ok(first_that_works(settings, me, spread, qkey(key), working_slots)?.map(Box::new))
}

#[inline(never)]
fn through(
    found: Found,
    settings: &RdmaSettings,
    me: &Address,
    spread: Spread,
    key: &JobKey,
) -> Result<Parts, Errno> {
    let made = make(found);
    let spot = Spot::default();
    let (here, place) = (made.at.here(key), made.at.place);
    let (now_at, home) = (spot.clone(), here.clone());
    let at_home = Box::new(move || {
        let now_at = now_at.lock().unwrap_or_else(PoisonError::into_inner);
        now_at.as_ref().is_some_and(|at| at.is(&home))
    });
    let rv = rv::open(settings.rv, &here, (place.network, place.mtu), at_home)?;
    // The module takes memory of the host only, and may carry any message where it is.
    let settings = RdmaSettings { gpus: settings.gpus && rv.is_none(), ..settings.clone() };
    let bulk = Ways::of(rv, rc::open(&spot, &settings)?)?;
    let rdma = Box::new(Rdma::new(made, spot, settings, spread, *key, *me)?);
    Ok((rdma, bulk))
}

/// The same for an endpoint whose queue pair broke. Error: why it failed.
fn reopen(
    settings: &RdmaSettings,
    me: &Address,
    spread: Spread,
    key: &JobKey,
) -> Result<Made, String> {
    let (found, refused) = if present() {
        search(settings, me, spread, qkey(key), working_slots)
    } else {
        (None, vec![])
    };
    found.map(make).ok_or_else(|| reasons(&refused))
}

/// A queue pair and its port.
struct Made {
    /// `None`: the device has no UD queue pairs.
    link: Option<UdLink>,
    at: At,
}

fn make(found: Found) -> Made {
    let Found { choice, at, port, .. } = found;
    let Some(port) = port else {
        log::info(format_args!(
            "RDMA through {choice}: {}; it has no UD queue pairs, so only long messages and one-sided operations go there",
            choice.reason
        ));
        return Made { link: None, at };
    };
    let (sends, completions) = port.is_extended();
    let call = |newer, new, old| if newer { new } else { old };
    log::info(format_args!(
        "RDMA through {choice}: {}; queue pair {:#x}, datagrams of {} bytes ({} inline), {} slots to receive; {}, {}",
        choice.reason,
        port.number(),
        at.place.mtu,
        port.inline_max(),
        port.settings().receive_slots,
        call(sends, "ibv_wr_start", "ibv_post_send"),
        call(completions, "ibv_start_poll", "ibv_poll_cq"),
    ));
    let link = UdLink::new(port, at.place, (at.gid_index, at.marks), at.device.is_threads());
    Made { link: Some(link), at }
}

fn reasons(refused: &[String]) -> String {
    if refused.is_empty() { "no RDMA device".to_owned() } else { refused.join("; ") }
}

/// See [`crate::transport::Transport::device_at`]. Errors: ENODEV, if one is required.
pub(super) fn device_at(settings: &RdmaSettings, ip: IpAddr) -> Result<Option<Nic>, Errno> {
    /// The last result: when, and for which settings and address. An application and libfabric's layering providers ask
    /// many times, and opening a device takes time.
    type Last = (u64, RdmaSettings, IpAddr, Option<Nic>);
    static LAST: PerProcess<Option<Last>> = PerProcess::new();
    let now = clock::now_ns();
    let mut last = LAST.lock();
    if let Some((at, for_settings, for_ip, nic)) = &*last {
        if now.saturating_sub(*at) < OFFER_NS && for_settings == settings && *for_ip == ip {
            return Ok(nic.clone());
        }
    }
    let nic = find_at(settings, ip)?;
    *last = Some((now, settings.clone(), ip, nic.clone()));
    Ok(nic)
}

fn find_at(settings: &RdmaSettings, ip: IpAddr) -> Result<Option<Nic>, Errno> {
    let me = Address(std::net::SocketAddr::new(ip, 0));
    let spread = Spread::new(0, false);
    let found = first_that_works(settings, &me, spread, 1, |_| (TRIED_SLOTS, TRIED_SLOTS))?;
    let Some(Found { choice, at: At { device, .. }, others, .. }) = found else {
        return without_device(settings).map(|()| None);
    };
    log::info(format_args!("RDMA through {choice}: {}", choice.reason));
    for other in others {
        log::info(format_args!("RDMA device {other}"));
    }
    rv::check(settings.rv)?;
    let facts = device.facts()?;
    let infiniband = choice.port.link == LinkLayer::InfiniBand;
    Ok(Some(Nic {
        name: device.name().to_owned(),
        driver: facts.driver,
        firmware: facts.firmware,
        pci: facts.pci,
        vendor_id: facts.vendor_id,
        device_id: facts.device_id,
        mac: None,
        mtu: u32::try_from(choice.port.mtu).ok(),
        speed_bps: Some(choice.port.speed_bps).filter(|speed| *speed > 0),
        running: Some(choice.port.active),
        rdma: Some(RdmaFacts {
            version: facts.version,
            address: Ipv6Addr::from(choice.gid.raw).to_string(),
            network: if infiniband { "InfiniBand" } else { "Ethernet" },
        }),
    }))
}

/// There is no device. Errors: ENODEV, if the rv module is required, which needs one.
fn without_device(settings: &RdmaSettings) -> Result<(), Errno> {
    if settings.rv == RvPolicy::Require {
        log::error(format_args!("FI_UDRV_RV=require cannot be met: no RDMA device is used"));
        return Err(Errno(libc::ENODEV));
    }
    Ok(())
}

/// A device that works.
struct Found {
    choice: Choice,
    at: At,
    /// `None`: it has no UD queue pairs.
    port: Option<UdPort>,
    /// The other ports, each with a reason.
    others: Vec<String>,
}

/// How packets of `port` are marked.
fn marks_of(settings: &RdmaSettings, device: &OpenDevice, port: &Port) -> Marks {
    let of_port = || device.traffic_class(port.number).unwrap_or(ROCE_CLASS);
    let traffic_class = match port.link {
        LinkLayer::Ethernet => settings.traffic_class.unwrap_or_else(of_port),
        LinkLayer::InfiniBand => settings.traffic_class.unwrap_or(0),
    };
    Marks { service_level: settings.service_level, traffic_class }
}

fn first_that_works(
    settings: &RdmaSettings,
    me: &Address,
    spread: Spread,
    qkey: u32,
    slots: Slots,
) -> Result<Option<Found>, Errno> {
    if settings.policy == RdmaPolicy::Off {
        return Ok(None);
    }
    let (found, refused) =
        if present() { search(settings, me, spread, qkey, slots) } else { (None, vec![]) };
    if let Some(found) = found {
        return Ok(Some(Found { others: refused, ..found }));
    }
    let what = reasons(&refused);
    if settings.policy == RdmaPolicy::Require {
        log::error(format_args!("FI_UDRV_RDMA=require cannot be met at {me}: {what}"));
        return Err(Errno(libc::ENODEV));
    }
    if !(settings.nics.is_empty() && refused.is_empty()) {
        log::info(format_args!("no RDMA at {me}: {what}"));
    }
    Ok(None)
}

/// An endpoint opens without a device, although the user has named some. At a loopback address none is needed.
#[cold]
fn report_unused(settings: &RdmaSettings, me: &Address) {
    if let Some(nics) = missed(settings, me) {
        log::limited!(
            node: log::number_of(&nics),
            "FI_UDRV_NIC={nics}: none of them is used at {me}, and messages to other nodes go over UDP; {}",
            match names().join(", ").as_str() {
                "" => "this node has no RDMA device".to_owned(),
                there => format!("this node has {there}; FI_UDRV_LOG=info says why"),
            }
        );
    }
}

/// The devices that the user has named, if an endpoint at `me` should have one of them.
fn missed(settings: &RdmaSettings, me: &Address) -> Option<String> {
    let is_off = settings.policy == RdmaPolicy::Off;
    if is_off || settings.nics.is_empty() || me.0.ip().to_canonical().is_loopback() {
        return None;
    }
    let nics: Vec<String> = settings.nics.iter().map(ToString::to_string).collect();
    Some(nics.join(","))
}

fn search(
    settings: &RdmaSettings,
    me: &Address,
    spread: Spread,
    qkey: u32,
    slots: Slots,
) -> (Option<Found>, Vec<String>) {
    if settings.nics.is_empty() && me.0.ip().is_loopback() {
        let unneeded = |name| format!("{name} is not needed on the loopback interface");
        return (None, names().into_iter().map(unneeded).collect());
    }
    let list = match DeviceList::new() {
        Ok(list) => list,
        Err(errno) => return (None, vec![format!("RDMA devices cannot be listed: {errno}")]),
    };
    let Listed { mut tiers, refused } = listed(&list, &settings.nics);
    if tiers.is_empty() {
        tiers.push(Vec::new());
    }
    let has = |tier: &[Device<'_>], nic: &NicName| tier.iter().any(|it| it.name() == nic.device);
    let mut found = None;
    let mut search = Search { settings, me, spread, qkey, failed: None, connecting: None, refused };
    for (nth, tier) in tiers.iter().enumerate() {
        if found.is_some() {
            let slower = tier.iter().map(|device| format!("{} is slower", device.name()));
            search.refused.extend(slower);
            continue;
        }
        // A name in FI_UDRV_NIC that no device has is reported once, with the first tier.
        let nowhere = |nic: &NicName| nth == 0 && !tiers.iter().any(|tier| has(tier, nic));
        let counts = |nic: &&NicName| has(tier, nic) || nowhere(nic);
        let nics: Vec<NicName> = settings.nics.iter().filter(counts).cloned().collect();
        found = search.in_tier(tier, &nics, slots);
    }
    search.end(found)
}

/// A search for a port that works.
struct Search<'a> {
    settings: &'a RdmaSettings,
    me: &'a Address,
    spread: Spread,
    qkey: u32,
    /// The first failure: its errno, and in words.
    failed: Option<(i32, String)>,
    /// The first port that has only connections: one with datagrams is preferred, also if it is slower.
    connecting: Option<Found>,
    /// Why ports are not used.
    refused: Vec<String>,
}

impl Search<'_> {
    /// Among the ports of the devices `tier`, of which `nics` are wanted.
    fn in_tier(&mut self, tier: &[Device<'_>], nics: &[NicName], slots: Slots) -> Option<Found> {
        let settings = self.settings;
        let devices = opened(tier, &mut self.refused);
        let list: Vec<Candidate> = devices.iter().map(|(_, candidate)| candidate.clone()).collect();
        let own: Vec<IpAddr> = interfaces().into_iter().map(|interface| interface.ip).collect();
        let (pkey, ip, spread) = (settings.pkey, self.me.0.ip(), self.spread);
        let (choices, unfit) = choose(&list, &Wish { nics, pkey, ip, own: &own, spread });
        self.refused.extend(unfit);
        let mut choices = choices.into_iter();
        while let Some(choice) = choices.next() {
            let device = devices.iter().find(|(device, _)| device.name() == choice.device);
            let Some((device, _)) = device else { continue };
            let at = at_of(&choice, device, marks_of(settings, device, &choice.port));
            if let Some(found) = self.at(at, choice, slots) {
                let unused = choices.map(|it| format!("{it} could be used too: {}", it.reason));
                self.refused.extend(unused);
                return Some(found);
            }
        }
        None
    }

    /// At the port of `choice`, if it works and has datagrams.
    fn at(&mut self, mut at: At, choice: Choice, slots: Slots) -> Option<Found> {
        let (cause, why) = match open_at(&at, &choice, self.qkey, slots(&choice.port)) {
            Ok(port) => {
                at.place.number = port.number();
                return Some(Found { choice, at, port: Some(port), others: Vec::new() });
            }
            Err(errno) if has_no_kind(errno) && self.connecting.is_none() => {
                match rc::connects(&at, self.settings) {
                    Ok(()) => {
                        let found = Found { choice, at, port: None, others: Vec::new() };
                        self.connecting = Some(found);
                        return None;
                    }
                    Err(other) => {
                        (errno, format!("no UD queue pairs ({errno}), and no RC ones ({other})"))
                    }
                }
            }
            Err(errno) => (errno, registrar::reason(errno, process::locked_memory_limit())),
        };
        self.failed.get_or_insert_with(|| (cause.0, format!("{choice} ({why})")));
        self.refused.push(format!("{choice} does not work: {why}"));
        None
    }

    /// The result, and why other ports are not used.
    fn end(self, found: Option<Found>) -> (Option<Found>, Vec<String>) {
        let found = found.or(self.connecting);
        if let Some((cause, what)) = self.failed.filter(|_| found.is_none()) {
            log::limited!(
                cause: cause,
                "no RDMA through {what}: data goes over UDP, which is slower; FI_UDRV_RDMA=off says that this is wanted"
            );
        }
        (found, self.refused)
    }
}

/// Whether `errno` is that of ibv_create_qp(3) for a kind that the driver does not have.
fn has_no_kind(errno: Errno) -> bool {
    matches!(errno.0, libc::EINVAL | libc::EOPNOTSUPP)
}

/// Opens a queue pair there, and tests an address handle for its own address, as for a peer's.
fn open_at(
    at: &At,
    choice: &Choice,
    qkey: u32,
    (send_slots, receive_slots): (u32, u32),
) -> Result<UdPort, Errno> {
    let gid = choice.gid;
    let roce = gid.kind == GidKind::RoceV2;
    let v4 = Ipv6Addr::from(gid.raw).to_ipv4_mapped().is_some();
    let port = UdPort::open(
        &at.device,
        UdSettings {
            port: choice.port.number,
            pkey_index: choice.partition.index,
            ip: roce.then_some(if v4 { IpVersion::V4 } else { IpVersion::V6 }),
            mtu: choice.port.mtu,
            qkey,
            send_slots,
            receive_slots,
            newer: true,
        },
    )?;
    port.addresses().make(&AhSettings {
        port: choice.port.number,
        gid: (roce || choice.port.routed).then_some((gid.raw, gid.index)),
        lid: choice.port.lid,
        marks: at.marks,
        flow_label: flow_label(port.number(), 0),
    })?;
    Ok(port)
}

/// The port of `choice`, before it has a queue pair.
fn at_of(choice: &Choice, device: &OpenDevice, marks: Marks) -> At {
    let network = match choice.port.link {
        LinkLayer::InfiniBand => {
            Network::InfiniBand { pkey: choice.partition.key, routed: choice.port.routed }
        }
        LinkLayer::Ethernet => Network::Roce,
    };
    let mtu = u16::try_from(choice.port.mtu).unwrap_or(u16::MAX);
    let place = Place { network, mtu, number: 0, lid: choice.port.lid, gid: choice.gid.raw };
    let (gid_index, pkey_index) = (choice.gid.index, choice.partition.index);
    At { device: device.clone(), port: choice.port, gid_index, pkey_index, marks, place }
}

#[cfg(test)]
mod tests;
