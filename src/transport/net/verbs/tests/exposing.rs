//! Direct RMA between endpoints on one device. The memory has mappings of its own, because only unshared mappings can
//! be watched.

use super::windows::{await_windows, contents, pair, pattern};
use super::*;
use crate::memory::OwnedBuffer;
use crate::transport::{Purpose, Put, Registered, Registration, Remote, SendError};

const LEN: usize = 100_001;

fn expose(end: &mut End, to: PeerId, memory: &OwnedBuffer) -> Option<Registration> {
    let purpose = Purpose::Region { id: 7, reads: true, writes: true };
    match end.net.register(to, LANE, &memory.segments(), purpose) {
        Registered::Yes(registered) => Some(registered),
        // Without userfaultfd a change of the mapping would go unnoticed.
        Registered::Never if std::env::var_os("UDRV_TEST_RDMA").is_none() => {
            eprintln!("skipped: no userfaultfd");
            None
        }
        other => panic!("{other:?}"),
    }
}

fn put(delivered: bool, token: u64) -> Put {
    Put { notify: false, delivered, stays: false, reports: false, token }
}

#[test]
fn a_region_is_written_and_read_without_its_owner() {
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (mut b, to_a)) = pair(ip);
    let region = OwnedBuffer::zeroed(LEN);
    let Some(registered) = expose(&mut b, to_a, &region) else { return };
    assert!(registered.reads && registered.writes);
    let at = Remote { key: registered.key, offset: 0 };
    for round in 0..6 {
        let (source, sink) = (pattern(round, LEN), OwnedBuffer::zeroed(LEN));
        a.net.put(to_b, &source.segments(), &at, put(round % 2 == 1, 1)).unwrap();
        a.net.get(to_b, &sink.segments(), &at, 2).unwrap();
        // It waits for the read.
        let other = OwnedBuffer::zeroed(LEN);
        a.net.put(to_b, &other.segments(), &at, put(true, 3)).unwrap();
        assert!(within(30, || {
            a.poll(); // b does not poll
            a.got.done.len() == 3
        }));
        assert_eq!(std::mem::take(&mut a.got.done), [1, 2, 3]);
        assert!(contents(&sink) == contents(&source), "the read has what was written before it");
        assert!(contents(&region).iter().all(|byte| *byte == 0), "and not what came later");
    }
    assert_eq!((a.net.bulk_counts().reached, b.net.bulk_counts().exposed), (18, 1));
    assert_eq!((a.got.lost, b.got.lost), (0, 0));
}

#[test]
fn an_access_to_a_region_that_has_ended_ends_the_connection() {
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (mut b, to_a)) = pair(ip);
    for round in 1..3 {
        let region = OwnedBuffer::zeroed(LEN);
        let Some(registered) = expose(&mut b, to_a, &region) else { return };
        let at = Remote { key: registered.key, offset: 0 };
        b.net.invalidate(to_a, &registered.key);
        a.net.put(to_b, &pattern(1, LEN).segments(), &at, put(false, 1)).unwrap();
        assert!(within(30, || {
            a.poll();
            b.poll();
            (a.got.lost, b.got.lost) == (round, round)
        }));
        assert!(a.got.done.is_empty() && contents(&region).iter().all(|byte| *byte == 0));
        let again = a.net.put(to_b, &region.segments(), &at, put(false, 1));
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
    let Some(registered) = expose(&mut b, to_a, &region) else { return };
    drop(region);
    assert!(within(20, || {
        b.poll();
        !b.got.void.is_empty()
    }));
    assert_eq!(b.got.void, [registered.key]);
    let at = Remote { key: registered.key, offset: 0 };
    a.net.put(to_b, &pattern(1, 100).segments(), &at, put(false, 1)).unwrap();
    assert!(within(30, || {
        a.poll();
        b.poll();
        a.got.lost == 1
    }));
    assert!(a.got.done.is_empty());
}
