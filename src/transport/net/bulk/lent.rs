//! Remote buffers (windows) that are advertised to peers for PUT rendezvous. Each has a slot, whose number and
//! generation come back as the immediate of the write that fills it.

use crate::telemetry::log;
use crate::transport::{PeerId, Prepared, Registered};

/// Bits of an immediate for the slot's number, and above them for its generation. The rest is unused: the kernel's rv
/// module needs the upper 9 bits.
const INDEX_BITS: u32 = 12;
const GENERATION_BITS: u32 = 11;

/// Most remote buffers that can be advertised at the same time.
pub(crate) const SLOTS_MAX: usize = 1 << INDEX_BITS;

/// Most remote buffers that are advertised to one peer at a time.
pub(crate) const PEER_WINDOWS: u32 = 32;
/// How long all remote buffers may be with peers that fill none of them, nanoseconds. Then no message waits for one:
/// nothing says when such a peer computes no more.
const STILL_NS: u64 = 100_000_000;

/// A remote buffer that a peer may write.
pub(crate) struct Window<L> {
    pub(crate) peer: PeerId,
    pub(crate) token: u64,
    /// Bytes.
    pub(crate) len: usize,
    /// Its registration, which ends with it.
    pub(crate) lease: L,
}

struct Slot<L> {
    generation: u32,
    window: Option<Window<L>>,
}

/// The remote buffers that an endpoint has advertised.
pub(crate) struct Lent<L> {
    slots: Vec<Slot<L>>,
    free: Vec<u32>,
    limit: usize,
    /// Since one came back: for how long one more was refused, and when last, nanoseconds.
    refused: Option<(u64, u64)>,
}

impl<L> Lent<L> {
    /// At most `limit` at the same time, and at most [`SLOTS_MAX`].
    pub(crate) fn new(limit: usize) -> Self {
        let limit = limit.min(SLOTS_MAX);
        Self { slots: Vec::new(), free: Vec::new(), limit, refused: None }
    }

    /// Remote buffers that are advertised now.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.limit
    }

    /// The answer to a peer with `theirs` remote buffers if it can have no further one at `now`.
    pub(crate) fn refusal(&mut self, theirs: u32, now: u64) -> Option<Registered> {
        if theirs >= PEER_WINDOWS {
            return Some(Registered::Later);
        }
        if !self.is_full() {
            return None;
        }
        // While this process is away, it does not notice what comes back: little of that time counts.
        let (still, last) = self.refused.unwrap_or((0, now));
        let still = still.saturating_add(now.saturating_sub(last).min(STILL_NS / 4));
        self.refused = Some((still, now));
        if still < STILL_NS {
            return Some(Registered::Later);
        }
        log::limited!(
            "all {} remote buffers are with peers that do not write now: further long messages go as datagrams until they do",
            self.limit
        );
        Some(Registered::No)
    }

    /// Whether [`Self::refusal`] gives no answer, or which.
    pub(crate) fn room(&mut self, theirs: u32, now: u64) -> Prepared {
        match self.refusal(theirs, now) {
            None => Prepared::Ready,
            Some(Registered::Later) => Prepared::Later,
            Some(_) => Prepared::No,
        }
    }

    /// Adds a remote buffer. Returns its immediate; `None` when the limit is reached.
    pub(crate) fn insert(&mut self, window: Window<L>) -> Option<u32> {
        if self.is_full() {
            return None;
        }
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot { generation: 0, window: None });
                u32::try_from(self.slots.len() - 1).ok()?
            }
        };
        let slot = self.slots.get_mut(index as usize)?;
        slot.window = Some(window);
        Some(slot.generation << INDEX_BITS | index)
    }

    /// Removes the buffer of `peer` with this immediate; `None`: the peer has none such, or no longer.
    pub(crate) fn remove(&mut self, peer: PeerId, immediate: u32) -> Option<Window<L>> {
        let index = immediate & ((1 << INDEX_BITS) - 1);
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation != immediate >> INDEX_BITS {
            return None;
        }
        let window = slot.window.take_if(|window| window.peer == peer)?;
        slot.generation = (slot.generation + 1) & ((1 << GENERATION_BITS) - 1);
        self.free.push(index);
        self.refused = None;
        Some(window)
    }

    /// The remote buffer with this immediate, of any peer.
    pub(crate) fn get(&self, immediate: u32) -> Option<&Window<L>> {
        let index = immediate & ((1 << INDEX_BITS) - 1);
        let slot = self.slots.get(index as usize)?;
        slot.window.as_ref().filter(|_| slot.generation == immediate >> INDEX_BITS)
    }

    /// All remote buffers.
    pub(crate) fn windows(&self) -> impl Iterator<Item = &Window<L>> {
        self.slots.iter().filter_map(|slot| slot.window.as_ref())
    }

    /// Removes all remote buffers of `peer`.
    pub(crate) fn remove_all(&mut self, peer: PeerId) -> Vec<Window<L>> {
        let of_peer = |(index, slot): (usize, &Slot<L>)| {
            let window = slot.window.as_ref().filter(|window| window.peer == peer);
            window.map(|_| slot.generation << INDEX_BITS | index as u32)
        };
        let theirs: Vec<u32> = self.slots.iter().enumerate().filter_map(of_peer).collect();
        theirs.into_iter().filter_map(|immediate| self.remove(peer, immediate)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(peer: u32, token: u64) -> Window<()> {
        Window { peer: PeerId(peer), token, len: 1, lease: () }
    }

    #[test]
    fn an_immediate_names_one_window_of_one_peer_once() {
        let mut lent = Lent::new(2);
        let first = lent.insert(window(1, 10)).unwrap();
        let second = lent.insert(window(2, 20)).unwrap();
        assert!(lent.is_full() && lent.insert(window(1, 11)).is_none());
        assert!(lent.remove(PeerId(2), first).is_none(), "it is another one's");
        assert_eq!(lent.get(second).map(|window| window.peer), Some(PeerId(2)));
        assert_eq!(lent.windows().map(|window| window.token).sum::<u64>(), 30);
        assert_eq!(lent.remove(PeerId(1), first).unwrap().token, 10);
        assert!(lent.remove(PeerId(1), first).is_none(), "only once");
        let third = lent.insert(window(1, 12)).unwrap();
        assert_ne!(first, third, "the slot is the same, the generation is not");
        assert!(lent.remove(PeerId(1), first).is_none());
        assert_eq!(lent.remove_all(PeerId(2)).len(), 1);
        assert!(lent.remove(PeerId(2), second).is_none());
        assert_eq!(lent.len(), 1);
        for wrong in [u32::MAX, 1 << 31, 5] {
            assert!(lent.remove(PeerId(1), wrong).is_none() && lent.get(wrong).is_none());
        }
    }

    #[test]
    fn nothing_waits_for_buffers_that_do_not_come_back() {
        let mut lent = Lent::new(1);
        assert_eq!(lent.refusal(PEER_WINDOWS - 1, 0), None);
        let mut slot = lent.insert(window(1, 10)).unwrap();
        let (later, no) = (Some(Registered::Later), Some(Registered::No));
        // Time away counts as little as a short step.
        for (from, step) in
            [(7, STILL_NS / 4), (9 * STILL_NS, STILL_NS), (90 * STILL_NS, u64::MAX / 8)]
        {
            let answers = [0, 1, 2, 3, 4].map(|n| lent.refusal(0, from + n * step));
            assert_eq!(answers, [later, later, later, later, no], "every {step} ns");
            assert_eq!(lent.refusal(PEER_WINDOWS, from), later, "its own may come back");
            lent.remove(PeerId(1), slot).unwrap();
            slot = lent.insert(window(1, 11)).unwrap();
        }
        assert_eq!(lent.refusal(0, 100 * STILL_NS), later, "one came back");
        assert_eq!(lent.room(0, 100 * STILL_NS), Prepared::Later);
        lent.remove(PeerId(1), slot).unwrap();
        let room = [PEER_WINDOWS - 1, PEER_WINDOWS].map(|theirs| lent.room(theirs, 0));
        assert_eq!(room, [Prepared::Ready, Prepared::Later]);
    }

    #[test]
    fn immediates_leave_the_upper_bits_free() {
        let mut lent = Lent::new(usize::MAX);
        for n in 0..SLOTS_MAX {
            assert!(lent.insert(window(0, n as u64)).unwrap() >> 23 == 0);
        }
        assert!(lent.insert(window(0, 0)).is_none());
        for _ in 0..3 * (1 << GENERATION_BITS) {
            lent.remove_all(PeerId(1));
            let window = lent.remove_all(PeerId(0)).pop().unwrap();
            assert!(lent.insert(window).unwrap() >> 23 == 0);
        }
    }
}
