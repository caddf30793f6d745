"""What must survive besides the segment files, small and synced: a channel's manifest and a group's positions.

The manifest (one file a channel, replaced atomically) holds where the channel begins and the floor of its ids; it is
durable before any file behind it is recycled. A group's position (one file a group and channel) has two slots that are
written in turn, so that a torn write leaves the former position. RocksDB mirrors both and owns neither.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from crc32c import crc32c

from millrace.base.errors import InvalidArgument, LogCorrupted, UnsupportedVersion
from millrace.log.rocksmq.disk import Disk

_VERSION: Final = 1
_MAX_NAME_BYTES: Final = 80


def encode_file_name(name: str) -> str:
    """A channel's or group's name as a file name. Raises InvalidArgument where it is none."""
    encoded = name.encode("utf-8", "replace")
    if not name or "/" in name or "\0" in name or len(encoded) > _MAX_NAME_BYTES:
        raise InvalidArgument(
            f"{name!r} is no channel or group name: 1 to {_MAX_NAME_BYTES} bytes of UTF-8 without '/'"
        )
    # "~" stands before every name, so that "." and ".." are names like others.
    return "~" + quote(name, safe="")


def decode_file_name(file: str) -> str:
    """Inverse of :func:`encode_file_name`."""
    return unquote(file[1:])


def write_checksummed(path: Path, text: bytes, disk: Disk, *, durable: bool = True) -> None:
    """Replace a small file by one line and its checksum, whole; unless `durable` only for as long as the machine runs."""
    draft = path.with_name(f"{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        disk.write(fd, [b"%s\n%08x\n" % (text, crc32c(text))], 0)
        if durable:
            disk.sync(fd)
    finally:
        os.close(fd)
    draft.replace(path)
    if durable:
        disk.sync_directory(path.parent)


def read_checksummed(path: Path) -> bytes:
    """The line that :func:`write_checksummed` wrote. Raises FileNotFoundError, LogCorrupted."""
    text, _, crc = path.read_bytes().partition(b"\n")
    if crc.strip() != b"%08x" % crc32c(text):
        raise LogCorrupted(f"{path} fails its checksum: restore it")
    return text


@dataclass(frozen=True, slots=True)
class ChannelManifest:
    """A channel's fixed facts and its beginning.

    ``incarnation`` tells a channel from a former one of the same name; ``begin`` is the first id that can be read (0:
    never truncated); ``floor`` the last id that was given when this was written (-1: none); ``first_segment`` the
    number of the oldest segment file that is kept.
    """

    channel: str
    incarnation: int
    begin: int
    floor: int
    first_segment: int

    def salt(self, segment: int) -> int:
        """The salt of a segment's records."""
        return (self.incarnation << 32) | segment

    def store(self, directory: Path, disk: Disk) -> None:
        """Replace the manifest in `directory`, durably; on a full disk in the room that :func:`keep_reserve` kept."""
        try:
            self._store(directory, disk)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS or not _give_up_reserve(directory):
                raise
            self._store(directory, disk)

    def _store(self, directory: Path, disk: Disk) -> None:
        text = json.dumps({"version": _VERSION, **asdict(self)}, sort_keys=True).encode()
        write_checksummed(directory / "manifest", text, disk)

    @classmethod
    def load(cls, directory: Path) -> ChannelManifest:
        """The manifest in `directory`. Raises FileNotFoundError, LogCorrupted, UnsupportedVersion."""
        fields = json.loads(read_checksummed(directory / "manifest"))
        version = fields.pop("version")
        if version != _VERSION:
            raise UnsupportedVersion(f"{directory / 'manifest'} has version {version}; this build knows {_VERSION}")
        return cls(**fields)


DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RESERVE: Final = "reserve"
_RESERVE_BYTES: Final = 16 << 10


def keep_reserve(directory: Path) -> None:
    """Set a little room aside, so that a full disk can still be truncated; where there is none now, nothing happens."""
    path = directory / _RESERVE
    if path.exists():
        return
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
    except OSError:
        path.unlink(missing_ok=True)


def _give_up_reserve(directory: Path) -> bool:
    """Whether there was a reserve; its room is free now."""
    try:
        (directory / _RESERVE).unlink()
    except FileNotFoundError:
        return False
    return True


_SLOT: Final = struct.Struct("<QQI")
_SLOT_STRIDE: Final = 512


class PositionFile:
    """A consumer group's position in one channel: one write and one fdatasync a change."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._turn, self._position = self._load()

    @property
    def position(self) -> int | None:
        """The id it stands at; None where it never was set."""
        return self._position

    def store(self, position: int) -> None:
        """Move to `position`, durably."""
        created = not self._path.exists()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            turn = self._turn + 1
            body = struct.pack("<QQ", turn, position)
            self._disk.write(fd, [body + struct.pack("<I", crc32c(body))], (turn % 2) * _SLOT_STRIDE)
            self._disk.sync(fd)
        finally:
            os.close(fd)
        if created:
            self._disk.sync_directory(self._path.parent)
        self._turn, self._position = turn, position

    def _load(self) -> tuple[int, int | None]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return 0, None
        best: tuple[int, int | None] = (0, None)
        for at in (0, _SLOT_STRIDE):
            if len(data) >= at + _SLOT.size:
                turn, position, crc = _SLOT.unpack_from(data, at)
                if crc == crc32c(data[at : at + 16]) and turn > best[0]:
                    best = (turn, position)
        return best
