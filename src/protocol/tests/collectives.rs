//! Groups of 1 to 16 members in any order, over a network that delays and refuses. Each operation is checked against
//! its definition, and members leave at any moment. A failure prints its seed.

use super::fixture::{LIMITS, Memory, Report, World, lend, receive_op, send_op};
use super::rng::Rng;
use super::sim::Weather;
use crate::memory::SegmentList;
use crate::memory::atomic::Operation;
use crate::protocol::{Collective, CollectiveOp, Direction, Limits, OpError};
use crate::sys::Errno;
use crate::sys::reserve::tests::without_memory;
use crate::transport::{Departure, PeerId};

const SUM_U32: (u32, u32) = (2, 5);
const ELEMENT: usize = 4;

/// A group in which member i is the endpoint at `slots[i]`, and the id that each of them has for it.
struct Group {
    slots: Vec<usize>,
    ids: Vec<u64>,
}

fn shuffled(rng: &mut Rng, n: usize) -> Vec<usize> {
    let mut slots: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        slots.swap(i, rng.below(i + 1));
    }
    slots
}

impl Group {
    /// All members join; this does not wait for the end of that. `orders`: what each member takes for the common order.
    fn join(world: &mut World, slots: Vec<usize>, orders: &dyn Fn(usize) -> u64) -> Self {
        let ids = (0..slots.len())
            .map(|me| {
                let at = slots[me];
                let peers: Vec<PeerId> = slots.iter().map(|to| world.peer(at, *to)).collect();
                let node = world.node(at);
                node.engine.join(&peers, me, 77, orders(me), false, &mut node.host).unwrap()
            })
            .collect();
        Self { slots, ids }
    }

    fn start(
        &self,
        world: &mut World,
        me: usize,
        what: Collective,
        block: usize,
        (input, output): (SegmentList, SegmentList),
    ) -> Result<(), OpError> {
        let node = world.node(self.slots[me]);
        let reduction = Operation::of_reduction(SUM_U32.0, SUM_U32.1);
        let (group, context) = (self.ids[me], me as u64);
        let op = CollectiveOp {
            group,
            what,
            block,
            reduction,
            input,
            output,
            context,
            report: crate::protocol::Report::new(true, 0),
        };
        node.engine.collective(&op, &mut node.host)
    }
}

fn random_operation(rng: &mut Rng, n: usize) -> Collective {
    let root = rng.below(n);
    rng.pick(&[
        Collective::Barrier,
        Collective::Broadcast { root },
        Collective::AllToAll,
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Reduce { root },
        Collective::Scatter { root },
        Collective::Gather { root },
    ])
}

fn sum(parts: &[&[u8]]) -> Vec<u8> {
    let number = |part: &[u8], i: usize| {
        u32::from_ne_bytes(part[i * ELEMENT..(i + 1) * ELEMENT].try_into().unwrap())
    };
    (0..parts[0].len() / ELEMENT)
        .flat_map(|i| {
            parts.iter().fold(0u32, |sum, p| sum.wrapping_add(number(p, i))).to_ne_bytes()
        })
        .collect()
}

/// The result that member `me` has to get, by the definition of the operation.
fn wanted(what: Collective, me: usize, block: usize, inputs: &[Vec<u8>]) -> Vec<u8> {
    let all: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let mine = me * block..(me + 1) * block;
    match what {
        Collective::Join | Collective::Barrier => Vec::new(),
        Collective::Broadcast { root } => inputs[root].clone(),
        Collective::AllToAll => all.iter().flat_map(|from| from[mine.clone()].to_vec()).collect(),
        Collective::AllReduce => sum(&all),
        Collective::AllGather => all.concat(),
        Collective::ReduceScatter => sum(&all)[mine].to_vec(),
        Collective::Reduce { root } if root == me => sum(&all),
        Collective::Scatter { root } => inputs[root][mine].to_vec(),
        Collective::Gather { root } if root == me => all.concat(),
        Collective::Reduce { .. } | Collective::Gather { .. } => Vec::new(),
    }
}

/// One operation of a group: the buffers of its members, and its outcome.
struct Running {
    what: Collective,
    block: usize,
    inputs: Vec<Vec<u8>>,
    lent: Vec<(Memory, Memory)>,
}

impl Running {
    fn begin(world: &mut World, group: &Group, rng: &mut Rng, what: Collective) -> Self {
        let n = group.slots.len();
        let block = ELEMENT * rng.pick(&[0, 1, 3, 64, 700]);
        let mut running = Self { what, block, inputs: Vec::new(), lent: Vec::new() };
        for me in 0..n {
            let node = world.node(group.slots[me]);
            let (needs, gives) = node.engine.collective_needs(group.ids[me], what, block).unwrap();
            let input = Memory::pattern(rng.below(1000), needs);
            running.inputs.push(input.0.clone());
            running.lent.push((input, Memory::zeroed(gives)));
        }
        for me in 0..n {
            // Members begin at any time.
            for _ in 0..rng.below(3) {
                world.progress(group.slots[rng.below(n)]);
            }
            let (input, output) = &mut running.lent[me];
            let lists = (input.list(), output.list());
            group.start(world, me, what, block, lists).unwrap();
        }
        running
    }

    fn check(&self, me: usize) {
        let found = &self.lent[me].1.0;
        assert!(
            *found == wanted(self.what, me, self.block, &self.inputs),
            "{:?} of {} members, {} bytes each: member {me} got something else",
            self.what,
            self.inputs.len(),
            self.block
        );
    }
}

fn reports(world: &mut World, group: &Group, me: usize) -> Vec<Report> {
    world.reports(group.slots[me], Direction::Collective)
}

fn world(n: usize) -> World {
    let limits = Limits { bulk_chunk: 512, ..LIMITS };
    World::new(n, Weather::fair(), limits)
}

fn joined(world: &mut World, group: &Group) {
    world.settle();
    for (at, id) in group.slots.iter().zip(&group.ids) {
        assert_eq!(std::mem::take(&mut world.node(*at).host.joined), [(*id, Ok(()))]);
    }
}

/// Runs `body` with each of many seeds, and prints the seed that failed.
fn with_seeds(body: impl Fn(&mut Rng) + std::panic::RefUnwindSafe) {
    for seed in 1..=80u64 {
        let run = std::panic::catch_unwind(|| body(&mut Rng::new(seed)));
        if let Err(panic) = run {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn every_operation_does_what_it_is_defined_to() {
    with_seeds(|rng| {
        let n = 1 + rng.below(16);
        let mut world = world(n);
        let slots = shuffled(rng, n);
        let group = Group::join(&mut world, slots, &|_| 5);
        joined(&mut world, &group);
        for _ in 0..4 {
            let what = random_operation(rng, n);
            let running = Running::begin(&mut world, &group, rng, what);
            world.settle();
            for me in 0..n {
                let found = reports(&mut world, &group, me);
                assert!(matches!(found[..], [Ok(c)] if c.context == me as u64), "{found:?}");
                running.check(me);
            }
        }
        world.assert_empty();
    });
}

#[test]
fn nobody_ends_before_all_have_begun() {
    with_seeds(|rng| {
        let n = 2 + rng.below(8);
        let mut world = world(n);
        let slots = shuffled(rng, n);
        let group = Group::join(&mut world, slots, &|_| 5);
        joined(&mut world, &group);
        let what = random_operation(rng, n);
        let late = rng.below(n);
        let empty = (SegmentList::EMPTY, SegmentList::EMPTY);
        for me in (0..n).filter(|me| *me != late) {
            group.start(&mut world, me, what, 0, empty).unwrap();
        }
        world.settle();
        for me in 0..n {
            assert_eq!(reports(&mut world, &group, me), []);
        }
        group.start(&mut world, late, what, 0, empty).unwrap();
        world.settle();
        for me in 0..n {
            assert_eq!(reports(&mut world, &group, me).len(), 1);
        }
        world.assert_empty();
    });
}

#[test]
fn operations_of_overlapping_groups_follow_their_own_order() {
    with_seeds(|rng| {
        let n = 2 + rng.below(6);
        let mut world = world(n);
        let groups = [
            Group::join(&mut world, shuffled(rng, n), &|_| 5),
            Group::join(&mut world, shuffled(rng, n), &|_| 5),
        ];
        world.settle();
        let mut running = Vec::new();
        for _ in 0..6 {
            let group = &groups[rng.below(2)];
            let what = random_operation(rng, n);
            running.push((group, Running::begin(&mut world, group, rng, what)));
        }
        world.settle();
        for at in 0..n {
            assert_eq!(world.reports(at, Direction::Collective).len(), 6);
        }
        for (group, running) in running {
            (0..group.slots.len()).for_each(|me| running.check(me));
        }
        world.assert_empty();
    });
}

#[test]
fn a_lost_member_ends_what_needs_it_at_all_others() {
    with_seeds(|rng| {
        let n = 2 + rng.below(15);
        let mut world = world(n);
        let slots = shuffled(rng, n);
        let group = Group::join(&mut world, slots, &|_| 5);
        // Some members begin before they know that all have joined.
        if rng.percent(80) {
            joined(&mut world, &group);
        }
        let lost = rng.below(n);
        let what = random_operation(rng, n);
        let running = Running::begin(&mut world, &group, rng, what);
        for _ in 0..rng.below(40) {
            world.progress(group.slots[rng.below(n)]);
        }
        let departure = rng.pick(&[Departure::Closed, Departure::Failed(Errno(libc::EHOSTDOWN))]);
        world.leave(group.slots[lost], departure);
        world.settle();
        for me in (0..n).filter(|me| *me != lost) {
            match reports(&mut world, &group, me)[..] {
                [Ok(_)] => running.check(me),
                [Err(failure)] => assert!(
                    [libc::ECONNRESET, libc::EHOSTUNREACH, libc::EPIPE].contains(&failure.error),
                    "{failure:?}"
                ),
                ref other => panic!("{what:?}: {other:?}"),
            }
        }
        // The next operation cannot succeed, and ends too.
        let mut refused = 0;
        let empty = (SegmentList::EMPTY, SegmentList::EMPTY);
        for me in (0..n).filter(|me| *me != lost) {
            let next = group.start(&mut world, me, Collective::AllReduce, 0, empty);
            refused += usize::from(next.is_err());
        }
        world.settle();
        let mut failed = 0;
        for me in (0..n).filter(|me| *me != lost) {
            failed += reports(&mut world, &group, me).iter().filter(|r| r.is_err()).count();
        }
        assert_eq!(refused + failed, n - 1);
    });
}

#[test]
fn a_member_of_before_collective_operations_ends_the_join_of_all_others() {
    with_seeds(|rng| {
        let n = 2 + rng.below(15);
        let mut world = world(n);
        let old = rng.below(n);
        // Its version is announced at once, or some time after its first messages.
        let said = rng.pick(&[None, Some(false)]);
        world.net.borrow_mut().weather.lonely = vec![(old, said)];
        let slots: Vec<usize> = shuffled(rng, n);
        let me = |at: usize| slots.iter().position(|slot| *slot == at).unwrap();
        let peers = |world: &mut World, at: usize| -> Vec<PeerId> {
            slots.iter().map(|to| world.peer(at, *to)).collect()
        };
        for at in (0..n).filter(|at| *at != old) {
            let peers = peers(&mut world, at);
            let node = world.node(at);
            node.engine.join(&peers, me(at), 77, 5, false, &mut node.host).unwrap();
        }
        if said.is_none() {
            for _ in 0..100 {
                (0..n).for_each(|at| world.progress(at));
            }
            for at in (0..n).filter(|at| *at != old) {
                assert_eq!(world.node(at).host.joined, []);
            }
            assert!((0..n).any(|at| world.node(at).engine.is_busy()), "nobody would wake it");
            world.net.borrow_mut().weather.lonely = vec![(old, Some(false))];
        }
        world.settle();
        for at in (0..n).filter(|at| *at != old) {
            let joined = std::mem::take(&mut world.node(at).host.joined);
            assert_eq!(joined, [(0, Err(libc::EOPNOTSUPP))]);
            let node = world.node(at);
            assert!(!node.engine.is_busy());
        }
        // Other messages to and from it work.
        let (mut out, mut inbox) = (Memory::pattern(1, 100), Memory::zeroed(100));
        let (from, to) = ((old + 1) % n, world.peer((old + 1) % n, old));
        world.receive(old, &receive_op(&mut inbox, 1)).unwrap();
        world.send(from, &send_op(to, &mut out, 2)).unwrap();
        world.settle();
        assert_eq!(inbox.0, out.0);
    });
}

#[test]
fn members_that_disagree_fail() {
    let mut world = world(3);
    let group = Group::join(&mut world, vec![0, 1, 2], &|me| if me == 2 { 6 } else { 5 });
    world.settle();
    for (at, id) in group.slots.iter().zip(&group.ids) {
        let joined = std::mem::take(&mut world.node(*at).host.joined);
        assert!(matches!(joined[..], [(known, Err(_))] if known == *id), "{joined:?}");
    }
    let group = Group::join(&mut world, vec![0, 1, 2], &|_| 5);
    joined(&mut world, &group);
    let empty = (SegmentList::EMPTY, SegmentList::EMPTY);
    for (me, what) in
        [Collective::Barrier, Collective::AllGather, Collective::Barrier].into_iter().enumerate()
    {
        group.start(&mut world, me, what, 0, empty).unwrap();
    }
    world.settle();
    for me in 0..3 {
        let found = reports(&mut world, &group, me);
        assert!(matches!(found[..], [Err(f)] if f.error == libc::EINVAL), "{found:?}");
    }
    assert_eq!(
        group.start(&mut world, 0, Collective::Barrier, 0, empty),
        Err(OpError::Error(libc::EINVAL))
    );
}

#[test]
fn an_operation_that_finds_no_memory_fails_at_all_members() {
    const BLOCK: usize = 20_000;
    let mut world = world(2);
    let group = Group::join(&mut world, vec![0, 1], &|_| 5);
    joined(&mut world, &group);
    let (mut input, mut output) = (vec![1u8; BLOCK], vec![0u8; 2 * BLOCK]);
    let lists = (lend(&mut input, &[]), lend(&mut output, &[]));
    let refused =
        without_memory(BLOCK, || group.start(&mut world, 0, Collective::AllGather, BLOCK, lists));
    assert_eq!(refused, Err(OpError::Error(libc::ENOMEM)));
    for me in 0..2 {
        group.start(&mut world, me, Collective::AllGather, BLOCK, lists).unwrap();
    }
    without_memory(BLOCK / 2, || world.settle());
    for me in 0..2 {
        let found = reports(&mut world, &group, me);
        assert!(matches!(found[..], [Err(f)] if f.error == libc::ENOMEM), "{found:?}");
    }
}

/// Three members gather blocks of which two are more than a member keeps of operations that it has not begun.
fn gather_of_long_blocks(begins_first: bool) -> (World, Group) {
    const BLOCK: usize = 700_000;
    let mut world = world(3);
    let group = Group::join(&mut world, vec![0, 1, 2], &|_| 5);
    joined(&mut world, &group);
    let (mut input, mut output) = (vec![1u8; BLOCK], vec![0u8; 3 * BLOCK]);
    let lists = (lend(&mut input, &[]), lend(&mut output, &[]));
    let order = if begins_first { [0, 1, 2] } else { [1, 2, 0] };
    for me in order {
        group.start(&mut world, me, Collective::Gather { root: 0 }, BLOCK, lists).unwrap();
        world.settle();
    }
    assert_eq!(output.iter().all(|byte| *byte == 1), begins_first);
    (world, group)
}

#[test]
fn an_operation_whose_messages_are_more_than_is_kept_fails_at_all_members() {
    let (mut world, group) = gather_of_long_blocks(false);
    let found = reports(&mut world, &group, 0);
    assert!(matches!(found[..], [Err(f)] if f.error == libc::ENOMEM), "{found:?}");
    let empty = (SegmentList::EMPTY, SegmentList::EMPTY);
    for me in 1..3 {
        // A gather may end at the other members before.
        reports(&mut world, &group, me);
        let again = group.start(&mut world, me, Collective::Barrier, 0, empty);
        world.settle();
        let found = reports(&mut world, &group, me);
        assert!(again.is_err() || matches!(found[..], [Err(_)]), "{me}: {again:?} {found:?}");
    }
    world.assert_empty();
}

#[test]
fn messages_of_an_operation_that_has_begun_are_not_bounded() {
    let (mut world, group) = gather_of_long_blocks(true);
    for me in 0..3 {
        let found = reports(&mut world, &group, me);
        assert!(matches!(found[..], [Ok(_)]), "{me}: {found:?}");
    }
    world.assert_empty();
}

#[test]
fn leaving_a_group_ends_its_operations() {
    let mut world = world(2);
    let group = Group::join(&mut world, vec![0, 1], &|_| 5);
    joined(&mut world, &group);
    let empty = (SegmentList::EMPTY, SegmentList::EMPTY);
    group.start(&mut world, 0, Collective::Barrier, 0, empty).unwrap();
    let node = world.node(0);
    node.engine.leave_group(group.ids[0], &mut node.host);
    let found = reports(&mut world, &group, 0);
    assert!(matches!(found[..], [Err(f)] if f.error == libc::ECANCELED), "{found:?}");
    group.start(&mut world, 1, Collective::Barrier, 0, empty).unwrap();
    world.settle();
    assert!(reports(&mut world, &group, 1)[0].is_err());
    let node = world.node(1);
    node.engine.leave_group(group.ids[1], &mut node.host);
    // The same members form a group again.
    let group = Group::join(&mut world, vec![0, 1], &|_| 5);
    joined(&mut world, &group);
    world.assert_empty();
}

/// A member's message may be on its way when another one leaves the group, because it has failed there.
#[test]
fn messages_of_a_group_that_was_left_are_not_kept() {
    const BLOCK: usize = 1000;
    let mut world = world(2);
    for _ in 0..3 {
        let group = Group::join(&mut world, vec![0, 1], &|_| 5);
        joined(&mut world, &group);
        let mut input = vec![1u8; BLOCK];
        let lists = (lend(&mut input, &[]), SegmentList::EMPTY);
        group.start(&mut world, 1, Collective::Gather { root: 0 }, BLOCK, lists).unwrap();
        let node = world.node(0);
        node.engine.leave_group(group.ids[0], &mut node.host);
        world.settle();
        world.node(0).assert_empty();
        let node = world.node(1);
        node.engine.leave_group(group.ids[1], &mut node.host);
        let found = reports(&mut world, &group, 1);
        assert!(matches!(found[..], [Err(f)] if f.error == libc::ECANCELED), "{found:?}");
    }
    world.settle();
    world.assert_empty();
}

/// The groups that two endpoints have joined, or are joining.
#[derive(Default)]
struct Tries([Option<u64>; 2]);

impl Tries {
    /// Each of `who` that is in no group begins to join; those of all whose join fails leave it.
    fn again(&mut self, world: &mut World, who: &[usize]) {
        for at in who.iter().copied().filter(|at| self.0[*at].is_none()).collect::<Vec<_>>() {
            let peers = [world.peer(at, 0), world.peer(at, 1)];
            let node = world.node(at);
            let id = node.engine.join(&peers, at, 77, 5, false, &mut node.host).unwrap();
            self.0[at] = Some(id);
        }
        world.settle();
        for (at, group) in self.0.iter_mut().enumerate() {
            for (id, outcome) in std::mem::take(&mut world.node(at).host.joined) {
                assert!([Ok(()), Err(libc::ESTALE)].contains(&outcome), "{outcome:?}");
                if outcome.is_err() {
                    leave(world, at, id);
                    *group = None;
                }
            }
        }
    }
}

fn leave(world: &mut World, at: usize, group: u64) {
    let node = world.node(at);
    node.engine.leave_group(group, &mut node.host);
}

/// The members of a pair, of which one is replaced, know different numbers of their groups.
#[test]
fn a_member_that_starts_again_joins_after_as_many_tries_as_it_has_missed() {
    let empty = (SegmentList::EMPTY, SegmentList::EMPTY);
    for closed_first in [true, false] {
        let mut world = world(2);
        for _ in 0..2 {
            let group = Group::join(&mut world, vec![0, 1], &|_| 5);
            joined(&mut world, &group);
            (0..2).for_each(|me| leave(&mut world, me, group.ids[me]));
        }
        let group = Group::join(&mut world, vec![0, 1], &|_| 5);
        joined(&mut world, &group);
        world.leave(1, Departure::Failed(Errno(libc::EHOSTDOWN)));
        let ended = group.start(&mut world, 0, Collective::Barrier, 0, empty);
        world.settle();
        assert!(ended.is_err() || reports(&mut world, &group, 0)[0].is_err());
        world.start(1);
        let mut tries = Tries::default();
        if closed_first {
            leave(&mut world, 0, group.ids[0]);
            (0..4).for_each(|_| tries.again(&mut world, &[0, 1]));
        } else {
            (0..4).for_each(|_| tries.again(&mut world, &[1]));
            leave(&mut world, 0, group.ids[0]);
            tries.again(&mut world, &[0]);
        }
        let group = Group { slots: vec![0, 1], ids: tries.0.map(|id| id.unwrap()).to_vec() };
        for me in 0..2 {
            group.start(&mut world, me, Collective::Barrier, 0, empty).unwrap();
        }
        world.settle();
        for me in 0..2 {
            assert!(matches!(reports(&mut world, &group, me)[..], [Ok(_)]));
        }
    }
}
