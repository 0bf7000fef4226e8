//! How far two sides have proven to each other that they are there: what is known of the other one, and which handshake
//! packets are to be sent. What they mean is decided in `../handshake.rs`.

use super::super::packet::Hello;
use super::super::tag::{JobKey, SessionKey};

/// How far a connection has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Phase {
    /// We asked for it.
    #[default]
    Greeting,
    /// The other side asked; it has not proven yet that it is there now.
    HalfOpen,
    /// Both sides have proven that they are there.
    Established,
}

/// Handshake packets to send; PROBE is an INIT as long as the path asks for, DOUBT is none, but goes
/// with an INIT to a peer that is silent.
pub(crate) const INIT: u8 = 1;
pub(crate) const ACCEPT: u8 = 2;
pub(crate) const PROBE: u8 = 4;
pub(crate) const DOUBT: u8 = 8;

/// The other side, as it has introduced itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    /// Its number of the connection.
    pub(crate) id: u32,
    pub(crate) life: u64,
    pub(crate) features: u32,
    pub(crate) key: SessionKey,
    /// Which of the two sides we are, for the tags.
    pub(crate) direction: u8,
}

/// Another connection that the same peer has asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rival {
    /// It was asked for while this one exists.
    Challenger(u32),
    /// It existed when this one was asked for.
    Incumbent(u32),
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Handshake {
    pub(crate) phase: Phase,
    /// Random, ours.
    pub(crate) nonce: u64,
    /// What the other side wants to hear again: its nonce.
    pub(crate) echo: u64,
    pub(crate) remote: Option<Remote>,
    pub(crate) rival: Option<Rival>,
    /// Handshake packets to send.
    pub(crate) hellos: u8,
    /// Length of the longest INIT that the next ACCEPT answers, bytes.
    pub(crate) answers: u16,
    /// [`Hello::established`] of the INIT that the next ACCEPT answers.
    pub(super) asked_by_established: bool,
    /// The other side has answered our INIT, and nothing is known to have reached it since.
    pub(crate) unheard: bool,
    /// Our INITs are answered: the other side has another job key.
    pub(crate) key_refused: bool,
    /// The peer's number was made for this connection: with the connection it goes, unless somebody was told of it.
    pub(crate) provisional: bool,
}

impl Handshake {
    pub(super) fn new(phase: Phase, nonce: u64) -> Self {
        Self { phase, nonce, ..Self::default() }
    }

    pub(crate) fn is_established(&self) -> bool {
        self.phase == Phase::Established
    }

    /// The other side has introduced itself, and knows `feature`.
    pub(crate) fn knows(&self, feature: u32) -> bool {
        self.remote.is_some_and(|remote| remote.features & feature != 0)
    }

    /// The other side's life, if it has introduced itself.
    pub(crate) fn life(&self) -> Option<u64> {
        self.remote.map(|remote| remote.life)
    }

    /// Whether `hello` is of the life and the connection that we know.
    pub(crate) fn is_with(&self, hello: &Hello) -> bool {
        self.life() == Some(hello.life) && self.echo == hello.nonce
    }

    /// `hello` is of the other side; `life` and `key` are ours.
    pub(super) fn adopt(&mut self, hello: &Hello, life: u64, key: &JobKey) {
        let (mine, theirs) = ((life, self.nonce), (hello.life, hello.nonce));
        self.echo = hello.nonce;
        self.remote = Some(Remote {
            id: hello.connection,
            life: hello.life,
            features: hello.features,
            key: key.session(mine, theirs),
            direction: u8::from(mine > theirs),
        });
    }

    /// Agrees to `init`, of `len` bytes.
    pub(crate) fn accept(&mut self, init: &Hello, len: usize) {
        self.hellos |= ACCEPT;
        self.asked_by_established = init.established;
        self.answers = self.answers.max(u16::try_from(len).unwrap_or(u16::MAX));
    }
}
