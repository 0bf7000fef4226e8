/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* What the parent of a torture and its workers tell each other; see torture.c. */
#ifndef TORTURE_H
#define TORTURE_H

#include "common.h"
#include "forbid.h"

#include <sys/types.h>

#define MOST_WORKERS 4

/* How a worker waits when there is nothing to do. */
enum manner { POLLING, SLEEPING, ON_DESCRIPTOR, MANNERS };

/* One round. */
struct round {
	int workers;
	enum manner manner;
	enum forbidden forbidden;
	/* FI_UDRV_CMA of each worker, or null. */
	const char *cma[MOST_WORKERS];
	/* After so long only messages that take no bulk space, so that links shrink, milliseconds (0: never). */
	int loud_ms;
	/* A port for the worker that begins (0: any). */
	int port[MOST_WORKERS];
};

/* One message between parent and worker. */
enum kind {
	/* Worker: I listen at `name`, at `port`. */
	READY,
	/* Parent: worker `peer` listens at `name` and is process `pid`; talk to it. */
	PEER,
	/* Worker: nothing of mine pends on `peer` any more, since `time`; `count` operations failed, first as `name`. */
	SETTLED,
	/* Parent: send to the dead worker `peer` once more. Worker: that fails. */
	AGAIN,
	/* Parent: leave a child behind that holds your descriptors. Worker: it is `pid`. */
	HEIR,
	/* Parent: start no sends. Worker: all of mine have ended. */
	STOP,
	STOPPED,
	/* Worker: I have had `count` messages from `peer`, for the first time. */
	HEARD,
	/* Parent: close and exit. Worker: I shall, after `count` messages. */
	CLOSE,
	CLOSING,
};

struct note {
	enum kind kind;
	int peer;
	pid_t pid;
	int port;
	uint64_t count;
	double time;
	char name[NAME_MAX_LEN];
};

/* The life of worker `me` of a round; `link` leads to the parent. Does not return. */
void work(const struct round *round, int me, int link) __attribute__((noreturn));

#endif
