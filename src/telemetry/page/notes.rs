//! The errors and warnings of the process, for its page: the stream that they were written to may be gone, and other ranks
//! of the node may have written them instead (`own.rs`). Of each cause the last one is kept, and how many there were.

use super::record::{CAUSE_TEXT, packed};
use crate::sys::process::Home;
use crate::telemetry::cause::Cause;
use crate::telemetry::level::Level;
use crate::telemetry::soon;
use std::sync::Mutex;
use std::time::SystemTime;

/// Causes that are kept. The first ones explain most.
pub(super) const NOTES: usize = 16;

/// What is said of one cause.
#[derive(Debug)]
pub(super) struct Note {
    cause: u64,
    level: Level,
    times: u64,
    /// When it was said last, nanoseconds since 1970.
    at_unix_ns: u64,
    text: String,
}

impl Note {
    /// A line about `cause`, which also stands for the events that were held back before it.
    fn new(level: Level, cause: Cause, at_unix_ns: u64, text: &str) -> Self {
        let times = cause.counted().unwrap_or(0) + 1;
        Self { cause: cause.key(), level, times, at_unix_ns, text: text.to_owned() }
    }

    /// The words of its record, in the order of their names.
    pub(super) fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let numbers = [self.cause, self.level as u64, self.times, self.at_unix_ns];
        numbers.into_iter().chain(packed(&self.text, CAUSE_TEXT))
    }
}

/// The notes of a process.
#[derive(Debug)]
struct Notes {
    /// A forked child begins without.
    home: Option<Home>,
    notes: Vec<Note>,
}

static NOTES_HERE: Mutex<Notes> = Mutex::new(Notes::new());

/// Keeps a line of the log; returns the number of its note. `None`: there are too many already.
pub(super) fn keep(level: Level, cause: Cause, text: &str) -> Option<usize> {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let new = Note::new(level, cause, since_1970.as_nanos() as u64, text);
    soon::lock(&NOTES_HERE)?.keep(Home::here(), new)
}

/// Shows each note to `show`, with its number: a new page gets what was said before.
pub(super) fn each(mut show: impl FnMut(usize, &Note)) {
    let Some(here) = soon::lock(&NOTES_HERE) else { return };
    if here.home.is_some_and(Home::is_here) {
        here.notes.iter().enumerate().for_each(|(number, note)| show(number, note));
    }
}

impl Notes {
    const fn new() -> Self {
        Self { home: None, notes: Vec::new() }
    }

    /// The number of its note. `None`: there are too many already.
    fn keep(&mut self, home: Home, new: Note) -> Option<usize> {
        if self.home != Some(home) {
            (self.home, self.notes) = (Some(home), Vec::new());
        }
        if let Some(known) = self.notes.iter().position(|note| note.cause == new.cause) {
            let note = self.notes.get_mut(known)?;
            *note = Note { times: note.times + new.times, ..new };
            return Some(known);
        }
        if self.notes.len() >= NOTES {
            return None;
        }
        self.notes.push(new);
        Some(self.notes.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(number: u64, text: &str) -> Note {
        Note::new(Level::Warn, Cause::here(number), 9, text)
    }

    #[test]
    fn a_cause_has_one_note_with_its_last_text() {
        let mut notes = Notes::new();
        assert_eq!(notes.keep(Home::here(), said(77, "first")), Some(0));
        assert_eq!(notes.keep(Home::here(), said(78, "another")), Some(1));
        assert_eq!(notes.keep(Home::here(), said(77, "second")), Some(0));
        let found: Vec<_> =
            notes.notes.iter().map(|note| (note.times, note.text.as_str())).collect();
        assert_eq!(found, [(2, "second"), (1, "another")]);
        let words: Vec<u64> = notes.notes[0].words().collect();
        let key = said(77, "").cause;
        assert_eq!((&words[..4], words.len()), (&[key, 1, 2, 9][..], 4 + CAUSE_TEXT));
    }

    #[test]
    fn events_without_a_line_are_counted() {
        let mut notes = Notes::new();
        let cause = Cause::here(77);
        for cause in [cause.counted_as(0), cause.counted_as(4), cause] {
            notes.keep(Home::here(), Note::new(Level::Warn, cause, 9, "x"));
        }
        assert_eq!(notes.notes[0].times, 7);
    }

    #[test]
    fn the_first_causes_are_kept_and_a_child_begins_without() {
        let mut notes = Notes::new();
        let kept = (0..100).filter_map(|cause| notes.keep(Home::here(), said(cause, "x"))).count();
        assert_eq!(kept, NOTES);
        assert_eq!(notes.keep(Home::elsewhere(), said(99, "of the child")), Some(0));
        assert_eq!(notes.notes.len(), 1);
    }
}
