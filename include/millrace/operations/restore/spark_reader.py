"""The rows of a restore, read and digested by Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F

from millrace.base.settings import Settings
from millrace.operations.restore.row_reader import ContentDigest
from millrace.tables.read.spark import read_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SparkReader:
    """Reads with Spark."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark = spark
        self._settings = settings

    def __call__(self, collection_id: int, *, at: int | None, confirmed: Mapping[str, int]) -> SparkRows:
        frame = read_spark(self._spark, self._settings, collection_id, at=at, confirmed=confirmed, with_ticks=True)
        return SparkRows(frame.persist())


class SparkRows:
    """Rows as a Spark DataFrame."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame

    def digest(self, names: list[str]) -> ContentDigest:
        columns = [_quoted(name) for name in names]
        hashed, other = F.xxhash64(*columns), F.hash(*columns).cast("long")
        [found] = self._frame.agg(
            F.count(F.lit(1)),
            F.coalesce(F.sum(hashed.cast("decimal(38,0)")), F.lit(0)),
            F.coalesce(F.sum(other), F.lit(0)),
        ).collect()
        return ContentDigest(int(found[0]), int(found[1]), int(found[2]))

    def chunks(self, count: int, key: Sequence[str], names: list[str]) -> Iterator[pa.Table]:
        for number in range(count):
            part = self._frame.where(F.pmod(F.xxhash64(*map(_quoted, key)), F.lit(count)) == number)
            yield part.toArrow().select(names)

    def of_vchannel(self, vchannel: str) -> SparkRows:
        return SparkRows(self._frame.where(F.col("_vchannel") == vchannel))

    def release(self) -> None:
        self._frame.unpersist()


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
