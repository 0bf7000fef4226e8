/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * torture [--kills N] [--seed N] [--scene NUMBER] [--forbid WAY]
 *
 * Groups of workers exchange messages; one of them is killed at a random moment. Every other one has to see all its
 * operations on the dead one end within two seconds, the rest has to go on unharmed, and nothing may stay behind:
 * no process, no socket name. WAY keeps them from attaching to each other (forbid.h): nothing may be copied that way then. One line a scene, then "N passed, N failed" over the rounds.
 */
#include "torture.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* From a kill until nobody waits for the dead any more. */
#define NOTICE_S 2.0
/* The parent's patience with anything. */
#define ROUND_S 10.0

struct worker {
	pid_t pid, heir;
	int link, port;
	char name[NAME_MAX_LEN];
	bool dead, stopped, closing;
	double killed_at;
	/* For each other worker. */
	bool settled[MOST_WORKERS], heard[MOST_WORKERS], refused[MOST_WORKERS];
	uint64_t failures;
};

/* What is done to the victim. */
struct scene {
	const char *name;
	int workers, victims;
	/* The kill comes so long after the workers know each other, and at most so much later, milliseconds. */
	int earliest_ms, latest_ms;
	/* See struct round. */
	int loud_ms;
	/* Stopped for so long before the kill, milliseconds. */
	int stopped_ms;
	bool heir, zombie, restart;
	/* Results. */
	int rounds, failed;
	double slowest;
	uint64_t failures, messages;
};

static struct scene scenes[] = {
	{ .name = "a pair", .workers = 2, .victims = 1, .latest_ms = 60 },
	{ .name = "a group of four", .workers = 4, .victims = 1, .latest_ms = 60 },
	{ .name = "three of four", .workers = 4, .victims = 3, .latest_ms = 60 },
	{ .name = "during the first contact", .workers = 3, .victims = 1, .latest_ms = 2 },
	{ .name = "stopped, then killed", .workers = 3, .victims = 1, .latest_ms = 40, .stopped_ms = 200 },
	{ .name = "stopped before contact", .workers = 3, .victims = 1, .stopped_ms = 100 },
	{ .name = "a child holds its sockets", .workers = 3, .victims = 1, .latest_ms = 60, .heir = true },
	{ .name = "a child, and not reaped", .workers = 3, .victims = 1, .latest_ms = 60, .heir = true, .zombie = true },
	{ .name = "started again, same port", .workers = 3, .victims = 1, .latest_ms = 60, .restart = true },
	/* A link shrinks at the tenth look at it, of which there are two a second. */
	{ .name = "while links shrink", .workers = 3, .victims = 1, .earliest_ms = 5200, .latest_ms = 1000, .loud_ms = 400 },
};
#define SCENES (sizeof(scenes) / sizeof(*scenes))

static uint64_t random_state;
static struct scene *scene;
static enum forbidden forbidden;
static struct round plan;
static struct worker workers[MOST_WORKERS];
static char trouble[256];
static double slowest;

static int choose_below(int n)
{
	return (int)(next_random(&random_state) % (uint64_t)n);
}

/* Remembers the first reason for which a round fails. */
#define TROUBLE(...) (trouble[0] ? 0 : snprintf(trouble, sizeof(trouble), __VA_ARGS__))

static void start(int me)
{
	struct worker *worker = &workers[me];
	int links[2];

	fflush(NULL);
	OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, links));
	*worker = (struct worker){ .link = links[0], .pid = fork() };
	CHECK(worker->pid >= 0);
	if (worker->pid) {
		close(links[1]);
		return;
	}
	forbid_here(plan.forbidden);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	/* The others' links are not ours to hold. */
	for (int i = 0; i < MOST_WORKERS; i++)
		if (workers[i].link > 0)
			close(workers[i].link);
	work(&plan, me, links[1]);
}

static void say_to(int to, const struct note *note)
{
	if (!workers[to].dead && send(workers[to].link, note, sizeof(*note), MSG_NOSIGNAL) != sizeof(*note))
		TROUBLE("worker %d is gone", to);
}

static void on_settled(int from, const struct note *note)
{
	struct worker *dead = &workers[note->peer];

	workers[from].settled[note->peer] = true;
	workers[from].failures += note->count;
	if (!dead->killed_at || note->time < dead->killed_at) {
		TROUBLE("worker %d lost worker %d, which was well: %s", from, note->peer, note->name);
		return;
	}
	if (note->time - dead->killed_at > slowest)
		slowest = note->time - dead->killed_at;
	if (note->time - dead->killed_at > NOTICE_S)
		TROUBLE("it took worker %d %.2f s to be rid of worker %d", from, note->time - dead->killed_at,
			note->peer);
}

static void on_note(int from, const struct note *note)
{
	struct worker *worker = &workers[from];

	switch (note->kind) {
	case READY:
		memcpy(worker->name, note->name, sizeof(worker->name));
		worker->port = note->port;
		break;
	case HEIR:
		worker->heir = note->pid;
		break;
	case SETTLED:
		on_settled(from, note);
		break;
	case HEARD:
		worker->heard[note->peer] = true;
		break;
	case AGAIN:
		worker->refused[note->peer] = true;
		break;
	case STOPPED:
		worker->stopped = true;
		break;
	case CLOSING:
		worker->closing = true;
		scene->messages += note->count;
		break;
	default:
		break;
	}
}

/* Listens to all workers for at most `ms`. */
static void hear_workers(int ms)
{
	struct pollfd at[MOST_WORKERS];
	struct note note;

	for (int i = 0; i < plan.workers; i++)
		at[i] = (struct pollfd){ .fd = workers[i].dead || workers[i].closing ? -1 : workers[i].link,
					 .events = POLLIN };
	poll(at, (nfds_t)plan.workers, ms);
	for (int i = 0; i < plan.workers; i++) {
		if (!at[i].revents)
			continue;
		if (recv(workers[i].link, &note, sizeof(note), MSG_DONTWAIT) == sizeof(note))
			on_note(i, &note);
		else if (!workers[i].killed_at)
			TROUBLE("worker %d ended by itself", i);
	}
}

/* Listens until `done`, or until there is trouble. */
static bool hear_until(bool (*done)(void), const char *what)
{
	double end = now() + ROUND_S;

	while (!done() && !trouble[0]) {
		if (now() > end)
			TROUBLE("%s: not within %.0f s", what, ROUND_S);
		hear_workers(50);
	}
	return !trouble[0];
}

static bool all_victims_have_heirs(void)
{
	for (int i = 0; i < scene->victims; i++)
		if (!workers[i].heir)
			return false;
	return true;
}

/* `yes` of every worker that lives. */
#define ALL_LIVING(yes) \
	do { \
		for (int i = 0; i < plan.workers; i++) \
			if (!workers[i].dead && !(yes)) \
				return false; \
		return true; \
	} while (0)

static bool all_ready(void)
{
	ALL_LIVING(workers[i].name[0]);
}

static bool all_stopped(void)
{
	ALL_LIVING(workers[i].stopped);
}

static bool all_closing(void)
{
	ALL_LIVING(workers[i].closing);
}

static bool all_settled(void)
{
	for (int dead = 0; dead < plan.workers; dead++)
		for (int i = 0; i < plan.workers; i++)
			if (workers[dead].dead && !workers[i].dead && !workers[i].settled[dead])
				return false;
	return true;
}

/* Every living worker has heard of every other one. */
static bool all_heard(void)
{
	for (int from = 0; from < plan.workers; from++)
		for (int i = 0; i < plan.workers; i++)
			if (i != from && !workers[from].dead && !workers[i].dead && !workers[i].heard[from])
				return false;
	return true;
}

static void reap(struct worker *worker)
{
	int status;

	if (worker->pid > 0 && waitpid(worker->pid, &status, 0) == worker->pid)
		worker->pid = 0;
}

static void introduce(int to, int of)
{
	struct note note = { .kind = PEER, .peer = of, .pid = workers[of].pid };

	memcpy(note.name, workers[of].name, sizeof(note.name));
	say_to(to, &note);
}

static void make_plan(void)
{
	static const char *const ways[] = { NULL, "off", "read", "write" };
	const char *cma = ways[choose_below(4)];

	/* It has to find out by itself. */
	if (forbidden)
		cma = NULL;
	plan = (struct round){ .workers = scene->workers, .manner = (enum manner)choose_below(MANNERS),
			       .forbidden = forbidden, .loud_ms = scene->loud_ms };
	for (int i = 0; i < plan.workers; i++)
		plan.cma[i] = cma;
	slowest = 0;
	trouble[0] = 0;
}

static void begin(void)
{
	for (int i = 0; i < plan.workers; i++)
		start(i);
	if (!hear_until(all_ready, "opening"))
		return;
	/* Which of two learns of the other first is for chance to say. */
	for (int n = 0, first = choose_below(plan.workers); n < plan.workers; n++)
		for (int to = 0; to < plan.workers; to++)
			if (to != (n + first) % plan.workers)
				introduce(to, (n + first) % plan.workers);
}

/* The first workers are the victims. */
static void kill_victims(void)
{
	double at = now() + (scene->earliest_ms + next_random(&random_state) % 1000 * 1e-3 * scene->latest_ms) * 1e-3;

	while (now() < at && !trouble[0])
		hear_workers(1);
	for (int i = 0; i < scene->victims && scene->heir; i++)
		say_to(i, &(struct note){ .kind = HEIR });
	if (scene->heir && !hear_until(all_victims_have_heirs, "leaving an heir"))
		return;
	for (int i = 0; i < scene->victims && scene->stopped_ms; i++)
		kill(workers[i].pid, SIGSTOP);
	for (double end = now() + scene->stopped_ms * 1e-3; now() < end && !trouble[0];)
		hear_workers(5);
	for (int i = 0; i < scene->victims; i++) {
		workers[i].killed_at = now();
		kill(workers[i].pid, SIGKILL);
		workers[i].dead = true;
	}
	for (int i = 0; i < scene->victims && !scene->zombie; i++)
		reap(&workers[i]);
}

/* A new worker under the old port is as good as any. */
static void start_again(void)
{
	int port = workers[0].port;

	close(workers[0].link);
	plan.port[0] = port;
	workers[0].link = 0;
	start(0);
	for (int i = 0; i < plan.workers; i++)
		workers[i].heard[0] = false;
	if (!hear_until(all_ready, "opening again"))
		return;
	if (workers[0].port != port)
		TROUBLE("asked for port %d, got %d", port, workers[0].port);
	for (int i = 1; i < plan.workers; i++) {
		introduce(i, 0);
		introduce(0, i);
	}
	hear_until(all_heard, "talking to the new one");
}

static bool all_refused(void)
{
	ALL_LIVING(workers[i].refused[0]);
}

/* A dead worker whose child holds its sockets is sent to once more. */
static void send_to_heirs(void)
{
	for (int i = scene->victims; i < plan.workers; i++)
		say_to(i, &(struct note){ .kind = AGAIN });
	hear_until(all_refused, "sending to the dead");
}

static void end(void)
{
	for (int i = 0; i < plan.workers; i++)
		say_to(i, &(struct note){ .kind = STOP });
	if (!hear_until(all_stopped, "stopping"))
		return;
	for (int i = 0; i < plan.workers; i++)
		say_to(i, &(struct note){ .kind = CLOSE });
	hear_until(all_closing, "closing");
}

/* True while the name of one of the endpoint's sockets is there. */
static bool socket_left(int port)
{
	FILE *file = fopen("/proc/net/unix", "r");
	char line[512], name[32];
	bool found = false;

	snprintf(name, sizeof(name), " @udrv/%d\n", port);
	while (file && fgets(line, sizeof(line), file))
		found |= strlen(line) >= strlen(name) && !strcmp(line + strlen(line) - strlen(name), name);
	if (file)
		fclose(file);
	return found;
}

/* A worker that was told to close exits by itself, and well. */
static void await_exit(struct worker *worker, int number)
{
	double end = now() + 3;
	int status;
	pid_t gone;

	while ((gone = waitpid(worker->pid, &status, WNOHANG)) == 0 && now() < end)
		sleep_ms(2);
	if (gone != worker->pid) {
		TROUBLE("worker %d does not exit", number);
		return;
	}
	worker->pid = 0;
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
		TROUBLE("worker %d ended with status %#x", number, (unsigned int)status);
}

static void check_socket(int port)
{
	double end = now() + 1;

	while (socket_left(port)) {
		if (now() > end) {
			TROUBLE("the socket name @udrv/%d is left", port);
			return;
		}
		sleep_ms(10);
	}
}

/* Ends what is left, and says whether there was something that should not be. */
static void clean_up(void)
{
	int status;

	for (int i = 0; i < plan.workers; i++) {
		struct worker *worker = &workers[i];

		if (worker->closing)
			await_exit(worker, i);
		if (worker->pid > 0)
			kill(worker->pid, SIGKILL);
		reap(worker);
		if (worker->heir > 0) {
			kill(worker->heir, SIGKILL);
			waitpid(worker->heir, &status, 0); /* it is ours now: see main() */
		}
		close(worker->link);
		if (worker->port)
			check_socket(worker->port);
		*worker = (struct worker){ 0 };
	}
	if (waitpid(-1, &status, WNOHANG) != -1 || errno != ECHILD)
		TROUBLE("a process is left");
}

static void play(struct scene *which)
{
	uint64_t failures = 0;

	scene = which;
	make_plan();
	begin();
	if (!trouble[0])
		kill_victims();
	if (!trouble[0])
		hear_until(all_settled, "noticing the dead");
	if (!trouble[0])
		hear_until(all_heard, "talking to the living");
	for (int i = 0; i < plan.workers; i++)
		failures += workers[i].failures;
	if (!trouble[0] && scene->heir)
		send_to_heirs();
	if (!trouble[0] && scene->restart)
		start_again();
	if (!trouble[0])
		end();
	clean_up();
	scene->rounds++;
	scene->failures += failures;
	if (slowest > scene->slowest)
		scene->slowest = slowest;
	if (!trouble[0])
		return;
	scene->failed++;
	printf("FAIL %s: %s (waiting by %s, FI_UDRV_CMA=%s)\n", scene->name, trouble,
	       (const char *[]){ "polling", "fi_cq_sread", "descriptor" }[plan.manner],
	       plan.cma[0] ? plan.cma[0] : "auto");
}

int main(int argc, char **argv)
{
	int kills = 25, only = -1, done = 0, passed = 0, failed = 0;

	random_state = (uint64_t)getpid();
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--kills"))
			kills = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--seed"))
			random_state = strtoull(argv[i + 1], NULL, 0);
		else if (!strcmp(argv[i], "--scene"))
			only = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--forbid"))
			forbidden = forbidden_by(argv[i + 1]);
		else
			FAIL("what is %s?", argv[i]);
	}
	printf("seed %llu\n", (unsigned long long)random_state);
	/* Children of a dead worker become ours. */
	OK(prctl(PR_SET_CHILD_SUBREAPER, 1));
	CHECK(only < (int)SCENES);
	forbid_for_children(forbidden);
	for (size_t next = 0; done < kills; next = (next + 1) % SCENES) {
		if (only >= 0 && only != (int)next)
			continue;
		play(&scenes[next]);
		done += scenes[next].victims;
	}
	printf("%-26s %6s %6s %10s %9s %9s\n", "scene", "rounds", "failed", "slowest ms", "failures", "messages");
	for (size_t i = 0; i < SCENES; i++) {
		printf("%-26s %6d %6d %10.0f %9llu %9llu\n", scenes[i].name, scenes[i].rounds, scenes[i].failed,
		       scenes[i].slowest * 1e3, (unsigned long long)scenes[i].failures,
		       (unsigned long long)scenes[i].messages);
		passed += scenes[i].rounds - scenes[i].failed;
		failed += scenes[i].failed;
	}
	printf("%d kills\n%d passed, %d failed\n", done, passed, failed);
	return failed > 0;
}
