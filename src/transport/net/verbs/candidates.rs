//! Which devices are opened to look for a port: as few as sysfs allows. To open one takes the kernel and the firmware
//! milliseconds, and all processes of a node begin at the same time. So those without an active port stay closed, and
//! slower ones until no port of a faster one works: the fastest port is preferred anyway (`choice.rs`).

use super::choice::Candidate;
use super::config::NicName;
use crate::sys::cuda::Cuda;
use crate::sys::few;
use crate::sys::topology::{numa_distance, shared_way};
use crate::sys::verbs::{Device, DeviceList, OpenDevice, sysfs};

/// What sysfs tells of the devices.
pub(super) struct Listed<'a> {
    /// Those that may be used, the fastest first, and those of one speed together.
    pub(super) tiers: Vec<Vec<Device<'a>>>,
    /// Why others may not.
    pub(super) refused: Vec<String>,
}

/// The devices of `list` that `nics` names (empty: any). Opens none.
pub(super) fn listed<'a>(list: &'a DeviceList, nics: &[NicName]) -> Listed<'a> {
    let (mut fit, mut refused) = (Vec::new(), Vec::new());
    for device in list.iter() {
        let name = device.name();
        if let Err(why) = device.is_adapter() {
            refused.push(format!("{name} {why}"));
        } else if !nics.is_empty() && !nics.iter().any(|nic| nic.device == name) {
            refused.push(format!("{name} is not in FI_UDRV_NIC"));
        } else {
            match device.listed_mbps() {
                Ok(speed) => fit.push((speed, device)),
                Err(why) => refused.push(format!("{name} {why}")),
            }
        }
    }
    Listed { tiers: tiers(fit), refused }
}

/// Those of one speed together, the fastest first. Those of an unknown speed are among the fastest: only the device can
/// tell.
fn tiers<T>(mut all: Vec<(Option<u64>, T)>) -> Vec<Vec<T>> {
    let fastest = all.iter().filter_map(|(speed, _)| *speed).max().unwrap_or(0);
    let of = |speed: Option<u64>| speed.unwrap_or(fastest);
    few::sort(&mut all, |(a, _), (b, _)| of(*a) > of(*b));
    let (mut tiers, mut last) = (Vec::<Vec<T>>::new(), None);
    for (speed, device) in all {
        let speed = of(speed);
        match tiers.last_mut().filter(|_| last == Some(speed)) {
            Some(tier) => tier.push(device),
            None => tiers.push(vec![device]),
        }
        last = Some(speed);
    }
    tiers
}

/// All ports of `devices`, opened; `refused` has the reasons why some are missing.
pub(super) fn opened(
    devices: &[Device<'_>],
    refused: &mut Vec<String>,
) -> Vec<(OpenDevice, Candidate)> {
    let mut all = Vec::new();
    // Nobody has loaded CUDA without FI_HMEM.
    let gpu = Cuda::get().and_then(Cuda::address_on_bus);
    for device in devices {
        let name = device.name();
        let (facts, device) = match device.open().and_then(|it| Ok((it.facts()?, it))) {
            Ok(opened) => opened,
            Err(errno) => {
                refused.push(format!("{name} cannot be opened: {errno}"));
                continue;
            }
        };
        for number in 1..=facts.ports {
            let asked = device.port(number).and_then(|port| Ok((port, device.gids(number)?)));
            match asked {
                Ok((port, gids)) => {
                    let distance = facts.numa_node.and_then(numa_distance);
                    let partitions = device.partitions(&port);
                    let beside = |gpu| shared_way(&sysfs(), facts.pci?, gpu);
                    let beside_gpu = gpu.and_then(beside);
                    let candidate = Candidate {
                        device: name.clone(),
                        port,
                        gids,
                        partitions,
                        distance,
                        beside_gpu,
                    };
                    all.push((device.clone(), candidate));
                }
                Err(errno) => refused.push(format!("{name}:{number} does not answer: {errno}")),
            }
        }
    }
    all
}

/// All ports of the devices that `nics` names, opened.
pub(super) fn candidates(nics: &[NicName]) -> Vec<(OpenDevice, Candidate)> {
    let Ok(list) = DeviceList::new() else { return Vec::new() };
    let named: Vec<Device<'_>> = listed(&list, nics).tiers.into_iter().flatten().collect();
    opened(&named, &mut Vec::new())
}

/// The names of all adapters, also of those that are down; `None`: they cannot be listed.
pub(super) fn adapters() -> Option<Vec<String>> {
    let list = DeviceList::new().ok()?;
    let usable = list.iter().filter(|device| device.is_adapter().is_ok());
    Some(usable.map(|device| device.name()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_are_looked_at_first_and_those_that_say_nothing_with_them() {
        let all =
            vec![(Some(25), "a"), (Some(400), "b"), (None, "c"), (Some(25), "d"), (Some(400), "e")];
        assert_eq!(tiers(all), [vec!["b", "c", "e"], vec!["a", "d"]]);
        assert_eq!(tiers(vec![(None, "a"), (None, "b")]), [["a", "b"]]);
        assert!(tiers(Vec::<(Option<u64>, ())>::new()).is_empty());
    }
}
