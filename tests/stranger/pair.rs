//! A transport over pairs of stream sockets, as somebody may write one who does not know the rest of the code: messages, and access to
//! the peer's memory that the peer carries out when it is asked. It is in no product; the gate puts it into the list of
//! transports (scripts/stranger) and runs MPI and fabtests over it.
//!
//! A frame is {length of the rest: u32, kind: u8, header length: u8, header, payload}, little endian.

use crate::memory::SegmentList;
use crate::sys::Errno;
use crate::transport::peers::PeerTable;
use crate::transport::{
    Access, Address, Caps, Contact, Departure, ELSEWHERE, Handler, LaneCaps, LaneId, Lanes, Messages, Mode, OneSided,
    Opening, PeerId, Purpose, Put, Registered, Registration, Remote, RemoteKey, SendError, Sharing,
    Streaming, Transport,
};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that wait for room in a socket before a sender is asked to progress.
const QUEUE_MAX: usize = 1 << 20;
const PAYLOAD_MAX: usize = 64 << 10;
/// For how long an endpoint that closes waits for room.
const LINGER: Duration = Duration::from_secs(2);

const HELLO: u8 = 1;
const MESSAGE: u8 = 2;
const WRITE: u8 = 3;
const READ: u8 = 4;
const DONE: u8 = 5;
const VOID: u8 = 6;
const BYE: u8 = 7;

/// One socket, and what waits on either side of it.
#[derive(Debug)]
struct Stream {
    socket: UnixStream,
    to_send: VecDeque<u8>,
    received: Vec<u8>,
    ended: bool,
}

impl Stream {
    fn new(socket: UnixStream, epoll: &crate::sys::late_set::LateSet) -> Result<Self, Errno> {
        socket.set_nonblocking(true)?;
        epoll.add(socket.as_fd(), ELSEWHERE)?;
        Ok(Self { socket, to_send: VecDeque::new(), received: Vec::new(), ended: false })
    }

    fn push(&mut self, kind: u8, header: &[u8], payload: &[u8]) {
        let len = (2 + header.len() + payload.len()) as u32;
        self.to_send.extend(len.to_le_bytes());
        self.to_send.extend([kind, header.len() as u8]);
        self.to_send.extend(header);
        self.to_send.extend(payload);
    }

    fn flush(&mut self) {
        while !self.to_send.is_empty() {
            match self.socket.write(self.to_send.as_slices().0) {
                Ok(n) => drop(self.to_send.drain(..n)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Takes what has come, up to the end of a frame that is longer than the queue.
    fn fill(&mut self) {
        let mut room = [0; 16 << 10];
        while !self.ended && self.received.len() < QUEUE_MAX.max(self.frame().unwrap_or(0)) {
            match self.socket.read(&mut room) {
                Ok(0) => self.ended = true,
                Ok(n) => self.received.extend_from_slice(room.get(..n).unwrap_or(&[])),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    self.ended = e.kind() != ErrorKind::WouldBlock;
                    return;
                }
            }
        }
    }

    /// Bytes of the next frame, with its length.
    fn frame(&self) -> Option<usize> {
        Some(4 + u32::from_le_bytes(*self.received.first_chunk()?) as usize)
    }

    /// The next frame that is here as a whole: kind, header, payload.
    fn next(&mut self) -> Option<(u8, Vec<u8>, Vec<u8>)> {
        let end = self.frame()?;
        let frame = self.received.get(4..end)?;
        let (kind, header) = (*frame.first()?, usize::from(*frame.get(1)?));
        let (header, payload) = frame.get(2..)?.split_at_checked(header)?;
        let frame = (kind, header.to_vec(), payload.to_vec());
        self.received.drain(..end);
        Some(frame)
    }
}

/// What we have asked a peer to do to its memory, in this order: the token, and where what is read belongs.
type Asked = VecDeque<(u64, Option<SegmentList>)>;

/// The kind of our keys: the number of a region.
const KEY: u8 = 200;
const LANE: LaneId = LaneId::of(Pair::KEYS);

/// The transport of one endpoint.
#[derive(Debug)]
pub(crate) struct Pair {
    me: Address,
    host: crate::transport::LocalHost,
    epoll: Arc<crate::sys::late_set::LateSet>,
    listener: UnixListener,
    /// By peer: what we send by, and what was asked for there.
    outgoing: Vec<Option<(Stream, Asked)>>,
    /// Of peers that have told their address, and others.
    incoming: Vec<(Stream, Option<PeerId>)>,
    /// Memory that a peer may access, by number.
    exposed: Vec<Option<(PeerId, SegmentList)>>,
}

fn name(port: u16) -> Result<SocketAddr, Errno> {
    Ok(SocketAddr::from_abstract_name(format!("udrv-pair/{port}"))?)
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(8 * at..)?.first_chunk()?))
}

impl Pair {
    fn out(&mut self, peer: PeerId) -> Option<&mut (Stream, Asked)> {
        self.outgoing.get_mut(peer.index())?.as_mut()
    }

    /// Carries out a peer's request to read or write `len` bytes of exposed memory.
    fn carry_out(
        &self,
        peer: PeerId,
        kind: u8,
        request: &[u8],
        payload: &[u8],
    ) -> Option<Vec<u8>> {
        let [number, offset, len] = [word(request, 0)?, word(request, 1)?, word(request, 2)?];
        let (_, memory) = self.exposed.get(number as usize)?.filter(|(to, _)| *to == peer)?;
        offset.checked_add(len).filter(|end| *end <= memory.len() as u64)?;
        let part = memory.slice(offset as usize, len as usize);
        let mut bytes = vec![0; if kind == READ { len as usize } else { 0 }];
        match kind {
            READ => _ = part.copy_out(0, &mut bytes),
            _ => _ = part.copy_in(0, payload),
        }
        Some(bytes)
    }

    /// Asks a peer to read or write its memory.
    fn ask(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        at: &Remote,
        (kind, token): (u8, u64),
    ) -> Result<Access, SendError> {
        let stale = SendError::Unreachable(Errno(libc::ESTALE));
        let number = at.key.word(0).ok_or(stale)?;
        let (stream, asked) = self.out(peer).ok_or(stale)?;
        if stream.to_send.len() >= QUEUE_MAX {
            return Err(SendError::Again);
        }
        let words = [number, at.offset, local.len() as u64].map(u64::to_le_bytes);
        let mut payload = vec![0; if kind == READ { 0 } else { local.len() }];
        local.copy_out(0, &mut payload);
        stream.push(kind, words.as_flattened(), &payload);
        asked.push_back((token, (kind == READ).then_some(*local)));
        stream.flush();
        Ok(Access::Begun)
    }

    /// What peers have sent by the sockets that they made.
    fn take_in(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        for (mut stream, mut peer) in std::mem::take(&mut self.incoming) {
            stream.fill();
            let mut departure = Departure::Failed(Errno(libc::EHOSTDOWN));
            while let Some((kind, header, payload)) = stream.next() {
                n += 1;
                match (kind, peer) {
                    (HELLO, None) => {
                        let text = String::from_utf8_lossy(&payload);
                        let address = text.parse().ok().map(Address);
                        peer = address.and_then(|address| peers.intern(&address));
                        if let (Some(peer), Some(address)) = (peer, address) {
                            handler.on_peer(peer, &address);
                        }
                    }
                    (MESSAGE, Some(peer)) => handler.on_message(peer, &header, &payload),
                    (READ | WRITE, Some(peer)) => match self.carry_out(peer, kind, &header, &payload) {
                        Some(bytes) => stream.push(DONE, &[], &bytes),
                        None => stream.push(VOID, &[], &[]),
                    },
                    (BYE, _) => departure = Departure::Closed,
                    _ => stream.ended = true,
                }
            }
            stream.flush();
            match (stream.ended, peer) {
                (false, _) => self.incoming.push((stream, peer)),
                (true, Some(peer)) => {
                    self.outgoing.get_mut(peer.index()).map(Option::take);
                    let theirs = |one: &mut (PeerId, SegmentList)| one.0 == peer;
                    self.exposed.iter_mut().for_each(|one| _ = one.take_if(theirs));
                    handler.on_departure(peer, departure);
                }
                (true, None) => {}
            }
        }
        n
    }

    /// What became of our requests.
    fn take_answers(&mut self, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        for (at, slot) in self.outgoing.iter_mut().enumerate() {
            let Some((stream, asked)) = slot else { continue };
            let peer = PeerId(at as u32);
            stream.flush();
            stream.fill();
            while let Some((kind, _, payload)) = stream.next() {
                n += 1;
                match (kind, asked.pop_front()) {
                    (DONE, Some((token, to))) => {
                        to.map(|to| to.copy_in(0, &payload));
                        handler.on_done(peer, token);
                    }
                    _ => {
                        asked.clear();
                        handler.on_lane_lost(peer, LANE);
                    }
                }
            }
        }
        n
    }
}

impl Messages for Pair {
    fn caps(&self, _: PeerId) -> Caps {
        Caps {
            short_max: 4096,
            bcopy_max: PAYLOAD_MAX,
            fragment_max: PAYLOAD_MAX,
            atomics: Some(true),
            collectives: Some(true),
            ..Caps::UNKNOWN
        }
    }

    fn send(
        &mut self,
        peer: PeerId,
        _: Mode,
        header: &[u8],
        len: usize,
        mut pack: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), SendError> {
        let lost = SendError::Unreachable(Errno(libc::ENOTCONN));
        let (stream, _) = self.out(peer).ok_or(lost)?;
        if stream.to_send.len() >= QUEUE_MAX {
            return Err(SendError::Again);
        }
        let mut payload = vec![0; len];
        pack(0, &mut payload);
        stream.push(MESSAGE, header, &payload);
        stream.flush();
        Ok(())
    }
}

impl OneSided for Pair {
    fn lanes(&self, _: PeerId) -> Lanes {
        Lanes::from(LaneCaps {
            read_min: Some(1),
            write_min: Some(1),
            register_max: usize::MAX,
            ..LaneCaps::of_host(LANE, 10_000, 1000)
        })
    }

    fn register(
        &mut self,
        peer: PeerId,
        _: LaneId,
        memory: &SegmentList,
        purpose: Purpose,
    ) -> Registered {
        let Purpose::Region { reads, writes, .. } = purpose else { return Registered::No };
        let key = RemoteKey::new(KEY).with(self.exposed.len() as u64);
        self.exposed.push(Some((peer, *memory)));
        Registered::Yes(Registration { key, reads, writes, confirms: true })
    }

    fn invalidate(&mut self, _: PeerId, key: &RemoteKey) -> bool {
        let number = key.word(0).map_or(usize::MAX, |number| number as usize);
        self.exposed.get_mut(number).map(Option::take);
        false
    }

    fn put(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        to: &Remote,
        how: Put,
    ) -> Result<Access, SendError> {
        self.ask(peer, local, to, (WRITE, how.token))
    }

    fn get(
        &mut self,
        peer: PeerId,
        local: &SegmentList,
        from: &Remote,
        token: u64,
    ) -> Result<Access, SendError> {
        self.ask(peer, local, from, (READ, token))
    }

    fn flush_puts(&mut self, peer: PeerId, at: &Remote, token: u64) -> Result<Access, SendError> {
        self.ask(peer, &SegmentList::EMPTY, at, (WRITE, token))
    }
}

impl Streaming for Pair {}
impl Sharing for Pair {}

impl Transport for Pair {
    const NAME: &'static str = "socket pairs";
    const KEYS: &'static [u8] = &[KEY];

    fn open(opening: &mut Opening<'_>) -> Result<Option<Self>, Errno> {
        let listener = UnixListener::bind_addr(&name(opening.me.port())?)?;
        listener.set_nonblocking(true)?;
        opening.epoll.add(listener.as_fd(), ELSEWHERE)?;
        Ok(Some(Self {
            me: opening.me,
            host: opening.host.clone(),
            epoll: opening.epoll.clone(),
            listener,
            outgoing: Vec::new(),
            incoming: Vec::new(),
            exposed: Vec::new(),
        }))
    }

    fn connect(&mut self, peer: PeerId, to: &Address, _: bool) -> Result<Contact, SendError> {
        if !self.host.owns(to.0.ip()) {
            return Ok(Contact::Elsewhere);
        }
        let me = self.me.0.to_string();
        let made = name(to.port())
            .and_then(|name| Ok(UnixStream::connect_addr(&name)?))
            .and_then(|socket| Stream::new(socket, &self.epoll));
        let Ok(mut stream) = made else { return Ok(Contact::Missing(Errno(libc::ECONNREFUSED))) };
        stream.push(HELLO, &[], me.as_bytes());
        if self.outgoing.len() <= peer.index() {
            self.outgoing.resize_with(peer.index() + 1, || None);
        }
        if let Some(slot) = self.outgoing.get_mut(peer.index()) {
            *slot = Some((stream, VecDeque::new()));
        }
        Ok(Contact::Linked)
    }

    fn is_connected(&self, peer: PeerId) -> bool {
        self.outgoing.get(peer.index()).is_some_and(Option::is_some)
    }

    fn hears(&self, peer: PeerId) -> bool {
        self.incoming.iter().any(|(_, one)| *one == Some(peer))
    }

    fn has_its_turn(&mut self, _: bool) -> bool {
        !self.incoming.is_empty() || !self.outgoing.is_empty()
    }

    fn turn(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) -> usize {
        while let Ok((socket, _)) = self.listener.accept() {
            let stream = Stream::new(socket, &self.epoll);
            self.incoming.extend(stream.ok().map(|stream| (stream, None)));
        }
        self.take_answers(handler) + self.take_in(peers, handler)
    }

    fn every_ns(_: bool, _: bool) -> u64 {
        20_000
    }

    fn sleep(&mut self) -> bool {
        let idle = |stream: &Stream| stream.to_send.is_empty();
        self.outgoing.iter().flatten().all(|(stream, _)| idle(stream))
            && self.incoming.iter().all(|(stream, _)| idle(stream))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let begun = Instant::now();
        for (stream, _) in self.outgoing.iter_mut().flatten() {
            stream.push(BYE, &[], &[]);
            while !stream.to_send.is_empty() && begun.elapsed() < LINGER {
                stream.flush();
                std::thread::yield_now();
            }
        }
    }
}
