//! The protocol that messages take at each size, in lines of text: `fi_ops_udrv.thresholds`.

use super::state::Endpoint;
use super::transfer::error_number;
use crate::ofi::lock::Guard;
use crate::protocol::Threshold;
use crate::transport::Iface;
use libfabric_sys::{FI_EOPBADSTATE, fi_addr_t};

impl Endpoint {
    /// One line for each range of sizes, for a peer that is connected now if it is not yet.
    pub(in crate::ofi) fn thresholds(
        &self,
        peer: fi_addr_t,
        guard: &Guard<'_>,
    ) -> Result<String, i32> {
        self.engine(guard).ok_or(FI_EOPBADSTATE)?;
        let peer = self.peer(peer, guard).map_err(error_number)?;
        let engine = self.engine(guard).ok_or(FI_EOPBADSTATE)?;
        let way = engine.iface().way(peer);
        let lines =
            engine.thresholds(peer).into_iter().map(|Threshold { from, to, how, variable }| {
                let to = if to == usize::MAX { String::new() } else { to.to_string() };
                let variable = variable.map_or(String::new(), |name| format!("FI_UDRV_{name}"));
                format!("{way}\t{from}\t{to}\t{}\t{variable}\t{}\n", how.name(), how.reason())
            });
        Ok(lines.collect())
    }
}
