//! What each member of a group does in a collective operation: which part of its work buffer it sends to which member,
//! and what it does with each message that it receives. Two members exchange their messages in the same order at both
//! ends, so a message needs no further number.

use std::collections::VecDeque;
use std::ops::Range;

/// The operations. Roots are indexes of members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What {
    /// Checks that all members are there, and mean the same group.
    Join,
    Barrier,
    Broadcast {
        root: usize,
    },
    AllToAll,
    AllReduce,
    AllGather,
    ReduceScatter,
    Reduce {
        root: usize,
    },
    Scatter {
        root: usize,
    },
    Gather {
        root: usize,
    },
}

impl What {
    /// The member that has or gets the data of all.
    fn root(self) -> Option<usize> {
        match self {
            Self::Broadcast { root }
            | Self::Reduce { root }
            | Self::Scatter { root }
            | Self::Gather { root } => Some(root),
            _ => None,
        }
    }

    /// The operation's number in packets.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Join => 0,
            Self::Barrier => 1,
            Self::Broadcast { .. } => 2,
            Self::AllToAll => 3,
            Self::AllReduce => 4,
            Self::AllGather => 5,
            Self::ReduceScatter => 6,
            Self::Reduce { .. } => 7,
            Self::Scatter { .. } => 8,
            Self::Gather { .. } => 9,
        }
    }
}

/// How a received message is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum How {
    Store,
    Combine,
    /// It must be equal to what the work buffer has there.
    Compare,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Send {
        to: usize,
        part: Range<usize>,
    },
    Receive {
        from: usize,
        part: Range<usize>,
        how: How,
    },
    /// A copy within the work buffer.
    Copy {
        from: Range<usize>,
        to: usize,
    },
}

/// What one member does in an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    pub(super) steps: VecDeque<Step>,
    /// Length of the work buffer, bytes.
    pub(super) len: usize,
    /// The part of the work buffer that the application's input goes to; empty: there is no input.
    pub(super) input: Range<usize>,
    /// The part of it that the application gets in the end.
    pub(super) output: Range<usize>,
}

/// The plan of member `me` of `n`. `block` is the length of one member's block, bytes. `None`: a length would overflow,
/// or the root does not exist.
pub(super) fn plan(what: What, me: usize, n: usize, block: usize) -> Option<Plan> {
    let all = block.checked_mul(n)?;
    let mine = me.checked_mul(block)?..(me + 1).checked_mul(block)?;
    let own = 0..block;
    if what.root().is_some_and(|root| root >= n) {
        return None;
    }
    let mut b = Builder { me, n, steps: VecDeque::new() };
    let (len, input, output) = match what {
        What::Join => {
            b.barrier(&own, How::Compare);
            (block, own, 0..0)
        }
        What::Barrier => {
            b.barrier(&(0..0), How::Store);
            (0, 0..0, 0..0)
        }
        What::Broadcast { root } => {
            b.broadcast(root, &own);
            b.barrier(&(0..0), How::Store);
            (block, if me == root { own.clone() } else { 0..0 }, own)
        }
        What::AllToAll => {
            let len = all.checked_mul(2)?;
            b.all_to_all(block, all);
            (len, 0..all, all..len)
        }
        What::AllReduce => {
            b.reduce(0, &own);
            b.broadcast(0, &own);
            (block, own.clone(), own)
        }
        What::AllGather => {
            b.all_gather(block);
            (all, mine, 0..all)
        }
        What::ReduceScatter => {
            b.reduce(0, &(0..all));
            b.scatter(0, block, &mine);
            (all, 0..all, mine)
        }
        What::Reduce { root } => {
            b.reduce(root, &own);
            b.barrier(&(0..0), How::Store);
            (block, own.clone(), if me == root { own } else { 0..0 })
        }
        What::Scatter { root } => {
            b.scatter(root, block, &mine);
            b.barrier(&(0..0), How::Store);
            (all, if me == root { 0..all } else { 0..0 }, mine)
        }
        What::Gather { root } => {
            b.gather(root, block, &mine);
            b.barrier(&(0..0), How::Store);
            (all, mine, if me == root { 0..all } else { 0..0 })
        }
    };
    Some(Plan { steps: b.steps, len, input, output })
}

struct Builder {
    me: usize,
    n: usize,
    steps: VecDeque<Step>,
}

impl Builder {
    fn send(&mut self, to: usize, part: Range<usize>) {
        self.steps.push_back(Step::Send { to, part });
    }

    fn receive(&mut self, from: usize, part: Range<usize>, how: How) {
        self.steps.push_back(Step::Receive { from, part, how });
    }

    /// Dissemination: after round k each member has heard, directly or indirectly, of 2^k members.
    fn barrier(&mut self, part: &Range<usize>, how: How) {
        let mut distance = 1;
        while distance < self.n {
            self.send((self.me + distance) % self.n, part.clone());
            self.receive((self.me + self.n - distance) % self.n, part.clone(), how);
            distance *= 2;
        }
    }

    /// A binomial tree from `root`.
    fn broadcast(&mut self, root: usize, part: &Range<usize>) {
        let rank = (self.me + self.n - root) % self.n;
        let member = |rank: usize| (rank + root) % self.n;
        let mut steps = Vec::new();
        let mut mask = 1;
        while mask < self.n && rank & mask == 0 {
            mask *= 2;
        }
        if rank != 0 {
            let (from, how) = (member(rank - mask), How::Store);
            steps.push(Step::Receive { from, part: part.clone(), how });
        }
        while mask > 1 {
            mask /= 2;
            if rank + mask < self.n {
                steps.push(Step::Send { to: member(rank + mask), part: part.clone() });
            }
        }
        self.steps.extend(steps);
    }

    /// The same tree, towards `root`. The order of the operands is fixed, so that every run has the same result.
    fn reduce(&mut self, root: usize, part: &Range<usize>) {
        let rank = (self.me + self.n - root) % self.n;
        let member = |rank: usize| (rank + root) % self.n;
        let mut steps = Vec::new();
        let mut mask = 1;
        while mask < self.n {
            if rank & mask != 0 {
                steps.push(Step::Send { to: member(rank - mask), part: part.clone() });
                break;
            }
            if rank + mask < self.n {
                let (from, how) = (member(rank + mask), How::Combine);
                steps.push(Step::Receive { from, part: part.clone(), how });
            }
            mask *= 2;
        }
        self.steps.extend(steps);
    }

    fn scatter(&mut self, root: usize, block: usize, mine: &Range<usize>) {
        if self.me != root {
            self.receive(root, mine.clone(), How::Store);
            return;
        }
        for member in (0..self.n).filter(|member| *member != root) {
            self.send(member, member * block..(member + 1) * block);
        }
    }

    fn gather(&mut self, root: usize, block: usize, mine: &Range<usize>) {
        if self.me != root {
            self.send(root, mine.clone());
            return;
        }
        for member in (0..self.n).filter(|member| *member != root) {
            self.receive(member, member * block..(member + 1) * block, How::Store);
        }
    }

    /// A ring: each member passes on the block that it received last.
    fn all_gather(&mut self, block: usize) {
        let (me, n) = (self.me, self.n);
        let of = |member: usize| member * block..(member + 1) * block;
        for k in 1..n {
            self.send((me + 1) % n, of((me + n + 1 - k) % n));
            self.receive((me + n - 1) % n, of((me + n - k) % n), How::Store);
        }
    }

    /// The blocks to send are at the beginning, those that come from `all` on.
    fn all_to_all(&mut self, block: usize, all: usize) {
        let (me, n) = (self.me, self.n);
        let to = |member: usize| member * block..(member + 1) * block;
        let from = |member: usize| all + member * block..all + (member + 1) * block;
        self.steps.push_back(Step::Copy { from: to(me), to: from(me).start });
        for k in 1..n {
            let (next, previous) = ((me + k) % n, (me + n - k) % n);
            self.send(next, to(next));
            self.receive(previous, from(previous), How::Store);
        }
    }
}
