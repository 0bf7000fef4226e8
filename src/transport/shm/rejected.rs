//! Links that their peers have refused for a lasting reason (`refusals`): their messages are counted as lost, and that is
//! logged.

use super::handshake::{Answer, read_answer};
use super::hello::{Reject, RejectReason};
use super::outbound::Outbound;
use super::ring::{Consumer, Popped};
use super::state::Shm;
use crate::telemetry::log;
use crate::transport::PeerId;
use std::fmt;

impl Shm {
    /// The last link to `peer` was refused: the next one takes messages only after the peer has accepted it.
    pub(super) fn has_refused(&self, peer: PeerId) -> bool {
        self.refusals.of(peer).is_some()
    }

    /// This endpoint closes: logs the refusals that no later call would read.
    pub(super) fn read_last_answers(&mut self) {
        for link in self.outbound.iter_mut().flatten().filter(|link| link.nonce.is_none()) {
            match read_answer(link, &self.epoll) {
                // The receiver reads the messages in the ring.
                Answer::Rejected(reject) if reject.reason == RejectReason::Resources => {}
                Answer::Rejected(reject) => {
                    say(
                        format_args!("a peer of this node (process {})", link.pid),
                        &reject,
                        lost(link),
                    );
                }
                Answer::None | Answer::Welcome(_) | Answer::Closed => {}
            }
        }
    }
}

/// Messages in the ring of a refused link: they count as sent. 0 if the peer had first accepted the link, because
/// then it is unknown how many it has read.
pub(super) fn lost(link: &Outbound) -> usize {
    if link.nonce.is_some() {
        return 0;
    }
    let producer = &link.producer;
    let mut consumer = Consumer::new(producer.memory().clone(), producer.geometry());
    let mut count = 0;
    while let Popped::Message | Popped::Handed(_) = consumer.pop(|_, _| count += 1) {}
    count
}

/// Logs that `peer` has refused a link with so many messages in it.
pub(super) fn say(peer: fmt::Arguments<'_>, reject: &Reject, lost: usize) {
    let reason = reject.reason;
    if lost == 0 {
        log::limited!(cause: reason, "{peer} refused our shared-memory link: {reject}");
    } else {
        log::limited!(
            cause: reason,
            "{peer} refused our shared-memory link: {reject}; {lost} messages sent before its answer are lost"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::Contact;
    use super::super::fixture::{End, end};
    use super::*;
    use crate::sys::Errno;
    use crate::transport::shm::config::CmaPolicy;
    use crate::transport::{Address, Departure, Handler, SendError};
    use crate::transport::{Messages, Mode, Transport};

    #[derive(Default)]
    struct Ears {
        messages: usize,
        left: Vec<Departure>,
    }

    impl Handler for Ears {
        fn on_peer(&mut self, _: PeerId, _: &Address) {}
        fn on_message(&mut self, _: PeerId, _: &[u8], _: &[u8]) {
            self.messages += 1;
        }
        fn on_departure(&mut self, _: PeerId, departure: Departure) {
            self.left.push(departure);
        }
        fn is_owed(&self, _: PeerId) -> bool {
            false
        }
    }

    fn hears(end: &mut End) -> Ears {
        let mut ears = Ears::default();
        for _ in 0..10 {
            end.turn(&mut ears);
        }
        ears
    }

    fn contact(from: &mut End, to: &End) -> (PeerId, Result<Contact, SendError>) {
        let peer = from.peers.intern(&to.me).unwrap();
        (peer, from.shm.link(peer, &to.me))
    }

    fn send(from: &mut End, peer: PeerId, count: usize) {
        for _ in 0..count {
            from.shm.send(peer, Mode::Short, b"header", 8, |_, _| ()).unwrap();
        }
    }

    const REJECTED: Errno = Errno(libc::EKEYREJECTED);

    /// `a` and `b` have different keys; `a` has sent five messages before it learned of the refusal.
    fn strangers() -> (End, End, PeerId) {
        let (mut a, mut b) = (end(CmaPolicy::Auto), end(CmaPolicy::Auto));
        a.shm.settings.mark = 1;
        b.shm.settings.mark = 2;
        let (peer, made) = contact(&mut a, &b);
        assert_eq!(made, Ok(Contact::Linked));
        assert!(!a.shm.has_refused(peer), "a peer that has refused nothing is sent to at once");
        send(&mut a, peer, 5);
        assert_eq!(lost(a.shm.out(peer).unwrap()), 5);
        assert_eq!(hears(&mut b).messages, 0);
        assert_eq!(hears(&mut a).left, [Departure::Failed(REJECTED)]);
        assert!(a.shm.has_refused(peer) && !a.shm.is_connected(peer));
        (a, b, peer)
    }

    fn a_second_later(end: &mut End) {
        end.shm.refusals.0.iter_mut().for_each(|refusal| refusal.until = 0);
    }

    #[test]
    fn a_peer_that_has_refused_is_left_alone_for_a_while() {
        let (mut a, b, peer) = strangers();
        for _ in 0..100 {
            assert_eq!(contact(&mut a, &b).1, Ok(Contact::Refused(REJECTED)));
        }
        assert!(!a.shm.is_connected(peer));
    }

    #[test]
    fn afterwards_it_is_asked_again_and_again() {
        let (mut a, mut b, peer) = strangers();
        for _ in 0..3 {
            a_second_later(&mut a);
            assert_eq!(contact(&mut a, &b).1, Ok(Contact::Linked));
            assert!(a.shm.has_refused(peer) && a.shm.is_settling(peer));
            hears(&mut b);
            assert_eq!(hears(&mut a).left, [Departure::Failed(REJECTED)]);
            assert_eq!(contact(&mut a, &b).1, Ok(Contact::Refused(REJECTED)));
        }
        b.shm.settings.mark = 1;
        a_second_later(&mut a);
        assert_eq!(contact(&mut a, &b).1, Ok(Contact::Linked));
        hears(&mut b);
        assert_eq!(hears(&mut a).left, []);
        assert!(!a.shm.has_refused(peer) && !a.shm.is_settling(peer));
        send(&mut a, peer, 3);
        assert_eq!(hears(&mut b).messages, 3);
    }

    #[test]
    fn a_link_from_a_peer_that_had_refused_ends_that() {
        let (mut a, mut b, peer) = strangers();
        b.shm.settings.mark = 1;
        let (back, made) = contact(&mut b, &a);
        assert_eq!(made, Ok(Contact::Linked));
        send(&mut b, back, 1);
        assert_eq!(hears(&mut a).messages, 1);
        assert!(!a.shm.has_refused(peer));
        assert_eq!(contact(&mut a, &b).1, Ok(Contact::Linked));
    }
}
