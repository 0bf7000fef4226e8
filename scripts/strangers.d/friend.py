# A process of the same user that does not keep to PROTOCOL.md §2: friend.py claim PORT, or friend.py nobody|full PORT.
import array
import fcntl
import mmap
import os
import socket
import struct
import sys
import time

SLOTS, BULK = 64, 32768
SIZE = 4096 + 128 * SLOTS + BULK
WAITS_AND_SLEEPS = struct.pack("<I", 3)


def hello(port):
    address = struct.pack("<HHI", 4, port, 0) + bytes(10) + b"\xff\xff" + socket.inet_aton("127.0.0.1")
    text = b"UDRV" + struct.pack("<HHQQII", 1, 1, 0x1234567, 0, SLOTS, BULK) + address
    bell = struct.pack("<8sQ", b"friend", 1)
    return (text + struct.pack("<IIQ", 0, 0x123456 << 8, 0) + bell).ljust(96, b"\0")


def claim(port, source):
    fd = os.memfd_create("friend", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, 1033, 1 | 2 | 4)  # F_ADD_SEALS
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(f"\0udrv/{port}")
    link.sendmsg([hello(source)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    link.settimeout(10)
    answer = link.recv(96)
    kind, reason = struct.unpack_from("<HH", answer, 4)
    print(f"claims port {source}: answer {kind}, reason {reason}", flush=True)
    return kind == 2


def doorbell(what, port):
    """Answers a hello with a doorbell that nobody has, or that nobody reads."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0udrv/{port}")
    listener.listen(8)
    listener.settimeout(15)
    print("listens", flush=True)
    while True:
        link, _ = listener.accept()
        link.settimeout(2)
        text, fds, _, _ = socket.recv_fds(link, 96, 4)
        if text:
            break
    memory = mmap.mmap(fds[0], os.fstat(fds[0]).st_size)
    name = f"{what}{port % 100}".encode()
    if what == "full":
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bell.bind(b"\0" + name)
    memory[1664:1680] = struct.pack("<8sQ", name, 1)
    welcome = (b"UDRV" + struct.pack("<HHQI", 3, 1, 77, 0)).ljust(96, b"\0")
    memory[128:132] = WAITS_AND_SLEEPS
    link.sendmsg([welcome])
    end = time.monotonic() + 6
    while time.monotonic() < end:
        memory[128:132] = WAITS_AND_SLEEPS
        time.sleep(0.01)


deed, port = sys.argv[1], int(sys.argv[2])
if deed == "claim":
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other = port + 1 if port < 60000 else port - 1
    refused = [claim(port, port), claim(port, other)]
    listener.bind(f"\0udrv/{other}")
    listener.listen(8)
    # Where this process listens: that is believed.
    believed = not claim(port, other)
    sys.exit(not (all(refused) and believed))
doorbell(deed, port)
