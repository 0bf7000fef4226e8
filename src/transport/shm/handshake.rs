//! Making links: connecting and accepting, and the handshake in between (PROTOCOL.md §2).

use super::attach::{probe_read, probe_write};
use super::copy_rate::CopyRate;
use super::hello::{self, Hello, Reject, RejectReason, Welcome};
use super::layout::{FRUGAL, GENEROUS, LAVISH};
use super::ring::{Area, Consumer, Producer};
use super::{
    GENEROUS_LINKS, Inbound, LAVISH_LINKS, Outbound, Shm, TOKEN_GREETING, TOKEN_INBOUND,
    TOKEN_OUTBOUND, socket_name,
};
use crate::config::CmaPolicy;
use crate::sys::cma::Range;
use crate::sys::event::Doorbell;
use crate::sys::shared_memory::SharedMemory;
use crate::sys::{Errno, clock, process, unix};
use crate::telemetry::log;
use crate::transport::peers::PeerTable;
use crate::transport::share::CellTable;
use crate::transport::{Address, Handler, PeerId, SendError};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

impl Shm {
    /// Makes the link to `peer`, which listens at `address`. Errors: Again when its backlog is full;
    /// ECONNREFUSED when nobody listens, EPERM when it is another user's, EMFILE, ENOMEM, ENOSPC.
    pub(crate) fn connect(&mut self, peer: PeerId, address: &Address) -> Result<(), SendError> {
        match self.try_connect(peer, address) {
            Ok(()) => Ok(()),
            Err(e) if e.is_would_block() => Err(SendError::Again),
            Err(e) => Err(SendError::Unreachable(e)),
        }
    }

    pub(super) fn try_connect(&mut self, peer: PeerId, address: &Address) -> Result<(), Errno> {
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
            self.urgent = true;
            return Err(Errno(libc::EAGAIN));
        }
        let geometry = match self.outbound_count {
            links if links < LAVISH_LINKS => LAVISH,
            links if links < GENEROUS_LINKS => GENEROUS,
            _ => FRUGAL,
        };
        let (memory, fd) = SharedMemory::create(geometry.len())?;
        let identity = process::random_u64() as u32 >> 8;
        let hello = Hello {
            version: hello::VERSION,
            source: self.me,
            nonce: self.nonce,
            geometry,
            probe_addr: self.gate.address(),
            features: hello::PLACES
                | match self.cma {
                    CmaPolicy::Auto | CmaPolicy::WriteOnly => hello::ASSISTS | hello::REACHES,
                    CmaPolicy::ReadOnly => hello::REACHES,
                    CmaPolicy::Off => 0,
                },
            identity,
            mark: self.mark,
        };
        unix::send(socket.as_fd(), &hello.encode(), &[fd.as_fd()])?;
        self.epoll.add(socket.as_fd(), TOKEN_OUTBOUND | u64::from(peer.0))?;
        let link = Outbound {
            producer: Producer::new(Arc::new(memory), geometry),
            identity,
            socket,
            pid: credentials.pid,
            doorbell: None,
            features: None,
            nonce: None,
            copy_rate: CopyRate::default(),
        };
        if self.outbound.len() <= peer.index() {
            self.outbound.resize_with(peer.index() + 1, || None);
        }
        if let Some(slot) = self.outbound.get_mut(peer.index()) {
            *slot = Some(Box::new(link));
            self.outbound_count += 1;
        }
        self.share_places(peer);
        self.count_processes();
        self.watch(peer, credentials.pid);
        Ok(())
    }

    /// Accepts up to `most` of the connections that wait, and takes in the links of those whose hello is here.
    pub(super) fn accept(
        &mut self,
        most: usize,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
        let mut n = 0;
        for _ in 0..most {
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

    /// Takes in every link that somebody has made.
    pub(super) fn take_in(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) {
        for at in 0..self.greetings.len() {
            self.greet(at, peers, handler);
        }
        self.accept(unix::BACKLOG, peers, handler);
    }

    /// Reads the hello of an accepted socket, if it is there, and answers it.
    pub(super) fn greet(
        &mut self,
        at: usize,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
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
                log::limited!("refused a shared-memory link: {reject}");
                // A peer that is gone already needs no answer.
                let _ = unix::send(socket.as_fd(), &reject.encode(), &[]);
                0
            }
        }
    }

    pub(super) fn welcome(
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
        if hello.mark != self.mark {
            return Err(Reject { reason: RejectReason::Key, detail: 0 });
        }
        let fd = fds.into_iter().next().ok_or(malformed)?;
        let memory = SharedMemory::attach(&fd, hello.geometry.len()).map_err(|e| match e.0 {
            libc::EINVAL => malformed,
            _ => resources(e),
        })?;
        let answer = Welcome { nonce: self.nonce, features: hello::ATOMICS | hello::COLLECTIVES };
        match unix::send(socket.as_fd(), &answer.encode(), &[self.doorbell.fd()]) {
            // A sender that is gone already left its messages in the segment.
            Ok(()) | Err(Errno(libc::EPIPE)) => Ok((hello, memory, credentials)),
            Err(e) => Err(resources(e)),
        }
    }

    pub(super) fn install(
        &mut self,
        hello: Hello,
        memory: SharedMemory,
        socket: OwnedFd,
        pid: i32,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) {
        let Some(peer) = peers.intern(&hello.source) else { return };
        let memory = Arc::new(memory);
        let consumer = Consumer::new(memory.clone(), hello.geometry);
        // An endpoint has one link to us, and ours to it is to the same life. What belongs to an earlier one
        // has ended.
        match self.compare(peer, pid, &hello, &consumer, peers, handler) {
            Ours::Later => {
                log::warn(format_args!(
                    "dropped what pid {pid} sent before {} restarted",
                    hello.source
                ));
                return;
            }
            Ours::Same if self.inbound_of(peer).is_none() => {}
            Ours::Same | Ours::Earlier => self.depart(peer, None, handler),
        }
        let (can_get, can_put) = self.probe_attach(pid, &hello);
        let places = (hello.features & hello::PLACES != 0)
            .then(|| Area::new(memory, hello.geometry, hello.identity));
        if self.waits {
            consumer.set_waits();
            self.settles_at = clock::now_ns().saturating_add(super::SETTLES_NS);
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
            socket: Arc::new(socket),
            pid,
            nonce: hello.nonce,
            gate: hello.probe_addr,
            shut: AtomicBool::new(false),
            can_get,
            can_put,
            assists: hello.features & hello::ASSISTS != 0,
            reaches: hello.features & hello::REACHES != 0 && pid > 0,
            places,
            cells: CellTable::default(),
        });
        self.share_places(peer);
        self.count_processes();
        self.watch(peer, pid);
    }

    /// Of which life of `peer` our link to it is, beside that of `hello`, which process `pid` has sent with what
    /// `consumer` receives.
    fn compare(
        &mut self,
        peer: PeerId,
        pid: i32,
        hello: &Hello,
        consumer: &Consumer,
        peers: &PeerTable,
        handler: &mut impl Handler,
    ) -> Ours {
        let mut closed = false;
        // There is a welcome, and then the end.
        for _ in 0..2 {
            let link = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
            match link.map_or(Answer::None, read_answer) {
                Answer::None => break,
                Answer::Welcome => {}
                Answer::Rejected(reject) => self.on_rejected(peer, &reject, peers, handler),
                Answer::Closed => closed = true,
            }
        }
        let Some(link) = self.out(peer) else { return Ours::Same };
        let has_closed = consumer.producer_closed();
        let same = link.pid == pid
            && match link.nonce {
                Some(nonce) => nonce == hello.nonce,
                // Whoever closed before it took our link in may be the one that closed after it sent this.
                None => !closed || has_closed,
            };
        match same {
            true => Ours::Same,
            false if !closed && (has_closed || !process::is_running(pid)) => Ours::Later,
            false => Ours::Earlier,
        }
    }

    /// Payloads to and from `peer` may lie in places, if there are both directions and it knows of that.
    fn share_places(&mut self, peer: PeerId) {
        let inbound = self.inbound.iter_mut().find(|link| link.peer == peer);
        let outbound = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
        let (Some(inbound), Some(outbound)) = (inbound, outbound) else { return };
        let Some(theirs) = &inbound.places else { return };
        let producer = &mut outbound.producer;
        let memory = producer.memory().clone();
        let ours = Area::new(memory, producer.geometry(), outbound.identity);
        producer.share_places(ours.clone(), theirs.clone());
        inbound.consumer.share_places(theirs.clone(), ours);
    }

    /// Tries a real cross-memory read and write on the words that the peer offers. Its process id
    /// is the kernel's word; a wrong one (another pid name space) does not yield the nonce.
    pub(super) fn probe_attach(&self, pid: i32, hello: &Hello) -> (bool, bool) {
        if self.cma == CmaPolicy::Off || pid <= 0 {
            return (false, false);
        }
        let remote = [Range { addr: hello.probe_addr, len: 8 }];
        let readable = probe_read(pid, &remote) == Some(hello.nonce);
        let target = [Range { addr: hello.probe_addr.wrapping_add(8), len: 8 }];
        let writable = readable && probe_write(pid, hello.nonce, &target);
        (readable && self.cma != CmaPolicy::WriteOnly, writable && self.cma != CmaPolicy::ReadOnly)
    }
}

/// Of which life of a peer our link to it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ours {
    /// The one that has just said hello; or there is no link.
    Same,
    /// One that has ended.
    Earlier,
    /// The one that is there now: who said hello has ended.
    Later,
}

/// What a receiver said to our hello.
pub(super) enum Answer {
    None,
    Welcome,
    Rejected(Reject),
    Closed,
}

/// Reads what the receiver said, if it did.
pub(super) fn read_answer(link: &mut Outbound) -> Answer {
    let mut bytes = [0; hello::LEN];
    match unix::receive(link.socket.as_fd(), &mut bytes) {
        unix::Received::Nothing => Answer::None,
        unix::Received::Closed => Answer::Closed,
        unix::Received::Message(len, fds) => {
            let bytes = bytes.get(..len).unwrap_or(&[]);
            if let Some(reject) = Reject::decode(bytes) {
                return Answer::Rejected(reject);
            }
            if let Some(welcome) = Welcome::decode(bytes) {
                link.features = Some(welcome.features);
                link.nonce = Some(welcome.nonce);
                link.doorbell = fds.into_iter().next().map(Doorbell::from_fd);
            }
            Answer::Welcome
        }
    }
}
