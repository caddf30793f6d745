"""Answers, late rows and state of a keyed stream in one Delta table, which one fenced commit moves from batch to batch.

The table is partitioned by `kind`: ``output`` (the answers' columns), ``late`` (the rows left out, in the struct
`late`) and ``state`` (files with the operator's own columns, read by name; the newest of each shard and table counts).
The commit's app ids are the truth: how many batches were committed, the number of the last one, and the newest times,
from which the watermark follows. So a repeated batch is recognized and has no second effect. A batch that died before
its commit left files that no version names.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from millrace.base.errors import InvalidArgument, TableDamaged, TableUnavailable
from millrace.base.failpoint import hit
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.parquet_file import FileAction, ParquetFileWriter
from millrace.storage.table import TableHandle, create_table
from millrace.streams.keyed.clock import Clock, Newest
from millrace.streams.keyed.operator import END, Counts, Operator, State, Step, late_schema
from millrace.streams.patterns.sorted_rows import column_of

DESCRIPTION: Final = "millrace.operator"
ROWS: Final = "millrace.rows"
PLACEMENT: Final = "millrace.placement"
STREAM: Final = "millrace.stream"
_ZERO: Final = 1 << 62
"""Added to a time in an app id's version, which is never negative."""
_DROP_EVERY: Final = 20
_TIDY_EVERY: Final = 200
"""Batches between two merges of small files. Old states are dropped more often, since each batch writes new ones."""
_KEEP_HOURS: Final = 24
"""Age before which unnamed files stay: a task may have written them for a later commit."""
_log: Final = logging.getLogger(__name__)
_IDS: Final = ("batches", "batch", "newest", "newest-right", "ended")


@dataclass(frozen=True, slots=True)
class Base:
    """The position of a stream."""

    batches: int
    batch: int
    """Number of the last batch; -1 if there is none yet."""
    newest: Newest
    ended: bool
    """Whether the stream has ended with its last batch."""
    files: Mapping[tuple[int, str], str]
    """File of each of the state's tables, by shard and name."""
    stale: Sequence[str]
    """Files of older states."""


@dataclass(frozen=True, slots=True)
class Advanced:
    """The result of a batch in one or more shards."""

    files: Sequence[FileAction] = ()
    """Durable files, without effect until :meth:`KeyedTable.commit` names them."""
    newest: Newest = field(default_factory=Newest)
    """The newest times among its rows."""
    counts: Counts = field(default_factory=Counts)
    state_rows: int = 0
    state_bytes: int = 0

    def __add__(self, other: Advanced) -> Advanced:
        return Advanced(
            [*self.files, *other.files],
            self.newest | other.newest,
            self.counts + other.counts,
            self.state_rows + other.state_rows,
            self.state_bytes + other.state_bytes,
        )


class KeyedTable:
    """The table of one stream at `uri`, created if there is none.

    `placement` names the assignment of keys to shards, `stream` the stream that numbers the batches. Raises
    InvalidArgument if the table belongs to another operator, input, placement or stream.
    """

    def __init__(self, uri: str, operator: Operator, schema: pa.Schema, *, placement: str, stream: str = "") -> None:
        self._operator, self._schema = operator, schema
        kind = schema.field(column_of(schema, operator.time)).type
        self._late = pa.struct(list(late_schema(schema, kind)))
        self._output = operator.output_schema(schema)
        if taken := {"kind", "late"} & {*self._output.names}:
            raise InvalidArgument(
                f"the answer has a column {', '.join(sorted(taken))}, which the table reserves: rename it"
            )
        fields = [
            *(each.with_nullable(True) for each in self._output),
            pa.field("late", self._late),
            pa.field("kind", pa.utf8()),
        ]
        described = {DESCRIPTION: operator.describe(), PLACEMENT: placement, STREAM: stream, ROWS: _words(schema)}
        self.table: TableHandle = create_table(uri, pa.schema(fields), partition_by=["kind"], configuration=described)
        found = {name: self.table.configuration.get(name) for name in described}
        if found[DESCRIPTION] != described[DESCRIPTION]:
            raise InvalidArgument(
                f"{uri} is the table of another operator, whose state has another meaning: use another table"
            )
        if found[ROWS] != described[ROWS]:
            raise InvalidArgument(
                f"the rows were {found[ROWS]} when {uri} was created, and are {described[ROWS]}:"
                " select the columns that the operator"
                " needs, by name, so that new columns are not included, or use another table"
            )
        if found[PLACEMENT] != placement:
            raise InvalidArgument(
                f"{uri} assigns keys to shards by {found[PLACEMENT]}, not by {placement}:"
                " use the same number of shards, or another table"
            )
        if found[STREAM] != stream:
            raise InvalidArgument(
                f"{uri} belongs to another query, or to another checkpoint of this one, with other batch numbers:"
                " continue with that checkpoint, or use another table"
            )

    def base(self) -> Base:
        """Return the stream's position at the table's newest version."""
        self.table.refresh()
        batches, batch, left, right, ended = (self.table.app_version(each) for each in _IDS)
        found: dict[tuple[int, str], tuple[int, str]] = {}
        stale = []
        for path in sorted(each for each in self.table.live_files() if each.startswith("kind=state/")):
            parts = path.rpartition("/")[2].split("-")
            if len(parts) != 4:
                raise TableDamaged(
                    f"{path} of {self.table.uri} is not this stream's state: another program has rewritten the table"
                    " (OPTIMIZE takes"
                    " WHERE kind = 'output'). Restore the version before that, or start with another table"
                )
            number, shard, name, _ = parts
            before = found.get((int(shard), name))
            if before is not None:
                stale.append(before[1])
            found[int(shard), name] = (int(number), path)
        files = {at: path for at, (_, path) in found.items()}
        return Base(batches, batch - 1, Newest(_time(left), _time(right)), bool(ended), files, stale)

    def state(self, base: Base, shard: int) -> State:
        """Return a shard's state. Raises TableDamaged."""
        return {name: self.table.read(path) for (of, name), path in base.files.items() if of == shard}

    def advance(self, base: Base, shard: int, rows: pa.Table, clock: Clock, *, ended: bool = False) -> Advanced:
        """Take a shard's rows. Raises TableDamaged, and what the operator raises."""
        before = self.state(base, shard)
        watermark = END if ended else clock.watermark(self._operator, base.newest)
        step, newest = clock.advance(self._operator, before, rows, watermark)
        return Advanced(
            self._write(base, shard, before, step),
            newest,
            step.counts,
            sum(each.num_rows for each in step.state.values()),
            sum(each.nbytes for each in step.state.values()),
        )

    def _write(self, base: Base, shard: int, before: State, step: Step) -> list[FileAction]:
        # Names of letters, digits and dashes only: delta-rs does not find others again when it merges files.
        files = [
            self._put(f"kind=state/{base.batches + 1:012d}-{shard}-{name}-{uuid.uuid4().hex}.parquet", table, "state")
            for name, table in step.state.items()
            if table is not before.get(name)
        ]
        if step.output.num_rows:
            name = f"kind=output/{base.batches + 1:012d}-{shard}-{uuid.uuid4().hex}.parquet"
            files.append(self._put(name, step.output, "output"))
        if step.late.num_rows:
            late = pa.table({"late": step.late.to_struct_array().cast(self._late)})
            name = f"kind=late/{base.batches + 1:012d}-{shard}-{uuid.uuid4().hex}.parquet"
            files.append(self._put(name, late, "late"))
        hit("keyed.written")
        return files

    def commit(self, base: Base, batch: int, taken: Advanced, *, ended: bool = False) -> None:
        """Commit a batch atomically. Raises CommitFenced if another commit was first, and as commit_fenced."""
        if base.batches % _TIDY_EVERY == _TIDY_EVERY - 1:
            try:
                self.tidy()  # before: the answers of the newest batch stay in files of their own (:meth:`answers_of`)
            except TableUnavailable:
                _log.exception("%s was not tidied; it is tried again %d batches on", self.table.uri, _TIDY_EVERY)
        versions = (base.batches, base.batch + 1, *_versions(base.newest), int(base.ended))
        following = (base.batches + 1, batch + 1, *_versions(base.newest | taken.newest), int(ended))
        moves = {app: AppTransaction(*each) for app, *each in zip(_IDS, versions, following, strict=True)}
        commit_fenced(self.table, [CommitPart(adds=list(taken.files), app_transactions=moves)]).raise_if_fenced()
        hit("keyed.committed")
        if following[0] % _DROP_EVERY == 0:
            # Without a change of data, so that streaming readers of the answers skip it.
            stale = self.base().stale
            commit_fenced(self.table, [CommitPart(removes=stale)], data_change=False)

    def tidy(self, keep_hours: int = _KEEP_HOURS) -> None:
        """Merge small files of answers and late rows, and remove files that no version of the last hours names."""
        for kind in ("output", "late"):
            self.table.compact([("kind", "=", kind)])
        self.table.vacuum(keep_hours, full=True)

    def answers_of(self, batch: int) -> tuple[pa.Table, pa.Table] | None:
        """Return answers and late rows of the last committed batch if that is `batch`, otherwise None."""
        base = self.base()
        return (
            (self._answers(f"{base.batches:012d}-"), self._late_rows(f"{base.batches:012d}-"))
            if base.batch == batch
            else None
        )

    def answers(self) -> pa.Table:
        """Return all answers so far."""
        return self._answers("")

    def late(self) -> pa.Table:
        """Return all late rows so far."""
        return self._late_rows("")

    def _answers(self, prefix: str) -> pa.Table:
        return self._rows("output", prefix).select(self._output.names).cast(self._output)

    def _late_rows(self, prefix: str) -> pa.Table:
        column = self._rows("late", prefix).column("late").combine_chunks()
        return (
            pa.Table.from_batches(
                [pa.RecordBatch.from_struct_array(each) for each in column.chunks], pa.schema(list(self._late))
            )
            if isinstance(column, pa.ChunkedArray)
            else pa.Table.from_struct_array(column)
        )

    def _rows(self, kind: str, prefix: str) -> pa.Table:
        self.table.refresh()
        names = [each for each in self.table.live_files() if each.startswith(f"kind={kind}/{prefix}")]
        schema = pa.schema([each for each in self.table.schema if each.name != "kind"])
        return self.table.read_rows(sorted(names), schema)

    def _put(self, name: str, rows: pa.Table, kind: str) -> FileAction:
        file = ParquetFileWriter(self.table.store, name, rows.schema, options={"compression": "zstd"})
        try:
            file.write(rows)
            return file.close({"kind": kind}, ())
        except BaseException:
            file.discard()
            raise


def _versions(newest: Newest) -> tuple[int, int]:
    """Return times as versions of app ids; 0 means none."""
    left, right = (0 if each is None else each + _ZERO for each in (newest.left, newest.right))
    return left, right


def _time(version: int) -> int | None:
    """Return the time of an app id's version: the inverse of :func:`_versions`."""
    return version - _ZERO if version else None


def _words(schema: pa.Schema) -> str:
    return ", ".join(f"{each.name} {each.type}" for each in schema)
