"""Dead letters: rows that could not be processed, as rows of a collection of LETTERS.

Flows put the rows there that their sink refuses (millrace.flows.errors), consumers of a work queue the tasks that were
rejected, or delivered too often. A letter's id follows from the row's place, so a repeated write replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import CollectionNotFound, EntryTooLarge, InvalidArgument, MillraceError
from millrace.catalog.collection import CollectionInfo, check_name
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.wal.reasons import Reason

if TYPE_CHECKING:
    from millrace.client.collection import Collection
    from millrace.client.database import Database

MAX_REASON: Final = 1_000
"""Characters of a letter's reason."""
MAX_TEXT: Final = 65_536
"""Characters of a letter's row."""
SHORT: Final = 4_096
"""Characters of the row in a letter without a payload."""
_AT_ONCE: Final = 500
"""Letters that are read, sent again or deleted at a time."""

_T = TypeVar("_T")

LETTERS: Final = CollectionSchema(
    (
        FieldSpec("id", "string", nullable=False),
        FieldSpec("stream", "string", nullable=False),
        FieldSpec("batch", "int64", nullable=False),
        FieldSpec("reason", "string", nullable=False),
        FieldSpec("row", "string", nullable=False),
        FieldSpec("payload", "binary", nullable=False),
    ),
    "id",
)
"""The schema of a collection of dead letters: `row` is JSON for people, `payload` an Arrow stream to send it again.

A letter that would be too large for the log has no payload: the row itself is where it came from.
"""


class DeadTask(Protocol):
    """A task that becomes a letter."""

    @property
    def id(self) -> str: ...

    @property
    def tick(self) -> int: ...

    @property
    def rows(self) -> pa.RecordBatch: ...


class TaskLetters:
    """The dead letters of one work queue, in the collection `name`, which is made with the first one."""

    def __init__(self, database: Database, name: str, group: str) -> None:
        self._database, self._name, self._group = database, name, group

    @classmethod
    def of(cls, database: Database, name: object, group: str, tasks: CollectionInfo) -> TaskLetters:
        """Return the dead letters of a queue over the collection `tasks`.

        Raises InvalidArgument if the collection `name` holds something else, or could not be created.
        """
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"dead_letters is the name of a collection, not {name!r}")
        try:
            found = database.definition(name)
        except CollectionNotFound:
            check_name(name, "a collection of dead letters")  # names of collections that exist may be older
            return cls(database, name, group)
        if found.id == tasks.id:
            raise InvalidArgument(
                f"the dead letters of {name} would be its next tasks: name another collection, which is made when it"
                " is needed"
            )
        _require_letters(found)
        return cls(database, name, group)

    def write(self, tasks: Iterable[tuple[DeadTask, str]]) -> None:
        """Write tasks with their reasons; they are durable when this returns. Idempotent.

        Raises what creating and writing the collection raises.
        """
        try:
            found = self._database.collection(self._name)
        except CollectionNotFound:
            self._database.catalog.create_collection(self._name, LETTERS, exist_ok=True)
            found = self._database.collection(self._name)
        _require_letters(found.definition)
        put_letters(found, list(tasks), self._letter)

    def _letter(self, dead: tuple[DeadTask, str], whole: bool) -> dict[str, Any]:
        task, reason = dead
        rows = pa.Table.from_batches([task.rows])
        return {
            "id": f"{self._group}/{task.id}",
            "stream": self._group,
            "batch": task.tick,
            "reason": reason_text(reason),
            **row_fields(rows, whole=whole),
        }


def put_letters(
    collection: Collection, dead: Sequence[_T], letter: Callable[[_T, bool], dict[str, Any]], *, whole: bool = True
) -> None:
    """Write letters; all are durable on return. `letter` makes one, without what makes it large if its second is False.

    One that is too large for the log concerns no other. Raises what writing raises.
    """
    if not dead:
        return
    try:
        rows = [letter(each, whole) for each in dead]
        collection.upsert(pa.Table.from_pylist(rows, schema=LETTERS.arrow())).checked()
    except MillraceError as error:
        large = error.code == EntryTooLarge.code or getattr(error, "reason", "") == str(Reason.TOO_LARGE)
        if not large or (len(dead) == 1 and not whole):
            raise
        if len(dead) == 1:
            put_letters(collection, dead, letter, whole=False)
            return
        middle = len(dead) // 2
        put_letters(collection, dead[:middle], letter)
        put_letters(collection, dead[middle:], letter)


def row_fields(row: pa.Table, *, whole: bool = True) -> dict[str, Any]:
    """Return the fields `row` and `payload` of a letter; not `whole`: without the payload."""
    text = json.dumps(row.to_pylist()[0], default=str)
    return {"row": text[: MAX_TEXT if whole else SHORT], "payload": arrow_bytes(row) if whole else b""}


def reason_text(reason: str) -> str:
    """Return a reason as a letter has it: short, and without parts of characters, which no UTF-8 has."""
    return reason[:MAX_REASON].encode("utf-8", "replace").decode()


def _require_letters(collection: CollectionInfo) -> None:
    if collection.schema.arrow() != LETTERS.arrow():
        raise InvalidArgument(
            f"{collection.name} is no collection of dead letters: name another one, which is made when it is needed"
        )


def redrive_tasks(database: Database, letters: str, *, group: str, into: str, reason: str = "") -> int:
    """Send the dead letters of a work queue again, as new tasks of the collection `into`; return how many.

    `reason`: only those whose reason contains it. A letter is deleted once its row is in the collection. If this is
    interrupted, some rows are sent twice. A letter without a payload stays.
    Raises CollectionNotFound, and what writing raises.
    """
    source, target, count = _letters(database, letters), database.collection(into), 0
    for page in _pages(source, group, reason):
        part = page.filter(pc.greater(pc.binary_length(page["payload"]), 0))
        if not part.num_rows:
            continue
        for rows in _rows_of(part):
            target.upsert(rows).checked()
        source.delete(part["id"].to_pylist()).checked()
        count += part.num_rows
    return count


def discard_tasks(database: Database, letters: str, *, group: str, reason: str = "") -> int:
    """Delete the dead letters of a work queue whose reason contains `reason`; return how many.

    Raises CollectionNotFound, and what writing raises.
    """
    source, count = _letters(database, letters), 0
    for part in _pages(source, group, reason):
        source.delete(part["id"].to_pylist()).checked()
        count += part.num_rows
    return count


def dead_tasks(database: Database, letters: str, *, group: str, reason: str = "", limit: int = 100) -> pa.Table:
    """Return up to `limit` dead letters of a work queue whose reason contains `reason`, as rows of LETTERS."""
    found: list[pa.Table] = []
    for part in _pages(_letters(database, letters), group, reason):
        found.append(part)
        if sum(each.num_rows for each in found) >= limit:
            break
    return pa.concat_tables([LETTERS.arrow().empty_table(), *found]).slice(0, limit)


def _letters(database: Database, name: str) -> Collection:
    found = database.collection(name)
    if found.definition.schema.arrow() != LETTERS.arrow():
        raise InvalidArgument(f"{name} is no collection of dead letters: its columns are others")
    return found


def _pages(source: Collection, group: str, reason: str) -> Iterator[pa.Table]:
    """Yield a queue's letters that exist now in the order of their ids, a bounded number at a time."""
    last, at = f"{group}/", source.database.current_tick(source.definition.pchannels)
    while True:
        where = f"stream = '{_quoted(group)}' and id > '{_quoted(last)}' and id < '{_quoted(group)}0'"  # 0 follows /
        page = source.read(at=at, where=where, order_by=["id"], limit=_AT_ONCE)
        if not page.num_rows:
            return
        last = page["id"][-1].as_py()
        chosen = page.filter(pc.match_substring(page["reason"], reason)) if reason else page
        if chosen.num_rows:
            yield chosen
        if page.num_rows < _AT_ONCE:
            return


def _rows_of(letters: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of letters, together those of one schema."""
    found: dict[str, list[pa.Table]] = {}
    for payload in letters["payload"].to_pylist():
        with pa.ipc.open_stream(payload) as stream:
            rows = stream.read_all()
        found.setdefault(rows.schema.to_string(), []).append(rows)
    for tables in found.values():
        yield pa.concat_tables(tables)


def _quoted(text: str) -> str:
    return text.replace("'", "''")


def arrow_bytes(table: pa.Table) -> bytes:
    """Return a table as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue().to_pybytes())
