/* conformance: what udrv relies on, checked against a CUDA driver: the double (crates/fake-cuda), or a real one.
 *
 * Prints a line for each statement, then "N passed, N failed", and fails if one of them is not true. It is linked with
 * the double's libcuda.so.1, and takes whichever the loader finds. It needs one device.
 *
 * `conformance open HANDLE BYTES` is its second process: opens an IPC handle, checks the bytes, and changes them. So are
 * `conformance map DESCRIPTOR BYTES` and `conformance pool DESCRIPTOR POINTER BYTES` for memory without a handle.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t ptr;
typedef struct { unsigned char bytes[64]; } handle;
extern int cuInit(unsigned), cuDeviceGetCount(int *), cuDeviceGet(int *, int), cuDeviceGetUuid_v2(unsigned char *, int);
extern int cuDeviceGetPCIBusId(char *, int, int);
extern int cuDevicePrimaryCtxReset_v2(int), cuCtxGetId(void *, uint64_t *), cuDevicePrimaryCtxRetain(void **, int), cuDevicePrimaryCtxGetState(int, unsigned *, int *);
extern int cuCtxPushCurrent_v2(void *), cuCtxPopCurrent_v2(void **), cuCtxSetCurrent(void *), cuCtxGetCurrent(void **);
extern int cuMemAlloc_v2(ptr *, size_t), cuMemFree_v2(ptr), cuMemAllocManaged(ptr *, size_t, unsigned);
extern int cuMemAllocAsync(ptr *, size_t, void *), cuMemFreeAsync(ptr, void *);
extern int cuMemHostAlloc(void **, size_t, unsigned), cuMemFreeHost(void *);
extern int cuMemHostRegister_v2(void *, size_t, unsigned), cuMemHostUnregister(void *);
extern int cuMemGetAddressRange_v2(ptr *, size_t *, ptr), cuPointerGetAttribute(void *, int, ptr);
extern int cuPointerGetAttributes(unsigned, int *, void **, ptr), cuPointerSetAttribute(const void *, int, ptr);
extern int cuMemcpyAsync(ptr, ptr, size_t, void *), cuMemcpyHtoD_v2(ptr, const void *, size_t), cuMemcpyDtoH_v2(void *, ptr, size_t);
extern int cuStreamCreate(void **, unsigned), cuStreamDestroy_v2(void *), cuStreamSynchronize(void *), cuStreamQuery(void *);
extern int cuEventCreate(void **, unsigned), cuEventRecord(void *, void *), cuEventQuery(void *), cuEventDestroy_v2(void *);
extern int cuIpcGetMemHandle(handle *, ptr), cuIpcOpenMemHandle_v2(ptr *, handle, unsigned), cuIpcCloseMemHandle(ptr);
extern int cuMemCreate(uint64_t *, size_t, const void *, unsigned long long), cuMemRelease(uint64_t);
extern int cuMemGetAllocationGranularity(size_t *, const void *, unsigned), cuMemRetainAllocationHandle(uint64_t *, ptr);
extern int cuMemAddressReserve(ptr *, size_t, size_t, ptr, unsigned long long), cuMemAddressFree(ptr, size_t);
extern int cuMemMap(ptr, size_t, size_t, uint64_t, unsigned long long), cuMemUnmap(ptr, size_t);
extern int cuMemSetAccess(ptr, size_t, const void *, size_t);
extern int cuMemExportToShareableHandle(int *, uint64_t, int, unsigned long long), cuMemImportFromShareableHandle(uint64_t *, void *, int);
extern int cuMemPoolCreate(void **, const void *), cuMemPoolDestroy(void *), cuMemAllocFromPoolAsync(ptr *, size_t, void *, void *);
extern int cuMemPoolExportToShareableHandle(int *, void *, int, unsigned long long), cuMemPoolExportPointer(handle *, ptr);
extern int cuMemPoolImportFromShareableHandle(void **, void *, int, unsigned long long), cuMemPoolImportPointer(ptr *, void *, const handle *);
extern int cuMemPoolSetAccess(void *, const void *, size_t);
extern int cuDeviceGetAttribute(int *, int, int), cuMemGetHandleForAddressRange(int *, ptr, size_t, int, unsigned long long);
extern int cuFlushGPUDirectRDMAWrites(int, int);

/* CUmemAllocationProp, the begin of CUmemPoolProps; CUmemAccessDesc. */
struct properties { int type, handles, location[2]; char rest[96]; };
struct access { int location[2], flags; };
static const struct access access_of_first = { { 1, 0 }, 3 };
enum { POSIX_FD = 1 };

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201, NOT_READY = 600, NON_BLOCKING = 1, LEN = 1 << 20 };

static const size_t LONGEST_OF_POOL = 4ul << 30;
static int passed, failed;
static const char *self;

static void check(int right, const char *statement)
{
	printf("%s: %s\n", right ? "ok" : "NOT TRUE", statement);
	*(right ? &passed : &failed) += 1;
}

static ptr at(const void *memory) { return (ptr)(uintptr_t)memory; }

/* What one plural query says about a pointer. */
struct told { void *context; unsigned type, managed; int ordinal; uint64_t id; ptr start; size_t size; int result; };

static struct told ask(ptr p)
{
	struct told t;
	memset(&t, 0xaa, sizeof t);
	int which[] = {1, 2, 8, 9, 7, 11, 12};
	void *to[] = {&t.context, &t.type, &t.managed, &t.ordinal, &t.id, &t.start, &t.size};
	t.result = cuPointerGetAttributes(7, which, to, p);
	return t;
}

/* Copies on a stream, and polls an event until it has happened, for at most ten seconds. */
static int copied(ptr to, ptr from, size_t len, void *stream)
{
	void *event;
	int result = cuMemcpyAsync(to, from, len, stream);
	if (result || (result = cuEventCreate(&event, 2 /* no timing */)))
		return result;
	result = cuEventRecord(event, stream);
	for (time_t end = time(0) + 10; !result && (result = cuEventQuery(event)) == NOT_READY && time(0) < end; result = 0)
		usleep(10);
	cuEventDestroy_v2(event);
	return result;
}

static void *fill(void *to, unsigned seed)
{
	for (size_t i = 0; i < LEN; i++)
		((unsigned char *)to)[i] = (unsigned char)(i * 7 + i / 251 + seed);
	return to;
}

static void before_init(void)
{
	int n, result;
	check(cuDeviceGetCount(&n) == NOT_INITIALIZED, "before cuInit a call answers NOT_INITIALIZED");
	result = ask(at(&n)).result;
	check(result == NOT_INITIALIZED, "so does the plural attribute query");
}

static void attributes(void *context)
{
	int local = 0, one = 1;
	ptr p, q, base, managed;
	size_t size;
	void *host, *heap = malloc(LEN);
	handle h;
	struct told t = ask(at(heap));
	check(t.result == 0 && t.type == 0 && !t.managed && !t.context, "memory that CUDA does not know is all zeros to the plural query");
	check(cuPointerGetAttribute(&local, 2, at(heap)) == INVALID_VALUE, "and an error to the singular one");
	check(cuMemAlloc_v2(&p, LEN) == 0, "memory is allocated");
	t = ask(p + 12345);
	check(t.type == 2 && !t.managed && t.ordinal == 0 && t.context == context, "device memory has type, device and context");
	check(t.start <= p && t.start + t.size >= p + LEN, "and a range that has all of it");
	check(t.id != 0 && t.id == ask(p).id, "one BUFFER_ID everywhere inside");
	check(cuMemGetAddressRange_v2(&base, &size, p + 12345) == 0 && base == p && size == LEN, "the address range is the allocation");
	check(cuMemAlloc_v2(&q, LEN) == 0 && ask(q).id != t.id, "another allocation has another BUFFER_ID");
	check(cuPointerSetAttribute(&one, 6, q) == 0, "SYNC_MEMOPS can be set");
	cuMemFree_v2(q);
	uint64_t old = ask(p).id;
	check(cuMemFree_v2(p) == 0 && ask(p).type == 0, "freed memory is unknown");
	check(cuMemAlloc_v2(&p, LEN) == 0 && ask(p).id != old, "memory that is allocated again has a new BUFFER_ID");
	cuMemFree_v2(p);
	check(cuMemAllocAsync(&p, LEN, 0) == 0 && cuStreamSynchronize(0) == 0, "memory of the default pool is allocated");
	t = ask(p);
	check(t.type == 2 && !t.managed && t.ordinal == 0 && !t.context, "it is a device's, and has no context");
	check(cuIpcGetMemHandle(&h, p) != 0, "nor an IPC handle");
	check(cuMemFreeAsync(p, 0) == 0 && cuStreamSynchronize(0) == 0, "and is freed");
	check(cuMemAllocManaged(&managed, LEN, 1) == 0 && ask(managed).managed == 1, "managed memory says so");
	*(volatile char *)(uintptr_t)managed = 1;
	check(*(volatile char *)(uintptr_t)managed == 1, "and the processor can touch it");
	cuMemFree_v2(managed);
	check(cuMemHostAlloc(&host, LEN, 0) == 0 && ask(at(host)).type == 1, "memory of cuMemHostAlloc is host memory");
	cuMemFreeHost(host);
	free(heap);
	heap = aligned_alloc(4096, LEN);
	check(cuMemHostRegister_v2(heap, LEN, 0) == 0 && ask(at(heap)).type == 1, "so is registered memory");
	check(cuMemHostUnregister(heap) == 0 && ask(at(heap)).type == 0, "until its registration ends");
	free(heap);
}

static void touching(void)
{
	ptr p;
	char byte = 0;
	int ends[2];
	cuMemAlloc_v2(&p, LEN);
	struct iovec here = {&byte, 1}, there = {(void *)(uintptr_t)p, 1};
	check(process_vm_readv(getpid(), &here, 1, &there, 1, 0) < 0 && errno == EFAULT, "process_vm_readv of device memory is EFAULT");
	check(pipe(ends) == 0 && write(ends[1], (void *)(uintptr_t)p, 1) < 0 && errno == EFAULT, "so is write(2)");
	close(ends[0]);
	close(ends[1]);
	cuMemFree_v2(p);
}

static void copies(void)
{
	void *stream, *other, *pinned, *pageable = malloc(LEN), *back = malloc(LEN), *want = malloc(LEN);
	ptr p, q;
	cuMemAlloc_v2(&p, LEN);
	cuMemAlloc_v2(&q, LEN);
	check(cuStreamCreate(&stream, NON_BLOCKING) == 0 && cuStreamCreate(&other, NON_BLOCKING) == 0, "there are non-blocking streams");
	fill(want, 1);
	cuMemcpyAsync(p, at(fill(pageable, 1)), LEN, stream);
	memset(pageable, 0, LEN);
	check(copied(at(back), p, LEN, stream) == 0 && !memcmp(back, want, LEN), "a copy from pageable memory has read it when the call returns");
	cuMemHostAlloc(&pinned, LEN, 0);
	check(copied(p, at(fill(pinned, 2)), LEN, stream) == 0, "a copy from pinned memory ends");
	memset(back, 0, LEN);
	check(cuMemcpyAsync(at(back), p, LEN, stream) == 0 && !memcmp(back, fill(want, 2), LEN), "a copy to pageable memory has ended when the call returns");
	memset(pinned, 0, LEN);
	check(copied(at(pinned), p, LEN, stream) == 0 && !memcmp(pinned, want, LEN), "a copy to pinned memory has ended when its event says so");
	check(copied(q, p, LEN, stream) == 0 && copied(at(back), q, LEN, other) == 0 && !memcmp(back, want, LEN), "so has one from device to device");
	check(cuMemcpyAsync(p + 5, at(want), LEN, stream) != 0, "a copy beyond the allocation is refused");
	check(cuStreamSynchronize(stream) == 0 && cuStreamQuery(stream) == 0, "a stream that was waited for is idle");
	check(cuMemcpyHtoD_v2(q + 3, "abc", 3) == 0 && cuMemcpyDtoH_v2(back, q + 2, 4) == 0 && !memcmp((char *)back + 1, "abc", 3), "bytes inside are copied");
	cuStreamDestroy_v2(stream);
	cuStreamDestroy_v2(other);
	cuMemFree_v2(p);
	cuMemFree_v2(q);
	cuMemFreeHost(pinned);
	free(pageable);
	free(back);
	free(want);
}

static void *bare_thread(void *context)
{
	ptr p;
	void *popped = 0, *now = &popped;
	check(cuMemAlloc_v2(&p, LEN) == INVALID_CONTEXT, "a thread without a context cannot allocate");
	check(cuCtxPushCurrent_v2(context) == 0 && cuMemAlloc_v2(&p, LEN) == 0 && cuMemFree_v2(p) == 0, "with one pushed it can");
	check(cuCtxPopCurrent_v2(&popped) == 0 && popped == context && cuCtxGetCurrent(&now) == 0 && !now, "and popping leaves none");
	return 0;
}

static void print_handle(char *to, const handle *h)
{
	for (size_t i = 0; i < sizeof h->bytes; i++)
		sprintf(to + 2 * i, "%02x", h->bytes[i]);
}

/* Runs this program again as the one that opens. */
static int opened_by_another(int fd, const handle *h, const char *bytes)
{
	char text[2 * sizeof h->bytes + 1] = "", number[16];
	int status = -1, inherited = fd < 0 ? -1 : dup(fd);
	if (h)
		print_handle(text, h);
	sprintf(number, "%d", inherited);
	/* What is opened by its handle, by its descriptor, or by both. */
	char *by_handle[] = {(char *)self, "open", text, (char *)bytes, 0}, *by_both[] = {(char *)self, "pool", number, text, (char *)bytes, 0};
	char *by_descriptor[] = {(char *)self, "map", number, (char *)bytes, 0}, **arguments = fd < 0 ? by_handle : h ? by_both : by_descriptor;
	fflush(stdout);
	pid_t child = vfork();
	if (!child) {
		execv(self, arguments);
		_exit(127);
	}
	if (inherited >= 0)
		close(inherited);
	return waitpid(child, &status, 0) == child && status == 0;
}

static handle handle_of(const char *text)
{
	handle h;
	for (size_t i = 0; i < sizeof h.bytes; i++)
		sscanf(text + 2 * i, "%2hhx", &h.bytes[i]);
	return h;
}

static int begins(void)
{
	void *context;
	return cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context);
}

/* Whether it is device memory with these bytes, which are changed. */
static int has(ptr p, const char *bytes)
{
	char back[16] = {0};
	return ask(p).type == 2 && !cuMemcpyDtoH_v2(back, p + 100, strlen(bytes)) && !strcmp(back, bytes) && !cuMemcpyHtoD_v2(p + 100, "changed", 7);
}

static void *descriptor(const char *number) { return (void *)(intptr_t)atoi(number); }

static int maps(const char *number, const char *bytes)
{
	uint64_t part;
	size_t len;
	ptr p;
	struct properties of = { 1, POSIX_FD, { 1, 0 }, { 0 } };
	if (begins() || cuMemGetAllocationGranularity(&len, &of, 0))
		return 2;
	if (cuMemImportFromShareableHandle(&part, descriptor(number), POSIX_FD) || cuMemAddressReserve(&p, len, 0, 0, 0))
		return 3;
	/* The descriptor and the handle are needed no more. */
	if (close(atoi(number)) || cuMemMap(p, len, 0, part, 0) || cuMemRelease(part) || cuMemSetAccess(p, len, &access_of_first, 1))
		return 4;
	return !has(p, bytes) || cuMemUnmap(p, len) || cuMemAddressFree(p, len) ? 5 : 0;
}

static int imports(const char *number, const char *text, const char *bytes)
{
	handle h = handle_of(text);
	void *pool;
	ptr p;
	if (begins())
		return 2;
	if (cuMemPoolImportFromShareableHandle(&pool, descriptor(number), POSIX_FD, 0) || cuMemPoolSetAccess(pool, &access_of_first, 1))
		return 3;
	if (close(atoi(number)) || cuMemPoolImportPointer(&p, pool, &h) || cuMemPoolDestroy(pool))
		return 4;
	return !has(p, bytes) || cuMemFree_v2(p) ? 5 : 0;
}

static int opens(const char *text, const char *bytes)
{
	handle h = handle_of(text);
	ptr p, again;
	if (begins())
		return 2;
	if (cuIpcOpenMemHandle_v2(&p, h, 1))
		return 3;
	if (!has(p, bytes))
		return 4;
	/* Newer drivers count; older ones answer ALREADY_MAPPED. */
	int result = cuIpcOpenMemHandle_v2(&again, h, 1);
	if (result != 208 && (result || again != p || cuIpcCloseMemHandle(again)))
		return 5;
	if (cuIpcCloseMemHandle(p))
		return 6;
	return cuIpcOpenMemHandle_v2(&p, h, 1) || cuIpcCloseMemHandle(p) ? 8 : 0;
}

static void ipc(void)
{
	handle h, managed_handle;
	ptr p, q, managed;
	char back[8] = {0};
	cuMemAlloc_v2(&p, LEN);
	cuMemcpyHtoD_v2(p + 100, "original", 8);
	check(cuIpcGetMemHandle(&h, p) == 0, "device memory has an IPC handle");
	check(cuIpcOpenMemHandle_v2(&q, h, 1) != 0, "which its own process cannot open");
	check(opened_by_another(-1, &h, "original"), "another process can, reads the bytes, writes, and opens it once more and after it was closed");
	check(cuMemcpyDtoH_v2(back, p + 100, 7) == 0 && !strcmp(back, "changed"), "and what it wrote is there");
	cuMemAllocManaged(&managed, LEN, 1);
	check(cuIpcGetMemHandle(&managed_handle, managed) != 0, "managed memory has no handle");
	cuMemFree_v2(managed);
	cuMemFree_v2(p);
}

/* What ALLOWED_HANDLE_TYPES and MEMPOOL_HANDLE say. */
static uint64_t types_of(ptr p, void **pool)
{
	uint64_t types = ~0ull;
	int which[] = {14, 17};
	void *to[] = {&types, pool};
	return cuPointerGetAttributes(2, which, to, p) ? ~0ull : types;
}

/* MEMORY_BLOCK_ID; 0: the driver is too old to say it. */
static uint64_t block_of(ptr p)
{
	uint64_t block = 0;
	int which = 20;
	void *to = &block;
	return cuPointerGetAttributes(1, &which, &to, p) ? 0 : block;
}

/* Memory of cuMemCreate: two parts side by side. */
static void mapped(void)
{
	struct properties of = { 1, POSIX_FD, { 1, 0 }, { 0 } }, unshared = { 1, 0, { 1, 0 }, { 0 } };
	uint64_t part[3], kept;
	size_t len = 0;
	void *pool;
	char back[8] = {0};
	int fd = -1, none = -1;
	handle h;
	ptr p, base;
	size_t size;
	check(cuMemGetAllocationGranularity(&len, &of, 0) == 0 && len > 0 && cuMemAddressReserve(&p, 2 * len, 0, 0, 0) == 0, "addresses are reserved");
	int made = !cuMemCreate(&part[0], len, &of, 0) && !cuMemCreate(&part[1], len, &of, 0) && !cuMemCreate(&part[2], len, &unshared, 0);
	for (int i = 0; made && i < 2; i++)
		made = !cuMemMap(p + (ptr)i * len, len, 0, part[i], 0) && !cuMemRelease(part[i]);
	check(made && cuMemSetAccess(p, 2 * len, &access_of_first, 1) == 0, "two parts are mapped there");
	struct told t = ask(p + 12345), u = ask(p + len);
	check(t.type == 2 && !t.managed && t.ordinal == 0 && !t.context, "they are a device's, and have no context");
	check(t.start <= p && t.start + t.size >= p + len && u.start <= p + len && u.start + u.size >= p + 2 * len, "the range of an address has its part");
	check(cuMemGetAddressRange_v2(&base, &size, p + len + 5) == 0 && base == p + len && size == len, "the address range is the part");
	check(t.id && u.id, "each has a BUFFER_ID");
	printf("note: the BUFFER_IDs of the two parts are %s\n", t.id == u.id ? "the same" : "different");
	uint64_t block = block_of(p);
	if (block)
		check(block == block_of(p + 12345) && block_of(p + len) && block != block_of(p + len), "each has another MEMORY_BLOCK_ID");
	else
		printf("note: this driver has no MEMORY_BLOCK_ID: no registration of such memory is kept\n");
	check(cuIpcGetMemHandle(&h, p) != 0, "they have no IPC handle");
	check(types_of(p, &pool) == POSIX_FD && !pool, "ALLOWED_HANDLE_TYPES says how they are exported, and they are of no pool");
	check(cuMemcpyHtoD_v2(p + len - 4, "abcdefg", 7) == 0 && cuMemcpyDtoH_v2(back, p + len - 4, 7) == 0 && !strcmp(back, "abcdefg"), "a copy goes over both");
	cuMemcpyHtoD_v2(p + 100, "original", 8);
	check(cuMemRetainAllocationHandle(&kept, p + 5) == 0 && cuMemExportToShareableHandle(&fd, kept, POSIX_FD, 0) == 0 && cuMemRelease(kept) == 0, "a part is exported by its address");
	check(opened_by_another(fd, 0, "original"), "another process maps it, reads the bytes, and writes");
	check(cuMemcpyDtoH_v2(back, p + 100, 7) == 0 && !strcmp(back, "changed"), "and what it wrote is there");
	close(fd);
	check(cuMemUnmap(p, len) == 0 && cuMemMap(p, len, 0, part[2], 0) == 0 && cuMemSetAccess(p, len, &access_of_first, 1) == 0, "another part is mapped where one was");
	printf("note: its BUFFER_ID is %s\n", ask(p).id == t.id ? "that of the part before it" : "another one");
	check(ask(p).id && (!block || (block_of(p) && block_of(p) != block)), "and has another MEMORY_BLOCK_ID");
	check(cuMemGetAddressRange_v2(&base, &size, p + 5) == 0 && base == p && size == len, "its address range is the part");
	check(types_of(p, &pool) == 0 && cuMemExportToShareableHandle(&none, part[2], POSIX_FD, 0) != 0, "what was not made for it is not exported");
	cuMemUnmap(p, 2 * len);
	cuMemRelease(part[2]);
	check(cuMemAddressFree(p, 2 * len) == 0, "the addresses are given back");
}

static void pools(void)
{
	struct properties of = { 1, POSIX_FD, { 1, 0 }, { 0 } };
	void *pool, *its = 0;
	char back[8] = {0};
	int fd = -1;
	handle h;
	ptr p, q, base;
	size_t size;
	check(cuMemPoolCreate(&pool, &of) == 0 && cuMemAllocFromPoolAsync(&p, LEN, pool, 0) == 0 && cuStreamSynchronize(0) == 0, "memory of a pool is allocated");
	struct told t = ask(p + 12345);
	check(t.type == 2 && !t.context && t.start <= p && t.start + t.size >= p + LEN && t.id, "it has no context, and a BUFFER_ID");
	check(cuMemGetAddressRange_v2(&base, &size, p + 12345) == 0 && base == p && size >= LEN, "the address range is the allocation");
	check(types_of(p, &its) == POSIX_FD && its == pool, "ALLOWED_HANDLE_TYPES and MEMPOOL_HANDLE say how it is exported");
	cuMemcpyHtoD_v2(p + 100, "original", 8);
	check(cuMemPoolExportPointer(&h, p) == INVALID_VALUE, "a pointer is not exported before its pool");
	check(cuMemPoolExportToShareableHandle(&fd, pool, POSIX_FD, 0) == 0 && cuMemPoolExportPointer(&h, p) == 0, "pool and pointer are exported");
	check(opened_by_another(fd, &h, "original"), "another process imports them, reads the bytes, and writes");
	check(cuMemcpyDtoH_v2(back, p + 100, 7) == 0 && !strcmp(back, "changed"), "and what it wrote is there");
	/* The longest that udrv has imported; a device may have no room for it. */
	if (cuMemAllocFromPoolAsync(&q, LONGEST_OF_POOL, pool, 0) == 0 && cuStreamSynchronize(0) == 0) {
		cuMemcpyHtoD_v2(q + 100, "original", 8);
		check(cuMemPoolExportPointer(&h, q) == 0 && opened_by_another(fd, &h, "original"), "so is an allocation of 4 GiB");
		cuMemFreeAsync(q, 0);
	}
	close(fd);
	check(cuMemAllocAsync(&q, LEN, 0) == 0 && cuStreamSynchronize(0) == 0 && types_of(q, &its) == 0, "memory of the default pool is not exported");
	cuMemFreeAsync(q, 0);
	cuMemFreeAsync(p, 0);
	check(cuStreamSynchronize(0) == 0 && cuMemPoolDestroy(pool) == 0, "the pool is given back");
}

/* What a network device needs (GPUDirect RDMA), where the driver has it: GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, ..._WRITES_ORDERING,
   DMA_BUF_SUPPORTED. */
static void dmabufs(int device)
{
	int flushes = -1, order = -1, has = -1, fd = -1;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	ptr p = 0;
	check(cuDeviceGetAttribute(&flushes, 117, device) == 0 && cuDeviceGetAttribute(&order, 118, device) == 0 && cuDeviceGetAttribute(&has, 124, device) == 0, "a device says what it has for network devices");
	check(order == 0 || order == 100 || order == 200, "it says whether it keeps the order of their writes");
	if (flushes & 1)
		check(cuFlushGPUDirectRDMAWrites(0, 200) == 0, "what network devices have written can be waited for");
	if (!has)
		return;
	check(cuMemAlloc_v2(&p, LEN) == 0 && cuMemGetHandleForAddressRange(&fd, p, (LEN + page - 1) / page * page, 1, 0) == 0 && fd >= 0 && close(fd) == 0, "an allocation has a dma-buf of whole pages");
	check(cuMemGetHandleForAddressRange(&fd, p + 1, page, 1, 0) != 0, "which begins at a page");
	check(cuMemGetHandleForAddressRange(&fd, p + 16 * page, 2 * page, 1, 0) == 0 && fd >= 0 && close(fd) == 0, "so do pages in the middle of it");
	check(cuMemFree_v2(p) == 0, "it is freed");
}

static void reset(int device, void *context)
{
	uint64_t id = 0, again = 0;
	int active = 1;
	unsigned flags;
	check(cuCtxGetId(context, &id) == 0 && cuCtxGetId(context, &again) == 0 && id == again, "a context has an id");
	check(cuDevicePrimaryCtxReset_v2(device) == 0 && cuDevicePrimaryCtxGetState(device, &flags, &active) == 0 && !active, "a primary context that was reset is not active");
	check(cuDevicePrimaryCtxRetain(&context, device) == 0 && cuCtxSetCurrent(context) == 0 && cuCtxGetId(context, &again) == 0 && id != again, "the next one has another id");
}

static void forked(void)
{
	int status = -1, n;
	fflush(stdout);
	pid_t child = fork();
	if (!child)
		_exit(cuDeviceGetCount(&n) == NOT_INITIALIZED ? 0 : 1);
	check(waitpid(child, &status, 0) == child && status == 0, "in a forked child a call answers NOT_INITIALIZED");
}

int main(int argc, char **argv)
{
	int device, n, active = 0;
	unsigned flags;
	unsigned char uuid[16] = {0}, none[16] = {0};
	char place[16] = "";
	void *context;
	pthread_t thread;
	self = "/proc/self/exe";
	if (argc == 4 && !strcmp(argv[1], "open"))
		return opens(argv[2], argv[3]);
	if (argc == 4 && !strcmp(argv[1], "map"))
		return maps(argv[2], argv[3]);
	if (argc == 5 && !strcmp(argv[1], "pool"))
		return imports(argv[2], argv[3], argv[4]);
	before_init();
	check(cuInit(0) == 0 && cuDeviceGetCount(&n) == 0 && n > 0, "there is a device");
	if (failed)
		return 1;
	check(cuDeviceGet(&device, 0) == 0 && cuDeviceGetUuid_v2(uuid, device) == 0 && memcmp(uuid, none, 16), "it has a UUID");
	check(cuDeviceGetPCIBusId(place, sizeof(place), device) == 0 && sscanf(place, "%*4x:%*2x:%*2x.%1x", &flags) == 1,
	      "and a place on the bus, as sysfs writes it");
	check(cuDeviceGetPCIBusId(place, 4, device) != 0, "but not in four bytes");
	check(cuDevicePrimaryCtxGetState(device, &flags, &active) == 0 && !active, "its primary context is not active by itself");
	check(cuDevicePrimaryCtxRetain(&context, device) == 0 && cuCtxSetCurrent(context) == 0, "it is retained and set");
	check(cuDevicePrimaryCtxGetState(device, &flags, &active) == 0 && active, "and is active then");
	attributes(context);
	touching();
	copies();
	dmabufs(device);
	pthread_create(&thread, 0, bare_thread, context);
	pthread_join(thread, 0);
	ipc();
	mapped();
	pools();
	reset(device, context);
	forked();
	printf("%d passed, %d failed\n", passed, failed);
	return failed != 0;
}
