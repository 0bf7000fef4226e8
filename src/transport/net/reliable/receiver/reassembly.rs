//! Reassembly of messages from the frames of one or several packets.

use super::super::packet::{Frame, MESSAGE_MAX};
use crate::transport::MAX_HEADER;
use Fault::{Malformed, NoMemory};

/// Why a packet's frames were not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// They make no sense.
    Malformed,
    /// There is no memory for the message that they belong to.
    NoMemory,
}

/// A message whose beginning has arrived.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    header: Vec<u8>,
    payload: Vec<u8>,
    total: usize,
}

/// The reassembly of one connection.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    /// Messages delivered to the layer above.
    pub(crate) delivered: u64,
    begun: Option<Box<Assembly>>,
}

impl Reassembly {
    /// No message is incomplete.
    pub(super) fn is_idle(&self) -> bool {
        self.begun.is_none()
    }

    /// Takes the frames of the next packet, and delivers the messages that end in it. `spare`: memory in which the last
    /// message of several packets was reassembled.
    pub(super) fn take(
        &mut self,
        mut frames: &[u8],
        spare: &mut Option<Box<Assembly>>,
        on_message: &mut impl FnMut(&[u8], &[u8]),
    ) -> Result<(), Fault> {
        while !frames.is_empty() {
            let (frame, rest) = Frame::decode(frames).ok_or(Malformed)?;
            frames = rest;
            match frame {
                Frame::Whole { header, payload } => {
                    if self.begun.is_some() {
                        return Err(Malformed);
                    }
                    self.delivered += 1;
                    on_message(header, payload);
                }
                Frame::First { total, header, payload } => {
                    self.begin(spare.take().unwrap_or_default(), total, header, payload)?;
                }
                Frame::More { payload } => self.add(payload)?,
                Frame::Last { payload } => {
                    self.add(payload)?;
                    let whole = self.begun.take().ok_or(Malformed)?;
                    if whole.payload.len() != whole.total {
                        return Err(Malformed);
                    }
                    self.delivered += 1;
                    on_message(&whole.header, &whole.payload);
                    *spare = Some(whole);
                }
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        mut assembly: Box<Assembly>,
        total: usize,
        header: &[u8],
        payload: &[u8],
    ) -> Result<(), Fault> {
        let fits = total <= MESSAGE_MAX && payload.len() <= total && header.len() <= MAX_HEADER;
        if self.begun.is_some() || !fits {
            return Err(Malformed);
        }
        assembly.header.clear();
        assembly.header.extend_from_slice(header);
        assembly.total = total;
        assembly.payload.clear();
        assembly.payload.try_reserve(total).map_err(|_| NoMemory)?;
        assembly.payload.extend_from_slice(payload);
        self.begun = Some(assembly);
        Ok(())
    }

    fn add(&mut self, payload: &[u8]) -> Result<(), Fault> {
        let assembly = self.begun.as_mut().ok_or(Malformed)?;
        if assembly.payload.len() + payload.len() > assembly.total {
            return Err(Malformed);
        }
        assembly.payload.extend_from_slice(payload);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::packet::{FIRST_FRAME_LEN, put_frame};
    use super::*;

    /// Encodes frames: kind, header, payload, and the total of a first one.
    fn packet(frames: &[(u8, &[u8], &[u8], usize)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (kind, header, payload, total) in frames {
            let mut front = [0; FIRST_FRAME_LEN + 255];
            let at = put_frame(&mut front, *kind, header, payload.len(), *total);
            bytes.extend_from_slice(&front[..at]);
            bytes.extend_from_slice(payload);
        }
        bytes
    }

    /// The messages in `packets`, and whether all packets were valid.
    fn taken(packets: &[Vec<u8>]) -> (Vec<[Vec<u8>; 2]>, bool) {
        let (mut messages, mut spare) = (Vec::new(), None);
        let mut reassembly = Reassembly::default();
        let mut give = |h: &[u8], p: &[u8]| messages.push([h.to_vec(), p.to_vec()]);
        let ok = packets.iter().all(|p| reassembly.take(p, &mut spare, &mut give).is_ok());
        assert_eq!(reassembly.delivered, messages.len() as u64);
        (messages, ok)
    }

    #[test]
    fn frames_become_messages() {
        let message = |h: &[u8], p: &[u8]| [h.to_vec(), p.to_vec()];
        let parts = [
            packet(&[(0, b"a", b"one", 0), (1, b"b", b"tw", 5)]),
            packet(&[]),
            packet(&[(2, b"", b"o", 0)]),
            packet(&[(3, b"", b"oo", 0), (0, b"c", b"", 0)]),
        ];
        let expected = vec![message(b"a", b"one"), message(b"b", b"twooo"), message(b"c", b"")];
        assert_eq!(taken(&parts), (expected, true));
    }

    #[test]
    fn frames_that_make_no_sense_are_refused() {
        for bad in [
            packet(&[(2, b"", b"x", 0)]),                      // more of nothing
            packet(&[(3, b"", b"x", 0)]),                      // the end of nothing
            packet(&[(1, b"h", b"xy", 1)]),                    // more than all
            packet(&[(1, b"h", b"x", MESSAGE_MAX + 1)]),       // too long
            packet(&[(1, b"h", b"x", 2), (0, b"h", b"", 0)]),  // a message within another
            packet(&[(1, b"h", b"x", 2), (1, b"h", b"x", 2)]), // two at once
            packet(&[(1, b"h", b"x", 2), (2, b"", b"xy", 0)]), // too much
            packet(&[(1, b"h", b"x", 3), (3, b"", b"y", 0)]),  // too little
            packet(&[(1, &[0; MAX_HEADER + 1], b"x", 3)]),     // a header too long
            packet(&[(0, b"h", b"x", 0)])[..4].to_vec(),       // cut off
        ] {
            assert_eq!(taken(std::slice::from_ref(&bad)), (Vec::new(), false), "{bad:?}");
        }
    }
}
