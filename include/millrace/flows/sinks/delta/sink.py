"""The sink of a Delta table: appends by the fenced commit, exactly once.

A commit adds the rows of a batch and moves the app id of its lane, or does neither.

- Documents become rows of the columns id, document (JSON), topic, partition, offset, timestamp. The app id of each
  partition holds the offset after the last range in the table. A record before that offset, or in a batch that moves no
  position (a redrive), is looked up, and added if it is missing.
- Rows keep their columns. The app id is created with the sink's memory, so it belongs to the query's checkpoint, and
  holds the number of the last micro-batch in the table: a query that begins again numbers its batches from 0, and the
  old app id would skip all of them silently. The first batch creates the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import CommitFenced, InvalidArgument, MillraceError, SinkBusy, SinkRefused
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.guarantee import Guarantee, require_guarantee
from millrace.flows.records import Action, Record
from millrace.flows.sinks.delta.model import DeltaSink as Declared
from millrace.flows.sinks.memory import Folder, name_in
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.sink import Verdicts
from millrace.storage.commit import AppTransaction, CommitPart, add_columns, commit_fenced, has_timestamp_ntz
from millrace.storage.file_sink import FileSink
from millrace.storage.table import TOMBSTONES, LogMaintenance, TableHandle, create_table, open_table

OUTPUTS: Final = "pipelines-out"
"""Folder of the tables of documents, below the deployment's tables."""
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
_USERS: Final = {TOMBSTONES: "interval 1 week"}
"""Properties of a table that belongs to its user: Delta's own defaults."""
_KEEP: Final = LogMaintenance(keep_commits=100_000)
"""Maintenance of a table that belongs to its user, who may read any of its versions."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]+")
"""Values of partition columns that are used unchanged as names of their folders."""
_RULES: Final = ("delta.constraints.", "delta.columnMapping.mode", "delta.enableIcebergCompat")


class DeltaSink:
    """Appends batches to the Delta table at `uri`."""

    def __init__(
        self,
        uri: str,
        *,
        flow: str = "",
        memory: Folder | None = None,
        guarantee: Guarantee = "exactly once",
        merge_schema: bool = False,
    ) -> None:
        """For documents, `flow` is the name in their app ids; for rows, `memory` is the sink's folder.

        With `merge_schema`, columns that the table lacks are added; otherwise a batch with such a column is refused.
        """
        require_guarantee(guarantee, "delta")
        self._uri, self._flow = uri, flow
        self._app_of_rows = ""
        if memory is not None and guarantee == "exactly once":
            self._app_of_rows = f"millrace-{name_in(memory, 'delta-app.json')}"
        self._merge = merge_schema
        self._table: TableHandle | None = None

    def check(self, schema: pa.Schema, /) -> None:
        """Accept any columns. The first batch creates the table, and later ones are checked against it."""

    def open(self) -> None:
        """Open the table of documents, or create it. Raises SinkBusy, SinkRefused."""
        if self._flow:
            try:
                self._table = create_table(self._uri, COLUMNS, partition_by=[])
            except MillraceError as error:
                raise self._whole(error) from None
            if not set(COLUMNS.names) <= set(self._table.columns):
                raise SinkRefused(
                    f"the table {self._uri} has other columns than {', '.join(COLUMNS.names)}: choose another name"
                )

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return the position after the last batch in the table, by lane."""
        if self._app_of_rows:
            there = open_table(self._uri)
            mark = None if there is None else there.find_app_version(self._app_of_rows)
            return {} if mark is None else dict.fromkeys(lanes, mark + 1)
        table = self._opened()
        table.refresh()
        found = {lane: table.app_version(self._app(lane)) for lane in lanes}
        return {lane: position for lane, position in found.items() if position}

    def write(self, batch: Batch, /) -> Verdicts:
        """Append a batch. Raises SinkBusy, SinkRefused, and InvalidArgument for rows that do not fit the table."""
        try:
            if batch.documents is None:
                return self._append_rows(batch)
            verdicts = Verdicts(acknowledged=len(batch.documents), bulks=1 if batch.documents else 0)
            if batch.documents:
                self._append_documents(batch, batch.documents, verdicts)
        except InvalidArgument:
            raise
        except MillraceError as error:
            raise self._whole(error) from None
        return verdicts

    def close(self) -> None:
        """Idempotent."""
        self._table = None

    # --- documents ---------------------------------------------------------------------------------------------------

    def _opened(self) -> TableHandle:
        if self._table is None:
            self.open()
        assert self._table is not None, "the sink is open"
        return self._table

    def _app(self, lane: str) -> str:
        return f"pipeline-sink/{self._flow}/{lane}"

    def _append_documents(self, batch: Batch, documents: Sequence[Action], verdicts: Verdicts) -> None:
        table, app = self._opened(), self._app(batch.lane)
        table.refresh()
        mark = table.app_version(app)
        moves = batch.end > batch.start
        early = sorted({each.record.offset for each in documents if not moves or each.record.offset < mark})
        there = self._there(table, documents[0].record, early) if early else set()
        new = {each.record.offset: each for each in documents if each.record.offset not in there}
        verdicts.repeated = len(documents) - len(new)
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
        # A commit that moves no app id does not fence: records before the mark rely on the lookup, and on one redrive
        # at a time.
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

    # --- rows --------------------------------------------------------------------------------------------------------

    def fits(self, rows: pa.Table, /) -> None:
        """Raise InvalidArgument if `rows` do not fit the table. Adds none, but creates the table, as a batch does."""
        try:
            table = self._fitting(rows.schema)
        except InvalidArgument:
            raise
        except MillraceError as error:
            raise self._whole(error) from None
        for chunk in rows.to_batches():
            for _ in _by_partition(_fitted(chunk, table.schema), table.partition_columns):
                pass

    def _append_rows(self, batch: Batch) -> Verdicts:
        chunks = iter(batch.rows or ())
        first = next(chunks, None)
        if first is None:
            return Verdicts()
        table = self._fitting(first.schema)
        app = self._app_of_rows
        mark = table.find_app_version(app) if app else None
        if mark is not None and mark >= batch.start:
            hit("sink.sent")
            return Verdicts(again=True)
        partitioned = table.partition_columns
        columns = pa.schema([each for each in table.schema if each.name not in partitioned])
        sink, rows = FileSink.at(self._uri, columns, tuple(columns.names)), 0
        try:
            for chunk in (first, *chunks):
                rows += chunk.num_rows
                for values, part in _by_partition(_fitted(chunk, table.schema), partitioned):
                    sink.write(part.select(columns.names), values)
            adds = sink.finish()
        except BaseException:
            sink.abort()
            raise
        moves = {app: AppTransaction(mark, batch.start)} if app else {}
        part = CommitPart(adds=adds, app_transactions=moves)
        if (adds or moves) and commit_fenced(table, [part], maintenance=_KEEP).fenced:
            raise CommitFenced(f"{app} was moved by another driver of this query")
        hit("sink.sent")
        return Verdicts(rows)

    def _fitting(self, schema: pa.Schema) -> TableHandle:
        """Return the table at its newest version, with the columns of `schema`. Raises InvalidArgument, SinkRefused."""
        wanted = pa.schema([each.with_nullable(True).remove_metadata() for each in schema])
        if self._table is None:
            # A column of times without a zone needs table features, which a new table gets when the column is added.
            plain = pa.schema([each for each in wanted if not has_timestamp_ntz(each.type)])
            self._table = create_table(self._uri, plain, partition_by=[], configuration=_USERS)
            if self._table.version == 0 and len(plain) < len(wanted):
                add_columns(self._table, wanted)
        table = self._table
        table.refresh()
        ruled = sorted(name for name in table.configuration if name.startswith(_RULES))
        if ruled:
            raise SinkRefused(f"the table {self._uri} has the rule {ruled[0]}, which this sink cannot follow: drop it")
        unknown = [name for name in wanted.names if name not in table.columns]
        if unknown and not self._merge:
            raise InvalidArgument(
                f"the table {self._uri} has no column {unknown[0]!r}: add it, or declare merge_schema: true"
            )
        if unknown:
            add_columns(table, pa.schema([wanted.field(name) for name in unknown]))
        return table

    def _whole(self, error: MillraceError) -> MillraceError:
        if isinstance(error, SinkBusy | SinkRefused):
            return error
        if error.retriable or isinstance(error, CommitFenced):
            return SinkBusy(f"table {self._uri}: {error}", retry_after=1.0)
        return SinkRefused(f"table {self._uri}: {error}")


def _fitted(chunk: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """Return the rows with the table's columns. Raises InvalidArgument for values that do not fit a column."""
    columns = []
    for field in schema:
        if field.name not in chunk.schema.names:
            columns.append(pa.nulls(chunk.num_rows, field.type))
            continue
        try:
            columns.append(chunk[field.name].cast(field.type))
        except pa.ArrowException as error:
            raise InvalidArgument(f"the column {field.name!r} does not fit {field.type}: {error}") from None
        if not field.nullable and columns[-1].null_count:
            raise InvalidArgument(f"the column {field.name!r} has nulls, and the table's is not nullable")
    return pa.Table.from_arrays(columns, schema=schema)


def _by_partition(rows: pa.Table, names: Sequence[str]) -> Iterator[tuple[dict[str, str], pa.Table]]:
    """Yield the rows of each set of values of the partition columns `names`, with the values."""
    if not names or not len(rows):
        if len(rows):
            yield {}, rows
        return
    texts = [rows[name].cast(pa.utf8()).to_pylist() for name in names]
    odd = next((text for column in texts for text in column if text is None or not _PLAIN.fullmatch(text)), "")
    if odd != "":
        raise InvalidArgument(f"{odd!r} cannot be a partition value: use letters, digits, dots and dashes")
    places: dict[tuple[str, ...], list[int]] = {}
    for place, values in enumerate(zip(*texts, strict=True)):
        places.setdefault(values, []).append(place)
    for values, found in places.items():
        yield dict(zip(names, values, strict=True)), rows.take(pa.array(np.array(found)))


def made(declared: Declared, settings: Settings, *, flow: str, flush: Flush) -> DeltaSink:
    """Return the sink that `flow` declares."""
    return DeltaSink(uri_of(settings, declared), flow=flow)


def uri_of(settings: Settings, declared: Declared) -> str:
    """Return the URI of a table that is declared by its name."""
    return settings.table_uri(f"{OUTPUTS}/{declared.table}")
