"""Records of a stream's source that do not decode, and the files and letters that hold them.

A task writes such records to a file named after its range, so a range that is read again replaces the file. After each
micro-batch the driver upserts them as letters, whose ids are the records' positions, and then removes the files. Each
record is one letter, at whatever point this is repeated. Without a collection the files remain: Arrow files of whole
records and their reasons.

A redrive of such letters writes their records to a file of the incarnation, ``again/<number>.arrow``. The source reads
it in the next micro-batch, through the transform like any record, and its place counts the files. So each is read once,
in a batch that has the same records if Spark repeats it. Letters whose records decode then are deleted after the batch.
The file is deleted after the next batch, since Spark may repeat the batch until then.
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
from millrace.flows.spark_host.incarnations import Incarnations, again_of, newest_offsets, sink_folder
from millrace.storage.store import store_at

if TYPE_CHECKING:
    from millrace.flows.errors.topic import ErrorTopic

UNDECODED: Final = "undecoded"
"""The folder of these files, beside a stream's checkpoints."""
_SUFFIX: Final = ".arrow"


def undecoded_folder(settings: Settings, stream: str) -> Folder:
    """Return the folder to which the tasks of a stream write records that do not decode."""
    return below(Incarnations(settings, stream).folder, UNDECODED)


def again_folder(settings: Settings, stream: str) -> Folder:
    """Return the folder of the records that redrives let the present incarnation of a stream read again."""
    incarnations = Incarnations(settings, stream)
    return below(sink_folder(incarnations.checkpoint(incarnations.state)), "again")


def waiting(folder: Folder, past: int) -> dict[int, list[str]]:
    """Return the ids of the letters whose records wait to be read, by the number of their redrive, if > `past`."""
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
    """Return records that failed in the source as rows of LETTERS, for :func:`queue`."""
    table = pa.table(record_columns(records))
    return _letters(stream, 0, table.append_column(REASON, pa.array([""] * len(table), pa.utf8())))


def queue(settings: Settings, stream: str, letters: pa.Table) -> int:
    """Let a stopped stream read the records of letters again; return how many were not yet waiting."""
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
    """Return the number of the last redrive that the stream has begun to read."""
    incarnations = Incarnations(settings, stream)
    checkpoint = incarnations.checkpoint(incarnations.state)
    return again_of(checkpoint, newest_offsets(checkpoint))


class Undecoded:
    """The undecoded records of a stream, from its tasks' files to its letters."""

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
        self._keeps_files = self._into is None and self._topic is None
        """Whether the files are the letters, so they are not removed."""
        self._collected: list[str] = []
        self._known = set(self._names()) if self._keeps_files else set()
        self._waiting = self._reads_topics and not self._keeps_files
        """Whether redrives may have files. Redrives need a stopped stream, so a running one gets no new files."""

    def _names(self) -> list[str]:
        """Return the names of the tasks' files; only topics have any."""
        return [name for name in self._store.list("") if name.endswith(_SUFFIX)] if self._reads_topics else []

    def collect(self, batch_id: int) -> int:
        """Store the undecoded records of all tasks since the last call as letters; return their number.

        Raises the errors of the collection or topic.
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
            if self._keeps_files:
                self._known.add(name)
            else:
                self._collected.append(name)
        if self._waiting:
            self._waiting = self._finish_redrives(batch_id, again)
        return found

    def _finish_redrives(self, batch_id: int, again: set[str]) -> bool:
        """Delete the letters whose records the batch decoded; `again` are those that did not decode again.

        Returns whether there are files of redrives.
        """
        incarnations = Incarnations(self._settings, self._name)
        checkpoint, folder = incarnations.checkpoint(incarnations.state), again_folder(self._settings, self._name)
        found = waiting(folder, 0)
        if not found:
            return False
        before, now = again_of(checkpoint, batch_id - 1), again_of(checkpoint, batch_id)
        for number, ids in found.items():
            if number <= before:  # its batch is committed and will not be read again
                store_at(folder).delete([f"{number}{_SUFFIX}"])
            elif self._into is not None and number <= now and (gone := [name for name in ids if name not in again]):
                with connect(settings=self._settings) as db:
                    db.collection(str(self._into)).delete(gone)
        return True

    def close(self) -> None:
        """Close the error topic. Idempotent."""
        if self._topic is not None:
            self._topic.close()

    def done(self) -> None:
        """Remove the files whose records are stored as letters and counted. Until then a repeated batch finds them."""
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
    """Return rows of LETTERS. Their stream is ``<stream>/source``, since they are not rows of its sink."""
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
