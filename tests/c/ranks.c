/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * ranks PROCESSES [ROUNDS]
 * ranks --endpoints ENDPOINTS
 *
 * What the processes of one node hold. PROCESSES meet in a barrier, and then each sends 8 bytes to each other. Prints
 * the most that one has: `descriptors` (with the three standard ones, without what it had before it opened the
 * endpoint), `threads`, `pss_kib`, `page_tables_kib`; what all have together, `all_pss_kib`; the time of the first barrier, `barrier_us`; and
 * what an fi_cq_read that finds nothing costs one of them while the others sleep, `empty_ps`, picoseconds. With ROUNDS, each
 * sends 8 bytes to each other so many times more, and that is all that is done: prints the time of a message, `message_ns`.
 *
 * Or one process opens ENDPOINTS, each with a queue. Prints what they hold: `descriptors` a hundred endpoints, rounded
 * up, and `threads` of the process.
 *
 * The provider is UDRV_TEST_PROVIDER, default udrv.
 */
#include "common.h"

#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* Each process makes a link to each other one: on two processors, 1024 of them take minutes. */
#define LONG_PATIENCE_S (patience_s(150) + processes * processes / 4096)
/* Empty reads are timed in batches, of which the fastest tenth counts: others run meanwhile. */
enum { BATCHES = 4000, BATCH = 50 };
enum { BARRIERS = 8 };

/* In memory that all processes share. */
struct rank {
	char name[NAME_MAX_LEN];
	long descriptors, threads, pss_kib, page_tables_kib, barrier_us, round_ns;
};
struct shared {
	int arrived[BARRIERS];
	long empty_ps;
	struct rank ranks[];
};

static const struct setup setup = { .threading = FI_THREAD_DOMAIN, .one_queue = true, .cq_size = 8192 };
static struct shared *shared;
static int processes, rounds;

static long entries(const char *path)
{
	DIR *folder = opendir(path);
	long count = -2;

	CHECK(folder);
	while (readdir(folder))
		count++;
	closedir(folder);
	return count;
}

/* Without the one that reads them. */
static long descriptors(void)
{
	return entries("/proc/self/fd") - 1;
}

/* The number that follows `name` at the beginning of a line of a file. */
static long number_in(const char *path, const char *name)
{
	FILE *file = fopen(path, "r");
	char line[256];
	long number = 0;

	CHECK(file);
	while (fgets(line, sizeof(line), file))
		if (strncmp(line, name, strlen(name)) == 0)
			number = atol(line + strlen(name));
	fclose(file);
	return number;
}

/* All processes are here. Peers are answered meanwhile, if `side` is given. */
static void gather(struct side *side, int which)
{
	double end = now() + LONG_PATIENCE_S;

	__atomic_add_fetch(&shared->arrived[which], 1, __ATOMIC_SEQ_CST);
	while (__atomic_load_n(&shared->arrived[which], __ATOMIC_SEQ_CST) < processes) {
		for (int i = 0; side && i < 8; i++)
			progress(side);
		sleep_ms(10);
		if (now() > end)
			FAIL("barrier %d: not all are there", which);
	}
}

struct mailbox {
	fi_addr_t *all;
	/* What this process sends: its number; and the numbers that arrived, in the order of the receives. */
	uint64_t word, *heard;
	int posted;
	int sends, receives;
	double end;
	/* Two for each receive: psm3 keeps its own state there. */
	struct fi_context2 *contexts;
};

/* The first process that none of the receives since `from` has heard from; or -1. */
static int silent(const struct mailbox *box, int from)
{
	for (int peer = 0; peer < processes; peer++) {
		int found = peer == (int)box->word;

		for (int i = from; i < box->posted && !found; i++)
			found = box->heard[i] == (uint64_t)peer;
		if (!found)
			return peer;
	}
	return -1;
}

/* Reads what there is; lets others run if that is nothing. */
static void take(struct side *side, struct mailbox *box)
{
	struct fi_cq_tagged_entry entries[16];
	ssize_t n = fi_cq_read(side->tx, entries, 16);

	for (ssize_t i = 0; i < n; i++)
		*(entries[i].flags & FI_RECV ? &box->receives : &box->sends) -= 1;
	if (n < 0 && n != -FI_EAGAIN)
		completion(side->tx);
	if (n == -FI_EAGAIN)
		sched_yield();
	if (now() > box->end)
		FAIL("process %d, %s: %d sends and %d receives are missing, of %d receives; silent: %d", side->rank,
		     shared->ranks[side->rank].name, box->sends, box->receives, box->posted,
		     silent(box, box->posted - (processes - 1)));
}

static void post(struct side *side, struct mailbox *box, int to, uint64_t tag)
{
	ssize_t rc;

	box->sends++;
	box->receives++;
	while ((rc = fi_trecv(side->ep, &box->heard[box->posted], sizeof(*box->heard), NULL, FI_ADDR_UNSPEC, tag, 0,
			      &box->contexts[2 * box->posted])) == -FI_EAGAIN)
		take(side, box);
	OK(rc);
	while ((rc = fi_tsend(side->ep, &box->word, sizeof(box->word), NULL, box->all[to], tag,
			      &box->contexts[2 * box->posted + 1])) == -FI_EAGAIN)
		take(side, box);
	OK(rc);
	box->posted++;
}

static void wait_all(struct side *side, struct mailbox *box)
{
	while (box->sends > 0 || box->receives > 0)
		take(side, box);
}

/* A barrier in which process i hears from those 1, 2, 4 ... before it. */
static void first_barrier(struct side *side, struct mailbox *box)
{
	double begun = now();

	for (int step = 1; step < processes; step *= 2) {
		post(side, box, (side->rank + step) % processes, (uint64_t)step);
		wait_all(side, box);
	}
	shared->ranks[side->rank].barrier_us = (long)((now() - begun) * 1e6);
}

/* Both ends of each pair send once. */
static void all_to_all(struct side *side, struct mailbox *box, int round)
{
	for (int step = 1; step < processes; step++)
		post(side, box, (side->rank + step) % processes, (uint64_t)(1 << 20) + (uint64_t)round);
	wait_all(side, box);
}

static void many_rounds(struct side *side, struct mailbox *box)
{
	double begun = now();

	for (int round = 1; round <= rounds; round++) {
		box->posted = 0;
		all_to_all(side, box, round);
	}
	shared->ranks[side->rank].round_ns = (long)((now() - begun) / rounds * 1e9);
}

static int earlier(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static void time_empty_reads(struct side *side)
{
	static double took[BATCHES];
	struct fi_cq_tagged_entry entry;

	for (int i = 0; i < BATCHES; i++) {
		double begun = now();

		for (int j = 0; j < BATCH; j++)
			SAME(fi_cq_read(side->tx, &entry, 1), -FI_EAGAIN);
		took[i] = (now() - begun) / BATCH;
	}
	qsort(took, BATCHES, sizeof(*took), earlier);
	shared->empty_ps = (long)(took[BATCHES / 10] * 1e12);
}

static void one(int rank)
{
	struct rank *mine = &shared->ranks[rank];
	struct side side = { .rank = rank };
	struct mailbox box = { .all = need((size_t)processes * sizeof(*box.all)), .end = now() + LONG_PATIENCE_S };
	long before = descriptors();

	box.word = (uint64_t)rank;
	box.heard = need((size_t)(processes + 64) * sizeof(*box.heard));
	memset(box.heard, 0xff, (size_t)(processes + 64) * sizeof(*box.heard));
	box.contexts = need(2 * (size_t)(processes + 64) * sizeof(*box.contexts));
	side_open(&side, &setup);
	name_of(side.ep, mine->name);
	gather(NULL, 0);
	for (int i = 0; i < processes; i++)
		box.all[i] = insert(&side, shared->ranks[i].name);
	gather(&side, 1);
	first_barrier(&side, &box);
	gather(&side, 2);
	all_to_all(&side, &box, 0);
	gather(&side, 3);
	if (rounds) {
		many_rounds(&side, &box);
		gather(&side, 7);
		side_close(&side);
		exit(0);
	}
	/* Until the answers to all links are read, and those that have nothing to say are known to be idle. */
	for (double end = now() + 0.5; now() < end; sleep_ms(10))
		progress(&side);
	gather(&side, 4);
	mine->descriptors = 3 + descriptors() - before;
	mine->threads = entries("/proc/self/task");
	mine->pss_kib = number_in("/proc/self/smaps_rollup", "Pss:");
	mine->page_tables_kib = number_in("/proc/self/status", "VmPTE:");
	gather(NULL, 5);
	if (rank == 0)
		time_empty_reads(&side);
	gather(NULL, 6);
	side_close(&side);
	exit(0);
}

static int many_processes(void)
{
	size_t len = sizeof(*shared) + (size_t)processes * sizeof(struct rank);
	struct rank most = { .descriptors = 0 };
	int status, bad = 0;
	long all_pss_kib = 0;

	shared = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED);
	/* libfabric reads /proc/kallsyms when it begins, which takes it longer than all that is measured here. */
	fi_freeinfo(choose(&setup));
	for (int i = 0; i < processes; i++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (child == 0)
			one(i);
	}
	for (int i = 0; i < processes; i++) {
		CHECK(wait(&status) > 0);
		bad += status != 0;
	}
	if (bad)
		FAIL("%d of %d processes came to a bad end", bad, processes);
#define MOST(what) most.what = shared->ranks[i].what > most.what ? shared->ranks[i].what : most.what
	for (int i = 0; i < processes; i++) {
		MOST(descriptors);
		MOST(threads);
		MOST(pss_kib);
		MOST(page_tables_kib);
		MOST(barrier_us);
		MOST(round_ns);
		all_pss_kib += shared->ranks[i].pss_kib;
	}
	if (rounds)
		printf("message_ns=%ld\n", most.round_ns / (processes * (processes - 1L)));
	else
		printf("descriptors=%ld threads=%ld pss_kib=%ld page_tables_kib=%ld all_pss_kib=%ld barrier_us=%ld empty_ps=%ld\n",
		       most.descriptors, most.threads, most.pss_kib, most.page_tables_kib, all_pss_kib, most.barrier_us,
		       shared->empty_ps);
	return 0;
}

static int many_endpoints(int count)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .size = 64 };
	struct side side = { .rank = 0 };
	struct fid_ep **eps = need((size_t)count * sizeof(*eps));
	struct fid_cq **cqs = need((size_t)count * sizeof(*cqs));
	long before, held, threads;

	side_open(&side, &setup);
	before = descriptors();
	for (int i = 0; i < count; i++) {
		OK(fi_cq_open(side.domain, &attr, &cqs[i], NULL));
		OK(fi_endpoint(side.domain, side.info, &eps[i], NULL));
		OK(fi_ep_bind(eps[i], &side.av->fid, 0));
		OK(fi_ep_bind(eps[i], &cqs[i]->fid, FI_TRANSMIT | FI_RECV));
		OK(fi_enable(eps[i]));
	}
	held = (100 * (descriptors() - before) + count - 1) / count;
	threads = entries("/proc/self/task");
	for (int i = 0; i < count; i++) {
		OK(fi_close(&eps[i]->fid));
		OK(fi_close(&cqs[i]->fid));
	}
	side_close(&side);
	printf("descriptors=%ld threads=%ld\n", held, threads);
	return 0;
}

int main(int argc, char **argv)
{
	int endpoints = argc == 3 && strcmp(argv[1], "--endpoints") == 0 ? atoi(argv[2]) : 0;

	processes = endpoints == 0 && (argc == 2 || argc == 3) ? atoi(argv[1]) : 0;
	rounds = argc == 3 ? atoi(argv[2]) : 0;
	if (endpoints > 0)
		return many_endpoints(endpoints);
	if (processes > 1)
		return many_processes();
	fprintf(stderr, "usage: ranks PROCESSES [ROUNDS] | ranks --endpoints ENDPOINTS\n");
	return 2;
}
