//! InfiniBand and RoCE devices.

#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use super::Verdict::{Good, Note, Warn};
use super::{Finding, read};
use crate::find;
use crate::probe::probe;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where devices are listed instead of /sys; libibverbs and the provider obey the variable too.
fn moved() -> Option<OsString> {
    std::env::var_os("SYSFS_PATH").filter(|path| !path.is_empty())
}

/// The kernel's directory of devices.
fn sysfs() -> PathBuf {
    moved().unwrap_or_else(|| "/sys".into()).into()
}

/// Where the kernel lists the devices.
fn folder() -> PathBuf {
    sysfs().join("class/infiniband")
}

/// Whether RDMA devices may register memory of GPUs by its address, as the provider finds out. `None`: there is no GPU.
fn peer_memory(sysfs: &Path, gpus: &Path) -> Option<Finding> {
    let modules = ["module/nvidia_peermem", "kernel/mm/memory_peers/nv_mem"];
    let loaded = modules.iter().any(|module| sysfs.join(module).exists());
    let says = match loaded {
        true => "nvidia-peermem is loaded: RDMA devices without dma-bufs register memory of GPUs",
        false => "nvidia-peermem is not loaded: memory of GPUs needs RDMA devices with dma-bufs",
    };
    (!entries(gpus).is_empty()).then(|| Finding::new("devices", Note, says))
}

/// This machine has RDMA devices.
pub(super) fn are_there() -> bool {
    !entries(&folder()).is_empty()
}

pub(super) fn check() -> Vec<Finding> {
    let devices = entries(&folder());
    if devices.is_empty() {
        return vec![Finding::new(
            "devices",
            Note,
            "no RDMA devices: other nodes are reached over UDP and TCP",
        )];
    }
    let mut findings: Vec<Finding> = devices
        .iter()
        .flat_map(|device| entries(&device.join("ports")))
        .map(|port| check_port(&port))
        .collect();
    findings.extend(peer_memory(&sysfs(), Path::new("/proc/driver/nvidia/gpus")));
    let verdicts = verdicts();
    if verdicts.iter().any(|finding| finding.verdict == Good) {
        findings.extend(verdicts);
    } else if libloading_finds("libibverbs.so.1") {
        findings.extend(verdicts);
        // /dev is the kernel's, whose devices others are.
        findings.extend(moved().is_none().then(uverbs));
    } else {
        findings.push(
            Finding::new("devices", Warn, "libibverbs.so.1 is missing: no device is used")
                .remedy("install libibverbs1 and ibverbs-providers (rdma-core)"),
        );
    }
    findings
}

/// What the provider makes of each device, and why.
fn verdicts() -> Vec<Finding> {
    let folder = find::provider_folder();
    let said = folder.map(|folder| probe(&["--offers", "udrv"], Some(&folder)));
    let Some(Ok(said)) = said else { return Vec::new() };
    let lines = said["devices"].as_array().into_iter().flatten().filter_map(|line| line.as_str());
    lines.map(|line| Finding::new("devices", verdict(line), line)).collect()
}

fn verdict(line: &str) -> super::Verdict {
    match line {
        _ if line.starts_with("RDMA through ") => Good,
        _ if line.starts_with("no RDMA through ") => Warn,
        _ => Note,
    }
}

fn entries(of: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        std::fs::read_dir(of).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// A file `/sys/class/infiniband/DEVICE/ports/N`.
fn check_port(port: &Path) -> Finding {
    let file = |name: &str| read(&port.join(name).to_string_lossy()).unwrap_or_default();
    let device =
        port.ancestors().nth(2).and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    let number = port.file_name().unwrap_or_default().to_string_lossy();
    let state = file("state");
    let mut parts = vec![file("link_layer"), file("rate"), format!("state {state}")];
    // Not every driver tells each of them.
    parts.retain(|part| !part.is_empty());
    let says = format!("{device}:{number} {}", parts.join(", "));
    if state.contains("ACTIVE") {
        Finding::new("devices", Good, says)
    } else {
        Finding::new("devices", Warn, says)
            .remedy(format!("ibv_devinfo -d {device}; is the cable, or the interface, up?"))
    }
}

/// Whether this user may open devices.
fn uverbs() -> Finding {
    let nodes: Vec<PathBuf> = entries(Path::new("/dev/infiniband"))
        .into_iter()
        .filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("uverbs"))
        })
        .collect();
    let open = |path: &PathBuf| std::fs::OpenOptions::new().read(true).write(true).open(path);
    match nodes.iter().map(open).find_map(Result::err) {
        None if nodes.is_empty() => {
            Finding::new("devices", Warn, "no /dev/infiniband/uverbs*: no device can be opened")
                .remedy("modprobe ib_uverbs; in containers: --device /dev/infiniband")
        }
        None => Finding::new(
            "devices",
            Good,
            format!("{} of /dev/infiniband can be opened", nodes.len()),
        ),
        Some(error) => Finding::new("devices", Warn, format!("/dev/infiniband: {error}"))
            .remedy("read and write permission for /dev/infiniband/uverbs*"),
    }
}

#[allow(unsafe_code)] // foreign functions
fn libloading_finds(name: &str) -> bool {
    // SAFETY: a library of the system, whose initialisation any process may run.
    unsafe { libloading::Library::new(name) }.is_ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn with_a_gpu_it_is_said_whether_its_memory_can_be_registered_by_address() {
        let place = std::env::temp_dir().join(format!("udrv-doctor-gpu-{}", std::process::id()));
        let gpus = place.join("gpus");
        std::fs::create_dir_all(&place).unwrap();
        assert!(super::peer_memory(&place, &gpus).is_none());
        std::fs::create_dir_all(gpus.join("0000:3b:00.0")).unwrap();
        let says = || super::peer_memory(&place, &gpus).unwrap().says;
        assert!(says().starts_with("nvidia-peermem is not loaded"));
        std::fs::create_dir_all(place.join("module/nvidia_peermem")).unwrap();
        assert!(says().starts_with("nvidia-peermem is loaded"));
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn a_port_without_a_rate_is_shown_without_it() {
        let place = std::env::temp_dir().join(format!("udrv-doctor-{}", std::process::id()));
        let port = place.join("efa_0/ports/1");
        std::fs::create_dir_all(&port).unwrap();
        std::fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
        assert_eq!(super::check_port(&port).says, "efa_0:1 state 4: ACTIVE");
        std::fs::write(port.join("link_layer"), "Ethernet\n").unwrap();
        std::fs::write(port.join("rate"), "100 Gb/sec\n").unwrap();
        assert_eq!(super::check_port(&port).says, "efa_0:1 Ethernet, 100 Gb/sec, state 4: ACTIVE");
        std::fs::remove_dir_all(&place).unwrap();
    }
}
