//! How connections come to be, are tested, and give way to the next life of a peer.
//!
//! Who sends a handshake packet has the job key, because the tag says so; but it may be an old
//! packet that someone has sent again. Therefore nothing that exists is given up for an INIT: the
//! other side has to answer to a nonce of ours first.

use super::Reliable;
use super::connection::handshake::{ACCEPT, INIT, Phase, Rival};
use super::connection::{Connection, End, HALF_OPEN_MAX};
use super::interface::Sink;
use super::packet::{
    HELLO_LEN, HELLO_TAG_AT, Hello, HelloKind, REFUSED_KEY, REFUSED_VERSION, VERSION, VERSION_MIN,
};
use super::tag::same;
use crate::telemetry::log;
use crate::transport::address::WIRE_LEN;
use crate::transport::net::neighbours::Standing;
use crate::transport::{Address, PeerId};

/// Connections whose other side has not proven yet that it is there, of which on INITs of unknown peers have to come from
/// where they say: nothing is kept of those that do not (PROTOCOL.md §7.2).
pub(super) const HALF_OPEN_FREE: usize = 64;
/// For how long a proof of that is good, once or twice, as a power of two of nanoseconds.
const COOKIE_SHIFT: u32 = 33;
/// Answers to strangers that wait to be sent.
const REPLIES_MAX: usize = 64;
/// Senders of handshakes that are told that their job key is another one, at most so many in this time, nanoseconds.
pub(super) const HINTS_MAX: u32 = 64;
const HINTS_NS: u64 = 1_000_000_000;

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
            return self.refuse_version(hello);
        }
        if hello.kind == HelloKind::Init {
            return self.on_init(now, from, hello, bytes.len(), sink);
        }
        match (self.addressee(hello, sink), hello.kind) {
            (None, _) => self.shared.counts.stray += 1,
            (Some(place), HelloKind::Refuse) => self.on_refuse(place, hello, sink),
            (Some(place), HelloKind::Retry) => self.on_retry(place, hello),
            (Some(place), _) => self.on_accept(place, now, hello, sink),
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
        self.hints += 1;
        if self.hints > HINTS_MAX {
            return;
        }
        // Its sender waits for an answer, and cannot know why none comes. What it is told has no tag, which tells
        // nothing of our key; repeats what only the receiver of its INIT knows; goes where that came from; and is
        // not longer than that.
        self.reply(*from, self.refusal(hello, REFUSED_KEY).encode());
    }

    /// Answers somebody without a connection, unless too many answers wait.
    fn reply(&mut self, to: Address, packet: [u8; HELLO_LEN]) {
        if self.replies.len() < REPLIES_MAX {
            self.replies.push_back((to, packet));
        }
    }

    /// The peer says that our INIT has another job key than it has. Anybody on the way may have said so: it is told, and
    /// ends nothing before its time.
    #[cold]
    fn on_other_key(&mut self, hello: &Hello) {
        let source = self.shared.settings.key_source;
        let Some((_, c)) = self.table.numbered(hello.dest) else { return };
        let asked = c.handshake.nonce == hello.echo && c.handshake.phase == Phase::Greeting;
        if asked && !std::mem::replace(&mut c.handshake.key_refused, true) {
            log::limited!(
                "{} does not accept our packets: it has another job key (ours: {source}; fi_udrv(7), Job keys)",
                c.address
            );
        }
    }

    /// The connection that `hello` answers to. The answer has to come from whom we asked: somebody
    /// may have sent our question elsewhere.
    fn addressee(&mut self, hello: &Hello, sink: &impl Sink) -> Option<u32> {
        let from = sink.find(&hello.address)?;
        let (place, c) = self.table.numbered(hello.dest)?;
        (c.handshake.nonce == hello.echo && c.peer == from).then_some(place)
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
        let c = main.and_then(|place| self.table.at(place));
        c.is_some_and(|c| c.handshake.is_established() && c.handshake.is_with(hello))
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
        let main = known.and_then(|peer| self.table.place_of(peer));
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
            match made.and_then(|place| self.table.at(place)) {
                Some(c) => c.handshake.provisional = known.is_none(),
                None if known.is_none() => sink.forget(peer),
                None => {}
            }
            return;
        };
        let Some(c) = self.table.at(main) else { return };
        if !c.handshake.is_established() || c.handshake.is_with(hello) {
            return self.take_init(main, now, hello, len, sink);
        }
        // Another life, or another connection, of the same address: it has to prove that it
        // is not an old packet.
        if c.handshake.nonce == hello.echo {
            // Two lives have answered one question of ours: which of them is there?
            c.handshake.hellos |= INIT;
            self.settle(main);
        } else if let Some(Rival::Challenger(place)) = c.handshake.rival {
            self.take_init(place, now, hello, len, sink);
        } else {
            self.half_open(now, peer, hello, len, Some(main));
        }
    }

    /// An INIT of `len` bytes is for the connection at `place`.
    fn take_init(&mut self, place: u32, now: u64, hello: &Hello, len: usize, sink: &mut impl Sink) {
        let Some(c) = self.table.at(place) else { return };
        if c.handshake.is_established() {
            c.liveness.heard(self.shared.patience);
        } else if hello.echo != 0 && (hello.echo, hello.dest) == (c.handshake.nonce, c.id) {
            // It has got our answer, and knows a nonce that no old packet can know.
            c.adopt(&self.shared, hello);
            if !self.establish(place, now, sink) {
                return;
            }
        } else {
            // We asked at the same time, or it asks again, or somebody sends an old packet.
            self.shared.half_open += usize::from(c.handshake.phase == Phase::Greeting);
            c.handshake.phase = Phase::HalfOpen;
            let answer = (c.handshake.hellos & ACCEPT != 0 && !c.handshake.is_with(hello))
                .then(|| (c.address, c.hello(&self.shared, HelloKind::Accept)));
            c.adopt(&self.shared, hello);
            if let Some((to, answer)) = answer {
                self.reply(to, answer.signed(&self.shared.settings.key));
            }
        }
        if let Some(c) = self.table.at(place) {
            c.handshake.accept(hello, len);
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
        let mut c = Connection::new(&mut self.shared, peer, hello.address, Phase::HalfOpen, now);
        c.adopt(&self.shared, hello);
        c.handshake.accept(hello, len);
        c.handshake.rival = incumbent.map(Rival::Incumbent);
        let place = self.table.insert(Box::new(c), incumbent.is_none())?;
        self.shared.half_open += 1;
        if let Some(incumbent) = incumbent.and_then(|place| self.table.at(place)) {
            incumbent.handshake.rival = Some(Rival::Challenger(place));
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
        let nonce = self.cookie(now >> COOKIE_SHIFT, init);
        let answer = Hello { kind: HelloKind::Retry, nonce, ..self.refusal(init, 0) };
        self.reply(init.address, answer.signed(&self.shared.settings.key));
    }

    /// The other side wants to hear our INIT once more, with what it says.
    fn on_retry(&mut self, place: u32, hello: &Hello) {
        let Some(c) = self.table.at(place) else { return };
        if c.handshake.phase == Phase::Greeting && c.handshake.echo != hello.nonce {
            c.handshake.echo = hello.nonce;
            c.handshake.hellos |= INIT;
            self.settle(place);
        }
    }

    fn on_accept(&mut self, place: u32, now: u64, hello: &Hello, sink: &mut impl Sink) {
        let Some(c) = self.table.at(place) else { return };
        if !c.handshake.is_established() {
            if !c.handshake.is_with(hello) {
                c.adopt(&self.shared, hello);
            }
            if !self.establish(place, now, sink) {
                return;
            }
            if let Some(c) = self.table.at(place) {
                // The proof that the other side waits for.
                c.receiver.acknowledgement.now = true;
                c.handshake.unheard = true;
            }
        } else if c.handshake.is_with(hello) {
            c.liveness.heard(self.shared.patience);
            c.on_answered(hello.answered, now);
        } else if !hello.established {
            // It answers what we asked before there was a connection: an earlier life may have
            // said that, long ago. Which of them is there?
            c.handshake.hellos |= INIT;
        } else {
            // It answers our nonce, and knows nothing of the connection.
            let end = gone(c.handshake.life() == Some(hello.life));
            self.remove(place, end, sink);
            return;
        }
        self.settle(place);
    }

    fn on_refuse(&mut self, place: u32, hello: &Hello, sink: &mut impl Sink) {
        if self.table.at(place).is_some_and(|c| c.handshake.is_established()) {
            return;
        }
        log::limited!(
            "{} refuses: it speaks versions {} to {} of udrv's network protocol, this is version {VERSION}",
            hello.address,
            hello.version_min,
            hello.version
        );
        self.remove(place, End::failed(libc::EPROTONOSUPPORT), sink);
    }

    fn refuse_version(&mut self, hello: &Hello) {
        self.shared.counts.versions += 1;
        log::limited!(
            "{} speaks versions {} to {} of udrv's network protocol, this is version {VERSION}",
            hello.address,
            hello.version_min,
            hello.version
        );
        if hello.kind == HelloKind::Init {
            let answer = self.refusal(hello, REFUSED_VERSION).signed(&self.shared.settings.key);
            self.reply(hello.address, answer);
        }
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
        let Some(c) = self.table.at(place) else { return false };
        let standing = sink.standing(&c.address);
        if standing != Standing::Admitted {
            self.shared.counts.strangers += 1;
            // The one that we asked, or answered, has closed if it is absent; there may be another one soon.
            if standing != Standing::Absent {
                self.remove(place, End::failed(libc::EPERM), sink);
            }
            return false;
        }
        let Some(c) = self.table.at(place) else { return false };
        self.shared.half_open -= usize::from(c.handshake.phase == Phase::HalfOpen);
        self.shared.counts.connected += 1;
        c.on_established(&self.shared, now);
        let (peer, address) = (c.peer, c.address);
        let (life, rival) = (c.handshake.life(), c.handshake.rival);
        if let Some(Rival::Incumbent(old)) = rival {
            // This one is the main one then.
            let same_life = self.table.at(old).is_none_or(|c| c.handshake.life() == life);
            self.remove(old, gone(same_life), sink);
        }
        self.table.note_met(peer);
        sink.on_connected(peer, &address);
        true
    }
}

/// What becomes of a connection that the other side knows nothing of.
fn gone(same_life: bool) -> End {
    End::failed(if same_life { libc::ECONNRESET } else { libc::EHOSTDOWN })
}
