/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * What the C programs of this folder share: two sides that talk over the provider under test, each with everything
 * from fi_getinfo to an enabled endpoint, and a socket between them for addresses and barriers.
 *
 * A side is a process, or a thread when both are to live in one process. A check that fails prints one line and ends
 * the process.
 */
#ifndef COMMON_H
#define COMMON_H

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* A time limit of so many seconds of a quiet machine, on this one: UDRV_TEST_SLOWNESS times that, which scripts/lib.sh measures. */
int patience_s(int seconds);
/* How long anything may take before it counts as hung, seconds. */
#define PATIENCE_S patience_s(30)
/* Longest address, bytes. */
#define NAME_MAX_LEN 128

/* --- checks --- */

void fail(const char *file, int line, const char *format, ...) __attribute__((noreturn, format(printf, 3, 4)));

#define FAIL(...) fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition) ((condition) ? (void)0 : FAIL("not so: %s", #condition))

/* Both values as integers, shown when they differ. */
#define SAME(found, wanted) \
	do { \
		long long found_ = (long long)(found), wanted_ = (long long)(wanted); \
		if (found_ != wanted_) \
			FAIL("%s is %lld (%#llx), not %lld (%#llx)", #found, found_, found_, wanted_, wanted_); \
	} while (0)

/* A call that returns 0 or -FI_E*. */
#define OK(call) \
	do { \
		int rc_ = (int)(call); \
		if (rc_) \
			FAIL("%s: %d (%s)", #call, rc_, fi_strerror(-rc_)); \
	} while (0)

/* Repeats a data call while it says -FI_EAGAIN, with progress in between. */
#define POST(side, call) \
	do { \
		double end_ = 0; \
		ssize_t rc_; \
		while ((rc_ = (call)) == -FI_EAGAIN) { \
			if (end_ == 0) \
				end_ = now() + PATIENCE_S; \
			if (now() > end_) \
				FAIL("%s: no room for %d s", #call, PATIENCE_S); \
			progress(side); \
		} \
		if (rc_) \
			FAIL("%s: %zd (%s)", #call, rc_, fi_strerror((int)-rc_)); \
	} while (0)

/* Monotonic time, seconds. */
double now(void);
void sleep_ms(int ms);
/* How many times longer than usual a process may wait for a processor, as others run: 1 where they do not. */
double crowding(void);
/* The next number of a sequence that `state` begins. */
uint64_t next_random(uint64_t *state);

/* --- contents of messages --- */

/* Bytes that depend on the seed and on their place. */
void fill(void *buffer, size_t len, uint32_t seed);
/* Whether `buffer` holds what fill() made, from byte `from` of it on. */
bool holds(const void *buffer, size_t len, uint32_t seed, size_t from);
void *need(size_t len);

/* --- one side --- */

/* What a side asks for. Zero means the usual. */
struct setup {
	uint64_t caps;
	enum fi_threading threading;
	enum fi_progress progress;
	enum fi_av_type av_type;
	uint32_t addr_format;
	/* Default FI_CQ_FORMAT_TAGGED. */
	enum fi_cq_format format;
	enum fi_wait_obj wait_obj;
	enum fi_cq_wait_cond wait_cond;
	size_t cq_size;
	/* One queue for both directions: `rx` is `tx`. */
	bool one_queue;
	/* Beside FI_TRANSMIT or FI_RECV. */
	uint64_t bind_flags;
	uint64_t tx_op_flags, rx_op_flags;
	/* FI_OPT_FI_HMEM_P2P, unless it is 0, the default. */
	int p2p;
	/* With counters, whose wait object is `wait_obj` too; without queues if `only_counters`. */
	bool counters, only_counters;
	/* Counters of one-sided operations too. */
	bool rma_counters;
	/* Default: all modes that leave memory registration to the provider's liking. */
	int mr_mode;
	/* A port of its own choice. */
	const char *service;
};

/* Counters of one-sided operations: ours, and those of peers. */
enum { READS, WRITES, REMOTE_READS, REMOTE_WRITES, RMA_COUNTERS };

struct side {
	/* 0 or 1. */
	int rank;
	/* To the other side. */
	int link;
	struct setup setup;
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *tx, *rx;
	struct fid_cntr *sent, *received, *rma[RMA_COUNTERS];
	struct fid_ep *ep;
	/* The other side, after meet(). */
	fi_addr_t peer;
};

/* What fi_getinfo answers for `setup`; fails if nothing. */
struct fi_info *choose(const struct setup *setup);
/* From fi_getinfo to fi_enable. */
void side_open(struct side *side, const struct setup *setup);
/* Another endpoint like this one in the same domain, with the side's own vector and queues. */
struct fid_ep *another_endpoint(struct side *side);
void side_close(struct side *side);
/* Turns both addresses into `peer`. */
void meet(struct side *side);
/* side_open() and meet(). */
void side_begin(struct side *side, const struct setup *setup);
/* A barrier and side_close(). */
void side_end(struct side *side);

/* The name of an endpoint in its address format; returns its length, bytes. */
size_t name_of(struct fid_ep *ep, char name[NAME_MAX_LEN]);
fi_addr_t insert(struct side *side, const char *name);

/* --- the socket between the sides --- */

void tell(struct side *side, const void *data, size_t len);
void hear(struct side *side, void *data, size_t len);
/* Both sides are here. Progresses while it waits. */
void barrier(struct side *side);

/* --- completions --- */

/* One turn of progress that reads nothing. */
void progress(struct side *side);
/* The next completion of a queue in the format FI_CQ_FORMAT_TAGGED. */
struct fi_cq_tagged_entry completion(struct fid_cq *cq);
struct fi_cq_tagged_entry completion_from(struct fid_cq *cq, fi_addr_t *source);
/* The next entry of a queue, which has to be an error. */
struct fi_cq_err_entry failure(struct fid_cq *cq);
/* Takes the next completion or error from a queue, if there is one. */
void take_any(struct fid_cq *cq);
/* Nothing is in the queue, nor comes within `ms`. */
void nothing_in(struct fid_cq *cq, int ms);

/* --- running --- */

typedef void (*story)(struct side *side);

/*
 * Tells a story from both sides: in two processes, or in two threads of one. True if both came to its end within
 * `seconds`.
 */
bool run_story(story story, bool one_process, int seconds);

#endif
