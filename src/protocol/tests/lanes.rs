//! Two lanes for bulk to one peer: which one carries what, and what becomes of both when one is lost.

use super::alone::{self, BOTH, KEY, distant, ended, introduce};
use super::fixture::{Memory, World, remote, rma_op, send_op};
use super::sim_window::{Glazing, RAILS, key_of};
use super::windows::{Begun, LEN, WINDOW, glazing};
use crate::memory::keys::Right::{self, Read, Write};
use crate::protocol::RmaOp;
use crate::protocol::packet::Packet;
use crate::sys::Errno;
use crate::transport::{LaneId, OneSided, Prepared, Put, Remote, RemoteKey, SendError};

const BETTER: LaneId = RAILS[0];
const OTHER: LaneId = RAILS[1];

/// Two endpoints with two devices each.
fn two() -> Glazing {
    Glazing { rails: 2, ..glazing() }
}

/// The keys of the remote buffers that endpoint 1 has just advertised to 0.
fn keys(world: &World) -> Vec<RemoteKey> {
    let key = |packet| match packet {
        Packet::Window { remote, .. } => Some(remote),
        _ => None,
    };
    world.on_wire(1, 0).into_iter().filter_map(key).collect()
}

/// Runs until `done`.
fn until(world: &mut World, mut done: impl FnMut(&mut World) -> bool) {
    for _ in 0..1000 {
        if done(world) {
            return;
        }
        world.progress(0);
        world.progress(1);
    }
    panic!("it does not happen");
}

/// Bytes that endpoint 0 wrote into remote buffers and sent as fragments, and remote buffers that endpoint 1 lost.
fn moved(world: &mut World) -> (u64, u64, u64) {
    let (sender, receiver) = (world.node(0).engine.counts(), world.node(1).engine.counts());
    (sender.window_bytes, sender.fragment_bytes, receiver.windows_lost)
}

/// Begins a put under a key of endpoint 1.
fn put(world: &mut World, key: RemoteKey) -> Result<(), SendError> {
    let (peer, mut bytes) = (world.peer(0, 1), Memory::zeroed(1));
    let local = send_op(peer, &mut bytes, 0).payload;
    let how = Put { notify: false, delivered: false, stays: false, reports: false, token: 0 };
    let iface = world.node(0).engine.iface_mut();
    iface.put(peer, &local, &Remote { key, offset: 0 }, how).map(|_| ())
}

#[test]
fn the_lane_of_least_cost_carries_a_message() {
    let begun = Begun::new(two());
    let keys = keys(&begun.world);
    assert!(keys.len() == 4 && keys.iter().all(|key| BETTER.made(key)), "{keys:?}");
    assert_eq!(moved(&mut begun.finish()), (LEN as u64, 0, 0));
}

#[test]
fn a_message_goes_on_by_the_next_lane_when_its_lane_is_lost() {
    for state in [Prepared::No, Prepared::Later] {
        let mut begun = Begun::new(two());
        until(&mut begun.world, |world| {
            let active = &world.node(1).engine.core.arrivals.active;
            active.iter().any(|(_, active)| active.message.received >= WINDOW)
        });
        begun.world.net.borrow_mut().lose_rail((0, 1), BETTER, state);
        let lost = |world: &mut World| world.node(1).engine.counts().windows_lost > 0;
        until(&mut begun.world, lost);
        until(&mut begun.world, |world| keys(world).iter().any(|key| OTHER.made(key)));
        let (written, fragments, _) = moved(&mut begun.finish());
        assert!(written >= LEN as u64 && fragments == 0, "{written} {fragments}");
    }
}

#[test]
fn the_loss_of_another_lane_changes_nothing() {
    let mut begun = Begun::new(two());
    let heard = |begun: &Begun| begun.world.net.borrow().connection_of((1, 0), OTHER);
    let before = heard(&begun);
    begun.world.net.borrow_mut().lose_rail((0, 1), OTHER, Prepared::No);
    for rounds in 0.. {
        assert!(rounds < 1000, "endpoint 1 never hears of the loss");
        begun.world.progress(1);
        if heard(&begun) != before {
            break;
        }
    }
    assert_eq!(begun.received(), 0, "the message is not here yet");
    assert_eq!(moved(&mut begun.finish()), (LEN as u64, 0, 0));
}

#[test]
fn a_lane_that_is_back_carries_messages_again() {
    let mut begun = Begun::new(Glazing { begin: vec![Prepared::No], ..two() });
    assert_eq!(keys(&begun.world), [], "there is no lane");
    for (rail, expected) in [(OTHER, OTHER), (BETTER, BETTER)] {
        let world = begun.finish();
        world.net.borrow_mut().set_rail((0, 1), rail, Prepared::Ready);
        begun = Begun::on(world);
        let keys = keys(&begun.world);
        assert!(!keys.is_empty() && keys.iter().all(|key| expected.made(key)), "{keys:?}");
    }
    begun.finish();
}

#[test]
fn a_key_of_a_lost_lane_is_refused_and_that_of_another_is_not() {
    let mut world = Begun::new(two()).finish();
    let key = |world: &World, rail| {
        let connection = world.net.borrow().connection_of((0, 1), rail);
        key_of(rail, (connection, 1), 0)
    };
    let [better, other] = RAILS.map(|rail| key(&world, rail));
    world.net.borrow_mut().lose_rail((0, 1), BETTER, Prepared::Ready);
    until(&mut world, |world| key(world, BETTER) != better);
    let stale = SendError::Unreachable(Errno(libc::ESTALE));
    assert_eq!((put(&mut world, better), put(&mut world, other)), (Err(stale), Ok(())));
}

/// Whether an access of endpoint 0 to `len` bytes of a region from `addr` on is direct.
fn is_direct(world: &mut World, right: Right, (key, addr, len): (u64, u64, usize)) -> bool {
    let (peer, before) = (world.peer(0, 1), world.node(0).engine.counts().reached_bytes);
    let mut local = Memory::pattern(1, len);
    let place = remote(key, addr, len);
    world.access(0, &RmaOp { remote: place, ..rma_op(peer, right, &mut local, key, 1) }).unwrap();
    world.settle();
    assert!(ended(world).iter().all(Result::is_ok));
    world.accesses(1);
    world.node(0).engine.counts().reached_bytes > before
}

/// Endpoint 0 accesses two regions of 1: `KEY` by the better lane, `KEY + 1` by the other one.
fn with_regions(glazing: Glazing, [first, second]: &mut [Memory; 2]) -> World {
    let mut world = distant(Glazing { rails: 2, steady: true, ..glazing });
    world.register(1, KEY, first, &BOTH);
    introduce(&mut world);
    world.net.borrow_mut().set_rail((0, 1), BETTER, Prepared::No);
    world.register(1, KEY + 1, second, &BOTH);
    let place = (KEY + 1, 0, alone::LEN);
    assert!(
        (0..100).any(|_| is_direct(&mut world, Write, place)),
        "it is never told of the region"
    );
    world.net.borrow_mut().set_rail((0, 1), BETTER, Prepared::Ready);
    assert_eq!(world.net.borrow().advertised(1, 0), RAILS);
    world
}

fn regions() -> [Memory; 2] {
    [0; 2].map(|_| Memory::zeroed(alone::LEN))
}

#[test]
fn the_lane_of_a_region_says_which_accesses_are_worth_it() {
    let mut regions = regions();
    let mut world = with_regions(Glazing::none(), &mut regions);
    let direct = [KEY, KEY + 1].map(|key| is_direct(&mut world, Read, (key, 0, 100)));
    assert_eq!(direct, [true, false]);
    assert!(is_direct(&mut world, Read, (KEY + 1, 0, 130)));
    world.assert_empty();
}

#[test]
fn a_flush_may_be_complete_at_once() {
    let mut regions = regions();
    let mut world = with_regions(Glazing { quick_flush: true, ..Glazing::none() }, &mut regions);
    let peer = world.peer(0, 1);
    let mut from = [1, 2, 3].map(|seed| Memory::pattern(seed, alone::LEN));
    for (n, (key, data)) in [(KEY, None), (KEY + 1, None), (KEY, Some(9))].into_iter().enumerate() {
        let op = RmaOp { data, ..rma_op(peer, Write, &mut from[n], key, 1) };
        world.access(0, &op).unwrap();
    }
    world.settle();
    assert!(matches!(ended(&mut world)[..], [Ok(_), Ok(_), Ok(_)]));
    assert!(regions[0].0 == from[2].0 && regions[1].0 == from[1].0);
    assert_eq!(world.accesses(1), [(Write, alone::LEN, Some(9))]);
    world.assert_empty();
}

#[test]
fn a_region_is_advertised_on_one_lane() {
    let mut world =
        distant(Glazing { rails: 2, steady: true, expose_max: 1000, ..Glazing::none() });
    world.peer(0, 1);
    world.settle();
    let mut region = Memory::zeroed(alone::LEN);
    world.register(1, KEY, &mut region, &BOTH);
    for (state, addr) in [(Prepared::No, 0), (Prepared::Ready, 2000)] {
        world.net.borrow_mut().set_rail((0, 1), BETTER, state);
        let place = (KEY, addr, 1000);
        assert!(
            (0..100).any(|_| is_direct(&mut world, Write, place)),
            "it is never told of {addr}"
        );
        assert_eq!(world.net.borrow().advertised(1, 0), [OTHER]);
    }
    world.assert_empty();
}

#[test]
fn after_the_loss_of_a_lane_the_peer_answers_a_message_before_another_lane_is_used() {
    let mut regions = regions();
    let mut world = with_regions(Glazing::none(), &mut regions);
    let peer = world.peer(0, 1);
    let [mut before, mut after] = [1, 2].map(|seed| Memory::pattern(seed, alone::LEN));
    world.access(0, &rma_op(peer, Write, &mut before, KEY, 1)).unwrap();
    let heard = |world: &mut World| world.net.borrow().connection_of((0, 1), BETTER);
    let connection = heard(&mut world);
    until(&mut world, |world| ended(world).len() == 1);
    world.net.borrow_mut().lose_rail((0, 1), BETTER, Prepared::No);
    let reached = |world: &mut World| world.node(0).engine.counts().reached_bytes;
    let direct = reached(&mut world);
    for rounds in 0.. {
        assert!(rounds < 1000, "endpoint 0 never hears of the loss");
        world.progress(0);
        if heard(&mut world) != connection {
            break;
        }
    }
    world.access(0, &rma_op(peer, Write, &mut after, KEY + 1, 2)).unwrap();
    world.settle();
    assert!(matches!(ended(&mut world)[..], [Ok(_)]) && regions[1].0 == after.0);
    assert_eq!((reached(&mut world), world.accesses(1)), (direct, vec![(Write, alone::LEN, None)]));
    assert!(is_direct(&mut world, Write, (KEY + 1, 0, alone::LEN)), "the peer has answered");
    world.assert_empty();
}
