//! Makes queue pairs, moves them from state to state, and takes requests.

use super::Nic;
use super::pair::{Attributes, Kind, Made, Operation, Pair, Queued, Send, Sends, may_go};
use super::queue::{Entry, Of, Receive, Receives};
use super::regions::{Access, sum_of};
use super::responder::Responder;
use crate::counters::{Counter, add, count};
use crate::personality::Inline;
use crate::verify::{checksum, violation};
use crate::wire::PAIR_BITS;
use rdma_core_sys::{
    IBV_EVENT_QP_LAST_WQE_REACHED, IBV_QPS_ERR, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS,
    IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WC_RECV, IBV_WC_SEND, IBV_WC_SUCCESS,
    IBV_WC_WR_FLUSH_ERR, ibv_qp_state, ibv_wc_status,
};
use std::collections::VecDeque;

impl Nic {
    /// Its number and the limits that the driver gives. Error: EINVAL for what it does not support.
    pub(crate) fn make_pair(&mut self, mut made: Made, object: u64) -> Result<(u32, Made), i32> {
        let driver = &self.personality.driver;
        let known = if made.kind == Kind::Ud { driver.ud } else { driver.rc };
        let fits = made.sends <= driver.max_wr
            && made.receives <= driver.max_wr
            && made.segments <= driver.max_sge;
        let inline = match driver.inline {
            Inline::Max(most) if made.inline > most => None,
            Inline::Max(_) => Some(made.inline),
            Inline::Clamped(most) => Some(made.inline.min(most)),
        };
        let Some(inline) = inline.filter(|_| known && fits && !self.is_removed(made.context))
        else {
            count(Counter::Refusals);
            return Err(libc::EINVAL);
        };
        let (requests, segments) = driver.grants;
        made.inline = inline;
        made.sends = made.sends.min(requests);
        made.receives = made.receives.min(requests);
        made.segments = made.segments.min(segments);
        let number = self.new_number().ok_or(libc::ENOMEM)?;
        let pair = Pair {
            object,
            number,
            made,
            attributes: Attributes::default(),
            state: IBV_QPS_RESET,
            sends: Sends::default(),
            receives: Receives::new(made.receives),
            responder: Responder::default(),
            events_taken: 0,
            building: Vec::new(),
        };
        count(Counter::Pairs);
        self.pairs.insert(number, Box::new(pair));
        Ok((number, made))
    }

    /// Tells the program's object of a queue pair, for events.
    pub(crate) fn name_pair(&mut self, number: u32, object: u64) {
        if let Some(pair) = self.pairs.get_mut(&number) {
            pair.object = object;
        }
    }

    /// A number that no other queue pair of the run has.
    fn new_number(&mut self) -> Option<u32> {
        let mask = (1 << PAIR_BITS) - 1;
        (0..mask).find_map(|_| {
            self.last_pair = self.last_pair % mask + 1;
            let number = self.wire.number() << PAIR_BITS | self.last_pair;
            (!self.pairs.contains_key(&number)).then_some(number)
        })
    }

    /// Ends it; its completions that were not taken are dropped, as drivers do.
    pub(crate) fn end_pair(&mut self, number: u32) {
        let Some(pair) = self.pairs.get(&number) else {
            violation("a queue pair is destroyed twice")
        };
        let Made { context, send_queue, receive_queue, .. } = pair.made;
        for id in [send_queue, receive_queue] {
            let Some(queue) = self.tables.queues.get_mut(&id) else { continue };
            let all = std::mem::take(&mut queue.entries);
            let (dropped, kept): (VecDeque<Entry>, _) =
                all.into_iter().partition(|entry| entry.pair == number);
            queue.entries = kept;
            for entry in dropped {
                self.free_place(&entry);
            }
        }
        self.drop_events(context, number);
        self.pairs.remove(&number);
        self.busy.remove(&number);
    }

    /// Changes attributes and state. Error: EINVAL for a step that there is not.
    pub(crate) fn modify(
        &mut self,
        number: u32,
        state: ibv_qp_state,
        change: impl FnOnce(&mut Attributes),
    ) -> Result<(), i32> {
        let context = self.pairs.get(&number).map(|pair| pair.made.context);
        let Some(context) = context else {
            violation("a queue pair is modified after its destruction")
        };
        let done = self.with_pair(number, |nic, pair| {
            if !may_go(pair.state, state) {
                return Err(libc::EINVAL);
            }
            if state == IBV_QPS_ERR {
                nic.break_pair(pair);
                return Ok(());
            }
            let mut wanted = pair.attributes;
            change(&mut wanted);
            let port = nic.port(context, wanted.port).ok_or(libc::EINVAL)?;
            let pkey = port.port.pkeys.get(usize::from(wanted.pkey_index)).copied().unwrap_or(0);
            let rc = pair.made.kind == Kind::Rc;
            let unrouted = rc && state == IBV_QPS_RTR && !port.is_infiniband();
            if pkey == 0
                || unrouted && wanted.route.gids.is_none()
                || !wanted.fit(nic.personality.driver.reads, port.port.mtu)
            {
                count(Counter::Refusals);
                return Err(libc::EINVAL);
            }
            let route = &mut wanted.route;
            (route.fabric, route.source_lid, route.pkey) = (port.port.fabric, port.lid, pkey);
            (pair.attributes, pair.state) = (wanted, state);
            Ok(())
        });
        done.unwrap_or(Err(libc::EINVAL))
    }

    /// Posts a request. Errors: EINVAL in a wrong state, or for what the queue pair was not made for; ENOMEM if it is
    /// full.
    pub(crate) fn post_send(&mut self, number: u32, send: Send) -> Result<(), i32> {
        let Some(pair) = self.pairs.get(&number) else {
            violation("a request is posted to a queue pair after its destruction");
        };
        let made = pair.made;
        let removed = self.is_removed(made.context);
        let Some(pair) = self.pairs.get_mut(&number) else { return Err(libc::EINVAL) };
        if removed {
            return Err(libc::EIO);
        }
        if send.reads() && pair.attributes.reads == 0 {
            violation("a read is posted to a queue pair that may have none under way");
        }
        if !matches!(pair.state, IBV_QPS_RTS | IBV_QPS_ERR)
            || send.segments.len() > made.segments as usize
        {
            return Err(libc::EINVAL);
        }
        if send.inline.as_ref().is_some_and(|data| data.len() > made.inline as usize) {
            count(Counter::Refusals);
            return Err(libc::EINVAL);
        }
        if pair.sends.posted - pair.sends.retired >= u64::from(made.sends) {
            return Err(libc::ENOMEM);
        }
        let reads = send.reads();
        let sum = match &send.inline {
            Some(data) => checksum(data),
            None => {
                let access = if reads { Access::Write } else { Access::Read };
                self.regions.demand(made.domain, &send.segments, access, "a posted request");
                if reads { 0 } else { sum_of(&send.segments, "a posted request") }
            }
        };
        if let Operation::Datagram { handle, .. } = send.operation {
            match self.tables.handles.get(&handle) {
                Some(handle) if handle.domain == made.domain => {}
                Some(_) => violation("a datagram's address handle is of another protection domain"),
                None => {
                    violation("a datagram is posted with an address handle after its destruction")
                }
            }
        }
        add(Counter::Inline, u64::from(send.inline.is_some()));
        let number_of_request = pair.sends.posted;
        pair.sends.posted += 1;
        pair.sends.list.push_back(Queued { send, number: number_of_request, sum, done: false });
        self.busy.insert(number);
        Ok(())
    }

    /// The program has posted requests: the device begins, or the weather lets it wait.
    pub(crate) fn ring(&mut self, number: u32) {
        if self.pairs.get(&number).is_some_and(|pair| pair.state == IBV_QPS_ERR) {
            self.with_pair(number, Self::flush_all);
        } else if !self.random.happens(self.weather.laziness) {
            self.work_on(number);
        }
    }

    /// Whether so many more requests fit.
    pub(crate) fn has_room(&self, number: u32, more: usize) -> bool {
        self.pairs.get(&number).is_some_and(|pair| {
            let used = pair.sends.posted - pair.sends.retired;
            used + more as u64 <= u64::from(pair.made.sends)
        })
    }

    /// The requests of a call of the queue pair's own operations.
    pub(crate) fn building(&mut self, number: u32) -> Option<&mut Vec<Send>> {
        self.pairs.get_mut(&number).map(|pair| &mut pair.building)
    }

    /// Posts a receive. Errors: EINVAL, ENOMEM.
    pub(crate) fn post_receive(&mut self, number: u32, receive: Receive) -> Result<(), i32> {
        let Some(pair) = self.pairs.get_mut(&number) else {
            violation("a receive is posted to a queue pair after its destruction");
        };
        if pair.state == IBV_QPS_RESET || pair.made.shared.is_some() {
            return Err(libc::EINVAL);
        }
        self.regions.demand(pair.made.domain, &receive.segments, Access::Write, "a receive");
        if !pair.receives.post(receive) {
            return Err(libc::ENOMEM);
        }
        if pair.state == IBV_QPS_ERR {
            self.with_pair(number, Self::flush_all);
        }
        Ok(())
    }

    /// Completes the oldest request of `pair`.
    pub(super) fn finish(&mut self, pair: &mut Pair, status: ibv_wc_status) {
        let Some(queued) = pair.sends.list.pop_front() else { return };
        pair.sends.sent = pair.sends.sent.saturating_sub(1);
        let Queued { send, number, .. } = queued;
        if !send.signaled && !pair.made.all_signaled && status == IBV_WC_SUCCESS {
            return;
        }
        let opcode = match send.operation {
            Operation::Datagram { .. } => IBV_WC_SEND,
            Operation::Write { .. } => IBV_WC_RDMA_WRITE,
            Operation::Read { .. } => IBV_WC_RDMA_READ,
        };
        let entry = Entry {
            id: send.id,
            status,
            opcode,
            len: 0,
            immediate: None,
            pair: pair.number,
            source: 0,
            source_lid: 0,
            routed: false,
            of: Of::Send(number),
        };
        self.complete(pair.made.send_queue, entry);
    }

    /// The oldest request has failed, and the queue pair with it.
    pub(super) fn fail(&mut self, pair: &mut Pair, status: ibv_wc_status) {
        count(Counter::Failures);
        self.finish(pair, status);
        self.break_pair(pair);
    }

    pub(super) fn break_pair(&mut self, pair: &mut Pair) {
        if pair.made.shared.is_some() && pair.state != IBV_QPS_ERR {
            self.raise_of(pair, IBV_EVENT_QP_LAST_WQE_REACHED);
        }
        pair.state = IBV_QPS_ERR;
        pair.responder = Responder::default();
        self.flush_all(pair);
    }

    /// Completes all requests of a queue pair in the error state, and its own receives.
    fn flush_all(&mut self, pair: &mut Pair) {
        while !pair.sends.list.is_empty() {
            self.finish(pair, IBV_WC_WR_FLUSH_ERR);
        }
        while let Some(receive) = pair.receives.take() {
            let entry = Entry {
                id: receive.id,
                status: IBV_WC_WR_FLUSH_ERR,
                opcode: IBV_WC_RECV,
                len: 0,
                immediate: None,
                pair: pair.number,
                source: 0,
                source_lid: 0,
                routed: false,
                of: Of::Receive,
            };
            self.complete(pair.made.receive_queue, entry);
        }
    }
}
