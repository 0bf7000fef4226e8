//! Tests that need a process of their own: this program again, with one test.

use super::PAGE;
use super::device::Copying;
use super::memory::map;
use crate::memory::cache::{Access, Cache};
use std::ffi::c_void;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ALONE: &str = "UDRV_TEST_ALONE";

/// A privilege or resource that the process does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Without {
    /// Root: it runs as user nobody.
    Root,
    /// userfaultfd(2) and its device: a seccomp filter forbids them, as in containers.
    Userfaultfd,
    /// Watching pages with a userfaultfd: a seccomp filter forbids the request.
    Watching,
    /// Locking more than this many bytes.
    LockedMemory(u64),
}

/// The status of a process that has run its test to the end.
const RAN: i32 = 77;

/// Runs `work` as the test `name`, in a process in which no other test runs.
pub(super) fn alone(name: &str, without: &[Without], work: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some() {
        work();
        std::process::exit(RAN);
    }
    if !without.is_empty() && crate::sys::process::effective_uid() != 0 {
        return eprintln!("skipped: takes root to become another user");
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(ALONE, "1");
    if without.iter().any(|wish| matches!(wish, Without::Userfaultfd | Without::Watching)) {
        command.env("UDRV_TEST_NO_MONITOR", "1");
    }
    let wishes = without.to_vec();
    let apply = move || {
        for wish in &wishes {
            match wish {
                Without::Root => become_nobody()?,
                Without::Userfaultfd => {
                    forbid(libc::SYS_userfaultfd, 0, libc::SYS_userfaultfd as u32)?
                }
                Without::Watching => forbid(libc::SYS_ioctl, 24, 0xc020_aa00)?, // UFFDIO_REGISTER
                Without::LockedMemory(bytes) => limit_locked_memory(*bytes)?,
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes only system calls on live locals.
    unsafe { command.pre_exec(apply) };
    let mut child = match command.stdin(Stdio::null()).spawn() {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return eprintln!("skipped: others may not run this program");
        }
        child => child.unwrap(),
    };
    let end = Instant::now() + crate::patience::seconds(60 + super::torture::seconds());
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            let threads = threads_of(child.id());
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{name} hangs:\n{threads}");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    // A name that no test has would end well too.
    assert_eq!(status.code(), Some(RAN), "{name}: {status} (signal {:?})", status.signal());
}

/// Where each thread of a process waits in the kernel, as far as that is readable.
fn threads_of(pid: u32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let one = |task: std::path::PathBuf| {
        let read = |what| std::fs::read_to_string(task.join(what)).unwrap_or_default();
        format!("{} {}: {}{}", read("comm").trim(), read("wchan"), read("syscall"), read("stack"))
    };
    tasks.map(|task| one(task.path())).collect::<Vec<_>>().join("\n")
}

fn checked(rc: i32) -> std::io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn become_nobody() -> std::io::Result<()> {
    // SAFETY: integers, and an empty list.
    unsafe {
        checked(libc::setgroups(0, std::ptr::null()))?;
        checked(libc::setgid(65534))?;
        checked(libc::setuid(65534))
    }
}

fn limit_locked_memory(bytes: u64) -> std::io::Result<()> {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: a live local.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) })
}

/// Installs a filter that fails a system call with EPERM, as container runtimes do, if the word at `offset` of its
/// `seccomp_data` is `value`. At 0 is its number, at 24 the second argument.
fn forbid(call: libc::c_long, offset: u32, value: u32) -> std::io::Result<()> {
    let statement = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, equal) =
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
    let mut program = [
        statement(load, 0, 0, 0),
        statement(equal, call as u32, 0, 3),
        statement(load, offset, 0, 0),
        statement(equal, value, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let filter = libc::sock_fprog { len: 6, filter: program.as_mut_ptr() };
    // SAFETY: integers, and a program that lives until the call returns.
    unsafe {
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        checked(libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const filter,
            0,
            0,
        ))
    }
}

/// A cancelled thread registers and deregisters, although drivers make calls at which it could end.
#[test]
fn a_cancelled_thread_comes_through() {
    extern "C" fn work(argument: *mut c_void) -> *mut c_void {
        // SAFETY: the test waits for this thread, which is to be cancelled.
        let cache = unsafe {
            libc::pthread_cancel(libc::pthread_self());
            &*argument.cast::<Cache<Copying>>()
        };
        let kept = cache.get(map(PAGE), PAGE, Access::READ).is_ok();
        if kept { argument } else { std::ptr::null_mut() }
    }
    alone("memory::cache::tests::process::a_cancelled_thread_comes_through", &[], || {
        let during = |_| {
            // SAFETY: an integer argument; usleep(3) is a cancellation point.
            unsafe { libc::usleep(1) };
        };
        let device = Copying::with(usize::MAX, false, Some(Box::new(during)));
        let cache = super::cache_of(device, super::monitor());
        let (mut thread, mut result) = (0, std::ptr::null_mut());
        let argument = (&raw const cache).cast_mut().cast();
        // SAFETY: the cache and the locals outlive the thread.
        unsafe {
            assert_eq!(libc::pthread_create(&mut thread, std::ptr::null(), work, argument), 0);
            assert_eq!(libc::pthread_join(thread, &mut result), 0);
        }
        assert_eq!(result, argument);
    });
}

#[test]
fn many_threads_share_one_monitor() {
    alone("memory::cache::tests::process::many_threads_share_one_monitor", &[], || {
        if super::monitor().is_none() {
            return; // it has ended again
        }
        let start = std::sync::Barrier::new(32);
        let monitors: Vec<_> = std::thread::scope(|scope| {
            let open = || {
                start.wait();
                crate::memory::cache::Monitor::shared()
            };
            let threads: Vec<_> = (0..32).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
        });
        assert!(monitors.iter().all(|monitor| std::sync::Arc::ptr_eq(monitor, &monitors[0])));
    });
}

#[test]
fn a_monitor_that_cannot_watch_leaves_nothing_behind() {
    alone(
        "memory::cache::tests::process::a_monitor_that_cannot_watch_leaves_nothing_behind",
        &[Without::Watching],
        || {
            let pages = || {
                let text = std::fs::read_to_string("/proc/self/statm").unwrap();
                text.split(' ').next().unwrap().parse::<usize>().unwrap()
            };
            assert!(super::monitor().is_none());
            let before = pages();
            (0..1000).for_each(|_| assert!(super::Monitor::shared().is_err()));
            let after = pages();
            assert!(after < before + 1000, "{before} pages have become {after}");
        },
    );
}
