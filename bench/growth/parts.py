"""The parts of the section `growth`: what grows, its sizes, and the table of figures with slopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.growth.deployment import Shape, grown
from bench.growth.history import age, openings
from bench.growth.measure import appends, measure
from bench.growth.trickle import trickle
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end

SIZES: Final[Mapping[str, tuple[int, ...]]] = {
    "collections": (10, 1_000, 10_000),
    "pchannels": (2, 64, 256),
    "partitions": (10, 1_000),
    "producers": (100, 10_000),
}
"""What grows, and its sizes; the first is the baseline of the others."""
HISTORY: Final = (1_000, 100_000)
"""Commits in `wal`."""
COMMITS_OF_A_DAY: Final = 123_000
"""One every 0.7 s."""
DAY: Final = 86_400.0
OLD: Final = ("appends", "commits", "flushes", "freshness", "restart")
"""The groups of figures that a history may change."""


def parts(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    """Return the parts by name."""
    found: dict[str, Callable[[], Any]] = {
        name: partial(grow, folder, name, sizes if not quick else (sizes[0], min(sizes[-1], 20 * sizes[0])), quick)
        for name, sizes in SIZES.items()
    }
    found["history"] = partial(grow_old, folder, "history", HISTORY if not quick else (100, 10_000), quick)
    found["trickle"] = lambda: trickle(folder / "trickle", hours=0.1 if quick else 2.0)
    return found


def grow(
    folder: Path, name: str, sizes: Sequence[int], quick: bool = False, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure a deployment of each size, print the table, and return the figures with their slopes."""
    found: dict[int, dict[str, Any]] = {}
    for size in sizes:
        with grown(folder / f"{name}-{size}", replace(Shape(), **{name: size})) as deployment:
            found[size] = measure(deployment, quick=quick, only=only)
        if len(found) > 1 and "server_mib" in found[size]:
            first = found[sizes[0]]
            more = found[size]["vchannels"] - first["vchannels"]
            found[size]["server_bytes_per_vchannel"] = (
                round((found[size]["server_mib"] - first["server_mib"]) * (1 << 20) / more) if more else None
            )
        print(table(name, found), flush=True)
    return {"sizes": found, "slopes": slopes(found)}


def grow_old(
    folder: Path, name: str, sizes: Sequence[int], quick: bool = False, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure one deployment after histories of each number of commits in `wal`, with half as many of its flusher."""
    found: dict[int, dict[str, Any]] = {}
    with grown(folder / name, Shape(pchannels=2)) as deployment:
        appends(deployment, times=1)  # a table of a collection is made with its first row
        ingest_to_end(deployment.settings, deployment.db.log)
        flush_to_end(deployment.settings)
        made = 0
        for size in sizes:
            age(deployment, commits=size - made, seconds=DAY * (size - made) / COMMITS_OF_A_DAY)
            made = size
            found[size] = measure(deployment, quick=quick, only=only or OLD) | openings(deployment)
            print(table(name, found), flush=True)
    return {"sizes": found, "slopes": slopes(found)}


def slopes(found: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by size and figure the ratio to the smallest size."""
    first, *others = found
    return {
        f"{size:,}": {
            name: round(value / base, 2)
            for name, value in found[size].items()
            if isinstance(value, int | float) and isinstance(base := found[first].get(name), int | float) and base
        }
        for size in others
    }


def table(name: str, found: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the figures as a table: a row each figure, a column each size, with its ratio to the smallest."""
    ratios = slopes(found)
    lines = [[name, *(f"{size:,}" for size in found)]]
    for figure in list(found.values())[-1]:
        cells = []
        for size, figures in found.items():
            value, ratio = figures.get(figure), ratios.get(f"{size:,}", {}).get(figure)
            cells.append(_shown(value) + ("" if ratio is None else f"  ({ratio:g} x)"))
        lines.append([figure, *cells])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        busiest = max(value.values(), default=0)
        return f"{len(value)} PChannels, at most {busiest}"
    return f"{value:,}" if isinstance(value, int | float) else ""
