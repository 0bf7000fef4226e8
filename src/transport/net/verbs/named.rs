//! Devices that an application selects by the domain's name, as other providers name their domains.

use super::candidates::candidates;
use super::config::{NicName, RdmaPolicy};
use crate::config::Config;
use crate::sys::net::interfaces;
use crate::sys::verbs::{GidKind, shows};
use std::net::{IpAddr, Ipv6Addr};

/// The device with this name, such as `mlx5_0`, or with its port `mlx5_0:1`. `None` if there is none, or if an
/// interface has that name too.
fn device_named(name: &str) -> Option<NicName> {
    let nic = match NicName::list(name)?.as_slice() {
        [nic] => nic.clone(),
        _ => return None,
    };
    let taken = || interfaces().iter().any(|interface| interface.name == name);
    (shows(&nic.device) && !taken()).then_some(nic)
}

/// See [`crate::transport::Transport::addresses_of`]: RoCE's GIDs. Opens the device.
pub(crate) fn addresses_of(name: &str) -> Vec<IpAddr> {
    let Some(nic) = device_named(name) else { return Vec::new() };
    let devices = candidates(std::slice::from_ref(&nic));
    devices
        .iter()
        .filter(|(_, port)| {
            port.device == nic.device && nic.port.is_none_or(|number| number == port.port.number)
        })
        .flat_map(|(_, port)| &port.gids)
        .filter(|gid| gid.kind == GidKind::RoceV2)
        .map(|gid| Ipv6Addr::from(gid.raw))
        .filter(|ip| !ip.is_unicast_link_local())
        .map(|ip| ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4))
        .collect()
}

/// See [`crate::transport::Transport::with_device`].
pub(crate) fn with_device(config: &Config, name: &str) -> Option<Result<Config, &'static str>> {
    device_named(name).map(|nic| insisting(config, &nic))
}

/// The configuration of a domain that must use `nic` and no other device. Error: the variable with which the user
/// excludes that.
fn insisting(config: &Config, nic: &NicName) -> Result<Config, &'static str> {
    if !config.net.on {
        return Err("no network (FI_UDRV_NET=0)");
    }
    let rdma = &config.net.rdma;
    if rdma.policy == RdmaPolicy::Off {
        return Err("no RDMA (FI_UDRV_RDMA=off)");
    }
    let allows = |allowed: &NicName| {
        allowed.device == nic.device && (allowed.port.is_none() || allowed.port == nic.port)
    };
    // The user allows only one port of it, and the application names no port.
    let narrower = |allowed: &&NicName| allowed.device == nic.device && nic.port.is_none();
    let nics = if rdma.nics.is_empty() || rdma.nics.iter().any(allows) {
        vec![nic.clone()]
    } else {
        rdma.nics.iter().filter(narrower).cloned().collect()
    };
    if nics.is_empty() {
        return Err("those of FI_UDRV_NIC");
    }
    let mut config = config.clone();
    (config.net.rdma.policy, config.net.rdma.nics) = (RdmaPolicy::Require, nics);
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(nics: &str) -> Config {
        let mut config = Config::default();
        if !nics.is_empty() {
            config.net.rdma.nics = NicName::list(nics).unwrap();
        }
        config
    }

    #[test]
    fn what_is_no_device_is_no_name_of_one() {
        for name in ["lo", "no_such_0", "..", ".", "", "a,b", "no_such_0:1"] {
            assert_eq!(device_named(name), None, "{name}");
        }
    }

    #[test]
    fn the_user_has_the_last_word() {
        let nic = |text: &str| NicName::list(text).unwrap().remove(0);
        for (allowed, asked, want) in [
            ("", "a", "a"),
            ("", "a:1", "a:1"),
            ("a,b", "a", "a"),
            ("b,a:2", "a", "a:2"),
            ("a", "a:2", "a:2"),
            ("a:2", "a:2", "a:2"),
        ] {
            let config = insisting(&config(allowed), &nic(asked)).unwrap();
            assert_eq!(config.net.rdma.nics, NicName::list(want).unwrap(), "{allowed} {asked}");
            assert_eq!(config.net.rdma.policy, RdmaPolicy::Require);
        }
        assert_eq!(insisting(&config("b"), &nic("a")), Err("those of FI_UDRV_NIC"));
        assert_eq!(insisting(&config("a:1"), &nic("a:2")), Err("those of FI_UDRV_NIC"));
        let mut off = config("");
        off.net.rdma.policy = RdmaPolicy::Off;
        assert!(insisting(&off, &nic("a")).is_err());
        let mut off = config("");
        off.net.on = false;
        assert!(insisting(&off, &nic("a")).is_err());
    }
}
