//! How variables are described and read.

use std::fmt;
use std::ops::RangeInclusive;

/// One variable, as `fi_info -e` lists it.
#[derive(Debug)]
pub(crate) struct Variable {
    /// Name without the prefix `FI_UDRV_`, as `fi_param_define` expects it.
    pub(crate) name: &'static str,
    /// One sentence with unit, range and default.
    pub(crate) help: &'static str,
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
    /// Is told the name, the text, and what the text must be.
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

    /// The value that `parse` makes of the text; `wanted` describes a text of which it makes one.
    pub(crate) fn parsed<T>(
        &self,
        name: &str,
        wanted: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.text(name)?;
        let value = parse(text.trim());
        if value.is_none() {
            (self.complain)(name, &text, wanted);
        }
        value
    }

    /// A number in `range`.
    pub(crate) fn number(&self, name: &str, range: RangeInclusive<u64>) -> Option<u64> {
        let wanted = format!("a number from {} to {}", range.start(), range.end());
        self.parsed(name, &wanted, |text| text.parse().ok().filter(|value| range.contains(value)))
    }

    /// A size or count in `range`.
    pub(crate) fn size(&self, name: &str, range: RangeInclusive<u64>) -> Option<usize> {
        self.number(name, range).map(|value| value as usize)
    }

    /// 0 or 1.
    pub(crate) fn switch(&self, name: &str) -> Option<bool> {
        self.choice(name, "0 or 1", &[("0", false), ("1", true)])
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
