"""plots.py RESULT.json PREFIX: PREFIX-latency.svg and others from what scripts/bench full has found.

Medians; both axes logarithmic. Nothing but Python's own library.
"""

import html
import json
import math
import statistics
import sys

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 78, 190, 48, 58
# Colours that the colour-blind can tell apart (Okabe and Ito), ours first and thick.
COLOURS = ["#d55e00", "#0072b2", "#009e73", "#000000", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f"]


def grouped(runs):
    """{metric: {provider: {number: median}}} of two ranks."""
    found = {}
    for run in runs:
        if run["section"] == "":
            number = run.get("bytes", run.get("key"))
            found.setdefault(run["program"], {}).setdefault(run["provider"], {})[number] = statistics.median(run["values"])
    return found


def size(number):
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= factor and number % factor == 0:
            return f"{number // factor} {unit}"
    return str(number)


def decimal(value):
    return f"{value:g}" if 1e-3 <= value < 1e6 else f"{value:.0e}"


def powers_of_ten(low, high):
    """Ticks that are labelled, and those between."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    major = [10.0**e for e in exponents]
    minor = [m * 10.0**e for e in exponents for m in range(2, 10)]
    return [t for t in major if low <= t <= high], [t for t in minor if low <= t <= high]


class Plot:
    def __init__(self, title, x_label, y_label, numbers, low, high):
        self.parts, self.names = [], []
        # Nothing has no logarithm: it stands one step left of the first.
        self.zero = 0 in numbers
        positive = [n for n in numbers if n > 0]
        self.first = math.log2(min(positive)) - (2 if self.zero else 0)
        self.last = max(math.log2(max(positive)), self.first + 1)
        self.low, self.high = low / 1.25, high * 1.25
        self.text(LEFT, 26, title, 17, "start", weight="bold")
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_label, 13)
        self.text(20, (TOP + HEIGHT - BOTTOM) / 2, y_label, 13, turned=True)
        self.axes(numbers)

    def x(self, number):
        at = math.log2(number) if number > 0 else self.first
        return LEFT + (at - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        share = math.log10(value / self.low) / math.log10(self.high / self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def text(self, x, y, text, points, anchor="middle", weight="normal", colour="#222", turned=False):
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{points}" font-weight="{weight}" fill="{colour}" '
            f'text-anchor="{anchor}"{turn}>{html.escape(text)}</text>'
        )

    def stroke(self, x1, y1, x2, y2, colour, width=1.0, dash=""):
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"{dashed}/>'
        )

    def axes(self, numbers):
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        major, minor = powers_of_ten(self.low, self.high)
        narrow = len(major) < 3  # too few powers of ten to read by
        for value in minor:
            leading = round(value / 10 ** math.floor(math.log10(value)))
            self.stroke(LEFT, self.y(value), right, self.y(value), "#f0f0f0")
            if narrow and leading in (2, 5):
                self.text(LEFT - 8, self.y(value) + 4, decimal(value), 12, "end")
        for value in major:
            self.stroke(LEFT, self.y(value), right, self.y(value), "#cfcfcf")
            self.text(LEFT - 8, self.y(value) + 4, decimal(value), 12, "end")
        before = -math.inf
        for number in sorted(numbers):
            at = self.x(number)
            self.stroke(at, TOP, at, bottom, "#ececec")
            self.stroke(at, bottom, at, bottom + 5, "#444")
            if at - before >= 44:
                self.text(at, bottom + 20, size(number), 12)
                before = at
        self.parts.append(
            f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" fill="none" stroke="#444"/>'
        )

    def level(self, value, name):
        """A floor, or what is even."""
        self.stroke(LEFT, self.y(value), WIDTH - RIGHT, self.y(value), "#555", 1.2, "2 3")
        self.text(WIDTH - RIGHT - 6, self.y(value) - 5, name, 11, "end", colour="#555")

    def line(self, name, points, rank, over_ours=False):
        colour = COLOURS[rank % len(COLOURS)]
        dash, width = ("6 4", 1.4) if over_ours else ("", 3.0 if rank == 0 else 1.6)
        along = " ".join(f"{self.x(n):.1f},{self.y(v):.1f}" for n, v in sorted(points.items()))
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{along}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>')
        for number, value in points.items():
            self.parts.append(f'<circle cx="{self.x(number):.1f}" cy="{self.y(value):.1f}" r="{width + 0.6}" fill="{colour}"/>')
        at = TOP + 14 + 22 * len(self.names)
        self.stroke(WIDTH - RIGHT + 16, at - 4, WIDTH - RIGHT + 46, at - 4, colour, width, dash)
        self.text(WIDTH - RIGHT + 54, at, name, 13, "start", "bold" if rank == 0 else "normal")
        self.names.append(name)

    def svg(self, below):
        self.text(WIDTH - 8, 26, below, 11, "end", colour="#666")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


TITLES = {
    "latency": ("Latency within a node", "message size, bytes", "one way, µs (lower is better)"),
    "bandwidth": ("Bandwidth within a node", "message size, bytes", "MB/s (higher is better)"),
    "rate": ("Message rate, 8 bytes", "messages in a window", "million/s (higher is better)"),
    "exchange": ("Exchange: both ranks send at once", "message size, bytes", "µs (lower is better)"),
}


def colour_of(name, order):
    """An MPI over ours has its MPI's colour, dashed."""
    plain = [n for n in order if "/" not in n]
    base = name.split("/")[0]
    return plain.index(base) if base in plain else order.index(name)


def curves(metric, found, order, floors):
    title, x_label, y_label = TITLES[metric]
    values = [v for name in found for v in found[name].values()]
    level = floors.get("floor_line") if metric == "latency" else None
    low = min(values + ([level] if level else []))
    plot = Plot(title, x_label, y_label, sorted({n for name in found for n in found[name]}), low, max(values))
    if level:
        plot.level(level, f"a cache line handed over: {level * 1000:.0f} ns")
    for name in (n for n in order if n in found):
        plot.line(name, found[name], colour_of(name, order), "/" in name)
    return plot


def ratios(found, order):
    """How fast ours is beside the best peer at each size: above 1 is ours ahead."""
    ours, peers = order[0], [p for p in order[1:] if "/" not in p]
    lines = {}
    for metric, lower in (("latency", True), ("bandwidth", False), ("exchange", True)):
        for number, value in found.get(metric, {}).get(ours, {}).items():
            others = [found[metric][p][number] for p in peers if number in found[metric].get(p, {})]
            if others:
                lines.setdefault(metric, {})[number] = min(others) / value if lower else value / max(others)
    if not lines:
        return None
    values = [v for points in lines.values() for v in points.values()] + [1.0]
    plot = Plot(f"{ours} beside the best peer at each size", "message size, bytes", f"times as fast (above 1: {ours} ahead)",
                sorted({n for points in lines.values() for n in points}), min(values), max(values))
    plot.level(1.0, "even")
    for rank, (metric, points) in enumerate(lines.items()):
        plot.line(metric, points, rank)
    return plot


def main(source, prefix):
    with open(source, encoding="utf-8") as file:
        result = json.load(file)
    found = grouped(result["runs"])
    floors = {r["program"]: min(r["values"]) for r in result["runs"] if r["provider"] == "machine"}
    order = result["providers"]
    below = f"{result['cpu']}, {result['cores']} cores, {result['commit']}"
    plots = {m: curves(m, found[m], order, floors) for m in TITLES if m in found}
    plots["ratio"] = ratios(found, order)
    for name, plot in plots.items():
        if plot:
            with open(f"{prefix}-{name}.svg", "w", encoding="utf-8") as file:
                file.write(plot.svg(below))


if __name__ == "__main__":
    main(*sys.argv[1:])
