"""The system calls by which the log uses its medium, as an interface, so that tests can make a write or a sync fail.

Promises of :class:`Disk`: `write` has written every byte when it returns; `sync` returns only when the file's data is
on the medium; `sync_directory` the same for names. Each raises OSError otherwise, and the caller must then assume
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from millrace.base.errors import LogUnavailable
from millrace.base.files import sync, sync_data

_MAX_VECTORS: Final = 1024
"""IOV_MAX of Linux."""


class Buffer(Protocol):
    """An object that exposes contiguous bytes."""

    def __len__(self) -> int: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


@contextmanager
def unavailable_on_failure(doing: str) -> Iterator[None]:
    """Convert a file system error to LogUnavailable."""
    try:
        yield
    except OSError as error:
        raise LogUnavailable(f"{doing} failed: {error}") from error


class Disk(Protocol):
    """The file system operations that the log needs."""

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write `buffers` contiguously at `offset`."""
        ...

    def sync(self, fd: int) -> None:
        """Sync the data, and the metadata needed to read it back (fdatasync)."""
        ...

    def allocate(self, fd: int, size: int) -> None:
        """Reserve `size` bytes, so that a full disk shows before an append and not during it."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make creations, renames and removals in `path` durable."""
        ...


class OsDisk:
    """The operating system's file system."""

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        for start in range(0, len(buffers), _MAX_VECTORS):
            vectors = buffers[start : start + _MAX_VECTORS]
            wanted = sum(map(len, vectors))
            written = os.pwritev(fd, vectors, offset)
            offset += written
            if written != wanted:  # a short write: pwritev stops at 2 GiB, and at a full disk
                rest = memoryview(b"".join(vectors))[written:]
                while rest:
                    written = os.pwrite(fd, rest, offset)
                    offset += written
                    rest = rest[written:]

    def sync(self, fd: int) -> None:
        sync_data(fd)

    def allocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync(fd)
        finally:
            os.close(fd)
