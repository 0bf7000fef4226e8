//! `udrv perf`: latency and bandwidth by message size, between two processes of this node or of two nodes.

use crate::fabric::LONGEST;
use crate::peer::{Pair, WINDOW, Work};
use crate::{Outcome, find, run};
use serde_json::{Value, json};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Set in the process that has the provider's variables.
const READY: &str = "UDRV_PERF_READY";

#[derive(clap::Args)]
pub(crate) struct Perf {
    /// The node where `udrv perf --listen` runs; without it, the other process is on this node
    host: Option<String>,
    /// Be the other process of another node's `udrv perf HOST`, once
    #[arg(long, conflicts_with = "host")]
    listen: bool,
    /// TCP port of --listen
    #[arg(long, default_value_t = 47_617)]
    port: u16,
    /// Message sizes, bytes
    #[arg(long, value_delimiter = ',', default_values_t = [8, 64, 1024, 8192, 65_536, 1 << 20, 4 << 20])]
    sizes: Vec<usize>,
    /// Time for each figure, milliseconds
    #[arg(long, default_value_t = 300)]
    time_ms: u64,
    /// Without shared memory: what the network's code costs, on this node
    #[arg(long)]
    network: bool,
    /// The libfabric: a file, or a name for the loader
    #[arg(long, default_value = find::LIBFABRIC)]
    libfabric: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Perf {
    pub(crate) fn run(self) -> Outcome {
        if std::env::var_os(READY).is_none() {
            return self.run_with_variables();
        }
        if let Some(size) = self.sizes.iter().find(|size| **size > LONGEST) {
            return Err(format!("{size} bytes are too many: {LONGEST} at most"));
        }
        if self.listen {
            let listener = TcpListener::bind(("::", self.port))
                .or_else(|_| TcpListener::bind(("0.0.0.0", self.port)))
                .map_err(|error| format!("port {}: {error}", self.port))?;
            Pair::accept(&self.libfabric, &listener)?.obey()?;
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(host) = &self.host {
            let stream = TcpStream::connect((host.as_str(), self.port))
                .map_err(|error| format!("{host}: {error}; udrv perf --listen there"))?;
            let mut pair = Pair::meet(&self.libfabric, &stream, &stream)?;
            self.measure(&mut pair)?;
            pair.ask(Work::Quit)?;
            return Ok(ExitCode::SUCCESS);
        }
        let (mut pair, other) = Pair::start(&self.libfabric)?;
        self.measure(&mut pair)?;
        other.quit(&mut pair)?;
        Ok(ExitCode::SUCCESS)
    }

    /// This command again, with the provider's variables.
    fn run_with_variables(self) -> Outcome {
        let folder = find::provider_folder()
            .ok_or_else(|| format!("no {} beside this command", find::PROVIDER))?;
        let exe = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(exe);
        command.args(std::env::args_os().skip(1)).envs(run::variables(folder)).env(READY, "1");
        if self.network {
            command.env("FI_UDRV_SHM", "0");
        }
        Err(command.exec().to_string())
    }

    fn measure(&self, pair: &mut Pair) -> Result<(), String> {
        let limit = Duration::from_millis(self.time_ms);
        let mut rows = Vec::new();
        if !self.json {
            println!("{:>10} {:>14} {:>14} {:>14}", "bytes", "latency us", "MB/s", "messages/s");
        }
        for &len in &self.sizes {
            let us = timed(limit, |rounds| pair.ping_pong(len, rounds))? / 2.0 * 1e6;
            let window = timed(limit, |rounds| pair.stream(len, rounds))?;
            let rate = WINDOW as f64 / window;
            let speed = rate * len as f64 / 1e6;
            if self.json {
                rows.push(json!({ "bytes": len, "latency_us": us, "megabytes_per_s": speed, "messages_per_s": rate }));
            } else {
                println!("{len:>10} {us:>14.2} {speed:>14.1} {rate:>14.0}");
            }
        }
        if self.json {
            println!("{:#}", Value::from(rows));
        }
        Ok(())
    }
}

/// Seconds of a round: the median of runs that together take about `limit`, after one that warms up.
fn timed(
    limit: Duration,
    mut work: impl FnMut(usize) -> Result<Duration, String>,
) -> Result<f64, String> {
    const RUNS: u32 = 9;
    let (mut rounds, share) = (1usize, limit / RUNS);
    // Doubles, so that it ends after so many steps whatever the clock says.
    for _ in 0..24 {
        if work(rounds)? >= share {
            break;
        }
        rounds *= 2;
    }
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        runs.push(work(rounds)?.as_secs_f64() / rounds as f64);
    }
    runs.sort_by(f64::total_cmp);
    runs.get(runs.len() / 2).copied().ok_or_else(|| "no figures".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_timed_by_the_median() {
        let mut calls = 0;
        let seconds = timed(Duration::from_millis(9), |rounds| {
            calls += 1;
            let slow = if calls == 12 { 50 } else { 1 };
            Ok(Duration::from_micros(rounds as u64 * slow))
        });
        assert!((seconds.unwrap() - 1e-6).abs() < 1e-9);
    }
}
