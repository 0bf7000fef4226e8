//! `getinfo` as C calls it; refusals and addresses are tested in the submodules.

mod devices;
mod places;
mod refusals;

use super::hints::Hints;
use super::*;
use libfabric_sys::*;
use proptest::prelude::*;
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};

/// API version of calls where it does not matter.
const NEW: u32 = fi_version(2, 1);

fn request(flags: u64) -> Request<'static> {
    Request { version: NEW, node: None, service: None, flags }
}

/// Hints in C's memory layout, from one Rust value.
struct CHints {
    hints: Hints,
    mode: u64,
}

impl CHints {
    fn new(hints: Hints) -> Self {
        Self { hints, mode: 0 }
    }

    fn ask(&self, version: u32) -> Result<Info, c_int> {
        let mut hints = self.hints.clone();
        let c = |text: &Option<String>| text.as_ref().map(|t| CString::new(t.as_str()).unwrap());
        let names = [c(&hints.domain_name), c(&hints.fabric_name), c(&hints.prov_name)];
        let pointer = |i: usize| names[i].as_ref().map_or(null_mut(), |n| n.as_ptr().cast_mut());
        let bytes = |b: &mut Option<Vec<u8>>| {
            b.as_mut().map_or((null_mut(), 0), |b| (b.as_mut_ptr().cast(), b.len()))
        };
        let (src_addr, src_addrlen) = bytes(&mut hints.source);
        let (dest_addr, dest_addrlen) = bytes(&mut hints.dest);
        hints.domain.base.name = pointer(0);
        let (mut ep_key, mut domain_key) =
            (hints.ep_auth_key.clone(), hints.domain_auth_key.clone());
        hints.ep.auth_key = ep_key.as_mut().map_or(null_mut(), |key| key.as_mut_ptr());
        hints.domain.base.auth_key = domain_key.as_mut().map_or(null_mut(), |key| key.as_mut_ptr());
        let mut fabric = fi_fabric_attr {
            fabric: null_mut(),
            name: pointer(1),
            prov_name: pointer(2),
            prov_version: 0,
            api_version: 0,
        };
        let info = fi_info {
            next: null_mut(),
            caps: hints.caps,
            mode: self.mode,
            addr_format: hints.addr_format,
            src_addrlen,
            dest_addrlen,
            src_addr,
            dest_addr,
            handle: hints.handle,
            tx_attr: &mut hints.tx,
            rx_attr: &mut hints.rx,
            ep_attr: &mut hints.ep,
            domain_attr: (&raw mut hints.domain).cast(),
            fabric_attr: &mut fabric,
            nic: null_mut(),
        };
        ask(version, None, None, 0, &info)
    }
}

fn ask(
    version: u32,
    node: Option<&CStr>,
    service: Option<&CStr>,
    flags: u64,
    hints: *const fi_info,
) -> Result<Info, c_int> {
    let mut out = std::ptr::dangling_mut();
    let text = |t: Option<&CStr>| t.map_or(null(), CStr::as_ptr);
    // SAFETY: live C strings and structures.
    let rc = unsafe { getinfo(version, text(node), text(service), flags, hints, &mut out) };
    if rc == 0 {
        Ok(Info(out))
    } else {
        assert!(out.is_null());
        Err(rc)
    }
}

/// The result of `fi_getinfo`; dropped as `fi_freeinfo` of libfabric 1.17 and 2.1 does it.
struct Info(*mut fi_info);

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: each part is from calloc, and only this info refers to it.
        unsafe {
            let info = &*self.0;
            assert!(info.next.is_null());
            if let Some(nic) = info.nic.as_ref() {
                let close = (*nic.fid.ops).close.unwrap();
                assert_eq!(close(info.nic.cast()), 0);
            }
            let free = |at: *mut c_void| libc::free(at);
            free(info.src_addr);
            free(info.dest_addr);
            free(info.tx_attr.cast());
            free(info.rx_attr.cast());
            free((*info.ep_attr).auth_key.cast());
            free(info.ep_attr.cast());
            free((*info.domain_attr).auth_key.cast());
            free((*info.domain_attr).name.cast());
            free(info.domain_attr.cast());
            free((*info.fabric_attr).name.cast());
            free((*info.fabric_attr).prov_name.cast());
            free(info.fabric_attr.cast());
            free(self.0.cast());
        }
    }
}

impl Info {
    /// Reads the info as hints, as a caller of the newest API would pass it.
    fn as_hints(&self) -> Hints {
        // SAFETY: a live info.
        unsafe { Hints::read(fi_version(2, 7), self.0) }
    }

    /// The whole info as text, for comparisons, without the addresses of the C strings.
    fn text(&self) -> String {
        let mut hints = self.as_hints();
        hints.domain.base.name = null_mut();
        // SAFETY: a live info, with this provider's allocation size.
        let (mode, domain) =
            unsafe { ((*self.0).mode, *(*self.0).domain_attr.cast::<fi_domain_attr_2_7>()) };
        hints.domain.max_cntr_value = domain.max_cntr_value;
        hints.domain.max_err_cntr_value = domain.max_err_cntr_value;
        hints.domain.max_xpu_ctx_cnt = domain.max_xpu_ctx_cnt;
        format!("{mode} {hints:?}")
    }
}

#[test]
fn without_hints_everything_is_complete() {
    let info = ask(NEW, None, None, 0, null()).unwrap().as_hints();
    assert_eq!(info.caps, CAPS);
    assert_eq!(info.tx.caps, TX_CAPS);
    assert_eq!(info.rx.caps, RX_CAPS);
    assert_eq!(info.ep.type_, FI_EP_RDM);
    assert_eq!(info.ep.max_msg_size, usize::MAX);
    assert_eq!(info.ep.mem_tag_format.leading_zeros(), 0);
    assert_eq!(info.domain.base.threading, FI_THREAD_SAFE);
    assert_eq!(info.domain.base.mr_mode, 0);
    assert_eq!(info.fabric_name.as_deref(), Some("udrv"));
    assert_eq!(info.prov_name, None);
    assert!(info.domain_name.is_some_and(|name| !name.is_empty()));
    assert!(info.source.is_some());
    assert!(info.dest.is_none());
}

#[test]
fn hints_that_are_all_zero_are_no_hints() {
    let none = ask(NEW, None, None, 0, null()).unwrap().text();
    assert_eq!(CHints::new(Hints::none()).ask(NEW).unwrap().text(), none);
}

/// The capabilities that say where peers may be.
const REACH: u64 = FI_LOCAL_COMM | FI_REMOTE_COMM;

#[test]
fn attribute_structures_may_be_missing() {
    let mut hints: fi_info =
        // SAFETY: integers and pointers, for which zero is a valid value.
        unsafe { std::mem::zeroed() };
    hints.caps = FI_TAGGED;
    let info = ask(NEW, None, None, 0, &hints).unwrap().as_hints();
    assert_eq!(info.caps, FI_TAGGED | FI_SEND | FI_RECV | FI_FENCE | REACH);
}

#[test]
fn authorization_keys_come_back_as_they_were_given() {
    let mut hints = Hints::none();
    hints.ep_auth_key = Some((0..=255).collect());
    hints.ep.auth_key_size = 256;
    hints.domain_auth_key = Some(vec![0]);
    hints.domain.base.auth_key_size = 1;
    let hints = CHints::new(hints);
    for version in [fi_version(1, 5), NEW] {
        let answer = hints.ask(version).unwrap().as_hints();
        assert_eq!(answer.ep_auth_key, hints.hints.ep_auth_key);
        assert_eq!(answer.domain_auth_key, hints.hints.domain_auth_key);
        assert_eq!((answer.ep.auth_key_size, answer.domain.base.auth_key_size), (256, 1));
    }
    let before = hints.ask(fi_version(1, 4)).unwrap().as_hints();
    assert_eq!((before.ep_auth_key, before.domain_auth_key), (None, None));
}

#[test]
fn providers_may_be_listed_without_opening_anything() {
    let mut hints = Hints::none();
    hints.caps = FI_COLLECTIVE;
    let offer = answer(&request(FI_PROV_ATTR_ONLY), &hints, &Config::default()).unwrap();
    assert!(offer.place.is_none());
    let info = ask(NEW, None, None, FI_PROV_ATTR_ONLY | 1 << 63, null()).unwrap().as_hints();
    assert!(info.source.is_none());
    assert!(info.domain_name.is_some());
}

#[test]
fn unknown_flags_are_ignored_and_null_results_refused() {
    assert!(ask(NEW, None, None, 1 << 59 | 1 << 60, null()).is_ok());
    // SAFETY: getinfo refuses a null pointer for the list.
    let rc = unsafe { getinfo(NEW, null(), null(), 0, null(), null_mut()) };
    assert_eq!(rc, -FI_EINVAL);
    assert_eq!(ask(NEW, None, None, FI_SOURCE, null()).err(), Some(-FI_EINVAL));
}

#[test]
fn capabilities_follow_what_is_asked() {
    let both = FI_SEND | FI_RECV;
    let one_sided = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    let cases = [
        (FI_MSG, FI_MSG | both | FI_MULTI_RECV | FI_FENCE | REACH),
        (FI_MSG | FI_SEND, FI_MSG | FI_SEND | FI_FENCE | REACH),
        (FI_MSG | FI_RECV, FI_MSG | FI_RECV | FI_MULTI_RECV | REACH),
        (FI_TAGGED | FI_SOURCE, FI_TAGGED | both | FI_SOURCE | FI_FENCE | REACH),
        (FI_DIRECTED_RECV, FI_DIRECTED_RECV | REACH),
        (FI_RMA, FI_RMA | one_sided | FI_FENCE | REACH),
        (FI_RMA | FI_READ, FI_RMA | FI_READ | FI_FENCE | REACH),
        (FI_RMA | FI_REMOTE_WRITE, FI_RMA | FI_REMOTE_WRITE | REACH),
        (FI_RMA | FI_RMA_EVENT, FI_RMA | one_sided | FI_RMA_EVENT | FI_FENCE | REACH),
        (FI_MSG | FI_SEND | FI_SHARED_AV, FI_MSG | FI_SEND | FI_FENCE | FI_SHARED_AV | REACH),
        (FI_ATOMIC, FI_ATOMIC | one_sided | FI_FENCE | REACH),
        (FI_ATOMIC | FI_REMOTE_READ, FI_ATOMIC | FI_REMOTE_READ | REACH),
        (CAPS, CAPS),
    ];
    for (wanted, granted) in cases {
        let mut hints = Hints::none();
        hints.caps = wanted;
        let info = CHints::new(hints).ask(NEW).unwrap().as_hints();
        assert_eq!(names::CAPS.text(info.caps), names::CAPS.text(granted));
        assert_eq!(info.domain.base.caps, granted & DOMAIN_CAPS);
        assert_eq!((info.tx.caps | info.rx.caps) & !info.caps, 0);
        let receives = info.caps & FI_RECV != 0;
        assert_eq!(info.rx.caps & (FI_MSG | FI_TAGGED) != 0, receives);
        let one_sided = FI_RMA | FI_ATOMIC;
        assert_eq!(info.tx.caps & one_sided != 0, info.caps & (FI_READ | FI_WRITE) != 0);
        let is_target = info.caps & (FI_REMOTE_READ | FI_REMOTE_WRITE) != 0;
        assert_eq!(info.rx.caps & one_sided != 0, is_target);
    }
}

#[test]
fn without_a_network_remote_peers_are_promised_on_request_only() {
    let mut config = Config::default();
    config.net.on = false;
    let granted = |caps, domain_caps| {
        let mut hints = Hints::none();
        (hints.caps, hints.domain.base.caps) = (caps, domain_caps);
        let offer = answer(&request(0), &hints, &config).unwrap();
        let attributes = offer.attributes;
        assert_eq!(attributes.domain.base.caps, attributes.caps & DOMAIN_CAPS);
        attributes.caps & DOMAIN_CAPS
    };
    assert_eq!(granted(0, 0), FI_LOCAL_COMM | FI_SHARED_AV);
    assert_eq!(granted(FI_MSG, 0), FI_LOCAL_COMM);
    assert_eq!(granted(FI_MSG | FI_REMOTE_COMM, 0), REACH);
    assert_eq!(granted(FI_MSG, FI_REMOTE_COMM), REACH);
    assert_eq!(granted(FI_MSG, FI_SHARED_AV), FI_LOCAL_COMM | FI_SHARED_AV);
}

#[test]
fn caps_of_one_context_may_be_fewer() {
    let mut hints = Hints::none();
    hints.caps = FI_MSG | FI_TAGGED;
    // As applications copy them: all capabilities, also those of the other direction.
    hints.tx.caps = FI_TAGGED | FI_SEND | FI_RECV | FI_MULTI_RECV | FI_LOCAL_COMM;
    hints.rx.caps = FI_MSG | FI_SEND;
    let info = CHints::new(hints).ask(NEW).unwrap().as_hints();
    assert_eq!(info.tx.caps, FI_TAGGED | FI_SEND | FI_FENCE);
    assert_eq!(info.rx.caps, FI_MSG | FI_RECV | FI_MULTI_RECV);
}

#[test]
fn registration_modes_of_before_1_5_come_back() {
    let mr_mode = |version, wanted| {
        let mut hints = Hints::none();
        hints.domain.base.mr_mode = wanted;
        CHints::new(hints).ask(version).map(|info| info.as_hints().domain.base.mr_mode)
    };
    let (old, new) = (fi_version(1, 4), fi_version(1, 5));
    assert_eq!(mr_mode(old, FI_MR_UNSPEC), Ok(FI_MR_SCALABLE));
    assert_eq!(mr_mode(new, FI_MR_UNSPEC), Ok(0));
    for version in [old, new] {
        assert_eq!(mr_mode(version, FI_MR_BASIC), Ok(FI_MR_BASIC));
        assert_eq!(mr_mode(version, FI_MR_SCALABLE), Ok(FI_MR_SCALABLE));
        assert_eq!(mr_mode(version, FI_MR_BASIC | FI_MR_LOCAL), Err(-FI_ENODATA));
    }
    assert_eq!(mr_mode(old, FI_MR_LOCAL), Err(-FI_ENODATA));
    assert_eq!(mr_mode(new, FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_HMEM), Ok(0));
}

#[test]
fn members_younger_than_the_caller_are_not_read() {
    let mut hints = Hints::none();
    hints.domain.max_ep_auth_key = 2;
    hints.domain.max_group_id = 1;
    hints.domain.max_cntr_value = 1;
    let hints = CHints::new(hints);
    assert!(hints.ask(fi_version(1, 19)).is_ok());
    assert_eq!(hints.ask(fi_version(1, 20)).err(), Some(-FI_ENODATA));
    let mut keyed = Hints::none();
    keyed.ep.auth_key_size = 8;
    let keyed = CHints::new(keyed);
    assert!(keyed.ask(fi_version(1, 4)).is_ok());
    assert_eq!(keyed.ask(fi_version(1, 5)).err(), Some(-FI_ENODATA));
}

#[test]
fn keys_of_address_vectors_are_since_1_20() {
    let mut hints = Hints::none();
    hints.domain.base.auth_key_size = FI_AV_AUTH_KEY;
    let hints = CHints::new(hints);
    assert_eq!(hints.ask(fi_version(1, 19)).err(), Some(-FI_ENODATA));
    let answer = hints.ask(fi_version(1, 20)).unwrap().as_hints();
    assert_eq!(answer.domain.base.auth_key_size, FI_AV_AUTH_KEY);
    assert_eq!((answer.domain_auth_key, answer.domain.max_ep_auth_key), (None, 1));
}

#[test]
fn attributes_that_the_application_chooses_come_back() {
    let mut hints = Hints::none();
    hints.tx.op_flags = TX_OP_FLAGS;
    hints.rx.op_flags = RX_OP_FLAGS;
    hints.tx.size = 1 << 20;
    hints.rx.size = 1;
    hints.tx.tclass = FI_TC_LOW_LATENCY;
    hints.domain.base.threading = FI_THREAD_DOMAIN;
    hints.domain.base.control_progress = FI_PROGRESS_AUTO;
    hints.domain.base.data_progress = FI_PROGRESS_CONTROL_UNIFIED;
    hints.domain.base.resource_mgmt = FI_RM_DISABLED;
    hints.domain.base.av_type = FI_AV_MAP;
    let handle = 1;
    hints.handle = (&raw const handle).cast_mut().cast();
    let wanted = hints.clone();
    let got = CHints::new(hints).ask(NEW).unwrap().as_hints();
    assert_eq!(got.tx.op_flags, wanted.tx.op_flags);
    assert_eq!(got.rx.op_flags, wanted.rx.op_flags);
    assert_eq!((got.tx.size, got.rx.size), (1 << 20, 1));
    assert_eq!(got.tx.tclass, FI_TC_LOW_LATENCY);
    assert_eq!(got.domain.base.threading, FI_THREAD_DOMAIN);
    assert_eq!(got.domain.base.control_progress, FI_PROGRESS_AUTO);
    assert_eq!(got.domain.base.data_progress, FI_PROGRESS_CONTROL_UNIFIED);
    assert_eq!(got.domain.base.resource_mgmt, FI_RM_DISABLED);
    assert_eq!(got.domain.base.av_type, FI_AV_MAP);
    assert_eq!(got.handle, wanted.handle);
}

/// Any subset of `bits`, often all or none.
fn some_of(bits: u64) -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(bits), any::<u64>().prop_map(move |random| random & bits)]
}

fn any_hints() -> impl Strategy<Value = (Hints, u32, u64)> {
    let caps = (
        some_of(CAPS),
        some_of(TX_CAPS | RX_CAPS | DOMAIN_CAPS),
        some_of(TX_CAPS | RX_CAPS | DOMAIN_CAPS),
        some_of(DOMAIN_CAPS),
    );
    let contexts = (some_of(TX_OP_FLAGS), some_of(RX_OP_FLAGS), some_of(MSG_ORDER), 0..2048usize);
    let domain = (0..=5u32, 0..=3u32, 0..=3u32, 0..=2u32, 0..=2u32, 0..4096i32);
    let counts = (0..=1usize, 0..=4usize, 0..=8usize, 0..=16384usize);
    let addresses = (
        prop::sample::select(vec![0, FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IP, FI_ADDR_STR]),
        any::<bool>(),
    );
    let version = prop::sample::select(vec![
        fi_version(1, 0),
        fi_version(1, 5),
        fi_version(1, 17),
        fi_version(1, 20),
        NEW,
        fi_version(2, 7),
    ]);
    (caps, contexts, domain, counts, addresses, version, any::<u64>()).prop_map(
        |(caps, contexts, domain, counts, (format, with_dest), version, mode)| {
            let mut hints = Hints::none();
            (hints.caps, hints.tx.caps, hints.rx.caps, hints.domain.base.caps) = caps;
            (hints.tx.op_flags, hints.rx.op_flags, hints.tx.msg_order, hints.tx.size) = contexts;
            let d = &mut hints.domain.base;
            (d.threading, d.control_progress, d.data_progress, _, _, d.mr_mode) = domain;
            (d.resource_mgmt, d.av_type) = (domain.3, domain.4);
            (hints.ep.tx_ctx_cnt, hints.tx.iov_limit, _, hints.tx.inject_size) = counts;
            (hints.rx.iov_limit, hints.domain.base.cq_data_size) = (counts.1, counts.2);
            hints.addr_format = format;
            if with_dest {
                hints.dest = Some(if format == FI_ADDR_STR {
                    b"fi_sockaddr_in://127.0.0.1:9\0".to_vec()
                } else {
                    let address = "127.0.0.1:9".parse().unwrap();
                    let (bytes, len) = crate::sys::net::socket_addr_to_bytes(&address);
                    bytes[..len].to_vec()
                });
            }
            (hints, version, mode)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// fi_getinfo(3): "asking for exactly what you returned must succeed", and changes nothing.
    #[test]
    fn asking_for_what_was_returned_returns_it((hints, version, mode) in any_hints()) {
        let wanted = hints.clone();
        let first = match (CHints { hints, mode }).ask(version) {
            Ok(first) => first,
            Err(rc) => {
                prop_assert_eq!(rc, -FI_ENODATA);
                return Ok(());
            }
        };
        let second = ask(version, None, None, 0, first.0);
        prop_assert!(second.is_ok(), "{}", first.text());
        prop_assert_eq!(second.unwrap().text(), first.text());
        // No requested capability got lost.
        let got = first.as_hints();
        prop_assert_eq!(wanted.caps & !got.caps, 0);
        prop_assert_eq!(wanted.domain.base.caps & !got.domain.base.caps, 0);
        prop_assert_eq!(wanted.tx.msg_order & !got.tx.msg_order, 0);
        prop_assert!(got.tx.inject_size >= wanted.tx.inject_size);
        prop_assert!(got.tx.iov_limit >= wanted.tx.iov_limit);
        prop_assert!(got.tx.size >= wanted.tx.size);
        prop_assert!(got.domain.base.cq_data_size >= wanted.domain.base.cq_data_size);
    }
}
