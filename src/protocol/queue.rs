//! Lists of messages and receives that are searched by tag and source: a short list is walked, a long one has an index.
//!
//! A receive that is cancelled is searched by the application's context. That index learns of an entry at the next such
//! search, and of a removal when it finds the entry gone, so that posting and matching do nothing for it.

#![forbid(unsafe_code)]

use super::index_list::{IndexList, Key, Server};
use super::{ANY_SOURCE, UNKNOWN_SOURCE};
use std::collections::HashMap;
use std::ops::Deref;

/// Entries that a search may pass before it counts as long. Tests use the index all the time.
pub(super) const SHORT: usize = if cfg!(test) { 1 } else { 64 };
/// A list gets an index when long searches have passed so many entries for each of its slots: to add an entry to an index
/// takes as long.
const LONG: usize = if cfg!(test) { 1 } else { 32 };
/// A list of so many entries needs none.
const FEW: usize = if cfg!(test) { 1 } else { 256 };
/// One that has shrunk to so many neither.
const LEFT: usize = if cfg!(test) { 1 } else { 32 };
/// Patterns of an index.
const PATTERNS: usize = 4;
const NONE: u32 = u32::MAX;

/// What a receive compares: the bits of the tag that it does not ignore, and the source if it names one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pattern {
    ignore: u64,
    directed: bool,
}

impl Pattern {
    /// The pattern of a receive from `source`.
    pub(super) fn new(ignore: u64, source: u64) -> Self {
        Self { ignore, directed: source != ANY_SOURCE }
    }

    /// Whether a receive with this tag and source takes a message with these.
    #[inline(always)]
    fn takes(self, (tag, source): Name, of: u64, from: impl FnOnce() -> u64) -> bool {
        (tag ^ of) & !self.ignore == 0 && (!self.directed || source == from())
    }

    /// The tag bits and the source that a message and a receive must have in common.
    fn name(self, tag: u64, source: u64) -> Name {
        (tag & !self.ignore, if self.directed { source } else { ANY_SOURCE })
    }
}

/// Tag and source, as far as they are compared.
type Name = (u64, u64);

/// An entry in its chain. `number`: it grows from one entry of the list to the next.
#[derive(Clone, Copy, Debug)]
struct Link {
    key: Key,
    name: Name,
    number: u64,
    next: u32,
    prev: u32,
}

/// The entries of each name, in the order of the list.
#[derive(Debug)]
struct Chains {
    pattern: Pattern,
    /// The first and the last slot of each name.
    ends: HashMap<Name, (u32, u32)>,
    /// By slot of the list.
    links: Vec<Option<Link>>,
    /// Directed, and the source of an entry was unknown.
    strange: bool,
}

impl Chains {
    fn new(pattern: Pattern) -> Self {
        Self { pattern, ends: HashMap::new(), links: Vec::new(), strange: false }
    }

    fn link(&mut self, slot: u32) -> Option<&mut Link> {
        self.links.get_mut(slot as usize)?.as_mut()
    }

    /// False: there is no memory.
    fn add(&mut self, key: Key, number: u64, (tag, source): Name) -> bool {
        let (slot, name) = (key.slot(), self.pattern.name(tag, source));
        let beyond = (slot as usize + 1).saturating_sub(self.links.len());
        if slot == NONE
            || self.links.try_reserve(beyond).is_err()
            || self.ends.try_reserve(1).is_err()
        {
            return false;
        }
        self.links.resize(self.links.len() + beyond, None);
        self.strange |= self.pattern.directed && source == UNKNOWN_SOURCE;
        let (_, last) = self.ends.entry(name).or_insert((slot, NONE));
        let prev = std::mem::replace(last, slot);
        if let Some(link) = self.link(prev) {
            link.next = slot;
        }
        if let Some(place) = self.links.get_mut(slot as usize) {
            *place = Some(Link { key, name, number, next: NONE, prev });
        }
        true
    }

    fn remove(&mut self, key: Key) {
        if self.has(key) {
            self.clear(key.slot());
        }
    }

    /// Removes what was added for a slot.
    fn clear(&mut self, slot: u32) {
        let place = self.links.get_mut(slot as usize);
        let Some(link) = place.and_then(Option::take) else { return };
        let Link { name, next, prev, .. } = link;
        if let Some(after) = self.link(next) {
            after.prev = prev;
        }
        if let Some(before) = self.link(prev) {
            before.next = next;
        }
        match self.ends.get_mut(&name) {
            Some((_, last)) if next == NONE && prev != NONE => *last = prev,
            Some((first, _)) if prev == NONE && next != NONE => *first = next,
            Some(_) if prev == NONE => drop(self.ends.remove(&name)),
            _ => {}
        }
    }

    /// Whether the entry was added, and not removed since.
    fn has(&self, key: Key) -> bool {
        let link = self.links.get(key.slot() as usize).and_then(Option::as_ref);
        link.is_some_and(|link| link.key == key)
    }

    fn first(&self, tag: u64, source: u64) -> Option<&Link> {
        let (first, _) = self.ends.get(&self.pattern.name(tag, source))?;
        self.links.get(*first as usize)?.as_ref()
    }
}

/// Finds the entries of a list.
#[derive(Debug, Default)]
struct Index {
    chains: Vec<Chains>,
    /// Entries so far.
    added: u64,
    /// Searches, one after the other, whose answer was the first entry of the list.
    easy: usize,
}

impl Index {
    fn of(&mut self, pattern: Pattern) -> Option<&mut Chains> {
        self.chains.iter_mut().find(|chains| chains.pattern == pattern)
    }

    /// The chains of `pattern`, made if there are none and there is room.
    fn made(&mut self, pattern: Pattern) -> Option<&mut Chains> {
        if self.of(pattern).is_none() {
            if self.chains.len() == PATTERNS {
                return None;
            }
            self.chains.push(Chains::new(pattern));
        }
        self.of(pattern)
    }

    /// Adds an entry at the end. `pattern`: of a receive. False: the index has no room for it.
    fn add(&mut self, key: Key, (pattern, name): (Option<Pattern>, Name)) -> bool {
        self.added += 1;
        let number = self.added;
        match pattern {
            None => self.chains.iter_mut().all(|chains| chains.add(key, number, name)),
            Some(pattern) => self.made(pattern).is_some_and(|chains| chains.add(key, number, name)),
        }
    }
}

/// A list, and its index while that is worth having.
#[derive(Debug)]
pub(super) struct Queue<T> {
    list: IndexList<T>,
    index: Option<Box<Index>>,
    /// So long lists are walked to their end: 0 with an index.
    walked: usize,
    /// Entries that long searches have passed since there was an index last.
    passed: usize,
    /// Of a long list in which a context was searched: entries by context, but for those that are newer.
    contexts: Option<Box<Chains>>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { list: IndexList::default(), index: None, walked: FEW, passed: 0, contexts: None }
    }
}

impl<T> Deref for Queue<T> {
    type Target = IndexList<T>;

    fn deref(&self) -> &IndexList<T> {
        &self.list
    }
}

impl<T> Queue<T> {
    /// Adds an entry at the end. `about`: its pattern, if it is a receive, and its name.
    #[inline(always)]
    pub(super) fn push_back(
        &mut self,
        entry: T,
        about: impl FnOnce() -> (Option<Pattern>, Name),
    ) -> Key {
        let key = self.list.push_back(entry);
        if self.walked == 0 {
            self.add(key, about());
        }
        key
    }

    #[cold]
    fn add(&mut self, key: Key, about: (Option<Pattern>, Name)) {
        if !self.index.as_mut().is_some_and(|index| index.add(key, about)) {
            self.forget();
        }
    }

    /// Removes the entry of `key` and returns it.
    #[inline]
    pub(super) fn remove(&mut self, key: Key) -> Option<T> {
        let entry = self.list.remove(key)?;
        if let Some(index) = &mut self.index {
            index.chains.iter_mut().for_each(|chains| chains.remove(key));
            if self.list.len() <= LEFT {
                self.forget();
            }
        }
        Some(entry)
    }

    /// The entry of `key`, whose name and pattern stay as they are.
    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        self.list.get_mut(key)
    }

    /// Changes entries and their names.
    pub(super) fn change(&mut self, wanted: impl Fn(&T) -> bool, mut change: impl FnMut(&mut T)) {
        self.forget();
        for key in self.list.keys_where(wanted) {
            self.list.get_mut(key).into_iter().for_each(&mut change);
        }
    }

    /// Sources of messages have changed: unknown ones, or (`all`) any. Drops what the index has of them.
    pub(super) fn change_sources(&mut self, all: bool) {
        let Some(index) = &mut self.index else { return };
        index.chains.retain(|chains| !(chains.strange || all && chains.pattern.directed));
        if index.chains.is_empty() {
            self.forget();
        }
    }

    /// Drops the index: names have changed.
    pub(super) fn forget(&mut self) {
        (self.index, self.walked, self.passed) = (None, FEW, 0);
    }

    /// Drops the first entry that `server` wants, if it can be served and is soon found without an index.
    #[inline(always)]
    pub(super) fn serve_first<S: Server<T>>(&mut self, server: S) -> Option<S::Out> {
        if self.list.len() > self.walked {
            return self.serve_soon(server);
        }
        self.list.serve_first::<{ usize::MAX }, _>(server)
    }

    #[inline(never)]
    fn serve_soon<S: Server<T>>(&mut self, server: S) -> Option<S::Out> {
        if self.index.is_some() {
            return None;
        }
        self.list.serve_first::<SHORT, _>(server)
    }

    /// The first of the receives that match a message with this name. `about`: their patterns and names.
    pub(super) fn first_for(
        &mut self,
        (tag, source): Name,
        wanted: impl FnMut(&T) -> bool,
        about: impl Fn(&T) -> (Pattern, Name),
    ) -> Option<Key> {
        if let Some(index) = &self.index {
            let links = index.chains.iter().filter_map(|chains| chains.first(tag, source));
            let found = links.min_by_key(|link| link.number).map(|link| link.key);
            self.count_easy(found);
            return found;
        }
        let found = self.walk(wanted);
        if self.is_slow() {
            self.passed = 0;
            let mut index = Box::<Index>::default();
            let mut all = self.list.iter().map(|(key, entry)| (key, about(entry)));
            if all.all(|(key, (pattern, name))| index.add(key, (Some(pattern), name))) {
                (self.index, self.walked) = (Some(index), 0);
            }
        }
        found
    }

    /// The first of the messages that match a receive with this pattern and name.
    pub(super) fn first_of(
        &mut self,
        pattern: Pattern,
        (tag, source): Name,
        tag_of: impl Fn(&T) -> u64,
        mut source_of: impl FnMut(&T) -> u64,
    ) -> Option<Key> {
        if let Some(chains) = self.index.as_mut().and_then(|index| index.of(pattern)) {
            let found = chains.first(tag, source).map(|link| link.key);
            self.count_easy(found);
            return found;
        }
        let wanted = |m: &T| pattern.takes((tag, source), tag_of(m), || source_of(m));
        let found = self.walk(wanted);
        self.count_easy(found);
        if self.is_slow() {
            self.passed = 0;
            self.chain(pattern, |m| (tag_of(m), source_of(m)));
        }
        found
    }

    /// Makes the chains of a pattern, in place of the oldest if there are many.
    fn chain(&mut self, pattern: Pattern, mut name: impl FnMut(&T) -> Name) {
        let (mut chains, mut number) = (Chains::new(pattern), 0);
        let all = self.list.iter().all(|(key, entry)| {
            number += 1;
            chains.add(key, number, name(entry))
        });
        if !all {
            return;
        }
        self.walked = 0;
        let index = self.index.get_or_insert_default();
        if index.chains.len() == PATTERNS {
            index.chains.remove(0);
        }
        index.chains.push(chains);
        index.added = index.added.max(number);
    }

    /// The first entry with this context.
    pub(super) fn first_with(
        &mut self,
        context: u64,
        context_of: impl Fn(&T) -> u64,
    ) -> Option<Key> {
        let walk = |most: usize| {
            let mut walked = self.list.iter().take(most);
            walked.find(|(_, entry)| context_of(entry) == context).map(|(key, _)| key)
        };
        if self.list.len() <= FEW {
            let found = walk(FEW);
            self.contexts = None;
            return found;
        }
        // The receive that was posted first is often cancelled first.
        if let Some(soon) = walk(SHORT) {
            return Some(soon);
        }
        let pattern = Pattern { ignore: 0, directed: false };
        let made = || Box::new(Chains::new(pattern));
        let mut chains = self.contexts.take().unwrap_or_else(made);
        if !self.add_newer(&mut chains, &context_of) {
            return walk(usize::MAX);
        }
        let mut found = chains.first(context, ANY_SOURCE).map(|link| link.key);
        while let Some(gone) = found.filter(|key| self.list.get(*key).is_none()) {
            chains.remove(gone);
            found = chains.first(context, ANY_SOURCE).map(|link| link.key);
        }
        self.contexts = Some(chains);
        found
    }

    /// Adds the entries that are newer than all that `chains` has. False: there is no memory.
    fn add_newer(&self, chains: &mut Chains, context_of: impl Fn(&T) -> u64) -> bool {
        let newer = self.list.iter_back().take_while(|(key, _)| !chains.has(*key));
        let newer: Vec<_> = newer.map(|(key, entry)| (key, context_of(entry))).collect();
        newer.into_iter().rev().all(|(key, context)| {
            chains.clear(key.slot());
            chains.add(key, 0, (context, ANY_SOURCE))
        })
    }

    fn walk(&mut self, mut wanted: impl FnMut(&T) -> bool) -> Option<Key> {
        let mut passed = 0;
        let found = self.list.iter().find(|(_, entry)| {
            passed += 1;
            wanted(entry)
        });
        if passed > SHORT {
            self.passed += passed;
        }
        found.map(|(key, _)| key)
    }

    /// Whether walks have cost more than an index would, whose chains have a link for each slot.
    fn is_slow(&self) -> bool {
        self.list.len() > FEW && self.passed > self.list.slots() * LONG
    }

    /// Drops an index that was of no use for as long as it took to make.
    fn count_easy(&mut self, found: Option<Key>) {
        let is_easy = found.is_some() && found == self.list.first_key();
        let Some(index) = &mut self.index else { return };
        index.easy = if is_easy { index.easy + 1 } else { 0 };
        if index.easy > self.list.len() + SHORT {
            self.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    const PATTERNS_TRIED: u64 = 12;

    #[derive(Debug, Clone)]
    enum Op {
        Push(u64, u64, u64),
        Find(u64, u64, u64),
        Take(u64, u64, u64),
        Remove(usize),
        Cancel(u64),
        Rename(u64, u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let name = (0..3u64, 0..PATTERNS_TRIED, 0..4u64);
        prop_oneof![
            6 => name.clone().prop_map(|(a, b, c)| Op::Push(a, b, c)),
            4 => name.clone().prop_map(|(a, b, c)| Op::Find(a, b, c)),
            3 => name.prop_map(|(a, b, c)| Op::Take(a, b, c)),
            1 => any::<usize>().prop_map(Op::Remove),
            1 => (0..3u64).prop_map(Op::Cancel),
            1 => (0..3u64, 0..3u64).prop_map(|(a, b)| Op::Rename(a, b)),
        ]
    }

    fn source(n: u64) -> u64 {
        if n == 3 { ANY_SOURCE } else { n }
    }

    fn meet((tag, from): Name, (wanted, ignore, source): (u64, u64, u64)) -> bool {
        (tag ^ wanted) & !ignore == 0 && (source == ANY_SOURCE || source == from)
    }

    proptest! {
        /// Messages, and receives of more patterns than an index has.
        #[test]
        fn finds_what_a_walk_finds(ops in prop::collection::vec(op(), 0..300)) {
            let mut messages: Queue<(u64, u64)> = Queue::default();
            let mut receives: Queue<(u64, u64, u64)> = Queue::default();
            for op in ops {
                match op {
                    Op::Push(tag, ignore, from) => {
                        messages.push_back((tag, from), || (None, (tag, from)));
                        let source = source(from);
                        let about = || (Some(Pattern::new(ignore, source)), (tag, source));
                        receives.push_back((tag, ignore, source), about);
                    }
                    Op::Find(tag, ignore, from) | Op::Take(tag, ignore, from) => {
                        let wanted = (tag, ignore, source(from));
                        let walk = messages.iter().find(|(_, m)| meet(**m, wanted)).map(|(k, _)| k);
                        let pattern = Pattern::new(ignore, wanted.2);
                        let message = messages.first_of(pattern, (tag, wanted.2), |m| m.0, |m| m.1);
                        prop_assert_eq!(message, walk);
                        let walk = receives.iter().find(|(_, r)| meet((tag, from), **r)).map(|(k, _)| k);
                        let about = |r: &(u64, u64, u64)| (Pattern::new(r.1, r.2), (r.0, r.2));
                        let receive = receives.first_for((tag, from), |r| meet((tag, from), *r), about);
                        prop_assert_eq!(receive, walk);
                        if matches!(op, Op::Take(..)) {
                            message.map(|key| messages.remove(key));
                            receive.map(|key| receives.remove(key));
                        }
                    }
                    Op::Remove(n) => {
                        let key = messages.iter().nth(n % messages.len().max(1)).map(|(key, _)| key);
                        key.map(|key| messages.remove(key));
                        let key = receives.iter().nth(n % receives.len().max(1)).map(|(key, _)| key);
                        key.map(|key| receives.remove(key));
                    }
                    Op::Cancel(context) => {
                        let walk = receives.iter().find(|(_, r)| r.0 == context).map(|(k, _)| k);
                        let receive = receives.first_with(context, |r| r.0);
                        prop_assert_eq!(receive, walk);
                        receive.map(|key| receives.remove(key));
                    }
                    Op::Rename(from, to) => {
                        messages.change(|m| m.1 == from, |m| m.1 = to);
                        receives.change(|r| r.2 == from, |r| r.2 = to);
                    }
                }
            }
        }
    }

    const MANY: u64 = 1000;

    /// Counts the entries that are looked at.
    fn looks(mut find: impl FnMut(&mut dyn FnMut())) -> usize {
        let mut count = 0;
        find(&mut || count += 1);
        count
    }

    #[test]
    fn messages_behind_many_of_another_source_are_found_at_once() {
        let mut queue: Queue<(u64, u64)> = Queue::default();
        for n in 0..2 * MANY {
            let message = (n, u64::from(n >= MANY));
            queue.push_back(message, || (None, message));
        }
        let pattern = Pattern::new(u64::MAX, 1);
        let passed = looks(|look| {
            for n in 0..MANY {
                let source = |m: &(u64, u64)| {
                    look();
                    m.1
                };
                let key = queue.first_of(pattern, (0, 1), |m| m.0, source).unwrap();
                assert_eq!(queue.remove(key), Some((MANY + n, 1)));
            }
        });
        assert!(passed as u64 <= 10 * LONG as u64 * MANY, "{passed}");
    }

    #[test]
    fn receives_cancelled_in_any_order_are_found_at_once() {
        let odd = (0..MANY).filter(|n| n % 2 == 1);
        let mixed = odd.chain((0..MANY).filter(|n| n % 2 == 0)).rev();
        let orders: [Vec<u64>; 3] =
            [(0..MANY).collect(), (0..MANY).rev().collect(), mixed.collect()];
        for order in orders {
            let mut queue: Queue<(u64, u64)> = Queue::default();
            let post = |queue: &mut Queue<_>, context: u64| {
                queue.push_back((context, 0), || (Some(Pattern::new(0, 0)), (context, 0)))
            };
            for context in 0..MANY {
                post(&mut queue, context);
            }
            let looks = Cell::new(0);
            let of = |receive: &(u64, u64)| {
                looks.set(looks.get() + 1);
                receive.0
            };
            for context in order {
                let key = queue.first_with(context, of).unwrap();
                assert_eq!(queue.remove(key), Some((context, 0)));
                // Others are posted meanwhile, and go again.
                let other = post(&mut queue, MANY);
                assert_eq!(queue.first_with(MANY, of), Some(other));
                queue.remove(other);
            }
            assert!(looks.get() <= 8 * MANY, "{}", looks.get());
        }
    }

    #[test]
    fn an_entry_that_stays_does_not_keep_the_index() {
        let mut queue: Queue<(u64, u64)> = Queue::default();
        let about = |r: &(u64, u64)| (Pattern::new(0, r.1), *r);
        let post = |queue: &mut Queue<_>, tag: u64| {
            queue.push_back((tag, 0), || (Some(Pattern::new(0, 0)), (tag, 0)));
        };
        post(&mut queue, MANY);
        (0..MANY).for_each(|tag| post(&mut queue, tag));
        let mut had = false;
        for tag in (0..MANY).rev() {
            let key = queue.first_for((tag, 0), |r| *r == (tag, 0), about).unwrap();
            had |= queue.index.is_some();
            queue.remove(key);
        }
        assert!(had && queue.index.is_none());
    }

    #[test]
    fn slots_that_were_in_use_once_count_for_an_index() {
        let mut queue: Queue<(u64, u64)> = Queue::default();
        let keys: Vec<_> =
            (0..100 * MANY).map(|n| queue.push_back((n, 0), || (None, (n, 0)))).collect();
        assert!(keys.into_iter().all(|key| queue.remove(key).is_some()));
        for tag in 0..10 {
            queue.push_back((tag, 0), || (None, (tag, 0)));
        }
        for tag in (0..10).rev() {
            let key = queue.first_of(Pattern::new(0, 0), (tag, 0), |m| m.0, |m| m.1).unwrap();
            queue.remove(key);
            assert!(queue.index.is_none());
        }
    }

    #[test]
    fn receives_behind_many_are_found_at_once_and_an_index_of_no_use_is_dropped() {
        let mut queue: Queue<(u64, u64)> = Queue::default();
        let about = |r: &(u64, u64)| (Pattern::new(0, r.1), *r);
        for tag in 0..MANY {
            queue.push_back((tag, 0), || (Some(Pattern::new(0, 0)), (tag, 0)));
        }
        let passed = looks(|look| {
            for tag in (MANY / 2..MANY).rev().chain(0..MANY / 2) {
                let wanted = |r: &(u64, u64)| {
                    look();
                    *r == (tag, 0)
                };
                let key = queue.first_for((tag, 0), wanted, about).unwrap();
                assert_eq!(queue.remove(key), Some((tag, 0)));
                // It is made soon, and dropped when half of the easy searches are over.
                let has = queue.index.is_some();
                assert!(has || !(MANY / 2..MANY - 2).contains(&tag), "{tag}");
                assert!(!has || !(MANY / 3..MANY / 2).contains(&tag), "{tag}");
            }
        });
        assert!(passed as u64 <= 4 * MANY, "{passed}");
    }
}
