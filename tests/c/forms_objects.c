/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* The objects: address vectors, event queues, aliases, many of everything in one process, threading, closing. */
#include "all_forms.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* FI_AV_USER_ID of later versions. */
#define USER_ID (1ULL << 41)

static bool exchanges(struct side *me, struct fid_ep *ep, fi_addr_t peer, size_t len)
{
	struct fi_context contexts[2];
	char *out = need(len), *in = need(len);
	bool good;

	fill(out, len, (uint32_t)me->rank);
	POST(me, fi_trecv(ep, in, len, NULL, FI_ADDR_UNSPEC, 77, 0, &contexts[0]));
	POST(me, fi_tsend(ep, out, len, NULL, peer, 77, &contexts[1]));
	completion(me->tx);
	SAME(completion(me->rx).len, len);
	good = holds(in, len, 1 - (uint32_t)me->rank, 0);
	free(out);
	free(in);
	return good;
}

static struct sockaddr_in loopback(int port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return address;
}

/* Inserted in every way, looked up, shown, removed, inserted again. */
static void vector(struct side *me, enum fi_av_type type)
{
	struct sockaddr_in many[4] = { loopback(1001), loopback(1002), loopback(1003), loopback(1004) }, found;
	fi_addr_t addresses[6];
	char text[128], name[NAME_MAX_LEN];
	struct fid_av *other;
	size_t len;
	int errors[2];

	side_begin(me, &(struct setup){ .av_type = type, .addr_format = FI_SOCKADDR_IN });
	SAME(fi_av_insert(me->av, many, 4, addresses, 0, NULL), 4);
	for (int i = 0; i < 4; i++) {
		len = sizeof(found);
		OK(fi_av_lookup(me->av, addresses[i], &found, &len));
		SAME(len, sizeof(found));
		SAME(found.sin_port, many[i].sin_port);
		SAME(found.sin_addr.s_addr, many[i].sin_addr.s_addr);
		if (type == FI_AV_TABLE)
			SAME(addresses[i], i + 1); /* the peer was first */
	}
	/* A buffer that is too short gets what fits, and the length says what it takes. */
	len = 4;
	memset(&found, 0x66, sizeof(found));
	fi_av_lookup(me->av, addresses[0], &found, &len);
	SAME(len, sizeof(found));
	SAME(found.sin_addr.s_addr, 0x66666666);
	len = sizeof(text);
	CHECK(fi_av_straddr(me->av, &many[0], text, &len) == text);
	CHECK(strstr(text, "127.0.0.1"));
	CHECK(strstr(text, "1001"));
	SAME(fi_av_insertsvc(me->av, "127.0.0.1", "1005", &addresses[4], 0, NULL), 1);
	len = sizeof(found);
	OK(fi_av_lookup(me->av, addresses[4], &found, &len));
	SAME(ntohs(found.sin_port), 1005);
	/* No address of this format, and no port. */
	SAME(fi_av_insertsvc(me->av, "::1", "1005", &addresses[5], 0, NULL), 0);
	SAME(fi_av_insertsvc(me->av, "127.0.0.1", "0", &addresses[5], 0, NULL), 0);
	SAME(fi_av_insertsym(me->av, "127.0.0.1", 2, "2000", 3, addresses, 0, NULL), 6);
	len = sizeof(found);
	OK(fi_av_lookup(me->av, addresses[5], &found, &len));
	SAME(ntohs(found.sin_port), 2002);
	SAME(ntohl(found.sin_addr.s_addr), INADDR_LOOPBACK + 1);
	/* More than there can be is refused, and does not take for ever. */
	SAME(fi_av_insertsym(me->av, "127.0.0.1", SIZE_MAX, "2000", SIZE_MAX, NULL, 0, NULL), -FI_EINVAL);
	SAME(fi_av_insertsym(me->av, "127.0.0.1", SIZE_MAX / 2 + 1, "2000", 2, NULL, 0, NULL), -FI_EINVAL);
	SAME(fi_av_insertsym(me->av, "127.0.0.1", 1, "2000", (size_t)1 << 31, NULL, 0, NULL), -FI_EINVAL);
	SAME(fi_av_insertsym(me->av, "127.0.0.1", (size_t)1 << 31, "2000", 1, NULL, 0, NULL), -FI_EINVAL);
	OK(fi_av_remove(me->av, addresses, 6, 0));
	len = sizeof(found);
	CHECK(fi_av_lookup(me->av, addresses[0], &found, &len) < 0);
	/* What is not offered is refused. */
	SAME(fi_av_insert(me->av, many, 1, addresses, USER_ID, NULL), -FI_EBADFLAGS);
	SAME(fi_av_open(me->domain, &(struct fi_av_attr){ .type = type, .flags = USER_ID }, &other, NULL), -FI_EINVAL);
	/* Not an address. */
	many[1].sin_family = AF_UNIX;
	SAME(fi_av_insert(me->av, many, 2, addresses, FI_SYNC_ERR, errors), 1);
	SAME(errors[0], 0);
	CHECK(errors[1] > 0);
	if (type == FI_AV_TABLE)
		SAME(addresses[0], 6); /* the lowest that is free */
	SAME(addresses[1], FI_ADDR_NOTAVAIL);
	/* The peer goes and comes back. */
	CHECK(exchanges(me, me->ep, me->peer, 1000));
	barrier(me);
	OK(fi_av_remove(me->av, &me->peer, 1, 0));
	CHECK(fi_inject(me->ep, "x", 1, me->peer) < 0);
	name_of(me->ep, name);
	tell(me, name, sizeof(name));
	hear(me, name, sizeof(name));
	me->peer = insert(me, name);
	CHECK(exchanges(me, me->ep, me->peer, 50000));
	side_end(me);
}

static void table(struct side *me)
{
	vector(me, FI_AV_TABLE);
}

static void map(struct side *me)
{
	vector(me, FI_AV_MAP);
}

/* The process that opens a vector by its name first keeps it; all others read it, whatever they ask for. */
static void vector_with_name(struct side *me)
{
	struct fi_av_attr attr = { .type = FI_AV_TABLE };
	struct sockaddr_in one = loopback(1001), found;
	char name[64] = { 0 };
	fi_addr_t address = 0;
	struct fid_av *av;

	side_begin(me, &(struct setup){ .addr_format = FI_SOCKADDR_IN });
	attr.name = name;
	if (me->rank == 0) {
		snprintf(name, sizeof(name), "forms-%d", (int)getpid());
		attr.flags = FI_READ;
		SAME(fi_av_open(me->domain, &attr, &av, NULL), -FI_ENOENT);
		attr.flags = 0;
		OK(fi_av_open(me->domain, &attr, &av, NULL));
		SAME(fi_av_insert(av, &one, 1, &address, 0, NULL), 1);
		tell(me, name, sizeof(name));
	} else {
		hear(me, name, sizeof(name));
		for (int reads = 0; reads < 2; reads++) {
			size_t len = sizeof(found);

			attr.flags = reads ? FI_READ : 0;
			OK(fi_av_open(me->domain, &attr, &av, NULL));
			OK(fi_av_lookup(av, 0, &found, &len));
			SAME(ntohs(found.sin_port), 1001);
			SAME(fi_av_insert(av, &one, 1, &address, 0, NULL), 0);
			SAME(address, FI_ADDR_NOTAVAIL);
			address = 0;
			SAME(fi_av_remove(av, &address, 1, 0), -FI_EACCES);
			if (!reads)
				OK(fi_close(&av->fid));
		}
	}
	barrier(me);
	OK(fi_close(&av->fid));
	side_end(me);
}

/* A receive from a peer of a vector that another process keeps: the entry that it names goes, and another one stays. */
static void vector_with_heirs(struct side *me)
{
	struct fi_av_attr attr = { .type = FI_AV_TABLE };
	char label[64] = { 0 }, name[NAME_MAX_LEN];
	fi_addr_t address = 0, source;
	struct fid_av *av;
	char got = 0;

	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_TAGGED | FI_SOURCE | FI_DIRECTED_RECV });
	attr.name = label;
	if (me->rank == 0) {
		snprintf(label, sizeof(label), "heirs-%d", (int)getpid());
		OK(fi_av_open(me->domain, &attr, &av, NULL));
		name_of(me->ep, name);
		for (uint64_t i = 0; i < 2; i++) {
			SAME(fi_av_insert(av, name, 1, &address, 0, NULL), 1);
			SAME(address, i);
		}
		tell(me, label, sizeof(label));
		hear(me, name, sizeof(name));
		barrier(me);
		address = 0;
		OK(fi_av_remove(av, &address, 1, 0));
		POST(me, fi_tinject(me->ep, "h", 1, insert(me, name), 5));
		barrier(me);
	} else {
		struct fid_av *own = me->av;
		struct fid_ep *ep;

		hear(me, label, sizeof(label));
		attr.flags = FI_READ;
		OK(fi_av_open(me->domain, &attr, &av, NULL));
		me->av = av;
		ep = another_endpoint(me);
		me->av = own;
		name_of(ep, name);
		tell(me, name, sizeof(name));
		OK(fi_trecv(ep, &got, 1, NULL, 0, 5, 0, &got));
		barrier(me);
		CHECK(completion_from(me->rx, &source).op_context == &got);
		CHECK(got == 'h');
		SAME(source, 1);
		barrier(me);
		OK(fi_close(&ep->fid));
	}
	OK(fi_close(&av->fid));
	side_end(me);
}

/* Insertions are reported to an event queue. */
static void vector_events(struct side *me)
{
	struct fi_av_attr attr = { .type = FI_AV_TABLE, .flags = FI_EVENT };
	struct fi_eq_attr queue = { .wait_obj = FI_WAIT_UNSPEC };
	struct sockaddr_in many[2] = { loopback(1001), loopback(1002) };
	struct fi_eq_err_entry error = { 0 };
	struct fi_eq_entry entry;
	fi_addr_t addresses[2];
	struct fid_av *av;
	struct fid_eq *eq;
	uint32_t event;

	side_begin(me, &(struct setup){ .addr_format = FI_SOCKADDR_IN });
	OK(fi_eq_open(me->fabric, &queue, &eq, NULL));
	OK(fi_av_open(me->domain, &attr, &av, NULL));
	OK(fi_av_bind(av, &eq->fid, 0));
	SAME(fi_av_insert(av, many, 2, addresses, 0, &attr), 0);
	SAME(fi_eq_sread(eq, &event, &entry, sizeof(entry), PATIENCE_S * 1000, 0), sizeof(entry));
	SAME(event, FI_AV_COMPLETE);
	CHECK(entry.fid == &av->fid);
	CHECK(entry.context == &attr);
	SAME(entry.data, 2);
	many[0].sin_family = AF_UNIX;
	SAME(fi_av_insert(av, many, 2, addresses, 0, &attr), 0);
	SAME(fi_eq_read(eq, &event, &entry, sizeof(entry), 0), -FI_EAVAIL);
	CHECK(fi_eq_readerr(eq, &error, 0) > 0);
	CHECK(error.fid == &av->fid);
	SAME(error.data, 0);
	CHECK(error.err > 0);
	SAME(fi_eq_read(eq, &event, &entry, sizeof(entry), 0), sizeof(entry));
	SAME(entry.data, 1);
	SAME(fi_close(&eq->fid), -FI_EBUSY);
	OK(fi_close(&av->fid));
	OK(fi_close(&eq->fid));
	side_end(me);
}

static void event_queue(struct side *me)
{
	static const enum fi_wait_obj objects[] = { FI_WAIT_NONE, FI_WAIT_UNSPEC, FI_WAIT_FD };
	struct fi_eq_attr peer = { .flags = FI_WRITE | FI_PEER }, near = { .flags = FI_WRITE | FI_AFFINITY };
	struct fi_cq_attr peers = { .flags = FI_PEER }, nearby = { .flags = FI_AFFINITY };
	struct fid_eq *eq;
	struct fid_cq *cq;
	char data[32];
	uint32_t event;

	side_begin(me, &(struct setup){ 0 });
	/* Queues of another provider are not reported to. */
	SAME(fi_eq_open(me->fabric, &peer, &eq, NULL), -FI_EINVAL);
	SAME(fi_cq_open(me->domain, &peers, &cq, NULL), -FI_EINVAL);
	OK(fi_eq_open(me->fabric, &near, &eq, NULL));
	OK(fi_cq_open(me->domain, &nearby, &cq, NULL));
	OK(fi_close(&eq->fid));
	OK(fi_close(&cq->fid));
	for (size_t i = 0; i < sizeof(objects) / sizeof(*objects); i++) {
		struct fi_eq_attr attr = { .wait_obj = objects[i], .flags = FI_WRITE };
		struct pollfd at = { .events = POLLIN };
		struct fid *fid;

		OK(fi_eq_open(me->fabric, &attr, &eq, NULL));
		fid = &eq->fid;
		SAME(fi_eq_read(eq, &event, data, sizeof(data), 0), -FI_EAGAIN);
		if (objects[i] != FI_WAIT_NONE) {
			double begun = now();

			SAME(fi_eq_sread(eq, &event, data, sizeof(data), 100, 0), -FI_EAGAIN);
			CHECK(now() - begun > 0.09);
		}
		if (objects[i] == FI_WAIT_FD) {
			OK(fi_control(&eq->fid, FI_GETWAIT, &at.fd));
			OK(fi_trywait(me->fabric, &fid, 1));
			SAME(poll(&at, 1, 20), 0);
		}
		for (int n = 0; n < 3; n++)
			SAME(fi_eq_write(eq, 100 + (uint32_t)n, "event data", (size_t)n + 1, 0), n + 1);
		if (objects[i] == FI_WAIT_FD) {
			SAME(fi_trywait(me->fabric, &fid, 1), -FI_EAGAIN);
			SAME(poll(&at, 1, 0), 1);
		}
		SAME(fi_eq_read(eq, &event, data, sizeof(data), FI_PEEK), 1);
		SAME(fi_eq_read(eq, &event, data, sizeof(data), 0), 1);
		SAME(event, 100);
		SAME(fi_eq_read(eq, &event, data, 1, 0), -FI_ETOOSMALL);
		SAME(fi_eq_read(eq, &event, data, sizeof(data), 0), 2);
		CHECK(!memcmp(data, "ev", 2));
		if (objects[i] != FI_WAIT_NONE)
			SAME(fi_eq_sread(eq, &event, data, sizeof(data), -1, 0), 3);
		else
			SAME(fi_eq_read(eq, &event, data, sizeof(data), 0), 3);
		SAME(event, 102);
		OK(fi_close(&eq->fid));
	}
	side_end(me);
}

/* An alias is the endpoint with flags of its own. */
static void aliases(struct side *me)
{
	struct fi_context context;
	struct fid_ep *alias;
	uint64_t flags;
	char buffer[16];

	side_begin(me, &(struct setup){ 0 });
	OK(fi_ep_alias(me->ep, &alias, FI_TRANSMIT | FI_DELIVERY_COMPLETE));
	flags = FI_TRANSMIT;
	OK(fi_control(&alias->fid, FI_GETOPSFLAG, &flags));
	SAME(flags & FI_DELIVERY_COMPLETE, FI_DELIVERY_COMPLETE);
	flags = FI_TRANSMIT;
	OK(fi_control(&me->ep->fid, FI_GETOPSFLAG, &flags));
	SAME(flags & FI_DELIVERY_COMPLETE, 0);
	if (me->rank == 0) {
		POST(me, fi_send(me->ep, "plain", 5, NULL, me->peer, &context));
		completion(me->tx);
		POST(me, fi_send(alias, "alias", 5, NULL, me->peer, &context));
		nothing_in(me->tx, 50);
		barrier(me);
		completion(me->tx);
		flags = FI_TRANSMIT;
		OK(fi_control(&alias->fid, FI_SETOPSFLAG, &flags));
		POST(me, fi_send(alias, "again", 5, NULL, me->peer, &context));
		completion(me->tx);
	} else {
		barrier(me);
		for (int i = 0; i < 3; i++) {
			POST(me, fi_recv(alias, buffer, 16, NULL, FI_ADDR_UNSPEC, &context));
			SAME(completion(me->rx).len, 5);
		}
	}
	SAME(fi_close(&me->ep->fid), -FI_EBUSY);
	OK(fi_close(&alias->fid));
	side_end(me);
}

/* Addresses as text. */
static void strings(struct side *me)
{
	char name[NAME_MAX_LEN], text[NAME_MAX_LEN];
	size_t len = sizeof(text);
	fi_addr_t again;

	side_begin(me, &(struct setup){ .addr_format = FI_ADDR_STR });
	SAME(me->info->addr_format, FI_ADDR_STR);
	len = name_of(me->ep, name);
	SAME(len, strlen(name) + 1);
	CHECK(strstr(name, "://"));
	len = sizeof(text);
	OK(fi_av_lookup(me->av, me->peer, text, &len));
	SAME(len, strlen(text) + 1);
	CHECK(strcmp(text, name));
	SAME(fi_av_insertsvc(me->av, name, NULL, &again, 0, NULL), 1);
	len = sizeof(text);
	OK(fi_av_lookup(me->av, again, text, &len));
	CHECK(!strcmp(text, name));
	SAME(fi_av_insertsvc(me->av, name, "1", &again, 0, NULL), -FI_EINVAL);
	SAME(fi_av_insertsvc(me->av, "127.0.0.1", NULL, &again, 0, NULL), -FI_EINVAL);
	SAME(fi_av_insertsvc(me->av, "fi_shm://x", NULL, &again, 0, NULL), 0);
	CHECK(exchanges(me, me->ep, me->peer, 1000));
	len = 3;
	SAME(fi_getname(&me->ep->fid, text, &len), -FI_ETOOSMALL);
	SAME(len, strlen(name) + 1);
	side_end(me);
}

static void format_6(struct side *me)
{
	char name[NAME_MAX_LEN];
	struct setup setup = { .addr_format = FI_SOCKADDR_IN6 };

	side_begin(me, &setup);
	SAME(name_of(me->ep, name), sizeof(struct sockaddr_in6));
	CHECK(exchanges(me, me->ep, me->peer, 50000));
	side_end(me);
}

/* Counters count completions, and have no flags. */
static void counter_attributes(struct side *me)
{
	struct fi_cntr_attr bytes = { .events = (enum fi_cntr_events)(FI_CNTR_EVENTS_COMP + 1) }, flags = { .flags = FI_PEER };
	struct fid_cntr *cntr;
	uint64_t told = 7;

	side_begin(me, &(struct setup){ 0 });
	SAME(fi_cntr_open(me->domain, &bytes, &cntr, NULL), -FI_EINVAL);
	SAME(fi_cntr_open(me->domain, &flags, &cntr, NULL), -FI_EINVAL);
	OK(fi_cntr_open(me->domain, &(struct fi_cntr_attr){ 0 }, &cntr, NULL));
	OK(fi_control(&cntr->fid, FI_GETOPSFLAG, &told));
	SAME(told, 0);
	OK(fi_control(&cntr->fid, FI_SETOPSFLAG, &told));
	told = FI_COMPLETION;
	SAME(fi_control(&cntr->fid, FI_SETOPSFLAG, &told), -FI_EINVAL);
	SAME(fi_control(&cntr->fid, FI_GETOPSFLAG, NULL), -FI_EINVAL);
	OK(fi_close(&cntr->fid));
	side_end(me);
}

/* Calls that fail in part, or late because a counter cannot be waited for with the endpoint, have no effect. */
static void late_failures(struct side *me)
{
	struct fi_cntr_attr attr = { .wait_obj = FI_WAIT_FD };
	struct fid_cntr *early, *late, *of_region;
	struct fid_ep *ep;
	struct fid_mr *mr;
	uint64_t memory;
	int null = open("/dev/null", O_RDONLY), fds[3], kept[3];

	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_TAGGED | FI_RMA | FI_RMA_EVENT });
	OK(fi_cntr_open(me->domain, &attr, &early, NULL));
	OK(fi_cntr_open(me->domain, &attr, &late, NULL));
	OK(fi_cntr_open(me->domain, &attr, &of_region, NULL));
	OK(fi_mr_reg(me->domain, &memory, sizeof(memory), FI_REMOTE_WRITE, 0, 1, 0, &mr, NULL));
	OK(fi_endpoint(me->domain, me->info, &ep, NULL));
	OK(fi_ep_bind(ep, &me->av->fid, 0));
	OK(fi_ep_bind(ep, &me->rx->fid, FI_RECV));
	SAME(fi_ep_bind(ep, &me->tx->fid, FI_TRANSMIT | FI_RECV), -FI_EINVAL);
	OK(fi_ep_bind(ep, &me->tx->fid, FI_TRANSMIT));
	OK(fi_ep_bind(ep, &early->fid, FI_RECV));
	SAME(fi_ep_bind(ep, &early->fid, FI_SEND | FI_RECV), -FI_EINVAL);
	OK(fi_ep_bind(ep, &early->fid, FI_SEND));
	OK(fi_control(&early->fid, FI_GETWAIT, &fds[0]));
	OK(fi_control(&late->fid, FI_GETWAIT, &fds[1]));
	OK(fi_control(&of_region->fid, FI_GETWAIT, &fds[2]));
	/* Nothing can be added to a descriptor that is no epoll. */
	for (int i = 0; i < 3; i++) {
		kept[i] = dup(fds[i]);
		CHECK(dup2(null, fds[i]) == fds[i]);
	}
	CHECK(fi_enable(ep) < 0);
	CHECK(fi_ep_bind(me->ep, &late->fid, FI_RECV) < 0);
	CHECK(fi_mr_bind(mr, &of_region->fid, FI_REMOTE_WRITE) < 0);
	for (int i = 0; i < 3; i++) {
		CHECK(dup2(kept[i], fds[i]) == fds[i]);
		OK(close(kept[i]));
	}
	OK(close(null));
	OK(fi_enable(ep));
	OK(fi_ep_bind(me->ep, &late->fid, FI_RECV));
	OK(fi_mr_bind(mr, &of_region->fid, FI_REMOTE_WRITE));
	CHECK(exchanges(me, me->ep, me->peer, 1000));
	OK(fi_cntr_wait(late, 1, PATIENCE_S * 1000));
	/* The counter's descriptor wakes for the endpoint. */
	if (me->rank == 1) {
		sleep_ms(50);
		POST(me, fi_inject_write(me->ep, &memory, sizeof(memory), me->peer, 0, 1));
	} else {
		struct fid *fid = &of_region->fid;
		struct pollfd at = { .fd = fds[2], .events = POLLIN };

		while (fi_cntr_read(of_region) < 1)
			if (fi_trywait(me->fabric, &fid, 1) == 0)
				CHECK(poll(&at, 1, PATIENCE_S * 1000) == 1);
	}
	barrier(me);
	OK(fi_close(&mr->fid));
	OK(fi_close(&ep->fid));
	OK(fi_close(&me->ep->fid));
	me->ep = NULL;
	OK(fi_close(&early->fid));
	OK(fi_close(&late->fid));
	OK(fi_close(&of_region->fid));
	side_close(me);
}

/* Two fabrics with two domains with three endpoints: everyone sends to everyone of the other side. */
static void many(struct side *me)
{
	enum { DOMAINS = 4, EACH = 3, ALL = DOMAINS * EACH };
	struct side sides[DOMAINS];
	struct fid_ep *eps[DOMAINS][EACH];
	char names[ALL][NAME_MAX_LEN], theirs[ALL][NAME_MAX_LEN];
	char in[DOMAINS][EACH][ALL];
	struct fi_context context;
	int left;

	for (int d = 0; d < DOMAINS; d++) {
		sides[d] = (struct side){ .rank = me->rank, .link = me->link };
		if (d % 2 == 0) {
			side_open(&sides[d], &(struct setup){ 0 });
		} else {
			struct fi_av_attr av = { .type = FI_AV_TABLE };
			struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED };

			sides[d].info = choose(&sides[d].setup);
			sides[d].fabric = sides[d - 1].fabric;
			OK(fi_domain(sides[d].fabric, sides[d].info, &sides[d].domain, NULL));
			OK(fi_av_open(sides[d].domain, &av, &sides[d].av, NULL));
			OK(fi_cq_open(sides[d].domain, &cq, &sides[d].tx, NULL));
			OK(fi_cq_open(sides[d].domain, &cq, &sides[d].rx, NULL));
			sides[d].ep = another_endpoint(&sides[d]);
		}
		for (int e = 0; e < EACH; e++) {
			eps[d][e] = e ? another_endpoint(&sides[d]) : sides[d].ep;
			name_of(eps[d][e], names[d * EACH + e]);
			for (int i = 0; i < ALL; i++)
				OK(fi_recv(eps[d][e], &in[d][e][i], 1, NULL, FI_ADDR_UNSPEC, &context));
		}
	}
	tell(me, names, sizeof(names));
	hear(me, theirs, sizeof(theirs));
	for (int d = 0; d < DOMAINS; d++) {
		for (int to = 0; to < ALL; to++) {
			fi_addr_t peer = insert(&sides[d], theirs[to]);

			for (int e = 0; e < EACH; e++) {
				char byte = (char)(d * EACH + e);

				POST(&sides[d], fi_inject(eps[d][e], &byte, 1, peer));
			}
		}
	}
	left = DOMAINS * EACH * ALL;
	for (double end = now() + PATIENCE_S; left > 0;) {
		CHECK(now() < end);
		for (int d = 0; d < DOMAINS; d++) {
			struct fi_cq_tagged_entry entry;

			left -= fi_cq_read(sides[d].rx, &entry, 1) == 1;
		}
	}
	for (int d = 0; d < DOMAINS; d++) {
		for (int e = 0; e < EACH; e++) {
			int sum = 0;

			for (int i = 0; i < ALL; i++)
				sum += in[d][e][i];
			SAME(sum, ALL * (ALL - 1) / 2);
		}
	}
	for (int other = 0; other < 2; other++) {
		tell(me, "x", 1);
		hear(me, in, 1);
	}
	SAME(fi_close(&sides[0].fabric->fid), -FI_EBUSY);
	SAME(fi_close(&sides[0].domain->fid), -FI_EBUSY);
	for (int d = DOMAINS - 1; d >= 0; d--) {
		for (int e = 1; e < EACH; e++)
			OK(fi_close(&eps[d][e]->fid));
		if (d % 2 == 0) {
			side_close(&sides[d]);
			continue;
		}
		struct fid *fids[] = { &sides[d].ep->fid, &sides[d].tx->fid, &sides[d].rx->fid, &sides[d].av->fid,
				       &sides[d].domain->fid };
		for (int i = 0; i < 5; i++)
			OK(fi_close(fids[i]));
		fi_freeinfo(sides[d].info);
	}
}

/* An open fabric and domain of this provider as hints (fi_fabric(3), fi_domain(3)), also behind libfabric's hooks. */
static void open_objects_as_hints(struct side *me)
{
	struct fi_info *hints, *found;

	side_begin(me, &(struct setup){ .threading = FI_THREAD_SAFE });
	CHECK(hints = fi_dupinfo(me->info));
	hints->fabric_attr->fabric = me->fabric;
	hints->domain_attr->domain = me->domain;
	OK(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &found));
	fi_freeinfo(found);
	hints->fabric_attr->fabric = NULL;
	hints->domain_attr->domain = NULL;
	fi_freeinfo(hints);
	side_end(me);
}

static void threading(struct side *me)
{
	static const enum fi_threading levels[] = { FI_THREAD_SAFE, FI_THREAD_FID, FI_THREAD_DOMAIN,
						    FI_THREAD_COMPLETION, FI_THREAD_ENDPOINT };

	for (size_t i = 0; i < sizeof(levels) / sizeof(*levels); i++) {
		side_begin(me, &(struct setup){ .threading = levels[i] });
		SAME(me->info->domain_attr->threading, levels[i]);
		CHECK(exchanges(me, me->ep, me->peer, 100));
		CHECK(exchanges(me, me->ep, me->peer, 100000));
		side_end(me);
	}
}

/* Makes control calls of a domain in which another thread polls, until `*done`. */
struct controller {
	struct side *side;
	bool done;
};

static void *control(void *argument)
{
	enum { ROUNDS = 200, EACH = 40 };
	struct controller *controller = argument;
	struct side *me = controller->side;
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_TAGGED };
	static char memory[EACH];

	for (int round = 0; round < ROUNDS; round++) {
		struct sockaddr_in others[EACH], found;
		fi_addr_t addresses[EACH];
		struct fid_mr *regions[EACH];
		struct fid_ep *ep;
		struct fid_cq *cq;
		size_t size, len = sizeof(found);

		for (int i = 0; i < EACH; i++) {
			OK(fi_mr_reg(me->domain, &memory[i], 1, FI_REMOTE_WRITE, 0, (uint64_t)i + 1000, 0, &regions[i], NULL));
			others[i] = loopback(2000 + round * EACH + i);
		}
		SAME(fi_av_insert(me->av, others, EACH, addresses, 0, NULL), EACH);
		OK(fi_av_lookup(me->av, addresses[EACH - 1], &found, &len));
		SAME(found.sin_port, others[EACH - 1].sin_port);
		/* With the queues that the other thread polls. */
		ep = another_endpoint(me);
		OK(fi_cq_open(me->domain, &attr, &cq, NULL));
		OK(fi_getopt(&ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &size, &(size_t){ sizeof(size) }));
		OK(fi_close(&cq->fid));
		OK(fi_close(&ep->fid));
		OK(fi_av_remove(me->av, addresses, EACH, 0));
		for (int i = 0; i < EACH; i++)
			OK(fi_close(&regions[i]->fid));
	}
	__atomic_store_n(&controller->done, true, __ATOMIC_RELEASE);
	return NULL;
}

/* "Control interfaces are always considered thread safe" (fi_domain(3)), whatever the level for data is. */
static void control_beside_data(struct side *me)
{
	enum { LEN = 200 };
	struct controller controller = { .side = me };
	struct pollfd link = { .events = POLLIN, .fd = me->link };
	char memory[LEN], byte;
	struct fi_context context;
	struct fid_mr *mr = NULL;
	pthread_t thread;
	uint64_t target[2];

	side_begin(me, &(struct setup){ .threading = FI_THREAD_DOMAIN, .caps = FI_MSG | FI_TAGGED | FI_RMA,
					.addr_format = FI_SOCKADDR_IN });
	if (me->rank == 0) {
		hear(me, target, sizeof(target));
		for (uint32_t i = 0; poll(&link, 1, 0) == 0; i++) {
			fill(memory, LEN, i);
			POST(me, fi_write(me->ep, memory, LEN, NULL, me->peer, target[1], target[0], &context));
			completion(me->tx);
		}
		hear(me, &byte, 1);
		fill(memory, LEN, 7);
		POST(me, fi_write(me->ep, memory, LEN, NULL, me->peer, target[1], target[0], &context));
		completion(me->tx);
	} else {
		OK(fi_mr_reg(me->domain, memory, LEN, FI_REMOTE_WRITE, 0, 1, 0, &mr, NULL));
		target[0] = fi_mr_key(mr);
		target[1] = me->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)memory : 0;
		tell(me, target, sizeof(target));
		OK(pthread_create(&thread, NULL, control, &controller));
		while (!__atomic_load_n(&controller.done, __ATOMIC_ACQUIRE))
			progress(me);
		OK(pthread_join(thread, NULL));
		tell(me, "x", 1);
	}
	barrier(me);
	if (me->rank == 1)
		CHECK(holds(memory, LEN, 7, 0));
	CHECK(exchanges(me, me->ep, me->peer, 100));
	barrier(me);
	if (mr)
		OK(fi_close(&mr->fid));
	side_end(me);
}

/* A sender that is done closes and goes. Its messages stay, also for a receiver that had not met it yet. */
static void early_leaver(struct side *me)
{
	enum { COUNT = 100, LEN = 500 };
	struct fi_context context;
	char name[NAME_MAX_LEN], *buffer = need(LEN);

	for (int met = 0; met < 2; met++) {
		side_begin(me, &(struct setup){ 0 });
		if (met)
			CHECK(exchanges(me, me->ep, me->peer, 10));
		barrier(me);
		if (me->rank == 0) {
			for (int i = 0; i < COUNT; i++) {
				fill(buffer, LEN, (uint32_t)i);
				POST(me, fi_send(me->ep, buffer, LEN, NULL, me->peer, &context));
				completion(me->tx);
			}
			side_close(me);
			tell(me, "x", 1);
			hear(me, name, 1);
		} else {
			hear(me, name, 1);
			for (int i = 0; i < COUNT; i++) {
				POST(me, fi_recv(me->ep, buffer, LEN, NULL, FI_ADDR_UNSPEC, &context));
				completion(me->rx);
				CHECK(holds(buffer, LEN, (uint32_t)i, 0));
			}
			tell(me, "x", 1);
			side_close(me);
		}
	}
	free(buffer);
}

/* Closing with operations that pend: the other side's end in errors, not in silence. */
static void closing(struct side *me)
{
	struct fi_context contexts[3];
	char *buffer = need(50000), byte;

	side_begin(me, &(struct setup){ 0 });
	SAME(fi_close(&me->tx->fid), -FI_EBUSY);
	SAME(fi_close(&me->av->fid), -FI_EBUSY);
	SAME(fi_close(&me->domain->fid), -FI_EBUSY);
	SAME(fi_close(&me->fabric->fid), -FI_EBUSY);
	CHECK(exchanges(me, me->ep, me->peer, 10));
	if (me->rank == 0) {
		struct iovec part = { buffer, 10 }, all = { buffer, 50000 };
		struct fi_msg_tagged first = { .msg_iov = &all, .iov_count = 1, .addr = me->peer, .tag = 9,
					       .context = &contexts[0] };
		POST(me, fi_tsendmsg(me->ep, &first, FI_DELIVERY_COMPLETE | FI_COMPLETION));
		struct fi_msg_tagged msg = { .msg_iov = &part, .iov_count = 1, .addr = me->peer, .tag = 9,
					     .context = &contexts[1] };
		POST(me, fi_tsendmsg(me->ep, &msg, FI_DELIVERY_COMPLETE | FI_COMPLETION));
		barrier(me);
		for (int i = 0; i < 2; i++) {
			struct fi_cq_err_entry error = failure(me->tx);

			CHECK(error.op_context == &contexts[0] || error.op_context == &contexts[1]);
			CHECK(error.err > 0);
		}
		double end = now() + PATIENCE_S;
		ssize_t rc;

		while ((rc = fi_inject(me->ep, "x", 1, me->peer)) == 0 || rc == -FI_EAGAIN)
			CHECK(now() < end);
		SAME(rc, -FI_ECONNREFUSED);
		side_close(me);
		tell(me, "x", 1);
	} else {
		POST(me, fi_trecv(me->ep, buffer, 10, NULL, me->peer, 1, 0, &contexts[2]));
		barrier(me);
		side_close(me);
		hear(me, &byte, 1);
	}
	free(buffer);
}

/* A port of one's own choice belongs to one endpoint at a time. */
static void service(struct side *me)
{
	char name[NAME_MAX_LEN], port[16];
	struct fid_ep *second;

	if (me->rank == 0) {
		side_open(me, &(struct setup){ .addr_format = FI_SOCKADDR_IN });
		name_of(me->ep, name);
		snprintf(port, sizeof(port), "%d", ntohs(((struct sockaddr_in *)(void *)name)->sin_port));
		side_close(me);
		side_open(me, &(struct setup){ .addr_format = FI_SOCKADDR_IN, .service = port });
		char again[NAME_MAX_LEN];
		name_of(me->ep, again);
		SAME(((struct sockaddr_in *)(void *)again)->sin_port, ((struct sockaddr_in *)(void *)name)->sin_port);
		OK(fi_endpoint(me->domain, me->info, &second, NULL));
		OK(fi_ep_bind(second, &me->av->fid, 0));
		OK(fi_ep_bind(second, &me->tx->fid, FI_TRANSMIT | FI_RECV));
		SAME(fi_enable(second), -FI_EADDRINUSE);
		OK(fi_close(&second->fid));
	} else {
		side_open(me, &(struct setup){ .addr_format = FI_SOCKADDR_IN });
	}
	meet(me);
	CHECK(exchanges(me, me->ep, me->peer, 100));
	side_end(me);
}

const struct group object_groups[] = {
	{ "av-table", table },
	{ "av-map", map },
	{ "av-named", vector_with_name },
	{ "av-named-heirs", vector_with_heirs },
	{ "av-events", vector_events },
	{ "event-queue", event_queue },
	{ "aliases", aliases },
	{ "address-strings", strings },
	{ "ipv6-format", format_6 },
	{ "counter-attributes", counter_attributes },
	{ "late-failures", late_failures },
	{ "many-objects", many },
	{ "open-objects-as-hints", open_objects_as_hints },
	{ "threading-levels", threading },
	{ "control-by-another", control_beside_data },
	{ "early-leaver", early_leaver },
	{ "closing", closing },
	{ "service", service },
	{ NULL, NULL },
};
