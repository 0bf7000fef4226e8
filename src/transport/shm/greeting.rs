//! Accepts links: handles a connection from the moment it is accepted until its owner is known, and decides whether it
//! becomes a link (PROTOCOL.md §2.1).
//!
//! Any process on the node may connect. Before a byte of a connection is read, the kernel is asked which user owns it.
//! A connection of another user is closed by a thread that may block (`sys::close`). A connection of this user must
//! send a connect request in time, and its process must listen at the address that the request names. All of this is
//! bounded, so that connections that send nothing cost other peers neither descriptors nor time.

use super::door::{
    Claim, GREETINGS_MAX, Greeting, HELLO_NS, LATE, MALFORMED, PAUSE_NS, STRANGERS_MAX, refuse,
    resources,
};
use super::handshake::stays;
use super::hello::{self, Hello, Reject, RejectReason, Welcome};
use super::in_flight::TOO_MANY;
use super::names::{self};
use super::outbound::Outbound;
use super::refused::{Refused, Segment, Unmapped};
use super::ring::Consumer;
use super::state::Shm;
use super::tokens::{TOKEN_GREETING, TOKEN_INBOUND};
use crate::sys::shared_memory::SharedMemory;
use crate::sys::spare::{self};
use crate::sys::unix;
use crate::sys::{Errno, clock, process, user};
use crate::telemetry::{log, ranks};
use crate::transport::address::LocalHost;
use crate::transport::peers::PeerTable;
use crate::transport::{Handler, PeerId};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

impl Shm {
    /// Accepts up to `most` waiting connections, and makes links of those whose connect request has arrived.
    pub(super) fn accept(
        &mut self,
        most: usize,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
        let mut n = 0;
        let mut strangers = 0;
        if std::mem::take(&mut self.door.gathered) {
            // They came before those that wait now.
            n += self.greet_all(peers, handler);
        }
        for at in 1..=most {
            self.door.more = at == most;
            match self.next_caller() {
                Ok(greeting) => n += self.meet(greeting, peers, handler),
                Err(Other::User) => strangers += 1,
                Err(Other::Nobody) => break,
            }
        }
        if strangers > 0 {
            self.door.pause(&self.epoll, PAUSE_NS);
            self.door.close_strangers();
        }
        n
    }

    /// Accepts a waiting connection of this user.
    fn next_caller(&mut self) -> Result<Greeting, Other> {
        if self.door.strangers.len() >= STRANGERS_MAX {
            return Err(Other::Nobody);
        }
        let (socket, scarce) = match self.door.next() {
            Ok(Some(next)) => next,
            Ok(None) => return Err(Other::Nobody),
            Err(e) => {
                self.door.on_error("accept4", e, self.me.port(), &self.epoll);
                return Err(Other::Nobody);
            }
        };
        let credentials = match unix::credentials(socket.as_fd()) {
            Ok(credentials) => credentials,
            // The peer sees the listener gone when it sees this socket closed, and takes its messages back.
            Err(e) => {
                self.door.on_error("getsockopt", e, self.me.port(), &self.epoll);
                self.door.strangers.push(socket);
                self.door.close_strangers();
                return Err(Other::Nobody);
            }
        };
        self.door.backoff = 0;
        if user::is_ours(&credentials) {
            let (since, watched, claim) = (clock::now_ns(), false, None);
            return Ok(Greeting { socket, credentials, since, scarce, watched, claim });
        }
        log::limited!(
            "user {} connects to udrv/{} of user {}: refused",
            credentials.uid,
            self.me.port(),
            process::effective_uid()
        );
        self.door.strangers.push(socket);
        Err(Other::User)
    }

    /// Handles a new connection of this user.
    fn meet(
        &mut self,
        greeting: Greeting,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
        // A sender connects and sends its request at once: mostly it is there.
        let (mut n, waits) = self.receive(greeting, peers, handler);
        if let Some(greeting) = waits {
            let at = self.door.room();
            let slot = self.door.greetings.get_mut(at).and_then(Option::as_mut);
            if let Some(claim) = slot.and_then(|greeting| greeting.claim.as_mut()) {
                claim.in_the_way = true;
                n += self.greet(at, peers, handler);
            }
            self.dismiss_silent(at, peers, handler);
            self.turn_away(at);
            if let Some(slot) = self.door.greetings.get_mut(at) {
                *slot = Some(greeting);
            }
            self.watch_greeting(at);
        }
        n
    }

    /// Adds a connection to the set. Where there is no descriptor for the set, it is looked at from time to time.
    fn watch_greeting(&mut self, at: usize) {
        let greeting = self.door.greetings.get_mut(at).and_then(Option::as_mut);
        let Some(greeting) = greeting.filter(|greeting| !greeting.watched) else { return };
        match self.epoll.add(greeting.socket.as_fd(), TOKEN_GREETING | at as u64) {
            Ok(()) => greeting.watched = true,
            Err(e) if e.is_shortage() => {}
            Err(e) => {
                refuse(&greeting.socket, &resources(e));
                self.door.strangers.extend(
                    self.door.greetings.get_mut(at).and_then(Option::take).map(|one| one.socket),
                );
            }
        }
    }

    /// Removes a connection from the set.
    fn unwatch_greeting(&self, greeting: &Greeting) {
        if greeting.watched {
            self.epoll.remove(greeting.socket.as_fd());
        }
    }

    /// Closes the connection of a link that was accepted. The peer may have sent more, including descriptors.
    pub(super) fn dismiss(&mut self, greeting: Greeting) {
        self.unwatch_greeting(&greeting);
        let socket = greeting.socket;
        if let unix::Received::Message(message) = unix::receive(socket.as_fd(), &mut [0]) {
            self.door.strangers.extend(message.fds);
            self.door.strangers.push(socket);
            self.door.close_strangers();
        }
    }

    /// Accepts every link that a peer has made.
    pub(super) fn take_in(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) {
        self.greet_all(peers, handler);
        self.accept(unix::BACKLOG, peers, handler);
    }

    fn greet_all(&mut self, peers: &mut PeerTable, handler: &mut impl Handler) -> usize {
        (0..self.door.greetings.len()).map(|at| self.greet(at, peers, handler)).sum()
    }

    /// Time-driven work: connections that send nothing, paused listeners, refused links.
    #[cold]
    pub(super) fn look_after_door(
        &mut self,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
        let now = clock::now_ns();
        self.door.resume(&self.epoll, now);
        self.door.close_strangers();
        self.door.spare.refill();
        let mut n = self.look_after_refused(handler);
        for at in 0..self.door.greetings.len() {
            let greeting = self.door.greetings.get(at).and_then(Option::as_ref);
            let Some(greeting) = greeting else { continue };
            if greeting.claim.is_some() || !greeting.watched {
                n += self.greet(at, peers, handler);
                self.watch_greeting(at);
            }
            let greeting = self.door.greetings.get(at).and_then(Option::as_ref);
            let Some(greeting) = greeting.filter(|greeting| greeting.claim.is_none()) else {
                continue;
            };
            if now.saturating_sub(greeting.since) > HELLO_NS {
                n += self.dismiss_silent(at, peers, handler);
            }
        }
        n
    }

    /// Closes the connection in slot `at`, unless its connect request has arrived meanwhile.
    fn dismiss_silent(
        &mut self,
        at: usize,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
        let silent = |shm: &Self| {
            let greeting = shm.door.greetings.get(at)?.as_ref()?;
            greeting.claim.is_none().then_some(greeting.since)
        };
        let before = silent(self);
        let n = self.greet(at, peers, handler);
        if before.is_some() && silent(self) == before {
            self.turn_away(at);
        }
        n
    }

    /// Closes the connection in slot `at`, if there is one. Its sender takes its messages back.
    fn turn_away(&mut self, at: usize) {
        let Some(silent) = self.door.greetings.get_mut(at).and_then(Option::take) else { return };
        log::limited!(
            "process {} connected for a shared-memory link and said nothing",
            silent.credentials.pid
        );
        self.unwatch_greeting(&silent);
        refuse(&silent.socket, &LATE);
    }

    /// Reads the connect request of an accepted socket, if it has arrived, and answers it.
    pub(super) fn greet(
        &mut self,
        at: usize,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
        let Some(greeting) = self.door.greetings.get_mut(at).and_then(Option::take) else {
            return 0;
        };
        let (n, waits) = self.receive(greeting, peers, handler);
        if let Some(greeting) = waits {
            self.door.put_back(at, greeting);
        }
        n
    }

    /// Reads and answers the connect request of an accepted socket. Returns how many links it made, and the connection if it
    /// has to be looked at again.
    fn receive(
        &mut self,
        greeting: Greeting,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> (usize, Option<Greeting>) {
        let Some(mut greeting) = self.listen(greeting) else { return (0, None) };
        let Some(mut claim) = greeting.claim.take() else { return (0, Some(greeting)) };
        let pid = greeting.credentials.pid;
        if self.proves(&mut claim, &greeting, peers) && !self.is_successor(pid) {
            return self.admit(greeting, claim, peers, handler);
        }
        // The peer's process may be about to end.
        if claim.is_recent() {
            return (0, Some(greeting.with(claim)));
        }
        log::limited!(
            "process {pid} claims to be {}, where it does not listen: refused",
            claim.hello.source
        );
        self.reject(greeting, &MALFORMED);
        (0, None)
    }

    /// Reads the connect request of an accepted socket, if it has arrived and is not read yet. `None`: there will be none.
    fn listen(&mut self, greeting: Greeting) -> Option<Greeting> {
        if greeting.claim.is_some() {
            return Some(greeting);
        }
        match self.hear(&greeting) {
            Heard::Nothing => Some(greeting),
            Heard::Claim(claim) => Some(greeting.with(*claim)),
            Heard::Closed => {
                self.unwatch_greeting(&greeting);
                None
            }
            Heard::Refused(reject) => {
                self.reject(greeting, &reject);
                None
            }
        }
    }

    fn reject(&mut self, greeting: Greeting, reject: &Reject) {
        log::limited!(cause: reject.reason, "refused a shared-memory link: {reject}");
        self.unwatch_greeting(&greeting);
        refuse(&greeting.socket, reject);
        // The peer may have sent more, including descriptors.
        self.door.strangers.push(greeting.socket);
        self.door.close_strangers();
    }

    /// `peer` has departed, or seems to. A connect request that it sent, and that nothing has read, counts as a link that
    /// was refused. Other requests wait, also one of its next process.
    pub(super) fn gather_last_requests(&mut self, peer: PeerId) {
        let link = self.out(peer).filter(|_| self.inbound_of(peer).is_none());
        let Some(&Outbound { pid, port, nonce, .. }) = link else { return };
        self.door.gathered = true;
        while self.door.greetings.iter().flatten().count() < GREETINGS_MAX {
            match self.next_caller() {
                Ok(greeting) => {
                    let at = self.door.room();
                    self.door.put_back(at, greeting);
                    self.watch_greeting(at);
                }
                Err(Other::User) => {}
                Err(Other::Nobody) => break,
            }
        }
        for at in 0..self.door.greetings.len() {
            let Some(greeting) = self.door.greetings.get_mut(at).and_then(Option::take) else {
                continue;
            };
            let Some(mut greeting) = self.listen(greeting) else { continue };
            let its = |claim: &Claim| {
                let hello = &claim.hello;
                let same = hello.source.port() == port && nonce.is_none_or(|n| n == hello.nonce);
                same && greeting.credentials.pid == pid && has_left(claim, &greeting)
            };
            if !greeting.claim.as_ref().is_some_and(its) {
                self.door.put_back(at, greeting);
                continue;
            }
            self.unwatch_greeting(&greeting);
            if let Some(Claim { hello, segment, .. }) = greeting.claim.take() {
                let socket = Some(greeting.socket);
                self.door.refused.push(Refused::new(peer, hello.source, pid, segment, socket));
            }
        }
    }

    /// Reads what a connection of this user has sent.
    fn hear(&mut self, greeting: &Greeting) -> Heard {
        let mut bytes = [0; hello::LEN];
        let socket = greeting.socket.as_fd();
        // The connection may have taken the last descriptor, and the kernel drops a segment for which there is none: with the
        // messages of a sender that polls no more.
        let scarce = greeting.scarce || process::descriptors_are_scarce(&greeting.socket);
        let received = match scarce {
            true => spare::lend(|| unix::receive(socket, &mut bytes)),
            false => unix::receive(socket, &mut bytes),
        };
        let unix::Message { len, fds, cut } = match received {
            unix::Received::Nothing => return Heard::Nothing,
            unix::Received::Closed => return Heard::Closed,
            unix::Received::Message(message) => message,
        };
        let mut fds = fds.into_iter();
        let memory = fds.next();
        let claimed = self.read(bytes.get(..len).unwrap_or(&[]), memory.as_ref(), cut);
        self.door.strangers.extend(fds);
        let reject = match (claimed, memory) {
            (Ok((hello, mapped)), Some(file)) => {
                let geometry = hello.geometry;
                let segment = match mapped {
                    Ok(memory) => Segment::Mapped(Consumer::new(Arc::new(memory), geometry)),
                    Err(errno) => Segment::Unmapped(Unmapped { file, geometry, errno }),
                };
                return Heard::Claim(Box::new(Claim::new(hello, segment)));
            }
            (Ok(_), None) => MALFORMED,
            (Err(reject), memory) => {
                // A descriptor of unknown type may block when it is closed.
                self.door.strangers.extend(memory);
                reject
            }
        };
        Heard::Refused(reject)
    }

    /// Decodes a connect request, and maps the segment that came with it if the system allows it.
    fn read(
        &self,
        bytes: &[u8],
        fd: Option<&OwnedFd>,
        cut: bool,
    ) -> Result<(Hello, Result<SharedMemory, Errno>), Reject> {
        match Hello::version(bytes) {
            Some(hello::VERSION) => {}
            Some(_) => {
                let detail = u32::from(hello::VERSION);
                return Err(Reject { reason: RejectReason::Version, detail });
            }
            None => return Err(MALFORMED),
        }
        let hello = Hello::decode(bytes).ok_or(MALFORMED)?;
        if hello.mark != self.settings.mark {
            return Err(Reject { reason: RejectReason::Key, detail: 0 });
        }
        let ip = hello.source.0.ip();
        let here = self.host.owns(ip) || LocalHost::detect().owns(ip);
        if !here || hello.source.port() == self.me.port() {
            return Err(MALFORMED);
        }
        let fd = match fd {
            Some(fd) => fd,
            None if cut => return Err(resources(Errno(libc::EMFILE))),
            None => return Err(MALFORMED),
        };
        let sizes = hello.geometry;
        match SharedMemory::attach_in_parts(fd, sizes.len(), sizes.bulk_at()) {
            Err(Errno(libc::EINVAL)) => Err(MALFORMED),
            mapped => Ok((hello, mapped)),
        }
    }

    /// Whether the address in a connect request is the sender's own: its process listens there, or did until it ended.
    fn proves(&self, claim: &mut Claim, greeting: &Greeting, peers: &PeerTable) -> bool {
        let (port, pid) = (claim.hello.source.port(), greeting.credentials.pid);
        let ours = peers.find(&claim.hello.source).and_then(|peer| self.out(peer));
        if ours.is_some_and(|link| link.pid == pid) {
            return true; // it listened there when this endpoint made its own link
        }
        let reach = *claim.reach.get_or_insert_with(|| self.probe_attach(pid, &claim.hello));
        if reach.0 || reach.1 {
            // Processes that may access each other's memory keep no secrets. To ask costs more than the rest of the link.
            return true;
        }
        let listens = || names::listens(port, pid);
        let listens = match listens() {
            Err(e) if e.is_shortage() => spare::lend(listens),
            other => other,
        };
        // If this cannot be checked, the sender is at least a process of this user.
        listens.unwrap_or(true) || has_left(claim, greeting)
    }

    /// Why there can be no link from `peer` for a connect request. A connection that has to stay open is watched from now
    /// on.
    fn lack(&self, peer: PeerId, greeting: &mut Greeting, claim: &Claim) -> Option<Errno> {
        let stays = stays(greeting.credentials.pid) | claim.hello.features & hello::STAYS != 0;
        match &claim.segment {
            Segment::Unmapped(unmapped) => Some(unmapped.errno),
            Segment::Mapped(_) if self.bell.is_none() => Some(Errno(libc::ENOBUFS)),
            Segment::Mapped(_) if greeting.scarce => Some(Errno(libc::EMFILE)),
            Segment::Mapped(_) if !stays => None,
            Segment::Mapped(_) if process::descriptors_are_scarce(&greeting.socket) => {
                Some(Errno(libc::EMFILE))
            }
            Segment::Mapped(_) => {
                let (token, socket) = (TOKEN_INBOUND | u64::from(peer.0), greeting.socket.as_fd());
                let watched = match greeting.watched {
                    true => self.epoll.rename(socket, token),
                    false => self.epoll.add(socket, token),
                };
                greeting.watched |= watched.is_ok();
                watched.err()
            }
        }
    }

    /// Answers a verified connect request: with a link, if there are a descriptor and memory for it.
    fn admit(
        &mut self,
        mut greeting: Greeting,
        mut claim: Claim,
        peers: &mut PeerTable,
        handler: &mut impl Handler,
    ) -> (usize, Option<Greeting>) {
        let (source, pid) = (claim.hello.source, greeting.credentials.pid);
        let Some(peer) = peers.intern(&source) else {
            self.unwatch_greeting(&greeting);
            refuse(&greeting.socket, &resources(Errno(libc::ENOBUFS)));
            return (0, None);
        };
        ranks::learn(&source.0, claim.hello.rank);
        let lack = self.lack(peer, &mut greeting, &claim);
        if let (Segment::Mapped(consumer), None) = (&claim.segment, lack) {
            if !self.prepare(peer, pid, &claim.hello, consumer, peers, handler) {
                self.unwatch_greeting(&greeting);
                return (0, None);
            }
        }
        let recent = claim.is_recent();
        let failed = self.answer(&greeting.socket, lack, pid, recent && !claim.in_the_way).is_err();
        if failed && !has_left(&claim, &greeting) {
            if recent {
                return (0, Some(greeting.with(claim)));
            }
            // The sender sees the connection closed, and that it has failed.
            self.unwatch_greeting(&greeting);
            return (0, None);
        }
        // Even if the sender is gone, its messages are in the segment.
        match (claim.segment, lack) {
            (Segment::Mapped(consumer), None) => {
                let reach = claim.reach.unwrap_or_else(|| self.probe_attach(pid, &claim.hello));
                self.install(peer, claim.hello, consumer, greeting, reach, handler);
                (1, None)
            }
            (segment, lack) => {
                let errno = lack.unwrap_or(Errno(0));
                log::limited!(
                    cause: errno.0,
                    "cannot take the shared-memory link of {source} ({errno}): it is to send another way"
                );
                self.unwatch_greeting(&greeting);
                let socket = (!greeting.scarce && pid <= 0).then_some(greeting.socket);
                self.door.refused.push(Refused::new(peer, source, pid, segment, socket));
                (0, None)
            }
        }
    }
}

impl Shm {
    /// Answers a connect request of process `pid`. Errors: those of [`unix::send`]. `again`: a reply that cannot have its
    /// descriptor now fails, because it can be sent later. Without the receiver's words a link is never parked.
    fn answer(
        &mut self,
        socket: &OwnedFd,
        lack: Option<Errno>,
        pid: i32,
        again: bool,
    ) -> Result<(), Errno> {
        let socket = socket.as_fd();
        if let Some(errno) = lack {
            return unix::send(socket, &resources(errno).encode(), &[]);
        }
        let features = hello::ATOMICS | hello::COLLECTIVES | hello::LAPS | stays(pid);
        let welcome = Welcome { nonce: self.nonce, features, hint: (0, 0), rank: ranks::own() };
        if let Some((hints, number)) = self.inbound.next_hint() {
            let (file, offset) = hints.address();
            let welcome = Welcome { hint: (offset, number), ..welcome };
            match self.door.answers.send(socket, &welcome.encode(), file) {
                Ok(()) => return Ok(()),
                Err(e) if again && (e.is_shortage() || e == TOO_MANY) => return Err(e),
                // A filter may forbid to pass descriptors.
                Err(_) => {}
            }
        }
        unix::send(socket, &welcome.encode(), &[])
    }
}

/// The user that has connected, if it is another one.
enum Other {
    User,
    Nobody,
}

/// The result of [`Shm::hear`].
enum Heard {
    Nothing,
    Closed,
    Claim(Box<Claim>),
    Refused(Reject),
}

/// The sender has closed, or its process has ended: no more messages will come.
fn has_left(claim: &Claim, greeting: &Greeting) -> bool {
    claim.segment.producer_closed()
        || unix::has_hung_up(greeting.socket.as_fd())
        || !process::is_running(greeting.credentials.pid)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Heard::Message;
    use super::super::fixture::{Deaf, End, end, hears};
    use super::super::{ACCEPTS, READY};
    use super::*;
    use crate::transport::shm::config::CmaPolicy;
    use crate::transport::{Contact, Messages, Mode, Transport};

    fn ends() -> [End; 2] {
        [end(CmaPolicy::Off), end(CmaPolicy::Off)]
    }

    fn send(from: &mut End, to: &End, len: usize) -> PeerId {
        let peer = from.connect(to);
        from.shm.send(peer, Mode::Bulk, b"header", len, |_, _| ()).unwrap();
        peer
    }

    /// The connections that wait at `end` are accepted before their connect requests arrive, long ago.
    fn accept_early(end: &mut End) {
        let socket = end.shm.door.next().unwrap().unwrap().0;
        let credentials = unix::credentials(socket.as_fd()).unwrap();
        end.shm.epoll.add(socket.as_fd(), TOKEN_GREETING).unwrap();
        let (since, scarce, watched, claim) = (0, false, true, None);
        let greeting = Greeting { socket, credentials, since, scarce, watched, claim };
        end.shm.door.greetings.push(Some(greeting));
    }

    #[test]
    fn a_sleeper_behind_a_paused_door_is_woken() {
        let mut here = end(CmaPolicy::Off);
        assert!(here.shm.sleep());
        assert_eq!(here.shm.watches.wakes_at(), 0);
        here.shm.awake();
        let epoll = here.shm.epoll.clone();
        here.shm.door.pause(&epoll, PAUSE_NS);
        assert!(here.shm.sleep());
        assert_ne!(here.shm.watches.wakes_at(), 0);
    }

    #[test]
    fn a_connect_request_that_arrived_is_read_however_late_that_is() {
        let [mut a, mut b] = ends();
        send(&mut a, &b, 1000);
        accept_early(&mut b);
        // No event of it was handled in this turn: more descriptors were ready than one call returns.
        let mut ears = super::super::fixture::Ears::default();
        b.shm.look_after_door(&mut b.peers, &mut ears);
        assert_eq!(hears(&mut b), [Message(1000)]);
        // Nor is one lost whose slot is needed.
        send(&mut b, &a, 2000);
        accept_early(&mut a);
        a.shm.door.greetings.resize_with(GREETINGS_MAX, || None);
        a.shm.dismiss_silent(0, &mut a.peers, &mut Deaf);
        assert_eq!(hears(&mut a), [Message(2000)]);
    }

    #[test]
    fn a_request_of_an_earlier_life_leaves_the_link_of_the_next_alone() {
        let [mut a, mut b] = ends();
        send(&mut a, &b, 1000);
        accept_early(&mut b);
        let mut a = a.next_life();
        send(&mut a, &b, 7);
        let mut ears = super::super::fixture::Ears::default();
        b.shm.accept(1, &mut b.peers, &mut ears);
        assert_eq!(hears(&mut b), [Message(7)], "what the earlier life sent came too late");
        send(&mut b, &a, 8);
        assert_eq!(hears(&mut a), [Message(8)]);
    }

    #[test]
    fn a_request_that_comes_too_late_is_taken_back_by_its_sender() {
        let [mut a, mut b] = ends();
        let socket = unix::connect(&format!("udrv/{}", b.me.port())).unwrap();
        b.turn(&mut Deaf);
        b.shm.door.greetings.iter_mut().flatten().for_each(|greeting| greeting.since = 0);
        b.turn(&mut Deaf);
        let mut bytes = [0; hello::LEN];
        let unix::Received::Message(answer) = unix::receive(socket.as_fd(), &mut bytes) else {
            panic!("closed without an answer")
        };
        let answer = Reject::decode(&bytes[..answer.len]).unwrap();
        assert_eq!(answer, LATE);
        // As if this were the answer to the request of `a`.
        let peer = send(&mut a, &b, 1000);
        accept_early(&mut b);
        let silent = b.shm.door.greetings.pop().unwrap().unwrap();
        b.shm.epoll.remove(silent.socket.as_fd());
        refuse(&silent.socket, &answer);
        drop(silent);
        a.turn(&mut Deaf);
        let returned = a.shm.returned();
        assert_eq!((returned.len(), returned[0].messages.len()), (1, 1));
        assert!(!a.shm.is_connected(peer));
    }

    #[test]
    fn messages_for_a_peer_that_withdrew_are_taken_back_although_its_request_comes_first() {
        let [mut a, mut b] = ends();
        let peer = send(&mut a, &b, 1000);
        send(&mut b, &a, 2000);
        b.shm.door.names.withdraw(b.me.port());
        let mut ears = super::super::fixture::Ears::default();
        a.shm.accept(ACCEPTS, &mut a.peers, &mut ears);
        assert!(!a.shm.is_connected(peer));
        assert_eq!(a.shm.returned().len(), 1);
        a.shm.poll(&mut ears);
        assert_eq!(ears.0, [Message(2000)]);
    }

    #[test]
    fn a_link_waits_for_one_turn_that_takes_in_what_waits() {
        let [mut a, mut b] = ends();
        let peer = a.peers.intern(&b.me).unwrap();
        // Connections come all the time, and never one of `b`.
        let mut callers = Vec::new();
        let mut call = |to: &End| {
            callers.push(unix::connect(&format!("udrv/{}", to.me.port())).unwrap());
        };
        call(&a);
        assert_eq!(a.shm.link(peer, &b.me), Ok(Contact::Later));
        assert_eq!(a.shm.link(peer, &b.me), Ok(Contact::Later), "no turn since");
        assert!(!b.shm.door.is_called(), "no connection is made in vain");
        a.turn(&mut Deaf);
        call(&a);
        assert_eq!(a.shm.link(peer, &b.me), Ok(Contact::Later), "not seen there before");
        a.turn(&mut Deaf);
        call(&a);
        assert_eq!(a.shm.link(peer, &b.me), Ok(Contact::Linked));
        assert!(a.shm.door.attempts.is_empty());
        b.turn(&mut Deaf);
    }

    #[test]
    fn a_connection_that_is_looked_at_again_takes_no_place_of_another() {
        let [mut a, _b] = ends();
        let senders: Vec<End> = (0..=GREETINGS_MAX)
            .map(|_| {
                let mut one = end(CmaPolicy::Off);
                send(&mut one, &a, 1000);
                one
            })
            .collect();
        let accept = |a: &mut End| a.shm.next_caller().ok().unwrap();
        let first = accept(&mut a);
        for at in 0..GREETINGS_MAX {
            let greeting = accept(&mut a);
            a.shm.door.put_back(at, greeting);
        }
        a.shm.door.put_back(0, first);
        assert_eq!(a.shm.door.greetings.iter().flatten().count(), senders.len());
    }

    #[test]
    fn a_turn_handles_more_connections_than_one_call_returns() {
        let [mut a, mut b] = ends();
        let senders: Vec<End> = (0..2 * READY)
            .map(|_| {
                let mut one = end(CmaPolicy::Off);
                send(&mut one, &a, 1000);
                accept_early(&mut a);
                one
            })
            .collect();
        for (at, greeting) in (0..).zip(&a.shm.door.greetings) {
            let socket = greeting.as_ref().unwrap().socket.as_fd();
            a.shm.epoll.rename(socket, TOKEN_GREETING | at).unwrap();
        }
        a.shm.poll_sockets(&mut a.peers, &mut Deaf);
        assert_eq!(a.shm.inbound.len(), senders.len());
        b.turn(&mut Deaf);
    }
}
