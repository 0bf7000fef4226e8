/* violation WHICH: does what the double of CUDA has to stop a program for. Returns only if it does not. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern int cuInit(unsigned), cuDevicePrimaryCtxReset_v2(int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(uint64_t *, size_t), cuMemFree_v2(uint64_t), cuMemcpyAsync(uint64_t, uint64_t, size_t, void *);
extern int cuStreamCreate(void **, unsigned), cuStreamDestroy_v2(void *), cuStreamQuery(void *);

int main(int argc, char **argv)
{
	uint64_t to, from;
	void *context, *stream;
	if (argc != 2 || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
		return 2;
	if (cuMemAlloc_v2(&to, 1 << 20) || cuMemAlloc_v2(&from, 1 << 20) || cuStreamCreate(&stream, 1))
		return 3;
	if (!strcmp(argv[1], "touched"))
		*(volatile char *)(uintptr_t)to = 1;
	if (!strcmp(argv[1], "freed-too-early") && !cuMemcpyAsync(to, from, 1 << 20, stream))
		cuMemFree_v2(from);
	if (!strcmp(argv[1], "stream-destroyed") && !cuStreamDestroy_v2(stream))
		cuStreamQuery(stream);
	if (!strcmp(argv[1], "context-reset") && !cuDevicePrimaryCtxReset_v2(0) && !cuDevicePrimaryCtxRetain(&context, 0))
		cuStreamQuery(stream);
	return 0;
}
