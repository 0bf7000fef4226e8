//! Ports of a device, and their addresses (GIDs).

use super::device::OpenDevice;
use super::library::class;
use super::owned::check;
use crate::sys::errno::{Errno, Result};
use rdma_core_sys::{
    _compat_ibv_port_attr, IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2,
    IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE, ibv_gid_entry, ibv_port_attr,
    ibv_query_port_extended,
};
use std::ffi::CString;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// Most GIDs of a device, all ports together: the kernel counts the answer's bytes in 16 bits.
const GIDS_MAX: usize = 2000;
/// `IBV_QPF_GRH_REQUIRED` of a port's flags: virtual functions that share the LID of their device, and Omni-Path with
/// long addresses.
const GRH_REQUIRED: u8 = 1;

/// The network of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LinkLayer {
    InfiniBand,
    Ethernet,
}

/// The attributes of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Port {
    pub(crate) number: u8,
    pub(crate) link: LinkLayer,
    /// It is up, and configured by the subnet manager if it needs one.
    pub(crate) active: bool,
    /// Longest payload of a datagram, bytes.
    pub(crate) mtu: usize,
    /// Bits a second; 0: unknown.
    pub(crate) speed_bps: u64,
    /// InfiniBand only.
    pub(crate) lid: u16,
    /// InfiniBand only: it gets packets with a global routing header only.
    pub(crate) routed: bool,
    /// Entries of its table of partitions.
    pub(crate) partitions: u16,
}

/// An entry of a port's table of partitions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Partition {
    pub(crate) index: u16,
    /// The P_Key. The highest bit marks a full member (InfiniBand 1.7, 10.9); 0: the entry is empty.
    pub(crate) key: u16,
}

/// The encapsulation of packets with a GID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GidKind {
    InfiniBand,
    /// Ethernet frames: not routable.
    RoceV1,
    /// UDP over IP.
    RoceV2,
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Gid {
    pub(crate) index: u8,
    pub(crate) raw: [u8; 16],
    pub(crate) kind: GidKind,
    /// The interface that it is an address of, by its index; 0: unknown, and with InfiniBand.
    pub(crate) interface: u32,
}

impl OpenDevice {
    /// Port `number`, from 1 on. Errors: EINVAL, the driver's.
    pub(crate) fn port(&self, number: u8) -> Result<Port> {
        // SAFETY: all zeroes is a valid ibv_port_attr.
        let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
        let (context, verbs) = (self.context.as_ptr(), self.context.verbs);
        // SAFETY: a live context; both calls fill the structure or its first members, which are those
        // of its older version.
        let rc = unsafe {
            match ibv_query_port_extended(context, number, &mut attr) {
                libc::EOPNOTSUPP => {
                    let attr: *mut _compat_ibv_port_attr = (&raw mut attr).cast();
                    (verbs.query_port)(context, number, attr)
                }
                rc => rc,
            }
        };
        check(rc)?;
        let ethernet = u32::from(attr.link_layer) == IBV_LINK_LAYER_ETHERNET;
        Ok(Port {
            number,
            link: if ethernet { LinkLayer::Ethernet } else { LinkLayer::InfiniBand },
            active: attr.state == IBV_PORT_ACTIVE,
            mtu: mtu(attr.active_mtu),
            speed_bps: speed_bps(attr.active_speed, attr.active_width),
            lid: attr.lid,
            routed: !ethernet && attr.flags & GRH_REQUIRED != 0,
            partitions: attr.pkey_tbl_len,
        })
    }

    /// The table of partitions of `port`.
    pub(crate) fn partitions(&self, port: &Port) -> Vec<Partition> {
        let query = self.context.verbs.query_pkey;
        let entry = |index: u16| {
            let mut key = 0;
            // SAFETY: a live context; the call fills a live local.
            let rc = unsafe { query(self.context.as_ptr(), port.number, index.into(), &mut key) };
            (rc == 0).then(|| Partition { index, key: u16::from_be(key) })
        };
        (0..port.partitions).filter_map(entry).filter(|partition| partition.key != 0).collect()
    }

    /// All valid GIDs of port `number`. Errors: the driver's.
    pub(crate) fn gids(&self, number: u8) -> Result<Vec<Gid>> {
        let Some(query) = self.context.verbs.query_gids else {
            return Ok(self.listed_gids(number));
        };
        // SAFETY: all zeroes is a valid ibv_gid_entry.
        let mut entries: Vec<ibv_gid_entry> = vec![unsafe { std::mem::zeroed() }; GIDS_MAX];
        let size = size_of::<ibv_gid_entry>();
        // SAFETY: a live context; the call fills at most `GIDS_MAX` entries of this size.
        let n = unsafe { query(self.context.as_ptr(), entries.as_mut_ptr(), GIDS_MAX, 0, size) };
        let n = usize::try_from(n).map_err(|_| Errno(i32::try_from(-n).unwrap_or(libc::EIO)))?;
        let of_port = |entry: &&ibv_gid_entry| entry.port_num == u32::from(number);
        Ok(entries.iter().take(n).filter(of_port).filter_map(gid).collect())
    }

    /// The same as the kernel lists them in sysfs, for a library that cannot ask for them.
    fn listed_gids(&self, number: u8) -> Vec<Gid> {
        let port = class().join(self.name()).join(format!("ports/{number}"));
        let read = |what: &str, index: u8| {
            let text = std::fs::read_to_string(port.join(what).join(index.to_string())).ok()?;
            Some(text.trim().to_owned())
        };
        let entry = |index| {
            let raw = Ipv6Addr::from_str(&read("gids", index)?).ok()?.octets();
            let kind = listed_kind(&read("gid_attrs/types", index)?)?;
            let interface = read("gid_attrs/ndevs", index).map_or(0, |name| index_of(&name));
            (raw != [0; 16]).then_some(Gid { index, raw, kind, interface })
        };
        (0..=u8::MAX).filter_map(entry).collect()
    }
}

/// `None` for unknown kinds, and if an address handle has no room for the index.
fn gid(entry: &ibv_gid_entry) -> Option<Gid> {
    let kind = match entry.gid_type {
        IBV_GID_TYPE_IB => GidKind::InfiniBand,
        IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
        IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
        _ => return None,
    };
    // SAFETY: both members of the union are plain bytes.
    let raw = unsafe { entry.gid.raw };
    let (index, interface) = (u8::try_from(entry.gid_index).ok()?, entry.ndev_ifindex);
    Some(Gid { index, raw, kind, interface })
}

/// The kind of a GID as sysfs names it (the kernel's drivers/infiniband/core/cache.c). An InfiniBand port has only those
/// of the first name.
fn listed_kind(text: &str) -> Option<GidKind> {
    match text {
        "IB/RoCE v1" => Some(GidKind::InfiniBand),
        "RoCE v2" => Some(GidKind::RoceV2),
        _ => None,
    }
}

/// The index of the interface `name`; 0: there is none.
fn index_of(name: &str) -> u32 {
    let Ok(name) = CString::new(name) else { return 0 };
    // SAFETY: a C string.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// Bytes of the MTU with this `ibv_mtu` code.
fn mtu(code: u32) -> usize {
    if (1..=5).contains(&code) { 128 << code } else { 0 }
}

/// The speed of a link in bits a second, from its codes (InfiniBand 1.7, PortInfo).
fn speed_bps(speed: u8, width: u8) -> u64 {
    const MBPS: [(u8, u64); 9] = [
        // XDR: its code, 256, has no room in this field.
        (0, 200_000),
        (1, 2_500),
        (2, 5_000),
        (4, 10_000),
        (8, 10_000),
        (16, 14_000),
        (32, 25_000),
        (64, 50_000),
        (128, 100_000),
    ];
    let lane = MBPS.iter().find(|(code, _)| *code == speed).map_or(0, |(_, mbps)| *mbps);
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    lane * lanes * 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_that_sysfs_names() {
        let all = ["IB/RoCE v1", "RoCE v2", ""].map(listed_kind);
        assert_eq!(all, [Some(GidKind::InfiniBand), Some(GidKind::RoceV2), None]);
        assert_eq!((index_of("lo") > 0, index_of("no such"), index_of("\0")), (true, 0, 0));
    }

    #[test]
    fn codes_of_the_specification() {
        assert_eq!([1, 2, 3, 4, 5].map(mtu), [256, 512, 1024, 2048, 4096]);
        assert_eq!((mtu(0), mtu(6)), (0, 0));
        assert_eq!(speed_bps(32, 2), 100_000_000_000);
        assert_eq!(speed_bps(128, 2), 400_000_000_000);
        assert_eq!(speed_bps(1, 1), 2_500_000_000);
        assert_eq!(speed_bps(0, 2), 800_000_000_000);
        assert_eq!((speed_bps(3, 2), speed_bps(32, 0)), (0, 0));
    }
}
