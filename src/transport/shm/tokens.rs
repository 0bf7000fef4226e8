//! What an endpoint watches, as tokens of its set: the kind in the upper half, and which one in the lower.

pub(super) const TOKEN_LISTENER: u64 = 1;
pub(super) const TOKEN_GREETING: u64 = 1 << 32;
pub(super) const TOKEN_OUTBOUND: u64 = 2 << 32;
pub(super) const TOKEN_INBOUND: u64 = 3 << 32;
pub(super) const TOKEN_PROCESS: u64 = 4 << 32;
pub(super) const TOKEN_BELL: u64 = 2;
