"""plots.py RESULT.json PREFIX: PREFIX-latency.svg and others from what scripts/bench full or scripts/bench net has found.

A point is the median of the rounds, and its bar goes from the least to the most. Takes matplotlib (scripts/deps plots).
"""

import json
import math
import os
import statistics
import sys
import textwrap

import matplotlib

matplotlib.use("svg")
# Texts stay texts, and the same values make the same file.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "udrv", "font.size": 10, "font.family": "sans-serif"})
import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first)
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

# Colours that the colour-blind can tell apart (Okabe and Ito), ours first and thick.
COLOURS = ["#d55e00", "#0072b2", "#009e73", "#000000", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f"]
MARKS = "osD^vPX*"
# What a plot is called: title, label of x, label of y; and the longest message of its own panel of short ones.
PLOTS = {
    "latency": ("Latency", "message size, bytes", "one way, µs (lower is better)", 4096),
    "bandwidth": ("Bandwidth", "message size, bytes", "MB/s (higher is better)", None),
    "rate": ("Message rate, 8 bytes", "messages in a window", "million/s (higher is better)", None),
    "exchange": ("Exchange: both ranks send at once", "message size, bytes", "µs (lower is better)", 4096),
}
# The programs of fabtests measure two of these.
PROGRAMS = {"fi_rdm_tagged_pingpong": "latency", "fi_rdm_tagged_bw": "bandwidth"}


def label(number):
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if number >= factor and number % factor == 0:
            return f"{number // factor}{unit}"
    return str(number)


def grouped(runs):
    """{section: {metric: {provider: {number: values}}}} of two ranks."""
    found = {}
    for run in runs:
        number, metric = run.get("bytes", run.get("key")), PROGRAMS.get(run["program"], run["program"])
        if metric in PLOTS and isinstance(number, int):
            of = found.setdefault(run["section"], {}).setdefault(metric, {})
            of.setdefault(run["provider"], {})[number] = run["values"]
    return found


def style(name, order):
    """An MPI over ours has its MPI's colour, dashed."""
    plain = [n for n in order if "/" not in n]
    base = name.split("/")[0]
    rank = plain.index(base) if base in plain else order.index(name)
    return {
        "color": COLOURS[rank % len(COLOURS)], "marker": MARKS[rank % len(MARKS)], "markersize": 4,
        "linewidth": 2.6 if name == order[0] else 1.3, "linestyle": "--" if "/" in name else "-",
        "zorder": 3 if name == order[0] else 2,
    }


def plain_ticks(axis, low, high, leading):
    """Labels at these leading digits of each power of ten, and no others."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [d * 10.0**e for e in exponents for d in leading if low / 1.02 <= d * 10.0**e <= high * 1.02]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e6 else f"{value:.0e}"))


def panel(axes, series, order, number):
    """Lines with bars. Sizes stand side by side, each with its label."""
    keys = sorted({key for points in series.values() for key in points})
    axes.patch.set_gid(f"frame-{number}")
    low, high = math.inf, 0.0
    for name in (n for n in order if n in series):
        points = sorted(series[name].items())
        x = [keys.index(key) for key, _ in points]
        middle = [statistics.median(values) for _, values in points]
        below = [m - min(values) for m, (_, values) in zip(middle, points)]
        above = [max(values) - m for m, (_, values) in zip(middle, points)]
        look = style(name, order)
        (line,) = axes.plot(x, middle, label=name, **look)
        line.set_gid(f"line-{number}-{name}")
        axes.errorbar(x, middle, yerr=[below, above], fmt="none", ecolor=look["color"], elinewidth=0.9, capsize=2, alpha=0.7)
        low = min(low, *(min(values) for _, values in points))
        high = max(high, *(max(values) for _, values in points))
    axes.set_xticks(range(len(keys)), [label(key) for key in keys])
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.15, high * 1.15)
    plain_ticks(axes.yaxis, low / 1.15, high * 1.15, (1, 1.5, 2, 3, 5, 7) if high < 100 * low else (1, 2, 5))


def figure(count, title, caption, file, draw, wide=10.5):
    """`count` panels side by side, a legend beside them, and the caption below."""
    fig, axes = plt.subplots(1, count, figsize=(wide, 5.2), squeeze=False)
    draw(axes[0])
    fig.suptitle(title, x=0.06, ha="left", fontweight="bold", fontsize=13)
    handles, names = axes[0][-1].get_legend_handles_labels()
    fig.legend(handles, names, loc="center left", bbox_to_anchor=(0.855, 0.55), frameon=False)
    fig.text(0.06, 0.03, "\n".join(textwrap.wrap(caption, 165)), fontsize=7.5, color="#555555", va="bottom")
    fig.subplots_adjust(left=0.075, right=0.845, top=0.9, bottom=0.2, wspace=0.2)
    fig.savefig(file, metadata={"Date": None})
    plt.close(fig)


def curves(metric, series, order, floors, caption, file, where="within a node"):
    title, x_label, y_label, split = PLOTS[metric]
    keys = sorted({key for points in series.values() for key in points})
    parts = [keys]
    if split and keys[0] <= split < keys[-1] and len(keys) > 4:
        parts = [[key for key in keys if key <= split], [key for key in keys if key > split]]

    def draw(axes):
        for number, (place, part) in enumerate(zip(axes, parts)):
            chosen = {name: {k: v for k, v in points.items() if k in part} for name, points in series.items()}
            panel(place, {name: points for name, points in chosen.items() if points}, order, number)
            place.set_xlabel(x_label)
        axes[0].set_ylabel(y_label)
        if metric == "latency" and floors.get("floor_line"):
            floor = floors["floor_line"]
            axes[0].axhline(floor, color="#555555", linestyle=":", linewidth=1.2)
            axes[0].set_ylim(bottom=min(floor / 1.4, axes[0].get_ylim()[0]))
            words = {"textcoords": "offset points", "fontsize": 8, "color": "#555555"}
            axes[0].annotate(f"a cache line handed over: {floor * 1000:.0f} ns", (0, floor), (2, 3), **words)

    figure(len(parts), f"{title} {where}", caption, file, draw)


def networks(metric, found, order, caption, file):
    """A panel for each section: an MTU."""
    sections = [section for section in found if metric in found[section]]

    def draw(axes):
        for number, (place, section) in enumerate(zip(axes, sections)):
            panel(place, found[section][metric], order, number)
            place.set_title(section, fontsize=10)
            place.set_xlabel(PLOTS[metric][1])
        axes[0].set_ylabel(PLOTS[metric][2])

    figure(len(sections), f"{PLOTS[metric][0]} between two hosts", caption, file, draw)


def ratios(found, order):
    """How fast ours is beside the best peer at each size: above 1 is ours ahead."""
    ours, peers = order[0], [p for p in order[1:] if "/" not in p]
    lines = {}
    for metric, lower in (("latency", True), ("bandwidth", False), ("exchange", True)):
        median = {p: {k: statistics.median(v) for k, v in points.items()} for p, points in found.get(metric, {}).items()}
        for number, value in median.get(ours, {}).items():
            others = [median[p][number] for p in peers if number in median.get(p, {})]
            if others:
                lines.setdefault(metric, {})[number] = [min(others) / value if lower else value / max(others)]
    return lines


def plot_ratios(lines, ours, caption, file):
    def draw(axes):
        panel(axes[0], lines, list(lines), 0)
        values = [v[0] for points in lines.values() for v in points.values()] + [1.0]
        low, high = min(values) / 1.1, max(values) * 1.1
        axes[0].set_ylim(low, high)
        steps = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20]
        axes[0].yaxis.set_major_locator(FixedLocator([s for s in steps if low <= s <= high]))
        axes[0].axhline(1.0, color="#222222", linewidth=1.2)
        axes[0].set_xlabel("message size, bytes")
        axes[0].set_ylabel(f"times as fast (above 1: {ours} ahead)")

    figure(1, f"{ours} beside the best peer at each size, within a node", caption, file, draw)


def caption_of(result):
    most = max((len(run["values"]) for run in result["runs"]), default=0)
    parts = [f"{result['cpu']}, {result['cores']} cores, Linux {result['kernel']}", f"udrv {result['commit']}"]
    parts += result.get("versions", []) or [f"libfabric {result['libfabric']}"]
    parts += [result["date"]] if "date" in result else []
    parts.append(f"medians of {most} rounds, bars from the least to the most" if most > 1 else "one round")
    measured = {run["program"] for run in result["runs"] if run["provider"] == "ucx"}
    if measured and "exchange" not in measured:
        parts.append("ucx_perftest measures no exchange")
    return "; ".join(parts)


def main(source, prefix):
    with open(source, encoding="utf-8") as file:
        result = json.load(file)
    order, caption = result["providers"], caption_of(result)
    found = grouped(result["runs"])
    os.makedirs(os.path.dirname(os.path.abspath(prefix)), exist_ok=True)
    if result["bench"] != "full":
        for metric in ("latency", "bandwidth"):
            if any(metric in of for of in found.values()):
                networks(metric, found, order, caption, f"{prefix}-{metric}.svg")
        return
    floors = {r["program"]: min(r["values"]) for r in result["runs"] if r["provider"] == "machine"}
    node = found.get("", {})
    for metric, series in node.items():
        curves(metric, series, order, floors, caption, f"{prefix}-{metric}.svg")
    lines = ratios(node, order)
    if lines:
        plot_ratios(lines, order[0], caption, f"{prefix}-ratio.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
