//! The state of a process: devices, contexts, allocations, streams, events.

use crate::counters;
use crate::memory::{Allocation, Allocations, Kind, lives};
use crate::settings::Settings;
use crate::shared::Shared;
use crate::stream::{End, Event, Stream, Work};
use crate::sys::{self, Mapping, PAGE};
use crate::verify::violation;
use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// A result of the driver API, other than success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failure(pub(crate) i32);

pub(crate) const INVALID_VALUE: Failure = Failure(1);
pub(crate) const OUT_OF_MEMORY: Failure = Failure(2);
pub(crate) const NOT_INITIALIZED: Failure = Failure(3);
pub(crate) const NO_DEVICE: Failure = Failure(100);
pub(crate) const INVALID_DEVICE: Failure = Failure(101);
pub(crate) const INVALID_CONTEXT: Failure = Failure(201);
pub(crate) const PEER_ACCESS_UNSUPPORTED: Failure = Failure(217);
pub(crate) const INVALID_HANDLE: Failure = Failure(400);
pub(crate) const NOT_FOUND: Failure = Failure(500);
pub(crate) const NOT_READY: Failure = Failure(600);
pub(crate) const ALREADY_REGISTERED: Failure = Failure(712);
pub(crate) const NOT_REGISTERED: Failure = Failure(713);
pub(crate) const NOT_SUPPORTED: Failure = Failure(801);

pub(crate) type Answer<T = ()> = Result<T, Failure>;

/// What an IPC handle says, in its first bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle {
    pub(crate) magic: u64,
    pub(crate) pid: u32,
    pub(crate) fd: i32,
    pub(crate) len: u64,
    pub(crate) id: u64,
    /// The number of its device among all of the machine.
    pub(crate) device: u64,
    /// The number of its pool in its process; 0: none.
    pub(crate) pool: u64,
}

const MAGIC: u64 = u64::from_le_bytes(*b"fakecuda");
/// How an allocation is exported: descriptor and length, bytes.
pub(crate) type Exported = fn(&Allocation) -> Option<(i32, usize)>;

/// Primary contexts have the number of their device and this; others are numbered behind.
const PRIMARY: usize = 0x1000;
const OTHERS: usize = 0x2000;

#[derive(Default)]
pub(crate) struct Model {
    /// The process that called cuInit; 0: none has.
    initialized: u32,
    /// The retains of each device's primary context.
    primary: HashMap<i32, usize>,
    contexts: HashMap<usize, Context>,
    pub(crate) allocations: Allocations,
    pub(crate) shared: Shared,
    /// With their contexts; that of the default stream is 0.
    streams: HashMap<usize, (usize, Arc<Stream>)>,
    events: HashMap<usize, (usize, Arc<Event>)>,
    last: usize,
}

/// A context: its device, and what no other context of the process has had.
#[derive(Clone, Copy)]
struct Context {
    device: i32,
    id: u64,
    flags: u32,
}

/// CU_CTX_SYNC_MEMOPS.
const SYNC_MEMOPS: u32 = 0x80;

static MODEL: LazyLock<Mutex<Model>> = LazyLock::new(Mutex::default);

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The model of an initialised process. Failure 3 before cuInit and in a child.
pub(crate) fn with<T>(then: impl FnOnce(&mut Model) -> Answer<T>) -> Answer<T> {
    let mut model = MODEL.lock().unwrap_or_else(PoisonError::into_inner);
    if model.initialized != std::process::id() { Err(NOT_INITIALIZED) } else { then(&mut model) }
}

pub(crate) fn initialize() -> Answer {
    let mut model = MODEL.lock().unwrap_or_else(PoisonError::into_inner);
    if Settings::get().devices == 0 {
        return Err(NO_DEVICE);
    }
    // What a parent initialised is of no use to its child.
    if model.initialized != 0 && model.initialized != std::process::id() {
        return Err(NOT_INITIALIZED);
    }
    model.initialized = std::process::id();
    Ok(())
}

/// The contexts of this thread, the current one last.
pub(crate) fn contexts<T>(then: impl FnOnce(&mut Vec<usize>) -> T) -> T {
    CURRENT.with_borrow_mut(then)
}

impl Model {
    pub(crate) fn fresh(&mut self) -> usize {
        self.last += 1;
        self.last
    }

    pub(crate) fn device(&self, ordinal: i32) -> Answer<i32> {
        let exists = usize::try_from(ordinal).is_ok_and(|n| n < Settings::get().devices);
        if exists { Ok(ordinal) } else { Err(INVALID_DEVICE) }
    }

    /// The current context and its device.
    pub(crate) fn context(&self) -> Answer<(usize, i32)> {
        let current = contexts(|all| all.last().copied()).ok_or(INVALID_CONTEXT)?;
        self.contexts.get(&current).map(|its| (current, its.device)).ok_or(INVALID_CONTEXT)
    }

    /// What tells a context from one that has its handle later. A violation for a context that has ended.
    pub(crate) fn id_of(&self, context: usize) -> u64 {
        let Some(its) = self.contexts.get(&context) else {
            violation(&format!("context {context:#x} is asked for its id, and does not exist"))
        };
        its.id
    }

    fn open_context(&mut self, handle: usize, device: i32) -> usize {
        let id = self.fresh() as u64;
        self.contexts.entry(handle).or_insert(Context { device, id, flags: 0 });
        handle
    }

    /// The flags of the current context.
    pub(crate) fn flags(&mut self) -> Answer<&mut u32> {
        let (context, _) = self.context()?;
        self.contexts.get_mut(&context).map(|its| &mut its.flags).ok_or(INVALID_CONTEXT)
    }

    /// Ends a context with all that was made in it.
    fn end_context(&mut self, context: usize) -> Answer {
        self.contexts.remove(&context).ok_or(INVALID_CONTEXT)?;
        let of_it =
            |(its, stream): &(usize, Arc<Stream>)| (*its == context).then(|| Arc::clone(stream));
        for stream in self.streams.values().filter_map(of_it) {
            stream.drain();
            stream.end();
        }
        self.streams.retain(|_, (its, _)| *its != context);
        self.events.retain(|_, (its, _)| *its != context);
        self.allocations.end_all(context);
        Ok(())
    }

    pub(crate) fn is_context(&self, context: usize) -> bool {
        self.contexts.contains_key(&context)
    }

    pub(crate) fn retain(&mut self, device: i32) -> Answer<usize> {
        let context = PRIMARY + self.device(device)? as usize;
        *self.primary.entry(device).or_default() += 1;
        Ok(self.open_context(context, device))
    }

    pub(crate) fn release(&mut self, device: i32) -> Answer {
        let count =
            self.primary.get_mut(&device).filter(|count| **count > 0).ok_or(INVALID_CONTEXT)?;
        *count -= 1;
        if *count == 0 { self.end_context(PRIMARY + device as usize) } else { Ok(()) }
    }

    /// Ends a primary context, even one that is retained. The next one has its handle.
    pub(crate) fn reset(&mut self, device: i32) -> Answer {
        let context = PRIMARY + self.device(device)? as usize;
        if self.primary.remove(&device).is_some_and(|count| count > 0) {
            self.end_context(context)?;
        }
        Ok(())
    }

    pub(crate) fn is_active(&self, device: i32) -> bool {
        self.primary.get(&device).is_some_and(|count| *count > 0)
    }

    pub(crate) fn create_context(&mut self, device: i32) -> Answer<usize> {
        let device = self.device(device)?;
        let context = OTHERS + self.fresh();
        Ok(self.open_context(context, device))
    }

    pub(crate) fn destroy_context(&mut self, context: usize) -> Answer {
        if context < OTHERS { Err(INVALID_CONTEXT) } else { self.end_context(context) }
    }

    fn add(
        &mut self,
        len: usize,
        mapping: Mapping,
        kind: impl FnOnce(Mapping) -> Kind,
    ) -> Answer<usize> {
        let (context, ordinal) = self.context()?;
        let base = mapping.base;
        Ok(self.add_at(base, len, (context, ordinal), kind(mapping)))
    }

    pub(crate) fn add_at(
        &mut self,
        base: usize,
        len: usize,
        place: (usize, i32),
        kind: Kind,
    ) -> usize {
        let id = self.fresh() as u64;
        let (context, ordinal) = place;
        let sync = AtomicBool::new(false);
        let queued = AtomicUsize::new(0);
        self.allocations.add(Allocation { base, len, id, context, ordinal, kind, sync, queued })
    }

    /// `touchable`: by the processor.
    pub(crate) fn bytes(&mut self, len: usize, touchable: bool) -> Answer<Mapping> {
        self.context()?;
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        let at = self.allocations.place(len);
        Mapping::create(len, at, touchable).ok_or(OUT_OF_MEMORY)
    }

    pub(crate) fn allocate(&mut self, len: usize) -> Answer<usize> {
        let memory = Settings::get().memory;
        if memory.is_some_and(|memory| self.allocations.used() + len > memory) {
            return Err(OUT_OF_MEMORY);
        }
        let mapping = self.bytes(len, false)?;
        self.add(len, mapping, Kind::Device)
    }

    pub(crate) fn allocate_managed(&mut self, len: usize) -> Answer<usize> {
        let mapping = self.bytes(len, true)?;
        self.add(len, mapping, Kind::Managed)
    }

    pub(crate) fn allocate_host(&mut self, len: usize) -> Answer<usize> {
        let mapping = self.bytes(len, true)?;
        self.add(len, mapping, |mapping| Kind::Host(Some(mapping)))
    }

    pub(crate) fn is_of_pool(&self, addr: usize) -> bool {
        let is = |found: &Arc<Allocation>| matches!(found.kind, Kind::Pool(..) | Kind::OfPool(_));
        self.find(addr).is_some_and(is)
    }

    pub(crate) fn free(&mut self, base: usize) -> Answer {
        let right = |kind: &Kind| {
            matches!(kind, Kind::Device(_) | Kind::Managed(_) | Kind::Pool(..) | Kind::OfPool(_))
        };
        self.allocations.take(base, right).map(|_| ()).ok_or(INVALID_VALUE)
    }

    pub(crate) fn free_host(&mut self, base: usize) -> Answer {
        let right = |kind: &Kind| matches!(kind, Kind::Host(Some(_)));
        self.allocations.take(base, right).map(|_| ()).ok_or(INVALID_VALUE)
    }

    pub(crate) fn register(&mut self, base: usize, len: usize) -> Answer {
        let place = self.context()?;
        if self.allocations.find(base).is_some() {
            return Err(ALREADY_REGISTERED);
        }
        self.add_at(base, len, place, Kind::Host(None));
        Ok(())
    }

    pub(crate) fn unregister(&mut self, base: usize) -> Answer {
        let right = |kind: &Kind| matches!(kind, Kind::Host(None));
        let taken = self.allocations.take(base, right);
        taken.map(|_| ()).ok_or(NOT_REGISTERED)
    }

    /// A dma-buf of a range: whole pages of device memory. What crashes a driver is a violation here.
    pub(crate) fn dmabuf(&self, at: usize, len: usize) -> Answer<OwnedFd> {
        let found = self.find(at).filter(|found| !found.is_host()).ok_or(INVALID_VALUE)?;
        if found.is_managed() || found.context == 0 && !found.is_mapped() {
            violation("a dma-buf of managed memory, or of a pool, is asked for");
        }
        let end = found.base + found.len.next_multiple_of(PAGE);
        if at % PAGE != 0 || len % PAGE != 0 || len == 0 || at + len > end {
            return Err(INVALID_VALUE);
        }
        counters::add("dmabuf-bytes", len as u64);
        found.descriptor(at - found.base, len).ok_or(OUT_OF_MEMORY)
    }

    /// The pages that have the bytes, and where in them they begin, as a kernel module gives them to network devices.
    pub(crate) fn peer_memory(&self, at: usize, len: usize) -> Answer<(OwnedFd, usize)> {
        let found = self.find(at).filter(|found| !found.is_host() && !found.is_managed());
        let found = found.ok_or(INVALID_VALUE)?;
        let of_pool = found.context == 0 && !found.is_mapped();
        let (begin, end) = (at - at % PAGE, (at + len).next_multiple_of(PAGE));
        if of_pool || len == 0 || end > found.base + found.len.next_multiple_of(PAGE) {
            return Err(INVALID_VALUE);
        }
        counters::add("peer-bytes", (end - begin) as u64);
        let fd = found.descriptor(begin - found.base, end - begin).ok_or(OUT_OF_MEMORY)?;
        Ok((fd, at - begin))
    }

    pub(crate) fn find(&self, addr: usize) -> Option<&Arc<Allocation>> {
        self.allocations.find(addr)
    }

    pub(crate) fn export(&self, addr: usize, how: Exported) -> Answer<Handle> {
        let allocation = self.find(addr).ok_or(INVALID_VALUE)?;
        let (fd, len) = how(allocation).ok_or(INVALID_VALUE)?;
        let (pid, len, id) = (std::process::id(), len as u64, allocation.id);
        let device = Settings::get().number_of(allocation.ordinal);
        let pool = allocation.number_of_pool();
        Ok(Handle { magic: MAGIC, pid, fd, len, id, device, pool })
    }

    /// The memory that a handle names. Failures: 400, 1.
    pub(crate) fn mapping_of(&mut self, handle: &Handle) -> Answer<Mapping> {
        if handle.magic != MAGIC || handle.pid == std::process::id() {
            return Err(INVALID_HANDLE);
        }
        let at = self.allocations.place(handle.len as usize);
        let mapping = Mapping::open(handle.pid, handle.fd, handle.len as usize, at);
        let mapping = mapping.ok_or(INVALID_VALUE)?;
        if lives(&mapping, handle.id) { Ok(mapping) } else { Err(INVALID_HANDLE) }
    }

    pub(crate) fn import(&mut self, handle: &Handle) -> Answer<usize> {
        let (_, here) = self.context()?;
        let settings = Settings::get();
        if settings.apart && settings.number_of(here) != handle.device {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        let owner = (handle.pid, handle.id);
        if let Some(Kind::Imported { opens, mapping, .. }) =
            self.allocations.imported(owner).map(|a| &a.kind)
        {
            opens.fetch_add(1, Ordering::Relaxed);
            return Ok(mapping.base);
        }
        let mapping = self.mapping_of(handle)?;
        self.add(handle.len as usize, mapping, |mapping| Kind::Imported {
            mapping,
            owner,
            opens: AtomicUsize::new(1),
        })
    }

    pub(crate) fn close(&mut self, base: usize) -> Answer {
        let allocation =
            self.find(base).filter(|allocation| allocation.base == base).ok_or(INVALID_VALUE)?;
        let Kind::Imported { opens, .. } = &allocation.kind else { return Err(INVALID_VALUE) };
        if opens.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.allocations.take(base, |_| true);
        }
        Ok(())
    }

    /// One end of a copy of `len` bytes, and how many of them are there: all in one allocation, or in memory that CUDA
    /// does not know. A mapping may be continued by its neighbour.
    fn end(&self, addr: usize, len: usize) -> Answer<(End, usize)> {
        let of = self.find(addr).cloned();
        let room = match &of {
            Some(of) if !of.is_open() => return Err(INVALID_VALUE),
            Some(of) if !of.is_host() => of.len - (addr - of.base),
            _ => len,
        };
        if room < len && !of.as_ref().is_some_and(|of| of.is_mapped()) {
            return Err(INVALID_VALUE);
        }
        Ok((End { addr, of }, room.min(len)))
    }

    /// The work of a copy, and whether its call waits for it although it is not synchronous: the destination is
    /// pageable.
    pub(crate) fn copy(&self, to: usize, from: usize, len: usize) -> Answer<(Vec<Work>, bool)> {
        self.context()?;
        let (mut all, mut done) = (Vec::new(), 0);
        let pageable = self.find(to).is_none();
        while done < len {
            let (target, room) = self.end(to + done, len - done)?;
            let (source, here) = self.end(from + done, len - done)?;
            // Past what is mapped there is nothing.
            if done > 0 && target.of.is_none() != pageable {
                return Err(INVALID_VALUE);
            }
            let len = room.min(here);
            all.push(match source.of {
                None => Work::Place { bytes: sys::bytes(source.addr, len), to: target },
                Some(_) => Work::Copy { to: target, from: source, len },
            });
            done += len;
        }
        Ok((all, pageable))
    }

    pub(crate) fn fill(&self, to: usize, value: u8, len: usize) -> Answer<Vec<Work>> {
        self.context()?;
        let (mut all, mut done) = (Vec::new(), 0);
        while done < len {
            let (to, room) = self.end(to + done, len - done)?;
            all.push(Work::Fill { to, value, len: room });
            done += room;
        }
        Ok(all)
    }

    /// True if a synchronous copy returns before it has run.
    pub(crate) fn returns_early(&mut self, to: usize, from: usize) -> bool {
        if self.flags().is_ok_and(|flags| *flags & SYNC_MEMOPS != 0) {
            return false;
        }
        let device = |addr| self.find(addr).filter(|allocation| !allocation.is_host());
        let waits = |allocation: &Arc<Allocation>| allocation.sync.load(Ordering::Relaxed);
        let (Some(to), Some(from)) = (device(to), device(from)) else { return false };
        !waits(to) && !waits(from)
    }

    pub(crate) fn create_stream(&mut self, blocking: bool) -> Answer<usize> {
        let (context, _) = self.context()?;
        let number = self.fresh();
        // Numbers below are the names of default streams.
        let handle = number + 0x100;
        let stream = Stream::new(number as u64, blocking).ok_or(OUT_OF_MEMORY)?;
        self.streams.insert(handle, (context, stream));
        Ok(handle)
    }

    /// The stream of a handle; all default streams are one.
    pub(crate) fn stream(&mut self, handle: usize) -> Answer<Arc<Stream>> {
        if handle <= 2 && !self.streams.contains_key(&0) {
            self.streams.insert(0, (0, Stream::new(0, true).ok_or(OUT_OF_MEMORY)?));
        }
        let handle = if handle <= 2 { 0 } else { handle };
        let Some((_, stream)) = self.streams.get(&handle) else {
            violation(&format!("stream {handle:#x} is used, and does not exist"))
        };
        Ok(Arc::clone(stream))
    }

    pub(crate) fn destroy_stream(&mut self, handle: usize) -> Answer {
        self.stream(handle)?.end();
        self.streams.remove(&handle);
        Ok(())
    }

    /// The streams that the default stream and the freeing of memory wait for.
    pub(crate) fn blocking(&self) -> Vec<Arc<Stream>> {
        let all = self.streams.values().map(|(_, stream)| stream);
        all.filter(|stream| stream.blocking).cloned().collect()
    }

    pub(crate) fn create_event(&mut self) -> Answer<usize> {
        let (context, _) = self.context()?;
        let handle = self.fresh() + 0x100;
        self.events.insert(handle, (context, Arc::default()));
        Ok(handle)
    }

    pub(crate) fn event(&self, handle: usize) -> Answer<Arc<Event>> {
        let Some((_, event)) = self.events.get(&handle) else {
            violation(&format!("event {handle:#x} is used, and does not exist"))
        };
        Ok(Arc::clone(event))
    }

    pub(crate) fn destroy_event(&mut self, handle: usize) -> Answer {
        self.event(handle)?;
        self.events.remove(&handle);
        Ok(())
    }
}
