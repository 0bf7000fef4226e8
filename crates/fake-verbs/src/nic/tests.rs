//! Two processes' devices, in one process, on a virtual cable: what programs may rely on, in any weather, and what the
//! verifier finds.

use super::*;
use crate::wire::Route;
use rdma_core_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    IBV_EVENT_QP_LAST_WQE_REACHED, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR,
    IBV_QPS_RTS, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_INV_REQ_ERR, IBV_WC_RETRY_EXC_ERR,
    IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

const ANY: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
const QKEY: u32 = 77;

/// A process: its device, and one queue pair with memory.
struct End {
    nic: Nic,
    context: u32,
    domain: u32,
    queue: u32,
    pair: u32,
    memory: Vec<u8>,
    key: u32,
}

/// The directory of a run, which ends with it.
struct Run(PathBuf);

impl Run {
    fn new(personality: &Personality) -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let name = format!("fake-nic-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        crate::sysfs::make(&directory, personality).unwrap();
        Self(directory)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

impl End {
    fn new(
        run: &Run,
        personality: &'static Personality,
        weather: &str,
        kind: Kind,
        seed: u64,
    ) -> Self {
        let weather = Weather::parse(weather).unwrap();
        let mut nic = Nic::open_in(run.0.clone(), personality, weather, (seed, 0)).unwrap();
        let (context, _) = nic.open_device(0).unwrap();
        let domain = nic.allocate_domain(context);
        let (queue, _) = nic.make_queue(64, None).unwrap();
        let memory = vec![0u8; 1 << 16];
        let addr = memory.as_ptr().expose_provenance() as u64;
        let key = nic.register(domain, addr, memory.len() as u64, ANY).unwrap();
        let made = Made {
            kind,
            context,
            domain,
            send_queue: queue,
            receive_queue: queue,
            shared: None,
            sends: 16,
            receives: 16,
            segments: 2,
            inline: 0,
            all_signaled: true,
        };
        let (pair, _) = nic.make_pair(made, 0).unwrap();
        let mut end = Self { nic, context, domain, queue, pair, memory, key };
        end.step(IBV_QPS_INIT, |to| (to.port, to.qkey, to.access) = (1, QKEY, ANY));
        end
    }

    fn step(&mut self, state: u32, change: impl FnOnce(&mut Attributes)) {
        self.nic.modify(self.pair, state, change).unwrap();
    }

    fn addr(&self, at: usize) -> u64 {
        self.memory.as_ptr().expose_provenance() as u64 + at as u64
    }

    fn segment(&self, at: usize, len: u32) -> Segment {
        Segment { addr: self.addr(at), len, key: self.key }
    }

    fn receive(&mut self, id: u64, segments: Vec<Segment>) {
        self.nic.post_receive(self.pair, Receive { id, segments }).unwrap();
    }

    fn send(&mut self, id: u64, operation: Operation, segments: Vec<Segment>) -> Result<(), i32> {
        let send = Send { id, operation, segments, inline: None, signaled: true, fence: false };
        self.nic.post_send(self.pair, send)?;
        self.nic.ring(self.pair);
        Ok(())
    }

    fn poll(&mut self) -> Vec<Entry> {
        self.nic.poll(self.queue, 16)
    }
}

/// Two connected ends.
fn connected(run: &Run, personality: &'static Personality, weather: &str, seed: u64) -> [End; 2] {
    let mut ends = [1, 2].map(|n| End::new(run, personality, weather, Kind::Rc, seed * 2 + n));
    let pairs = ends.each_ref().map(|end| end.pair);
    for (end, to) in ends.iter_mut().zip([pairs[1], pairs[0]]) {
        let port = end.nic.port(end.context, 1).unwrap();
        let gid = port.gid(port.gid_count() - 1).unwrap();
        let route = Route { to, lid: port.lid, gids: Some((gid, gid)), ..Route::default() };
        end.step(IBV_QPS_RTR, |at| (at.route, at.mtu, at.serves) = (route, 1024, 4));
        end.step(IBV_QPS_RTS, |at| {
            (at.timeout, at.retries, at.rnr_retries, at.reads) = (8, 7, 7, 4);
        });
    }
    ends
}

fn roce() -> &'static Personality {
    personality::find("mlx5-roce").unwrap()
}

/// Polls both, at most so often, until `done`.
fn until(ends: &mut [End; 2], mut done: impl FnMut(&mut [End; 2]) -> bool) {
    for _ in 0..100_000 {
        if done(ends) {
            return;
        }
        std::thread::yield_now();
    }
    panic!("nothing happens any more");
}

/// What the verifier says.
fn violation_of(act: impl FnOnce()) -> String {
    let caught = catch_unwind(AssertUnwindSafe(act)).unwrap_err();
    *caught.downcast::<String>().unwrap()
}

#[test]
fn a_write_is_all_there_at_its_completion_in_any_weather() {
    for weather in ["calm", "scatter", "relaxed", "rnr", "storm"] {
        for seed in 0..10 {
            let run = Run::new(roce());
            let mut ends = connected(&run, roce(), weather, seed);
            let (to, rkey) = (ends[1].addr(5), ends[1].key);
            for byte in &mut ends[0].memory[..40_000] {
                *byte = 9;
            }
            ends[1].receive(3, Vec::new());
            let operation = Operation::Write { addr: to, rkey, immediate: Some(8) };
            let from = ends[0].segment(0, 40_000);
            ends[0].send(1, operation, vec![from]).unwrap();
            until(&mut ends, |[one, two]| {
                one.nic.progress();
                let Some(entry) = two.poll().pop() else { return false };
                assert_eq!(
                    (entry.status, entry.opcode),
                    (IBV_WC_SUCCESS, IBV_WC_RECV_RDMA_WITH_IMM)
                );
                assert_eq!((entry.id, entry.immediate, entry.len), (3, Some(8), 40_000));
                assert_eq!(
                    two.memory.iter().filter(|byte| **byte == 9).count(),
                    40_000,
                    "{weather}"
                );
                assert_eq!((two.memory[4], two.memory[5]), (0, 9));
                true
            });
            until(&mut ends, |[one, two]| {
                two.nic.progress();
                one.poll().iter().any(|entry| (entry.id, entry.status) == (1, IBV_WC_SUCCESS))
            });
        }
    }
}

#[test]
fn relaxed_weather_places_the_end_before_the_middle() {
    let seen = (0..20).any(|seed| {
        let run = Run::new(roce());
        let mut ends = connected(&run, roce(), "scatter=bus", seed);
        let (addr, rkey) = (ends[1].addr(0), ends[1].key);
        ends[0].memory.fill(1);
        let from = ends[0].segment(0, 50_000);
        ends[0].send(1, Operation::Write { addr, rkey, immediate: None }, vec![from]).unwrap();
        let mut torn = false;
        until(&mut ends, |[one, two]| {
            two.nic.progress();
            let (middle, end) = (&two.memory[..49_744], two.memory[49_999]);
            torn |= end == 1 && middle.contains(&0);
            !one.poll().is_empty()
        });
        torn
    });
    assert!(seen);
}

#[test]
fn a_read_sees_the_writes_before_it() {
    for seed in 0..10 {
        let run = Run::new(roce());
        let mut ends = connected(&run, roce(), "relaxed", seed);
        let (addr, rkey) = (ends[1].addr(0), ends[1].key);
        ends[0].memory[..9000].fill(5);
        let (from, to) = (ends[0].segment(0, 9000), ends[0].segment(20_000, 9000));
        ends[0].send(1, Operation::Write { addr, rkey, immediate: None }, vec![from]).unwrap();
        ends[0].send(2, Operation::Read { addr, rkey }, vec![to]).unwrap();
        let mut ids = Vec::new();
        until(&mut ends, |[one, two]| {
            two.nic.progress();
            ids.extend(one.poll().iter().map(|entry| entry.id));
            ids.len() == 2
        });
        assert_eq!(ids, [1, 2]);
        assert!(ends[0].memory[20_000..29_000].iter().all(|byte| *byte == 5));
    }
}

#[test]
fn a_peer_that_has_ended_fails_the_request_and_flushes_the_others() {
    let run = Run::new(roce());
    let [mut one, two] = connected(&run, roce(), "calm", 1);
    let (addr, rkey) = (two.addr(0), two.key);
    drop(two);
    for id in [1, 2] {
        let from = one.segment(0, 100);
        one.send(id, Operation::Write { addr, rkey, immediate: None }, vec![from]).unwrap();
    }
    let mut entries = Vec::new();
    for _ in 0..10_000 {
        entries.extend(one.poll());
        std::thread::sleep(Duration::from_micros(100));
        if entries.len() == 2 {
            break;
        }
    }
    let status = entries.iter().map(|entry| entry.status).collect::<Vec<_>>();
    assert_eq!(status, [IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR]);
    assert_eq!(one.nic.modify(one.pair, IBV_QPS_RTS, |_| ()), Err(libc::EINVAL));
}

/// Two UD ends, and a handle of the first for the port of the second.
fn datagrams(
    run: &Run,
    personality: &'static Personality,
    weather: &str,
    global: bool,
) -> ([End; 2], u32) {
    let mut ends = [1, 2].map(|seed| End::new(run, personality, weather, Kind::Ud, seed));
    for end in &mut ends {
        end.step(IBV_QPS_RTR, |_| ());
        end.step(IBV_QPS_RTS, |_| ());
        for slot in 0..8 {
            let room = end.segment(4096 * slot, 2048);
            end.receive(slot as u64, vec![room]);
        }
    }
    let [one, _] = &mut ends;
    let port = one.nic.port(one.context, 1).unwrap();
    let gid = port.gid(port.gid_count() - 1).unwrap();
    let gids = global.then_some((gid, gid));
    let route = Route { lid: port.lid, gids, ..Route::default() };
    let handle = Handle { domain: one.domain, route, source_index: 0, global, port: 1 };
    let handle = one.nic.make_handle(handle).unwrap();
    (ends, handle)
}

/// How many of `count` datagrams arrive.
fn arrivals(ends: &mut [End; 2], handle: u32, qkey: u32, count: u64) -> usize {
    let [one, two] = ends;
    let mut got = 0;
    for id in 0..count {
        let from = one.segment(60_000, 100);
        let operation = Operation::Datagram { handle, pair: two.pair, qkey };
        one.send(id, operation, vec![from]).unwrap();
        for _ in 0..100 {
            one.poll();
            for entry in two.poll() {
                assert_eq!(
                    (entry.status, entry.len, entry.source),
                    (IBV_WC_SUCCESS, 140, one.pair)
                );
                let slot = entry.id as usize;
                let room = two.segment(4096 * slot, 2048);
                two.receive(entry.id, vec![room]);
                got += 1;
            }
        }
    }
    got
}

#[test]
fn datagrams_arrive_where_route_partition_and_key_allow() {
    for (name, global, qkey, want) in [
        ("mlx5-roce", true, QKEY, 20),
        ("mlx5-roce", true, QKEY + 1, 0),
        ("mlx5-ib", false, QKEY, 20),
        ("vf-grh", false, QKEY, 0),
        ("vf-grh", true, QKEY, 20),
        ("pkeys", false, QKEY, 0),
    ] {
        let personality = personality::find(name).unwrap();
        let run = Run::new(personality);
        let (mut ends, handle) = datagrams(&run, personality, "calm", global);
        assert_eq!(arrivals(&mut ends, handle, qkey, 20), want, "{name} {global}");
    }
    let run = Run::new(roce());
    let (mut ends, handle) = datagrams(&run, roce(), "loss=30%,duplication=10%,delay=10%", true);
    let got = arrivals(&mut ends, handle, QKEY, 200);
    assert!((120..190).contains(&got), "{got}");
}

#[test]
fn the_verifier_finds_memory_that_is_not_the_requests() {
    let run = Run::new(roce());
    let [mut one, two] = connected(&run, roce(), "calm", 1);
    let write = Operation::Write { addr: two.addr(0), rkey: two.key, immediate: None };
    let long = one.segment(60_000, 9000);
    let why = violation_of(|| _ = one.send(1, write, vec![long]));
    assert!(why.contains("the registration is 65536 bytes"), "{why}");
    let mut unknown = one.segment(0, 1);
    unknown.key += 1;
    let why = violation_of(|| _ = one.send(1, write, vec![unknown]));
    assert!(why.contains("no such registration"), "{why}");
}

#[test]
fn the_verifier_finds_what_changes_under_way() {
    let run = Run::new(roce());
    let [mut one, mut two] = connected(&run, roce(), "calm", 1);
    let write = Operation::Write { addr: two.addr(0), rkey: two.key, immediate: None };
    let from = one.segment(0, 100);
    one.send(1, write, vec![from]).unwrap();
    one.memory[7] = 1;
    let why = violation_of(|| {
        for _ in 0..1000 {
            two.nic.progress();
            one.poll();
        }
    });
    assert!(why.contains("changed before its completion"), "{why}");

    let (mut ends, handle) = datagrams(&run, roce(), "calm", true);
    ends[1].memory[41] = 1;
    let why = violation_of(|| _ = arrivals(&mut ends, handle, QKEY, 1));
    assert!(why.contains("a posted receive buffer was written"), "{why}");
}

#[test]
fn the_verifier_finds_rights_that_a_peer_does_not_have() {
    let run = Run::new(roce());
    let [mut one, mut two] = connected(&run, roce(), "calm", 1);
    let addr = two.addr(0);
    let key = two.nic.register(two.domain, addr, 100, ANY & !IBV_ACCESS_REMOTE_READ).unwrap();
    let to = one.segment(0, 100);
    one.send(1, Operation::Read { addr, rkey: key }, vec![to]).unwrap();
    let why = violation_of(|| (0..1000).for_each(|_| two.nic.progress()));
    assert!(why.contains("RemoteRead"), "{why}");
}

#[test]
fn the_verifier_finds_the_use_of_what_was_destroyed() {
    let run = Run::new(roce());
    let [mut one, _two] = connected(&run, roce(), "calm", 1);
    let (queue, key, pair) = (one.queue, one.key, one.pair);
    assert!(violation_of(|| one.nic.end_queue(queue)).contains("before its queue pairs"));
    one.nic.end_pair(pair);
    let receive = Receive { id: 0, segments: Vec::new() };
    let why = violation_of(|| _ = one.nic.post_receive(pair, receive));
    assert!(why.contains("after its destruction"), "{why}");
    one.nic.deregister(key);
    assert!(violation_of(|| one.nic.deregister(key)).contains("twice"));
    one.nic.end_queue(queue);
    let why = violation_of(|| _ = one.nic.poll(queue, 1));
    assert!(why.contains("after its destruction"), "{why}");
}

#[test]
fn queues_refuse_what_they_have_no_room_for() {
    let run = Run::new(roce());
    let [mut one, two] = connected(&run, roce(), "calm", 1);
    let write = Operation::Write { addr: two.addr(0), rkey: two.key, immediate: None };
    for id in 0..16 {
        let from = one.segment(0, 8);
        one.send(id, write, vec![from]).unwrap();
    }
    let from = one.segment(0, 8);
    assert_eq!(one.send(16, write, vec![from]), Err(libc::ENOMEM));
    assert_eq!(one.send(16, write, vec![from; 3]), Err(libc::EINVAL), "segments");
    for id in 0..16 {
        one.receive(id, Vec::new());
    }
    let more = Receive { id: 16, segments: Vec::new() };
    assert_eq!(one.nic.post_receive(one.pair, more), Err(libc::ENOMEM));
    one.step(IBV_QPS_ERR, |_| ());
    let flushed = one.poll().len() + one.poll().len();
    assert_eq!(flushed, 32, "all of both queues");
}

#[test]
fn attributes_beyond_the_devices_limits_are_refused() {
    let run = Run::new(roce());
    let [mut one, _two] = connected(&run, roce(), "calm", 1);
    let pair = one.pair;
    let changes: [fn(&mut Attributes); 6] = [
        |to| to.reads = 17,
        |to| to.serves = 17,
        |to| to.mtu = 2048,
        |to| to.timeout = 32,
        |to| to.retries = 8,
        |to| to.rnr_retries = 8,
    ];
    for change in changes {
        assert_eq!(one.nic.modify(pair, IBV_QPS_RTS, change), Err(libc::EINVAL));
    }
    let most = |to: &mut Attributes| (to.reads, to.serves, to.timeout) = (16, 16, 31);
    assert_eq!(one.nic.modify(pair, IBV_QPS_RTS, most), Ok(()), "none of them was kept");
}

#[test]
fn more_reads_than_the_peer_serves_end_the_connection() {
    for (serves, status) in [(2, IBV_WC_SUCCESS), (1, IBV_WC_REM_INV_REQ_ERR)] {
        let run = Run::new(roce());
        let mut ends = connected(&run, roce(), "calm", 1);
        let (addr, rkey) = (ends[1].addr(0), ends[1].key);
        ends[0].step(IBV_QPS_RTS, |at| at.reads = 2);
        ends[1].step(IBV_QPS_RTS, |at| at.serves = serves);
        for id in [1, 2] {
            let to = ends[0].segment(0, 100);
            ends[0].send(id, Operation::Read { addr, rkey }, vec![to]).unwrap();
        }
        let mut entries = Vec::new();
        until(&mut ends, |[one, two]| {
            two.nic.progress();
            entries.extend(one.poll());
            entries.len() == 2
        });
        let failed = entries.iter().find(|entry| entry.status != IBV_WC_SUCCESS);
        assert_eq!(failed.map_or(IBV_WC_SUCCESS, |entry| entry.status), status);
        let event = ends[1].nic.next_event(ends[1].context);
        assert_eq!(event.map(|event| event.code).is_some(), serves == 1);
    }
    let run = Run::new(roce());
    let [mut one, two] = connected(&run, roce(), "calm", 1);
    one.step(IBV_QPS_RTS, |at| at.reads = 0);
    let (read, to) = (Operation::Read { addr: two.addr(0), rkey: two.key }, one.segment(0, 8));
    assert!(violation_of(|| _ = one.send(1, read, vec![to])).contains("none under way"));
}

#[test]
fn events_are_counted_until_they_are_acknowledged() {
    let run = Run::new(roce());
    let mut end = End::new(&run, roce(), "calm", Kind::Rc, 1);
    let nic = &mut end.nic;
    let (channel, _) = nic.make_channel().unwrap();
    let (queue, _) = nic.make_queue(8, Some(channel)).unwrap();
    nic.name_queue(queue, 77);
    let (shared, _) = nic.make_shared(end.domain, 5).unwrap();
    let of = nic.pairs[&end.pair].made;
    let made = Made { receive_queue: queue, send_queue: queue, shared: Some(shared), ..of };
    let (pair, _) = nic.make_pair(made, 0).unwrap();
    let start = |nic: &mut Nic| {
        nic.modify(pair, IBV_QPS_INIT, |to| (to.port, to.access) = (1, ANY)).unwrap();
    };
    start(nic);
    nic.modify(pair, IBV_QPS_ERR, |_| ()).unwrap();
    assert_eq!((nic.pair_events(pair), nic.events_taken()), (0, 0));
    let event = nic.next_event(end.context).unwrap();
    assert_eq!(event.code, IBV_EVENT_QP_LAST_WQE_REACHED);
    assert_eq!((nic.pair_events(pair), nic.events_taken()), (1, 1));
    nic.acknowledge_event(Some(pair));
    assert_eq!((nic.pair_events(pair), nic.events_taken()), (0, 0));
    assert!(violation_of(|| nic.acknowledge_event(None)).contains("not taken"));

    let ready = |nic: &mut Nic| nic.tables.channels.get_mut(&channel).unwrap().ready.push_back(77);
    ready(nic);
    assert_eq!((nic.next_ready(channel), nic.queue_events(queue)), (Some(77), 1));
    assert!(violation_of(|| nic.acknowledge_queue(queue, 2)).contains("more events"));
    nic.acknowledge_queue(queue, 1);
    assert_eq!(nic.queue_events(queue), 0);
    ready(nic);
    nic.modify(pair, IBV_QPS_RESET, |_| ()).unwrap();
    start(nic);
    nic.modify(pair, IBV_QPS_ERR, |_| ()).unwrap();
    nic.end_pair(pair);
    nic.end_queue(queue);
    assert_eq!((nic.next_event(end.context), nic.next_ready(channel)), (None, None));
}

#[test]
fn a_full_shared_queue_answers_as_its_driver_does() {
    for (name, want) in [("mlx5-ib", libc::ENOMEM), ("mlx4", -1)] {
        let personality = personality::find(name).unwrap();
        let run = Run::new(personality);
        let mut end = End::new(&run, personality, "calm", Kind::Rc, 1);
        let (shared, depth) = end.nic.make_shared(end.domain, 5).unwrap();
        assert_eq!(depth, 7, "rounded up");
        let receive = || Receive { id: 0, segments: Vec::new() };
        for _ in 0..depth {
            end.nic.post_shared(shared, receive()).unwrap();
        }
        assert_eq!(end.nic.post_shared(shared, receive()), Err(want), "{name}");
    }
    let personality = personality::find("irdma").unwrap();
    let run = Run::new(personality);
    let mut end = End::new(&run, personality, "calm", Kind::Rc, 1);
    assert_eq!(end.nic.make_shared(end.domain, 5), Err(libc::EOPNOTSUPP));
}

#[test]
fn a_device_that_was_removed_comes_back_to_new_contexts_only() {
    let personality = personality::find("mlx5-roce").unwrap();
    let run = Run::new(personality);
    let mut end = End::new(&run, personality, "removal=3,return=50", Kind::Rc, 1);
    end.nic.climate.arrived = 3;
    end.nic.change_climate();
    assert!(end.nic.is_removed(end.context) && end.nic.devices().is_empty());
    let event = end.nic.next_event(end.context).unwrap();
    assert_eq!(event.kind, EventKind::Device);
    end.nic.acknowledge_event(None);
    assert_eq!(end.nic.open_device(0), Err(libc::ENODEV));
    std::thread::sleep(Duration::from_millis(60));
    end.nic.change_climate();
    let (again, _) = end.nic.open_device(0).unwrap();
    assert!(end.nic.is_removed(end.context) && !end.nic.is_removed(again));
    assert!(
        !end.nic.port(end.context, 1).unwrap().active && end.nic.port(again, 1).unwrap().active
    );
    assert!(!end.nic.devices().is_empty());
}
