# SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
"""Counts wrong answers of MPI_Dist_graph_create, called N times in a row on one communicator.

mpiexec -n 2 python scripts/mpi_dist_graph.py N
"""

import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD.Dup()
size, rank = comm.size, comm.rank
destinations = [(rank - 1) % size, rank, (rank + 1) % size]
wrong = 0
for _ in range(int(sys.argv[1])):
    for weights in (MPI.UNWEIGHTED, [1, 2, 3]):
        graph = comm.Create_dist_graph([rank], [3], destinations, weights)
        wrong += graph.Get_dist_neighbors_count()[:2] != (3, 3)
        graph.Free()
print(f"rank {rank}: {wrong} wrong", flush=True)
