/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * The floors of this machine: "line VALUE", a cache line handed from one processor to another, us one way (no message
 * can be faster); "copy VALUE", MB/s of a processor that copies 1 MiB (no message that is copied once by one
 * processor, and is in nobody's cache, is faster). With the argument "line" that alone, in a tenth of the time.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define HANDS 200000
#define HANDS_QUICKLY 20000
#define COPIES 400
#define STRETCHES 7

static double now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

/* To the first, or the last processor that we may use. */
static void pin(int last)
{
	cpu_set_t mine, one;
	int chosen = -1;

	sched_getaffinity(0, sizeof(mine), &mine);
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &mine) && (last || chosen < 0))
			chosen = cpu;
	CPU_ZERO(&one);
	CPU_SET(chosen, &one);
	sched_setaffinity(0, sizeof(one), &one);
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static double line(int hands)
{
	atomic_int *word = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	double took[STRETCHES];
	pid_t other = fork();

	if (other < 0 || word == MAP_FAILED)
		exit(1);
	if (other == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		pin(1);
		for (int turn = 1;; turn += 2) {
			while (atomic_load_explicit(word, memory_order_acquire) != turn)
				;
			atomic_store_explicit(word, turn + 1, memory_order_release);
		}
	}
	pin(0);
	for (int i = 0, turn = 0; i < STRETCHES; i++) {
		double begun = now();

		for (int hand = 0; hand < hands; hand++) {
			atomic_store_explicit(word, ++turn, memory_order_release);
			turn++;
			while (atomic_load_explicit(word, memory_order_acquire) != turn)
				;
		}
		took[i] = (now() - begun) / hands / 2;
	}
	kill(other, SIGKILL);
	qsort(took, STRETCHES, sizeof(*took), ascending);
	return took[STRETCHES / 2] * 1e6;
}

static double copy(void)
{
	size_t len = 1 << 20;
	char *from = malloc(len), *to = malloc(len);
	double took[STRETCHES];

	if (!from || !to)
		exit(1);
	memset(from, 1, len);
	memset(to, 2, len);
	for (int i = 0; i < STRETCHES; i++) {
		double begun = now();

		for (int n = 0; n < COPIES; n++) {
			memcpy(to, from, len);
			__asm__ volatile("" : : "r"(to), "r"(from) : "memory");
		}
		took[i] = (now() - begun) / COPIES;
	}
	qsort(took, STRETCHES, sizeof(*took), ascending);
	free(from);
	free(to);
	return (double)len / took[STRETCHES / 2] / 1e6;
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "line")) {
		printf("line %.4f\n", line(HANDS_QUICKLY));
		return 0;
	}
	printf("line %.4f\n", line(HANDS));
	printf("copy %.1f\n", copy());
	return 0;
}
