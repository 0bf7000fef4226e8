/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * break_qp PID
 *
 * Puts the connected queue pairs of another process into the error state, as a device does that has found something
 * wrong, and prints how many: through the process's own descriptors of its devices (pidfd_getfd(2)) and the kernel's
 * interface to verbs (rdma/ib_user_ioctl_cmds.h). Takes the right to trace the process. Ends with 1 when there were none.
 */
#include <dirent.h>
#include <fcntl.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The kernel counts a process's objects on a device from 0, all kinds together. */
#define HANDLES 4096

/* ibv_modify_qp(3) */
enum { STATE = 1, DEST_QPN = 1 << 20, TO_ERROR = 6 };

/* One command of the older interface, through the newer one, which does not ask who opened the descriptor. */
static bool command(int fd, uint64_t number, const void *in, uint16_t in_len, void *out, uint16_t out_len)
{
	/* The header ends in as many attributes as there are. */
	uint64_t room[(sizeof(struct ib_uverbs_ioctl_hdr) + 3 * sizeof(struct ib_uverbs_attr)) / sizeof(uint64_t)] = { 0 };
	struct ib_uverbs_ioctl_hdr *call = (void *)room;
	struct ib_uverbs_attr attrs[] = {
		{ .attr_id = UVERBS_ATTR_WRITE_CMD, .len = sizeof(number), .flags = UVERBS_ATTR_F_MANDATORY, .data = number },
		{ .attr_id = UVERBS_ATTR_CORE_IN, .len = in_len, .flags = UVERBS_ATTR_F_MANDATORY, .data = (uintptr_t)in },
		{ .attr_id = UVERBS_ATTR_CORE_OUT, .len = out_len, .flags = UVERBS_ATTR_F_MANDATORY, .data = (uintptr_t)out },
	};

	call->num_attrs = out ? 3 : 2;
	call->length = sizeof(*call) + call->num_attrs * sizeof(attrs[0]);
	call->object_id = UVERBS_OBJECT_DEVICE;
	call->method_id = UVERBS_METHOD_INVOKE_WRITE;
	call->driver_id = RDMA_DRIVER_RXE;
	memcpy(call->attrs, attrs, call->num_attrs * sizeof(attrs[0]));
	return ioctl(fd, RDMA_VERBS_IOCTL, call) == 0;
}

/* Breaks what is connected on the device behind `fd`; returns how many. */
static int break_all(int fd)
{
	int broken = 0;

	for (uint32_t handle = 0; handle < HANDLES; handle++) {
		struct ib_uverbs_query_qp query = { .qp_handle = handle, .attr_mask = STATE | DEST_QPN };
		struct ib_uverbs_modify_qp change = { .qp_handle = handle, .attr_mask = STATE, .qp_state = TO_ERROR };
		struct ib_uverbs_query_qp_resp found = { 0 };

		if (!command(fd, IB_USER_VERBS_CMD_QUERY_QP, &query, sizeof(query), &found, sizeof(found)))
			continue;
		if (found.dest_qp_num && command(fd, IB_USER_VERBS_CMD_MODIFY_QP, &change, sizeof(change), NULL, 0))
			broken++;
	}
	return broken;
}

int main(int argc, char **argv)
{
	int pid = argc == 2 ? atoi(argv[1]) : 0, broken = 0, pidfd;
	char folder[32], path[300], target[64];
	struct dirent *entry;
	DIR *list;

	pidfd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
	snprintf(folder, sizeof(folder), "/proc/%d/fd", pid);
	list = opendir(folder);
	if (pidfd < 0 || !list) {
		fprintf(stderr, "break_qp PID: no such process, or not ours\n");
		return 2;
	}
	while ((entry = readdir(list))) {
		ssize_t len;
		int fd;

		snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
		len = readlink(path, target, sizeof(target) - 1);
		target[len < 0 ? 0 : len] = 0;
		if (strncmp(target, "/dev/infiniband/uverbs", strlen("/dev/infiniband/uverbs")))
			continue;
		fd = (int)syscall(SYS_pidfd_getfd, pidfd, atoi(entry->d_name), 0);
		if (fd < 0) {
			perror("pidfd_getfd");
			return 2;
		}
		broken += break_all(fd);
		close(fd);
	}
	closedir(list);
	printf("%d connected queue pairs broken\n", broken);
	return broken ? 0 : 1;
}
