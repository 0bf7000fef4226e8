//! `struct fid_av`: the address vector. An `fi_addr_t` is an index, for FI_AV_MAP too.

use super::domain::Domain;
use super::eq::EventQueue;
use super::guard::entry;
use super::lock::Locked;
use super::table::{SLACK, Slack, Table, stubs};
use crate::sys::net;
use crate::transport::Address;
use crate::transport::address::{CanonicalAddress, LocalHost};
use libfabric_sys::{
    FI_ADDR_NOTAVAIL, FI_ADDR_STR, FI_AV_MAP, FI_AV_TABLE, FI_AV_UNSPEC, FI_CLASS_AV, FI_CLASS_EQ,
    FI_EADDRNOTAVAIL, FI_EBUSY, FI_EINVAL, FI_ENOEQ, FI_ENOSYS, FI_ETOOSMALL, FI_EVENT,
    FI_SOCKADDR_IN6, FI_SYNC_ERR, fi_addr_t, fi_av_attr, fi_ops, fi_ops_av, fi_ops_av_2_7, fid,
    fid_av,
};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

/// The addresses, under the domain's lock.
#[derive(Debug)]
pub(crate) struct AvState {
    host: LocalHost,
    entries: Vec<Option<Address>>,
    /// Indices that removals freed, used again first, so that vectors of churning peers stay small.
    free: Vec<u32>,
    /// One index of each address.
    by_address: HashMap<CanonicalAddress, u32>,
    /// Entries whose address has another index already.
    duplicates: usize,
    /// Changes with every insertion and removal.
    epoch: u64,
    /// Changes with every removal.
    removals: u64,
}

impl AvState {
    fn insert(&mut self, address: Address) -> fi_addr_t {
        let index = match self.free.pop() {
            Some(index) => index as usize,
            None => {
                self.entries.push(None);
                self.entries.len() - 1
            }
        };
        if let Some(slot) = self.entries.get_mut(index) {
            *slot = Some(address);
        }
        let canonical = self.host.canonical(&address);
        let first = *self.by_address.entry(canonical).or_insert(index as u32);
        self.duplicates += usize::from(first as usize != index);
        self.epoch += 1;
        index as fi_addr_t
    }

    fn remove(&mut self, fi_addr: fi_addr_t) -> Result<(), i32> {
        let index = usize::try_from(fi_addr).map_err(|_| FI_EINVAL)?;
        let slot = self.entries.get_mut(index).ok_or(FI_EINVAL)?;
        let address = slot.take().ok_or(FI_EINVAL)?;
        let canonical = self.host.canonical(&address);
        self.free.push(index as u32);
        if self.by_address.get(&canonical) != Some(&(index as u32)) {
            self.duplicates -= 1;
        } else {
            self.by_address.remove(&canonical);
            // Only duplicates make it worth looking for another index of the address.
            let other = (self.duplicates > 0).then(|| {
                self.entries.iter().position(|entry| {
                    entry.is_some_and(|entry| self.host.canonical(&entry) == canonical)
                })
            });
            if let Some(other) = other.flatten() {
                self.by_address.insert(canonical, other as u32);
                self.duplicates -= 1;
            }
        }
        self.epoch += 1;
        self.removals += 1;
        Ok(())
    }

    /// The address of `fi_addr`.
    #[inline]
    pub(crate) fn address(&self, fi_addr: fi_addr_t) -> Option<Address> {
        *self.entries.get(usize::try_from(fi_addr).ok()?)?
    }

    /// The first `fi_addr` of an address, or FI_ADDR_NOTAVAIL.
    pub(crate) fn fi_addr(&self, address: &Address) -> fi_addr_t {
        self.by_address
            .get(&self.host.canonical(address))
            .map_or(FI_ADDR_NOTAVAIL, |index| fi_addr_t::from(*index))
    }

    /// The `fi_addr` that stands for the same peer in completions and in matching.
    pub(crate) fn representative(&self, fi_addr: fi_addr_t) -> Option<fi_addr_t> {
        Some(self.fi_addr(&self.address(fi_addr)?))
    }

    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    #[inline]
    pub(crate) fn removals(&self) -> u64 {
        self.removals
    }
}

/// What endpoints share of an address vector.
#[derive(Debug)]
pub(crate) struct AddressVector {
    pub(crate) domain: Arc<Domain>,
    pub(crate) state: Locked<AvState>,
}

#[repr(C)]
struct AvFid {
    fid: fid_av,
    slack: Slack,
    shared: Arc<AddressVector>,
    /// FI_EVENT: insertions are reported there.
    asynchronous: bool,
    eq: Option<Arc<EventQueue>>,
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops {
    close: Some(close),
    bind: Some(bind),
    // SAFETY: fi_ops has six slots.
    ..unsafe { stubs::<fi_ops, 6>() }
});

// SAFETY: fi_ops_av_2_7 has eleven slots.
const STUBS: fi_ops_av_2_7 = unsafe { stubs::<fi_ops_av_2_7, 11>() };

static OPS: Table<fi_ops_av_2_7> = Table::new(fi_ops_av_2_7 {
    base: fi_ops_av {
        insert: Some(insert),
        insertsvc: Some(insert_service),
        insertsym: Some(insert_symmetric),
        remove: Some(remove),
        lookup: Some(lookup),
        straddr: Some(straddr),
        ..STUBS.base
    },
    ..STUBS
});

/// `fi_av_open`. Errors: EINVAL; ENOSYS for a named (shared) vector.
///
/// # Safety
/// As libfabric calls `fi_av_open`.
pub(crate) unsafe fn open(
    domain: &Arc<Domain>,
    attr: *mut fi_av_attr,
    out: *mut *mut fid_av,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: the application's attributes, valid during the call.
    let attr = unsafe { attr.as_mut() }.ok_or(FI_EINVAL)?;
    if out.is_null() {
        return Err(FI_EINVAL);
    }
    if !attr.name.is_null() {
        return Err(FI_ENOSYS);
    }
    match attr.type_ {
        FI_AV_UNSPEC => attr.type_ = FI_AV_TABLE,
        FI_AV_MAP | FI_AV_TABLE => {}
        _ => return Err(FI_EINVAL),
    }
    if attr.rx_ctx_bits > 0 {
        return Err(FI_EINVAL); // no named receive contexts
    }
    let av = Box::new(AvFid {
        fid: fid_av {
            fid: fid { fclass: FI_CLASS_AV, context, ops: FID_OPS.as_mut_ptr() },
            ops: OPS.as_mut_ptr().cast(),
        },
        slack: SLACK,
        shared: Arc::new(AddressVector {
            domain: domain.clone(),
            state: Locked::new(AvState {
                host: LocalHost::detect(),
                entries: Vec::with_capacity(attr.count.min(1 << 20)),
                free: Vec::new(),
                by_address: HashMap::new(),
                duplicates: 0,
                epoch: 1,
                removals: 0,
            }),
        }),
        asynchronous: attr.flags & FI_EVENT != 0,
        eq: None,
    });
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(av).cast() };
    Ok(())
}

/// The shared part of an address vector.
///
/// # Safety
/// `av` came from [`open`] and is not closed.
pub(crate) unsafe fn shared<'a>(av: *mut fid) -> &'a Arc<AddressVector> {
    // SAFETY: the caller vouches.
    unsafe { &(*av.cast::<AvFid>()).shared }
}

unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(av)", || {
        // SAFETY: an address vector of ours, open until now.
        unsafe {
            if Arc::strong_count(&(*fid.cast::<AvFid>()).shared) > 1 {
                return -FI_EBUSY;
            }
            drop(Box::from_raw(fid.cast::<AvFid>()));
        }
        0
    })
}

unsafe extern "C" fn bind(fid: *mut fid, other: *mut fid, _flags: u64) -> c_int {
    entry("fi_av_bind", || {
        // SAFETY: objects of the application.
        unsafe {
            let Some(object) = other.as_ref() else { return -FI_EINVAL };
            if object.fclass != FI_CLASS_EQ {
                return -FI_EINVAL;
            }
            (*fid.cast::<AvFid>()).eq = Some(super::eq::shared(other).clone());
        }
        0
    })
}

/// What became of one address of an insertion.
struct Insertion<'a> {
    av: &'a AvFid,
    fi_addr: *mut fi_addr_t,
    /// FI_SYNC_ERR: one error number per address.
    errors: *mut c_int,
    context: *mut c_void,
    inserted: usize,
    at: usize,
}

impl Insertion<'_> {
    /// Takes the next address, or its error.
    ///
    /// # Safety
    /// The arrays of the application have room for it.
    unsafe fn add(&mut self, address: Result<Address, i32>) {
        let result = address.map(|address| {
            let guard = self.av.shared.domain.lock.lock();
            // SAFETY: the guard is of the domain of this vector; one short step.
            unsafe { self.av.shared.state.get(&guard) }.insert(address)
        });
        self.inserted += usize::from(result.is_ok());
        // SAFETY: the caller vouches for the arrays.
        unsafe {
            if !self.fi_addr.is_null() {
                *self.fi_addr.add(self.at) = *result.as_ref().unwrap_or(&FI_ADDR_NOTAVAIL);
            }
            if !self.errors.is_null() {
                *self.errors.add(self.at) = result.err().unwrap_or(0);
            } else if let (Err(error), true, Some(eq)) = (result, self.av.asynchronous, &self.av.eq)
            {
                eq.push_error(self.fid(), self.context, self.at as u64, error);
            }
        }
        self.at += 1;
    }

    fn fid(&self) -> *mut fid {
        (&raw const self.av.fid.fid).cast_mut()
    }

    /// The result of the call: a count, or 0 with the count in an event.
    fn finish(self) -> c_int {
        match (&self.av.eq, self.av.asynchronous) {
            (Some(eq), true) => {
                let fid = self.fid();
                eq.push_av_complete(fid, self.context, self.inserted as u64);
                0
            }
            _ => c_int::try_from(self.inserted).unwrap_or(c_int::MAX),
        }
    }
}

fn begin(
    av: &AvFid,
    fi_addr: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> Result<Insertion<'_>, i32> {
    if av.asynchronous && av.eq.is_none() {
        return Err(FI_ENOEQ);
    }
    let synchronous_errors = flags & FI_SYNC_ERR != 0;
    if synchronous_errors && av.asynchronous {
        return Err(FI_EINVAL);
    }
    let errors = if synchronous_errors { context.cast() } else { std::ptr::null_mut() };
    Ok(Insertion { av, fi_addr, errors, context, inserted: 0, at: 0 })
}

/// Bytes of one address of `format`, as applications lay out arrays of them.
fn stride(format: u32) -> usize {
    match format {
        FI_SOCKADDR_IN6 => size_of::<libc::sockaddr_in6>(),
        FI_ADDR_STR => size_of::<*const c_char>(),
        _ => size_of::<libc::sockaddr_in>(),
    }
}

/// Reads one address in the domain's format.
///
/// # Safety
/// `at` points to one element of the application's array.
unsafe fn read_address(format: u32, at: *const u8) -> Option<Address> {
    if format == FI_ADDR_STR {
        // SAFETY: an array of C strings (fi_av.3).
        unsafe {
            let text = at.cast::<*const c_char>().read_unaligned();
            if text.is_null() {
                return None;
            }
            return Address::from_text(CStr::from_ptr(text).to_str().ok()?);
        }
    }
    // SAFETY: an array of socket addresses of the domain's format; the family is read first.
    unsafe {
        let family = i32::from(at.cast::<libc::sa_family_t>().read_unaligned());
        let len = match family {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 if stride(format) >= size_of::<libc::sockaddr_in6>() => {
                size_of::<libc::sockaddr_in6>()
            }
            _ => return None,
        };
        Address::from_bytes(std::slice::from_raw_parts(at, len))
    }
}

unsafe extern "C" fn insert(
    av: *mut fid_av,
    addr: *const c_void,
    count: usize,
    fi_addr: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    entry("fi_av_insert", || {
        // SAFETY: a vector of ours; `addr` and `fi_addr` are arrays of `count` elements.
        unsafe {
            let av = &*av.cast::<AvFid>();
            if addr.is_null() && count > 0 {
                return -FI_EINVAL;
            }
            let mut insertion = match begin(av, fi_addr, flags, context) {
                Ok(insertion) => insertion,
                Err(error) => return -error,
            };
            let format = av.shared.domain.addr_format;
            for i in 0..count {
                let at = addr.cast::<u8>().add(i * stride(format));
                let address =
                    read_address(format, at).filter(|address| address.port() != 0).ok_or(FI_EINVAL);
                insertion.add(address);
            }
            insertion.finish()
        }
    })
}

fn resolve_one(node: &str, service: &str) -> Result<Address, i32> {
    net::resolve(Some(node), Some(service), false)
        .ok()
        .and_then(|list| list.into_iter().next())
        .map(Address)
        .ok_or(FI_EADDRNOTAVAIL)
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller vouches.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

unsafe extern "C" fn insert_service(
    av: *mut fid_av,
    node: *const c_char,
    service: *const c_char,
    fi_addr: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    entry("fi_av_insertsvc", || {
        // SAFETY: a vector of ours; C strings; `fi_addr` has one element.
        unsafe {
            let av = &*av.cast::<AvFid>();
            let (Some(node), Some(service)) = (text(node), text(service)) else {
                return -FI_EINVAL;
            };
            let mut insertion = match begin(av, fi_addr, flags, context) {
                Ok(insertion) => insertion,
                Err(error) => return -error,
            };
            insertion.add(resolve_one(node, service));
            insertion.finish()
        }
    })
}

/// The `by`-th name after `first`: its trailing number counts up (`node07` → `node08`).
fn increment(first: &str, by: usize) -> Option<String> {
    let digits = first.bytes().rev().take_while(u8::is_ascii_digit).count();
    if by == 0 {
        return Some(first.to_owned());
    }
    let (stem, number) = first.split_at(first.len() - digits);
    let value = number.parse::<usize>().ok()?.checked_add(by)?;
    Some(format!("{stem}{value:0digits$}"))
}

unsafe extern "C" fn insert_symmetric(
    av: *mut fid_av,
    node: *const c_char,
    node_count: usize,
    service: *const c_char,
    service_count: usize,
    fi_addr: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    entry("fi_av_insertsym", || {
        // SAFETY: a vector of ours; C strings; `fi_addr` has node_count x service_count elements.
        unsafe {
            let av = &*av.cast::<AvFid>();
            let (Some(node), Some(service)) = (text(node), text(service)) else {
                return -FI_EINVAL;
            };
            let mut insertion = match begin(av, fi_addr, flags, context) {
                Ok(insertion) => insertion,
                Err(error) => return -error,
            };
            for n in 0..node_count {
                for s in 0..service_count {
                    let address = match (increment(node, n), increment(service, s)) {
                        (Some(node), Some(service)) => resolve_one(&node, &service),
                        _ => Err(FI_EINVAL),
                    };
                    insertion.add(address);
                }
            }
            insertion.finish()
        }
    })
}

unsafe extern "C" fn remove(
    av: *mut fid_av,
    fi_addr: *mut fi_addr_t,
    count: usize,
    _flags: u64,
) -> c_int {
    entry("fi_av_remove", || {
        // SAFETY: a vector of ours; `fi_addr` has `count` elements.
        unsafe {
            let av = &*av.cast::<AvFid>();
            if fi_addr.is_null() && count > 0 {
                return -FI_EINVAL;
            }
            let guard = av.shared.domain.lock.lock();
            for i in 0..count {
                if let Err(error) = av.shared.state.get(&guard).remove(*fi_addr.add(i)) {
                    return -error;
                }
            }
        }
        0
    })
}

/// Writes an address in `format` to a caller's buffer of `*len` bytes and sets `*len` to the bytes
/// it needs; cuts it (FI_ETOOSMALL) if there is less room.
///
/// # Safety
/// `len` is valid, and `buffer` has `*len` bytes or is null.
pub(crate) unsafe fn write_address(
    format: u32,
    address: &Address,
    buffer: *mut c_void,
    len: *mut usize,
) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let room = unsafe { len.as_mut() }.ok_or(FI_EINVAL)?;
    let text;
    let (bytes, socket_len) = net::socket_addr_to_bytes(&address.0);
    let bytes = if format == FI_ADDR_STR {
        text = format!("{address}\0");
        text.as_bytes()
    } else {
        bytes.get(..socket_len).unwrap_or(&[])
    };
    let have = if buffer.is_null() { 0 } else { *room };
    // SAFETY: at most `have` bytes, which the caller's buffer has.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len().min(have));
    }
    *room = bytes.len();
    if have < bytes.len() { Err(FI_ETOOSMALL) } else { Ok(()) }
}

unsafe extern "C" fn lookup(
    av: *mut fid_av,
    fi_addr: fi_addr_t,
    addr: *mut c_void,
    len: *mut usize,
) -> c_int {
    entry("fi_av_lookup", || {
        // SAFETY: a vector of ours.
        let av = unsafe { &*av.cast::<AvFid>() };
        let guard = av.shared.domain.lock.lock();
        // SAFETY: the guard is of the domain of this vector.
        let found = unsafe { av.shared.state.get(&guard) }.address(fi_addr);
        let Some(address) = found else { return -FI_EINVAL };
        let format = av.shared.domain.addr_format;
        // fi_av_lookup cuts silently and tells the size (fi_av.3).
        // SAFETY: the application's buffer and length.
        match unsafe { write_address(format, &address, addr, len) } {
            Ok(()) | Err(FI_ETOOSMALL) => 0,
            Err(error) => -error,
        }
    })
}

unsafe extern "C" fn straddr(
    av: *mut fid_av,
    addr: *const c_void,
    buffer: *mut c_char,
    len: *mut usize,
) -> *const c_char {
    entry("fi_av_straddr", || {
        // SAFETY: a vector of ours; `addr` is one address in its format; `buffer` has `*len` bytes.
        unsafe {
            let av = &*av.cast::<AvFid>();
            if addr.is_null() || len.is_null() {
                return std::ptr::null();
            }
            let format = av.shared.domain.addr_format;
            let address = if format == FI_ADDR_STR {
                CStr::from_ptr(addr.cast()).to_str().ok().and_then(Address::from_text)
            } else {
                read_address(format, addr.cast())
            };
            let Some(address) = address else { return std::ptr::null() };
            let text = format!("{address}\0");
            let room = *len;
            *len = text.len();
            if buffer.is_null() || room == 0 {
                return std::ptr::null();
            }
            let n = text.len().min(room);
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, n);
            *buffer.add(n - 1) = 0;
            buffer.cast_const()
        }
    })
}

/// Error of an operation whose vector has no such address.
pub(crate) const NO_SUCH_ADDRESS: i32 = FI_EINVAL;

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> AvState {
        AvState {
            host: LocalHost::detect(),
            entries: Vec::new(),
            free: Vec::new(),
            by_address: HashMap::new(),
            duplicates: 0,
            epoch: 1,
            removals: 0,
        }
    }

    fn address(text: &str) -> Address {
        Address::from_text(text).unwrap()
    }

    #[test]
    fn indices_count_up_and_are_used_again() {
        let mut av = state();
        assert_eq!(av.insert(address("127.0.0.1:1")), 0);
        assert_eq!(av.insert(address("127.0.0.1:2")), 1);
        assert_eq!(av.remove(0), Ok(()));
        assert_eq!(av.remove(0), Err(FI_EINVAL));
        assert_eq!(av.remove(77), Err(FI_EINVAL));
        assert_eq!(av.insert(address("127.0.0.1:3")), 0);
        assert_eq!(av.address(0), Some(address("127.0.0.1:3")));
    }

    #[test]
    fn an_address_inserted_twice_has_one_representative() {
        let mut av = state();
        let a = address("127.0.0.1:1");
        assert_eq!((av.insert(a), av.insert(a)), (0, 1));
        assert_eq!(av.representative(1), Some(0));
        av.remove(0).unwrap();
        assert_eq!(av.fi_addr(&a), 1);
        assert_eq!(av.duplicates, 0);
        av.remove(1).unwrap();
        assert_eq!(av.fi_addr(&a), FI_ADDR_NOTAVAIL);
    }

    #[test]
    fn names_count_up() {
        assert_eq!(increment("node09", 1).as_deref(), Some("node10"));
        assert_eq!(increment("10.0.0.1", 2).as_deref(), Some("10.0.0.3"));
        assert_eq!(increment("7471", 0).as_deref(), Some("7471"));
        assert_eq!(increment("node", 1), None);
    }
}
