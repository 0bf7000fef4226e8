//! Whether valgrind runs this process (valgrind.h, RUNNING_ON_VALGRIND). It runs one thread at a time, and makes many
//! system calls while no other thread may run: a thread that waits for another in such a call waits for ever.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::asm;

/// The number of the request in valgrind.h.
const RUNNING: u64 = 0x1001;

/// True under valgrind, with any tool. False elsewhere, and on processors whose request is not implemented here.
pub(crate) fn runs_us() -> bool {
    let request = [RUNNING, 0, 0, 0, 0, 0];
    let answer: u64;
    // SAFETY: a processor rotates one register until it has its old value, with no other effect; valgrind recognises
    // the sequence, reads the request, and returns its answer in place of the default.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") &raw const request,
            inout("rdx") 0_u64 => answer,
            options(nostack),
        );
    }
    // SAFETY: as on x86-64: the sequence has no effect on a processor, and valgrind only writes the answer.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "ror x12, x12, #3", "ror x12, x12, #13", "ror x12, x12, #51", "ror x12, x12, #61",
            "orr x10, x10, x10",
            in("x4") &raw const request,
            inout("x3") 0_u64 => answer,
            options(nostack),
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = request;
        answer = 0;
    }
    answer != 0
}

#[cfg(test)]
mod tests {
    /// scripts/memcheck runs this under valgrind, and says so.
    #[test]
    fn it_is_known_under_valgrind() {
        assert_eq!(super::runs_us(), std::env::var_os("UDRV_TEST_VALGRIND").is_some());
    }
}
