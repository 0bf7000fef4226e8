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
    /// What is the case; the same for all processes that it is true of.
    says: String,
    remedy: &'static str,
}

/// Weights: the process does not go on; data goes a slow way; resources are short; a hint.
const STANDS: u64 = 1000;
const SLOW: u64 = 100;
const SHORT: u64 = 10;
const HINT: u64 = 1;

/// Share of retransmitted packets that is worth a word, in percent.
const LOSS_PERCENT: u64 = 1;
/// Bytes of unexpected messages that are worth a word.
const UNEXPECTED_MIN: u64 = 1 << 20;

impl Why {
    pub(crate) fn run(self) -> Outcome {
        let before = page::all(&self.pid)?;
        std::thread::sleep(Duration::from_millis(self.time_ms));
        let after = page::all(&self.pid)?;
        let mut causes: BTreeMap<Cause, Vec<String>> = BTreeMap::new();
        for page in &after {
            let earlier = before.iter().find(|earlier| earlier["pid"] == page["pid"]);
            for cause in causes_of(earlier.unwrap_or(&Value::Null), page) {
                causes.entry(cause).or_default().push(page::name(page));
            }
        }
        if causes.is_empty() {
            println!("{} processes: nothing that udrv can see slows them down", after.len());
        }
        for (cause, who) in causes.into_iter().rev() {
            println!("{}: {}", together(&who), cause.says);
            println!("    -> {}", cause.remedy);
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The names of some processes, shortened.
fn together(who: &[String]) -> String {
    const MOST: usize = 4;
    let named = who.iter().take(MOST).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = who.len().saturating_sub(MOST);
    if more > 0 { format!("{named} and {more} more") } else { named }
}

fn causes_of(before: &Value, page: &Value) -> Vec<Cause> {
    let mut causes = of_peers(page);
    causes.extend(of_packets(page));
    causes.extend(of_messages(page));
    causes.extend(of_progress(before, page));
    causes
}

fn cause(weight: u64, says: impl Into<String>, remedy: &'static str) -> Cause {
    Cause { weight, says: says.into(), remedy }
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
        let says = format!("{count} peers{least} are reached by {by}: {reason}");
        if same_host {
            cause(
                SLOW,
                says,
                "FI_UDRV_SHM=1 for all processes of the job; FI_UDRV_LOG=info says what failed",
            )
        } else {
            cause(HINT, says, "udrv doctor: devices, memlock, permission for /dev/infiniband")
        }
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
        causes.push(cause(SLOW, says, "sysctl net.core.rmem_max=8388608 on the receivers; ethtool -S for drops of the interface"));
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

/// Whether the process has polled, and moved something, while it was watched.
fn of_progress(before: &Value, page: &Value) -> Option<Cause> {
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
        return Some(of_standing(page, all(|_, new| new["asleep"] == 1)));
    }
    all(is_idle).then(|| {
        let says = "polls, and no message came or went while it was watched";
        cause(STANDS - 2, says, "look at the processes that do not poll, on all nodes of the job")
    })
}

/// Nothing polls.
fn of_standing(page: &Value, asleep: bool) -> Cause {
    let stopped = matches!(page["process_state"].as_str(), Some("T" | "t"));
    if stopped {
        let says = "is stopped by a signal or a debugger";
        return cause(STANDS, says, "kill -CONT PID, or let the debugger go on");
    }
    if asleep {
        let says = "has not polled while it was watched: the next message will wake it";
        return cause(
            STANDS - 2,
            says,
            "look at the processes that do not poll, on all nodes of the job",
        );
    }
    let says = "has not polled while it was watched: it computes, or waits in something else";
    cause(STANDS - 1, says, "its stack: gdb -p PID, or cat /proc/PID/stack")
}

/// An endpoint polls, and nothing else of it changes.
fn is_idle(old: &Value, new: &Value) -> bool {
    const CLOCKS: [&str; 4] = ["polls", "empty_polls", "sleeps", "asleep"];
    let number = |of: &Value, name: &str| of[name].as_u64().unwrap_or(0);
    let fields = new.as_object().into_iter().flatten();
    // The number of polls is counted modulo 2^32.
    let polls = number(new, "polls").wrapping_sub(number(old, "polls")) & u64::from(u32::MAX);
    number(new, "empty_polls") >= polls
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
        let causes = causes_of(&Value::Null, &page);
        assert!(causes[0].says.starts_with("300 of 1000 packets were sent again"), "{causes:?}");
        let good = endpoint(&json!({ "packets_sent": 1000, "retransmitted": 3 }));
        assert_eq!(causes_of(&Value::Null, &good), []);
    }

    /// What is said of an endpoint with these fields, watched while it changed to the others; the worst of it.
    fn worst(before: &Value, after: &Value) -> String {
        let (mut before, mut after) = (endpoint(before), endpoint(after));
        after["process_state"] = before["process_state"].take();
        let causes = causes_of(&before, &after);
        causes.into_iter().max().map_or(String::new(), |cause| cause.says)
    }

    #[test]
    fn who_does_not_poll_is_named() {
        let stands = json!({ "address": "a", "polls": 5, "sleeps": 0, "forged": 2 });
        assert!(worst(&stands, &stands).contains("it computes, or waits"));
        let asleep = json!({ "address": "a", "polls": 5, "sleeps": 1, "asleep": 1 });
        assert!(worst(&asleep, &asleep).contains("the next message will wake it"));
        let sleeps_again = json!({ "address": "a", "polls": 5, "sleeps": 2, "asleep": 1 });
        assert!(!worst(&asleep, &sleeps_again).contains("not polled"));
        let stopped = json!({ "pid": 1, "process_state": "T", "endpoints": [asleep], "peers": [] });
        assert!(causes_of(&stopped, &stopped)[0].says.starts_with("is stopped"));
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
            causes_of(&Value::Null, &endpoint(fields)).into_iter().map(|cause| cause.says).collect()
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
        let causes = causes_of(&Value::Null, &page);
        assert!(
            causes[0].says.starts_with("2 peers are reached by network: the peer is on this host"),
            "{causes:?}"
        );
        assert_eq!(causes[0].weight, SLOW);
        let more = json!({ "pid": 1, "not_shown": 1, "endpoints": [], "peers": [peer] });
        assert!(causes_of(&Value::Null, &more)[0].says.starts_with("1 peers or more are reached"));
    }

    #[test]
    fn many_names_are_shortened() {
        let names: Vec<String> = (0..9).map(|n| format!("rank {n}")).collect();
        assert_eq!(together(&names), "rank 0, rank 1, rank 2, rank 3 and 5 more");
    }
}
