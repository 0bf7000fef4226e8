//! The state of the router: the transports, and the transport that each peer's messages take.

use super::blocked::Blocked;
use super::list::{Lane, Lanes};
use super::pace::Pace;
use crate::sys::Errno;
use crate::sys::late_set::LateSet;
use crate::sys::udp::UdpPort;
use crate::telemetry::histogram::Histogram;
use crate::transport::peers::PeerTable;
use crate::transport::{Address, Message, PeerId, SendError};
use std::collections::VecDeque;
use std::sync::Arc;

/// No transport carries messages to the peer.
pub(super) const NO_WAY: SendError = SendError::Unreachable(Errno(libc::EOPNOTSUPP));

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Route {
    /// Only its address is known.
    None,
    /// Messages go by this transport.
    By(Lane),
    /// Messages that one transport refused are being moved to another: no message may overtake them.
    Moving,
}

/// Messages that are being moved, for one peer.
#[derive(Debug)]
pub(super) struct Moving {
    pub(super) peer: PeerId,
    /// The process of the refused contact, and why it was refused.
    pub(super) pid: i32,
    pub(super) errno: Errno,
    pub(super) messages: VecDeque<Message>,
    /// The transport that returned them.
    pub(super) from: Lane,
    /// The transport to use; `None`: not chosen yet.
    pub(super) to: Option<Lane>,
    /// The peer has to accept the contact first.
    pub(super) settles: bool,
    /// Time of the next attempt, and the pause after it, nanoseconds.
    pub(super) at: u64,
    pub(super) pause: u64,
}

/// All transports of one endpoint.
#[derive(Debug)]
pub(crate) struct Router {
    pub(super) peers: PeerTable,
    pub(super) routes: Vec<Route>,
    pub(super) me: Address,
    pub(super) lanes: Lanes,
    /// Holds the endpoint's port if no transport uses it.
    pub(super) _port: Option<UdpPort>,
    pub(super) epoll: Arc<LateSet>,
    pub(super) pace: Pace,
    /// The last unreachable peer that was logged: repeated attempts are not logged again.
    pub(super) complained: Option<(PeerId, Errno)>,
    pub(super) moving: Vec<Moving>,
    /// There was a peer whose messages arrive by another transport than messages to it take.
    pub(super) mixed: bool,
    pub(super) reported: Reported,
    /// Peers for which a transport had no room, and how long.
    pub(super) blocked: Vec<Blocked>,
}

/// What was reported of the endpoint (`figures.rs`).
#[derive(Debug, Default)]
pub(super) struct Reported {
    /// Preparations for sleep.
    pub(super) sleeps: u64,
    /// The peer that was reported last.
    pub(super) peer: usize,
    /// When the next report is due, nanoseconds.
    pub(super) due: u64,
    /// The oldest pending send, and when it was first reported as that, nanoseconds.
    pub(super) oldest: Option<(u64, u64)>,
    /// When the router looked at the clock last, nanoseconds; 0: it has slept since.
    pub(super) looked_at: u64,
    /// Times between two such looks.
    pub(super) gaps: Histogram,
}

impl Router {
    pub(super) fn route(&self, peer: PeerId) -> Route {
        self.routes.get(peer.index()).copied().unwrap_or(Route::None)
    }

    /// The transport that carries messages to `peer`.
    pub(super) fn lane(&self, peer: PeerId) -> Option<Lane> {
        match self.route(peer) {
            Route::By(lane) => Some(lane),
            Route::None | Route::Moving => None,
        }
    }
}

pub(super) fn set_route(routes: &mut Vec<Route>, peer: PeerId, route: Route) {
    if routes.len() <= peer.index() {
        routes.resize(peer.index() + 1, Route::None);
    }
    if let Some(slot) = routes.get_mut(peer.index()) {
        *slot = route;
    }
}
