//! A UD queue pair with its rings. It sends datagrams from where they were made, if the device can read that memory,
//! or from slots of one ring, and receives them in slots of the other. It is safe because only this file knows
//! which slots belong to the device.

use super::cq::{self, Channel, Completion, Cq};
use super::device::{OpenDevice, Pd};
use super::lent::Lent;
use super::memory::Slots;
use super::mr::Registrar;
use super::qp::{self, Addresses, Ah, SendRequest, UdQp};
use crate::sys::errno::{Errno, Result};
use crate::sys::packets::Pool;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes before every received datagram: room for a global routing header, whether there is one
/// or not.
const GRH: usize = 40;
/// One in so many sends reports its completion, which stands for those before it.
const SIGNAL_EVERY: u64 = 32;
/// With at least so many sends under way, each call polls for completions: then packets sent from where they were
/// made are reused while processors still have them in their caches.
const MANY: u64 = 2 * SIGNAL_EVERY;
/// Most datagrams under way that were copied to be sent.
const COPIES: u32 = 128;
/// Slots that are posted again together: when no datagram has arrived, and when some have, because
/// reposting delays the thread that waits for them.
const REPOST: usize = 16;
const REPOST_MAX: usize = 32;
/// Smallest useful rings.
const RING_MIN: u32 = 64;
const _: () = assert!(RING_MIN as usize >= 2 * REPOST_MAX);

/// The IP version of RoCE packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IpVersion {
    V4,
    V6,
}

/// Settings of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct UdSettings {
    pub(crate) port: u8,
    /// The index of its partition.
    pub(crate) pkey_index: u16,
    /// The IP version of RoCE packets; `None`: InfiniBand.
    pub(crate) ip: Option<IpVersion>,
    /// Longest datagram, bytes.
    pub(crate) mtu: usize,
    /// The high bit is clear: keys with it are reserved for the system (InfiniBand 1.7, 10.2.5).
    pub(crate) qkey: u32,
    /// Most sends under way, and slots to receive in. The port may have fewer, but not fewer than 64.
    pub(crate) send_slots: u32,
    pub(crate) receive_slots: u32,
    /// Use the newer operations (`ibv_wr_*`, `ibv_start_poll`) if the driver has them.
    pub(crate) newer: bool,
}

/// Counts since the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct UdCounts {
    pub(crate) sent: u64,
    /// Sent inline.
    pub(crate) inline: u64,
    /// Sent from where they were made.
    pub(crate) lent: u64,
    /// Calls that posted sends.
    pub(crate) posts: u64,
    pub(crate) received: u64,
    /// Received with a router's mark.
    pub(crate) marked: u64,
    /// Completions of sends: each stands for many.
    pub(crate) send_completions: u64,
}

impl UdCounts {
    /// The sum of both.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            sent: self.sent + other.sent,
            inline: self.inline + other.inline,
            lent: self.lent + other.lent,
            posts: self.posts + other.posts,
            received: self.received + other.received,
            marked: self.marked + other.marked,
            send_completions: self.send_completions + other.send_completions,
        }
    }
}

/// A received datagram.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival<'a> {
    /// Number of the sender's queue pair.
    pub(crate) source: u32,
    pub(crate) bytes: &'a [u8],
    /// A router marked it (ECN CE).
    pub(crate) congested: bool,
}

/// The UD port of an endpoint.
#[derive(Debug)]
pub(crate) struct UdPort {
    // Destroyed in this order.
    qp: UdQp,
    lent: Option<Lent>,
    send_queue: Cq,
    receive_queue: Cq,
    channel: Arc<Channel>,
    outgoing: Slots,
    incoming: Slots,
    pd: Arc<Pd>,

    settings: UdSettings,
    /// Sends posted, and complete, since the beginning; the difference is under way.
    posted: u64,
    complete: u64,
    /// Slots to be posted again.
    returned: Vec<u32>,
    /// Room for completions of receives, and how many of them `sleep` or `has_arrived` has found.
    arrivals: [Completion; cq::BATCH],
    early: usize,
    /// The channel may have to be read before datagrams are taken.
    armed: bool,
    /// The queue was armed, and the event of that was not read yet.
    asked: bool,
    /// The error that made it unusable.
    broken: Option<Errno>,
    counts: UdCounts,
}

impl UdPort {
    /// Opens it on `device`, ready to send and to receive. Errors: ENOMEM, also if RLIMIT_MEMLOCK is too
    /// low; EINVAL if the device has no UD; the driver's.
    pub(crate) fn open(device: &OpenDevice, settings: UdSettings) -> Result<Self> {
        let facts = device.facts()?;
        let most = facts.max_requests.min(facts.max_completions / 2).max(1);
        let mut wanted = settings;
        wanted.send_slots = settings.send_slots.min(most);
        wanted.receive_slots = settings.receive_slots.min(most);
        loop {
            match Self::with_slots(device, wanted) {
                Err(Errno(libc::ENOMEM)) if wanted.receive_slots / 2 >= RING_MIN => {
                    wanted.receive_slots /= 2;
                    wanted.send_slots = (wanted.send_slots / 2).max(RING_MIN).min(most);
                }
                result => return result,
            }
        }
    }

    fn with_slots(device: &OpenDevice, settings: UdSettings) -> Result<Self> {
        let UdSettings { port, pkey_index, mtu, qkey, send_slots, receive_slots, newer, .. } =
            settings;
        let context = &device.context;
        let pd = Pd::new(context)?;
        let channel = Channel::new(context)?;
        let outgoing = Slots::new(&pd, send_slots.min(COPIES) as usize, mtu)?;
        let incoming = Slots::new(&pd, receive_slots as usize, GRH + mtu)?;
        let send_queue = Cq::new(context, send_slots, None, newer)?;
        let receive_queue = Cq::new(context, receive_slots, Some(&channel), newer)?;
        let depths = (send_slots, receive_slots);
        let (queues, port) = ((&send_queue, &receive_queue), (port, pkey_index));
        let qp = UdQp::new(&pd, queues, depths, port, qkey, newer)?;
        let mut settings = settings;
        settings.send_slots = send_slots.min(qp.depths.0);
        settings.receive_slots = receive_slots.min(qp.depths.1);
        if settings.send_slots.min(settings.receive_slots) < RING_MIN.min(send_slots) {
            return Err(Errno(libc::ENOMEM));
        }
        let mut port = Self {
            qp,
            lent: None,
            send_queue,
            receive_queue,
            channel,
            outgoing,
            incoming,
            pd,
            settings,
            posted: 0,
            complete: 0,
            returned: (0..settings.receive_slots).collect(),
            arrivals: [Completion::default(); cq::BATCH],
            early: 0,
            armed: false,
            asked: false,
            broken: None,
            counts: UdCounts::default(),
        };
        port.repost()?;
        Ok(port)
    }

    /// From now on packets of `pool` are sent directly from it. Before a buffer of the pool is reused, its owner has to
    /// ask the pool whether the device has read it.
    pub(crate) fn lend(&mut self, pool: Arc<Pool>) {
        self.lent = Some(Lent::new(pool, Registrar::new(&self.pd)));
    }

    /// Number of the queue pair.
    pub(crate) fn number(&self) -> u32 {
        self.qp.number()
    }

    /// The settings that are in effect.
    pub(crate) fn settings(&self) -> &UdSettings {
        &self.settings
    }

    /// Datagrams for which there is always room between two calls of `receive`: the other slots may not be
    /// posted yet.
    pub(crate) fn receive_room(&self) -> usize {
        (self.settings.receive_slots as usize).saturating_sub(REPOST_MAX).max(1)
    }

    /// Most bytes that a send carries inline.
    pub(crate) fn inline_max(&self) -> usize {
        self.qp.inline_max
    }

    /// Whether sends, and completions, use the newer operations.
    pub(crate) fn is_extended(&self) -> (bool, bool) {
        (self.qp.is_extended(), self.receive_queue.is_extended())
    }

    pub(crate) fn counts(&self) -> UdCounts {
        self.counts
    }

    /// The error that made it unusable.
    pub(crate) fn broken(&self) -> Option<Errno> {
        self.broken
    }

    /// The descriptor that becomes readable when a datagram arrives after `sleep`.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// Sends posted, and complete, since the beginning.
    pub(crate) fn progress(&self) -> (u64, u64) {
        (self.posted, self.complete)
    }

    /// What makes handles for its sends.
    pub(crate) fn addresses(&self) -> Addresses {
        Addresses(self.pd.clone())
    }

    /// Sends `packets` to queue pair `qpn` at `ah`. Returns how many were accepted, in order; fewer: no room
    /// now. `ah` must live until this port ends, or until as many more sends as there are slots: otherwise
    /// sends under way may be lost. Errors: the port is broken.
    #[inline]
    pub(crate) fn send(&mut self, ah: &Ah, qpn: u32, packets: &[IoSlice<'_>]) -> Result<usize> {
        let slots = u64::from(self.settings.send_slots);
        let under_way = |port: &Self| port.posted - port.complete;
        let wanted = (packets.len() as u64).max(SIGNAL_EVERY);
        if under_way(self) >= MANY || slots - under_way(self) < wanted {
            self.reap()?;
        }
        if let Some(errno) = self.broken {
            return Err(errno);
        }
        let room = (slots - under_way(self)) as usize;
        let count = packets.len().min(room).min(qp::BATCH);
        if count == 0 {
            return Ok(0);
        }
        let Self { qp, lent, outgoing, posted, complete, settings, .. } = self;
        let (copies, inline_max) = (u64::from(settings.send_slots.min(COPIES)), qp.inline_max);
        let (mut id, mut inlined, mut lendings) = (*posted, 0, 0);
        let requests = packets.iter().take(count).map_while(|packet| {
            let inline = packet.len() <= inline_max;
            let here = NonNull::from(&**packet).cast();
            let (from, lkey) = if inline {
                inlined += 1;
                (here, 0)
            } else if let Some(key) = lent.as_mut().and_then(|lent| lent.key_of(packet)) {
                lendings += 1;
                (here, key)
            } else if id - *complete < copies {
                (outgoing.fill((id % copies) as usize, packet)?, outgoing.lkey())
            } else {
                return None;
            };
            let signaled = (id + 1) % SIGNAL_EVERY == 0;
            let len = packet.len() as u32;
            let request = SendRequest { id, from, len, lkey, inline, signaled };
            id += 1;
            Some(request)
        });
        // SAFETY: inline packets are borrowed during the call. Packets of the pool stay where they are as long as
        // `lent`, which ends after the queue pair. Others lie in free slots: fewer than all are under way, and slots
        // are used in turn. A handle dropped early loses datagrams, which may be lost anyway: the driver has copied
        // what it needs.
        let taken = match unsafe { qp.send(ah, qpn, settings.qkey, requests) } {
            Ok(taken) => taken,
            Err(Errno(libc::ENOMEM)) => 0, // the queue is full, whatever our count says
            Err(errno) => return Err(self.break_down(errno)),
        };
        self.posted += taken as u64;
        self.counts.posts += u64::from(taken > 0);
        self.counts.sent += taken as u64;
        self.counts.inline += inlined;
        self.counts.lent += lendings;
        if let Some(lent) = &self.lent {
            lent.note_posted(self.posted);
        }
        Ok(taken)
    }

    /// Takes completions of sends.
    pub(super) fn reap(&mut self) -> Result<()> {
        let mut room = [Completion::default(); cq::BATCH];
        loop {
            let n = self.send_queue.poll(&mut room).map_err(|errno| self.break_down(errno))?;
            for completion in room.iter().take(n) {
                self.counts.send_completions += 1;
                self.complete = self.complete.max(completion.id + 1);
                if completion.status != 0 {
                    self.break_down(Errno(libc::EIO));
                }
            }
            if let Some(lent) = &self.lent {
                lent.note_complete(self.complete);
            }
            if n < cq::BATCH {
                return Ok(());
            }
        }
    }

    /// Puts the queue pair into the error state, as a device does after an error.
    #[cfg(test)]
    pub(crate) fn break_queue_pair(&mut self) {
        self.qp.to_error().unwrap();
    }

    fn break_down(&mut self, errno: Errno) -> Errno {
        *self.broken.get_or_insert(errno)
    }

    /// Takes arrived datagrams, a bounded number, and posts their slots again. Returns how many there
    /// were. Errors: the port is broken.
    #[inline]
    pub(crate) fn receive(&mut self, mut each: impl FnMut(Arrival<'_>)) -> Result<usize> {
        if self.armed {
            self.armed = false;
            self.asked &= self.receive_queue.silence() == 0;
        }
        let mut n = std::mem::take(&mut self.early);
        if n == 0 {
            n = match self.receive_queue.poll(&mut self.arrivals) {
                Ok(n) => n,
                Err(errno) => return Err(self.break_down(errno)),
            };
        }
        for i in 0..n {
            let Some(completion) = self.arrivals.get(i).copied() else { break };
            if completion.status != 0 {
                self.break_down(Errno(libc::EIO));
                continue;
            }
            let slot = completion.id as u32;
            if let Some((grh, bytes)) = self
                .incoming
                .bytes(slot as usize, completion.len as usize)
                .and_then(|slot| slot.split_at_checked(GRH))
            {
                let congested = completion.routed && is_marked(self.settings.ip, grh);
                self.counts.received += 1;
                self.counts.marked += u64::from(congested);
                each(Arrival { source: completion.source, bytes, congested });
            }
            self.returned.push(slot);
            if self.returned.len() >= REPOST_MAX {
                self.repost()?;
            }
        }
        if n == 0 {
            self.restock();
        }
        match self.broken {
            Some(errno) => Err(errno),
            None => Ok(n),
        }
    }

    /// True if `receive` has something to take.
    #[inline]
    pub(crate) fn has_arrived(&mut self) -> bool {
        if self.early == 0 && !self.armed {
            self.early = self.receive_queue.poll(&mut self.arrivals).unwrap_or(0);
            if self.early == 0 {
                self.restock();
            }
        }
        self.early > 0 || self.armed
    }

    /// No datagram has arrived: there is time to post slots.
    #[inline]
    fn restock(&mut self) {
        if self.returned.len() >= REPOST {
            // The error is kept for the next call of `receive`.
            let _ = self.repost();
        }
    }

    /// Posts the returned slots.
    fn repost(&mut self) -> Result<()> {
        let len = (GRH + self.settings.mtu) as u32;
        let lkey = self.incoming.lkey();
        while !self.returned.is_empty() {
            let from = self.returned.len().saturating_sub(cq::BATCH);
            let (qp, incoming) = (&mut self.qp, &self.incoming);
            let slots = self
                .returned
                .drain(from..)
                .filter_map(|slot| Some((u64::from(slot), incoming.address(slot as usize)?)));
            // SAFETY: the slots are complete, and their bytes are not borrowed.
            if let Err(errno) = unsafe { qp.receive(lkey, len, slots) } {
                return Err(self.break_down(errno));
            }
        }
        Ok(())
    }

    /// Prepares for sleep on the descriptor. False: a datagram has arrived.
    pub(crate) fn sleep(&mut self) -> bool {
        if self.early > 0 {
            return false;
        }
        if self.broken.is_some() {
            return true;
        }
        (self.armed, self.asked) = (true, true);
        if let Err(errno) = self.receive_queue.arm() {
            self.break_down(errno);
            return true;
        }
        // Datagrams before the queue was armed do not make the channel readable.
        self.early = self.receive_queue.poll(&mut self.arrivals).unwrap_or(0);
        self.early == 0
    }

    /// `sleep` for a thread that sleeps already: `receive` may have taken its event.
    pub(crate) fn rearm(&mut self) -> bool {
        if self.asked { self.early == 0 } else { self.sleep() }
    }
}

/// Whether a router marked the packet whose routing header is `grh` (RFC 3168: both bits).
fn is_marked(ip: Option<IpVersion>, grh: &[u8]) -> bool {
    let class = match ip {
        // The IP header is in the last 20 bytes.
        Some(IpVersion::V4) => grh.get(21).copied(),
        Some(IpVersion::V6) => grh.get(1).map(|byte| byte >> 4),
        None => None,
    };
    class.is_some_and(|class| class & 3 == 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_read_where_they_are() {
        let mut grh = [0; GRH];
        grh[0] = 0x60;
        grh[20] = 0x45;
        for (v4, v6, want) in [(2, 0x20, false), (3, 0x20, true), (2, 0x30, true), (1, 0x10, false)]
        {
            (grh[21], grh[1]) = (v4, v6);
            let marked =
                is_marked(Some(IpVersion::V4), &grh) || is_marked(Some(IpVersion::V6), &grh);
            assert_eq!(marked, want);
            assert!(!is_marked(None, &grh));
        }
        assert!(!is_marked(Some(IpVersion::V4), &[]));
    }
}
