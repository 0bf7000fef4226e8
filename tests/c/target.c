/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * target receive PORT COUNT SECONDS [WAIT]
 * target send|stay PORT COUNT SECONDS [WAIT]
 *
 * One endpoint on the loopback interface, for the cases of scripts/strangers and scripts/refused: its peers are started
 * by themselves and may be another user's.
 *
 * `receive` opens it at PORT, prints `ready PID`, and polls until COUNT messages have come or SECONDS are over; with
 * COUNT 0 it polls for SECONDS. `send` sends COUNT messages of 8 bytes to PORT with the default completion level,
 * waits until they are complete, closes and ends; `stay` does the same, and before it closes it prints `sent` and keeps
 * polling until its standard input ends. With WAIT they wait in fi_cq_sread instead of polling.
 *
 * Both end with one line, `end messages N errors E longest S descriptors D`: messages received or sent, operations that
 * failed, the longest call of fi_cq_read or fi_tsend beyond its own time limit in seconds, and descriptors that the
 * process had open then. The status is 0 if all COUNT were received, or were sent or failed.
 */
#include "common.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of fi_cq_sread, milliseconds. */
#define SLICE_MS 50

static struct side side;
static bool waits;
static long done, errors;
static double longest;

static int descriptors(void)
{
	DIR *list = opendir("/proc/self/fd");
	int count = 0;

	if (!list)
		return -1;
	while (readdir(list))
		count++;
	closedir(list);
	return count - 3;
}

static void note_time(double start, double allowed)
{
	double took = now() - start - allowed;

	if (took > longest)
		longest = took;
}

/* One look at a queue; what failed is told. */
static bool look(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double start = now();
	ssize_t n = waits ? fi_cq_sread(cq, &entry, 1, NULL, SLICE_MS) : fi_cq_read(cq, &entry, 1);

	note_time(start, waits ? SLICE_MS * 1e-3 : 0);
	if (n == 1) {
		done++;
		return true;
	}
	if (n == -FI_EAVAIL) {
		SAME(fi_cq_readerr(cq, &error, 0), 1);
		printf("failed: %s: %s\n", fi_strerror(error.err),
		       fi_cq_strerror(cq, error.prov_errno, error.err_data, NULL, 0));
		errors++;
		return true;
	}
	CHECK(n == -FI_EAGAIN || n == -FI_EINTR);
	return false;
}

static void receive(long count, double end)
{
	uint64_t message;

	OK(fi_trecv(side.ep, &message, sizeof(message), NULL, FI_ADDR_UNSPEC, 0, ~0ull, NULL));
	printf("ready %d\n", (int)getpid());
	fflush(stdout);
	while ((count == 0 || done < count) && now() < end)
		if (look(side.rx))
			OK(fi_trecv(side.ep, &message, sizeof(message), NULL, FI_ADDR_UNSPEC, 0, ~0ull, NULL));
}

static void send_all(long count, double end)
{
	static uint64_t word = 1;
	long begun = 0;

	while (begun < count && now() < end) {
		double start = now();
		ssize_t rc = fi_tsend(side.ep, &word, sizeof(word), NULL, side.peer, 1, NULL);

		note_time(start, 0);
		if (rc == 0) {
			begun++;
		} else if (rc != -FI_EAGAIN) {
			printf("fi_tsend: %s\n", fi_strerror((int)-rc));
			begun++;
			errors++;
		}
		look(side.tx);
	}
	while (done + errors < count && now() < end)
		look(side.tx);
}

static void stay(void)
{
	struct pollfd entry = { .fd = 0, .events = POLLIN };
	char byte;

	printf("sent\n");
	while (poll(&entry, 1, 0) == 0 || read(0, &byte, 1) > 0)
		progress(&side);
}

int main(int argc, char **argv)
{
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_RMA, .addr_format = FI_SOCKADDR_IN };
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	bool receives = argc > 4 && !strcmp(argv[1], "receive");
	long count = argc > 4 ? atol(argv[3]) : -1;

	bool stays = count >= 0 && !strcmp(argv[1], "stay");

	if (count < 0 || (!receives && !stays && strcmp(argv[1], "send"))) {
		fprintf(stderr, "usage: target receive|send|stay PORT COUNT SECONDS [WAIT]\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	waits = argc > 5;
	setup.wait_obj = waits ? FI_WAIT_UNSPEC : FI_WAIT_NONE;
	setup.service = receives ? argv[2] : NULL;
	side_open(&side, &setup);
	double end = now() + atof(argv[4]);
	if (receives) {
		receive(count, end);
	} else {
		char name[NAME_MAX_LEN] = { 0 };

		to.sin_port = htons((uint16_t)atoi(argv[2]));
		memcpy(name, &to, sizeof(to));
		side.peer = insert(&side, name);
		send_all(count, end);
		if (stays)
			stay();
	}
	int open = descriptors();

	side_close(&side);
	printf("end messages %ld errors %ld longest %.3f descriptors %d\n", done, errors, longest, open);
	return receives ? done < count : done + errors < count;
}
