//! Coverage-guided fuzzing with libFuzzer, under `--cfg fuzzing`: `scripts/fuzz` builds the unit tests with
//! instrumentation and runs each test `fuzz_*` in a process of its own. The tests hand their input to the doubles and
//! oracles of the other tests: most draw their random numbers from it ([`Script`]).

use libfuzzer_sys as _; // links libFuzzer
use std::ffi::{CString, c_char, c_int};
use std::sync::OnceLock;

unsafe extern "C" {
    /// libFuzzer as a library: <https://llvm.org/docs/LibFuzzer.html#using-libfuzzer-as-a-library>.
    fn LLVMFuzzerRunDriver(
        argc: *mut c_int,
        argv: *mut *mut *mut c_char,
        callback: extern "C" fn(*const u8, usize) -> c_int,
    ) -> c_int;
}

static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();

extern "C" fn one_input(data: *const u8, len: usize) -> c_int {
    let input = match len {
        0 => &[],
        // SAFETY: libFuzzer passes `len` bytes that live during the call.
        _ => unsafe { std::slice::from_raw_parts(data, len) },
    };
    if let Some(target) = TARGET.get() {
        target(input);
    }
    0
}

/// Runs `target` with the options of libFuzzer that `UDRV_FUZZ_OPTIONS` names, separated by blanks. The process ends
/// with the run: with a failure that saves its input, or with status 0.
pub(crate) fn run(target: fn(&[u8])) {
    let _ = TARGET.set(target);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        std::process::abort();
    }));
    let options = std::env::var("UDRV_FUZZ_OPTIONS").unwrap_or_default();
    let words = std::iter::once("fuzz").chain(options.split_whitespace());
    let words: Vec<CString> = words.filter_map(|word| CString::new(word).ok()).collect();
    let mut argv: Vec<*mut c_char> = words.iter().map(|word| word.as_ptr().cast_mut()).collect();
    argv.push(std::ptr::null_mut());
    let (mut argc, mut argv) = (words.len() as c_int, argv.as_mut_ptr());
    // SAFETY: a C argument vector, closed by a null pointer, that outlives the call.
    unsafe { LLVMFuzzerRunDriver(&raw mut argc, &raw mut argv, one_input) };
}
