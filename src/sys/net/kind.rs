//! Which of several interfaces leads to other hosts, as far as the kernel tells.

use std::path::Path;

/// Prefixes of the names that container engines and libvirt give to interfaces they make.
const MADE: [&str; 18] = [
    "docker",
    "br-",
    "virbr",
    "veth",
    "vnet",
    "cni",
    "flannel",
    "lxcbr",
    "lxdbr",
    "lxc",
    "podman",
    "cali",
    "cilium",
    "weave",
    "kube-",
    "nodelocaldns",
    "incusbr",
    "vmnet",
];

/// Whether the interface connects this host only with containers or VMs on it: a bridge without any of the host's own
/// devices as a port, or an interface with a name that container engines or libvirt give. Such an interface often has
/// the same address on every host.
pub(super) fn is_internal(name: &str) -> bool {
    decide(name, bridge_ports(Path::new("/sys/class/net"), name).as_deref())
}

/// `ports`: the ports of a bridge, each with whether a device of this host is behind it.
fn decide(name: &str, ports: Option<&[(String, bool)]>) -> bool {
    let made = MADE.iter().any(|start| name.starts_with(start));
    let outward = |(port, device): &(String, bool)| *device || leads_outward(port);
    match ports {
        Some(ports) => !ports.iter().any(outward),
        None => made,
    }
}

/// Devices made of other devices: a bond, a team, a VLAN.
fn leads_outward(port: &str) -> bool {
    ["bond", "team", "vlan"].iter().any(|start| port.starts_with(start)) || port.contains('.')
}

/// `None`: not a bridge, or sysfs does not tell (it may belong to another network namespace, which lacks the name).
fn bridge_ports(devices: &Path, name: &str) -> Option<Vec<(String, bool)>> {
    let ports = std::fs::read_dir(devices.join(name).join("brif")).ok()?;
    let names = ports.filter_map(|port| port.ok()?.file_name().into_string().ok());
    Some(
        names
            .map(|port| (devices.join(&port).join("device").exists(), port))
            .map(|(d, p)| (p, d))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_of_containers_and_libvirt_are_internal() {
        for name in [
            "docker0",
            "br-3f2a0c1d9e77",
            "virbr0",
            "veth12ab",
            "cni0",
            "flannel.1",
            "lxcbr0",
            "cali0a1",
        ] {
            assert!(decide(name, None), "{name}");
        }
        for name in
            ["eth0", "enp3s0f1np1", "ib0", "bond0", "br0", "wlan0", "hsn0", "eth0.100", "team0"]
        {
            assert!(!decide(name, None), "{name}");
        }
    }

    #[test]
    fn a_bridge_is_what_its_ports_are() {
        let port = |name: &str, device| (name.to_owned(), device);
        assert!(decide("br0", Some(&[])));
        assert!(decide("br0", Some(&[port("vnet3", false), port("veth1", false)])));
        assert!(!decide("br0", Some(&[port("vnet3", false), port("enp3s0", true)])));
        assert!(!decide("br0", Some(&[port("bond0", false)])));
        assert!(!decide("virbr1", Some(&[port("eth1", true)])), "bridged to a network");
        assert!(!decide("br-lan", Some(&[port("eth1.7", false)])));
    }
}
