//! Links that their receiver cannot take, because it has no descriptor or no memory for them (PROTOCOL.md §2.11).
//!
//! A sender writes into its segment before it has an answer, and what is there counts as sent. The receiver of a
//! refused link reads nothing of it; the sender, when it hears of that, sets MOVED, takes its messages out of the
//! ring again and sends them another way, in their order and before any other. A sender that ends without having set MOVED has
//! not heard: then the receiver, which has the segment still, takes what is in the ring.

use super::Shm;
use super::hello::Reject;
use super::ring::{Consumer, Popped};
use crate::sys::{Errno, process};
use crate::telemetry::log;
use crate::transport::{Address, Departure, Handler, PeerId};
use std::collections::VecDeque;
use std::os::fd::AsFd;

/// One message that is to go another way.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Vec<u8>,
    pub(crate) payload: Vec<u8>,
}

/// What was in the ring of a link that `peer` has refused.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) peer: PeerId,
    pub(crate) messages: VecDeque<Message>,
}

/// A link that was refused here, whose sender may not have heard of it yet.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) peer: PeerId,
    pub(super) source: Address,
    pub(super) pid: i32,
    pub(super) consumer: Consumer,
}

impl Refused {
    /// The sender will not hear of it any more.
    fn is_left(&self) -> bool {
        self.consumer.producer_closed() || !process::is_running(self.pid)
    }
}

impl Shm {
    /// The links that were refused here: those whose senders have taken their messages back are forgotten, and those
    /// whose senders have ended without are read.
    pub(super) fn look_after_refused(&mut self, handler: &mut impl Handler) -> usize {
        self.door.refused.retain(|refused| !refused.consumer.has_moved());
        let left = self.door.refused.iter().find(|refused| refused.is_left());
        let Some(peer) = left.map(|refused| refused.peer) else { return 0 };
        // With links to it, their end comes soon, and takes these messages along.
        if self.out(peer).is_some() || self.inbound_of(peer).is_some() {
            return 0;
        }
        let closed = self.read_refused(peer, handler);
        let died = Departure::Failed(Errno(libc::EHOSTDOWN));
        handler.on_departure(peer, if closed { Departure::Closed } else { died });
        1
    }

    /// Delivers what `peer`, which has left, had written into links that were refused. True: it has closed in order.
    pub(super) fn read_refused(&mut self, peer: PeerId, handler: &mut impl Handler) -> bool {
        let mut closed = false;
        while let Some(at) = self.door.refused.iter().position(|refused| refused.peer == peer) {
            let mut refused = self.door.refused.swap_remove(at);
            // In this order: who has left moves nothing.
            if !refused.is_left() || refused.consumer.has_moved() {
                continue;
            }
            closed = refused.consumer.producer_closed();
            handler.on_peer(peer, &refused.source);
            while let Popped::Message | Popped::Handed(_) =
                refused.consumer.pop(|header, payload| handler.on_message(peer, header, payload))
            {
            }
        }
        closed
    }

    /// `peer` has no room for our link, and has read nothing of it: what lies there is to go another way.
    pub(super) fn take_back(&mut self, peer: PeerId, reject: Option<&Reject>) {
        let Some(link) = self.outbound.get_mut(peer.index()).and_then(Option::take) else { return };
        self.outbound_count -= 1;
        self.epoll.remove(link.socket.as_fd());
        let producer = &link.producer;
        producer.take_back();
        let mut consumer = Consumer::new(producer.memory().clone(), producer.geometry());
        let mut messages = VecDeque::new();
        while let Popped::Message | Popped::Handed(_) = consumer.pop(|header, payload| {
            messages.push_back(Message { header: header.to_vec(), payload: payload.to_vec() });
        }) {}
        let detail = reject.map_or(0, |reject| reject.detail);
        log::limited!(
            cause: detail,
            "a peer of this node (process {}) has no room for a shared-memory link ({}): its messages go over the network",
            link.pid,
            Errno(detail as i32)
        );
        if self.inbound_of(peer).is_none() {
            self.unwatch(peer);
        }
        self.count_processes();
        self.returned.push(Returned { peer, messages });
        self.urgent = true;
    }

    /// What was taken back since this was asked last.
    pub(crate) fn returned(&mut self) -> Vec<Returned> {
        std::mem::take(&mut self.returned)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{End, end};
    use super::*;
    use crate::config::CmaPolicy;

    #[derive(PartialEq, Eq, Debug)]
    enum Heard {
        Message(usize),
        Left(Departure),
    }
    use Heard::{Left, Message as Came};

    #[derive(Default)]
    struct Ears(Vec<Heard>);

    impl Handler for Ears {
        fn on_peer(&mut self, _: PeerId, _: &Address) {}
        fn on_message(&mut self, _: PeerId, _: &[u8], payload: &[u8]) {
            self.0.push(Came(payload.len()));
        }
        fn on_departure(&mut self, _: PeerId, departure: Departure) {
            self.0.push(Left(departure));
        }
        fn is_owed(&self, _: PeerId) -> bool {
            false
        }
    }

    fn hears(end: &mut End) -> Vec<Heard> {
        let mut ears = Ears::default();
        for _ in 0..10 {
            end.turn(&mut ears);
        }
        ears.0
    }

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

    fn fits(len: usize) -> bool {
        super::super::fits_a_slot(6 + len)
    }

    const LENS: [usize; 6] = [0, 8, 65536, 100, 5000, 3];

    /// `a` has sent to `b`, which has no room; `back`: there is a link the other way.
    fn refused(back: bool) -> (End, End, PeerId) {
        let (mut a, mut b) = (end(CmaPolicy::Auto), end(CmaPolicy::Auto));
        b.shm.door.full = true;
        if back {
            send(&mut b, &a, &[1]);
            assert_eq!(hears(&mut a), [Came(1)]);
        }
        let peer = send(&mut a, &b, &LENS);
        assert_eq!(hears(&mut b), []);
        assert_eq!(b.shm.door.refused.len(), 1);
        (a, b, peer)
    }

    #[test]
    fn what_was_refused_comes_back_in_order() {
        for back in [false, true] {
            let (mut a, mut b, peer) = refused(back);
            assert_eq!(hears(&mut a), []);
            let [Returned { peer: whose, messages }] = &a.shm.returned()[..] else { panic!() };
            assert_eq!(*whose, peer);
            let lens: Vec<usize> = messages.iter().map(|message| message.payload.len()).collect();
            assert_eq!(lens, LENS);
            for Message { header, payload } in messages {
                assert!(
                    header == b"header" && (0..).zip(payload).all(|(i, byte)| *byte == i as u8)
                );
            }
            assert!(!a.shm.is_connected(peer));
            assert_eq!(hears(&mut b), []);
            assert!(b.shm.door.refused.is_empty(), "it has heard that they go another way");
            drop(a);
            let left = [Left(Departure::Closed)];
            assert_eq!(hears(&mut b), left[..usize::from(back)], "they are not delivered twice");
        }
    }

    #[test]
    fn a_sender_that_leaves_before_it_hears_has_sent_all_the_same() {
        for back in [false, true] {
            let (a, mut b, _) = refused(back);
            drop(a);
            let mut expected: Vec<Heard> = LENS.into_iter().map(Came).collect();
            expected.push(Left(Departure::Closed));
            assert_eq!(hears(&mut b), expected, "{back}");
            assert!(b.shm.door.refused.is_empty());
        }
    }

    #[test]
    fn a_sender_that_has_left_before_it_is_refused_has_a_link_for_a_moment() {
        let (mut a, mut b) = (end(CmaPolicy::Auto), end(CmaPolicy::Auto));
        b.shm.door.full = true;
        send(&mut a, &b, &LENS);
        drop(a);
        let mut expected: Vec<Heard> = LENS.into_iter().map(Came).collect();
        expected.push(Left(Departure::Closed));
        assert_eq!(hears(&mut b), expected);
    }

    #[test]
    fn once_there_is_room_a_link_is_made_again() {
        let (mut a, mut b, _) = refused(false);
        hears(&mut a);
        b.shm.door.full = false;
        send(&mut a, &b, &[7]);
        assert_eq!(hears(&mut b), [Came(7)]);
    }
}
