/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * show LIBFABRIC version    MAJOR.MINOR of that libfabric
 * show LIBFABRIC info       what it lists of the provider, as its fi_tostr prints it
 * show LIBFABRIC params     the provider's variables, one name per line, as `fi_info -e` gets them
 */
#include "host.h"

#include <stdio.h>
#include <string.h>

static void show_version(struct core *core)
{
	printf("%u.%u\n", FI_MAJOR(core->version()), FI_MINOR(core->version()));
}

static void show_info(struct core *core)
{
	struct fi_info *list = core_list(core, core->version()), *info;

	for (info = list; info; info = info->next)
		puts(core->tostr(info, FI_TYPE_INFO));
	core->freeinfo(list);
}

static void show_params(struct core *core)
{
	struct fi_param *params;
	int count, i;

	if (core->getparams(&params, &count))
		die("fi_getparams fails");
	for (i = 0; i < count; i++) {
		if (strncmp(params[i].name, "FI_UDRV_", 8))
			continue;
		if (!params[i].help_string || strlen(params[i].help_string) < 20)
			die("%s has no help", params[i].name);
		puts(params[i].name);
	}
	core->freeparams(params);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *word;
		void (*show)(struct core *);
	} shows[] = { { "version", show_version }, { "info", show_info }, { "params", show_params } };
	struct core core;
	size_t i;

	for (i = 0; argc == 3 && i < sizeof(shows) / sizeof(*shows); i++) {
		if (strcmp(argv[2], shows[i].word))
			continue;
		core_open(&core, argv[1]);
		shows[i].show(&core);
		core_close(&core);
		return 0;
	}
	die("usage: show LIBFABRIC version|info|params");
}
