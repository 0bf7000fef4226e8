//! A double of the module, for tests: several nodes in one process, behind the same system calls as the real
//! module, with the same arguments byte by byte. A write arrives when a test delivers it.

use super::abi::*;
use super::kernel::Kernel;
use super::module::{Found, Module};
use super::ring::{self, Event, HEADER, Layout, PACKED_65, Ring};
use super::{Domain, Here, Refusal, UserCache};
use crate::sys::cma::{self, Range};
use crate::sys::errno::{Errno, Result};
use crate::sys::pages::Pages;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

const PAIRS: usize = 4;
const PAGE: u64 = 4096;

/// A registration kept by the module.
#[derive(Debug)]
struct Mr {
    user: usize,
    start: u64,
    end: u64,
    access: u32,
    references: u32,
    used: u64,
    /// Its memory was replaced while it was in use: it ends with its last use.
    freeing: bool,
    /// The bytes of its pages. A device still reads these pages when others are mapped there.
    pages: Vec<u8>,
}

impl Mr {
    fn len(&self) -> u64 {
        self.end - self.start
    }

    fn holds(&self, (user, access): (usize, u32), (start, end): (u64, u64)) -> bool {
        self.user == user && self.access == access && self.start <= start && self.end >= end
    }
}

/// A process's open descriptor.
#[derive(Debug, Default)]
struct User {
    node: usize,
    asked: bool,
    attach: Option<Attach>,
    index: u32,
    ring: Option<Arc<Pages>>,
    /// By handle: the node that the connection leads to.
    conns: HashMap<u64, usize>,
    /// So many of its next events are lost.
    overflow: u32,
    open: bool,
    hits: u64,
    misses: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Link {
    #[default]
    New,
    Up,
    /// The module tries to reconnect.
    Broken,
    Dead,
}

/// A connection of two nodes; each side's state by node.
#[derive(Debug, Default)]
struct Pair {
    created: Vec<usize>,
    connecting: Vec<usize>,
    state: Link,
    counts: [u32; PAIRS],
    next: usize,
    writes: VecDeque<Pending>,
}

#[derive(Debug)]
struct Pending {
    user: usize,
    to: usize,
    mr: u64,
    question: PostWrite,
}

#[derive(Debug)]
struct Node {
    gid: [u8; 16],
    minor: u16,
    capability: u64,
    layout: Layout,
    gone: bool,
    /// Errors of the next calls, by the request's low byte.
    faults: HashMap<u8, VecDeque<i32>>,
    registrations_max: usize,
    /// The descriptor of a context of its device, and a protection domain there.
    domain: (i32, u32),
}

#[derive(Debug, Default)]
pub(crate) struct State {
    nodes: Vec<Node>,
    users: Vec<User>,
    mrs: HashMap<u64, Mr>,
    pairs: HashMap<(usize, usize), Pair>,
    clock: u64,
    /// Polls that it takes to connect.
    pub(crate) slow: u32,
    /// Bytes that were evicted.
    pub(crate) evicted: u64,
    /// Requests for queue pairs that do not exist.
    pub(crate) strays: u64,
    pub(crate) posted: u64,
    /// P_Keys of the paths that were connected.
    pub(crate) partitions: Vec<u16>,
}

/// All nodes of a test.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fabric(Arc<Mutex<State>>);

#[derive(Debug)]
struct Descriptor {
    fabric: Fabric,
    user: usize,
}

fn pair_of(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

/// The kernel's pointer to node `at`'s end of the connection to `to`.
fn conn_of(at: usize, to: usize) -> u64 {
    0xffff_8880_0000_0000 | (at as u64) << 16 | (to as u64) << 8
}

pub(crate) fn gid(node: usize) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, node as u8 + 1]
}

impl Fabric {
    pub(crate) fn new(nodes: usize) -> Self {
        let fabric = Self::default();
        let node = |n| Node {
            gid: gid(n),
            minor: MINOR,
            capability: CAN_USER_MR | CAN_EVICT,
            layout: PACKED_65,
            gone: false,
            faults: HashMap::new(),
            registrations_max: 4096,
            domain: (700, 0), // 0 is a valid handle
        };
        fabric.state().nodes = (0..nodes).map(node).collect();
        fabric
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// A process on `node` opens the module.
    pub(crate) fn open(&self, node: usize) -> std::result::Result<Found, Refusal> {
        Found::over(self.descriptor(node))
    }

    fn descriptor(&self, node: usize) -> Box<dyn Kernel> {
        let mut state = self.state();
        state.users.push(User { node, open: true, ..User::default() });
        let user = state.users.len() - 1;
        Box::new(Descriptor { fabric: self.clone(), user })
    }

    pub(crate) fn here(&self, node: usize) -> Here {
        Here {
            device: "rxe0".to_owned(),
            port: 1,
            gid_index: 1,
            gid: gid(node),
            lid: 0,
            service_level: 0,
            job: [7; 16],
        }
    }

    pub(crate) fn attach(&self, node: usize) -> (Arc<Module>, Ring) {
        self.open(node).unwrap().attach(&self.here(node)).unwrap()
    }

    /// A protection domain of a process on `node`.
    pub(crate) fn domain(&self, node: usize) -> Domain {
        let (command_fd, handle) = self.state().nodes[node].domain;
        Domain { device: "rxe0".to_owned(), command_fd, handle }
    }

    /// The cache of user registrations of `bytes` for a domain of a process on `node`.
    pub(crate) fn cache(
        &self,
        node: usize,
        bytes: usize,
    ) -> std::result::Result<UserCache, Refusal> {
        UserCache::over(self.open(node)?, self.domain(node), bytes)
    }

    /// The pages at these addresses are replaced: the kernel's MMU notifier, before that happens.
    pub(crate) fn changes(&self, addr: u64, len: u64) {
        self.state().changes(addr, len);
    }

    /// The `len` bytes at `addr` as a device reads them by a local key, from the pages that were registered. Panics if the
    /// key does not allow that.
    pub(crate) fn read(&self, lkey: u32, addr: u64, len: usize) -> Vec<u8> {
        let state = self.state();
        let mr = &state.mrs[&u64::from(lkey)];
        assert!(mr.references > 0 && mr.start <= addr && addr + len as u64 <= mr.end);
        let from = (addr - mr.start) as usize;
        mr.pages[from..from + len].to_vec()
    }

    pub(crate) fn set_abi(&self, node: usize, minor: u16, capability: u64) {
        let node = &mut self.state().nodes[node];
        (node.minor, node.capability) = (minor, capability);
    }

    pub(crate) fn set_layout(&self, node: usize, layout: Layout) {
        self.state().nodes[node].layout = layout;
    }

    pub(crate) fn set_registrations_max(&self, node: usize, max: usize) {
        self.state().nodes[node].registrations_max = max;
    }

    /// The next `times` calls of `request` on `node` fail.
    pub(crate) fn fail(&self, node: usize, request: u8, errno: i32, times: usize) {
        let faults = &mut self.state().nodes[node].faults;
        faults.entry(request).or_default().extend(std::iter::repeat_n(errno, times));
    }

    /// The device of `node` goes away, and its connections with it.
    pub(crate) fn remove(&self, node: usize) {
        for (a, b) in self.links().into_iter().filter(|(a, b)| [*a, *b].contains(&node)) {
            self.cut(a, b, true);
        }
        let mut state = self.state();
        state.nodes[node].gone = true;
        let State { mrs, users, .. } = &mut *state;
        mrs.retain(|_, mr| users[mr.user].node != node);
    }

    /// The next `count` events of each process of `node` find the ring full.
    pub(crate) fn overflow(&self, node: usize, count: u32) {
        for user in self.state().users.iter_mut().filter(|user| user.node == node) {
            user.overflow = count;
        }
    }

    /// The connection of `a` and `b` breaks: writes under way fail. The module reconnects it, or never
    /// does (`dead`).
    pub(crate) fn cut(&self, a: usize, b: usize, dead: bool) {
        let mut state = self.state();
        let Some(pair) = state.pairs.get_mut(&pair_of(a, b)) else { return };
        pair.state = match pair.state {
            _ if dead => Link::Dead,
            Link::New => Link::New,
            Link::Dead => Link::Dead,
            _ => Link::Broken,
        };
        let failed = std::mem::take(&mut pair.writes);
        failed.into_iter().for_each(|write| state.complete(write, 12));
    }

    pub(crate) fn heal(&self, a: usize, b: usize) {
        let mut state = self.state();
        if let Some(pair) = state.pairs.get_mut(&pair_of(a, b)) {
            if pair.state == Link::Broken {
                pair.state = Link::Up;
                pair.counts.iter_mut().for_each(|count| *count += 1);
            }
        }
    }

    /// All pairs of nodes that have a connection.
    pub(crate) fn links(&self) -> Vec<(usize, usize)> {
        let mut links: Vec<_> = self.state().pairs.keys().copied().collect();
        links.sort_unstable();
        links
    }

    /// The oldest write between `a` and `b` arrives; `untold`: its receiver's event is lost with the
    /// connection. False: no write is under way.
    pub(crate) fn deliver(&self, a: usize, b: usize, untold: bool) -> bool {
        let mut state = self.state();
        let Some(pair) = state.pairs.get_mut(&pair_of(a, b)) else { return false };
        let Some(write) = pair.writes.pop_front() else { return false };
        let PostWrite { addr, len, remote_addr, rkey, immediate, .. } = write.question;
        let target = state.mrs.get(&u64::from(rkey)).filter(|mr| {
            let within = mr.start <= remote_addr && remote_addr + len <= mr.end;
            within && mr.access & ACCESS_REMOTE_WRITE != 0 && state.users[mr.user].node == write.to
        });
        if target.is_none() {
            // A remote access error ends the queue pair, which all processes share.
            state.complete(write, 10);
            drop(state);
            self.cut(a, b, false);
            return true;
        }
        // SAFETY: the test keeps registered memory alive while it is registered, and both ends are in this process.
        unsafe { std::ptr::copy(addr as *const u8, remote_addr as *mut u8, len as usize) };
        let index = immediate >> (32 - super::INDEX_BITS);
        let (from, to) = (state.users[write.user].node, write.to);
        let there = |user: &User| user.open && user.node == to && user.index == index;
        let receiver = state.users.iter().position(|user| there(user) && user.attach.is_some());
        let (conn, len) = (conn_of(to, from), len as u32);
        if let Some(user) = receiver.filter(|_| !untold) {
            state.event(user, &Event::Filled { conn, immediate, len, status: 0 });
        }
        state.complete(write, 0);
        drop(state);
        if untold {
            self.cut(a, b, false);
        }
        true
    }
}

impl State {
    fn event(&mut self, user: usize, event: &Event) {
        let layout = self.nodes[self.users[user].node].layout;
        let User { ring, attach, overflow, .. } = &mut self.users[user];
        let (Some(memory), Some(attach)) = (ring, attach) else { return };
        if *overflow > 0 {
            *overflow -= 1;
            // SAFETY: within the header, whose counter only the module changes.
            unsafe { *memory.base().add(ring::OVERFLOWS_AT).cast::<u64>().as_mut() += 1 };
            return;
        }
        ring::writer::push(memory, attach.events, layout, event);
    }

    fn complete(&mut self, write: Pending, status: u8) {
        self.put(write.mr);
        let conn = conn_of(self.users[write.user].node, write.to);
        let wr_id = write.question.wr_id;
        if self.users[write.user].open {
            self.event(write.user, &Event::Written { wr_id, conn, status });
        }
    }

    /// Registrations in use.
    pub(crate) fn in_use(&self) -> usize {
        self.mrs.values().filter(|mr| mr.references > 0).count()
    }

    pub(crate) fn cached(&self) -> usize {
        self.mrs.len()
    }

    fn cached_by(&self, user: usize) -> usize {
        self.mrs.values().filter(|mr| mr.user == user).count()
    }

    /// Queue pairs of a node to others, as its module counts them.
    pub(crate) fn queue_pairs(&self, node: usize) -> usize {
        self.pairs.values().filter(|pair| pair.created.contains(&node)).count() * PAIRS
    }

    fn call(&mut self, user: usize, request: u32, bytes: &mut [u8]) -> Result<i32> {
        let node = self.users[user].node;
        let Node { gone, minor, capability, .. } = self.nodes[node];
        let faults = self.nodes[node].faults.get_mut(&((request & 0xff) as u8));
        if let Some(errno) = faults.and_then(VecDeque::pop_front) {
            return Err(Errno(errno));
        }
        let invalid = Err(Errno(libc::EINVAL));
        if gone {
            return Err(Errno(libc::ENXIO));
        }
        let attached = self.users[user].attach.is_some();
        self.clock += 1;
        match request {
            CAPABILITY | QUERY => {
                if request == CAPABILITY && minor <= 2 {
                    return invalid; // the handle is unknown
                }
                self.users[user].asked = true;
                let theirs = Capability { major: 1, minor, capability, ..Capability::default() };
                bytes.copy_from_slice(to_bytes(&theirs));
            }
            ATTACH | ATTACH_UP_TO_5 => {
                let attach: Attach = from_bytes(bytes);
                if request != attach_of(minor) || !self.users[user].asked {
                    return invalid;
                }
                return self.attach(user, &attach, bytes);
            }
            _ if !attached => return invalid,
            REG_MEM | REG_MEM_UP_TO_4 => {
                if request != reg_mem_of(minor) {
                    return invalid;
                }
                return self.register(user, from_bytes(bytes), bytes);
            }
            DEREG_MEM => {
                let DeregMem { handle, addr, len, access, .. } = from_bytes(bytes);
                let range = (addr, addr + len);
                let known = self.mrs.get(&!handle);
                let known = known.filter(|mr| mr.references > 0 && mr.holds((user, access), range));
                if known.is_none() {
                    return invalid;
                }
                self.put(!handle);
            }
            EVICT => return self.evict(user, bytes),
            CONN_CREATE | CONN_CONNECT | CONN_CONNECTED | CONN_COUNT | CONN_STATS => {
                return self.connection(user, request, bytes);
            }
            POST_WRITE => return self.post(user, bytes),
            CACHE_STATS => {
                let count = self.cached_by(user) as u32;
                let User { hits, misses, .. } = self.users[user];
                let known = CacheStatistics { count, hits, misses, ..CacheStatistics::default() };
                put(bytes, &known);
            }
            EVENT_STATS => put(bytes, &EventStatistics::default()),
            _ => return Err(Errno(libc::ENOTTY)),
        }
        Ok(0)
    }

    fn attach(&mut self, user: usize, attach: &Attach, bytes: &mut [u8]) -> Result<i32> {
        let User { node, attach: ref before, .. } = self.users[user];
        let Node { minor, capability, gid, .. } = self.nodes[node];
        let fits = match attach.mode {
            MODE_USER => capability & CAN_USER_MR != 0,
            MODE_KERNEL => attach.port != 0 && attach.events <= 10_000,
            _ => false,
        };
        if !fits {
            return Err(Errno(libc::EINVAL));
        }
        if before.is_some() {
            return Err(Errno(libc::EBUSY));
        }
        let index = match attach.mode {
            MODE_USER if !attach.device.starts_with(b"rxe0\0") => return Err(Errno(libc::ENODEV)),
            MODE_USER => u32::MAX,
            _ if attach.gid != gid => return Err(Errno(libc::ENOENT)),
            _ => {
                let taken: Vec<u32> = self
                    .users
                    .iter()
                    .filter(|user| user.open && user.node == node && user.attach.is_some())
                    .map(|user| user.index)
                    .collect();
                let index = (0..1 << attach.index_bits).find(|index| !taken.contains(index));
                index.ok_or(Errno(libc::ENOMEM))?
            }
        };
        self.users[user].index = index;
        self.users[user].attach = Some(*attach);
        let answer = Attached {
            index,
            cache_mib: if attach.cache_mib == 0 { 256 } else { attach.cache_mib },
            q_depth: if attach.mode == MODE_KERNEL { 4000 } else { 0 },
            reconnect_timeout_s: attach.reconnect_timeout_s,
            registration_max: if minor > 3 { 512 * PAGE } else { 0 },
        };
        put(bytes, &answer);
        Ok(0)
    }

    fn register(&mut self, user: usize, question: RegMem, bytes: &mut [u8]) -> Result<i32> {
        let RegMem { addr, len, access, pd, command_fd, .. } = question;
        let Node { registrations_max, domain, .. } = self.nodes[self.users[user].node];
        let attach = self.users[user].attach.unwrap();
        if access & ACCESS_KERNEL != 0 && attach.mode != MODE_KERNEL {
            return Err(Errno(libc::EINVAL));
        }
        let range = (addr / PAGE * PAGE, (addr + len).div_ceil(PAGE) * PAGE);
        self.clock += 1;
        let found = |mr: &Mr| mr.holds((user, access), range);
        let known = self.mrs.iter().find(|(_, mr)| found(mr) && !mr.freeing).map(|(key, _)| *key);
        let key = match known {
            Some(key) => {
                self.users[user].hits += 1;
                key
            }
            None => {
                let fails = match access & ACCESS_KERNEL {
                    0 if command_fd != domain.0 => Some(libc::EFAULT),
                    0 if pd != domain.1 => Some(libc::EINVAL),
                    _ if self.mrs.values().any(found) => Some(libc::EBUSY),
                    _ if self.cached_by(user) >= registrations_max => Some(libc::ENOMEM),
                    _ => None,
                };
                if let Some(errno) = fails {
                    return Err(Errno(errno));
                }
                self.insert(user, range, (access, u64::from(attach.cache_mib) << 20))?
            }
        };
        let used = self.clock;
        let mr = self.mrs.get_mut(&key).unwrap();
        mr.references += 1;
        mr.used = used;
        let key32 = key as u32;
        put(bytes, &Registered { handle: !key, iova: addr, lkey: key32, rkey: key32 });
        Ok(0)
    }

    /// A new registration, for which others end if all would be more than `limit` bytes; 0: no limit. Errors: EFAULT, ENOMEM.
    fn insert(
        &mut self,
        user: usize,
        (start, end): (u64, u64),
        (access, limit): (u32, u64),
    ) -> Result<u64> {
        let mut pages = vec![0; (end - start) as usize];
        let local = [Range { addr: pages.as_mut_ptr() as u64, len: end - start }];
        // SAFETY: the local range is a vector of this function.
        let read = unsafe {
            cma::read(
                crate::sys::process::pid(),
                &local,
                &[Range { addr: start, len: end - start }],
            )
        };
        if read != Ok(pages.len()) {
            return Err(Errno(libc::EFAULT));
        }
        let all = |mrs: &HashMap<u64, Mr>| {
            mrs.values().filter(|mr| mr.user == user).map(Mr::len).sum::<u64>()
        };
        while limit > 0 && all(&self.mrs) + (end - start) > limit {
            let idle = self.mrs.iter().filter(|(_, mr)| mr.user == user && mr.references == 0);
            let oldest = idle.min_by_key(|(_, mr)| mr.used).map(|(key, _)| *key);
            self.mrs.remove(&oldest.ok_or(Errno(libc::ENOMEM))?);
        }
        self.users[user].misses += 1;
        let (references, used, freeing) = (0, self.clock, false);
        let key = self.clock + 1000;
        self.mrs.insert(key, Mr { user, start, end, access, references, used, freeing, pages });
        Ok(key)
    }

    /// One use of a registration ends.
    fn put(&mut self, key: u64) {
        let Some(mr) = self.mrs.get_mut(&key) else { return };
        mr.references -= 1;
        if mr.references == 0 && mr.freeing {
            self.mrs.remove(&key);
        }
    }

    fn changes(&mut self, addr: u64, len: u64) {
        let Self { mrs, users, nodes, .. } = self;
        mrs.retain(|_, mr| {
            let hit = mr.start < addr + len && addr < mr.end;
            // Up to 1.5 what is in use stays.
            mr.freeing |= hit && mr.references > 0 && nodes[users[mr.user].node].minor >= 6;
            !hit || mr.references > 0
        });
    }

    fn evict(&mut self, user: usize, bytes: &mut [u8]) -> Result<i32> {
        let Evict { kind, addr_or_bytes, len_or_count, .. } = from_bytes(bytes);
        let mut free: Vec<(u64, u64)> = self
            .mrs
            .iter()
            .filter(|(_, mr)| mr.user == user && mr.references == 0)
            .filter(|(_, mr)| {
                kind == EVICT_AMOUNT
                    || mr.start < addr_or_bytes + len_or_count && mr.end > addr_or_bytes
            })
            .map(|(key, mr)| (mr.used, *key))
            .collect();
        free.sort_unstable();
        let mut answer = Evicted::default();
        for (_, key) in free {
            if kind == EVICT_AMOUNT && answer.bytes >= addr_or_bytes {
                break;
            }
            let Some(mr) = self.mrs.remove(&key) else { continue };
            answer.bytes += mr.end - mr.start;
            answer.count += 1;
        }
        self.evicted += answer.bytes;
        if kind == EVICT_AMOUNT && answer.count == 0 {
            return Err(Errno(libc::ENOENT));
        }
        put(bytes, &answer);
        Ok(0)
    }

    fn connection(&mut self, user: usize, request: u32, bytes: &mut [u8]) -> Result<i32> {
        let node = self.users[user].node;
        if request == CONN_CREATE {
            let ConnCreate { gid, own_gid_index, port, .. } = from_bytes(bytes);
            if gid == self.nodes[node].gid || own_gid_index != 1 || port != 1 {
                return Err(Errno(libc::EINVAL));
            }
            let to = self.nodes.iter().position(|node| node.gid == gid);
            let to = to.ok_or(Errno(libc::ENOMEM))?;
            if self.users[user].conns.values().any(|known| *known == to) {
                return Err(Errno(libc::EBUSY));
            }
            let handle = self.users[user].conns.len() as u64 + 1;
            self.users[user].conns.insert(handle, to);
            let pair = self.pairs.entry(pair_of(node, to)).or_default();
            pair.created.push(node);
            put(bytes, &ConnCreated { handle, conn: conn_of(node, to) });
            return Ok(0);
        }
        let handle = from_bytes::<ConnConnected>(bytes).handle;
        let to = self.users[user].conns.get(&handle).copied().ok_or(Errno(libc::EINVAL))?;
        let slow = self.slow;
        let pair = self.pairs.get_mut(&pair_of(node, to)).ok_or(Errno(libc::EINVAL))?;
        match request {
            CONN_CONNECT => {
                let connect: ConnConnect = from_bytes(bytes);
                let fits = (connect.own_gid, connect.remote_gid) == (gid(node), gid(to));
                if !fits || !(1..=5).contains(&connect.mtu) {
                    return Err(Errno(libc::EINVAL));
                }
                assert!(pair.created.contains(&to), "both create before either connects");
                pair.connecting.push(node);
                self.partitions.push(u16::from_be_bytes(connect.p_key));
            }
            CONN_CONNECTED => {
                let both = pair.connecting.contains(&node) && pair.connecting.contains(&to);
                return match pair.state {
                    Link::Dead => Err(Errno(libc::EIO)),
                    Link::New if slow > 0 => {
                        self.slow -= 1;
                        Ok(0)
                    }
                    Link::New if both => {
                        pair.state = Link::Up;
                        pair.counts = [1; PAIRS];
                        Ok(1)
                    }
                    Link::New => Ok(0),
                    Link::Up | Link::Broken => Ok(1), // it was connected once
                };
            }
            CONN_COUNT => {
                let ConnCount { index, .. } = from_bytes(bytes);
                if pair.state == Link::Dead {
                    return Err(Errno(libc::EIO));
                }
                let Some(count) = pair.counts.get(usize::from(index)) else {
                    self.strays += 1;
                    return Err(Errno(libc::EINVAL));
                };
                bytes[..4].copy_from_slice(&count.to_le_bytes());
            }
            _ => {
                let (index, queue_pairs) = (ALL, PAIRS as u32);
                let recoveries = pair.counts.iter().map(|count| count.saturating_sub(1)).sum();
                let answer =
                    ConnectionStatistics { index, queue_pairs, recoveries, ..Default::default() };
                put(bytes, &answer);
            }
        }
        Ok(0)
    }

    fn post(&mut self, user: usize, bytes: &mut [u8]) -> Result<i32> {
        let question: PostWrite = from_bytes(bytes);
        let node = self.users[user].node;
        let to = self.users[user].conns.get(&question.handle).copied();
        let to = to.ok_or(Errno(libc::EINVAL))?;
        let key = !question.mr_handle;
        let within = |mr: &&mut Mr| {
            mr.user == user
                && mr.start <= question.addr
                && question.addr + question.len <= mr.end
                && mr.access == question.mr_access
        };
        let mr = self.mrs.get_mut(&key).filter(within).ok_or(Errno(libc::EINVAL))?;
        let pair = self.pairs.get_mut(&pair_of(node, to)).ok_or(Errno(libc::EINVAL))?;
        match pair.state {
            Link::New => return Err(Errno(libc::EINVAL)),
            Link::Broken => return Err(Errno(libc::EAGAIN)),
            Link::Dead => return Err(Errno(libc::EIO)),
            Link::Up if pair.writes.len() >= 64 => return Err(Errno(libc::ENOMEM)),
            Link::Up => (),
        }
        mr.references += 1;
        let index = pair.next;
        pair.next = (pair.next + 1) % PAIRS;
        pair.writes.push_back(Pending { user, to, mr: key, question });
        self.posted += 1;
        let conn_count = pair.counts[index];
        put(bytes, &Posted { index: index as u8, conn_count, ..Posted::default() });
        Ok(0)
    }
}

fn put<T: Plain>(bytes: &mut [u8], answer: &T) {
    let answer = to_bytes(answer);
    bytes[..answer.len()].copy_from_slice(answer);
}

impl Kernel for Descriptor {
    fn ioctl(&self, request: u32, argument: &mut [u8]) -> Result<i32> {
        assert_eq!(argument.len(), argument_len(request), "the module reads so many bytes");
        self.fabric.state().call(self.user, request, argument)
    }

    fn map(&self, len: usize, _: bool) -> Result<Arc<Pages>> {
        let mut state = self.fabric.state();
        let User { node, ref attach, .. } = state.users[self.user];
        let faults = state.nodes[node].faults.get(&0);
        if let Some(errno) = faults.and_then(|faults| faults.front()) {
            return Err(Errno(*errno));
        }
        let events = attach.map_or(0, |attach| attach.events) as usize;
        if len < HEADER + events * state.nodes[node].layout.stride {
            return Err(Errno(libc::EINVAL));
        }
        let memory = Arc::new(Pages::anonymous(len)?);
        state.users[self.user].ring = Some(memory.clone());
        Ok(memory)
    }

    fn renew(&self, memory: &Pages) -> Result<()> {
        self.fabric.changes(memory.base().addr().get() as u64, memory.len() as u64);
        memory.renew()
    }
}

impl Drop for Descriptor {
    /// The last close: everything that belongs to the process ends.
    fn drop(&mut self) {
        let mut state = self.fabric.state();
        let user = self.user;
        state.users[user].open = false;
        state.users[user].ring = None;
        state.mrs.retain(|_, mr| mr.user != user);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Event, Failure, Remedy, There};
    use super::ring::PLAIN_64;
    use super::*;

    fn there(node: usize) -> There {
        There { gid: gid(node), lid: 0, mtu: 4096, pkey: 0xffff }
    }

    fn reason(result: std::result::Result<(Arc<Module>, Ring), Refusal>) -> String {
        result.map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn versions_that_are_understood_attach_in_their_words() {
        for (minor, most) in [
            (3, None),
            (4, Some(2 << 20)),
            (5, Some(2 << 20)),
            (6, Some(2 << 20)),
            (7, Some(2 << 20)),
        ] {
            let fabric = Fabric::new(1);
            fabric.set_abi(0, minor, CAN_EVICT);
            let (module, _ring) = fabric.attach(0);
            assert_eq!((module.minor(), module.registration_max()), (minor, most));
            let memory = vec![0u8; 10_000];
            let region = module.register(memory.as_ptr() as u64, 10_000, true).unwrap();
            assert_eq!(region.iova(), memory.as_ptr() as u64);
            assert_eq!(fabric.state().in_use(), 1);
            drop(region);
            let counts = |state: MutexGuard<'_, State>| (state.in_use(), state.cached());
            assert_eq!(counts(fabric.state()), (0, 1), "it is kept");
            assert!(module.evict(memory.as_ptr() as u64, 10_000).unwrap() >= 10_000);
            assert_eq!(fabric.state().cached(), 0);
        }
    }

    #[test]
    fn whatever_is_missing_has_a_name() {
        let fabric = Fabric::new(1);
        let refused = |fabric: &Fabric| {
            let found = fabric.open(0);
            reason(found.and_then(|found| found.attach(&fabric.here(0))))
        };
        fabric.set_abi(0, 2, 0);
        assert!(refused(&fabric).contains("1.2 is older"));
        fabric.set_abi(0, 6, CAN_USER_MR);
        assert!(refused(&fabric).contains("evict"));
        fabric.set_abi(0, 6, CAN_EVICT);
        for (request, errno, text) in [
            (0xf1, libc::ENODEV, "does not know the device"),
            (0xf1, libc::EBUSY, "other settings"),
            (0xf1, libc::ENOMEM, "as many processes"),
            (0xfc, libc::EPERM, "its ABI 1.6 is older"), // QUERY answers
        ] {
            fabric.fail(0, request, errno, 1);
            let why = refused(&fabric);
            assert!(why.contains(text), "{why}");
        }
        fabric.fail(0, 0, libc::EAGAIN, 1);
        assert!(refused(&fabric).contains("RLIMIT_MEMLOCK"));
        let fabric = Fabric::new(1);
        let wrong = Here { gid: [9; 16], ..fabric.here(0) };
        assert!(reason(fabric.open(0).unwrap().attach(&wrong)).contains("no such GID"));
        let long = Here { device: "x".repeat(64), ..fabric.here(0) };
        assert!(reason(fabric.open(0).unwrap().attach(&long)).contains("does not know"));
    }

    #[test]
    fn bytes_go_from_node_to_node_in_both_layouts() {
        for layout in [PACKED_65, PLAIN_64] {
            let fabric = Fabric::new(2);
            fabric.set_layout(1, layout);
            if layout != PACKED_65 {
                fabric.set_abi(1, MINOR + 1, CAN_EVICT);
            }
            let ((a, mut a_ring), (b, mut b_ring)) = (fabric.attach(0), fabric.attach(1));
            assert_eq!((a_ring.layout(), b_ring.layout()), (PACKED_65, layout));
            let (to_b, to_a) = (a.create(&there(1)).unwrap(), b.create(&there(0)).unwrap());
            assert_eq!(a.create(&there(1)).unwrap_err().remedy(), Remedy::Connection);
            assert!(a.create(&there(0)).unwrap_err().to_string().contains("this port itself"));
            a.connect(to_b.handle, &there(1)).unwrap();
            assert_eq!(a.is_connected(to_b.handle), Ok(false));
            b.connect(to_a.handle, &there(0)).unwrap();
            assert_eq!(
                (a.is_connected(to_b.handle), b.is_connected(to_a.handle)),
                (Ok(true), Ok(true))
            );
            let (from, to) = (vec![5u8; 9000], vec![0u8; 9000]);
            let source = a.register(from.as_ptr() as u64, 9000, false).unwrap();
            let target = b.register(to.as_ptr() as u64, 9000, true).unwrap();
            let immediate = b.index() << 23 | 77;
            let write = || {
                let range = (from.as_ptr() as u64, 9000);
                let at = (target.iova(), target.rkey());
                // SAFETY: both vectors outlive the write.
                unsafe { a.write(to_b.handle, &source, range, at, immediate, 42) }
            };
            assert_eq!(write().unwrap().conn_count, 1);
            assert!(fabric.deliver(0, 1, false));
            let filled = Event::Filled { conn: to_a.conn, immediate, len: 9000, status: 0 };
            assert_eq!(b_ring.pop(), Ok(Some(filled)));
            let written = Event::Written { wr_id: 42, conn: to_b.conn, status: 0 };
            assert_eq!((a_ring.pop(), a_ring.pop()), (Ok(Some(written)), Ok(None)));
            assert_eq!(from, to);
            // A connection that breaks, is reconnected, and dies.
            write().unwrap();
            fabric.cut(0, 1, false);
            assert_eq!(write().unwrap_err().remedy(), Remedy::Later);
            let failed = Event::Written { wr_id: 42, conn: to_b.conn, status: 12 };
            assert_eq!(a_ring.pop(), Ok(Some(failed)));
            fabric.heal(0, 1);
            assert_eq!((a.conn_count(to_b.handle, 3), write().unwrap().conn_count), (Ok(2), 2));
            assert_eq!(
                a.conn_count(to_b.handle, 4).map_err(|e: Failure| e.remedy()),
                Err(Remedy::Mistake)
            );
            fabric.cut(0, 1, true);
            assert_eq!(write().unwrap_err().remedy(), Remedy::Connection);
            fabric.remove(0);
            assert_eq!(write().unwrap_err().remedy(), Remedy::Module);
        }
    }
}
