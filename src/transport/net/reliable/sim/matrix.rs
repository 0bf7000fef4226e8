//! Throughput of one sender over a link of 10 Gbit/s and 40 µs, by loss rate and send window. The figures are a
//! snapshot beside this file, which shows when a change affects them. `UDRV_ACCEPT=1` rewrites it.

use super::app::Flow;
use super::node::Habits;
use super::oracle::Sizes;
use super::outcome::Outcome;
use super::rng::Chance;
use super::scenario::plain;
use super::weather::Weather;
use super::world::World;
use std::fmt::Write;

const LOSSES: [f64; 7] = [0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0];
const WINDOWS: [u32; 4] = [8, 32, 128, 512];
/// Number and length of the messages, bytes.
const MESSAGES: u32 = 512;
const LEN: u32 = 8192;
const SNAPSHOT: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/src/transport/net/reliable/sim/matrix.txt");

fn transfer(loss: f64, window: u32, both_ways: bool) -> Outcome {
    let mut weather = Weather::fair();
    weather.path.loss = Chance::percent(loss);
    let mut world = World::new(1, 2, weather);
    let habits = Habits { receive_window: window, ..plain() };
    let flow = Flow::new(1, Sizes::Exactly(LEN), MESSAGES);
    world.start(0, habits.clone(), vec![flow]);
    let back = both_ways.then(|| Flow::new(0, Sizes::Exactly(LEN), MESSAGES));
    world.start(1, habits, Vec::from_iter(back));
    world.run()
}

#[test]
fn goodput_by_loss_and_window_is_as_before() {
    let mut now = format!(
        "MB/s that arrive of {MESSAGES} messages of {LEN} bytes, 10 Gbit/s, 40 us, 1472-byte datagrams;\nin brackets: % of the packets that were sent again\n\nloss "
    );
    for window in WINDOWS {
        write!(now, "{window:>8} packets").unwrap();
    }
    now.push_str("  128, both ways");
    for loss in LOSSES {
        write!(now, "\n{loss:>4}%").unwrap();
        for (window, both_ways) in WINDOWS.map(|w| (w, false)).into_iter().chain([(128, true)]) {
            let outcome = transfer(loss, window, both_ways);
            let speed = outcome.payload as f64 * 1e3 / outcome.delivered_at as f64;
            let again =
                outcome.counts.retransmitted as f64 * 100.0 / outcome.counts.data_sent as f64;
            write!(now, "{speed:>9.0} [{again:>4.1}]").unwrap();
        }
    }
    now.push('\n');
    let before = std::fs::read_to_string(SNAPSHOT).unwrap_or_default();
    if std::env::var_os("UDRV_ACCEPT").is_some() {
        std::fs::write(SNAPSHOT, &now).unwrap();
    } else {
        assert!(now == before, "was:\n{before}\nis (UDRV_ACCEPT=1 accepts it):\n{now}");
    }
}
