//! Direct access: copies that one end of a link makes from and to the other's memory (PROTOCOL.md §2.10), and how that
//! memory becomes its owner's alone again.
//!
//! The sender of a link makes REACHING odd, reads EPOCH, copies, and makes REACHING even. The receiver changes EPOCH,
//! then reads REACHING. So one of the two sees the other. A copy without a key, at an address that a message told, reads
//! CLOSED instead, which a receiver that takes the link down sets before it reads REACHING. A receiver that reads an odd
//! number waits, because the owner may reuse the memory at once. The sender may be in one of these states:
//!
//! 1. *Copying.* That ends by itself: a copy is bounded, and a process is not stopped within a system call.
//! 2. *Ended.* The hang-up of its socket says so, or the kernel by its process id.
//! 3. *Stopped* (SIGSTOP, a debugger, a frozen control group), after its copy or before it. The two cannot be told
//!    apart, and before it is dangerous: when the sender continues, it would copy into memory that has another use by
//!    then. So the owner closes its gate (`sys::gate`), a page that every copy touches first. From then on a sender
//!    with no thread inside a copy (`process::may_copy`) cannot begin one.
//!
//! After half a second the gate is closed for good, for all peers of the endpoint; they continue through the rings. A
//! sender that has not settled after two seconds is running, or appears to be, and does not finish its copy: fi_close
//! of a region returns -FI_EBUSY then, and the region stays. The domain's lock is not held while fi_close of a region
//! waits; the close of an endpoint or a broken link holds it for at most that long.
//!
//! A peer whose pid is not visible (another pid namespace) is told of no region, and of no buffer to write to.

use super::inbound::Inbound;
use super::layout::EPOCH;
use super::state::Shm;
use super::unsettled::{Reaching, Unsettled};
use super::words::Words;
use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::sys::gate::Gate;
use crate::sys::per_process::PerProcess;
use crate::telemetry::log;
use crate::transport::settling::settle;
use crate::transport::{
    Access, LaneCaps, LaneId, Lanes, OneSided, PeerId, Purpose, Put, Registered, Registration,
    Remote, RemoteKey, SendError,
};
use std::sync::atomic::Ordering;

/// Unsettled peers of endpoints that have closed.
static LEFT: PerProcess<Vec<Left>> = PerProcess::new();

/// `open`: its gate could not be closed.
#[derive(Debug)]
struct Left {
    peer: Unsettled,
    open: bool,
}

/// Whether no peer of an endpoint that has closed is in the middle of a copy.
pub(super) fn are_left_settled() -> bool {
    let mut left = LEFT.lock();
    left.retain(|one| one.peer.is_busy(one.open));
    left.is_empty()
}

impl Inbound {
    /// Invalidates all keys that the sender was told. `None`: the sender accesses none of our memory any more.
    pub(super) fn end_reaching(&self) -> Option<Unsettled> {
        let memory = self.consumer.memory();
        let seen = Words::of(memory)?.void()?;
        Some(Unsettled { memory: memory.clone(), seen, pid: self.pid })
    }
}

/// Closes the gate, and logs once why peers no longer use cross-memory attach.
fn close_gate(gate: &Gate, pid: i32) {
    if gate.is_open() && gate.close() {
        log::warn(format_args!(
            "process {pid} does not go on (stopped?) in the middle of a copy from or to our memory: no process reaches it \
             any more, and long messages and one-sided operations of this endpoint go through the rings"
        ));
    }
}

impl Shm {
    /// Waits for peers that are in the middle of a copy.
    pub(super) fn settle(&mut self) {
        settle(|insists| self.is_settled(insists));
    }

    /// The endpoint closes before all peers have settled. The domain keeps the regions that they may access.
    pub(super) fn leave_unsettled(&mut self) {
        if !self.reaching.unsettled.is_empty() {
            let open = self.reaching.gate.is_open();
            let left = self.reaching.unsettled.drain(..).map(|peer| Left { peer, open });
            LEFT.lock().extend(left);
        }
    }

    /// One copy between `local` and memory of `peer`, a read if `reads`. With an epoch, only while that is valid; without
    /// one, only until the peer has taken the link down, which this side learns later: Again.
    pub(super) fn copy(
        &self,
        peer: PeerId,
        local: &SegmentList,
        remote: &[Range],
        reads: bool,
        epoch: Option<u32>,
    ) -> Result<usize, SendError> {
        let allowed = |link: &&Inbound| if reads { link.reach().0 } else { link.reach().1 };
        let refused = SendError::Unreachable(Errno(libc::EPERM));
        let link = self.inbound_of(peer).filter(allowed).ok_or(refused)?;
        // Without an own link nothing announces the copy, and the peer would not wait for its end.
        let out = self.out(peer).ok_or(SendError::Again)?;
        let words = Words::of(out.producer.memory());
        if let Some(words) = &words {
            words.begin();
        }
        let barred = match epoch {
            Some(epoch) if words.as_ref().is_some_and(|words| words.is_valid(epoch)) => None,
            Some(_) => Some(STALE),
            None => out.producer.consumer_closed().then_some(SendError::Again),
        };
        let moved = match barred {
            Some(error) => Err(error),
            None => {
                let (ranges, n) = local.ranges();
                let (ranges, way) = (ranges.get(..n).unwrap_or_default(), link.entrance());
                let proven = if reads { Ok(()) } else { link.prove() };
                tell_when(proven.and_then(|()| match reads {
                    true => way.read(ranges, remote),
                    false => way.write(ranges, remote),
                }))
            }
        };
        if let Some(words) = words {
            words.end();
        }
        if moved == Err(refused) {
            link.shut.store(true, Ordering::Relaxed);
        }
        moved
    }

    /// The result of a copy from or to memory of `peer`. If no process was found and it has ended, the next turn takes its
    /// links down: no message may follow into them, as it may be for the peer's next incarnation. A process whose first
    /// thread has ended is not found either, nor is one that is about to end: these refuse copies from now on.
    pub(super) fn or_refused<T>(
        &mut self,
        peer: PeerId,
        done: Result<T, SendError>,
    ) -> Result<T, SendError> {
        if !matches!(done, Err(ENDED)) {
            return done;
        }
        let Some(link) = self.inbound_of(peer) else { return done };
        if self.watches.has_ended(link.pid) {
            self.due.ended.push(link.pid);
        } else if link.has_ended() {
            self.due.stale.push(peer); // other endpoints of the process may live
        } else {
            link.shut.store(true, Ordering::Relaxed);
            return Err(SendError::Unreachable(Errno(libc::EPERM)));
        }
        self.due.urgent = true;
        done
    }
}

/// There is no memory of such a process.
const ENDED: SendError = SendError::Unreachable(Errno(libc::ESRCH));

/// The kind of the remote keys of this transport: the epoch, and the address of the memory.
const KEY: u8 = 1;
pub(super) const KEYS: &[u8] = &[KEY];
/// The lane for bulk: copies by system calls. One takes about a microsecond, and a processor moves the bytes: the length
/// of a short copy, nanoseconds, and the rate of a long one, bytes per microsecond.
const LANE: LaneId = LaneId::of(KEYS);
const LANE_NS: u32 = 1_000;
const LANE_RATE: u32 = 8_000;

impl Shm {
    /// The epoch of the keys that `peer` may use now; `None`: it may use none.
    fn epoch(&self, peer: PeerId) -> Option<u32> {
        let link =
            self.inbound_of(peer).filter(|link| link.reaches && self.reaching.gate.is_open())?;
        Some(link.consumer.memory().atomic(EPOCH)?.load(Ordering::Relaxed) as u32)
    }

    /// One copy under a key of the peer, or at an address of its process.
    fn copy_under(
        &self,
        peer: PeerId,
        local: &SegmentList,
        remote: &Remote,
        reads: bool,
    ) -> Result<Access, SendError> {
        let len = local.len() as u64;
        if remote.key == RemoteKey::ADDRESSES {
            let range = Range { addr: remote.offset, len };
            return self.copy(peer, local, &[range], reads, None).map(Access::Moved);
        }
        let open = self.out(peer).is_some_and(|link| !link.producer.consumer_closed());
        let (Some(epoch), Some(addr), true) = (remote.key.word(0), remote.key.word(1), open) else {
            return Err(STALE);
        };
        let range = Range { addr: addr.wrapping_add(remote.offset), len };
        self.copy(peer, local, &[range], reads, Some(epoch as u32)).map(Access::Moved)
    }
}

impl OneSided for Shm {
    fn lanes(&self, peer: PeerId) -> Lanes {
        let Some(link) = self.inbound_of(peer) else { return Lanes::default() };
        let (get, put) = link.reach();
        Lanes::from(LaneCaps {
            read_min: get.then_some(usize::MAX),
            write_min: put.then_some(usize::MAX),
            register_max: usize::MAX,
            ..LaneCaps::of_host(LANE, LANE_NS, LANE_RATE)
        })
    }

    fn direct_min(&self, peer: PeerId, _: &RemoteKey, reads: bool) -> Option<usize> {
        let (get, put) = self.inbound_of(peer)?.reach();
        (if reads { get } else { put }).then_some(usize::MAX)
    }

    fn register(
        &mut self,
        peer: PeerId,
        _: LaneId,
        memory: &SegmentList,
        purpose: Purpose,
    ) -> Registered {
        let (Purpose::Region { reads, writes, .. }, Some(epoch)) = (purpose, self.epoch(peer))
        else {
            return Registered::No;
        };
        let key = RemoteKey::new(KEY).with(epoch.into()).with(memory.first_addr());
        Registered::Yes(Registration { key, reads, writes, confirms: true })
    }

    fn invalidate(&mut self, peer: PeerId, _: &RemoteKey) -> bool {
        let unsettled = self.inbound_of(peer).and_then(Inbound::end_reaching);
        self.reaching.unsettled.extend(unsettled);
        true
    }

    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        to: &Remote,
        _: Put,
    ) -> Result<Access, SendError> {
        let done = self.copy_under(peer, local, to, false);
        self.or_refused(peer, done)
    }

    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        from: &Remote,
        _: u64,
    ) -> Result<Access, SendError> {
        let done = self.copy_under(peer, local, from, true);
        self.or_refused(peer, done)
    }

    fn is_settled(&mut self, insists: bool) -> bool {
        let Reaching { unsettled, gate } = &mut self.reaching;
        unsettled.retain(|one| one.is_busy(gate.is_open()));
        if let (Some(first), true) = (unsettled.first(), insists) {
            close_gate(gate, first.pid);
            unsettled.retain(|one| one.is_busy(gate.is_open()));
        }
        unsettled.is_empty()
    }
}

const STALE: SendError = SendError::Unreachable(Errno(libc::ESTALE));

/// Distinguishes temporary errors from permanent ones.
fn tell_when(moved: Result<usize, Errno>) -> Result<usize, SendError> {
    match moved {
        Ok(0) => Err(SendError::Unreachable(Errno(libc::EFAULT))),
        Ok(n) => Ok(n),
        Err(Errno(libc::EINTR | libc::EAGAIN)) => Err(SendError::Again),
        Err(e) => Err(SendError::Unreachable(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{Deaf, Ears, End, Heard, linked};
    use super::super::layout::REACHING;
    use super::*;
    use crate::sys::clock;
    use crate::sys::gate::STUCK;
    use crate::sys::shared_memory::SharedMemory;
    use crate::transport::loopback::Loopback;
    use crate::transport::settling::SETTLE_NS;
    use crate::transport::shm::config::CmaPolicy;
    use crate::transport::{Departure, Messages, Transport};
    use std::sync::Arc;
    use std::time::Instant;

    const WRITE: Put =
        Put { notify: false, delivered: true, stays: false, reports: false, token: 0 };

    /// A key to `memory` of `shm`, for `peer`.
    fn key(shm: &mut Shm, peer: PeerId, memory: &SegmentList) -> RemoteKey {
        let purpose = Purpose::Region { id: 7, reads: true, writes: true };
        match shm.register(peer, LANE, memory, purpose) {
            Registered::Yes(Registration { key, reads: true, writes: true, .. }) => key,
            other => panic!("{other:?}"),
        }
    }

    /// A process that keeps running and never finishes anything.
    struct Runner(std::process::Child);

    impl Runner {
        fn new() -> Self {
            let endless = ["-c", "while :; do :; done"];
            Self(std::process::Command::new("sh").args(endless).spawn().unwrap())
        }

        fn pid(&self) -> i32 {
            self.0.id() as i32
        }
    }

    impl Drop for Runner {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    fn list(bytes: &mut [u8]) -> (SegmentList, Range) {
        let addr = bytes.as_mut_ptr().expose_provenance() as u64;
        let range = Range { addr, len: bytes.len() as u64 };
        (Loopback::list(&[range]).unwrap(), range)
    }

    type Ends = [(End, PeerId); 2];

    /// Two ends of a link, and a region of `b` to which `a` has the key. `None`: cross-memory attach is forbidden here.
    fn with_region(
        mine: &mut [u8; 100],
        theirs: &mut [u8; 100],
    ) -> Option<(Ends, SegmentList, Remote)> {
        let [(mut a, peer), (mut b, back)] = linked(2, CmaPolicy::Auto, None);
        if !a.shm.caps(peer).put {
            eprintln!("skipped: cross-memory attach is forbidden here");
            return None;
        }
        let ((local, _), (region, _)) = (list(mine), list(theirs));
        let remote = Remote { key: key(&mut b.shm, back, &region), offset: 0 };
        assert_eq!(a.shm.put(peer, &local, &remote, WRITE), Ok(Access::Moved(100)));
        Some(([(a, peer), (b, back)], local, remote))
    }

    /// `a`, process `pid`, is in the middle of a copy from or to memory of `b`; a word that says so, and b's number of `a`.
    fn copying(pid: i32) -> ([End; 2], Arc<SharedMemory>, PeerId) {
        let [(a, peer), (mut b, back)] = linked(2, CmaPolicy::Auto, None);
        b.shm.inbound.iter_mut().for_each(|link| link.pid = pid);
        let word = a.shm.out(peer).unwrap().producer.memory().clone();
        word.atomic(REACHING).unwrap().fetch_add(1, Ordering::SeqCst);
        ([a, b], word, back)
    }

    /// Ends the region to which the peer has the key, and in which it copies.
    fn end_region(b: &mut Shm, back: PeerId) {
        let memory = list(&mut [0; 8]).0;
        let told = key(b, back, &memory);
        assert!(b.invalidate(back, &told));
    }

    #[test]
    fn a_copy_that_begins_behind_a_closed_gate_moves_nothing() {
        let (mut mine, mut theirs) = ([1u8; 100], [2u8; 100]);
        let Some(linked) = with_region(&mut mine, &mut theirs) else { return };
        let ([(mut a, peer), (b, back)], local, remote) = linked;
        let range = list(&mut theirs).1;
        let bare = Remote { key: RemoteKey::ADDRESSES, offset: range.addr };
        assert_eq!((theirs, a.shm.get(peer, &local, &bare, 0)), ([1; 100], Ok(Access::Moved(100))));
        theirs = [3; 100];
        // Like a sender that was stopped after it read EPOCH.
        assert!(b.shm.reaching.gate.close());
        let refused = SendError::Unreachable(Errno(libc::EPERM));
        assert_eq!(a.shm.put(peer, &local, &remote, WRITE), Err(refused));
        assert_eq!((theirs, mine), ([3; 100], [1; 100]));
        let caps = a.shm.caps(peer);
        assert_eq!(
            (caps.get, caps.put, b.shm.epoch(back)),
            (false, false, None),
            "not tried again"
        );
        assert_eq!(a.shm.get(peer, &local, &remote, 0), Err(refused));
    }

    #[test]
    fn no_copy_begins_that_nothing_announces() {
        let (mut mine, mut theirs) = ([1u8; 100], [2u8; 100]);
        let Some(linked) = with_region(&mut mine, &mut theirs) else { return };
        let ([(mut a, peer), (_b, _)], local, _) = linked;
        theirs = [3; 100];
        let bare = Remote { key: RemoteKey::ADDRESSES, offset: list(&mut theirs).1.addr };
        a.shm.outbound.clear();
        assert_eq!(a.shm.put(peer, &local, &bare, WRITE), Err(SendError::Again));
        assert_eq!(a.shm.get(peer, &local, &bare, 0), Err(SendError::Again));
        assert_eq!((mine, theirs), ([1; 100], [3; 100]));
    }

    #[test]
    fn no_copy_begins_over_a_link_that_the_other_end_has_taken_down() {
        for closes in [false, true] {
            let (mut mine, mut theirs) = ([1u8; 100], [2u8; 100]);
            let Some(linked) = with_region(&mut mine, &mut theirs) else { return };
            let ([(mut a, peer), (mut b, back)], local, _) = linked;
            theirs = [3; 100];
            let bare = Remote { key: RemoteKey::ADDRESSES, offset: list(&mut theirs).1.addr };
            // The end of the endpoint where its gate cannot be closed, or that of the link.
            STUCK.set(true);
            if closes {
                drop(b);
            } else {
                b.shm.due.end(back);
                b.turn(&mut Deaf);
                assert!(!b.shm.hears(back));
            }
            STUCK.set(false);
            assert_eq!(a.shm.put(peer, &local, &bare, WRITE), Err(SendError::Again), "{closes}");
            assert_eq!(a.shm.get(peer, &local, &bare, 0), Err(SendError::Again), "{closes}");
            assert_eq!((mine, theirs), ([1; 100], [3; 100]));
        }
    }

    #[test]
    fn nothing_is_written_into_the_process_that_has_the_id_of_one_that_ended() {
        let (mut mine, mut theirs) = ([1u8; 100], [2u8; 100]);
        let Some(linked) = with_region(&mut mine, &mut theirs) else { return };
        let ([(mut a, peer), (b, _)], local, remote) = linked;
        theirs = [3; 100];
        let link = a.shm.inbound.of_mut(peer).unwrap();
        link.nonce ^= 1;
        link.proven_until.store(0, Ordering::Relaxed);
        let refused = SendError::Unreachable(Errno(libc::EPERM));
        assert_eq!(a.shm.put(peer, &local, &remote, WRITE), Err(refused));
        assert_eq!(theirs, [3; 100]);
        b.shm.reaching.gate.close();
        assert_eq!(a.shm.put(peer, &local, &remote, WRITE), Err(refused));
    }

    /// What becomes of a copy that finds no process with the peer's id, and what `a` hears of it next.
    fn after_no_process(
        ended: bool,
        reads: bool,
    ) -> Option<(Result<Access, SendError>, Vec<Heard>)> {
        let (mut mine, mut theirs) = ([1u8; 100], [2u8; 100]);
        let ([(mut a, peer), (_b, _)], local, remote) = with_region(&mut mine, &mut theirs)?;
        let link = a.shm.inbound.of_mut(peer).unwrap();
        link.nonce ^= 1; // the word at the gate is another one
        link.proven_until.store(0, Ordering::Relaxed);
        if ended {
            let epoll = a.shm.epoll.clone();
            a.shm.watches.replace_all(&epoll);
        }
        let done = match reads {
            true => a.shm.get(peer, &local, &remote, 0),
            false => a.shm.put(peer, &local, &remote, WRITE),
        };
        assert_eq!(a.shm.is_urgent(), ended, "a thread that is about to sleep takes a turn first");
        assert!(
            ended || a.shm.direct_min(peer, &remote.key, reads).is_none(),
            "refused from now on"
        );
        // Without a check, which would find that too.
        let mut ears = Ears::default();
        a.shm.watches.checked_at = clock::now_ns();
        a.shm.poll_sockets(&mut a.peers, &mut ears);
        Some((done, ears.0))
    }

    #[test]
    fn a_copy_that_finds_a_process_ended_takes_its_links_down() {
        for reads in [false, true] {
            let Some(after) = after_no_process(true, reads) else { return };
            let died = Departure::Failed(Errno(libc::EHOSTDOWN));
            assert_eq!(after, (Err(ENDED), vec![Heard::Left(died)]));
        }
    }

    #[test]
    fn a_process_that_lives_but_is_not_found_refuses_copies() {
        for reads in [false, true] {
            let Some(after) = after_no_process(false, reads) else { return };
            assert_eq!(after, (Err(SendError::Unreachable(Errno(libc::EPERM))), vec![]));
        }
    }

    #[test]
    fn nobody_waits_for_a_peer_for_ever() {
        // A process that is visible and runs, and one of another pid namespace.
        let runner = Runner::new();
        for pid in [runner.pid(), 0] {
            let ([_a, mut b], word, back) = copying(pid);
            end_region(&mut b.shm, back);
            assert!(!b.shm.is_settled(false) && b.shm.reaching.gate.is_open());
            let began = Instant::now();
            assert!(!settle(|insists| b.shm.is_settled(insists)));
            assert!(
                !b.shm.reaching.gate.is_open() && began.elapsed().as_nanos() as u64 >= SETTLE_NS
            );
            // The sender continues.
            word.atomic(REACHING).unwrap().fetch_add(1, Ordering::SeqCst);
            assert!(b.shm.is_settled(false));
        }
    }

    #[test]
    fn a_peer_that_has_ended_or_is_stopped_is_not_waited_for() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        for signal in [libc::SIGSTOP, libc::SIGKILL] {
            let ([_a, mut b], _word, back) = copying(pid);
            end_region(&mut b.shm, back);
            let words = [format!("-{signal}"), pid.to_string()];
            std::process::Command::new("kill").args(words).status().unwrap();
            assert!(settle(|insists| b.shm.is_settled(insists)));
            assert_eq!(b.shm.reaching.gate.is_open(), signal == libc::SIGKILL, "{signal}");
        }
        child.wait().unwrap();
    }

    #[test]
    fn a_peer_of_another_pid_name_space_is_told_nothing() {
        let [(_a, _), (mut b, back)] = linked(2, CmaPolicy::Auto, None);
        assert!(b.shm.caps(back).one_sided);
        b.shm.outbound.iter_mut().flatten().for_each(|link| link.pid = 0);
        assert!(!b.shm.caps(back).one_sided);
    }

    #[test]
    fn what_an_endpoint_leaves_behind_is_still_known() {
        let runner = Runner::new();
        let ([_a, b], word, back) = copying(runner.pid());
        assert!(b.shm.inbound_of(back).is_some());
        drop(b);
        assert!(!are_left_settled());
        word.atomic(REACHING).unwrap().fetch_add(1, Ordering::SeqCst);
        assert!(settle(|_| are_left_settled()));
    }

    #[test]
    fn a_stopped_peer_of_an_endpoint_whose_gate_stays_open_is_still_known() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let ([_a, b], _word, _) = copying(child.id() as i32);
        STUCK.set(true);
        drop(b);
        STUCK.set(false);
        assert!(!are_left_settled(), "it may begin its copy when it goes on");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(settle(|_| are_left_settled()));
    }
}
