/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * auth_key
 *
 * Endpoints of one process that have job keys of their own, through shared memory and over the network even so: those
 * with the same key reach each other, others do not. Keys come from
 * the domain, the endpoint, the address vector, the environment, or nowhere. One line a group, then "N passed, N
 * failed".
 */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How long a message that must not come is waited for, seconds. */
/* Ends that are kept apart hear nothing for so long; those that meet have as long as it takes. */
#define SILENCE_S 1.0
/* Newer than the headers of libfabric 1.17, as all of this section: keys of address vectors. */
#define KEYS_IN_VECTORS FI_VERSION(1, 20)
#define AV_AUTH_KEY SIZE_MAX
#define AUTH_KEY (1ULL << 57)
#define MAX_EP_AUTH_KEY(domain_attr) (*(size_t *)((char *)(domain_attr) + 192))

struct ops_av {
	struct fi_ops_av base;
	int (*insert_auth_key)(struct fid_av *av, const void *key, size_t size, fi_addr_t *addr, uint64_t flags);
	int (*lookup_auth_key)(struct fid_av *av, fi_addr_t addr, void *key, size_t *size);
};

struct mr_auth_key {
	struct fid_av *av;
	fi_addr_t src_addr;
};

static int insert_key(struct fid_av *av, const void *key, size_t size, fi_addr_t *addr, uint64_t flags)
{
	return ((struct ops_av *)av->ops)->insert_auth_key(av, key, size, addr, flags);
}

static int lookup_key(struct fid_av *av, fi_addr_t addr, void *key, size_t *size)
{
	return ((struct ops_av *)av->ops)->lookup_auth_key(av, addr, key, size);
}

/* Where the key of one end comes from. */
struct source {
	const char *environment, *domain, *ep, *vector;
};

/* An endpoint with everything it needs. */
struct end {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	/* Whose domain it is in, if not in its own. */
	const struct end *shares;
	fi_addr_t key;
	struct fi_context send, receive;
	char name[NAME_MAX_LEN], buffer[8];
};

/* As the domain's key: those of its vectors. */
static const char *const in_vectors = "in vectors";

static struct fi_info *ask(uint32_t version, const char *domain_key, const char *ep_key)
{
	struct fi_info *hints = fi_allocinfo(), *info;

	hints->caps = FI_TAGGED | FI_RMA | FI_DIRECTED_RECV;
	if (version >= FI_VERSION(1, 5))
		hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->ep_attr->type = FI_EP_RDM;
	hints->fabric_attr->prov_name = strdup("udrv");
	if (domain_key == in_vectors) {
		hints->domain_attr->auth_key_size = AV_AUTH_KEY;
	} else if (domain_key) {
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

/* The environment's key is read when the domain is opened. In the domain of `beside`, unless that is null. */
static void open_end(struct end *end, const struct source *source, const struct end *beside)
{
	uint32_t version = source->vector ? KEYS_IN_VECTORS : FI_VERSION(1, 17);
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_CONTEXT };
	size_t len = sizeof(end->name);

	if (source->environment)
		setenv("FI_UDRV_JOB_KEY", source->environment, 1);
	else
		unsetenv("FI_UDRV_JOB_KEY");
	end->info = ask(version, source->vector ? in_vectors : source->domain, source->ep);
	CHECK(end->info);
	if (source->vector) {
		SAME(end->info->domain_attr->auth_key_size, AV_AUTH_KEY);
		CHECK(!end->info->domain_attr->auth_key);
		SAME(MAX_EP_AUTH_KEY(end->info->domain_attr), 1);
	} else {
		same_key(end->info->domain_attr->auth_key, end->info->domain_attr->auth_key_size, source->domain);
	}
	same_key(end->info->ep_attr->auth_key, end->info->ep_attr->auth_key_size, source->ep);
	if (beside) {
		end->fabric = beside->fabric;
		end->domain = beside->domain;
	} else {
		OK(fi_fabric(end->info->fabric_attr, &end->fabric, NULL));
		OK(fi_domain(end->fabric, end->info, &end->domain, NULL));
	}
	end->shares = beside;
	OK(fi_av_open(end->domain, &av, &end->av, NULL));
	OK(fi_cq_open(end->domain, &cq, &end->cq, NULL));
	OK(fi_endpoint(end->domain, end->info, &end->ep, NULL));
	OK(fi_ep_bind(end->ep, &end->av->fid, 0));
	OK(fi_ep_bind(end->ep, &end->cq->fid, FI_TRANSMIT | FI_RECV));
	if (source->vector) {
		SAME(fi_enable(end->ep), -FI_ENOKEY);
		OK(insert_key(end->av, source->vector, strlen(source->vector), &end->key, 0));
	}
	OK(fi_enable(end->ep));
	OK(fi_getname(&end->ep->fid, end->name, &len));
}

static void close_end(struct end *end)
{
	OK(fi_close(&end->ep->fid));
	OK(fi_close(&end->cq->fid));
	OK(fi_close(&end->av->fid));
	if (!end->shares) {
		OK(fi_close(&end->domain->fid));
		OK(fi_close(&end->fabric->fid));
	}
	fi_freeinfo(end->info);
}

static bool keyed(const struct end *end)
{
	return end->info->domain_attr->auth_key_size == AV_AUTH_KEY;
}

/* What `from` calls `to`. */
static fi_addr_t insert_peer(struct end *from, struct end *to)
{
	fi_addr_t peer = from->key;

	SAME(fi_av_insert(from->av, to->name, 1, &peer, keyed(from) ? AUTH_KEY : 0, NULL), 1);
	return peer;
}

/* Whether a message from `from` gets to `to`. */
static bool reaches(struct end *from, struct end *to, bool meet)
{
	struct fi_cq_entry entry;
	double end = now() + (meet ? PATIENCE_S : SILENCE_S);
	bool received = false;
	fi_addr_t peer = insert_peer(from, to);
	struct iovec into = { to->buffer, sizeof(to->buffer) };
	struct fi_msg_tagged receive = { .msg_iov = &into, .iov_count = 1, .tag = 7, .context = &to->receive };
	ssize_t rc;

	/* "If set to FI_ADDR_UNSPEC, any source address may match." Another tag: it stays. */
	receive.addr = FI_ADDR_UNSPEC;
	receive.tag = 8;
	OK(fi_trecvmsg(to->ep, &receive, keyed(to) ? AUTH_KEY : 0));
	receive.tag = 7;
	receive.addr = keyed(to) ? to->key : FI_ADDR_UNSPEC;
	OK(fi_trecvmsg(to->ep, &receive, keyed(to) ? AUTH_KEY : 0));
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

static const struct {
	const char *name;
	struct source a, b;
	bool meet;
} pairs[] = {
	{ "nothing on both sides", { 0 }, { 0 }, true },
	{ "one key in the environment", { .environment = "a common secret of ours" }, { .environment = "a common secret of ours" }, true },
	{ "two in the environment", { .environment = "a common secret of ours" }, { .environment = "another secret than that" }, false },
	{ "one side's environment alone", { .environment = "a common secret of ours" }, { 0 }, false },
	{ "one side alone", { .ep = "k" }, { 0 }, false },
	{ "the domains' key", { .domain = "k" }, { .domain = "k" }, true },
	{ "the domain's is its endpoints'", { .domain = "k" }, { .ep = "k" }, true },
	{ "the endpoint's comes first", { .domain = "x", .ep = "k" }, { .domain = "k" }, true },
	{ "the application's comes first", { .environment = "a common secret of ours", .ep = "k" }, { .ep = "k" }, true },
	{ "two endpoints' keys", { .ep = "k" }, { .ep = "K" }, false },
	{ "the vectors' key", { .vector = "k" }, { .vector = "k" }, true },
	{ "two vectors' keys", { .vector = "k" }, { .vector = "K" }, false },
	{ "the vector's and the endpoint's", { .vector = "k" }, { .ep = "k" }, true },
	{ "the vector's comes first", { .environment = "a common secret of ours", .vector = "k" }, { .domain = "k" }, true },
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

	setenv("FI_UDRV_JOB_KEY", "fifteen letters", 1);
	CHECK(!ask(FI_VERSION(1, 17), NULL, NULL));
	open_end(&end, &(struct source){ .domain = "domain" }, NULL);
	end.info->ep_attr->auth_key_size = 300;
	end.info->ep_attr->auth_key = (uint8_t *)realloc(end.info->ep_attr->auth_key, 300);

	struct fid_ep *ep;

	SAME(fi_endpoint(end.domain, end.info, &ep, NULL), -FI_EINVAL);
	close_end(&end);
}

static void keys_of_a_vector(void)
{
	struct end a = { 0 }, b = { 0 };
	char longest[257] = { 1 }, found[4];
	fi_addr_t key, peer;
	struct fid_mr *mr;
	size_t size = 2;

	open_end(&a, &(struct source){ .vector = "key" }, NULL);
	open_end(&b, &(struct source){ .vector = "key" }, NULL);

	/* Keys. */
	SAME(insert_key(a.av, "key", 3, &key, 1), -FI_EINVAL);
	SAME(insert_key(a.av, "key", 3, NULL, 0), -FI_EINVAL);
	SAME(insert_key(a.av, NULL, 3, &key, 0), -FI_EINVAL);
	SAME(insert_key(a.av, "key", 0, &key, 0), -FI_EINVAL);
	SAME(insert_key(a.av, longest, 257, &key, 0), -FI_EINVAL);
	SAME(insert_key(a.av, longest, 256, &key, 0), -FI_ENOSPC);
	OK(insert_key(a.av, "key", 3, &key, 0));
	SAME(key, a.key);
	OK(lookup_key(a.av, key, found, &size));
	SAME(size, 3);
	CHECK(!memcmp(found, "ke", 2));
	SAME(lookup_key(a.av, 0, found, &size), -FI_EINVAL);
	SAME(lookup_key(a.av, key, found, NULL), -FI_EINVAL);

	/* Addresses. */
	SAME(fi_av_insert(a.av, b.name, 1, &peer, 0, NULL), -FI_EINVAL);
	SAME(fi_av_insert(a.av, b.name, 1, NULL, AUTH_KEY, NULL), -FI_EINVAL);
	peer = key + 1;
	SAME(fi_av_insert(a.av, b.name, 1, &peer, AUTH_KEY, NULL), 0);
	SAME(peer, FI_ADDR_NOTAVAIL);
	peer = insert_peer(&a, &b);
	SAME(peer, 0);
	size = sizeof(found);
	OK(lookup_key(a.av, peer, found, &size));
	SAME(size, 3);
	CHECK(!memcmp(found, "key", 3));
	SAME(fi_tsend(a.ep, "m", 1, NULL, key, 7, &a.send), -FI_EINVAL);
	SAME(fi_trecv(a.ep, a.buffer, 1, NULL, key, 7, 0, &a.receive), -FI_EINVAL);

	/* Regions. */
	struct iovec part = { a.buffer, sizeof(a.buffer) };
	struct mr_auth_key whose = { b.av, b.key };
	struct fi_mr_attr attr = { .mr_iov = &part, .iov_count = 1, .access = FI_REMOTE_WRITE };

	SAME(fi_mr_reg(a.domain, a.buffer, 8, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL), -FI_EOPNOTSUPP);
	SAME(fi_mr_regv(a.domain, &part, 1, FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL), -FI_EOPNOTSUPP);
	SAME(fi_mr_regattr(a.domain, &attr, 0, &mr), -FI_EINVAL);
	attr.auth_key = (uint8_t *)&whose;
	attr.auth_key_size = sizeof(whose) - 1;
	SAME(fi_mr_regattr(a.domain, &attr, 0, &mr), -FI_EINVAL);
	attr.auth_key_size = sizeof(whose);
	SAME(fi_mr_regattr(a.domain, &attr, 0, &mr), -FI_EINVAL); /* of another domain */
	whose.av = a.av;
	whose.src_addr = peer;
	SAME(fi_mr_regattr(a.domain, &attr, AUTH_KEY, &mr), -FI_EINVAL);
	whose.src_addr = key;
	OK(fi_mr_regattr(a.domain, &attr, AUTH_KEY, &mr));
	OK(fi_close(&mr->fid));

	/* An endpoint brings no key of its own. */
	struct fid_ep *ep;

	a.info->ep_attr->auth_key = (uint8_t *)strdup("k");
	a.info->ep_attr->auth_key_size = 1;
	SAME(fi_endpoint(a.domain, a.info, &ep, NULL), -FI_EINVAL);

	/* Keys go last, and as often as they came. */
	SAME(fi_av_remove(a.av, &key, 1, 0), -FI_EINVAL);
	SAME(fi_av_remove(a.av, &peer, 1, AUTH_KEY), -FI_EINVAL);
	OK(fi_av_remove(a.av, &key, 1, AUTH_KEY));
	SAME(fi_av_remove(a.av, &key, 1, AUTH_KEY), -FI_EBUSY);
	OK(fi_av_remove(a.av, &peer, 1, 0));
	SAME(fi_av_remove(a.av, &key, 1, AUTH_KEY), -FI_EBUSY);
	OK(fi_close(&a.ep->fid));
	OK(fi_av_remove(a.av, &key, 1, AUTH_KEY));
	SAME(lookup_key(a.av, key, found, &size), -FI_EINVAL);
	OK(insert_key(a.av, longest, 256, &key, 0));
	a.info->ep_attr->auth_key_size = 0;
	OK(fi_endpoint(a.domain, a.info, &a.ep, NULL));
	close_end(&a);
	close_end(&b);

	/* A domain without them. */
	open_end(&a, &(struct source){ .domain = "key" }, NULL);
	SAME(insert_key(a.av, "key", 3, &key, 0), -FI_EINVAL);
	SAME(lookup_key(a.av, 0, found, &size), -FI_EINVAL);
	key = 0;
	SAME(fi_av_insert(a.av, a.name, 1, &key, AUTH_KEY, NULL), -FI_EINVAL);
	close_end(&a);
}

/* What becomes of a write of `from` into a region at `to`: 0 or the error. */
static int write_to(struct end *from, struct end *to, struct fid_mr *mr)
{
	struct fi_cq_err_entry error = { 0 };
	struct fi_cq_entry entry;
	double end = now() + PATIENCE_S;
	fi_addr_t peer = insert_peer(from, to);
	ssize_t rc;

	do {
		rc = fi_write(from->ep, "written", 8, NULL, peer, 0, fi_mr_key(mr), &from->send);
		(void)fi_cq_read(to->cq, &entry, 1);
	} while (rc == -FI_EAGAIN && now() < end);
	OK(rc);
	do {
		(void)fi_cq_read(to->cq, &entry, 1);
		rc = fi_cq_read(from->cq, &entry, 1);
	} while (rc == -FI_EAGAIN && now() < end);
	if (rc == 1)
		return 0;
	SAME(rc, -FI_EAVAIL);
	SAME(fi_cq_readerr(from->cq, &error, 0), 1);
	return error.err;
}

/* A region is for those of its key alone, also among endpoints of one domain. */
static void regions(bool in_vector)
{
	struct source k = { 0 }, other = { 0 };
	struct end one = { 0 }, two = { 0 }, like_one = { 0 }, like_two = { 0 };
	char memory[8] = { 0 };
	struct iovec part = { memory, sizeof(memory) };
	struct fi_mr_attr attr = { .mr_iov = &part, .iov_count = 1, .access = FI_REMOTE_WRITE };
	struct mr_auth_key whose;
	struct fid_mr *mr;

	if (in_vector) {
		k.vector = "k";
		other.vector = "other";
	} else {
		k.ep = "k";
		other.ep = "other";
	}
	open_end(&one, &k, NULL);
	open_end(&two, &other, &one);
	open_end(&like_one, &k, NULL);
	open_end(&like_two, &other, NULL);
	whose = (struct mr_auth_key){ one.av, one.key };
	attr.auth_key = in_vector ? (uint8_t *)&whose : (uint8_t *)"k";
	attr.auth_key_size = in_vector ? sizeof(whose) : 1;
	OK(fi_mr_regattr(one.domain, &attr, 0, &mr));
	SAME(write_to(&like_two, &two, mr), FI_EKEYREJECTED);
	CHECK(!memory[0]);
	SAME(write_to(&like_one, &one, mr), 0);
	CHECK(!strcmp(memory, "written"));
	OK(fi_close(&mr->fid));
	if (!in_vector) {
		/* Without a key it is for all. */
		attr.auth_key_size = 0;
		OK(fi_mr_regattr(one.domain, &attr, 0, &mr));
		SAME(write_to(&like_two, &two, mr), 0);
		OK(fi_close(&mr->fid));
		attr.auth_key_size = 257;
		SAME(fi_mr_regattr(one.domain, &attr, 0, &mr), -FI_EINVAL);
	}
	close_end(&two);
	close_end(&one);
	close_end(&like_one);
	close_end(&like_two);
}

static int passed;

static void done(const char *what, const char *where)
{
	printf("ok   %s%s\n", what, where);
	passed++;
}

int main(void)
{
	static const char *const places[] = { "", ", over the network" };
	bool vectors = fi_version() >= KEYS_IN_VECTORS;

	refusals();
	done("refusals", "");
	if (vectors) {
		keys_of_a_vector();
		done("keys of a vector", "");
	}
	for (int net = 0; net < 2; net++) {
		setenv("FI_UDRV_SHM", net ? "0" : "1", 1);
		for (size_t i = 0; i < sizeof(pairs) / sizeof(*pairs); i++) {
			struct end a = { 0 }, b = { 0 };

			if (pairs[i].a.vector && !vectors)
				continue;
			open_end(&a, &pairs[i].a, NULL);
			open_end(&b, &pairs[i].b, NULL);
			if (reaches(&a, &b, pairs[i].meet) != pairs[i].meet)
				FAIL("%s%s: they %s", pairs[i].name, places[net], pairs[i].meet ? "do not meet" : "meet");
			close_end(&a);
			close_end(&b);
			done(pairs[i].name, places[net]);
		}
		regions(false);
		done("regions of endpoints' keys", places[net]);
		if (vectors) {
			regions(true);
			done("regions of vectors' keys", places[net]);
		}
	}
	printf("%d passed, 0 failed\n", passed);
	return 0;
}
