"""A Delta table as a sink of rows, without Spark: what a table takes, and checkpoints of earlier builds."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from deltalake.transaction import CommitProperties, Transaction

from millrace.base.errors import InvalidArgument, SinkRefused
from millrace.flows.batch import Batch
from millrace.flows.sinks.delta.sink import DeltaSink


def batch(number: int, **columns: Any) -> Batch:
    return Batch.of_rows("query", number, pa.table(columns).to_batches())


def rows(path: Path) -> list[dict[str, Any]]:
    found = deltalake.DeltaTable(str(path)).to_pyarrow_table()
    return sorted(found.to_pylist(), key=lambda row: str(row["id"]))


def test_a_checkpoint_of_an_earlier_build_continues(tmp_path: Path) -> None:
    """Spark's writer stored the batch's number under the name in the checkpoint's folder."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "delta-app.json").write_text(json.dumps({"name": "abc"}))
    app = CommitProperties(app_transactions=[Transaction("millrace-abc", 0)])
    deltalake.write_deltalake(str(tmp_path / "table"), pa.table({"id": [1]}), commit_properties=app)
    sink = DeltaSink(str(tmp_path / "table"), memory=tmp_path / "memory")
    assert sink.standing(["query"]) == {"query": 1}
    assert sink.write(batch(0, id=[1])).again
    assert sink.standing(["query"]) == {"query": 1}
    assert sink.write(batch(1, id=[2])).acknowledged == 1
    assert sink.standing(["query"]) == {"query": 2}
    assert [row["id"] for row in rows(tmp_path / "table")] == [1, 2]


def test_the_first_batch_of_two_drivers_is_in_the_table_once(tmp_path: Path) -> None:
    """Number 0 is a number like others, though a table without the app id shows 0, too."""
    one, other = (DeltaSink(str(tmp_path / "table"), memory=tmp_path / "memory") for _ in range(2))
    assert one.write(batch(0, id=[1])).acknowledged == 1
    assert other.write(batch(0, id=[1])).again
    assert [row["id"] for row in rows(tmp_path / "table")] == [1]


def test_columns_are_added_if_the_stream_may_and_refused_otherwise(tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    sink = DeltaSink(table, memory=tmp_path / "memory")
    sink.write(batch(0, id=[1], name=["a"]))
    with pytest.raises(InvalidArgument, match=r"no column 'more'.*merge_schema"):
        sink.write(batch(1, id=[2], more=[5]))
    with pytest.raises(InvalidArgument, match="'id' does not fit int64"):
        sink.write(batch(1, id=["two"]))
    sink.write(batch(1, id=[2]))
    merging = DeltaSink(table, memory=tmp_path / "memory", merge_schema=True)
    merging.write(batch(2, id=[3], more=[5]))
    assert rows(tmp_path / "table") == [
        {"id": 1, "name": "a", "more": None},
        {"id": 2, "name": None, "more": None},
        {"id": 3, "name": None, "more": 5},
    ]


def test_a_partitioned_table_gets_its_folders_and_rules_that_are_not_checked_are_refused(tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    deltalake.write_deltalake(table, pa.table({"id": [1], "day": ["2026-01-01"]}), partition_by=["day"])
    sink = DeltaSink(table, memory=tmp_path / "memory")
    sink.write(batch(0, id=[2, 3, 4], day=["2026-01-01", "2026-01-02", "2026-01-01"]))
    assert [row["day"] for row in rows(tmp_path / "table")] == ["2026-01-01", "2026-01-01", "2026-01-02", "2026-01-01"]
    with pytest.raises(InvalidArgument, match="partition value"):
        sink.write(batch(1, id=[5], day=["a/b"]))
    deltalake.DeltaTable(table).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(SinkRefused, match=r"delta\.constraints\.positive"):
        sink.write(batch(1, id=[-1], day=["2026-01-01"]))


def test_a_batch_without_rows_counts_and_times_without_a_zone_are_columns(tmp_path: Path) -> None:
    midnight = datetime.fromisoformat("2026-01-01T00:00:00")
    moment = pa.array([midnight], pa.timestamp("us"))
    sink = DeltaSink(str(tmp_path / "table"), memory=tmp_path / "memory")
    none = pa.RecordBatch.from_pylist([], pa.schema([("id", pa.int64()), ("at", pa.timestamp("us"))]))
    assert sink.write(Batch.of_rows("query", 0, [none])).acknowledged == 0
    assert sink.write(batch(1, id=[1], at=moment)).acknowledged == 1
    assert rows(tmp_path / "table") == [{"id": 1, "at": midnight}]
    assert sink.standing(["query"]) == {"query": 2}
