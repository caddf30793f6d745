"""Records of a stream's source that do not decode: from the files of its tasks to a collection of dead letters.

A task writes such records to a file named after its range, so a range that is read again replaces the file. After each
micro-batch the driver upserts what it finds as letters, whose ids are the records' positions, and then removes the
files: repeated at any point, each record is one letter. Without a collection the files stay: they are Arrow files with
the whole record and the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.flows.declare.flow import Flow
from millrace.flows.sinks.collection.poison import LETTERS, arrow_bytes
from millrace.flows.sources.kafka.columns import REASON
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.spark_host.incarnations import Kept


def undecoded_folder(settings: Settings, stream: str) -> Path:
    """Where the tasks of a stream put records that do not decode."""
    return Kept(settings, stream).folder / "undecoded"


class Undecoded:
    """Collects the files of a stream's tasks."""

    def __init__(self, settings: Settings, stream: Flow) -> None:
        self._settings, self._name = settings, stream.name
        self._folder = undecoded_folder(settings, stream.name)
        self._into = stream.row_source.dead_letters if isinstance(stream.row_source, KafkaSource) else None
        self._collected: list[Path] = []
        self._known = {path.name for path in self._folder.glob("*.arrow")} if self._into is None else set()

    def collect(self, batch_id: int) -> int:
        """Return the number of records that tasks have put aside since the last call. Raises what the collection does.

        With a collection they are its rows when this returns.
        """
        found = 0
        for path in sorted(self._folder.glob("*.arrow")):
            if path.name in self._known:
                continue
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                table = reader.read_all()
                found += table.num_rows
                if self._into is not None:
                    with connect(settings=self._settings) as db:
                        db.collection(self._into).upsert(_letters(self._name, batch_id, table))
            if self._into is None:
                self._known.add(path.name)
            else:
                self._collected.append(path)
        return found

    def done(self) -> None:
        """Remove the files of records that are letters and counted. Until then they come again with their batch."""
        for path in self._collected:
            path.unlink(missing_ok=True)
        self._collected.clear()


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
