"""report.py BENCH VALUES RESULT LIBFABRIC COMMIT PROVIDER...

Tables of medians from the lines of VALUES (section, metric, key, provider, value; separated by tabs) on standard
output and in RESULT.md, and every value in RESULT.json. The first provider is ours. Those called ib_... are no providers
but programs that use a device bare.
"""

import collections
import json
import os
import statistics
import time
import sys

# Metric: what it is, its unit, and which of two values is the better one.
METRICS = {
    "latency": ("latency, µs one way", "us", min),
    "bandwidth": ("bandwidth, MB/s", "MB/s", max),
    "rate": ("messages of 8 bytes, million/s; each window is answered, but ucx_perftest's are not", "M/s", max),
    "exchange": ("exchange: two ranks send to each other at once, µs", "us", min),
    "alltoall": ("all-to-all, µs", "us", min),
    "floor_line": ("a cache line handed over, µs", "us", min),
    "floor_copy": ("1 MiB copied by one processor, MB/s", "MB/s", max),
    "turns_again": ("turns that met a slow spell of the processors, and were taken again", "turns", min),
    "turns_slow": ("turns that met one three times", "turns", min),
    "fi_rdm_tagged_pingpong": ("fi_rdm_tagged_pingpong, µs one way", "us", min),
    "fi_rdm_tagged_bw": ("fi_rdm_tagged_bw, MB/s", "MB/s", max),
    "fi_rma_bw -o write": ("fi_rma_bw -o write, MB/s", "MB/s", max),
    "fi_rma_bw -o read": ("fi_rma_bw -o read, MB/s", "MB/s", max),
    "first": ("first message to a new peer and its answer, from fi_av_insert on, µs", "us", min),
    "later": ("a later message and its answer, µs", "us", min),
    "bytes": ("bytes an entry", "bytes", min),
    "insert": ("insert, ns", "ns", min),
    "insert_64": ("insert 64 at a time, ns", "ns", min),
    "lookup": ("look-up, ns", "ns", min),
    "message": ("message to oneself, ns", "ns", min),
    "message_alone": ("the same in an empty vector, ns", "ns", min),
    "remove": ("remove, ns", "ns", min),
    "unexpected": ("messages that came before their receives, the last received first, ns each", "ns", min),
    "posted": ("receives that were posted before their messages, the last served first, ns each", "ns", min),
}
KEYS = {"loss": "loss", "queues": "waiting"}

bench, values, result, libfabric, commit, *providers = sys.argv[1:]
bare = [p for p in providers if p.startswith("ib_")]
providers = [p for p in providers if p not in bare]
ours = providers[0]
# An MPI over ours is no peer.
peers = [p for p in providers[1:] if "/" not in p]
runs = collections.defaultdict(list)
for line in open(values, encoding="utf-8"):
    section, metric, key, provider, value = line.rstrip("\n").split("\t")
    runs[section, metric, int(key) if key.isdigit() else key, provider].append(float(value))


def medians(section, metric, key):
    found = {p: runs.get((section, metric, key, p)) for p in providers + bare}
    return {p: statistics.median(v) for p, v in found.items() if v}


def keys(section, *metrics):
    # Numbers in their order, words in that of the runs.
    found = list(dict.fromkeys(k for s, m, k, _ in runs if s == section and m in metrics))
    return sorted(found) if all(isinstance(k, int) for k in found) else found


def row(*cells):
    return f"| {' | '.join(cells)} |"


def by_provider(section, metric):
    """A column for each provider, and how ours compares."""
    title, _, best = METRICS[metric]
    yield f"{section + ': ' if section else ''}{title} (median; a ratio {'below' if best is min else 'above'} 1 is ours ahead)"
    yield ""
    label = "window" if metric == "rate" else KEYS.get(bench, "bytes") if bench != "scale" else ""
    device = [p for p in bare if any((s, m, q) == (section, metric, p) for s, m, _, q in runs)]
    yield row(label, *providers, f"{ours} / best peer", *device, *([f"{ours} / device"] if device else []))
    yield f"|{'---|' * (len(providers) + 2 + len(device) + bool(device))}"
    for key in keys(section, metric):
        found = medians(section, metric, key)

        def values_of(names):
            return [f"{found[p]:.2f}" if p in found else "–" for p in names]

        def ratio(names):
            others = [found[p] for p in names if p in found]
            return f"{found[ours] / best(others):.2f}" if others and ours in found else "–"

        yield row(str(key), *values_of(providers), ratio(peers), *values_of(device), *([ratio(device)] if device else []))
    yield ""
    yield from spread(section, metric)


def spread(section, metric):
    """How far the rounds lay apart, where there were several."""
    names = [p for p in providers + bare if any((s, m, q) == (section, metric, p) for s, m, _, q in runs)]
    if bench != "rdma" or max((len(v) for (s, m, *_), v in runs.items() if (s, m) == (section, metric)), default=0) < 2:
        return
    yield "the same, least to most of all rounds"
    yield ""
    yield row("bytes", *names)
    yield f"|{'---|' * (len(names) + 1)}"
    for key in keys(section, metric):
        each = [runs.get((section, metric, key, p)) for p in names]
        yield row(str(key), *(f"{min(v):.2f} … {max(v):.2f}" if v else "–" for v in each))
    yield ""


def by_metric(section, metrics):
    """A column for each metric, of udrv alone."""
    yield f"{section} (medians)"
    yield ""
    yield row("entries", *(METRICS[m][0] for m in metrics))
    yield f"|{'---|' * (len(metrics) + 1)}"
    for key in keys(section, *metrics):
        found = [medians(section, m, key).get(ours) for m in metrics]
        yield row(str(key), *("–" if v is None else f"{v:.1f}" for v in found))
    yield ""


def floors():
    """What this machine cannot do better, and how near ours comes."""
    line, copy = (runs.get(("", m, "machine", "machine")) for m in ("floor_line", "floor_copy"))
    if not line or not copy:
        return
    # The quietest round is nearest to the floor.
    line = min(line)
    yield f"floors of this machine: a cache line handed over {line * 1000:.0f} ns, 1 MiB copied by one processor {max(copy):.0f} MB/s"
    for metric in ("turns_again", "turns_slow"):
        for n in runs.get(("", metric, "machine", "machine"), []):
            yield f"{METRICS[metric][0]}: {n:.0f}"
    shortest = runs.get(("", "latency", 8, ours))
    if shortest:
        yield f"8 bytes over {ours} take {statistics.median(shortest) / line:.1f} such hand-overs"
    yield ""


def tables():
    yield from floors()
    for section in dict.fromkeys(s for s, *_ in runs):
        metrics = [m for m in METRICS if any(s == section and n == m for s, n, *_ in runs) and not m.startswith(("floor", "turns"))]
        if section.startswith("address vectors"):
            yield from by_metric(section, metrics)
        else:
            for metric in metrics:
                yield from by_provider(section, metric)


def kernel(name):
    try:
        return open(f"/proc/sys/{name}").read().strip()
    except OSError:
        return "?"


model = next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "")
where = {
    "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit, "libfabric": libfabric, "cpu": model, "cores": os.cpu_count(), "kernel": os.uname().release,
    "tcp": kernel("net/ipv4/tcp_congestion_control"),
}
text = "\n".join(tables())
print(f"\n{text}", end="")
with open(f"{result}.md", "w", encoding="utf-8") as file:
    file.write(f"{bench}: {', '.join(f'{k} {v}' for k, v in where.items())}\n\n{text}")
with open(f"{result}.json", "w", encoding="utf-8") as file:
    json.dump({
        "bench": bench, **where, "versions": os.environ.get("BENCH_VERSIONS", "").split("; "), "providers": providers,
        "runs": [
            {"section": s, "program": m, "bytes" if isinstance(k, int) and bench != "scale" else "key": k, "provider": p,
             "unit": METRICS[m][1], "values": v}
            for (s, m, k, p), v in runs.items()
        ],
    }, file, indent=1)
