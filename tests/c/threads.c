/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * threads [--seconds N] [--threads N]
 *
 * Several threads of each of two processes exchange messages of random size, every byte of which is checked:
 * all through one endpoint and one pair of queues (FI_THREAD_SAFE), through one endpoint each in one domain, and
 * beside a thread that sleeps in a blocking read meanwhile. One line a group, then "N passed, N failed".
 */
#include "common.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_THREADS 8
#define LONGEST 200000
/* Messages that a thread keeps in flight in each direction. */
#define WINDOW 4

static double seconds = 3;
static int thread_count = 4;

/* One operation; the context of libfabric comes first. */
struct operation {
	struct fi_context context;
	struct worker *worker;
	char *buffer;
	/* Set by whichever thread reads its completion. */
	volatile bool done;
	size_t len;
	bool receives;
};

struct worker {
	struct side *side;
	struct fid_ep *ep;
	fi_addr_t peer;
	struct fid_cq *tx, *rx;
	int number;
	pthread_t thread;
	struct operation sends[WINDOW], receives[WINDOW];
	uint64_t received;
};

/* The length of the i-th message of a thread: mostly short, some of them long. */
static size_t length(int worker, uint64_t i)
{
	uint64_t state = (uint64_t)worker << 40 | i, kind = next_random(&state) % 10;

	return next_random(&state) % (kind < 6 ? 200 : kind < 9 ? 20000 : LONGEST);
}

static uint32_t seed(int rank, int worker, uint64_t i)
{
	return (uint32_t)(i * 16 + (uint64_t)worker * 2 + (uint64_t)rank);
}

/* Reads a few completions, whosoever they are. */
static void reap(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entries[8];
	ssize_t n = fi_cq_read(cq, entries, 8);

	if (n == -FI_EAGAIN)
		return;
	if (n < 0) {
		struct fi_cq_err_entry error = { 0 };

		fi_cq_readerr(cq, &error, 0);
		FAIL("fi_cq_read: %zd, error %d (%s)", n, error.err, fi_strerror(error.err));
	}
	for (ssize_t i = 0; i < n; i++) {
		struct operation *operation = entries[i].op_context;

		operation->len = entries[i].len;
		__atomic_store_n(&operation->done, true, __ATOMIC_RELEASE);
	}
}

static void wait_for(struct worker *worker, struct operation *operation)
{
	double end = now() + PATIENCE_S;

	while (!__atomic_load_n(&operation->done, __ATOMIC_ACQUIRE)) {
		reap(worker->tx);
		reap(worker->rx);
		if (now() > end)
			FAIL("thread %d: a %s takes more than %d s", worker->number,
			     operation->receives ? "receive" : "send", PATIENCE_S);
	}
}

#define POST_AS(worker, call) \
	do { \
		double end_ = now() + PATIENCE_S; \
		ssize_t rc_; \
		while ((rc_ = (call)) == -FI_EAGAIN) { \
			CHECK(now() < end_); \
			reap((worker)->tx); \
			reap((worker)->rx); \
		} \
		OK(rc_); \
	} while (0)

static void post_receive(struct worker *worker, uint64_t i)
{
	struct operation *operation = &worker->receives[i % WINDOW];

	operation->done = false;
	POST_AS(worker, fi_trecv(worker->ep, operation->buffer, LONGEST, NULL, FI_ADDR_UNSPEC,
				 (uint64_t)worker->number, 0, operation));
}

static void post_send(struct worker *worker, uint64_t i)
{
	struct operation *operation = &worker->sends[i % WINDOW];
	size_t len = length(worker->number, i);

	operation->done = false;
	fill(operation->buffer, len, seed(worker->side->rank, worker->number, i));
	POST_AS(worker, fi_tsend(worker->ep, operation->buffer, len, NULL, worker->peer, (uint64_t)worker->number,
				 operation));
}

/* Rounds of one window each; after a round both sides vote whether there is another one. */
static void *work(void *argument)
{
	struct worker *worker = argument;
	int other = 1 - worker->side->rank;
	double end = now() + seconds;
	uint64_t rounds = 0;
	bool last = false;

	for (uint64_t i = 0; i < WINDOW; i++)
		post_receive(worker, i);
	while (!last) {
		for (uint64_t i = 0; i < WINDOW; i++)
			post_send(worker, rounds * WINDOW + i);
		for (uint64_t i = 0; i < WINDOW; i++) {
			uint64_t n = rounds * WINDOW + i;
			struct operation *operation = &worker->receives[i];

			wait_for(worker, operation);
			SAME(operation->len, length(worker->number, n));
			CHECK(holds(operation->buffer, operation->len, seed(other, worker->number, n), 0));
		}
		for (uint64_t i = 0; i < WINDOW; i++)
			wait_for(worker, &worker->sends[i]);
		rounds++;
		/* The votes. */
		struct operation *in = &worker->receives[0], *out = &worker->sends[0];
		char *vote = out->buffer;

		post_receive(worker, 0);
		out->done = false;
		*vote = now() < end;
		last = !*vote;
		POST_AS(worker, fi_tsend(worker->ep, vote, 1, NULL, worker->peer, (uint64_t)worker->number, out));
		wait_for(worker, in);
		wait_for(worker, out);
		SAME(in->len, 1);
		last |= !*in->buffer;
		for (uint64_t i = 0; !last && i < WINDOW; i++)
			post_receive(worker, i);
	}
	worker->received = rounds * WINDOW;
	return NULL;
}

static void prepare(struct worker *worker, struct side *side, int number)
{
	*worker = (struct worker){ .side = side, .ep = side->ep, .peer = side->peer, .tx = side->tx, .rx = side->rx,
				   .number = number };
	for (int i = 0; i < WINDOW; i++) {
		worker->sends[i] = (struct operation){ .worker = worker, .buffer = need(LONGEST) };
		worker->receives[i] = (struct operation){ .worker = worker, .buffer = need(LONGEST), .receives = true };
	}
}

static void dispose(struct worker *worker)
{
	for (int i = 0; i < WINDOW; i++) {
		free(worker->sends[i].buffer);
		free(worker->receives[i].buffer);
	}
}

static void run_workers(struct side *me, struct worker *workers)
{
	uint64_t messages = 0;

	for (int i = 0; i < thread_count; i++)
		OK(pthread_create(&workers[i].thread, NULL, work, &workers[i]));
	for (int i = 0; i < thread_count; i++) {
		OK(pthread_join(workers[i].thread, NULL));
		messages += workers[i].received;
		dispose(&workers[i]);
	}
	if (me->rank == 0)
		printf("     %d threads a side, %llu messages each way\n", thread_count, (unsigned long long)messages);
}

static void one_endpoint(struct side *me)
{
	struct worker workers[MOST_THREADS];

	side_begin(me, &(struct setup){ .threading = FI_THREAD_SAFE });
	for (int i = 0; i < thread_count; i++)
		prepare(&workers[i], me, i);
	run_workers(me, workers);
	side_end(me);
}

static void one_endpoint_automatic(struct side *me)
{
	struct worker workers[MOST_THREADS];

	side_begin(me, &(struct setup){ .threading = FI_THREAD_SAFE, .progress = FI_PROGRESS_AUTO });
	for (int i = 0; i < thread_count; i++)
		prepare(&workers[i], me, i);
	run_workers(me, workers);
	side_end(me);
}

/* Each thread has an endpoint and queues of its own; the domain and its vector are shared. */
static void one_endpoint_each(struct side *me)
{
	struct worker workers[MOST_THREADS];
	char mine[NAME_MAX_LEN], theirs[NAME_MAX_LEN];
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED };

	side_begin(me, &(struct setup){ .threading = FI_THREAD_SAFE });
	for (int i = 0; i < thread_count; i++) {
		struct worker *worker = &workers[i];

		prepare(worker, me, i);
		OK(fi_cq_open(me->domain, &attr, &worker->tx, NULL));
		OK(fi_cq_open(me->domain, &attr, &worker->rx, NULL));
		OK(fi_endpoint(me->domain, me->info, &worker->ep, NULL));
		OK(fi_ep_bind(worker->ep, &me->av->fid, 0));
		OK(fi_ep_bind(worker->ep, &worker->tx->fid, FI_TRANSMIT));
		OK(fi_ep_bind(worker->ep, &worker->rx->fid, FI_RECV));
		OK(fi_enable(worker->ep));
		name_of(worker->ep, mine);
		tell(me, mine, sizeof(mine));
		hear(me, theirs, sizeof(theirs));
		worker->peer = insert(me, theirs);
	}
	run_workers(me, workers);
	/* Nobody leaves while the other side still reads. */
	barrier(me);
	for (int i = 0; i < thread_count; i++) {
		OK(fi_close(&workers[i].ep->fid));
		OK(fi_close(&workers[i].tx->fid));
		OK(fi_close(&workers[i].rx->fid));
	}
	side_end(me);
}

/* --- beside a sleeper --- */

struct sleeper {
	struct side *side;
	pthread_t thread;
	uint64_t woken;
	double slowest;
};

#define SLEEPER_TAG 1000
#define STOP_TAG 1001

/* Sleeps until a message comes, answers nothing, counts. The message carries the time at which it was sent. */
static void *sleep_and_count(void *argument)
{
	struct sleeper *sleeper = argument;
	struct side *me = sleeper->side;
	struct fi_context contexts[2];
	double sent;
	char stop;

	OK(fi_trecv(me->ep, &stop, 1, NULL, FI_ADDR_UNSPEC, STOP_TAG, 0, &contexts[1]));
	for (;;) {
		struct fi_cq_tagged_entry entry;
		ssize_t n;

		OK(fi_trecv(me->ep, &sent, sizeof(sent), NULL, FI_ADDR_UNSPEC, SLEEPER_TAG, 0, &contexts[0]));
		n = fi_cq_sread(me->rx, &entry, 1, NULL, PATIENCE_S * 1000);
		SAME(n, 1);
		if (entry.op_context == &contexts[1])
			break;
		if (now() - sent > sleeper->slowest)
			sleeper->slowest = now() - sent;
		sleeper->woken++;
	}
	OK(fi_cancel(&me->ep->fid, &contexts[0]));
	return NULL;
}

struct sender {
	struct side *side;
	pthread_t thread;
	uint64_t sent;
	int number;
};

static void *keep_sending(void *argument)
{
	struct sender *sender = argument;
	struct side *me = sender->side;
	uint64_t random = (uint64_t)sender->number + 1;
	double end = now() + seconds;

	while (now() < end) {
		double time = now();
		struct fi_cq_tagged_entry entry;
		ssize_t rc;

		while ((rc = fi_tinject(me->ep, &time, sizeof(time), me->peer, SLEEPER_TAG)) == -FI_EAGAIN)
			fi_cq_read(me->tx, &entry, 0);
		OK(rc);
		sender->sent++;
		sleep_ms((int)(next_random(&random) % 20));
	}
	return NULL;
}

/* One thread of each side sleeps in fi_cq_sread while the others send through the same endpoint. */
static void beside_a_sleeper(struct side *me)
{
	struct sleeper sleeper = { .side = me };
	struct sender senders[MOST_THREADS];
	uint64_t sent = 0, theirs;

	side_begin(me, &(struct setup){ .threading = FI_THREAD_SAFE, .wait_obj = FI_WAIT_FD });
	OK(pthread_create(&sleeper.thread, NULL, sleep_and_count, &sleeper));
	for (int i = 0; i < thread_count; i++) {
		senders[i] = (struct sender){ .side = me, .number = i };
		OK(pthread_create(&senders[i].thread, NULL, keep_sending, &senders[i]));
	}
	for (int i = 0; i < thread_count; i++) {
		OK(pthread_join(senders[i].thread, NULL));
		sent += senders[i].sent;
	}
	tell(me, &sent, sizeof(sent));
	hear(me, &theirs, sizeof(theirs));
	POST(me, fi_tinject(me->ep, "s", 1, me->peer, STOP_TAG));
	OK(pthread_join(sleeper.thread, NULL));
	SAME(sleeper.woken, theirs);
	SAME(failure(me->rx).err, FI_ECANCELED);
	if (sleeper.slowest > 0.4)
		FAIL("a message woke the sleeper after %.3f s", sleeper.slowest);
	if (me->rank == 0)
		printf("     1 sleeper and %d senders a side, %llu wake-ups, the slowest after %.1f ms\n", thread_count,
		       (unsigned long long)sleeper.woken, sleeper.slowest * 1e3);
	side_end(me);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		story story;
	} groups[] = {
		{ "one-endpoint", one_endpoint },
		{ "one-endpoint-automatic", one_endpoint_automatic },
		{ "one-endpoint-each", one_endpoint_each },
		{ "beside-a-sleeper", beside_a_sleeper },
	};
	int passed = 0, failed = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--seconds"))
			seconds = atof(argv[i + 1]);
		else if (!strcmp(argv[i], "--threads"))
			thread_count = atoi(argv[i + 1]);
		else
			FAIL("what is %s?", argv[i]);
	}
	CHECK(thread_count >= 1 && thread_count <= MOST_THREADS);
	for (size_t i = 0; i < sizeof(groups) / sizeof(*groups); i++) {
		double begun = now();
		bool good = run_story(groups[i].story, false, (int)seconds + 40);

		printf("%-4s %-24s %6.2f s\n", good ? "ok" : "FAIL", groups[i].name, now() - begun);
		*(good ? &passed : &failed) += 1;
	}
	printf("%d passed, %d failed\n", passed, failed);
	return failed > 0;
}
