/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* The endpoint that is behind the ways of fabric.c. */
#ifndef BENCH_FABRIC_H
#define BENCH_FABRIC_H

#include "bench.h"

#include <rdma/fabric.h>
#include <rdma/fi_endpoint.h>

struct fid_ep *fabric_endpoint(void);
fi_addr_t fabric_address(int rank);

#endif
