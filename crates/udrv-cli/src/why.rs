//! `udrv why`: what slows down the running processes, in sentences, the worst first.
#![allow(clippy::indexing_slicing)] // of JSON values: what is missing is null

use crate::Outcome;
use crate::page::{self, sum};
use serde_json::Value;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

#[derive(clap::Args)]
pub(crate) struct Why {
    /// How long the processes are watched, milliseconds; at least 300, so that they renew their counts meanwhile
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(300..=3_600_000))]
    time_ms: u64,
    /// Only these processes; without any, all of this user
    pid: Vec<u32>,
}

/// A sentence about some processes, and how much it matters.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Cause {
    weight: u64,
    /// The same for all processes of which one sentence is enough.
    about: String,
    says: String,
    /// Empty where the sentence has it.
    remedy: &'static str,
}

/// Processes of which something is the case, and the sentence of the first one.
type Findings<'a> = BTreeMap<(u64, String), (Cause, Vec<&'a Value>)>;

/// Weights: the process does not go on; data goes a slow way; resources are short; a hint.
const STANDS: u64 = 1000;
const SLOW: u64 = 100;
const SHORT: u64 = 10;
const HINT: u64 = 1;

/// Share of retransmitted packets that is worth a word, in percent.
const LOSS_PERCENT: u64 = 1;
/// Bytes of unexpected messages that are worth a word.
const UNEXPECTED_MIN: u64 = 1 << 20;
/// How long a send waits for its receiver until that is worth a word, milliseconds: longer than the longest messages take.
const LATE_MS: u64 = 500;
/// Waits, and their share of all in percent, that are worth a word.
const WAITS_MIN: u64 = 3;
const WAITS_PERCENT: u64 = 10;

impl Why {
    pub(crate) fn run(self) -> Outcome {
        let before = page::asked(&self.pid)?;
        std::thread::sleep(Duration::from_millis(self.time_ms));
        let after = page::all(&self.pid);
        if after.is_empty() {
            return Err("the processes have ended".to_owned());
        }
        // Those that are waited for may be others.
        let all = page::all(&[]);
        let mut findings = Findings::new();
        for page in &after {
            let earlier = before.iter().find(|earlier| earlier["pid"] == page["pid"]);
            for cause in causes_of(earlier.unwrap_or(&Value::Null), page, &all) {
                let (_, who) = findings
                    .entry((cause.weight, cause.about.clone()))
                    .or_insert_with(|| (cause, Vec::new()));
                who.push(page);
            }
        }
        if findings.is_empty() {
            println!("{} processes: nothing that udrv can see slows them down", after.len());
        }
        for (cause, who) in findings.into_values().rev() {
            println!("{}: {}", processes(&who), cause.says);
            if !cause.remedy.is_empty() {
                println!("    -> {}", cause.remedy);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// More names than these are shortened.
const NAMES_MOST: usize = 4;

/// Some names, shortened.
fn together(who: &[String]) -> String {
    let named = who.iter().take(NAMES_MOST).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = who.len().saturating_sub(NAMES_MOST);
    if more > 0 { format!("{named} and {more} more") } else { named }
}

/// The names of some processes; of many, ranges of their ranks.
pub(crate) fn processes(pages: &[&Value]) -> String {
    let mut ranks: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for page in pages {
        let Some(rank) = page["rank"].as_u64() else { break };
        ranks.entry(page["host"].as_str().unwrap_or("?")).or_default().push(rank);
    }
    let all_have_ranks = ranks.values().map(Vec::len).sum::<usize>() == pages.len();
    if pages.len() > NAMES_MOST && all_have_ranks {
        let hosts = ranks.into_iter().map(|(host, its)| format!("ranks {} ({host})", ranges(its)));
        return hosts.collect::<Vec<_>>().join(", ");
    }
    together(&pages.iter().map(|page| page::name(page)).collect::<Vec<_>>())
}

/// Numbers as ranges: 0-3, 7.
fn ranges(mut numbers: Vec<u64>) -> String {
    numbers.sort_unstable();
    let runs = numbers.chunk_by(|one, next| *next <= one + 1);
    let texts = runs.filter_map(|run| match (run.first()?, run.last()?) {
        (first, last) if first == last => Some(first.to_string()),
        (first, last) => Some(format!("{first}-{last}")),
    });
    texts.collect::<Vec<_>>().join(", ")
}

fn causes_of(before: &Value, page: &Value, all: &[Value]) -> Vec<Cause> {
    let mut causes = of_peers(page);
    causes.extend(of_contacts(before, page, all));
    causes.extend(of_sends(page, all));
    causes.extend(of_warnings(page));
    causes.extend(of_packets(page));
    causes.extend(of_messages(page));
    causes.extend(of_times(before, page));
    causes.extend(of_progress(before, page, all));
    causes
}

fn cause(weight: u64, says: impl Into<String>, remedy: &'static str) -> Cause {
    let says = says.into();
    Cause { weight, about: says.clone(), says, remedy }
}

fn rows(of: &Value) -> impl Iterator<Item = &Value> {
    of.as_array().into_iter().flatten()
}

/// Peers that were asked for a connection, and have not answered all the time that the process was watched.
fn of_contacts(before: &Value, page: &Value, all: &[Value]) -> Option<Cause> {
    let unanswered = |peer: &Value| peer["unanswered"].as_u64().unwrap_or(0);
    let still = |peer: &&Value| {
        let is_same =
            |old: &&Value| old["address"] == peer["address"] && old["endpoint"] == peer["endpoint"];
        let old = rows(&before["peers"]).find(is_same).map_or(0, unanswered);
        old > 0 && unanswered(peer) > old
    };
    let silent: Vec<String> = rows(&page["peers"])
        .filter(still)
        .map(|peer| page::owner(peer["address"].as_str().unwrap_or("?"), all))
        .collect();
    let says = || format!("waits for the first answer of {}", together(&silent));
    (!silent.is_empty()).then(|| {
        let remedy = "is it stopped, or does it not get the packets? udrv why there; udrv doctor --peer HOST for the way to another node";
        cause(STANDS - 1, says(), remedy)
    })
}

/// A send whose receiver does not take it.
fn of_sends(page: &Value, all: &[Value]) -> Option<Cause> {
    let waits = |endpoint: &&Value| endpoint["send_waits_ms"].as_u64() >= Some(LATE_MS);
    let endpoint = rows(&page["endpoints"]).find(waits)?;
    let owner = page::owner(endpoint["send_waits_for"].as_str().unwrap_or("?"), all);
    let says = format!(
        "a send waits for {owner} for {} ms, and {} are pending in all",
        endpoint["send_waits_ms"], endpoint["sends_pending"]
    );
    let remedy =
        "the receiver is late: it has posted no receive, computes, or is stopped; udrv why there";
    let about = format!("a send waits for {owner}");
    Some(Cause { about, ..cause(SLOW + 1, says, remedy) })
}

/// Errors and warnings that the process has written to its log.
fn of_warnings(page: &Value) -> impl Iterator<Item = Cause> {
    rows(&page["warnings"]).map(|warning| {
        let text = warning["text"].as_str().unwrap_or("?");
        let times = warning["times"].as_u64().filter(|times| *times > 1);
        let times = times.map_or(String::new(), |times| format!(" ({times} times)"));
        let weight = if warning["level"] == 0 { STANDS - 3 } else { SLOW };
        let about = format!("warning {}", warning["cause"]);
        Cause { about, ..cause(weight, format!("{text}{times}"), "") }
    })
}

/// Peers that are not reached by the best transport.
fn of_peers(page: &Value) -> Vec<Cause> {
    let mut reasons: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for peer in page["peers"].as_array().into_iter().flatten() {
        let (by, reason) =
            (peer["transport"].as_str().unwrap_or("?"), peer["reason"].as_str().unwrap_or(""));
        if !reason.is_empty() {
            *reasons.entry((by, reason)).or_default() += 1;
        }
    }
    let least = if page["not_shown"].as_u64() > Some(0) { " or more" } else { "" };
    let sentences = reasons.into_iter().map(|((by, reason), count)| {
        let same_host = reason.contains("on this host");
        let peers = if count == 1 && least.is_empty() { "peer is" } else { "peers are" };
        let says = format!("{count}{least} {peers} reached by {by}: {reason}");
        let (weight, remedy) = if same_host {
            let remedy =
                "FI_UDRV_SHM=1 for all processes of the job; FI_UDRV_LOG=info says what failed";
            (SLOW, remedy)
        } else {
            (HINT, "udrv doctor: devices, memlock, permission for /dev/infiniband")
        };
        Cause { about: format!("by {by}: {reason}"), ..cause(weight, says, remedy) }
    });
    sentences.collect()
}

fn of_packets(page: &Value) -> Vec<Cause> {
    let mut causes = Vec::new();
    let (sent, again) = (sum(page, "packets_sent"), sum(page, "retransmitted"));
    if again * 100 > sent * LOSS_PERCENT {
        let says = format!(
            "{again} of {sent} packets were sent again: the network loses packets, receive buffers are small, or receivers wait for a processor"
        );
        let remedy = "sysctl net.core.rmem_max=8388608 on the receivers; ethtool -S for drops of the interface";
        causes.push(Cause { about: "packets".to_owned(), ..cause(SLOW, says, remedy) });
    }
    let forged = sum(page, "forged");
    if forged > 0 {
        let says = format!(
            "{forged} packets had a wrong tag: of a process with another job key, of an earlier job, or damaged"
        );
        causes.push(cause(
            SHORT,
            says,
            "the same FI_UDRV_JOB_KEY or ~/.config/udrv/key for all processes of the job",
        ));
    }
    causes
}

fn of_messages(page: &Value) -> Option<Cause> {
    let held = sum(page, "unexpected_bytes");
    (held >= UNEXPECTED_MIN).then(|| {
        let says = format!("{held} bytes of messages have arrived that no receive is posted for");
        cause(SHORT, says, "the application receives late: post receives earlier")
    })
}

/// Messages that waited, and a process that did not poll, while it was watched.
fn of_times(before: &Value, page: &Value) -> Vec<Cause> {
    let more = |name: &str, class: usize| {
        page::times(page, name, class).saturating_sub(page::times(before, name, class))
    };
    // Before it was watched, everything may have been different.
    if before.is_null() {
        return Vec::new();
    }
    let many = |name: &str| {
        let (slow, all) = (more(name, page::FROM_1_MS), more(name, 0));
        (slow >= WAITS_MIN && 100 * slow >= WAITS_PERCENT * all).then_some((slow, all))
    };
    let mut causes = Vec::new();
    if let Some((slow, all)) = many("late_receivers") {
        let says = format!("{slow} of {all} long messages waited 1 ms or more for their receivers");
        let remedy = "the receivers post their receives late, or compute: udrv why there";
        causes.push(Cause { about: "late receivers".to_owned(), ..cause(SHORT + 1, says, remedy) });
    }
    if let Some((slow, all)) = many("early_senders") {
        let says = format!(
            "{slow} of {all} messages that came before their receive waited 1 ms or more for it"
        );
        let remedy = "the application receives late: post receives earlier";
        causes.push(Cause { about: "early senders".to_owned(), ..cause(SHORT + 1, says, remedy) });
    }
    let gaps = more("progress_gaps", page::FROM_64_MS);
    if gaps >= WAITS_MIN {
        let says = format!("{gaps} times 64 ms or more passed between two polls");
        let remedy = "peers wait for its answers meanwhile: call MPI_Test while it computes, or ask for FI_PROGRESS_AUTO";
        causes.push(Cause { about: "gaps".to_owned(), ..cause(HINT, says, remedy) });
    }
    causes
}

/// Whether the process has polled, and moved something, while it was watched.
fn of_progress(before: &Value, page: &Value, pages: &[Value]) -> Option<Cause> {
    let endpoints = |page: &Value| page["endpoints"].as_array().cloned().unwrap_or_default();
    let (before, after) = (endpoints(before), endpoints(page));
    // What was opened or closed meanwhile is at work.
    let is_same = |(old, new): (&Value, &Value)| old["address"] == new["address"];
    if before.is_empty() || before.len() != after.len() || !before.iter().zip(&after).all(is_same) {
        return None;
    }
    let all = |is_so: fn(&Value, &Value) -> bool| {
        before.iter().zip(&after).all(|(old, new)| is_so(old, new))
    };
    if all(|old, new| old["polls"] == new["polls"] && old["sleeps"] == new["sleeps"]) {
        return Some(of_standing(page, all(|_, new| new["asleep"] == 1), pages));
    }
    let says = "polls, and no message came or went while it was watched";
    all(is_idle).then(|| waiting(page, says, pages))
}

/// A process waits; for a message of whom, as far as its receives say.
fn waiting(page: &Value, says: &str, pages: &[Value]) -> Cause {
    let mut peers = rows(&page["endpoints"]).filter_map(|e| e["receive_waits_for"].as_str());
    match peers.find(|peer| !peer.is_empty()) {
        Some(peer) => {
            let says = format!("{says}: a receive waits for {}", page::owner(peer, pages));
            cause(STANDS - 2, says, "udrv why there: does that process poll?")
        }
        None => {
            let remedy = "look at the processes that do not poll, on all nodes of the job";
            cause(STANDS - 2, says, remedy)
        }
    }
}

/// Nothing polls.
fn of_standing(page: &Value, asleep: bool, pages: &[Value]) -> Cause {
    let stopped = matches!(page["process_state"].as_str(), Some("T" | "t"));
    if stopped {
        let says = "is stopped by a signal or a debugger";
        return cause(STANDS, says, "kill -CONT PID, or let the debugger go on");
    }
    if asleep {
        let says = "has not polled while it was watched, and the next message will wake it";
        return waiting(page, says, pages);
    }
    let says = "has not polled while it was watched: it computes, or waits in something else";
    cause(STANDS - 1, says, "its stack: gdb -p PID, or cat /proc/PID/stack")
}

/// An endpoint polls, and nothing else of it changes.
fn is_idle(old: &Value, new: &Value) -> bool {
    const CLOCKS: [&str; 7] = [
        "polls",
        "empty_polls",
        "sleeps",
        "asleep",
        "progress_gaps",
        "renewed_ms_ago",
        "send_waits_ms",
    ];
    let fields = new.as_object().into_iter().flatten();
    page::polled_in_vain(old, new)
        && fields
            .filter(|(name, _)| !CLOCKS.contains(&name.as_str()))
            .all(|(name, value)| old[name] == *value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn endpoint(fields: &Value) -> Value {
        json!({ "pid": 1, "endpoints": [fields], "peers": [] })
    }

    #[test]
    fn losses_are_named() {
        let page = endpoint(&json!({ "packets_sent": 1000, "retransmitted": 300 }));
        let causes = causes_of(&Value::Null, &page, &[]);
        assert!(causes[0].says.starts_with("300 of 1000 packets were sent again"), "{causes:?}");
        let good = endpoint(&json!({ "packets_sent": 1000, "retransmitted": 3 }));
        assert_eq!(causes_of(&Value::Null, &good, &[]), []);
    }

    #[test]
    fn waits_of_the_time_that_it_was_watched_are_named() {
        let of = |slow: u64, fast: u64| {
            let times = json!([fast, 0, 0, 0, 0, 0, slow]);
            endpoint(
                &json!({ "late_receivers": times, "early_senders": times, "progress_gaps": [0, 0, 0, 0, 0, 0, 0, 0, 0, slow] }),
            )
        };
        let said = |before: &Value, after: &Value| -> Vec<String> {
            of_times(before, after).into_iter().map(|cause| cause.says).collect()
        };
        let all = said(&of(5, 100), &of(9, 104));
        assert_eq!(all[0], "4 of 8 long messages waited 1 ms or more for their receivers");
        assert_eq!(
            all[1],
            "4 of 8 messages that came before their receive waited 1 ms or more for it"
        );
        assert_eq!(all[2], "4 times 64 ms or more passed between two polls");
        assert_eq!(
            said(&of(5, 0), &of(8, 100)),
            ["3 times 64 ms or more passed between two polls"]
        );
        assert!(said(&Value::Null, &of(9, 9)).is_empty() && said(&of(9, 9), &of(9, 99)).is_empty());
    }

    /// What is said of an endpoint with these fields, watched while it changed to the others; the worst of it.
    fn worst(before: &Value, after: &Value) -> String {
        let (mut before, mut after) = (endpoint(before), endpoint(after));
        after["process_state"] = before["process_state"].take();
        let causes = causes_of(&before, &after, &[]);
        causes.into_iter().max().map_or(String::new(), |cause| cause.says)
    }

    #[test]
    fn a_process_that_does_not_poll_is_named() {
        let stands = json!({ "address": "a", "polls": 5, "sleeps": 0, "forged": 2 });
        assert!(worst(&stands, &stands).contains("it computes, or waits"));
        let asleep = json!({ "address": "a", "polls": 5, "sleeps": 1, "asleep": 1 });
        assert!(worst(&asleep, &asleep).contains("the next message will wake it"));
        let awaits = json!({ "address": "a", "polls": 5, "asleep": 1, "receive_waits_for": "b" });
        assert!(worst(&awaits, &awaits).ends_with("a receive waits for b, not of this node"));
        let sleeps_again = json!({ "address": "a", "polls": 5, "sleeps": 2, "asleep": 1 });
        assert!(!worst(&asleep, &sleeps_again).contains("not polled"));
        let stopped = json!({ "pid": 1, "process_state": "T", "endpoints": [asleep], "peers": [] });
        assert!(causes_of(&stopped, &stopped, &[])[0].says.starts_with("is stopped"));
    }

    #[test]
    fn a_process_is_idle_only_if_nothing_came_or_went() {
        let before =
            json!({ "address": "a", "polls": 5, "empty_polls": 3, "sleeps": 0, "eager_sent": 3 });
        let with = |polls: u64, empty: u64, sent: u64| json!({ "address": "a", "polls": polls, "empty_polls": empty, "sleeps": 0, "eager_sent": sent });
        assert!(worst(&before, &with(9, 7, 3)).starts_with("polls, and no message"));
        assert_eq!(worst(&before, &with(9, 3, 3)), "", "one has come");
        assert_eq!(worst(&before, &with(9, 7, 4)), "", "one has gone");
        let wrapped = json!({ "address": "a", "polls": u32::MAX, "sleeps": 0, "eager_sent": 3 });
        assert!(worst(&wrapped, &with(9, 10, 3)).starts_with("polls, and no message"));
        let other =
            json!({ "address": "b", "polls": 9, "empty_polls": 9, "sleeps": 0, "eager_sent": 3 });
        assert_eq!(worst(&before, &other), "", "another endpoint");
    }

    #[test]
    fn late_receives_and_other_keys_are_named() {
        let said = |fields: &Value| -> Vec<String> {
            causes_of(&Value::Null, &endpoint(fields), &[])
                .into_iter()
                .map(|cause| cause.says)
                .collect()
        };
        let late = said(&json!({ "unexpected_bytes": 1 << 20 }));
        assert!(late[0].starts_with("1048576 bytes of messages have arrived"), "{late:?}");
        assert!(said(&json!({ "unexpected_bytes": 1 << 19 })).is_empty());
        assert!(said(&json!({ "forged": 1 }))[0].contains("another job key"));
    }

    #[test]
    fn a_slow_transport_is_named_with_its_reason() {
        let peer = json!({ "transport": "network", "reason": "the peer is on this host, but shared memory is off (FI_UDRV_SHM=0)" });
        let page = json!({ "pid": 1, "endpoints": [], "peers": [peer, peer] });
        let causes = causes_of(&Value::Null, &page, &[]);
        assert!(
            causes[0].says.starts_with("2 peers are reached by network: the peer is on this host"),
            "{causes:?}"
        );
        assert_eq!(causes[0].weight, SLOW);
        let one = json!({ "pid": 2, "endpoints": [], "peers": [peer] });
        let cause = &causes_of(&Value::Null, &one, &[])[0];
        assert!(cause.says.starts_with("1 peer is reached by network: "), "{cause:?}");
        assert_eq!(cause.about, causes[0].about, "one sentence, however many peers each has");
        let more = json!({ "pid": 1, "not_shown": 1, "endpoints": [], "peers": [peer] });
        assert!(
            causes_of(&Value::Null, &more, &[])[0].says.starts_with("1 or more peers are reached")
        );
    }

    #[test]
    fn a_peer_that_is_waited_for_is_named() {
        let other = json!({ "pid": 7, "rank": 4, "host": "n", "endpoints": [{ "address": "b" }] });
        let all = [other];
        let waits = json!({ "address": "a", "send_waits_ms": 900, "send_waits_for": "b", "sends_pending": 2 });
        let said = causes_of(&Value::Null, &endpoint(&waits), &all);
        let wanted = "a send waits for rank 4 (n, process 7) for 900 ms, and 2 are pending in all";
        assert_eq!(said[0].says, wanted);
        let contact = |reports: u64, address: &str| {
            let peer = json!({ "address": address, "endpoint": 0, "unanswered": reports });
            json!({ "pid": 1, "endpoints": [], "peers": [peer] })
        };
        let said = |before, after| -> Vec<String> {
            causes_of(&before, &after, &all).into_iter().map(|cause| cause.says).collect()
        };
        let wanted = "waits for the first answer of rank 4 (n, process 7)";
        assert_eq!(said(contact(1, "b"), contact(2, "b")), [wanted]);
        assert_eq!(
            said(contact(1, "c"), contact(9, "c")),
            ["waits for the first answer of c, not of this node"]
        );
        assert_eq!(said(contact(2, "b"), contact(2, "b")).len(), 0, "it was not looked at again");
        assert_eq!(said(contact(3, "b"), contact(0, "b")).len(), 0, "it has answered");
    }

    #[test]
    fn warnings_of_one_cause_are_one_finding() {
        let with = |text: &str, times: u64| {
            let warning = json!({ "cause": 5, "level": 1, "times": times, "text": text });
            let page = json!({ "pid": 1, "endpoints": [], "peers": [], "warnings": [warning] });
            causes_of(&Value::Null, &page, &[]).remove(0)
        };
        let (one, other) = (with("no RDMA at a", 1), with("no RDMA at b", 3));
        assert_eq!((&one.about, one.weight), (&other.about, other.weight));
        assert_eq!(
            (one.says.as_str(), other.says.as_str()),
            ("no RDMA at a", "no RDMA at b (3 times)")
        );
    }

    #[test]
    fn many_names_are_shortened() {
        let names: Vec<String> = (0..9).map(|n| format!("rank {n}")).collect();
        assert_eq!(together(&names), "rank 0, rank 1, rank 2, rank 3 and 5 more");
    }

    #[test]
    fn many_ranks_are_ranges() {
        let page = |rank: u64, host: &str| json!({ "pid": 70 + rank, "rank": rank, "host": host });
        let said = |pages: &[Value]| processes(&pages.iter().collect::<Vec<_>>());
        let few = [page(0, "n"), page(1, "n")];
        assert_eq!(said(&few), "rank 0 (n, process 70), rank 1 (n, process 71)");
        let mut many: Vec<Value> = [14, 12, 13, 2, 15].map(|rank| page(rank, "n")).into();
        assert_eq!(said(&many), "ranks 2, 12-15 (n)");
        many.push(page(16, "m"));
        assert_eq!(said(&many), "ranks 16 (m), ranks 2, 12-15 (n)");
        many.push(json!({ "pid": 9, "host": "n" }));
        assert_eq!(
            said(&many),
            "rank 14 (n, process 84), rank 12 (n, process 82), rank 13 (n, process 83), rank 2 (n, process 72) and 3 more"
        );
    }
}
