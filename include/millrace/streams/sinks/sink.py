"""The protocol of a sink: it takes a micro-batch as Arrow batches and a number, and returns what became of the rows.

Spark repeats a micro-batch whose end it has not noted, with the same number and the same rows. The guarantee says what
happens then:

- ``exactly once``: a batch that was taken before has no second effect.
- ``at least once``: a repeated batch is sent again as a whole; none is left out.
- ``at most once``: a batch that was begun is never sent again; what a crash interrupts is lost.

A sink's memory of what it took is in a folder beside the query's checkpoint, and belongs to it: a query that begins
again has other numbers for other rows, and a sink with the old memory would silently leave rows out.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, Self

import pyarrow as pa

from millrace.base.files import make_folder, replace_json
from millrace.streams.keyed.operator import Counts

_WIDTH: Final = 120
"""Characters of a note that is written in place: more than three numbers take, so that one covers the other."""


@dataclass(frozen=True, slots=True)
class Operated(Counts):
    """What an operator (docs/operators.md) did with a micro-batch, and the state that it left."""

    state_rows: int = 0
    """Of all shards, behind the micro-batch; bytes as they lie in memory."""
    state_bytes: int = 0
    watermark: str | int | None = None
    """By which the next micro-batch is taken: a time in ISO 8601, or a number."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a micro-batch."""

    rows: int = 0
    """Rows that took effect, or were sent."""
    rejected: int = 0
    """Rows that went to the dead letters."""
    again: bool = False
    """Whether it was taken before, by an earlier attempt."""
    operated: Operated | None = None


class Sink(Protocol):
    """Takes micro-batches, one after the other, in the order of their numbers."""

    def check(self, schema: pa.Schema) -> None:
        """Raises InvalidArgument where rows of these columns can never be taken."""
        ...

    def write(self, batch_id: int, batches: Iterable[pa.RecordBatch]) -> Taken:
        """Take a micro-batch by the guarantee before returning. Raises if that fails; then the batch is not taken."""
        ...

    def close(self) -> None:
        """Release what it holds. Idempotent."""
        ...


def name_in(folder: Path, file: str) -> str:
    """Return the random name in `file` of `folder`, created with the folder, which belongs to a query's checkpoint."""
    make_folder(folder)
    path = folder / file
    try:
        return str(json.loads(path.read_text())["name"])
    except FileNotFoundError:
        made = uuid.uuid4().hex
        replace_json(path, {"name": made}, synced=True)
        return made


@dataclass(frozen=True, slots=True)
class Noted:
    """The newest micro-batch that a sink need not take again, and what became of it; in ``<folder>/taken.json``."""

    batch_id: int = -1
    taken: Taken = Taken()

    @classmethod
    def load(cls, folder: Path) -> Self:
        try:
            value: dict[str, Any] = json.loads((folder / "taken.json").read_text())
        except FileNotFoundError:
            return cls()
        return cls(value["batch"], Taken(value["rows"], value["rejected"]))

    def keep(self, folder: Path, *, synced: bool = True) -> None:
        """Write it to the folder. Unless `synced`, it is written in place, without waiting for the disk.

        A crash, above all of the machine, may then leave a file for which :meth:`load` raises ValueError.
        """
        value = {"batch": self.batch_id, "rows": self.taken.rows, "rejected": self.taken.rejected}
        path = folder / "taken.json"
        if synced or not path.exists():
            replace_json(path, value, synced=synced)
            return
        with path.open("r+b") as file:
            file.write(f"{json.dumps(value):<{_WIDTH}}\n".encode())

    def again(self, batch_id: int) -> Taken | None:
        """What became of a batch that was taken before; None of one that is new."""
        if batch_id > self.batch_id:
            return None
        return replace(self.taken, again=True) if batch_id == self.batch_id else Taken(again=True)
