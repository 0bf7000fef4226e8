/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * all_forms [--one-process] [--slow] [--list] [GROUP...]
 *
 * Uses every form of every call that the provider offers, and checks what comes out: bytes, completions, addresses,
 * errors. Each group is told by two processes of its own, or by two threads of one process. One line a group, then
 * "N passed, N failed".
 */
#include "all_forms.h"

#include <stdio.h>
#include <string.h>

bool slow;

static const struct group *const lists[] = {
	message_groups, matching_groups, completion_groups, waiting_groups, object_groups,
	rma_groups, alone_groups, hidden_groups, atomic_groups, trigger_groups, collective_groups,
	process_groups,
};

static int named(const char *name, int count, char **wanted)
{
	if (count == 0)
		return 1;
	for (int i = 0; i < count; i++)
		if (!strcmp(name, wanted[i]))
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	bool one_process = false, list = false;
	int passed = 0, failed = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (argc--, argv++; argc > 0 && argv[0][0] == '-'; argc--, argv++) {
		if (!strcmp(*argv, "--one-process"))
			one_process = true;
		else if (!strcmp(*argv, "--slow"))
			slow = true;
		else if (!strcmp(*argv, "--list"))
			list = true;
		else
			FAIL("what is %s?", *argv);
	}
	for (size_t i = 0; i < sizeof(lists) / sizeof(*lists); i++) {
		for (const struct group *group = lists[i]; group->name; group++) {
			double begun = now();
			bool good;

			if (!named(group->name, argc, argv))
				continue;
			if (list) {
				printf("%s\n", group->name);
				continue;
			}
			good = run_story(group->story, one_process, slow ? 120 : 40);
			printf("%-4s %-24s %6.2f s\n", good ? "ok" : "FAIL", group->name, now() - begun);
			*(good ? &passed : &failed) += 1;
		}
	}
	if (!list)
		printf("%d passed, %d failed\n", passed, failed);
	return failed || (!list && !passed);
}
