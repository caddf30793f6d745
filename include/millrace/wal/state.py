"""Channel state: everything besides the log that the chain's decisions read, for one PChannel.

Everything inside the state is a value: evolve replaces it and never changes it in place. Its maps share what a change
does not touch (millrace.wal.shared_map), so a copy of the state copies nothing, and a message costs what it changes,
whatever the number of VChannels, partitions and producers. The serialised form is versioned and canonical: equal states
have equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from millrace.base.errors import Malformed, MillraceError, UnsupportedVersion
from millrace.message.ids import EARLIEST, LOGICAL_BITS, LogId, MessageId
from millrace.message.schema import CollectionSchema
from millrace.wal.config import ChainConfig
from millrace.wal.open_work import SEGMENTS, TXNS, OpenTxn, OpenWork
from millrace.wal.segments import Segment
from millrace.wal.shared_map import SharedMap
from millrace.wal.versions import CHAIN_VERSIONS

STATE_VERSIONS: Final = CHAIN_VERSIONS
"""Versions of the serialised form: the chain version of the open term. From 2 on it is in the text too."""
DECODE_ERRORS: Final = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MillraceError,
)
"""Errors that decoding raises for bytes that are not a state."""
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


class VChannelState(NamedTuple):
    """One collection's channel on this PChannel. A value: ``channel._replace(...)`` makes a changed one."""

    name: str
    collection_id: int
    collection_name: str
    number: int
    """Index of this VChannel in the collection: its keys hash to it."""
    vchannels: tuple[str, ...]
    schemas: tuple[CollectionSchema, ...]
    """Schema version v is schemas[v - 1]."""
    partitions: SharedMap[int, str]
    growing: SharedMap[int, Segment] = SharedMap()
    """Segments by partition id."""
    sealed: SharedMap[int, Segment] = SharedMap()
    """Segments, by id, that are full and wait for the transactions that touch them."""
    txns: SharedMap[int, OpenTxn] = SharedMap()
    ended: tuple[tuple[int, str], ...] = ()
    producers: SharedMap[int, ProducerState] = SharedMap()
    delete_rows: int = 0
    mvcc: int = 0
    forgotten: int = 0
    """The greatest last tick of a producer that was forgotten since chain version 4; 0 if none was."""

    def open_work(self, config: ChainConfig) -> OpenWork:
        """Return this VChannel's work that waits for time or for an end."""
        return VCHANNELS.of(self.name, self, config)

    def txn_outcome(self, txn_id: int) -> str | None:
        """Return how a transaction ended: "committed", "rolled back", "expired", "barrier"; None if open or unknown."""
        for ended_id, how in reversed(self.ended):
            if ended_id == txn_id:
                return how
        return None

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": self.name,
            "collection_id": self.collection_id,
            "collection_name": self.collection_name,
            "number": self.number,
            "vchannels": list(self.vchannels),
            "schemas": [schema.to_json() for schema in self.schemas],
        }
        for name, (to_json, _) in FIELD_FORMS.items():
            data[name] = to_json(getattr(self, name))
        for name, (entry_to_json, _) in MAP_FORMS.items():
            data[name] = [entry_to_json(key, value) for key, value in getattr(self, name).items()]
        if not self.forgotten:
            del data["forgotten"]  # as before the field existed
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> VChannelState:
        values: dict[str, Any] = {
            name: from_json(data[name]) for name, (_, from_json) in FIELD_FORMS.items() if name in data
        }
        for name, (_, entry_from_json) in MAP_FORMS.items():
            values[name] = SharedMap(map(entry_from_json, data[name]))
        return cls(
            name=data["name"],
            collection_id=data["collection_id"],
            collection_name=data["collection_name"],
            number=data["number"],
            vchannels=tuple(data["vchannels"]),
            schemas=tuple(CollectionSchema.from_json(item) for item in data["schemas"]),
            **values,
        )


def _segment_json(key: int, segment: Segment) -> list[Any]:
    return [*segment[:6], sorted(segment.txns), segment.seal_policy]


def _segment_from(item: list[Any]) -> Segment:
    number, partition_id, rows, size, last_insert_tick, deletes_before, txns, sealed = item
    return Segment(number, partition_id, rows, size, last_insert_tick, deletes_before, frozenset(txns), sealed)


def _growing_entry(item: list[Any]) -> tuple[int, Segment]:
    segment = _segment_from(item)
    return segment.partition_id, segment


def _sealed_entry(item: list[Any]) -> tuple[int, Segment]:
    segment = _segment_from(item)
    return segment.id, segment


def _txn_entry(item: list[Any]) -> tuple[int, OpenTxn]:
    return item[0], OpenTxn(item[0], MessageId(*item[1]), *item[2:])


def _producer_entry(item: list[Any]) -> tuple[int, ProducerState]:
    key, epoch, following, tick, results = item
    return key, ProducerState(epoch, following, tick, tuple(SequenceResult(*result) for result in results))


FIELD_FORMS: Final[dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "ended": (
        lambda ended: [list(pair) for pair in ended],
        lambda item: tuple((txn_id, how) for txn_id, how in item),
    ),
    "delete_rows": (int, int),
    "mvcc": (int, int),
    "forgotten": (int, int),
}
"""Fields of a VChannel that messages change: how each goes to JSON and back."""

MAP_FORMS: Final[dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]]] = {
    "partitions": (lambda key, name: [key, name], lambda item: (item[0], item[1])),
    "growing": (_segment_json, _growing_entry),
    "sealed": (_segment_json, _sealed_entry),
    "txns": (lambda key, txn: list(txn), _txn_entry),
    "producers": (lambda key, producer: [key, *producer], _producer_entry),
}
"""Maps of a VChannel: how an entry goes to JSON and back."""


class _VChannelMeasure:
    """Summarises VChannels by their open work."""

    def of(self, name: str, channel: VChannelState, config: ChainConfig) -> OpenWork:
        growing: OpenWork = channel.growing.summary(SEGMENTS, config)
        if not channel.txns and not channel.sealed:
            return growing._replace(txn_ids=frozenset()) if growing.txn_ids else growing
        parts = [growing, channel.txns.summary(TXNS, config), channel.sealed.summary(SEGMENTS, config)]
        return SEGMENTS.join(parts)._replace(txn_ids=frozenset())

    def same(self, old: VChannelState, new: VChannelState) -> bool:
        return old.growing is new.growing and old.txns is new.txns and old.sealed is new.sealed

    def join(self, works: list[OpenWork]) -> OpenWork:
        return SEGMENTS.join(works)


VCHANNELS: Final = _VChannelMeasure()


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
    vchannels: SharedMap[str, VChannelState] = field(default_factory=SharedMap)

    @classmethod
    def new(cls, pchannel: str) -> Self:
        """Return the state before the first entry."""
        return cls(pchannel=pchannel)

    def copy(self) -> ChannelState:
        """Return a state to evolve, which shares all its content with this one."""
        return ChannelState(
            self.pchannel,
            self.position,
            self.last_entry,
            self.last_entry_crc,
            self.last_tick,
            self.term,
            self.chain_version,
            self.dirty,
            self.config,
            self.vchannels,
        )

    def put(self, channel: VChannelState) -> None:
        """Take `channel` in place of the VChannel of its name, or as a new one."""
        self.vchannels = self.vchannels.set(channel.name, channel)

    def next_tick(self, physical_ms: int) -> int:
        """Return the tick that the next message would get at `physical_ms`."""
        return max(self.last_tick + 1, physical_ms << LOGICAL_BITS)

    @property
    def open_work(self) -> OpenWork:
        """Pending work of the PChannel. Costs what changed since the last call."""
        work: OpenWork = self.vchannels.summary(VCHANNELS, self.config)
        return work

    def channels_of(self, collection_id: int) -> Iterator[tuple[str, VChannelState]]:
        """Return a collection's VChannels with their names. Cost: their number, not that of all VChannels."""
        # The chain takes only these names for a collection's VChannels, so no other needs to be looked at.
        stem = f"{self.pchannel}_{collection_id}"
        return self.vchannels.between(f"{stem}v", f"{stem}w")

    def channels_with(self, accepts: Callable[[OpenWork], bool]) -> Iterator[VChannelState]:
        """Yield the VChannels whose open work `accepts`, by name. It must accept joined work that includes theirs."""
        for _, channel in self.vchannels.where(VCHANNELS, self.config, accepts):
            yield channel

    def open_txns(self) -> Iterator[tuple[VChannelState, OpenTxn]]:
        """Yield the open transactions with their VChannels."""
        for channel in self.channels_with(lambda work: work.open_txns > 0):
            for txn in channel.txns.values():
                yield channel, txn

    def first_open_begin(self) -> MessageId | None:
        """Return the smallest Begin id of the open transactions, from which LastConfirmed is computed."""
        work = self.open_work
        return work.begin if work.open_txns else None

    def next_deadline(self) -> int:
        """Return the earliest tick at which a timer fires; NEVER if none is set."""
        work = self.open_work
        return min(work.txn_timer[0], work.segment_timer[0])

    def to_bytes(self) -> bytes:
        """Return canonical bytes: a version byte, then canonical JSON.

        It is not compressed, since zlib builds differ in their output.
        """
        data = state_head(self) | {"vchannels": [channel.to_json() for channel in self.vchannels.values()]}
        if self.chain_version > 1:
            data["chain_version"] = self.chain_version
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        # The version byte keeps a build from continuing a state of a chain version that it does not know.
        return bytes([self.chain_version]) + text

    @classmethod
    def of_head(
        cls,
        head: dict[str, Any],
        chain_version: int,
        vchannels: SharedMap[str, VChannelState],
        config: ChainConfig | None = None,
    ) -> Self:
        """Make a state of the result of :func:`state_head`, with `config` if that has none."""
        return cls(
            pchannel=head["pchannel"],
            position=LogId(*head["position"]),
            last_entry=None if head["last_entry"] is None else LogId(*head["last_entry"]),
            last_entry_crc=head["last_entry_crc"],
            last_tick=head["last_tick"],
            term=head["term"],
            chain_version=chain_version,
            dirty=head["dirty"],
            config=config or ChainConfig(**head["config"]),
            vchannels=vchannels,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the result of :meth:`to_bytes`. Raises UnsupportedVersion or Malformed."""
        if not data or data[0] not in STATE_VERSIONS:
            found = data[0] if data else None
            raise UnsupportedVersion(f"channel state of version {found}: this build reads versions {STATE_VERSIONS}")
        try:
            item = json.loads(data[1:])
            channels = [VChannelState.from_json(channel) for channel in item["vchannels"]]
            vchannels = SharedMap((channel.name, channel) for channel in channels)
            return cls.of_head(item, item.get("chain_version", 1), vchannels)
        except DECODE_ERRORS as error:
            raise Malformed(f"cannot decode the channel state: {error}") from error


def state_head(state: ChannelState) -> dict[str, Any]:
    """Return the state's JSON without its VChannels and the chain's version, which are stored separately."""
    return {
        "pchannel": state.pchannel,
        "position": list(state.position),
        "last_entry": None if state.last_entry is None else list(state.last_entry),
        "last_entry_crc": state.last_entry_crc,
        "last_tick": state.last_tick,
        "term": state.term,
        "dirty": state.dirty,
        "config": state.config.to_json(),
    }
