"""A second store, as plain as an object store is.

It has no folders, no locks and nothing to sync, and its addresses are no paths.

Where its bytes lie (a hidden folder) nobody but it knows. Whoever takes an address for a path finds nothing, or makes a
folder of a strange name where the test looks for it.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pyarrow.fs as fs
from deltalake import DeltaTable

from millrace.storage.local import LocalStore
from millrace.storage.store import TableStore

SCHEME = "shelf"


class Shelf:
    """All tables below ``shelf://<anything>``. `calls` counts what was asked of it."""

    def __init__(self, hidden: Path) -> None:
        self.hidden = hidden
        self.calls: Counter[str] = Counter()

    def store(self, uri: str) -> ShelfStore:
        return ShelfStore(self, uri)


class ShelfStore:
    options: Mapping[str, str] = {}
    spark_options: Mapping[str, str] = {}
    log_seconds = 3600.0

    def __init__(self, shelf: Shelf, uri: str) -> None:
        self.uri = uri
        self._calls = shelf.calls
        self._folder = shelf.hidden / uri.removeprefix(f"{SCHEME}://")

    @property
    def spark_uri(self) -> str:
        raise AssertionError("no Spark reaches this shelf: who asked for its address?")

    @property
    def filesystem(self) -> fs.FileSystem:
        self._calls["filesystem"] += 1
        return fs.SubTreeFileSystem(str(self._folder), fs.LocalFileSystem())

    def exists(self) -> bool:
        return DeltaTable.is_deltatable(str(self._folder))

    def create(self, **options: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        DeltaTable.create(str(self._folder), **options)

    def delta(self, version: int | None = None) -> DeltaTable:
        self._calls["delta"] += 1
        return DeltaTable(str(self._folder), version=version)

    def put(self, name: str) -> _Put:
        self._calls["put"] += 1
        return _Put(self._folder / name)

    def read(self, name: str) -> bytes | None:
        path = self._folder / name
        return path.read_bytes() if path.is_file() else None

    def size(self, name: str) -> int | None:
        path = self._folder / name
        return path.stat().st_size if path.is_file() else None

    def list(self, folder: str, *, age: float = 0.0) -> list[str]:
        return LocalStore(self._folder).list(folder, age=age)

    def folders(self) -> Sequence[str]:
        if "/" not in self.uri.removeprefix(f"{SCHEME}://box/"):
            self._calls["folders of the root"] += 1
        return sorted(path.name for path in self._folder.iterdir() if path.is_dir()) if self._folder.is_dir() else []

    def take(self, other: TableStore, name: str, how: Literal["copy", "link", "move"]) -> bool:
        try:
            with other.filesystem.open_input_stream(name) as source:
                data = source.read()
        except FileNotFoundError:
            return False
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return True

    def replace(self, name: str, data: bytes) -> None:
        LocalStore(self._folder).replace(name, data)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def sync(self, names: Iterable[str]) -> None:
        """What is here is durable."""

    @contextmanager
    def lease(self) -> Iterator[None]:
        yield

    @contextmanager
    def alone(self) -> Iterator[bool]:
        yield False


class _Put(io.BytesIO):
    """Bytes on their way: there as a whole once they are synced, as a put is."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def sync(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("xb") as file:
            return file.write(self.getvalue())
