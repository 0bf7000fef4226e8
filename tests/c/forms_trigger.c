/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Operations that wait for counters: triggered ones, and deferred work. */
#include "all_forms.h"

#include <rdma/fi_atomic.h>
#include <rdma/fi_ext_udrv.h>
#include <rdma/fi_trigger.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define CAPS (FI_MSG | FI_TAGGED | FI_RMA | FI_RMA_EVENT | FI_TRIGGER)
#define KEY 0x77u

static struct fid_cntr *counter_of(struct side *me)
{
	struct fid_cntr *cntr;

	OK(fi_cntr_open(me->domain, &(struct fi_cntr_attr){ 0 }, &cntr, NULL));
	return cntr;
}

static struct fi_triggered_context2 at(struct fid_cntr *cntr, size_t threshold)
{
	struct fi_triggered_context2 context = { .event_type = FI_TRIGGER_THRESHOLD };

	context.trigger.threshold.cntr = cntr;
	context.trigger.threshold.threshold = threshold;
	return context;
}

static ssize_t send_at(struct side *me, struct fi_triggered_context2 *context, const uint64_t *tag, uint64_t flags)
{
	struct iovec part = { (void *)tag, sizeof(*tag) };
	struct fi_msg_tagged msg = {
		.msg_iov = &part, .iov_count = 1, .addr = me->peer, .tag = *tag, .context = context,
	};

	return fi_tsendmsg(me->ep, &msg, flags);
}

/* Sends go in the order of their thresholds, and of their calls where those are the same. */
static void trigger_order(struct side *me)
{
	static const size_t thresholds[] = { 7, 3, 5, 3, 12, 5, 0 };
	static const uint64_t order[] = { 6, 1, 3, 2, 5, 0, 4 };
	struct fi_triggered_context2 contexts[7];
	uint64_t tags[7], got;
	struct fid_cntr *cntr;

	side_begin(me, &(struct setup){ .caps = CAPS });
	if (me->rank == 0) {
		cntr = counter_of(me);
		for (int i = 0; i < 7; i++) {
			tags[i] = (uint64_t)i;
			contexts[i] = at(cntr, thresholds[i]);
			OK(send_at(me, &contexts[i], &tags[i], FI_TRIGGER | FI_COMPLETION));
		}
		CHECK(completion(me->tx).op_context == &contexts[6]);
		OK(fi_cntr_add(cntr, 2));
		OK(fi_cntr_adderr(cntr, 9));
		nothing_in(me->tx, 20);
		OK(fi_cntr_add(cntr, 1));
		CHECK(completion(me->tx).op_context == &contexts[1]);
		CHECK(completion(me->tx).op_context == &contexts[3]);
		nothing_in(me->tx, 20);
		SAME(fi_close(&cntr->fid), -FI_EBUSY);
		OK(fi_cntr_set(cntr, 100));
		for (int i = 3; i < 7; i++)
			CHECK(completion(me->tx).op_context == &contexts[order[i]]);
		OK(fi_close(&cntr->fid));
	} else {
		for (int i = 0; i < 7; i++) {
			POST(me, fi_trecv(me->ep, &got, sizeof(got), NULL, FI_ADDR_UNSPEC, 0, UINT64_MAX, NULL));
			SAME(completion(me->rx).tag, order[i]);
			SAME(got, order[i]);
		}
	}
	side_end(me);
}

/* Everything that can be triggered; the next is triggered by what the one before counts. */
static void trigger_chain(struct side *me)
{
	enum { LEN = 100000 };
	char *memory = need(LEN), *local = need(LEN);
	struct fi_triggered_context2 contexts[4];
	struct fid_ep *alias;
	struct fid_mr *mr = NULL;
	struct setup setup = { .caps = CAPS, .counters = true, .rma_counters = true };

	side_begin(me, &setup);
	OK(fi_ep_alias(me->ep, &alias, FI_TRANSMIT | FI_TRIGGER));
	if (me->rank == 0) {
		barrier(me);
		fill(local, LEN, 1);
		memset(memory, 0, LEN);
		/* An answer to the receive; then a write; then a read of what was written; then a message. */
		contexts[0] = at(me->received, 1);
		OK(fi_write(alias, local, LEN, NULL, me->peer, 0, KEY, &contexts[0]));
		contexts[1] = at(me->rma[WRITES], 1);
		OK(fi_read(alias, memory, LEN, NULL, me->peer, 0, KEY, &contexts[1]));
		contexts[2] = at(me->rma[READS], 1);
		OK(fi_send(alias, memory, LEN, NULL, me->peer, &contexts[2]));
		nothing_in(me->tx, 20);
		POST(me, fi_recv(me->ep, &(char){ 0 }, 1, NULL, FI_ADDR_UNSPEC, NULL));
		barrier(me);
		completion(me->rx);
		for (int i = 0; i < 3; i++)
			CHECK(completion(me->tx).op_context == &contexts[i]);
		CHECK(holds(memory, LEN, 1, 0));
		SAME(fi_cntr_read(me->sent), 1);
	} else {
		struct fi_triggered_context2 context = at(me->rma[REMOTE_READS], 1);
		struct iovec part = { local, LEN };
		struct fi_msg msg = {
			.msg_iov = &part, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = &context,
		};

		OK(fi_mr_reg(me->domain, memory, LEN, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
		OK(fi_recvmsg(me->ep, &msg, FI_TRIGGER | FI_COMPLETION));
		barrier(me);
		barrier(me);
		POST(me, fi_inject(me->ep, "b", 1, me->peer));
		CHECK(completion(me->rx).op_context == &context);
		CHECK(holds(local, LEN, 1, 0));
		CHECK(holds(memory, LEN, 1, 0));
	}
	barrier(me);
	OK(fi_close(&alias->fid));
	if (mr)
		OK(fi_close(&mr->fid));
	side_end(me);
	free(memory);
	free(local);
}

/* What is refused, what is cancelled, and an endpoint that goes before its counter comes so far. */
static void trigger_ends(struct side *me)
{
	struct fi_triggered_context2 first, second, wrong = { .event_type = FI_TRIGGER_XPU };
	uint64_t one = 1, two = 2, got;
	struct fid_cntr *cntr;
	struct fid_ep *ep;

	side_begin(me, &(struct setup){ .caps = CAPS });
	if (me->rank == 0) {
		cntr = counter_of(me);
		SAME(send_at(me, NULL, &one, FI_TRIGGER), -FI_EINVAL);
		SAME(send_at(me, &wrong, &one, FI_TRIGGER), -FI_ENOSYS);
		first = second = at(cntr, 1);
		OK(send_at(me, &first, &one, FI_TRIGGER | FI_COMPLETION));
		OK(send_at(me, &second, &two, FI_TRIGGER | FI_COMPLETION));
		OK(fi_cancel(&me->ep->fid, &first));
		struct fi_cq_err_entry error = failure(me->tx);
		CHECK(error.op_context == &first);
		SAME(error.err, FI_ECANCELED);
		SAME(error.tag, 1);
		SAME(fi_cancel(&me->ep->fid, &first), -FI_ENOENT);

		ep = another_endpoint(me);
		struct fi_triggered_context2 third = at(cntr, 1);
		OK(fi_tsendmsg(ep, &(struct fi_msg_tagged){ .addr = me->peer, .context = &third }, FI_TRIGGER));
		OK(fi_close(&ep->fid));

		/* Nobody has this address: it fails when it is due. */
		struct fi_triggered_context2 lost = at(cntr, 2);
		OK(fi_tsendmsg(me->ep, &(struct fi_msg_tagged){ .addr = 4711, .context = &lost }, FI_TRIGGER));
		OK(fi_cntr_add(cntr, 1));
		CHECK(completion(me->tx).op_context == &second);
		nothing_in(me->tx, 20);
		OK(fi_cntr_add(cntr, 1));
		CHECK(failure(me->tx).op_context == &lost);
		OK(fi_close(&cntr->fid));
	} else {
		POST(me, fi_trecv(me->ep, &got, sizeof(got), NULL, FI_ADDR_UNSPEC, 0, UINT64_MAX, NULL));
		SAME(completion(me->rx).tag, 2);
		nothing_in(me->rx, 20);
	}
	side_end(me);
	/* Without the capability. */
	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_TAGGED });
	cntr = counter_of(me);
	first = at(cntr, 0);
	SAME(send_at(me, &first, &one, FI_TRIGGER), -FI_EINVAL);
	OK(fi_close(&cntr->fid));
	side_end(me);
}

/* A request, and all that it points to. */
struct request {
	struct fi_deferred_work work;
	struct fi_op_tagged tagged;
	struct fi_op_rma rma;
	struct fi_op_cntr count;
	struct iovec part;
	struct fi_rma_iov remote;
};

static struct fi_deferred_work *tagged_at(struct side *me, struct request *r, enum fi_op_type type, struct fid_cntr *by,
					  uint64_t threshold, struct fid_cntr *done, void *buffer, size_t len, uint64_t flags)
{
	*r = (struct request){
		.work = { .threshold = threshold, .triggering_cntr = by, .completion_cntr = done, .op_type = type },
		.part = { buffer, len },
	};
	r->tagged = (struct fi_op_tagged){
		.ep = me->ep, .flags = flags,
		.msg = { .msg_iov = &r->part, .iov_count = 1, .addr = me->peer, .tag = 5, .context = r },
	};
	r->work.op.tagged = &r->tagged;
	return &r->work;
}

static struct fi_deferred_work *rma_at(struct side *me, struct request *r, enum fi_op_type type, struct fid_cntr *by,
				       uint64_t threshold, struct fid_cntr *done, void *buffer, size_t len, uint64_t key)
{
	tagged_at(me, r, type, by, threshold, done, buffer, len, 0);
	r->remote = (struct fi_rma_iov){ 0, len, key };
	r->rma = (struct fi_op_rma){
		.ep = me->ep,
		.msg = { .msg_iov = &r->part, .iov_count = 1, .addr = me->peer, .rma_iov = &r->remote, .rma_iov_count = 1,
			 .context = r },
	};
	r->work.op.rma = &r->rma;
	return &r->work;
}

static struct fi_deferred_work *count_at(struct request *r, enum fi_op_type type, struct fid_cntr *by, uint64_t threshold,
					 struct fid_cntr *which, uint64_t value)
{
	*r = (struct request){
		.work = { .threshold = threshold, .triggering_cntr = by, .op_type = type },
		.count = { which, value },
	};
	r->work.op.cntr = &r->count;
	return &r->work;
}

static int queue_work(struct side *me, struct fi_deferred_work *work)
{
	return fi_control(&me->domain->fid, FI_QUEUE_WORK, work);
}

/* Rank 1 sends each message back once it is here, without having to look. */
static void ring_of(struct side *me, size_t len)
{
	enum { ROUNDS = 50 };
	struct setup setup = { .caps = CAPS, .counters = true };
	struct request *requests = need(3 * ROUNDS * sizeof(*requests));
	char *buffer = need(len);

	side_begin(me, &setup);
	if (me->rank == 0) {
		barrier(me);
		for (int i = 0; i < ROUNDS; i++) {
			char *back = need(len);

			fill(buffer, len, (uint32_t)i);
			POST(me, fi_trecv(me->ep, back, len, NULL, me->peer, 5, 0, NULL));
			POST(me, fi_tsend(me->ep, buffer, len, NULL, me->peer, 5, NULL));
			completion(me->tx);
			completion(me->rx);
			CHECK(holds(back, len, (uint32_t)i, 0));
			free(back);
		}
	} else {
		struct fid_cntr *start = counter_of(me), *came = counter_of(me), *went = counter_of(me), *all = counter_of(me);
		struct request *r = requests;

		for (uint64_t i = 0; i < ROUNDS; i++) {
			/* Received when the one before has left; sent when it is here. */
			OK(queue_work(me, tagged_at(me, r++, FI_OP_TRECV, went, i, came, buffer, len, 0)));
			OK(queue_work(me, tagged_at(me, r++, FI_OP_TSEND, came, i + 1, went, buffer, len, 0)));
			OK(queue_work(me, count_at(r++, FI_OP_CNTR_ADD, went, i + 1, all, 3)));
		}
		barrier(me);
		OK(fi_cntr_wait(all, 3 * ROUNDS, PATIENCE_S * 1000));
		SAME(fi_cntr_read(came), ROUNDS);
		SAME(fi_cntr_read(went), ROUNDS);
		/* The endpoint says nothing of it. */
		SAME(fi_cntr_read(me->sent), 0);
		SAME(fi_cntr_read(me->received), 0);
		nothing_in(me->rx, 20);
		nothing_in(me->tx, 20);
		OK(fi_close(&start->fid));
		OK(fi_close(&came->fid));
		OK(fi_close(&went->fid));
		OK(fi_close(&all->fid));
	}
	side_end(me);
	free(requests);
	free(buffer);
}

static void deferred_ring(struct side *me)
{
	ring_of(me, 20000);
}

/* As short as what nothing is deferred for takes a road of its own with. */
static void deferred_ring_short(struct side *me)
{
	ring_of(me, 8);
}

/* The provider's own operations are given whatever the application knows as the endpoint: a hook's, if there are hooks. */
static void read_counts(struct side *me)
{
	struct fi_ops_udrv *ops;
	struct fi_udrv_counts counts;
	char text[64];

	if (fi_open_ops(&me->ep->fid, FI_UDRV_OPS, 0, (void **)&ops, NULL))
		return;
	memset(&counts, 0xff, sizeof(counts));
	OK(ops->counts(me->ep, &counts, sizeof(counts)));
	SAME(counts.dropped, 0);
	CHECK(ops->thresholds(me->ep, me->peer, text, sizeof(text)) != -FI_EINVAL);
}

/* A receive that waits for a counter finds its peer under the address of its call, whatever stands for the peer then. */
static void directed_by_another(struct side *me)
{
	struct setup setup = { .caps = CAPS | FI_DIRECTED_RECV, .counters = true };
	char got[2] = { 0 }, name[NAME_MAX_LEN];
	size_t len = sizeof(name);

	side_begin(me, &setup);
	read_counts(me);
	if (me->rank == 0) {
		struct fid_cntr *by = counter_of(me), *done = counter_of(me);
		fi_addr_t first = me->peer;
		struct request request;
		struct iovec part = { &got[0], 1 };
		struct fi_triggered_context2 context = at(by, 1);
		struct fi_msg_tagged msg = { .msg_iov = &part, .iov_count = 1, .tag = 5, .context = &context };

		OK(fi_av_lookup(me->av, first, name, &len));
		msg.addr = me->peer = insert(me, name);
		CHECK(me->peer != first);
		OK(fi_trecvmsg(me->ep, &msg, FI_TRIGGER | FI_COMPLETION));
		OK(queue_work(me, tagged_at(me, &request, FI_OP_TRECV, by, 2, done, &got[1], 1, 0)));
		OK(fi_av_remove(me->av, &first, 1, 0));
		OK(fi_cntr_add(by, 2));
		barrier(me);
		CHECK(completion(me->rx).op_context == &context);
		OK(fi_cntr_wait(done, 1, PATIENCE_S * 1000));
		CHECK(got[0] == 'a' && got[1] == 'b');
		OK(fi_close(&by->fid));
		OK(fi_close(&done->fid));
	} else {
		barrier(me);
		POST(me, fi_tinject(me->ep, "a", 1, me->peer, 5));
		POST(me, fi_tinject(me->ep, "b", 1, me->peer, 5));
	}
	side_end(me);
}

/* One-sided work, what it says to an endpoint that asks, and what fails. */
static void deferred_rma(struct side *me)
{
	enum { LEN = 70000 };
	char *memory = need(LEN), *local = need(LEN), *back = need(LEN);
	struct setup setup = { .caps = CAPS, .counters = true, .rma_counters = true };
	struct fid_mr *mr = NULL;
	struct request a, b, c, d;

	side_begin(me, &setup);
	fill(local, LEN, 3);
	if (me->rank == 1) {
		OK(fi_mr_reg(me->domain, memory, LEN, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
		barrier(me);
		barrier(me);
		CHECK(holds(memory, LEN, 3, 0));
	} else {
		struct fid_cntr *by = counter_of(me), *done = counter_of(me);

		barrier(me);
		OK(queue_work(me, rma_at(me, &a, FI_OP_WRITE, by, 1, done, local, LEN, KEY)));
		rma_at(me, &b, FI_OP_READ, done, 1, done, back, LEN, KEY);
		b.rma.flags = FI_COMPLETION;
		OK(queue_work(me, &b.work));
		OK(fi_cntr_add(by, 1));
		OK(fi_cntr_wait(done, 2, PATIENCE_S * 1000));
		CHECK(holds(back, LEN, 3, 0));
		CHECK(completion(me->tx).op_context == &b);
		nothing_in(me->tx, 20);
		SAME(fi_cntr_read(me->rma[WRITES]), 0);
		SAME(fi_cntr_read(me->rma[READS]), 1);
		/* Failures count towards thresholds: the third waits for the second, which has a wrong key. */
		OK(queue_work(me, rma_at(me, &c, FI_OP_WRITE, by, 1, done, local, LEN, KEY + 1)));
		OK(queue_work(me, count_at(&d, FI_OP_CNTR_SET, done, 3, by, 42)));
		while (fi_cntr_read(by) != 42)
			progress(me);
		SAME(fi_cntr_readerr(done), 1);
		SAME(fi_cntr_read(done), 2);
		nothing_in(me->tx, 20);
		/* The endpoint's own counter counts an operation once, reported or not: those that succeed, and those that fail. */
		for (uint64_t i = 0; i < 4; i++) {
			bool fails = i / 2, reported = i % 2;

			rma_at(me, &c, FI_OP_WRITE, by, 1, me->rma[WRITES], local, LEN, fails ? KEY + 1 : KEY);
			c.rma.flags = reported ? FI_COMPLETION : 0;
			OK(queue_work(me, &c.work));
			while (fi_cntr_read(me->rma[WRITES]) + fi_cntr_readerr(me->rma[WRITES]) < i + 1)
				progress(me);
			SAME(fi_cntr_read(me->rma[WRITES]), fails ? 2 : i + 1);
			SAME(fi_cntr_readerr(me->rma[WRITES]), fails ? i - 1 : 0);
			if (reported && fails)
				SAME(failure(me->tx).err, FI_EKEYREJECTED);
			else if (reported)
				CHECK(completion(me->tx).op_context == &c);
			nothing_in(me->tx, 20);
		}
		OK(fi_close(&by->fid));
		OK(fi_close(&done->fid));
		barrier(me);
	}
	if (mr)
		OK(fi_close(&mr->fid));
	side_end(me);
	free(memory);
	free(local);
	free(back);
}

/* A queue without room holds up nothing that writes no entry to it. */
static void deferred_beside_full_queue(struct side *me)
{
	enum { FULL = 2, SILENT = 3 };
	struct setup setup = {
		.caps = CAPS, .cq_size = FULL, .counters = true, .rma_counters = true, .bind_flags = FI_SELECTIVE_COMPLETION,
	};
	uint64_t memory[2] = { 0 }, got[FULL + SILENT], words[FULL];
	struct fid_mr *mr = NULL;
	struct request a, b;

	side_begin(me, &setup);
	if (me->rank == 1) {
		OK(fi_mr_reg(me->domain, memory, sizeof(memory), FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
		for (int i = 0; i < FULL + SILENT; i++)
			POST(me, fi_trecv(me->ep, &got[i], sizeof(*got), NULL, me->peer, 5, 0, NULL));
		barrier(me);
		OK(fi_cntr_wait(me->received, FULL + SILENT, PATIENCE_S * 1000));
		barrier(me);
		SAME(memory[0], 1);
		SAME(memory[1], 2);
		OK(fi_close(&mr->fid));
	} else {
		struct fid_cntr *by = counter_of(me), *done = counter_of(me);
		uint64_t one = 1, two = 2;

		barrier(me);
		for (int i = 0; i < FULL; i++) {
			struct iovec part = { &words[i], sizeof(*words) };
			struct fi_msg_tagged m = { .msg_iov = &part, .iov_count = 1, .addr = me->peer, .tag = 5 };

			POST(me, fi_tsendmsg(me->ep, &m, FI_COMPLETION));
		}
		OK(fi_cntr_wait(me->sent, FULL, PATIENCE_S * 1000));
		OK(queue_work(me, tagged_at(me, &a, FI_OP_TSEND, by, 1, done, &one, sizeof(one), 0)));
		OK(queue_work(me, rma_at(me, &b, FI_OP_WRITE, by, 1, done, &one, sizeof(one), KEY)));
		OK(fi_cntr_add(by, 1));
		OK(fi_cntr_wait(done, 2, PATIENCE_S * 1000));
		POST(me, fi_tinject(me->ep, &one, sizeof(one), me->peer, 5));
		POST(me, fi_tsend(me->ep, &one, sizeof(one), NULL, me->peer, 5, NULL));
		POST(me, fi_write(me->ep, &two, sizeof(two), NULL, me->peer, sizeof(two), KEY, NULL));
		OK(fi_cntr_wait(me->sent, FULL + 2, PATIENCE_S * 1000));
		OK(fi_cntr_wait(me->rma[WRITES], 1, PATIENCE_S * 1000));
		/* What wants an entry waits. */
		SAME(fi_tsendmsg(me->ep, &(struct fi_msg_tagged){ .addr = me->peer }, FI_COMPLETION), -FI_EAGAIN);
		for (int i = 0; i < FULL; i++)
			completion(me->tx);
		nothing_in(me->tx, 20);
		barrier(me);
		OK(fi_close(&by->fid));
		OK(fi_close(&done->fid));
	}
	side_end(me);
}

/* A peer that takes nothing holds up what is due to it alone. The peer is an endpoint of rank 0 that it does not poll. */
static void trigger_beside_full_peer(struct side *me)
{
	enum { MOST = 1000000 };
	struct setup setup = { .caps = CAPS };
	uint64_t word = 7, got = 0;

	side_begin(me, &setup);
	if (me->rank == 1) {
		POST(me, fi_trecv(me->ep, &got, sizeof(got), NULL, me->peer, word, 0, NULL));
		completion(me->rx);
		SAME(got, word);
	} else {
		struct side deaf = *me;
		struct fi_triggered_context2 contexts[2];
		struct request flushed;
		struct fid_cntr *by = counter_of(me), *other = counter_of(me), *done = counter_of(me);
		char name[NAME_MAX_LEN], *bytes = need(me->info->tx_attr->inject_size);
		size_t len = me->info->tx_attr->inject_size;
		fi_addr_t peer = me->peer, to;
		int full = 0;

		OK(fi_cq_open(me->domain, &(struct fi_cq_attr){ .format = FI_CQ_FORMAT_TAGGED }, &deaf.tx, NULL));
		OK(fi_cq_open(me->domain, &(struct fi_cq_attr){ .format = FI_CQ_FORMAT_TAGGED }, &deaf.rx, NULL));
		deaf.sent = deaf.received = NULL;
		deaf.ep = another_endpoint(&deaf);
		name_of(deaf.ep, name);
		to = insert(me, name);
		memset(bytes, 0, len);
		/* The peer answers the first, and then no more: until there is no room for a short one, either. */
		for (int i = 0; i < MOST && full < 2000; i++) {
			ssize_t rc = fi_tinject(me->ep, bytes, full < 1000 ? len : sizeof(word), to, 1);

			CHECK(rc == 0 || rc == -FI_EAGAIN);
			if (rc)
				full++;
			else
				full = full < 1000 ? 0 : 1000;
			progress(i < 1000 ? &deaf : me);
		}
		SAME(full, 2000);
		for (int i = 0; i < 2; i++) {
			contexts[i] = at(by, 1);
			me->peer = i ? peer : to;
			OK(send_at(me, &contexts[i], &word, FI_TRIGGER | FI_COMPLETION));
		}
		me->peer = to;
		OK(queue_work(me, tagged_at(me, &flushed, FI_OP_TSEND, other, 1, done, bytes, len, 0)));
		me->peer = peer;
		OK(fi_cntr_add(by, 1));
		OK(fi_cntr_add(other, 1));
		/* It is due, and has no room. */
		OK(fi_control(&me->domain->fid, FI_FLUSH_WORK, &flushed));
		CHECK(completion(me->tx).op_context == &contexts[1]);
		nothing_in(me->tx, 20);
		struct fi_cq_tagged_entry entry;
		double end = now() + PATIENCE_S;

		while (fi_cq_read(me->tx, &entry, 1) != 1) {
			CHECK(now() < end);
			progress(&deaf);
		}
		CHECK(entry.op_context == &contexts[0]);
		nothing_in(me->tx, 20);
		SAME(fi_cntr_read(done), 0);
		OK(fi_close(&other->fid));
		OK(fi_close(&done->fid));
		OK(fi_close(&deaf.ep->fid));
		OK(fi_close(&deaf.tx->fid));
		OK(fi_close(&deaf.rx->fid));
		OK(fi_close(&by->fid));
		free(bytes);
	}
	side_end(me);
}

/* The buffers of work are read when it is due, also with FI_INJECT. */
static void deferred_inject(struct side *me)
{
	enum { LEN = 100 };
	struct setup setup = { .caps = CAPS, .counters = true, .rma_counters = true };
	char memory[LEN] = { 0 }, got[LEN], local[LEN];
	struct fid_mr *mr = NULL;
	struct request a, b;

	side_begin(me, &setup);
	if (me->rank == 1) {
		OK(fi_mr_reg(me->domain, memory, LEN, FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
		POST(me, fi_trecv(me->ep, got, LEN, NULL, me->peer, 5, 0, NULL));
		barrier(me);
		completion(me->rx);
		barrier(me);
		CHECK(holds(got, LEN, 2, 0));
		CHECK(holds(memory, LEN, 2, 0));
		OK(fi_close(&mr->fid));
	} else {
		struct fid_cntr *by = counter_of(me), *done = counter_of(me);

		barrier(me);
		fill(local, LEN, 1);
		OK(queue_work(me, tagged_at(me, &a, FI_OP_TSEND, by, 1, done, local, LEN, FI_INJECT)));
		rma_at(me, &b, FI_OP_WRITE, by, 1, done, local, LEN, KEY);
		b.rma.flags = FI_INJECT;
		OK(queue_work(me, &b.work));
		fill(local, LEN, 2);
		OK(fi_cntr_add(by, 1));
		OK(fi_cntr_wait(done, 2, PATIENCE_S * 1000));
		barrier(me);
		OK(fi_close(&by->fid));
		OK(fi_close(&done->fid));
	}
	side_end(me);
}

/* Work that is cancelled, flushed, left behind or refused is never done. */
static void deferred_ends(struct side *me)
{
	struct setup setup = { .caps = CAPS, .counters = true };
	struct request r[6];
	char byte = 0;

	side_begin(me, &setup);
	struct fid_cntr *by = counter_of(me), *other = counter_of(me), *done = counter_of(me), *sum = counter_of(me);
	struct fid *domain = &me->domain->fid;

	SAME(fi_control(domain, FI_CANCEL_WORK, &r[0]), -FI_ENOENT);
	OK(queue_work(me, count_at(&r[0], FI_OP_CNTR_ADD, by, 1, sum, 1)));
	OK(queue_work(me, count_at(&r[1], FI_OP_CNTR_ADD, by, 1, sum, 10)));
	OK(queue_work(me, count_at(&r[2], FI_OP_CNTR_ADD, other, 1, sum, 100)));
	OK(queue_work(me, tagged_at(me, &r[3], FI_OP_TSEND, by, 1, done, &byte, 1, 0)));
	SAME(fi_close(&by->fid), -FI_EBUSY);
	SAME(fi_close(&sum->fid), -FI_EBUSY);
	SAME(fi_close(&done->fid), -FI_EBUSY);
	OK(fi_control(domain, FI_CANCEL_WORK, &r[0]));
	SAME(fi_control(domain, FI_CANCEL_WORK, &r[0]), -FI_ENOENT);
	OK(fi_control(domain, FI_FLUSH_WORK, &r[2]));
	OK(fi_cntr_add(other, 1));
	SAME(fi_cntr_read(sum), 0);
	OK(fi_cntr_add(by, 1));
	OK(fi_cntr_wait(done, 1, PATIENCE_S * 1000));
	SAME(fi_cntr_read(sum), 10);
	SAME(fi_control(domain, FI_CANCEL_WORK, &r[1]), -FI_ENOENT);

	/* A receive that has been posted ends by fi_cancel, and says so where its completion would be told. */
	POST(me, fi_trecv(me->ep, &byte, 1, NULL, me->peer, 5, 0, NULL));
	completion(me->rx);
	OK(queue_work(me, tagged_at(me, &r[4], FI_OP_TRECV, by, 1, done, &byte, 1, 0)));
	OK(fi_cancel(&me->ep->fid, &r[4]));
	SAME(fi_cntr_readerr(done), 1);

	/* An endpoint takes its work with it. */
	struct fid_ep *ep = another_endpoint(me), *own = me->ep;
	me->ep = ep;
	OK(queue_work(me, tagged_at(me, &r[5], FI_OP_TRECV, by, 1, done, &byte, 1, 0)));
	OK(queue_work(me, tagged_at(me, &r[5], FI_OP_TSEND, by, 9, done, &byte, 1, 0)));
	me->ep = own;
	OK(fi_close(&ep->fid));

	OK(queue_work(me, count_at(&r[0], FI_OP_CNTR_SET, by, 50, sum, 1)));
	OK(fi_control(domain, FI_FLUSH_WORK, NULL));
	OK(fi_cntr_add(by, 100));
	SAME(fi_cntr_read(sum), 10);

	count_at(&r[0], FI_OP_CNTR_ADD, by, 1, sum, 1)->completion_cntr = done;
	SAME(queue_work(me, &r[0].work), -FI_EINVAL);
	SAME(queue_work(me, count_at(&r[0], FI_OP_CNTR_ADD, NULL, 1, sum, 1)), -FI_EINVAL);
	tagged_at(me, &r[0], FI_OP_TRECV, by, 1, done, &byte, 1, FI_PEEK);
	SAME(queue_work(me, &r[0].work), -FI_ENOSYS);
	r[0].work.op_type = 1000;
	SAME(queue_work(me, &r[0].work), -FI_ENOSYS);

	OK(fi_close(&by->fid));
	OK(fi_close(&other->fid));
	OK(fi_close(&done->fid));
	OK(fi_close(&sum->fid));
	side_end(me);
}

/* --- atomic operations --- */

enum { ELEMENTS = 300 };

/* Elements of rank 1, and what rank 0 does to them: operand, comparand, result. */
struct elements {
	uint64_t memory[ELEMENTS], operand[ELEMENTS], compare[ELEMENTS], result[ELEMENTS];
	struct fi_ioc operands, compares, results;
	struct fi_rma_ioc target;
};

static struct elements *elements_of(uint64_t operand, uint64_t compare)
{
	struct elements *e = need(sizeof(*e));

	for (uint64_t i = 0; i < ELEMENTS; i++) {
		e->memory[i] = i;
		e->operand[i] = operand + i;
		e->compare[i] = compare + i;
		e->result[i] = UINT64_MAX;
	}
	e->operands = (struct fi_ioc){ e->operand, ELEMENTS };
	e->compares = (struct fi_ioc){ e->compare, ELEMENTS };
	e->results = (struct fi_ioc){ e->result, ELEMENTS };
	e->target = (struct fi_rma_ioc){ 0, ELEMENTS, KEY };
	return e;
}

/* Element i is `first` plus `step` times i. */
static void ascend(const uint64_t *elements, uint64_t first, uint64_t step)
{
	for (uint64_t i = 0; i < ELEMENTS; i++)
		SAME(elements[i], first + step * i);
}

static struct fi_msg_atomic change(struct side *me, struct elements *e, enum fi_op op, void *context)
{
	return (struct fi_msg_atomic){
		.msg_iov = &e->operands, .iov_count = 1, .addr = me->peer, .rma_iov = &e->target, .rma_iov_count = 1,
		.datatype = FI_UINT64, .op = op, .context = context,
	};
}

static const struct setup atomic_setup = { .caps = CAPS | FI_ATOMIC, .counters = true, .rma_counters = true };

/* Each form waits for what the one before counts; nothing is looked at before. */
static void trigger_atomics(struct side *me)
{
	struct elements *sum = elements_of(10, 0), *product = elements_of(2, 0), *swap = elements_of(7, 0);
	struct fi_triggered_context2 contexts[4];
	struct fid_mr *mr = NULL;
	struct fid_ep *alias;

	side_begin(me, &atomic_setup);
	OK(fi_ep_alias(me->ep, &alias, FI_TRANSMIT | FI_TRIGGER));
	if (me->rank == 0) {
		struct fid_cntr *cntr = counter_of(me);
		size_t injected = 1;
		uint64_t now_there[ELEMENTS];
		struct fi_msg_atomic m;

		barrier(me);
		/* 8 bytes are injected, and the application's again at once. */
		contexts[0] = at(cntr, 1);
		m = change(me, sum, FI_SUM, &contexts[0]);
		sum->operands.count = sum->target.count = injected;
		OK(fi_atomicmsg(me->ep, &m, FI_TRIGGER | FI_INJECT | FI_COMPLETION));
		sum->operand[0] = 4711;
		sum->operands.addr = NULL;
		/* fi_atomic, fi_fetch_atomic and fi_compare_atomic. */
		contexts[1] = at(me->rma[WRITES], 1);
		OK(fi_atomic(alias, sum->operand + 1, ELEMENTS - 1, NULL, me->peer, 8, KEY, FI_UINT64, FI_SUM, &contexts[1]));
		contexts[2] = at(me->rma[WRITES], 2);
		for (int i = 0; i < ELEMENTS; i++)
			product->operand[i] = 2;
		OK(fi_fetch_atomic(alias, product->operand, ELEMENTS, NULL, product->result, NULL, me->peer, 0, KEY, FI_UINT64,
				   FI_PROD, &contexts[2]));
		/* The first read is ours, below. */
		contexts[3] = at(me->rma[READS], 2);
		for (uint64_t i = 0; i < ELEMENTS; i++)
			swap->compare[i] = 2 * (10 + 2 * i);
		OK(fi_compare_atomic(alias, swap->operand, ELEMENTS, NULL, swap->compare, NULL, swap->result, NULL, me->peer, 0,
				     KEY, FI_UINT64, FI_CSWAP, &contexts[3]));
		POST(me, fi_read(me->ep, now_there, sizeof(now_there), NULL, me->peer, 0, KEY, NULL));
		completion(me->tx);
		ascend(now_there, 0, 1);
		nothing_in(me->tx, 20);
		SAME(fi_close(&cntr->fid), -FI_EBUSY);
		OK(fi_cntr_add(cntr, 1));
		for (int i = 0; i < 4; i++) {
			struct fi_cq_tagged_entry entry = completion(me->tx);

			CHECK(entry.op_context == &contexts[i]);
			SAME(entry.flags, FI_ATOMIC | (i < 2 ? FI_WRITE : FI_READ));
		}
		ascend(product->result, 10, 2);
		ascend(swap->result, 20, 4);
		SAME(fi_cntr_read(me->rma[WRITES]), 2);
		SAME(fi_cntr_read(me->rma[READS]), 3);

		/* What is wrong with a call it says at once, with the key or the address when it is due; fi_cancel. */
		sum->operands.addr = sum->operand;
		contexts[0] = contexts[1] = contexts[2] = contexts[3] = at(cntr, 2);
		m = change(me, sum, FI_SUM, &contexts[0]);
		sum->target.count = 2;
		SAME(fi_atomicmsg(me->ep, &m, FI_TRIGGER), -FI_EINVAL);
		sum->target.count = 1;
		m.context = NULL;
		SAME(fi_atomicmsg(me->ep, &m, FI_TRIGGER), -FI_EINVAL);
		m.context = &contexts[0];
		OK(fi_atomicmsg(me->ep, &m, FI_TRIGGER));
		OK(fi_cancel(&me->ep->fid, &contexts[0]));
		struct fi_cq_err_entry error = failure(me->tx);
		CHECK(error.op_context == &contexts[0]);
		SAME(error.err, FI_ECANCELED);
		SAME(error.flags, FI_ATOMIC | FI_WRITE);
		m.context = &contexts[1];
		sum->target.key = KEY + 1;
		OK(fi_atomicmsg(me->ep, &m, FI_TRIGGER));
		OK(fi_cntr_add(cntr, 1));
		error = failure(me->tx);
		CHECK(error.op_context == &contexts[1]);
		SAME(error.err, FI_EKEYREJECTED);
		OK(fi_close(&cntr->fid));
	} else {
		OK(fi_mr_reg(me->domain, sum->memory, sizeof(sum->memory), FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
		barrier(me);
	}
	barrier(me);
	if (me->rank == 1)
		ascend(sum->memory, 7, 1);
	OK(fi_close(&alias->fid));
	if (mr)
		OK(fi_close(&mr->fid));
	side_end(me);
	free(sum);
	free(product);
	free(swap);
}

/* The same by deferred work, whose structures are gone when it is due. */
static void deferred_atomics(struct side *me)
{
	struct elements *sum = elements_of(10, 0), *read = elements_of(0, 0), *swap = elements_of(7, 10), *wrong = elements_of(1, 1);
	struct fid_mr *mr = NULL;

	side_begin(me, &atomic_setup);
	if (me->rank == 0) {
		struct fid_cntr *by = counter_of(me), *done = counter_of(me);
		struct fi_op_atomic base = { .ep = me->ep };
		struct fi_op_fetch_atomic fetch = { .ep = me->ep };
		struct fi_op_compare_atomic compare = { .ep = me->ep };
		struct fi_deferred_work work = { .triggering_cntr = by, .completion_cntr = done };

		barrier(me);
		base.msg = change(me, sum, FI_SUM, &base);
		base.flags = FI_INJECT;
		work.op_type = FI_OP_ATOMIC;
		work.threshold = 1;
		work.op.atomic = &base;
		OK(queue_work(me, &work));

		work.triggering_cntr = done;
		fetch.msg = change(me, read, FI_ATOMIC_READ, &fetch);
		fetch.msg.msg_iov = NULL;
		fetch.msg.iov_count = 0;
		fetch.fetch = (struct fi_msg_fetch){ .msg_iov = &read->results, .iov_count = 1 };
		fetch.flags = FI_COMPLETION;
		work.op_type = FI_OP_FETCH_ATOMIC;
		work.op.fetch_atomic = &fetch;
		OK(queue_work(me, &work));

		compare.msg = change(me, swap, FI_CSWAP, &compare);
		compare.fetch = (struct fi_msg_fetch){ .msg_iov = &swap->results, .iov_count = 1 };
		compare.compare = (struct fi_msg_compare){ .msg_iov = &swap->compares, .iov_count = 1 };
		work.op_type = FI_OP_COMPARE_ATOMIC;
		work.op.compare_atomic = &compare;
		work.threshold = 2;
		OK(queue_work(me, &work));

		/* Failures count towards thresholds. */
		wrong->target.key = KEY + 1;
		base.msg = change(me, wrong, FI_SUM, NULL);
		work.op_type = FI_OP_ATOMIC;
		work.threshold = 3;
		work.op.atomic = &base;
		OK(queue_work(me, &work));
		base.msg = change(me, sum, FI_SUM, NULL);
		work.threshold = 4;
		OK(queue_work(me, &work));

		/* A form or a type that there is not, and lengths that differ. */
		base.msg = change(me, sum, FI_CSWAP, NULL);
		SAME(queue_work(me, &work), -FI_ENOSYS);
		compare.compare.iov_count = 0;
		work.op_type = FI_OP_COMPARE_ATOMIC;
		work.op.compare_atomic = &compare;
		SAME(queue_work(me, &work), -FI_EINVAL);
		work.op.compare_atomic = NULL;
		SAME(queue_work(me, &work), -FI_EINVAL);
		memset(&base, 0xee, sizeof(base));
		memset(&compare, 0xee, sizeof(compare));
		for (struct elements *e = sum; e; e = e == sum ? swap : NULL)
			memset(&e->operands, 0xee, sizeof(*e) - offsetof(struct elements, operands));

		/* The operands are read when they are due. */
		for (int i = 0; i < ELEMENTS; i++)
			sum->operand[i] = 10;
		nothing_in(me->tx, 20);
		OK(fi_cntr_add(by, 1));
		/* The sum, the read, the swap; what failed; the sum again. */
		while (fi_cntr_read(done) < 4)
			progress(me);
		SAME(fi_cntr_readerr(done), 1);
		ascend(read->result, 10, 1);
		ascend(swap->result, 10, 1);
		struct fi_cq_tagged_entry entry = completion(me->tx);
		CHECK(entry.op_context == &fetch);
		SAME(entry.flags, FI_ATOMIC | FI_READ);
		nothing_in(me->tx, 20);
		/* The endpoint counts none but the one that it was asked to tell. */
		SAME(fi_cntr_read(me->rma[WRITES]), 0);
		SAME(fi_cntr_read(me->rma[READS]), 1);
		OK(fi_close(&by->fid));
		OK(fi_close(&done->fid));
	} else {
		OK(fi_mr_reg(me->domain, sum->memory, sizeof(sum->memory), FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
		barrier(me);
	}
	barrier(me);
	if (me->rank == 1)
		ascend(sum->memory, 17, 1);
	if (mr)
		OK(fi_close(&mr->fid));
	side_end(me);
	free(sum);
	free(read);
	free(swap);
	free(wrong);
}

/*
 * FI_PROGRESS_AUTO: rank 1 computes and calls nothing, while rank 0 reads and writes its memory, gets an answer that
 * its arrival triggers, and sends what its queue never asks for.
 */
static void progress_while_computing(struct side *me)
{
	enum { LEN = 1 << 20, OPERATIONS = 200 };
	struct setup setup = {
		.caps = CAPS, .progress = FI_PROGRESS_AUTO, .counters = true, .rma_counters = true, .wait_obj = FI_WAIT_UNSPEC,
	};
	char *memory = need(LEN), *local = need(LEN);
	struct fid_mr *mr = NULL;
	struct request answer;
	struct fid_cntr *done;

	side_begin(me, &setup);
	if (me->rank == 1) {
		double end = now() + 2 * PATIENCE_S, work = 0;
		char byte;

		done = counter_of(me);
		fill(memory, LEN, 1);
		OK(fi_mr_reg(me->domain, memory, LEN, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
		OK(queue_work(me, tagged_at(me, &answer, FI_OP_TSEND, me->rma[REMOTE_WRITES], OPERATIONS, done, local, 4, 0)));
		barrier(me);
		while (recv(me->link, &byte, 1, MSG_DONTWAIT) != 1) {
			CHECK(now() < end);
			for (int i = 0; i < 100000; i++)
				work += 1.0 / (1.0 + work);
		}
		CHECK(work > 0);
		SAME(fi_cntr_read(done), 1);
		SAME(fi_cntr_read(me->rma[REMOTE_READS]), OPERATIONS);
		OK(fi_close(&done->fid));
	} else {
		POST(me, fi_trecv(me->ep, local, 4, NULL, me->peer, 5, 0, NULL));
		barrier(me);
		for (int i = 0; i < OPERATIONS; i++) {
			size_t len = i % 20 ? 64 : LEN;

			POST(me, fi_read(me->ep, memory, len, NULL, me->peer, 0, KEY, NULL));
			completion(me->tx);
			CHECK(holds(memory, len, 1, 0));
			POST(me, fi_write(me->ep, memory, len, NULL, me->peer, 0, KEY, NULL));
			completion(me->tx);
		}
		completion(me->rx);
		POST(me, fi_tinject(me->ep, "b", 1, me->peer, 6));
		tell(me, "b", 1);
	}
	barrier(me);
	if (mr)
		OK(fi_close(&mr->fid));
	side_end(me);
	free(memory);
	free(local);
}

/* A process that writes to itself and then only looks at its memory sees it: the thread that slept is woken, as by a peer. */
static void progress_to_oneself(struct side *me)
{
	enum { OPERATIONS = 30 };
	volatile uint64_t memory = 0;
	char name[NAME_MAX_LEN];
	double begun, took, most = slow ? 30 : 5;
	struct fid_mr *mr;
	fi_addr_t self;

	side_begin(me, &(struct setup){ .caps = CAPS, .progress = FI_PROGRESS_AUTO });
	name_of(me->ep, name);
	self = insert(me, name);
	OK(fi_mr_reg(me->domain, (void *)&memory, sizeof(memory), FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	begun = now();
	for (uint64_t i = 1; i <= OPERATIONS; i++) {
		/* Until the thread has taken the endpoint over, and sleeps. */
		sleep_ms(10);
		POST(me, fi_inject_write(me->ep, &i, sizeof(i), self, 0, KEY));
		while (memory != i && now() - begun < PATIENCE_S)
			sleep_ms(1);
		SAME(memory, i);
	}
	took = now() - begun;
	if (took > most * crowding())
		FAIL("%d writes to itself took %.3f s: they waited for the thread to look", OPERATIONS, took);
	barrier(me);
	OK(fi_close(&mr->fid));
	side_end(me);
}

/*
 * Rank 1 polls one endpoint without pause. Another one of the same domain, which nobody polls, serves rank 0 all the
 * same.
 */
static void progress_beside_polling(struct side *me)
{
	enum { LEN = 64, OPERATIONS = 50 };
	struct setup setup = { .caps = CAPS, .progress = FI_PROGRESS_AUTO };
	char memory[LEN], name[NAME_MAX_LEN];
	struct fid_ep *other = NULL;
	struct fid_cq *cq = NULL;
	struct fid_mr *mr = NULL;
	double seconds = slow ? 20 : 2, begun, end;

	side_begin(me, &setup);
	if (me->rank == 1) {
		OK(fi_cq_open(me->domain, &(struct fi_cq_attr){ .format = FI_CQ_FORMAT_TAGGED }, &cq, NULL));
		OK(fi_endpoint(me->domain, me->info, &other, NULL));
		OK(fi_ep_bind(other, &me->av->fid, 0));
		OK(fi_ep_bind(other, &cq->fid, FI_TRANSMIT | FI_RECV));
		OK(fi_enable(other));
		fill(memory, LEN, 1);
		OK(fi_mr_reg(me->domain, memory, LEN, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
		name_of(other, name);
		tell(me, name, sizeof(name));
		barrier(me);
		/* The application polls both while they get to know each other, and then leaves one. */
		for (end = now() + (slow ? 3 : 0.3); now() < end; progress(me))
			SAME(fi_cq_read(cq, NULL, 0), -FI_EAGAIN);
		barrier(me);
	} else {
		fi_addr_t to;

		hear(me, name, sizeof(name));
		to = insert(me, name);
		barrier(me);
		POST(me, fi_read(me->ep, memory, LEN, NULL, to, 0, KEY, NULL));
		completion(me->tx);
		barrier(me);
		sleep_ms(20);
		begun = now();
		for (int i = 0; i < OPERATIONS; i++) {
			POST(me, fi_read(me->ep, memory, LEN, NULL, to, 0, KEY, NULL));
			completion(me->tx);
			CHECK(holds(memory, LEN, 1, 0));
			POST(me, fi_write(me->ep, memory, LEN, NULL, to, 0, KEY, NULL));
			completion(me->tx);
		}
		if (now() - begun > seconds * crowding())
			FAIL("%d reads and writes took %.3f s: they waited for the thread that polls", OPERATIONS, now() - begun);
	}
	/* Rank 1 is here at once, and polls until rank 0 is. */
	barrier(me);
	if (mr) {
		OK(fi_close(&mr->fid));
		OK(fi_close(&other->fid));
		OK(fi_close(&cq->fid));
	}
	side_end(me);
}

const struct group trigger_groups[] = {
	{ "trigger_order", trigger_order },
	{ "trigger_chain", trigger_chain },
	{ "trigger_ends", trigger_ends },
	{ "deferred_ring", deferred_ring },
	{ "deferred_ring_short", deferred_ring_short },
	{ "trigger_directed_by_another", directed_by_another },
	{ "deferred_rma", deferred_rma },
	{ "deferred_inject", deferred_inject },
	{ "deferred_beside_full_queue", deferred_beside_full_queue },
	{ "trigger_beside_full_peer", trigger_beside_full_peer },
	{ "deferred_ends", deferred_ends },
	{ "trigger_atomics", trigger_atomics },
	{ "deferred_atomics", deferred_atomics },
	{ "progress_while_computing", progress_while_computing },
	{ "progress_to_oneself", progress_to_oneself },
	{ "progress_beside_polling", progress_beside_polling },
	{ NULL, NULL },
};
