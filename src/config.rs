//! Every `FI_UDRV_*` variable. Each room has a group of variables, in a table in its own folder; this is the list of the
//! groups. `fi_info -e` lists the variables, and `man/fi_udrv.7` documents them (a test compares them).

mod endpoint;
pub(crate) mod system;
mod unknown;
pub(crate) mod variable;

use crate::memory::cache::CacheSettings;
use crate::memory::settings::HmemPolicy;
use crate::telemetry::config::{LogConfig, TraceConfig};
use crate::telemetry::log;
use crate::transport::cuda_ipc::config::CudaIpcConfig;
use crate::transport::net::config::NetConfig;
use crate::transport::net::rv::config::RvPolicy;
use crate::transport::net::verbs::config::RdmaSettings;
use crate::transport::shm::config::ShmConfig;
use endpoint::Endpoint;
use variable::{Group, Reader, Variable};

/// All variables.
pub(crate) fn variables() -> impl Iterator<Item = &'static Variable> {
    let groups = [
        Endpoint::VARIABLES,
        ShmConfig::VARIABLES,
        NetConfig::VARIABLES,
        RdmaSettings::VARIABLES,
        RvPolicy::VARIABLES,
        CacheSettings::VARIABLES,
        LogConfig::VARIABLES,
        TraceConfig::VARIABLES,
        HmemPolicy::VARIABLES,
        CudaIpcConfig::VARIABLES,
    ];
    groups.into_iter().flatten()
}

/// The values of all variables.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Config {
    pub(crate) endpoint: Endpoint,
    pub(crate) shm: ShmConfig,
    /// With the values for its devices.
    pub(crate) net: NetConfig,
    pub(crate) log: LogConfig,
    pub(crate) trace: TraceConfig,
    pub(crate) hmem: HmemPolicy,
    pub(crate) cuda_ipc: CudaIpcConfig,
}

impl Config {
    /// Reads the environment of this process. An invalid value leaves the default in place.
    pub(crate) fn from_environment() -> Self {
        Self::of_environment(&|_, _, _| ())
    }

    /// Logs what is invalid or unknown. Called once, when udrv is loaded.
    pub(crate) fn check_environment() {
        Self::of_environment(&|name, text, wanted| {
            log::warn_of(
                log::number_of(name),
                format_args!("FI_UDRV_{name}={text} is ignored: it must be {wanted}"),
            );
        });
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            let Some(name) = name.strip_prefix("FI_UDRV_") else { continue };
            if variables().all(|known| known.name != name) {
                report_unknown(name);
            }
        }
    }

    fn of_environment(complain: &dyn Fn(&str, &str, &str)) -> Self {
        let lookup = |name: &str| system::text(&format!("FI_UDRV_{name}"));
        let of_libfabric = |name: &str| system::text(&format!("FI_{name}"));
        Self::read(&Reader { lookup: &lookup, of_libfabric: &of_libfabric, complain })
    }

    fn read(from: &Reader<'_>) -> Self {
        let mut config = Self::default();
        config.endpoint.read(from);
        config.shm.read(from);
        config.net.read(from);
        config.log.read(from);
        config.trace.read(from);
        config.hmem.read(from);
        config.cuda_ipc.read(from);
        config
    }
}

fn report_unknown(name: &str) {
    let meant = match unknown::nearest(name, variables().map(|variable| variable.name)) {
        Some(nearest) => format!("did you mean FI_UDRV_{nearest}?"),
        None => "`fi_info -e` lists those that exist".to_owned(),
    };
    log::warn_of(
        log::number_of(name),
        format_args!("FI_UDRV_{name} is not a variable of udrv: {meant}"),
    );
}

#[cfg(test)]
mod tests {
    use super::variable::Secret;
    use super::*;
    use crate::memory::cache::CachePolicy;
    use crate::transport::net::rv::config::RvPolicy;
    use crate::transport::net::verbs::config::{RdmaPolicy, ReadPolicy};
    use crate::transport::shm::config::CmaPolicy;

    fn with(pairs: &[(&str, &str)]) -> (Config, usize) {
        let complaints = std::cell::Cell::new(0);
        let find =
            |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let config = Config::read(&Reader {
            lookup: &find,
            of_libfabric: &|name| find(&format!("FI_{name}")),
            complain: &|_, _, _| complaints.set(complaints.get() + 1),
        });
        (config, complaints.get())
    }

    #[test]
    fn defaults_stand_when_nothing_is_set() {
        assert_eq!(with(&[]), (Config::default(), 0));
    }

    #[test]
    fn values_are_taken() {
        let (config, complaints) =
            with(&[("EAGER_MAX", "100"), ("CMA", "Off"), ("IFACE", "lo"), ("SPIN_US", "0")]);
        let (network, more) = with(&[
            ("JOB_KEY", "between the two of us"),
            ("SHM", "0"),
            ("NET", " 0 "),
            ("MTU", "9000"),
            ("PEER_TIMEOUT", "5000ms"),
            ("NET_BUFFER", "1M"),
            ("RDMA", "Require"),
            ("RV", "REQUIRE"),
            ("NIC", "mlx5_0, rxe0:2"),
            ("RC_CONNECTIONS", "0"),
            ("RDMA_READ", "Always"),
        ]);
        assert_eq!(config.endpoint.eager_max, 100);
        assert_eq!(config.shm.cma, CmaPolicy::Off);
        assert_eq!(config.endpoint.iface.as_deref(), Some("lo"));
        assert_eq!(config.endpoint.spin_us, 0);
        assert_eq!(network.endpoint.job_key, Some(Secret("between the two of us".to_owned())));
        assert!(!format!("{network:?}").contains("between the two of us"));
        assert_eq!((network.shm.on, network.net.on, network.net.mtu), (false, false, Some(9000)));
        assert_eq!((network.net.peer_timeout_s, network.net.buffer_bytes), (5, 1 << 20));
        assert_eq!(
            (network.net.rdma.policy, network.net.rdma.rc_connections),
            (RdmaPolicy::Require, 0)
        );
        assert_eq!(network.net.rdma.read, ReadPolicy::Always);
        assert_eq!(with(&[("RDMA_READ", "auto")]).0.net.rdma.read, ReadPolicy::Auto);
        assert_eq!(with(&[("RDMA_READ", "0")]).0.net.rdma.read, ReadPolicy::Off);
        assert_eq!(
            (network.net.rdma.rv, with(&[("RV", "0")]).0.net.rdma.rv),
            (RvPolicy::Require, RvPolicy::Off)
        );
        let nics: Vec<String> = network.net.rdma.nics.iter().map(ToString::to_string).collect();
        assert_eq!(nics, ["mlx5_0", "rxe0:2"]);
        assert_eq!((complaints, more), (0, 0));
    }

    #[test]
    fn our_cache_heeds_what_is_said_of_libfabrics() {
        let cache = |pairs: &[(&str, &str)]| {
            let (config, complaints) = with(pairs);
            assert_eq!(complaints, 0);
            {
                let cache = config.net.rdma.cache;
                (cache.policy, cache.bytes, cache.count)
            }
        };
        let theirs = [
            ("FI_MR_CACHE_MONITOR", "disabled"),
            ("FI_MR_CACHE_MAX_SIZE", "1000000"),
            ("FI_MR_CACHE_MAX_COUNT", "0"),
        ];
        assert_eq!(cache(&theirs), (CachePolicy::Off, Some(1_000_000), 0));
        let ours = [("CACHE", "Userfaultfd"), ("CACHE_BYTES", "0"), ("CACHE_COUNT", "7")];
        assert_eq!(cache(&ours), (CachePolicy::Userfaultfd, Some(0), 7));
        assert_eq!(cache(&[&theirs[..], &ours[..]].concat()), cache(&ours));
        let vague = [("FI_MR_CACHE_MONITOR", "memhooks"), ("FI_MR_CACHE_MAX_SIZE", "-1")];
        assert_eq!(cache(&vague), cache(&[]));
        assert_eq!(cache(&[("CACHE", "off")]).0, CachePolicy::Off);
    }

    #[test]
    fn devices_leave_gpus_alone_where_libfabric_is_told_so() {
        let gpus = |pairs: &[(&str, &str)]| with(pairs).0.net.rdma.gpus;
        assert!(gpus(&[]) && !gpus(&[("CUDA_RDMA", "0")]) && gpus(&[("CUDA_RDMA", "1")]));
        assert!(gpus(&[("FI_HMEM_DISABLE_P2P", "0")]) && !gpus(&[("FI_HMEM_DISABLE_P2P", "1")]));
        assert!(!gpus(&[("FI_HMEM_DISABLE_P2P", "Yes"), ("CUDA_RDMA", "1")]));
    }

    #[test]
    fn switches_take_libfabrics_words() {
        for word in ["0", "off", "No", "FALSE"] {
            assert!(!with(&[("SHM", word)]).0.shm.on, "{word}");
        }
        for word in ["1", "on", "Yes", "true"] {
            assert_eq!(with(&[("SHM", word)]), (Config::default(), 0), "{word}");
        }
    }

    #[test]
    fn an_empty_variable_counts_as_unset() {
        let empty: Vec<_> = variables().map(|variable| (variable.name, "")).collect();
        let empty: Vec<_> = empty.into_iter().filter(|(name, _)| *name != "JOB_KEY").collect();
        assert_eq!(with(&empty), (Config::default(), 0));
        let key = with(&[("JOB_KEY", "")]).0.endpoint.job_key;
        assert!(key.is_some(), "a job must not be left without the key that it meant to have");
    }

    #[test]
    fn nonsense_changes_nothing() {
        let nonsense = with(&[
            ("EAGER_MAX", "-1"),
            ("TX_MAX", "0"),
            ("RX_MAX", "many"),
            ("CMA", "maybe"),
            ("UNEXPECTED_MAX", "99999999999999999999"),
            ("SHM", "perhaps"),
            ("MTU", "575"),
            ("PEER_TIMEOUT", "0"),
            ("NET_BUFFER", "64X"),
            ("RDMA", "yes"),
            ("RV", "yes"),
            ("NIC", "a:0"),
            ("CACHE", "memhooks"),
            ("CACHE_COUNT", "99999999"),
            ("RC_CONNECTIONS", "65537"),
            ("RDMA_READ", "sometimes"),
        ]);
        assert_eq!(nonsense, (Config::default(), 16));
    }
}
