"""Exactly once into the log: a micro-batch's messages are durable, with their numbers, before the first is sent.

The producer's identity is the sink's (created once, and stored in its folder); the sequences are the batch's. So a
batch that is repeated after a crash sends the same messages with the same numbers, and the chain accepts each once (law
8). Four cases remain:

- The batch is journaled and not done: the journal's messages are sent before anything else, and the repeated rows from
  Spark are ignored.
- The chain has forgotten the producer in the meantime (UNKNOWN_PRODUCER; a first message has a barrier tick, so that it
  does not count as a new one), or no longer has a result (ALREADY_APPLIED). The sink waits for the WAL up to the
  present: messages in it took effect, and only the others get numbers of a new epoch, which are journaled before they
  are sent.
- A message was rejected because of one of its rows (by a new check of the collection, or its size): the result of
  `divide` is journaled under numbers of a new epoch, and sent in its place.
- A message was rejected for another reason (such as a dropped partition): the batch stops with that reason, and the
  next attempt sends the rejected messages under new numbers.

The journal stays when its batch is done, and the next batch replaces it. So the note that a batch is done need not be
durable: a batch that is done but not noted is sent again with its numbers, which has no second effect.

An older driver of the same sink that still runs is fenced by the new epoch; on one machine a lock excludes it.

The journal is in the sink's folder (:class:`FolderJournal`), or in the store of the tables, where the next owner of a
lane finds it (millrace.flows.sinks.collection.lane).
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from millrace.base.errors import AppendRejected, AppendUnresolved, DeadlineExceeded, ProducerFenced, StreamBusy
from millrace.base.failpoint import hit
from millrace.base.files import sync
from millrace.client.database import Database
from millrace.client.produce.producer import Producer
from millrace.client.produce.rows import group_messages
from millrace.client.produce.sequencer import OutboundEntry
from millrace.client.produce.transaction import TXN_ENDED
from millrace.flows.hold import wait_while_held
from millrace.flows.sinks.collection.atomic import begun_again, is_commit, transaction_of
from millrace.flows.sinks.memory import Folder, Noted, create_folder, create_note
from millrace.message.ids import pchannel_of
from millrace.message.log_entries import ENTRY_SCHEMA
from millrace.message.model import MESSAGE_FIELDS, MutableMessage
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from millrace.storage.store import StoreUnreachable, TaggedStore, store_at, tagged
from millrace.tables.read.freshness import require_confirmed_ticks
from millrace.tables.wal.reader import WalSnapshot
from millrace.wal.reasons import Reason

EPOCHS: Final = 5
"""The most epochs that one batch may use before it fails."""

_AGAIN: Final = frozenset({Reason.UNKNOWN_PRODUCER, Reason.SEQUENCE_GAP})
_UNKNOWN: Final = _AGAIN | {Reason.ALREADY_APPLIED}
"""Rejections that leave the outcome of a message unknown. A message after one that was too large is a gap."""
_PLACES: Final = pa.list_(pa.list_(pa.int64()))
_SCHEMA: Final = pa.schema(
    [pa.field("pchannel", pa.utf8()), pa.field("entry", pa.large_binary()), pa.field("places", _PLACES)]
)
FILE: Final = "batch.arrow"
"""Name of a journal in its folder."""
_CLAIMS: Final = 10
"""Attempts to claim a journal in an object store."""
_HELD: Final = ""
"""The key of `held` messages in the journal, in place of a PChannel."""
_logger: Final = logging.getLogger(__name__)

Number = tuple[str, int, int]
"""VChannel, epoch and sequence of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMessage(MutableMessage):
    """A message with the positions of its rows' documents."""

    places: tuple[int, ...] = ()
    """The position of each row's document."""


class Division(NamedTuple):
    """The messages that replace a batch's rejected ones."""

    messages: Sequence[MutableMessage]
    aside: int = 0
    """Rows that were put aside: they are no longer in the messages, or are letters."""

    def counted(self, batch: Noted) -> Noted:
        """Return the counts of `batch` without the rows that were put aside."""
        return replace(batch, acknowledged=batch.acknowledged - self.aside, rejected=batch.rejected + self.aside)


Refusals = Sequence[tuple[MutableMessage, AppendRejected]]


@dataclass(slots=True)
class InFlight:
    """A micro-batch that is being sent."""

    noted: Noted
    """Its number and counts, which are noted when it is done."""
    since: dict[str, int]
    """By PChannel, a tick before any of its messages was sent."""
    groups: dict[str, list[list[MutableMessage]]] = field(default_factory=dict)
    """By PChannel, the stamped messages of each entry."""
    entries: dict[str, list[bytes]] = field(default_factory=dict)
    """By PChannel, the same in the journal's form, if this process wrote them."""
    held: Sequence[MutableMessage] = ()
    """Rows of the batch that later ones of their keys replace. One is sent if its successor is put aside."""
    renumber: bool = False
    """Whether its messages need new numbers first, because rejections used up the old ones."""

    def messages(self) -> list[MutableMessage]:
        return [message for groups in self.groups.values() for group in groups for message in group]


Divide = Callable[[Refusals, InFlight], Division | None]
"""Divides the rejected messages of a batch. Returns None if its rows are not at fault: the batch then stops."""


class JournalFiles(Protocol):
    """The storage of a journal."""

    producer_id: int

    def noted(self) -> Noted:
        """Return the newest batch that is done."""
        ...

    def load(self) -> InFlight | None:
        """Return the newest batch that was journaled."""
        ...

    def keep(self, batch: InFlight) -> None:
        """Journal `batch` with its `entries`, replacing the last one. Durable on return."""
        ...

    def done(self, noted: Noted) -> None:
        """Note that the batch is done. Need not be durable."""
        ...

    def close(self) -> None:
        """Release the journal for other processes. Idempotent."""
        ...


class Journal:
    """Sends one sink's messages to the log exactly once. One thread uses it."""

    def __init__(self, client: Database, files: JournalFiles, name: str, *, divide: Divide | None = None) -> None:
        """`name` is used in errors.

        With `divide`, a rejected message does not stop its batch: the result of `divide` is sent in its place.
        """
        self._client = client
        self._files = files
        self._name = name
        self._divide = divide
        self.producer_id = files.producer_id
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="sink")
        self._producer: Producer | None = None
        self.noted = files.noted()
        self._begun = True
        """Whether the journal may contain a batch that is not done."""

    def close(self) -> None:
        """Release the journal for other processes. Idempotent."""
        self._pool.shutdown()
        if self._producer is not None:
            self._producer.close()
        self._files.close()

    def resume(self) -> None:
        """Complete the batch that an earlier process left, if there is one. Raises the error that prevents it."""
        batch = self._files.load() if self._begun else None
        if batch is None or batch.noted.batch_id <= self.noted.batch_id:
            return
        wait_while_held(self._client.settings)
        if batch.renumber:
            self._renumbered(batch, batch.messages())
        self._settle(batch, self._lanes(resumed=self._producer is None))
        self._done(batch.noted)

    def write(self, batch: Noted, messages: Sequence[MutableMessage], *, held: Sequence[MutableMessage] = ()) -> None:
        """Apply `messages` exactly once, in order within each VChannel, as the micro-batch `batch`.

        `held` are for `divide`. Afterwards `noted` has the batch's counts. Raises AppendRejected for the first message
        that the chain refused, AppendUnresolved, TickNotReached, DeadlineExceeded: the next attempt continues.
        """
        if messages:
            stamped = self._stamped(batch, messages)
            stamped.held = held
            self._keep(stamped)
            hit("sink.journaled")
            self._settle(stamped, self._lanes())
            hit("sink.sent")
            batch = stamped.noted  # with the rows that were put aside in the meantime
        self._done(batch)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def _owned(self) -> Producer:
        """Return the producer of this process's epoch, which fences older ones."""
        if self._producer is None:
            self._producer = self._client.new_producer(producer_id=self.producer_id)
        return self._producer

    def _lanes(self, *, resumed: bool = False) -> Producer:
        """Return the producer that sends; with `resumed`, one without a new epoch, for messages numbered by an older
        one."""
        return self._client.new_producer(resumed=self.producer_id) if resumed else self._owned()

    def _stamped(self, noted: Noted, messages: Sequence[MutableMessage]) -> InFlight:
        batch = InFlight(noted, {})
        by_pchannel: dict[str, list[MutableMessage]] = {}
        for message in messages:
            by_pchannel.setdefault(pchannel_of(message.vchannel), []).append(message)
        for pchannel, mine in by_pchannel.items():
            answered = self._owned().lane(pchannel).tick
            batch.since[pchannel] = answered if answered > 1 else self._client.connection.tick(pchannel, persist=False)
            self._number(batch, pchannel, mine)
        return batch

    def _number(self, batch: InFlight, pchannel: str, messages: list[MutableMessage]) -> None:
        # Sort by VChannel, so that each VChannel's share of an entry is one result for the chain to remember.
        order = {name: place for place, name in enumerate(dict.fromkeys(each.vchannel for each in messages))}
        ordered = sorted(messages, key=lambda each: (is_commit(each), order[each.vchannel]))
        stamped = self._owned().lane(pchannel).stamp(ordered)
        if not all(each.sequence for each in stamped):
            # A chain that forgets this producer must not accept these messages as a new producer's (docs/chain.md).
            barrier = max(1, self._client.connection.tick(pchannel, persist=False))
            stamped = [each if each.sequence else replace(each, barrier_tick=barrier) for each in stamped]
        batch.groups[pchannel] = _entries(stamped)

    def _renumbered(self, batch: InFlight, rest: Sequence[MutableMessage], *, split: bool = False) -> None:
        """Give `rest`, all remaining messages of the batch, numbers of a new epoch; durable on return.

        With `split`, its transactions end and are not replaced.
        """
        if self._producer is not None:
            self._producer.close()
            self._producer = None
        batch.groups, batch.renumber = {}, False
        by_pchannel: dict[str, list[MutableMessage]] = {}
        for message in begun_again(rest, split=split):
            plain = replace(message, producer_id=0, epoch=0, sequence=0, barrier_tick=0)
            by_pchannel.setdefault(pchannel_of(message.vchannel), []).append(plain)
        for pchannel, mine in by_pchannel.items():
            self._number(batch, pchannel, mine)
        self._keep(batch)
        hit("sink.renumbered")

    # --- sending -----------------------------------------------------------------------------------------------------

    def _settle(self, batch: InFlight, producer: Producer) -> None:
        epochs = 0
        while epochs < EPOCHS:
            answers = self._delivered(batch, producer, commits=False)
            if all(is_commit(each) or _has_effect(each, answers) for each in batch.messages()):
                hit("sink.uncommitted")
                answers |= self._delivered(batch, producer, commits=True)
            if producer is not self._producer:
                producer.close()
            rest = _left(batch, answers)
            if not rest:
                return
            refused = [
                (message, answer)
                for message in rest
                if isinstance(answer := answers.get(_number_of(message)), AppendRejected)
                and answer.reason not in _UNKNOWN
            ]
            for _, answer in refused:
                if isinstance(answer, ProducerFenced):
                    raise answer  # another process writes as this sink: it has the journal, too
            split = any(answer.reason == Reason.TXN_TOO_LARGE for _, answer in refused)
            faults = [each for each in refused if each[1].reason not in TXN_ENDED or not transaction_of(each[0])]
            unknown = [message for message in rest if not _is_known(message, answers)]
            division = None if self._divide is None or split or not faults else self._divide(faults, batch)
            if faults and division is None and not split and not unknown:
                batch.groups = _by_entries(rest)
                batch.renumber = True
                self._keep(batch)
                raise faults[0][1]
            standing = self._in_wal(batch) if unknown else set()
            again = _left(batch, dict.fromkeys(standing, True) | _effective(answers))
            if split:
                _logger.warning("%s: a source's transaction exceeds max_txn_bytes and is split", self._name)
            elif division is None:
                epochs += 1
            else:
                verdicts = {_number_of(message) for message, _ in faults}
                again = [*(each for each in again if _number_of(each) not in verdicts), *division.messages]
                batch.noted = division.counted(batch.noted)
            self._renumbered(batch, again, split=split)
            producer = self._owned()
            if not batch.groups:
                return
        raise DeadlineExceeded(f"{self._name!r}: the chain repeatedly forgot the sink's producer: restart the flow")

    def _delivered(self, batch: InFlight, producer: Producer, *, commits: bool) -> dict[Number, object]:
        """Send the messages; return the outcome of each by number. Missing ones must be looked up in the WAL.

        With `commits`, only the ends of transactions are sent; without, only the other messages.
        """

        def one(pchannel: str) -> dict[Number, object]:
            lane = producer.lane(pchannel)
            groups = batch.groups[pchannel]
            written = batch.entries.get(pchannel) or [b""] * len(groups)
            sent = [
                OutboundEntry(list(each), ambiguous=True, entry=entry)
                for each, entry in zip(groups, written, strict=True)
                if is_commit(each[0]) == commits
            ]
            waiting = iter(sent)
            try:
                lane.deliver(lambda: next(waiting, None), pipelined=len(sent) > 1, stamped=True)
            except AppendUnresolved:
                lane.take_unresolved()  # the journal has them
                raise
            except AppendRejected as verdict:
                lane.take_unresolved()
                if verdict.reason not in _AGAIN:
                    raise
            return {
                _number_of(message): answer
                for each in sent
                for message, answer in zip(each.messages, each.answers, strict=False)
                if answer is not None
            }

        found: dict[Number, object] = {}
        mine = [name for name, groups in batch.groups.items() if any(is_commit(each[0]) == commits for each in groups)]
        for each in [self._pool.submit(one, pchannel) for pchannel in mine]:
            found |= each.result()
        return found

    def _in_wal(self, batch: InFlight) -> set[Number]:
        """Return the numbers of the batch's messages that took effect, by reading the WAL since `since`."""
        settings = self._client.settings
        pchannels = sorted(batch.groups)
        require_confirmed_ticks(settings, self._name, pchannels, self._client.connection, None, settings.read_deadline)
        wal = WalSnapshot.open(settings.wal_uri)
        found: set[Number] = set()
        for pchannel in pchannels if wal is not None else ():
            assert wal is not None
            columns = ["vchannel", "producer_id", "epoch", "sequence"]
            for rows in wal.messages(pchannel, after_tick=batch.since[pchannel], columns=columns):
                mine = rows.filter(pa.array(rows["producer_id"].to_numpy() == np.int64(self.producer_id)))
                found |= {(row["vchannel"], row["epoch"], row["sequence"]) for row in mine.to_pylist()}
        return found

    # --- the file ----------------------------------------------------------------------------------------------------

    def _keep(self, batch: InFlight) -> None:
        self._begun = True
        batch.entries = {name: [encode_entry(group) for group in groups] for name, groups in batch.groups.items()}
        self._files.keep(batch)
        # Not before: a backup that holds the flows has read the journals by then, or reads this one.
        wait_while_held(self._client.settings)

    def _done(self, noted: Noted) -> None:
        self.noted = noted
        self._files.done(noted)
        self._begun = False
        hit("sink.done")


class FolderJournal:
    """The journal of a Spark query's sink, in a folder of the query's checkpoint.

    On a disk a lock excludes other processes. In an object store the journal is changed by compare-and-set: opening it
    replaces it by itself under this driver's name. A former driver, which was suspended or cut off, has the tag of an
    older one, so it journals and sends nothing more.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        """Raises StreamBusy, which mentions `name`, if another process holds `folder`; StoreCannotPublish, OSError."""
        create_folder(folder)
        self._folder, self._name = folder, name
        self._lock = _held(folder, name) if isinstance(folder, Path) else None
        self._owner = uuid.uuid4().hex
        self._tag = ""
        if not isinstance(folder, Path):
            self._claim(tagged(store_at(folder)))
        self.producer_id = int(
            create_note(folder, "producer.json", {"producer_id": secrets.randbits(61) + 1})["producer_id"]
        )

    def noted(self) -> Noted:
        """Return the last noted batch, or, if a crash lost the note, the one before the journal's."""
        batch = self.load()
        before = Noted() if batch is None else Noted(batch.noted.batch_id - 1)
        try:
            return max(Noted.load(self._folder), before, key=lambda each: each.batch_id)
        except ValueError:
            return before

    def load(self) -> InFlight | None:
        """Return the batch (JournalFiles.load). Raises StreamBusy if another driver has opened the journal since."""
        if not isinstance(self._folder, Path):
            body, tag = tagged(store_at(self._folder)).read_tagged(FILE) or (b"", "")
            if tag != self._tag:  # its owner sends what is in it
                raise self._lost()
            return _batch_of(body)
        path = self._folder / FILE
        if not path.exists():
            return None
        with pa.memory_map(str(path)) as file:
            return _batch_of(file)

    def keep(self, batch: InFlight) -> None:
        if not isinstance(self._folder, Path):
            if not self._replace(tagged(store_at(self._folder)), batch, self._tag):
                raise self._lost()
            return
        draft = self._folder / f".{FILE}"
        with pa.OSFile(str(draft), "wb") as file:
            write_batch(file, batch, {})
        sync(draft)
        draft.replace(self._folder / FILE)
        sync(self._folder)

    def done(self, noted: Noted) -> None:
        noted.keep(self._folder, synced=False)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _lost(self) -> StreamBusy:
        return StreamBusy(f"another driver writes to {self._name!r} by now: this one was cut off or suspended")

    def _claim(self, store: TaggedStore) -> None:
        """Replace the journal by itself, so that its former driver has the tag of an older one."""
        store.require_tagged_puts()
        for _ in range(_CLAIMS):
            found = store.read_tagged(FILE)
            batch = None if found is None else _batch_of(found[0])
            if self._replace(store, batch or InFlight(Noted(), {}), "" if found is None else found[1]):
                return
        raise StreamBusy(f"several drivers open the journal of {self._name!r} at the same time: stop all but one")

    def _replace(self, store: TaggedStore, batch: InFlight, tag: str) -> bool:
        """Replace the journal that has `tag`, or create it. Return False if another driver did so. Raises OSError."""
        body = io.BytesIO()
        write_batch(body, batch, {"owner": self._owner, "write": uuid.uuid4().hex})
        data = body.getvalue()
        unknown: StoreUnreachable | None = None
        made: str | None = None
        try:
            made = store.replace_tagged(FILE, data, tag) if tag else store.put_new(FILE, data)
        except StoreUnreachable as error:
            unknown = error  # its answer may be lost
        if made is None:  # a refusal, too, may be that of a request that was sent twice
            found, now = store.read_tagged(FILE) or (b"", "")
            if found != data:
                if now == tag:  # the put may still come, or was refused though nobody else replaced the file
                    raise unknown or StoreUnreachable(f"{FILE} of {self._name!r}: the store did not replace it")
                return False
            made = now
        self._tag = made
        return True


def _batch_of(file: pa.NativeFile | bytes) -> InFlight | None:
    """Return the batch of a journal's file; None if nothing was journaled yet."""
    with pa.ipc.open_file(file) as reader:
        batch = read_batch(reader)[0]
    return None if batch.noted.batch_id < 0 else batch


def _held(folder: Path, name: str) -> IO[bytes]:
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StreamBusy(f"another process writes to {name!r} from {folder}: end it first") from None
    return file


def write_batch(file: pa.NativeFile | io.BytesIO, batch: InFlight, more: Mapping[str, Any]) -> None:
    """Write `batch` with its entries and the additional facts `more`, as an Arrow file."""
    facts = {
        "batch": batch.noted.batch_id, "rows": batch.noted.acknowledged, "rejected": batch.noted.rejected,
        "since": batch.since, "renumber": batch.renumber, **more,
    }  # fmt: skip
    schema = _SCHEMA.with_metadata({"batch": json.dumps(facts)})
    with pa.ipc.new_file(file, schema) as writer:
        for pchannel, mine in batch.entries.items():
            for entry, group in zip(mine, batch.groups[pchannel], strict=True):
                places = [list(each.places) if isinstance(each, PlacedMessage) else None for each in group]
                writer.write_batch(_line(schema, pchannel, entry, places))
        for message in batch.held:
            places = [list(message.places)] if isinstance(message, PlacedMessage) else [None]
            writer.write_batch(_line(schema, _HELD, encode_entry([message]), places))


def _line(schema: pa.Schema, pchannel: str, entry: bytes, places: list[list[int] | None]) -> pa.RecordBatch:
    columns = [[pchannel], pa.array([entry], pa.large_binary()), pa.array([places], _PLACES)]
    return pa.record_batch(columns, schema=schema)


def read_batch(reader: pa.RecordBatchFileReader) -> tuple[InFlight, dict[str, Any]]:
    """Return the batch of a journal's file, and all facts of the file."""
    facts = json.loads(reader.schema.metadata[b"batch"])
    noted = Noted(facts["batch"], facts["rows"], facts["rejected"])
    batch = InFlight(noted, facts["since"], renumber=facts["renumber"])
    for number in range(reader.num_record_batches):
        row = reader.get_batch(number).to_pylist()[0]
        if row["pchannel"] == _HELD:
            batch.held = [*batch.held, *_decoded(row["entry"], row["places"])]
            continue
        batch.groups.setdefault(row["pchannel"], []).append(_decoded(row["entry"], row.get("places")))
        batch.entries.setdefault(row["pchannel"], []).append(row["entry"])
    return batch, facts


def _has_effect(message: MutableMessage, answers: Mapping[Number, object]) -> bool:
    answer = answers.get(_number_of(message))
    if isinstance(answer, AppendRejected):
        return message.type == MessageType.ROLLBACK_TXN and answer.reason in TXN_ENDED
    return answer is not None


def _effective(answers: Mapping[Number, object]) -> dict[Number, object]:
    return {number: answer for number, answer in answers.items() if not isinstance(answer, AppendRejected)}


def _left(batch: InFlight, answers: Mapping[Number, object]) -> list[MutableMessage]:
    """Return the messages without effect. A transaction without its Commit has none, even if the log has its bodies."""
    messages = batch.messages()
    done = {each.txn_id for each in messages if is_commit(each) and _has_effect(each, answers)}
    return [
        each
        for each in messages
        if (txn_id not in done if (txn_id := transaction_of(each)) else not _has_effect(each, answers))
    ]


def _is_known(message: MutableMessage, answers: Mapping[Number, object]) -> bool:
    """Return whether the outcome of a message is known, or it is the end of a transaction that was not sent."""
    answer = answers.get(_number_of(message))
    if answer is None:
        return is_commit(message)
    return not isinstance(answer, AppendRejected) or answer.reason not in _UNKNOWN


def _number_of(message: MutableMessage) -> Number:
    return message.vchannel, message.epoch, message.sequence


def _by_entries(messages: Sequence[MutableMessage]) -> dict[str, list[list[MutableMessage]]]:
    by_pchannel: dict[str, list[MutableMessage]] = {}
    for message in messages:
        by_pchannel.setdefault(pchannel_of(message.vchannel), []).append(message)
    return {name: _entries(mine) for name, mine in by_pchannel.items()}


def _entries(messages: Sequence[MutableMessage]) -> list[list[MutableMessage]]:
    """Return the messages of each entry. The ends of transactions, which come last, have their own entries."""
    ends = [each for each in messages if is_commit(each)]
    return [*group_messages(each for each in messages if not is_commit(each)), *group_messages(ends)]


def _decoded(entry: bytes, places: Sequence[Sequence[int] | None] | None) -> list[MutableMessage]:
    framed = pa.record_batch(
        [pa.array([0]), pa.array([0]), pa.array([0]), pa.array([entry], pa.large_binary())], schema=ENTRY_SCHEMA
    )
    found = []
    for number, row in enumerate(decode_entries(framed).to_pylist()):
        fields = {name: row[name] for name in MESSAGE_FIELDS}
        mine = places[number] if places else None
        found.append(MutableMessage(**fields) if mine is None else PlacedMessage(**fields, places=tuple(mine)))
    return found
