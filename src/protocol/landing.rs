//! A message for device memory that arrives in packets: its bytes are gathered in bounce buffers, and the copy of one buffer to the
//! device runs while the next one is filled. Where the peer's device writes to bounce buffers, they are copied in the same way.
//!
//! No call waits for a copy. While [`UNDER_WAY`] copies of a message have not ended, its endpoint takes nothing from the network, which
//! slows the senders down. So a message has this many buffers at most, and those that one pass fills.

use crate::memory::SegmentList;
use crate::memory::bounce::{Copied, Gathered};
use crate::memory::mover::Failure;
use std::collections::VecDeque;

/// Copies of a message, not yet ended, at which its endpoint takes nothing more from the network.
const UNDER_WAY: usize = 8;

/// Bytes of a message that have arrived, and that the device may not have yet.
#[derive(Debug, Default)]
pub(super) struct Landing {
    /// The buffer that the next bytes belong to; none is left when the message is whole.
    filling: Option<Gathered>,
    copies: VecDeque<Copied>,
    /// The sender has left, and gets no answer.
    pub(super) orphaned: bool,
}

impl Landing {
    /// Takes the bytes that belong to the beginning of `rest`, the part of the receive buffer whose bytes are missing. Returns how many
    /// were taken: less than all if the driver has failed.
    #[cold]
    pub(super) fn take(&mut self, rest: &SegmentList, bytes: &[u8]) -> usize {
        let mut taken = 0;
        while let Some(left @ [_, ..]) = bytes.get(taken..) {
            match self.take_some(rest, taken, left) {
                Ok(some) if some > 0 => taken += some,
                _ => break,
            }
        }
        taken
    }

    /// Takes the first of `bytes`, which belong to `at` in `rest`: as many as one bounce buffer, or one segment of the host's, has room for.
    /// Failures: those of the driver.
    fn take_some(&mut self, rest: &SegmentList, at: usize, bytes: &[u8]) -> Result<usize, Failure> {
        let filling = match self.filling.take() {
            None => Gathered::begin(rest, (at, rest.len() - at), false)?,
            filling => filling,
        };
        let Some(mut filling) = filling else {
            let here = rest.piece(at, bytes.len()).len();
            return Ok(rest.copy_in(at, bytes.get(..here).unwrap_or(bytes)));
        };
        let taken = filling.fill(bytes);
        match filling.is_full() {
            true => self.copies.push_back(filling.copy()?),
            false => self.filling = Some(filling),
        }
        Ok(taken)
    }

    /// Begins to copy a buffer that a device has filled. False: the driver has failed.
    pub(super) fn add(&mut self, buffer: Gathered) -> bool {
        buffer.copy().map(|copy| self.copies.push_back(copy)).is_ok()
    }

    /// Whether all copies that were begun have ended. Failures: those of the driver.
    pub(super) fn have_ended(&mut self) -> Result<bool, Failure> {
        while let Some(copy) = self.copies.front_mut() {
            if !copy.is_in_place()? {
                return Ok(false);
            }
            self.copies.pop_front();
        }
        Ok(true)
    }

    /// Waits for the copies that were begun, and drops all other bytes.
    pub(super) fn end(&mut self) {
        self.filling = None;
        self.copies.clear();
    }

    pub(super) fn is_under_way(&self) -> bool {
        !self.copies.is_empty()
    }

    /// No more bytes should be taken from the network now.
    pub(super) fn is_full(&self) -> bool {
        self.copies.len() >= UNDER_WAY
    }
}
