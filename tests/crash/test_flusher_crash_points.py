"""A flusher that dies at any point, and two of them at any interleaving, lose no row and double none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import millrace
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.message import builders
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField, MakeNullable, RenameField, apply_changes
from millrace.node.flush.definition import flush_to_end
from millrace.storage.table import open_table, table_at
from millrace.tables.collections.data_tables import deletes_uri, rows_uri
from millrace.tables.collections.flush_tables import read_checkpoints, read_segments
from millrace.tables.read.arrow import read_arrow
from tests.client.medium import Medium
from tests.failpoints import at_failpoints
from tests.tables.wal_maker import Collection, WalMaker

RANGE_BYTES = 1
"""Each flush takes one WAL file of each PChannel, so that one run has several rounds of commits."""


class _Died(BaseException):
    """Ends a flusher where it stands."""


CHANGES = [AddField(FieldSpec("extra", "int64", True)), RenameField("body", "text"), MakeNullable("text")]
"""A column that comes, one whose field has another name, and the same that may be null from then on."""


class Deployment:
    """A WAL of two commits on two PChannels with everything a flusher meets: made once, copied for each crash."""

    def __init__(self, settings: Settings) -> None:
        maker = WalMaker(settings)
        maker.open()
        collection = Collection(maker)
        collection.create()
        for number in range(2):
            for vchannel in collection.vchannels:
                keys = collection.keys_of(vchannel, 4)
                bodies: list[object] = [f"{number}:{key}" for key in keys]
                rows: dict[str, list[object]] = {"id": list(keys), "text" if number else "body": bodies}
                if number:
                    rows["extra"] = [number] * len(keys)
                collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
                collection.append(vchannel, collection.delete(keys[:1], vchannel=vchannel))
                collection.append(vchannel, collection.begin(vchannel, 9))
                collection.append(vchannel, collection.insert(rows, vchannel=vchannel, partition=2, txn=9))
                if number == 0:
                    maker.commit(collection.homes[vchannel])  # the transaction is open between two WAL commits
                collection.append(vchannel, collection.end(vchannel, 9))
                files = [
                    collection.stage(f"{number}/{vchannel}/{part}.parquet", rows, partition=part) for part in (1, 2)
                ]
                # The second one replaces: what the first flush stored, and what this very range brings.
                collection.append(vchannel, collection.imported(files, vchannel=vchannel, replace=bool(number)))
                collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
            if number == 0:
                collection.schema = apply_changes(collection.schema, CHANGES)
                collection.schema_version = 2
                for vchannel in collection.vchannels:
                    change = builders.schema_change(
                        CHANGES,
                        vchannel=vchannel,
                        collection_id=1,
                        schema_version=2,
                        term=1,
                    )
                    collection.append(vchannel, change)
        maker.commit()
        assert not maker.rejected
        self.settings = settings
        self.ticks = sorted({m["time_tick"] for name in maker.pchannels for m in maker.accepted[name]})
        self.reachable = min(maker.last_tick(name) for name in maker.pchannels)

    def copy(self, folder: Path) -> Settings:
        shutil.copytree(self.settings.data_dir, folder / "data")
        return Settings(data_dir=folder / "data")


def contents(settings: Settings) -> dict[str, Counter[Any]]:
    """What stands in every table of a deployment, file names aside."""
    found = {}
    for name, uri in (("rows", rows_uri(settings, 1)), ("deletes", deletes_uri(settings, 1))):
        table = table_at(uri).dataset().to_table()
        found[name] = Counter(tuple(sorted(row.items())) for row in table.to_pylist())
    segments = table_at(settings.segments_uri).dataset().to_table()
    found["segments"] = Counter(tuple(sorted(row.items())) for row in segments.to_pylist())
    checkpoints = read_checkpoints(open_table(settings.checkpoints_uri))
    found["checkpoints"] = Counter(
        (each.pchannel, each.time_tick, each.confirmed, each.term, each.catalog_bytes) for each in checkpoints.values()
    )
    return found


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return Deployment(Settings(data_dir=tmp_path_factory.mktemp("wal") / "data"))


@pytest.fixture(scope="module")
def clean(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[Any]]:
    settings = deployment.copy(tmp_path_factory.mktemp("clean"))
    flush_to_end(settings, max_bytes=RANGE_BYTES)
    return contents(settings)


def stopping_at(number: int, act: Callable[[], object]) -> Callable[[str], None]:
    """What calls `act` at the `number`-th failpoint."""
    names: list[str] = []

    def visit(name: str) -> None:
        names.append(name)
        if len(names) == number + 1:
            act()

    return visit


def places(deployment: Deployment, folder: Path) -> list[str]:
    """Every place a clean run comes by."""
    names: list[str] = []
    with at_failpoints(names.append):
        flush_to_end(deployment.copy(folder), max_bytes=RANGE_BYTES)
    return names


def die() -> None:
    raise _Died


@pytest.mark.slow
def test_a_flusher_that_dies_between_any_two_commits_is_made_good_by_the_next(
    deployment: Deployment, clean: dict[str, Counter[Any]], tmp_path: Path
) -> None:
    names = places(deployment, tmp_path / "names")
    assert {"flush.deletes", "flush.rows", "flush.segments", "flush.checkpoints"} <= set(names)
    for number, name in enumerate(names):
        settings = deployment.copy(tmp_path / str(number))
        before = read_arrow(settings, 1).to_pylist()
        with pytest.raises(_Died), at_failpoints(stopping_at(number, die)):
            flush_to_end(settings, max_bytes=RANGE_BYTES)
        key = str
        assert sorted(read_arrow(settings, 1).to_pylist(), key=key) == sorted(before, key=key), f"read after {name}"
        flush_to_end(settings, max_bytes=RANGE_BYTES)
        assert contents(settings) == clean, f"died at {name} ({number})"
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.slow
def test_a_flusher_fenced_at_any_point_by_another_changes_nothing(
    deployment: Deployment, clean: dict[str, Counter[Any]], tmp_path: Path
) -> None:
    names = places(deployment, tmp_path / "names")
    for number, name in enumerate(names):
        settings = deployment.copy(tmp_path / str(number))
        with at_failpoints(stopping_at(number, partial(flush_to_end, settings))):
            flush_to_end(settings, max_bytes=RANGE_BYTES)
        assert contents(settings) == clean, f"another flusher at {name} ({number})"
        shutil.rmtree(tmp_path / str(number))


def test_a_flush_that_counts_is_on_the_disk_with_its_files(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = deployment.copy(tmp_path)
    medium = Medium(monkeypatch)
    flush_to_end(settings)
    for path in (
        Path(rows_uri(settings, 1)),
        Path(deletes_uri(settings, 1)),
        Path(settings.segments_uri),
        Path(settings.checkpoints_uri),
    ):
        table = DeltaTable(str(path))
        added = _added(path, table.version())
        assert added
        for name in (f"_delta_log/{table.version():020d}.json", *added):
            assert medium.has(path / name), f"{path}: {name}"


def test_what_a_fenced_flusher_wrote_is_gone_and_what_is_live_is_there(deployment: Deployment, tmp_path: Path) -> None:
    number = places(deployment, tmp_path / "names").index("flush.deletes")
    settings = deployment.copy(tmp_path / "two")
    with at_failpoints(stopping_at(number, lambda: flush_to_end(settings))):
        flush_to_end(settings)
    for path in (
        Path(rows_uri(settings, 1)),
        Path(deletes_uri(settings, 1)),
        Path(settings.segments_uri),
        Path(settings.checkpoints_uri),
    ):
        table = DeltaTable(str(path))
        named = {file for version in range(table.version() + 1) for file in _added(path, version)}
        assert named == {
            str(file.relative_to(path)) for file in path.rglob("*.parquet") if "_delta_log" not in file.parts
        }


def _added(table: Path, version: int) -> list[str]:
    """The files that one commit added."""
    lines = (table / "_delta_log" / f"{version:020d}.json").read_text().splitlines()
    return [action["add"]["path"] for line in lines if "add" in (action := json.loads(line))]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "place", ["flush.written", "commit.checked@2", "flush.rows", "flush.segments", "flush.checkpoints"]
)
def test_a_killed_process_leaves_what_the_next_one_completes(
    place: str, deployment: Deployment, clean: dict[str, Counter[Any]], tmp_path: Path
) -> None:
    settings = deployment.copy(tmp_path)
    code = (
        "from millrace.node.flush.definition import flush_to_end; from millrace.base.settings import Settings; "
        "flush_to_end(Settings.load())"
    )
    env = {**os.environ, **settings.environment(), VARIABLE: place}
    env["PYTHONPATH"] = str(Path(millrace.__file__).resolve().parent.parent)
    killed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60)
    assert killed.returncode == -9, killed.stderr.decode()
    flush_to_end(settings)
    assert contents(settings) == clean
    assert read_segments(open_table(Path(settings.segments_uri))).num_rows
