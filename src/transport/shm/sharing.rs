//! Split copies over a link: the receiver reads chunks of a message, the sender writes others.

use super::inbound::Inbound;
use super::layout::{CELL, CELLS, LAVISH, PIECE_MAX};
use super::state::Shm;
use crate::memory::{MAX_SEGMENTS, SegmentList};
use crate::sys::cma::Range;
use crate::sys::shared_memory::SharedMemory;
use crate::transport::share::{Assisted, Cell, CellTable, Share, Taken};
use crate::transport::{PeerId, Sharing, piece_of};

/// Longest message sent unsolicited, unless FI_UDRV_PUSH_MAX says otherwise, bytes.
const PUSH_MAX: usize = 1024 * 1024;
/// Shorter messages are copied by the receiver alone, unless FI_UDRV_SHARE_MIN says otherwise, bytes.
const SHARE_MIN: usize = 128 * 1024;
/// Bytes of each bulk space that are used while processes share processors: then their rings should stay in the
/// caches.
const CROWDED_LAP: u32 = 256 * 1024;

fn cell(memory: &SharedMemory, at: usize) -> Option<Cell<'_>> {
    let offset = CELLS + at.checked_mul(CELL)?;
    if at >= CellTable::LEN {
        return None;
    }
    Some(Cell { left: memory.atomic(offset)?, status: memory.atomic(offset + 8)? })
}

impl Inbound {
    /// Withdraws all chunks not yet taken. The copy that the sender is making ends before its `Unsettled` does.
    pub(super) fn end_sharing(&mut self) {
        let Self { cells, consumer, .. } = self;
        let memory = consumer.memory();
        cells.stop_all(|at| cell(memory, at));
    }
}

impl Shm {
    fn inbound_of_mut(&mut self, peer: PeerId) -> Option<&mut Inbound> {
        self.inbound.of_mut(peer)
    }

    /// There is a link more with `peer`. Where the processes are too many already, one more makes no difference: so the
    /// links of a large job are made without counting all of them for each.
    pub(super) fn count_one_more(&mut self, peer: PeerId) {
        let before = self.crowd.is_there(1);
        if let (false, Some(pid)) = (before, self.inbound_of(peer).map(|link| link.pid)) {
            self.crowd.count_one(pid);
        }
        let links = self.inbound.len();
        self.watches.expect(links, self.crowd.processes_each_of(links));
        if self.crowd.is_there(1) != before {
            return self.set_laps();
        }
        let lap = self.lap();
        if let Some(link) = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut) {
            link.producer.set_lap(lap);
        }
    }

    fn lap(&self) -> u32 {
        if self.crowd.is_there(1) { CROWDED_LAP } else { LAVISH.bulk }
    }

    fn set_laps(&mut self) {
        let lap = self.lap();
        for link in self.outbound.iter_mut().flatten() {
            link.producer.set_lap(lap);
        }
    }

    /// Counts the peers' processes that may use the same processors as this one. If there are more of them than
    /// processors, two ends cannot copy at the same time: the least work is the fastest then.
    fn count_processes(&mut self) {
        self.crowd.count(self.inbound.iter().map(|link| link.pid));
        self.set_laps();
    }

    /// Checks the processors again: launchers and applications bind processes and threads at any time, peers too.
    pub(super) fn look_at_processors(&mut self) {
        if self.crowd.look_again() {
            self.count_processes();
        }
    }

    /// Longest message sent unsolicited, bytes, to a peer that may read it by attach instead (`attaches`) or may not.
    pub(super) fn push_max(&self, peer: PeerId, attaches: bool) -> usize {
        let slow = self.out(peer).is_some_and(|link| link.copy_rate.is_slow());
        let reads = attaches && (self.crowd.is_there(1) || slow);
        self.settings.push_max.unwrap_or(if reads { 0 } else { PUSH_MAX })
    }

    fn shortest_shared(&self) -> usize {
        self.settings
            .share_min
            .unwrap_or_else(|| if self.crowd.is_there(1) { usize::MAX } else { SHARE_MIN })
    }
}

impl Sharing for Shm {
    fn share_min(&self, peer: PeerId) -> Option<usize> {
        let shares = self.inbound_of(peer).is_some_and(|link| link.reach().0 && link.assists);
        shares.then(|| self.shortest_shared()).filter(|least| *least < usize::MAX)
    }

    fn share(&mut self, peer: PeerId, len: usize) -> Option<Share> {
        if len < self.shortest_shared() {
            return None;
        }
        let link = self.inbound_of_mut(peer).filter(|link| link.reach().0 && link.assists)?;
        let memory = link.consumer.memory();
        link.cells.begin(len, piece_of(len, PIECE_MAX) as u32, |at| cell(memory, at))
    }

    fn take(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        // Without a link the peer has departed; that will be reported.
        let Some(link) = self.inbound_of_mut(peer) else { return Taken::Wait };
        match cell(link.consumer.memory(), share.cell as usize) {
            Some(cell) => link.cells.take(share, cell, most),
            None => Taken::Wait,
        }
    }

    fn arrived(&mut self, peer: PeerId, share: &Share, units: u32) {
        if let Some(link) = self.inbound_of_mut(peer) {
            link.cells.arrived(share, units);
        }
    }

    fn begin_assist(&mut self, peer: PeerId, share: &Share, most: u32) -> Taken {
        let link = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
        let Some(link) = link else { return Taken::Over };
        let most = link.producer.room_for(share.unit, most);
        if most == 0 {
            return Taken::Wait;
        }
        let part = cell(link.producer.memory(), share.cell as usize)
            .and_then(|cell| cell.begin_assist(share, most));
        part.map_or(Taken::Over, |(offset, len)| Taken::Part { offset, len })
    }

    fn stop_sharing(&mut self, peer: PeerId, share: &Share) {
        let Some(link) = self.inbound_of_mut(peer) else { return };
        if let Some(cell) = cell(link.consumer.memory(), share.cell as usize) {
            link.cells.stop(share, cell);
        }
    }

    fn assist(
        &mut self,
        peer: PeerId,
        share: &Share,
        part: impl Fn(usize, usize) -> (SegmentList, [Range; MAX_SEGMENTS], usize),
    ) -> Assisted {
        if !self.inbound_of(peer).is_some_and(|link| link.reach().1) {
            return Assisted::Over;
        }
        let memory = self.out(peer).map(|link| link.producer.memory());
        let Some(cell) = memory.and_then(|memory| cell(memory, share.cell as usize)) else {
            return Assisted::Over;
        };
        let mut done = Ok(0);
        let assisted = cell.assist(share, |offset, len| {
            let (local, remote, count) = part(offset, len);
            let remote = remote.get(..count).unwrap_or(&[]);
            done = self.copy(peer, &local, remote, false, None);
            done.ok()
        });
        let _ = self.or_refused(peer, done);
        assisted
    }
}

#[cfg(test)]
mod tests {
    use super::super::CmaPolicy;
    use super::super::copy_rate::{SAMPLES, UNTOUCHED};
    use super::super::fixture::{Deaf, End, linked};
    use super::*;
    use crate::transport::{Messages, Mode, Transport};
    use std::time::Duration;

    /// The results of `push_max` and `share_min` at the other end.
    fn bounds(processors: usize, cma: CmaPolicy, push: Option<usize>) -> (usize, Option<usize>) {
        let [(a, peer), _] = linked(processors, cma, push);
        (a.shm.caps(peer).push_max, a.shm.share_min(peer))
    }

    /// Two ends, after so many payloads of 16 KiB that were slow to copy.
    fn after(slow: u32, cma: CmaPolicy) -> [(End, PeerId); 2] {
        let [(mut a, peer), (mut b, back)] = linked(2, cma, None);
        for i in 0..UNTOUCHED + slow {
            let pack = |_: usize, _: &mut [u8]| {
                if i >= UNTOUCHED {
                    std::thread::sleep(Duration::from_micros(100));
                }
            };
            a.shm.send(peer, Mode::Bulk, b"header", 16 * 1024, pack).unwrap();
            assert_eq!(b.shm.poll(&mut Deaf), 1);
        }
        [(a, peer), (b, back)]
    }

    #[test]
    fn a_slow_sender_is_read() {
        let [(a, peer), _] = after(SAMPLES - 1, CmaPolicy::Auto);
        assert_eq!(a.shm.caps(peer).push_max, PUSH_MAX, "not known yet");
        let [(mut a, peer), _other] = after(SAMPLES, CmaPolicy::Auto);
        assert_eq!(a.shm.caps(peer).push_max, 0);
        a.shm.watches.checked_at = 0;
        a.shm.poll_sockets(&mut a.peers, &mut Deaf);
        assert_eq!(a.shm.caps(peer).push_max, PUSH_MAX, "tried again");
    }

    #[test]
    fn a_sender_that_is_ahead_is_not_slow() {
        let [(mut a, peer), (mut b, _)] = linked(2, CmaPolicy::Auto, None);
        let mut send = |slow: bool| {
            let pack = |_: usize, _: &mut [u8]| {
                if slow {
                    std::thread::sleep(Duration::from_micros(100));
                }
            };
            a.shm.send(peer, Mode::Bulk, b"header", 8 * 1024, pack).unwrap();
            a.shm.caps(peer).push_max
        };
        for _ in 0..UNTOUCHED {
            send(false);
            assert_eq!(b.shm.poll(&mut Deaf), 1);
        }
        let half = LAVISH.bulk / 2 / (8 * 1024) + 1;
        for i in 0..half + 90 {
            assert_eq!(send(i >= half), PUSH_MAX, "payload {i}");
        }
        // The receiver runs again.
        while b.shm.poll(&mut Deaf) > 0 {}
        let noticed = (0..1000).any(|_| {
            let bound = send(true);
            assert_eq!(b.shm.poll(&mut Deaf), 1);
            bound == 0
        });
        assert!(noticed);
    }

    #[test]
    fn where_nobody_may_attach_slow_is_all_there_is() {
        let [(a, peer), _] = after(SAMPLES, CmaPolicy::Off);
        assert_eq!(a.shm.caps(peer).push_max, PUSH_MAX);
    }

    #[test]
    fn processes_that_share_processors_copy_once() {
        // Both ends are in this process, which counts once.
        assert_eq!(bounds(1, CmaPolicy::Auto, None), (PUSH_MAX, Some(SHARE_MIN)));
        assert_eq!(bounds(0, CmaPolicy::Auto, None), (0, None));
        assert_eq!(bounds(0, CmaPolicy::Off, None), (PUSH_MAX, None), "there is no other way");
        assert_eq!(bounds(0, CmaPolicy::Auto, Some(100)), (100, Some(100)), "as the user wants it");
    }
}
