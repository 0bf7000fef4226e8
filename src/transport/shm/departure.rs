//! The end of links: noticing that a peer left or died, and taking its links down.

use super::handshake::{Answer, read_answer};
use super::hello::{self, RejectReason};
use super::ring::Popped;
use super::{Shm, TOKEN_PROCESS, Watch};
use crate::sys::{Errno, process, unix};
use crate::telemetry::log;
use crate::transport::peers::PeerTable;
use crate::transport::{Departure, Handler, PeerId};
use std::os::fd::AsFd;

impl Shm {
    pub(super) fn on_outbound_ready(
        &mut self,
        peer: PeerId,
        peers: &PeerTable,
        handler: &mut impl Handler,
    ) -> usize {
        let link = self.outbound.get_mut(peer.index()).and_then(Option::as_deref_mut);
        let Some(link) = link else { return 0 };
        match read_answer(link) {
            Answer::None | Answer::Welcome => 0,
            Answer::Rejected(reject) => {
                let address = peers.address(peer).unwrap_or(self.me);
                log::warn(format_args!("{address} refused our shared-memory link: {reject:?}"));
                let error = match reject.reason {
                    RejectReason::Key => libc::EKEYREJECTED,
                    _ => libc::ECONNREFUSED,
                };
                self.depart(peer, Some(Errno(error)), handler);
                1
            }
            Answer::Closed => {
                self.depart(peer, None, handler);
                1
            }
        }
    }

    pub(super) fn on_inbound_ready(&mut self, peer: PeerId, handler: &mut impl Handler) -> usize {
        let Some(link) = self.inbound_of(peer) else { return 0 };
        let mut bytes = [0; hello::LEN];
        match unix::receive(link.socket.as_fd(), &mut bytes) {
            unix::Received::Nothing | unix::Received::Message(..) => 0,
            unix::Received::Closed => {
                self.depart(peer, None, handler);
                1
            }
        }
    }

    /// Takes both links to `peer` down: first delivers what it had sent, then reports how it left.
    /// Without an error the sender's closing mark tells an orderly end from a death.
    pub(super) fn depart(
        &mut self,
        peer: PeerId,
        error: Option<Errno>,
        handler: &mut impl Handler,
    ) {
        let mut closed_in_order = false;
        let mut known = false;
        if let Some(at) = self.inbound.iter().position(|link| link.peer == peer) {
            let mut link = self.inbound.swap_remove(at);
            self.count_processes();
            self.epoll.remove(link.socket.as_fd());
            known = true;
            link.end_sharing();
            link.end_reaching();
            closed_in_order = link.consumer.producer_closed();
            // Bounded by the ring: its producer is gone or is no longer listened to.
            while error.is_none() {
                match link.consumer.pop(|header, data| handler.on_message(peer, header, data)) {
                    Popped::Message | Popped::Handed(_) => {}
                    Popped::Empty => break,
                    Popped::Malformed => {
                        closed_in_order = false;
                        break;
                    }
                }
            }
            log::info(format_args!(
                "link of peer {} (pid {}, life {:#x}) ended",
                peer.0, link.pid, link.nonce
            ));
        }
        if let Some(link) = self.outbound.get_mut(peer.index()).and_then(Option::take) {
            self.outbound_count -= 1;
            self.epoll.remove(link.socket.as_fd());
            closed_in_order |= link.producer.consumer_closed();
            known = true;
        }
        if let Some(at) = self.watches.iter().position(|watch| watch.peer == peer) {
            if let Some(fd) = self.watches.swap_remove(at).fd {
                self.epoll.remove(fd.as_fd());
            }
        }
        if known {
            let departure = match error {
                None if closed_in_order => Departure::Closed,
                None => Departure::Failed(Errno(libc::EHOSTDOWN)),
                Some(e) => Departure::Failed(e),
            };
            handler.on_departure(peer, departure);
        }
    }

    /// Notices processes that have ended and that no descriptor watches.
    pub(super) fn check_liveness(&mut self, handler: &mut impl Handler) -> usize {
        let dead: Vec<PeerId> = self
            .watches
            .iter()
            .filter(|watch| watch.fd.is_none() && !process::is_running(watch.pid))
            .map(|watch| watch.peer)
            .collect();
        for peer in &dead {
            self.depart(*peer, None, handler);
        }
        dead.len()
    }

    /// Watches the process of `peer`, unless it is watched already.
    pub(super) fn watch(&mut self, peer: PeerId, pid: i32) {
        if self.watches.iter().any(|watch| watch.peer == peer) {
            return;
        }
        let token = TOKEN_PROCESS | u64::from(peer.0);
        let fd = process::watch(pid).filter(|fd| self.epoll.add(fd.as_fd(), token).is_ok());
        self.watches.push(Watch { peer, pid, fd });
    }
}
