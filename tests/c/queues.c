/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * queues [COUNT...]
 *
 * What a tagged message of 8 bytes takes where COUNT others are before it (default: 100, 1000 and 10000): of so many,
 * the last is received first. One line for each count:
 *
 *     COUNT waiting: unexpected U ns, posted P ns
 *
 * unexpected   all messages are here before the first receive: time of fi_trecv and its completion
 * posted       all receives are posted before the first message: time from one completion to the next
 *
 * The provider is UDRV_TEST_PROVIDER, default udrv.
 */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>

#define MOST 16
/* Time for messages that nobody has asked for to arrive. */
#define ARRIVAL_MS 300

static int counts[MOST] = { 100, 1000, 10000 }, lines = 3;
static struct fi_context2 *contexts;
static uint64_t *words;

static void take(struct fid_cq *cq, int *open)
{
	struct fi_cq_tagged_entry entries[64];
	ssize_t n = fi_cq_read(cq, entries, 64);

	if (n > 0)
		*open -= (int)n;
	else if (n != -FI_EAGAIN)
		take_any(cq); /* fails with the error */
}

/* Sends `count` messages, tag 0 first, or last if `backwards`. */
static void send_all(struct side *side, int count, bool backwards)
{
	int open = 0;

	for (int i = 0; i < count; i++) {
		uint64_t tag = (uint64_t)(backwards ? count - 1 - i : i);

		words[i] = tag;
		POST(side, fi_tsend(side->ep, &words[i], sizeof(*words), NULL, side->peer, tag, &contexts[i]));
		open++;
		take(side->tx, &open);
	}
	while (open)
		take(side->tx, &open);
}

static void post(struct side *side, int tag)
{
	POST(side, fi_trecv(side->ep, &words[tag], sizeof(*words), NULL, FI_ADDR_UNSPEC, (uint64_t)tag, 0, &contexts[tag]));
}

static void check(int count)
{
	for (int i = 0; i < count; i++) {
		SAME(words[i], i);
		words[i] = UINT64_MAX;
	}
}

static void receive_all(struct side *side, int count)
{
	double start, unexpected, end = now() + ARRIVAL_MS * 1e-3;
	int open = 0;

	while (now() < end)
		progress(side);
	start = now();
	for (int tag = count - 1; tag >= 0; tag--) {
		post(side, tag);
		for (open = 1; open;)
			take(side->rx, &open);
	}
	unexpected = now() - start;
	check(count);
	for (int tag = 0; tag < count; tag++)
		post(side, tag);
	barrier(side);
	for (start = now(), open = count; open;)
		take(side->rx, &open);
	printf("%d waiting: unexpected %.0f ns, posted %.0f ns\n", count, unexpected / count * 1e9, (now() - start) / count * 1e9);
	check(count);
}

static void tell_story(struct side *side)
{
	static const struct setup setup = { .cq_size = 1 << 15 };
	int most = 0;

	for (int i = 0; i < lines; i++)
		most = counts[i] > most ? counts[i] : most;
	contexts = need((size_t)most * sizeof(*contexts));
	words = need((size_t)most * sizeof(*words));
	side_begin(side, &setup);
	for (int i = 0; i < lines; i++) {
		barrier(side);
		if (side->rank) {
			send_all(side, counts[i], false);
			barrier(side);
			send_all(side, counts[i], true);
		} else {
			receive_all(side, counts[i]);
		}
	}
	side_end(side);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc > 1)
		lines = 0;
	for (int i = 1; i < argc && lines < MOST; i++) {
		counts[lines] = atoi(argv[i]);
		if (counts[lines] < 1 || counts[lines++] > 1 << 15)
			FAIL("%s: a count from 1 to 32768", argv[i]);
	}
	return !run_story(tell_story, false, 120);
}
