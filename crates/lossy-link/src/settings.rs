//! The effects of the network on frames, and the words that set them: `--loss 0.01` on the command line
//! and `loss 0.01` on the control channel are the same setting.

/// The settings of every direction of every pair of ports.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Settings {
    /// Probability that a frame is lost.
    pub(crate) loss: f64,
    /// Probability that a burst of losses begins with a frame, and the number of frames in a burst.
    pub(crate) burst: f64,
    pub(crate) burst_frames: u32,
    /// Probability that a frame arrives twice.
    pub(crate) dup: f64,
    /// Probability that a frame is held back, and the most later frames that overtake it.
    pub(crate) reorder: f64,
    pub(crate) reorder_frames: u32,
    /// Probability that a bit of a UDP payload flips, which UDP's checksum detects.
    pub(crate) corrupt: f64,
    /// The same with a corrected checksum: only the application can detect it.
    pub(crate) forge: f64,
    /// Longest IP packet with a UDP datagram that passes, bytes; 0 for no limit.
    pub(crate) black_hole: usize,
    /// No TCP connection is made to this port and those above; 0: to all.
    pub(crate) firewall: u16,
    /// Delay from a port to every other one, nanoseconds.
    pub(crate) delay_ns: u64,
    /// Time that a byte takes on the link of a port, each way, nanoseconds; 0 for no limit.
    pub(crate) byte_ns: f64,
    /// Most bytes that wait for a port's link. Frames beyond are lost.
    pub(crate) queue_bytes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            loss: 0.0,
            burst: 0.0,
            burst_frames: 8,
            dup: 0.0,
            reorder: 0.0,
            reorder_frames: 3,
            corrupt: 0.0,
            forge: 0.0,
            black_hole: 0,
            firewall: 0,
            delay_ns: 0,
            byte_ns: 0.0,
            // About the buffer that a real switch has for a port.
            queue_bytes: 512 << 10,
        }
    }
}

/// The frames that a cut or a heal affects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    All,
    /// Frames to and from a port.
    Port(usize),
    /// Frames from the first port to the second.
    OneWay(usize, usize),
}

/// One line of the control channel.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Command {
    Set(Settings),
    Cut(Which),
    Heal(Which),
    Counts,
}

impl Settings {
    /// The settings after `word` (without dashes) and its `values`; `None` if the word is no setting.
    ///
    /// # Errors
    /// A sentence for an invalid value.
    pub(crate) fn with(&self, word: &str, values: &[&str]) -> Result<Option<Self>, String> {
        let mut new = self.clone();
        let first = || values.first().copied().ok_or_else(|| format!("{word} wants a value"));
        // Reads a second value, given separately or behind a colon of the first.
        let with_count = |default: u32| -> Result<(f64, u32), String> {
            let first = first()?;
            let (p, count) = first.split_once(':').unwrap_or((first, ""));
            let count = values.get(1).copied().unwrap_or(count);
            let count = if count.is_empty() { default } else { number(count)? as u32 };
            Ok((probability(p)?, count.max(1)))
        };
        match word {
            "loss" => new.loss = probability(first()?)?,
            "dup" => new.dup = probability(first()?)?,
            "corrupt" => new.corrupt = probability(first()?)?,
            "forge" => new.forge = probability(first()?)?,
            "burst" => (new.burst, new.burst_frames) = with_count(self.burst_frames)?,
            "reorder" => (new.reorder, new.reorder_frames) = with_count(self.reorder_frames)?,
            "black-hole" => new.black_hole = number(first()?)? as usize,
            "firewall" => new.firewall = number(first()?)? as u16,
            "delay" => new.delay_ns = (number(first()?)? * 1e3) as u64,
            "rate" => {
                let mbit = number(first()?)?;
                new.byte_ns = if mbit > 0.0 { 8e3 / mbit } else { 0.0 };
            }
            "queue" => new.queue_bytes = (number(first()?)? * 1024.0) as u64,
            _ => return Ok(None),
        }
        Ok(Some(new))
    }
}

impl Command {
    /// Reads one line of the control channel, for a switch of `ports` ports.
    ///
    /// # Errors
    /// A sentence for an invalid line.
    pub(crate) fn parse(line: &str, now: &Settings, ports: usize) -> Result<Self, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some((&word, values)) = words.split_first() else { return Err("an empty line".into()) };
        let which = || match values.first() {
            None => Ok(Which::All),
            Some(who) => Which::parse(who, ports),
        };
        match word {
            "cut" => Ok(Self::Cut(which()?)),
            "heal" => Ok(Self::Heal(which()?)),
            "counts" => Ok(Self::Counts),
            // Ends all effects on frames, but cuts stay.
            "clear" => Ok(Self::Set(Settings::default())),
            _ => match now.with(word, values)? {
                Some(settings) => Ok(Self::Set(settings)),
                None => Err(format!("no such word: {word}")),
            },
        }
    }
}

impl Which {
    /// Reads `2`, or `0:1` for only the frames from port 0 to port 1.
    ///
    /// # Errors
    /// A sentence for ports that do not exist.
    pub(crate) fn parse(text: &str, ports: usize) -> Result<Self, String> {
        let port = |text: &str| match text.parse() {
            Ok(port) if port < ports => Ok(port),
            _ => Err(format!("no such port: {text}")),
        };
        match text.split_once(':') {
            None => Ok(Self::Port(port(text)?)),
            Some((from, to)) => Ok(Self::OneWay(port(from)?, port(to)?)),
        }
    }

    /// Whether it includes frames from port `from` to port `to`.
    pub(crate) fn covers(self, from: usize, to: usize) -> bool {
        match self {
            Self::All => true,
            Self::Port(port) => port == from || port == to,
            Self::OneWay(a, b) => (a, b) == (from, to),
        }
    }
}

/// A probability, as `0.01` or `1%`.
fn probability(text: &str) -> Result<f64, String> {
    let p = match text.strip_suffix('%') {
        Some(percent) => number(percent)? / 100.0,
        None => number(text)?,
    };
    if p <= 1.0 { Ok(p) } else { Err(format!("no probability: {text}")) }
}

fn number(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err(format!("no number from 0 up: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_settings() {
        let parse = |line| Command::parse(line, &Settings::default(), 4);
        let set = |line| match parse(line) {
            Ok(Command::Set(settings)) => settings,
            other => panic!("{line}: {other:?}"),
        };
        assert_eq!(set("loss 0.25").loss, 0.25);
        assert_eq!(set("loss 5%").loss, 0.05);
        assert_eq!((set("burst 0.1 20").burst, set("burst 0.1 20").burst_frames), (0.1, 20));
        assert_eq!(set("burst 0.1:20"), set("burst 0.1 20"));
        assert_eq!(set("reorder 0.1").reorder_frames, 3);
        assert_eq!(set("black-hole 1300").black_hole, 1300);
        assert_eq!(set("firewall 10000").firewall, 10_000);
        assert_eq!(set("delay 50").delay_ns, 50_000);
        assert_eq!(set("rate 1000").byte_ns, 8.0);
        assert_eq!(set("rate 0").byte_ns, 0.0);
        assert_eq!(set("queue 1").queue_bytes, 1024);
        assert_eq!(parse("cut"), Ok(Command::Cut(Which::All)));
        assert_eq!(parse("cut 2"), Ok(Command::Cut(Which::Port(2))));
        assert_eq!(parse("heal 0:3"), Ok(Command::Heal(Which::OneWay(0, 3))));
    }

    #[test]
    fn nonsense_is_refused() {
        for line in
            ["", "loss", "loss 2", "loss -1", "loss x", "cut 4", "cut 0:9", "dance 1", "delay nan"]
        {
            assert!(Command::parse(line, &Settings::default(), 4).is_err(), "{line}");
        }
    }
}
