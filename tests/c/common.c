/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
#include "common.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* --- checks --- */

void fail(const char *file, int line, const char *format, ...)
{
	char text[512];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	fprintf(stderr, "  %s:%d: %s\n", strrchr(file, '/') ? strrchr(file, '/') + 1 : file, line, text);
	fflush(NULL);
	_exit(1);
}

double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int patience_s(int seconds)
{
	const char *told = getenv("UDRV_TEST_SLOWNESS");
	int slowness = told ? atoi(told) : 1;

	return seconds * (slowness < 1 ? 1 : slowness > 8 ? 8 : slowness);
}

double crowding(void)
{
	double load = 0, processors = (double)sysconf(_SC_NPROCESSORS_ONLN);
	int running = 0;
	FILE *file = fopen("/proc/loadavg", "r");

	if (file) {
		if (fscanf(file, "%lf %*f %*f %d", &load, &running) != 2)
			load = 0;
		fclose(file);
	}
	load = (running > load ? running : load) / (processors < 1 ? 1 : processors);
	/* Both sides poll: so many are usual. */
	return load < 2 ? 1 : load;
}

void sleep_ms(int ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000L };

	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

uint64_t next_random(uint64_t *state)
{
	uint64_t z = *state += 0x9E3779B97F4A7C15u;

	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
	z = (z ^ z >> 27) * 0x94D049BB133111EBu;
	return z ^ z >> 31;
}

/* --- contents of messages --- */

/* Both parts of a word change from word to word, so that neither a shift nor a swap goes unseen. */
static uint8_t byte_at(uint32_t seed, size_t i)
{
	uint32_t word = ((uint32_t)(i / 4) + seed * 0x9E3779B9u) * 0x85EBCA6Bu;

	word ^= word >> 15;
	return (uint8_t)(word >> i % 4 * 8);
}

void fill(void *buffer, size_t len, uint32_t seed)
{
	uint8_t *bytes = buffer;

	for (size_t i = 0; i < len; i++)
		bytes[i] = byte_at(seed, i);
}

bool holds(const void *buffer, size_t len, uint32_t seed, size_t from)
{
	const uint8_t *bytes = buffer;

	for (size_t i = 0; i < len; i++)
		if (bytes[i] != byte_at(seed, from + i))
			return false;
	return true;
}

void *need(size_t len)
{
	void *memory = calloc(1, len ? len : 1);

	CHECK(memory);
	return memory;
}

/* --- one side --- */

struct fi_info *choose(const struct setup *setup)
{
	struct fi_info *hints = fi_allocinfo(), *info = NULL;
	const char *provider = getenv("UDRV_TEST_PROVIDER");

	CHECK(hints);
	hints->fabric_attr->prov_name = strdup(provider ? provider : "udrv");
	hints->ep_attr->type = FI_EP_RDM;
	hints->caps = setup->caps ? setup->caps : FI_MSG | FI_TAGGED;
	hints->addr_format = setup->addr_format;
	hints->domain_attr->threading = setup->threading;
	hints->domain_attr->data_progress = setup->progress;
	hints->domain_attr->control_progress = setup->progress;
	hints->domain_attr->av_type = setup->av_type;
	hints->domain_attr->mr_mode = setup->mr_mode ? setup->mr_mode
						     : FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
	hints->mode = FI_CONTEXT;
	hints->tx_attr->op_flags = setup->tx_op_flags;
	hints->rx_attr->op_flags = setup->rx_op_flags;
	OK(fi_getinfo(FI_VERSION(1, 17), NULL, setup->service, setup->service ? FI_SOURCE : 0, hints, &info));
	fi_freeinfo(hints);
	return info;
}

static void open_queues(struct side *side)
{
	struct fi_cq_attr attr = {
		.format = side->setup.format ? side->setup.format : FI_CQ_FORMAT_TAGGED,
		.wait_obj = side->setup.wait_obj,
		.wait_cond = side->setup.wait_cond,
		.size = side->setup.cq_size,
	};

	OK(fi_cq_open(side->domain, &attr, &side->tx, side));
	if (side->setup.one_queue)
		side->rx = side->tx;
	else
		OK(fi_cq_open(side->domain, &attr, &side->rx, side));
}

static void open_counters(struct side *side)
{
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = side->setup.wait_obj };

	OK(fi_cntr_open(side->domain, &attr, &side->sent, side));
	OK(fi_cntr_open(side->domain, &attr, &side->received, side));
}

static const uint64_t what_counts[RMA_COUNTERS] = { FI_READ, FI_WRITE, FI_REMOTE_READ, FI_REMOTE_WRITE };

struct fid_ep *another_endpoint(struct side *side)
{
	struct fid_ep *ep;

	OK(fi_endpoint(side->domain, side->info, &ep, side));
	OK(fi_ep_bind(ep, &side->av->fid, 0));
	if (side->tx) {
		OK(fi_ep_bind(ep, &side->tx->fid, FI_TRANSMIT | side->setup.bind_flags));
		OK(fi_ep_bind(ep, &side->rx->fid, FI_RECV | side->setup.bind_flags));
	}
	if (side->sent) {
		OK(fi_ep_bind(ep, &side->sent->fid, FI_SEND));
		OK(fi_ep_bind(ep, &side->received->fid, FI_RECV));
	}
	for (int i = 0; i < RMA_COUNTERS; i++)
		if (side->rma[i])
			OK(fi_ep_bind(ep, &side->rma[i]->fid, what_counts[i]));
	if (side->setup.p2p)
		OK(fi_setopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &side->setup.p2p, sizeof(int)));
	OK(fi_enable(ep));
	return ep;
}

void side_open(struct side *side, const struct setup *setup)
{
	struct fi_av_attr av = { .type = setup->av_type };

	side->setup = *setup;
	side->info = choose(setup);
	OK(fi_fabric(side->info->fabric_attr, &side->fabric, NULL));
	OK(fi_domain(side->fabric, side->info, &side->domain, NULL));
	OK(fi_av_open(side->domain, &av, &side->av, NULL));
	if (!setup->only_counters)
		open_queues(side);
	if (setup->counters || setup->only_counters)
		open_counters(side);
	for (int i = 0; i < RMA_COUNTERS && setup->rma_counters; i++)
		OK(fi_cntr_open(side->domain, &(struct fi_cntr_attr){ 0 }, &side->rma[i], side));
	side->ep = another_endpoint(side);
}

static void close_one(struct fid *fid)
{
	if (fid)
		OK(fi_close(fid));
}

void side_close(struct side *side)
{
	close_one(side->ep ? &side->ep->fid : NULL);
	close_one(side->rx && side->rx != side->tx ? &side->rx->fid : NULL);
	close_one(side->tx ? &side->tx->fid : NULL);
	close_one(side->sent ? &side->sent->fid : NULL);
	close_one(side->received ? &side->received->fid : NULL);
	for (int i = 0; i < RMA_COUNTERS; i++)
		close_one(side->rma[i] ? &side->rma[i]->fid : NULL);
	close_one(&side->av->fid);
	close_one(&side->domain->fid);
	close_one(&side->fabric->fid);
	fi_freeinfo(side->info);
	*side = (struct side){ .rank = side->rank, .link = side->link };
}

size_t name_of(struct fid_ep *ep, char name[NAME_MAX_LEN])
{
	size_t len = NAME_MAX_LEN;

	memset(name, 0, NAME_MAX_LEN);
	OK(fi_getname(&ep->fid, name, &len));
	CHECK(len <= NAME_MAX_LEN);
	return len;
}

fi_addr_t insert(struct side *side, const char *name)
{
	fi_addr_t address = FI_ADDR_UNSPEC;
	/* Addresses as strings are inserted as an array of strings (fi_av.3); shm takes the string itself. */
	bool listed = side->info->addr_format == FI_ADDR_STR && strcmp(side->info->fabric_attr->prov_name, "shm");
	const void *at = listed ? (const void *)&name : name;

	SAME(fi_av_insert(side->av, at, 1, &address, 0, NULL), 1);
	return address;
}

void meet(struct side *side)
{
	char mine[NAME_MAX_LEN], theirs[NAME_MAX_LEN];

	name_of(side->ep, mine);
	tell(side, mine, sizeof(mine));
	hear(side, theirs, sizeof(theirs));
	side->peer = insert(side, theirs);
}

void side_begin(struct side *side, const struct setup *setup)
{
	side_open(side, setup);
	meet(side);
}

void side_end(struct side *side)
{
	barrier(side);
	side_close(side);
}

/* --- the socket between the sides --- */

void tell(struct side *side, const void *data, size_t len)
{
	SAME(send(side->link, data, len, MSG_NOSIGNAL), len);
}

void hear(struct side *side, void *data, size_t len)
{
	struct pollfd entry = { .fd = side->link, .events = POLLIN };

	if (poll(&entry, 1, PATIENCE_S * 1000) != 1)
		FAIL("the other side is silent for %d s", PATIENCE_S);
	if (recv(side->link, data, len, MSG_WAITALL) != (ssize_t)len)
		FAIL("the other side is gone");
}

void barrier(struct side *side)
{
	struct pollfd entry = { .fd = side->link, .events = POLLIN };
	double end = now() + PATIENCE_S;
	char byte = 'b';

	tell(side, &byte, 1);
	while (poll(&entry, 1, 0) == 0) {
		if (now() > end)
			FAIL("alone at a barrier for %d s", PATIENCE_S);
		progress(side);
	}
	hear(side, &byte, 1);
	SAME(byte, 'b');
}

/* --- completions --- */

void progress(struct side *side)
{
	struct fi_cq_tagged_entry none;

	if (side->tx) {
		fi_cq_read(side->tx, &none, 0);
		fi_cq_read(side->rx, &none, 0);
	} else if (side->sent) {
		fi_cntr_read(side->sent);
		fi_cntr_read(side->received);
	}
}

static void explain(struct fid_cq *cq)
{
	struct fi_cq_err_entry error = { 0 };

	if (fi_cq_readerr(cq, &error, 0) != 1)
		FAIL("fi_cq_read says FI_EAVAIL, fi_cq_readerr has nothing");
	FAIL("an operation failed: %s (%d): %s; flags %#llx, context %p", fi_strerror(error.err), error.err,
	     fi_cq_strerror(cq, error.prov_errno, error.err_data, NULL, 0), (unsigned long long)error.flags,
	     error.op_context);
}

struct fi_cq_tagged_entry completion_from(struct fid_cq *cq, fi_addr_t *source)
{
	struct fi_cq_tagged_entry entry = { 0 };
	double end = now() + PATIENCE_S;
	ssize_t n;

	while ((n = fi_cq_readfrom(cq, &entry, 1, source)) == -FI_EAGAIN)
		if (now() > end)
			FAIL("no completion for %d s", PATIENCE_S);
	if (n == -FI_EAVAIL)
		explain(cq);
	SAME(n, 1);
	return entry;
}

struct fi_cq_tagged_entry completion(struct fid_cq *cq)
{
	fi_addr_t source;

	return completion_from(cq, &source);
}

struct fi_cq_err_entry failure(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double end = now() + PATIENCE_S;
	ssize_t n;

	while ((n = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN)
		if (now() > end)
			FAIL("no error for %d s", PATIENCE_S);
	SAME(n, -FI_EAVAIL);
	SAME(fi_cq_readerr(cq, &error, 0), 1);
	return error;
}

void take_any(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = {0};

	if (fi_cq_read(cq, &entry, 1) == -FI_EAVAIL)
		fi_cq_readerr(cq, &error, 0);
}

void nothing_in(struct fid_cq *cq, int ms)
{
	struct fi_cq_tagged_entry entry;
	double end = now() + ms * 1e-3;

	do
		SAME(fi_cq_read(cq, &entry, 1), -FI_EAGAIN);
	while (now() < end);
}

/* --- running --- */

struct teller {
	story story;
	struct side side;
};

static void *tell_story(void *argument)
{
	struct teller *teller = argument;

	teller->story(&teller->side);
	return NULL;
}

static void in_threads(story story, int links[2])
{
	struct teller tellers[2];
	pthread_t threads[2];

	for (int i = 0; i < 2; i++) {
		tellers[i] = (struct teller){ .story = story, .side = { .rank = i, .link = links[i] } };
		OK(pthread_create(&threads[i], NULL, tell_story, &tellers[i]));
	}
	for (int i = 0; i < 2; i++)
		OK(pthread_join(threads[i], NULL));
}

static void in_process(story story, int rank, int links[2])
{
	struct teller teller = { .story = story, .side = { .rank = rank, .link = links[rank] } };

	close(links[1 - rank]);
	tell_story(&teller);
	close(links[rank]);
}

/* Whether a child came to a good end; says what else it came to. */
static bool ended_well(pid_t child)
{
	int status;

	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return false;
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
		fprintf(stderr, "  a side ran over its time\n");
	else if (WIFSIGNALED(status))
		fprintf(stderr, "  a side was ended by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool run_story(story story, bool one_process, int seconds)
{
	pid_t children[2];
	int count = one_process ? 1 : 2, links[2];
	bool good = true;

	fflush(NULL);
	OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, links));
	for (int i = 0; i < count; i++) {
		children[i] = fork();
		CHECK(children[i] >= 0);
		if (children[i])
			continue;
		alarm((unsigned int)patience_s(seconds));
		if (one_process)
			in_threads(story, links);
		else
			in_process(story, i, links);
		exit(0);
	}
	close(links[0]);
	close(links[1]);
	for (int i = 0; i < count; i++)
		good &= ended_well(children[i]);
	return good;
}
