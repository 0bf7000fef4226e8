//! Devices, their ports and addresses.

use super::{code, kept, null, post, queue, refused, settled, zeroed};
use crate::nic::{self, Nic, PortView};
use crate::personality::{Device, Fork, Node, Srq};
use rdma_core_sys::{
    _compat_ibv_port_attr, IBV_FORK_DISABLED, IBV_FORK_UNNEEDED, IBV_GID_TYPE_IB,
    IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND,
    IBV_NODE_CA, IBV_NODE_UNSPECIFIED, IBV_ODP_SUPPORT, IBV_ODP_SUPPORT_IMPLICIT,
    IBV_ODP_SUPPORT_READ, IBV_ODP_SUPPORT_SEND, IBV_ODP_SUPPORT_WRITE, IBV_PORT_ACTIVE,
    IBV_PORT_DOWN, IBV_TRANSPORT_IB, IBV_TRANSPORT_UNSPECIFIED, ibv_context, ibv_device,
    ibv_device_attr, ibv_device_attr_ex, ibv_fork_status, ibv_gid, ibv_gid_entry, ibv_port_attr,
    ibv_query_device_ex_input, verbs_context,
};
use std::ffi::{CString, c_char, c_int};
use std::mem::offset_of;

/// A device of a list.
#[repr(C)]
struct Listed {
    device: ibv_device,
    number: usize,
}

/// An open device. A program has a pointer to the `ibv_context` at the end of `verbs`.
#[repr(C)]
pub(super) struct Opened {
    verbs: verbs_context,
    id: u32,
}

/// Completion vectors of a device.
pub(super) const VECTORS: u32 = 4;
/// Marks a context inside a [`verbs_context`].
const EXTENDED: usize = usize::MAX;
/// `IBV_QPF_GRH_REQUIRED`, in a port's flags.
const GRH_REQUIRED: u8 = 1;
/// Bytes of `ibv_port_attr` before rdma-core 17, which `_compat_ibv_port_attr` stands for.
const COMPAT_PORT: usize = 48;

fn copy_text(to: &mut [c_char], text: &str) {
    for (to, byte) in to.iter_mut().zip(text.bytes()) {
        *to = byte as c_char;
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices = nic::with(|nic| nic.devices()).unwrap_or_default();
    let mut list: Vec<*mut ibv_device> = Vec::new();
    for (number, device, node) in &devices {
        // SAFETY: a C structure.
        let mut raw: ibv_device = unsafe { zeroed() };
        (raw.node_type, raw.transport_type) = match device.node {
            Node::Adapter => (IBV_NODE_CA, IBV_TRANSPORT_IB),
            Node::Unspecified => (IBV_NODE_UNSPECIFIED, IBV_TRANSPORT_UNSPECIFIED),
        };
        copy_text(&mut raw.name, device.name);
        copy_text(&mut raw.dev_name, &format!("uverbs{number}"));
        copy_text(&mut raw.dev_path, &node.to_string_lossy());
        list.push(kept(Listed { device: raw, number: *number }).cast());
    }
    list.push(std::ptr::null_mut());
    if !count.is_null() {
        // SAFETY: the program's number.
        unsafe { *count = devices.len() as c_int };
    }
    Box::leak(list.into_boxed_slice()).as_mut_ptr()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_free_device_list(_list: *mut *mut ibv_device) {}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a device of the list.
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: a device of the list, which is a `Listed`.
    let number = unsafe { (*device.cast::<Listed>()).number };
    let opened = nic::with(|nic| {
        let (id, fd) = nic.open_device(number)?;
        Ok((id, fd, nic.personality().driver.extended))
    });
    let (id, fd, extended) = match opened.unwrap_or(Err(libc::ENODEV)) {
        Ok(opened) => opened,
        Err(errno) => return null(errno),
    };
    // SAFETY: a C structure.
    let mut verbs: verbs_context = unsafe { zeroed() };
    verbs.sz = size_of::<verbs_context>();
    verbs.query_port = Some(query_port);
    verbs.query_device_ex = Some(query_device_ex);
    if extended {
        verbs.create_qp_ex = Some(super::extended::create_qp_ex);
        verbs.create_cq_ex = Some(super::extended::create_cq_ex);
    }
    verbs.context.device = device;
    verbs.context.cmd_fd = -1;
    verbs.context.async_fd = fd;
    verbs.context.num_comp_vectors = VECTORS as c_int;
    verbs.context.abi_compat = std::ptr::without_provenance_mut(EXTENDED);
    let ops = &mut verbs.context.ops;
    ops.poll_cq = Some(queue::poll);
    ops.req_notify_cq = Some(queue::arm);
    ops.post_send = Some(post::send);
    ops.post_recv = Some(post::receive);
    ops.post_srq_recv = Some(post::shared);
    let opened = kept(Opened { verbs, id });
    // SAFETY: the structure made above.
    unsafe { &raw mut (*opened).verbs.context }
}

/// The number of a context.
///
/// # Safety
/// The context is of [`ibv_open_device`].
pub(super) unsafe fn id_of(context: *mut ibv_context) -> u32 {
    // SAFETY: the context is inside an `Opened`.
    unsafe {
        let verbs = context.byte_sub(offset_of!(verbs_context, context));
        (*verbs.cast::<Opened>()).id
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: an open device.
    let id = unsafe { id_of(context) };
    settled("asynchronous events", Nic::events_taken);
    nic::with(|nic| nic.close_device(id)).map_or(-1, |()| 0)
}

fn describe(nic: &Nic, device: &Device, attr: &mut ibv_device_attr) {
    let driver = &nic.personality().driver;
    let srq = driver.srq != Srq::Absent;
    let if_srq = |n: u32| if srq { n as c_int } else { 0 };
    copy_text(&mut attr.fw_ver, "0.0.fake");
    attr.vendor_id = device.vendor;
    attr.vendor_part_id = device.part;
    attr.max_mr_size = u64::MAX;
    attr.page_size_cap = 4096;
    attr.max_qp = 4095;
    attr.max_qp_wr = driver.max_wr as c_int;
    attr.max_sge = driver.max_sge as c_int;
    attr.max_sge_rd = driver.max_sge as c_int;
    attr.max_cq = 4095;
    attr.max_cqe = driver.max_cqe as c_int;
    attr.max_mr = 1 << 20;
    attr.max_pd = 4095;
    attr.max_qp_rd_atom = driver.reads.into();
    attr.max_qp_init_rd_atom = driver.reads.into();
    attr.max_ah = 1 << 20;
    attr.max_srq = if_srq(4095);
    attr.max_srq_wr = if_srq(driver.max_wr);
    attr.max_srq_sge = if_srq(driver.max_sge);
    attr.max_pkeys = 128;
    attr.phys_port_cnt = device.ports.len() as u8;
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: an open device, and the program's structure.
    let (id, attr) = unsafe {
        *attr = zeroed();
        (id_of(context), &mut *attr)
    };
    let known = nic::with(|nic| {
        let device = nic.device(id).ok_or(libc::EIO)?;
        describe(nic, device, attr);
        Ok(())
    });
    code(known)
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: a C structure.
    let mut all: ibv_device_attr_ex = unsafe { zeroed() };
    // SAFETY: an open device, and a local.
    let rc = unsafe { ibv_query_device(context, &mut all.orig_attr) };
    if nic::with(|nic| nic.personality().driver.on_demand) == Some(true) {
        all.odp_caps.general_caps = u64::from(IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT);
        all.odp_caps.per_transport_caps.rc_odp_caps =
            IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ;
    }
    let size = size.min(size_of::<ibv_device_attr_ex>());
    // SAFETY: the program says how long its structure is.
    unsafe { std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), attr.cast(), size) };
    rc
}

/// A port's state; `None`: there is no such port.
fn port_attr(context: u32, number: u8) -> Option<ibv_port_attr> {
    let view = nic::with(|nic| nic.port(context, number)).flatten()?;
    // SAFETY: a C structure.
    let mut attr: ibv_port_attr = unsafe { zeroed() };
    attr.state = if view.active { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
    attr.max_mtu = 5;
    attr.active_mtu = u32::from(view.port.mtu).trailing_zeros().saturating_sub(7);
    attr.gid_tbl_len = view.gid_count() as c_int;
    attr.pkey_tbl_len = view.port.pkeys.len() as u16;
    attr.max_msg_sz = 1 << 30;
    attr.lid = view.lid;
    attr.sm_lid = u16::from(view.is_infiniband());
    (attr.active_speed, attr.active_width) = speed(view.port.gbps);
    let layer =
        if view.is_infiniband() { IBV_LINK_LAYER_INFINIBAND } else { IBV_LINK_LAYER_ETHERNET };
    attr.link_layer = layer as u8;
    attr.flags = if view.needs_grh() { GRH_REQUIRED } else { 0 };
    Some(attr)
}

/// The codes of speed and width.
fn speed(gbps: u32) -> (u8, u8) {
    match gbps {
        0..=10 => (4, 1),
        11..=25 => (32, 1),
        26..=100 => (32, 2),
        101..=200 => (64, 2),
        _ => (128, 2),
    }
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    number: u8,
    to: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    // SAFETY: an open device.
    let Some(attr) = port_attr(unsafe { id_of(context) }, number) else {
        return refused(libc::EINVAL);
    };
    let len = len.min(size_of::<ibv_port_attr>());
    // SAFETY: the program says how long its structure is.
    unsafe { std::ptr::copy_nonoverlapping((&raw const attr).cast::<u8>(), to.cast(), len) };
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    number: u8,
    to: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: the older structure has this length.
    unsafe { query_port(context, number, to.cast(), COMPAT_PORT) }
}

/// The entry of `index` of a port.
fn gid_entry(view: &PortView, number: u8, index: usize) -> Option<ibv_gid_entry> {
    let kind = match (view.is_infiniband(), index % 2) {
        (true, _) => IBV_GID_TYPE_IB,
        (false, 0) => IBV_GID_TYPE_ROCE_V1,
        (false, _) => IBV_GID_TYPE_ROCE_V2,
    };
    Some(ibv_gid_entry {
        gid: ibv_gid { raw: view.gid(index)? },
        gid_index: index as u32,
        port_num: number.into(),
        gid_type: kind,
        ndev_ifindex: 0,
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    to: *mut ibv_gid_entry,
    most: usize,
    _flags: u32,
    size: usize,
) -> isize {
    if size != size_of::<ibv_gid_entry>() {
        return -(libc::EINVAL as isize);
    }
    // SAFETY: an open device.
    let id = unsafe { id_of(context) };
    let mut count = 0;
    for number in 1..=u8::MAX {
        let Some(view) = nic::with(|nic| nic.port(id, number)).flatten() else { break };
        for entry in (0..view.gid_count()).filter_map(|index| gid_entry(&view, number, index)) {
            if count < most {
                // SAFETY: the program has room for so many.
                unsafe { *to.add(count) = entry };
                count += 1;
            }
        }
    }
    count as isize
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    number: u8,
    index: c_int,
    to: *mut ibv_gid,
) -> c_int {
    // SAFETY: an open device.
    let view = nic::with(|nic| nic.port(unsafe { id_of(context) }, number)).flatten();
    let gid = view.and_then(|view| view.gid(usize::try_from(index).ok()?));
    let Some(raw) = gid else { return -1 };
    // SAFETY: the program's structure.
    unsafe { *to = ibv_gid { raw } };
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    number: u8,
    index: c_int,
    to: *mut u16,
) -> c_int {
    // SAFETY: an open device.
    let view = nic::with(|nic| nic.port(unsafe { id_of(context) }, number)).flatten();
    let pkeys = view.map(|view| view.port.pkeys);
    let pkey = pkeys.and_then(|pkeys| pkeys.get(usize::try_from(index).ok()?));
    let Some(pkey) = pkey else {
        refused(libc::EINVAL);
        return -1;
    };
    // SAFETY: the program's number, in the order of the network.
    unsafe { *to = pkey.to_be() };
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    match nic::with(|nic| nic.personality().fork) {
        Some(Fork::Unneeded) => IBV_FORK_UNNEEDED,
        _ => IBV_FORK_DISABLED,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_fork_init() -> c_int {
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    let root = crate::settings::directory().map(|directory| crate::sysfs::root(&directory));
    let text = root.map(|root| root.to_string_lossy().into_owned()).unwrap_or_default();
    CString::new(text).unwrap_or_default().into_raw()
}
