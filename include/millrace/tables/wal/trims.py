"""Rows that retention removed from the ``wal`` table, so that the rest can still be verified: the Delta table
``wal_trims``.

A trim removes whole files of a PChannel and moves the app id ``<pchannel>/trimmed`` to its tick, in one commit to
``wal``. So a reader of any version knows from that version alone up to where rows are gone. The number of rows and
their digest are in this table, in a row that is written before that commit and valid from it on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.table import create_table, open_table
from millrace.tables.wal.reader import TRIMMED_APP_SUFFIX
from millrace.tables.wal.table import WalTable, WalTotals
from millrace.wal.digest import WalDigest

COLUMNS: Final = pa.schema(
    [
        pa.field("pchannel", pa.utf8()),
        pa.field("time_tick", pa.int64()),  # rows up to here may be gone
        pa.field("messages", pa.int64()),  # rows that are gone, all trims together
        pa.field("rejections", pa.int64()),
        pa.field("digest", pa.utf8()),  # of those rows
        pa.field("files", pa.int64()),  # of this trim
        pa.field("bytes", pa.int64()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
    ]
)


@dataclass(frozen=True, slots=True)
class WalTrim:
    """One trim of a PChannel. `totals` are of all trims up to it."""

    pchannel: str
    time_tick: int
    totals: WalTotals
    files: int
    bytes: int


def trims_uri(wal: object) -> str:
    """Return the URI of the table, next to the ``wal`` table at `wal`."""
    return f"{str(wal).rpartition('/')[0]}/wal_trims"


def trimmed_totals(wal: WalTable) -> dict[str, WalTotals]:
    """Return the totals of removed rows by PChannel, for those trimmed at the version of `wal`."""
    reached = {name: wal.table.app_version(name + TRIMMED_APP_SUFFIX) for name in wal.pchannels()}
    if not any(reached.values()):
        return {}
    path = trims_uri(wal.table.uri)
    table = open_table(path)
    if table is None:
        return {}
    actions = table.actions()
    # Each trim wrote a file with one row: open only those that count.
    wanted = pc.is_in(actions["max.time_tick"], pa.array(sorted(set(reached.values())), pa.int64()))
    rows = table.read_rows(actions.filter(wanted)["path"].to_pylist(), COLUMNS).sort_by("at").to_pylist()
    return {
        row["pchannel"]: WalTotals(row["messages"], row["rejections"], WalDigest.parse(row["digest"]))
        for row in rows
        if row["time_tick"] == reached.get(row["pchannel"])
    }


def record_trim(wal: object, trim: WalTrim) -> None:
    """Write the row of a trim that is about to be committed to ``wal``."""
    path = trims_uri(wal)
    table = create_table(path, COLUMNS, partition_by=[])
    row = {
        "pchannel": trim.pchannel,
        "time_tick": trim.time_tick,
        "messages": trim.totals.messages,
        "rejections": trim.totals.rejections,
        "digest": str(trim.totals.digest),
        "files": trim.files,
        "bytes": trim.bytes,
        "at": time.time_ns() // 1000,
    }
    sink = FileSink.at(path, COLUMNS, ("time_tick",))
    sink.write(pa.Table.from_pylist([row], schema=COLUMNS), {})
    commit_fenced(table, [CommitPart(adds=sink.finish())]).raise_if_fenced()
