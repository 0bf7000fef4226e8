//! Queue pairs that write into each other's rings, between two ports of one device.

use super::*;

const RING: usize = 10 * 4096;
const PACKET: usize = 4096 - MARK;

struct End {
    port: EagerPort,
    qp: EagerQp,
    lid: u16,
    gid: [u8; 16],
    mtu: usize,
}

fn end() -> Option<End> {
    let (device, port, gid) = device()?;
    let mut eager = EagerPort::open(
        &device,
        EagerSettings {
            port: 1,
            gid: (port.link == LinkLayer::Ethernet).then_some(gid.index),
            mtu: port.mtu,
            service_level: port.service_level,
            channels: 2,
            ring: RING,
        },
    )
    .unwrap();
    let qp = eager.channel().unwrap();
    Some(End { port: eager, qp, lid: port.lid, gid: gid.raw, mtu: port.mtu })
}

fn ends() -> Option<(End, End)> {
    let (mut a, mut b) = (end()?, end()?);
    let address = |end: &End, psn| RcAddress {
        number: end.qp.number(),
        psn,
        mtu: end.mtu,
        lid: end.lid,
        gid: end.gid,
        serves: 0,
    };
    let (here, there) = (address(&a, 5), address(&b, 0xff_ffff));
    a.qp.connect(&there, 5).unwrap();
    b.qp.connect(&here, 0xff_ffff).unwrap();
    Some((a, b))
}

impl End {
    /// Takes completions until all writes are complete, or the queue pair has failed. Returns whether it has.
    fn finish(&mut self) -> bool {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let (mut failed, mut done) = (false, 0);
        while !failed && self.qp.progress().0 > self.qp.progress().1 {
            assert!(std::time::Instant::now() < deadline, "it ends");
            self.port.poll(|_, fails| if fails { failed = true } else { done += 1 }).unwrap();
            (0..std::mem::take(&mut done)).for_each(|_| self.qp.on_complete());
        }
        failed
    }
}

fn noise(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31) ^ (i >> 8) ^ seed) as u8).collect()
}

fn words(mark: [u8; MARK]) -> [u64; 2] {
    [0, 8].map(|at| u64::from_le_bytes(mark[at..at + 8].try_into().unwrap()))
}

#[test]
fn packets_and_marks_arrive_where_they_belong() {
    let Some((mut a, b)) = ends() else { return };
    let ring = b.qp.ring();
    let lens = [0, 1, 100, 219, 220, 221, 1024, PACKET, PACKET + 1, 16_484, 8 * 4096 - MARK];
    for (i, len) in lens.into_iter().enumerate() {
        let (packet, mark) = (noise(len, i), [i as u8 + 1; MARK]);
        let at = 8 * 4096 - len;
        let write = EagerWrite { at, packet: &packet, mark };
        assert_eq!(a.qp.write(ring, std::iter::once(write), true), Ok(1));
        assert!(!a.finish());
        assert_eq!(b.qp.mark(8 * 4096), Some(words(mark)), "{len} bytes");
        assert!(b.qp.bytes(at, len).unwrap() == packet, "{len} bytes");
    }
    let write = EagerWrite { at: RING - 5, packet: &[0; 300], mark: [0; MARK] };
    assert_eq!(a.qp.write(ring, std::iter::once(write), true), Ok(0), "beyond the ring");
}

#[test]
fn several_at_once_arrive() {
    let Some((mut a, b)) = ends() else { return };
    let ring = b.qp.ring();
    let packets = [noise(PACKET, 1), noise(77, 2), noise(2 * PACKET, 3)];
    let ends = [8 * 4096, 7 * 4096, 6 * 4096];
    for round in 0..40u8 {
        let write = |n: usize| EagerWrite {
            at: ends[n] - packets[n].len(),
            packet: &packets[n],
            mark: [round * 3 + n as u8; MARK],
        };
        assert_eq!(a.qp.write(ring, (0..3).map(write), true), Ok(3));
        assert!(!a.finish());
        for (n, (end, packet)) in ends.into_iter().zip(&packets).enumerate() {
            assert_eq!(b.qp.mark(end), Some(words([round * 3 + n as u8; MARK])));
            assert!(b.qp.bytes(end - packet.len(), packet.len()).unwrap() == packet);
        }
    }
}

#[test]
fn there_is_room_for_so_many() {
    let Some((mut a, b)) = ends() else { return };
    let (ring, room) = (b.qp.ring(), a.qp.room());
    assert!(room >= 8);
    let write = EagerWrite { at: 0, packet: &[7; 40], mark: [1; MARK] };
    let mut posted = 0;
    while posted < room {
        let n = a.qp.write(ring, std::iter::repeat_n(write, 5), false).unwrap();
        assert!(n > 0 && n <= 5);
        posted += n;
    }
    assert_eq!((posted, a.qp.room()), (room, 0));
    assert_eq!(a.qp.write(ring, std::iter::once(write), false), Ok(0));
    assert!(!a.finish());
    assert_eq!(a.qp.room(), room);
}

#[test]
fn what_is_not_in_the_ring_is_not_read() {
    let Some(a) = end() else { return };
    assert_eq!(a.qp.mark(0), Some([0; 2]));
    assert!(a.qp.mark(RING - MARK).is_some());
    assert_eq!((a.qp.mark(RING - 8), a.qp.mark(4), a.qp.mark(usize::MAX - 7)), (None, None, None));
    assert_eq!(a.qp.bytes(0, RING).map(<[u8]>::len), Some(RING));
    assert_eq!((a.qp.bytes(1, RING), a.qp.bytes(usize::MAX, 1)), (None, None));
}

#[test]
fn a_peer_that_ends_is_noticed_and_one_without_the_key_writes_nothing() {
    let Some((mut a, mut b)) = ends() else { return };
    let write = EagerWrite { at: 0, packet: &[7; 40], mark: [1; MARK] };
    assert_eq!(a.qp.write((b.qp.ring().0, !b.qp.ring().1), std::iter::once(write), true), Ok(1));
    assert!(a.finish(), "it is refused");
    assert_eq!(b.qp.bytes(0, 40), Some(&[0; 40][..]));
    let ring = a.qp.ring();
    drop(a);
    assert_eq!(b.qp.write(ring, std::iter::once(write), true), Ok(1));
    assert!(b.finish());
}

/// `cargo test --release --lib verbs::tests::eager::costs_of_writes -- --ignored --nocapture`: what the device takes
/// for packets that are written and found, one way, with nothing around it.
#[test]
#[ignore = "a measurement"]
fn costs_of_writes() {
    const COUNT: u64 = 3000;
    for len in [64, 160, PACKET, 4200, 16_484, 8 * 4096 - MARK] {
        let Some((a, b)) = ends() else { return };
        let rings = [a.qp.ring(), b.qp.ring()];
        let turn = move |mut end: End, to: (u64, u32), begins: bool| {
            let packet = noise(len, 1);
            let at = 8 * 4096;
            let since = std::time::Instant::now();
            for n in 1..=COUNT {
                let mut mark = [0; MARK];
                mark[..8].copy_from_slice(&n.to_le_bytes());
                let write = || std::iter::once(EagerWrite { at: at - len, packet: &packet, mark });
                if begins {
                    end.qp.write(to, write(), false).unwrap();
                }
                while end.qp.mark(at).unwrap()[0] != n {
                    std::hint::spin_loop();
                }
                if !begins {
                    end.qp.write(to, write(), false).unwrap();
                }
                let mut done = 0;
                end.port.poll(|_, fails| done += usize::from(!fails)).unwrap();
                (0..done).for_each(|_| end.qp.on_complete());
            }
            since.elapsed().as_nanos() as f64 / COUNT as f64 / 2000.0
        };
        let other = std::thread::spawn(move || turn(b, rings[0], false));
        let us = turn(a, rings[1], true);
        other.join().unwrap();
        println!("a packet of {len} bytes: {us:.2} us");
    }
}
