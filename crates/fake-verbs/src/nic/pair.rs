//! A queue pair: its attributes, and its requests.

use super::queue::Receives;
use super::regions::Segment;
use super::responder::Responder;
use crate::wire::Route;
use rdma_core_sys::{
    IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, ibv_qp_state,
};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Ud,
    Rc,
}

/// What a queue pair was made for; its limits are what the driver gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made {
    pub(crate) kind: Kind,
    pub(crate) context: u32,
    pub(crate) domain: u32,
    pub(crate) send_queue: u32,
    pub(crate) receive_queue: u32,
    pub(crate) shared: Option<u32>,
    pub(crate) sends: u32,
    pub(crate) receives: u32,
    pub(crate) segments: u32,
    pub(crate) inline: u32,
    pub(crate) all_signaled: bool,
}

/// What a program sets with `ibv_modify_qp`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attributes {
    pub(crate) port: u8,
    pub(crate) pkey_index: u16,
    pub(crate) qkey: u32,
    pub(crate) access: u32,
    pub(crate) mtu: usize,
    pub(crate) receive_psn: u32,
    pub(crate) send_psn: u32,
    /// Reads at a time: ours, and the peer's.
    pub(crate) reads: u8,
    pub(crate) serves: u8,
    /// An exponent, and a number.
    pub(crate) timeout: u8,
    pub(crate) retries: u8,
    pub(crate) rnr_retries: u8,
    /// To the peer of a connection.
    pub(crate) route: Route,
}

impl Attributes {
    /// Whether a driver takes them whose device has so many `reads` at a time and whose port carries `mtu` bytes: as
    /// rxe_qp_chk_attr of the kernel's rdma_rxe checks.
    pub(super) fn fit(&self, reads: u8, mtu: u16) -> bool {
        self.reads <= reads
            && self.serves <= reads
            && self.mtu <= mtu.into()
            && self.timeout <= 31
            && self.retries <= 7
            && self.rnr_retries <= 7
    }
}

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    Datagram { handle: u32, pair: u32, qkey: u32 },
    Write { addr: u64, rkey: u32, immediate: Option<u32> },
    Read { addr: u64, rkey: u32 },
}

/// A request to send.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Send {
    pub(crate) id: u64,
    pub(crate) operation: Operation,
    pub(crate) segments: Vec<Segment>,
    /// The data, if the program gave it with the call.
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) signaled: bool,
    pub(crate) fence: bool,
}

impl Send {
    pub(super) fn reads(&self) -> bool {
        matches!(self.operation, Operation::Read { .. })
    }
}

/// A posted request.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) send: Send,
    pub(super) number: u64,
    /// The checksum of its memory when it was posted.
    pub(super) sum: u64,
    pub(super) done: bool,
}

/// The requests of a queue pair that are not complete.
#[derive(Debug, Default)]
pub(super) struct Sends {
    pub(super) posted: u64,
    /// All below this number have left the queue.
    pub(super) retired: u64,
    pub(super) list: VecDeque<Queued>,
    /// So many of the list are under way.
    pub(super) sent: usize,
    /// Sent again after this, and how often that was done.
    pub(super) deadline: Option<Instant>,
    pub(super) tries: u8,
    /// The peer had no receive: not before this.
    pub(super) not_before: Option<Instant>,
}

impl Sends {
    /// Reads that are sent and not complete.
    pub(super) fn reads_under_way(&self) -> usize {
        let sent = self.list.iter().take(self.sent);
        sent.filter(|queued| queued.send.reads() && !queued.done).count()
    }

    /// Of a request in the list.
    pub(super) fn position(&self, number: u64) -> Option<usize> {
        let first = self.list.front()?.number;
        let at = usize::try_from(number.checked_sub(first)?).ok()?;
        (at < self.list.len()).then_some(at)
    }
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Pair {
    /// The program's object.
    pub(super) object: u64,
    pub(super) number: u32,
    pub(super) made: Made,
    pub(super) attributes: Attributes,
    pub(super) state: ibv_qp_state,
    pub(super) sends: Sends,
    pub(super) receives: Receives,
    pub(super) responder: Responder,
    /// Its events that the program has taken and not acknowledged.
    pub(super) events_taken: u32,
    /// Requests between the start and the end of a call of its own operations.
    pub(super) building: Vec<Send>,
}

impl Pair {
    pub(super) fn is_ready_to_send(&self) -> bool {
        self.state == IBV_QPS_RTS
    }

    pub(super) fn is_ready_to_receive(&self) -> bool {
        matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS)
    }

    /// How long an answer may take.
    pub(super) fn patience(&self) -> Duration {
        // 4.096 µs · 2^timeout; 0 is for ever (InfiniBand 1.7, 9.7.6.1.3).
        match self.attributes.timeout {
            0 => Duration::from_secs(3600),
            code => Duration::from_nanos(4096 << code.min(31)),
        }
    }
}

/// Whether a queue pair may go from one state to another (InfiniBand 1.7, 10.3.1).
pub(super) fn may_go(from: ibv_qp_state, to: ibv_qp_state) -> bool {
    match to {
        IBV_QPS_RESET | IBV_QPS_ERR => true,
        IBV_QPS_INIT => matches!(from, IBV_QPS_RESET | IBV_QPS_INIT),
        IBV_QPS_RTR => from == IBV_QPS_INIT,
        IBV_QPS_RTS => matches!(from, IBV_QPS_RTR | IBV_QPS_RTS),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_follow_each_other() {
        assert!(may_go(IBV_QPS_RESET, IBV_QPS_INIT) && may_go(IBV_QPS_INIT, IBV_QPS_RTR));
        assert!(may_go(IBV_QPS_RTR, IBV_QPS_RTS) && may_go(IBV_QPS_RTS, IBV_QPS_ERR));
        assert!(!may_go(IBV_QPS_RESET, IBV_QPS_RTR) && !may_go(IBV_QPS_ERR, IBV_QPS_RTS));
        assert!(!may_go(IBV_QPS_INIT, IBV_QPS_RTS));
    }
}
