"""A deployment whose log is in this process: real entries through the real chain, committed where a test wants it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millrace.base.settings import Settings
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message import builders
from millrace.message.model import MutableMessage
from millrace.message.wire.encode import encode_entry
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.wal.chain import CHAIN_VERSION
from tests.tables.wal_maker import Collection, WalMaker

LOG = RocksMQSettings(segment_bytes=128 << 10, spare_files=2, max_entry_bytes=1 << 20)


class LogMaker(WalMaker):
    """As WalMaker, with a log behind it. Close it at the end."""

    def __init__(self, settings: Settings, *, pchannels: Sequence[str] = ("p0", "p1")) -> None:
        self.settings = settings
        self.pchannels = tuple(pchannels)
        self.log = RocksMQ(settings.log_path, settings=LOG)
        self._logs = {}
        for name in pchannels:
            if name not in self.log.names():
                self.log.create(name)
            self._logs[name] = self.log.open(name)

    def append(self, pchannel: str, messages: Sequence[MutableMessage]) -> None:
        """One log entry; it is in the WAL with the next :meth:`commit`."""
        self._logs[pchannel].append([encode_entry(list(messages))])

    def open(self) -> None:
        for name in self.pchannels:
            self.append(name, [builders.term_opening(term=1, chain_version=CHAIN_VERSION, config={})])

    def commit(self, pchannel: str | None = None) -> None:
        ingest_to_end(self.settings, self.log)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        self.log.close()


class Things:
    """A collection on a :class:`LogMaker`, filled and flushed step by step."""

    def __init__(
        self, folder: Path, *, pchannels: Sequence[str] = ("p0", "p1"), before: Things | None = None, tables: str = ""
    ) -> None:
        self.settings = Settings(data_dir=folder / "data", tables=tables)
        self.maker = LogMaker(self.settings, pchannels=pchannels)
        self.collection = Collection(self.maker, vchannels=len(pchannels))
        if before is None:
            self.maker.open()
            self.collection.create()
        self.next = dict.fromkeys(self.collection.vchannels, 0) if before is None else dict(before.next)

    @classmethod
    def reopened(cls, folder: Path, before: Things) -> Things:
        """The same deployment, once `before` was closed (and whatever else had its log)."""
        return cls(folder, before=before)

    @property
    def log(self) -> RocksMQ:
        return self.maker.log

    def fill(self, entries: int = 3, *, rows: int = 2, size: int = 1000, delete: bool = True) -> None:
        """On each VChannel `entries` inserts of `rows` rows each, and a delete of one of them.

        Committed one by one, flushed.
        """
        self.fill_wal(entries, rows=rows, size=size, delete=delete)
        flush_to_end(self.settings)

    def fill_wal(self, entries: int = 3, *, rows: int = 2, size: int = 1000, delete: bool = True) -> None:
        """As :meth:`fill`, but nothing is flushed."""
        for _ in range(entries):
            for vchannel in self.collection.vchannels:
                start = self.next[vchannel]
                self.next[vchannel] = start + rows
                keys = self.collection.keys_of(vchannel, start + rows)[start:]
                body: list[object] = ["x" * size] * rows
                self.collection.append(
                    vchannel, self.collection.insert({"id": list(keys), "body": body}, vchannel=vchannel)
                )
                if delete:
                    self.collection.append(vchannel, self.collection.delete(keys[:1], vchannel=vchannel))
            self.maker.commit()

    def close(self) -> None:
        self.maker.close()
