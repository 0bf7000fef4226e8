/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * Atomic operations: rank 0 changes memory of rank 1, in every form, with every operation on every type. What comes out
 * is compared with what the C compiler makes of the same values.
 */
#include "all_forms.h"

#include <complex.h>
#include <pthread.h>
#include <rdma/fi_atomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CAPS (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_RMA_EVENT | FI_SOURCE)
#define RIGHTS (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define KEY 0xA70311Cu
#define DATA 0x8877665544332211u
/* Bytes of one operation. */
#define MOST 4096

__extension__ typedef __int128 i128;
__extension__ typedef unsigned __int128 u128;

enum form { BASE, FETCH, COMPARE };

static size_t size_of(int type)
{
	static const size_t sizes[] = { 1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 8, 16, sizeof(long double),
					2 * sizeof(long double), 16, 16 };

	return sizes[type];
}

static const uint64_t query_flags[] = { 0, FI_FETCH_ATOMIC, FI_COMPARE_ATOMIC };
/* What is done, named as op in the macros below: `t` at the target, `s` sent, `c` compared. */
#define TYPES 16
#define OPS 19

/* --- what C makes of it --- */

#define COMMON(op, T) \
	switch (op) { \
	case FI_SUM: t = (T)(t + s); break; \
	case FI_PROD: t = (T)(t * s); break; \
	case FI_LOR: t = (T)(t != 0 || s != 0); break; \
	case FI_LAND: t = (T)(t != 0 && s != 0); break; \
	case FI_LXOR: t = (T)((t != 0) != (s != 0)); break; \
	case FI_ATOMIC_WRITE: t = s; break; \
	case FI_CSWAP: if (c == t) t = s; break; \
	case FI_CSWAP_NE: if (c != t) t = s; break; \
	}
#define ORDERED(op) \
	switch (op) { \
	case FI_MIN: if (s < t) t = s; break; \
	case FI_MAX: if (s > t) t = s; break; \
	case FI_CSWAP_LE: if (c <= t) t = s; break; \
	case FI_CSWAP_LT: if (c < t) t = s; break; \
	case FI_CSWAP_GE: if (c >= t) t = s; break; \
	case FI_CSWAP_GT: if (c > t) t = s; break; \
	}
#define BITS(op, T) \
	switch (op) { \
	case FI_BOR: t = (T)(t | s); break; \
	case FI_BAND: t = (T)(t & s); break; \
	case FI_BXOR: t = (T)(t ^ s); break; \
	case FI_MSWAP: t = (T)((s & c) | (t & (T)~c)); break; \
	}
/* Signed numbers are added and multiplied as unsigned ones: they wrap. */
#define INTEGER(T, U) do { \
		T t, s, c; \
		memcpy(&t, target, sizeof(t)), memcpy(&s, sent, sizeof(s)), memcpy(&c, compared, sizeof(c)); \
		if (op == FI_SUM) \
			t = (T)((U)t + (U)s); \
		else if (op == FI_PROD) \
			t = (T)((u128)(U)t * (U)s); \
		else { \
			COMMON(op, T) \
			ORDERED(op) \
			BITS(op, T) \
		} \
		memcpy(target, &t, sizeof(t)); \
	} while (0)
#define REAL(T) do { \
		T t, s, c; \
		memcpy(&t, target, sizeof(t)), memcpy(&s, sent, sizeof(s)), memcpy(&c, compared, sizeof(c)); \
		COMMON(op, T) \
		ORDERED(op) \
		memcpy(target, &t, sizeof(t)); \
	} while (0)
#define COMPLEX(T) do { \
		T t, s, c; \
		memcpy(&t, target, sizeof(t)), memcpy(&s, sent, sizeof(s)), memcpy(&c, compared, sizeof(c)); \
		COMMON(op, T) \
		memcpy(target, &t, sizeof(t)); \
	} while (0)

/* Changes one element at `target`. */
static void change(int op, int type, void *target, const void *sent, const void *compared)
{
	switch (type) {
	case FI_INT8: INTEGER(int8_t, uint8_t); break;
	case FI_UINT8: INTEGER(uint8_t, uint8_t); break;
	case FI_INT16: INTEGER(int16_t, uint16_t); break;
	case FI_UINT16: INTEGER(uint16_t, uint16_t); break;
	case FI_INT32: INTEGER(int32_t, uint32_t); break;
	case FI_UINT32: INTEGER(uint32_t, uint32_t); break;
	case FI_INT64: INTEGER(int64_t, uint64_t); break;
	case FI_UINT64: INTEGER(uint64_t, uint64_t); break;
	case 14: INTEGER(i128, u128); break;
	case 15: INTEGER(u128, u128); break;
	case FI_FLOAT: REAL(float); break;
	case FI_DOUBLE: REAL(double); break;
	case FI_LONG_DOUBLE: REAL(long double); break;
	case FI_FLOAT_COMPLEX: COMPLEX(float complex); break;
	case FI_DOUBLE_COMPLEX: COMPLEX(double complex); break;
	case FI_LONG_DOUBLE_COMPLEX: COMPLEX(long double complex); break;
	}
}

/* Random elements: any bits for integers, numbers with few digits for the others; every fourth is 0. */
static void randomize(void *buffer, size_t count, int type, uint64_t *state)
{
	char *bytes = buffer;
	size_t size = size_of(type);

	memset(buffer, 0, count * size);
	for (size_t i = 0; i < count; i++, bytes += size) {
		uint64_t bits[2] = { next_random(state), next_random(state) };
		double re = (double)(int)(bits[0] % 2001) / 8 - 125, im = (double)(int)(bits[1] % 2001) / 8 - 125;
		float f[2] = { (float)re, (float)im };
		double d[2] = { re, im };
		long double l[2];

		if (next_random(state) % 4 == 0)
			continue;
		/* Padding has to be the same every time. */
		memset(l, 0, sizeof(l));
		l[0] = re, l[1] = im;
		memset((char *)l + 10, 0, 6), memset((char *)l + 26, 0, 6);
		if (type == FI_FLOAT || type == FI_FLOAT_COMPLEX)
			memcpy(bytes, f, size);
		else if (type == FI_DOUBLE || type == FI_DOUBLE_COMPLEX)
			memcpy(bytes, d, size);
		else if (type == FI_LONG_DOUBLE || type == FI_LONG_DOUBLE_COMPLEX)
			memcpy(bytes, l, size);
		else
			memcpy(bytes, bits, size);
	}
}

/* Whether elements are the same; what lies between long doubles means nothing. */
static bool alike(const char *a, const char *b, size_t count, int type)
{
	bool padded = type == FI_LONG_DOUBLE || type == FI_LONG_DOUBLE_COMPLEX;
	size_t step = padded ? 16 : size_of(type), used = padded ? 10 : step;

	for (size_t at = 0; at < count * size_of(type); at += step)
		if (memcmp(a + at, b + at, used))
			return false;
	return true;
}

/* --- every form --- */

/* What rank 0 knows of rank 1's region. */
struct target {
	uint64_t key, address;
};

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
	tell(me, target, sizeof(*target));
	return mr;
}

static void close_region(struct fid_mr *mr)
{
	if (mr)
		OK(fi_close(&mr->fid));
}

/* The ways of each form: one buffer, a vector, a structure; and what is injected. */
enum way { ONE, VECTOR, MESSAGE, INJECT, MESSAGE_INJECT, MESSAGE_DATA, WAYS };

static void split(struct fi_ioc parts[3], char *buffer, size_t count, size_t size)
{
	parts[0] = (struct fi_ioc){ buffer, count / 3 };
	parts[1] = (struct fi_ioc){ buffer + count / 3 * size, count / 5 };
	parts[2] = (struct fi_ioc){ buffer + (count / 3 + count / 5) * size, count - count / 3 - count / 5 };
}

struct operands {
	char *sent, *compared, *result;
};

static void post(struct side *me, int form, int way, int op, int type, size_t count, struct operands *with,
		 const struct target *to, void *context)
{
	struct fi_ioc sent[3], compared[3], result[3];
	struct fi_rma_ioc remote[2] = { { to->address, count / 2, to->key },
					{ to->address + count / 2 * size_of(type), count - count / 2, to->key } };
	struct fi_msg_atomic msg = { .msg_iov = sent, .iov_count = 3, .addr = me->peer, .rma_iov = remote,
				     .rma_iov_count = 2, .datatype = type, .op = op, .context = context, .data = DATA };
	uint64_t flags = way == MESSAGE_INJECT ? FI_INJECT | FI_COMPLETION
		       : way == MESSAGE_DATA ? FI_REMOTE_CQ_DATA | FI_DELIVERY_COMPLETE : FI_COMPLETION;
	uint64_t at = to->address, key = to->key;

	split(sent, with->sent, count, size_of(type));
	split(compared, with->compared, count, size_of(type));
	split(result, with->result, count, size_of(type));
	if (op == FI_ATOMIC_READ) /* The operand may be anything. */
		msg.msg_iov = NULL, msg.iov_count = 0, with->sent = NULL;
	switch (form * 10 + way) {
	case BASE * 10 + ONE:
		POST(me, fi_atomic(me->ep, with->sent, count, NULL, me->peer, at, key, type, op, context));
		break;
	case BASE * 10 + VECTOR:
		POST(me, fi_atomicv(me->ep, sent, NULL, 3, me->peer, at, key, type, op, context));
		break;
	case BASE * 10 + INJECT:
		POST(me, fi_inject_atomic(me->ep, with->sent, count, me->peer, at, key, type, op));
		break;
	case FETCH * 10 + ONE:
		POST(me, fi_fetch_atomic(me->ep, with->sent, count, NULL, with->result, NULL, me->peer, at, key, type,
					 op, context));
		break;
	case FETCH * 10 + VECTOR:
		POST(me, fi_fetch_atomicv(me->ep, msg.msg_iov, NULL, msg.iov_count, result, NULL, 3, me->peer, at, key,
					  type, op, context));
		break;
	case COMPARE * 10 + ONE:
		POST(me, fi_compare_atomic(me->ep, with->sent, count, NULL, with->compared, NULL, with->result, NULL,
					   me->peer, at, key, type, op, context));
		break;
	case COMPARE * 10 + VECTOR:
		POST(me, fi_compare_atomicv(me->ep, sent, NULL, 3, compared, NULL, 3, result, NULL, 3, me->peer, at,
					    key, type, op, context));
		break;
	default:
		if (form == BASE)
			POST(me, fi_atomicmsg(me->ep, &msg, flags));
		else if (form == FETCH)
			POST(me, fi_fetch_atomicmsg(me->ep, &msg, result, NULL, 3, flags));
		else
			POST(me, fi_compare_atomicmsg(me->ep, &msg, compared, NULL, 3, result, NULL, 3, flags));
	}
}

/* What is offered has to work, what is not has to be refused, and all that ask have to get the same answer. */
static size_t most_of(struct side *me, int form, int op, int type)
{
	struct fi_atomic_attr attr = { 0, 0 };
	struct operands none = { (char *)&none, (char *)&none, (char *)&none };
	size_t count = 0;
	int rc = fi_query_atomic(me->domain, type, op, &attr, query_flags[form]), valid;

	valid = form == BASE ? fi_atomicvalid(me->ep, type, op, &count)
	      : form == FETCH ? fi_fetch_atomicvalid(me->ep, type, op, &count)
			      : fi_compare_atomicvalid(me->ep, type, op, &count);
	SAME(valid, rc);
	SAME(fi_query_atomic(me->domain, type, op, &attr, query_flags[form] | FI_TAGGED), -FI_EOPNOTSUPP);
	if (rc == 0) {
		SAME(count, attr.count);
		SAME(attr.size, size_of(type));
		SAME(count * attr.size, MOST);
		return count;
	}
	SAME(rc, -FI_EOPNOTSUPP);
	if (me->rank == 1)
		return 0;
	if (form == BASE)
		SAME(fi_atomic(me->ep, none.sent, 1, NULL, me->peer, 0, KEY, type, op, NULL), -FI_EOPNOTSUPP);
	else if (form == FETCH)
		SAME(fi_fetch_atomic(me->ep, none.sent, 1, NULL, none.result, NULL, me->peer, 0, KEY, type, op, NULL),
		     -FI_EOPNOTSUPP);
	else
		SAME(fi_compare_atomic(me->ep, none.sent, 1, NULL, none.compared, NULL, none.result, NULL, me->peer, 0,
				       KEY, type, op, NULL), -FI_EOPNOTSUPP);
	return 0;
}

/* Both sides draw the same numbers, so that rank 1 knows what to expect. */
static void one_operation(struct side *me, int form, int way, int op, int type, size_t count, char *memory,
			  const struct target *to, uint64_t *state)
{
	char start[MOST], sent[MOST], compared[MOST], result[MOST], old[MOST], wanted[MOST];
	struct operands with = { sent, compared, result };
	struct fi_cq_tagged_entry entry;
	struct fi_context context;
	size_t size = size_of(type), len = count * size;

	randomize(start, count, type, state);
	randomize(sent, count, type, state);
	randomize(compared, count, type, state);
	/* Half of them compare equal. */
	for (size_t i = 0; i < count; i += 2)
		memcpy(compared + i * size, start + i * size, size);
	memcpy(wanted, start, len);
	memcpy(old, start, len);
	for (size_t i = 0; i < count; i++)
		change(op, type, wanted + i * size, sent + i * size, compared + i * size);
	if (me->rank == 1)
		memcpy(memory, start, len);
	barrier(me);
	if (me->rank == 0) {
		memset(result, 0x5a, len);
		post(me, form, way, op, type, count, &with, to, &context);
		if (way == INJECT || way == MESSAGE_INJECT)
			memset(sent, 0xee, len), memset(compared, 0xee, len);
		if (way != INJECT) {
			entry = completion(me->tx);
			CHECK(entry.op_context == &context);
			SAME(entry.flags, FI_ATOMIC | (form == BASE ? FI_WRITE : FI_READ));
		}
		if (form != BASE && !alike(result, old, count, type))
			FAIL("form %d way %d op %d type %d: another result", form, way, op, type);
	} else if (way == MESSAGE_DATA) {
		fi_addr_t source;

		entry = completion_from(me->rx, &source);
		SAME(entry.flags, FI_ATOMIC | FI_REMOTE_CQ_DATA | (form == BASE ? FI_REMOTE_WRITE : FI_REMOTE_READ));
		SAME(entry.data, DATA);
		SAME(entry.len, len);
		SAME(source, me->peer);
	}
	if (way == INJECT && me->rank == 0) {
		/* What comes after it tells that it is there. */
		POST(me, fi_read(me->ep, result, len, NULL, me->peer, to->address, to->key, &context));
		completion(me->tx);
		CHECK(alike(result, wanted, count, type));
	}
	barrier(me);
	if (me->rank == 1 && !alike(memory, wanted, count, type))
		FAIL("form %d way %d op %d type %d: not what C makes of it", form, way, op, type);
}

static void forms(struct side *me, int mr_mode)
{
	char *memory = need(MOST);
	struct target target;
	struct fid_mr *mr;
	uint64_t state = 12345;
	int offered = 0;

	side_begin(me, &(struct setup){ .caps = CAPS, .mr_mode = mr_mode });
	mr = offer(me, memory, MOST, RIGHTS, &target);
	for (int form = BASE; form <= COMPARE; form++) {
		for (int op = 0; op < OPS; op++) {
			for (int type = 0; type < TYPES; type++) {
				size_t most = most_of(me, form, op, type);
				int way = (op + type) % WAYS;

				if (!most)
					continue;
				offered++;
				if (form != BASE && way == INJECT)
					way = ONE;
				one_operation(me, form, way, op, type, 1, memory, &target, &state);
				one_operation(me, form, (way + 1) % INJECT, op, type, 15 % most, memory, &target, &state);
				if (!slow)
					one_operation(me, form, (way + 2) % INJECT, op, type, most, memory, &target,
						      &state);
			}
		}
	}
	/* fi_atomic(3): those that make sense. */
	SAME(offered, 152 + 168 + 94);
	for (int form = BASE; form <= COMPARE; form++)
		for (int way = 0; way < WAYS; way++)
			if (form == BASE || way != INJECT)
				one_operation(me, form, way, form == COMPARE ? FI_CSWAP : FI_SUM, FI_UINT64, 100,
					      memory, &target, &state);
	close_region(mr);
	side_end(me);
	free(memory);
}

static void atomic_forms(struct side *me)
{
	forms(me, 0);
}

static void atomic_forms_basic(struct side *me)
{
	forms(me, FI_MR_BASIC);
}

/* --- what is refused --- */

/* An operation on one 8-byte element that may be allowed. */
static void attempt(struct side *me, int form, int op, uint64_t key, uint64_t address, int error)
{
	uint64_t sent = 1, compared = 5, result = 99;
	struct operands with = { (char *)&sent, (char *)&compared, (char *)&result };
	struct target to = { key, address };
	struct fi_context context;
	struct fi_cq_err_entry entry;

	post(me, form, ONE, op, FI_UINT64, 1, &with, &to, &context);
	if (!error) {
		completion(me->tx);
		return;
	}
	entry = failure(me->tx);
	SAME(entry.err, error);
	CHECK(entry.op_context == &context);
	SAME(entry.flags, FI_ATOMIC | (form == BASE ? FI_WRITE : FI_READ));
	CHECK(strlen(fi_cq_strerror(me->tx, entry.prov_errno, NULL, NULL, 0)) > 10);
	SAME(result, 99);
}

static void atomic_refused(struct side *me)
{
	uint64_t memory[2];

	side_begin(me, &(struct setup){ .caps = CAPS });
	for (int rights = 0; rights < 4; rights++) {
		uint64_t access = (rights & 1 ? FI_REMOTE_READ : 0) | (rights & 2 ? FI_REMOTE_WRITE : 0);
		/* A region that is for nobody has no key. */
		int denied = access ? FI_EACCES : FI_EKEYREJECTED;
		struct target target;
		struct fid_mr *mr;

		memory[0] = 5, memory[1] = 6;
		mr = offer(me, memory, sizeof(memory), access, &target);
		if (me->rank == 0) {
			attempt(me, BASE, FI_SUM, KEY, 0, rights & 2 ? 0 : denied);
			attempt(me, FETCH, FI_SUM, KEY, 0, rights == 3 ? 0 : denied);
			attempt(me, FETCH, FI_ATOMIC_READ, KEY, 0, rights & 1 ? 0 : denied);
			attempt(me, COMPARE, FI_CSWAP, KEY, 0, rights == 3 ? 0 : denied);
			for (int form = BASE; form <= COMPARE; form++) {
				int op = form == COMPARE ? FI_MSWAP : FI_MAX;

				attempt(me, form, op, KEY + 1, 0, FI_EKEYREJECTED);
				attempt(me, form, op, KEY, 9, denied);
				attempt(me, form, op, KEY, UINT64_MAX, denied);
			}
		}
		barrier(me);
		if (me->rank == 1) {
			SAME(memory[0], rights == 3 ? 7 : rights & 2 ? 6 : 5);
			SAME(memory[1], 6);
		}
		close_region(mr);
		barrier(me);
	}
	side_end(me);
	/* A target that lets nobody write, whatever its regions say. */
	side_begin(me, &(struct setup){ .caps = me->rank ? FI_MSG | FI_ATOMIC | FI_REMOTE_READ : CAPS });
	{
		struct target target;
		struct fid_mr *mr = offer(me, memory, sizeof(memory), RIGHTS, &target);

		if (me->rank == 0) {
			attempt(me, BASE, FI_SUM, KEY, 0, FI_EACCES);
			attempt(me, FETCH, FI_SUM, KEY, 0, FI_EACCES);
			attempt(me, FETCH, FI_ATOMIC_READ, KEY, 0, 0);
		}
		barrier(me);
		close_region(mr);
	}
	side_end(me);
}

/* Calls that are wrong in themselves. */
static void atomic_wrong(struct side *me)
{
	char b[2 * MOST];
	struct fi_ioc five[5] = { { b, 1 }, { b, 1 }, { b, 1 }, { b, 1 }, { b, 1 } };
	struct fi_rma_ioc remote[5] = { { 0, 1, KEY }, { 0, 1, KEY }, { 0, 1, KEY }, { 0, 1, KEY }, { 0, 1, KEY } };
	struct fi_msg_atomic msg = { .msg_iov = five, .iov_count = 4, .rma_iov = remote, .rma_iov_count = 4,
				     .datatype = FI_UINT8, .op = FI_SUM };
	struct fi_atomic_attr attr;
	size_t count, size = 64, len = sizeof(size);
	const int t = FI_UINT8;

	side_begin(me, &(struct setup){ .caps = CAPS });
	msg.addr = me->peer;
	SAME(fi_atomicv(me->ep, five, NULL, 5, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EINVAL);
	SAME(fi_atomicv(me->ep, five, NULL, 0, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EINVAL);
	SAME(fi_atomic(me->ep, b, 0, NULL, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EINVAL);
	SAME(fi_atomic(me->ep, NULL, 1, NULL, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EINVAL);
	SAME(fi_atomic(me->ep, b, SIZE_MAX, NULL, me->peer, 0, KEY, FI_UINT64, FI_SUM, NULL), -FI_EINVAL);
	SAME(fi_atomic(me->ep, b, MOST + 1, NULL, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EMSGSIZE);
	SAME(fi_atomic(me->ep, b, MOST / 8 + 1, NULL, me->peer, 0, KEY, FI_UINT64, FI_SUM, NULL), -FI_EMSGSIZE);
	SAME(fi_atomic(me->ep, b, 1, NULL, 12345, 0, KEY, t, FI_SUM, NULL), -FI_EINVAL);
	SAME(fi_atomic(me->ep, b, 1, NULL, me->peer, 0, KEY, 16, FI_SUM, NULL), -FI_EOPNOTSUPP);
	SAME(fi_atomic(me->ep, b, 1, NULL, me->peer, 0, KEY, t, 19, NULL), -FI_EOPNOTSUPP);
	SAME(fi_fetch_atomic(me->ep, b, 1, NULL, NULL, NULL, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EINVAL);
	SAME(fi_compare_atomic(me->ep, b, 1, NULL, NULL, NULL, b, NULL, me->peer, 0, KEY, t, FI_CSWAP, NULL),
	     -FI_EINVAL);
	SAME(fi_fetch_atomicv(me->ep, five, NULL, 2, five, NULL, 3, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EINVAL);
	SAME(fi_compare_atomicv(me->ep, five, NULL, 2, five, NULL, 3, five, NULL, 2, me->peer, 0, KEY, t, FI_CSWAP,
				NULL), -FI_EINVAL);
	SAME(fi_atomicmsg(me->ep, NULL, 0), -FI_EINVAL);
	SAME(fi_atomicmsg(me->ep, &msg, FI_TAGGED), -FI_EOPNOTSUPP);
	SAME(fi_atomicmsg(me->ep, &msg, FI_COMMIT_COMPLETE), -FI_EOPNOTSUPP);
	msg.rma_iov_count = 5;
	SAME(fi_atomicmsg(me->ep, &msg, 0), -FI_EINVAL);
	msg.rma_iov_count = 3;
	SAME(fi_atomicmsg(me->ep, &msg, 0), -FI_EINVAL);
	SAME(fi_fetch_atomicmsg(me->ep, &msg, five, NULL, 4, 0), -FI_EINVAL);
	SAME(fi_compare_atomicmsg(me->ep, &msg, five, NULL, 4, five, NULL, 4, 0), -FI_EOPNOTSUPP);
	SAME(fi_atomicvalid(me->ep, t, FI_SUM, NULL), -FI_EINVAL);
	SAME(fi_query_atomic(me->domain, t, FI_SUM, NULL, 0), -FI_EINVAL);
	SAME(fi_query_atomic(me->domain, t, FI_SUM, &attr, FI_FETCH_ATOMIC | FI_COMPARE_ATOMIC), -FI_EINVAL);
	SAME(fi_query_atomic(me->domain, t, FI_SUM, &attr, 1), -FI_EINVAL);
	if (fi_setopt(&me->ep->fid, FI_OPT_ENDPOINT, 15 /* FI_OPT_MAX_ATOMIC_SIZE */, &size, len) == 0) {
		OK(fi_atomicvalid(me->ep, FI_UINT32, FI_SUM, &count));
		SAME(count, 16);
		size = 7;
		OK(fi_setopt(&me->ep->fid, FI_OPT_ENDPOINT, 15, &size, len));
		SAME(fi_atomicvalid(me->ep, FI_UINT64, FI_SUM, &count), -FI_EOPNOTSUPP);
		SAME(count, 16);
		size = 64;
		OK(fi_setopt(&me->ep->fid, FI_OPT_ENDPOINT, 15, &size, len));
		SAME(fi_atomic(me->ep, b, 65, NULL, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EMSGSIZE);
		size = MOST + 1;
		SAME(fi_setopt(&me->ep->fid, FI_OPT_ENDPOINT, 15, &size, len), -FI_EINVAL);
	}
	nothing_in(me->tx, 20);
	side_end(me);
	/* Endpoints without the capability, and with a part of it. */
	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_RMA });
	SAME(fi_atomic(me->ep, b, 1, NULL, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EOPNOTSUPP);
	SAME(fi_atomicvalid(me->ep, t, FI_SUM, &count), -FI_EOPNOTSUPP);
	side_end(me);
	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_ATOMIC | FI_READ | FI_REMOTE_READ | FI_REMOTE_WRITE });
	SAME(fi_atomic(me->ep, b, 1, NULL, me->peer, 0, KEY, t, FI_SUM, NULL), -FI_EOPNOTSUPP);
	SAME(fi_fetch_atomicvalid(me->ep, t, FI_SUM, &count), -FI_EOPNOTSUPP);
	OK(fi_fetch_atomicvalid(me->ep, t, FI_ATOMIC_READ, &count));
	side_end(me);
}

/* --- counters, order, progress --- */

static void atomic_counters(struct side *me)
{
	enum { COUNT = 20 };
	uint64_t memory[4] = { 0 }, one = 1, old;
	struct fid_cntr *of_region[2];
	struct target target;
	struct fid_mr *mr;

	side_begin(me, &(struct setup){ .caps = CAPS, .rma_counters = true, .bind_flags = FI_SELECTIVE_COMPLETION });
	for (int i = 0; i < 2; i++)
		OK(fi_cntr_open(me->domain, &(struct fi_cntr_attr){ .wait_obj = FI_WAIT_UNSPEC }, &of_region[i], NULL));
	mr = offer(me, memory, sizeof(memory), RIGHTS, &target);
	if (mr) {
		OK(fi_mr_bind(mr, &of_region[0]->fid, FI_REMOTE_READ));
		OK(fi_mr_bind(mr, &of_region[1]->fid, FI_REMOTE_WRITE));
	}
	barrier(me);
	if (me->rank == 0) {
		for (int i = 0; i < COUNT; i++) {
			POST(me, fi_atomic(me->ep, &one, 1, NULL, me->peer, 0, KEY, FI_UINT64, FI_SUM, NULL));
			POST(me, fi_inject_atomic(me->ep, &one, 1, me->peer, 8, KEY, FI_UINT64, FI_SUM));
			POST(me, fi_fetch_atomic(me->ep, &one, 1, NULL, &old, NULL, me->peer, 16, KEY, FI_UINT64, FI_SUM,
						 NULL));
		}
		OK(fi_cntr_wait(me->rma[WRITES], 2 * COUNT, PATIENCE_S * 1000));
		OK(fi_cntr_wait(me->rma[READS], COUNT, PATIENCE_S * 1000));
		POST(me, fi_atomic(me->ep, &one, 1, NULL, me->peer, 0, KEY + 1, FI_UINT64, FI_SUM, NULL));
		SAME(failure(me->tx).err, FI_EKEYREJECTED);
		SAME(fi_cntr_readerr(me->rma[READS]), 0);
		SAME(fi_cntr_readerr(me->rma[WRITES]), 1);
		SAME(fi_cntr_read(me->rma[REMOTE_WRITES]), 0);
		nothing_in(me->tx, 20);
		/* One of them asks. */
		{
			struct fi_ioc part = { &one, 1 };
			struct fi_rma_ioc remote = { 24, 1, KEY };
			struct fi_msg_atomic msg = { .msg_iov = &part, .iov_count = 1, .addr = me->peer,
						     .rma_iov = &remote, .rma_iov_count = 1, .datatype = FI_UINT64,
						     .op = FI_SUM, .context = &one };

			POST(me, fi_atomicmsg(me->ep, &msg, 0));
			POST(me, fi_atomicmsg(me->ep, &msg, FI_COMPLETION | FI_FENCE));
			CHECK(completion(me->tx).op_context == &one);
			nothing_in(me->tx, 20);
		}
	} else {
		OK(fi_cntr_wait(of_region[1], 2 * COUNT + 2, PATIENCE_S * 1000));
		OK(fi_cntr_wait(of_region[0], COUNT, PATIENCE_S * 1000));
	}
	barrier(me);
	if (me->rank == 1) {
		SAME(fi_cntr_read(me->rma[REMOTE_WRITES]), 2 * COUNT + 2);
		SAME(fi_cntr_read(me->rma[REMOTE_READS]), COUNT);
		/* What fetches has changed the region too (fi_mr.3). */
		SAME(fi_cntr_read(of_region[1]), 3 * COUNT + 2);
		SAME(fi_cntr_read(of_region[0]), COUNT);
		SAME(memory[0], COUNT);
		SAME(memory[1], COUNT);
		SAME(memory[2], COUNT);
		SAME(memory[3], 2);
		nothing_in(me->rx, 20);
	}
	close_region(mr);
	for (int i = 0; i < 2; i++)
		OK(fi_close(&of_region[i]->fid));
	side_end(me);
}

/* Many at once, and between writes and reads: each sees what was before it. */
static void atomic_order(struct side *me)
{
	enum { COUNT = 600 };
	uint64_t old[COUNT], first[COUNT], read[COUNT];
	char *memory = need(100000), *local = need(100000);
	uint64_t one = 1, ended = 0, zero = 0;
	struct target target;
	struct fid_mr *mr;

	side_begin(me, &(struct setup){ .caps = CAPS, .cq_size = 8192 });
	mr = offer(me, memory, 100000, RIGHTS, &target);
	if (me->rank == 0) {
		for (uint64_t i = 0; i < COUNT; i++) {
			POST(me, fi_fetch_atomic(me->ep, &one, 1, NULL, &old[i], NULL, me->peer, 0, KEY, FI_UINT64,
						 FI_SUM, NULL));
			POST(me, fi_atomic(me->ep, &one, 1, NULL, me->peer, 0, KEY, FI_UINT64, FI_SUM, NULL));
		}
		for (ended = 0; ended < 2 * COUNT; ended++)
			completion(me->tx);
		for (uint64_t i = 0; i < COUNT; i++)
			SAME(old[i], 2 * i);
		/* A write of any length, an operation on its first word, a read. */
		for (uint64_t i = 0; i < 40; i++) {
			size_t len = i % 2 ? 90000 : 8;

			memcpy(local, &i, sizeof(i));
			POST(me, fi_write(me->ep, local, len, NULL, me->peer, 0, KEY, NULL));
			POST(me, fi_fetch_atomic(me->ep, &one, 1, NULL, &first[i], NULL, me->peer, 0, KEY, FI_UINT64,
						 FI_SUM, NULL));
			POST(me, fi_read(me->ep, &read[i], 8, NULL, me->peer, 0, KEY, NULL));
			for (ended = 0; ended < 3; ended++)
				completion(me->tx);
			SAME(first[i], i);
			SAME(read[i], i + 1);
		}
		POST(me, fi_atomic(me->ep, &zero, 1, NULL, me->peer, 0, KEY, FI_UINT64, FI_ATOMIC_WRITE, NULL));
		completion(me->tx);
	}
	barrier(me);
	if (me->rank == 1)
		SAME(*(uint64_t *)memory, 0);
	close_region(mr);
	side_end(me);
	free(memory);
	free(local);
}

/* A target that computes has its memory changed all the same where progress is automatic. */
static void atomic_auto(struct side *me)
{
	uint64_t memory = 0, one = 1, old = 0;
	struct target target;
	struct fid_mr *mr;
	char byte = 'b';

	side_begin(me, &(struct setup){ .caps = CAPS, .progress = FI_PROGRESS_AUTO });
	mr = offer(me, &memory, sizeof(memory), RIGHTS, &target);
	barrier(me);
	if (me->rank == 0) {
		for (uint64_t i = 0; i < 5; i++) {
			POST(me, fi_fetch_atomic(me->ep, &one, 1, NULL, &old, NULL, me->peer, 0, KEY, FI_UINT64, FI_SUM,
						 NULL));
			completion(me->tx);
			SAME(old, i);
			sleep_ms(30);
		}
		tell(me, &byte, 1);
	} else {
		hear(me, &byte, 1);
		SAME(memory, 5);
	}
	close_region(mr);
	side_end(me);
}

/* To itself, through an endpoint that has nothing but atomic operations; the first thing that it does. */
static void atomic_to_oneself(struct side *me)
{
	uint64_t memory = 7, one = 1, old = 0;
	char name[NAME_MAX_LEN];
	struct fid_mr *mr;
	fi_addr_t self;

	side_begin(me, &(struct setup){ .caps = FI_ATOMIC });
	OK(fi_mr_reg(me->domain, &memory, sizeof(memory), RIGHTS, 0, KEY, 0, &mr, NULL));
	name_of(me->ep, name);
	self = insert(me, name);
	POST(me, fi_fetch_atomic(me->ep, &one, 1, NULL, &old, NULL, self, 0, KEY, FI_UINT64, FI_SUM, NULL));
	completion(me->tx);
	SAME(old, 7);
	SAME(memory, 8);
	OK(fi_close(&mr->fid));
	side_end(me);
}

/* --- threads --- */

enum { HAMMERS = 4, BLOWS = 400 };

/* An endpoint with its own queue, whose thread adds to what everybody adds to. */
struct hammer {
	struct side *side;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_ep *ep;
	struct fid_cq *cq;
	fi_addr_t to;
	pthread_t thread;
	uint64_t sum_of_old;
};

static void hammer_open(struct hammer *hammer, struct side *me, struct fid_domain *domain, struct fid_av *av)
{
	*hammer = (struct hammer){ .side = me, .domain = domain, .av = av };
	OK(fi_cq_open(domain, &(struct fi_cq_attr){ .format = FI_CQ_FORMAT_TAGGED }, &hammer->cq, NULL));
	OK(fi_endpoint(domain, me->info, &hammer->ep, NULL));
	OK(fi_ep_bind(hammer->ep, &av->fid, 0));
	OK(fi_ep_bind(hammer->ep, &hammer->cq->fid, FI_TRANSMIT | FI_RECV));
	OK(fi_enable(hammer->ep));
}

static void await(struct hammer *hammer)
{
	struct fi_cq_tagged_entry entry;
	double end = now() + PATIENCE_S;
	ssize_t n;

	while ((n = fi_cq_read(hammer->cq, &entry, 1)) == -FI_EAGAIN)
		CHECK(now() < end);
	SAME(n, 1);
}

/* Adds one to a 64-bit number, a 128-bit one and a complex one. */
static void *strike(void *argument)
{
	struct hammer *hammer = argument;
	uint64_t one = 1, old;
	u128 long_one = 1;
	double complex both = 1 + 1 * I;

	for (int i = 0; i < BLOWS; i++) {
		ssize_t rc;

#define TRY(call) do { while ((rc = (call)) == -FI_EAGAIN) fi_cq_read(hammer->cq, NULL, 0); OK(rc); await(hammer); } while (0)
		TRY(fi_fetch_atomic(hammer->ep, &one, 1, NULL, &old, NULL, hammer->to, 0, KEY, FI_UINT64, FI_SUM, NULL));
		hammer->sum_of_old += old;
		TRY(fi_atomic(hammer->ep, &long_one, 1, NULL, hammer->to, 16, KEY, 15, FI_SUM, NULL));
		TRY(fi_atomic(hammer->ep, &both, 1, NULL, hammer->to, 32, KEY, FI_DOUBLE_COMPLEX, FI_SUM, NULL));
	}
	return NULL;
}

/*
 * Several threads of both sides add through endpoints of two domains to the same numbers of rank 1, each of which is
 * reached through both domains. Meanwhile a thread of rank 1 that has nothing to do with libfabric adds, too. Nothing
 * is lost, and every value is seen once.
 */
static void *bystander(void *argument)
{
	uint64_t *number = argument, sum = 0;

	for (int i = 0; i < BLOWS; i++)
		sum += __atomic_fetch_add(number, 1, __ATOMIC_RELAXED);
	*(uint64_t *)(number + 8) = sum;
	return NULL;
}

static void atomic_threads(struct side *me)
{
	uint64_t memory[16] __attribute__((aligned(64))) = { 0 };
	struct hammer hammers[HAMMERS];
	struct fid_domain *other;
	struct fid_av *other_av;
	struct fid_mr *mr[2];
	char names[2][NAME_MAX_LEN], mine[NAME_MAX_LEN];
	uint64_t sum = 0, theirs = 0;
	pthread_t thread;

	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_ATOMIC, .threading = FI_THREAD_SAFE,
					.progress = FI_PROGRESS_AUTO });
	OK(fi_domain(me->fabric, me->info, &other, NULL));
	OK(fi_av_open(other, &(struct fi_av_attr){ .type = FI_AV_TABLE }, &other_av, NULL));
	for (int i = 0; i < HAMMERS; i++)
		hammer_open(&hammers[i], me, i % 2 ? other : me->domain, i % 2 ? other_av : me->av);
	if (me->rank == 1) {
		OK(fi_mr_reg(me->domain, memory, 64, RIGHTS, 0, KEY, 0, &mr[0], NULL));
		OK(fi_mr_reg(other, memory, 64, RIGHTS, 0, KEY, 0, &mr[1], NULL));
		for (int i = 0; i < 2; i++)
			name_of(hammers[i].ep, names[i]);
		tell(me, names, sizeof(names));
	} else {
		hear(me, names, sizeof(names));
	}
	for (int i = 0; i < HAMMERS; i++)
		SAME(fi_av_insert(hammers[i].av, names[i / 2], 1, &hammers[i].to, 0, NULL), 1);
	/* Nobody adds before everything is there. */
	name_of(me->ep, mine);
	barrier(me);
	if (me->rank == 1)
		OK(pthread_create(&thread, NULL, bystander, memory));
	for (int i = 0; i < HAMMERS; i++)
		OK(pthread_create(&hammers[i].thread, NULL, strike, &hammers[i]));
	for (int i = 0; i < HAMMERS; i++) {
		OK(pthread_join(hammers[i].thread, NULL));
		sum += hammers[i].sum_of_old;
	}
	if (me->rank == 1)
		OK(pthread_join(thread, NULL));
	barrier(me);
	if (me->rank == 0) {
		tell(me, &sum, sizeof(sum));
	} else {
		uint64_t blows = 2 * HAMMERS * BLOWS, all = blows + BLOWS;
		double complex total;

		hear(me, &theirs, sizeof(theirs));
		SAME(memory[0], all);
		SAME(memory[2], blows);
		SAME(memory[3], 0);
		memcpy(&total, memory + 4, sizeof(total));
		CHECK(total == (double)blows + (double)blows * I);
		/* 0 + 1 + ... + (all - 1) */
		SAME(sum + theirs + memory[8], all * (all - 1) / 2);
		for (int i = 0; i < 2; i++)
			OK(fi_close(&mr[i]->fid));
	}
	barrier(me);
	for (int i = 0; i < HAMMERS; i++) {
		OK(fi_close(&hammers[i].ep->fid));
		OK(fi_close(&hammers[i].cq->fid));
	}
	OK(fi_close(&other_av->fid));
	OK(fi_close(&other->fid));
	side_end(me);
}

const struct group atomic_groups[] = {
	{ "atomic_forms", atomic_forms },
	{ "atomic_forms_basic", atomic_forms_basic },
	{ "atomic_refused", atomic_refused },
	{ "atomic_wrong", atomic_wrong },
	{ "atomic_counters", atomic_counters },
	{ "atomic_order", atomic_order },
	{ "atomic_auto", atomic_auto },
	{ "atomic_to_oneself", atomic_to_oneself },
	{ "atomic_threads", atomic_threads },
	{ NULL, NULL },
};
