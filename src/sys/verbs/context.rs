//! The open devices of this process: each is opened once for all of its users, and closed after the last one.
//!
//! To open a device takes the kernel and the firmware milliseconds, and more when many processes of a node do it at the
//! same time; it costs two descriptors and pages of doorbells. So the endpoints of a process share it.
//!
//! **Events.** The asynchronous events of a device come through one descriptor (ibv_get_async_event(3)). A user that
//! asks takes all that are there, under a lock, and hands them on: an event of a queue pair or of a queue to the user that
//! made the object, which carries the user's number as its context; any other one to every user. Sleeping users wait
//! for two descriptors: that of the device, and a bell of their own, for events that another one has taken.
//!
//! **Removal.** A device that is gone, or that its driver has taken away, is given to nobody again: its users hear of it,
//! and leave it. The next one to open the device, when it is back, opens it anew.
//!
//! **Fork.** A forked child opens devices for itself: the table is that of its process. What it inherits it leaves alone.
//!
//! **Protection domains are not shared.** A remote key is valid on all queue pairs of its domain: peers of one endpoint
//! would have access to memory that another one has opened to its own peers.

use super::events::{self, About, DeviceEvent};
use super::library::Verbs;
use super::owned::{Owned, check};
use crate::sys::cancel::Shield;
use crate::sys::errno::{Errno, Result};
use crate::sys::event::Doorbell;
use crate::sys::per_process::PerProcess;
use crate::sys::process::Home;
use crate::telemetry::log;
use rdma_core_sys::{
    IBV_ODP_SUPPORT, IBV_ODP_SUPPORT_READ, IBV_ODP_SUPPORT_WRITE, ibv_async_event, ibv_context,
    ibv_device_attr, ibv_device_attr_ex, ibv_query_device_ex,
};
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Most events that are taken in one look.
const EVENTS: usize = 64;

/// One user's part of an open device. Everything made from it holds it.
pub(super) struct Context {
    device: Arc<Opened>,
    pub(super) verbs: &'static Verbs,
    /// The user's number, never 0.
    number: usize,
    bell: OnceLock<Arc<Doorbell>>,
}

/// An open device, shared by its users.
struct Opened {
    raw: Owned<ibv_context>,
    verbs: &'static Verbs,
    home: Home,
    name: String,
    /// Its directory in sysfs, which exists as long as the device may be used.
    node: Option<PathBuf>,
    gone: AtomicBool,
    users: Mutex<Users>,
}

/// The users of a device, by number, and what each has not heard yet.
#[derive(Debug, Default)]
struct Users(HashMap<usize, User>);

#[derive(Debug, Default)]
struct User {
    /// No two are equal: a user that does not ask for a long time gets each once.
    events: VecDeque<DeviceEvent>,
    /// It sleeps, or may.
    bell: Option<Arc<Doorbell>>,
    rung: bool,
}

/// All that this process has open.
static OPENED: PerProcess<Vec<Weak<Opened>>> = PerProcess::new();

impl Context {
    /// The device `name`, which has its directory at `node`: as it is open already, or opened by `open`. Errors: those of
    /// `open`.
    pub(super) fn of(
        verbs: &'static Verbs,
        (name, node): (String, Option<PathBuf>),
        open: impl FnOnce() -> Result<Owned<ibv_context>>,
    ) -> Result<Arc<Self>> {
        let mut opened = OPENED.lock();
        opened.retain(|device| device.strong_count() > 0);
        let same = |device: &Arc<Opened>| device.name == name && device.node == node;
        let known = opened.iter().filter_map(Weak::upgrade).find(|it| same(it) && it.still_works());
        let device = match known {
            Some(device) => device,
            None => {
                let (home, gone, users) = (Home::here(), AtomicBool::new(false), Mutex::default());
                let raw = open()?;
                let device = Arc::new(Opened { raw, verbs, home, name, node, gone, users });
                opened.push(Arc::downgrade(&device));
                device
            }
        };
        drop(opened);
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        device.users().0.insert(number, User::default());
        Ok(Arc::new(Self { device, verbs, number, bell: OnceLock::new() }))
    }

    #[inline]
    pub(super) fn as_ptr(&self) -> *mut ibv_context {
        self.device.raw.as_ptr()
    }

    /// Its name, such as `mlx5_0`.
    pub(super) fn name(&self) -> &str {
        &self.device.name
    }

    /// The context that objects carry, for the events that are of them.
    pub(super) fn mark(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.number)
    }

    /// The completion vector for a new queue: by the calling processor, so that the interrupts of many processes do not
    /// all go to one.
    pub(super) fn vector(&self) -> i32 {
        // SAFETY: a live context, whose member does not change; the call takes nothing.
        let (count, processor) =
            unsafe { ((*self.as_ptr()).num_comp_vectors, libc::sched_getcpu()) };
        if count > 0 && processor > 0 { processor % count } else { 0 }
    }

    /// Whether the device pages on demand what connections write and read: a registration shows at any time what is
    /// mapped at its addresses then, and pins nothing.
    pub(super) fn pages_on_demand(&self) -> bool {
        const NEEDED: u32 = IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ;
        // SAFETY: a live context; all zeroes is a valid ibv_device_attr_ex, which the call fills.
        let caps = unsafe {
            let mut attr: ibv_device_attr_ex = std::mem::zeroed();
            match ibv_query_device_ex(self.as_ptr(), &mut attr) {
                0 => attr.odp_caps,
                _ => return false,
            }
        };
        caps.general_caps & u64::from(IBV_ODP_SUPPORT) != 0
            && caps.per_transport_caps.rc_odp_caps & NEEDED == NEEDED
    }

    /// The descriptor that is readable while the device has events that no user has taken.
    pub(super) fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor lives as long as the context; the member does not change.
        unsafe { BorrowedFd::borrow_raw((*self.as_ptr()).async_fd) }
    }

    /// The descriptor that is readable while this user has events that another one has taken. Errors: EMFILE, ENFILE,
    /// ENOMEM.
    pub(super) fn bell(&self) -> Result<BorrowedFd<'_>> {
        if let Some(bell) = self.bell.get() {
            return Ok(bell.fd());
        }
        #[cfg(test)]
        if NO_BELL.get() {
            return Err(Errno(libc::EMFILE));
        }
        let bell = Arc::new(Doorbell::new()?);
        if self.device.home.is_here() {
            let mut users = self.device.users();
            if let Some(user) = users.0.get_mut(&self.number) {
                user.bell = Some(bell.clone());
                user.ring_if(!user.events.is_empty());
            }
        }
        Ok(self.bell.get_or_init(|| bell).fd())
    }

    /// The next event for this user. Makes a system call. Errors: the device is gone (EIO).
    pub(super) fn take_event(&self) -> Result<Option<DeviceEvent>> {
        // A forked child would take its parent's events.
        if !self.device.home.is_here() {
            return Ok(None);
        }
        let mut users = self.device.users();
        if let Some(event) = users.next(self.number) {
            return Ok(Some(event));
        }
        let looked = self.device.look(&mut users);
        match users.next(self.number) {
            Some(event) => Ok(Some(event)),
            None => looked.map(|()| None),
        }
    }

    /// True while the system shows the device. Its users hear when it does not.
    pub(super) fn is_there(&self) -> bool {
        let is_there = self.device.is_there();
        if !is_there && self.device.home.is_here() {
            self.device.retire(&mut self.device.users());
        }
        is_there
    }
}

#[cfg(test)]
thread_local! {
    /// There is no descriptor for a bell.
    pub(super) static NO_BELL: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[cfg(test)]
impl Context {
    /// As after an error of the device.
    pub(super) fn retire(&self) {
        self.device.retire(&mut self.device.users());
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.device.home.is_here() {
            self.device.users().0.remove(&self.number);
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}, user {}", self.device.name, self.device.raw, self.number)
    }
}

impl Opened {
    /// Not to be called in a forked child, where nobody may ever release it.
    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_there(&self) -> bool {
        let node = || self.node.as_ref().is_none_or(|node| node.exists());
        !self.gone.load(Ordering::Relaxed) && node()
    }

    /// Whether it may have another user. Drivers say so when they have taken it away, if they can; of others its node is
    /// gone, and an error shows that nothing goes any more.
    fn still_works(&self) -> bool {
        // An answer may take long, and other users do not wait for it.
        let looked = self.look(&mut self.users());
        // SAFETY: all zeroes is a valid ibv_device_attr; a live context, and the call fills the local.
        let answers = || unsafe {
            let mut attr: ibv_device_attr = std::mem::zeroed();
            let answer = check((self.verbs.query_device)(self.raw.as_ptr(), &mut attr));
            // A shortage passes.
            answer.is_ok() || answer.is_err_and(Errno::is_shortage)
        };
        let works = looked.is_ok() && self.is_there() && answers();
        if !works {
            self.retire(&mut self.users());
        }
        works
    }

    /// Takes what events there are, and hands them on. Errors: the device is gone.
    fn look(&self, users: &mut Users) -> Result<()> {
        let _shield = Shield::raise();
        for _ in 0..EVENTS {
            // SAFETY: all zeroes is a valid ibv_async_event.
            let mut raw: ibv_async_event = unsafe { std::mem::zeroed() };
            // SAFETY: a live context, whose descriptor does not block, and room for one event.
            if unsafe { (self.verbs.get_async_event)(self.raw.as_ptr(), &mut raw) } != 0 {
                return match Errno::last() {
                    Errno(libc::EAGAIN | libc::EINTR) => Ok(()),
                    errno => {
                        self.retire(users);
                        Err(errno)
                    }
                };
            }
            let (event, user) = events::read(&raw);
            // SAFETY: the event just taken. Unacknowledged events would keep objects from being destroyed.
            unsafe { (self.verbs.ack_async_event)(&mut raw) };
            log::info(format_args!("{} says {} ({:?})", self.name, event.name, event.about));
            users.hand_on(event, user);
            if event.about == About::Device {
                self.retire(users);
            }
        }
        Ok(())
    }

    /// It gets no user any more, and its users hear that it is gone.
    fn retire(&self, users: &mut Users) {
        if !self.gone.swap(true, Ordering::Relaxed) {
            users.0.values_mut().for_each(|user| user.ring_if(true));
        }
    }
}

impl Users {
    /// Keeps an event for `user`, or for all of them if it is of none (0).
    fn hand_on(&mut self, event: DeviceEvent, user: usize) {
        let of = |(number, _): &(&usize, &mut User)| user == 0 || **number == user;
        for (_, user) in self.0.iter_mut().filter(of) {
            if !user.events.contains(&event) {
                user.events.push_back(event);
            }
            // Of each connection there are some for which nobody needs to wake.
            user.ring_if(event.about != About::Nothing);
        }
    }

    fn next(&mut self, user: usize) -> Option<DeviceEvent> {
        let user = self.0.get_mut(&user)?;
        let event = user.events.pop_front();
        if event.is_none() && std::mem::take(&mut user.rung) {
            user.bell.iter().for_each(|bell| _ = bell.silence());
        }
        event
    }
}

impl User {
    fn ring_if(&mut self, there_is_news: bool) {
        if let Some(bell) = self.bell.as_ref().filter(|_| there_is_news && !self.rung) {
            bell.ring();
            self.rung = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::event::wait_readable;

    const PORT: DeviceEvent = DeviceEvent { name: "PORT_ERR", about: About::Port(1) };

    fn broken(number: u32) -> DeviceEvent {
        DeviceEvent { name: "QP_FATAL", about: About::BrokenQueuePair(number) }
    }

    fn all(users: &mut Users, user: usize) -> Vec<DeviceEvent> {
        std::iter::from_fn(|| users.next(user)).collect()
    }

    #[test]
    fn an_event_is_for_the_user_of_its_object_or_for_all() {
        let mut users = Users::default();
        for number in 1..=3 {
            users.0.insert(number, User::default());
        }
        users.hand_on(broken(7), 2);
        users.hand_on(PORT, 0);
        users.hand_on(broken(8), 9);
        users.hand_on(broken(9), 0);
        assert_eq!(all(&mut users, 1), [PORT, broken(9)]);
        assert_eq!(all(&mut users, 2), [broken(7), PORT, broken(9)]);
        assert_eq!(all(&mut users, 9), []);
        // One that does not listen for long.
        (0..1000).for_each(|n| users.hand_on(broken(n % 2), 0));
        assert_eq!(all(&mut users, 3), [PORT, broken(9), broken(0), broken(1)]);
    }

    #[test]
    fn a_sleeping_user_is_woken_until_it_has_heard_everything() {
        let mut users = Users::default();
        let bells = [1, 2].map(|number| {
            let bell = Arc::new(Doorbell::new().unwrap());
            users.0.insert(number, User { bell: Some(bell.clone()), ..User::default() });
            bell
        });
        let ringing = || bells.each_ref().map(|bell| wait_readable(bell.fd(), 0).unwrap());
        users.hand_on(broken(7), 2);
        assert_eq!(ringing(), [false, true]);
        let useless = DeviceEvent { name: "COMM_EST", about: About::Nothing };
        users.hand_on(useless, 1);
        assert_eq!(ringing(), [false, true], "nobody needs to wake for it");
        assert_eq!(users.next(1), Some(useless));
        users.hand_on(PORT, 0);
        assert_eq!((users.next(1), ringing()), (Some(PORT), [true, true]));
        assert_eq!((all(&mut users, 1).len(), ringing()), (0, [false, true]));
        assert_eq!((all(&mut users, 2).len(), ringing()), (2, [false, false]));
    }
}
