//! Two lanes for bulk to one peer: which one carries what, and what becomes of both when one is lost.

use super::fixture::{Memory, World, send_op};
use super::sim_window::{Glazing, RAILS, key_of};
use super::windows::{Begun, LEN, WINDOW, glazing};
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
    let how = Put { notify: false, delivered: false, stays: false, token: 0 };
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
