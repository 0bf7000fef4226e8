/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * What is measured (kinds.c, thresholds.c), and how ranks exchange messages (fabric.c over libfabric, mpi.c over an MPI): the same
 * measures for both.
 */
#ifndef BENCH_H
#define BENCH_H

#include <stddef.h>

#define MOST_RANKS 8
/* Operations that a rank has started and not finished, at most. */
#define MOST_STARTED 256

/* Set by way_open; `self` counts from 0. */
extern int ranks, self;

/* Ends the process with one line. */
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
double now(void);
/* Each rank to a processor of its own while there are enough. Returns how many there are. */
int pin(int rank);

void way_open(int *argc, char ***argv);
/* Return when the buffer is the caller's again. */
void way_send(int to, const void *buffer, size_t len);
void way_receive(int from, void *buffer, size_t len);
/* Begun, and over when way_finish returns. */
void way_start_send(int to, const void *buffer, size_t len);
void way_start_receive(int from, void *buffer, size_t len);
void way_finish(void);
void way_barrier(void);
void way_close(void);

#endif
