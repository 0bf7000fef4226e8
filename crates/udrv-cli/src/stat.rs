//! `udrv stat`: what the endpoints of running processes have done.
#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use crate::{Outcome, page};
use serde_json::Value;
use std::fmt::Write;
use std::process::ExitCode;

#[derive(clap::Args)]
pub(crate) struct Stat {
    /// Print JSON: one list with an object for each process
    #[arg(long)]
    json: bool,
    /// Print the text format of Prometheus, for the textfile collector of node_exporter
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
    /// Only these processes; without any, all of this user
    pid: Vec<u32>,
}

impl Stat {
    pub(crate) fn run(self) -> Outcome {
        let pages = match page::asked(&self.pid) {
            // A collector finds an empty list, and no error, while no job runs.
            Err(why) if why == page::NO_PAGE && (self.json || self.prometheus) => Vec::new(),
            found => found?,
        };
        if self.json {
            println!("{:#}", Value::from(pages));
        } else if self.prometheus {
            print!("{}", prometheus(&pages));
        } else {
            pages.iter().for_each(|page| print!("{}", table(page)));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Fields of a record that are no counts.
const WORDS: [&str; 7] = ["number", "endpoint", "address", "transport", "reason", "state", "rank"];

/// Times of an endpoint that are counted by their length.
const TIMES: [&str; 3] = ["late_receivers", "early_senders", "progress_gaps"];

/// Writing to a text cannot fail.
pub(crate) fn table(page: &Value) -> String {
    let mut out = format!("{}: {}\n", page::name(page), page["command"].as_str().unwrap_or("?"));
    if rows(&page["endpoints"]).next().is_none() {
        let _ = writeln!(out, "  no endpoint is open");
    }
    if let Some(missed) = page["not_shown"].as_u64().filter(|missed| *missed > 0) {
        let _ =
            writeln!(out, "  endpoints, or endpoints' peers, that found no room here: {missed}");
    }
    for warning in rows(&page["warnings"]) {
        let _ = writeln!(out, "  warned, {} times: {}", warning["times"], text(&warning["text"]));
    }
    for endpoint in rows(&page["endpoints"]) {
        let closed = if endpoint["closed"] == true { " (closed)" } else { "" };
        let _ = writeln!(out, "  endpoint {}{closed}", text(&endpoint["address"]));
        for (name, count) in counts(endpoint).filter(|(_, count)| *count > 0) {
            let _ = writeln!(out, "    {name:<22} {count:>16}");
        }
        for name in TIMES {
            if let Some(times) = by_length(&endpoint[name]) {
                let _ = writeln!(out, "    {name:<22} {times}");
            }
        }
        for name in ["send_waits_for", "receive_waits_for"] {
            if let Some(peer) = endpoint[name].as_str().filter(|peer| !peer.is_empty()) {
                let _ = writeln!(out, "    {name:<22} {peer:>16}");
            }
        }
        for peer in rows(&page["peers"]).filter(|peer| peer["endpoint"] == endpoint["number"]) {
            let reason = Some(text(&peer["reason"])).filter(|reason| !reason.is_empty());
            let reason = reason.map_or(String::new(), |reason| format!(" ({reason})"));
            let mut line = format!(
                "    peer {}{} by {}{reason}",
                text(&peer["address"]),
                rank_of(peer),
                text(&peer["transport"])
            );
            let is_shown = |count: &(&str, u64)| count.1 > 0 || count.0.starts_with("messages_");
            for (name, count) in counts(peer).filter(is_shown) {
                let _ = write!(line, ", {name} {count}");
            }
            let _ = writeln!(out, "{line}");
        }
    }
    out
}

/// ` (rank 3)`, or nothing.
pub(crate) fn rank_of(peer: &Value) -> String {
    peer["rank"].as_u64().map_or(String::new(), |rank| format!(" (rank {rank})"))
}

/// The classes of times that are not empty, with their upper ends. `None`: there are none.
fn by_length(times: &Value) -> Option<String> {
    let counts = times.as_array()?.iter().map(|count| count.as_u64().unwrap_or(0));
    let classes =
        counts.zip(ends()).filter(|(count, _)| *count > 0).map(|(count, end)| match end {
            Some(us) if us < 1000 => format!("<{us} us: {count}"),
            Some(us) if us < 1 << 20 => format!("<{} ms: {count}", us >> 10),
            Some(us) => format!("<{} s: {count}", us >> 20),
            None => format!("longer: {count}"),
        });
    let classes: Vec<String> = classes.collect();
    (!classes.is_empty()).then(|| classes.join(", "))
}

/// Where the classes of times end, microseconds.
fn ends() -> impl Iterator<Item = Option<u64>> {
    (0..page::CLASSES).map(|class| (class + 1 < page::CLASSES).then(|| 1 << (2 * class)))
}

/// The lines of times that are counted by their length: as many as were not longer than each end.
fn buckets(endpoint: &Value, labels: &str) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for times in TIMES {
        let counts = endpoint[times].as_array().into_iter().flatten();
        let (name, mut so_far) = (format!("udrv_{times}_seconds"), 0);
        for (count, end) in counts.filter_map(Value::as_u64).zip(ends()) {
            so_far += count;
            let end = end.map_or_else(|| "+Inf".to_owned(), |us| (us as f64 / 1e6).to_string());
            let line = format!("{name}_bucket{{{labels},le=\"{end}\"}} {so_far}");
            lines.push((name.clone(), line));
        }
        if !endpoint[times].is_null() {
            lines.push((name.clone(), format!("{name}_count{{{labels}}} {so_far}")));
        }
    }
    lines
}

fn prometheus(pages: &[Value]) -> String {
    let mut lines: Vec<(String, String)> = Vec::new();
    for page in pages {
        let rank = page["rank"].as_u64().map_or(String::new(), |rank| rank.to_string());
        let process = format!("pid=\"{}\",rank=\"{rank}\"", page["pid"]);
        for endpoint in rows(&page["endpoints"]) {
            let labels = format!("{process},endpoint=\"{}\"", label(&endpoint["address"]));
            lines.extend(counts(endpoint).map(|(name, count)| metric("", name, &labels, count)));
            lines.extend(buckets(endpoint, &labels));
        }
        for peer in rows(&page["peers"]) {
            let (address, transport) = (label(&peer["address"]), label(&peer["transport"]));
            let labels = format!(
                "{process},endpoint=\"{}\",peer=\"{address}\",transport=\"{transport}\"",
                peer["endpoint"]
            );
            lines.extend(counts(peer).map(|(name, count)| metric("peer_", name, &labels, count)));
        }
    }
    // All lines of one metric stand together, behind its type.
    lines.sort_by(|a, b| a.0.cmp(&b.0));
    let (mut out, mut last) = (String::new(), String::new());
    for (name, line) in lines {
        if name != last {
            let _ = writeln!(out, "# TYPE {name} {}", kind(&name));
        }
        let _ = writeln!(out, "{line}");
        last = name;
    }
    out
}

fn metric(kind: &str, name: &str, labels: &str, count: u64) -> (String, String) {
    let name = format!("udrv_{kind}{name}");
    let line = format!("{name}{{{labels}}} {count}");
    (name, line)
}

fn kind(name: &str) -> &'static str {
    match name {
        name if name.ends_with("_seconds") => "histogram",
        name if is_gauge(name) => "gauge",
        _ => "counter",
    }
}

/// Values that also go down.
fn is_gauge(name: &str) -> bool {
    const GAUGES: [&str; 11] = [
        "empty_polls",
        "asleep",
        "unexpected_bytes",
        "unexpected_bytes_peak",
        "connected",
        "rtt_ns",
        "unanswered",
        "receives_posted",
        "sends_pending",
        "renewed_ms_ago",
        "send_waits_ms",
    ];
    GAUGES.iter().any(|gauge| name.ends_with(gauge))
}

fn label(of: &Value) -> String {
    text(of).replace('\\', r"\\").replace('"', "\\\"").replace('\n', " ")
}

fn counts(record: &Value) -> impl Iterator<Item = (&str, u64)> {
    let fields = record.as_object().into_iter().flatten();
    fields
        .filter(|(name, _)| !WORDS.contains(&name.as_str()))
        .filter_map(|(name, count)| Some((name.as_str(), count.as_u64()?)))
}

fn rows(of: &Value) -> impl Iterator<Item = &Value> {
    of.as_array().into_iter().flatten()
}

fn text(of: &Value) -> &str {
    of.as_str().unwrap_or("?")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample() -> Value {
        json!({
            "pid": 7, "rank": 3, "host": "n1", "command": "app",
            "endpoints": [{ "number": 0, "address": "10.0.0.1:5", "eager_sent": 12, "connected": 1, "dropped": 0,
                "progress_gaps": [0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 1] }],
            "peers": [{ "number": 0, "endpoint": 0, "address": "10.0.0.2:6", "transport": "UDP", "reason": "no device", "rtt_ns": 9000, "split_sent": 0, "rank": 5 }],
        })
    }

    #[test]
    fn a_table_names_what_is_there() {
        let table = table(&sample());
        assert!(table.starts_with("rank 3 (n1, process 7): app\n"), "{table}");
        assert!(
            table.contains("peer 10.0.0.2:6 (rank 5) by UDP (no device), rtt_ns 9000\n"),
            "{table}"
        );
        assert!(
            table.contains("progress_gaps          <16 us: 2, <4 ms: 5, longer: 1\n"),
            "{table}"
        );
        assert!(table.contains("eager_sent") && !table.contains("dropped"), "{table}");
    }

    #[test]
    fn metrics_have_types_and_labels() {
        let text = prometheus(&[sample(), sample()]);
        assert_eq!(text.matches("# TYPE udrv_eager_sent counter\n").count(), 1, "{text}");
        assert!(text.contains("# TYPE udrv_peer_rtt_ns gauge\n"), "{text}");
        let bucket = "udrv_progress_gaps_seconds_bucket{pid=\"7\",rank=\"3\",endpoint=\"10.0.0.1:5\",le=\"0.004096\"} 7\n";
        assert!(text.contains("# TYPE udrv_progress_gaps_seconds histogram\n"), "{text}");
        assert_eq!(text.matches(bucket).count(), 2, "{text}");
        let line = "udrv_eager_sent{pid=\"7\",rank=\"3\",endpoint=\"10.0.0.1:5\"} 12\n";
        assert_eq!(text.matches(line).count(), 2, "{text}");
    }
}
