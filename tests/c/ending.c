/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * ending [--all] [--rounds N] [--list] [NAME...]
 *
 * A process that has read the completion of what it sent ends, and its peer gets all of it. Each case is told by two
 * processes of its own; one line a case, then "N passed, N failed". A name is FORM-LEVEL-END, or that of a story. With
 * --all every form ends in every way with every size.
 */
#include "common.h"

#include <rdma/fi_domain.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CAPS (FI_MSG | FI_TAGGED | FI_RMA)
#define KEY 7
#define MAX_LEN (1 << 20)
#define INJECT_LEN 64
#define BURST 100

enum form { SEND, TSEND, INJECT, TINJECT, WRITE, FORMS };
/* The process returns or calls exit(3); closes everything and returns; is gone at once. */
enum end { EXIT, CLOSE, GONE, ENDS };

static const char *const form_names[] = { "send", "tsend", "inject", "tinject", "write" };
static const char *const end_names[] = { "exit", "close", "gone" };
static const struct {
	const char *name;
	uint64_t flag;
} levels[] = { { "default", 0 }, { "transmit", FI_TRANSMIT_COMPLETE }, { "delivery", FI_DELIVERY_COMPLETE } };
#define LEVELS 3

/* Those of a short run first. */
static const size_t sizes[] = { 1, 1500, 16384, 16385, MAX_LEN, 8, 200, 1000, 4096, 9000, 40000, 65536, 100000, 300000 };
#define SIZES (sizeof(sizes) / sizeof(*sizes))
#define FEW 5

/* The case. */
static enum form form;
static enum end end;
static int level;
static size_t len;
static int count;
/* How long the receiver is elsewhere before it polls, milliseconds. */
static int absence;

static void post(struct side *me, char *from, int i)
{
	switch (form) {
	case SEND:
		POST(me, fi_send(me->ep, from, len, NULL, me->peer, NULL));
		break;
	case TSEND:
		POST(me, fi_tsend(me->ep, from, len, NULL, me->peer, (uint64_t)i, NULL));
		break;
	case INJECT:
		POST(me, fi_inject(me->ep, from, len, me->peer));
		break;
	case TINJECT:
		POST(me, fi_tinject(me->ep, from, len, me->peer, (uint64_t)i));
		break;
	default:
		POST(me, fi_writedata(me->ep, from, len, NULL, (uint64_t)i, me->peer, 0, KEY, NULL));
	}
}

static void sender(struct side *me, char *memory)
{
	bool completes = form != INJECT && form != TINJECT;

	fill(memory, len, 1);
	for (int i = 0; i < count; i++)
		post(me, memory, i);
	for (int i = 0; i < count && completes; i++)
		completion(me->tx);
	if (end == GONE)
		_exit(0);
	if (end == CLOSE)
		side_close(me);
	exit(0);
}

static void receiver(struct side *me, char *memory, struct fid_mr *mr)
{
	sleep_ms(absence);
	for (int i = 0; i < count; i++) {
		if (form != WRITE)
			memset(memory, 0, len);
		if (form == SEND || form == INJECT)
			POST(me, fi_recv(me->ep, memory, len, NULL, FI_ADDR_UNSPEC, NULL));
		else if (form != WRITE)
			POST(me, fi_trecv(me->ep, memory, len, NULL, FI_ADDR_UNSPEC, (uint64_t)i, 0, NULL));
		if (form == WRITE)
			SAME(completion(me->rx).data, i);
		else
			SAME(completion(me->rx).len, len);
		CHECK(holds(memory, len, 1, 0));
	}
	OK(fi_close(&mr->fid));
	side_close(me);
}

static void story_of_case(struct side *me)
{
	char *memory = need(MAX_LEN);
	struct fid_mr *mr = NULL;

	side_open(me, &(struct setup){ .caps = CAPS, .tx_op_flags = levels[level].flag });
	if (me->rank == 1)
		OK(fi_mr_reg(me->domain, memory, MAX_LEN, FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	meet(me);
	if (me->rank == 0)
		sender(me, memory);
	receiver(me, memory, mr);
	free(memory);
}

/* What the case promises. An injected message and a send of the default level are safe with an orderly end. */
static bool is_promised(void)
{
	bool injected = form == INJECT || form == TINJECT;

	if (injected && (level > 0 || len > INJECT_LEN))
		return false;
	return end != GONE || level > 0 || form == WRITE;
}

/* Levels that end in the weakest way that they are for, and one that closes all. */
static bool is_short_run(void)
{
	if (form == SEND && level == 0)
		return true;
	return end == (level > 0 ? GONE : EXIT) && (level < 2 || form == WRITE);
}

/*
 * An endpoint that closes in order has answered what came before. Rank 1 has two endpoints and closes both, one after the
 * other, without a look at the second, to which rank 0 has written; its regions stay until then.
 */
static void second_endpoint(struct side *me)
{
	char memory[64] = "", theirs[NAME_MAX_LEN];
	struct fid_ep *other;
	struct fid_mr *mr;

	side_open(me, &(struct setup){ .caps = CAPS, .tx_op_flags = FI_DELIVERY_COMPLETE });
	OK(fi_mr_reg(me->domain, memory, sizeof(memory), FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	meet(me);
	if (me->rank == 0) {
		fi_addr_t there;

		hear(me, theirs, sizeof(theirs));
		there = insert(me, theirs);
		/* They have met. */
		POST(me, fi_write(me->ep, memory, 8, NULL, there, 0, KEY, NULL));
		POST(me, fi_write(me->ep, memory, 8, NULL, me->peer, 0, KEY, NULL));
		for (int i = 0; i < 2; i++)
			completion(me->tx);
		barrier(me);
		POST(me, fi_write(me->ep, memory, 8, NULL, there, 0, KEY, NULL));
		POST(me, fi_write(me->ep, memory, 8, NULL, me->peer, 0, KEY, NULL));
		/* On their way. */
		sleep_ms(20);
		tell(me, "w", 1);
		for (int i = 0; i < 2; i++)
			completion(me->tx);
		OK(fi_close(&mr->fid));
		side_close(me);
		return;
	}
	other = another_endpoint(me);
	name_of(other, theirs);
	tell(me, theirs, sizeof(theirs));
	barrier(me);
	hear(me, memory, 1);
	OK(fi_close(&other->fid));
	OK(fi_close(&me->ep->fid));
	me->ep = NULL;
	OK(fi_close(&mr->fid));
	side_close(me);
}

/* The sender is a forked child of a process that has had an endpoint, and ends before the receiver looks. */
static void forked_sender(struct side *me)
{
	struct side before = { 0 };
	pid_t child;
	int status;

	if (me->rank == 0) {
		side_open(&before, &(struct setup){ .caps = CAPS });
		side_close(&before);
		child = fork();
		CHECK(child >= 0);
		if (child) {
			SAME(waitpid(child, &status, 0), child);
			SAME(status, 0);
			return;
		}
	}
	form = SEND, level = 0, end = EXIT, len = 16384, count = BURST, absence = 300;
	story_of_case(me);
}

static bool named(const char *name, int argc, char **argv)
{
	for (int i = 0; i < argc; i++)
		if (!strcmp(name, argv[i]))
			return true;
	return argc == 0;
}

static const struct {
	const char *name;
	story story;
} stories[] = { { "second_endpoint", second_endpoint }, { "forked_sender", forked_sender } };
#define STORIES (sizeof(stories) / sizeof(*stories))

static int passed, failed;

static void tell_case(const char *name, const char *what, story story)
{
	double begun = now();
	bool good = run_story(story, false, 60);

	if (!good)
		printf("FAIL %s %s %.2f s\n", name, what, now() - begun);
	*(good ? &passed : &failed) += 1;
}

static void one_case(const char *name)
{
	char what[64];

	snprintf(what, sizeof(what), "%d of %zu bytes", count, len);
	if (is_promised())
		tell_case(name, what, story_of_case);
}

int main(int argc, char **argv)
{
	int rounds = 1;
	bool list = false, all = false;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (argc--, argv++; argc > 0 && argv[0][0] == '-'; argc--, argv++) {
		if (!strcmp(*argv, "--list"))
			list = true;
		else if (!strcmp(*argv, "--all"))
			all = true;
		else if (!strcmp(*argv, "--rounds") && argc > 1)
			rounds = atoi(*++argv), argc--;
		else
			FAIL("what is %s?", *argv);
	}
	for (int round = 0; round < rounds; round++) {
		for (int i = 0; i < FORMS * LEVELS * ENDS; i++) {
			char name[64];
			double begun = now();
			int before = failed;

			form = (enum form)(i / (LEVELS * ENDS));
			level = i / ENDS % LEVELS;
			end = (enum end)(i % ENDS);
			len = 1;
			snprintf(name, sizeof(name), "%s-%s-%s", form_names[form], levels[level].name, end_names[end]);
			if (!named(name, argc, argv) || !is_promised() || !(all || argc > 0 || is_short_run()))
				continue;
			if (list) {
				printf("%s\n", name);
				continue;
			}
			absence = 0;
			for (size_t s = 0; s < (all ? SIZES : FEW); s++) {
				len = sizes[s], count = 2;
				one_case(name);
			}
			len = 1, count = BURST;
			one_case(name);
			len = 8, count = 1, absence = 300;
			one_case(name);
			if (before == failed)
				printf("ok   %-28s %6.2f s\n", name, now() - begun);
		}
		for (size_t i = 0; i < STORIES; i++) {
			if (list)
				printf("%s\n", stories[i].name);
			else if (named(stories[i].name, argc, argv))
				tell_case(stories[i].name, "", stories[i].story);
		}
	}
	if (!list)
		printf("%d passed, %d failed\n", passed, failed);
	return failed || (!list && !passed);
}
