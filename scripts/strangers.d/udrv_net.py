"""What a program without a key can say over the network: handshake packets of PROTOCOL.md 7.2 under the key that everybody
knows, from any address of this host; and ICMP messages that are made up."""
import socket
import struct

MASK = (1 << 64) - 1
PUBLIC = b"udrv job key 1  "
NOTHING = 4
INIT, ACCEPT, REFUSE, RETRY = 16, 17, 18, 19
IP_PKTINFO = 8  # linux/in.h; the module socket has no name for it
HELLO = struct.Struct("<4sBBHHHIIHHQQQ24sIHxx")


def _rotl(x, bits):
    return (x << bits | x >> (64 - bits)) & MASK


def _round(v):
    a, b, c, d = v
    a, c = (a + b) & MASK, (c + d) & MASK
    b, d = _rotl(b, 13) ^ a, _rotl(d, 16) ^ c
    a = _rotl(a, 32)
    c, a = (c + b) & MASK, (a + d) & MASK
    b, d = _rotl(b, 17) ^ c, _rotl(d, 21) ^ a
    return a, b, _rotl(c, 32), d


def siphash(key, data, wide=False):
    """SipHash-2-4 of whole words: 64 bits, or 128 as bytes."""
    k0, k1 = struct.unpack("<QQ", key)
    v = (k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ (0xEE if wide else 0), k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573)
    for word in struct.unpack(f"<{len(data) // 8}Q", data) + ((len(data) & 0xFF) << 56,):
        a, b, c, d = v
        a, b, c, d = _round(_round((a, b, c, d ^ word)))
        v = (a ^ word, b, c, d)

    def squeeze(v):
        for _ in range(4):
            v = _round(v)
        return v, v[0] ^ v[1] ^ v[2] ^ v[3]

    a, b, c, d = v
    v, low = squeeze((a, b, c ^ (0xEE if wide else 0xFF), d))
    if not wide:
        return low
    a, b, c, d = v
    _, high = squeeze((a, b ^ 0xDD, c, d))
    return struct.pack("<QQ", low, high)


KEY = siphash(PUBLIC, struct.pack("<QQ", NOTHING, 0), wide=True)


def init(address, port, dest_port, life=0x1235, nonce=0x77, echo=0):
    """An INIT in the name of ADDRESS and PORT, for DEST_PORT."""
    at = struct.pack("<HHI", 4, port, 0) + bytes(10) + b"\xff\xff" + socket.inet_aton(address)
    said = HELLO.pack(b"UDRV", INIT, 0, 1, 1, 1472, 13, 5, 0, 64, life, nonce, echo, at, 0, dest_port)
    return said + struct.pack("<Q", siphash(KEY, struct.pack("<Q", 1) + said))


def kind(packet):
    """What a handshake packet is, or None."""
    return packet[4] if packet[:4] == b"UDRV" and len(packet) >= 88 else None


def send_from(sock, source, data, to):
    """Sends with another address of this host as the source (IP_PKTINFO, ip(7))."""
    info = struct.pack("=I4s4s", 0, socket.inet_aton(source), bytes(4))
    sock.sendmsg([data], [(socket.IPPROTO_IP, IP_PKTINFO, info)], 0, to)


def udp(address, port=0):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, port))
    return sock


def answer(sock, seconds=1.0):
    """The kind of the next packet, or None."""
    sock.settimeout(seconds)
    try:
        return kind(sock.recv(2048))
    except TimeoutError:
        return None


def _sum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def unreachable(victim, victim_port, peer, peer_port, quote=bytes(40)):
    """An IP packet in the name of the host PEER: nobody listens at PEER_PORT, where a datagram of the victim was to go."""

    def ip(source, to, protocol, body):
        head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 1, 0, 64, protocol, 0, socket.inet_aton(source), socket.inet_aton(to))
        return head[:10] + struct.pack("!H", _sum(head)) + head[12:] + body

    quoted = ip(victim, peer, 17, struct.pack("!HHHH", victim_port, peer_port, 8 + len(quote), 0) + quote)
    icmp = struct.pack("!BBHI", 3, 3, 0, 0) + quoted
    icmp = icmp[:2] + struct.pack("!H", _sum(icmp)) + icmp[4:]
    return ip(peer, victim, 1, icmp)
