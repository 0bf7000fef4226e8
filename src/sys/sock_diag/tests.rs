use super::*;
use std::net::TcpStream;

const WAYS: [fn(Protocol, &SocketAddr, &SocketAddr) -> Owner; 2] = [owner, files::owner];

#[test]
fn udp_sockets_have_an_owner_while_they_are_open() {
    let me = Owner::User(process::effective_uid());
    for bound in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0"] {
        let Ok(socket) = UdpSocket::bind(bound) else { continue };
        let mut at = socket.local_addr().unwrap();
        if at.ip().is_unspecified() {
            let loopback = if at.is_ipv4() { "127.0.0.1" } else { "::1" };
            at.set_ip(loopback.parse().unwrap());
        }
        let far = SocketAddr::new(at.ip(), 9);
        for way in WAYS {
            assert_eq!(way(Protocol::Udp, &at, &far), me, "{bound}");
        }
        drop(socket);
        for way in WAYS {
            assert_eq!(way(Protocol::Udp, &at, &far), Owner::Nobody, "{bound}");
        }
    }
}

#[test]
fn the_socket_is_the_one_that_the_packet_would_reach() {
    let one = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = one.local_addr().unwrap();
    let other = SocketAddr::new("127.0.0.77".parse().unwrap(), at.port());
    for way in WAYS {
        assert_eq!(way(Protocol::Udp, &other, &at), Owner::Nobody);
    }
    // It is connected to another port, so it gets nothing from us.
    one.connect("127.0.0.1:9").unwrap();
    let far = SocketAddr::new(at.ip(), 10);
    for way in WAYS {
        assert_eq!(way(Protocol::Udp, &at, &far), Owner::Nobody);
        assert_ne!(way(Protocol::Udp, &at, &SocketAddr::new(at.ip(), 9)), Owner::Nobody);
    }
}

#[test]
fn both_ends_of_a_connection_and_its_listener_have_an_owner() {
    let me = Owner::User(process::effective_uid());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let stream = TcpStream::connect(at).unwrap();
    let from = stream.local_addr().unwrap();
    let far = SocketAddr::new(at.ip(), 9);
    let (taken, _) = listener.accept().unwrap();
    for way in WAYS {
        assert_eq!(way(Protocol::Tcp, &from, &at), me, "the side that has connected");
        assert_eq!(way(Protocol::Tcp, &at, &from), me, "the side that has accepted");
        assert_eq!(way(Protocol::Tcp, &at, &far), me, "the listener");
    }
    drop((stream, taken, listener));
    for way in WAYS {
        assert_eq!(way(Protocol::Tcp, &from, &at), Owner::Nobody);
        assert_eq!(way(Protocol::Tcp, &at, &far), Owner::Nobody);
    }
}

#[test]
fn addresses_of_this_host_are_known() {
    let ask = |text: &str| is_local(text.parse().unwrap(), 0);
    for mine in ["127.0.0.1", "127.200.3.4"] {
        assert_eq!(ask(mine), Some(true), "{mine}");
    }
    assert_ne!(ask("203.0.113.9"), Some(true));
    for interface in crate::sys::net::interfaces() {
        assert_eq!(is_local(interface.ip, interface.scope), Some(true), "{interface:?}");
    }
}

#[test]
fn a_kernel_without_sock_diag_is_asked_by_files() {
    let mut kernel = Kernel::default();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = socket.local_addr().unwrap();
    let me = Owner::User(process::effective_uid());
    assert_eq!(kernel.owner(Protocol::Udp, &at, &at), me);
    assert_eq!(kernel.ways[0], Some(Way::Files));
}

#[test]
fn a_thread_in_another_network_namespace_is_answered_there() {
    let known = |socket: &UdpSocket| {
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, socket.local_addr().unwrap().port()));
        owner(Protocol::Udp, &at, &at) == Owner::User(process::effective_uid())
    };
    let here = UdpSocket::bind("0.0.0.0:0").unwrap();
    assert!(known(&here));
    let elsewhere = std::thread::spawn(move || {
        // SAFETY: an integer argument; changes this thread alone.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return eprintln!("skipped: takes root to make a network namespace");
        }
        assert!(known(&UdpSocket::bind("0.0.0.0:0").unwrap()));
    });
    elsewhere.join().unwrap();
    assert!(known(&here));
}
