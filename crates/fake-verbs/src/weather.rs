//! What networks and buses may do without breaking a promise. Everything is drawn from the seed, by each process from a
//! stream of its own.

/// How often things happen, in millionths, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Weather {
    /// Datagrams that are lost, repeated, and held back.
    pub loss: u32,
    /// See above.
    pub duplication: u32,
    /// See above.
    pub delay: u32,
    /// The pieces of a write are placed in any order, and requests overtake each other; completions stay in order.
    pub scatter: Option<Scatter>,
    /// Requests that wait in their queue, for the device to read their memory later.
    pub laziness: u32,
    /// Writes with immediate that find no receive although there is one (RNR NAK).
    pub rnr: u32,
    /// RC requests that are sent again although they arrived.
    pub repeats: u32,
    /// RC requests that fail, with the end of their queue pair.
    pub failures: u32,
    /// Address handles that cannot be made, and ones that take 50 ms.
    pub handle_failures: u32,
    /// See above.
    pub handle_delays: u32,
    /// Datagrams longer than this, bytes, are lost on their way; 0: none.
    pub narrow: u32,
    /// Most bytes that all processes of a run may register each, like RLIMIT_MEMLOCK; 0: any.
    pub locked_bytes: u64,
    /// A port goes down and up again after so many datagrams (of a device without them, an eighth as many packets); 0:
    /// never.
    pub flap_after: u32,
    /// The device is removed after so many of the same; 0: never.
    pub removal_after: u32,
    /// A device that was removed is back after so many milliseconds; 0: never.
    pub return_ms: u32,
}

/// The size of the pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scatter {
    /// Of the path's MTU: packets overtake each other in the network.
    Packets,
    /// Of 256 bytes: a bus with relaxed ordering.
    Bus,
}

/// Named kinds of weather.
pub const NAMED: &[(&str, &str)] = &[
    ("calm", ""),
    ("scatter", "scatter=packets,lazy=20%,repeats=2%"),
    ("relaxed", "scatter=bus,lazy=20%"),
    ("lossy", "loss=2%,duplication=1%,delay=5%"),
    ("deaf", "loss=100%"),
    ("rnr", "rnr=5%,lazy=5%"),
    ("breaking", "failures=5%,loss=0.5%"),
    ("handles", "handle-failures=15%,handle-delays=20%"),
    ("memlock", "locked=24000000"),
    ("flap", "flap=100"),
    ("removal", "removal=120"),
    ("return", "removal=120,return=700"),
    (
        "storm",
        "scatter=bus,lazy=20%,repeats=2%,loss=2%,duplication=1%,delay=5%,rnr=3%,failures=0.02%",
    ),
];

impl Weather {
    /// A name of [`NAMED`], or words `what=amount` with commas between them. Error: the word that is not known.
    pub fn parse(text: &str) -> Result<Self, String> {
        let named = NAMED.iter().find(|(name, _)| *name == text);
        let words = named.map_or(text, |(_, words)| words);
        let mut weather = Self::default();
        for word in words.split(',').filter(|word| !word.trim().is_empty()) {
            weather.set(word.trim()).ok_or_else(|| format!("unknown weather: {word}"))?;
        }
        Ok(weather)
    }

    fn set(&mut self, word: &str) -> Option<()> {
        let (what, amount) = word.split_once('=')?;
        let rate = match what {
            "loss" => &mut self.loss,
            "duplication" => &mut self.duplication,
            "delay" => &mut self.delay,
            "lazy" => &mut self.laziness,
            "rnr" => &mut self.rnr,
            "repeats" => &mut self.repeats,
            "failures" => &mut self.failures,
            "handle-failures" => &mut self.handle_failures,
            "handle-delays" => &mut self.handle_delays,
            _ => return self.set_other(what, amount),
        };
        *rate = per_million(amount)?;
        Some(())
    }

    fn set_other(&mut self, what: &str, amount: &str) -> Option<()> {
        match what {
            "scatter" if amount == "packets" => self.scatter = Some(Scatter::Packets),
            "scatter" if amount == "bus" => self.scatter = Some(Scatter::Bus),
            "narrow" => self.narrow = amount.parse().ok()?,
            "locked" => self.locked_bytes = amount.parse().ok()?,
            "flap" => self.flap_after = amount.parse().ok()?,
            "removal" => self.removal_after = amount.parse().ok()?,
            "return" => self.return_ms = amount.parse().ok()?,
            _ => return None,
        }
        Some(())
    }
}

/// Millionths, of text such as `0.5%`.
fn per_million(text: &str) -> Option<u32> {
    let percent: f64 = text.strip_suffix('%')?.parse().ok()?;
    (0.0..=100.0).contains(&percent).then_some((percent * 10_000.0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_weather_is_known() {
        for (name, _) in NAMED {
            let weather = Weather::parse(name).unwrap();
            assert_eq!(weather == Weather::default(), *name == "calm", "{name}");
        }
    }

    #[test]
    fn words_say_how_often() {
        let weather =
            Weather::parse("loss=0.5%, scatter=bus,locked=4096,flap=7,narrow=99").unwrap();
        assert_eq!((weather.loss, weather.scatter), (5000, Some(Scatter::Bus)));
        assert_eq!(weather.narrow, 99);
        assert_eq!((weather.locked_bytes, weather.flap_after), (4096, 7));
        for bad in ["loss", "loss=2", "loss=101%", "snow=1%", "scatter=x"] {
            assert!(Weather::parse(bad).is_err(), "{bad}");
        }
    }
}
