/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * closing WHICH: one process, the owner, sends from device memory to the reader, which has that memory open, and has to close
 * it. It is linked with the double's libcuda.so.1.
 *
 * idle: the reader does not call udrv any more, and closes it all the same. The next message opens it again.
 *
 * death: so it does if the owner is killed.
 *
 * fork: a child of the reader closes the reader's endpoint, and nothing else: the reader goes on.
 *
 * reset: the reader's device is reset, and the reader opens other memory of the owner's, at the same address. That stays open.
 *
 * mapped, pool: the context of the reader ends, of which such memory is not. The reader closes it all the same.
 *
 * full: as close, and the reader may have no other allocation open. The owner is not asked for the descriptor of one.
 *
 * close, exit: a kernel of the reader does not end, for which a close waits. The owner has freed the memory, and its next message from
 * the same address arrives. The reader's fi_close returns, and its process ends.
 */
#include "kinds.h"

#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* CUipcMemHandle. */
struct handle { char bytes[64]; };
extern int cuDevicePrimaryCtxReset_v2(int), cuCtxCreate_v2(void **, unsigned, int), cuCtxDestroy_v2(void *);
extern int cuMemcpyHtoDAsync_v2(ptr, const void *, size_t, void *), cuMemcpyDtoHAsync_v2(void *, ptr, size_t, void *);
extern int cuStreamCreate(void **, unsigned), cuLaunchHostFunc(void *, void (*)(void *), void *);
extern int cuIpcGetMemHandle(struct handle *, ptr), cuIpcOpenMemHandle_v2(ptr *, struct handle, unsigned);
extern uint64_t fakeCudaCalls(const char *);

enum { LEN = 1 << 20, OWNER = 0 };
static enum { IDLE, DEATH, FORK, RESET, OF_CREATE, OF_POOL, FULL, CLOSE, EXIT, STORIES } which;
static const char *const names[] = { "idle", "death", "fork", "reset", "mapped", "pool", "full", "close", "exit" };
/* How many of both came to the end. */
static int *survivors;
static ptr device;
static struct block block;
static void *context;
/* It waits for no other stream. */
static void *own_stream;

static uint64_t opened(void) { return fakeCudaCalls("cuIpcOpenMemHandle_v2"); }
static uint64_t closes(void) { return fakeCudaCalls("cuIpcCloseMemHandle"); }

/* A message from the owner's memory to the reader's. */
static void message(struct side *side, uint32_t seed)
{
	static struct fi_context2 context;
	static uint8_t bytes[LEN];

	if (side->rank == OWNER) {
		fill(bytes, LEN, seed);
		SAME(cuMemcpyHtoDAsync_v2(device, bytes, LEN, own_stream) || cuStreamSynchronize(own_stream), 0);
		POST(side, fi_tsend(side->ep, (void *)device, LEN, NULL, side->peer, seed, &context));
		completion(side->tx);
	} else {
		POST(side, fi_trecv(side->ep, (void *)device, LEN, NULL, side->peer, seed, 0, &context));
		SAME(completion(side->rx).len, LEN);
		SAME(cuMemcpyDtoHAsync_v2(bytes, device, LEN, own_stream) || cuStreamSynchronize(own_stream), 0);
		CHECK(holds(bytes, LEN, seed, 0));
	}
	barrier(side);
}

/* Waits until as much is closed as was opened, without a call of udrv. */
static void wait_for_close(void)
{
	double end = now() + PATIENCE_S;

	while (closes() < opened()) {
		if (now() > end)
			FAIL("%d allocations are still open", (int)(opened() - closes()));
		sleep_ms(10);
	}
}

static void reader_is_idle(struct side *side)
{
	char done = 0;

	if (side->rank == OWNER) {
		hear(side, &done, 1);
	} else {
		wait_for_close();
		tell(side, &done, 1);
	}
	message(side, 2);
	SAME(opened(), side->rank == OWNER ? 0 : 2);
	side_end(side);
}

static void owner_dies(struct side *side)
{
	if (side->rank == OWNER)
		raise(SIGKILL);
	wait_for_close();
	side_close(side);
}

static void reader_forks(struct side *side)
{
	int status = -1;
	pid_t child;

	if (side->rank != OWNER) {
		child = fork();
		CHECK(child >= 0);
		if (!child) {
			alarm((unsigned)PATIENCE_S);
			side_close(side);
			_exit(closes() != 0);
		}
		CHECK(waitpid(child, &status, 0) == child);
		SAME(status, 0);
	}
	message(side, 2);
	SAME(opened(), side->rank == OWNER ? 0 : 1);
	side_end(side);
}

static void device_is_reset(struct side *side)
{
	static uint8_t bytes[LEN];
	struct handle handle;
	ptr other;

	if (side->rank == OWNER) {
		fill(bytes, LEN, 3);
		SAME(cuMemAlloc_v2(&other, LEN) || cuMemcpyHtoD_v2(other, bytes, LEN) || cuIpcGetMemHandle(&handle, other), 0);
		tell(side, &handle, sizeof handle);
	} else {
		hear(side, &handle, sizeof handle);
		SAME(cuDevicePrimaryCtxReset_v2(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context), 0);
		/* That had the higher address. */
		SAME(cuMemAlloc_v2(&device, LEN) || cuIpcOpenMemHandle_v2(&other, handle, 1), 0);
	}
	barrier(side);
	side_close(side);
	if (side->rank != OWNER) {
		SAME(cuMemcpyDtoH_v2(bytes, other, LEN), 0);
		CHECK(holds(bytes, LEN, 3, 0));
	}
	barrier(side);
}

static void context_ends(struct side *side)
{
	if (side->rank != OWNER) {
		SAME(cuCtxDestroy_v2(context), 0);
		side_close(side);
		CHECK(fakeCudaCalls("cuMemMap") + fakeCudaCalls("cuMemPoolImportPointer") > 0);
		SAME(fakeCudaCalls("cuMemUnmap"), fakeCudaCalls("cuMemMap"));
		SAME(fakeCudaCalls("cuMemPoolDestroy"), fakeCudaCalls("cuMemPoolImportFromShareableHandle"));
		SAME(cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) || cuMemAlloc_v2(&device, LEN), 0);
		barrier(side);
		return;
	}
	barrier(side);
	side_close(side);
	end_block(&block);
	SAME(cuMemAlloc_v2(&device, LEN), 0);
}

static void work_for_ever(void *unused)
{
	(void)unused;
	for (;;)
		sleep_ms(1000);
}

/* Stops nothing but the close. */
static void reader_works(struct side *side)
{
	void *busy;

	if (side->rank == OWNER && which == FULL) {
		device = make_block(&block, MAPPED, LEN);
	} else if (side->rank == OWNER) {
		SAME(cuMemFree_v2(device) || cuMemAlloc_v2(&device, LEN), 0);
	} else {
		SAME(cuStreamCreate(&busy, 0) || cuLaunchHostFunc(busy, work_for_ever, NULL), 0);
	}
	message(side, 2);
	SAME(closes(), side->rank == OWNER ? 0 : 1);
	SAME(fakeCudaCalls("cuMemExportToShareableHandle"), 0);
	if (side->rank == OWNER || which != EXIT)
		side_close(side);
	++*survivors;
	exit(0);
}

static void close_what_is_open(struct side *side)
{
	static void (*const stories[])(struct side *) = {
		reader_is_idle, owner_dies, reader_forks, device_is_reset, context_ends, context_ends, reader_works, reader_works, reader_works
	};
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_HMEM };
	bool by_handle = stories[which] != context_ends;

	SAME(cuInit(0), 0);
	if (by_handle || side->rank == OWNER)
		SAME(cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context), 0);
	else
		SAME(cuCtxCreate_v2(&context, 0, 0), 0);
	SAME(cuStreamCreate(&own_stream, 1), 0);
	if (by_handle || side->rank != OWNER)
		SAME(cuMemAlloc_v2(&device, LEN), 0);
	else
		device = make_block(&block, which == OF_POOL ? POOL : MAPPED, LEN);
	side_begin(side, &setup);
	message(side, 1);
	SAME(opened(), by_handle && side->rank != OWNER);
	stories[which](side);
	SAME(cuMemFree_v2(device), 0);
	++*survivors;
}

int main(int argc, char **argv)
{
	bool good;

	while (argc > 1 && which < STORIES && strcmp(names[which], argv[1]))
		which++;
	CHECK(argc > 1 && which < STORIES);
	survivors = mmap(NULL, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(survivors != MAP_FAILED);
	good = run_story(close_what_is_open, false, 60);
	return which == DEATH ? good || *survivors != 1 : !good || *survivors != 2;
}
