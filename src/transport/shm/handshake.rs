//! Makes links: connects to a receiver, and installs the links whose connect request is accepted (PROTOCOL.md §2). The
//! steps between are in `greeting`.

use super::attach::{probe_read, probe_write};
use super::copy_rate::CopyRate;
use super::door::Greeting;
use super::hello::{self, Hello, Reject, Welcome};
use super::hints::Hint;
use super::in_flight::{Fresh, TOO_MANY};
use super::inbound::{Attention, Inbound};
use super::layout::{
    FRUGAL, Geometry, LAVISH, SLOT, SLOTS, SLOTS_STEP, receivers_bell, set_receivers_bell,
};
use super::names::{self, Found};
use super::outbound::Outbound;
use super::ring::{Area, Consumer, Producer};
use super::state::{self, SETTLES_NS, Shm};
use super::tokens::TOKEN_OUTBOUND;
use crate::sys::bell::Bell;
use crate::sys::close::close_soon;
use crate::sys::cma::Range;
use crate::sys::late_set::LateSet;
use crate::sys::shared_memory::SharedMemory;
use crate::sys::{Errno, clock, process, unix};
use crate::telemetry::{log, ranks};
use crate::transport::peers::PeerTable;
use crate::transport::share::CellTable;
use crate::transport::shm::config::CmaPolicy;
use crate::transport::{Address, Contact, Handler, PeerId, SendError};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Time in which a receiver should answer, nanoseconds.
const ANSWER_NS: u64 = 2_000_000_000;
/// Connections may wait for an answer in one of so many descriptors that are left, where these are scarce, and one more.
const WAITING_SHARE: usize = 4;
/// No link can be made now, for a reason that is here and passes.
const NOT_YET: Errno = TOO_MANY;

impl Shm {
    /// Makes the link to `peer`, which listens at `address`, if it takes links and belongs to this user. Errors:
    /// Again when its backlog is full; Unreachable when this process lacks a resource for the link.
    pub(super) fn link(&mut self, peer: PeerId, address: &Address) -> Result<Contact, SendError> {
        if let Some(errno) = self.refusals.holds(peer) {
            return Ok(Contact::Refused(errno));
        }
        match self.try_connect(peer, address) {
            Ok(contact) => Ok(contact),
            Err(e) if e.is_would_block() => Err(SendError::Again),
            Err(NOT_YET) => Ok(Contact::Later),
            Err(e) => Err(SendError::Unreachable(e)),
        }
    }

    pub(super) fn try_connect(
        &mut self,
        peer: PeerId,
        address: &Address,
    ) -> Result<Contact, Errno> {
        let Some(bell) = self.bell.clone() else { return Ok(Contact::Elsewhere) };
        self.may_ask(peer)?;
        // Before the connection: a receiver that accepts that at once finds the request, and need not look again.
        if self.door.requests.segment.is_none() {
            self.door.requests.segment = segment().ok();
        }
        let made = self.find_and_ask(peer, address, bell);
        if made.is_err_and(Errno::is_shortage) {
            self.door.requests.segment = None;
        }
        made
    }

    /// Looks for the peer, and sends it a connect request with the segment that is kept. Errors: also those of [`segment`], if none is.
    fn find_and_ask(
        &mut self,
        peer: PeerId,
        address: &Address,
        bell: Arc<Bell>,
    ) -> Result<Contact, Errno> {
        let (socket, credentials) = match self.find(address.port())? {
            Found::Open(_, credentials) if self.watches.is_dead(credentials.pid) => {
                // Left alone for a while: each look leaves a connection in the queue of the listener.
                self.refusals.add(peer, Errno(libc::EHOSTUNREACH));
                return Ok(Contact::Refused(Errno(libc::EHOSTUNREACH)));
            }
            Found::Open(socket, credentials) => (socket, credentials),
            Found::Aloof(_) => return Ok(Contact::Elsewhere),
            Found::Stranger(uid) => return Ok(state::stranger(address, uid)),
            Found::Nobody => return Ok(Contact::Missing(Errno(libc::ECONNREFUSED))),
        };
        self.may_link(peer, &socket, credentials.pid)?;
        let kept = self.door.requests.segment.take();
        let (geometry, memory, fd) = kept.map_or_else(segment, Ok)?;
        let identity = process::random_u64() as u32 >> 8;
        let hello = self.request(geometry, identity, credentials.pid, &bell);
        self.epoll.add(socket.as_fd(), TOKEN_OUTBOUND | u64::from(peer.0))?;
        let requests = &mut self.door.requests;
        if let Err(e) = requests.send(socket.as_fd(), &hello.encode(), fd.as_fd()) {
            self.epoll.remove(socket.as_fd());
            requests.segment = (e == TOO_MANY).then_some((geometry, memory, fd));
            // The peer has closed meanwhile, and the next attempt shows its state.
            let passes = matches!(e.0, libc::EPIPE | libc::ECONNRESET);
            return Err(if passes { Errno(libc::EAGAIN) } else { e });
        }
        let link = Outbound {
            producer: Producer::frugal(Arc::new(memory), geometry, self.settings.budget.clone()),
            identity,
            socket: Some(socket),
            pid: credentials.pid,
            port: address.port(),
            since: clock::now_ns(),
            bell,
            hint: None,
            features: None,
            nonce: None,
            copy_rate: CopyRate::default(),
        };
        if self.outbound.len() <= peer.index() {
            self.outbound.resize_with(peer.index() + 1, || None);
        }
        if let Some(slot) = self.outbound.get_mut(peer.index()) {
            *slot = Some(Box::new(link));
        }
        self.share_places(peer);
        self.count_one_more(peer);
        self.watches.add(credentials.pid);
        if self.waiting.sleeping {
            self.open_watches();
        }
        Ok(Contact::Linked)
    }

    /// Which endpoint has the port. Errors: those of [`names::find`].
    fn find(&mut self, port: u16) -> Result<Found, Errno> {
        let found = names::find(port);
        let took_last = |e: &Errno| matches!(e.0, libc::EMFILE | libc::ENFILE);
        if found.as_ref().is_err_and(took_last) && self.door.requests.segment.take().is_some() {
            // The segment had the last descriptor. A peer that has ended is found to have ended with one.
            return names::find(port);
        }
        found
    }

    /// Whether `peer` can be looked for, to make a link to it now. Errors: NOT_YET.
    fn may_ask(&mut self, peer: PeerId) -> Result<(), Errno> {
        if self.door.requests.pauses() || self.awaits_enough() {
            return Err(NOT_YET);
        }
        if self.inbound_of(peer).is_none() && self.door.holds_back(peer) {
            self.due.urgent = true;
            return Err(NOT_YET);
        }
        Ok(())
    }

    /// Whether there can be a link to `peer`, process `pid`, now. Errors: NOT_YET; EMFILE.
    fn may_link(&mut self, peer: PeerId, socket: &OwnedFd, pid: i32) -> Result<(), Errno> {
        self.door.left = process::descriptors_left(socket);
        if self.awaits_enough() {
            return Err(NOT_YET);
        }
        if self.is_successor(pid) {
            return Err(NOT_YET);
        }
        if self.door.left.is_some() && stays(pid) != 0 {
            return Err(Errno(libc::EMFILE));
        }
        // The last messages of an earlier incarnation of the peer may wait at our listener. They are delivered, and that
        // incarnation departs, before there is a link to the next one.
        if self.inbound_of(peer).is_none() && self.door.hold_back(peer, pid) {
            self.due.urgent = true;
            return Err(NOT_YET);
        }
        // The same for those that it left in refused links.
        if self.inbound_of(peer).is_none() && self.has_left_refused(peer) {
            return Err(NOT_YET);
        }
        if self.inbound_of(peer).is_some_and(|link| link.pid != pid || link.has_ended()) {
            // The link is from another incarnation than the one that listens now: end that one first.
            self.due.stale.push(peer);
            self.due.urgent = true;
            return Err(NOT_YET);
        }
        Ok(())
    }

    /// The connect request for a link to process `pid`.
    fn request(&self, geometry: Geometry, identity: u32, pid: i32, bell: &Bell) -> Hello {
        let copies = match self.settings.cma {
            CmaPolicy::Auto | CmaPolicy::WriteOnly => hello::ASSISTS | hello::REACHES,
            CmaPolicy::ReadOnly => hello::REACHES,
            CmaPolicy::Off => 0,
        };
        Hello {
            version: hello::VERSION,
            source: self.me,
            nonce: self.nonce,
            geometry,
            probe_addr: self.reaching.gate.address(),
            features: hello::PLACES | stays(pid) | copies,
            identity,
            mark: self.settings.mark,
            bell: bell.address(),
            rank: ranks::own(),
        }
    }

    /// Descriptors are scarce, and the connections that wait for an answer have enough of those that are left. They will
    /// soon be closed. Only those that were made lately count: peers that do not answer cannot keep us from making links.
    fn awaits_enough(&self) -> bool {
        let Some(left) = self.door.left else { return false };
        let now = clock::now_ns();
        let recent = |link: &Outbound| now.saturating_sub(link.since) < ANSWER_NS;
        let waits = |link: &Outbound| link.nonce.is_none() && recent(link);
        self.outbound.iter().flatten().filter(|link| waits(link)).count() > left / WAITING_SHARE
    }

    /// Tells the sender of a connect request the doorbell, and ends those links with `peer` beside which there can be no
    /// link from it. False: the request is of an earlier incarnation of the peer.
    pub(super) fn prepare(
        &mut self,
        peer: PeerId,
        pid: i32,
        hello: &Hello,
        consumer: &Consumer,
        peers: &PeerTable,
        handler: &mut impl Handler,
    ) -> bool {
        // An endpoint has one link to us, and our link to it is to the same incarnation. Links of an earlier
        // incarnation have ended.
        let ours = match self.is_outlived(peer, pid, hello, consumer) {
            true => Ours::Later,
            false => self.compare(peer, pid, hello, consumer, peers, handler),
        };
        match ours {
            Ours::Later => {
                log::limited!(
                    "what process {pid} sent before {} was restarted came too late, and is lost",
                    hello.source
                );
                return false;
            }
            Ours::Same if self.inbound_of(peer).is_none() => {
                if self.out(peer).is_none() && self.has_left_refused(peer) {
                    self.see_refused_off(peer, handler);
                }
            }
            Ours::Same | Ours::Earlier => self.depart(peer, None, handler),
        }
        if let Some(bell) = &self.bell {
            set_receivers_bell(consumer.memory(), bell.address());
        }
        true
    }

    /// The sender of a request has ended, and there is a link from another incarnation of `peer`, which has not: a later one.
    fn is_outlived(&self, peer: PeerId, pid: i32, hello: &Hello, consumer: &Consumer) -> bool {
        let Some(link) = self.inbound_of(peer).filter(|link| link.nonce != hello.nonce) else {
            return false;
        };
        let ended = consumer.producer_closed() || !process::is_running(pid);
        ended && !self.has_gone(link.pid, || link.has_ended())
    }

    /// Makes the link whose sender has its answer, or has ended.
    pub(super) fn install(
        &mut self,
        peer: PeerId,
        hello: Hello,
        consumer: Consumer,
        greeting: Greeting,
        (can_get, can_put): (bool, bool),
        handler: &mut impl Handler,
    ) {
        let Some(bell) = self.bell.clone() else { return };
        let pid = greeting.credentials.pid;
        let places = (hello.features & hello::PLACES != 0)
            .then(|| Area::new(consumer.memory().clone(), hello.geometry, hello.identity));
        self.tell_sender(&consumer);
        let socket = self.keep_socket(&hello, greeting);
        log::info(format_args!(
            "shared-memory link from {} (pid {pid}): cross-memory read {}, write {}",
            hello.source,
            if can_get { "yes" } else { "no" },
            if can_put { "yes" } else { "no" },
        ));
        self.refusals.forget(peer);
        handler.on_peer(peer, &hello.source);
        // A sender that closed before it knew the doorbell did not ring: look at all links in this turn.
        if consumer.producer_closed() {
            self.watches.checked_at = 0;
        }
        self.inbound.push(Inbound {
            peer,
            consumer,
            socket,
            pid,
            nonce: hello.nonce,
            bell,
            theirs: hello.bell,
            gate: hello.probe_addr,
            shut: AtomicBool::new(false),
            proven_until: AtomicU64::new(0),
            can_get,
            can_put,
            assists: hello.features & hello::ASSISTS != 0,
            reaches: hello.features & hello::REACHES != 0 && pid > 0,
            places,
            cells: CellTable::default(),
            attention: Attention::default(),
        });
        if self.waiting.sleeping {
            // The thread may have begun to sleep without links, and without words.
            self.ring_for_messages();
            // Its sender may just have published a message without a ring, and we may not see that yet either.
            self.watches.wake_within(Some(SETTLES_NS));
        }
        self.share_places(peer);
        self.count_one_more(peer);
        self.watches.add(pid);
    }

    /// Tells the sender of a new link what it has to know of this endpoint.
    fn tell_sender(&mut self, consumer: &Consumer) {
        if self.waiting.asked {
            consumer.set_waits();
            self.waiting.settles_at = clock::now_ns().saturating_add(SETTLES_NS);
        }
        if self.pressure {
            consumer.set_pressure(true);
        }
    }

    /// The socket of a link, if its end must show that of the process. Else it is closed.
    fn keep_socket(&mut self, hello: &Hello, greeting: Greeting) -> Option<OwnedFd> {
        if stays(greeting.credentials.pid) | hello.features & hello::STAYS != 0 {
            return Some(greeting.socket);
        }
        self.dismiss(greeting);
        None
    }

    /// The peer has accepted our link.
    pub(super) fn on_welcome(&mut self, peer: PeerId, rank: u32, peers: &PeerTable) {
        self.refusals.forget(peer);
        if let Some(address) = peers.address(peer) {
            ranks::learn(&address.0, rank);
        }
    }

    /// Compares our link to `peer` with a connect request of process `pid`, whose messages `consumer` receives: do both
    /// belong to the same incarnation of the peer?
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
        // The peer may have sent a connect reply and then closed.
        for _ in 0..2 {
            let link = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
            match link.map_or(Answer::None, |link| read_answer(link, &self.epoll)) {
                Answer::None => break,
                Answer::Welcome(rank) => self.on_welcome(peer, rank, peers),
                Answer::Rejected(reject) => self.on_rejected(peer, &reject, peers, handler),
                // The peer sent this request before it withdrew, and has never accepted our link.
                Answer::Closed if self.has_withdrawn(peer, peers) => {
                    self.take_back(peer, Errno(libc::ECONNREFUSED));
                }
                Answer::Closed => closed = true,
            }
        }
        let Some(link) = self.out(peer) else { return Ours::Same };
        closed |= link.has_ended();
        let has_closed = consumer.producer_closed();
        let same = link.pid == pid
            && match link.nonce {
                Some(nonce) => nonce == hello.nonce,
                // A peer that closed before it accepted our link may have sent this request before it closed.
                None => !closed || has_closed,
            };
        match same {
            true => Ours::Same,
            false if !closed && (has_closed || !process::is_running(pid)) => Ours::Later,
            false => Ours::Earlier,
        }
    }

    /// Enables recycled payload buffers to and from `peer`, if there are both directions and the peer supports them.
    fn share_places(&mut self, peer: PeerId) {
        let inbound = self.inbound.of_mut(peer);
        let outbound = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
        let (Some(inbound), Some(outbound)) = (inbound, outbound) else { return };
        let Some(theirs) = &inbound.places else { return };
        let producer = &mut outbound.producer;
        let memory = producer.memory().clone();
        let ours = Area::new(memory, producer.geometry(), outbound.identity);
        producer.share_places(ours.clone(), theirs.clone());
        inbound.consumer.share_places(theirs.clone(), ours);
    }

    /// Tries a real cross-memory read and write on the words that the peer offers. The kernel vouches for the process
    /// id; an id of another pid namespace does not yield the nonce.
    pub(super) fn probe_attach(&self, pid: i32, hello: &Hello) -> (bool, bool) {
        if self.settings.cma == CmaPolicy::Off || pid <= 0 {
            return (false, false);
        }
        let remote = [Range { addr: hello.probe_addr, len: 8 }];
        let word = probe_read(pid, &remote);
        if let Err(errno @ Errno(libc::EPERM | libc::EACCES | libc::ENOSYS)) = word {
            report_forbidden(pid, errno);
        }
        let readable = word == Ok(hello.nonce);
        let target = [Range { addr: hello.probe_addr.wrapping_add(8), len: 8 }];
        let writable = readable && probe_write(pid, hello.nonce, &target);
        (
            readable && self.settings.cma != CmaPolicy::WriteOnly,
            writable && self.settings.cma != CmaPolicy::ReadOnly,
        )
    }
}

/// The incarnation of the peer to which our link leads, compared with the sender of a connect request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ours {
    /// The same incarnation, or there is no link.
    Same,
    /// An earlier one, which has ended.
    Earlier,
    /// A later one: the sender of the connect request has ended.
    Later,
}

/// A zeroed segment with its first slots reserved; a small one, all of it reserved, if a large one exceeds the system's
/// limits or pages are larger than the steps in which a segment is reserved. Errors: those of [`SharedMemory::create`].
fn segment() -> Result<Fresh, Errno> {
    let of = |geometry: Geometry, reserved: usize| -> Result<_, Errno> {
        let (memory, fd) =
            SharedMemory::create_in_parts(geometry.len(), geometry.bulk_at(), reserved)?;
        Ok((geometry, memory, fd))
    };
    if process::page_size() > SLOTS_STEP as usize * SLOT {
        return of(FRUGAL, FRUGAL.len());
    }
    match of(LAVISH, SLOTS + SLOTS_STEP as usize * SLOT) {
        Err(e) if e.is_shortage() => of(FRUGAL, FRUGAL.len()),
        other => other,
    }
}

/// The receiver's answer to our connect request.
pub(super) enum Answer {
    None,
    /// With the rank of the receiver's process, and one more.
    Welcome(u32),
    Rejected(Reject),
    Closed,
}

impl Outbound {
    /// The receiver has accepted the link, and has closed or ended since.
    pub(super) fn has_ended(&self) -> bool {
        let theirs = receivers_bell(self.producer.memory());
        self.producer.consumer_closed()
            || theirs.is_some_and(|theirs| self.bell.is_gone(theirs))
            || self.socket.as_ref().is_some_and(|socket| unix::peer_has_ended(socket.as_fd()))
    }

    /// Maps the receiver's words, if their file came with the answer. Returns the other descriptors.
    fn learn_hint(&mut self, mut fds: Vec<OwnedFd>, welcome: Option<Welcome>) -> Vec<OwnedFd> {
        let hint = fds.first().zip(welcome).map(|(file, welcome)| Hint::new(file, welcome.hint));
        if let Some(Ok(hint)) = hint {
            self.hint = Some(hint);
            self.producer.set_hinted();
            drop(fds.swap_remove(0));
        }
        fds
    }
}

/// The features of a side that sees `pid` as the other's process id.
pub(super) fn stays(pid: i32) -> u32 {
    if pid > 0 { 0 } else { hello::STAYS }
}

/// Reads the receiver's answer, if there is one. A connection that is no longer needed is closed.
pub(super) fn read_answer(link: &mut Outbound, epoll: &LateSet) -> Answer {
    let mut bytes = [0; hello::LEN];
    let Some(socket) = &link.socket else { return Answer::None };
    match unix::receive(socket.as_fd(), &mut bytes) {
        unix::Received::Nothing => Answer::None,
        unix::Received::Closed => Answer::Closed,
        unix::Received::Message(unix::Message { len, fds, .. }) => {
            let bytes = bytes.get(..len).unwrap_or(&[]);
            let welcome = Welcome::decode(bytes);
            // Closing what else the peer sent must not block this thread.
            close_soon(link.learn_hint(fds, welcome));
            if let Some(reject) = Reject::decode(bytes) {
                return Answer::Rejected(reject);
            }
            if let Some(welcome) = welcome {
                link.features = Some(welcome.features);
                link.nonce = Some(welcome.nonce);
                link.producer.settle();
                if welcome.features & hello::LAPS != 0 {
                    link.producer.allow_restarts();
                }
                if stays(link.pid) | welcome.features & hello::STAYS == 0 {
                    let socket = link.socket.take();
                    socket.iter().for_each(|socket| epoll.remove(socket.as_fd()));
                }
            }
            Answer::Welcome(welcome.map_or(0, |welcome| welcome.rank))
        }
    }
}

#[cold]
fn report_forbidden(pid: i32, errno: Errno) {
    log::limited!(
        node: errno.0,
        "cross-memory attach to process {pid} of this node is forbidden (process_vm_readv: {errno}): long messages are copied twice, through shared memory, which is slower. Likely causes: a seccomp profile, a container without CAP_SYS_PTRACE, kernel.yama.ptrace_scope above 1; FI_UDRV_CMA=off says that this is wanted"
    );
}
