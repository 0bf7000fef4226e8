/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Applications that load libfabric, and with it the provider, only for a while:
 *
 * unload reload LIBFABRIC          open, list, close, twenty times
 * unload use LIBFABRIC             open, move a message, close, five times
 * unload alternate LIBFABRIC OTHER two copies of libfabric, one after the other, five times
 * unload overlap LIBFABRIC OTHER   two copies at once, each used while the other comes and goes
 * unload thread LIBFABRIC          a thread that had an endpoint ends after libfabric is gone
 * unload late LIBFABRIC            main() returns with everything open: destructors run over it
 * unload fork LIBFABRIC            a child that runs all its exit handlers leaves the parent's endpoint alone
 * unload child LIBFABRIC           a child opens an endpoint of its own beside the inherited one
 */
#include "host.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void use(struct core *core, unsigned char seed)
{
	struct endpoint endpoint;

	endpoint_open(core, &endpoint);
	endpoint_exchange(&endpoint, seed);
	endpoint_close(core, &endpoint);
}

static void reload(const char *path, const char *other)
{
	struct core core;
	int i;

	(void)other;
	for (i = 0; i < 20; i++) {
		core_open(&core, path);
		core.freeinfo(core_list(&core, core.version()));
		core_close(&core);
	}
}

static void use_often(const char *path, const char *other)
{
	struct core core;
	int i;

	(void)other;
	for (i = 0; i < 5; i++) {
		core_open(&core, path);
		use(&core, i);
		core_close(&core);
	}
}

static void alternate(const char *path, const char *other)
{
	int i;

	for (i = 0; i < 5; i++) {
		reload(path, NULL);
		use_often(other, NULL);
	}
}

static void overlap(const char *path, const char *other)
{
	struct core first, second;
	struct endpoint a, b;
	int i;

	for (i = 0; i < 3; i++) {
		core_open(&first, path);
		endpoint_open(&first, &a);
		core_open(&second, other);
		endpoint_open(&second, &b);
		endpoint_exchange(&a, 1);
		endpoint_exchange(&b, 2);
		endpoint_close(&first, &a);
		core_close(&first);
		endpoint_exchange(&b, 3);
		core_open(&first, path);
		use(&first, 4);
		endpoint_close(&second, &b);
		core_close(&second);
		use(&first, 5);
		core_close(&first);
	}
}

static struct core shared;
static sem_t used, gone;

static void *user(void *unused)
{
	use(&shared, 6);
	sem_post(&used);
	sem_wait(&gone);
	return unused;
}

static void thread(const char *path, const char *other)
{
	pthread_t id;
	int i;

	(void)other;
	for (i = 0; i < 5; i++) {
		core_open(&shared, path);
		if (sem_init(&used, 0, 0) || sem_init(&gone, 0, 0) || pthread_create(&id, NULL, user, NULL))
			die("no thread");
		sem_wait(&used);
		core_close(&shared);
		sem_post(&gone);
		pthread_join(id, NULL);
	}
}

static void late(const char *path, const char *other)
{
	static struct endpoint endpoint;

	(void)other;
	core_open(&shared, path);
	endpoint_open(&shared, &endpoint);
	endpoint_exchange(&endpoint, 7);
}

static void await(pid_t child)
{
	int status;

	if (waitpid(child, &status, 0) != child)
		die("no child");
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		die("the child ended with wait status %#x", status);
}

static pid_t must_fork(void)
{
	pid_t child;

	fflush(stdout);
	child = fork();
	if (child < 0)
		die("no fork");
	return child;
}

static void fork_exit(const char *path, const char *other)
{
	struct endpoint endpoint;
	pid_t child;
	int i;

	(void)other;
	core_open(&shared, path);
	endpoint_open(&shared, &endpoint);
	endpoint_exchange(&endpoint, 8);
	for (i = 0; i < 3; i++) {
		child = must_fork();
		if (!child) {
			core_close(&shared);
			exit(0);
		}
		endpoint_exchange(&endpoint, 9);
		await(child);
		endpoint_exchange(&endpoint, 10);
	}
	endpoint_close(&shared, &endpoint);
	core_close(&shared);
}

static void fork_use(const char *path, const char *other)
{
	struct endpoint endpoint;
	pid_t child;

	(void)other;
	core_open(&shared, path);
	endpoint_open(&shared, &endpoint);
	endpoint_exchange(&endpoint, 11);
	child = must_fork();
	use(&shared, 12);
	if (!child)
		exit(0);
	endpoint_exchange(&endpoint, 13);
	await(child);
	endpoint_exchange(&endpoint, 14);
	endpoint_close(&shared, &endpoint);
	core_close(&shared);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *word;
		void (*play)(const char *path, const char *other);
		int paths;
	} plays[] = {
		{ "reload", reload, 1 }, { "use", use_often, 1 }, { "alternate", alternate, 2 },
		{ "overlap", overlap, 2 }, { "thread", thread, 1 }, { "late", late, 1 },
		{ "fork", fork_exit, 1 }, { "child", fork_use, 1 },
	};
	size_t i;

	for (i = 0; argc > 2 && i < sizeof(plays) / sizeof(*plays); i++) {
		if (strcmp(argv[1], plays[i].word) || argc != 2 + plays[i].paths)
			continue;
		plays[i].play(argv[2], argv[3]);
		return 0;
	}
	die("usage: unload PLAY LIBFABRIC [OTHER]");
}
