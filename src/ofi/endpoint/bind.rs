//! `fi_ep_bind`: the objects that an endpoint reports to and takes receives from.

use super::contexts::Role;
use super::shared::{ReceiveFid, TransmitFid};
use super::state::{Bindings, Endpoint, EndpointFid, QueueBinding};
use crate::ofi::cntr::{self, Counter};
use crate::ofi::cq::{self, CompletionQueue};
use crate::ofi::guard::{code, entry};
use crate::ofi::lock::Hold;
use crate::ofi::own::own;
use crate::ofi::{av, eq, slots};
use libfabric_sys::{
    FI_CLASS_AV, FI_CLASS_CNTR, FI_CLASS_CQ, FI_CLASS_EQ, FI_CLASS_SRX_CTX, FI_CLASS_STX_CTX,
    FI_EINVAL, FI_EOPBADSTATE, FI_READ, FI_RECV, FI_REMOTE_READ, FI_REMOTE_WRITE,
    FI_SELECTIVE_COMPLETION, FI_SEND, FI_TRANSMIT, FI_WRITE, fid,
};
use std::ffi::c_int;
use std::sync::Arc;

pub(super) unsafe extern "C" fn bind(fid: *mut fid, other: *mut fid, flags: u64) -> c_int {
    // SAFETY: a handle of this provider and an object of the application.
    entry("fi_ep_bind", || code(unsafe { bind_object(&*fid.cast::<EndpointFid>(), other, flags) }))
}

/// # Safety
/// `other` is null or an open object.
unsafe fn bind_object(handle: &EndpointFid, other: *mut fid, flags: u64) -> Result<(), i32> {
    let ep = &*handle.shared;
    // SAFETY: the caller vouches.
    let class = unsafe { other.as_ref() }.ok_or(FI_EINVAL)?.fclass;
    let flags = handle.role.own_flags(class, flags);
    if !ep.may_bind(handle, class, flags) {
        return Err(FI_EINVAL);
    }
    let mut guard = ep.domain.lock.control();
    // Sandia OpenSHMEM binds counters and a shared transmit context to an enabled endpoint.
    let enabled = ep.is_enabled(handle, &guard);
    if enabled && !matches!(class, FI_CLASS_CNTR | FI_CLASS_STX_CTX) {
        return Err(FI_EOPBADSTATE);
    }
    let bindings = ep.change_bindings(handle.context, &mut guard);
    // SAFETY: the caller vouches; the class tells the type.
    unsafe {
        match class {
            FI_CLASS_CQ => bind_queue(ep, bindings, cq::shared(other)?, flags),
            FI_CLASS_CNTR => {
                let counter = cntr::shared(other)?;
                bind_counter(ep, bindings, counter, flags)?;
                if enabled { begin_counting(handle, counter, flags, guard) } else { Ok(()) }
            }
            FI_CLASS_STX_CTX => ep.bind_shared_transmit(bindings, other),
            FI_CLASS_SRX_CTX => ep.bind_shared_receive(bindings, other),
            FI_CLASS_AV => {
                let av = av::shared(other)?;
                if !Arc::ptr_eq(&av.domain, &ep.domain) || bindings.av.is_some() {
                    return Err(FI_EINVAL);
                }
                bindings.av = Some(av.clone());
                Ok(())
            }
            FI_CLASS_EQ => {
                bindings.eq = Some(eq::shared(other)?.clone());
                Ok(())
            }
            _ => Err(FI_EINVAL),
        }
    }
}

fn bind_queue(
    ep: &Endpoint,
    bindings: &mut Bindings,
    queue: &Arc<CompletionQueue>,
    flags: u64,
) -> Result<(), i32> {
    let known = FI_TRANSMIT | FI_RECV | FI_SELECTIVE_COMPLETION;
    if flags & !known != 0 || flags & (FI_TRANSMIT | FI_RECV) == 0 {
        return Err(FI_EINVAL);
    }
    if !Arc::ptr_eq(&queue.domain, &ep.domain) {
        return Err(FI_EINVAL);
    }
    let selective = flags & FI_SELECTIVE_COMPLETION != 0;
    let queue = QueueBinding { queue: queue.clone(), selective };
    let slots = [(FI_TRANSMIT, &mut bindings.transmit), (FI_RECV, &mut bindings.receive)];
    slots::bind(slots, flags, &queue)
}

impl Bindings {
    /// The counter of each kind of operation.
    fn counter_slots(&mut self) -> [(u64, &mut Option<Arc<Counter>>); 6] {
        [
            (FI_SEND, &mut self.send_counter),
            (FI_RECV, &mut self.receive_counter),
            (FI_READ, &mut self.read_counter),
            (FI_WRITE, &mut self.write_counter),
            (FI_REMOTE_READ, &mut self.remote_read_counter),
            (FI_REMOTE_WRITE, &mut self.remote_write_counter),
        ]
    }
}

fn bind_counter(
    ep: &Endpoint,
    bindings: &mut Bindings,
    counter: &Arc<Counter>,
    flags: u64,
) -> Result<(), i32> {
    let remote = FI_REMOTE_READ | FI_REMOTE_WRITE;
    let known = FI_SEND | FI_RECV | FI_READ | FI_WRITE | remote;
    if flags & !known != 0 || flags == 0 || !Arc::ptr_eq(&counter.domain, &ep.domain) {
        return Err(FI_EINVAL);
    }
    slots::bind(bindings.counter_slots(), flags, counter)
}

/// Lets a counter that came to an enabled endpoint see all that it counts. Errors: those of its wait object; then it is
/// not bound.
fn begin_counting(
    handle: &EndpointFid,
    counter: &Arc<Counter>,
    flags: u64,
    mut guard: Hold<'_>,
) -> Result<(), i32> {
    let ep = &*handle.shared;
    let attached = counter.source(&guard).attach(ep, &guard);
    if attached.is_err() {
        slots::unbind(ep.change_bindings(handle.context, &mut guard).counter_slots(), flags);
    } else if flags & (FI_REMOTE_READ | FI_REMOTE_WRITE) != 0 {
        // Ends direct RMA, of which it would not know. From now on peers are told only of what no counter counts.
        ep.domain.revoke_all(&guard);
        drop(guard);
        ep.domain.settle();
    }
    attached
}

impl Endpoint {
    /// An endpoint that has not asked for FI_SHARED_CONTEXT ignores the shared context, and keeps no reference to
    /// it: Sandia OpenSHMEM binds one to such an endpoint, and closes it first.
    /// Errors: EINVAL for a context of another domain, or a second one.
    ///
    /// # Safety
    /// `other` is an open object.
    unsafe fn bind_shared_transmit(
        &self,
        bindings: &mut Bindings,
        other: *mut fid,
    ) -> Result<(), i32> {
        // SAFETY: the caller vouches.
        let shared = &unsafe { own::<TransmitFid>(other) }?.shared;
        if bindings.shared_transmit.is_some() || !Arc::ptr_eq(&shared.domain, &self.domain) {
            return Err(FI_EINVAL);
        }
        if self.shares.0 {
            bindings.shared_transmit = Some(shared.clone());
        }
        Ok(())
    }

    /// Errors: EINVAL if FI_SHARED_CONTEXT was not asked for, for a context of another domain, or a second one.
    ///
    /// # Safety
    /// `other` is an open object.
    unsafe fn bind_shared_receive(
        &self,
        bindings: &mut Bindings,
        other: *mut fid,
    ) -> Result<(), i32> {
        // SAFETY: the caller vouches.
        let shared = &unsafe { own::<ReceiveFid>(other) }?.shared;
        let fits = self.shares.1 && bindings.shared_receive.is_none();
        if !fits || !Arc::ptr_eq(&shared.domain, &self.domain) {
            return Err(FI_EINVAL);
        }
        bindings.shared_receive = Some(shared.clone());
        Ok(())
    }

    /// Whether this kind of handle may be bound to objects of this class, with these flags.
    fn may_bind(&self, handle: &EndpointFid, class: usize, flags: u64) -> bool {
        let transmit = FI_SEND | FI_READ | FI_WRITE | FI_TRANSMIT | FI_SELECTIVE_COMPLETION;
        // Accesses of peers are reported by receive context 0.
        let remote = if handle.context == 0 { FI_REMOTE_READ | FI_REMOTE_WRITE } else { 0 };
        let receive = FI_RECV | remote | FI_SELECTIVE_COMPLETION;
        let reports = matches!(class, FI_CLASS_CQ | FI_CLASS_CNTR);
        match handle.role {
            Role::Endpoint => true,
            Role::Scalable => matches!(class, FI_CLASS_AV | FI_CLASS_EQ),
            Role::Transmit => class == FI_CLASS_EQ || reports && flags & !transmit == 0,
            Role::Receive => class == FI_CLASS_EQ || reports && flags & !receive == 0,
        }
    }
}
