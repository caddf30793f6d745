"""The Data Docs beside the tables: static HTML in ``quality/docs`` for the newest runs, with an index page of our own.

Each run is a Great Expectations context of its own, which writes its pages to a folder of this machine, with an index
that lists only that run. :func:`put_pages` copies them to the store with a note of the run's results, from which
:func:`write_index` makes the index of all runs.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from millrace.base.settings import Settings
from millrace.storage.local import LocalStore
from millrace.storage.store import TableStore, list_below, store_at

RETAINED_RUNS: Final = 20
"""Runs whose pages are kept. Results are kept in ``quality/results`` regardless."""
INDEX: Final = "index.html"

_PAGES: Final = "validations"
_NOTES: Final = "runs"
_RUN: Final = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")


def docs_uri(settings: Settings) -> str:
    """Return where the Data Docs are, beside the tables. Their start page is INDEX."""
    return settings.table_uri("quality/docs")


def docs_store(settings: Settings) -> TableStore:
    """Return the store of the Data Docs."""
    return store_at(docs_uri(settings))


class _Result(NamedTuple):
    """The page of one table's checks in one run."""

    run: str
    table: str
    path: str
    passed: bool


def put_pages(store: TableStore, folder: Path) -> None:
    """Copy the pages of a run from `folder`, with a note of its results.

    Files that all runs share, such as styles, are copied once.
    """
    there = list_below(store, "static")
    results: dict[str, list[_Result]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in there and name != INDEX:
            data = path.read_bytes()
            store.replace(name, data)
            found = _result(name, data)
            if found is not None:
                results.setdefault(found.run, []).append(found)
    for run, found_there in results.items():  # after the pages that it names
        store.replace(f"{_NOTES}/{run}.json", json.dumps(found_there).encode())


def remove_old_runs(store: TableStore, *, runs: int = RETAINED_RUNS, before: float = 0.0, dry_run: bool = False) -> int:
    """Remove the pages of all but the newest `runs` runs, and of runs that began before `before` (Unix seconds).

    Returns how many runs were removed. The newest run stays, however old it is.
    """
    found: dict[str, list[str]] = {}
    for name in list_below(store, _PAGES):
        run = _run_of(name)
        if run is not None:
            found.setdefault(run, []).append(name)
    names = sorted(found)
    first = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(before))
    old = sorted({*names[: max(0, len(names) - runs)], *(name for name in names[:-1] if name < first)})
    for run in [] if dry_run else old:
        store.delete([*found[run], f"{_NOTES}/{run}.json"])
        if isinstance(store, LocalStore):  # which has folders
            for folder in {each.partition(run)[0] + run for each in found[run]}:
                shutil.rmtree(store.folder / folder, ignore_errors=True)
    return len(old)


def write_index(store: TableStore) -> str:
    """Write the index with a link to every result, newest run first, and return its URI."""
    rows = [
        f'<tr><td>{html.escape(each.run)}</td><td><a href="{quote(each.path)}">{html.escape(each.table)}</a></td>'
        f'<td class="{"text-success" if each.passed else "text-danger"}">'
        f"{'Succeeded' if each.passed else 'Failed'}</td></tr>"
        for each in sorted(_results(store), key=lambda each: each.table)
    ]
    rows.sort(key=lambda row: row[len("<tr><td>") :][:16], reverse=True)  # by run; the sort keeps tables in order
    store.replace(INDEX, _INDEX.format(rows="\n".join(rows)).encode())
    return f"{store.uri}/{INDEX}"


_INDEX: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="UTF-8"><title>Data Docs of Millrace</title></head>
<body><div class="container-fluid"><h4>Results of the quality checks</h4>
<p class="lead">Each row is a table in one run, the newest first. The page Quality lists older results.</p>
<table class="table"><thead><tr><th>Run</th><th>Table</th><th>Result</th></tr></thead><tbody>
{rows}
</tbody></table></div></body></html>
"""
_STATUS: Final = re.compile(r"Status:.{0,200}?(Succeeded|Failed)", re.DOTALL)


def _results(store: TableStore) -> Iterator[_Result]:
    noted = {name.removesuffix(".json") for name in store.list(_NOTES)}
    for run in sorted(noted):
        data = store.read(f"{_NOTES}/{run}.json")
        yield from (_Result(*each) for each in json.loads(data or b"[]"))
    for name in list_below(store, _PAGES):
        if _run_of(name) not in noted:  # of an earlier build, which wrote no notes
            found = _result(name, store.read(name) or b"")
            if found is not None:
                yield found


def _result(name: str, data: bytes) -> _Result | None:
    """Return what a page of results says; None for other pages."""
    parts = name.split("/")  # validations / table ... / run / timestamp / batch.html
    run = _run_of(name)
    if run is None or not name.endswith(".html"):
        return None
    status = _STATUS.search(data.decode("utf-8", "replace"))
    return _Result(run, "/".join(parts[1 : parts.index(run)]), name, status is not None and status[1] == "Succeeded")


def _run_of(name: str) -> str | None:
    parts = name.split("/")
    return next((part for part in parts if _RUN.fullmatch(part)), None) if parts[0] == _PAGES else None
