/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * one_refused --list
 * one_refused CALL ERROR shm|net|any both|first|second
 *
 * Two processes exchange messages and copy to and from each other, by shared memory, over the loopback interface, or as
 * they like, while a seccomp filter refuses one system call with ERROR (ENOSYS or EPERM) in both of them or in one. The filter
 * begins when libfabric has loaded the provider, before fi_getinfo. --list prints the calls, one a line.
 *
 * Either all arrives, or a call of libfabric fails with an error, and the log of that process has a warning that
 * names the error. Not in order: a process that is ended by a signal or hangs, an operation that never ends, wrong
 * bytes, an error that the log does not explain, more than LINES lines of the provider in a log. The last line is
 * `ok ...` or `FAIL ...`, the logs stay in the working folder as CALL-ERROR-WAY-WHERE.0.log and .1.log.
 */
#include "common.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* How long an operation may take, and a process, seconds. */
#define OPERATION_S 15
#define PROCESS_S 40
/* Of the provider, in the log of one process. */
#define LINES 40
#define LONGEST ((size_t)3 << 20)
#define COPIED ((size_t)1 << 20)
#define KEY 7

/* What a process has come to, beside 0 and the 1 of common.h, which says that a call failed. */
enum { ALONE = 4, SILENT, WRONG };

static const struct call {
	const char *name;
	long number;
} calls[] = {
#define CALL(name) { #name, SYS_##name },
	CALL(accept4) CALL(bind) CALL(clock_nanosleep) CALL(clone3) CALL(connect) CALL(dup) CALL(epoll_create1)
	CALL(epoll_ctl) CALL(epoll_pwait) CALL(eventfd2) CALL(fallocate) CALL(fcntl) CALL(fstat) CALL(ftruncate)
	CALL(getcpu) CALL(getdents64) CALL(get_mempolicy) CALL(getpeername) CALL(getrandom) CALL(getsockname) CALL(getsockopt) CALL(ioctl)
	CALL(kill) CALL(listen) CALL(lseek) CALL(madvise) CALL(membarrier) CALL(memfd_create) CALL(mincore)
	CALL(mprotect) CALL(mremap) CALL(munmap) CALL(newfstatat) CALL(pidfd_open) CALL(ppoll) CALL(prctl)
	CALL(prlimit64) CALL(pread64) CALL(process_vm_readv) CALL(process_vm_writev) CALL(pwrite64) CALL(readlinkat) CALL(readv) CALL(recvfrom)
	CALL(recvmmsg) CALL(recvmsg) CALL(sched_getaffinity) CALL(sched_setaffinity) CALL(sched_yield)
	CALL(sendmmsg) CALL(sendmsg) CALL(sendto) CALL(setsockopt) CALL(shmat) CALL(shmctl)
	CALL(shmdt) CALL(shmget) CALL(shutdown) CALL(sigaltstack) CALL(socket) CALL(socketpair) CALL(statx) CALL(sysinfo)
	CALL(tgkill) CALL(timerfd_create) CALL(timerfd_settime) CALL(unshare) CALL(userfaultfd) CALL(writev)
#ifdef SYS_poll
	CALL(access) CALL(arch_prctl) CALL(epoll_wait) CALL(poll) CALL(readlink) CALL(unlink)
#endif
#undef CALL
};

#define CALLS (sizeof(calls) / sizeof(*calls))

/* What both processes see; nothing between them needs a system call. */
struct common {
	int stage[2], over[2];
	char name[2][NAME_MAX_LEN];
	uint64_t address[2], key[2];
};

static struct common *common;
static const char *refused;

static void refuse(long number, int error)
{
	struct sock_filter lines[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned int)number, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned int)error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(lines) / sizeof(*lines), .filter = lines };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

static void end_with(int status, const char *what)
{
	fprintf(stderr, "  %s\n", what);
	fflush(NULL);
	_exit(status);
}

static bool other_is_gone(const struct side *side)
{
	return __atomic_load_n(&common->over[1 - side->rank], __ATOMIC_ACQUIRE);
}

/* While one waits: ends the process when the other is gone or time is over. */
static void keep_waiting(bool gone, double end, const char *what)
{
	if (gone)
		end_with(ALONE, "the other process is gone");
	if (now() > end)
		end_with(SILENT, what);
}

static void failed(struct fid_cq *cq)
{
	struct fi_cq_err_entry error = { 0 };

	SAME(fi_cq_readerr(cq, &error, 0), 1);
	FAIL("an operation failed: %s: %s", fi_strerror(error.err),
	     fi_cq_strerror(cq, error.prov_errno, error.err_data, NULL, 0));
}

/* One look at a queue. */
static void look(struct side *side, struct fid_cq *cq, int *count)
{
	struct fi_cq_tagged_entry entry;
	ssize_t n = side->setup.wait_obj == FI_WAIT_NONE ? fi_cq_read(cq, &entry, 1)
							 : fi_cq_sread(cq, &entry, 1, NULL, 5);

	if (n == 1)
		++*count;
	else if (n == -FI_EAVAIL)
		failed(cq);
	else if (n != -FI_EAGAIN && n != -FI_EINTR)
		FAIL("a queue: %s", fi_strerror((int)-n));
}

static void sync_sides(struct side *side, const char *where)
{
	int mine = __atomic_add_fetch(&common->stage[side->rank], 1, __ATOMIC_ACQ_REL);
	double end = now() + patience_s(OPERATION_S);

	for (;;) {
		/* In this order: a process that is gone has come to its last stage before. */
		bool gone = other_is_gone(side);

		if (__atomic_load_n(&common->stage[1 - side->rank], __ATOMIC_ACQUIRE) >= mine)
			return;
		progress(side);
		keep_waiting(gone, end, where);
	}
}

/* Until so many have been sent, or copied, and received. */
static void wait_for(struct side *side, int sent, int received, const char *what)
{
	double end = now() + patience_s(OPERATION_S);
	int ends[2] = { 0, 0 };

	while (ends[0] < sent || ends[1] < received) {
		bool gone = other_is_gone(side);

		look(side, side->tx, &ends[0]);
		look(side, side->rx, &ends[1]);
		if (ends[0] < sent || ends[1] < received)
			keep_waiting(gone, end, what);
	}
}

#define TRY(side, call) \
	do { \
		double end_ = now() + patience_s(OPERATION_S); \
		ssize_t rc_; \
		while ((rc_ = (call)) == -FI_EAGAIN) { \
			progress(side); \
			keep_waiting(other_is_gone(side), end_, #call " finds no room"); \
		} \
		if (rc_) \
			FAIL("%s: %s", #call, fi_strerror((int)-rc_)); \
	} while (0)

static void messages(struct side *side)
{
	static const size_t lengths[] = { 8, 40000, LONGEST };
	char *out = need(LONGEST), *in = need(LONGEST);

	for (int i = 0; i < 3; i++) {
		fill(out, lengths[i], (uint32_t)(i * 2 + side->rank));
		memset(in, 0, lengths[i]);
		TRY(side, fi_trecv(side->ep, in, lengths[i], NULL, FI_ADDR_UNSPEC, (uint64_t)i, 0, NULL));
		TRY(side, fi_tsend(side->ep, out, lengths[i], NULL, side->peer, (uint64_t)i, NULL));
		wait_for(side, 1, 1, "a message does not arrive");
		if (!holds(in, lengths[i], (uint32_t)(i * 2 + 1 - side->rank), 0))
			end_with(WRONG, "a message has wrong bytes");
	}
	sync_sides(side, "the other process waits for a message");
	free(out);
	free(in);
}

static void copies(struct side *side, char *window, char *local)
{
	int other = 1 - side->rank;
	struct iovec part = { local, COPIED };
	struct fi_rma_iov to = { common->address[other], COPIED, common->key[other] };
	struct fi_msg_rma write = { .msg_iov = &part, .iov_count = 1, .addr = side->peer, .rma_iov = &to, .rma_iov_count = 1 };

	fill(local, COPIED, (uint32_t)(10 + side->rank));
	TRY(side, fi_writemsg(side->ep, &write, FI_COMPLETION | FI_DELIVERY_COMPLETE));
	wait_for(side, 1, 0, "a write does not end");
	memset(local, 0, COPIED);
	TRY(side, fi_read(side->ep, local, COPIED, NULL, side->peer, common->address[other] + COPIED, common->key[other], NULL));
	wait_for(side, 1, 0, "a read does not end");
	if (!holds(local, COPIED, (uint32_t)(20 + other), 0))
		end_with(WRONG, "a read has wrong bytes");
	sync_sides(side, "the other process waits for a copy");
	if (!holds(window, COPIED, (uint32_t)(10 + other), 0))
		end_with(WRONG, "a write has wrong bytes");
}

static void exchange(struct side *side, const struct setup *setup)
{
	char *window = need(2 * COPIED), *local = need(COPIED);
	struct fid_mr *mr;

	side_open(side, setup);
	name_of(side->ep, common->name[side->rank]);
	fill(window + COPIED, COPIED, (uint32_t)(20 + side->rank));
	OK(fi_mr_reg(side->domain, window, 2 * COPIED, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, KEY, 0, &mr, NULL));
	common->key[side->rank] = fi_mr_key(mr);
	common->address[side->rank] = side->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)window : 0;
	sync_sides(side, "the other process does not open its endpoint");
	side->peer = insert(side, common->name[1 - side->rank]);
	messages(side);
	copies(side, window, local);
	sync_sides(side, "the other process does not come to its end");
	OK(fi_close(&mr->fid));
	side_close(side);
	free(window);
	free(local);
}

static void load_provider(void)
{
	struct fi_info *hints = fi_allocinfo(), *info = NULL;

	CHECK(hints);
	hints->fabric_attr->prov_name = strdup("nobody's");
	SAME(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info), -FI_ENODATA);
	fi_freeinfo(hints);
}

static void one_side(int rank, const struct call *call, int error)
{
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_RMA, .addr_format = FI_SOCKADDR_IN };
	struct side side = { .rank = rank };

	alarm((unsigned int)patience_s(PROCESS_S));
	load_provider();
	if (error)
		refuse(call->number, error);
	exchange(&side, &setup);
	/* Again with objects that one can wait for. */
	setup.wait_obj = FI_WAIT_UNSPEC;
	exchange(&side, &setup);
	_exit(0);
}

/* --- the judge --- */

static const char *log_name(int rank)
{
	static char name[200];

	snprintf(name, sizeof(name), "%s.%d.log", refused, rank);
	return name;
}

struct log {
	int lines, naming;
	/* What the process says of its end. */
	char last[300];
};

static struct log read_log(int rank, int error)
{
	struct log log = { 0 };
	char line[1000];
	FILE *file = fopen(log_name(rank), "r");

	CHECK(file);
	while (fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = 0;
		if (strstr(line, ":udrv:")) {
			log.lines++;
			log.naming += strstr(line, strerror(error)) != NULL;
		} else if (!strncmp(line, "  ", 2)) {
			snprintf(log.last, sizeof(log.last), "%.*s", (int)sizeof(log.last) - 1, line + 2);
		}
	}
	fclose(file);
	return log;
}

/* Why not, or NULL. */
static const char *fault(int status, const struct log *log, bool explained)
{
	if (WIFSIGNALED(status))
		return WTERMSIG(status) == SIGALRM ? "a process hangs" : strsignal(WTERMSIG(status));
	if (log->lines > LINES)
		return "a flood in the log";
	if (WEXITSTATUS(status) == SILENT || WEXITSTATUS(status) == WRONG)
		return log->last;
	if (WEXITSTATUS(status) == 1 && !explained)
		return "no line of the log names the error";
	return NULL;
}

static int judge(const int status[2], int error)
{
	struct log logs[2] = { read_log(0, error), read_log(1, error) };
	bool explained = logs[0].naming || logs[1].naming;
	int worst = 0;

	for (int i = 0; i < 2; i++) {
		const char *why = fault(status[i], &logs[i], explained);

		if (why) {
			printf("FAIL %s: process %d: %s (%s; %d lines)\n", refused, i, why, logs[i].last, logs[i].lines);
			return 1;
		}
		if (WEXITSTATUS(status[i]) == 1)
			worst = i + 1;
		else if (WEXITSTATUS(status[i]) && !worst)
			worst = 3;
	}
	if (worst == 3)
		printf("FAIL %s: %s\n", refused, "a process is gone without an error");
	else if (worst)
		printf("ok   %s: error: %s\n", refused, logs[worst - 1].last);
	else
		printf("ok   %s: works; lines %d %d\n", refused, logs[0].lines, logs[1].lines);
	return worst == 3;
}

static void begin_log(int rank)
{
	int fd = open(log_name(rank), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0644);

	CHECK(fd >= 0 && dup2(fd, 1) == 1 && dup2(fd, 2) == 2);
	close(fd);
}

static const struct call *named(const char *name)
{
	for (size_t i = 0; i < CALLS; i++)
		if (!strcmp(calls[i].name, name))
			return &calls[i];
	FAIL("which system call is %s?", name);
}

static void settle(const char *way)
{
	setenv("FI_LOG_LEVEL", "warn", 0);
	setenv("FI_LOG_PROV", "udrv", 1);
	setenv("FI_UDRV_IFACE", "lo", 1);
	setenv("FI_UDRV_PEER_TIMEOUT", "5", 1);
	if (strcmp(way, "any"))
		setenv(strcmp(way, "shm") ? "FI_UDRV_SHM" : "FI_UDRV_NET", "0", 1);
}

int main(int argc, char **argv)
{
	int status[2] = { 0 }, error;
	char name[150];
	pid_t pids[2];

	if (argc == 2 && !strcmp(argv[1], "--list")) {
		for (size_t i = 0; i < CALLS; i++)
			puts(calls[i].name);
		return 0;
	}
	if (argc != 5)
		FAIL("wants a call, an error, a way and which processes");
	error = strcmp(argv[2], "ENOSYS") ? EPERM : ENOSYS;
	snprintf(name, sizeof(name), "%s-%s-%s-%s", argv[1], argv[2], argv[3], argv[4]);
	refused = name;
	settle(argv[3]);
	common = mmap(NULL, sizeof(*common), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(common != MAP_FAILED);
	for (int i = 0; i < 2; i++) {
		pids[i] = fork();
		CHECK(pids[i] >= 0);
		if (pids[i] == 0) {
			begin_log(i);
			one_side(i, named(argv[1]), strcmp(argv[4], i ? "first" : "second") ? error : 0);
		}
	}
	for (int left = 2; left; left--) {
		int how;
		pid_t pid = wait(&how);
		int rank = pid == pids[1];

		CHECK(pid > 0);
		status[rank] = how;
		__atomic_store_n(&common->over[rank], 1, __ATOMIC_RELEASE);
	}
	return judge(status, error);
}
