//! What streams tell the layer above.

use crate::memory::SegmentList;
use crate::transport::{PeerId, StreamEnd};

/// The layer above; peers have the state machine's numbers.
pub(crate) trait StreamSink {
    /// The destination of the payload that follows; see [`crate::transport::Handler::place`].
    fn place(&mut self, peer: PeerId, header: &[u8], len: usize) -> Option<SegmentList>;
    /// The payload has arrived there.
    fn on_placed(&mut self, peer: PeerId, header: &[u8], len: usize);
    /// A frame whose payload had no destination.
    fn on_message(&mut self, peer: PeerId, header: &[u8], payload: &[u8]);
    /// A stream broke.
    fn on_lost(&mut self, peer: PeerId, end: StreamEnd);
}
