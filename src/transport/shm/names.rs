//! Names by which endpoints of this node are found: abstract unix sockets, `udrv/PORT` and alternatives to it.
//!
//! Any process may bind an abstract name, listen there, or connect to it. So a name proves nothing; what counts is the
//! user at the other end, as told by the kernel (SO_PEERCRED). If another user has an endpoint's first name, the
//! endpoint binds an alternative, and a peer tries all of them until a listener belongs to this user. An endpoint that
//! gets no name is reached over the network (PROTOCOL.md §2.1).

use crate::sys::close::close_soon;
use crate::sys::unix::{self, Credentials};
use crate::sys::{Errno, process, user};
use crate::telemetry::log;
use std::os::fd::{AsFd, OwnedFd};

/// Names that a port may have.
const NAMES: u32 = 4;
/// An endpoint binds its name shortly before it listens there. So a name whose owner does not answer is tried again, so
/// many times.
const TRIES: u32 = 20;

/// The meaning of a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// An endpoint that takes links.
    Open,
    /// An endpoint with shm disabled, which is reached over the network.
    Aloof,
}

impl Kind {
    /// The names of `port`, in the order in which they are tried.
    fn names(self, port: u16) -> impl Iterator<Item = String> {
        let prefix = match self {
            Self::Open => "udrv",
            Self::Aloof => "udrv-net",
        };
        (0..NAMES).map(move |n| match n {
            0 => format!("{prefix}/{port}"),
            n => format!("{prefix}/{port}/{n}"),
        })
    }
}

/// A connection to an endpoint that listens, and its process.
pub(super) type Listener = (OwnedFd, Credentials);

/// The owner of the names of a port.
#[derive(Debug)]
pub(super) enum Found {
    /// An endpoint of this user, and a connection to it.
    Open(OwnedFd, Credentials),
    /// An endpoint of this user with shm disabled, process `pid`.
    Aloof(i32),
    /// Only another user, with this id.
    Stranger(u32),
    Nobody,
}

/// Looks for the endpoint of this user that has `port`. Errors: EAGAIN when a listener's backlog is full and no other
/// listener is found; EMFILE, ENFILE, ENOMEM, and those of a system that forbids sockets.
pub(super) fn find(port: u16) -> Result<Found, Errno> {
    let mut search = Search::default();
    if let Some((socket, credentials)) = search.visit(Kind::Open, port, |_| true)? {
        return Ok(Found::Open(socket, credentials));
    }
    if let Some((_, credentials)) = search.visit(Kind::Aloof, port, |_| true)? {
        return Ok(Found::Aloof(credentials.pid));
    }
    match search {
        Search { full: true, .. } => Err(Errno(libc::EAGAIN)),
        Search { stranger: Some(uid), .. } => Ok(Found::Stranger(uid)),
        _ => Ok(Found::Nobody),
    }
}

/// Whether process `pid` of this user has a name of `port`. Also true if a full backlog makes that
/// unknowable. Errors: as `find`.
pub(super) fn listens(port: u16, pid: i32) -> Result<bool, Errno> {
    let mut search = Search::default();
    let same = |credentials: &Credentials| credentials.pid == pid;
    // One that takes no links any more may have made one before.
    let found = search.visit(Kind::Open, port, same)?.is_some()
        || search.visit(Kind::Aloof, port, same)?.is_some();
    Ok(found || search.full)
}

/// What a search for a listener has met besides.
#[derive(Default)]
struct Search {
    stranger: Option<u32>,
    full: bool,
}

impl Search {
    /// The first listener of this user under a name of `port` for which `wanted` is true.
    fn visit(
        &mut self,
        kind: Kind,
        port: u16,
        wanted: impl Fn(&Credentials) -> bool,
    ) -> Result<Option<Listener>, Errno> {
        for name in kind.names(port) {
            let socket = match unix::connect(&name) {
                Ok(socket) => socket,
                // EPROTOTYPE: a socket of another type has the name.
                Err(Errno(libc::ECONNREFUSED | libc::EPROTOTYPE)) => continue,
                Err(e) if e.is_would_block() => {
                    self.full = true;
                    continue;
                }
                Err(e) => return Err(e),
            };
            let credentials = unix::credentials(socket.as_fd())?;
            if !user::is_ours(&credentials) {
                self.stranger = Some(credentials.uid);
                // The listener may already have sent something, and closing may block.
                close_soon(vec![socket]);
            } else if wanted(&credentials) {
                return Ok(Some((socket, credentials)));
            }
        }
        Ok(None)
    }
}

/// The names that an endpoint holds.
#[derive(Debug)]
pub(super) struct Names {
    /// `None`: other users have all names.
    pub(super) listener: Option<OwnedFd>,
    /// Reserves the port's name while the endpoint does not listen under it.
    #[allow(dead_code)]
    reserved: Option<OwnedFd>,
}

impl Names {
    /// Takes the names of `port` for an endpoint of this `kind`. Errors: EADDRINUSE when another endpoint of this user
    /// has the port; EMFILE, ENFILE, ENOMEM.
    pub(super) fn take(port: u16, kind: Kind) -> Result<Self, Errno> {
        let name = Kind::Open.names(port).next().unwrap_or_default();
        let first = match kind {
            Kind::Open => unix::listen(&name),
            Kind::Aloof => unix::reserve(&name),
        };
        let reserved = match (first, kind) {
            (Ok(listener), Kind::Open) => {
                return Ok(Self { listener: Some(listener), reserved: None });
            }
            (Ok(reserved), Kind::Aloof) => Some(reserved),
            (Err(Errno(libc::EADDRINUSE)), _) if is_free(port)? => None,
            (Err(e), _) => return Err(e),
        };
        for name in kind.names(port) {
            match unix::listen(&name) {
                Ok(listener) => return Ok(Self { listener: Some(listener), reserved }),
                Err(Errno(libc::EADDRINUSE)) => {}
                Err(e) => return Err(e),
            }
        }
        log::limited!(
            "another user has all socket names of port {port} (udrv/{port} and its alternatives): peers on this node are reached over the network"
        );
        Ok(Self { listener: None, reserved })
    }

    /// The endpoint stops taking links: closes its listener, and says so under a name of the other kind.
    pub(super) fn withdraw(&mut self, port: u16) {
        self.listener = Kind::Aloof.names(port).find_map(|name| unix::listen(&name).ok());
        self.reserved = Kind::Open.names(port).find_map(|name| unix::reserve(&name).ok());
    }
}

/// No endpoint of this user has `port`, as far as the names tell.
fn is_free(port: u16) -> Result<bool, Errno> {
    for _ in 0..TRIES {
        match find(port) {
            Ok(Found::Open(..) | Found::Aloof(_)) => return Ok(false),
            Ok(Found::Stranger(_)) => return Ok(true),
            Ok(Found::Nobody) => process::yield_now(),
            // A listener that was bound a moment ago has no full backlog.
            Err(e) if e.is_would_block() => return Ok(true),
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A port that the system assigns only on request.
    fn port() -> u16 {
        1 + process::random_u64() as u16 % 32000
    }

    fn open(port: u16) -> bool {
        matches!(find(port), Ok(Found::Open(_, who)) if who.pid == process::pid())
    }

    #[test]
    fn one_endpoint_of_a_user_has_a_port() {
        for kind in [Kind::Open, Kind::Aloof] {
            let port = port();
            assert!(matches!(find(port), Ok(Found::Nobody)));
            let names = Names::take(port, kind).unwrap();
            assert_eq!(open(port), kind == Kind::Open);
            assert_eq!(matches!(find(port), Ok(Found::Aloof(_))), kind == Kind::Aloof);
            assert_eq!(listens(port, process::pid()), Ok(true));
            assert_eq!(listens(port, process::pid() + 1), Ok(false));
            for second in [Kind::Open, Kind::Aloof] {
                assert_eq!(Names::take(port, second).unwrap_err(), Errno(libc::EADDRINUSE));
            }
            drop(names);
            assert!(matches!(find(port), Ok(Found::Nobody)));
        }
    }

    #[test]
    fn a_name_that_is_squatted_has_an_alternative() {
        let port = port();
        let squatter = unix::reserve(&format!("udrv/{port}")).unwrap();
        let names = Names::take(port, Kind::Open).unwrap();
        assert!(names.listener.is_some() && open(port));
        drop(squatter);
        assert!(open(port));
    }

    #[test]
    fn without_any_name_an_endpoint_goes_on() {
        let port = port();
        let squatted = |kind: Kind| -> Vec<OwnedFd> {
            kind.names(port).map(|name| unix::reserve(&name).unwrap()).collect()
        };
        let _all = squatted(Kind::Open);
        assert!(Names::take(port, Kind::Open).unwrap().listener.is_none());
        assert!(Names::take(port, Kind::Aloof).unwrap().listener.is_some());
        let _more = squatted(Kind::Aloof);
        assert!(Names::take(port, Kind::Aloof).unwrap().listener.is_none());
        assert!(matches!(find(port), Ok(Found::Nobody)));
    }

    #[test]
    fn an_endpoint_that_takes_no_links_any_more_says_so() {
        let port = port();
        let mut names = Names::take(port, Kind::Open).unwrap();
        let waiting = unix::connect(&format!("udrv/{port}")).unwrap();
        names.withdraw(port);
        assert!(unix::has_hung_up(waiting.as_fd()));
        assert!(matches!(find(port), Ok(Found::Aloof(pid)) if pid == process::pid()));
    }
}
