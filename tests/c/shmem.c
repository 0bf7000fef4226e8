/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * For tests/readme, where a Sandia OpenSHMEM is: each process puts short and long data into the next one, reads it back,
 * and all add to a counter.
 */
#include <shmem.h>
#include <stdio.h>
#include <stdlib.h>

enum { LEN = 1 << 20 };

int main(void)
{
	shmem_init();
	int me = shmem_my_pe(), all = shmem_n_pes(), next = (me + 1) % all, before = (me + all - 1) % all;
	static long counter;
	long *here = shmem_malloc(LEN * sizeof(*here)), *mine = malloc(LEN * sizeof(*mine));
	int good = here && mine;

	for (size_t len = 1; good && len <= LEN; len *= 32) {
		for (size_t i = 0; i < len; i++)
			mine[i] = (long)(me * LEN + i);
		shmem_barrier_all();
		shmem_long_put(here, mine, len, next);
		shmem_barrier_all();
		for (size_t i = 0; i < len; i++)
			good &= here[i] == (long)(before * LEN + i);
		shmem_long_get(mine, here, len, next);
		for (size_t i = 0; i < len; i++)
			good &= mine[i] == (long)(me * LEN + i);
	}
	shmem_long_atomic_add(&counter, me + 1, 0);
	shmem_barrier_all();
	good &= me || counter == (long)all * (all + 1) / 2;
	printf("SHMEM process %d of %d: %s\n", me, all, good ? "OK" : "wrong");
	shmem_finalize();
	return !good;
}
