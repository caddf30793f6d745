"""A PChannel with many collections of one VChannel each, in whose VChannels segments grow, and its chain in memory."""

from __future__ import annotations

import pyarrow as pa

from millrace.message import builders
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState, ProducerState

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")
ROW = pa.record_batch([pa.array([1]), pa.array([b"body"])], schema=SCHEMA.arrow())
PRODUCER = 77
"""A producer that has sent one message on every VChannel."""
_STAMP = 1_700_000_000_000


class BusyChannel:
    """The chain of PChannel p0; :meth:`append` judges messages and keeps the state."""

    def __init__(self, vchannels: int, *, producers: int = 1) -> None:
        self.state = ChannelState.new("p0")
        self._entries = 0
        limits = {"max_vchannels": 1 << 16, "max_producers": 1 << 16}
        self.append(builders.term_opening(term=1, chain_version=4, config=limits))
        # Few at a time: a message that needs a new segment is judged alone, and those after it again.
        for start in range(1, vchannels + 1, 4):
            numbers = range(start, min(start + 4, vchannels + 1))
            self.append(*map(_create, numbers))
            self.append(*(self.insert(number, producer_id=PRODUCER) for number in numbers))
        if producers > 1:
            self._register(producers)

    def _register(self, producers: int) -> None:
        """Add producers to the first VChannel: a log of their first messages would take a while."""
        first = self.state.vchannels[name_of(1)]
        known, many = ProducerState(0, 1, 1, ()), first.producers
        for number in range(1, producers):
            many = many.set(1000 + number, known)
        self.state.put(first._replace(producers=many))

    def insert(self, number: int, *, producer_id: int = 0, sequence: int = 0, txn_id: int = 0) -> MutableMessage:
        """An insert of one row into a collection."""
        return builders.insert(
            ROW,
            vchannel=name_of(number),
            collection_id=number,
            partition_id=1,
            term=1,
            txn_id=txn_id,
            producer_id=producer_id,
            sequence=sequence,
        )

    def entries(self, *messages: MutableMessage) -> LogEntries:
        """The next entries of the log, one for each message."""
        places = range(self._entries, self._entries + len(messages))
        columns = [[0] * len(messages), list(places), [_STAMP] * len(messages)]
        values = [encode_entry([message]) for message in messages]
        batch = pa.record_batch([*columns, values], schema=ENTRY_SCHEMA)
        return LogEntries(batch, LogId(0, places.stop))

    def append(self, *messages: MutableMessage, fast: bool = True) -> ChannelState:
        """Judge messages. Returns the state before them."""
        entries, before = self.entries(*messages), self.state
        self._entries += len(messages)
        self.state = Chain(fast=fast).process(before, entries).state
        return before


def name_of(number: int) -> str:
    """The VChannel of a collection."""
    return f"p0_{number}v0"


def _create(number: int) -> MutableMessage:
    return builders.create_collection(
        f"c{number}",
        SCHEMA,
        vchannel=name_of(number),
        vchannels=[name_of(number)],
        collection_id=number,
        partitions={"_default": 1},
        term=1,
    )
