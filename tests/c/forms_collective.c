/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Collective operations: each side has two endpoints, which are four members of a group. */
#include "all_forms.h"

#include <pthread.h>
#include <rdma/fi_collective.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CAPS (FI_MSG | FI_COLLECTIVE)
#define MEMBERS 4
#define COUNT 3000

/* What one endpoint has of the group. */
struct member {
	struct fid_ep *ep;
	struct fid_mc *mc;
	/* Its number in the group. */
	int number;
};

/* Of a side, which may be a thread. */
static __thread struct fid_eq *eq;
static __thread fi_addr_t addresses[MEMBERS];
/* What the next event queue is to be; null: as most are. */
static __thread struct fi_eq_attr *wait_attr;

static struct fid_ep *endpoint_with_events(struct side *me)
{
	struct fid_ep *ep;

	OK(fi_endpoint(me->domain, me->info, &ep, NULL));
	OK(fi_ep_bind(ep, &me->av->fid, 0));
	OK(fi_ep_bind(ep, &me->tx->fid, FI_TRANSMIT));
	OK(fi_ep_bind(ep, &me->rx->fid, FI_RECV));
	OK(fi_ep_bind(ep, &eq->fid, 0));
	OK(fi_enable(ep));
	return ep;
}

static struct fid_av_set *whole_set(struct side *me)
{
	struct fi_av_set_attr attr = {
		.start_addr = FI_ADDR_NOTAVAIL, .end_addr = FI_ADDR_NOTAVAIL, .count = MEMBERS,
	};
	struct fid_av_set *set;

	OK(fi_av_set(me->av, &attr, &set, NULL));
	/* Not the order of the vector. */
	for (int i = MEMBERS - 1; i >= 0; i--)
		OK(fi_av_set_insert(set, addresses[i]));
	return set;
}

/* Both endpoints of a side join, and hear of it from the queue alone. */
static void join(struct side *me, struct member members[2], struct fid_av_set *set)
{
	fi_addr_t group;

	OK(fi_av_set_addr(set, &group));
	for (int i = 0; i < 2; i++)
		OK(fi_join_collective(members[i].ep, group, set, 0, &members[i].mc, &members[i]));
	for (int i = 0; i < 2; i++) {
		struct fi_eq_entry entry;
		uint32_t event;

		SAME(fi_eq_sread(eq, &event, &entry, sizeof(entry), PATIENCE_S * 1000, 0), sizeof(entry));
		SAME(event, FI_JOIN_COMPLETE);
		struct member *member = entry.context;
		CHECK(member == &members[0] || member == &members[1]);
		CHECK(entry.fid == &member->mc->fid);
	}
	(void)me;
}

static void begin(struct side *me, struct member members[2])
{
	char names[MEMBERS][NAME_MAX_LEN];

	side_open(me, &(struct setup){ .caps = CAPS });
	OK(fi_eq_open(me->fabric, wait_attr ? wait_attr : &(struct fi_eq_attr){ .wait_obj = FI_WAIT_UNSPEC }, &eq, NULL));
	for (int i = 0; i < 2; i++) {
		members[i].ep = endpoint_with_events(me);
		name_of(members[i].ep, names[2 * me->rank + i]);
		members[i].number = MEMBERS - 1 - (2 * me->rank + i);
	}
	tell(me, names[2 * me->rank], sizeof(*names) * 2);
	hear(me, names[2 * !me->rank], sizeof(*names) * 2);
	for (int i = 0; i < MEMBERS; i++)
		addresses[i] = insert(me, names[i]);
}

static void end(struct side *me, struct member members[2])
{
	for (int i = 0; i < 2; i++)
		OK(fi_close(&members[i].ep->fid));
	OK(fi_close(&eq->fid));
	side_close(me);
}

struct groups {
	struct side *me;
	struct member *members;
	struct fid_av_set *set;
};

static void close_groups(void *argument)
{
	struct groups *groups = argument;

	for (int i = 0; i < 2; i++)
		OK(fi_close(&groups->members[i].mc->fid));
	OK(fi_close(&groups->set->fid));
	end(groups->me, groups->members);
}

static void both_complete(struct side *me, struct member members[2])
{
	for (int i = 0; i < 2; i++) {
		struct fi_cq_tagged_entry entry = completion(me->tx);

		CHECK(entry.op_context == &members[0] || entry.op_context == &members[1]);
		CHECK(entry.flags & FI_COLLECTIVE);
	}
}

static uint32_t element(int number, int i)
{
	return (uint32_t)(number * 1000003 + i * 7);
}

/* Does an operation with both endpoints, and looks at what they get. */
static void operate(struct side *me, struct member members[2], enum fi_collective_op coll)
{
	size_t bytes = MEMBERS * COUNT * sizeof(uint32_t);
	uint32_t *in[2], *out[2];
	/* Member 1 is the root. */
	fi_addr_t root = addresses[MEMBERS - 2];

	for (int m = 0; m < 2; m++) {
		fi_addr_t to = fi_mc_addr(members[m].mc);
		struct fid_ep *ep = members[m].ep;
		void *me_too = &members[m];

		in[m] = need(bytes);
		out[m] = need(bytes);
		memset(out[m], 0, bytes);
		for (int i = 0; i < MEMBERS * COUNT; i++)
			in[m][i] = element(members[m].number, i);
		switch (coll) {
		case FI_BARRIER:
			OK(fi_barrier(ep, to, me_too));
			break;
		case FI_BROADCAST:
			memcpy(out[m], in[m], bytes);
			OK(fi_broadcast(ep, out[m], COUNT, NULL, to, root, FI_UINT32, 0, me_too));
			break;
		case FI_ALLTOALL:
			OK(fi_alltoall(ep, in[m], COUNT, NULL, out[m], NULL, to, FI_UINT32, 0, me_too));
			break;
		case FI_ALLREDUCE:
			OK(fi_allreduce(ep, in[m], COUNT, NULL, out[m], NULL, to, FI_UINT32, FI_SUM, 0, me_too));
			break;
		case FI_ALLGATHER:
			OK(fi_allgather(ep, in[m], COUNT, NULL, out[m], NULL, to, FI_UINT32, 0, me_too));
			break;
		case FI_REDUCE_SCATTER:
			OK(fi_reduce_scatter(ep, in[m], COUNT, NULL, out[m], NULL, to, FI_UINT32, FI_SUM, 0, me_too));
			break;
		case FI_REDUCE:
			OK(fi_reduce(ep, in[m], COUNT, NULL, out[m], NULL, to, root, FI_UINT32, FI_SUM, 0, me_too));
			break;
		case FI_SCATTER:
			OK(fi_scatter(ep, in[m], COUNT, NULL, out[m], NULL, to, root, FI_UINT32, 0, me_too));
			break;
		default:
			OK(fi_gather(ep, in[m], COUNT, NULL, out[m], NULL, to, root, FI_UINT32, 0, me_too));
		}
	}
	both_complete(me, members);
	for (int m = 0; m < 2; m++) {
		int number = members[m].number;

		for (int i = 0; i < COUNT; i++) {
			uint32_t sum = 0, part_sum = 0;

			for (int k = 0; k < MEMBERS; k++) {
				sum += element(k, i);
				part_sum += element(k, number * COUNT + i);
			}
			if (coll == FI_BROADCAST)
				SAME(out[m][i], element(1, i));
			if (coll == FI_ALLREDUCE || (coll == FI_REDUCE && number == 1))
				SAME(out[m][i], sum);
			if (coll == FI_REDUCE_SCATTER)
				SAME(out[m][i], part_sum);
			if (coll == FI_SCATTER)
				SAME(out[m][i], element(1, number * COUNT + i));
			for (int k = 0; k < MEMBERS; k++) {
				if (coll == FI_ALLTOALL)
					SAME(out[m][k * COUNT + i], element(k, number * COUNT + i));
				if (coll == FI_ALLGATHER || (coll == FI_GATHER && number == 1))
					SAME(out[m][k * COUNT + i], element(k, i));
			}
		}
		free(in[m]);
		free(out[m]);
	}
}

static void collectives(struct side *me)
{
	struct fi_collective_attr attr = { .op = FI_SUM, .datatype = FI_UINT32 };
	struct member members[2];
	struct fid_av_set *set;

	begin(me, members);
	set = whole_set(me);
	join(me, members, set);
	for (enum fi_collective_op coll = FI_BARRIER; coll <= FI_GATHER; coll++) {
		OK(fi_query_collective(me->domain, coll, &attr, 0));
		for (int round = 0; round < 5; round++)
			operate(me, members, coll);
	}
	attr.op = FI_BOR;
	attr.datatype = FI_FLOAT;
	SAME(fi_query_collective(me->domain, FI_ALLREDUCE, &attr, 0), -FI_EOPNOTSUPP);
	SAME(fi_barrier(members[0].ep, 4711, NULL), -FI_EINVAL);
	SAME(fi_close(&members[0].ep->fid), -FI_EBUSY);
	barrier(me);
	close_groups(&(struct groups){ me, members, set });
}

/* A forked child that closes everything leaves no group in its parent's name. */
static void forked_groups(struct side *me)
{
	struct member members[2];
	struct fid_av_set *set;

	begin(me, members);
	set = whole_set(me);
	join(me, members, set);
	operate(me, members, FI_BARRIER);
	if (me->rank == 0) {
		/* It runs while the child closes. */
		for (int i = 0; i < 2; i++)
			OK(fi_barrier(members[i].ep, fi_mc_addr(members[i].mc), &members[i]));
		in_child(close_groups, &(struct groups){ me, members, set });
	}
	barrier(me);
	for (int i = 0; i < 2 && me->rank == 1; i++)
		OK(fi_barrier(members[i].ep, fi_mc_addr(members[i].mc), &members[i]));
	both_complete(me, members);
	for (enum fi_collective_op coll = FI_BARRIER; coll <= FI_GATHER; coll++)
		operate(me, members, coll);
	close_groups(&(struct groups){ me, members, set });
}

/* Sets are what fi_av_set.3 says: the group of a part of them, and of one member alone. */
static void collective_sets(struct side *me)
{
	struct fi_av_set_attr all = { .flags = FI_UNIVERSE }, one = { .count = 1 };
	struct member members[2];
	struct fid_av_set *a, *b;

	begin(me, members);
	OK(fi_av_set(me->av, &all, &a, NULL));
	SAME(fi_av_set_insert(a, addresses[0]), -FI_EINVAL);
	one.start_addr = one.end_addr = addresses[2 * me->rank];
	one.stride = 1;
	OK(fi_av_set(me->av, &one, &b, NULL));
	OK(fi_av_set_diff(a, b));
	OK(fi_av_set_union(a, b));
	OK(fi_av_set_intersect(a, b));
	SAME(fi_close(&me->av->fid), -FI_EBUSY);
	/* What is left is the first endpoint of this side. */
	fi_addr_t group;
	struct fi_eq_entry entry;
	uint32_t event;
	OK(fi_av_set_addr(a, &group));
	SAME(fi_join_collective(members[1].ep, group, a, 0, &members[1].mc, NULL), -FI_EINVAL);
	OK(fi_join_collective(members[0].ep, group, a, 0, &members[0].mc, NULL));
	SAME(fi_eq_sread(eq, &event, &entry, sizeof(entry), PATIENCE_S * 1000, 0), sizeof(entry));
	OK(fi_barrier(members[0].ep, fi_mc_addr(members[0].mc), &members[0]));
	CHECK(completion(me->tx).op_context == &members[0]);
	OK(fi_close(&members[0].mc->fid));
	OK(fi_av_set_remove(a, addresses[2 * me->rank]));
	SAME(fi_av_set_remove(a, addresses[2 * me->rank]), -FI_EINVAL);
	OK(fi_close(&a->fid));
	OK(fi_close(&b->fid));
	barrier(me);
	end(me, members);
}

/* A member closes its endpoint while the others wait for it. */
static void collective_departure(struct side *me)
{
	struct member members[2];
	struct fid_av_set *set;

	begin(me, members);
	set = whole_set(me);
	join(me, members, set);
	barrier(me);
	if (me->rank == 1) {
		OK(fi_close(&members[1].mc->fid));
		OK(fi_close(&members[1].ep->fid));
		OK(fi_barrier(members[0].ep, fi_mc_addr(members[0].mc), &members[0]));
		CHECK(failure(me->tx).op_context == &members[0]);
		members[1].ep = another_endpoint(me);
		OK(fi_close(&members[0].mc->fid));
	} else {
		for (int i = 0; i < 2; i++)
			OK(fi_barrier(members[i].ep, fi_mc_addr(members[i].mc), &members[i]));
		for (int i = 0; i < 2; i++) {
			struct fi_cq_err_entry error = failure(me->tx);

			CHECK(error.op_context == &members[0] || error.op_context == &members[1]);
			CHECK(error.err > 0);
		}
		CHECK(fi_barrier(members[0].ep, fi_mc_addr(members[0].mc), NULL) < 0);
		for (int i = 0; i < 2; i++)
			OK(fi_close(&members[i].mc->fid));
	}
	OK(fi_close(&set->fid));
	barrier(me);
	end(me, members);
}

/*
 * One thread has five endpoints with a queue each, which are a group: the one that joined first needs a message of the
 * second, which sends it after one of the last. The thread asks the first queue alone.
 */
static void collective_queues(struct side *me)
{
	enum { ALONE = 5 };
	struct fi_av_set_attr all = { .flags = FI_UNIVERSE };
	struct fid_eq *eqs[ALONE];
	struct fid_ep *eps[ALONE];
	struct fid_mc *mcs[ALONE];
	struct fid_av_set *set;
	struct fi_eq_entry entry;
	char name[NAME_MAX_LEN];
	fi_addr_t group;
	uint32_t event;

	side_open(me, &(struct setup){ .caps = CAPS });
	for (int i = 0; i < ALONE; i++) {
		OK(fi_eq_open(me->fabric, &(struct fi_eq_attr){ .wait_obj = FI_WAIT_UNSPEC }, &eqs[i], NULL));
		eq = eqs[i];
		eps[i] = endpoint_with_events(me);
		name_of(eps[i], name);
		insert(me, name);
	}
	OK(fi_av_set(me->av, &all, &set, NULL));
	OK(fi_av_set_addr(set, &group));
	for (int i = 0; i < ALONE; i++)
		OK(fi_join_collective(eps[i], group, set, 0, &mcs[i], NULL));
	for (int i = 0; i < ALONE; i++) {
		SAME(fi_eq_sread(eqs[i], &event, &entry, sizeof(entry), PATIENCE_S * 1000, 0), sizeof(entry));
		SAME(event, FI_JOIN_COMPLETE);
		CHECK(entry.fid == &mcs[i]->fid);
	}
	/* An endpoint that the vector has twice cannot be two members. */
	struct fid_av_set *twice;
	struct fid_mc *none;

	insert(me, name);
	OK(fi_av_set(me->av, &all, &twice, NULL));
	OK(fi_av_set_addr(twice, &group));
	SAME(fi_join_collective(eps[0], group, twice, 0, &none, NULL), -FI_EINVAL);
	OK(fi_close(&twice->fid));
	for (int i = 0; i < ALONE; i++)
		OK(fi_close(&mcs[i]->fid));
	OK(fi_close(&set->fid));
	for (int i = 0; i < ALONE; i++) {
		OK(fi_close(&eps[i]->fid));
		OK(fi_close(&eqs[i]->fid));
	}
	side_close(me);
}

/* While a join goes on, the event queue has to be read, and its condition may be held meanwhile. */
static void collective_waiting(struct side *me)
{
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_MUTEX_COND, .flags = FI_WRITE };
	struct member members[2];
	struct fi_mutex_cond pair;
	struct fi_eq_entry entry;
	struct fid_av_set *set;
	fi_addr_t group;
	uint32_t event;
	char word[4];

	wait_attr = &attr;
	begin(me, members);
	wait_attr = NULL;
	struct fid *fids[] = { &eq->fid };

	set = whole_set(me);
	OK(fi_av_set_addr(set, &group));
	OK(fi_control(&eq->fid, FI_GETWAIT, &pair));
	if (me->rank == 1)
		hear(me, word, 4);
	for (int i = 0; i < 2; i++)
		OK(fi_join_collective(members[i].ep, group, set, 0, &members[i].mc, &members[i]));
	if (me->rank == 0) {
		SAME(fi_trywait(me->fabric, fids, 1), -FI_EAGAIN);
		tell(me, "join", 4);
	}
	pthread_mutex_lock(pair.mutex);
	for (int i = 0; i < 2;) {
		struct timespec until;
		ssize_t n = fi_eq_read(eq, &event, &entry, sizeof(entry), 0);

		if (n != -FI_EAGAIN) {
			SAME(n, sizeof(entry));
			SAME(event, FI_JOIN_COMPLETE);
			i++;
			continue;
		}
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_sec += PATIENCE_S;
		if (fi_trywait(me->fabric, fids, 1) == 0 && pthread_cond_timedwait(pair.cond, pair.mutex, &until))
			FAIL("the condition is silent for %d s", PATIENCE_S);
	}
	SAME(fi_eq_write(eq, 99, "event", 5, 0), 5);
	pthread_mutex_unlock(pair.mutex);
	barrier(me);
	close_groups(&(struct groups){ me, members, set });
}

const struct group collective_groups[] = {
	{ "collective_waiting", collective_waiting },
	{ "collectives", collectives },
	{ "collective_sets", collective_sets },
	{ "collective_departure", collective_departure },
	{ "collective_queues", collective_queues },
	{ "forked_groups", forked_groups },
	{ NULL, NULL },
};
