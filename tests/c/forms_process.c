/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* What an application does with its process: children that close what they inherited, threads that are cancelled. */
#include "all_forms.h"

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define LARGE (4 << 20)
/* No wake-up takes so long, s. */
#define LATE_S 5

/* --- forked children --- */

void in_child(void (*work)(void *), void *argument)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		alarm(10);
		work(argument);
		_exit(0);
	}
	SAME(waitpid(child, &status, 0), child);
	SAME(status, 0);
}

static void close_side(void *me)
{
	side_close(me);
}

/* A child that closes everything and ends. */
static void child_closes(struct side *me)
{
	in_child(close_side, me);
}

/* Waits for the next completion until it is late. */
static void wait_for_one(struct side *me, enum fi_wait_obj how)
{
	struct fi_cq_tagged_entry entry;
	struct fid *objects[] = { &me->rx->fid };
	double begun = now();
	int fd;

	if (how == FI_WAIT_UNSPEC) {
		SAME(fi_cq_sread(me->rx, &entry, 1, NULL, 4 * LATE_S * 1000), 1);
	} else {
		OK(fi_control(&me->rx->fid, FI_GETWAIT, &fd));
		while (fi_cq_read(me->rx, &entry, 1) != 1) {
			struct pollfd poll_fd = { .fd = fd, .events = POLLIN };

			CHECK(now() - begun < 4 * LATE_S);
			if (!fi_trywait(me->fabric, objects, 1))
				poll(&poll_fd, 1, 4 * LATE_S * 1000);
		}
	}
	CHECK(now() - begun < (slow ? 4 * LATE_S : LATE_S));
}

static void forked(struct side *me, enum fi_wait_obj how, enum fi_progress kind)
{
	char *memory = need(LARGE);
	char gone;

	side_begin(me, &(struct setup){ .wait_obj = how, .progress = kind, .threading = FI_THREAD_SAFE });
	for (int round = 0; round < 3; round++) {
		if (me->rank == 0) {
			POST(me, fi_trecv(me->ep, memory, LARGE, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
			tell(me, "", 1);
			wait_for_one(me, how);
			CHECK(holds(memory, LARGE, (uint32_t)round, 0));
			child_closes(me);
		} else {
			fill(memory, LARGE, (uint32_t)round);
			hear(me, &gone, 1);
			POST(me, fi_tsend(me->ep, memory, LARGE, NULL, me->peer, 1, NULL));
			completion(me->tx);
		}
	}
	side_end(me);
	free(memory);
}

static void forked_sleeper(struct side *me)
{
	forked(me, FI_WAIT_UNSPEC, FI_PROGRESS_MANUAL);
}

static void forked_descriptor(struct side *me)
{
	forked(me, FI_WAIT_FD, FI_PROGRESS_MANUAL);
}

static void forked_automatic(struct side *me)
{
	forked(me, FI_WAIT_UNSPEC, FI_PROGRESS_AUTO);
}

static volatile bool polling;

static void *poll_on(void *argument)
{
	struct side *me = argument;
	struct fi_cq_tagged_entry entry;

	while (polling)
		fi_cq_read(me->rx, &entry, 1);
	return NULL;
}

/* Threads are inside, with a lock, when children are forked. */
static void forked_threads(struct side *me)
{
	pthread_t threads[2];

	side_begin(me, &(struct setup){ .threading = FI_THREAD_SAFE });
	if (me->rank == 0) {
		polling = true;
		for (int i = 0; i < 2; i++)
			SAME(pthread_create(&threads[i], NULL, poll_on, me), 0);
		for (int i = 0; i < (slow ? 5 : 50); i++)
			child_closes(me);
		polling = false;
		for (int i = 0; i < 2; i++)
			pthread_join(threads[i], NULL);
	}
	side_end(me);
}

/* --- cancelled threads --- */

static void *wait_in_queue(void *argument)
{
	struct side *me = argument;
	struct fi_cq_tagged_entry entry;

	fi_cq_sread(me->rx, &entry, 1, NULL, -1);
	return NULL;
}

static void *wait_in_counter(void *argument)
{
	struct side *me = argument;

	fi_cntr_wait(me->received, 1000, -1);
	return NULL;
}

static void *wait_in_events(void *argument)
{
	uint32_t event;
	char entry[128];

	fi_eq_sread(argument, &event, entry, sizeof(entry), -1, 0);
	return NULL;
}

/* A thread that waits in a call is cancelled, and what it waited for goes on. */
static void cancel_in(void *(*wait)(void *), void *argument)
{
	pthread_t thread;
	void *result;

	SAME(pthread_create(&thread, NULL, wait, argument), 0);
	sleep_ms(100);
	SAME(pthread_cancel(thread), 0);
	SAME(pthread_join(thread, &result), 0);
	CHECK(result == PTHREAD_CANCELED);
}

static void cancelled(struct side *me)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fi_cq_tagged_entry entry;
	struct fid_eq *eq;
	uint64_t out = 7, in = 0;

	side_begin(me, &(struct setup){ .wait_obj = FI_WAIT_UNSPEC, .threading = FI_THREAD_SAFE, .counters = true });
	OK(fi_eq_open(me->fabric, &attr, &eq, NULL));
	for (int round = 0; round < 2; round++) {
		cancel_in(wait_in_queue, me);
		cancel_in(wait_in_counter, me);
		cancel_in(wait_in_events, eq);
		SAME(fi_cq_read(me->rx, &entry, 1), -FI_EAGAIN);
		POST(me, fi_trecv(me->ep, &in, sizeof(in), NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
		POST(me, fi_tsend(me->ep, &out, sizeof(out), NULL, me->peer, 1, NULL));
		SAME(fi_cq_sread(me->rx, &entry, 1, NULL, PATIENCE_S * 1000), 1);
		SAME(in, 7);
		completion(me->tx);
		barrier(me);
	}
	OK(fi_close(&eq->fid));
	side_end(me);
}

static void exchange(struct side *from, struct side *to, fi_addr_t peer, char *out, char *in, size_t len)
{
	struct fi_cq_tagged_entry entry;
	bool sent = false, received = false;
	double begun = now();

	fill(out, len, (uint32_t)len);
	POST(to, fi_trecv(to->ep, in, len, NULL, FI_ADDR_UNSPEC, len, 0, NULL));
	POST(from, fi_tsend(from->ep, out, len, NULL, peer, len, NULL));
	while (!sent || !received) {
		sent |= fi_cq_read(from->tx, &entry, 1) == 1;
		received |= fi_cq_read(to->rx, &entry, 1) == 1;
		CHECK(now() - begun < PATIENCE_S);
	}
	CHECK(holds(in, len, (uint32_t)len, 0));
}

/* Talks and closes while it is cancelled already: no call of udrv is a point where it ends. */
static void *all_while_cancelled(void *argument)
{
	static const size_t lens[] = { 8, 5000, 100000, LARGE };
	struct side from = { 0 }, to = { 0 };
	struct setup setup = { .threading = FI_THREAD_SAFE };
	char *out = need(LARGE), *in = need(LARGE), name[NAME_MAX_LEN];
	fi_addr_t peer;

	side_open(&from, &setup); /* libfabric itself has such points there */
	side_open(&to, &setup);
	pthread_cancel(pthread_self());
	name_of(to.ep, name);
	peer = insert(&from, name);
	for (int i = 0; i < 4; i++)
		exchange(&from, &to, peer, out, in, lens[i]);
	side_close(&from);
	side_close(&to);
	free(out);
	free(in);
	*(bool *)argument = true;
	pthread_testcancel();
	return NULL;
}

static void cancelled_before(struct side *me)
{
	bool done = false;
	pthread_t thread;
	void *result;

	if (me->rank == 0) {
		SAME(pthread_create(&thread, NULL, all_while_cancelled, &done), 0);
		SAME(pthread_join(thread, &result), 0);
		CHECK(done);
		CHECK(result == PTHREAD_CANCELED);
	}
}

const struct group process_groups[] = {
	{ "forked-sleeper", forked_sleeper },
	{ "forked-descriptor", forked_descriptor },
	{ "forked-automatic", forked_automatic },
	{ "forked-threads", forked_threads },
	{ "cancelled", cancelled },
	{ "cancelled-before", cancelled_before },
	{ NULL, NULL },
};
