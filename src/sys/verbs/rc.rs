//! Shared parts of an endpoint's connected queue pairs (RC): a completion queue with its channel, and
//! the receives that writes with immediate consume.

use super::cq::{self, Channel, Cq};
use super::device::{OpenDevice, Pd};
use super::mr::Registrar;
use super::owned::check;
use super::rc_qp::{RcQp, Slot};
use super::rc_shared::{Queues, RcSettings, SEGMENTS, WRITE};
use super::srq::Srq;
use crate::sys::errno::{Errno, Result};
use crate::sys::numbers::NumberMap;
use rdma_core_sys::{
    IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_SUCCESS, IBV_WC_WITH_IMM, ibv_device_attr, ibv_wc,
};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Receives that are posted again together.
const REPOST: u32 = 16;
/// An event of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RcEvent {
    /// A write of the peer has arrived completely.
    Filled { qp: u32, immediate: u32, len: u32 },
    /// Our oldest request is complete: the caller has to call [`RcQp::on_written`].
    Written { qp: u32 },
    /// A request has failed (`ibv_wc_status`): the connection is unusable. Of its further events only writes of the
    /// peer are reported that had arrived before: the device completes them in a queue of their own.
    /// The far end of a failed write may get no event: with shared receives, no request of its own is
    /// there to fail.
    Failed { qp: u32, status: u32 },
}

impl RcEvent {
    /// The number of the event's queue pair.
    pub(crate) fn qp(&self) -> u32 {
        match *self {
            Self::Filled { qp, .. } | Self::Written { qp } | Self::Failed { qp, .. } => qp,
        }
    }
}

/// The port's record of a connection.
struct Known {
    slot: Arc<Slot>,
    /// Receives consumed since the last were posted, if they are not shared.
    taken: u32,
    failed: bool,
}

/// The RC port of an endpoint. It reports nothing of a queue pair that was dropped, nor of an earlier one with
/// the same number.
pub(crate) struct RcPort {
    queues: Arc<Queues>,
    cq: Cq,
    channel: Arc<Channel>,
    settings: RcSettings,
    segments: u32,
    /// By number; destroyed ones stay until there is no room.
    known: NumberMap<u32, Known>,
    /// Shared receives consumed since the last were posted.
    taken: u32,
    /// Room for entries, and the events found in them that are not yet reported.
    entries: Box<[ibv_wc; cq::BATCH]>,
    found: VecDeque<RcEvent>,
    /// The queue was armed, and the event of that was not read yet.
    asked: bool,
    /// The error that made it unusable.
    broken: Option<Errno>,
}

// SAFETY: entries hold plain numbers; all other members are `Send`.
unsafe impl Send for RcPort {}

impl std::fmt::Debug for RcPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RcPort {:?}, {} connections", self.settings, self.known.len())
    }
}

impl RcPort {
    /// Opens it on `device`. Errors: ENOMEM; EINVAL if the device has no room for one connection;
    /// the driver's.
    pub(crate) fn open(device: &OpenDevice, settings: RcSettings) -> Result<Self> {
        let context = &device.context;
        // SAFETY: all zeroes is a valid ibv_device_attr; the call fills it.
        let attr = unsafe {
            let mut attr: ibv_device_attr = std::mem::zeroed();
            check((context.verbs.query_device)(context.as_ptr(), &mut attr))?;
            attr
        };
        let number = |n: i32| u32::try_from(n).unwrap_or(0);
        let pd = Pd::new(context)?;
        let shared = settings.shared && attr.max_srq > 0 && attr.max_srq_wr > 0;
        let depth = settings.receives.min(number(attr.max_srq_wr)).max(1);
        let srq = shared.then(|| Srq::new(&pd, depth).ok()).flatten();
        let mut settings = settings;
        settings.shared = srq.is_some();
        settings.receives = match &srq {
            Some(srq) => srq.depth,
            None => settings.receives.min(number(attr.max_qp_wr)).max(1),
        };
        settings.sends = settings.sends.min(number(attr.max_qp_wr)).max(1);
        let at_once = |n: i32| u8::try_from(n.max(0)).unwrap_or(u8::MAX);
        settings.reads = settings.reads.min(at_once(attr.max_qp_init_rd_atom));
        settings.serves = settings.serves.min(at_once(attr.max_qp_rd_atom));

        // The completion queue must never overflow. Drivers round the number of shared receives up, and after the
        // end of a connection as many may be posted again as are complete (`give_back`).
        let (fixed, each) = match settings.shared {
            true => (settings.receives.saturating_add(1).next_power_of_two() * 2, settings.sends),
            false => (0, settings.sends + settings.receives),
        };
        let room = number(attr.max_cqe).saturating_sub(fixed) / each.max(1);
        settings.connections = settings.connections.min(room as usize);
        if settings.connections == 0 {
            return Err(Errno(libc::EINVAL));
        }
        let channel = Channel::new(context)?;
        let entries = fixed + each * settings.connections as u32;
        let cq = Cq::new(context, entries, Some(&channel), false)?;
        let queues = Queues { srq, cq: cq.object(), pd, ended: AtomicBool::new(false) };
        if let Some(srq) = &queues.srq {
            srq.post(settings.receives as usize)?;
        }
        Ok(Self {
            queues: Arc::new(queues),
            cq,
            channel,
            settings,
            segments: SEGMENTS.min(number(attr.max_sge)).max(1),
            known: NumberMap::default(),
            taken: 0,
            // SAFETY: all zeroes is a valid ibv_wc.
            entries: Box::new(unsafe { std::mem::zeroed() }),
            found: VecDeque::with_capacity(cq::BATCH),
            asked: false,
            broken: None,
        })
    }

    /// The settings that are in effect.
    pub(crate) fn settings(&self) -> &RcSettings {
        &self.settings
    }

    /// Registers memory for the connections of this port.
    pub(crate) fn registrar(&self) -> Registrar {
        Registrar::new(&self.queues.pd)
    }

    /// Whether the library can ask for a relaxed order on the bus.
    pub(crate) fn can_relax(&self) -> bool {
        self.queues.pd.context.verbs.reg_mr_iova2.is_some()
    }

    /// Whether its device pages on demand what connections write and read.
    pub(crate) fn pages_on_demand(&self) -> bool {
        self.queues.pd.context.pages_on_demand()
    }

    /// The descriptor that becomes readable at an event after `sleep`.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// A new queue pair, not yet connected. Errors: EAGAIN when there are as many as allowed;
    /// ENOMEM; the driver's.
    pub(crate) fn connection<L>(&mut self) -> Result<RcQp<L>> {
        if let Some(errno) = self.broken {
            return Err(errno);
        }
        if self.known.len() >= self.settings.connections {
            self.known.retain(|_, known| !known.slot.is_ended());
            if self.known.len() >= self.settings.connections {
                return Err(Errno(libc::EAGAIN));
            }
        }
        let qp = RcQp::new(&self.queues, &self.settings, self.segments)?;
        let number = qp.number();
        // An earlier queue pair with this number has ended: all entries that its driver left are in the queue
        // now, and none of the new one.
        self.known.remove(&number);
        self.found.retain(|event| event.qp() != number);
        self.drain(false)?;
        if !self.settings.shared {
            qp.slot().post_receives(qp.receives())?;
        }
        self.known.insert(number, Known { slot: qp.slot().clone(), taken: 0, failed: false });
        Ok(qp)
    }

    /// Takes all entries in the queue now; if `first`, only until there is an event.
    #[cold]
    fn drain(&mut self, first: bool) -> Result<()> {
        let each = self.settings.sends + self.settings.receives;
        let most = each as usize * (self.settings.connections + 2);
        for _ in 0..most.div_ceil(cq::BATCH) {
            if self.fetch()? < cq::BATCH || first && !self.found.is_empty() {
                break;
            }
        }
        Ok(())
    }

    /// Reports events, a bounded number, in order. Returns how many there were. Errors: the port is
    /// broken.
    #[inline]
    pub(crate) fn poll(&mut self, mut each: impl FnMut(RcEvent)) -> Result<usize> {
        // Requests that end with their queue pair may fill a batch without an event.
        if self.found.is_empty() && self.fetch()? == cq::BATCH && self.found.is_empty() {
            self.drain(true)?;
        }
        let n = self.found.len().min(cq::BATCH);
        for event in self.found.drain(..n) {
            let of = self.known.get(&event.qp());
            if of.is_some_and(|known| !known.slot.is_ended()) {
                each(event);
            }
        }
        Ok(n)
    }

    /// Takes one batch of entries, and posts receives again. Returns how many entries there were.
    #[inline]
    fn fetch(&mut self) -> Result<usize> {
        if let Some(errno) = self.broken {
            return Err(errno);
        }
        let n = match self.cq.poll_entries(&mut self.entries) {
            Ok(n) => n,
            Err(errno) => return Err(self.break_down(errno)),
        };
        for entry in self.entries.iter().take(n) {
            let received = u32::from(entry.wr_id != WRITE);
            self.taken += received;
            let Some(known) = self.known.get_mut(&entry.qp_num) else { continue };
            known.taken += received;
            self.found.extend(event(entry, &mut known.failed));
        }
        match self.give_back(n) {
            Ok(()) => Ok(n),
            Err(errno) => Err(self.break_down(errno)),
        }
    }

    /// Posts receives again after `n` entries.
    #[inline]
    fn give_back(&mut self, n: usize) -> Result<()> {
        let threshold = REPOST.min(self.settings.receives.div_ceil(2));
        if let Some(srq) = &self.queues.srq {
            // A connection that ends may take receives along: drivers drop their completions silently. Then
            // the queue is refilled, but only when no completion is waiting; otherwise the completion queue
            // could overflow.
            if n < cq::BATCH && self.queues.ended.swap(false, Ordering::AcqRel) {
                self.taken = 0;
                srq.fill();
            } else if self.taken >= threshold {
                srq.post(std::mem::take(&mut self.taken) as usize)?;
            }
            return Ok(());
        }
        for entry in self.entries.iter().take(n) {
            let Some(known) = self.known.get_mut(&entry.qp_num) else { continue };
            if known.taken >= threshold && !known.failed {
                known.slot.post_receives(std::mem::take(&mut known.taken) as usize)?;
            }
        }
        Ok(())
    }

    fn break_down(&mut self, errno: Errno) -> Errno {
        *self.broken.get_or_insert(errno)
    }

    /// Makes the descriptor unreadable, if an earlier `sleep` has made it readable: for a sleep that no event here ends.
    pub(crate) fn silence(&mut self) {
        if self.asked && self.cq.silence() > 0 {
            self.asked = false;
        }
    }

    /// Prepares for sleep on the descriptor. False: there is an event.
    pub(crate) fn sleep(&mut self) -> bool {
        self.silence();
        if !self.found.is_empty() {
            return false;
        }
        if self.broken.is_some() {
            return true;
        }
        self.asked = true;
        if let Err(errno) = self.cq.arm() {
            self.break_down(errno);
            return true;
        }
        // Events before the queue was armed do not make the channel readable.
        let _ = self.drain(true);
        self.found.is_empty()
    }

    /// `sleep` for a thread that sleeps already, before which the queue need not have been armed.
    pub(crate) fn rearm(&mut self) -> bool {
        if self.asked { self.found.is_empty() } else { self.sleep() }
    }
}

/// The event of an entry, of a queue pair of which a request `failed` or not. `None`: a request that ended with its
/// queue pair, or a message that is not a write, which no peer of this protocol sends.
pub(super) fn event(entry: &ibv_wc, failed: &mut bool) -> Option<RcEvent> {
    let qp = entry.qp_num;
    if entry.status != IBV_WC_SUCCESS {
        let first = !std::mem::replace(failed, true);
        return first.then_some(RcEvent::Failed { qp, status: entry.status });
    }
    if entry.wr_id == WRITE {
        return (!*failed).then_some(RcEvent::Written { qp });
    }
    let filled = entry.opcode == IBV_WC_RECV_RDMA_WITH_IMM && entry.wc_flags & IBV_WC_WITH_IMM != 0;
    filled.then(|| {
        // SAFETY: the flag says that this member is valid.
        let immediate = u32::from_be(unsafe { entry.__bindgen_anon_1.imm_data });
        RcEvent::Filled { qp, immediate, len: entry.byte_len }
    })
}
