//! The queue that receives are posted to: an endpoint's own, or one that several endpoints share.

use super::index_list::{IndexList, Key};
use super::receive::ReceiveOp;
use super::spaces::{Space, Spaces};
use super::{ANY_SOURCE, Report};
use crate::memory::{Segment, SegmentList};

/// A posted receive.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) source: u64,
    pub(super) tag: u64,
    ignore: u64,
    pub(super) target: Target,
}

impl Posted {
    pub(super) fn new(op: &ReceiveOp, target: Target) -> Self {
        Self { source: op.source, tag: op.tag, ignore: op.ignore, target }
    }
}

/// Where a matched message goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) segments: SegmentList,
    pub(super) context: u64,
    pub(super) report: Report,
    /// Part of this multi-receive buffer.
    pub(super) multi: Option<Key>,
}

/// Whether a posted receive is for a message with this tag from there.
#[inline(always)]
fn matches(tag: u64, source: u64) -> impl Fn(&Posted) -> bool {
    move |p| (p.tag ^ tag) & !p.ignore == 0 && (p.source == ANY_SOURCE || p.source == source)
}

/// A receive that has its message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filled {
    pub(super) buffer: u64,
    pub(super) context: u64,
    pub(super) report: Report,
}

/// A buffer that takes several messages.
#[derive(Debug)]
struct MultiBuffer {
    segments: SegmentList,
    used: usize,
    min_free: usize,
    /// Messages being placed.
    in_flight: usize,
    /// No further message is matched.
    retired: bool,
    /// Cancelled while messages were being placed.
    cancelled: bool,
}

/// What becomes of a multi-receive buffer when one of its messages is in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PartEnd {
    /// Others follow, or are being placed.
    Goes,
    /// It goes back to the application with this message.
    Released,
    /// It was cancelled meanwhile.
    Cancelled,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Receives {
    pub(super) posted: Spaces<Posted>,
    buffers: IndexList<MultiBuffer>,
    /// Messages that came before their receive: endpoints that share the queue tell by it whose came
    /// first.
    arrivals: u64,
}

impl Receives {
    /// For so many receive contexts.
    pub(crate) fn new(contexts: usize) -> Self {
        Self { posted: Spaces::new(contexts), buffers: IndexList::default(), arrivals: 0 }
    }

    /// Receives that wait for a message.
    pub(crate) fn len(&self) -> usize {
        self.posted.len()
    }

    /// Posts a receive.
    pub(crate) fn post(&mut self, op: &ReceiveOp) {
        let target = self.target(op);
        self.post_at(op, target);
    }

    #[inline]
    pub(super) fn post_at(&mut self, op: &ReceiveOp, target: Target) {
        self.posted.of(op.space()).push_back(Posted::new(op, target));
    }

    /// Posts a receive of one message into one segment.
    #[inline(always)]
    pub(super) fn post_segment(
        &mut self,
        (space, tag, ignore): (Space, u64, u64),
        source: u64,
        segment: Segment,
        (context, report): (u64, Report),
    ) {
        let target = Target { segments: segment.into(), context, report, multi: None };
        self.posted.of(space).push_back(Posted { source, tag, ignore, target });
    }

    /// Where messages for a receive go; for one that takes several, its buffer is made known.
    pub(super) fn target(&mut self, op: &ReceiveOp) -> Target {
        let multi = op.multi_min.map(|min| {
            self.buffers.push_back(MultiBuffer {
                segments: op.segments,
                used: 0,
                min_free: min.max(1),
                in_flight: 0,
                retired: false,
                cancelled: false,
            })
        });
        Target { multi, ..op.target() }
    }

    /// The first posted receive that matches.
    #[inline]
    fn find(&mut self, space: Space, tag: u64, source: u64) -> Option<Key> {
        let matches = matches(tag, source);
        let mut posted = self.posted.of(space).iter();
        posted.find(|(_, p)| matches(p)).map(|(key, _)| key)
    }

    /// Serves the first posted receive that matches with all of a message, if it is for one message
    /// and takes it in one piece.
    #[inline(always)]
    pub(super) fn fill(
        &mut self,
        space: Space,
        tag: u64,
        payload: &[u8],
        source: u64,
    ) -> Option<Filled> {
        let list = self.posted.of(space);
        list.serve_first(matches(tag, source), |posted| {
            let Target { segments, context, report, multi } = &posted.target;
            if multi.is_some() || !segments.copy_in_one(0, payload) {
                return None;
            }
            Some(Filled { buffer: segments.first_addr(), context: *context, report: *report })
        })
    }

    /// Takes the first posted receive that matches out of the list (or reserves its part).
    #[inline]
    pub(super) fn take(
        &mut self,
        space: Space,
        tag: u64,
        len: usize,
        source: u64,
    ) -> Option<Target> {
        let key = self.find(space, tag, source)?;
        let list = self.posted.of(space);
        let target = list.get(key)?.target;
        let Some(multi) = target.multi else {
            return list.remove(key).map(|posted| posted.target);
        };
        let part = self.reserve(target, len);
        if self.is_retired(multi) {
            self.posted.of(space).remove(key);
        }
        Some(part)
    }

    /// The part of a multi-receive buffer that the next message gets; other targets as they are.
    #[inline]
    pub(super) fn reserve(&mut self, target: Target, len: usize) -> Target {
        let Some(buffer) = target.multi.and_then(|multi| self.buffers.get_mut(multi)) else {
            return target;
        };
        let segments = buffer.segments.slice(buffer.used, len);
        buffer.used += segments.len();
        buffer.in_flight += 1;
        buffer.retired = buffer.segments.len() - buffer.used < buffer.min_free;
        Target { segments, ..target }
    }

    /// Whether a buffer takes no more messages.
    pub(super) fn is_retired(&self, multi: Key) -> bool {
        self.buffers.get(multi).is_none_or(|buffer| buffer.retired)
    }

    /// A message is in its part of a buffer, or failed to get there.
    pub(super) fn end_part(&mut self, multi: Key) -> PartEnd {
        let Some(buffer) = self.buffers.get_mut(multi) else { return PartEnd::Goes };
        buffer.in_flight = buffer.in_flight.saturating_sub(1);
        if !buffer.retired || buffer.in_flight > 0 {
            return PartEnd::Goes;
        }
        let cancelled = buffer.cancelled;
        self.buffers.remove(multi);
        if cancelled { PartEnd::Cancelled } else { PartEnd::Released }
    }

    /// A receive that was taken out of its list ends. False: messages are on their way to its buffer,
    /// which goes back with the last of them.
    pub(super) fn withdraw(&mut self, target: &Target, cancelled: bool) -> bool {
        let Some(multi) = target.multi else { return true };
        if let Some(buffer) = self.buffers.get_mut(multi).filter(|buffer| buffer.in_flight > 0) {
            buffer.retired = true;
            buffer.cancelled = cancelled;
            return false;
        }
        self.buffers.remove(multi);
        true
    }

    /// The number of a message that came before its receive.
    pub(super) fn count_arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }

    #[cfg(test)]
    pub(super) fn has_buffers(&self) -> bool {
        !self.buffers.is_empty()
    }
}
