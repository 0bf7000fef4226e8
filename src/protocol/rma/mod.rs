//! One-sided operations by messages (PROTOCOL.md §4.15): an *initiator* reads or writes memory of a *target*, whose
//! engine moves the bytes.
//!
//! An initiator sends its operations to one target in order. The target carries out each write before it handles any
//! later packet, so that writes and reads see earlier writes. Atomic operations use the same order (§4.16), and are
//! carried out when they arrive.

mod alone;
mod atomic;
mod copies;
mod initiator;
mod keys;
mod operands;
mod packet;
mod ranges;
mod requests;
mod state;
mod target;

use super::state::{Core, Engine};
use crate::protocol::Host;
use crate::transport::{Iface, PeerId, Registration, RemoteKey};
pub(crate) use atomic::{AtomicOp, right_of};
use packet::Prefix;
pub(crate) use packet::RmaPacket;
pub(crate) use ranges::{MAX_RANGES, RemoteAccess, RemoteRange, RemoteRanges, RmaOp};
use requests::Request;
#[cfg(test)]
pub(super) use state::{COPY_MAX, READ_WINDOW};
pub(super) use state::{QUEUE_MAX, Rma};

impl<I: Iface> Engine<I> {
    /// One progress pass for one-sided operations.
    pub(super) fn advance_rma(&mut self, host: &mut impl Host) -> usize {
        // Advertised keys come first: behind the bytes that they make unnecessary they would wait long.
        let mut n = self.grant(host);
        n += self.serve(host);
        n += self.answer();
        for _ in 0..self.core.rma.pumping.len() {
            let Some(peer) = self.core.rma.pumping.pop_front() else { break };
            n += self.pump(peer, host);
            if !self.core.rma.channel(peer).queue.is_empty() {
                self.core.rma.pumping.push_back(peer);
            }
        }
        n
    }
}

impl Core {
    /// A packet of a one-sided operation has come.
    pub(super) fn on_rma(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &[u8],
        host: &mut impl Host,
    ) {
        if self.take_rma(peer, header, payload, host).is_none() {
            self.counts.dropped += 1;
        }
    }

    /// `None`: no udrv sends this.
    fn take_rma(
        &mut self,
        peer: PeerId,
        header: &[u8],
        payload: &[u8],
        host: &mut impl Host,
    ) -> Option<()> {
        match RmaPacket::decode(header)? {
            RmaPacket::Write { tx, data, more, ranges, sources } => {
                let (ranges, local, bytes) = Prefix::read(payload, ranges, sources)?;
                self.on_write(&Request { peer, tx, data, ranges, local }, more, bytes, host)
            }
            RmaPacket::WriteMore { tx, offset } => {
                self.on_write_more(peer, tx, offset, payload, host)
            }
            RmaPacket::Read { tx, ranges, sinks } => {
                let (ranges, local, rest) = Prefix::read(payload, ranges, sinks)?;
                let request = Request { peer, tx, data: None, ranges, local };
                if rest.is_empty() { self.on_read(&request, host) } else { None }
            }
            RmaPacket::ReadData { tx, offset, faulted } => {
                self.on_read_data(peer, tx, (offset, faulted), payload, host)
            }
            RmaPacket::Done { status } => self.on_done(peer, status, payload, host),
            RmaPacket::Push { tx, faulted } => self.on_push(peer, tx, faulted),
            RmaPacket::Fault { tx } => self.on_fault_of_write(peer, tx, host),
            RmaPacket::Atomic { tx, data, fetches, ranges, op, datatype } => {
                let (ranges, local, bytes) = Prefix::read(payload, ranges, 0)?;
                let request = Request { peer, tx, data, ranges, local };
                self.on_atomic(&request, fetches, (op, datatype), bytes, host)
            }
            RmaPacket::Result { tx } => self.on_result(peer, tx, payload, host),
            RmaPacket::Grant { key, base, len, reads, writes, flushes } => {
                let remote = RemoteKey::from_slice(payload)?;
                let registered = Registration { key: remote, reads, writes, confirms: flushes };
                self.on_grant(peer, (key, base, len), registered)
            }
            RmaPacket::Retract { key, base, len } => {
                self.on_retract(peer, (key, base, len));
                Some(())
            }
        }
    }
}
