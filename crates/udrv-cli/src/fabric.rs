//! An endpoint of udrv for tagged messages, through a libfabric that was loaded at run time.
#![allow(unsafe_code)] // foreign functions

use crate::libfabric::{FabricFn, Infos, Libfabric};
use crate::watch::Watch;
use libfabric_sys::{
    FI_ADDR_UNSPEC, FI_AV_TABLE, FI_CQ_FORMAT_CONTEXT, FI_EAGAIN, FI_ENABLE, FI_ENOSYS, FI_RECV,
    FI_TRANSMIT, fi_addr_t, fi_av_attr, fi_context2, fi_cq_attr, fi_cq_entry, fid, fid_av, fid_cq,
    fid_domain, fid_ep, fid_fabric,
};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

/// Calls a function of an operations table; -FI_ENOSYS for a table without it.
macro_rules! op {
    ($object:expr, $table:ident, $name:ident ( $($argument:expr),* )) => {
        (*(*$object).$table).$name.map_or(-FI_ENOSYS as _, |call| call($($argument),*))
    };
}

/// Longest name of an endpoint, bytes.
const NAME_MAX: usize = 128;
/// Longest text of thresholds, bytes.
const TEXT_MAX: usize = 16 * 1024;
/// Longest message, bytes.
pub(crate) const LONGEST: usize = 4 << 20;
/// Most operations at a time.
pub(crate) const DEPTH: usize = 64;

/// The beginning of `struct fi_ops_udrv` (rdma/fi_ext_udrv.h).
#[repr(C)]
struct UdrvOps {
    size: usize,
    counts: Option<unsafe extern "C" fn(*mut fid_ep, *mut c_void, usize) -> c_int>,
    thresholds: Option<unsafe extern "C" fn(*mut fid_ep, fi_addr_t, *mut c_char, usize) -> c_int>,
}

/// A peer's place in the address vector.
#[derive(Clone, Copy)]
pub(crate) struct Peer(fi_addr_t);

/// Objects are closed in the order of the fields.
pub(crate) struct Endpoint {
    ep: Object<fid_ep>,
    av: Object<fid_av>,
    cq: Object<fid_cq>,
    _domain: Object<fid_domain>,
    _fabric: Object<fid_fabric>,
    _infos: Infos,
    contexts: Box<[fi_context2; DEPTH]>,
    buffer: Vec<u8>,
    next: usize,
    pending: usize,
    watch: Option<Watch>,
    libfabric: Libfabric,
}

/// An object that begins with a `struct fid`, closed on drop.
struct Object<T>(*mut T);

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        let object: *mut fid = self.0.cast();
        // SAFETY: an open object, which is not used again.
        let _: c_int = unsafe { op!(object, ops, close(object)) };
    }
}

impl Endpoint {
    /// Opens and enables one of `provider`'s.
    pub(crate) fn open(libfabric: Libfabric, provider: &str) -> Result<Self, String> {
        let infos = libfabric.ask(provider)?;
        let info = infos.first;
        let lib = &libfabric;
        // SAFETY: as fabric.h, fi_domain.h and fi_endpoint.h show these calls; all arguments live until their return.
        unsafe {
            let open_fabric = lib.symbol::<FabricFn>("fi_fabric")?;
            let mut fabric = null_mut();
            lib.check("fi_fabric", open_fabric((*info).fabric_attr, &mut fabric, null_mut()))?;
            let fabric = Object(fabric);
            let mut domain = null_mut();
            let rc = op!(fabric.0, ops, domain(fabric.0, info, &mut domain, null_mut()));
            lib.check("fi_domain", rc)?;
            let domain = Object(domain);
            let mut attr: fi_cq_attr = std::mem::zeroed();
            (attr.size, attr.format) = (4 * DEPTH, FI_CQ_FORMAT_CONTEXT);
            let mut cq = null_mut();
            let rc = op!(domain.0, ops, cq_open(domain.0, &mut attr, &mut cq, null_mut()));
            lib.check("fi_cq_open", rc)?;
            let cq = Object(cq);
            let mut attr: fi_av_attr = std::mem::zeroed();
            attr.type_ = FI_AV_TABLE;
            let mut av = null_mut();
            let rc = op!(domain.0, ops, av_open(domain.0, &mut attr, &mut av, null_mut()));
            lib.check("fi_av_open", rc)?;
            let av = Object(av);
            let mut ep = null_mut();
            let rc = op!(domain.0, ops, endpoint(domain.0, info, &mut ep, null_mut()));
            lib.check("fi_endpoint", rc)?;
            let ep = Object(ep);
            let me: *mut fid = ep.0.cast();
            lib.check("fi_ep_bind", op!(me, ops, bind(me, av.0.cast(), 0)))?;
            let both = FI_TRANSMIT | FI_RECV;
            lib.check("fi_ep_bind", op!(me, ops, bind(me, cq.0.cast(), both)))?;
            lib.check("fi_enable", op!(me, ops, control(me, FI_ENABLE as c_int, null_mut())))?;
            let contexts = Box::new(std::mem::zeroed());
            Ok(Self {
                ep,
                av,
                cq,
                _domain: domain,
                _fabric: fabric,
                _infos: infos,
                contexts,
                buffer: vec![1; LONGEST],
                next: 0,
                pending: 0,
                watch: None,
                libfabric,
            })
        }
    }

    /// From now on its calls wait as long as the other process lives, as `watch` tells.
    pub(crate) fn watch(&mut self, watch: Watch) {
        self.watch = Some(watch);
    }

    /// Its name, for peers.
    pub(crate) fn name(&self) -> Result<Vec<u8>, String> {
        let mut name = vec![0; NAME_MAX];
        let mut len = NAME_MAX;
        // SAFETY: room for so many bytes.
        let rc = unsafe {
            op!(self.ep.0, cm, getname(self.ep.0.cast(), name.as_mut_ptr().cast(), &mut len))
        };
        self.libfabric.check("fi_getname", rc)?;
        name.truncate(len);
        Ok(name)
    }

    /// The peer with this name, of the same kind of address as the own one.
    pub(crate) fn insert(&self, name: &[u8]) -> Result<Peer, String> {
        let mut peer = 0;
        let len = self.name()?.len();
        if name.len() != len {
            return Err(format!("a name of {} bytes, not {len}", name.len()));
        }
        let av = self.av.0;
        // SAFETY: as many bytes as a name has, and room for one address.
        let n =
            unsafe { op!(av, ops, insert(av, name.as_ptr().cast(), 1, &mut peer, 0, null_mut())) };
        if n == 1 { Ok(Peer(peer)) } else { Err("fi_av_insert: not an address".to_owned()) }
    }

    /// Lines of fi_ops_udrv.thresholds for messages to `peer`.
    pub(crate) fn thresholds(&mut self, peer: Peer) -> Result<String, String> {
        let me: *mut fid = self.ep.0.cast();
        let mut ops: *mut c_void = null_mut();
        // SAFETY: a C string, and room for the answer.
        let rc =
            unsafe { op!(me, ops, ops_open(me, c"udrv_ops".as_ptr(), 0, &mut ops, null_mut())) };
        self.libfabric.check("fi_open_ops", rc)?;
        // SAFETY: the table of that name, which begins with these members (rdma/fi_ext_udrv.h).
        let ask = unsafe { (*ops.cast::<UdrvOps>()).thresholds }.ok_or("no thresholds")?;
        let mut text = vec![0u8; TEXT_MAX];
        loop {
            // SAFETY: room for so many bytes.
            let len = unsafe { ask(self.ep.0, peer.0, text.as_mut_ptr().cast(), TEXT_MAX) };
            if len == -FI_EAGAIN {
                self.progress()?;
                continue;
            }
            let len = usize::try_from(len)
                .or_else(|_| self.libfabric.check("thresholds", len).map(|()| 0))?;
            text.truncate(len.min(TEXT_MAX - 1));
            return Ok(String::from_utf8_lossy(&text).into_owned());
        }
    }

    /// The memory that messages are sent from and received into.
    pub(crate) fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Sends the first `len` bytes of the buffer `count` times, and waits until all have been sent.
    pub(crate) fn send(&mut self, to: Peer, len: usize, count: usize) -> Result<(), String> {
        for _ in 0..count {
            let (ep, context) = (self.ep.0, self.context()?);
            let at = self.part(len)?;
            // SAFETY: so many bytes of the buffer, which lives as long as the endpoint.
            self.post("fi_tsend", || unsafe {
                op!(ep, tagged, send(ep, at.cast(), len, null_mut(), to.0, 0, context))
            })?;
        }
        self.finish()
    }

    /// Receives `count` messages of at most `len` bytes from anybody, each to the beginning of the buffer.
    pub(crate) fn receive(&mut self, len: usize, count: usize) -> Result<(), String> {
        for _ in 0..count {
            let (ep, context) = (self.ep.0, self.context()?);
            let at = self.part(len)?;
            // SAFETY: so many bytes of the buffer, which lives as long as the endpoint and is not looked at meanwhile.
            self.post("fi_trecv", || unsafe {
                op!(ep, tagged, recv(ep, at.cast(), len, null_mut(), FI_ADDR_UNSPEC, 0, 0, context))
            })?;
        }
        self.finish()
    }

    fn part(&mut self, len: usize) -> Result<*mut u8, String> {
        let part = self.buffer.get_mut(..len).ok_or_else(|| format!("{len} bytes are too many"))?;
        Ok(part.as_mut_ptr())
    }

    /// Waits for everything that was begun.
    fn finish(&mut self) -> Result<(), String> {
        while self.pending > 0 {
            self.progress()?;
        }
        Ok(())
    }

    fn context(&mut self) -> Result<*mut c_void, String> {
        while self.pending >= DEPTH {
            self.progress()?;
        }
        self.next = (self.next + 1) % DEPTH;
        self.contexts
            .get_mut(self.next)
            .map(|context| (&raw mut *context).cast())
            .ok_or_else(|| "no context".to_owned())
    }

    fn post(&mut self, what: &str, call: impl Fn() -> isize) -> Result<(), String> {
        loop {
            let rc = call();
            if rc == -(FI_EAGAIN as isize) {
                self.progress()?;
                continue;
            }
            self.libfabric.check(what, rc as i64)?;
            self.pending += 1;
            return Ok(());
        }
    }

    /// Takes completions that there are. Errors: also that the other process has ended.
    pub(crate) fn progress(&mut self) -> Result<(), String> {
        const MOST: usize = 16;
        // SAFETY: zeroes are a valid value of these structures.
        let mut entries: [fi_cq_entry; MOST] = unsafe { std::mem::zeroed() };
        let cq = self.cq.0;
        // SAFETY: room for so many entries of the queue's format.
        let n = unsafe { op!(cq, ops, read(cq, entries.as_mut_ptr().cast(), MOST)) };
        if let Ok(n) = usize::try_from(n) {
            self.pending = self.pending.saturating_sub(n);
            return Ok(());
        }
        if n == -(FI_EAGAIN as isize) {
            return self.watch.as_mut().map_or(Ok(()), Watch::idle);
        }
        self.libfabric.check("fi_cq_read", n as i64)
    }
}
