//! The C entries of plain and tagged messages, and their tables.

/// The three forms of a receive at the handle `$handle`. The parameters `$tag` make up its `Tagging`. The last three are
/// for handles whose buffers may be device memory.
macro_rules! receives {
    (
        $receive:ident($handle:ident), ($($tag:ident)*) $tagging:expr, $message:ty, $of_message:expr;
        $one:ident $one_text:literal $list:ident $list_text:literal $told:ident $told_text:literal
        $any_one:ident $any_list:ident $any_told:ident
    ) => {
        entries! { data_entry -> isize;
            $one $one_text (
                ep: *mut fid_ep, buf: *mut c_void, len: usize, _desc: *mut c_void, from: fi_addr_t, $($tag: u64,)*
                context: *mut c_void,
            ) => $receive($handle(ep), segment(buf, len), $tagging, from, context, Flags::Default);
        }
        device_entries! {
            $any_one $one_text, desc, $handle(ep) => $one; (
                ep: *mut fid_ep, buf: *mut c_void, len: usize, desc: *mut c_void, from: fi_addr_t, $($tag: u64,)*
                context: *mut c_void,
            ) => $receive($handle(ep), device::one(buf, len), $tagging, from, context, Flags::Default);
        }
        vector_receives! {
            identity, $receive($handle), ($($tag)*) $tagging, $message, $of_message;
            $list $list_text $told $told_text
        }
        vector_receives! {
            device::find, $receive($handle), ($($tag)*) $tagging, $message, $of_message;
            $any_list $list_text $any_told $told_text
        }
    };
}

/// The forms of a receive that take a list of buffers. `$find` says which of them are device memory.
macro_rules! vector_receives {
    (
        $find:path, $receive:ident($handle:ident), ($($tag:ident)*) $tagging:expr, $message:ty, $of_message:expr;
        $list:ident $list_text:literal $told:ident $told_text:literal
    ) => {
        entries! { data_entry -> isize;
            $list $list_text (
                ep: *mut fid_ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, from: fi_addr_t,
                $($tag: u64,)* context: *mut c_void,
            ) => $receive($handle(ep), $find(vector(iov, count)), $tagging, from, context, Flags::Default);
            $told $told_text (ep: *mut fid_ep, msg: *const $message, flags: u64) => match msg.as_ref() {
                None => -(FI_EINVAL as isize),
                Some(m) => {
                    // fi_tagged.3, FI_DISCARD: "the input buffer(s) and length parameters are ignored".
                    let to = match flags & libfabric_sys::FI_DISCARD {
                        0 => $find(vector(m.msg_iov, m.iov_count)),
                        _ => Ok($crate::memory::SegmentList::EMPTY),
                    };
                    $receive($handle(ep), to, $of_message(m), m.addr, m.context, Flags::Call(flags))
                }
            };
        }
    };
}

/// As `entries!`, for data calls with one buffer that may be device memory. If it is not, the call goes on as the plain
/// one, so that host memory costs one comparison.
macro_rules! device_entries {
    ($($name:ident $text:literal, $desc:expr, $handle:expr => $plain:path;
        ($($argument:ident: $type:ty),* $(,)?) => $result:expr;)*
    ) => {$(
        unsafe extern "C" fn $name($($argument: $type),*) -> isize {
            // Not part of this function, which needs no stack of its own.
            #[inline(never)]
            #[allow(unused_variables)]
            unsafe extern "C" fn look($($argument: $type),*) -> isize {
                // SAFETY: see `guard::entries`.
                $crate::ofi::guard::data_entry($text, || unsafe { $result })
            }
            // SAFETY: the same call.
            unsafe {
                match $desc.is_null() && !$handle.detects() {
                    true => $plain($($argument),*),
                    false => look($($argument),*),
                }
            }
        }
    )*};
}

/// All forms of a send.
macro_rules! sends {
    (
        ($($tag:ident)?) $tagging:expr, $message:ty, $of_message:expr;
        $one:literal $list:literal $told:literal $inject:literal $data:literal $injectdata:literal
    ) => {
        entries! { data_entry -> isize;
            send_one $one (
                ep: *mut fid_ep, buf: *const c_void, len: usize, _desc: *mut c_void, to: fi_addr_t, $($tag: u64,)?
                context: *mut c_void,
            ) => send(endpoint(ep), segment(buf, len), $tagging, None, to, context, Flags::Default);
            senddata $data (
                ep: *mut fid_ep, buf: *const c_void, len: usize, _desc: *mut c_void, data: u64, to: fi_addr_t,
                $($tag: u64,)? context: *mut c_void,
            ) => send(endpoint(ep), segment(buf, len), $tagging, Some(data), to, context, Flags::Default);
        }
        more_sends! {
            segment, identity, ($($tag)?) $tagging, $message, $of_message;
            $list $told $inject $injectdata
        }
        /// The same for endpoints whose buffers may be device memory. fi_inject has no descriptor: MPICH and Intel MPI
        /// pass it device memory, whatever the mode.
        mod any {
            use super::*;
            device_entries! {
                send_one $one, desc, endpoint(ep) => super::send_one; (
                    ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void, to: fi_addr_t, $($tag: u64,)?
                    context: *mut c_void,
                ) => send(endpoint(ep), device::one(buf, len), $tagging, None, to, context, Flags::Default);
                senddata $data, desc, endpoint(ep) => super::senddata; (
                    ep: *mut fid_ep, buf: *const c_void, len: usize, desc: *mut c_void, data: u64, to: fi_addr_t,
                    $($tag: u64,)? context: *mut c_void,
                ) => send(endpoint(ep), device::one(buf, len), $tagging, Some(data), to, context, Flags::Default);
            }
            more_sends! {
                device::one, device::find, ($($tag)?) $tagging, $message, $of_message;
                $list $told $inject $injectdata
            }
            pub(super) const SENDS: Calls = send_calls!(Calls);
        }
    };
}

/// The sends of several buffers, and those without a descriptor. `$one` and `$find` say what is device memory.
macro_rules! more_sends {
    (
        $one:path, $find:path, ($($tag:ident)?) $tagging:expr, $message:ty, $of_message:expr;
        $list:literal $told:literal $inject:literal $injectdata:literal
    ) => {
        entries! { data_entry -> isize;
            sendv $list (
                ep: *mut fid_ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, to: fi_addr_t,
                $($tag: u64,)? context: *mut c_void,
            ) => match count == 1 && !iov.is_null() {
                // One buffer takes as long as by the call that knows no other.
                true => {
                    let from = $one((*iov).iov_base, (*iov).iov_len);
                    send(endpoint(ep), from, $tagging, None, to, context, Flags::Default)
                }
                false => send(endpoint(ep), $find(vector(iov, count)), $tagging, None, to, context, Flags::Default),
            };
            sendmsg $told (ep: *mut fid_ep, msg: *const $message, flags: u64) => match msg.as_ref() {
                None => -(FI_EINVAL as isize),
                Some(m) => {
                    let data = (flags & FI_REMOTE_CQ_DATA != 0).then_some(m.data);
                    match m.iov_count == 1 && !m.msg_iov.is_null() {
                        true => {
                            let from = $one((*m.msg_iov).iov_base, (*m.msg_iov).iov_len);
                            send(endpoint(ep), from, $of_message(m), data, m.addr, m.context, Flags::Call(flags))
                        }
                        false => {
                            let from = $find(vector(m.msg_iov, m.iov_count));
                            send(endpoint(ep), from, $of_message(m), data, m.addr, m.context, Flags::Call(flags))
                        }
                    }
                }
            };
            inject $inject (ep: *mut fid_ep, buf: *const c_void, len: usize, to: fi_addr_t $(, $tag: u64)?)
                => send(endpoint(ep), $one(buf, len), $tagging, None, to, null_mut(), Flags::Inject);
            injectdata $injectdata (
                ep: *mut fid_ep, buf: *const c_void, len: usize, data: u64, to: fi_addr_t $(, $tag: u64)?
            ) => send(endpoint(ep), $one(buf, len), $tagging, Some(data), to, null_mut(), Flags::Inject);
        }
    };
}

/// A table of the calls that send, which the place of use has by these names.
macro_rules! send_calls {
    ($ops:ident) => {
        $ops {
            send: Some(send_one),
            sendv: Some(sendv),
            sendmsg: Some(sendmsg),
            inject: Some(inject),
            senddata: Some(senddata),
            injectdata: Some(injectdata),
            ..NO_CALLS
        }
    };
}

/// The tables of message calls: for an endpoint, a transmit context, a receive context, and a scalable endpoint, which
/// has no message calls of its own.
macro_rules! tables {
    ($ops:ident) => {
        type Calls = $ops;
        const NO_CALLS: $ops = <$ops>::STUBS;
        const SENDS: $ops = send_calls!($ops);
        const fn with_receives(ops: $ops) -> Table<$ops> {
            Table::new($ops { recv: Some(recv), recvv: Some(recvv), recvmsg: Some(recvmsg), ..ops })
        }
        pub(super) static OPS: Table<$ops> = with_receives(SENDS);
        pub(super) static TRANSMIT_OPS: Table<$ops> = Table::new(SENDS);
        pub(super) static RECEIVE_OPS: Table<$ops> = with_receives(NO_CALLS);
        /// The same three for endpoints with FI_HMEM.
        const fn with_any_receives(ops: $ops) -> Table<$ops> {
            Table::new($ops {
                recv: Some(any_recv),
                recvv: Some(any_recvv),
                recvmsg: Some(any_recvmsg),
                ..ops
            })
        }
        pub(super) static ANY_OPS: Table<$ops> = with_any_receives(any::SENDS);
        pub(super) static ANY_TRANSMIT_OPS: Table<$ops> = Table::new(any::SENDS);
        pub(super) static ANY_RECEIVE_OPS: Table<$ops> = with_any_receives(NO_CALLS);
        pub(super) static NO_OPS: Table<$ops> = Table::new(NO_CALLS);
    };
}

pub(super) use {device_entries, more_sends, receives, send_calls, sends, tables, vector_receives};
