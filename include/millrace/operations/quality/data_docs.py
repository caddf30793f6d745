"""The Data Docs on disk: static HTML in ``quality/docs`` for the newest runs, with an index page of our own.

Each run is a Great Expectations context of its own, so the index that Great Expectations writes lists only that run.
"""

from __future__ import annotations

import html
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

RETAINED_RUNS: Final = 20
"""Runs whose pages are kept. Results are kept in ``quality/results`` regardless."""

_RUN: Final = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")


def remove_old_runs(folder: Path, *, runs: int = RETAINED_RUNS, before: float = 0.0, dry_run: bool = False) -> int:
    """Remove the pages of all but the newest `runs` runs, and of runs that began before `before` (Unix seconds).

    Returns how many runs were removed. The newest run stays, however old it is.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted((folder / "validations").rglob("*")) if folder.is_dir() else []:
        if path.is_dir() and _RUN.fullmatch(path.name):
            found.setdefault(path.name, []).append(path)
    names = sorted(found)
    first = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(before))
    old = sorted({*names[: max(0, len(names) - runs)], *(name for name in names[:-1] if name < first)})
    for name in [] if dry_run else old:
        for path in found[name]:
            shutil.rmtree(path, ignore_errors=True)
    return len(old)


class _Result(NamedTuple):
    """The page of one table's checks in one run."""

    run: str
    table: str
    path: str
    passed: bool


def write_index(folder: Path) -> Path:
    """Write ``index.html`` with a link to every result, newest run first, and return its path."""
    rows = [
        f'<tr><td>{html.escape(each.run)}</td><td><a href="{quote(each.path)}">{html.escape(each.table)}</a></td>'
        f'<td class="{"text-success" if each.passed else "text-danger"}">'
        f"{'Succeeded' if each.passed else 'Failed'}</td></tr>"
        for each in sorted(_results(folder), key=lambda each: each.table)
    ]
    rows.sort(key=lambda row: row[len("<tr><td>") :][:16], reverse=True)  # by run; the sort keeps tables in order
    index = folder / "index.html"
    index.parent.mkdir(parents=True, exist_ok=True)
    draft = index.with_suffix(".draft")
    draft.write_text(_INDEX.format(rows="\n".join(rows)), encoding="utf-8")
    draft.replace(index)
    return index


_INDEX: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="UTF-8"><title>Data Docs of Millrace</title></head>
<body><div class="container-fluid"><h4>Results of the quality checks</h4>
<p class="lead">Each row is a table in one run, the newest first. The page Quality lists older results.</p>
<table class="table"><thead><tr><th>Run</th><th>Table</th><th>Result</th></tr></thead><tbody>
{rows}
</tbody></table></div></body></html>
"""
_STATUS: Final = re.compile(r"Status:.{0,200}?(Succeeded|Failed)", re.DOTALL)


def _results(folder: Path) -> Iterator[_Result]:
    for page in (folder / "validations").rglob("*.html"):
        parts = page.relative_to(folder).parts  # validations / table ... / run / timestamp / batch.html
        place = next((number for number, part in enumerate(parts) if _RUN.fullmatch(part)), None)
        if place is not None:
            status = _STATUS.search(page.read_text(encoding="utf-8", errors="replace"))
            passed = status is not None and status[1] == "Succeeded"
            yield _Result(parts[place], "/".join(parts[1:place]), "/".join(parts), passed)
