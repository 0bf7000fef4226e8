//! Active-message headers, PROTOCOL.md §3. All integers are little-endian.

use super::spaces::Space;
use super::wire::{self, Reader};
use crate::memory::{MAX_SEGMENTS, SegmentList};
use crate::sys::Errno;
use crate::sys::cma::Range;
use crate::transport::{
    Access, Head, Iface, MAX_HEADER, PeerId, Put, Remote, RemoteKey, SendError, Share, slice_ranges,
};
use std::fmt;

const EAGER: u8 = 1;
const RTS: u8 = 2;
const CTS: u8 = 3;
const FRAGMENT: u8 = 4;
const PUT_DONE: u8 = 5;
const FIN: u8 = 6;
const PUSHED: u8 = 7;
const RESUME: u8 = 8;
const WINDOW: u8 = 9;
const DECLINE: u8 = 10;
const COOPERATE: u8 = 11;
const GONE: u8 = 12;
const FAULT: u8 = 13;

const TAGGED: u8 = 1;
/// A flag of CTS.
const FAULTED: u8 = 1;
const DATA: u8 = 2;
const ACK: u8 = 4;
const PUSHES: u8 = 8;
const LEAVES: u8 = 16;
const SEES: u8 = 32;
const OFFERS: u8 = 64;

/// Address ranges of a buffer that the peer may read or write.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Ranges {
    list: [Range; MAX_SEGMENTS],
    len: usize,
}

impl Ranges {
    /// No ranges: the peer cannot access the buffer, or need not.
    pub(crate) const NONE: Self = Self { list: [Range { addr: 0, len: 0 }; MAX_SEGMENTS], len: 0 };

    pub(crate) fn new((list, len): ([Range; MAX_SEGMENTS], usize)) -> Self {
        Self { list, len: len.min(MAX_SEGMENTS) }
    }

    pub(crate) fn as_slice(&self) -> &[Range] {
        self.list.get(..self.len).unwrap_or(&[])
    }

    /// Where `offset` is in the peer's memory, and for how many bytes in one range: at most `len`. `None`: nowhere.
    fn at(&self, offset: usize, len: usize) -> Option<(Remote, usize)> {
        let mut first = [Range::default()];
        slice_ranges(self.as_slice(), offset as u64, len as u64, &mut first);
        let [Range { addr, len }] = first;
        (len > 0).then_some((Remote { key: RemoteKey::ADDRESSES, offset: addr }, len as usize))
    }

    /// Reads at most as many bytes as `local` has, from the peer's memory at `offset` of the ranges. Returns how many.
    pub(super) fn get(
        &self,
        iface: &mut impl Iface,
        peer: PeerId,
        local: &SegmentList,
        offset: usize,
    ) -> Result<usize, SendError> {
        self.each(local, offset, |local, from| iface.get(peer, local, from, 0))
    }

    /// The same for a write.
    pub(super) fn put(
        &self,
        iface: &mut impl Iface,
        peer: PeerId,
        local: &SegmentList,
        offset: usize,
    ) -> Result<usize, SendError> {
        let how = Put { notify: false, delivered: false, stays: false, reports: false, token: 0 };
        self.each(local, offset, |local, to| iface.put(peer, local, to, how))
    }

    /// Accesses range after range, until `local` is used up. Returns how many bytes were moved: fewer if a later range
    /// fails.
    fn each(
        &self,
        local: &SegmentList,
        offset: usize,
        mut access: impl FnMut(&SegmentList, &Remote) -> Result<Access, SendError>,
    ) -> Result<usize, SendError> {
        let mut done = 0;
        loop {
            let place = self.at(offset + done, local.len() - done).ok_or(NOWHERE);
            let moved = place.and_then(|(at, len)| {
                Ok((access(&local.slice(done, len), &at)?.moved()?.min(len), len))
            });
            match moved {
                Ok((moved, len)) => {
                    done += moved;
                    if moved < len || done >= local.len() {
                        return Ok(done);
                    }
                }
                Err(error) => return if done > 0 { Ok(done) } else { Err(error) },
            }
        }
    }
}

/// The peer has described less memory than it has to.
const NOWHERE: SendError = SendError::Unreachable(Errno(libc::EFAULT));

impl fmt::Debug for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// The fields that a message is matched by, and its remote data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Envelope {
    /// Whether the message is tagged, and its tag (0 otherwise).
    pub(crate) tagged: bool,
    pub(crate) tag: u64,
    /// Remote completion data.
    pub(crate) data: Option<u64>,
    /// The receive context that the message is for.
    pub(crate) rx: u8,
}

impl Envelope {
    #[inline]
    pub(super) fn space(&self) -> Space {
        Space { rx: self.rx, tagged: self.tagged }
    }
}

/// One packet header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Packet {
    /// An eager message, complete in this packet. `ack` asks for a FIN once it is in the application's buffer.
    Eager { envelope: Envelope, ack: Option<u64> },
    /// Announces a message of `len` bytes, which is at the sender in `ranges`.
    /// * `pushed`: the number of unsolicited bytes; some come with this packet, the others in [`Packet::Pushed`].
    /// * `leaves`: these bytes are the whole message and cannot be lost; the sender needs no FIN.
    /// * `sees`: sender-side delivery completion; a FIN may be late.
    /// * `offer`: the message is advertised for reading (GET rendezvous), with this remote key.
    Rts {
        envelope: Envelope,
        tx: u64,
        len: u64,
        pushed: u64,
        leaves: bool,
        sees: bool,
        offer: Option<RemoteKey>,
        ranges: Ranges,
    },
    /// The receiver wants the first `len` bytes: as fragments, or written into `ranges`. `faulted`: a copy from the
    /// sender's memory failed with EFAULT, so the sender has to check its own buffer.
    Cts { tx: u64, rx: u64, len: u64, faulted: bool, ranges: Ranges },
    /// The stream of message `tx` broke, or its remote buffers failed: the receiver has the first `from` bytes and
    /// wants those up to `len` as fragments.
    Resume { tx: u64, rx: u64, from: u64, len: u64 },
    /// Payload of a rendezvous message for `offset`.
    Fragment { rx: u64, offset: u64 },
    /// Unsolicited payload of message `tx` for `offset`.
    Pushed { tx: u64, offset: u64 },
    /// The sender has written everything into the receiver's ranges.
    PutDone { rx: u64 },
    /// The receiver has finished with message `tx`: 0, or an error number.
    Fin { tx: u64, status: u32 },
    /// Advertises a remote buffer: the `len` bytes of message `tx` from `offset` on may be put under `remote`.
    Window { tx: u64, rx: u64, offset: u64, len: u64, remote: RemoteKey },
    /// NACK: the sender will write no bytes of this message from `offset` on.
    Decline { rx: u64, offset: u64 },
    /// The sender has completed this message as delivered, and has none of its bytes any more.
    Gone { rx: u64 },
    /// The sender cannot read its own memory: the receive ends with EFAULT.
    Fault { rx: u64 },
    /// Split copy: both ends copy the bytes of message `tx` from `offset` on, whose destination is `ranges`.
    Cooperate { tx: u64, offset: u64, share: Share, ranges: Ranges },
}

/// An encoded header.
pub(crate) type Encoded = wire::Encoded<MAX_HEADER>;

impl Encoded {
    fn put_envelope(&mut self, envelope: &Envelope) {
        if envelope.tagged {
            self.put_u64(envelope.tag);
        }
        if let Some(data) = envelope.data {
            self.put_u64(data);
        }
    }

    fn put_key(&mut self, key: &RemoteKey) {
        let key = key.as_slice();
        self.put([key.len() as u8]);
        self.put_slice(key);
    }

    fn put_ranges(&mut self, ranges: &Ranges) {
        for range in ranges.as_slice() {
            self.put_u64(range.addr);
            self.put_u64(range.len);
        }
    }
}

/// The encoded header of [`Packet::Eager`]. Most messages have no other header, so it has its own encoder and decoder.
pub(crate) struct EagerHeader {
    bytes: [u8; Self::MAX],
    len: usize,
}

impl EagerHeader {
    /// Kind and flags, tag, remote data, number for the FIN.
    const MAX: usize = 8 + 8 + 8 + 8;

    /// Encodes the header.
    #[inline]
    pub(crate) fn new(envelope: &Envelope, ack: Option<u64>) -> Self {
        let mut words = [0; Self::MAX / 8];
        let flags = envelope_flags(envelope) | if ack.is_some() { ACK } else { 0 };
        let mut n = 1;
        let mut put = |word: u64| {
            if let Some(slot) = words.get_mut(n) {
                *slot = word;
            }
            n += 1;
        };
        if envelope.tagged {
            put(envelope.tag);
        }
        if let Some(data) = envelope.data {
            put(data);
        }
        if let Some(ack) = ack {
            put(ack);
        }
        let len = n * 8;
        let [first, ..] = &mut words;
        *first = u64::from_le_bytes([EAGER, flags, 0, envelope.rx, 0, 0, 0, 0]);
        let mut bytes = [0; Self::MAX];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        Self { bytes, len }
    }

    /// As [`Self::new`] without an acknowledgement, as words.
    #[inline(always)]
    pub(crate) fn head(envelope: &Envelope) -> Head {
        let flags = envelope_flags(envelope);
        let first = u64::from_le_bytes([EAGER, flags, 0, envelope.rx, 0, 0, 0, 0]);
        let (tag, data) = (envelope.tag.to_le(), envelope.data.unwrap_or(0).to_le());
        let (second, third) = if envelope.tagged { (tag, data) } else { (data, 0) };
        let words = 1 + usize::from(envelope.tagged) + usize::from(envelope.data.is_some());
        Head { words: [first.to_le(), second, third], len: words * 8 }
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }

    /// The envelope, if `bytes` are an EAGER header that asks for no acknowledgement.
    #[inline(always)]
    pub(crate) fn decode_head(bytes: &[u8]) -> Option<Envelope> {
        let mut r = Reader(bytes);
        let [kind, flags, _, context, ..] = r.take::<8>()?;
        // One comparison for kind and flag.
        if u16::from_le_bytes([kind, flags & ACK]) != u16::from(EAGER) {
            return None;
        }
        r.envelope(flags, context)
    }

    /// The envelope and the number for the FIN, if `bytes` are an EAGER header.
    #[inline]
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Envelope, Option<u64>)> {
        let mut r = Reader(bytes);
        let [kind, flags, _, context, ..] = r.take::<8>()?;
        if kind != EAGER {
            return None;
        }
        let envelope = r.envelope(flags, context)?;
        let ack = if flags & ACK != 0 { Some(r.u64()?) } else { None };
        Some((envelope, ack))
    }
}

/// The encoded header of [`Packet::Fragment`] or [`Packet::Pushed`]: a long message has one for each few thousand
/// bytes.
pub(crate) struct PieceHeader([u8; Self::LEN]);

impl PieceHeader {
    const LEN: usize = 24;

    #[inline]
    fn new(kind: u8, id: u64, offset: u64) -> Self {
        let words = [u64::from(kind), id, offset].map(u64::to_le_bytes);
        let mut bytes = [0; Self::LEN];
        bytes.copy_from_slice(words.as_flattened());
        Self(bytes)
    }

    #[inline]
    pub(crate) fn fragment(rx: u64, offset: u64) -> Self {
        Self::new(FRAGMENT, rx, offset)
    }

    #[inline]
    pub(crate) fn pushed(tx: u64, offset: u64) -> Self {
        Self::new(PUSHED, tx, offset)
    }

    /// As [`Self::pushed`], as words.
    #[inline]
    pub(crate) fn pushed_head(tx: u64, offset: u64) -> Head {
        Head { words: [u64::from(PUSHED), tx, offset].map(u64::to_le), len: Self::LEN }
    }

    /// Message number and offset, if `bytes` are the header of unsolicited data.
    #[inline]
    pub(crate) fn decode_pushed(bytes: &[u8]) -> Option<(u64, u64)> {
        let mut r = Reader(bytes);
        let [PUSHED, ..] = r.take::<8>()? else { return None };
        Some((r.u64()?, r.u64()?))
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

impl From<PieceHeader> for Encoded {
    fn from(header: PieceHeader) -> Self {
        let mut e = Self::EMPTY;
        e.put(header.0);
        e
    }
}

impl Reader<'_> {
    #[inline]
    fn envelope(&mut self, flags: u8, rx: u8) -> Option<Envelope> {
        let tagged = flags & TAGGED != 0;
        let tag = if tagged { self.u64()? } else { 0 };
        let data = if flags & DATA != 0 { Some(self.u64()?) } else { None };
        Some(Envelope { tagged, tag, data, rx })
    }

    fn key(&mut self) -> Option<RemoteKey> {
        let [len] = self.take()?;
        RemoteKey::from_slice(self.slice(usize::from(len))?)
    }

    fn ranges(&mut self, count: u8) -> Option<Ranges> {
        let mut ranges = Ranges::default();
        if usize::from(count) > MAX_SEGMENTS {
            return None;
        }
        for slot in ranges.list.iter_mut().take(usize::from(count)) {
            *slot = Range { addr: self.u64()?, len: self.u64()? };
        }
        ranges.len = usize::from(count);
        Some(ranges)
    }
}

#[inline]
fn envelope_flags(envelope: &Envelope) -> u8 {
    (if envelope.tagged { TAGGED } else { 0 }) | (if envelope.data.is_some() { DATA } else { 0 })
}

impl Packet {
    /// Encodes the header.
    #[inline]
    pub(crate) fn encode(&self) -> Encoded {
        match self {
            Self::Eager { envelope, ack } => {
                let mut e = Encoded::EMPTY;
                e.put_slice(EagerHeader::new(envelope, *ack).as_slice());
                e
            }
            Self::Rts { envelope, tx, len, pushed, leaves, sees, offer, ranges } => {
                let flag = |on: bool, flag: u8| if on { flag } else { 0 };
                let flags = envelope_flags(envelope) | flag(*pushed > 0, PUSHES);
                let flags = flags | flag(*leaves, LEAVES) | flag(*sees, SEES);
                let flags = flags | flag(offer.is_some(), OFFERS);
                let mut e = Encoded::new([RTS, flags, ranges.len as u8, envelope.rx], 0);
                e.put_envelope(envelope);
                e = e.with([*tx, *len]);
                if *pushed > 0 {
                    e.put_u64(*pushed);
                }
                if let Some(key) = offer {
                    e.put_key(key);
                }
                e.put_ranges(ranges);
                e
            }
            Self::Cts { tx, rx, len, faulted, ranges } => {
                let flags = if *faulted { FAULTED } else { 0 };
                let count = ranges.len as u8;
                let mut e = Encoded::new([CTS, flags, count, 0], 0).with([*tx, *rx, *len]);
                e.put_ranges(ranges);
                e
            }
            Self::Resume { tx, rx, from, len } => {
                Encoded::new([RESUME, 0, 0, 0], 0).with([*tx, *rx, *from, *len])
            }
            Self::Fragment { rx, offset } => PieceHeader::fragment(*rx, *offset).into(),
            Self::Pushed { tx, offset } => PieceHeader::pushed(*tx, *offset).into(),
            Self::PutDone { rx } => Encoded::new([PUT_DONE, 0, 0, 0], 0).with([*rx]),
            Self::Fin { tx, status } => Encoded::new([FIN, 0, 0, 0], *status).with([*tx]),
            Self::Window { tx, rx, offset, len, remote } => {
                let mut e = Encoded::new([WINDOW, 0, 0, 0], 0).with([*tx, *rx, *offset, *len]);
                e.put_key(remote);
                e
            }
            Self::Cooperate { tx, offset, share, ranges } => {
                let e = Encoded::new([COOPERATE, 0, ranges.len as u8, 0], share.unit);
                let mut e = e.with([*tx, *offset, share.len]);
                e.put(share.cell.to_le_bytes());
                e.put(share.generation.to_le_bytes());
                e.put_ranges(ranges);
                e
            }
            Self::Decline { rx, offset } => {
                Encoded::new([DECLINE, 0, 0, 0], 0).with([*rx, *offset])
            }
            Self::Gone { rx } => Encoded::new([GONE, 0, 0, 0], 0).with([*rx]),
            Self::Fault { rx } => Encoded::new([FAULT, 0, 0, 0], 0).with([*rx]),
        }
    }

    /// Decodes a header. `None`: bytes that no udrv of this version sends.
    #[inline(always)]
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        match PieceHeader::decode_pushed(bytes) {
            Some((tx, offset)) => Some(Self::Pushed { tx, offset }),
            None => Self::decode_rare(bytes),
        }
    }

    /// Decodes any header but that of unsolicited data, which a long message has many of.
    fn decode_rare(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader(bytes);
        let [kind, flags, count, context] = r.take::<4>()?;
        let word = u32::from_le_bytes(r.take::<4>()?);
        Some(match kind {
            EAGER => {
                let (envelope, ack) = EagerHeader::decode(bytes)?;
                Self::Eager { envelope, ack }
            }
            // Each of the three gives access to the message, and a header has no room for more than one.
            RTS if (flags & (PUSHES | OFFERS)).count_ones() + u32::from(count > 0) > 1 => {
                return None;
            }
            RTS => {
                let (envelope, tx, len) = (r.envelope(flags, context)?, r.u64()?, r.u64()?);
                let pushed = if flags & PUSHES != 0 { r.u64()? } else { 0 };
                let leaves = flags & LEAVES != 0;
                if leaves && pushed < len {
                    return None;
                }
                let sees = flags & SEES != 0;
                let offer = if flags & OFFERS != 0 { Some(r.key()?) } else { None };
                let ranges = r.ranges(count)?;
                Self::Rts { envelope, tx, len, pushed, leaves, sees, offer, ranges }
            }
            CTS => Self::Cts {
                tx: r.u64()?,
                rx: r.u64()?,
                len: r.u64()?,
                faulted: flags & FAULTED != 0,
                ranges: r.ranges(count)?,
            },
            RESUME => Self::Resume { tx: r.u64()?, rx: r.u64()?, from: r.u64()?, len: r.u64()? },
            FRAGMENT => Self::Fragment { rx: r.u64()?, offset: r.u64()? },
            PUT_DONE => Self::PutDone { rx: r.u64()? },
            FIN => Self::Fin { tx: r.u64()?, status: word },
            WINDOW => Self::Window {
                tx: r.u64()?,
                rx: r.u64()?,
                offset: r.u64()?,
                len: r.u64()?,
                remote: r.key()?,
            },
            COOPERATE => {
                let (tx, offset, len) = (r.u64()?, r.u64()?, r.u64()?);
                let [cell, generation] =
                    [r.take().map(u32::from_le_bytes)?, r.take().map(u32::from_le_bytes)?];
                let share = Share { cell, generation, unit: word, len };
                Self::Cooperate { tx, offset, share, ranges: r.ranges(count)? }
            }
            DECLINE => Self::Decline { rx: r.u64()?, offset: r.u64()? },
            GONE => Self::Gone { rx: r.u64()? },
            FAULT => Self::Fault { rx: r.u64()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn envelope() -> impl Strategy<Value = Envelope> {
        (any::<bool>(), any::<u64>(), any::<Option<u64>>(), any::<u8>()).prop_map(
            |(tagged, tag, data, rx)| Envelope {
                tagged,
                tag: if tagged { tag } else { 0 },
                data,
                rx,
            },
        )
    }

    fn ranges() -> impl Strategy<Value = Ranges> {
        prop::collection::vec(any::<(u64, u64)>(), 0..=MAX_SEGMENTS).prop_map(|list| {
            let mut ranges = Ranges::default();
            for (to, (addr, len)) in ranges.list.iter_mut().zip(&list) {
                *to = Range { addr: *addr, len: *len };
            }
            ranges.len = list.len();
            ranges
        })
    }

    fn key() -> impl Strategy<Value = RemoteKey> {
        (1..=u8::MAX, any::<[u64; 2]>())
            .prop_map(|(kind, [a, b])| RemoteKey::new(kind).with(a).with(b))
    }

    fn packet() -> impl Strategy<Value = Packet> {
        prop_oneof![
            (envelope(), any::<Option<u64>>())
                .prop_map(|(envelope, ack)| Packet::Eager { envelope, ack }),
            (
                envelope(),
                any::<(u64, u64, u64)>(),
                (any::<bool>(), any::<bool>(), prop::option::of(key())),
                ranges()
            )
                .prop_map(
                    |(envelope, (tx, len, pushed), (leaves, sees, offer), ranges)| {
                        let pushed = if ranges.len > 0 { 0 } else { pushed };
                        let leaves = leaves && pushed >= len;
                        let offer = offer.filter(|_| ranges.len == 0 && pushed == 0);
                        Packet::Rts { envelope, tx, len, pushed, leaves, sees, offer, ranges }
                    }
                ),
            any::<u64>().prop_map(|rx| Packet::Gone { rx }),
            any::<u64>().prop_map(|rx| Packet::Fault { rx }),
            (any::<u64>(), any::<u64>()).prop_map(|(tx, offset)| Packet::Pushed { tx, offset }),
            (any::<(u64, u64, u64, bool)>(), ranges()).prop_map(
                |((tx, rx, len, faulted), ranges)| Packet::Cts { tx, rx, len, faulted, ranges }
            ),
            any::<(u64, u64, u64, u64)>().prop_map(|(tx, rx, from, len)| Packet::Resume {
                tx,
                rx,
                from,
                len
            }),
            (any::<u64>(), any::<u64>()).prop_map(|(rx, offset)| Packet::Fragment { rx, offset }),
            any::<u64>().prop_map(|rx| Packet::PutDone { rx }),
            (any::<u64>(), any::<u32>()).prop_map(|(tx, status)| Packet::Fin { tx, status }),
            (any::<(u64, u64, u64, u64)>(), key()).prop_map(|((tx, rx, offset, len), remote)| {
                Packet::Window { tx, rx, offset, len, remote }
            }),
            (any::<u64>(), any::<u64>()).prop_map(|(rx, offset)| Packet::Decline { rx, offset }),
            (any::<(u64, u64)>(), any::<(u32, u32, u32, u64)>(), ranges()).prop_map(
                |((tx, offset), (cell, generation, unit, len), ranges)| Packet::Cooperate {
                    tx,
                    offset,
                    share: Share { cell, generation, unit, len },
                    ranges,
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn packets_survive_the_wire(packet in packet()) {
            let wire = packet.encode();
            prop_assert!(wire.as_slice().len() <= MAX_HEADER);
            prop_assert_eq!(Packet::decode(wire.as_slice()), Some(packet));
            for cut in 0..wire.as_slice().len() {
                prop_assert_ne!(Packet::decode(&wire.as_slice()[..cut]), Some(packet));
            }
        }

        #[test]
        fn any_bytes_are_harmless(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            let _ = Packet::decode(&bytes);
        }
    }
}
