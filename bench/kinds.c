/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * PROGRAM [--ranks N] [--quick] KIND NUMBER[,NUMBER]...
 *
 *   latency    half a round trip of NUMBER bytes, us
 *   bandwidth  windows of up to 64 messages of NUMBER bytes, each window answered, MB/s
 *   rate       messages of 8 bytes in windows of NUMBER, each window answered, million a second
 *   exchange   two ranks send NUMBER bytes to each other at once, us
 *   alltoall   every rank sends NUMBER bytes to every other one, us
 *
 * Rank 0 prints "NUMBER VALUE" a line: the median of several stretches.
 */
#include "bench.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STRETCHES 5
#define RATE_BYTES 8
/* What a window holds at most. */
#define WINDOW_BYTES ((size_t)64 << 20)

static bool quick;
static char *out, *in;
static size_t room;

/* Rounds of a stretch that moves `bytes` a round: enough to measure, and soon over. */
static int rounds_for(size_t bytes, int most)
{
	size_t rounds = (quick ? (size_t)8 << 20 : (size_t)192 << 20) / (bytes + 1);

	if (quick)
		most /= 10;
	if (rounds > (size_t)most)
		rounds = (size_t)most;
	return rounds < 2 ? 2 : (int)rounds;
}

static size_t window_of(size_t len)
{
	size_t fits = len ? WINDOW_BYTES / len : 64;

	return fits > 64 ? 64 : fits < 2 ? 2 : fits;
}

static void answer_of(int from, int to, size_t len)
{
	if (self == from)
		way_send(to, out, len);
	else if (self == to)
		way_receive(from, in, len);
}

static void latency_round(size_t len)
{
	answer_of(0, 1, len);
	answer_of(1, 0, len);
}

static void window_round(size_t len, size_t window)
{
	for (size_t i = 0; i < window; i++) {
		if (self == 0)
			way_start_send(1, out, len);
		else
			way_start_receive(0, in, len);
	}
	way_finish();
	answer_of(1, 0, 4);
}

static void all_round(size_t len)
{
	for (int i = 1; i < ranks; i++)
		way_start_receive((self + ranks - i) % ranks, in, len);
	for (int i = 1; i < ranks; i++)
		way_start_send((self + i) % ranks, out, len);
	way_finish();
}

enum kind { LATENCY, BANDWIDTH, RATE, EXCHANGE, ALLTOALL, KINDS };
static const char *const names[] = { "latency", "bandwidth", "rate", "exchange", "alltoall" };

static void one_round(enum kind kind, size_t number)
{
	switch (kind) {
	case LATENCY:
		latency_round(number);
		break;
	case BANDWIDTH:
		window_round(number, window_of(number));
		break;
	case RATE:
		window_round(RATE_BYTES, number);
		break;
	default:
		all_round(number);
	}
}

/* What a round of `seconds` is worth, in the unit of its kind. */
static double value(enum kind kind, size_t number, double seconds)
{
	switch (kind) {
	case LATENCY:
		return seconds / 2 * 1e6;
	case BANDWIDTH:
		return (double)(number * window_of(number)) / seconds / 1e6;
	case RATE:
		return (double)number / seconds / 1e6;
	default:
		return seconds * 1e6;
	}
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static void measure(enum kind kind, size_t number, int cores)
{
	size_t window = kind == BANDWIDTH ? window_of(number) : kind == RATE ? number : 1;
	/* As many messages whatever the window. */
	int most = kind == LATENCY ? 4000 : kind == BANDWIDTH ? 400 : kind == RATE ? (int)(25600 / number) : 2000;
	/* Ranks that share a processor wait for each other, a time slice at worst. */
	int rounds = rounds_for((kind == RATE ? RATE_BYTES : number) * window * (size_t)(ranks - 1),
				ranks > cores ? most / 20 : most);
	double seconds[STRETCHES];

	for (int i = 0; i < rounds / 5 + 2; i++)
		one_round(kind, number);
	for (int stretch = 0; stretch < STRETCHES; stretch++) {
		double begun;

		way_barrier();
		begun = now();
		for (int i = 0; i < rounds; i++)
			one_round(kind, number);
		seconds[stretch] = (now() - begun) / rounds;
	}
	way_barrier();
	qsort(seconds, STRETCHES, sizeof(*seconds), ascending);
	if (self == 0) {
		printf("%zu %.4f\n", number, value(kind, number, seconds[STRETCHES / 2]));
		fflush(stdout);
	}
}

/* A processor that was idle a moment ago is slow; an MPI has kept it busy since it was started. */
static void warm_up(void)
{
	double end = now() + (quick ? 0.02 : 0.3);

	while (now() < end)
		;
	way_barrier();
}

int main(int argc, char **argv)
{
	size_t numbers[64], count = 0;
	enum kind kind = KINDS;
	int cores, at = 1;

	way_open(&argc, &argv);
	cores = pin(self);
	if (at < argc && !strcmp(argv[at], "--quick")) {
		quick = true;
		at++;
	}
	for (int i = 0; i < KINDS && at < argc; i++)
		if (!strcmp(argv[at], names[i]))
			kind = (enum kind)i;
	if (kind == KINDS || at + 2 != argc)
		fail("wants a kind and numbers");
	if (kind == ALLTOALL ? ranks < 2 : ranks != 2)
		fail("%d ranks", ranks);
	for (char *text = strtok(argv[at + 1], ","); text && count < 64; text = strtok(NULL, ",")) {
		numbers[count] = strtoul(text, NULL, 10);
		if (kind == RATE && (numbers[count] < 1 || numbers[count] > 64))
			fail("windows are of 1 to 64");
		if (numbers[count] > room)
			room = numbers[count];
		count++;
	}
	room += 4096;
	if (posix_memalign((void **)&out, 4096, room) || posix_memalign((void **)&in, 4096, room))
		fail("no memory");
	memset(out, self + 1, room);
	memset(in, 0, room);
	warm_up();
	for (size_t i = 0; i < count; i++) {
		measure(kind, numbers[i], cores);
		if (kind != RATE && numbers[i] && in[0] == 0 && (self == 1 || kind != BANDWIDTH))
			fail("nothing has arrived");
	}
	way_close();
	free(out);
	free(in);
	return 0;
}
