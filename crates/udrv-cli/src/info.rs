//! `udrv info`: the provider, its devices, its variables, and the protocol of each message size.
#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use crate::probe::probe;
use crate::{Outcome, find};
use serde_json::Value;
use std::process::ExitCode;

/// Of this command, and of the provider that was built with it.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(clap::Args)]
pub(crate) struct Info {
    /// The libfabric to ask: a file, or a name for the loader
    #[arg(long, default_value = find::LIBFABRIC)]
    libfabric: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print only the folder from which that libfabric loads providers when FI_PROVIDER_PATH is not set
    #[arg(long, conflicts_with = "json")]
    provider_folder: bool,
}

impl Info {
    pub(crate) fn run(self) -> Outcome {
        if self.provider_folder {
            let said = probe(&["--libfabric", &self.libfabric], None)?;
            let folder =
                said["provider_folder"].as_str().ok_or("this libfabric names no folder")?;
            println!("{folder}");
            return Ok(ExitCode::SUCCESS);
        }
        let folder = find::provider_folder().ok_or_else(|| {
            format!("no {} beside this command, and none in FI_PROVIDER_PATH", find::PROVIDER)
        })?;
        let arguments = ["--libfabric", &self.libfabric, "--offers", "udrv", "--thresholds"];
        let mut said = probe(&arguments, Some(&folder))?;
        said["provider"] = folder.join(find::PROVIDER).to_string_lossy().into();
        if self.json {
            println!("{said:#}");
        } else {
            print(&said);
        }
        let works = said["offers"].as_array().is_some_and(|offers| !offers.is_empty());
        Ok(if works { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn print(said: &Value) {
    println!("udrv        {VERSION}");
    println!("provider    {}{}", text(&said["provider"]), build(&said["build"]));
    println!("libfabric   {} ({})", text(&said["version"]), text(&said["file"]));
    println!("looks into  {}", text(&said["provider_folder"]));
    println!("\nINTERFACES");
    for offer in rows(&said["offers"]) {
        let speed = offer["speed"].as_u64().filter(|speed| *speed > 0);
        let speed = speed.map_or(String::new(), |bits| format!(", {} Gbit/s", bits as f64 / 1e9));
        let mtu = offer["mtu"].as_u64().map_or(String::new(), |mtu| format!(", MTU {mtu}"));
        println!("  {:<12} {}{mtu}{speed}", text(&offer["domain"]), text(&offer["address"]));
    }
    if let Some(why) = said["offers"]["error"].as_str() {
        println!("  udrv offers nothing here: {why}");
    }
    println!("\nDEVICES (RDMA)");
    for line in rows(&said["devices"]) {
        println!("  {}", text(line));
    }
    if rows(&said["devices"]).next().is_none() {
        println!("  none");
    }
    println!("\nPROTOCOLS of messages to another process of this node");
    for line in rows(&said["thresholds"]) {
        println!("  {}", sentence(text(line)));
    }
    if let Some(why) = said["thresholds"]["error"].as_str() {
        println!("  not known: {why}");
    }
    println!("\nVARIABLES (* is set)");
    for variable in rows(&said["variables"]) {
        let value = variable["value"].as_str();
        let mark = if value.is_some() { '*' } else { ' ' };
        println!(
            "{mark} {}{}",
            text(&variable["name"]),
            value.map_or(String::new(), |v| format!("={v}"))
        );
        println!("      {}", text(&variable["help"]).trim_start_matches("udrv: "));
    }
}

/// Which build the provider is.
fn build(of: &Value) -> String {
    let version = of["version"].as_str().map_or(String::new(), |version| format!(", {version}"));
    let commit = of["commit"].as_str().filter(|commit| !commit.is_empty());
    commit.map_or_else(|| version.clone(), |commit| format!("{version}, commit {commit}"))
}

fn rows(of: &Value) -> impl Iterator<Item = &Value> {
    of.as_array().into_iter().flatten()
}

fn text(of: &Value) -> &str {
    of.as_str().unwrap_or("?")
}

/// A line of fi_ops_udrv.thresholds: what carries the messages, from, to, protocol, variable, reason.
pub(crate) fn sentence(line: &str) -> String {
    let mut fields = line.split('\t');
    let mut next = || fields.next().unwrap_or_default();
    let (carrier, from, to, protocol, variable, why) =
        (next(), next(), next(), next(), next(), next());
    let sizes = if to.is_empty() { format!("{from} and more") } else { format!("{from} to {to}") };
    let moved = if variable.is_empty() { String::new() } else { format!(" [{variable}]") };
    format!("{carrier:<14} {sizes:>20} bytes: {protocol}{moved}: {why}")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_build_is_named_as_far_as_it_is_known() {
        let build = |of| super::build(&of);
        let known = serde_json::json!({ "version": "0.1.0", "commit": "12ab" });
        assert_eq!(build(known), ", 0.1.0, commit 12ab");
        assert_eq!(build(serde_json::json!({ "version": "0.1.0", "commit": "" })), ", 0.1.0");
        assert_eq!(build(serde_json::Value::Null), "");
    }

    #[test]
    fn a_threshold_is_a_sentence() {
        let line = "shared memory\t0\t16384\teager\tFI_UDRV_EAGER_MAX\tone copy";
        let said = super::sentence(line);
        assert!(said.ends_with("0 to 16384 bytes: eager [FI_UDRV_EAGER_MAX]: one copy"), "{said}");
        assert!(super::sentence("a\t5\t\tb\t\tc").ends_with("5 and more bytes: b: c"));
    }
}
