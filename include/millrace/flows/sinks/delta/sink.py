"""The sink of a Delta table: one row for each record, by the fenced commit, exactly once.

Columns: id, document (JSON), topic, partition, offset, timestamp. The app id of each partition holds the offset after
the last range in the table, and moves in the commit that adds the rows. A record before that offset, or in a batch that
moves no position (a redrive), is looked up, and added if it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import CommitFenced, MillraceError, SinkBusy, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.records import Action, Record
from millrace.flows.sinks.models import DeltaSink as Declared
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.sink import Verdicts
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

    def check(self, schema: pa.Schema, /) -> None:
        """As millrace.flows.sinks.sink.Sink says."""

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

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """As millrace.flows.sinks.sink.Sink says."""
        table = self._opened()
        table.refresh()
        found = {lane: table.app_version(self._app(lane)) for lane in lanes}
        return {lane: position for lane, position in found.items() if position}

    def write(self, batch: Batch, /) -> Verdicts:
        """As millrace.flows.sinks.sink.Sink says."""
        documents = batch.documents or ()
        written = Verdicts(acknowledged=len(documents), bulks=1 if documents else 0)
        try:
            if documents:
                self._append(batch, documents, written)
        except MillraceError as error:
            raise self._whole(error) from None
        return written

    def close(self) -> None:
        """Idempotent."""
        self._table = None

    def _opened(self) -> TableHandle:
        if self._table is None:
            self.open()
        assert self._table is not None, "it was opened"
        return self._table

    def _app(self, lane: str) -> str:
        return f"pipeline-sink/{self._pipeline}/{lane}"

    def _append(self, batch: Batch, documents: Sequence[Action], written: Verdicts) -> None:
        table, app = self._opened(), self._app(batch.lane)
        table.refresh()
        mark = table.app_version(app)
        moves = batch.end > batch.start
        early = sorted({each.record.offset for each in documents if not moves or each.record.offset < mark})
        there = self._there(table, documents[0].record, early) if early else set()
        new = {each.record.offset: each for each in documents if each.record.offset not in there}
        written.repeated = len(documents) - len(new)
        if not new:
            return
        rows = [
            {
                "id": each.id,
                "document": (each.body or b"null").decode(),
                "topic": each.record.topic,
                "partition": each.record.partition,
                "offset": offset,
                "timestamp": each.record.timestamp * 1000,
            }
            for offset, each in sorted(new.items())
        ]
        sink = FileSink.at(self._uri, COLUMNS, ("partition", "offset"))
        sink.write(pa.Table.from_pylist(rows, schema=COLUMNS), {})
        # A commit that moves no app id is no fence: records before the mark rely on the lookup, and on one redrive at a
        # time.
        transactions = {app: AppTransaction(mark, batch.end)} if moves and batch.end > mark else {}
        outcome = commit_fenced(table, [CommitPart(adds=sink.finish(), app_transactions=transactions)])
        if outcome.fenced:
            raise CommitFenced(f"{app} was moved by another worker")

    def _there(self, table: TableHandle, place: Record, offsets: Sequence[int]) -> set[int]:
        wanted = (
            (pc.field("topic") == place.topic)
            & (pc.field("partition") == place.partition)
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
