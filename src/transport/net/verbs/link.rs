//! The UD queue pair of one endpoint, and its address handles.

use super::aside::{Aside, Crew};
use super::handles::{HandleId, Handles, Unreachable};
use super::introduction::Place;
use crate::sys::event::Epoll;
use crate::sys::packets::Pool;
use crate::sys::verbs::{Ah, AhSettings, Arrival, Marks, UdCounts, UdPort, flow_label};
use crate::sys::{Errno, clock};
use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Most address handles of an endpoint: one for each remote port.
const HANDLES_MAX: usize = 4096;
/// Most challenges and responses that wait for one handle.
const WAITING_MAX: usize = 256;
/// Most handles that wait for the end of sends.
const RETIRED_MAX: usize = 64;

/// The remote port that a handle is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct HandleKey {
    lid: u16,
    gid: [u8; 16],
}

/// A challenge or response that waits for a handle, and the number of its queue pair.
type Waiting = (u32, Box<[u8]>);
/// A handle that is being made.
type Asked = (HandleKey, AhSettings);

impl HandleKey {
    fn of(there: &Place) -> Self {
        Self { lid: there.lid, gid: there.gid }
    }
}

/// The UD queue pair of one endpoint.
#[derive(Debug)]
pub(super) struct UdLink {
    // The queue pair is dropped first.
    port: UdPort,
    handles: Handles<HandleKey, Ah>,
    /// Handles that were replaced, with the number of the last send that may use each.
    retired: VecDeque<(u64, Ah)>,
    /// Makes handles that may take long; `None`: none was needed, or there are no threads.
    aside: Option<Aside<Asked, Result<Ah, Errno>>>,
    /// Datagrams that wait for a handle in the making. A key may have none.
    waiting: HashMap<HandleKey, Vec<Waiting>>,
    unreachable: Unreachable<HandleKey>,
    place: Place,
    gid_index: u8,
    marks: Marks,
    /// The device is emulated by kernel threads.
    threads: bool,
}

impl UdLink {
    /// `threads`: the device is emulated by kernel threads.
    pub(super) fn new(
        port: UdPort,
        place: Place,
        (gid_index, marks): (u8, Marks),
        threads: bool,
    ) -> Self {
        let handles = Handles::new(HANDLES_MAX);
        let unreachable = Unreachable::new(HANDLES_MAX);
        let (waiting, aside) = (HashMap::new(), None);
        let retired = VecDeque::new();
        Self {
            port,
            handles,
            retired,
            aside,
            waiting,
            unreachable,
            place,
            gid_index,
            marks,
            threads,
        }
    }

    /// The device is emulated by kernel threads, which need the processor that polls.
    #[inline]
    pub(super) fn is_threads(&self) -> bool {
        self.threads
    }

    /// See [`UdPort::lend`].
    pub(super) fn lend(&mut self, pool: Arc<Pool>) {
        self.port.lend(pool);
    }

    /// Longest datagram, bytes.
    pub(super) fn datagram_max(&self) -> usize {
        usize::from(self.place.mtu)
    }

    /// Longest datagram to `there`, bytes.
    #[inline]
    pub(super) fn longest_to(&self, there: &Place) -> usize {
        usize::from(self.place.mtu.min(there.mtu))
    }

    /// Datagrams for which there is room until the next `receive`.
    pub(super) fn receive_room(&self) -> usize {
        self.port.receive_room()
    }

    pub(super) fn counts(&self) -> UdCounts {
        self.port.counts()
    }

    /// Address handles that exist.
    pub(super) fn handles(&self) -> usize {
        self.handles.len()
    }

    /// Why the queue pair can no longer be used.
    pub(super) fn broken(&self) -> Option<Errno> {
        self.port.broken()
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.port.fd()
    }

    /// How a handle of the port of `there` is made.
    fn settings_of(&self, there: &Place) -> AhSettings {
        let (network, lid) = there.network.across(there.lid, &self.place.gid, &there.gid);
        let routed = self.place.network.is_routed_to(network);
        AhSettings {
            port: self.port.settings().port,
            gid: routed.then_some((there.gid, self.gid_index)),
            lid,
            marks: self.marks,
            flow_label: flow_label(self.port.number(), 0),
        }
    }

    /// The handle of the port of `there`; `None`: it is being made. Errors: those for an unreachable address.
    #[cold]
    fn handle(&mut self, there: &Place) -> Result<Option<HandleId>, Errno> {
        let key = HandleKey::of(there);
        if let Some(id) = self.handles.id(&key) {
            return Ok(Some(id));
        }
        if self.waiting.contains_key(&key) {
            return Ok(None);
        }
        if !self.place.reaches(there) || self.unreachable.has(&key, clock::now_ns()) {
            return Err(Errno(libc::EHOSTUNREACH));
        }
        let settings = self.settings_of(there);
        if settings.gid.is_some() && self.ask_aside(key, settings) {
            self.waiting.insert(key, Vec::new());
            return Ok(None);
        }
        let made = self.port.addresses().make(&settings);
        self.keep(key, made).map(Some)
    }

    /// Leaves the making of a handle to a thread. False: there is none.
    fn ask_aside(&mut self, key: HandleKey, settings: AhSettings) -> bool {
        if self.aside.is_none() {
            let addresses = self.port.addresses();
            self.aside = Aside::start(move |(_, to): &Asked| addresses.make(to)).ok();
        }
        self.aside.as_mut().is_some_and(|aside| aside.ask((key, settings)))
    }

    /// Keeps a handle, or the fact that there is none.
    fn keep(&mut self, key: HandleKey, made: Result<Ah, Errno>) -> Result<HandleId, Errno> {
        self.unreachable.note(key, made.is_ok(), clock::now_ns());
        self.handles.find(key, || made)
    }

    /// Takes over handles that were made meanwhile, and sends what waits for them.
    #[inline]
    pub(super) fn take_handles(&mut self) {
        while let Some(((key, _), made)) = self.aside.as_mut().and_then(Aside::answer) {
            let id = self.keep(key, made);
            let waiting = self.waiting.remove(&key).unwrap_or_default();
            let Some(ah) = id.ok().and_then(|id| self.handles.get(id)) else { continue };
            for (number, bytes) in waiting {
                // One that cannot be sent counts as lost.
                let _ = self.port.send(ah, number, &[IoSlice::new(&bytes)]);
            }
        }
    }

    /// The path to `there` is suspect: its port may have another Ethernet address now.
    pub(super) fn renew(&mut self, there: &Place) {
        if self.settings_of(there).gid.is_none() {
            return;
        }
        let (posted, complete) = self.port.progress();
        self.retired.extend(self.handles.forget(&HandleKey::of(there)).map(|ah| (posted, ah)));
        while self.retired.len() > RETIRED_MAX
            || self.retired.front().is_some_and(|(last, _)| *last <= complete)
        {
            self.retired.pop_front();
        }
    }

    /// Sends `packets` to `there`; `handle` is set if it is not valid. Returns how many were taken. Errors: EAGAIN, its
    /// handle is being made; `there` cannot be reached, or the queue pair is broken.
    #[inline]
    pub(super) fn send(
        &mut self,
        there: &Place,
        handle: &mut Option<HandleId>,
        packets: &[IoSlice<'_>],
    ) -> Result<usize, Errno> {
        let known = handle.filter(|id| self.handles.get(*id).is_some());
        let id = match known {
            Some(id) => id,
            None => *handle.insert(self.handle(there)?.ok_or(Errno(libc::EAGAIN))?),
        };
        let ah = self.handles.get(id).ok_or(Errno(libc::EHOSTUNREACH))?;
        self.port.send(ah, there.number, packets)
    }

    /// Sends a challenge or a response, at the latest when there is a handle for it. Errors: as for `send`.
    pub(super) fn send_call(&mut self, there: &Place, bytes: &[u8]) -> Result<(), Errno> {
        match self.send(there, &mut None, &[IoSlice::new(bytes)]) {
            Err(Errno(libc::EAGAIN)) => {
                let waiting = self.waiting.entry(HandleKey::of(there)).or_default();
                if waiting.len() < WAITING_MAX {
                    waiting.push((there.number, bytes.into()));
                }
                Ok(())
            }
            other => other.map(|_| ()),
        }
    }

    /// Receives datagrams. Returns their number; 0 once the queue pair is broken.
    #[inline]
    pub(super) fn receive(&mut self, each: impl FnMut(Arrival<'_>)) -> usize {
        self.port.receive(each).unwrap_or(0)
    }

    /// True if `receive` has something to take.
    #[inline]
    pub(super) fn has_arrived(&mut self) -> bool {
        self.port.has_arrived()
    }

    /// Breaks the queue pair.
    #[cfg(test)]
    pub(super) fn break_queue_pair(&mut self) {
        self.port.break_queue_pair();
    }

    /// Prepares for sleep on the descriptors in `watch`. False: something has arrived, or a handle was made.
    pub(super) fn sleep(&mut self, watch: &Epoll) -> bool {
        self.aside.as_mut().is_none_or(|aside| aside.sleep(watch)) && self.port.sleep()
    }

    /// Ends, and leaves `watch`. Returns the threads that may still be at work.
    pub(super) fn close(self, watch: &Epoll) -> Option<Crew> {
        watch.remove(self.fd());
        let Self { aside, .. } = self;
        aside.map(|aside| {
            watch.remove(aside.fd());
            aside.stop()
        })
    }

    /// The same for a thread that sleeps already: the first question may have been asked since it went to sleep.
    pub(super) fn rearm(&mut self, watch: &Epoll) -> bool {
        self.aside.as_mut().is_none_or(|aside| aside.sleep(watch)) && self.port.rearm()
    }
}
