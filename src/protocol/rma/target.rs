//! The target's side: the endpoint whose memory is read and written. Its engine moves the bytes in chunks, and checks
//! the peer's rights again for each chunk.

use super::alone::write_min;
use super::packet::RmaPacket;
use super::ranges::{MAX_RANGES, RemoteAccess, RemoteRanges};
use super::requests::{Place, Read, Request, Write};
use super::state::{Answer, BATCH, FLUSH_AFTER, PULL_WINDOW, READ_WINDOW, status_of};
use crate::memory::keys::{Denied, Granted, Right};
use crate::protocol::Host;
use crate::protocol::message::{Payload, is_refusal};
use crate::protocol::state::{Core, Engine};
use crate::sys::Errno;
use crate::sys::numbers::NumberSet;
use crate::transport::{Caps, Iface, Mode, PeerId, SendError, piece_of};

/// Operations that one DONE names, at most.
const NAMES_MAX: usize = 32;

/// Outcome of one step of an operation.
enum Step {
    /// Nothing could be moved now.
    Again,
    /// Some bytes were moved.
    Moved,
    /// The operation has ended, or continues in another way.
    Done,
}

impl Core {
    pub(super) fn answer_with(&mut self, request: &Request, answer: Answer) {
        self.rma.answers.push_back((request.peer, request.tx, answer));
    }

    /// Reports an access of a peer that is complete.
    pub(super) fn accessed(&mut self, request: &Request, place: &Place, host: &mut impl Host) {
        let (regions, n) = place.distinct();
        let source = self.peers.source(request.peer, host);
        host.accessed(&RemoteAccess {
            right: place.right,
            regions: regions.get(..n).unwrap_or(&[]),
            len: request.ranges.total() as usize,
            data: request.data,
            source,
        });
    }

    /// Notes a request whose ranges may be worth advertising. `whole`: a short write in one message, of which only
    /// every 16th counts.
    fn offer(&mut self, request: &Request, whole: bool) {
        let (total, long) = (request.ranges.total(), self.limits.alone_min as u64);
        let counts = whole && total >= write_min(&self.limits);
        if total >= long || (counts && self.rma.told.asks_often(request.peer, total, || Some(0))) {
            self.rma.told.offer(request.peer, &request.ranges);
        }
    }

    fn serve_later(&mut self, peer: PeerId) {
        let inbound = self.rma.inbound.entry(peer).or_default();
        if inbound.has_work() && !inbound.served {
            inbound.served = true;
            self.rma.serving.push_back(peer);
        }
    }

    /// WRITE: `more` is the length of the write if its bytes do not all come with it. `None`: no udrv sends this.
    pub(super) fn on_write(
        &mut self,
        request: &Request,
        more: Option<u64>,
        bytes: &[u8],
        host: &mut impl Host,
    ) -> Option<()> {
        let total = request.ranges.total();
        let sources = request.local.as_slice();
        let pulls = more.is_some() && !sources.is_empty();
        let described: u64 = sources.iter().map(|range| range.len).sum();
        let good = match more {
            None => sources.is_empty() && bytes.len() as u64 == total,
            Some(len) if pulls => len == total && described == total && bytes.is_empty(),
            Some(len) => len == total && bytes.len() as u64 <= total,
        };
        let waiting = self.rma.inbound.get(&request.peer).map_or(0, |i| i.writes.len());
        // The initiator sends nothing behind an unfinished write but writes that are to be fetched.
        let in_turn = waiting == 0 || (pulls && waiting < PULL_WINDOW as usize);
        if !good || !in_turn {
            return None;
        }
        let found = Place::find(&request.ranges, Right::Write, host);
        if more.is_none() {
            self.write_whole(request, found, bytes, host);
        } else {
            self.begin_write(request, found, pulls, bytes, host);
        }
        Some(())
    }

    /// A write whose bytes have all come with it.
    fn write_whole(
        &mut self,
        request: &Request,
        found: Result<Place, Denied>,
        bytes: &[u8],
        host: &mut impl Host,
    ) {
        let written = found.and_then(|place| {
            place.fill(0, bytes, host)?;
            Ok(place)
        });
        match written {
            Ok(place) => {
                self.offer(request, true);
                self.answer_with(request, Answer::Done(0));
                self.accessed(request, &place, host);
            }
            Err(denied) => self.answer_with(request, Answer::Done(status_of(denied))),
        }
    }

    /// Begins a write of which at most the first `bytes` are here.
    fn begin_write(
        &mut self,
        request: &Request,
        found: Result<Place, Denied>,
        pulls: bool,
        bytes: &[u8],
        host: &mut impl Host,
    ) {
        let (place, refused) = match found {
            Ok(place) => {
                self.offer(request, false);
                (place, None)
            }
            Err(denied) if pulls => {
                return self.answer_with(request, Answer::Done(status_of(denied)));
            }
            // The bytes of a refused write are dropped as they come.
            Err(denied) => {
                let (ranges, regions, right) = (request.ranges, [0; MAX_RANGES], Right::Write);
                (Place { ranges, regions, right, holes: false }, Some(status_of(denied)))
            }
        };
        let write = Write { request: *request, place, done: 0, pulls, refused };
        self.rma.inbound.entry(request.peer).or_default().writes.push_back(write);
        if pulls {
            self.serve_later(request.peer);
        } else {
            self.take_bytes(request.peer, bytes, host);
        }
    }

    /// WRITE_MORE: more bytes of the write in progress.
    pub(super) fn on_write_more(
        &mut self,
        peer: PeerId,
        tx: u64,
        offset: u64,
        bytes: &[u8],
        host: &mut impl Host,
    ) -> Option<()> {
        let write = self.rma.inbound.get(&peer)?.writes.front()?;
        let rest = write.request.ranges.total() - write.done;
        let next = !write.pulls && write.request.tx == tx && write.done == offset;
        if !next || bytes.is_empty() || bytes.len() as u64 > rest {
            return None;
        }
        self.take_bytes(peer, bytes, host);
        Some(())
    }

    fn take_bytes(&mut self, peer: PeerId, bytes: &[u8], host: &mut impl Host) {
        let front = self.rma.inbound.get_mut(&peer).and_then(|i| i.writes.front_mut());
        let Some(write) = front else { return };
        if write.refused.is_none() {
            write.refused = write.place.fill(write.done, bytes, host).err().map(status_of);
        }
        write.done += bytes.len() as u64;
        if write.done >= write.request.ranges.total() {
            let status = write.refused.unwrap_or(0);
            self.end_write(peer, status, host);
        }
    }

    /// Ends the first write of a peer.
    fn end_write(&mut self, peer: PeerId, status: u32, host: &mut impl Host) {
        let Some(inbound) = self.rma.inbound.get_mut(&peer) else { return };
        let Some(Write { request, place, .. }) = inbound.writes.pop_front() else { return };
        self.answer_with(&request, Answer::Done(status));
        if status == 0 {
            self.accessed(&request, &place, host);
        }
        self.tidy(peer);
    }

    /// FAULT: the initiator cannot read the bytes of the first write either, or not those that are missing.
    pub(super) fn on_fault_of_write(
        &mut self,
        peer: PeerId,
        tx: u64,
        host: &mut impl Host,
    ) -> Option<()> {
        let write = self.rma.inbound.get(&peer)?.writes.front()?;
        let awaited = !write.pulls && write.request.tx == tx;
        let status = write.refused.unwrap_or(libc::EFAULT as u32);
        awaited.then(|| self.end_write(peer, status, host))
    }

    fn end_read(&mut self, peer: PeerId, status: Option<u32>, host: &mut impl Host) {
        let Some(inbound) = self.rma.inbound.get_mut(&peer) else { return };
        let Some(Read { request, place, .. }) = inbound.reads.pop_front() else { return };
        if let Some(status) = status {
            self.answer_with(&request, Answer::Done(status));
        }
        if status.unwrap_or(0) == 0 {
            self.accessed(&request, &place, host);
        }
        self.tidy(peer);
    }

    /// Forgets a peer without unfinished operations, or queues it to be served.
    fn tidy(&mut self, peer: PeerId) {
        match self.rma.inbound.get(&peer) {
            Some(inbound) if inbound.is_empty() && !inbound.served => {
                self.rma.inbound.remove(&peer);
            }
            Some(_) => self.serve_later(peer),
            None => {}
        }
    }

    pub(super) fn on_read(&mut self, request: &Request, host: &mut impl Host) -> Option<()> {
        let sinks = request.local.as_slice();
        let described: u64 = sinks.iter().map(|range| range.len).sum();
        let total = request.ranges.total();
        if !sinks.is_empty() && described != total {
            return None;
        }
        let waiting = self.rma.inbound.get(&request.peer).map_or(0, |i| i.reads.len());
        if waiting >= READ_WINDOW as usize {
            return None;
        }
        match Place::find(&request.ranges, Right::Read, host) {
            Ok(place) if total > 0 => {
                self.offer(request, false);
                let puts = !sinks.is_empty();
                let read = Read { request: *request, place, done: 0, puts, faulted: false };
                self.rma.inbound.entry(request.peer).or_default().reads.push_back(read);
                self.serve_later(request.peer);
            }
            Ok(place) => {
                self.answer_with(request, Answer::Done(0));
                self.accessed(request, &place, host);
            }
            Err(denied) => self.answer_with(request, Answer::Done(status_of(denied))),
        }
        Some(())
    }
}

impl<I: Iface> Engine<I> {
    /// Moves bytes for peers, at most a chunk for each.
    pub(super) fn serve(&mut self, host: &mut impl Host) -> usize {
        let mut n = 0;
        for _ in 0..self.core.rma.serving.len() {
            let Some(peer) = self.core.rma.serving.pop_front() else { break };
            if !matches!(self.fetch(peer, host), Step::Again) {
                n += 1;
            }
            if !matches!(self.give(peer, host), Step::Again) {
                n += 1;
            }
            if let Some(inbound) = self.core.rma.inbound.get_mut(&peer) {
                inbound.served = false;
                self.core.tidy(peer);
            }
        }
        n
    }

    /// Fetches a chunk of the first write of `peer`.
    fn fetch(&mut self, peer: PeerId, host: &mut impl Host) -> Step {
        let front = self.core.rma.inbound.get(&peer).and_then(|inbound| inbound.writes.front());
        let Some(write) = front.filter(|write| write.pulls) else { return Step::Again };
        let (done, place, sources) = (write.done, write.place, write.request.local);
        let total = write.request.ranges.total();
        let caps = self.iface.caps(peer);
        if !caps.get {
            self.ask_for_bytes(peer, false);
            return Step::Done;
        }
        let next = (done, self.core.limits.bulk_chunk);
        let piece = match place.piece_for(caps.itself, next, host) {
            Ok(piece) => piece.memory,
            Err(denied) => {
                self.core.end_write(peer, status_of(denied), host);
                return Step::Done;
            }
        };
        match sources.get(&mut self.iface, peer, &piece, done as usize) {
            Ok(moved) => {
                self.core.counts.pulled_bytes += moved as u64;
                let done = done.saturating_add(moved as u64);
                let inbound = self.core.rma.inbound.get_mut(&peer);
                if let Some(write) = inbound.and_then(|inbound| inbound.writes.front_mut()) {
                    write.done = done;
                }
                if done < total {
                    return Step::Moved;
                }
                self.core.end_write(peer, 0, host);
                Step::Done
            }
            Err(SendError::Again) => Step::Again,
            Err(SendError::Unreachable(errno)) => {
                // The initiator may be able to read memory that other processes cannot.
                let faulted = errno.0 == libc::EFAULT;
                if faulted && !place.is_accessible(done, total, host) {
                    self.core.end_write(peer, status_of(Denied::Access), host);
                } else if faulted || is_refusal(errno) {
                    self.ask_for_bytes(peer, faulted);
                } else {
                    self.core.end_write(peer, status_of_errno(errno), host);
                }
                Step::Done
            }
        }
    }

    /// Asks the initiator for the bytes of the first write. `faulted`: a copy from its memory failed with EFAULT.
    fn ask_for_bytes(&mut self, peer: PeerId, faulted: bool) {
        let inbound = self.core.rma.inbound.get_mut(&peer);
        if let Some(write) = inbound.and_then(|inbound| inbound.writes.front_mut()) {
            write.pulls = false;
            write.done = 0;
            let request = write.request;
            self.core.answer_with(&request, Answer::Push { faulted });
        }
    }

    /// Moves a chunk of the first read of `peer` to it.
    fn give(&mut self, peer: PeerId, host: &mut impl Host) -> Step {
        let front = self.core.rma.inbound.get(&peer).and_then(|inbound| inbound.reads.front());
        let Some(read) = front else { return Step::Again };
        if read.puts { self.put_read(peer, host) } else { self.send_read(peer, host) }
    }

    fn put_read(&mut self, peer: PeerId, host: &mut impl Host) -> Step {
        let inbound = self.core.rma.inbound.get_mut(&peer);
        let Some(read) = inbound.and_then(|i| i.reads.front_mut()) else { return Step::Again };
        let (caps, next) = (self.iface.caps(peer), (read.done, self.core.limits.bulk_chunk));
        let piece = match read.place.piece_for(caps.itself, next, host) {
            Ok(piece) => piece.memory,
            Err(denied) => {
                self.core.end_read(peer, Some(status_of(denied)), host);
                return Step::Done;
            }
        };
        let put = if caps.put {
            read.request.local.put(&mut self.iface, peer, &piece, read.done as usize)
        } else {
            Err(SendError::Unreachable(Errno(libc::EPERM)))
        };
        match put {
            Ok(moved) => {
                read.done = read.done.saturating_add(moved as u64);
                self.core.counts.pushed_bytes += moved as u64;
                if read.done < read.request.ranges.total() {
                    return Step::Moved;
                }
                self.core.end_read(peer, Some(0), host);
                Step::Done
            }
            Err(SendError::Again) => Step::Again,
            Err(SendError::Unreachable(errno)) => {
                let total = read.request.ranges.total();
                let faulted = errno.0 == libc::EFAULT;
                let own = faulted && !read.place.is_accessible(read.done, total, host);
                if own || !(faulted || is_refusal(errno)) {
                    let status = status_of_errno(errno);
                    let status = if own { status_of(Denied::Access) } else { status };
                    self.core.end_read(peer, Some(status), host);
                    return Step::Done;
                }
                // The initiator counts only the bytes that are sent: start from offset 0.
                (read.puts, read.faulted, read.done) = (false, faulted, 0);
                Step::Moved
            }
        }
    }

    fn send_read(&mut self, peer: PeerId, host: &mut impl Host) -> Step {
        let caps = self.iface.caps(peer);
        let mut outcome = Step::Again;
        for i in 0..BATCH {
            match self.send_piece(peer, &caps, host) {
                Some(Step::Again) | None => break,
                Some(step) => outcome = step,
            }
            if i == FLUSH_AFTER {
                self.iface.flush();
            }
        }
        if !matches!(outcome, Step::Again) {
            self.iface.flush();
        }
        outcome
    }

    /// Sends a piece of the first read of `peer`. `None`: nothing is to be sent.
    fn send_piece(&mut self, peer: PeerId, caps: &Caps, host: &mut impl Host) -> Option<Step> {
        let inbound = self.core.rma.inbound.get_mut(&peer)?;
        let read = inbound.reads.front_mut().filter(|read| !read.puts)?;
        let most = piece_of(read.request.ranges.total() as usize, caps.fragment_max);
        let piece = read.place.piece_for(true, (read.done, most), host);
        let piece = match piece.and_then(on_host) {
            Ok(piece) => piece,
            Err(denied) => {
                self.core.end_read(peer, Some(status_of(denied)), host);
                return Some(Step::Done);
            }
        };
        let (tx, offset, faulted) = (read.request.tx, read.done, read.faulted);
        let header = RmaPacket::ReadData { tx, offset, faulted }.encode();
        let pack = |at: usize, to: &mut [u8]| {
            piece.copy_out(at, to);
        };
        let sent = self.iface.send(peer, Mode::Fragment, header.as_slice(), piece.len(), pack);
        match sent.map_err(SendError::lasting) {
            Ok(()) => {
                read.done += piece.len() as u64;
                self.core.counts.fragment_bytes += piece.len() as u64;
                if read.done >= read.request.ranges.total() {
                    let ranges = read.request.ranges;
                    self.core.end_read(peer, None, host);
                    self.offer_short(peer, &ranges);
                }
                Some(Step::Moved)
            }
            Err(None) => Some(Step::Again),
            // The peer that waited for these bytes has departed.
            Err(Some(_)) => {
                inbound.reads.clear();
                Some(Step::Done)
            }
        }
    }

    /// Notes the ranges of a read that was served by messages, if it is short. Longer ones are noted as requests.
    fn offer_short(&mut self, peer: PeerId, ranges: &RemoteRanges) {
        let (len, long) = (ranges.total(), self.core.limits.alone_min as u64);
        let least = || {
            let lanes = self.iface.lanes(peer);
            let least = lanes.iter().filter_map(|lane| lane.read_min).min()? as u64;
            Some(least).filter(|least| *least < long)
        };
        let told = &mut self.core.rma.told;
        if len < long && told.asks_often(peer, len, least) {
            told.offer(peer, ranges);
        }
    }

    /// Sends DONE and other answers while there is room. One DONE names operations of one peer with the same status.
    pub(super) fn answer(&mut self) -> usize {
        let mut n = 0;
        let mut full: NumberSet<PeerId> = NumberSet::default();
        let mut left = self.core.rma.answers.len();
        while left > 0 {
            let Some(first) = self.core.rma.answers.front().copied() else { break };
            let peer = first.0;
            if full.contains(&peer) {
                self.core.rma.answers.rotate_left(1);
                left -= 1;
                continue;
            }
            let (sent, count) = self.say(first, left);
            match sent.map_err(SendError::lasting) {
                Ok(()) => n += count,
                Err(None) => {
                    full.insert(peer);
                    continue;
                }
                // The peer that waited for it has departed.
                Err(Some(_)) => self.core.counts.dropped += count as u64,
            }
            for (_, _, answer) in self.core.rma.answers.drain(..count) {
                if let Answer::Result(key) = answer {
                    self.core.rma.results.remove(key);
                }
            }
            left -= count;
        }
        n
    }

    fn say_one(&mut self, peer: PeerId, packet: &RmaPacket) -> Result<(), SendError> {
        self.iface.send(peer, Mode::Short, packet.encode().as_slice(), 0, |_, _| ())
    }

    /// Sends the first answer, and those of the first `left` answers that go with it. Returns their number.
    fn say(
        &mut self,
        (peer, tx, answer): (PeerId, u64, Answer),
        left: usize,
    ) -> (Result<(), SendError>, usize) {
        let status = match answer {
            Answer::Done(status) => status,
            Answer::Push { faulted } => {
                return (self.say_one(peer, &RmaPacket::Push { tx, faulted }), 1);
            }
            Answer::Fault => return (self.say_one(peer, &RmaPacket::Fault { tx }), 1),
            Answer::Result(key) => return (self.send_result(peer, tx, key), 1),
        };
        let header = RmaPacket::Done { status }.encode();
        let header = header.as_slice();
        let mut names = [[0; 8]; NAMES_MAX];
        let room = self.iface.caps(peer).short_max.saturating_sub(header.len()) / size_of::<u64>();
        let first = self.core.rma.answers.iter().take(left.min(room));
        let same = first.take_while(|(to, _, other)| (*to, *other) == (peer, answer));
        let mut count = 0;
        for (slot, (_, tx, _)) in names.iter_mut().zip(same) {
            *slot = tx.to_le_bytes();
            count += 1;
        }
        let names = names.as_flattened();
        let pack = |at: usize, to: &mut [u8]| {
            if let Some(from) = names.get(at..at + to.len()) {
                to.copy_from_slice(from);
            }
        };
        (self.iface.send(peer, Mode::Short, header, count * size_of::<u64>(), pack), count)
    }
}

/// What packets can be filled from.
fn on_host(piece: Granted) -> Result<Payload, Denied> {
    let mut bytes = Payload::Lent(piece.memory);
    if bytes.bring_to_host(&mut 0) { Ok(bytes) } else { Err(Denied::Device) }
}

fn status_of_errno(errno: Errno) -> u32 {
    u32::try_from(errno.0).unwrap_or(libc::EIO as u32)
}
