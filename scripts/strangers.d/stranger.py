# Misuses an abstract socket as another user may: stranger.py DEED PORT [SECONDS]. Prints `done` when it has, and stays for SECONDS.
import array
import os
import socket
import struct
import sys
import time

# The ports that the kernel gives to a socket without one end here.
LAST = 61000


def seqpacket():
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def lingering():
    """A TCP socket whose last close takes an hour."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1)
    one = socket.socket()
    one.connect(listener.getsockname())
    other, _ = listener.accept()
    one.setblocking(False)
    try:
        while True:
            one.send(b"x" * 4096)
    except BlockingIOError:
        pass
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    return one, (listener, other)


def linger(port):
    """Passes such sockets to the process that accepts, and has no reference left."""
    kept = []
    for _ in range(8):
        one, rest = lingering()
        link = seqpacket()
        link.connect(f"\0udrv/{port}")
        rights = array.array("i", [one.fileno()])
        link.sendmsg([b"not a hello"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        one.close()
        kept += [link, rest]
    return kept


def connect(port, seconds):
    """Connects as often as possible, and says nothing."""
    kept, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        link = seqpacket()
        link.setblocking(False)
        try:
            link.connect(f"\0udrv/{port}")
        except OSError:
            time.sleep(0.001)
            continue
        kept = kept[-900:] + [link]
    return kept


def ring(seconds):
    """Sends to every datagram socket whose name is as long as a doorbell's."""
    rings, end = 0, time.monotonic() + seconds
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.setblocking(False)
    while time.monotonic() < end:
        with open("/proc/net/unix") as sockets:
            names = [words[7] for words in map(str.split, sockets) if len(words) == 8 and words[4] == "0002"]
        for name in names * 100:
            if len(name) == 9 and name[0] == "@":
                try:
                    rings += bell.sendto(os.urandom(8), "\0" + name[1:])
                except OSError:
                    pass
    return rings


def listen(*names):
    kept = []
    for name in names:
        kept.append(seqpacket())
        kept[-1].bind("\0" + name)
        kept[-1].listen(64)
    return kept


def squat(first, last, suffixes):
    """Takes the names of all ports, and does not listen there."""
    kept = []
    for port in range(first, last):
        for suffix in suffixes:
            kept.append(seqpacket())
            kept[-1].bind(f"\0udrv/{port}{suffix}")
    return kept


deed, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
if deed == "linger":
    kept = linger(port)
elif deed == "connect":
    print("done", flush=True)
    kept, seconds = connect(port, seconds), 0
elif deed == "ring":
    print("done", flush=True)
    sys.exit(ring(seconds) == 0)
elif deed == "downgrade":
    kept = listen(f"udrv-net/{port}")
elif deed == "impersonate":
    kept = listen(f"udrv/{port}", f"udrv-net/{port}")
elif deed == "squat":
    kept = squat(port, min(port + 10000, LAST), [""])
elif deed == "squat-port":
    kept = squat(port, port + 1, ["", "/1", "/2", "/3"])
print("done", flush=True)
time.sleep(seconds)
