//! Tables of function pointers that answer -FI_ENOSYS in every slot without an implementation, also in the
//! slots that a later libfabric may append.

use libfabric_sys::{
    FI_ENOSYS, fi_ops, fi_ops_atomic, fi_ops_av_2_7, fi_ops_av_set, fi_ops_cm, fi_ops_cntr_2_7,
    fi_ops_collective, fi_ops_cq_2_7, fi_ops_domain_2_7, fi_ops_ep_2_7, fi_ops_eq, fi_ops_fabric,
    fi_ops_mr, fi_ops_msg, fi_ops_poll, fi_ops_rma, fi_ops_tagged, fi_ops_wait,
};

type Stub = unsafe extern "C" fn() -> isize;

/// Spare slots behind each table, for operations that a newer core calls without checking `size`.
const SPARE: usize = 16;

/// An operations table with its spare slots. Tables are read-only.
#[repr(C)]
pub(crate) struct Table<T> {
    ops: T,
    spare: [Stub; SPARE],
}

/// The stub of every operation. It ignores the arguments, whatever their number; all operations return
/// integers of at most pointer size.
unsafe extern "C" fn not_supported() -> isize {
    -(FI_ENOSYS as isize)
}

#[repr(C)]
struct Raw<const N: usize> {
    size: usize,
    slots: [Stub; N],
}

/// A table of `N` slots after its `size`, all of them stubs.
///
/// # Safety
/// `T` is a libfabric operations table: a `size_t` followed by exactly `N` nullable function
/// pointers.
const unsafe fn stubs<T: Copy, const N: usize>() -> T {
    assert!(size_of::<T>() == size_of::<Raw<N>>());
    union Cast<T: Copy, const N: usize> {
        raw: std::mem::ManuallyDrop<Raw<N>>,
        table: T,
    }
    let raw = Raw { size: size_of::<T>(), slots: [not_supported as Stub; N] };
    // SAFETY: sizes are equal, and a non-null function pointer is a valid nullable one.
    unsafe { Cast { raw: std::mem::ManuallyDrop::new(raw) }.table }
}

/// An operations table of libfabric.
pub(crate) trait Operations: Sized {
    /// All slots are stubs.
    const STUBS: Self;
}

macro_rules! operations {
    ($($table:ident),*) => {$(
        impl Operations for $table {
            const STUBS: Self = {
                const SLOTS: usize = size_of::<$table>() / size_of::<Stub>() - 1;
                // SAFETY: it has its size, and nullable function pointers behind it.
                unsafe { stubs::<Self, SLOTS>() }
            };
        }
    )*};
}

operations! {
    fi_ops, fi_ops_atomic, fi_ops_av_2_7, fi_ops_av_set, fi_ops_cm, fi_ops_cntr_2_7, fi_ops_collective, fi_ops_cq_2_7,
    fi_ops_domain_2_7, fi_ops_ep_2_7, fi_ops_eq, fi_ops_fabric, fi_ops_mr, fi_ops_msg, fi_ops_poll, fi_ops_rma,
    fi_ops_tagged, fi_ops_wait
}

impl<T> Table<T> {
    pub(crate) const fn new(ops: T) -> Self {
        Self { ops, spare: [not_supported as Stub; SPARE] }
    }

    /// The pointer type that the `fid` structures want; no code writes through it.
    pub(crate) const fn as_mut_ptr(&'static self) -> *mut T {
        (&raw const self.ops).cast_mut()
    }
}

/// Turns an `extern "C-unwind"` function, whose thread may be cancelled in it, into the type of libfabric's tables.
macro_rules! cancellable {
    ($function:ident: fn($($argument:ty),*) -> $result:ty) => {
        // SAFETY: both ABIs pass arguments and results in the same way.
        Some(unsafe {
            std::mem::transmute::<
                unsafe extern "C-unwind" fn($($argument),*) -> $result,
                unsafe extern "C" fn($($argument),*) -> $result,
            >($function)
        })
    };
}
pub(super) use cancellable;

/// Zeroed room behind each structure of this provider, for members that a newer core may expect.
pub(crate) type Slack = [u64; 8];

/// The value of every [`Slack`].
pub(crate) const SLACK: Slack = [0; 8];

#[cfg(test)]
mod tests {
    use super::*;
    use libfabric_sys::fi_ops_cntr_2_7;

    #[test]
    fn every_slot_answers() {
        static TABLE: Table<fi_ops_cntr_2_7> = Table::new(fi_ops_cntr_2_7::STUBS);
        assert_eq!(TABLE.ops.base.size, size_of::<fi_ops_cntr_2_7>());
        let add = TABLE.ops.base.add.unwrap();
        // SAFETY: the stub reads no argument.
        assert_eq!(unsafe { add(std::ptr::null_mut(), 1) }, -FI_ENOSYS);
        assert!(TABLE.ops.export_xpu.is_some());
    }
}
