//! The memory of the application: what it lent to an operation, and how bytes get in and out of it.

pub(crate) mod atomic;
pub(crate) mod cache;
pub(crate) mod declared;
pub(crate) mod keys;
pub(crate) mod region;

pub(crate) use region::{Buffers, MAX_SEGMENTS, OwnedBuffer, Segment, SegmentList};
