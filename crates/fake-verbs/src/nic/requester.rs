//! The sending half of a connection (RC): requests are sent in order, sent again when nothing is heard of them, and
//! completed in order.

use super::Nic;
use super::pair::{Operation, Pair, Queued};
use super::regions::sum_of;
use crate::counters::{Counter, add, count};
use crate::verify::{checksum, violation};
use crate::wire::{Body, Frame, Request, Route, Verdict};
use rdma_core_sys::{
    IBV_QPS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
    IBV_WC_SUCCESS,
};
use std::time::{Duration, Instant};

/// Most requests under way at a time, and the longest part of one, bytes.
const AHEAD: usize = 32;
const PART: usize = 256 << 10;
/// How long a peer without a receive is left alone.
const NOT_READY: Duration = Duration::from_micros(300);

impl Nic {
    /// Sends what may be sent now.
    pub(super) fn send_requests(&mut self, pair: &mut Pair) {
        if !pair.is_ready_to_send() {
            return;
        }
        let now = Instant::now();
        if pair.sends.not_before.is_some_and(|at| now < at) {
            return;
        }
        pair.sends.not_before = None;
        if pair.sends.deadline.is_some_and(|at| at < now) && !self.try_again(pair) {
            return;
        }
        while pair.sends.sent < pair.sends.list.len().min(AHEAD) && self.may_send(pair) {
            if self.random.happens(self.weather.laziness / 2) {
                break;
            }
            if self.random.happens(self.weather.failures) && pair.sends.sent == 0 {
                return self.fail(pair, IBV_WC_RETRY_EXC_ERR);
            }
            self.send_one(pair);
            if self.random.happens(self.weather.repeats) {
                count(Counter::Retries);
                pair.sends.sent -= 1;
                self.send_one(pair);
            }
            let patience = pair.patience();
            pair.sends.deadline.get_or_insert_with(|| now + patience);
        }
    }

    /// Nothing was heard of the oldest request. False: the connection is over.
    fn try_again(&mut self, pair: &mut Pair) -> bool {
        count(Counter::Retries);
        pair.sends.tries += 1;
        if pair.sends.tries > pair.attributes.retries {
            self.fail(pair, IBV_WC_RETRY_EXC_ERR);
            return false;
        }
        pair.sends.sent = 0;
        pair.sends.deadline = None;
        true
    }

    /// The next request neither waits for earlier reads, nor is a read too many.
    fn may_send(&self, pair: &Pair) -> bool {
        let reads = pair.sends.reads_under_way();
        let Some(next) = pair.sends.list.get(pair.sends.sent) else { return false };
        let fenced = next.send.fence && reads > 0;
        !fenced && (!next.send.reads() || reads < usize::from(pair.attributes.reads))
    }

    fn send_one(&mut self, pair: &mut Pair) {
        let at = pair.sends.sent;
        pair.sends.sent += 1;
        let Some(queued) = pair.sends.list.get(at).filter(|queued| !queued.done) else { return };
        let request = Request { number: queued.number, psn: pair.attributes.send_psn };
        let route = Route { from: pair.number, ..pair.attributes.route };
        match queued.send.operation {
            Operation::Read { addr, rkey } => {
                let len = super::regions::total(&queued.send.segments) as u32;
                count(Counter::Reads);
                add(Counter::ReadBytes, len.into());
                let under_way = u8::try_from(pair.sends.reads_under_way()).unwrap_or(u8::MAX);
                let body = Body::Read { request, addr, rkey, len, under_way };
                self.wire.send(Frame { route, body });
            }
            Operation::Write { addr, rkey, immediate } => {
                let bytes = self.bytes_of(pair, queued);
                count(Counter::Writes);
                add(Counter::WriteBytes, bytes.len() as u64);
                add(Counter::Immediates, immediate.is_some().into());
                self.send_write(route, request, (addr, rkey, immediate), &bytes);
            }
            Operation::Datagram { .. } => violation("a connection was given a datagram"),
        }
    }

    /// The memory of a write, as it was when it was posted.
    fn bytes_of(&self, pair: &Pair, queued: &Queued) -> Vec<u8> {
        let send = &queued.send;
        let bytes = match &send.inline {
            Some(data) => data.clone(),
            None => self.regions.read(pair.made.domain, &send.segments, "a write at its transfer"),
        };
        if checksum(&bytes) != queued.sum {
            violation(&format!("the memory of a write was changed before its transfer: {send:?}"));
        }
        bytes
    }

    fn send_write(
        &mut self,
        route: Route,
        request: Request,
        (addr, rkey, immediate): (u64, u32, Option<u32>),
        bytes: &[u8],
    ) {
        let mut at = 0;
        loop {
            let end = bytes.len().min(at + PART);
            let part = bytes.get(at..end).unwrap_or_default().to_vec();
            let (first, last) = (at == 0, end == bytes.len());
            let addr = addr + at as u64;
            let body = Body::Write { request, addr, rkey, immediate, first, last, bytes: part };
            self.wire.send(Frame { route, body });
            if last {
                return;
            }
            at = end;
        }
    }

    /// The responder has answered.
    pub(super) fn on_ack(&mut self, pair: &mut Pair, number: u64, verdict: Verdict) {
        let Some(at) = pair.sends.position(number) else { return };
        if pair.state == IBV_QPS_ERR {
            return;
        }
        pair.sends.deadline = None;
        pair.sends.tries = 0;
        match verdict {
            Verdict::Done => {
                let write = pair.sends.list.get_mut(at).filter(|queued| !queued.send.reads());
                if let Some(queued) = write {
                    queued.done = true;
                }
                self.finish_done(pair);
            }
            Verdict::Invalid => self.fail(pair, IBV_WC_REM_INV_REQ_ERR),
            Verdict::NotReady if pair.attributes.rnr_retries == 0 => {
                self.fail(pair, IBV_WC_RNR_RETRY_EXC_ERR);
            }
            Verdict::NotReady => {
                pair.sends.sent = pair.sends.sent.min(at);
                pair.sends.not_before = Some(Instant::now() + NOT_READY);
            }
        }
        if pair.sends.sent > 0 && pair.sends.deadline.is_none() {
            pair.sends.deadline = Some(Instant::now() + pair.patience());
        }
    }

    /// A part of what a read asked for.
    pub(super) fn on_answer(
        &mut self,
        pair: &mut Pair,
        number: u64,
        offset: u32,
        last: bool,
        bytes: &[u8],
    ) {
        let Some(at) = pair.sends.position(number) else { return };
        let queued =
            pair.sends.list.get_mut(at).filter(|queued| queued.send.reads() && !queued.done);
        let Some(queued) = queued else { return };
        self.regions.write(pair.made.domain, &queued.send.segments, offset as usize, bytes);
        pair.sends.deadline = None;
        pair.sends.tries = 0;
        queued.done = last;
        self.finish_done(pair);
        if pair.sends.sent > 0 {
            pair.sends.deadline = Some(Instant::now() + pair.patience());
        }
    }

    /// Completes the oldest requests, in order.
    fn finish_done(&mut self, pair: &mut Pair) {
        while let Some(queued) = pair.sends.list.front().filter(|queued| queued.done) {
            let send = &queued.send;
            if send.inline.is_none() && !send.reads() {
                let when = "a write at its completion";
                if sum_of(&send.segments, when) != queued.sum {
                    violation(&format!(
                        "the memory of a write was changed before its completion: {send:?}"
                    ));
                }
            }
            self.finish(pair, IBV_WC_SUCCESS);
        }
    }
}
