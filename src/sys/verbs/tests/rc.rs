//! Connections between two ports of one device.
#![allow(unsafe_code)] // writes

use super::*;
use crate::sys::verbs::RcRequest::Announced;
use crate::sys::verbs::rc::event;
use crate::sys::verbs::rc_shared::WRITE;
use rdma_core_sys::{
    IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ACCESS_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_SUCCESS,
    IBV_WC_WITH_IMM, IBV_WC_WR_FLUSH_ERR, ibv_wc,
};
use std::time::{Duration, Instant};

/// Kept by a write; its count tells when it is dropped.
type Keep = std::sync::Arc<()>;

struct End {
    device: OpenDevice,
    port: RcPort,
    events: Vec<RcEvent>,
    lid: u16,
    gid: [u8; 16],
}

/// Shared receives, and receives of each queue pair.
const KINDS: [bool; 2] = [true, false];

fn end(change: impl Fn(&mut RcSettings)) -> Option<End> {
    let (device, port, gid) = device()?;
    let mut settings = RcSettings {
        port: 1,
        pkey_index: 0,
        gid: gid.index,
        routed: port.link == LinkLayer::Ethernet,
        mtu: port.mtu,
        marks: Marks::default(),
        timeout: 16,
        connections: 16,
        receives: 64,
        sends: 16,
        reads: 8,
        serves: 8,
        shared: true,
    };
    change(&mut settings);
    let rc = RcPort::open(&device, settings).unwrap();
    // Not all devices have shared receives (irdma); all have the others.
    assert!(settings.shared || !rc.settings().shared);
    Some(End { device, port: rc, events: Vec::new(), lid: port.lid, gid: gid.raw })
}

fn ends(shared: bool) -> Option<(End, End)> {
    let one = || end(|settings| settings.shared = shared);
    Some((one()?, one()?))
}

impl End {
    fn address(&self, qp: &RcQp<Keep>, psn: u32) -> RcAddress {
        let RcSettings { mtu, serves, .. } = *self.port.settings();
        let (number, routed) = (qp.number(), false);
        RcAddress { number, psn, mtu, lid: self.lid, gid: self.gid, routed, serves }
    }

    fn poll(&mut self) -> usize {
        let events = &mut self.events;
        self.port.poll(|event| events.push(event)).unwrap()
    }

    /// Waits for `count` events, asleep in between.
    fn events(&mut self, count: usize) -> Vec<RcEvent> {
        let end = Instant::now() + crate::patience::seconds(20);
        while self.events.len() < count && Instant::now() < end {
            if self.poll() == 0 && self.port.sleep() {
                let _ = wait_readable(self.port.fd(), 100);
            }
        }
        std::mem::take(&mut self.events)
    }

    fn register(&self, memory: &[u8], permission: Permission) -> Registration {
        self.port.registrar().register(memory.as_ptr().addr(), memory.len(), permission).unwrap()
    }
}

fn connect(a: &mut End, b: &mut End) -> (RcQp<Keep>, RcQp<Keep>) {
    let (mut from, mut to) = (a.port.connection().unwrap(), b.port.connection().unwrap());
    let (here, there) = (a.address(&from, 0xff_fff0), b.address(&to, 77));
    from.connect(&there, 0xff_fff0).unwrap();
    to.connect(&here, 77).unwrap();
    (from, to)
}

fn local(memory: &[u8], mr: &Registration) -> [(u64, u32, u32); 1] {
    [(memory.as_ptr().expose_provenance() as u64, memory.len() as u32, mr.lkey())]
}

fn noise(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31) ^ (i >> 8) ^ seed) as u8).collect()
}

#[test]
fn writes_of_all_sizes_arrive_whole_and_in_order() {
    for shared in KINDS {
        let Some((mut a, mut b)) = ends(shared) else { return };
        let (mut from, to) = connect(&mut a, &mut b);
        let target = vec![0u8; 1 << 20];
        let remote = b.register(&target, Permission::RemoteWrite);
        let at = target.as_ptr().expose_provenance() as u64;
        for (i, len) in
            [0, 1, 63, 64, 1024, 4095, 4096, 4097, 65_536, 100_001, 1 << 20].into_iter().enumerate()
        {
            let source = noise(len, i);
            let immediate = 0x8000_0001 + i as u32;
            let mr = (len > 0).then(|| a.register(&source, Permission::Read));
            let segments = mr.iter().flat_map(|mr| local(&source, mr)).collect::<Vec<_>>();
            let keep = Keep::default();
            // SAFETY: `source` and `target` live until both ends have reported the write.
            unsafe { from.post(&segments, at, remote.rkey(), Announced(immediate), keep.clone()) }
                .unwrap();
            let filled = RcEvent::Filled { qp: to.number(), immediate, len: len as u32 };
            assert_eq!(b.events(1), [filled]);
            assert_eq!(a.events(1), [RcEvent::Written { qp: from.number() }]);
            assert_eq!(Keep::strong_count(&keep), 2);
            from.on_written();
            assert_eq!(Keep::strong_count(&keep), 1);
            // SAFETY: `target` lives, and no write is under way.
            let got = unsafe { std::slice::from_raw_parts(target.as_ptr(), len) };
            assert!(got == source, "{len} bytes, shared {shared}");
        }
    }
}

#[test]
fn segments_are_put_together() {
    let Some((mut a, mut b)) = ends(true) else { return };
    let (mut from, _to) = connect(&mut a, &mut b);
    let (source, target) = (noise(30_000, 1), vec![0u8; 20_000]);
    let (mr, remote) =
        (a.register(&source, Permission::Read), b.register(&target, Permission::RemoteWrite));
    let most = from.segments_max();
    assert!(most >= 2);
    let parts = |n: usize| -> Vec<&[u8]> { (0..n).map(|i| &source[i * 7000..][..3001]).collect() };
    let list = |n| -> Vec<_> { parts(n).iter().flat_map(|part| local(part, &mr)).collect() };
    let at = target.as_ptr().expose_provenance() as u64;
    let too_many = vec![(at, 1, mr.lkey()); most + 1];
    // SAFETY: `source` and `target` live until both ends have reported the write.
    let refused = unsafe { from.post(&too_many, at, remote.rkey(), Announced(1), Keep::default()) };
    assert_eq!(refused, Err(Errno(libc::EINVAL)));
    // SAFETY: `source` and `target` live until both ends have reported the write.
    unsafe { from.post(&list(most), at + 5, remote.rkey(), Announced(2), Keep::default()) }
        .unwrap();
    assert_eq!(b.events(1).len(), 1);
    // SAFETY: `target` lives, and no write is under way.
    let got = unsafe { std::slice::from_raw_parts(target.as_ptr().add(5), most * 3001) };
    assert!(got == parts(most).concat());
    assert_eq!(a.events(1).len(), 1);
}

/// The double reports that a queue pair with shared receives has broken; real devices too, but for soft-RoCE.
#[test]
fn a_queue_pair_that_breaks_is_reported_to_the_user_that_made_it() {
    let Some((mut a, mut b)) = ends(true) else { return };
    if a.device.is_soft() {
        return eprintln!("skipped: soft-RoCE does not report it");
    }
    assert!(a.device.shares(&b.device));
    let (mut from, to) = connect(&mut a, &mut b);
    let (source, target) = (noise(100, 1), vec![0u8; 100]);
    let (mr, remote) =
        (a.register(&source, Permission::Read), b.register(&target, Permission::RemoteWrite));
    let at = target.as_ptr().expose_provenance() as u64;
    drop(to);
    // SAFETY: `source` and `target` live until the connection ends.
    unsafe { from.post(&local(&source, &mr), at, remote.rkey(), Announced(1), Keep::default()) }
        .unwrap();
    assert!(matches!(a.events(1)[..], [RcEvent::Failed { .. }]));
    // The other user looks first, and takes what is not its own.
    let mut heard = [Vec::new(), Vec::new()];
    for _ in 0..10 {
        for (end, heard) in [&b, &a].into_iter().zip(&mut heard) {
            heard.extend(end.device.take_event().unwrap().map(|event| event.name));
        }
    }
    assert_eq!(heard, [vec![], vec!["QP_LAST_WQE_REACHED"]]);
}

#[test]
fn a_key_that_is_none_ends_the_connection_and_writes_nothing() {
    for shared in KINDS {
        let Some((mut a, mut b)) = ends(shared) else { return };
        let (mut from, to) = connect(&mut a, &mut b);
        let (source, target) = (noise(20_000, 1), vec![0u8; 20_000]);
        let mr = a.register(&source, Permission::Read);
        // The key allows peers nothing.
        let remote = b.register(&target, Permission::Write);
        let at = target.as_ptr().expose_provenance() as u64;
        for immediate in 1..=3 {
            let segments = local(&source, &mr);
            // SAFETY: `source` and `target` live until the connection ends.
            unsafe {
                from.post(&segments, at, remote.rkey(), Announced(immediate), Keep::default())
            }
            .unwrap();
        }
        let events = a.events(1);
        let failed = RcEvent::Failed { qp: from.number(), status: IBV_WC_REM_ACCESS_ERR };
        assert_eq!(events, [failed]);
        std::thread::sleep(Duration::from_millis(20));
        a.poll();
        assert_eq!(a.events, [], "the other writes are not worth an event each");
        // The far end gets an event from its own receives, if it has any.
        b.poll();
        let heard = std::mem::take(&mut b.events);
        let failed =
            |event: &RcEvent| matches!(event, RcEvent::Failed { qp, .. } if *qp == to.number());
        let own = !b.port.settings().shared;
        assert!(heard.iter().all(failed) && heard.len() == usize::from(own), "{heard:?}");
        assert!(target.iter().all(|byte| *byte == 0));

        // The ports still work.
        drop((from, to));
        let (mut from, _to) = connect(&mut a, &mut b);
        let remote = b.register(&target, Permission::RemoteWrite);
        // SAFETY: `source` and `target` live until the connection ends.
        unsafe {
            from.post(&local(&source, &mr), at, remote.rkey(), Announced(4), Keep::default())
        }
        .unwrap();
        assert!(matches!(b.events(1)[..], [RcEvent::Filled { immediate: 4, .. }]));
        assert!(matches!(a.events(1)[..], [RcEvent::Written { .. }]));
    }
}

#[test]
fn without_receives_writes_wait() {
    for shared in KINDS {
        let few = |settings: &mut RcSettings| {
            (settings.receives, settings.sends, settings.shared) = (4, 256, shared);
        };
        let (Some(mut a), Some(mut b)) = (end(few), end(few)) else { return };
        let (mut from, to) = connect(&mut a, &mut b);
        let (source, target) = (noise(300, 1), vec![0u8; 300]);
        let mr = a.register(&source, Permission::Read);
        let remote = b.register(&target, Permission::RemoteWrite);
        let at = target.as_ptr().expose_provenance() as u64;
        for immediate in 0..200 {
            // SAFETY: `source` and `target` live until all writes have been reported.
            unsafe {
                from.post(
                    &local(&source, &mr),
                    at,
                    remote.rkey(),
                    Announced(immediate),
                    Keep::default(),
                )
            }
            .unwrap();
        }
        std::thread::sleep(Duration::from_millis(200));
        let early = a.poll();
        assert!(early < 200, "it cannot have had receives for all");
        let got = b.events(200);
        let wanted =
            (0..200).map(|immediate| RcEvent::Filled { qp: to.number(), immediate, len: 300 });
        assert!(got.into_iter().eq(wanted));
        let written = a.events(200);
        assert_eq!(written, [RcEvent::Written { qp: from.number() }; 200]);
    }
}

#[test]
fn more_writes_than_there_is_room_for_are_refused() {
    let Some((mut a, mut b)) = ends(true) else { return };
    let (mut from, _to) = connect(&mut a, &mut b);
    let (source, target) = (noise(5000, 1), vec![0u8; 5000]);
    let mr = a.register(&source, Permission::Read);
    let remote = b.register(&target, Permission::RemoteWrite);
    let at = target.as_ptr().expose_provenance() as u64;
    let sends = a.port.settings().sends as usize;
    assert_eq!((from.room(), sends), (16, 16));
    let mut posted = 0;
    for round in 0..20 {
        let keep = Keep::default();
        loop {
            let segments = local(&source, &mr);
            // SAFETY: `source` and `target` live until all writes have been reported.
            match unsafe { from.post(&segments, at, remote.rkey(), Announced(0), keep.clone()) } {
                Ok(()) => posted += 1,
                Err(errno) => {
                    assert_eq!(errno, Errno(libc::EAGAIN), "round {round}");
                    break;
                }
            }
        }
        assert_eq!((from.room(), Keep::strong_count(&keep)), (0, sends + 1));
        for event in a.events(sends) {
            assert_eq!(event, RcEvent::Written { qp: from.number() });
            from.on_written();
        }
        assert_eq!((from.room(), Keep::strong_count(&keep)), (sends, 1));
        assert_eq!(b.events(sends).len(), sends);
    }
    assert_eq!(posted, 320);
}

#[test]
fn requests_that_wait_are_posted_together_and_done_in_order() {
    const PART: usize = 500;
    let Some((mut a, mut b)) = ends(true) else { return };
    let (mut from, to) = connect(&mut a, &mut b);
    let sends = a.port.settings().sends as usize;
    let (source, target, sink) = (noise(PART, 1), vec![0u8; PART * 2], vec![0u8; PART]);
    let (mr, into) = (a.register(&source, Permission::Read), a.register(&sink, Permission::Write));
    let exposed = Permission::Exposed { reads: true, writes: true };
    let remote = b.register(&target, exposed);
    let at = target.as_ptr().expose_provenance() as u64;
    let keep = Keep::default();
    let add = |qp: &mut RcQp<Keep>, list: &[(u64, u32, u32)], to: usize, request: RcRequest| {
        // SAFETY: the memory lives until the connection ends.
        unsafe { qp.add(list, at + to as u64, remote.rkey(), request, keep.clone()) }
    };
    let (out, back) = (local(&source, &mr), local(&sink, &into));
    from.post_waiting().unwrap();
    // For the same bytes, the later request wins: a read returns what was written before it.
    add(&mut from, &out, PART, RcRequest::Write).unwrap();
    add(&mut from, &back, PART, RcRequest::Read).unwrap();
    for part in 0..4 {
        let list = [(out[0].0 + part * 100, 100, out[0].2)];
        add(&mut from, &list, 0, RcRequest::Write).unwrap();
    }
    add(&mut from, &out, PART, Announced(7)).unwrap();
    assert_eq!((from.waiting(), from.room(), Keep::strong_count(&keep)), (7, sends - 7, 8));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((a.poll(), b.poll()), (0, 0), "nothing has left");
    assert!(target.iter().all(|byte| *byte == 0));
    from.post_waiting().unwrap();
    assert_eq!(from.waiting(), 0);
    assert_eq!(b.events(1), [RcEvent::Filled { qp: to.number(), immediate: 7, len: PART as u32 }]);
    assert_eq!(a.events(7), [RcEvent::Written { qp: from.number() }; 7]);
    (0..7).for_each(|_| from.on_written());
    assert_eq!((from.room(), Keep::strong_count(&keep)), (sends, 1));
    // SAFETY: the memory lives, and no request is under way.
    let bytes =
        |memory: &[u8]| unsafe { std::slice::from_raw_parts(memory.as_ptr(), memory.len()) };
    assert!(bytes(&sink) == source && bytes(&target)[..100] == source[300..400]);
    assert!(bytes(&target)[PART..] == source);
    // Requests count whether posted or not; a request that was never posted is never done.
    for _ in 0..sends {
        add(&mut from, &out, 0, RcRequest::Write).unwrap();
    }
    assert_eq!(add(&mut from, &out, 0, RcRequest::Write), Err(Errno(libc::EAGAIN)));
    drop(from);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((a.poll(), Keep::strong_count(&keep)), (0, 1));
    assert!(bytes(&target)[..100] == source[300..400]);
}

/// Whatever limits the ends have, all reads complete, with the right data. A device may break the connection of a peer
/// that issues more reads than it serves; soft-RoCE accepts them.
#[test]
fn ends_that_read_and_serve_unlike_numbers_read_all_the_same() {
    const PART: usize = 5000;
    for (reads, serves) in [(64, 1), (1, 64), (16, 64)] {
        let Some(mut a) = end(|settings| settings.reads = reads) else { return };
        let mut b = end(|settings| settings.serves = serves).unwrap();
        assert!(b.port.settings().serves <= serves);
        let (mut from, _to) = connect(&mut a, &mut b);
        let count = a.port.settings().sends as usize;
        let (source, sink) = (noise(PART * count, 3), vec![0u8; PART * count]);
        let into = a.register(&sink, Permission::Write);
        let exposed = Permission::Exposed { reads: true, writes: false };
        let remote = b.register(&source, exposed);
        let at = source.as_ptr().expose_provenance() as u64;
        for i in 0..count {
            let list = local(&sink[i * PART..][..PART], &into);
            let (at, keep) = (at + (i * PART) as u64, Keep::default());
            // SAFETY: the memory lives until the connection ends.
            unsafe { from.add(&list, at, remote.rkey(), RcRequest::Read, keep) }.unwrap();
        }
        from.post_waiting().unwrap();
        let read = a.events(count);
        assert_eq!(read, vec![RcEvent::Written { qp: from.number() }; count], "{reads} {serves}");
        // SAFETY: `sink` lives, and no read is under way.
        assert!(unsafe { std::slice::from_raw_parts(sink.as_ptr(), sink.len()) } == source);
    }
}

#[test]
fn a_queue_pair_that_is_not_connected_writes_nothing() {
    let Some((mut a, b)) = ends(true) else { return };
    let mut qp: RcQp<Keep> = a.port.connection().unwrap();
    // SAFETY: no memory is named.
    let refused = unsafe { qp.post(&[], 0, 0, Announced(0), Keep::default()) };
    assert_eq!(refused, Err(Errno(libc::ENOTCONN)));
    let to = RcAddress { mtu: 100, ..b.address(&qp, 1) };
    assert_eq!(qp.connect(&to, 1), Err(Errno(libc::EINVAL)));
}

#[test]
fn a_connection_that_ends_under_writes_lets_go_of_what_it_kept() {
    for shared in KINDS {
        let Some((mut a, mut b)) = ends(shared) else { return };
        let (source, target) = (noise(60_000, 1), vec![0u8; 60_000]);
        let mr = a.register(&source, Permission::Read);
        let remote = b.register(&target, Permission::RemoteWrite);
        let at = target.as_ptr().expose_provenance() as u64;
        let write = |qp: &mut RcQp<Keep>, keep: &Keep| {
            // SAFETY: `source` and `target` live until the connection ends.
            unsafe { qp.post(&local(&source, &mr), at, remote.rkey(), Announced(9), keep.clone()) }
                .unwrap();
        };
        let (mut bystander, _to) = connect(&mut a, &mut b);
        for round in 0..30 {
            let keep = Keep::default();
            let (mut from, to) = connect(&mut a, &mut b);
            for _ in 0..8 {
                write(&mut from, &keep);
            }
            assert_eq!(Keep::strong_count(&keep), 9);
            if round % 3 == 1 {
                std::thread::sleep(Duration::from_millis(round));
            }
            if round % 2 == 0 {
                drop((from, to));
            } else {
                drop((to, from));
            }
            assert_eq!(Keep::strong_count(&keep), 1);
        }
        // No event of ended connections is reported, and all receives are posted again.
        a.poll();
        b.poll();
        assert_eq!((&a.events[..], &b.events[..]), (&[][..], &[][..]));
        for _ in 0..8 {
            let keep = Keep::default();
            for _ in 0..16 {
                write(&mut bystander, &keep);
            }
            assert_eq!(b.events(16).len(), 16);
            for event in a.events(16) {
                assert_eq!(event, RcEvent::Written { qp: bystander.number() });
                bystander.on_written();
            }
        }
    }
}

#[test]
fn connections_come_and_go_by_the_thousand() {
    for shared in KINDS {
        let Some((mut a, mut b)) = ends(shared) else { return };
        let target = [0u8; 64];
        let source = [7u8; 64];
        let mr = a.register(&source, Permission::Read);
        let remote = b.register(&target, Permission::RemoteWrite);
        let at = target.as_ptr().expose_provenance() as u64;
        for i in 0..500 {
            let (mut from, to) = connect(&mut a, &mut b);
            let rkey = remote.rkey();
            // SAFETY: both live until the connection ends.
            unsafe { from.post(&local(&source, &mr), at, rkey, Announced(i), Keep::default()) }
                .unwrap();
            if i % 10 == 0 {
                let filled = RcEvent::Filled { qp: to.number(), immediate: i, len: 64 };
                assert_eq!(b.events(1), [filled]);
                assert_eq!(a.events(1), [RcEvent::Written { qp: from.number() }]);
            }
        }
        assert!(a.events.is_empty() && b.events.is_empty());
    }
}

#[test]
fn there_are_no_more_connections_than_asked_for() {
    let Some(mut a) = end(|settings| settings.connections = 3) else { return };
    let mut all: Vec<RcQp<Keep>> = (0..3).map(|_| a.port.connection().unwrap()).collect();
    let more = a.port.connection::<Keep>().map(|_| ());
    assert_eq!(more, Err(Errno(libc::EAGAIN)));
    all.pop();
    let again = a.port.connection::<Keep>().unwrap();
    assert!(all.iter().all(|qp| qp.number() != again.number()));
}

#[test]
fn registrations_are_of_memory_that_exists() {
    let Some(a) = end(|_| ()) else { return };
    let registrar = a.port.registrar();
    let fails = |addr, len| registrar.register(addr, len, Permission::Read).map(|_| ());
    assert_eq!(fails(0x1000, 4096), Err(Errno(libc::EFAULT)));
    assert_eq!(fails(usize::MAX - 4095, 8192), Err(Errno(libc::EFAULT)));
    if crate::sys::process::kernel_is_at_least(5, 12) {
        assert_eq!(fork_hazard(), None);
    }
    let text = "constant".as_ptr().addr() & !4095;
    assert!(registrar.register(text, 4096, Permission::Read).is_ok());
    assert!(registrar.register(text, 4096, Permission::Write).is_err());
}

#[test]
fn a_forked_child_ends_no_connection() {
    let Some((mut a, mut b)) = ends(true) else { return };
    let (mut from, to) = connect(&mut a, &mut b);
    let (source, target) = (noise(5000, 1), vec![0u8; 5000]);
    let mr = a.register(&source, Permission::Read);
    let remote = b.register(&target, Permission::RemoteWrite);
    // SAFETY: the child drops its copies and exits without returning.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop((from, to, mr, remote, a, b));
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    let at = target.as_ptr().expose_provenance() as u64;
    // SAFETY: both live until the write is reported.
    unsafe { from.post(&local(&source, &mr), at, remote.rkey(), Announced(1), Keep::default()) }
        .unwrap();
    assert_eq!(b.events(1), [RcEvent::Filled { qp: to.number(), immediate: 1, len: 5000 }]);
    assert_eq!(a.events(1), [RcEvent::Written { qp: from.number() }]);
}

#[test]
fn a_write_that_had_arrived_is_reported_behind_a_failure() {
    let entry = |status, wr_id| {
        // SAFETY: all zeroes is a valid ibv_wc.
        let mut entry: ibv_wc = unsafe { std::mem::zeroed() };
        (entry.status, entry.wr_id, entry.qp_num, entry.byte_len) = (status, wr_id, 5, 9);
        (entry.opcode, entry.wc_flags) = (IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_WITH_IMM);
        entry.__bindgen_anon_1.imm_data = 7u32.to_be();
        entry
    };
    let all = [
        entry(IBV_WC_RETRY_EXC_ERR, WRITE),
        entry(IBV_WC_WR_FLUSH_ERR, WRITE),
        entry(IBV_WC_SUCCESS, 0),
        entry(IBV_WC_SUCCESS, WRITE),
        entry(IBV_WC_WR_FLUSH_ERR, 0),
    ];
    let mut failed = false;
    let events: Vec<_> = all.iter().filter_map(|entry| event(entry, &mut failed)).collect();
    let first = RcEvent::Failed { qp: 5, status: IBV_WC_RETRY_EXC_ERR };
    assert_eq!(events, [first, RcEvent::Filled { qp: 5, immediate: 7, len: 9 }]);
}

#[test]
fn requests_complete_before_a_stop_are_reported() {
    for shared in KINDS {
        let Some((mut a, mut b)) = ends(shared) else { return };
        let (mut from, mut to) = connect(&mut a, &mut b);
        let (source, target) = (noise(300, 1), vec![0u8; 300]);
        let mr = a.register(&source, Permission::Read);
        let remote = b.register(&target, Permission::RemoteWrite);
        let at = target.as_ptr().expose_provenance() as u64;
        let segments = local(&source, &mr);
        for immediate in 0..16 {
            let (immediate, keep) = (Announced(immediate), Keep::default());
            // SAFETY: `source` and `target` live until the connection ends.
            unsafe { from.post(&segments, at, remote.rkey(), immediate, keep) }.unwrap();
        }
        to.stop();
        while b.poll() > 0 {}
        let filled = |end: &End| {
            end.events.iter().filter(|event| matches!(event, RcEvent::Filled { .. })).count()
        };
        let written = |event: &RcEvent| matches!(event, RcEvent::Written { .. });
        // The sender hears of those. Of the writes that came too late it may hear nothing: soft-RoCE repeats a request for
        // ever where its retry count is 7 (drivers/infiniband/sw/rxe/rxe_comp.c), so it is stopped too.
        let reported = filled(&b);
        let mut sent = a.events(reported);
        from.stop();
        while a.poll() > 0 {}
        sent.append(&mut a.events);
        while b.poll() > 0 {}
        let told = sent.iter().filter(|event| written(event)).count();
        assert!(reported <= told && told <= filled(&b), "{reported} {sent:?} {:?}", b.events);
        // SAFETY: `source` and `target` live until the connection ends.
        let more = unsafe { to.post(&segments, at, remote.rkey(), Announced(1), Keep::default()) };
        assert_eq!(more, Err(Errno(libc::ENOTCONN)));
    }
}

#[test]
fn an_event_wakes_one_sleep() {
    let Some((mut a, mut b)) = ends(true) else { return };
    let (mut from, _to) = connect(&mut a, &mut b);
    let (source, target) = ([7u8; 64], [0u8; 64]);
    let mr = a.register(&source, Permission::Read);
    let remote = b.register(&target, Permission::RemoteWrite);
    let at = target.as_ptr().expose_provenance() as u64;
    for again in [RcPort::sleep, |port: &mut RcPort| {
        port.silence();
        true
    }] {
        // Something else ends the sleep; the queue stays armed.
        assert!(b.port.sleep());
        assert_eq!(b.poll(), 0);
        // SAFETY: both live until the write is reported.
        unsafe {
            from.post(&local(&source, &mr), at, remote.rkey(), Announced(1), Keep::default())
        }
        .unwrap();
        assert_eq!(wait_readable(b.port.fd(), 20_000), Ok(true));
        assert_eq!(b.events(1).len(), 1);
        assert!(again(&mut b.port));
        assert_eq!(wait_readable(b.port.fd(), 0), Ok(false));
        assert_eq!(a.events(1).len(), 1);
        from.on_written();
    }
}
