//! Each hint that cannot be met, and its line in the log.

use super::*;
use crate::config::variable::Secret;

/// A refused hint and its line in the log.
type Case = (fn(&mut Hints), &'static str);

const CASES: &[Case] = &[
    (|h| h.caps = FI_MSG | FI_HMEM, "caps: wanted FI_MSG|FI_HMEM, not offered FI_HMEM"),
    (|h| h.caps = FI_HMEM, "caps: wanted FI_HMEM, "),
    (|h| h.caps = FI_SOURCE_ERR, "caps: wanted FI_SOURCE_ERR, "),
    (|h| h.caps = 1 << 63, "caps: wanted 0x8000000000000000, "),
    (
        |h| h.domain.base.caps = FI_SOURCE,
        "domain_attr->caps: wanted FI_SOURCE, not offered FI_SOURCE",
    ),
    (
        |h| (h.caps, h.tx.caps) = (FI_MSG | FI_TAGGED, FI_RMA),
        "tx_attr->caps: wanted FI_RMA, not offered FI_RMA",
    ),
    (
        |h| (h.caps, h.tx.caps) = (FI_RMA | FI_READ, FI_ATOMIC),
        "tx_attr->caps: wanted FI_ATOMIC, not offered FI_ATOMIC",
    ),
    (
        |h| (h.caps, h.tx.caps) = (FI_MSG, FI_TAGGED),
        "tx_attr->caps: wanted FI_TAGGED, not offered FI_TAGGED",
    ),
    (
        |h| (h.caps, h.rx.caps) = (FI_MSG, FI_SOURCE),
        "rx_attr->caps: wanted FI_SOURCE, not offered FI_SOURCE",
    ),
    (
        |h| h.tx.op_flags = FI_COMMIT_COMPLETE,
        "tx_attr->op_flags: wanted FI_COMMIT_COMPLETE, not offered FI_COMMIT_COMPLETE",
    ),
    (|h| h.tx.op_flags = FI_MULTI_RECV, "tx_attr->op_flags: wanted FI_MULTI_RECV, "),
    (
        |h| h.tx.msg_order = FI_ORDER_SAS | FI_ORDER_WAR,
        "tx_attr->msg_order: wanted FI_ORDER_WAR|FI_ORDER_SAS, not offered FI_ORDER_WAR",
    ),
    (|h| h.tx.msg_order = FI_ORDER_RMA_WAR, "tx_attr->msg_order: wanted FI_ORDER_RMA_WAR, "),
    (
        |h| h.tx.comp_order = FI_ORDER_SAS,
        "tx_attr->comp_order: wanted FI_ORDER_SAS, not offered FI_ORDER_SAS",
    ),
    (|h| h.tx.inject_size = 16385, "tx_attr->inject_size: wanted 16385, offered 16384"),
    (|h| h.tx.size = (1 << 20) + 1, "tx_attr->size: wanted 1048577, offered 1048576"),
    (|h| h.tx.iov_limit = 5, "tx_attr->iov_limit: wanted 5, offered 4"),
    (|h| h.tx.rma_iov_limit = 5, "tx_attr->rma_iov_limit: wanted 5, offered 4"),
    (|h| (h.caps, h.rx.caps) = (FI_MSG, FI_REMOTE_READ), "rx_attr->caps: wanted FI_REMOTE_READ, "),
    (|h| h.rx.op_flags = FI_INJECT, "rx_attr->op_flags: wanted FI_INJECT, not offered FI_INJECT"),
    (|h| h.rx.msg_order = FI_ORDER_RAS, "rx_attr->msg_order: wanted FI_ORDER_RAS, "),
    (
        |h| h.rx.comp_order = FI_ORDER_DATA,
        "rx_attr->comp_order: wanted FI_ORDER_DATA, not offered FI_ORDER_DATA",
    ),
    (|h| h.rx.size = usize::MAX, "rx_attr->size: wanted 18446744073709551615, offered 1048576"),
    (|h| h.rx.iov_limit = 5, "rx_attr->iov_limit: wanted 5, offered 4"),
    (|h| h.ep.type_ = FI_EP_MSG, "ep_attr->type: wanted FI_EP_MSG, offered FI_EP_RDM"),
    (|h| h.ep.type_ = FI_EP_DGRAM, "ep_attr->type: wanted FI_EP_DGRAM, offered FI_EP_RDM"),
    (|h| h.ep.protocol = FI_PROTO_SHM, "ep_attr->protocol: wanted 0x10, offered 0x75647276"),
    (|h| h.ep.protocol_version = 2, "ep_attr->protocol_version: wanted 2, offered 1"),
    (|h| h.ep.tx_ctx_cnt = 256, "ep_attr->tx_ctx_cnt: wanted 256, offered 255"),
    (|h| h.ep.rx_ctx_cnt = 256, "ep_attr->rx_ctx_cnt: wanted 256, offered 255"),
    (|h| h.ep.auth_key_size = 257, "ep_attr->auth_key_size: wanted 257, offered 256"),
    (
        |h| h.ep.auth_key_size = 16,
        "ep_attr->auth_key: wanted a null pointer, offered a pointer to auth_key_size bytes",
    ),
    (|h| h.domain.base.threading = 6, "domain_attr->threading: wanted 6, offered 0 to 5"),
    (
        |h| h.domain.base.control_progress = 4,
        "domain_attr->control_progress: wanted 4, offered 0 to 3",
    ),
    (|h| h.domain.base.data_progress = 4, "domain_attr->data_progress: wanted 4, offered 0 to 3"),
    (|h| h.domain.base.resource_mgmt = 3, "domain_attr->resource_mgmt: wanted 3, offered 0 to 2"),
    (|h| h.domain.base.av_type = 3, "domain_attr->av_type: wanted 3, offered 0 to 2"),
    (
        |h| h.domain.base.mr_mode = FI_MR_BASIC | FI_MR_SCALABLE,
        "domain_attr->mr_mode: wanted FI_MR_BASIC|FI_MR_SCALABLE, offered FI_MR_BASIC or FI_MR_SCALABLE, alone",
    ),
    (|h| h.domain.base.mr_key_size = 9, "domain_attr->mr_key_size: wanted 9, offered 8"),
    (|h| h.domain.base.cq_data_size = 9, "domain_attr->cq_data_size: wanted 9, offered 8"),
    (|h| h.domain.base.cq_cnt = 65537, "domain_attr->cq_cnt: wanted 65537, offered 65536"),
    (|h| h.domain.base.ep_cnt = 65536, "domain_attr->ep_cnt: wanted 65536, offered 65535"),
    (|h| h.domain.base.tx_ctx_cnt = 65536, "domain_attr->tx_ctx_cnt: wanted 65536, offered 65535"),
    (|h| h.domain.base.rx_ctx_cnt = 65536, "domain_attr->rx_ctx_cnt: wanted 65536, offered 65535"),
    (|h| h.domain.base.max_ep_tx_ctx = 256, "domain_attr->max_ep_tx_ctx: wanted 256, offered 255"),
    (|h| h.domain.base.max_ep_rx_ctx = 256, "domain_attr->max_ep_rx_ctx: wanted 256, offered 255"),
    (
        |h| h.domain.base.max_ep_stx_ctx = 65536,
        "domain_attr->max_ep_stx_ctx: wanted 65536, offered 65535",
    ),
    (
        |h| h.domain.base.max_ep_srx_ctx = 65536,
        "domain_attr->max_ep_srx_ctx: wanted 65536, offered 65535",
    ),
    (|h| h.domain.base.cntr_cnt = 65537, "domain_attr->cntr_cnt: wanted 65537, offered 65536"),
    (|h| h.domain.base.mr_iov_limit = 5, "domain_attr->mr_iov_limit: wanted 5, offered 4"),
    (
        |h| (h.domain.base.auth_key_size, h.ep.auth_key_size) = (FI_AV_AUTH_KEY, 16),
        "ep_attr->auth_key_size: wanted 16, offered 0, with FI_AV_AUTH_KEY",
    ),
    (
        |h| {
            h.domain.base.auth_key_size = FI_AV_AUTH_KEY;
            h.domain_auth_key = Some(Vec::new());
        },
        "domain_attr->auth_key: wanted a key, offered a null pointer, with FI_AV_AUTH_KEY",
    ),
    (
        |h| h.domain.base.auth_key_size = 1,
        "domain_attr->auth_key: wanted a null pointer, offered a pointer to auth_key_size bytes",
    ),
    (|h| h.domain.base.max_err_data = 1, "domain_attr->max_err_data: wanted 1, offered 0"),
    (|h| h.domain.base.mr_cnt = 65537, "domain_attr->mr_cnt: wanted 65537, offered 65536"),
    (|h| h.domain.max_ep_auth_key = 2, "domain_attr->max_ep_auth_key: wanted 2, offered 1"),
    (|h| h.domain.max_group_id = 7, "domain_attr->max_group_id: wanted 7, offered 0"),
    (|h| h.domain_name = Some("nosuch0".into()), "domain_attr->name: wanted nosuch0, offered "),
    (|h| h.fabric_name = Some("UDRV".into()), "fabric_attr->name: wanted UDRV, offered udrv"),
    (|h| h.prov_name = Some("tcp".into()), "fabric_attr->prov_name: wanted tcp, offered udrv"),
    (
        |h| h.addr_format = FI_SOCKADDR_IB,
        "addr_format: wanted 4, offered FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_ADDR_STR",
    ),
    (|h| h.source = Some(vec![]), "src_addr: wanted [], offered a sockaddr_in or sockaddr_in6"),
    (|h| h.dest = Some(vec![9; 16]), "dest_addr: wanted [09, 09, "),
    (
        |h| (h.addr_format, h.source) = (FI_ADDR_STR, Some(b"x\0".to_vec())),
        "src_addr: wanted [78, 00], offered fi_sockaddr_in://ADDRESS:PORT",
    ),
    (
        |h| (h.addr_format, h.source) = (FI_ADDR_STR, Some(b"203.0.113.77:5\0".to_vec())),
        "src_addr: wanted 203.0.113.77, offered ",
    ),
];

#[test]
fn each_refusal_names_what_was_wanted_and_what_is_offered() {
    for (change, line) in CASES {
        let mut hints = Hints::none();
        change(&mut hints);
        let refusal = answer(&request(0), &hints, &Config::default()).unwrap_err();
        let text = refusal.to_string();
        assert!(text.starts_with(line), "\n got {text}\nwant {line}");
        assert_eq!(refusal.error, FI_ENODATA);
        if line.contains("offered ") && !line.ends_with(['|', ' ', '1']) {
            assert_eq!(text, *line);
        }
        let before_1_20 = fi_version(1, 19);
        let young = hints.domain.max_ep_auth_key | hints.domain.max_group_id as usize != 0;
        let rc = CHints::new(hints).ask(before_1_20).map(drop);
        assert_eq!(rc, if young { Ok(()) } else { Err(-FI_ENODATA) }, "{line}");
    }
}

#[test]
fn the_core_decides_about_lists_of_providers() {
    for name in ["udrv", "UDRV", "udrv;^tcp", "^tcp", "udrv;ofi_hook_perf"] {
        let mut hints = Hints::none();
        hints.prov_name = Some(name.to_owned());
        assert!(answer(&request(0), &hints, &Config::default()).is_ok(), "{name}");
    }
}

#[test]
fn a_bad_job_key_of_the_environment_is_refused_without_printing_it() {
    let mut config = Config::default();
    config.endpoint.job_key = Some(Secret("secret!".to_owned()));
    let refusal = answer(&request(0), &Hints::none(), &config).unwrap_err();
    let line = "job key: wanted FI_UDRV_JOB_KEY has 7 bytes, offered text of 16 to 256 bytes";
    assert_eq!(refusal.to_string(), line);
}

#[test]
fn limits_of_the_user_limit_contexts() {
    let mut config = Config::default();
    (config.endpoint.tx_max, config.endpoint.rx_max) = (100, 1 << 24);
    let mut hints = Hints::none();
    let offer = answer(&request(0), &hints, &config).unwrap();
    assert_eq!((offer.attributes.tx.size, offer.attributes.rx.size), (100, 1024));
    hints.tx.size = 101;
    let refusal = answer(&request(0), &hints, &config).unwrap_err();
    assert_eq!(refusal.to_string(), "tx_attr->size: wanted 101, offered 100");
}
