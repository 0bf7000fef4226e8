//! Counts of calls by name, and of those that were made to fail (`failed-NAME`), in a file of the run's directory when the
//! process ends normally.

use crate::settings::Settings;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// How often each was called, and how often that failed because it was to fail.
static CALLS: Mutex<BTreeMap<&'static str, (u64, u64)>> = Mutex::new(BTreeMap::new());

fn calls() -> MutexGuard<'static, BTreeMap<&'static str, (u64, u64)>> {
    CALLS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a call of `function`. Returns which call of it this is, from 1 on; 0 if nobody needs to know.
pub(crate) fn count(function: &'static str) -> u64 {
    add(function, 1)
}

/// Adds `n` to a count. Returns the sum; 0 if nobody needs to know.
pub(crate) fn add(function: &'static str, n: u64) -> u64 {
    let settings = Settings::get();
    if settings.directory.is_none() && !settings.counts() {
        return 0;
    }
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| crate::sys::at_exit(write));
    let mut calls = calls();
    let (sum, _) = calls.entry(function).or_default();
    *sum += n;
    *sum
}

/// `n` of something were there at one time: the most is kept.
pub(crate) fn count_most(what: &'static str, n: u64) {
    if Settings::get().directory.is_some() {
        let mut calls = calls();
        let (most, _) = calls.entry(what).or_default();
        *most = n.max(*most);
    }
}

/// The last call of `function` is made to fail.
pub(crate) fn count_failure(function: &'static str) {
    calls().entry(function).or_default().1 += 1;
}

/// How often this process has called `function`, if calls are counted.
pub(crate) fn calls_of(function: &str) -> u64 {
    calls().get(function).map_or(0, |(n, _)| *n)
}

extern "C" fn write() {
    let Some(directory) = &Settings::get().directory else { return };
    let text: String = calls()
        .iter()
        .map(|(name, (n, failed))| format!("{name} {n}\nfailed-{name} {failed}\n"))
        .collect();
    let path = directory.join(format!("calls.{}", std::process::id()));
    if let Ok(mut file) = std::fs::File::create(path) {
        let _ = file.write_all(text.as_bytes());
    }
}
