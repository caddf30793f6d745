"""Small synced files beside the segments: a channel's manifest and consumer groups' positions.

The manifest (one file per channel, replaced atomically) holds where the channel begins and the floor of its ids. It
is durable before any earlier file is recycled. A group's position (one file per group and channel) has two slots,
written alternately, so that a torn write leaves the previous position. RocksDB mirrors both and owns neither.
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
    """Return a channel's or group's name as a file name.

    Raises InvalidArgument for an invalid name.
    """
    encoded = name.encode("utf-8", "replace")
    if not name or "/" in name or "\0" in name or len(encoded) > _MAX_NAME_BYTES:
        raise InvalidArgument(
            f"{name!r} is not a valid channel or group name: 1 to {_MAX_NAME_BYTES} bytes of UTF-8 without '/'"
        )
    # The prefix "~" makes "." and ".." ordinary names.
    return "~" + quote(name, safe="")


def decode_file_name(file: str) -> str:
    """Inverse of :func:`encode_file_name`."""
    return unquote(file[1:])


def write_checksummed(path: Path, text: bytes, disk: Disk, *, durable: bool = True) -> None:
    """Replace a small file atomically with one line and its checksum; unless `durable`, it need not survive a power
    loss.
    """
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
    """Return the line that :func:`write_checksummed` wrote.

    Raises FileNotFoundError, LogCorrupted.
    """
    text, _, crc = path.read_bytes().partition(b"\n")
    if crc.strip() != b"%08x" % crc32c(text):
        raise LogCorrupted(f"{path} fails its checksum: restore it")
    return text


@dataclass(frozen=True, slots=True)
class ChannelManifest:
    """A channel's constants and its beginning.

    ``incarnation`` distinguishes a channel from a former one of the same name. ``begin`` is the first readable id (0:
    never truncated). ``floor`` is the last id allocated when the manifest was written (-1: none). ``first_segment``
    is the number of the oldest retained segment file.
    """

    channel: str
    incarnation: int
    begin: int
    floor: int
    first_segment: int

    def salt(self, segment: int) -> int:
        """Return the salt of a segment's records."""
        return (self.incarnation << 32) | segment

    def store(self, directory: Path, disk: Disk) -> None:
        """Replace the manifest in `directory`, durably. On a full disk it uses the room that :func:`keep_reserve`
        reserved.
        """
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
        """Read the manifest in `directory`.

        Raises FileNotFoundError, LogCorrupted, UnsupportedVersion.
        """
        fields = json.loads(read_checksummed(directory / "manifest"))
        version = fields.pop("version")
        if version != _VERSION:
            raise UnsupportedVersion(f"{directory / 'manifest'} has version {version}; this build knows {_VERSION}")
        return cls(**fields)


DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RESERVE: Final = "reserve"
_RESERVE_BYTES: Final = 16 << 10
"""Enough for a new manifest and its directory entry."""


def keep_reserve(directory: Path) -> None:
    """Reserve a little disk space, so that a log on a full disk can still be truncated. No effect if there is none."""
    path = directory / _RESERVE
    if path.exists():
        return
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
    except OSError:
        path.unlink(missing_ok=True)


def _give_up_reserve(directory: Path) -> bool:
    """Free the reserve; return whether there was one."""
    try:
        (directory / _RESERVE).unlink()
    except FileNotFoundError:
        return False
    return True


_SLOT: Final = struct.Struct("<QQI")
_SLOT_STRIDE: Final = 512
"""One disk sector: the two slots are never in one write, so a torn write damages one of them."""


class PositionFile:
    """A consumer group's position in one channel: one write and one fdatasync per change."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._turn, self._position = self._load()

    @property
    def position(self) -> int | None:
        """The current id; None if it was never set."""
        return self._position

    def store(self, position: int) -> None:
        """Move to `position`, durably."""
        created = not self._path.exists()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            turn = self._turn + 1
            body = struct.pack("<QQ", turn, position)
            # The slots alternate: the previous position stays intact until the new one is durable.
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
