//! The fate of the frames of one direction between two ports: random events, and frames that are held
//! back so that later ones overtake them.

use crate::counts::Counts;
use crate::frame;
use crate::random::Random;
use crate::settings::Settings;

/// Longest time that a frame is held back when no frame overtakes it, nanoseconds.
const HELD_NS: u64 = 2_000_000;

/// Longest duration of a burst, nanoseconds: if bursts were counted in frames alone, a connection with
/// few frames would not survive one.
const BURST_NS: u64 = 10_000_000;

/// The random fate of one frame.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Fate {
    pub(crate) lost: bool,
    pub(crate) twice: bool,
    pub(crate) corrupted: bool,
    pub(crate) forged: bool,
    /// Number of later frames that overtake it; 0 for none.
    pub(crate) overtaken: u32,
}

struct Held {
    frame: Vec<u8>,
    /// Number of frames that still have to overtake it.
    remaining: u32,
    /// It is released at this time at the latest.
    until_ns: u64,
}

/// One direction between two ports.
pub(crate) struct Gate {
    random: Random,
    /// Selects the damaged bit. A generator of its own, because not every frame draws from it.
    bits: Random,
    /// Number of frames that the current burst still loses.
    burst: u32,
    burst_until_ns: u64,
    held: Vec<Held>,
}

impl Gate {
    /// The gate of `stream` under `seed`, which makes its random events repeatable.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        Self {
            random: Random::new(seed, stream),
            bits: Random::new(!seed, stream),
            burst: 0,
            burst_until_ns: 0,
            held: Vec::new(),
        }
    }

    /// Draws the fate of the next frame, at `now_ns`. Every frame draws as many numbers, so that one setting does not
    /// change which frames the others affect.
    pub(crate) fn throw(&mut self, now_ns: u64, settings: &Settings) -> Fate {
        let random = &mut self.random;
        let mut fate = Fate {
            lost: random.chance(settings.loss),
            twice: random.chance(settings.dup),
            corrupted: random.chance(settings.corrupt),
            forged: random.chance(settings.forge),
            overtaken: 0,
        };
        let begins = random.chance(settings.burst);
        let reordered = random.chance(settings.reorder);
        let overtaken = 1 + random.below(u64::from(settings.reorder_frames)) as u32;
        if reordered {
            fate.overtaken = overtaken;
        }
        if now_ns >= self.burst_until_ns {
            self.burst = 0;
        }
        if begins && self.burst == 0 {
            self.burst = settings.burst_frames;
            self.burst_until_ns = now_ns.saturating_add(BURST_NS);
        }
        if self.burst > 0 {
            self.burst -= 1;
            fate.lost = true;
        }
        fate
    }

    /// Passes `frame` at `now_ns`. The frames that leave the gate now go to `out`, in this order.
    pub(crate) fn pass(
        &mut self,
        now_ns: u64,
        frame: &mut [u8],
        settings: &Settings,
        counts: &mut Counts,
        out: &mut impl FnMut(&[u8]),
    ) {
        let fate = self.throw(now_ns, settings);
        counts.offered += 1;
        if fate.lost {
            counts.lost += 1;
            return;
        }
        if fate.corrupted && frame::corrupt(frame, &mut self.bits) {
            counts.corrupted += 1;
        }
        if fate.forged && frame::forge(frame, &mut self.bits) {
            counts.forged += 1;
        }
        let hold = |remaining| Held {
            frame: frame.to_vec(),
            remaining,
            until_ns: now_ns.saturating_add(HELD_NS),
        };
        if fate.twice {
            counts.repeated += 1;
        }
        match (fate.overtaken, fate.twice) {
            (0, false) => {
                out(frame);
                self.overtake(out);
            }
            (0, true) => {
                out(frame);
                self.overtake(out);
                out(frame);
                self.overtake(out);
            }
            // The first copy is in time, the second late.
            (overtaken, true) => {
                counts.reordered += 1;
                let late = hold(overtaken);
                out(frame);
                self.overtake(out);
                self.held.push(late);
            }
            (overtaken, false) => {
                counts.reordered += 1;
                self.held.push(hold(overtaken));
            }
        }
    }

    /// Counts a frame that has passed, and releases the frames that it was the last to overtake.
    fn overtake(&mut self, out: &mut impl FnMut(&[u8])) {
        if self.held.is_empty() {
            return;
        }
        self.held.retain_mut(|held| {
            held.remaining = held.remaining.saturating_sub(1);
            if held.remaining == 0 {
                out(&held.frame);
            }
            held.remaining > 0
        });
    }

    /// Releases the frames that have been held for too long.
    pub(crate) fn release(&mut self, now_ns: u64, out: &mut impl FnMut(&[u8])) {
        self.held.retain(|held| {
            let due = held.until_ns <= now_ns;
            if due {
                out(&held.frame);
            }
            !due
        });
    }

    /// The time at which [`Gate::release`] next has something to do.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.held.iter().map(|held| held.until_ns).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::tests::datagram;

    fn run(settings: &Settings, frames: u32) -> (Vec<u32>, Counts) {
        let (mut gate, mut counts, mut out) = (Gate::new(11, 1), Counts::default(), Vec::new());
        let number = |frame: &[u8]| u32::from_be_bytes(frame[42..46].try_into().unwrap());
        for i in 0..frames {
            let mut frame = datagram(1, 2, &i.to_be_bytes());
            gate.pass(0, &mut frame, settings, &mut counts, &mut |f| out.push(number(f)));
        }
        assert!(gate.next_ns().is_none_or(|next| next == HELD_NS));
        gate.release(HELD_NS, &mut |f| out.push(number(f)));
        assert_eq!(gate.next_ns(), None);
        (out, counts)
    }

    #[test]
    fn without_settings_frames_pass_as_they_come() {
        let (out, counts) = run(&Settings::default(), 1000);
        assert_eq!(out, (0..1000).collect::<Vec<_>>());
        assert_eq!(counts, Counts { offered: 1000, ..Counts::default() });
    }

    #[test]
    fn losses_are_as_many_as_asked_and_repeat_with_the_seed() {
        let settings = Settings { loss: 0.1, ..Settings::default() };
        let (out, counts) = run(&settings, 20_000);
        assert_eq!(out.len() as u64 + counts.lost, 20_000);
        assert!((1_800..2_200).contains(&counts.lost), "{}", counts.lost);
        assert_eq!(run(&settings, 20_000).0, out);
    }

    #[test]
    fn one_setting_leaves_the_dice_of_the_others() {
        let loss = Settings { loss: 0.1, ..Settings::default() };
        let both = Settings { dup: 0.2, ..loss.clone() };
        let (alone, _) = run(&loss, 5_000);
        let (mut together, counts) = run(&both, 5_000);
        assert!(counts.repeated > 700);
        together.dedup();
        assert_eq!(alone, together);
    }

    #[test]
    fn bursts_lose_neighbours() {
        let settings = Settings { burst: 0.01, burst_frames: 10, ..Settings::default() };
        let (out, counts) = run(&settings, 20_000);
        let gaps: Vec<u32> =
            out.windows(2).map(|w| w[1] - w[0] - 1).filter(|gap| *gap > 0).collect();
        assert!(gaps.iter().all(|gap| *gap >= 10), "{gaps:?}");
        assert!(counts.lost > 1_000);
    }

    #[test]
    fn a_burst_ends_with_its_time() {
        let settings = Settings { burst: 1.0, burst_frames: 1000, ..Settings::default() };
        let mut gate = Gate::new(1, 1);
        assert!(gate.throw(0, &settings).lost);
        let settings = Settings { burst: 0.0, ..settings };
        assert!(gate.throw(BURST_NS - 1, &settings).lost);
        assert!(!gate.throw(BURST_NS, &settings).lost);
    }

    #[test]
    fn reordered_frames_arrive_once_and_a_little_late() {
        let settings = Settings { reorder: 0.1, reorder_frames: 5, ..Settings::default() };
        let (out, counts) = run(&settings, 10_000);
        assert!(counts.reordered > 800);
        let mut sorted = out.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..10_000).collect::<Vec<_>>());
        assert_ne!(out, sorted);
        // A held frame lets later ones pass at once, so it is displaced by little more than was asked.
        let late = out.iter().enumerate().map(|(i, n)| (*n as i64 - i as i64).abs()).max();
        assert!(late.unwrap() <= 20, "{late:?}");
    }

    #[test]
    fn all_of_it_together_loses_nothing_else() {
        let settings = Settings {
            loss: 0.05,
            dup: 0.05,
            reorder: 0.1,
            burst: 0.001,
            corrupt: 0.1,
            ..Settings::default()
        };
        let (out, counts) = run(&settings, 20_000);
        assert_eq!(out.len() as u64, counts.offered - counts.lost + counts.repeated);
        assert!(counts.corrupted > 1_500);
    }
}
