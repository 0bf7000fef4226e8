"""A small MPI job that checks what it moves: a ring of tagged messages and an allreduce.

Every size crosses the ring once, each rank checks every byte it received, and rank 0
prints one line that ends in "OK". A wrong byte aborts the job.
"""

import sys
from array import array

from mpi4py import MPI

SIZES = (0, 1, 8, 64, 1000, 4096, 16384, 65536, 300001, 1048576, 4194304)
ROUNDS = 3


def pattern(rank: int, size: int, turn: int) -> bytes:
    """Return `size` bytes that depend on the sender, the size and the round."""
    unit = bytes((rank * 31 + size * 7 + turn * 13 + i) & 0xFF for i in range(251))
    return (unit * (size // len(unit) + 1))[:size]


def main() -> int:
    comm = MPI.COMM_WORLD
    rank, ranks = comm.Get_rank(), comm.Get_size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    moved = 0
    for turn in range(ROUNDS):
        for size in SIZES:
            received = bytearray(size)
            request = comm.Irecv([received, MPI.BYTE], source=left, tag=turn)
            comm.Send([pattern(rank, size, turn), MPI.BYTE], dest=right, tag=turn)
            request.Wait()
            if received != pattern(left, size, turn):
                print(f"rank {rank}: {size} bytes from rank {left} differ", flush=True)
                comm.Abort(1)
            moved += size
        for count in (1, 1000, 100000):
            mine = array("q", [rank + 1]) * count
            total = array("q", [0]) * count
            comm.Allreduce([mine, MPI.INT64_T], [total, MPI.INT64_T], op=MPI.SUM)
            if total != array("q", [ranks * (ranks + 1) // 2]) * count:
                print(f"rank {rank}: allreduce of {count} differs", flush=True)
                comm.Abort(1)
    moved = comm.allreduce(moved)
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ,")
    if rank == 0:
        print(f"ring and allreduce, {ranks} ranks, {moved} bytes checked, {library}: OK", flush=True)
    return 0


sys.exit(main())
