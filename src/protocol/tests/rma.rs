//! One-sided operations, one behaviour per test.

use super::fixture::{LIMITS, Memory, Report, World, receive_op, remote, rma_op, send_op};
use super::sim::{Reach, Weather};
use crate::memory::keys::Right;
use crate::memory::keys::Right::{Read, Write};
use crate::protocol::rma::{COPY_MAX, READ_WINDOW, RmaPacket};
use crate::protocol::{Cause, Direction, Limits, OpError, RemoteRange, RmaOp, SendOp};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::Departure;
use crate::transport::loopback::Loopback;

const KEY: u64 = 42;
const BOTH: [Right; 2] = [Read, Write];

fn world(get: Reach, put: Reach) -> World {
    let weather = Weather { get: vec![get], put: vec![put], lies: true, ..Weather::fair() };
    World::new(3, weather, LIMITS)
}

fn ended(world: &mut World, at: usize) -> Vec<Report> {
    let mut all = world.reports(at, Direction::Write);
    all.extend(world.reports(at, Direction::Read));
    all
}

#[track_caller]
fn refused(world: &mut World, at: usize) -> (i32, Cause) {
    match ended(world, at)[..] {
        [Err(failure)] => (failure.error, failure.cause),
        ref other => panic!("{other:?}"),
    }
}

/// Every size at which the method changes, with and without access to the other side's memory.
#[test]
fn bytes_go_there_and_back() {
    // Memory that only its owner can access.
    let (first, later) = ([0, 1]).map(|after| Reach::Fails { after, errno: libc::EFAULT }).into();
    let ways = [
        (Reach::Off, Reach::Off),
        (Reach::On, Reach::On),
        (Reach::Off, Reach::On),
        (first, Reach::On),
        (Reach::On, later),
        (later, later),
    ];
    for (get, put) in ways {
        for to in [0, 1] {
            for len in [0, 1, 60, 256, 257, 1000, 1024, 5000, 200_000] {
                let mut world = world(get, put);
                let mut region = Memory::zeroed(200_000);
                let (mut from, mut back) = (Memory::pattern(3, len), Memory::zeroed(len));
                world.register(to, KEY, &mut region, &BOTH);
                let peer = world.peer(0, to);
                let op = RmaOp { data: Some(7), ..rma_op(peer, Write, &mut from, KEY, 1) };
                world.access(0, &op).unwrap();
                world.settle();
                assert_eq!(world.accesses(to), [(Write, len, Some(7))]);
                assert!(region.0[..len] == from.0[..]);
                assert!(region.0[len..].iter().all(|byte| *byte == 0));
                world.access(0, &rma_op(peer, Read, &mut back, KEY, 2)).unwrap();
                world.settle();
                assert_eq!(world.accesses(to), [(Read, len, None)]);
                assert!(back.0 == from.0);
                let contexts: Vec<_> =
                    ended(&mut world, 0).iter().map(|r| r.unwrap().context).collect();
                assert_eq!(contexts, [1, 2]);
                world.assert_empty();
            }
        }
    }
}

#[test]
fn ranges_are_gathered_and_scattered() {
    for reach in [Reach::Off, Reach::On, Reach::Short] {
        for part in [10, 400, 3000] {
            let mut world = world(reach, reach);
            let mut region = Memory::zeroed(20_000);
            world.register(1, KEY, &mut region, &BOTH);
            let peer = world.peer(0, 1);
            let (mut from, mut back) = (Memory::pattern(0, 3 * part), Memory::zeroed(3 * part));
            let mut ranges = remote(KEY, 10_000, part);
            for (addr, len) in [(0, 2 * part - 1), (9000, 0), (19_000, 1)] {
                ranges.push(RemoteRange { key: KEY, addr, len: len as u64 }).unwrap();
            }
            let op = RmaOp { remote: ranges, ..rma_op(peer, Write, &mut from, KEY, 1) };
            world.access(0, &op).unwrap();
            let op = RmaOp { remote: ranges, ..rma_op(peer, Read, &mut back, KEY, 2) };
            world.access(0, &op).unwrap();
            world.settle();
            assert!(ended(&mut world, 0).iter().all(Result::is_ok));
            assert!(region.0[10_000..10_000 + part] == from.0[..part]);
            assert!(region.0[..2 * part - 1] == from.0[part..3 * part - 1]);
            assert_eq!(region.0[19_000..19_001], from.0[3 * part - 1..]);
            assert!(back.0 == from.0);
            world.accesses(1);
            world.assert_empty();
        }
    }
}

#[test]
fn a_denied_access_changes_nothing() {
    let keyless = (libc::EKEYREJECTED, Cause::KeyRejected);
    let denied = (libc::EACCES, Cause::AccessDenied);
    let cases: [(u64, u64, &[Right], _); 5] = [
        (KEY + 1, 0, &BOTH, keyless),
        (KEY, 1, &BOTH, denied),
        (KEY, u64::MAX, &BOTH, denied),
        (KEY, 1 << 40, &BOTH, denied),
        (KEY, 0, &[], denied),
    ];
    for len in [10, 5000] {
        for reach in [Reach::Off, Reach::On] {
            for right in BOTH {
                for (key, addr, rights, error) in cases {
                    let mut world = world(reach, reach);
                    let (mut region, mut local) =
                        (Memory::pattern(1, len), Memory::pattern(2, len));
                    world.register(1, KEY, &mut region, rights);
                    let peer = world.peer(0, 1);
                    let remote = remote(key, addr, len);
                    let op = RmaOp { remote, ..rma_op(peer, right, &mut local, KEY, 1) };
                    world.access(0, &op).unwrap();
                    // An operation behind it is not affected.
                    let mut fine = Memory::pattern(9, 0);
                    world.access(0, &rma_op(peer, Write, &mut fine, KEY, 2)).unwrap();
                    world.settle();
                    let found: Vec<_> = ended(&mut world, 0)
                        .into_iter()
                        .filter_map(|r| r.err().map(|f| (f.error, f.cause)))
                        .collect();
                    assert_eq!(found, [error], "{len} B at {addr} of {key}, {right:?}");
                    assert!(region.0 == Memory::pattern(1, len).0);
                    assert!(local.0 == Memory::pattern(2, len).0);
                    assert_eq!(world.accesses(1), [(Write, 0, None)]);
                    world.assert_empty();
                }
            }
        }
    }
}

#[test]
fn one_bad_range_spoils_all() {
    for len in [20, 3000] {
        let mut world = world(Reach::Off, Reach::Off);
        let (mut region, mut local) = (Memory::zeroed(len), Memory::pattern(2, 2 * len));
        world.register(1, KEY, &mut region, &BOTH);
        let peer = world.peer(0, 1);
        let mut ranges = remote(KEY, 0, len);
        ranges.push(RemoteRange { key: KEY, addr: 1, len: len as u64 }).unwrap();
        let op = RmaOp { remote: ranges, ..rma_op(peer, Write, &mut local, KEY, 1) };
        world.access(0, &op).unwrap();
        world.settle();
        assert_eq!(refused(&mut world, 0).0, libc::EACCES);
        assert!(region.0.iter().all(|byte| *byte == 0));
        world.assert_empty();
    }
}

#[test]
fn a_region_that_is_closed_is_not_touched_any_more() {
    for reach in [Reach::Off, Reach::On] {
        for right in BOTH {
            let mut world = world(reach, reach);
            let (mut region, mut local) = (Memory::pattern(5, 150_000), Memory::zeroed(150_000));
            world.register(1, KEY, &mut region, &BOTH);
            let peer = world.peer(0, 1);
            world.access(0, &rma_op(peer, right, &mut local, KEY, 1)).unwrap();
            world.progress(1);
            world.progress(1);
            world.node(1).host.regions.remove(KEY);
            // Another region takes the key.
            let mut other = Memory::pattern(8, 150_000);
            world.register(1, KEY, &mut other, &BOTH);
            let before = region.0.clone();
            world.settle();
            assert_eq!(refused(&mut world, 0), (libc::EKEYREJECTED, Cause::KeyRejected));
            assert!(region.0 == before && other.0 == Memory::pattern(8, 150_000).0);
            assert!(before != local.0, "it was not yet complete");
            world.assert_empty();
        }
    }
}

#[test]
fn an_injected_write_has_its_bytes_when_the_call_returns() {
    for (len, before) in [(10, 0), (200, 0), (10, 5000), (600, 5000), (600, 0)] {
        let mut world = world(Reach::Off, Reach::Off);
        let mut region = Memory::zeroed(6000);
        world.register(1, KEY, &mut region, &BOTH);
        let peer = world.peer(0, 1);
        let (mut first, mut from) = (Memory::pattern(1, before), Memory::pattern(2, len));
        world.access(0, &rma_op(peer, Write, &mut first, KEY, 1)).unwrap();
        let op = RmaOp { inject: true, ..rma_op(peer, Write, &mut from, KEY, 2) };
        let op = RmaOp { fence: before == 0, ..op };
        world.access(0, &op).unwrap();
        from.0.fill(0xee);
        world.settle();
        assert!(region.0[..len] == Memory::pattern(2, len).0[..]);
        assert_eq!(ended(&mut world, 0).len(), 2);
        assert_eq!(world.accesses(1).len(), 2);
        world.assert_empty();
    }
}

#[test]
fn an_injected_write_that_waits_counts_as_unsent() {
    let mut world = world(Reach::Off, Reach::Off);
    let mut region = Memory::zeroed(6000);
    world.register(1, KEY, &mut region, &BOTH);
    let peer = world.peer(0, 1);
    let (mut first, mut from) = (Memory::pattern(1, 5000), Memory::pattern(2, 10));
    world.access(0, &rma_op(peer, Write, &mut first, KEY, 1)).unwrap();
    assert!(!world.node(0).engine.has_unsent());
    let op = RmaOp { inject: true, fence: true, ..rma_op(peer, Write, &mut from, KEY, 2) };
    world.access(0, &op).unwrap();
    assert!(world.node(0).engine.has_unsent());
    world.settle();
    assert!(!world.node(0).engine.has_unsent());
    assert_eq!(ended(&mut world, 0).len(), 2);
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn a_target_that_is_short_of_descriptors_answers_later() {
    for (right, len) in [(Write, 10), (Write, 5000), (Read, 10), (Read, 5000)] {
        let mut world = world(Reach::Off, Reach::Off);
        let mut region = Memory::pattern(1, 6000);
        world.register(1, KEY, &mut region, &BOTH);
        let peer = world.peer(0, 1);
        let mut local = Memory::pattern(2, len);
        world.access(0, &rma_op(peer, right, &mut local, KEY, 1)).unwrap();
        for _ in 0..20 {
            world.short(false);
            world.progress(0);
            world.short(true);
            world.progress(1);
        }
        assert_eq!(ended(&mut world, 0), []);
        world.short(false);
        world.settle();
        assert!(matches!(ended(&mut world, 0)[..], [Ok(_)]), "{right:?} {len}");
        assert!(region.0[..len] == local.0[..]);
        world.accesses(1);
        world.assert_empty();
    }
}

#[test]
fn a_long_injected_write_is_not_copied_to_wait() {
    const LEN: usize = COPY_MAX + 1;
    let (get, put) = (vec![Reach::Off], vec![Reach::Off]);
    let weather = Weather { queue_len: 2, get, put, ..Weather::fair() };
    let mut world = World::new(2, weather, LIMITS);
    let (mut region, mut first) = (Memory::zeroed(LEN), Memory::pattern(1, LEN));
    world.register(1, KEY, &mut region, &BOTH);
    let peer = world.peer(0, 1);
    world.access(0, &rma_op(peer, Write, &mut first, KEY, 1)).unwrap();
    let mut from = Memory::pattern(2, LEN);
    let op = RmaOp { inject: true, ..rma_op(peer, Write, &mut from, KEY, 2) };
    assert_eq!(world.access(0, &op), Err(OpError::Again));
    world.settle();
    world.access(0, &op).unwrap();
    from.0.fill(0xee);
    world.settle();
    assert!(region.0 == Memory::pattern(2, LEN).0);
    assert_eq!((ended(&mut world, 0).len(), world.accesses(1).len()), (2, 2));
    world.assert_empty();
}

#[test]
fn a_fence_holds_between_messages_and_one_sided_operations() {
    let mut world = world(Reach::Off, Reach::Off);
    let peer = world.peer(0, 1);
    let (mut region, mut long) = (Memory::zeroed(9000), Memory::pattern(0, 9000));
    world.register(1, KEY, &mut region, &BOTH);
    let (mut a, mut b, mut c) = (Memory::pattern(1, 8), Memory::pattern(2, 8), Memory::zeroed(9));
    // A message behind a write.
    world.access(0, &rma_op(peer, Write, &mut long, KEY, 1)).unwrap();
    world.send(0, &SendOp { fence: true, ..send_op(peer, &mut a, 2) }).unwrap();
    assert!(world.sends(0).is_empty());
    // A read waits behind that message, because that is behind the fence.
    world.access(0, &rma_op(peer, Read, &mut c, KEY, 3)).unwrap();
    let [Err(OpError::Again) | Ok(())] = [world.access(0, &rma_op(peer, Read, &mut c, KEY, 4))]
    else {
        panic!()
    };
    while world.sends(0).is_empty() {
        assert!(world.reports(0, Direction::Read).is_empty());
        world.progress(0);
        world.progress(1);
    }
    assert_eq!(world.reports(0, Direction::Write).len(), 1, "the write has ended");
    world.settle();
    assert_eq!(world.reports(0, Direction::Read).len(), 2);
    // A write behind a message that waits for its receive.
    let op = SendOp { delivery: true, ..send_op(peer, &mut b, 5) };
    world.send(0, &op).unwrap();
    let op = RmaOp { fence: true, ..rma_op(peer, Write, &mut b, KEY, 6) };
    world.access(0, &op).unwrap();
    world.settle();
    assert!(world.reports(0, Direction::Write).is_empty());
    for context in [7, 8] {
        let mut to = Memory::zeroed(8);
        world.receive(1, &receive_op(&mut to, context)).unwrap();
        world.receives(1);
    }
    world.settle();
    assert_eq!(world.reports(0, Direction::Write).len(), 1);
    assert_eq!(world.sends(0).len(), 1);
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn a_target_that_goes_away_ends_what_pends() {
    let closed = (Departure::Closed, libc::ECONNRESET, Cause::PeerClosed);
    let died = (Departure::Failed(Errno(libc::EHOSTDOWN)), libc::EHOSTUNREACH, Cause::PeerDied);
    for (how, error, cause) in [closed, died] {
        let mut world = world(Reach::Off, Reach::Off);
        let mut region = Memory::zeroed(200_000);
        world.register(1, KEY, &mut region, &BOTH);
        let peer = world.peer(0, 1);
        let mut local: Vec<_> = (0..4).map(|_| Memory::zeroed(200_000)).collect();
        for (i, memory) in local.iter_mut().enumerate() {
            let right = if i % 2 == 0 { Write } else { Read };
            let op = RmaOp { fence: i == 2, ..rma_op(peer, right, memory, KEY, i as u64) };
            world.access(0, &op).unwrap();
        }
        world.progress(1);
        world.leave(1, how);
        world.settle();
        let failed = ended(&mut world, 0);
        assert_eq!(failed.len(), 4);
        for report in failed {
            let failure = report.unwrap_err();
            assert_eq!((failure.error, failure.cause), (error, cause));
        }
        world.assert_empty();
    }
}

#[test]
fn an_initiator_that_goes_away_leaves_nothing_behind() {
    for right in BOTH {
        let mut world = world(Reach::Off, Reach::Off);
        let (mut region, mut local) = (Memory::zeroed(200_000), Memory::zeroed(200_000));
        world.register(1, KEY, &mut region, &BOTH);
        let peer = world.peer(0, 1);
        world.access(0, &rma_op(peer, right, &mut local, KEY, 1)).unwrap();
        world.progress(1);
        world.leave(0, Departure::Failed(Errno(libc::EHOSTDOWN)));
        world.settle();
        assert!(world.accesses(1).is_empty());
        world.assert_empty();
    }
}

fn forge(world: &World, from: usize, to: usize, packet: &RmaPacket, payload: &[u8]) {
    world.net.borrow_mut().forge(from, to, packet.encode().as_slice(), payload);
}

/// Encoded fields of 8 bytes.
fn words(of: &[u64]) -> Vec<u8> {
    of.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn packets_that_nobody_sends_are_dropped() {
    let mut world = world(Reach::Off, Reach::Off);
    let mut region = Memory::zeroed(100);
    world.register(1, KEY, &mut region, &BOTH);
    world.peer(2, 1);
    world.settle();
    let range = [KEY, 0, 10];
    let write = |more, sources| RmaPacket::Write { tx: 1, data: None, more, ranges: 1, sources };
    let with_source = [KEY, 0, 10, 0x1000, 9];
    let overflow = [KEY, 0, u64::MAX, KEY, 0, 1];
    let two = RmaPacket::Write { tx: 1, data: None, more: Some(0), ranges: 2, sources: 0 };
    let bad = [
        (write(None, 0), words(&range)),
        (write(None, 0), words(&range[..2])),
        (write(Some(11), 0), words(&range)),
        (write(Some(10), 0), [words(&range), vec![1; 11]].concat()),
        (write(Some(10), 1), words(&with_source)),
        (write(None, 1), words(&with_source)),
        (two, words(&overflow)),
        (RmaPacket::WriteMore { tx: 1, offset: 0 }, vec![1; 10]),
        (RmaPacket::Read { tx: 1, ranges: 1, sinks: 0 }, words(&[KEY, 0])),
        (RmaPacket::Read { tx: 1, ranges: 1, sinks: 1 }, words(&with_source)),
        (RmaPacket::Read { tx: 1, ranges: 1, sinks: 0 }, words(&[KEY, 0, 1, 1])),
        (RmaPacket::ReadData { tx: 0, offset: 0, faulted: false }, vec![1; 10]),
        (RmaPacket::Done { status: 0 }, words(&[0])),
        (RmaPacket::Done { status: 0 }, vec![0; 9]),
        (RmaPacket::Push { tx: 0, faulted: false }, vec![]),
    ];
    for (packet, payload) in &bad {
        let before = world.dropped(1);
        forge(&world, 2, 1, packet, payload);
        world.settle();
        assert_eq!(world.dropped(1) - before, 1, "{packet:?}");
    }
    assert!(region.0.iter().all(|byte| *byte == 0));
    assert!(world.accesses(1).is_empty());
    world.assert_empty();
}

#[test]
fn only_the_target_can_answer_and_only_what_it_was_asked() {
    let mut world = world(Reach::Off, Reach::Off);
    let (mut region, mut local) = (Memory::pattern(1, 100), Memory::zeroed(100));
    world.register(1, KEY, &mut region, &BOTH);
    let peer = world.peer(0, 1);
    world.peer(2, 0);
    world.access(0, &rma_op(peer, Read, &mut local, KEY, 1)).unwrap();
    // It is the first operation, so this is its number.
    let tx = 0;
    let strange = [
        (2, RmaPacket::ReadData { tx, offset: 0, faulted: false }, vec![9; 100]),
        (2, RmaPacket::Done { status: 0 }, words(&[tx])),
        (2, RmaPacket::Done { status: 5 }, words(&[tx])),
        (1, RmaPacket::Done { status: 0 }, words(&[tx])),
        (1, RmaPacket::ReadData { tx, offset: 1, faulted: false }, vec![9; 10]),
        (1, RmaPacket::ReadData { tx, offset: 0, faulted: false }, vec![9; 101]),
        (1, RmaPacket::ReadData { tx: 1 << 32, offset: 0, faulted: false }, vec![9; 100]),
        (1, RmaPacket::Push { tx, faulted: false }, vec![]),
    ];
    for (from, packet, payload) in &strange {
        forge(&world, *from, 0, packet, payload);
        world.progress(0);
    }
    while world.dropped(0) < strange.len() as u64 {
        world.progress(0);
    }
    assert!(ended(&mut world, 0).is_empty() && local.0.iter().all(|byte| *byte == 0));
    world.settle();
    assert!(ended(&mut world, 0)[0].is_ok() && local.0 == region.0);
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn a_target_bounds_what_one_peer_begins() {
    let mut world = world(Reach::Off, Reach::Off);
    let mut region = Memory::zeroed(100);
    world.register(1, KEY, &mut region, &BOTH);
    world.peer(2, 1);
    world.settle();
    // A write that never ends lets no other write in.
    let packet = RmaPacket::Write { tx: 0, data: None, more: Some(10), ranges: 1, sources: 0 };
    for _ in 0..50 {
        forge(&world, 2, 1, &packet, &words(&[KEY, 0, 10]));
        world.progress(1);
    }
    world.settle();
    assert_eq!(world.dropped(1), 49);
    world.leave(2, Departure::Closed);
    world.settle();
    world.assert_empty();
}

#[test]
fn a_read_that_fails_early_does_not_keep_others_from_the_target() {
    const LEN: usize = 200_000;
    const MANY: usize = READ_WINDOW as usize + 8;
    let put = Reach::Fails { after: 0, errno: libc::EFAULT };
    let (get, put) = (vec![Reach::Off], vec![put]);
    let weather = Weather { queue_len: 2 * MANY, get, put, ..Weather::fair() };
    let mut world = World::new(2, weather, Limits { tx_max: 2 * MANY, ..LIMITS });
    let mut region = Memory::pattern(1, LEN);
    world.register(1, KEY, &mut region, &BOTH);
    let peer = world.peer(0, 1);
    // Nothing is mapped there.
    let nowhere = Loopback::list(&[Range { addr: 4096, len: LEN as u64 }]).unwrap();
    let op = rma_op(peer, Read, &mut region, KEY, 0);
    world.access(0, &RmaOp { local: nowhere, ..op }).unwrap();
    let mut local: Vec<_> = (0..MANY).map(|_| Memory::zeroed(5000)).collect();
    for (memory, context) in local.iter_mut().zip(1..) {
        world.access(0, &rma_op(peer, Read, memory, KEY, context)).unwrap();
    }
    world.settle();
    let (failed, ended): (Vec<_>, Vec<_>) =
        ended(&mut world, 0).into_iter().partition(Result::is_err);
    assert!(matches!(failed[..], [Err(failure)] if failure.cause == Cause::BufferUnwritable));
    assert_eq!((ended.len(), world.dropped(1)), (MANY, 0));
    assert!(local.iter().all(|memory| memory.0[..] == region.0[..5000]));
    world.accesses(1);
    world.assert_empty();
}
