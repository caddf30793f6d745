"""DDL without processes: logs that judge at once by the real chain, and clients that write DDL straight into them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.base.errors import AppendRejected, ChannelExists
from millrace.client.append_client import AppendClient
from millrace.coord.append_port import SingleEntryAppender
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry
from millrace.message.wire.stamp import stamp_entries
from millrace.rpc.outcome import AppendOutcome, outcome_rows
from millrace.wal.chain import Chain, ChainOutcome
from millrace.wal.definitions import PChannelDefinitions
from millrace.wal.state import ChannelState, VChannelState

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id")


class Killed(Exception):
    """Stands for the death of the coordinator's process between two steps."""


class ConnectionAppender(SingleEntryAppender):
    """The append port of a coordinator that is no part of the log's server: that stamps what it appends itself."""

    def __init__(self, append: AppendClient, deadline: float) -> None:
        self._client = append
        self._seconds = deadline

    def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
        return self._client.append(pchannel, [entry], deadline=self._seconds).result().time_tick

    def definitions(self, pchannel: str, collection_id: int | None) -> PChannelDefinitions:
        return self._client.definitions(pchannel, collection_id, deadline=self._seconds)


class ChainLog:
    """Logs and append host in one: every entry goes through the real chain at once."""

    def __init__(self) -> None:
        self.states: dict[str, ChannelState] = {}
        self.appends = 0
        self.die_before: int | None = None
        self.die_after: int | None = None
        self.accepted: list[tuple[str, dict[str, Any]]] = []
        """Each message that the chain accepted, by PChannel, as a row of the WAL."""

    def names(self) -> list[str]:
        return sorted(self.states)

    def create(self, pchannel: str) -> None:
        if pchannel in self.states:
            raise ChannelExists(pchannel)
        self.states[pchannel] = ChannelState.new(pchannel)

    def append_one(self, pchannel: str, entry: bytes, *, principal: str = "") -> int:
        if self.appends == self.die_before:
            raise Killed
        self.appends += 1
        outcome = self._judged(pchannel, self.appends, entry, principal)
        self.states[pchannel] = outcome.state
        self.accepted += [(pchannel, each) for each in outcome.messages.to_pylist()]
        if self.appends - 1 == self.die_after:
            raise Killed
        return AppendOutcome(outcome_rows(outcome.messages, outcome.rejections)).result().time_tick

    def judge(self, pchannel: str, entry: bytes) -> int:
        outcome = self._judged(pchannel, self.appends + 1, entry, "")
        AppendOutcome(outcome_rows(outcome.messages, outcome.rejections)).result()
        return self.states[pchannel].last_tick

    def _judged(self, pchannel: str, number: int, entry: bytes, principal: str) -> ChainOutcome:
        columns = [np.array([0]), np.array([number]), np.array([time.time_ns() // 1_000_000])]
        values = stamp_entries(pa.array([entry], pa.large_binary()), principal)
        batch = pa.RecordBatch.from_arrays(
            [*(pa.array(column, pa.int64()) for column in columns), values], schema=ENTRY_SCHEMA
        )
        return Chain().process(self.states[pchannel], LogEntries(batch, LogId(0, number + 1)))

    def definitions(self, pchannel: str, collection_id: int | None) -> PChannelDefinitions:
        return PChannelDefinitions.of(self.states[pchannel], collection_id)

    def write(self, message: MutableMessage) -> None:
        """DDL of a client that knows no coordinator. Raises AppendRejected."""
        pchannel = message.vchannel.rpartition("_")[0]
        self.append_one(pchannel, encode_entry([replace(message, term=self.states[pchannel].term)]))

    def refuses(self, message: MutableMessage) -> str:
        """The reason why the chain rejects a client's message."""
        try:
            self.write(message)
        except AppendRejected as rejection:
            return str(rejection.reason)
        return ""

    def channels(self) -> list[VChannelState]:
        return [channel for state in self.states.values() for channel in state.vchannels.values()]
