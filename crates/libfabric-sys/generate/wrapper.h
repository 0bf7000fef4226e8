/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */

#include <stdint.h>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_tagged.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_trigger.h>
#include <rdma/fi_collective.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/providers/fi_prov.h>
#include <rdma/providers/fi_log.h>

/*
 * bindgen evaluates no macro that holds a cast. An enumerator of the same
 * value is evaluated by the compiler; the generator strips the CAST_ again.
 */
enum cast_macros {
	CAST_FI_ADDR_UNSPEC = FI_ADDR_UNSPEC,
	CAST_FI_ADDR_NOTAVAIL = FI_ADDR_NOTAVAIL,
	CAST_FI_KEY_NOTAVAIL = FI_KEY_NOTAVAIL,
	CAST_FI_SHARED_CONTEXT = FI_SHARED_CONTEXT,
	CAST_FI_COLLECTIVE_OFFSET = FI_COLLECTIVE_OFFSET,
};
