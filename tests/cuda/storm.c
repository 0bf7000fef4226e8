/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * storm ROUNDS: two processes send each other messages between allocations of device memory that come and go, at addresses that
 * are used again at once, and check every byte. It is linked with the double's libcuda.so.1.
 *
 * The program sets no SYNC_MEMOPS. Allocations that were sent from before, in which udrv has set it, are filled by copies
 * from device memory, whose calls return early otherwise.
 *
 * storm ROUNDS pools: half of the allocations are of the default pool, of which there is neither an IPC handle nor SYNC_MEMOPS: udrv sets
 * the context's.
 *
 * storm ROUNDS shared, unshared, kinds: the kind of each is drawn, of those that other processes can open; that they cannot;
 * and of all, the host's too (kinds.h).
 *
 * storm ROUNDS pool, ends: all are of one pool; and of pools that are destroyed while allocations of them are left.
 *
 * storm ROUNDS long: each is of a pool, and so long that drivers fail to import it.
 *
 * storm ROUNDS staged: the endpoints may not let RDMA devices access device memory (FI_OPT_FI_HMEM_P2P).
 *
 * storm ROUNDS apart: each process sees another device as its first.
 *
 * storm ROUNDS filtered: and no process may attach to another one.
 *
 * storm ROUNDS death: after that one of them is killed while the other reads its memory, and the other closes and frees.
 */
#include "forbid.h"
#include "kinds.h"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern int cuMemcpyDtoD_v2(ptr, ptr, size_t);

enum { LEAST = 128 << 10, MOST = 512 << 10, SLOTS = 6, AHEAD = 2 };

struct slot {
	struct block block;
	size_t len;
	bool was_sent;
};

/* Which kinds are drawn. */
struct draw { const char *name; int from, to; };
static const struct draw draws[] = {
	{ "pools", LEGACY, KINDS }, { "shared", LEGACY, POOL }, { "unshared", UNSHARED, DEFAULT_POOL }, { "kinds", LEGACY, PLAIN },
	{ "pool", POOL, POOL }, { "ends", POOL, POOL }, { "long", POOL, POOL },
	{ 0 },
};

static int rounds;
/* Null: all are of one kind. */
static const struct draw *draw;
static enum forbidden forbidden;
static bool apart, staged;
/* How many of both came to the end; null: nobody is killed. */
static int *survivors;

static enum kind any_kind(uint64_t *random)
{
	if (!draw)
		return LEGACY;
	if (draw->to == KINDS)
		return next_random(random) % 2 ? DEFAULT_POOL : LEGACY;
	return (enum kind)(draw->from + (int)(next_random(random) % (uint64_t)(draw->to - draw->from + 1)));
}

/* A new allocation in a slot, half of the time. */
static ptr refresh(struct slot *slot, uint64_t *random)
{
	if (slot->block.at && next_random(random) % 2)
		return slot->block.at;
	end_block(&slot->block);
	slot->len = LEAST + next_random(random) % (MOST - LEAST);
	slot->was_sent = false;
	return make_block(&slot->block, any_kind(random), slot->len);
}

/* LEAST bytes of device memory. */
static ptr scratch;

static void exchange(struct side *side, int round, struct slot *from, struct slot *to, uint8_t *host, uint64_t *random)
{
	static struct fi_context2 contexts[2 * AHEAD];
	size_t len[AHEAD];
	int n;

	for (n = 0; n < AHEAD; n++) {
		struct slot *target = &to[(round * AHEAD + n) % SLOTS];
		refresh(target, random);
		POST(side, fi_trecv(side->ep, (void *)target->block.at, target->len, NULL, side->peer, n, 0, &contexts[n]));
	}
	for (n = 0; n < AHEAD; n++) {
		struct slot *source = &from[(round * AHEAD + n) % SLOTS];
		size_t skip = next_random(random) % 1000;
		refresh(source, random);
		/* What the other side has room for. */
		len[n] = LEAST - skip;
		fill(host, len[n], (uint32_t)(round * AHEAD + n) * 2 + (uint32_t)side->rank);
		if (source->was_sent && on_device(source->block.kind)) {
			SAME(cuMemcpyHtoD_v2(scratch, host, len[n]), 0);
			SAME(cuMemcpyDtoD_v2(source->block.at + skip, scratch, len[n]), 0);
		} else {
			put_block(&source->block, skip, host, len[n]);
		}
		source->was_sent = true;
		/* Behind an element that is empty, half of the time. */
		struct iovec parts[] = {{NULL, 0}, {(void *)(source->block.at + skip), len[n]}};
		int empty = (int)(next_random(random) % 2);
		POST(side, fi_tsendv(side->ep, parts + !empty, NULL, 1 + empty, side->peer, n, &contexts[AHEAD + n]));
	}
	for (n = 0; n < AHEAD; n++) {
		struct fi_cq_tagged_entry got = completion(side->rx);
		int which = (int)((struct fi_context2 *)got.op_context - contexts);
		struct slot *target = &to[(round * AHEAD + which) % SLOTS];
		get_block(&target->block, host, got.len);
		CHECK(holds(host, got.len, (uint32_t)(round * AHEAD + which) * 2 + (uint32_t)!side->rank, 0));
	}
	for (n = 0; n < AHEAD; n++)
		completion(side->tx);
}

static void end_by_death(struct side *side, struct slot *from, struct slot *to, uint64_t *random)
{
	static struct fi_context2 contexts[SLOTS];
	double end;
	int n;

	barrier(side);
	for (n = 0; n < SLOTS; n++) {
		if (side->rank == 0)
			POST(side, fi_trecv(side->ep, (void *)to[n].block.at, to[n].len, NULL, side->peer, n, 0, &contexts[n]));
		else
			POST(side, fi_tsend(side->ep, (void *)from[n].block.at, LEAST, NULL, side->peer, n, &contexts[n]));
	}
	end = now() + (side->rank == 0 ? 0.5 : (double)(next_random(random) % 100) * 1e-5);
	while (now() < end) {
		take_any(side->rx);
		take_any(side->tx);
	}
	if (side->rank == 1)
		raise(SIGKILL);
	side_close(side);
	++*survivors;
}

/* The option is kept, cannot change its meaning once the endpoint is enabled, and nothing is promised. */
static void peer_to_peer(struct side *side, int now)
{
	int value = -1, other = now == FI_HMEM_P2P_DISABLED ? FI_HMEM_P2P_ENABLED : FI_HMEM_P2P_DISABLED;
	int required = FI_HMEM_P2P_REQUIRED, none = 4;
	size_t len = sizeof value;

	OK(fi_getopt(&side->ep->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &value, &len));
	SAME(value, now);
	SAME(fi_setopt(&side->ep->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &other, sizeof other), -FI_EOPBADSTATE);
	SAME(fi_setopt(&side->ep->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &required, sizeof required), -FI_EOPNOTSUPP);
	SAME(fi_setopt(&side->ep->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &none, sizeof none), -FI_EINVAL);
	OK(fi_setopt(&side->ep->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &now, sizeof now));
}

static void allocate_and_exchange(struct side *side)
{
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_HMEM };
	struct slot from[SLOTS] = {0}, to[SLOTS] = {0};
	uint64_t random = 1 + (uint64_t)side->rank;
	uint8_t *host = need(MOST);
	void *context;
	int n;

	forbid_here(forbidden);
	if (apart)
		CHECK(!setenv("FAKE_CUDA_FIRST", side->rank ? "1" : "0", 1));
	SAME(cuInit(0), 0);
	SAME(cuDevicePrimaryCtxRetain(&context, 0), 0);
	SAME(cuCtxSetCurrent(context), 0);
	SAME(cuMemAlloc_v2(&scratch, LEAST), 0);
	setup.p2p = staged ? FI_HMEM_P2P_DISABLED : FI_HMEM_P2P_ENABLED;
	side_begin(side, &setup);
	peer_to_peer(side, setup.p2p);
	for (n = 0; n < rounds; n++)
		exchange(side, n, from, to, host, &random);
	if (survivors)
		end_by_death(side, from, to, &random);
	else
		side_end(side);
	for (n = 0; n < SLOTS; n++) {
		end_block(&from[n].block);
		end_block(&to[n].block);
	}
	SAME(cuMemFree_v2(scratch), 0);
	free(host);
}

int main(int argc, char **argv)
{
	const struct draw *named = draws;

	rounds = argc > 1 ? atoi(argv[1]) : 100;
	while (argc > 2 && named->name && strcmp(named->name, argv[2]))
		named++;
	if (argc > 2 && named->name)
		draw = named;
	else if (argc > 2 && !strcmp(argv[2], "filtered"))
		forbidden = FILTERED;
	else if (argc > 2 && !strcmp(argv[2], "apart"))
		apart = true;
	else if (argc > 2 && !strcmp(argv[2], "staged"))
		staged = true;
	else if (argc > 2) {
		survivors = mmap(NULL, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		CHECK(survivors != MAP_FAILED);
		return !run_story(allocate_and_exchange, false, 60) && *survivors == 1 ? 0 : 1;
	}
	pools_end = draw && !strcmp(draw->name, "ends");
	if (draw && !strcmp(draw->name, "long"))
		of_pool_least = 6ul << 30;
	return run_story(allocate_and_exchange, false, 60) ? 0 : 1;
}
