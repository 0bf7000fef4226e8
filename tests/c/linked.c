/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * linked PID
 *
 * Two hosts whose interfaces have link-local IPv6 addresses only: this process is on one of them, and process PID is on
 * the other (in its network name space). Endpoints without a source address, and at the wildcard address, have names with
 * the scope that such an address needs, and reach each other.
 */
#include "common.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The process on the other host. */
static const char *other;
/* Endpoints are at the wildcard address; otherwise they have no source address. */
static bool wildcard;

static void move(void)
{
	char path[64];
	int space;

	snprintf(path, sizeof(path), "/proc/%s/ns/net", other);
	space = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(space >= 0);
	OK(setns(space, CLONE_NEWNET));
}

/* Opens the side's endpoint again, from an info whose source address is not fi_getinfo's. */
static void reopen(struct side *side)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT };

	OK(fi_close(&side->ep->fid));
	free(side->info->src_addr);
	side->info->src_addr = NULL;
	side->info->src_addrlen = 0;
	if (wildcard) {
		side->info->src_addr = need(sizeof(any));
		memcpy(side->info->src_addr, &any, sizeof(any));
		side->info->src_addrlen = sizeof(any);
	}
	side->ep = another_endpoint(side);
}

static void messages(struct side *side)
{
	static const struct setup setup = { .addr_format = FI_SOCKADDR_IN6 };
	char name[NAME_MAX_LEN];
	const struct sockaddr_in6 *own = (const void *)name;

	if (side->rank)
		move();
	side_open(side, &setup);
	reopen(side);
	name_of(side->ep, name);
	CHECK(IN6_IS_ADDR_LINKLOCAL(&own->sin6_addr));
	CHECK(own->sin6_scope_id != 0);
	meet(side);
	for (uint64_t i = 0; i < 20; i++) {
		uint64_t message = i, answer = 0;

		if (i % 2 == (uint64_t)side->rank) {
			POST(side, fi_tsend(side->ep, &message, sizeof(message), NULL, side->peer, 1, NULL));
			completion(side->tx);
		} else {
			POST(side, fi_trecv(side->ep, &answer, sizeof(answer), NULL, side->peer, 1, 0, NULL));
			completion(side->rx);
			SAME(answer, i);
		}
	}
	side_end(side);
}

int main(int argc, char **argv)
{
	int failed = 0;

	if (argc != 2) {
		fprintf(stderr, "usage: linked PID\n");
		return 2;
	}
	other = argv[1];
	for (int i = 0; i < 2; i++) {
		wildcard = i;
		failed += !run_story(messages, false, 60);
	}
	printf("%d passed, %d failed\n", 2 - failed, failed);
	return failed != 0;
}
