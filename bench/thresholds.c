/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * Has two processes talk over udrv, and prints what the endpoint of the first one says of the protocols that its
 * messages take: to itself, and to the other process. The lines of fi_ops_udrv.thresholds; each end of each range is
 * tried, and the counters of both have to agree.
 */
#include "fabric.h"

#include <rdma/fi_errno.h>
#include <rdma/fi_ext_udrv.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LONG (4 << 20)
#define ROUNDS 20

static struct fi_ops_udrv *ops;
static char *buffer;

static struct fi_udrv_counts counts(void)
{
	struct fi_udrv_counts found;

	if (ops->counts(fabric_endpoint(), &found, sizeof(found)))
		fail("no counts");
	return found;
}

/* Rank 1 sends as many bytes as it is asked for, and what it then has counted, until it is asked for UINT64_MAX. */
static void send_what_is_asked(void)
{
	for (;;) {
		struct fi_udrv_counts before, after;
		uint64_t len;

		way_receive(0, &len, sizeof(len));
		if (len == UINT64_MAX)
			return;
		before = counts();
		way_send(0, buffer, len);
		after = counts();
		after.eager_sent -= before.eager_sent;
		after.rendezvous_sent -= before.rendezvous_sent;
		after.pushed_bytes -= before.pushed_bytes;
		after.fragment_bytes -= before.fragment_bytes;
		after.stream_bytes -= before.stream_bytes;
		after.window_bytes -= before.window_bytes;
		after.assisted_bytes -= before.assisted_bytes;
		way_send(0, &after, sizeof(after));
	}
}

/* A message of `len` bytes from rank 1 goes as was said. */
static void prove(uint64_t len, const char *protocol)
{
	uint64_t pulled = counts().pulled_bytes;
	struct fi_udrv_counts sent;
	int good;

	way_send(1, &len, sizeof(len));
	way_receive(1, buffer, len);
	pulled = counts().pulled_bytes - pulled;
	way_receive(1, &sent, sizeof(sent));
	if (!strncmp(protocol, "eager", 5))
		good = sent.eager_sent == 1 && sent.rendezvous_sent == 0;
	else if (strstr(protocol, ", GET"))
		good = pulled == len && sent.assisted_bytes == 0;
	else if (strstr(protocol, "split copy"))
		good = pulled + sent.assisted_bytes == len;
	else if (strstr(protocol, ", PUT"))
		good = sent.pushed_bytes == len;
	else if (strstr(protocol, "stream"))
		good = sent.stream_bytes > 0;
	else if (strstr(protocol, "RDMA"))
		good = sent.window_bytes > 0;
	else
		good = sent.fragment_bytes > 0 && sent.stream_bytes == 0 && pulled == 0;
	if (!good)
		fail("%llu bytes do not go by %s", (unsigned long long)len, protocol);
}

/* The lines of one peer; those of rank 1 are tried at both ends. */
static void print(int rank)
{
	char text[4096];
	int len = ops->thresholds(fabric_endpoint(), fabric_address(rank), text, sizeof(text));

	if (len < 0 || (size_t)len >= sizeof(text))
		fail("thresholds: %d", len);
	fputs(text, stdout);
	for (char *line = strtok(text, "\n"); line && rank == 1; line = strtok(NULL, "\n")) {
		unsigned long long from, to = LONG;
		char protocol[64];

		if (sscanf(line, "%*[^\t]\t%llu\t%llu\t%63[^\t]", &from, &to, protocol) != 3 &&
		    sscanf(line, "%*[^\t]\t%llu\t\t%63[^\t]", &from, protocol) != 2)
			fail("what is %s", line);
		if (from <= LONG)
			prove(from, protocol);
		if (to <= LONG)
			prove(to, protocol);
	}
}

int main(int argc, char **argv)
{
	int rc;

	way_open(&argc, &argv);
	buffer = calloc(1, LONG);
	if (!buffer)
		fail("no memory");
	rc = fi_open_ops(&fabric_endpoint()->fid, FI_UDRV_OPS, 0, (void **)&ops, NULL);
	if (rc || ops->size < sizeof(*ops))
		fail("no thresholds here: %s", fi_strerror(-rc));
	/* Ways that are made when they are first wanted are there after some messages of all kinds. */
	for (int i = 0; i < ROUNDS; i++) {
		for (size_t len = 8; len <= LONG; len *= 8) {
			if (self == 0) {
				way_send(1, buffer, len);
				way_receive(1, buffer, len);
			} else {
				way_receive(0, buffer, len);
				way_send(0, buffer, len);
			}
		}
	}
	way_barrier();
	if (self == 0) {
		uint64_t over = UINT64_MAX;

		print(0);
		print(1);
		way_send(1, &over, sizeof(over));
	} else {
		send_what_is_asked();
	}
	way_close();
	free(buffer);
	return 0;
}
