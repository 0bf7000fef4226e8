//! Connected queue pairs (RC) of which each writes into a ring of its peer, and whose peer writes into one of
//! ours: nobody is told by a completion, whoever waits looks at memory. What stands where in a ring is not
//! this file's affair; which memory a device may touch is.

use super::device::{OpenDevice, Pd};
use super::lent::Readable;
use super::memory::Slots;
use super::rc::{RcEvent, RcPort, RcSettings, WRITE};
use super::rc_qp::{RcAddress, RcQp};
use crate::sys::errno::{Errno, Result};
use crate::sys::packets::Pool;
use rdma_core_sys::{
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_RDMA_WRITE, ibv_send_wr,
    ibv_send_wr__bindgen_ty_2__bindgen_ty_1, ibv_sge,
};
use std::collections::VecDeque;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Lengths that are asked for as what a write may carry within its request, bytes. The least is what announces
/// something without a packet.
const INLINE: [u32; 3] = [236, 128, 64];
/// One write of so many reports its completion; it stands for those before it.
const SIGNAL_EVERY: u64 = 4;
/// Writes that are posted together at most.
const BATCH: usize = 8;
/// Writes under way on one queue pair at most.
const WRITES: u32 = 32;
/// Pieces of a write: a packet, where it is inline or read from where it was made, and its mark.
const SEGMENTS: usize = 2;
/// Bytes of a mark.
pub(crate) const MARK: usize = 16;

/// Where such queue pairs are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EagerSettings {
    pub(crate) port: u8,
    /// As [`RcSettings::gid`].
    pub(crate) gid: Option<u8>,
    /// Longest packet of the port, bytes.
    pub(crate) mtu: usize,
    pub(crate) service_level: u8,
    /// Most queue pairs at a time.
    pub(crate) channels: usize,
    /// Bytes of a ring.
    pub(crate) ring: usize,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct EagerPort {
    port: RcPort,
    lent: Option<Arc<Readable>>,
    settings: EagerSettings,
}

/// One packet, or none, and its mark.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EagerWrite<'a> {
    /// Where that begins, bytes from the beginning of the peer's ring.
    pub(crate) at: usize,
    pub(crate) packet: &'a [u8],
    /// What comes behind it.
    pub(crate) mark: [u8; MARK],
}

/// See the module.
pub(crate) struct EagerQp {
    // Ended in this order.
    qp: RcQp<()>,
    ring: Slots,
    ring_len: usize,
    /// What is written, each where it will be in the peer's ring: while that is not free there, the device may still
    /// read it here. Of what it reads from the pool, only the marks.
    outgoing: Slots,
    lent: Option<Arc<Readable>>,
    inline_max: usize,
    requests: Vec<(ibv_send_wr, [ibv_sge; SEGMENTS])>,
    /// Writes posted, and complete, since the beginning; and those up to which a completion will be reported,
    /// oldest first.
    posted: u64,
    complete: u64,
    signals: VecDeque<u64>,
}

// SAFETY: pointers in `requests` mean nothing between calls; the rest may be moved by itself.
unsafe impl Send for EagerQp {}
// SAFETY: as above; what changes anything takes `&mut`.
unsafe impl Sync for EagerQp {}

impl std::fmt::Debug for EagerQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EagerQp {:#x}, {} writes", self.qp.number(), self.posted)
    }
}

impl EagerPort {
    /// Opens it on `device`. Errors: ENOMEM, EINVAL, the driver's.
    pub(crate) fn open(device: &OpenDevice, settings: EagerSettings) -> Result<Self> {
        let port = RcPort::open(
            device,
            RcSettings {
                port: settings.port,
                gid: settings.gid,
                mtu: settings.mtu,
                service_level: settings.service_level,
                connections: settings.channels,
                receives: 1,
                sends: WRITES,
                reads: 0,
                serves: 0,
                shared: true,
                inline: 0,
            },
        )?;
        if port.settings().sends < 2 * SIGNAL_EVERY as u32 {
            return Err(Errno(libc::EINVAL));
        }
        Ok(Self { port, lent: None, settings })
    }

    /// The queue pairs made from now on send packets of `pool` from where they are. Whoever uses a buffer of it again has
    /// seen that the write is complete. Where the process may lock no more memory, they are copied.
    pub(crate) fn lend(&mut self, pool: Arc<Pool>) {
        self.lent = Readable::new(pool, &self.port.registrar()).ok().map(Arc::new);
    }

    /// A queue pair that is not yet connected, with its ring. Errors: EAGAIN when there are as many as may be;
    /// ENOMEM, also where the process may lock no more memory (RLIMIT_MEMLOCK); the driver's.
    pub(crate) fn channel(&mut self) -> Result<EagerQp> {
        let mut last = Errno(libc::EINVAL);
        for inline in INLINE {
            self.port.set_inline(inline);
            match self.port.connection() {
                Ok(qp) => {
                    let (pd, lent) = (self.port.pd(), self.lent.clone());
                    return EagerQp::new(qp, pd, &self.settings, inline as usize, lent);
                }
                Err(errno) => last = errno,
            }
        }
        Err(last)
    }

    /// Reports what has happened, a bounded number of events: queue pair, and whether it has failed. Errors: it is
    /// broken.
    pub(crate) fn poll(&mut self, mut each: impl FnMut(u32, bool)) -> Result<usize> {
        self.port.poll(|event| match event {
            RcEvent::Written { qp } => each(qp, false),
            RcEvent::Failed { qp, .. } => each(qp, true),
            RcEvent::Filled { .. } => {} // no peer of ours does that
        })
    }
}

impl EagerQp {
    fn new(
        qp: RcQp<()>,
        pd: &Arc<Pd>,
        settings: &EagerSettings,
        inline: usize,
        lent: Option<Arc<Readable>>,
    ) -> Result<Self> {
        if qp.segments_max() < SEGMENTS {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: all zeroes is valid for both.
        let request: (ibv_send_wr, [ibv_sge; SEGMENTS]) = unsafe { std::mem::zeroed() };
        Ok(Self {
            qp,
            ring: Slots::exposed(pd, 1, settings.ring)?,
            ring_len: settings.ring,
            outgoing: Slots::new(pd, 1, settings.ring)?,
            lent,
            inline_max: inline,
            requests: vec![request; BATCH],
            posted: 0,
            complete: 0,
            signals: VecDeque::new(),
        })
    }

    /// Its number.
    pub(crate) fn number(&self) -> u32 {
        self.qp.number()
    }

    /// Where a peer finds the ring, and the key for it.
    pub(crate) fn ring(&self) -> (u64, u32) {
        let base = self.ring.address(0).map_or(0, |at| at.as_ptr().expose_provenance() as u64);
        (base, self.ring.rkey())
    }

    /// See [`RcQp::connect`].
    pub(crate) fn connect(&mut self, to: &RcAddress, own_psn: u32) -> Result<()> {
        self.qp.connect(to, own_psn)
    }

    /// The two words of the mark at `at` of our ring, as they are now: what was written before them is there if
    /// they say so.
    #[inline]
    pub(crate) fn mark(&self, at: usize) -> Option<[u64; 2]> {
        if at % 8 != 0 || at > self.ring_len.saturating_sub(MARK) {
            return None;
        }
        let words = self.ring.address(0)?.cast::<AtomicU64>();
        // SAFETY: within the ring, aligned, and read by nobody but through atomics.
        let word = |n: usize| unsafe { words.add(at / 8 + n).as_ref() }.load(Ordering::Acquire);
        Some([u64::from_le(word(0)), u64::from_le(word(1))])
    }

    /// The `len` bytes at `at` of our ring, which the peer has written and leaves alone now.
    #[inline]
    pub(crate) fn bytes(&self, at: usize, len: usize) -> Option<&[u8]> {
        if at.checked_add(len)? > self.ring_len {
            return None;
        }
        let base = self.ring.address(0)?;
        // SAFETY: within the ring. A peer that writes there all the same, against what was agreed, makes us read
        // one thing or the other: whoever reads takes any bytes.
        Some(unsafe { std::slice::from_raw_parts(base.add(at).as_ptr(), len) })
    }

    /// Writes that may be posted now.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        (u64::from(WRITES) - (self.posted - self.complete)) as usize
    }

    /// Writes posted so far, and how many of them are known to be complete.
    #[inline]
    pub(crate) fn progress(&self) -> (u64, u64) {
        (self.posted, self.complete)
    }

    /// Writes into the ring that a peer has at `to`, under its key, one after the other, as many as there is room
    /// for; the last reports its completion if `told`. What was written to the same place before has been taken from
    /// there. Returns how many. Errors: it has failed.
    #[inline]
    pub(crate) fn write<'a>(
        &mut self,
        (to, rkey): (u64, u32),
        writes: impl Iterator<Item = EagerWrite<'a>>,
        told: bool,
    ) -> Result<usize> {
        let (room, lkey, before) = (self.room().min(BATCH), self.outgoing.lkey(), self.posted);
        let Self { outgoing, lent, requests, inline_max, posted, signals, .. } = self;
        // What is inline stays here until it is posted.
        let mut marks = [[0; MARK]; BATCH];
        let mut count = 0_usize;
        let sge = |from: NonNull<u8>, len: usize| ibv_sge {
            addr: from.as_ptr().expose_provenance() as u64,
            length: len as u32,
            lkey,
        };
        for ((write, kept), (wr, [one, two])) in
            writes.take(room).zip(&mut marks).zip(requests.iter_mut())
        {
            let len = write.packet.len() + MARK;
            let inline = len <= *inline_max;
            wr.num_sge = 1;
            if inline {
                *kept = write.mark;
                let mark = sge(NonNull::from(&*kept).cast(), MARK);
                *one = mark;
                if !write.packet.is_empty() {
                    *one = sge(NonNull::from(write.packet).cast(), write.packet.len());
                    *two = mark;
                    wr.num_sge = 2;
                }
            } else if let Some(key) = lent.as_ref().and_then(|lent| lent.key_of(write.packet)) {
                let end = write.at.saturating_add(write.packet.len());
                let Some(mark) = outgoing.fill_within(0, end, &write.mark, &[]) else { break };
                let packet = sge(NonNull::from(write.packet).cast(), write.packet.len());
                (*one, *two) = (ibv_sge { lkey: key, ..packet }, sge(mark, MARK));
                wr.num_sge = 2;
            } else {
                let Some(from) = outgoing.fill_within(0, write.at, write.packet, &write.mark)
                else {
                    break;
                };
                *one = sge(from, len);
            }
            wr.wr_id = WRITE;
            wr.opcode = IBV_WR_RDMA_WRITE;
            wr.send_flags = if inline { IBV_SEND_INLINE } else { 0 };
            wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
                remote_addr: to.wrapping_add(write.at as u64),
                rkey,
            };
            count += 1;
            *posted += 1;
            if *posted % SIGNAL_EVERY == 0 {
                wr.send_flags |= IBV_SEND_SIGNALED;
                signals.push_back(*posted);
            }
        }
        let Some((last, _)) = count.checked_sub(1).and_then(|last| requests.get_mut(last)) else {
            return Ok(0);
        };
        if told && last.send_flags & IBV_SEND_SIGNALED == 0 {
            last.send_flags |= IBV_SEND_SIGNALED;
            signals.push_back(*posted);
        }
        let mut next: *mut ibv_send_wr = null_mut();
        for (wr, sges) in requests.iter_mut().take(count).rev() {
            wr.next = next;
            wr.sg_list = sges.as_mut_ptr();
            next = wr;
        }
        // SAFETY: a list of valid requests, no more than fit. What is inline is borrowed during the call; what is not
        // stays as it is until its place is written to again, which the peer has left by then: whatever the device
        // still reads of it, it throws away. What is of the pool stays where it is as long as `lent`, which ends after the
        // queue pair.
        unsafe { self.qp.post_list(next) }?;
        Ok((self.posted - before) as usize)
    }

    /// The oldest write that reports it is complete, and those before it.
    pub(crate) fn on_complete(&mut self) {
        if let Some(upto) = self.signals.pop_front() {
            self.complete = self.complete.max(upto);
        }
    }
}
