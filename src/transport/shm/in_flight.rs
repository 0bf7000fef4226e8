//! Descriptors in flight: in messages that their receivers have not read.
//!
//! All processes of a user together may have as many as one process may have open (unix(7), ETOOMANYREFS; root may have
//! more). Each connect request has one, and each connect reply. Where many processes meet, and wait for processors, they
//! have that many; then a sender pauses, and keeps the segment that it has made for its next request.

use super::layout::Geometry;
use crate::sys::shared_memory::SharedMemory;
use crate::sys::{Errno, clock, unix};
use std::os::fd::{BorrowedFd, OwnedFd};

/// The first pause, and the longest, nanoseconds. Each is twice the one before.
const PAUSE_NS: (u64, u64) = (1_000_000, 10_000_000);

/// Too many descriptors are in flight.
pub(super) const TOO_MANY: Errno = Errno(libc::ETOOMANYREFS);

/// A new segment.
pub(super) type Fresh = (Geometry, SharedMemory, OwnedFd);

/// The messages of one kind that this endpoint sends with a descriptor.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    /// No message before this time, nanoseconds, and the last pause.
    until: u64,
    pause_ns: u64,
    /// A segment for the next connect request.
    pub(super) segment: Option<Fresh>,
}

impl InFlight {
    /// A message would not be sent now.
    pub(super) fn pauses(&self) -> bool {
        self.until != 0 && clock::now_ns() < self.until
    }

    /// Sends one message with a descriptor. Errors: [`TOO_MANY`], also during a pause, and those of [`unix::send`].
    pub(super) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        bytes: &[u8],
        fd: BorrowedFd<'_>,
    ) -> Result<(), Errno> {
        if self.pauses() {
            return Err(TOO_MANY);
        }
        let sent = unix::send(socket, bytes, &[fd]);
        (self.until, self.pause_ns) = match sent {
            Err(TOO_MANY) => {
                let pause = (2 * self.pause_ns).clamp(PAUSE_NS.0, PAUSE_NS.1);
                (clock::now_ns().saturating_add(pause), pause)
            }
            _ => (0, 0),
        };
        sent
    }

    /// Frees the segment, unless it is about to be used.
    pub(super) fn forget(&mut self) {
        if !self.pauses() {
            self.segment = None;
        }
    }

    /// For tests: the pause is over.
    #[cfg(test)]
    pub(super) fn goes_on(&mut self) {
        self.until = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::super::door::GREETINGS_MAX;
    use super::super::fixture::Heard::Message;
    use super::super::fixture::{Deaf, Ears, End, end, hears};
    use super::*;
    use crate::sys::process::LEFT;
    use crate::sys::unix::REFUSED;
    use crate::transport::shm::config::CmaPolicy;
    use crate::transport::{Contact, Messages, Mode, PeerId};
    use std::os::fd::AsFd;

    fn refuse(on: bool) {
        REFUSED.set(on.then_some(TOO_MANY));
    }

    fn ask(from: &mut End, to: &End) -> (PeerId, Contact) {
        let peer = from.peers.intern(&to.me).unwrap();
        (peer, from.shm.link(peer, &to.me).unwrap())
    }

    #[test]
    fn a_request_is_not_made_again_at_once() {
        let (mut a, mut b) = (end(CmaPolicy::Off), end(CmaPolicy::Off));
        refuse(true);
        assert_eq!(ask(&mut a, &b).1, Contact::Later);
        assert!(b.shm.door.is_called() && a.shm.door.requests.segment.is_some());
        b.turn(&mut Deaf);
        let pause = a.shm.door.requests.pause_ns;
        a.shm.door.requests.until = u64::MAX;
        assert_eq!(ask(&mut a, &b).1, Contact::Later);
        assert!(!b.shm.door.is_called(), "nothing is tried during the pause");
        a.shm.door.requests.goes_on();
        assert_eq!(ask(&mut a, &b).1, Contact::Later);
        assert!(a.shm.door.requests.pause_ns >= 2 * pause, "longer and longer");
        b.turn(&mut Deaf);
        refuse(false);
        a.shm.door.requests.goes_on();
        let (peer, made) = ask(&mut a, &b);
        assert_eq!(made, Contact::Linked);
        assert!(a.shm.door.requests.segment.is_none() && a.shm.door.requests.pause_ns == 0);
        a.shm.send(peer, Mode::Short, b"header", 8, |_, _| ()).unwrap();
        assert_eq!(hears(&mut b), [Message(8)]);
    }

    #[test]
    fn a_segment_is_made_before_the_connection_and_kept_for_the_next() {
        let (mut a, b) = (end(CmaPolicy::Off), end(CmaPolicy::Off));
        let gone = end(CmaPolicy::Off).me;
        let peer = a.peers.intern(&gone).unwrap();
        assert!(matches!(a.shm.link(peer, &gone), Ok(Contact::Missing(_))));
        assert!(a.shm.door.requests.segment.is_some());
        assert_eq!(ask(&mut a, &b).1, Contact::Linked);
        assert!(a.shm.door.requests.segment.is_none());
        assert!(matches!(a.shm.link(peer, &gone), Ok(Contact::Missing(_))));
        a.turn(&mut Deaf);
        assert!(a.shm.door.requests.segment.is_none(), "not for long");
    }

    /// All descriptors but one are taken: no other test may run in this process.
    #[test]
    #[ignore = "run by a_peer_that_has_ended_is_found_with_one_descriptor"]
    fn a_peer_that_has_ended_is_found_with_one_descriptor_alone() {
        let mut a = end(CmaPolicy::Off);
        let gone = end(CmaPolicy::Off).me;
        let peer = a.peers.intern(&gone).unwrap();
        let mut taken: Vec<_> =
            std::iter::from_fn(|| std::io::stdin().as_fd().try_clone_to_owned().ok()).collect();
        assert!(taken.pop().is_some());
        assert!(matches!(a.shm.link(peer, &gone), Ok(Contact::Missing(_))));
        taken.clear();
        assert!(matches!(a.shm.link(peer, &gone), Ok(Contact::Missing(_))));
    }

    #[test]
    fn a_peer_that_has_ended_is_found_with_one_descriptor() {
        crate::alone::run(
            concat!(module_path!(), "::a_peer_that_has_ended_is_found_with_one_descriptor_alone"),
            "ulimit -n 200",
        );
    }

    #[test]
    fn where_descriptors_are_scarce_some_requests_wait_for_answers() {
        let mut here = end(CmaPolicy::Off);
        let others: Vec<End> = (0..9).map(|_| end(CmaPolicy::Off)).collect();
        LEFT.set(Some(24));
        let made = |here: &mut End, to: &[End]| {
            to.iter().map(|other| ask(here, other).1).collect::<Vec<_>>()
        };
        assert_eq!(made(&mut here, &others[..7]), [Contact::Linked; 7]);
        // Not those that were made long ago count.
        here.shm.outbound.iter_mut().flatten().for_each(|link| link.since = clock::now_ns());
        assert_eq!(made(&mut here, &others[7..]), [Contact::Later; 2]);
        assert!(!others[8].shm.door.is_called(), "nor is a connection made");
        LEFT.set(Some(0));
        let mut last = end(CmaPolicy::Off);
        assert_eq!(
            made(&mut last, &others[7..]),
            [Contact::Linked, Contact::Later],
            "one at least"
        );
        LEFT.set(None);
    }

    #[test]
    fn replies_that_wait_give_way_to_more_callers() {
        let mut b = end(CmaPolicy::Off);
        let mut others: Vec<End> = (0..=GREETINGS_MAX).map(|_| end(CmaPolicy::Off)).collect();
        for other in &mut others {
            let peer = other.connect(&b);
            other.shm.send(peer, Mode::Short, b"header", 8, |_, _| ()).unwrap();
        }
        let mut ears = Ears::default();
        refuse(true);
        (0..20).for_each(|_| b.turn(&mut ears));
        assert!(!b.shm.inbound.is_empty(), "one has no place to wait");
        refuse(false);
        b.shm.door.answers.goes_on();
        (0..20).for_each(|_| b.turn(&mut ears));
        let heard = ears.0.iter().filter(|heard| **heard == Message(8)).count();
        assert_eq!(heard, others.len());
        for other in &mut others {
            other.turn(&mut Deaf);
            assert!(other.shm.returned.is_empty(), "nothing is taken back");
        }
    }

    #[test]
    fn a_reply_waits_for_its_descriptor() {
        let (mut a, mut b) = (end(CmaPolicy::Off), end(CmaPolicy::Off));
        let peer = a.connect(&b);
        refuse(true);
        b.turn(&mut Deaf);
        assert!(b.shm.inbound.is_empty(), "it is answered later");
        refuse(false);
        b.shm.door.answers.goes_on();
        b.turn(&mut Deaf);
        a.turn(&mut Deaf);
        assert!(a.shm.out(peer).unwrap().hint.is_some());
        assert!(b.shm.inbound.iter().all(|link| link.consumer.is_hinted()));
        assert_eq!(b.shm.inbound.len(), 1);
    }

    #[test]
    fn a_reply_that_cannot_have_it_for_long_goes_without() {
        let (mut a, mut b) = (end(CmaPolicy::Off), end(CmaPolicy::Off));
        let peer = a.connect(&b);
        refuse(true);
        let begun = std::time::Instant::now();
        while b.shm.inbound.is_empty() && begun.elapsed().as_secs() < 20 {
            b.turn(&mut Deaf);
        }
        refuse(false);
        a.turn(&mut Deaf);
        let link = a.shm.out(peer).unwrap();
        assert!(link.nonce.is_some() && link.hint.is_none());
    }
}
