//! Users of one open device. Their descriptors and events need the double (scripts/fake-verbs, `units`), or a device.

use super::*;
use crate::sys::per_process::tests::in_child;
use crate::sys::verbs::context::NO_BELL;

/// The descriptors that are open; 0 where other tests run at the same time.
fn descriptors() -> usize {
    let alone = std::env::var_os("FAKE_VERBS").is_some();
    if alone { std::fs::read_dir("/proc/self/fd").unwrap().count() } else { 0 }
}

#[test]
fn a_device_is_opened_once_by_all_of_a_process() {
    let Some((first, ..)) = device() else { return };
    let before = descriptors();
    let others: Vec<OpenDevice> = (0..1000).map(|_| device().unwrap().0).collect();
    assert!(others.iter().all(|other| other.shares(&first)));
    assert_eq!(descriptors(), before);
    // It stays open for those that are left.
    let last = others.into_iter().last().unwrap();
    drop(first);
    assert!(last.facts().is_ok() && last.take_event() == Ok(None));
    let while_open = descriptors();
    drop(last);
    assert!(while_open == 0 || descriptors() < while_open, "it is closed");
    assert!(device().unwrap().0.facts().is_ok(), "it is opened again");
}

#[test]
fn a_device_that_is_gone_gets_no_other_user() {
    let Some((first, ..)) = device() else { return };
    let second = device().unwrap().0;
    first.context.retire();
    let third = device().unwrap().0;
    assert!(first.shares(&second) && !first.shares(&third));
    assert!(!first.is_there() && !second.is_there() && third.is_there());
    assert!(device().unwrap().0.shares(&third));
}

#[test]
fn a_user_without_a_descriptor_for_its_bell_hears_the_device() {
    let Some((first, ..)) = device() else { return };
    NO_BELL.set(true);
    assert_eq!(first.bell().err(), Some(Errno(libc::EMFILE)));
    assert_eq!(wait_readable(first.events(), 0), Ok(false), "this one is always there");
    NO_BELL.set(false);
    assert!(first.bell().is_ok(), "it may be there later");
}

#[test]
fn a_forked_child_opens_the_device_for_itself() {
    let Some((here, ..)) = device() else { return };
    // At the moment of the fork another thread may hold a lock of the library.
    let opens = || {
        in_child(|| {
            let own = device().unwrap().0;
            !own.shares(&here) && own.facts().is_ok() && here.take_event() == Ok(None)
        })
    };
    assert!((0..3).any(|_| opens()));
    assert!(here.facts().is_ok() && here.is_there());
}
