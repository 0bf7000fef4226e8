/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * contexts
 *
 * Contexts beyond the one of each kind that every endpoint has: receive contexts that endpoints share, shared transmit
 * contexts, and scalable endpoints; and the options of an endpoint. Both sides live in one process. One line a group,
 * then "N passed, N failed".
 */
#include "common.h"

#include <rdma/fi_trigger.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT 4
#define LONG (1 << 20)
/* Of addresses that name one of COUNT receive contexts. */
#define BITS 2

/* How long to poll until what was sent has arrived, or does not come, seconds. */
#define ARRIVAL_S 0.03

/* Numbers that libfabric 1.17 has no names for. */
enum {
	SHARED_MEMORY_PERMITTED = 11,
	MAX_MSG = 12,
	MAX_TAGGED,
	MAX_RMA,
	INJECT_MSG = 16,
	INJECT_TAGGED,
	INJECT_RMA,
};

struct domain {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
};

static const size_t lengths[] = { 0, 8, 3000, 20000, LONG };
#define LENGTHS (sizeof(lengths) / sizeof(*lengths))

static uint8_t outgoing[LONG], incoming[2 * LONG];

static void open_domain(struct domain *d, uint64_t caps, size_t tx, size_t rx)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_av_attr av_attr = { .type = FI_AV_TABLE, .rx_ctx_bits = BITS };

	hints->caps = caps;
	hints->ep_attr->type = FI_EP_RDM;
	hints->ep_attr->tx_ctx_cnt = tx;
	hints->ep_attr->rx_ctx_cnt = rx;
	hints->fabric_attr->prov_name = strdup("udrv");
	OK(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &d->info));
	fi_freeinfo(hints);
	SAME(d->info->ep_attr->tx_ctx_cnt, tx ? tx : 1);
	SAME(d->info->ep_attr->rx_ctx_cnt, rx ? rx : 1);
	OK(fi_fabric(d->info->fabric_attr, &d->fabric, NULL));
	OK(fi_domain(d->fabric, d->info, &d->domain, NULL));
	OK(fi_av_open(d->domain, &av_attr, &d->av, NULL));
}

static void close_domain(struct domain *d)
{
	OK(fi_close(&d->av->fid));
	OK(fi_close(&d->domain->fid));
	OK(fi_close(&d->fabric->fid));
	fi_freeinfo(d->info);
}

/* `size` 0: the usual one. */
static struct fid_cq *open_queue_of(struct domain *d, size_t size)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED, .size = size };
	struct fid_cq *cq;

	OK(fi_cq_open(d->domain, &attr, &cq, NULL));
	return cq;
}

static struct fid_cq *open_queue(struct domain *d)
{
	return open_queue_of(d, 0);
}

static fi_addr_t learn(struct domain *d, struct fid *fid)
{
	uint8_t name[NAME_MAX_LEN];
	size_t len = sizeof(name);
	fi_addr_t address;

	OK(fi_getname(fid, name, &len));
	SAME(fi_av_insert(d->av, name, 1, &address, 0, NULL), 1);
	return address;
}

/* Polls `others` too until `cq` has an entry. */
static struct fi_cq_tagged_entry wait_for(struct fid_cq *cq, struct fid_cq **others, int count, fi_addr_t *source)
{
	struct fi_cq_tagged_entry entry;
	fi_addr_t from = FI_ADDR_UNSPEC;
	double end = now() + PATIENCE_S;

	for (;;) {
		ssize_t rc = fi_cq_readfrom(cq, &entry, 1, &from);

		if (rc == 1)
			break;
		if (rc == -FI_EAVAIL) {
			struct fi_cq_err_entry error = { 0 };

			SAME(fi_cq_readerr(cq, &error, 0), 1);
			FAIL("error %d (%s)", error.err, fi_strerror(error.err));
		}
		SAME(rc, -FI_EAGAIN);
		for (int i = 0; i < count; i++) {
			rc = others[i] == cq ? -FI_EAGAIN : fi_cq_read(others[i], NULL, 0);
			CHECK(rc == -FI_EAGAIN || rc == 0 || rc == -FI_EAVAIL);
		}
		if (now() > end)
			FAIL("nothing for %d s", PATIENCE_S);
	}
	if (source)
		*source = from;
	return entry;
}

static int error_of(struct fid_cq *cq, struct fid_cq *other, void *context)
{
	struct fi_cq_err_entry error = { 0 };
	struct fi_cq_tagged_entry entry;
	double end = now() + PATIENCE_S;

	while (fi_cq_read(cq, &entry, 1) != -FI_EAVAIL) {
		CHECK(now() < end);
		fi_cq_read(other, NULL, 0);
	}
	SAME(fi_cq_readerr(cq, &error, 0), 1);
	CHECK(error.op_context == context);
	return error.err;
}

/* Of the receiving side polls `cq` alone. */
static void poll_only(struct fid_cq *cq, struct fid_cq *sender)
{
	double end = now() + ARRIVAL_S;

	/* However long other processes keep this one from its processor. */
	for (int n = 0; n < 2000 || now() < end; n++) {
		SAME(fi_cq_read(cq, NULL, 0), -FI_EAGAIN);
		fi_cq_read(sender, NULL, 0);
	}
}

static void empty(struct fid_cq **cqs, int count)
{
	struct fi_cq_tagged_entry entry;

	for (int i = 0; i < count; i++)
		SAME(fi_cq_read(cqs[i], &entry, 1), -FI_EAGAIN);
}

/* --- endpoints that share a receive context, and one that sends --- */

struct shared {
	struct domain here, there;
	struct fid_ep *srx, *ep[COUNT], *sender;
	struct fid_stx *stx;
	struct fid_cq *cq[COUNT], *sent;
	fi_addr_t to[COUNT];
};

static struct fi_context contexts[64];

/* `flags` beside FI_TRANSMIT and FI_RECV, for the endpoints that share, and the size of their queues. */
static void open_shared_with(struct shared *s, uint64_t flags, size_t size)
{
	uint64_t caps = FI_MSG | FI_TAGGED | FI_SOURCE | FI_DIRECTED_RECV;

	memset(s, 0, sizeof(*s));
	open_domain(&s->here, caps, FI_SHARED_CONTEXT, FI_SHARED_CONTEXT);
	open_domain(&s->there, caps, 0, 0);
	OK(fi_srx_context(s->here.domain, s->here.info->rx_attr, &s->srx, NULL));
	OK(fi_stx_context(s->here.domain, s->here.info->tx_attr, &s->stx, NULL));
	s->sent = open_queue(&s->there);
	OK(fi_endpoint(s->there.domain, s->there.info, &s->sender, NULL));
	OK(fi_ep_bind(s->sender, &s->there.av->fid, 0));
	OK(fi_ep_bind(s->sender, &s->sent->fid, FI_TRANSMIT | FI_RECV));
	OK(fi_enable(s->sender));
	for (int i = 0; i < COUNT; i++) {
		s->cq[i] = open_queue_of(&s->here, size);
		OK(fi_endpoint(s->here.domain, s->here.info, &s->ep[i], NULL));
		OK(fi_ep_bind(s->ep[i], &s->here.av->fid, 0));
		OK(fi_ep_bind(s->ep[i], &s->cq[i]->fid, FI_TRANSMIT | FI_RECV | flags));
		if (!i) /* without what was asked for it does not work */
			SAME(fi_enable(s->ep[i]), -FI_EOPBADSTATE);
		OK(fi_ep_bind(s->ep[i], &s->stx->fid, 0));
		OK(fi_ep_bind(s->ep[i], &s->srx->fid, 0));
		SAME(fi_ep_bind(s->ep[i], &s->srx->fid, 0), -FI_EINVAL);
		OK(fi_enable(s->ep[i]));
		s->to[i] = learn(&s->there, &s->ep[i]->fid);
	}
	learn(&s->here, &s->sender->fid);
	OK(fi_enable(s->srx));
}

static void open_shared(struct shared *s)
{
	open_shared_with(s, 0, 0);
}

static void close_shared(struct shared *s)
{
	SAME(fi_close(&s->srx->fid), -FI_EBUSY);
	SAME(fi_close(&s->stx->fid), -FI_EBUSY);
	OK(fi_close(&s->sender->fid));
	for (int i = 0; i < COUNT; i++) {
		if (s->ep[i])
			OK(fi_close(&s->ep[i]->fid));
		OK(fi_close(&s->cq[i]->fid));
	}
	OK(fi_close(&s->srx->fid));
	OK(fi_close(&s->stx->fid));
	OK(fi_close(&s->sent->fid));
	close_domain(&s->here);
	close_domain(&s->there);
}

static void send_to(struct shared *s, int ep, size_t len, uint32_t seed)
{
	fill(outgoing, len, seed);
	OK(fi_send(s->sender, outgoing, len, NULL, s->to[ep], NULL));
}

/* A message for any endpoint takes the first receive; its entry is in that endpoint's queue. */
static void receives_are_shared(void)
{
	struct shared s;
	struct fi_rx_attr attr;
	struct fid_ep *srx;
	uint64_t flags = FI_RECV | FI_TRIGGER;
	fi_addr_t source;

	open_shared(&s);
	attr = *s.here.info->rx_attr;
	SAME(fi_recv(s.ep[0], incoming, 1, NULL, FI_ADDR_UNSPEC, NULL), -FI_EOPNOTSUPP);
	/* No receive waits for a counter here: it would be posted before its time. */
	SAME(fi_recvmsg(s.srx, &(struct fi_msg){ .addr = FI_ADDR_UNSPEC }, FI_TRIGGER), -FI_EOPNOTSUPP);
	SAME(fi_trecvmsg(s.srx, &(struct fi_msg_tagged){ .addr = FI_ADDR_UNSPEC }, FI_TRIGGER), -FI_EOPNOTSUPP);
	SAME(fi_control(&s.srx->fid, FI_SETOPSFLAG, &flags), -FI_EINVAL);
	attr.op_flags = FI_TRIGGER;
	SAME(fi_srx_context(s.here.domain, &attr, &srx, NULL), -FI_EINVAL);
	for (size_t n = 0; n < LENGTHS; n++) {
		int order[] = { 2, 0, 3, 1 };
		size_t len = lengths[n];

		for (int i = 0; i < COUNT; i++) {
			memset(incoming, 0, len);
			OK(fi_recv(s.srx, incoming, LONG, NULL, FI_ADDR_UNSPEC, &contexts[i]));
			send_to(&s, order[i], len, i + 1);

			struct fi_cq_tagged_entry entry = wait_for(s.cq[order[i]], &s.sent, 1, &source);

			CHECK(entry.op_context == &contexts[i]);
			SAME(entry.len, len);
			SAME(source, 0);
			CHECK(entry.flags & FI_RECV && entry.flags & FI_MSG);
			CHECK(holds(incoming, len, i + 1, 0));
			wait_for(s.sent, s.cq, COUNT, NULL);
			empty(s.cq, COUNT);
		}
	}
	close_shared(&s);
}

/* Messages that came before their receive are served in the order of their arrival, wherever they are. */
static void the_oldest_message_comes_first(void)
{
	struct shared s;
	int order[] = { 3, 1, 1, 0, 2 };

	open_shared(&s);
	for (int i = 0; i < 5; i++) {
		send_to(&s, order[i], 8, i);
		poll_only(s.cq[order[i]], s.sent);
	}
	for (int i = 0; i < 5; i++) {
		OK(fi_recv(s.srx, incoming, 8, NULL, FI_ADDR_UNSPEC, &contexts[i]));
		CHECK(wait_for(s.cq[order[i]], NULL, 0, NULL).op_context == &contexts[i]);
		CHECK(holds(incoming, 8, i, 0));
	}
	for (int i = 0; i < 5; i++)
		wait_for(s.sent, NULL, 0, NULL);
	empty(s.cq, COUNT);
	close_shared(&s);
}

/* A buffer for several messages is filled by several endpoints, and goes back once. */
static void a_buffer_takes_messages_of_all(void)
{
	struct shared s;
	size_t min = 900, at = 0;

	open_shared(&s);
	OK(fi_setopt(&s.srx->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min, sizeof(min)));
	/* The first three are here already. */
	for (int i = 0; i < 3; i++) {
		send_to(&s, i, 100 * (i + 1), i);
		poll_only(s.cq[i], s.sent);
	}
	struct iovec iov = { incoming, 2000 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = contexts };

	OK(fi_recvmsg(s.srx, &msg, FI_MULTI_RECV));
	for (int i = 0; i < 4; i++) {
		size_t len = 100 * (i + 1);

		if (i == 3)
			send_to(&s, 3, len, i);
		struct fi_cq_tagged_entry entry = wait_for(s.cq[i], &s.sent, 1, NULL);

		CHECK(entry.op_context == contexts && entry.buf == incoming + at);
		SAME(entry.len, len);
		CHECK(holds(entry.buf, len, i, 0));
		CHECK(!(entry.flags & FI_MULTI_RECV));
		at += len;
	}
	send_to(&s, 0, 200, 9);
	CHECK(wait_for(s.cq[0], &s.sent, 1, NULL).flags & FI_MULTI_RECV);
	send_to(&s, 0, 200, 9);
	poll_only(s.cq[0], s.sent);
	close_shared(&s);
}

/* Where completions are suppressed, the one with which the buffer goes back is not. */
static void a_silent_buffer_goes_back(void)
{
	struct shared s;
	size_t min = 100;
	struct iovec iov = { incoming, 400 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = contexts };

	open_shared_with(&s, FI_SELECTIVE_COMPLETION, 0);
	OK(fi_setopt(&s.srx->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min, sizeof(min)));
	send_to(&s, 0, 100, 0);
	poll_only(s.cq[0], s.sent);
	OK(fi_recvmsg(s.srx, &msg, FI_MULTI_RECV));
	for (int i = 1; i < COUNT - 1; i++) {
		send_to(&s, i, 100, i);
		poll_only(s.cq[i], s.sent);
	}
	send_to(&s, COUNT - 1, 100, COUNT - 1);
	struct fi_cq_tagged_entry entry = wait_for(s.cq[COUNT - 1], &s.sent, 1, NULL);

	CHECK(entry.op_context == contexts && entry.flags & FI_MULTI_RECV);
	for (int i = 0; i < COUNT; i++)
		CHECK(holds(incoming + 100 * i, 100, i, 0));
	empty(s.cq, COUNT);
	close_shared(&s);
}

static void tags_peeks_and_cancels(void)
{
	struct shared s;
	struct fi_msg_tagged msg = { .ignore = 0, .addr = FI_ADDR_UNSPEC };

	open_shared(&s);
	fill(outgoing, 16, 5);
	OK(fi_tsend(s.sender, outgoing, 16, NULL, s.to[2], 7, NULL));
	poll_only(s.cq[2], s.sent);
	msg.tag = 8;
	msg.context = &contexts[0];
	OK(fi_trecvmsg(s.srx, &msg, FI_PEEK));
	SAME(error_of(s.cq[0], s.sent, &contexts[0]), FI_ENOMSG);
	msg.tag = 7;
	OK(fi_trecvmsg(s.srx, &msg, FI_PEEK | FI_CLAIM));
	SAME(wait_for(s.cq[2], NULL, 0, NULL).len, 16);
	struct iovec iov = { incoming, 16 };

	msg.msg_iov = &iov;
	msg.iov_count = 1;
	OK(fi_trecvmsg(s.srx, &msg, FI_CLAIM));
	CHECK(wait_for(s.cq[2], NULL, 0, NULL).op_context == &contexts[0]);
	CHECK(holds(incoming, 16, 5, 0));

	OK(fi_trecv(s.srx, incoming, 16, NULL, FI_ADDR_UNSPEC, 1, 0, &contexts[1]));
	OK(fi_trecv(s.srx, incoming, 16, NULL, FI_ADDR_UNSPEC, 2, 0, &contexts[2]));
	OK(fi_cancel(&s.srx->fid, &contexts[1]));
	SAME(fi_cancel(&s.srx->fid, &contexts[1]), -FI_ENOENT);
	SAME(error_of(s.cq[0], s.sent, &contexts[1]), FI_ECANCELED);
	OK(fi_tsend(s.sender, outgoing, 16, NULL, s.to[3], 2, NULL));
	CHECK(wait_for(s.cq[3], &s.sent, 1, NULL).op_context == &contexts[2]);

	/* An endpoint goes, and the others share on. */
	OK(fi_trecv(s.srx, incoming, 16, NULL, FI_ADDR_UNSPEC, 3, 0, &contexts[3]));
	OK(fi_close(&s.ep[0]->fid));
	s.ep[0] = NULL;
	OK(fi_tsend(s.sender, outgoing, 16, NULL, s.to[1], 3, NULL));
	CHECK(wait_for(s.cq[1], &s.sent, 1, NULL).op_context == &contexts[3]);
	close_shared(&s);
}

/* Forks a process that ends with this one, and a link to it. 0: this is that process. */
static pid_t branch(int *link)
{
	int links[2];
	pid_t child;

	OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, links));
	fflush(NULL);
	child = fork();
	CHECK(child >= 0);
	if (!child)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	close(links[child ? 1 : 0]);
	*link = links[child ? 0 : 1];
	return child;
}

/* More messages than one turn of progress takes. */
#define BATCH 40

/* A process that sends to the endpoints of these names, three messages to the first and many to the second, the last of
 * which has tag 9, and waits to be killed. */
static void send_and_wait(int link)
{
	struct domain d;
	struct fid_ep *ep;
	struct fid_cq *cq;
	char name[NAME_MAX_LEN];
	size_t len = sizeof(name);
	fi_addr_t to[2];

	open_domain(&d, FI_MSG | FI_TAGGED, 0, 0);
	cq = open_queue(&d);
	OK(fi_endpoint(d.domain, d.info, &ep, NULL));
	OK(fi_ep_bind(ep, &d.av->fid, 0));
	OK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	OK(fi_enable(ep));
	for (int i = 0; i < 2; i++) {
		SAME(read(link, name, sizeof(name)), sizeof(name));
		SAME(fi_av_insert(d.av, name, 1, &to[i], 0, NULL), 1);
	}
	OK(fi_getname(&ep->fid, name, &len));
	SAME(write(link, name, sizeof(name)), sizeof(name));
	fill(outgoing, 8, 3);
	for (int i = 0; i < BATCH; i++) {
		OK(fi_tsend(ep, outgoing, 8, NULL, to[1], i == 0 ? 10 : i < BATCH - 1 ? 11 : 9, NULL));
		wait_for(cq, NULL, 0, NULL);
		if (!i)
			SAME(read(link, name, 1), 1);
	}
	for (int i = 0; i < 3; i++) {
		fill(outgoing, 8, i);
		if (i < 2)
			OK(fi_send(ep, outgoing, 8, NULL, to[0], NULL));
		else
			OK(fi_tsend(ep, outgoing, 8, NULL, to[0], 7, NULL));
		wait_for(cq, NULL, 0, NULL);
	}
	/* The network may keep what is short for a moment. */
	poll_only(cq, cq);
	SAME(write(link, name, 1), 1);
	for (;;)
		fi_cq_read(cq, NULL, 0);
}

/* The messages of a process that has died are received, and only then a receive from it fails. `early`: the receive of the
 * last message is posted while it lives. */
static void hear_the_dead(bool early)
{
	struct shared s;
	int link, status;
	size_t min = 8, len = NAME_MAX_LEN;
	char name[NAME_MAX_LEN], last[8];
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	struct iovec iov = { incoming, 800 };
	struct fi_msg many = { .msg_iov = &iov, .iov_count = 1, .context = &contexts[2] };
	fi_addr_t dead;
	pid_t child;

	child = branch(&link);
	if (!child)
		send_and_wait(link);
	open_shared(&s);
	OK(fi_setopt(&s.srx->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &min, sizeof(min)));
	for (int i = 2; i < 4; i++) {
		OK(fi_getname(&s.ep[i]->fid, name, &len));
		SAME(write(link, name, sizeof(name)), sizeof(name));
	}
	SAME(read(link, name, sizeof(name)), sizeof(name));
	SAME(fi_av_insert(s.here.av, name, 1, &dead, 0, NULL), 1);
	/* The last endpoint is not looked at after its first message. */
	OK(fi_trecv(s.srx, incoming, 8, NULL, dead, 10, 0, &contexts[1]));
	wait_for(s.cq[3], NULL, 0, NULL);
	SAME(write(link, name, 1), 1);
	for (double end = now() + PATIENCE_S; recv(link, name, 1, MSG_DONTWAIT) != 1;) {
		CHECK(now() < end);
		SAME(fi_cq_read(s.cq[2], NULL, 0), -FI_EAGAIN);
	}
	OK(fi_trecv(s.srx, incoming, 8, NULL, dead, 8, 0, &contexts[1]));
	if (early)
		OK(fi_trecv(s.srx, last, 8, NULL, dead, 9, 0, &contexts[3]));
	/* The network misses those to which something is owed. */
	OK(kill(child, SIGSTOP));
	OK(fi_tinject(s.ep[2], outgoing, 8, dead, 1));
	OK(kill(child, SIGKILL));
	SAME(waitpid(child, &status, 0), child);
	CHECK(error_of(s.cq[2], s.cq[3], &contexts[1]) != FI_ECANCELED);

	OK(fi_trecv(s.srx, incoming, 8, NULL, dead, 7, 0, &contexts[1]));
	CHECK(wait_for(s.cq[2], NULL, 0, NULL).op_context == &contexts[1]);
	CHECK(holds(incoming, 8, 2, 0));
	OK(fi_trecv(s.srx, incoming, 8, NULL, dead, 7, 0, &contexts[1]));
	CHECK(error_of(s.cq[2], s.cq[0], &contexts[1]) != FI_ECANCELED);
	/* What is for an endpoint that has not been looked at, too. */
	if (!early)
		OK(fi_trecv(s.srx, last, 8, NULL, dead, 9, 0, &contexts[3]));
	CHECK(wait_for(s.cq[3], NULL, 0, NULL).op_context == &contexts[3]);
	CHECK(holds(last, 8, 3, 0));
	/* A buffer for several takes what has come, and goes back. */
	many.addr = dead;
	OK(fi_recvmsg(s.srx, &many, FI_MULTI_RECV));
	for (int i = 0; i < 2; i++) {
		entry = wait_for(s.cq[2], NULL, 0, NULL);
		CHECK(entry.op_context == &contexts[2] && !(entry.flags & FI_MULTI_RECV));
		CHECK(holds(entry.buf, 8, i, 0));
	}
	SAME(fi_cq_read(s.cq[2], &entry, 1), -FI_EAVAIL);
	SAME(fi_cq_readerr(s.cq[2], &error, 0), 1);
	CHECK(error.op_context == &contexts[2] && error.flags & FI_MULTI_RECV);
	empty(s.cq, COUNT);
	OK(close(link));
	close_shared(&s);
}

static void the_dead_are_heard(void)
{
	hear_the_dead(false);
	hear_the_dead(true);
}

struct name {
	char bytes[NAME_MAX_LEN];
	size_t len;
};

/* A process at the address of `own`, if that is one, that sends a message of each tag it hears, of 100 and more to the second
 * of the endpoints, says so, and waits to be killed. */
static void speak(int link, struct name *own, const struct name *to_names)
{
	struct domain d;
	struct fid_ep *ep;
	struct fid_cq *cq;
	fi_addr_t to[2];
	uint64_t tag;

	open_domain(&d, FI_MSG | FI_TAGGED, 0, 0);
	cq = open_queue(&d);
	OK(fi_endpoint(d.domain, d.info, &ep, NULL));
	OK(fi_ep_bind(ep, &d.av->fid, 0));
	OK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	if (own->len)
		OK(fi_setname(&ep->fid, own->bytes, own->len));
	OK(fi_enable(ep));
	for (int i = 0; i < 2; i++)
		SAME(fi_av_insert(d.av, to_names[i].bytes, 1, &to[i], 0, NULL), 1);
	own->len = sizeof(own->bytes);
	OK(fi_getname(&ep->fid, own->bytes, &own->len));
	SAME(write(link, own, sizeof(*own)), sizeof(*own));
	for (;;) {
		if (recv(link, &tag, sizeof(tag), MSG_DONTWAIT) == sizeof(tag)) {
			fill(outgoing, 8, tag);
			OK(fi_tsend(ep, outgoing, 8, NULL, to[tag >= 100], tag, NULL));
			wait_for(cq, NULL, 0, NULL);
			/* The network may keep what is short for a moment. */
			poll_only(cq, cq);
			SAME(write(link, &tag, sizeof(tag)), sizeof(tag));
		}
		fi_cq_read(cq, NULL, 0);
	}
}

struct speaker {
	pid_t pid;
	int link;
};

static struct speaker open_speaker(void)
{
	struct speaker speaker;
	struct name names[3];

	speaker.pid = branch(&speaker.link);
	if (!speaker.pid) {
		if (read(speaker.link, names, sizeof(names)) != sizeof(names))
			_exit(1);
		speak(speaker.link, &names[0], &names[1]);
	}
	return speaker;
}

/* Lets it speak to two of the endpoints, at this address if that is one, which becomes its own. */
static void introduce(struct shared *s, const struct speaker *speaker, struct name *own, int first, int second)
{
	struct name names[3] = { *own };
	int eps[] = { first, second };

	for (int i = 0; i < 2; i++) {
		names[1 + i].len = NAME_MAX_LEN;
		OK(fi_getname(&s->ep[eps[i]]->fid, names[1 + i].bytes, &names[1 + i].len));
	}
	SAME(write(speaker->link, names, sizeof(names)), sizeof(names));
	SAME(read(speaker->link, own, sizeof(*own)), sizeof(*own));
}

static void say(const struct speaker *speaker, uint64_t tag)
{
	uint64_t said;

	SAME(write(speaker->link, &tag, sizeof(tag)), sizeof(tag));
	SAME(read(speaker->link, &said, sizeof(said)), sizeof(said));
}

static void end_speaker(const struct speaker *speaker)
{
	OK(kill(speaker->pid, SIGKILL));
	SAME(waitpid(speaker->pid, NULL, 0), speaker->pid);
	close(speaker->link);
}

/* Ends a speaker to which an endpoint has sent something that completes when it is received. */
static void end_owed(const struct speaker *speaker, struct fid_ep *ep, fi_addr_t peer, void *context)
{
	struct iovec iov = { outgoing, 8 };
	struct fi_msg_tagged msg = { .msg_iov = &iov, .iov_count = 1, .addr = peer, .context = context };

	OK(kill(speaker->pid, SIGSTOP));
	OK(fi_tsendmsg(ep, &msg, FI_DELIVERY_COMPLETE));
	end_speaker(speaker);
}

/* A shared context, and two peers, which were made before it. */
static void open_with_two(struct shared *s, struct speaker speakers[2])
{
	for (int i = 0; i < 2; i++)
		speakers[i] = open_speaker();
	open_shared(s);
}

/* A peer has died for one endpoint, and its next incarnation sends to another one. */
static void the_next_incarnation_is_heard(void)
{
	struct shared s;
	struct name own = { .len = 0 };
	struct speaker speakers[2];
	fi_addr_t peer;

	open_with_two(&s, speakers);
	for (int i = 0; i < 2; i++) {
		struct fid_cq *cq = s.cq[2 - i];

		introduce(&s, &speakers[i], &own, 2 - i, 2 - i);
		if (!i)
			SAME(fi_av_insert(s.here.av, own.bytes, 1, &peer, 0, NULL), 1);
		/* From anybody first: of the second one nothing is heard yet. */
		for (uint64_t tag = 1; tag < 4; tag++) {
			OK(fi_trecv(s.srx, incoming, 8, NULL, tag == 1 ? FI_ADDR_UNSPEC : peer, tag, 0, &contexts[tag]));
			poll_only(s.cq[0], s.sent);
			say(&speakers[i], tag);
			CHECK(wait_for(cq, s.cq, COUNT, NULL).op_context == &contexts[tag]);
			CHECK(holds(incoming, 8, tag, 0));
		}
		OK(fi_trecv(s.srx, incoming, 8, NULL, peer, 9, 0, &contexts[9]));
		end_speaker(&speakers[i]);
		CHECK(error_of(cq, s.cq[0], &contexts[9]) != FI_ECANCELED);
	}
	close_shared(&s);
}

/* A receive that waits for a dead peer is reported by one of the endpoints. */
static void fails_somewhere(struct shared *s, void *context)
{
	double end = now() + PATIENCE_S;
	int i = 0;

	while (fi_cq_read(s->cq[i], NULL, 0) != -FI_EAVAIL) {
		CHECK(now() < end);
		i = (i + 1) % COUNT;
	}
	CHECK(error_of(s->cq[i], s->cq[i], context) != FI_ECANCELED);
}

/* The other way round: one endpoint finds out that a peer has died when the next incarnation is linked to another one. */
static void a_late_death_is_outweighed(void)
{
	struct shared s;
	struct name own = { .len = 0 };
	struct speaker speakers[2];
	fi_addr_t peer;

	open_with_two(&s, speakers);
	introduce(&s, &speakers[0], &own, 2, 1);
	SAME(fi_av_insert(s.here.av, own.bytes, 1, &peer, 0, NULL), 1);
	OK(fi_trecv(s.srx, incoming, 8, NULL, peer, 1, 0, &contexts[1]));
	say(&speakers[0], 1);
	CHECK(wait_for(s.cq[2], NULL, 0, NULL).op_context == &contexts[1]);
	end_owed(&speakers[0], s.ep[2], peer, &contexts[0]);

	introduce(&s, &speakers[1], &own, 2, 1);
	OK(fi_trecv(s.srx, incoming, 8, NULL, FI_ADDR_UNSPEC, 101, 0, &contexts[1]));
	say(&speakers[1], 101);
	CHECK(wait_for(s.cq[1], NULL, 0, NULL).op_context == &contexts[1]);
	OK(fi_trecv(s.srx, incoming, 8, NULL, peer, 102, 0, &contexts[2]));
	error_of(s.cq[2], s.cq[2], &contexts[0]);
	OK(fi_trecv(s.srx, incoming + 8, 8, NULL, peer, 103, 0, &contexts[3]));
	for (uint64_t tag = 102; tag < 104; tag++) {
		say(&speakers[1], tag);
		CHECK(wait_for(s.cq[1], &s.cq[2], 1, NULL).op_context == &contexts[tag - 100]);
		CHECK(holds(incoming + 8 * (tag - 102), 8, tag, 0));
	}
	empty(s.cq, COUNT);

	/* Now that both are dead, by the last endpoint that has heard of one, and when that closes without knowing. */
	OK(fi_trecv(s.srx, incoming, 8, NULL, peer, 104, 0, &contexts[4]));
	end_speaker(&speakers[1]);
	OK(fi_close(&s.ep[1]->fid));
	s.ep[1] = NULL;
	fails_somewhere(&s, &contexts[4]);
	close_shared(&s);
}

#define FEW 8

/* A message of a dead peer waits for an endpoint whose queue has no room: a receive for it does not fail. `met`: that
 * endpoint has heard of the peer before. */
static void wait_for_a_full_queue(bool met)
{
	struct shared s;
	struct name own = { .len = 0 };
	struct speaker speaker = open_speaker();
	volatile uint8_t *filled = incoming;
	double end;
	fi_addr_t peer;

	open_shared_with(&s, 0, FEW);
	introduce(&s, &speaker, &own, 2, 3);
	SAME(fi_av_insert(s.here.av, own.bytes, 1, &peer, 0, NULL), 1);
	OK(fi_trecv(s.srx, incoming, 8, NULL, peer, 1, 0, &contexts[1]));
	say(&speaker, 1);
	CHECK(wait_for(s.cq[2], NULL, 0, NULL).op_context == &contexts[1]);
	if (met) {
		OK(fi_trecv(s.srx, incoming, 8, NULL, peer, 100, 0, &contexts[1]));
		say(&speaker, 100);
		CHECK(wait_for(s.cq[3], NULL, 0, NULL).op_context == &contexts[1]);
	}
	/* One more than there is room for. */
	memset(incoming, 0, FEW + 1);
	outgoing[0] = 1;
	for (int i = 0; i <= FEW; i++) {
		OK(fi_recv(s.srx, incoming + i, 1, NULL, FI_ADDR_UNSPEC, &contexts[2]));
		OK(fi_send(s.sender, outgoing, 1, NULL, s.to[3], NULL));
		wait_for(s.sent, NULL, 0, NULL);
	}
	for (end = now() + PATIENCE_S; !filled[FEW]; fi_cq_read(s.cq[3], NULL, 0)) {
		fi_cq_read(s.sent, NULL, 0);
		CHECK(now() < end);
	}
	say(&speaker, 101);
	OK(fi_trecv(s.srx, incoming, 8, NULL, peer, 101, 0, &contexts[3]));
	end_owed(&speaker, s.ep[2], peer, &contexts[0]);
	error_of(s.cq[2], s.cq[2], &contexts[0]);
	for (int i = 0; i <= FEW; i++)
		CHECK(wait_for(s.cq[3], NULL, 0, NULL).op_context == &contexts[2]);
	CHECK(wait_for(s.cq[3], &s.cq[2], 1, NULL).op_context == &contexts[3]);
	CHECK(holds(incoming, 8, 101, 0));
	empty(s.cq, COUNT);
	OK(fi_trecv(s.srx, incoming, 8, NULL, peer, 102, 0, &contexts[3]));
	fails_somewhere(&s, &contexts[3]);
	close_shared(&s);
}

static void the_dead_wait_for_a_full_queue(void)
{
	const char *shm = getenv("FI_UDRV_SHM");

	wait_for_a_full_queue(true);
	/* Over shared memory a message to an endpoint that has not met its sender is not complete. */
	if (shm && !strcmp(shm, "0"))
		wait_for_a_full_queue(false);
}

static void another_vector_is_refused(void)
{
	struct shared s;
	struct fi_av_attr attr = { .type = FI_AV_TABLE };
	struct fid_av *av;
	struct fid_ep *ep;

	open_shared(&s);
	OK(fi_av_open(s.here.domain, &attr, &av, NULL));
	OK(fi_endpoint(s.here.domain, s.here.info, &ep, NULL));
	OK(fi_ep_bind(ep, &av->fid, 0));
	OK(fi_ep_bind(ep, &s.cq[0]->fid, FI_TRANSMIT | FI_RECV));
	OK(fi_ep_bind(ep, &s.stx->fid, 0));
	OK(fi_ep_bind(ep, &s.srx->fid, 0));
	SAME(fi_enable(ep), -FI_EINVAL);
	OK(fi_close(&ep->fid));
	OK(fi_close(&av->fid));
	/* An endpoint opened without a shared context gets none. */
	OK(fi_endpoint(s.there.domain, s.there.info, &ep, NULL));
	SAME(fi_ep_bind(ep, &s.srx->fid, 0), -FI_EINVAL);
	SAME(fi_ep_bind(ep, &s.stx->fid, 0), -FI_EINVAL);
	OK(fi_close(&ep->fid));
	close_shared(&s);
}

/* Messages for an endpoint take the receives of all, so it has to report them, whatever else it is for. */
static void messages_of_a_shared_context_are_reported(void)
{
	static const uint64_t caps[] = { FI_MSG | FI_RMA, FI_MSG | FI_ATOMIC };

	for (int i = 0; i < 2; i++) {
		struct domain d;
		struct fid_ep *srx, *ep;
		struct fid_cq *cq;

		open_domain(&d, caps[i], 0, FI_SHARED_CONTEXT);
		OK(fi_srx_context(d.domain, d.info->rx_attr, &srx, NULL));
		OK(fi_endpoint(d.domain, d.info, &ep, NULL));
		cq = open_queue(&d);
		OK(fi_ep_bind(ep, &d.av->fid, 0));
		OK(fi_ep_bind(ep, &srx->fid, 0));
		OK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT));
		SAME(fi_enable(ep), -FI_ENOCQ);
		OK(fi_ep_bind(ep, &cq->fid, FI_RECV));
		OK(fi_enable(ep));
		OK(fi_close(&ep->fid));
		OK(fi_close(&cq->fid));
		OK(fi_close(&srx->fid));
		close_domain(&d);
	}
}

/*
 * Sandia OpenSHMEM binds counters to an endpoint that is enabled, and a shared transmit context that the endpoint has
 * not asked for, which it closes before the endpoint.
 */
static void bound_after_enable(void)
{
	struct domain here;
	struct fid_ep *ep;
	struct fid_cq *cq;
	struct fid_stx *stx;
	struct fid_cntr *writes;
	struct fid_mr *mr;
	uint64_t memory = 0, one = 1;
	fi_addr_t self;

	open_domain(&here, FI_MSG | FI_RMA, 0, 0);
	cq = open_queue(&here);
	OK(fi_endpoint(here.domain, here.info, &ep, NULL));
	OK(fi_ep_bind(ep, &here.av->fid, 0));
	OK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV | FI_SELECTIVE_COMPLETION));
	OK(fi_enable(ep));
	OK(fi_cntr_open(here.domain, &(struct fi_cntr_attr){ .wait_obj = FI_WAIT_UNSPEC }, &writes, NULL));
	OK(fi_ep_bind(ep, &writes->fid, FI_WRITE));
	SAME(fi_ep_bind(ep, &writes->fid, FI_WRITE), -FI_EINVAL);
	SAME(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT), -FI_EOPBADSTATE);
	OK(fi_stx_context(here.domain, here.info->tx_attr, &stx, NULL));
	OK(fi_ep_bind(ep, &stx->fid, 0));
	self = learn(&here, &ep->fid);
	OK(fi_mr_reg(here.domain, &memory, sizeof(memory), FI_REMOTE_WRITE, 0, 7, 0, &mr, NULL));
	OK(fi_inject_write(ep, &one, sizeof(one), self, 0, 7));
	OK(fi_cntr_wait(writes, 1, 5000));
	SAME(memory, 1);
	OK(fi_close(&stx->fid));
	OK(fi_close(&mr->fid));
	OK(fi_close(&ep->fid));
	OK(fi_close(&writes->fid));
	OK(fi_close(&cq->fid));
	close_domain(&here);
}

/* --- scalable endpoints --- */

struct scalable {
	struct domain domain;
	struct fid_ep *sep, *tx[COUNT], *rx[COUNT];
	/* Of transmit contexts, then of receive contexts. */
	struct fid_cq *cq[2 * COUNT];
};

static void open_transmit(struct scalable *s, int i)
{
	OK(fi_tx_context(s->sep, i, NULL, &s->tx[i], NULL));
	SAME(s->tx[i]->fid.fclass, FI_CLASS_TX_CTX);
	SAME(fi_ep_bind(s->tx[i], &s->cq[i]->fid, FI_RECV), -FI_EINVAL);
	/* Chapel binds a queue for both. */
	OK(fi_ep_bind(s->tx[i], &s->cq[i]->fid, FI_TRANSMIT | (i % 2 ? FI_RECV : 0)));
	SAME(fi_ep_bind(s->tx[i], &s->cq[i]->fid, FI_TRANSMIT), -FI_EINVAL);
	OK(fi_enable(s->tx[i]));
	SAME(fi_enable(s->tx[i]), -FI_EOPBADSTATE);
}

static void open_receive(struct scalable *s, int i)
{
	OK(fi_rx_context(s->sep, i, NULL, &s->rx[i], NULL));
	SAME(s->rx[i]->fid.fclass, FI_CLASS_RX_CTX);
	SAME(fi_ep_bind(s->rx[i], &s->cq[COUNT + i]->fid, FI_TRANSMIT), -FI_EINVAL);
	OK(fi_ep_bind(s->rx[i], &s->cq[COUNT + i]->fid, FI_RECV | (i % 2 ? FI_TRANSMIT : 0)));
	OK(fi_enable(s->rx[i]));
}

static void open_scalable(struct scalable *s)
{
	struct fid_ep *none;

	memset(s, 0, sizeof(*s));
	open_domain(&s->domain, FI_MSG | FI_TAGGED | FI_RMA | FI_SOURCE | FI_NAMED_RX_CTX | FI_TRIGGER, COUNT, COUNT);
	OK(fi_scalable_ep(s->domain.domain, s->domain.info, &s->sep, NULL));
	SAME(s->sep->fid.fclass, FI_CLASS_SEP);
	OK(fi_scalable_ep_bind(s->sep, &s->domain.av->fid, 0));
	SAME(fi_tx_context(s->sep, COUNT, NULL, &none, NULL), -FI_EINVAL);
	SAME(fi_rx_context(s->sep, -1, NULL, &none, NULL), -FI_EINVAL);
	for (int i = 0; i < 2 * COUNT; i++)
		s->cq[i] = open_queue(&s->domain);
	for (int i = 0; i < COUNT; i++) {
		open_transmit(s, i);
		open_receive(s, i);
	}
	SAME(fi_tx_context(s->sep, 1, NULL, &none, NULL), -FI_EBUSY);
	OK(fi_enable(s->sep));
	SAME(fi_enable(s->sep), -FI_EOPBADSTATE);
	SAME(fi_send(s->sep, outgoing, 1, NULL, 0, NULL), -FI_ENOSYS);
	SAME(fi_send(s->rx[0], outgoing, 1, NULL, 0, NULL), -FI_ENOSYS);
	SAME(fi_recv(s->tx[0], incoming, 1, NULL, 0, NULL), -FI_ENOSYS);
}

static void close_scalable(struct scalable *s)
{
	SAME(fi_close(&s->sep->fid), -FI_EBUSY);
	for (int i = 0; i < COUNT; i++) {
		OK(fi_close(&s->tx[i]->fid));
		OK(fi_close(&s->rx[i]->fid));
	}
	/* Nobody uses them any more. */
	for (int i = 0; i < 2 * COUNT; i++)
		OK(fi_close(&s->cq[i]->fid));
	OK(fi_close(&s->sep->fid));
	close_domain(&s->domain);
}

/* From each transmit to each receive context: entries are where they belong, and the source is the endpoint. */
/* Chapel makes both kinds of endpoints from one info, and asks for more contexts than a node has processors. */
static void one_info_for_both_kinds_of_endpoints(void)
{
	enum { MANY = 200 };
	struct domain d;
	struct fid_ep *ep, *sep, *contexts_of[3];
	static const int numbers[] = { 0, 70, MANY - 1 };

	open_domain(&d, FI_MSG, MANY, MANY);
	OK(fi_endpoint(d.domain, d.info, &ep, NULL));
	OK(fi_close(&ep->fid));
	OK(fi_scalable_ep(d.domain, d.info, &sep, NULL));
	for (int i = 0; i < 3; i++) {
		OK(fi_tx_context(sep, numbers[i], NULL, &contexts_of[i], NULL));
		SAME(fi_tx_context(sep, numbers[i], NULL, &ep, NULL), -FI_EBUSY);
	}
	SAME(fi_tx_context(sep, MANY, NULL, &ep, NULL), -FI_EINVAL);
	for (int i = 0; i < 3; i++)
		OK(fi_close(&contexts_of[i]->fid));
	OK(fi_close(&sep->fid));
	close_domain(&d);
}

static void every_context_reaches_every_context(void)
{
	struct scalable a, b;

	open_scalable(&a);
	open_scalable(&b);
	fi_addr_t to = learn(&a.domain, &b.sep->fid), from;

	learn(&b.domain, &b.sep->fid);
	fi_addr_t back = learn(&b.domain, &a.sep->fid);

	for (size_t n = 0; n < LENGTHS; n++)
		for (int i = 0; i < COUNT; i++)
			for (int j = 0; j < COUNT; j++) {
				size_t len = lengths[n];
				uint32_t seed = 16 * n + 4 * i + j;
				fi_addr_t dest = fi_rx_addr(to, j, BITS);
				bool early = (i + j) % 2;
				struct fid_cq *cq = b.cq[COUNT + j];

				fill(outgoing, len, seed);
				memset(incoming, 0, len);
				/* The same receive in all contexts: only the one that is named takes the message. */
				for (int k = 0; early && k < COUNT; k++)
					OK(fi_trecv(b.rx[k], incoming, LONG, NULL, FI_ADDR_UNSPEC, 1, 0, &contexts[k]));
				OK(fi_tsend(a.tx[i], outgoing, len, NULL, dest, 1, &contexts[8 + i]));
				if (!early) {
					poll_only(cq, a.cq[i]);
					OK(fi_trecv(b.rx[j], incoming, LONG, NULL, FI_ADDR_UNSPEC, 1, 0, &contexts[j]));
				}
				struct fi_cq_tagged_entry entry = wait_for(cq, a.cq, COUNT, &from);

				CHECK(entry.op_context == &contexts[j]);
				SAME(entry.len, len);
				SAME(from, back);
				CHECK(holds(incoming, len, seed, 0));
				CHECK(wait_for(a.cq[i], b.cq, 2 * COUNT, NULL).op_context == &contexts[8 + i]);
				for (int k = 0; early && k < COUNT; k++) {
					SAME(fi_cancel(&b.rx[k]->fid, &contexts[k]), k == j ? -FI_ENOENT : 0);
					if (k != j)
						SAME(error_of(b.cq[COUNT + k], a.cq[0], &contexts[k]), FI_ECANCELED);
				}
				empty(a.cq, 2 * COUNT);
				empty(b.cq, 2 * COUNT);
			}
	close_scalable(&a);
	close_scalable(&b);
}

/* An ordinary endpoint names a context of a scalable one; it has but one itself. */
static void ordinary_endpoints_name_contexts(void)
{
	struct scalable a;
	struct domain d;
	struct fid_ep *ep;
	struct fid_cq *cq;

	open_scalable(&a);
	open_domain(&d, FI_MSG | FI_TAGGED, 0, 0);
	cq = open_queue(&d);
	OK(fi_endpoint(d.domain, d.info, &ep, NULL));
	OK(fi_ep_bind(ep, &d.av->fid, 0));
	OK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	OK(fi_enable(ep));
	fi_addr_t to = learn(&d, &a.sep->fid), back = learn(&a.domain, &ep->fid);

	for (int i = 0; i < COUNT; i++) {
		fill(outgoing, 8, i);
		OK(fi_recv(a.rx[i], incoming, 8, NULL, fi_rx_addr(back, 0, BITS), &contexts[i]));
		OK(fi_send(ep, outgoing, 8, NULL, fi_rx_addr(to, i, BITS), NULL));
		CHECK(wait_for(a.cq[COUNT + i], &cq, 1, NULL).op_context == &contexts[i]);
		wait_for(cq, a.cq, COUNT, NULL);

		OK(fi_recv(ep, incoming, 8, NULL, FI_ADDR_UNSPEC, NULL));
		OK(fi_send(a.tx[i], outgoing, 8, NULL, back, &contexts[i]));
		wait_for(cq, a.cq, COUNT, NULL);
		CHECK(wait_for(a.cq[i], &cq, 1, NULL).op_context == &contexts[i]);
	}
	/* A context that is not there takes nothing, and a sender that waits for an answer is told. */
	for (size_t n = 1; n < LENGTHS; n++) {
		struct iovec iov = { outgoing, lengths[n] };
		struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = fi_rx_addr(back, 3, BITS), .context = contexts };

		OK(fi_sendmsg(a.tx[2], &msg, FI_DELIVERY_COMPLETE | FI_COMPLETION));
		SAME(error_of(a.cq[2], cq, contexts), FI_ECONNREFUSED);
	}
	OK(fi_close(&ep->fid));
	OK(fi_close(&cq->fid));
	close_domain(&d);
	close_scalable(&a);
}

/* Contexts come and go while the others work. */
static void contexts_come_and_go(void)
{
	struct scalable a, b;
	struct fid_ep *alias;
	uint64_t flags = FI_TRANSMIT;

	open_scalable(&a);
	open_scalable(&b);
	fi_addr_t to = learn(&a.domain, &b.sep->fid);

	learn(&b.domain, &a.sep->fid);
	/* What was posted is dropped, and what comes meanwhile waits. */
	OK(fi_recv(b.rx[1], incoming, 8, NULL, FI_ADDR_UNSPEC, &contexts[0]));
	OK(fi_close(&b.rx[1]->fid));
	fill(outgoing, LONG, 3);
	OK(fi_send(a.tx[0], outgoing, 8, NULL, fi_rx_addr(to, 1, BITS), NULL));
	struct iovec part = { outgoing, LONG };
	struct fi_msg pends = { .msg_iov = &part, .iov_count = 1, .addr = fi_rx_addr(to, 1, BITS) };

	OK(fi_sendmsg(a.tx[1], &pends, FI_DELIVERY_COMPLETE | FI_COMPLETION));
	poll_only(b.cq[COUNT], a.cq[0]);
	open_receive(&b, 1);
	OK(fi_recv(b.rx[1], incoming, 8, NULL, FI_ADDR_UNSPEC, &contexts[1]));
	CHECK(wait_for(b.cq[COUNT + 1], a.cq, COUNT, NULL).op_context == &contexts[1]);
	/* A send that nobody takes keeps its context. */
	SAME(fi_close(&a.tx[1]->fid), -FI_EBUSY);
	OK(fi_recv(b.rx[1], incoming, LONG, NULL, FI_ADDR_UNSPEC, &contexts[2]));
	SAME(wait_for(b.cq[COUNT + 1], a.cq, COUNT, NULL).len, LONG);
	CHECK(holds(incoming, LONG, 3, 0));
	wait_for(a.cq[1], b.cq, 2 * COUNT, NULL);
	wait_for(a.cq[0], b.cq, 2 * COUNT, NULL);
	OK(fi_close(&a.tx[1]->fid));
	open_transmit(&a, 1);
	/* An alias is of its context. */
	OK(fi_ep_alias(a.tx[1], &alias, FI_TRANSMIT | FI_DELIVERY_COMPLETE));
	OK(fi_control(&alias->fid, FI_GETOPSFLAG, &flags));
	SAME(flags, FI_DELIVERY_COMPLETE);
	SAME(fi_close(&a.tx[1]->fid), -FI_EBUSY);
	OK(fi_recv(b.rx[2], incoming, 8, NULL, FI_ADDR_UNSPEC, &contexts[3]));
	OK(fi_send(alias, outgoing, 8, NULL, fi_rx_addr(to, 2, BITS), &contexts[4]));
	wait_for(b.cq[COUNT + 2], a.cq, COUNT, NULL);
	CHECK(wait_for(a.cq[1], b.cq, 2 * COUNT, NULL).op_context == &contexts[4]);
	OK(fi_close(&alias->fid));
	close_scalable(&a);
	close_scalable(&b);
}

static void tell_byte(int link)
{
	SAME(write(link, "", 1), 1);
}

static void hear_byte(int link)
{
	char byte;

	SAME(read(link, &byte, 1), 1);
}

/* Sends to the contexts of `name`, over the network. Between the parts of a long message it does nothing for long. */
static void send_with_a_pause(int link, const uint8_t *name)
{
	struct domain d;
	struct fid_ep *ep;
	struct fid_cq *cq;
	fi_addr_t to;
	bool off = false;

	open_domain(&d, FI_MSG | FI_TAGGED, 0, 0);
	cq = open_queue(&d);
	OK(fi_endpoint(d.domain, d.info, &ep, NULL));
	OK(fi_ep_bind(ep, &d.av->fid, 0));
	OK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	OK(fi_setopt(&ep->fid, FI_OPT_ENDPOINT, SHARED_MEMORY_PERMITTED, &off, sizeof(off)));
	OK(fi_enable(ep));
	SAME(fi_av_insert(d.av, name, 1, &to, 0, NULL), 1);
	fill(outgoing, LONG, 1);
	/* The connection is there once this has arrived. */
	OK(fi_send(ep, outgoing, 8, NULL, fi_rx_addr(to, 0, BITS), NULL));
	wait_for(cq, NULL, 0, NULL);
	hear_byte(link);
	OK(fi_send(ep, outgoing, LONG, NULL, fi_rx_addr(to, 1, BITS), NULL));
	tell_byte(link);
	hear_byte(link);
	wait_for(cq, NULL, 0, NULL);
	OK(fi_send(ep, outgoing, 8, NULL, fi_rx_addr(to, 1, BITS), NULL));
	wait_for(cq, NULL, 0, NULL);
	hear_byte(link);
	OK(fi_close(&ep->fid));
	OK(fi_close(&cq->fid));
	close_domain(&d);
	_exit(0);
}

/* While a message is arriving in a context, that is not closed, and keeps the receives that are posted to it. */
static void a_context_that_is_not_closed_keeps_its_receives(void)
{
	struct scalable a;
	uint8_t name[NAME_MAX_LEN];
	size_t len = sizeof(name);
	int link, status;
	pid_t child = branch(&link);

	if (!child) {
		SAME(read(link, name, sizeof(name)), sizeof(name));
		send_with_a_pause(link, name);
	}
	open_scalable(&a);
	OK(fi_getname(&a.sep->fid, name, &len));
	SAME(write(link, name, sizeof(name)), sizeof(name));
	OK(fi_recv(a.rx[0], incoming, 8, NULL, FI_ADDR_UNSPEC, NULL));
	wait_for(a.cq[COUNT], NULL, 0, NULL);
	memset(incoming, 0, LONG + 8);
	OK(fi_recv(a.rx[1], incoming, LONG, NULL, FI_ADDR_UNSPEC, &contexts[0]));
	OK(fi_recv(a.rx[1], incoming + LONG, 8, NULL, FI_ADDR_UNSPEC, &contexts[1]));
	tell_byte(link);
	hear_byte(link);
	poll_only(a.cq[COUNT + 1], a.cq[0]);
	SAME(fi_close(&a.rx[1]->fid), -FI_EBUSY);
	tell_byte(link);
	for (int i = 0; i < 2; i++) {
		CHECK(wait_for(a.cq[COUNT + 1], a.cq, 2 * COUNT, NULL).op_context == &contexts[i]);
		CHECK(holds(incoming + i * LONG, i ? 8 : LONG, 1, 0));
	}
	tell_byte(link);
	close_scalable(&a);
	SAME(waitpid(child, &status, 0), child);
	SAME(status, 0);
	close(link);
}

/* A context that is closed takes with it what waits for a counter, and leaves what the other contexts have there. */
static void what_waits_goes_with_its_context(void)
{
	struct scalable a;
	struct fid_cntr *cntr;
	struct fi_triggered_context2 waiting[4];

	open_scalable(&a);
	fi_addr_t self = learn(&a.domain, &a.sep->fid);

	OK(fi_cntr_open(a.domain.domain, &(struct fi_cntr_attr){ 0 }, &cntr, NULL));
	for (int i = 0; i < 4; i++)
		waiting[i] = (struct fi_triggered_context2){
			.event_type = FI_TRIGGER_THRESHOLD,
			.trigger.threshold = { .cntr = cntr, .threshold = 1 },
		};
	for (int i = 0; i < 2; i++) {
		struct iovec from = { outgoing + 8 * i, 8 }, to = { incoming + 8 * i, 8 };
		struct fi_msg send = { .msg_iov = &from, .iov_count = 1, .addr = fi_rx_addr(self, 2 + i, BITS),
				       .context = &waiting[i] };
		struct fi_msg receive = { .msg_iov = &to, .iov_count = 1, .addr = FI_ADDR_UNSPEC,
					  .context = &waiting[2 + i] };

		/* Send by context 0, then 1; receive at context 1, then 0. */
		OK(fi_sendmsg(a.tx[i], &send, FI_TRIGGER | FI_COMPLETION));
		OK(fi_recvmsg(a.rx[1 - i], &receive, FI_TRIGGER | FI_COMPLETION));
	}
	OK(fi_close(&a.tx[0]->fid));
	OK(fi_close(&a.rx[1]->fid));
	memset(outgoing, 0xee, 8);
	memset(incoming, 0xee, 8);
	fill(outgoing + 8, 8, 1);
	OK(fi_cntr_add(cntr, 1));
	open_transmit(&a, 0);
	open_receive(&a, 1);
	CHECK(wait_for(a.cq[1], a.cq, 2 * COUNT, NULL).op_context == &waiting[1]);
	for (int i = 0; i < 2; i++)
		OK(fi_send(a.tx[2], outgoing, 8, NULL, fi_rx_addr(self, i, BITS), NULL));
	CHECK(wait_for(a.cq[COUNT], a.cq, 2 * COUNT, NULL).op_context == &waiting[3]);
	for (int i = 0; i < 2; i++)
		wait_for(a.cq[2], a.cq, 2 * COUNT, NULL);
	OK(fi_recv(a.rx[3], incoming + 8, 8, NULL, FI_ADDR_UNSPEC, &contexts[0]));
	wait_for(a.cq[COUNT + 3], a.cq, 2 * COUNT, NULL);
	CHECK(holds(incoming + 8, 8, 1, 0));
	memset(incoming + 8, 0, 8);
	/* Context 2 gets nothing from the transmit context that is gone, nor the receive that is gone a message. */
	OK(fi_recv(a.rx[2], incoming + 8, 8, NULL, FI_ADDR_UNSPEC, &contexts[0]));
	poll_only(a.cq[COUNT + 2], a.cq[0]);
	empty(a.cq, 2 * COUNT);
	OK(fi_recv(a.rx[1], incoming + 16, 8, NULL, FI_ADDR_UNSPEC, &contexts[1]));
	CHECK(wait_for(a.cq[COUNT + 1], a.cq, 2 * COUNT, NULL).op_context == &contexts[1]);
	OK(fi_close(&cntr->fid));
	close_scalable(&a);
}

/* A deferred receive that is posted goes without a report, and keeps neither its counter nor one of a later context. */
static void what_is_posted_goes_with_its_context(void)
{
	struct scalable a;
	struct fid_cntr *start, *came;

	open_scalable(&a);
	OK(fi_cntr_open(a.domain.domain, &(struct fi_cntr_attr){ 0 }, &start, NULL));
	for (int i = 0; i < 2; i++) {
		struct iovec to = { incoming, 8 };
		struct fi_op_msg op = { .ep = a.rx[0], .msg = { .msg_iov = &to, .iov_count = 1, .addr = FI_ADDR_UNSPEC } };
		struct fi_deferred_work work = { .triggering_cntr = start, .op_type = FI_OP_RECV, .op.msg = &op };

		OK(fi_cntr_open(a.domain.domain, &(struct fi_cntr_attr){ 0 }, &came, NULL));
		work.completion_cntr = came;
		OK(fi_control(&a.domain.domain->fid, FI_QUEUE_WORK, &work));
		/* Not for a further context. */
		op.ep = a.rx[1];
		SAME(fi_control(&a.domain.domain->fid, FI_QUEUE_WORK, &work), -FI_ENOSYS);
		poll_only(a.cq[COUNT], a.cq[0]);
		OK(fi_close(&a.rx[0]->fid));
		SAME(fi_cntr_read(came), 0);
		OK(fi_close(&came->fid));
		open_receive(&a, 0);
	}
	empty(a.cq, 2 * COUNT);
	OK(fi_close(&start->fid));
	close_scalable(&a);
}

/* What is due at a context whose queue is full waits alone: other contexts start what is due there, for the same peer too. */
static void a_full_queue_holds_up_its_context_alone(void)
{
	enum { FULL = 4096 };
	struct fi_triggered_context2 waiting[2];
	struct scalable a;
	struct fid_cntr *cntr;

	open_scalable(&a);
	fi_addr_t self = learn(&a.domain, &a.sep->fid);

	OK(fi_cntr_open(a.domain.domain, &(struct fi_cntr_attr){ 0 }, &cntr, NULL));
	double end = now() + PATIENCE_S;

	for (int sent = 0; sent < FULL;) {
		ssize_t rc = fi_send(a.tx[0], outgoing, 0, NULL, fi_rx_addr(self, 0, BITS), NULL);

		CHECK(rc == 0 || rc == -FI_EAGAIN);
		CHECK(now() < end);
		sent += rc == 0;
		fi_cq_read(a.cq[COUNT], NULL, 0);
	}
	SAME(fi_send(a.tx[0], outgoing, 0, NULL, fi_rx_addr(self, 0, BITS), NULL), -FI_EAGAIN);
	for (int i = 0; i < 2; i++) {
		struct fi_msg send = { .addr = fi_rx_addr(self, 1, BITS), .context = &waiting[i] };

		waiting[i] = (struct fi_triggered_context2){
			.event_type = FI_TRIGGER_THRESHOLD,
			.trigger.threshold = { .cntr = cntr, .threshold = 1 },
		};
		OK(fi_sendmsg(a.tx[i], &send, FI_TRIGGER | FI_COMPLETION));
	}
	OK(fi_cntr_add(cntr, 1));
	CHECK(wait_for(a.cq[1], NULL, 0, NULL).op_context == &waiting[1]);
	for (int i = 0; i < FULL; i++)
		CHECK(!wait_for(a.cq[0], NULL, 0, NULL).op_context);
	CHECK(wait_for(a.cq[0], NULL, 0, NULL).op_context == &waiting[0]);
	OK(fi_close(&cntr->fid));
	close_scalable(&a);
}

/* A transmit context and the endpoint itself cancel no receive of the context with their number. */
static void only_a_receive_context_cancels_its_receives(void)
{
	struct scalable a;

	open_scalable(&a);
	OK(fi_recv(a.rx[0], incoming, 8, NULL, FI_ADDR_UNSPEC, &contexts[0]));
	SAME(fi_cancel(&a.tx[0]->fid, &contexts[0]), -FI_ENOENT);
	SAME(fi_cancel(&a.sep->fid, &contexts[0]), -FI_ENOENT);
	SAME(fi_cancel(&a.rx[1]->fid, &contexts[0]), -FI_ENOENT);
	OK(fi_cancel(&a.rx[0]->fid, &contexts[0]));
	SAME(error_of(a.cq[COUNT], a.cq[0], &contexts[0]), FI_ECANCELED);
	close_scalable(&a);
}

/* Peers change memory through a receive context, which reports nothing of it. */
static void targets_need_no_queue(void)
{
	static const uint64_t caps[] = { FI_MSG | FI_RMA, FI_MSG | FI_ATOMIC };

	for (int i = 0; i < 2; i++) {
		struct domain d;
		struct fid_ep *sep, *rx;

		open_domain(&d, caps[i], COUNT, COUNT);
		OK(fi_scalable_ep(d.domain, d.info, &sep, NULL));
		OK(fi_scalable_ep_bind(sep, &d.av->fid, 0));
		OK(fi_rx_context(sep, 0, NULL, &rx, NULL));
		OK(fi_enable(rx));
		OK(fi_close(&rx->fid));
		OK(fi_close(&sep->fid));
		close_domain(&d);
	}
}

/* One-sided operations are reported where they were started. */
static void one_sided_operations_have_contexts(void)
{
	struct scalable a, b;
	struct fid_mr *mr;

	open_scalable(&a);
	open_scalable(&b);
	fi_addr_t to = learn(&a.domain, &b.sep->fid);

	learn(&b.domain, &a.sep->fid);
	OK(fi_mr_reg(b.domain.domain, incoming, LONG, FI_REMOTE_WRITE | FI_REMOTE_READ, 0, 77, 0, &mr, NULL));
	for (size_t n = 1; n < LENGTHS; n++)
		for (int i = 0; i < COUNT; i++) {
			fill(outgoing, lengths[n], i);
			OK(fi_write(a.tx[i], outgoing, lengths[n], NULL, fi_rx_addr(to, i, BITS), 0, 77, &contexts[i]));
			CHECK(wait_for(a.cq[i], b.cq, 2 * COUNT, NULL).op_context == &contexts[i]);
			CHECK(holds(incoming, lengths[n], i, 0));
		}
	OK(fi_close(&mr->fid));
	close_scalable(&a);
	close_scalable(&b);
}

/* --- options of an endpoint (fi_endpoint.3) --- */

static size_t option(struct fid_ep *ep, int name)
{
	size_t value = 0, len = sizeof(value);

	OK(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, name, &value, &len));
	SAME(len, sizeof(value));
	return value;
}

static int set(struct fid_ep *ep, int name, size_t value)
{
	return fi_setopt(&ep->fid, FI_OPT_ENDPOINT, name, &value, sizeof(value));
}

/* Each limit is its own. Without shared memory, messages within the node go over the network. */
static void options_are_kept(void)
{
	struct domain d;
	struct fid_ep *ep[2];
	struct fid_cq *cq[2];
	fi_addr_t to[2];
	int others[] = { FI_OPT_CM_DATA_SIZE, FI_OPT_BUFFERED_MIN, FI_OPT_BUFFERED_LIMIT, FI_OPT_FI_HMEM_P2P, 9 };
	size_t inject, len = sizeof(inject);
	bool off = false, permitted = true;

	open_domain(&d, FI_MSG | FI_TAGGED | FI_RMA, 0, 0);
	for (int i = 0; i < 2; i++) {
		cq[i] = open_queue(&d);
		OK(fi_endpoint(d.domain, d.info, &ep[i], NULL));
		OK(fi_ep_bind(ep[i], &d.av->fid, 0));
		OK(fi_ep_bind(ep[i], &cq[i]->fid, FI_TRANSMIT | FI_RECV));
	}
	inject = d.info->tx_attr->inject_size;
	for (int name = INJECT_MSG; name <= INJECT_RMA; name++) {
		SAME(option(ep[0], name), name == INJECT_RMA ? 4096 : inject);
		SAME(set(ep[0], name, inject + 1), -FI_EINVAL);
	}
	for (int i = 0; i < 3; i++) {
		OK(set(ep[0], INJECT_MSG + i, 10 * (i + 1)));
		OK(set(ep[0], MAX_MSG + i, 100 * (i + 1)));
		SAME(option(ep[0], INJECT_MSG + i), 10 * (i + 1));
		SAME(option(ep[0], MAX_MSG + i), 100 * (i + 1));
	}
	for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++) {
		SAME(fi_getopt(&ep[0]->fid, FI_OPT_ENDPOINT, others[i], &inject, &len), -FI_ENOPROTOOPT);
		SAME(set(ep[0], others[i], 1), -FI_ENOPROTOOPT);
	}
	OK(fi_setopt(&ep[0]->fid, FI_OPT_ENDPOINT, SHARED_MEMORY_PERMITTED, &off, sizeof(off)));
	len = sizeof(permitted);
	OK(fi_getopt(&ep[0]->fid, FI_OPT_ENDPOINT, SHARED_MEMORY_PERMITTED, &permitted, &len));
	CHECK(!permitted);
	for (int i = 0; i < 2; i++) {
		OK(fi_enable(ep[i]));
		to[i] = learn(&d, &ep[i]->fid);
	}
	permitted = true;
	SAME(fi_setopt(&ep[0]->fid, FI_OPT_ENDPOINT, SHARED_MEMORY_PERMITTED, &permitted, 1), -FI_EOPBADSTATE);
	SAME(fi_send(ep[0], outgoing, 101, NULL, to[1], NULL), -FI_EMSGSIZE);
	SAME(fi_tsend(ep[0], outgoing, 201, NULL, to[1], 1, NULL), -FI_EMSGSIZE);
	SAME(fi_write(ep[0], outgoing, 301, NULL, to[1], 0, 1, NULL), -FI_EMSGSIZE);
	SAME(fi_inject(ep[0], outgoing, 11, to[1]), -FI_EMSGSIZE);
	SAME(fi_tinject(ep[0], outgoing, 21, to[1], 1), -FI_EMSGSIZE);
	SAME(fi_inject_write(ep[0], outgoing, 31, to[1], 0, 1), -FI_EMSGSIZE);
	OK(fi_inject(ep[0], outgoing, 10, to[1]));
	OK(fi_tinject(ep[0], outgoing, 20, to[1], 1));
	OK(fi_recv(ep[1], incoming, LONG, NULL, FI_ADDR_UNSPEC, NULL));
	SAME(wait_for(cq[1], cq, 1, NULL).len, 10);
	OK(fi_trecv(ep[1], incoming, LONG, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
	SAME(wait_for(cq[1], cq, 1, NULL).len, 20);
	OK(fi_trecv(ep[0], incoming, LONG, NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
	fill(outgoing, LONG, 8);
	OK(fi_tsend(ep[1], outgoing, LONG, NULL, to[0], 1, NULL));
	SAME(wait_for(cq[0], cq + 1, 1, NULL).len, LONG);
	CHECK(holds(incoming, LONG, 8, 0));
	for (int i = 0; i < 2; i++) {
		OK(fi_close(&ep[i]->fid));
		OK(fi_close(&cq[i]->fid));
	}
	close_domain(&d);
}

/* What fi_getinfo refuses, the calls that open a context refuse, too; and those that change its default flags. */
static void more_than_is_offered_is_refused(void)
{
	struct domain d;
	struct fid_ep *sep, *ep, *none;
	struct fid_cq *cq;
	uint64_t flags = FI_TRANSMIT | FI_COMMIT_COMPLETE, before = FI_TRANSMIT, after = FI_TRANSMIT;

	open_domain(&d, FI_MSG | FI_TAGGED, 2, 2);
	cq = open_queue(&d);
	OK(fi_scalable_ep(d.domain, d.info, &sep, NULL));
	for (int i = 0; i < 6; i++) {
		struct fi_tx_attr tx = *d.info->tx_attr;
		struct fi_rx_attr rx = *d.info->rx_attr;

		tx.op_flags |= i == 0 ? FI_COMMIT_COMPLETE : 0;
		tx.msg_order |= i == 1 ? FI_ORDER_WAR : 0;
		tx.comp_order |= i == 2 ? FI_ORDER_STRICT : 0;
		tx.iov_limit *= i == 3 ? 2 : 1;
		tx.rma_iov_limit *= i == 4 ? 100 : 1;
		rx.op_flags |= i == 0 ? FI_COMMIT_COMPLETE : 0;
		rx.msg_order |= i == 1 ? FI_ORDER_WAR : 0;
		rx.comp_order |= i == 2 ? FI_ORDER_STRICT : 0;
		rx.iov_limit *= i == 3 ? 2 : 1;
		rx.size *= i == 4 ? 1 << 20 : 1;
		SAME(fi_tx_context(sep, 0, &tx, &none, NULL), i < 5 ? -FI_EINVAL : 0);
		SAME(fi_rx_context(sep, 0, &rx, &ep, NULL), i < 5 ? -FI_EINVAL : 0);
		if (i == 5)
			OK(fi_close(&none->fid) | fi_close(&ep->fid));
		SAME(fi_srx_context(d.domain, &rx, &ep, NULL), i < 5 ? -FI_EINVAL : 0);
		if (i < 5)
			continue;
		flags = FI_RECV | FI_DELIVERY_COMPLETE;
		SAME(fi_control(&ep->fid, FI_SETOPSFLAG, &flags), -FI_EINVAL);
		flags = FI_RECV | FI_COMPLETION;
		OK(fi_control(&ep->fid, FI_SETOPSFLAG, &flags));
		OK(fi_close(&ep->fid));
	}
	OK(fi_endpoint(d.domain, d.info, &ep, NULL));
	OK(fi_control(&ep->fid, FI_GETOPSFLAG, &before));
	flags = FI_TRANSMIT | FI_COMMIT_COMPLETE;
	SAME(fi_control(&ep->fid, FI_SETOPSFLAG, &flags), -FI_EINVAL);
	SAME(fi_ep_alias(ep, &none, flags), -FI_EINVAL);
	OK(fi_control(&ep->fid, FI_GETOPSFLAG, &after));
	SAME(after, before);
	OK(fi_close(&ep->fid));
	OK(fi_close(&sep->fid));
	OK(fi_close(&cq->fid));
	close_domain(&d);
}

/* FI_OPT_MIN_MULTI_RECV of a receive context is its own; that of the endpoint is for those without one. */
static void contexts_have_buffers_of_their_own_kind(void)
{
	struct scalable a, b;
	struct iovec iov = { incoming, 100 };
	struct fi_msg msg = { .msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC };

	open_scalable(&a);
	open_scalable(&b);
	fi_addr_t to = learn(&a.domain, &b.sep->fid);

	learn(&b.domain, &a.sep->fid);
	OK(set(b.sep, FI_OPT_MIN_MULTI_RECV, 50));
	OK(set(b.rx[0], FI_OPT_MIN_MULTI_RECV, 10));
	SAME(set(b.tx[0], FI_OPT_MIN_MULTI_RECV, 7), -FI_ENOPROTOOPT);
	SAME(option(b.sep, FI_OPT_MIN_MULTI_RECV), 50);
	SAME(option(b.rx[0], FI_OPT_MIN_MULTI_RECV), 10);
	SAME(option(b.rx[1], FI_OPT_MIN_MULTI_RECV), 50);
	for (int i = 0; i < 2; i++) {
		msg.context = &contexts[i];
		OK(fi_recvmsg(b.rx[i], &msg, FI_MULTI_RECV));
		fill(outgoing, 60, i);
		OK(fi_send(a.tx[0], outgoing, 60, NULL, fi_rx_addr(to, i, BITS), NULL));
		struct fi_cq_tagged_entry entry = wait_for(b.cq[COUNT + i], a.cq, COUNT, NULL);

		/* 40 bytes are left. */
		CHECK(entry.op_context == &contexts[i] && holds(entry.buf, 60, i, 0));
		SAME(!!(entry.flags & FI_MULTI_RECV), i);
		wait_for(a.cq[0], b.cq, 2 * COUNT, NULL);
	}
	/* Another context of that number begins anew. */
	OK(fi_close(&b.rx[0]->fid));
	open_receive(&b, 0);
	SAME(option(b.rx[0], FI_OPT_MIN_MULTI_RECV), 50);
	close_scalable(&a);
	close_scalable(&b);
}

static const struct {
	const char *name;
	void (*run)(void);
} groups[] = {
	{ "receives are shared", receives_are_shared },
	{ "the oldest message comes first", the_oldest_message_comes_first },
	{ "a buffer takes messages of all", a_buffer_takes_messages_of_all },
	{ "a silent buffer goes back", a_silent_buffer_goes_back },
	{ "tags, peeks and cancels", tags_peeks_and_cancels },
	{ "the dead are heard", the_dead_are_heard },
	{ "the next incarnation is heard", the_next_incarnation_is_heard },
	{ "a late death is outweighed", a_late_death_is_outweighed },
	{ "the dead wait for a full queue", the_dead_wait_for_a_full_queue },
	{ "another vector is refused", another_vector_is_refused },
	{ "messages of a shared context are reported", messages_of_a_shared_context_are_reported },
	{ "bound after enable", bound_after_enable },
	{ "one info for both kinds of endpoints", one_info_for_both_kinds_of_endpoints },
	{ "every context reaches every context", every_context_reaches_every_context },
	{ "ordinary endpoints name contexts", ordinary_endpoints_name_contexts },
	{ "contexts come and go", contexts_come_and_go },
	{ "a context that is not closed keeps its receives", a_context_that_is_not_closed_keeps_its_receives },
	{ "what waits goes with its context", what_waits_goes_with_its_context },
	{ "what is posted goes with its context", what_is_posted_goes_with_its_context },
	{ "a full queue holds up its context alone", a_full_queue_holds_up_its_context_alone },
	{ "only a receive context cancels its receives", only_a_receive_context_cancels_its_receives },
	{ "targets need no queue", targets_need_no_queue },
	{ "one-sided operations have contexts", one_sided_operations_have_contexts },
	{ "options are kept", options_are_kept },
	{ "more than is offered is refused", more_than_is_offered_is_refused },
	{ "contexts have buffers of their own kind", contexts_have_buffers_of_their_own_kind },
};

int main(void)
{
	int passed = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (size_t i = 0; i < sizeof(groups) / sizeof(*groups); i++) {
		groups[i].run();
		printf("ok %s\n", groups[i].name);
		passed++;
	}
	printf("%d passed, 0 failed\n", passed);
	return 0;
}
