#!/usr/bin/env python3
"""charts.py [--check | JSON DIRECTORY]: generates the charts and figures of the documentation from results of `make
bench`: times.svg and footprint.svg from docs/images/bench.json, crowd.svg and growth.svg from the JSON files of these
names, and the table of docs/performance.md.

--check writes nothing, and fails if a file differs from the generated one. With JSON, such as target/bench.json, writes
the charts for which it has the rows into DIRECTORY."""

import html
import json
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
IMAGES = "docs/images/"
TABLE = "docs/performance.md"

# The cases of the charts, described in docs/performance.md.
CHAINS = [
    ("bridge", "bridge"),
    ("ptp", "ptp"),
    ("chain", "loopback, bridge with ipMasq, portmap"),
    ("seven", "the same, bandwidth, firewall, tuning, sbr"),
]

# What `make bench` calls the default back end.
BACKENDS = {"default": "as installed on Debian"}

# Both themes: an SVG in <img> is a separate document with its own media queries.
STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:#1f2328}
.title{font-size:16px;font-weight:600}.head{font-weight:600}.small{font-size:12px;fill:#59636e}
.back{fill:#fff;stroke:#d1d9e0}.ours{fill:#0969da}.peer{fill:#9aa4ae}.range{stroke:#1f2328}.axis{stroke:#d1d9e0}
@media (prefers-color-scheme:dark){
text{fill:#f0f6fc}.small{fill:#9198a1}
.back{fill:#0d1117;stroke:#3d444d}.ours{fill:#4493f8}.peer{fill:#79828c}.range{stroke:#f0f6fc}.axis{stroke:#3d444d}
}
""".replace("\n", "")

# The width of a phone, so that text is not scaled down there.
WIDTH, MARGIN, BAR = 400, 16, 12
# Space for the value right of the longest bar.
VALUE = 70


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def svg(width, height, title, body):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
        f"<title>{html.escape(title)}</title>\n{body}</svg>\n"
    )


class Chart:
    """Horizontal bars, two for each name, under headings."""

    def __init__(self, title, about, bench):
        self.title, self.y, self.parts = title, 0, []
        self.text(title, 28, "title")
        for line in about:
            self.text(line, 18, "small")
        self.y += 20
        left = MARGIN
        for key, kind in (("cnibox", "ours"), ("reference", "peer")):
            self.rect(left, self.y - BAR + 2, BAR, kind)
            self.put(left + BAR + 5, self.y, bench[key]["name"])
            left += 130

    def put(self, x, y, text, kind=""):
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x}" y="{y}"{kind}>{html.escape(text)}</text>')

    def text(self, text, step, kind=""):
        self.y += step
        self.put(MARGIN, self.y, text, kind)

    def rect(self, x, y, width, kind):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" class="{kind}"/>')

    def section(self, name, groups, most, form):
        """groups: (name, bars); a bar is (class, value, low, high), or None if it was not measured."""
        self.text(name, 30, "head")
        scale = (WIDTH - 2 * MARGIN - VALUE) / most
        for group, bars in groups:
            if group:
                self.text(group, 21)
            top = self.y + 5
            for kind, value, low, high in filter(None, bars):
                self.y += BAR + 4
                top_of_bar, middle = self.y - BAR + 4, self.y - BAR / 2 + 4
                self.rect(MARGIN, top_of_bar, value * scale, kind)
                end = MARGIN + max(value, high) * scale
                if high > low:
                    ends = f'x1="{MARGIN + low * scale:.1f}" x2="{end:.1f}"'
                    self.parts.append(f'<line {ends} y1="{middle}" y2="{middle}" class="range"/>')
                self.put(f"{end + 5:.1f}", self.y + 3, form(value))
            line = f'<line x1="{MARGIN}" x2="{MARGIN}" y1="{top}" y2="{self.y + 6}" class="axis"/>'
            self.parts.append(line)
            self.y += 3

    def done(self):
        height = self.y + 20
        back = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="back"/>'
        body = "\n".join([f"<style>{STYLE}</style>", back, *self.parts, ""])
        return svg(WIDTH, height, self.title, body)


class Bench:
    def __init__(self, data):
        self.data = data
        self.rows = {(row["case"], row["what"]): row for row in data["rows"]}

    def bar(self, case, what, side, kind):
        row = self.rows[case, what].get(side)
        return row and (kind, row["median"], row["p10"], row["p90"])

    def groups(self, what):
        sides = [("cnibox", "ours"), ("reference", "peer")]
        return [(name, [self.bar(case, what, *side) for side in sides]) for case, name in CHAINS]

    def most(self, whats):
        return max(bar[3] for what in whats for _, bars in self.groups(what) for bar in filter(None, bars))


    def pairs(self, rows):
        """The bars of rows (name, case, what), and the largest value."""
        sides = [("cnibox", "ours"), ("reference", "peer")]
        groups = [(name, [self.bar(case, what, *side) for side in sides]) for name, case, what in rows]
        return groups, max(bar[3] for _, bars in groups for bar in filter(None, bars))


def seconds(value):
    return f"{value / 1000:.1f} s" if value < 100_000 else f"{value / 1000:.0f} s"


def milliseconds(value):
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def times(bench):
    samples = bench.rows["chain", "ADD"]["cnibox"]["samples"]
    about = [
        f"Median of {samples}, line: 10th to 90th percentile. Shorter is better.",
        kernel(bench),
    ]
    chart = Chart("Time to attach and to detach a container", about, bench.data)
    most = bench.most(["ADD", "DEL"])
    for what in ("ADD", "DEL"):
        chart.section(what, bench.groups(what), most, milliseconds)
    return chart.done()


def footprint(bench):
    chart = Chart("Programs started, and bytes on disk", ["By the plugins themselves; shorter is better."], bench.data)
    most = bench.most(["ADD, started", "DEL, started"])
    for what in ("ADD", "DEL"):
        chart.section(f"Programs that one {what} starts", bench.groups(what + ", started"), most, "{:.0f}".format)
    sizes = [bench.data[side]["plugins"] for side in ("cnibox", "reference")]
    bars = [(kind, size["bytes"] / 1e6, 0, 0) for kind, size in zip(("ours", "peer"), sizes)]
    chart.section(
        f"On disk: {sizes[0]['count']} plugins, stripped", [("", bars)], bars[1][1], "{:.1f} MB".format
    )
    return chart.done()


def crowd(bench):
    """The time of a batch of containers by the number of concurrent calls."""
    found = [re.fullmatch(r"(\d+) ADD, (\d+) at once", what) for case, what in bench.rows if case == "chain"]
    found = [match.groups() for match in found if match]
    if not found:
        raise KeyError("chain with --parallel")
    count = found[0][0]
    about = ["loopback, bridge with ipMasq, portmap. Shorter is better.", kernel(bench)]
    chart = Chart(f"{count} containers, several at once", about, bench.data)
    for what in ("ADD", "DEL"):
        rows = [(f"{n} at once", "chain", f"{count} {what}, {n} at once") for _, n in found]
        chart.section(f"{what} of all {count}", *bench.pairs(rows), seconds)
    return chart.done()


def growth(bench):
    """The time of one container by the number of containers on the node."""
    counts = [re.fullmatch(r"ptp(?:, (\d+) pods)?", case) for case, what in bench.rows if what == "ADD"]
    counts = [(match[0], match[1] or "0") for match in counts if match]
    if len(counts) < 2:
        raise KeyError("ptp with --pods")
    about = ["ptp with host-local. Line: 10th to 90th percentile.", kernel(bench)]
    chart = Chart("One more container on a full node", about, bench.data)
    for what in ("ADD", "DEL"):
        rows = [(f"{int(count):,} containers are there", case, what) for case, count in counts]
        chart.section(what, *bench.pairs(rows), milliseconds)
    return chart.done()


def kernel(bench):
    machine, backend = bench.data["machine"], bench.data["options"]["backend"]
    backend = BACKENDS.get(backend, backend)
    return f"Linux {machine['kernel']}, {machine['processors']} processors, {backend}."


PICTURES = {"times.svg": times, "footprint.svg": footprint, "crowd.svg": crowd, "growth.svg": growth}


def own(path, directory):
    """Writes the charts of one file of results."""
    with open(path, encoding="utf-8") as file:
        bench = Bench(json.load(file))
    for name, picture in PICTURES.items():
        try:
            text = picture(bench)
        except (KeyError, TypeError):
            continue
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.write(text)
        print(os.path.join(directory, name))
    return 0


def table(bench):
    """The table of all cases with ADD."""
    lines = [
        "| | ADD, cnibox | ADD, reference | DEL, cnibox | DEL, reference | ADD starts | DEL starts |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]

    def span(row, side):
        side = row.get(side)
        return "{median:.1f} ({p10:.1f}–{p90:.1f})".format(**side) if side else "–"

    def started(case, what):
        row = bench.rows.get((case, f"{what}, started"), {})
        return " / ".join(f"{row[side]['median']:.0f}" for side in ("cnibox", "reference") if side in row) or "–"

    for case, what in bench.rows:
        if what == "ADD":
            add, delete = bench.rows[case, "ADD"], bench.rows.get((case, "DEL"), {})
            cells = [span(row, side) for row in (add, delete) for side in ("cnibox", "reference")]
            cells += [started(case, what) for what in ("ADD", "DEL")]
            lines.append(f"| `{case}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(*args):
    if len(args) == 2:
        return own(*args)
    bench = Bench(json.loads(read(IMAGES + "bench.json")))
    files = {IMAGES + "times.svg": times(bench), IMAGES + "footprint.svg": footprint(bench)}
    for name in ("crowd", "growth"):
        files[f"{IMAGES}{name}.svg"] = PICTURES[name + ".svg"](Bench(json.loads(read(f"{IMAGES}{name}.json"))))
    page = read(TABLE)
    before, after = "<!-- charts.py bench.json -->\n", "\n<!-- end -->"
    start = page.index(before) + len(before)
    files[TABLE] = page[:start] + table(bench) + page[page.index(after, start):]
    stale = [path for path, text in files.items() if not os.path.exists(os.path.join(ROOT, path)) or read(path) != text]
    if args == ("--check",):
        return f"differs from the output of packaging/charts.py: {', '.join(stale)}" if stale else 0
    if args:
        return __doc__
    for path in stale:
        with open(os.path.join(ROOT, path), "w", encoding="utf-8") as file:
            file.write(files[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
