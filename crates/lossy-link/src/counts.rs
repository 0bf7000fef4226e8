//! Counts of the frames that the switch forwarded, lost or changed.

use std::fmt;

/// Counts of frames since the start. Frames without payload (ARP, neighbour discovery) are counted in
/// `forwarded` and `cut` only.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Counts {
    /// Written to a port.
    pub(crate) forwarded: u64,
    /// Payload frames for which a fate was drawn.
    pub(crate) offered: u64,
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
    pub(crate) reordered: u64,
    pub(crate) corrupted: u64,
    pub(crate) forged: u64,
    /// Lost because they were longer than the path carries (`black-hole`), or began a connection (`firewall`).
    pub(crate) swallowed: u64,
    /// Lost because the link was cut.
    pub(crate) cut: u64,
    /// Lost because the queue of a port was full (`rate`).
    pub(crate) overflowed: u64,
    /// Lost because the receiving host's device refused them.
    pub(crate) refused: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} forwarded, {} offered", self.forwarded, self.offered)?;
        for (count, what) in [
            (self.lost, "lost"),
            (self.repeated, "repeated"),
            (self.reordered, "reordered"),
            (self.corrupted, "corrupted"),
            (self.forged, "forged"),
            (self.swallowed, "swallowed"),
            (self.cut, "cut"),
            (self.overflowed, "overflowed"),
            (self.refused, "refused"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}
