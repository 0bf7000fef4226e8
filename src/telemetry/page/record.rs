//! Records of the page, and the words that are in them.

use crate::sys::shared_memory::SharedMemory;
use crate::telemetry::histogram::CLASSES;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::fence;

/// What a record is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// An endpoint that is open, or a peer that is connected.
    Open = 1,
    /// Its endpoint has closed, or the peer has gone; the record goes to the next one.
    Closed = 2,
}

/// Words of a record that are there whatever it is about, and the first one after them.
const SEQUENCE: usize = 0;
const STATE: usize = 1;
pub(super) const FIRST: usize = 2;
/// Words of an address, of the name of a transport, and of a reason.
pub(super) const ADDRESS: usize = 8;
pub(super) const TRANSPORT: usize = 4;
pub(super) const REASON: usize = 12;

/// The names of an endpoint's words, in their order.
pub(super) const ENDPOINT: &str = "sequence state address:64 polls empty_polls sleeps asleep unexpected_bytes unexpected_bytes_peak \
    eager_sent rendezvous_sent unexpected pulled_bytes pushed_bytes fragment_bytes dropped surplus stream_bytes resumed \
    window_bytes windows_lost declined assisted_bytes reached_bytes read_bytes \
    cache_hits cache_misses late_receivers[12] early_senders[12] progress_gaps[12] \
    packets_sent packets_received retransmitted timeouts duplicates no_room forged stray connected \
    receives_posted sends_pending renewed_ns send_waits_since_ns send_waits_for:64 receive_waits_for:64";
/// The same of a peer.
pub(super) const PEER: &str = "sequence state endpoint address:64 transport:32 reason:96 messages_sent messages_received rtt_ns unanswered rank \
    unsolicited_sent unsolicited_sent_bytes fragments_sent fragments_sent_bytes \
    read_sent read_sent_bytes written_sent written_sent_bytes split_sent split_sent_bytes \
    unsolicited_received unsolicited_received_bytes fragments_received \
    fragments_received_bytes read_received read_received_bytes written_received written_received_bytes \
    split_received split_received_bytes";
/// The same of an error or a warning.
pub(super) const NOTE: &str = "sequence state cause level times at_unix_ns text:512";

/// The names of an endpoint's counts.
#[cfg(test)]
pub(crate) fn endpoint_names() -> impl Iterator<Item = &'static str> {
    ENDPOINT.split_whitespace().skip(3)
}

/// Words of an endpoint's counts, without the texts behind them.
pub(crate) const ENDPOINT_COUNTS: usize = 37 + 3 * CLASSES;

/// Words of an endpoint's and of a peer's record: those that their names take. The names are not counted for each report.
pub(super) const ENDPOINT_WORDS: usize = FIRST + ADDRESS + ENDPOINT_COUNTS + 2 * ADDRESS;
pub(super) const PEER_WORDS: usize = FIRST + 1 + ADDRESS + TRANSPORT + REASON + PEER_COUNTS;
/// Counts of a peer, behind its texts.
pub(crate) const PEER_COUNTS: usize = 5 + 20;
/// Words of a note, and of the text at its end.
pub(super) const NOTE_WORDS: usize = FIRST + 4 + CAUSE_TEXT;
pub(super) const CAUSE_TEXT: usize = 64;

/// Words that the names take.
#[cfg(test)]
fn words(names: &str) -> usize {
    names.split_whitespace().map(width).sum()
}

/// Words of one name.
#[cfg(test)]
fn width(name: &str) -> usize {
    let number = |text: &str| text.trim_end_matches(']').parse::<usize>().unwrap_or(1);
    match (name.split_once(':'), name.split_once('[')) {
        (Some((_, bytes)), _) => number(bytes).div_ceil(8),
        (_, Some((_, words))) => number(words),
        _ => 1,
    }
}

/// Writes words of the record at `offset` from number `first` on. Words outside the page are left out.
pub(super) fn write(
    memory: &SharedMemory,
    offset: usize,
    state: State,
    first: usize,
    words: impl Iterator<Item = u64>,
) {
    let store = |word: usize, value: u64| {
        if let Some(place) = memory.atomic(offset + 8 * word) {
            place.store(value, Relaxed);
        }
    };
    let Some(sequence) = memory.atomic(offset + 8 * SEQUENCE) else { return };
    let now = sequence.load(Relaxed);
    sequence.store(now.wrapping_add(1) | 1, Relaxed);
    fence(Release);
    store(STATE, state as u64);
    for (at, value) in words.enumerate() {
        store(first + at, value);
    }
    sequence.store((now | 1).wrapping_add(1), Release);
}

/// A text as so many words, cut or filled with zero bytes; its last byte is zero.
pub(in crate::telemetry) fn packed(text: &str, words: usize) -> impl Iterator<Item = u64> + '_ {
    let bytes = text.as_bytes();
    (0..words).map(move |word| {
        let byte = |at: usize| {
            let at = 8 * word + at;
            if at + 1 < 8 * words { bytes.get(at).copied().unwrap_or(0) } else { 0 }
        };
        u64::from_ne_bytes(std::array::from_fn(byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unpacked(words: impl Iterator<Item = u64>) -> String {
        let bytes: Vec<u8> =
            words.flat_map(u64::to_ne_bytes).take_while(|byte| *byte != 0).collect();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn texts_are_cut_to_their_room() {
        assert_eq!(unpacked(packed("shared memory", 4)), "shared memory");
        assert_eq!(unpacked(packed("123456789", 1)), "1234567");
        assert_eq!(unpacked(packed("", 2)), "");
    }

    #[test]
    fn a_record_has_its_words_from_the_first_on() {
        assert_eq!(words("sequence state name:16 a b c[3]"), 9);
        assert_eq!((words(ENDPOINT), words(PEER)), (ENDPOINT_WORDS, PEER_WORDS));
        assert_eq!(words(NOTE), NOTE_WORDS);
        let (memory, _fd) = SharedMemory::create(4096, 4096).unwrap();
        write(&memory, 64, State::Open, 2, packed("x", 2).chain([7, 8]));
        let word = |at: usize| memory.atomic(64 + 8 * at).unwrap().load(Relaxed);
        assert_eq!((word(0), word(1)), (2, 1));
        assert_eq!((word(2).to_ne_bytes()[0], word(3), word(4), word(5)), (b'x', 0, 7, 8));
        write(&memory, 64, State::Closed, 5, std::iter::once(9));
        assert_eq!((word(0), word(1), word(4), word(5)), (4, 2, 7, 9));
        write(&memory, 4096, State::Open, 0, std::iter::repeat_n(1, 3));
    }
}
