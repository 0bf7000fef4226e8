//! ConnectX-3: providers/mlx4. A full shared receive queue answers −1 (srq.c), not an error number.

use super::{Driver, FULL, Fork, Library, Personality, Srq, adapter, infiniband};

pub(super) const PERSONALITY: Personality = Personality {
    name: "mlx4",
    about: "ConnectX-3: a full SRQ answers -1",
    library: Library::Current,
    fork: Fork::Unneeded,
    driver: Driver { srq: Srq::FullIs(-1), max_wr: 16351, max_sge: 32, ..FULL },
    devices: &[adapter("mlx4_0", 0x15b3, 4099, &[infiniband(9)])],
};
