"""Images of a log's files as a crash leaves them: made from a real log, then torn or garbled byte by byte."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.log.rocksmq.channel_log import ChannelLog
from millrace.log.rocksmq.disk import Disk, OsDisk
from millrace.log.rocksmq.manifest import ChannelManifest, encode_file_name
from millrace.log.rocksmq.pointer_index import RecordPointer
from millrace.log.rocksmq.segment import read_segment_header, walk_records
from millrace.log.rocksmq.service import RocksMQ, RocksMQLog
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message.ids import EARLIEST, LogId

CHANNEL = "c"
SETTINGS = RocksMQSettings(segment_bytes=64 << 10, spare_files=2, max_entry_bytes=1 << 20, lock_wait=1.0)

Entry = tuple[LogId, bytes]


@dataclass(frozen=True)
class Record:
    """A batch that was acknowledged, and where it stands in the last segment file."""

    offset: int
    size: int
    entries: list[Entry]

    @property
    def end(self) -> int:
        return self.offset + self.size

    def places(self) -> dict[str, tuple[int, int]]:
        """Every part of the record as (start, stop) in the file."""
        lengths = self.offset + 48
        body = lengths + 4 * len(self.entries)
        return {
            "checksum": (self.offset, self.offset + 4),
            "magic": (self.offset + 4, self.offset + 8),
            "salt": (self.offset + 8, self.offset + 16),
            "base": (self.offset + 16, self.offset + 24),
            "durable": (self.offset + 24, self.offset + 32),
            "body length": (self.offset + 32, self.offset + 40),
            "count": (self.offset + 40, self.offset + 44),
            "payload checksum": (self.offset + 44, self.offset + 48),
            "first length": (lengths, lengths + 4),
            "last length": (body - 4, body),
            "first byte of the body": (body, body + 1),
            "last byte of the body": (self.end - 1, self.end),
        }


@dataclass(frozen=True)
class Image:
    """A data folder without its index, as a crash right after the last acknowledgement leaves it."""

    directory: Path
    before: list[Entry]
    records: list[Record]

    @property
    def tail(self) -> Path:
        return sorted((self.directory / "channels" / encode_file_name(CHANNEL)).glob("*.log"))[-1]

    def entries(self, count: int) -> list[Entry]:
        """What stands in the log when the last file holds `count` records."""
        return self.before + [entry for record in self.records[:count] for entry in record.entries]

    def copy(self, target: Path, data: bytes) -> Path:
        """A copy whose last file has other bytes."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.directory, target)
        (target / self.tail.relative_to(self.directory)).write_bytes(data)
        return target


class LostIndex:
    """The pointer index after it was lost: it knows nothing and keeps nothing.

    Spares an enumeration RocksDB's opening.
    """

    def put(self, channel: str, incarnation: int, pointers: Iterable[RecordPointer], end: int) -> None: ...

    def end(self, channel: str, incarnation: int) -> int:
        return 0

    def at_or_before(self, channel: str, entry: int) -> RecordPointer | None:
        return None

    def set_begin(self, channel: str, begin: int, *, drop_below: int) -> None: ...

    def drop_channel(self, channel: str) -> None: ...


@contextmanager
def opened(directory: Path, *, disk: Disk | None = None) -> Iterator[RocksMQLog]:
    """The log in an image, opened from its files alone."""
    core = ChannelLog(
        directory / "channels" / encode_file_name(CHANNEL),
        LostIndex(),
        disk or OsDisk(),
        settings=SETTINGS,
        now_ms=lambda: time.time_ns() // 1_000_000,
    )
    try:
        yield RocksMQLog(core)
    finally:
        core.close()


def append(log: RocksMQLog, values: list[bytes]) -> list[Entry]:
    return list(zip(log.append(values), values, strict=True))


def read(log: RocksMQLog, position: LogId = EARLIEST) -> list[Entry]:
    entries: list[Entry] = []
    while (run := log.read(position, max_bytes=10_000)).batch.num_rows:
        ids = zip(run.batch.column("ledger").to_pylist(), run.batch.column("entry").to_pylist(), strict=True)
        values = run.batch.column("value").to_pylist()
        entries += [(LogId(*entry_id), value) for entry_id, value in zip(ids, values, strict=True)]
        position = run.next
    return entries


def records_of(path: Path, directory: Path, entries: list[Entry]) -> list[Record]:
    """The records in a segment file, with those of `entries` that they hold."""
    manifest = ChannelManifest.load(directory)
    by_id = dict(entries)
    fd = os.open(path, os.O_RDONLY)
    try:
        salt = manifest.salt(int(path.stem))
        assert read_segment_header(fd, salt, CHANNEL) is not None
        found = []
        for offset, header in walk_records(fd, salt, 0, path.stat().st_size, payloads=True):
            ids = [LogId(0, header.base + index) for index in range(header.entries)]
            if ids:
                found.append(Record(offset, header.size, [(entry_id, by_id[entry_id]) for entry_id in ids]))
        return found
    finally:
        os.close(fd)


def make_image(workspace: Path, *, stale: bool) -> Image:
    """A log of several files.

    With `stale` the last one is a recycled file that is full of records of its former life.
    """
    data = workspace / "origin"
    with RocksMQ(data, settings=SETTINGS) as service:
        service.create(CHANNEL)
        log = service.open(CHANNEL)
        entries: list[Entry] = []
        for _ in range(12):  # three files full
            entries += append(log, [b"old" * 1000, b"", b"older" * 1200])
        if stale:
            kept = entries[-4:]
            log.truncate(kept[0][0])
            entries = kept
        else:
            log.truncate(entries[0][0])
        channel = data / "channels" / encode_file_name(CHANNEL)
        last = sorted(channel.glob("*.log"))[-1]
        while sorted(channel.glob("*.log"))[-1] == last:  # until it rolls into a fresh or a recycled file
            entries += append(log, [b"filler" * 800])
        for index in range(4):
            entries += append(log, [b"%d" % index * 40, b"", b"RMQ1" * index, b"\x07" * (100 + index)])
        image = workspace / "image"
        shutil.copytree(data, image, ignore=shutil.ignore_patterns("index"))
    channel = image / "channels" / encode_file_name(CHANNEL)
    tail = sorted(channel.glob("*.log"))[-1]
    records = records_of(tail, channel, entries)
    inside = {entry_id for record in records for entry_id, _ in record.entries}
    if stale:
        assert tail.read_bytes()[records[-1].end :].count(b"RMQ1") > 1
    else:
        assert tail.read_bytes()[records[-1].end :].strip(b"\0") == b""
    return Image(image, [entry for entry in entries if entry[0] not in inside], records)


def begin(log: RocksMQLog) -> LogId:
    return log.describe().begin
