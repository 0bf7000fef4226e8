//! Links that were refused for want of descriptors or memory (`refused`): those refused here are read or forgotten, and
//! messages in those that peers refused are taken back.

use super::departure::Ended;
use super::refused::{LOOK_NS, Refused, Segment, Unmapped};
use super::ring::{Consumer, Popped};
use super::state::Shm;
use crate::sys::{Errno, clock};
use crate::transport::{Handler, Message, PeerId, Returned};
use std::collections::VecDeque;
use std::os::fd::AsFd;

impl Shm {
    /// Looks at the links that were refused here: forgets those whose senders have taken their messages back, and reads
    /// those whose senders have ended without doing so.
    pub(super) fn look_after_refused(&mut self, handler: &mut impl Handler) -> usize {
        let now = clock::now_ns();
        let mut ready = None;
        self.door.refused.retain_mut(|refused| {
            // A load, where the segment is mapped; everything else takes system calls.
            let (mapped, due) =
                (matches!(refused.segment, Segment::Mapped(_)), now >= refused.look_at);
            if (mapped || due) && refused.segment.has_moved() {
                return false;
            }
            if !due || ready.is_some() {
                return true;
            }
            refused.look_at = now.saturating_add(LOOK_NS);
            if refused.is_ready(now) {
                // A sender that has taken its messages back closes the connection next.
                if refused.segment.has_moved() {
                    return false;
                }
                ready = Some(refused.peer);
            }
            true
        });
        let Some(peer) = ready else { return 0 };
        // If there are links to the peer, their end will come soon, and `depart` delivers these messages.
        if self.out(peer).is_some() || self.inbound_of(peer).is_some() {
            return 0;
        }
        self.see_refused_off(peer, handler);
        1
    }

    /// Whether `peer` has left messages in refused links, which it cannot take back any more.
    pub(super) fn has_left_refused(&self, peer: PeerId) -> bool {
        let left = |one: &Refused| one.peer == peer && one.is_left() && !one.segment.has_moved();
        self.door.refused.iter().any(left)
    }

    /// Delivers what `peer`, with which there is no link, has left in refused ones, and reports its departure.
    pub(super) fn see_refused_off(&mut self, peer: PeerId, handler: &mut impl Handler) {
        let mut ended = Ended::default();
        self.read_refused(peer, &mut ended, handler);
        // The sends of what it had refused have failed.
        self.returned.retain(|one| one.peer != peer);
        handler.on_departure(peer, ended.departure());
    }

    /// Delivers the messages that `peer` wrote into refused links, and can take back no more. `ended`: what the links tell
    /// of its end.
    pub(super) fn read_refused(
        &mut self,
        peer: PeerId,
        ended: &mut Ended,
        handler: &mut impl Handler,
    ) {
        let ready = |refused: &Refused| refused.peer == peer && refused.is_left();
        while let Some(at) = self.door.refused.iter().position(ready) {
            let mut refused = self.door.refused.swap_remove(at);
            // In this order: a sender that has ended does not set MOVED any more.
            if refused.segment.has_moved() {
                continue;
            }
            refused.segment.map();
            match refused.segment {
                Segment::Mapped(mut consumer) => {
                    handler.on_peer(peer, &refused.source);
                    ended.add(&consumer);
                    ended.read_rest(peer, &refused.source, &mut consumer, handler);
                }
                Segment::Unmapped(Unmapped { errno, .. }) => ended.lose(&refused.source, errno),
            }
        }
    }

    /// `peer` has refused our link and read nothing of it: its messages are to go another way.
    pub(super) fn take_back(&mut self, peer: PeerId, errno: Errno) {
        let Some(link) = self.outbound.get_mut(peer.index()).and_then(Option::take) else { return };
        if let Some(socket) = &link.socket {
            self.epoll.remove(socket.as_fd());
        }
        let producer = &link.producer;
        producer.take_back();
        let mut consumer = Consumer::new(producer.memory().clone(), producer.geometry());
        let mut messages = VecDeque::new();
        while let Popped::Message | Popped::Handed(_) = consumer.pop(|header, payload| {
            messages.push_back(Message { header: header.to_vec(), payload: payload.to_vec() });
        }) {}
        self.unwatch(link.pid);
        self.crowd.stale = true;
        self.returned.push(Returned { peer, pid: link.pid, errno, messages });
        self.due.urgent = true;
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Heard::{Left, Message as Came};
    use super::super::fixture::{End, Heard, end, hears};
    use super::*;
    use crate::sys::shared_memory::REFUSED;
    use crate::transport::shm::config::CmaPolicy;
    use crate::transport::{Contact, Departure, Messages, Mode, Transport};

    fn send(from: &mut End, to: &End, lens: &[usize]) -> PeerId {
        let peer = from.connect(to);
        for len in lens {
            let pack = |at: usize, to: &mut [u8]| {
                (at..).zip(to).for_each(|(i, byte)| *byte = i as u8);
            };
            from.shm.send(peer, fits(*len), b"header", *len, pack).unwrap();
        }
        peer
    }

    fn fits(len: usize) -> Mode {
        if 6 + len <= super::super::SLOT_ROOM { Mode::Short } else { Mode::Bulk }
    }

    const LENS: [usize; 6] = [0, 8, 65536, 100, 5000, 3];

    const NO_DESCRIPTOR: Errno = Errno(libc::EMFILE);
    const NO_MEMORY: Errno = Errno(libc::ENOMEM);

    /// `end` refuses all links, for this reason.
    fn refuse(end: &mut End, errno: Option<Errno>) {
        end.shm.refuse_all(errno == Some(NO_DESCRIPTOR));
        REFUSED.set(errno.filter(|errno| *errno != NO_DESCRIPTOR));
    }

    /// `a` has sent to `b`, which refuses its link; `back`: there is a link the other way.
    fn refused(back: bool, errno: Errno) -> (End, End, PeerId) {
        let (mut a, mut b) = (end(CmaPolicy::Auto), end(CmaPolicy::Auto));
        refuse(&mut b, None);
        if back {
            send(&mut b, &a, &[1]);
            assert_eq!(hears(&mut a), [Came(1)]);
        }
        refuse(&mut b, Some(errno));
        let peer = send(&mut a, &b, &LENS);
        assert_eq!(hears(&mut b), []);
        assert_eq!(b.shm.door.refused.len(), 1);
        (a, b, peer)
    }

    fn each_way() -> impl Iterator<Item = (bool, Errno)> {
        [false, true].into_iter().flat_map(|back| [NO_DESCRIPTOR, NO_MEMORY].map(|e| (back, e)))
    }

    /// Runs turns until `end` has seen the departure of its peer; time passes meanwhile.
    fn hears_the_end(end: &mut End) -> Vec<Heard> {
        let (mut all, begun) = (Vec::new(), clock::now_ns());
        while !matches!(all.last(), Some(Left(_))) {
            assert!(clock::now_ns() - begun < 60_000_000_000, "{all:?}");
            all.extend(hears(end));
        }
        all
    }

    #[test]
    fn refused_messages_come_back_in_order() {
        for (back, why) in each_way() {
            let (mut a, mut b, peer) = refused(back, why);
            assert_eq!(hears(&mut a), []);
            let [Returned { peer: whose, errno, messages, .. }] = &a.shm.returned()[..] else {
                panic!()
            };
            assert_eq!((*whose, *errno), (peer, why));
            let lens: Vec<usize> = messages.iter().map(|message| message.payload.len()).collect();
            assert_eq!(lens, LENS);
            for Message { header, payload } in messages {
                assert!(
                    header == b"header" && (0..).zip(payload).all(|(i, byte)| *byte == i as u8)
                );
            }
            assert!(!a.shm.is_connected(peer));
            std::thread::sleep(std::time::Duration::from_nanos(2 * LOOK_NS));
            assert_eq!(hears(&mut b), []);
            assert!(b.shm.door.refused.is_empty(), "it has heard that they go another way");
            drop(a);
            let left = [Left(Departure::Closed)];
            assert_eq!(hears(&mut b), left[..usize::from(back)], "they are not delivered twice");
        }
    }

    #[test]
    fn a_sender_that_leaves_before_it_hears_has_sent_all_the_same() {
        for (back, why) in each_way() {
            let (a, mut b, _) = refused(back, why);
            REFUSED.set(None);
            drop(a);
            let mut expected: Vec<Heard> = LENS.into_iter().map(Came).collect();
            expected.push(Left(Departure::Closed));
            assert_eq!(hears_the_end(&mut b), expected, "{back} {why}");
            assert!(b.shm.door.refused.is_empty());
        }
    }

    #[test]
    fn a_sender_that_takes_its_link_down_before_it_hears_has_not_closed() {
        for why in [NO_DESCRIPTOR, NO_MEMORY] {
            let (mut a, mut b, peer) = refused(false, why);
            REFUSED.set(None);
            a.shm.drain(peer, &mut super::super::fixture::Deaf);
            let mut expected: Vec<Heard> = LENS.into_iter().map(Came).collect();
            expected.push(Left(Departure::Failed(Errno(libc::ECONNRESET))));
            assert_eq!(hears_the_end(&mut b), expected, "{why}");
        }
    }

    #[test]
    fn messages_that_a_peer_can_still_take_back_are_kept_when_it_departs_otherwise() {
        let (a, mut b, _) = refused(false, NO_DESCRIPTOR);
        let peer = b.peers.find(&a.me).unwrap();
        let mut ears = super::super::fixture::Ears::default();
        b.shm.drain(peer, &mut ears);
        assert_eq!(ears.0, []);
        drop(a);
        let mut expected: Vec<Heard> = LENS.into_iter().map(Came).collect();
        expected.push(Left(Departure::Closed));
        assert_eq!(hears_the_end(&mut b), expected);
    }

    #[test]
    fn a_refused_link_is_looked_at_now_and_then() {
        for (back, why) in each_way() {
            let (_a, mut b, _) = refused(back, why);
            b.shm.door.refused[0].look_at = 0;
            b.shm.look_after_refused(&mut super::super::fixture::Deaf);
            let next = b.shm.door.refused[0].look_at;
            assert!(next > 0, "{back} {why}: not in each turn");
            b.shm.look_after_refused(&mut super::super::fixture::Deaf);
            let again = b.shm.door.refused[0].look_at;
            assert!(again == next || again >= next + LOOK_NS, "{back} {why}");
        }
    }

    #[test]
    fn messages_in_memory_that_cannot_be_mapped_are_told_to_be_lost() {
        for back in [false, true] {
            let (a, mut b, _) = refused(back, NO_MEMORY);
            drop(a);
            assert_eq!(hears_the_end(&mut b), [Left(Departure::Failed(NO_MEMORY))], "{back}");
            assert!(b.shm.door.refused.is_empty());
            REFUSED.set(None);
        }
    }

    #[test]
    fn a_sender_that_has_left_before_it_is_refused_has_a_link_for_a_moment() {
        let (mut a, mut b) = (end(CmaPolicy::Auto), end(CmaPolicy::Auto));
        refuse(&mut b, Some(NO_DESCRIPTOR));
        send(&mut a, &b, &LENS);
        drop(a);
        let mut expected: Vec<Heard> = LENS.into_iter().map(Came).collect();
        expected.push(Left(Departure::Closed));
        assert_eq!(hears(&mut b), expected);
    }

    #[test]
    fn what_an_earlier_life_left_in_a_refused_link_comes_before_there_is_a_link_with_the_next() {
        for to_it in [false, true] {
            let (a, mut b, _) = refused(false, NO_DESCRIPTOR);
            refuse(&mut b, None);
            let mut a = a.next_life();
            let mut expected: Vec<Heard> = LENS.into_iter().map(Came).collect();
            expected.push(Left(Departure::Closed));
            if to_it {
                let back = b.peers.intern(&a.me).unwrap();
                assert_eq!(b.shm.link(back, &a.me), Ok(Contact::Later));
                assert_eq!(hears_the_end(&mut b), expected);
                b.connect(&a);
            } else {
                send(&mut a, &b, &[7]);
                expected.push(Came(7));
                assert_eq!(hears(&mut b), expected);
            }
            assert!(b.shm.door.refused.is_empty());
        }
    }

    #[test]
    fn without_a_doorbell_an_endpoint_is_reached_over_the_network() {
        let (mut a, mut b) = (end(CmaPolicy::Auto), end(CmaPolicy::Auto).without_bell());
        assert!(!b.shm.is_open());
        let to = a.peers.intern(&b.me).unwrap();
        assert_eq!(a.shm.connect(to, &b.me, false), Ok(Contact::Elsewhere));
        let back = b.peers.intern(&a.me).unwrap();
        assert_eq!(b.shm.connect(back, &a.me, false), Ok(Contact::Elsewhere));
    }

    #[test]
    fn once_there_is_room_a_link_is_made_again() {
        let (mut a, mut b, _) = refused(false, NO_DESCRIPTOR);
        hears(&mut a);
        refuse(&mut b, None);
        send(&mut a, &b, &[7]);
        assert_eq!(hears(&mut b), [Came(7)]);
    }
}
