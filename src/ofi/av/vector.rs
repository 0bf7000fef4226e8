//! The address vector, as other modules use it.

use super::state::AvState;
use crate::ofi::domain::Domain;
use crate::ofi::eq::{self, EventQueue};
use crate::ofi::guard::{code, entries};
use crate::ofi::lock::{Guard, Locked};
use crate::ofi::own::{Object, close as close_object, own, own_behind_hooks};
use crate::ofi::table::{Operations, Slack, Table};
use crate::transport::JobKey;
use libfabric_sys::{FI_EINVAL, fi_addr_t, fi_ops, fid, fid_av};
use std::ffi::c_int;
use std::sync::Arc;

/// The part of an address vector that endpoints share.
#[derive(Debug)]
pub(crate) struct AddressVector {
    pub(crate) domain: Arc<Domain>,
    pub(crate) state: Locked<AvState>,
    /// `Some` only in a domain with FI_AV_AUTH_KEY.
    pub(super) auth_key: Locked<Option<AuthKey>>,
}

/// The authorization key that was inserted.
pub(super) struct AuthKey {
    pub(super) bytes: Vec<u8>,
    pub(super) job_key: JobKey,
    /// Number of insertions less number of removals.
    pub(super) uses: usize,
}

impl std::fmt::Debug for AuthKey {
    /// Without the bytes, which must not appear in a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthKey").field("uses", &self.uses).finish_non_exhaustive()
    }
}

#[repr(C)]
pub(super) struct AvFid {
    pub(super) fid: fid_av,
    pub(super) slack: Slack,
    pub(super) shared: Arc<AddressVector>,
    /// FI_EVENT: insertions are reported to `eq`.
    pub(super) asynchronous: bool,
    pub(super) eq: Option<Arc<EventQueue>>,
}

// SAFETY: it begins with a fid_av; nothing else has this table.
unsafe impl Object for AvFid {
    type Shown = fid_av;
    fn table() -> *mut fi_ops {
        FID_OPS.as_mut_ptr()
    }
}

pub(super) static FID_OPS: Table<fi_ops> =
    Table::new(fi_ops { close: Some(close), bind: Some(bind), ..fi_ops::STUBS });

impl AddressVector {
    /// Takes over what the keeper of a vector with a name has changed. Calls begin with this; not while an engine works,
    /// because posted receives change.
    #[inline]
    pub(crate) fn follow(&self, guard: &Guard<'_>) {
        // SAFETY: the guard belongs to the domain of the vector; one short step.
        if unsafe { self.state.get(guard) }.is_named() {
            self.follow_keeper(guard);
        }
    }

    #[cold]
    fn follow_keeper(&self, guard: &Guard<'_>) {
        // SAFETY: the guard belongs to the domain of the vector; one short step.
        let heirs = unsafe { self.state.get(guard) }.follow();
        heirs.into_iter().for_each(|(removed, heir)| self.inherit(removed, Some(heir), guard));
    }

    /// Posted receives that want the peer of `removed` find it under the entry that stands for it from now on.
    pub(super) fn inherit(&self, removed: fi_addr_t, heir: Option<fi_addr_t>, guard: &Guard<'_>) {
        let Some(heir) = heir else { return };
        let this = std::ptr::from_ref(self).cast();
        let bound =
            self.domain.endpoints(guard).filter(|endpoint| endpoint.has_vector(this, guard));
        bound.for_each(|endpoint| endpoint.rename_source(removed, heir, guard));
    }
}

/// Error of an operation whose vector has no such address.
pub(crate) const NO_SUCH_ADDRESS: i32 = FI_EINVAL;

/// The shared part of an address vector.
/// Errors: EINVAL for an object of another provider.
///
/// # Safety
/// `av` is null or an open object.
pub(crate) unsafe fn shared<'a>(av: *mut fid) -> Result<&'a Arc<AddressVector>, i32> {
    // SAFETY: the caller vouches.
    unsafe { own::<AvFid>(av) }.map(|own| &own.shared)
}

/// The same for a vector that a structure names.
///
/// # Safety
/// As [`shared`].
pub(crate) unsafe fn named<'a>(av: *mut fid_av) -> Result<&'a Arc<AddressVector>, i32> {
    // SAFETY: the caller vouches.
    unsafe { own_behind_hooks::<AvFid>(av.cast()) }.map(|own| &own.shared)
}

entries! { entry -> c_int;
    close "fi_close(av)" (fid: *mut fid) => close_object(fid, |av: &AvFid| {
        av.shared.domain.lock.may_close(|_| Arc::strong_count(&av.shared) > 1)
    });
    bind "fi_av_bind" (fid: *mut fid, other: *mut fid, _flags: u64)
        => code(eq::shared(other).map(|eq| (*fid.cast::<AvFid>()).eq = Some(eq.clone())));
}
