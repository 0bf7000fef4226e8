/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* When an operation completes, and how its completion looks: selective queues, levels, fences, formats, counters. */
#include "all_forms.h"

#include <stdlib.h>
#include <string.h>

/* Eager and rendezvous. */
static const size_t two_sizes[] = { 300, 50000 };

/* Only operations that ask get an entry; failures always do. */
static void selective(struct side *me)
{
	struct fi_context context;
	char *buffer = need(50000);

	side_begin(me, &(struct setup){ .bind_flags = FI_SELECTIVE_COMPLETION });
	for (int i = 0; i < 2; i++) {
		struct iovec part = { buffer, two_sizes[i] };
		struct fi_msg_tagged msg = { .msg_iov = &part, .iov_count = 1, .addr = me->peer, .tag = 2,
					     .context = &context };

		if (me->rank == 0) {
			POST(me, fi_tsend(me->ep, buffer, two_sizes[i], NULL, me->peer, 1, NULL));
			POST(me, fi_tsendmsg(me->ep, &msg, 0));
			POST(me, fi_tsendmsg(me->ep, &msg, FI_COMPLETION));
			CHECK(completion(me->tx).op_context == &context);
			nothing_in(me->tx, 20);
			msg.tag = 3;
			POST(me, fi_tsendmsg(me->ep, &msg, FI_COMPLETION));
			completion(me->tx);
		} else {
			msg.addr = FI_ADDR_UNSPEC;
			POST(me, fi_trecv(me->ep, buffer, two_sizes[i], NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
			POST(me, fi_trecvmsg(me->ep, &msg, 0));
			POST(me, fi_trecvmsg(me->ep, &msg, FI_COMPLETION));
			CHECK(completion(me->rx).op_context == &context);
			nothing_in(me->rx, 20);
			POST(me, fi_trecv(me->ep, buffer, 7, NULL, FI_ADDR_UNSPEC, 3, 0, &context));
			SAME(failure(me->rx).err, FI_ETRUNC);
		}
		barrier(me);
	}
	side_end(me);
	free(buffer);
}

/* With FI_COMPLETION as the endpoint's default, plain calls get entries although the queue is selective. */
static void selective_by_default(struct side *me)
{
	struct fi_context context;
	char buffer[8] = "";

	side_begin(me, &(struct setup){ .bind_flags = FI_SELECTIVE_COMPLETION,
					.tx_op_flags = FI_COMPLETION, .rx_op_flags = FI_COMPLETION });
	POST(me, fi_recv(me->ep, buffer, 8, NULL, FI_ADDR_UNSPEC, &context));
	POST(me, fi_send(me->ep, "bytes", 5, NULL, me->peer, &context));
	SAME(completion(me->tx).flags & FI_SEND, FI_SEND);
	SAME(completion(me->rx).len, 5);
	POST(me, fi_inject(me->ep, "bytes", 5, me->peer));
	nothing_in(me->tx, 20);
	side_end(me);
}

/* What a completion promises at each level. */
static void levels(struct side *me)
{
	static const uint64_t flags[] = {
		0, FI_INJECT, FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE, FI_DELIVERY_COMPLETE,
		FI_INJECT | FI_DELIVERY_COMPLETE, FI_MORE, FI_TRANSMIT_COMPLETE | FI_MORE,
	};
	struct fi_context context;
	char *buffer = need(50000);

	side_begin(me, &(struct setup){ 0 });
	for (size_t f = 0; f < sizeof(flags) / sizeof(*flags); f++) {
		for (int i = 0; i < 2; i++) {
			struct iovec part = { buffer, two_sizes[i] };
			struct fi_msg msg = { .msg_iov = &part, .iov_count = 1, .addr = me->peer,
					      .context = &context };
			bool delivery = flags[f] & FI_DELIVERY_COMPLETE;

			if (flags[f] & FI_INJECT && two_sizes[i] > me->info->tx_attr->inject_size)
				continue;
			if (me->rank == 0) {
				fill(buffer, two_sizes[i], (uint32_t)f);
				POST(me, fi_sendmsg(me->ep, &msg, flags[f] | FI_COMPLETION));
				if (flags[f] & FI_INJECT)
					memset(buffer, 0, two_sizes[i]);
				if (delivery)
					nothing_in(me->tx, 50);
				barrier(me);
				CHECK(completion(me->tx).op_context == &context);
			} else {
				barrier(me);
				POST(me, fi_recv(me->ep, buffer, two_sizes[i], NULL, FI_ADDR_UNSPEC, &context));
				completion(me->rx);
				CHECK(holds(buffer, two_sizes[i], (uint32_t)f, 0));
			}
			barrier(me);
		}
	}
	side_end(me);
	free(buffer);
}

/* Whether a send completes before anybody receives its message. */
static bool completes_alone(struct side *me, const void *buffer, size_t len)
{
	struct fi_cq_tagged_entry entry;
	double end = now() + 0.5;
	ssize_t n;

	POST(me, fi_send(me->ep, buffer, len, NULL, me->peer, NULL));
	do {
		n = fi_cq_read(me->tx, &entry, 1);
		CHECK(n == 1 || n == -FI_EAGAIN);
	} while (n != 1 && now() < end);
	return n == 1;
}

/*
 * What is complete before anybody received it arrives though its sender closes. Within a node that is what is pushed,
 * and FI_UDRV_PUSH_MAX says that all of these are.
 */
static void outliving(struct side *me)
{
	static const size_t sizes[] = { 300, 50000, 300000, 1000000 };
	char *buffer = need(1000000);

	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		bool alone = false;

		side_begin(me, &(struct setup){ 0 });
		if (me->rank == 0) {
			fill(buffer, sizes[i], (uint32_t)i);
			alone = completes_alone(me, buffer, sizes[i]);
			CHECK(alone || !getenv("FI_UDRV_PUSH_MAX"));
			tell(me, &alone, sizeof(alone));
			if (alone)
				memset(buffer, 0, sizes[i]);
			else
				completion(me->tx);
			side_close(me);
			if (alone)
				barrier(me);
		} else {
			hear(me, &alone, sizeof(alone));
			if (alone) {
				barrier(me);
				/* It is seen that the sender is gone. */
				nothing_in(me->rx, 50);
			}
			POST(me, fi_recv(me->ep, buffer, sizes[i], NULL, FI_ADDR_UNSPEC, NULL));
			SAME(completion(me->rx).len, sizes[i]);
			CHECK(holds(buffer, sizes[i], (uint32_t)i, 0));
			side_close(me);
		}
	}
	free(buffer);
}

/*
 * The same behind a short message, which is received first: what one turn reads of the ring ends within the long one,
 * whose receive is posted when its sender is gone.
 */
static void outliving_in_part(struct side *me)
{
	char *buffer = need(1000000), byte = 'h';

	for (uint32_t i = 0; i < (slow ? 3 : 20); i++) {
		size_t len = (size_t[]){ 230000, 300000, 1000000 }[i % 3];
		bool alone = false;

		side_begin(me, &(struct setup){ 0 });
		if (me->rank == 0) {
			fill(buffer, len, i);
			POST(me, fi_send(me->ep, &byte, 1, NULL, me->peer, NULL));
			completion(me->tx);
			alone = completes_alone(me, buffer, len);
			tell(me, &alone, sizeof(alone));
			if (!alone)
				completion(me->tx);
			side_close(me);
			if (alone)
				tell(me, &alone, sizeof(alone));
		} else {
			hear(me, &alone, sizeof(alone));
			if (alone)
				hear(me, &alone, sizeof(alone));
			POST(me, fi_recv(me->ep, &byte, 1, NULL, FI_ADDR_UNSPEC, NULL));
			SAME(completion(me->rx).len, 1);
			POST(me, fi_recv(me->ep, buffer, len, NULL, FI_ADDR_UNSPEC, NULL));
			SAME(completion(me->rx).len, len);
			CHECK(holds(buffer, len, i, 0));
			side_close(me);
		}
	}
	free(buffer);
}

/* Delivery-complete as the endpoint's default. */
static void delivery_by_default(struct side *me)
{
	struct fi_context context;
	char buffer[300];

	side_begin(me, &(struct setup){ .tx_op_flags = FI_DELIVERY_COMPLETE });
	if (me->rank == 0) {
		POST(me, fi_send(me->ep, buffer, sizeof(buffer), NULL, me->peer, &context));
		nothing_in(me->tx, 50);
		barrier(me);
		completion(me->tx);
	} else {
		barrier(me);
		POST(me, fi_recv(me->ep, buffer, sizeof(buffer), NULL, FI_ADDR_UNSPEC, &context));
		completion(me->rx);
	}
	side_end(me);
}

/* What is behind a fence starts when all before it has completed, and then keeps its order. */
static void fence(struct side *me)
{
	enum { BEHIND = 20 };
	struct fi_context contexts[BEHIND + 2];
	char *buffer = need(50000), small[8];

	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_TAGGED | FI_FENCE });
	if (me->rank == 0) {
		struct iovec part = { small, sizeof(small) }, all = { buffer, 50000 };
		struct fi_msg_tagged msg = { .msg_iov = &part, .iov_count = 1, .addr = me->peer, .tag = 2,
					     .context = &contexts[1] };
		struct fi_msg_tagged first = { .msg_iov = &all, .iov_count = 1, .addr = me->peer, .tag = 1,
					       .context = &contexts[0] };

		/* It pends until it is received. */
		POST(me, fi_tsendmsg(me->ep, &first, FI_DELIVERY_COMPLETE | FI_COMPLETION));
		POST(me, fi_tsendmsg(me->ep, &msg, FI_FENCE | FI_COMPLETION));
		for (int i = 0; i < BEHIND; i++)
			POST(me, fi_tsend(me->ep, &contexts[i], 8, NULL, me->peer, 3, &contexts[2 + i]));
		nothing_in(me->tx, 50);
		barrier(me);
		for (int i = 0; i < BEHIND + 2; i++)
			CHECK(completion(me->tx).op_context == &contexts[i]);
	} else {
		/* The receive for the fenced message is there and stays empty. */
		POST(me, fi_trecv(me->ep, small, sizeof(small), NULL, FI_ADDR_UNSPEC, 2, 0, &contexts[1]));
		nothing_in(me->rx, 100);
		barrier(me);
		POST(me, fi_trecv(me->ep, buffer, 50000, NULL, FI_ADDR_UNSPEC, 1, 0, &contexts[0]));
		CHECK(completion(me->rx).op_context == &contexts[0]);
		CHECK(completion(me->rx).op_context == &contexts[1]);
		for (int i = 0; i < BEHIND; i++) {
			POST(me, fi_trecv(me->ep, small, 8, NULL, FI_ADDR_UNSPEC, 3, 0, &contexts[0]));
			completion(me->rx);
		}
	}
	side_end(me);
	free(buffer);
}

/* Each format of entries, several read at once. */
static void formats(struct side *me)
{
	static const size_t lens[] = {
		[FI_CQ_FORMAT_CONTEXT] = sizeof(struct fi_cq_entry),
		[FI_CQ_FORMAT_MSG] = sizeof(struct fi_cq_msg_entry),
		[FI_CQ_FORMAT_DATA] = sizeof(struct fi_cq_data_entry),
		[FI_CQ_FORMAT_TAGGED] = sizeof(struct fi_cq_tagged_entry),
	};
	enum { COUNT = 5 };

	for (enum fi_cq_format format = FI_CQ_FORMAT_CONTEXT; format <= FI_CQ_FORMAT_TAGGED; format++) {
		struct fi_context contexts[COUNT];
		struct fi_cq_tagged_entry room[COUNT + 1];
		char buffer[COUNT][8], *at = (char *)room;
		size_t len = lens[format];
		int got = 0;

		side_begin(me, &(struct setup){ .format = format });
		for (int i = 0; i < COUNT; i++) {
			if (me->rank == 0)
				POST(me, fi_tinjectdata(me->ep, "abcdefgh", (size_t)i, (uint64_t)i + 100, me->peer,
							(uint64_t)i));
			else
				POST(me, fi_trecv(me->ep, buffer[i], 8, NULL, FI_ADDR_UNSPEC, (uint64_t)i, 0,
						  &contexts[i]));
		}
		memset(room, 0x77, sizeof(room));
		while (me->rank == 1 && got < COUNT) {
			ssize_t n = fi_cq_read(me->rx, at + (size_t)got * len, (size_t)(COUNT - got));

			CHECK(n > 0 || n == -FI_EAGAIN);
			got += n > 0 ? (int)n : 0;
		}
		for (int i = 0; i < got; i++) {
			struct fi_cq_tagged_entry entry;

			memcpy(&entry, at + (size_t)i * len, len);
			CHECK(entry.op_context == &contexts[i]);
			if (format >= FI_CQ_FORMAT_MSG) {
				SAME(entry.len, i);
				SAME(entry.flags & (FI_RECV | FI_TAGGED), FI_RECV | FI_TAGGED);
			}
			if (format >= FI_CQ_FORMAT_DATA)
				SAME(entry.data, i + 100);
			if (format >= FI_CQ_FORMAT_TAGGED)
				SAME(entry.tag, i);
		}
		if (got)
			SAME(at[COUNT * len], 0x77);
		side_end(me);
	}
}

/* A queue with little room: operations wait for it, nothing is lost. */
static void small_queue(struct side *me)
{
	enum { COUNT = 500 };
	struct fi_context context;
	char in[COUNT], out[COUNT];
	int posted = 0, sent = 0, completed = 0, received = 0;
	double end = now() + PATIENCE_S;

	side_begin(me, &(struct setup){ .cq_size = 4 });
	fill(out, COUNT, 3);
	for (int turn = 0; completed < COUNT || received < COUNT; turn++) {
		struct fi_cq_tagged_entry entry;

		CHECK(now() < end);
		if (posted < COUNT && fi_recv(me->ep, &in[posted], 1, NULL, FI_ADDR_UNSPEC, &context) == 0)
			posted++;
		if (sent < COUNT && fi_send(me->ep, &out[sent], 1, NULL, me->peer, &context) == 0)
			sent++;
		/* Read less often than written. */
		if (turn % 7)
			continue;
		completed += fi_cq_read(me->tx, &entry, 1) == 1;
		received += fi_cq_read(me->rx, &entry, 1) == 1;
	}
	CHECK(holds(in, COUNT, 3, 0));
	side_end(me);
}

/* Waits for a counter; the operations of one side are counted by both. */
static void counters(struct side *me)
{
	static const enum fi_wait_obj objects[] = { FI_WAIT_NONE, FI_WAIT_UNSPEC, FI_WAIT_FD, FI_WAIT_MUTEX_COND };
	enum { COUNT = 50 };
	char *buffer = need(50000);
	struct fi_context contexts[COUNT];

	for (size_t o = 0; o < sizeof(objects) / sizeof(*objects); o++) {
		for (int only = 0; only < 2; only++) {
			uint64_t done = 0, end;

			side_begin(me, &(struct setup){ .wait_obj = objects[o], .counters = true,
							.only_counters = only });
			for (int i = 0; i < COUNT; i++) {
				size_t len = two_sizes[i % 2];

				if (me->rank == 0)
					POST(me, fi_tsend(me->ep, buffer, len, NULL, me->peer, 4, &contexts[i]));
				else
					POST(me, fi_trecv(me->ep, buffer, len, NULL, FI_ADDR_UNSPEC, 4, 0,
							  &contexts[i]));
			}
			struct fid_cntr *cntr = me->rank == 0 ? me->sent : me->received;
			if (objects[o] == FI_WAIT_NONE) {
				double give_up = now() + PATIENCE_S;

				while ((done = fi_cntr_read(cntr)) < COUNT)
					CHECK(now() < give_up);
			} else {
				OK(fi_cntr_wait(cntr, COUNT, PATIENCE_S * 1000));
				done = fi_cntr_read(cntr);
				double begun = now();
				SAME(fi_cntr_wait(cntr, COUNT + 1, 100), -FI_ETIMEDOUT);
				CHECK(now() - begun > 0.09);
			}
			SAME(done, COUNT);
			SAME(fi_cntr_readerr(cntr), 0);
			if (!only)
				for (int i = 0; i < COUNT; i++)
					completion(me->rank == 0 ? me->tx : me->rx);
			barrier(me);
			/* An error ends the wait that it falls into. */
			if (me->rank == 0) {
				barrier(me);
				sleep_ms(100);
				POST(me, fi_tinject(me->ep, "long", 4, me->peer, 5));
			} else {
				POST(me, fi_trecv(me->ep, buffer, 1, NULL, FI_ADDR_UNSPEC, 5, 0, &contexts[0]));
				barrier(me);
				if (objects[o] != FI_WAIT_NONE)
					SAME(fi_cntr_wait(cntr, COUNT + 2, PATIENCE_S * 1000), -FI_EAVAIL);
				for (double give_up = now() + PATIENCE_S; fi_cntr_readerr(cntr) == 0;)
					CHECK(now() < give_up);
				SAME(fi_cntr_readerr(cntr), 1);
				SAME(fi_cntr_read(cntr), COUNT);
			}
			barrier(me);
			OK(fi_cntr_set(cntr, 1000));
			OK(fi_cntr_add(cntr, 10));
			OK(fi_cntr_seterr(cntr, 7));
			OK(fi_cntr_adderr(cntr, 1));
			for (double give_up = now() + 1; now() < give_up && fi_cntr_read(cntr) != 1010;)
				;
			end = fi_cntr_read(cntr);
			SAME(end, 1010);
			SAME(fi_cntr_readerr(cntr), 8);
			side_end(me);
		}
	}
	free(buffer);
}

const struct group completion_groups[] = {
	{ "selective", selective },
	{ "selective-by-default", selective_by_default },
	{ "levels", levels },
	{ "outliving", outliving },
	{ "outliving_in_part", outliving_in_part },
	{ "delivery-by-default", delivery_by_default },
	{ "fence", fence },
	{ "formats", formats },
	{ "small-queue", small_queue },
	{ "counters", counters },
	{ NULL, NULL },
};
