/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * PROGRAM [--ranks 2] FILE BYTES ROUNDS
 *
 * Rank 0 sends BYTES and, once it has, rank 1 receives them, ROUNDS times: nobody looks before there is something to see.
 * So what callgrind counts in `counted_send` and `counted_receive`, and below, is what ROUNDS messages take. The ranks
 * wait for their turns in FILE, which both have in their memory.
 */
#include "bench.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Before what counts: connections are there then. */
#define WARM_UP 100
#define PATIENCE_S 60

static atomic_int *turn;

__attribute__((noinline)) void counted_send(const char *buffer, size_t len)
{
	way_send(1, buffer, len);
	__asm__ volatile("");
}

__attribute__((noinline)) void counted_receive(char *buffer, size_t len)
{
	way_receive(0, buffer, len);
	__asm__ volatile("");
}

static void await_turn(int number)
{
	double end = now() + PATIENCE_S;

	while (atomic_load(turn) != number) {
		if (now() > end)
			fail("turn %d does not come", number);
		sched_yield();
	}
}

int main(int argc, char **argv)
{
	size_t len;
	char *buffer;
	int rounds, file;

	way_open(&argc, &argv);
	if (argc != 4 || ranks != 2)
		fail("wants a file, bytes and rounds, and two ranks");
	len = strtoul(argv[2], NULL, 10);
	rounds = atoi(argv[3]);
	buffer = calloc(1, len + 1);
	file = open(argv[1], O_RDWR);
	if (!buffer || file < 0 || ftruncate(file, sizeof(*turn)))
		fail("no memory, or no file");
	turn = mmap(NULL, sizeof(*turn), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (turn == MAP_FAILED)
		fail("mmap");
	for (int i = 0; i < WARM_UP; i++) {
		if (self == 0) {
			way_send(1, buffer, len);
			way_receive(1, buffer, len);
		} else {
			way_receive(0, buffer, len);
			way_send(0, buffer, len);
		}
	}
	way_barrier();
	for (int i = 0; i < rounds; i++) {
		await_turn(2 * i + self);
		if (self == 0)
			counted_send(buffer, len);
		else
			counted_receive(buffer, len);
		atomic_store(turn, 2 * i + self + 1);
	}
	way_barrier();
	way_close();
	return 0;
}
