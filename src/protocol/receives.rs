//! The queue that receives are posted to: an endpoint's own, or one that several endpoints share.

use super::index_list::{IndexList, Key, Server};
use super::packet::Envelope;
use super::queue::Pattern;
use super::spaces::{Space, Spaces};
use super::{ANY_SOURCE, Report};
use crate::memory::{Buffers, Segment, SegmentList};

/// A receive, as requested by the endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceiveOp<B = SegmentList> {
    /// The buffer.
    pub(crate) segments: B,
    /// Whether it matches tagged or plain messages.
    pub(crate) tagged: bool,
    /// The tag wanted, and the tag bits that are ignored (all of them for plain messages).
    pub(crate) tag: u64,
    pub(crate) ignore: u64,
    /// The sender wanted, or [`ANY_SOURCE`].
    pub(crate) source: u64,
    /// The application's context.
    pub(crate) context: u64,
    /// Where the completion is reported, and the receive context that the receive is posted to.
    pub(crate) report: Report,
    /// `Some(n)`: a multi-receive buffer, which takes messages until fewer than `n` bytes are free.
    pub(crate) multi_min: Option<usize>,
}

impl<B: Buffers> ReceiveOp<B> {
    #[inline(always)]
    pub(super) fn space(&self) -> Space {
        Space { rx: self.report.context(), tagged: self.tagged }
    }

    pub(super) fn pattern(&self) -> Pattern {
        Pattern::new(self.ignore, self.source)
    }
}

impl ReceiveOp {
    pub(super) fn claim(&self) -> (u8, u64) {
        (self.report.context(), self.context)
    }

    pub(super) fn envelope(&self) -> Envelope {
        let rx = self.report.context();
        Envelope { tagged: self.tagged, tag: self.tag, data: None, rx }
    }

    #[inline]
    pub(super) fn target(&self) -> Target {
        Target { segments: self.segments, context: self.context, report: self.report, multi: None }
    }
}

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

    /// See [`super::queue::Queue`].
    fn about(&self) -> (Pattern, (u64, u64)) {
        (Pattern::new(self.ignore, self.source), (self.tag, self.source))
    }

    /// What was asked for, but for the multi-receive buffer, which the target has.
    pub(super) fn op(&self, tagged: bool) -> ReceiveOp {
        let Self { source, tag, ignore, target: Target { segments, context, report, .. } } = *self;
        ReceiveOp { segments, tagged, tag, ignore, source, context, report, multi_min: None }
    }
}

/// Where the bytes and the completion of a matched message go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) segments: SegmentList,
    pub(super) context: u64,
    pub(super) report: Report,
    /// The multi-receive buffer that `segments` are a part of.
    pub(super) multi: Option<Key>,
}

/// Whether a posted receive matches a message with this tag from this source.
#[inline(always)]
fn matches(tag: u64, source: u64) -> impl Fn(&Posted) -> bool {
    move |p| (p.tag ^ tag) & !p.ignore == 0 && (p.source == ANY_SOURCE || p.source == source)
}

/// A complete message.
struct Arrival<'a> {
    tag: u64,
    source: u64,
    payload: &'a [u8],
}

impl Server<Posted> for Arrival<'_> {
    type Out = Filled;

    #[inline(always)]
    fn wants(&self, posted: &Posted) -> bool {
        matches(self.tag, self.source)(posted)
    }

    /// Only by a receive that is not a multi-receive and takes the message in one segment.
    #[inline(always)]
    fn serve(self, posted: &Posted) -> Option<Filled> {
        let Target { segments, context, report, multi } = &posted.target;
        if multi.is_some() || !segments.copy_in_one(0, self.payload) {
            return None;
        }
        Some(Filled { buffer: segments.first_addr(), context: *context, report: *report })
    }
}

/// A receive that was served by the fast path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filled {
    pub(super) buffer: u64,
    pub(super) context: u64,
    pub(super) report: Report,
}

/// A multi-receive buffer.
#[derive(Debug)]
struct MultiBuffer {
    segments: SegmentList,
    used: usize,
    min_free: usize,
    /// Messages whose bytes are still arriving.
    in_flight: usize,
    /// No further message is matched to it.
    retired: bool,
    /// Cancelled while messages were still arriving.
    cancelled: bool,
}

/// The state of a multi-receive buffer when one of its messages is complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PartEnd {
    /// Other messages follow, or are still arriving.
    Goes,
    /// The buffer is released with this message.
    Released,
    /// The receive was cancelled meanwhile, and ends now.
    Cancelled,
}

/// A receive queue: see the module.
#[derive(Debug)]
pub(crate) struct Receives {
    pub(super) posted: Spaces<Posted>,
    /// Receives of contexts that are being closed, in the order in which they were posted: no message matches them.
    held: Vec<(Space, Posted)>,
    buffers: IndexList<MultiBuffer>,
    /// The number of unexpected messages so far: endpoints that share the queue learn from it whose message came first.
    arrivals: u64,
}

impl Receives {
    /// A queue for so many receive contexts.
    pub(crate) fn new(contexts: usize) -> Self {
        let (posted, buffers) = (Spaces::new(contexts), IndexList::default());
        Self { posted, held: Vec::new(), buffers, arrivals: 0 }
    }

    /// Number of posted receives.
    pub(crate) fn len(&self) -> usize {
        self.posted.len()
    }

    /// The sources that posted receives name.
    pub(crate) fn sources(&self) -> impl Iterator<Item = u64> {
        self.posted.iter().map(|posted| posted.source).filter(|source| *source != ANY_SOURCE)
    }

    /// Whether a posted receive names this source.
    pub(crate) fn want(&self, source: u64) -> bool {
        self.sources().any(|wanted| wanted == source)
    }

    /// The source of the receive that was posted last, if that names one.
    pub(super) fn awaited(&self) -> Option<u64> {
        self.posted.newest().map(|posted| posted.source).find(|source| *source != ANY_SOURCE)
    }

    /// Receives that want `from` want `to` from now on.
    pub(super) fn rename_source(&mut self, from: u64, to: u64) {
        for list in self.posted.lists_mut() {
            list.change(|posted| posted.source == from, |posted| posted.source = to);
        }
        let held = self.held.iter_mut().map(|(_, posted)| posted);
        held.filter(|posted| posted.source == from).for_each(|posted| posted.source = to);
    }

    /// Takes the posted receives of a context out of their lists.
    pub(super) fn hold(&mut self, rx: u8) {
        for tagged in [true, false] {
            let space = Space { rx, tagged };
            let list = self.posted.of(space);
            let keys = list.keys_where(|_| true).into_iter();
            self.held.extend(keys.filter_map(|key| list.remove(key)).map(|posted| (space, posted)));
        }
    }

    /// The receives of a context that were held.
    pub(super) fn take_held(&mut self, rx: u8) -> Vec<(Space, Posted)> {
        let (taken, kept) = self.held.drain(..).partition(|(space, _)| space.rx == rx);
        self.held = kept;
        taken
    }

    /// The receive of a context that was held and has this context of the application.
    pub(super) fn take_held_one(&mut self, rx: u8, context: u64) -> Option<(Space, Posted)> {
        let is_it =
            |(space, posted): &(Space, Posted)| space.rx == rx && posted.target.context == context;
        let at = self.held.iter().position(is_it)?;
        Some(self.held.remove(at))
    }

    /// Posts a receive.
    pub(crate) fn post(&mut self, op: &ReceiveOp) {
        let target = self.target(op);
        self.post_at(op, target);
    }

    #[inline]
    pub(super) fn post_at(&mut self, op: &ReceiveOp, target: Target) {
        let about = || (Some(op.pattern()), (op.tag, op.source));
        self.posted.of(op.space()).push_back(Posted::new(op, target), about);
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
        let about = || (Some(Pattern::new(ignore, source)), (tag, source));
        self.posted.of(space).push_back(Posted { source, tag, ignore, target }, about);
    }

    /// The target of a receive. Registers the buffer of a multi-receive.
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
        let list = self.posted.of(space);
        list.first_for((tag, source), matches(tag, source), Posted::about)
    }

    /// Serves the first posted receive that matches with a complete message, if it is not a multi-receive and takes the
    /// message in one segment.
    #[inline(always)]
    pub(super) fn fill(
        &mut self,
        space: Space,
        tag: u64,
        payload: &[u8],
        source: u64,
    ) -> Option<Filled> {
        self.posted.of(space).serve_first(Arrival { tag, source, payload })
    }

    /// Takes the first posted receive that matches out of the list, or reserves space in its multi-receive buffer.
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

    /// Reserves space for a message of `len` bytes in a multi-receive buffer. Other targets stay as they are.
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

    /// Whether a multi-receive buffer takes no more messages.
    pub(super) fn is_retired(&self, multi: Key) -> bool {
        self.buffers.get(multi).is_none_or(|buffer| buffer.retired)
    }

    /// A message of a multi-receive buffer is complete or has failed.
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

    /// Ends a receive that was taken out of its list. False: messages are still arriving in its multi-receive buffer,
    /// which is released with the last of them.
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

    /// Counts an unexpected message, and returns its number.
    pub(super) fn count_arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }

    #[cfg(test)]
    pub(super) fn has_buffers(&self) -> bool {
        !self.buffers.is_empty()
    }
}
