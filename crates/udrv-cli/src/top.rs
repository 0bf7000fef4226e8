//! `udrv top`: what the running processes do now, drawn again and again.
#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use crate::screen::Screen;
use crate::stat::rank_of;
use crate::{Outcome, page};
use serde_json::Value;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Top {
    /// Time between two pictures, milliseconds; at least 200, so that processes renew their counts meanwhile
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(200..=3_600_000))]
    time_ms: u64,
    /// End after so many pictures; without it, at the key q
    #[arg(long)]
    count: Option<u64>,
    /// Show peers too, as the key p does
    #[arg(long)]
    peers: bool,
    /// Only these processes; without any, all of this user
    pid: Vec<u32>,
}

/// How long messages go to a peer.
const WAYS: [&str; 5] = ["unsolicited", "fragments", "read", "written", "split"];

/// Counts of the bytes of long messages and one-sided operations.
const BYTES: [&str; 8] = [
    "pulled_bytes",
    "pushed_bytes",
    "fragment_bytes",
    "stream_bytes",
    "window_bytes",
    "assisted_bytes",
    "reached_bytes",
    "read_bytes",
];

impl Top {
    pub(crate) fn run(mut self) -> Outcome {
        // What cannot be shown is said before the screen is another one.
        let first = page::asked(&self.pid).unwrap_or_else(|why| {
            eprintln!("udrv: {why}");
            Vec::new()
        });
        let screen = Screen::open();
        let pause = Duration::from_millis(self.time_ms);
        let (mut before, mut after) = (Vec::new(), first);
        let (mut at, mut seconds, mut pictures) = (Instant::now(), 0.0, 0);
        while self.count.is_none_or(|count| pictures < count) {
            let left = (at + pause).saturating_duration_since(Instant::now());
            match self.wait(screen.as_ref(), left)? {
                Wait::Quit => break,
                Wait::Key if pictures == 0 => continue,
                // Processes renew their counts now and then: the same two looks are drawn in another way.
                Wait::Key => (),
                Wait::Due => {
                    (before, after) = (after, page::all(&self.pid));
                    (seconds, at) = (at.elapsed().as_secs_f64(), Instant::now());
                    pictures += 1;
                }
            }
            let lines = lines(&before, &after, seconds, self.peers);
            match &screen {
                Some(screen) => screen.draw(&lines),
                None => println!("{}\n", lines.join("\n")),
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Until the next picture is due, or a key is pressed.
    fn wait(&mut self, screen: Option<&Screen>, left: Duration) -> Result<Wait, String> {
        let Some(screen) = screen else {
            std::thread::sleep(left);
            return Ok(Wait::Due);
        };
        match screen.key(left)? {
            None => return Ok(Wait::Due),
            Some(b'q' | 3) => return Ok(Wait::Quit), // 3: Control-C
            Some(b'p') => self.peers = !self.peers,
            Some(_) => (),
        }
        Ok(Wait::Key)
    }
}

/// How a wait for the next table has ended.
enum Wait {
    Due,
    Key,
    Quit,
}

fn lines(before: &[Value], after: &[Value], seconds: f64, peers: bool) -> Vec<String> {
    let mut pages: Vec<&Value> = after.iter().collect();
    pages.sort_by_key(|page| (page["rank"].as_u64(), page["pid"].as_u64()));
    let mut lines = vec![
        format!("udrv top: {} processes; q ends this, p shows or hides peers", pages.len()),
        format!(
            "{:>6} {:>8} {:<9} {:>10} {:>10} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>10}  {}",
            "RANK",
            "PID",
            "STATE",
            "SENT/s",
            "MiB/s",
            "PENDING",
            "POSTED",
            "RESENT/s",
            "WAIT/s",
            "LATE/s",
            "CACHE",
            "HELD",
            "COMMAND"
        ),
    ];
    for page in pages {
        let earlier = before.iter().find(|earlier| earlier["pid"] == page["pid"]);
        let earlier = earlier.unwrap_or(page);
        lines.push(process(earlier, page, seconds));
        if peers {
            lines.extend(page["peers"].as_array().into_iter().flatten().map(|peer| {
                let is_same = |old: &&Value| {
                    old["number"] == peer["number"] && old["address"] == peer["address"]
                };
                let old = earlier["peers"].as_array().into_iter().flatten().find(is_same);
                peer_line(old.unwrap_or(peer), peer, seconds)
            }));
        }
    }
    lines
}

/// What a process does in a second: names, units and rates.
pub(crate) fn rates(
    before: &Value,
    after: &Value,
    seconds: f64,
) -> [(&'static str, &'static str, f64); 3] {
    let rate = |names: &[&str]| {
        let sum = |page| names.iter().map(|name| page::sum(page, name)).sum::<u64>();
        sum(after).saturating_sub(sum(before)) as f64 / seconds
    };
    [
        ("messages sent", "messages/s", rate(&["eager_sent", "rendezvous_sent"])),
        ("long messages", "MiB/s", rate(&BYTES) / f64::from(1 << 20)),
        ("packets sent again", "packets/s", rate(&["retransmitted"])),
    ]
}

/// A line about one process.
fn process(before: &Value, after: &Value, seconds: f64) -> String {
    let [(.., messages), (.., bytes), (.., again)] = rates(before, after, seconds);
    let rank = after["rank"].as_u64().map_or_else(|| "-".to_owned(), |rank| rank.to_string());
    format!(
        "{rank:>6} {:>8} {:<9} {:>10.0} {:>10.1} {:>8} {:>8} {:>8.0} {:>8.0} {:>8.0} {:>6} {:>10}  {}",
        after["pid"].as_u64().unwrap_or(0),
        activity(before, after),
        messages,
        bytes,
        page::sum(after, "sends_pending"),
        page::sum(after, "receives_posted"),
        again,
        slow(before, after, "late_receivers") / seconds,
        slow(before, after, "early_senders") / seconds,
        cache(before, after),
        page::sum(after, "unexpected_bytes"),
        after["command"].as_str().unwrap_or("?"),
    )
}

/// Waits of 1 ms and more between two looks.
fn slow(before: &Value, after: &Value, name: &str) -> f64 {
    let count = |page| page::times(page, name, page::FROM_1_MS);
    count(after).saturating_sub(count(before)) as f64
}

/// How many of the requests for a registration between two looks found one.
fn cache(before: &Value, after: &Value) -> String {
    let more = |name| page::sum(after, name).saturating_sub(page::sum(before, name));
    let (hits, misses) = (more("cache_hits"), more("cache_misses"));
    let percent = (100 * hits).checked_div(hits + misses);
    percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent}%"))
}

/// What a process has done between two looks.
pub(crate) fn activity(before: &Value, after: &Value) -> &'static str {
    let changed = |name| page::sum(before, name) != page::sum(after, name);
    let endpoints = |of: &Value| of["endpoints"].as_array().cloned().unwrap_or_default();
    let (old, new) = (endpoints(before), endpoints(after));
    let is_idle = |new: &Value| {
        let old = old.iter().find(|old| old["number"] == new["number"]).unwrap_or(&Value::Null);
        page::polled_in_vain(old, new) && old["eager_sent"] == new["eager_sent"]
    };
    if matches!(after["process_state"].as_str(), Some("T" | "t")) {
        "stopped"
    } else if !changed("polls") && !changed("sleeps") {
        if page::sum(after, "asleep") > 0 { "asleep" } else { "computes" }
    } else if !new.is_empty() && new.iter().all(is_idle) {
        "waits"
    } else {
        "works"
    }
}

/// A line about one of its peers.
fn peer_line(before: &Value, after: &Value, seconds: f64) -> String {
    let rate = |name: &str| {
        let count = |of: &Value| of[name].as_u64().unwrap_or(0);
        count(after).saturating_sub(count(before)) as f64 / seconds
    };
    let rtt = after["rtt_ns"].as_u64();
    let rtt = rtt.map_or(String::new(), |ns| format!(", round trip {:.1} us", ns as f64 / 1e3));
    let reason = after["reason"].as_str().filter(|reason| !reason.is_empty());
    let reason = reason.map_or(String::new(), |reason| format!(" ({reason})"));
    let ways =
        WAYS.iter().map(|way| (way, rate(&format!("{way}_sent_bytes")) / f64::from(1 << 20)));
    let ways =
        ways.filter(|(_, rate)| *rate >= 0.1).map(|(way, rate)| format!(", {rate:.1} MiB/s {way}"));
    let ways: String = ways.collect();
    let waits = after["unanswered"].as_u64() > Some(0);
    format!(
        "{:>8} {}{} by {}: {:.0} messages/s to it, {:.0} from it{rtt}{ways}{reason}{}",
        "peer",
        after["address"].as_str().unwrap_or("?"),
        rank_of(after),
        after["transport"].as_str().unwrap_or("?"),
        rate("messages_sent"),
        rate("messages_received"),
        if waits { ", has not answered yet" } else { "" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample(sent: u64, polls: u64) -> Value {
        json!({
            "pid": 7, "rank": 3, "command": "app",
            "endpoints": [{ "eager_sent": sent, "polls": polls, "empty_polls": 0, "pulled_bytes": sent << 20, "sends_pending": 2,
                "cache_hits": 3 * sent, "cache_misses": sent, "late_receivers": [0, 0, 0, 0, 0, 9, sent] }],
            "peers": [{ "number": 0, "address": "b", "transport": "UDP", "reason": "no device", "messages_sent": sent, "split_sent_bytes": sent << 20, "rtt_ns": 1500, "rank": 4 }],
        })
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        let lines = lines(&[sample(10, 1)], &[sample(30, 9)], 2.0, true);
        let words: Vec<&str> = lines[2].split_whitespace().collect();
        assert_eq!(
            words,
            ["3", "7", "works", "10", "10.0", "2", "0", "0", "10", "0", "75%", "0", "app"]
        );
        assert_eq!(
            lines[3].trim(),
            "peer b (rank 4) by UDP: 10 messages/s to it, 0 from it, round trip 1.5 us, 10.0 MiB/s split (no device)"
        );
        assert_eq!(super::lines(&[], &[sample(1, 1)], 1.0, false).len(), 3);
    }

    #[test]
    fn ranks_are_in_their_order() {
        let of = |rank: Value, pid: u64| json!({ "rank": rank, "pid": pid, "endpoints": [] });
        let pages = [of(json!(10), 4), of(json!(9), 5), of(Value::Null, 6)];
        let lines = lines(&pages, &pages, 1.0, false);
        let pids: Vec<&str> =
            lines.iter().skip(2).filter_map(|l| l.split_whitespace().nth(1)).collect();
        assert_eq!(pids, ["6", "5", "4"]);
    }

    #[test]
    fn a_line_says_what_a_process_does() {
        let of = |polls: u64, empty: u64, asleep: u64| {
            let endpoint = json!({ "polls": polls, "empty_polls": empty, "asleep": asleep });
            json!({ "endpoints": [endpoint], "process_state": "R" })
        };
        assert_eq!(activity(&of(5, 0, 0), &of(5, 0, 0)), "computes");
        assert_eq!(activity(&of(5, 0, 1), &of(5, 0, 1)), "asleep");
        assert_eq!(activity(&of(5, 0, 0), &of(9, 4, 0)), "waits");
        assert_eq!(activity(&of(5, 0, 0), &of(9, 3, 0)), "works");
        assert_eq!(activity(&Value::Null, &json!({ "process_state": "T" })), "stopped");
        assert_eq!(activity(&of(u64::from(u32::MAX), 0, 0), &of(3, 4, 0)), "waits", "a wrap");
        assert_eq!(activity(&of(u64::from(u32::MAX), 0, 0), &of(3, 3, 0)), "works");
    }

    #[test]
    fn a_process_waits_when_all_its_endpoints_do() {
        let of = |polls: [u64; 2], empty: [u64; 2]| {
            let endpoint = |number: usize| json!({ "number": number, "polls": polls[number], "empty_polls": empty[number] });
            json!({ "endpoints": [endpoint(0), endpoint(1)] })
        };
        let before = of([0, 0], [0, 0]);
        assert_eq!(activity(&before, &of([100, 10], [500, 0])), "works");
        assert_eq!(activity(&before, &of([100, 10], [100, 10])), "waits");
    }
}
