"""``spark.read.format("millrace").load(<collection>)``: a collection by its name, without a call that registers it.

Options, all text:

- ``collection``: its name, if `load` gets none; ``data``: the data folder (default: that of the settings).
- ``read``: ``rows`` (default): the rows at one tick, in one task; ``changes``: as the data source of
  :mod:`millrace.flows.sources.collection.spark_source`, batch or stream, with its options.
- ``at``, ``where``, ``columns`` (with commas): of ``rows``, as in :meth:`millrace.Collection.read`.

A whole collection is read faster by :func:`millrace.spark.read`, or from its published table: both read in many tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.data_folder import require_deployment
from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.flows.sources.collection.spark_source import RowsSource
from millrace.message.ids import resolve_tick

FORMAT = "millrace"
_READS = ("rows", "changes")


class NamedSource(RowsSource):
    """The data source with its options, created by Spark in each process."""

    def __init__(self, options: dict[str, str]) -> None:
        given = {name.lower(): value for name, value in options.items()}
        settings = Settings.load(env=json.loads(given["settings"])) if "settings" in given else Settings.load()
        if "data" in given:
            folder = Path(given["data"]).expanduser().absolute()
            require_deployment(folder)
            settings = replace(settings, data_dir=folder)
        name = given.get("collection") or given.get("path")
        if not name:
            raise InvalidArgument(f'the format {FORMAT} reads a collection: give its name, as in load("flights")')
        self._read = given.get("read", _READS[0])
        if self._read not in _READS:
            raise InvalidArgument(f"the option read is {self._read!r}: use {' or '.join(_READS)}")
        self._settings = settings
        self._name = name
        super().__init__({**given, "collection": name, "settings": json.dumps(settings.environment())})

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        if self._read == "changes":
            return super().schema()
        reader = self._rows_reader()
        with connect(settings=self._settings) as db, db.collection(self._name).stream(**reader.options) as rows:
            return from_arrow_schema(rows.schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        return super().reader(schema) if self._read == "changes" else self._rows_reader()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self._read != "changes":
            raise InvalidArgument('a stream has the changes of a collection: give .option("read", "changes")')
        return super().streamReader(schema)

    def _rows_reader(self) -> RowsAtTick:
        given = self.options
        with connect(settings=self._settings) as db:
            at = given.get("at") or str(db.current_tick(db.definition(self._name).pchannels))
        tick = resolve_tick(int(at) if at.isdecimal() else at)
        options: dict[str, Any] = {"at": tick, "where": given.get("where"), "columns": given.get("columns")}
        return RowsAtTick(self._settings, self._name, options)


class RowsAtTick(DataSourceReader):
    """The rows of a collection at one tick, in one task."""

    def __init__(self, settings: Settings, name: str, options: dict[str, Any]) -> None:
        self._settings = settings
        self._name = name
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with connect(settings=self._settings) as db, db.collection(self._name).stream(**self.options) as rows:
            yield from rows
