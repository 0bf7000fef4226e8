//! The verifier: what no driver checks. A violation ends the process with one line, so that a test fails there and not
//! later.
//!
//! It is a violation
//! 1. to free memory, or to close an IPC mapping, while copies of a non-blocking stream that use it are queued: the
//!    operation that allowed the memory to be freed was reported too early;
//! 2. to copy through an IPC mapping whose memory its owner has freed;
//! 3. to use a stream or an event after its destruction, or that of its context, and to ask for the id of a context that has
//!    ended;
//! 4. to free memory of a pool before all processes that have imported it have freed that;
//! 5. to import an allocation of a pool at which a driver crashes, for its length, or from another pool than its own;
//! 6. to call from inside a forked child with an object of the parent: such a call answers 3, and is no violation.

use std::io::Write;

/// The line that every violation begins with.
pub const PREFIX: &str = "fake-cuda: VIOLATION:";

/// Writes the line, to the error output and to the run's directory, and aborts.
#[cold]
pub(crate) fn violation(what: &str) -> ! {
    let line = format!("{PREFIX} process {}: {what}\n", std::process::id());
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(directory) = &crate::settings::Settings::get().directory {
        let path = directory.join("violations");
        if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
            let _ = file.write_all(line.as_bytes());
        }
    }
    std::process::abort()
}
