//! The index of a cache's registrations: by address, by age, and within limits. It is bookkeeping without system calls.
//! The monitor's thread waits for its lock, so **nothing here allocates or frees memory** (`monitor.rs` says why):
//! callers create and drop the `Arc`s of entries.
//!
//! Listed entries may overlap, but none lies within another. So their ends are in the same order as their starts: of
//! all entries that begin at or before an address, the last one reaches furthest. One look-up in a tree of starts finds
//! a registration that covers a request, if there is one. An application that moves a buffer along an array registers
//! each position once; merged entries would register the beginning of the array again at every step.

use super::monitor::Change;
use super::registrar::{Access, Limits};
use super::span::Span;
use super::statistics::Account;
use crate::sys::mirror::Mirror;
use intrusive_collections::{
    Bound, KeyAdapter, LinkedList, LinkedListAtomicLink, RBTree, RBTreeAtomicLink,
    intrusive_adapter,
};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

/// How long no registration is kept for addresses whose pages are being discarded. The kernel reports a discard first,
/// and carries it out when the thread runs again. A machine in use does not stall a thread for a second.
pub(super) const QUARANTINE_NS: u64 = 1_000_000_000;
const QUARANTINED: usize = 128;

/// A registration. Its fields change only under the lock of its index.
pub(super) struct Entry<H> {
    /// The device's registration.
    pub(super) handle: H,
    /// Of shared memory: shows changes without an event.
    mirror: OnceLock<Mirror>,
    _account: Account, // dropped after the handle: it counts its end
    pub(super) span: Span,
    pub(super) access: Access,
    /// Number of transfers that use it.
    leases: AtomicU32,
    /// Whether requests can find it.
    listed: AtomicBool,
    /// Whether it has ever been listed, so that the worker has to deregister it.
    kept: AtomicBool,
    gone: Gone,
    /// When it was last used, in ticks of the index's clock.
    used: AtomicU64,
    /// Its key in `ages`, which is updated when the entry comes to be the oldest.
    queued: AtomicU64,
    by_address: RBTreeAtomicLink,
    by_age: RBTreeAtomicLink,
    by_death: LinkedListAtomicLink,
}

impl<H> Entry<H> {
    /// A registration with one lease, not listed yet.
    pub(super) fn leased(handle: H, account: Account, span: Span, access: Access) -> Arc<Self> {
        Arc::new(Self {
            handle,
            mirror: OnceLock::new(),
            _account: account,
            span,
            access,
            leases: AtomicU32::new(1),
            listed: AtomicBool::new(false),
            kept: AtomicBool::new(false),
            gone: Gone::new(),
            used: AtomicU64::new(0),
            queued: AtomicU64::new(0),
            by_address: RBTreeAtomicLink::new(),
            by_age: RBTreeAtomicLink::new(),
            by_death: LinkedListAtomicLink::new(),
        })
    }

    /// Has `mirror`, which was made before the registration, show whether its pages are those of its addresses.
    pub(super) fn set_mirror(&self, mirror: Mirror) {
        let _ = self.mirror.set(mirror);
    }

    /// Whether the pages of `want`, within its addresses, are those that were registered, as far as a mirror shows.
    pub(super) fn is_true_of(&self, want: Span) -> bool {
        self.mirror.get().is_none_or(|mirror| mirror.shows(want.start, want.len()))
    }

    /// The ranges that need no watching for it any longer.
    pub(super) fn unwatch(&self) -> impl Iterator<Item = Span> + use<H> {
        self.gone.rest(self.span)
    }
}

/// The part of a watched range that was unmapped or replaced. It must not be unwatched: another user may watch what is
/// mapped there now, and kernels before 6.14 would end that watch too.
struct Gone {
    start: AtomicUsize,
    end: AtomicUsize,
}

impl Gone {
    fn new() -> Self {
        Self { start: AtomicUsize::new(usize::MAX), end: AtomicUsize::new(0) }
    }

    fn add(&self, span: Span) {
        self.start.fetch_min(span.start, Relaxed);
        self.end.fetch_max(span.end, Relaxed);
    }

    /// The remainder of `whole`, before and after that part.
    fn rest(&self, whole: Span) -> impl Iterator<Item = Span> + use<> {
        let before = self.start.load(Relaxed).clamp(whole.start, whole.end);
        let after = self.end.load(Relaxed).clamp(before, whole.end);
        let rest = [Span { end: before, ..whole }, Span { start: after, ..whole }];
        rest.into_iter().filter(|span| span.len() > 0)
    }
}

/// A registration that is being made, or the range of a vigil.
pub(super) struct Pending<H> {
    pub(super) span: Span,
    /// Its addresses have changed since.
    void: AtomicBool,
    /// Nothing is held for it any more. Changes under the lock of the index.
    ended: AtomicBool,
    gone: Gone,
    /// The registration of a vigil. Locked while it ends, so that a second thread that ends it waits.
    pub(super) held: Mutex<Option<H>>,
    link: LinkedListAtomicLink,
}

impl<H> Pending<H> {
    pub(super) fn new(span: Span) -> Arc<Self> {
        Arc::new(Self {
            span,
            void: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            gone: Gone::new(),
            held: Mutex::new(None),
            link: LinkedListAtomicLink::new(),
        })
    }

    /// Whether its addresses have not changed.
    pub(super) fn is_unchanged(&self) -> bool {
        !self.void.load(Relaxed)
    }

    /// As [`Entry::unwatch`].
    pub(super) fn unwatch(&self) -> impl Iterator<Item = Span> + use<H> {
        self.gone.rest(self.span)
    }

    /// Notes a change. Returns whether it is the first one.
    fn note(&self, span: Span, change: Change) -> bool {
        if !self.span.overlaps(span) {
            return false;
        }
        if change == Change::Gone {
            self.gone.add(span);
        }
        !self.void.swap(true, Relaxed)
    }
}

intrusive_adapter!(ByAddress<H> = Arc<Entry<H>>: Entry<H> { by_address => RBTreeAtomicLink });
intrusive_adapter!(ByAge<H> = Arc<Entry<H>>: Entry<H> { by_age => RBTreeAtomicLink });
intrusive_adapter!(ByDeath<H> = Arc<Entry<H>>: Entry<H> { by_death => LinkedListAtomicLink });
intrusive_adapter!(Announced<H> = Arc<Pending<H>>: Pending<H> { link => LinkedListAtomicLink });

impl<'a, H> KeyAdapter<'a> for ByAddress<H> {
    type Key = usize;
    fn get_key(&self, entry: &'a Entry<H>) -> usize {
        entry.span.start
    }
}

impl<'a, H> KeyAdapter<'a> for ByAge<H> {
    type Key = u64;
    fn get_key(&self, entry: &'a Entry<H>) -> u64 {
        entry.queued.load(Relaxed)
    }
}

/// What happens with an entry whose lease ends.
pub(super) enum Released<H> {
    /// Other references hold it.
    Held,
    /// It is dead, and waits for the worker.
    Dead,
    /// The caller drops it, outside of the lock: it has never been listed.
    Yours(Arc<Entry<H>>),
}

/// The index of one cache.
pub(super) struct Index<H> {
    listed: RBTree<ByAddress<H>>,
    ages: RBTree<ByAge<H>>,
    dead: LinkedList<ByDeath<H>>,
    announced: LinkedList<Announced<H>>,
    vigils: LinkedList<Announced<H>>,
    /// Some vigils have seen a change, and may still hold a registration.
    has_void: bool,
    /// Ranges for which no registration is kept, and until when, ns.
    quarantine: [Option<(Span, u64)>; QUARANTINED],
    pub(super) limits: Limits,
    count: usize,
    bytes: usize,
    clock: u64,
    /// Entries that were removed for a change, or for a wider entry.
    pub(super) invalidations: u64,
    /// Entries that were removed for room.
    pub(super) evictions: u64,
    /// Vigils that have seen a change.
    pub(super) disturbed: u64,
}

/// Removes `pending` from the list that it is in.
fn remove<H>(list: &mut LinkedList<Announced<H>>, pending: &Arc<Pending<H>>) {
    let mut cursor = list.front_mut();
    while let Some(other) = cursor.get() {
        if std::ptr::eq(other, &raw const **pending) {
            cursor.remove();
            return;
        }
        cursor.move_next();
    }
}

impl<H> Index<H> {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            listed: RBTree::new(ByAddress::new()),
            ages: RBTree::new(ByAge::new()),
            dead: LinkedList::new(ByDeath::new()),
            announced: LinkedList::new(Announced::new()),
            vigils: LinkedList::new(Announced::new()),
            has_void: false,
            quarantine: [None; QUARANTINED],
            limits,
            count: 0,
            bytes: 0,
            clock: 0,
            invalidations: 0,
            evictions: 0,
            disturbed: 0,
        }
    }

    /// Finds a registration that covers `want` and allows `access`, and adds a lease.
    pub(super) fn hit(&mut self, want: Span, access: Access) -> Option<Arc<Entry<H>>> {
        let cursor = self.listed.upper_bound(Bound::Included(&want.start));
        let entry = cursor.get().filter(|e| e.span.covers(want) && e.access.contains(access))?;
        self.clock += 1;
        entry.used.store(self.clock, Relaxed);
        entry.leases.fetch_add(1, Relaxed);
        cursor.clone_pointer()
    }

    /// Begins a registration: from now on changes to its addresses are noted. False: it could not be kept at `now_ns`,
    /// and nothing was begun.
    pub(super) fn announce(&mut self, pending: &Arc<Pending<H>>, now_ns: u64) -> bool {
        let span = pending.span;
        if self.limits.count == 0 || span.len() > self.limits.bytes || !self.is_calm(span, now_ns) {
            return false;
        }
        self.announced.push_back(pending.clone());
        true
    }

    /// Begins a vigil, until `end_vigil`. False: pages there are being discarded at `now_ns`, so it would show nothing;
    /// nothing was begun.
    pub(super) fn begin_vigil(&mut self, pending: &Arc<Pending<H>>, now_ns: u64) -> bool {
        let calm = self.is_calm(pending.span, now_ns);
        if calm {
            self.vigils.push_back(pending.clone());
        }
        calm
    }

    pub(super) fn end_vigil(&mut self, pending: &Arc<Pending<H>>) {
        remove(&mut self.vigils, pending);
    }

    /// Whether no pages of `span` are being discarded.
    fn is_calm(&mut self, span: Span, now_ns: u64) -> bool {
        for slot in &mut self.quarantine {
            match *slot {
                Some((_, until)) if until <= now_ns => *slot = None,
                Some((closed, _)) if closed.overlaps(span) => return false,
                _ => (),
            }
        }
        true
    }

    /// Ends the announcement of a registration. Returns whether its addresses have not changed.
    pub(super) fn conclude(&mut self, pending: &Arc<Pending<H>>) -> bool {
        remove(&mut self.announced, pending);
        pending.is_unchanged()
    }

    /// Lists a leased entry, so that requests find it. Removes entries within it, one around it that allows less, and
    /// old ones for room. False: an entry around it allows as much, or there is no room; it is not listed.
    pub(super) fn insert(&mut self, entry: &Arc<Entry<H>>) -> bool {
        let span = entry.span;
        while let Some(around) = self.reaching_furthest(span.start).filter(|e| e.span.covers(span))
        {
            if around.access.contains(entry.access) {
                return false;
            }
            let start = around.span.start;
            self.invalidations += 1;
            self.unlist(start);
        }
        while let Some(start) = self.first_within(span) {
            self.invalidations += 1;
            self.unlist(start);
        }
        if !self.make_room(span.len()) {
            return false;
        }
        self.clock += 1;
        entry.used.store(self.clock, Relaxed);
        entry.queued.store(self.clock, Relaxed);
        entry.listed.store(true, Relaxed);
        entry.kept.store(true, Relaxed);
        self.count += 1;
        self.bytes += span.len();
        self.ages.insert(entry.clone());
        self.listed.insert(entry.clone());
        true
    }

    /// Removes the least recently used idle entries until an entry of `len` bytes is within the limits. False: that is
    /// not possible.
    pub(super) fn make_room(&mut self, len: usize) -> bool {
        while self.count >= self.limits.count || self.bytes.saturating_add(len) > self.limits.bytes
        {
            if self.evict().is_none() {
                return false;
            }
        }
        true
    }

    /// Removes the least recently used idle entry. Returns its bytes.
    pub(super) fn evict(&mut self) -> Option<usize> {
        // Each entry comes up at most twice: to update its age, and to be removed.
        for _ in 0..=self.count.saturating_mul(2) {
            let mut cursor = self.ages.front_mut();
            let oldest = cursor.get()?;
            let idle = oldest.leases.load(Relaxed) == 0;
            let used = if idle { oldest.used.load(Relaxed) } else { self.clock + 1 };
            if used <= oldest.queued.load(Relaxed) {
                let (start, len) = (oldest.span.start, oldest.span.len());
                self.evictions += 1;
                self.unlist(start);
                return Some(len);
            }
            let entry = cursor.remove()?;
            entry.queued.store(used, Relaxed);
            self.clock = self.clock.max(used);
            self.ages.insert(entry);
        }
        None
    }

    /// Ends a lease.
    pub(super) fn release(&mut self, entry: Arc<Entry<H>>) -> Released<H> {
        if entry.leases.fetch_sub(1, Relaxed) > 1 {
            return Released::Held; // other leases hold it: nothing is freed here
        }
        self.clock += 1;
        entry.used.store(self.clock, Relaxed);
        if entry.listed.load(Relaxed) {
            return Released::Held;
        }
        if !entry.kept.load(Relaxed) {
            return Released::Yours(entry);
        }
        self.dead.push_back(entry);
        Released::Dead
    }

    /// Ends a lease, and removes the entry: its pages have changed without an event.
    pub(super) fn reject(&mut self, entry: Arc<Entry<H>>) -> Released<H> {
        let listed = entry.listed.load(Relaxed).then_some(entry.span.start);
        let released = self.release(entry);
        let Some(start) = listed else { return released };
        self.invalidations += 1;
        self.unlist(start);
        if self.has_dead() { Released::Dead } else { Released::Held }
    }

    /// Removes all entries that overlap `span`. Returns whether registrations wait for the worker.
    pub(super) fn change(&mut self, span: Span, change: Change, now_ns: u64) -> bool {
        for pending in &self.announced {
            pending.note(span, change);
        }
        for pending in &self.vigils {
            let first = pending.note(span, change);
            self.disturbed += u64::from(first);
            self.has_void |= first;
        }
        while let Some(last) = self.last_overlapping(span) {
            self.invalidations += 1;
            self.unlist(last.start);
        }
        if change == Change::Gone {
            let dead = self.dead.iter().filter(|entry| entry.span.overlaps(span));
            dead.for_each(|entry| entry.gone.add(span));
        }
        if change == Change::Discarded {
            self.close_to(span, now_ns);
        }
        self.has_dead()
    }

    /// Removes all entries. A leased entry is dead when its last lease ends.
    pub(super) fn clear(&mut self) {
        while let Some(start) = self.listed.front().get().map(|entry| entry.span.start) {
            self.unlist(start);
        }
    }

    /// Whether registrations wait to be ended.
    pub(super) fn has_dead(&self) -> bool {
        self.has_void || !self.dead.is_empty()
    }

    /// Whether somebody watches over memory.
    pub(super) fn has_vigils(&self) -> bool {
        !self.vigils.is_empty()
    }

    /// A vigil that has seen a change, and may still hold a registration, until [`Self::note_ended`].
    pub(super) fn next_void(&mut self) -> Option<Arc<Pending<H>>> {
        if !self.has_void {
            return None;
        }
        let mut cursor = self.vigils.front();
        while cursor.get().is_some_and(|v| v.is_unchanged() || v.ended.load(Relaxed)) {
            cursor.move_next();
        }
        self.has_void = !cursor.is_null();
        cursor.clone_pointer()
    }

    /// The vigil, which has seen a change, holds nothing any more.
    pub(super) fn note_ended(&mut self, vigil: &Pending<H>) {
        vigil.ended.store(true, Relaxed);
    }

    /// The next entry that waits to be deregistered.
    pub(super) fn next_dead(&mut self) -> Option<Arc<Entry<H>>> {
        self.dead.pop_front()
    }

    /// See [`super::monitor::Subscriber::needs`].
    pub(super) fn needs(&self, span: Span) -> bool {
        self.last_overlapping(span).is_some()
            || self.announced.iter().chain(&self.vigils).any(|pending| pending.span.overlaps(span))
    }

    fn unlist(&mut self, start: usize) {
        let Some(entry) = self.listed.find_mut(&start).remove() else { return };
        self.ages.find_mut(&entry.queued.load(Relaxed)).remove(); // `entry` still holds it
        entry.listed.store(false, Relaxed);
        self.count -= 1;
        self.bytes -= entry.span.len();
        if entry.leases.load(Relaxed) == 0 {
            self.dead.push_back(entry);
        } else {
            // Its leases hold it: nothing is freed here. No change is noted in it from now on: any part may be gone.
            entry.gone.add(entry.span);
        }
    }

    /// The entry that reaches furthest of those that begin at or before an address.
    fn reaching_furthest(&self, address: usize) -> Option<&Entry<H>> {
        self.listed.upper_bound(Bound::Included(&address)).get()
    }

    fn first_within(&self, span: Span) -> Option<usize> {
        let first = self.listed.lower_bound(Bound::Included(&span.start)).get()?;
        span.covers(first.span).then_some(first.span.start)
    }

    /// The last entry that overlaps `span`. Ends are in the order of starts: if the last entry that begins before the
    /// end of `span` does not overlap it, no entry does.
    fn last_overlapping(&self, span: Span) -> Option<Span> {
        let last = self.listed.upper_bound(Bound::Excluded(&span.end)).get()?;
        last.span.overlaps(span).then_some(last.span)
    }

    fn close_to(&mut self, span: Span, now_ns: u64) {
        let until = now_ns.saturating_add(QUARANTINE_NS);
        let free = |slot: &Option<(Span, u64)>| {
            slot.is_none_or(|(closed, old)| old <= now_ns || span.covers(closed))
        };
        if let Some(slot) = self.quarantine.iter_mut().find(|slot| free(slot)) {
            *slot = Some((span, until));
            return;
        }
        // If no slot is free, the nearest range grows: too little is kept rather than too much.
        let growth = |slot: &&mut Option<(Span, u64)>| {
            slot.map_or(0, |(closed, _)| closed.hull(span).len() - closed.len())
        };
        if let Some(slot) = self.quarantine.iter_mut().min_by_key(growth) {
            *slot = Some((slot.map_or(span, |(closed, _)| closed.hull(span)), until));
        }
    }

    /// Number of listed entries, and their bytes.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.count, self.bytes)
    }

    #[cfg(test)]
    pub(super) fn spans(&self) -> Vec<(Span, Access)> {
        self.listed.iter().map(|entry| (entry.span, entry.access)).collect()
    }
}
