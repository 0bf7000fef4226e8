//! What identifies a condition that lines of the log report. Within a process it is the place in the source, and a number
//! there; between processes the text counts too, unless the call site says that the condition is the node's.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::Location;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Cause {
    place: &'static Location<'static>,
    number: u64,
    is_of_node: bool,
    counted: Option<u64>,
}

impl Cause {
    /// The caller's line; its number tells apart what has different causes there.
    #[track_caller]
    pub(super) fn here(number: u64) -> Self {
        Self { place: Location::caller(), number, is_of_node: false, counted: None }
    }

    /// The same for a line whose repetitions are counted already: `held` events came before it without a line.
    pub(super) fn counted_as(self, held: u64) -> Self {
        Self { counted: Some(held), ..self }
    }

    /// The same for a condition of the node: all processes there report it, with texts that differ.
    pub(super) fn of_node(self) -> Self {
        Self { is_of_node: true, ..self }
    }

    pub(super) fn counted(self) -> Option<u64> {
        self.counted
    }

    /// Identifies the cause within a process.
    pub(super) fn key(self) -> u64 {
        self.hash(None)
    }

    /// Identifies what a line reports, the same in all processes that have the same build.
    pub(super) fn fact(self, text: &str) -> u64 {
        self.hash(Some(text).filter(|_| !self.is_of_node))
    }

    fn hash(self, text: Option<&str>) -> u64 {
        let place = (self.place.file(), self.place.line(), self.place.column());
        number_of((place, self.number, text))
    }
}

/// The number of what causes a line.
pub(crate) fn number_of(thing: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    thing.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_different_facts_unless_the_condition_is_the_nodes() {
        let cause = Cause::here(7);
        assert_eq!(cause.fact("A is gone"), cause.fact("A is gone"));
        assert_ne!(cause.fact("A is gone"), cause.fact("B is gone"));
        assert_eq!(cause.of_node().fact("process 1"), cause.of_node().fact("process 2"));
        assert_eq!(cause.key(), cause.counted_as(3).key());
        assert_ne!(cause.key(), Cause { number: 8, ..cause }.key());
    }
}
