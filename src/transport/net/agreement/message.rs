//! The messages that make and end a connection beside the messages (PROTOCOL.md §7.12, §7.14, §7.15). Decoding takes
//! any bytes; the state machine below has authenticated their sender.

use crate::transport::net::network::Network;

/// First byte of such a message.
const CONTROL: u8 = 0xf2;
/// Its length, bytes.
pub(crate) const CONTROL_LEN: usize = 44;

/// A message about a connection, as it travels.
pub(crate) type Control = [u8; CONTROL_LEN];

/// The kind of connection that a message is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// RC queue pairs of the process.
    Rc = 1,
    /// Queue pairs of the kernel's rv module.
    Rv = 2,
    /// TCP streams, which are only ever reported as over.
    Stream = 3,
}

impl Way {
    /// The kind of a message, as its byte; this version may not know it. `None`: this is no message about a connection.
    #[inline]
    pub(crate) fn byte_of(bytes: &[u8]) -> Option<u8> {
        match bytes {
            [CONTROL, _, way, 0, ..] if bytes.len() == CONTROL_LEN => Some(*way),
            _ => None,
        }
    }

    /// The kind of the connection with this number.
    pub(crate) fn of_connection(number: u32) -> Self {
        if number >> 31 == 0 { Self::Rc } else { Self::Rv }
    }

    /// Whether a connection of this kind can have this number. Streams are numbered by themselves.
    fn has(self, number: u32) -> bool {
        self == Self::Stream || Self::of_connection(number) == self
    }

    /// `number` as a connection number of this kind, which the highest bit marks.
    pub(crate) fn numbered(self, number: u32) -> u32 {
        number << 1 >> 1 | u32::from(self == Self::Rv) << 31
    }
}

/// One end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct End {
    /// Number of the queue pair, and of its first packet; for the rv module its number of the process, and 0.
    pub(crate) number: u32,
    pub(crate) psn: u32,
    /// Packet size that its port carries, bytes.
    pub(crate) mtu: u16,
    /// Address of its port.
    pub(crate) network: Network,
    pub(crate) lid: u16,
    pub(crate) gid: [u8; 16],
    /// Reads that its device serves for the peer at the same time; 0: not stated.
    pub(crate) serves: u8,
}

/// A message about a connection, which it names by its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    /// Asks for a connection, and describes the sender's end.
    Ask(u32, End),
    /// Agrees, and describes the sender's end, which accepts writes from now on.
    Ready(u32, End),
    /// The sender's end accepts writes, too.
    Go(u32),
    /// Refuses the connection for now.
    Refuse(u32),
    /// The connection has ended, because others needed its slot, or because it broke.
    Over { connection: u32, broken: bool },
    /// The sender needs the connection's slot: the receiver is to end the connection, unless it uses it.
    Yield(u32),
}

impl Message {
    pub(crate) fn encode(&self, way: Way) -> Control {
        let (kind, connection, end) = match self {
            Self::Ask(connection, end) => (1, connection, Some(end)),
            Self::Ready(connection, end) => (2, connection, Some(end)),
            Self::Go(connection) => (3, connection, None),
            Self::Refuse(connection) => (4, connection, None),
            Self::Over { connection, broken: false } => (5, connection, None),
            Self::Over { connection, broken: true } => (6, connection, None),
            Self::Yield(connection) => (7, connection, None),
        };
        let mut bytes = [0; CONTROL_LEN];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            if let Some(to) = bytes.get_mut(at..at + part.len()) {
                to.copy_from_slice(part);
            }
            at += part.len();
        };
        put(&[CONTROL, kind, way as u8, 0]);
        put(&connection.to_le_bytes());
        if let Some(end) = end {
            put(&end.number.to_le_bytes());
            put(&end.psn.to_le_bytes());
            put(&end.mtu.to_le_bytes());
            put(&end.lid.to_le_bytes());
            put(&end.gid);
            let (network, pkey) = end.network.to_wire();
            put(&[network, end.serves]);
            put(&pkey);
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], way: Way) -> Option<Self> {
        let bytes: &Control = bytes.try_into().ok()?;
        let [CONTROL, kind, by, 0, rest @ ..] = bytes else { return None };
        let (connection, rest) = rest.split_first_chunk()?;
        let connection = u32::from_le_bytes(*connection);
        if *by != way as u8 || !way.has(connection) {
            return None;
        }
        Some(match kind {
            1 => Self::Ask(connection, End::decode(rest)?),
            2 => Self::Ready(connection, End::decode(rest)?),
            3 => Self::Go(connection),
            4 => Self::Refuse(connection),
            5 => Self::Over { connection, broken: false },
            6 => Self::Over { connection, broken: true },
            7 => Self::Yield(connection),
            _ => return None,
        })
    }

    /// Whether `bytes` answer a request for a connection.
    pub(crate) fn is_answer(bytes: &[u8]) -> bool {
        matches!(bytes, [CONTROL, 2 | 4, ..])
    }

    /// The refusal of a kind that this version does not know, if `bytes` ask for it.
    pub(crate) fn refuse_unknown(bytes: &[u8]) -> Option<Control> {
        let bytes: &Control = bytes.try_into().ok()?;
        let [CONTROL, 1, way, 0, number @ ..] = bytes else { return None };
        let mut answer = [0; CONTROL_LEN];
        let head = [CONTROL, 4, *way, 0];
        for (to, from) in answer.iter_mut().zip(head.iter().chain(number.first_chunk::<4>()?)) {
            *to = *from;
        }
        Some(answer)
    }
}

impl End {
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk()?;
        let (psn, rest) = rest.split_first_chunk()?;
        let (mtu, rest) = rest.split_first_chunk()?;
        let (lid, rest) = rest.split_first_chunk()?;
        let (gid, rest) = rest.split_first_chunk()?;
        let [network, serves, low, high, ..] = *rest else { return None };
        Some(Self {
            number: u32::from_le_bytes(*number) & 0x00ff_ffff,
            psn: u32::from_le_bytes(*psn) & 0x00ff_ffff,
            mtu: u16::from_le_bytes(*mtu),
            network: Network::from_wire(network, [low, high])?,
            lid: u16::from_le_bytes(*lid),
            gid: *gid,
            serves,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let joined = Network::InfiniBand { pkey: 0x8012, routed: true };
        for network in [joined, Network::Roce] {
            let (number, psn, mtu) = (0x12_3456, 0x65_4321, 4096);
            let end = End { number, psn, mtu, network, lid: 7, gid: [9; 16], serves: 16 };
            let all = [
                Message::Ask(1, end),
                Message::Ready(u32::MAX >> 1, end),
                Message::Go(3),
                Message::Refuse(4),
                Message::Over { connection: 5, broken: false },
                Message::Over { connection: 5, broken: true },
                Message::Yield(6),
            ];
            for message in all {
                assert_eq!(Message::decode(&message.encode(Way::Rc), Way::Rc), Some(message));
                assert_eq!(Message::decode(&message.encode(Way::Rc), Way::Rv), None);
                let stream = message.encode(Way::Stream);
                assert_eq!(Message::decode(&stream, Way::Stream), Some(message));
                let other = message.encode(Way::Rv);
                assert_eq!(Message::decode(&other, Way::Rv), None, "a number of the other way");
            }
        }
    }

    #[test]
    fn the_number_of_a_connection_tells_its_way() {
        for way in [Way::Rc, Way::Rv] {
            for number in [0, 1, u32::MAX, 1 << 31] {
                let number = way.numbered(number);
                assert_eq!(Way::of_connection(number), way);
                let said = Message::Go(number).encode(way);
                assert_eq!(Message::decode(&said, way), Some(Message::Go(number)));
                assert_eq!(Way::byte_of(&said), Some(way as u8));
                assert_eq!(Message::refuse_unknown(&said), None, "only a request is refused");
            }
        }
        let end = End {
            number: 1,
            psn: 0,
            mtu: 1,
            network: Network::Roce,
            lid: 0,
            gid: [0; 16],
            serves: 0,
        };
        let ask = Message::Ask(Way::Rv.numbered(7), end).encode(Way::Rv);
        let refusal = Message::refuse_unknown(&ask).unwrap();
        assert_eq!(Message::decode(&refusal, Way::Rv), Some(Message::Refuse(Way::Rv.numbered(7))));
        assert_eq!(Way::byte_of(&ask[..9]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_harmless(bytes in proptest::collection::vec(any::<u8>(), 0..60), kind in 0u8..9) {
            let mut bytes = bytes;
            Message::decode(&bytes, Way::Rc);
            Message::refuse_unknown(&bytes);
            bytes.resize(CONTROL_LEN, 1);
            bytes[..4].copy_from_slice(&[CONTROL, kind, 1, 0]);
            if let Some(Message::Ask(_, end) | Message::Ready(_, end)) = Message::decode(&bytes, Way::Rc) {
                prop_assert!(end.number >> 24 == 0 && end.psn >> 24 == 0);
            }
            bytes.pop();
            prop_assert_eq!(Message::decode(&bytes, Way::Rc), None);
        }
    }
}
