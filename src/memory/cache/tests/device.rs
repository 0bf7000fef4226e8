//! A device that copies the memory that it registers, so that it keeps the contents of that time. The kernel makes the
//! copy: a range with holes gives EFAULT, as with a real device.

use crate::memory::cache::{Access, Registrar, Span};
use crate::sys::cma::{self, Range};
use crate::sys::{Errno, process};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};

type Hook = Box<dyn Fn(Span) + Send + Sync>;

/// A device with room for `room` bytes; `during` runs at the end of each registration.
#[derive(Clone)]
pub(super) struct Copying(Arc<State>);

struct State {
    room: AtomicUsize,
    used: AtomicUsize,
    refuse_write: bool,
    registrations: AtomicU64,
    during: Option<Hook>,
}

pub(super) struct Copy {
    pub(super) span: Span,
    pub(super) access: Access,
    bytes: Vec<u8>,
    device: Arc<State>,
}

impl Copying {
    pub(super) fn new() -> Self {
        Self::with(usize::MAX, false, None)
    }

    pub(super) fn with(room: usize, refuse_write: bool, during: Option<Hook>) -> Self {
        let (used, room) = (AtomicUsize::new(0), AtomicUsize::new(room));
        Self(Arc::new(State { room, used, refuse_write, registrations: AtomicU64::new(0), during }))
    }

    pub(super) fn registered_bytes(&self) -> usize {
        self.0.used.load(SeqCst)
    }

    pub(super) fn registrations(&self) -> u64 {
        self.0.registrations.load(SeqCst)
    }

    pub(super) fn set_room(&self, bytes: usize) {
        self.0.room.store(bytes, SeqCst);
    }
}

impl Registrar for Copying {
    type Handle = Copy;

    fn register(&self, addr: usize, len: usize, access: Access) -> Result<Copy, Errno> {
        let state = &self.0;
        if state.refuse_write && access.contains(Access::WRITE) {
            return Err(Errno(libc::EFAULT));
        }
        if state.used.fetch_add(len, SeqCst).saturating_add(len) > state.room.load(SeqCst) {
            state.used.fetch_sub(len, SeqCst);
            return Err(Errno(libc::ENOMEM));
        }
        let span = Span { start: addr, end: addr + len };
        // From here on the bytes are deregistered on drop.
        let mut copy = Copy { span, access, bytes: vec![0; len], device: state.clone() };
        let local = [Range { addr: copy.bytes.as_mut_ptr() as u64, len: len as u64 }];
        let remote = [Range { addr: addr as u64, len: len as u64 }];
        // SAFETY: the local range is a vector of this function.
        if unsafe { cma::read(process::pid(), &local, &remote) }? < len {
            return Err(Errno(libc::EFAULT));
        }
        state.registrations.fetch_add(1, SeqCst);
        if let Some(during) = &state.during {
            during(span);
        }
        Ok(copy)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        self.device.used.fetch_sub(self.span.len(), SeqCst);
    }
}

/// A device's view of an address of the application through a registration.
pub(super) trait Device: Registrar {
    fn word(&self, handle: &Self::Handle, addr: usize) -> u64;

    /// Whether it sees writes of the application after the registration.
    const LIVE: bool;

    /// Writes a word into memory that was registered for that: a receive.
    fn receive(&self, handle: &Self::Handle, addr: usize, value: u64);

    /// Whether it sees the same bytes as the application, if it can move that many.
    fn shows(&self, _: &Self::Handle, _: usize, _: usize) -> bool {
        true
    }
}

impl Device for Copying {
    fn word(&self, handle: &Copy, addr: usize) -> u64 {
        let at = addr - handle.span.start;
        u64::from_ne_bytes(handle.bytes[at..at + 8].try_into().unwrap())
    }

    const LIVE: bool = false;

    fn receive(&self, _: &Copy, _: usize, _: u64) {
        unreachable!("what it writes, nobody would see");
    }
}
