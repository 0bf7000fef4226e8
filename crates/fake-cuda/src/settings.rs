//! The environment in which a process finds its devices.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// A directory for counters and violations.
pub const DIRECTORY: &str = "FAKE_CUDA";
/// The number of devices that `CUDA_VISIBLE_DEVICES` would show; 1 if it is not set.
pub const DEVICES: &str = "FAKE_CUDA_DEVICES";
/// The number of the first of them: processes with other numbers see devices with other UUIDs under the same ordinals.
pub const FIRST: &str = "FAKE_CUDA_FIRST";
/// Set: no device accesses another one's memory.
pub const NOPEER: &str = "FAKE_CUDA_NOPEER";
/// Set: a device sees what other devices have written to its memory without cuFlushGPUDirectRDMAWrites. The double of
/// libibverbs reads this too.
pub const ORDERED: &str = "FAKE_CUDA_ORDERED";
/// Bytes of device memory that cuMemAlloc has; without limit if it is not set. Memory that is freed while a dma-buf holds it is not
/// free.
pub const MEMORY: &str = "FAKE_CUDA_MEMORY";
/// Set: the driver has no MEMORY_BLOCK_ID, as older ones.
pub const NOBLOCKS: &str = "FAKE_CUDA_NOBLOCKS";
/// The most that a copy is late, microseconds; 20 if it is not set.
pub const DELAY_US: &str = "FAKE_CUDA_DELAY_US";
/// `CALL:TIME`: that call of cuMemcpyAsync, counted as for failures, begins a copy that is so late, microseconds.
pub const LATE: &str = "FAKE_CUDA_LATE";
/// The seed of the delays.
pub const SEED: &str = "FAKE_CUDA_SEED";
/// Failures: `FUNCTION:CALL:RESULT,...`; the call is counted from 1 on in each process, or `*`.
pub const FAIL: &str = "FAKE_CUDA_FAIL";

/// The settings of this process.
pub(crate) struct Settings {
    pub(crate) directory: Option<PathBuf>,
    pub(crate) devices: usize,
    pub(crate) first: u64,
    pub(crate) apart: bool,
    pub(crate) ordered: bool,
    pub(crate) memory: Option<usize>,
    pub(crate) blocks: bool,
    pub(crate) delay_us: u64,
    pub(crate) seed: u64,
    /// A call of cuMemcpyAsync, and how late its copy is.
    pub(crate) late: Option<(u64, Duration)>,
    failures: HashMap<String, Vec<(Option<u64>, i32)>>,
}

impl Settings {
    /// What the environment said at the first use.
    pub(crate) fn get() -> &'static Self {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        SETTINGS.get_or_init(|| Self {
            directory: std::env::var_os(DIRECTORY)
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
            devices: number(DEVICES, 1) as usize,
            first: number(FIRST, 0),
            apart: number(NOPEER, 0) != 0,
            ordered: number(ORDERED, 0) != 0,
            blocks: number(NOBLOCKS, 0) == 0,
            memory: Some(number(MEMORY, 0) as usize).filter(|memory| *memory > 0),
            delay_us: number(DELAY_US, 20),
            seed: number(SEED, 1),
            late: std::env::var(LATE).ok().as_deref().and_then(late),
            failures: failures(&std::env::var(FAIL).unwrap_or_default()),
        })
    }

    /// The result with which this call of `function` is to fail.
    pub(crate) fn failure(&self, function: &str, call: u64) -> Option<i32> {
        let rules = self.failures.get(function)?;
        rules.iter().find(|(which, _)| which.is_none_or(|which| which == call)).map(|rule| rule.1)
    }

    /// The number of a device among all of the machine.
    pub(crate) fn number_of(&self, ordinal: i32) -> u64 {
        self.first + ordinal as u64
    }

    /// True if a call fails, or is late, by its number: calls have to be counted.
    pub(crate) fn counts(&self) -> bool {
        !self.failures.is_empty() || self.late.is_some()
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}

fn late(text: &str) -> Option<(u64, Duration)> {
    let (call, time) = text.split_once(':')?;
    Some((call.parse().ok()?, Duration::from_micros(time.parse().ok()?)))
}

fn failures(text: &str) -> HashMap<String, Vec<(Option<u64>, i32)>> {
    let mut all: HashMap<String, Vec<_>> = HashMap::new();
    for rule in text.split(',') {
        let mut words = rule.trim().split(':');
        let (Some(function), Some(call), Some(result)) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        if let Ok(result) = result.parse() {
            all.entry(function.to_owned()).or_default().push((call.parse().ok(), result));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_a_call_or_every_call() {
        let failures = failures("cuMemAlloc_v2:2:2, cuMemcpyAsync:*:700,nonsense");
        let settings = Settings {
            directory: None,
            devices: 1,
            first: 0,
            apart: false,
            ordered: false,
            memory: None,
            blocks: true,
            delay_us: 0,
            seed: 0,
            late: late("12:500"),
            failures,
        };
        assert_eq!(settings.failure("cuMemAlloc_v2", 1), None);
        assert_eq!(settings.failure("cuMemAlloc_v2", 2), Some(2));
        assert_eq!(settings.failure("cuMemcpyAsync", 9), Some(700));
        assert_eq!(settings.failure("nonsense", 1), None);
        assert_eq!(settings.late, Some((12, Duration::from_micros(500))));
    }
}
