//! Variables of the environment that udrv does not have: most are misspelled.

/// The longest edit that counts as a misspelling, letters.
const EDITS_MAX: usize = 3;

/// The one of `known` that is spelled most like `name`, if one is.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_ascii_uppercase();
    let near = known.map(|other| (edits(&name, other), other));
    let (edits, nearest) = near.min_by_key(|(edits, _)| *edits)?;
    (edits <= EDITS_MAX.min(name.len() / 2)).then_some(nearest)
}

/// How many letters have to be inserted, removed or replaced to make one text of the other (Levenshtein's distance).
fn edits(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut corner = i;
        let mut left = i + 1;
        for (b, above) in other.bytes().zip(row.iter_mut().skip(1)) {
            let least = (corner + usize::from(a != b)).min(left + 1).min(*above + 1);
            (corner, left, *above) = (*above, least, least);
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        let pairs = [("", ""), ("a", ""), ("", "ab"), ("IFCE", "IFACE"), ("KITTEN", "SITTING")];
        assert_eq!(pairs.map(|(one, other)| edits(one, other)), [0, 1, 2, 1, 3]);
    }

    #[test]
    fn the_nearest_is_near() {
        let known = ["IFACE", "RDMA", "RV", "NET", "NET_BUFFER", "EAGER_MAX"];
        let of = |name| nearest(name, known.into_iter());
        assert_eq!(of("IFCE"), Some("IFACE"));
        assert_eq!(of("iface"), Some("IFACE"));
        assert_eq!(of("EAGERMAX"), Some("EAGER_MAX"));
        assert_eq!((of("NETWORK_CARD"), of("X"), of("")), (None, None, None));
    }
}
