//! The distance of devices: NUMA nodes, and ways on the bus, as the kernel shows them.

use crate::sys::net::PciAddress;
use std::path::Path;

/// Distance from the processor that runs this thread to memory node `node`, as firmware states it:
/// 10 is the same node. `None` if unknown.
pub(crate) fn numa_distance(node: u32) -> Option<u32> {
    let here = current_node()?;
    let path = format!("/sys/devices/system/node/node{here}/distance");
    let text = std::fs::read_to_string(path).ok()?;
    // One number for each node that is online, in order.
    let online = std::fs::read_to_string("/sys/devices/system/node/online").ok()?;
    let at = parse_list(online.trim()).into_iter().position(|n| n == node)?;
    text.split_whitespace().nth(at)?.parse().ok()
}

/// How many bridges and ports the ways of two devices from the processor share: the more, the nearer are they to each other. `sysfs`:
/// the kernel's directory of devices. `None`: it does not show one of them.
pub(crate) fn shared_way(sysfs: &Path, one: PciAddress, other: PciAddress) -> Option<u32> {
    let way = |of: PciAddress| {
        let path = std::fs::canonicalize(sysfs.join(format!("bus/pci/devices/{of}"))).ok()?;
        let all = std::fs::canonicalize(sysfs.join("devices")).ok()?;
        path.strip_prefix(all).ok().map(Path::to_owned)
    };
    let (one, other) = (way(one)?, way(other)?);
    let shared = one.components().zip(other.components()).take_while(|(one, other)| one == other);
    u32::try_from(shared.count()).ok()
}

fn current_node() -> Option<u32> {
    let (mut cpu, mut node) = (0u32, 0u32);
    // SAFETY: fills two live locals; the third argument is unused since Linux 2.6.24.
    let rc = unsafe {
        libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, std::ptr::null_mut::<u8>())
    };
    (rc == 0).then_some(node)
}

/// The numbers of a list such as `0-2,5`.
fn parse_list(text: &str) -> Vec<u32> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
            all.extend(first..=last.min(first.saturating_add(4096)));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(parse_list("0"), [0]);
        assert_eq!(parse_list("0-2,5"), [0, 1, 2, 5]);
        assert_eq!(parse_list(""), []);
        assert_eq!(parse_list("x-y,7"), [7]);
    }

    #[test]
    fn devices_behind_one_switch_share_more_of_their_ways() {
        let root = std::env::temp_dir().join(format!("udrv-sysfs-{}", std::process::id()));
        let (all, by_address) = (root.join("devices"), root.join("bus/pci/devices"));
        std::fs::create_dir_all(&by_address).unwrap();
        let switch = "pci0000:3a/0000:3a:00.0/0000:3b:00.0";
        for way in [
            format!("{switch}/0000:3c:00.0/0000:3d:00.0"),
            format!("{switch}/0000:3c:01.0/0000:3e:00.0"),
            "pci0000:3a/0000:3a:01.0/0000:40:00.0".to_owned(),
            "pci0000:80/0000:80:00.0/0000:81:00.0".to_owned(),
        ] {
            let place = all.join(way);
            std::fs::create_dir_all(&place).unwrap();
            let link = by_address.join(place.file_name().unwrap());
            std::os::unix::fs::symlink(&place, link).unwrap();
        }
        let at = |text| PciAddress::from_text(text).unwrap();
        let shared = |other| shared_way(&root, at("0000:3d:00.0"), at(other));
        let near = ["0000:3e:00.0", "0000:40:00.0", "0000:81:00.0", "0000:99:00.0"].map(shared);
        assert_eq!(near, [Some(3), Some(1), Some(0), None]);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn here_is_nearest() {
        if let Some(node) = current_node().filter(|_| numa_distance(0).is_some()) {
            assert!(numa_distance(node).is_some_and(|distance| distance <= 255));
        }
        assert_eq!(numa_distance(u32::MAX), None);
    }
}
