//! Streams of the simulated network. Frames come after the messages that were sent before them, arrive in two steps,
//! and are lost from some point on when the stream breaks.

use super::rng::Rng;
use crate::memory::SegmentList;
use crate::transport::StreamEnd;
use std::collections::VecDeque;

/// The reading of frames at one reader's end.
#[derive(Debug, Default)]
pub(super) struct Way {
    /// What `place` returned for the first frame, once it was called.
    pub(super) target: Option<Option<SegmentList>>,
}

#[derive(Debug)]
struct Frame {
    number: u32,
    after: u64,
    header: Vec<u8>,
    payload: Vec<u8>,
}

/// The stream from one endpoint to another, and those before it.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Messages that the writer has sent, and the reader has taken.
    pub(super) sent: u64,
    pub(super) delivered: u64,
    frames: VecDeque<Frame>,
    number: u32,
    open: bool,
    /// The stream broke, and the writer has not noticed.
    broken: bool,
    /// The reader has noticed.
    told: bool,
    /// The writer has noticed, and has not reported it yet.
    noticed: Option<u32>,
    pub(super) way: Way,
}

/// An event at one end.
#[derive(Debug)]
pub(super) enum Step {
    Lost(StreamEnd),
    /// A frame begins: its header and length.
    Begin(Vec<u8>, usize),
    /// All of its bytes are there.
    Placed(Vec<u8>, Vec<u8>, Option<SegmentList>),
}

impl Flow {
    /// Whether nothing is on its way, and both ends have learned of all losses.
    pub(super) fn is_idle(&self) -> bool {
        self.frames.is_empty() && self.noticed.is_none() && !(self.broken && self.open)
    }

    pub(super) fn open(&mut self) -> bool {
        if !self.open && self.noticed.is_none() {
            self.open = true;
            self.broken = false;
            self.told = false;
            self.number += 1;
        }
        self.open
    }

    /// Takes a frame. False: not now.
    pub(super) fn send(&mut self, header: &[u8], payload: Vec<u8>, room: usize) -> bool {
        if self.broken || !self.open {
            self.notice();
            return false;
        }
        if self.frames.len() >= room {
            return false;
        }
        let (number, after, header) = (self.number, self.sent, header.to_vec());
        self.frames.push_back(Frame { number, after, header, payload });
        true
    }

    fn notice(&mut self) {
        self.open = false;
        self.noticed = Some(self.number);
    }

    /// The number of a broken stream that the reader has to be told, once.
    pub(super) fn take_broken(&mut self) -> Option<u32> {
        // The reader has closed its end.
        if self.told && self.open {
            self.notice();
        }
        self.noticed.take()
    }

    /// The reader learns that streams up to `number` broke.
    pub(super) fn drop_until(&mut self, number: u32) {
        if self.frames.front().is_some_and(|frame| frame.number <= number) {
            self.way = Way::default();
        }
        self.frames.retain(|frame| frame.number > number);
    }

    /// The reader closes its end.
    pub(super) fn end_at_reader(&mut self) {
        self.frames.clear();
        self.way = Way::default();
        (self.broken, self.told) = (true, true);
    }

    /// The next event at the reader. The stream breaks `breaks` times in 1000.
    pub(super) fn step(&mut self, rng: &mut Rng, breaks: u64) -> Option<Step> {
        if self.open && !self.broken && rng.next() % 1000 < breaks {
            // The frames on their way arrive in part.
            self.broken = true;
            let keep = rng.below(self.frames.len() + 1);
            self.frames.truncate(keep);
            if keep == 0 {
                self.way = Way::default();
            }
            if rng.percent(50) {
                self.notice();
            }
            if rng.percent(50) {
                self.frames.clear();
                self.way = Way::default();
                self.told = true;
                return Some(Step::Lost(StreamEnd::Incoming));
            }
        }
        if self.broken && !self.told && self.frames.is_empty() && rng.percent(20) {
            self.told = true;
            return Some(Step::Lost(StreamEnd::Incoming));
        }
        let frame = self.frames.front().filter(|frame| frame.after <= self.delivered)?;
        match self.way.target.take() {
            None => Some(Step::Begin(frame.header.clone(), frame.payload.len())),
            Some(target) if rng.percent(30) => {
                self.way.target = Some(target); // half of the frame is there
                None
            }
            Some(target) => {
                let Frame { header, payload, .. } = self.frames.pop_front()?;
                Some(Step::Placed(header, payload, target))
            }
        }
    }
}
