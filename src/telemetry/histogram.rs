//! Times, counted by their length.

/// Classes of lengths: class 0 has times below 1 us, class `n` those below 4^n us that are in no earlier one, and the last
/// class all longer ones (4^10 us, about one second, and more).
pub(crate) const CLASSES: usize = 12;

/// How many times of each class there were.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Histogram(pub(crate) [u64; CLASSES]);

impl Histogram {
    /// Counts a time, nanoseconds.
    pub(crate) fn count(&mut self, ns: u64) {
        let bits = u64::BITS - (ns / 1000).leading_zeros();
        if let Some(class) = self.0.get_mut((bits.div_ceil(2) as usize).min(CLASSES - 1)) {
            *class += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_reaches_to_four_times_the_one_before() {
        let class = |ns: u64| {
            let mut histogram = Histogram::default();
            histogram.count(ns);
            histogram.0.iter().position(|count| *count == 1).unwrap()
        };
        assert_eq!([0, 999, 1000, 3999, 4000, 15_999, 16_000].map(class), [0, 0, 1, 1, 2, 2, 3]);
        assert_eq!([1_048_575_999, 1_048_576_000, u64::MAX].map(class), [10, 11, 11]);
    }
}
