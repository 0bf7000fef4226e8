//! Messages between processes of one node: one ring per direction in shared memory, and
//! cross-memory attach for bulk.
//!
//! A sender makes a segment, connects to the receiver's unix socket and passes the segment along;
//! it may write messages at once, before the receiver has looked. The kernel proves who is at the
//! other end (same kernel by the socket, same user by its credentials) and tells when the other
//! process ends: the socket closes. Nothing has a name in a file system.

mod hello;
mod layout;
mod ring;

use super::peers::PeerTable;
use super::{Address, Caps, Departure, Handler, PeerId, SendError};
use crate::config::CmaPolicy;
use crate::memory::SegmentList;
use crate::sys::cma::{self, Range};
use crate::sys::event::{Doorbell, Epoll};
use crate::sys::shared_memory::SharedMemory;
use crate::sys::{Errno, clock, process, unix};
use crate::telemetry::log;
use hello::{Hello, Reject, RejectReason, Welcome};
use layout::{FRUGAL, GENEROUS, SLOT_ROOM};
use ring::{Consumer, Popped, Producer, Wake};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

/// Messages taken from one ring before the next ring has its turn.
const BATCH: usize = 16;
/// Outgoing links that get a large segment; later ones get a small one.
const GENEROUS_LINKS: usize = 16;
/// Polls without a message after which the sockets are looked at.
const IDLE_POLLS: u32 = 128;
/// Polls after which the sockets are looked at in any case.
const BUSY_POLLS: u32 = 4096;
/// Between two checks that the processes of all links exist, nanoseconds.
const LIVENESS_NS: u64 = 500_000_000;

const TOKEN_DOORBELL: u64 = 0;
const TOKEN_LISTENER: u64 = 1;
const TOKEN_GREETING: u64 = 1 << 32;
const TOKEN_OUTBOUND: u64 = 2 << 32;
const TOKEN_INBOUND: u64 = 3 << 32;
const TOKEN_PROCESS: u64 = 4 << 32;

/// The abstract socket name of the endpoint that has `port` on this node.
fn socket_name(port: u16) -> String {
    format!("udrv/{port}")
}

#[derive(Debug)]
struct Outbound {
    producer: Producer,
    socket: OwnedFd,
    pid: i32,
    /// The receiver's doorbell, once its welcome was read.
    doorbell: Option<Doorbell>,
}

/// Tells when a peer's process ends although a child it forked keeps its sockets open.
#[derive(Debug)]
struct Watch {
    peer: PeerId,
    pid: i32,
    /// Without it the process is looked at now and then.
    fd: Option<OwnedFd>,
}

#[derive(Debug)]
struct Inbound {
    peer: PeerId,
    consumer: Consumer,
    socket: OwnedFd,
    pid: i32,
    nonce: u64,
    can_get: bool,
    can_put: bool,
}

impl Inbound {
    /// Whether this link is of another life than the one of process `listener`.
    fn has_ended(&self, listener: i32) -> bool {
        self.pid != listener
            || matches!(unix::receive(self.socket.as_fd(), &mut [0]), unix::Received::Closed)
    }
}

/// The shared-memory interface of one endpoint.
#[derive(Debug)]
pub(crate) struct Shm {
    me: Address,
    nonce: u64,
    listener: OwnedFd,
    doorbell: Doorbell,
    epoll: Epoll,
    /// [0] holds `nonce` for peers to read, [1] is theirs to write: probes of cross-memory attach.
    probe: Box<[AtomicU64; 2]>,
    cma: CmaPolicy,
    outbound: Vec<Option<Box<Outbound>>>,
    outbound_count: usize,
    inbound: Vec<Inbound>,
    /// Accepted sockets whose hello has not arrived yet.
    greetings: Vec<Option<OwnedFd>>,
    /// One per peer that has links.
    watches: Vec<Watch>,
    /// Peers that broke the protocol while being polled.
    broken: Vec<PeerId>,
    /// Peers whose incoming link was found to be of an earlier life.
    stale: Vec<PeerId>,
    idle_polls: u32,
    busy_polls: u32,
    liveness_at: u64,
    pressure: bool,
    waits: bool,
    sleeping: bool,
    owner: i32,
}

impl Shm {
    /// Opens the interface under the port of `me`. Errors: EADDRINUSE when another endpoint of this
    /// node has the port; EMFILE, ENFILE, ENOMEM.
    pub(crate) fn open(me: Address, cma: CmaPolicy) -> Result<Self, Errno> {
        let listener = unix::listen(&socket_name(me.port()))?;
        let doorbell = Doorbell::new()?;
        let epoll = Epoll::new()?;
        epoll.add(doorbell.fd(), TOKEN_DOORBELL)?;
        epoll.add(listener.as_fd(), TOKEN_LISTENER)?;
        let nonce = process::random_u64() | 1;
        if cma != CmaPolicy::Off && process::yama_ptrace_scope() == Some(1) {
            process::allow_attach_by_same_user();
        }
        Ok(Self {
            me,
            nonce,
            listener,
            doorbell,
            epoll,
            probe: Box::new([AtomicU64::new(nonce), AtomicU64::new(0)]),
            cma,
            outbound: Vec::new(),
            outbound_count: 0,
            inbound: Vec::new(),
            greetings: Vec::new(),
            watches: Vec::new(),
            broken: Vec::new(),
            stale: Vec::new(),
            idle_polls: 0,
            busy_polls: 0,
            liveness_at: 0,
            pressure: false,
            waits: false,
            sleeping: false,
            owner: process::pid(),
        })
    }

    /// The descriptor that becomes readable when something happens while asleep.
    pub(crate) fn epoll(&self) -> &Epoll {
        &self.epoll
    }

    fn out(&self, peer: PeerId) -> Option<&Outbound> {
        self.outbound.get(peer.index())?.as_deref()
    }

    fn inbound_of(&self, peer: PeerId) -> Option<&Inbound> {
        self.inbound.iter().find(|link| link.peer == peer)
    }

    /// True once messages can be sent to `peer`.
    pub(crate) fn is_connected(&self, peer: PeerId) -> bool {
        self.out(peer).is_some()
    }

    /// Makes the link to `peer`, which listens at `address`. Errors: Again when its backlog is full;
    /// ECONNREFUSED when nobody listens, EPERM when it is another user's, EMFILE, ENOMEM, ENOSPC.
    pub(crate) fn connect(&mut self, peer: PeerId, address: &Address) -> Result<(), SendError> {
        match self.try_connect(peer, address) {
            Ok(()) => Ok(()),
            Err(e) if e.is_would_block() => Err(SendError::Again),
            Err(e) => Err(SendError::Unreachable(e)),
        }
    }

    fn try_connect(&mut self, peer: PeerId, address: &Address) -> Result<(), Errno> {
        let socket = unix::connect(&socket_name(address.port()))?;
        let credentials = unix::credentials(socket.as_fd())?;
        if credentials.uid != process::effective_uid() {
            log::warn(format_args!(
                "{address} belongs to user {}, not to {}: refused",
                credentials.uid,
                process::effective_uid()
            ));
            return Err(Errno(libc::EPERM));
        }
        if self.inbound_of(peer).is_some_and(|link| link.has_ended(credentials.pid)) {
            // Another life than the one that listens now: it has to be seen off first.
            self.stale.push(peer);
            self.idle_polls = IDLE_POLLS;
            return Err(Errno(libc::EAGAIN));
        }
        let geometry = if self.outbound_count < GENEROUS_LINKS { GENEROUS } else { FRUGAL };
        let (memory, fd) = SharedMemory::create(geometry.len())?;
        let hello = Hello {
            version: hello::VERSION,
            source: self.me,
            nonce: self.nonce,
            geometry,
            probe_addr: self.probe.as_ptr().expose_provenance() as u64,
        };
        unix::send(socket.as_fd(), &hello.encode(), &[fd.as_fd()])?;
        self.epoll.add(socket.as_fd(), TOKEN_OUTBOUND | u64::from(peer.0))?;
        let link = Outbound {
            producer: Producer::new(memory, geometry),
            socket,
            pid: credentials.pid,
            doorbell: None,
        };
        if self.outbound.len() <= peer.index() {
            self.outbound.resize_with(peer.index() + 1, || None);
        }
        if let Some(slot) = self.outbound.get_mut(peer.index()) {
            *slot = Some(Box::new(link));
            self.outbound_count += 1;
        }
        self.watch(peer, credentials.pid);
        Ok(())
    }

    /// Watches the process of `peer`, unless it is watched already.
    fn watch(&mut self, peer: PeerId, pid: i32) {
        if self.watches.iter().any(|watch| watch.peer == peer) {
            return;
        }
        let token = TOKEN_PROCESS | u64::from(peer.0);
        let fd = process::watch(pid).filter(|fd| self.epoll.add(fd.as_fd(), token).is_ok());
        self.watches.push(Watch { peer, pid, fd });
    }

    pub(crate) fn caps(&self, peer: PeerId) -> Caps {
        let geometry = self.out(peer).map_or(FRUGAL, |link| link.producer.geometry());
        let (get, put) =
            self.inbound_of(peer).map_or((false, false), |link| (link.can_get, link.can_put));
        Caps { short_max: SLOT_ROOM, bcopy_max: geometry.payload_max(), get, put }
    }

    pub(crate) fn under_pressure(&self, peer: PeerId) -> bool {
        self.out(peer).is_some_and(|link| link.producer.under_pressure())
    }

    pub(crate) fn set_pressure(&mut self, on: bool) {
        if self.pressure != on {
            self.pressure = on;
            for link in &self.inbound {
                link.consumer.set_pressure(on);
            }
        }
    }

    #[inline]
    pub(crate) fn send(
        &mut self,
        peer: PeerId,
        short: bool,
        header: &[u8],
        len: usize,
        pack: impl FnOnce(&mut [u8]),
    ) -> Result<(), SendError> {
        let link = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
        let Some(link) = link else {
            return Err(SendError::Unreachable(Errno(libc::ENOTCONN)));
        };
        let pushed = if short {
            link.producer.push_short(header, len, pack)
        } else {
            link.producer.push_bulk(header, len, pack)
        };
        match pushed {
            Ok(Wake::NotNeeded) => Ok(()),
            Ok(Wake::Needed) => {
                wake(link);
                Ok(())
            }
            Err(ring::Full) => Err(SendError::Again),
        }
    }

    /// See [`super::Iface::get`].
    pub(crate) fn get(
        &self,
        peer: PeerId,
        local: &SegmentList,
        remote: &[Range],
    ) -> Result<usize, SendError> {
        let link = self.inbound_of(peer).filter(|link| link.can_get);
        let Some(link) = link else { return Err(SendError::Unreachable(Errno(libc::EPERM))) };
        transfer(local, |ranges| read_ranges(link.pid, ranges, remote))
    }

    /// See [`super::Iface::put`].
    pub(crate) fn put(
        &self,
        peer: PeerId,
        local: &SegmentList,
        remote: &[Range],
    ) -> Result<usize, SendError> {
        let link = self.inbound_of(peer).filter(|link| link.can_put);
        let Some(link) = link else { return Err(SendError::Unreachable(Errno(libc::EPERM))) };
        transfer(local, |ranges| write_ranges(link.pid, ranges, remote))
    }

    /// Delivers messages, and now and then looks at the sockets.
    #[inline]
    pub(crate) fn poll(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        for link in &mut self.inbound {
            let mut taken = 0;
            while taken < BATCH {
                let peer = link.peer;
                match link.consumer.pop(|header, payload| handler.on_message(peer, header, payload))
                {
                    Popped::Message => taken += 1,
                    Popped::Empty => break,
                    Popped::Malformed => {
                        self.broken.push(peer);
                        break;
                    }
                }
            }
            n += taken;
        }
        self.busy_polls += 1;
        self.idle_polls = if n > 0 { 0 } else { self.idle_polls + 1 };
        if self.idle_polls >= IDLE_POLLS || self.busy_polls >= BUSY_POLLS {
            n += self.poll_sockets(peers, handler);
        }
        n
    }

    /// Accepts links, reads answers, notices peers that went away. A few system calls.
    #[cold]
    pub(crate) fn poll_sockets(
        &mut self,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
        self.idle_polls = 0;
        self.busy_polls = 0;
        let mut n = 0;
        for peer in std::mem::take(&mut self.broken) {
            log::warn(format_args!(
                "{}: malformed message in its ring",
                peers.address(peer).unwrap_or(self.me)
            ));
            self.depart(peer, Some(Errno(libc::EPROTO)), handler);
            n += 1;
        }
        for peer in std::mem::take(&mut self.stale) {
            self.depart(peer, None, handler);
            n += 1;
        }
        let mut tokens = [0; 32];
        let ready = self.epoll.wait(&mut tokens, 0).unwrap_or(0);
        for token in tokens.into_iter().take(ready) {
            let id = token as u32;
            match token & !0xffff_ffff {
                TOKEN_GREETING => n += self.greet(id as usize, peers, handler),
                TOKEN_OUTBOUND => n += self.on_outbound_ready(PeerId(id), peers, handler),
                TOKEN_INBOUND => n += self.on_inbound_ready(PeerId(id), handler),
                TOKEN_PROCESS => {
                    self.depart(PeerId(id), None, handler);
                    n += 1;
                }
                _ if token == TOKEN_LISTENER => n += self.accept(peers, handler),
                _ => {
                    if !self.sleeping {
                        self.doorbell.silence();
                    }
                }
            }
        }
        let now = clock::now_ns();
        if now.saturating_sub(self.liveness_at) > LIVENESS_NS {
            self.liveness_at = now;
            n += self.check_liveness(handler);
        }
        n
    }

    /// Notices processes that have ended and that no descriptor watches.
    fn check_liveness(&mut self, handler: &mut impl Handler) -> usize {
        let dead: Vec<PeerId> = self
            .watches
            .iter()
            .filter(|watch| watch.fd.is_none() && !process::is_running(watch.pid))
            .map(|watch| watch.peer)
            .collect();
        for peer in &dead {
            self.depart(*peer, None, handler);
        }
        dead.len()
    }

    fn accept(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) -> usize {
        let mut n = 0;
        for _ in 0..64 {
            let socket = match unix::accept(self.listener.as_fd()) {
                Ok(Some(socket)) => socket,
                Ok(None) => break,
                Err(e) => {
                    log::warn(format_args!("cannot accept a shared-memory link: {e}"));
                    break;
                }
            };
            let at = self.greetings.iter().position(Option::is_none).unwrap_or_else(|| {
                self.greetings.push(None);
                self.greetings.len() - 1
            });
            if let Err(e) = self.epoll.add(socket.as_fd(), TOKEN_GREETING | at as u64) {
                log::warn(format_args!("cannot watch a shared-memory link: {e}"));
                continue;
            }
            if let Some(slot) = self.greetings.get_mut(at) {
                *slot = Some(socket);
            }
            n += self.greet(at, peers, handler);
        }
        n
    }

    /// Reads the hello of an accepted socket, if it is there, and answers it.
    fn greet(&mut self, at: usize, peers: &mut PeerTable, handler: &mut impl Handler) -> usize {
        let Some(socket) = self.greetings.get_mut(at).and_then(Option::take) else { return 0 };
        let mut bytes = [0; hello::LEN];
        let (len, fds) = match unix::receive(socket.as_fd(), &mut bytes) {
            unix::Received::Nothing => {
                if let Some(slot) = self.greetings.get_mut(at) {
                    *slot = Some(socket);
                }
                return 0;
            }
            unix::Received::Closed => {
                self.epoll.remove(socket.as_fd());
                return 0;
            }
            unix::Received::Message(len, fds) => (len, fds),
        };
        self.epoll.remove(socket.as_fd());
        match self.welcome(&socket, bytes.get(..len).unwrap_or(&[]), fds) {
            Ok((hello, memory, credentials)) => {
                self.install(hello, memory, socket, credentials.pid, peers, handler);
                1
            }
            Err(reject) => {
                log::warn(format_args!("refused a shared-memory link: {reject:?}"));
                // A peer that is gone already needs no answer.
                let _ = unix::send(socket.as_fd(), &reject.encode(), &[]);
                0
            }
        }
    }

    fn welcome(
        &self,
        socket: &OwnedFd,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<(Hello, SharedMemory, unix::Credentials), Reject> {
        let malformed = Reject { reason: RejectReason::Malformed, detail: 0 };
        let resources =
            |e: Errno| Reject { reason: RejectReason::Resources, detail: e.0.unsigned_abs() };
        match Hello::version(bytes) {
            Some(hello::VERSION) => {}
            Some(_) => {
                let detail = u32::from(hello::VERSION);
                return Err(Reject { reason: RejectReason::Version, detail });
            }
            None => return Err(malformed),
        }
        let hello = Hello::decode(bytes).ok_or(malformed)?;
        let credentials = unix::credentials(socket.as_fd()).map_err(|_| malformed)?;
        if credentials.uid != process::effective_uid() {
            return Err(Reject { reason: RejectReason::User, detail: credentials.uid });
        }
        let fd = fds.into_iter().next().ok_or(malformed)?;
        let memory = SharedMemory::attach(&fd, hello.geometry.len()).map_err(|e| match e.0 {
            libc::EINVAL => malformed,
            _ => resources(e),
        })?;
        let answer = Welcome { nonce: self.nonce };
        match unix::send(socket.as_fd(), &answer.encode(), &[self.doorbell.fd()]) {
            // A sender that is gone already left its messages in the segment.
            Ok(()) | Err(Errno(libc::EPIPE)) => Ok((hello, memory, credentials)),
            Err(e) => Err(resources(e)),
        }
    }

    fn install(
        &mut self,
        hello: Hello,
        memory: SharedMemory,
        socket: OwnedFd,
        pid: i32,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) {
        let peer = peers.intern(&hello.source);
        // An endpoint has one link to us, and ours to it is to the same life. An older link belongs to
        // a life that has ended; so does the new one if its process is gone and another one listens.
        let other_life = self.out(peer).is_some_and(|link| link.pid != pid);
        if other_life && !process::is_running(pid) {
            log::info(format_args!(
                "dropped what pid {pid} sent before {} restarted",
                hello.source
            ));
            return;
        }
        if other_life || self.inbound_of(peer).is_some() {
            self.depart(peer, None, handler);
        }
        let (can_get, can_put) = self.probe_attach(pid, &hello);
        let consumer = Consumer::new(memory, hello.geometry);
        if self.waits {
            consumer.set_waits();
        }
        if self.pressure {
            consumer.set_pressure(true);
        }
        if let Err(e) = self.epoll.add(socket.as_fd(), TOKEN_INBOUND | u64::from(peer.0)) {
            log::warn(format_args!("cannot watch the link from {}: {e}", hello.source));
        }
        log::info(format_args!(
            "shared-memory link from {} (pid {pid}): cross-memory read {}, write {}",
            hello.source,
            if can_get { "yes" } else { "no" },
            if can_put { "yes" } else { "no" },
        ));
        handler.on_peer(peer, &hello.source);
        self.inbound.push(Inbound {
            peer,
            consumer,
            socket,
            pid,
            nonce: hello.nonce,
            can_get,
            can_put,
        });
        self.watch(peer, pid);
    }

    /// Tries a real cross-memory read and write on the words that the peer offers. Its process id
    /// is the kernel's word; a wrong one (another pid name space) does not yield the nonce.
    fn probe_attach(&self, pid: i32, hello: &Hello) -> (bool, bool) {
        if self.cma == CmaPolicy::Off || pid <= 0 {
            return (false, false);
        }
        let remote = [Range { addr: hello.probe_addr, len: 8 }];
        let readable = probe_read(pid, &remote) == Some(hello.nonce);
        let target = [Range { addr: hello.probe_addr.wrapping_add(8), len: 8 }];
        let writable = readable && probe_write(pid, hello.nonce, &target);
        (readable && self.cma != CmaPolicy::WriteOnly, writable && self.cma != CmaPolicy::ReadOnly)
    }

    fn on_outbound_ready(
        &mut self,
        peer: PeerId,
        peers: &PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
        let link = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
        let Some(link) = link else { return 0 };
        match read_answer(link) {
            Answer::None | Answer::Welcome => 0,
            Answer::Rejected(reject) => {
                let address = peers.address(peer).unwrap_or(self.me);
                log::warn(format_args!("{address} refused our shared-memory link: {reject:?}"));
                self.depart(peer, Some(Errno(libc::ECONNREFUSED)), handler);
                1
            }
            Answer::Closed => {
                self.depart(peer, None, handler);
                1
            }
        }
    }

    fn on_inbound_ready(&mut self, peer: PeerId, handler: &mut impl Handler) -> usize {
        let Some(link) = self.inbound_of(peer) else { return 0 };
        let mut bytes = [0; hello::LEN];
        match unix::receive(link.socket.as_fd(), &mut bytes) {
            unix::Received::Nothing | unix::Received::Message(..) => 0,
            unix::Received::Closed => {
                self.depart(peer, None, handler);
                1
            }
        }
    }

    /// Takes both links to `peer` down: first delivers what it had sent, then reports how it left.
    /// Without an error the sender's closing mark tells an orderly end from a death.
    fn depart(&mut self, peer: PeerId, error: Option<Errno>, handler: &mut impl Handler) {
        let mut closed_in_order = false;
        let mut known = false;
        if let Some(at) = self.inbound.iter().position(|link| link.peer == peer) {
            let mut link = self.inbound.swap_remove(at);
            self.epoll.remove(link.socket.as_fd());
            known = true;
            closed_in_order = link.consumer.producer_closed();
            // Bounded by the ring: its producer is gone or is no longer listened to.
            while error.is_none() {
                match link.consumer.pop(|header, data| handler.on_message(peer, header, data)) {
                    Popped::Message => {}
                    Popped::Empty => break,
                    Popped::Malformed => {
                        closed_in_order = false;
                        break;
                    }
                }
            }
            log::info(format_args!(
                "link of peer {} (pid {}, life {:#x}) ended",
                peer.0, link.pid, link.nonce
            ));
        }
        if let Some(link) = self.outbound.get_mut(peer.index()).and_then(Option::take) {
            self.outbound_count -= 1;
            self.epoll.remove(link.socket.as_fd());
            closed_in_order |= link.producer.consumer_closed();
            known = true;
        }
        if let Some(at) = self.watches.iter().position(|watch| watch.peer == peer) {
            if let Some(fd) = self.watches.swap_remove(at).fd {
                self.epoll.remove(fd.as_fd());
            }
        }
        if known {
            let departure = match error {
                None if closed_in_order => Departure::Closed,
                None => Departure::Failed(Errno(libc::EHOSTDOWN)),
                Some(e) => Departure::Failed(e),
            };
            handler.on_departure(peer, departure);
        }
    }

    /// From now on senders must look whether we sleep.
    pub(crate) fn enable_waiting(&mut self) {
        if !self.waits {
            self.waits = true;
            for link in &self.inbound {
                link.consumer.set_waits();
            }
        }
    }

    /// Prepares for sleep: after `true`, any message rings the doorbell. `false`: there is work.
    pub(crate) fn sleep(&mut self) -> bool {
        self.enable_waiting();
        self.doorbell.silence();
        self.sleeping = true;
        if self.inbound.iter().all(|link| link.consumer.sleep()) {
            return true;
        }
        self.awake();
        false
    }

    /// Ends the state that `sleep` began.
    pub(crate) fn awake(&mut self) {
        if self.sleeping {
            self.sleeping = false;
            for link in &self.inbound {
                link.consumer.awake();
            }
            self.doorbell.silence();
            // What woke us may be a socket.
            self.idle_polls = IDLE_POLLS;
        }
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        // A forked child that closes or exits must not speak for its parent.
        if process::pid() == self.owner {
            for link in self.outbound.iter().flatten() {
                link.producer.close();
            }
            for link in &self.inbound {
                link.consumer.close();
            }
        }
    }
}

enum Answer {
    None,
    Welcome,
    Rejected(Reject),
    Closed,
}

fn read_answer(link: &mut Outbound) -> Answer {
    let mut bytes = [0; hello::LEN];
    match unix::receive(link.socket.as_fd(), &mut bytes) {
        unix::Received::Nothing => Answer::None,
        unix::Received::Closed => Answer::Closed,
        unix::Received::Message(len, fds) => {
            let bytes = bytes.get(..len).unwrap_or(&[]);
            if let Some(reject) = Reject::decode(bytes) {
                return Answer::Rejected(reject);
            }
            if Welcome::decode(bytes).is_some() {
                link.doorbell = fds.into_iter().next().map(Doorbell::from_fd);
            }
            Answer::Welcome
        }
    }
}

/// Rings the receiver's doorbell. It sent its welcome before it ever slept, so the doorbell is here
/// or in the socket.
#[cold]
fn wake(link: &mut Outbound) {
    if link.doorbell.is_none() {
        let _ = read_answer(link);
    }
    if let Some(doorbell) = &link.doorbell {
        doorbell.ring();
    }
}

fn transfer(
    local: &SegmentList,
    copy: impl FnOnce(&[Range]) -> Result<usize, Errno>,
) -> Result<usize, SendError> {
    let (ranges, n) = local.ranges();
    match copy(ranges.get(..n).unwrap_or(&[])) {
        Ok(0) => Err(SendError::Unreachable(Errno(libc::EFAULT))),
        Ok(n) => Ok(n),
        Err(Errno(libc::EINTR | libc::EAGAIN)) => Err(SendError::Again),
        Err(e) => Err(SendError::Unreachable(e)),
    }
}

/// # Safety notes
/// The local ranges come from a [`SegmentList`]: memory that the application lent to a pending
/// operation; probes use locals.
mod attach {
    #![allow(unsafe_code)]
    use super::{Errno, Range, cma};

    pub(super) fn read_ranges(pid: i32, local: &[Range], remote: &[Range]) -> Result<usize, Errno> {
        // SAFETY: `local` was lent to a receive that is pending.
        unsafe { cma::read(pid, local, remote) }
    }

    pub(super) fn write_ranges(
        pid: i32,
        local: &[Range],
        remote: &[Range],
    ) -> Result<usize, Errno> {
        // SAFETY: `local` was lent to a send that is pending.
        unsafe { cma::write(pid, local, remote) }
    }

    pub(super) fn probe_read(pid: i32, remote: &[Range]) -> Option<u64> {
        let mut value = 0u64;
        let local = [Range { addr: (&raw mut value).expose_provenance() as u64, len: 8 }];
        // SAFETY: a live local of eight bytes.
        (unsafe { cma::read(pid, &local, remote) } == Ok(8)).then_some(value)
    }

    pub(super) fn probe_write(pid: i32, value: u64, remote: &[Range]) -> bool {
        let local = [Range { addr: (&raw const value).expose_provenance() as u64, len: 8 }];
        // SAFETY: a live local of eight bytes.
        unsafe { cma::write(pid, &local, remote) == Ok(8) }
    }
}
use attach::{probe_read, probe_write, read_ranges, write_ranges};
