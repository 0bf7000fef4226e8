//! Peers at addresses of this host that are reached over the network all the same (FI_UDRV_SHM=0). The kernel is asked
//! which user they belong to, as for shared memory: otherwise the public key would admit other users of the node.
//!
//! A source address proves nothing on one host: any process may send from any of its addresses. So the kernel is asked
//! whose socket receives the answers to a packet before they leave, and again when a secret of an answer comes back, as
//! the socket may have changed hands (PROTOCOL.md §7.2). So a connection is with the user's own process from the first
//! message on, and its packets need no further check: no other process knows its key.

#![forbid(unsafe_code)]

use crate::sys::process;
use crate::sys::sock_diag::{self, Owner, Protocol};
use crate::sys::user::{self, Whose};
use crate::telemetry::log;
use crate::transport::Address;
use crate::transport::address::LocalHost;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Whose process a peer is, as far as this host's kernel knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Standing {
    /// On another host, or this user's.
    #[default]
    Admitted,
    /// At an address of this host where no socket is bound now.
    Absent,
    /// A process of this other user.
    Stranger(u32),
    /// The kernel does not say, and there is no secret key that could prove it.
    Unknown,
}

/// Checks which users the peers on this host belong to.
#[derive(Debug)]
pub(crate) struct Neighbours {
    me: SocketAddr,
    host: LocalHost,
    /// There is a secret job key: a peer that has it is admitted where the kernel does not say whose it is.
    keyed: bool,
}

impl Neighbours {
    /// For peers of the endpoint `me`; `host` tells addresses of this host if the kernel does not answer.
    pub(crate) fn new(me: &Address, host: LocalHost, keyed: bool) -> Self {
        sock_diag::prepare();
        Self { me: me.0, host, keyed }
    }

    /// The endpoint at `address`.
    pub(crate) fn peer(&self, address: &Address) -> Standing {
        self.standing(Protocol::Udp, &address.0, &self.me)
    }

    /// The process that listens for streams at `address`.
    pub(crate) fn listener(&self, address: &SocketAddr) -> Standing {
        // No connection comes from port 0, so the listener is found.
        self.standing(Protocol::Tcp, address, &SocketAddr::new(self.me.ip(), 0))
    }

    /// The process that has connected from `from` to `to`, an address of this endpoint.
    pub(crate) fn caller(&self, from: &SocketAddr, to: &SocketAddr) -> Standing {
        self.standing(Protocol::Tcp, from, to)
    }

    fn standing(&self, protocol: Protocol, at: &SocketAddr, from: &SocketAddr) -> Standing {
        let mut at = *at;
        if at.ip().is_unspecified() {
            // The kernel takes the wildcard address for the loopback interface.
            at.set_ip(loopback(&at));
        }
        if !self.is_here(&at) {
            return Standing::Admitted;
        }
        // Sockets of two families never connect; which remote end is named does not matter then.
        let from = if from.is_ipv4() == at.is_ipv4() && !from.ip().is_unspecified() {
            *from
        } else {
            SocketAddr::new(at.ip(), from.port())
        };
        match sock_diag::owner(protocol, &at, &from) {
            Owner::User(uid) => match user::whose(uid) {
                Whose::Ours => Standing::Admitted,
                Whose::Ambiguous => self.unknown(&at),
                Whose::Others => {
                    log::limited!(
                        "{at} belongs to user {uid}, not to {}: refused",
                        process::effective_uid()
                    );
                    Standing::Stranger(uid)
                }
            },
            Owner::Nobody => Standing::Absent,
            Owner::Unknown => self.unknown(&at),
        }
    }

    /// The result for `at` if the kernel does not say whose it is.
    fn unknown(&self, at: &SocketAddr) -> Standing {
        if self.keyed {
            return Standing::Admitted;
        }
        log::limited!(
            "{at} is refused: the system does not say whose it is, and there is no job key (fi_udrv(7), Security)"
        );
        Standing::Unknown
    }

    fn is_here(&self, at: &SocketAddr) -> bool {
        let scope = if let SocketAddr::V6(at) = at { at.scope_id() } else { 0 };
        at.ip().is_loopback()
            || sock_diag::is_local(at.ip(), scope).unwrap_or_else(|| self.host.owns(at.ip()))
    }
}

fn loopback(at: &SocketAddr) -> IpAddr {
    if at.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    fn neighbours(me: &str) -> Neighbours {
        Neighbours::new(&Address(me.parse().unwrap()), LocalHost::default(), false)
    }

    #[test]
    fn those_of_other_hosts_are_not_asked_for() {
        let all = neighbours("127.0.0.1:9");
        assert_eq!(all.peer(&Address("203.0.113.9:7".parse().unwrap())), Standing::Admitted);
    }

    #[test]
    fn ones_own_are_admitted_while_they_are_there() {
        for me in ["127.0.0.1:9", "[::1]:9", "0.0.0.0:9"] {
            let all = neighbours(me);
            let Ok(socket) = UdpSocket::bind("127.0.0.1:0") else { continue };
            let at = Address(socket.local_addr().unwrap());
            assert_eq!(all.peer(&at), Standing::Admitted, "{me}");
            let wildcard = Address(SocketAddr::new("0.0.0.0".parse().unwrap(), at.port()));
            assert_eq!(all.peer(&wildcard), Standing::Admitted, "{me}");
            drop(socket);
            assert_eq!(all.peer(&at), Standing::Absent, "{me}");
        }
    }

    #[test]
    fn whom_the_kernel_does_not_know_needs_a_key() {
        let me = Address("127.0.0.1:9".parse().unwrap());
        for (keyed, standing) in [(true, Standing::Admitted), (false, Standing::Unknown)] {
            let all = Neighbours::new(&me, LocalHost::default(), keyed);
            assert_eq!(all.unknown(&me.0), standing);
        }
    }

    #[test]
    fn both_ends_of_a_stream_are_admitted() {
        let all = neighbours("127.0.0.1:9");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let stream = TcpStream::connect(at).unwrap();
        let from = stream.local_addr().unwrap();
        assert_eq!(all.listener(&at), Standing::Admitted);
        assert_eq!(all.caller(&from, &at), Standing::Admitted);
        drop((stream, listener));
        assert_eq!(all.listener(&at), Standing::Absent);
    }
}
