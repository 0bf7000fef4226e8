//! An attacker without the key that hears everything, and can send anything from any address.

use super::super::packet::{
    HELLO_LEN, HELLO_TAG_AT, Hello, HelloKind, MAGIC, VERSION, VERSION_MIN,
};
use super::network::{Network, Slot, address, spoil};
use super::node::Node;
use super::rng::Rng;
use crate::transport::JobKey;

/// Sends one datagram that no endpoint has sent, or not now.
pub(super) fn strike(network: &mut Network, rng: &mut Rng, nodes: &[Option<Box<Node>>]) {
    let anybody = |rng: &mut Rng| rng.index(nodes.len()) as Slot;
    let (from, to) = (anybody(rng), anybody(rng));
    match rng.below(8) {
        0 => {
            let garbage: Vec<u8> = (0..rng.below(200)).map(|_| rng.next() as u8).collect();
            network.inject(from, to, &garbage);
        }
        1 => network.inject(from, to, &greeting(rng, from, to, nodes)),
        2..5 => {
            // A replay from any address.
            let Some((to, bytes)) = network.captured() else { return };
            network.inject(from, to, &bytes);
        }
        5 => {
            let Some((_, bytes)) = network.captured() else { return };
            network.inject(from, to, &bytes);
        }
        _ => {
            let Some((to, mut bytes)) = network.captured() else { return };
            spoil(rng, &mut bytes);
            network.inject(from, to, &bytes);
        }
    }
}

/// A handshake packet with all values that an eavesdropper can know, and the tag of another key.
fn greeting(rng: &mut Rng, from: Slot, to: Slot, nodes: &[Option<Box<Node>>]) -> [u8; HELLO_LEN] {
    let life = |slot: Slot| nodes[slot as usize].as_ref().map_or(1, |n| n.life);
    let hello = Hello {
        kind: rng.pick(&[HelloKind::Init, HelloKind::Accept, HelloKind::Refuse]),
        established: true,
        version: VERSION,
        version_min: VERSION_MIN,
        datagram_max: rng.next() as u16,
        features: 1,
        connection: rng.below(8) as u32,
        answered: rng.next() as u16,
        credit: rng.next() as u16,
        life: if rng.percent(50) { life(from) } else { rng.next() | 1 },
        nonce: rng.next(),
        echo: rng.next(),
        address: address(from),
        dest: rng.below(8) as u32 | 1 << 20,
        dest_port: address(to).port(),
        rank: 0,
        tag: 0,
    };
    let mut bytes = hello.encode();
    let tag = JobKey::from_bytes([0xee; 16]).tag(&bytes[..HELLO_TAG_AT]);
    bytes[HELLO_TAG_AT..].copy_from_slice(&tag.to_le_bytes());
    assert_eq!(bytes[..4], MAGIC);
    bytes
}
