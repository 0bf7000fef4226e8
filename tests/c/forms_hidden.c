/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Memory that no other process can read or write, though its owner can: memfd_secret(2), as the memory of a device is.
 * And memory that its owner cannot either. */
#include "all_forms.h"

#include <rdma/fi_atomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define LEN (5 << 20)
#define RIGHTS (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define KEY 0x51DEu

#ifndef SYS_memfd_secret
#define SYS_memfd_secret 447
#endif

/* NULL where the kernel has none to give. */
static char *hidden(void)
{
	int fd = (int)syscall(SYS_memfd_secret, 0);
	void *memory;

	if (fd < 0)
		return NULL;
	if (ftruncate(fd, LEN)) {
		close(fd);
		return NULL;
	}
	memory = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	return memory == MAP_FAILED ? NULL : memory;
}

/* The error of the next operation that ends, or 0. */
static int end_of(struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry;
	struct fi_cq_err_entry error = { 0 };
	double end = now() + PATIENCE_S;
	ssize_t n;

	while ((n = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN)
		CHECK(now() < end);
	if (n == 1)
		return 0;
	SAME(n, -FI_EAVAIL);
	SAME(fi_cq_readerr(cq, &error, 0), 1);
	return error.err;
}

static void hidden_memory(struct side *me)
{
	static const size_t sizes[] = { 8, 16384, 100000, 1 << 20, (1 << 20) + 1, LEN };
	char *plain = need(LEN), *secret = hidden();
	bool have = secret != NULL, theirs;
	struct fid_mr *mr[2];

	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_TAGGED | FI_RMA });
	tell(me, &have, sizeof(have));
	hear(me, &theirs, sizeof(theirs));
	if (!have || !theirs) {
		printf("    memfd_secret(2) is not to be had here\n");
		goto out;
	}
	for (int way = 1; way < 4; way++) {
		char *from = way & 1 ? secret : plain, *to = way & 2 ? secret : plain;

		for (uint32_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
			if (me->rank == 0) {
				fill(from, sizes[i], i);
				POST(me, fi_tsend(me->ep, from, sizes[i], NULL, me->peer, i, NULL));
				SAME(end_of(me->tx), 0);
			} else {
				POST(me, fi_trecv(me->ep, to, sizes[i], NULL, me->peer, i, 0, NULL));
				SAME(end_of(me->rx), 0);
				CHECK(holds(to, sizes[i], i, 0));
			}
		}
		barrier(me);
	}
	OK(fi_mr_reg(me->domain, secret, LEN, RIGHTS, 0, KEY, 0, &mr[0], NULL));
	OK(fi_mr_reg(me->domain, plain, LEN, RIGHTS, 0, KEY + 1, 0, &mr[1], NULL));
	barrier(me);
	if (me->rank == 0) {
		/* The later ones it may carry out alone. */
		for (uint32_t i = 0; i < 3 * sizeof(sizes) / sizeof(*sizes); i++) {
			size_t len = sizes[i % (sizeof(sizes) / sizeof(*sizes))];

			for (int way = 1; way < 4; way++) {
				char *local = way & 1 ? secret : plain;
				uint64_t key = way & 2 ? KEY : KEY + 1;

				fill(local, len, i);
				POST(me, fi_write(me->ep, local, len, NULL, me->peer, 0, key, NULL));
				SAME(end_of(me->tx), 0);
				memset(local, 0, len);
				POST(me, fi_read(me->ep, local, len, NULL, me->peer, 0, key, NULL));
				SAME(end_of(me->tx), 0);
				CHECK(holds(local, len, i, 0));
			}
		}
	}
	barrier(me);
	OK(fi_close(&mr[0]->fid));
	OK(fi_close(&mr[1]->fid));
	munmap(secret, LEN);
out:
	side_end(me);
	free(plain);
}

/* Whether processes may copy from each other's memory here. */
static bool attaches(void)
{
	char from = 1, to = 0;
	struct iovec local = { &to, 1 }, remote = { &from, 1 };

	return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1;
}

/* It complains of each address where nothing is, also of those that the kernel is only asked about. */
static bool under_valgrind(void)
{
	const char *preloaded = getenv("LD_PRELOAD");

	return preloaded && strstr(preloaded, "vgpreload");
}

/* Addresses where nothing is: an error where both sides would have copied, and what follows is not hurt. */
static void memory_that_is_not_there(struct side *me)
{
	const char *cma = getenv("FI_UDRV_CMA"), *shm = getenv("FI_UDRV_SHM");
	/* Elsewhere the bytes are copied by loads and stores of the process itself. */
	bool told = (!cma || !strcmp(cma, "auto")) && (!shm || strcmp(shm, "0")) &&
		    !getenv("FI_UDRV_PUSH_MAX") && attaches() && !under_valgrind();
	char *plain = need(LEN);
	char *nothing = mmap(NULL, LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct fid_mr *mr;

	CHECK(nothing != MAP_FAILED);
	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_TAGGED | FI_RMA });
	OK(fi_mr_reg(me->domain, plain, LEN, RIGHTS, 0, KEY, 0, &mr, NULL));
	barrier(me);
	for (int bad = 0; told && bad < 2; bad++) {
		if (me->rank == 0) {
			POST(me, fi_tsend(me->ep, bad ? plain : nothing, LEN, NULL, me->peer, 1, NULL));
			SAME(end_of(me->tx), FI_EFAULT);
		} else {
			POST(me, fi_trecv(me->ep, bad ? nothing : plain, LEN, NULL, me->peer, 1, 0, NULL));
			SAME(end_of(me->rx), FI_EFAULT);
		}
		barrier(me);
	}
	if (told && me->rank == 0) {
		for (int i = 0; i < 3; i++) {
			POST(me, fi_write(me->ep, nothing, LEN, NULL, me->peer, 0, KEY, NULL));
			SAME(end_of(me->tx), FI_EFAULT);
			POST(me, fi_read(me->ep, nothing, LEN, NULL, me->peer, 0, KEY, NULL));
			SAME(end_of(me->tx), FI_EFAULT);
		}
		fill(plain, LEN, 5);
		POST(me, fi_write(me->ep, plain, LEN, NULL, me->peer, 0, KEY, NULL));
		SAME(end_of(me->tx), 0);
	}
	barrier(me);
	CHECK(!told || holds(plain, LEN, 5, 0));
	OK(fi_close(&mr->fid));
	side_end(me);
	munmap(nothing, LEN);
	free(plain);
}

/* An atomic operation on 8 bytes, of each kind of access. */
static void change(struct side *me, fi_addr_t peer, int kind, uint64_t at, int error)
{
	uint64_t one = 1, old;

	if (kind == 0)
		POST(me, fi_atomic(me->ep, &one, 1, NULL, peer, at, KEY, FI_UINT64, FI_SUM, NULL));
	else if (kind == 1)
		POST(me, fi_fetch_atomic(me->ep, &one, 1, NULL, &old, NULL, peer, at, KEY, FI_UINT64, FI_SUM, NULL));
	else
		POST(me, fi_fetch_atomic(me->ep, NULL, 1, NULL, &old, NULL, peer, at, KEY, FI_UINT64, FI_ATOMIC_READ, NULL));
	SAME(end_of(me->tx), error);
}

/* Accesses, in every way, LEN bytes from `there` on that are there, LEN that are to be read only, and LEN that are not there. */
static void access_all(struct side *me, fi_addr_t peer, char *local, uint64_t there)
{
	static const size_t sizes[] = { 1, 5000, 100000, LEN };
	uint64_t readable = there + LEN, nothing = there + 2 * LEN;

	for (size_t i = 0; i < 3 * sizeof(sizes) / sizeof(*sizes); i++) {
		size_t len = sizes[i % (sizeof(sizes) / sizeof(*sizes))];

		POST(me, fi_write(me->ep, local, len, NULL, peer, nothing, KEY, NULL));
		SAME(end_of(me->tx), FI_EACCES);
		POST(me, fi_read(me->ep, local, len, NULL, peer, nothing, KEY, NULL));
		SAME(end_of(me->tx), FI_EACCES);
		POST(me, fi_write(me->ep, local, len, NULL, peer, readable, KEY, NULL));
		SAME(end_of(me->tx), FI_EACCES);
		/* The last byte alone is not there. */
		POST(me, fi_read(me->ep, local, len, NULL, peer, nothing - len + 1, KEY, NULL));
		SAME(end_of(me->tx), FI_EACCES);
		POST(me, fi_read(me->ep, local, len, NULL, peer, readable, KEY, NULL));
		SAME(end_of(me->tx), 0);
		POST(me, fi_write(me->ep, local, len, NULL, peer, there, KEY, NULL));
		SAME(end_of(me->tx), 0);
	}
	for (int kind = 0; kind < 3; kind++) {
		change(me, peer, kind, nothing, FI_EACCES);
		change(me, peer, kind, 8, FI_EACCES);
		change(me, peer, kind, readable, kind < 2 ? FI_EACCES : 0);
		change(me, peer, kind, there, 0);
	}
}

/* Both register all of their memory, and rank 0 accesses what is not there in rank 1's, and in its own: it is told, and
 * both live. */
static void no_memory_in_a_region(struct side *me)
{
	char *local = need(LEN), name[NAME_MAX_LEN];
	char *memory = mmap(NULL, 3 * LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t mine = (uintptr_t)memory, theirs;
	fi_addr_t myself;
	struct fid_mr *mr;

	CHECK(memory != MAP_FAILED);
	OK(mprotect(memory + LEN, LEN, PROT_READ));
	OK(mprotect(memory + 2 * LEN, LEN, PROT_NONE));
	side_begin(me, &(struct setup){ .caps = FI_MSG | FI_RMA | FI_ATOMIC });
	OK(fi_mr_reg(me->domain, NULL, SIZE_MAX, RIGHTS, 0, KEY, 0, &mr, NULL));
	name_of(me->ep, name);
	myself = insert(me, name);
	tell(me, &mine, sizeof(mine));
	hear(me, &theirs, sizeof(theirs));
	if (me->rank == 0 && !under_valgrind()) {
		access_all(me, me->peer, local, theirs);
		access_all(me, myself, local, mine);
	}
	barrier(me);
	CHECK(under_valgrind() || memory[0] == 2);
	OK(fi_close(&mr->fid));
	side_end(me);
	munmap(memory, 3 * LEN);
	free(local);
}

const struct group hidden_groups[] = {
	{ "hidden_memory", hidden_memory },
	{ "memory_that_is_not_there", memory_that_is_not_there },
	{ "no_memory_in_a_region", no_memory_in_a_region },
	{ NULL, NULL },
};
