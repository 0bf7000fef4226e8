/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * registered CASE: what an RDMA device registers of device memory, and for how long. One process sends, or writes a region of
 * the other one, and every byte is checked. It is linked with the double's libcuda.so.1.
 *
 * registered wide: a region of PARTS parts of 32 MiB in one allocation is written in all of them.
 *
 * registered freed: an allocation is sent from and freed. Within a second, there is room for another one, though nothing else is
 * sent (FAKE_CUDA_MEMORY has room for one).
 *
 * registered again: messages from one allocation, which go on for a while.
 *
 * registered remapped: messages from memory of cuMemCreate, at the same addresses, but each from other memory.
 *
 * registered rebound: the same, from the same memory, which is unmapped and mapped there again.
 */
#include "kinds.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEN = 1 << 20, PART = 32 << 20, PARTS = 5, KEY = 7, LARGE = 40 << 20 };

static uint8_t bytes[LEN];

/* One message from device memory to host memory of the other side. */
static void send_one(struct side *side, ptr from, uint32_t seed)
{
	static struct fi_context2 context;

	if (side->rank == 1) {
		fill(bytes, LEN, seed);
		SAME(cuMemcpyHtoD_v2(from, bytes, LEN), 0);
		POST(side, fi_tsend(side->ep, (void *)from, LEN, NULL, side->peer, seed, &context));
		completion(side->tx);
	} else {
		memset(bytes, 0, LEN);
		POST(side, fi_trecv(side->ep, bytes, LEN, NULL, side->peer, seed, 0, &context));
		completion(side->rx);
		if (!holds(bytes, LEN, seed, 0))
			FAIL("message %u has the bytes of other memory", seed);
	}
	barrier(side);
}

static void go_on(struct side *side, double seconds)
{
	for (double end = now() + seconds; now() < end;)
		progress(side);
}

static void wide(struct side *side)
{
	static struct fi_context2 context;
	struct fid_mr *mr = NULL;
	uint64_t name[2] = {0};
	ptr at;
	int n;

	SAME(cuMemAlloc_v2(&at, side->rank ? LEN : (size_t)PARTS * PART), 0);
	if (side->rank == 0) {
		OK(fi_mr_reg(side->domain, (void *)at, (size_t)PARTS * PART, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
		name[0] = fi_mr_key(mr);
		name[1] = side->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? at : 0;
		tell(side, name, sizeof name);
	} else {
		hear(side, name, sizeof name);
	}
	for (n = 0; n < 6 * PARTS; n++) {
		ptr there = (ptr)(n % PARTS) * PART + (ptr)n * 1000;

		fill(bytes, LEN, (uint32_t)n);
		if (side->rank == 1) {
			SAME(cuMemcpyHtoD_v2(at, bytes, LEN), 0);
			POST(side, fi_write(side->ep, (void *)at, LEN, NULL, side->peer, name[1] + there, name[0], &context));
			completion(side->tx);
			/* A message behind it. */
			POST(side, fi_read(side->ep, (void *)at, LEN, NULL, side->peer, name[1] + there, name[0], &context));
			completion(side->tx);
			SAME(cuMemcpyDtoH_v2(bytes, at, LEN), 0);
			CHECK(holds(bytes, LEN, (uint32_t)n, 0));
		}
		barrier(side);
	}
	if (mr)
		OK(fi_close(&mr->fid));
	barrier(side);
	SAME(cuMemFree_v2(at), 0);
}

static void freed(struct side *side)
{
	ptr at = 0;
	int n, result = 2;

	for (n = 0; n < 6; n++) {
		if (side->rank == 1) {
			double end = now() + 1;

			while ((result = cuMemAlloc_v2(&at, LARGE)) && now() < end)
				progress(side);
			SAME(result, 0);
		}
		send_one(side, at, (uint32_t)n);
		if (side->rank == 1)
			SAME(cuMemFree_v2(at), 0);
	}
}

static void again(struct side *side)
{
	ptr at = 0;
	uint32_t n;

	if (side->rank == 1)
		SAME(cuMemAlloc_v2(&at, LEN), 0);
	for (n = 0; n < 12; n++) {
		send_one(side, at, n);
		go_on(side, 0.05);
	}
	if (side->rank == 1)
		SAME(cuMemFree_v2(at), 0);
}

static void map_again(struct side *side, int same)
{
	struct memory_properties of = shared_by_descriptor(true);
	struct { int location[2], flags; } access = { { 1, 0 }, 3 };
	uint64_t part = 0;
	ptr at = 0;
	uint32_t n;

	if (side->rank == 1)
		SAME(cuMemAddressReserve(&at, 2 * GRANULE, 0, 0, 0), 0);
	for (n = 0; n < 8; n++) {
		if (side->rank == 1) {
			if (n == 0 || !same)
				SAME(cuMemCreate(&part, GRANULE, &of, 0), 0);
			SAME(cuMemMap(at, GRANULE, 0, part, 0), 0);
			SAME(cuMemSetAccess(at, GRANULE, &access, 1), 0);
			if (n == 7 || !same)
				SAME(cuMemRelease(part), 0);
		}
		send_one(side, at, 2 * n);
		send_one(side, at, 2 * n + 1);
		if (side->rank == 1)
			SAME(cuMemUnmap(at, GRANULE), 0);
	}
	if (side->rank == 1)
		SAME(cuMemAddressFree(at, 2 * GRANULE), 0);
}

static void remapped(struct side *side)
{
	map_again(side, 0);
}

static void rebound(struct side *side)
{
	map_again(side, 1);
}

static const struct { const char *name; story told; } cases[] = { { "wide", wide }, { "freed", freed }, { "again", again }, { "remapped", remapped }, { "rebound", rebound } };
static story chosen;

static void one_case(struct side *side)
{
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_RMA | FI_HMEM };
	void *context;

	SAME(cuInit(0), 0);
	SAME(cuDevicePrimaryCtxRetain(&context, 0), 0);
	SAME(cuCtxSetCurrent(context), 0);
	side_begin(side, &setup);
	chosen(side);
	side_end(side);
}

int main(int argc, char **argv)
{
	size_t n;

	for (n = 0; n < sizeof cases / sizeof *cases; n++)
		if (argc > 1 && !strcmp(argv[1], cases[n].name))
			chosen = cases[n].told;
	return chosen && run_story(one_case, false, 60) ? 0 : 1;
}
