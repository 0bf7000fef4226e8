//! The matching spaces of an endpoint: plain and tagged messages of each receive context.

use super::queue::Queue;

/// Messages and receives match only within one space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Space {
    /// The receive context. An ordinary endpoint has only number 0.
    pub(super) rx: u8,
    pub(super) tagged: bool,
}

impl Space {
    /// The spaces of the first `contexts` receive contexts.
    pub(super) fn all(contexts: usize) -> impl Iterator<Item = Self> {
        let numbers = 0..u8::try_from(contexts).unwrap_or(u8::MAX);
        numbers.flat_map(|rx| [true, false].map(|tagged| Self { rx, tagged }))
    }
}

/// One queue for each matching space.
#[derive(Debug)]
pub(super) struct Spaces<T> {
    plain: Queue<T>,
    tagged: Queue<T>,
    /// The queues of contexts 1 and up: plain, tagged.
    more: Vec<[Queue<T>; 2]>,
}

impl<T> Spaces<T> {
    pub(super) fn new(contexts: usize) -> Self {
        Self {
            plain: Queue::default(),
            tagged: Queue::default(),
            more: (1..contexts).map(|_| [Queue::default(), Queue::default()]).collect(),
        }
    }

    /// The queue of a space. A context that does not exist gets the queues of context 0; callers ask for none.
    #[inline]
    pub(super) fn of(&mut self, space: Space) -> &mut Queue<T> {
        if space.rx > 0 {
            return self.beyond(space);
        }
        if space.tagged { &mut self.tagged } else { &mut self.plain }
    }

    #[inline(never)]
    fn beyond(&mut self, space: Space) -> &mut Queue<T> {
        let Self { plain, tagged, more } = self;
        match more.get_mut(usize::from(space.rx).wrapping_sub(1)) {
            Some([_, tagged]) if space.tagged => tagged,
            Some([plain, _]) => plain,
            None if space.tagged => tagged,
            None => plain,
        }
    }

    fn lists(&self) -> impl Iterator<Item = &Queue<T>> {
        [&self.plain, &self.tagged].into_iter().chain(self.more.iter().flatten())
    }

    pub(super) fn lists_mut(&mut self) -> impl Iterator<Item = &mut Queue<T>> {
        [&mut self.plain, &mut self.tagged].into_iter().chain(self.more.iter_mut().flatten())
    }

    pub(super) fn len(&self) -> usize {
        let more: usize = self.more.iter().flatten().map(|list| list.len()).sum();
        self.plain.len() + self.tagged.len() + more
    }

    /// Entries of one receive context.
    #[inline]
    pub(super) fn len_of(&self, rx: u8) -> usize {
        let Some(beyond) = usize::from(rx).checked_sub(1) else {
            return self.plain.len() + self.tagged.len();
        };
        self.more.get(beyond).map_or(0, |[plain, tagged]| plain.len() + tagged.len())
    }

    /// The newest entry of each queue.
    pub(super) fn newest(&self) -> impl Iterator<Item = &T> {
        self.lists().filter_map(|list| list.last())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.lists().flat_map(|list| list.iter().map(|(_, item)| item))
    }
}
