/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/*
 * copy BYTES TIMES: what the driver takes for a copy of so many bytes from device memory to other memory of the same device, MB/s: the
 * median of TIMES. For scripts/gpu. It is linked with libcuda.so.1.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef uintptr_t ptr;
extern int cuInit(unsigned), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(ptr *, size_t), cuMemcpyDtoD_v2(ptr, ptr, size_t), cuCtxSynchronize(void);

#define OK(call) \
	do { \
		int rc_ = (call); \
		if (rc_) { \
			fprintf(stderr, "%s: %d\n", #call, rc_); \
			return 1; \
		} \
	} while (0)

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
	size_t len = argc == 3 ? strtoull(argv[1], NULL, 0) : 0;
	int times = argc == 3 ? atoi(argv[2]) : 0, device;
	double taken[1000];
	void *context;
	ptr from, to;

	if (len == 0 || times < 1 || times > 1000) {
		fprintf(stderr, "usage: copy BYTES TIMES\n");
		return 2;
	}
	OK(cuInit(0));
	OK(cuDeviceGet(&device, 0));
	OK(cuDevicePrimaryCtxRetain(&context, device));
	OK(cuCtxSetCurrent(context));
	OK(cuMemAlloc_v2(&from, len));
	OK(cuMemAlloc_v2(&to, len));
	for (int i = -2; i < times; i++) {
		double begun = now();

		OK(cuMemcpyDtoD_v2(to, from, len));
		OK(cuCtxSynchronize());
		if (i >= 0)
			taken[i] = now() - begun;
	}
	qsort(taken, (size_t)times, sizeof(*taken), ascending);
	printf("%.2f\n", (double)len / taken[times / 2] / 1e6);
	return 0;
}
