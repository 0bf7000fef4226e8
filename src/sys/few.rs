//! Lists of a few entries. The sorts of `std` are made for long lists: they are several thousand bytes of code for each type
//! of entry.

/// Sorts a short list. Entries of which neither is `less` than the other stay in their order.
pub(crate) fn sort<T>(list: &mut [T], less: impl Fn(&T, &T) -> bool) {
    for end in 1..list.len() {
        let mut at = end;
        while matches!(list.get(at.wrapping_sub(1)..=at), Some([a, b]) if less(b, a)) {
            list.swap(at - 1, at);
            at -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_sorts_as_std_does(mut list in proptest::collection::vec((0u8..6, any::<u8>()), 0..20)) {
            let mut wanted = list.clone();
            wanted.sort_by_key(|(key, _)| *key);
            sort(&mut list, |a, b| a.0 < b.0);
            prop_assert_eq!(list, wanted);
        }
    }
}
