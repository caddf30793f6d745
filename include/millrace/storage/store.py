"""The storage of one table: the operations that every kind of store provides.

Names are relative to the table, with ``/`` between folders. Promises:

- A file is complete or absent, and durable once its :class:`OutputFile` is synced.
- A name is never written twice: two attempts never share one.
- :meth:`TableStore.delta` commits a version once, even with competing writers.
- A name of :meth:`ConditionalStore.put_if_absent` is written once, even with competing writers. Only
  publishing needs that call.
- Every call ends: a remote store has its own time limit, after which it raises StoreUnreachable, an OSError.

A failure does not mean that nothing happened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, Protocol, cast

from millrace.base.entry_points import load_entry_points
from millrace.base.errors import InvalidSettings, StoreCannotPublish

if TYPE_CHECKING:
    import pyarrow.fs as fs
    from deltalake import DeltaTable


class StoreUnreachable(OSError):
    """The store did not answer a request, or answered with a failure, as often as it was repeated.

    It says nothing about the requested file, which must not be reported as damaged.
    """


class OutputFile(Protocol):
    """A new file, with the interface that pyarrow needs. It has its name durably once :meth:`sync` has returned."""

    closed: bool

    def write(self, data: bytes | memoryview) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...

    def sync(self) -> int:
        """Make the whole file durable with its name. Returns its size in bytes."""
        ...

    def close(self) -> None:
        """Release all resources. Unsynced data is discarded."""
        ...


class TableStore(Protocol):
    """The storage of one table."""

    log_seconds: float
    """Minimum time for which an entry of the table's log stays. Infinite for a store with leases: while a writer
    works."""

    @property
    def uri(self) -> str:
        """The table's URI, for people, log lines, and processes that open it elsewhere (a task, Spark)."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """Options that delta-rs needs to reach the store (endpoint, region, credentials)."""
        ...

    @property
    def spark_options(self) -> Mapping[str, str]:
        """The same for Spark, by Hadoop's names (``fs.…``): options of each read and write, none of the session's."""
        ...

    @property
    def filesystem(self) -> fs.FileSystem:
        """A file system for reading, by names relative to the table."""
        ...

    @property
    def spark_uri(self) -> str:
        """The table's URI for Spark."""
        ...

    def delta(self, version: int | None = None) -> DeltaTable:
        """Open the table at its newest version, or at `version`. Raises deltalake's TableNotFoundError, DeltaError."""
        ...

    def exists(self) -> bool:
        """Return whether the table exists."""
        ...

    def create(self, **options: Any) -> None:
        """Create the table with these options of delta-rs. Raises DeltaError if another process was first."""
        ...

    def put(self, name: str) -> OutputFile:
        """Create the file `name`."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a small file; None if it does not exist."""
        ...

    def size(self, name: str) -> int | None:
        """Return the size of the file `name` in bytes; None if it does not exist."""
        ...

    def list(self, folder: str, *, age: float = 0.0) -> list[str]:
        """Return the names of the files directly in `folder`; empty if it does not exist.

        With `age`, only of those that were written so many seconds ago or earlier, by the store's clock.
        """
        ...

    def take(self, other: TableStore, name: str, how: Literal["copy", "link", "move"]) -> bool:
        """Copy, link or move the file `name` of `other` to the same name here. Returns False if it does not exist.

        A link may become a copy. A move is durable here after the next :meth:`sync`. An existing name is not replaced.
        """
        ...

    def folders(self) -> Sequence[str]:
        """Return the names of the folders directly below the URI: for a root of tables, the tables."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Replace the small file `name` with `data`, whole and durably, or create it."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete files. Missing files are ignored."""
        ...

    def sync(self, names: Iterable[str]) -> None:
        """Make files that another writer wrote durable, with their names. May do nothing if the store is always
        durable.
        """
        ...

    def lease(self) -> AbstractContextManager[None]:
        """Keep entries of the table's log from being removed. Any number of writers may hold it."""
        ...

    def alone(self) -> AbstractContextManager[bool]:
        """Yield whether the lease is held exclusively inside, which the removal of log entries requires."""
        ...


_CALLS: Final = tuple(
    sorted(name for name, member in vars(TableStore).items() if not name.startswith("_") and callable(member))
)
"""The methods of TableStore."""


class ConditionalStore(TableStore, Protocol):
    """A store of tables that Millrace publishes (:mod:`millrace.storage.published`)."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create the small file `name` with `data`. Returns False, and changes nothing, if the name is taken.

        The file is durable, and complete for every reader that sees its name. Of several callers one gets
        True. After an OSError the file may be there.
        """
        ...


class TaggedStore(ConditionalStore, Protocol):
    """A store whose small files are changed by compare-and-set: a file's tag changes with its content."""

    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Return the bytes of a file and its tag; None if it does not exist."""
        ...

    def put_new(self, name: str, data: bytes) -> str | None:
        """Create a file as ``put_if_absent`` does, and return its tag; None if the name is taken."""
        ...

    def replace_tagged(self, name: str, data: bytes, tag: str) -> str | None:
        """Replace the file `name` if `tag` is its tag. Return its new tag, or None if it has another.

        Raises StoreCannotPublish if the store ignores the condition. After an OSError the file may be replaced.
        """
        ...

    def require_tagged_puts(self) -> None:
        """Raise StoreCannotPublish if the store ignores that condition. Asks it once for each process and bucket."""
        ...


def tagged(store: TableStore) -> TaggedStore:
    """Return `store` if it has ``replace_tagged``. Raises StoreCannotPublish."""
    if not callable(getattr(store, "replace_tagged", None)):
        raise StoreCannotPublish(
            f"the store of {store.uri} has no replace_tagged, so it cannot have the state of streams: use a newer"
            " version of the package that registers it"
        )
    return cast(TaggedStore, store)


def conditional(store: TableStore) -> ConditionalStore:
    """Return `store` if it has ``put_if_absent``. Raises StoreCannotPublish."""
    if not callable(getattr(store, "put_if_absent", None)):
        raise StoreCannotPublish(
            f"the store of {store.uri} has no put_if_absent, so no table can be published there: use a newer version of"
            " the package that registers it, or set publish to off"
        )
    return cast(ConditionalStore, store)


def require_conditional_puts(store: TableStore) -> ConditionalStore:
    """Return `store`, once it has refused a second put of a name, if that can be tried. Raises StoreCannotPublish."""
    found = conditional(store)
    tried = getattr(store, "require_conditional_puts", None)
    if callable(tried):
        tried()
    return found


_TRIES: Final = 3
_REMOTE_TRIES: Final = 10
"""The same on a store without leases, an object store, which may refuse requests for seconds (SlowDown)."""


def commit_tries(store: TableStore) -> int:
    """Return the number of failed commits of a version still free after which the store counts as unavailable."""
    return _TRIES if store.log_seconds == math.inf else _REMOTE_TRIES


_BLOCK_BYTES: Final = 4 << 20

OBJECT_STORES: Final = ("s3", "gs", "az")
"""Schemes of millrace.storage.objects."""
ENTRY_POINT_GROUP: Final = "millrace.table_stores"


@dataclass(frozen=True, slots=True)
class StoreKind:
    """A kind of store that a package registers in ENTRY_POINT_GROUP.

    Every process of a deployment needs the package.
    """

    scheme: str
    """Tables at ``<scheme>://...`` are in stores of this kind."""
    at: Callable[[str], TableStore]


def store_at(uri: object) -> TableStore:
    """Return the store of the table at `uri`: a local path, or a URI of a registered scheme. Raises InvalidSettings."""
    from millrace.storage.local import LocalStore

    scheme, separator, _ = str(uri).partition("://")
    if not separator or scheme == "file":
        return LocalStore(str(uri))
    if scheme in OBJECT_STORES:
        from millrace.storage.objects import ObjectStore

        return ObjectStore(str(uri))
    store = _kind(scheme).at(str(uri))
    _require_whole(type(store), scheme)
    return store


@cache
def _require_whole(kind: type, scheme: str) -> None:
    """Raise InvalidSettings if a package's store was written for an earlier protocol, before it fails midway."""
    lacking = [name for name in _CALLS if not callable(getattr(kind, name, None))]
    if lacking:
        raise InvalidSettings(
            f"the store that is registered for {scheme}:// has no {', '.join(lacking)}: use a version of its package"
            " for this version of Millrace"
        )


@cache
def _kind(scheme: str) -> StoreKind:
    kinds = {each.scheme: each for each in load_entry_points(ENTRY_POINT_GROUP, StoreKind)}
    if scheme not in kinds:
        known = ", ".join(sorted(["file", *OBJECT_STORES, *kinds]))
        raise InvalidSettings(
            f"no store is registered for tables at {scheme}://; registered are {known}, and plain paths"
        )
    return kinds[scheme]


def put_stream(store: TableStore, name: str, source: BinaryIO) -> int:
    """Create the file `name` with what `source` yields, durably. Returns its size in bytes."""
    sink = store.put(name)
    try:
        while block := source.read(_BLOCK_BYTES):
            sink.write(block)
        return sink.sync()
    finally:
        sink.close()


def list_below(store: TableStore, folder: str = "") -> dict[str, int]:
    """Return the names of all files below `folder` with their sizes in bytes, in the order of names."""
    import pyarrow.fs as fs

    selector = fs.FileSelector(folder, recursive=True, allow_not_found=True)
    found = (each for each in store.filesystem.get_file_info(selector) if each.type == fs.FileType.File)
    return dict(sorted((str(each.path), int(each.size)) for each in found))


def s3_server() -> str:
    """Return the server of S3's protocol that the environment names; "" for Amazon.

    obstore, delta-rs, boto3 and S3A know different variables, and prefer different ones: each is told this one.
    """
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def table_name(root: str, uri: str) -> str:
    """Return the name of the table at `uri`, relative to the root of all tables."""
    return uri.removeprefix(root.rstrip("/") + "/")
