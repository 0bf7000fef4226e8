//! A link of this endpoint to a peer: its ring, and how the peer is woken.

use super::copy_rate::{CopyRate, TIMED_LEAST};
use super::hints::Hint;
use super::layout;
use super::ring::{Full, Producer, Wake};
use crate::sys::bell::{Bell, Ring};
use crate::sys::cancel::Shield;
use crate::sys::clock;
use crate::sys::order::fence;
use crate::telemetry::log;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A link to a peer.
#[derive(Debug)]
pub(super) struct Outbound {
    pub(super) producer: Producer,
    /// Identity of its segment.
    pub(super) identity: u32,
    /// The connection, until the receiver has answered; afterwards only between processes that do not both see each
    /// other's id.
    pub(super) socket: Option<OwnedFd>,
    pub(super) pid: i32,
    /// The peer's port.
    pub(super) port: u16,
    /// When the link was made, nanoseconds.
    pub(super) since: u64,
    pub(super) bell: Arc<Bell>,
    /// The link's bit in the receiver's words.
    pub(super) hint: Option<Hint>,
    /// The receiver's features and its incarnation, as in its connect reply.
    pub(super) features: Option<u32>,
    pub(super) nonce: Option<u64>,
    pub(super) copy_rate: CopyRate,
}

/// By peer.
pub(super) type Outbounds = Vec<Option<Box<Outbound>>>;

impl Outbound {
    /// A message was published: wakes the receiver if necessary.
    #[inline]
    pub(super) fn tell(&mut self, published: Wake) {
        match published {
            Wake::NotNeeded => {}
            Wake::Needed => self.wake(Ring::Message),
            Wake::Hint => self.raise(),
        }
    }

    /// A message was published in a ring at which the receiver does not look.
    #[cold]
    fn raise(&self) {
        if self.hint.as_ref().is_some_and(Hint::raise) {
            self.wake(Ring::Message);
        }
    }

    /// Rings the receiver's doorbell, once the receiver has accepted the link.
    #[cold]
    pub(super) fn wake(&self, why: Ring) {
        let _shield = Shield::raise();
        // A receiver that stores its doorbell looks whether the link was closed before that.
        fence();
        if let Some(bell) = layout::receivers_bell(self.producer.memory()) {
            self.bell.ring(bell, why);
        }
    }

    /// Publishes a message with `len` bytes of payload by `push`, and times that if it is due.
    #[inline]
    pub(super) fn timed(
        &mut self,
        len: usize,
        push: impl FnOnce(&mut Self) -> Result<Wake, Full>,
    ) -> Result<Wake, Full> {
        if len < TIMED_LEAST || !self.copy_rate.is_due() {
            return push(self);
        }
        if self.producer.is_half_full() {
            self.copy_rate.put_off();
            return push(self);
        }
        let begun = clock::now_ns();
        let pushed = push(self);
        if pushed.is_ok() {
            self.judge(len, clock::now_ns().saturating_sub(begun));
        }
        pushed
    }

    #[cold]
    fn judge(&mut self, len: usize, ns: u64) {
        if self.copy_rate.note(len, ns) && !std::mem::replace(&mut self.copy_rate.said, true) {
            log::info(format_args!(
                "what goes to pid {} through shared memory goes slowly: it reads long messages from our memory while that is so",
                self.pid,
            ));
        }
    }
}
