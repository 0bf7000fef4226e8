/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * scarce [CASE]
 *
 * A process runs out of address space, file size or descriptors, before or after its first contact. A send has to
 * end, as delivered or with an error that says what is missing; nothing hangs, nobody is killed; and once there is
 * room again a new message arrives. One line a case, then "N passed, N failed".
 */
#include "common.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

/* Longer than any of it may take, seconds. */
#define CASE_S 10
#define LONG ((size_t)32 << 20)
#define MANY 3000
#define EACH 16384

/* What becomes scarce. */
enum what { ADDRESS_SPACE, FILE_SIZE, DESCRIPTORS };

struct test {
	const char *name;
	/* The rank with little: 0 sends, 1 receives. */
	int rank;
	enum what what;
	/* Beyond what it has, bytes. */
	size_t more;
	/* Of what is sent meanwhile: messages, and bytes of each. */
	size_t count, len;
	/* They know each other before; no receive is posted. */
	bool met, unexpected;
	/* The sender is not told: sends pend until there is room again. */
	bool pends;
	/* Each is sent once the one before has ended. */
	bool apart;
};

static const struct test tests[] = {
	{ "address space of a sender", 0, ADDRESS_SPACE, 256 << 10, 1, 8, false, false, false, false },
	{ "address space of a receiver", 1, ADDRESS_SPACE, 256 << 10, 1, 8, false, false, false, false },
	{ "file size of a sender", 0, FILE_SIZE, 0, 1, 8, false, false, false, false },
	{ "file size of a receiver", 1, FILE_SIZE, 0, 1, 8, false, false, true, false },
	{ "descriptors of a sender", 0, DESCRIPTORS, 0, 1, 8, false, false, false, false },
	{ "descriptors of a receiver", 1, DESCRIPTORS, 0, 1, 8, false, false, true, false },
	{ "long message, sender", 0, ADDRESS_SPACE, 1 << 20, 1, LONG, true, false, false, false },
	{ "long message, receiver", 1, ADDRESS_SPACE, 1 << 20, 1, LONG, true, false, false, false },
	{ "unexpected, receiver", 1, ADDRESS_SPACE, 4 << 20, MANY, EACH, true, true, false, false },
	/* Over TCP, what the receiver's system has taken must not stay there. */
	{ "stream, receiver", 1, DESCRIPTORS, 0, 20, 48 << 10, true, false, false, true },
};

static const struct test *test;
/* Ends of what was sent under the limit: delivered, and the first error. */
static size_t delivered;
static char why[160];

static size_t address_space(void)
{
	unsigned long pages = 0;
	FILE *file = fopen("/proc/self/statm", "r");

	CHECK(file && fscanf(file, "%lu", &pages) == 1);
	fclose(file);
	return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* One more than the highest that is open: holes below it are filled. */
static size_t descriptors(void)
{
	int next = dup(0);

	CHECK(next >= 0);
	close(next);
	return (size_t)next;
}

static int resource(void)
{
	return test->what == ADDRESS_SPACE ? RLIMIT_AS : test->what == FILE_SIZE ? RLIMIT_FSIZE : RLIMIT_NOFILE;
}

static struct rlimit lower(void)
{
	struct rlimit before, now_;

	CHECK(!getrlimit(resource(), &before));
	now_ = before;
	now_.rlim_cur = test->more + (test->what == ADDRESS_SPACE ? address_space() :
				      test->what == DESCRIPTORS ? descriptors() : 0);
	CHECK(!setrlimit(resource(), &now_));
	return before;
}

static void give_back(const struct rlimit *before)
{
	CHECK(!setrlimit(resource(), before));
}

/* Takes ends of operations for a moment. */
static void take_ends(struct fid_cq *cq, size_t *good)
{
	struct fi_cq_tagged_entry entries[8];
	struct fi_cq_err_entry error = { 0 };
	ssize_t n = fi_cq_read(cq, entries, 8);

	if (n > 0) {
		*good += (size_t)n;
	} else if (n == -FI_EAVAIL) {
		CHECK(fi_cq_readerr(cq, &error, 0) == 1);
		if (!why[0])
			snprintf(why, sizeof(why), "%s: %s", fi_strerror(error.err),
				 fi_cq_strerror(cq, error.prov_errno, error.err_data, NULL, 0));
	} else {
		CHECK(n == -FI_EAGAIN);
	}
}

static ssize_t send_one(struct side *side, const void *buffer, size_t len, uint64_t tag)
{
	struct iovec part = { (void *)buffer, len };
	struct fi_msg_tagged message = { .msg_iov = &part, .iov_count = 1, .addr = side->peer, .tag = tag };

	return fi_tsendmsg(side->ep, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

/* Sends until as many as wanted have ended, or time is over. Returns how many were started. */
static size_t send_all(struct side *side, const char *buffer, size_t count, size_t len, uint64_t tag, double end)
{
	size_t started = 0, ended = 0;

	while (started < count && !why[0] && now() < end) {
		ssize_t rc = test->apart && ended < started ? -FI_EAGAIN : send_one(side, buffer, len, tag);

		if (rc == 0)
			started++;
		else if (rc != -FI_EAGAIN)
			snprintf(why, sizeof(why), "fi_tsendmsg: %s", fi_strerror((int)-rc));
		take_ends(side->tx, &ended);
	}
	while (ended < started && !why[0] && now() < end)
		take_ends(side->tx, &ended);
	delivered += ended;
	return started;
}

static void tell_outcome(size_t started)
{
	if (why[0])
		printf("%-28s %zu of %zu delivered, then %s\n", test->name, delivered, test->count, why);
	else if (delivered == test->count)
		printf("%-28s delivered%s\n", test->name, test->pends ? " once there was room again" : "");
	else
		FAIL("%s: %zu of %zu sends have not ended in %d s, %zu not begun", test->name, started - delivered,
		     test->count, CASE_S, test->count - started);
}

/* `before`: our own limit, to go back to. */
static void receive_under_limit(struct side *side, char *buffer, double end, const struct rlimit *before)
{
	size_t posted = 0, got = 0;
	char over = 0;

	/* Until the sender says that its sends have ended. */
	while (now() < end + 2) {
		if (!test->unexpected && posted < test->count &&
		    fi_trecv(side->ep, buffer, test->len, NULL, FI_ADDR_UNSPEC, 1, 0, NULL) == 0)
			posted++;
		take_ends(side->rx, &got);
		if (test->pends && before && now() > end - CASE_S + 1) {
			give_back(before);
			before = NULL;
		}
		if (recv(side->link, &over, 1, MSG_DONTWAIT) == 1)
			return;
	}
	FAIL("%s: the sender says nothing", test->name);
}

#define RECOVERY 100000

/* The message of `recover` is there, whole. */
static bool has_recovered(const char *buffer)
{
	for (int i = 0; i < RECOVERY; i++)
		if (buffer[i] != 'r')
			return false;
	return true;
}

/* Room again: a message arrives. */
static void recover(struct side *side, char *buffer)
{
	double end = now() + CASE_S;
	size_t ended = 0, got = 0;

	why[0] = 0;
	if (side->rank == 1) {
		memset(buffer, 0, RECOVERY);
		CHECK(fi_trecv(side->ep, buffer, RECOVERY, NULL, FI_ADDR_UNSPEC, 2, 0, NULL) == 0);
		while (now() < end && !has_recovered(buffer))
			take_ends(side->rx, &got);
		CHECK(has_recovered(buffer));
	} else {
		memset(buffer, 'r', RECOVERY);
	}
	while (side->rank == 0 && now() < end && !ended) {
		ssize_t rc = send_one(side, buffer, RECOVERY, 2);

		why[0] = 0;
		while (rc == 0 && now() < end && !ended && !why[0])
			take_ends(side->tx, &ended);
		sleep_ms(1);
		progress(side);
	}
	if (side->rank == 0 && !ended)
		FAIL("%s: with room again, no message arrives: %s", test->name, why);
}

static void tale(struct side *side)
{
	struct setup setup = { .caps = FI_MSG | FI_TAGGED };
	char *buffer = need(test->len > 200000 ? test->len : 200000);
	struct rlimit before;
	size_t started = 0, first = 0;
	double end;

	side_begin(side, &setup);
	if (test->met) {
		if (side->rank == 1)
			OK(fi_trecv(side->ep, buffer, 100, NULL, FI_ADDR_UNSPEC, 0, 0, NULL));
		barrier(side);
		if (side->rank == 0)
			OK(send_one(side, buffer, 100, 0));
		end = now() + CASE_S;
		while (!first && now() < end)
			take_ends(side->rank ? side->rx : side->tx, &first);
		CHECK(first == 1);
	}
	barrier(side);
	if (side->rank == test->rank)
		before = lower();
	end = now() + CASE_S;
	if (side->rank == 0) {
		started = send_all(side, buffer, test->count, test->len, 1, end);
		tell(side, "", 1);
	} else {
		receive_under_limit(side, buffer, end, side->rank == test->rank ? &before : NULL);
	}
	if (side->rank == test->rank)
		give_back(&before);
	/* Not before: standard output may be a file. */
	if (side->rank == 0)
		tell_outcome(started);
	barrier(side);
	recover(side, buffer);
	side_end(side);
	free(buffer);
}

int main(int argc, char **argv)
{
	int passed = 0, failed = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
		if (argc > 1 && strcmp(argv[1], tests[i].name))
			continue;
		test = &tests[i];
		if (run_story(tale, false, 3 * CASE_S))
			passed++;
		else
			failed++;
	}
	printf("%d passed, %d failed\n", passed, failed);
	return failed > 0;
}
