/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * mixed ROUNDS [host]: one process writes a region in device memory of the other one, accesses another region of it, and sends a
 * fenced message. When the message is received, what was written is in the device memory. The other region is in device memory too,
 * or in the host's. It is linked with the double's libcuda.so.1.
 */
#include "kinds.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 256 << 10, TARGET = 0, DEVICE_KEY = 7, OTHER_KEY = 8, EVERY = 4 };

/* What lies between the write and the message. */
enum between { NOTHING, WRITE, READ, DELIVERED_WRITE, CLOSE, BETWEENS };

static int rounds;
static bool host;

struct region {
	struct block block;
	struct fid_mr *mr;
	uint64_t key, addr;
};

static void name_region(struct side *side, struct region *region)
{
	uint64_t name[2];

	if (side->rank == TARGET) {
		name[0] = fi_mr_key(region->mr);
		name[1] = side->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? region->block.at : 0;
		tell(side, name, sizeof name);
	} else {
		hear(side, name, sizeof name);
		region->key = name[0];
		region->addr = name[1];
	}
}

static void open_region(struct side *side, struct region *region, uint64_t key)
{
	if (side->rank == TARGET)
		OK(fi_mr_reg(side->domain, (void *)region->block.at, SIZE, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, key, 0, &region->mr, NULL));
	name_region(side, region);
}

static void access_region(struct side *side, const struct region *region, const struct block *local, enum between what, struct fi_context2 *context)
{
	struct iovec iov = { (void *)local->at, SIZE };
	struct fi_rma_iov there = { region->addr, SIZE, region->key };
	struct fi_msg_rma msg = { .msg_iov = &iov, .iov_count = 1, .addr = side->peer, .rma_iov = &there, .rma_iov_count = 1, .context = context };

	if (what == READ)
		POST(side, fi_readmsg(side->ep, &msg, FI_COMPLETION));
	else
		POST(side, fi_writemsg(side->ep, &msg, FI_COMPLETION | (what == DELIVERED_WRITE ? FI_DELIVERY_COMPLETE : 0)));
}

/* The side that writes. */
static void write_and_send(struct side *side, struct region *device, struct region *other, struct block *local, int round, enum between what)
{
	static struct fi_context2 contexts[3];
	static uint8_t bytes[SIZE];

	fill(bytes, SIZE, (uint32_t)round);
	put_block(&local[0], 0, bytes, SIZE);
	barrier(side);
	access_region(side, device, &local[0], WRITE, &contexts[0]);
	completion(side->tx);
	if (what == CLOSE) {
		barrier(side);
		/* The news of the end come. */
		barrier(side);
		for (double end = now() + 0.05; now() < end;)
			progress(side);
	} else if (what != NOTHING) {
		access_region(side, other, &local[1], what, &contexts[1]);
		completion(side->tx);
	}
	struct iovec small = { bytes, 8 };
	struct fi_msg msg = { .msg_iov = &small, .iov_count = 1, .addr = side->peer, .context = &contexts[2] };
	POST(side, fi_sendmsg(side->ep, &msg, FI_FENCE | FI_COMPLETION));
	completion(side->tx);
}

/* The side whose memory it is. */
static void receive_and_look(struct side *side, struct region *device, int round, enum between what)
{
	static struct fi_context2 context;
	static uint8_t bytes[SIZE], small[8];

	memset(bytes, 0, SIZE);
	put_block(&device->block, 0, bytes, SIZE);
	POST(side, fi_recv(side->ep, small, sizeof small, NULL, side->peer, &context));
	barrier(side);
	if (what == CLOSE) {
		barrier(side);
		OK(fi_close(&device->mr->fid));
		barrier(side);
	}
	completion(side->rx);
	get_block(&device->block, bytes, SIZE);
	if (!holds(bytes, SIZE, (uint32_t)round, 0))
		FAIL("round %d: a message overtakes what was written to device memory before it (%d in between)", round, (int)what);
}

static void write_to_several(struct side *side)
{
	struct setup setup = { .caps = FI_MSG | FI_RMA | FI_HMEM | FI_FENCE };
	struct region device = {0}, other = {0};
	struct block local[2];
	void *context;
	int n;

	SAME(cuInit(0), 0);
	SAME(cuDevicePrimaryCtxRetain(&context, 0), 0);
	SAME(cuCtxSetCurrent(context), 0);
	side_begin(side, &setup);
	for (n = 0; n < 2; n++)
		make_block(&local[n], LEGACY, SIZE);
	make_block(&device.block, LEGACY, SIZE);
	make_block(&other.block, host ? PLAIN : LEGACY, SIZE);
	open_region(side, &other, OTHER_KEY);
	open_region(side, &device, DEVICE_KEY);
	for (n = 0; n < rounds * EVERY * BETWEENS; n++) {
		/* The same often enough for keys to be there, and the end as the last. */
		enum between what = (enum between)(n / EVERY % BETWEENS);
		if (what == CLOSE && n % EVERY)
			continue;
		if (side->rank == TARGET)
			receive_and_look(side, &device, n, what);
		else
			write_and_send(side, &device, &other, local, n, what);
		if (what == CLOSE)
			open_region(side, &device, DEVICE_KEY + 2 + (uint64_t)n);
		barrier(side);
	}
	if (side->rank == TARGET) {
		OK(fi_close(&device.mr->fid));
		OK(fi_close(&other.mr->fid));
	}
	side_end(side);
	end_block(&device.block);
	end_block(&other.block);
	end_block(&local[0]);
	end_block(&local[1]);
}

int main(int argc, char **argv)
{
	rounds = argc > 1 ? atoi(argv[1]) : 10;
	host = argc > 2 && !strcmp(argv[2], "host");
	return run_story(write_to_several, false, 60) ? 0 : 1;
}
