/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * faults [BYTES [threads|busy|reset|created|forked|closing|anew|ahead]]: two processes, or threads of one, exchange messages between all kinds of memory while calls of the driver fail (FAKE_CUDA_FAIL). Every
 * operation ends, and the bytes of those that succeed are right. Prints how many ended with an error. The longest messages have
 * so many bytes, at most 3000000. It is linked with the double's libcuda.so.1.
 *
 * reset: the device is reset between two rounds, with all that was made on it, as by cudaDeviceReset.
 *
 * created: no primary context is active, and the device memory is of the default pool, which is of no context.
 *
 * closing: the same on one side, while the other one frees and allocates again before each message, mostly at the same address: what the
 * busy side has open cannot be closed meanwhile.
 *
 * anew: both sides free and allocate again before each message, which the double does not let them do before all copies have ended.
 *
 * forked: children of two processes, which CUDA serves no more, send the memory that their parents have: each send fails. A region of
 * all memory does not.
 *
 * ahead: messages from device memory arrive at once, in turns to the device and to the host, whose copies wait for the others on the device.
 *
 * busy: a stream of the application, which its default stream waits for, does not come to its end before all messages have.
 */
#include "common.h"

#include <rdma/fi_errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef uint64_t ptr;
extern int cuInit(unsigned), cuDevicePrimaryCtxReset_v2(int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(ptr *, size_t), cuMemAllocAsync(ptr *, size_t, void *), cuMemFree_v2(ptr), cuCtxCreate_v2(void **, unsigned, int);
extern int cuMemcpyHtoDAsync_v2(ptr, const void *, size_t, void *), cuMemcpyDtoHAsync_v2(void *, ptr, size_t, void *);
extern int cuStreamCreate(void **, unsigned), cuStreamSynchronize(void *), cuLaunchHostFunc(void *, void (*)(void *), void *);

enum { MOST = 3000000, ROUNDS = 2 };
static size_t lens[] = {100, 60000, 300000};

/* Memory of a device, or of the host. */
struct memory {
	ptr device;
	uint8_t *host;
};

/* A stream that waits for no other one; null: the default stream. */
static __thread void *own_stream;
static bool is_busy, resets, creates, closing, anew;

/* Work of the application that does not end by itself. */
static void work_on(void *goes_on)
{
	while (__atomic_load_n((int *)goes_on, __ATOMIC_ACQUIRE))
		sleep_ms(1);
}

static void *place(const struct memory *memory)
{
	return memory->device ? (void *)memory->device : memory->host;
}

static void put(const struct memory *memory, uint8_t *bytes, size_t len)
{
	if (memory->device)
		SAME(cuMemcpyHtoDAsync_v2(memory->device, bytes, len, own_stream) || cuStreamSynchronize(own_stream), 0);
	else
		memcpy(memory->host, bytes, len);
}

static void get(const struct memory *memory, uint8_t *bytes, size_t len)
{
	if (memory->device)
		SAME(cuMemcpyDtoHAsync_v2(bytes, memory->device, len, own_stream) || cuStreamSynchronize(own_stream), 0);
	else
		memcpy(bytes, memory->host, len);
}

/* Waits for one operation. Returns its length, or -FI_E* with which it ended. */
static ssize_t ended(struct side *side, struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry = {0};
	struct fi_cq_err_entry error = {0};
	double end = now() + PATIENCE_S;
	ssize_t rc;

	while ((rc = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN) {
		if (now() > end)
			FAIL("an operation does not end");
		progress(side);
	}
	if (rc == 1)
		return (ssize_t)entry.len;
	SAME(rc, -FI_EAVAIL);
	SAME(fi_cq_readerr(cq, &error, 0), 1);
	CHECK(error.err > 0 && error.err != FI_ETRUNC && *fi_cq_strerror(cq, error.prov_errno, error.err_data, NULL, 0));
	return -error.err;
}

/* A send, again while there is no room. */
static ssize_t sent(struct side *side, void *buffer, size_t len, uint64_t tag, void *context)
{
	double end = now() + PATIENCE_S;
	ssize_t rc;

	while ((rc = fi_tsend(side->ep, buffer, len, NULL, side->peer, tag, context)) == -FI_EAGAIN) {
		if (now() > end)
			FAIL("no room for a send");
		progress(side);
	}
	return rc;
}

/* One message in each direction. Returns how many of this side's operations ended with an error. */
static int exchange(struct side *side, const struct memory *from, const struct memory *to, size_t len, uint32_t seed)
{
	static __thread struct fi_context2 contexts[3];
	/* Not in the stacks of threads, where libraries need what is left. */
	static __thread uint8_t *bytes;
	uint64_t tag = seed * 2;
	int errors = 0;
	ssize_t rc, got;

	bytes = bytes ? bytes : need(MOST);

	/* A receive may be refused; the message is then received in memory of the host. */
	bool refused = fi_trecv(side->ep, place(to), len, NULL, side->peer, tag, 0, &contexts[0]) != 0;
	if (refused)
		POST(side, fi_trecv(side->ep, bytes, len, NULL, side->peer, tag, 0, &contexts[0]));
	fill(bytes, refused ? 0 : len, seed + (uint32_t)side->rank);
	if (!refused)
		put(from, bytes, len);
	/* If a send is refused, or fails, an empty message takes its place. */
	rc = refused ? -FI_EIO : sent(side, place(from), len, tag, &contexts[1]);
	if (rc)
		SAME(sent(side, NULL, 0, tag, &contexts[1]), 0);
	errors += rc != 0;
	errors += ended(side, side->tx) < 0;
	got = ended(side, side->rx);
	errors += got < 0;
	if (got > 0 && !refused) {
		SAME(got, len);
		get(to, bytes, len);
	}
	if (got > 0)
		CHECK(holds(bytes, len, seed + (uint32_t)!side->rank, 0));
	return errors + refused;
}

/* Two allocations on the first device. */
static void allocate(struct memory device[2])
{
	void *context;

	if (creates) {
		SAME(cuCtxCreate_v2(&context, 0, 0), 0);
		SAME(cuMemAllocAsync(&device[0].device, MOST, NULL) || cuMemAllocAsync(&device[1].device, MOST, NULL), 0);
		SAME(cuStreamSynchronize(NULL), 0);
		return;
	}
	SAME(cuDevicePrimaryCtxRetain(&context, 0), 0);
	SAME(cuCtxSetCurrent(context), 0);
	SAME(cuMemAlloc_v2(&device[0].device, MOST), 0);
	SAME(cuMemAlloc_v2(&device[1].device, MOST), 0);
}

static void all_kinds(struct side *side)
{
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_HMEM };
	struct memory device[2] = {{0}}, host[2] = {{0}};
	uint32_t seed = 1;
	int errors = 0, i, goes_on = is_busy || (closing && side->rank == 0);
	void *busy;

	SAME(cuInit(0), 0);
	allocate(device);
	for (i = 0; i < 2; i++)
		host[i].host = need(MOST);
	side_begin(side, &setup);
	if (goes_on)
		SAME(cuStreamCreate(&own_stream, 1) || cuStreamCreate(&busy, 0) || cuLaunchHostFunc(busy, work_on, &goes_on), 0);
	for (i = 0; i < ROUNDS * 12; i++, seed += 2) {
		if (anew || (closing && side->rank == 1)) {
			SAME(cuMemFree_v2(device[0].device) || cuMemFree_v2(device[1].device), 0);
			SAME(cuMemAlloc_v2(&device[0].device, MOST) || cuMemAlloc_v2(&device[1].device, MOST), 0);
		}
		if (resets && i % 12 == 0 && i) {
			barrier(side);
			SAME(cuDevicePrimaryCtxReset_v2(0), 0);
			allocate(device);
		}
		/* The kinds of both sides go through all four pairs. */
		const struct memory *from = i & 1 ? &device[0] : &host[0], *to = i & 2 ? &device[1] : &host[1];
		errors += exchange(side, from, to, lens[i / 4 % 3], seed);
	}
	barrier(side);
	if (__atomic_exchange_n(&goes_on, 0, __ATOMIC_ACQ_REL))
		SAME(cuStreamSynchronize(busy), 0);
	side_close(side);
	for (i = 0; i < 2; i++) {
		SAME(cuMemFree_v2(device[i].device), 0);
		free(host[i].host);
	}
	printf("  %d operations ended with an error\n", errors);
}

/* A send of the parent's device memory fails, and one of the host's does not. */
static void send_of_parents(struct side *side, const struct setup *setup, void *device)
{
	static struct fi_context2 contexts[2];
	static uint8_t bytes[100];
	struct fid_mr *all;

	side_begin(side, setup);
	/* All memory, as SHMEM registers it. */
	OK(fi_mr_reg(side->domain, NULL, SIZE_MAX, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 1, 0, &all, NULL));
	OK(fi_close(&all->fid));
	SAME(fi_tsend(side->ep, device, sizeof bytes, NULL, side->peer, 1, &contexts[0]), -FI_EIO);
	POST(side, fi_trecv(side->ep, bytes, sizeof bytes, NULL, side->peer, 2, 0, &contexts[0]));
	POST(side, fi_tsend(side->ep, bytes, sizeof bytes, NULL, side->peer, 2, &contexts[1]));
	completion(side->rx);
	completion(side->tx);
	side_end(side);
}

static void forked(struct side *side)
{
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_HMEM };
	struct memory device[2] = {{0}};
	int status = -1;
	pid_t child;

	SAME(cuInit(0), 0);
	allocate(device);
	/* The provider has looked for the driver before the fork. */
	fi_freeinfo(choose(&setup));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		send_of_parents(side, &setup, (void *)device[0].device);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	SAME(status, 0);
	SAME(cuMemFree_v2(device[0].device) || cuMemFree_v2(device[1].device), 0);
}

/* None of these operations fails, whatever the driver does. */
static void many_at_once(struct side *side)
{
	enum { MESSAGES = 16, LEN = MOST / MESSAGES };
	static struct fi_context2 contexts[2 * MESSAGES];
	static uint8_t bytes[LEN];
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_HMEM };
	struct memory device[2] = {{0}}, part;
	uint8_t *host = need(MOST);
	uint32_t i;

	SAME(cuInit(0), 0);
	allocate(device);
	side_begin(side, &setup);
	for (i = 0; i < MESSAGES; i++) {
		fill(bytes, LEN, i);
		part = (struct memory){ device[0].device + i * LEN, NULL };
		put(&part, bytes, LEN);
		part = (struct memory){ i % 2 ? 0 : device[1].device + i * LEN, host + i * LEN };
		POST(side, fi_trecv(side->ep, place(&part), LEN, NULL, side->peer, i, 0, &contexts[i]));
	}
	barrier(side);
	for (i = 0; i < MESSAGES; i++)
		POST(side, fi_tsend(side->ep, (void *)(device[0].device + i * LEN), LEN, NULL, side->peer, i, &contexts[MESSAGES + i]));
	for (i = 0; i < MESSAGES; i++)
		SAME(completion(side->rx).len, LEN);
	for (i = 0; i < MESSAGES; i++) {
		completion(side->tx);
		part = (struct memory){ i % 2 ? 0 : device[1].device + i * LEN, host + i * LEN };
		get(&part, bytes, LEN);
		CHECK(holds(bytes, LEN, i, 0));
	}
	side_end(side);
	SAME(cuMemFree_v2(device[0].device) || cuMemFree_v2(device[1].device), 0);
	free(host);
}

int main(int argc, char **argv)
{
	if (argc > 1)
		lens[2] = (size_t)atoi(argv[1]);
	CHECK(lens[2] <= MOST);
	is_busy = argc > 2 && !strcmp(argv[2], "busy");
	closing = argc > 2 && !strcmp(argv[2], "closing");
	anew = argc > 2 && !strcmp(argv[2], "anew");
	resets = argc > 2 && !strcmp(argv[2], "reset");
	creates = argc > 2 && !strcmp(argv[2], "created");
	if (argc > 2 && !strcmp(argv[2], "forked"))
		return run_story(forked, false, 50) ? 0 : 1;
	if (argc > 2 && !strcmp(argv[2], "ahead"))
		return run_story(many_at_once, false, 50) ? 0 : 1;
	return run_story(all_kinds, argc > 2 && !strcmp(argv[2], "threads"), 50) ? 0 : 1;
}
