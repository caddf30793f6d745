"""Verification of published tables: what a foreign engine reads of a version is what Millrace reads at its tick.

delta-rs reads the published version by its own rules. Millrace reads the collection at the version's tick from the
inner tables, which :mod:`millrace.operations.verification` compares with the WAL, and the WAL with the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa

from millrace.base.errors import CollectionNotFound, MillraceError, StoreCannotPublish, TickTooOld
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.operations.verification import row_digest
from millrace.storage.published import PublishedTable
from millrace.storage.store import store_at
from millrace.tables.collections.data_tables import published_uri
from millrace.tables.collections.layout import stored_collection_ids
from millrace.tables.read.arrow import read_pieces
from millrace.tables.read.freshness import lacks_rows
from millrace.tables.read.plan import plan_read
from millrace.tables.wal.table import WalTable

PIECE_BYTES: Final = 64 << 20
"""Rows of a collection that are in memory at once, about."""


@dataclass(slots=True)
class PublishedVerification:
    """One published version: rows and digest as delta-rs reads them, and as a read at its tick gives them."""

    collection_id: int
    version: int
    tick: int
    rows: int = 0
    digest: int = 0
    read_rows: int = 0
    read_digest: int = 0
    folded: bool = False
    """Whether compaction has removed rows that are visible at the tick: then nothing can be compared."""
    problem: str = ""
    """Reason that one of the two could not be read. Empty if both could."""

    @property
    def ok(self) -> bool:
        same = (self.rows, self.digest) == (self.read_rows, self.read_digest)
        return not self.problem and (same or self.folded)


def verify_published(settings: Settings, service: LogService) -> dict[int, PublishedVerification]:
    """Compare the newest published version of each collection with a read at its tick. Reads all rows of both.

    `service` tells that an idle PChannel has nothing up to the tick that the tables lack.
    """
    found = {}
    for number in stored_collection_ids(settings, "rows"):
        try:
            table = PublishedTable.open(store_at(published_uri(settings, number)))
        except StoreCannotPublish:
            return {}
        except MillraceError as error:
            found[number] = PublishedVerification(number, -1, 0, problem=f"{error.code}: {error}")
            continue
        if table is not None and table.tick:
            found[number] = _verified(settings, service, number, table)
    return found


def _verified(settings: Settings, service: LogService, number: int, table: PublishedTable) -> PublishedVerification:
    made = PublishedVerification(number, table.version, table.tick)
    with duckdb.connect() as db:
        try:
            made.rows, made.digest = _summed(db, table.read_by_delta_rs(), table.schema)
            plan = plan_read(
                settings,
                number,
                at=table.tick,
                deadline=0.0,
                confirmed=_confirmed(settings, service, table.tick),
                use_published=False,  # else the version would be compared with itself
            )
            pieces = read_pieces(plan, max_bytes=PIECE_BYTES, with_ticks=True)
            made.read_rows, made.read_digest = _summed(db, pieces, table.schema)
        except CollectionNotFound:
            pass  # it was dropped at the tick: the version is to be empty
        except TickTooOld:
            made.folded = True
        except MillraceError as error:
            made.problem = f"{error.code}: {error}"
    return made


def _confirmed(settings: Settings, service: LogService, tick: int) -> dict[str, int]:
    """Return by PChannel the tick up to which ``wal`` is complete: `tick`, where the log has nothing more up to it."""
    wal = WalTable.open(settings.wal_uri)
    found = {}
    for name in wal.pchannels():
        with closing(service.open(name)) as log:
            complete = not lacks_rows(wal, log, name, up_to=tick)
        found[name] = max(wal.last_tick(name), tick if complete else 0)
    return found


def _summed(db: duckdb.DuckDBPyConnection, pieces: Iterable[pa.Table], schema: pa.Schema) -> tuple[int, int]:
    """Return number and digest of rows, whatever their order, by the columns and types of `schema`."""
    plain = pa.schema([pa.field(each.name, each.type) for each in schema])
    rows = digest = 0
    for piece in pieces:
        rows += piece.num_rows
        digest += row_digest(db, piece.select(plain.names).cast(plain), ())
    return rows, digest % (1 << 64)
