//! The receiving half of a connection (RC). Requests are executed in order of their numbers; the pieces of writes are
//! placed as the weather wants, also those of later writes before those of earlier ones. A read waits for all earlier
//! writes. Completions and answers come in order, when everything before them is placed.

use super::Nic;
use super::pair::Pair;
use super::queue::{Entry, Of, Receive};
use super::regions::{Access, Segment, fetch, place};
use crate::counters::{Counter, count};
use crate::verify::violation;
use crate::weather::Scatter;
use crate::wire::{Body, Frame, Request, Route, Verdict};
use rdma_core_sys::{
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_EVENT_QP_REQ_ERR,
    IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_SUCCESS,
};
use std::collections::VecDeque;

/// Requests whose pieces are placed at the same time.
const MIXED: usize = 4;
/// The longest part of an answer, bytes.
const PART: usize = 256 << 10;

/// A piece of a write that is not placed yet.
#[derive(Debug)]
struct Piece {
    segment: Segment,
    bytes: Vec<u8>,
}

#[derive(Debug)]
enum Work {
    Write { pieces: Vec<Piece>, immediate: Option<u32>, whole: bool, len: u32 },
    Read { segment: Segment },
}

/// A request that is not executed yet.
#[derive(Debug)]
struct Arrived {
    number: u64,
    work: Work,
}

#[derive(Debug, Default)]
pub(super) struct Responder {
    /// The number of the next request, and of the oldest that is not executed.
    next: u64,
    list: VecDeque<Arrived>,
}

impl Responder {
    pub(super) fn is_busy(&self) -> bool {
        !self.list.is_empty()
    }

    /// All below this number are executed.
    fn executed(&self) -> u64 {
        self.next - self.list.len() as u64
    }
}

impl Nic {
    /// A request of the peer has arrived.
    pub(super) fn on_request(&mut self, pair: &mut Pair, route: &Route, body: Body) {
        let request = match &body {
            Body::Write { request, .. } | Body::Read { request, .. } => *request,
            _ => return,
        };
        let Request { number, psn } = request;
        let peer = pair.attributes.route.to == route.from;
        if !pair.is_ready_to_receive() || !peer || psn != pair.attributes.receive_psn {
            return count(Counter::Unrouted);
        }
        if number < pair.responder.executed() {
            return self.repeat(pair, number, body);
        }
        match body {
            Body::Write { addr, rkey, immediate, first, last, bytes, .. } => {
                let segment = Segment { addr, len: bytes.len() as u32, key: rkey };
                self.on_write(pair, (number, first, last), segment, immediate, &bytes);
            }
            Body::Read { under_way, .. } if under_way > pair.attributes.serves => {
                // As rdma_rxe does (RESPST_ERR_TOO_MANY_RDMA_ATM_REQ).
                self.answer(pair, number, Verdict::Invalid);
                self.raise_of(pair, IBV_EVENT_QP_REQ_ERR);
                return self.break_pair(pair);
            }
            Body::Read { addr, rkey, len, .. } if number == pair.responder.next => {
                let segment = Segment { addr, len, key: rkey };
                pair.responder.list.push_back(Arrived { number, work: Work::Read { segment } });
                pair.responder.next += 1;
            }
            _ => {}
        }
        self.busy.insert(pair.number);
        self.place_pieces(pair);
    }

    /// A request that was executed is acknowledged again; a read is read again.
    fn repeat(&mut self, pair: &mut Pair, number: u64, body: Body) {
        match body {
            Body::Write { last: true, .. } => self.answer(pair, number, Verdict::Done),
            Body::Read { addr, rkey, len, .. } => {
                self.read_out(pair, number, Segment { addr, len, key: rkey });
            }
            _ => {}
        }
    }

    fn on_write(
        &mut self,
        pair: &mut Pair,
        (number, first, last): (u64, bool, bool),
        segment: Segment,
        immediate: Option<u32>,
        bytes: &[u8],
    ) {
        let responder = &mut pair.responder;
        if first && number == responder.next {
            let work = Work::Write { pieces: Vec::new(), immediate, whole: false, len: 0 };
            responder.list.push_back(Arrived { number, work });
            responder.next += 1;
        }
        let newest = responder.list.back_mut().filter(|arrived| arrived.number == number);
        let Some(Arrived { work: Work::Write { pieces, whole, len, .. }, .. }) = newest else {
            return;
        };
        if *whole {
            return;
        }
        let size = match self.weather.scatter {
            None => usize::MAX,
            Some(Scatter::Packets) => pair.attributes.mtu.max(256),
            Some(Scatter::Bus) => 256,
        };
        for (at, part) in bytes.chunks(size.min(bytes.len().max(1))).enumerate() {
            let addr = segment.addr + (at * size.min(bytes.len())) as u64;
            let segment = Segment { addr, len: part.len() as u32, key: segment.key };
            pieces.push(Piece { segment, bytes: part.to_vec() });
        }
        *len += segment.len;
        *whole = last;
    }

    /// Places pieces, and executes the requests that are complete.
    pub(super) fn place_pieces(&mut self, pair: &mut Pair) {
        match self.weather.scatter {
            None => self.place_in_order(pair),
            Some(_) => self.place_some(pair),
        }
        while pair.is_ready_to_receive() && self.execute_oldest(pair) {
            if self.weather.scatter.is_none() {
                self.place_in_order(pair);
            }
        }
    }

    fn place_in_order(&mut self, pair: &mut Pair) {
        let Some(Arrived { work: Work::Write { pieces, .. }, .. }) =
            pair.responder.list.front_mut()
        else {
            return;
        };
        for piece in std::mem::take(pieces) {
            self.place_one(pair, &piece);
        }
    }

    /// Places a few pieces of the first writes.
    fn place_some(&mut self, pair: &mut Pair) {
        for _ in 0..1 + self.random.below(64) {
            let writes =
                pair.responder.list.iter_mut().map_while(|arrived| match &mut arrived.work {
                    Work::Write { pieces, .. } => Some(pieces),
                    Work::Read { .. } => None,
                });
            let mut open: Vec<_> = writes.take(MIXED).filter(|pieces| !pieces.is_empty()).collect();
            let which = self.random.below(open.len() as u64) as usize;
            let Some(pieces) = open.get_mut(which) else { return };
            let piece = pieces.swap_remove(self.random.below(pieces.len() as u64) as usize);
            count(Counter::Pieces);
            self.place_one(pair, &piece);
        }
    }

    fn place_one(&mut self, pair: &Pair, piece: &Piece) {
        if !piece.bytes.is_empty() {
            self.demand_remote(pair, piece.segment, Access::RemoteWrite, IBV_ACCESS_REMOTE_WRITE);
            self.regions.note_written(piece.segment);
            place(piece.segment, &piece.bytes);
        }
    }

    /// Demands that the key and the queue pair allow it.
    fn demand_remote(&self, pair: &Pair, segment: Segment, access: Access, flag: u32) {
        let key = self.regions.refusal(pair.made.domain, segment, access);
        let why = match key {
            Some(why) => why,
            None if pair.attributes.access & flag != 0 => return,
            None => format!("the queue pair does not allow {access:?}"),
        };
        violation(&format!("a peer's request of queue pair {:#x}: {why}", pair.number));
    }

    /// Executes the oldest request, if it is complete. False: it is not, or there is no receive.
    fn execute_oldest(&mut self, pair: &mut Pair) -> bool {
        let (number, immediate, len) = match pair.responder.list.front() {
            Some(Arrived { number, work: Work::Read { segment } }) => {
                let (number, segment) = (*number, *segment);
                pair.responder.list.pop_front();
                self.read_out(pair, number, segment);
                return true;
            }
            Some(Arrived { number, work: Work::Write { pieces, immediate, whole: true, len } })
                if pieces.is_empty() =>
            {
                (*number, *immediate, *len)
            }
            _ => return false,
        };
        if let Some(immediate) = immediate {
            let refused = self.random.happens(self.weather.rnr);
            let receive = if refused { None } else { self.take_receive(pair) };
            let Some((receive, of)) = receive else {
                count(Counter::RnrNaks);
                pair.responder.next = number;
                pair.responder.list.clear();
                self.answer(pair, number, Verdict::NotReady);
                return false;
            };
            self.announce(pair, &receive, of, immediate, len);
        }
        pair.responder.list.pop_front();
        self.answer(pair, number, Verdict::Done);
        true
    }

    fn announce(&mut self, pair: &Pair, receive: &Receive, of: Of, immediate: u32, len: u32) {
        let entry = Entry {
            id: receive.id,
            status: IBV_WC_SUCCESS,
            opcode: IBV_WC_RECV_RDMA_WITH_IMM,
            len,
            immediate: Some(immediate),
            pair: pair.number,
            source: pair.attributes.route.to,
            source_lid: 0,
            routed: false,
            of,
        };
        self.complete(pair.made.receive_queue, entry);
    }

    fn take_receive(&mut self, pair: &mut Pair) -> Option<(Receive, Of)> {
        let Some(id) = pair.made.shared else {
            return pair.receives.take().map(|receive| (receive, Of::Receive));
        };
        let (_, receives) = self.tables.shared.get_mut(&id)?;
        receives.take().map(|receive| (receive, Of::Shared(id)))
    }

    /// Answers a read.
    fn read_out(&mut self, pair: &mut Pair, number: u64, segment: Segment) {
        let mut bytes = vec![0; segment.len as usize];
        if segment.len > 0 {
            self.demand_remote(pair, segment, Access::RemoteRead, IBV_ACCESS_REMOTE_READ);
            if !fetch(segment, &mut bytes) {
                violation(&format!(
                    "a peer reads memory that is registered, and not mapped: {segment:?}"
                ));
            }
        }
        let route = Route { from: pair.number, ..pair.attributes.route };
        let count = bytes.len().div_ceil(PART).max(1);
        for at in 0..count {
            let from = at * PART;
            let end = bytes.len().min(from + PART);
            let part = bytes.get(from..end).unwrap_or_default().to_vec();
            let (offset, last) = (from as u32, at + 1 == count);
            self.wire
                .send(Frame { route, body: Body::Answer { number, offset, last, bytes: part } });
        }
    }

    fn answer(&mut self, pair: &Pair, number: u64, verdict: Verdict) {
        let route = Route { from: pair.number, ..pair.attributes.route };
        self.wire.send(Frame { route, body: Body::Ack { number, verdict } });
    }
}
