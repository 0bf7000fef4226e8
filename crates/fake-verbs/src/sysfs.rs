//! The tree of devices under `sys` in the run's directory, for programs that look before they load libibverbs.
//! `SYSFS_PATH`, which libibverbs itself obeys, leads to it.

use crate::personality::{Device, Personality};
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
    }
    std::fs::create_dir_all(directory.join("wire"))
}

fn describe(place: &Path, device: &Device) -> std::io::Result<()> {
    std::fs::create_dir_all(place.join("device"))?;
    std::fs::write(place.join("device/numa_node"), "-1\n")?;
    for (index, port) in device.ports.iter().enumerate() {
        let port_place = place.join(format!("ports/{}", index + 1));
        std::fs::create_dir_all(port_place.join("pkeys"))?;
        for (at, pkey) in port.pkeys.iter().enumerate() {
            std::fs::write(port_place.join(format!("pkeys/{at}")), format!("{pkey:#06x}\n"))?;
        }
    }
    Ok(())
}
