/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Which receive a message meets, and receives that meet none: multi-receive, sources, peeking, cancelling, cutting. */
#include "all_forms.h"

#include <rdma/fi_rma.h>

#include <stdlib.h>
#include <string.h>

/* Eager and rendezvous. */
static const size_t two_sizes[] = { 300, 50000 };

/* A multi-receive buffer takes messages one behind the other and goes back with the last one that fits. */
static void fill_buffer(struct side *me, size_t len, size_t capacity, size_t least, bool expected)
{
	size_t count = (capacity - least) / len + 1, used = 0;
	struct fi_context context;
	char *buffer = need(capacity);

	if (me->rank == 1) {
		struct iovec part = { buffer, capacity };
		struct fi_msg msg = { .msg_iov = &part, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = &context };

		OK(fi_setopt(&me->ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &least, sizeof(least)));
		if (!expected)
			barrier(me);
		POST(me, fi_recvmsg(me->ep, &msg, FI_MULTI_RECV | FI_COMPLETION));
		if (expected)
			barrier(me);
		for (size_t i = 0; i < count; i++) {
			struct fi_cq_tagged_entry entry = completion(me->rx);

			CHECK(entry.op_context == &context);
			SAME(entry.len, len);
			/* The order of completions is free; the place tells which message it is. */
			SAME(((char *)entry.buf - buffer) % (long)len, 0);
			CHECK(holds(entry.buf, len, (uint32_t)(((char *)entry.buf - buffer) / (long)len), 0));
			used += len;
			SAME((entry.flags & FI_MULTI_RECV) != 0, i == count - 1);
		}
		CHECK(capacity - used < least);
	} else {
		struct fi_context *contexts = need(count * sizeof(*contexts));
		char *messages = need(count * len);

		if (expected)
			barrier(me);
		for (size_t i = 0; i < count; i++) {
			fill(messages + i * len, len, (uint32_t)i);
			POST(me, fi_send(me->ep, messages + i * len, len, NULL, me->peer, &contexts[i]));
		}
		if (!expected)
			barrier(me);
		for (size_t i = 0; i < count; i++)
			completion(me->tx);
		free(contexts);
		free(messages);
	}
	barrier(me);
	free(buffer);
}

static void multi_receive(struct side *me)
{
	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_MULTI_RECV });
	for (int expected = 0; expected < 2; expected++) {
		fill_buffer(me, 100, 10000, 1000, expected);
		fill_buffer(me, 1, 100, 50, expected);
		fill_buffer(me, 30000, 200000, 30000, expected);
	}
	side_end(me);
}

/* Where completions are suppressed, the one with which a buffer goes back is not. */
static void multi_receive_silent(struct side *me)
{
	size_t least = 100;
	struct setup setup = { .caps = FI_MSG | FI_MULTI_RECV, .bind_flags = FI_SELECTIVE_COMPLETION };

	side_begin(me, &setup);
	OK(fi_setopt(&me->ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &least, sizeof(least)));
	for (int round = 0; round < 4; round++) {
		/* Eager and rendezvous, before and after the receive. */
		size_t len = two_sizes[round / 2], capacity = 10 * len;
		char *buffer = need(capacity);
		struct iovec part = { buffer, me->rank ? capacity : len };
		struct fi_context context;
		struct fi_msg msg = { .msg_iov = &part, .iov_count = 1, .context = &context };

		msg.addr = me->rank ? FI_ADDR_UNSPEC : me->peer;
		fill(buffer, len, 1);
		if (me->rank == 1) {
			if (round % 2)
				barrier(me);
			POST(me, fi_recvmsg(me->ep, &msg, FI_MULTI_RECV));
			if (round % 2 == 0)
				barrier(me);
			struct fi_cq_tagged_entry entry = completion(me->rx);

			CHECK(entry.op_context == &context);
			SAME(entry.len, len);
			SAME(entry.flags & FI_MULTI_RECV, FI_MULTI_RECV);
			nothing_in(me->rx, 20);
			for (size_t i = 0; i < 10; i++)
				CHECK(holds(buffer + i * len, len, 1, 0));
		} else {
			if (round % 2 == 0)
				barrier(me);
			for (int i = 0; i < 10; i++)
				POST(me, fi_sendmsg(me->ep, &msg, i == 9 ? FI_COMPLETION : 0));
			if (round % 2)
				barrier(me);
			completion(me->tx);
		}
		barrier(me);
		free(buffer);
	}
	side_end(me);
}

/* A multi-receive buffer as the endpoint's default, cancelled after it has taken a message. */
static void multi_receive_cancelled(struct side *me)
{
	struct fi_context context;
	char buffer[4096];

	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_TAGGED | FI_MULTI_RECV, .rx_op_flags = FI_MULTI_RECV });
	/* The default is not for tagged messages. */
	struct iovec part = { buffer, 8 };
	struct fi_msg_tagged tagged = { .msg_iov = &part, .iov_count = 1, .addr = me->peer, .context = &context };

	SAME(fi_trecvmsg(me->ep, &tagged, FI_MULTI_RECV), -FI_EINVAL);
	POST(me, fi_trecv(me->ep, buffer, 8, NULL, me->peer, 3, 0, &context));
	POST(me, fi_tinject(me->ep, "tagged", 7, me->peer, 3));
	SAME(completion(me->rx).flags, FI_TAGGED | FI_RECV);
	if (me->rank == 1) {
		POST(me, fi_recv(me->ep, buffer, sizeof(buffer), NULL, FI_ADDR_UNSPEC, &context));
		barrier(me);
		SAME(completion(me->rx).flags & FI_MULTI_RECV, 0);
		OK(fi_cancel(&me->ep->fid, &context));
		struct fi_cq_err_entry error = failure(me->rx);
		SAME(error.err, FI_ECANCELED);
		CHECK(error.op_context == &context);
	} else {
		barrier(me);
		POST(me, fi_inject(me->ep, "hello", 5, me->peer));
	}
	side_end(me);
}

/* Two endpoints of rank 0 send to rank 1, which wants them in another order than they send. */
static void sources(struct side *me)
{
	uint64_t caps = FI_MSG | FI_TAGGED | FI_DIRECTED_RECV | FI_SOURCE;
	struct fi_context contexts[2];
	char name[NAME_MAX_LEN], *buffer = need(50000);

	side_begin(me, &(struct setup){ .caps = caps });
	if (me->rank == 0) {
		struct fid_ep *second = another_endpoint(me), *stranger = another_endpoint(me);

		name_of(second, name);
		tell(me, name, sizeof(name));
		for (size_t i = 0; i < 2; i++) {
			for (int tagged = 0; tagged < 2; tagged++) {
				struct fid_ep *senders[2] = { me->ep, second };

				barrier(me);
				fill(buffer, two_sizes[i], 9);
				for (int s = 0; s < 2; s++) {
					if (tagged)
						POST(me, fi_tsend(senders[s], buffer, two_sizes[i] - (size_t)s, NULL,
								  me->peer, 3, &contexts[s]));
					else
						POST(me, fi_send(senders[s], buffer, two_sizes[i] - (size_t)s, NULL,
								 me->peer, &contexts[s]));
				}
				completion(me->tx);
				completion(me->tx);
			}
		}
		barrier(me);
		POST(me, fi_inject(stranger, "who", 3, me->peer));
		barrier(me);
		OK(fi_close(&second->fid));
		OK(fi_close(&stranger->fid));
	} else {
		fi_addr_t from[2] = { me->peer, 0 }, source;

		hear(me, name, sizeof(name));
		from[1] = insert(me, name);
		for (size_t i = 0; i < 2; i++) {
			for (int tagged = 0; tagged < 2; tagged++) {
				/* First the second one. In the first round before the messages come. */
				if (i == 1) {
					barrier(me);
					sleep_ms(50);
				}
				for (int s = 1; s >= 0; s--) {
					if (tagged)
						POST(me, fi_trecv(me->ep, buffer, 50000, NULL, from[s], 3, 0,
								  &contexts[s]));
					else
						POST(me, fi_recv(me->ep, buffer, 50000, NULL, from[s], &contexts[s]));
				}
				if (i == 0)
					barrier(me);
				for (int n = 0; n < 2; n++) {
					struct fi_cq_tagged_entry entry = completion_from(me->rx, &source);
					int s = entry.op_context == &contexts[1];

					SAME(source, from[s]);
					SAME(entry.len, two_sizes[i] - (size_t)s);
				}
			}
		}
		/* A receive from someone is not for others. */
		POST(me, fi_recv(me->ep, buffer, 3, NULL, from[1], &contexts[1]));
		POST(me, fi_recv(me->ep, buffer, 3, NULL, FI_ADDR_UNSPEC, &contexts[0]));
		barrier(me);
		CHECK(completion_from(me->rx, &source).op_context == &contexts[0]);
		SAME(source, FI_ADDR_NOTAVAIL);
		OK(fi_cancel(&me->ep->fid, &contexts[1]));
		SAME(failure(me->rx).err, FI_ECANCELED);
		barrier(me);
	}
	side_end(me);
	free(buffer);
}

static void ask(struct side *me, uint64_t tag, void *buffer, size_t len, void *context, uint64_t flags)
{
	struct iovec part = { buffer, len };
	struct fi_msg_tagged msg = { .msg_iov = &part, .iov_count = len ? 1 : 0, .addr = FI_ADDR_UNSPEC, .tag = tag,
				     .context = context };

	POST(me, fi_trecvmsg(me->ep, &msg, flags));
}

/* Asks until the message is there. */
static struct fi_cq_tagged_entry peek(struct side *me, uint64_t tag, void *context, uint64_t flags)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double end = now() + PATIENCE_S;
	ssize_t n;

	for (;;) {
		ask(me, tag, NULL, 0, context, flags | FI_PEEK);
		while ((n = fi_cq_read(me->rx, &entry, 1)) == -FI_EAGAIN)
			CHECK(now() < end);
		if (n == 1)
			break;
		SAME(n, -FI_EAVAIL);
		SAME(fi_cq_readerr(me->rx, &error, 0), 1);
		SAME(error.err, FI_ENOMSG);
		CHECK(error.op_context == context);
		CHECK(now() < end);
	}
	CHECK(entry.op_context == context);
	return entry;
}

/* The results of looks are in the queue alone, and always: counters count messages. */
static void peeks_are_not_counted(struct side *me)
{
	struct fi_context contexts[2];
	char buffer[8];

	side_begin(me, &(struct setup){ .caps = FI_TAGGED, .counters = true, .bind_flags = FI_SELECTIVE_COMPLETION });
	if (me->rank == 0) {
		barrier(me);
		POST(me, fi_tinject(me->ep, "seen", 4, me->peer, 1));
		barrier(me);
		side_end(me);
		return;
	}
	for (int i = 0; i < 3; i++) {
		ask(me, 1, NULL, 0, &contexts[0], FI_PEEK);
		SAME(failure(me->rx).err, FI_ENOMSG);
	}
	SAME(fi_cntr_readerr(me->received), 0);
	barrier(me);
	/* On a selective queue, without FI_COMPLETION. */
	SAME(peek(me, 1, &contexts[0], 0).len, 4);
	SAME(peek(me, 1, &contexts[0], FI_CLAIM).len, 4);
	SAME(fi_cntr_read(me->received), 0);
	SAME(fi_cntr_readerr(me->received), 0);
	ask(me, 1, buffer, sizeof(buffer), &contexts[0], FI_CLAIM | FI_COMPLETION);
	SAME(completion(me->rx).len, 4);
	SAME(fi_cntr_read(me->received), 1);
	barrier(me);
	side_end(me);
}

static void peeking(struct side *me)
{
	struct fi_context contexts[2];
	char *buffer = need(50000);

	peeks_are_not_counted(me);
	side_begin(me, &(struct setup){ .caps = FI_TAGGED });
	for (size_t i = 0; i < 2; i++) {
		size_t len = two_sizes[i];

		if (me->rank == 0) {
			barrier(me);
			for (uint64_t tag = 1; tag <= 5; tag++) {
				fill(buffer, len, (uint32_t)tag);
				POST(me, fi_tsenddata(me->ep, buffer, len, NULL, tag * 11, me->peer, tag, &contexts[0]));
				completion(me->tx);
			}
			barrier(me);
			continue;
		}
		ask(me, 1, NULL, 0, &contexts[0], FI_PEEK);
		SAME(failure(me->rx).err, FI_ENOMSG);
		barrier(me);
		/* Looked at, then received as usual. */
		struct fi_cq_tagged_entry entry = peek(me, 1, &contexts[0], 0);
		SAME(entry.len, len);
		SAME(entry.tag, 1);
		SAME(entry.data, 11);
		POST(me, fi_trecv(me->ep, buffer, len, NULL, FI_ADDR_UNSPEC, 1, 0, &contexts[1]));
		SAME(completion(me->rx).len, len);
		CHECK(holds(buffer, len, 1, 0));
		/* Claimed: hidden from others. */
		SAME(peek(me, 2, &contexts[0], FI_CLAIM).len, len);
		ask(me, 2, NULL, 0, &contexts[1], FI_PEEK);
		SAME(failure(me->rx).err, FI_ENOMSG);
		ask(me, 2, buffer, len, &contexts[0], FI_CLAIM);
		SAME(completion(me->rx).len, len);
		CHECK(holds(buffer, len, 2, 0));
		/* Claimed and thrown away. */
		SAME(peek(me, 3, &contexts[0], FI_CLAIM).len, len);
		/* The buffers of such a call are not looked at. */
		ask(me, 3, NULL, 100, &contexts[0], FI_CLAIM | FI_DISCARD);
		CHECK(completion(me->rx).op_context == &contexts[0]);
		/* Thrown away where it was seen. */
		peek(me, 4, &contexts[0], 0);
		ask(me, 4, NULL, 100, &contexts[0], FI_PEEK | FI_DISCARD);
		SAME(completion(me->rx).len, len);
		ask(me, 4, NULL, 0, &contexts[0], FI_PEEK);
		SAME(failure(me->rx).err, FI_ENOMSG);
		/* What is left is untouched. */
		POST(me, fi_trecv(me->ep, buffer, len, NULL, FI_ADDR_UNSPEC, 0, UINT64_MAX, &contexts[1]));
		SAME(completion(me->rx).tag, 5);
		CHECK(holds(buffer, len, 5, 0));
		barrier(me);
	}
	side_end(me);
	free(buffer);
}

static void cancelling(struct side *me)
{
	struct fi_context contexts[4], unknown;
	char buffer[4][64];

	side_begin(me, &(struct setup){ 0 });
	if (me->rank == 1) {
		for (int i = 0; i < 3; i++)
			POST(me, fi_trecv(me->ep, buffer[i], 64, NULL, FI_ADDR_UNSPEC, 1, 0, &contexts[i]));
		POST(me, fi_recv(me->ep, buffer[3], 64, NULL, FI_ADDR_UNSPEC, &contexts[3]));
		CHECK(fi_cancel(&me->ep->fid, &unknown) != -FI_ENOSYS);
		OK(fi_cancel(&me->ep->fid, &contexts[1]));
		struct fi_cq_err_entry error = failure(me->rx);
		SAME(error.err, FI_ECANCELED);
		CHECK(error.op_context == &contexts[1]);
		SAME(error.flags & (FI_RECV | FI_TAGGED), FI_RECV | FI_TAGGED);
		OK(fi_cancel(&me->ep->fid, &contexts[3]));
		error = failure(me->rx);
		SAME(error.err, FI_ECANCELED);
		SAME(error.flags & (FI_RECV | FI_MSG), FI_RECV | FI_MSG);
		barrier(me);
		CHECK(completion(me->rx).op_context == &contexts[0]);
		CHECK(completion(me->rx).op_context == &contexts[2]);
		nothing_in(me->rx, 20);
	} else {
		barrier(me);
		POST(me, fi_tinject(me->ep, "a", 1, me->peer, 1));
		POST(me, fi_tinject(me->ep, "b", 1, me->peer, 1));
	}
	side_end(me);
}

/* A message longer than its buffer: the buffer is filled, the rest is counted and lost, the sender succeeds. */
static void truncating(struct side *me)
{
	struct fi_context context;
	char *buffer = need(100008);

	side_begin(me, &(struct setup){ 0 });
	for (int expected = 0; expected < 2; expected++) {
		for (int i = 0; i < 6; i++) {
			size_t len = (size_t[]){ 1, 64, 5000, 16384, 16385, 100000 }[i], room = len * 2 / 3;

			if (me->rank == 0) {
				fill(buffer, len, 77);
				if (expected)
					barrier(me);
				POST(me, fi_tsend(me->ep, buffer, len, NULL, me->peer, 8, &context));
				if (!expected)
					barrier(me);
				completion(me->tx);
				continue;
			}
			memset(buffer, 0xAB, 100008);
			if (!expected)
				barrier(me);
			POST(me, fi_trecv(me->ep, buffer, room, NULL, FI_ADDR_UNSPEC, 8, 0, &context));
			if (expected)
				barrier(me);
			struct fi_cq_err_entry error = failure(me->rx);
			SAME(error.err, FI_ETRUNC);
			SAME(error.len, room);
			SAME(error.olen, len - room);
			SAME(error.tag, 8);
			CHECK(error.op_context == &context);
			CHECK(holds(buffer, room, 77, 0));
			SAME((unsigned char)buffer[room], 0xAB);
			char text[200] = "";
			CHECK(strlen(fi_cq_strerror(me->rx, error.prov_errno, error.err_data, text, sizeof(text))) > 0);
		}
	}
	side_end(me);
	free(buffer);
}

/* A receive from a peer that was inserted twice stays one from this peer when one of the entries is removed, although
 * another peer gets the place of that. */
static void inserted_twice(struct side *me)
{
	char buffer[2][8], name[NAME_MAX_LEN];
	struct fi_context contexts[2];

	side_begin(me, &(struct setup){ .caps = FI_TAGGED | FI_DIRECTED_RECV });
	if (me->rank == 0) {
		fi_addr_t again, own;

		hear(me, name, sizeof(name));
		again = insert(me, name);
		POST(me, fi_trecv(me->ep, buffer[0], 8, NULL, again, 1, 0, &contexts[0]));
		OK(fi_av_remove(me->av, &me->peer, 1, 0));
		name_of(me->ep, name);
		own = insert(me, name);
		SAME(own, me->peer);
		POST(me, fi_trecv(me->ep, buffer[1], 8, NULL, own, 1, 0, &contexts[1]));
		POST(me, fi_tinject(me->ep, "own", 4, own, 1));
		CHECK(completion(me->rx).op_context == &contexts[1]);
		me->peer = again;
		tell(me, "send", 4);
		CHECK(completion(me->rx).op_context == &contexts[0]);
		CHECK(!strcmp(buffer[0], "his") && !strcmp(buffer[1], "own"));
	} else {
		name_of(me->ep, name);
		tell(me, name, sizeof(name));
		hear(me, buffer[0], 4);
		POST(me, fi_tinject(me->ep, "his", 4, me->peer, 1));
	}
	side_end(me);
}

/* Operations that cannot be. */
static void refusals(struct side *me)
{
	struct fi_context context;
	size_t inject, most;
	char *buffer = need(1 << 20);

	side_begin(me, &(struct setup){ 0 });
	inject = me->info->tx_attr->inject_size;
	CHECK(inject < 1 << 20);
	CHECK(fi_inject(me->ep, buffer, inject + 1, me->peer) < 0);
	CHECK(fi_send(me->ep, buffer, 1, NULL, me->peer + 1000, &context) < 0);
	most = me->info->tx_attr->iov_limit;
	struct iovec parts[16] = { { 0 } };
	CHECK(most < 16);
	CHECK(fi_sendv(me->ep, parts, NULL, most + 1, me->peer, &context) < 0);
	CHECK(fi_recvv(me->ep, parts, NULL, most + 1, FI_ADDR_UNSPEC, &context) < 0);
	SAME(fi_write(me->ep, buffer, 1, NULL, me->peer, 0, 0, &context), -FI_EOPNOTSUPP);
	nothing_in(me->tx, 0);
	nothing_in(me->rx, 0);
	side_end(me);
	free(buffer);
}

const struct group matching_groups[] = {
	{ "multi-receive", multi_receive },
	{ "multi-receive-silent", multi_receive_silent },
	{ "multi-receive-cancelled", multi_receive_cancelled },
	{ "sources", sources },
	{ "peeking", peeking },
	{ "cancelling", cancelling },
	{ "truncating", truncating },
	{ "inserted-twice", inserted_twice },
	{ "refusals", refusals },
	{ NULL, NULL },
};
