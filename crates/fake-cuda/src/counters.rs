//! Counts of calls by name, appended to a file of the run's directory when the process ends normally.

use crate::settings::Settings;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, Once, PoisonError};

static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Counts a call of `function`. Returns which call of it this is, from 1 on; 0 if nobody needs to know.
pub(crate) fn count(function: &'static str) -> u64 {
    let settings = Settings::get();
    if settings.directory.is_none() && !settings.fails() {
        return 0;
    }
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| crate::sys::at_exit(write));
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let calls = calls.entry(function).or_default();
    *calls += 1;
    *calls
}

extern "C" fn write() {
    let Some(directory) = &Settings::get().directory else { return };
    let calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let text: String = calls.iter().map(|(name, n)| format!("{name} {n}\n")).collect();
    let path = directory.join(format!("calls.{}", std::process::id()));
    if let Ok(mut file) = std::fs::File::create(path) {
        let _ = file.write_all(text.as_bytes());
    }
}
