//! Whether valgrind runs this process (valgrind.h, RUNNING_ON_VALGRIND). It lets one thread run at a time, and does many
//! system calls while no other may: a thread that waits in one of them for another waits for ever.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::asm;

/// The question, as valgrind.h numbers it.
const RUNNING: u64 = 0x1001;

/// True under valgrind, with whatever tool. Elsewhere, and on processors whose question is not known here, false.
pub(crate) fn runs_us() -> bool {
    let request = [RUNNING, 0, 0, 0, 0, 0];
    let answer: u64;
    // SAFETY: a processor turns one register until it is what it was, and does nothing beside; valgrind knows the
    // sequence, reads the request, and gives its answer in the place of the default.
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
    // SAFETY: as above.
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
