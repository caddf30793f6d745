"""RocksMQ: the embedded log, with the API of chapter 4 (A.4) in Python names.

    <path>/index/                     RocksDB: keys -> pointers, unsynced, rebuilt from the files if lost
    <path>/channels/~<channel>/       manifest, segment files, spares
    <path>/groups/~<group>/~<channel> a group's position, one synced write per change
    <path>/clock.json                 state of the stamp clock, for the next process (millrace.log.rocksmq.stamp_clock)

One process at a time holds a data folder (RocksDB's LOCK); others use it through its server. :meth:`RocksMQ.consume`
moves a consumer group durably before it returns, so a crashed consumer gets the messages in its hands again only by
:meth:`RocksMQ.seek`, as in chapter 4. Known defects of RocksMQ are fixed here: acknowledged means synced, ids sort at
every width, truncation frees whole files at once, and reading a truncated position is an error.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.errors import ChannelExists, ChannelNotFound, InvalidArgument, LogUnavailable
from millrace.base.files import make_folder
from millrace.log.group_leases import LeasesInProcess
from millrace.log.protocol import LogHandle
from millrace.log.rocksmq.channel_log import ChannelLog
from millrace.log.rocksmq.disk import Disk, OsDisk, unavailable_on_failure
from millrace.log.rocksmq.id_allocator import IdAllocator
from millrace.log.rocksmq.manifest import ChannelManifest, PositionFile, decode_file_name, encode_file_name
from millrace.log.rocksmq.pointer_index import IndexDamaged, PointerIndex
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.log.rocksmq.stamp_clock import StampClock
from millrace.message.ids import LOGICAL_BITS, LogId, LogIds
from millrace.message.log_entries import StampFloor, VerifyReport

CLOCK_FILE: Final = "clock.json"
_CONSUME_BYTES = 4 << 20
_NEW = "new-"
_DROP = "drop-"


class ConsumerMessage(NamedTuple):
    """Chapter 4's ``ConsumerMessage``."""

    message_id: int
    payload: bytes


class RocksMQLog(LogHandle[ChannelLog]):
    """A handle on one channel (the Log protocol). Closing it leaves other handles of the channel open."""

    is_local: Final = True

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> LogIds:
        """See :meth:`millrace.log.protocol.Log.append`."""
        return LogIds(0, self._open().append(values))

    def stamp_floor(self) -> StampFloor | None:
        """See :meth:`millrace.log.protocol.StampPromising.stamp_floor`."""
        return self._open().stamp_floor()

    def wake(self) -> None:
        """See :meth:`millrace.log.protocol.LocalLog.wake`."""
        self._open().wake()

    def enforce_retention(
        self, *, allowed: LogId, retention_bytes: int | None = None, retention_ms: int | None = None
    ) -> int:
        """Discard whole files beyond the retention, nothing from `allowed` on; return the bytes freed.

        `retention_bytes` and `retention_ms` override the settings of these names.
        """
        return self._open().enforce_retention(
            allowed=allowed, retention_bytes=retention_bytes, retention_ms=retention_ms
        )

    def verify(self) -> VerifyReport:
        """Verify every checksum of the channel."""
        return self._open().verify()


class RocksMQ(LeasesInProcess, Closeable):
    """The logs of one data folder (the LogService protocol and chapter 4's API). Thread-safe."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        settings: RocksMQSettings | None = None,
        disk: Disk | None = None,
        now_ms: Callable[[], int] | None = None,
        clock: StampClock | None = None,
        id_allocator: IdAllocator | None = None,
    ) -> None:
        """Open or create the data folder `path`.

        `id_allocator` numbers the entries of all channels; by default each channel numbers its own.
        Stamps come from `clock` (default: the host's, guarded against leaps), or unchecked from `now_ms`.
        Raises LogBusy if another process has the folder.
        """
        self._settings = settings or RocksMQSettings()
        self._disk = disk or OsDisk()
        self._id_allocator = id_allocator
        self._path = Path(path).absolute()
        self._channels = self._path / "channels"
        self._groups = self._path / "groups"
        for directory in (self._channels, self._groups):
            make_folder(directory)
        self._index = PointerIndex(self._path / "index", lock_wait=self._settings.lock_wait)
        for directory in (self._path, self._path.parent):
            self._disk.sync_directory(directory)
        if now_ms is None:
            clock = clock or StampClock(self._path / CLOCK_FILE, max_leap_seconds=self._settings.clock_leap)
            now_ms = clock.now_ms
        self._clock = clock
        self._now_ms = now_ms
        self._lock = threading.RLock()
        self._cores: dict[str, ChannelLog] = {}
        self._positions: dict[tuple[str, str], PositionFile] = {}
        self._closed = False
        self._finish_drops()

    @property
    def path(self) -> Path:
        """The data folder."""
        return self._path

    @property
    def clock(self) -> StampClock | None:
        """The clock that stamps entries; None if they come from `now_ms`."""
        return self._clock

    # The LogService protocol

    def create(self, pchannel: str) -> None:
        """Create an empty log.

        Raises ChannelExists.
        """
        with self._lock:
            self._check_open()
            directory = self._channels / encode_file_name(pchannel)
            if directory.exists():
                raise ChannelExists(f"channel {pchannel!r} exists already")
            draft = self._channels / f"{_NEW}{directory.name}"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            manifest = ChannelManifest(pchannel, secrets.randbits(31), begin=0, floor=-1, first_segment=1)
            manifest.store(draft, self._disk)
            draft.rename(directory)
            self._disk.sync_directory(self._channels)

    def open(self, pchannel: str) -> RocksMQLog:
        """Return a handle on an existing log; reopen one that a failed write stopped.

        Raises ChannelNotFound, LogCorrupted.
        """
        core = self._core(pchannel)
        core.reopen()
        return RocksMQLog(core)

    def names(self) -> list[str]:
        """Return the channels, sorted."""
        self._check_open()
        return sorted(decode_file_name(entry.name) for entry in self._channels.iterdir() if entry.name.startswith("~"))

    def drop(self, pchannel: str) -> None:
        """Drop a log with all its entries and its groups' positions.

        Raises ChannelNotFound.
        """
        with self._lock:
            self._check_open()
            directory = self._directory(pchannel)
            core = self._cores.pop(pchannel, None)
            if core is not None:
                core.close()
            for group in self.consumer_groups():
                self._forget_position(group, pchannel)
            doomed = self._channels / f"{_DROP}{directory.name}"
            directory.rename(doomed)
            self._disk.sync_directory(self._channels)
            self._index.drop_channel(pchannel)
            shutil.rmtree(doomed)

    def groups(self) -> list[str]:
        """See :meth:`millrace.log.protocol.LogService.groups`. Groups of chapter 4's API are the same."""
        self._check_open()
        return self.consumer_groups()

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """See :meth:`millrace.log.protocol.LogService.group_position`."""
        with self._lock:
            self._check_open()
            self._directory(pchannel)
            if not (self._groups / encode_file_name(group)).is_dir():
                return None
            entry = self._position(group, pchannel).position
            return None if entry is None else LogId(0, entry)

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        """See :meth:`millrace.log.protocol.LogService.move_group`."""
        if position.ledger or not 0 <= position.entry < 1 << 63:
            raise InvalidArgument(f"{position} is not a position of this log: its ledger is 0")
        with self._lock:
            self._check_open()
            self._directory(pchannel)
            if not (self._groups / encode_file_name(group)).is_dir():
                self.create_consumer_group(group)
            self._move(group, pchannel, position.entry)

    def drop_group(self, group: str) -> None:
        """See :meth:`millrace.log.protocol.LogService.drop_group`."""
        with self._lock:
            self._check_open()
            if (self._groups / encode_file_name(group)).is_dir():
                self.destroy_consumer_group(group)

    def close(self) -> None:
        """Close the service and its handles. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for core in self._cores.values():
                core.close()
            self._index.close()
            if self._clock is not None:
                self._clock.close()

    # Chapter 4

    def create_channel(self, channel: str) -> None:
        """Same as `create`."""
        self.create(channel)

    def destroy_channel(self, channel: str) -> None:
        """Same as `drop`."""
        self.drop(channel)

    def create_consumer_group(self, group: str) -> None:
        """Create a consumer group.

        Raises ChannelExists.
        """
        with self._lock:
            self._check_open()
            try:
                (self._groups / encode_file_name(group)).mkdir()
            except FileExistsError:
                raise ChannelExists(f"consumer group {group!r} exists already") from None
            self._disk.sync_directory(self._groups)

    def destroy_consumer_group(self, group: str) -> None:
        """Remove a consumer group and its positions.

        Raises ChannelNotFound.
        """
        with self._lock:
            self._check_open()
            directory = self._group(group)
            for channel in self.names():
                self._forget_position(group, channel)
            shutil.rmtree(directory)
            self._disk.sync_directory(self._groups)

    def consumer_groups(self) -> list[str]:
        """Return the consumer groups, sorted."""
        return sorted(decode_file_name(entry.name) for entry in self._groups.iterdir() if entry.name.startswith("~"))

    def produce(self, channel: str, messages: Sequence[bytes]) -> list[int]:
        """Append `messages` as one atomic batch; return their ids when they are durable."""
        return list(self._core(channel).append(messages))

    def consume(self, group: str, channel: str, n: int) -> list[ConsumerMessage]:
        """Return up to `n` messages from the group's position on, and move it after them, durably, before this returns.

        Raises PositionTruncated if the position was truncated: seek to its ``earliest``.
        """
        if n < 0:
            raise InvalidArgument(f"cannot consume {n} messages")
        with self._lock:
            core, position = self._core(channel), self.current_id(group, channel)
            messages: list[ConsumerMessage] = []
            while len(messages) < n:
                run = core.read(LogId(0, position), end=None, max_bytes=_CONSUME_BYTES, timeout=0.0)
                if not run.batch.num_rows:
                    break
                taken = run.batch.slice(0, n - len(messages))
                messages += map(ConsumerMessage, taken.column("entry").to_pylist(), taken.column("value").to_pylist())
                position = messages[-1].message_id + 1
            if messages:
                self._move(group, channel, position)
            return messages

    def seek(self, group: str, channel: str, message_id: int) -> None:
        """Move the group's position, durably. The next message consumed is the first with an id >= `message_id`."""
        with self._lock:
            self._directory(channel)
            self._group(group)
            if not 0 <= message_id < 1 << 63:
                raise InvalidArgument(f"{message_id} is not a message id")
            self._move(group, channel, message_id)

    def begin_id(self, channel: str) -> int:
        """Return the earliest readable id (0: never truncated)."""
        return self._core(channel).describe().begin.entry

    def end_id(self, channel: str) -> int:
        """Return the id after the last message (0: there never was one)."""
        return self._core(channel).describe().end.entry

    def current_id(self, group: str, channel: str) -> int:
        """Return the group's position in a channel; 0 if it never consumed or sought there."""
        with self._lock:
            return self._position(group, channel).position or 0

    def _move(self, group: str, channel: str, position: int) -> None:
        with unavailable_on_failure(f"moving group {group!r}"):
            self._position(group, channel).store(position)
        self._index.set_current(group, channel, position)

    def _position(self, group: str, channel: str) -> PositionFile:
        directory = self._group(group)
        self._directory(channel)
        key = (group, channel)
        if key not in self._positions:
            self._positions[key] = PositionFile(directory / encode_file_name(channel), self._disk)
        return self._positions[key]

    def _forget_position(self, group: str, channel: str) -> None:
        directory = self._group(group)
        self._positions.pop((group, channel), None)
        path = directory / encode_file_name(channel)
        if path.exists():
            path.unlink()
            self._disk.sync_directory(directory)
            self._index.set_current(group, channel, None)

    def _core(self, channel: str) -> ChannelLog:
        with self._lock:
            self._check_open()
            core = self._cores.get(channel)
            if core is None:
                directory = self._directory(channel)
                try:
                    core = self._opened(directory)
                except IndexDamaged:
                    self._index.recreate()
                    core = self._opened(directory)
                self._cores[channel] = core
                if self._clock is not None:
                    self._clock.observe(core.describe().end.entry - 1 >> LOGICAL_BITS)
            return core

    def _opened(self, directory: Path) -> ChannelLog:
        return ChannelLog(
            directory,
            self._index,
            self._disk,
            settings=self._settings,
            now_ms=self._now_ms,
            id_allocator=self._id_allocator,
            floor_ms=None if self._clock is None else self._clock.floor_ms,
        )

    def _directory(self, channel: str) -> Path:
        directory = self._channels / encode_file_name(channel)
        if not directory.is_dir():
            raise ChannelNotFound(f"channel {channel!r} does not exist in {self._path}: create it first")
        return directory

    def _group(self, group: str) -> Path:
        directory = self._groups / encode_file_name(group)
        if not directory.is_dir():
            raise ChannelNotFound(f"consumer group {group!r} does not exist in {self._path}: create it first")
        return directory

    def _check_open(self) -> None:
        if self._closed:
            raise LogUnavailable(f"the log at {self._path} is closed: open it again")

    def _finish_drops(self) -> None:
        """Clean up after a crash: remove channels that were half created or half dropped. Other files are
        left alone.
        """
        for entry in self._channels.iterdir():
            if entry.name.startswith(_DROP + "~"):
                self._index.drop_channel(decode_file_name(entry.name.removeprefix(_DROP)))
            elif not entry.name.startswith(_NEW + "~"):
                continue
            shutil.rmtree(entry)


def open_location(location: str, settings: Mapping[str, object]) -> RocksMQ:
    """Open a log for the registry. `location` is the data folder, `settings` are those of :class:`RocksMQSettings`."""
    return RocksMQ(location, settings=RocksMQSettings.of(settings))
