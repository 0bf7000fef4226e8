//! Devices that fail under traffic. Breaking a queue pair needs a device. Changing ports and devices needs a guest of
//! `scripts/lab rdma`, and that no other test runs at the same time (`--test-threads=1`): its two devices are the ends
//! of one cable. UDRV_TEST_LOG=1 shows the log.

use super::*;
use crate::transport::net::verbs::config::NicName;
use std::process::Command;
use std::sync::{Mutex, MutexGuard};

/// Two connected endpoints, and the marks of the messages between them.
struct Pair {
    ends: [End; 2],
    peers: [PeerId; 2],
    mark: u8,
}

impl Pair {
    fn open(ip: IpAddr, rdma: &RdmaSettings) -> Self {
        if std::env::var_os("UDRV_TEST_LOG").is_some() {
            let write = |_, line: &str| println!("{:.3} {line}", clock::now_ns() as f64 / 1e9);
            log::attach(Some(log::Sink { enabled: |_| true, write }));
        }
        let mut ends = [(); 2].map(|()| End::open_with(ip, rdma.clone()));
        let [a, b] = &mut ends;
        let peers = [a.meet(b), b.meet(a)];
        Self { ends, peers, mark: 0 }
    }

    /// Sends a message in each direction; false if they have not arrived within 20 s.
    fn exchange(&mut self) -> bool {
        self.mark = self.mark.wrapping_add(1);
        let Self { ends: [a, b], peers, mark } = self;
        let before = [a.got.messages.len(), b.got.messages.len()];
        let done = within(20, || a.send(peers[0], *mark, 3000))
            && within(20, || b.send(peers[1], *mark, 3000))
            && within(20, || {
                a.poll();
                b.poll();
                a.got.messages.len() > before[0] && b.got.messages.len() > before[1]
            });
        if !done {
            return false;
        }
        for (end, before) in [&*a, &*b].into_iter().zip(before) {
            assert_eq!(end.got.messages.len(), before + 1, "no more than that");
            assert!(end.got.messages.last().is_some_and(|last| is_intact(last, *mark, 3000)));
            assert_eq!(end.got.departures.len(), 0);
        }
        done
    }

    /// Exchanges messages until `what` holds; false after `seconds`.
    fn until(&mut self, seconds: u64, what: impl Fn(&Self) -> bool) -> bool {
        within(seconds, || {
            assert!(self.exchange(), "{:?}", self.rdma());
            what(self)
        })
    }

    fn rdma(&self) -> [hybrid::RdmaCounts; 2] {
        self.ends.each_ref().map(End::rdma)
    }

    /// Datagrams that each endpoint has sent over UDP.
    fn over_udp(&self) -> [u64; 2] {
        self.ends.each_ref().map(|end| end.net.core.enter().unwrap().link.counts().sent)
    }

    /// Waits until both endpoints send everything through the device; false after `seconds`.
    fn goes_direct(&mut self, seconds: u64) -> bool {
        let end = Instant::now() + crate::patience::seconds(seconds);
        while Instant::now() < end {
            let before = self.over_udp();
            for _ in 0..4 {
                assert!(self.exchange(), "{:?}", self.rdma());
            }
            if self.over_udp() == before {
                return true;
            }
        }
        false
    }
}

#[test]
fn a_queue_pair_that_breaks_is_made_anew() {
    let Some(ip) = address() else { return };
    let mut pair = Pair::open(ip, &settings(RdmaPolicy::Require));
    assert!(pair.goes_direct(20), "{:?}", pair.rdma());
    for round in 1..=4 {
        let broken = round % 2;
        let before = pair.rdma()[broken];
        let since = Instant::now();
        pair.ends[broken].net.break_queue_pair();
        assert!(pair.until(20, |pair| pair.rdma()[broken].made > before.made), "{:?}", pair.rdma());
        let made_after = since.elapsed();
        assert!(pair.goes_direct(20), "{:?}", pair.rdma());
        // The next queue pair also has the pool registered in which packets are made.
        let lent = before.datagrams.lent;
        assert!(pair.until(20, |pair| pair.rdma()[broken].datagrams.lent > lent));
        println!("{round}: made anew after {made_after:?}, in use {:?}", since.elapsed());
    }
    let [a, b] = pair.rdma();
    assert_eq!((a.made, b.made), (2, 2));
    assert!(a.news >= 4 && b.news >= 4, "{a:?} {b:?}");
}

#[test]
fn an_endpoint_that_is_not_polled_is_told_of_news() {
    let Some(ip) = address() else { return };
    let mut pair = Pair::open(ip, &settings(RdmaPolicy::Require));
    assert!(pair.goes_direct(20), "{:?}", pair.rdma());
    // Its background thread replaces it.
    pair.ends[1].net.break_queue_pair();
    assert!(within(20, || {
        std::thread::sleep(Duration::from_millis(10));
        pair.ends[1].rdma().made == 1
    }));
    assert!(pair.goes_direct(20), "{:?}", pair.rdma());
}

/// The second device of a guest: its name, and its interface.
struct Second {
    device: String,
    interface: String,
    _alone: MutexGuard<'static, ()>,
}

impl Second {
    fn new() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        if std::env::var_os("UDRV_LAB_GUEST").is_none() {
            eprintln!("skipped: devices are taken away in a guest only");
            return None;
        }
        let devices = std::env::var("UDRV_LAB_DEVICES").ok()?;
        let device = devices.split(' ').nth(1)?.to_owned();
        let interface = device.replace("rxe", "eth");
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Self { device, interface, _alone: alone })
    }

    /// Endpoints on it, whose UDP uses another interface.
    fn pair(&self) -> Pair {
        let nics = NicName::list(&self.device).unwrap();
        let rdma = RdmaSettings { nics, ..settings(RdmaPolicy::Require) };
        let mut pair = Pair::open("10.78.0.1".parse().unwrap(), &rdma);
        assert!(pair.goes_direct(20), "{:?}", pair.rdma());
        pair
    }

    /// Runs a command; `%i` is the interface, `%d` the device.
    fn run(&self, command: &str) {
        let command = command.replace("%i", &self.interface).replace("%d", &self.device);
        let mut words = command.split(' ');
        let done = Command::new(words.next().unwrap()).args(words).status().unwrap();
        assert!(done.success(), "{command}: {done}");
    }
}

/// Whether data goes over UDP now.
fn is_over_udp(pair: &mut Pair) -> bool {
    let before = pair.rdma();
    for _ in 0..4 {
        assert!(pair.exchange(), "{:?}", pair.rdma());
    }
    let after = pair.rdma();
    (0..2).all(|i| after[i].datagrams == before[i].datagrams)
}

#[test]
fn a_port_that_goes_down_is_used_again_when_it_is_up() {
    let Some(second) = Second::new() else { return };
    let mut pair = second.pair();
    for round in 1..=3 {
        second.run("ip link set %i down");
        let since = Instant::now();
        assert!(within(20, || is_over_udp(&mut pair)), "{:?}", pair.rdma());
        let left = since.elapsed();
        std::thread::sleep(Duration::from_millis(500));
        second.run("ip link set %i up");
        let since = Instant::now();
        assert!(pair.goes_direct(40), "{:?}", pair.rdma());
        println!("{round}: left after {left:?}, in use {:?} after it was up", since.elapsed());
    }
    assert!(pair.rdma().iter().all(|rdma| rdma.made == 3), "{:?}", pair.rdma());
}

#[test]
fn an_address_that_changes_is_chosen_anew() {
    let Some(second) = Second::new() else { return };
    let mut pair = second.pair();
    second.run("ip addr add 10.79.0.9/24 dev %i");
    second.run("ip addr del 10.78.0.2/24 dev %i");
    assert!(pair.until(20, |pair| pair.rdma().iter().all(|rdma| rdma.made == 1)));
    assert!(pair.goes_direct(40), "{:?}", pair.rdma());
    second.run("ip addr add 10.78.0.2/24 dev %i");
    second.run("ip addr del 10.79.0.9/24 dev %i");
    assert!(pair.until(40, |pair| pair.rdma().iter().all(|rdma| rdma.made == 2)));
    assert!(pair.goes_direct(40), "{:?}", pair.rdma());
}

#[test]
fn a_device_that_is_removed_is_left_and_taken_again() {
    let Some(second) = Second::new() else { return };
    let mut pair = second.pair();
    let command = second.device.clone();
    let removal = std::thread::spawn(move || {
        let since = Instant::now();
        let done = Command::new("rdma").args(["link", "delete", &command]).status().unwrap();
        assert!(done.success(), "{done}");
        since.elapsed()
    });
    let since = Instant::now();
    assert!(within(30, || is_over_udp(&mut pair)), "{:?}", pair.rdma());
    println!("left after {:?}", since.elapsed());
    assert!(pair.until(30, |_| removal.is_finished()));
    println!("removed within {:?}", removal.join().unwrap());
    second.run("rdma link add %d type rxe netdev %i");
    let since = Instant::now();
    assert!(pair.goes_direct(60), "{:?}", pair.rdma());
    println!("in use {:?} after it was there again", since.elapsed());
}

#[test]
fn a_sleeper_hears_of_its_device() {
    use crate::sys::event::wait_readable;
    use crate::sys::late_set::LateSet;
    let Some(second) = Second::new() else { return };
    let mut pair = second.pair();
    let epoll = std::sync::Arc::new(LateSet::new().unwrap());
    pair.ends[1].net.watch(&epoll, 1).unwrap();
    for (state, news, made) in [("down", 1, 0), ("up", 2, 1)] {
        let end = &mut pair.ends[1];
        second.run(&format!("ip link set %i {state}"));
        // It polls only when it is woken.
        assert!(within(30, || {
            if end.net.sleep() {
                let _ = wait_readable(epoll.fd().unwrap(), 5000);
                end.net.awake();
            }
            end.poll();
            (end.rdma().news, end.rdma().made) == (news, made)
        }));
    }
    assert!(pair.goes_direct(40), "{:?}", pair.rdma());
}

/// The devices that the endpoints use.
fn devices<'a>(ends: impl IntoIterator<Item = &'a End>) -> Vec<OpenDevice> {
    ends.into_iter().map(|end| end.net.core.enter().unwrap().link.device().unwrap()).collect()
}

/// `shared` in scripts/fake-verbs counts how often they open it.
#[test]
fn endpoints_of_a_process_share_the_device() {
    let Some(ip) = address() else { return };
    let ends: Vec<End> = (0..64).map(|_| End::open(ip, RdmaPolicy::Require)).collect();
    let devices = devices(&ends);
    assert!(devices.iter().all(|device| device.shares(&devices[0])));
}

/// Under `shared` in scripts/fake-verbs, whose weather takes the device away and brings it back.
#[test]
fn a_device_that_comes_back_is_used_again_by_all_endpoints_of_a_process() {
    let Some(ip) = address() else { return };
    if std::env::var_os("FAKE_VERBS_WEATHER").is_none_or(|weather| weather != "return") {
        return eprintln!("skipped: the device stays");
    }
    let mut pair = Pair::open(ip, &settings(RdmaPolicy::Require));
    let before = devices(&pair.ends);
    assert!(before[0].shares(&before[1]));
    assert!(pair.until(60, |pair| pair.rdma().iter().all(|rdma| rdma.made > 0)));
    assert!(pair.goes_direct(40), "{:?}", pair.rdma());
    let after = devices(&pair.ends);
    assert!(after[0].shares(&after[1]) && !after[0].shares(&before[0]));
    assert_eq!(pair.rdma().map(|rdma| rdma.made), [1, 1], "it was removed once");
    assert!(before.iter().all(|device| !device.is_there()) && after[0].is_there());
}
