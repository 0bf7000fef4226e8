//! The pages of running processes (`src/telemetry/page` of the provider says what is in them): found in /proc/PID/fd, and
//! read without the process's help.
//!
//! Root reads the pages of other users, which may hold anything: nothing of a page is trusted, and no text of it can
//! control the terminal.
#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use serde_json::{Map, Value, json};
use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How a link in /proc/PID/fd to a page reads.
const LINK: &str = "/memfd:udrv-page (deleted)";
const MAGIC: &[u8] = b"udrvpage";
/// The newest layout that is known, and all before it.
const LAYOUT: u64 = 2;
/// Longest page that is read, bytes.
const LONGEST: usize = 1 << 24;
/// How often a page is read again because it changes meanwhile. A process that was stopped at such a moment has a record
/// that changes for long: it is left out.
const TRIES: usize = 50;
/// No value.
const NONE: u64 = u64::MAX;

/// A page as it was at one moment.
pub(crate) struct Page {
    bytes: Vec<u8>,
    /// The same, read later: what differs has changed meanwhile.
    later: Vec<u8>,
}

/// The numbers of all processes, or of those of `only`, in their order.
pub(crate) fn processes(only: &[u32]) -> Vec<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<u32> =
        all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.retain(|pid| only.is_empty() || only.contains(pid));
    pids.sort_unstable();
    pids
}

/// `None`: it has no page, or not one that this user may read. Errors: it has one of a layout that is not known.
fn of_process(pid: u32) -> Option<Result<Value, String>> {
    let (_, page) = match find(pid)? {
        Ok(found) => found,
        Err(error) => return Some(Err(error)),
    };
    let mut json = page.json(false);
    let fields = json.as_object_mut()?;
    fields.insert("pid".to_owned(), pid.into());
    fields.insert("command".to_owned(), command(pid).into());
    fields.insert("process_state".to_owned(), state(pid).into());
    add_times(&mut json, Some(now_ns()));
    Some(Ok(json))
}

/// The page of a process, open and read.
fn find(pid: u32) -> Option<Result<(fs::File, Page), String>> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let is_page =
        |path: &PathBuf| fs::read_link(path).is_ok_and(|target| target.as_os_str() == LINK);
    let own_number = own_number(pid);
    let mut unknown = None;
    for path in links.map(|entry| entry.path()).filter(is_page) {
        match open(&path).and_then(|file| Page::read(&file).map(|page| (file, page))) {
            // A forked child has its parent's page too.
            Ok((_, page)) if page.word(9) != Some(own_number) => {}
            Ok(found) => return Some(Ok(found)),
            Err(error) => unknown = Some(Err(format!("process {pid}: {error}"))),
        }
    }
    unknown
}

/// Memory of a process that stays when it ends.
pub(crate) struct MemoryFile(fs::File);

impl MemoryFile {
    /// All of it. Errors: it is longer than any that the provider makes, or cannot be read.
    pub(crate) fn read(&self) -> Result<Vec<u8>, String> {
        const MOST: u64 = 2 << 30;
        let len = self.0.metadata().map_err(|error| error.to_string())?.len();
        if len > MOST {
            return Err(format!("{len} bytes"));
        }
        self.first(len as usize)
    }

    fn first(&self, len: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; len];
        self.0.read_exact_at(&mut bytes, 0).map(|()| bytes).map_err(|error| error.to_string())
    }
}

/// The memory of a process to which a descriptor with this link leads, and whose first `len` bytes are `its`.
pub(crate) fn memory_file(
    pid: u32,
    link: &str,
    len: usize,
    its: impl Fn(&[u8]) -> bool,
) -> Option<MemoryFile> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let is_one =
        |path: &PathBuf| fs::read_link(path).is_ok_and(|target| target.as_os_str() == link);
    let mut files = links.map(|entry| entry.path()).filter(is_one);
    files.find_map(|path| {
        let file = MemoryFile(open(&path).ok()?);
        file.first(len).is_ok_and(|bytes| its(&bytes)).then_some(file)
    })
}

/// A page that stays when its process ends.
pub(crate) struct Held {
    pid: u32,
    command: String,
    file: fs::File,
}

/// `None`: the process has no page yet, or not one that is known.
pub(crate) fn hold(pid: u32) -> Option<Held> {
    let (file, _) = find(pid)?.ok()?;
    Some(Held { pid, command: command(pid), file })
}

impl Held {
    /// What it has now, with what is closed.
    pub(crate) fn last(&self) -> Option<Value> {
        let mut json = Page::read(&self.file).ok()?.json(true);
        let fields = json.as_object_mut()?;
        fields.insert("pid".to_owned(), self.pid.into());
        fields.insert("command".to_owned(), self.command.as_str().into());
        add_times(&mut json, None);
        Some(json)
    }

    /// Whether its process still exists, and has not ended.
    pub(crate) fn runs(&self) -> bool {
        !matches!(state(self.pid).as_str(), "" | "Z" | "X")
    }
}

/// Of times of the monotonic clock: how long ago they were; without `now`, when the endpoint renewed its counts last.
fn add_times(page: &mut Value, now: Option<u64>) {
    let endpoints = page.get_mut("endpoints").and_then(Value::as_array_mut).into_iter().flatten();
    for fields in endpoints.filter_map(Value::as_object_mut) {
        let now = now.or_else(|| fields.get("renewed_ns")?.as_u64()).unwrap_or(0);
        for (time, age) in
            [("renewed_ns", "renewed_ms_ago"), ("send_waits_since_ns", "send_waits_ms")]
        {
            let since = fields.remove(time).and_then(|time| time.as_u64());
            if let Some(since) = since.filter(|since| *since > 0) {
                fields.insert(age.to_owned(), (now.saturating_sub(since) / 1_000_000).into());
            }
        }
    }
}

/// The clock of those times, nanoseconds.
#[allow(unsafe_code)] // a system call
pub(crate) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills a local structure.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

fn open(path: &Path) -> Result<fs::File, String> {
    // A FIFO of that name in another mount namespace does not keep the reader waiting.
    let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| error.to_string())?;
    let is_file = file.metadata().is_ok_and(|data| data.is_file());
    if is_file { Ok(file) } else { Err("not a page of udrv".to_owned()) }
}

/// The number that a process has for itself, which in a container is not the one that others see.
pub(crate) fn own_number(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let own = numbers.and_then(|numbers| numbers.split_whitespace().last()?.parse().ok());
    own.unwrap_or_else(|| pid.into())
}

/// What it runs, as ps(1) shows it.
fn command(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    printable(&line)
}

/// The letter of its state (proc_pid_stat(5)), such as `T`: stopped.
fn state(pid: u32) -> String {
    let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit(") ").next().and_then(|rest| rest.get(..1)).unwrap_or("").to_owned()
}

/// Without what controls a terminal.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

impl Page {
    pub(crate) fn read(file: &fs::File) -> Result<Self, String> {
        let read = |len: usize| {
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, 0).map(|()| bytes).map_err(|error| error.to_string())
        };
        let head = Self { bytes: read(24)?, later: Vec::new() };
        if head.bytes.get(..8) != Some(MAGIC) {
            return Err("not a page of udrv".to_owned());
        }
        let layout = head.word(1).unwrap_or(0);
        if !(1..=LAYOUT).contains(&layout) {
            return Err(format!("a page of layout {layout}, not 1 to {LAYOUT}"));
        }
        let len = (head.word(2).unwrap_or(0) as usize).min(LONGEST);
        let mut page = Self { bytes: read(len)?, later: read(len)? };
        for _ in 0..TRIES {
            if page.is_at_rest() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
            page = Self { bytes: read(len)?, later: read(len)? };
        }
        Ok(page)
    }

    /// No record was changed while the page was read.
    fn is_at_rest(&self) -> bool {
        let at_rest = |(begin, _)| self.is_whole(begin).unwrap_or(true);
        self.begins(3).chain(self.begins(6)).chain(self.begins(13)).all(at_rest)
    }

    /// Whether the record at this byte did not change while it was read. `None`: it is not in the page.
    fn is_whole(&self, begin: usize) -> Option<bool> {
        let sequence = self.word(begin / 8)?;
        let later = self.later.get(8 * (begin / 8)..8 * (begin / 8) + 8)?;
        Some(sequence % 2 == 0 && sequence.to_ne_bytes() == *later)
    }

    /// Where the records of the table begin that is described from word `at` on, and their numbers.
    fn begins(&self, at: usize) -> impl Iterator<Item = (usize, usize)> {
        let word = |more: usize| self.word(at + more).unwrap_or(0) as usize;
        let (begin, bytes, count) = (word(0), word(1), word(2));
        let place =
            move |number: usize| Some((begin.checked_add(number.checked_mul(bytes)?)?, number));
        (0..count.min(LONGEST / bytes.max(8))).map_while(place)
    }

    fn word(&self, at: usize) -> Option<u64> {
        let begin = at.checked_mul(8)?;
        let bytes = self.bytes.get(begin..begin.checked_add(8)?)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    }

    /// A text that begins at this byte and has room for so many.
    fn text(&self, at: usize, room: usize) -> String {
        self.raw(at, room).map(printable).unwrap_or_default()
    }

    fn raw(&self, at: usize, room: usize) -> Option<&[u8]> {
        self.bytes.get(at..at.checked_add(room)?)?.split(|byte| *byte == 0).next()
    }

    /// Everything in it; with `closed`, also what endpoints and peers that are gone have left.
    fn json(&self, closed: bool) -> Value {
        let text = |number: usize| self.text(8 * (16 + 8 * number), 64);
        let number = |at: usize| self.word(at).filter(|word| *word != NONE);
        let room = self.word(3).map_or(0, |end| end as usize).saturating_sub(8 * 64);
        let names = String::from_utf8_lossy(self.raw(8 * 64, room).unwrap_or_default());
        let mut names = names.split('\n');
        let mut names = || names.next().unwrap_or_default();
        let (endpoint, peer, warning) = (names(), names(), names());
        json!({
            "pid": number(9),
            "rank": number(11),
            "host": text(1),
            "program": text(2),
            "version": text(0),
            "commit": text(3),
            "since_unix_ns": number(10),
            "not_shown": number(12),
            "endpoints": self.records(3, endpoint, closed),
            "peers": self.records(6, peer, closed),
            "warnings": self.records(13, warning, closed),
        })
    }

    /// The open records of the table that is described from word `at` on; with `closed`, also those of what is gone.
    fn records(&self, at: usize, names: &str, closed: bool) -> Vec<Value> {
        // Records that overlap would let a small page become a long list.
        if self.word(at + 1).unwrap_or(0) < width(names) {
            return Vec::new();
        }
        let record = |(begin, number)| {
            let is_closed = self.word(begin / 8 + 1)? == 2;
            let mut record = self.record(begin, number, names)?;
            if is_closed {
                record.insert("closed".to_owned(), true.into());
            }
            (closed || !is_closed).then(|| record.into())
        };
        self.begins(at).filter_map(record).collect()
    }

    /// `None`: it was never open, or changed while it was read.
    fn record(&self, begin: usize, number: usize, names: &str) -> Option<Map<String, Value>> {
        if !self.is_whole(begin)? || !matches!(self.word(begin / 8 + 1)?, 1 | 2) {
            return None;
        }
        let mut fields = Map::new();
        fields.insert("number".to_owned(), number.into());
        let mut at = begin;
        for name in names.split_whitespace() {
            match name.split_once([':', '[']) {
                Some((name, room)) if room.ends_with(']') => {
                    let words: usize = room.trim_end_matches(']').parse().ok()?;
                    let all: Option<Vec<u64>> = (0..words).map(|n| self.word(at / 8 + n)).collect();
                    fields.insert(name.to_owned(), all?.into());
                    at = at.checked_add(words.checked_mul(8)?)?;
                }
                Some((name, room)) => {
                    let room: usize = room.parse().ok()?;
                    fields.insert(name.to_owned(), self.text(at, room).into());
                    at = at.checked_add(room)?;
                }
                None => {
                    let value = self.word(at / 8)?;
                    if !matches!(name, "sequence" | "state") && value != NONE {
                        fields.insert(name.to_owned(), value.into());
                    }
                    at += 8;
                }
            }
        }
        Some(fields)
    }
}

/// The pages of the processes named, or of all, as JSON.
pub(crate) fn all(only: &[u32]) -> Vec<Value> {
    look(only).into_iter().filter_map(|(_, page)| page.ok()).collect()
}

/// The same, for a command that begins. A page of a layout that is not known, and a process that was named and has no page,
/// are named on the standard error stream. Errors: there is none that can be read, which is [`NO_PAGE`] if there is none
/// at all.
pub(crate) fn asked(only: &[u32]) -> Result<Vec<Value>, String> {
    let (mut found, mut errors, mut known) = (Vec::new(), Vec::new(), Vec::new());
    for (pid, page) in look(only) {
        known.push(pid);
        match page {
            Ok(page) => found.push(page),
            Err(error) => errors.push(error),
        }
    }
    let missing: Vec<u32> = only.iter().copied().filter(|pid| !known.contains(pid)).collect();
    if !missing.is_empty() {
        errors.push(format!("no endpoint of udrv in {missing:?}, or not of this user"));
    }
    if found.is_empty() {
        return Err(if errors.is_empty() { NO_PAGE.to_owned() } else { errors.join("; ") });
    }
    errors.iter().for_each(|error| eprintln!("udrv: {error}"));
    Ok(found)
}

/// No process was named, and none has a page.
pub(crate) const NO_PAGE: &str = "no process of this user has an endpoint of udrv";

/// The processes that have a page, and the page; errors: it is of a layout that is not known.
fn look(only: &[u32]) -> Vec<(u32, Result<Value, String>)> {
    let pids = processes(only).into_iter();
    pids.filter_map(|pid| of_process(pid).map(|page| (pid, page))).collect()
}

/// Bytes of a record with these names. None counts for nothing, however short its text.
fn width(names: &str) -> u64 {
    let room = |name: &str| match (name.split_once(':'), name.split_once('[')) {
        (Some((_, room)), _) => room.parse().unwrap_or(8),
        (_, Some((_, words))) => {
            words.trim_end_matches(']').parse().map_or(8, |words: u64| words.saturating_mul(8))
        }
        _ => 8,
    };
    let width = |name: &str| room(name).max(8);
    names.split_whitespace().map(width).fold(0, u64::saturating_add)
}

/// Sums a field over the endpoints of a page.
pub(crate) fn sum(page: &Value, field: &str) -> u64 {
    let endpoints = page.get("endpoints").and_then(Value::as_array).into_iter().flatten();
    endpoints.filter_map(|endpoint| endpoint.get(field)?.as_u64()).sum()
}

/// Whether an endpoint has polled in vain between two looks.
pub(crate) fn polled_in_vain(before: &Value, after: &Value) -> bool {
    let number = |of: &Value, name: &str| of[name].as_u64().unwrap_or(0);
    // The number of polls is counted modulo 2^32.
    let polls = number(after, "polls").wrapping_sub(number(before, "polls")) & u64::from(u32::MAX);
    number(after, "empty_polls") >= polls
}

/// The process that has the endpoint at this address, if its page can be read here.
pub(crate) fn owner(address: &str, all: &[Value]) -> String {
    let process_with = |is_it: &dyn Fn(&str) -> bool| {
        let has_it = |page: &&Value| {
            let mut endpoints = page["endpoints"].as_array().into_iter().flatten();
            endpoints.any(|endpoint| endpoint["address"].as_str().is_some_and(is_it))
        };
        all.iter().find(has_it).map(name)
    };
    // A peer is known by the address that the application has given, which is one of several of its host.
    let same_port = |its: &str| match (its.rsplit_once(':'), address.rsplit_once(':')) {
        (Some((_, its_port)), Some((_, port))) => its_port == port && is_of_this_host(its),
        _ => false,
    };
    if let Some(name) = process_with(&|its| its == address) {
        return name;
    }
    if !is_of_this_host(address) {
        return unseen(address, "not of this node", all);
    }
    process_with(&same_port)
        .unwrap_or_else(|| unseen(address, "whose process is not seen here", all))
}

/// Whether the address of an endpoint is one of this host: of its loopback network, or one that a socket can have.
fn is_of_this_host(address: &str) -> bool {
    let ip = address.parse().map(|address: SocketAddr| address.ip());
    ip.is_ok_and(|ip| ip.is_loopback() || UdpSocket::bind((ip, 0)).is_ok())
}

/// A process without a page, with its rank if it has said that to one of these.
fn unseen(address: &str, why: &str, all: &[Value]) -> String {
    let mut peers = all.iter().flat_map(|page| page["peers"].as_array().into_iter().flatten());
    let rank = peers.find(|peer| peer["address"] == address).and_then(|peer| peer["rank"].as_u64());
    match rank {
        Some(rank) => format!("rank {rank} ({address}, {why})"),
        None => format!("{address}, {why}"),
    }
}

/// Classes of lengths of times in a page, each four times as long as the one before; the first one ends at 1 us.
pub(crate) const CLASSES: usize = 12;
/// The first class of times of 1 ms and more, and that of 64 ms and more.
pub(crate) const FROM_1_MS: usize = 6;
pub(crate) const FROM_64_MS: usize = 9;

/// How many times of a class and of longer ones the endpoints of a page have counted.
pub(crate) fn times(page: &Value, name: &str, class: usize) -> u64 {
    let endpoints = page["endpoints"].as_array().into_iter().flatten();
    let counts = endpoints.filter_map(|endpoint| endpoint[name].as_array());
    counts.flat_map(|counts| counts.iter().skip(class)).filter_map(Value::as_u64).sum()
}

/// A process with its rank, host and number, as people name it.
pub(crate) fn name(page: &Value) -> String {
    let number = |field: &str| page.get(field).and_then(Value::as_u64);
    let host = page.get("host").and_then(Value::as_str).unwrap_or("?");
    let pid = number("pid").unwrap_or(0);
    match number("rank") {
        Some(rank) => format!("rank {rank} ({host}, process {pid})"),
        None => format!("process {pid} ({host})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page with one endpoint and one peer, as the provider lays it out, of other names than today's.
    fn page(words: &[(usize, u64)]) -> Page {
        let mut bytes = vec![0u8; 4096];
        let names = b"sequence state address:16 eager_sent shoes gaps[2]\nsequence state endpoint transport:16 rtt_ns\0";
        let mut put =
            |at: usize, value: u64| bytes[8 * at..8 * at + 8].copy_from_slice(&value.to_ne_bytes());
        put(0, u64::from_ne_bytes(*b"udrvpage"));
        for (at, value) in [
            (1, 1),
            (2, 4096),
            (3, 2048),
            (4, 64),
            (5, 2),
            (6, 3072),
            (7, 48),
            (8, 1),
            (9, 7),
            (11, NONE),
        ] {
            put(at, value);
        }
        put(256, 2);
        put(257, 1);
        put(258, u64::from_ne_bytes(*b"a:1\0\0\0\0\0"));
        put(260, 5);
        put(261, 6);
        put(262, 8);
        put(263, 9);
        for (at, value) in words {
            put(*at, *value);
        }
        bytes[512..512 + names.len()].copy_from_slice(names);
        Page { later: bytes.clone(), bytes }
    }

    #[test]
    fn words_are_taken_by_their_names() {
        let json = page(&[]).json(false);
        assert_eq!(json["endpoints"][0]["shoes"], 6);
        assert_eq!(json["endpoints"][0]["gaps"], json!([8, 9]));
        assert_eq!((times(&json, "gaps", 1), times(&json, "gaps", 0)), (9, 17));
        assert_eq!(json["endpoints"][0]["address"], "a:1");
        assert_eq!((&json["pid"], &json["rank"]), (&json!(7), &Value::Null));
        assert_eq!(sum(&json, "eager_sent"), 5);
        assert_eq!((&json["peers"], &json["warnings"]), (&json!([]), &json!([])));
        assert_eq!(json["endpoints"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn records_that_change_or_are_unknown_are_left_out() {
        assert_eq!(page(&[(256, 3)]).json(false)["endpoints"], json!([]));
        let mut torn = page(&[]);
        torn.later[8 * 256] = 4;
        assert!(!torn.is_at_rest());
        assert_eq!(torn.json(false)["endpoints"], json!([]));
        assert!(page(&[(261, NONE)]).json(false)["endpoints"][0].get("shoes").is_none());
        let closed = page(&[(257, 2)]);
        assert_eq!(closed.json(false)["endpoints"], json!([]));
        assert_eq!(closed.json(true)["endpoints"][0]["closed"], true);
        assert_eq!(page(&[(257, 3)]).json(true)["endpoints"], json!([]));
    }

    #[test]
    fn a_peer_is_found_by_any_address_of_its_host() {
        let page = json!({ "pid": 7, "host": "n", "endpoints": [{ "address": "127.0.0.1:7" }],
            "peers": [{ "address": "203.0.113.9:7", "rank": 4 }] });
        let of = |address: &str| owner(address, std::slice::from_ref(&page));
        assert_eq!(of("127.0.0.1:7"), "process 7 (n)");
        assert_eq!(of("127.0.1.1:7"), "process 7 (n)");
        assert_eq!(of("127.0.1.1:17"), "127.0.1.1:17, whose process is not seen here");
        assert_eq!(of("203.0.113.9:7"), "rank 4 (203.0.113.9:7, not of this node)");
    }

    #[test]
    fn any_bytes_are_harmless() {
        for at in 2..9 {
            for value in [1, 2047, u64::MAX, 1 << 40] {
                let page = page(&[(at, value)]);
                let _ = (page.is_at_rest(), page.json(false));
            }
        }
        assert_eq!(printable(b"a\x1b[31m\nb\0"), "a [31m b");
    }

    #[test]
    fn times_become_ages() {
        let endpoint = json!({ "renewed_ns": 2_000_000, "send_waits_since_ns": 0 });
        let mut page = json!({ "endpoints": [endpoint] });
        add_times(&mut page, Some(9_000_000));
        assert_eq!(page["endpoints"][0], json!({ "renewed_ms_ago": 7 }));
        let endpoint = json!({ "renewed_ns": 9_000_000, "send_waits_since_ns": 4_000_000 });
        let mut page = json!({ "endpoints": [endpoint] });
        add_times(&mut page, None);
        assert_eq!(page["endpoints"][0], json!({ "renewed_ms_ago": 0, "send_waits_ms": 5 }));
        assert!(now_ns() > 0);
    }

    #[test]
    fn pages_of_other_layouts_are_named() {
        let read = |words: &[(usize, u64)]| {
            let name =
                format!("{}/udrv-page-{}", std::env::temp_dir().display(), std::process::id());
            fs::write(&name, page(words).bytes).unwrap();
            let read = open(Path::new(&name)).and_then(|file| Page::read(&file).map(|_| ()));
            fs::remove_file(&name).unwrap();
            read
        };
        assert_eq!(read(&[]), Ok(()));
        assert_eq!(read(&[(1, 2)]), Ok(()));
        assert_eq!(read(&[(1, 3)]), Err("a page of layout 3, not 1 to 2".to_owned()));
        assert_eq!(read(&[(0, 2)]), Err("not a page of udrv".to_owned()));
        assert!(read(&[(2, 1 << 60)]).is_err(), "longer than the file");
        assert!(open(Path::new("/")).is_err());
    }

    #[test]
    fn this_process_is_what_it_is() {
        let pid = std::process::id();
        assert_eq!((own_number(pid) > 0, state(pid).len()), (true, 1));
        assert!(!command(pid).is_empty() && of_process(pid).is_none());
    }
}
