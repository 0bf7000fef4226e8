//! Sends packets directly from the memory in which they were made: registers a pool with a queue pair's device.

use super::mr::{Permission, Registrar, Registration};
use crate::sys::packets::{PART, PARTS, Pool};
use std::sync::Arc;

/// The registration of a part of the pool.
#[derive(Debug)]
enum Part {
    /// Not registered yet: no packet in it was sent.
    New,
    Known(Registration),
    /// The device refused it, or RLIMIT_MEMLOCK is exhausted.
    Refused,
}

/// The pool of one queue pair. It is dropped after the queue pair, when no packet of the pool is under way.
#[derive(Debug)]
pub(super) struct Lent {
    pool: Arc<Pool>,
    registrar: Registrar,
    parts: [Part; PARTS],
    /// Packets posted to earlier queue pairs, included in the pool's count.
    before: u64,
}

impl Lent {
    pub(super) fn new(pool: Arc<Pool>, registrar: Registrar) -> Self {
        let before = pool.posted();
        Self { pool, registrar, parts: std::array::from_fn(|_| Part::New), before }
    }

    /// The key by which the device can read `bytes`; `None`: it cannot.
    #[inline]
    pub(super) fn key_of(&mut self, bytes: &[u8]) -> Option<u32> {
        let at = self.pool.part_of(bytes)?;
        match self.parts.get(at)? {
            Part::Known(registration) => Some(registration.lkey()),
            Part::Refused => None,
            Part::New => self.learn(at),
        }
    }

    #[cold]
    fn learn(&mut self, at: usize) -> Option<u32> {
        let base = self.pool.part(at)?.as_ptr().expose_provenance();
        let (part, key) = match self.registrar.register(base, PART, Permission::Read) {
            Ok(registration) => {
                let key = registration.lkey();
                (Part::Known(registration), Some(key))
            }
            Err(_) => (Part::Refused, None),
        };
        *self.parts.get_mut(at)? = part;
        key
    }

    /// So many packets were posted to this queue pair so far.
    #[inline]
    pub(super) fn note_posted(&self, count: u64) {
        self.pool.set_posted(self.before + count);
    }

    /// So many of them are complete.
    #[inline]
    pub(super) fn note_complete(&self, count: u64) {
        self.pool.set_complete(self.before + count);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.set_complete(self.pool.posted());
    }
}
