//! Worlds drawn from a seed.

use super::app::Flow;
use super::network::Slot;
use super::node::Habits;
use super::oracle::Sizes;
use super::rng::{Chance, Rng};
use super::weather::{Burst, Cut, Path, Weather};
use super::world::{Act, World};
use crate::transport::net::reliable::packet::HEADER_TAGS;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// Ordinary properties: a socket on a network of 1500 bytes.
pub(super) fn plain() -> Habits {
    Habits {
        datagram_max: 1472,
        sound: false,
        features: 0,
        peer_timeout_ns: 4000 * MS,
        buffer_bytes: 4 << 20,
        receive_window: 512,
        first_psn: 1,
        job: 1,
        background: true,
        turn_ns: US,
        waits: false,
    }
}

/// A world with all kinds of events and about `size` messages.
pub(super) fn draw(seed: u64, size: u32) -> World {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let slots = 2 + rng.below(rng.clone().range(1, 8)) as usize;
    let rough = rng.percent(80);
    let (weather, fragile) = weather(&mut rng, slots, rough);
    let mut world = World::new(seed, slots, weather);
    world.fragile = fragile;
    let troubled = rng.percent(60);
    let span = 20 * MS + rng.below(400 * MS);
    let cast = Cast::draw(&mut rng, &mut Rng::new(seed ^ 0x50d), slots);
    for slot in 0..slots as Slot {
        let flows = flows(&mut rng, slots as Slot, slot, size / slots as u32 + 1, span);
        world.start(slot, cast.habits(&mut rng, slot), flows);
    }
    if troubled {
        trouble(&mut rng, &mut world, &cast, slots as Slot, span, size);
    }
    world
}

/// The common properties of a world's endpoints.
struct Cast {
    base: Habits,
    stranger: Option<Slot>,
    jumbo: bool,
    /// Which slots have paths that deliver no damaged packets, and which know that feature, a bit for each slot.
    sound: u64,
    knowing: u64,
}

impl Cast {
    /// `apart` draws properties that were added later, so that earlier seeds still make the same worlds.
    fn draw(rng: &mut Rng, apart: &mut Rng, slots: usize) -> Self {
        let base = Habits {
            peer_timeout_ns: rng.pick(&[3000, 4000, 10_000]) * MS,
            // A little more than one message and its reply need.
            buffer_bytes: rng.pick(&[256 << 10, 400 << 10, 1 << 20, 8 << 20]),
            receive_window: rng.pick(&[4, 8, 32, 128, 512, 2048]),
            background: rng.percent(80),
            waits: rng.percent(40),
            first_psn: rng.pick(&[1, 1, 0x7fff_fff0, u32::MAX - 20]),
            ..plain()
        };
        let stranger = rng.percent(15).then(|| rng.index(slots) as Slot).filter(|_| slots > 2);
        let some = apart.percent(40);
        let sound = if some { apart.next() | apart.next() } else { 0 };
        let knowing = if some { apart.next() | apart.next() | apart.next() } else { 0 };
        Self { base, stranger, jumbo: rng.percent(40), sound, knowing }
    }

    fn habits(&self, rng: &mut Rng, slot: Slot) -> Habits {
        let lengths: &[usize] = if self.jumbo { &[1472, 4000, 8972] } else { &[1472, 1200] };
        Habits {
            datagram_max: rng.pick(lengths),
            sound: self.sound >> slot & 1 == 1,
            features: if self.knowing >> slot & 1 == 1 { HEADER_TAGS } else { 0 },
            job: if self.stranger == Some(slot) { 2 } else { 1 },
            turn_ns: rng.pick(&[200, US, 3 * US, 20 * US]),
            ..self.base.clone()
        }
    }
}

/// The network's conditions, and whether they are so bad that live peers may be declared dead.
fn weather(rng: &mut Rng, slots: usize, rough: bool) -> (Weather, bool) {
    let mut weather = Weather::fair();
    weather.path.delay_ns = rng.pick(&[2 * US, 10 * US, 20 * US, 100 * US, 2 * MS]);
    weather.byte_ps = rng.pick(&[0, 80, 800, 8000]);
    if rng.percent(30) {
        weather.port_bytes = rng.pick(&[16 << 10, 64 << 10, 256 << 10]);
        if rng.percent(50) {
            weather.mark_bytes = weather.port_bytes / 4;
        }
    }
    if rng.percent(30) {
        weather.socket_bytes = rng.pick(&[20 << 10, 208 << 10]);
    }
    if rng.percent(30) {
        weather.interface_bytes = rng.pick(&[0, 10 << 10, 100 << 10]);
    }
    if !rough {
        return (weather, false);
    }
    weather.path = path(rng, weather.path);
    if rng.percent(20) {
        weather.again = Chance::percent(rng.pick(&[1.0, 20.0]));
    }
    if rng.percent(30) {
        for _ in 0..1 + rng.below(slots as u64) {
            let (from, to) = (rng.index(slots) as Slot, rng.index(slots) as Slot);
            let path = path(rng, weather.path.clone());
            weather.others.push((from, to, path));
        }
    }
    let worst = |p: &Path| p.loss.as_percent() + p.damage.as_percent();
    let others = weather.others.iter().map(|(_, _, path)| path);
    let fragile = others.chain([&weather.path]).any(|path| worst(path) > 15.0);
    (weather, fragile)
}

fn path(rng: &mut Rng, fair: Path) -> Path {
    let mut path = fair;
    if rng.percent(60) {
        path.loss = Chance::percent(rng.pick(&[0.01, 0.1, 1.0, 3.0, 10.0, 30.0]));
    }
    if rng.percent(25) {
        path.burst = Burst {
            begins: Chance::percent(rng.pick(&[0.02, 0.2, 1.0])),
            length_ns: rng.pick(&[10 * US, 300 * US, 5 * MS]),
            loss: Chance::percent(rng.pick(&[50.0, 100.0])),
        };
    }
    if rng.percent(30) {
        path.duplicate = Chance::percent(rng.pick(&[0.1, 2.0, 20.0]));
    }
    if rng.percent(40) {
        path.reorder = Chance::percent(rng.pick(&[0.1, 2.0, 20.0]));
        path.reorder_ns = rng.pick(&[5 * US, 50 * US, MS, 10 * MS]);
    }
    if rng.percent(20) {
        path.jitter_ns = rng.pick(&[US, 50 * US, MS]);
    }
    if rng.percent(25) {
        path.damage = Chance::percent(rng.pick(&[0.1, 2.0, 10.0]));
    }
    if rng.percent(8) {
        path.carries = rng.pick(&[1200, 1300, 1471, 2000, 5000]);
        path.uncut = rng.percent(50);
    }
    path
}

/// What the endpoint at `from` sends, about `messages` messages.
fn flows(rng: &mut Rng, slots: Slot, from: Slot, messages: u32, span: u64) -> Vec<Flow> {
    let others: Vec<Slot> = (0..slots).filter(|s| *s != from).collect();
    let to: Vec<Slot> = match rng.below(5) {
        0 => others,
        1 => others.into_iter().filter(|s| *s == 0).collect(),
        2 => Vec::new(),
        _ => vec![rng.pick(&others)],
    };
    let sizes = rng.pick(&[
        Sizes::UpTo(0),
        Sizes::UpTo(64),
        Sizes::UpTo(1400),
        Sizes::UpTo(16 << 10),
        Sizes::UpTo(64 << 10),
        Sizes::Mixed,
        Sizes::Mixed,
    ]);
    let share = messages / to.len().max(1) as u32 + 1;
    let share = match sizes {
        Sizes::UpTo(most) if most > 20_000 => share / 8 + 1,
        Sizes::UpTo(most) if most > 2000 => share / 3 + 1,
        _ => share,
    };
    to.into_iter()
        .map(|to| {
            let mut flow = Flow::new(to, sizes, share).begins(rng.below(span / 2));
            flow.retries = rng.below(6) as u32;
            match rng.below(4) {
                0 => flow.ping_pong(1 + rng.below(4) as u32),
                1 => flow.bursts(1 + rng.below(200) as u32, rng.below(20 * MS)),
                // So rarely that all state has been freed in between.
                2 if rng.percent(10) => flow.bursts(share / 4 + 1, 6000 * MS),
                _ => flow,
            }
        })
        .collect()
}

/// The events at the endpoints within `span`.
fn trouble(rng: &mut Rng, world: &mut World, cast: &Cast, slots: Slot, span: u64, size: u32) {
    let timeout = cast.base.peer_timeout_ns;
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(span);
        let slot = rng.index(slots as usize) as Slot;
        match rng.below(9) {
            0 | 1 => {
                let all = (1u64 << slots) - 1;
                let from = 1 + rng.below(all);
                let (from, to) =
                    if rng.percent(50) { (from, all & !from) } else { (all & !from, from) };
                let length = rng.pick(&[MS, 100 * MS, 1000 * MS, timeout / 3, timeout * 2]);
                let end = at + rng.below(length);
                world.cut(Cut { from, to, start: at, end });
                if rng.percent(60) {
                    world.cut(Cut { from: to, to: from, start: at, end });
                }
            }
            2 | 3 => {
                let length = rng.pick(&[MS, 100 * MS, 1000 * MS, timeout / 2]);
                // Without that thread, a process that does not poll for long counts as dead.
                let length =
                    if cast.base.background && rng.percent(30) { timeout * 3 } else { length };
                let stopped = rng.percent(20);
                world.plan(at, Act::Pause { slot, until: at + rng.below(length), stopped });
            }
            4 => world.plan(at, Act::Crash { slot, refuses: rng.percent(50) }),
            5 => world.plan(at, Act::Close { slot, abrupt: rng.percent(30) }),
            6 | 7 => {
                if rng.percent(70) {
                    let act = match rng.below(3) {
                        0 => Act::Close { slot, abrupt: rng.percent(50) },
                        _ => Act::Crash { slot, refuses: rng.percent(50) },
                    };
                    world.plan(at, act);
                }
                let after = rng.pick(&[0, US, MS, 50 * MS, 300 * MS]);
                let again = at + rng.below(after + 1);
                let flows = flows(rng, slots, slot, size / slots + 1, span)
                    .into_iter()
                    .map(|flow| {
                        let begins = again + rng.below(MS);
                        flow.begins(begins)
                    })
                    .collect();
                let habits = cast.habits(rng, slot);
                world.plan(again, Act::Start { slot, habits, flows });
            }
            _ => {
                world.plan(at, Act::Pressure { slot, on: true });
                world.plan(at + rng.below(100 * MS), Act::Pressure { slot, on: false });
            }
        }
    }
    if rng.percent(40) {
        world.network.capture = true;
        // An attacker that forwards long handshakes around a narrow path would make it seem wide.
        world.network.weather.each_path(|path| path.uncut = false);
        let count = 1 + rng.below(8) as u32;
        let every_ns = 20 * US + rng.below(MS);
        let at = rng.below(span);
        let until = at + rng.below(200 * MS);
        world.plan(at, Act::Attack { count, every_ns, until });
    }
}
