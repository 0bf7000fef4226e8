//! Streams and events. A stream is a queue and a thread that works it off, each piece late by a time of its own.

use crate::counters;
use crate::memory::Allocation;
use crate::random::Random;
use crate::settings::Settings;
use crate::sys;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One end of a copy.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) addr: usize,
    /// `None`: memory that CUDA does not know.
    pub(crate) of: Option<Arc<Allocation>>,
}

impl End {
    fn reach(&self) -> usize {
        self.of.as_ref().map_or(self.addr, |of| of.reach(self.addr))
    }

    fn queued(&self, by: isize) {
        if let Some(of) = &self.of {
            of.queued.fetch_add(by as usize, Ordering::AcqRel);
        }
    }
}

/// An operation on a stream.
pub(crate) enum Work {
    Copy {
        to: End,
        from: End,
        len: usize,
    },
    /// The source has been read already.
    Place {
        to: End,
        bytes: Vec<u8>,
    },
    Fill {
        to: End,
        value: u8,
        len: usize,
    },
    Record(Arc<Event>, u64),
    Wait(Arc<Event>, u64),
    /// What is behind it is so late.
    Pause(Duration),
    /// A function of the program, with its argument.
    Call(Function, usize),
}

/// CUhostFn.
pub(crate) type Function = extern "C" fn(usize);

impl Work {
    fn ends(&self) -> [Option<&End>; 2] {
        match self {
            Self::Copy { to, from, .. } => [Some(to), Some(from)],
            Self::Place { to, .. } | Self::Fill { to, .. } => [Some(to), None],
            Self::Record(..) | Self::Wait(..) | Self::Pause(_) | Self::Call(..) => [None, None],
        }
    }

    /// A copy from a device to memory of the host, of at least 64 KiB.
    fn is_long_fetch(&self) -> bool {
        let is_host = |end: &End| end.of.as_ref().is_none_or(|of| of.is_host());
        matches!(self, Self::Copy { to, from, len } if *len >= 64 * 1024 && is_host(to) && !is_host(from))
    }

    fn run(&self) {
        match self {
            Self::Copy { to, from, len } => sys::copy(to.reach(), from.reach(), *len),
            Self::Place { to, bytes } => {
                sys::copy(to.reach(), bytes.as_ptr().expose_provenance(), bytes.len());
            }
            Self::Fill { to, value, len } => sys::fill(to.reach(), *value, *len),
            Self::Record(event, turn) => event.reach(*turn),
            Self::Wait(event, turn) => event.wait(*turn),
            Self::Pause(pause) => std::thread::sleep(*pause),
            Self::Call(function, argument) => function(*argument),
        }
    }
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// Work that has not ended, what the thread is at included.
    open: usize,
    ends: bool,
}

/// A stream.
pub(crate) struct Stream {
    /// The default stream waits for it.
    pub(crate) blocking: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    /// `None` without a thread.
    pub(crate) fn new(number: u64, blocking: bool) -> Option<Arc<Self>> {
        let stream = Arc::new(Self { blocking, queue: Mutex::default(), changed: Condvar::new() });
        let own = Arc::clone(&stream);
        let random = Random::new(Settings::get().seed, number);
        std::thread::Builder::new()
            .name("fake-cuda".to_owned())
            .spawn(move || own.work_off(random))
            .ok()?;
        Some(stream)
    }

    fn work_off(&self, mut random: Random) {
        let delay_us = Settings::get().delay_us;
        while let Some(work) = self.next() {
            if delay_us > 0 && !matches!(work, Work::Record(..)) {
                std::thread::sleep(Duration::from_micros(random.up_to(delay_us)));
            }
            work.run();
            self.count(&work, -1);
            locked(&self.queue).open -= 1;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = locked(&self.queue);
        loop {
            if let Some(work) = queue.work.pop_front() {
                return Some(work);
            }
            if queue.ends {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Memory that the default stream or a blocking one uses may be freed: freeing waits for these.
    fn count(&self, work: &Work, by: isize) {
        if work.is_long_fetch() {
            static FETCHES: AtomicUsize = AtomicUsize::new(0);
            let now = FETCHES.fetch_add(by as usize, Ordering::AcqRel).wrapping_add(by as usize);
            counters::count_most("most-DtoH", now as u64);
        }
        if !self.blocking {
            work.ends().into_iter().flatten().for_each(|end| end.queued(by));
        }
    }

    pub(crate) fn put(&self, work: Work) {
        self.count(&work, 1);
        let mut queue = locked(&self.queue);
        queue.work.push_back(work);
        queue.open += 1;
        self.changed.notify_all();
    }

    pub(crate) fn is_idle(&self) -> bool {
        locked(&self.queue).open == 0
    }

    pub(crate) fn drain(&self) {
        let queue = locked(&self.queue);
        drop(self.changed.wait_while(queue, |queue| queue.open > 0));
    }

    /// The thread ends after what is queued.
    pub(crate) fn end(&self) {
        locked(&self.queue).ends = true;
        self.changed.notify_all();
    }
}

/// An event: how often it was recorded, and up to which record it has happened.
#[derive(Default, Debug)]
pub(crate) struct Event {
    turns: Mutex<(u64, u64)>,
    changed: Condvar,
}

impl Event {
    /// The number of a new record.
    pub(crate) fn record(&self) -> u64 {
        let mut turns = locked(&self.turns);
        turns.0 += 1;
        turns.0
    }

    pub(crate) fn recorded(&self) -> u64 {
        locked(&self.turns).0
    }

    fn reach(&self, turn: u64) {
        let mut turns = locked(&self.turns);
        turns.1 = turns.1.max(turn);
        self.changed.notify_all();
    }

    pub(crate) fn wait(&self, turn: u64) {
        let turns = locked(&self.turns);
        drop(self.changed.wait_while(turns, |turns| turns.1 < turn));
    }

    pub(crate) fn has_happened(&self) -> bool {
        let turns = locked(&self.turns);
        turns.1 >= turns.0
    }
}
