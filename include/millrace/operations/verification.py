"""Compare log, WAL and collections by content: is every row there, once, and the same everywhere?

Everything acknowledged is in the log. Running the chain over the log again must reproduce the WAL, row for row, and the
visible rows of the WAL must equal those of the collection tables. Digests are sums over rows, so neither order nor
files matter. Collection tables are read with DuckDB, which shares no code with the writers. Where compaction has folded
deletes, rows that no read from the base tick on can see are excluded on both sides, because the table may or may not
hold them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import PositionTruncated, TableDamaged, WalGap
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.message.ids import EARLIEST
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import ColumnChains, foldable_chains, key_columns, sql_columns
from millrace.storage.parquet_file import REPAIR_HINT, dataset, translate_read_errors
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.bases import VerifiedBase, trimmed_bases
from millrace.tables.collections.data_tables import deletes_uri, earliest_readable_tick, rows_uri
from millrace.tables.collections.dead_rows import HiddenRanges, dead_mask, hidden_ranges_at
from millrace.tables.collections.layout import stored_collection_ids
from millrace.tables.collections.staged_files import StagedFiles
from millrace.tables.wal.log_replay import replay_totals
from millrace.tables.wal.reader import MAX_TICK, WalSnapshot
from millrace.tables.wal.table import WalTable, WalTotals
from millrace.tables.wal.trims import trimmed_totals
from millrace.wal.digest import WalDigest, digest_rows
from millrace.wal.schema import complete_rows
from millrace.wal.state import ChannelState
from millrace.wal.txn_buffer import TxnBuffer
from millrace.wal.visible.catalog import CATALOG_TYPES, VChannelInfo, WalCatalog, newest_schema
from millrace.wal.visible.collection_rows import (
    align_to_schema,
    collection_rows,
    deletes_file_schema,
    rows_table_schema,
)

TXN_TYPES: Final = ("BEGIN_TXN", "COMMIT_TXN", "ROLLBACK_TXN")
ROW_TYPES: Final = ("INSERT", "UPSERT", "IMPORT")
"""Messages that add rows to a collection."""
_ROW_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ChannelVerification:
    """One PChannel: the digest its commits add up to, and the digests of the stored rows and of the replayed log."""

    pchannel: str
    messages: int
    rejections: int
    last_tick: int
    committed: WalDigest
    stored: WalDigest
    replayed: WalDigest | None
    """None if the log was not given, or if truncation removed its beginning and no later start was given."""
    state: ChannelState | None
    """The state at the end of the replay, if there was one."""
    same_state: bool = True
    """Whether that state equals the one in the WAL, byte for byte."""

    @property
    def ok(self) -> bool:
        return self.committed == self.stored and self.replayed in (None, self.committed) and self.same_state


@dataclass(slots=True)
class CollectionVerification:
    """Row counts of one collection in the WAL and in its table. The `*_digest` fields cover all columns."""

    collection_id: int
    inserted: int = 0
    """Rows of accepted Inserts and Imports, visible or not."""
    visible_inserted: int = 0
    """Rows that became visible: outside transactions, or committed."""
    deleted: int = 0
    """Visible rows that a later delete hit, that went with their partition or collection, or that an Import replaced.
    """
    stored: int = 0
    """Rows of the table."""
    folded: int = 0
    """Visible rows that compaction removed from the table. They count as deleted too."""
    unflushed: int = 0
    """Visible rows after the tick that the table is flushed to. The flusher will add them."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Rows of Inserts and Imports by rejection reason. Duplicates count as DUPLICATE and ALREADY_APPLIED."""
    wal_digest: int = 0
    table_digest: int = 0
    problem: str = ""
    """Reason that the table could not be read. Empty if it could."""

    @property
    def rolled_back(self) -> int:
        """Rows of transactions that were rolled back, expired, or are still open."""
        return self.inserted - self.visible_inserted

    @property
    def visible(self) -> int:
        return self.visible_inserted - self.deleted

    @property
    def matches_flushed(self) -> bool:
        """Whether the table holds exactly what became visible up to the tick that it is flushed to."""
        same = self.stored + self.folded == self.visible_inserted - self.unflushed
        return same and self.wal_digest == self.table_digest and not self.problem

    @property
    def ok(self) -> bool:
        """Whether the table holds exactly what became visible, all of it."""
        return self.matches_flushed and not self.unflushed


@dataclass(frozen=True, slots=True)
class _Tables:
    """A collection's tables at pinned versions."""

    rows: TableHandle | None
    deletes: TableHandle | None = None
    key: tuple[str, ...] = ()
    """Names of the primary key's columns. The deletes table has these and Millrace's own columns."""

    @classmethod
    def pin(cls, settings: Settings, number: int) -> _Tables:
        """Pin deletes before rows: compaction removes a delete after the rows that it hit."""
        deletes = open_table(deletes_uri(settings, number))
        rows = open_table(rows_uri(settings, number))
        if deletes is None:
            return cls(rows)
        return cls(rows, deletes, tuple(name for name in deletes.columns if not name.startswith("_")))

    def expected(self, rows: pa.Table, flushed: int) -> tuple[pa.Table, int]:
        """Return the rows that the table must have, and the number of rows that it need not have yet.

        `rows` are of one PChannel, which is flushed up to the tick `flushed`. A field that was added may exist in the
        WAL alone; if no row has a value for it, the table need not have the column.
        """
        channel = pc.dictionary_encode(rows["_vchannel"]).combine_chunks()
        names = channel.dictionary.to_pylist()
        ticks = [max(flushed, (self.rows and self.rows.app_version(name)) or 0) for name in names]
        has = np.array(ticks, dtype=np.int64)[channel.indices.to_numpy(zero_copy_only=False)]
        found = rows.filter(pa.array(rows["_time_tick"].to_numpy() <= has))
        if self.rows is None:
            return found, rows.num_rows - found.num_rows
        known = set(self.rows.columns)
        added = [name for name in found.column_names if name not in known and found[name].null_count == found.num_rows]
        return found.drop_columns(added), rows.num_rows - found.num_rows


def verify_channel(
    snapshot: WalSnapshot,
    wal: WalTable,
    log: LogService | None,
    pchannel: str,
    *,
    start: tuple[ChannelState, WalTotals] | None = None,
) -> ChannelVerification:
    """Check one PChannel: ticks in order, stored rows as committed, and the log, if given, reproducing them.

    The replay starts at the first entry of the log or, if `start` is given, at that state, whose totals cover the
    earlier rows.

    Raises WalGap if a tick is out of order.
    """
    position = wal.position(pchannel)
    stored = trimmed_totals(wal).get(pchannel, WalTotals()).digest  # retention keeps the digest of what it removed
    last_tick = 0
    for rows in snapshot.messages(pchannel):
        stored += digest_rows(rows)
        if rows["time_tick"][0].as_py() <= last_tick:
            raise WalGap(f"{pchannel}: tick {rows['time_tick'][0]} follows {last_tick}")
        last_tick = rows["time_tick"][-1].as_py()
    for name in _rejection_files(wal.table, pchannel):
        stored += digest_rows(_rejections(wal.table, name))
    again = None if log is None or position.state is None else _replayed(log, pchannel, position.state, start)
    return ChannelVerification(
        pchannel=pchannel,
        messages=position.totals.messages,
        rejections=position.totals.rejections,
        last_tick=last_tick,
        committed=position.totals.digest,
        stored=stored,
        replayed=None if again is None else again[1].digest,
        state=None if again is None else again[0],
        same_state=again is None or again[0].to_bytes() == position.state_bytes,
    )


def _replayed(
    service: LogService, pchannel: str, committed: ChannelState, start: tuple[ChannelState, WalTotals] | None
) -> tuple[ChannelState, WalTotals] | None:
    log = service.open(pchannel)
    try:
        if start is None and log.describe().begin > EARLIEST:
            return None
        state, totals = start or (ChannelState.new(pchannel), WalTotals())
        return replay_totals(log, state, totals, until=committed.position)
    except PositionTruncated:
        if start is not None:
            raise  # the caller chose this start and must choose another one
        return None  # the beginning of the log was truncated meanwhile
    finally:
        log.close()


def verify_collections(settings: Settings) -> dict[int, CollectionVerification]:
    """Account for every row of every collection while node, flusher and compaction keep running.

    Each table is pinned once, in an order in which no table is ahead of a later one: the flusher's checkpoints, the
    collection tables, the WAL. Each collection table is then compared with the WAL up to the tick that it is flushed
    to. If retention has trimmed the WAL of a PChannel, only the rows after its base are compared; earlier rows were
    verified for the base.
    """
    checkpoints = open_table(settings.checkpoints_uri)
    tables = {
        number: _Tables.pin(settings, number)
        for number in {*stored_collection_ids(settings, "rows"), *stored_collection_ids(settings, "deletes")}
    }
    if not WalTable.exists(settings.wal_uri):
        return {}
    wal = WalTable.open(settings.wal_uri)
    snapshot = WalSnapshot(wal.table)
    trimmed = trimmed_bases(wal.table.uri, snapshot)
    reports: dict[int, CollectionVerification] = {}
    none = _Tables(None)

    def report(collection_id: int) -> CollectionVerification:
        return reports.setdefault(collection_id, CollectionVerification(collection_id))

    dropped: dict[int, list[HiddenRanges]] = {}
    gone: dict[int, list[HiddenRanges]] = {}
    channels = [trimmed.get(pchannel, VerifiedBase(pchannel)) for pchannel in snapshot.pchannels()]
    newest = _newest_schemas(snapshot, channels)
    columns = {number: rows_table_schema(schema) for number, schema in newest.items()}
    chains = {number: foldable_chains(schema) for number, schema in newest.items()}
    bases = {number: earliest_readable_tick(tables.get(number, none).rows) for number in newest}
    with duckdb.connect() as db:
        for base in channels:
            pchannel = base.pchannel
            flushed = 0 if checkpoints is None else checkpoints.app_version(pchannel)
            hidden = _hidden(settings, snapshot, base, bases)
            catalog, buffer = _begin(base)
            for messages in snapshot.messages(pchannel, start=base.confirmed):
                later = pc.greater(messages["time_tick"], base.time_tick)
                inserts = messages.filter(
                    pc.and_(later, pc.is_in(messages["type"].cast(pa.utf8()), pa.array(ROW_TYPES)))
                )
                for row in inserts.group_by("collection_id").aggregate([("rows", "sum")]).to_pylist():
                    report(row["collection_id"]).inserted += row["rows_sum"]
                for stretch in catalog.apply(buffer.push(messages)):
                    for part in collection_rows(stretch, catalog, imports=StagedFiles.of(settings), deletes=False):
                        found = report(part.collection_id)
                        found.visible_inserted += part.rows.num_rows
                        rows = align_to_schema(part.rows, columns[part.collection_id])
                        rows, unflushed = tables.get(part.collection_id, none).expected(rows, flushed)
                        found.unflushed += unflushed
                        if part.collection_id in hidden:
                            living = hidden[part.collection_id].living(rows)
                            found.folded += rows.num_rows - living.num_rows
                            rows = living
                        found.wal_digest = (
                            found.wal_digest + row_digest(db, rows, chains[part.collection_id])
                        ) & _ROW_MASK
            for number, each in hidden.items():
                dropped.setdefault(number, []).append(each.drops)
            for number in {info.collection_id for info in catalog.vchannels.values()}:
                gone.setdefault(number, []).append(hidden_ranges_at(catalog.collection_vchannels(number), MAX_TICK))
            for name in _rejection_files(wal.table, pchannel):
                for row in _rejections(wal.table, name).select(["type", "collection_id", "reason", "rows"]).to_pylist():
                    if row["type"] in ROW_TYPES:
                        report(row["collection_id"]).rejected[row["reason"]] += row["rows"]
        for found in reports.values():
            number = found.collection_id
            folded = (bases.get(number, 0), dropped.get(number, []))
            try:
                rows, deletes = (store_at(uri(settings, number)) for uri in (rows_uri, deletes_uri))
                with translate_read_errors(rows, others=[deletes]):
                    _count_table(
                        db,
                        tables.get(number, none),
                        found,
                        folded,
                        gone.get(number, []),
                        trimmed.values(),
                        chains.get(number, ()),
                    )
            except TableDamaged as error:
                found.problem = f"{error.code}: {error}"
            except duckdb.Error as error:
                words = str(error).partition("\n")[0]
                found.problem = (
                    f"{TableDamaged.code}: {rows_uri(settings, number)} cannot be read ({words}): {REPAIR_HINT}"
                )
    return reports


@dataclass(slots=True)
class _Hidden:
    """Deletes and drops that hide rows of one collection from reads at its base tick or later, by one PChannel's
    WAL."""

    key: tuple[str, ...]
    deletes: pa.Table
    drops: HiddenRanges

    def living(self, rows: pa.Table) -> pa.Table:
        return rows.filter(pa.array(~dead_mask(rows, self.deletes, key=self.key, hidden=self.drops)))


def _hidden(
    settings: Settings, snapshot: WalSnapshot, base: VerifiedBase, bases: Mapping[int, int]
) -> dict[int, _Hidden]:
    """Return what is hidden, for each collection with a base tick."""
    if not any(bases.values()):
        return {}
    catalog, buffer = _begin(base)
    parts: dict[int, list[pa.Table]] = {}
    for messages in snapshot.messages(
        base.pchannel, start=base.confirmed, types=(*CATALOG_TYPES, *TXN_TYPES, "DELETE", "UPSERT")
    ):
        for stretch in catalog.apply(buffer.push(messages)):
            for part in collection_rows(stretch, catalog, imports=StagedFiles.of(settings), deletes=True):
                early = part.rows.filter(pc.less_equal(part.rows["_time_tick"], bases.get(part.collection_id, 0)))
                parts.setdefault(part.collection_id, []).append(early)
    found = {}
    for number in {info.collection_id for info in catalog.vchannels.values() if bases.get(info.collection_id)}:
        infos = catalog.collection_vchannels(number)
        schema = next(iter(infos.values())).newest_schema
        deletes = pa.concat_tables([deletes_file_schema(schema).empty_table(), *parts.get(number, [])])
        found[number] = _Hidden(key_columns(schema), deletes, hidden_ranges_at(infos, bases[number]))
    return found


def _begin(base: VerifiedBase) -> tuple[WalCatalog, TxnBuffer]:
    """Return the catalog and the transaction buffer with which a reader of a PChannel's WAL starts at its base."""
    return WalCatalog.from_bytes(base.catalog_bytes), TxnBuffer(after_tick=base.time_tick)


def _newest_schemas(snapshot: WalSnapshot, channels: Iterable[VerifiedBase]) -> dict[int, CollectionSchema]:
    """Return each collection's schema with every change applied. It has all columns of the table.

    A change may have reached only some of a collection's VChannels. The table has the newest schema among them.
    """
    found: dict[int, list[VChannelInfo]] = {}
    for base in channels:
        catalog, buffer = _begin(base)
        for messages in snapshot.messages(base.pchannel, start=base.confirmed, types=CATALOG_TYPES):
            for _ in catalog.apply(buffer.push(messages)):
                pass
        for info in catalog.vchannels.values():
            found.setdefault(info.collection_id, []).append(info)
    return {number: newest_schema(infos) for number, infos in found.items()}


def row_digest(db: duckdb.DuckDBPyConnection, rows: pa.Table, chains: ColumnChains) -> int:
    """Return the sum modulo 2**64 of a hash of each row over all its columns."""
    columns = sql_columns(rows.column_names, chains)
    [(value,)] = db.execute(f"select sum(hash({columns})::hugeint) from rows").fetchall()
    return int(value or 0) & _ROW_MASK


def _count_table(
    db: duckdb.DuckDBPyConnection,
    tables: _Tables,
    found: CollectionVerification,
    folded: tuple[int, list[HiddenRanges]],
    gone: list[HiddenRanges],
    trimmed: Iterable[VerifiedBase],
    chains: ColumnChains,
) -> None:
    """Count the stored rows.

    `folded` is the base tick and what DDL hides at it. `gone` is what DDL hides at the newest tick.
    """
    base, drops = folded
    table = tables.rows
    if table is None:
        return
    schema, deletes = _plain(table), tables.deletes
    files = list(table.live_files())
    found.deleted = found.folded
    if not files:
        return
    columns = sql_columns(schema.names, chains)
    # Use the table's own columns: a file without an added field has null there.
    db.register("whole", dataset(table.store, files, schema))
    if deletes is not None and (delete_files := list(deletes.live_files())):
        db.register("applied_deletes", dataset(deletes.store, delete_files, _plain(deletes)))
    else:
        deletes = None
    after_bases = " and ".join(
        [
            "true",
            *(
                f"not (regexp_full_match(_vchannel, '{re.escape(b.pchannel)}_[0-9]+v[0-9]+')"
                f" and _time_tick <= {b.time_tick})"
                for b in trimmed
            ),
        ]
    )
    source = f"(from whole where {after_bases})"
    [(stored,)] = db.execute(f"select count(*) from {source}").fetchall()
    living = " and ".join(["true", *(f"not ({each})" for each in _drop_conditions(drops))])
    if base and deletes is not None:
        living += f" and not exists ({_hit(tables.key)} and d._time_tick <= {base})"
    # Fetch all rows: the connection registers no table while a result is open.
    [(counted, value)] = db.execute(
        f"select count(*), sum(hash({columns})::hugeint) from {source} r where {living}"
    ).fetchall()
    found.stored, found.table_digest = int(stored), int(value or 0) & _ROW_MASK
    found.folded -= int(stored) - int(counted)
    found.deleted = found.folded
    lost = [f"({each})" for each in _drop_conditions(gone)]
    if deletes is not None:
        lost.append(f"exists ({_hit(tables.key)})")
    if lost:
        [(deleted,)] = db.execute(f"select count(*) from {source} r where {' or '.join(lost)}").fetchall()
        found.deleted += int(deleted)


def _hit(key: Sequence[str]) -> str:
    quoted = (name.replace('"', '""') for name in key)
    same = " and ".join(f'd."{name}" = r."{name}"' for name in quoted)
    return f"""select 1 from applied_deletes d
    where {same} and d._partition_id in (0, r._partition_id)
    and (d._time_tick > r._time_tick or (d._time_tick = r._time_tick and d._write_tick > r._write_tick))"""


def _drop_conditions(drops: list[HiddenRanges]) -> Iterator[str]:
    for each in drops:
        for vchannel, number, tick in each.partitions:
            yield f"r._vchannel = '{vchannel}' and r._partition_id = {number} and r._time_tick < {tick}"
        for vchannel, tick in each.vchannels:
            yield f"r._vchannel = '{vchannel}' and r._time_tick < {tick}"


def _plain(table: TableHandle) -> pa.Schema:
    """Return the columns of a table's files."""
    return pa.schema([each for each in table.schema if each.name not in table.partition_columns])


def _rejection_files(wal: TableHandle, pchannel: str) -> list[str]:
    return wal.files(f"kind = 'rejection' and pchannel = '{pchannel}'")


def _rejections(wal: TableHandle, name: str) -> pa.Table:
    return complete_rows(wal.read(name))
