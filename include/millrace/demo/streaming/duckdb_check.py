"""Compare each streaming result with DuckDB's, row for row, including the rows that were late.

A query's checkpoint says up to which tick of each PChannel a micro-batch had come. That gives each row's micro-batch
and the watermark by which it was processed, without asking the operator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.client.collection import Collection
from millrace.demo.streaming.queries import DemoQuery
from millrace.message.ids import pchannel_of
from millrace.storage.table import table_at
from millrace.streams.keyed.operator import IS_LATE, LATE_BY, REASON, WINDOW

_PLAIN: Final = pa.timestamp("us")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of a query's rows, and whether DuckDB agrees."""

    rows: int
    counted: int
    """Rows that an answer used or passed over."""
    waiting: int
    late: int
    rejected: int
    answers: int
    mismatches: int
    """Answers that only one of the two has."""
    late_mismatches: int

    @property
    def passed(self) -> bool:
        whole = self.rows == self.counted + self.waiting + self.late + self.rejected
        return whole and not self.mismatches and not self.late_mismatches


def check(
    question: DemoQuery, *, table: str, batches: CheckpointBatches, flights: Collection, weather: Collection
) -> CheckResult:
    """Run the query in DuckDB and compare."""
    with duckdb.connect() as asked:
        asked.register("flights", batches.with_batch_numbers(flights, flights_of))
        asked.register("weather", batches.with_batch_numbers(weather, lambda rows: rows))
        answers, late, rejected = read_answers(question, table)
        asked.register("answers", without_time_zones(answers))
        asked.register("late", without_time_zones(late))
        return compare(question, asked, batches.last, rejected)


def compare(question: DemoQuery, asked: duckdb.DuckDBPyConnection, last: int, rejected: int) -> CheckResult:
    """Compare over existing tables ``flights``, ``weather``, ``answers`` and ``late``, up to micro-batch `last`."""
    delay = question.delay.days
    asked.execute(f"create table given as {question.rows_sql}")
    asked.execute(f"""create table marks as
        select n.batch, coalesce({question.max_event_time_sql} - interval {delay} day, timestamp '-infinity') as mark
        from range({last + 1}) n(batch) left join given g on g.batch < n.batch group by all""")
    asked.execute(f"create table final as select mark from marks where batch = {last}")
    asked.execute(f"""create table split as
        select given.*, coalesce({question.late_sql}, false) as is_late from given join marks using (batch)""")
    asked.execute("create table on_time as select * exclude is_late from split where not is_late")
    names = ", ".join(asked.sql("from late").columns)
    asked.execute(f"create table expected as {question.answer_sql}")

    def one(sql: str) -> int:
        [(found,)] = asked.sql(sql).fetchall()
        return int(found)

    def difference(one_: str, other: str) -> int:
        return one(f"select count(*) from (({one_} except all {other}) union all ({other} except all {one_}))")

    return CheckResult(
        rows=one("select count(*) from given"),
        counted=one(question.counted_sql),
        waiting=one(question.waiting_sql),
        late=one("select count(*) from late"),
        rejected=rejected,
        answers=one("select count(*) from answers"),
        mismatches=difference("from answers", f"select {', '.join(asked.sql('from answers').columns)} from expected"),
        late_mismatches=difference(f"select {names} from late", f"select {names} from split where is_late"),
    )


def read_answers(question: DemoQuery, uri: str) -> tuple[pa.Table, pa.Table, int]:
    """Read the operator's table: answers, late rows, and the number of rows rejected because they had no time."""
    rows = table_at(uri).dataset()
    names = [each for each in rows.schema.names if each not in ("kind", "late")]
    answers = rows.to_table(columns=names, filter=pc.field("kind") == "output")
    late = rows.to_table(columns=["late"], filter=pc.field("kind") == "late").column("late")
    aside = pa.Table.from_struct_array(pa.concat_arrays(late.chunks) if late.num_chunks else pa.array([], late.type))
    is_late = pc.equal(aside[REASON], IS_LATE)
    columns = [each for each in aside.column_names if each not in (LATE_BY, REASON, WINDOW)]
    return answers, aside.filter(is_late).select(columns), int(pc.sum(pc.invert(is_late)).as_py() or 0)


def flights_of(rows: pa.Table) -> pa.Table:
    """Return the flights in the shape of the queries."""
    minutes = rows["minute"].to_numpy().astype("timedelta64[m]").astype("timedelta64[us]")
    due = rows["time_hour"].cast(_PLAIN).to_numpy() + minutes
    columns = {"id": rows["id"], "origin": rows["origin"], "tail": rows["tailnum"], "due": pa.array(due, _PLAIN)}
    return pa.table({**columns, "delay": rows["dep_delay"].cast(pa.int64())})


def without_time_zones(rows: pa.Table) -> pa.Table:
    """Return the rows with times that have no zone, the only ones that DuckDB computes with unless it is extended."""
    for place, each in enumerate(rows.schema):
        if pa.types.is_timestamp(each.type):
            rows = rows.set_column(place, each.name, rows.column(place).cast(_PLAIN))
    return rows


class CheckpointBatches:
    """The micro-batches of a query, from its checkpoint: up to which tick of a PChannel each came, by collection."""

    def __init__(self, checkpoint: Path, table: str) -> None:
        """`table` is the operator's: Spark may be stopped before it records a micro-batch that the table contains."""
        self._ends: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self.last = table_at(table).app_version("batch") - 1
        for number in range(self.last + 1):
            _, _, *sources = (checkpoint / "offsets" / str(number)).read_text(encoding="utf-8").splitlines()
            for place in (json.loads(each) for each in sources if each != "-"):
                for pchannel, tick in place["ticks"].items():
                    self._ends.setdefault((place["collection"], pchannel), []).append((int(tick), number))

    def with_batch_numbers(self, collection: Collection, shape: Any) -> pa.Table:
        """Return all rows of a collection, shaped by `shape`, with the number of the micro-batch that read each."""
        rows = collection.changes_between().read_all()
        numbers = np.full(rows.num_rows, -1, dtype=np.int64)
        ticks, vchannels = rows["_time_tick"].to_numpy(), rows["_vchannel"].to_pylist()
        pchannels = np.array([pchannel_of(each) for each in vchannels])
        for (of, pchannel), found in self._ends.items():
            if of != collection.definition.id:
                continue
            mine = np.flatnonzero(pchannels == pchannel)
            ends, batch = np.array([each for each, _ in found]), np.array([*(each for _, each in found), self.last + 1])
            numbers[mine] = batch[np.searchsorted(ends, ticks[mine])]
        names = [each for each in rows.column_names if not each.startswith("_")]
        return without_time_zones(shape(rows.select(names))).append_column("batch", pa.array(numbers))
