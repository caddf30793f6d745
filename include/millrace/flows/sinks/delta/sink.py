"""The sink of a Delta table: one row for each record, by the fenced commit, exactly once.

Columns: id, document (JSON), topic, partition, offset, timestamp. The app id of each partition holds the offset after
the last record in the table, and moves in the commit that adds the rows. A record before that offset (a redrive) is
looked up, and added if it is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import CommitFenced, MillraceError, SinkBusy, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.records import Action
from millrace.flows.sinks.models import DeltaSink as Declared
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.sink import Written
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.table import TableHandle, create_table

OUTPUTS: Final = "pipelines-out"
"""Folder of these tables, below the deployment's."""
COLUMNS: Final = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("document", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)


class DeltaSink:
    """Documents of one task into one table."""

    def __init__(self, uri: str, pipeline: str) -> None:
        self._uri, self._pipeline = uri, pipeline
        self._table: TableHandle | None = None

    def open(self) -> None:
        """As millrace.flows.sinks.sink.Sink says."""
        try:
            self._table = create_table(self._uri, COLUMNS, partition_by=[])
        except MillraceError as error:
            raise self._whole(error) from None
        if not set(COLUMNS.names) <= set(self._table.columns):
            raise SinkRefused(
                f"the table {self._uri} has other columns than {', '.join(COLUMNS.names)}: choose another name"
            )

    def write(self, actions: Sequence[Action], /) -> Written:
        """As millrace.flows.sinks.sink.Sink says."""
        if self._table is None:
            self.open()
        assert self._table is not None, "it was opened"
        places: dict[tuple[str, int], list[Action]] = {}
        for action in actions:
            places.setdefault((action.record.topic, action.record.partition), []).append(action)
        written = Written(bulks=1 if actions else 0)
        try:
            for (topic, partition), told in places.items():
                self._append(self._table, topic, partition, told, written)
        except MillraceError as error:
            raise self._whole(error) from None
        return written

    def close(self) -> None:
        """Idempotent."""
        self._table = None

    def _append(
        self, table: TableHandle, topic: str, partition: int, actions: Sequence[Action], written: Written
    ) -> None:
        table.refresh()
        app = f"pipeline-sink/{self._pipeline}/{topic}-{partition}"
        mark = table.app_version(app)
        early = sorted({each.record.offset for each in actions if each.record.offset < mark})
        there = self._there(table, topic, partition, early) if early else set()
        new = {each.record.offset: each for each in actions if each.record.offset not in there}
        written.acknowledged += len(actions)
        written.repeated += len(actions) - len(new)
        if not new:
            return
        rows = [
            {
                "id": each.id,
                "document": (each.body or b"null").decode(),
                "topic": topic,
                "partition": partition,
                "offset": offset,
                "timestamp": each.record.timestamp * 1000,
            }
            for offset, each in sorted(new.items())
        ]
        sink = FileSink.at(self._uri, COLUMNS, ("partition", "offset"))
        sink.write(pa.Table.from_pylist(rows, schema=COLUMNS), {})
        behind = max(mark, max(new) + 1)
        # A commit that moves no app id is no fence: records before the mark rely on the lookup, and on one redrive at a
        # time.
        moves = {app: AppTransaction(mark, behind)} if behind > mark else {}
        outcome = commit_fenced(table, [CommitPart(adds=sink.finish(), app_transactions=moves)])
        if outcome.fenced:
            raise CommitFenced(f"{app} was moved by another worker")

    def _there(self, table: TableHandle, topic: str, partition: int, offsets: Sequence[int]) -> set[int]:
        wanted = (
            (pc.field("topic") == topic)
            & (pc.field("partition") == partition)
            & (pc.field("offset") >= offsets[0])
            & (pc.field("offset") <= offsets[-1])
        )
        found = table.dataset().to_table(columns=["offset"], filter=wanted)
        return set(found["offset"].to_pylist())

    def _whole(self, error: MillraceError) -> MillraceError:
        if error.retriable or isinstance(error, CommitFenced):
            return SinkBusy(f"table {self._uri}: {error}", retry_after=1.0)
        return SinkRefused(f"table {self._uri}: {error}")


def made(declared: Declared, settings: Settings, *, flow: str, flush: Flush) -> DeltaSink:
    """The sink that flow `flow` declares."""
    return DeltaSink(settings.table_uri(f"{OUTPUTS}/{declared.table}"), flow)
