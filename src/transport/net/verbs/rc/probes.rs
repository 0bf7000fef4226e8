//! Requests for connections that wait until it is known whether the network reaches the peer's port.
//!
//! To connect a RoCE queue pair the kernel asks the network for the peer's Ethernet address, and waits up to a second for
//! an answer (`ib_resolve_eth_dmac`). On a device with UD queue pairs a thread has made a handle for path challenges
//! before, and the kernel knows the answer. On others a thread connects a queue pair first that is never used. Meanwhile
//! the peer's message waits.

use crate::sys::Errno;
use crate::sys::numbers::NumberMap;
use crate::transport::PeerId;
use crate::transport::net::agreement::message::{End, Message};
use crate::transport::net::agreement::pause::Failures;
use crate::transport::net::verbs::aside::{Aside, Crew, Leaving};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;

/// How long it counts that a port is reached, nanoseconds: the kernel keeps what it knows at least that long.
const KNOWN_NS: u64 = 10_000_000_000;
/// How long it counts that a port is not reached, the first time, nanoseconds. Twice as long after each further answer of
/// the same: a cable is plugged in again within seconds, or not for long.
const UNREACHABLE_NS: u64 = 1_000_000_000;
/// Most ports that are remembered.
const PORTS_MAX: usize = 4096;

/// The last answer of a port, and its failures.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// Until when the answer holds, nanoseconds, and whether it can be reached. `None`: it is being asked for.
    answer: Option<(u64, bool)>,
    /// The answers in a row that it cannot.
    failures: Failures,
}

/// The answers of the ports of peers, by GID, and the messages that wait for one.
pub(super) struct Probes {
    aside: Aside<End, bool>,
    known: HashMap<[u8; 16], Known>,
    waiting: NumberMap<PeerId, Message>,
}

/// The probes of the device, if it needs them, and the threads of those of earlier devices.
#[derive(Default)]
pub(super) struct Probing {
    pub(super) now: Option<Probes>,
    pub(super) earlier: Leaving,
}

impl Probes {
    /// `probe` says whether a port can be reached, and may take long. Errors: those of [`Aside::start`].
    pub(super) fn start(
        probe: impl Fn(&End) -> bool + Send + Sync + 'static,
    ) -> Result<Self, Errno> {
        let aside = Aside::start(probe)?;
        Ok(Self { aside, known: HashMap::new(), waiting: NumberMap::default() })
    }

    /// Readable when an answer has come, until [`settled`](Self::settled).
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.aside.fd()
    }

    /// An answer will come, or has.
    pub(super) fn is_asking(&self) -> bool {
        self.aside.is_under_way()
    }

    /// Keeps `message` if the port of its sender is not known. It replaces one that waits, as its sender has at most one
    /// connection: what it asked for before, or agreed to, is void. Handled later, that would end the new one, and the
    /// sender would not hear of it. Only OVER can be about an older connection.
    pub(super) fn hold(&mut self, peer: PeerId, message: &Message, now: u64) -> bool {
        let is_void = |waiting: &Message| match (waiting, message) {
            (Message::Ask(id, _) | Message::Ready(id, _), Message::Over { connection, .. }) => {
                connection == id
            }
            _ => true,
        };
        if self.waiting.get(&peer).is_some_and(is_void) {
            self.waiting.remove(&peer);
        }
        let (Message::Ask(_, end) | Message::Ready(_, end)) = message else { return false };
        let waits = self.reaches(end, now).is_none();
        if waits {
            self.waiting.insert(peer, *message);
        }
        waits
    }

    /// The port of `end` is known not to be reached.
    pub(super) fn refuses(&self, end: &End, now: u64) -> bool {
        self.known(end, now) == Some(Some(false))
    }

    /// Takes the answers that have come. Returns the messages that need not wait any more.
    pub(super) fn settled(&mut self, now: u64) -> Vec<(PeerId, Message)> {
        if !self.aside.silence() {
            return Vec::new();
        }
        while let Some((end, reaches)) = self.aside.answer() {
            let known = self.known.entry(end.gid).or_default();
            let until = if reaches {
                known.failures = Failures::default();
                now + KNOWN_NS
            } else {
                known.failures.again(now, UNREACHABLE_NS);
                known.failures.until
            };
            known.answer = Some((until, reaches));
        }
        let waiting: Vec<_> = self.waiting.drain().collect();
        waiting.into_iter().filter(|(peer, message)| !self.hold(*peer, message, now)).collect()
    }

    /// The end of an answer may be told of after it was taken: nobody waits for that.
    pub(super) fn silence(&self) {
        if !self.aside.is_under_way() {
            self.aside.silence();
        }
    }

    /// Takes what waits of `peer`. Returns the number of the connection, if it asked for one.
    pub(super) fn forget(&mut self, peer: PeerId) -> Option<u32> {
        match self.waiting.remove(&peer)? {
            Message::Ask(id, _) => Some(id),
            _ => None,
        }
    }

    /// The device has ended: nothing is asked any more.
    pub(super) fn stop(self) -> Crew {
        self.aside.stop()
    }

    /// The requests that wait, and their peers.
    pub(super) fn requests(&self) -> impl Iterator<Item = (PeerId, u32)> {
        self.waiting.iter().filter_map(|(peer, message)| match message {
            Message::Ask(id, _) => Some((*peer, *id)),
            _ => None,
        })
    }

    /// Whether the port of `end` can be reached; `Some(None)`: it is being asked for; `None`: nobody knows.
    fn known(&self, end: &End, now: u64) -> Option<Option<bool>> {
        match self.known.get(&end.gid)?.answer {
            Some((until, _)) if until <= now => None,
            Some((_, reaches)) => Some(Some(reaches)),
            None => Some(None),
        }
    }

    /// Whether the port of `end` can be reached; `None`: that is not known yet.
    fn reaches(&mut self, end: &End, now: u64) -> Option<bool> {
        if let Some(known) = self.known(end, now) {
            return known;
        }
        if !self.aside.ask(*end) {
            return Some(true); // there is no thread
        }
        if self.known.len() >= PORTS_MAX {
            self.known.retain(|_, known| known.answer.is_none());
        }
        self.known.entry(end.gid).or_default().answer = None;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::net::network::Network;
    use std::sync::Mutex;
    use std::sync::mpsc::{Sender, channel};

    fn end(byte: u8) -> End {
        let network = Network::Roce;
        End { number: 1, psn: 0, mtu: 1024, network, lid: 0, gid: [byte; 16], serves: 0 }
    }

    fn gone(connection: u32) -> Message {
        Message::Over { connection, broken: false }
    }

    /// Answers as often as the sender says: port 1 can be reached.
    fn probes() -> (Probes, Sender<()>) {
        let (go, wait) = channel();
        let wait = Mutex::new(wait);
        let probe = move |end: &End| wait.lock().unwrap().recv().is_ok() && end.gid[0] == 1;
        (Probes::start(probe).unwrap(), go)
    }

    /// Waits for an answer, and returns what need not wait any more.
    fn settled(probes: &mut Probes, now: u64) -> Vec<(PeerId, Message)> {
        crate::sys::event::wait_any([probes.fd()], -1).unwrap();
        probes.settled(now)
    }

    #[test]
    fn ports_are_asked_by_a_thread_and_remembered() {
        let (mut probes, go) = probes();
        let asks = [1, 2, 1].map(|byte| Message::Ask(byte.into(), end(byte)));
        for (peer, ask) in asks.iter().enumerate() {
            assert!(probes.hold(PeerId(peer as u32), ask, 7));
        }
        assert!(probes.is_asking() && probes.settled(7).is_empty());
        go.send(()).unwrap();
        assert_eq!(settled(&mut probes, 7).len(), 2);
        go.send(()).unwrap();
        assert_eq!(settled(&mut probes, 7).len(), 1);
        assert!(!probes.is_asking());
        assert_eq!([1, 2].map(|byte| probes.refuses(&end(byte), 7)), [false, true]);
        let mut held = |n: usize, now| probes.hold(PeerId(9), &asks[n], now);
        assert!(!held(0, 6 + KNOWN_NS) && held(0, 7 + KNOWN_NS), "asked again");
        assert!(!held(1, 6 + UNREACHABLE_NS) && held(1, 7 + UNREACHABLE_NS), "asked again");
        drop(go);
    }

    #[test]
    fn a_port_that_is_not_reached_is_asked_more_and_more_rarely() {
        let (go, wait) = channel();
        let wait = Mutex::new(wait);
        let mut probes = Probes::start(move |_| wait.lock().unwrap().recv() == Ok(true)).unwrap();
        let mut pause_after = |reaches: bool, now| {
            assert!(probes.hold(PeerId(3), &Message::Ask(1, end(2)), now));
            go.send(reaches).unwrap();
            settled(&mut probes, now);
            probes.known[&end(2).gid].answer.unwrap().0 - now
        };
        let mut now = 7;
        let pauses = [false; 8].map(|reaches| {
            let pause = pause_after(reaches, now);
            now += pause;
            pause / 1_000_000_000
        });
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30, 30]);
        now += pause_after(true, now);
        assert_eq!(pause_after(false, now), UNREACHABLE_NS, "it was reached meanwhile");
    }

    #[test]
    fn only_the_last_message_of_a_peer_waits() {
        let (mut probes, go) = probes();
        let peer = PeerId(3);
        let waits = |probes: &Probes| probes.waiting.get(&peer).copied();
        let (ask, ready) = (Message::Ask(5, end(1)), Message::Ready(4, end(1)));
        for later in [Message::Go(4), Message::Refuse(4), gone(5)] {
            assert!(probes.hold(peer, &ask, 7) && !probes.hold(peer, &later, 7));
            assert_eq!(waits(&probes), None, "{later:?}");
        }
        assert!(probes.hold(peer, &ask, 7) && !probes.hold(peer, &gone(4), 7));
        assert_eq!(waits(&probes), Some(ask));
        assert!(probes.hold(peer, &ready, 7));
        assert_eq!(waits(&probes), Some(ready));
        go.send(()).unwrap();
        assert_eq!(settled(&mut probes, 7), [(peer, ready)]);
    }

    #[test]
    fn a_message_that_need_not_wait_replaces_one_that_does() {
        let (mut probes, go) = probes();
        assert!(probes.hold(PeerId(3), &Message::Ask(9, end(2)), 7));
        let known = Known { answer: Some((100, true)), ..Known::default() };
        probes.known.insert([1; 16], known);
        assert!(!probes.hold(PeerId(3), &Message::Ready(5, end(1)), 7));
        go.send(()).unwrap();
        assert!(settled(&mut probes, 7).is_empty());
    }
}
