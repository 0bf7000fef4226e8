//! The module's requests, as typed calls.

use super::abi::{self, *};
use super::failure::{Failure, Refusal};
use super::kernel::{Device, Kernel};
use super::ring::{self, EVENTS, Ring};
use crate::sys::errno::Errno;
use crate::sys::process::{self, Home};
use std::os::fd::RawFd;
use std::sync::Arc;

/// Top bits of an immediate that say for which process of a node it is.
pub(crate) const INDEX_BITS: u32 = 9;
/// How long the module tries to reconnect a broken connection, seconds.
pub(crate) const RECONNECT_S: u32 = 30;
/// Interval at which the module checks a silent connection, milliseconds.
const HEARTBEAT_MS: u32 = 1000;
/// Hop limit of packets.
const HOPS: u8 = 64;
/// Packet lifetime: 4.096 us * 2^16, the kernel's value for RoCE.
const LIFE_TIME: u8 = 16;
/// Selector of a path record: exactly this value.
const EXACTLY: u8 = 2;

/// The port and the job with which a process attaches.
#[derive(Clone, Debug)]
pub(crate) struct Here {
    pub(crate) device: String,
    pub(crate) port: u8,
    pub(crate) gid_index: u8,
    pub(crate) gid: [u8; 16],
    /// 0 with RoCE.
    pub(crate) lid: u16,
    pub(crate) service_level: u8,
    /// Identifies the job to the module, and to the module of the other node.
    pub(crate) job: [u8; JOB_KEY_LEN],
}

/// A port of another node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct There {
    pub(crate) gid: [u8; 16],
    /// 0 with RoCE.
    pub(crate) lid: u16,
    /// Packet length, bytes: what both ports support.
    pub(crate) mtu: u16,
    /// The partition of the path to it.
    pub(crate) pkey: u16,
}

/// A module that was opened, and whose version is supported.
#[derive(Debug)]
pub(crate) struct Found {
    pub(super) kernel: Box<dyn Kernel>,
    pub(crate) minor: u16,
    pub(super) capability: u64,
}

impl Found {
    /// Opens the module. Errors: why it is unusable.
    pub(crate) fn open() -> Result<Self, Refusal> {
        Self::open_above(-1)
    }

    /// The same with a descriptor whose number is above `other`.
    pub(super) fn open_above(other: RawFd) -> Result<Self, Refusal> {
        match Device::open_above(other) {
            Ok(device) => Self::over(Box::new(device)),
            Err(Errno(libc::ENOENT | libc::ENODEV | libc::ENXIO)) => Err(Refusal::Absent),
            Err(errno) => Err(Refusal::Closed(errno)),
        }
    }

    /// Queries the capabilities of the module behind `kernel`.
    pub(super) fn over(kernel: Box<dyn Kernel>) -> Result<Self, Refusal> {
        let (major, minor, capability) = (MAJOR, MINOR, CAN_USER_MR | CAN_EVICT);
        let own = Capability { major, minor, capability, ..Capability::default() };
        let ask = |request: u32| {
            let mut bytes = [0; size_of::<Capability>()];
            bytes.copy_from_slice(to_bytes(&own));
            let answer = kernel.ioctl(request, &mut bytes);
            answer.map(|_| from_bytes::<Capability>(&bytes))
        };
        let theirs = match ask(CAPABILITY) {
            Ok(theirs) => theirs,
            Err(errno) => match ask(QUERY) {
                Ok(Capability { major, minor, .. }) => {
                    return Err(Refusal::TooOld { major, minor });
                }
                Err(_) => return Err(Failure::new(CAPABILITY, errno).into()),
            },
        };
        let Capability { major, minor, capability, .. } = theirs;
        if (major, minor) < (MAJOR, MINOR_MIN) {
            return Err(Refusal::TooOld { major, minor });
        }
        if major > MAJOR {
            return Err(Refusal::TooNew { major, minor });
        }
        if capability & CAN_EVICT == 0 {
            return Err(Refusal::CannotEvict);
        }
        Ok(Self { kernel, minor, capability })
    }

    /// Attaches to a port. Errors: why that failed.
    pub(crate) fn attach(self, here: &Here) -> Result<(Arc<Module>, Ring), Refusal> {
        let mut question = Attach {
            mode: MODE_KERNEL,
            port: here.port,
            local_addr: short(&here.gid, here.lid),
            index_bits: INDEX_BITS as u8,
            gid_index: u16::from(here.gid_index),
            gid: here.gid,
            job_key: here.job,
            job_key_len: JOB_KEY_LEN as u8,
            events: EVENTS,
            reconnect_timeout_s: RECONNECT_S,
            heartbeat_ms: HEARTBEAT_MS,
            ..Attach::default() // the rest as set by the module's parameters
        };
        question.device = name_of_device(&here.device)?;
        let line = Line { kernel: self.kernel, minor: self.minor, home: Home::here() };
        let attached = line.attach(&question)?;
        let module = Module { line: Arc::new(line), attached, here: here.clone() };
        let locked = self.capability & CAN_GPU != 0;
        let map = |len| module.line.kernel.map(len, locked);
        let ring = ring::map(self.minor, EVENTS, map)
            .and_then(|(memory, layout)| Ring::new(memory, EVENTS, layout))
            .map_err(Refusal::NoRing)?;
        Ok((Arc::new(module), ring))
    }
}

/// A connection to another node, shared by all processes of the job on both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Connection {
    /// Its name in requests.
    pub(crate) handle: u64,
    /// Its name in events.
    pub(crate) conn: u64,
}

/// The module, attached to a port. Everything the process has in it ends with this, if dropped in the process
/// that attached.
#[derive(Debug)]
pub(crate) struct Module {
    line: Arc<Line>,
    attached: Attached,
    here: Here,
}

/// A descriptor of the module: its requests that both kinds of attachment have.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) kernel: Box<dyn Kernel>,
    pub(super) minor: u16,
    pub(super) home: Home,
}

/// A device's name as the module reads it. Errors: ENODEV for one that is too long.
pub(super) fn name_of_device(name: &str) -> Result<[u8; abi::NAME_LEN], Failure> {
    let mut bytes = [0; abi::NAME_LEN];
    match bytes.get_mut(..name.len()) {
        Some(to) if name.len() < abi::NAME_LEN => to.copy_from_slice(name.as_bytes()),
        _ => return Err(Failure::new(ATTACH, Errno(libc::ENODEV))),
    }
    Ok(bytes)
}

/// 32 bits that identify a port to its neighbours: the LID, or the end of the GID, which for RoCE over
/// IPv4 is the address.
fn short(gid: &[u8; 16], lid: u16) -> u32 {
    let [.., a, b, c, d] = *gid;
    if lid != 0 { u32::from(lid) } else { u32::from_be_bytes([a, b, c, d]) }
}

/// Most attempts at a request that signals interrupt.
const ATTEMPTS: usize = 10;

/// The answer of `ask`, which is asked again while a signal interrupts it, but not for ever.
pub(super) fn uninterrupted<T>(ask: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
    for _ in 1..ATTEMPTS {
        match ask() {
            Err(Failure { errno: Errno(libc::EINTR), .. }) => {}
            answer => return answer,
        }
    }
    ask()
}

impl Line {
    pub(super) fn call<Q: Plain, A: Plain>(
        &self,
        request: u32,
        question: &Q,
    ) -> Result<(A, i32), Failure> {
        if !self.home.is_here() {
            return Err(Failure::new(request, Errno(libc::EOWNERDEAD)));
        }
        let mut bytes = [0; ARGUMENT_MAX];
        for (to, from) in bytes.iter_mut().zip(to_bytes(question)) {
            *to = *from;
        }
        let Some(argument) = bytes.get_mut(..argument_len(request)) else {
            return Err(Failure::new(request, Errno(libc::EINVAL)));
        };
        match self.kernel.ioctl(request, argument) {
            Ok(rc) => Ok((from_bytes(argument), rc)),
            Err(errno) => Err(Failure::new(request, errno)),
        }
    }

    /// Attaches, also while signals interrupt it: `mmu_notifier_register` takes all locks of the address space, and answers EINTR
    /// to any signal, whatever SA_RESTART says. The module is as before then.
    pub(super) fn attach(&self, question: &Attach) -> Result<Attached, Failure> {
        let attach = || self.call(attach_of(self.minor), question);
        uninterrupted(attach).map(|(attached, _)| attached)
    }

    /// Registers memory, or finds it registered. Registering alone moves no byte; code that gives the key out is responsible
    /// for the consequences.
    pub(super) fn register(self: &Arc<Self>, question: RegMem) -> Result<Region, Failure> {
        let RegMem { addr, len, access, .. } = question;
        let (registered, _) = self.call(reg_mem_of(self.minor), &question)?;
        Ok(Region { line: self.clone(), registered, addr, len, access })
    }

    /// Ends registrations in this range, whole pages, that are not in use: when this returns, their keys are
    /// void. Returns bytes.
    pub(super) fn evict(&self, addr: u64, len: u64) -> Result<u64, Failure> {
        let page = process::page_size() as u64;
        let (start, end) = (addr / page * page, addr.saturating_add(len).div_ceil(page) * page);
        let question = Evict {
            kind: EVICT_RANGE,
            addr_or_bytes: start,
            len_or_count: end - start,
            ..Evict::default()
        };
        self.call(EVICT, &question).map(|(Evicted { bytes, .. }, _)| bytes)
    }

    /// Ends at least so many bytes of the least recently used registrations. Returns bytes.
    pub(super) fn evict_amount(&self, bytes: u64) -> Result<u64, Failure> {
        let question =
            Evict { kind: EVICT_AMOUNT, addr_or_bytes: bytes, len_or_count: 1, ..Evict::default() };
        self.call(EVICT, &question).map(|(Evicted { bytes, .. }, _)| bytes)
    }

    pub(super) fn cache_statistics(&self) -> Result<CacheStatistics, Failure> {
        self.call(CACHE_STATS, &CacheStatistics::default()).map(|(answer, _)| answer)
    }
}

impl Module {
    fn call<Q: Plain, A: Plain>(&self, request: u32, question: &Q) -> Result<(A, i32), Failure> {
        self.line.call(request, question)
    }

    /// The index of this process among the node's.
    pub(crate) fn index(&self) -> u32 {
        self.attached.index
    }

    pub(crate) fn here(&self) -> &Here {
        &self.here
    }

    pub(crate) fn minor(&self) -> u16 {
        self.line.minor
    }

    /// Longest registration, bytes; `None`: unknown.
    pub(crate) fn registration_max(&self) -> Option<usize> {
        usize::try_from(self.attached.registration_max).ok().filter(|max| *max > 0)
    }

    /// Registers memory, or finds it registered; `remote`: for peers to write, otherwise for this side to read.
    /// Registering alone moves no byte; code that gives the key out is responsible for the consequences.
    pub(crate) fn register(&self, addr: u64, len: u64, remote: bool) -> Result<Region, Failure> {
        let rights = if remote { ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE } else { 0 };
        let access = ACCESS_KERNEL | rights;
        self.line.register(RegMem { addr, len, access, ..RegMem::default() })
    }

    /// Ends registrations in this range, whole pages, that are not in use: when this returns, their keys are
    /// void. Returns bytes.
    pub(crate) fn evict(&self, addr: u64, len: u64) -> Result<u64, Failure> {
        self.line.evict(addr, len)
    }

    /// Ends at least so many bytes of the least recently used registrations. Returns bytes.
    pub(crate) fn evict_amount(&self, bytes: u64) -> Result<u64, Failure> {
        self.line.evict_amount(bytes)
    }

    /// Allocates a connection to `there` on this node. Both nodes do this before either connects.
    pub(crate) fn create(&self, there: &There) -> Result<Connection, Failure> {
        let question = ConnCreate {
            gid: there.gid,
            own_gid_index: self.here.gid_index,
            hop_limit: HOPS,
            lid: there.lid,
            service_level: self.here.service_level,
            is_global: u8::from(there.lid == 0),
            port: self.here.port,
            remote_addr: short(&there.gid, there.lid),
            ..ConnCreate::default()
        };
        let (ConnCreated { handle, conn }, _) = self.call(CONN_CREATE, &question)?;
        Ok(Connection { handle, conn })
    }

    /// Starts to connect.
    pub(crate) fn connect(&self, handle: u64, there: &There) -> Result<(), Failure> {
        let question = ConnConnect {
            handle,
            remote_gid: there.gid,
            own_gid: self.here.gid,
            remote_lid: there.lid.to_be_bytes(),
            own_lid: self.here.lid.to_be_bytes(),
            reversible: 1,
            mtu: (usize::from(there.mtu).max(256) / 256).ilog2() + 1, // enum ib_mtu
            p_key: there.pkey.to_be_bytes(),
            hop_limit: HOPS,
            paths: 1,
            service_level: self.here.service_level,
            mtu_selector: EXACTLY,
            rate_selector: EXACTLY,
            life_time_selector: EXACTLY,
            life_time: LIFE_TIME,
            ..ConnConnect::default()
        };
        self.call::<_, ConnConnected>(CONN_CONNECT, &question).map(|_| ())
    }

    /// Whether the connection is up. Errors: EIO, it was given up.
    pub(crate) fn is_connected(&self, handle: u64) -> Result<bool, Failure> {
        let question = ConnConnected { handle };
        self.call::<_, ConnConnected>(CONN_CONNECTED, &question).map(|(_, rc)| rc > 0)
    }

    /// How often queue pair `index` of a connection was connected. Errors: EINVAL, there is no such queue pair.
    pub(crate) fn conn_count(&self, handle: u64, index: u8) -> Result<u32, Failure> {
        let question = ConnCount { handle, index, ..ConnCount::default() };
        let (ConnCount { handle: answer, .. }, _) = self.call(CONN_COUNT, &question)?;
        Ok(answer as u32)
    }

    /// Writes the `len` bytes at `addr`, which lie in `region`, to `remote_addr`, and sends the process there
    /// `immediate`. An event with `wr_id` reports the end of the write. The region may end before.
    ///
    /// # Safety
    /// The bytes stay readable until that event.
    pub(crate) unsafe fn write(
        &self,
        handle: u64,
        region: &Region,
        (addr, len): (u64, u64),
        (remote_addr, rkey): (u64, u32),
        immediate: u32,
        wr_id: u64,
    ) -> Result<Posted, Failure> {
        let question = PostWrite {
            handle,
            addr,
            mr_handle: region.registered.handle,
            mr_addr: region.addr,
            mr_len: region.len,
            mr_access: region.access,
            rkey,
            remote_addr,
            len,
            wr_id,
            immediate,
            pad: 0,
        };
        self.call(POST_WRITE, &question).map(|(posted, _)| posted)
    }

    pub(crate) fn cache_statistics(&self) -> Result<CacheStatistics, Failure> {
        self.line.cache_statistics()
    }

    pub(crate) fn event_statistics(&self) -> Result<EventStatistics, Failure> {
        self.call(EVENT_STATS, &EventStatistics::default()).map(|(answer, _)| answer)
    }

    /// Statistics of all queue pairs of a connection together.
    pub(crate) fn statistics(&self, handle: u64) -> Result<ConnectionStatistics, Failure> {
        let question = ConnCount { handle, index: ALL, ..ConnCount::default() };
        self.call(CONN_STATS, &question).map(|(answer, _)| answer)
    }
}

/// Memory that the module's queue pairs may use, or those of the process: see the call that registered it. Deregistered on drop; the module keeps it until it is
/// evicted, or its addresses change.
#[derive(Debug)]
pub(crate) struct Region {
    line: Arc<Line>,
    registered: Registered,
    addr: u64,
    len: u64,
    access: u32,
}

impl Region {
    /// The local key, for queue pairs of the process.
    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.registered.lkey
    }

    #[inline]
    pub(crate) fn rkey(&self) -> u32 {
        self.registered.rkey
    }

    /// Its address for peers that use the key.
    pub(crate) fn iova(&self) -> u64 {
        self.registered.iova
    }

    pub(crate) fn range(&self) -> (u64, u64) {
        (self.addr, self.len)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Self { registered: Registered { handle, .. }, addr, len, access, .. } = *self;
        let question = DeregMem { handle, addr, len, access, pad: 0 };
        // It fails only if the registration has already ended.
        let _ = self.line.call::<_, DeregMem>(DEREG_MEM, &question);
    }
}
