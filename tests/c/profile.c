/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * profile: the counts of an endpoint through fi_profile (rdma/fi_profile.h), which libfabric has from 1.21 on.
 */
#include "common.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* The header takes this for granted. */
#ifndef container_of
#define container_of(ptr, type, field) ((type *)((char *)(ptr) - offsetof(type, field)))
#endif
#include <rdma/fi_profile.h>

#define MESSAGES 5
#define VARIABLES 64

static const struct setup setup = { .caps = FI_TAGGED | FI_DIRECTED_RECV };
static struct fi_profile_desc variables[VARIABLES];

static uint64_t value(struct fid_profile *profile, size_t count, const char *name)
{
	uint64_t found = UINT64_MAX;

	for (size_t i = 0; i < count; i++)
		if (!strcmp(variables[i].name, name))
			OK(fi_profile_read_u64(profile, variables[i].id, &found));
	return found;
}

static void profiled(struct side *side)
{
	struct fid_profile *profile;
	size_t count = VARIABLES;
	uint64_t message = 1, none;

	side_begin(side, &setup);
	OK(fi_profile_open(&side->ep->fid, 0, &profile, NULL));
	CHECK(fi_profile_query_vars(profile, variables, &count) == (ssize_t)count);
	CHECK(count > 10 && count < VARIABLES);
	SAME(value(profile, count, "udrv_eager_sent"), 0);
	SAME(fi_profile_read_u64(profile, 0x12345, &none), -FI_EINVAL);
	barrier(side);
	if (side->rank == 0) {
		for (int i = 0; i < MESSAGES; i++) {
			POST(side, fi_tsend(side->ep, &message, sizeof(message), NULL, side->peer, 1, NULL));
			completion(side->tx);
		}
		SAME(value(profile, count, "udrv_eager_sent"), MESSAGES);
	} else {
		/* They are held until their receives are posted. */
		while (value(profile, count, "pvar_unexp_msg_cnt") < MESSAGES)
			progress(side);
		for (int i = 0; i < MESSAGES; i++) {
			POST(side, fi_trecv(side->ep, &message, sizeof(message), NULL, side->peer, 1, 0, NULL));
			completion(side->rx);
		}
		SAME(value(profile, count, "pvar_unexp_msg_cnt"), 0);
		SAME(value(profile, count, "udrv_unexpected"), MESSAGES);
	}
	OK(fi_profile_close(profile));
	side_end(side);
}

int main(void)
{
	bool good = run_story(profiled, false, 60);

	printf("%d passed, %d failed\n", good, !good);
	return !good;
}
