//! The smaller objects: protection domains, registrations, channels, completion queues, shared receives, address
//! handles.

use super::Nic;
use super::queue::{Channel, Entry, Of, Queue, Receive, Receives};
use crate::counters::{Counter, count};
use crate::personality::Srq;
use crate::sys::{self, Count};
use crate::verify::violation;
use crate::wire::Route;
use rdma_core_sys::IBV_ACCESS_ON_DEMAND;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

/// The destination of datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Handle {
    pub(crate) domain: u32,
    pub(crate) route: Route,
    /// The GID of the source by its index, if the packets have global routes.
    pub(crate) source_index: usize,
    pub(crate) global: bool,
    pub(crate) port: u8,
}

impl Nic {
    pub(crate) fn allocate_domain(&mut self, context: u32) -> u32 {
        let id = self.new_id();
        self.tables.domains.insert(id, context);
        id
    }

    /// Error: EBUSY while something is in it.
    pub(crate) fn free_domain(&mut self, domain: u32) -> Result<(), i32> {
        let used = self.regions.has(domain)
            || self.pairs.values().any(|pair| pair.made.domain == domain)
            || self.tables.shared.values().any(|(of, _)| *of == domain)
            || self.tables.handles.values().any(|handle| handle.domain == domain);
        if used {
            violation("a protection domain is freed while something is in it");
        }
        self.tables.domains.remove(&domain).map(|_| ()).ok_or(libc::EINVAL)
    }

    /// Its key.
    pub(crate) fn register(
        &mut self,
        domain: u32,
        addr: u64,
        len: u64,
        access: u32,
    ) -> Result<u32, i32> {
        if access & IBV_ACCESS_ON_DEMAND != 0 && !self.personality.driver.on_demand {
            return Err(libc::EINVAL);
        }
        match sys::peer_memory(addr, len) {
            Some((pages, offset)) => {
                let from = (pages.as_fd(), offset);
                self.regions.add_buffer(domain, (addr, len), from, (access, true))
            }
            None => self.regions.add(domain, (addr, len), access, self.weather.locked_bytes),
        }
    }

    /// The same for memory of a dma-buf.
    pub(crate) fn register_buffer(
        &mut self,
        domain: u32,
        memory: (u64, u64),
        from: (BorrowedFd<'_>, u64),
        access: u32,
    ) -> Result<u32, i32> {
        if !self.personality.driver.dmabuf {
            return Err(libc::EOPNOTSUPP);
        }
        self.regions.add_buffer(domain, memory, from, (access, false))
    }

    /// What the kernel answers to a descriptor that is none. Errors: EOPNOTSUPP where the driver has no dma-bufs, else EBADF.
    pub(crate) fn register_nothing(&self) -> Result<u32, i32> {
        Err(if self.personality.driver.dmabuf { libc::EBADF } else { libc::EOPNOTSUPP })
    }

    pub(crate) fn deregister(&mut self, key: u32) {
        self.regions.remove(key);
    }

    /// Its handle and descriptor.
    pub(crate) fn make_channel(&mut self) -> Result<(u32, RawFd), i32> {
        let count = Count::new().ok_or(libc::EMFILE)?;
        let (id, fd) = (self.new_id(), count.fd());
        self.tables.channels.insert(id, Channel { count, ready: VecDeque::new() });
        Ok((id, fd))
    }

    pub(crate) fn end_channel(&mut self, channel: u32) {
        if self.tables.queues.values().any(|queue| queue.channel == Some(channel)) {
            violation("a channel is destroyed before its queue");
        }
        self.tables.channels.remove(&channel);
    }

    /// The queue of the next event of a channel whose count was taken.
    pub(crate) fn next_ready(&mut self, channel: u32) -> Option<u64> {
        let object = self.tables.channels.get_mut(&channel)?.ready.pop_front()?;
        if let Some(queue) = self.tables.queues.values_mut().find(|queue| queue.object == object) {
            queue.events_taken += 1;
        }
        Some(object)
    }

    /// The program has processed so many events of a queue.
    pub(crate) fn acknowledge_queue(&mut self, queue: u32, events: u32) {
        let Some(queue) = self.tables.queues.get_mut(&queue) else {
            violation("events of a completion queue are acknowledged after its destruction");
        };
        let Some(left) = queue.events_taken.checked_sub(events) else {
            violation("more events of a completion queue are acknowledged than were taken");
        };
        queue.events_taken = left;
    }

    /// Events of a queue that were taken and are not acknowledged.
    pub(crate) fn queue_events(&self, queue: u32) -> u32 {
        self.tables.queues.get(&queue).map_or(0, |queue| queue.events_taken)
    }

    /// Its handle and capacity.
    pub(crate) fn make_queue(
        &mut self,
        entries: u32,
        channel: Option<u32>,
    ) -> Result<(u32, u32), i32> {
        if entries == 0 || entries > self.personality.driver.max_cqe {
            count(Counter::Refusals);
            return Err(libc::EINVAL);
        }
        let id = self.new_id();
        let queue = Queue {
            object: 0,
            channel,
            capacity: entries as usize,
            entries: VecDeque::new(),
            armed: false,
            events_taken: 0,
            current: None,
        };
        self.tables.queues.insert(id, queue);
        Ok((id, entries))
    }

    /// Tells the program's object of a queue, for events.
    pub(crate) fn name_queue(&mut self, queue: u32, object: u64) {
        if let Some(queue) = self.tables.queues.get_mut(&queue) {
            queue.object = object;
        }
    }

    pub(crate) fn end_queue(&mut self, queue: u32) {
        let uses = |made: &super::Made| made.send_queue == queue || made.receive_queue == queue;
        if self.pairs.values().any(|pair| uses(&pair.made)) {
            violation("a completion queue is destroyed before its queue pairs");
        }
        let Some(ended) = self.tables.queues.remove(&queue) else {
            violation("a completion queue is destroyed twice");
        };
        // Nobody takes its events any more.
        let channel = ended.channel.and_then(|channel| self.tables.channels.get_mut(&channel));
        if let Some(channel) = channel {
            channel.ready.retain(|object| *object != ended.object);
        }
    }

    /// Takes up to `most` completions.
    pub(crate) fn poll(&mut self, queue: u32, most: usize) -> Vec<Entry> {
        self.polled = Instant::now();
        let empty = self.tables.queues.get(&queue).map(|queue| queue.entries.is_empty());
        match empty {
            Some(true) => self.progress(),
            Some(false) => {}
            None => violation("a completion queue is polled after its destruction"),
        }
        let Some(from) = self.tables.queues.get_mut(&queue) else { return Vec::new() };
        let most = most.min(from.entries.len());
        let entries: Vec<Entry> = from.entries.drain(..most).collect();
        for entry in &entries {
            self.free_place(entry);
        }
        entries
    }

    /// The completion of `entry` is taken: there is room again in the queue of its request.
    pub(super) fn free_place(&mut self, entry: &Entry) {
        let pair = self.pairs.get_mut(&entry.pair);
        match (entry.of, pair) {
            (Of::Send(number), Some(pair)) => {
                pair.sends.retired = pair.sends.retired.max(number + 1);
            }
            (Of::Receive, Some(pair)) => pair.receives.free(),
            (Of::Shared(id), _) => {
                if let Some((_, receives)) = self.tables.shared.get_mut(&id) {
                    receives.free();
                }
            }
            (_, None) => {}
        }
    }

    /// The entry between the start and the end of a poll.
    pub(crate) fn current(&mut self, queue: u32) -> Option<&mut Option<Entry>> {
        self.tables.queues.get_mut(&queue).map(|queue| &mut queue.current)
    }

    /// The next completion raises an event; also one that is there already and was not seen yet is no event.
    pub(crate) fn arm(&mut self, queue: u32) {
        match self.tables.queues.get_mut(&queue) {
            Some(queue) => queue.armed = true,
            None => violation("a completion queue is armed after its destruction"),
        }
    }

    /// Its handle and depth. Error: ENOSYS, EINVAL.
    pub(crate) fn make_shared(&mut self, domain: u32, depth: u32) -> Result<(u32, u32), i32> {
        let driver = &self.personality.driver;
        if driver.srq == Srq::Absent {
            return Err(libc::EOPNOTSUPP);
        }
        if depth == 0 || depth > driver.max_wr {
            count(Counter::Refusals);
            return Err(libc::EINVAL);
        }
        // As mlx5 and mlx4 do: a power of two, less one.
        let depth = ((depth + 1).next_power_of_two() - 1).min(driver.grants.0);
        let id = self.new_id();
        self.tables.shared.insert(id, (domain, Receives::new(depth)));
        Ok((id, depth))
    }

    pub(crate) fn end_shared(&mut self, shared: u32) {
        if self.pairs.values().any(|pair| pair.made.shared == Some(shared)) {
            violation("shared receives are destroyed before their queue pairs");
        }
        self.tables.shared.remove(&shared);
    }

    /// Error: what the driver returns when it is full.
    pub(crate) fn post_shared(&mut self, shared: u32, receive: Receive) -> Result<(), i32> {
        let Some((domain, receives)) = self.tables.shared.get_mut(&shared) else {
            violation("a receive is posted to shared ones after their destruction");
        };
        self.regions.demand(*domain, &receive.segments, super::regions::Access::Write, "a receive");
        if receives.post(receive) {
            return Ok(());
        }
        match self.personality.driver.srq {
            Srq::FullIs(errno) => Err(errno),
            Srq::Absent => Err(libc::EOPNOTSUPP),
        }
    }

    /// How long making the next address handle takes, and whether it then fails.
    pub(crate) fn handle_weather(&mut self) -> (Duration, bool) {
        let slow = self.random.happens(self.weather.handle_delays);
        let fails = self.random.happens(self.weather.handle_failures);
        (Duration::from_millis(if slow { 50 } else { 0 }), fails)
    }

    /// Error: EINVAL for addresses that the port cannot use.
    pub(crate) fn make_handle(&mut self, handle: Handle) -> Result<u32, i32> {
        let context = self.tables.domains.get(&handle.domain).copied().ok_or(libc::EINVAL)?;
        let port = self.port(context, handle.port).ok_or(libc::EINVAL)?;
        if !port.is_infiniband() && !handle.global {
            return Err(libc::EINVAL);
        }
        if handle.global && port.gid(handle.source_index).is_none() {
            return Err(libc::EINVAL);
        }
        let id = self.new_id();
        self.tables.handles.insert(id, handle);
        Ok(id)
    }

    pub(crate) fn end_handle(&mut self, handle: u32) {
        if self.tables.handles.remove(&handle).is_none() {
            violation("an address handle is destroyed twice");
        }
    }
}
