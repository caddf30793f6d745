"""Spark's own joins and windows of streams, on Spark.

Micro-batch by micro-batch what the model says, with its late rows and its state.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millrace.spark as face
import millrace.testing
from tests.streams.operators.spark_model import Join, JoinKind, Marks, Row, Sessions, Windows
from tests.streams.operators.test_spark_model import CONDITIONS, KINDS, counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
DAY = datetime(2026, 11, 24, tzinfo=UTC)
SCHEMA = "k string, t timestamp, v long"
DELAYS = (10, 4)
BATCHES = 7
MINUTE = "cast((unix_timestamp({}) - {}) / 60 as long)"


@dataclass
class Asked:
    """A question of Spark, and of the model: its rows of a micro-batch."""

    frame: Callable[[], DataFrame]
    model: Callable[[list[Row], list[Row]], list[Any]]
    mode: str = "append"
    join: Join | None = None


def seeded(seed: int) -> list[tuple[list[Row], list[Row]]]:
    """Rows of both sides by micro-batch.

    In one there are none of the right side, in some rows that are late by minutes or by an hour.
    """
    dice = random.Random(seed)
    found = []
    for number in range(BATCHES):
        sides = []
        for side in range(2):
            rows = [
                {
                    "k": dice.choice(["a", "b", "c", None]),
                    "t": 100 + 10 * number + dice.randrange(12) - dice.choice([0, 0, 0, 0, 5, 11, 60]),
                    "v": dice.randrange(10),
                }
                for _ in range(0 if side == 1 and number == 2 else dice.randrange(14, 22))
            ]
            sides.append(rows)
        found.append((sides[0], sides[1]))
    return found


def written(folder: Path, sides: list[tuple[list[Row], list[Row]]]) -> None:
    schema = pa.schema([("k", pa.utf8()), ("t", pa.timestamp("us", "UTC")), ("v", pa.int64())])
    for number, each in enumerate(sides):
        for name, rows in zip(("left", "right"), each, strict=True):
            (folder / name).mkdir(exist_ok=True)
            path = folder / name / f"{number}.parquet"
            pq.write_table(
                pa.Table.from_pylist([row | {"t": DAY + timedelta(minutes=row["t"])} for row in rows], schema), path
            )
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def minute(column: str) -> str:
    return MINUTE.format(column, int(DAY.timestamp()))


def questions(spark: SparkSession, folder: Path, prices: DataFrame, priced: dict[str, int]) -> dict[str, Asked]:
    from pyspark.sql import functions as F

    def rows(side: str) -> DataFrame:
        return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder / side))

    def left() -> DataFrame:
        return rows("left").withWatermark("t", f"{DELAYS[0]} minutes")

    def right() -> DataFrame:
        other = rows("right").withWatermark("t", f"{DELAYS[1]} minutes")
        return other.withColumnsRenamed({"k": "rk", "t": "rt", "v": "rv"})

    def join(kind: JoinKind, condition: str) -> Asked:
        matches, sides = CONDITIONS[condition]
        made = Join(kind, matches, sides(), Marks(DELAYS))
        how = {"left": "leftOuter", "right": "rightOuter", "full": "fullOuter", "semi": "leftSemi"}.get(kind, kind)
        columns = ["k", minute("t"), "v", *([] if kind == "semi" else ["rk", minute("rt"), "rv"])]
        if condition == "windows":
            columns = [each.replace("(t)", "(w.start)").replace("(rt)", "(rw.start)") for each in columns]

        def frame() -> DataFrame:
            if condition == "whatever the times":
                one, on = (
                    rows("left").join(
                        rows("right").withColumnsRenamed({"k": "rk", "t": "rt", "v": "rv"}), F.expr("k = rk"), how
                    ),
                    None,
                )
                return one.selectExpr(*columns)
            one, other, on = left(), right(), "k = rk and rt between t and t + interval 6 minutes"
            if condition == "windows":
                one = one.select("k", F.window("t", "5 minutes").alias("w"), "v")
                other = other.select("rk", F.window("rt", "5 minutes").alias("rw"), "rv")
                on = "k = rk and w = rw"
            return one.join(other, F.expr(on), how).selectExpr(*columns)

        def told(row: Row | None) -> tuple[Any, ...]:
            if row is None:
                return (None, None, None)
            return (row["k"], row["t"] // 5 * 5 if condition == "windows" else row["t"], row["v"])

        def model(one: list[Row], other: list[Row]) -> list[Any]:
            found = made.batch(one, other)
            return [told(a) if kind == "semi" else told(a) + told(b) for a, b in found]

        return Asked(frame, model, join=made)

    def windows(of: Any, window: Callable[[], Any], mode: str = "append") -> Asked:
        def frame() -> DataFrame:
            summed = left().groupBy("k", window().alias("w")).agg(F.count("*").alias("n"), F.sum("v").alias("s"))
            return summed.selectExpr("k", minute("w.start"), minute("w.end"), "n", "s")

        return Asked(frame, lambda one, other: of.batch(one), mode)

    asked = {f"{kind}, {each}": join(kind, each) for kind in KINDS for each in ("interval", "windows")}
    asked["inner, whatever the times"] = join("inner", "whatever the times")
    marks = DELAYS[:1]
    for mode in ("append", "update"):
        asked[f"tumbling, {mode}"] = windows(
            Windows(15, 15, mode, Marks(marks)),
            lambda: F.window("t", "15 minutes"),
            mode,  # type: ignore[arg-type]
        )
    asked["sliding"] = windows(Windows(15, 5, "append", Marks(marks)), lambda: F.window("t", "15 minutes", "5 minutes"))
    asked["sessions"] = windows(Sessions(2, Marks(marks)), lambda: F.session_window("t", "2 minutes"))
    asked["map and filter"] = Asked(
        lambda: rows("left").filter("v > 4").selectExpr("k", minute("t"), "v * 2"),
        lambda one, other: [(row["k"], row["t"], 2 * row["v"]) for row in one if row["v"] > 4],
    )
    asked["a table of its moment"] = Asked(
        lambda: rows("left").join(prices, F.expr("k = code"), "leftOuter").selectExpr("k", minute("t"), "v", "price"),
        lambda one, other: [(row["k"], row["t"], row["v"], priced.get(row["k"])) for row in one],
    )
    return asked


@pytest.mark.parametrize("seed", [1, 3])
def test_spark_does_what_the_model_says(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    sides = seeded(seed)
    written(tmp_path, sides)
    with millrace.testing.deployment(tmp_path / "data") as db:
        table = db.create_collection("prices", {"code": "string", "price": "int64"}, key="code")
        then = table.insert([{"code": "a", "price": 1}, {"code": "b", "price": 2}]).last_tick
        table.upsert([{"code": "a", "price": 7}, {"code": "c", "price": 3}])
        db.settle()
        prices = face.read(spark, "prices", at=then, settings=db.settings)
        asked = questions(spark, tmp_path, prices, {"a": 1, "b": 2})
        heard: dict[str, dict[int, Counter[str]]] = {name: {} for name in asked}
        queries = {}
        for name, each in asked.items():

            def keep(rows: DataFrame, number: int, name: str = name) -> None:
                heard[name][number] = counted([tuple(row) for row in rows.collect()])

            writer = each.frame().writeStream.foreachBatch(keep).outputMode(each.mode)
            place = str(tmp_path / "checkpoints" / name.replace(" ", "_").replace(",", ""))
            queries[name] = writer.option("checkpointLocation", place).trigger(availableNow=True).start()
        for query in queries.values():
            query.awaitTermination()
    wrong = {}
    for name, each in asked.items():
        meant = {number: counted(each.model(*sides[number])) for number in range(BATCHES)}
        if BATCHES in heard[name]:  # one more, without rows, when the watermark has moved
            meant[BATCHES] = counted(each.model([], []))
        assert sum(sum(found.values()) for found in meant.values()), name
        if heard[name] != meant:
            wrong[name] = {
                number: (heard[name].get(number, Counter()) - found, found - heard[name].get(number, Counter()))
                for number, found in meant.items()
                if heard[name].get(number) != found
            }
        if each.join is not None:
            state = [one for one in queries[name].recentProgress if one.stateOperators][-1].stateOperators[0]
            late = sum(
                one.stateOperators[0].numRowsDroppedByWatermark
                for one in queries[name].recentProgress
                if one.stateOperators
            )
            if (state.numRowsTotal, late) != (each.join.state_rows, each.join.late):
                wrong[f"{name}: state"] = (state.numRowsTotal, each.join.state_rows, late, each.join.late)
    assert not wrong, "\n".join(map(repr, wrong.items()))
