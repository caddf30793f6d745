"""A deployment of a log's server and the ``wal`` table, for the streaming node on Spark and without."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable

from millrace.base.settings import Settings
from millrace.message.ids import LogId
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService
from millrace.tables.wal.table import WalTable
from millrace.wal.digest import digest_rows


class Deployment:
    """A log server with two PChannels, and the table the node makes of it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.service = RemoteLogService.connect(settings.log_path, launch=launch_of(settings))
        for name in ("p0", "p1"):
            self.service.create(name)

    def append(self, pchannel: str, *entries: bytes) -> list[LogId]:
        return list(self.service.open(pchannel).append(entries))

    def rows(self, pchannel: str) -> int:
        """Message and rejection rows that are committed."""
        if not DeltaTable.is_deltatable(str(Path(self.settings.wal_uri))):
            return 0
        return WalTable.open(Path(self.settings.wal_uri)).position(pchannel).totals.digest.rows

    def check(self) -> None:
        """Every row is there once, and the totals say so."""
        content = DeltaTable(str(Path(self.settings.wal_uri))).to_pyarrow_table(filters=[("kind", "!=", "state")])
        columns = [content.column(name).to_pylist() for name in ("pchannel", "entry", "index", "ordinal")]
        assert len(set(zip(*columns, strict=True))) == content.num_rows
        table = WalTable.open(Path(self.settings.wal_uri))
        totals = [table.position(name).totals for name in ("p0", "p1")]
        assert digest_rows(content) == totals[0].digest + totals[1].digest
