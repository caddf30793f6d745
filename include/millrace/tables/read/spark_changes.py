"""A collection's changes between two ticks as a Spark DataFrame: a task a PChannel reads and decodes its part of the ``wal`` table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from millrace.base.settings import Settings
from millrace.message.schema import CollectionSchema
from millrace.tables.collections.changes import table_changes
from millrace.wal.visible.changes import Position, change_schema

FORMAT = "millrace_changes"


def changes_frame(
    spark: SparkSession,
    settings: Settings,
    collection_id: int,
    pchannels: Sequence[str],
    schema: CollectionSchema,
    *,
    after_tick: int,
    until_tick: int,
) -> DataFrame:
    """The changes behind `after_tick` up to `until_tick`, which the ``wal`` table must have, in one version of the schema."""
    spark.dataSource.register(ChangesDataSource)
    columns = change_schema(schema)
    place = columns.get_field_index("_change")
    options = {
        "settings": json.dumps(settings.environment()),
        "collection": str(collection_id),
        "pchannels": json.dumps(list(pchannels)),
        "schema": json.dumps(schema.to_json()),
        "after": str(after_tick),
        "until": str(until_tick),
    }
    plain = from_arrow_schema(columns.set(place, pa.field("_change", pa.utf8())))
    return spark.read.format(FORMAT).options(**options).schema(plain).load()


class ChangesDataSource(DataSource):
    """A partition for each PChannel. Registered by :func:`changes_frame`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        return ChangesReader(dict(self.options), to_arrow_schema(schema, timezone="UTC"))


class ChangesReader(DataSourceReader):
    """Plans from its options alone; `read` runs in a task."""

    def __init__(self, options: dict[str, str], target: pa.Schema) -> None:
        self._options = options
        self._target = target

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(name) for name in json.loads(self._options["pchannels"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        found = table_changes(
            Settings.load(env=json.loads(self._options["settings"])),
            int(self._options["collection"]),
            partition.value,
            after=Position(int(self._options["after"])),
            until_tick=int(self._options["until"]),
            schema=CollectionSchema.from_json(json.loads(self._options["schema"])),
        )
        for batch in found:
            yield from pa.Table.from_batches([batch.rows]).cast(self._target).to_batches()
