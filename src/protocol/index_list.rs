//! An ordered list in a slab: posting order, removal anywhere in constant time, and keys that tell a reused slot from
//! the entry that was there before.

/// The name of an entry: slot and generation. Fits into 64 bits on the wire.
#[derive(Clone, Copy, Eq, Hash, Debug)]
#[cfg_attr(not(test), derive(PartialEq))]
#[cfg_attr(test, expect(clippy::derived_hash_with_manual_eq))]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

#[cfg(test)]
impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        crate::transport::count_comparison();
        (self.index, self.generation) == (other.index, other.generation)
    }
}

impl Key {
    /// Its place in the list's slab: less than the number of entries that the list ever had at once, or `u32::MAX`.
    pub(super) fn slot(self) -> u32 {
        self.index
    }

    /// The key as a number for packets.
    pub(crate) fn to_wire(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The first key of the sequence of keys that name no entry of any list.
    pub(crate) const NAMELESS: Self = Self { index: NONE, generation: 0 };

    /// The next key of that sequence.
    pub(crate) fn next_nameless(self) -> Self {
        Self { index: NONE, generation: self.generation.wrapping_add(1) }
    }

    /// Whether this key is in that sequence, before `other`.
    pub(crate) fn is_nameless_before(self, other: Self) -> bool {
        self.index == NONE && self.generation < other.generation
    }

    /// The key in a packet. Only a look-up tells whether it names an entry.
    pub(crate) fn from_wire(wire: u64) -> Self {
        Self { index: wire as u32, generation: (wire >> 32) as u32 }
    }
}

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Node<T> {
    generation: u32,
    next: u32,
    prev: u32,
    value: Option<T>,
}

/// An ordered list: see the module.
#[derive(Debug)]
pub(crate) struct IndexList<T> {
    nodes: Vec<Node<T>>,
    head: u32,
    tail: u32,
    free: u32,
    len: usize,
}

impl<T> Default for IndexList<T> {
    fn default() -> Self {
        Self { nodes: Vec::new(), head: NONE, tail: NONE, free: NONE, len: 0 }
    }
}

impl<T> IndexList<T> {
    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The number of entries that it ever had at once.
    pub(crate) fn slots(&self) -> usize {
        self.nodes.len()
    }

    /// Whether the list is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The newest entry.
    pub(crate) fn last(&self) -> Option<&T> {
        self.nodes.get(self.tail as usize)?.value.as_ref()
    }

    /// The key of the oldest entry.
    pub(crate) fn first_key(&self) -> Option<Key> {
        self.iter().next().map(|(key, _)| key)
    }

    /// Adds an entry at the end. Allocates only when there have never been this many entries before.
    #[inline(always)]
    pub(crate) fn push_back(&mut self, value: T) -> Key {
        if self.free == NONE {
            self.grow();
        }
        let (index, tail) = (self.free, self.tail);
        let Some(node) = self.nodes.get_mut(index as usize) else { return Key::NAMELESS };
        let generation = node.generation;
        self.free = node.next;
        node.next = NONE;
        node.prev = tail;
        node.value = Some(value);
        self.tail = index;
        self.len += 1;
        match self.nodes.get_mut(tail as usize) {
            Some(last) => last.next = index,
            None => self.head = index,
        }
        Key { index, generation }
    }

    #[cold]
    fn grow(&mut self) {
        self.free = self.nodes.len() as u32;
        self.nodes.push(Node { generation: 0, next: NONE, prev: NONE, value: None });
    }

    fn node(&self, key: Key) -> Option<&Node<T>> {
        self.nodes.get(key.index as usize).filter(|n| n.generation == key.generation)
    }

    /// Whether `key` named an entry that has been removed.
    pub(crate) fn is_gone(&self, key: Key) -> bool {
        let node = self.nodes.get(key.index as usize);
        node.is_some_and(|node| (node.generation.wrapping_sub(key.generation) as i32) > 0)
    }

    /// The entry of `key`, unless it was removed.
    #[inline]
    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        self.node(key)?.value.as_ref()
    }

    /// The entry of `key`, unless it was removed.
    #[inline]
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let node = self.nodes.get_mut(key.index as usize)?;
        if node.generation == key.generation { node.value.as_mut() } else { None }
    }

    /// Removes the entry of `key` and returns it.
    #[inline]
    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let node = self.nodes.get_mut(key.index as usize)?;
        if node.generation != key.generation {
            return None;
        }
        let value = node.value.take()?;
        self.unlink(key.index);
        Some(value)
    }

    /// Drops the entry of `key` in place, without moving it out, unless it was removed.
    #[inline]
    pub(crate) fn discard(&mut self, key: Key) {
        let Some(node) = self.nodes.get_mut(key.index as usize) else { return };
        if node.generation == key.generation && node.value.is_some() {
            node.value = None;
            self.unlink(key.index);
        }
    }

    /// Frees the slot of an entry whose value was taken.
    #[inline(always)]
    fn unlink(&mut self, index: u32) {
        let free = self.free;
        let Some(node) = self.nodes.get_mut(index as usize) else { return };
        node.generation = node.generation.wrapping_add(1);
        let (next, prev) = (node.next, node.prev);
        node.next = free;
        self.free = index;
        self.len -= 1;
        match self.nodes.get_mut(prev as usize) {
            Some(before) => before.next = next,
            None => self.head = next,
        }
        match self.nodes.get_mut(next as usize) {
            Some(after) => after.prev = prev,
            None => self.tail = prev,
        }
    }

    /// Drops the first entry that `server` wants, if it can be served, and at most `MOST` others are before it.
    #[inline(always)]
    pub(crate) fn serve_first<const MOST: usize, S: Server<T>>(
        &mut self,
        server: S,
    ) -> Option<S::Out> {
        let (mut index, mut left) = (self.head, MOST);
        loop {
            let node = self.nodes.get_mut(index as usize)?;
            let value = node.value.as_ref()?;
            if !server.wants(value) {
                if MOST < usize::MAX {
                    left = left.checked_sub(1)?;
                }
                index = node.next;
                continue;
            }
            let served = server.serve(value)?;
            node.value = None;
            self.unlink(index);
            return Some(served);
        }
    }

    /// All entries in order.
    pub(crate) fn iter(&self) -> Iter<'_, T> {
        Iter { list: self, at: self.head }
    }

    /// All entries, the newest first.
    pub(crate) fn iter_back(&self) -> impl Iterator<Item = (Key, &T)> {
        let mut at = self.tail;
        std::iter::from_fn(move || {
            let (index, node) = (at, self.nodes.get(at as usize)?);
            at = node.prev;
            node.value.as_ref().map(|value| (Key { index, generation: node.generation }, value))
        })
    }

    /// The keys of the entries that `wanted` accepts, in order.
    pub(crate) fn keys_where(&self, wanted: impl Fn(&T) -> bool) -> Vec<Key> {
        self.iter().filter(|(_, value)| wanted(value)).map(|(key, _)| key).collect()
    }
}

/// Looks for an entry, and serves it. A trait, because closures cannot be told to be inlined.
pub(crate) trait Server<T> {
    type Out;
    fn wants(&self, entry: &T) -> bool;
    /// None: the entry stays.
    fn serve(self, entry: &T) -> Option<Self::Out>;
}

/// Iterates in list order.
pub(crate) struct Iter<'a, T> {
    list: &'a IndexList<T>,
    at: u32,
}

impl<'a, T> Iterator for Iter<'a, T> {
    type Item = (Key, &'a T);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let node = self.list.nodes.get(self.at as usize)?;
        let key = Key { index: self.at, generation: node.generation };
        self.at = node.next;
        node.value.as_ref().map(|value| (key, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Op {
        Push(u16),
        Remove(usize),
        RemoveStale(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => any::<u16>().prop_map(Op::Push),
            2 => any::<usize>().prop_map(Op::Remove),
            1 => any::<usize>().prop_map(Op::RemoveStale),
        ]
    }

    proptest! {
        #[test]
        fn behaves_like_a_vector(ops in prop::collection::vec(op(), 0..200)) {
            let mut list = IndexList::default();
            let mut oracle: Vec<(Key, u16)> = Vec::new();
            let mut stale: Vec<Key> = Vec::new();
            for op in ops {
                match op {
                    Op::Push(v) => {
                        let key = list.push_back(v);
                        oracle.push((key, v));
                    }
                    Op::Remove(i) if !oracle.is_empty() => {
                        let (key, v) = oracle.remove(i % oracle.len());
                        prop_assert_eq!(list.get(key), Some(&v));
                        prop_assert_eq!(list.remove(key), Some(v));
                        stale.push(key);
                    }
                    Op::RemoveStale(i) if !stale.is_empty() => {
                        let key = stale[i % stale.len()];
                        prop_assert_eq!(list.remove(key), None);
                        prop_assert_eq!(list.get(key), None);
                        prop_assert_eq!(list.get_mut(key), None);
                    }
                    _ => {}
                }
                prop_assert_eq!(list.len(), oracle.len());
                let all: Vec<_> = list.iter().map(|(k, v)| (k, *v)).collect();
                prop_assert_eq!(&all, &oracle);
            }
        }
    }

    #[test]
    fn keys_survive_the_wire() {
        let mut list = IndexList::default();
        let a = list.push_back(1);
        list.remove(a);
        let b = list.push_back(2);
        assert_ne!(a, b);
        assert_eq!(Key::from_wire(b.to_wire()), b);
        assert_eq!(list.get(Key::from_wire(u64::MAX)), None);
    }
}
