//! The queues and counters that are bound to an object: one for each kind of event, and each kind is a flag.

#![forbid(unsafe_code)]

use libfabric_sys::FI_EINVAL;

/// Binds `object` for the kinds in `flags`. Errors: EINVAL if one of them has an object already; then nothing is bound.
pub(super) fn bind<T: Clone, const N: usize>(
    slots: [(u64, &mut Option<T>); N],
    flags: u64,
    object: &T,
) -> Result<(), i32> {
    let wanted = |(flag, _): &(u64, &mut Option<T>)| flags & flag != 0;
    if slots.iter().any(|slot| wanted(slot) && slot.1.is_some()) {
        return Err(FI_EINVAL);
    }
    slots.into_iter().filter(wanted).for_each(|(_, slot)| *slot = Some(object.clone()));
    Ok(())
}

/// The inverse of [`bind`].
pub(super) fn unbind<T, const N: usize>(slots: [(u64, &mut Option<T>); N], flags: u64) {
    slots.into_iter().filter(|(flag, _)| flags & flag != 0).for_each(|(_, slot)| *slot = None);
}
