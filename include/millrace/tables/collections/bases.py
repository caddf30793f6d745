"""The Delta table ``bases``: per PChannel, the tick up to which the collections' tables were verified against the WAL.

A base at tick B asserts that the collections' tables hold what became visible up to B, as the WAL had it. So the WAL
before B may be removed. A rebuild starts from the tables up to B and the catalog in the base, and reads the WAL from
LastConfirmed in the base (transactions that were open at B begin after it). One live row per PChannel; earlier bases
are in earlier versions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from millrace.message.ids import MessageId
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.table import create_table, open_table
from millrace.tables.wal.reader import FIRST_ID, WalSnapshot
from millrace.wal.visible.catalog import WalCatalog

PCHANNEL: Final = "pchannel"
COLUMNS: Final = pa.schema(
    [
        pa.field("time_tick", pa.int64()),
        pa.field("lc_ledger", pa.int64()),  # LastConfirmed at that tick: where a rebuild begins to read the WAL
        pa.field("lc_entry", pa.int64()),
        pa.field("lc_index", pa.int32()),
        pa.field("lc_ordinal", pa.int32()),
        pa.field("catalog", pa.binary()),
        pa.field("collections", pa.utf8()),  # JSON: collection -> rows and deletes verified, all bases together
        pa.field("verified_at", pa.timestamp("us", tz="UTC")),
    ]
)


@dataclass(frozen=True, slots=True)
class VerifiedBase:
    """A verified base of one PChannel. The default is the beginning."""

    pchannel: str
    time_tick: int = 0
    confirmed: MessageId = FIRST_ID
    catalog_bytes: bytes = field(default_factory=lambda: WalCatalog().to_bytes())
    collections: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Number of rows and deletes compared, by collection."""
    path: str | None = None


def bases_uri(wal: object) -> str:
    """Return the URI of the table, next to the ``wal`` table at `wal`."""
    return f"{str(wal).rpartition('/')[0]}/bases"


def read_bases(wal: object) -> dict[str, VerifiedBase]:
    """Return the newest base of each PChannel that has one."""
    path = bases_uri(wal)
    table = open_table(path)
    if table is None:
        return {}
    found = {}
    for action in table.actions().to_pylist():
        row = table.read(action["path"]).to_pylist()[0]
        pchannel = action[f"partition.{PCHANNEL}"]
        found[pchannel] = VerifiedBase(
            pchannel,
            row["time_tick"],
            MessageId(row["lc_ledger"], row["lc_entry"], row["lc_index"], row["lc_ordinal"]),
            row["catalog"],
            {int(number): (rows, deletes) for number, (rows, deletes) in json.loads(row["collections"]).items()},
            action["path"],
        )
    return found


def write_base(wal: object, before: VerifiedBase, base: VerifiedBase) -> bool:
    """Replace `before` by `base`. Returns False if another run was first."""
    path = bases_uri(wal)
    table = create_table(path, pa.schema([*COLUMNS, pa.field(PCHANNEL, pa.utf8())]), partition_by=[PCHANNEL])
    sink = FileSink.at(path, COLUMNS, ("time_tick",))
    lc = base.confirmed
    row = {
        "time_tick": base.time_tick,
        "lc_ledger": lc.ledger,
        "lc_entry": lc.entry,
        "lc_index": lc.index,
        "lc_ordinal": lc.ordinal,
        "catalog": base.catalog_bytes,
        "collections": json.dumps({str(number): list(counts) for number, counts in base.collections.items()}),
        "verified_at": time.time_ns() // 1000,
    }
    sink.write(pa.Table.from_pylist([row], schema=COLUMNS), {PCHANNEL: base.pchannel})
    part = CommitPart(
        adds=sink.finish(),
        removes=() if before.path is None else (before.path,),
        app_transactions={base.pchannel: AppTransaction(before.time_tick, base.time_tick)},
    )
    return not commit_fenced(table, [part]).fenced


def trimmed_bases(wal: object, snapshot: WalSnapshot) -> dict[str, VerifiedBase]:
    """Return the bases of PChannels with a trimmed WAL: where a reader of the whole WAL has to start."""
    trimmed = [name for name in snapshot.pchannels() if snapshot.trimmed(name)[0]]
    found = read_bases(wal) if trimmed else {}
    return {name: found[name] for name in trimmed}
