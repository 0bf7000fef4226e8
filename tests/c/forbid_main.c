/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* forbid WAY COMMAND...: runs COMMAND where processes may not attach to each other (forbid.h). */
#include "common.h"
#include "forbid.h"

#include <unistd.h>

int main(int argc, char **argv)
{
	enum forbidden what;

	if (argc < 3)
		FAIL("wants a way and a command");
	what = forbidden_by(argv[1]);
	forbid_for_children(what);
	forbid_here(what);
	execvp(argv[2], argv + 2);
	FAIL("cannot run %s", argv[2]);
}
