//! The verifier: what no driver checks. A violation ends the process with one line, so that a test fails there and not
//! later.
//!
//! It is a violation
//! 1. to post a request with memory outside of the registration that its key names, of another protection domain, or of
//!    a registration that does not allow the access; likewise if the registration has ended before the transfer;
//! 2. to change the memory of a send, or of the source of a write, between post and completion;
//! 3. to write into a posted receive buffer;
//! 4. to use an object after its destruction, or to destroy one that others need;
//! 5. to overrun a completion queue, or a queue pair's own queues by more than the driver refuses;
//! 6. to use another process's memory under a key that does not allow it;
//! 7. to relax the order on the bus for memory that peers read: a read would not show that earlier writes are there.
//! 8. to mark packets otherwise than the run demands ([`crate::settings::MARKS`]);
//! 9. to destroy an object without having acknowledged its events (for five seconds: the library waits for ever), or to
//!    acknowledge others;
//! 10. to post a read to a queue pair that may have none under way.
//!
//! Counted, but no violation, is a registration that peers could have written beside what they wrote (`wide-keys`): a
//! cache trades that for fewer registrations.

#[cfg(not(test))]
use std::io::Write;
use std::sync::OnceLock;

/// The line that every violation begins with.
pub const PREFIX: &str = "fake-verbs: VIOLATION:";

/// Writes the line, to the error output and to the run's directory, and aborts.
#[cold]
pub(crate) fn violation(what: &str) -> ! {
    #[cfg(test)]
    std::panic::panic_any(what.to_owned());
    #[cfg(not(test))]
    abort(what)
}

#[cfg(not(test))]
fn abort(what: &str) -> ! {
    let line = format!("{PREFIX} process {}: {what}\n", std::process::id());
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(directory) = crate::settings::directory() {
        let path = directory.join("violations");
        if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
            let _ = file.write_all(line.as_bytes());
        }
    }
    std::process::abort()
}

/// Demands the marks that the run asks for. `global`: traffic class and flow label, if there is a global route; the two
/// lowest bits of the class are for congestion.
pub(crate) fn demand_marks(level: u8, global: Option<(u8, u32)>) {
    static WANTED: OnceLock<Option<(u8, u8)>> = OnceLock::new();
    let wanted = WANTED.get_or_init(|| {
        let text = std::env::var(crate::settings::MARKS).ok()?;
        let (level, class) = text.split_once('/')?;
        Some((level.parse().ok()?, class.parse().ok()?))
    });
    let Some(wanted) = wanted else { return };
    if let Some(why) = other_marks(*wanted, level, global) {
        violation(&format!("packets are marked otherwise than demanded: {why}"));
    }
}

fn other_marks(wanted: (u8, u8), level: u8, global: Option<(u8, u32)>) -> Option<String> {
    if level != wanted.0 {
        return Some(format!("service level {level}"));
    }
    match global {
        Some((class, _)) if (class ^ wanted.1) & !3 != 0 => Some(format!("traffic class {class}")),
        Some((_, 0)) => Some("no flow label".to_owned()),
        _ => None,
    }
}

/// A fast checksum: any changed bit changes it.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    const PRIME: u64 = 0x9e37_79b9_7f4a_7c15;
    let words = bytes.chunks_exact(8);
    let rest = words.remainder();
    let mut sum = bytes.len() as u64;
    for word in words.filter_map(|word| word.try_into().ok()) {
        sum = (sum ^ u64::from_le_bytes(word)).wrapping_mul(PRIME).rotate_left(29);
    }
    for byte in rest {
        sum = (sum ^ u64::from(*byte)).wrapping_mul(PRIME).rotate_left(29);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_those_that_are_demanded() {
        assert_eq!(other_marks((3, 184), 3, Some((186, 1))), None);
        assert_eq!(other_marks((3, 184), 3, None), None);
        for (level, global) in [(0, None), (3, Some((106, 1))), (3, Some((186, 0)))] {
            assert!(other_marks((3, 184), level, global).is_some(), "{level} {global:?}");
        }
    }

    #[test]
    fn any_bit_changes_the_checksum() {
        let bytes: Vec<u8> = (0..77).collect();
        let sum = checksum(&bytes);
        for at in 0..bytes.len() * 8 {
            let mut other = bytes.clone();
            other[at / 8] ^= 1 << (at % 8);
            assert_ne!(checksum(&other), sum, "{at}");
        }
        assert_ne!(checksum(&bytes[..76]), sum);
    }
}
