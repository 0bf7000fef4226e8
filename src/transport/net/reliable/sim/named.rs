//! Single failures, and how soon they are noticed.

use super::app::{Flow, Report};
use super::network::Slot;
use super::node::Habits;
use super::oracle::Sizes;
use super::outcome::Outcome;
use super::rng::Chance;
use super::scenario::plain;
use super::weather::{Cut, Weather};
use super::world::{Act, World};
use crate::sys::Errno;
use crate::transport::{Departure, PeerId};

const MS: u64 = 1_000_000;
const SMALL: Sizes = Sizes::UpTo(1000);

/// Two endpoints; the first sends all the time until `until`, the second waits for it.
fn pair(until: u64) -> World {
    let mut world = World::new(9, 2, Weather::fair());
    let flow = Flow::new(1, SMALL, (until / MS) as u32).bursts(1, MS);
    world.start(0, plain(), vec![flow]);
    world.start(1, Habits { waits: true, ..plain() }, Vec::new());
    world
}

/// The reports of `by` in `world`: time, ms, and departure.
fn told(world: &World, by: Slot) -> Vec<(u64, Departure)> {
    let by_it = |r: &&Report| r.by == by;
    world.reports.iter().filter(by_it).map(|r| (r.at / MS, r.departure)).collect()
}

fn failed(errno: i32) -> Departure {
    Departure::Failed(Errno(errno))
}

#[test]
fn a_silent_death_is_noticed_after_the_timeout() {
    let mut world = pair(100 * MS);
    world.plan(50 * MS, Act::Crash { slot: 0, refuses: false });
    world.run();
    let [(at, what)] = told(&world, 1)[..] else { panic!("{:?}", world.reports) };
    assert_eq!(what, failed(libc::ETIMEDOUT));
    assert!((4000..5500).contains(&at), "after {at} ms");
}

#[test]
fn a_death_that_the_system_tells_is_noticed_soon() {
    let mut world = pair(100 * MS);
    world.plan(50 * MS, Act::Crash { slot: 0, refuses: true });
    world.run();
    let [(at, what)] = told(&world, 1)[..] else { panic!("{:?}", world.reports) };
    assert_eq!(what, failed(libc::EHOSTDOWN));
    assert!(at < 2500, "after {at} ms");
}

#[test]
fn goodbye_is_heard_at_once() {
    let mut world = pair(100 * MS);
    world.plan(50 * MS, Act::Close { slot: 0, abrupt: false });
    world.run();
    let [(at, what)] = told(&world, 1)[..] else { panic!("{:?}", world.reports) };
    assert_eq!(what, Departure::Closed);
    assert!(at <= 60, "after {at} ms");
}

#[test]
fn a_process_that_computes_is_alive() {
    for slot in [0, 1] {
        let mut world = pair(100 * MS);
        world.plan(50 * MS, Act::Pause { slot, until: 60_000 * MS, stopped: false });
        let outcome = world.run();
        assert_eq!((outcome.departures, outcome.messages), (0, 100));
        assert!(outcome.delivered_at < 61_000 * MS, "{} ms", outcome.delivered_at / MS);
    }
}

#[test]
fn a_new_life_takes_the_place_of_the_old_one() {
    let mut world = pair(100 * MS);
    world.plan(50 * MS, Act::Crash { slot: 0, refuses: true });
    let flows = vec![Flow::new(1, SMALL, 10).begins(51 * MS)];
    world.plan(51 * MS, Act::Start { slot: 0, habits: plain(), flows });
    let outcome = world.run();
    assert_eq!(told(&world, 1), [(51, failed(libc::EHOSTDOWN))]);
    assert!((58..=61).contains(&outcome.messages), "{}", outcome.messages);
}

#[test]
fn a_short_partition_costs_little_more_than_itself() {
    for (from, to) in [(1, 2), (2, 1), (3, 3)] {
        let mut world = pair(100 * MS);
        world.cut(Cut { from, to, start: 50 * MS, end: 2050 * MS });
        let outcome = world.run();
        assert_eq!((outcome.departures, outcome.messages), (0, 100));
        assert!(outcome.delivered_at < 3100 * MS, "{} ms", outcome.delivered_at / MS);
        let again = outcome.counts.retransmitted;
        assert!(again < 150, "{again} packets sent again");
    }
}

#[test]
fn a_long_partition_is_a_departure_on_both_sides() {
    let mut world = pair(100 * MS);
    world.cut(Cut { from: 3, to: 3, start: 50 * MS, end: 20_000 * MS });
    world.run();
    assert_eq!(told(&world, 0)[0].1, failed(libc::ETIMEDOUT));
    assert_eq!(told(&world, 1)[0].1, failed(libc::ETIMEDOUT));
    assert!(told(&world, 0)[0].0 < 5500 && told(&world, 1)[0].0 < 5500, "{:?}", world.reports);
}

#[test]
fn another_job_is_not_heard() {
    let mut world = World::new(9, 2, Weather::fair());
    let flow = |to| vec![Flow::new(to, SMALL, 5)];
    world.start(0, plain(), flow(1));
    world.start(1, Habits { job: 2, ..plain() }, flow(0));
    let outcome = world.run();
    assert_eq!((outcome.messages, outcome.counts.connected), (0, 0));
    assert!(world.reports.iter().all(|r| r.departure == failed(libc::EKEYREJECTED)));
    assert!(outcome.counts.forged > 0);
}

#[test]
fn senders_are_told_of_pressure() {
    for (on, loss) in [(true, 0.0), (true, 20.0), (false, 0.0)] {
        let mut weather = Weather::fair();
        weather.path.loss = Chance::percent(loss);
        let mut world = World::new(9, 2, weather);
        world.start(0, plain(), vec![Flow::new(1, SMALL, 1000).bursts(10, MS)]);
        world.start(1, plain(), Vec::new());
        world.plan(10 * MS, Act::Pressure { slot: 1, on: true });
        world.plan(20 * MS, Act::Pressure { slot: 1, on });
        world.run();
        let sender = world.nodes[0].as_ref().unwrap();
        assert_eq!(sender.machine.under_pressure(PeerId(0)), on);
    }
}

/// Sends 100 messages over a path that silently drops datagrams longer than `carries`.
fn narrow(carries: usize, datagram_max: usize) -> Outcome {
    let mut weather = Weather::fair();
    weather.path.carries = carries;
    weather.path.uncut = true;
    let mut world = World::new(9, 2, weather);
    let habits = Habits { datagram_max, ..plain() };
    let flow = |to| vec![Flow::new(to, Sizes::Exactly(8192), 100).bursts(1, 10 * MS)];
    world.start(0, habits.clone(), flow(1));
    world.start(1, habits, flow(0));
    let outcome = world.run();
    assert_eq!((outcome.messages, outcome.departures), (200, 0));
    outcome
}

#[test]
fn a_path_that_swallows_long_datagrams_delays_nothing() {
    let wide = narrow(usize::MAX, 1472);
    assert_eq!(wide.fates.too_long, 0);
    for (carries, datagram_max, longer) in
        [(1200, 1472, 16), (1300, 1472, 16), (1300, 8972, 16), (1472, 8972, 8)]
    {
        let outcome = narrow(carries, datagram_max);
        assert_eq!((outcome.fates.too_long, outcome.counts.retransmitted), (longer, 0));
        let later = outcome.delivered_at.saturating_sub(wide.delivered_at);
        assert!(later < MS / 10, "{later} ns later with {carries} of {datagram_max} bytes");
    }
}

#[test]
fn what_is_only_late_is_seldom_sent_again() {
    let mut weather = Weather::fair();
    weather.path.reorder = Chance::percent(20.0);
    weather.path.reorder_ns = 30_000;
    let mut world = World::new(9, 2, weather);
    world.start(0, plain(), vec![Flow::new(1, Sizes::Exactly(8192), 1000)]);
    world.start(1, plain(), Vec::new());
    let outcome = world.run();
    let (again, all) = (outcome.counts.retransmitted, outcome.counts.data_sent);
    assert!(again * 100 < all, "{again} of {all} packets sent again");
}
