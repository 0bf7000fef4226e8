//! Tables of operations that an object does not have: each slot answers -FI_ENOSYS.

use crate::ofi::table::{Operations, Table};
use libfabric_sys::{fi_ops_atomic, fi_ops_collective};

pub(super) static NO_ATOMIC: Table<fi_ops_atomic> = Table::new(fi_ops_atomic::STUBS);
pub(super) static NO_COLLECTIVE: Table<fi_ops_collective> = Table::new(fi_ops_collective::STUBS);
