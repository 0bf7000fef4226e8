/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * regions ROUNDS: two processes write to each other's regions in device memory and read them, from and to memory of all kinds,
 * and check every byte. Regions are closed and opened again at the same addresses; after that nobody writes to the old one. It is
 * linked with the double's libcuda.so.1.
 *
 * regions ROUNDS mapped, pool: the regions are of memory that has no IPC handle.
 *
 * regions ROUNDS [mapped|pool] told: nobody writes to a region that has ended before the news of that are there. The double of libibverbs takes
 * such a write for a fault of the program.
 *
 * regions ROUNDS death: after that one process is killed while it writes, and the other closes and frees.
 */
#include "kinds.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SIZE = 1 << 20, AHEAD = 4, PART = SIZE / AHEAD, OFTEN = 6, KEY = 7 };

static int rounds;
static enum kind kind;
static bool told;
/* How many of both came to the end; null: nobody is killed. */
static int *survivors;

/* Memory for a part: on the device, or of the host. */
struct place {
	ptr device;
	uint8_t *host;
};

struct window {
	struct block block;
	struct fid_mr *mr;
	uint64_t key, addr;
};

static void open_window(struct side *side, struct window *window, uint64_t key, struct window *theirs)
{
	uint64_t name[2];

	make_block(&window->block, kind, SIZE);
	OK(fi_mr_reg(side->domain, (void *)window->block.at, SIZE, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, key, 0, &window->mr, NULL));
	name[0] = fi_mr_key(window->mr);
	name[1] = side->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? window->block.at : 0;
	tell(side, name, sizeof name);
	hear(side, name, sizeof name);
	theirs->key = name[0];
	theirs->addr = name[1];
}

static void close_window(struct window *window)
{
	OK(fi_close(&window->mr->fid));
	end_block(&window->block);
}

static void *of(const struct place *place, bool device)
{
	return device ? (void *)place->device : place->host;
}

static void put(const struct place *place, bool device, const void *bytes, size_t len)
{
	if (device)
		SAME(cuMemcpyHtoD_v2(place->device, bytes, len), 0);
	else
		memcpy(place->host, bytes, len);
}

/* A write to each part of the peer's region, and a read of it behind it. */
static void write_and_read(struct side *side, const struct window *theirs, struct place *from, struct place *to, uint32_t seed, uint64_t *random)
{
	static struct fi_context2 contexts[2 * AHEAD];
	static uint8_t bytes[PART];
	size_t len[AHEAD], skip[AHEAD];
	bool on_device[AHEAD];
	int n;

	for (n = 0; n < AHEAD; n++) {
		bool device = next_random(random) % 2;
		on_device[n] = next_random(random) % 2;
		skip[n] = next_random(random) % 1000;
		len[n] = next_random(random) % 3 ? PART - skip[n] : 1 + next_random(random) % 2000;
		fill(bytes, len[n], seed + (uint32_t)n);
		put(&from[n], device, bytes, len[n]);
		memset(bytes, 0, len[n]);
		put(&to[n], on_device[n], bytes, len[n]);
		uint64_t addr = theirs->addr + (size_t)n * PART + skip[n];
		POST(side, fi_write(side->ep, of(&from[n], device), len[n], NULL, side->peer, addr, theirs->key, &contexts[n]));
		POST(side, fi_read(side->ep, of(&to[n], on_device[n]), len[n], NULL, side->peer, addr, theirs->key, &contexts[AHEAD + n]));
	}
	for (n = 0; n < 2 * AHEAD; n++)
		completion(side->tx);
	for (n = 0; n < AHEAD; n++) {
		if (on_device[n])
			SAME(cuMemcpyDtoH_v2(bytes, to[n].device, len[n]), 0);
		else
			memcpy(bytes, to[n].host, len[n]);
		CHECK(holds(bytes, len[n], seed + (uint32_t)n, 0));
	}
}

/* The peer's region has ended: a write to it fails, and changes nothing here. */
static void write_too_late(struct side *side, struct window *mine, const struct window *theirs, struct place *from)
{
	static struct fi_context2 context;
	uint8_t *bytes = need(SIZE);

	barrier(side);
	OK(fi_close(&mine->mr->fid));
	fill(bytes, SIZE, 99);
	SAME(cuMemcpyHtoD_v2(mine->block.at, bytes, SIZE), 0);
	barrier(side);
	for (double end = now() + 0.1; told && now() < end;)
		progress(side);
	barrier(side);
	POST(side, fi_write(side->ep, (void *)from->device, PART, NULL, side->peer, theirs->addr, theirs->key, &context));
	CHECK(failure(side->tx).err > 0);
	barrier(side);
	SAME(cuMemcpyDtoH_v2(bytes, mine->block.at, SIZE), 0);
	CHECK(holds(bytes, SIZE, 99, 0));
	end_block(&mine->block);
	free(bytes);
}

static void end_by_death(struct side *side, struct window *mine, const struct window *theirs, struct place *from, uint64_t *random)
{
	static struct fi_context2 contexts[AHEAD];
	double end;
	int n;

	barrier(side);
	for (n = 0; side->rank == 1 && n < AHEAD; n++) {
		uint64_t addr = theirs->addr + (size_t)n * PART;
		POST(side, fi_write(side->ep, (void *)from[n].device, PART, NULL, side->peer, addr, theirs->key, &contexts[n]));
	}
	end = now() + (side->rank == 0 ? 0.5 : (double)(next_random(random) % 100) * 1e-5);
	while (now() < end) {
		take_any(side->rx);
		take_any(side->tx);
	}
	if (side->rank == 1)
		raise(SIGKILL);
	close_window(mine);
	side_close(side);
	++*survivors;
}

static void access_regions(struct side *side)
{
	struct setup setup = { .caps = FI_MSG | FI_RMA | FI_HMEM };
	struct window mine = {0}, theirs = {0};
	struct place from[AHEAD], to[AHEAD];
	uint64_t random = 1 + (uint64_t)side->rank, key = KEY;
	void *context;
	int n;

	SAME(cuInit(0), 0);
	SAME(cuDevicePrimaryCtxRetain(&context, 0), 0);
	SAME(cuCtxSetCurrent(context), 0);
	for (n = 0; n < AHEAD; n++) {
		SAME(cuMemAlloc_v2(&from[n].device, PART), 0);
		SAME(cuMemAlloc_v2(&to[n].device, PART), 0);
		from[n].host = need(PART);
		to[n].host = need(PART);
	}
	side_begin(side, &setup);
	for (n = 0; n < rounds; n++) {
		if (n % OFTEN == 0)
			open_window(side, &mine, key++, &theirs);
		write_and_read(side, &theirs, from, to, (uint32_t)n * 100, &random);
		if (n % OFTEN == OFTEN - 1)
			write_too_late(side, &mine, &theirs, &from[0]);
	}
	if (survivors) {
		open_window(side, &mine, key, &theirs);
		write_and_read(side, &theirs, from, to, 5, &random);
		end_by_death(side, &mine, &theirs, from, &random);
	} else {
		side_end(side);
	}
	for (n = 0; n < AHEAD; n++) {
		SAME(cuMemFree_v2(from[n].device), 0);
		SAME(cuMemFree_v2(to[n].device), 0);
		free(from[n].host);
		free(to[n].host);
	}
}

int main(int argc, char **argv)
{
	/* Whole lives of a region. */
	rounds = (argc > 1 ? atoi(argv[1]) : 10) * OFTEN;
	told = argc > 3 && !strcmp(argv[3], "told");
	if (argc > 2 && (!strcmp(argv[2], "mapped") || !strcmp(argv[2], "pool"))) {
		kind = argv[2][0] == 'm' ? MAPPED : POOL;
	} else if (argc > 2 && !strcmp(argv[2], "told")) {
		told = true;
	} else if (argc > 2) {
		survivors = mmap(NULL, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		CHECK(survivors != MAP_FAILED);
		return !run_story(access_regions, false, 60) && *survivors == 1 ? 0 : 1;
	}
	return run_story(access_regions, false, 60) ? 0 : 1;
}
