"""`python tools/loss_summary.py`: the picture and the table of the README, from the JSON of `megabatch bench loss`.

It reads docs/results/loss.json, and writes docs/memory-and-time.svg and a block of README.md.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PICTURE, README = ROOT / "docs/results/loss.json", ROOT / "docs/memory-and-time.svg", ROOT / "README.md"
BLOCK = re.compile(r"(?<=<!-- table: loss-summary -->\n).*?(?=<!-- end of table -->)", re.DOTALL)

# Name in the results: label, colour (safe for colour-blind readers), width.
LINES = {
    "formula": ("OpenCLIP's formula", "#D55E00", 1.5),
    "by_hand": ("dense, by hand", "#CC79A7", 1.5),
    "compiled": ("dense, torch.compile", "#E69F00", 1.5),
    "megabatch": ("megabatch", "#0072B2", 3.0),
    "small": ('megabatch, memory_budget="48MiB"', "#56B4E9", 3.0),
}
# Of the table, in its order.
COLUMNS = {
    "by_hand": "dense, by hand",
    "compiled": "dense, `torch.compile`",
    "formula": "OpenCLIP's formula",
    "small": '**megabatch**, `memory_budget="48MiB"`',
    "megabatch": "**megabatch**",
}
SIZES = (1024, 4096, 16384)
FEWEST_ROWS = 1024  # below, memory is noise
WIDTH, HEIGHT, TOP, BOTTOM = 860, 390, 110, 330
PANELS = ((100, 405), (510, 820))
DESCRIPTION = "Two panels with logarithmic axes: memory and time of one step against the rows in the batch, for {}."


def seconds_of(row: dict[str, Any]) -> float | None:
    return row.get("median") or row.get("best")


def series(results: dict[str, Any], name: str, figure: str) -> list[tuple[int, float]]:
    """Rows of the batch, and MiB or seconds."""
    points = []
    for case in results["cases"]:
        for row in case["contenders"]:
            value = row.get("peak_bytes") if figure == "memory" else seconds_of(row)
            if case["loss"] == "clip" and row["name"] == name and value and case["rows"] >= FEWEST_ROWS:
                points.append((case["rows"], value / 2**20 if figure == "memory" else value))
    return sorted(points)


def ticks(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def readable(value: float, figure: str) -> str:
    if figure == "memory":
        return f"{value:,.0f} MiB"
    return f"{value:.0f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def text(x: float, y: float, content: str, anchor: str = "middle", size: int = 15, weight: str = "normal") -> str:
    content = content.replace("&", "&amp;").replace("<", "&lt;")
    font = f'font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {font}>{content}</text>'


def panel(results: dict[str, Any], figure: str, left: int, right: int) -> Iterator[str]:
    lines = {name: series(results, name, figure) for name in LINES}
    rows = sorted({row for points in lines.values() for row, _ in points})
    marks = ticks(min(v for points in lines.values() for _, v in points), max(v for p in lines.values() for _, v in p))

    def place(row: float, value: float) -> tuple[float, float]:
        across = math.log(row / rows[0]) / math.log(rows[-1] / rows[0])
        up = math.log(value / marks[0]) / math.log(marks[-1] / marks[0])
        return left + across * (right - left), BOTTOM - up * (BOTTOM - TOP)

    title = "memory beyond inputs and gradients" if figure == "memory" else "time of forward and backward"
    yield text((left + right) / 2, TOP - 16, title, size=16, weight="bold")
    for mark in marks:
        _, y = place(rows[0], mark)
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#DDDDDD"/>'
        yield text(left - 6, y + 4, readable(mark, figure), "end")
    for row in rows:
        yield text(place(row, marks[0])[0], BOTTOM + 20, f"{row:,}")
    yield text((left + right) / 2, BOTTOM + 44, "rows in the batch")
    for name, points in lines.items():
        _, colour, width = LINES[name]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def legend() -> Iterator[str]:
    x, y = 20.0, 22
    for label, colour, width in LINES.values():
        if x + 28 + 8 * len(label) > WIDTH:
            x, y = 20.0, 50
        yield f'<line x1="{x:.0f}" y1="{y}" x2="{x + 22:.0f}" y2="{y}" stroke="{colour}" stroke-width="{width}"/>'
        yield text(x + 28, y + 5, label, "start")
        x += 56 + 8 * len(label)


def picture(results: dict[str, Any]) -> str:
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<title>Memory and time of the CLIP loss against the batch size</title>",
        f"<desc>{DESCRIPTION.format('; '.join(label for label, _, _ in LINES.values()))}</desc>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#FFFFFF"/>',
        *legend(),
        *panel(results, "memory", *PANELS[0]),
        *panel(results, "time", *PANELS[1]),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


# ---- the table


def table(results: dict[str, Any]) -> str:
    """Times and memory at three sizes, and what they are."""
    machine, rows = results["machine"], [row for case in results["cases"] for row in case["contenders"]]
    times = "medians" if all("median" in row for row in rows) else "the best of several runs"
    where = f"{machine.get('device') or machine['cpu']}, torch {machine['torch']}"
    about = f"""\
One step of the CLIP loss, forward and backward with all gradients, in float32 with D = 512 (`megabatch bench loss`), on
{where}. Times are {times}; memory is the peak beyond inputs and gradients.

"""
    head = ["N", "", *(COLUMNS.values())]
    lines = [head, ["---"] * len(head)]
    for case in results["cases"]:
        if case["loss"] == "clip" and case["rows"] in SIZES:
            of = {row["name"]: row for row in case["contenders"]}
            cells = [short(seconds_of(of[name])) for name in COLUMNS]
            lines.append([f"{case['rows']:,}", "time", *cells[:-1], f"**{cells[-1]}**"])
            lines.append(["", "MiB", *(f"{of[name]['peak_bytes'] / 2**20:,.0f}" for name in COLUMNS)])
    return about + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def short(seconds: float | None) -> str:
    assert seconds is not None
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def main() -> None:
    results = json.loads(RESULTS.read_text())
    PICTURE.write_text(picture(results))
    README.write_text(BLOCK.sub(lambda _: table(results), README.read_text()))


if __name__ == "__main__":
    main()
