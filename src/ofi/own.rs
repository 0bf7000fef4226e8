//! Checks whether an object in an argument is this provider's: an application may pass another provider's. An
//! object that it opened through libfabric's hooks (FI_HOOK) is an object of the hook, which translates the
//! arguments of calls, but not the structures that they point to.

use crate::sys::cma::{self, Range};
use crate::sys::process;
use crate::telemetry::log;
use libfabric_sys::{FI_EINVAL, fi_ops, fid};
use std::ffi::c_int;
use std::mem::offset_of;

/// Most hooks, one on top of the other, that are followed.
const HOOKS_MAX: usize = 16;

/// A structure of this provider that an application knows as a `fid`.
///
/// # Safety
/// It is `repr(C)` and begins with `Shown`, which begins with a `fid`; and every `fid` with `table` belongs to
/// a structure of this type.
pub(super) unsafe trait Object {
    /// The part that libfabric declares.
    type Shown;
    /// The operations in its `fid`, which no other type has.
    fn table() -> *mut fi_ops;
}

/// The structure behind an object. Errors: EINVAL for null, and for an object of another provider or class.
///
/// # Safety
/// `object` is null or points to an open object of any provider.
pub(super) unsafe fn own<'a, T: Object>(object: *const fid) -> Result<&'a T, i32> {
    // SAFETY: the caller vouches; every object begins with a `fid`.
    let head = unsafe { object.as_ref() }.ok_or(FI_EINVAL)?;
    if head.ops != T::table() {
        log::limited!(
            cause: head.fclass,
            "refused: an object of class {} that is not this provider's, or of another class",
            head.fclass
        );
        return Err(FI_EINVAL);
    }
    // SAFETY: an object with this table is a `T` (see `Object`).
    Ok(unsafe { &*object.cast::<T>() })
}

/// The same for an object that a structure names, which may be a hook's object. Each of libfabric's hooks has the
/// address of the hooked object right behind the part that the application knows (include/ofi_hook.h:
/// `struct hook_cntr`, `struct hook_ep`).
///
/// # Safety
/// As for [`own`].
pub(super) unsafe fn own_behind_hooks<'a, T: Object>(object: *const fid) -> Result<&'a T, i32> {
    match behind_hooks::<T>(object) {
        // SAFETY: an object with this table is a `T` (see `Object`).
        Some(at) => Ok(unsafe { &*std::ptr::with_exposed_provenance(at) }),
        // SAFETY: the caller vouches. This call logs what the object is, and fails.
        None => unsafe { own(object) },
    }
}

/// Whether what is at this address is no `T`, nor a hook's object over one. It may be closed: nothing is
/// dereferenced, and an address that cannot be read is not called foreign.
pub(super) fn is_foreign<T: Object>(object: *const fid) -> bool {
    let table = object.expose_provenance().wrapping_add(offset_of!(fid, ops));
    word(table).is_some() && behind_hooks::<T>(object).is_none()
}

/// The address of the `T` that the object is, or that its hooks lead to.
fn behind_hooks<T: Object>(object: *const fid) -> Option<usize> {
    let mut at = object.expose_provenance();
    for _ in 0..HOOKS_MAX {
        if word(at.wrapping_add(offset_of!(fid, ops)))? == T::table().expose_provenance() {
            return Some(at);
        }
        at = word(at.wrapping_add(size_of::<T::Shown>()))?;
    }
    None
}

/// The structure behind an object that is known to be a `T`.
///
/// # Safety
/// `object` is an open `T`.
#[inline]
pub(super) unsafe fn ours<'a, T>(object: *const fid) -> &'a T {
    // SAFETY: the caller vouches.
    unsafe { &*object.cast::<T>() }
}

/// `fi_close`. `may_go`: an error is the value to return, and the object stays as it is.
///
/// # Safety
/// `object` is an open `T` in a box, and no other reference to it is used if it may go.
pub(super) unsafe fn close<T>(
    object: *mut fid,
    may_go: impl FnOnce(&T) -> Result<(), c_int>,
) -> c_int {
    // SAFETY: the caller vouches.
    if let Err(code) = may_go(unsafe { ours(object) }) {
        return code;
    }
    // SAFETY: the caller vouches that no other reference is left.
    drop(unsafe { Box::from_raw(object.cast::<T>()) });
    0
}

/// The word at an address, if it is readable. The kernel reads it, because the word behind an object of another
/// provider is unknown and need not be a valid address.
fn word(at: usize) -> Option<usize> {
    let mut word = 0usize;
    let to =
        Range { addr: (&raw mut word).expose_provenance() as u64, len: size_of::<usize>() as u64 };
    let from = Range { addr: at as u64, ..to };
    // SAFETY: the local range is `word`.
    let read = unsafe { cma::read(process::pid(), &[to], &[from]) };
    (read == Ok(size_of::<usize>())).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ofi::table::{Operations, Table};
    use libfabric_sys::{FI_CLASS_CNTR, fid_cntr};
    use std::ptr::null_mut;

    #[repr(C)]
    struct Ours {
        shown: fid_cntr,
        value: u64,
    }

    #[repr(C)]
    struct Hook {
        shown: fid_cntr,
        behind: usize,
    }

    static TABLE: Table<fi_ops> = Table::new(fi_ops::STUBS);
    static OTHER: Table<fi_ops> = Table::new(fi_ops::STUBS);

    // SAFETY: it begins with a `fid_cntr`; the tests have no other structure with this table.
    unsafe impl Object for Ours {
        type Shown = fid_cntr;
        fn table() -> *mut fi_ops {
            TABLE.as_mut_ptr()
        }
    }

    fn shown(ops: *mut fi_ops) -> fid_cntr {
        fid_cntr { fid: fid { fclass: FI_CLASS_CNTR, context: null_mut(), ops }, ops: null_mut() }
    }

    fn hook(behind: usize) -> Hook {
        Hook { shown: shown(OTHER.as_mut_ptr()), behind }
    }

    fn address<T>(of: &T) -> usize {
        std::ptr::from_ref(of).expose_provenance()
    }

    fn found(object: usize) -> Option<u64> {
        // SAFETY: the tests pass live objects.
        let found = unsafe { own_behind_hooks::<Ours>(std::ptr::with_exposed_provenance(object)) };
        found.ok().map(|ours| ours.value)
    }

    #[test]
    fn an_object_of_ours_is_found_behind_hooks() {
        let ours = Ours { shown: shown(TABLE.as_mut_ptr()), value: 7 };
        let first = hook(address(&ours));
        let second = hook(address(&first));
        assert_eq!(found(address(&ours)), Some(7));
        assert_eq!(found(address(&first)), Some(7));
        assert_eq!(found(address(&second)), Some(7));
        // SAFETY: a live object.
        assert!(unsafe { own::<Ours>(&raw const first.shown.fid) }.is_err());
        assert!(!is_foreign::<Ours>(&raw const ours.shown.fid));
        assert!(!is_foreign::<Ours>(&raw const second.shown.fid));
        assert_eq!(ours.shown.fid.fclass, FI_CLASS_CNTR);
    }

    #[test]
    fn a_foreign_object_is_refused_whatever_lies_behind_it() {
        assert_eq!(found(0), None);
        for behind in [0, 1, 4096, usize::MAX, usize::MAX - 7] {
            let foreign = hook(behind);
            assert_eq!(found(address(&foreign)), None, "{behind:#x}");
            assert!(is_foreign::<Ours>(&raw const foreign.shown.fid), "{behind:#x}");
        }
        // A cycle of hooks.
        let mut foreign = hook(0);
        foreign.behind = address(&foreign);
        assert_eq!(found(address(&foreign)), None);
        assert!(is_foreign::<Ours>(&raw const foreign.shown.fid));
        // What cannot be read may have been ours.
        assert!(!is_foreign::<Ours>(std::ptr::without_provenance(8)));
    }
}
