/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * first_contact PORT PEERS [HOST]
 *
 * What the first message to a peer costs. The server (no HOST) opens PEERS endpoints, one after another, each in a
 * domain of its own; the client's one endpoint meets each of them: addresses go over a TCP connection to PORT, then a
 * message of 8 bytes and its answer, then some more of both. The client prints
 *
 *     first: median M us, 99 % P us     from fi_av_insert to the answer
 *     later: median M us, 99 % P us     from fi_tsend to the answer
 *
 * The provider is UDRV_TEST_PROVIDER, default udrv.
 */
#include "common.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* Messages to a peer after the first. */
#define LATER 20

static int connected(const char *host, int port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), link = listener;

	CHECK(listener >= 0);
	if (host) {
		SAME(inet_pton(AF_INET, host, &address.sin_addr), 1);
		OK(connect(link, (struct sockaddr *)&address, sizeof(address)));
	} else {
		OK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)));
		OK(bind(listener, (struct sockaddr *)&address, sizeof(address)));
		OK(listen(listener, 1));
		link = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		CHECK(link >= 0);
		close(listener);
	}
	OK(setsockopt(link, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)));
	return link;
}

/* Sends one message, and waits until that is done. */
static void send_one(struct side *side, uint64_t *message)
{
	POST(side, fi_tsend(side->ep, message, sizeof(*message), NULL, side->peer, 1, NULL));
	completion(side->tx);
}

static void await(struct side *side, uint64_t *message)
{
	POST(side, fi_trecv(side->ep, message, sizeof(*message), NULL, side->peer, 1, 0, NULL));
	completion(side->rx);
}

static void serve(struct side *side)
{
	static const struct setup setup;
	uint64_t message = 0;

	side_open(side, &setup);
	meet(side);
	barrier(side);
	for (int i = 0; i <= LATER; i++) {
		await(side, &message);
		send_one(side, &message);
	}
	side_end(side);
}

/* Seconds from a message to its answer. */
static double exchange(struct side *side, double start, uint64_t value)
{
	uint64_t message = value, answer = 0;

	send_one(side, &message);
	await(side, &answer);
	SAME(answer, value);
	return now() - start;
}

static void ask(struct side *side, double *first, double *later)
{
	char mine[NAME_MAX_LEN], theirs[NAME_MAX_LEN];
	double start;

	name_of(side->ep, mine);
	tell(side, mine, sizeof(mine));
	hear(side, theirs, sizeof(theirs));
	barrier(side);
	start = now();
	side->peer = insert(side, theirs);
	*first = exchange(side, start, 1);
	for (int i = 0; i < LATER; i++)
		later[i] = exchange(side, now(), (uint64_t)i + 2);
	barrier(side);
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void show(const char *name, double *times, size_t count)
{
	qsort(times, count, sizeof(*times), ascending);
	printf("%s: median %.1f us, 99 %% %.1f us\n", name, times[count / 2] * 1e6, times[count * 99 / 100] * 1e6);
}

int main(int argc, char **argv)
{
	static const struct setup setup;
	const char *host = argc > 3 ? argv[3] : NULL;
	size_t peers = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
	struct side side = { .rank = host ? 0 : 1 };
	double *first, *later;

	if (!peers) {
		fprintf(stderr, "usage: first_contact PORT PEERS [HOST]\n");
		return 2;
	}
	side.link = connected(host, atoi(argv[1]));
	if (!host) {
		while (peers--)
			serve(&side);
		return 0;
	}
	first = need(peers * sizeof(*first));
	later = need(peers * LATER * sizeof(*later));
	side_open(&side, &setup);
	for (size_t i = 0; i < peers; i++)
		ask(&side, &first[i], &later[i * LATER]);
	show("first", first, peers);
	show("later", later, peers * LATER);
	side_close(&side);
	free(first);
	free(later);
	return 0;
}
