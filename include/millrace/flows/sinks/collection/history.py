"""The history of a collection's keys: a row for each change, valid from one moment to the next (SCD type 2).

Changes of a key are ordered by their *sequence*, whatever order they come in. The rows of a key are a function of its
changes alone: a late change splits the interval that it falls into, a change that comes again changes nothing, and of
several changes with one sequence the last that comes counts. So each change is stored, also one that makes no version
(a delete, a change of columns that are not tracked): its row has an empty interval, ``valid_from = valid_to``.

The key of a row is the key of the source and a number, `version`. The newest change by sequence has the number 0; the
others are numbered from 1 in the order in which they left that place or came late. The row with the number 0 knows how
many others there are. So a change in order costs one row read and two written. A late one reads all rows of its key.

With a *horizon*, changes that say nothing about a moment after it are removed: of the changes of a key up to the
horizon all but the newest. So at each moment after the horizon the history is still what all changes give. A late
change before that newest one says nothing about such a moment either, and is left out. A number always belongs to one
change, so rows can be removed while another lane writes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument, SinkRefused
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import conform
from millrace.flows.conversion import row_of, value_of
from millrace.flows.documents import decoded
from millrace.flows.records import TASK_PUT, Action, Failure
from millrace.flows.sinks.collection.model import ALL_COLUMNS, History
from millrace.flows.sinks.collection.placed import separate
from millrace.message.keys import key_column, vchannel_index
from millrace.message.schema import CollectionSchema, FieldSpec, normalize_key_names

Row: TypeAlias = dict[str, Any]
STEP: Final = "collection"
ROWS_AT_ONCE: Final = 50_000
"""Rows of keys with late changes that are read at once, unless one key has more."""
_CLOCKS: Final = ("int64", "timestamp", "timestamp_ntz")
"""Types of a sequence that the source gives: its position, or the records' time."""
_SPARE: Final = 16
"""Numbers of removed changes that a late change asks for besides twice those that are there."""
_TIMES: Final = ("timestamp", "timestamp_ntz", "date")
"""Types of a sequence that a horizon is measured on."""


class Change(NamedTuple):
    """A change of a key, as a row of the collection with the number 0."""

    key: tuple[Any, ...]
    row: Row
    place: int
    """The position of its document."""


class Written(NamedTuple):
    """A row to write, and the position of a document that it comes from."""

    row: Row
    place: int


class Revised(NamedTuple):
    """What changes do to a history."""

    rows: list[Written]
    late: int
    """Changes that were left out: they are beyond the horizon."""


Find: TypeAlias = Callable[[Sequence[Row]], Sequence[Row]]
"""Returns the rows of some primary keys (rows of the key's columns)."""
Select: TypeAlias = Callable[[str, Sequence[str], int | None], Iterable[pa.RecordBatch]]
"""Yields these columns of the rows of a predicate, or of so many of them, in batches."""
ROWS_IN_HAND: Final = 1_000_000
"""Rows that decide about changes without a version, in one look for rows beyond the horizon."""
BUCKETS: Final = 1024
"""Buckets of keys at most: one key may have more rows than ROWS_IN_HAND."""


class Expired(NamedTuple):
    """Rows beyond the horizon."""

    rows: pa.Table
    """Their primary keys."""
    buckets: int
    """Calls, with as many turns, that look at all keys."""


class _Bucket:
    """Rows of a part of the keys, by name: of fewer keys as there are more rows."""

    def __init__(self, key: Sequence[str], turn: int) -> None:
        self._key, self._turn = list(key), turn
        self.count, self.rows = 1, 0
        self._parts: dict[str, list[pa.Table]] = {}

    def add(self, name: str, batches: Iterable[pa.RecordBatch]) -> None:
        for each in batches:
            part = self._mine(pa.Table.from_batches([each]))
            self._parts.setdefault(name, []).append(part)
            self.rows += len(part)
            while self.rows > ROWS_IN_HAND and self.count < BUCKETS:
                self.count *= 2  # those of the smaller buckets are of this one
                self._parts = {
                    known: [pa.concat_tables([self._mine(part) for part in parts]).combine_chunks()]
                    for known, parts in self._parts.items()
                }
                self.rows = sum(len(part) for parts in self._parts.values() for part in parts)

    def _mine(self, rows: pa.Table) -> pa.Table:
        if self.count == 1 or not len(rows):
            return rows
        places = vchannel_index(key_column(rows, self._key), self.count) == self._turn % self.count
        return rows.filter(pa.array(places))

    def table(self, name: str) -> pa.Table:
        parts = self._parts.get(name)
        return pa.concat_tables(parts) if parts else pa.table({})


class KeyHistory:
    """The rules of one history, for a collection of some schema."""

    def __init__(self, history: History, collection: CollectionInfo, *, now: float | None = None) -> None:
        """`now` is the time that a horizon is measured from, in seconds since 1970; None: the present.

        Raises SinkRefused if the collection lacks a field, with what to do.
        """
        self._history, self._collection = history, collection
        schema = collection.schema
        types = {field.name: field.type for field in schema.fields}
        wanted = {
            history.version: "int64", history.versions: "int64", history.deleted: "bool", history.current: "bool"
        }  # fmt: skip
        for name, kind in wanted.items():
            if types.get(name) != kind:
                raise _refused(collection, f"has no field {name!r} of type {kind}")
        if schema.key_names[-1] != history.version or len(schema.key_names) < 2:
            raise _refused(collection, f"its primary key is not the source's key and then {history.version!r}")
        clock = types.get(history.changed_at)
        if clock is None:
            raise _refused(collection, f"has no field {history.changed_at!r}, which has a change's sequence")
        if history.sequence is None and clock not in _CLOCKS:
            words = f"{history.changed_at!r} is {clock}; without history.sequence it is one of {', '.join(_CLOCKS)}"
            raise _refused(collection, words)
        for name in (history.valid_from, history.valid_to):
            if types.get(name) != clock:
                raise _refused(collection, f"has no field {name!r} of type {clock}, as {history.changed_at!r} has")
        if history.horizon_days is not None and types.get(history.oldest) != "int64":
            words = f"run `millrace collections alter {collection.name} --add '{history.oldest}:int64?'`"
            raise _refused(collection, f"has no field {history.oldest!r} of type int64, which a horizon needs: {words}")
        if history.horizon_days is not None and clock not in _TIMES:
            words = f"{history.changed_at!r} is {clock}, and history.horizon_days needs one of {', '.join(_TIMES)}"
            raise _refused(collection, words)
        self._horizon: Any = None if history.horizon_days is None else _before(history.horizon_days, now, clock)
        self.key = schema.key_names[:-1]
        own = history.own
        strict = [
            each.name
            for each in schema.fields
            if not each.nullable and each.computed is None and each.name not in {*own, *schema.key_names}
        ]
        empty = [history.valid_to, history.versions, *([] if self._horizon is None else [history.oldest])]
        for name in (*strict, *(each for each in empty if not _nullable(schema, each))):
            raise _refused(
                collection, f"the field {name!r} is not nullable: a delete, or an open interval, has no value"
            )
        self._clock = clock
        self._types = types
        self._plain = CollectionSchema(
            tuple(FieldSpec(each.name, each.type, each.nullable) for each in schema.fields if each.name not in own),
            normalize_key_names(self.key),
        )
        others = {*own, *self.key, history.sequence}
        values = [each.name for each in schema.fields if each.name not in others and each.computed is None]
        unknown = sorted(set(history.columns) - {ALL_COLUMNS, *types})
        if unknown:
            raise _refused(collection, f"has no field {unknown[0]!r}, which history.columns names")
        self._tracked = values if ALL_COLUMNS in history.columns else list(history.columns)
        self._columns = values

    # --- documents ---------------------------------------------------------------------------------------------------

    def changes(self, documents: Sequence[Action]) -> tuple[list[Change], list[Failure]]:
        """Return documents as changes, in their order, and a failure for each that does not fit."""
        rows: list[tuple[Action, Row]] = []
        failures: list[Failure] = []
        for action in documents:
            try:
                rows.append((action, self._row(action)))
            except (ValueError, TypeError, ArithmeticError) as error:
                failures.append(Failure(action.record, TASK_PUT, STEP, "ROW", str(error)[:500]))
        table: list[pa.Table] = []

        def fits(part: Sequence[tuple[Action, Row]]) -> None:
            table[:] = [conform([row for _, row in part], self._collection)]

        if not rows:
            return [], failures
        try:
            fits(rows)
        except InvalidArgument:
            rows, misfits = separate(rows, fits)
            failures += misfits
            if not rows:
                return [], failures
            fits(rows)
        stored = table[0].to_pylist()  # the values as they are read back, so that the two compare equal
        found = [
            Change(tuple(row[name] for name in self.key), row, action.record.offset)
            for row, (action, _) in zip(stored, rows, strict=True)
        ]
        return found, failures

    def _row(self, action: Action) -> Row:
        history = self._history
        gone = action.body is None
        marker: Any = None
        if action.body is not None:
            document = decoded(action.body)
            taken = sorted(set(document) & set(history.own))
            if taken:
                raise ValueError(f"the document has a field {taken[0]!r}, which is the history's: name that otherwise")
            gone = any(document.get(name) in values for name, values in history.deletes.items())
            marker = None if history.sequence is None else document.get(history.sequence)
        keyed = row_of(action, self._plain)
        key = keyed.key if isinstance(keyed.key, tuple) else (keyed.key,)
        sequence = self._of_record(action) if history.sequence is None else marker
        if sequence is None:
            raise ValueError(
                f"a change without {history.sequence!r} has no place in the history"
                if action.body is not None
                else "a tombstone has no sequence: declare history.deletes, or tombstones: ignore"
            )
        if history.sequence is not None:
            sequence = value_of(sequence, self._clock, history.sequence)
        row = {name: value for name, value in (keyed.row or {}).items() if not gone or name in self.key}
        for name in (history.sequence, *history.deletes):
            if name is not None and name not in self._types:
                row.pop(name, None)
        row |= dict(zip(self.key, key, strict=True))
        if gone:
            row = {**dict.fromkeys(self._columns), **row}
            if history.sequence in self._types:
                row[history.sequence] = sequence
        row |= {} if self._horizon is None else {history.oldest: None}
        return {
            **row, history.version: 0, history.versions: 0, history.deleted: gone, history.current: not gone,
            history.changed_at: sequence, history.valid_from: sequence, history.valid_to: None,
        }  # fmt: skip

    def _of_record(self, action: Action) -> Any:
        if self._clock == "int64":
            return action.record.offset
        found = pa.scalar(max(0, action.record.timestamp) * 1000, pa.timestamp("us", tz="UTC")).as_py()
        return found if self._clock == "timestamp" else found.replace(tzinfo=None)

    # --- rows --------------------------------------------------------------------------------------------------------

    def revise(self, changes: Sequence[Change], find: Find, *, again: bool = False) -> Revised:
        """Return the rows to write for `changes`, of which a later one of a key and a sequence counts.

        `again`: they are older than what the collection has, as those of a redrive. Without a sequence of their own
        they then replace nothing.
        """
        by_key: dict[tuple[Any, ...], list[Change]] = {}
        for each in changes:
            by_key.setdefault(each.key, []).append(each)
        heads = self._by_key(find([self._place(key, 0) for key in by_key]))
        found = Revised([], 0)
        late: list[tuple[tuple[Any, ...], range]] = []
        for key, mine in by_key.items():
            head = heads[key][0] if key in heads else None
            if head is not None and self._needs_all(head, mine):
                late.append((key, range(self._oldest(head), head[self._history.versions] + 1)))
            else:
                found = self._revised(found, [] if head is None else [head], mine, again=again)
        for part in _portions(late):
            wanted = [self._place(key, number) for key, numbers in part for number in numbers]
            some = [find(wanted[at : at + ROWS_AT_ONCE]) for at in range(0, len(wanted), ROWS_AT_ONCE)]
            rows = self._by_key([row for each in some for row in each])
            for key, _ in part:
                found = self._revised(found, [heads[key][0], *rows.get(key, ())], by_key[key], again=again)
        return found

    def _oldest(self, head: Row) -> int:
        """Return the smallest number of the other changes of a key, or a smaller one."""
        return int(head.get(self._history.oldest) or 1) if self._horizon is not None else 1

    @property
    def is_current(self) -> str:
        """The predicate of rows that are valid now."""
        return f"{self._history.current} = true"

    def closings(self, whole: Action, current: Iterable[pa.RecordBatch]) -> list[Change]:
        """Return a delete for each of the keys `current`, all of which the truncation `whole` removes.

        Raises SinkRefused if changes have a sequence of their own, which a truncation has not.
        """
        if self._history.sequence is not None:
            raise SinkRefused(
                f"collection {self._collection.name}: the source was emptied, and that has no {self._history.sequence}"
                " by which the history could place it: leave out history.sequence, or set the flow's position after it"
            )
        record = whole.record
        if record.timestamp <= 0:
            record = record._replace(timestamp=time.time_ns() // 1_000_000)
        found = []
        for batch in current:
            for key in batch.to_pylist():
                gone = self._row(Action(record, self._key_text(key), None, None)) | key
                found.append(Change(tuple(key[name] for name in self.key), gone, record.offset))
        return found

    def _place(self, key: Sequence[Any], number: int) -> Row:
        return {**dict(zip(self.key, key, strict=True)), self._history.version: number}

    def _by_key(self, rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            found.setdefault(tuple(row[name] for name in self.key), []).append(row)
        return found

    def _needs_all(self, head: Row, changes: Sequence[Change]) -> bool:
        """Return whether a change is not after the newest one of its key, and is not that one again."""
        at = self._history.changed_at
        return any(
            each.row[at] < head[at] or (each.row[at] == head[at] and not self._same_change(each.row, head))
            for each in changes
        )

    def _revised(self, found: Revised, known: Sequence[Row], changes: Sequence[Change], *, again: bool) -> Revised:
        """Return `found` with the rows of one key that `changes` change.

        `known` are all rows of the key, or the newest one if no change is before it.
        """
        at, history = self._history.changed_at, self._history
        points = {row[at]: row for row in known}
        newest, late, horizon = max(points, default=None), found.late, self._horizon
        base = None if horizon is None else max((each for each in points if each <= horizon), default=None)
        for each in changes:
            row, when = each.row, each.row[at]
            if history.sequence is None and again and when in points:
                continue
            if history.sequence is None and not again and newest is not None and when < newest:
                when = newest  # by a clock that went back
            before = points.get(when)
            if before is not None and self._same_change({**row, at: when}, before):
                continue
            if base is not None and when < base:  # it says nothing about a moment after the horizon
                late += 1
                continue
            number = {} if before is None else {name: before[name] for name in (history.version, history.versions)}
            points[when] = {**row, at: when, **({history.version: None} if before is None else number)}
            newest = when if newest is None else max(newest, when)
            if horizon is not None and when <= horizon:
                base = when
        ordered = [points[when] for when in sorted(points)]
        by_version = {row[history.version]: row for row in known}
        count = max((row[history.versions] or 0 for row in known), default=0)
        rows = self._intervals(ordered, known)
        for row in rows[:-1]:
            if not row[history.version]:  # a new one, or the newest one until now
                count += 1
                row[history.version] = count
            row[history.versions] = None
        rows[-1] |= {history.version: 0, history.versions: count}
        if self._horizon is not None:
            self._note_oldest(rows, known, count)
        place = max(each.place for each in changes)
        found.rows.extend(Written(row, place) for row in rows if by_version.get(row[history.version]) != row)
        return found._replace(late=late)

    def _note_oldest(self, rows: Sequence[Row], known: Sequence[Row], count: int) -> None:
        """Let the newest row know where the numbers of the others begin, once many before that are removed."""
        history = self._history
        oldest = max((self._oldest(row) for row in known), default=1)
        if len(known) > 1 and count - oldest > 2 * len(rows) + _SPARE:
            oldest = min((row[history.version] for row in rows[:-1]), default=count + 1)
        for row in rows:
            row[history.oldest] = None
        if oldest > 1:
            rows[-1][history.oldest] = oldest

    def _intervals(self, points: Sequence[Row], known: Sequence[Row]) -> list[Row]:
        """Return the points with their intervals. `known` are rows of the key as they are stored.

        The first of them may belong to a version that began before it, with changes that are not known.
        """
        history, found = self._history, []
        first = min((row[history.changed_at] for row in known), default=None)
        begun = min((row[history.valid_from] for row in known), default=None)
        start: Any = None
        for number, point in enumerate(points):
            at, gone = point[history.changed_at], point[history.deleted]
            before = points[number - 1] if number else None
            after = points[number + 1] if number + 1 < len(points) else None
            if before is None:
                start = begun if at == first else at
            elif not self._unchanged(before, point):
                start = at
            hidden = gone or (after is not None and self._unchanged(point, after))
            end = at if hidden else None if after is None else after[history.changed_at]
            found.append(
                {
                    **point,
                    history.valid_from: at if hidden else start,
                    history.valid_to: end,
                    history.current: after is None and not gone,
                }
            )
        return found

    # --- the horizon -------------------------------------------------------------------------------------------------

    def expired(self, select: Select, *, most: int, turn: int = 0) -> Expired:
        """Return primary keys of rows that say nothing about a moment after the horizon; `most` of ended versions.

        None of them is the newest of its key, and nobody writes them again but for a moment with what they are.

        Which changes without a version are left over, only the other rows of their keys tell. Keys are divided into as
        many buckets as keep those rows below ROWS_IN_HAND, and a call looks at one: `turn` chooses it.
        """
        history = self._history
        names = [*self.key, history.version]
        limit = f"'{self._horizon.isoformat()}'"
        at, begins, ends, number = (
            f"`{name}`" for name in (history.changed_at, history.valid_from, history.valid_to, history.version)
        )
        bucket, key, when = _Bucket(self.key, turn), list(self.key), history.changed_at
        # Changes without a version: those before the newest one of their key at the horizon.
        bucket.add("hidden", select(f"{ends} = {begins} AND {number} > 0 AND {at} <= {limit}", [*names, when], None))
        if bucket.rows:
            bucket.add("valid", select(f"{number} > 0 AND {at} <= {limit} AND {ends} > {limit}", [*key, when], None))
            bucket.add("moved", select(f"{number} = 0 AND {at} > {limit}", key, None))
        closed = [
            pa.Table.from_batches([each]).select(names)
            for each in select(f"{ends} <= {limit} AND {ends} > {begins}", names, most)
            if each.num_rows
        ]
        hidden = bucket.table("hidden")
        if not len(hidden):
            none = self._collection.schema.arrow().empty_table().select(names)
            return Expired(pa.concat_tables(closed) if closed else none, bucket.count)
        known = [each.select([*key, when]) for each in (hidden, bucket.table("valid")) if len(each)]
        newest = pa.concat_tables(known).group_by(key).aggregate([(when, "max")])
        joined = hidden.join(newest, keys=key)
        replaced = pc.less(joined[when], joined[f"{when}_max"])
        resting = joined.filter(pc.invert(replaced))
        if len(moved := bucket.table("moved")):
            resting = resting.join(moved.group_by(key).aggregate([]), keys=key, join_type="left anti")
        found = [*closed, joined.filter(replaced).select(names), resting.select(names)]
        return Expired(pa.concat_tables([each.cast(found[0].schema) for each in found]), bucket.count)

    def _unchanged(self, before: Row, after: Row) -> bool:
        """Return whether two rows that follow each other are one version."""
        if not self._tracked or before[self._history.deleted] or after[self._history.deleted]:
            return False
        return all(_equal(before[name], after[name]) for name in self._tracked)

    def _same_change(self, one: Row, other: Row) -> bool:
        names = [self._history.changed_at, self._history.deleted, *self._columns]
        return all(_equal(one[name], other[name]) for name in names)

    def _key_text(self, row: Row) -> str:
        values = [row[name] for name in self.key]
        return str(values[0]) if len(values) == 1 else json.dumps(values, default=str)


def history_schema(schema: CollectionSchema, history: History | None = None, *, clock: str) -> CollectionSchema:
    """Return the schema of the history of a collection with `schema`; `clock` is the type of the sequence."""
    named = history or History()
    own = (
        FieldSpec(named.version, "int64", nullable=False), FieldSpec(named.valid_from, clock, nullable=False),
        FieldSpec(named.valid_to, clock, nullable=True), FieldSpec(named.current, "bool", nullable=False),
        FieldSpec(named.changed_at, clock, nullable=False), FieldSpec(named.deleted, "bool", nullable=False),
        FieldSpec(named.versions, "int64", nullable=True),
        *([] if named.horizon_days is None else [FieldSpec(named.oldest, "int64", nullable=True)]),
    )  # fmt: skip
    key = schema.key_names
    fields = tuple(replace(each, nullable=each.name not in key, columns=(), part_names=()) for each in schema.fields)
    return CollectionSchema((*fields, *own), (*key, named.version))


def _nullable(schema: CollectionSchema, name: str) -> bool:
    return next(field.nullable for field in schema.fields if field.name == name)


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))  # NaN equals itself


def _portions(late: Sequence[tuple[tuple[Any, ...], range]]) -> list[list[tuple[tuple[Any, ...], range]]]:
    found: list[list[tuple[tuple[Any, ...], range]]] = []
    size = 0
    for each in late:
        if not found or size + len(each[1]) > ROWS_AT_ONCE:
            found.append([])
            size = 0
        found[-1].append(each)
        size += len(each[1])
    return found


def _before(days: float, now: float | None, clock: str) -> Any:
    """Return the moment `days` before `now`, as a sequence of the type `clock` has it."""
    found = datetime.fromtimestamp(time.time() if now is None else now, UTC) - timedelta(days=days)
    if clock == "date":
        return found.date()
    return found if clock == "timestamp" else found.replace(tzinfo=None)


def _refused(collection: CollectionInfo, words: str) -> SinkRefused:
    return SinkRefused(
        f"collection {collection.name} cannot have a history: {words}."
        " docs/history.md lists the fields that a history needs"
    )
