/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
#include "forbid.h"

#include "common.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NOBODY 65534

const char *const forbidden_names[WAYS_TO_FORBID] = { "nothing", "not dumpable", "user name spaces", "filtered" };

enum forbidden forbidden_by(const char *name)
{
	for (int i = 0; i < WAYS_TO_FORBID; i++)
		if (!strcmp(name, forbidden_names[i]))
			return (enum forbidden)i;
	FAIL("what is forbidden by %s?", name);
}

static void filter(void)
{
	struct sock_filter lines[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(lines) / sizeof(*lines), .filter = lines };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

static void write_to(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
}

/* Its root is who we were. */
static void enter_namespace(void)
{
	uid_t user = geteuid();
	char map[64];

	CHECK(!unshare(CLONE_NEWUSER));
	snprintf(map, sizeof(map), "0 %u 1", user);
	write_to("/proc/self/uid_map", map);
}

void forbid_for_children(enum forbidden what)
{
	if (what == FILTERED)
		filter();
	if (what == NOT_DUMPABLE && geteuid() == 0)
		CHECK(!setgroups(0, NULL) && !setgid(NOBODY) && !setuid(NOBODY));
}

void forbid_here(enum forbidden what)
{
	if (what == NOT_DUMPABLE)
		CHECK(!prctl(PR_SET_DUMPABLE, 0));
	if (what == USER_NAMESPACES)
		enter_namespace();
}
