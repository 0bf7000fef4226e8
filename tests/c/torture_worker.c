/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * A worker of a torture: exchanges messages of random length with every other one, in both directions, checks each
 * byte, and watches what becomes of the operations that pend on a worker that was killed. All its receives name
 * their sender, so that every one of them has to fail with it.
 */
#include "torture.h"

#include <netinet/in.h>
#include <poll.h>
#include <rdma/fi_ext_udrv.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LONGEST 300000
/* Operations of each direction and kind that pend on each peer. */
#define WINDOW 2
/* The links of a worker have so much shared memory once they have grown. */
#define GROWN_KIB 2048

struct peer;

struct operation {
	struct fi_context context;
	struct peer *peer;
	char *buffer;
	bool receives, tagged, pends;
};

struct peer {
	fi_addr_t address;
	int number;
	/* We know its address. An operation to it failed. That was told to the parent. */
	bool known, failed, settled;
	/* A link to it was made. */
	bool met;
	/* It was there before, as another process; what that one left behind comes first. */
	bool reborn;
	pid_t pid;
	/* Of plain and of tagged messages. */
	uint64_t heard[2];
	uint64_t failures;
	/* The first error. */
	char why[NAME_MAX_LEN];
	struct operation operations[4 * WINDOW];
};

static struct side self;
static struct peer peers[MOST_WORKERS];
static const struct round *plan;
static uint64_t random_state, messages;
static bool stopping, stopped;
/* When this worker learned of the first other one; and the KiB of shared memory that it had mapped when it was loud last. */
static double loud_since;
static long loud_kib;
static int own_number;

static void report(const struct note *note)
{
	if (send(self.link, note, sizeof(*note), MSG_NOSIGNAL) != sizeof(*note))
		_exit(3); /* the parent is gone */
}

/* Nothing that udrv makes has a name in a file system. */
static void check_files(void)
{
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "r");

	while (maps && fgets(line, sizeof(line), maps))
		if (strstr(line, " /dev/shm/") || strstr(line, " /tmp/udrv") || strstr(line, " /var/tmp/"))
			FAIL("mapped: %s", line);
	if (maps)
		fclose(maps);
}

/* KiB of the segments of links that have pages. */
static long segments_kib(void)
{
	char line[512];
	bool segment = false;
	long kib, sum = 0;
	FILE *maps = fopen("/proc/self/smaps", "r");

	while (maps && fgets(line, sizeof(line), maps)) {
		if (strstr(line, "/memfd:"))
			segment = strstr(line, "/memfd:udrv (deleted)") != NULL;
		else if (segment && sscanf(line, "Rss: %ld kB", &kib) == 1)
			sum += kib, segment = false;
	}
	if (maps)
		fclose(maps);
	return sum;
}

/* Whether messages may take bulk space. */
static bool is_loud(void)
{
	if (!plan->loud_ms || !loud_since)
		return true;
	if (now() < loud_since + plan->loud_ms * 1e-3)
		return true;
	if (loud_kib)
		return false;
	/* On a busy machine it takes longer until links have grown. */
	long kib = segments_kib();

	if (kib < GROWN_KIB && now() < loud_since + 5 * plan->loud_ms * 1e-3)
		return true;
	loud_kib = kib;
	return false;
}

/* The links have grown, and have given most of that back. */
static void check_shrunk(void)
{
	double end = now() + patience_s(8);

	if (!plan->loud_ms)
		return;
	CHECK(!is_loud());
	if (loud_kib < GROWN_KIB)
		FAIL("the links have %ld KiB: they have not grown", loud_kib);
	while (segments_kib() > loud_kib / 2) {
		if (now() > end)
			FAIL("the links had %ld KiB, and have %ld", loud_kib, segments_kib());
		progress(&self);
		sleep_ms(20);
	}
}

static void lose(struct peer *peer, const char *what, int error, const char *cause)
{
	if (!peer->failed)
		snprintf(peer->why, sizeof(peer->why), "%s: %s%s%s", what, fi_strerror(error), *cause ? ": " : "", cause);
	peer->failed = true;
}

static int pending(const struct peer *peer, bool sends_only)
{
	int count = 0;

	for (int i = 0; i < 4 * WINDOW; i++)
		count += peer->operations[i].pends && !(sends_only && peer->operations[i].receives);
	return count;
}

static void take_success(const struct fi_cq_tagged_entry *entry)
{
	struct operation *operation = entry->op_context;
	struct peer *peer = operation->peer;

	CHECK(operation->pends);
	operation->pends = false;
	peer->met = true;
	if (!operation->receives)
		return;
	/* The sender's pid and the seed travel as the tag, or as data. */
	uint64_t mark = operation->tagged ? entry->tag : entry->data;
	if (!holds(operation->buffer, entry->len, (uint32_t)mark, 0))
		FAIL("a message of %zu bytes is not what was sent", entry->len);
	messages++;
	if ((pid_t)(mark >> 32) != peer->pid) {
		CHECK(peer->reborn && !peer->heard[operation->tagged]);
		return;
	}
	if (peer->heard[operation->tagged]++ == 0)
		report(&(struct note){ .kind = HEARD, .peer = peer->number });
}

static void take_failure(struct fid_cq *cq)
{
	struct fi_cq_err_entry error = { 0 };
	struct operation *operation;

	SAME(fi_cq_readerr(cq, &error, 0), 1);
	operation = error.op_context;
	CHECK(operation->pends);
	operation->pends = false;
	if (error.err == FI_ETRUNC || error.err == FI_ENOMSG)
		FAIL("error %d (%s)", error.err, fi_strerror(error.err));
	if (operation->receives && operation->peer->reborn && !operation->peer->heard[operation->tagged])
		return; /* a message that the earlier life announced and never sent */
	operation->peer->failures++;
	lose(operation->peer, operation->receives ? "receive" : "send", error.err,
	     fi_cq_strerror(cq, error.prov_errno, error.err_data, NULL, 0));
}

/* Reads all there is. True if there was anything. */
static bool drain(struct fid_cq *cq)
{
	bool any = false;

	for (;;) {
		struct fi_cq_tagged_entry entries[16];
		ssize_t n = fi_cq_read(cq, entries, 16);

		if (n == -FI_EAGAIN)
			return any;
		any = true;
		if (n == -FI_EAVAIL) {
			take_failure(cq);
			continue;
		}
		CHECK(n > 0);
		for (ssize_t i = 0; i < n; i++)
			take_success(&entries[i]);
	}
}

static bool post_receive(struct operation *operation)
{
	fi_addr_t from = operation->peer->address;
	ssize_t rc;

	if (operation->tagged)
		rc = fi_trecv(self.ep, operation->buffer, LONGEST, NULL, from, 0, UINT64_MAX, operation);
	else
		rc = fi_recv(self.ep, operation->buffer, LONGEST, NULL, from, operation);
	if (rc == -FI_EAGAIN)
		return false;
	OK(rc);
	operation->pends = true;
	return true;
}

/* True if it was taken or refused for good. */
static bool post_send(struct operation *operation)
{
	struct peer *peer = operation->peer;
	uint64_t kind = next_random(&random_state) % 10;
	uint64_t mark = (uint64_t)getpid() << 32 | (next_random(&random_state) & 0xFFFFFFFF);
	/* Up to 16 KiB, payload buffers are enough for two that answer each other, and their link does not grow. */
	size_t most = !is_loud() ? 64 : plan->loud_ms || kind >= 8 ? LONGEST : kind < 5 ? 100 : 16384;
	size_t len = next_random(&random_state) % most;
	ssize_t rc;

	fill(operation->buffer, len, (uint32_t)mark);
	operation->pends = true;
	if (operation->tagged)
		rc = fi_tsend(self.ep, operation->buffer, len, NULL, peer->address, mark, operation);
	else
		rc = fi_senddata(self.ep, operation->buffer, len, NULL, mark, peer->address, operation);
	if (rc)
		operation->pends = false;
	else
		peer->met = true;
	if (rc && rc != -FI_EAGAIN)
		lose(peer, "fi_send", (int)-rc, "");
	return rc != -FI_EAGAIN;
}

/* False if something has to be tried again soon. */
static bool post(struct peer *peer, bool receives)
{
	bool good = true;

	for (int i = 0; i < 4 * WINDOW && good && peer->known && !peer->failed; i++) {
		struct operation *operation = &peer->operations[i];

		if (operation->receives != receives || operation->pends || (!receives && stopping))
			continue;
		good = receives ? post_receive(operation) : post_send(operation);
	}
	return good;
}

static void settle(struct peer *peer)
{
	if (!peer->failed || peer->settled)
		return;
	/* Receives fail with the end of a link; where there never was one, they are taken back. */
	for (int i = 0; i < 4 * WINDOW && !peer->met; i++)
		if (peer->operations[i].pends)
			fi_cancel(&self.ep->fid, &peer->operations[i]);
	if (pending(peer, false))
		return;
	struct note note = { .kind = SETTLED, .peer = peer->number, .time = now(), .count = peer->failures };
	memcpy(note.name, peer->why, sizeof(note.name));
	peer->settled = true;
	report(&note);
}

static void meet_peer(const struct note *note)
{
	struct peer *peer = &peers[note->peer];

	if (!loud_since)
		loud_since = now();
	if (peer->known)
		OK(fi_av_remove(self.av, &peer->address, 1, 0));
	peer->reborn = peer->known;
	peer->known = true;
	peer->pid = note->pid;
	peer->failed = peer->settled = peer->met = false;
	peer->failures = peer->heard[0] = peer->heard[1] = 0;
	peer->address = insert(&self, note->name);
}

/* Where attaching is forbidden, nothing was copied that way, and nothing was held back for it. */
static void check_counts(void)
{
	struct fi_ops_udrv *ops;
	struct fi_udrv_counts counts;

	if (!plan->forbidden || fi_open_ops(&self.ep->fid, FI_UDRV_OPS, 0, (void **)&ops, NULL))
		return;
	OK(ops->counts(self.ep, &counts, sizeof(counts)));
	SAME(counts.pulled_bytes + counts.pushed_bytes + counts.assisted_bytes, 0);
	SAME(counts.stream_bytes, 0);
}

static void leave(void)
{
	check_shrunk();
	report(&(struct note){ .kind = CLOSING, .count = messages });
	check_files();
	check_counts();
	side_close(&self);
	for (int p = 0; p < MOST_WORKERS; p++)
		for (int i = 0; i < 4 * WINDOW; i++)
			free(peers[p].operations[i].buffer);
	exit(0);
}

/* Holds all our descriptors and sleeps. */
static void leave_heir(void)
{
	pid_t heir = fork();

	CHECK(heir >= 0);
	if (heir) {
		report(&(struct note){ .kind = HEIR, .pid = heir });
		return;
	}
	alarm((unsigned int)patience_s(60));
	for (;;)
		pause();
}

/* A child of the dead one still takes connections. Nothing that is sent there may seem to arrive. */
static void send_again(const struct note *note)
{
	const struct peer *peer = &peers[note->peer];
	double end = now() + patience_s(3);
	ssize_t rc;

	while ((rc = fi_inject(self.ep, &(char){ 0 }, 1, peer->address)) == 0 || rc == -FI_EAGAIN) {
		if (now() > end)
			FAIL("messages to a dead process are taken");
		drain(self.tx);
	}
	/* Not because a link has just ended. */
	SAME(fi_inject(self.ep, &(char){ 0 }, 1, peer->address), rc);
	report(&(struct note){ .kind = AGAIN, .peer = note->peer });
}

static void listen_to_parent(void)
{
	struct note note;
	ssize_t n = recv(self.link, &note, sizeof(note), MSG_DONTWAIT);

	if (n == 0)
		_exit(3);
	if (n != sizeof(note))
		return;
	if (note.kind == PEER)
		meet_peer(&note);
	else if (note.kind == AGAIN)
		send_again(&note);
	else if (note.kind == HEIR)
		leave_heir();
	else if (note.kind == STOP)
		stopping = true;
	else if (note.kind == CLOSE)
		leave();
}

static void tell_stopped(void)
{
	int pend = 0;

	for (int p = 0; p < plan->workers; p++)
		pend += pending(&peers[p], true);
	if (!stopping || stopped || pend)
		return;
	stopped = true;
	report(&(struct note){ .kind = STOPPED });
}

/* Sleeps until the queue or the parent has something, in this round's manner. */
static void pause_until_event(bool try_again_soon)
{
	struct fi_cq_tagged_entry none;
	struct fid *fid = &self.tx->fid;
	struct pollfd at[2] = { { .fd = self.link, .events = POLLIN }, { .events = POLLIN } };

	if (plan->manner == SLEEPING) {
		/* No room for an entry: it stays in the queue. */
		fi_cq_sread(self.tx, &none, 0, NULL, try_again_soon ? 1 : 20);
	} else if (plan->manner == ON_DESCRIPTOR) {
		OK(fi_control(fid, FI_GETWAIT, &at[1].fd));
		if (fi_trywait(self.fabric, &fid, 1) == 0)
			poll(at, 2, try_again_soon ? 1 : PATIENCE_S * 1000);
	}
}

static void begin(void)
{
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_DIRECTED_RECV, .addr_format = FI_SOCKADDR_IN,
			       .one_queue = true };
	struct note ready = { .kind = READY };
	char service[16];

	if (plan->cma[own_number])
		setenv("FI_UDRV_CMA", plan->cma[own_number], 1);
	if (plan->manner != POLLING)
		setup.wait_obj = FI_WAIT_FD;
	snprintf(service, sizeof(service), "%d", plan->port[own_number]);
	if (plan->port[own_number])
		setup.service = service;
	side_open(&self, &setup);
	for (int p = 0; p < MOST_WORKERS; p++) {
		peers[p].number = p;
		for (int i = 0; i < 4 * WINDOW; i++)
			peers[p].operations[i] = (struct operation){
				.peer = &peers[p], .buffer = need(LONGEST), .receives = i & 1, .tagged = i & 2,
			};
	}
	name_of(self.ep, ready.name);
	ready.port = ntohs(((struct sockaddr_in *)(void *)ready.name)->sin_port);
	report(&ready);
}

void work(const struct round *round, int me, int link)
{
	plan = round;
	own_number = me;
	random_state = (uint64_t)getpid() * 1000003;
	self.link = link;
	alarm((unsigned int)patience_s(60));
	begin();
	for (;;) {
		bool any, soon = false;

		listen_to_parent();
		any = drain(self.tx);
		for (int p = 0; p < round->workers; p++)
			post(&peers[p], true);
		for (int p = 0; p < round->workers; p++)
			soon |= !post(&peers[p], false);
		for (int p = 0; p < round->workers; p++)
			settle(&peers[p]);
		tell_stopped();
		if (!any)
			pause_until_event(soon);
	}
}
