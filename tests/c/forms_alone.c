/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* One-sided operations that rank 0 carries out alone in the memory of rank 1, where the node lets it. */
#include "all_forms.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define CAPS (FI_MSG | FI_TAGGED | FI_RMA | FI_RMA_EVENT)
#define RIGHTS (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define KEY 0xA10E0000u
#define LEN (256 << 10)

/* Whether such operations can work at all: both directions of cross-memory attach, and links that use it; or a device,
 * which is said to be there. */
static bool possible(struct side *me, char *memory)
{
	struct {
		uint64_t address;
		int64_t pid;
	} there = { (uintptr_t)memory, getpid() };
	const char *cma = getenv("FI_UDRV_CMA"), *shm = getenv("FI_UDRV_SHM");
	char byte = 0;

	if (me->rank == 1)
		tell(me, &there, sizeof(there));
	else
		hear(me, &there, sizeof(there));
	if (getenv("UDRV_TEST_DEVICE")) {
		if (me->rank == 1)
			hear(me, &byte, 1);
		else
			tell(me, &byte, 1);
		return true;
	}
	bool wanted = (!cma || !strcmp(cma, "auto")) && (!shm || strcmp(shm, "0"));
	if (me->rank == 0) {
		struct iovec to = { &byte, 1 }, from = { (void *)(uintptr_t)there.address, 1 };
		bool works = wanted && process_vm_readv((pid_t)there.pid, &to, 1, &from, 1, 0) == 1;

		tell(me, &works, sizeof(works));
		return works;
	}
	hear(me, &wanted, sizeof(wanted));
	return wanted;
}

static struct fid_mr *region(struct side *me, void *memory, uint64_t key)
{
	struct fid_mr *mr;

	OK(fi_mr_reg(me->domain, memory, LEN, RIGHTS, 0, key, 0, &mr, NULL));
	return mr;
}

/* The error of the next operation that ends, or 0. */
static int end_of(struct side *me)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double end = now() + PATIENCE_S;
	ssize_t n;

	while ((n = fi_cq_read(me->tx, &entry, 1)) == -FI_EAGAIN)
		CHECK(now() < end);
	if (n == 1)
		return 0;
	SAME(n, -FI_EAVAIL);
	SAME(fi_cq_readerr(me->tx, &error, 0), 1);
	return error.err;
}

static void write_one(struct side *me, char *local, size_t len, uint64_t key)
{
	POST(me, fi_write(me->ep, local, len, NULL, me->peer, 0, key, NULL));
}

static void read_one(struct side *me, char *local, size_t len, uint64_t key)
{
	POST(me, fi_read(me->ep, local, len, NULL, me->peer, 0, key, NULL));
}

/* Rank 1 calls nothing, and rank 0 writes and reads all the same; what it sends then comes after that. */
static void alone_while_computing(struct side *me)
{
	char *memory = need(LEN), *local = need(LEN), byte = 0;
	struct fid_mr *mr = NULL;

	side_begin(me, &(struct setup){ .caps = CAPS });
	if (me->rank == 1)
		mr = region(me, memory, KEY);
	bool alone = possible(me, memory);
	barrier(me);
	if (me->rank == 0) {
		/* From the first answers it knows where the region is; a device takes a moment longer. */
		double until = now() + (getenv("UDRV_TEST_DEVICE") ? 3 : 0);

		do {
			write_one(me, local, LEN, KEY);
			SAME(end_of(me), 0);
			read_one(me, local, LEN, KEY);
			SAME(end_of(me), 0);
		} while (now() < until);
	}
	barrier(me);
	if (alone && me->rank == 0) {
		for (uint32_t i = 0; i < 50; i++) {
			fill(local, LEN, i);
			write_one(me, local, LEN, KEY);
			SAME(end_of(me), 0);
			memset(local, 0, LEN);
			read_one(me, local, LEN, KEY);
			SAME(end_of(me), 0);
			CHECK(holds(local, LEN, i, 0));
		}
		POST(me, fi_tinject(me->ep, "x", 1, me->peer, 7));
		tell(me, "d", 1);
	} else if (alone) {
		hear(me, &byte, 1);
		CHECK(holds(memory, LEN, 49, 0));
		POST(me, fi_trecv(me->ep, &byte, 1, NULL, me->peer, 7, 0, NULL));
		completion(me->rx);
	}
	barrier(me);
	if (mr)
		OK(fi_close(&mr->fid));
	side_end(me);
	free(memory);
	free(local);
}

/* Once fi_close has returned, the memory of the region is its owner's alone. */
static void alone_until_closed(struct side *me)
{
	char *memory = need(LEN), *local = need(LEN);
	uint64_t random = 1;

	side_begin(me, &(struct setup){ .caps = CAPS });
	fill(local, LEN, 1);
	for (uint64_t round = 0; round < (slow ? 10u : 200u); round++) {
		uint64_t key = KEY + round % 3;
		size_t len = (size_t[]){ 20000, LEN, 100 }[round % 7 % 3];

		if (me->rank == 0) {
			barrier(me);
			for (int error = 0, pending = 0; !error || pending;) {
				while (!error && pending < 4) {
					write_one(me, local, len, key);
					pending++;
				}
				int found = end_of(me);
				pending--;
				if (found)
					SAME(error = found, FI_EKEYREJECTED);
			}
			barrier(me);
		} else {
			struct fid_mr *mr = region(me, memory, key);
			double until;

			barrier(me);
			/* Some of it by ourselves, some of it while we do something else. */
			while (!memory[0])
				progress(me);
			for (uint64_t i = next_random(&random) % 50; i > 0; i--)
				progress(me);
			for (until = now() + (double)(next_random(&random) % 300) * 1e-6; now() < until;)
				;
			OK(fi_close(&mr->fid));
			memset(memory, 0x5a, LEN);
			for (until = now() + 300e-6; now() < until;)
				;
			for (int i = 0; i < LEN; i++)
				if (memory[i] != 0x5a)
					FAIL("round %d: byte %d of a closed region was written", (int)round, i);
			memset(memory, 0, LEN);
			barrier(me);
		}
	}
	side_end(me);
	free(memory);
	free(local);
}

/*
 * The same while rank 0 is stopped in the middle of what it does there: fi_close returns, and what rank 0 was about to do
 * touches nothing when it goes on.
 */
static void alone_when_stopped(struct side *me)
{
	char *memory = need(LEN), *local = need(LEN);
	uint64_t random = 7;

	fill(local, LEN, 1);
	for (int round = 0; round < (slow ? 2 : 8); round++) {
		int64_t mine = getpid(), theirs;
		struct fid_mr *mr = NULL;

		side_begin(me, &(struct setup){ .caps = CAPS });
		tell(me, &mine, sizeof(mine));
		hear(me, &theirs, sizeof(theirs));
		if (me->rank == 1 && mine != theirs)
			mr = region(me, memory, KEY);
		barrier(me);
		if (mine == theirs) {
			/* It would stop itself. */
		} else if (me->rank == 0) {
			for (int error = 0, pending = 0; !error || pending;) {
				while (!error && pending < 4) {
					write_one(me, local, LEN, KEY);
					pending++;
				}
				int found = end_of(me);
				pending--;
				if (found)
					SAME(error = found, FI_EKEYREJECTED);
			}
		} else {
			double until, begun;
			int rc;

			while (!memory[0])
				progress(me);
			for (until = now() + 2e-3 + (double)(next_random(&random) % 500) * 1e-6; now() < until;)
				progress(me);
			kill((pid_t)theirs, SIGSTOP);
			begun = now();
			/* A process that has no processor is not stopped as yet. */
			while ((rc = fi_close(&mr->fid)) == -FI_EBUSY)
				CHECK(now() < begun + 20);
			OK(rc);
			memset(memory, 0x5a, LEN);
			kill((pid_t)theirs, SIGCONT);
			for (until = now() + 20e-3; now() < until;)
				progress(me);
			for (int i = 0; i < LEN; i++)
				if (memory[i] != 0x5a)
					FAIL("round %d: byte %d of a closed region was written", round, i);
			memset(memory, 0, LEN);
		}
		side_end(me);
	}
	free(memory);
	free(local);
}

/* A counter that comes to a region which rank 0 knows already, or to its endpoint, hears of everything from then on. */
static void heard_by(struct side *me, bool endpoint)
{
	enum { COUNT = 20 };
	char *memory = need(LEN), *local = need(LEN);
	struct fid_cntr *writes;
	struct fid_mr *mr = NULL;

	side_begin(me, &(struct setup){ .caps = CAPS });
	OK(fi_cntr_open(me->domain, &(struct fi_cntr_attr){ 0 }, &writes, NULL));
	if (me->rank == 1)
		mr = region(me, memory, KEY);
	barrier(me);
	for (int part = 0; part < 2; part++) {
		if (me->rank == 0) {
			for (int i = 0; i < COUNT; i++)
				write_one(me, local, LEN, KEY);
			for (int i = 0; i < COUNT; i++)
				SAME(end_of(me), 0);
			/* With remote data, rank 1 hears of it in any case. */
			POST(me, fi_writedata(me->ep, local, LEN, NULL, 42, me->peer, 0, KEY, NULL));
			SAME(end_of(me), 0);
		} else {
			SAME(completion(me->rx).data, 42);
		}
		barrier(me);
		SAME(fi_cntr_read(writes), part && me->rank ? COUNT + 1 : 0);
		if (mr && !part)
			OK(endpoint ? fi_ep_bind(me->ep, &writes->fid, FI_REMOTE_WRITE)
				    : fi_mr_bind(mr, &writes->fid, FI_REMOTE_WRITE));
		barrier(me);
	}
	if (mr)
		OK(fi_close(&mr->fid));
	if (endpoint)
		me->rma[REMOTE_WRITES] = writes;
	else
		OK(fi_close(&writes->fid));
	side_end(me);
	free(memory);
	free(local);
}

static void alone_unless_heard(struct side *me)
{
	heard_by(me, false);
}

static void alone_unless_counted(struct side *me)
{
	heard_by(me, true);
}

const struct group alone_groups[] = {
	{ "alone_while_computing", alone_while_computing },
	{ "alone_until_closed", alone_until_closed },
	{ "alone_when_stopped", alone_when_stopped },
	{ "alone_unless_heard", alone_unless_heard },
	{ "alone_unless_counted", alone_unless_counted },
	{ NULL, NULL },
};
