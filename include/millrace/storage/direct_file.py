"""A file that is written past the page cache, if the file system allows it.

First-touched page-cache pages cost a writer more CPU than the disk costs time (docs/performance.md, "The log"). Files
that are written and synced once gain nothing from them. :class:`DirectFile` buffers everything after the first
PLAIN_BYTES in one aligned buffer and writes it with O_DIRECT; the unaligned rest goes through the page cache. If
O_DIRECT is refused, everything goes through the page cache. Not thread-safe. Durable only after
:meth:`DirectFile.sync`.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Final

from millrace.base.files import sync_data

ALIGNMENT: Final = 4096
"""O_DIRECT requires offsets, sizes and memory in multiples of the device's block; 4 KiB covers common ones."""
BUFFER_BYTES: Final = 4 << 20
"""Bytes per direct write: large ones keep the disk busy without the page cache."""
PLAIN_BYTES: Final = 1 << 20
"""Leading bytes of each file that go through the page cache; a multiple of ALIGNMENT.

For a small file, a buffer's pages and a second wait for the disk would cost more than the cache's pages.
"""


class DirectFile:
    """A new file at `path`, with the interface of a Python file that pyarrow needs: write, tell, flush, close."""

    def __init__(self, path: Path, *, buffer_bytes: int = BUFFER_BYTES, plain_bytes: int = PLAIN_BYTES) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._buffer_bytes = buffer_bytes
        self._plain_bytes = plain_bytes
        self._buffer: mmap.mmap | None = None
        """Used from `plain_bytes` on."""
        self._view = memoryview(b"")
        self._held = 0
        self._written = 0
        self._direct = False
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        """Add `data`. Returns its number of bytes."""
        source = memoryview(data).cast("B")
        size = len(source)
        if self._buffer is None:
            plain = source[: self._plain_bytes - self._written]
            _write_all(self._descriptor, plain)
            self._written += len(plain)
            if self._written < self._plain_bytes:
                return size
            self._grow()
            source = source[len(plain) :]
        self._collect(source)
        return size

    def tell(self) -> int:
        return self._written + self._held

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        """Do nothing: the buffer is written when it is full, or by :meth:`sync`."""

    def sync(self) -> int:
        """Write the buffer and make the whole file durable. Returns its size in bytes."""
        held = self._held
        # The last part of a file is rarely a multiple of the block: write it through the page cache, and sync once for
        # both.
        aligned = held - held % ALIGNMENT
        if aligned:
            self._drain(aligned)
        if self._direct:
            _set_direct(self._descriptor, False)
            self._direct = False
        with self._view[aligned:held] as rest:
            _write_all(self._descriptor, rest)
            self._written += len(rest)
        self._held = 0
        sync_data(self._descriptor)
        return self._written

    def close(self) -> None:
        """Release all resources. Unsynced data may be lost. Idempotent."""
        if self.closed:
            return
        self.closed = True
        # After a failed write its traceback still holds a view, so the buffer is freed with the last view.
        self._view, self._buffer = memoryview(b""), None
        os.close(self._descriptor)

    def _grow(self) -> None:
        """Switch to the buffer: the file is not small."""
        self._buffer = mmap.mmap(-1, self._buffer_bytes)  # a mapping begins at a page, so it is aligned
        self._view = memoryview(self._buffer)
        self._direct = _set_direct(self._descriptor, True)

    def _collect(self, source: memoryview) -> None:
        size, taken = len(source), 0
        while taken < size:
            part = min(size - taken, len(self._view) - self._held)
            self._view[self._held : self._held + part] = source[taken : taken + part]
            self._held += part
            taken += part
            if self._held == len(self._view):
                self._drain(self._held)

    def _drain(self, size: int) -> None:
        with self._view[:size] as part:
            try:
                _write_all(self._descriptor, part)
            except OSError as error:
                # Some file systems accept the flag and refuse the write.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                _set_direct(self._descriptor, False)
                self._direct = False
                _write_all(self._descriptor, part)
        self._written += size
        self._held = 0


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Switch O_DIRECT on or off. Returns whether it is on."""
    import fcntl

    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:
        return False
    return wanted


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        written = os.write(descriptor, data)
        if written == len(data):
            return
        data = data[written:]
