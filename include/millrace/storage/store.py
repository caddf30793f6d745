"""The place of one table: what storage must be able to do for it, whatever it is made of.

Names are relative to the table, with ``/`` between folders. What is promised: a file that was put is whole or not there, and
durable when its sink was closed; a name is never written twice (two attempts never share one); :meth:`TableStore.delta` commits
a version once, whoever tries; and every call ends: a store beyond a network gives up by a time limit of its own, and raises
OSError. What is not: that a failure means that nothing happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from millrace.base.entry_points import load_entry_points
from millrace.base.errors import InvalidSettings

if TYPE_CHECKING:
    import pyarrow.fs as fs
    from deltalake import DeltaTable


class OutputFile(Protocol):
    """A new file, as pyarrow writes to it. It has its name, durable, once :meth:`sync` returned."""

    closed: bool

    def write(self, data: bytes | memoryview) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...

    def sync(self) -> int:
        """Make the whole file durable, with its name; its size in bytes."""
        ...

    def close(self) -> None:
        """Give everything back; what was not synced is not there."""
        ...


class TableStore(Protocol):
    """Where one table lies."""

    @property
    def uri(self) -> str:
        """Its address, for a person, a log line, and for whoever opens it elsewhere (a task, Spark)."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """What delta-rs needs to reach it (end point, region, credentials)."""
        ...

    @property
    def spark_options(self) -> Mapping[str, str]:
        """What Spark needs for the same, by Hadoop's names (``fs.…``): options of each read and write, none of the session's."""
        ...

    @property
    def filesystem(self) -> fs.FileSystem:
        """To read with, by names relative to the table."""
        ...

    @property
    def spark_uri(self) -> str:
        """Where Spark finds the table."""
        ...

    def delta(self, version: int | None = None) -> DeltaTable:
        """The table as it is now, or at `version`. Raises deltalake's TableNotFoundError, DeltaError."""
        ...

    def exists(self) -> bool:
        """Whether there is a table."""
        ...

    def create(self, **options: Any) -> None:
        """Make the table with these options of delta-rs. Raises DeltaError where another was first."""
        ...

    def put(self, name: str) -> OutputFile:
        """A new file `name`."""
        ...

    def read(self, name: str) -> bytes | None:
        """A small file's bytes; None where there is none."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of the file `name`; None where there is none."""
        ...

    def list(self, folder: str) -> list[str]:
        """The files right in `folder`, without it; empty where there is none."""
        ...

    def take(self, other: TableStore, name: str, how: Literal["copy", "link", "move"]) -> bool:
        """Have the file `name` of `other` here too, in its place; False where there is none. A link may be a copy; a move is durable
        here with the next :meth:`sync`. A name that is there stays as it is."""
        ...

    def folders(self) -> Sequence[str]:
        """Names of what lies right below the address that has something below itself: of a place of tables, the tables."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are passed over."""
        ...

    def sync(self, names: Iterable[str]) -> None:
        """Make files that somebody else wrote, and their names, durable. Nothing where the store does so of itself."""
        ...

    def lease(self) -> AbstractContextManager[None]:
        """Keep entries of the table's log from being removed. Any number of writers hold it at a time."""
        ...

    def alone(self) -> AbstractContextManager[bool]:
        """Whether nobody holds the lease, and nobody gets it meanwhile: True is what removing log entries takes."""
        ...


ENTRY_POINT_GROUP: Final = "millrace.table_stores"


@dataclass(frozen=True, slots=True)
class StoreKind:
    """A kind of store, as a package registers it in GROUP; every process of a deployment must have that package."""

    scheme: str
    """Tables at ``<scheme>://...`` lie in such stores."""
    at: Callable[[str], TableStore]


def store_at(uri: object) -> TableStore:
    """The store of the table at `uri`: a path of this machine, or a URI of a registered scheme. Raises InvalidSettings."""
    from millrace.storage.local import LocalStore

    scheme, separator, _ = str(uri).partition("://")
    if not separator or scheme == "file":
        return LocalStore(str(uri))
    return _kind(scheme).at(str(uri))


@cache
def _kind(scheme: str) -> StoreKind:
    kinds = {each.scheme: each for each in load_entry_points(ENTRY_POINT_GROUP, StoreKind)}
    if scheme not in kinds:
        known = ", ".join(sorted(["file", *kinds]))
        raise InvalidSettings(f"no store is known for tables at {scheme}://; known are {known}, and plain paths")
    return kinds[scheme]


def table_name(root: str, uri: str) -> str:
    """The name of a table at `uri`, relative to the place `root` of all tables."""
    return uri.removeprefix(root.rstrip("/") + "/")
