//! The handshake of one connection: how far the two sides have proven to each other that they are there, what is known
//! of the peer, and which handshake packets to send. `../handshake.rs` decides what received ones mean.

use super::super::packet::Hello;
use super::super::tag::SessionKey;
use crate::transport::JobKey;

/// The phases of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Phase {
    /// This side asked for it.
    #[default]
    Greeting,
    /// The peer asked; it has not yet proven that it is there now.
    HalfOpen,
    /// Both sides have proven that they are there.
    Established,
}

/// Handshake packets to send. PROBE is an INIT of the length that the path asks for. DOUBT is not a packet: it
/// accompanies an INIT to a silent peer.
pub(crate) const INIT: u8 = 1;
pub(crate) const ACCEPT: u8 = 2;
pub(crate) const PROBE: u8 = 4;
pub(crate) const DOUBT: u8 = 8;

/// The peer, as it has introduced itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    /// The peer's number of the connection.
    pub(crate) id: u32,
    pub(crate) life: u64,
    pub(crate) features: u32,
    pub(crate) key: SessionKey,
    /// Which of the two sides this endpoint is, for the tags.
    pub(crate) direction: u8,
}

/// Another connection that the same peer has asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rival {
    /// The peer asked for it while this connection exists.
    Challenger(u32),
    /// It existed when the peer asked for this connection.
    Incumbent(u32),
}

/// The state of one connection's handshake.
#[derive(Debug, Default)]
pub(crate) struct Handshake {
    pub(crate) phase: Phase,
    /// Random, this side's.
    pub(crate) nonce: u64,
    /// The peer's nonce, which this side's packets repeat.
    pub(crate) echo: u64,
    /// The peer's cookie, which INITs repeat instead until one is answered; 0: none.
    pub(crate) cookie: u64,
    pub(crate) remote: Option<Remote>,
    pub(crate) rival: Option<Rival>,
    /// Handshake packets to send.
    pub(crate) hellos: u8,
    /// Length of the longest INIT that the next ACCEPT answers, bytes.
    pub(crate) answers: u16,
    /// [`Hello::established`] of the INIT that the next ACCEPT answers.
    pub(super) asked_by_established: bool,
    /// The peer has answered the last INIT, and it is unknown whether a packet has reached it since.
    pub(crate) unheard: bool,
    /// INITs were refused: the peer has another job key.
    pub(crate) key_refused: bool,
    /// The peer's number was assigned for this connection, and is given up with it unless it was reported.
    pub(crate) provisional: bool,
}

impl Handshake {
    pub(super) fn new(phase: Phase, nonce: u64) -> Self {
        Self { phase, nonce, ..Self::default() }
    }

    pub(crate) fn is_established(&self) -> bool {
        self.phase == Phase::Established
    }

    /// The peer has introduced itself, and supports `feature`.
    pub(crate) fn knows(&self, feature: u32) -> bool {
        self.remote.is_some_and(|remote| remote.features & feature != 0)
    }

    /// The peer's incarnation, if it has introduced itself.
    pub(crate) fn life(&self) -> Option<u64> {
        self.remote.map(|remote| remote.life)
    }

    /// Whether `hello` is from the incarnation and the connection that this side knows.
    pub(crate) fn is_with(&self, hello: &Hello) -> bool {
        self.life() == Some(hello.life) && self.echo == hello.nonce
    }

    /// `hello` is from the peer; `life` and `key` are this endpoint's.
    pub(super) fn adopt(&mut self, hello: &Hello, life: u64, key: &JobKey) {
        let (mine, theirs) = ((life, self.nonce), (hello.life, hello.nonce));
        self.echo = hello.nonce;
        self.remote = Some(Remote {
            id: hello.connection,
            life: hello.life,
            features: hello.features,
            key: SessionKey::new(key, mine, theirs),
            direction: u8::from(mine > theirs),
        });
    }

    /// Answers `init`, of `len` bytes, with an ACCEPT.
    pub(crate) fn accept(&mut self, init: &Hello, len: usize) {
        self.hellos |= ACCEPT;
        self.asked_by_established = init.established;
        self.answers = self.answers.max(u16::try_from(len).unwrap_or(u16::MAX));
    }
}
