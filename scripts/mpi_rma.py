"""A small MPI job of one-sided operations that checks what it moves: Put, Get and Accumulate.

Each rank writes into its right neighbour's window and reads from its left neighbour's, at
lengths and offsets that fit no page; rank 0 prints one line that ends in "OK".
"""

import sys

from mpi4py import MPI

SIZES = (1, 8, 1000, 4097, 65536, 300001, 1048576)
ROUNDS = 2
OFFSET = 13


def pattern(rank: int, size: int, turn: int) -> bytes:
    """Return `size` bytes that depend on the rank, the size and the round."""
    unit = bytes((rank * 37 + size * 11 + turn * 5 + i) & 0xFF for i in range(241))
    return (unit * (size // len(unit) + 1))[:size]


def differs(rank: int, what: str, got: bytes, want: bytes) -> None:
    """End the job if the bytes are wrong."""
    if bytes(got) != want:
        print(f"rank {rank}: {what} of {len(want)} bytes differs", flush=True)
        MPI.COMM_WORLD.Abort(1)


def main() -> int:
    comm = MPI.COMM_WORLD
    rank, ranks = comm.Get_rank(), comm.Get_size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    room = max(SIZES) + OFFSET
    window = MPI.Win.Allocate(2 * room, 1, comm=comm)
    memory = window.tomemory()
    moved = 0
    for turn in range(ROUNDS):
        for size in SIZES:
            memory[room : room + size] = pattern(rank, size, turn)
            window.Fence()
            # Both belong to the library until the fence.
            written, read = pattern(rank, size, turn + 9), bytearray(size)
            window.Put([written, MPI.BYTE], right, target=OFFSET)
            window.Get([read, MPI.BYTE], left, target=room)
            window.Fence()
            differs(rank, "Get", read, pattern(left, size, turn))
            differs(rank, "Put", memory[OFFSET : OFFSET + size], pattern(left, size, turn + 9))
            moved += 2 * size
    memory[0:8] = bytes(8)
    window.Fence()
    mine = (1 << rank).to_bytes(8, sys.byteorder)
    for target in range(ranks):
        window.Accumulate([mine, MPI.INT64_T], target, op=MPI.SUM)
    window.Fence()
    differs(rank, "Accumulate", memory[0:8], ((1 << ranks) - 1).to_bytes(8, sys.byteorder))
    del memory
    window.Free()
    total = comm.reduce(moved, op=MPI.SUM, root=0)
    if rank == 0:
        print(f"{ranks} ranks, {total} bytes, OK", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
