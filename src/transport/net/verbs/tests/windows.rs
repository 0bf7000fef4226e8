//! PUT rendezvous between endpoints on one device.

use super::*;
use crate::memory::OwnedBuffer;
use crate::transport::net::bulk::key::Key;
use crate::transport::net::verbs::config::ReadPolicy;
use crate::transport::{
    Access, Prepared, Purpose, Put, Registered, Registration, Remote, RemoteKey,
};

/// Two endpoints that may advertise buffers to each other, and their numbers for each other.
pub(super) fn pair(ip: IpAddr) -> ((End, PeerId), (End, PeerId)) {
    pair_with(ip, ReadPolicy::Off)
}

fn pair_with(ip: IpAddr, read: ReadPolicy) -> ((End, PeerId), (End, PeerId)) {
    let open = || End::open_with(ip, RdmaSettings { read, ..settings(RdmaPolicy::Require) });
    let (mut a, mut b) = (open(), open());
    let (to_b, to_a) = (a.meet(&b), b.meet(&a));
    await_windows(&mut a, to_b, &mut b, to_a);
    ((a, to_b), (b, to_a))
}

pub(super) fn await_windows(a: &mut End, to_b: PeerId, b: &mut End, to_a: PeerId) {
    assert!(within(20, || {
        a.poll();
        b.poll();
        a.net.prepare(to_b, LANE) == Prepared::Ready && b.net.prepare(to_a, LANE) == Prepared::Ready
    }));
}

pub(super) fn pattern(seed: usize, len: usize) -> OwnedBuffer {
    OwnedBuffer::from((0..len).map(|i| ((i * 7 + seed) % 253) as u8).collect::<Vec<u8>>())
}

pub(super) fn contents(buffer: &OwnedBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.segments().len()];
    buffer.segments().copy_out(0, &mut bytes);
    bytes
}

/// `b` advertises `buffers` to `a`.
fn lend(b: &mut End, to_a: PeerId, buffers: &[OwnedBuffer]) -> Vec<RemoteKey> {
    let lend = |(token, buffer): (u64, &OwnedBuffer)| {
        let registered = b.net.register(to_a, LANE, &buffer.segments(), Purpose::Receive { token });
        let Registered::Yes(Registration { key, confirms: true, .. }) = registered else {
            panic!("{registered:?}");
        };
        key
    };
    (0..).zip(buffers).map(lend).collect()
}

/// `a` fills a remote buffer.
fn fill(a: &mut End, to_b: PeerId, from: &OwnedBuffer, key: RemoteKey, token: u64) -> Access {
    let how = Put { notify: true, delivered: false, stays: false, reports: false, token };
    a.net.put(to_b, &from.segments(), &Remote { key, offset: 0 }, how).unwrap()
}

#[test]
fn windows_are_filled_by_the_device() {
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (mut b, to_a)) = pair(ip);
    let sizes = [1, 5, 4096, 32 * 1024, 100_001, 1 << 20];
    let from: Vec<_> = sizes.iter().map(|len| pattern(*len, *len)).collect();
    let to: Vec<_> = sizes.iter().map(|len| OwnedBuffer::from(vec![0; *len])).collect();
    for round in 1..4 {
        let keys = lend(&mut b, to_a, &to);
        for (n, (buffer, key)) in (0..).zip(from.iter().zip(&keys)) {
            assert_eq!(fill(&mut a, to_b, buffer, *key, n), Access::Begun);
        }
        assert!(within(30, || {
            a.poll();
            b.poll();
            b.got.filled.len() == round * sizes.len() && a.got.done.len() == sizes.len()
        }));
        let done = std::mem::take(&mut a.got.done);
        assert!(done.into_iter().eq(0..sizes.len() as u64));
        for (from, to) in from.iter().zip(&to) {
            assert!(contents(from) == contents(to));
            to.segments().copy_in(0, &vec![0; to.segments().len()]);
        }
    }
    let (wrote, took) = (a.net.bulk_counts(), b.net.bulk_counts());
    assert_eq!((wrote.made, wrote.connections, took.connections), (1, 1, 1));
    let bytes = 3 * sizes.iter().sum::<usize>() as u64;
    assert_eq!((wrote.written_bytes, took.filled_bytes), (bytes, bytes));
    assert_eq!((a.got.lost, b.got.lost), (0, 0));
}

#[test]
fn a_connection_that_breaks_is_made_again() {
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (mut b, to_a)) = pair(ip);
    for round in 1..3 {
        let buffers = [pattern(1, 10_000), pattern(2, 10_000)];
        let keys = lend(&mut b, to_a, &buffers);
        // The device refuses this key, and breaks the queue pair.
        let key = Key::decode(&keys[0]).unwrap();
        let wrong = Key { key: key.key ^ 1, ..key }.encode();
        fill(&mut a, to_b, &pattern(3, 10_000), wrong, 0);
        assert!(within(30, || {
            a.poll();
            b.poll();
            (a.got.lost, b.got.lost) == (round, round)
        }));
        assert_eq!(a.net.bulk_counts().connections + b.net.bulk_counts().connections, 0);
        // An old remote key has no effect any more.
        assert_eq!(fill(&mut a, to_b, &pattern(4, 10_000), keys[1], 0), Access::Silent);
        assert!(contents(&buffers[1]) == contents(&pattern(2, 10_000)));
        await_windows(&mut a, to_b, &mut b, to_a);
        let again = [OwnedBuffer::from(vec![0; 50_000])];
        let keys = lend(&mut b, to_a, &again);
        let source = pattern(5, 50_000);
        fill(&mut a, to_b, &source, keys[0], 0);
        assert!(within(30, || {
            a.poll();
            b.poll();
            b.got.filled.len() == round
        }));
        assert!(contents(&again[0]) == contents(&source));
    }
    assert_eq!(b.got.departures.len(), 0);
}

#[test]
fn a_sleeper_is_woken_when_a_window_is_filled() {
    use crate::sys::event::wait_readable;
    use crate::sys::late_set::LateSet;
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (mut b, to_a)) = pair(ip);
    let epoll = std::sync::Arc::new(LateSet::new().unwrap());
    b.net.watch(&epoll, 1).unwrap();
    let (source, target) = ([pattern(1, 40_000)], [OwnedBuffer::from(vec![0; 40_000])]);
    for round in 1..10 {
        let keys = lend(&mut b, to_a, &target);
        fill(&mut a, to_b, &source[0], keys[0], 0);
        let mut slept = 0;
        assert!(within(20, || {
            if b.net.sleep() {
                slept += 1;
                let _ = wait_readable(epoll.fd().unwrap(), 5000);
                b.net.awake();
            }
            b.poll();
            a.poll();
            b.got.filled.len() == round
        }));
        assert!(slept < 50, "it sleeps until something happens, and is woken then: {slept}");
    }
}

/// The turn of one thread gives a remote buffer to a peer while another one sleeps, which armed nothing for it.
#[test]
fn a_sleeper_is_woken_when_a_window_is_filled_that_another_thread_lent() {
    use crate::sys::event::wait_readable;
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (mut b, to_a)) = pair(ip);
    b.net.background = None;
    assert!(within(10, || {
        a.poll();
        b.poll();
        b.net.sleep()
    }));
    let (source, target) = (pattern(1, 40_000), [OwnedBuffer::from(vec![0; 40_000])]);
    let keys = lend(&mut b, to_a, &target);
    b.poll();
    fill(&mut a, to_b, &source, keys[0], 0);
    assert!(within(20, || {
        a.poll();
        wait_readable(b.net.bulk.as_ref().unwrap().fd(), 10) == Ok(true)
    }));
    b.net.awake();
    assert!(within(20, || {
        a.poll();
        b.poll();
        b.got.filled.len() == 1
    }));
}

#[test]
fn a_peer_that_ends_takes_its_windows_along() {
    let Some(ip) = address() else { return };
    let ((mut a, to_b), (b, _)) = pair(ip);
    let buffers = [pattern(1, 10_000), pattern(2, 10_000)];
    lend(&mut a, to_b, &buffers);
    assert_eq!(a.net.bulk_counts().connections, 1);
    drop(b);
    assert!(within(30, || {
        a.poll();
        a.got.departures.len() == 1
    }));
    assert_eq!(a.net.bulk_counts().connections, 0);
    assert!(contents(&buffers[0]) == contents(&pattern(1, 10_000)));
}

/// Whether the devices are emulated by kernel threads, according to sysfs.
fn is_threads() -> bool {
    let devices = std::fs::read_dir("/sys/class/infiniband").unwrap();
    let mut names =
        devices.map(|device| std::fs::read_to_string(device.unwrap().path().join("node_desc")));
    names.all(|name| name.unwrap().trim() == "rxe")
        && crate::sys::process::kernel_is_at_least(6, 12)
}

#[test]
fn a_message_is_read_by_its_receiver_where_that_helps() {
    let Some(ip) = address() else { return };
    const LEN: usize = 300_001;
    for read in [ReadPolicy::Always, ReadPolicy::Auto, ReadPolicy::Off] {
        let ((mut a, to_b), (mut b, to_a)) = pair_with(ip, read);
        for round in 0..4 {
            let (source, sink) = (pattern(round, LEN), OwnedBuffer::zeroed(LEN));
            let registered = a.net.register(to_b, LANE, &source.segments(), Purpose::Send);
            let wanted = match read {
                ReadPolicy::Always => true,
                ReadPolicy::Auto => is_threads(),
                ReadPolicy::Off => false,
            };
            assert_eq!(registered != Registered::No, wanted, "{read:?}");
            let Registered::Yes(Registration { key, .. }) = registered else { continue };
            // Reads two parts of it, the later one first.
            for (token, at) in [(1, 200_000), (2, 0)] {
                let part = sink.segments().slice(at, LEN - at);
                let from = Remote { key, offset: at as u64 };
                b.net.get(to_a, &part, &from, token).unwrap();
            }
            assert!(within(30, || {
                b.poll(); // a does not poll
                b.got.done.len() == 2
            }));
            assert_eq!(std::mem::take(&mut b.got.done), [1, 2]);
            assert!(contents(&sink) == contents(&source));
            a.net.invalidate(to_b, &key);
            a.poll();
        }
        assert_eq!((a.got.lost, b.got.lost), (0, 0));
    }
}
