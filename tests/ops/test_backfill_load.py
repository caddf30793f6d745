"""Files into a collection: each row once, whatever is repeated or cut off; a slice is visible as a whole; bad files load nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from millrace.client.append_client import AppendClient
from millrace.client.client import Client
from millrace.coord.store import Collection
from millrace.errors import CollectionNotFound, InvalidArgument, MillraceError
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.node_run import catch_up
from millrace.ops.backfill import load as module
from millrace.ops.backfill.load import LoadReport, run
from millrace.ops.backfill.params import LoadParams
from millrace.ops.operation import Progress
from millrace.settings import Settings
from millrace.tables.arrow_read import read_arrow

SCHEMA = CollectionSchema(
    (FieldSpec("id", "int64", False), FieldSpec("place", "string", False), FieldSpec("note", "string", True)), "id"
)
SMALL = 1 << 16


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("load") / "data", append_retry_delay=0.0, append_attempts=1)
    with Client.connect(settings) as connected:
        connected.coordinator.ensure_pchannels(2)
        yield connected
        connected.append.service.shutdown()


@pytest.fixture
def things(client: Client) -> Collection:
    """A collection of the test's own."""
    name = f"things_{len(client.coordinator.collections())}"
    return client.coordinator.create_collection(name, SCHEMA, vchannels=2, partitions=("north", "south"))


def table(first: int, count: int) -> pa.Table:
    ids = list(range(first, first + count))
    places = ["north" if number % 3 else "south" for number in ids]
    return pa.table({"id": ids, "place": places, "note": ["x" * 100 if number % 2 else None for number in ids]})


def load(client: Client, things: Collection, *files: Path, **more: Any) -> LoadReport:
    given = {"collection": things.name, "files": [str(file) for file in files], "partition_by": "place", **more}
    return run(client.settings, LoadParams.parse(given), Progress())


def ids(client: Client, things: Collection) -> list[int]:
    """What a reader sees now."""
    catch_up(client.settings, client.log)
    found: list[int] = client.read(things.name)["id"].to_pylist()
    return sorted(found)


def test_rows_of_all_three_formats_are_there_once_however_often_they_are_loaded(
    client: Client, things: Collection, tmp_path: Path
) -> None:
    pq.write_table(table(0, 50), tmp_path / "a.parquet")
    csv.write_csv(table(50, 50), tmp_path / "b.csv")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table(100, 50).to_pylist()))
    files = [tmp_path / "a.parquet", tmp_path / "b.csv", tmp_path / "c.jsonl"]
    first = load(client, things, *files)
    assert first.rows == 150
    assert ids(client, things) == list(range(150))
    assert load(client, things, *reversed(files)).loaded == first.loaded
    assert load(client, things, tmp_path / "*.*", import_id=first.import_id, step="all").loaded == first.loaded
    assert ids(client, things) == list(range(150))
    by_partition = read_arrow(client.settings, things.id, with_ticks=True).select(["place", "_partition"]).to_pylist()
    assert all(row["place"] == row["_partition"] for row in by_partition)
    load(client, things, files[0], import_id="again")
    assert len(ids(client, things)) == 200


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_load_that_is_cut_off_at_any_append_and_run_again_has_one_effect(
    client: Client, things: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    pq.write_table(table(0, 3000), tmp_path / "rows.parquet")
    whole, appends = AppendClient.append, [0]

    def cut_off(self: AppendClient, pchannel: str, entries: Any, *, deadline: float | None = None) -> Any:
        if when == "before" and appends[0] == 0:
            raise Killed
        outcome = whole(self, pchannel, entries, deadline=deadline)
        appends[0] -= 1
        if when == "behind" and appends[0] <= 0:
            raise Killed
        return outcome

    monkeypatch.setattr(module, "ENTRY_BYTES", 30_000)
    cuts = 0
    while True:
        appends[0] = cuts + (when == "behind")
        with monkeypatch.context() as patch:
            patch.setattr(AppendClient, "append", cut_off)
            try:
                report = load(client, things, tmp_path / "rows.parquet", slice_bytes=SMALL, parallel=1)
                break
            except Killed:
                cuts += 1
    assert cuts >= 6
    assert len(report.slices) >= 3
    assert ids(client, things) == list(range(3000))


def test_a_slice_whose_transaction_is_ended_by_a_flush_starts_over_and_is_seen_as_a_whole(
    client: Client, things: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(0, 400), tmp_path / "rows.parquet")
    whole, calls, seen = AppendClient.append, [0], []

    def flushed(self: AppendClient, pchannel: str, entries: Any, *, deadline: float | None = None) -> Any:
        outcome = whole(self, pchannel, entries, deadline=deadline)
        calls[0] += 1
        if calls[0] in (1, 3):
            with monkeypatch.context() as patch:
                patch.setattr(AppendClient, "append", whole)
                seen.append(ids(client, things))
                client.coordinator.flush(things.name)
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(AppendClient, "append", flushed)
        load(client, things, tmp_path / "rows.parquet", parallel=1)
    assert seen[0] == []
    assert ids(client, things) == list(range(400))


def test_a_slice_that_the_chain_has_forgotten_is_found_in_the_wal_and_not_loaded_again(
    client: Client, things: Collection, tmp_path: Path
) -> None:
    pq.write_table(table(0, 100), tmp_path / "rows.parquet")
    report = load(client, things, tmp_path / "rows.parquet")
    for state in (client.settings.data_dir / "staged" / report.import_id).glob("*.parquet.json"):
        state.write_text(json.dumps({"epoch": 1, "since": 0}))  # as if killed before it noted its end
    for pchannel in client.coordinator.pchannels():
        client.coordinator.open_term(pchannel.name, config={"max_producers": 1})
    try:
        client.producer().insert(things, table(1000, 100), partition_by="place")
        assert len(ids(client, things)) == 200
        assert load(client, things, tmp_path / "rows.parquet").loaded == report.loaded
        assert len(ids(client, things)) == 200
    finally:
        for pchannel in client.coordinator.pchannels():
            client.coordinator.open_term(pchannel.name, config={"max_producers": 1024})


def test_steps_one_by_one_are_a_load_and_what_was_staged_is_checked_against_its_digest(
    client: Client, things: Collection, tmp_path: Path
) -> None:
    pq.write_table(table(0, 3000), tmp_path / "rows.parquet")
    staged = load(client, things, tmp_path / "rows.parquet", slice_bytes=SMALL, step="stage")
    assert ids(client, things) == []
    folder = client.settings.data_dir / "staged" / staged.import_id
    (tmp_path / "rows.parquet").unlink()
    step = {"import_id": staged.import_id, "slice_bytes": SMALL}
    gone = tmp_path / "rows.parquet"
    load(client, things, gone, step="load", slices=staged.slices[1:], **step)
    first = folder / "000000.parquet"
    bytes_ = first.read_bytes()
    first.write_bytes(bytes_[:-20] + b"x" + bytes_[-19:])
    with pytest.raises(InvalidArgument, match="not the file that was staged"):
        load(client, things, gone, step="load", slices=[0], **step)
    first.write_bytes(bytes_)
    load(client, things, gone, step="load", slices=[0], **step)
    load(client, things, gone, step="finish", **step)
    assert ids(client, things) == list(range(3000))
    assert not list(folder.glob("*.parquet"))


@pytest.mark.parametrize(
    ("text", "more", "error", "words"),
    [
        ("id,place\n1,north\ntwo,north\n", {}, InvalidArgument, r"rows\.csv: line 3: id"),
        ("id,place\n1,north\n2,\n3,east\n", {}, InvalidArgument, r"rows\.csv: line 3: place: there is no partition"),
        ("id,place,colour\n1,north,red\n", {}, InvalidArgument, "no field 'colour'"),
        ("place\nnorth\n", {}, InvalidArgument, "no column 'id'"),
        ("id,place\n1,north\n", {"partition": "north"}, InvalidArgument, "one of them"),
        ("id,place\n1,north\n", {"partition_by": "id"}, InvalidArgument, "string field"),
        ("id,place\n1,north\n", {"partition_by": None}, InvalidArgument, "name the partition"),
        ("id,place\n1,north\n", {"files": ["rows.csv"]}, InvalidArgument, "absolute"),
        ("id,place\n1,north\n", {"files": ["/nowhere/*.csv"]}, InvalidArgument, "no such file"),
        ("id,place\n1,north\n", {"collection": "elsewhere"}, CollectionNotFound, "elsewhere"),
        ("id,place\n1,north\n", {"step": "load", "import_id": "never"}, InvalidArgument, "nothing is staged"),
        ("id,place\n1,north\n", {"format": "parquet"}, InvalidArgument, "cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_a_typed_error_and_nothing_is_appended_or_kept(
    client: Client,
    things: Collection,
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


def test_a_dry_run_checks_every_row_and_keeps_nothing(client: Client, things: Collection, tmp_path: Path) -> None:
    pq.write_table(table(0, 30), tmp_path / "rows.parquet")
    report = load(client, things, tmp_path / "rows.parquet", dry_run=True)
    assert (report.rows, report.loaded) == (30, [])
    assert ids(client, things) == []
    assert not (client.settings.data_dir / "staged" / report.import_id).exists()


class Killed(BaseException):
    """What a kill is here: nothing behind it runs."""
