//! What the router knows: the transports, and which of them each peer's messages go by.

use super::list::{Lane, Lanes};
use super::pace::Pace;
use crate::sys::Errno;
use crate::sys::event::Epoll;
use crate::sys::udp::UdpPort;
use crate::transport::peers::PeerTable;
use crate::transport::{Address, Message, PeerId, SendError};
use std::collections::VecDeque;
use std::sync::Arc;

/// No transport carries messages to the peer.
pub(super) const NO_WAY: SendError = SendError::Unreachable(Errno(libc::EOPNOTSUPP));

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Route {
    /// Known by address only.
    None,
    /// By this transport.
    By(Lane),
    /// What was sent by one transport was refused, and is on its way by another: nothing may overtake it.
    Moving,
}

/// What is on its way to one peer.
#[derive(Debug)]
pub(super) struct Moving {
    pub(super) peer: PeerId,
    /// Of the contact that was refused: the process, and why.
    pub(super) pid: i32,
    pub(super) errno: Errno,
    pub(super) messages: VecDeque<Message>,
    /// The transport that they come from.
    pub(super) from: Lane,
    /// `None`: not chosen yet.
    pub(super) to: Option<Lane>,
    /// The peer has to take up the contact first.
    pub(super) settles: bool,
    /// No attempt before; and the next pause, nanoseconds.
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
    /// The endpoint's port, which no transport wanted.
    pub(super) _port: Option<UdpPort>,
    pub(super) epoll: Arc<Epoll>,
    pub(super) pace: Pace,
    /// What was said last of a peer that cannot be reached: who tries again is not told again.
    pub(super) complained: Option<(PeerId, Errno)>,
    pub(super) moving: Vec<Moving>,
    /// There was a peer whose messages come by another transport than ours go.
    pub(super) mixed: bool,
    /// Peers that a transport had no room for, and since when.
    pub(super) blocked: Vec<(PeerId, u64)>,
}

impl Router {
    pub(super) fn route(&self, peer: PeerId) -> Route {
        self.routes.get(peer.index()).copied().unwrap_or(Route::None)
    }

    /// The transport that messages to `peer` go by.
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
