"""A collection of LETTERS as the place of a flow's dead letters, instead of an error topic.

A letter has the whole record, so that a redrive uses the id and version of the first attempt. Its key is the record's
position and a digest of the record's key, so a repeated range replaces its letters. The letters are durable before the
offsets move.

A redrive sends the records first and deletes their letters after the sink has acknowledged them. If it is killed in
between, the next one sends records again, which is idempotent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa

from millrace.base.errors import (
    CollectionNotFound,
    InvalidArgument,
    MillraceError,
    SinkBusy,
    SinkRefused,
)
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.client.collection import Collection
from millrace.client.consume.dead_letters import put_letters
from millrace.client.database import Database, connect
from millrace.flows.batch import outside_of_ranges
from millrace.flows.declare.flow import Flow
from millrace.flows.errors.letter import RECORD, SHOWN, Letter, Redriven, of_collection
from millrace.flows.errors.selection import Selection
from millrace.flows.isolation import write_apart
from millrace.flows.range_host.lookups import CollectionRows
from millrace.flows.range_host.tried import FEARED, tried
from millrace.flows.records import Failure, Record
from millrace.flows.registry import sink_of
from millrace.flows.sinks.collection.poison import LETTERS, arrow_bytes
from millrace.flows.transform.transform import Transform

MOST_SEEN: Final = 5_000
"""Letters that one page reads."""
_KEY: Final = 1_024
"""Bytes of a key that a letter stores if the record is too large."""
_HEADER: Final = pa.struct([("name", pa.utf8()), ("value", pa.binary())])
_RECORD: Final = pa.schema(
    [
        ("topic", pa.utf8()), ("partition", pa.int32()), ("offset", pa.int64()), ("key", pa.binary()),
        ("value", pa.binary()), ("timestamp", pa.int64()), ("headers", pa.list_(_HEADER)), ("omitted", pa.bool_()),
    ]
)  # fmt: skip
"""The payload of a letter. `omitted` means that the value was too large for a message and exists only at the record's
position."""
_AT_ONCE: Final = 500
"""Letters that are read, or sent again, in one batch."""


class ErrorCollection:
    """Writes a task's failures into the collection."""

    def __init__(self, settings: Settings, flow: Flow) -> None:
        assert flow.errors.collection is not None, "the declaration names one"
        self._settings, self._flow, self._name = settings, flow.name, flow.errors.collection
        self._database: Database | None = None
        self._collection: Collection | None = None

    def put(self, failures: Sequence[Failure], *, task: str) -> None:
        """Write the letters of `failures`; all are durable on return.

        Raises SinkBusy, SinkRefused; the position must not move then.
        """
        try:
            if self._collection is None:
                self._database = connect(settings=self._settings)
                self._collection = self._database.collection(self._name)
            put_letters(self._collection, failures, partial(_row, self._flow))
        except MillraceError as error:
            if error.retriable:
                raise SinkBusy(f"dead letters in {self._name}: {error}", retry_after=1.0) from error
            raise SinkRefused(f"dead letters in {self._name}: {error.code}: {error}") from error

    def close(self) -> None:
        """Idempotent."""
        if self._database is not None:
            self._database.close()
        self._database = self._collection = None


def _row(flow: str, failure: Failure, whole: bool) -> dict[str, Any]:
    record = failure.record
    digest = hashlib.sha256(record.key or b"").hexdigest()[:16]
    value, key = (record.value, record.key) if whole else (None, (record.key or b"")[:_KEY])
    letter_fields = {
        "stage": failure.stage,
        "step": failure.step,
        "kind": failure.kind,
        "key": _text(record.key),
        "value": _text(record.value),
        "timestamp": record.timestamp,
        "attempts": failure.attempts,
    }
    headers = [{"name": name, "value": text} for name, text in (record.headers if whole else ())]
    payload = {
        "topic": record.topic, "partition": record.partition, "offset": record.offset, "key": key,
        "value": value, "timestamp": record.timestamp, "headers": headers, "omitted": not whole,
    }  # fmt: skip
    return {
        "id": f"{flow}{RECORD}/{digest}/{record.position}",
        "stream": f"{flow}{RECORD}",
        "batch": record.offset,
        "reason": failure.reason,
        "row": json.dumps(letter_fields),
        "payload": arrow_bytes(pa.Table.from_pylist([payload], schema=_RECORD)),
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value[:SHOWN].decode(errors="replace")


def ensure_collection(settings: Settings, flow: Flow) -> None:
    """Create the collection if necessary and allowed. Raises SinkRefused, LogUnavailable."""
    name = str(flow.errors.collection)
    with connect(settings=settings) as db:
        try:
            found = db.collection(name)
        except CollectionNotFound:
            if not flow.errors.create:
                raise SinkRefused(
                    f"there is no collection {name}: create it with `millrace flows errors create {name}`, or set"
                    " errors.create"
                ) from None
            db.catalog.create_collection(name, LETTERS)
            return
        if not {field.name for field in LETTERS.fields} <= {field.name for field in found.schema.fields}:
            raise SinkRefused(
                f"{name} is not a collection of dead letters: create one with `millrace flows errors create`"
            )


def newest(
    settings: Settings, flow: Flow, selection: Selection, *, before: str = "", limit: int = 50
) -> tuple[list[Letter], str, bool, int]:
    """Return letters of a flow that `selection` takes, newest first.

    Also returns the cursor of the rest (empty after the last letter), whether the search is complete, and the number of
    all letters of the flow. One call reads at most MOST_SEEN letters; the search is not complete if it stopped there.

    Raises CollectionNotFound, InvalidArgument.
    """
    found: list[Letter] = []
    cursor, seen = before, 0
    with connect(settings=settings) as db:
        letters = db.collection(str(flow.errors.collection))
        total = letters.count(where=f"stream = '{flow.name}{RECORD}'")
        while True:
            page = _page(letters, flow.name, cursor, newest_first=True)
            for row, letter in zip(page, of_collection(page), strict=True):
                if len(found) >= limit:
                    return found, cursor, True, total
                cursor = f"{row['batch']},{row['id']}"
                found += [letter] if selection.takes_letter(letter) else []
            seen += len(page)
            if len(page) < _AT_ONCE:
                return found, "", True, total
            if seen >= MOST_SEEN:
                return found, cursor, len(found) >= limit, total


def _page(letters: Collection, flow: str, cursor: str, *, newest_first: bool) -> list[dict[str, Any]]:
    """Return the next letters after `cursor`, ``batch,id`` of the last one, in the order of their positions."""
    where, order = f"stream = '{flow}{RECORD}'", " desc" if newest_first else ""
    if cursor:
        batch, _, name = cursor.partition(",")
        if not batch.isdecimal() or "'" in name:
            raise InvalidArgument(f"{cursor[:60]!r} is not a cursor: pass the `next` of an earlier page")
        sign = "<" if newest_first else ">"
        where += f" AND (batch {sign} {batch} OR batch = {batch} AND id {sign} '{name}')"
    found = letters.read(where=where, order_by=[f"batch{order}", f"id{order}"], limit=_AT_ONCE)
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def redrive_collected(
    settings: Settings,
    flow: Flow,
    selection: Selection,
    *,
    dry_run: bool,
    tell: Callable[[Mapping[str, int]], bool] = lambda counts: False,
) -> Redriven:
    """Send the records of letters through the flow again, oldest first, and delete the letters of those that succeed.

    Calls `tell` with the counts after each batch, and stops if it returns true. Raises CollectionNotFound,
    InvalidArgument, SinkBusy, SinkRefused, LogUnavailable.
    """
    if selection.ids or selection.first or selection.last:
        raise InvalidArgument(
            "letters of a collection have no offsets in a topic: select by step, kind or"
            " reason, or by lane and position"
        )
    made = None if dry_run else _Redrive(settings, flow)
    counts = dict.fromkeys(Redriven._fields, 0)
    cursor = ""
    try:
        with connect(settings=settings) as db:
            letters = db.collection(str(flow.errors.collection))
            while page := _page(letters, flow.name, cursor, newest_first=False):
                cursor = f"{page[-1]['batch']},{page[-1]['id']}"
                chosen = [
                    row for row, each in zip(page, of_collection(page), strict=True) if selection.takes_letter(each)
                ]
                counts["looked_at"] += len(page)
                counts["selected"] += len(chosen)
                if made is not None and (gone := made.run(chosen, counts)):
                    letters.delete(gone)
                if tell(counts):
                    break
    finally:
        if made is not None:
            made.close()
    return Redriven(**counts)


class _Redrive:
    """The steps and the sink of a flow, for records of letters."""

    def __init__(self, settings: Settings, flow: Flow) -> None:
        self._flow, self._open_rows = flow, partial(CollectionRows, settings)
        self._transform = Transform(flow, open_rows=self._open_rows)
        self._sink = sink_of(flow.sink, settings, flow=flow.name, flush=flow.flush)
        self._opened = False

    def run(self, letters: Sequence[dict[str, Any]], counts: dict[str, int]) -> list[str]:
        """Send the records of `letters`; return the ids of letters whose records the sink has or a filter dropped."""
        records: list[tuple[Record, str]] = []
        feared: list[Record] = []
        plain: list[Record] = []
        for letter in letters:
            record = _record(letter)
            if record is None:
                counts["no_origin"] += 1
                continue
            records.append((record, letter["id"]))
            (feared if _kind(letter) in FEARED else plain).append(record)
        chosen, failures = tried(self._flow, feared, self._open_rows) if feared else ([], [])
        done = self._transform.run(sorted([*plain, *chosen], key=_place))
        failures = [*failures, *done.failures]
        if done.actions and not self._opened:
            self._sink.open()
            self._opened = True
        for batch in outside_of_ranges(done.actions):
            verdicts = write_apart(self._sink.write, batch, self._flow.errors)
            failures += [each.as_received() for each in verdicts.failures]
            counts["written"] += verdicts.acknowledged - verdicts.stale
            counts["stale"] += verdicts.stale
        hit("redrive.written")
        counts["filtered"] += done.filtered
        counts["failed_again"] += len(failures)
        stay = {(each.record.position, each.record.key) for each in failures}
        return [name for record, name in records if (record.position, record.key) not in stay]

    def close(self) -> None:
        self._sink.close()


def _place(record: Record) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


def _record(letter: dict[str, Any]) -> Record | None:
    """Return the failed record of a letter; None if its value was too large to be stored."""
    with pa.ipc.open_stream(letter["payload"]) as reader:
        row = reader.read_all().to_pylist()[0]
    if row.pop("omitted"):
        return None
    headers = [(each["name"], each["value"]) for each in row.pop("headers")]
    return Record(**row, headers=headers)


def _kind(letter: dict[str, Any]) -> str:
    return str(json.loads(letter["row"])["kind"])
