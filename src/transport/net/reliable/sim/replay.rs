//! Old handshakes of a peer, replayed by an attacker during a new handshake.

use super::super::packet::{Hello, HelloKind};
use super::app::Flow;
use super::network::Slot;
use super::oracle::Sizes;
use super::rng::Rng;
use super::scenario::plain;
use super::weather::Weather;
use super::world::World;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
/// Incarnations whose handshakes the attacker has captured, and incarnations that it disturbs.
const EARLIER: usize = 12;
const LATER: usize = 60;
const MESSAGES: u32 = 5;

/// Starts an incarnation at slot 0 that sends to slot 1, and runs it for `ns`, calling `disturb` every few
/// microseconds. All its messages must arrive in that time.
fn live(world: &mut World, both_ask: bool, ns: u64, mut disturb: impl FnMut(&mut World)) {
    let mut rng = Rng::new(world.network.clock.now);
    let mut now = world.network.clock.now;
    let flow = |to: Slot| vec![Flow::new(to, Sizes::UpTo(1000), MESSAGES).begins(now)];
    world.start(0, plain(), flow(1));
    if both_ask {
        world.start(1, plain(), flow(0));
    }
    let before = world.oracle.messages;
    let end = now + ns;
    while now < end {
        now += rng.below(10 * US);
        world.run_until(now);
        disturb(world);
    }
    let messages = u64::from(MESSAGES) * (1 + u64::from(both_ask));
    assert_eq!(world.oracle.messages - before, messages, "a life from {} ms", (end - ns) / MS);
    let by_0 = world.reports.iter().filter(|r| r.by == 0).count();
    assert_eq!(by_0, 0, "{:?}", world.reports);
}

fn inits(world: &World) -> Vec<Vec<u8>> {
    let to_1 = world.network.heard().filter(|(to, _)| *to == 1).map(|(_, bytes)| bytes.to_vec());
    to_1.filter(|bytes| Hello::decode(bytes).is_some_and(|h| h.kind == HelloKind::Init)).collect()
}

#[test]
fn they_neither_end_nor_delay_a_new_one() {
    for both_ask in [false, true] {
        let mut world = World::new(3, 2, Weather::fair());
        world.network.capture = true;
        world.start(1, plain(), Vec::new());
        for _ in 0..EARLIER {
            live(&mut world, both_ask, 5 * MS, |_| ());
        }
        let old = inits(&world);
        assert!(old.len() >= EARLIER);
        let mut rng = Rng::new(4);
        for _ in 0..LATER {
            live(&mut world, both_ask, 25 * MS, |world| {
                let init = rng.pick(&old);
                world.network.inject(0, 1, &init);
            });
        }
        world.run();
    }
}
