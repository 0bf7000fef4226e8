//! A test double of libcuda.so.1 (the driver API) and of libcudart.so (the part of it that tests load), for the
//! processes of one machine: no GPU, no kernel module.
//!
//! * `memory`: allocations. Device memory is mapped without any access for the processor, and a second time for the
//!   copies of the double: a program that touches it dies of SIGSEGV, and a system call that is given it fails.
//! * `stream`: streams and events. Each stream has a thread, and a copy runs late, by a time drawn from a seed.
//! * `model`: the state of the process: devices, contexts, allocations by address, IPC.
//! * `shared`: memory that is exported by descriptors, of cuMemCreate and of pools.
//! * `abi`, `sharing`, `runtime`: the C functions. They translate, and leave decisions to `model`.
//!
//! **Exact on purpose**, because faults hide there:
//! 1. every call answers 3 before `cuInit` and in a forked child, and 201 without a current context;
//! 2. the plural attribute query answers zeros for memory that CUDA does not know, the singular one an error;
//! 3. a synchronous copy from device to device returns before it has run, unless SYNC_MEMOPS is set, of one of them or of the context;
//! 4. a copy from pageable memory has read its source when it returns, and writes its destination later; registered
//!    memory is read and written late;
//! 5. freed addresses are given out again at once, with another BUFFER_ID;
//! 6. an IPC handle cannot be opened by its own process; opening it again counts;
//! 7. memory of pools and of cuMemCreate has no context, no IPC handle and no SYNC_MEMOPS, and a descriptor only if that was
//!    asked for when it was made; what is mapped at an address has the range of its whole reservation, and a copy may go on in
//!    its neighbour. So has it the BUFFER_ID: whether that of a GPU's driver changes with what is mapped is not known. The
//!    MEMORY_BLOCK_ID does;
//! 8. a context takes its streams, events and memory with it, and the next primary one of the device has its handle;
//! 9. a pointer of a pool is exported only after the pool was; a pool that is destroyed lasts as long as allocations of it, and
//!    then another one gets its handle.
//!
//! **The verifier.** What no driver checks writes one line and aborts the process: see [`verify`].
//!
//! **Settings** are in the environment: see [`settings`].
#![deny(unsafe_code)]

#[allow(unsafe_code, non_snake_case)]
mod abi;
mod counters;
mod memory;
mod model;
#[allow(unsafe_code)]
mod peer;
mod random;
#[allow(unsafe_code, non_snake_case)]
mod runtime;
pub mod settings;
mod shared;
#[allow(unsafe_code, non_snake_case)]
mod sharing;
mod stream;
#[allow(unsafe_code)]
mod sys;
pub mod verify;
