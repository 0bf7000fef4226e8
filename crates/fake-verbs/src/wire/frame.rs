//! What devices send each other.

/// Where a frame comes from and goes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Route {
    /// Numbers of the queue pairs.
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// The network of the sender's port.
    pub(crate) fabric: u8,
    pub(crate) source_lid: u16,
    pub(crate) lid: u16,
    /// Global addresses of both ports, if the packet has them.
    pub(crate) gids: Option<([u8; 16], [u8; 16])>,
    /// The traffic class of the packet.
    pub(crate) class: u8,
    pub(crate) pkey: u16,
}

/// The contents of a frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Body {
    Datagram {
        qkey: u32,
        bytes: Vec<u8>,
    },
    /// A part of a write; the last one completes it.
    Write {
        request: Request,
        addr: u64,
        rkey: u32,
        immediate: Option<u32>,
        first: bool,
        last: bool,
        bytes: Vec<u8>,
    },
    Read {
        request: Request,
        addr: u64,
        rkey: u32,
        len: u32,
        /// Reads of the sender under way, with this one.
        under_way: u8,
    },
    /// A part of what was read.
    Answer {
        number: u64,
        offset: u32,
        last: bool,
        bytes: Vec<u8>,
    },
    /// Of the request of that number.
    Ack {
        number: u64,
        verdict: Verdict,
    },
}

/// A request of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    /// Counts from 0 on.
    pub(crate) number: u64,
    /// The packet number with which the sender began.
    pub(crate) psn: u32,
}

/// The responder's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Done,
    /// No receive: later again.
    NotReady,
    /// More reads than the queue pair serves.
    Invalid,
}

impl Verdict {
    const ALL: [Self; 3] = [Self::Done, Self::NotReady, Self::Invalid];
}

/// A route and what goes there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Frame {
    pub(crate) route: Route,
    pub(crate) body: Body,
}

struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn numbers<const N: usize>(&mut self, values: [u64; N]) {
        values.into_iter().for_each(|value| self.number(value));
    }

    fn request(&mut self, request: Request) {
        self.numbers([request.number, request.psn.into()]);
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn number(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_at_checked(8)?;
        self.0 = rest;
        Some(u64::from_le_bytes(word.try_into().ok()?))
    }

    fn narrow<T: TryFrom<u64>>(&mut self) -> Option<T> {
        T::try_from(self.number()?).ok()
    }

    fn request(&mut self) -> Option<Request> {
        Some(Request { number: self.number()?, psn: self.narrow()? })
    }

    fn gid(&mut self) -> Option<[u8; 16]> {
        let (gid, rest) = self.0.split_at_checked(16)?;
        self.0 = rest;
        gid.try_into().ok()
    }

    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }
}

impl Frame {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::with_capacity(256));
        encode_route(&mut out, &self.route);
        match &self.body {
            Body::Datagram { qkey, bytes } => {
                out.numbers([0, u64::from(*qkey)]);
                out.0.extend(bytes);
            }
            Body::Write { request, addr, rkey, immediate, first, last, bytes } => {
                out.number(1);
                out.request(*request);
                let immediate = immediate.map_or(u64::MAX, u64::from);
                out.numbers([*addr, u64::from(*rkey), immediate]);
                out.numbers([u64::from(*first), u64::from(*last)]);
                out.0.extend(bytes);
            }
            Body::Read { request, addr, rkey, len, under_way } => {
                out.number(2);
                out.request(*request);
                out.numbers([*addr, u64::from(*rkey), u64::from(*len), u64::from(*under_way)]);
            }
            Body::Answer { number, offset, last, bytes } => {
                out.numbers([3, *number, u64::from(*offset), u64::from(*last)]);
                out.0.extend(bytes);
            }
            Body::Ack { number, verdict } => {
                out.numbers([4, *number, *verdict as u64]);
            }
        }
        out.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let route = decode_route(&mut from)?;
        let body = match from.number()? {
            0 => Body::Datagram { qkey: from.narrow()?, bytes: from.rest() },
            1 => Body::Write {
                request: from.request()?,
                addr: from.number()?,
                rkey: from.narrow()?,
                immediate: u32::try_from(from.number()?).ok(),
                first: from.number()? != 0,
                last: from.number()? != 0,
                bytes: from.rest(),
            },
            2 => Body::Read {
                request: from.request()?,
                addr: from.number()?,
                rkey: from.narrow()?,
                len: from.narrow()?,
                under_way: from.narrow()?,
            },
            3 => Body::Answer {
                number: from.number()?,
                offset: from.narrow()?,
                last: from.number()? != 0,
                bytes: from.rest(),
            },
            4 => Body::Ack {
                number: from.number()?,
                verdict: *Verdict::ALL.get(from.narrow::<usize>()?)?,
            },
            _ => return None,
        };
        Some(Self { route, body })
    }
}

fn encode_route(out: &mut Writer, route: &Route) {
    let Route { from, to, fabric, source_lid, lid, gids, class, pkey } = *route;
    let small = [fabric.into(), source_lid, lid, class.into(), pkey, gids.is_some().into()];
    out.numbers([from, to].map(u64::from));
    out.numbers(small.map(|n: u16| n.into()));
    let (source, destination) = gids.unwrap_or_default();
    out.0.extend(source);
    out.0.extend(destination);
}

fn decode_route(from: &mut Reader<'_>) -> Option<Route> {
    let mut route = Route { from: from.narrow()?, to: from.narrow()?, ..Route::default() };
    (route.fabric, route.source_lid, route.lid) = (from.narrow()?, from.narrow()?, from.narrow()?);
    (route.class, route.pkey) = (from.narrow()?, from.narrow()?);
    let global = from.number()? != 0;
    let gids = (from.gid()?, from.gid()?);
    route.gids = global.then_some(gids);
    Some(route)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written() {
        let route = Route {
            from: 0x1001,
            to: 0x2002,
            fabric: 3,
            source_lid: 4,
            lid: 5,
            gids: Some(([6; 16], [7; 16])),
            class: 2,
            pkey: 0xffff,
        };
        let request = Request { number: 1 << 40, psn: 77 };
        let bytes = vec![1, 2, 3];
        let bodies = [
            Body::Datagram { qkey: 8, bytes: bytes.clone() },
            Body::Write {
                request,
                addr: 9,
                rkey: 10,
                immediate: Some(11),
                first: false,
                last: true,
                bytes: vec![],
            },
            Body::Write {
                request,
                addr: 9,
                rkey: 10,
                immediate: None,
                first: true,
                last: false,
                bytes: bytes.clone(),
            },
            Body::Read { request, addr: 1, rkey: 2, len: 3, under_way: 4 },
            Body::Answer { number: 5, offset: 6, last: true, bytes },
            Body::Ack { number: 5, verdict: Verdict::NotReady },
        ];
        for body in bodies {
            for route in [route, Route { gids: None, ..route }] {
                let frame = Frame { route, body: body.clone() };
                let bytes = frame.encode();
                assert_eq!(Frame::decode(&bytes), Some(frame));
                assert_eq!(Frame::decode(&bytes[..40]), None);
            }
        }
    }
}
