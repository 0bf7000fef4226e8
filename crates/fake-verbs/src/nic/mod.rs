//! The devices of this process: one table for each kind of object, the queue pairs, and the device's work.

mod devices;
mod objects;
mod pair;
mod pairs;
mod queue;
mod regions;
mod requester;
mod responder;
mod ud;
pub(crate) mod view;

pub(crate) use devices::EventKind;
pub(crate) use objects::Handle;
pub(crate) use pair::{Attributes, Kind, Made, Operation, Send};
pub(crate) use queue::{Entry, Receive};
pub(crate) use regions::{Segment, flush, revoke};
pub(crate) use view::PortView;

use crate::counters::{self, Counter, count};
use crate::personality::{self, Personality};
use crate::random::Random;
use crate::settings::{self, number};
use crate::sys::Watch;
use crate::weather::Weather;
use crate::wire::{Body, Frame, Wire};
use devices::{Climate, Context};
use pair::Pair;
use queue::{Channel, Queue, Receives};
use regions::Regions;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The devices of this process.
#[derive(Debug)]
pub(crate) struct Nic {
    home: u32,
    directory: PathBuf,
    personality: &'static Personality,
    weather: Weather,
    random: Random,
    wire: Wire,
    /// The number of this host.
    host: u8,
    climate: Climate,
    tables: Tables,
    regions: Regions,
    pairs: HashMap<u32, Box<Pair>>,
    /// The numbers of pairs with work.
    busy: BTreeSet<u32>,
    /// Datagrams that are late, and after which step they arrive.
    held: Vec<(u64, Frame)>,
    steps: u64,
    last_id: u32,
    last_pair: u32,
    /// When the program last polled.
    polled: Instant,
}

/// The smaller objects, by their handles.
#[derive(Debug, Default)]
struct Tables {
    contexts: HashMap<u32, Context>,
    /// The contexts of protection domains.
    domains: HashMap<u32, u32>,
    channels: HashMap<u32, Channel>,
    queues: HashMap<u32, Queue>,
    /// Shared receives, with their protection domains.
    shared: HashMap<u32, (u32, Receives)>,
    handles: HashMap<u32, Handle>,
}

static NIC: Mutex<Option<Nic>> = Mutex::new(None);

/// Calls `act` with the devices of this process. `None`: the environment names no run.
pub(crate) fn with<R>(act: impl FnOnce(&mut Nic) -> R) -> Option<R> {
    let mut nic = NIC.lock().unwrap_or_else(PoisonError::into_inner);
    let here = nic.as_ref().is_some_and(|nic| nic.home == std::process::id());
    if !here {
        // What a forked child inherits belongs to its parent.
        std::mem::forget(nic.take());
        *nic = Nic::open();
        if let Some(watch) = nic.as_ref().and_then(|nic| nic.wire.watch().again()) {
            let thread = std::thread::Builder::new().name("fake-verbs".to_owned());
            thread.spawn(move || work(&watch)).ok()?;
        }
    }
    nic.as_mut().map(act)
}

/// The thread that works while the program does not poll.
fn work(watch: &Watch) {
    const REST: Duration = Duration::from_millis(1);
    let home = std::process::id();
    while home == std::process::id() {
        watch.ready(2);
        let polls = with(|nic| {
            let polls = nic.is_polled();
            if !polls {
                nic.progress();
            }
            polls
        });
        if polls == Some(true) {
            std::thread::sleep(REST);
        }
    }
}

impl Nic {
    /// As the environment says. `None`: it names no run.
    fn open() -> Option<Self> {
        let directory = settings::directory()?;
        let text = |name| std::env::var(name).unwrap_or_default();
        let named = personality::find(&text(settings::PERSONALITY));
        let personality = named.or_else(|| personality::ALL.first())?;
        counters::open(&directory);
        let weather = Weather::parse(&text(settings::WEATHER)).ok()?;
        let host = number(settings::HOST) as u8;
        Self::open_in(directory, personality, weather, (number(settings::SEED), host))
    }

    fn open_in(
        directory: PathBuf,
        personality: &'static Personality,
        weather: Weather,
        (seed, host): (u64, u8),
    ) -> Option<Self> {
        let wire = Wire::open(&directory)?;
        let random = Random::new(seed, wire.number().into());
        Some(Self {
            home: std::process::id(),
            directory,
            personality,
            weather,
            random,
            wire,
            host,
            climate: Climate::default(),
            tables: Tables::default(),
            regions: Regions::default(),
            pairs: HashMap::new(),
            busy: BTreeSet::new(),
            held: Vec::new(),
            steps: 0,
            last_id: 0,
            last_pair: 0,
            polled: Instant::now(),
        })
    }

    pub(crate) fn personality(&self) -> &'static Personality {
        self.personality
    }

    /// A number for a new object.
    fn new_id(&mut self) -> u32 {
        self.last_id += 1;
        self.last_id
    }

    /// The program polls, and no queue of it waits for an event.
    fn is_polled(&self) -> bool {
        let armed = self.tables.queues.values().any(|queue| queue.armed);
        !armed && self.polled.elapsed() < Duration::from_millis(2)
    }

    /// Does the work of the devices that can be done now.
    pub(crate) fn progress(&mut self) {
        self.steps += 1;
        for frame in self.wire.receive() {
            self.weather_of(frame);
        }
        let steps = self.steps;
        let (due, held): (Vec<(u64, Frame)>, _) =
            std::mem::take(&mut self.held).into_iter().partition(|(at, _)| *at < steps);
        self.held = held;
        for (_, frame) in due {
            self.on_frame(frame);
        }
        for number in self.busy.clone() {
            self.work_on(number);
        }
        self.wire.flush();
        self.change_climate();
    }

    /// Loses, repeats, delays or delivers it.
    fn weather_of(&mut self, frame: Frame) {
        let len = if let Body::Datagram { bytes, .. } = &frame.body { bytes.len() } else { 0 };
        let is_datagram = matches!(frame.body, Body::Datagram { .. });
        self.climate.arrived += match (is_datagram, self.personality.driver.ud) {
            (true, _) => 1,
            (false, false) => devices::PACKET,
            (false, true) => 0,
        };
        if is_datagram {
            count(Counter::Received);
            let too_long = self.weather.narrow > 0 && len > self.weather.narrow as usize;
            if too_long || self.random.happens(self.weather.loss) {
                return count(Counter::Lost);
            }
            if self.random.happens(self.weather.duplication) {
                self.hold(frame.clone());
            }
            if self.random.happens(self.weather.delay) {
                return self.hold(frame);
            }
        }
        self.on_frame(frame);
    }

    fn hold(&mut self, frame: Frame) {
        let at = self.steps + self.random.below(64);
        self.held.push((at, frame));
    }

    /// A frame has arrived at its port.
    fn on_frame(&mut self, frame: Frame) {
        let Frame { route, body } = frame;
        let taken = self.with_pair(route.to, |nic, pair| {
            if !nic.is_for(pair, &route) {
                return false;
            }
            match body {
                Body::Datagram { qkey, bytes } => nic.on_datagram(pair, &route, qkey, &bytes),
                Body::Ack { number, verdict } => nic.on_ack(pair, number, verdict),
                Body::Answer { number, offset, last, bytes } => {
                    nic.on_answer(pair, number, offset, last, &bytes);
                }
                request => nic.on_request(pair, &route, request),
            }
            true
        });
        if taken != Some(true) {
            count(Counter::Unrouted);
        }
    }

    /// Calls `act` with the queue pair of that number, if there is one.
    fn with_pair<R>(
        &mut self,
        number: u32,
        act: impl FnOnce(&mut Self, &mut Pair) -> R,
    ) -> Option<R> {
        let mut pair = self.pairs.remove(&number)?;
        let result = act(self, &mut pair);
        self.pairs.insert(number, pair);
        Some(result)
    }

    /// Sends and places what a queue pair has to do.
    fn work_on(&mut self, number: u32) {
        let busy = self.with_pair(number, |nic, pair| match pair.made.kind {
            Kind::Ud => nic.send_datagrams(pair),
            Kind::Rc => {
                nic.place_pieces(pair);
                nic.send_requests(pair);
                pair.responder.is_busy() || !pair.sends.list.is_empty()
            }
        });
        if busy != Some(true) {
            self.busy.remove(&number);
        }
    }

    /// Adds a completion, and signals it if the queue was armed.
    fn complete(&mut self, queue: u32, entry: Entry) {
        let Some(to) = self.tables.queues.get_mut(&queue) else { return };
        let (signal, channel, object) = (to.add(entry), to.channel, to.object);
        let channel = channel.and_then(|id| self.tables.channels.get_mut(&id));
        if let Some(channel) = channel.filter(|_| signal) {
            channel.ready.push_back(object);
            channel.count.raise();
        }
    }
}

#[cfg(test)]
mod tests;
