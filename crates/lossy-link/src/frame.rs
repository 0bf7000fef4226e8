//! The parts of an Ethernet frame that the switch reads, and how it damages a frame.

use crate::random::Random;

const ETHERNET: usize = 14;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const UDP: u8 = 17;
const UDP_HEADER: usize = 8;
const ICMPV6: u8 = 58;

/// Longest frame, bytes: the longest MTU of a TAP device and an Ethernet header.
pub(crate) const MAX_FRAME: usize = 65_535 + ETHERNET;

/// A MAC address.
pub(crate) type Mac = [u8; 6];

/// Destination and source of a frame; `None` if it is too short for a header.
pub(crate) fn macs(frame: &[u8]) -> Option<(Mac, Mac)> {
    if frame.len() < ETHERNET {
        return None;
    }
    Some((frame.get(..6)?.try_into().ok()?, frame.get(6..12)?.try_into().ok()?))
}

/// True for multicast and broadcast.
pub(crate) fn is_group(mac: Mac) -> bool {
    mac.first().is_some_and(|first| first & 1 != 0)
}

/// True for frames that the hosts' programs send. The rest (ARP, neighbour discovery) is how hosts find each
/// other: losing one such request means a wait of a second, which says nothing about a transport.
pub(crate) fn is_payload(frame: &[u8]) -> bool {
    match be16(frame, 12) {
        Some(ETHERTYPE_IPV4) => true,
        Some(ETHERTYPE_IPV6) => {
            // Types 133 to 137 are neighbour discovery (RFC 4861), 143 is MLDv2, which follows a hop-by-hop
            // header (0).
            let next = frame.get(ETHERNET + 6).copied();
            let kind = frame.get(ETHERNET + 40).copied().unwrap_or(0);
            !(next == Some(0) || (next == Some(ICMPV6) && (133..=137).contains(&kind)))
        }
        _ => false,
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Length of the IP packet that carries a UDP datagram in this frame, bytes.
pub(crate) fn udp_packet_len(frame: &[u8]) -> Option<usize> {
    udp(frame).map(|_| frame.len() - ETHERNET)
}

/// Where the UDP header of an unfragmented IPv4 or IPv6 packet begins, and its payload's length.
fn udp(frame: &[u8]) -> Option<(usize, usize)> {
    let header = match be16(frame, 12)? {
        ETHERTYPE_IPV4 => {
            let words = usize::from(frame.get(ETHERNET)? & 0xf);
            // A fragment (more fragments, or an offset) does not hold the whole datagram.
            let fragment = be16(frame, ETHERNET + 6)? & 0x3fff;
            (*frame.get(ETHERNET + 9)? == UDP && fragment == 0).then_some(ETHERNET + words * 4)?
        }
        ETHERTYPE_IPV6 => (*frame.get(ETHERNET + 6)? == UDP).then_some(ETHERNET + 40)?,
        _ => return None,
    };
    let payload = usize::from(be16(frame, header + 4)?).checked_sub(UDP_HEADER)?;
    (payload > 0 && header + UDP_HEADER + payload <= frame.len()).then_some((header, payload))
}

/// The port to which a TCP segment asks for a connection: SYN without ACK (RFC 9293, 3.1).
pub(crate) fn asks_for(frame: &[u8]) -> Option<u16> {
    const TCP: u8 = 6;
    const SYN: u8 = 2;
    const ACK: u8 = 16;
    let header = match be16(frame, 12)? {
        ETHERTYPE_IPV4 => {
            let words = usize::from(frame.get(ETHERNET)? & 0xf);
            (*frame.get(ETHERNET + 9)? == TCP).then_some(ETHERNET + words * 4)?
        }
        ETHERTYPE_IPV6 => (*frame.get(ETHERNET + 6)? == TCP).then_some(ETHERNET + 40)?,
        _ => return None,
    };
    let flags = *frame.get(header + 13)?;
    (flags & (SYN | ACK) == SYN).then(|| be16(frame, header + 2))?
}

/// Flips one bit of the payload of a UDP datagram and leaves its checksum, which is then wrong.
/// False if the frame is no datagram with a payload.
pub(crate) fn corrupt(frame: &mut [u8], random: &mut Random) -> bool {
    let Some((header, payload)) = udp(frame) else { return false };
    let at = header + UDP_HEADER + random.below(payload as u64) as usize;
    let Some(byte) = frame.get_mut(at) else { return false };
    *byte ^= 1 << random.below(8);
    true
}

/// Like [`corrupt`], but corrects the checksum (RFC 1624): only a check by the receiving application
/// can detect the change.
pub(crate) fn forge(frame: &mut [u8], random: &mut Random) -> bool {
    let Some((header, payload)) = udp(frame) else { return false };
    // The 16-bit word with the byte; a last odd byte is in its high half.
    let word = random.below(payload.div_ceil(2) as u64) as usize * 2;
    let bit = if word + 1 == payload { 8 + random.below(8) } else { random.below(16) };
    let at = header + UDP_HEADER + word;
    let old = u16::from_be_bytes([at_or_0(frame, at), at_or_0(frame, at + 1)]);
    let new = old ^ (1 << bit);
    let [high, low] = new.to_be_bytes();
    let Some(sum) = be16(frame, header + 6) else { return false };
    // RFC 1624, equation 3: HC' = ~(~HC + ~m + m'). 0 means "no checksum" and is left.
    let mut total = u32::from(!sum) + u32::from(!old) + u32::from(new);
    total = (total & 0xffff) + (total >> 16);
    total = (total & 0xffff) + (total >> 16);
    let sum = match (sum, !(total as u16)) {
        (0, _) => 0,
        (_, 0) => 0xffff,
        (_, sum) => sum,
    };
    set(frame, at, high);
    if word + 1 < payload {
        set(frame, at + 1, low);
    }
    for (i, byte) in sum.to_be_bytes().into_iter().enumerate() {
        set(frame, header + 6 + i, byte);
    }
    true
}

fn at_or_0(frame: &[u8], at: usize) -> u8 {
    frame.get(at).copied().unwrap_or(0)
}

fn set(frame: &mut [u8], at: usize, value: u8) {
    if let Some(byte) = frame.get_mut(at) {
        *byte = value;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The Internet checksum of `bytes`, as headers have it.
    fn checksum(bytes: &[u8]) -> u16 {
        let mut total: u32 = bytes
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
            .sum();
        while total > 0xffff {
            total = (total & 0xffff) + (total >> 16);
        }
        !(total as u16)
    }

    /// An IPv4 UDP frame from host `from` to host `to`, with a correct checksum.
    pub(crate) fn datagram(from: u8, to: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0];
        let len = 20 + UDP_HEADER + payload.len();
        frame.extend([0x45, 0, (len >> 8) as u8, len as u8, 0, 0, 0x40, 0, 64, UDP, 0, 0]);
        frame.extend([10, 77, 0, from, 10, 77, 0, to]);
        let udp_len = UDP_HEADER + payload.len();
        frame.extend([0x10, 0, 0x20, 0, (udp_len >> 8) as u8, udp_len as u8, 0, 0]);
        frame.extend(payload);
        let sum = match checksum(&pseudo(&frame)) {
            0 => 0xffff,
            sum => sum,
        };
        frame[ETHERNET + 26..ETHERNET + 28].copy_from_slice(&sum.to_be_bytes());
        frame
    }

    /// The bytes that the checksum covers: both addresses, protocol, length, then the datagram.
    fn pseudo(frame: &[u8]) -> Vec<u8> {
        let mut bytes = frame[ETHERNET + 12..ETHERNET + 20].to_vec();
        bytes.extend([0, UDP]);
        bytes.extend(&frame[ETHERNET + 24..ETHERNET + 26]);
        bytes.extend(&frame[ETHERNET + 20..]);
        bytes
    }

    fn fits(frame: &[u8]) -> bool {
        checksum(&pseudo(frame)) == 0
    }

    #[test]
    fn a_corrupted_datagram_fails_its_checksum_and_a_forged_one_does_not() {
        let mut random = Random::new(1, 1);
        for len in 1..200 {
            let payload: Vec<u8> = (0..len).map(|i| (i * 37) as u8).collect();
            let sound = datagram(1, 2, &payload);
            assert!(fits(&sound));
            let (mut corrupted, mut forged) = (sound.clone(), sound.clone());
            assert!(corrupt(&mut corrupted, &mut random));
            assert!(!fits(&corrupted), "{len}");
            assert!(forge(&mut forged, &mut random));
            assert!(fits(&forged), "{len}");
            for damaged in [&corrupted, &forged] {
                let bits: u32 =
                    (42..sound.len()).map(|i| (sound[i] ^ damaged[i]).count_ones()).sum();
                assert_eq!(bits, 1, "one bit of the payload");
                assert_eq!(damaged[..40], sound[..40], "and no header");
            }
        }
    }

    #[test]
    fn only_whole_datagrams_are_damaged() {
        let mut random = Random::new(1, 1);
        let mut fragment = datagram(1, 2, b"payload");
        fragment[ETHERNET + 6] = 0x20;
        let mut tcp = datagram(1, 2, b"payload");
        tcp[ETHERNET + 9] = 6;
        let mut empty = datagram(1, 2, b"");
        let mut cut = datagram(1, 2, b"payload");
        cut.truncate(45);
        for frame in [&mut fragment, &mut tcp, &mut empty, &mut cut] {
            let before = frame.clone();
            assert!(!corrupt(frame, &mut random) && !forge(frame, &mut random));
            assert_eq!(*frame, before);
        }
    }

    #[test]
    fn any_bytes_are_harmless() {
        let mut random = Random::new(3, 3);
        let sound = datagram(1, 2, &[7; 100]);
        for _ in 0..100_000 {
            let mut frame = sound[..random.below(sound.len() as u64 + 1) as usize].to_vec();
            for _ in 0..random.below(6) {
                let at = random.below(frame.len().min(60) as u64) as usize;
                if let Some(byte) = frame.get_mut(at) {
                    *byte = random.next() as u8;
                }
            }
            macs(&frame);
            is_payload(&frame);
            let len = frame.len();
            corrupt(&mut frame, &mut random);
            forge(&mut frame, &mut random);
            assert_eq!(frame.len(), len);
        }
    }

    #[test]
    fn neighbour_discovery_is_no_payload() {
        let mut frame = datagram(1, 2, &[0; 40]);
        assert!(is_payload(&frame));
        frame[12..14].copy_from_slice(&0x0806u16.to_be_bytes());
        assert!(!is_payload(&frame), "ARP");
        frame[12..14].copy_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
        frame[ETHERNET + 6] = ICMPV6;
        frame[ETHERNET + 40] = 135;
        assert!(!is_payload(&frame), "neighbour solicitation");
        frame[ETHERNET + 40] = 1;
        assert!(is_payload(&frame), "destination unreachable");
    }
}
