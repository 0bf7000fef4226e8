//! Forked children of the process that has the cache.

use super::device::{Copying, Device};
use super::memory::{fill, map, map_over, unmap};
use super::{PAGE, cache_of, monitor, own_monitor};
use crate::memory::cache::{Access, Monitor, Refusal};
use crate::sys::mappings::Mappings;
use crate::sys::per_process::tests::in_child;

const LEN: usize = 4 * PAGE;

#[test]
fn a_child_gets_nothing() {
    let Some(monitor) = own_monitor() else { return };
    let device = Copying::new();
    let cache = cache_of(device.clone(), Some(monitor));
    let addr = map(LEN);
    fill(addr, LEN, 1);
    let lease = cache.get(addr, LEN, Access::READ).unwrap();
    let mut cache = Some(cache);
    let mut lease = Some(lease);
    let right = in_child(|| {
        let refused = cache.as_ref().and_then(|c| c.get(addr, LEN, Access::READ).err());
        let before = device.registered_bytes();
        // A child may drop what it inherits: it deregisters nothing, and does not wait.
        lease.take();
        cache.take();
        // Its memory is its own: no monitor has to read events of its changes.
        map_over(addr, LEN);
        unmap(addr, LEN);
        refused == Some(Refusal::Forked) && before == LEN && device.registered_bytes() == LEN
    });
    assert!(right);
    let cache = cache.unwrap();
    assert_eq!(device.word(lease.take().unwrap().handle(), addr), 1);
    drop(cache.get(addr, LEN, Access::READ).unwrap());
    assert_eq!(cache.statistics().hits, 1, "the parent's is as it was");
}

/// A child that lives on has copies of the parent's descriptors. After the parent's cache and its monitor have ended,
/// the parent must still be able to unmap.
#[test]
fn a_child_does_not_keep_its_parent_from_unmapping() {
    if monitor().is_none() {
        return;
    }
    super::process::alone(
        "memory::cache::tests::fork::a_child_does_not_keep_its_parent_from_unmapping",
        &[],
        || {
            let monitor = Monitor::for_test(Mappings::open().unwrap()).unwrap();
            let cache = cache_of(Copying::new(), Some(monitor));
            let addr = map(LEN);
            fill(addr, LEN, 1);
            let lease = cache.get(addr, LEN, Access::READ).unwrap();
            let moved = super::memory::remap(addr, LEN, 64 * LEN, 0).unwrap(); // and still watched
            // SAFETY: the child only sleeps.
            let child = unsafe { libc::fork() };
            if child == 0 {
                loop {
                    // SAFETY: no arguments.
                    unsafe { libc::pause() };
                }
            }
            drop(lease);
            drop(cache);
            unmap(moved, 64 * LEN);
            // SAFETY: a child of this process.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        },
    );
}

#[test]
fn a_child_may_have_a_cache_of_its_own() {
    if monitor().is_none() {
        return;
    }
    super::process::alone(
        "memory::cache::tests::fork::a_child_may_have_a_cache_of_its_own",
        &[],
        || {
            let parents = cache_of(Copying::new(), monitor());
            let addr = map(LEN);
            fill(addr, LEN, 1);
            drop(parents.get(addr, LEN, Access::READ).unwrap());
            // Only this test's thread and those of the cache run here, and these hold no allocator lock.
            assert!(in_child(|| {
                let device = Copying::new();
                let cache = cache_of(device.clone(), monitor());
                drop(cache.get(addr, LEN, Access::READ).unwrap());
                let kept = cache.statistics().entries == 1;
                map_over(addr, LEN);
                fill(addr, LEN, 2);
                let lease = cache.get(addr, LEN, Access::READ).unwrap();
                kept && device.word(lease.handle(), addr) == 2
            }));
            assert_eq!(parents.statistics().entries, 1);
        },
    );
}
