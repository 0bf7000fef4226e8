/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * An application that chooses its libfabric at run time: nothing of libfabric is linked, its functions are looked up
 * in the copy that is named. Everything here ends the program with a sentence when it fails.
 */
#ifndef HOST_H
#define HOST_H

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

/* One loaded copy of libfabric. */
struct core {
	const char *path;
	void *handle;
	uint32_t (*version)(void);
	int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags,
		       const struct fi_info *hints, struct fi_info **info);
	void (*freeinfo)(struct fi_info *info);
	struct fi_info *(*dupinfo)(const struct fi_info *info);
	int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
	char *(*tostr)(const void *data, enum fi_type type);
	int (*getparams)(struct fi_param **params, int *count);
	void (*freeparams)(struct fi_param *params);
};

/* An endpoint with what it needs, able to talk to itself. */
struct endpoint {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	fi_addr_t self;
};

void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

void core_open(struct core *core, const char *path);
/* Runs libfabric's destructor and makes sure that it is gone. */
void core_close(struct core *core);
/* Lists the provider under test; `version` as of fi_getinfo. */
struct fi_info *core_list(struct core *core, uint32_t version);

void endpoint_open(struct core *core, struct endpoint *endpoint);
/* A tagged message to itself, checked. */
void endpoint_exchange(struct endpoint *endpoint, unsigned char seed);
void endpoint_close(struct core *core, struct endpoint *endpoint);

#endif
