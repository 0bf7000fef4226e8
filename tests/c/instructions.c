/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * instructions BYTES ROUNDS [one|vector|message]
 *
 * Two processes in lockstep: one posts a receive, the other sends BYTES and reads its completion, then the first reads
 * its own, ROUNDS times. Nobody looks before there is something to see, so that instructions can be counted:
 * those of `measured` and below (callgrind --toggle-collect=measured, of both processes) are what ROUNDS messages take.
 * As many before them do not count. `idle` is ROUNDS looks of the second process that find nothing.
 *
 * The last argument is the form of the calls: fi_tsend and fi_trecv, fi_tsendv and fi_trecvv, or fi_tsendmsg and
 * fi_trecvmsg, each with one buffer. No bytes are sent from no buffer.
 *
 * The provider is UDRV_TEST_PROVIDER, default udrv.
 */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t bytes;
static int rounds;
static enum form { ONE, VECTOR, MESSAGE } form;

static void await(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	double end = 0;
	ssize_t n;

	while ((n = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN) {
		if (end == 0)
			end = now() + PATIENCE_S;
		if (now() > end)
			FAIL("no completion for %d s", PATIENCE_S);
	}
	if (n != 1)
		completion(cq);
}

enum step { POST_RECEIVE, SEND, RECEIVE };

static void take_step(struct side *side, enum step step, uint8_t *buffer)
{
	/* psm3 keeps something there (FI_CONTEXT). */
	static struct fi_context2 sending, receiving;

	void *context = step == SEND ? &sending : &receiving;
	struct iovec iov = { bytes > 0 ? buffer : NULL, bytes };
	struct fi_msg_tagged message = {
		.msg_iov = &iov, .iov_count = 1, .addr = side->peer, .tag = 1, .context = context,
	};

	switch (step) {
	case POST_RECEIVE:
		switch (form) {
		case ONE:
			POST(side, fi_trecv(side->ep, iov.iov_base, bytes, NULL, side->peer, 1, 0, context));
			break;
		case VECTOR:
			POST(side, fi_trecvv(side->ep, &iov, NULL, 1, side->peer, 1, 0, context));
			break;
		case MESSAGE:
			POST(side, fi_trecvmsg(side->ep, &message, FI_COMPLETION));
			break;
		}
		break;
	case SEND:
		switch (form) {
		case ONE:
			POST(side, fi_tsend(side->ep, iov.iov_base, bytes, NULL, side->peer, 1, context));
			break;
		case VECTOR:
			POST(side, fi_tsendv(side->ep, &iov, NULL, 1, side->peer, 1, context));
			break;
		case MESSAGE:
			POST(side, fi_tsendmsg(side->ep, &message, FI_COMPLETION));
			break;
		}
		await(side->tx);
		break;
	case RECEIVE:
		await(side->rx);
		break;
	}
}

/* What counts, and the same that does not. */
__attribute__((noinline)) void measured(struct side *side, enum step step, uint8_t *buffer)
{
	take_step(side, step, buffer);
	__asm__ volatile("");
}

__attribute__((noinline)) static void warm_up(struct side *side, enum step step, uint8_t *buffer)
{
	take_step(side, step, buffer);
	__asm__ volatile("" ::: "memory");
}

/* What looks take that find nothing. */
__attribute__((noinline)) void idle(struct side *side)
{
	struct fi_cq_tagged_entry entry;

	SAME(fi_cq_read(side->rx, &entry, 1), -FI_EAGAIN);
	__asm__ volatile("");
}

static void lockstep(struct side *side)
{
	static const struct setup setup = { .caps = FI_TAGGED, .threading = FI_THREAD_DOMAIN };
	uint8_t *buffer = need(bytes), go = 0;

	side_begin(side, &setup);
	for (int i = 0; i < 2 * rounds; i++) {
		void (*take)(struct side *, enum step, uint8_t *) = i < rounds ? warm_up : measured;

		if (side->rank == 0) {
			hear(side, &go, 1);
			take(side, SEND, buffer);
			tell(side, &go, 1);
		} else {
			take(side, POST_RECEIVE, buffer);
			tell(side, &go, 1);
			/* The first ones may need both sides. */
			if (i == 0)
				await(side->rx);
			hear(side, &go, 1);
			if (i > 0)
				take(side, RECEIVE, buffer);
		}
	}
	if (side->rank == 1)
		for (int i = 0; i < rounds; i++)
			idle(side);
	free(buffer);
	side_end(side);
}

int main(int argc, char **argv)
{
	static const char *const forms[] = { "one", "vector", "message" };
	bool known = argc == 3;

	for (int i = 0; argc == 4 && i < 3; i++)
		if (strcmp(argv[3], forms[i]) == 0) {
			form = (enum form)i;
			known = true;
		}
	bytes = known ? strtoul(argv[1], NULL, 10) : 0;
	rounds = known ? atoi(argv[2]) : 0;
	if (rounds < 1) {
		fprintf(stderr, "usage: instructions BYTES ROUNDS [one|vector|message]\n");
		return 2;
	}
	return run_story(lockstep, false, 600) ? 0 : 1;
}
