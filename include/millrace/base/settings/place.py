"""The place of a deployment's tables, after they were moved (millrace.operations.move; docs/moving.md).

Without the file ``coord/tables.json`` of the data folder, the setting `tables` says it. With it, the file decides, and
the setting may name any of the places that it lists. In a cluster, the meta store has the truth, and nodes and
coordinators copy it into the file of their machine (millrace.coord.machine.tables_place).

Writers read the place once, when they start (:meth:`millrace.base.settings.Settings.load`). A table that was moved
accepts no commit, so a writer that has an earlier place fails with TablesMoved, and continues in the new place when it
is started again. Processes that only read follow the file (:func:`millrace.base.settings.following`).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

from millrace.base.errors import InvalidSettings, TablesMoved, UnsupportedVersion
from millrace.base.files import make_folder, replace_file
from millrace.base.package import VERSION

PLACE_VERSION: Final = 2
"""Version of the file and of the meta store's entry. Without a `mover`, version 1 is written."""
OPEN_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class TablesPlace:
    """The place of the tables, and a move in progress. Places are values of the setting `tables`."""

    uri: str
    earlier: tuple[str, ...] = ()
    """Places that still have files of earlier moves, the newest last."""
    target: str | None = None
    """Target of a move in progress."""
    closed: bool = False
    """Whether that move has begun to close the tables at `uri`: nothing is written until it ends."""
    mover: str = ""
    """The run that makes or cancels that move, whichever machine it is on. An earlier run that wakes up stops."""

    def encode(self) -> bytes:
        """Return the form in the file and in the meta store."""
        found = {"form": PLACE_VERSION, "release": VERSION, **asdict(self)}
        if not self.mover:
            found["form"] = 1
            del found["mover"]
        return json.dumps(found).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Invert :meth:`encode`. Raises UnsupportedVersion, InvalidSettings."""
        try:
            found = json.loads(data)
            form, release = found.pop("form"), found.pop("release")
            if form > PLACE_VERSION:
                raise UnsupportedVersion(
                    f"the place of the tables has version {form}, and this build reads {PLACE_VERSION}: run Millrace"
                    f" {release} or a newer release"
                )
            return cls(**{**found, "earlier": tuple(found["earlier"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidSettings(
                f"the place of the tables is damaged ({error!r}): restore coord/tables.json from a backup of the data"
                " folder"
            ) from error


def place_path(data_dir: Path) -> Path:
    """Return the file of this machine that says where the tables lie."""
    return data_dir / "coord" / "tables.json"


def read_place(data_dir: Path) -> TablesPlace | None:
    """Return where the tables lie, or None if they were never moved. Costs a stat if nothing has changed.

    Raises InvalidSettings, UnsupportedVersion.
    """
    path = place_path(data_dir)
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _read(path, found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _read(path: Path, *_mark: int) -> TablesPlace:
    try:
        return TablesPlace.decode(path.read_bytes())
    except OSError as error:
        raise InvalidSettings(f"{path} cannot be read: {error.strerror}") from error


def write_place(data_dir: Path, place: TablesPlace) -> None:
    """Replace this machine's file, unless it says the same."""
    path, data = place_path(data_dir), place.encode()
    try:
        if path.read_bytes() == data:
            return
    except FileNotFoundError:
        make_folder(path.parent)
    replace_file(path, data, synced=True)


def placed(data_dir: Path, tables: str) -> str:
    """Return the value of the setting `tables` that counts, given the value `tables` of environment and file.

    Raises InvalidSettings if the tables were moved and the setting names none of their places.
    """
    place = read_place(data_dir)
    if place is None:
        return tables
    known = (place.uri, *place.earlier, *([] if place.target is None else [place.target]))
    # Every command that names no place means the one that counts.
    if tables and tables not in known:
        shown = ", ".join(each or "the data folder" for each in known)
        raise InvalidSettings(
            f"MILLRACE_TABLES is {tables}, but the tables of {data_dir} were moved: set it to one of {shown}"
        )
    return place.uri


def check_place(data_dir: Path, tables: str) -> None:
    """Raise TablesMoved unless the tables at `tables` are where they are written. For writers, before each step."""
    place = read_place(data_dir)
    if place is not None and (place.closed or place.uri != tables):
        where = place.target if place.closed else place.uri
        raise TablesMoved(f"the tables move to {where or 'the data folder'}: this continues there when started again")


def await_open_place(data_dir: Path, *, seconds: float = OPEN_SECONDS) -> None:
    """Wait until no move holds the tables closed: for writers, before they load their settings.

    Raises TablesMoved after `seconds`.
    """
    ends = time.monotonic() + seconds
    while (place := read_place(data_dir)) is not None and place.closed:
        if time.monotonic() > ends:
            raise TablesMoved(
                f"a move to {place.target or 'the data folder'} has closed the tables for {seconds:.0f} s: run it again"
                " (millrace operations move), or give it up (--cancel)"
            )
        time.sleep(_POLL_SECONDS)
