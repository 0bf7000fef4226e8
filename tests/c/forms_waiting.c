/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Every way to wait: blocking reads, descriptors, conditions, signals, poll sets, wait sets, automatic progress. */
#include "all_forms.h"

#include <poll.h>
#include <pthread.h>
#include <rdma/fi_atomic.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LARGE (3 << 20)
/* A wake-up that is lost shows as a turn that takes until somebody looks on his own account; those look every half
 * second. Nothing that is asked for here takes that long, valgrind aside. */
#define PROMPT_S ((slow ? 5.0 : 0.4) * crowding())

typedef struct fi_cq_tagged_entry (*waiter)(struct side *me, struct fid_cq *cq);

/* A blocking read. */
static struct fi_cq_tagged_entry by_sread(struct side *me, struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry = { 0 };

	(void)me;
	SAME(fi_cq_sread(cq, &entry, 1, NULL, PATIENCE_S * 1000), 1);
	return entry;
}

/* fi_trywait and poll, for as long as it takes. */
static struct fi_cq_tagged_entry by_descriptor(struct side *me, struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry = { 0 };
	struct fid *fids[1] = { &cq->fid };
	struct pollfd at = { .events = POLLIN };

	OK(fi_control(&cq->fid, FI_GETWAIT, &at.fd));
	for (;;) {
		ssize_t n = fi_cq_read(cq, &entry, 1);

		if (n != -FI_EAGAIN) {
			SAME(n, 1);
			return entry;
		}
		int rc = fi_trywait(me->fabric, fids, 1);
		if (rc == -FI_EAGAIN)
			continue;
		OK(rc);
		if (poll(&at, 1, PATIENCE_S * 1000) != 1)
			FAIL("the descriptor is silent for %d s", PATIENCE_S);
	}
}

/* The mutex and the condition of the queue. */
static struct fi_cq_tagged_entry by_condition(struct side *me, struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry = { 0 };
	struct fid *fids[1] = { &cq->fid };
	struct fi_mutex_cond pair;

	OK(fi_control(&cq->fid, FI_GETWAIT, &pair));
	for (;;) {
		struct timespec until;
		ssize_t n;
		int rc;

		pthread_mutex_lock(pair.mutex);
		n = fi_cq_read(cq, &entry, 1);
		if (n != -FI_EAGAIN) {
			pthread_mutex_unlock(pair.mutex);
			SAME(n, 1);
			return entry;
		}
		rc = fi_trywait(me->fabric, fids, 1);
		CHECK(rc == 0 || rc == -FI_EAGAIN);
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_sec += PATIENCE_S;
		if (rc == 0 && pthread_cond_timedwait(pair.cond, pair.mutex, &until))
			FAIL("the condition is silent for %d s", PATIENCE_S);
		pthread_mutex_unlock(pair.mutex);
	}
}

/* To and fro, at every size, with pauses that let the other side fall asleep. */
static void ping_pong(struct side *me, waiter wait, int rounds)
{
	static const size_t sizes[] = { 1, 200, 16384, 50000, LARGE };
	struct fi_context contexts[2];
	char *buffer = need(LARGE);
	double slowest = 0;

	for (int round = 0; round < rounds; round++) {
		size_t len = sizes[round % 50 == 7 ? 4 : round % 4];
		double begun = now();

		for (int turn = 0; turn < 2; turn++) {
			bool pause = round % 20 == 3;

			if (turn == me->rank) {
				if (pause)
					sleep_ms(5);
				fill(buffer, len, (uint32_t)round);
				POST(me, fi_send(me->ep, buffer, len, NULL, me->peer, &contexts[0]));
				CHECK(wait(me, me->tx).op_context == &contexts[0]);
			} else {
				memset(buffer, 0, len);
				POST(me, fi_recv(me->ep, buffer, len, NULL, FI_ADDR_UNSPEC, &contexts[1]));
				SAME(wait(me, me->rx).len, len);
				CHECK(holds(buffer, len, (uint32_t)round, 0));
			}
		}
		if (now() - begun > slowest)
			slowest = now() - begun;
	}
	if (slowest > PROMPT_S)
		FAIL("a round took %.3f s: a wake-up was lost", slowest);
	free(buffer);
}

static void through(struct side *me, enum fi_wait_obj object, waiter wait)
{
	side_begin(me, &(struct setup){ .wait_obj = object });
	ping_pong(me, wait, slow ? 60 : 400);
	side_end(me);
}

static void sread_unspec(struct side *me)
{
	through(me, FI_WAIT_UNSPEC, by_sread);
}

static void sread_fd(struct side *me)
{
	through(me, FI_WAIT_FD, by_sread);
}

static void sread_condition(struct side *me)
{
	through(me, FI_WAIT_MUTEX_COND, by_sread);
}

static void sread_yield(struct side *me)
{
	through(me, FI_WAIT_YIELD, by_sread);
}

static void descriptor(struct side *me)
{
	through(me, FI_WAIT_FD, by_descriptor);
}

static void condition(struct side *me)
{
	through(me, FI_WAIT_MUTEX_COND, by_condition);
}

static void *signal_soon(void *cq)
{
	sleep_ms(100);
	OK(fi_cq_signal(cq));
	return NULL;
}

static void caught(int number)
{
	(void)number;
}

/* A signal to the thread, once 100 ms are over, as a timer sends it. */
static void *interrupt_soon(void *thread)
{
	sleep_ms(100);
	OK(pthread_kill(*(pthread_t *)thread, SIGUSR1));
	return NULL;
}

/* Signals end the wait, whatever the handler says of system calls; nothing but a signal does. */
static void interrupted(struct side *me, struct fid_eq *eq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_eq_entry event;
	uint32_t kind;

	for (int i = 0; i < 4; i++) {
		struct sigaction action = { .sa_handler = caught, .sa_flags = i % 2 ? SA_RESTART : 0 };
		pthread_t own = pthread_self(), thread;
		double begun = now();

		OK(sigaction(SIGUSR1, &action, NULL));
		OK(pthread_create(&thread, NULL, interrupt_soon, &own));
		if (i < 2)
			SAME(fi_cq_sread(me->rx, &entry, 1, (void *)1, PATIENCE_S * 1000), -FI_EAGAIN);
		else
			SAME(fi_eq_sread(eq, &kind, &event, sizeof(event), PATIENCE_S * 1000, 0), -FI_EAGAIN);
		CHECK(now() - begun > 0.09);
		CHECK(now() - begun < 0.1 + PROMPT_S);
		OK(pthread_join(thread, NULL));
	}
}

/* A threshold above the size of the queue: what it holds is delivered. */
static void more_than_the_queue(struct side *me)
{
	enum { SIZE = 4, ALL = 8 };
	struct fi_cq_tagged_entry entries[ALL];
	char buffer[ALL];
	ssize_t n;

	side_begin(me, &(struct setup){ .wait_obj = FI_WAIT_FD, .wait_cond = FI_CQ_COND_THRESHOLD, .cq_size = SIZE });
	for (int i = 0; me->rank == 1 && i < ALL; i++)
		POST(me, fi_recv(me->ep, &buffer[i], 1, NULL, FI_ADDR_UNSPEC, NULL));
	barrier(me);
	/* One by one: a turn of progress takes in all that is there. */
	for (int i = 0; me->rank == 0 && i < ALL; i++) {
		POST(me, fi_inject(me->ep, "m", 1, me->peer));
		sleep_ms(10);
	}
	for (size_t got = 0; me->rank == 1 && got < ALL; got += (size_t)n) {
		/* Without a limit: one that is over delivers what there is, too. */
		n = fi_cq_sread(me->rx, entries, ALL, (void *)(ALL - got), -1);
		CHECK(n >= (got ? 1 : SIZE));
	}
	side_end(me);
}

/* Time runs out, a threshold is reached, another thread signals. */
static void sread_ends(struct side *me)
{
	struct fi_eq_attr events = { 0 };
	struct fid_eq *eq;
	struct fi_cq_tagged_entry entries[4];
	struct fi_context context;
	char buffer[4][8];
	pthread_t thread;
	double begun;

	side_begin(me, &(struct setup){ .wait_obj = FI_WAIT_NONE });
	CHECK(fi_cq_sread(me->rx, entries, 1, NULL, 10) < 0);
	side_end(me);
	more_than_the_queue(me);
	for (enum fi_wait_obj object = FI_WAIT_UNSPEC; object <= FI_WAIT_MUTEX_COND; object++) {
		if (object == FI_WAIT_SET)
			continue;
		side_begin(me, &(struct setup){ .wait_obj = object, .wait_cond = FI_CQ_COND_THRESHOLD });
		begun = now();
		SAME(fi_cq_sread(me->rx, entries, 1, (void *)1, 0), -FI_EAGAIN);
		CHECK(now() - begun < PROMPT_S);
		begun = now();
		SAME(fi_cq_sread(me->rx, entries, 1, (void *)1, 150), -FI_EAGAIN);
		CHECK(now() - begun > 0.14);
		CHECK(now() - begun < 0.15 + PROMPT_S);
		/* A signal. */
		OK(pthread_create(&thread, NULL, signal_soon, me->rx));
		begun = now();
		SAME(fi_cq_sread(me->rx, entries, 1, (void *)1, PATIENCE_S * 1000), -FI_EAGAIN);
		CHECK(now() - begun < 0.1 + PROMPT_S);
		OK(pthread_join(thread, NULL));
		begun = now();
		SAME(fi_cq_sread(me->rx, entries, 1, (void *)1, 100), -FI_EAGAIN);
		CHECK(now() - begun > 0.09);
		/* A signal while nobody waits ends the next wait. */
		OK(fi_cq_signal(me->rx));
		begun = now();
		SAME(fi_cq_sread(me->rx, entries, 1, (void *)1, PATIENCE_S * 1000), -FI_EAGAIN);
		CHECK(now() - begun < PROMPT_S);
		/* A signal of the system; a thread that only yields learns of none. */
		if (object != FI_WAIT_YIELD) {
			events.wait_obj = object;
			OK(fi_eq_open(me->fabric, &events, &eq, NULL));
			interrupted(me, eq);
			OK(fi_close(&eq->fid));
		}
		barrier(me);
		/* Three, one after the other. */
		if (me->rank == 0) {
			for (int i = 0; i < 3; i++) {
				sleep_ms(30);
				POST(me, fi_inject(me->ep, "three", 5, me->peer));
			}
		} else {
			for (int i = 0; i < 3; i++)
				POST(me, fi_recv(me->ep, buffer[i], 8, NULL, FI_ADDR_UNSPEC, &context));
			SAME(fi_cq_sread(me->rx, entries, 4, (void *)3, PATIENCE_S * 1000), 3);
		}
		/* An error ends it too. */
		barrier(me);
		if (me->rank == 0) {
			POST(me, fi_inject(me->ep, "cut", 3, me->peer));
		} else {
			POST(me, fi_recv(me->ep, buffer[0], 1, NULL, FI_ADDR_UNSPEC, &context));
			SAME(fi_cq_sread(me->rx, entries, 1, (void *)1, PATIENCE_S * 1000), -FI_EAVAIL);
			/* A signal does not keep back what is there. */
			OK(fi_cq_signal(me->rx));
			SAME(fi_cq_sread(me->rx, entries, 1, (void *)1, PATIENCE_S * 1000), -FI_EAVAIL);
			SAME(failure(me->rx).err, FI_ETRUNC);
			begun = now();
			SAME(fi_cq_sread(me->rx, entries, 1, (void *)1, PATIENCE_S * 1000), -FI_EAGAIN);
			CHECK(now() - begun < PROMPT_S);
		}
		side_end(me);
	}
}

/* What waits behind a fence for room in the other side's ring moves on although the application sleeps. */
static void fence_asleep(struct side *me)
{
	enum { BEHIND = 2000 };
	struct fi_context *contexts = need((BEHIND + 2) * sizeof(*contexts));
	char *buffer = need(50000), small[8];

	side_begin(me, &(struct setup){ .caps = FI_TAGGED | FI_FENCE, .wait_obj = FI_WAIT_FD, .cq_size = 2 * BEHIND });
	if (me->rank == 0) {
		struct iovec part = { small, sizeof(small) };
		struct fi_msg_tagged msg = { .msg_iov = &part, .iov_count = 1, .addr = me->peer, .tag = 1,
					     .context = &contexts[1] };

		POST(me, fi_tsend(me->ep, buffer, 50000, NULL, me->peer, 1, &contexts[0]));
		POST(me, fi_tsendmsg(me->ep, &msg, FI_FENCE | FI_COMPLETION));
		for (int i = 0; i < BEHIND; i++)
			POST(me, fi_tsend(me->ep, &contexts[i], 8, NULL, me->peer, 1, &contexts[2 + i]));
		for (int i = 0; i < BEHIND + 2; i++)
			by_descriptor(me, me->tx);
	} else {
		double begun = now();

		for (int i = 0; i < BEHIND + 2; i++) {
			POST(me, fi_trecv(me->ep, buffer, 50000, NULL, FI_ADDR_UNSPEC, 1, 0, &contexts[0]));
			completion(me->rx);
			if (i == 1)
				sleep_ms(50); /* lets the ring fill */
		}
		CHECK(now() - begun < 0.1 + PROMPT_S);
	}
	side_end(me);
	free(contexts);
	free(buffer);
}

/* Six long messages one after the other. Returns how long that takes, seconds. */
static double six_long_ones(struct side *me, char *buffer, size_t len, waiter wait)
{
	double begun = now();

	for (int i = 0; i < 6; i++) {
		if (me->rank == 0) {
			POST(me, fi_send(me->ep, buffer, len, NULL, me->peer, NULL));
			wait(me, me->tx);
		} else {
			POST(me, fi_recv(me->ep, buffer, len, NULL, FI_ADDR_UNSPEC, NULL));
			SAME(wait(me, me->rx).len, len);
		}
	}
	barrier(me);
	return now() - begun;
}

static struct fi_cq_tagged_entry by_polling(struct side *me, struct fid_cq *cq)
{
	(void)me;
	return completion(cq);
}

/* A sender that sleeps goes on while it has room: in steps of half a second the messages would take twelve seconds. */
static void long_asleep(struct side *me)
{
	const size_t len = slow ? 4 << 20 : 32 << 20;
	char *buffer = need(len);

	side_begin(me, &(struct setup){ .wait_obj = FI_WAIT_FD });
	double awake = six_long_ones(me, buffer, len, by_polling), asleep = six_long_ones(me, buffer, len, by_sread);

	if (asleep > 2 + 3 * awake)
		FAIL("%.1f s, and %.1f s where nobody sleeps", asleep, awake);
	side_end(me);
	free(buffer);
}

static void poll_set(struct side *me)
{
	struct fi_poll_attr attr = { 0 };
	struct fi_context context;
	struct fid_poll *set;
	void *ready[4];
	char buffer[8];

	side_begin(me, &(struct setup){ .counters = true });
	OK(fi_poll_open(me->domain, &attr, &set));
	OK(fi_poll_add(set, &me->rx->fid, 0));
	SAME(fi_poll(set, ready, 4), 0);
	POST(me, fi_recv(me->ep, buffer, 8, NULL, FI_ADDR_UNSPEC, &context));
	POST(me, fi_inject(me->ep, "poll", 4, me->peer));
	for (double end = now() + PATIENCE_S; fi_poll(set, ready, 4) == 0;)
		CHECK(now() < end);
	CHECK(ready[0] == me);
	SAME(fi_poll(set, ready, 4), 1);
	completion(me->rx);
	SAME(fi_poll(set, ready, 4), 0);
	OK(fi_poll_del(set, &me->rx->fid, 0));
	OK(fi_poll_add(set, &me->received->fid, 0));
	SAME(fi_poll(set, ready, 4), 1);
	OK(fi_poll_del(set, &me->received->fid, 0));
	OK(fi_close(&set->fid));
	side_end(me);
}

/* Rank 1 sends a message when rank 0 asks, which does not look meanwhile. */
static void one_more_is_there(struct side *me)
{
	char word[4];

	tell(me, "next", 4);
	hear(me, word, 4);
}

static void *read_beside(void *cntr)
{
	double end = now() + PATIENCE_S;

	while (fi_cntr_read(cntr) != 2)
		CHECK(now() < end);
	return NULL;
}

/* An event is one, also where the application has set the value back and it is what it was; and for each thread. */
static void counter_set_back(struct side *me)
{
	enum { ROUNDS = 10, ASKED = 2 * ROUNDS + 2 };
	struct fi_poll_attr attr = { 0 };
	struct fid_poll *set;
	char buffer[8], word[4];
	pthread_t thread;

	side_begin(me, &(struct setup){ .wait_obj = FI_WAIT_FD, .counters = true, .threading = FI_THREAD_SAFE });
	for (int i = 0; me->rank == 1 && i < ASKED; i++) {
		hear(me, word, 4);
		POST(me, fi_inject(me->ep, "back", 4, me->peer));
		progress(me);
		tell(me, "sent", 4);
	}
	for (int i = 0; me->rank == 0 && i < ASKED; i++)
		POST(me, fi_recv(me->ep, buffer, 8, NULL, FI_ADDR_UNSPEC, NULL));
	if (me->rank == 0) {
		struct fid *fids[1] = { &me->received->fid };
		void *ready[1];

		OK(fi_poll_open(me->domain, &attr, &set));
		OK(fi_poll_add(set, &me->received->fid, 0));
		for (int i = 0; i < 2 * ROUNDS; i++) {
			double end = now() + PATIENCE_S;

			one_more_is_there(me);
			/* That the value was set back is told, too. */
			do {
				while (i < ROUNDS ? fi_poll(set, ready, 1) == 0 : fi_trywait(me->fabric, fids, 1) == 0)
					CHECK(now() < end);
			} while (fi_cntr_read(me->received) == 0);
			SAME(fi_cntr_read(me->received), 1);
			OK(fi_cntr_set(me->received, 0));
		}
		SAME(fi_cntr_read(me->received), 0);
		one_more_is_there(me);
		for (double end = now() + PATIENCE_S; fi_cntr_read(me->received) != 1;)
			CHECK(now() < end);
		one_more_is_there(me);
		OK(pthread_create(&thread, NULL, read_beside, me->received));
		OK(pthread_join(thread, NULL));
		/* What the other thread has seen is new to this one, once. Progress may move other things. */
		SAME(fi_trywait(me->fabric, fids, 1), -FI_EAGAIN);
		for (double end = now() + PATIENCE_S; fi_trywait(me->fabric, fids, 1);)
			CHECK(now() < end);
		OK(fi_close(&set->fid));
	}
	side_end(me);
}

struct waits {
	struct fid_wait *set;
	int stop;
};

static void *wait_again_and_again(void *argument)
{
	struct waits *waits = argument;

	while (!__atomic_load_n(&waits->stop, __ATOMIC_ACQUIRE))
		CHECK(fi_wait(waits->set, 1) <= 0);
	return NULL;
}

/* Members come and go while a thread waits for the set. */
static void change_the_set(struct side *me, struct fid_wait *set)
{
	struct fi_cq_attr queue = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_SET, .wait_set = set };
	struct fi_cntr_attr counter = { .wait_obj = FI_WAIT_SET, .wait_set = set };
	struct fi_eq_attr events = { .wait_obj = FI_WAIT_SET, .wait_set = set };
	struct waits waits = { .set = set };
	pthread_t thread;

	OK(pthread_create(&thread, NULL, wait_again_and_again, &waits));
	for (int i = 0; i < 4000; i++) {
		struct fid_cq *cq;
		struct fid_cntr *cntr;
		struct fid_eq *eq;

		OK(fi_cq_open(me->domain, &queue, &cq, NULL));
		OK(fi_cntr_open(me->domain, &counter, &cntr, NULL));
		OK(fi_eq_open(me->fabric, &events, &eq, NULL));
		/* The set has them before its thread looks again. */
		if (i % 4 == 0)
			sched_yield();
		OK(fi_close(&cq->fid));
		OK(fi_close(&cntr->fid));
		OK(fi_close(&eq->fid));
	}
	__atomic_store_n(&waits.stop, 1, __ATOMIC_RELEASE);
	OK(pthread_join(thread, NULL));
}

/* A queue of completions, a counter and a queue of events in one set. */
static void wait_set(struct side *me)
{
	struct fi_wait_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fi_av_attr av = { .type = FI_AV_TABLE };
	struct fi_context context;
	struct fid_wait *set;
	struct fid_eq *eq;
	char buffer[8], name[NAME_MAX_LEN];
	double begun;

	me->setup = (struct setup){ 0 };
	me->info = choose(&me->setup);
	OK(fi_fabric(me->info->fabric_attr, &me->fabric, NULL));
	OK(fi_domain(me->fabric, me->info, &me->domain, NULL));
	OK(fi_av_open(me->domain, &av, &me->av, NULL));
	OK(fi_wait_open(me->fabric, &attr, &set));
	struct fi_cq_attr cq = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_SET, .wait_set = set };
	struct fi_cntr_attr cntr = { .wait_obj = FI_WAIT_SET, .wait_set = set };
	struct fi_eq_attr events = { .wait_obj = FI_WAIT_SET, .wait_set = set, .flags = FI_WRITE };
	OK(fi_cq_open(me->domain, &cq, &me->tx, NULL));
	OK(fi_cq_open(me->domain, &cq, &me->rx, NULL));
	OK(fi_cntr_open(me->domain, &cntr, &me->sent, NULL));
	OK(fi_cntr_open(me->domain, &cntr, &me->received, NULL));
	OK(fi_eq_open(me->fabric, &events, &eq, NULL));
	me->ep = another_endpoint(me);
	name_of(me->ep, name);
	tell(me, name, sizeof(name));
	hear(me, name, sizeof(name));
	me->peer = insert(me, name);

	begun = now();
	SAME(fi_wait(set, 100), -FI_ETIMEDOUT);
	CHECK(now() - begun > 0.09);
	barrier(me);
	POST(me, fi_recv(me->ep, buffer, 8, NULL, FI_ADDR_UNSPEC, &context));
	if (me->rank == 0)
		sleep_ms(100);
	POST(me, fi_inject(me->ep, "wait", 4, me->peer));
	begun = now();
	while (fi_cq_read(me->rx, &(struct fi_cq_tagged_entry){ 0 }, 1) != 1) {
		SAME(fi_wait(set, PATIENCE_S * 1000), 0);
		CHECK(now() - begun < PATIENCE_S);
	}
	CHECK(now() - begun < 0.1 + PROMPT_S);
	/* What the counters have counted is an event too, until it is read. */
	SAME(fi_wait(set, PATIENCE_S * 1000), 0);
	SAME(fi_cntr_read(me->sent), 1);
	SAME(fi_cntr_read(me->received), 1);
	begun = now();
	SAME(fi_wait(set, 100), -FI_ETIMEDOUT);
	SAME(fi_eq_write(eq, 99, "event", 5, 0), 5);
	SAME(fi_wait(set, PATIENCE_S * 1000), 0);
	CHECK(now() - begun < 0.1 + PROMPT_S);

	barrier(me);
	OK(fi_close(&eq->fid));
	struct fid *members[] = { &me->ep->fid, &me->tx->fid, &me->rx->fid, &me->sent->fid, &me->received->fid };
	for (int i = 0; i < 5; i++)
		OK(fi_close(members[i]));
	me->ep = NULL;
	me->tx = me->rx = NULL;
	me->sent = me->received = NULL;
	change_the_set(me, set);
	OK(fi_close(&set->fid));
	side_close(me);
}

/* One side's application calls nothing until the other has its completion; then neither does until the message is there. */
static void automatic(struct side *me)
{
	struct fi_context context;
	char *buffer = need(LARGE);

	side_begin(me, &(struct setup){ .progress = FI_PROGRESS_AUTO });
	for (int computing = 0; computing < 2; computing++) {
		for (int sender = 0; sender < 2; sender++) {
			bool sends = me->rank == sender, computes = me->rank == computing;

			if (sends)
				fill(buffer, LARGE, 31);
			else
				memset(buffer, 0, LARGE);
			barrier(me);
			if (sends)
				POST(me, fi_tsend(me->ep, buffer, LARGE, NULL, me->peer, 1, &context));
			else
				POST(me, fi_trecv(me->ep, buffer, LARGE, NULL, FI_ADDR_UNSPEC, 1, 0, &context));
			if (computes)
				hear(me, &(char){ 0 }, 1);
			completion(sends ? me->tx : me->rx);
			if (!computes)
				tell(me, "b", 1);
			if (!sends)
				CHECK(holds(buffer, LARGE, 31, 0));
		}
	}
	memset(buffer, 0, LARGE);
	if (me->rank == 0)
		fill(buffer, LARGE, 32);
	barrier(me);
	if (me->rank == 0) {
		POST(me, fi_tsend(me->ep, buffer, LARGE, NULL, me->peer, 1, &context));
		hear(me, &(char){ 0 }, 1);
	} else {
		POST(me, fi_trecv(me->ep, buffer, LARGE, NULL, FI_ADDR_UNSPEC, 1, 0, &context));
		for (double end = now() + PATIENCE_S; !holds(buffer, LARGE, 32, 0); sleep_ms(5))
			CHECK(now() < end);
		tell(me, "b", 1);
	}
	completion(me->rank == 0 ? me->tx : me->rx);
	/* With blocking calls beside the thread that progresses. */
	side_end(me);
	side_begin(me, &(struct setup){ .progress = FI_PROGRESS_AUTO, .wait_obj = FI_WAIT_FD });
	ping_pong(me, by_sread, slow ? 40 : 200);
	ping_pong(me, by_descriptor, slow ? 40 : 200);
	side_end(me);
	free(buffer);
}

/* Sends a long message from one endpoint of this thread to another, and waits for that alone. The other's receive is
 * there by then, as both need it to be. */
static void send_elsewhere(struct side *me, struct side *other, enum fi_wait_obj object)
{
	struct fi_context contexts[2];
	char *from = need(LARGE), *to = need(LARGE), name[NAME_MAX_LEN];
	double begun = now();

	name_of(other->ep, name);
	me->peer = insert(me, name);
	name_of(me->ep, name);
	other->peer = insert(other, name);
	fill(from, LARGE, 41);
	POST(other, fi_trecv(other->ep, to, LARGE, NULL, FI_ADDR_UNSPEC, 41, 0, &contexts[1]));
	POST(me, fi_tsend(me->ep, from, LARGE, NULL, me->peer, 41, &contexts[0]));
	if (object == FI_WAIT_NONE)
		OK(fi_cntr_wait(me->sent, 1, PATIENCE_S * 1000));
	else
		CHECK(by_sread(me, me->tx).op_context == &contexts[0]);
	if (now() - begun > PROMPT_S)
		FAIL("took %.3f s: nobody looked", now() - begun);
	SAME(completion(other->rx).len, LARGE);
	CHECK(holds(to, LARGE, 41, 0));
	free(from);
	free(to);
}

/* A thread that waits is inside a call, and can progress no other endpoint of its own: that is for the call to do. */
static void elsewhere(struct side *me)
{
	static const enum fi_wait_obj objects[] = { FI_WAIT_NONE, FI_WAIT_UNSPEC, FI_WAIT_FD, FI_WAIT_YIELD };
	uint64_t written = 0;
	struct fid_mr *mr;

	for (size_t i = 0; i < 2 * sizeof(objects) / sizeof(*objects); i++) {
		enum fi_threading threading = i % 2 ? FI_THREAD_DOMAIN : FI_THREAD_SAFE;
		enum fi_wait_obj object = objects[i / 2];
		struct setup setup = { .threading = threading, .wait_obj = object, .counters = true };
		struct side other = { .rank = me->rank };

		/* In another domain, and in the same with queues of its own. */
		side_open(me, &setup);
		side_open(&other, &setup);
		send_elsewhere(me, &other, object);
		side_close(&other);
		side_close(me);

		side_open(me, &setup);
		other = *me;
		OK(fi_cq_open(me->domain, &(struct fi_cq_attr){ .format = FI_CQ_FORMAT_TAGGED }, &other.tx, NULL));
		OK(fi_cq_open(me->domain, &(struct fi_cq_attr){ .format = FI_CQ_FORMAT_TAGGED }, &other.rx, NULL));
		other.sent = other.received = NULL;
		other.ep = another_endpoint(&other);
		send_elsewhere(me, &other, object);
		struct fid *members[] = { &other.ep->fid, &other.tx->fid, &other.rx->fid };
		for (int j = 0; j < 3; j++)
			OK(fi_close(members[j]));
		side_close(me);
	}

	/* What a counter of the target has to hear of. */
	struct setup setup = { .caps = FI_MSG | FI_RMA | FI_RMA_EVENT, .rma_counters = true };
	struct side other = { .rank = me->rank };
	char name[NAME_MAX_LEN];

	side_open(me, &setup);
	side_open(&other, &setup);
	name_of(other.ep, name);
	me->peer = insert(me, name);
	OK(fi_mr_reg(other.domain, &written, sizeof(written), FI_REMOTE_WRITE, 0, 1, 0, &mr, NULL));
	OK(fi_mr_bind(mr, &other.rma[REMOTE_WRITES]->fid, FI_REMOTE_WRITE));
	uint64_t value = 43, at = me->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)&written : 0;
	POST(me, fi_write(me->ep, &value, sizeof(value), NULL, me->peer, at, fi_mr_key(mr), NULL));
	OK(fi_cntr_wait(me->rma[WRITES], 1, PATIENCE_S * 1000));
	OK(fi_cntr_wait(other.rma[REMOTE_WRITES], 1, PATIENCE_S * 1000));
	SAME(written, value);
	OK(fi_close(&mr->fid));
	side_close(&other);
	side_close(me);
}

/* Sleeps on two counters as fi_trywait and poll do, until one has counted. */
static void asleep_on(struct side *me, struct fid **both)
{
	struct pollfd at[2] = { { .events = POLLIN }, { .events = POLLIN } };

	for (int i = 0; i < 2; i++)
		OK(fi_control(both[i], FI_GETWAIT, &at[i].fd));
	for (double end = now() + PATIENCE_S; now() < end;) {
		int rc = fi_trywait(me->fabric, both, 2);

		if (rc == -FI_EAGAIN)
			return;
		OK(rc);
		if (poll(at, 2, PATIENCE_S * 1000) < 1)
			FAIL("the descriptors are silent for %d s", PATIENCE_S);
	}
	FAIL("two counters have counted nothing for %d s", PATIENCE_S);
}

/* A counter with a value that the application has not read does not sleep, whichever thread made the progress. */
static void counter_asleep(struct side *me)
{
	struct fi_context context;
	char buffer[8], word[4];

	side_begin(me, &(struct setup){ .wait_obj = FI_WAIT_FD, .counters = true });
	struct fid *both[] = { &me->sent->fid, &me->received->fid };

	/* The second message finds the way that the first one made. */
	for (uint64_t i = 1; i <= 2; i++) {
		POST(me, fi_recv(me->ep, buffer, 8, NULL, FI_ADDR_UNSPEC, &context));
		barrier(me);
		POST(me, fi_inject(me->ep, "count", 5, me->peer));
		SAME(fi_trywait(me->fabric, &both[0], 1), -FI_EAGAIN);
		SAME(fi_cntr_read(me->sent), i);
		tell(me, "sent", 4);
		hear(me, word, 4);
		if (i == 1)
			completion(me->rx);
		else
			sleep_ms(50);
		/* The first one's turn of progress brings what the second one counts, now or after a sleep on both. */
		asleep_on(me, both);
		SAME(fi_cntr_read(me->received), i);
	}
	for (double end = now() + PATIENCE_S; fi_trywait(me->fabric, both, 2) == -FI_EAGAIN;)
		CHECK(now() < end);
	side_end(me);
}

/* A thread that sleeps on the queue of the receives until it has a completion, and when that was. */
struct sleeper {
	struct side *me;
	waiter wait;
	struct fid_cq *cq;
	struct fi_cq_tagged_entry entry;
	double at;
	pthread_t thread;
};

static void *sleep_for_one(void *argument)
{
	struct sleeper *sleeper = argument;

	sleeper->entry = sleeper->wait(sleeper->me, sleeper->cq);
	sleeper->at = now();
	return NULL;
}

static void fall_asleep(struct sleeper *sleeper)
{
	OK(pthread_create(&sleeper->thread, NULL, sleep_for_one, sleeper));
	sleep_ms(30);
}

/* It wakes, however busy the machine is. Returns how long after `begun`, seconds. */
static double woken_since(struct sleeper *sleeper, double begun)
{
	OK(pthread_join(sleeper->thread, NULL));
	return sleeper->at - begun;
}

/* Of many wake-ups at any time of the half second after which somebody looks anyhow, not all are late. */
static void some_was_prompt(double fastest)
{
	if (fastest > PROMPT_S / 8)
		FAIL("the fastest wake-up took %.3f s", fastest);
}

/* One thread sleeps; another posts the receive of a long message that is there, and leaves its bytes to the thread that polls.
 * The endpoint talks to itself: no link to another process has anything for it to look after now and then. */
static void posted_by_another(struct side *me)
{
	static const waiter ways[] = { by_descriptor, by_sread, by_descriptor };
	struct fi_context contexts[2];
	char *from = need(LARGE), *to = need(LARGE), name[NAME_MAX_LEN];

	fill(from, LARGE, 61);
	for (int i = 0; i < 3; i++) {
		struct setup setup = { .wait_obj = FI_WAIT_FD, .threading = FI_THREAD_SAFE };
		struct sleeper sleeper = { .me = me, .wait = ways[i] };
		fi_addr_t own;

		setup.progress = i < 2 ? FI_PROGRESS_MANUAL : FI_PROGRESS_AUTO;
		side_open(me, &setup);
		sleeper.cq = me->rx;
		name_of(me->ep, name);
		own = insert(me, name);
		memset(to, 0, LARGE);
		POST(me, fi_send(me->ep, from, LARGE, NULL, own, &contexts[0]));
		progress(me);
		fall_asleep(&sleeper);
		double begun = now();
		POST(me, fi_recv(me->ep, to, LARGE, NULL, FI_ADDR_UNSPEC, &contexts[1]));
		woken_since(&sleeper, begun);
		SAME(sleeper.entry.len, LARGE);
		CHECK(holds(to, LARGE, 61, 0));
		completion(me->tx);
		side_close(me);
	}
	free(from);
	free(to);
}

/* One thread sleeps on the descriptor; another looks once, finds nothing and goes on with something else. */
static void looked_at_by_another(struct side *me)
{
	struct setup setup = { .wait_obj = FI_WAIT_FD, .threading = FI_THREAD_SAFE };
	struct sleeper sleeper = { .me = me, .wait = by_descriptor };
	struct fi_cq_tagged_entry entry;
	struct fi_context context;
	char buffer[8], name[NAME_MAX_LEN];
	fi_addr_t own;

	side_open(me, &setup);
	sleeper.cq = me->rx;
	name_of(me->ep, name);
	own = insert(me, name);
	POST(me, fi_recv(me->ep, buffer, 8, NULL, FI_ADDR_UNSPEC, &context));
	fall_asleep(&sleeper);
	SAME(fi_cq_read(me->rx, &entry, 1), -FI_EAGAIN);
	double begun = now();
	POST(me, fi_inject(me->ep, "look", 4, own));
	woken_since(&sleeper, begun);
	SAME(sleeper.entry.len, 4);
	side_close(me);
}

/* A queue that holds as many entries as it was made for does not keep the other queue from its own. */
static void exactly_full(struct side *me)
{
	enum { FULL = 4 };
	struct fi_context contexts[2 * FULL];
	char *from = need(LARGE), *to[FULL], word[4];
	uint64_t target = 5, value = 7, old = 0;
	struct fid_mr *mr = NULL;

	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_RMA | FI_ATOMIC, .cq_size = FULL, .counters = true });
	if (me->rank == 1)
		OK(fi_mr_reg(me->domain, &target, sizeof(target), FI_REMOTE_WRITE | FI_REMOTE_READ, 0, 1, 0, &mr, NULL));
	fill(from, LARGE, 71);
	for (int i = 0; i < FULL; i++)
		to[i] = need(LARGE);
	for (int i = 0; me->rank == 0 && i < FULL; i++)
		POST(me, fi_recv(me->ep, to[i], LARGE, NULL, FI_ADDR_UNSPEC, &contexts[i]));
	barrier(me);
	for (int i = 0; i < FULL; i++)
		POST(me, fi_send(me->ep, from, LARGE, NULL, me->peer, &contexts[FULL + i]));
	if (me->rank == 0) {
		for (double end = now() + PATIENCE_S; fi_cntr_read(me->received) < FULL;)
			CHECK(now() < end);
		tell(me, "full", 4);
	} else {
		for (int i = 0; i < FULL; i++)
			completion(me->tx);
		hear(me, word, 4);
		for (int i = 0; i < FULL; i++)
			POST(me, fi_recv(me->ep, to[i], LARGE, NULL, FI_ADDR_UNSPEC, &contexts[i]));
	}
	for (int i = 0; me->rank == 0 && i < FULL; i++)
		completion(me->tx);
	/* Nor from one-sided operations, which report to the other queue. */
	if (me->rank == 0) {
		struct { uint64_t at, key; } there;

		hear(me, &there, sizeof(there));
		for (int i = 0; i < 2; i++) {
			double end = now() + PATIENCE_S;
			ssize_t rc;

			do {
				rc = i == 0 ? fi_write(me->ep, &value, 8, NULL, me->peer, there.at, there.key, contexts) :
					      fi_fetch_atomic(me->ep, &value, 1, NULL, &old, NULL, me->peer, there.at,
							      there.key, FI_UINT64, FI_SUM, contexts);
				CHECK(now() < end);
			} while (rc == -FI_EAGAIN && fi_cq_read(me->tx, NULL, 0) == -FI_EAGAIN);
			OK(rc);
			completion(me->tx);
		}
		SAME(old, 7);
		tell(me, "done", 4);
	} else {
		struct { uint64_t at, key; } here = { 0, fi_mr_key(mr) };

		if (me->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR)
			here.at = (uintptr_t)&target;
		tell(me, &here, sizeof(here));
		for (double end = now() + PATIENCE_S; __atomic_load_n(&target, __ATOMIC_ACQUIRE) != 14;) {
			CHECK(now() < end);
			progress(me);
		}
		hear(me, word, 4);
		OK(fi_close(&mr->fid));
	}
	/* In any order. */
	for (int i = 0; i < FULL; i++)
		completion(me->rx);
	for (int i = 0; i < FULL; i++) {
		CHECK(holds(to[i], LARGE, 71, 0));
		free(to[i]);
	}
	side_end(me);
	free(from);
}

/* A completion that is made inside the call of another thread is signalled at once. */
static void condition_by_another(struct side *me)
{
	struct fi_context context;
	double fastest = PATIENCE_S;

	side_begin(me, &(struct setup){ .wait_obj = FI_WAIT_MUTEX_COND, .threading = FI_THREAD_SAFE });
	for (int i = 0; i < 8; i++) {
		struct sleeper sleeper = { .me = me, .wait = by_condition, .cq = me->tx };

		fall_asleep(&sleeper);
		sleep_ms(60 * i);
		double begun = now();
		POST(me, fi_send(me->ep, "signal", 7, NULL, me->peer, &context));
		double took = woken_since(&sleeper, begun);
		fastest = took < fastest ? took : fastest;
	}
	some_was_prompt(fastest);
	side_end(me);
}

/* The condition of a counter that is opened after the endpoint that feeds it was enabled. */
static void condition_opened_late(struct side *me)
{
	struct fi_cntr_attr attr = { .events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_MUTEX_COND };
	struct { uint64_t at, key; } target = { 0, 0 };
	uint64_t written = 0;
	double fastest = PATIENCE_S;
	struct fi_context context;
	struct fi_mutex_cond pair;
	struct fid_cntr *cntr;
	struct fid_mr *mr;
	char word[4];

	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_RMA | FI_RMA_EVENT, .threading = FI_THREAD_SAFE });
	if (me->rank == 0) {
		hear(me, &target, sizeof(target));
		for (uint64_t i = 1; i <= 8; i++) {
			hear(me, word, 4);
			sleep_ms(200 + 60 * (int)i);
			double begun = now();
			POST(me, fi_write(me->ep, &i, sizeof(i), NULL, me->peer, target.at, target.key, &context));
			completion(me->tx);
			hear(me, word, 4);
			double took = now() - begun;
			fastest = took < fastest ? took : fastest;
		}
		some_was_prompt(fastest);
	} else {
		OK(fi_cntr_open(me->domain, &attr, &cntr, NULL));
		OK(fi_control(&cntr->fid, FI_GETWAIT, &pair));
		OK(fi_mr_reg(me->domain, &written, sizeof(written), FI_REMOTE_WRITE, 0, 1, 0, &mr, NULL));
		OK(fi_mr_bind(mr, &cntr->fid, FI_REMOTE_WRITE));
		target.at = me->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)&written : 0;
		target.key = fi_mr_key(mr);
		tell(me, &target, sizeof(target));
		for (uint64_t i = 1; i <= 8; i++) {
			struct fid *fids[1] = { &cntr->fid };
			struct timespec until;

			tell(me, "next", 4);
			clock_gettime(CLOCK_REALTIME, &until);
			until.tv_sec += PATIENCE_S;
			pthread_mutex_lock(pair.mutex);
			while (fi_cntr_read(cntr) < i) {
				int rc = fi_trywait(me->fabric, fids, 1);

				CHECK(rc == 0 || rc == -FI_EAGAIN);
				if (rc == 0 && pthread_cond_timedwait(pair.cond, pair.mutex, &until))
					FAIL("the condition is silent for %d s", PATIENCE_S);
			}
			pthread_mutex_unlock(pair.mutex);
			tell(me, "seen", 4);
		}
		OK(fi_close(&mr->fid));
		OK(fi_close(&cntr->fid));
	}
	side_end(me);
}

/* Errors of a counter keep no application awake that never asks for them: each change is told once. */
static void counter_errors(struct side *me)
{
	static const enum fi_wait_obj objects[] = { FI_WAIT_FD, FI_WAIT_SET };
	struct fi_wait_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct fid_wait *set;

	side_begin(me, &(struct setup){ 0 });
	OK(fi_wait_open(me->fabric, &attr, &set));
	for (int i = 0; i < 2; i++) {
		struct fi_cntr_attr counter = { .wait_obj = objects[i], .wait_set = set };
		struct fid_cntr *cntr;
		struct fid *fids[1];

		OK(fi_cntr_open(me->domain, &counter, &cntr, NULL));
		fids[0] = &cntr->fid;
		for (uint64_t n = 1; n < 4; n++) {
			OK(fi_cntr_adderr(cntr, 1));
			if (i)
				SAME(fi_wait(set, 0), 0);
			else
				SAME(fi_trywait(me->fabric, fids, 1), -FI_EAGAIN);
			SAME(fi_cntr_read(cntr), 0);
			if (i)
				SAME(fi_wait(set, 0), -FI_ETIMEDOUT);
			else
				SAME(fi_trywait(me->fabric, fids, 1), 0);
			if (n == 2)
				SAME(fi_cntr_readerr(cntr), n);
		}
		OK(fi_close(&cntr->fid));
	}
	OK(fi_close(&set->fid));
	side_end(me);
}

const struct group waiting_groups[] = {
	{ "sread-unspec", sread_unspec },
	{ "sread-fd", sread_fd },
	{ "sread-condition", sread_condition },
	{ "sread-yield", sread_yield },
	{ "descriptor", descriptor },
	{ "condition", condition },
	{ "sread-ends", sread_ends },
	{ "fence-asleep", fence_asleep },
	{ "long-asleep", long_asleep },
	{ "poll-set", poll_set },
	{ "wait-set", wait_set },
	{ "automatic-progress", automatic },
	{ "elsewhere", elsewhere },
	{ "counter-asleep", counter_asleep },
	{ "counter-errors", counter_errors },
	{ "counter-set-back", counter_set_back },
	{ "posted-by-another", posted_by_another },
	{ "looked-at-by-another", looked_at_by_another },
	{ "exactly-full", exactly_full },
	{ "condition-by-another", condition_by_another },
	{ "condition-opened-late", condition_opened_late },
	{ NULL, NULL },
};
