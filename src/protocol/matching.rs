//! Messages that came before their receives, and the receives that were posted before their messages.

use super::kept::Kept;
use super::message::Announcement;
use super::packet::Envelope;
use super::receives::Receives;
use super::spaces::Spaces;
use super::{Cause, Host};
use crate::sys::numbers::NumberMap;
use crate::telemetry::histogram::Histogram;
use crate::transport::PeerId;
use std::collections::HashMap;

/// Memory that an eager message takes beside its payload, bytes: its record, the links of its list, and the allocator's
/// overhead. Without it, no number of empty messages would ever be too many.
pub(super) const EACH: usize = size_of::<Unexpected>() + 32;

/// Posted receives, and messages without a receive.
#[derive(Debug)]
pub(super) struct Matching {
    /// The endpoint's own receive queue, unused if the queue is shared ([`Matching::receives`]).
    pub(super) own: Receives,
    pub(super) unexpected: Spaces<Unexpected>,
    /// Insertions into, and removals from, the address book of which the indices of `unexpected` have the sources.
    epoch: u64,
    removals: u64,
    /// Payload bytes of unexpected messages that are kept here, and [`EACH`] for every eager one.
    pub(super) bytes: usize,
    /// Messages that a peek has claimed, by receive context and the application's context.
    pub(super) claimed: HashMap<(u8, u64), Unexpected>,
    /// PRESSURE is set: peers are asked to hold their messages back.
    pub(super) presses: bool,
    /// See [`super::Standing::early_senders`].
    pub(super) early: Histogram,
    pub(super) departed: Departed,
}

impl Matching {
    pub(super) fn new(contexts: usize) -> Self {
        Self {
            own: Receives::new(contexts),
            unexpected: Spaces::new(contexts),
            epoch: 0,
            removals: 0,
            bytes: 0,
            claimed: HashMap::new(),
            presses: false,
            early: Histogram::default(),
            departed: Departed::default(),
        }
    }

    /// The queue that receives are posted to.
    #[inline]
    pub(super) fn receives<'a, H: Host>(
        &'a mut self,
        shares: bool,
        host: &'a mut H,
    ) -> &'a mut Receives {
        match shares {
            true => host.shared_receives().unwrap_or(&mut self.own),
            false => &mut self.own,
        }
    }

    /// Sources of unexpected messages are asked for next.
    #[inline]
    pub(super) fn follow(&mut self, host: &impl Host) {
        let epoch = host.book_epoch();
        if self.epoch != epoch {
            self.epoch = epoch;
            // An insertion changes no source that was known.
            let removals = host.book_removals();
            let all = std::mem::replace(&mut self.removals, removals) != removals;
            self.unexpected.lists_mut().for_each(|list| list.change_sources(all));
        }
    }

    /// All messages of some peers that wait for their receives.
    pub(super) fn change_messages_of(
        &mut self,
        is_one: impl Fn(PeerId) -> bool,
        mut change: impl FnMut(&mut Unexpected),
    ) {
        let claimed = self.claimed.values_mut();
        claimed.filter(|message| is_one(message.peer)).for_each(&mut change);
        for list in self.unexpected.lists_mut() {
            for key in list.keys_where(|message| is_one(message.peer)) {
                if let Some(message) = list.get_mut(key) {
                    change(message);
                }
            }
        }
    }
}

/// Peers that departed in the current poll. Their messages and the receives from them are looked for at its end: the job
/// ends for many peers at once, and one walk is for all of them.
#[derive(Debug, Default)]
pub(super) struct Departed {
    /// The error of each.
    pub(super) peers: NumberMap<PeerId, i32>,
    /// Why no message of these sources can come, by index in the address book.
    pub(super) sources: NumberMap<u64, (i32, Cause)>,
}

/// An unexpected message: it came before its receive.
#[derive(Debug)]
pub(super) struct Unexpected {
    pub(super) peer: PeerId,
    pub(super) envelope: Envelope,
    pub(super) body: Body,
    /// Its number among all unexpected messages of a shared queue (0 without one).
    pub(super) arrival: u64,
    /// When it came, nanoseconds; 0: it is not timed.
    pub(super) since_ns: u64,
}

/// Memory for an announced message once its second packet is here, bytes, unless it is shorter; later it has up to twice what
/// is here.
const FIRST_ROOM: usize = 64 << 10;

/// The payload of an unexpected message, or its announcement.
#[derive(Debug)]
pub(super) enum Body {
    Eager {
        bytes: Kept,
        ack: Option<u64>,
    },
    Rts {
        rts: Announcement,
        /// The unsolicited bytes that are here.
        bytes: Vec<u8>,
    },
    /// All bytes of an announced message whose sender has departed. No FIN is due.
    Whole(Vec<u8>),
    /// The sender departed before the bytes came, or there was no memory for them.
    Lost {
        len: u64,
        error: (i32, Cause),
    },
}

impl Unexpected {
    /// The sender's number of an announced message; 0 of others.
    pub(super) fn number(&self) -> u64 {
        if let Body::Rts { rts, .. } = &self.body { rts.tx } else { 0 }
    }

    pub(super) fn len(&self) -> usize {
        match &self.body {
            Body::Eager { bytes, .. } => bytes.len(),
            Body::Rts { rts, .. } => rts.len as usize,
            Body::Whole(bytes) => bytes.len(),
            Body::Lost { len, .. } => *len as usize,
        }
    }
}

impl Unexpected {
    /// Returns how many bytes need not be kept any more.
    pub(super) fn lose_sender(&mut self, error: i32) -> usize {
        match &mut self.body {
            Body::Rts { rts, bytes } if bytes.len() as u64 == rts.len => {
                self.body = Body::Whole(std::mem::take(bytes));
            }
            Body::Rts { rts, bytes } => {
                let dropped = bytes.len();
                self.body = Body::Lost { len: rts.len, error: (error, Cause::SenderLost) };
                return dropped;
            }
            // The sender no longer waits for a FIN, and its next incarnation at the same address would take the FIN for
            // one of its own messages.
            Body::Eager { ack, .. } => *ack = None,
            Body::Whole(_) | Body::Lost { .. } => {}
        }
        0
    }
}

/// The outcome of a matched receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    /// Bytes placed in the buffer.
    pub(super) len: usize,
    /// Bytes that did not fit.
    pub(super) overflow: usize,
    /// Any other failure: a positive error number and its cause.
    pub(super) error: Option<(i32, Cause)>,
}

impl Outcome {
    pub(super) fn failed(len: usize, error: (i32, Cause)) -> Self {
        Self { len, overflow: 0, error: Some(error) }
    }
}

/// The outcome of appending a fragment to an unexpected message.
pub(super) enum Appended {
    /// Refused: it is not the next fragment.
    No,
    /// Appended, and more unsolicited bytes will come (`More`) or this was the last fragment (`All`).
    More,
    All,
    /// The message is lost, with `kept` bytes that were here. `waits`: its sender waits for a FIN.
    NoMemory {
        kept: usize,
        waits: bool,
    },
}

#[cfg(test)]
impl Matching {
    /// The memory that announced messages take, bytes.
    pub(super) fn reserved(&mut self) -> usize {
        let held = |message: &Unexpected| match &message.body {
            Body::Rts { bytes, .. } => bytes.capacity(),
            _ => 0,
        };
        let lists = self.unexpected.lists_mut();
        lists.flat_map(|list| list.iter().map(|(_, m)| held(m))).sum()
    }

    /// What counts in `bytes` beside the payload of eager messages.
    pub(super) fn beside_eager(&mut self) -> usize {
        let held = |message: &Unexpected| match &message.body {
            Body::Rts { bytes, .. } | Body::Whole(bytes) => bytes.len(),
            Body::Eager { .. } => EACH,
            Body::Lost { .. } => 0,
        };
        let claimed: usize = self.claimed.values().map(held).sum();
        let lists = self.unexpected.lists_mut();
        claimed + lists.flat_map(|list| list.iter().map(|(_, m)| held(m))).sum::<usize>()
    }
}

impl Body {
    /// Appends a fragment to an unexpected message.
    pub(super) fn append(&mut self, offset: u64, payload: &[u8]) -> Appended {
        let Self::Rts { rts, bytes } = self else { return Appended::No };
        let end = offset.saturating_add(payload.len() as u64);
        if bytes.len() as u64 != offset || end > rts.pushed {
            return Appended::No;
        }
        // Announced bytes take no memory before they arrive; `Matching::bytes` counts those that have arrived.
        let room = (2 * bytes.len()).max(FIRST_ROOM).min(rts.pushed as usize) - bytes.len();
        let lacks = bytes.capacity() - bytes.len() < payload.len();
        if lacks
            && bytes.try_reserve_exact(room.max(payload.len())).is_err()
            && bytes.try_reserve_exact(payload.len()).is_err()
        {
            let (kept, waits, len) = (bytes.len(), !rts.leaves, rts.len);
            *self = Self::Lost { len, error: (libc::ENOMEM, Cause::ReceiverRefused) };
            return Appended::NoMemory { kept, waits };
        }
        bytes.extend_from_slice(payload);
        if end == rts.pushed { Appended::All } else { Appended::More }
    }
}

impl Body {
    /// No more unsolicited bytes of this message will come.
    pub(super) fn end_push(&mut self) {
        if let Self::Rts { rts, bytes } = self {
            if (bytes.len() as u64) < rts.pushed {
                rts.pushed = bytes.len() as u64;
                rts.broken = true;
            }
        }
    }
}
