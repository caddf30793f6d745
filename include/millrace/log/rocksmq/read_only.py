"""Read-only access to the embedded log while no server has it. Files are read as they are; nothing is created, cut or
moved.

A reader holds RocksDB's lock in shared mode, which keeps writers out. It yields at its next step when a server wants
the folder: it raises LogUnavailable, and the caller retries through that server. A torn write at the end, which a
normal open would cut, is skipped. The pointer index is read too, since it proves what was acknowledged.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.errors import ChannelNotFound, LogBusy, LogUnavailable
from millrace.base.file_lock import FLOCK
from millrace.log.protocol import LogHandle
from millrace.log.rocksmq.channel_log import ChannelLog
from millrace.log.rocksmq.disk import OsDisk
from millrace.log.rocksmq.manifest import PositionFile, decode_file_name, encode_file_name
from millrace.log.rocksmq.pointer_index import ReadOnlyPointerIndex
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message.ids import LogId
from millrace.message.log_entries import VerifyReport
from millrace.rpc.discovery import LOCK_FILE

_SHARED: Final = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
_GONE: Final = "a log server has these files now, or this reader was closed: ask again, and the server will answer"


def _refuse() -> NoReturn:
    raise LogUnavailable("this log is open for reading only: write through its server")


class ReadOnlyLog(LogHandle[ChannelLog]):
    """A read-only handle on one channel."""

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> NoReturn:
        _refuse()

    def truncate(self, position: LogId) -> NoReturn:
        _refuse()

    def verify(self) -> VerifyReport:
        """Verify every checksum of the channel."""
        return self._open().verify()


class ReadOnlyRocksMQ(Closeable):
    """The logs of one data folder (the LogService protocol), read-only. Thread-safe."""

    def __init__(self, folder: Path, *, server_folder: Path) -> None:
        """`server_folder`: the folder whose server would have the log.

        Raises LogBusy if a process has it.
        """
        self._path = folder
        self._server_lock = server_folder / LOCK_FILE
        self._lock = threading.Lock()
        self._cores: dict[str, ChannelLog] = {}
        self._index = ReadOnlyPointerIndex(folder / "index")
        self._descriptor = -1
        self._gone = False
        try:
            self._descriptor = os.open(folder / "index" / "LOCK", os.O_RDONLY)
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _SHARED)
        except FileNotFoundError:
            pass  # the log was never written
        except OSError as error:
            self.close()
            raise LogBusy(f"another process has the log at {folder}: use its server") from error

    def names(self) -> list[str]:
        """See :meth:`millrace.log.protocol.LogService.names`."""
        return self._listed(self._path / "channels")

    def open(self, pchannel: str) -> ReadOnlyLog:
        """Return a handle on an existing log.

        Raises ChannelNotFound, LogCorrupted.
        """
        self._give_way()
        directory = self._directory(pchannel)
        with self._lock:
            core = self._cores.get(pchannel)
            if core is None:
                core = self._cores[pchannel] = ChannelLog(
                    directory,
                    self._index,
                    OsDisk(),
                    settings=RocksMQSettings(),
                    now_ms=_refuse,
                    read_only_guard=self._give_way,
                )
        return ReadOnlyLog(core)

    def groups(self) -> list[str]:
        """See :meth:`millrace.log.protocol.LogService.groups`."""
        return self._listed(self._path / "groups")

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """See :meth:`millrace.log.protocol.LogService.group_position`."""
        self._directory(pchannel)
        entry = PositionFile(
            self._path / "groups" / encode_file_name(group) / encode_file_name(pchannel), OsDisk()
        ).position
        return None if entry is None else LogId(0, entry)

    def create(self, pchannel: str) -> NoReturn:
        _refuse()

    def drop(self, pchannel: str) -> NoReturn:
        _refuse()

    def move_group(self, group: str, pchannel: str, position: LogId) -> NoReturn:
        _refuse()

    def hold_group(self, group: str, pchannel: str, holder: str, *, seconds: float) -> None:
        """Do nothing: a reader that cannot move a group needs no lease."""

    def drop_group(self, group: str) -> NoReturn:
        _refuse()

    def close(self) -> None:
        """See :meth:`millrace.log.protocol.LogService.close`."""
        with self._lock:
            cores, self._cores = self._cores, {}
        self._gone = True
        for core in cores.values():
            core.close()
        self._index.close()
        self._release()

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _listed(self, folder: Path) -> list[str]:
        try:
            return sorted(decode_file_name(entry.name) for entry in folder.iterdir() if entry.name.startswith("~"))
        except FileNotFoundError:
            return []

    def _directory(self, pchannel: str) -> Path:
        directory = self._path / "channels" / encode_file_name(pchannel)
        if not directory.is_dir():
            raise ChannelNotFound(f"channel {pchannel!r} does not exist: create it first")
        return directory

    def _give_way(self) -> None:
        """Raise LogUnavailable, and release the lock, once a server waits for it."""
        if self._gone:
            raise LogUnavailable(_GONE)
        try:
            descriptor = os.open(self._server_lock, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self._gone = True
            self._release()
            raise LogUnavailable(_GONE) from None
        finally:
            os.close(descriptor)
