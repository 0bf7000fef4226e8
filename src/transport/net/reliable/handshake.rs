//! How connections come to be, are tested, and give way to the next life of a peer.
//!
//! Who sends a handshake packet has the job key, because the tag says so; but it may be an old
//! packet that someone has sent again. Therefore nothing that exists is given up for an INIT: the
//! other side has to answer to a nonce of ours first.

use super::connection::{ACCEPT, Connection, DOUBT, INIT, PROBE, Phase};
use super::packet::{
    HELLO_LEN, HELLO_TAG_AT, Hello, HelloKind, REFUSED_KEY, REFUSED_VERSION, VERSION, VERSION_MIN,
};
use super::tag::{JobKey, same};
use super::timers::NEVER;
use super::{
    COOKIE_SHIFT, End, HALF_OPEN_FREE, HALF_OPEN_MAX, HINTS_MAX, HINTS_NS, REPLIES_MAX, Reliable,
    Sink,
};
use crate::sys::Errno;
use crate::telemetry::log;
use crate::transport::address::WIRE_LEN;
use crate::transport::net::neighbours::Standing;
use crate::transport::{Address, Departure, PeerId};

impl Reliable {
    pub(super) fn on_hello(
        &mut self,
        now: u64,
        from: &Address,
        hello: &Hello,
        bytes: &[u8],
        sink: &mut impl Sink,
    ) {
        let shared = &mut self.shared;
        let signed = bytes.get(..HELLO_TAG_AT).unwrap_or(&[]);
        if !same(shared.settings.key.tag(signed), hello.tag) {
            match hello.kind {
                HelloKind::Refuse if hello.features == REFUSED_KEY => self.on_other_key(hello),
                _ => self.drop_forged(now, from, hello),
            }
            return;
        }
        let own = hello.life == shared.settings.life;
        if own || hello.dest_port != shared.settings.address.port() || hello.life & 1 == 0 {
            shared.counts.stray += 1;
            return;
        }
        if hello.version < VERSION_MIN || hello.version_min > VERSION {
            self.refuse_version(hello);
            return;
        }
        match hello.kind {
            HelloKind::Init => self.on_init(now, from, hello, bytes.len(), sink),
            HelloKind::Accept => self.on_accept(now, hello, sink),
            HelloKind::Refuse => self.on_refuse(hello, sink),
            HelloKind::Retry => self.on_retry(hello, sink),
        }
    }

    /// A handshake packet has a tag that our key did not make.
    #[cold]
    fn drop_forged(&mut self, now: u64, from: &Address, hello: &Hello) {
        self.shared.counts.forged += 1;
        log::limited!(
            "a handshake from {from} was dropped: it has another job key than we, or is damaged (ours: {}; fi_udrv(7), Job keys)",
            self.shared.settings.key_source
        );
        let for_us = hello.dest_port == self.shared.settings.address.port();
        if hello.kind != HelloKind::Init || !for_us || self.replies.len() >= REPLIES_MAX {
            return;
        }
        if now.saturating_sub(self.hints_since) >= HINTS_NS {
            (self.hints, self.hints_since) = (0, now);
        }
        if self.hints >= HINTS_MAX {
            return;
        }
        self.hints += 1;
        // Its sender waits for an answer, and cannot know why none comes. What it is told has no tag, which tells
        // nothing of our key; repeats what only the receiver of its INIT knows; goes where that came from; and is
        // not longer than that.
        self.replies.push_back((*from, self.refusal(hello, REFUSED_KEY).encode()));
    }

    /// The peer says that our INIT has another job key than it has. Anybody on the way may have said so: it is told, and
    /// ends nothing before its time.
    #[cold]
    fn on_other_key(&mut self, hello: &Hello) {
        let source = self.shared.settings.key_source;
        let place = hello.dest & ((1 << super::PLACE_BITS) - 1);
        let Some(c) = self.at(place) else { return };
        let asked = c.id == hello.dest && c.nonce == hello.echo && c.phase == Phase::Greeting;
        if asked && !std::mem::replace(&mut c.key_refused, true) {
            log::limited!(
                "{} does not accept our packets: it has another job key (ours: {source}; fi_udrv(7), Job keys)",
                c.address
            );
        }
    }

    /// The connection that `hello` answers to. The answer has to come from whom we asked: somebody
    /// may have sent our question elsewhere.
    fn addressee(&mut self, hello: &Hello, sink: &impl Sink) -> Option<u32> {
        let place = hello.dest & ((1 << super::PLACE_BITS) - 1);
        let from = sink.find(&hello.address)?;
        let c = self.at(place)?;
        (c.id == hello.dest && c.nonce == hello.echo && c.peer == from).then_some(place)
    }

    /// The sender of an INIT that came from `from` is of another host, or of this user: what is sent to it, wherever
    /// it says that it is, gets to no other user of this host.
    fn admits(&mut self, from: &Address, hello: &Hello, sink: &impl Sink) -> bool {
        let admitted = |address: &Address| sink.standing(address) == Standing::Admitted;
        let both = admitted(&hello.address) && (*from == hello.address || admitted(from));
        self.shared.counts.strangers += u64::from(!both);
        both
    }

    /// `hello` is of a connection that both sides have proven.
    fn is_known(&mut self, hello: &Hello, main: Option<u32>) -> bool {
        let c = main.and_then(|place| self.at(place));
        c.is_some_and(|c| c.phase == Phase::Established && c.is_with(hello))
    }

    /// `len`: of the whole datagram.
    fn on_init(
        &mut self,
        now: u64,
        from: &Address,
        hello: &Hello,
        len: usize,
        sink: &mut impl Sink,
    ) {
        let known = sink.find(&hello.address);
        let main = known.and_then(|peer| self.place_of(peer));
        let crowded = main.is_none() && self.shared.half_open >= HALF_OPEN_FREE;
        if crowded && !self.has_cookie(now, hello) {
            self.ask_again(now, hello);
            return;
        }
        if !self.is_known(hello, main) && !self.admits(from, hello, sink) {
            return;
        }
        let Some(peer) = known.or_else(|| sink.peer_of(&hello.address)) else {
            self.shared.counts.no_room += 1;
            return;
        };
        let Some(main) = main else {
            let made = self.half_open(now, peer, hello, len, None);
            match made.and_then(|place| self.at(place)) {
                Some(c) => c.provisional = known.is_none(),
                None if known.is_none() => sink.forget(peer),
                None => {}
            }
            return;
        };
        let place = match self.at(main) {
            Some(c) if c.phase == Phase::Established && !c.is_with(hello) => {
                // Another life, or another connection, of the same address: it has to prove that it
                // is not an old packet.
                if c.nonce == hello.echo {
                    // Two lives have answered one question of ours: which of them is there?
                    c.hello |= INIT;
                    self.settle(main);
                    return;
                }
                match c.challenger {
                    Some(place) => place,
                    None => {
                        self.half_open(now, peer, hello, len, Some(main));
                        return;
                    }
                }
            }
            Some(_) => main,
            None => return,
        };
        let slot = self.slots.get_mut(place as usize);
        let Some(c) = slot.and_then(|s| s.connection.as_deref_mut()) else { return };
        if c.phase == Phase::Established {
            c.heard(&self.shared);
        } else if hello.echo != 0 && (hello.echo, hello.dest) == (c.nonce, c.id) {
            // It has got our answer, and knows a nonce that no old packet can know.
            c.adopt(&self.shared, hello);
            if !self.establish(place, now, sink) {
                return;
            }
        } else {
            // We asked at the same time, or it asks again, or somebody sends an old packet.
            self.shared.half_open += usize::from(c.phase == Phase::Greeting);
            c.phase = Phase::HalfOpen;
            if c.hello & ACCEPT != 0 && !c.is_with(hello) {
                let answer = c.hello(&self.shared, HelloKind::Accept);
                self.replies.push_back((c.address, answer.signed(&self.shared.settings.key)));
                self.replies.truncate(REPLIES_MAX);
            }
            c.adopt(&self.shared, hello);
        }
        if let Some(c) = self.at(place) {
            c.accept(hello, len);
        }
        self.settle(place);
    }

    /// Somebody asks for a connection that we do not have.
    fn half_open(
        &mut self,
        now: u64,
        peer: PeerId,
        hello: &Hello,
        len: usize,
        incumbent: Option<u32>,
    ) -> Option<u32> {
        if self.shared.half_open >= HALF_OPEN_MAX {
            self.shared.counts.no_room += 1;
            return None;
        }
        let nonce = self.shared.random();
        let address = hello.address;
        let mut c = Connection::new(&self.shared, peer, address, nonce, Phase::HalfOpen, now);
        c.adopt(&self.shared, hello);
        c.accept(hello, len);
        c.incumbent = incumbent;
        let place = self.insert(c, incumbent.is_none())?;
        self.shared.half_open += 1;
        if let Some(incumbent) = incumbent.and_then(|place| self.at(place)) {
            incumbent.challenger = Some(place);
        }
        self.settle(place);
        Some(place)
    }

    /// What `init` has to echo to be kept while many ask: only who gets packets at its address has it, and we need not
    /// remember that it was sent.
    fn cookie(&self, age: u64, init: &Hello) -> u64 {
        let Hello { life, nonce, connection, address, .. } = init;
        let mut bytes = [0; 8 * 4 + WIRE_LEN];
        let words =
            [*life, *nonce, u64::from(*connection), age].into_iter().flat_map(u64::to_le_bytes);
        for (to, from) in bytes.iter_mut().zip(words.chain(address.to_wire())) {
            *to = from;
        }
        self.shared.cookies.tag(&bytes)
    }

    fn has_cookie(&self, now: u64, init: &Hello) -> bool {
        let age = now >> COOKIE_SHIFT;
        init.echo != 0
            && [age, age.wrapping_sub(1)].iter().any(|age| same(self.cookie(*age, init), init.echo))
    }

    /// Many ask: this one shall show that it is where it says. It is told to who is there, which costs nothing to keep.
    fn ask_again(&mut self, now: u64, init: &Hello) {
        if self.replies.len() >= REPLIES_MAX {
            return;
        }
        let nonce = self.cookie(now >> COOKIE_SHIFT, init);
        let answer = Hello { kind: HelloKind::Retry, nonce, ..self.refusal(init, 0) };
        self.replies.push_back((init.address, answer.signed(&self.shared.settings.key)));
    }

    /// The other side wants to hear our INIT once more, with what it says.
    fn on_retry(&mut self, hello: &Hello, sink: &impl Sink) {
        let Some(place) = self.addressee(hello, sink) else {
            self.shared.counts.stray += 1;
            return;
        };
        let Some(c) = self.at(place) else { return };
        if c.phase == Phase::Greeting && c.peer_nonce != hello.nonce {
            c.peer_nonce = hello.nonce;
            c.hello |= INIT;
            self.settle(place);
        }
    }

    fn on_accept(&mut self, now: u64, hello: &Hello, sink: &mut impl Sink) {
        let Some(place) = self.addressee(hello, sink) else {
            self.shared.counts.stray += 1;
            return;
        };
        let slot = self.slots.get_mut(place as usize);
        let Some(c) = slot.and_then(|s| s.connection.as_deref_mut()) else { return };
        if c.phase == Phase::Established {
            if c.is_with(hello) {
                c.heard(&self.shared);
                // One that asked for something else than the path may wait for the proof.
                c.ack_now |= !c.on_probe_answer(hello.answered, now);
                if c.attempts > 0 {
                    // It is there: what waits for an answer need not wait longer.
                    c.on_path_answer(hello.answered);
                    c.attempts = 0;
                    c.retry_at = now;
                }
                self.settle(place);
                return;
            }
            if !hello.established {
                // It answers what we asked before there was a connection: an earlier life may have
                // said that, long ago. Which of them is there?
                c.hello |= INIT;
                self.settle(place);
                return;
            }
            // It answers our nonce, and knows nothing of the connection.
            let end = End::Departed(Departure::Failed(Errno(gone(c.peer_life == hello.life))));
            self.remove(place, end, sink);
            return;
        }
        if !c.is_with(hello) {
            c.adopt(&self.shared, hello);
        }
        if !self.establish(place, now, sink) {
            return;
        }
        if let Some(c) = self.at(place) {
            c.ack_now = true; // the proof that the other side waits for
            c.unheard = true;
        }
        self.settle(place);
    }

    fn on_refuse(&mut self, hello: &Hello, sink: &mut impl Sink) {
        let Some(place) = self.addressee(hello, sink) else {
            self.shared.counts.stray += 1;
            return;
        };
        if self.at(place).is_some_and(|c| c.phase == Phase::Established) {
            return;
        }
        log::limited!(
            "{} refuses: it speaks versions {} to {} of udrv's network protocol, this is version {VERSION}",
            hello.address,
            hello.version_min,
            hello.version
        );
        let errno = Errno(libc::EPROTONOSUPPORT);
        self.remove(place, End::Departed(Departure::Failed(errno)), sink);
    }

    fn refuse_version(&mut self, hello: &Hello) {
        self.shared.counts.versions += 1;
        log::limited!(
            "{} speaks versions {} to {} of udrv's network protocol, this is version {VERSION}",
            hello.address,
            hello.version_min,
            hello.version
        );
        if hello.kind != HelloKind::Init || self.replies.len() >= REPLIES_MAX {
            return;
        }
        let answer = self.refusal(hello, REFUSED_VERSION).signed(&self.shared.settings.key);
        self.replies.push_back((hello.address, answer));
    }

    /// The answer to an INIT that is not accepted for this reason.
    pub(super) fn refusal(&self, init: &Hello, reason: u32) -> Hello {
        let settings = &self.shared.settings;
        Hello {
            kind: HelloKind::Refuse,
            established: false,
            version: VERSION,
            version_min: VERSION_MIN,
            datagram_max: 0,
            features: reason,
            connection: 0,
            answered: 0,
            credit: 0,
            life: settings.life,
            nonce: 0,
            echo: init.nonce,
            address: settings.address,
            dest: init.connection,
            dest_port: init.address.port(),
            tag: 0,
        }
    }

    /// The other side of `place` has proven that it is there. False: it is another user's process of this host.
    pub(super) fn establish(&mut self, place: u32, now: u64, sink: &mut impl Sink) -> bool {
        let Some(c) = self.at(place) else { return false };
        match sink.standing(&c.address) {
            Standing::Admitted => {}
            // The one that we asked, or answered, has closed meanwhile; there may be another one soon.
            Standing::Absent => {
                self.shared.counts.strangers += 1;
                return false;
            }
            Standing::Stranger(_) | Standing::Unknown => {
                self.shared.counts.strangers += 1;
                let end = End::Departed(Departure::Failed(Errno(libc::EPERM)));
                self.remove(place, end, sink);
                return false;
            }
        }
        let Some(c) = self.at(place) else { return false };
        let was_half_open = c.phase == Phase::HalfOpen;
        let incumbent = c.incumbent.take();
        c.phase = Phase::Established;
        c.hello &= !(INIT | PROBE | DOUBT);
        c.attempts = 0;
        c.retry_at = NEVER;
        c.on_established(now);
        let (peer, address, life) = (c.peer, c.address, c.peer_life);
        self.shared.half_open -= usize::from(was_half_open);
        self.shared.counts.connected += 1;
        if let Some(old) = incumbent {
            let same_life = match self.at(old) {
                Some(c) => {
                    c.challenger = None;
                    c.peer_life == life
                }
                None => true,
            };
            let end = End::Departed(Departure::Failed(Errno(gone(same_life))));
            self.remove(old, end, sink);
            self.set_main(peer, place);
        }
        let slot = self.slots.get_mut(place as usize);
        if let Some(c) = slot.and_then(|s| s.connection.as_deref_mut()) {
            c.heard(&self.shared);
            c.owe(&self.shared, now);
        }
        self.note_met(peer);
        sink.on_connected(peer, &address);
        true
    }
}

impl Hello {
    /// The bytes, with their tag.
    pub(super) fn signed(&self, key: &JobKey) -> [u8; HELLO_LEN] {
        let mut bytes = self.encode();
        let (body, tag) = bytes.split_at_mut(HELLO_TAG_AT);
        tag.copy_from_slice(&key.tag(body).to_le_bytes());
        bytes
    }
}

/// What became of a connection that the other side knows nothing of.
fn gone(same_life: bool) -> i32 {
    if same_life { libc::ECONNRESET } else { libc::EHOSTDOWN }
}
