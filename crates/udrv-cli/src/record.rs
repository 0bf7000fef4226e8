//! `udrv record`: runs a command, and keeps the last counts of every process that it has started, also of those that
//! were aborted: an open page outlives its process.
#![allow(unsafe_code)] // system calls

use crate::page::{self, Held};
use crate::{Outcome, signals, stat};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Record {
    /// Write the counts into this file, as JSON; %h in its name is the host, %p this process. Without it, as a table to the
    /// standard error stream
    #[arg(long, short)]
    output: Option<PathBuf>,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// How often processes are looked for, unless that takes long. One that opens an endpoint and ends within that time may be
/// missed.
const EVERY: Duration = Duration::from_millis(50);
/// To look for processes takes at most this share of a processor: one of so many parts.
const SHARE: u32 = 20;

/// The command, which gets the signals that end this process otherwise.
static COMMAND: AtomicI32 = AtomicI32::new(0);
/// The last signal that came before the number of the command was known.
static EARLY: AtomicI32 = AtomicI32::new(0);

impl Record {
    pub(crate) fn run(self) -> Outcome {
        let [program, arguments @ ..] = self.command.as_slice() else {
            return Err("no program".to_owned());
        };
        // A job that has run for hours must not end with a file that cannot be made.
        let output = self.output.as_deref().map(open).transpose()?;
        take_orphans();
        pass_signals_on();
        let started = Command::new(program).args(arguments).spawn();
        let child = started.map_err(|error| format!("{}: {error}", program.to_string_lossy()))?;
        let child = child.id() as i32;
        // The command has the limit that this process was started with.
        raise_the_limit_of_files();
        COMMAND.store(child, Relaxed);
        let early = EARLY.swap(0, Relaxed);
        if early != 0 {
            // SAFETY: takes numbers only.
            unsafe { libc::kill(child, early) };
        }
        let mut held = HashMap::new();
        let status = loop {
            let begun = Instant::now();
            look(&mut held);
            if let Some(status) = ended(child) {
                break status;
            }
            std::thread::sleep(EVERY.max(begun.elapsed() * SHARE));
        };
        let mut pages: Vec<Value> = held.into_values().filter_map(|held| last(&held)).collect();
        pages.sort_by_key(|page| (page["rank"].as_u64(), page["pid"].as_u64()));
        tell(output, pages);
        Ok(ExitCode::from(status))
    }
}

/// The file of this name, after [`named`], whose contents stay until [`tell`].
fn open(name: &Path) -> Result<(PathBuf, fs::File), String> {
    let name = named(name);
    let file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(&name);
    let file = file.map_err(|error| format!("{}: {error}", name.display()))?;
    Ok((name, file))
}

/// Writes the pages into the file; where there is none, or it takes them not, as a table to the standard error stream.
fn tell(output: Option<(PathBuf, fs::File)>, pages: Vec<Value>) {
    let show = |pages: &[Value]| pages.iter().for_each(|page| eprint!("{}", stat::table(page)));
    let Some((name, mut file)) = output else { return show(&pages) };
    let pages = Value::from(pages);
    // Of a pipe or a device, there is nothing to shorten.
    let _ = file.set_len(0);
    if let Err(error) = writeln!(file, "{pages:#}") {
        eprintln!("udrv: {}: {error}; the counts are:", name.display());
        show(pages.as_array().map(Vec::as_slice).unwrap_or_default());
    }
}

/// The name of a file, with the host for `%h` and the number of this process for `%p`.
fn named(file: &Path) -> PathBuf {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let pid = std::process::id().to_string();
    let (mut name, mut rest) = (Vec::new(), file.as_os_str().as_bytes());
    while let [first, after @ ..] = rest {
        let (put, after) = match rest {
            [b'%', b'h', after @ ..] => (host.trim().as_bytes(), after),
            [b'%', b'p', after @ ..] => (pid.as_bytes(), after),
            _ => (std::slice::from_ref(first), after),
        };
        name.extend_from_slice(put);
        rest = after;
    }
    OsString::from_vec(name).into()
}

/// Takes hold of the pages of processes that have one now.
fn look(held: &mut HashMap<u32, Held>) {
    for pid in descendants() {
        if !held.contains_key(&pid) {
            held.extend(page::hold(pid).map(|page| (pid, page)));
        }
    }
}

/// What a page has at last.
fn last(held: &Held) -> Option<Value> {
    let mut page = held.last()?;
    page.as_object_mut()?.insert("runs".to_owned(), json!(held.runs()));
    Some(page)
}

/// The processes below this one.
fn descendants() -> HashSet<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parents: HashMap<u32, u32> = pids.filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let me = std::process::id();
    let is_below = |pid: &&u32| {
        // A chain of parents is not longer than there are processes; it changes while it is read.
        let chain = std::iter::successors(parents.get(pid), |pid| parents.get(pid));
        chain.take(parents.len()).any(|pid| *pid == me)
    };
    parents.keys().filter(is_below).copied().collect()
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit(") ").next()?.split_whitespace().nth(1)?.parse().ok()
}

/// The status of the command, as a shell has it, once it has ended. Other processes that have ended are let go.
fn ended(command: i32) -> Option<u8> {
    let mut status = 0;
    loop {
        // SAFETY: fills a local number.
        let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
        if pid == command {
            let signal = libc::WTERMSIG(status);
            let by_signal = libc::WIFSIGNALED(status);
            let number = if by_signal { 128 + signal } else { libc::WEXITSTATUS(status) };
            return Some(number as u8);
        }
        if pid <= 0 {
            return None;
        }
    }
}

/// Processes whose parent ends become children of this one, so that they are still found.
fn take_orphans() {
    // SAFETY: takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// Each page takes a descriptor.
fn raise_the_limit_of_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills, and then reads, a local structure.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// The signals by which people and schedulers end a command end that command, and what it did is still told.
fn pass_signals_on() {
    extern "C" fn pass_on(signal: libc::c_int) {
        let command = COMMAND.load(Relaxed);
        // A terminal has sent SIGINT to the command too.
        if signal == libc::SIGINT {
            return;
        }
        if command == 0 {
            EARLY.store(signal, Relaxed);
        } else {
            // SAFETY: takes numbers only, and is async-signal-safe (signal-safety(7)).
            unsafe { libc::kill(command, signal) };
        }
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2] {
        signals::take(signal, pass_on, libc::SA_RESTART);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_may_be_of_each_host_and_process() {
        let of = |name: &[u8]| named(Path::new(std::ffi::OsStr::from_bytes(name)));
        let name = of(b"/x/%h.%p").into_os_string().into_string().unwrap();
        assert!(name.ends_with(&format!(".{}", std::process::id())) && name.len() > 6, "{name}");
        assert_eq!(of(b"/x/100%"), Path::new("/x/100%"));
        assert_eq!(of(b"/x/\xff").as_os_str().as_bytes(), b"/x/\xff");
    }

    #[test]
    fn children_of_children_are_below_this_process() {
        let mut child = Command::new("sh")
            .args(["-c", "sleep 60 & echo $!; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut grandchild = String::new();
        let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut out, &mut grandchild).unwrap();
        let grandchild: u32 = grandchild.trim().parse().unwrap();
        let below = descendants();
        assert!(below.contains(&child.id()) && below.contains(&grandchild), "{below:?}");
        assert!(!below.contains(&std::process::id()));
        // SAFETY: takes numbers only; the process is this test's.
        unsafe { libc::kill(grandchild as i32, libc::SIGKILL) };
        child.wait().unwrap();
    }
}
