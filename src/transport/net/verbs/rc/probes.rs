//! Whether a peer's port can be connected to, where no datagrams have shown it.
//!
//! To connect a RoCE queue pair the kernel asks the network for the peer's Ethernet address, and waits up to a second for
//! an answer (`ib_resolve_eth_dmac`). On a device with UD queue pairs a handle for path challenges was made before, by a
//! thread, and the kernel knows the answer. On others a thread connects another queue pair first, which is never used.

use crate::sys::Errno;
use crate::transport::net::agreement::message::End;
use crate::transport::net::verbs::aside::Aside;
use std::collections::HashMap;

/// How long an answer counts, nanoseconds: the kernel keeps what it knows at least that long.
const KNOWN_NS: u64 = 10_000_000_000;
const UNREACHABLE_NS: u64 = 30_000_000_000;
/// Most ports that are remembered.
const PORTS_MAX: usize = 4096;

/// What is known of a port: until when, nanoseconds, and whether it can be reached. `None`: the thread is at it.
type Known = Option<(u64, bool)>;

/// The ports of peers, by GID.
pub(super) struct Probes {
    aside: Aside<End, bool>,
    known: HashMap<[u8; 16], Known>,
}

impl Probes {
    /// `probe` says whether a port can be reached, and may take long. Errors: those of a new thread.
    pub(super) fn start(probe: impl FnMut(&End) -> bool + Send + 'static) -> Result<Self, Errno> {
        Ok(Self { aside: Aside::start(probe)?, known: HashMap::new() })
    }

    /// Whether the port of `end` can be reached; `None`: that is not known yet.
    pub(super) fn reaches(&mut self, end: &End, now: u64) -> Option<bool> {
        while let Some((end, reaches)) = self.aside.answer() {
            let lasts = if reaches { KNOWN_NS } else { UNREACHABLE_NS };
            self.known.insert(end.gid, Some((now + lasts, reaches)));
        }
        match self.known.get(&end.gid) {
            Some(Some((until, reaches))) if now < *until => return Some(*reaches),
            Some(None) => return None,
            _ => {}
        }
        if !self.aside.ask(*end) {
            return Some(true); // there is no thread
        }
        if self.known.len() >= PORTS_MAX {
            self.known.retain(|_, known| known.is_none());
        }
        self.known.insert(end.gid, None);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::net::network::Network;
    use std::sync::mpsc::channel;

    #[test]
    fn ports_are_asked_by_a_thread_and_remembered() {
        let end = |byte| End {
            number: 1,
            psn: 0,
            mtu: 1024,
            network: Network::Roce,
            lid: 0,
            gid: [byte; 16],
            serves: 0,
        };
        let (go, wait) = channel();
        let mut probes = Probes::start(move |end| wait.recv().is_ok() && end.gid[0] == 1).unwrap();
        assert_eq!([1, 2, 1].map(|byte| probes.reaches(&end(byte), 7)), [None; 3]);
        let mut later = |byte, now| loop {
            match probes.reaches(&end(byte), now) {
                Some(answer) => return answer,
                None => std::thread::yield_now(),
            }
        };
        (0..2).for_each(|_| go.send(()).unwrap());
        assert_eq!([1, 2].map(|byte| later(byte, 7)), [true, false]);
        let lasts = 7 + KNOWN_NS;
        assert_eq!([1, 2].map(|byte| probes.reaches(&end(byte), lasts)), [None, Some(false)]);
        assert_eq!(probes.reaches(&end(2), 7 + UNREACHABLE_NS), None, "asked again");
        drop(go);
    }
}
