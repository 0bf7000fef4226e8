//! How variables are described and read.

use std::fmt;
use std::ops::RangeInclusive;

/// One variable, as `fi_info -e` lists it.
#[derive(Debug)]
pub(crate) struct Variable {
    /// Name without the prefix `FI_UDRV_`, as `fi_param_define` expects it.
    pub(crate) name: &'static str,
    /// Its type there.
    pub(crate) kind: Kind,
    /// One sentence with unit, range and default.
    pub(crate) help: &'static str,
}

/// The type of a variable in `fi_info -e`, and how libfabric reads it in its own file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Also sizes and times, which may have units: libfabric would read `64K` as 64.
    Text,
    Count,
    Switch,
}

/// The unit of a time without one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unit {
    Us,
    S,
}

/// A group of variables that belong together, with their values; by default, the default values.
pub(crate) trait Group: Default {
    const VARIABLES: &'static [Variable];

    /// Takes the values that are set and valid.
    fn read(&mut self, from: &Reader<'_>);
}

/// A value that must not appear in the log.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Reads variables by name, and reports invalid values.
pub(crate) struct Reader<'a> {
    /// The text of a variable, by its name without the prefix.
    pub(super) lookup: &'a dyn Fn(&str) -> Option<String>,
    /// The same for libfabric's own variables.
    pub(super) of_libfabric: &'a dyn Fn(&str) -> Option<String>,
    /// Takes the name, the text, and what the text must be.
    pub(super) complain: &'a dyn Fn(&str, &str, &str),
}

impl Reader<'_> {
    /// The text of a variable.
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name)
    }

    /// The text of `FI_` and `name`.
    pub(crate) fn of_libfabric(&self, name: &str) -> Option<String> {
        (self.of_libfabric)(name)
    }

    /// The value that `parse` makes of the text; `wanted` describes a text of which it makes one. An empty text counts as
    /// none.
    pub(crate) fn parsed<T>(
        &self,
        name: &str,
        wanted: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.text(name).filter(|text| !text.trim().is_empty())?;
        let value = parse(text.trim());
        if value.is_none() {
            (self.complain)(name, &text, wanted);
        }
        value
    }

    /// A number in `range`.
    pub(crate) fn count(&self, name: &str, range: RangeInclusive<u64>) -> Option<usize> {
        let wanted = format!("a number from {} to {}", range.start(), range.end());
        let number = |text: &str| text.parse().ok().filter(|value| range.contains(value));
        self.parsed(name, &wanted, number).map(|value| value as usize)
    }

    /// A size, bytes in `range`.
    pub(crate) fn bytes(&self, name: &str, range: RangeInclusive<u64>) -> Option<usize> {
        let (least, most) = (range.start(), range.end());
        let examples = ["4096", "16K", "64K", "16M", "1G"];
        let examples = examples.into_iter().filter(|text| bytes(text).is_some_and(|n| n <= *most));
        let examples = examples.collect::<Vec<_>>().join(", ");
        let wanted = format!("a size from {least} to {most} bytes, such as {examples}");
        let bytes = |text: &str| bytes(text).filter(|value| range.contains(value));
        self.parsed(name, &wanted, bytes).map(|value| value as usize)
    }

    /// A time in `range`, in this unit.
    pub(crate) fn time(&self, name: &str, unit: Unit, range: RangeInclusive<u64>) -> Option<u64> {
        let (word, example) = match unit {
            Unit::Us => ("microseconds", "20us or 1ms"),
            Unit::S => ("seconds", "30s or 2min"),
        };
        let (least, most) = (range.start(), range.end());
        let wanted = format!("a time from {least} to {most} {word}, such as {most}, {example}");
        self.parsed(name, &wanted, |text| time(text, unit).filter(|value| range.contains(value)))
    }

    /// 0 or 1, or one of the other words of libfabric's Booleans (fi_param_get(3)).
    pub(crate) fn switch(&self, name: &str) -> Option<bool> {
        const WORDS: [(&str, bool); 8] = [
            ("0", false),
            ("off", false),
            ("no", false),
            ("false", false),
            ("1", true),
            ("on", true),
            ("yes", true),
            ("true", true),
        ];
        self.choice(name, "0 or 1, off or on, no or yes, false or true", &WORDS)
    }

    /// One of several words, in any case; `wanted` lists them.
    pub(crate) fn choice<T: Copy>(
        &self,
        name: &str,
        wanted: &str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        self.parsed(name, wanted, |text| {
            let mut choices = choices.iter();
            choices.find(|(word, _)| text.eq_ignore_ascii_case(word)).map(|(_, value)| *value)
        })
    }
}

/// Replaces `to` by a value that is set.
pub(crate) fn set<T>(to: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *to = value;
    }
}

/// A number and what follows it, without spaces around.
fn quantity(text: &str) -> Option<(u64, &str)> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at_checked(digits)?;
    Some((number.parse().ok()?, unit.trim()))
}

/// Bytes; K, M and G stand for KiB, MiB and GiB, and may be written so.
fn bytes(text: &str) -> Option<u64> {
    let (number, unit) = quantity(text)?;
    let unit = unit.to_ascii_lowercase();
    let scale: u64 = match unit.as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        _ => return None,
    };
    number.checked_mul(scale)
}

/// A whole number of `unit`.
fn time(text: &str, unit: Unit) -> Option<u64> {
    let own = match unit {
        Unit::Us => 1,
        Unit::S => 1_000_000,
    };
    let (number, word) = quantity(text)?;
    let us: u64 = match word.to_ascii_lowercase().as_str() {
        "" => own,
        "us" => 1,
        "ms" => 1000,
        "s" => 1_000_000,
        "min" => 60_000_000,
        _ => return None,
    };
    let all = number.checked_mul(us)?;
    (all % own == 0).then_some(all / own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let all = ["0", "100", "64K", "64 kib", "16M", "1g", "2GiB", "8MB", "7b"].map(bytes);
        let wanted = [0, 100, 65536, 65536, 16 << 20, 1 << 30, 2 << 30, 8 << 20, 7];
        assert_eq!(all, wanted.map(Some));
        for bad in ["", "K", "-1", "1.5K", "64X", "64K4", "0x10", "99999999999G"] {
            assert_eq!(bytes(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_example_of_a_size_is_a_valid_one() {
        let complaint = std::cell::RefCell::new(String::new());
        let reader = Reader {
            lookup: &|_| Some("64K".to_owned()),
            of_libfabric: &|_| None,
            complain: &|_, _, wanted| complaint.replace(wanted.to_owned()).clear(),
        };
        assert_eq!(reader.bytes("EAGER_MAX", 0..=16384), None);
        let wanted = "a size from 0 to 16384 bytes, such as 4096, 16K";
        assert_eq!(*complaint.borrow(), wanted);
    }

    #[test]
    fn times_have_units_and_are_whole() {
        let us = ["20", "20us", "3 ms", "1s"].map(|text| time(text, Unit::Us));
        assert_eq!(us, [20, 20, 3000, 1_000_000].map(Some));
        let s = ["20", "20s", "3000ms", "2min", "5000000us"].map(|text| time(text, Unit::S));
        assert_eq!(s, [20, 20, 3, 120, 5].map(Some));
        for bad in ["500ms", "1 h", "s", "", "-1"] {
            assert_eq!(time(bad, Unit::S), None, "{bad}");
        }
    }
}
