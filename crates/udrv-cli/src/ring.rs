//! The rings of events that processes with FI_UDRV_TRACE keep (`src/telemetry/trace.rs` of the provider says what is in
//! them), as trace events. They are read without the process's help, and as little is trusted as of pages.
#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use crate::page::{self, MemoryFile};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::net::Ipv6Addr;

/// How a link in /proc/PID/fd to a ring reads.
const LINK: &str = "/memfd:udrv-trace (deleted)";
const MAGIC: &[u8] = b"udrvring";
const LAYOUT: u64 = 1;
/// Words of an event.
const WORDS: usize = 8;

/// Tracks of a process, beside those of the looks from outside.
const EAGER_SENT: u64 = 10;
const RECEIVED: u64 = 11;
const NETWORK: u64 = 12;
/// Threads have tracks from here on.
const THREADS: u64 = 1000;

/// A ring that stays when its process ends.
pub(crate) struct Ring {
    pid: u32,
    file: MemoryFile,
}

/// One event, as it was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Event {
    at_ns: u64,
    kind: usize,
    port: u16,
    number: u64,
    bytes: u64,
    peer: Option<(Ipv6Addr, u16)>,
}

/// The rings of the processes named, or of all.
pub(crate) fn all(only: &[u32]) -> Vec<Ring> {
    let rings = page::processes(only).into_iter().filter_map(|pid| {
        let own = page::own_number(pid);
        let is_its = |bytes: &[u8]| bytes.starts_with(MAGIC) && word(bytes, 6) == Some(own);
        Some(Ring { pid, file: page::memory_file(pid, LINK, 128, is_its)? })
    });
    rings.collect()
}

impl Ring {
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Its events as trace events; `pages`: of all processes, by which peers are named. Errors: it has another layout.
    pub(crate) fn events(&self, pages: &[Value]) -> Result<Vec<Value>, String> {
        let bytes = self.file.read().map_err(|error| format!("process {}: {error}", self.pid))?;
        if word(&bytes, 1) != Some(LAYOUT) {
            let layout = word(&bytes, 1).unwrap_or(0);
            return Err(format!("process {}: a ring of layout {layout}, not {LAYOUT}", self.pid));
        }
        let mut timeline =
            Timeline { pid: self.pid.into(), pages, open: HashMap::new(), events: Vec::new() };
        timeline.name(&bytes);
        let kinds = text(&bytes, 32, 256);
        let kinds: Vec<&str> = kinds.split(' ').collect();
        let all = events(&bytes);
        let last_ns = all.last().map_or(0, |event| event.at_ns);
        for event in &all {
            timeline.add(kinds.get(event.kind).copied().unwrap_or("?"), event);
        }
        Ok(timeline.end(last_ns))
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let begin = at.checked_mul(8)?;
    Some(u64::from_ne_bytes(bytes.get(begin..begin.checked_add(8)?)?.try_into().ok()?))
}

fn text(bytes: &[u8], word: usize, room: usize) -> String {
    let bytes = bytes.get(8 * word..8 * word + room).unwrap_or_default();
    page::printable(bytes.split(|byte| *byte == 0).next().unwrap_or_default())
}

/// The events that were whole, in the order of their times.
fn events(bytes: &[u8]) -> Vec<Event> {
    let (head, len) = (word(bytes, 2).unwrap_or(0) as usize, word(bytes, 3).unwrap_or(0) as usize);
    let room = word(bytes, 4).unwrap_or(0) as usize;
    if len < 8 * WORDS || head % 8 != 0 || len % 8 != 0 {
        return Vec::new();
    }
    let most = bytes.len() / len;
    let at = (0..room.min(most)).filter_map(|place| {
        let first = head.checked_add(place.checked_mul(len)?)? / 8;
        let of = |at: usize| word(bytes, first + at);
        let (is_whole, kind) = (of(0)? > 0, of(2)?);
        let ip = Ipv6Addr::from(u128::from(of(5)?) << 64 | u128::from(of(6)?));
        let peer = (!ip.is_unspecified()).then_some((ip, of(7)? as u16));
        let event = Event {
            at_ns: of(1)?,
            kind: kind as u32 as usize,
            port: (kind >> 32) as u16,
            number: of(3)?,
            bytes: of(4)?,
            peer,
        };
        is_whole.then_some(event)
    });
    let mut all: Vec<Event> = at.collect();
    all.sort_by_key(|event| event.at_ns);
    all
}

/// A message that has begun and not ended: whether it is a send, its endpoint, its number and its peer.
type Key = (bool, u16, u64, Option<(Ipv6Addr, u16)>);

struct Timeline<'a> {
    pid: u64,
    pages: &'a [Value],
    open: HashMap<Key, Event>,
    events: Vec<Value>,
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

impl Timeline<'_> {
    fn name(&mut self, bytes: &[u8]) {
        let process = json!({
            "pid": self.pid,
            "host": text(bytes, 16, 64),
            "rank": word(bytes, 7).filter(|rank| *rank != u64::MAX),
        });
        let mut meta = |name: &str, thread: u64, args: Value| {
            let event =
                json!({ "ph": "M", "name": name, "pid": self.pid, "tid": thread, "args": args });
            self.events.push(event);
        };
        meta("process_name", 0, json!({ "name": page::name(&process) }));
        meta("process_sort_index", 0, json!({ "sort_index": process["rank"] }));
        for (thread, name) in [
            (EAGER_SENT, "eager messages sent"),
            (RECEIVED, "messages received"),
            (NETWORK, "packets sent again"),
        ] {
            meta("thread_name", thread, json!({ "name": name }));
        }
    }

    fn add(&mut self, kind: &str, event: &Event) {
        match kind {
            "send_begin" => self.begin(true, event),
            "receive_begin" => self.begin(false, event),
            "send_end" => self.finish(true, event),
            "receive_end" => self.finish(false, event),
            "send_answered" => self.answered(event),
            "sleep_begin" => {
                self.open.insert((true, 0, event.number, None), *event);
            }
            "sleep_end" => {
                if let Some(begun) = self.open.remove(&(true, 0, event.number, None)) {
                    self.slept(&begun, event.at_ns);
                }
            }
            "eager_sent" => self.instant(EAGER_SENT, kind, event),
            "resent" | "timeout" => self.instant(NETWORK, kind, event),
            _ => self.instant(RECEIVED, kind, event),
        }
    }

    fn begin(&mut self, is_send: bool, event: &Event) {
        self.open.insert((is_send, event.port, event.number, event.peer), *event);
    }

    /// A message whose begin has been overwritten by later events is left out.
    fn finish(&mut self, is_send: bool, event: &Event) {
        let key = (is_send, event.port, event.number, event.peer);
        if let Some(begun) = self.open.remove(&key) {
            self.message(key, &begun, event.at_ns, false);
        }
    }

    fn message(&mut self, key: Key, begun: &Event, end_ns: u64, pending: bool) {
        let (is_send, ..) = key;
        let way = if is_send { "send to" } else { "receive from" };
        let name = format!("{way} {}", self.peer(begun));
        let args = json!({ "bytes": begun.bytes, "pending": pending, "number": begun.number });
        for (phase, at_ns) in [("b", begun.at_ns), ("e", end_ns)] {
            self.events.push(json!({
                "ph": phase, "cat": "message", "id": self.id(key), "name": name, "pid": self.pid, "tid": 0,
                "ts": us(at_ns), "args": args,
            }));
        }
    }

    /// The receiver's first word about a message, on the track of that message.
    fn answered(&mut self, event: &Event) {
        let key = (true, event.port, event.number, event.peer);
        if self.open.contains_key(&key) {
            self.events.push(json!({
                "ph": "n", "cat": "message", "id": self.id(key), "name": "answered", "pid": self.pid, "tid": 0,
                "ts": us(event.at_ns),
            }));
        }
    }

    fn id(&self, (is_send, port, number, peer): Key) -> String {
        let peer = peer.map_or(String::new(), |(ip, port)| format!("{ip}:{port}"));
        format!("{}.{port}.{is_send}.{number}.{peer}", self.pid)
    }

    fn slept(&mut self, begun: &Event, end_ns: u64) {
        let length = us(end_ns.saturating_sub(begun.at_ns));
        self.events.push(json!({
            "ph": "X", "name": "sleeps", "pid": self.pid, "tid": THREADS + begun.number, "ts": us(begun.at_ns), "dur": length,
        }));
    }

    fn instant(&mut self, track: u64, kind: &str, event: &Event) {
        let name = format!("{} {}", kind.replace('_', " "), self.peer(event));
        let args = json!({ "bytes": event.bytes });
        self.events.push(json!({
            "ph": "i", "s": "t", "name": name, "pid": self.pid, "tid": track, "ts": us(event.at_ns), "args": args,
        }));
    }

    fn peer(&self, event: &Event) -> String {
        let Some((ip, port)) = event.peer else { return "an unknown peer".to_owned() };
        let ip = ip.to_canonical();
        page::owner(&std::net::SocketAddr::new(ip, port).to_string(), self.pages)
    }

    /// All events; what has not ended goes on until the last one.
    fn end(mut self, last_ns: u64) -> Vec<Value> {
        for (key, begun) in std::mem::take(&mut self.open) {
            match key {
                (true, 0, _, None) => self.slept(&begun, last_ns),
                _ => self.message(key, &begun, last_ns, true),
            }
        }
        self.events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &str = "eager_sent send_begin send_answered send_end sleep_begin sleep_end";

    /// A ring with these events: kind, number, time.
    fn ring(events: &[(u64, u64, u64)]) -> Vec<u8> {
        let mut bytes = vec![0u8; 1024 + 64 * events.len()];
        let mut put =
            |at: usize, value: u64| bytes[8 * at..8 * at + 8].copy_from_slice(&value.to_ne_bytes());
        for (at, value) in [(1, 1), (2, 1024), (3, 64), (4, events.len() as u64), (6, 7), (7, 3)] {
            put(at, value);
        }
        for (place, (kind, number, at_ns)) in events.iter().enumerate() {
            let peer = [0, 0xffff_c000_0201, 5];
            let port = if *kind > 3 { 0 } else { 9 << 32 };
            let peer = if *kind > 3 { [0; 3] } else { peer };
            let words =
                [1 + place as u64, *at_ns, kind | port, *number, 8, peer[0], peer[1], peer[2]];
            words.into_iter().enumerate().for_each(|(at, word)| put(128 + 8 * place + at, word));
        }
        bytes[..8].copy_from_slice(MAGIC);
        bytes[256..256 + NAMES.len()].copy_from_slice(NAMES.as_bytes());
        bytes
    }

    fn of(bytes: &[u8]) -> Vec<Value> {
        let mut timeline =
            Timeline { pid: 7, pages: &[], open: HashMap::new(), events: Vec::new() };
        timeline.name(bytes);
        let kinds: Vec<&str> = NAMES.split(' ').collect();
        let all = events(bytes);
        all.iter().for_each(|event| timeline.add(kinds[event.kind], event));
        timeline.end(all.last().map_or(0, |event| event.at_ns))
    }

    #[test]
    fn messages_begin_and_end() {
        let events = of(&ring(&[
            (1, 4, 5000),
            (2, 4, 6000),
            (3, 4, 9000),
            (1, 5, 9500),
            (3, 9, 9600),
            (0, 0, 9700),
        ]));
        let found = |phase: &str| -> Vec<(f64, &Value)> {
            let of_phase = events.iter().filter(|event| event["ph"] == phase);
            of_phase
                .map(|event| (event["ts"].as_f64().unwrap(), &event["args"]["pending"]))
                .collect()
        };
        assert_eq!(found("b"), [(5.0, &json!(false)), (9.5, &json!(true))]);
        assert_eq!(found("e"), [(9.0, &json!(false)), (9.7, &json!(true))]);
        assert_eq!((found("n").len(), found("i").len()), (1, 1));
        let begin = events.iter().find(|event| event["ph"] == "b").unwrap();
        assert_eq!(begin["name"], "send to 192.0.2.1:5, not of this node");
        assert!(events.iter().any(|event| event["args"]["name"] == "rank 3 (, process 7)"));
    }

    #[test]
    fn threads_sleep() {
        let events = of(&ring(&[(4, 77, 1000), (5, 77, 4000), (4, 78, 5000), (0, 0, 7000)]));
        let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        let all: Vec<_> = slices
            .iter()
            .map(|e| (e["tid"].as_u64().unwrap(), e["dur"].as_f64().unwrap()))
            .collect();
        assert_eq!(all, [(1077, 3.0), (1078, 2.0)]);
    }

    #[test]
    fn any_bytes_are_harmless() {
        for at in 2..5 {
            for value in [0, 1, 63, 1024, u64::MAX, 1 << 40] {
                let mut bytes = ring(&[(1, 4, 5000), (3, 4, 9000)]);
                bytes[8 * at..8 * at + 8].copy_from_slice(&value.to_ne_bytes());
                let _ = events(&bytes);
            }
        }
        assert!(events(&[]).is_empty());
    }
}
