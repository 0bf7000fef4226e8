//! Application memory: the buffers that an operation borrows, copies to and from them, registration, atomic operations.

pub(crate) mod atomic;
pub(crate) mod bounce;
pub(crate) mod cache;
pub(crate) mod declared;
pub(crate) mod keys;
pub(crate) mod mover;
pub(crate) mod region;
pub(crate) mod settings;

pub(crate) use region::{ADDRESSES_END, Buffers, MAX_SEGMENTS, OwnedBuffer, Segment, SegmentList};
