/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* What every rank does for itself. */
#include "bench.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int ranks, self;

void fail(const char *format, ...)
{
	va_list list;

	va_start(list, format);
	fprintf(stderr, "rank %d: ", self);
	vfprintf(stderr, format, list);
	fputc('\n', stderr);
	va_end(list);
	exit(1);
}

double now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

int pin(int rank)
{
	static cpu_set_t mine;
	static int count;
	int next = 0, wanted;
	cpu_set_t one;

	if (!count) {
		if (sched_getaffinity(0, sizeof(mine), &mine))
			fail("sched_getaffinity");
		count = CPU_COUNT(&mine);
	}
	wanted = rank % count;
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &mine) || next++ != wanted)
			continue;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		sched_setaffinity(0, sizeof(one), &one);
	}
	return count;
}
