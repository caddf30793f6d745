"""A sink's memory: what it must know again after a crash, in a folder beside the position of its lane.

For a Spark query the folder lies in the query's checkpoint, and belongs to it: a query that begins again has other
numbers for other rows, and a sink with the old memory would leave rows out.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from millrace.base.files import make_folder, replace_json
from millrace.flows.sinks.sink import Verdicts

_WIDTH: Final = 120
"""Characters of a note that is written in place: more than three numbers take, so that one covers the other."""


def name_in(folder: Path, file: str) -> str:
    """Return the random name in `file` of `folder`, which is created with the folder."""
    make_folder(folder)
    path = folder / file
    try:
        return str(json.loads(path.read_text())["name"])
    except FileNotFoundError:
        made = uuid.uuid4().hex
        replace_json(path, {"name": made}, synced=True)
        return made


def begun(folder: Path, *, at: int | None = None) -> int:
    """Return the second at which the memory in `folder` was created, in Unix time; `at`: for one that is created now.

    It tells the incarnations of a query apart, in their order: each counts its batches from 0.
    """
    make_folder(folder)
    path = folder / "opensearch.json"  # an earlier build's name: only that sink had it
    if not path.exists():
        replace_json(path, {"begun": int(time.time()) if at is None else at}, synced=True)
    return int(json.loads(path.read_text())["begun"])


@dataclass(frozen=True, slots=True)
class Noted:
    """The newest batch that a sink need not take again, and its counts; in ``<folder>/taken.json``."""

    batch_id: int = -1
    """The batch's `start`."""
    acknowledged: int = 0
    rejected: int = 0

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises ValueError if a crash left a torn file."""
        try:
            value: dict[str, Any] = json.loads((folder / "taken.json").read_text())
        except FileNotFoundError:
            return cls()
        return cls(value["batch"], value["rows"], value["rejected"])

    def keep(self, folder: Path, *, synced: bool = True) -> None:
        """Write it to the folder. Unless `synced`, it is written in place, without waiting for the disk.

        A crash, above all of the machine, may then leave a file for which :meth:`load` raises ValueError.
        """
        value = {"batch": self.batch_id, "rows": self.acknowledged, "rejected": self.rejected}
        path = folder / "taken.json"
        if synced or not path.exists():
            replace_json(path, value, synced=synced)
            return
        with path.open("r+b") as file:
            file.write(f"{json.dumps(value):<{_WIDTH}}\n".encode())

    def again(self, batch_id: int) -> Verdicts | None:
        """Return the verdicts on a batch that was taken before; None if it is new."""
        if batch_id > self.batch_id:
            return None
        if batch_id < self.batch_id:
            return Verdicts(again=True)
        return Verdicts(self.acknowledged, self.rejected, again=True)
