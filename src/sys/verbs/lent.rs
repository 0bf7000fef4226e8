//! Packets that a queue pair sends from where they were made.

use super::mr::{Permission, Registrar, Registration};
use crate::sys::packets::{PART, PARTS, Pool};
use std::sync::Arc;

/// A part of the pool, as the device knows it.
#[derive(Debug)]
enum Part {
    /// Not yet: nothing of it was sent.
    New,
    Known(Registration),
    /// It does not take it, or the process may lock no more memory.
    Refused,
}

/// The pool of one queue pair. It ends after that one, and then nothing of the pool is under way.
#[derive(Debug)]
pub(super) struct Lent {
    pool: Arc<Pool>,
    registrar: Registrar,
    parts: [Part; PARTS],
    /// Packets posted to queue pairs before this one, and counted here.
    before: u64,
}

impl Lent {
    pub(super) fn new(pool: Arc<Pool>, registrar: Registrar) -> Self {
        let before = pool.posted();
        Self { pool, registrar, parts: std::array::from_fn(|_| Part::New), before }
    }

    /// The key by which the device reads `bytes`; `None`: it does not.
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

    /// Of this queue pair's, so many were posted so far.
    #[inline]
    pub(super) fn note_posted(&self, count: u64) {
        self.pool.set_posted(self.before + count);
    }

    /// Of them, so many are complete.
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
