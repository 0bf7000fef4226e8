/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* The stories of all_forms, each told by two sides; see all_forms.c. */
#ifndef ALL_FORMS_H
#define ALL_FORMS_H

#include "common.h"

struct group {
	const char *name;
	story story;
};

/* Each list ends with an empty group. */
extern const struct group message_groups[];
extern const struct group matching_groups[];
extern const struct group completion_groups[];
extern const struct group waiting_groups[];
extern const struct group object_groups[];
extern const struct group rma_groups[];
extern const struct group alone_groups[];
extern const struct group hidden_groups[];
extern const struct group atomic_groups[];
extern const struct group trigger_groups[];
extern const struct group collective_groups[];
extern const struct group process_groups[];

/* Valgrind is at work: fewer rounds, more patience. */
extern bool slow;

/* A forked child does that and ends, well and within ten seconds. */
void in_child(void (*work)(void *), void *argument);

#endif
