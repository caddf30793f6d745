"""Spark finds the format ``millrace`` here by itself, wherever the wheel is installed.

    flights = spark.read.format("millrace").load("flights")

At the first use of any Python data source, Spark imports each module whose name begins with ``pyspark_``, in every
application. So nothing of Millrace is imported here before the format is used
(:mod:`millrace.flows.sources.collection.named`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from millrace.flows.sources.collection.named import NamedSource


class DefaultSource(DataSource):
    """A collection by its name, as Spark registers it."""

    @classmethod
    def name(cls) -> str:
        return "millrace"

    def schema(self) -> StructType:
        return self._source().schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return self._source().reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return self._source().streamReader(schema)

    def _source(self) -> NamedSource:
        from millrace.flows.sources.collection.named import NamedSource

        return NamedSource(dict(self.options))
