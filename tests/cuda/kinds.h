/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Memory of all kinds that CUDA knows, and that it does not. Each thread that uses it has a context. */
#ifndef KINDS_H
#define KINDS_H

#include "common.h"

#include <stdlib.h>
#include <string.h>

typedef uint64_t ptr;
extern int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(ptr *, size_t), cuMemFree_v2(ptr), cuMemAllocManaged(ptr *, size_t, unsigned);
extern int cuMemHostAlloc(void **, size_t, unsigned), cuMemFreeHost(void *);
extern int cuMemHostRegister_v2(void *, size_t, unsigned), cuMemHostUnregister(void *);
extern int cuMemcpyHtoD_v2(ptr, const void *, size_t), cuMemcpyDtoH_v2(void *, ptr, size_t);
extern int cuMemAllocAsync(ptr *, size_t, void *), cuMemFreeAsync(ptr, void *), cuStreamSynchronize(void *);
extern int cuMemAllocFromPoolAsync(ptr *, size_t, void *, void *), cuMemPoolCreate(void **, const void *), cuMemPoolDestroy(void *);
extern int cuMemCreate(uint64_t *, size_t, const void *, unsigned long long), cuMemRelease(uint64_t);
extern int cuMemAddressReserve(ptr *, size_t, size_t, ptr, unsigned long long), cuMemAddressFree(ptr, size_t);
extern int cuMemMap(ptr, size_t, size_t, uint64_t, unsigned long long), cuMemUnmap(ptr, size_t);
extern int cuMemSetAccess(ptr, size_t, const void *, size_t);

/* The device's, of which the first three can be opened by other processes; then what the processor may touch. */
enum kind { LEGACY, MAPPED, POOL, UNSHARED, DEFAULT_POOL, MANAGED, PINNED, REGISTERED, PLAIN, KINDS };

/* CUmemAllocationProp, and the begin of CUmemPoolProps. */
struct memory_properties { int type, handles, location[2]; char rest[96]; };

enum { GRANULE = 2 << 20, SPARE_MAX = 64 };

struct block {
	enum kind kind;
	/* The bytes that are used; null: there is none. */
	ptr at;
	/* What they are of. */
	ptr base;
};

/* An allocation of a pool of the test's own has at least so many bytes, of which the first are used. */
static size_t of_pool_least;
/* A pool of the test's own is destroyed after some allocations, and the next one has its handle once those are freed. */
static bool pools_end;
static __thread ptr spare[SPARE_MAX];
static __thread int spares;

static inline bool on_device(enum kind kind)
{
	return kind <= DEFAULT_POOL;
}

static inline struct memory_properties shared_by_descriptor(bool is)
{
	return (struct memory_properties){ 1, is, { 1, 0 }, { 0 } };
}

/* Two parts of cuMemCreate side by side, at addresses that others were mapped at before. The bytes are of both. */
static inline void map_block(struct block *block, size_t len, bool shared)
{
	struct memory_properties of = shared_by_descriptor(shared);
	struct { int location[2], flags; } access = { { 1, 0 }, 3 };
	uint64_t part;
	int n;

	CHECK(len <= GRANULE);
	if (spares)
		block->base = spare[--spares];
	else
		SAME(cuMemAddressReserve(&block->base, 2 * GRANULE, 0, 0, 0), 0);
	for (n = 0; n < 2; n++) {
		SAME(cuMemCreate(&part, GRANULE, &of, 0), 0);
		SAME(cuMemMap(block->base + (ptr)n * GRANULE, GRANULE, 0, part, 0), 0);
		SAME(cuMemRelease(part), 0);
	}
	SAME(cuMemSetAccess(block->base, 2 * GRANULE, &access, 1), 0);
	block->at = block->base + GRANULE - len / 2;
}

static inline void *shared_pool(void)
{
	static __thread void *pool;
	static __thread int uses;
	struct memory_properties of = shared_by_descriptor(true);

	if (pools_end && uses++ % 4 == 0 && pool) {
		SAME(cuMemPoolDestroy(pool), 0);
		pool = NULL;
	}
	if (!pool)
		SAME(cuMemPoolCreate(&pool, &of), 0);
	return pool;
}

static inline ptr make_block(struct block *block, enum kind kind, size_t len)
{
	void *host = NULL;

	block->kind = kind;
	switch (kind) {
	case LEGACY: SAME(cuMemAlloc_v2(&block->at, len), 0); break;
	case MAPPED: case UNSHARED: map_block(block, len, kind == MAPPED); return block->at;
	case POOL:
		SAME(cuMemAllocFromPoolAsync(&block->at, len > of_pool_least ? len : of_pool_least, shared_pool(), NULL), 0);
		SAME(cuStreamSynchronize(NULL), 0);
		break;
	case DEFAULT_POOL:
		SAME(cuMemAllocAsync(&block->at, len, NULL), 0);
		SAME(cuStreamSynchronize(NULL), 0);
		break;
	case MANAGED: SAME(cuMemAllocManaged(&block->at, len, 1), 0); break;
	case PINNED: SAME(cuMemHostAlloc(&host, len, 0), 0); break;
	case REGISTERED: case PLAIN:
		host = aligned_alloc(4096, (len + 4095) / 4096 * 4096);
		CHECK(host);
		if (kind == REGISTERED)
			SAME(cuMemHostRegister_v2(host, len, 0), 0);
		break;
	case KINDS: FAIL("no kind");
	}
	if (host)
		block->at = (ptr)(uintptr_t)host;
	block->base = block->at;
	return block->at;
}

static inline void end_block(struct block *block)
{
	void *host = (void *)(uintptr_t)block->at;
	int n;

	if (!block->at)
		return;
	switch (block->kind) {
	case LEGACY: case MANAGED: SAME(cuMemFree_v2(block->at), 0); break;
	case MAPPED: case UNSHARED:
		for (n = 0; n < 2; n++)
			SAME(cuMemUnmap(block->base + (ptr)n * GRANULE, GRANULE), 0);
		if (spares < SPARE_MAX)
			spare[spares++] = block->base;
		else
			SAME(cuMemAddressFree(block->base, 2 * GRANULE), 0);
		break;
	case POOL: case DEFAULT_POOL:
		SAME(cuMemFreeAsync(block->at, NULL), 0);
		SAME(cuStreamSynchronize(NULL), 0);
		break;
	case PINNED: SAME(cuMemFreeHost(host), 0); break;
	case REGISTERED: SAME(cuMemHostUnregister(host), 0); free(host); break;
	case PLAIN: free(host); break;
	case KINDS: FAIL("no kind");
	}
	block->at = 0;
}

/* Copies `len` bytes to what is `skip` bytes in a block, or from there. */
static inline void put_block(const struct block *block, size_t skip, const void *bytes, size_t len)
{
	if (on_device(block->kind))
		SAME(cuMemcpyHtoD_v2(block->at + skip, bytes, len), 0);
	else
		memcpy((void *)(uintptr_t)(block->at + skip), bytes, len);
}

static inline void get_block(const struct block *block, void *bytes, size_t len)
{
	if (on_device(block->kind))
		SAME(cuMemcpyDtoH_v2(bytes, block->at, len), 0);
	else
		memcpy(bytes, (void *)(uintptr_t)block->at, len);
}

#endif
