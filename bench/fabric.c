/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * Ranks over libfabric's tagged messages, as fabtests and MPIs use them: processes of this node, which know each
 * other's addresses through memory that they share. FI_PROVIDER says over which provider. UDRV_BENCH_CALL says by which
 * call a rank sends, if it waits for each message: tinject (the default; fi_tsend beyond what can be injected), tsend,
 * tsendv, tsendmsg (with FI_INJECT and no completion, to be compared with tinject: short messages only), or context,
 * which is tinject from and to contexts of a scalable endpoint.
 */
#include "fabric.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define LONGEST_NAME 512

static struct table {
	atomic_int arrived;
	char names[MOST_RANKS][LONGEST_NAME];
} *table;

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_ep *endpoint;
static struct fid_av *vector;
static struct fid_cq *queue;
static fi_addr_t addresses[MOST_RANKS];
/* Some providers keep what they know of an operation in its context. */
static struct fi_context2 contexts[MOST_STARTED];
static int next_context;
static long pending;
static bool crowded;
static int barriers;
static enum { TINJECT, TSEND, TSENDV, TSENDMSG, CONTEXT } by;
static const char *const calls[] = { "tinject", "tsend", "tsendv", "tsendmsg", "context" };
/* Where messages leave from and come to: the endpoint, or contexts of it. */
static struct fid_ep *sender, *receiver;

#define OK(call) \
	do { \
		int rc_ = (int)(call); \
		if (rc_) \
			fail("%s: %d (%s)", #call, rc_, fi_strerror(-rc_)); \
	} while (0)

static void progress(void)
{
	struct fi_cq_tagged_entry entries[16];
	ssize_t n = fi_cq_read(queue, entries, 16);

	if (n > 0)
		pending -= n;
	else if (n != -FI_EAGAIN)
		fail("fi_cq_read: %s", fi_strerror((int)-n));
	else if (crowded)
		sched_yield();
}

/* Repeats a data call while it has to wait. */
#define POST(call) \
	do { \
		ssize_t rc_; \
		while ((rc_ = (call)) == -FI_EAGAIN) \
			progress(); \
		if (rc_) \
			fail("%s: %s", #call, fi_strerror((int)-rc_)); \
	} while (0)

static struct fi_context2 *context(void)
{
	next_context = (next_context + 1) % MOST_STARTED;
	return &contexts[next_context];
}

void way_start_send(int to, const void *buffer, size_t len)
{
	pending++;
	POST(fi_tsend(sender, buffer, len, NULL, addresses[to], (uint64_t)self, context()));
}

void way_start_receive(int from, void *buffer, size_t len)
{
	pending++;
	POST(fi_trecv(receiver, buffer, len, NULL, FI_ADDR_UNSPEC, (uint64_t)from, 0, context()));
}

void way_finish(void)
{
	while (pending > 0)
		progress();
}

void way_send(int to, const void *buffer, size_t len)
{
	const struct iovec iov = { (void *)buffer, len };
	const struct fi_msg_tagged message = { .msg_iov = &iov, .iov_count = 1, .addr = addresses[to], .tag = (uint64_t)self };

	if (len > info->tx_attr->inject_size) {
		way_start_send(to, buffer, len);
		way_finish();
		return;
	}
	switch (by) {
	case TSEND:
		POST(fi_tsend(sender, buffer, len, NULL, addresses[to], (uint64_t)self, NULL));
		break;
	case TSENDV:
		POST(fi_tsendv(sender, &iov, NULL, 1, addresses[to], (uint64_t)self, NULL));
		break;
	case TSENDMSG:
		POST(fi_tsendmsg(sender, &message, FI_INJECT));
		break;
	default:
		POST(fi_tinject(sender, buffer, len, addresses[to], (uint64_t)self));
	}
}

void way_receive(int from, void *buffer, size_t len)
{
	way_start_receive(from, buffer, len);
	way_finish();
}

/* Peers may still need our progress for what is over here. */
void way_barrier(void)
{
	barriers++;
	atomic_fetch_add(&table->arrived, 1);
	while (atomic_load(&table->arrived) < barriers * ranks)
		progress();
}

static bool silent(void)
{
	return by == TSEND || by == TSENDV || by == TSENDMSG;
}

static void open_endpoint(void)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED, .size = 1024 };
	struct fi_av_attr av = { .type = FI_AV_TABLE, .count = MOST_RANKS, .rx_ctx_bits = 1 };
	const char *provider = getenv("FI_PROVIDER"), *call = getenv("UDRV_BENCH_CALL");
	size_t len = LONGEST_NAME;

	while (call && strcmp(call, calls[by]))
		if (++by > CONTEXT)
			fail("UDRV_BENCH_CALL=%s is no call", call);
	hints->ep_attr->type = FI_EP_RDM;
	hints->caps = FI_TAGGED;
	if (silent())
		hints->tx_attr->op_flags = FI_INJECT;
	if (by == CONTEXT) {
		hints->ep_attr->tx_ctx_cnt = hints->ep_attr->rx_ctx_cnt = 2;
		hints->caps |= FI_NAMED_RX_CTX;
	}
	hints->mode = FI_CONTEXT | FI_CONTEXT2;
	hints->domain_attr->mr_mode = 0;
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->domain_attr->av_type = FI_AV_TABLE;
	hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_SAS;
	hints->fabric_attr->prov_name = provider ? strdup(provider) : NULL;
	OK(fi_getinfo(FI_VERSION(1, 15), NULL, NULL, 0, hints, &info));
	fi_freeinfo(hints);
	if (provider && strcmp(info->fabric_attr->prov_name, provider))
		fail("that is %s, not %s", info->fabric_attr->prov_name, provider);
	OK(fi_fabric(info->fabric_attr, &fabric, NULL));
	OK(fi_domain(fabric, info, &domain, NULL));
	OK(fi_cq_open(domain, &cq, &queue, NULL));
	OK(fi_av_open(domain, &av, &vector, NULL));
	if (by == CONTEXT) {
		OK(fi_scalable_ep(domain, info, &endpoint, NULL));
		OK(fi_scalable_ep_bind(endpoint, &vector->fid, 0));
		OK(fi_tx_context(endpoint, 0, NULL, &sender, NULL));
		OK(fi_rx_context(endpoint, 0, NULL, &receiver, NULL));
		OK(fi_ep_bind(sender, &queue->fid, FI_TRANSMIT));
		OK(fi_ep_bind(receiver, &queue->fid, FI_RECV));
		OK(fi_enable(endpoint));
		OK(fi_enable(sender));
		OK(fi_enable(receiver));
	} else {
		OK(fi_endpoint(domain, info, &endpoint, NULL));
		OK(fi_ep_bind(endpoint, &vector->fid, 0));
		OK(fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | (silent() ? FI_SELECTIVE_COMPLETION : 0)));
		OK(fi_ep_bind(endpoint, &queue->fid, FI_RECV));
		OK(fi_enable(endpoint));
		sender = receiver = endpoint;
	}
	OK(fi_getname(&endpoint->fid, table->names[self], &len));
}

void way_open(int *argc, char ***argv)
{
	ranks = 2;
	if (*argc > 2 && !strcmp((*argv)[1], "--ranks")) {
		ranks = atoi((*argv)[2]);
		*argc -= 2;
		*argv += 2;
	}
	if (ranks < 2 || ranks > MOST_RANKS)
		fail("2 to %d ranks", MOST_RANKS);
	table = mmap(NULL, sizeof(*table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (table == MAP_FAILED)
		fail("no memory to share");
	for (int rank = 1; rank < ranks && self == 0; rank++) {
		pid_t pid = fork();

		if (pid < 0)
			fail("no process for rank %d", rank);
		if (pid > 0)
			continue;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		self = rank;
	}
	crowded = pin(self) < ranks;
	open_endpoint();
	way_barrier();
	for (int rank = 0; rank < ranks; rank++)
		if (fi_av_insert(vector, table->names[rank], 1, &addresses[rank], 0, NULL) != 1)
			fail("fi_av_insert of rank %d", rank);
	way_barrier();
}

struct fid_ep *fabric_endpoint(void)
{
	return endpoint;
}

fi_addr_t fabric_address(int rank)
{
	return addresses[rank];
}

void way_close(void)
{
	int status = 0, bad = 0;

	way_barrier();
	if (by == CONTEXT) {
		fi_close(&sender->fid);
		fi_close(&receiver->fid);
	}
	fi_close(&endpoint->fid);
	fi_close(&vector->fid);
	fi_close(&queue->fid);
	fi_close(&domain->fid);
	fi_close(&fabric->fid);
	fi_freeinfo(info);
	while (self == 0 && wait(&status) > 0)
		bad |= status;
	if (bad)
		fail("a rank ended with status %#x", (unsigned int)bad);
}
