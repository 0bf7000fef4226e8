//! These tests use a device. Without one they do nothing, unless UDRV_TEST_RDMA=1 says that a device must
//! exist.

mod rc;
mod sharing;

use super::*;
use crate::sys::Errno;
use crate::sys::event::wait_readable;
use crate::sys::packets::Pool;
use std::io::IoSlice;

/// A device, one of its active ports, and an address of that port.
fn device() -> Option<(OpenDevice, Port, Gid)> {
    let found = present().then(|| {
        let list = DeviceList::new().unwrap();
        list.iter().filter(|device| device.is_adapter().is_ok()).find_map(|device| {
            let device = device.open().unwrap();
            let port = device.port(1).ok().filter(|port| port.active)?;
            let gids = device.gids(1).unwrap();
            // Not a link-local one, and none of RoCE v1, which may come first.
            let usable = |gid: &Gid| gid.raw[0] != 0xfe && gid.kind != GidKind::RoceV1;
            let gid = gids.into_iter().find(usable)?;
            Some((device, port, gid))
        })
    });
    let found = found.flatten();
    let wanted = std::env::var_os("UDRV_TEST_RDMA").is_some();
    assert!(found.is_some() || !wanted, "no RDMA device");
    if found.is_none() {
        eprintln!("skipped: no RDMA device");
    }
    found
}

const SETTINGS: UdSettings = UdSettings {
    port: 1,
    pkey_index: 0,
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
    let to = AhSettings {
        port: 1,
        gid: Some((gid.raw, gid.index)),
        lid: 0,
        marks: Marks::default(),
        flow_label: 1,
    };
    let ah = a.addresses().make(&to).unwrap();
    Some((a, b, ah))
}

/// The datagrams that arrive until a second of silence, at most `most`.
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
    if present() {
        return eprintln!("skipped: there is an RDMA device");
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("libibverbs"));
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
fn a_packet_made_in_a_pool_is_sent_from_there() {
    let Some((mut a, mut b, ah)) = pair(SETTINGS) else { return };
    let pool = Pool::new(1024).unwrap();
    a.lend(pool.clone());
    let mut packet = pool.cut().unwrap();
    // Not from the pool, so these are copied.
    let other = [7; 1000];
    for round in 0..100u8 {
        packet.resize(1024);
        packet.fill(round);
        packet.resize(1024 - usize::from(round));
        let slices = [IoSlice::new(&packet), IoSlice::new(&other)];
        assert_eq!(a.send(&ah, b.number(), &slices), Ok(2));
        packet.note_sent();
        let got = arrived(&mut b, 2);
        assert_eq!(got[0], (a.number(), packet.to_vec()), "round {round}");
        assert_eq!(got[1].1, other);
    }
    let counts = a.counts();
    assert_eq!((counts.sent, counts.inline, counts.lent), (200, 0, 100));
    // No completion covers the last packets sent; the end of the queue pair does.
    a.reap().unwrap();
    assert!(!packet.is_read());
    assert_eq!(pool.posted(), 200);
    drop(a);
    assert!(packet.is_read());

    // The next queue pair continues the count.
    let Some((mut a, mut b, ah)) = pair(SETTINGS) else { return };
    a.lend(pool.clone());
    assert_eq!(a.send(&ah, b.number(), &[IoSlice::new(&packet)]), Ok(1));
    packet.note_sent();
    assert_eq!(arrived(&mut b, 1)[0].1, packet.to_vec());
    a.reap().unwrap();
    assert!(pool.posted() == 201 && !packet.is_read());
    for _ in 0..31 {
        assert_eq!(a.send(&ah, b.number(), &[IoSlice::new(&other)]), Ok(1));
    }
    assert_eq!(arrived(&mut b, 31).len(), 31);
    a.reap().unwrap();
    assert!(packet.is_read());
}

#[test]
fn copies_have_fewer_slots_and_all_leave_in_time() {
    let settings = UdSettings { send_slots: 256, receive_slots: 1024, ..SETTINGS };
    let Some((mut a, mut b, ah)) = pair(settings) else { return };
    let (mut sent, mut got) = (0u32, Vec::new());
    for _ in 0..100_000 {
        let packets = [sent, sent + 1, sent + 2].map(|n| n.to_le_bytes().repeat(256));
        let slices = packets.each_ref().map(|packet| IoSlice::new(packet));
        sent += a.send(&ah, b.number(), &slices).unwrap() as u32;
        b.receive(|arrival| got.push(arrival.bytes.to_vec())).unwrap();
        if got.len() >= 1000 {
            break;
        }
    }
    assert!(got.len() >= 1000, "{} of {sent}", got.len());
    for (n, bytes) in got.iter().enumerate() {
        assert_eq!(*bytes, (n as u32).to_le_bytes().repeat(256));
    }
    assert_eq!((a.counts().lent, a.counts().inline), (0, 0));
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
    // `sleep` finds a datagram that arrives before it.
    assert_eq!(a.send(&ah, b.number(), &[IoSlice::new(b"early")]), Ok(1));
    let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while b.sleep() && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    assert!(!b.sleep());
    assert_eq!(arrived(&mut b, 1).len(), 1);
}

/// Bare messages of 136 bytes between two devices, and the same with receivers that call functions that do nothing, on
/// pages of their own, before they answer. An emulated processor looks up the target of each call and return, and
/// thereby evicts its translations of the kernel's code.
///
/// `scripts/lab.d/rdma-units bare_messages_and_calls --ignored --nocapture`
#[cfg(target_arch = "x86_64")]
#[test]
#[ignore = "a measurement"]
fn bare_messages_and_calls() {
    const PAGE: usize = 4096;
    const CALLS: usize = 4;
    const ROUNDS: usize = 2000;

    /// Pages of functions that return.
    fn functions(pages: usize) -> Vec<extern "C" fn()> {
        if pages == 0 {
            return Vec::new();
        }
        let (all, flags) = (pages * PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let rights = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        // SAFETY: a new mapping, which stays; filled with `ret` it is a function at every byte.
        unsafe {
            let at = libc::mmap(std::ptr::null_mut(), all, rights, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            std::ptr::write_bytes(at.cast::<u8>(), 0xc3, all);
            let function = |n: usize| at.cast::<u8>().add(n / CALLS * PAGE + n % CALLS * 64);
            (0..pages * CALLS).map(|n| std::mem::transmute(function(n))).collect()
        }
    }

    /// Answers every message, `ROUNDS` times; the side with `first` begins.
    fn play(first: bool, port: &mut UdPort, (ah, to): (&Ah, u32), functions: &[extern "C" fn()]) {
        let end = std::time::Instant::now() + crate::patience::seconds(20);
        // SAFETY: an empty set is valid; of this thread.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(usize::from(first), &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &set);
        }
        let message = [7; 136];
        for round in 0..ROUNDS {
            let mut got = 0;
            while got == 0 && !(first && round == 0) {
                got += port.receive(|_| ()).unwrap();
                assert!(got > 0 || std::time::Instant::now() < end, "round {round}");
            }
            functions.iter().for_each(|function| function());
            assert_eq!(port.send(ah, to, &[IoSlice::new(&message)]), Ok(1));
        }
    }

    let list = DeviceList::new().unwrap();
    let devices: Vec<_> =
        list.iter().filter(|d| d.is_adapter().is_ok()).map(|d| d.open().unwrap()).collect();
    let [here, there] = &devices[..] else { panic!("this is between two devices") };
    let gid = |device: &OpenDevice| {
        device.gids(1).unwrap().into_iter().find(|gid| gid.raw[0] != 0xfe).unwrap()
    };
    let (own, far) = (gid(here), gid(there));
    let open = |device| UdPort::open(device, SETTINGS).unwrap();
    let (mut a, mut b) = (open(here), open(there));
    let ah = |port: &UdPort, to: &Gid, index| {
        let gid = Some((to.raw, index));
        port.addresses()
            .make(&AhSettings { port: 1, gid, lid: 0, marks: Marks::default(), flow_label: 1 })
            .unwrap()
    };
    let (to_b, to_a) = (ah(&a, &far, own.index), ah(&b, &own, far.index));
    for _ in 0..3 {
        for pages in [0, 16, 48, 96] {
            let functions = functions(pages);
            let numbers = (a.number(), b.number());
            let begun = std::time::Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| play(true, &mut a, (&to_b, numbers.1), &functions));
                scope.spawn(|| play(false, &mut b, (&to_a, numbers.0), &functions));
            });
            let us = begun.elapsed().as_secs_f64() * 1e6 / (2 * ROUNDS) as f64;
            println!("{us:6.1} us one way with {:3} calls on {pages} pages", functions.len());
            // The last answer.
            assert_eq!(arrived(&mut a, 1).len(), 1);
        }
    }
}

#[test]
fn packets_without_room_are_lost_and_the_rest_goes_on() {
    let Some((mut a, mut b, ah)) = pair(SETTINGS) else { return };
    let packet = [7; 1000];
    let mut sent = 0;
    let end = std::time::Instant::now() + crate::patience::seconds(20);
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
    // SAFETY: the child drops its copies and exits without returning.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop((a, b, ah));
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(a.send(&ah, b.number(), &[IoSlice::new(b"still here")]), Ok(1));
    assert_eq!(arrived(&mut b, 1).len(), 1);
}
