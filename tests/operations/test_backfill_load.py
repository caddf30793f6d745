"""Files into a collection as Imports: each row once, whatever is repeated or cut off; a slice is visible as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from millrace.base.errors import AppendRejected, CollectionNotFound, InvalidArgument, MillraceError
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.append_client import AppendClient
from millrace.client.database import Database, connect
from millrace.message import builders
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backfill import importer as module
from millrace.operations.backfill.declaration import LoadParams
from millrace.operations.backfill.file_staging import stage_files
from millrace.operations.backfill.importer import append_imports
from millrace.operations.backfill.load import LoadReport, run
from millrace.operations.backfill.staging_folder import StagingManifest, staged_folder
from millrace.runtime.progress import Progress
from millrace.tables.read.arrow import read_arrow
from millrace.wal.versions import CHAIN_VERSION

SCHEMA = CollectionSchema(
    (FieldSpec("id", "int64", False), FieldSpec("place", "string", False), FieldSpec("note", "string", True)), "id"
)
SMALL = 1 << 16


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("load") / "data", append_retry_delay=0.0, append_attempts=1)
    with connect(settings=settings) as connected:
        connected.catalog.ensure_pchannels(2)
        yield connected
        connected.connection.service.shutdown()


@pytest.fixture
def things(client: Database) -> CollectionInfo:
    """A collection of the test's own."""
    name = f"things_{len(client.catalog.collections())}"
    return client.catalog.create_collection(name, SCHEMA, vchannels=2, partitions=("north", "south"))


def table(first: int, count: int) -> pa.Table:
    ids = list(range(first, first + count))
    places = ["north" if number % 3 else "south" for number in ids]
    return pa.table({"id": ids, "place": places, "note": ["x" * 100 if number % 2 else None for number in ids]})


def load(client: Database, things: CollectionInfo, *files: Path, **more: Any) -> LoadReport:
    given = {"collection": things.name, "files": [str(file) for file in files], "partition_by": "place", **more}
    return run(client.settings, LoadParams.parse(given), Progress())


def ids(client: Database, things: CollectionInfo) -> list[int]:
    """What a reader sees now."""
    ingest_to_end(client.settings, client.log)
    found: list[int] = client.collection(things.name).read()["id"].to_pylist()
    return sorted(found)


@pytest.mark.slow
def test_rows_of_all_three_formats_are_there_once_however_often_they_are_loaded(
    client: Database, things: CollectionInfo, tmp_path: Path
) -> None:
    pq.write_table(table(0, 50), tmp_path / "a.parquet")
    csv.write_csv(table(50, 50), tmp_path / "b.csv")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table(100, 50).to_pylist()))
    files = [tmp_path / "a.parquet", tmp_path / "b.csv", tmp_path / "c.jsonl"]
    first = load(client, things, *files)
    assert first.rows == 150
    assert ids(client, things) == list(range(150))
    assert load(client, things, *reversed(files)).loaded == first.loaded
    assert load(client, things, tmp_path / "*.*", import_id=first.import_id).loaded == first.loaded
    assert ids(client, things) == list(range(150))
    by_partition = read_arrow(client.settings, things.id, with_ticks=True).select(["place", "_partition"]).to_pylist()
    assert all(row["place"] == row["_partition"] for row in by_partition)
    load(client, things, files[0], import_id="again")
    assert len(ids(client, things)) == 200


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("when", ["before", "behind", "noted", "appended"])
def test_a_load_that_is_cut_off_anywhere_and_run_again_has_one_effect(
    client: Database, things: CollectionInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    pq.write_table(table(0, 3000), tmp_path / "rows.parquet")
    whole, left = AppendClient.append, [0]

    def come_by(place: str) -> None:
        if place == f"import.{when}":
            left[0] -= 1
            if left[0] < 0:
                raise Killed

    def cut_off(self: AppendClient, pchannel: str, entries: Any, *, deadline: float | None = None) -> Any:
        come_by("import.before")
        outcome = whole(self, pchannel, entries, deadline=deadline)
        come_by("import.behind")
        return outcome

    monkeypatch.setattr(module, "ENTRY_BYTES", 1)  # each message an entry of its own
    cuts = 0
    while True:
        left[0] = cuts
        with monkeypatch.context() as patch:
            patch.setattr(AppendClient, "append", cut_off)
            patch.setattr(module, "hit", come_by)
            try:
                report = load(client, things, tmp_path / "rows.parquet", slice_bytes=SMALL)
                break
            except Killed:
                cuts += 1
                if when == "behind":
                    ingest_to_end(client.settings, client.log)
    assert cuts >= 2
    assert len(report.loaded) >= 4
    assert ids(client, things) == list(range(3000))


def test_a_slice_is_visible_as_a_whole_and_its_files_are_of_one_partition_each(
    client: Database, things: CollectionInfo, tmp_path: Path
) -> None:
    pq.write_table(table(0, 3000), tmp_path / "rows.parquet")
    report = load(client, things, tmp_path / "rows.parquet", slice_bytes=SMALL)
    ingest_to_end(client.settings, client.log)
    confirmed = {each.name: client.connection.tick(each.name) for each in client.catalog.pchannels()}
    rows = read_arrow(client.settings, things.id, confirmed=confirmed, with_ticks=True)
    by_tick = {
        tick: rows.filter(pc.equal(rows["_time_tick"], tick)).num_rows for tick in set(rows["_time_tick"].to_pylist())
    }
    assert by_tick == {each.time_tick: each.rows for each in report.loaded}
    manifest = StagingManifest.read(staged_folder(client.settings, report.import_id))
    assert manifest is not None
    for each in manifest.slices:
        assert len({file["partition_id"] for file in each.files}) == len(each.files)


def forget(client: Database, things: CollectionInfo, *, key: int) -> None:
    """Have the chain forget every producer but the one that appends now."""
    for pchannel in client.catalog.pchannels():
        client.catalog.open_term(pchannel.name, config={"max_producers": 1})
    client.new_producer().insert(things, table(key, 100), partition_by="place")
    for pchannel in client.catalog.pchannels():
        client.catalog.open_term(pchannel.name, config={"max_producers": 1024})


@pytest.mark.slow
def test_what_the_chain_has_forgotten_is_found_in_the_wal_and_not_loaded_again(
    client: Database, things: CollectionInfo, tmp_path: Path
) -> None:
    pq.write_table(table(0, 100), tmp_path / "rows.parquet")
    report = load(client, things, tmp_path / "rows.parquet")
    state = client.settings.staged_path / report.import_id / module.STATE_FILE
    noted = json.loads(state.read_text())
    state.write_text(json.dumps({**noted, "ticks": {}}))  # as if killed before it noted its end
    forget(client, things, key=1000)
    assert len(ids(client, things)) == 200
    assert load(client, things, tmp_path / "rows.parquet").loaded == report.loaded
    assert len(ids(client, things)) == 200


@pytest.mark.slow
def test_a_load_that_was_forgotten_half_way_goes_on_in_another_epoch(
    client: Database, things: CollectionInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(0, 3000), tmp_path / "rows.parquet")
    whole = AppendClient.append

    def once(self: AppendClient, pchannel: str, entries: Any, *, deadline: float | None = None) -> Any:
        whole(self, pchannel, entries, deadline=deadline)
        raise Killed

    monkeypatch.setattr(module, "ENTRY_BYTES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(AppendClient, "append", once)
        with pytest.raises(Killed):
            load(client, things, tmp_path / "rows.parquet", slice_bytes=SMALL)
    forget(client, things, key=10_000)
    assert 0 < len(ids(client, things)) - 100 < 3000
    report = load(client, things, tmp_path / "rows.parquet", slice_bytes=SMALL)
    assert sum(each.rows for each in report.loaded) == 3000
    assert len(ids(client, things)) == 3100


@pytest.mark.slow
def test_what_was_staged_is_checked_again_before_it_is_named(
    client: Database, things: CollectionInfo, tmp_path: Path
) -> None:
    pq.write_table(table(0, 100), tmp_path / "rows.parquet")
    params = LoadParams.parse(
        {"collection": things.name, "files": [str(tmp_path / "rows.parquet")], "partition_by": "place"}
    )
    manifest = stage_files(client.settings, params, things, Progress())
    assert ids(client, things) == []
    first = client.settings.staged_path / manifest.slices[0].files[0]["path"]
    whole = first.read_bytes()
    first.write_bytes(whole[:-20] + b"x" + whole[-19:])
    with pytest.raises(InvalidArgument, match="not the file that was staged"):
        load(client, things, tmp_path / "rows.parquet")
    first.write_bytes(whole)
    client.catalog.drop_partition(things.name, "south")
    with pytest.raises(AppendRejected, match="PARTITION_NOT_FOUND"):
        append_imports(client, manifest, progress=Progress())
    assert ids(client, things) == []


def test_a_term_of_an_older_chain_is_followed_by_one_that_knows_imports(
    client: Database, things: CollectionInfo, tmp_path: Path
) -> None:
    pq.write_table(table(0, 100), tmp_path / "rows.parquet")
    channels = [each.name for each in client.catalog.pchannels()]

    def versions() -> list[int]:
        return [client.connection.describe(name)["chain_version"] for name in channels]

    for name in channels:  # as a build from before Imports opened it; the server's own opens no term of that version
        opening = builders.term_opening(term=client.catalog.term(name) + 1, chain_version=2, config={})
        assert client.connection.append(name, encode_entry([opening])).rejected == 0
    assert versions() == [2, 2]
    load(client, things, tmp_path / "rows.parquet")
    assert versions() == [CHAIN_VERSION, CHAIN_VERSION]
    assert ids(client, things) == list(range(100))


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("text", "more", "error", "words"),
    [
        ("id,place\n1,north\ntwo,north\n", {}, InvalidArgument, r"rows\.csv: line 3: id"),
        ("id,place\n1,north\n2,\n3,east\n", {}, InvalidArgument, r"rows\.csv: line 3: place: there is no partition"),
        ("id,place,colour\n1,north,red\n", {}, InvalidArgument, "no field that is in the file; it has id"),
        ("place\nnorth\n", {}, InvalidArgument, "no column 'id'"),
        ("id,place\n1,north\n", {"partition": "north"}, InvalidArgument, "not both"),
        ("id,place\n1,north\n", {"partition_by": "id"}, InvalidArgument, "string field"),
        ("id,place\n1,north\n", {"partition_by": None}, InvalidArgument, "give partition or partition_by"),
        ("id,place\n1,north\n", {"files": ["rows.csv"]}, InvalidArgument, "absolute"),
        ("id,place\n1,north\n", {"files": ["/nowhere/*.csv"]}, InvalidArgument, "no such file"),
        ("id,place\n1,north\n", {"collection": "elsewhere"}, CollectionNotFound, "elsewhere"),
        ("id,place\n1,north\n", {"format": "parquet"}, InvalidArgument, "cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_a_typed_error_and_nothing_is_appended_or_kept(
    client: Database,
    things: CollectionInfo,
    tmp_path: Path,
    text: str,
    more: dict[str, Any],
    error: type[MillraceError],
    words: str,
) -> None:
    good, bad = tmp_path / "a.csv", tmp_path / "rows.csv"
    good.write_text("id,place\n10,north\n")
    bad.write_text(text)
    before = set((client.settings.data_dir / "staged").glob("*"))
    with pytest.raises(error, match=words):
        load(client, things, good, bad, **more)
    assert ids(client, things) == []
    assert set((client.settings.data_dir / "staged").glob("*")) == before


def test_a_dry_run_checks_every_row_and_keeps_nothing(client: Database, things: CollectionInfo, tmp_path: Path) -> None:
    pq.write_table(table(0, 30), tmp_path / "rows.parquet")
    report = load(client, things, tmp_path / "rows.parquet", dry_run=True)
    assert (report.rows, report.loaded) == (30, [])
    assert ids(client, things) == []
    assert not (client.settings.data_dir / "staged" / report.import_id).exists()


def test_a_load_sweeps_what_killed_ones_left_and_nothing_that_is_staged(
    client: Database, things: CollectionInfo, tmp_path: Path
) -> None:
    pq.write_table(table(0, 30), tmp_path / "rows.parquet")
    before = load(client, things, tmp_path / "rows.parquet")
    staged = client.settings.staged_path
    left = [staged / f".{before.import_id}.4711", staged / f".named.by.hand.{'0a' * 16}"]
    for path in left:
        path.mkdir()
        (path / "000000-1-0.parquet").write_bytes(b"half")
    pq.write_table(table(30, 30), tmp_path / "more.parquet")
    load(client, things, tmp_path / "more.parquet")
    assert not any(path.exists() for path in left)
    assert StagingManifest.read(staged_folder(client.settings, before.import_id)) is not None


class Killed(BaseException):
    """What a kill is here: nothing behind it runs."""
