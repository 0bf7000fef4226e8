//! Network conditions.

use super::network::Slot;
use super::rng::Chance;

/// Losses in bursts: a datagram begins a time of at most `length_ns` in which each one is lost with this probability.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Burst {
    pub(super) begins: Chance,
    pub(super) length_ns: u64,
    pub(super) loss: Chance,
}

/// One direction between two slots.
#[derive(Clone, Debug)]
pub(super) struct Path {
    pub(super) delay_ns: u64,
    /// A random delay of up to this is added.
    pub(super) jitter_ns: u64,
    pub(super) loss: Chance,
    pub(super) burst: Burst,
    pub(super) duplicate: Chance,
    /// A datagram is delayed by up to `reorder_ns` more.
    pub(super) reorder: Chance,
    pub(super) reorder_ns: u64,
    /// Bits flip, or the end is cut off.
    pub(super) damage: Chance,
    /// Longer datagrams vanish, unless they are fragmented; bytes.
    pub(super) carries: usize,
    /// They vanish even if fragmented.
    pub(super) uncut: bool,
}

/// The conditions of the whole network.
#[derive(Clone, Debug)]
pub(super) struct Weather {
    pub(super) path: Path,
    /// Paths that differ, by sender and receiver.
    pub(super) others: Vec<(Slot, Slot, Path)>,
    /// Picoseconds that a byte takes at every interface and port; 0: none.
    pub(super) byte_ps: u64,
    /// Bytes queued at an interface before it refuses more.
    pub(super) interface_bytes: u64,
    /// Bytes queued at a switch's port before it drops, and before it marks.
    pub(super) port_bytes: u64,
    pub(super) mark_bytes: u64,
    /// Bytes queued in a receiver's socket.
    pub(super) socket_bytes: u64,
    /// How often an interface refuses without a reason.
    pub(super) again: Chance,
}

impl Weather {
    pub(super) fn each_path(&mut self, each: impl FnMut(&mut Path)) {
        let others = self.others.iter_mut().map(|(_, _, path)| path);
        others.chain([&mut self.path]).for_each(each);
    }

    /// 10 Gbit/s, a round trip of 40 µs, nothing lost.
    pub(super) fn fair() -> Self {
        Self {
            path: Path {
                delay_ns: 20_000,
                jitter_ns: 0,
                loss: Chance::NEVER,
                burst: Burst::default(),
                duplicate: Chance::NEVER,
                reorder: Chance::NEVER,
                reorder_ns: 0,
                damage: Chance::NEVER,
                carries: usize::MAX,
                uncut: false,
            },
            others: Vec::new(),
            byte_ps: 800,
            interface_bytes: 1 << 20,
            port_bytes: 4 << 20,
            mark_bytes: u64::MAX,
            socket_bytes: 4 << 20,
            again: Chance::NEVER,
        }
    }
}

/// A partition: for a while nothing passes from any of `from` to any of `to` (sets of slots, a bit each).
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) start: u64,
    pub(super) end: u64,
}
