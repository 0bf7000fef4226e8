//! The command `udrv`: runs programs over the provider, says what it would do on this machine, and what is wrong.
//!
//! It links nothing of libfabric. Each libfabric that it looks at is loaded by a process of its own ([`probe`]), so that
//! one that crashes, or waits for a device, takes nothing else along.
#![deny(unsafe_code)]

mod bounded;
mod doctor;
mod fabric;
mod find;
mod info;
mod job_key;
mod key;
mod libfabric;
mod page;
mod peer;
mod perf;
mod probe;
mod record;
mod ring;
mod run;
mod screen;
mod signals;
mod stat;
mod top;
mod trace;
mod watch;
mod why;

use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

/// Runs programs over the udrv provider of libfabric, shows what it does, and says what is wrong.
#[derive(Parser)]
#[command(name = "udrv", version = info::VERSION)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program with the variables that make libfabric take udrv
    Run(run::Run),
    /// Show the provider, its devices, variables and protocols by message size
    Info(info::Info),
    /// Check this machine, and name what keeps udrv from working or from being fast; status 1 if something does
    Doctor(doctor::Doctor),
    /// Make the file with the job key that keeps other hosts out
    Key(key::Key),
    /// Show what the endpoints of running processes have done, also of those that hang
    Stat(stat::Stat),
    /// Say in sentences what slows running processes down, the worst first
    Why(why::Why),
    /// Show live what running processes do
    Top(top::Top),
    /// Write a timeline of what running processes do, for Perfetto
    Trace(trace::Trace),
    /// Run a program, and keep the last counts of every process that it starts, also of those that are aborted
    Record(record::Record),
    /// Measure latency and bandwidth by message size, within this node or to another one
    Perf(perf::Perf),
    /// Print the completion of a shell
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Load a libfabric, and print what it says as JSON
    #[command(hide = true)]
    Probe(probe::Probe),
    /// The other process of perf
    #[command(hide = true)]
    Peer,
}

/// What a command reports: its status, or why it could not do its work.
type Outcome = Result<ExitCode, String>;

fn main() -> ExitCode {
    end_with_the_reader();
    let outcome = match Arguments::parse().command {
        Command::Run(command) => command.run(),
        Command::Info(command) => command.run(),
        Command::Doctor(command) => command.run(),
        Command::Key(command) => command.run(),
        Command::Stat(command) => command.run(),
        Command::Why(command) => command.run(),
        Command::Top(command) => command.run(),
        Command::Trace(command) => command.run(),
        Command::Record(command) => command.run(),
        Command::Perf(command) => command.run(),
        Command::Probe(command) => command.run(),
        Command::Peer => peer::run(),
        Command::Completion { shell } => {
            clap_complete::generate(
                shell,
                &mut Arguments::command(),
                "udrv",
                &mut std::io::stdout(),
            );
            Ok(ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|why| {
        eprintln!("udrv: {why}");
        ExitCode::FAILURE
    })
}

/// A closed pipe behind the output ends this process, as it ends other commands.
#[allow(unsafe_code)] // a system call
fn end_with_the_reader() {
    // SAFETY: the default action, before there is another thread.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}
