"""A ``wal`` table made by the real chain, writer and committer, without a log.

Messages in, commits where a test wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.base.settings import Settings
from millrace.message import builders
from millrace.message.bodies import ImportFile
from millrace.message.ids import LogId
from millrace.message.keys import vchannel_index
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestReport
from millrace.node.ingest.wal_writer import WalRangeWriter
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import CHAIN_VERSION, Chain
from millrace.wal.state import ChannelState
from tests.tables.staged_files import stage

START_MS = 1_750_000_000_000
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "string", True)), "id")


class WalMaker:
    """One deployment: two PChannels unless told otherwise; entry ids and stamps grow by one with each append."""

    def __init__(self, settings: Settings, *, pchannels: Sequence[str] = ("p0", "p1")) -> None:
        self.settings = settings
        self.pchannels = tuple(pchannels)
        self.states = {name: ChannelState.new(name) for name in pchannels}
        self.pending: dict[str, list[tuple[int, int, bytes]]] = {name: [] for name in pchannels}
        self.entries = dict.fromkeys(pchannels, 0)
        self.ms = START_MS
        self._table = WalTable.create(Path(settings.wal_uri))
        self._committer = WalCommitter(self._table)
        self.rejected: list[dict[str, object]] = []
        self.accepted: dict[str, list[dict[str, Any]]] = {name: [] for name in pchannels}
        """Every message row that was committed, as the chain gave it."""

    def append(self, pchannel: str, messages: Sequence[MutableMessage]) -> None:
        """One log entry; it is in the WAL with the next :meth:`commit`."""
        self.ms += 1
        self.pending[pchannel].append((self.entries[pchannel], self.ms, encode_entry(list(messages))))
        self.entries[pchannel] += 1

    def open(self) -> None:
        """Open term 1 on every PChannel."""
        for name in self.pchannels:
            self.append(name, [builders.term_opening(term=1, chain_version=CHAIN_VERSION, config={})])

    def commit(self, pchannel: str | None = None) -> None:
        """Run the chain over what is pending and commit it to ``wal``: one commit for each PChannel."""
        for name in self.pchannels if pchannel is None else (pchannel,):
            if self.pending[name]:
                self._commit(name)

    def _commit(self, name: str) -> None:
        ids, stamps, values = zip(*self.pending[name], strict=True)
        count = len(values)
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array([0] * count, pa.int64()),
                pa.array(ids, pa.int64()),
                pa.array(stamps, pa.int64()),
                pa.array(values, pa.large_binary()),
            ],
            schema=ENTRY_SCHEMA,
        )
        self.pending[name] = []
        outcome = Chain().process(self.states[name], LogEntries(batch, LogId(0, ids[-1] + 1)))
        self.states[name] = outcome.state
        self.accepted[name].extend(outcome.messages.to_pylist())
        self.rejected.extend(outcome.rejections.select(["reason", "detail", "type"]).to_pylist())
        self._table.refresh()
        base = self._table.position(name)
        writer = WalRangeWriter(Path(self.settings.wal_uri), name)
        writer.add(outcome)
        if writer.rows == 0:
            writer.abort()
            return
        actions = writer.finish(outcome.state, base)
        report = IngestReport(
            pchannel=name,
            base_commits=base.commits,
            base_tick=base.last_tick,
            last_tick=outcome.state.last_tick,
            position=outcome.state.position,
            totals=writer.totals,
            actions=tuple(actions),
            replaced_states=writer.replaced_states,
        )
        assert self._committer.commit([report]).committed

    def last_tick(self, pchannel: str) -> int:
        return self.states[pchannel].last_tick

    def ticks(self) -> list[int]:
        """The ticks of all committed messages, in order."""
        return sorted({message["time_tick"] for each in self.accepted.values() for message in each})

    def tick_at(self, percent: int) -> int:
        """The tick that so many percent of `ticks` reach."""
        ticks = self.ticks()
        return ticks[(len(ticks) - 1) * percent // 100]

    def readable_ticks(self) -> list[int]:
        """The ticks from which the collection is on all its VChannels on, up to which all PChannels have come."""
        messages = [message for each in self.accepted.values() for message in each]
        created = max(message["time_tick"] for message in messages if message["type"] == "CREATE_COLLECTION")
        last = min(map(self.last_tick, self.pchannels))
        return [tick for tick in self.ticks() if created <= tick <= last]

    def confirmed(self) -> dict[str, int]:
        """The tick up to which ``wal`` is complete by PChannel, as a reader learns it from the log."""
        return dict.fromkeys(self.pchannels, max(map(self.last_tick, self.pchannels)))


class Collection:
    """A collection on the PChannels of a maker, its VChannels spread over them in turn."""

    def __init__(
        self,
        maker: WalMaker,
        *,
        collection_id: int = 1,
        vchannels: int = 2,
        schema: CollectionSchema = SCHEMA,
        partitions: dict[str, int] | None = None,
    ) -> None:
        self.maker = maker
        self.id = collection_id
        self.schema = schema
        self.schema_version = 1
        self.changed: set[str] = set()
        """VChannels whose schema has the added field, where they do not all have one."""
        self.partitions = {"red": 1, "blue": 2} if partitions is None else partitions
        homes = [maker.pchannels[number % len(maker.pchannels)] for number in range(vchannels)]
        self.vchannels = [f"{home}_{collection_id}v{number}" for number, home in enumerate(homes)]
        self.homes = dict(zip(self.vchannels, homes, strict=True))

    def create(self) -> None:
        for name in self.vchannels:
            message = builders.create_collection(
                "things",
                self.schema,
                vchannel=name,
                vchannels=self.vchannels,
                collection_id=self.id,
                partitions=self.partitions,
                term=1,
            )
            self.append(name, message)

    def append(self, vchannel: str, *messages: MutableMessage) -> None:
        self.maker.append(self.homes[vchannel], messages)

    def home(self, key: int) -> str:
        """The VChannel of a key."""
        return self.vchannels[int(vchannel_index(pa.array([key], pa.int64()), len(self.vchannels))[0])]

    def keys_of(self, vchannel: str, count: int) -> list[int]:
        """The first `count` keys that live on `vchannel`."""
        homes = vchannel_index(pa.array(np.arange(20 * count + 50)), len(self.vchannels))
        keys: list[int] = np.flatnonzero(homes == self.vchannels.index(vchannel))[:count].tolist()
        return keys

    def insert(
        self, rows: dict[str, list[object]], *, vchannel: str, partition: int = 1, txn: int = 0, upsert: bool = False
    ) -> MutableMessage:
        """An Insert (or Upsert) of `rows`, whose keys live on `vchannel`."""
        columns = [pa.array(rows[field.name], field.type) for field in self.schema.arrow()]
        batch = pa.RecordBatch.from_arrays(columns, schema=self.schema.arrow())
        return builders.insert(
            batch,
            vchannel=vchannel,
            collection_id=self.id,
            partition_id=partition,
            term=1,
            schema_version=self.schema_version,
            txn_id=txn,
            upsert=upsert,
        )

    def imported(self, files: Sequence[ImportFile], *, vchannel: str, replace: bool = False) -> MutableMessage:
        """An Import of staged files, whose keys live on `vchannel`."""
        return builders.import_files(
            "load",
            files,
            vchannel=vchannel,
            collection_id=self.id,
            term=1,
            replace=replace,
            schema_version=self.schema_version,
        )

    def stage(self, path: str, rows: dict[str, list[object]], *, partition: int = 1, group: int = 2) -> ImportFile:
        """A staged file of `rows`."""
        table = pa.table([pa.array(rows[each.name], each.type) for each in self.schema.arrow()], self.schema.arrow())
        return stage(self.maker.settings.staged_path, path, table, partition=partition, group=group)

    def delete(self, keys: list[int], *, vchannel: str, partition: int = 0, txn: int = 0) -> MutableMessage:
        return builders.delete(
            keys,
            schema=self.schema,
            vchannel=vchannel,
            collection_id=self.id,
            partition_id=partition,
            term=1,
            txn_id=txn,
        )

    def begin(self, vchannel: str, txn: int) -> MutableMessage:
        return builders.begin_txn(txn, vchannel=vchannel, collection_id=self.id, term=1)

    def end(self, vchannel: str, txn: int, *, commit: bool = True) -> MutableMessage:
        build = builders.commit_txn if commit else builders.rollback_txn
        return build(txn, vchannel=vchannel, collection_id=self.id, term=1)
