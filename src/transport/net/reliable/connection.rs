//! One peer's connection: its state, and what its deadlines mean.

use super::congestion::Congestion;
use super::packet::{Hello, HelloKind, VERSION, VERSION_MIN};
use super::path::Path;
use super::receiving::{ACK_DELAY_NS, Assembly, Early};
use super::sending::Outgoing;
use super::tag::SessionKey;
use super::timers::NEVER;
use super::{DATAGRAM_LEAST, DATAGRAM_START, End, HALF_OPEN_MAX, Shared, Sink};
use crate::sys::Errno;
use crate::transport::{Address, Departure, Mark, PeerId};
use std::collections::VecDeque;

/// How long a handshake waits for its answer at first, nanoseconds; twice as long each time.
const GREETING_NS: u64 = 20_000_000;
/// The longest time between two attempts, nanoseconds.
const RETRY_MAX_NS: u64 = 1_000_000_000;
/// Between two looks at a silent peer that owes us something, and at any other, nanoseconds.
const OWED_LOOK_NS: u64 = 500_000_000;
const IDLE_LOOK_NS: u64 = 5_000_000_000;
/// Between two looks at a side that has not proven yet that it is there, nanoseconds.
const HALF_OPEN_LOOK_NS: u64 = 2_000_000_000;
/// Between two questions whether a peer is there of which the network says that it is not, nanoseconds; after so many of them
/// twice as long each time, up to a limit.
const QUESTION_NS: u64 = 70_000_000;
const QUESTIONS: u8 = 3;
const QUESTION_MAX_NS: u64 = OWED_LOOK_NS;

/// How far a connection has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// We asked for it.
    Greeting,
    /// The other side asked; it has not proven yet that it is there now.
    HalfOpen,
    /// Both sides have proven that they are there.
    Established,
}

/// Handshake packets to send; PROBE is an INIT as long as `path` asks for, DOUBT is none, but goes
/// with an INIT to a peer that is silent.
pub(super) const INIT: u8 = 1;
pub(super) const ACCEPT: u8 = 2;
pub(super) const PROBE: u8 = 4;
pub(super) const DOUBT: u8 = 8;

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: PeerId,
    pub(super) address: Address,
    pub(super) phase: Phase,
    /// Our number of it, and the other side's.
    pub(super) id: u32,
    pub(super) remote_id: u32,
    pub(super) nonce: u64,
    pub(super) peer_nonce: u64,
    pub(super) peer_life: u64,
    pub(super) key: Option<SessionKey>,
    /// Which of the two sides we are, for the tags.
    pub(super) direction: u8,
    /// Largest datagram that both sides take, and the path, as far as is known.
    pub(super) datagram_max: u16,
    pub(super) path: Path,
    /// A connection that the same peer asked for while this one exists, and the reverse.
    pub(super) challenger: Option<u32>,
    pub(super) incumbent: Option<u32>,
    /// The layer above has asked for it, or was told of it: it has to learn of its end.
    pub(super) known: bool,
    /// The peer's number was made for this connection: with the connection it goes, unless somebody was told of it.
    pub(super) provisional: bool,
    /// The other side has answered our INIT, and nothing is known to have reached it since.
    pub(super) unheard: bool,
    /// Handshake packets to send.
    pub(super) hello: u8,
    /// Length of the longest INIT that the next ACCEPT answers, bytes.
    pub(super) answers: u16,
    /// [`Hello::established`] of the INIT that the next ACCEPT answers.
    asked_by_established: bool,

    /// What the other side knows; `None` before it has introduced itself.
    pub(super) features: Option<u32>,
    /// Messages taken from the layer above, and given to it.
    pub(super) sent: u64,
    pub(super) delivered: u64,

    // Sending (sending.rs).
    /// Packets from `base` on.
    pub(super) window: VecDeque<Outgoing>,
    pub(super) base: u64,
    /// The first packet that was never sent.
    pub(super) unsent: u64,
    pub(super) in_flight: u32,
    /// Number of the next transmission.
    pub(super) transmission: u64,
    /// From which one on nothing was lost lately.
    pub(super) clean_from: u64,
    /// The one after the last that asked for an answer.
    pub(super) asked: u64,
    /// Transmissions and their packets, oldest first, until a later one has arrived.
    pub(super) transmissions: VecDeque<(u64, u64)>,
    /// Packets to send again.
    pub(super) lost: VecDeque<u64>,
    /// The highest transmission that has arrived there, plus one.
    pub(super) echoed: u64,
    /// Packets from here on may not be sent yet.
    pub(super) credit_end: u64,
    pub(super) congestion: Congestion,
    /// How many later transmissions arrive before one counts as lost.
    pub(super) reordering: u64,
    /// Packets that have arrived since one was last given up too early.
    pub(super) in_order: u32,
    pub(super) marks_seen: u32,
    /// Timeouts in a row.
    pub(super) attempts: u8,
    /// The next packet asks for an answer: somebody waits for it.
    pub(super) asks: bool,
    /// Packets that may leave although the window is full.
    pub(super) extra: u8,
    pub(super) peer_pressure: bool,
    /// The last packet takes more messages until it leaves.
    pub(super) open: bool,
    /// It waits for company, not because it may not leave.
    pub(super) held: bool,
    /// Messages by the short road since the poll of this number; when the last one came.
    pub(super) burst: u32,
    pub(super) burst_poll: u64,
    pub(super) pushed_at: u64,

    // Receiving (receiving.rs).
    pub(super) expected: u64,
    /// The highest transmission that has arrived here plus one, and when.
    pub(super) arrived: u64,
    pub(super) arrived_at: u64,
    pub(super) early: Option<Box<Early>>,
    pub(super) assembly: Option<Box<Assembly>>,
    /// Packets since the last acknowledgement.
    pub(super) unacked: u16,
    pub(super) ack_now: bool,
    pub(super) marks: u32,
    /// The epoch in which it last sent (`Shared::count_sender`).
    pub(super) epoch: u64,

    // Time.
    pub(super) ack_at: u64,
    /// That was put off once.
    pub(super) ack_waits: bool,
    pub(super) retry_at: u64,
    look_at: u64,
    /// In patience, not in time.
    heard_at: u64,
    owed_since: u64,
    /// Our INITs are answered: the other side has another job key.
    pub(super) key_refused: bool,
    pub(super) refusals: u8,
    pub(super) refused_at: u64,
    /// When it was asked last for that reason, nanoseconds, and how often since it was heard of.
    asked_at: u64,
    questions: u8,
    /// The entry in the timers.
    pub(super) timer_at: u64,
    /// It waits for its turn to send.
    pub(super) queued: bool,
}

impl Connection {
    pub(super) fn new(
        shared: &Shared,
        peer: PeerId,
        address: Address,
        nonce: u64,
        phase: Phase,
        now: u64,
    ) -> Self {
        let first = u64::from(shared.settings.first_psn);
        Self {
            peer,
            address,
            phase,
            id: 0,
            remote_id: 0,
            nonce,
            peer_nonce: 0,
            peer_life: 0,
            key: None,
            direction: 0,
            datagram_max: shared.settings.datagram_max.min(DATAGRAM_START) as u16,
            path: Path::default(),
            challenger: None,
            incumbent: None,
            known: phase == Phase::Greeting,
            provisional: false,
            unheard: false,
            hello: 0,
            features: None,
            sent: 0,
            delivered: 0,
            answers: 0,
            asked_by_established: false,
            window: VecDeque::new(),
            base: first,
            unsent: first,
            in_flight: 0,
            transmission: first + 1,
            clean_from: first + 1,
            asked: first + 1,
            transmissions: VecDeque::new(),
            lost: VecDeque::new(),
            echoed: first + 1,
            credit_end: first,
            congestion: Congestion::new(),
            reordering: super::sending::REORDERING_MIN,
            in_order: 0,
            marks_seen: 0,
            attempts: 0,
            asks: false,
            extra: 0,
            peer_pressure: false,
            open: false,
            held: false,
            burst: 0,
            burst_poll: 0,
            pushed_at: 0,
            expected: first,
            arrived: first + 1,
            arrived_at: 0,
            early: None,
            assembly: None,
            unacked: 0,
            ack_now: false,
            marks: 0,
            epoch: 0,
            ack_at: NEVER,
            ack_waits: false,
            retry_at: NEVER,
            look_at: now + if phase == Phase::HalfOpen { HALF_OPEN_LOOK_NS } else { OWED_LOOK_NS },
            heard_at: shared.patience,
            owed_since: shared.patience,
            key_refused: false,
            refusals: 0,
            refused_at: 0,
            asked_at: 0,
            questions: 0,
            timer_at: NEVER,
            queued: false,
        }
    }

    /// Asks for the connection.
    pub(super) fn greet(&mut self) {
        self.hello |= INIT;
    }

    /// Agrees to `init`, of `len` bytes.
    pub(super) fn accept(&mut self, init: &Hello, len: usize) {
        self.hello |= ACCEPT;
        self.asked_by_established = init.established;
        self.answers = self.answers.max(u16::try_from(len).unwrap_or(u16::MAX));
    }

    /// The other side has introduced itself, and knows `feature`.
    #[inline]
    pub(super) fn knows(&self, feature: u32) -> bool {
        self.features.is_some_and(|all| all & feature != 0)
    }

    /// Largest datagram to this peer, bytes.
    pub(super) fn datagram_room(&self) -> usize {
        usize::from(self.datagram_max)
    }

    /// The other side, as it has introduced itself.
    pub(super) fn adopt(&mut self, shared: &Shared, hello: &Hello) {
        if !self.is_with(hello) && self.window.is_empty() {
            // It has as long as those before to answer. Nobody here waits for it.
            self.heard(shared);
        }
        self.remote_id = hello.connection;
        self.peer_nonce = hello.nonce;
        self.peer_life = hello.life;
        self.features = Some(hello.features);
        let ours = shared.settings.datagram_max;
        self.both_take(ours.min(usize::from(hello.datagram_max).max(DATAGRAM_LEAST)) as u16);
        self.credit_end = self.base + u64::from(hello.credit.max(1));
        let mine = (shared.settings.life, self.nonce);
        let theirs = (hello.life, hello.nonce);
        self.direction = u8::from(mine > theirs);
        self.key = Some(shared.settings.key.session(mine, theirs));
    }

    /// Whether `hello` is of the life and the connection that we know.
    pub(super) fn is_with(&self, hello: &Hello) -> bool {
        self.peer_life == hello.life && self.peer_nonce == hello.nonce
    }

    /// A handshake packet from us.
    pub(super) fn hello(&self, shared: &Shared, kind: HelloKind) -> Hello {
        let settings = &shared.settings;
        let (answered, established) = match kind {
            HelloKind::Accept => (self.answers, self.asked_by_established),
            _ => (0, self.phase == Phase::Established),
        };
        Hello {
            kind,
            established,
            version: VERSION,
            version_min: VERSION_MIN,
            datagram_max: settings.datagram_max.min(usize::from(u16::MAX)) as u16,
            features: settings.features,
            connection: self.id,
            answered,
            credit: shared.credit(),
            life: settings.life,
            nonce: self.nonce,
            echo: self.peer_nonce,
            address: settings.address,
            dest: self.remote_id,
            dest_port: self.address.port(),
            tag: 0,
        }
    }

    /// Up to where the other side has acknowledged what was sent.
    pub(super) fn acknowledged(&self) -> Mark {
        Mark { connection: self.id, psn: self.base as u32 }
    }

    /// A sign of life.
    #[inline]
    pub(super) fn heard(&mut self, shared: &Shared) {
        self.heard_at = shared.patience;
        self.refusals = 0;
        self.questions = 0;
    }

    /// Something is owed from now on.
    #[inline]
    pub(super) fn owe(&mut self, shared: &Shared, now: u64) {
        self.owed_since = shared.patience;
        self.look_at = self.look_at.min(now + OWED_LOOK_NS);
    }

    /// When it has to be looked at.
    #[inline]
    pub(super) fn deadline(&self) -> u64 {
        self.ack_at.min(self.retry_at).min(self.look_at).min(self.path.due())
    }

    /// A deadline has come.
    pub(super) fn on_deadline(
        &mut self,
        shared: &mut Shared,
        now: u64,
        sink: &impl Sink,
    ) -> Option<End> {
        if self.ack_at <= now {
            // Whoever wrote with a device meanwhile will have something to say soon, which acknowledges as well; and
            // what has only just arrived may be the end of a long message, which is answered next.
            let later = shared.back_at.max(self.arrived_at) + ACK_DELAY_NS;
            let waits = later > now && !self.ack_waits;
            self.ack_waits = waits;
            self.ack_now |= !waits;
            self.ack_at = if waits { later } else { NEVER };
        }
        if self.retry_at <= now {
            self.retry(shared, now);
        }
        if self.path.due() <= now {
            self.probe_again(now);
        }
        if self.look_at <= now {
            return self.look(shared, now, sink);
        }
        None
    }

    fn retry(&mut self, shared: &mut Shared, now: u64) {
        self.attempts = self.attempts.saturating_add(1);
        shared.counts.timeouts += 1;
        match self.phase {
            Phase::Greeting => self.hello |= INIT,
            Phase::HalfOpen => self.hello |= INIT | ACCEPT,
            Phase::Established => {
                let first = u64::from(shared.settings.first_psn);
                if std::mem::take(&mut self.unheard) && self.base == first {
                    // Somebody may have sent an old INIT to it since it answered ours: this one
                    // says that ours is the new one.
                    self.hello |= INIT;
                }
                self.send_again();
                self.ask_path();
            }
        }
        self.retry_at = now + self.patience_ns(shared);
    }

    /// How long to wait for an answer now.
    pub(super) fn patience_ns(&self, shared: &mut Shared) -> u64 {
        let doubled = |ns: u64| (ns << self.attempts.min(10)).min(RETRY_MAX_NS);
        match self.phase {
            Phase::Established => doubled(self.congestion.timeout_ns()),
            _ => {
                let wait = doubled(GREETING_NS);
                shared.jittered(wait)
            }
        }
    }

    /// The network says that nobody is there, which may be made up: asks, but not more often than it is worth. Once an
    /// INIT was refused as well, the next one goes without such a message.
    pub(super) fn ask_whether_there(&mut self, now: u64) {
        let pause = |questions: u8| {
            (QUESTION_NS << questions.saturating_sub(QUESTIONS).min(3)).min(QUESTION_MAX_NS)
        };
        if self.asked_at == 0 || self.asked_at + pause(self.questions) <= now {
            // While only strangers say so, a device's path is not doubted.
            self.hello |= INIT | if self.refusals > 0 { DOUBT } else { 0 };
            self.asked_at = now;
            self.questions = self.questions.saturating_add(1);
        }
        if self.refusals > 0 {
            self.look_at = self.look_at.min(self.asked_at + pause(self.questions));
        }
    }

    /// Is the other side still there?
    fn look(&mut self, shared: &mut Shared, now: u64, sink: &impl Sink) -> Option<End> {
        let end = self.look_for_life(shared, now, sink);
        if end.is_none() && self.refusals > 0 && self.phase == Phase::Established {
            self.ask_whether_there(now);
        }
        end
    }

    fn look_for_life(&mut self, shared: &mut Shared, now: u64, sink: &impl Sink) -> Option<End> {
        let waiting = !self.window.is_empty() || self.phase == Phase::Greeting;
        if self.phase == Phase::HalfOpen && !waiting {
            // Its process may be stopped before it reads our answer, and believe afterwards that we
            // know of it.
            let silent = shared.patience - self.heard_at.min(shared.patience);
            if silent >= shared.settings.peer_timeout_ns || shared.half_open >= HALF_OPEN_MAX {
                return Some(End::Silent);
            }
            self.look_at = now + HALF_OPEN_LOOK_NS;
            return None;
        }
        if !waiting && !sink.is_owed(self.peer) {
            self.owed_since = NEVER;
            self.look_at = now + IDLE_LOOK_NS;
            self.trim();
            return None;
        }
        if self.owed_since == NEVER {
            self.owed_since = shared.patience;
        }
        let timeout = shared.settings.peer_timeout_ns;
        let silent = shared.patience - self.heard_at.max(self.owed_since).min(shared.patience);
        if silent >= timeout {
            let errno = if self.key_refused { libc::EKEYREJECTED } else { libc::ETIMEDOUT };
            return Some(End::Departed(Departure::Failed(Errno(errno))));
        }
        let every = OWED_LOOK_NS.min(timeout / 8).max(1_000_000);
        if silent >= every {
            self.hello |= INIT | DOUBT;
        }
        self.look_at = now + every;
        None
    }

    /// Gives back memory that a busier time has left behind.
    fn trim(&mut self) {
        self.window.shrink_to_fit();
        self.transmissions.retain(|(_, psn)| *psn >= self.base);
        self.transmissions.shrink_to_fit();
        self.lost.clear();
        self.lost.shrink_to_fit();
    }

    /// Gives all buffers back.
    pub(super) fn release(mut self, shared: &mut Shared) {
        shared.unacknowledged -= self.window.len();
        for packet in self.window.drain(..) {
            shared.buffers.give(packet.bytes);
        }
        if let Some(early) = self.early.take() {
            early.release(shared);
        }
    }
}
