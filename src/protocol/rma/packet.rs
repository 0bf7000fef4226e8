//! Headers of one-sided operations, and the ranges before their payload (PROTOCOL.md §4.15). All integers are
//! little-endian.

use super::ranges::{MAX_RANGES, RemoteRange, RemoteRanges};
use crate::memory::{MAX_SEGMENTS, SegmentList};
use crate::protocol::packet::Ranges;
use crate::protocol::wire::{self, Reader};
use crate::sys::cma::Range;

const WRITE: u8 = 16;
const WRITE_MORE: u8 = 17;
const READ: u8 = 18;
const READ_DATA: u8 = 19;
const DONE: u8 = 20;
const PUSH: u8 = 21;
const ATOMIC: u8 = 22;
const RESULT: u8 = 23;
const GRANT: u8 = 24;
const RETRACT: u8 = 25;
const FAULT: u8 = 26;

/// A flag of PUSH and READ_DATA: a copy from or to the initiator's memory failed with EFAULT.
const FAULTED: u8 = 1;
const DATA: u8 = 2;
const MORE: u8 = 16;
const FETCH: u8 = 32;
/// A flag of GRANT.
const READS: u8 = 64;
const WRITES: u8 = 128;
const FLUSHES: u8 = 32;

/// Longest header, bytes.
pub(super) const HEADER_MAX: usize = 32;
/// Encoded length of a range of the target's memory, bytes.
pub(super) const REMOTE_LEN: usize = 24;
const LOCAL_LEN: usize = 16;
/// Longest list of both sides' ranges, bytes.
const PREFIX_MAX: usize = MAX_RANGES * REMOTE_LEN + MAX_SEGMENTS * LOCAL_LEN;

/// One packet header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RmaPacket {
    /// A write into `ranges` ranges, which the payload begins with. Without `more` all bytes follow. `more`: the length
    /// of the write, whose bytes are in the `sources` ranges that come next, or arrive here and in
    /// [`RmaPacket::WriteMore`].
    Write { tx: u64, data: Option<u64>, more: Option<u64>, ranges: u8, sources: u8 },
    /// More bytes of write `tx`, for `offset`.
    WriteMore { tx: u64, offset: u64 },
    /// A read from `ranges` ranges, which the payload begins with, into the `sinks` ranges behind them.
    Read { tx: u64, ranges: u8, sinks: u8 },
    /// Bytes of read `tx`, from `offset` on.
    ReadData { tx: u64, offset: u64, faulted: bool },
    /// The operations whose numbers are the payload have ended: 0, or an error number.
    Done { status: u32 },
    /// The target cannot fetch the bytes of write `tx`: the initiator has to send them.
    Push { tx: u64, faulted: bool },
    /// The initiator of write `tx` got a PUSH, but cannot read its own memory.
    Fault { tx: u64 },
    /// An atomic operation, by its numbers, on the elements in `ranges` ranges, which the payload begins with; the
    /// operands follow. `fetches`: the initiator wants the old values.
    Atomic { tx: u64, data: Option<u64>, fetches: bool, ranges: u8, op: u8, datatype: u8 },
    /// The payload is the old values of atomic operation `tx`.
    Result { tx: u64 },
    /// Advertises a part of region `key`: `len` bytes from the remote address `base` on. The initiator may read or write
    /// them with the transport's remote key, which is the payload.
    Grant { key: u64, base: u64, len: u64, reads: bool, writes: bool, flushes: bool },
    /// Invalidates all keys of these bytes of region `key`.
    Retract { key: u64, base: u64, len: u64 },
}

/// An encoded header.
pub(crate) type Encoded = wire::Encoded<HEADER_MAX>;

impl RmaPacket {
    /// Whether a header is one of a one-sided operation.
    #[inline]
    pub(crate) fn is_one(header: &[u8]) -> bool {
        header.first().is_some_and(|kind| (WRITE..=FAULT).contains(kind))
    }

    /// Encodes the header.
    #[inline]
    pub(crate) fn encode(&self) -> Encoded {
        match *self {
            Self::Write { tx, data, more, ranges, sources } => {
                let flag = |set: bool, bit: u8| if set { bit } else { 0 };
                let flags = flag(data.is_some(), DATA) | flag(more.is_some(), MORE);
                let mut e = Encoded::new([WRITE, flags, ranges, sources], 0).with([tx]);
                for field in [data, more].into_iter().flatten() {
                    e.put_u64(field);
                }
                e
            }
            Self::WriteMore { tx, offset } => {
                Encoded::new([WRITE_MORE, 0, 0, 0], 0).with([tx, offset])
            }
            Self::Read { tx, ranges, sinks } => {
                Encoded::new([READ, 0, ranges, sinks], 0).with([tx])
            }
            Self::ReadData { tx, offset, faulted } => {
                let flags = if faulted { FAULTED } else { 0 };
                Encoded::new([READ_DATA, flags, 0, 0], 0).with([tx, offset])
            }
            Self::Done { status } => Encoded::new([DONE, 0, 0, 0], status),
            Self::Push { tx, faulted } => {
                Encoded::new([PUSH, if faulted { FAULTED } else { 0 }, 0, 0], 0).with([tx])
            }
            Self::Fault { tx } => Encoded::new([FAULT, 0, 0, 0], 0).with([tx]),
            Self::Atomic { tx, data, fetches, ranges, op, datatype } => {
                let flag = |set: bool, bit: u8| if set { bit } else { 0 };
                let flags = flag(data.is_some(), DATA) | flag(fetches, FETCH);
                let what = u32::from_le_bytes([op, datatype, 0, 0]);
                let e = Encoded::new([ATOMIC, flags, ranges, 0], what).with([tx]);
                match data {
                    Some(data) => e.with([data]),
                    None => e,
                }
            }
            Self::Result { tx } => Encoded::new([RESULT, 0, 0, 0], 0).with([tx]),
            Self::Grant { key, base, len, reads, writes, flushes } => {
                let flag = |set: bool, bit: u8| if set { bit } else { 0 };
                let flags = flag(reads, READS) | flag(writes, WRITES) | flag(flushes, FLUSHES);
                Encoded::new([GRANT, flags, 0, 0], 0).with([key, base, len])
            }
            Self::Retract { key, base, len } => {
                Encoded::new([RETRACT, 0, 0, 0], 0).with([key, base, len])
            }
        }
    }

    /// Decodes a header. `None`: bytes that no udrv of this version sends.
    #[inline]
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<8>()?;
        let [kind, flags, ranges, locals, a, b, c, d] = *head;
        let mut fields = Reader(rest);
        if usize::from(ranges) > MAX_RANGES || usize::from(locals) > MAX_SEGMENTS {
            return None;
        }
        Some(match kind {
            WRITE => Self::Write {
                tx: fields.u64()?,
                data: if flags & DATA != 0 { Some(fields.u64()?) } else { None },
                more: if flags & MORE != 0 { Some(fields.u64()?) } else { None },
                ranges,
                sources: locals,
            },
            WRITE_MORE => Self::WriteMore { tx: fields.u64()?, offset: fields.u64()? },
            READ => Self::Read { tx: fields.u64()?, ranges, sinks: locals },
            READ_DATA => Self::ReadData {
                tx: fields.u64()?,
                offset: fields.u64()?,
                faulted: flags & FAULTED != 0,
            },
            DONE => Self::Done { status: u32::from_le_bytes([a, b, c, d]) },
            PUSH => Self::Push { tx: fields.u64()?, faulted: flags & FAULTED != 0 },
            FAULT => Self::Fault { tx: fields.u64()? },
            ATOMIC => Self::Atomic {
                tx: fields.u64()?,
                data: if flags & DATA != 0 { Some(fields.u64()?) } else { None },
                fetches: flags & FETCH != 0,
                ranges,
                op: a,
                datatype: b,
            },
            RESULT => Self::Result { tx: fields.u64()? },
            GRANT => Self::Grant {
                key: fields.u64()?,
                base: fields.u64()?,
                len: fields.u64()?,
                reads: flags & READS != 0,
                writes: flags & WRITES != 0,
                flushes: flags & FLUSHES != 0,
            },
            RETRACT => {
                Self::Retract { key: fields.u64()?, base: fields.u64()?, len: fields.u64()? }
            }
            _ => return None,
        })
    }
}

/// The encoded ranges before the payload of a request.
pub(super) struct Prefix(wire::Encoded<PREFIX_MAX>);

impl Prefix {
    /// `local`: the initiator's ranges if the target may move the bytes itself, else none.
    pub(super) fn new(remote: &RemoteRanges, local: &Ranges) -> Self {
        let mut prefix = wire::Encoded::EMPTY;
        for range in remote.as_slice() {
            [range.key, range.addr, range.len].into_iter().for_each(|field| prefix.put_u64(field));
        }
        for range in local.as_slice() {
            [range.addr, range.len].into_iter().for_each(|field| prefix.put_u64(field));
        }
        Self(prefix)
    }

    pub(super) fn len(&self) -> usize {
        self.0.as_slice().len()
    }

    /// Fills `to` with the bytes at `at` of the prefix, as if `segments` came behind it.
    pub(super) fn pack(&self, segments: &SegmentList, at: usize, to: &mut [u8]) {
        let head = self.0.as_slice().get(at..).unwrap_or(&[]);
        let n = head.len().min(to.len());
        let (front, back) = to.split_at_mut(n);
        front.copy_from_slice(head.get(..n).unwrap_or(&[]));
        if !back.is_empty() {
            segments.copy_out((at + n).saturating_sub(self.len()), back);
        }
    }

    /// Decodes the ranges of a request, and returns them with the bytes behind. `None`: it is cut off, or the sum of
    /// one side's lengths overflows.
    pub(super) fn read(
        payload: &[u8],
        ranges: u8,
        locals: u8,
    ) -> Option<(RemoteRanges, Ranges, &[u8])> {
        let mut fields = Reader(payload);
        let mut remote = RemoteRanges::NONE;
        for _ in 0..ranges {
            let (key, addr) = (fields.u64()?, fields.u64()?);
            remote.push(RemoteRange { key, addr, len: fields.u64()? })?;
        }
        let mut list = [Range::default(); MAX_SEGMENTS];
        for slot in list.iter_mut().take(usize::from(locals)) {
            *slot = Range { addr: fields.u64()?, len: fields.u64()? };
        }
        list.iter().try_fold(0u64, |sum, range| sum.checked_add(range.len))?;
        Some((remote, Ranges::new((list, usize::from(locals))), fields.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packet() -> impl Strategy<Value = RmaPacket> {
        let any_option = || proptest::option::of(any::<u64>());
        prop_oneof![
            (any::<u64>(), any_option(), any_option(), 0..=4u8, 0..=4u8).prop_map(
                |(tx, data, more, ranges, sources)| {
                    RmaPacket::Write { tx, data, more, ranges, sources }
                }
            ),
            (any::<u64>(), any::<u64>())
                .prop_map(|(tx, offset)| RmaPacket::WriteMore { tx, offset }),
            (any::<u64>(), 0..=4u8, 0..=4u8).prop_map(|(tx, ranges, sinks)| RmaPacket::Read {
                tx,
                ranges,
                sinks
            }),
            any::<(u64, u64, bool)>().prop_map(|(tx, offset, faulted)| RmaPacket::ReadData {
                tx,
                offset,
                faulted
            }),
            any::<u32>().prop_map(|status| RmaPacket::Done { status }),
            any::<(u64, bool)>().prop_map(|(tx, faulted)| RmaPacket::Push { tx, faulted }),
            any::<u64>().prop_map(|tx| RmaPacket::Fault { tx }),
            (any::<u64>(), any_option(), any::<bool>(), 0..=4u8, any::<u8>(), any::<u8>())
                .prop_map(|(tx, data, fetches, ranges, op, datatype)| {
                    RmaPacket::Atomic { tx, data, fetches, ranges, op, datatype }
                }),
            any::<u64>().prop_map(|tx| RmaPacket::Result { tx }),
            any::<([u64; 3], [bool; 3])>().prop_map(
                |([key, base, len], [reads, writes, flushes])| {
                    RmaPacket::Grant { key, base, len, reads, writes, flushes }
                }
            ),
            any::<[u64; 3]>().prop_map(|[key, base, len]| RmaPacket::Retract { key, base, len }),
        ]
    }

    proptest! {
        #[test]
        fn a_packet_is_decoded_as_it_was_encoded(packet in packet()) {
            let wire = packet.encode();
            prop_assert!(RmaPacket::is_one(wire.as_slice()));
            prop_assert_eq!(RmaPacket::decode(wire.as_slice()), Some(packet));
            for n in 0..wire.as_slice().len() {
                prop_assert_eq!(RmaPacket::decode(&wire.as_slice()[..n]), None);
            }
        }

        #[test]
        fn any_bytes_are_harmless(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
            ranges in 0..=4u8,
            locals in 0..=4u8,
        ) {
            let _ = RmaPacket::decode(&bytes);
            if let Some((remote, _, rest)) = Prefix::read(&bytes, ranges, locals) {
                prop_assert_eq!(remote.as_slice().len(), usize::from(ranges));
                let prefix = usize::from(ranges) * REMOTE_LEN + usize::from(locals) * LOCAL_LEN;
                prop_assert_eq!(rest.len(), bytes.len() - prefix);
            }
        }
    }

    #[test]
    fn lengths_that_cannot_be_added_are_refused() {
        let mut payload = [0xff; 2 * LOCAL_LEN];
        assert!(Prefix::read(&payload, 0, 2).is_none());
        payload[8..16].fill(0);
        assert!(Prefix::read(&payload, 0, 2).is_some());
        assert!(Prefix::read(&[0xff; 2 * REMOTE_LEN], 2, 0).is_none());
        assert!(Prefix::read(&payload, 0, 3).is_none(), "cut off");
    }

    #[test]
    fn ranges_come_before_the_bytes_wherever_it_is_cut() {
        let mut remote = RemoteRanges::NONE;
        remote.push(RemoteRange { key: 1, addr: 2, len: 3 }).unwrap();
        let bytes = crate::memory::OwnedBuffer::from(b"xyz".to_vec());
        let segments = bytes.segments();
        let prefix = Prefix::new(&remote, &Ranges::new(segments.ranges()));
        let mut whole = vec![0; prefix.len() + 3];
        prefix.pack(&segments, 0, &mut whole);
        let (read, sources, rest) = Prefix::read(&whole, 1, 1).unwrap();
        assert_eq!((read, rest), (remote, &b"xyz"[..]));
        assert_eq!(sources, Ranges::new(segments.ranges()));
        for cut in 0..=whole.len() {
            let mut parts = vec![0; whole.len()];
            let (a, b) = parts.split_at_mut(cut);
            prefix.pack(&segments, 0, a);
            prefix.pack(&segments, cut, b);
            assert_eq!(parts, whole);
        }
    }
}
