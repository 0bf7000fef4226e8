//! The owner of a socket from the tables of /proc/net (proc(5)).

use crate::sys::errno::Result;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Which table of sockets to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protocol {
    Udp,
    /// Connections first, then listeners.
    Tcp,
}

/// The owner of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// The user that made it, as mapped into this process's user namespace; see [`super::user::whose`].
    User(u32),
    /// There is no such socket, or its process has closed it.
    Nobody,
    /// The kernel does not say.
    Unknown,
}

/// A socket that holds a UDP port: the address that it is bound to, and its user.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PortHolder {
    pub(crate) ip: IpAddr,
    pub(crate) uid: u32,
}

/// A table of the network namespace of this thread, which may differ from the first thread's.
fn table(name: &str) -> std::io::Result<String> {
    std::fs::read_to_string(format!("/proc/thread-self/net/{name}"))
}

/// The sockets of this network namespace that have a UDP port, at any address. Errors: those of reading the table.
pub(crate) fn udp_port_holders(port: u16) -> Result<Vec<PortHolder>> {
    // The table is missing without IPv6.
    let tables = [table("udp")?, table("udp6").unwrap_or_default()];
    let lines = tables.iter().flat_map(|table| table.lines()).filter_map(Line::read);
    let holders = lines.filter(|line| line.local.1 == port);
    Ok(holders.map(|line| PortHolder { ip: line.local.0, uid: line.uid }).collect())
}

/// The owner of the socket that receives packets from `remote` to `local`; unknown if the best matches differ in it.
pub(super) fn owner(protocol: Protocol, local: &SocketAddr, remote: &SocketAddr) -> Owner {
    let names = match protocol {
        Protocol::Udp => ["udp", "udp6"],
        Protocol::Tcp => ["tcp", "tcp6"],
    };
    let tables: Vec<String> = names.into_iter().filter_map(|name| table(name).ok()).collect();
    if tables.is_empty() {
        return Owner::Unknown;
    }
    find(tables.iter().flat_map(|table| table.lines()), local, remote)
}

/// One line of a table.
struct Line {
    local: (IpAddr, u16),
    remote: (IpAddr, u16),
    uid: u32,
    inode: u64,
}

impl Line {
    fn read(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (local, remote) = (end(words.next()?)?, end(words.next()?)?);
        let mut words = words.skip(4);
        let uid = words.next()?.parse().ok()?;
        let inode = words.nth(1)?.parse().ok()?;
        Some(Self { local, remote, uid, inode })
    }

    /// How well it matches; 0: not at all.
    fn fits(&self, local: &SocketAddr, remote: &SocketAddr) -> u32 {
        let one = |(ip, port): (IpAddr, u16), to: &SocketAddr| {
            let exact = ip == to.ip() && port == to.port();
            if exact { Some(1) } else { None }
        };
        let (any_here, no_peer) = (self.local.0.is_unspecified(), self.remote.1 == 0);
        let here = one(self.local, local)
            .or_else(|| (any_here && self.local.1 == local.port()).then_some(0));
        let there = one(self.remote, remote).or_else(|| no_peer.then_some(0));
        match (here, there) {
            (Some(here), Some(there)) => 1 + here + 2 * there,
            _ => 0,
        }
    }
}

fn find<'a>(
    lines: impl Iterator<Item = &'a str>,
    local: &SocketAddr,
    remote: &SocketAddr,
) -> Owner {
    let mut best = (0, Owner::Nobody);
    for line in lines.filter_map(Line::read) {
        let fits = line.fits(local, remote);
        // A socket without an inode belongs to no process.
        let owner = if line.inode == 0 { Owner::Nobody } else { Owner::User(line.uid) };
        if fits > best.0 {
            best = (fits, owner);
        } else if fits > 0 && fits == best.0 && owner != best.1 {
            best.1 = Owner::Unknown;
        }
    }
    best.1
}

/// Parses "0100007F:1F90": address words as in memory, in hexadecimal, and the port. IPv4-mapped IPv6 becomes IPv4.
fn end(text: &str) -> Option<(IpAddr, u16)> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| u32::from_str_radix(address.get(at..at + 8)?, 16).ok();
    if address.len() == 8 {
        return Some((Ipv4Addr::from(word(0)?.to_ne_bytes()).into(), port));
    }
    let mut bytes = [0; 16];
    for (n, to) in bytes.chunks_exact_mut(4).enumerate() {
        to.copy_from_slice(&word(8 * n)?.to_ne_bytes());
    }
    let ip = Ipv6Addr::from(bytes);
    Some((ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  10: 0100007F:1F90 00000000:0000 07 00000000:00000000 00:00000000 00000000  1001        0 4711 2 0000000000000000 0
  11: 0500007F:1F90 00000000:0000 07 00000000:00000000 00:00000000 00000000  1002        0 4712 2 0000000000000000 0
  12: 00000000:1F91 00000000:0000 07 00000000:00000000 00:00000000 00000000  1003        0 4713 2 0000000000000000 0
  13: 0100007F:1F92 0100007F:0009 07 00000000:00000000 00:00000000 00000000  1004        0 4714 2 0000000000000000 0
  14: 0100007F:1F93 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 0 2 0000000000000000 0
  15: 00000000000000000000000000000000:1F94 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000  1005        0 4715 2 0000000000000000 0
  16: 0000000000000000FFFF00000100007F:1F95 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000  1006        0 4716 2 0000000000000000 0
  17: 0100007F:1F96 00000000:0000 07 00000000:00000000 00:00000000 00000000  1001        0 4717 2 0000000000000000 0
  18: 0100007F:1F96 00000000:0000 07 00000000:00000000 00:00000000 00000000  1002        0 4718 2 0000000000000000 0
 nonsense 0100007F:1F97
";

    #[test]
    fn a_port_is_held_by_the_user_who_bound_it() {
        let uid = crate::sys::process::effective_uid();
        for any in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let any: SocketAddr = any.parse().unwrap();
            let Ok((socket, port)) = crate::sys::net::reserve_port(&any) else { continue };
            assert!(udp_port_holders(port).unwrap().contains(&PortHolder { ip: any.ip(), uid }));
            drop(socket);
        }
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn a_table_tells_whose_a_socket_is() {
        let of = |local: &str| {
            let remote = "127.0.0.1:9".parse().unwrap();
            find(TABLE.lines(), &local.parse().unwrap(), &remote)
        };
        assert_eq!(of("127.0.0.1:8080"), Owner::User(1001));
        assert_eq!(of("127.0.0.5:8080"), Owner::User(1002), "another address of the host");
        assert_eq!(of("127.0.0.6:8080"), Owner::Nobody);
        assert_eq!(of("127.0.0.6:8081"), Owner::User(1003), "any address");
        assert_eq!(of("127.0.0.1:8082"), Owner::User(1004), "connected to us");
        assert_eq!(of("127.0.0.1:8083"), Owner::Nobody, "closed");
        assert_eq!(of("127.0.0.1:8084"), Owner::User(1005), "any address of IPv6");
        assert_eq!(of("127.0.0.1:8085"), Owner::User(1006), "IPv4 through IPv6");
        assert_eq!(of("[::1]:8084"), Owner::User(1005));
        assert_eq!(of("127.0.0.1:8086"), Owner::Unknown, "one of two users");
        assert_eq!(of("127.0.0.1:8087"), Owner::Nobody);
        let elsewhere = "127.0.0.1:10".parse().unwrap();
        let connected = find(TABLE.lines(), &"127.0.0.1:8082".parse().unwrap(), &elsewhere);
        assert_eq!(connected, Owner::Nobody, "connected to somebody else");
    }
}
