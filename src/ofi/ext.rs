//! What udrv offers beyond libfabric's own interface, as C sees it: `include/rdma/fi_ext_udrv.h` is
//! made from this file (scripts/header), comments included. Values and members are never changed
//! or removed; later versions append.
#![allow(non_camel_case_types)] // C names
#![allow(unreachable_pub)] // cbindgen takes what is public

use super::endpoint::{Endpoint, EndpointFid};
use super::guard::{code, entry};
use super::info;
use super::own::own_behind_hooks;
use libfabric_sys::{FI_EINVAL, FI_ENOSYS, FI_EOPBADSTATE, fi_addr_t, fid, fid_ep};
use std::ffi::{CStr, c_char, c_int, c_void};

/// `fi_ep_attr.protocol` of udrv's endpoints, 0x75647276.
#[allow(dead_code)] // for the C header; Rust 1.85 does not count the next line as a use
pub const FI_PROTO_UDRV: u32 = 0x7564_7276;
const _: () = assert!(FI_PROTO_UDRV == info::PROTOCOL);

/// Name of the operations of [`fi_ops_udrv`] for `fi_open_ops`. cbindgen makes nothing of strings: C
/// has it from cbindgen.toml, and a test compares.
const FI_UDRV_OPS: &CStr = c"udrv_ops";

/// What happened to a failed operation: `prov_errno` of its `struct fi_cq_err_entry`.
/// `fi_cq_strerror` gives the sentence.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(dead_code)] // for C to compare with
pub enum fi_udrv_cause {
    /// The message is longer than the receive buffer: FI_ETRUNC.
    Truncated = 1,
    /// The operation was cancelled: FI_ECANCELED.
    Cancelled = 2,
    /// No matching message has arrived (FI_PEEK): FI_ENOMSG.
    NoMessage = 3,
    /// The peer's process ended: FI_EHOSTUNREACH.
    PeerDied = 4,
    /// The peer closed its endpoint: FI_ECONNRESET.
    PeerClosed = 5,
    /// The connection to the peer broke.
    LinkBroke = 6,
    /// The peer cannot be reached.
    PeerUnreachable = 7,
    /// The sender went away before the message was complete.
    SenderLost = 8,
    /// The sender's buffer cannot be read.
    SenderUnreadable = 9,
    /// The receiver could not take the message.
    ReceiverRefused = 10,
    /// The peer gave no sign of life for FI_UDRV_PEER_TIMEOUT seconds: FI_ETIMEDOUT.
    PeerSilent = 11,
    /// The target of a one-sided operation has no region with this key: FI_EKEYREJECTED.
    KeyRejected = 12,
    /// The target's region does not reach so far, or does not allow this: FI_EACCES.
    AccessDenied = 13,
    /// The target could not reach the initiator's buffer.
    TargetFailed = 14,
    /// The target is of a version that does not know this atomic operation: FI_EOPNOTSUPP.
    NoAtomics = 15,
    /// The buffer of the receive, or of the read, cannot be written: FI_EFAULT; FI_EIO if its device failed.
    BufferUnwritable = 16,
    /// A triggered operation or deferred work could not be started when its counter came so far.
    NotStarted = 20,
    /// A member of the collective group went away or failed.
    MemberGone = 21,
    /// The members of the group do not mean the same operation.
    MembersDisagree = 22,
}

/// What an endpoint has done since it was enabled.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct fi_udrv_counts {
    /// Messages sent eagerly.
    pub eager_sent: u64,
    /// Messages sent by rendezvous.
    pub rendezvous_sent: u64,
    /// Messages that arrived before their receive was posted.
    pub unexpected: u64,
    /// Bytes that this endpoint, as a receiver, read from its peers' buffers.
    pub pulled_bytes: u64,
    /// Bytes that this endpoint, as a sender, wrote into its peers' buffers.
    pub pushed_bytes: u64,
    /// Bytes of rendezvous messages that this endpoint sent as fragments.
    pub fragment_bytes: u64,
    /// Packets that nothing could be done with.
    pub dropped: u64,
    /// Packets with bytes of long messages that came unasked, and had no place left.
    pub surplus: u64,
    /// Bytes of rendezvous messages that this endpoint sent by stream.
    pub stream_bytes: u64,
    /// Messages whose stream or windows failed while this endpoint received them, and that went on as
    /// fragments.
    pub resumed: u64,
    /// Bytes of rendezvous messages that this endpoint wrote into windows of its peers (RDMA).
    pub window_bytes: u64,
    /// Windows that this endpoint had lent to peers when their connection ended.
    pub windows_lost: u64,
    /// Messages that this endpoint could not write into the windows it was lent.
    pub declined: u64,
    /// Bytes that this endpoint, as a sender, wrote of messages that it and their receiver copied
    /// together: the receiver does not count them.
    pub assisted_bytes: u64,
    /// Bytes that this endpoint read from and wrote to memory regions of processes of this node by
    /// itself: their owners do not count them.
    pub reached_bytes: u64,
    /// Bytes that this endpoint, as a receiver, read of messages while their senders wrote the others
    /// into its windows (RDMA).
    pub read_bytes: u64,
}

/// Operations on an endpoint, through
/// `fi_open_ops(&ep->fid, FI_UDRV_OPS, 0, (void **)&ops, NULL)`. Later versions append members: look
/// at `size` before calling one that this version does not have.
#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_udrv {
    /// Bytes of this structure.
    pub size: usize,
    /// Writes the counts of `ep` to `counts`, which has `size` bytes. A shorter structure gets the
    /// members that fit, the rest of a longer one is zeroed. Returns 0, -FI_EINVAL for null pointers
    /// or -FI_EOPBADSTATE before `fi_enable`.
    pub counts: Option<
        unsafe extern "C" fn(ep: *mut fid_ep, counts: *mut fi_udrv_counts, size: usize) -> c_int,
    >,
    /// Writes to `text`, which has `size` bytes, which protocol messages between `ep` and `peer` take
    /// at which size, as they are connected now: one line a range of sizes, of six fields that tabs
    /// separate: what carries them; the shortest, bytes; the longest, or nothing; the protocol; the
    /// variable that moves the longest (the shortest, if there is no longest), or nothing; and why. Ends
    /// in a zero byte, and is cut where there is no room. Returns the bytes that all of it has, without the zero; -FI_EINVAL for null pointers or
    /// an address that is not in the address vector; -FI_EOPBADSTATE before `fi_enable`; -FI_EAGAIN
    /// while it is being connected.
    pub thresholds: Option<
        unsafe extern "C" fn(
            ep: *mut fid_ep,
            peer: fi_addr_t,
            text: *mut c_char,
            size: usize,
        ) -> c_int,
    >,
}

static OPS: fi_ops_udrv = fi_ops_udrv {
    size: size_of::<fi_ops_udrv>(),
    counts: Some(counts),
    thresholds: Some(thresholds),
};

/// `fi_open_ops` of an endpoint. Errors: ENOSYS for a name that is not ours; EINVAL.
pub(super) unsafe extern "C" fn ops_open(
    _fid: *mut fid,
    name: *const c_char,
    flags: u64,
    ops: *mut *mut c_void,
    _context: *mut c_void,
) -> c_int {
    entry("fi_open_ops", || {
        if name.is_null() || ops.is_null() || flags != 0 {
            return -FI_EINVAL;
        }
        // SAFETY: a C string and room for a pointer, as libfabric calls fi_open_ops; nobody writes
        // through the table.
        unsafe {
            if CStr::from_ptr(name) != FI_UDRV_OPS {
                return -FI_ENOSYS;
            }
            *ops = (&raw const OPS).cast_mut().cast();
        }
        0
    })
}

unsafe extern "C" fn counts(ep: *mut fid_ep, counts: *mut fi_udrv_counts, size: usize) -> c_int {
    entry("fi_ops_udrv.counts", || {
        if ep.is_null() || counts.is_null() {
            return -FI_EINVAL;
        }
        // SAFETY: an open endpoint, or a hook's.
        let found = unsafe { own_behind_hooks::<EndpointFid>(ep.cast()) };
        code(found.and_then(|found| counts_of(&found.shared)).map(|ours| {
            let common = size.min(size_of::<fi_udrv_counts>());
            let to = counts.cast::<u8>();
            // SAFETY: the application's structure has `size` bytes and `common` is at most that.
            unsafe {
                to.copy_from_nonoverlapping((&raw const ours).cast(), common);
                to.add(common).write_bytes(0, size - common);
            }
        }))
    })
}

/// Errors: EOPBADSTATE before `fi_enable`.
pub(super) fn counts_of(ep: &Endpoint) -> Result<fi_udrv_counts, i32> {
    let guard = ep.domain.lock.control();
    let counts = ep.engine(&guard).ok_or(FI_EOPBADSTATE)?.counts();
    Ok(fi_udrv_counts {
        eager_sent: counts.eager_sent,
        rendezvous_sent: counts.rendezvous_sent,
        unexpected: counts.unexpected,
        pulled_bytes: counts.pulled_bytes,
        pushed_bytes: counts.pushed_bytes,
        fragment_bytes: counts.fragment_bytes,
        dropped: counts.dropped,
        surplus: counts.surplus,
        stream_bytes: counts.stream_bytes,
        resumed: counts.resumed,
        window_bytes: counts.window_bytes,
        windows_lost: counts.windows_lost,
        declined: counts.declined,
        assisted_bytes: counts.assisted_bytes,
        reached_bytes: counts.reached_bytes,
        read_bytes: counts.read_bytes,
    })
}

unsafe extern "C" fn thresholds(
    ep: *mut fid_ep,
    peer: fi_addr_t,
    text: *mut c_char,
    size: usize,
) -> c_int {
    entry("fi_ops_udrv.thresholds", || {
        if ep.is_null() || text.is_null() {
            return -FI_EINVAL;
        }
        // SAFETY: an open endpoint, or a hook's.
        let lines = match unsafe { thresholds_of(ep, peer) } {
            Ok(lines) => lines,
            Err(errno) => return -errno,
        };
        let room = lines.len().min(size.saturating_sub(1));
        if size > 0 {
            let to = text.cast::<u8>();
            // SAFETY: the application's text has `size` bytes, of which these are at most all.
            unsafe {
                to.copy_from_nonoverlapping(lines.as_ptr(), room);
                to.add(room).write(0);
            }
        }
        c_int::try_from(lines.len()).unwrap_or(c_int::MAX)
    })
}

/// # Safety
/// `ep` is an open endpoint, or a hook's.
unsafe fn thresholds_of(ep: *mut fid_ep, peer: fi_addr_t) -> Result<String, i32> {
    // SAFETY: the caller vouches.
    let ep = unsafe { &own_behind_hooks::<EndpointFid>(ep.cast())?.shared };
    ep.thresholds(peer, &ep.domain.lock.control())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Cause, Engine};
    use crate::transport::router::Router;
    use std::ptr::{null, null_mut};

    #[test]
    fn the_header_names_our_operations() {
        let define = format!("#define FI_UDRV_OPS {:?}\n", FI_UDRV_OPS.to_str().unwrap());
        assert!(include_str!("../../include/rdma/fi_ext_udrv.h").contains(&define));
    }

    #[test]
    fn causes_are_those_of_the_protocol() {
        use fi_udrv_cause as c;
        let pairs = [
            (c::Truncated, Cause::Truncated),
            (c::Cancelled, Cause::Cancelled),
            (c::NoMessage, Cause::NoMessage),
            (c::PeerDied, Cause::PeerDied),
            (c::PeerClosed, Cause::PeerClosed),
            (c::LinkBroke, Cause::LinkBroke),
            (c::PeerUnreachable, Cause::PeerUnreachable),
            (c::SenderLost, Cause::SenderLost),
            (c::SenderUnreadable, Cause::SenderUnreadable),
            (c::ReceiverRefused, Cause::ReceiverRefused),
            (c::PeerSilent, Cause::PeerSilent),
            (c::KeyRejected, Cause::KeyRejected),
            (c::AccessDenied, Cause::AccessDenied),
            (c::TargetFailed, Cause::TargetFailed),
            (c::NoAtomics, Cause::NoAtomics),
            (c::BufferUnwritable, Cause::BufferUnwritable),
            (c::NotStarted, Cause::NotStarted),
            (c::MemberGone, Cause::MemberGone),
            (c::MembersDisagree, Cause::MembersDisagree),
        ];
        for (ours, theirs) in pairs {
            assert_eq!(ours as i32, theirs as i32, "{ours:?}");
        }
        let all = (0..1000).filter_map(Cause::from_number).count();
        assert_eq!(pairs.len(), all, "a cause lacks its name in C");
    }

    #[test]
    fn every_count_of_the_engine_is_shown() {
        fn size_of_result<T>(_: fn(&Engine<Router>) -> T) -> usize {
            size_of::<T>()
        }
        assert_eq!(size_of_result(Engine::<Router>::counts), size_of::<fi_udrv_counts>());
    }

    #[test]
    fn only_our_name_opens() {
        let mut ops = null_mut();
        let mut open = |name: &CStr, flags| {
            // SAFETY: a C string and a live local; the object is not looked at.
            unsafe { ops_open(null_mut(), name.as_ptr(), flags, &mut ops, null_mut()) }
        };
        assert_eq!(open(c"udrv", 0), -FI_ENOSYS);
        assert_eq!(open(FI_UDRV_OPS, 1), -FI_EINVAL);
        assert_eq!(open(FI_UDRV_OPS, 0), 0);
        // SAFETY: what was just opened.
        let table = unsafe { &*ops.cast::<fi_ops_udrv>() };
        assert_eq!(table.size, size_of::<fi_ops_udrv>());
        // SAFETY: null pointers are refused.
        unsafe {
            assert_eq!(table.counts.unwrap()(null_mut(), null_mut(), 8), -FI_EINVAL);
            assert_eq!(table.thresholds.unwrap()(null_mut(), 0, null_mut(), 8), -FI_EINVAL);
            assert_eq!(ops_open(null_mut(), null(), 0, &mut ops, null_mut()), -FI_EINVAL);
        }
    }
}
