//! Completion queues, and the channel that signals their entries.

use super::context::Context;
use super::device::set_nonblocking;
use super::owned::{Owned, check};
use crate::sys::errno::{Errno, Result};
use rdma_core_sys::{
    IBV_WC_EX_WITH_BYTE_LEN, IBV_WC_EX_WITH_SRC_QP, IBV_WC_GRH, IBV_WC_SUCCESS, ibv_comp_channel,
    ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_create_cq_ex, ibv_end_poll, ibv_poll_cq,
    ibv_poll_cq_attr, ibv_req_notify_cq, ibv_start_poll, ibv_wc, ibv_wc_read_byte_len,
    ibv_wc_read_src_qp, ibv_wc_read_wc_flags,
};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Most entries that one call takes.
pub(super) const BATCH: usize = 32;

/// The completion of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Completion {
    /// The id of the work request.
    pub(super) id: u64,
    /// An `ibv_wc_status`; 0 is success, otherwise the other fields are undefined.
    pub(super) status: u32,
    /// Bytes received.
    pub(super) len: u32,
    /// Number of the sender's queue pair.
    pub(super) source: u32,
    /// A global routing header precedes the received data.
    pub(super) routed: bool,
}

/// A descriptor that becomes readable when an armed queue gets an entry.
#[derive(Debug)]
pub(super) struct Channel {
    raw: Owned<ibv_comp_channel>,
    context: Arc<Context>,
}

impl Channel {
    /// Errors: EMFILE, ENOMEM.
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        let verbs = context.verbs;
        // SAFETY: a live context; the channel is destroyed after its queue, which holds it.
        let raw = unsafe {
            Owned::new((verbs.create_comp_channel)(context.as_ptr()), verbs.destroy_comp_channel)
        }?;
        let channel = Self { raw, context: context.clone() };
        // SAFETY: a live channel; the member does not change.
        set_nonblocking(unsafe { (*channel.raw.as_ptr()).fd })?;
        Ok(Arc::new(channel))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor lives as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Cq {
    object: Arc<CqObject>,
    /// It is polled through its own operations (ibv_create_cq_ex(3)).
    extended: bool,
}

/// The queue itself; it lives as long as any reference to this.
#[derive(Debug)]
pub(super) struct CqObject {
    raw: Owned<ibv_cq>,
    channel: Option<Arc<Channel>>,
    _context: Arc<Context>,
}

impl CqObject {
    pub(super) fn as_ptr(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }
}

impl Cq {
    /// A queue for `entries`; `channel` signals them when the queue is armed. `newer`: with operations of its
    /// own if the driver supports that. Errors: EINVAL, ENOMEM, the driver's.
    pub(super) fn new(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<&Arc<Channel>>,
        newer: bool,
    ) -> Result<Self> {
        let (verbs, raw_context) = (context.verbs, context.as_ptr());
        let events = channel.map_or(std::ptr::null_mut(), |channel| channel.raw.as_ptr());
        // SAFETY: all zeroes is a valid ibv_cq_init_attr_ex.
        let mut attr: ibv_cq_init_attr_ex = unsafe { std::mem::zeroed() };
        attr.cqe = entries;
        attr.channel = events;
        attr.cq_context = context.mark();
        attr.comp_vector = context.vector() as u32;
        attr.wc_flags = u64::from(IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_SRC_QP);
        // SAFETY: a live context and channel. An ibv_cq_ex begins as an ibv_cq and is destroyed as one.
        let made = unsafe {
            let raw = if newer { ibv_create_cq_ex(raw_context, &mut attr) } else { None };
            raw.and_then(|raw| Owned::new(raw.cast::<ibv_cq>(), verbs.destroy_cq).ok())
        };
        let (raw, extended) = match made {
            Some(raw) => (raw, true),
            None => {
                let entries = entries as i32;
                // SAFETY: a live context and channel.
                let raw = unsafe {
                    let (mark, vector) = (context.mark(), context.vector());
                    let raw = (verbs.create_cq)(raw_context, entries, mark, events, vector);
                    Owned::new(raw, verbs.destroy_cq)
                }?;
                (raw, false)
            }
        };
        let channel = channel.cloned();
        Ok(Self {
            object: Arc::new(CqObject { raw, channel, _context: context.clone() }),
            extended,
        })
    }

    #[inline]
    pub(super) fn as_ptr(&self) -> *mut ibv_cq {
        self.object.raw.as_ptr()
    }

    /// Keeps the queue alive.
    pub(super) fn object(&self) -> Arc<CqObject> {
        self.object.clone()
    }

    /// It is polled through its own operations.
    pub(super) fn is_extended(&self) -> bool {
        self.extended
    }

    /// Takes completions, as many as there is room for. Errors: the driver's; the queue is
    /// unusable then.
    #[inline]
    pub(super) fn poll(&mut self, room: &mut [Completion; BATCH]) -> Result<usize> {
        if self.extended { self.poll_extended(room) } else { self.poll_plain(room) }
    }

    /// Takes one entry between start and end, because drivers differ in the state that `ibv_next_poll` leaves when
    /// there is no further entry. The man page requires `ibv_end_poll` after it; the rxe driver of rdma-core 44 has
    /// already done that itself, and would drop the next entry.
    fn poll_extended(&mut self, room: &mut [Completion; BATCH]) -> Result<usize> {
        let cq: *mut ibv_cq_ex = self.as_ptr().cast();
        for (n, completion) in room.iter_mut().enumerate() {
            let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
            // SAFETY: a live extended queue, polled by no other thread (`&mut self`). Values are read between
            // start and end, and those beyond id and status only on success.
            unsafe {
                match ibv_start_poll(cq, &mut attr) {
                    0 => (),
                    libc::ENOENT => return Ok(n),
                    rc => return Err(Errno(rc.abs())),
                }
                let (id, status) = ((*cq).wr_id, (*cq).status);
                *completion = Completion { id, status, ..Completion::default() };
                if status == IBV_WC_SUCCESS {
                    completion.len = ibv_wc_read_byte_len(cq);
                    completion.source = ibv_wc_read_src_qp(cq);
                    completion.routed = ibv_wc_read_wc_flags(cq) & IBV_WC_GRH != 0;
                }
                ibv_end_poll(cq);
            }
        }
        Ok(BATCH)
    }

    fn poll_plain(&mut self, room: &mut [Completion; BATCH]) -> Result<usize> {
        // SAFETY: all zeroes is a valid ibv_wc.
        let mut entries: [ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        let n = self.poll_entries(&mut entries)?;
        for (completion, entry) in room.iter_mut().zip(entries.iter().take(n)) {
            *completion = Completion {
                id: entry.wr_id,
                status: entry.status,
                len: entry.byte_len,
                source: entry.src_qp,
                routed: entry.wc_flags & IBV_WC_GRH != 0,
            };
        }
        Ok(n)
    }

    /// Raw entries, from a queue without operations of its own.
    #[inline]
    pub(super) fn poll_entries(&mut self, entries: &mut [ibv_wc; BATCH]) -> Result<usize> {
        debug_assert!(!self.extended);
        // SAFETY: a live queue, polled by no other thread (`&mut self`), and room for so many entries.
        let n = unsafe { ibv_poll_cq(self.as_ptr(), BATCH as i32, entries.as_mut_ptr()) };
        usize::try_from(n).map_err(|_| Errno(libc::EIO))
    }

    /// Arms the queue: the next entry makes the channel readable, once. A thread that then finds the queue empty
    /// may sleep. Errors: the driver's.
    pub(super) fn arm(&mut self) -> Result<()> {
        // SAFETY: a live queue.
        check(unsafe { ibv_req_notify_cq(self.as_ptr(), 0) })
    }

    /// Makes the channel unreadable. The queue cannot be destroyed before its events are
    /// acknowledged. Returns how many there were.
    pub(super) fn silence(&mut self) -> usize {
        let Some(channel) = &self.object.channel else { return 0 };
        let mut n = 0;
        let verbs = channel.context.verbs;
        let mut cq = std::ptr::null_mut();
        let mut context = std::ptr::null_mut();
        // SAFETY: a live channel that does not block, and whose only queue is this one.
        unsafe {
            while (verbs.get_cq_event)(channel.raw.as_ptr(), &mut cq, &mut context) == 0 {
                (verbs.ack_cq_events)(self.as_ptr(), 1);
                n += 1;
            }
        }
        n
    }
}
