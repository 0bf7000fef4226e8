//! The page of a process: what its endpoints do, for people who look from outside (`udrv stat`, `udrv why`).
//!
//! It is a sealed memfd with the label [`LABEL`], which has no name in any file system. Another process of the same user
//! finds it in /proc/PID/fd, and reads it while this process hangs; the kernel lets no other user open it, and nobody
//! but this process write it (`SharedMemory::create_page`). A reader that has it open keeps it when the process dies.
//!
//! All of it is 64-bit words of this machine's byte order, which are stored one by one (relaxed):
//!
//! | word | contents |
//! |---|---|
//! | 0, 1 | [`MAGIC`], [`LAYOUT`] |
//! | 2 to 5 | bytes of the page; where endpoints begin, bytes of one, and how many there is room for |
//! | 6 to 8 | the same three of peers |
//! | 9, 10 | process id; wall clock when the page was made, nanoseconds since 1970 |
//! | 11 | rank in the job, or 2^64 - 1 |
//! | 12 | endpoints and peers that got no record, because all were taken |
//! | 13 to 15 | the three numbers of notes: errors and warnings of the log |
//! | 16, 24, 32, 40 | texts of 64 bytes: version, host, program, commit |
//! | 64 | the names of an endpoint's, a peer's and a note's words, in three lines of text that end in a zero byte |
//!
//! A record begins with a sequence number, odd while the record changes, and its state ([`State`]). Names that end in
//! `:N` are texts of N bytes, and such with `[N]` are N words: how many times there were of each length (`histogram.rs`). A reader takes words by their names, so that it reads the pages of other versions too.
//!
//! Counts are those that the engine and the transports have anyway. They are copied here when so much time has passed
//! ([`EVERY_NS`]) at a moment when the router reads the clock anyway, with some of the peers, and the endpoint's alone before
//! a thread sleeps: no message costs an instruction for it.
//!
//! A forked child that opens an endpoint has a page of its own. It finds its parent's among its descriptors, and never
//! writes that one. The program that a process executes (execve(2)) has none.

mod notes;
mod record;
mod writer;

#[cfg(test)]
pub(crate) use record::endpoint_names;
pub(super) use record::packed as words_of;
pub(crate) use record::{ENDPOINT_COUNTS, PEER_COUNTS, State};
pub(crate) use writer::{Slot, note};

/// Label of the memfd.
pub(crate) const LABEL: &str = "udrv-page";
/// "udrvpage", as bytes.
pub(crate) const MAGIC: u64 = u64::from_ne_bytes(*b"udrvpage");
/// Version of the layout of the words before the names.
pub(crate) const LAYOUT: u64 = 2;
/// Time between two copies of the counts while an endpoint polls, nanoseconds.
pub(crate) const EVERY_NS: u64 = 100_000_000;
/// Endpoints and peers of a process that have records.
const ENDPOINTS: usize = 16;
const PEERS: usize = 256;
/// No rank is known.
const NO_RANK: u64 = u64::MAX;
