"""What a sink is: it takes a micro-batch as Arrow batches and a number, and says what became of the rows.

Spark repeats a micro-batch whose end it has not noted, with the same number and the same rows. What that does is the guarantee:

- ``exactly once``: a batch that was taken before has no second effect.
- ``at least once``: a batch that is repeated is sent again whole; none is left out.
- ``at most once``: a batch that was begun is never sent again; what a crash interrupts is lost.

A sink's memory of what it took lies in a folder beside the query's checkpoint, and goes with it: a query that begins anew has other
numbers for other rows, and a sink that remembered the old ones would leave rows out in silence.
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
        """Take a micro-batch; when this returns it stands by the guarantee. Raises what keeps it from that: it is not taken, then."""
        ...

    def close(self) -> None:
        """Release what it holds. Idempotent."""
        ...


def name_in(folder: Path, file: str) -> str:
    """A random name that is made when `folder`, which goes with a query's checkpoint, is new, and stays in `file` there."""
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
        """Write it down. Not `synced` it is written in place, which takes no wait for the disk: who stops meanwhile, a machine above all, may leave a file that
        :meth:`load` raises ValueError for."""
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
