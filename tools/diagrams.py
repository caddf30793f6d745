"""Draw the diagrams of the pages: ``python tools/diagrams.py`` writes docs/images/<name>-light.svg and <name>-dark.svg.

A drawing is at most 500 units wide with text of 13 units or more, so that it can be read on a phone. Rounded boxes are
processes, tinted boxes with a double line are stored data. A test holds the files against this script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"

THEMES = {
    "light": {
        "text": "#1f2328",
        "muted": "#59636e",
        "line": "#59636e",
        "box": "#ffffff",
        "edge": "#818b98",
        "store": "#ddf4ff",
        "store-edge": "#0969da",
        "mark": "#fff1e5",
        "mark-edge": "#bc4c00",
    },
    "dark": {
        "text": "#f0f6fc",
        "muted": "#9198a1",
        "line": "#9198a1",
        "box": "#212830",
        "edge": "#656c76",
        "store": "#121d2f",
        "store-edge": "#4493f8",
        "mark": "#3d1300",
        "mark-edge": "#db6d28",
    },
}

STYLE = """\
text{{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;font-size:13px;fill:{text}}}
.title{{font-size:15px;font-weight:600}}.muted{{fill:{muted}}}.small{{font-size:12px}}
.process{{fill:{box};stroke:{edge}}}.store{{fill:{store};stroke:{store-edge}}}.mark{{fill:{mark};stroke:{mark-edge}}}
.process,.store,.mark{{stroke-width:1.3}}.rule{{stroke:{store-edge};stroke-width:1.3}}
.line{{stroke:{line};stroke-width:1.5;fill:none}}.dashed{{stroke-dasharray:5 4}}.head{{fill:{line}}}
.lane{{stroke:{edge};stroke-width:1;stroke-dasharray:2 4}}"""

Point = tuple[float, float]


@dataclass
class Drawing:
    """One diagram: what is drawn, in drawing order."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, *, style: str = "", anchor: str = "middle") -> None:
        """Write a line of text; `y` is its baseline."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{style}">{escape(words)}</text>')

    def box(self, x: float, y: float, w: float, h: float, title: str, *lines: str, kind: str = "process") -> None:
        """Draw a box with a title and lines of text, centred."""
        radius = 4 if kind == "store" else 10
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius}" class="{kind}"/>')
        if kind == "store":
            self.parts.append(f'<path d="M{x:g} {y + 5:g}h{w:g}" class="rule"/>')
        top = y + h / 2 + 5 - 9 * len(lines) + (2 if kind == "store" else 0)
        self.text(x + w / 2, top, title, style="title")
        for number, line in enumerate(lines):
            self.text(x + w / 2, top + 18 * (number + 1), line, style="muted")

    def arrow(self, *points: Point, dashed: bool = False, both: bool = False) -> None:
        """Draw a line through `points` with a head at its end, or at both ends."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="{path}" class="line{" dashed" if dashed else ""}"/>')
        self._head(points[-2], points[-1])
        if both:
            self._head(points[1], points[0])

    def lane(self, x: float, top: float, bottom: float) -> None:
        """Draw the life line of a sequence diagram."""
        self.parts.append(f'<path d="M{x:g} {top:g}V{bottom:g}" class="lane"/>')

    def _head(self, before: Point, end: Point) -> None:
        (x0, y0), (x, y) = before, end
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        along, across = ((x - x0) / length, (y - y0) / length), (-(y - y0) / length, (x - x0) / length)
        corners = [(x - 9 * along[0] + side * across[0], y - 9 * along[1] + side * across[1]) for side in (4.5, -4.5)]
        points = " ".join(f"{a:.4g},{b:.4g}" for a, b in [(x, y), *corners])
        self.parts.append(f'<polygon points="{points}" class="head"/>')

    def svg(self, theme: str) -> str:
        """The file of one theme."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(self.title)}</title>'
        style = f"<style>{STYLE.format(**THEMES[theme])}</style>"
        return "\n".join([head, style, *self.parts, "</svg>"]) + "\n"


def flow() -> Drawing:
    """Rows from producers to readers; low, so that it leaves room for a program on the first screen."""
    d = Drawing("How rows flow: producers, log, wal, collections, readers", 480, 308)
    d.box(8, 8, 304, 46, "Producers", "Python · command line · files")
    d.arrow((48, 54), (48, 88))
    d.text(56, 75, "append", anchor="start")
    d.arrow((128, 88), (128, 54))
    d.text(136, 75, "id and time tick, or the reason of a rejection", anchor="start")
    d.box(8, 88, 304, 50, "Log", "durable, ordered · embedded, Kafka, Pulsar", kind="store")
    d.arrow((48, 138), (48, 170))
    d.text(56, 158, "streaming node: runs the interceptor chain", anchor="start")
    d.box(8, 170, 304, 50, "wal", "messages · rejections · channel state", kind="store")
    d.arrow((48, 220), (48, 252))
    d.text(56, 240, "flusher: writes what became visible", anchor="start")
    d.box(8, 252, 304, 50, "collections", "rows · deletes · segments · checkpoints", kind="store")
    d.box(384, 88, 88, 214, "Readers", "Python", "pandas", "Polars", "DuckDB", "Spark")
    for y, words in ((115, "tail"), (197, "scan"), (279, "read")):
        d.arrow((312, y), (384, y))
        d.text(346, y - 6, words)
    return d


def commit() -> Drawing:
    """The fenced commit of a range."""
    d = Drawing("The fenced commit: plan, run a range, check, commit", 500, 520)
    task, driver, wal = 84, 252, 420
    d.box(10, 10, 148, 40, "Spark task")
    d.box(178, 10, 148, 40, "Driver")
    d.box(346, 10, 148, 40, "wal", kind="store")
    for x in (task, driver, wal):
        d.lane(x, 50, 486)

    def message(y: float, start: float, end: float, words: str, *, dashed: bool = False) -> None:
        d.arrow((start, y), (end, y), dashed=dashed)
        d.text((start + end) / 2, y - 8, words)

    message(88, wal, driver, "position and state")
    message(126, driver, task, "plan: a range")
    d.box(10, 142, 148, 82, "Run the range", "read the log,", "run the chain,", "write Parquet, sync")
    message(254, task, driver, "report: files, end state")
    message(292, driver, wal, "1. app ids at the base?")
    message(330, wal, driver, "no: fenced", dashed=True)
    d.text(driver - 10, 334, "remove the files", style="muted", anchor="end")
    message(378, driver, wal, "2. commit that snapshot")
    message(416, wal, driver, "conflict", dashed=True)
    d.text(driver - 10, 420, "refresh, back to 1", style="muted", anchor="end")
    message(464, wal, driver, "committed")
    d.text(driver - 10, 468, "then the next range", style="muted", anchor="end")
    d.text(250, 504, "Never a refresh between 1 and 2.", style="muted")
    return d


def transaction() -> Drawing:
    """When the messages of a transaction become visible."""
    d = Drawing("A transaction on one VChannel becomes visible at its Commit", 500, 372)
    d.text(10, 22, "One VChannel, in time-tick order", style="title", anchor="start")
    d.arrow((10, 112), (490, 112))
    d.text(490, 132, "time tick", style="muted", anchor="end")
    messages = [(54, "Begin"), (146, "insert a"), (238, "insert z"), (330, "delete b"), (422, "Commit")]
    for x, words in messages:
        kind = "process" if words == "insert z" else "mark"
        d.parts.append(f'<rect x="{x - 40}" y="58" width="80" height="34" rx="8" class="{kind}"/>')
        d.text(x, 80, words)
        d.parts.append(f'<path d="M{x} 92V118" class="line"/>')
    d.text(10, 46, "orange: one transaction · grey: a message of its own", style="muted", anchor="start")
    d.arrow((238, 118), (238, 150), (54, 150), (54, 122), dashed=True)
    d.text(148, 170, "LastConfirmed of insert z: the open Begin", style="muted")
    d.text(10, 208, "What a read at a tick sees", style="title", anchor="start")
    for y, start, words in ((222, 238, "row z"), (266, 422, "row a, and b is gone")):
        d.parts.append(f'<rect x="{start}" y="{y}" width="{490 - start}" height="30" rx="6" class="store"/>')
        d.text(start - 8, y + 20, words, anchor="end")
    for x, words in ((266, "read here:"), (456, "read here:")):
        d.parts.append(f'<path d="M{x} 218V314" class="line dashed"/>')
        d.text(x, 330, words, style="muted")
    d.text(266, 348, "z alone")
    d.text(456, 348, "z, a, no b")
    return d


def cluster() -> Drawing:
    """Several nodes, a coordinator, a meta store."""
    d = Drawing("A cluster: clients, coordinators, meta store, nodes, log, tables", 500, 424)
    d.box(8, 10, 130, 78, "Clients", "producers,", "readers")
    d.box(184, 10, 130, 44, "c1", "leads")
    d.box(184, 60, 130, 44, "c2", "stands by")
    d.text(249, 122, "coordinators", style="muted")
    d.box(362, 10, 130, 78, "Meta store", "SQLite · etcd", "MariaDB", kind="store")
    d.arrow((314, 32), (362, 32), both=True)
    d.arrow((73, 88), (73, 206))
    d.text(82, 146, "append", anchor="start")
    d.text(82, 163, "(Kafka, Pulsar)", style="muted", anchor="start")
    d.arrow((249, 130), (249, 206))
    d.text(258, 163, "assign, let go", anchor="start")
    d.text(258, 180, "each with a term", style="muted", anchor="start")
    d.arrow((427, 206), (427, 88), dashed=True)
    d.text(418, 112, "sessions,", anchor="end")
    d.text(418, 129, "under leases", style="muted", anchor="end")
    d.parts.append('<rect x="8" y="206" width="484" height="86" rx="12" class="line dashed"/>')
    for x, name, channel in ((20, "n1", "dml_0"), (185, "n2", "dml_1, dml_2"), (350, "n3", "dml_3")):
        d.box(x, 216, 130, 66, name, channel, "append, ingest")
    d.arrow((124, 292), (124, 350), both=True)
    d.text(134, 326, "append, read", anchor="start")
    d.arrow((376, 292), (376, 350))
    d.text(386, 326, "commit, fenced", anchor="start")
    d.box(8, 350, 232, 62, "Log", "one sequence per PChannel", kind="store")
    d.box(260, 350, 232, 62, "Tables", "wal, collections, checkpoints", kind="store")
    return d


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "flow": flow,
    "commit": commit,
    "transaction": transaction,
    "cluster": cluster,
}


def files() -> dict[Path, str]:
    """The text of each file."""
    return {IMAGES / f"{name}-{theme}.svg": draw().svg(theme) for name, draw in DIAGRAMS.items() for theme in THEMES}


def main() -> None:
    """Write the files."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.name}\n")


if __name__ == "__main__":
    main()
