//! Counts of what happened, in a file for each process: they remain, however the process ends.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($name:ident $text:literal)*) => {
        /// A count.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Counter { $($name),* }
        /// Their names, in the order of the files.
        pub const NAMES: &[&str] = &[$($text),*];
    };
}

counters! {
    Opened "opened"
    Datagrams "datagrams"
    Received "received"
    Lost "lost"
    Unrouted "unrouted"
    Unready "without-receive"
    Writes "writes"
    WriteBytes "write-bytes"
    Immediates "immediates"
    Reads "reads"
    ReadBytes "read-bytes"
    Inline "inline"
    Extended "extended"
    RnrNaks "rnr-naks"
    Retries "retries"
    Failures "failures"
    Pieces "pieces-out-of-order"
    Registrations "registrations"
    Wide "wide-keys"
    Pairs "queue-pairs"
    Refusals "refusals"
    Events "events"
}

static NUMBERS: OnceLock<Option<&'static [AtomicU64]>> = OnceLock::new();

/// Counts from now on in `directory`.
pub(crate) fn open(directory: &Path) {
    NUMBERS.get_or_init(|| {
        let path = directory.join(format!("counters.{}", std::process::id()));
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        crate::sys::share_numbers(&file.ok()?, NAMES.len())
    });
}

pub(crate) fn add(counter: Counter, amount: u64) {
    let numbers = NUMBERS.get().copied().flatten();
    if let Some(number) = numbers.and_then(|numbers| numbers.get(counter as usize)) {
        number.fetch_add(amount, Ordering::Relaxed);
    }
}

/// Leaves a note of a value that a program gave: a file of the run's directory, such as `seen/timeout.14`.
pub(crate) fn see(what: &str, value: u32) {
    if let Some(directory) = crate::settings::directory() {
        let notes = directory.join("seen");
        let _ = std::fs::create_dir_all(&notes);
        let _ = File::create(notes.join(format!("{what}.{value}")));
    }
}

pub(crate) fn count(counter: Counter) {
    add(counter, 1);
}

/// The sums over all processes of the run in `directory`, in the order of [`NAMES`].
pub fn read_all(directory: &Path) -> Vec<u64> {
    let mut sums = vec![0; NAMES.len()];
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let of_counters =
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("counters."));
    for bytes in of_counters.filter_map(|entry| read(&entry.path()).ok()) {
        let words = bytes.chunks_exact(8).filter_map(|word| word.try_into().ok());
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum += u64::from_le_bytes(word);
        }
    }
    sums
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut File::open(path)?, &mut bytes)?;
    Ok(bytes)
}
