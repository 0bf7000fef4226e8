//! How connections are made, are tested, and are replaced when a peer has a new incarnation.
//!
//! The tag of a handshake packet proves that its sender has the job key, but an attacker may replay an old one.
//! Therefore an INIT alone never ends an existing connection: the peer must first answer to a nonce of this endpoint.

use super::Reliable;
use super::connection::handshake::{ACCEPT, INIT, Phase, Rival};
use super::connection::{Connection, End, HALF_OPEN_MAX};
use super::interface::Sink;
use super::packet::{
    HELLO_LEN, HELLO_TAG_AT, Hello, HelloKind, REFUSED_KEY, REFUSED_VERSION, VERSION, VERSION_MIN,
};
use super::sender::Sender;
use crate::telemetry::{log, ranks};
use crate::transport::address::WIRE_LEN;
use crate::transport::job_key::same;
use crate::transport::net::neighbours::Standing;
use crate::transport::{Address, PeerId};

/// Above this many half-open connections, INITs of unknown peers must prove their source address with a cookie, and
/// nothing is kept of the others (PROTOCOL.md §7.2).
pub(super) const HALF_OPEN_FREE: usize = 64;
/// A cookie is valid for one to two times this period, as a power of two of nanoseconds.
const COOKIE_SHIFT: u32 = 33;
/// Most replies to peers without a connection that wait to be sent.
const REPLIES_MAX: usize = 64;
/// Most handshakes with another job key that are answered with a hint within `HINTS_NS`, nanoseconds.
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
        let hello = &Hello { address: hello.address.on_link_of(from), ..*hello };
        let own = hello.life == shared.settings.life;
        if own || hello.dest_port != shared.settings.address.port() || hello.life & 1 == 0 {
            shared.counts.stray += 1;
            return;
        }
        if hello.version < VERSION_MIN || hello.version_min > VERSION {
            return self.refuse_version(hello);
        }
        if matches!(hello.kind, HelloKind::Init | HelloKind::Accept) {
            ranks::learn(&hello.address.0, hello.rank.into());
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

    /// A handshake packet has a tag that was not made with this endpoint's key.
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
        // Its sender waits for an answer, and cannot know why none comes. The hint has no tag, so it reveals nothing of
        // the key; it repeats what only a receiver of the INIT knows, goes where the INIT came from, and is not longer.
        self.reply(*from, self.refusal(hello, REFUSED_KEY).encode());
    }

    /// Sends a reply to a peer without a connection, unless too many wait.
    fn reply(&mut self, to: Address, packet: [u8; HELLO_LEN]) {
        if self.replies.len() < REPLIES_MAX {
            self.replies.push_back((to, packet));
        }
    }

    /// The peer says that it has another job key. The packet may be forged, so it is logged, and the handshake's time
    /// is not cut short.
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

    /// The connection that `hello` answers to. The answer must come from the peer that was asked: an attacker may have
    /// forwarded the INIT to another one.
    fn addressee(&mut self, hello: &Hello, sink: &impl Sink) -> Option<u32> {
        let from = sink.find(&hello.address)?;
        let (place, c) = self.table.numbered(hello.dest)?;
        (c.handshake.nonce == hello.echo && c.peer == from).then_some(place)
    }

    /// The sender of an INIT that came from `from` is on another host, or belongs to this user: no other user of this
    /// host gets packets that are sent to it, whatever address it names.
    fn admits(&mut self, from: &Address, hello: &Hello, sink: &impl Sink) -> bool {
        let admitted = |address: &Address| sink.standing(address) == Standing::Admitted;
        let both = admitted(&hello.address) && (*from == hello.address || admitted(from));
        self.shared.counts.strangers += u64::from(!both);
        both
    }

    /// `hello` belongs to the established connection at `main`.
    fn is_known(&mut self, hello: &Hello, main: Option<u32>) -> bool {
        let c = main.and_then(|place| self.table.at(place));
        c.is_some_and(|c| c.handshake.is_established() && c.handshake.is_with(hello))
    }

    /// `len` is the length of the whole datagram, bytes.
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
        // Another incarnation, or another connection, of the same address: it must prove that this is not a replayed
        // packet.
        if c.handshake.nonce == hello.echo {
            // Two incarnations have answered the same INIT: a new one shows which of them is there.
            c.handshake.hellos |= INIT;
            self.settle(main);
        } else if let Some(Rival::Challenger(place)) = c.handshake.rival {
            self.take_init(place, now, hello, len, sink);
        } else {
            self.half_open(now, peer, hello, len, Some(main));
        }
    }

    /// Processes an INIT of `len` bytes for the connection at `place`.
    fn take_init(&mut self, place: u32, now: u64, hello: &Hello, len: usize, sink: &mut impl Sink) {
        let Some(c) = self.table.at(place) else { return };
        if c.handshake.is_established() {
            c.heard(self.shared.patience, now);
        } else if hello.echo != 0 && (hello.echo, hello.dest) == (c.handshake.nonce, c.id) {
            // It has received the reply, and knows a nonce that no replayed packet can contain.
            c.adopt(&self.shared, hello);
            if !self.establish(place, now, sink) {
                return;
            }
        } else {
            // Both sides asked at the same time, or the INIT was sent again, or is a replay.
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
            c.rest.hurry(now);
        }
        self.settle(place);
    }

    /// Makes a half-open connection for an INIT.
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

    /// The cookie that `init` must echo while many connections are half-open. Only a peer that receives packets at its
    /// address can know it, and this endpoint need not remember that it was sent.
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

    /// Too many are half-open: sends the cookie to the address that the INIT names. That keeps no state.
    fn ask_again(&mut self, now: u64, init: &Hello) {
        let nonce = self.cookie(now >> COOKIE_SHIFT, init);
        let answer = Hello { kind: HelloKind::Retry, nonce, ..self.refusal(init, 0) };
        self.reply(init.address, answer.signed(&self.shared.settings.key));
    }

    /// The peer wants this side's INIT again, with its nonce as the echo. If there is a connection with it, this is its
    /// next incarnation, or a replay: an established peer does not read the echo.
    fn on_retry(&mut self, place: u32, hello: &Hello) {
        let Some(c) = self.table.at(place) else { return };
        if c.handshake.cookie != hello.nonce {
            c.handshake.cookie = hello.nonce;
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
            let Sender { timeout, host, .. } = &c.sender;
            self.shared.lateness.note(*host, timeout.waited(now), now);
            if !self.establish(place, now, sink) {
                return;
            }
            if let Some(c) = self.table.at(place) {
                // This acknowledgement is the proof that the peer waits for.
                c.receiver.acknowledgement.now = true;
                c.handshake.unheard = true;
            }
        } else if c.handshake.is_with(hello) {
            c.handshake.cookie = 0;
            c.on_answered(hello.answered, self.shared.patience, now);
            c.heard(self.shared.patience, now);
        } else if !hello.established {
            // It answers an INIT sent before this connection was established, perhaps from an earlier incarnation. A
            // new INIT shows which of them is there.
            c.handshake.hellos |= INIT;
        } else {
            // The peer answers the nonce, and knows nothing of the connection.
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

    /// The answer that refuses an INIT for this reason.
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
            rank: 0,
            tag: 0,
        }
    }

    /// The peer at `place` has proven that it is there. False: it is another user's process on this host, or there is no
    /// memory for it.
    pub(super) fn establish(&mut self, place: u32, now: u64, sink: &mut impl Sink) -> bool {
        let Some(c) = self.table.at(place) else { return false };
        let standing = sink.standing(&c.address);
        if standing != Standing::Admitted {
            self.shared.counts.strangers += 1;
            // If it is absent, the process that was asked has closed its socket; there may be another one soon.
            if standing != Standing::Absent {
                self.remove(place, End::failed(libc::EPERM), sink);
            }
            return false;
        }
        let Some(c) = self.table.at(place) else { return false };
        if !sink.has_room(&c.address) {
            return false;
        }
        self.shared.half_open -= usize::from(c.handshake.phase == Phase::HalfOpen);
        self.shared.counts.connected += 1;
        c.on_established(&self.shared, now);
        let (peer, address) = (c.peer, c.address);
        let (life, rival) = (c.handshake.life(), c.handshake.rival);
        if let Some(Rival::Incumbent(old)) = rival {
            // This connection becomes the main one.
            let same_life = self.table.at(old).is_none_or(|c| c.handshake.life() == life);
            self.remove(old, gone(same_life), sink);
        }
        self.table.note_met(peer);
        sink.on_connected(peer, &address);
        true
    }
}

/// How a connection ends that the peer knows nothing of.
fn gone(same_life: bool) -> End {
    End::failed(if same_life { libc::ECONNRESET } else { libc::EHOSTDOWN })
}
