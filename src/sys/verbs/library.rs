//! libibverbs, loaded at run time if a device exists, never linked.

use crate::sys::dl::Library;
use crate::sys::errno::{Errno, Result};
use crate::sys::few;
use crate::sys::made_once::MadeOnce;
use crate::telemetry::log;
use rdma_core_sys::{
    _compat_ibv_port_attr, ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context,
    ibv_cq, ibv_device, ibv_device_attr, ibv_fork_status, ibv_gid_entry, ibv_mr, ibv_pd, ibv_qp,
    ibv_qp_attr, ibv_qp_ex, ibv_qp_init_attr, ibv_srq, ibv_srq_init_attr,
};
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;

/// The kernel's directory of devices, where libibverbs looks for it: SYSFS_PATH moves it, unless the
/// program runs with another user's rights (`ibv_get_sysfs_path` of rdma-core's libibverbs/sysfs.c).
pub(crate) fn sysfs() -> PathBuf {
    // SAFETY: the calls only return numbers.
    let plain = unsafe { libc::getuid() == libc::geteuid() };
    let moved = std::env::var_os("SYSFS_PATH").filter(|path| plain && !path.is_empty());
    moved.map_or_else(|| PathBuf::from("/sys"), PathBuf::from)
}

/// The directory in which the kernel lists RDMA devices.
pub(super) fn class() -> PathBuf {
    sysfs().join("class/infiniband")
}

/// Whether a module is loaded that lets RDMA devices register memory of NVIDIA's GPUs by its address: nvidia-peermem, or the older
/// nv_peer_mem, where NCCL looks for them (`ncclIbGdrModuleLoaded` of src/transport/net_ib.cc).
pub(crate) fn has_peer_memory() -> bool {
    const MODULES: [&str; 3] = [
        "module/nvidia_peermem",
        "kernel/mm/memory_peers/nv_mem",
        "kernel/mm/memory_peers/nv_mem_nc",
    ];
    MODULES.iter().any(|module| sysfs().join(module).exists())
}

/// True if this host has any RDMA device. Without one, libibverbs is not even looked for.
pub(crate) fn present() -> bool {
    std::fs::read_dir(class()).is_ok_and(|mut entries| entries.next().is_some())
}

/// The names of all RDMA devices.
pub(crate) fn names() -> Vec<String> {
    let entries = std::fs::read_dir(class()).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    few::sort(&mut names, |a, b| a < b);
    names
}

/// True if an RDMA device is called `name`.
pub(crate) fn shows(name: &str) -> bool {
    let plain = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
    plain && class().join(name).exists()
}

/// Declares the table of functions, each with its symbol version: most exist in an older version too,
/// for programs from before 2008.
macro_rules! table {
    (
        $($name:ident = $symbol:literal $version:literal ($($arg:ty),*) $(-> $result:ty)?;)*
        ;
        $($may:ident = $its:literal $since:literal ($($of:ty),*) $(-> $gives:ty)?;)*
    ) => {
        /// The functions of libibverbs that are used here.
        pub(super) struct Verbs {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
            $(pub(super) $may: Option<unsafe extern "C" fn($($of),*) $(-> $gives)?>,)*
        }

        impl Verbs {
            /// Error: the missing function.
            fn load(library: &Library) -> std::result::Result<Self, &'static CStr> {
                Ok(Self {
                    $($name: {
                        let found = library.versioned($symbol, $version).ok_or($symbol)?;
                        // SAFETY: infiniband/verbs.h declares the function of this name and version with
                        // this type, and the library stays loaded.
                        unsafe {
                            std::mem::transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($arg),*) $(-> $result)?,
                            >(found)
                        }
                    },)*
                    // SAFETY: infiniband/verbs.h declares it with this type, and the library stays loaded.
                    $($may: library.versioned($its, $since).map(|found| unsafe {
                        std::mem::transmute::<
                            NonNull<c_void>,
                            unsafe extern "C" fn($($of),*) $(-> $gives)?,
                        >(found)
                    }),)*
                })
            }
        }
    };
}

table! {
    get_device_list = c"ibv_get_device_list" c"IBVERBS_1.1" (*mut c_int) -> *mut *mut ibv_device;
    free_device_list = c"ibv_free_device_list" c"IBVERBS_1.1" (*mut *mut ibv_device);
    open_device = c"ibv_open_device" c"IBVERBS_1.1" (*mut ibv_device) -> *mut ibv_context;
    close_device = c"ibv_close_device" c"IBVERBS_1.1" (*mut ibv_context) -> c_int;
    query_device = c"ibv_query_device" c"IBVERBS_1.1"
        (*mut ibv_context, *mut ibv_device_attr) -> c_int;
    query_port = c"ibv_query_port" c"IBVERBS_1.1"
        (*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int;
    query_pkey = c"ibv_query_pkey" c"IBVERBS_1.1" (*mut ibv_context, u8, c_int, *mut u16) -> c_int;
    get_async_event = c"ibv_get_async_event" c"IBVERBS_1.1"
        (*mut ibv_context, *mut ibv_async_event) -> c_int;
    ack_async_event = c"ibv_ack_async_event" c"IBVERBS_1.1" (*mut ibv_async_event);
    alloc_pd = c"ibv_alloc_pd" c"IBVERBS_1.1" (*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd = c"ibv_dealloc_pd" c"IBVERBS_1.1" (*mut ibv_pd) -> c_int;
    reg_mr = c"ibv_reg_mr" c"IBVERBS_1.1" (*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    dereg_mr = c"ibv_dereg_mr" c"IBVERBS_1.1" (*mut ibv_mr) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel" c"IBVERBS_1.0"
        (*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel = c"ibv_destroy_comp_channel" c"IBVERBS_1.0"
        (*mut ibv_comp_channel) -> c_int;
    create_cq = c"ibv_create_cq" c"IBVERBS_1.1"
        (*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq = c"ibv_destroy_cq" c"IBVERBS_1.1" (*mut ibv_cq) -> c_int;
    get_cq_event = c"ibv_get_cq_event" c"IBVERBS_1.1"
        (*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events" c"IBVERBS_1.1" (*mut ibv_cq, c_uint);
    create_qp = c"ibv_create_qp" c"IBVERBS_1.1" (*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp = c"ibv_modify_qp" c"IBVERBS_1.1" (*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    destroy_qp = c"ibv_destroy_qp" c"IBVERBS_1.1" (*mut ibv_qp) -> c_int;
    create_ah = c"ibv_create_ah" c"IBVERBS_1.1" (*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    destroy_ah = c"ibv_destroy_ah" c"IBVERBS_1.1" (*mut ibv_ah) -> c_int;

    ; // The following functions may be missing.
    create_srq = c"ibv_create_srq" c"IBVERBS_1.1"
        (*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    destroy_srq = c"ibv_destroy_srq" c"IBVERBS_1.1" (*mut ibv_srq) -> c_int;
    fork_init = c"ibv_fork_init" c"IBVERBS_1.1" () -> c_int;
    // rdma-core 24 and later.
    qp_to_qp_ex = c"ibv_qp_to_qp_ex" c"IBVERBS_1.6" (*mut ibv_qp) -> *mut ibv_qp_ex;
    // rdma-core 28 and later.
    reg_mr_iova2 = c"ibv_reg_mr_iova2" c"IBVERBS_1.8"
        (*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
    // rdma-core 32 and later.
    query_gids = c"_ibv_query_gid_table" c"IBVERBS_1.11"
        (*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;
    // rdma-core 34 and later.
    reg_dmabuf_mr = c"ibv_reg_dmabuf_mr" c"IBVERBS_1.12"
        (*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
    // rdma-core 35 and later.
    is_fork_initialized = c"ibv_is_fork_initialized" c"IBVERBS_1.13" () -> ibv_fork_status;
}

/// The library, loaded by the first call. Errors: ENOSYS if it is missing or too old.
pub(super) fn verbs() -> Result<&'static Verbs> {
    // The table stays valid: the library is never unloaded.
    static VERBS: MadeOnce<Verbs> = MadeOnce::new();
    VERBS.get_or_try_make(|| {
        let Some(library) = Library::open(c"libibverbs.so.1") else {
            log::info(format_args!("libibverbs.so.1 cannot be loaded: RDMA devices are not used"));
            return Err(Errno(libc::ENOSYS));
        };
        Verbs::load(&library).map_err(|lacks| {
            log::warn(format_args!(
                "libibverbs.so.1 has no {}: it is older than rdma-core 15, and RDMA devices are not used",
                lacks.to_string_lossy()
            ));
            Errno(libc::ENOSYS)
        })
    })
}
