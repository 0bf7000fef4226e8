//! `struct fi_ops_collective` and collective groups (fi_collective.3).

use super::state::{Endpoint, EndpointFid, Membership, endpoint};
use super::transfer::{error_number, persist, result, trigger};
use crate::memory::SegmentList;
use crate::memory::atomic::{Datatype, Operation};
use crate::ofi::av::AddressVector;
use crate::ofi::av::set::{SET_ADDRESS, av_set};
use crate::ofi::eq::Join;
use crate::ofi::guard::{code, entries, entry, making_entry};
use crate::ofi::lock::Guard;
use crate::ofi::progress::{By, Progress};
use crate::ofi::table::{Operations, SLACK, Slack, Table};
use crate::ofi::trigger::{Account, Kind};
use crate::protocol::{Collective, CollectiveOp, Direction, Host, OpError};
use crate::sys::clock::Deadline;
use crate::telemetry::log;
use crate::transport::PeerId;
use libfabric_sys::{
    FI_ADDR_NOTAVAIL, FI_ALLGATHER, FI_ALLREDUCE, FI_ALLTOALL, FI_BARRIER, FI_BROADCAST,
    FI_CLASS_MC, FI_COLLECTIVE, FI_EINVAL, FI_EMSGSIZE, FI_ENOEQ, FI_ENOSYS, FI_EOPBADSTATE,
    FI_EOPNOTSUPP, FI_GATHER, FI_NOOP, FI_REDUCE, FI_REDUCE_SCATTER, FI_SCATTER, FI_TRIGGER,
    FI_VOID, fi_addr_t, fi_collective_addr, fi_collective_attr, fi_collective_op, fi_datatype,
    fi_op, fi_ops, fi_ops_collective, fid, fid_ep, fid_mc,
};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Address of a group: this bit, and the group's number at the endpoint.
const GROUP_ADDRESS: fi_addr_t = 1 << 62;
/// Most data of one member in an operation, bytes.
const BLOCK_MAX: usize = 1 << 24;
/// How long a join tries to reach members that have no room for its messages, milliseconds.
const CONTACT_MS: i32 = 1000;
/// Most members of a group.
const MEMBERS_MAX: usize = 4096;

#[repr(C)]
struct McFid {
    fid: fid_mc,
    slack: Slack,
    endpoint: Arc<Endpoint>,
    group: u64,
}

static FID_OPS: Table<fi_ops> = Table::new(fi_ops { close: Some(close), ..fi_ops::STUBS });

pub(super) static OPS: Table<fi_ops_collective> = Table::new(fi_ops_collective {
    barrier: Some(barrier),
    broadcast: Some(broadcast),
    alltoall: Some(alltoall),
    allreduce: Some(allreduce),
    allgather: Some(allgather),
    reduce_scatter: Some(reduce_scatter),
    reduce: Some(reduce),
    scatter: Some(scatter),
    gather: Some(gather),
    barrier2: Some(barrier2),
    ..fi_ops_collective::STUBS
});

/// Bytes of an element, by libfabric's number of its type. The types of at most 16 bits that follow the types
/// of atomic operations are transported only, not computed with.
fn size_of(datatype: u32) -> Option<usize> {
    match datatype {
        16 | 17 => Some(2), // FI_FLOAT16, FI_BFLOAT16
        18 | 19 => Some(1), // FI_FLOAT8_E4M3, FI_FLOAT8_E5M2
        known => Datatype::from_number(known).map(Datatype::size),
    }
}

/// `fi_query_collective`. Errors: EINVAL; EOPNOTSUPP for a combination that is not supported.
///
/// # Safety
/// `attr` is null or valid.
pub(in crate::ofi) unsafe fn query(
    coll: fi_collective_op,
    attr: *mut fi_collective_attr,
) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let attr = unsafe { attr.as_mut() }.ok_or(FI_EINVAL)?;
    if attr.mode != 0 {
        return Err(FI_EINVAL);
    }
    let size = match coll {
        FI_BARRIER => None,
        FI_BROADCAST | FI_ALLTOALL | FI_ALLGATHER | FI_SCATTER | FI_GATHER => {
            Some(size_of(attr.datatype).ok_or(FI_EOPNOTSUPP)?)
        }
        FI_ALLREDUCE | FI_REDUCE_SCATTER | FI_REDUCE => {
            Operation::of_reduction(attr.op, attr.datatype).ok_or(FI_EOPNOTSUPP)?;
            Some(size_of(attr.datatype).ok_or(FI_EOPNOTSUPP)?)
        }
        _ => return Err(FI_EOPNOTSUPP),
    };
    attr.datatype_attr.size = size.unwrap_or(0);
    attr.datatype_attr.count = size.map_or(0, |size| BLOCK_MAX / size);
    attr.max_members = MEMBERS_MAX;
    Ok(())
}

/// `fi_join` of a collective group. Errors: EINVAL, also if the endpoint is no member; ENOEQ; EOPBADSTATE;
/// EOPNOTSUPP without FI_COLLECTIVE.
pub(super) unsafe extern "C" fn join(
    ep: *mut fid_ep,
    address: *const c_void,
    flags: u64,
    out: *mut *mut fid_mc,
    context: *mut c_void,
) -> c_int {
    making_entry("fi_join", || {
        if flags & FI_COLLECTIVE == 0 {
            return -FI_ENOSYS; // multicast
        }
        // SAFETY: as libfabric calls fi_join_collective.
        code(unsafe { join_set(&endpoint(ep).shared, address.cast(), out, context) })
    })
}

/// # Safety
/// As for [`join`].
unsafe fn join_set(
    ep: &Arc<Endpoint>,
    address: *const fi_collective_addr,
    out: *mut *mut fid_mc,
    context: *mut c_void,
) -> Result<(), i32> {
    // SAFETY: the caller vouches.
    let address = unsafe { address.as_ref() }.filter(|_| !out.is_null()).ok_or(FI_EINVAL)?;
    if ep.caps & FI_COLLECTIVE == 0 {
        return Err(FI_EOPNOTSUPP);
    }
    // SAFETY: the caller vouches for an open set.
    let set = unsafe { av_set(address.set) }?;
    // Any thread that reads the event queue progresses the join.
    ep.domain.lock.need();
    let eq = ep.bindings(&ep.domain.lock.control()).eq.clone().ok_or(FI_ENOEQ)?;
    eq.signalled_for(&ep.domain)?;
    let guard = ep.domain.lock.control();
    let bindings = ep.bindings(&guard);
    let av = bindings.av.as_ref().filter(|av| Arc::ptr_eq(av, &set.av)).ok_or(FI_EINVAL)?;
    let alone = address.coll_addr == FI_ADDR_NOTAVAIL;
    let within = |known: &Membership| GROUP_ADDRESS | known.group == address.coll_addr;
    if !alone && address.coll_addr != SET_ADDRESS && !ep.state(&guard).groups.iter().any(within) {
        return Err(FI_EINVAL);
    }
    let members = set.members(&guard).clone();
    if members.len() > MEMBERS_MAX {
        return Err(FI_EINVAL);
    }
    let Meeting { peers, me, name, order } = met(ep, av, &members, &guard)?;
    let engine = ep.engine(&guard).ok_or(FI_EOPBADSTATE)?;
    let mut mc = Box::new(McFid {
        fid: fid_mc {
            fid: fid { fclass: FI_CLASS_MC, context, ops: FID_OPS.as_mut_ptr() },
            fi_addr: FI_ADDR_NOTAVAIL,
        },
        slack: SLACK,
        endpoint: ep.clone(),
        group: 0,
    });
    let handle = (&raw const *mc).expose_provenance();
    let joining = Some((handle, context.expose_provenance()));
    let group = engine.name_of_next_group();
    ep.state(&guard).groups.push(Membership { group, members, joining });
    let mut host = ep.host(&guard);
    let joined = engine.join(&peers, me, name, order, alone, &mut host);
    if let Err(error) = joined {
        ep.state(&guard).groups.retain(|known| known.group != group);
        return Err(error_number(error));
    }
    mc.group = group;
    mc.fid.fi_addr = GROUP_ADDRESS | group;
    let joins: Arc<dyn Join> = ep.clone();
    eq.progress_of(&joins);
    // SAFETY: checked not to be null.
    unsafe { *out = Box::into_raw(mc).cast() };
    ep.progress(By::Application, &guard);
    Ok(())
}

/// The members of a group, as all of them agree on it.
struct Meeting {
    peers: Vec<PeerId>,
    /// The position of this endpoint among them.
    me: usize,
    /// Hash of the set of members, and of their order.
    name: u64,
    order: u64,
}

/// As [`meeting`], but makes progress and tries again for [`CONTACT_MS`] while there is no room to connect.
fn met(
    ep: &Endpoint,
    av: &AddressVector,
    members: &[fi_addr_t],
    guard: &Guard<'_>,
) -> Result<Meeting, i32> {
    let deadline = Deadline::after_ms(CONTACT_MS);
    loop {
        match meeting(ep, av, members, guard) {
            // Without room for completions nothing is taken in.
            Err(OpError::Again) if !deadline.expired() && ep.host(guard).takes_arrivals() => {
                ep.progress(By::Others, guard)
            }
            outcome => return outcome.map_err(error_number),
        };
    }
}

/// Errors: EINVAL for a member that is not in the vector or is in the set twice, or a group without this endpoint;
/// those of connecting.
fn meeting(
    ep: &Endpoint,
    av: &AddressVector,
    members: &[fi_addr_t],
    guard: &Guard<'_>,
) -> Result<Meeting, OpError> {
    let invalid = OpError::Error(FI_EINVAL);
    let mut names = Vec::with_capacity(members.len());
    let mut peers = Vec::with_capacity(members.len());
    av.follow(guard);
    for member in members {
        // SAFETY: the guard belongs to the domain of vector and endpoint; one short step.
        let name = unsafe { av.state.get(guard) }.address(*member).ok_or(invalid)?;
        names.push(name.to_wire());
        peers.push(ep.peer(*member, guard)?);
    }
    let order = hash(&names);
    names.sort_unstable();
    if names.windows(2).any(|two| two.first() == two.last()) {
        log::limited!(
            "an endpoint is in a set of addresses twice: it cannot join a group as two members"
        );
        return Err(invalid);
    }
    let name = hash(&names);
    let engine = ep.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
    let own = engine.iface().address();
    let own = engine.connect(&own)?;
    let me = peers.iter().position(|peer| *peer == own).ok_or(invalid)?;
    Ok(Meeting { peers, me, name, order })
}

/// FNV-1a: every member must compute the same hash.
fn hash<T: AsRef<[u8]>>(names: &[T]) -> u64 {
    let bytes = names.iter().flat_map(|name| name.as_ref());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

unsafe extern "C" fn close(fid: *mut fid) -> c_int {
    entry("fi_close(mc)", || {
        // SAFETY: a group of this provider, open until this call.
        if unsafe { &*fid.cast::<McFid>() }.endpoint.domain.lock.is_lost() {
            return 0;
        }
        // SAFETY: the box of that group; this call ends its use.
        let mc = unsafe { Box::from_raw(fid.cast::<McFid>()) };
        let ep = &*mc.endpoint;
        let guard = ep.domain.lock.control();
        ep.state(&guard).groups.retain(|known| known.group != mc.group);
        if !ep.domain.lock.is_here() {
            // A forked child: the parent is still a member.
            return 0;
        }
        let mut host = ep.host(&guard);
        if let Some(engine) = ep.engine(&guard) {
            engine.leave_group(mc.group, &mut host);
        }
        // The other members hear of it now: nobody may poll for long.
        ep.progress(By::Others, &guard);
        drop(guard);
        0
    })
}

/// The arguments of one operation, as the application passes them.
struct Call {
    coll: fi_collective_op,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    group: fi_addr_t,
    root: fi_addr_t,
    datatype: fi_datatype,
    op: fi_op,
    /// `None`: the endpoint's default flags.
    flags: Option<u64>,
    context: *mut c_void,
}

impl Call {
    /// The operation, its reduction if it has one, and the bytes of one member's data. `root` is the position of the
    /// root if that is a member. Errors: EINVAL, EOPNOTSUPP, EMSGSIZE.
    fn meaning(&self, root: Option<usize>) -> Result<(Collective, Option<Operation>, usize), i32> {
        let root = || root.ok_or(FI_EINVAL);
        let what = match self.coll {
            FI_BARRIER => return Ok((Collective::Barrier, None, 0)),
            FI_BROADCAST => Collective::Broadcast { root: root()? },
            FI_ALLTOALL => Collective::AllToAll,
            FI_ALLREDUCE => Collective::AllReduce,
            FI_ALLGATHER => Collective::AllGather,
            FI_REDUCE_SCATTER => Collective::ReduceScatter,
            FI_REDUCE => Collective::Reduce { root: root()? },
            FI_SCATTER => Collective::Scatter { root: root()? },
            _ => Collective::Gather { root: root()? },
        };
        let reduces = matches!(self.coll, FI_ALLREDUCE | FI_REDUCE_SCATTER | FI_REDUCE);
        let reduction = Operation::of_reduction(self.op, self.datatype).filter(|_| reduces);
        if reduces && reduction.is_none() {
            return Err(FI_EOPNOTSUPP);
        }
        let size = size_of(self.datatype).ok_or(FI_EOPNOTSUPP)?;
        let block = self.count.checked_mul(size).filter(|block| *block <= BLOCK_MAX);
        Ok((what, reduction, block.ok_or(FI_EMSGSIZE)?))
    }
}

/// # Safety
/// Buffers are as fi_collective.3 says.
unsafe fn try_start(handle: &EndpointFid, call: &Call) -> Result<(), i32> {
    let ep = &*handle.shared;
    if ep.caps & FI_COLLECTIVE == 0 {
        return Err(FI_EOPNOTSUPP);
    }
    let guard = ep.domain.lock.lock();
    let groups = &ep.state(&guard).groups;
    let known = groups.iter().find(|known| GROUP_ADDRESS | known.group == call.group);
    let known = known.ok_or(FI_EINVAL)?;
    let (group, root) = (known.group, known.members.iter().position(|m| *m == call.root));
    let (what, reduction, block) = call.meaning(root)?;
    let engine = ep.engine(&guard).ok_or(FI_EOPBADSTATE)?;
    let (takes, gives) = engine.collective_needs(group, what, block).ok_or(FI_EINVAL)?;
    if (call.input.is_null() && takes > 0) || (call.output.is_null() && gives > 0) {
        return Err(FI_EINVAL);
    }
    // SAFETY: the caller vouches for buffers of these lengths.
    let (input, output) = unsafe {
        (
            ep.located(SegmentList::contiguous(call.input.cast(), takes))?,
            ep.located(SegmentList::contiguous(call.output.cast::<u8>().cast_const(), gives))?,
        )
    };
    let op_flags = call.flags.unwrap_or_else(|| handle.tx_flags.load(Ordering::Relaxed));
    let report = handle.report(op_flags, false, &guard);
    let begin = move |ep: &Endpoint, guard: &Guard<'_>, account: Account| {
        let Account { context, report } = account;
        let op = CollectiveOp { group, what, block, reduction, input, output, context, report };
        let mut host = ep.host(guard);
        let engine = ep.engine(guard).ok_or(OpError::Error(FI_EOPBADSTATE))?;
        engine.collective(&op, &mut host)
    };
    if op_flags & FI_TRIGGER != 0 {
        let kind = Kind { direction: Direction::Collective, tagged: false, tag: 0, to: call.group };
        // SAFETY: under FI_TRIGGER the context is a `fi_triggered_context` (fi_trigger.3).
        return unsafe { trigger(ep, kind, call.context, report, begin, &guard) };
    }
    let account = Account { context: call.context.expose_provenance() as u64, report };
    persist(ep, &guard, |guard: &Guard<'_>| begin(ep, guard, account))?;
    // This turn of progress sends the first messages.
    ep.progress(By::Application, &guard);
    Ok(())
}

/// Starts a barrier.
///
/// # Safety
/// Arguments are as the man page of the call says.
unsafe fn meet(
    ep: *mut fid_ep,
    group: fi_addr_t,
    flags: Option<u64>,
    context: *mut c_void,
) -> isize {
    let what = (FI_BARRIER, FI_VOID, FI_NOOP);
    // SAFETY: the caller vouches.
    unsafe { begin(ep, what, (null_mut(), null_mut(), 0), (group, NO_ROOT), (flags, context)) }
}

/// # Safety
/// Arguments are as the man page of the call says.
unsafe fn begin(
    ep: *mut fid_ep,
    (coll, datatype, op): (fi_collective_op, fi_datatype, fi_op),
    (input, output, count): (*const c_void, *mut c_void, usize),
    (group, root): (fi_addr_t, fi_addr_t),
    (flags, context): (Option<u64>, *mut c_void),
) -> isize {
    let call = Call { coll, input, output, count, group, root, datatype, op, flags, context };
    // SAFETY: the caller vouches.
    result(unsafe { try_start(endpoint(ep), &call) })
}

const NO_ROOT: fi_addr_t = FI_ADDR_NOTAVAIL;

entries! { entry -> isize;
    barrier "fi_barrier" (ep: *mut fid_ep, group: fi_addr_t, context: *mut c_void) => meet(ep, group, None, context);
    barrier2 "fi_barrier2" (ep: *mut fid_ep, group: fi_addr_t, flags: u64, context: *mut c_void)
        => meet(ep, group, Some(flags), context);
    broadcast "fi_broadcast" (
        ep: *mut fid_ep, buffer: *mut c_void, count: usize, _desc: *mut c_void, group: fi_addr_t, root: fi_addr_t,
        datatype: fi_datatype, flags: u64, context: *mut c_void,
    ) => begin(
        ep, (FI_BROADCAST, datatype, FI_NOOP), (buffer, buffer, count), (group, root), (Some(flags), context),
    );
}

/// Defines the entries with a result buffer. Each has a root, an operation, both, or neither.
macro_rules! with_result {
    ($($name:ident $coll:ident $text:literal ($($root:ident)?) $of_root:expr, ($($op:ident)?) $of_op:expr;)*) => {$(
        entries! { entry -> isize;
            $name $text (
                ep: *mut fid_ep, input: *const c_void, count: usize, _desc: *mut c_void, output: *mut c_void,
                _result_desc: *mut c_void, group: fi_addr_t, $($root: fi_addr_t,)? datatype: fi_datatype,
                $($op: fi_op,)? flags: u64, context: *mut c_void,
            ) => begin(
                ep, ($coll, datatype, $of_op), (input, output, count), (group, $of_root), (Some(flags), context),
            );
        }
    )*};
}

with_result! {
    alltoall FI_ALLTOALL "fi_alltoall" () NO_ROOT, () FI_NOOP;
    allreduce FI_ALLREDUCE "fi_allreduce" () NO_ROOT, (op) op;
    allgather FI_ALLGATHER "fi_allgather" () NO_ROOT, () FI_NOOP;
    reduce_scatter FI_REDUCE_SCATTER "fi_reduce_scatter" () NO_ROOT, (op) op;
    reduce FI_REDUCE "fi_reduce" (root) root, (op) op;
    scatter FI_SCATTER "fi_scatter" (root) root, () FI_NOOP;
    gather FI_GATHER "fi_gather" (root) root, () FI_NOOP;
}
