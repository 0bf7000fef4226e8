//! With a device these tests meet it; without one they have nothing to do, unless UDRV_TEST_RDMA=1
//! says that there has to be one.

mod rc;

use super::*;
use crate::sys::Errno;
use crate::sys::event::wait_readable;
use std::io::IoSlice;

/// A device, an active port of it, and an address of that port.
fn device() -> Option<(OpenDevice, Port, Gid)> {
    let found = present().then(|| {
        let list = DeviceList::new().unwrap();
        list.iter().filter(|device| device.is_adapter()).find_map(|device| {
            let device = device.open().unwrap();
            let port = device.port(1).ok().filter(|port| port.active)?;
            let gids = device.gids(1).unwrap();
            // Not a link-local one.
            let gid = gids.into_iter().find(|gid| gid.raw[0] != 0xfe)?;
            Some((device, port, gid))
        })
    });
    let found = found.flatten();
    let wanted = std::env::var_os("UDRV_TEST_RDMA").is_some();
    assert!(found.is_some() || !wanted, "no RDMA device");
    found
}

const SETTINGS: UdSettings = UdSettings {
    port: 1,
    ip: Some(IpVersion::V4),
    mtu: 1024,
    qkey: 0x1234_5678,
    send_slots: 64,
    receive_slots: 64,
    newer: true,
};

/// Two ports on one device, and the address of both.
fn pair(settings: UdSettings) -> Option<(UdPort, UdPort, Ah)> {
    let (device, _, gid) = device()?;
    let open = || UdPort::open(&device, settings).unwrap();
    let (a, b) = (open(), open());
    let to = AhSettings { port: 1, gid: Some((gid.raw, gid.index)), lid: 0, service_level: 0 };
    let ah = a.address(&to).unwrap();
    Some((a, b, ah))
}

/// What arrives within a second of silence, at most `most`.
fn arrived(port: &mut UdPort, most: usize) -> Vec<(u32, Vec<u8>)> {
    let mut all = Vec::new();
    while all.len() < most {
        let n = port.receive(|arrival| all.push((arrival.source, arrival.bytes.to_vec()))).unwrap();
        if n == 0 && port.sleep() && wait_readable(port.fd(), 1000) != Ok(true) {
            break;
        }
    }
    all
}

#[test]
fn without_a_device_nothing_is_loaded() {
    if !present() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("libibverbs"));
    }
}

#[test]
fn a_device_tells_of_itself() {
    let Some((device, port, gid)) = device() else { return };
    let facts = device.facts().unwrap();
    assert!(facts.ports >= 1 && facts.max_requests >= 64 && facts.max_completions >= 128);
    assert!(port.mtu >= 256 && port.speed_bps > 0, "{port:?}");
    assert!(gid.kind != GidKind::RoceV1);
    assert_eq!(device.port(200).map(|_| ()), Err(Errno(libc::EINVAL)));
}

#[test]
fn datagrams_arrive_as_they_were_sent() {
    for newer in [true, false] {
        let Some((mut a, mut b, ah)) = pair(UdSettings { newer, ..SETTINGS }) else { return };
        assert!(newer || a.is_extended() == (false, false));
        let inline = a.inline_max();
        for round in 0..10u8 {
            let sizes = [1024, inline + 1, inline.max(1), 1];
            let packets = sizes.map(|size| vec![round ^ size as u8; size]);
            let slices = packets.each_ref().map(|packet| IoSlice::new(packet));
            assert_eq!(a.send(&ah, b.number(), &slices), Ok(4));
            let got = arrived(&mut b, 4);
            assert_eq!(got.len(), 4, "round {round}, newer {newer}");
            for ((source, bytes), packet) in got.iter().zip(&packets) {
                assert_eq!((*source, bytes), (a.number(), packet));
            }
        }
        let counts = a.counts();
        assert_eq!((counts.sent, counts.posts, b.counts().received), (40, 10, 40));
        assert_eq!(counts.inline, if inline > 0 { 20 } else { 0 });
    }
}

#[test]
fn a_sleeper_is_woken_once() {
    let Some((mut a, mut b, ah)) = pair(SETTINGS) else { return };
    for _ in 0..5 {
        assert!(b.sleep());
        assert_eq!(wait_readable(b.fd(), 0), Ok(false));
        assert_eq!(a.send(&ah, b.number(), &[IoSlice::new(b"wake")]), Ok(1));
        assert_eq!(wait_readable(b.fd(), 2000), Ok(true));
        assert_eq!(arrived(&mut b, 1).len(), 1);
        assert_eq!(wait_readable(b.fd(), 0), Ok(false));
    }
    // What arrives before it sleeps is found by it.
    assert_eq!(a.send(&ah, b.number(), &[IoSlice::new(b"early")]), Ok(1));
    let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while b.sleep() && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    assert!(!b.sleep());
    assert_eq!(arrived(&mut b, 1).len(), 1);
}

#[test]
fn what_has_no_room_is_lost_and_the_rest_goes_on() {
    let Some((mut a, mut b, ah)) = pair(SETTINGS) else { return };
    let packet = [7; 1000];
    let mut sent = 0;
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while sent < 1000 && std::time::Instant::now() < end {
        let slices = [IoSlice::new(&packet); 40];
        sent += a.send(&ah, b.number(), &slices).unwrap();
    }
    assert!(sent >= 1000, "the ring of sends goes round");
    let got = arrived(&mut b, 1000).len();
    assert!((64..1000).contains(&got), "{got}");
    for _ in 0..200 {
        assert_eq!(a.send(&ah, b.number(), &[IoSlice::new(b"next")]), Ok(1));
        assert_eq!(arrived(&mut b, 1).len(), 1, "the ring of receives goes round");
    }
}

#[test]
fn another_key_keeps_strangers_out() {
    let Some((mut a, _, ah)) = pair(SETTINGS) else { return };
    let stranger = UdSettings { qkey: 0x0765_4321, ..SETTINGS };
    let Some((_, mut b, _)) = pair(stranger) else { return };
    assert_eq!(a.send(&ah, b.number(), &[IoSlice::new(b"let me in")]), Ok(1));
    assert_eq!(arrived(&mut b, 1), []);
}

#[test]
#[allow(unsafe_code)]
fn a_forked_child_ends_nothing() {
    let Some((mut a, mut b, ah)) = pair(SETTINGS) else { return };
    // SAFETY: the child drops what it has and leaves without returning.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop((a, b, ah));
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: our child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(a.send(&ah, b.number(), &[IoSlice::new(b"still here")]), Ok(1));
    assert_eq!(arrived(&mut b, 1).len(), 1);
}
