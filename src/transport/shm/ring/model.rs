//! The ring under loom: the same code, in memory whose accesses loom orders in every way that the memory model allows
//! (scripts/models). The proof is for a ring of two slots and two lines of bulk space, which a few messages fill
//! several times.

use super::super::layout::{CELLS, CLOSING, CONSUMED, FLAGS, Geometry, SLOT, SLOTS};
use super::super::storage::{Storage, Word};
use super::{Area, Consumer, Full, Popped, Producer, Wake};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Arc, Notify};
use loom::thread;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

const LINE: usize = 64;
const GEOMETRY: Geometry = Geometry { slots: 2, bulk: 2 * LINE as u32, places: 1 };
/// Takes a line. It would fit in a slot, but the caller chooses where a payload lies.
const BULK_BYTES: usize = 8;

/// Plain bytes on the heap. Beside them are the words, and one loom cell for each slot, each line of the bulk
/// space and the payload buffer, by which loom detects conflicting accesses.
struct Segment {
    bytes: std::cell::UnsafeCell<Box<[u128]>>,
    len: usize,
    words: [AtomicU32; 3],
    sequences: Vec<AtomicU32>,
    slots: Vec<UnsafeCell<()>>,
    bulk: Vec<UnsafeCell<()>>,
    place: UnsafeCell<()>,
}

// SAFETY: loom watches the plain bytes by `slots`, `bulk` and `place`.
unsafe impl Sync for Segment {}
// SAFETY: loom watches the plain bytes by `slots`, `bulk` and `place`.
unsafe impl Send for Segment {}

#[derive(Clone)]
struct Memory(Arc<Segment>);

impl Memory {
    fn new() -> Self {
        let len = GEOMETRY.len();
        let slots = GEOMETRY.slots as usize;
        Self(Arc::new(Segment {
            bytes: std::cell::UnsafeCell::new(vec![0; len.div_ceil(16)].into_boxed_slice()),
            len,
            words: [AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0)],
            sequences: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            slots: (0..slots).map(|_| UnsafeCell::new(())).collect(),
            bulk: (0..GEOMETRY.bulk as usize / LINE).map(|_| UnsafeCell::new(())).collect(),
            place: UnsafeCell::new(()),
        }))
    }

    fn offset(&self, place: *const u8) -> usize {
        let offset = place.addr() - self.base().as_ptr().addr();
        assert!(offset < self.0.len, "outside the segment");
        offset
    }

    /// The cells that cover `len` bytes at `place`.
    fn cells(&self, place: *const u8, len: usize) -> &[UnsafeCell<()>] {
        let (at, bulk) = (self.offset(place), GEOMETRY.bulk_at());
        if at >= GEOMETRY.place(0).unwrap() {
            return std::slice::from_ref(&self.0.place);
        }
        if at >= bulk {
            return &self.0.bulk[(at - bulk) / LINE..(at - bulk + len).div_ceil(LINE)];
        }
        let slot = at.checked_sub(SLOTS).expect("no slot") / SLOT;
        assert!((at - SLOTS) % SLOT + len <= SLOT, "more than a slot");
        &self.0.slots[slot..=slot]
    }
}

impl Storage for Memory {
    type Word = AtomicU32;

    fn base(&self) -> NonNull<u8> {
        // SAFETY: the box is not moved, and only its bytes are used.
        NonNull::new(unsafe { (*self.0.bytes.get()).as_mut_ptr().cast() }).unwrap()
    }

    fn len(&self) -> usize {
        self.0.len
    }

    unsafe fn word(&self, place: *mut u8) -> &AtomicU32 {
        match self.offset(place) {
            CONSUMED => &self.0.words[0],
            FLAGS => &self.0.words[1],
            CLOSING => &self.0.words[2],
            at => {
                assert!(at >= SLOTS && at < GEOMETRY.bulk_at() && (at - SLOTS) % SLOT == 0);
                const { assert!(CELLS < SLOTS) };
                &self.0.sequences[(at - SLOTS) / SLOT]
            }
        }
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }

    fn written(&self, place: *const u8, len: usize) {
        self.cells(place, len).iter().for_each(|cell| cell.with_mut(|_| ()));
    }

    fn read(&self, place: *const u8, len: usize) {
        self.cells(place, len).iter().for_each(|cell| cell.with(|_| ()));
    }
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        Self::load(self, order)
    }

    fn store(&self, value: u32, order: Ordering) {
        Self::store(self, value, order);
    }

    fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        Self::fetch_or(self, bits, order)
    }

    fn fetch_and(&self, bits: u32, order: Ordering) -> u32 {
        Self::fetch_and(self, bits, order)
    }
}

fn pair() -> (Producer<Memory>, Consumer<Memory>) {
    let memory = Memory::new();
    let mut producer = Producer::new(memory.clone(), GEOMETRY);
    producer.settle();
    producer.allow_restarts();
    (producer, Consumer::new(memory, GEOMETRY))
}

/// Pushes message `i`, through the bulk space if `bulk`.
fn push(tx: &mut Producer<Memory>, i: u8, bulk: bool) -> Result<Wake, Full> {
    let fill = |to: &mut [u8]| to.fill(i);
    if bulk { tx.push_bulk(&[i], BULK_BYTES, fill) } else { tx.push_short(&[i], 3, fill) }
}

/// Receives message `i` if it is there.
fn pop(rx: &mut Consumer<Memory>, i: u8) -> bool {
    let popped = rx.pop(|header, payload| {
        assert_eq!(header, [i]);
        assert!(payload.len() == 3 || payload.len() == BULK_BYTES);
        assert!(payload.iter().all(|byte| *byte == i));
    });
    assert!(!matches!(popped, Popped::Malformed));
    matches!(popped, Popped::Message | Popped::Handed(_))
}

/// Two ends with links in both directions that support recycled payload buffers.
fn both_ways() -> [End; 2] {
    let [a, b] = [Memory::new(), Memory::new()];
    [(a.clone(), b.clone(), 1), (b, a, 2)].map(|(ours, theirs, identity)| {
        let mut tx = Producer::new(ours.clone(), GEOMETRY);
        tx.settle();
        tx.allow_restarts();
        let mut rx = Consumer::new(theirs.clone(), GEOMETRY);
        let ours = Area::new(ours, GEOMETRY, identity);
        let theirs = Area::new(theirs, GEOMETRY, 3 - identity);
        tx.share_places(ours.clone(), theirs.clone());
        rx.share_places(theirs, ours);
        End { tx, rx }
    })
}

struct End {
    tx: Producer<Memory>,
    rx: Consumer<Memory>,
}

impl End {
    fn send(&mut self, i: u8) {
        while push(&mut self.tx, i, true).is_err() {
            thread::yield_now();
        }
    }

    /// Waits for message `i`. True: its payload lay in a recycled buffer.
    fn receive(&mut self, i: u8) -> bool {
        loop {
            let popped = self.rx.pop(|header, payload| {
                assert_eq!(header, [i]);
                assert_eq!(payload, [i; BULK_BYTES]);
            });
            match popped {
                Popped::Handed(handed) => {
                    assert!(self.tx.receive(&handed));
                    return handed.place.is_some();
                }
                Popped::Empty => thread::yield_now(),
                _ => panic!("not a message with payload beside its slot"),
            }
        }
    }
}

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    builder.check(model);
}

/// Every message arrives once, whole and in order, and no byte is written while it may be read.
fn all_arrive(ways: &'static [bool]) {
    explore(3, move || {
        let (mut tx, mut rx) = pair();
        let sender = thread::spawn(move || {
            for (i, bulk) in ways.iter().enumerate() {
                while push(&mut tx, i as u8 + 1, *bulk).is_err() {
                    thread::yield_now();
                }
            }
        });
        for i in 0..ways.len() {
            while !pop(&mut rx, i as u8 + 1) {
                thread::yield_now();
            }
        }
        sender.join().unwrap();
    });
}

#[test]
fn short_messages_lap_the_ring() {
    all_arrive(&[false; 5]);
}

#[test]
fn long_messages_lap_the_bulk_space() {
    all_arrive(&[true; 4]);
}

#[test]
fn short_and_long_messages_take_turns() {
    all_arrive(&[false, true, true, false]);
}

/// The reader of a payload buffer writes into it, while its ring is in use as well.
#[test]
fn a_place_goes_back_and_forth() {
    explore(3, || {
        let [mut a, mut b] = both_ways();
        let other = thread::spawn(move || {
            assert!(b.receive(1));
            b.send(2);
            b.send(3);
            assert!(b.receive(4));
        });
        a.send(1);
        assert!(a.receive(2));
        a.send(4);
        a.receive(3);
        other.join().unwrap();
    });
}

/// Both ends own a payload buffer, and send at the same time.
#[test]
fn places_cross_each_other() {
    explore(3, || {
        let [mut a, mut b] = both_ways();
        let run = |end: &mut End| {
            end.send(1);
            assert!(end.receive(1));
            end.send(2);
            end.receive(2);
        };
        let other = thread::spawn(move || run(&mut b));
        run(&mut a);
        other.join().unwrap();
    });
}

/// A sleeping receiver is woken by a published message; a receiver that is not woken has seen it. Loom reports a lost
/// doorbell as a deadlock.
#[test]
fn no_sleeper_is_forgotten() {
    explore(4, || {
        let (mut tx, mut rx) = pair();
        // Like `Shm::enable_waiting`, some time before the first sleep.
        rx.set_waits();
        let doorbell = Arc::new(Notify::new());
        let bell = Arc::clone(&doorbell);
        let sender = thread::spawn(move || {
            for i in 1..=2 {
                // The lap of one slot that the first message may have ended has no room before that is read.
                let wake = loop {
                    match push(&mut tx, i, false) {
                        Ok(wake) => break wake,
                        Err(Full) => thread::yield_now(),
                    }
                };
                if wake == Wake::Needed {
                    bell.notify();
                }
            }
        });
        for i in 1..=2 {
            while !pop(&mut rx, i) {
                if rx.sleep() {
                    doorbell.wait();
                }
                rx.awake();
            }
        }
        sender.join().unwrap();
    });
}

/// A receiver that sleeps immediately after it has asked to be woken may be missed: hence `SETTLES_NS`.
#[test]
#[should_panic(expected = "deadlock")]
fn a_first_sleep_takes_time() {
    explore(4, || {
        let (mut tx, mut rx) = pair();
        let doorbell = Arc::new(Notify::new());
        let bell = Arc::clone(&doorbell);
        let sender = thread::spawn(move || {
            if push(&mut tx, 1, false) == Ok(Wake::Needed) {
                bell.notify();
            }
        });
        while !pop(&mut rx, 1) {
            if rx.sleep() {
                doorbell.wait();
            }
            rx.awake();
        }
        sender.join().unwrap();
    });
}

/// Messages sent before the end are visible when the end is.
#[test]
fn an_end_is_seen_after_the_last_message() {
    explore(4, || {
        let (mut tx, mut rx) = pair();
        let sender = thread::spawn(move || {
            push(&mut tx, 1, true).unwrap();
            tx.close();
        });
        if rx.producer_closed() {
            assert!(pop(&mut rx, 1));
        }
        rx.close();
        sender.join().unwrap();
    });
}

/// Flags of both ends do not undo each other.
#[test]
fn pressure_outlives_a_doorbell() {
    explore(4, || {
        let (mut tx, rx) = pair();
        rx.set_waits();
        let sender = thread::spawn(move || {
            let _ = push(&mut tx, 1, false);
            tx
        });
        rx.sleep();
        rx.set_pressure(true);
        rx.awake();
        let tx = sender.join().unwrap();
        assert!(tx.under_pressure());
        rx.set_pressure(false);
        rx.close();
        assert!(!tx.under_pressure() && tx.consumer_closed());
    });
}
