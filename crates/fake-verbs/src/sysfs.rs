//! The tree of devices under `sys` in the run's directory, for programs that look before they load libibverbs.
//! `SYSFS_PATH`, which libibverbs itself obeys, leads to it.

use crate::nic::view::gids;
use crate::personality::{Device, Link, Personality, Port};
use crate::settings;
use std::path::{Path, PathBuf};

/// The root of the tree, the value of `SYSFS_PATH`.
pub fn root(directory: &Path) -> PathBuf {
    directory.join("sys")
}

/// The directory of device number `index` as libibverbs gives it in `ibv_device::dev_path`: it is there as long as the
/// device is.
pub fn node(directory: &Path, index: usize) -> PathBuf {
    root(directory).join(format!("class/infiniband_verbs/uverbs{index}"))
}

/// The directory of the device `name` in the class of devices.
pub fn class(directory: &Path, name: &str) -> PathBuf {
    root(directory).join("class/infiniband").join(name)
}

/// Makes the tree. Errors: those of the file system.
pub fn make(directory: &Path, personality: &Personality) -> std::io::Result<()> {
    for (index, device) in personality.devices.iter().enumerate() {
        std::fs::create_dir_all(node(directory, index))?;
        describe(&class(directory, device.name), device)?;
        if settings::number(settings::BUS) == 0 {
            std::fs::create_dir_all(class(directory, device.name).join("device"))?;
        } else {
            let address = format!("0000:{:02x}:00.0", index + 1);
            put_on_bus(directory, index, &address)?;
            let place = on_bus(directory, index).join(address);
            std::os::unix::fs::symlink(place, class(directory, device.name).join("device"))?;
        }
        std::fs::write(class(directory, device.name).join("device/numa_node"), "-1\n")?;
    }
    // The first GPU of the double of CUDA is behind the same port as the last device.
    let last = personality.devices.len().checked_sub(1);
    if let Some(last) = last.filter(|_| settings::number(settings::BUS) != 0) {
        put_on_bus(directory, last, "0000:40:00.0")?;
    }
    if settings::number(settings::PEERMEM) != 0 {
        std::fs::create_dir_all(root(directory).join("module/nvidia_peermem"))?;
    }
    std::fs::create_dir_all(directory.join("wire"))
}

/// The port of the host's bridge behind which device number `index` is.
fn on_bus(directory: &Path, index: usize) -> PathBuf {
    root(directory).join(format!("devices/pci0000:00/0000:00:{:02x}.0", index + 1))
}

/// There is something at `address` behind that port.
fn put_on_bus(directory: &Path, index: usize, address: &str) -> std::io::Result<()> {
    let (place, all) =
        (on_bus(directory, index).join(address), root(directory).join("bus/pci/devices"));
    std::fs::create_dir_all(&place)?;
    std::fs::create_dir_all(&all)?;
    std::os::unix::fs::symlink(place, all.join(address))
}

fn describe(place: &Path, device: &Device) -> std::io::Result<()> {
    std::fs::create_dir_all(place)?;
    for (index, port) in device.ports.iter().enumerate() {
        let port_place = place.join(format!("ports/{}", index + 1));
        std::fs::create_dir_all(port_place.join("pkeys"))?;
        let state = if port.active { "4: ACTIVE\n" } else { "1: DOWN\n" };
        std::fs::write(port_place.join("state"), state)?;
        let layer = match port.link {
            Link::InfiniBand { .. } => "InfiniBand\n",
            Link::Ethernet { .. } => "Ethernet\n",
        };
        std::fs::write(port_place.join("link_layer"), layer)?;
        std::fs::write(port_place.join("rate"), format!("{} Gb/sec\n", port.gbps))?;
        list_gids(&port_place, port)?;
        for (at, pkey) in port.pkeys.iter().enumerate() {
            std::fs::write(port_place.join(format!("pkeys/{at}")), format!("{pkey:#06x}\n"))?;
        }
    }
    Ok(())
}

/// The GIDs of a port, as older libraries find them.
fn list_gids(place: &Path, port: &Port) -> std::io::Result<()> {
    for what in ["gids", "gid_attrs/types"] {
        std::fs::create_dir_all(place.join(what))?;
    }
    for (index, (gid, v2)) in gids(port).into_iter().enumerate() {
        let word = |two: &[u8]| two.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let words: Vec<String> = gid.chunks(2).map(word).collect();
        std::fs::write(place.join(format!("gids/{index}")), words.join(":") + "\n")?;
        let kind = if v2 { "RoCE v2\n" } else { "IB/RoCE v1\n" };
        std::fs::write(place.join(format!("gid_attrs/types/{index}")), kind)?;
    }
    Ok(())
}
