"""scripts/lab.d/rv-memory.py POINTS

Memory of connections, from what was measured (scripts/lab.d/rv-memory.sh): what one takes by least squares, and what a
node holds for NODES x RANKS in which every rank talks to every other. Fails when what was measured does not fit.

A line of POINTS: rc PROCESSES LIMIT, or rv RANKS off|rv; bytes that the RDMA modules mapped, of other kernel objects, of
the processes themselves; RC queue pairs. The modes of one count differ in RC, or in rv, and in nothing else.
"""
import sys

NODES, RANKS, BUDGET, PAIRS = 100, 64, 128, 4
# Queues, as udrv and the module ask for them: sends of a connection and their segments, receives of a process; and of a
# queue pair of the module sends, and receives (its depth of 4000 over four, 5 % and three more).
SENDS, SEGMENTS, RECEIVES, DEPTH = 32, 4, 1024, 1053
# Event ring of a process: 1983 entries of 65 bytes, in pages that double (the kernel's page allocator counts those).
RING = 128 << 10
# A device of today (mlx5): blocks of 64 bytes of which a write is 16 of control, 16 of address and 16 a segment; entries
# of completion queues of 64; a context of 256 in the host's memory for a queue pair, and 64 for a completion queue;
# queues have as many places as the next power of two.
BLOCK, PART, ENTRY, CONTEXT, QUEUE_CONTEXT = 64, 16, 64, 256, 64
# What the RFC of the module says of such a fabric.
RFC = "10,000 to 100,000"


def power(n):
    return 1 << (n - 1).bit_length()


def send_queue(depth, segments):
    return power(depth * -(-(2 * PART + segments * PART) // BLOCK)) * BLOCK


def fit(points):
    """The factors of the sum that comes nearest to all points (value, parts...), and how far the worst one is off, of
    the largest value: by the normal equations."""
    size = len(points[0]) - 1
    rows = [[sum(p[i + 1] * p[j] for p in points) for j in [*range(1, size + 1), 0]] for i in range(size)]
    for i in range(size):
        lead = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[lead] = rows[lead], rows[i]
        for k in range(size):
            if k != i:
                times = rows[k][i] / rows[i][i]
                rows[k] = [x - times * y for x, y in zip(rows[k], rows[i])]
    factors = [rows[i][size] / rows[i][i] for i in range(size)]
    off = max(abs(v - sum(f * x for f, x in zip(factors, parts))) for v, *parts in points)
    return factors, off / max(v for v, *_ in points)


def kib(n):
    return f"{n / 1024:,.1f}"


def main():
    measured = {}
    for line in open(sys.argv[1]):
        kind, count, mode, *values = line.split()
        measured[kind, int(count), mode] = [int(value) for value in values]
    print("| what is more | RC queue pairs | queues, KiB | other kernel objects, KiB | processes themselves, KiB |")
    print("|---|---|---|---|---|")
    # All bytes, and those of queues, with what they are the sum of: processes, connections that they may have, and that
    # they have; or ranks, and pairs of nodes.
    whole, queues, wrong = {"rc": [], "rv": []}, {"rc": [], "rv": []}, []
    for (kind, count, mode), values in measured.items():
        if mode in ("0", "off"):
            continue
        none = measured[kind, count, "0" if kind == "rc" else "off"]
        mapped, objects, own, pairs = (a - b for a, b in zip(values, none))
        what = f"user RC, {count} processes with at most {mode} each" if kind == "rc" else f"rv, {count} ranks a guest"
        print(f"| {what} | {pairs} | {kib(mapped)} | {kib(objects)} | {kib(own) if kind == 'rc' else '-'} |")
        parts = (count, count * int(mode), count * (count - 1)) if kind == "rc" else (count, 1)
        wanted = parts[2] if kind == "rc" else PAIRS + count
        if pairs != wanted:
            wrong.append(f"{what}: {pairs} queue pairs, not {wanted}")
        # What processes have themselves is not more: long messages need no buffers of theirs then.
        whole[kind].append((mapped + objects, *parts))
        queues[kind].append((mapped, *parts))
    (process, room, connection), off = fit(whole["rc"])
    (process_queues, _, connection_queues), _ = fit(queues["rc"])
    (rank, pair), rv_off = fit(whole["rv"])
    (_, pair_queues), _ = fit(queues["rv"])
    print()
    print(f"soft-RoCE, as measured: user RC {kib(process)} KiB a process, {kib(room)} a connection that it may have and "
          f"{kib(connection)} one that it has; rv {kib(rank)} a process and {kib(pair)} a pair of nodes. The worst point is "
          f"{off:.0%} and {rv_off:.0%} off.")
    # A device has its own queues, and what kernel and library keep of them is taken as it is here.
    device_process = 2 * power(RECEIVES) * PART + 2 * power(RECEIVES + 1) * ENTRY + QUEUE_CONTEXT + max(process - process_queues, 0)
    device_room = SENDS * ENTRY
    device_connection = send_queue(SENDS, SEGMENTS) + CONTEXT + max(connection - connection_queues, 0)
    one = send_queue(DEPTH, 1) + power(DEPTH) * PART + 2 * (power(DEPTH) * ENTRY + QUEUE_CONTEXT) + CONTEXT
    device_pair = PAIRS * one + max(pair - pair_queues, 0)
    print(f"a device by its formula: user RC {kib(device_process)} KiB a process, {kib(device_room)} a connection that it may "
          f"have and {kib(device_connection)} one that it has; rv {kib(device_pair)} a pair of nodes, a process as measured.")
    print()
    print(f"| {NODES} nodes x {RANKS} ranks, all to all: a node | RC queue pairs | as measured, MB | a device, MB |")
    print("|---|---|---|---|")
    others = (NODES - 1) * RANKS
    for name, each in (("user RC, without a budget", others), (f"user RC, FI_UDRV_RC_CONNECTIONS={BUDGET}", BUDGET)):
        soft = RANKS * (process + each * (room + connection)) / 1e6
        hard = RANKS * (device_process + each * (device_room + device_connection)) / 1e6
        print(f"| {name} | {RANKS * each:,} | {soft:,.0f} | {hard:,.0f} |")
    soft, hard = (((NODES - 1) * c + RANKS * (rank + RING)) / 1e6 for c in (pair, device_pair))
    print(f"| rv | {(NODES - 1) * PAIRS:,} and {RANKS} for registering | {soft:,.0f} | {hard:,.0f} |")
    print(f"| connections of processes, the module's RFC | | | {RFC} |")
    for why in wrong:
        print(why, file=sys.stderr)
    least = min(process, room, connection, rank, pair)
    if least <= 0 or max(off, rv_off) > 0.25:
        wrong.append("no fit")
        print("what was measured does not fit", file=sys.stderr)
    return 1 if wrong else 0


sys.exit(main())
