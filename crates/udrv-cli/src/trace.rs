//! `udrv trace`: what running processes do, as a timeline that Perfetto and Chrome (chrome://tracing) show. It is made of
//! each message where processes keep a ring of events (FI_UDRV_TRACE), and of looks at the pages of the others again and
//! again. They are not asked, also for what they keep.
#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use crate::why::processes as names;
use crate::{Outcome, page, ring, signals, top};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Trace {
    /// The file, in the JSON format of trace events
    #[arg(long, short, default_value = "udrv-trace.json")]
    output: PathBuf,
    /// Time between two looks, milliseconds; at least 200, so that processes renew their counts meanwhile
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u64).range(200..=3_600_000))]
    every_ms: u64,
    /// How long the processes are watched, seconds; without it, not at all if they keep events, else until all of them have
    /// ended, or until Control-C
    #[arg(long)]
    seconds: Option<u64>,
    /// Only these processes; without any, all of this user
    pid: Vec<u32>,
}

/// Tracks of a process.
const STATE: u64 = 0;
const SEND: u64 = 1;
const RECEIVE: u64 = 2;
/// Slices of this time and less are of one look, microseconds: those that are next to each other become one.
const GAP_US: u64 = 1;

/// How soon a signal is noticed.
const NOTICE: Duration = Duration::from_millis(50);

/// Something that goes on, on a track of a process.
struct Slice {
    name: String,
    since_us: u64,
    until_us: u64,
}

/// The events of the trace that are not written yet.
#[derive(Default)]
struct Timeline {
    events: Vec<Value>,
    open: HashMap<(u64, u64), Slice>,
    named: HashMap<u64, usize>,
}

impl Trace {
    pub(crate) fn run(self) -> Outcome {
        let pages = page::asked(&self.pid)?;
        let rings = ring::all(&self.pid);
        let mut output = Output::create(&self.output)?;
        let mut timeline = Timeline::default();
        if rings.is_empty() || self.seconds.is_some() {
            self.watch(pages.clone(), &mut timeline, &mut output)?;
        }
        // Peers may be other processes than those asked for.
        let all = page::all(&[]);
        let processes = timeline.named.len().max(rings.len());
        output.write(timeline.end())?;
        for ring in &rings {
            match ring.events(&all) {
                Ok(its) => output.write(its)?,
                Err(error) => eprintln!("udrv: {error}"),
            }
        }
        let (file, count) = (self.output.display(), output.end()?);
        println!(
            "{file}: {count} events of {processes} processes; open it in https://ui.perfetto.dev"
        );
        let has_none = |page: &&Value| !rings.iter().any(|ring| page["pid"] == ring.pid());
        let without: Vec<&Value> = pages.iter().filter(has_none).collect();
        if !without.is_empty() {
            println!(
                "no messages of {}: processes that are started with FI_UDRV_TRACE=100000 keep that many events of them",
                names(&without)
            );
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Looks at the processes until the time is over, all have ended, or a signal wants an end: what was seen is written
    /// then.
    fn watch(
        &self,
        mut before: Vec<Value>,
        timeline: &mut Timeline,
        output: &mut Output,
    ) -> Result<(), String> {
        static ENDS: AtomicBool = AtomicBool::new(false);
        extern "C" fn end(_: libc::c_int) {
            ENDS.store(true, Relaxed);
        }
        // The same signal may come twice: timeout(1) sends it to its command, and to the command's group.
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            signals::take(signal, end, 0);
        }
        let begun = Instant::now();
        // The clock of the events that processes keep.
        let zero_us = page::now_ns() / 1000;
        let (mut at_us, mut next) = (zero_us, Duration::ZERO);
        while self.seconds.is_none_or(|seconds| begun.elapsed().as_secs() < seconds) {
            next += Duration::from_millis(self.every_ms);
            // std sleeps on after a signal.
            while begun.elapsed() < next && !ENDS.load(Relaxed) {
                std::thread::sleep((next - begun.elapsed().min(next)).min(NOTICE));
            }
            if ENDS.load(Relaxed) {
                break;
            }
            next = next.max(begun.elapsed());
            let now_us = zero_us + begun.elapsed().as_micros() as u64;
            let after = page::all(&self.pid);
            if after.is_empty() {
                break;
            }
            timeline.look(&before, &after, at_us, now_us);
            output.write(timeline.events.drain(..))?;
            (before, at_us) = (after, now_us);
        }
        Ok(())
    }
}

/// The file, to which events are written as they come: a run of hours needs no more memory than one of a second.
struct Output {
    name: String,
    file: BufWriter<File>,
    count: usize,
}

impl Output {
    fn create(path: &Path) -> Result<Self, String> {
        let name = path.display().to_string();
        let file = File::create(path).map_err(|error| format!("{name}: {error}"))?;
        let mut output = Self { name, file: BufWriter::new(file), count: 0 };
        output.text("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        Ok(output)
    }

    fn write(&mut self, events: impl IntoIterator<Item = Value>) -> Result<(), String> {
        for event in events {
            let comma = if self.count > 0 { "," } else { "" };
            self.text(&format!("{comma}\n{event}"))?;
            self.count += 1;
        }
        Ok(())
    }

    /// How many events there are.
    fn end(mut self) -> Result<usize, String> {
        self.text("\n]}\n")?;
        self.file.flush().map_err(|error| format!("{}: {error}", self.name))?;
        Ok(self.count)
    }

    fn text(&mut self, text: &str) -> Result<(), String> {
        self.file.write_all(text.as_bytes()).map_err(|error| format!("{}: {error}", self.name))
    }
}

impl Timeline {
    /// Adds the events between two looks, at these times since the first one.
    fn look(&mut self, before: &[Value], after: &[Value], from_us: u64, to_us: u64) {
        for page in after {
            let pid = page["pid"].as_u64().unwrap_or(0);
            let Some(old) = before.iter().find(|old| old["pid"] == page["pid"]) else { continue };
            self.name(pid, page);
            self.goes_on(pid, STATE, top::activity(old, page), from_us, to_us);
            let seconds = (to_us - from_us) as f64 / 1e6;
            for (name, unit, rate) in top::rates(old, page, seconds) {
                self.count(pid, name, unit, to_us, rate);
            }
            self.count(
                pid,
                "pending sends",
                "sends",
                to_us,
                page::sum(page, "sends_pending") as f64,
            );
            self.waits(pid, page, from_us, to_us, after);
            self.warnings(pid, page, to_us);
        }
    }

    /// The process has a name in the timeline, and so have its tracks.
    fn name(&mut self, pid: u64, page: &Value) {
        if self.named.contains_key(&pid) {
            return;
        }
        // Warnings that were written before are not of this time.
        self.named.insert(pid, page["warnings"].as_array().map_or(0, Vec::len));
        let mut meta = |name: &str, thread: u64, args: Value| {
            let event = json!({ "ph": "M", "name": name, "pid": pid, "tid": thread, "args": args });
            self.events.push(event);
        };
        meta("process_name", STATE, json!({ "name": page::name(page) }));
        meta("process_sort_index", STATE, json!({ "sort_index": page["rank"] }));
        for (thread, name) in
            [(STATE, "process"), (SEND, "a send waits"), (RECEIVE, "a receive waits")]
        {
            meta("thread_name", thread, json!({ "name": name }));
        }
    }

    /// Something is so between these times. It is one slice with what was so before.
    fn goes_on(&mut self, pid: u64, track: u64, name: &str, from_us: u64, to_us: u64) {
        if let Some(slice) = self.open.get_mut(&(pid, track)) {
            if slice.name == name && from_us <= slice.until_us + GAP_US {
                slice.until_us = to_us;
                return;
            }
        }
        let new = Slice { name: name.to_owned(), since_us: from_us, until_us: to_us };
        if let Some(old) = self.open.insert((pid, track), new) {
            self.events.push(event((pid, track), &old));
        }
    }

    fn count(&mut self, pid: u64, name: &str, unit: &str, at_us: u64, value: f64) {
        let event =
            json!({ "ph": "C", "name": name, "pid": pid, "ts": at_us, "args": { unit: value } });
        self.events.push(event);
    }

    /// Sends that have waited since the last look, and receives of a process that has nothing else to do.
    fn waits(&mut self, pid: u64, page: &Value, from_us: u64, to_us: u64, all: &[Value]) {
        let endpoints = || page["endpoints"].as_array().into_iter().flatten();
        let peer = |endpoint: &Value, name: &str| {
            endpoint[name]
                .as_str()
                .filter(|peer| !peer.is_empty())
                .map(|peer| page::owner(peer, all))
        };
        let waited_ms = (to_us - from_us) / 1000;
        let is_late = |endpoint: &&Value| endpoint["send_waits_ms"].as_u64() >= Some(waited_ms);
        if let Some(peer) = endpoints().find(is_late).and_then(|e| peer(e, "send_waits_for")) {
            self.goes_on(pid, SEND, &format!("for {peer}"), from_us, to_us);
        }
        let is_idle = self.open.get(&(pid, STATE)).is_some_and(|state| state.name != "works");
        if let Some(peer) = endpoints().find_map(|e| peer(e, "receive_waits_for")) {
            if is_idle {
                self.goes_on(pid, RECEIVE, &format!("for {peer}"), from_us, to_us);
            }
        }
    }

    /// Errors and warnings that are new.
    fn warnings(&mut self, pid: u64, page: &Value, at_us: u64) {
        let all = page["warnings"].as_array().map(Vec::as_slice).unwrap_or_default();
        let known = self.named.insert(pid, all.len()).unwrap_or(0);
        self.events.extend(all.iter().skip(known).map(|warning| {
            json!({ "ph": "i", "s": "p", "name": warning["text"], "pid": pid, "tid": STATE, "ts": at_us })
        }));
    }

    /// All events, the last ones too.
    fn end(mut self) -> Vec<Value> {
        self.events.extend(self.open.drain().map(|(track, slice)| event(track, &slice)));
        self.events
    }
}

fn event((pid, track): (u64, u64), slice: &Slice) -> Value {
    let length = slice.until_us - slice.since_us;
    json!({ "ph": "X", "name": slice.name, "pid": pid, "tid": track, "ts": slice.since_us, "dur": length })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(sent: u64, polls: u64, waits_ms: u64) -> Value {
        json!({
            "pid": 7, "rank": 3, "host": "n", "warnings": [],
            "endpoints": [{ "address": "a", "eager_sent": sent, "polls": polls, "empty_polls": polls,
                "send_waits_ms": waits_ms, "send_waits_for": "b", "receive_waits_for": "b" }],
        })
    }

    fn slices(events: &[Value]) -> Vec<(u64, String, u64, u64)> {
        let number = |event: &Value, name: &str| event[name].as_u64().unwrap_or(0);
        let slices = events.iter().filter(|event| event["ph"] == "X").map(|event| {
            let name = event["name"].as_str().unwrap_or("").to_owned();
            (number(event, "tid"), name, number(event, "ts"), number(event, "dur"))
        });
        let mut slices: Vec<_> = slices.collect();
        slices.sort();
        slices
    }

    #[test]
    fn an_operation_under_way_is_one_slice() {
        let mut timeline = Timeline::default();
        let pages = [page(0, 0, 0), page(9, 5, 0), page(9, 9, 100), page(9, 20, 500)];
        for (number, pair) in pages.windows(2).enumerate() {
            let from = 250_000 * number as u64;
            timeline.look(&pair[..1], &pair[1..], from, from + 250_000);
        }
        let peer = "for b, not of this node".to_owned();
        let wanted = [
            (STATE, "waits".to_owned(), 250_000, 500_000),
            (STATE, "works".to_owned(), 0, 250_000),
            (SEND, peer.clone(), 500_000, 250_000),
            (RECEIVE, peer, 250_000, 500_000),
        ];
        assert_eq!(slices(&timeline.end()), wanted);
    }

    #[test]
    fn warnings_of_this_time_are_instants_and_processes_have_names() {
        let mut timeline = Timeline::default();
        let (old, mut new) = (page(0, 0, 0), page(0, 0, 0));
        let (old, new) = (std::slice::from_ref(&old), std::slice::from_mut(&mut new));
        timeline.look(old, old, 0, 10);
        new[0]["warnings"] = json!([{ "text": "no RDMA" }]);
        timeline.look(old, new, 10, 20);
        let events = timeline.end();
        let named = |phase: &str, name: &str| {
            events.iter().filter(|e| e["ph"] == phase && e["name"] == name).count()
        };
        assert_eq!((named("i", "no RDMA"), named("M", "process_name")), (1, 1));
        assert_eq!(named("C", "messages sent"), 2);
        assert!(events.iter().any(|e| e["args"]["name"] == "rank 3 (n, process 7)"));
    }
}
