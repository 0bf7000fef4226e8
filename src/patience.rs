//! Time limits of tests, which grow with what the machine is slower than a quiet one (scripts/lib.sh, `measure_slowness`).

use std::time::Duration;

/// The longest time that a wait may take, where a quiet machine is allowed `seconds`: 1 to 8 times that, by
/// UDRV_TEST_SLOWNESS or the processes that wait for each processor, whichever is more.
pub(crate) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds * slowness(told(), waiting()))
}

fn slowness(told: Option<u64>, waiting: Option<u64>) -> u64 {
    told.unwrap_or(1).max(waiting.unwrap_or(1)).clamp(1, 8)
}

fn told() -> Option<u64> {
    std::env::var("UDRV_TEST_SLOWNESS").ok()?.parse().ok()
}

fn waiting() -> Option<u64> {
    let load: f64 =
        std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()?;
    let processors = std::thread::available_parallelism().ok()?.get();
    Some((load / processors as f64) as u64)
}

#[test]
fn limits_grow_with_what_is_told_or_measured_within_bounds() {
    assert_eq!(slowness(None, None), 1);
    assert_eq!(slowness(Some(0), Some(0)), 1);
    assert_eq!(slowness(Some(3), Some(2)), 3);
    assert_eq!(slowness(Some(2), Some(5)), 5);
    assert_eq!(slowness(Some(1000), None), 8);
    assert!(seconds(10) >= Duration::from_secs(10) && seconds(10) <= Duration::from_secs(80));
}
