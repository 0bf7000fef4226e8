use super::*;
use crate::sys::event::wait_readable;
use std::io::IoSlice;

fn addresses() -> impl Iterator<Item = SocketAddr> {
    ["127.0.0.1:0", "[::1]:0"]
        .into_iter()
        .map(|text| text.parse().unwrap())
        .filter(|address| UdpSocket::bind(address).is_ok())
}

fn pair(address: &SocketAddr) -> (UdpPort, UdpPort) {
    (UdpPort::bind(address).unwrap(), UdpPort::bind(address).unwrap())
}

fn to(port: &UdpPort) -> Destination {
    Destination::new(&port.local_addr().unwrap())
}

/// Everything that arrives until there are `want` datagrams, or no datagram for half a second.
fn receive(port: &mut UdpPort, want: usize) -> Vec<(SocketAddr, Vec<u8>, bool)> {
    let mut got = Vec::new();
    while got.len() < want && wait_readable(port.fd(), 500) == Ok(true) {
        port.receive_batch(|from, bytes, ce| got.push((from, bytes.to_vec(), ce)));
    }
    got
}

/// Sends all of `packets`, and receives them.
fn exchange(from: &mut UdpPort, into: &mut UdpPort, packets: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let slices: Vec<IoSlice<'_>> = packets.iter().map(|p| IoSlice::new(p)).collect();
    let source = from.local_addr().unwrap();
    let destination = to(into);
    let (mut sent, mut got) = (0, Vec::new());
    while got.len() < packets.len() {
        if sent < packets.len() {
            sent += from.send_batch(&destination, &slices[sent..]).unwrap();
        }
        let before = got.len();
        for (address, bytes, ce) in receive(into, 1) {
            assert_eq!((address, ce), (source, false));
            got.push(bytes);
        }
        assert!(got.len() > before || sent < packets.len(), "{} arrived", got.len());
    }
    got
}

/// `n` packets of `len` bytes and one of `last`, all different.
fn packets(n: usize, len: usize, last: usize) -> Vec<Vec<u8>> {
    let packet = |i: usize, len: usize| (0..len).map(|at| (at + 31 * i) as u8).collect();
    let mut all: Vec<Vec<u8>> = (0..n).map(|i| packet(i, len)).collect();
    if last > 0 {
        all.push(packet(n, last));
    }
    all
}

#[test]
fn datagrams_arrive_as_they_were_sent() {
    for address in addresses() {
        for gso in [true, false] {
            let (a, mut b) = pair(&address);
            let mut a = if gso { a } else { a.without_gso() };
            for (n, len, last) in [
                (1, 1, 0),
                (1, 65_000, 0),
                (2, 100, 1),
                (64, 1472, 7),
                (65, 8, 0),
                (700, 1000, 999),
            ] {
                let packets = packets(n, len, last);
                assert!(exchange(&mut a, &mut b, &packets) == packets, "{n} {len} {last} {gso}");
            }
            assert_eq!((b.losses().truncated, b.losses().overflowed), (0, 0));
            assert_eq!(a.send_batch(&to(&b), &[]), Ok(0));
            assert_eq!(b.receive_batch(|_, _, _| panic!("more arrived")), 0);
        }
    }
}

#[test]
fn the_kernel_cuts_and_joins() {
    for address in addresses() {
        let (mut a, mut b) = pair(&address);
        if !a.gso() || !b.gro() {
            continue;
        }
        let packets = packets(40, 1400, 3);
        let slices: Vec<IoSlice<'_>> = packets.iter().map(|p| IoSlice::new(p)).collect();
        assert_eq!(a.send_batch(&to(&b), &slices), Ok(41));
        assert_eq!(wait_readable(b.fd(), 500), Ok(true));
        assert_eq!(b.receive_batch(|_, _, _| {}), 41, "one message over the loopback interface");
        // A receiver that does not ask for joined datagrams gets them one by one.
        let plain = UdpSocket::bind(address).unwrap();
        plain.set_read_timeout(Some(crate::patience::seconds(1))).unwrap();
        let there = Destination::new(&plain.local_addr().unwrap());
        assert_eq!(a.send_batch(&there, &slices), Ok(41));
        for packet in &packets {
            let mut bytes = [0; 2000];
            let (len, _) = plain.recv_from(&mut bytes).unwrap();
            assert_eq!(bytes[..len], packet[..]);
        }
    }
}

#[test]
fn a_burst_beyond_the_buffer_is_counted() {
    let (mut a, mut b) = pair(&"127.0.0.1:0".parse().unwrap());
    let there = to(&b);
    let packet = vec![7; 1000];
    let slices = vec![IoSlice::new(&packet); 64];
    let many = 2 * b.receive_buffer() / 1000;
    let mut sent = 0;
    while sent < many {
        sent += a.send_batch(&there, &slices).unwrap();
    }
    let got = receive(&mut b, usize::MAX).len();
    assert!(0 < got && got < sent);
    // The kernel reports the error with the next datagram.
    a.send_batch(&there, &[IoSlice::new(&packet)]).unwrap();
    assert_eq!(receive(&mut b, 1).len(), 1);
    assert!(b.losses().overflowed > 0);
}

#[test]
fn a_closed_port_shows_in_the_error_queue_and_nothing_else_is_lost() {
    for address in addresses() {
        let (mut a, mut b) = pair(&address);
        let gone = UdpPort::bind(&address).unwrap().local_addr().unwrap();
        let nobody = Destination::new(&gone);
        assert_eq!(a.drain_errors(|_, _| panic!("no error yet")), 0);
        for batch in [1, 4] {
            let packets = packets(batch, 50, 0);
            let slices: Vec<IoSlice<'_>> = packets.iter().map(|p| IoSlice::new(p)).collect();
            assert_eq!(a.send_batch(&nobody, &slices), Ok(batch));
            // The error is pending now; the next packets go to another port and must arrive.
            assert_eq!(exchange(&mut a, &mut b, &packets), packets);
            assert!(a.errors_pending());
            let mut told = Vec::new();
            assert!(a.drain_errors(|error, quote| told.push((error, quote.to_vec()))) > 0);
            let refused =
                PortError { to: gone, errno: Errno(libc::ECONNREFUSED), local: false, mtu: 0 };
            assert!(told.iter().all(|(error, _)| *error == refused), "{told:?}");
            assert!(
                told.iter().all(|(_, quote)| packets.iter().any(|sent| quote.starts_with(sent)))
            );
            assert!(!a.errors_pending());
        }
        // A receiver notices it as well.
        assert_eq!(a.send_batch(&nobody, &[IoSlice::new(b"x")]), Ok(1));
        assert_eq!(a.receive_batch(|_, _, _| panic!("nothing was sent here")), 0);
        assert!(a.errors_pending());
        assert_eq!(a.drain_errors(|error, _| assert_eq!(error.to, gone)), 1);
    }
}

#[test]
fn errors_that_nobody_announced_are_found_by_looking() {
    let (mut a, _b) = pair(&"127.0.0.1:0".parse().unwrap());
    for _ in 0..200 {
        if a.errors_pending() {
            return;
        }
        a.receive_batch(|_, _, _| {});
    }
    panic!("never looked");
}

#[test]
fn a_packet_that_is_too_long_is_refused_and_no_reason_to_stop_cutting() {
    for address in addresses() {
        let (mut a, b) = pair(&address);
        let long = vec![0; 65_535];
        let refused = a.send_batch(&to(&b), &[IoSlice::new(&long)]);
        assert_eq!(refused, Err(Errno(libc::EMSGSIZE)));
        let gso = a.gso();
        let both = [IoSlice::new(&long), IoSlice::new(&long)];
        assert_eq!(a.send_batch(&to(&b), &both), Err(Errno(libc::EMSGSIZE)));
        assert_eq!(a.gso(), gso);
    }
}

#[test]
fn a_device_that_cannot_cut_gets_datagrams_one_by_one() {
    let (mut a, mut b) = pair(&"127.0.0.1:0".parse().unwrap());
    // The kernel splits only what it may checksum (udp(7), UDP_SEGMENT).
    set(a.fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    let packets = packets(100, 500, 20);
    assert_eq!(exchange(&mut a, &mut b, &packets), packets);
    assert!(!a.gso());
    // It is tried again, ever more rarely.
    let there = to(&b);
    let mut exchange_until = |a: &mut UdpPort, gso| {
        let both = [IoSlice::new(b"one"), IoSlice::new(b"two")];
        let batches =
            (0..1000).take_while(|_| a.gso() != gso && a.send_batch(&there, &both) == Ok(2));
        let batches = batches.count();
        assert!(receive(&mut b, 2 * batches).len() == 2 * batches);
        batches
    };
    let pauses = [(); 3].map(|()| {
        let batches = exchange_until(&mut a, true);
        assert_eq!(exchange_until(&mut a, false), 1);
        batches
    });
    assert!(pauses[0] > 0 && pauses[1..] == [32, 64], "{pauses:?}");
    set(a.fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 0).unwrap();
    assert_eq!(exchange_until(&mut a, true), 128);
    assert_eq!(exchange(&mut a, &mut b, &packets), packets);
    assert!(a.gso(), "the device can, now");
    // An address without a receiver is no reason to stop splitting.
    let (mut a, _) = pair(&"127.0.0.1:0".parse().unwrap());
    let (gso, nowhere) = (a.gso(), Destination::new(&"127.0.0.1:0".parse().unwrap()));
    let both = [IoSlice::new(b"one"), IoSlice::new(b"two")];
    assert_eq!(a.send_batch(&nowhere, &both), Err(Errno(libc::EINVAL)));
    assert_eq!(a.gso(), gso);
}

#[test]
fn congestion_marks_are_seen() {
    for address in addresses() {
        let (mut a, mut b) = pair(&address);
        assert!(a.ecn() && b.ecn());
        let v6 = address.is_ipv6();
        let (level, name) = if v6 {
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)
        } else {
            (libc::IPPROTO_IP, libc::IP_TOS)
        };
        for (ecn, congested) in [(3, true), (2, false), (1, false), (0, false), (0x83, true)] {
            set(a.fd(), level, name, ecn).unwrap();
            assert_eq!(a.send_batch(&to(&b), &[IoSlice::new(b"marked")]), Ok(1));
            let got = receive(&mut b, 1);
            assert_eq!((got.len(), got[0].2), (1, congested), "{ecn}");
        }
    }
}

#[test]
fn strange_datagrams_do_no_harm() {
    let (_, mut b) = pair(&"127.0.0.1:0".parse().unwrap());
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    let there = b.local_addr().unwrap();
    stranger.send_to(&[], there).unwrap();
    stranger.send_to(&[1; 65_507], there).unwrap();
    assert_eq!(receive(&mut b, 1).iter().map(|(_, bytes, _)| bytes.len()).max(), Some(65_507));
}

#[test]
fn ports_are_ours_alone() {
    for address in addresses() {
        let port = UdpPort::bind(&address).unwrap();
        let taken = port.local_addr().unwrap();
        assert_ne!(taken.port(), 0);
        assert_eq!(UdpPort::bind(&taken).unwrap_err(), Errno(libc::EADDRINUSE));
        assert!(port.receive_buffer() > 100_000);
    }
    let strange = "203.0.113.9:0".parse().unwrap();
    assert_eq!(UdpPort::bind(&strange).unwrap_err(), Errno(libc::EADDRNOTAVAIL));
}

/// `cargo test --release --lib sys::udp -- --ignored --nocapture`: what the calls cost, ns.
#[test]
#[ignore = "a measurement"]
fn costs() {
    let median = |what: &str, per: usize, mut run: Box<dyn FnMut() + '_>| {
        let mut times: Vec<f64> = (0..2000)
            .map(|_| {
                let start = std::time::Instant::now();
                for _ in 0..10 {
                    run();
                }
                start.elapsed().as_nanos() as f64 / (10 * per) as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{what:44} {:8.0} ns, p90 {:8.0}", times[1000], times[1800]);
    };
    for address in addresses() {
        println!("{address}");
        let (mut a, mut b) = pair(&address);
        let there = to(&b);
        median(
            "receive, nothing there",
            1,
            Box::new(|| assert_eq!(b.receive_batch(|_, _, _| {}), 0)),
        );
        for len in [8, 1472] {
            let packet = vec![1; len];
            median(
                &format!("one packet of {len}: send and receive"),
                1,
                Box::new(|| {
                    a.send_batch(&there, &[IoSlice::new(&packet)]).unwrap();
                    while b.receive_batch(|_, _, _| {}) > 0 {}
                }),
            );
        }
        for (gso, gro) in [(true, true), (true, false), (false, true), (false, false)] {
            a.splitting = Splitting::new(gso);
            set(b.fd(), libc::SOL_UDP, libc::UDP_GRO, i32::from(gro)).unwrap();
            let packet = vec![1; 1472];
            let slices = vec![IoSlice::new(&packet); 64];
            let (mut send_ns, mut batches) = (0, 0);
            median(
                &format!("64 of 1472, gso {gso} gro {gro}: each"),
                64,
                Box::new(|| {
                    let start = std::time::Instant::now();
                    let mut sent = 0;
                    while sent < 64 {
                        sent += a.send_batch(&there, &slices[sent..]).unwrap();
                    }
                    send_ns += start.elapsed().as_nanos();
                    batches += 64;
                    let mut got = 0;
                    while got < 64 {
                        got += b.receive_batch(|_, _, _| {});
                    }
                }),
            );
            println!("{:44} {:8.0} ns", "  of it sending", send_ns as f64 / f64::from(batches));
        }
    }
}
