/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * quiet SECONDS
 *
 * Two processes that meet over the network, and then say nothing for SECONDS: one of them waits for the other's next
 * message, and hears of nothing else. For the cases of scripts/strangers. Prints `ports MINE THEIRS` when it is quiet,
 * and `the message came` at the end.
 */
#include "common.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>

static double seconds;

static int port_of(const char *name)
{
	return ntohs(((const struct sockaddr_in *)name)->sin_port);
}

static void keep_quiet(struct side *side)
{
	static const struct setup setup = { .caps = FI_TAGGED | FI_DIRECTED_RECV, .addr_format = FI_SOCKADDR_IN };
	char mine[NAME_MAX_LEN] = { 0 }, theirs[NAME_MAX_LEN] = { 0 };
	uint64_t out = 1, in = 0;
	ssize_t rc;

	side_begin(side, &setup);
	name_of(side->ep, mine);
	tell(side, mine, sizeof(mine));
	hear(side, theirs, sizeof(theirs));
	for (int i = 0; i < 20; i++) {
		OK(fi_trecv(side->ep, &in, sizeof(in), NULL, side->peer, 1, 0, NULL));
		while ((rc = fi_tsend(side->ep, &out, sizeof(out), NULL, side->peer, 1, NULL)) == -FI_EAGAIN)
			progress(side);
		OK(rc);
		completion(side->tx);
		completion(side->rx);
	}
	if (side->rank) {
		double end = now() + seconds;

		while (now() < end) {
			progress(side);
			sleep_ms(1);
		}
		OK(fi_tsend(side->ep, &out, sizeof(out), NULL, side->peer, 2, NULL));
		completion(side->tx);
	} else {
		OK(fi_trecv(side->ep, &in, sizeof(in), NULL, side->peer, 2, 0, NULL));
		printf("ports %d %d\n", port_of(mine), port_of(theirs));
		fflush(stdout);
		nothing_in(side->rx, (int)(seconds * 1000 / 2));
		completion(side->rx);
		printf("the message came\n");
		fflush(stdout);
	}
	side_end(side);
}

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "usage: quiet SECONDS\n");
		return 2;
	}
	seconds = atof(argv[1]);
	return !run_story(keep_quiet, false, (int)seconds + 30);
}
