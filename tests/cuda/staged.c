/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * staged [MIB [device|host [met] [ranges] [written]]]: a message of so many MiB, 256 if nothing is said, goes from device memory to memory of the
 * host, or of a device. Both sides look at what memory they need meanwhile (RssAnon): little, not as much as the message. With `met`, they have
 * exchanged other messages before: a lane to the peer is ready. With `ranges`, its memory is named in four parts at both sides, some of them short.
 * With `written`, it is written to a region. It is linked with the double's libcuda.so.1.
 */
#include "common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t ptr;
extern int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(ptr *, size_t), cuMemFree_v2(ptr), cuMemcpyHtoD_v2(ptr, const void *, size_t), cuMemcpyDtoH_v2(void *, ptr, size_t);

enum { PIECE = 1 << 20, MOST_KIB = 24 << 10 };
static size_t len = 256 << 20;
static bool to_device, met, ranges, written;

/* Memory that is of no file, KiB. */
static long anonymous(void)
{
	FILE *status = fopen("/proc/self/status", "r");
	char line[200];
	long kib = -1;

	CHECK(status);
	while (kib < 0 && fgets(line, sizeof line, status))
		sscanf(line, "RssAnon: %ld", &kib);
	fclose(status);
	return kib;
}

/* Waits for an operation. Returns the most memory that was needed meanwhile, KiB. */
static long watched(struct side *side, struct fid_cq *cq)
{
	struct fi_cq_tagged_entry entry = {0};
	double end = now() + 50;
	long most = 0, kib, turns = 0;
	ssize_t rc;

	while ((rc = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN) {
		CHECK(now() < end);
		progress(side);
		if (turns++ % 64 == 0 && (kib = anonymous()) > most)
			most = kib;
	}
	SAME(rc, 1);
	return most;
}

/* Messages each way, for some time: a lane to the peer, if there is one, is ready in the end. */
static void greet(struct side *side)
{
	static struct fi_context2 contexts[2];
	static char in[64 << 10], out[64 << 10];
	int i;

	for (i = 0; i < 50; i++) {
		POST(side, fi_trecv(side->ep, in, sizeof in, NULL, side->peer, 2, 0, &contexts[0]));
		POST(side, fi_tsend(side->ep, out, sizeof out, NULL, side->peer, 2, &contexts[1]));
		watched(side, side->rx);
		watched(side, side->tx);
		sleep_ms(5);
	}
}

/* Names memory of the message in up to four parts. Returns their number. */
static size_t name_parts(struct iovec iov[4], uint8_t *at, size_t second)
{
	const size_t cuts[] = { 0, ranges ? second : len, ranges ? second + 1000 : len, ranges ? len - 100 : len, len };
	size_t n;

	for (n = 0; n < 4 && cuts[n] < len; n++)
		iov[n] = (struct iovec){ at + cuts[n], cuts[n + 1] - cuts[n] };
	return n;
}

/* The first side begins to write the message to a region of the other one, which this returns there. */
static struct fid_mr *write_it(struct side *side, ptr device, uint8_t *host)
{
	static struct fi_context2 context;
	struct fid_mr *mr = NULL;
	uint64_t name[2] = {0};

	if (side->rank == 1) {
		void *at = device ? (void *)device : host;

		OK(fi_mr_reg(side->domain, at, len, FI_REMOTE_WRITE, 0, 7, 0, &mr, NULL));
		name[0] = fi_mr_key(mr);
		name[1] = side->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)at : 0;
		tell(side, name, sizeof name);
	} else {
		hear(side, name, sizeof name);
		POST(side, fi_write(side->ep, (void *)device, len, NULL, side->peer, name[1], name[0], &context));
	}
	return mr;
}

static void one_message(struct side *side)
{
	struct setup setup = { .caps = FI_MSG | FI_TAGGED | FI_HMEM | (written ? FI_RMA : 0) };
	struct fid_mr *mr = NULL;
	struct iovec iov[4];
	static struct fi_context2 context;
	uint8_t *piece = need(PIECE), *host = NULL;
	bool sends = side->rank == 0;
	ptr device = 0;
	void *primary;
	long before, most;
	size_t at;

	SAME(cuInit(0) || cuDevicePrimaryCtxRetain(&primary, 0) || cuCtxSetCurrent(primary), 0);
	if (sends || to_device)
		SAME(cuMemAlloc_v2(&device, len), 0);
	else
		memset(host = need(len), 0, len);
	for (at = 0; sends && at < len; at += PIECE) {
		fill(piece, PIECE, (uint32_t)(at / PIECE));
		SAME(cuMemcpyHtoD_v2(device + at, piece, PIECE), 0);
	}
	side_begin(side, &setup);
	if (met)
		greet(side);
	before = anonymous();
	if (written)
		mr = write_it(side, device, host);
	else if (sends)
		POST(side, fi_tsendv(side->ep, iov, NULL, name_parts(iov, (uint8_t *)device, 3 << 20), side->peer, 1, &context));
	else
		POST(side, fi_trecvv(side->ep, iov, NULL, name_parts(iov, device ? (uint8_t *)device : host, 5 << 20), side->peer, 1, 0, &context));
	most = written && !sends ? before : watched(side, sends ? side->tx : side->rx);
	if (written)
		barrier(side);
	if (mr)
		OK(fi_close(&mr->fid));
	printf("  %s: %ld KiB before, %ld KiB at most\n", sends ? "sends" : "receives", before, most);
	if (most > before + MOST_KIB)
		FAIL("a message of %zu MiB needed %ld KiB", len >> 20, most - before);
	for (at = 0; !sends && at < len; at += PIECE) {
		if (device)
			SAME(cuMemcpyDtoH_v2(piece, device + at, PIECE), 0);
		CHECK(holds(device ? piece : host + at, PIECE, (uint32_t)(at / PIECE), 0));
	}
	side_end(side);
	if (device)
		SAME(cuMemFree_v2(device), 0);
	free(host);
	free(piece);
}

int main(int argc, char **argv)
{
	if (argc > 1)
		len = (size_t)atoi(argv[1]) << 20;
	to_device = argc > 2 && !strcmp(argv[2], "device");
	for (; argc > 3; argc--) {
		met |= !strcmp(argv[argc - 1], "met");
		ranges |= !strcmp(argv[argc - 1], "ranges");
		written |= !strcmp(argv[argc - 1], "written");
	}
	return run_story(one_message, false, 55) ? 0 : 1;
}
