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

/* A child that closes everything and ends. It must not hang. */
static void child_closes(struct side *me)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		alarm(10);
		side_close(me);
		_exit(0);
	}
	SAME(waitpid(child, &status, 0), child);
	SAME(status, 0);
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

const struct group process_groups[] = {
	{ "forked-sleeper", forked_sleeper },
	{ "forked-descriptor", forked_descriptor },
	{ "forked-automatic", forked_automatic },
	{ "forked-threads", forked_threads },
	{ NULL, NULL },
};
