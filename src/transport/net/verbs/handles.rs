//! Address handles: a bounded number, one for each remote port, however many peers are behind it. Making one takes a
//! system call, so they are kept until there are too many.

use crate::transport::net::agreement::pause::Failures;
use std::collections::HashMap;
use std::hash::Hash;

/// How long a port counts as unreachable after the first failure, nanoseconds; twice as long after each further one in a
/// row: each attempt that has to ask the network takes a second.
const UNREACHABLE_NS: u64 = 1_000_000_000;

/// Names a handle; it may be gone when it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct HandleId {
    at: u32,
    generation: u32,
}

#[derive(Debug)]
struct Slot<K, V> {
    key: K,
    generation: u32,
    used: u64,
    /// `None`: it was forgotten.
    value: Option<V>,
}

/// A cache of the most recently used values by key, of bounded size.
#[derive(Debug)]
pub(super) struct Handles<K, V> {
    slots: Vec<Slot<K, V>>,
    by_key: HashMap<K, u32>,
    limit: usize,
    clock: u64,
}

impl<K: Copy + Eq + Hash, V> Handles<K, V> {
    pub(super) fn new(limit: usize) -> Self {
        Self { slots: Vec::new(), by_key: HashMap::new(), limit: limit.max(1), clock: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// The value of `id`, unless it was evicted.
    #[inline]
    pub(super) fn get(&mut self, id: HandleId) -> Option<&V> {
        self.clock += 1;
        let slot = self.slots.get_mut(id.at as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        slot.used = self.clock;
        slot.value.as_ref()
    }

    /// The id of `key`, which is made if it does not exist; that may evict the least recently used one.
    pub(super) fn find<E>(
        &mut self,
        key: K,
        make: impl FnOnce() -> Result<V, E>,
    ) -> Result<HandleId, E> {
        if let Some(at) = self.by_key.get(&key) {
            let generation = self.slots.get(*at as usize).map_or(0, |slot| slot.generation);
            return Ok(HandleId { at: *at, generation });
        }
        let value = Some(make()?);
        self.clock += 1;
        let used = self.clock;
        let at = if self.by_key.len() == self.slots.len() && self.slots.len() < self.limit {
            self.slots.push(Slot { key, generation: 0, used, value });
            self.slots.len() - 1
        } else {
            let oldest = self.slots.iter().enumerate().min_by_key(|(_, slot)| slot.used);
            let at = oldest.map_or(0, |(at, _)| at);
            if let Some(slot) = self.slots.get_mut(at) {
                if slot.value.is_some() {
                    self.by_key.remove(&slot.key);
                }
                let generation = slot.generation.wrapping_add(1);
                *slot = Slot { key, generation, used, value };
            }
            at
        };
        self.by_key.insert(key, at as u32);
        let generation = self.slots.get(at).map_or(0, |slot| slot.generation);
        Ok(HandleId { at: at as u32, generation })
    }

    /// The id of `key`, if it exists.
    pub(super) fn id(&self, key: &K) -> Option<HandleId> {
        let at = *self.by_key.get(key)?;
        Some(HandleId { at, generation: self.slots.get(at as usize)?.generation })
    }

    /// Takes the value of `key` out; its place is the next one to be used.
    pub(super) fn forget(&mut self, key: &K) -> Option<V> {
        let at = self.by_key.remove(key)?;
        let slot = self.slots.get_mut(at as usize)?;
        slot.used = 0;
        slot.generation = slot.generation.wrapping_add(1);
        slot.value.take()
    }
}

/// Ports for which no handle could be made: a bounded number.
#[derive(Debug)]
pub(super) struct Unreachable<K> {
    failures: HashMap<K, Failures>,
    limit: usize,
}

impl<K: Eq + Hash> Unreachable<K> {
    pub(super) fn new(limit: usize) -> Self {
        Self { failures: HashMap::new(), limit }
    }

    /// No handle of `key` is to be made yet.
    pub(super) fn has(&self, key: &K, now: u64) -> bool {
        self.failures.get(key).is_some_and(|failures| failures.pause(now))
    }

    /// A handle of `key` was made, or that failed.
    pub(super) fn note(&mut self, key: K, made: bool, now: u64) {
        if made {
            self.failures.remove(&key);
            return;
        }
        if self.failures.len() >= self.limit {
            self.failures.clear();
        }
        self.failures.entry(key).or_default().again(now, UNREACHABLE_NS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel gave up a neighbour while a switch was away.
    #[test]
    fn a_port_that_is_back_is_reached_in_about_the_time_for_which_it_was_away() {
        const SECOND: u64 = 1_000_000_000;
        let mut ports = Unreachable::new(2);
        let mut attempts = Vec::new();
        for now in 1..200 {
            if !ports.has(&7, now * SECOND) {
                ports.note(7, false, now * SECOND);
                attempts.push(now);
            }
        }
        assert_eq!(attempts[..7], [1, 2, 4, 8, 16, 32, 62]);
        assert!(ports.has(&7, 190 * SECOND) && !ports.has(&8, 190 * SECOND));
        ports.note(7, true, 190 * SECOND);
        ports.note(7, false, 191 * SECOND);
        assert!(ports.has(&7, 191 * SECOND) && !ports.has(&7, 192 * SECOND));
        (0..5).for_each(|key| ports.note(key, false, 191 * SECOND));
        assert!(ports.failures.len() <= 2);
    }

    fn find(handles: &mut Handles<u32, String>, key: u32) -> HandleId {
        handles.find(key, || Ok::<_, ()>(key.to_string())).unwrap()
    }

    #[test]
    fn the_least_used_one_gives_way() {
        let mut handles = Handles::new(2);
        let (one, two) = (find(&mut handles, 1), find(&mut handles, 2));
        assert_eq!((find(&mut handles, 1), handles.id(&2)), (one, Some(two)));
        assert_eq!(handles.get(one).unwrap(), "1");
        let three = find(&mut handles, 3);
        assert_eq!(handles.get(two), None, "it has gone");
        assert_eq!(handles.get(one).unwrap(), "1");
        assert_eq!(handles.len(), 2);
        let again = find(&mut handles, 2);
        assert_eq!(handles.get(three), None);
        assert_eq!(handles.get(again).unwrap(), "2");
        assert_eq!(handles.find(9, || Err::<String, _>("refused")), Err("refused"));
        assert_eq!(handles.len(), 2);
    }

    #[test]
    fn what_is_forgotten_is_made_anew_in_its_place() {
        let mut handles = Handles::new(3);
        let (one, two) = (find(&mut handles, 1), find(&mut handles, 2));
        assert_eq!((handles.forget(&1), handles.forget(&1)), (Some("1".to_owned()), None));
        assert_eq!((handles.id(&1), handles.len()), (None, 1));
        assert_eq!(handles.get(one), None);
        let again = find(&mut handles, 1);
        assert_eq!(handles.get(one), None, "the earlier one");
        assert_eq!((handles.get(again).unwrap().as_str(), again.at), ("1", one.at));
        assert_eq!(handles.get(two).unwrap(), "2");
        assert_eq!(handles.len(), 2);
    }
}
