//! Long messages that go through a ring at once, unsolicited: no state about them is kept.

use super::outbound::Outbound;
use super::ring::Full;
use super::state::Shm;
use crate::memory::Segment;
use crate::transport::{Head, PeerId, piece_of};

impl Shm {
    pub(super) fn push_whole(
        &mut self,
        peer: PeerId,
        first: &[u8],
        payload: Segment,
        next: impl Fn(usize) -> Head,
    ) -> bool {
        let attaches = self.inbound_of(peer).is_some_and(|link| link.reach().0);
        let most = self.push_max(peer, attaches);
        let link = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
        let Some(link) = link else { return false };
        let ring = &mut link.producer;
        let most = most.min(ring.geometry().push_max());
        if payload.len() <= most && ring.may_grow() {
            ring.grow_for(4 * payload.len(), false);
        }
        let piece = piece_of(payload.len(), ring.sizes().fragment_max());
        let pieces = payload.len().div_ceil(piece) as u32;
        if payload.len() > most
            || ring.under_pressure()
            || ring.room_for(piece as u32, pieces + 1) <= pieces
        {
            return false;
        }
        if link.push_pieces(first, payload, piece, next).is_err() {
            debug_assert!(false, "there was room");
            self.due.end(peer);
        }
        true
    }
}

impl Outbound {
    fn push_pieces(
        &mut self,
        first: &[u8],
        payload: Segment,
        piece: usize,
        next: impl Fn(usize) -> Head,
    ) -> Result<(), Full> {
        let announced = self.producer.push_short(first, 0, |_| ())?;
        self.tell(announced);
        let part = payload.part(0, piece);
        let pushed =
            self.timed(part.len(), |link| link.producer.push(&next(0), part).ok_or(Full))?;
        self.tell(pushed);
        let mut at = piece;
        while at < payload.len() {
            let part = payload.part(at, piece);
            let pushed = self.producer.push(&next(at), part).ok_or(Full)?;
            self.tell(pushed);
            at += piece;
        }
        self.copy_rate.passed((payload.len().saturating_sub(1) / piece) as u32);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{End, linked};
    use super::*;
    use crate::memory::Buffers;
    use crate::sys::cma::Range;
    use crate::transport::loopback::Loopback;
    use crate::transport::shm::config::CmaPolicy;
    use crate::transport::{Address, Departure, Handler, Messages, Mode, Transport};

    const LEN: usize = 300_000;

    /// Reassembles messages: the bytes of each, and the number of its fragments.
    #[derive(Default)]
    struct Ear(Vec<(Vec<u8>, usize)>);

    impl Handler for Ear {
        fn on_peer(&mut self, _: PeerId, _: &Address) {}
        fn on_message(&mut self, _: PeerId, header: &[u8], payload: &[u8]) {
            if header == b"first" {
                return self.0.push((Vec::new(), 0));
            }
            let (bytes, pieces) = self.0.last_mut().unwrap();
            assert_eq!(header, (bytes.len() as u64).to_ne_bytes());
            bytes.extend_from_slice(payload);
            *pieces += 1;
        }
        fn on_departure(&mut self, _: PeerId, _: Departure) {}
        fn is_owed(&self, _: PeerId) -> bool {
            false
        }
    }

    fn send(end: &mut End, peer: PeerId, bytes: &[u8]) -> bool {
        let addr = bytes.as_ptr().expose_provenance() as u64;
        let list = Loopback::list(&[Range { addr, len: bytes.len() as u64 }]).unwrap();
        let payload = list.one().unwrap();
        let next = |at: usize| Head { words: [at as u64, 0, 0], len: 8 };
        end.shm.send_whole(peer, b"first", payload, next)
    }

    fn hear(end: &mut End) -> Vec<(Vec<u8>, usize)> {
        let mut ear = Ear::default();
        while end.shm.poll(&mut ear) > 0 {}
        ear.0
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| ((i * 7) >> 4) as u8).collect()
    }

    #[test]
    fn a_message_that_a_ring_takes_comes_in_pieces_and_in_order() {
        let [(mut a, peer), (mut b, _)] = linked(2, CmaPolicy::Off, None);
        // Many laps, with every position at their ends.
        for len in [1, 20_000, LEN, 1 << 20, 999_999].repeat(7) {
            let bytes = pattern(len);
            assert!(send(&mut a, peer, &bytes));
            let pieces = len.div_ceil(piece_of(len, 64 * 1024));
            assert!(hear(&mut b) == [(bytes, pieces)], "{len}");
        }
        assert!(a.shm.due.broken.is_empty());
    }

    #[test]
    fn the_next_piece_waits_where_a_pause_is_wanted() {
        /// Wants a pause after each third message.
        struct Slow(usize);
        impl Handler for Slow {
            fn on_peer(&mut self, _: PeerId, _: &Address) {}
            fn on_message(&mut self, _: PeerId, _: &[u8], _: &[u8]) {
                self.0 += 1;
            }
            fn wants_pause(&mut self) -> bool {
                self.0 % 3 == 0
            }
            fn on_departure(&mut self, _: PeerId, _: Departure) {}
            fn is_owed(&self, _: PeerId) -> bool {
                false
            }
        }
        let [(mut a, peer), (mut b, _)] = linked(2, CmaPolicy::Off, None);
        for _ in 0..8 {
            a.shm.send(peer, Mode::Short, b"header", 0, |_, _| ()).unwrap();
        }
        let mut slow = Slow(0);
        let taken: Vec<usize> = (0..4).map(|_| b.shm.poll(&mut slow)).collect();
        assert_eq!((taken, slow.0), (vec![3, 3, 2, 0], 8));
    }

    #[test]
    fn a_message_that_a_ring_does_not_take_leaves_no_trace() {
        let [(mut a, peer), (mut b, back)] = linked(2, CmaPolicy::Off, Some(LEN));
        assert!(!send(&mut a, peer, &pattern(LEN + 1)), "longer than what is pushed");
        b.shm.set_pressure(true);
        assert!(!send(&mut a, peer, &pattern(LEN)), "nobody has room for it");
        b.shm.set_pressure(false);
        let fit = (0..100).take_while(|_| send(&mut a, peer, &pattern(LEN))).count();
        assert!((3..8).contains(&fit), "{fit} in 2 MiB");
        let heard = hear(&mut b);
        assert_eq!(heard.len(), fit);
        assert!(heard.iter().all(|(bytes, _)| *bytes == pattern(LEN)));
        assert!(send(&mut a, peer, &pattern(LEN)), "there is room again");
        assert!(!send(&mut b, PeerId(back.0 + 1), b"to nobody"));
        assert!(a.shm.due.broken.is_empty());
    }

    #[test]
    fn a_long_message_is_announced_while_all_bulk_space_is_in_use() {
        let [(mut a, peer), (mut b, _)] = linked(2, CmaPolicy::Off, None);
        let bytes = pattern(40_000);
        let fragment = |a: &mut End, from: &[u8], at: usize| {
            let header = (at as u64).to_ne_bytes();
            a.shm.send(peer, Mode::Fragment, &header, from.len(), |from_at, to| {
                to.copy_from_slice(&from[from_at..from_at + to.len()]);
            })
        };
        a.shm.send(peer, Mode::Short, b"first", 0, |_, _| ()).unwrap();
        let fit = (0..).take_while(|i| fragment(&mut a, &bytes, i * bytes.len()).is_ok()).count();
        assert!(fit > 20, "{fit}");
        // As an announcement does, that brings the first bytes of its message.
        for i in 0..100 {
            fragment(&mut a, &bytes[..50], fit * bytes.len() + i * 50).unwrap();
        }
        assert!(fragment(&mut a, &bytes, 0).is_err(), "there is still no room for this");
        let heard = hear(&mut b);
        assert_eq!(heard[0].1, fit + 100);
        assert!(heard[0].0 == [bytes.repeat(fit), bytes[..50].repeat(100)].concat());
    }

    #[test]
    fn where_processes_take_turns_nothing_is_pushed() {
        let [(mut a, peer), _] = linked(0, CmaPolicy::Auto, None);
        assert!(!send(&mut a, peer, &pattern(LEN)));
    }
}
