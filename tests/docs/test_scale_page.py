"""The model of docs/scale.md: run as it stands there, and compared with the requests of real rounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.base.settings import Settings
from millrace.client.database import Database
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.definition import FlushLoop
from millrace.node.ingest.definition import IngestLoop
from millrace.node.publish.definition import publish
from millrace.node.range_loop.in_process import run_to_end
from millrace.storage import log_mirror
from millrace.tables.wal.table import WalTable
from tests.docs.pages import ROOT, python_blocks
from tests.s3_server import Faults, bucket

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
SHAPES = ((10, 1), (100, 1), (1_000, 4), (10_000, 40))
"""PChannels and nodes of the page's table."""


@pytest.fixture(scope="module")
def model() -> SimpleNamespace:
    (block,) = python_blocks("docs/scale.md")
    names: dict[str, Any] = {"__name__": "model"}
    exec(compile(block.text, "docs/scale.md", "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)


@contextmanager
def deployment(folder: Path, monkeypatch: pytest.MonkeyPatch, pchannels: int) -> Iterator[tuple[Database, Faults]]:
    monkeypatch.setenv("MILLRACE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(log_mirror, "_made", {})
    with Faults() as faults, bucket(monkeypatch, faults.at) as uri:
        settings = replace(Settings.load(env={}), data_dir=folder / "data", tables=f"{uri}/tables", pchannels=pchannels)
        with Database.in_folder(settings) as db:
            yield db, faults
            db.connection.service.shutdown()


@pytest.mark.parametrize(
    ("pchannels", "collections"),
    [(2, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((4, 1), (4, 4), (8, 2), (16, 1)))],
)
def test_the_model_counts_the_requests_of_real_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: SimpleNamespace, pchannels: int, collections: int
) -> None:
    with deployment(tmp_path, monkeypatch, pchannels) as (db, faults):
        settings = db.settings
        made = [
            db.create_collection(f"c{each}", {"id": "int64"}, key="id", vchannels=pchannels)
            for each in range(collections)
        ]
        ingest = IngestLoop(settings, db.log, WalTable.create(settings.wal_uri))
        node, flusher = ingest.committer(None), FlushCommitter(settings)
        flush = FlushLoop(settings)
        limit = settings.max_bytes_per_trigger

        def counted(step: Callable[[], object]) -> dict[str, int]:
            faults.requests.clear()
            step()
            return dict(faults.requests)

        for turn in range(3):  # a process that runs has opened its tables
            for each in made:
                each.insert([{"id": 10_000 * turn + place} for place in range(100)])
            noded = counted(lambda: run_to_end(ingest, node))
            flushed = counted(lambda: run_to_end(flush, flusher, max_bytes=limit))
            published = counted(lambda: [publish(settings, each.id) for each in made])
        assert noded == dict(model.node_round(pchannels))
        assert flushed == dict(model.flush_round(pchannels, collections))
        most = model.publish_round(pchannels)
        assert published.keys() <= most.keys()
        assert all(count <= collections * most[kind] for kind, count in published.items()), published


def test_the_model_has_the_defaults_of_the_settings(model: SimpleNamespace) -> None:
    found, usual = model.Deployment(1, 1.0), Settings()
    assert (found.round, found.publish, found.flush_bytes) == (
        usual.wal_linger,
        usual.publish_interval,
        usual.flush_bytes,
    )
    assert usual.flush_interval >= usual.publish_interval


def test_the_model_opens_tables_as_slowly_as_was_measured(model: SimpleNamespace) -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    found = re.search(r"opening it, with a Delta checkpoint \| \| (\d+), (\d+), (\d+) ms", text)
    assert found is not None
    for files, measured in zip((100, 1_000, 10_000), map(int, found.groups()), strict=True):
        _, seconds = model.table(files, model.FILE_BYTES)
        assert seconds * 1000 == pytest.approx(measured, rel=0.25)


def test_the_model_s_driver_costs_what_was_measured(model: SimpleNamespace) -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| [\d.]+ \| [\d.]+ \|$", PAGE, re.MULTILINE)
    assert [int(pchannels) for pchannels, _ in rows] == [2, 16, 64]
    for pchannels, measured in rows:
        seconds = model.DRIVER_SECONDS + model.DRIVER_SECONDS_PER_PCHANNEL * int(pchannels)
        assert seconds * 1000 == pytest.approx(int(measured), rel=0.15)


def test_the_page_s_table_is_the_model_s(model: SimpleNamespace) -> None:
    for pchannels, nodes in SHAPES:
        made = model.Deployment(pchannels, 1e5 * pchannels, nodes)
        used = model.load(made)
        asked = sum(model.requests_per_second(made).values())
        cells = (
            f"{pchannels:,}", f"{nodes:,}", f"{made.bytes_per_second / 1e6:,.0f}", f"{asked:,.0f}",
            f"{model.dollars_per_day(made):,.2f}",
            *(f"{used[name]:.2f}" for name in ("CPU", "driver", "commits", "puts")),
        )  # fmt: skip
        assert f"| {' | '.join(cells)} |" in PAGE, cells
    made = model.Deployment(1_000, 1e8, 4)
    per_gb = model.dollars_per_day(made) / (86_400 * 1e8 / 1e9)
    slower = replace(made, round=6.0, publish=20.0, flush_bytes=32 << 20)
    assert f"costs ${per_gb:.4f} of requests" in PAGE, per_gb
    assert f"and ${model.dollars_per_day(slower) / (86_400 * 0.1):.4f} if" in PAGE
    files, seconds = model.table(1e12, 100)
    assert f"is {files:,.0f} files" in " ".join(PAGE.split()), files
    assert f"{seconds:.0f} s to open" in " ".join(PAGE.split()), seconds
