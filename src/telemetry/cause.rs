//! What makes lines of the log the same: their place in the source, and a number there.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::Location;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Cause {
    place: &'static Location<'static>,
    number: u64,
    limited: bool,
}

impl Cause {
    /// The caller's line; its number tells apart what has different causes there.
    #[track_caller]
    pub(super) fn here(number: u64) -> Self {
        Self { place: Location::caller(), number, limited: false }
    }

    /// The same for a line whose repetitions are counted already.
    pub(super) fn limited(self) -> Self {
        Self { limited: true, ..self }
    }

    pub(super) fn is_limited(self) -> bool {
        self.limited
    }

    /// The same in all processes that have the same build.
    pub(super) fn key(self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.place.file(), self.place.line(), self.place.column()).hash(&mut hasher);
        self.number.hash(&mut hasher);
        hasher.finish()
    }
}
