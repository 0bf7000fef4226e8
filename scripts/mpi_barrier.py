"""The first barrier of an MPI job: rank 0 prints the longest time that a rank was in it, microseconds."""

import sys
import time

from mpi4py import MPI


def main() -> int:
    comm = MPI.COMM_WORLD
    begun = time.perf_counter()
    comm.Barrier()
    took = comm.reduce(time.perf_counter() - begun, op=MPI.MAX)
    if comm.Get_rank() == 0:
        print(f"barrier_us={took * 1e6:.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
