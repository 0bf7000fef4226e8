//! A simulated network: many endpoints, one virtual clock, and network conditions drawn from one seed.
//!
//! `UDRV_TEST_CASES=n` runs more cases; `UDRV_TEST_SEED=s` begins at another seed (with `UDRV_TEST_CASES=1`: repeats
//! one case); `UDRV_TEST_TRACE=1` prints every packet; `UDRV_TEST_PACKETS=n` runs further, longer cases on all
//! processors, until that many datagrams were sent; `UDRV_TEST_SIZE=n` sets the approximate number of messages of a
//! case.

mod app;
mod attack;
mod clock;
mod fuzz;
mod matrix;
mod named;
mod network;
mod node;
mod oracle;
mod outcome;
mod replay;
pub(in crate::transport::net) mod rng;
mod scale;
mod scenario;
mod weather;
mod world;

use outcome::Report;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Cases of `cargo test`.
const CASES: u64 = 200;
/// Approximate number of messages of a case, and of one with `UDRV_TEST_PACKETS`.
const SHORT: u64 = 400;
const LONG: u64 = 3000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.replace('_', "").parse().ok()
}

/// Prints the seed of a case that fails.
struct Guard {
    seed: u64,
    /// Other variables needed to repeat it.
    also: String,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("repeat with UDRV_TEST_CASES=1 UDRV_TEST_SEED={}{}", self.seed, self.also);
        }
    }
}

#[test]
fn whatever_happens_messages_arrive_once_and_in_order() {
    let first = number("UDRV_TEST_SEED").unwrap_or(0);
    let cases = number("UDRV_TEST_CASES").unwrap_or(CASES);
    let packets = number("UDRV_TEST_PACKETS").unwrap_or(0);
    let size = number("UDRV_TEST_SIZE").unwrap_or(if packets > 0 { LONG } else { SHORT }) as u32;
    let next = AtomicU64::new(first);
    let report = Mutex::new(Report::default());
    let work = || loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= first + cases && report.lock().unwrap().total.fates.sent >= packets {
            break;
        }
        let _guard = Guard { seed, also: format!(" UDRV_TEST_SIZE={size}") };
        let outcome = scenario::draw(seed, size).run();
        outcome.assert_no_storm();
        report.lock().unwrap().add(seed, &outcome);
    };
    let workers = if packets > 0 { std::thread::available_parallelism().unwrap().get() } else { 1 };
    std::thread::scope(|scope| {
        for _ in 1..workers {
            scope.spawn(work);
        }
        work();
    });
    eprintln!("seeds from {first}: {}", report.into_inner().unwrap());
}
