//! Sending packets: handshakes, messages, acknowledgements, and CLOSE.

use super::super::packet::{
    ACK_REQUEST, DELAY_UNIT_NS, HAS_ECHO, HEADER_LEN, HEADER_ONLY, HEADER_TAGS, Header, HelloKind,
    Kind, PRESSURE, SACK_WORDS,
};
use super::super::shared::Shared;
use super::super::timers::NEVER;
use super::Connection;
use super::handshake::{ACCEPT, DOUBT, INIT, PROBE, Phase, Remote};
use crate::sys::packets::Buffer;
use crate::telemetry::trace;
use crate::transport::Address;
use crate::transport::net::link::Link;
use std::io::IoSlice;
use std::ops::Range;

/// Most packets that one peer sends in its turn, and how many count as few.
const BURST: usize = 64;
const FEW: usize = 8;

/// What a connection needs for sending: the shared state, the link and the time.
pub(crate) struct Turn<'a, L> {
    pub(crate) shared: &'a mut Shared,
    pub(crate) link: &'a mut L,
    pub(crate) now: u64,
    /// Packets sent so far.
    pub(crate) sent: usize,
    /// The link has refused a handshake packet, and not because it is full.
    pub(crate) refused: bool,
}

impl<'a, L> Turn<'a, L> {
    pub(crate) fn new(shared: &'a mut Shared, link: &'a mut L, now: u64) -> Self {
        Self { shared, link, now, sent: 0, refused: false }
    }
}

impl Connection {
    /// Whether the next packet may leave at once, because nothing else has to be sent or checked first.
    pub(super) fn is_clear(&self) -> bool {
        self.handshake.is_established()
            && self.sender.is_clear()
            && self.receiver.order.is_whole()
            && self.handshake.hellos == 0
            && !self.path.cut
    }

    /// Whether `transmit` has something to do.
    pub(crate) fn wants_to_send(&self) -> bool {
        self.handshake.hellos != 0 || self.wants_to_send_data()
    }

    /// The same without handshake packets, which UDP alone carries.
    fn wants_to_send_data(&self) -> bool {
        let wants = || self.receiver.acknowledgement.now || self.sender.may_send();
        self.handshake.is_established() && wants()
    }

    /// Something waits that UDP need not carry.
    pub(super) fn sends_direct(&self) -> bool {
        self.path.is_direct() && self.wants_to_send_data()
    }

    /// Sends packets, a bounded number. False: the link took no more.
    pub(crate) fn transmit(&mut self, turn: &mut Turn<'_, impl Link>) -> bool {
        if std::mem::take(&mut self.path.cut) {
            turn.link.allow_fragments(&self.address, self.path.carried());
        }
        let waits = self.rest.is_on();
        if !waits && !self.send_hellos(turn) {
            if turn.link.is_full() {
                return false;
            }
            turn.refused = true;
        }
        self.path.go_direct(turn.link.direct(&self.address));
        // What UDP does not carry to this peer alone holds up nothing that goes another way.
        if (waits || turn.refused) && !self.path.is_direct() || !self.handshake.is_established() {
            return !turn.refused;
        }
        // Packets that came early are acknowledged first: packets with data have no room for that list.
        if !self.receiver.order.is_whole() && !self.acknowledge(turn) {
            return false;
        }
        self.coalescer.release(&mut turn.shared.backoff, turn.now);
        if !self.send_waiting(turn, BURST) {
            self.coalescer.open = false;
            return false;
        }
        self.coalescer.open &= self.sender.window.waiting() > 0;
        self.acknowledge(turn)
    }

    /// Sends an acknowledgement, if it is time. False: the link took no more.
    fn acknowledge(&mut self, turn: &mut Turn<'_, impl Link>) -> bool {
        !self.receiver.acknowledgement.now || self.send_control(turn, Kind::Ack)
    }

    /// Sends queued packets that may leave, at most `budget`. False: the link took no more.
    pub(super) fn send_waiting(
        &mut self,
        turn: &mut Turn<'_, impl Link>,
        mut budget: usize,
    ) -> bool {
        while budget > 0 && self.sender.may_send() {
            let (batch, fresh) = self.sender.choose(budget.min(BURST));
            let count = (batch.end - batch.start) as usize;
            let taken = match count {
                0 => break,
                1 => self.send_batch::<1>(turn, batch, fresh),
                2..=FEW => self.send_batch::<FEW>(turn, batch, fresh),
                _ => self.send_batch::<BURST>(turn, batch, fresh),
            };
            if taken < count {
                return false;
            }
            budget -= count;
        }
        true
    }

    fn send_hellos(&mut self, turn: &mut Turn<'_, impl Link>) -> bool {
        if self.handshake.hellos & DOUBT != 0 {
            self.handshake.hellos &= !DOUBT;
            turn.link.doubt(&self.address);
        }
        for bit in [ACCEPT, INIT, PROBE] {
            if self.handshake.hellos & bit == 0 {
                continue;
            }
            let kind = if bit == ACCEPT { HelloKind::Accept } else { HelloKind::Init };
            let mut packet =
                self.hello(turn.shared, kind).signed(&turn.shared.settings.key).to_vec();
            if let Some(len) = self.path.padding(bit, self.front()) {
                packet.resize(len.max(packet.len()), 0);
            }
            if turn.link.send(&self.address, &[IoSlice::new(&packet)]) == 0 {
                return false;
            }
            turn.shared.counts.hellos_sent += 1;
            turn.sent += 1;
            self.handshake.hellos &= !bit;
            if bit == ACCEPT {
                self.handshake.answers = 0;
            }
            if self.handshake.phase == Phase::Greeting && self.sender.timeout.at == NEVER {
                self.wait_for_greeting(turn.shared, turn.now);
            }
        }
        true
    }

    /// Sends these packets, at most `N`; if they are `fresh`, none was sent before. Packets that the link does not take
    /// are as they were before. Returns how many it took.
    #[inline]
    fn send_batch<const N: usize>(
        &mut self,
        turn: &mut Turn<'_, impl Link>,
        batch: Range<u64>,
        fresh: bool,
    ) -> usize {
        let Some(remote) = self.handshake.remote else { return 0 };
        let mut count = (batch.end - batch.start) as usize;
        let asks = self.sender.wants_answer(count);
        let mut header = self.header(turn, &remote, Kind::Data);
        // The first packet is the longest.
        let longest = self.sender.window.len_of(batch.start);
        header.flags |= remote.goes_sound(turn, &self.address, longest);
        let mut slices = [IoSlice::new(&[]); N];
        let packets = self.sender.window.transmit(batch.clone(), turn.now);
        for (i, ((psn, packet), slot)) in packets.zip(&mut slices).enumerate() {
            header.psn = psn as u32;
            header.transmission = packet.transmission as u32;
            if asks && i + 1 == count {
                header.flags |= ACK_REQUEST;
            }
            if !fresh && (i > count || !turn.shared.buffers.detach(&mut packet.bytes)) {
                count = count.min(i);
                continue;
            }
            let bytes = &mut packet.bytes[..];
            let Some((head, frames)) = bytes.split_first_chunk_mut::<HEADER_LEN>() else {
                continue;
            };
            *head = header.signed(&remote.key, &turn.shared.hash, remote.direction, frames);
            *slot = IoSlice::new(bytes);
        }
        let taken = turn.link.send(&self.address, slices.get(..count).unwrap_or(&[])).min(count);
        self.sender.on_taken(batch, taken, fresh, asks, turn.now);
        turn.shared.counts.data_sent += taken as u64;
        turn.shared.counts.retransmitted += if fresh { 0 } else { taken as u64 };
        turn.sent += taken;
        if taken > 0 && !fresh {
            self.trace(trace::Kind::Resent, turn.shared, taken);
        }
        if taken > 0 {
            self.note_told();
        }
        taken
    }

    /// Sends the only queued packet, which `bytes` holds. False: the link did not take it; `None`: it cannot be sent.
    #[inline]
    pub(super) fn send_single(
        &self,
        turn: &mut Turn<'_, impl Link>,
        bytes: &mut Buffer,
    ) -> Option<bool> {
        let remote = self.handshake.remote.as_ref()?;
        let mut header = self.header(turn, remote, Kind::Data);
        header.transmission = self.sender.window.transmission as u32;
        header.flags |= remote.goes_sound(turn, &self.address, bytes.len());
        if self.sender.timeout.attempts > 0 {
            header.flags |= ACK_REQUEST;
        }
        let (head, frames) = bytes.split_first_chunk_mut::<HEADER_LEN>()?;
        *head = header.signed(&remote.key, &turn.shared.hash, remote.direction, frames);
        let left = turn.link.send(&self.address, &[IoSlice::new(bytes)]) > 0;
        bytes.note_sent();
        Some(left)
    }

    /// The packet that [`Self::send_single`] sent has left.
    #[inline]
    pub(super) fn note_single(&mut self, turn: &mut Turn<'_, impl Link>, bytes: Buffer) {
        let asked = self.sender.timeout.attempts > 0;
        self.sender.on_single(bytes, asked, turn.now);
        turn.shared.counts.data_sent += 1;
        self.note_told();
    }

    /// Packets with data have left. They acknowledge what arrived in order, but have no room for early packets.
    fn note_told(&mut self) {
        let all = self.receiver.order.is_whole();
        self.receiver.acknowledgement.on_sent(all);
    }

    /// The header fields that acknowledge the other direction.
    fn header(&self, turn: &Turn<'_, impl Link>, remote: &Remote, kind: Kind) -> Header {
        let receiver = &self.receiver;
        let mut flags = if turn.shared.pressure { PRESSURE } else { 0 };
        // Only acknowledgement packets list packets that came early. An echo without that list would make the peer take
        // them for lost.
        if receiver.arrived_at != 0 && (kind != Kind::Data || receiver.order.is_whole()) {
            flags |= HAS_ECHO;
        }
        let delay = turn.now.saturating_sub(receiver.arrived_at) / DELAY_UNIT_NS;
        Header {
            kind,
            flags,
            sack_words: 0,
            dest: remote.id,
            psn: self.sender.window.unsent as u32,
            transmission: 0,
            ack: receiver.order.expected as u32,
            echo: receiver.arrived.wrapping_sub(1) as u32,
            ack_delay: u16::try_from(delay).unwrap_or(u16::MAX),
            credit: turn.shared.credit(),
            marks: receiver.marks,
            tag: 0,
        }
    }

    /// Sends a packet without data. False: the link took no more.
    fn send_control(&mut self, turn: &mut Turn<'_, impl Link>, kind: Kind) -> bool {
        let Some(remote) = &self.handshake.remote else { return true };
        let mut header = self.header(turn, remote, kind);
        let mut bytes = [0; HEADER_LEN + SACK_WORDS * 8];
        let (head, words) = bytes.split_at_mut(HEADER_LEN);
        let count = self.receiver.order.write_sack(words);
        header.sack_words = count as u8;
        header.flags |= if self.receiver.acknowledgement.asks { ACK_REQUEST } else { 0 };
        let words = words.get(..count * 8).unwrap_or(&[]);
        let len = HEADER_LEN + count * 8;
        if kind == Kind::Close {
            header.psn = self.sender.window.next_psn() as u32;
        } else {
            // A CLOSE always goes over UDP.
            header.flags |= remote.goes_sound(turn, &self.address, len);
        }
        head.copy_from_slice(&header.signed(
            &remote.key,
            &turn.shared.hash,
            remote.direction,
            words,
        ));
        let packet = bytes.get(..len).unwrap_or(&[]);
        if turn.link.send(&self.address, &[IoSlice::new(packet)]) == 0 {
            return false;
        }
        self.receiver.acknowledgement.asks = false;
        turn.shared.counts.acks_sent += 1;
        turn.sent += 1;
        self.receiver.acknowledgement.on_sent(true);
        true
    }

    /// Sends a CLOSE.
    pub(crate) fn send_close(&mut self, turn: &mut Turn<'_, impl Link>) {
        if self.handshake.is_established() {
            self.send_control(turn, Kind::Close);
        }
    }
}

impl Remote {
    /// [`HEADER_ONLY`] if the network protects the contents of a packet of `len` bytes, and the peer supports that.
    fn goes_sound(&self, turn: &mut Turn<'_, impl Link>, address: &Address, len: usize) -> u8 {
        let sound = self.features & HEADER_TAGS != 0 && turn.link.is_sound(address, len);
        if sound { HEADER_ONLY } else { 0 }
    }
}
