// SPDX-License-Identifier: GPL-2.0-only
/*
 * In a guest of scripts/lab rdma: ends queue pairs of the rv module as a device does that says so. They go to the error
 * state, and their owner hears of it (IB_EVENT_QP_FATAL): soft-RoCE itself never tells it.
 *
 *     echo 1 > /sys/module/qp_fail/parameters/fail
 *
 * It knows those that were made after it was loaded, and only the connected ones: the handler of their events tells
 * them from a process's own.
 */
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <rdma/ib_verbs.h>

#define MOST 256
#define HANDLER "rv_qp_event"

static struct ib_qp *known[MOST];
static DEFINE_SPINLOCK(lock);

static void replace(struct ib_qp *from, struct ib_qp *to)
{
	unsigned long flags;
	int i;

	spin_lock_irqsave(&lock, flags);
	for (i = 0; i < MOST; i++) {
		if (known[i] == from) {
			known[i] = to;
			break;
		}
	}
	spin_unlock_irqrestore(&lock, flags);
}

static bool connects(const struct ib_qp *qp)
{
	char name[KSYM_SYMBOL_LEN];

	snprintf(name, sizeof(name), "%ps", qp->event_handler);
	return qp->qp_type == IB_QPT_RC && qp->event_handler && !strncmp(name, HANDLER, strlen(HANDLER));
}

static int created(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct ib_qp *qp = (struct ib_qp *)regs_return_value(regs);

	if (!IS_ERR_OR_NULL(qp) && connects(qp))
		replace(NULL, qp);
	return 0;
}

static int destroyed(struct kprobe *probe, struct pt_regs *regs)
{
	replace((struct ib_qp *)regs_get_kernel_argument(regs, 0), NULL);
	return 0;
}

static struct kretprobe on_create = { .kp.symbol_name = "ib_create_qp_kernel", .handler = created, .maxactive = 32 };
static struct kprobe on_destroy = { .symbol_name = "ib_destroy_qp_user", .pre_handler = destroyed };

static int fail(const char *value, const struct kernel_param *param)
{
	static struct ib_qp *all[MOST];
	struct ib_qp_attr attr = { .qp_state = IB_QPS_ERR };
	unsigned long flags;
	int i, n = 0;

	spin_lock_irqsave(&lock, flags);
	for (i = 0; i < MOST; i++)
		if (known[i])
			all[n++] = known[i];
	spin_unlock_irqrestore(&lock, flags);
	for (i = 0; i < n; i++) {
		struct ib_event event = { .device = all[i]->device, .element.qp = all[i], .event = IB_EVENT_QP_FATAL };
		int rc = ib_modify_qp(all[i], &attr, IB_QP_STATE);

		pr_info("qp_fail: queue pair %u of rv: %d\n", all[i]->qp_num, rc);
		all[i]->event_handler(&event, all[i]->qp_context);
	}
	return n ? 0 : -ENOENT;
}

static const struct kernel_param_ops operations = { .set = fail };
module_param_cb(fail, &operations, NULL, 0200);

static int __init start(void)
{
	int rc = register_kretprobe(&on_create);

	if (rc)
		return rc;
	rc = register_kprobe(&on_destroy);
	if (rc)
		unregister_kretprobe(&on_create);
	return rc;
}

static void __exit end(void)
{
	unregister_kprobe(&on_destroy);
	unregister_kretprobe(&on_create);
}

module_init(start);
module_exit(end);
MODULE_DESCRIPTION("Ends queue pairs of the rv module, and says so");
MODULE_LICENSE("GPL");
