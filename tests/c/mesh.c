/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * mesh PROCESSES BYTES [INTERFACE...]
 *
 * Each of PROCESSES sends short messages and some of BYTES to each other, and checks what it gets. Then they stay, with
 * all that they hold, and `talked` and their process ids are printed; with the end of standard input they close and
 * end. What they hold meanwhile is for others to count. Process i has the i-th INTERFACE (FI_UDRV_IFACE), in turn.
 *
 * The provider is UDRV_TEST_PROVIDER, default udrv.
 */
#include "common.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* An emulator that 64 processes share is slow, seconds. */
#define LONG_PATIENCE_S patience_s(400)

/* The first message to a peer may go another way than later ones. */
#define ROUNDS 2

static int processes;
static size_t bytes;

/* Until the parent has something to say. */
static void stay(struct side *side)
{
	struct pollfd entry = { .fd = side->link, .events = POLLIN };

	while (poll(&entry, 1, 0) == 0)
		progress(side);
}

static void take(struct side *side, struct fid_cq *cq, int *pending, double end)
{
	struct fi_cq_tagged_entry entry;
	ssize_t n = fi_cq_read(cq, &entry, 1);

	if (n == 1)
		--*pending;
	else if (n != -FI_EAGAIN)
		completion(cq);
	if (now() > end)
		FAIL("process %d waits for %d completions", side->rank, *pending);
}

#define AGAIN(side, end, call) \
	do { \
		ssize_t rc_; \
		while ((rc_ = (call)) == -FI_EAGAIN && now() < (end)) \
			progress(side); \
		OK(rc_); \
	} while (0)

/* Tags say who it is from: not every provider looks at the source that a receive names. */
static uint64_t tag(int from, int kind)
{
	return (uint64_t)from << 8 | (uint64_t)kind;
}

/* Both messages to the one `step` after us, and those of the one `step` before. */
static void exchange(struct side *side, const fi_addr_t *all, int step, uint8_t *out, uint8_t *in)
{
	int to = (side->rank + step) % processes, from = (side->rank + processes - step) % processes;
	int sends = 2, receives = 2;
	double end = now() + LONG_PATIENCE_S;
	uint64_t word = (uint64_t)side->rank << 32 | (uint32_t)step, heard = 0;

	fill(out, bytes, (uint32_t)(side->rank * 1000 + to));
	AGAIN(side, end, fi_trecv(side->ep, &heard, sizeof(heard), NULL, FI_ADDR_UNSPEC, tag(from, 1), 0, NULL));
	AGAIN(side, end, fi_trecv(side->ep, in, bytes, NULL, FI_ADDR_UNSPEC, tag(from, 2), 0, NULL));
	AGAIN(side, end, fi_tsend(side->ep, &word, sizeof(word), NULL, all[to], tag(side->rank, 1), NULL));
	AGAIN(side, end, fi_tsend(side->ep, out, bytes, NULL, all[to], tag(side->rank, 2), NULL));
	while (receives)
		take(side, side->rx, &receives, end);
	while (sends)
		take(side, side->tx, &sends, end);
	SAME(heard, (uint64_t)from << 32 | (uint32_t)step);
	CHECK(holds(in, bytes, (uint32_t)(from * 1000 + side->rank), 0));
}

static void one(int rank, int link)
{
	static const struct setup setup;
	struct side side = { .rank = rank, .link = link };
	char mine[NAME_MAX_LEN], (*names)[NAME_MAX_LEN] = need((size_t)processes * NAME_MAX_LEN), byte = 'd';
	fi_addr_t *all = need((size_t)processes * sizeof(*all));
	uint8_t *out = need(bytes), *in = need(bytes);

	side_open(&side, &setup);
	name_of(side.ep, mine);
	tell(&side, mine, sizeof(mine));
	SAME(recv(link, names, (size_t)processes * NAME_MAX_LEN, MSG_WAITALL), (size_t)processes * NAME_MAX_LEN);
	for (int i = 0; i < processes; i++)
		all[i] = insert(&side, names[i]);
	for (int round = 0; round < ROUNDS; round++)
		for (int step = 1; step < processes; step++)
			exchange(&side, all, step, out, in);
	tell(&side, &byte, 1);
	stay(&side);
	side_close(&side);
	exit(0);
}

int main(int argc, char **argv)
{
	processes = argc > 2 ? atoi(argv[1]) : 0;
	bytes = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
	if (processes < 2 || !bytes) {
		fprintf(stderr, "usage: mesh PROCESSES BYTES [INTERFACE...]\n");
		return 2;
	}

	int(*links)[2] = need((size_t)processes * sizeof(*links)), interfaces = argc - 3, status = 0, bad = 0;
	pid_t *children = need((size_t)processes * sizeof(*children));
	char(*names)[NAME_MAX_LEN] = need((size_t)processes * NAME_MAX_LEN), byte;

	for (int i = 0; i < processes; i++) {
		OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, links[i]));
		children[i] = fork();
		CHECK(children[i] >= 0);
		if (children[i] == 0) {
			/* Of others' sockets none stays open: theirs end with the parent. */
			for (int j = 0; j <= i; j++)
				close(links[j][0]);
			if (interfaces > 0)
				OK(setenv("FI_UDRV_IFACE", argv[3 + i % interfaces], 1));
			one(i, links[i][1]);
		}
		close(links[i][1]);
	}
	for (int i = 0; i < processes; i++)
		if (recv(links[i][0], names[i], NAME_MAX_LEN, MSG_WAITALL) != NAME_MAX_LEN)
			FAIL("process %d is gone before it had an address", i);
	for (int i = 0; i < processes; i++)
		SAME(send(links[i][0], names, (size_t)processes * NAME_MAX_LEN, MSG_NOSIGNAL), (size_t)processes * NAME_MAX_LEN);
	for (int i = 0; i < processes; i++)
		if (recv(links[i][0], &byte, 1, MSG_WAITALL) != 1)
			FAIL("process %d is gone before all had talked", i);
	printf("talked");
	for (int i = 0; i < processes; i++)
		printf(" %d", (int)children[i]);
	printf("\n");
	fflush(stdout);
	while (read(0, &byte, 1) > 0)
		;
	for (int i = 0; i < processes; i++)
		close(links[i][0]);
	for (int i = 0; i < processes; i++) {
		CHECK(waitpid(children[i], &status, 0) == children[i]);
		bad += status != 0;
	}
	if (bad)
		FAIL("%d of %d processes came to a bad end", bad, processes);
	return 0;
}
