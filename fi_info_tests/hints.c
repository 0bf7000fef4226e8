/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * hints LIBFABRIC
 *
 * What fi_getinfo of the provider makes of hints (fi_getinfo(3)): for each that is refused the one line in the log
 * that names attribute, wanted and offered value; for each that is accepted what has to hold for the result, and
 * that the result is accepted as hints, comes back the same, and can be copied. One line per case, then the counts.
 *
 * Run with FI_LOG_LEVEL=info FI_LOG_PROV=udrv and with libfabric's layering providers filtered out (FI_PROVIDER=^...),
 * because each of them asks the provider once more.
 */
#include "host.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Newer than the headers of libfabric 1.17. */
#define TAGGED_DIRECTED_RECV (1ULL << 45)
#define TAGGED_MULTI_RECV (1ULL << 46)
/* Was FI_VARIABLE_MSG. */
#define EXACT_DIRECTED_RECV (1ULL << 48)
/* Not in every header. */
#define XPU (1ULL << 44)
#define PROGRESS_CONTROL_UNIFIED 3
#define AV_AUTH_KEY SIZE_MAX
#define MAX_EP_AUTH_KEY(domain_attr) (*(size_t *)((char *)(domain_attr) + 192))

#define RDM_CAPS (FI_MSG | FI_TAGGED | FI_SEND | FI_RECV)
#define RMA_BACK (FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)
#define MSG_BACK (RDM_CAPS | FI_MULTI_RECV | FI_FENCE | FI_LOCAL_COMM | FI_REMOTE_COMM)

struct test {
	const char *name;
	const char *node, *service;
	uint64_t flags;
	/* The API version to ask for, 0 for the one of libfabric. Not run on an older libfabric. */
	uint32_t version;
	void (*change)(struct fi_info *h);
	/* Refused: how the log line goes on after "no match: ". */
	const char *line;
	/* Accepted: true of the result. */
	int (*holds)(const struct fi_info *h, const struct fi_info *i);
};

static struct core core;

static struct sockaddr_in address(const char *ip, int port)
{
	struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons(port) };

	inet_pton(AF_INET, ip, &in.sin_addr);
	return in;
}

static void set_address(void **at, size_t *length, const char *ip, int port)
{
	struct sockaddr_in in = address(ip, port);

	*length = sizeof(in);
	*at = malloc(sizeof(in));
	memcpy(*at, &in, sizeof(in));
}

static int is_address(const void *at, size_t length, const char *ip, int port)
{
	struct sockaddr_in in = address(ip, port);

	return at && length == sizeof(in) && !memcmp(at, &in, sizeof(in));
}

static int port_of(const void *at)
{
	return at ? ntohs(((const struct sockaddr_in *)at)->sin_port) : -1;
}

/* The device belongs to the domain and has all parts that MPI libraries look at unasked. A machine whose interfaces are
 * virtual may have none. */
static int shows_device(const struct fi_info *i)
{
	const struct fid_nic *nic = i->nic;

	return !nic || (nic->fid.fclass == FI_CLASS_NIC && nic->device_attr && nic->bus_attr && nic->link_attr &&
			!strcmp(nic->device_attr->name, i->domain_attr->name) && nic->link_attr->mtu &&
			nic->bus_attr->bus_type == FI_BUS_UNKNOWN && nic->link_attr->state != FI_LINK_DOWN);
}

/* The cases are in hints.def; each change and each condition becomes a function. */
#define REFUSED(name, change, line) \
	static void change_##name(struct fi_info *h) { change; }
#define REFUSED_SINCE(name, version, change, line) REFUSED(name, change, line)
#define REFUSED_CALL(name, node, service, flags, line)
#define ACCEPTED(name, version, change, condition) \
	static void change_##name(struct fi_info *h) { change; } \
	static int holds_##name(const struct fi_info *h, const struct fi_info *i) { (void)h; return condition; }
#define ACCEPTED_CALL(name, node, service, flags, change, condition) ACCEPTED(name, 0, change, condition)
#define NOTHING (void)h
#include "hints.def"
#undef REFUSED
#undef REFUSED_SINCE
#undef REFUSED_CALL
#undef ACCEPTED
#undef ACCEPTED_CALL

#define REFUSED(n, c, l) { .name = #n, .change = change_##n, .line = l },
#define REFUSED_SINCE(n, v, c, l) { .name = #n, .version = v, .change = change_##n, .line = l },
#define REFUSED_CALL(n, o, s, f, l) { .name = #n, .node = o, .service = s, .flags = f, .line = l },
#define ACCEPTED(n, v, c, w) { .name = #n, .version = v, .change = change_##n, .holds = holds_##n },
#define ACCEPTED_CALL(n, o, s, f, c, w) \
	{ .name = #n, .node = o, .service = s, .flags = f, .change = change_##n, .holds = holds_##n },
static const struct test tests[] = {
#include "hints.def"
};

/* The log goes to standard error, which is this file. */
static int log_file;

static void log_begin(void)
{
	if (ftruncate(log_file, 0) || lseek(log_file, 0, SEEK_SET))
		die("cannot empty the log");
}

static const char *log_text(void)
{
	static char text[16384];
	ssize_t length = pread(log_file, text, sizeof(text) - 1, 0);

	text[length < 0 ? 0 : length] = 0;
	return text;
}

/* How many refusals the log holds, and, into `odd`, one that does not begin as wanted. Intel's libfabric asks a provider
 * twice, so that there may be more than one. */
static int refusals(const char *wanted, char *odd, size_t room)
{
	static const char mark[] = "no match: ";
	const char *at = log_text();
	int count = 0;

	*odd = 0;
	while ((at = strstr(at, mark))) {
		at += strlen(mark);
		if (!wanted || strncmp(at, wanted, strlen(wanted)))
			snprintf(odd, room, "%.*s", (int)strcspn(at, "\n"), at);
		count++;
	}
	return count;
}

static char *text_of(const struct fi_info *info)
{
	return strdup(core.tostr(info, FI_TYPE_INFO));
}

/* NULL when all is well. */
static const char *run(const struct test *test)
{
	static char why[16384], line[8192];
	uint32_t version = test->version ? test->version : core.version();
	struct fi_info *hints = core.dupinfo(NULL), *info = NULL, *again = NULL, *copy = NULL;
	const char *verdict = NULL;
	char *first, *second;
	int rc, count;

	hints->fabric_attr->prov_name = strdup("udrv");
	if (test->change)
		test->change(hints);
	log_begin();
	rc = core.getinfo(version, test->node, test->service, test->flags, hints, &info);
	count = refusals(test->line, line, sizeof(line));
	if (test->line) {
		if (rc != -FI_ENODATA || info)
			snprintf(why, sizeof(why), "returned %d", rc), verdict = why;
		else if (!count || *line)
			snprintf(why, sizeof(why), "the log says: %s; wanted: %s", line, test->line), verdict = why;
	} else if (rc || !info || info->next) {
		snprintf(why, sizeof(why), "returned %d: %s", rc, line), verdict = why;
	} else if (count || !test->holds(hints, info)) {
		snprintf(why, sizeof(why), "the result is not what it should be\n%s", core.tostr(info, FI_TYPE_INFO));
		verdict = why;
	} else if ((rc = core.getinfo(version, NULL, NULL, 0, info, &again))) {
		refusals(NULL, line, sizeof(line));
		snprintf(why, sizeof(why), "as hints the result returned %d: %s", rc, line), verdict = why;
	} else {
		first = text_of(info);
		second = text_of(again);
		if (strcmp(first, second))
			snprintf(why, sizeof(why), "as hints\n%s\nbecame\n%s", first, second), verdict = why;
		free(second);
		copy = core.dupinfo(info);
		second = copy ? text_of(copy) : strdup("nothing");
		if (strcmp(first, second))
			snprintf(why, sizeof(why), "fi_dupinfo of\n%s\nmade\n%s", first, second), verdict = why;
		free(first);
		free(second);
	}
	core.freeinfo(hints);
	core.freeinfo(info);
	core.freeinfo(again);
	core.freeinfo(copy);
	return verdict;
}

int main(int argc, char **argv)
{
	int failed = 0, passed = 0;
	const char *why;
	size_t i;

	if (argc != 2)
		die("usage: hints LIBFABRIC");
	log_file = memfd_create("log", 0);
	if (log_file < 0 || dup2(log_file, 2) < 0)
		die("no log");
	core_open(&core, argv[1]);
	for (i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
		if (tests[i].version > core.version())
			continue;
		why = run(&tests[i]);
		if (why) {
			failed++;
			printf("FAIL %s: %s\n", tests[i].name, why);
		} else {
			passed++;
			printf("ok   %s\n", tests[i].name);
		}
	}
	core_close(&core);
	printf("%d passed, %d failed\n", passed, failed);
	return failed != 0;
}
