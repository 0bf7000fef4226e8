//! The addresses of ports.

use crate::personality::{Link, Port};

/// A port, with its addresses on this host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortView {
    pub(crate) port: &'static Port,
    pub(crate) active: bool,
    pub(crate) lid: u16,
    /// The LID by which other subnets reach it; 0: it has none.
    pub(crate) flid: u16,
    /// Unspecific ones come first, as in the kernel.
    pub(crate) gids: [[u8; 16]; 2],
}

impl PortView {
    pub(crate) fn is_infiniband(&self) -> bool {
        matches!(self.port.link, Link::InfiniBand { .. })
    }

    pub(crate) fn needs_grh(&self) -> bool {
        matches!(self.port.link, Link::InfiniBand { needs_grh: true, .. })
    }

    /// The GIDs by index. InfiniBand has one; RoCE has two addresses, each as version 1 and 2.
    pub(crate) fn gid(&self, index: usize) -> Option<[u8; 16]> {
        let at = if self.is_infiniband() && index > 0 { 2 } else { index / 2 };
        self.gids.get(at).copied()
    }

    /// How many there are.
    pub(crate) fn gid_count(&self) -> usize {
        if self.is_infiniband() { 1 } else { 4 }
    }
}

/// The port on host number `host`.
pub(super) fn view(port: &'static Port, active: bool, host: u8) -> PortView {
    let (lid, gids) = addresses(port, host);
    PortView { port, active, lid, flid: flid(port, host), gids }
}

fn flid(port: &Port, host: u8) -> u16 {
    match port.link {
        Link::InfiniBand { flid, .. } if flid != 0 => flid + u16::from(host),
        _ => 0,
    }
}

/// The LID and the GIDs of a port on host number `host`.
fn addresses(port: &Port, host: u8) -> (u16, [[u8; 16]; 2]) {
    let mut local = [0; 16];
    let (lid, ends) = match port.link {
        Link::InfiniBand { lid: 0, .. } => (0, [1, 0, 0, 0]),
        Link::InfiniBand { lid, .. } => {
            (lid + u16::from(host), [1, port.fabric, lid as u8, lid as u8 + host])
        }
        Link::Ethernet { ip: [a, b, c, d] } => (0, [a, b, c, d + host]),
    };
    match flid(port, host).to_be_bytes() {
        [0, 0] => fill(&mut local, 0, &[0xfe, 0x80]),
        [high, low] => fill(&mut local, 0, &[0xfe, 0xc0, 0, 0, high, low, 0, 1 + host]),
    }
    fill(&mut local, 12, &ends);
    let mut mapped = [0; 16];
    fill(&mut mapped, 10, &[0xff, 0xff]);
    fill(&mut mapped, 12, &ends);
    (lid, [local, mapped])
}

/// The GIDs of a port on host 0 by index, and whether each is of RoCE version 2.
pub(crate) fn gids(port: &Port) -> Vec<([u8; 16], bool)> {
    let (_, [local, mapped]) = addresses(port, 0);
    match port.link {
        Link::InfiniBand { .. } => vec![(local, false)],
        Link::Ethernet { .. } => {
            vec![(local, false), (local, true), (mapped, false), (mapped, true)]
        }
    }
}

fn fill(gid: &mut [u8; 16], at: usize, from: &[u8]) {
    for (to, byte) in gid.iter_mut().skip(at).zip(from) {
        *to = *byte;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_addresses_of_their_own() {
        for personality in crate::personality::ALL {
            for port in personality.devices.iter().flat_map(|device| device.ports) {
                let (one, two) = (view(port, true, 0), view(port, true, 1));
                assert!(
                    port.link == Link::InfiniBand { lid: 0, needs_grh: false, flid: 0 }
                        || one.gids != two.gids
                );
                assert_eq!(one.gid(one.gid_count()), None);
                assert!(one.gid(one.gid_count() - 1).is_some());
            }
        }
    }
}
