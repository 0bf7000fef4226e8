//! Datagrams.

use super::Nic;
use super::pair::{Operation, Pair};
use super::queue::{Entry, Of};
use super::regions::total;
use crate::counters::{Counter, count};
use crate::verify::{checksum, violation};
use crate::wire::{Body, Frame, Route};
use rdma_core_sys::{IBV_QPS_ERR, IBV_WC_LOC_LEN_ERR, IBV_WC_RECV, IBV_WC_SUCCESS};

/// Bytes before every received datagram.
const GRH: usize = 40;
/// A Q_Key with this bit means the one of the sending queue pair (InfiniBand 1.7, 10.2.5).
const OWN_QKEY: u32 = 0x8000_0000;

impl Nic {
    /// Sends what is in the queue. True: some is left.
    pub(super) fn send_datagrams(&mut self, pair: &mut Pair) -> bool {
        while let Some(queued) = pair.sends.list.front() {
            if !pair.is_ready_to_send() || self.random.happens(self.weather.laziness / 2) {
                break;
            }
            let send = &queued.send;
            let bytes = match &send.inline {
                Some(data) => data.clone(),
                None => self.regions.read(
                    pair.made.domain,
                    &send.segments,
                    "a datagram at its transfer",
                ),
            };
            if checksum(&bytes) != queued.sum {
                violation(&format!(
                    "the memory of a datagram was changed before it was sent: {send:?}"
                ));
            }
            let Operation::Datagram { handle, pair: to, qkey } = send.operation else {
                violation("a UD queue pair was given a request that is no datagram");
            };
            let Some(mut frame) = self.addressed(pair, handle, to) else {
                violation("an address handle was destroyed before its datagram was sent");
            };
            let port = self.port(pair.made.context, pair.attributes.port);
            if port.is_none_or(|port| bytes.len() > usize::from(port.port.mtu)) {
                self.fail(pair, IBV_WC_LOC_LEN_ERR);
                break;
            }
            let qkey = if qkey & OWN_QKEY == 0 { qkey } else { pair.attributes.qkey };
            frame.body = Body::Datagram { qkey, bytes };
            count(Counter::Datagrams);
            if port.is_none_or(|port| !port.active) || !self.wire.send(frame) {
                count(Counter::Lost);
            }
            self.finish(pair, IBV_WC_SUCCESS);
        }
        !pair.sends.list.is_empty() && pair.state != IBV_QPS_ERR
    }

    /// An empty frame to queue pair `to` behind an address handle.
    fn addressed(&self, pair: &Pair, handle: u32, to: u32) -> Option<Frame> {
        let handle = self.tables.handles.get(&handle)?;
        let port = self.port(pair.made.context, handle.port)?;
        let source = port.gid(handle.source_index).unwrap_or_default();
        let gids = handle.route.gids.map(|(_, to)| (source, to));
        let own = pair.attributes.route;
        let route = Route {
            from: pair.number,
            to,
            fabric: own.fabric,
            source_lid: own.source_lid,
            pkey: own.pkey,
            gids,
            ..handle.route
        };
        Some(Frame { route, body: Body::Datagram { qkey: 0, bytes: Vec::new() } })
    }

    /// A datagram has arrived.
    pub(super) fn on_datagram(&mut self, pair: &mut Pair, route: &Route, qkey: u32, bytes: &[u8]) {
        if !pair.is_ready_to_receive() || qkey != pair.attributes.qkey {
            return count(Counter::Unrouted);
        }
        let Some(receive) = pair.receives.take() else { return count(Counter::Unready) };
        let fits = (bytes.len() + GRH) as u64 <= total(&receive.segments);
        let status = if fits { IBV_WC_SUCCESS } else { IBV_WC_LOC_LEN_ERR };
        let domain = pair.made.domain;
        if fits {
            if let Some(grh) = route.gids.map(|gids| header(gids, route.class)) {
                self.regions.write(domain, &receive.segments, 0, &grh);
            }
            self.regions.write(domain, &receive.segments, GRH, bytes);
        }
        let entry = Entry {
            id: receive.id,
            status,
            opcode: IBV_WC_RECV,
            len: (bytes.len() + GRH) as u32,
            immediate: None,
            pair: pair.number,
            source: route.from,
            source_lid: route.source_lid,
            routed: route.gids.is_some(),
            of: Of::Receive,
        };
        self.complete(pair.made.receive_queue, entry);
    }
}

/// The global routing header, or the IPv4 header in its last 20 bytes and anything before it.
fn header((source, destination): ([u8; 16], [u8; 16]), class: u8) -> [u8; GRH] {
    let mut header = [0xee; GRH];
    let v4 = destination.starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
    let tail = |gid: [u8; 16]| gid.into_iter().skip(12);
    let parts: Vec<(usize, Vec<u8>)> = if v4 {
        let mut addresses: Vec<u8> = tail(source).collect();
        addresses.extend(tail(destination));
        vec![(20, vec![0x45, class]), (32, addresses)]
    } else {
        let version = vec![0x60 | class >> 4, class << 4];
        vec![(0, version), (8, source.to_vec()), (24, destination.to_vec())]
    };
    for (at, part) in parts {
        for (to, byte) in header.iter_mut().skip(at).zip(part) {
            *to = byte;
        }
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_traffic_class_is_where_the_ip_version_has_it() {
        let mut mapped = [0; 16];
        mapped[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
        let four = header((mapped, mapped), 0x6b);
        assert_eq!((four[20], four[21], four[39]), (0x45, 0x6b, 1));
        let six = header(([1; 16], [2; 16]), 0x6b);
        assert_eq!((six[0], six[1], six[8], six[39]), (0x66, 0xb0, 1, 2));
    }
}
