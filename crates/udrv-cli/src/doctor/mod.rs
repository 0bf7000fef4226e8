//! `udrv doctor`: checks of this machine, each with a verdict and, where there is one, a remedy.

mod devices;
mod limits;
mod mpi;
mod network;
mod provider;

use crate::Outcome;
use serde_json::{Value, json};
use std::process::ExitCode;

#[derive(clap::Args)]
pub(crate) struct Doctor {
    /// Also check the way to this host, where `udrv doctor --listen` runs
    #[arg(long, value_name = "HOST")]
    peer: Option<String>,
    /// Answer another node's `udrv doctor --peer`, until interrupted
    #[arg(long, conflicts_with = "peer")]
    listen: bool,
    /// UDP and TCP port for --peer and --listen
    #[arg(long, default_value_t = 47_616)]
    port: u16,
    /// Fail at warnings too
    #[arg(long)]
    strict: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How a check ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Verdict {
    Good,
    /// Something to know.
    Note,
    /// It works, slower or less safely than it could.
    Warn,
    /// It does not work.
    Fail,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Note => "note",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        }
    }
}

/// What a check has found.
pub(crate) struct Finding {
    about: &'static str,
    verdict: Verdict,
    says: String,
    remedy: Option<String>,
}

impl Finding {
    pub(crate) fn new(about: &'static str, verdict: Verdict, says: impl Into<String>) -> Self {
        Self { about, verdict, says: says.into(), remedy: None }
    }

    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    fn json(&self) -> Value {
        json!({ "about": self.about, "verdict": self.verdict.name(), "says": self.says, "remedy": self.remedy })
    }
}

impl Doctor {
    pub(crate) fn run(self) -> Outcome {
        if self.listen {
            return network::listen(self.port);
        }
        let mut findings = provider::check();
        findings.extend(limits::check());
        findings.extend(devices::check());
        findings.extend(network::check());
        findings.extend(mpi::check());
        if let Some(host) = &self.peer {
            findings.extend(network::check_peer(host, self.port));
        }
        if self.json {
            let rows: Value = findings.iter().map(Finding::json).collect();
            println!("{rows:#}");
        } else {
            findings.iter().for_each(print);
        }
        let worst = findings.iter().map(|finding| finding.verdict).max();
        let limit = if self.strict { Verdict::Warn } else { Verdict::Fail };
        Ok(if worst >= Some(limit) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

fn print(finding: &Finding) {
    println!("{:<4}  {:<13} {}", finding.verdict.name(), finding.about, finding.says);
    for line in finding.remedy.iter().flat_map(|remedy| remedy.lines()) {
        println!("{:>22}{line}", "-> ");
    }
}

/// The trimmed text of a file of /proc or /sys.
pub(crate) fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
