"""The append host: latency of single appends, messages per second in batches, and time from append to delivery.

Each function creates its deployment below `folder`, uses the log server as any client does, measures and cleans up.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.client.append_client import AppendClient
from millrace.client.consume.scan import scan
from millrace.message import builders
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_columns, encode_entry
from millrace.wal.scanner import ImmutableTxn, Latest

PCHANNEL = "p0"
VCHANNEL = "p0_1v0"
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")
BODY = 1000


@contextmanager
def deployment(folder: Path) -> Iterator[AppendClient]:
    """Serve a log with one collection on one VChannel for as long as the block lasts."""
    shutil.rmtree(folder, ignore_errors=True)
    with AppendClient.connect(folder) as client:
        client.service.create(PCHANNEL)
        opening = builders.term_opening(term=1, chain_version=1, config={})
        made = builders.create_collection(
            "c", SCHEMA, vchannel=VCHANNEL, vchannels=[VCHANNEL], collection_id=1, partitions={"all": 1}, term=1
        )
        client.append(PCHANNEL, [encode_entry([opening]), encode_entry([made])]).results()
        try:
            yield client
        finally:
            client.service.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def batches(*, messages: int, per_entry: int, producer: int) -> list[bytes]:
    """Return entries of `per_entry` one-row inserts of 1 KB each, with the producer's sequences."""
    body = np.random.default_rng(1).bytes(BODY)
    one = builders.insert(
        pa.record_batch([pa.array([0]), pa.array([body])], schema=SCHEMA.arrow()),
        vchannel=VCHANNEL,
        collection_id=1,
        partition_id=1,
        term=1,
    )
    payload = one.payload
    return [
        encode_columns(
            type=MessageType.INSERT,
            vchannel=VCHANNEL,
            payloads=[payload] * per_entry,
            term=1,
            collection_id=1,
            partition_id=1,
            schema_version=1,
            rows=1,
            producer_id=producer,
            epoch=1,
            sequence=np.arange(start, start + per_entry),
        )
        for start in range(0, messages, per_entry)
    ]


def single_appends(folder: Path, *, count: int = 2000, clients: int = 1) -> dict[str, Any]:
    """Return the milliseconds from append to result, one message of 1 KB at a time from each of `clients` threads."""
    with deployment(folder) as client:
        entries = [batches(messages=count, per_entry=1, producer=number + 1) for number in range(clients)]
        spent: list[list[float]] = [[] for _ in range(clients)]

        def work(number: int) -> None:
            for entry in entries[number]:
                begun = time.perf_counter()
                client.append(PCHANNEL, entry)
                spent[number].append(time.perf_counter() - begun)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
    values = np.array([each for one in spent for each in one[len(one) // 10 :]]) * 1000
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {
        "clients": clients,
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "per_s": round(clients * count / seconds),
    }


def batched_appends(folder: Path, *, messages: int = 200_000, per_entry: int = 1000) -> dict[str, Any]:
    """Return the messages of 1 KB a second through one pipelined stream, from the first append to the last decision."""
    with deployment(folder) as client:
        entries = batches(messages=messages, per_entry=per_entry, producer=1)
        with client.append_stream(PCHANNEL) as stream:
            begun = time.perf_counter()
            futures = [stream.submit(entry) for entry in entries]
            decided = sum(len(future.result()) - future.result().rejected for future in futures)
            seconds = time.perf_counter() - begun
    assert decided == messages
    return {"messages_per_s": round(messages / seconds), "mb_per_s": round(sum(map(len, entries)) / seconds / 1e6)}


def append_to_scan(folder: Path, *, count: int = 500) -> dict[str, Any]:
    """Return the ms from before an append until a tailing scan in the same process has delivered the message."""
    with deployment(folder) as client:
        entries = batches(messages=count, per_entry=1, producer=1)
        begun: dict[int, float] = {}
        delivered: dict[int, float] = {}

        with scan(VCHANNEL, Latest(), wal=str(folder / "wal"), tail=client) as found:

            def read() -> None:
                for unit in found:
                    if not isinstance(unit, ImmutableTxn) and unit.type == MessageType.INSERT:
                        delivered[unit.sequence] = time.perf_counter()
                        if len(delivered) == count:
                            return

            reader = threading.Thread(target=read)
            reader.start()
            for sequence, entry in enumerate(entries):
                begun[sequence] = time.perf_counter()
                client.append(PCHANNEL, entry)
            reader.join(60)
    values = np.array([delivered[each] - begun[each] for each in range(count // 10, count)]) * 1000
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2)}


def main(folder: Path) -> None:
    """Run all measurements and print one line each."""
    print("single append", single_appends(folder))
    print("8 clients", single_appends(folder, count=400, clients=8))
    print("batches of 1000", batched_appends(folder))
    print("append to scan", append_to_scan(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
