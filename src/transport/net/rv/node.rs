//! The rv module's connections to other nodes: one to each, for all peers there. They are made at first need and kept
//! until the module is closed.

use crate::sys::rv::{Connection, Failure, Module, Remedy, There};
use std::collections::{HashMap, HashSet};

/// How often to ask whether a connection that is being made is up, and whether one was made again, nanoseconds.
const CONNECTING_NS: u64 = 1_000_000;
const COUNT_NS: u64 = 100_000_000;
/// Most queue pairs of a connection.
const PAIRS_MAX: u32 = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Prepared,
    Connecting,
    Up,
    /// The module gave it up, and does not make it again.
    Dead,
}

#[derive(Debug)]
struct Node {
    connection: Connection,
    state: State,
    /// When its state was last asked for, nanoseconds.
    asked: u64,
    /// How often each of its queue pairs was connected.
    counts: Vec<u32>,
}

/// A change of a connection's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum News {
    Up,
    /// It broke, and was made again.
    Again,
    Dead(Failure),
}

/// All connections to other nodes.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    nodes: HashMap<There, Node>,
    /// Connections that are being made.
    connecting: usize,
    /// Dead connections that were not reported yet.
    dead: Vec<(There, Failure)>,
}

impl Nodes {
    /// Prepares connections with `there`. Returns the name under which the node is already known: the packet length
    /// agreed on first stays.
    pub(super) fn prepare(&mut self, module: &Module, there: &There) -> Result<There, Failure> {
        let same = |known: &&There| known.gid == there.gid && known.lid == there.lid;
        if let Some(known) = self.nodes.keys().find(same) {
            return Ok(*known);
        }
        let connection = module.create(there)?;
        let node = Node { connection, state: State::Prepared, asked: 0, counts: Vec::new() };
        self.nodes.insert(*there, node);
        Ok(*there)
    }

    /// Both nodes are prepared. True: the connection is already up.
    pub(super) fn connect(
        &mut self,
        module: &Module,
        there: &There,
        now: u64,
    ) -> Result<bool, Failure> {
        let Some(node) = self.nodes.get_mut(there) else { return Ok(false) };
        match node.state {
            State::Up => return Ok(true),
            State::Connecting => return Ok(false),
            State::Dead => {
                let up = module.is_connected(node.connection.handle)?;
                node.state = if up { State::Up } else { State::Connecting };
                self.connecting += usize::from(!up);
                return Ok(up);
            }
            State::Prepared => (),
        }
        if let Err(failure) = module.connect(node.connection.handle, there) {
            // The module has invalidated the handle.
            self.nodes.remove(there);
            return Err(failure);
        }
        node.state = State::Connecting;
        node.asked = now;
        self.connecting += 1;
        Ok(false)
    }

    /// The handle of a usable connection, for requests.
    pub(super) fn handle(&self, there: &There) -> Option<u64> {
        let node = self.nodes.get(there).filter(|node| node.state != State::Dead)?;
        Some(node.connection.handle)
    }

    /// Whether events identify it by `conn`.
    pub(super) fn is(&self, there: &There, conn: u64) -> bool {
        self.nodes.get(there).is_some_and(|node| node.connection.conn == conn)
    }

    /// It was found to be dead. `look` will report that.
    pub(super) fn bury(&mut self, there: &There, failure: Failure) {
        if let Some(node) = self.nodes.get_mut(there).filter(|node| node.state != State::Dead) {
            node.state = State::Dead;
            self.dead.push((*there, failure));
        }
    }

    pub(super) fn have_dead(&self) -> bool {
        !self.dead.is_empty()
    }

    pub(super) fn are_connecting(&self) -> bool {
        self.connecting > 0
    }

    /// Asks the module, at intervals, for the state of connections that are being made or `used`.
    pub(super) fn look(
        &mut self,
        module: &Module,
        used: &HashSet<There>,
        now: u64,
    ) -> Vec<(There, News)> {
        let dead = std::mem::take(&mut self.dead);
        let mut all: Vec<_> =
            dead.into_iter().map(|(there, failure)| (there, News::Dead(failure))).collect();
        for (there, node) in &mut self.nodes {
            let silent = now.saturating_sub(node.asked);
            let due = match node.state {
                State::Connecting => silent >= CONNECTING_NS,
                State::Up => silent >= COUNT_NS && used.contains(there),
                State::Prepared | State::Dead => false,
            };
            if !due {
                continue;
            }
            node.asked = now;
            match node.news(module) {
                Ok(Some(news)) => all.push((*there, news)),
                Ok(None) => (),
                Err(failure) if failure.remedy() == Remedy::Later => (),
                Err(failure) => {
                    node.state = State::Dead;
                    all.push((*there, News::Dead(failure)));
                }
            }
        }
        self.connecting =
            self.nodes.values().filter(|node| node.state == State::Connecting).count();
        all
    }

    /// The module's statistics, summed over all connections, as text.
    pub(super) fn statistics(&self, module: &Module) -> String {
        let sum =
            self.nodes.values().filter_map(|node| module.statistics(node.connection.handle).ok());
        let (mut queue_pairs, mut written, mut filled, mut recoveries) = (0, 0, 0, 0);
        let mut longest_us = 0;
        for one in sum {
            queue_pairs += one.queue_pairs;
            written += one.posted_bytes;
            filled += one.filled_bytes;
            recoveries += one.recoveries;
            longest_us = one.recovery_times.iter().skip(3).fold(longest_us, |a, b| a.max(*b));
        }
        format!(
            "{queue_pairs} queue pairs to {} nodes, made again {recoveries} times (longest step {} ms); all processes together wrote {written} bytes and were written {filled}",
            self.nodes.len(),
            longest_us / 1000
        )
    }
}

impl Node {
    fn news(&mut self, module: &Module) -> Result<Option<News>, Failure> {
        let handle = self.connection.handle;
        if self.state == State::Connecting {
            if !module.is_connected(handle)? {
                return Ok(None);
            }
            self.state = State::Up;
            self.counts = counts(module, handle)?;
            return Ok(Some(News::Up));
        }
        let counts = counts(module, handle)?;
        let again = counts != self.counts;
        self.counts = counts;
        Ok(again.then_some(News::Again))
    }
}

/// How often each queue pair was connected. Asks only for existing ones: the module logs each request for another.
fn counts(module: &Module, handle: u64) -> Result<Vec<u32>, Failure> {
    let pairs = module.statistics(handle)?.queue_pairs.min(PAIRS_MAX);
    (0..pairs).map(|index| module.conn_count(handle, index as u8)).collect()
}
