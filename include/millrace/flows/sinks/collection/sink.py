"""The sink of a collection: the last document of a key wins, and a document that does not fit is its own failure.

The collection's primary key, which the document contains, identifies a row; a tombstone's key is its record's. Replayed
in order, the same rows result. A collection has no versions: what is sent out of order (a redrive) replaces what is
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

import pyarrow as pa

from millrace.base.errors import MillraceError, PermissionDenied, SinkBusy, SinkRefused
from millrace.base.settings import Settings
from millrace.client.collection import Collection
from millrace.client.database import Database, connect
from millrace.flows.batch import Batch
from millrace.flows.documents import Digits, decoded
from millrace.flows.records import TASK_PUT, Action, Failure
from millrace.flows.sinks.models import CollectionSink as Declared
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.sink import Verdicts, require_some
from millrace.message.schema import CollectionSchema

STEP: Final = "collection"
_RETRY_AFTER: Final = 1.0
_OWN_FAULT: Final = frozenset({"INVALID_ARGUMENT", "MALFORMED", "ENTRY_TOO_LARGE", "APPEND_REJECTED"})


class _Row(NamedTuple):
    action: Action
    key: Any
    row: dict[str, Any] | None


class CollectionSink:
    """Documents of one task into one collection."""

    def __init__(self, settings: Settings, collection: str) -> None:
        self._settings, self._name = settings, collection
        self._database: Database | None = None
        self._collection: Collection | None = None

    def check(self, schema: pa.Schema, /) -> None:
        """As millrace.flows.sinks.sink.Sink says."""

    def open(self) -> None:
        """As millrace.flows.sinks.sink.Sink says."""
        try:
            if self._database is None:
                self._database = connect(self._settings.data_dir, settings=self._settings)
            self._collection = self._database.collection(self._name)
        except MillraceError as error:
            raise self._whole(error) from None

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return nothing: replayed in order, the same rows result."""
        return {}

    def write(self, batch: Batch, /) -> Verdicts:
        """As millrace.flows.sinks.sink.Sink says."""
        actions = batch.documents or ()
        if self._collection is None:
            self.open()
        assert self._collection is not None, "it was opened"
        written = Verdicts(bulks=1 if actions else 0)
        stacks: dict[Any, list[_Row]] = {}
        for action in actions:
            try:
                row = _row(action, self._collection.schema)
            except (ValueError, TypeError, ArithmeticError) as error:
                written.failures.append(Failure(action.record, TASK_PUT, STEP, "ROW", str(error)[:500]))
            else:
                stacks.setdefault(row.key, []).append(row)
        while stacks:
            newest = [stack[-1] for stack in stacks.values()]
            bad = self._apply(newest, self._collection)
            for each in newest:
                stack = stacks[each.key]
                if id(each) in bad:  # the one before it is the key's last, then
                    stack.pop()
                    written.failures.append(Failure(each.action.record, TASK_PUT, STEP, *bad[id(each)]))
                else:
                    written.acknowledged += len(stack)
                    stack.clear()
                if not stack:
                    del stacks[each.key]
        require_some(written, written.failures, f"collection {self._name}")
        return written

    def close(self) -> None:
        """Idempotent."""
        if self._database is not None:
            self._database.close()
            self._database = self._collection = None

    def _apply(self, rows: Sequence[_Row], collection: Collection) -> dict[int, tuple[str, str]]:
        """Rows with a key of their own each; those that are not taken, with kind and reason."""
        bad: dict[int, tuple[str, str]] = {}
        upserts = [each for each in rows if each.row is not None]
        deletes = [each for each in rows if each.row is None]
        self._halved(upserts, lambda part: collection.upsert([each.row for each in part]), bad)
        self._halved(deletes, lambda part: collection.delete([each.key for each in part]), bad)
        return bad

    def _halved(
        self, rows: Sequence[_Row], call: Callable[[Sequence[_Row]], Any], bad: dict[int, tuple[str, str]]
    ) -> None:
        """What is refused together is tried in halves: the rows that fit are taken (again, which is the same)."""
        if not rows:
            return
        kind = reason = ""
        try:
            done = call(rows)
            if not done.rejections:
                return
            kind, reason = "APPEND_REJECTED", str(done.rejections[0])
        except MillraceError as error:
            if isinstance(error, PermissionDenied) or error.retriable or error.code not in _OWN_FAULT:
                raise self._whole(error) from None
            kind, reason = error.code, str(error)
        if len(rows) == 1:
            bad[id(rows[0])] = (kind, reason[:500])
            return
        middle = len(rows) // 2
        self._halved(rows[:middle], call, bad)
        self._halved(rows[middle:], call, bad)

    def _whole(self, error: MillraceError) -> MillraceError:
        if error.retriable:
            after = float(getattr(error, "retry_after", _RETRY_AFTER))
            return SinkBusy(f"collection {self._name}: {error}", retry_after=after)
        return SinkRefused(f"collection {self._name}: {error}")


def _row(action: Action, schema: CollectionSchema) -> _Row:
    """An action as a row with its key. Raises ValueError, TypeError, ArithmeticError with what does not fit."""
    types = {field.name: str(field.type) for field in schema.fields}
    names = schema.key_names
    if action.body is None:
        if len(names) != 1:
            raise ValueError(f"a tombstone's key is one value, and {', '.join(names)} are {len(names)}")
        return _Row(action, _from_json(action.id, types[names[0]], names[0]), None)
    document = decoded(action.body)
    missing = [name for name in names if document.get(name) is None]
    if missing:
        raise ValueError(f"the document has no {', '.join(missing)}, which is the collection's key")
    row = {name: _from_json(value, types.get(name, ""), name) for name, value in document.items()}
    key = row[names[0]] if len(names) == 1 else tuple(row[name] for name in names)
    return _Row(action, key, row)


def _from_json(value: Any, kind: str, name: str) -> Any:
    """A value of a field's type, where JSON has it as text."""
    if not isinstance(value, str):
        if isinstance(value, int | float) and kind.startswith("decimal"):
            return Decimal(value.text if isinstance(value, Digits) else str(value))
        return float(value) if isinstance(value, Digits) else value
    try:
        if kind.startswith("timestamp"):
            return datetime.fromisoformat(value)
        if kind == "date":
            return date.fromisoformat(value)
        if kind.startswith("decimal"):
            return Decimal(value)
        if kind.startswith(("int", "uint")):
            return int(value)
    except (ValueError, InvalidOperation):
        raise ValueError(f"{name}: {value[:80]!r} is no {kind}") from None
    return value


def made(declared: Declared, settings: Settings, *, flow: str, flush: Flush) -> CollectionSink:
    """The sink that flow `flow` declares."""
    return CollectionSink(settings, declared.collection)
