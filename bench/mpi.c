/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Ranks of an MPI job. */
#include "bench.h"

#include <mpi.h>

static MPI_Request started[MOST_STARTED];
static int count;

void way_open(int *argc, char ***argv)
{
	MPI_Init(argc, argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &self);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
}

void way_send(int to, const void *buffer, size_t len)
{
	MPI_Send(buffer, (int)len, MPI_BYTE, to, 1, MPI_COMM_WORLD);
}

void way_receive(int from, void *buffer, size_t len)
{
	MPI_Recv(buffer, (int)len, MPI_BYTE, from, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

void way_start_send(int to, const void *buffer, size_t len)
{
	if (count == MOST_STARTED)
		fail("too many started");
	MPI_Isend(buffer, (int)len, MPI_BYTE, to, 1, MPI_COMM_WORLD, &started[count++]);
}

void way_start_receive(int from, void *buffer, size_t len)
{
	if (count == MOST_STARTED)
		fail("too many started");
	MPI_Irecv(buffer, (int)len, MPI_BYTE, from, 1, MPI_COMM_WORLD, &started[count++]);
}

void way_finish(void)
{
	MPI_Waitall(count, started, MPI_STATUSES_IGNORE);
	count = 0;
}

void way_barrier(void)
{
	MPI_Barrier(MPI_COMM_WORLD);
}

void way_close(void)
{
	MPI_Finalize();
}
