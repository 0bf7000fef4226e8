/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * instructions BYTES ROUNDS [one|vector|message|context|hmem|detects]
 *
 * Two processes in lockstep: one posts a receive, the other sends BYTES and reads its completion, then the first reads
 * its own, ROUNDS times. Nobody looks before there is something to see, so that instructions can be counted:
 * those of `measured` and below (callgrind --toggle-collect=measured, of both processes) are what ROUNDS messages take.
 * As many before them do not count. `idle` is ROUNDS looks of the second process that find nothing.
 *
 * The last argument is the form of the calls: fi_tsend and fi_trecv, fi_tsendv and fi_trecvv, or fi_tsendmsg and
 * fi_trecvmsg, each with one buffer; or fi_tsend and fi_trecv of contexts of scalable endpoints; or the same of endpoints that
 * may send from and receive into device memory (FI_HMEM), which they learn from descriptors or (detects) find out. No bytes
 * are sent from no buffer.
 *
 * The provider is UDRV_TEST_PROVIDER, default udrv.
 */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t bytes;
static int rounds;
static enum form { ONE, VECTOR, MESSAGE, CONTEXT, HMEM, DETECTS } form;
/* What sends and receives. */
static struct fid_ep *sender, *receiver;

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

/* What a call is given. */
struct call {
	struct side *side;
	struct iovec iov;
	struct fi_msg_tagged message;
};

/* The calls alone take the same number of instructions each time, while looks for completions depend on the clock. */
__attribute__((noinline)) void post_receive(const struct call *c)
{
	struct side *side = c->side;
	void *context = c->message.context;

	if (form == VECTOR)
		POST(side, fi_trecvv(receiver, &c->iov, NULL, 1, side->peer, 1, 0, context));
	else if (form == MESSAGE)
		POST(side, fi_trecvmsg(receiver, &c->message, FI_COMPLETION));
	else
		POST(side, fi_trecv(receiver, c->iov.iov_base, bytes, NULL, side->peer, 1, 0, context));
}

__attribute__((noinline)) void post_send(const struct call *c)
{
	struct side *side = c->side;
	void *context = c->message.context;

	if (form == VECTOR)
		POST(side, fi_tsendv(sender, &c->iov, NULL, 1, side->peer, 1, context));
	else if (form == MESSAGE)
		POST(side, fi_tsendmsg(sender, &c->message, FI_COMPLETION));
	else
		POST(side, fi_tsend(sender, c->iov.iov_base, bytes, NULL, side->peer, 1, context));
}

static void take_step(struct side *side, enum step step, uint8_t *buffer)
{
	/* psm3 keeps something there (FI_CONTEXT). */
	static struct fi_context2 sending, receiving;

	struct call call = { .side = side, .iov = { bytes > 0 ? buffer : NULL, bytes } };
	call.message = (struct fi_msg_tagged) {
		.msg_iov = &call.iov, .iov_count = 1, .addr = side->peer, .tag = 1, .context = step == SEND ? &sending : &receiving,
	};

	switch (step) {
	case POST_RECEIVE:
		post_receive(&call);
		break;
	case SEND:
		post_send(&call);
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

/* The side has a scalable endpoint instead of its own, of whose contexts those of number 1 send and receive. */
static void open_contexts(struct side *side)
{
	struct fi_av_attr attr = { .rx_ctx_bits = 1 };
	struct fid_ep *scalable, *ordinary = side->ep;
	struct fid_av *av = side->av;

	side->info->ep_attr->tx_ctx_cnt = side->info->ep_attr->rx_ctx_cnt = 2;
	OK(fi_av_open(side->domain, &attr, &side->av, NULL));
	OK(fi_scalable_ep(side->domain, side->info, &scalable, NULL));
	OK(fi_scalable_ep_bind(scalable, &side->av->fid, 0));
	OK(fi_tx_context(scalable, 1, NULL, &sender, NULL));
	OK(fi_rx_context(scalable, 1, NULL, &receiver, NULL));
	OK(fi_ep_bind(sender, &side->tx->fid, FI_TRANSMIT));
	OK(fi_ep_bind(receiver, &side->rx->fid, FI_RECV));
	OK(fi_enable(sender));
	OK(fi_enable(receiver));
	OK(fi_enable(scalable));
	OK(fi_close(&ordinary->fid));
	OK(fi_close(&av->fid));
	side->ep = scalable;
	meet(side);
	side->peer = fi_rx_addr(side->peer, 1, 1);
}

static void lockstep(struct side *side)
{
	struct setup setup = { .caps = FI_TAGGED, .threading = FI_THREAD_DOMAIN };
	uint8_t *buffer = need(bytes), go = 0;

	if (form == HMEM || form == DETECTS)
		setup.caps |= FI_HMEM;
	if (form == HMEM)
		setup.mr_mode = FI_MR_HMEM | FI_MR_ENDPOINT | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR;
	side_begin(side, &setup);
	CHECK((form == HMEM) == !!(side->info->domain_attr->mr_mode & FI_MR_HMEM));
	sender = receiver = side->ep;
	if (form == CONTEXT)
		open_contexts(side);
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
	barrier(side);
	if (form == CONTEXT) {
		OK(fi_close(&sender->fid));
		OK(fi_close(&receiver->fid));
	}
	side_close(side);
}

int main(int argc, char **argv)
{
	static const char *const forms[] = { "one", "vector", "message", "context", "hmem", "detects" };
	bool known = argc == 3;

	for (int i = 0; argc == 4 && i < 6; i++)
		if (strcmp(argv[3], forms[i]) == 0) {
			form = (enum form)i;
			known = true;
		}
	bytes = known ? strtoul(argv[1], NULL, 10) : 0;
	rounds = known ? atoi(argv[2]) : 0;
	if (rounds < 1) {
		fprintf(stderr, "usage: instructions BYTES ROUNDS [one|vector|message|context|hmem|detects]\n");
		return 2;
	}
	return run_story(lockstep, false, 600) ? 0 : 1;
}
