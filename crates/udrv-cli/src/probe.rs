//! `udrv probe`: loads a libfabric in a process of its own, and prints what it says. The other commands run it.
#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use crate::job_key::{self, State, in_libfabric};
use crate::libfabric::{Libfabric, Parameter};
use crate::peer::Pair;
use crate::watch::end_with_the_leader;
use crate::{Outcome, bounded, find, page, run};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[derive(clap::Args)]
pub(crate) struct Probe {
    /// The libfabric: a file, or a name for the loader
    #[arg(long, default_value = find::LIBFABRIC)]
    libfabric: String,
    /// Print what this provider offers
    #[arg(long)]
    offers: Option<String>,
    /// Print the protocols of messages of this provider
    #[arg(long)]
    thresholds: bool,
}

/// How long a libfabric may take to say what it has.
const LIMIT: Duration = Duration::from_secs(20);

impl Probe {
    pub(crate) fn run(self) -> Outcome {
        end_with_the_leader();
        let libfabric = Libfabric::open(&self.libfabric)?;
        let (major, minor) = libfabric.version()?;
        let mut found = json!({
            "file": libfabric.path(),
            "version": format!("{major}.{minor}"),
            "provider_folder": libfabric.provider_folder(),
        });
        if let Some(provider) = &self.offers {
            found["offers"] = offers(&libfabric, provider);
            found["variables"] = variables(&libfabric);
        }
        if self.thresholds {
            (found["thresholds"], found["build"]) = match thresholds(&self.libfabric) {
                Ok((lines, build)) => (json!(lines), build),
                Err(why) => (json!({ "error": why }), Value::Null),
            };
        }
        // Behind the list of variables, in which it leaves a second entry.
        found["job_key"] = match in_libfabric(&libfabric) {
            State::Missing => Value::Null,
            State::Good => json!({ "refused": null }),
            State::Bad(why) => json!({ "refused": why }),
        };
        println!("{found}");
        Ok(ExitCode::SUCCESS)
    }
}

fn offers(libfabric: &Libfabric, provider: &str) -> Value {
    let found = match libfabric.offers(provider) {
        Ok(found) => found,
        Err(why) => return json!({ "error": why }),
    };
    let rows = found.into_iter().map(|offer| {
        json!({
            "provider": offer.provider,
            "domain": offer.domain,
            "address": offer.address,
            "device": offer.device,
            "speed": offer.speed,
            "mtu": offer.mtu,
        })
    });
    rows.collect()
}

/// The variables of udrv. A secret is hidden: the output may become part of a bug report.
fn variables(libfabric: &Libfabric) -> Value {
    let all = libfabric.parameters().unwrap_or_default();
    let ours = all.into_iter().filter(|parameter| parameter.name.starts_with("FI_UDRV_"));
    let shown = |name: &str, value: Option<String>| match name {
        job_key::VARIABLE => value.map(|_| "(set)".to_owned()),
        _ => value,
    };
    let value = |p: &Parameter| match p.name.as_str() {
        // A program that asks libfabric for it has it in libfabric's log.
        job_key::VARIABLE if p.value.is_some() => p.value.clone(),
        name => libfabric.value(&name.trim_start_matches("FI_").to_ascii_lowercase()),
    };
    ours.map(|p| json!({ "value": shown(&p.name, value(&p)), "name": p.name, "help": p.help }))
        .collect()
}

/// The protocols of messages to another process of this node, as they are once the two have talked; and which build of
/// the provider says so.
fn thresholds(libfabric: &str) -> Result<(Vec<String>, Value), String> {
    const LENGTHS: [usize; 4] = [8, 4096, 65_536, 1 << 20];
    const ROUNDS: usize = 20;
    let (mut pair, other) = Pair::start(libfabric)?;
    for len in LENGTHS {
        pair.ping_pong(len, ROUNDS)?;
    }
    let lines = pair.endpoint.thresholds(pair.other)?;
    let build = build();
    other.quit(&mut pair)?;
    Ok((lines.lines().map(str::to_owned).collect(), build))
}

/// Version and commit of the provider that this process has loaded, from its page; null if it has none.
fn build() -> Value {
    let pages = page::all(&[std::process::id()]);
    pages
        .first()
        .map_or(Value::Null, |page| json!({ "version": page["version"], "commit": page["commit"] }))
}

/// Runs `udrv probe` with these arguments, and with the provider in `folder` if one is given. Errors: its own, and that
/// it took too long.
pub(crate) fn probe(arguments: &[&str], folder: Option<&Path>) -> Result<Value, String> {
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(exe);
    command.arg("probe").args(arguments);
    match folder {
        Some(folder) => command.envs(run::variables(folder.to_owned())),
        None => command.env_remove("FI_PROVIDER_PATH").env_remove("FI_PROVIDER"),
    };
    let shown = levels_shown(&std::env::var(LOG).unwrap_or_default());
    // The verdicts on devices are lines of this level, and are read here.
    if shown <= INFO {
        command.env(LOG, "info");
    }
    command.env(LOG_FILE, "");
    let output = bounded::output(&mut command, LIMIT)?;
    let said = String::from_utf8_lossy(&output.stderr);
    let is_hidden = |line: &&str| LEVELS.iter().skip(shown).any(|(_, mark)| line.contains(mark));
    let shown = said.lines().filter(|line| !is_hidden(line));
    if !output.status.success() {
        let mut lines: Vec<&str> = shown.collect();
        let last = lines.pop().unwrap_or("it crashed").to_owned();
        show(lines.into_iter());
        return Err(last.trim_start_matches("udrv: ").to_owned());
    }
    // Warnings of the provider are for the user.
    show(shown);
    let mut found: Value =
        serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    found["devices"] = json!(devices(&said));
    for variable in found["variables"].as_array_mut().into_iter().flatten() {
        if let Some(name @ (LOG | LOG_FILE)) = variable["name"].as_str() {
            let value = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
            variable["value"] = json!(value);
        }
    }
    Ok(found)
}

/// Variables that `udrv probe` has other values of than its user.
const LOG: &str = "FI_UDRV_LOG";
const LOG_FILE: &str = "FI_UDRV_LOG_FILE";

/// Values of [`LOG`] but "off", each of which has the lines of those before it, and how such lines begin behind the name of
/// their process.
const LEVELS: [(&str, &str); 4] = [
    ("error", "] udrv error: "),
    ("warn", "] udrv warning: "),
    ("info", "] udrv info: "),
    ("debug", "] udrv debug: "),
];
const WARN: usize = 1;
const INFO: usize = 2;

/// Prints lines of the provider's log, but those that an earlier probe of this command has said: each probe is a process of
/// its own, and the provider says everything once in each.
fn show<'a>(lines: impl Iterator<Item = &'a str>) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    lines
        .filter(|line| said.insert(without_process(line).to_owned()))
        .for_each(|line| eprintln!("{line}"));
}

/// A line without the name of the process that begins it.
fn without_process(line: &str) -> &str {
    match line.split_once("] udrv ") {
        Some((name, said)) if name.starts_with('[') => said,
        _ => line,
    }
}

/// How many of the levels the user wants to read. The provider takes any other word for "warn".
fn levels_shown(log: &str) -> usize {
    let is = |word: &str| log.trim().eq_ignore_ascii_case(word);
    if is("off") || is("0") {
        return 0;
    }
    LEVELS.iter().position(|(word, _)| is(word)).unwrap_or(WARN) + 1
}

/// What the provider's log says of each RDMA device, once each, when it is asked what there is. Of two verdicts of which
/// one goes on where the other ends, the longer one.
fn devices(log: &str) -> Vec<String> {
    const SUBJECTS: [&str; 4] =
        ["no RDMA through ", "RDMA through ", "RDMA device ", "no RDMA at "];
    let mut found: Vec<String> = Vec::new();
    for line in log.lines() {
        // That one is of an endpoint.
        if line.contains("; queue pair ") {
            continue;
        }
        let at = SUBJECTS.iter().find_map(|subject| line.find(subject));
        let Some(verdict) = at.and_then(|at| line.get(at..)).map(without_port) else { continue };
        if !found.iter().any(|other| other.starts_with(&verdict)) {
            found.retain(|other| !verdict.starts_with(other.as_str()));
            found.push(verdict);
        }
    }
    found
}

/// A verdict on an address does not depend on its port, which each endpoint has its own of.
fn without_port(verdict: &str) -> String {
    let of_address = verdict.split_once("://").and_then(|(_, rest)| rest.split_once(": "));
    match of_address.and_then(|(address, why)| Some((address.rsplit_once(':')?.0, why))) {
        Some((host, why)) if verdict.starts_with("no RDMA at ") => {
            format!("no RDMA at {host}: {why}")
        }
        _ => verdict.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn levels_are_words_of_the_variable() {
        for (log, shown) in
            [("off", 0), ("0", 0), ("error", 1), ("", 2), ("WARN", 2), ("loud", 2), (" Info", 3)]
        {
            assert_eq!(super::levels_shown(log), shown, "{log}");
        }
        assert_eq!(super::levels_shown("debug"), super::LEVELS.len());
    }

    #[test]
    fn lines_of_two_processes_are_the_same() {
        let said =
            ["[a:1] udrv warning: x", "[a:22 rank 3] udrv warning: x"].map(super::without_process);
        assert_eq!(said, ["warning: x"; 2]);
        assert_eq!(super::without_process("udrv: [a] udrv x"), "udrv: [a] udrv x");
    }

    #[test]
    fn the_verdict_on_each_device_is_found_once() {
        let log = "[a:1] udrv info: RDMA through mlx5_0:1, RoCE v2: it is routable\n\
            libfabric:1:9::udrv:core:log():1<info> RDMA device mlx5_1:1 is not active\n\
            [a:1] udrv info: RDMA device mlx5_1:1 is not active\n[a:1] udrv info: other\n\
            [a:1] udrv info: RDMA through mlx5_0:1: it is routable; queue pair 0x2002\n\
            [a:1] udrv warning: no RDMA through mlx5_2:1 (out of memory): data goes over UDP\n\
            [a:1] udrv info: no RDMA at fi_sockaddr_in://192.0.2.2:0: efa_0 has no such: as EFA\n\
            [a:1] udrv info: no RDMA at fi_sockaddr_in://192.0.2.2:427: efa_0 has no such: as EFA\n\
            [a:1] udrv info: no RDMA at fi_sockaddr_in6://[fd00::2]:7: efa_0 has no such: as EFA\n\
            [a:1] udrv info: RDMA through qedr0:1: it is routable; it has no UD queue pairs\n\
            [a:1] udrv info: RDMA through qedr0:1: it is routable\n\
            [a:1] udrv info: RDMA through qedr1:1: it is routable\n\
            [a:1] udrv info: RDMA through qedr1:1: it is routable; it has no UD queue pairs\n";
        let wanted = [
            "RDMA through mlx5_0:1, RoCE v2: it is routable",
            "RDMA device mlx5_1:1 is not active",
            "no RDMA through mlx5_2:1 (out of memory): data goes over UDP",
            "no RDMA at 192.0.2.2: efa_0 has no such: as EFA",
            "no RDMA at [fd00::2]: efa_0 has no such: as EFA",
            "RDMA through qedr0:1: it is routable; it has no UD queue pairs",
            "RDMA through qedr1:1: it is routable; it has no UD queue pairs",
        ];
        assert_eq!(super::devices(log), wanted);
    }
}
