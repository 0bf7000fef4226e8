//! The index against a simple list with the same rules, on random operations.

use crate::memory::cache::index::{Entry, Index, Pending, Released};
use crate::memory::cache::monitor::Change;
use crate::memory::cache::statistics::{Account, Counters};
use crate::memory::cache::{Access, Limits, Span};
use proptest::prelude::*;
use std::sync::Arc;

const PLACES: usize = 24;

#[derive(Clone, Debug)]
enum Step {
    /// A request, which registers if it finds no registration. `disturbed`: by a change meanwhile.
    Get {
        span: Span,
        access: Access,
        disturbed: Option<Span>,
    },
    /// The end of the n-th lease.
    Release(usize),
    Change(Span, Change),
    Evict,
    /// Time passes, in tenths of the quarantine.
    Wait(u64),
    /// The worker deregisters dead entries.
    Bury,
}

fn span() -> impl Strategy<Value = Span> {
    (0..PLACES, 1..8usize).prop_map(|(start, len)| Span { start, end: start + len })
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![
        Just(Access::READ),
        Just(Access::WRITE),
        Just(Access::REMOTE_READ),
        Just(Access::REMOTE_WRITE)
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (span(), access(), proptest::option::weighted(0.1, span()))
            .prop_map(|(span, access, disturbed)| Step::Get { span, access, disturbed }),
        5 => (0..8usize).prop_map(Step::Release),
        2 => (span(), prop_oneof![Just(Change::Gone), Just(Change::Discarded)])
            .prop_map(|(span, change)| Step::Change(span, change)),
        1 => Just(Step::Evict),
        1 => (1..12u64).prop_map(Step::Wait),
        1 => Just(Step::Bury),
    ]
}

struct Known {
    id: u64,
    span: Span,
    access: Access,
    leases: usize,
    used: u64,
}

/// The contents that the index should have.
struct Oracle {
    limits: Limits,
    listed: Vec<Known>,
    closed: Vec<(Span, u64)>,
    uses: u64,
}

impl Oracle {
    /// The listed entry with the highest start that is not above the start of `want`.
    fn find(&self, want: Span) -> Option<usize> {
        let before = |n: &usize| self.listed[*n].span.start <= want.start;
        let best = (0..self.listed.len()).filter(before).max_by_key(|n| self.listed[*n].span.start);
        best.filter(|n| self.listed[*n].span.covers(want))
    }

    fn size(&self) -> (usize, usize) {
        (self.listed.len(), self.listed.iter().map(|k| k.span.len()).sum())
    }

    fn evict(&mut self) -> Option<usize> {
        let idle = (0..self.listed.len()).filter(|n| self.listed[*n].leases == 0);
        let oldest = idle.min_by_key(|n| self.listed[*n].used)?;
        Some(self.listed.swap_remove(oldest).span.len())
    }

    fn room(&mut self, len: usize) -> bool {
        while self.listed.len() >= self.limits.count || self.size().1 + len > self.limits.bytes {
            if self.evict().is_none() {
                return false;
            }
        }
        true
    }
}

struct Run {
    index: Index<u64>,
    oracle: Oracle,
    leases: Vec<Arc<Entry<u64>>>,
    counters: Arc<Counters>,
    now: u64,
    next: u64,
    /// Ranges that were unmapped or replaced, each with the newest registration of that time.
    gone: Vec<(Span, u64)>,
}

const TENTH_NS: u64 = crate::memory::cache::index::QUARANTINE_NS / 10;

impl Run {
    fn get(&mut self, want: Span, access: Access, disturbed: Option<Span>) {
        let expected = self.oracle.find(want);
        let hit = self.index.hit(want, access);
        if let Some(n) = expected.filter(|n| self.oracle.listed[*n].access.contains(access)) {
            let known = &mut self.oracle.listed[n];
            self.oracle.uses += 1;
            (known.leases, known.used) = (known.leases + 1, self.oracle.uses);
            let hit = hit.expect("there is one");
            assert_eq!((hit.handle, hit.span), (known.id, known.span));
            return self.leases.push(hit);
        }
        assert!(hit.is_none(), "found {:?} for {want:?}", hit.map(|hit| hit.span));
        let span = want;
        let pending = Pending::new(span);
        let fits = self.oracle.limits.count > 0 && span.len() <= self.oracle.limits.bytes;
        let now = self.now;
        let open = !self.oracle.closed.iter().any(|(c, until)| *until > now && c.overlaps(span));
        assert_eq!(self.index.announce(&pending, now), fits && open);
        if !(fits && open) {
            return;
        }
        assert!(self.index.needs(Span { start: span.end - 1, end: span.end }));
        if let Some(changed) = disturbed {
            self.change(changed, Change::Gone);
        }
        let unchanged = self.index.conclude(&pending);
        assert_eq!(unchanged, disturbed.is_none_or(|changed| !changed.overlaps(span)));
        self.next += 1;
        let account = Account::open(&self.counters, span.len());
        let entry = Entry::leased(self.next, account, span, access);
        if unchanged {
            let listed = self.index.insert(&entry);
            assert_eq!(listed, self.insert(span, access));
        }
        self.leases.push(entry);
    }

    fn insert(&mut self, span: Span, access: Access) -> bool {
        let oracle = &mut self.oracle;
        while let Some(around) = oracle.find(span) {
            if oracle.listed[around].access.contains(access) {
                return false;
            }
            oracle.listed.swap_remove(around);
        }
        oracle.listed.retain(|known| !span.covers(known.span));
        if !oracle.room(span.len()) {
            return false;
        }
        oracle.uses += 1;
        let (id, used) = (self.next, oracle.uses);
        oracle.listed.push(Known { id, span, access, leases: 1, used });
        true
    }

    fn change(&mut self, span: Span, change: Change) {
        self.index.change(span, change, self.now);
        self.oracle.listed.retain(|known| !known.span.overlaps(span));
        match change {
            Change::Discarded => self.oracle.closed.push((span, self.now + 10 * TENTH_NS)),
            Change::Gone => self.gone.push((span, self.next)),
        }
    }

    /// Deregisters dead entries. No address is unwatched that was unmapped or replaced.
    fn bury(&mut self) {
        while let Some(entry) = self.index.next_dead() {
            let gone = self.gone.iter().filter(|(_, newest)| entry.handle <= *newest);
            for rest in entry.unwatch() {
                assert!(entry.span.covers(rest));
                assert!(gone.clone().all(|(span, _)| !span.overlaps(rest)), "{rest:?}");
            }
        }
    }

    fn release(&mut self, n: usize) {
        if self.leases.is_empty() {
            return;
        }
        let entry = self.leases.swap_remove(n % self.leases.len());
        let id = entry.handle;
        match self.oracle.listed.iter_mut().find(|known| known.id == id) {
            Some(known) => {
                self.oracle.uses += 1;
                known.leases -= 1;
                if known.leases == 0 {
                    known.used = self.oracle.uses;
                }
                assert!(matches!(self.index.release(entry), Released::Held));
            }
            None => {
                let others = self.leases.iter().any(|lease| lease.handle == id);
                let released = self.index.release(entry);
                assert_eq!(matches!(released, Released::Held), others);
            }
        }
    }

    fn check(&self) {
        let spans = self.index.spans();
        for pair in spans.windows(2) {
            let (a, b) = (pair[0].0, pair[1].0);
            assert!(a.start < b.start && a.end < b.end, "{a:?} and {b:?}");
        }
        let mut wanted: Vec<_> =
            self.oracle.listed.iter().map(|known| (known.span, known.access)).collect();
        wanted.sort_by_key(|(span, _)| span.start);
        assert_eq!(spans, wanted);
        assert_eq!(self.index.size(), self.oracle.size());
        assert!(self.index.size().0 <= self.oracle.limits.count);
        assert!(self.index.size().1 <= self.oracle.limits.bytes);
        for start in 0..PLACES + 8 {
            for end in start + 1..PLACES + 8 {
                let here = Span { start, end };
                let needed = spans.iter().any(|(span, _)| span.overlaps(here));
                assert_eq!(self.index.needs(here), needed);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn the_index_is_the_oracle(
        steps in proptest::collection::vec(step(), 1..120),
        count in 0..6usize,
        bytes in 1..30usize,
    ) {
        let limits = Limits { count, bytes };
        let oracle = Oracle { limits, listed: Vec::new(), closed: Vec::new(), uses: 0 };
        let (index, counters) = (Index::new(limits), Arc::default());
        let mut run = Run { index, oracle, leases: Vec::new(), counters, now: 1, next: 0, gone: Vec::new() };
        for step in steps {
            match step {
                Step::Get { span, access, disturbed } => run.get(span, access, disturbed),
                Step::Release(n) => run.release(n),
                Step::Change(span, change) => run.change(span, change),
                Step::Evict => assert_eq!(run.index.evict(), run.oracle.evict()),
                Step::Wait(tenths) => run.now += tenths * TENTH_NS,
                Step::Bury => run.bury(),
            }
            run.check();
        }
        // With the last lease and the last entry, every registration has ended.
        while !run.leases.is_empty() {
            run.release(0);
        }
        run.index.clear();
        run.bury();
        let end = run.counters.snapshot();
        prop_assert_eq!((end.pinned, end.registrations), (0, end.deregistrations));
    }
}

#[test]
fn the_rest_of_an_entry_is_unwatched() {
    let mut index = Index::new(Limits { count: 8, bytes: 64 });
    let account = Account::open(&Arc::default(), 8);
    let entry = Entry::leased(0u64, account, Span { start: 10, end: 18 }, Access::READ);
    assert!(index.insert(&entry));
    assert!(matches!(index.release(entry), Released::Held));
    index.change(Span { start: 12, end: 13 }, Change::Gone, 1);
    index.change(Span { start: 14, end: 15 }, Change::Gone, 1); // it is dead already
    index.change(Span { start: 18, end: 20 }, Change::Gone, 1);
    let rest: Vec<_> = index.next_dead().unwrap().unwatch().collect();
    assert_eq!(rest, [Span { start: 10, end: 12 }, Span { start: 15, end: 18 }]);
}
