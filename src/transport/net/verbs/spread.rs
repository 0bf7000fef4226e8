//! How an endpoint chooses among equally good ports, so that the endpoints of a node share them evenly. They do not
//! communicate for that, but use the launcher's environment.

use std::sync::atomic::{AtomicU32, Ordering};

/// Variables in which launchers give a process's local rank, from 0 on.
const LOCAL_RANKS: [&str; 7] = [
    "OMPI_COMM_WORLD_LOCAL_RANK", // Open MPI, PRRTE
    "MPI_LOCALRANKID",            // Hydra: MPICH, Intel MPI
    "MV2_COMM_WORLD_LOCAL_RANK",  // MVAPICH
    "PALS_LOCAL_RANKID",          // HPE PALS
    "PMI_LOCAL_RANK",             // Cray PMI
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
];

/// An endpoint that shares ports with others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Spread {
    /// The process's local rank, from the launcher.
    pub(super) local_rank: Option<u32>,
    /// The endpoint's number in its process.
    pub(super) nth: u32,
    /// The endpoint's port: all that is known without a launcher.
    pub(super) port: u16,
}

impl Spread {
    /// For a new endpoint at `port`; `counted`: it is being opened, and the next one gets another number.
    pub(super) fn new(port: u16, counted: bool) -> Self {
        static OPENED: AtomicU32 = AtomicU32::new(0);
        let nth = if counted { OPENED.fetch_add(1, Ordering::Relaxed) } else { 0 };
        let local_rank = local_rank(|name| std::env::var(name).ok());
        Self { local_rank, nth, port }
    }

    /// Its port among `count`, from 0 on.
    ///
    /// A rank counts by the sum of its digits to the base `count`. The processes of one socket share the ports nearest
    /// to it, and launchers place every rank there, or every second, or every fourth: then the last digit alone would
    /// be the same for all of them.
    pub(super) fn turn(&self, count: usize) -> usize {
        let base = u32::try_from(count).unwrap_or(u32::MAX).max(2);
        let rank = match self.local_rank {
            Some(mut rank) => {
                let mut sum = 0;
                while rank > 0 {
                    sum += rank % base;
                    rank /= base;
                }
                sum
            }
            None => u32::from(self.port),
        };
        rank.wrapping_add(self.nth) as usize % count.max(1)
    }

    /// The reason for the choice, for the log.
    pub(super) fn reason(&self) -> String {
        match self.local_rank {
            Some(rank) => format!("local rank {rank}"),
            None => format!("UDP port {}", self.port),
        }
    }
}

fn local_rank(lookup: impl Fn(&str) -> Option<String>) -> Option<u32> {
    LOCAL_RANKS.iter().find_map(|name| lookup(name)?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `ranks` take each of `count` ports.
    fn shares(ranks: impl Iterator<Item = u32>, count: usize) -> Vec<usize> {
        let mut shares = vec![0; count];
        for rank in ranks {
            shares[Spread { local_rank: Some(rank), nth: 0, port: 1 }.turn(count)] += 1;
        }
        shares
    }

    #[test]
    fn ranks_of_a_socket_share_evenly_however_they_are_placed() {
        for count in [2, 4] {
            // All ranks; those of one of two, four or eight sockets in turn; a block of them.
            for stride in [1, 2, 4, 8] {
                let shares = shares((0..64).step_by(stride), count);
                let even = 64 / stride / count;
                assert!(shares.iter().all(|n| *n == even), "{count} {stride}: {shares:?}");
            }
            assert_eq!(shares(32..64, count), vec![32 / count; count]);
        }
        for count in [1, 3, 5, 8] {
            let shares = shares(0..(count * count) as u32, count);
            assert!(shares.iter().all(|n| *n == count), "{count}: {shares:?}");
        }
    }

    #[test]
    fn endpoints_of_a_process_take_turns() {
        for local_rank in [None, Some(5)] {
            let turn = |nth| Spread { local_rank, nth, port: 7 }.turn(3);
            assert_eq!(turn(3), turn(0));
            assert_ne!(turn(1), turn(0));
            assert_ne!(turn(2), turn(1));
        }
    }

    #[test]
    fn launchers_say_it_in_their_variables() {
        for name in LOCAL_RANKS {
            let lookup = |asked: &str| (asked == name).then(|| " 6 ".to_owned());
            assert_eq!(local_rank(lookup), Some(6), "{name}");
        }
        assert_eq!(local_rank(|_| Some("many".to_owned())), None);
        assert_eq!(local_rank(|_| None), None);
    }
}
