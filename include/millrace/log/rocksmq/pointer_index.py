"""The pointer index: one RocksDB per data folder, with chapter 4's keys.

    <channel>/<20-digit id>            one key per record (batch): salt, offset, bytes and count of the record
    <channel>/begin_id                 mirrors the manifest
    <channel>/end_id                   end of the indexed ids, and the channel's incarnation
    <group>/<channel>/current_id       mirrors the group's position file

The index holds no truth: nothing in it is synced, and all of it is rebuilt from segment files and manifests. Its
contents are in log order (RocksDB recovers a prefix of its writes), and a pointer is written only after its record
was synced. So ``end_id`` proves what was acknowledged. Ids are zero-padded, so that keys sort as ids do. RocksDB's
LOCK limits the data folder to one process.
"""

from __future__ import annotations

import logging
import shutil
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from rocksdict import AccessType, BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteBatch

from millrace.base.deadline import Deadline
from millrace.base.errors import LogBusy, LogUnavailable

_log = logging.getLogger(__name__)

_POINTER: Final = struct.Struct("<QQQI")
_END: Final = struct.Struct("<QQ")
_DIGITS: Final = 20
"""Decimal digits of a u64: keys sort as text in the order of their ids."""


_T = TypeVar("_T")


class IndexDamaged(Exception):
    """RocksDB found a block that fails verification, which it checks only when it reads the block."""


class RecordPointer(NamedTuple):
    """Location of a record."""

    base: int
    salt: int
    offset: int
    size: int
    entries: int


class PointerIndex:
    """The RocksDB of one data folder. Thread-safe."""

    def __init__(self, path: Path, *, lock_wait: float = 5.0) -> None:
        """Open or create the index. Waits up to `lock_wait` seconds for the lock, which a killed process may
        still hold.

        Raises LogBusy.
        """
        self._path = path
        self._db = _open(path, lock_wait)

    def close(self) -> None:
        """Close the index. A failed write is logged only, since the index can be rebuilt."""
        try:
            self._db.close()
        except Exception as error:
            _log.warning("the pointer index at %s did not close cleanly and will be rebuilt: %s", self._path, error)

    def recreate(self) -> None:
        """Recreate the index, empty, after an open found damage. Open channels scan segments until they are
        reopened.
        """
        _log.warning("the pointer index at %s is damaged: rebuilding it from the segment files", self._path)
        with suppress(Exception):
            self._db.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._db = _open(self._path, 0.0)

    def put(self, channel: str, incarnation: int, pointers: Iterable[RecordPointer], end: int) -> None:
        """Add `pointers`, and record that all ids below `end` are indexed."""
        batch = WriteBatch(raw_mode=True)
        prefix = channel.encode() + b"/"
        for base, salt, offset, size, entries in pointers:
            batch.put(prefix + b"%020d" % base, _POINTER.pack(salt, offset, size, entries))
        batch.put(prefix + b"end_id", _END.pack(end, incarnation))
        self._db.write(batch)

    def end(self, channel: str, incarnation: int) -> int:
        """Return the end of the indexed ids; 0 if this incarnation of the channel is unknown.

        Raises IndexDamaged.
        """
        value = self._read(lambda: self._db.get(channel.encode() + b"/end_id"))
        if value is None or len(value) != _END.size:
            return 0
        end, of = _END.unpack(value)
        return int(end) if of == incarnation else 0

    def at_or_before(self, channel: str, entry: int) -> RecordPointer | None:
        """Return the last pointer with a base <= `entry`.

        Raises IndexDamaged.
        """
        return self._read(lambda: self._at_or_before(channel, entry))

    def _read(self, look: Callable[[], _T]) -> _T:
        try:
            return look()
        except Exception as error:
            raise IndexDamaged(f"cannot read the pointer index at {self._path}: {error}") from error

    def _at_or_before(self, channel: str, entry: int) -> RecordPointer | None:
        prefix = channel.encode() + b"/"
        cursor = self._db.iter()
        cursor.seek_for_prev(prefix + b"%020d" % entry)
        while cursor.valid():
            key = cursor.key()
            if not key.startswith(prefix):
                return None
            digits, value = key[len(prefix) :], cursor.value()
            # A group with the channel's name has longer keys under the same prefix: skip them.
            if len(digits) == _DIGITS and digits.isdigit() and len(value) == _POINTER.size:
                return RecordPointer(int(digits), *_POINTER.unpack(value))
            cursor.prev()
        return None

    def set_begin(self, channel: str, begin: int, *, drop_below: int) -> None:
        """Mirror a truncation, and remove the pointers with ids below `drop_below`."""
        prefix = channel.encode() + b"/"
        self._drop_pointers(channel, 0, drop_below)
        self._db.put(prefix + b"begin_id", b"%020d" % begin)

    def drop_channel(self, channel: str) -> None:
        """Remove everything of a channel except group positions."""
        self._drop_pointers(channel, 0, (1 << 64) - 1)
        for name in (b"begin_id", b"end_id"):
            self._db.delete(channel.encode() + b"/" + name)

    def set_current(self, group: str, channel: str, entry: int | None) -> None:
        """Mirror a group's position."""
        key = f"{group}/{channel}/current_id".encode()
        try:
            if entry is None:
                self._db.delete(key)
            else:
                self._db.put(key, b"%020d" % entry)
        except Exception as error:  # the position file has it
            _log.warning("the pointer index at %s cannot store a position: %s", self._path, error)

    def _drop_pointers(self, channel: str, start: int, stop: int) -> None:
        prefix = channel.encode() + b"/"
        doomed = WriteBatch(raw_mode=True)
        cursor = self._db.iter()
        cursor.seek(prefix + b"%020d" % start)
        limit = prefix + b"%020d" % stop
        while cursor.valid() and (key := cursor.key()) < limit:
            if len(key) == len(limit) and key[len(prefix) :].isdigit():
                doomed.delete(key)
            cursor.next()
        self._db.write(doomed)


class ReadOnlyPointerIndex(PointerIndex):
    """The index as it is on disk, for reading only. If it does not open, it is treated as empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = None
        if (path / "CURRENT").exists():
            try:
                self._db = Rdict(str(path), options=Options(raw_mode=True), access_type=AccessType.read_only(False))
            except Exception as error:
                _log.info("cannot open the pointer index at %s: %s", path, error)

    def close(self) -> None:
        if self._db is not None:
            super().close()

    def end(self, channel: str, incarnation: int) -> int:
        with suppress(IndexDamaged):
            return 0 if self._db is None else super().end(channel, incarnation)
        return 0

    def at_or_before(self, channel: str, entry: int) -> RecordPointer | None:
        with suppress(IndexDamaged):
            return None if self._db is None else super().at_or_before(channel, entry)
        return None


def _options() -> Any:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    options.set_write_buffer_size(8 << 20)
    options.set_max_write_buffer_number(3)
    options.set_keep_log_file_num(2)
    options.set_max_background_jobs(2)
    table = BlockBasedOptions()
    table.set_block_cache(Cache(8 << 20))
    options.set_block_based_table_factory(table)
    return options


def _open(path: Path, lock_wait: float) -> Any:
    deadline = Deadline.after(lock_wait)
    rebuilt = False
    while True:
        try:
            return Rdict(str(path), options=_options(), access_type=AccessType.read_write())
        except Exception as error:
            text = str(error)
            if "/LOCK:" in text:
                if not deadline.pause(0.02):
                    raise LogBusy(
                        f"another process holds the log at {path.parent}: use it through its server"
                    ) from error
            elif rebuilt or text.startswith("IO error: No space"):
                raise LogUnavailable(f"cannot open the pointer index at {path}: {text}") from error
            else:  # damaged: it holds no truth and is rebuilt from the segment files
                shutil.rmtree(path, ignore_errors=True)
                rebuilt = True
