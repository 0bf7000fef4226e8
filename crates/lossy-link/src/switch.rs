//! An Ethernet switch with a gate for every direction between two ports, and links of a finite rate
//! and length. It has no socket and no clock: frames and times are arguments.

use crate::counts::Counts;
use crate::frame::{self, Mac};
use crate::gate::Gate;
use crate::settings::{Command, Settings, Which};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// How far a port's host may be ahead of its link, nanoseconds. Beyond that the port is not read, so that
/// frames wait in the host, which notices it as behind a network card.
const AHEAD_NS: u64 = 1_000_000;

/// Both directions of a port's cable.
#[derive(Default)]
struct Port {
    /// When the link from the host has carried all of its frames.
    up_free_ns: u64,
    /// The same for the link to the host.
    down_free_ns: u64,
}

/// A frame on its way: time of arrival, number (equal times keep their order), port, bytes.
type Due = Reverse<(u64, u64, usize, Vec<u8>)>;

/// The switch.
pub(crate) struct Switch {
    settings: Settings,
    ports: Vec<Port>,
    /// The direction from port `a` to port `b` is number `a * ports + b`.
    gates: Vec<Gate>,
    cut: Vec<bool>,
    /// The port at which a MAC address was last seen as a source.
    learned: HashMap<Mac, usize>,
    due: BinaryHeap<Due>,
    number: u64,
    counts: Counts,
}

impl Switch {
    /// A switch of so many ports; `seed` makes its random events repeatable.
    pub(crate) fn new(ports: usize, settings: Settings, seed: u64) -> Self {
        let directions = ports * ports;
        Self {
            settings,
            ports: (0..ports).map(|_| Port::default()).collect(),
            gates: (0..directions).map(|i| Gate::new(seed, i as u64)).collect(),
            cut: vec![false; directions],
            learned: HashMap::new(),
            due: BinaryHeap::new(),
            number: 0,
            counts: Counts::default(),
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Counts a frame that the device of its port refused.
    pub(crate) fn refused(&mut self) {
        self.counts.refused += 1;
    }

    /// Carries out a command of the control channel.
    pub(crate) fn command(&mut self, command: Command) {
        match command {
            Command::Set(settings) => self.settings = settings,
            Command::Cut(which) => self.set_cut(which, true),
            Command::Heal(which) => self.set_cut(which, false),
            Command::Counts => {}
        }
    }

    fn set_cut(&mut self, which: Which, value: bool) {
        let ports = self.ports.len();
        for (i, cut) in self.cut.iter_mut().enumerate() {
            if which.covers(i / ports, i % ports) {
                *cut = value;
            }
        }
    }

    /// Whether the port may be read: false while its host is too far ahead of its link.
    pub(crate) fn may_read(&self, port: usize, now_ns: u64) -> bool {
        self.ports.get(port).is_some_and(|port| port.up_free_ns <= now_ns + AHEAD_NS)
    }

    /// Forwards a frame from a port's host. Frames that arrive at once go to `send`.
    pub(crate) fn on_frame(
        &mut self,
        now_ns: u64,
        from: usize,
        bytes: &mut [u8],
        send: &mut impl FnMut(usize, &[u8]),
    ) {
        let Some((to, source)) = frame::macs(bytes) else { return };
        let Some(port) = self.ports.get_mut(from) else { return };
        if !frame::is_group(source) {
            self.learned.insert(source, from);
        }
        let sent_ns = occupy(&mut port.up_free_ns, now_ns, bytes.len(), self.settings.byte_ns);
        match self.learned.get(&to) {
            Some(&to) if to == from => {}
            Some(&to) => self.pass(now_ns, sent_ns, (from, to), bytes, send),
            None => {
                for to in (0..self.ports.len()).filter(|to| *to != from) {
                    let mut copy = bytes.to_vec();
                    self.pass(now_ns, sent_ns, (from, to), &mut copy, send);
                }
            }
        }
    }

    /// Passes a frame through the gate of one direction.
    fn pass(
        &mut self,
        now_ns: u64,
        sent_ns: u64,
        (from, to): (usize, usize),
        bytes: &mut [u8],
        send: &mut impl FnMut(usize, &[u8]),
    ) {
        let direction = from * self.ports.len() + to;
        if self.cut.get(direction).copied().unwrap_or(true) {
            self.counts.cut += 1;
            return;
        }
        let (most, first) = (self.settings.black_hole, self.settings.firewall);
        if most > 0 && frame::udp_packet_len(bytes).is_some_and(|len| len > most)
            || first > 0 && frame::asks_for(bytes).is_some_and(|port| port >= first)
        {
            self.counts.swallowed += 1;
            return;
        }
        let Some(gate) = self.gates.get_mut(direction) else { return };
        let mut passed = Downlink {
            now_ns,
            sent_ns,
            to,
            settings: &self.settings,
            port: self.ports.get_mut(to),
            due: &mut self.due,
            number: &mut self.number,
            overflowed: 0,
            forwarded: 0,
        };
        if frame::is_payload(bytes) {
            let out = &mut |bytes: &[u8]| passed.carry(bytes, send);
            gate.pass(now_ns, bytes, &self.settings, &mut self.counts, out);
        } else {
            passed.carry(bytes, send);
        }
        self.counts.overflowed += passed.overflowed;
        self.counts.forwarded += passed.forwarded;
    }

    /// Delivers the frames that are due at `now_ns`.
    pub(crate) fn release(&mut self, now_ns: u64, send: &mut impl FnMut(usize, &[u8])) {
        let ports = self.ports.len();
        for (direction, gate) in self.gates.iter_mut().enumerate() {
            if gate.next_ns().is_none_or(|next| next > now_ns) {
                continue;
            }
            let to = direction % ports;
            let mut passed = Downlink {
                now_ns,
                sent_ns: now_ns,
                to,
                settings: &self.settings,
                port: self.ports.get_mut(to),
                due: &mut self.due,
                number: &mut self.number,
                overflowed: 0,
                forwarded: 0,
            };
            gate.release(now_ns, &mut |bytes| passed.carry(bytes, send));
            self.counts.overflowed += passed.overflowed;
            self.counts.forwarded += passed.forwarded;
        }
        while self.due.peek().is_some_and(|Reverse((at_ns, ..))| *at_ns <= now_ns) {
            if let Some(Reverse((_, _, port, bytes))) = self.due.pop() {
                send(port, &bytes);
            }
        }
    }

    /// When [`Switch::release`] next has something to do, or a port that may not be read now may be read.
    pub(crate) fn next_timeout(&self, now_ns: u64) -> Option<u64> {
        let due = self.due.peek().map(|Reverse((at_ns, ..))| *at_ns);
        let held = self.gates.iter().filter_map(Gate::next_ns).min();
        let busy = self.ports.iter().map(|port| port.up_free_ns.saturating_sub(AHEAD_NS));
        let busy = busy.filter(|at_ns| *at_ns > now_ns).min();
        [due, held, busy].into_iter().flatten().min()
    }
}

/// The link from the switch to one host, while frames are sent on it.
struct Downlink<'a> {
    now_ns: u64,
    /// When the sender's link has carried the frame.
    sent_ns: u64,
    to: usize,
    settings: &'a Settings,
    port: Option<&'a mut Port>,
    due: &'a mut BinaryHeap<Due>,
    number: &'a mut u64,
    overflowed: u64,
    forwarded: u64,
}

impl Downlink<'_> {
    fn carry(&mut self, bytes: &[u8], send: &mut impl FnMut(usize, &[u8])) {
        let Some(port) = self.port.as_deref_mut() else { return };
        let settings = self.settings;
        let at_switch_ns = self.sent_ns + settings.delay_ns;
        let waiting_ns = port.down_free_ns.saturating_sub(at_switch_ns) as f64;
        if waiting_ns > settings.queue_bytes as f64 * settings.byte_ns {
            self.overflowed += 1;
            return;
        }
        let arrival_ns =
            occupy(&mut port.down_free_ns, at_switch_ns, bytes.len(), settings.byte_ns);
        self.forwarded += 1;
        // Queued behind the frames on their way, so that only the gates reorder.
        if arrival_ns <= self.now_ns && self.due.is_empty() {
            send(self.to, bytes);
        } else {
            *self.number += 1;
            self.due.push(Reverse((arrival_ns, *self.number, self.to, bytes.to_vec())));
        }
    }
}

/// Sends `len` bytes on a link that is free at `free_ns`. Returns when the last byte has left.
fn occupy(free_ns: &mut u64, now_ns: u64, len: usize, byte_ns: f64) -> u64 {
    if byte_ns == 0.0 {
        return now_ns;
    }
    // Preamble, check sequence and gap take 24 bytes more, which frames here do not include.
    *free_ns = (*free_ns).max(now_ns) + ((len + 24) as f64 * byte_ns) as u64;
    *free_ns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::tests::datagram;

    /// The frames that left a switch: time, port, the first byte of the payload.
    #[derive(Default)]
    struct Seen(Vec<(u64, usize, u8)>);

    impl Seen {
        fn offer(&mut self, switch: &mut Switch, now_ns: u64, from: usize, to: usize, mark: u8) {
            let mut frame = datagram(from as u8, to as u8, &[mark; 1000]);
            switch.on_frame(now_ns, from, &mut frame, &mut |p, f| self.0.push((now_ns, p, f[42])));
        }

        /// Runs the switch until no frame is on its way.
        fn run(&mut self, switch: &mut Switch) {
            let mut now_ns = 0;
            while let Some(next) = switch.next_timeout(now_ns) {
                now_ns = next;
                switch.release(now_ns, &mut |p, f| self.0.push((now_ns, p, f[42])));
            }
        }
    }

    fn taught(settings: Settings) -> Switch {
        let mut switch = Switch::new(4, Settings::default(), 1);
        for host in 0..4 {
            let mut frame = datagram(host as u8, 0xff, &[0; 64]);
            switch.on_frame(0, host, &mut frame, &mut |_, _| {});
        }
        switch.settings = settings;
        switch.counts = Counts::default();
        switch
    }

    #[test]
    fn frames_go_everywhere_until_their_host_was_heard() {
        let mut switch = Switch::new(4, Settings::default(), 1);
        let mut seen = Seen::default();
        seen.offer(&mut switch, 0, 1, 2, 7);
        seen.offer(&mut switch, 0, 2, 1, 8);
        seen.offer(&mut switch, 0, 1, 2, 9);
        assert_eq!(seen.0, [(0, 0, 7), (0, 2, 7), (0, 3, 7), (0, 1, 8), (0, 2, 9)]);
        assert_eq!(switch.next_timeout(0), None);
    }

    #[test]
    fn a_cut_host_hears_nothing_until_it_is_healed() {
        let mut switch = taught(Settings::default());
        let mut seen = Seen::default();
        let at = |switch: &mut Switch, line: &str| {
            switch.command(Command::parse(line, &Settings::default(), 4).unwrap());
        };
        at(&mut switch, "cut 2");
        seen.offer(&mut switch, 1, 1, 2, 1);
        seen.offer(&mut switch, 1, 2, 1, 2);
        seen.offer(&mut switch, 1, 0, 1, 3);
        at(&mut switch, "heal 2");
        at(&mut switch, "cut 0:1");
        seen.offer(&mut switch, 2, 1, 2, 4);
        seen.offer(&mut switch, 2, 0, 1, 5);
        seen.offer(&mut switch, 2, 1, 0, 6);
        assert_eq!(seen.0, [(1, 1, 3), (2, 2, 4), (2, 0, 6)]);
        assert_eq!(switch.counts().cut, 3);
    }

    #[test]
    fn a_black_hole_swallows_what_is_long() {
        let mut switch = taught(Settings { black_hole: 1028, ..Settings::default() });
        let mut seen = Seen::default();
        // An IPv4 packet of 1028 bytes.
        seen.offer(&mut switch, 0, 1, 2, 7);
        switch.settings.black_hole = 1027;
        seen.offer(&mut switch, 0, 1, 2, 8);
        assert_eq!(seen.0, [(0, 2, 7)]);
        assert_eq!(switch.counts().swallowed, 1);
    }

    #[test]
    fn a_firewall_lets_everything_pass_but_connections() {
        let mut switch = taught(Settings { firewall: 10_000, ..Settings::default() });
        let segment = |port: u16, flags: u8| {
            let mut frame = frame::tests::datagram(1, 2, &[0; 12]);
            frame[14 + 9] = 6;
            frame[14 + 22..14 + 24].copy_from_slice(&port.to_be_bytes());
            frame[14 + 33] = flags;
            frame
        };
        let mut forwarded = 0;
        for (port, flags) in [(10_000, 2), (40_000, 2), (9999, 2), (40_000, 18), (40_000, 16)] {
            switch.on_frame(0, 1, &mut segment(port, flags), &mut |_, _| forwarded += 1);
        }
        assert_eq!((forwarded, switch.counts().swallowed), (3, 2));
    }

    #[test]
    fn a_delay_is_kept_and_keeps_the_order() {
        let mut switch = taught(Settings { delay_ns: 500, ..Settings::default() });
        let mut seen = Seen::default();
        for mark in 0..10 {
            seen.offer(&mut switch, u64::from(mark) * 10, 0, 1, mark);
        }
        seen.run(&mut switch);
        let want: Vec<_> = (0..10).map(|mark| (500 + u64::from(mark) * 10, 1, mark)).collect();
        assert_eq!(seen.0, want);
    }

    #[test]
    fn a_rate_spaces_frames_and_a_full_queue_loses_them() {
        // 1042 bytes, and 24 more on the link, at 1 ns a byte.
        let mut switch =
            taught(Settings { byte_ns: 1.0, queue_bytes: 3000, ..Settings::default() });
        let mut seen = Seen::default();
        for mark in 0..3 {
            seen.offer(&mut switch, 0, 0, 1, mark);
        }
        seen.run(&mut switch);
        assert_eq!(seen.0, [(2132, 1, 0), (3198, 1, 1), (4264, 1, 2)]);
        // Three hosts send to one: their own links carry it, the receiver's link does not.
        for mark in 0..30 {
            seen.offer(&mut switch, 10_000, 1 + usize::from(mark % 3), 0, mark);
        }
        assert!(switch.counts().overflowed > 10, "{}", switch.counts());
        assert!(switch.may_read(1, 10_000));
        for mark in 0..=255 {
            for _ in 0..4 {
                seen.offer(&mut switch, 10_000, 1, 2, mark);
            }
        }
        assert!(!switch.may_read(1, 10_000), "it is a millisecond ahead");
        assert!(switch.next_timeout(10_000).is_some());
        seen.run(&mut switch);
        assert!(switch.may_read(1, 2_000_000));
    }

    #[test]
    fn frames_held_back_come_out_in_the_end() {
        let mut switch = taught(Settings { reorder: 1.0, ..Settings::default() });
        let mut seen = Seen::default();
        seen.offer(&mut switch, 0, 0, 1, 1);
        assert!(seen.0.is_empty());
        seen.run(&mut switch);
        assert_eq!(seen.0, [(2_000_000, 1, 1)]);
    }
}
