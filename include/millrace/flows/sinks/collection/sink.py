"""The sink of a collection: a batch's rows or documents as messages, by the guarantee that was chosen.

    with CollectionSink(settings, "hourly", memory=folder, mode="upsert") as sink:
        sink.write(Batch.of_rows("query", 0, batches))

Modes of rows: ``append`` inserts them. ``upsert`` replaces the rows of their keys (the last of several of one key
counts). ``changes`` applies the column ``_change``: insert and upsert replace the row of the key, delete removes it,
and a retract removes everything of one of the source's VChannels, which needs a sink with the source's key and as many
VChannels. So a stream of all changes of a collection maintains another one as its mirror.

Documents are upserts by the primary key, which they contain; a tombstone deletes the row of its record's key. A
document that does not fit is its own failure. In a batch that moves its lane's position they take effect exactly once,
by the lane's own journal (millrace.flows.sinks.collection.lane), and what the sink has already is left out. Other
batches (a redrive, a source that can stop only at the end of a range) are effectively once: replayed in order, they
give the same rows. A collection has no versions: what is sent out of order replaces what is there.

A key changes at one tick, but a batch does not: readers may see a part of one. Of a batch that ends with a transaction
of its source, the documents of each VChannel change at one tick. Memory: the batch, as messages.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.closeable import Closeable
from millrace.base.errors import (
    AppendRejected,
    AppendUnresolved,
    ChangesRefused,
    CollectionNotFound,
    InvalidArgument,
    MillraceError,
    ProducerFenced,
    SinkBusy,
    SinkRefused,
)
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.collection import Collection
from millrace.client.database import Database, connect
from millrace.client.produce.producer import Producer
from millrace.client.produce.rows import (
    conform,
    delete_message,
    insert_message,
    key_rows,
    last_of_each_key,
    split_keys,
    split_rows,
)
from millrace.flows.batch import Batch, TableColumns
from millrace.flows.conversion import DOCUMENT_ERRORS, KeyedRow, row_of
from millrace.flows.errors.letters import RefusedRow, RowLetters
from millrace.flows.guarantee import Guarantee, require_guarantee
from millrace.flows.records import TASK_PUT, Action, Failure, is_truncation
from millrace.flows.sinks.collection.atomic import in_transactions
from millrace.flows.sinks.collection.changes import KIND, Folded, fold, ordered
from millrace.flows.sinks.collection.fit import require_fit
from millrace.flows.sinks.collection.follow import OnSchemaChange, create, follow
from millrace.flows.sinks.collection.history import Change, KeyHistory, Row
from millrace.flows.sinks.collection.journal import (
    Division,
    FolderJournal,
    InFlight,
    Journal,
    PlacedMessage,
    Refusals,
)
from millrace.flows.sinks.collection.lane import LaneJournal
from millrace.flows.sinks.collection.model import History
from millrace.flows.sinks.collection.placed import (
    PLACE,
    earlier_row,
    fitting,
    halves,
    placed_deletes,
    placed_documents,
    placed_rows,
    placed_upserts,
    replaced_messages,
    rows_in,
)
from millrace.flows.sinks.collection.poison import MOST, in_order, letters, redriven, shortened, sift
from millrace.flows.sinks.memory import Folder, Noted, create_folder
from millrace.flows.sinks.sink import Verdicts, require_some
from millrace.message import builders
from millrace.message.ids import collection_id_of, pchannel_of
from millrace.message.keys import key_column
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema
from millrace.message.types import MIN_CHAIN_VERSION, MessageType
from millrace.wal.reasons import Reason
from millrace.wal.visible.changes import CHANGE_COLUMNS

Mode = Literal["append", "upsert", "changes"]
MODES: Final[tuple[Mode, ...]] = ("append", "upsert", "changes")
STEP: Final = "collection"
_MISFIT: Final = "INVALID_ARGUMENT"
_RETRY_AFTER: Final = 1.0
EXPIRED_SECONDS: Final = 3600.0
"""Seconds between two searches for rows beyond a history's horizon."""
EXPIRED_LOOKS: Final = 8
"""The most searches in that time, if the keys are too many for one."""
EXPIRED_AT_ONCE: Final = 1_000_000
"""The most versions of one search."""
EXPIRED_A_BATCH: Final = 20_000
"""The most rows that are removed with one batch of documents."""
_OWN_FAULT: Final = frozenset({"INVALID_ARGUMENT", "MALFORMED", "ENTRY_TOO_LARGE", "APPEND_REJECTED"})


_OF_ROWS: Final = frozenset({Reason.CHECK_VIOLATED, Reason.SCHEMA_MISMATCH, Reason.TOO_LARGE})
"""Rejections that one row of a message may cause."""


class _Lane(NamedTuple):
    files: LaneJournal
    journal: Journal


class _Taken(NamedTuple):
    """The documents of a batch: accepted ones, their messages, and failures."""

    documents: Sequence[Action]
    messages: list[MutableMessage]
    failures: list[Failure]
    held: Sequence[PlacedMessage] = ()
    """Messages of documents that later ones of their keys replace."""
    late: int = 0
    """Documents that a history leaves out because they are beyond its horizon."""


class CollectionSink(Closeable):
    """Writes batches into a collection. One thread uses it; one process at a time for a `memory`."""

    def __init__(
        self,
        settings: Settings,
        collection: str,
        *,
        memory: Folder | None = None,
        mode: Mode = "append",
        guarantee: Guarantee = "exactly once",
        partition: str | None = None,
        partition_by: str | None = None,
        dead_letters: str | None = None,
        letters: RowLetters | None = None,
        stream: str = "",
        flow: str = "",
        history: History | None = None,
        create: bool = False,
        on_schema_change: OnSchemaChange = "stop",
    ) -> None:
        """Create a sink; one with a `memory` (a folder of the query's checkpoint) is opened, and accepts rows.

        `flow` is the name of documents' lanes; without one there are no journals of lanes. With `history`, all versions
        of documents' rows are stored (millrace.flows.sinks.collection.history). With `create`, a collection of
        documents is created with the first ones that are rows of a table; `on_schema_change` says whether it follows
        the table's columns.

        `dead_letters` is a collection of LETTERS for rows that do not fit, at which a stream otherwise stops; `stream`
        is the name of their stream. `letters` is another place for them, which gets them before the rest of their batch
        is sent, and again if that is repeated. Raises CollectionNotFound, InvalidArgument, StreamBusy, and the errors
        of completing a batch that an earlier process began.
        """
        require_guarantee(guarantee, "collection")
        if mode not in MODES:
            raise InvalidArgument(f"the mode is one of {', '.join(map(repr, MODES))}, not {mode!r}")
        self._settings = settings
        self._memory = memory
        self._mode = mode
        self._guarantee = guarantee
        self._partitions = (partition, partition_by)
        self._name = collection
        self._letters = dead_letters
        self._row_letters = letters
        self._stream = stream or collection
        self._database: Database | None = None
        self._collection: Collection | None = None
        """Takes documents."""
        self._flow = flow
        self._history = history
        self._create, self._on_schema_change = create, on_schema_change
        self._followed: TableColumns | None = None
        self._gone = pa.table({})
        """Keys of rows beyond the history's horizon that remain to be removed."""
        self._turn = 0
        """The number of the next search, which selects its keys."""
        self._look_at = 0.0
        """When such rows are searched for again."""
        self._lanes: dict[str, _Lane] = {}
        self._journal: Journal | None = None
        self._plain: Producer | None = None
        self._noted = Noted()
        if memory is not None:
            create_folder(memory)
            self._connect()

    def _connect(self) -> None:
        self._database = connect(settings=self._settings)
        try:
            if self._memory is None:
                if not self._create:
                    self._collection = self._client.collection(self._name)
                if self._history is not None and self._collection is not None:
                    KeyHistory(self._history, self._collection.definition)
                return
            for name in filter(None, (self._name, self._letters)):
                self._newest_chain(self._client.definition(name))
            if self._guarantee == "exactly once":
                files = FolderJournal(self._memory, self._name)
                divide = self._divided_rows if self._has_letters else None
                self._journal = Journal(self._client, files, self._name, divide=divide)
                self._journal.resume()
            else:
                self._noted = Noted.load(self._memory) if self._guarantee == "at most once" else self._noted
                self._plain = self._client.new_producer()
        except BaseException:
            self.close()
            raise

    @property
    def _has_letters(self) -> bool:
        return self._letters is not None or self._row_letters is not None

    @property
    def _client(self) -> Database:
        assert self._database is not None, "the sink is open"
        return self._database

    def open(self) -> None:
        """Connect to the collection. Raises as millrace.flows.sinks.sink.Sink."""
        if self._database is None:
            try:
                self._connect()
            except MillraceError as error:
                raise self._whole(error) from None

    def close(self) -> None:
        """Release the server and the folder. Idempotent."""
        for lane in self._lanes.values():
            lane.journal.close()
        self._lanes.clear()
        if self._journal is not None:
            self._journal.close()
        if self._row_letters is not None:
            self._row_letters.close()
        if self._database is not None:
            self._database.close()
        self._database = self._journal = self._plain = self._collection = None

    def check(self, schema: pa.Schema, /) -> None:
        """Raise InvalidArgument if rows of these columns do not fit the collection: a column is unknown or missing."""
        require_fit(schema, self._client.definition(self._name), changes=self._mode == "changes")

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return the position in the memory, for its one lane, or those of the lanes that this sink owns."""
        if self._journal is None:
            found = {name: self._lanes[name].files.position for name in lanes if name in self._lanes}
            return {name: position for name, position in found.items() if position}
        if self._journal.noted.batch_id < 0:
            return {}
        return dict.fromkeys(lanes, self._journal.noted.batch_id + 1)

    def write(self, batch: Batch, /) -> Verdicts:
        """Write a batch.

        For rows, raises InvalidArgument if they do not fit (without `dead_letters`), ChangesRefused for a retraction
        that the sink cannot follow, AppendRejected, AppendUnresolved, and the errors of :meth:`Journal.write`. For
        documents, raises SinkBusy, SinkRefused.
        """
        if batch.documents is not None:
            if self._flow and (batch.end > batch.start or self._history is not None):
                return self._write_lane(batch, batch.documents)
            return self._write_documents(batch.documents)
        if self._journal is not None:
            self._journal.resume()  # from an earlier attempt of this process
        again = (self._journal.noted if self._journal else self._noted).again(batch.start)
        if again is not None:
            return again
        messages, held, taken = self._messages(batch.start, batch.table(), batch.numbers)
        if self._journal is not None:
            self._journal.write(taken, messages, held=held)
            taken = self._journal.noted
        else:
            assert self._memory is not None, "rows need a sink with a memory"
            if self._guarantee == "at most once":
                self._noted = taken
                self._noted.keep(self._memory)
                hit("sink.done")
            taken = self._sent(messages, held, taken)
            hit("sink.sent")
        return Verdicts(taken.acknowledged, taken.rejected)

    def _sent(self, messages: Sequence[MutableMessage], held: Sequence[MutableMessage], taken: Noted) -> Noted:
        """Send without a journal. Return the counts, including rows that were put aside."""
        assert self._plain is not None
        left = messages
        while refused := self._plain.send(left, raise_rejected=False).refused:
            division = self._divided_rows(refused, InFlight(taken, {}, held=held)) if self._has_letters else None
            if division is None:
                raise refused[0][1]
            taken, left = division.counted(taken), division.messages
        return taken

    def _divided_rows(self, refused: Refusals, batch: InFlight) -> Division | None:
        """Divide messages of rows that the chain refused: a row that is refused alone becomes a letter.

        An earlier row of its key in the batch, or an earlier delete, is then sent, too.
        """
        home = None if self._letters is None else self._client.definition(self._letters)
        collection = self._client.definition(self._name)
        messages: list[MutableMessage] = []
        aside: list[RefusedRow] = []
        for message, answer in refused:
            if answer.reason not in _OF_ROWS or not isinstance(message, PlacedMessage):
                return None
            of_letters = home is not None and message.vchannel in home.vchannels
            if message.rows > 1:
                messages += halves(message, home if home is not None and of_letters else collection)
            elif home is not None and of_letters:
                letter = pa.Table.from_batches([rows_in(message, home)])
                if answer.reason != Reason.TOO_LARGE or not letter["payload"][0].as_py():
                    return None
                messages += placed_upserts(shortened(letter), message.places, home)
            elif message.type == MessageType.DELETE:
                return None
            else:
                row = self._as_given(pa.Table.from_batches([rows_in(message, collection)]), collection)
                aside.append(RefusedRow(message.places[0], row, answer.code, str(answer)))
                messages += earlier_row(message, batch.held, collection)
        if len(refused) > MOST or batch.noted.rejected + len(aside) > MOST:
            return None
        return Division([*messages, *self._put_aside(batch.noted.batch_id, aside)], len(aside))

    def _put_aside(self, batch_id: int, rows: Sequence[RefusedRow]) -> list[PlacedMessage]:
        """Return messages with the letters of rows; empty if the letters are written to another place, durably."""
        if not rows:
            return []
        if self._letters is None:
            assert self._row_letters is not None
            self._row_letters.put(batch_id, rows)
            return []
        found = letters(self._stream, batch_id, [(each.number, each.row, each.reason) for each in rows])
        return placed_upserts(found, [each.number for each in rows], self._client.definition(self._letters))

    def _as_given(self, row: pa.Table, collection: CollectionInfo) -> pa.Table:
        """Return a row of a message without computed columns, and with the kind of its change."""
        computed = {each.name for each in collection.schema.fields if each.computed is not None}
        row = row.select([name for name in row.column_names if name not in computed])
        return row.append_column(KIND, pa.array(["upsert"])) if self._mode == "changes" else row

    def redrive(self, found: pa.Table, *, stay: Callable[[pa.Table], None] = lambda _: None) -> int:
        """Write the rows of the letters `found` that fit now, in the stream's order, and delete these letters.

        Return their number. `stay` receives the others before anything is sent. Requires an exactly-once sink; the
        batch has the next number. Raises the errors of :meth:`write`, except for rows that do not fit.
        """
        assert self._journal is not None
        collection = self._client.definition(self._name)
        batch_id = self._journal.noted.batch_id + 1
        taken: list[str] = []
        left: list[pa.Table] = []
        messages: list[MutableMessage] = []
        for letter in (found.slice(place, 1) for place in in_order(found)):
            rows = pa.Table.from_batches(redriven(letter), None if letter["payload"][0].as_py() else pa.schema([]))
            try:
                if not len(rows):
                    raise InvalidArgument("the row was too large to be stored")
                self._fit(rows, collection)
            except InvalidArgument:
                left.append(letter)
                continue
            messages += self._of(rows, collection, batch_id)[0]
            taken += letter["id"].to_pylist()
        if left:
            stay(pa.concat_tables(left))
        if taken:
            if self._letters is not None:
                home = self._client.definition(self._letters)
                gone = split_keys(key_rows(taken, home), home)
                messages += [delete_message(keys, home, vchannel=vchannel) for vchannel, keys in gone]
            self._journal.write(Noted(batch_id, len(taken)), messages)
        return len(taken)

    # --- documents ---------------------------------------------------------------------------------------------------

    def _write_lane(self, batch: Batch, documents: Sequence[Action]) -> Verdicts:
        """Write the documents of a batch that moves its lane's position, each exactly once."""
        self.open()
        try:
            if self._create:
                if all(each.body is None for each in documents) and self._name not in self._client:
                    return Verdicts(acknowledged=len(documents))  # there are no rows to remove
                create(self._client, self._name, batch.columns, self._history)
            lane = self._lane(batch)  # sends the batch of an earlier attempt, before the columns change
            if batch.columns is not None and batch.columns != self._followed:
                follow(self._client, self._name, batch.columns, self._on_schema_change, self._history)
                self._followed = batch.columns
            return self._once(lane, batch, documents)
        except MillraceError as error:
            broken = self._lanes.pop(batch.lane, None)  # the next attempt claims the lane and reads its journal
            if broken is not None:
                broken.journal.close()
            raise self._whole(error) from None

    def _lane(self, batch: Batch) -> _Lane:
        known = self._lanes.get(batch.lane)
        moves = batch.end > batch.start
        if known is not None and (known.files.generation == batch.generation or not moves):
            return known
        if known is not None:
            self._lanes.pop(batch.lane).journal.close()
        collection = self._client.definition(self._name)
        self._newest_chain(collection)
        generation = batch.generation if moves else None
        files = LaneJournal(self._settings, self._flow, batch.lane, collection=collection.id, generation=generation)

        def divide(refused: Refusals, batch: InFlight) -> Division | None:
            messages: list[MutableMessage] = []
            alone: list[tuple[int, AppendRejected]] = []
            for message, answer in refused:
                if answer.reason not in _OF_ROWS or not isinstance(message, PlacedMessage):
                    return None
                collection = self._client.definition(self._name)
                if message.rows > 1:
                    messages += halves(message, collection)
                    continue
                alone.append((message.places[0], answer))
                messages += earlier_row(message, batch.held, collection)
            for place, answer in alone:
                files.refuse(place, answer.code, str(answer))
            return Division(messages)

        made = _Lane(files, Journal(self._client, files, self._name, divide=divide))
        self._lanes[batch.lane] = made
        made.journal.resume()
        return made

    def _once(self, lane: _Lane, batch: Batch, documents: Sequence[Action]) -> Verdicts:
        files, verdicts = lane.files, Verdicts()
        moves = batch.end > batch.start
        # The offsets of a range ascend.
        before = bisect_left(documents, files.position, key=lambda each: each.record.offset) if moves else 0
        for each in documents[:before]:
            refused = files.failures.get(each.record.offset)
            if refused is not None:
                words = refused[1] or "an earlier attempt refused it"
                verdicts.failures.append(Failure(each.record, TASK_PUT, STEP, refused[0], words))
        verdicts.repeated = verdicts.acknowledged = before - len(verdicts.failures)
        documents = documents[before:]
        if not documents:
            return verdicts
        collection = self._client.definition(self._name)
        found = self._placed(documents, collection, batch)
        messages, failures, verdicts.stale = found.messages, found.failures, found.late
        if messages:
            verdicts.bulks = 1
            own = {each.record.offset: (each.kind, each.reason) for each in (*batch.aside, *failures)}
            if moves:
                files.move(batch.end, start=batch.since, failures=own)
            sent = in_transactions(messages) if batch.atomic else messages
            lane.journal.write(Noted(1), sent, held=found.held)
            by_chain = (
                [each for each in found.documents if each.record.offset in files.failures] if files.failures else []
            )
            failures += [Failure(each.record, TASK_PUT, STEP, *files.failures[each.record.offset]) for each in by_chain]
        verdicts.acknowledged += len(documents) - len(failures)
        verdicts.failures += failures
        try:
            require_some(verdicts, verdicts.failures, f"collection {self._name}")
        except SinkRefused:
            if found.documents and moves:
                files.withdraw(batch.start)
            raise
        return verdicts

    def _placed(self, documents: Sequence[Action], collection: CollectionInfo, batch: Batch) -> _Taken:
        if self._history is not None:
            return self._versions(KeyHistory(self._history, collection), documents, collection, batch)
        emptied = self._emptied(documents, collection, batch)
        documents = documents[1:] if emptied else documents
        whole = placed_documents(documents, collection)
        if whole is not None:
            return _Taken(documents, [*emptied, *whole.messages], [], held=whole.replaced)
        rows, failures = self._rows_of(documents, collection.schema)
        rows, placed, misfits = fitting(rows, collection)
        held = replaced_messages(rows, collection)
        return _Taken([each for each, _ in rows], [*emptied, *placed], failures + misfits, held=held)

    def _versions(
        self, rules: KeyHistory, documents: Sequence[Action], collection: CollectionInfo, batch: Batch
    ) -> _Taken:
        """Return the versions that documents of a history create.

        Only the lane's owner changes their keys: others are fenced.
        """
        if self._collection is None:  # it was created by this flow
            self._collection = self._client.collection(self._name)
        rows = self._collection

        def find(keys: Sequence[Row]) -> Sequence[Row]:
            return rows.get(list(keys)).to_pylist() if keys else []

        closed: list[Change] = []
        documents = list(documents)  # the sequence may create its items on each pass
        if is_truncation(documents[0].record):
            whole, documents = documents[0], documents[1:]
            closed = rules.closings(whole, rows.stream(where=rules.is_current, columns=list(rules.key)))
        changes, failures = rules.changes(documents)
        written, late = rules.revise([*closed, *changes], find, again=batch.end == batch.start)
        table = pa.Table.from_pylist([each.row for each in written], schema=collection.schema.arrow())
        placed: list[MutableMessage] = list(placed_upserts(table, [each.place for each in written], collection))
        if self._history is not None and self._history.horizon_days is not None and batch.end > batch.start:
            gone = self._expired(rules, rows)
            if len(gone):
                placed += placed_deletes(key_rows(gone, collection), [batch.end - 1] * len(gone), collection)
        failed = {id(each.record) for each in failures}
        return _Taken([each for each in documents if id(each.record) not in failed], placed, failures, late=late)

    def _expired(self, rules: KeyHistory, rows: Collection) -> pa.Table:
        """Return keys of rows beyond the horizon, to be removed with the next batch."""

        def select(where: str, columns: Sequence[str], limit: int | None) -> Iterator[pa.RecordBatch]:
            if limit is not None:
                yield from rows.read(where=where, columns=list(columns), limit=limit).to_batches()
                return
            with rows.stream(where=where, columns=list(columns)) as reader:
                yield from reader

        if not len(self._gone) and time.monotonic() >= self._look_at:
            self._gone, buckets = rules.expired(select, most=EXPIRED_AT_ONCE, turn=self._turn)
            self._turn += 1
            more = len(self._gone) >= EXPIRED_AT_ONCE
            self._look_at = time.monotonic() + (0 if more else EXPIRED_SECONDS / min(buckets, EXPIRED_LOOKS))
        found, self._gone = self._gone.slice(0, EXPIRED_A_BATCH), self._gone.slice(EXPIRED_A_BATCH)
        return found

    def _emptied(self, documents: Sequence[Action], collection: CollectionInfo, batch: Batch) -> list[MutableMessage]:
        """Return the messages that remove all rows if the batch begins with a truncation."""
        if not is_truncation(documents[0].record):
            return []
        name = f"{self._flow}-{batch.lane}"
        return [self._replacement(name, vchannel, collection, batch.start) for vchannel in collection.vchannels]

    def _rows_of(
        self, documents: Sequence[Action], schema: CollectionSchema
    ) -> tuple[list[tuple[Action, KeyedRow]], list[Failure]]:
        rows: list[tuple[Action, KeyedRow]] = []
        failures: list[Failure] = []
        for action in documents:
            try:
                rows.append((action, row_of(action, schema)))
            except DOCUMENT_ERRORS as error:
                failures.append(Failure(action.record, TASK_PUT, STEP, "ROW", str(error)[:500]))
        return rows, failures

    def _write_documents(self, documents: Sequence[Action]) -> Verdicts:
        self.open()
        verdicts = Verdicts(bulks=1 if documents else 0)
        if self._collection is None:  # a redrive into a collection that is created, or was
            self._collection = self._client.collection(self._name)
        rows, verdicts.failures = self._rows_of(documents, self._collection.schema)
        self._halved(rows, self._collection, verdicts)
        require_some(verdicts, verdicts.failures, f"collection {self._name}")
        return verdicts

    def _halved(self, rows: Sequence[tuple[Action, KeyedRow]], collection: Collection, verdicts: Verdicts) -> None:
        """Send `rows` in order. If they are refused as a whole, send halves of them, down to the row at fault.

        Rows that were accepted together with a refused one are sent again in its half, which is idempotent: the halves
        preserve the order, so the last fitting row of a key wins.
        """
        if not rows:
            return
        try:
            _replace(rows, collection)
        except MillraceError as error:
            if error.retriable or error.code not in _OWN_FAULT:
                raise self._whole(error) from None
            if len(rows) == 1:
                failure = Failure(rows[0][0].record, TASK_PUT, STEP, error.code, str(error)[:500])
                verdicts.failures.append(failure)
                return
            middle = len(rows) // 2
            self._halved(rows[:middle], collection, verdicts)
            self._halved(rows[middle:], collection, verdicts)
        else:
            verdicts.acknowledged += len(rows)

    def _whole(self, error: MillraceError) -> MillraceError:
        if isinstance(error, SinkBusy | SinkRefused):
            return error
        if isinstance(error, ProducerFenced):
            return SinkBusy(f"collection {self._name}: another worker writes this lane", retry_after=_RETRY_AFTER)
        # Unresolved messages are sent again under their numbers, before anything else.
        if error.retriable or isinstance(error, AppendUnresolved):
            after = float(getattr(error, "retry_after", _RETRY_AFTER))
            return SinkBusy(f"collection {self._name}: {error}", retry_after=after)
        return SinkRefused(f"collection {self._name}: {error}")

    # --- messages ----------------------------------------------------------------------------------------------------

    def _messages(
        self, batch_id: int, table: pa.Table, numbers: Sequence[int] | None
    ) -> tuple[list[MutableMessage], list[MutableMessage], Noted]:
        """Return the messages of a batch, those of rows that later ones of their keys replace, and its counts."""
        if not len(table):
            return [], [], Noted(batch_id)
        collection = self._client.definition(self._name)
        bad: list[tuple[pa.Table, str]] = []
        if self._has_letters:
            changes = self._mode == "changes"
            table = ordered(table) if changes else table
            places = np.arange(len(table)) if changes or numbers is None else numbers
            table = table.append_column(PLACE, pa.array(places, pa.int64()))
            table, bad = sift(table, lambda part: self._fit(part, collection))
        taken = Noted(batch_id, len(table), len(bad))
        messages, held = self._of(table, collection, batch_id) if len(table) else ([], [])
        messages += self._put_aside(
            batch_id,
            [RefusedRow(row[PLACE][0].as_py(), row.drop_columns([PLACE]), _MISFIT, words) for row, words in bad],
        )
        return messages, held, taken

    def _fit(self, table: pa.Table, collection: CollectionInfo) -> None:
        """Raise InvalidArgument if a message cannot carry these rows."""
        if self._mode != "changes":
            self._rows(self._without_changes(table), collection)
            return
        folded = fold(table, collection.schema.key_names)
        keys = key_column(folded.deleted, collection.schema.key_names)
        if keys.null_count:
            raise InvalidArgument("a primary key is never null")
        key_rows(folded.deleted, collection)
        self._rows(folded.rows, collection)

    def _rows(self, rows: pa.Table, collection: CollectionInfo) -> pa.Table:
        places = rows[PLACE] if PLACE in rows.column_names else None
        fitted = conform(rows if places is None else rows.drop_columns([PLACE]), collection)
        partition_by = self._partitions[1]
        if partition_by is not None:
            names = pc.is_in(fitted[partition_by].cast(pa.utf8()), pa.array(list(collection.partitions)))
            if not pc.all(names).as_py():
                raise InvalidArgument(
                    f"the column {partition_by!r} names a partition that {self._name!r} does not have"
                )
        return fitted if places is None else fitted.append_column(PLACE, places)

    def _some(self, rows: pa.Table, collection: CollectionInfo) -> pa.Table:
        """Return those of `rows` that fit; none if more than MOST do not."""
        try:
            good, _ = sift(rows, lambda part: self._rows(part, collection))
        except InvalidArgument:
            good = rows.slice(0, 0)
        return self._rows(good, collection)

    def _of(
        self, table: pa.Table, collection: CollectionInfo, batch_id: int
    ) -> tuple[list[MutableMessage], list[MutableMessage]]:
        """Return the messages of fitting rows, and those of rows that later ones of their keys replace.

        The latter are known only for rows with the column PLACE.
        """
        key = collection.schema.key_names
        if self._mode != "changes":
            rows = self._rows(self._without_changes(table), collection)
            upsert = self._mode == "upsert"
            last = last_of_each_key(rows, key) if upsert or collection.schema.replaces_duplicates else rows
            held: list[MutableMessage] = []
            if PLACE in rows.column_names and len(last) < len(rows):
                earlier = rows.filter(pc.invert(pc.is_in(rows[PLACE], last[PLACE])))
                held += placed_rows(earlier, collection, upsert=upsert, partitions=self._partitions, every_row=True)
            return _inserts(last, collection, self._partitions, upsert=upsert), held
        folded = fold(table, key)
        messages = [
            self._replacement(self._stream, each, collection, batch_id) for each in self._homes(folded, collection)
        ]
        if len(folded.deleted):
            messages += _deletes(folded.deleted, collection)
        if len(folded.rows):
            messages += _inserts(self._rows(folded.rows, collection), collection, self._partitions, upsert=True)
        held = []
        if len(folded.earlier_rows):
            earlier = self._some(folded.earlier_rows, collection)
            held += placed_rows(earlier, collection, upsert=True, partitions=self._partitions, every_row=True)
        if len(folded.earlier_deleted):
            held += _deletes(folded.earlier_deleted, collection)
        return messages, held

    def _without_changes(self, table: pa.Table) -> pa.Table:
        """Return the rows of changes to append. Raises InvalidArgument for changes other than inserts."""
        if KIND in table.column_names:
            others = pc.invert(pc.is_in(table[KIND].cast(pa.utf8()), pa.array(["insert", "upsert"])))
            if pc.any(others).as_py():
                kind = table[KIND].filter(others)[0].as_py()
                raise ChangesRefused(
                    f"the rows contain a {kind}, and {self._name!r} accepts only inserts:"
                    " use the mode 'changes', or leave out others in"
                    " the source (kinds='skip others')"
                )
        return table.select([name for name in table.column_names if name not in CHANGE_COLUMNS.names])

    def _homes(self, folded: Folded, collection: CollectionInfo) -> list[str]:
        """Return the VChannels that mirror the retracted ones of the source.

        Raises ChangesRefused if there are none.
        """
        if not folded.retracted:
            return []
        ids = {name: collection_id_of(name) for name in folded.retracted}
        known = self._client.catalog.collections_by_id(number for number in ids.values() if number is not None)
        homes = []
        for name, number in ids.items():
            source = known.get(number or 0)
            alike = (
                source is not None
                and name in source.vchannels
                and len(source.vchannels) == len(collection.vchannels)
                and [field.type for field in source.schema.key_fields]
                == [field.type for field in collection.schema.key_fields]
            )
            if source is None or not alike:
                raise ChangesRefused(
                    f"all rows of {name} were retracted, and {self._name!r} has no VChannel for them: it needs the"
                    " source's key and as many VChannels to follow that"
                )
            homes.append(collection.vchannels[source.vchannels.index(name)])
        return homes

    def _replacement(self, name: str, vchannel: str, collection: CollectionInfo, batch_id: int) -> MutableMessage:
        """Return an Import without files that replaces all rows of the VChannel."""
        return builders.import_files(
            f"{name}-{batch_id}",
            [],
            vchannel=vchannel,
            collection_id=collection.id,
            term=0,
            replace=True,
            schema_version=collection.schema_version,
        )

    def _newest_chain(self, collection: CollectionInfo) -> None:
        """Open a newer term for each PChannel whose chain is too old for upserts. Raises CollectionNotFound."""
        if collection.state != "active":
            raise CollectionNotFound(f"the collection {collection.name!r} is {collection.state}")
        for pchannel in {pchannel_of(name) for name in collection.vchannels}:
            if self._client.connection.describe(pchannel)["chain_version"] < MIN_CHAIN_VERSION[MessageType.UPSERT]:
                self._client.catalog.open_term(pchannel)


def _inserts(
    rows: pa.Table, collection: CollectionInfo, partitions: tuple[str | None, str | None], *, upsert: bool
) -> list[MutableMessage]:
    if PLACE in rows.column_names:
        return list(placed_rows(rows, collection, upsert=upsert, partitions=partitions))
    return [
        insert_message(part, collection, vchannel=vchannel, partition_id=number, upsert=upsert)
        for vchannel, number, part in split_rows(rows, collection, *partitions)
    ]


def _deletes(keys: pa.Table, collection: CollectionInfo) -> list[MutableMessage]:
    rows = key_rows(keys, collection)
    if PLACE in keys.column_names:
        return list(placed_deletes(rows, keys[PLACE].to_pylist(), collection))
    return [delete_message(each, collection, vchannel=vchannel) for vchannel, each in split_keys(rows, collection)]


def _replace(rows: Sequence[tuple[Action, KeyedRow]], collection: Collection) -> None:
    """Replace the rows of these keys, or delete them. The last row of each key counts. Raises AppendRejected."""
    last = {each.key: each.row for _, each in rows}
    new = [row for row in last.values() if row is not None]
    gone = [key for key, row in last.items() if row is None]
    if new:
        collection.upsert(new).checked()
    if gone:
        collection.delete(gone).checked()
