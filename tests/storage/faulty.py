"""A store whose commits fail, hang, land late, or stand although they are reported as failed, by a script."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow.fs as fs
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from millrace.storage.delta_log import LOG_FOLDER
from millrace.storage.local import LocalStore
from millrace.storage.log_mirror import ListedObject, LogMirror
from millrace.storage.store import OutputFile, TableStore
from millrace.storage.table import TableHandle

Fault = Literal["none", "fails", "times out", "lost answer", "lands late", "lands at the end"]


@dataclass
class Attempt:
    """What befalls one attempt at a commit."""

    before: Callable[[], None] = lambda: None
    """Others, between the look and the attempt."""
    fault: Fault = "none"
    behind: Callable[[], None] = lambda: None
    """Others, between the attempt and the reading back."""
    reading: Literal["works", "fails", "forgotten"] = "works"
    """Of the version that the attempt was for: it fails once, or the log has it no more."""


class FaultyStore:
    """A folder, with trouble.

    What lands late does so before the next attempt, or at :meth:`settle`; if its place is free then.
    """

    options: Mapping[str, str] = {}
    spark_options: Mapping[str, str] = {}
    log_seconds = math.inf

    def __init__(self, folder: Path, script: list[Attempt]) -> None:
        self.inner = LocalStore(folder)
        self.script = script
        self._late: list[Callable[[], None]] = []
        self._last: list[Callable[[], None]] = []
        self._reading: str = "works"
        self._forgotten: set[str] = set()
        self.attempts = 0

    @property
    def uri(self) -> str:
        return self.inner.uri

    def delta(self, version: int | None = None) -> DeltaTable:
        return cast(DeltaTable, _Delta(self, self.inner.delta(version)))

    def exists(self) -> bool:
        return self.inner.exists()

    def create(self, **options: Any) -> None:
        self.inner.create(**options)

    def put(self, name: str) -> OutputFile:
        return self.inner.put(name)

    def read(self, name: str) -> bytes | None:
        reading, self._reading = self._reading, "works"
        if reading == "fails":
            raise OSError("the storage is out of reach")
        if reading == "forgotten":
            self._forgotten.add(name)
        return None if name in self._forgotten else self.inner.read(name)

    def size(self, name: str) -> int | None:
        return self.inner.size(name)

    def take(self, other: TableStore, name: str, how: Literal["copy", "link", "move"]) -> bool:
        return self.inner.take(other, name, how)

    @property
    def filesystem(self) -> fs.FileSystem:
        return self.inner.filesystem

    @property
    def spark_uri(self) -> str:
        return self.inner.spark_uri

    def list(self, folder: str, *, age: float = 0.0) -> list[str]:
        return self.inner.list(folder, age=age)

    def replace(self, name: str, data: bytes) -> None:
        self.inner.replace(name, data)

    def delete(self, names: Iterable[str]) -> None:
        self.inner.delete(names)

    def sync(self, names: Iterable[str]) -> None:
        self.inner.sync(names)

    @contextmanager
    def lease(self) -> Iterator[None]:
        with self.inner.lease():
            yield

    @contextmanager
    def alone(self) -> Iterator[bool]:
        yield False

    def settle(self) -> None:
        """Let what is under way land."""
        for land in (*self._late, *self._last):
            land()
        self._late, self._last = [], []

    def commit(self, delta: DeltaTable, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.attempts += 1
        version = delta.version()
        happens = self.script.pop(0) if self.script else Attempt()
        happens.before()
        while self._late:
            self._late.pop(0)()

        def land() -> None:
            try:  # of that version or of none, as a request does that is under way
                DeltaTable(self.uri, version=version).create_write_transaction(*args, **options)
            except CommitFailedError:
                pass

        if happens.fault == "none":
            delta.create_write_transaction(*args, **options)
            return
        self._fail(happens, land)

    def _fail(self, happens: Attempt, land: Callable[[], None]) -> None:
        if happens.fault == "lost answer":
            land()
        elif happens.fault == "lands late":
            self._late.append(land)
        elif happens.fault == "lands at the end":
            self._last.append(land)
        happens.behind()
        self._reading = happens.reading
        raise CommitFailedError("no answer") if happens.fault != "times out" else TimeoutError("no answer in time")


def handle_on(store: FaultyStore) -> TableHandle:
    """A handle on the newest version, of the store's own log or of a mirror."""
    if not isinstance(store, FaultyObjects):
        return TableHandle(store, store.delta())
    mirror = LogMirror(store)
    return TableHandle(store, mirror.load(), mirror=mirror)


class FaultyObjects(FaultyStore):
    """The same trouble for a store whose logs are mirrored: of the conditional put of a version's entry."""

    log_seconds = 3600.0

    def delta(self, version: int | None = None) -> DeltaTable:
        return self.inner.delta(version)

    def put(self, name: str) -> OutputFile:
        self.inner.delete([name])  # an object is replaced
        return self.inner.put(name)

    def list_log(self, after: str) -> list[ListedObject]:
        names = (name for name in self.inner.list(LOG_FOLDER) if f"{LOG_FOLDER}/{name}" > after)
        return [ListedObject(name, self._tag(name)) for name in names]

    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        data = self.inner.read(name)
        return None if data is None else (data, self._tag(name.rpartition("/")[2]))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self.put_new(name, data) is not None

    def put_new(self, name: str, data: bytes) -> str | None:
        self.attempts += 1
        happens = self.script.pop(0) if self.script else Attempt()
        happens.before()
        while self._late:
            self._late.pop(0)()
        if happens.fault == "none":
            made = self.inner.put_if_absent(name, data)
            return self._tag(name.rpartition("/")[2]) if made else None

        def land() -> None:
            self.inner.put_if_absent(name, data)

        try:
            self._fail(happens, land)
        except CommitFailedError:  # which no object store raises
            raise OSError("no answer") from None
        raise AssertionError("it failed")

    def _tag(self, name: str) -> str:
        found = (self.inner.folder / LOG_FOLDER / name).stat()
        return f"{found.st_ino}-{found.st_mtime_ns}"


class _Delta:
    def __init__(self, store: FaultyStore, delta: DeltaTable) -> None:
        self._store, self._delta = store, delta

    def __getattr__(self, name: str) -> Any:
        return getattr(self._delta, name)

    def create_write_transaction(self, *args: Any, **options: Any) -> None:
        self._store.commit(self._delta, args, options)
