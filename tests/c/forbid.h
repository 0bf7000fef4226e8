/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* Ways in which a system keeps its processes from attaching to each other's memory. */
#ifndef FORBID_H
#define FORBID_H

enum forbidden {
	NOTHING,
	/* Processes of an ordinary user that say they are not dumpable: prctl(2), ptrace(2). */
	NOT_DUMPABLE,
	/* Each process in a user name space of its own. */
	USER_NAMESPACES,
	/* A filter refuses process_vm_readv and process_vm_writev, as containers' do. */
	FILTERED,
	WAYS_TO_FORBID,
};

extern const char *const forbidden_names[WAYS_TO_FORBID];

/* By the name; fails for one that is none. */
enum forbidden forbidden_by(const char *name);
/* In the process that will start the others, and in each of them before it opens anything. */
void forbid_for_children(enum forbidden what);
void forbid_here(enum forbidden what);

#endif
