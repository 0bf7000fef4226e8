//! Functions that other libraries of a process link to (librdmacm, libefa, libfabric's own providers), and that
//! no program calls that uses only devices of the double.

use std::ffi::{c_int, c_void};

macro_rules! stubs {
    ($result:ty = $value:expr; $($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name() -> $result {
            $value
        }
    )*};
}

stubs! { c_int = libc::ENOSYS;
    ibv_attach_mcast ibv_detach_mcast ibv_get_pkey_index ibv_query_ece ibv_set_ece ibv_read_sysfs_file
    ibv_get_device_index ibv_query_srq ibv_query_qp ibv_resize_cq ibv_modify_srq
    ibv_cmd_alloc_pd ibv_cmd_create_ah ibv_cmd_create_cq_ex ibv_cmd_create_qp_ex ibv_cmd_dealloc_pd
    ibv_cmd_dereg_mr ibv_cmd_destroy_ah ibv_cmd_destroy_cq ibv_cmd_destroy_qp ibv_cmd_get_context
    ibv_cmd_modify_qp ibv_cmd_query_device_any ibv_cmd_query_port ibv_cmd_query_qp
    ibv_cmd_reg_dmabuf_mr ibv_cmd_reg_mr verbs_register_driver_34 verbs_set_ops verbs_uninit_context
    __verbs_log ibv_copy_ah_attr_from_kern ibv_copy_path_rec_from_kern ibv_copy_qp_attr_from_kern
}
stubs! { u64 = 0; ibv_get_device_guid }
stubs! { *mut c_void = std::ptr::null_mut(); _verbs_init_and_alloc_context }
stubs! { *const c_void = c"unknown".as_ptr().cast(); ibv_wc_status_str ibv_event_type_str ibv_port_state_str }
