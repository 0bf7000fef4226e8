//! What two endpoints say to each other to make a connection of RC queue pairs and to end it
//! (PROTOCOL.md §7.14). Decoding takes any bytes; the machine below has proven whose they are.

use crate::transport::net::bulk::{BULK_CONTROL, CONTROL_LEN, Control};
use crate::transport::net::verbs::introduction::Network;

/// The bulk path that speaks: RC queue pairs of the process.
const WAY: u8 = 1;

/// One end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct End {
    /// Number of the queue pair, and of its first packet.
    pub(crate) number: u32,
    pub(crate) psn: u32,
    /// Bytes of a packet that its port carries.
    pub(crate) mtu: u16,
    /// Address of its port.
    pub(crate) network: Network,
    pub(crate) lid: u16,
    pub(crate) gid: [u8; 16],
}

/// One message. Each names the connection that it is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Message {
    /// Let us make a connection; this is my end.
    Ask(u32, End),
    /// Agreed; this is mine, and it takes what you write.
    Ready(u32, End),
    /// So does mine.
    Go(u32),
    /// Not now.
    Refuse(u32),
    /// It has ended, because others needed its place, or because it broke.
    Over { connection: u32, broken: bool },
}

impl Message {
    pub(super) fn encode(&self) -> Control {
        let (kind, connection, end) = match self {
            Self::Ask(connection, end) => (1, connection, Some(end)),
            Self::Ready(connection, end) => (2, connection, Some(end)),
            Self::Go(connection) => (3, connection, None),
            Self::Refuse(connection) => (4, connection, None),
            Self::Over { connection, broken: false } => (5, connection, None),
            Self::Over { connection, broken: true } => (6, connection, None),
        };
        let mut bytes = [0; CONTROL_LEN];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            if let Some(to) = bytes.get_mut(at..at + part.len()) {
                to.copy_from_slice(part);
            }
            at += part.len();
        };
        put(&[BULK_CONTROL, kind, WAY, 0]);
        put(&connection.to_le_bytes());
        if let Some(end) = end {
            put(&end.number.to_le_bytes());
            put(&end.psn.to_le_bytes());
            put(&end.mtu.to_le_bytes());
            put(&end.lid.to_le_bytes());
            put(&end.gid);
            put(&[end.network.to_wire()]);
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &Control = bytes.try_into().ok()?;
        let [BULK_CONTROL, kind, WAY, 0, rest @ ..] = bytes else { return None };
        let (connection, rest) = rest.split_first_chunk()?;
        let connection = u32::from_le_bytes(*connection);
        Some(match kind {
            1 => Self::Ask(connection, End::decode(rest)?),
            2 => Self::Ready(connection, End::decode(rest)?),
            3 => Self::Go(connection),
            4 => Self::Refuse(connection),
            5 => Self::Over { connection, broken: false },
            6 => Self::Over { connection, broken: true },
            _ => return None,
        })
    }
}

impl End {
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk()?;
        let (psn, rest) = rest.split_first_chunk()?;
        let (mtu, rest) = rest.split_first_chunk()?;
        let (lid, rest) = rest.split_first_chunk()?;
        let (gid, rest) = rest.split_first_chunk()?;
        Some(Self {
            number: u32::from_le_bytes(*number) & 0x00ff_ffff,
            psn: u32::from_le_bytes(*psn) & 0x00ff_ffff,
            mtu: u16::from_le_bytes(*mtu),
            network: Network::from_wire(*rest.first()?)?,
            lid: u16::from_le_bytes(*lid),
            gid: *gid,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        for network in [Network::InfiniBand, Network::Roce] {
            let end =
                End { number: 0x12_3456, psn: 0x65_4321, mtu: 4096, network, lid: 7, gid: [9; 16] };
            let all = [
                Message::Ask(1, end),
                Message::Ready(u32::MAX, end),
                Message::Go(3),
                Message::Refuse(4),
                Message::Over { connection: 5, broken: false },
                Message::Over { connection: 5, broken: true },
            ];
            for message in all {
                assert_eq!(Message::decode(&message.encode()), Some(message));
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_harmless(bytes in proptest::collection::vec(any::<u8>(), 0..60), kind in 0u8..9) {
            let mut bytes = bytes;
            Message::decode(&bytes);
            bytes.resize(CONTROL_LEN, 1);
            bytes[..4].copy_from_slice(&[BULK_CONTROL, kind, WAY, 0]);
            if let Some(Message::Ask(_, end) | Message::Ready(_, end)) = Message::decode(&bytes) {
                prop_assert!(end.number >> 24 == 0 && end.psn >> 24 == 0);
            }
            bytes.pop();
            prop_assert_eq!(Message::decode(&bytes), None);
        }
    }
}
