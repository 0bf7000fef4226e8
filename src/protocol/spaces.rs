//! The matching spaces of an endpoint: plain and tagged messages of each receive context.

use super::index_list::IndexList;

/// In which messages and receives find each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Space {
    /// The receive context; an ordinary endpoint has number 0 only.
    pub(super) rx: u8,
    pub(super) tagged: bool,
}

impl Space {
    /// Those of the first `contexts` receive contexts.
    pub(super) fn all(contexts: usize) -> impl Iterator<Item = Self> {
        let numbers = 0..u8::try_from(contexts).unwrap_or(u8::MAX);
        numbers.flat_map(|rx| [true, false].map(|tagged| Self { rx, tagged }))
    }
}

/// A list for each space.
#[derive(Debug)]
pub(super) struct Spaces<T> {
    plain: IndexList<T>,
    tagged: IndexList<T>,
    /// Of the contexts from 1 on: plain, tagged.
    more: Vec<[IndexList<T>; 2]>,
}

impl<T> Spaces<T> {
    pub(super) fn new(contexts: usize) -> Self {
        Self {
            plain: IndexList::default(),
            tagged: IndexList::default(),
            more: (1..contexts).map(|_| [IndexList::default(), IndexList::default()]).collect(),
        }
    }

    /// A context that is not there has the spaces of context 0; nobody asks for one.
    #[inline]
    pub(super) fn of(&mut self, space: Space) -> &mut IndexList<T> {
        if space.rx > 0 {
            return self.beyond(space);
        }
        if space.tagged { &mut self.tagged } else { &mut self.plain }
    }

    #[inline(never)]
    fn beyond(&mut self, space: Space) -> &mut IndexList<T> {
        let Self { plain, tagged, more } = self;
        match more.get_mut(usize::from(space.rx).wrapping_sub(1)) {
            Some([_, tagged]) if space.tagged => tagged,
            Some([plain, _]) => plain,
            None if space.tagged => tagged,
            None => plain,
        }
    }

    fn lists(&self) -> impl Iterator<Item = &IndexList<T>> {
        [&self.plain, &self.tagged].into_iter().chain(self.more.iter().flatten())
    }

    pub(super) fn len(&self) -> usize {
        let more: usize = self.more.iter().flatten().map(IndexList::len).sum();
        self.plain.len() + self.tagged.len() + more
    }

    /// Those of one context.
    #[inline]
    pub(super) fn len_of(&self, rx: u8) -> usize {
        let Some(beyond) = usize::from(rx).checked_sub(1) else {
            return self.plain.len() + self.tagged.len();
        };
        self.more.get(beyond).map_or(0, |[plain, tagged]| plain.len() + tagged.len())
    }

    /// The oldest of each: for questions that are not worth looking at all.
    pub(super) fn first_few(&self) -> impl Iterator<Item = &T> {
        self.lists().flat_map(|list| list.iter().take(64).map(|(_, item)| item))
    }
}
