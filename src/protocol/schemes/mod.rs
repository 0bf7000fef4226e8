//! The ways in which a message travels. Each file holds both halves of one: what the sender and the receiver keep, and
//! the packets that they exchange.

pub(super) mod eager;
pub(super) mod fragments;
pub(super) mod get;
pub(super) mod push;
pub(super) mod put;
pub(super) mod split;
pub(super) mod write;
