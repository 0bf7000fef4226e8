//! Receives from peers that have died, among many that have.

use super::fixture::{TestHost, source};
use super::sim::{Log, address};
use crate::protocol::Cause;
use crate::protocol::peers::Peers;
use crate::transport::PeerId;

const DEAD_PEERS: usize = 1000;

fn error(at: usize) -> (i32, Cause) {
    (at as i32 + 1, Cause::PeerDied)
}

/// An endpoint that has met so many peers, all of which have died.
fn all_dead(host: &mut TestHost) -> Peers {
    let mut peers = Peers::new(false);
    for at in 0..DEAD_PEERS {
        host.learn(at);
        let peer = PeerId(at as u32);
        peers.meet(peer, &address(at));
        peers.mark_dead(peer, error(at));
    }
    peers
}

#[test]
fn a_directed_receive_does_not_look_at_each_dead_peer() {
    let mut host = TestHost::new(0, Log::default());
    let mut peers = all_dead(&mut host);
    assert_eq!(peers.hopeless(source(7), &host), Some(error(7)));
    let before = host.asked.get();
    for at in 0..100 {
        assert_eq!(peers.hopeless(source(at), &host), Some(error(at)));
        assert_eq!(peers.hopeless(source(DEAD_PEERS), &host), None, "it was never met");
    }
    assert!(host.asked.get() - before <= 400, "{}", host.asked.get() - before);
}

#[test]
fn the_dead_are_found_where_the_address_book_has_them_now() {
    let mut host = TestHost::new(0, Log::default());
    let mut peers = all_dead(&mut host);
    let hopeless = |peers: &mut Peers, host: &TestHost, source| peers.hopeless(source, host);
    assert_eq!(hopeless(&mut peers, &host, source(3)), Some(error(3)));
    // It has another place there.
    host.learn_as(3, 5000);
    assert_eq!(hopeless(&mut peers, &host, source(3)), None);
    assert_eq!(hopeless(&mut peers, &host, 5000), Some(error(3)));
    // One lives, one dies for another reason, and the number of one is given to another address.
    peers.mark_alive(PeerId(4));
    assert_eq!(hopeless(&mut peers, &host, source(4)), None);
    peers.mark_dead(PeerId(4), error(9));
    assert_eq!(hopeless(&mut peers, &host, source(4)), Some(error(9)));
    host.learn(DEAD_PEERS);
    assert_eq!(hopeless(&mut peers, &host, source(5)), Some(error(5)));
    peers.meet(PeerId(5), &address(DEAD_PEERS));
    assert_eq!(hopeless(&mut peers, &host, source(5)), None);
    assert_eq!(hopeless(&mut peers, &host, source(DEAD_PEERS)), Some(error(5)));
    (0..DEAD_PEERS).for_each(|at| peers.mark_alive(PeerId(at as u32)));
    assert!(!peers.has_dead());
    assert_eq!(hopeless(&mut peers, &host, source(6)), None);
}
