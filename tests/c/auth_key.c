/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * auth_key
 *
 * Endpoints of one process, over the network even so, that have job keys of their own: those with the same key reach
 * each other, others do not. Keys come from the domain, the endpoint, the environment, or nowhere. One line a group,
 * then "N passed, N failed".
 */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How long a message that must not come is waited for, seconds. */
#define SILENCE_S 1.0

/* An endpoint with everything it needs. */
struct end {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	struct fi_context send, receive;
	char name[NAME_MAX_LEN], buffer[8];
};

static struct fi_info *ask(uint32_t version, const char *domain_key, const char *ep_key)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_TAGGED;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("udrv");
	if (domain_key) {
		hints->domain_attr->auth_key = (uint8_t *)strdup(domain_key);
		hints->domain_attr->auth_key_size = strlen(domain_key);
	}
	if (ep_key) {
		hints->ep_attr->auth_key = (uint8_t *)strdup(ep_key);
		hints->ep_attr->auth_key_size = strlen(ep_key);
	}
	int rc = fi_getinfo(version, NULL, NULL, 0, hints, &info);

	fi_freeinfo(hints);
	if (rc)
		SAME(rc, -FI_ENODATA);
	return rc ? NULL : info;
}

static void same_key(const uint8_t *key, size_t len, const char *wanted)
{
	SAME(len, wanted ? strlen(wanted) : 0);
	CHECK(!len == !key);
	CHECK(!len || !memcmp(key, wanted, len));
}

/* The environment's key is read when the domain is opened. */
static void open_end(struct end *end, const char *environment, const char *domain_key, const char *ep_key)
{
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_CONTEXT };
	size_t len = sizeof(end->name);

	if (environment)
		setenv("FI_UDRV_JOB_KEY", environment, 1);
	else
		unsetenv("FI_UDRV_JOB_KEY");
	end->info = ask(FI_VERSION(1, 17), domain_key, ep_key);
	CHECK(end->info);
	same_key(end->info->domain_attr->auth_key, end->info->domain_attr->auth_key_size, domain_key);
	same_key(end->info->ep_attr->auth_key, end->info->ep_attr->auth_key_size, ep_key);
	OK(fi_fabric(end->info->fabric_attr, &end->fabric, NULL));
	OK(fi_domain(end->fabric, end->info, &end->domain, NULL));
	OK(fi_av_open(end->domain, &av, &end->av, NULL));
	OK(fi_cq_open(end->domain, &cq, &end->cq, NULL));
	OK(fi_endpoint(end->domain, end->info, &end->ep, NULL));
	OK(fi_ep_bind(end->ep, &end->av->fid, 0));
	OK(fi_ep_bind(end->ep, &end->cq->fid, FI_TRANSMIT | FI_RECV));
	OK(fi_enable(end->ep));
	OK(fi_getname(&end->ep->fid, end->name, &len));
}

static void close_end(struct end *end)
{
	OK(fi_close(&end->ep->fid));
	OK(fi_close(&end->cq->fid));
	OK(fi_close(&end->av->fid));
	OK(fi_close(&end->domain->fid));
	OK(fi_close(&end->fabric->fid));
	fi_freeinfo(end->info);
}

/* Whether a message from `from` gets to `to`. */
static bool reaches(struct end *from, struct end *to)
{
	struct fi_cq_entry entry;
	double end = now() + SILENCE_S;
	bool received = false;
	fi_addr_t peer;
	ssize_t rc;

	SAME(fi_av_insert(from->av, to->name, 1, &peer, 0, NULL), 1);
	OK(fi_trecv(to->ep, to->buffer, sizeof(to->buffer), NULL, FI_ADDR_UNSPEC, 7, 0, &to->receive));
	do {
		rc = fi_tsend(from->ep, "message", 8, NULL, peer, 7, &from->send);
		(void)fi_cq_read(from->cq, &entry, 1);
		(void)fi_cq_read(to->cq, &entry, 1);
	} while (rc == -FI_EAGAIN && now() < end);
	if (rc != -FI_EAGAIN)
		OK(rc);
	while (!received && now() < end) {
		(void)fi_cq_read(from->cq, &entry, 1);
		received = fi_cq_read(to->cq, &entry, 1) == 1;
	}
	CHECK(!received || !strcmp(to->buffer, "message"));
	return received;
}

/* Where the key of one end comes from. */
struct source {
	const char *environment, *domain, *ep;
};

static const struct {
	const char *name;
	struct source a, b;
	bool meet;
} pairs[] = {
	{ "nothing on both sides", { 0 }, { 0 }, true },
	{ "one key in the environment", { .environment = "a common secret" }, { .environment = "a common secret" }, true },
	{ "two in the environment", { .environment = "a common secret" }, { .environment = "another secret" }, false },
	{ "one side alone", { .environment = "a common secret" }, { 0 }, false },
	{ "the domains' key", { .domain = "k" }, { .domain = "k" }, true },
	{ "the domain's is its endpoints'", { .domain = "k" }, { .ep = "k" }, true },
	{ "the endpoint's comes first", { .domain = "x", .ep = "k" }, { .domain = "k" }, true },
	{ "the application's comes first", { .environment = "a common secret", .ep = "k" }, { .ep = "k" }, true },
	{ "two endpoints' keys", { .ep = "k" }, { .ep = "K" }, false },
};

static void refusals(void)
{
	char longest[258];
	struct fi_info *info;
	struct end end;

	memset(longest, 'k', 257);
	longest[257] = 0;
	CHECK(!ask(FI_VERSION(1, 17), NULL, longest));
	CHECK(!ask(FI_VERSION(1, 17), longest, NULL));
	/* Before 1.5 nobody says what is there. */
	info = ask(FI_VERSION(1, 4), longest, longest);
	CHECK(info);
	fi_freeinfo(info);
	longest[256] = 0;
	info = ask(FI_VERSION(1, 5), longest, longest);
	CHECK(info);
	SAME(info->ep_attr->auth_key_size, 256);

	/* A copy has keys of its own. */
	struct fi_info *copy = fi_dupinfo(info);

	fi_freeinfo(info);
	same_key(copy->ep_attr->auth_key, copy->ep_attr->auth_key_size, longest);
	fi_freeinfo(copy);

	setenv("FI_UDRV_JOB_KEY", "secret!", 1);
	CHECK(!ask(FI_VERSION(1, 17), NULL, NULL));
	open_end(&end, NULL, "domain", NULL);
	end.info->ep_attr->auth_key_size = 300;
	end.info->ep_attr->auth_key = (uint8_t *)realloc(end.info->ep_attr->auth_key, 300);

	struct fid_ep *ep;

	SAME(fi_endpoint(end.domain, end.info, &ep, NULL), -FI_EINVAL);
	close_end(&end);
}

int main(void)
{
	int passed = 0;

	setenv("FI_UDRV_SHM", "0", 1);
	refusals();
	printf("ok   refusals\n");
	passed++;
	for (size_t i = 0; i < sizeof(pairs) / sizeof(*pairs); i++) {
		struct end a = { 0 }, b = { 0 };

		open_end(&a, pairs[i].a.environment, pairs[i].a.domain, pairs[i].a.ep);
		open_end(&b, pairs[i].b.environment, pairs[i].b.domain, pairs[i].b.ep);
		if (reaches(&a, &b) != pairs[i].meet)
			FAIL("%s: they %s", pairs[i].name, pairs[i].meet ? "do not meet" : "meet");
		close_end(&a);
		close_end(&b);
		printf("ok   %s\n", pairs[i].name);
		passed++;
	}
	printf("%d passed, 0 failed\n", passed);
	return 0;
}
