//! Direct RMA between endpoints on one device. The memory has mappings of its own, because only unshared mappings can
//! be watched.

use super::windows::{await_windows, contents, pair, pattern};
use super::*;
use crate::memory::OwnedBuffer;
use crate::transport::{Exposed, Exposure, Reach, SendError, Spot};

const REGION: u64 = 9;
const LEN: usize = 100_001;

fn expose(end: &mut End, to: PeerId, memory: &OwnedBuffer) -> Option<Exposure> {
    let list = memory.segments();
    match end.net.expose(to, (REGION, 0), &list, (true, true)) {
        Exposed::Yes(exposure) => Some(exposure),
        // Without userfaultfd a change of the mapping would go unnoticed.
        Exposed::Never if std::env::var_os("UDRV_TEST_RDMA").is_none() => None,
        other => panic!("{other:?}"),
    }
}

fn spot(exposure: &Exposure, memory: &OwnedBuffer) -> Spot {
    let key = exposure.keys.unwrap()[0];
    Spot { epoch: exposure.epoch, key, range: memory.segments().ranges().0[0] }
}

#[test]
fn a_region_is_written_and_read_without_its_owner() {
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (mut b, to_a)) = pair(ip);
    let region = OwnedBuffer::zeroed(LEN);
    let Some(exposure) = expose(&mut b, to_a, &region) else { return };
    assert!(exposure.reads && exposure.writes);
    let spot = spot(&exposure, &region);
    for round in 0..6 {
        let (source, sink) = (pattern(round, LEN), OwnedBuffer::zeroed(LEN));
        let write = Reach { reads: false, delivered: round % 2 == 1, stays: false, token: 1 };
        a.net.reach(to_b, &spot, &source.segments(), write).unwrap();
        let read = Reach { reads: true, delivered: false, stays: false, token: 2 };
        a.net.reach(to_b, &spot, &sink.segments(), read).unwrap();
        // It waits for the read.
        let other = OwnedBuffer::zeroed(LEN);
        let last = Reach { reads: false, delivered: true, stays: false, token: 3 };
        a.net.reach(to_b, &spot, &other.segments(), last).unwrap();
        assert!(within(30, || {
            a.poll(); // b does not poll
            a.got.reached.len() == 3
        }));
        assert_eq!(std::mem::take(&mut a.got.reached), [1, 2, 3]);
        assert!(contents(&sink) == contents(&source), "the read has what was written before it");
        assert!(contents(&region).iter().all(|byte| *byte == 0), "and not what came later");
    }
    assert_eq!((a.net.bulk_counts().reached, b.net.bulk_counts().exposed), (18, 1));
    assert_eq!((a.got.lost, b.got.lost), (0, 0));
}

#[test]
fn a_region_that_has_ended_ends_the_connection_of_who_touches_it() {
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (mut b, to_a)) = pair(ip);
    for round in 1..3 {
        let region = OwnedBuffer::zeroed(LEN);
        let Some(exposure) = expose(&mut b, to_a, &region) else { return };
        let spot = spot(&exposure, &region);
        b.net.conceal(REGION);
        let write = Reach { reads: false, delivered: false, stays: false, token: 1 };
        a.net.reach(to_b, &spot, &pattern(1, LEN).segments(), write).unwrap();
        assert!(within(30, || {
            a.poll();
            b.poll();
            (a.got.lost, b.got.lost) == (round, round)
        }));
        assert!(a.got.reached.is_empty() && contents(&region).iter().all(|byte| *byte == 0));
        let again = a.net.reach(to_b, &spot, &region.segments(), write);
        assert!(matches!(again, Err(SendError::Unreachable(Errno(libc::ESTALE)))), "{again:?}");
        await_windows(&mut a, to_b, &mut b, to_a);
    }
}

#[test]
fn a_region_whose_memory_goes_is_concealed() {
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (mut b, to_a)) = pair(ip);
    // Long enough for a mapping of its own, which is unmapped when it is freed.
    let region = OwnedBuffer::zeroed(64 << 20);
    let Some(exposure) = expose(&mut b, to_a, &region) else { return };
    let spot = Spot {
        range: crate::sys::cma::Range { len: 100, ..spot(&exposure, &region).range },
        ..spot(&exposure, &region)
    };
    drop(region);
    assert!(within(20, || {
        b.poll();
        !b.got.concealed.is_empty()
    }));
    assert_eq!(b.got.concealed, [REGION]);
    let write = Reach { reads: false, delivered: false, stays: false, token: 1 };
    a.net.reach(to_b, &spot, &pattern(1, 100).segments(), write).unwrap();
    assert!(within(30, || {
        a.poll();
        b.poll();
        a.got.lost == 1
    }));
    assert!(a.got.reached.is_empty());
}
