//! One peer's connection: its parts, and what happens at its deadlines.

pub(super) mod coalescer;
pub(super) mod handshake;
mod liveness;
mod path;
mod receive;
mod rest;
pub(super) mod submit;
pub(super) mod transmit;

use super::interface::Sink;
use super::lateness::Host;
use super::packet::{DATAGRAM_LEAST, DATAGRAM_START, Hello, HelloKind, VERSION, VERSION_MIN};
use super::receiver::Receiver;
use super::sender::{SILENCE, SUSPICION, Sender};
use super::shared::Shared;
use super::timers::Entry;
use crate::sys::Errno;
use crate::telemetry::trace::{self, About, Kind};
use crate::telemetry::{log, ranks};
use crate::transport::{Address, Departure, Mark, PeerId};
use coalescer::Coalescer;
use handshake::{ACCEPT, DOUBT, Handshake, INIT, PROBE, Phase};
use liveness::Liveness;
use path::{Front, Path};
use rest::Rest;

/// After this time without an answer to the first contact the log says so, nanoseconds.
const FIRST_ANSWER_NS: u64 = 3_000_000_000;
/// How long a handshake waits for its first reply, nanoseconds; the wait doubles with each attempt.
const GREETING_NS: u64 = 20_000_000;
/// A process of this host answers when it has a processor: it is waited for as long as a dozen others may have it before
/// it does, nanoseconds. Packets between processes of one host are lost only where a socket is full, which is rare.
const TURN_NS: u64 = 100_000_000;
/// Most connections whose peer has not yet proven that it is there.
pub(super) const HALF_OPEN_MAX: usize = 4096;

/// Why a connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// It is reported to the layer above.
    Departed(Departure),
    /// The layer above did not know of it.
    Silent,
}

impl End {
    /// It ends with this error.
    pub(super) fn failed(errno: i32) -> Self {
        Self::Departed(Departure::Failed(Errno(errno)))
    }
}

/// A connection with one peer.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: PeerId,
    pub(super) address: Address,
    /// This endpoint's number of the connection.
    pub(super) id: u32,
    /// The layer above asked for it, or was told of it, and so must learn of its end.
    pub(super) known: bool,
    /// It is in the queue of connections that have something to send.
    pub(super) queued: bool,
    /// The link refuses it alone: it is not in that queue for a while.
    pub(super) rest: Rest,
    pub(super) timer: Entry,
    pub(super) handshake: Handshake,
    pub(super) path: Path,
    pub(super) sender: Sender,
    pub(super) receiver: Receiver,
    pub(super) liveness: Liveness,
    pub(super) coalescer: Coalescer,
}

impl Connection {
    /// The layer above knows of it, and is told when it ends.
    pub(super) fn is_met(&self) -> bool {
        self.known || self.handshake.is_established()
    }

    pub(super) fn new(
        shared: &mut Shared,
        peer: PeerId,
        address: Address,
        phase: Phase,
        now: u64,
    ) -> Self {
        let first = u64::from(shared.settings.first_psn);
        Self {
            peer,
            address,
            id: 0,
            known: phase == Phase::Greeting,
            queued: false,
            rest: Rest::new(),
            timer: Entry::default(),
            handshake: Handshake::new(phase, shared.random()),
            path: Path::new(shared.settings.datagram_max.min(DATAGRAM_START)),
            sender: Sender::new(first, Host::of(&address)),
            receiver: Receiver::new(first),
            liveness: Liveness::new(phase == Phase::HalfOpen, shared.patience, now),
            coalescer: Coalescer::default(),
        }
    }

    /// The peer has introduced itself with `hello`.
    pub(super) fn adopt(&mut self, shared: &Shared, hello: &Hello) {
        if !self.handshake.is_with(hello) && self.sender.window.packets.is_empty() {
            // A different peer: it has the full time to answer. The layer above does not wait for it.
            self.liveness.heard(shared.patience);
        }
        let settings = &shared.settings;
        self.handshake.adopt(hello, settings.life, &settings.key);
        let theirs = usize::from(hello.datagram_max).max(DATAGRAM_LEAST);
        let both = |ours: usize| ours.min(theirs) as u16;
        self.path.both_take(both(settings.datagram_max), both(settings.direct_max));
        self.sender.grant(hello.credit);
    }

    /// A handshake packet to the peer.
    pub(super) fn hello(&self, shared: &Shared, kind: HelloKind) -> Hello {
        let (settings, handshake) = (&shared.settings, &self.handshake);
        let (answered, established, cookie) = match kind {
            HelloKind::Accept => (handshake.answers, handshake.asked_by_established, 0),
            _ => (0, handshake.is_established(), handshake.cookie),
        };
        Hello {
            kind,
            established,
            version: VERSION,
            version_min: VERSION_MIN,
            datagram_max: settings.packet_max().min(usize::from(u16::MAX)) as u16,
            features: settings.features,
            connection: self.id,
            answered,
            credit: shared.credit(),
            life: settings.life,
            nonce: handshake.nonce,
            echo: if cookie == 0 { handshake.echo } else { cookie },
            address: settings.address,
            dest: handshake.remote.map_or(0, |remote| remote.id),
            dest_port: self.address.port(),
            rank: u16::try_from(ranks::own()).unwrap_or(0),
            tag: 0,
        }
    }

    /// Both sides have proven that they are there.
    pub(super) fn on_established(&mut self, shared: &Shared, now: u64) {
        (self.handshake.phase, self.handshake.cookie) = (Phase::Established, 0);
        let hellos = &mut self.handshake.hellos;
        *hellos &= !(INIT | PROBE | DOUBT);
        self.sender.timeout.reset();
        self.path.on_established(self.sender.window.base, now, hellos);
        self.heard(shared.patience, now);
        self.liveness.owe(shared.patience, now);
    }

    /// The peer was heard: what was kept back because nothing reaches it is tried at once.
    #[inline]
    pub(super) fn heard(&mut self, patience: u64, now: u64) {
        self.liveness.heard(patience);
        if !self.path.is_direct() {
            self.rest.hurry(now); // otherwise its packets do not show that it is reached over UDP
        }
        self.sender.timeout.on_heard(now);
    }

    /// The peer has answered an INIT of `len` bytes.
    pub(super) fn on_answered(&mut self, len: u16, patience: u64, now: u64) {
        let (front, hellos) = (self.front(), &mut self.handshake.hellos);
        if !self.path.on_probe_answer(len, now, hellos) {
            // A peer whose INIT was not a path probe may be waiting for proof.
            self.receiver.acknowledgement.now = true;
        }
        let timeout = &mut self.sender.timeout;
        if timeout.attempts > 0 {
            self.path.on_answer(len, timeout.attempts, front, patience, hellos);
            timeout.on_answer(front.base, now);
        }
    }

    /// The network carries datagrams of at most `carried` bytes to the peer. Returns true if queued packets are longer.
    pub(super) fn carry_at_most(&mut self, carried: usize) -> bool {
        let carried = self.path.carry_at_most(carried, &mut self.handshake.hellos);
        self.sender.window.packets.iter().any(|packet| packet.bytes.len() > carried)
    }

    fn front(&self) -> Front {
        Front { base: self.sender.window.base, sent: self.sender.first_sent() }
    }

    /// How far the peer has acknowledged.
    pub(super) fn acknowledged(&self) -> Mark {
        Mark { connection: self.id, psn: self.sender.window.base as u32 }
    }

    /// It belongs in the queue of connections that have something to send, and is not there.
    pub(super) fn is_to_queue(&self) -> bool {
        let wants = match self.rest.is_on() {
            true => self.rest.spares_data() && self.sends_direct(),
            false => self.wants_to_send(),
        };
        !self.queued && wants
    }

    /// The link has taken something. What it took over another path than UDP does not show that UDP takes the rest.
    pub(super) fn note_left(&mut self) {
        if self.handshake.hellos == 0 {
            self.rest.end();
        }
    }

    /// When [`Self::on_deadline`] must be called next.
    pub(super) fn deadline(&self) -> u64 {
        let own = self.receiver.acknowledgement.at.min(self.rest.until);
        own.min(self.sender.timeout.at).min(self.liveness.look_at).min(self.path.due())
    }

    /// A deadline has come.
    pub(super) fn on_deadline(
        &mut self,
        shared: &mut Shared,
        now: u64,
        sink: &impl Sink,
    ) -> Option<End> {
        if self.rest.ends(now) && !self.wants_to_send() {
            self.rest.end();
        }
        self.receiver.on_deadline(now, shared.back_at);
        if self.sender.timeout.at <= now {
            self.retry(shared, now);
        }
        if self.path.due() <= now {
            let window = &self.sender.window;
            let hellos = &mut self.handshake.hellos;
            self.path.probe_again(window.base, !window.packets.is_empty(), now, hellos);
        }
        if self.liveness.look_at <= now { self.look(shared, now, sink) } else { None }
    }

    /// The retransmission timeout has expired.
    fn retry(&mut self, shared: &mut Shared, now: u64) {
        let Sender { timeout, host, window, loss, .. } = &mut self.sender;
        if self.handshake.is_established() && window.packets.is_empty() {
            // The packet that was last declared lost has arrived after all.
            return timeout.reset();
        }
        let here = self.address.0.ip() == shared.settings.address.0.ip();
        let least = if here { TURN_NS } else { 0 };
        // A peer that has answered a later packet is not late: this one was lost, or the network still holds it.
        let passed = window.has_passed(loss.arrived());
        if !passed && timeout.waits(shared.lateness.of(*host, now).max(least), now) {
            return;
        }
        timeout.attempts = timeout.attempts.saturating_add(1);
        shared.counts.timeouts += 1;
        self.trace(Kind::Timeout, shared, 0);
        match self.handshake.phase {
            Phase::Greeting => self.handshake.hellos |= INIT,
            Phase::HalfOpen => self.handshake.hellos |= INIT | ACCEPT,
            Phase::Established => {
                let first = u64::from(shared.settings.first_psn);
                let unheard = std::mem::take(&mut self.handshake.unheard);
                if unheard && self.sender.window.base == first {
                    // The peer may have received an old, replayed INIT since it answered. This INIT tells it which
                    // connection is the current one.
                    self.handshake.hellos |= INIT;
                }
                let attempts = self.sender.timeout.attempts;
                let waits = attempts > SILENCE && self.liveness.is_unanswered();
                if attempts >= SUSPICION {
                    self.handshake.hellos |= INIT | DOUBT;
                    self.liveness.note_init(shared.patience);
                }
                if waits {
                    self.sender.timeout.withheld = true;
                } else {
                    self.sender.send_again();
                }
                self.path.ask(self.front(), &mut self.handshake.hellos);
                self.sender.restart(now);
                return;
            }
        }
        self.liveness.note_init(shared.patience);
        self.wait_for_greeting(shared, now);
    }

    /// Gives the peer some time to answer the handshake.
    fn wait_for_greeting(&mut self, shared: &mut Shared, now: u64) {
        let timeout = &mut self.sender.timeout;
        timeout.start(now, shared.jittered(timeout.doubled(GREETING_NS)));
    }

    /// Checks whether the peer is still there.
    fn look(&mut self, shared: &mut Shared, now: u64, sink: &impl Sink) -> Option<End> {
        let (patience, phase) = (shared.patience, self.handshake.phase);
        let timeout = shared.settings.peer_timeout_ns;
        let waiting = !self.sender.window.packets.is_empty() || phase == Phase::Greeting;
        let (liveness, hellos) = (&mut self.liveness, &mut self.handshake.hellos);
        let owed = if waiting { Some(true) } else { liveness.told(sink.is_owed(self.peer)) };
        if phase == Phase::HalfOpen && !waiting {
            // The peer's process may be stopped before it reads the reply, and believe afterwards that this endpoint
            // knows of it.
            let silent = liveness.look_at_half_open(patience, now);
            if silent >= timeout || shared.half_open >= HALF_OPEN_MAX {
                return Some(End::Silent);
            }
        } else if owed == Some(false) {
            liveness.rest(now);
            self.sender.window.trim();
        } else if owed.is_none() {
            if liveness.look_alone(patience, timeout, now, hellos) {
                shared.unasked.push(self.id);
            }
            self.sender.window.trim();
        } else if !liveness.look_at_debtor(patience, timeout, now, hellos) {
            let refused = self.handshake.key_refused;
            return Some(End::failed(if refused { libc::EKEYREJECTED } else { libc::ETIMEDOUT }));
        }
        if self.path.blocked_for(self.sender.window.base, patience) >= timeout {
            return Some(End::failed(libc::EMSGSIZE));
        }
        if liveness.refusals > 0 && phase == Phase::Established {
            liveness.ask(now, hellos);
        }
        if phase == Phase::Greeting && liveness.is_late(patience, FIRST_ANSWER_NS) {
            self.report_late(shared);
        }
        None
    }

    fn trace(&self, kind: Kind, shared: &Shared, packets: usize) {
        let about = About { port: shared.settings.address.port(), peer: Some(self.address.0) };
        trace::event(kind, about, 0, packets as u64);
    }

    /// The peer has not answered for long, and other than in a refusal the network says nothing of why.
    #[cold]
    fn report_late(&self, shared: &Shared) {
        if self.handshake.key_refused {
            return; // which has its line
        }
        let (me, peer) = (shared.settings.address, self.address);
        let timeout_s = shared.settings.peer_timeout_ns / 1_000_000_000;
        log::limited!(
            node: log::number_of(peer.0.ip()),
            "{peer} has not answered {me} for {} s. Likely causes: a firewall keeps UDP from passing between these two \
             ports (FI_UDRV_PORTS limits them to a range); one of the addresses is of an interface that does not lead to \
             the other host (FI_UDRV_IFACE chooses another); the peer's process has ended, is stopped, has FI_UDRV_NET=0, \
             or has another job key. It is asked for {timeout_s} s in all (FI_UDRV_PEER_TIMEOUT)",
            FIRST_ANSWER_NS / 1_000_000_000
        );
    }

    /// The network says that the peer is not there: asks the peer.
    pub(super) fn ask_whether_there(&mut self, now: u64) {
        self.liveness.ask(now, &mut self.handshake.hellos);
    }

    /// Returns all buffers.
    pub(super) fn release(self, shared: &mut Shared) {
        shared.unacknowledged -= self.sender.window.release(&mut shared.buffers);
        self.receiver.release(shared);
    }
}
