"""The demo's load: several producers send a year of flights in a minute, then many times at full speed.

It counts the producers' results outside of the system; the summary compares the counts with the tables.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import CollectionNotFound
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.producer import Producer
from millrace.client.produce.rows import conform
from millrace.client.produce.written import Written
from millrace.demo.flights import flights_schema
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.message.keys import vchannel_index
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry

COLLECTION: Final = "flights"
PARTITIONS: Final = ("EWR", "JFK", "LGA")
VCHANNELS: Final = 4
PRODUCERS: Final = 3
SLICE_SECONDS: Final = 0.25
FULL_SPEED_ROWS: Final = 30_000
EASY_ROWS: Final = 500
TRANSACTION_ROWS: Final = 500
CORRECTED_ROWS: Final = 500


@dataclass(slots=True)
class ProducerCounts:
    """The producers' results: rows by outcome, and the greatest time tick."""

    inserted: int = 0
    deleted_keys: int = 0
    rolled_back: int = 0
    duplicates: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    messages: int = 0
    last_tick: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def appended(self) -> int:
        """Rows sent in inserts, whatever their outcome."""
        return self.inserted + self.rolled_back + self.duplicates + sum(self.rejected.values())

    def add(self, written: Written, *, deletes: bool = False, rolled_back: bool = False) -> None:
        with self._lock:
            if deletes:
                self.deleted_keys += written.rows
            elif rolled_back:
                self.rolled_back += written.rows
            else:
                self.inserted += written.rows - written.rejected_rows
            self.messages += written.messages
            self.bytes += written.bytes
            self.last_tick = max(self.last_tick, written.last_tick)


def ensure_collection(client: Database, *, vchannels: int = VCHANNELS) -> CollectionInfo:
    """Return the collection of flights; create it over `vchannels` if it does not exist."""
    try:
        return client.definition(COLLECTION)
    except CollectionNotFound:
        schema = CollectionSchema(tuple(FieldSpec(*column) for column in flights_schema()), "id")
        return client.catalog.create_collection(COLLECTION, schema, vchannels=vchannels, partitions=PARTITIONS)


class LoadGenerator:
    """Drives producers over `flights` (a year's rows in order of time). `prefix` makes the keys of this run unique."""

    def __init__(self, client: Database, collection: CollectionInfo, flights: pa.Table, *, prefix: str) -> None:
        self._client = client
        self._collection = collection
        self._flights = flights.sort_by("time_hour")
        self._prefix = prefix
        self._stop = threading.Event()
        self.counts = ProducerCounts()

    def stop(self) -> None:
        """Ask the producers to stop after their current call."""
        self._stop.set()

    def paced(self, seconds: float) -> None:
        """Replay the year in `seconds`: each producer sends every n-th flight when due, and deletes cancelled ones."""
        self._each_producer(lambda producer, number: self._replay(producer, number, seconds))

    def full_speed(self, times: int) -> None:
        """Send the year `times` times, as fast as the producers can."""
        rounds = iter(range(1, times + 1))
        guard = threading.Lock()

        def work(producer: Producer, number: int) -> None:
            while not self._stop.is_set():
                with guard:
                    turn = next(rounds, None)
                if turn is None:
                    return
                for start in range(0, len(self._flights), FULL_SPEED_ROWS):
                    if self._stop.is_set():
                        return
                    self._insert_and_cancel(
                        producer, self._flights.slice(start, FULL_SPEED_ROWS), f"{self._prefix}x{turn}/"
                    )

        self._each_producer(work)

    def until(self, over: Callable[[], bool]) -> None:
        """Send parts of the year, at an easy pace, until `over` returns True."""

        def work(producer: Producer, number: int) -> None:
            for turn in itertools.count():
                for start in range(0, len(self._flights), EASY_ROWS):
                    if self._stop.is_set() or over():
                        return
                    rows = self._flights.slice(start, EASY_ROWS)
                    self._insert_and_cancel(producer, rows, f"{self._prefix}u{number}.{turn}/")
                    self._stop.wait(SLICE_SECONDS)

        self._each_producer(work)

    def special_cases(self) -> None:
        """Send a committed and a rolled-back transaction, corrections, a repeated and an invalid message, then
        flush.
        """
        producer = self._client.new_producer()
        keys = pa.array(
            [f"{self._prefix}txn/{number}" for number in range(2 * len(self._collection.vchannels) * TRANSACTION_ROWS)]
        )
        chosen = np.flatnonzero(vchannel_index(keys, len(self._collection.vchannels)) == 0)[:TRANSACTION_ROWS]
        rows = _keyed(self._flights.slice(0, len(chosen)), keys.take(pa.array(chosen)))
        with producer.transaction(self._collection) as txn:
            self.counts.add(txn.insert(rows, partition="JFK"))
        try:
            with producer.transaction(self._collection) as txn:
                self.counts.add(txn.insert(rows, partition="LGA"), rolled_back=True)
                raise _ChangedMind
        except _ChangedMind:
            pass
        self._correct(producer)
        self._repeat(rows.slice(0, 1))
        self._misplace(producer, rows.slice(0, 1))
        self._client.catalog.flush(COLLECTION)

    def _replay(self, producer: Producer, number: int, seconds: float) -> None:
        mine = self._flights.take(pa.array(np.arange(number, len(self._flights), PRODUCERS)))
        hours = mine.column("time_hour").cast(pa.int64()).to_numpy()
        due = (hours - hours[0]) / max(hours[-1] - hours[0], 1) * seconds
        start, sent = time.monotonic(), 0
        while sent < len(mine) and not self._stop.is_set():
            until = int(np.searchsorted(due, time.monotonic() - start, side="right"))
            if until == sent:
                self._stop.wait(SLICE_SECONDS)
                continue
            self._insert_and_cancel(producer, mine.slice(sent, until - sent), self._prefix)
            sent = until
            self._stop.wait(SLICE_SECONDS)

    def _insert_and_cancel(self, producer: Producer, rows: pa.Table, prefix: str) -> None:
        rows = _keyed(rows, pc.binary_join_element_wise(prefix, rows.column("id"), ""))
        self.counts.add(producer.insert(self._collection, rows, partition_by="origin"))
        cancelled = rows.column("id").filter(rows.column("dep_time").is_null())
        if len(cancelled):
            self.counts.add(producer.delete(self._collection, cancelled), deletes=True)

    def _correct(self, producer: Producer) -> None:
        """Upsert the first flights, with the delay of their arrival corrected: the new row replaces the old one."""
        rows = self._flights.slice(0, CORRECTED_ROWS)
        rows = _keyed(rows, pc.binary_join_element_wise(self._prefix, rows.column("id"), ""))
        late = pc.cast(pc.add(pc.fill_null(rows.column("arr_delay"), 0), 1), pa.int16())
        rows = rows.set_column(rows.column_names.index("arr_delay"), "arr_delay", late)
        self.counts.add(producer.upsert(self._collection, rows, partition_by="origin"))

    def _repeat(self, rows: pa.Table) -> None:
        """Send the same entry twice, as a producer that lost the answer does: it takes effect once."""
        key = f"{self._prefix}twice"
        home = int(vchannel_index(pa.array([key]), len(self._collection.vchannels))[0])
        vchannel = self._collection.vchannels[home]
        pchannel = pchannel_of(vchannel)
        message = self._insert(_keyed(rows, pa.array([key])), vchannel, self._collection.partitions["EWR"])
        message = replace(
            message, term=self._client.catalog.term(pchannel), producer_id=self._client.new_producer().id, epoch=1
        )
        for _ in range(2):
            result = self._client.connection.append(pchannel, [encode_entry([message])]).result()
            if result.duplicate:
                self.counts.duplicates += message.rows
            else:
                self.counts.inserted += message.rows
            self.counts.messages += 1
            self.counts.last_tick = max(self.counts.last_tick, result.time_tick)

    def _misplace(self, producer: Producer, rows: pa.Table) -> None:
        """Send a row for a partition that does not exist: it is rejected, recorded and reported."""
        message = self._insert(conform(rows, self._collection), self._collection.vchannels[0], 1 << 30)
        written = producer.send([message], raise_rejected=False)
        for rejection in written.rejections:
            self.counts.rejected[rejection.reason] += message.rows
        self.counts.messages += 1

    def _insert(self, rows: pa.Table, vchannel: str, partition_id: int) -> MutableMessage:
        return builders.insert(
            conform(rows, self._collection).to_batches()[0],
            vchannel=vchannel,
            collection_id=self._collection.id,
            partition_id=partition_id,
            term=0,
        )

    def _each_producer(self, work: Callable[[Producer, int], None]) -> None:
        with ThreadPoolExecutor(PRODUCERS, thread_name_prefix="demo-producer") as pool:
            futures = [pool.submit(work, self._client.new_producer(), number) for number in range(PRODUCERS)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self.stop()
                raise


class _ChangedMind(Exception):
    """The reason of the demo's rollback."""


def _keyed(rows: pa.Table, keys: pa.Array | pa.ChunkedArray) -> pa.Table:
    return rows.set_column(rows.column_names.index("id"), "id", keys)
