#!/usr/bin/env python3
"""Draws what `strata bench all --json` found.

    strata bench all --json > docs/scaling.json
    python3 docs/plot_scaling.py docs/scaling.json docs/scaling.svg --page docs/bench.md

writes the picture, with the standard library alone, and the table in that page; without a page it prints the table. One panel for each curve, both axes
logarithmic. The dashed line is what the limits of the machine allow for the same work.
"""

import argparse
import html
import json
import math
import pathlib
import re
import sys

COLUMNS = 4
PANEL_WIDTH, PANEL_HEIGHT = 225, 150
LEFT, RIGHT, TOP, BOTTOM = 50, 20, 34, 40
HEAD = 40
# In the middle between black and white, so that all can be read on both.
INK, GRID, MEASURED, LIMIT = "#7b8490", "#7b849055", "#2f81f7", "#d97706"
X_LABELS = {"batch": "sequences", "length": "tokens of a sequence", "rank": "rank", "adapters": "adapters", "layers": "layers"}
WORKS = {"train": "training", "prefill": "prefill", "decode": "decode"}


def short(value):
    """123, 4.5k, 67k: three digits at most."""
    for size, unit in (1e6, "M"), (1e3, "k"):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def ticks(low, high):
    """1, 2 and 5 times powers of ten between two numbers; 1 alone if there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (1, 2, 5), (1, 3), (1,):
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(found) <= 5:
            return found
    return found


def panel(curve, left, top):
    points = curve["points"]
    xs = [p["x"] for p in points]
    ys = [p[key] for p in points for key in ("tokens_per_s", "limit_tokens_per_s")]
    x_low, x_high = min(xs), max(xs)
    # Half a power of ten at least: what is flat is to look flat.
    middle, half = math.log10(min(ys) * max(ys)) / 2, max(math.log10(max(ys) / min(ys)) / 2, 0.4) + 0.1
    y_low, y_high = 10 ** (middle - half), 10 ** (middle + half)
    x_at = lambda x: left + (math.log(x / x_low) / math.log(x_high / x_low) if x_high > x_low else 0.5) * PANEL_WIDTH
    y_at = lambda y: top + PANEL_HEIGHT * (1 - math.log(y / y_low) / math.log(y_high / y_low))
    label = lambda x, y, text, anchor="middle", size=11, extra="": (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{extra}>{html.escape(text)}</text>'
    )
    out = [label(left, top - 10, f"{WORKS[curve['work']]} by {curve['axis']}", "start", 13, ' font-weight="600"')]
    for y in ticks(y_low, y_high):
        out.append(f'<path d="M{left} {y_at(y):.1f}h{PANEL_WIDTH}" stroke="{GRID}"/>' + label(left - 6, y_at(y) + 4, short(y), "end"))
    free_from = -math.inf
    for x in xs:
        out.append(f'<path d="M{x_at(x):.1f} {top}v{PANEL_HEIGHT}" stroke="{GRID}"/>')
        if x_at(x) >= free_from:
            out.append(label(x_at(x), top + PANEL_HEIGHT + 15, f"{x}"))
            free_from = x_at(x) + 6.5 * len(str(x)) + 10
    out.append(label(left + PANEL_WIDTH / 2, top + PANEL_HEIGHT + 31, X_LABELS[curve["axis"]]))
    line = lambda key: " ".join(f"{x_at(p['x']):.1f},{y_at(p[key]):.1f}" for p in points)
    out.append(f'<polyline points="{line("limit_tokens_per_s")}" fill="none" stroke="{LIMIT}" stroke-width="1.6" stroke-dasharray="5 4"/>')
    out.append(f'<polyline points="{line("tokens_per_s")}" fill="none" stroke="{MEASURED}" stroke-width="2"/>')
    for p in points:
        title = f"{p['x']}: {p['tokens_per_s']:.1f} tokens/s, {p['fraction_of_limit']:.0%} of the limit by {p['bound']}"
        x, y = x_at(p["x"]), y_at(p["tokens_per_s"])
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{MEASURED}"><title>{title}</title></circle>')
    return out


def draw(found):
    curves = [curve for curve in found["curves"] if curve["points"]]
    step_x, step_y = LEFT + PANEL_WIDTH + RIGHT, TOP + PANEL_HEIGHT + BOTTOM
    rows = [curves[first : first + COLUMNS] for first in range(0, len(curves), COLUMNS)]
    width, height = COLUMNS * step_x, HEAD + len(rows) * step_y
    limits = found["limits"]
    title = (
        f"tokens/s of {found['shape']}, {found['settings']['layers']} layers, {found['dtype']}, {found['threads']} threads; "
        f"limits {limits['fastest']['gflop_per_s']:.0f} GFLOP/s and {limits['read_gb_per_s']:.0f} GB/s"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="system-ui, sans-serif" fill="{INK}">',
        f"<title>{html.escape(title)}</title>",
        f'<text x="10" y="20" font-size="13">{html.escape(title)}</text>',
        f'<path d="M{width - 320} 16h28" stroke="{MEASURED}" stroke-width="2"/><text x="{width - 286}" y="20" font-size="13">measured</text>',
        f'<path d="M{width - 200} 16h28" stroke="{LIMIT}" stroke-width="1.6" stroke-dasharray="5 4"/>'
        f'<text x="{width - 166}" y="20" font-size="13">what the limits allow</text>',
    ]
    for row, of_row in enumerate(rows):
        for column, curve in enumerate(of_row):
            out += panel(curve, column * step_x + LEFT, HEAD + row * step_y + TOP)
    return "\n".join([*out, "</svg>", ""])


def table(found):
    """In Markdown, a line for each curve: x, tokens/s and the part of the limit."""
    lines = ["| curve | x: tokens/s (percent of the limit, by arithmetic or bandwidth) |", "|---|---|"]
    for curve in found["curves"]:
        cells = [
            f"{p['x']}: {short(p['tokens_per_s'])} ({p['fraction_of_limit'] * 100:.0f}{p['bound'][0]})" for p in curve["points"]
        ]
        lines.append(f"| {WORKS[curve['work']]} by {curve['axis']} | {' · '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(page, found):
    """The page with this table in the place of the one between its marks."""
    parts = re.split(r"(<!-- scaling -->\n|<!-- /scaling -->\n)", page)
    if parts[1::2] != ["<!-- scaling -->\n", "<!-- /scaling -->\n"]:
        raise ValueError("the page needs one line <!-- scaling --> and after it one line <!-- /scaling -->")
    return "".join([*parts[:2], table(found), *parts[3:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", help="what `strata bench all --json` printed; - for standard input")
    parser.add_argument("picture", type=pathlib.Path, help="the SVG to write")
    parser.add_argument("--page", type=pathlib.Path, help="the Markdown page whose table is to be replaced")
    arguments = parser.parse_args()
    text = sys.stdin.read() if arguments.found == "-" else pathlib.Path(arguments.found).read_text()
    found = json.loads(text)
    if found.get("benchmark") != "all":
        parser.error(f"{arguments.found} holds benchmark {found.get('benchmark')!r}, and not what `strata bench all` found")
    arguments.picture.write_text(draw(found))
    if arguments.page:
        arguments.page.write_text(with_table(arguments.page.read_text(), found))
    else:
        print(table(found), end="")


if __name__ == "__main__":
    main()
