//! Ranks of other processes, by the addresses of their endpoints: the log and the page name them. A peer says its rank
//! when contact is made (PROTOCOL.md §2.2, §7.2); before that, and outside of a job, nothing is known.

use super::launcher::Launcher;
use super::soon;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;

/// Most ranks that are kept. Peers beyond stay without.
const KNOWN_MAX: usize = 1 << 16;

/// What the name of an endpoint in the log begins with.
const SCHEME: &str = "fi_sockaddr_in";

static KNOWN: Mutex<BTreeMap<SocketAddr, u32>> = Mutex::new(BTreeMap::new());

/// This process's rank as peers are told: one more than it, or 0 if there is none.
pub(crate) fn own() -> u32 {
    Launcher::here().rank.map_or(0, |rank| rank.saturating_add(1))
}

/// The endpoint at `address` says this of its rank, in the form of [`own`].
pub(crate) fn learn(address: &SocketAddr, said: u32) {
    let Some(mut known) = soon::lock(&KNOWN) else { return };
    match said.checked_sub(1) {
        Some(rank) if known.len() < KNOWN_MAX || known.contains_key(address) => {
            known.insert(*address, rank);
        }
        Some(_) => {}
        // Another process may have the address now.
        None => {
            known.remove(address);
        }
    }
}

/// The rank of the process that has the endpoint at `address`.
pub(crate) fn of(address: &SocketAddr) -> Option<u32> {
    soon::lock(&KNOWN)?.get(address).copied()
}

/// A line of the log, with the rank behind each address whose process has a known one.
pub(super) fn named(line: String) -> String {
    if !line.contains(SCHEME) {
        return line;
    }
    let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
    for word in &mut words {
        let Some((at, rank)) = rank_behind(word) else { continue };
        word.insert_str(at, &format!(" (rank {rank})"));
    }
    words.join(" ")
}

/// Where the address in a word ends, and its rank.
fn rank_behind(word: &str) -> Option<(usize, u32)> {
    let begin = word.find(SCHEME)?;
    let (scheme, rest) = word.get(begin..)?.split_once("://")?;
    let end = rest.find(|c: char| !c.is_ascii_hexdigit() && !"[]:.%".contains(c));
    let address = rest.get(..end.unwrap_or(rest.len()))?.trim_end_matches([':', '.']);
    let rank = of(&address.parse().ok()?)?;
    Some((begin + scheme.len() + "://".len() + address.len(), rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_ranks_that_are_known() {
        let at = |text: &str| text.parse().unwrap();
        learn(&at("192.0.2.77:5001"), 13);
        learn(&at("[2001:db8::77]:5001"), 1);
        let line = "fi_sockaddr_in://192.0.2.77:5001: no answer of fi_sockaddr_in6://[2001:db8::77]:5001, nor of \
                    fi_sockaddr_in://192.0.2.77:5002";
        let wanted = "fi_sockaddr_in://192.0.2.77:5001 (rank 12): no answer of fi_sockaddr_in6://[2001:db8::77]:5001 \
                      (rank 0), nor of fi_sockaddr_in://192.0.2.77:5002";
        assert_eq!(named(line.to_owned()), wanted);
        assert_eq!(named("nobody".to_owned()), "nobody");
    }

    #[test]
    fn an_address_that_another_process_has_now_has_no_rank() {
        let address = "192.0.2.78:5001".parse().unwrap();
        learn(&address, 4);
        assert_eq!(of(&address), Some(3));
        learn(&address, 0);
        assert_eq!(of(&address), None);
    }
}
