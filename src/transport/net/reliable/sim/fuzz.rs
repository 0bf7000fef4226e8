//! Fuzzing: invalid bytes for each decoder, and, with correct tags, for a state machine at work. `UDRV_FUZZ_SECONDS`
//! says how long each target runs; a failure prints its seed, which `UDRV_TEST_SEED` repeats.

use super::super::connection::Connection;
use super::super::packet::{
    FIRST_FRAME_LEN, FRAME_LEN, Frame, HEADER_LEN, HELLO_TAG_AT, Header, Hello, HelloKind, Kind,
    SACK_WORDS, TAG_AT, put_frame,
};
use super::app::Flow;
use super::network::{Slot, address, spoil};
use super::node::{Habits, Node};
use super::oracle::Sizes;
use super::rng::Rng;
use super::scenario::plain;
use super::weather::Weather;
use super::world::{Act, World};
use super::{Guard, number};
use crate::transport::JobKey;
use std::time::{Duration, Instant};

/// How long each target runs under `cargo test`, seconds.
const SECONDS: u64 = 2;
const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// Runs `target` with one seed after the other until time is up, at least once.
fn fuzz(name: &str, mut target: impl FnMut(u64)) {
    let seconds = number("UDRV_FUZZ_SECONDS").unwrap_or(SECONDS);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut seed = number("UDRV_TEST_SEED").unwrap_or(0);
    let mut rounds = 0u64;
    while rounds == 0 || (Instant::now() < end && number("UDRV_TEST_CASES") != Some(rounds)) {
        let _guard = Guard { seed, also: String::new() };
        target(seed);
        (seed, rounds) = (seed + 1, rounds + 1);
    }
    eprintln!("{name}: {rounds} rounds");
}

/// Boundary values near `near`.
fn number_near(rng: &mut Rng, near: u32) -> u32 {
    match rng.below(8) {
        0 => rng.next() as u32,
        1 => rng.pick(&[0, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX]),
        2 => near.wrapping_add(0x8000_0000),
        3 => near.wrapping_add(rng.below(2048) as u32),
        4 => near.wrapping_sub(rng.below(2048) as u32),
        5 => near.wrapping_add(1),
        _ => near,
    }
}

fn header(rng: &mut Rng, connection: Option<&Connection>) -> Header {
    // Fields as the peer of `connection` would send them: it has sent up to `expected`.
    let (dest, psn, ack) = match connection {
        Some(c) => (c.id, c.receiver.order.expected as u32, c.sender.window.base as u32),
        None => (rng.next() as u32, 1, 1),
    };
    let (arrived, sent) = connection
        .map_or((1, 1), |c| (c.receiver.arrived as u32, c.sender.window.transmission as u32));
    Header {
        kind: rng.pick(&[Kind::Data, Kind::Data, Kind::Data, Kind::Ack, Kind::Ack, Kind::Close]),
        flags: rng.next() as u8,
        sack_words: rng.pick(&[0, 0, 0, 1, 2, SACK_WORDS as u8]),
        dest,
        psn: number_near(rng, psn),
        transmission: number_near(rng, arrived),
        ack: number_near(rng, ack),
        echo: number_near(rng, sent.wrapping_sub(1)),
        ack_delay: rng.next() as u16,
        credit: rng.pick(&[0, 1, 64, 1024, u16::MAX]),
        marks: number_near(rng, 0),
        tag: 0,
    }
}

/// Valid and invalid frames.
fn frames(rng: &mut Rng, room: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..rng.below(5) {
        let kind = rng.below(4) as u8;
        let header = vec![7; if kind < 2 { rng.pick(&[0, 8, 104, 105, 255]) } else { 0 }];
        let len = rng.pick(&[0, 1, 100, 1000]);
        let total = rng.pick(&[0, 1, len, 3000, 64 << 10, (64 << 10) + 1, u32::MAX as usize]);
        let mut front = [0; FIRST_FRAME_LEN + 255];
        let at = put_frame(&mut front, kind, &header, len, total);
        bytes.extend_from_slice(&front[..at]);
        bytes.resize(bytes.len() + len, 9);
    }
    if rng.percent(20) {
        spoil(rng, &mut bytes);
    }
    bytes.truncate(room);
    bytes
}

fn hello(rng: &mut Rng, near: Option<&Connection>, slots: Slot) -> Hello {
    let known = |rng: &mut Rng, value: Option<u64>| match value {
        Some(value) if rng.percent(70) => value,
        _ => rng.next() | 1,
    };
    Hello {
        kind: rng.pick(&[HelloKind::Init, HelloKind::Accept, HelloKind::Refuse]),
        established: rng.percent(50),
        version: rng.pick(&[0, 1, 1, 1, 2, u16::MAX]),
        version_min: rng.pick(&[0, 1, 1, 1, 2, u16::MAX]),
        datagram_max: rng.pick(&[0, 1, 39, 40, 41, 1199, 1472, 9000, u16::MAX]),
        features: rng.next() as u32,
        connection: near
            .and_then(|c| c.handshake.remote)
            .map_or(0, |remote| number_near(rng, remote.id)),
        answered: rng.pick(&[0, 88, 1200, 1472, u16::MAX]),
        credit: rng.pick(&[0, 1, 512, u16::MAX]),
        life: known(rng, near.map(|c| c.handshake.life().unwrap_or(0))),
        nonce: known(rng, near.map(|c| c.handshake.echo)),
        echo: known(rng, near.map(|c| c.handshake.nonce)),
        address: address(rng.below(u64::from(slots)) as Slot),
        dest: near.map_or(0, |c| if rng.percent(70) { c.id } else { rng.next() as u32 }),
        dest_port: address(0).port(),
        rank: rng.next() as u16,
        tag: 0,
    }
}

#[test]
fn decoders_take_any_bytes() {
    fuzz("decoders", |seed| {
        let mut rng = Rng::new(seed);
        for _ in 0..1000 {
            let mut bytes = match rng.below(3) {
                0 => hello(&mut rng, None, 4).encode().to_vec(),
                1 => {
                    let mut bytes = header(&mut rng, None).encode().to_vec();
                    bytes.extend(frames(&mut rng, 3000));
                    bytes
                }
                _ => frames(&mut rng, 3000),
            };
            for _ in 0..rng.below(3) {
                spoil(&mut rng, &mut bytes);
            }
            decode(&bytes);
        }
    });
}

/// Decoded packets encode to the same bytes, except for bytes without meaning.
fn decode(bytes: &[u8]) {
    if let Some(hello) = Hello::decode(bytes) {
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
    }
    if let Some((header, rest)) = Header::decode(bytes) {
        let again = header.encode();
        assert_eq!(
            (again[..3].to_vec(), &again[4..]),
            (bytes[..3].to_vec(), &bytes[4..HEADER_LEN])
        );
        assert_eq!(rest.len() + HEADER_LEN, bytes.len());
    }
    let mut rest = bytes;
    while let Some((frame, next)) = Frame::decode(rest) {
        assert!(next.len() + FRAME_LEN <= rest.len(), "a frame has a length");
        let (Frame::Whole { payload, .. }
        | Frame::First { payload, .. }
        | Frame::More { payload }
        | Frame::Last { payload }) = frame;
        assert!(payload.len() < rest.len());
        rest = next;
    }
}

/// One of three endpoints of a job sends arbitrary packets. The two others must not be disturbed.
#[test]
fn a_member_of_the_job_can_harm_only_itself() {
    fuzz("hostile member", |seed| harm(seed, Rng::new(seed)));
}

#[cfg(fuzzing)]
#[test]
fn fuzz_datagrams() {
    crate::fuzzing::run(|input| {
        decode(input);
        harm(0, Rng::scripted(input));
    });
}

fn harm(seed: u64, mut rng: Rng) {
    let mut world = World::new(seed, 3, Weather::fair());
    world.oracle.hostile = Some(1);
    let habits = Habits {
        buffer_bytes: rng.pick(&[256 << 10, 1 << 20]),
        receive_window: rng.pick(&[8, 512]),
        peer_timeout_ns: 1000 * MS,
        ..plain()
    };
    for slot in 0..3 {
        let flows = (0..3)
            .filter(|to| *to != slot)
            .map(|to| Flow::new(to, Sizes::Mixed, 100).bursts(5, 200 * US));
        world.start(slot, habits.clone(), flows.collect());
    }
    let mut now = 0;
    for _ in 0..60 {
        now += rng.below(200 * US);
        world.run_until(now);
        for _ in 0..1 + rng.below(3) {
            let victim = rng.pick(&[0, 2]);
            let Some(node) = &world.nodes[victim as usize] else { continue };
            let bytes = hostile(&mut rng, node);
            world.network.inject(1, victim, &bytes);
        }
    }
    world.plan(now + 10 * MS, Act::Crash { slot: 1, refuses: true });
    world.run();
}

/// A datagram with a correct tag that the victim's peer at slot 1, or any other sender, might send.
fn hostile(rng: &mut Rng, victim: &Node) -> Vec<u8> {
    let c = victim.connections().find(|c| c.address == address(1));
    if c.is_none() || rng.percent(25) {
        let bytes = hello(rng, c, 3).encode();
        let tag = JobKey::from_bytes([victim.habits.job; 16]).tag(&bytes[..HELLO_TAG_AT]);
        return [&bytes[..HELLO_TAG_AT], &tag.to_le_bytes()].concat();
    }
    let Some((c, remote)) = c.and_then(|c| Some((c, c.handshake.remote?))) else {
        return Vec::new();
    };
    let header = header(rng, Some(c));
    // Harmless in most cases, so that the connection lasts.
    let header = if c.handshake.is_established() && rng.percent(70) {
        let (expected, base) = (c.receiver.order.expected, c.sender.window.base);
        Header { kind: Kind::Data, psn: expected as u32 + 1, ack: base as u32, ..header }
    } else {
        header
    };
    let mut bytes = header.encode().to_vec();
    bytes.resize(HEADER_LEN + usize::from(header.sack_words) * 8, 0);
    for byte in &mut bytes[HEADER_LEN..] {
        *byte = rng.next() as u8;
    }
    bytes.extend(frames(rng, 1200));
    let (head, body) = bytes.split_at(HEADER_LEN);
    let (hash, direction) = (&victim.machine.shared.hash, 1 - remote.direction);
    let tag = remote.key.tag(hash, direction, &head[..TAG_AT], body);
    bytes[TAG_AT..HEADER_LEN].copy_from_slice(&tag.to_le_bytes());
    bytes
}
