"""A collection as a sink: what a micro-batch comes to there, once, whatever fails and is repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import millrace.testing
from millrace.base.errors import (
    AppendRejected,
    AppendUnresolved,
    ChangesRefused,
    CollectionNotFound,
    InvalidArgument,
    LogUnavailable,
    StreamBusy,
)
from millrace.client.append_client import AppendClient
from millrace.client.database import Database, connect
from millrace.client.produce.rows import key_rows, split_keys
from millrace.flows.batch import Batch
from millrace.flows.sinks.collection.poison import LETTERS, redriven
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sinks.sink import Verdicts
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.message.wire.encode import encode_entry
from millrace.testing import Deployment
from millrace.wal.reasons import Reason

FIELDS = {"id": "int64", "name": "string?"}


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("sinks") / "data", append_retry_delay=0.01) as made:
        yield made


def batches(*rows: tuple[Any, ...], names: tuple[str, ...] = ("id", "name")) -> list[pa.RecordBatch]:
    return pa.table({name: [row[place] for row in rows] for place, name in enumerate(names)}).to_batches()


def given(number: int, rows: list[pa.RecordBatch]) -> Batch:
    return Batch.of_rows("query", number, rows)


def rows_of(db: Deployment, name: str) -> Counter[tuple[Any, ...]]:
    db.settle()
    return Counter(tuple(row.values()) for row in db.collection(name).read().to_pylist())


def sink(db: Deployment, folder: Path, name: str, **options: Any) -> CollectionSink:
    return CollectionSink(db.settings, name, memory=folder / "sink", **options)


@pytest.mark.slow
def test_a_batch_that_is_repeated_has_no_second_effect(db: Deployment, tmp_path: Path) -> None:
    db.create_collection("once", FIELDS, key="id", vchannels=2)
    for _ in range(2):
        with sink(db, tmp_path, "once") as to:
            for batch_id in range(3):
                found = to.write(given(batch_id, batches(*((10 * batch_id + each, "a") for each in range(10)))))
                assert found.acknowledged == 10 or found.again
    assert rows_of(db, "once") == Counter((each, "a") for each in range(30))


def test_at_least_once_repeats_a_batch_and_at_most_once_leaves_out_what_was_begun(
    db: Deployment, tmp_path: Path
) -> None:
    db.create_collection("least", FIELDS, key="id")
    for _ in range(2):
        with sink(db, tmp_path / "least", "least", guarantee="at least once") as to:
            to.write(given(0, batches((1, "a"))))
    assert rows_of(db, "least") == Counter({(1, "a"): 2})
    db.create_collection("most", FIELDS, key="id")
    with sink(db, tmp_path / "most", "most", guarantee="at most once") as to:
        to.write(given(0, batches((1, "a"))))
        with patch.object(AppendClient, "append", side_effect=LogUnavailable("gone")), pytest.raises(AppendUnresolved):
            to.write(given(1, batches((2, "a"))))
    with sink(db, tmp_path / "most", "most", guarantee="at most once") as to:
        assert to.write(given(1, batches((2, "a")))).again
        assert not to.write(given(2, batches((3, "a")))).again
    assert rows_of(db, "most") == Counter({(1, "a"): 1, (3, "a"): 1})


@pytest.mark.parametrize("taken", [True, False], ids=["the log had it", "the log had it not"])
def test_a_batch_whose_answer_was_lost_goes_on_from_the_journal(db: Deployment, tmp_path: Path, taken: bool) -> None:
    name = f"lost_{taken}"
    db.create_collection(name, FIELDS, key="id", vchannels=2)
    told = AppendClient.append

    def lost(self: AppendClient, *args: Any, **options: Any) -> Any:
        if taken:
            told(self, *args, **options)
        raise LogUnavailable("the answer was lost")

    rows = batches(*((each, "a") for each in range(20)))
    with sink(db, tmp_path, name) as to:
        with patch.object(AppendClient, "append", lost), pytest.raises(AppendUnresolved):
            to.write(given(0, rows))
        assert to.write(given(0, batches((99, "what Spark gives again is not looked at")))).again, "in this process"
        with patch.object(AppendClient, "append", lost), pytest.raises(AppendUnresolved):
            to.write(given(1, batches((20, "b"))))
    with sink(db, tmp_path, name) as to:
        assert to.write(given(1, batches((20, "b")))).again, "and in another"
        to.write(given(2, batches((21, "c"))))
    assert rows_of(db, name) == Counter([*((each, "a") for each in range(20)), (20, "b"), (21, "c")])


@pytest.mark.parametrize("left", ["", "{", None], ids=["empty", "torn", "gone"])
def test_a_note_that_a_machine_lost_when_it_stopped_is_made_up_for_by_the_journal(
    db: Deployment, tmp_path: Path, left: str | None
) -> None:
    name = f"note_{left is None}_{left == ''}"
    db.create_collection(name, FIELDS, key="id", vchannels=2)
    rows = [batches(*((10 * number + each, "a") for each in range(10))) for number in range(4)]
    with sink(db, tmp_path, name) as to:
        for number in range(3):
            to.write(given(number, rows[number]))
    note = tmp_path / "sink" / "taken.json"
    note.unlink()
    if left is not None:
        note.write_text(left)
    with sink(db, tmp_path, name) as to:
        assert to.write(given(1, rows[1])).again
        assert to.write(given(2, rows[2])) == Verdicts(10, again=True)
        assert to.write(given(3, rows[3])) == Verdicts(10)
    assert rows_of(db, name) == Counter((each, "a") for each in range(40))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("taken", [True, False], ids=["the log had it", "the log had it not"])
def test_a_chain_that_forgot_the_producer_takes_nothing_twice(tmp_path: Path, taken: bool) -> None:
    with millrace.testing.deployment(tmp_path / "data", append_retry_delay=0.01) as db:
        made = db.create_collection("forgets", FIELDS, key="id").definition
        [pchannel] = made.pchannels
        told = AppendClient.append

        def lost(self: AppendClient, *args: Any, **options: Any) -> Any:
            if taken:
                told(self, *args, **options)
            raise LogUnavailable("the answer was lost")

        lossy = patch.object(AppendClient, "append", lost)
        with sink(db, tmp_path, "forgets") as to, lossy, pytest.raises(AppendUnresolved):
            to.write(given(0, batches((1, "a"), (2, "b"))))
        with connect(settings=db.settings) as client:
            client.catalog.open_term(pchannel, config={"max_producers": 1})
            for number in range(2):
                client.new_producer().insert("forgets", {"id": [1000 + number], "name": ["other"]})
        with sink(db, tmp_path, "forgets") as to:
            assert to.write(given(0, [])).again
        found = rows_of(db, "forgets")
        assert {row: found[row] for row in [(1, "a"), (2, "b")]} == {(1, "a"): 1, (2, "b"): 1}


@pytest.mark.slow
def test_upserts_replace_and_of_a_key_the_last_row_counts(db: Deployment, tmp_path: Path) -> None:
    db.create_collection("upserts", FIELDS, key="id", vchannels=2)
    with sink(db, tmp_path, "upserts", mode="upsert") as to:
        to.write(given(0, batches((1, "a"), (2, "b"), (1, "c"))))
        to.write(given(1, batches((2, "d"), (3, None))))
    assert rows_of(db, "upserts") == Counter([(1, "c"), (2, "d"), (3, None)])


def test_changes_are_applied_in_the_order_of_their_ticks(db: Deployment, tmp_path: Path) -> None:
    db.create_collection("applied", FIELDS, key="id", vchannels=2)
    names = ("id", "name", "_change", "_time_tick", "_write_tick")
    with sink(db, tmp_path, "applied", mode="changes") as to:
        to.write(
            Batch.of_rows(
                "query",
                0,
                batches((1, "new", "insert", 9, 9), (1, "old", "insert", 7, 7), (2, "b", "insert", 8, 8), names=names),
            )
        )
        to.write(
            Batch.of_rows(
                "query",
                1,
                batches(
                    (1, "again", "insert", 12, 12),
                    (1, None, "delete", 12, 12),
                    (2, None, "delete", 13, 13),
                    names=names,
                ),
            )
        )
        with pytest.raises(ChangesRefused, match="does not name the removed rows"):
            to.write(given(2, batches((None, None, "retract", 14, 14), names=names)))
        with pytest.raises(InvalidArgument, match="insert, upsert, delete or retract, not 'other'"):
            to.write(given(2, batches((1, None, "other", 14, 14), names=names)))
    assert rows_of(db, "applied") == Counter([(1, "again")])


def test_rows_with_other_changes_are_not_appended(db: Deployment, tmp_path: Path) -> None:
    db.create_collection("inserts", FIELDS, key="id")
    names = ("id", "name", "_change")
    with sink(db, tmp_path, "inserts") as to:
        to.write(given(0, batches((1, "a", "insert"), names=names)))
        with pytest.raises(ChangesRefused, match="the rows contain a delete"):
            to.write(given(1, batches((1, None, "delete"), names=names)))
    assert rows_of(db, "inserts") == Counter([(1, "a")])


@pytest.mark.slow
def test_poison_rows_are_dead_letters_once_and_come_back_from_them(db: Deployment, tmp_path: Path) -> None:
    db.create_collection("strict", {"id": "int64", "small": "int8"}, key="id", vchannels=2)
    db.catalog.create_collection("letters", LETTERS)
    names = ("id", "small")
    rows = [(each, each % 100) for each in range(200)]
    rows[17], rows[150] = (17, 1000), (150, None)
    for _ in range(2):
        with sink(db, tmp_path, "strict", dead_letters="letters", stream="s") as to:
            found = to.write(given(0, batches(*rows, names=names)))
            assert found in (Verdicts(198, 2), Verdicts(198, 2, again=True))
    db.settle()
    told = db.collection("letters").read()
    assert sorted(told["row"].to_pylist()) == ['{"id": 150, "small": null}', '{"id": 17, "small": 1000}']
    assert any("not int8" in each for each in told["reason"].to_pylist())
    assert any("null" in each for each in told["reason"].to_pylist())
    assert sorted(pa.Table.from_batches(redriven(told))["id"].to_pylist()) == [17, 150]
    assert sum(rows_of(db, "strict").values()) == 198
    with sink(db, tmp_path / "without", "strict") as to, pytest.raises(InvalidArgument, match="not int8"):
        to.write(given(0, batches(*rows, names=names)))
    assert sum(rows_of(db, "strict").values()) == 198, "nothing of it was sent"


def test_the_last_of_a_key_s_rows_wins_though_poison_lies_between(db: Deployment, tmp_path: Path) -> None:
    db.create_collection("last_wins", {"id": "int64", "small": "int8"}, key="id")
    db.catalog.create_collection("last_letters", LETTERS)
    rows = [(1, each) for each in range(16)]
    rows[5], rows[11] = (1, 1000), (1, None)
    with sink(db, tmp_path, "last_wins", mode="upsert", dead_letters="last_letters", stream="s") as to:
        assert to.write(given(0, batches(*rows, names=("id", "small")))) == Verdicts(14, 2)
    assert rows_of(db, "last_wins") == Counter({(1, 15): 1})


def test_letters_go_in_again_in_the_order_of_their_batches_and_rows(db: Deployment, tmp_path: Path) -> None:
    made = db.create_collection("redriven", {"id": "int64", "small": "int8", "more": "int64?"}, key="id")
    db.catalog.create_collection("many_letters", LETTERS, vchannels=3)
    names = ("id", "small", "other")
    with sink(db, tmp_path, "redriven", mode="upsert", dead_letters="many_letters", stream="s") as to:
        for number in range(12):
            to.write(
                Batch.of_rows(
                    "query",
                    number,
                    batches((number, 1, 0), *((7, 1, 100 * number + each) for each in range(11)), names=names),
                )
            )
    db.settle()
    letters = db.collection("many_letters").read()
    assert len(letters) == 144
    made.alter(add={"other": "int64?"})
    with sink(db, tmp_path / "again", "redriven", mode="upsert", dead_letters="many_letters", stream="s") as to:
        assert to.redrive(letters) == 144
    db.settle()
    assert db.collection("redriven").read(where="id = 7", columns="other").to_pylist() == [{"other": 1110}]
    assert len(db.collection("many_letters").read()) == 0


@pytest.mark.slow
def test_letters_whose_redrive_was_interrupted_go_in_once(db: Deployment, tmp_path: Path) -> None:
    made = db.create_collection("once_more", {"id": "int64", "name": "string?"}, key="id")
    db.catalog.create_collection("once_letters", LETTERS, vchannels=2)
    home, elsewhere = made.definition.pchannels[0], db.collection("once_letters").definition
    told = AppendClient.append

    def lost(self: AppendClient, pchannel: str, *args: Any, **options: Any) -> Any:
        """The rows are in the log, and the deletes of their letters are not."""
        if pchannel == home:
            told(self, pchannel, *args, **options)
        raise LogUnavailable("the answer was lost")

    with sink(db, tmp_path, "once_more", dead_letters="once_letters", stream="s") as to:
        to.write(given(0, batches(*((each, "a", 5) for each in range(8)), names=("id", "name", "other"))))
    db.settle()
    made.alter(add={"other": "int64?"})
    letters = db.collection("once_letters").read()
    [away, *_] = [
        letters.slice(each, 1)
        for each in range(8)
        for name, _ in split_keys(key_rows(letters["id"].to_pylist()[each : each + 1], elsewhere), elsewhere)
        if pchannel_of(name) != home
    ]
    with sink(db, tmp_path / "again", "once_more", dead_letters="once_letters", stream="s") as to:
        assert to.redrive(letters.filter(pc.not_equal(letters["id"], away["id"][0]))) == 7
        with patch.object(AppendClient, "append", lost), pytest.raises(AppendUnresolved):
            to.redrive(away)
    db.settle()
    with sink(db, tmp_path / "again", "once_more", dead_letters="once_letters", stream="s") as to:
        to.redrive(db.collection("once_letters").read())
    assert sorted(row[0] for row in rows_of(db, "once_more").elements()) == list(range(8))


def test_a_batch_of_nothing_but_poison_stops_the_stream(db: Deployment, tmp_path: Path) -> None:
    db.create_collection("shape", FIELDS, key="id")
    db.catalog.create_collection("more_letters", LETTERS)
    with (
        sink(db, tmp_path, "shape", dead_letters="more_letters") as to,
        pytest.raises(InvalidArgument, match="no column"),
    ):
        to.write(given(0, batches(*((each, 1) for each in range(2_000)), names=("id", "other"))))
    assert rows_of(db, "more_letters") == Counter()


def test_what_was_rejected_is_sent_again_under_new_numbers_once_its_cause_is_gone(
    db: Deployment, tmp_path: Path
) -> None:
    made = db.create_collection("refused", FIELDS, key="id", vchannels=2)
    made.create_partition("p")
    with sink(db, tmp_path, "refused", partition="p") as to:
        to.write(given(0, batches((1, "a"))))
        with patch.object(Database, "definition", return_value=db.definition("refused")):
            made.drop_partition("p")
            for _ in range(2):
                with pytest.raises(AppendRejected) as refused:
                    to.write(given(1, batches((2, "b"), (3, "c"), (4, "d"))))
                assert refused.value.reason == Reason.PARTITION_NOT_FOUND


def test_a_sink_is_one_processs_and_needs_a_collection(db: Deployment, tmp_path: Path) -> None:
    db.create_collection("busy", FIELDS, key="id")
    with sink(db, tmp_path, "busy"), pytest.raises(StreamBusy, match="end it first"):
        sink(db, tmp_path, "busy")
    with pytest.raises(CollectionNotFound):
        sink(db, tmp_path, "nothing")
    with pytest.raises(InvalidArgument, match="the guarantee is one of"):
        sink(db, tmp_path, "busy", guarantee="perhaps")
    with pytest.raises(InvalidArgument, match="the mode is one of"):
        sink(db, tmp_path, "busy", mode="merge")


@pytest.mark.slow
def test_a_mirror_follows_a_retraction_of_a_channel_of_its_source(db: Deployment, tmp_path: Path) -> None:
    source = db.create_collection("mirrored", FIELDS, key="id", vchannels=2)
    db.create_collection("mirror", FIELDS, key="id", vchannels=2)
    source.insert({"id": list(range(20)), "name": ["old"] * 20})
    first = source.changes_between().read_all()
    definition = source.definition
    with connect(settings=db.settings) as client:
        replaces = builders.import_files(
            "replaces",
            [],
            vchannel=definition.vchannels[0],
            collection_id=definition.id,
            term=client.connection.describe(pchannel_of(definition.vchannels[0]))["term"],
            replace=True,
            schema_version=definition.schema_version,
        )
        client.connection.append(pchannel_of(definition.vchannels[0]), [encode_entry([replaces])]).result()
    db.settle()
    left = rows_of(db, "mirrored")
    assert 0 < sum(left.values()) < 20, "those of the other channel"
    source.upsert([{"id": 3, "name": "new"}])
    db.settle()
    then = source.changes_between(max(first["_time_tick"].to_pylist())).read_all()
    assert "retract" in then["_change"].to_pylist()
    for _ in range(2):
        with sink(db, tmp_path, "mirror", mode="changes") as to:
            to.write(given(0, first.to_batches()))
            to.write(given(1, then.to_batches()))
    assert rows_of(db, "mirror") == rows_of(db, "mirrored")
    every = source.changes_between().read_all()
    with sink(db, tmp_path / "whole", "mirror", mode="changes", stream="another") as to:
        to.write(given(0, every.to_batches()))
    assert rows_of(db, "mirror") == rows_of(db, "mirrored"), "and all of it at once comes to the same"
