//! A message in device memory that is sent in packets: its parts are copied to memory of the host one after the other, and the
//! copies of the next parts run while one is sent. So it takes [`AHEAD`] bounce buffers, however long it is.

use super::flow::Source;
use crate::memory::SegmentList;
use crate::memory::bounce::Part;
use crate::memory::mover::Failure;
use std::collections::VecDeque;

/// Parts that are copied or sent at a time.
const AHEAD: usize = 4;

/// The parts that are in memory of the host, or are being copied there.
#[derive(Debug)]
pub(super) struct Staging {
    /// Without gaps, in order.
    parts: VecDeque<Part>,
    /// Offset of the first one.
    first: usize,
    /// Offset of the next copy.
    next: usize,
    end: usize,
}

impl Staging {
    /// The bytes from `from` to `end` of a message.
    pub(super) fn new(from: usize, end: usize) -> Self {
        Self { parts: VecDeque::new(), first: from, next: from, end }
    }

    /// The part to be sent from `at` on is not in memory of the host yet: nothing but a question tells when it is.
    pub(super) fn asks(&self, at: usize) -> bool {
        let mut behind = self.first;
        let front = self.parts.iter().find(|part| {
            behind += part.len();
            behind > at
        });
        front.map_or(self.next < self.end, Part::is_under_way)
    }

    /// What can be sent of `message` from `at` on; the bytes before are sent. `None`: nothing yet. Failures: those of the driver.
    pub(super) fn source(
        &mut self,
        message: &SegmentList,
        at: usize,
    ) -> Result<Option<Source>, Failure> {
        while let Some(part) = self.parts.front().filter(|part| self.first + part.len() <= at) {
            self.first += part.len();
            self.parts.pop_front();
        }
        while self.parts.len() < AHEAD && self.next < self.end {
            let ahead = !self.parts.is_empty();
            let Some(part) = Part::begin(message, (self.next, self.end - self.next), ahead)? else {
                break;
            };
            self.next += part.len();
            self.parts.push_back(part);
        }
        let Some(part) = self.parts.front_mut() else { return Ok(None) };
        let bytes = part.bytes()?;
        Ok(bytes.map(|bytes| Source { bytes, from: self.first, message: message.len() }))
    }
}
