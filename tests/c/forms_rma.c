/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* One-sided operations: rank 0 reads and writes memory of rank 1, in every form, allowed or not. */
#include "all_forms.h"

#include <rdma/fi_domain.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CAPS (FI_MSG | FI_TAGGED | FI_RMA | FI_RMA_EVENT | FI_SOURCE)
#define RIGHTS (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define REGION (4 << 20)
#define KEY 0xC0FFEE0000000042u
#define DATA 0x1122334455667788u

static const size_t sizes[] = { 0, 1, 8, 40, 64, 100, 4096, 16384, 16385, 100000, 3 << 20 };
#define SIZES (sizeof(sizes) / sizeof(*sizes))

/* What rank 0 knows of rank 1's region. */
struct target {
	uint64_t key, address;
};

/* Rank 1 registers `memory`, rank 0 hears of it. */
static struct fid_mr *offer(struct side *me, void *memory, size_t len, uint64_t rights, struct target *target)
{
	struct fid_mr *mr = NULL;

	if (me->rank == 0) {
		hear(me, target, sizeof(*target));
		return NULL;
	}
	OK(fi_mr_reg(me->domain, memory, len, rights, 0, KEY, 0, &mr, NULL));
	target->key = fi_mr_key(mr);
	target->address = me->info->domain_attr->mr_mode & FI_MR_BASIC ? (uintptr_t)memory : 0;
	if (!target->address)
		SAME(target->key, KEY);
	tell(me, target, sizeof(*target));
	return mr;
}

static void close_region(struct fid_mr *mr)
{
	if (mr)
		OK(fi_close(&mr->fid));
}

enum write_form { WRITE, WRITEV, WRITEMSG, WRITEMSG_DATA, WRITEDATA, INJECT, INJECTDATA, WRITEMSG_INJECT, WRITE_FORMS };
enum read_form { READ, READV, READMSG, READ_FORMS };

static bool carries_data(enum write_form form)
{
	return form == WRITEMSG_DATA || form == WRITEDATA || form == INJECTDATA;
}

static bool injects(enum write_form form)
{
	return form == INJECT || form == INJECTDATA || form == WRITEMSG_INJECT;
}

static void split(struct iovec parts[3], char *buffer, size_t len)
{
	parts[0] = (struct iovec){ buffer, len / 3 };
	parts[1] = (struct iovec){ buffer + len / 3, len / 5 };
	parts[2] = (struct iovec){ buffer + len / 3 + len / 5, len - len / 3 - len / 5 };
}

/* The same bytes in other parts, one of them empty. */
static void split_remote(struct fi_rma_iov parts[4], const struct target *to, size_t len)
{
	parts[0] = (struct fi_rma_iov){ to->address, len / 2, to->key };
	parts[1] = (struct fi_rma_iov){ to->address + len / 2, 0, to->key };
	parts[2] = (struct fi_rma_iov){ to->address + len / 2, len / 4, to->key };
	parts[3] = (struct fi_rma_iov){ to->address + len / 2 + len / 4, len - len / 2 - len / 4, to->key };
}

static void put(struct side *me, enum write_form form, char *buffer, size_t len, const struct target *to, void *context)
{
	struct iovec parts[3];
	struct fi_rma_iov remote[4];
	struct fi_msg_rma msg = { .msg_iov = parts, .iov_count = 3, .addr = me->peer, .rma_iov = remote,
				  .rma_iov_count = 4, .context = context, .data = DATA };

	split(parts, buffer, len);
	split_remote(remote, to, len);
	switch (form) {
	case WRITE:
		POST(me, fi_write(me->ep, buffer, len, NULL, me->peer, to->address, to->key, context));
		break;
	case WRITEV:
		POST(me, fi_writev(me->ep, parts, NULL, 3, me->peer, to->address, to->key, context));
		break;
	case WRITEMSG:
		POST(me, fi_writemsg(me->ep, &msg, FI_COMPLETION));
		break;
	case WRITEMSG_DATA:
		POST(me, fi_writemsg(me->ep, &msg, FI_COMPLETION | FI_REMOTE_CQ_DATA | FI_DELIVERY_COMPLETE));
		break;
	case WRITEDATA:
		POST(me, fi_writedata(me->ep, buffer, len, NULL, DATA, me->peer, to->address, to->key, context));
		break;
	case INJECT:
		POST(me, fi_inject_write(me->ep, buffer, len, me->peer, to->address, to->key));
		break;
	case INJECTDATA:
		POST(me, fi_inject_writedata(me->ep, buffer, len, DATA, me->peer, to->address, to->key));
		break;
	default:
		POST(me, fi_writemsg(me->ep, &msg, FI_COMPLETION | FI_INJECT));
	}
}

static void get(struct side *me, enum read_form form, char *buffer, size_t len, const struct target *from,
		void *context)
{
	struct iovec parts[3];
	struct fi_rma_iov remote[4];
	struct fi_msg_rma msg = { .msg_iov = parts, .iov_count = 3, .addr = me->peer, .rma_iov = remote,
				  .rma_iov_count = 4, .context = context };

	split(parts, buffer, len);
	split_remote(remote, from, len);
	switch (form) {
	case READ:
		POST(me, fi_read(me->ep, buffer, len, NULL, me->peer, from->address, from->key, context));
		break;
	case READV:
		POST(me, fi_readv(me->ep, parts, NULL, 3, me->peer, from->address, from->key, context));
		break;
	default:
		POST(me, fi_readmsg(me->ep, &msg, FI_COMPLETION | FI_MORE));
	}
}

static void forms(struct side *me, int mr_mode)
{
	char *memory = need(REGION), *back = need(REGION);
	struct fi_context context;
	struct target target;
	struct fid_mr *mr;

	side_begin(me, &(struct setup){ .caps = CAPS, .mr_mode = mr_mode });
	mr = offer(me, memory, REGION, RIGHTS, &target);
	for (size_t s = 0; s < SIZES; s++) {
		for (int form = 0; form < WRITE_FORMS; form++) {
			uint32_t seed = (uint32_t)(s * 100 + (size_t)form);
			size_t len = sizes[s];

			if (injects(form) && len > me->info->tx_attr->inject_size)
				continue;
			if (me->rank == 0) {
				struct fi_cq_tagged_entry entry;

				fill(memory, len, seed);
				put(me, form, memory, len, &target, &context);
				if (injects(form))
					memset(memory, 0, len);
				if (form != INJECT && form != INJECTDATA) {
					entry = completion(me->tx);
					CHECK(entry.op_context == &context);
					SAME(entry.flags, FI_RMA | FI_WRITE);
				}
				memset(back, 0, len);
				get(me, form % READ_FORMS, back, len, &target, &context);
				entry = completion(me->tx);
				CHECK(entry.op_context == &context);
				SAME(entry.flags, FI_RMA | FI_READ);
				CHECK(holds(back, len, seed, 0));
			} else if (carries_data(form)) {
				fi_addr_t source;
				struct fi_cq_tagged_entry entry = completion_from(me->rx, &source);

				SAME(entry.flags, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA);
				SAME(entry.data, DATA);
				SAME(entry.len, len);
				SAME(source, me->peer);
				CHECK(holds(memory, len, seed, 0));
			}
			barrier(me);
			if (me->rank == 1)
				CHECK(holds(memory, len, seed, 0));
			barrier(me);
		}
	}
	close_region(mr);
	side_end(me);
	free(memory);
	free(back);
}

static void rma_forms(struct side *me)
{
	forms(me, 0);
}

static void rma_forms_basic(struct side *me)
{
	forms(me, FI_MR_BASIC);
}

/* The write or read at `address` fails with `error`, and moves nothing. */
static void refused(struct side *me, bool reads, uint64_t key, uint64_t address, size_t len, int error)
{
	char *buffer = need(len);
	struct fi_context context;
	struct fi_cq_err_entry entry;

	fill(buffer, len, 3);
	if (reads)
		POST(me, fi_read(me->ep, buffer, len, NULL, me->peer, address, key, &context));
	else
		POST(me, fi_write(me->ep, buffer, len, NULL, me->peer, address, key, &context));
	entry = failure(me->tx);
	SAME(entry.err, error);
	CHECK(entry.op_context == &context);
	SAME(entry.flags, FI_RMA | (reads ? FI_READ : FI_WRITE));
	CHECK(strlen(fi_cq_strerror(me->tx, entry.prov_errno, NULL, NULL, 0)) > 10);
	CHECK(holds(buffer, len, 3, 0));
	free(buffer);
}

static void rma_refused(struct side *me)
{
	static const size_t lens[] = { 8, 5000, 200000 };
	char *memory = need(200000);

	side_begin(me, &(struct setup){ .caps = CAPS });
	for (size_t i = 0; i < 3; i++) {
		size_t len = lens[i];

		for (int rights = 0; rights < 4; rights++) {
			uint64_t access = (rights & 1 ? FI_REMOTE_READ : 0) | (rights & 2 ? FI_REMOTE_WRITE : 0);
			struct target target;
			struct fid_mr *mr;

			fill(memory, len, 77);
			mr = offer(me, memory, len, access, &target);
			if (me->rank == 0) {
				/* A region that is for nobody has no key. */
				int error = rights ? FI_EACCES : FI_EKEYREJECTED;

				for (int reads = 0; reads < 2; reads++) {
					refused(me, reads, KEY + 1, 0, len, FI_EKEYREJECTED);
					refused(me, reads, KEY, 1, len, error);
					refused(me, reads, KEY, UINT64_MAX, len, error);
				}
				if (!(rights & 1))
					refused(me, true, KEY, 0, len, error);
				if (!(rights & 2))
					refused(me, false, KEY, 0, len, error);
			}
			barrier(me);
			if (me->rank == 1)
				CHECK(holds(memory, len, 77, 0));
			close_region(mr);
			barrier(me);
			if (me->rank == 0)
				refused(me, true, KEY, 0, len, FI_EKEYREJECTED);
			barrier(me);
		}
	}
	side_end(me);
	free(memory);
}

/* Calls that are wrong in themselves. */
static void rma_wrong(struct side *me)
{
	char buffer[8192];
	struct iovec five[5] = { { buffer, 1 }, { buffer, 1 }, { buffer, 1 }, { buffer, 1 }, { buffer, 1 } };
	struct fi_rma_iov remote[5] = { { 0, 1, KEY }, { 0, 1, KEY }, { 0, 1, KEY }, { 0, 1, KEY }, { 0, 1, KEY } };
	struct fi_msg_rma msg = { .msg_iov = five, .iov_count = 4, .rma_iov = remote, .rma_iov_count = 4 };
	size_t size = 16, len = sizeof(size);

	side_begin(me, &(struct setup){ .caps = CAPS });
	msg.addr = me->peer;
	SAME(fi_writev(me->ep, five, NULL, 5, me->peer, 0, KEY, NULL), -FI_EINVAL);
	SAME(fi_readv(me->ep, five, NULL, 5, me->peer, 0, KEY, NULL), -FI_EINVAL);
	msg.rma_iov_count = 5;
	SAME(fi_writemsg(me->ep, &msg, 0), -FI_EINVAL);
	msg.rma_iov_count = 3;
	SAME(fi_writemsg(me->ep, &msg, 0), -FI_EINVAL);
	SAME(fi_readmsg(me->ep, &msg, 0), -FI_EINVAL);
	SAME(fi_writemsg(me->ep, NULL, 0), -FI_EINVAL);
	SAME(fi_write(me->ep, NULL, 1, NULL, me->peer, 0, KEY, NULL), -FI_EINVAL);
	SAME(fi_write(me->ep, buffer, 1, NULL, 12345, 0, KEY, NULL), -FI_EINVAL);
	SAME(fi_inject_write(me->ep, buffer, me->info->tx_attr->inject_size + 1, me->peer, 0, KEY), -FI_EMSGSIZE);
	SAME(me->info->tx_attr->rma_iov_limit, 4);
	if (fi_setopt(&me->ep->fid, FI_OPT_ENDPOINT, 14 /* FI_OPT_MAX_RMA_SIZE */, &size, len) == 0)
		SAME(fi_write(me->ep, buffer, 17, NULL, me->peer, 0, KEY, NULL), -FI_EMSGSIZE);
	nothing_in(me->tx, 20);
	side_end(me);
	/* An endpoint without the capability. */
	side_begin(me, &(struct setup){ 0 });
	SAME(fi_write(me->ep, buffer, 1, NULL, me->peer, 0, KEY, NULL), -FI_EOPNOTSUPP);
	SAME(fi_read(me->ep, buffer, 1, NULL, me->peer, 0, KEY, NULL), -FI_EOPNOTSUPP);
	side_end(me);
}

/* Registration in all its forms. */
static void regions(struct side *me)
{
	char memory[300], back[300];
	struct iovec parts[5] = { { memory, 100 }, { memory + 200, 50 }, { memory, 1 }, { memory, 1 }, { memory, 1 } };
	struct fi_mr_attr attr = { .mr_iov = parts, .iov_count = 2, .access = RIGHTS, .requested_key = 9,
				   .context = memory };
	struct fid_mr *mr, *other, *local[3];
	struct fi_context context;
	uint64_t key, base = 1;
	uint8_t raw[8];
	size_t raw_len = 1;

	side_begin(me, &(struct setup){ .caps = CAPS });
	fill(memory, sizeof(memory), (uint32_t)me->rank);
	OK(fi_mr_regattr(me->domain, &attr, 0, &mr));
	CHECK(mr->fid.context == memory);
	SAME(fi_mr_key(mr), 9);
	CHECK(fi_mr_desc(mr));
	SAME(fi_mr_reg(me->domain, memory, 1, RIGHTS, 0, 9, 0, &other, NULL), -FI_ENOKEY);
	SAME(fi_mr_reg(me->domain, memory, 1, RIGHTS, 4, 10, 0, &other, NULL), -FI_EINVAL);
	SAME(fi_mr_regv(me->domain, parts, 5, RIGHTS, 0, 10, 0, &other, NULL), -FI_EINVAL);
	SAME(fi_mr_reg(me->domain, memory, 1, RIGHTS, 0, 10, 1ULL << 40 /* FI_MR_DMABUF */, &other, NULL),
	     -FI_EOPNOTSUPP);
	attr.requested_key = 10;
	SAME(fi_mr_regattr(me->domain, &attr, 1ULL << 40, &other), -FI_EOPNOTSUPP);
	/* There is nothing beyond the end of all addresses. */
	SAME(fi_mr_reg(me->domain, memory, SIZE_MAX, RIGHTS, 0, 10, 0, &other, NULL), -FI_EINVAL);
	OK(fi_mr_reg(me->domain, NULL, 0, RIGHTS, 0, 10, 0, &other, NULL));
	OK(fi_close(&other->fid));
	/* Keys of regions that no peer may access are not looked at. */
	for (int i = 0; i < 3; i++) {
		attr.requested_key = i < 2 ? 0 : 9;
		attr.access = i ? FI_SEND | FI_RECV | FI_READ | FI_WRITE : 0;
		OK(fi_mr_regattr(me->domain, &attr, 0, &local[i]));
		SAME(fi_mr_key(local[i]), attr.requested_key);
		CHECK(fi_mr_desc(local[i]));
	}
	OK(fi_mr_reg(me->domain, memory, 1, RIGHTS, 0, 0, 0, &other, NULL));
	for (int i = 0; i < 3; i++)
		OK(fi_close(&local[i]->fid));
	SAME(fi_mr_reg(me->domain, memory, 1, RIGHTS, 0, 0, 0, &local[0], NULL), -FI_ENOKEY);
	OK(fi_close(&other->fid));
	OK(fi_mr_regv(me->domain, parts, 4, FI_REMOTE_READ, 0, 10, 0, &other, NULL));
	OK(fi_close(&other->fid));
	OK(fi_mr_enable(mr));
	OK(fi_mr_refresh(mr, parts, 1, 0));
	OK(fi_mr_bind(mr, &me->ep->fid, 0));
	SAME(fi_mr_bind(mr, &me->av->fid, 0), -FI_EINVAL);
	SAME(fi_mr_raw_attr(mr, &base, raw, &raw_len, 0), -FI_ETOOSMALL);
	SAME(raw_len, 8);
	OK(fi_mr_raw_attr(mr, &base, raw, &raw_len, 0));
	SAME(base, 0);
	OK(fi_mr_map_raw(me->domain, base, raw, raw_len, &key, 0));
	SAME(key, 9);
	OK(fi_mr_unmap_key(me->domain, key));
	barrier(me);
	/* Across the border of its parts. */
	POST(me, fi_read(me->ep, back, 150, NULL, me->peer, 0, 9, &context));
	completion(me->tx);
	CHECK(holds(back, 100, !me->rank, 0) && holds(back + 100, 50, !me->rank, 200));
	barrier(me);
	SAME(fi_close(&me->domain->fid), -FI_EBUSY);
	OK(fi_close(&mr->fid));
	side_end(me);
}

/* The attributes of an application for an older API are shorter: what is behind them is not read. */
static void old_regions(struct side *me)
{
	static const struct {
		uint32_t version;
		size_t len;
	} apis[] = {
		{ FI_VERSION(1, 4), offsetof(struct fi_mr_attr, auth_key_size) },
		{ FI_VERSION(1, 8), offsetof(struct fi_mr_attr, iface) },
	};
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), memory[8];
	struct iovec part = { memory, sizeof(memory) };
	struct fi_mr_attr attr = { .mr_iov = &part, .iov_count = 1, .access = FI_REMOTE_READ, .requested_key = 7 };

	CHECK(pages != MAP_FAILED);
	OK(mprotect(pages + page, page, PROT_NONE));
	for (int i = 0; i < 2; i++) {
		struct fi_info *hints = fi_allocinfo(), *info;
		char *at = pages + page - apis[i].len;
		struct fid_fabric *fabric;
		struct fid_domain *domain;
		struct fid_mr *mr;

		hints->caps = FI_MSG | FI_RMA;
		hints->fabric_attr->prov_name = strdup("udrv");
		OK(fi_getinfo(apis[i].version, NULL, NULL, 0, hints, &info));
		OK(fi_fabric(info->fabric_attr, &fabric, NULL));
		OK(fi_domain(fabric, info, &domain, NULL));
		memcpy(at, &attr, apis[i].len);
		OK(fi_mr_regattr(domain, (struct fi_mr_attr *)(void *)at, 0, &mr));
		OK(fi_close(&mr->fid));
		OK(fi_close(&domain->fid));
		OK(fi_close(&fabric->fid));
		fi_freeinfo(hints);
		fi_freeinfo(info);
	}
	OK(munmap(pages, 2 * page));
	/* The other side has its own. */
	barrier(me);
}

/* Rank 1 registers all of its memory, and rank 0 says where in it: Chapel and MPI's dynamic windows do so. */
static void rma_all_memory(struct side *me)
{
	static const size_t lens[] = { 8, 5000, 100000, REGION };
	char *memory = need(REGION), *local = need(REGION);
	uint64_t at = (uintptr_t)memory;
	struct target target;
	struct fid_mr *mr;

	side_begin(me, &(struct setup){ .caps = CAPS });
	mr = offer(me, NULL, SIZE_MAX, RIGHTS, &target);
	if (me->rank == 0)
		hear(me, &at, sizeof(at));
	else
		tell(me, &at, sizeof(at));
	for (uint32_t i = 0; i < 12; i++) {
		size_t len = lens[i % 4];

		if (me->rank == 0) {
			fill(local, len, i);
			POST(me, fi_write(me->ep, local, len, NULL, me->peer, at, KEY, NULL));
			completion(me->tx);
			memset(local, 0, len);
			POST(me, fi_read(me->ep, local, len, NULL, me->peer, at, KEY, NULL));
			completion(me->tx);
			CHECK(holds(local, len, i, 0));
		}
		barrier(me);
		if (me->rank == 1)
			CHECK(holds(memory, len, i, 0));
		barrier(me);
	}
	/* No memory can be there. */
	if (me->rank == 0)
		for (int bit = 58; bit < 64; bit++)
			for (int reads = 0; reads < 2; reads++)
				refused(me, reads, KEY, 1ULL << bit, 5000, FI_EACCES);
	barrier(me);
	close_region(mr);
	side_end(me);
	free(memory);
	free(local);
}

/* What is counted, and by whom. */
static void rma_counters(struct side *me)
{
	enum { COUNT = 20 };
	char *memory = need(50000);
	struct fid_cntr *of_region[2];
	struct target target;
	struct fid_mr *mr;

	side_begin(me, &(struct setup){ .caps = CAPS, .rma_counters = true, .bind_flags = FI_SELECTIVE_COMPLETION });
	for (int i = 0; i < 2; i++)
		OK(fi_cntr_open(me->domain, &(struct fi_cntr_attr){ .wait_obj = FI_WAIT_UNSPEC }, &of_region[i], NULL));
	mr = offer(me, memory, 50000, RIGHTS, &target);
	if (mr) {
		SAME(fi_mr_bind(mr, &of_region[0]->fid, FI_WRITE), -FI_EINVAL);
		OK(fi_mr_bind(mr, &of_region[1]->fid, FI_REMOTE_WRITE));
		SAME(fi_mr_bind(mr, &of_region[1]->fid, FI_REMOTE_READ | FI_REMOTE_WRITE), -FI_EINVAL);
		OK(fi_mr_bind(mr, &of_region[0]->fid, FI_REMOTE_READ));
		SAME(fi_mr_bind(mr, &of_region[0]->fid, FI_REMOTE_READ), -FI_EINVAL);
		SAME(fi_close(&of_region[0]->fid), -FI_EBUSY);
	}
	barrier(me);
	if (me->rank == 0) {
		for (int i = 0; i < COUNT; i++) {
			size_t len = i % 2 ? 50000 : 10;

			POST(me, fi_write(me->ep, memory, len, NULL, me->peer, 0, KEY, NULL));
			POST(me, fi_inject_write(me->ep, memory, 5, me->peer, 0, KEY));
			POST(me, fi_read(me->ep, memory, len, NULL, me->peer, 0, KEY, NULL));
		}
		/* These have no wait object: waiting for them polls. */
		OK(fi_cntr_wait(me->rma[WRITES], 2 * COUNT, PATIENCE_S * 1000));
		OK(fi_cntr_wait(me->rma[READS], COUNT, PATIENCE_S * 1000));
		SAME(fi_cntr_wait(me->rma[READS], COUNT + 1, 10), -FI_ETIMEDOUT);
		POST(me, fi_read(me->ep, memory, 8, NULL, me->peer, 0, KEY + 1, NULL));
		SAME(failure(me->tx).err, FI_EKEYREJECTED);
		SAME(fi_cntr_readerr(me->rma[READS]), 1);
		SAME(fi_cntr_readerr(me->rma[WRITES]), 0);
		SAME(fi_cntr_read(me->rma[WRITES]), 2 * COUNT);
		SAME(fi_cntr_read(me->rma[READS]), COUNT);
		SAME(fi_cntr_read(me->rma[REMOTE_WRITES]), 0);
		nothing_in(me->tx, 20);
	} else {
		/* Waiting for the region's own counter makes progress, and sleeps. */
		OK(fi_cntr_wait(of_region[1], 2 * COUNT, PATIENCE_S * 1000));
		OK(fi_cntr_wait(of_region[0], COUNT, PATIENCE_S * 1000));
	}
	barrier(me);
	if (me->rank == 1) {
		SAME(fi_cntr_read(me->rma[REMOTE_WRITES]), 2 * COUNT);
		SAME(fi_cntr_read(me->rma[REMOTE_READS]), COUNT);
		SAME(fi_cntr_read(of_region[1]), 2 * COUNT);
		SAME(fi_cntr_read(of_region[0]), COUNT);
		SAME(fi_cntr_read(me->rma[WRITES]), 0);
		nothing_in(me->rx, 20);
	}
	close_region(mr);
	for (int i = 0; i < 2; i++)
		OK(fi_close(&of_region[i]->fid));
	side_end(me);
	free(memory);
}

/* A region goes away while it is written and read, and its memory with it. */
static void close_in_use(struct side *me)
{
	static const size_t lens[] = { 100, 16000, 1 << 20 };
	char *local = need(1 << 20);

	side_begin(me, &(struct setup){ .caps = CAPS });
	for (int round = 0; round < (slow ? 3 : 12); round++) {
		size_t len = lens[round % 3];
		struct target target;
		void *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct fid_mr *mr = offer(me, memory, len, RIGHTS, &target);
		bool gone = false;

		CHECK(memory != MAP_FAILED);
		if (me->rank == 0) {
			while (!gone) {
				struct fi_cq_tagged_entry entry;
				struct fi_cq_err_entry error = { 0 };
				double end = now() + PATIENCE_S;
				ssize_t n;
				int pending = 0;

				for (int i = 0; i < 8; i++, pending++) {
					if (i % 2)
						POST(me, fi_read(me->ep, local, len, NULL, me->peer, 0, KEY, NULL));
					else
						POST(me, fi_write(me->ep, local, len, NULL, me->peer, 0, KEY, NULL));
				}
				while (pending > 0) {
					n = fi_cq_read(me->tx, &entry, 1);
					CHECK(n != -FI_EAGAIN || now() < end);
					if (n == -FI_EAVAIL) {
						SAME(fi_cq_readerr(me->tx, &error, 0), 1);
						SAME(error.err, FI_EKEYREJECTED);
						gone = true;
					}
					if (n != -FI_EAGAIN)
						pending--;
				}
			}
			barrier(me);
		} else {
			for (int i = 0; i < 50 + 37 * round; i++)
				progress(me);
			OK(fi_close(&mr->fid));
			OK(munmap(memory, len));
			memory = NULL;
			barrier(me);
		}
		if (memory)
			OK(munmap(memory, len));
	}
	side_end(me);
	free(local);
}

/* Writes stay in their order, and reads see what was written before them. */
static void rma_order(struct side *me)
{
	enum { ROUNDS = 60 };
	static const size_t lens[] = { 100000, 8, 20000, 300 };
	char *memory = need(100000), *back = need(ROUNDS * 8), *from = need(ROUNDS * 100000);
	struct fi_context context[ROUNDS * 2];
	struct target target;
	struct fid_mr *mr;

	side_begin(me, &(struct setup){ .caps = CAPS });
	mr = offer(me, memory, 100000, RIGHTS, &target);
	CHECK((me->info->tx_attr->msg_order & (FI_ORDER_WAW | FI_ORDER_RAW)) == (FI_ORDER_WAW | FI_ORDER_RAW));
	if (me->rank == 0) {
		for (int i = 0; i < ROUNDS; i++) {
			char *bytes = from + (size_t)i * 100000;

			fill(bytes, 100000, (uint32_t)i);
			POST(me, fi_write(me->ep, bytes, lens[i % 4], NULL, me->peer, 0, KEY, &context[i]));
			POST(me, fi_read(me->ep, back + 8 * i, 8, NULL, me->peer, 0, KEY, &context[ROUNDS + i]));
			/* Reads may see what comes after them. */
			while (fi_cq_read(me->tx, &context[0], 0) == 0)
				;
			completion(me->tx);
			completion(me->tx);
			CHECK(holds(back + 8 * i, 8, (uint32_t)i, 0));
		}
		for (int i = 0; i < ROUNDS; i++)
			POST(me, fi_write(me->ep, from + (size_t)i * 100000, lens[i % 4], NULL, me->peer, 0, KEY,
					  &context[i]));
		for (int i = 0; i < ROUNDS; i++)
			completion(me->tx);
	}
	barrier(me);
	if (me->rank == 1) {
		CHECK(holds(memory, 300, ROUNDS - 1, 0));
		CHECK(holds(memory + 300, 20000 - 300, ROUNDS - 2, 300));
		CHECK(holds(memory + 20000, 80000, ROUNDS - 4, 20000));
	}
	close_region(mr);
	side_end(me);
	free(memory);
	free(back);
	free(from);
}

/* A target that computes is read and written all the same where progress is automatic. */
static void rma_auto(struct side *me)
{
	char *memory = need(1 << 20);
	struct target target;
	struct fid_mr *mr;
	char byte = 'b';

	side_begin(me, &(struct setup){ .caps = CAPS, .progress = FI_PROGRESS_AUTO });
	mr = offer(me, memory, 1 << 20, RIGHTS, &target);
	barrier(me);
	if (me->rank == 0) {
		for (size_t len = 8; len <= 1 << 20; len <<= 17) {
			fill(memory, len, 5);
			POST(me, fi_write(me->ep, memory, len, NULL, me->peer, 0, KEY, NULL));
			completion(me->tx);
			memset(memory, 0, len);
			POST(me, fi_read(me->ep, memory, len, NULL, me->peer, 0, KEY, NULL));
			completion(me->tx);
			CHECK(holds(memory, len, 5, 0));
		}
		tell(me, &byte, 1);
	} else {
		/* It makes no call of udrv meanwhile. */
		hear(me, &byte, 1);
		CHECK(holds(memory, 1 << 20, 5, 0));
	}
	close_region(mr);
	side_end(me);
	free(memory);
}

/* To itself, through an endpoint that has nothing but one-sided operations and one queue. */
static void to_oneself(struct side *me, uint64_t caps)
{
	char *memory = need(200000), *local = need(200000);
	struct fid_mr *mr;
	char name[NAME_MAX_LEN];
	fi_addr_t self;

	side_begin(me, &(struct setup){ .caps = caps });
	OK(fi_mr_reg(me->domain, memory, 200000, RIGHTS, 0, KEY, 0, &mr, NULL));
	name_of(me->ep, name);
	self = insert(me, name);
	for (size_t len = 1; len < 200000; len *= 7) {
		fill(local, len, 1);
		POST(me, fi_write(me->ep, local, len, NULL, self, 0, KEY, NULL));
		completion(me->tx);
		CHECK(holds(memory, len, 1, 0));
		fill(memory, len, 2);
		POST(me, fi_read(me->ep, local, len, NULL, self, 0, KEY, NULL));
		completion(me->tx);
		CHECK(holds(local, len, 2, 0));
	}
	OK(fi_close(&mr->fid));
	side_end(me);
	free(memory);
	free(local);
}

static void rma_to_oneself(struct side *me)
{
	to_oneself(me, FI_RMA);
}

/* An endpoint whose capabilities name only what peers may do starts operations all the same: Charm++ does so. */
static void rma_of_targets(struct side *me)
{
	to_oneself(me, FI_RMA | FI_REMOTE_READ | FI_REMOTE_WRITE);
}

/* An endpoint that takes no messages needs no queue for them. */
static void rma_without_receives(struct side *me)
{
	struct setup setup = { .caps = CAPS };
	struct fid_ep *ep;
	char byte;

	side_begin(me, &setup);
	OK(fi_endpoint(me->domain, me->info, &ep, NULL));
	OK(fi_ep_bind(ep, &me->av->fid, 0));
	SAME(fi_enable(ep), -FI_ENOCQ);
	OK(fi_ep_bind(ep, &me->tx->fid, FI_TRANSMIT));
	OK(fi_enable(ep));
	SAME(fi_recv(ep, &byte, 1, NULL, FI_ADDR_UNSPEC, NULL), -FI_ENOCQ);
	OK(fi_close(&ep->fid));
	side_end(me);
}

/* The target goes away in the middle. */
static void rma_departure(struct side *me)
{
	char *memory = need(1 << 20);
	struct target target;
	struct fid_mr *mr;
	int ended = 0;

	side_begin(me, &(struct setup){ .caps = CAPS });
	mr = offer(me, memory, 1 << 20, RIGHTS, &target);
	/* They have met. */
	POST(me, fi_inject(me->ep, "b", 1, me->peer));
	barrier(me);
	if (me->rank == 0) {
		double end = now() + PATIENCE_S;

		for (int i = 0; i < 20; i++)
			POST(me, fi_write(me->ep, memory, 1 << 20, NULL, me->peer, 0, KEY, NULL));
		tell(me, "b", 1);
		while (ended < 20) {
			struct fi_cq_tagged_entry entry;
			struct fi_cq_err_entry error = { 0 };
			ssize_t n = fi_cq_read(me->tx, &entry, 1);

			CHECK(now() < end);
			if (n == -FI_EAVAIL) {
				SAME(fi_cq_readerr(me->tx, &error, 0), 1);
				if (error.err != FI_ECONNRESET && error.err != FI_EKEYREJECTED)
					FAIL("it ended with %s", fi_strerror(error.err));
			}
			ended += n != -FI_EAGAIN;
		}
		nothing_in(me->tx, 20);
		hear(me, &(char){ 0 }, 1);
		side_close(me);
	} else {
		hear(me, &(char){ 0 }, 1);
		close_region(mr);
		side_close(me);
		tell(me, "b", 1);
	}
	free(memory);
}

struct region {
	struct side *me;
	struct fid_mr *mr;
};

static void close_with_region(void *argument)
{
	struct region *region = argument;

	close_region(region->mr);
	side_close(region->me);
}

/* A forked child that closes its parent's region takes nothing from the parent or its peer. */
static void forked_region(struct side *me)
{
	enum { LEN = 256 * 1024 };
	char *memory = need(LEN), word = 0;
	struct target target;
	struct fid_mr *mr;

	side_begin(me, &(struct setup){ .caps = CAPS });
	mr = offer(me, memory, LEN, FI_REMOTE_WRITE, &target);
	for (uint32_t round = 0; round < 8; round++) {
		if (me->rank == 0) {
			fill(memory, LEN, round);
			POST(me, fi_write(me->ep, memory, LEN, NULL, me->peer, target.address, target.key, NULL));
			completion(me->tx);
			POST(me, fi_trecv(me->ep, &word, 1, NULL, FI_ADDR_UNSPEC, round, 0, NULL));
			barrier(me);
			completion(me->rx);
			SAME(word, round + 1);
			continue;
		}
		barrier(me);
		for (double end = now() + PATIENCE_S; !holds(memory, LEN, round, 0); progress(me))
			CHECK(now() < end);
		if (round % 2)
			in_child(close_with_region, &(struct region){ me, mr });
		word = (char)(round + 1);
		POST(me, fi_tsend(me->ep, &word, 1, NULL, me->peer, round, NULL));
		completion(me->tx);
	}
	close_region(mr);
	side_end(me);
	free(memory);
}

const struct group rma_groups[] = {
	{ "rma_forms", rma_forms },
	{ "rma_forms_basic", rma_forms_basic },
	{ "rma_refused", rma_refused },
	{ "rma_wrong", rma_wrong },
	{ "regions", regions },
	{ "old_regions", old_regions },
	{ "rma_all_memory", rma_all_memory },
	{ "rma_counters", rma_counters },
	{ "close_in_use", close_in_use },
	{ "rma_order", rma_order },
	{ "rma_auto", rma_auto },
	{ "rma_to_oneself", rma_to_oneself },
	{ "rma_of_targets", rma_of_targets },
	{ "rma_without_receives", rma_without_receives },
	{ "rma_departure", rma_departure },
	{ "forked_region", forked_region },
	{ NULL, NULL },
};
