/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * av_scale [--ipv6] [COUNT...]
 *
 * What address vectors of many entries cost (default: 10000 and 1000000): memory by entry, and the time of an
 * insertion, of a look-up, of a message whose sender is looked up, and of a removal. One line for each count. Every
 * address is read back, so this is a test too; it ends in "N passed, N failed".
 *
 * bytes    what the process has more, resident, by entry; an endpoint that sends adds 4 for its table of peers
 * insert   fi_av_insert of all at once, and of 64 at a time
 * lookup   fi_av_lookup of entries in random order
 * source   a message to the endpoint itself, read by fi_cq_readfrom
 * remove   fi_av_remove in order of insertion
 */
#include "common.h"

#include <arpa/inet.h>
#include <malloc.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOOKUPS 1000000
#define MESSAGES 200000
#define BATCH 64

static bool ipv6;

/* Resident bytes of this process. */
static double resident(void)
{
	unsigned long total, pages;
	FILE *file = fopen("/proc/self/statm", "r");

	CHECK(file);
	CHECK(fscanf(file, "%lu %lu", &total, &pages) == 2);
	fclose(file);
	return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

/* The i-th peer: 64 to a node, all of them different. */
static size_t peer(void *at, size_t i)
{
	uint32_t node = (uint32_t)(i / 64);
	uint16_t port = htons((uint16_t)(1024 + i % 64));

	if (ipv6) {
		struct sockaddr_in6 address = { .sin6_family = AF_INET6, .sin6_port = port };

		node = htonl(node);
		address.sin6_addr.s6_addr[0] = 0x20;
		address.sin6_addr.s6_addr[1] = 0x01;
		memcpy(&address.sin6_addr.s6_addr[12], &node, sizeof(node));
		if (at)
			memcpy((char *)at + i * sizeof(address), &address, sizeof(address));
		return sizeof(address);
	}
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(0x0a000000 + node) };

	if (at)
		memcpy((char *)at + i * sizeof(address), &address, sizeof(address));
	return sizeof(address);
}

struct all {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	fi_addr_t self;
};

static struct fid_av *open_av(struct all *all)
{
	struct fi_av_attr attr = { .type = FI_AV_TABLE };
	struct fid_av *av;

	OK(fi_av_open(all->domain, &attr, &av, NULL));
	return av;
}

static void open_all(struct all *all)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };

	hints->caps = FI_MSG | FI_TAGGED | FI_SOURCE;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->addr_format = ipv6 ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
	hints->fabric_attr->prov_name = strdup("udrv");
	OK(fi_getinfo(FI_VERSION(1, 17), ipv6 ? "::1" : "127.0.0.1", NULL, FI_SOURCE, hints, &all->info));
	fi_freeinfo(hints);
	OK(fi_fabric(all->info->fabric_attr, &all->fabric, NULL));
	OK(fi_domain(all->fabric, all->info, &all->domain, NULL));
	OK(fi_cq_open(all->domain, &cq, &all->cq, NULL));
	all->av = open_av(all);
	OK(fi_endpoint(all->domain, all->info, &all->ep, NULL));
	OK(fi_ep_bind(all->ep, &all->av->fid, 0));
	OK(fi_ep_bind(all->ep, &all->cq->fid, FI_TRANSMIT | FI_RECV));
	OK(fi_enable(all->ep));
}

static void close_all(struct all *all)
{
	OK(fi_close(&all->ep->fid));
	OK(fi_close(&all->cq->fid));
	OK(fi_close(&all->av->fid));
	OK(fi_close(&all->domain->fid));
	OK(fi_close(&all->fabric->fid));
	fi_freeinfo(all->info);
}

/* Seconds of a message to oneself, from send to a completion that names the sender. */
static double message(struct all *all)
{
	struct fi_cq_tagged_entry entry;
	double start = now();
	char buffer[8];

	for (int i = 0; i < MESSAGES; i++) {
		fi_addr_t source = FI_ADDR_NOTAVAIL;
		int received = 0;

		OK(fi_trecv(all->ep, buffer, sizeof(buffer), NULL, FI_ADDR_UNSPEC, 1, 0, NULL));
		OK(fi_tinject(all->ep, "message", sizeof(buffer), all->self, 1));
		while (!received)
			received = fi_cq_readfrom(all->cq, &entry, 1, &source) == 1;
		SAME(source, all->self);
	}
	return (now() - start) / MESSAGES;
}

static void measure(size_t count)
{
	size_t size = peer(NULL, 0), len;
	char *addresses = calloc(count, size), name[NAME_MAX_LEN];
	fi_addr_t *indices = calloc(count, sizeof(*indices));
	double start, before, bytes, insert, insert_64, lookup, few, source, removal;
	uint64_t state = 1;
	struct all all;

	CHECK(addresses && indices);
	for (size_t i = 0; i < count; i++) {
		peer(addresses, i);
		indices[i] = FI_ADDR_NOTAVAIL;
	}
	open_all(&all);

	/* In pieces, into a vector that goes away again. */
	struct fid_av *pieces = open_av(&all);

	start = now();
	for (size_t i = 0; i < count; i += BATCH) {
		size_t n = count - i < BATCH ? count - i : BATCH;

		SAME(fi_av_insert(pieces, addresses + i * size, n, indices + i, 0, NULL), n);
	}
	insert_64 = (now() - start) / (double)count;
	OK(fi_close(&pieces->fid));
	malloc_trim(0);

	/* Oneself first. */
	len = sizeof(name);
	OK(fi_getname(&all.ep->fid, name, &len));
	SAME(fi_av_insert(all.av, name, 1, &all.self, 0, NULL), 1);
	few = message(&all);

	before = resident();
	start = now();
	SAME(fi_av_insert(all.av, addresses, count, indices, 0, NULL), count);
	insert = (now() - start) / (double)count;
	bytes = (resident() - before) / (double)count;
	for (size_t i = 0; i < count; i++)
		SAME(indices[i], i + 1);

	start = now();
	for (int i = 0; i < LOOKUPS; i++) {
		size_t which = next_random(&state) % count;

		len = sizeof(name);
		OK(fi_av_lookup(all.av, indices[which], name, &len));
		SAME(len, size);
		CHECK(!memcmp(name, addresses + which * size, size));
	}
	lookup = (now() - start) / LOOKUPS;
	source = message(&all);

	start = now();
	for (size_t i = 0; i < count; i += BATCH)
		OK(fi_av_remove(all.av, indices + i, count - i < BATCH ? count - i : BATCH, 0));
	removal = (now() - start) / (double)count;
	printf("%8zu %s addresses: %5.1f bytes an entry; insert %4.0f ns (64 at a time %4.0f), lookup %4.0f ns, "
	       "message %4.0f ns (%4.0f in an empty vector), remove %4.0f ns\n",
	       count, ipv6 ? "IPv6" : "IPv4", bytes, insert * 1e9, insert_64 * 1e9, lookup * 1e9, source * 1e9, few * 1e9,
	       removal * 1e9);
	close_all(&all);
	free(addresses);
	free(indices);
}

int main(int argc, char **argv)
{
	int measured = 0;

	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--ipv6")) {
			ipv6 = true;
		} else {
			measure(strtoul(argv[i], NULL, 10));
			measured++;
		}
	}
	if (!measured) {
		measure(10000);
		measure(1000000);
		measured = 2;
	}
	printf("%d passed, 0 failed\n", measured);
	return 0;
}
