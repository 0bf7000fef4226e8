/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
#include "host.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_tagged.h>

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PROVIDER "udrv"
/* As long as a message that goes by rendezvous. */
#define LENGTH (256 * 1024)
/* Of a quiet machine; scripts/lib.sh measures how much slower this one is. */
#define PATIENCE_S (20 * (getenv("UDRV_TEST_SLOWNESS") ? atoi(getenv("UDRV_TEST_SLOWNESS")) : 1))

void die(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	putchar('\n');
	fflush(stdout);
	_Exit(1);
}

static void must(int rc, const char *what)
{
	if (rc)
		die("%s returned %d", what, rc);
}

static void *symbol(struct core *core, const char *name)
{
	void *found = dlsym(core->handle, name);

	if (!found)
		die("%s", dlerror());
	return found;
}

void core_open(struct core *core, const char *path)
{
	core->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!core->handle)
		die("%s", dlerror());
	core->path = path;
	core->version = symbol(core, "fi_version");
	core->getinfo = symbol(core, "fi_getinfo");
	core->freeinfo = symbol(core, "fi_freeinfo");
	core->dupinfo = symbol(core, "fi_dupinfo");
	core->fabric = symbol(core, "fi_fabric");
	core->tostr = symbol(core, "fi_tostr");
	core->getparams = symbol(core, "fi_getparams");
	core->freeparams = symbol(core, "fi_freeparams");
}

static int is_mapped(const char *path)
{
	char line[4096], *real = realpath(path, NULL);
	FILE *maps = fopen("/proc/self/maps", "r");
	int found = 0;

	if (!maps || !real)
		die("cannot look for %s", path);
	while (fgets(line, sizeof(line), maps)) {
		line[strcspn(line, "\n")] = 0;
		if (strstr(line, real))
			found = 1;
	}
	fclose(maps);
	free(real);
	return found;
}

void core_close(struct core *core)
{
	if (dlclose(core->handle))
		die("%s", dlerror());
	if (is_mapped(core->path))
		die("something keeps libfabric loaded");
	core->handle = NULL;
}

struct fi_info *core_list(struct core *core, uint32_t version)
{
	struct fi_info *hints = core->dupinfo(NULL), *info = NULL;

	if (!hints || !(hints->fabric_attr->prov_name = strdup(PROVIDER)))
		die("out of memory");
	must(core->getinfo(version, NULL, NULL, 0, hints, &info), "fi_getinfo");
	core->freeinfo(hints);
	if (strcasecmp(info->fabric_attr->prov_name, PROVIDER))
		die("fi_getinfo offers %s", info->fabric_attr->prov_name);
	return info;
}

void endpoint_open(struct core *core, struct endpoint *e)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };
	char name[64];
	size_t length = sizeof(name);

	e->info = core_list(core, core->version());
	must(core->fabric(e->info->fabric_attr, &e->fabric, NULL), "fi_fabric");
	must(fi_domain(e->fabric, e->info, &e->domain, NULL), "fi_domain");
	must(fi_av_open(e->domain, &av, &e->av, NULL), "fi_av_open");
	must(fi_cq_open(e->domain, &cq, &e->cq, NULL), "fi_cq_open");
	must(fi_endpoint(e->domain, e->info, &e->ep, NULL), "fi_endpoint");
	must(fi_ep_bind(e->ep, &e->av->fid, 0), "fi_ep_bind(av)");
	must(fi_ep_bind(e->ep, &e->cq->fid, FI_SEND | FI_RECV), "fi_ep_bind(cq)");
	must(fi_enable(e->ep), "fi_enable");
	must(fi_getname(&e->ep->fid, name, &length), "fi_getname");
	if (fi_av_insert(e->av, name, 1, &e->self, 0, NULL) != 1)
		die("fi_av_insert does not take the endpoint's own name");
}

void endpoint_exchange(struct endpoint *e, unsigned char seed)
{
	static unsigned char from[LENGTH], to[LENGTH];
	struct fi_cq_tagged_entry entry;
	time_t end = time(NULL) + PATIENCE_S;
	int left = 2;
	ssize_t rc;

	memset(from, seed, sizeof(from));
	memset(to, ~seed, sizeof(to));
	must(fi_trecv(e->ep, to, sizeof(to), NULL, FI_ADDR_UNSPEC, seed, 0, NULL), "fi_trecv");
	must(fi_tsend(e->ep, from, sizeof(from), NULL, e->self, seed, NULL), "fi_tsend");
	while (left) {
		rc = fi_cq_read(e->cq, &entry, 1);
		if (rc == 1)
			left--;
		else if (rc != -FI_EAGAIN)
			die("fi_cq_read returned %zd", rc);
		else if (time(NULL) > end)
			die("a message to itself does not arrive");
	}
	if (memcmp(from, to, sizeof(to)))
		die("a message to itself arrives damaged");
}

void endpoint_close(struct core *core, struct endpoint *e)
{
	must(fi_close(&e->ep->fid), "fi_close(ep)");
	must(fi_close(&e->cq->fid), "fi_close(cq)");
	must(fi_close(&e->av->fid), "fi_close(av)");
	must(fi_close(&e->domain->fid), "fi_close(domain)");
	must(fi_close(&e->fabric->fid), "fi_close(fabric)");
	core->freeinfo(e->info);
}
