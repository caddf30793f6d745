"""What a Spark user would write in the streaming node's place: a Python data source that reads the log and decodes it.

The same entries from the same server, decoded into messages and given as Arrow batches, a row a message, for
``writeStream.format("delta")``. A module of its own: Spark's workers import what it needs and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

import millrace.runtime.arrow_without_pandas  # noqa: F401 - the baseline has this too
from millrace.log.registry import open_service
from millrace.message.ids import EARLIEST
from millrace.message.wire.decode import decode_entries
from millrace.rpc.remote_log import RemoteLogService

READ_BYTES = 32 << 20
_COLUMNS = [
    "entry",
    "index",
    "physical_ms",
    "type",
    "vchannel",
    "term",
    "collection_id",
    "partition_id",
    "rows",
    "sequence",
    "payload",
]


class PlainPartition(InputPartition):
    """One log, whole."""

    def __init__(self, pchannel: str) -> None:
        super().__init__(pchannel)
        self.pchannel = pchannel


class PlainReader(DataSourceStreamReader):
    """Everything the logs hold, in one micro-batch."""

    def __init__(self, log: str, names: list[str]) -> None:
        self._log = log
        self._names = names

    def initialOffset(self) -> dict[str, int]:
        return {"batch": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        return {"batch": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [PlainPartition(name) for name in self._names] if end["batch"] > start["batch"] else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PlainPartition)
        with open_service(self._log) if "://" in self._log else RemoteLogService.connect(self._log) as service:
            log = service.open(partition.pchannel)
            position, end = EARLIEST, log.describe().end
            while position < end:
                entries = log.read(position, end=end, max_bytes=READ_BYTES)
                batch = decode_entries(entries.batch)
                yield pa.RecordBatch.from_arrays(
                    [
                        batch.column("entry"),
                        batch.column("index"),
                        batch.column("physical_ms"),
                        batch.column("type").cast(pa.int32()),
                        batch.column("vchannel").cast(pa.utf8()),
                        batch.column("term"),
                        batch.column("collection_id"),
                        batch.column("partition_id"),
                        batch.column("rows"),
                        batch.column("sequence"),
                        batch.column("payload").cast(pa.binary()),
                    ],
                    names=_COLUMNS,
                )
                position = entries.next


class PlainSource(DataSource):
    """The log without Millrace."""

    @classmethod
    def name(cls) -> str:
        return "bench_plain_log"

    def schema(self) -> str:
        return (
            "entry LONG, index INT, physical_ms LONG, type INT, vchannel STRING, term LONG, collection_id LONG,"
            " partition_id LONG, rows LONG, sequence LONG, payload BINARY"
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return PlainReader(self.options["log"], self.options["names"].split(","))
