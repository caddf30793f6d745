"""Records of a stream's source that do not decode: from the files of its tasks to a collection of dead letters.

A task writes such records to a file named after its range, so a range that is read again replaces the file. After each
micro-batch the driver upserts what it finds as letters, whose ids are the records' positions, and then removes the
files: repeated at any point, each record is one letter. Without a collection the files stay: they are Arrow files with
the whole record and the reason.

A redrive of such letters writes their records to a file of the incarnation, ``again/<number>.arrow``. The source reads
it in the next micro-batch, through the transform like any record, and its place counts the files: so each is read once,
in a batch that comes again with the same records. Letters whose records decode then are deleted after the batch, the
file after the next one: until then Spark may ask for the batch again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.flows.declare.errors import SKIPPED
from millrace.flows.declare.flow import Flow
from millrace.flows.errors.letter import SOURCE
from millrace.flows.records import VALUE_CONVERTER, Failure, Record
from millrace.flows.sinks.collection.poison import LETTERS, arrow_bytes, redriven
from millrace.flows.sinks.memory import Folder, below, create_folder
from millrace.flows.sources.kafka.columns import REASON, RECORD, record_columns, records_of
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.spark_host.incarnations import Kept, again_of, newest_offsets, sink_folder
from millrace.storage.store import store_at

if TYPE_CHECKING:
    from millrace.flows.errors.topic import ErrorTopic

UNDECODED: Final = "undecoded"
"""Folder beside a stream's checkpoints."""
_SUFFIX: Final = ".arrow"


def undecoded_folder(settings: Settings, stream: str) -> Folder:
    """Where the tasks of a stream put records that do not decode."""
    return below(Kept(settings, stream).folder, UNDECODED)


def again_folder(settings: Settings, stream: str) -> Folder:
    """Return where redrives put records that the present incarnation of a stream is to read again."""
    kept = Kept(settings, stream)
    return below(sink_folder(kept.checkpoint(kept.state)), "again")


def waiting(folder: Folder, past: int) -> dict[int, list[str]]:
    """Return the ids of the letters whose records wait, by the number of the redrive; those up to `past` are read."""
    store = store_at(folder)
    found = {}
    for number in _numbers(folder):
        if number > past and (body := store.read(f"{number}{_SUFFIX}")) is not None:
            with pa.ipc.open_file(body) as reader:
                found[number] = json.loads(reader.schema.metadata[b"letters"])
    return found


def _numbers(folder: Folder) -> list[int]:
    """Return the numbers of the redrives whose records are in `folder`."""
    stems = (name.removesuffix(_SUFFIX) for name in store_at(folder).list("") if name.endswith(_SUFFIX))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def letters_from(stream: str, records: Sequence[Record]) -> pa.Table:
    """Return records that failed in the source as LETTERS, as :func:`queue` takes them."""
    table = pa.table(record_columns(records))
    return _letters(stream, 0, table.append_column(REASON, pa.array([""] * len(table), pa.utf8())))


def queue(settings: Settings, stream: str, letters: pa.Table) -> int:
    """Have the records of letters read again by a stopped stream; return how many do not wait already."""
    folder, past = again_folder(settings, stream), _past(settings, stream)
    known = {name for ids in waiting(folder, past).values() for name in ids}
    mask = [name not in known for name in letters["id"].to_pylist()]
    letters = letters.filter(pa.array(mask, pa.bool_()))
    if not letters.num_rows:
        return 0
    rows = pa.Table.from_batches(redriven(letters)).select(RECORD.names)
    number = next_number(settings, stream)
    table = rows.replace_schema_metadata({"letters": json.dumps(letters["id"].to_pylist())})
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    create_folder(folder)
    store_at(folder).replace(f"{number}{_SUFFIX}", out.getvalue().to_pybytes())
    return len(letters)


def next_number(settings: Settings, stream: str) -> int:
    """Return the number of the stream's next redrive of its source's letters."""
    return max([_past(settings, stream), *_numbers(again_folder(settings, stream))]) + 1


def _past(settings: Settings, stream: str) -> int:
    """Return the number of the last one that the stream has begun to read."""
    kept = Kept(settings, stream)
    checkpoint = kept.checkpoint(kept.state)
    return again_of(checkpoint, newest_offsets(checkpoint))


class Undecoded:
    """Collects the files of a stream's tasks."""

    def __init__(self, settings: Settings, stream: Flow) -> None:
        self._settings, self._name = settings, stream.name
        self._folder = undecoded_folder(settings, stream.name)
        self._store = store_at(self._folder)
        self._reads_topics = isinstance(stream.row_source, KafkaSource)
        self._into = stream.row_source.dead_letters if isinstance(stream.row_source, KafkaSource) else None
        self._topic: ErrorTopic | None = None
        if self._into is None and stream.errors_in_topic:
            from millrace.flows.errors.topic import ErrorTopic

            self._topic = ErrorTopic(stream)
        self._kept = self._into is None and self._topic is None
        """Whether the files are the letters."""
        self._collected: list[str] = []
        self._known = set(self._names()) if self._kept else set()
        self._waiting = self._reads_topics and not self._kept
        """Whether redrives may have files. They need a stopped stream: once there are none, none come."""

    def _names(self) -> list[str]:
        """Return the names of the tasks' files; a source that is no topic has none."""
        return [name for name in self._store.list("") if name.endswith(_SUFFIX)] if self._reads_topics else []

    def collect(self, batch_id: int) -> int:
        """Return the number of records that tasks have put aside since the last call. Raises what their place does.

        With a collection or a topic they are there when this returns.
        """
        found, again = 0, set[str]()
        for name in self._names():
            body = None if name in self._known else self._store.read(name)
            if body is None:
                continue
            with pa.ipc.open_file(body) as reader:
                table = reader.read_all()
                found += table.num_rows
                if self._topic is not None:
                    self._topic.put(_failures(table), task=f"{self._name}{SOURCE}")
                if self._into is not None:
                    with connect(settings=self._settings) as db:
                        rows = _letters(self._name, batch_id, table)
                        db.collection(self._into).upsert(rows)
                    again |= set(rows["id"].to_pylist()) if name.startswith("again-") else set()
            if self._kept:
                self._known.add(name)
            else:
                self._collected.append(name)
        if self._waiting:
            self._waiting = self._went_in(batch_id, again)
        return found

    def _went_in(self, batch_id: int, again: set[str]) -> bool:
        """Delete the letters whose records the batch read again, but for those that are letters `again`.

        Returns whether there are files of redrives.
        """
        kept = Kept(self._settings, self._name)
        checkpoint, folder = kept.checkpoint(kept.state), again_folder(self._settings, self._name)
        found = waiting(folder, 0)
        if not found:
            return False
        before, now = again_of(checkpoint, batch_id - 1), again_of(checkpoint, batch_id)
        for number, ids in found.items():
            if number <= before:  # its batch is committed: nobody reads it again
                store_at(folder).delete([f"{number}{_SUFFIX}"])
            elif self._into is not None and number <= now and (gone := [name for name in ids if name not in again]):
                with connect(settings=self._settings) as db:
                    db.collection(str(self._into)).delete(gone)
        return True

    def close(self) -> None:
        """Idempotent."""
        if self._topic is not None:
            self._topic.close()

    def done(self) -> None:
        """Remove the files of records that are letters and counted. Until then they come again with their batch."""
        if self._collected:
            self._store.delete(self._collected)
        self._collected.clear()


def _failures(table: pa.Table) -> list[Failure]:
    reasons = table[REASON].to_pylist()
    return [
        Failure(record, VALUE_CONVERTER, "source", kind, words or kind)
        for record, reason in zip(records_of(table), reasons, strict=True)
        for kind, _, words in [reason.partition(": ") if reason.startswith(SKIPPED) else ("UNDECODED", "", reason)]
    ]


def _letters(stream: str, batch_id: int, table: pa.Table) -> pa.Table:
    """Rows of LETTERS. Their stream is ``<stream>/source``: they are records of its source, and no rows of its sink."""
    rows = []
    for number, each in enumerate(table.to_pylist()):
        position = f"{each['_topic']}-{each['_partition']}-{each['_offset']}"
        rows.append(
            {
                "id": f"{stream}/source/{position}",
                "stream": f"{stream}/source",
                "batch": batch_id,
                "reason": each[REASON],
                "row": json.dumps({name: _text(value) for name, value in each.items() if name != REASON}, default=str),
                "payload": arrow_bytes(table.slice(number, 1)),
            }
        )
    return pa.Table.from_pylist(rows, schema=LETTERS.arrow())


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
