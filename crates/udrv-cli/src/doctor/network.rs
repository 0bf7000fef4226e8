//! Interfaces, and the way to another node.

use super::Verdict::{Fail, Good, Note, Warn};
use super::{Finding, read};
use crate::Outcome;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(1);
/// Datagrams of one size that may be lost before the size counts as lost.
const TRIES: u32 = 3;
/// UDP payloads that are tried: of the smallest packet that every path carries (RFC 8200), of Ethernet, and of jumbo frames.
const PAYLOADS: [usize; 3] = [1232, 1472, 8972];
/// Datagrams by which losses are counted, how many of them are on their way at once, and their payload, which is none of
/// those above.
const PROBES: usize = 512;
const AT_ONCE: usize = 32;
const PROBE_BYTES: usize = 256;
/// Silence after which the rest of those is lost or late.
const SILENCE: Duration = Duration::from_millis(200);
/// Bytes of the echo over TCP.
const STREAM_BYTES: usize = 1 << 16;

pub(super) fn check() -> Vec<Finding> {
    let mut names: Vec<String> = std::fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names.iter().filter_map(|name| interface(name)).collect()
}

/// What an interface that is up is like.
fn interface(name: &str) -> Option<Finding> {
    let file = |what: &str| read(&format!("/sys/class/net/{name}/{what}"));
    if file("carrier").as_deref() != Some("1") {
        return None;
    }
    let mtu = file("mtu").unwrap_or_default();
    let speed = file("speed").and_then(|mbit| mbit.parse::<i64>().ok()).filter(|mbit| *mbit > 0);
    let speed = speed.map_or(String::new(), |mbit| format!(", {mbit} Mbit/s"));
    Some(Finding::new("interface", Good, format!("{name}: MTU {mtu}{speed}")))
}

/// The way to `host`, where `udrv doctor --listen` should run.
pub(super) fn check_peer(host: &str, port: u16) -> Vec<Finding> {
    let address = match (host, port).to_socket_addrs().map(|mut found| found.next()) {
        Ok(Some(address)) => address,
        Ok(None) => return vec![Finding::new("peer", Fail, format!("{host} has no address"))],
        Err(error) => return vec![Finding::new("peer", Fail, format!("{host}: {error}"))],
    };
    let mut findings = vec![route(address)];
    findings.extend(by_udp(address).unwrap_or_else(|error| {
        let finding = Finding::new("peer UDP", Fail, format!("{address}: {error}"));
        vec![finding.remedy("udrv doctor --listen there; a firewall has to pass UDP between all ports of net.ipv4.ip_local_port_range")]
    }));
    findings.push(by_tcp(address).unwrap_or_else(|error| {
        Finding::new("peer TCP", Warn, format!("{address}: {error}; long messages go by UDP"))
            .remedy("let the firewall pass TCP between the same ports")
    }));
    findings
}

fn any_of(family: IpAddr) -> SocketAddr {
    match family {
        IpAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        IpAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

fn route(to: SocketAddr) -> Finding {
    let from = UdpSocket::bind(any_of(to.ip())).and_then(|socket| {
        socket.connect(to)?;
        socket.local_addr()
    });
    match from {
        Ok(from) => {
            Finding::new("peer", Note, format!("{} is reached from {}", to.ip(), from.ip()))
        }
        Err(error) => {
            Finding::new("peer", Fail, format!("{}: {error}", to.ip())).remedy("ip route get")
        }
    }
}

/// Which datagrams come back, and how many do not.
fn by_udp(to: SocketAddr) -> std::io::Result<Vec<Finding>> {
    let socket = UdpSocket::bind(any_of(to.ip()))?;
    socket.connect(to)?;
    let (mut longest, mut round) = (0, Duration::MAX);
    for payload in PAYLOADS {
        match (0..TRIES).find_map(|_| echo(&socket, payload).ok()) {
            Some(took) => (longest, round) = (payload, round.min(took)),
            None if longest == 0 => {
                return Err(std::io::Error::new(ErrorKind::TimedOut, "no datagram comes back"));
            }
            None => break,
        }
    }
    let says = format!(
        "datagrams of {longest} bytes come back, the fastest after {} us",
        round.as_micros()
    );
    Ok(vec![Finding::new("peer UDP", Good, says), of_loss(lost(&socket)?)])
}

fn of_loss(lost: usize) -> Finding {
    let says = format!("{lost} of {PROBES} datagrams did not come back");
    if lost == 0 {
        return Finding::new("peer loss", Good, says);
    }
    let percent = 100.0 * lost as f64 / PROBES as f64;
    Finding::new(
        "peer loss",
        Warn,
        format!("{says} ({percent:.1} %): the way there or back loses packets"),
    )
    .remedy("ip -s link and ethtool -S on both nodes; net.core.rmem_max there; cables, switches")
}

/// How many of some numbered datagrams do not come back.
fn lost(socket: &UdpSocket) -> std::io::Result<usize> {
    let (mut back, mut buffer) = ([false; PROBES], [0; PROBE_BYTES + 1]);
    for first in (0..PROBES).step_by(AT_ONCE) {
        let batch = first..first + AT_ONCE;
        for number in batch.clone() {
            let mut probe = [0; PROBE_BYTES];
            probe[..2].copy_from_slice(&(number as u16).to_le_bytes());
            socket.send(&probe)?;
        }
        let is_last = batch.end == PROBES;
        socket.set_read_timeout(Some(if is_last { PATIENCE } else { SILENCE }))?;
        // Those of earlier batches may be late.
        while !back.iter().take(batch.end).skip(if is_last { 0 } else { first }).all(|back| *back) {
            let Ok(len) = socket.recv(&mut buffer) else { break };
            let number = usize::from(u16::from_le_bytes([buffer[0], buffer[1]]));
            if let Some(back) = back.get_mut(number).filter(|_| len == PROBE_BYTES) {
                *back = true;
            }
        }
    }
    Ok(back.iter().filter(|back| !**back).count())
}

/// One datagram there and back. Fragments do not count: the socket forbids them.
fn echo(socket: &UdpSocket, payload: usize) -> std::io::Result<Duration> {
    forbid_fragments(socket);
    socket.set_read_timeout(Some(PATIENCE))?;
    let begun = Instant::now();
    socket.send(&vec![payload as u8; payload])?;
    let mut buffer = vec![0; payload + 1];
    loop {
        // What came late is of another size.
        if socket.recv(&mut buffer)? == payload {
            return Ok(begun.elapsed());
        }
        if begun.elapsed() > PATIENCE {
            return Err(ErrorKind::TimedOut.into());
        }
    }
}

#[allow(unsafe_code)] // a socket option
fn forbid_fragments(socket: &UdpSocket) {
    use std::os::fd::AsRawFd;
    let is_v6 = socket.local_addr().is_ok_and(|address| address.is_ipv6());
    let (level, option) = if is_v6 {
        (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER)
    } else {
        (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER)
    };
    let value = libc::IP_PMTUDISC_DO;
    // SAFETY: an open socket and a live integer.
    unsafe {
        let size = size_of_val(&value) as libc::socklen_t;
        libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), size)
    };
}

fn by_tcp(to: SocketAddr) -> std::io::Result<Finding> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&[7; STREAM_BYTES])?;
    let mut back = vec![0; STREAM_BYTES];
    stream.read_exact(&mut back)?;
    Ok(Finding::new("peer TCP", Good, format!("{STREAM_BYTES} bytes come back")))
}

/// Sends back what arrives.
pub(super) fn listen(port: u16) -> Outcome {
    let at = SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, port));
    let open = |at| Ok::<_, std::io::Error>((UdpSocket::bind(at)?, TcpListener::bind(at)?));
    let v4 = SocketAddr::from((std::net::Ipv4Addr::UNSPECIFIED, port));
    let (datagrams, streams) =
        open(at).or_else(|_| open(v4)).map_err(|error| format!("port {port}: {error}"))?;
    println!("listening on port {port}, UDP and TCP; on the other node: udrv doctor --peer HOST");
    std::thread::spawn(move || {
        for stream in streams.incoming().flatten() {
            std::thread::spawn(move || echo_stream(stream));
        }
    });
    let mut buffer = vec![0; 1 << 16];
    loop {
        let (len, from) = datagrams.recv_from(&mut buffer).map_err(|error| error.to_string())?;
        let _ = datagrams.send_to(buffer.get(..len).unwrap_or_default(), from);
    }
}

/// Sends back one transfer, in a bounded time.
fn echo_stream(mut stream: TcpStream) {
    let mut buffer = vec![0; STREAM_BYTES];
    let _ = stream
        .set_read_timeout(Some(PATIENCE))
        .and_then(|()| stream.set_write_timeout(Some(PATIENCE)))
        .and_then(|()| stream.read_exact(&mut buffer))
        .and_then(|()| stream.write_all(&buffer));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_and_bytes_come_back() {
        // Another test may be given a port before it is listened on.
        let verdicts_at = || {
            let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            std::thread::spawn(move || listen(port));
            let begun = Instant::now();
            loop {
                let found = check_peer("127.0.0.1", port);
                let verdicts: Vec<_> = found.iter().map(|finding| finding.verdict).collect();
                if verdicts == [Note, Good, Good, Good] || begun.elapsed() > Duration::from_secs(8)
                {
                    break verdicts;
                }
            }
        };
        assert!((0..4).any(|_| verdicts_at() == [Note, Good, Good, Good]));
    }

    #[test]
    fn packets_that_do_not_come_back_are_counted() {
        let echo = UdpSocket::bind("127.0.0.1:0").unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(echo.local_addr().unwrap()).unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 1024];
            while let Ok((len, from)) = echo.recv_from(&mut buffer) {
                // Every 64th is lost, and every second one comes twice.
                let copies = if buffer[0] % 64 == 3 { 0 } else { 1 + buffer[0] % 2 };
                for _ in 0..copies {
                    let _ = echo.send_to(&buffer[..len], from);
                }
            }
        });
        // A busy machine loses none of the others: so few fit into a socket's buffer.
        assert_eq!(lost(&socket).unwrap(), PROBES / 64);
        let finding = of_loss(8);
        assert_eq!(finding.verdict, Warn);
        assert!(finding.says.starts_with("8 of 512 datagrams did not come back (1.6 %)"));
    }

    #[test]
    fn silence_is_a_failure() {
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let found = check_peer("127.0.0.1", silent.local_addr().unwrap().port());
        let verdicts: Vec<_> = found.iter().map(|finding| finding.verdict).collect();
        assert_eq!(verdicts, [Note, Fail, Warn]);
    }
}
