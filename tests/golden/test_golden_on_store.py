"""Deployments that earlier builds wrote, moved to an object store: they open there, hold what they held, and go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import TickTooOld
from millrace.base.settings import following
from millrace.commands.verify import check_channels, check_collections
from millrace.log.generations.service import open_deployment_log
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.move.declaration import MoveParams
from millrace.operations.move.run import run
from millrace.runtime.progress import Progress
from millrace.storage.store import list_below, store_at
from tests.golden import make_second
from tests.golden.deployment import ARCHIVE, FACTS, LOG, facts, of_wal, rows, served, settings_of, unpacked
from tests.s3_server import bucket

GOLDEN = {"first": (ARCHIVE, FACTS), "second": (make_second.ARCHIVE, make_second.FACTS)}


@dataclass(frozen=True)
class Moved:
    root: Path
    uri: str
    known: dict[str, Any]


@pytest.fixture(params=sorted(GOLDEN))
def moved(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moved]:
    """An earlier build's deployment whose tables were moved to a bucket by this one."""
    archive, said = GOLDEN[request.param]
    root = unpacked(tmp_path / "golden", archive)
    monkeypatch.chdir(root)  # the log's second generation has a relative URL
    with bucket(monkeypatch) as box:
        report = run(settings_of(root), MoveParams(to=f"{box}/tables"), Progress())
        assert report.files > 0
        yield Moved(root, f"{box}/tables", facts(said))


def test_it_holds_what_it_held(moved: Moved) -> None:
    settings = following(settings_of(moved.root))
    assert settings.wal_uri == f"{moved.uri}/wal"
    assert of_wal(settings) == moved.known["wal"]
    for read in moved.known["reads"]:
        if read["rows"] is None:
            with pytest.raises(TickTooOld):
                rows(settings, read["collection"], at=read["at"])
        else:
            assert rows(settings, read["collection"], at=read["at"]) == read["rows"]
    with open_deployment_log(settings.log_path, settings=LOG) as log:
        assert all(each["holds"] for each in check_channels(settings, log=log))
    assert all(each["holds"] for each in check_collections(settings))


def test_it_goes_on(moved: Moved) -> None:
    settings = following(settings_of(moved.root))
    with served(moved.root) as client:
        for number in range(2):
            client.connection.tick(f"dml_{number}")

        def up_to_date() -> None:
            ingest_to_end(settings, client.log)
            flush_to_end(settings)

        up_to_date()
        before = {each.name: len(client.collection(each.name).read()) for each in client.catalog.collections()}
        schema = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("word", "string", True)), "id")
        later = client.catalog.create_collection("later", schema, vchannels=2)
        with client.new_producer() as writer:
            writer.insert(later, pa.table({"id": range(50), "word": ["w"] * 50}))
            writer.delete(later, [7])
        up_to_date()
        assert sorted(client.collection("later").read()["id"].to_pylist()) == [each for each in range(50) if each != 7]
        assert {name: len(client.collection(name).read()) for name in before} == before
        assert all(each["holds"] for each in check_collections(settings))
    assert list_below(store_at(f"{moved.uri}/tables/{later.id}"))
    assert not (settings.data_dir / "tables" / str(later.id) / "_rows").exists()
