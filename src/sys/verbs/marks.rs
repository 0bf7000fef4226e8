//! How packets of a device are marked, for networks that treat them by class, and for routers that choose among paths.

/// The class of packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Marks {
    /// InfiniBand's service level; with RoCE the priority of the VLAN tag. 0 to 15.
    pub(crate) service_level: u8,
    /// The traffic class of a global routing header, the TOS byte of RoCE packets; its two lowest bits do not matter.
    pub(crate) traffic_class: u8,
}

/// Packets may be marked instead of dropped (ECN, RFC 3168): ECT(0).
const ECN_CAPABLE: u8 = 2;
/// A flow label has 20 bits.
const LABEL_BITS: u32 = 20;

impl Marks {
    /// The traffic class with ECT(0).
    pub(super) fn class(self) -> u8 {
        self.traffic_class & !3 | ECN_CAPABLE
    }
}

/// A flow label for packets from one queue pair to another, or to all (0), never 0. RoCE devices make the UDP source
/// port from it, by which routers choose among equal paths. The same for both directions of a connection.
pub(crate) fn flow_label(from: u32, to: u32) -> u32 {
    // Multiplicative hashing (Knuth, 6.4): the numbers of queue pairs are small and follow each other.
    let mixed = (u64::from(from.min(to)) << 32 | u64::from(from.max(to)))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> (u64::BITS - LABEL_BITS)) as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn classes_are_ecn_capable() {
        let class = |traffic_class| Marks { service_level: 0, traffic_class }.class();
        assert_eq!([0, 106, 0x68, 0xff].map(class), [2, 106, 106, 0xfe]);
    }

    #[test]
    fn labels_of_queue_pairs_differ_and_are_the_same_in_both_directions() {
        let labels: HashSet<_> = (0x11..0x111).map(|from| flow_label(from, 0)).collect();
        assert!(labels.len() > 250, "{}", labels.len());
        assert!(labels.iter().all(|label| (1..1 << LABEL_BITS).contains(label)));
        assert_eq!(flow_label(7, 9), flow_label(9, 7));
        assert_eq!(flow_label(0, 0), 1);
    }
}
