/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * look WHAT
 *
 * Two processes that exchange messages, and of which something is the case then, until they are killed, for those who
 * look at them from outside (tests/cli). Each prints `side RANK PID` when it is so.
 *
 *   late      side 0 has messages that it posts no receives for
 *   computes  side 0 polls for a message, and side 1 does not poll
 *   sleeps    side 0 sleeps in fi_cq_sread, and side 1 does not poll
 *   one       side 1 has no shared memory
 *   forks     side 0 has forked; the child, which prints `side 2 PID`, has an endpoint of its own
 *   executes  side 0 executes another program
 *   closes    side 0 has closed its endpoint
 *   many      side 0 has twenty endpoints
 *   slow      side 1 sends a long message that side 0 posts no receive for
 *   starts    side 0 is stopped before side 1, which sends to it, has met it
 */
#include "common.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LATE 300
#define LATE_BYTES 8000
#define LONG_BYTES (8 << 20)

static const struct setup setup = { .caps = FI_TAGGED | FI_DIRECTED_RECV, .wait_obj = FI_WAIT_UNSPEC };
static const char *what;

static bool is(const char *name)
{
	return !strcmp(what, name);
}

static void say(int number)
{
	printf("side %d %d\n", number, (int)getpid());
	fflush(stdout);
}

static void poll_on(struct side *side)
{
	for (;;)
		progress(side);
}

static void exchange(struct side *side)
{
	uint64_t out = 1, in = 0;

	for (int i = 0; i < 20; i++) {
		OK(fi_trecv(side->ep, &in, sizeof(in), NULL, side->peer, 1, 0, NULL));
		POST(side, fi_tsend(side->ep, &out, sizeof(out), NULL, side->peer, 1, NULL));
		completion(side->tx);
		completion(side->rx);
	}
}

static void send_late(struct side *side)
{
	void *bytes = need(LATE_BYTES);

	memset(bytes, 1, LATE_BYTES);
	for (int i = 0; i < LATE; i++) {
		POST(side, fi_tsend(side->ep, bytes, LATE_BYTES, NULL, side->peer, 2, NULL));
		completion(side->tx);
	}
}

static void send_long(struct side *side)
{
	void *bytes = need(LONG_BYTES);

	memset(bytes, 1, LONG_BYTES);
	POST(side, fi_tsend(side->ep, bytes, LONG_BYTES, NULL, side->peer, 2, NULL));
}

/* The letter of a process's state, as proc_pid_stat(5) has it. */
static char state_of(pid_t pid)
{
	char path[64], line[512] = "";
	const char *name_end;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	file = fopen(path, "r");
	CHECK(file);
	CHECK(fgets(line, sizeof(line), file));
	fclose(file);
	name_end = strrchr(line, ')');
	CHECK(name_end && strlen(name_end) > 2);
	return name_end[2];
}

static void start(struct side *side)
{
	pid_t pid = getpid();
	uint64_t out = 1;

	say(side->rank);
	if (side->rank == 0) {
		tell(side, &pid, sizeof(pid));
		raise(SIGSTOP);
	} else {
		hear(side, &pid, sizeof(pid));
		while (state_of(pid) != 'T')
			sleep_ms(5);
		POST(side, fi_tsend(side->ep, &out, sizeof(out), NULL, side->peer, 1, NULL));
	}
	poll_on(side);
}

static void fork_one(void)
{
	pid_t child = fork();
	struct side own = { 0 };

	CHECK(child >= 0);
	if (child)
		return;
	alarm((unsigned int)PATIENCE_S);
	side_open(&own, &setup);
	say(2);
	poll_on(&own);
}

/* What side 0 is to be looked at for. */
static void first(struct side *side)
{
	static uint64_t in;
	struct fi_cq_tagged_entry entry;

	if (is("closes")) {
		side_close(side);
		say(0);
		for (;;)
			pause();
	}
	if (is("forks"))
		fork_one();
	for (int i = 0; is("many") && i < 19; i++)
		another_endpoint(side);
	if (is("computes") || is("sleeps"))
		OK(fi_trecv(side->ep, &in, sizeof(in), NULL, side->peer, 3, 0, NULL));
	say(0);
	if (is("executes"))
		execlp("sleep", "sleep", "60", (char *)NULL);
	if (is("sleeps"))
		SAME(fi_cq_sread(side->rx, &entry, 1, NULL, -1), 1);
	poll_on(side);
}

static void look(struct side *side)
{
	if (is("one") && side->rank == 1)
		setenv("FI_UDRV_SHM", "0", 1);
	side_begin(side, &setup);
	if (is("starts"))
		start(side);
	exchange(side);
	barrier(side);
	if (side->rank == 0)
		first(side);
	if (is("late"))
		send_late(side);
	if (is("slow"))
		send_long(side);
	say(1);
	if (is("computes") || is("sleeps"))
		for (;;)
			pause();
	poll_on(side);
}

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "usage: look WHAT\n");
		return 2;
	}
	what = argv[1];
	return !run_story(look, false, 60);
}
