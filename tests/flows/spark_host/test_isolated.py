"""A failure in a micro-batch is one row's: all other rows are in the sink, whatever it refuses and wherever it dies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import BatchRefused, InvalidArgument, SinkBusy, SinkRefused
from millrace.flows.batch import Batch
from millrace.flows.declare.errors import Errors
from millrace.flows.errors.letters import RefusedRow
from millrace.flows.sinks.delta.sink import DeltaSink
from millrace.flows.sinks.sink import Verdicts
from millrace.flows.spark_host import isolated
from millrace.flows.spark_host.isolated import IsolatedSink

COLUMNS = pa.schema([("n", pa.int64())])
MANY = Errors(in_a_row=1_000_000, tries=1)


class Killed(BaseException):
    """The process ends."""


@dataclass
class Letters:
    """By batch and number, what the row was."""

    found: dict[tuple[int, int], int] = field(default_factory=dict)
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    puts: int = 0

    def put(self, batch: int, rows: Sequence[RefusedRow]) -> None:
        self.puts += 1
        for each in rows:
            self.found[batch, each.number] = each.row["n"][0].as_py()
            self.reasons[batch, each.number] = each.words

    def close(self) -> None: ...


@dataclass
class Server:
    """What survives a process: rows that were taken, and, of a sink that is exactly once, the batch's number."""

    bad: frozenset[int] = frozenset()
    rows: Counter[int] = field(default_factory=Counter)
    documents: dict[tuple[int, int], int] = field(default_factory=dict)
    batch: int = -1
    kill: str = ""


class Plain:
    def __init__(self, server: Server) -> None:
        self.server = server

    def check(self, schema: pa.Schema, /) -> None: ...

    def open(self) -> None: ...

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        return {}

    def close(self) -> None: ...


class Once(Plain):
    """Takes a batch whole, with its number, or refuses all of it; tells what it refuses."""

    def fits(self, rows: pa.Table, /) -> None:
        if wrong := self.server.bad & set(rows["n"].to_pylist()):
            raise InvalidArgument(f"{min(wrong)} does not fit")

    def write(self, batch: Batch, /) -> Verdicts:
        if batch.start <= self.server.batch:
            return Verdicts(again=True)
        table = batch.table()
        self.fits(table)
        if self.server.kill == "before":
            raise Killed
        self.server.rows.update(table["n"].to_pylist())
        self.server.batch = batch.start
        if self.server.kill == "after":
            raise Killed
        return Verdicts(len(table))


class Repeats(Plain):
    """Takes parts, by batch and number, and refuses a part as a whole: for no reason that it could name."""

    error: type[Exception] = BatchRefused

    def write(self, batch: Batch, /) -> Verdicts:
        rows = batch.table()["n"].to_pylist()
        if self.server.bad & set(rows):
            raise self.error("one of them")
        numbers = list(range(len(rows)) if batch.numbers is None else batch.numbers)
        self.server.documents |= {(batch.start, number): row for number, row in zip(numbers, rows, strict=True)}
        if self.server.kill == "after" and rows:
            raise Killed
        return Verdicts(len(rows))


def chunks(rows: Sequence[int]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pylist([], COLUMNS)
    for place in range(0, len(rows), 3):
        yield pa.RecordBatch.from_pylist([{"n": each} for each in rows[place : place + 3]], COLUMNS)


def put(
    sink: Plain | DeltaSink, letters: Letters, memory: Path, number: int, rows: Sequence[int], **more: object
) -> Verdicts:
    """As a process does that begins with this batch."""
    options = {"errors": MANY, "parts": not hasattr(sink, "fits"), **more}
    errors = options.pop("errors")
    way = IsolatedSink(sink, letters, errors, memory=memory, lane="stream-s", **options)  # type: ignore[arg-type]
    return way.write(Batch("stream-s", number, number + 1, rows=chunks(rows)))


@pytest.mark.parametrize("kind", [Once, Repeats])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_all_rows_are_in_the_sink_once_or_letters_whatever_kills_a_batch(
    kind: type[Once | Repeats], data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(0, 12), max_size=14))
    bad = data.draw(st.frozensets(st.integers(0, 12), max_size=4))
    kills = data.draw(st.lists(st.sampled_from(["", "before", "after", "letters", "noted"]), max_size=4))
    server, letters = Server(bad), Letters()
    with TemporaryDirectory() as folder:
        for kill in [*kills, ""]:
            server.kill = kill

            def hit(name: str, kill: str = kill) -> None:
                if name == f"isolated.{kill}":
                    raise Killed

            with patch.object(isolated, "hit", hit):
                try:
                    verdicts = put(kind(server), letters, Path(folder), 0, rows)
                except Killed:
                    continue
        again = put(kind(server), letters, Path(folder), 0, rows)
    good = [each for each in rows if each not in bad]
    assert sorted(letters.found.values()) == sorted(each for each in rows if each in bad)
    assert verdicts.rejected == again.rejected == len(rows) - len(good)
    if kind is Once:
        assert server.rows == Counter(good)
    else:
        assert [row for _, row in sorted(server.documents.items())] == good
        assert server.documents == {(0, place): row for place, row in enumerate(rows) if row not in bad}


def test_a_batch_that_comes_again_in_another_order_leaves_out_the_same_rows(tmp_path: Path) -> None:
    server, letters = Server(frozenset({7}), kill="before"), Letters()
    with pytest.raises(Killed):
        put(Once(server), letters, tmp_path, 0, [1, 7, 2, 7, 3])
    server.kill = ""
    server.bad = frozenset()  # mended meanwhile: the letters are there, so the rows stay out
    assert put(Once(server), letters, tmp_path, 0, [3, 7, 1, 2, 7]).rejected == 2
    assert server.rows == Counter([1, 2, 3])
    assert letters.found == {(0, 1): 7, (0, 3): 7}
    assert letters.puts == 1


def test_rows_that_cannot_be_read_are_no_row_s_fault_and_nothing_is_written(tmp_path: Path) -> None:
    class Broken(Exception):
        """A task of Spark failed."""

    def rows() -> Iterator[pa.RecordBatch]:
        yield from chunks([1, 2])
        raise Broken

    server, letters = Server(), Letters()
    for kind in (Once, Repeats):
        way = IsolatedSink(kind(server), letters, MANY, memory=tmp_path, lane="s", parts=True)
        with pytest.raises(Broken):
            way.write(Batch("s", 0, 1, rows=rows()))
    assert not server.rows
    assert not server.documents
    assert not letters.found


def test_of_columns_that_do_not_fit_no_row_is_at_fault(tmp_path: Path) -> None:
    class Narrow(Once):
        def fits(self, rows: pa.Table, /) -> None:
            raise InvalidArgument("there is no column n")

    letters = Letters()
    with pytest.raises(InvalidArgument, match="no column n"):
        put(Narrow(Server()), letters, tmp_path, 0, [1, 2])
    assert not letters.found


def test_a_sink_that_refuses_too_many_in_a_row_is_at_fault_over_batches_and_restarts(tmp_path: Path) -> None:
    server, letters = Server(frozenset(range(10))), Letters()
    few = Errors(in_a_row=4, tries=1)
    for number in range(3):
        put(Once(server), letters, tmp_path, number, [number], errors=few)
    with pytest.raises(SinkRefused, match="refused 4 records in a row"):
        put(Once(server), letters, tmp_path, 3, [3], errors=few)
    assert len(letters.found) == 3, "none of the batch is put aside"
    server.bad = frozenset({0})
    put(Once(server), letters, tmp_path, 3, [3], errors=few)
    server.bad = frozenset(range(10))
    for number in range(4, 7):
        put(Once(server), letters, tmp_path, number, [number], errors=few)
    assert len(letters.found) == 6, "the sink took one between"


def test_an_exception_that_nobody_knows_is_a_row_s_if_the_sink_takes_one_after_it(tmp_path: Path) -> None:
    class Odd(Repeats):
        error = ZeroDivisionError

    server, letters = Server(frozenset({2})), Letters()
    with pytest.raises(SinkRefused, match=r"`millrace flows skip NAME stream-s 0 --row 1`"):
        put(Odd(server), letters, tmp_path, 0, [1, 2])
    assert not letters.found
    assert put(Odd(server), letters, tmp_path, 0, [1, 2, 3]).rejected == 1
    assert letters.reasons == {(0, 1): "ZeroDivisionError: one of them"}


def test_a_busy_sink_has_no_row_at_fault(tmp_path: Path) -> None:
    class Busy(Repeats):
        def write(self, batch: Batch, /) -> Verdicts:
            raise SinkBusy("not now", retry_after=1.0)

    letters = Letters()
    with pytest.raises(SinkBusy):
        put(Busy(Server()), letters, tmp_path, 0, [1])
    assert not letters.found


def test_a_sink_that_stores_the_batch_s_number_and_cannot_tell_gets_no_parts(tmp_path: Path) -> None:
    server, letters = Server(frozenset({2})), Letters()
    with pytest.raises(BatchRefused):
        put(Repeats(server), letters, tmp_path, 0, [1, 2, 3], parts=False)
    assert not server.documents


def test_named_rows_are_put_aside_before_the_sink_sees_them(tmp_path: Path) -> None:
    server, letters = Server(), Letters()
    skip = {0: frozenset({1, 99})}
    for _ in range(2):
        verdicts = put(Once(server), letters, tmp_path, 0, [5, 6, 7], skip=lambda batch: skip.get(batch, frozenset()))
        assert verdicts.rejected == 1
    assert server.rows == Counter([5, 7])
    assert letters.found == {(0, 1): 6}
    assert letters.reasons[0, 1].startswith("SKIPPED: ")


def test_a_delta_table_has_the_rows_that_fit_once_through_kills(tmp_path: Path) -> None:
    place, memory, letters = tmp_path / "table", tmp_path / "memory", Letters()
    small = pa.schema([("n", pa.int8())])

    def sink() -> DeltaSink:
        return DeltaSink(str(place), memory=memory)

    first = pa.RecordBatch.from_pylist([{"n": 0}], small)
    sink().write(Batch.of_rows("stream-s", 0, [first]))
    rows = [1, 1000, 2, 2000, 3]
    for kill in ("isolated.letters", "isolated.noted", "sink.sent", ""):

        def hit(name: str, kill: str = kill) -> None:
            if name == kill:
                raise Killed(name)

        with patch.object(isolated, "hit", hit), patch("millrace.flows.sinks.delta.sink.hit", hit):
            if kill:
                with pytest.raises(Killed, match=kill):
                    put(sink(), letters, memory, 1, rows)
            else:
                assert put(sink(), letters, memory, 1, rows).rejected == 2
    assert sorted(DeltaTable(place).to_pyarrow_table()["n"].to_pylist()) == [0, 1, 2, 3]
    assert sorted(letters.found.values()) == [1000, 2000]
    assert json.loads((memory / "aside.json").read_text())["batch"] == 1
