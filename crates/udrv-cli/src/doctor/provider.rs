//! The provider, libfabric, and the job key.
#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use super::{Finding, Verdict};
use crate::probe::probe;
use crate::{find, job_key, key};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The oldest libfabric that loads the provider.
const OLDEST: (u32, u32) = (1, 17);

pub(super) fn check() -> Vec<Finding> {
    let Some(folder) = find::provider_folder() else {
        return vec![
            Finding::new(
                "provider",
                Verdict::Fail,
                format!("no {} beside this command", find::PROVIDER),
            )
            .remedy("set FI_PROVIDER_PATH to its folder, or run scripts/install"),
        ];
    };
    let file = folder.join(find::PROVIDER);
    let mut findings = vec![Finding::new("provider", Verdict::Good, file.display().to_string())];
    findings.push(libfabric(find::LIBFABRIC, &folder));
    findings.extend(environment(&folder));
    findings.push(job_key());
    findings
}

/// Whether one libfabric loads the provider, and what udrv offers then.
pub(super) fn libfabric(which: &str, folder: &Path) -> Finding {
    let said = match probe(&["--libfabric", which, "--offers", "udrv"], Some(folder)) {
        Ok(said) => said,
        Err(why) if which == find::LIBFABRIC => {
            return Finding::new(
                "libfabric",
                Verdict::Note,
                format!("the loader finds none: {why}"),
            )
            .remedy("an MPI may bring its own; else install the package libfabric or libfabric1");
        }
        Err(why) => return Finding::new("libfabric", Verdict::Fail, format!("{which}: {why}")),
    };
    let (file, version) =
        (said["file"].as_str().unwrap_or(which), said["version"].as_str().unwrap_or("?"));
    let name = format!("{version} ({file})");
    if !is_new_enough(version) {
        return Finding::new("libfabric", Verdict::Fail, format!("{name} is too old"))
            .remedy(format!("use {}.{} or newer", OLDEST.0, OLDEST.1));
    }
    let Some(offers) = said["offers"].as_array().filter(|offers| !offers.is_empty()) else {
        let why = said["offers"]["error"].as_str().unwrap_or("no reason given");
        return Finding::new(
            "libfabric",
            Verdict::Fail,
            format!("{name} gets nothing from udrv: {why}"),
        )
        .remedy("FI_LOG_LEVEL=warn udrv run fi_info says why");
    };
    let domains: Vec<&str> = offers.iter().filter_map(|offer| offer["domain"].as_str()).collect();
    Finding::new(
        "libfabric",
        Verdict::Good,
        format!("{name} loads udrv: {}{}", domains.join(", "), unasked(&said, folder)),
    )
}

/// Whether the libfabric looks into the provider's folder without being told.
fn unasked(said: &Value, folder: &Path) -> String {
    let Some(own) = said["provider_folder"].as_str() else { return String::new() };
    let real = PathBuf::from(own).canonicalize();
    if real.is_ok_and(|real| real == folder) {
        return "; it looks there unasked".to_owned();
    }
    format!("; by FI_PROVIDER_PATH only, as it looks into {own}")
}

fn is_new_enough(version: &str) -> bool {
    let parts = version.split_once('.').map(|(major, minor)| (major.parse(), minor.parse()));
    matches!(parts, Some((Ok(major), Ok(minor))) if (major, minor) >= OLDEST)
}

/// The variables that decide whether programs take udrv.
fn environment(folder: &Path) -> Vec<Finding> {
    let preferred = std::env::var("FI_PROVIDER_PATH").ok().filter(|path| find::prefers(path));
    let note = preferred.map(|path| {
        let says = format!("FI_PROVIDER_PATH={path}: + is for libfabric 1.21 and newer");
        let remedy = format!("export FI_PROVIDER_PATH={} for older ones", folder.display());
        Finding::new("environment", Verdict::Note, says).remedy(remedy)
    });
    note.into_iter().chain(verdict(folder)).collect()
}

fn verdict(folder: &Path) -> Option<Finding> {
    let set = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    if let Some(path) = set("FI_PROVIDER_PATH") {
        let holds = |folder: &PathBuf| folder.join(find::PROVIDER).is_file();
        if !find::leaves_the_usual_folder(&path) && !find::folders_of(&path).iter().any(holds) {
            let says = format!("FI_PROVIDER_PATH={path} has no {}", find::PROVIDER);
            let remedy = format!("export FI_PROVIDER_PATH={}", folder.display());
            return Some(Finding::new("environment", Verdict::Fail, says).remedy(remedy));
        }
    }
    let wanted = set("FI_PROVIDER")?;
    if takes_udrv(&wanted) {
        return Some(Finding::new("environment", Verdict::Good, format!("FI_PROVIDER={wanted}")));
    }
    let says = format!("FI_PROVIDER={wanted} leaves udrv out");
    Some(Finding::new("environment", Verdict::Fail, says).remedy("export FI_PROVIDER=udrv"))
}

/// Whether udrv is in this list of providers; `^` at its beginning turns it into its opposite (fabric(7)).
fn takes_udrv(providers: &str) -> bool {
    let (denies, list) = match providers.strip_prefix('^') {
        Some(list) => (true, list),
        None => (false, providers),
    };
    list.split(',').any(|name| name.eq_ignore_ascii_case("udrv")) != denies
}

fn job_key() -> Finding {
    const ABOUT: &str = "job key";
    match key::variable() {
        (job_key::State::Good, of) => return Finding::new(ABOUT, Verdict::Good, of),
        (job_key::State::Bad(why), of) => {
            return Finding::new(ABOUT, Verdict::Fail, format!("{of} {why}"))
                .remedy("16 to 256 bytes of text");
        }
        (job_key::State::Missing, _) => (),
    }
    let Some(path) = job_key::path() else {
        return Finding::new(
            ABOUT,
            Verdict::Warn,
            "none, and neither HOME nor XDG_CONFIG_HOME is set",
        );
    };
    match job_key::state(&path) {
        job_key::State::Good => Finding::new(ABOUT, Verdict::Good, path.display().to_string()),
        job_key::State::Bad(why) => {
            Finding::new(ABOUT, Verdict::Fail, format!("{} {why}", path.display()))
                .remedy("udrv key --replace")
        }
        job_key::State::Missing => Finding::new(
            ABOUT,
            Verdict::Warn,
            "none: other hosts of the network can talk to your processes",
        )
        .remedy("udrv key"),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_list_of_providers_takes_or_denies_them() {
        for (list, takes) in [
            ("udrv", true),
            ("tcp,UDRV", true),
            ("tcp", false),
            ("^tcp", true),
            ("^tcp,udrv", false),
            ("^udrv", false),
        ] {
            assert_eq!(super::takes_udrv(list), takes, "{list}");
        }
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        for (version, enough) in
            [("1.17", true), ("1.9", false), ("2.1", true), ("1.13", false), ("", false)]
        {
            assert_eq!(super::is_new_enough(version), enough, "{version}");
        }
    }
}
