/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Every form of send meets every form of receive, at every size where the provider changes its ways. */
#include "all_forms.h"

#include <stdlib.h>
#include <string.h>

static const size_t sizes[] = { 0, 1, 8, 64, 100, 4096, 16384, 16385, 100000, 3 << 20 };
#define SIZES (sizeof(sizes) / sizeof(*sizes))
#define LARGEST (3 << 20)
#define DATA 0x1122334455667788u
#define TAG 0x5A00000000000042u

enum send_form { SEND, SENDV, SENDMSG, SENDMSG_DATA, SENDDATA, INJECT, INJECTDATA, SENDMSG_INJECT, SEND_FORMS };
enum receive_form { RECV, RECVV, RECVMSG, RECEIVE_FORMS };

static bool injects(enum send_form form)
{
	return form == INJECT || form == INJECTDATA || form == SENDMSG_INJECT;
}

static bool carries_data(enum send_form form)
{
	return form == SENDMSG_DATA || form == SENDDATA || form == INJECTDATA;
}

/* Three parts of unequal length, the second one perhaps empty. */
static void split(struct iovec parts[3], char *buffer, size_t len)
{
	size_t first = len / 3, second = len / 5;

	parts[0] = (struct iovec){ buffer, first };
	parts[1] = (struct iovec){ buffer + first, second };
	parts[2] = (struct iovec){ buffer + first + second, len - first - second };
}

static void send_plain(struct side *me, enum send_form form, char *buffer, size_t len, void *context)
{
	struct iovec parts[3];
	void *none[3] = { NULL };
	struct fi_msg msg = { .msg_iov = parts, .desc = none, .iov_count = 3, .addr = me->peer, .context = context,
			      .data = DATA };

	split(parts, buffer, len);
	switch (form) {
	case SEND:
		POST(me, fi_send(me->ep, buffer, len, NULL, me->peer, context));
		break;
	case SENDV:
		POST(me, fi_sendv(me->ep, parts, none, 3, me->peer, context));
		break;
	case SENDMSG:
		POST(me, fi_sendmsg(me->ep, &msg, FI_COMPLETION));
		break;
	case SENDMSG_DATA:
		POST(me, fi_sendmsg(me->ep, &msg, FI_REMOTE_CQ_DATA | FI_COMPLETION));
		break;
	case SENDMSG_INJECT:
		POST(me, fi_sendmsg(me->ep, &msg, FI_INJECT | FI_COMPLETION));
		break;
	case SENDDATA:
		POST(me, fi_senddata(me->ep, buffer, len, NULL, DATA, me->peer, context));
		break;
	case INJECT:
		POST(me, fi_inject(me->ep, buffer, len, me->peer));
		break;
	default:
		POST(me, fi_injectdata(me->ep, buffer, len, DATA, me->peer));
	}
}

static void send_tagged(struct side *me, enum send_form form, char *buffer, size_t len, void *context)
{
	struct iovec parts[3];
	void *none[3] = { NULL };
	struct fi_msg_tagged msg = { .msg_iov = parts, .desc = none, .iov_count = 3, .addr = me->peer, .tag = TAG,
				     .context = context, .data = DATA };

	split(parts, buffer, len);
	switch (form) {
	case SEND:
		POST(me, fi_tsend(me->ep, buffer, len, NULL, me->peer, TAG, context));
		break;
	case SENDV:
		POST(me, fi_tsendv(me->ep, parts, none, 3, me->peer, TAG, context));
		break;
	case SENDMSG:
		POST(me, fi_tsendmsg(me->ep, &msg, FI_COMPLETION));
		break;
	case SENDMSG_DATA:
		POST(me, fi_tsendmsg(me->ep, &msg, FI_REMOTE_CQ_DATA | FI_COMPLETION));
		break;
	case SENDMSG_INJECT:
		POST(me, fi_tsendmsg(me->ep, &msg, FI_INJECT | FI_COMPLETION));
		break;
	case SENDDATA:
		POST(me, fi_tsenddata(me->ep, buffer, len, NULL, DATA, me->peer, TAG, context));
		break;
	case INJECT:
		POST(me, fi_tinject(me->ep, buffer, len, me->peer, TAG));
		break;
	default:
		POST(me, fi_tinjectdata(me->ep, buffer, len, DATA, me->peer, TAG));
	}
}

static void receive_plain(struct side *me, enum receive_form form, char *buffer, size_t len, void *context)
{
	struct iovec parts[3];
	void *none[3] = { NULL };
	struct fi_msg msg = { .msg_iov = parts, .desc = none, .iov_count = 3, .addr = FI_ADDR_UNSPEC,
			      .context = context };

	split(parts, buffer, len);
	if (form == RECV)
		POST(me, fi_recv(me->ep, buffer, len, NULL, FI_ADDR_UNSPEC, context));
	else if (form == RECVV)
		POST(me, fi_recvv(me->ep, parts, none, 3, FI_ADDR_UNSPEC, context));
	else
		POST(me, fi_recvmsg(me->ep, &msg, FI_COMPLETION));
}

static void receive_tagged(struct side *me, enum receive_form form, char *buffer, size_t len, void *context)
{
	/* Some bits of the tag are wanted as they are, some as they come. */
	uint64_t ignore = 0xFF, tag = TAG ^ 0x81;
	struct iovec parts[3];
	void *none[3] = { NULL };
	struct fi_msg_tagged msg = { .msg_iov = parts, .desc = none, .iov_count = 3, .addr = FI_ADDR_UNSPEC,
				     .tag = tag, .ignore = ignore, .context = context };

	split(parts, buffer, len);
	if (form == RECV)
		POST(me, fi_trecv(me->ep, buffer, len, NULL, FI_ADDR_UNSPEC, TAG, 0, context));
	else if (form == RECVV)
		POST(me, fi_trecvv(me->ep, parts, none, 3, FI_ADDR_UNSPEC, tag, ignore, context));
	else
		POST(me, fi_trecvmsg(me->ep, &msg, FI_COMPLETION));
}

static void send_one(struct side *me, bool tagged, enum send_form form, char *buffer, size_t len, uint32_t seed)
{
	uint64_t kind = tagged ? FI_TAGGED : FI_MSG;
	struct fi_context context;

	fill(buffer, len, seed);
	(tagged ? send_tagged : send_plain)(me, form, buffer, len, &context);
	if (injects(form))
		memset(buffer, 0xEE, len); /* it is ours again */
	if (form == INJECT || form == INJECTDATA)
		return;
	struct fi_cq_tagged_entry entry = completion(me->tx);
	CHECK(entry.op_context == &context);
	SAME(entry.flags & (FI_SEND | FI_RECV | FI_MSG | FI_TAGGED), FI_SEND | kind);
}

static void receive_one(struct side *me, bool tagged, enum receive_form form, enum send_form sent, char *buffer,
			size_t len, uint32_t seed, bool expected)
{
	uint64_t kind = tagged ? FI_TAGGED : FI_MSG;
	struct fi_context context;

	memset(buffer, 0xDD, len + 8);
	if (!expected)
		barrier(me);
	(tagged ? receive_tagged : receive_plain)(me, form, buffer, len, &context);
	if (expected)
		barrier(me);
	struct fi_cq_tagged_entry entry = completion(me->rx);
	CHECK(entry.op_context == &context);
	SAME(entry.flags & (FI_SEND | FI_RECV | FI_MSG | FI_TAGGED), FI_RECV | kind);
	SAME((entry.flags & FI_REMOTE_CQ_DATA) != 0, carries_data(sent));
	if (carries_data(sent))
		SAME(entry.data, DATA);
	if (tagged)
		SAME(entry.tag, TAG);
	SAME(entry.len, len);
	CHECK(holds(buffer, len, seed, 0));
	for (int i = 0; i < 8; i++)
		SAME((unsigned char)buffer[len + i], 0xDD);
}

/* `expected`: the receive is there before the message. */
static void all_pairs(struct side *me, bool tagged, bool expected)
{
	char *buffer = need(LARGEST + 8);
	uint32_t seed = 1;

	side_begin(me, &(struct setup){ 0 });
	for (int sender = 0; sender < 2; sender++) {
		for (int tx = 0; tx < SEND_FORMS; tx++) {
			for (size_t i = 0; i < SIZES; i++) {
				int rx = (tx + (int)i) % RECEIVE_FORMS;
				bool ours = me->rank == sender;

				if (injects(tx) && sizes[i] > me->info->tx_attr->inject_size)
					continue;
				seed++;
				if (ours && expected)
					barrier(me);
				if (ours && !expected && sizes[i] > 4096) {
					/* Only what is sent without the receiver's help can be sent first. */
					barrier(me);
					send_one(me, tagged, tx, buffer, sizes[i], seed);
				} else if (ours) {
					send_one(me, tagged, tx, buffer, sizes[i], seed);
					if (!expected)
						barrier(me);
				} else {
					receive_one(me, tagged, rx, tx, buffer, sizes[i], seed, expected);
				}
			}
		}
	}
	nothing_in(me->tx, 0);
	nothing_in(me->rx, 0);
	side_end(me);
	free(buffer);
}

static void plain_expected(struct side *me)
{
	all_pairs(me, false, true);
}

static void plain_unexpected(struct side *me)
{
	all_pairs(me, false, false);
}

static void tagged_expected(struct side *me)
{
	all_pairs(me, true, true);
}

static void tagged_unexpected(struct side *me)
{
	all_pairs(me, true, false);
}

/* Messages of one pair match in the order in which they were sent, whatever way each of them takes. */
static void order(struct side *me)
{
	enum { COUNT = 200 };
	static const size_t room = 120000;
	struct fi_context contexts[COUNT];
	char *buffers = need(COUNT * room);
	uint64_t random = 7;

	side_begin(me, &(struct setup){ 0 });
	for (int i = 0; i < COUNT; i++) {
		size_t len = next_random(&random) % 4 ? next_random(&random) % 300 : next_random(&random) % room;
		char *buffer = buffers + (size_t)i * room;

		if (me->rank == 0) {
			fill(buffer, len, (uint32_t)i);
			POST(me, fi_tsend(me->ep, buffer, len, NULL, me->peer, 5, &contexts[i]));
		} else {
			POST(me, fi_trecv(me->ep, buffer, room, NULL, FI_ADDR_UNSPEC, 5, 0, &contexts[i]));
		}
	}
	random = 7;
	if (me->rank == 0) {
		for (int i = 0; i < COUNT; i++)
			completion(me->tx);
	} else {
		size_t lens[COUNT];

		for (int i = 0; i < COUNT; i++) {
			struct fi_cq_tagged_entry entry = completion(me->rx);

			lens[(struct fi_context *)entry.op_context - contexts] = entry.len;
		}
		for (int i = 0; i < COUNT; i++) {
			size_t len = next_random(&random) % 4 ? next_random(&random) % 300
							      : next_random(&random) % room;

			SAME(lens[i], len);
			CHECK(holds(buffers + (size_t)i * room, len, (uint32_t)i, 0));
		}
	}
	side_end(me);
	free(buffers);
}

/* Both sides send a lot before either receives anything, more than a ring holds. */
static void flood(struct side *me)
{
	enum { COUNT = 3000, LEN = 200 };
	struct fi_context contexts[2][COUNT];
	char *out = need(COUNT * LEN), *in = need(COUNT * LEN);

	side_begin(me, &(struct setup){ .cq_size = 2 * COUNT });
	for (int i = 0; i < COUNT; i++) {
		fill(out + i * LEN, LEN, (uint32_t)(i + me->rank * 7777));
		POST(me, fi_send(me->ep, out + i * LEN, LEN, NULL, me->peer, &contexts[0][i]));
	}
	for (int i = 0; i < COUNT; i++)
		completion(me->tx);
	for (int i = 0; i < COUNT; i++)
		POST(me, fi_recv(me->ep, in + i * LEN, LEN, NULL, FI_ADDR_UNSPEC, &contexts[1][i]));
	for (int i = 0; i < COUNT; i++) {
		struct fi_cq_tagged_entry entry = completion(me->rx);

		CHECK(entry.op_context == &contexts[1][i]);
		CHECK(holds(in + i * LEN, LEN, (uint32_t)(i + (1 - me->rank) * 7777), 0));
	}
	side_end(me);
	free(out);
	free(in);
}

/* Flags that would change where a message goes, or what the end of an operation means, are not ignored. */
static void flags_not_offered(struct side *me)
{
	uint64_t flags[] = { FI_MULTICAST, FI_COMMIT_COMPLETE, FI_COMMIT_COMPLETE | FI_INJECT };
	char byte = 0;
	struct iovec part = { &byte, 1 };
	struct fi_rma_iov remote = { 0, 1, 1 };

	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_TAGGED | FI_RMA });
	struct fi_msg msg = { .msg_iov = &part, .iov_count = 1, .addr = me->peer };
	struct fi_msg_tagged tagged = { .msg_iov = &part, .iov_count = 1, .addr = me->peer };
	struct fi_msg_rma rma = { .msg_iov = &part, .iov_count = 1, .addr = me->peer, .rma_iov = &remote, .rma_iov_count = 1 };

	for (size_t i = 0; i < sizeof(flags) / sizeof(*flags); i++) {
		SAME(fi_sendmsg(me->ep, &msg, flags[i]), -FI_EOPNOTSUPP);
		SAME(fi_tsendmsg(me->ep, &tagged, flags[i]), -FI_EOPNOTSUPP);
		SAME(fi_writemsg(me->ep, &rma, flags[i]), -FI_EOPNOTSUPP);
	}
	nothing_in(me->tx, 20);
	nothing_in(me->rx, 20);
	side_end(me);
}

/* Messages to oneself. */
static void to_oneself(struct side *me)
{
	char name[NAME_MAX_LEN], *out = need(LARGEST), *in = need(LARGEST);
	struct fi_context contexts[2];
	fi_addr_t self;

	side_begin(me, &(struct setup){ 0 });
	name_of(me->ep, name);
	self = insert(me, name);
	for (size_t i = 0; i < SIZES; i++) {
		fill(out, sizes[i], (uint32_t)i);
		memset(in, 0, sizes[i]);
		if (i % 2)
			POST(me, fi_tsend(me->ep, out, sizes[i], NULL, self, i, &contexts[0]));
		POST(me, fi_trecv(me->ep, in, sizes[i], NULL, FI_ADDR_UNSPEC, i, 0, &contexts[1]));
		if (i % 2 == 0)
			POST(me, fi_tsend(me->ep, out, sizes[i], NULL, self, i, &contexts[0]));
		SAME(completion(me->rx).len, sizes[i]);
		completion(me->tx);
		CHECK(holds(in, sizes[i], (uint32_t)i, 0));
	}
	side_end(me);
	free(out);
	free(in);
}

const struct group message_groups[] = {
	{ "plain", plain_expected },
	{ "plain-unexpected", plain_unexpected },
	{ "tagged", tagged_expected },
	{ "tagged-unexpected", tagged_unexpected },
	{ "order", order },
	{ "flood", flood },
	{ "to-oneself", to_oneself },
	{ "flags-not-offered", flags_not_offered },
	{ NULL, NULL },
};
