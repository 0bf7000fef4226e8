/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * stream PORT BYTES COUNT             receives COUNT messages of BYTES at its interface's (FI_UDRV_IFACE) port PORT
 * stream PORT BYTES COUNT ADDRESS     sends them there
 *
 * One-way: a sender waits for nothing but its sends, some of which are always pending, so that it hears at once of
 * whatever becomes of the receiver. The receiver checks every word of every message. Each prints `begun` after its first
 * completion. Either ends with 0 when all is sent or received, and else with 1 and a line that says why.
 *
 * The provider is UDRV_TEST_PROVIDER, default udrv.
 */
#include "common.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Messages that are pending at a time. */
#define WINDOW 16
/* Stops, cuts and emulators make it slow, seconds. A script that starts it waits for less. */
#define LONG_PATIENCE_S patience_s(900)

/* A message that is pending; its address is the context. */
struct slot {
	struct fi_context context;
	uint64_t number, *buffer;
};

static size_t words;
static bool sends;

/* The words of a message: each says which it is. */
static uint64_t word(uint64_t number, size_t at)
{
	return number << 32 | (uint32_t)at;
}

static void post(struct side *side, struct slot *slot, uint64_t number)
{
	size_t bytes = words * sizeof(*slot->buffer);
	double end = now() + LONG_PATIENCE_S;
	ssize_t rc;

	slot->number = number;
	for (size_t i = 0; sends && i < words; i++)
		slot->buffer[i] = word(number, i);
	for (;;) {
		rc = sends ? fi_tsend(side->ep, slot->buffer, bytes, NULL, side->peer, number, slot) :
			     fi_trecv(side->ep, slot->buffer, bytes, NULL, FI_ADDR_UNSPEC, number, 0, slot);
		if (rc != -FI_EAGAIN || now() > end)
			break;
		progress(side);
	}
	OK(rc);
}

static void check(const struct slot *slot)
{
	for (size_t i = 0; i < words; i++)
		if (slot->buffer[i] != word(slot->number, i))
			FAIL("word %zu of message %llu is %#llx", i, (unsigned long long)slot->number,
			     (unsigned long long)slot->buffer[i]);
}

/* The next message that is done. */
static struct slot *take(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	double end = now() + LONG_PATIENCE_S;
	ssize_t n;

	while ((n = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN)
		if (now() > end)
			FAIL("no completion for %d s", LONG_PATIENCE_S);
	return n == 1 ? entry.op_context : completion(cq).op_context;
}

static void run(struct side *side, uint64_t count)
{
	struct slot slots[WINDOW];
	uint64_t *buffers = need(WINDOW * words * sizeof(*buffers)), posted = 0;

	for (; posted < WINDOW && posted < count; posted++) {
		slots[posted].buffer = buffers + posted * words;
		post(side, &slots[posted], posted);
	}
	for (uint64_t done = 0; done < count; done++) {
		struct slot *slot = take(sends ? side->tx : side->rx);

		if (!sends)
			check(slot);
		if (posted < count)
			post(side, slot, posted++);
		if (done == 0) {
			puts("begun");
			fflush(stdout);
		}
	}
	free(buffers);
}

int main(int argc, char **argv)
{
	struct setup setup = { .caps = FI_TAGGED, .addr_format = FI_SOCKADDR_IN };
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct side side = { .link = -1 };

	if (argc < 4 || argc > 5) {
		fprintf(stderr, "usage: stream PORT BYTES COUNT [ADDRESS]\n");
		return 2;
	}
	sends = argc == 5;
	words = strtoul(argv[2], NULL, 10) / sizeof(uint64_t);
	setup.service = sends ? NULL : argv[1];
	side_open(&side, &setup);
	if (sends) {
		to.sin_port = htons((uint16_t)atoi(argv[1]));
		SAME(inet_pton(AF_INET, argv[4], &to.sin_addr), 1);
		side.peer = insert(&side, (const char *)&to);
	}
	run(&side, strtoull(argv[3], NULL, 10));
	side_close(&side);
	return 0;
}
