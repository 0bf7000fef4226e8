//! The module's ABI, version 1.6, to the byte: requests, structures, and what older versions lack.
//! All members are in the machine's order, little-endian, and naturally aligned. Where an answer shares
//! the bytes of its question, both are views of one buffer.

/// The module's device.
pub(super) const PATH: &std::ffi::CStr = c"/dev/rv";

/// The version implemented here.
pub(crate) const MAJOR: u16 = 1;
pub(crate) const MINOR: u16 = 6;
/// The oldest version supported: earlier ones lack CAPABILITY, and do not say whether they evict.
pub(crate) const MINOR_MIN: u16 = 3;

/// Capabilities of a module (CAPABILITY).
pub(super) const CAN_USER_MR: u64 = 1 << 0;
pub(super) const CAN_EVICT: u64 = 1 << 1;
/// It supports GPUs of some vendor, and distinguishes an event ring from GPU memory by MAP_LOCKED.
pub(super) const CAN_GPU: u64 = 0b111 << 61;

/// Registrations for queue pairs of the process only.
pub(super) const MODE_USER: u8 = 0;
/// Kernel RC queue pairs and kernel registrations.
pub(super) const MODE_KERNEL: u8 = 1;
/// Most bytes of a device's name, including the terminating zero.
pub(super) const NAME_LEN: usize = 64;
/// Most bytes of a job key.
pub(crate) const JOB_KEY_LEN: usize = 16;
/// Most events of a ring.
pub(super) const EVENTS_MAX: u32 = 10_000;
/// For CONN_GET_STATS: the sum of all queue pairs.
pub(super) const ALL: u8 = 255;

pub(super) const ACCESS_LOCAL_WRITE: u32 = 1;
pub(super) const ACCESS_REMOTE_WRITE: u32 = 2;
/// For queue pairs of the module, not for those of the process.
pub(super) const ACCESS_KERNEL: u32 = 0x8000_0000;

pub(super) const EVICT_RANGE: u8 = 2;
pub(super) const EVICT_AMOUNT: u8 = 3;

const READ: u32 = 2;
const WRITE: u32 = 1;

/// A request's number, as defined by asm-generic/ioctl.h: direction, bytes, the RDMA subsystem's
/// letter 0x1b, and the request.
const fn request(direction: u32, number: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | 0x1b << 8 | number
}

/// Bytes of the argument of a request.
pub(super) const fn argument_len(request: u32) -> usize {
    (request >> 16 & 0x3fff) as usize
}

pub(super) const CAPABILITY: u32 = request(READ | WRITE, 0xfc, size_of::<Capability>());
/// The only query of modules up to 1.2.
pub(super) const QUERY: u32 = request(READ, 0xfc, size_of::<Capability>());
pub(super) const ATTACH: u32 = request(READ | WRITE, 0xf1, size_of::<Attach>());
pub(super) const ATTACH_UP_TO_5: u32 = request(READ | WRITE, 0xf1, 152);
pub(super) const REG_MEM: u32 = request(READ | WRITE, 0xf3, size_of::<RegMem>());
pub(super) const REG_MEM_UP_TO_4: u32 = request(READ | WRITE, 0xf3, 56);
pub(super) const REG_MEM_UP_TO_1: u32 = request(READ | WRITE, 0xf3, 48);
pub(super) const DEREG_MEM: u32 = request(WRITE, 0xf4, size_of::<DeregMem>());
pub(super) const EVICT: u32 = request(READ | WRITE, 0xf6, size_of::<Evict>());
pub(super) const CACHE_STATS: u32 = request(READ, 0xf7, size_of::<CacheStatistics>());
pub(super) const CONN_CREATE: u32 = request(READ | WRITE, 0xf8, size_of::<ConnCreate>());
pub(super) const CONN_CONNECT: u32 = request(WRITE, 0xf9, size_of::<ConnConnect>());
pub(super) const CONN_CONNECTED: u32 = request(WRITE, 0xfa, size_of::<ConnConnected>());
pub(super) const POST_WRITE: u32 = request(READ | WRITE, 0xfb, size_of::<PostWrite>());
pub(super) const CONN_STATS: u32 = request(READ | WRITE, 0xfd, size_of::<ConnectionStatistics>());
pub(super) const EVENT_STATS: u32 = request(READ, 0xfe, size_of::<EventStatistics>());
pub(super) const CONN_COUNT: u32 = request(READ | WRITE, 0xff, size_of::<ConnCount>());

/// The name of a request, for the log.
pub(super) fn name_of(request: u32) -> &'static str {
    match request & 0xff {
        0xf1 => "ATTACH",
        0xf3 => "REG_MEM",
        0xf4 => "DEREG_MEM",
        0xf6 => "EVICT",
        0xf7 => "GET_CACHE_STATS",
        0xf8 => "CONN_CREATE",
        0xf9 => "CONN_CONNECT",
        0xfa => "CONN_CONNECTED",
        0xfb => "POST_RDMA_WR_IMMED",
        0xfc => "CAPABILITY",
        0xfd => "CONN_GET_STATS",
        0xfe => "GET_EVENT_STATS",
        0xff => "CONN_GET_CONN_COUNT",
        _ => "an unknown request",
    }
}

/// A structure of plain numbers without padding: any bytes are a valid value, and all its bytes are initialised.
///
/// # Safety
/// `repr(C)`, of integers and arrays of them only, and as long as its members together.
pub(super) unsafe trait Plain: Copy + Default {}

/// Declares structures, and checks their size and the offsets of their members.
macro_rules! layout {
    ($($(#[$doc:meta])* $name:ident: $size:literal { $($at:literal $member:ident: $type:ty,)* })*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) struct $name { $(pub(crate) $member: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                // SAFETY: zeroes are valid integers.
                unsafe { std::mem::zeroed() }
            }
        }

        // SAFETY: integers only; the assertion below detects padding.
        unsafe impl Plain for $name {}

        const _: () = {
            assert!(size_of::<$name>() == $size, "size");
            $(assert!(std::mem::offset_of!($name, $member) == $at, "offset");)*
            assert!(0 $(+ size_of::<$type>())* == $size, "padding");
        };
    )* };
}

layout! {
    Capability: 64 {
        0 major: u16,
        2 minor: u16,
        4 gpu_major: u16,
        6 gpu_minor: u16,
        8 capability: u64,
        16 reserved: [u64; 6],
    }

    /// Question of ATTACH; up to 1.5 it ends before `page_list_len`.
    Attach: 160 {
        0 device: [u8; NAME_LEN],
        64 cache_mib: u32,
        68 mode: u8,
        69 port: u8,
        70 num_conn: u8,
        71 pad0: u8,
        72 local_addr: u32,
        76 index_bits: u8,
        77 pad1: u8,
        78 gid_index: u16,
        80 gid: [u8; 16],
        96 job_key: [u8; JOB_KEY_LEN],
        112 job_key_len: u8,
        113 pad2: [u8; 3],
        116 gpu_cache_mib: u32,
        120 service_id: u64,
        128 context: u64,
        136 events: u32,
        140 q_depth: u32,
        144 reconnect_timeout_s: u32,
        148 heartbeat_ms: u32,
        152 page_list_len: u32,
        156 pad3: u32,
    }
    /// Answer of ATTACH; up to 1.3 without the last member.
    Attached: 24 {
        0 index: u32,
        4 cache_mib: u32,
        8 q_depth: u32,
        12 reconnect_timeout_s: u32,
        16 registration_max: u64,
    }

    /// Question of REG_MEM; up to 1.4 it ends before `base_addr`, up to 1.1 before `alloc_id`. The first two members, and the
    /// driver's data (`struct irdma_mem_reg_req`), are for queue pairs of the process only.
    RegMem: 64 {
        0 pd: u32,
        4 command_fd: i32,
        8 addr: u64,
        16 len: u64,
        24 access: u32,
        28 ipc_handle: u32,
        32 driver_len: u64,
        40 driver_data: u64,
        48 alloc_id: u64,
        56 base_addr: u64,
    }
    /// Answer of REG_MEM.
    Registered: 24 {
        0 handle: u64,
        8 iova: u64,
        16 lkey: u32,
        20 rkey: u32,
    }

    DeregMem: 32 {
        0 handle: u64,
        8 addr: u64,
        16 len: u64,
        24 access: u32,
        28 pad: u32,
    }

    /// Question of EVICT: a range (`addr`, `len`), or an amount (bytes, then a count in 32 bits).
    Evict: 32 {
        0 kind: u8,
        1 pad0: [u8; 7],
        8 addr_or_bytes: u64,
        16 len_or_count: u64,
        24 access: u32,
        28 pad1: u32,
    }
    /// Answer of EVICT.
    Evicted: 16 {
        0 bytes: u64,
        8 count: u32,
        12 pad: u32,
    }

    CacheStatistics: 112 {
        0 bytes: u64,
        8 bytes_most: u64,
        16 limit_mib: u32,
        20 count: u32,
        24 count_most: u32,
        28 used: u32,
        32 used_most: u32,
        36 pad0: u32,
        40 used_bytes: u64,
        48 used_bytes_most: u64,
        56 references_most: u32,
        60 pad1: u32,
        64 hits: u64,
        72 misses: u64,
        80 full: u64,
        88 failed: u64,
        96 removed: u64,
        104 evicted: u64,
    }

    /// Question of CONN_CREATE: `struct ib_uverbs_ah_attr`, and the peer's address.
    ConnCreate: 48 {
        0 gid: [u8; 16],
        16 flow_label: u32,
        20 own_gid_index: u8,
        21 hop_limit: u8,
        22 traffic_class: u8,
        23 pad0: u8,
        24 lid: u16,
        26 service_level: u8,
        27 path_bits: u8,
        28 static_rate: u8,
        29 is_global: u8,
        30 port: u8,
        31 pad1: u8,
        32 remote_addr: u32,
        36 pad2: u32,
        40 context: u64,
    }
    /// Answer of CONN_CREATE: the names of the connection in requests, and in events.
    ConnCreated: 16 {
        0 handle: u64,
        8 conn: u64,
    }

    /// CONN_CONNECT: `struct ib_user_path_rec`. Members in network byte order are arrays.
    ConnConnect: 72 {
        0 handle: u64,
        8 remote_gid: [u8; 16],
        24 own_gid: [u8; 16],
        40 remote_lid: [u8; 2],
        42 own_lid: [u8; 2],
        44 raw_traffic: u32,
        48 flow_label: [u8; 4],
        52 reversible: u32,
        56 mtu: u32,
        60 p_key: [u8; 2],
        62 hop_limit: u8,
        63 traffic_class: u8,
        64 paths: u8,
        65 service_level: u8,
        66 mtu_selector: u8,
        67 rate_selector: u8,
        68 rate: u8,
        69 life_time_selector: u8,
        70 life_time: u8,
        71 preference: u8,
    }

    ConnConnected: 8 {
        0 handle: u64,
    }

    /// CONN_GET_CONN_COUNT; the answer is the first 32 bits.
    ConnCount: 16 {
        0 handle: u64,
        8 index: u8,
        9 pad: [u8; 7],
    }

    /// Question of POST_RDMA_WR_IMMED.
    PostWrite: 80 {
        0 handle: u64,
        8 addr: u64,
        16 mr_handle: u64,
        24 mr_addr: u64,
        32 mr_len: u64,
        40 mr_access: u32,
        44 rkey: u32,
        48 remote_addr: u64,
        56 len: u64,
        64 wr_id: u64,
        72 immediate: u32,
        76 pad: u32,
    }
    /// Answer of POST_RDMA_WR_IMMED: which queue pair was used, and how often that was connected.
    Posted: 8 {
        0 index: u8,
        1 pad: [u8; 3],
        4 conn_count: u32,
    }

    EventStatistics: 48 {
        0 written: u64,
        8 written_failed: u64,
        16 written_bytes: u64,
        24 filled: u64,
        32 filled_failed: u64,
        40 filled_bytes: u64,
    }

    /// CONN_GET_STATS; the question is `handle` and `index` at the first 9 bytes.
    ConnectionStatistics: 312 {
        0 index: u8,
        1 flags: u8,
        2 pad0: [u8; 2],
        4 queue_pairs: u32,
        8 messages: [u32; 22],
        96 wait_us: u64,
        104 resolve_us: u64,
        112 connect_us: u64,
        120 connected_us: u64,
        128 resolved: u32,
        132 resolve_failed: u32,
        136 recoveries: u32,
        140 pad1: u32,
        144 recovery_times: [u64; 6],
        192 resolved_again: u32,
        196 resolve_again_failed: u32,
        200 posted: u64,
        208 post_failed: u64,
        216 posted_bytes: u64,
        224 outstanding: u32,
        228 pad2: u32,
        232 written: u64,
        240 written_failed: u64,
        248 filled: u64,
        256 filled_bytes: u64,
        264 filled_failed: u64,
        272 heartbeats: [u64; 5],
    }
}

// The values that the module's own compilation yields.
const _: () = {
    assert!(CAPABILITY == 0xc040_1bfc && QUERY == 0x8040_1bfc);
    assert!(ATTACH == 0xc0a0_1bf1 && ATTACH_UP_TO_5 == 0xc098_1bf1);
    assert!(REG_MEM == 0xc040_1bf3 && REG_MEM_UP_TO_4 == 0xc038_1bf3);
    assert!(REG_MEM_UP_TO_1 == 0xc030_1bf3 && DEREG_MEM == 0x4020_1bf4);
    assert!(EVICT == 0xc020_1bf6 && CACHE_STATS == 0x8070_1bf7);
    assert!(CONN_CREATE == 0xc030_1bf8 && CONN_CONNECT == 0x4048_1bf9);
    assert!(CONN_CONNECTED == 0x4008_1bfa && POST_WRITE == 0xc050_1bfb);
    assert!(CONN_STATS == 0xc138_1bfd && EVENT_STATS == 0x8030_1bfe && CONN_COUNT == 0xc010_1bff);
};

/// The attach request for a module of version 1.`minor`.
pub(super) fn attach_of(minor: u16) -> u32 {
    if minor <= 5 { ATTACH_UP_TO_5 } else { ATTACH }
}

/// The request that registers memory with a module of version 1.`minor`.
pub(super) fn reg_mem_of(minor: u16) -> u32 {
    match minor {
        0 | 1 => REG_MEM_UP_TO_1,
        2..=4 => REG_MEM_UP_TO_4,
        _ => REG_MEM,
    }
}

/// The bytes of a structure.
pub(super) fn to_bytes<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: `Plain` has no padding, so that all bytes are initialised.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) }
}

/// The structure at the beginning of `bytes`; members beyond their end are zero.
pub(super) fn from_bytes<T: Plain>(bytes: &[u8]) -> T {
    let mut value = T::default();
    let len = bytes.len().min(size_of::<T>());
    // SAFETY: within both; any bytes are a valid `Plain`.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), (&raw mut value).cast::<u8>(), len);
    }
    value
}

/// Longest argument of a request.
pub(super) const ARGUMENT_MAX: usize = size_of::<ConnectionStatistics>();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_where_the_module_reads_them() {
        let post = PostWrite {
            handle: 0x0102,
            rkey: 0xa1b2_c3d4,
            immediate: 0x8040_2010,
            remote_addr: 7,
            ..PostWrite::default()
        };
        let bytes = to_bytes(&post);
        assert_eq!(bytes.len(), 80);
        assert_eq!(bytes[..3], [2, 1, 0]);
        assert_eq!(bytes[44..49], [0xd4, 0xc3, 0xb2, 0xa1, 7]);
        assert_eq!(bytes[72..76], [0x10, 0x20, 0x40, 0x80]);
        assert_eq!(from_bytes::<PostWrite>(bytes), post);
        let mut attach = Attach { page_list_len: u32::MAX, ..Attach::default() };
        attach.device[0] = b'r';
        let old: Attach = from_bytes(&to_bytes(&attach)[..argument_len(attach_of(5))]);
        assert_eq!((old.device[0], old.page_list_len), (b'r', 0), "1.5 does not have it");
    }

    #[test]
    fn older_modules_have_shorter_questions() {
        let lengths = |minor| (argument_len(attach_of(minor)), argument_len(reg_mem_of(minor)));
        assert_eq!((lengths(1), lengths(4)), ((152, 48), (152, 56)));
        assert_eq!((lengths(5), lengths(6), lengths(9)), ((152, 64), (160, 64), (160, 64)));
        for request in [CAPABILITY, ATTACH, REG_MEM, DEREG_MEM, EVICT, POST_WRITE, CONN_COUNT] {
            assert!(argument_len(request) <= ARGUMENT_MAX && name_of(request).len() > 4);
        }
    }
}
