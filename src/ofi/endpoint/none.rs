//! Tables of operations that an object does not have: each slot answers -FI_ENOSYS.

use crate::ofi::table::{Table, stubs};
use libfabric_sys::{fi_ops_atomic, fi_ops_collective};

pub(super) static NO_ATOMIC: Table<fi_ops_atomic> =
    // SAFETY: fi_ops_atomic has thirteen slots.
    Table::new(unsafe { stubs::<fi_ops_atomic, 13>() });
pub(super) static NO_COLLECTIVE: Table<fi_ops_collective> =
    // SAFETY: fi_ops_collective has eleven slots.
    Table::new(unsafe { stubs::<fi_ops_collective, 11>() });
