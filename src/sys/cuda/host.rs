//! Memory of the host that a device copies to and from by itself. A call that begins such a copy returns at once; with pageable
//! memory it lasts until the driver has staged the bytes (CUDA's API reference, "API synchronization behavior").

use super::driver::{Context, Cuda, Registering, done};
use crate::sys::pages::Pages;
use crate::sys::{Errno, process};

/// Memory of the provider, registered with the driver where that takes it.
#[derive(Debug)]
pub(crate) struct HostMemory {
    /// `None`: it was given up, because the driver may still have it.
    memory: Option<Pages>,
    registered: Option<Context>,
    home: process::Home,
}

impl HostMemory {
    /// `len` bytes, which no driver knows. Errors: ENOMEM.
    pub(crate) fn pageable(len: usize) -> Result<Self, Errno> {
        let memory = Some(Pages::anonymous(len)?);
        Ok(Self { memory, registered: None, home: process::Home::here() })
    }

    pub(crate) fn address(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.base().as_ptr().expose_provenance())
    }
}

impl Cuda {
    /// `len` bytes, registered for copies in a context. A driver that does not register them leaves them pageable. Errors: ENOMEM.
    pub(crate) fn host_memory(&self, context: Context, len: usize) -> Result<HostMemory, Errno> {
        let mut made = HostMemory::pageable(len)?;
        let (base, Some(known)) = (made.address(), self.registering) else { return Ok(made) };
        let registered = self.within(context.handle(), || {
            // SAFETY: the mapping that was just made; it is unregistered before it ends.
            done(unsafe { (known.register)(std::ptr::with_exposed_provenance_mut(base), len, 0) })
        });
        made.registered = registered.ok().map(|()| context);
        Ok(made)
    }

    /// Ends a registration. False: the driver may still have the memory.
    fn unregister(&self, known: Registering, context: Context, base: usize) -> bool {
        let asked = self.within(context.handle(), || {
            // A context takes its registrations with it.
            if !self.is_current(context) {
                return Ok(());
            }
            // SAFETY: what was registered.
            done(unsafe { (known.unregister)(std::ptr::with_exposed_provenance_mut(base)) })
        });
        asked.is_ok()
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let (Some(context), base) = (self.registered, self.address()) else { return };
        let Some(cuda) = Cuda::get().filter(|_| self.home.is_here()) else { return };
        let Some(known) = cuda.registering else { return };
        if !cuda.unregister(known, context, base) {
            std::mem::forget(self.memory.take());
        }
    }
}
