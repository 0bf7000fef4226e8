//! Open devices, their ports, and the events of both.

use super::Nic;
use super::pair::Pair;
use super::view::{PortView, view};
use crate::counters::{self, Counter, count};
use crate::personality::Device;
use crate::settings;
use crate::sys::Count;
use crate::sysfs;
use crate::verify::violation;
use crate::wire::Route;
use rdma_core_sys::{
    IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, ibv_event_type,
};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A packet of a connection counts as so many datagrams where the device has none: there are fewer.
pub(super) const PACKET: u32 = 8;
/// How long a port is down.
const DOWN: Duration = Duration::from_millis(300);

/// An open device.
#[derive(Debug)]
pub(crate) struct Context {
    device: usize,
    count: Count,
    events: VecDeque<Event>,
    /// Its device was removed; it does not come back to this context.
    dead: bool,
}

/// What an event is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EventKind {
    Port(u8),
    /// With the program's object.
    Pair {
        number: u32,
        object: u64,
    },
    Device,
}

/// An asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Event {
    pub(crate) kind: EventKind,
    pub(crate) code: ibv_event_type,
}

/// The state of ports and devices that the weather changes.
#[derive(Debug, Default)]
pub(super) struct Climate {
    /// Datagrams that have arrived, or packets ([`PACKET`]).
    pub(super) arrived: u32,
    flapped: bool,
    down_until: Option<Instant>,
    was_removed: bool,
    /// Until when there are no devices; `None`: for ever.
    absent: Option<Option<Instant>>,
    /// Events that the program has taken and not acknowledged.
    events_taken: u32,
}

impl Nic {
    /// The devices that are there, with their numbers and directories.
    pub(crate) fn devices(&self) -> Vec<(usize, &'static Device, std::path::PathBuf)> {
        let all = self.personality.devices.iter().enumerate();
        let place = |(at, device)| (at, device, sysfs::node(&self.directory, at));
        all.map(place).filter(|(_, _, node)| node.exists()).collect()
    }

    /// Its handle and the descriptor of its events. Error: errno.
    pub(crate) fn open_device(&mut self, device: usize) -> Result<(u32, RawFd), i32> {
        if self.climate.absent.is_some() {
            return Err(libc::ENODEV);
        }
        if self.personality.devices.get(device).is_some_and(|device| is_closed(device.name)) {
            return Err(libc::EACCES);
        }
        let count = Count::new().ok_or(libc::EMFILE)?;
        let (id, fd) = (self.new_id(), count.fd());
        let context = Context { device, count, events: VecDeque::new(), dead: false };
        self.tables.contexts.insert(id, context);
        counters::add(Counter::Opened, 1);
        Ok((id, fd))
    }

    pub(crate) fn close_device(&mut self, context: u32) {
        self.tables.contexts.remove(&context);
    }

    pub(crate) fn device(&self, context: u32) -> Option<&'static Device> {
        self.personality.devices.get(self.tables.contexts.get(&context)?.device)
    }

    /// Port `number`, from 1 on.
    pub(crate) fn port(&self, context: u32, number: u8) -> Option<PortView> {
        let port = self.device(context)?.ports.get(usize::from(number.checked_sub(1)?))?;
        let active = port.active && self.climate.down_until.is_none() && !self.is_removed(context);
        Some(view(port, active, self.host))
    }

    /// The next event of a context whose count was taken.
    pub(crate) fn next_event(&mut self, context: u32) -> Option<Event> {
        let event = self.tables.contexts.get_mut(&context)?.events.pop_front()?;
        self.climate.events_taken += 1;
        if let EventKind::Pair { number, .. } = event.kind {
            if let Some(pair) = self.pairs.get_mut(&number) {
                pair.events_taken += 1;
            }
        }
        Some(event)
    }

    /// The program has processed an event, of the queue pair of that number if it was of one.
    pub(crate) fn acknowledge_event(&mut self, number: Option<u32>) {
        let Some(left) = self.climate.events_taken.checked_sub(1) else {
            violation("an event is acknowledged that was not taken");
        };
        self.climate.events_taken = left;
        if let Some(pair) = number.and_then(|number| self.pairs.get_mut(&number)) {
            pair.events_taken = pair.events_taken.saturating_sub(1);
        }
    }

    /// Events that were taken and are not acknowledged, and those of a queue pair among them.
    pub(crate) fn events_taken(&self) -> u32 {
        self.climate.events_taken
    }

    pub(crate) fn pair_events(&self, number: u32) -> u32 {
        self.pairs.get(&number).map_or(0, |pair| pair.events_taken)
    }

    /// Tells the program of a queue pair.
    pub(super) fn raise_of(&mut self, pair: &Pair, code: ibv_event_type) {
        let kind = EventKind::Pair { number: pair.number, object: pair.object };
        self.raise(pair.made.context, Event { kind, code });
    }

    /// Nobody takes the events of a queue pair that has ended.
    pub(super) fn drop_events(&mut self, context: u32, of: u32) {
        if let Some(context) = self.tables.contexts.get_mut(&context) {
            let is_of = |kind| matches!(kind, EventKind::Pair { number, .. } if number == of);
            context.events.retain(|event| !is_of(event.kind));
        }
    }

    /// Whether the device of an open context was removed.
    pub(crate) fn is_removed(&self, context: u32) -> bool {
        self.tables.contexts.get(&context).is_none_or(|context| context.dead)
    }

    fn raise(&mut self, context: u32, event: Event) {
        if let Some(context) = self.tables.contexts.get_mut(&context) {
            context.events.push_back(event);
            context.count.raise();
        }
    }

    fn raise_everywhere(&mut self, kind: EventKind, code: ibv_event_type) {
        let contexts: Vec<u32> = self.tables.contexts.keys().copied().collect();
        for context in contexts {
            count(Counter::Events);
            self.raise(context, Event { kind, code });
        }
    }

    /// Takes ports down and up, and devices away.
    pub(super) fn change_climate(&mut self) {
        let due = |after: u32, so_far: u32| after > 0 && so_far >= after;
        let so_far = self.climate.arrived;
        if due(self.weather.flap_after, so_far) && !self.climate.flapped {
            self.climate.flapped = true;
            self.climate.down_until = Some(Instant::now() + DOWN);
            self.raise_everywhere(EventKind::Port(1), IBV_EVENT_PORT_ERR);
        }
        if self.climate.down_until.is_some_and(|until| until < Instant::now()) {
            self.climate.down_until = None;
            self.raise_everywhere(EventKind::Port(1), IBV_EVENT_PORT_ACTIVE);
        }
        if due(self.weather.removal_after, so_far) && !self.climate.was_removed {
            self.climate.was_removed = true;
            let absent = Duration::from_millis(self.weather.return_ms.into());
            self.climate.absent = Some((!absent.is_zero()).then(|| Instant::now() + absent));
            self.remove_devices();
        }
        if matches!(self.climate.absent, Some(Some(until)) if until < Instant::now()) {
            self.climate.absent = None;
            let _ = sysfs::make(&self.directory, self.personality);
        }
    }

    fn remove_devices(&mut self) {
        for (at, device) in self.personality.devices.iter().enumerate() {
            // Another process may have done it.
            let _ = std::fs::remove_dir_all(sysfs::node(&self.directory, at));
            let _ = std::fs::remove_dir_all(sysfs::class(&self.directory, device.name));
        }
        let pairs: Vec<u32> = self.pairs.keys().copied().collect();
        for number in pairs {
            self.with_pair(number, Self::break_pair);
        }
        self.raise_everywhere(EventKind::Device, IBV_EVENT_DEVICE_FATAL);
        self.tables.contexts.values_mut().for_each(|context| context.dead = true);
    }

    /// Whether a packet on `route` reaches `pair`.
    pub(super) fn is_for(&self, pair: &Pair, route: &Route) -> bool {
        let Some(port) = self.port(pair.made.context, pair.attributes.port) else { return false };
        let index = usize::from(pair.attributes.pkey_index);
        let pkey = port.port.pkeys.get(index).copied().unwrap_or(0);
        let global = route.gids.map(|(_, to)| to);
        let foreign = port.flid != 0 && route.source_lid != port.lid;
        let lid = if foreign { port.flid } else { port.lid };
        let addressed = match (port.is_infiniband(), global) {
            (true, None) => route.lid == lid && !port.needs_grh() && !foreign,
            (true, Some(gid)) => route.lid == lid && port.gid(0) == Some(gid),
            (false, Some(gid)) => port.gids.contains(&gid),
            (false, None) => false,
        };
        port.active && route.fabric == port.port.fabric && addressed && share(route.pkey, pkey)
    }
}

/// Whether the environment says that the device does not open yet ([`settings::CLOSED`]).
fn is_closed(name: &str) -> bool {
    static CLOSED: OnceLock<Option<(String, Instant)>> = OnceLock::new();
    let closed = CLOSED.get_or_init(|| {
        let text = std::env::var(settings::CLOSED).ok()?;
        let (name, time) = text.split_once('/')?;
        Some((name.to_owned(), Instant::now() + Duration::from_millis(time.parse().ok()?)))
    });
    closed.as_ref().is_some_and(|(of, until)| of == name && Instant::now() < *until)
}

/// Whether two members of partitions may talk (InfiniBand 1.7, 10.9.1.2): of the same one, and at least one of them a
/// full member.
fn share(one: u16, other: u16) -> bool {
    const FULL: u16 = 0x8000;
    one & !FULL == other & !FULL && one & !FULL != 0 && (one | other) & FULL != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limited_members_do_not_talk_to_each_other() {
        assert!(share(0xffff, 0xffff) && share(0xffff, 0x7fff) && share(0x8012, 0x12));
        assert!(!share(0x7fff, 0x7fff) && !share(0x8012, 0x8013) && !share(0, 0x8000));
    }
}
