//! Atomic operations, one behaviour per test. [`rma_property`] has random ones.
//!
//! [`rma_property`]: super::rma_property

use super::fixture::{LIMITS, Memory, Report, World, receive_op, remote, rma_op, send_op};
use super::sim::{Reach, Weather};
use crate::memory::SegmentList;
use crate::memory::atomic::{Datatype, Form, Op, Operation};
use crate::memory::keys::Right;
use crate::protocol::rma::RmaPacket;
use crate::protocol::{AtomicOp, Cause, Direction, Limits, OpError};
use crate::sys::Errno;
use crate::transport::{Departure, PeerId};

const KEY: u64 = 42;
const BOTH: [Right; 2] = [Right::Read, Right::Write];
const ADD: Operation = Operation { op: Op::Sum, datatype: Datatype::Uint64 };
const LOOK: Operation = Operation { op: Op::Read, datatype: Datatype::Uint64 };
const SWAP: Operation = Operation { op: Op::Cswap, datatype: Datatype::Uint64 };

fn world(atomics: Option<bool>) -> World {
    let limits = Limits { tx_max: 1000, ..LIMITS };
    let weather = Weather {
        atomics,
        queue_len: 1000,
        lies: true,
        get: vec![Reach::Off],
        put: vec![Reach::Off],
        ..Weather::fair()
    };
    World::new(3, weather, limits)
}

fn number(value: u64) -> Memory {
    Memory(value.to_ne_bytes().to_vec())
}

fn value(memory: &Memory) -> u64 {
    u64::from_ne_bytes(memory.0[..8].try_into().unwrap())
}

/// An operation on one element at the start of region `KEY`, to be refined.
fn base(peer: PeerId, operation: Operation, operand: &mut Memory, context: u64) -> AtomicOp {
    AtomicOp {
        peer,
        operation,
        form: Form::Base,
        operand: operand.list(),
        compare: SegmentList::EMPTY,
        result: SegmentList::EMPTY,
        remote: remote(KEY, 0, 8),
        data: None,
        context,
        report: crate::protocol::Report::new(true, 0),
        inject: false,
        fence: false,
    }
}

fn fetch(op: AtomicOp, result: &mut Memory) -> AtomicOp {
    AtomicOp { form: Form::Fetch, result: result.list(), ..op }
}

impl World {
    fn atomic(&mut self, at: usize, op: &AtomicOp) -> Result<(), OpError> {
        let node = self.node(at);
        node.engine.atomic(op, &mut node.host)
    }
}

fn ended(world: &mut World, at: usize) -> Vec<Report> {
    let mut all = world.reports(at, Direction::Update);
    all.extend(world.reports(at, Direction::Fetch));
    all
}

#[test]
fn each_form_does_what_it_says() {
    for to in [0, 1] {
        let mut world = world(Some(true));
        let mut region = number(40);
        world.register(to, KEY, &mut region, &BOTH);
        let peer = world.peer(0, to);
        let (mut two, mut seven, mut old) = (number(2), number(7), number(0));
        let op = AtomicOp { data: Some(9), ..base(peer, ADD, &mut two, 1) };
        world.atomic(0, &op).unwrap();
        world.settle();
        assert_eq!((value(&region), world.accesses(to)), (42, vec![(Right::Update, 8, Some(9))]));
        world.atomic(0, &fetch(base(peer, ADD, &mut two, 2), &mut old)).unwrap();
        world.settle();
        assert_eq!((value(&region), value(&old)), (44, 42));
        assert_eq!(world.accesses(to), [(Right::Exchange, 8, None)]);
        let op = AtomicOp { operand: SegmentList::EMPTY, ..base(peer, LOOK, &mut two, 3) };
        world.atomic(0, &fetch(op, &mut old)).unwrap();
        world.settle();
        assert_eq!((value(&old), world.accesses(to)), (44, vec![(Right::Fetch, 8, None)]));
        for (compare, wanted) in [(43, 44), (44, 7)] {
            let mut compare = number(compare);
            let op = fetch(base(peer, SWAP, &mut seven, 4), &mut old);
            let op = AtomicOp { form: Form::Compare, compare: compare.list(), ..op };
            world.atomic(0, &op).unwrap();
            world.settle();
            assert_eq!((value(&region), value(&old)), (wanted, 44));
            assert_eq!(world.accesses(to), [(Right::Exchange, 8, None)]);
        }
        let contexts: Vec<_> = ended(&mut world, 0).iter().map(|r| r.unwrap().context).collect();
        assert_eq!(contexts, [1, 2, 3, 4, 4]);
        world.assert_empty();
    }
}

#[test]
fn a_region_has_to_allow_what_is_done() {
    for (rights, allowed) in [
        (vec![], [false, false, false]),
        (vec![Right::Write], [true, false, false]),
        (vec![Right::Read], [false, false, true]),
        (BOTH.to_vec(), [true, true, true]),
    ] {
        let mut world = world(Some(true));
        let (mut region, mut one, mut old) = (number(5), number(1), number(77));
        world.register(1, KEY, &mut region, &rights);
        let peer = world.peer(0, 1);
        let plain = base(peer, ADD, &mut one, 1);
        let look = AtomicOp { operand: SegmentList::EMPTY, ..base(peer, LOOK, &mut one, 1) };
        let ops = [plain, fetch(plain, &mut old), fetch(look, &mut old)];
        for (op, allowed) in ops.iter().zip(allowed) {
            world.atomic(0, op).unwrap();
            world.settle();
            match ended(&mut world, 0)[..] {
                [Ok(_)] => assert!(allowed),
                [Err(f)] if !allowed => {
                    assert_eq!((f.error, f.cause), (libc::EACCES, Cause::AccessDenied));
                }
                ref other => panic!("{other:?}"),
            }
        }
        // Another key, and a range beyond the end.
        for (remote, error) in
            [(remote(7, 0, 8), libc::EKEYREJECTED), (remote(KEY, 1, 8), libc::EACCES)]
        {
            world.atomic(0, &AtomicOp { remote, ..ops[1] }).unwrap();
            world.settle();
            assert_eq!(ended(&mut world, 0)[0].unwrap_err().error, error);
        }
        assert_eq!(value(&region), 5 + u64::from(allowed[0]) + u64::from(allowed[1]));
        world.accesses(1);
        world.assert_empty();
    }
}

#[test]
fn operands_that_are_injected_are_kept() {
    // The second operation waits for an answer, or for the first one.
    for atomics in [Some(true), None] {
        let mut world = world(atomics);
        let (mut region, mut seven, mut five) = (number(5), number(7), number(5));
        let mut old = number(0);
        world.register(1, KEY, &mut region, &BOTH);
        let peer = world.peer(0, 1);
        let op = fetch(base(peer, SWAP, &mut seven, 4), &mut old);
        let op = AtomicOp { form: Form::Compare, compare: five.list(), ..op };
        world.atomic(0, &AtomicOp { inject: true, fence: true, ..op }).unwrap();
        seven.0.fill(0xee);
        five.0.fill(0xee);
        world.net.borrow_mut().weather.atomics = Some(true);
        world.settle();
        assert_eq!((value(&region), value(&old)), (7, 5));
        assert!(ended(&mut world, 0)[0].is_ok());
        world.accesses(1);
        world.assert_empty();
    }
}

/// More operations than may be in progress, mixed with writes and reads, all in order.
#[test]
fn queued_atomics_writes_and_reads_stay_in_order() {
    for atomics in [Some(true), None] {
        let mut world = world(atomics);
        let (mut region, mut one, mut hundred) = (number(0), number(1), number(100));
        let mut olds: Vec<Memory> = (0..200).map(|_| number(9999)).collect();
        let mut seen = number(0);
        world.register(1, KEY, &mut region, &BOTH);
        let peer = world.peer(0, 1);
        for old in &mut olds[..100] {
            world.atomic(0, &fetch(base(peer, ADD, &mut one, 1), old)).unwrap();
        }
        world.access(0, &rma_op(peer, Right::Write, &mut hundred, KEY, 2)).unwrap();
        for old in &mut olds[100..] {
            world.atomic(0, &fetch(base(peer, ADD, &mut one, 3), old)).unwrap();
        }
        world.access(0, &rma_op(peer, Right::Read, &mut seen, KEY, 4)).unwrap();
        for _ in 0..10 {
            world.progress(0);
        }
        assert_eq!(ended(&mut world, 0).len(), 0);
        world.net.borrow_mut().weather.atomics = Some(true);
        world.settle();
        for (i, old) in olds.iter().enumerate() {
            assert_eq!(value(old), i as u64, "operation {i}");
        }
        assert_eq!((value(&seen), value(&region)), (200, 200));
        assert_eq!(ended(&mut world, 0).len(), 200);
        assert!(world.reports(0, Direction::Write)[0].is_ok());
        assert!(world.reports(0, Direction::Read)[0].is_ok());
        world.accesses(1);
        world.assert_empty();
    }
}

/// A long read is answered later than operations behind it, so a fetch waits for it.
#[test]
fn a_fetch_does_not_overtake_a_read() {
    let mut world = world(Some(true));
    let mut region = Memory::zeroed(5000);
    let (mut long, mut old, mut one) = (Memory::zeroed(5000), number(0), number(1));
    world.register(1, KEY, &mut region, &BOTH);
    let peer = world.peer(0, 1);
    world.access(0, &rma_op(peer, Right::Read, &mut long, KEY, 1)).unwrap();
    let look = AtomicOp { operand: SegmentList::EMPTY, ..base(peer, LOOK, &mut one, 2) };
    world.atomic(0, &fetch(look, &mut old)).unwrap();
    while world.reports(0, Direction::Read).is_empty() {
        assert!(world.accesses(1).iter().all(|(right, ..)| *right == Right::Read));
        assert!(ended(&mut world, 0).is_empty());
        world.progress(1);
        world.progress(0);
    }
    world.settle();
    assert_eq!(ended(&mut world, 0).len(), 1);
    world.accesses(1);
    world.assert_empty();
}

/// An endpoint that gets a message sees the effects of operations that were started before the message was sent.
#[test]
fn a_message_does_not_overtake_the_first_operation() {
    let mut world = world(None);
    world.net.borrow_mut().weather.batch = 1;
    let (mut region, mut one, mut inbox) = (number(0), number(1), number(0));
    world.register(1, KEY, &mut region, &BOTH);
    let peer = world.peer(0, 1);
    world.receive(1, &receive_op(&mut inbox, 1)).unwrap();
    world.atomic(0, &base(peer, ADD, &mut one, 1)).unwrap();
    world.send(0, &send_op(peer, &mut one, 2)).unwrap();
    for _ in 0..5 {
        world.progress(0);
        world.progress(1);
    }
    assert!(world.receives(1).is_empty());
    world.net.borrow_mut().weather.atomics = Some(true);
    while world.receives(1).is_empty() {
        assert_eq!(value(&inbox), 0);
        world.progress(0);
        world.progress(1);
        assert!(value(&inbox) == 0 || value(&region) == 1);
    }
    world.settle();
    assert_eq!((value(&region), value(&inbox)), (1, 1));
    assert!(ended(&mut world, 0)[0].is_ok() && world.sends(0)[0].is_ok());
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn a_peer_of_before_atomic_operations_gets_none() {
    let mut world = world(None);
    let (mut one, mut old) = (number(1), number(0));
    let peer = world.peer(0, 1);
    // Its answer has not come yet.
    world.atomic(0, &base(peer, ADD, &mut one, 1)).unwrap();
    world.atomic(0, &fetch(base(peer, ADD, &mut one, 2), &mut old)).unwrap();
    world.progress(0);
    assert!(world.node(0).engine.is_busy(), "nobody would wake it");
    world.net.borrow_mut().weather.atomics = Some(false);
    world.settle();
    let reports = ended(&mut world, 0);
    assert_eq!(reports.len(), 2);
    for report in reports {
        let failure = report.unwrap_err();
        assert_eq!((failure.error, failure.cause), (libc::EOPNOTSUPP, Cause::NoAtomics));
    }
    let refused = world.atomic(0, &base(peer, ADD, &mut one, 1));
    assert_eq!(refused, Err(OpError::Error(libc::EOPNOTSUPP)));
    assert_eq!(world.dropped(1), 0);
    world.assert_empty();
}

#[test]
fn a_departed_peer_leaves_nothing_behind() {
    for atomics in [Some(true), None] {
        for leaves in [0, 1] {
            let mut world = world(atomics);
            let (mut region, mut one, mut old) =
                (Memory::zeroed(800), Memory::zeroed(800), Memory::zeroed(800));
            world.register(1, KEY, &mut region, &BOTH);
            let peer = world.peer(0, 1);
            for i in 0..100 {
                let op = fetch(base(peer, ADD, &mut one, i), &mut old);
                world.atomic(0, &AtomicOp { remote: remote(KEY, 0, 800), ..op }).unwrap();
            }
            world.progress(0);
            world.progress(1);
            world.leave(leaves, Departure::Failed(Errno(libc::EHOSTDOWN)));
            world.settle();
            let reports = ended(&mut world, 0);
            assert_eq!(reports.len(), if leaves == 1 { 100 } else { 0 });
            // Operations that were answered before have succeeded.
            let failures = reports.iter().filter_map(|report| report.err());
            let errors: Vec<_> = failures.map(|failure| failure.error).collect();
            assert!(leaves == 0 || errors.len() > 30 && (atomics.is_some() || errors.len() == 100));
            assert!(errors.iter().all(|error| *error == libc::EHOSTUNREACH), "{errors:?}");
            world.accesses(1);
            world.assert_empty();
        }
    }
}

fn forge(world: &World, from: usize, to: usize, packet: &RmaPacket, payload: &[u8]) {
    world.net.borrow_mut().forge(from, to, packet.encode().as_slice(), payload);
}

fn words(of: &[u64]) -> Vec<u8> {
    of.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn packets_that_nobody_sends_are_dropped() {
    let mut world = world(Some(true));
    let mut region = Memory::zeroed(100);
    world.register(1, KEY, &mut region, &BOTH);
    world.peer(2, 1);
    world.settle();
    let packet = |op: Op, fetches, ranges| RmaPacket::Atomic {
        tx: 1,
        data: None,
        fetches,
        ranges,
        op: op as u8,
        datatype: Datatype::Uint64 as u8,
    };
    let bad = [
        (packet(Op::Sum, false, 1), words(&[KEY, 0, 8])),
        (packet(Op::Sum, false, 1), words(&[KEY, 0, 8, 1, 1])),
        (packet(Op::Sum, false, 1), words(&[KEY, 0, 0])),
        (packet(Op::Sum, false, 0), words(&[])),
        (packet(Op::Sum, false, 1), [words(&[KEY, 0, 9]), vec![0; 9]].concat()),
        (packet(Op::Sum, false, 2), [words(&[KEY, 0, 4, KEY, 4, 4]), vec![1; 8]].concat()),
        (packet(Op::Read, true, 1), words(&[KEY, 0, 8, 1])),
        (packet(Op::Cswap, true, 1), words(&[KEY, 0, 8, 1])),
        (packet(Op::Sum, true, 1), [words(&[KEY, 0, 8000]), vec![0; 8000]].concat()),
        (packet(Op::Sum, true, 2), words(&[KEY, 0, u64::MAX, KEY, 0, 9])),
        (RmaPacket::Result { tx: 0 }, words(&[1])),
    ];
    for (packet, payload) in &bad {
        let before = world.dropped(1);
        forge(&world, 2, 1, packet, payload);
        world.settle();
        assert_eq!(world.dropped(1) - before, 1, "{packet:?}");
    }
    // An operation of a later version is refused by number. No operation waits for the answer, so it is dropped.
    for packet in [
        RmaPacket::Atomic { tx: 1, data: None, fetches: true, ranges: 1, op: 200, datatype: 7 },
        RmaPacket::Atomic { tx: 1, data: None, fetches: true, ranges: 1, op: 2, datatype: 99 },
        packet(Op::Read, false, 1),
    ] {
        let before = world.dropped(2);
        forge(&world, 2, 1, &packet, &words(&[KEY, 0, 8, 1]));
        world.settle();
        assert_eq!(world.dropped(2) - before, 1, "{packet:?}");
    }
    assert!(region.0.iter().all(|byte| *byte == 0));
    assert!(world.accesses(1).is_empty());
    world.assert_empty();
}

#[test]
fn only_the_target_can_answer_and_only_what_it_was_asked() {
    let mut world = world(Some(true));
    let (mut region, mut one, mut old) = (number(3), number(1), number(0));
    world.register(1, KEY, &mut region, &BOTH);
    let peer = world.peer(0, 1);
    world.peer(2, 0);
    world.settle();
    world.atomic(0, &fetch(base(peer, ADD, &mut one, 1), &mut old)).unwrap();
    // It is the first operation, so this is its number.
    let tx = 0;
    let strange = [
        (2, RmaPacket::Result { tx }, words(&[9])),
        (2, RmaPacket::Done { status: 5 }, words(&[tx])),
        (1, RmaPacket::Done { status: 0 }, words(&[tx])),
        (1, RmaPacket::Result { tx }, words(&[9, 9])),
        (1, RmaPacket::Result { tx }, vec![9; 7]),
        (1, RmaPacket::Result { tx: 1 }, words(&[9])),
        (1, RmaPacket::ReadData { tx, offset: 0, faulted: false }, words(&[9])),
    ];
    world.peer(1, 0);
    for (from, packet, payload) in &strange {
        forge(&world, *from, 0, packet, payload);
        world.progress(0);
    }
    assert_eq!(world.dropped(0), strange.len() as u64);
    assert!(ended(&mut world, 0).is_empty() && value(&old) == 0);
    world.settle();
    assert!(ended(&mut world, 0)[0].is_ok());
    assert_eq!((value(&old), value(&region)), (3, 4));
    world.accesses(1);
    world.assert_empty();
}

#[test]
fn a_target_bounds_what_one_peer_fetches() {
    let mut world = world(Some(true));
    let mut region = number(0);
    world.register(1, KEY, &mut region, &BOTH);
    world.peer(2, 1);
    world.settle();
    let packet = RmaPacket::Atomic {
        tx: 1,
        data: None,
        fetches: true,
        ranges: 1,
        op: Op::Sum as u8,
        datatype: Datatype::Uint64 as u8,
    };
    for _ in 0..64 {
        forge(&world, 2, 1, &packet, &words(&[KEY, 0, 8, 1]));
    }
    world.net.borrow_mut().weather.again_percent = 100;
    let work = |world: &mut World| (0..100).for_each(|_| world.progress(1));
    work(&mut world);
    assert_eq!((value(&region), world.dropped(1)), (64, 0));
    forge(&world, 2, 1, &packet, &words(&[KEY, 0, 8, 1]));
    work(&mut world);
    assert_eq!((value(&region), world.dropped(1)), (64, 1));
    world.net.borrow_mut().weather.again_percent = 0;
    world.settle();
    world.accesses(1);
    assert_eq!(world.dropped(2), 64);
    world.assert_empty();
}
