"""Channel state: everything besides the log that the chain's decisions read, for one PChannel.

Objects inside the state are values: evolve replaces them and never changes them in place, so a copy of the state copies
only its dictionaries. The serialised form is versioned and canonical: equal states have equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

from millrace.base.errors import Malformed, MillraceError, UnsupportedVersion
from millrace.message.ids import EARLIEST, LOGICAL_BITS, LogId, MessageId
from millrace.message.schema import CollectionSchema
from millrace.wal.config import ChainConfig
from millrace.wal.segments import NEVER, Segment
from millrace.wal.segments import seal_deadline as sealed_at
from millrace.wal.versions import CHAIN_VERSIONS

STATE_VERSIONS: Final = CHAIN_VERSIONS
"""Versions of the serialised form: the chain version of the open term. From 2 on it is in the text too."""
ENDED_TXNS: Final = 64
"""Number of ended transactions that a VChannel remembers, to explain why a late message is rejected."""


class SequenceResult(NamedTuple):
    """The result of a producer's sequences `sequence` ..

    `sequence + length - 1`. Number j has index + j and tick + j.
    """

    sequence: int
    length: int
    ledger: int
    entry: int
    first_index: int
    ordinal: int
    tick: int
    reason: str

    def of(self, sequence: int) -> tuple[MessageId, int, str]:
        """Return message id, time tick and reason ("" if accepted) of one sequence of the run."""
        offset = sequence - self.sequence
        return (
            MessageId(self.ledger, self.entry, self.first_index + offset, self.ordinal),
            self.tick + offset,
            self.reason,
        )


class ProducerState(NamedTuple):
    """An idempotent producer on a VChannel."""

    epoch: int
    next_sequence: int
    last_tick: int
    results: tuple[SequenceResult, ...]

    def result(self, sequence: int) -> tuple[MessageId, int, str] | None:
        """Return the first result of `sequence`, if it is still among the last ones."""
        for run in reversed(self.results):
            if run.sequence <= sequence:
                return run.of(sequence) if sequence < run.sequence + run.length else None
        return None


class OpenTxn(NamedTuple):
    """An open transaction."""

    id: int
    begin: MessageId
    begin_tick: int
    keepalive_ms: int
    last_tick: int
    bytes: int

    def deadline(self, config: ChainConfig) -> int:
        """Return the tick at which it expires unless it is renewed or ended."""
        return min(
            self.last_tick + (self.keepalive_ms << LOGICAL_BITS),
            self.begin_tick + (config.max_txn_lifetime_ms << LOGICAL_BITS),
        )


@dataclass(slots=True)
class VChannelState:
    """One collection's channel on this PChannel."""

    name: str
    collection_id: int
    collection_name: str
    number: int
    """Index of this VChannel in the collection: its keys hash to it."""
    vchannels: tuple[str, ...]
    schemas: tuple[CollectionSchema, ...]
    """Schema version v is schemas[v - 1]."""
    partitions: dict[int, str]
    growing: dict[int, Segment] = field(default_factory=dict)
    """By partition id."""
    sealed: dict[int, Segment] = field(default_factory=dict)
    """By segment id: segments that are full and wait for the transactions that touch them."""
    txns: dict[int, OpenTxn] = field(default_factory=dict)
    ended: tuple[tuple[int, str], ...] = ()
    producers: dict[int, ProducerState] = field(default_factory=dict)
    delete_rows: int = 0
    mvcc: int = 0
    forgotten: int = 0
    """The greatest last tick of a producer that was forgotten since chain version 4; 0 if none was."""

    def copy(self) -> VChannelState:
        return replace(
            self,
            partitions=dict(self.partitions),
            growing=dict(self.growing),
            sealed=dict(self.sealed),
            txns=dict(self.txns),
            producers=dict(self.producers),
        )

    def txn_outcome(self, txn_id: int) -> str | None:
        """Return how a transaction ended: "committed", "rolled back", "expired", "barrier"; None if open or unknown."""
        for ended_id, how in reversed(self.ended):
            if ended_id == txn_id:
                return how
        return None

    def to_json(self) -> dict[str, Any]:
        # omitted if 0, as before the field existed
        data: dict[str, Any] = {"forgotten": self.forgotten} if self.forgotten else {}
        return data | {
            "name": self.name,
            "collection_id": self.collection_id,
            "collection_name": self.collection_name,
            "number": self.number,
            "vchannels": list(self.vchannels),
            "schemas": [schema.to_json() for schema in self.schemas],
            "partitions": sorted(self.partitions.items()),
            "growing": [_segment_json(self.growing[key]) for key in sorted(self.growing)],
            "sealed": [_segment_json(self.sealed[key]) for key in sorted(self.sealed)],
            "txns": [list(self.txns[key]) for key in sorted(self.txns)],
            "ended": [list(pair) for pair in self.ended],
            "producers": [[key, *self.producers[key]] for key in sorted(self.producers)],
            "delete_rows": self.delete_rows,
            "mvcc": self.mvcc,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> VChannelState:
        growing = [_segment_from(item) for item in data["growing"]]
        sealed = [_segment_from(item) for item in data["sealed"]]
        txns = [OpenTxn(item[0], MessageId(*item[1]), *item[2:]) for item in data["txns"]]
        return cls(
            name=data["name"],
            collection_id=data["collection_id"],
            collection_name=data["collection_name"],
            number=data["number"],
            vchannels=tuple(data["vchannels"]),
            schemas=tuple(CollectionSchema.from_json(item) for item in data["schemas"]),
            partitions=dict(data["partitions"]),
            growing={segment.partition_id: segment for segment in growing},
            sealed={segment.id: segment for segment in sealed},
            txns={txn.id: txn for txn in txns},
            ended=tuple((txn_id, how) for txn_id, how in data["ended"]),
            producers={
                key: ProducerState(epoch, following, tick, tuple(SequenceResult(*result) for result in results))
                for key, epoch, following, tick, results in data["producers"]
            },
            delete_rows=data["delete_rows"],
            mvcc=data["mvcc"],
            forgotten=data.get("forgotten", 0),
        )


def _segment_json(segment: Segment) -> list[Any]:
    return [*segment[:6], sorted(segment.txns), segment.seal_policy]


def _segment_from(item: list[Any]) -> Segment:
    number, partition_id, rows, size, last_insert_tick, deletes_before, txns, sealed = item
    return Segment(number, partition_id, rows, size, last_insert_tick, deletes_before, frozenset(txns), sealed)


@dataclass(slots=True)
class ChannelState:
    """State of one PChannel's chain at a position of its log.

    `position` is the next entry to read. `last_entry` and `last_entry_crc` (crc32c of its bytes) are those of the entry
    before, by which a log that lost or changed acknowledged entries is detected.
    """

    pchannel: str
    position: LogId = EARLIEST
    last_entry: LogId | None = None
    last_entry_crc: int = 0
    last_tick: int = 0
    term: int = 0
    chain_version: int = 1
    """Version that the open term runs. Before the first opening, all versions judge alike."""
    dirty: bool = False
    """Whether there was a message row since the last TimeTick row."""
    config: ChainConfig = field(default_factory=ChainConfig)
    vchannels: dict[str, VChannelState] = field(default_factory=dict)

    @classmethod
    def new(cls, pchannel: str) -> Self:
        """Return the state before the first entry."""
        return cls(pchannel=pchannel)

    def copy(self) -> ChannelState:
        return replace(self, vchannels={name: channel.copy() for name, channel in self.vchannels.items()})

    def next_tick(self, physical_ms: int) -> int:
        """Return the tick that the next message would get at `physical_ms`."""
        return max(self.last_tick + 1, physical_ms << LOGICAL_BITS)

    def open_txns(self) -> Iterator[tuple[VChannelState, OpenTxn]]:
        for channel in self.vchannels.values():
            for txn in channel.txns.values():
                yield channel, txn

    def first_open_begin(self) -> MessageId | None:
        """Return the smallest Begin id of the open transactions, from which LastConfirmed is computed."""
        return min((txn.begin for _, txn in self.open_txns()), default=None)

    def next_deadline(self) -> int:
        """Return the earliest tick at which a timer fires; NEVER if none is set."""
        deadline = NEVER
        for channel in self.vchannels.values():
            for txn in channel.txns.values():
                deadline = min(deadline, txn.deadline(self.config))
            for segment in channel.growing.values():
                deadline = min(deadline, sealed_at(segment, self.config))
        return deadline

    def to_bytes(self) -> bytes:
        """Return canonical bytes: a version byte, then canonical JSON.

        It is not compressed, since zlib builds differ in their output.
        """
        data = {
            "pchannel": self.pchannel,
            "position": list(self.position),
            "last_entry": None if self.last_entry is None else list(self.last_entry),
            "last_entry_crc": self.last_entry_crc,
            "last_tick": self.last_tick,
            "term": self.term,
            "dirty": self.dirty,
            "config": self.config.to_json(),
            "vchannels": [self.vchannels[name].to_json() for name in sorted(self.vchannels)],
        }
        if self.chain_version > 1:
            data["chain_version"] = self.chain_version
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        # The version byte keeps a build from continuing a state of a chain version that it does not know.
        return bytes([self.chain_version]) + text

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the result of :meth:`to_bytes`. Raises UnsupportedVersion or Malformed."""
        if not data or data[0] not in STATE_VERSIONS:
            found = data[0] if data else None
            raise UnsupportedVersion(f"channel state of version {found}: this build reads versions {STATE_VERSIONS}")
        try:
            item = json.loads(data[1:])
            channels = [VChannelState.from_json(channel) for channel in item["vchannels"]]
            return cls(
                pchannel=item["pchannel"],
                position=LogId(*item["position"]),
                last_entry=None if item["last_entry"] is None else LogId(*item["last_entry"]),
                last_entry_crc=item["last_entry_crc"],
                last_tick=item["last_tick"],
                term=item["term"],
                chain_version=item.get("chain_version", 1),
                dirty=item["dirty"],
                config=ChainConfig(**item["config"]),
                vchannels={channel.name: channel for channel in channels},
            )
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MillraceError,
        ) as error:
            raise Malformed(f"cannot decode the channel state: {error}") from error
