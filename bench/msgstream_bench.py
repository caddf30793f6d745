"""Message streams against the plain log: the same bytes in the same batches, interleaved in the same run.

The baseline of produce is Log.append of marshalled messages. The baseline of consume is Log.read of the same entries,
each taken out as bytes with its id, as anybody does who handles single messages. A stream adds Python work for each
message. Messages are GenericMsg with one payload; time-tick streams have a tick after each batch. Every function takes
a directory on the disk to be measured and leaves it empty.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.log_bench import Ratio, pairs
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import EARLIEST
from millrace.message.types import MessageType
from millrace.msgstream.messages import GenericMsg, TimeTickMsg
from millrace.msgstream.pack import MsgPack
from millrace.msgstream.stream import BaseStream, LogMsgStream, entries_of
from millrace.msgstream.tick_stream import LogTtMsgStream

BATCH_BYTES = 1 << 20
CHANNEL = "bench"


def packs_of(payload_bytes: int, messages: int) -> list[MsgPack]:
    """Return `messages` messages in batches of about BATCH_BYTES, in order of time, the last of each batch a tick."""
    batch = max(1, BATCH_BYTES // payload_bytes)
    packs, ts = [], 0
    while ts < messages:
        msgs: list[GenericMsg | TimeTickMsg] = []
        for _ in range(batch):
            ts += 1
            payload = os.urandom(payload_bytes)
            msgs.append(GenericMsg(id=ts, begin_ts=ts, hash_keys=(ts,), msg_type=MessageType.SEARCH, payload=payload))
        packs.append(MsgPack(msgs=[*msgs, TimeTickMsg(begin_ts=ts, hash_keys=(0,))]))
    return packs


@contextmanager
def _log(directory: Path) -> Iterator[RocksMQ]:
    data = directory / "log"
    try:
        with RocksMQ(data) as service:
            service.create(CHANNEL)
            yield service
    finally:
        shutil.rmtree(data)


def stream_produce(directory: Path, packs: list[MsgPack]) -> float:
    """Return the messages/s of produce, each pack durable before the next."""
    with _log(directory) as service, LogMsgStream(service) as stream:
        stream.as_producer([CHANNEL])
        start = time.perf_counter()
        for pack in packs:
            stream.produce(pack)
        return _count(packs) / (time.perf_counter() - start)


def plain_append(directory: Path, packs: list[MsgPack]) -> float:
    """Return the messages/s of appending the same bytes."""
    batches = [[msg.marshal() for msg in pack.msgs] for pack in packs]
    with _log(directory) as service:
        log = service.open(CHANNEL)
        start = time.perf_counter()
        for batch in batches:
            log.append(batch)
        return _count(packs) / (time.perf_counter() - start)


def stream_consume(directory: Path, packs: list[MsgPack], kind: Callable[[RocksMQ], BaseStream[Any]]) -> float:
    """Return the messages/s of consume, as a group that acknowledges each pack by taking the next."""
    with _filled(directory, packs) as service, kind(service) as stream:
        stream.as_consumer([CHANNEL], "bench")
        last, got, start = packs[-1].msgs[-1].end_ts, 0, time.perf_counter()
        while True:
            pack = stream.consume()
            got += len(pack.msgs)
            if pack.end_ts >= last:
                break
        elapsed = time.perf_counter() - start
    ticks = 0 if isinstance(stream, LogMsgStream) else len(packs)
    assert got == _count(packs) - ticks
    return _count(packs) / elapsed


def plain_read(directory: Path, packs: list[MsgPack]) -> float:
    """Return the messages/s of reading the same entries, 4 MiB at once."""
    with _filled(directory, packs) as service:
        log, position, rows, start = service.open(CHANNEL), EARLIEST, 0, time.perf_counter()
        while (run := log.read(position, max_bytes=4 << 20)).batch.num_rows:
            rows += sum(1 for _ in entries_of(run))
            position = run.next
        elapsed = time.perf_counter() - start
    assert rows == _count(packs)
    return rows / elapsed


@contextmanager
def _filled(directory: Path, packs: list[MsgPack]) -> Iterator[RocksMQ]:
    with _log(directory) as service:
        log = service.open(CHANNEL)
        for pack in packs:
            log.append([msg.marshal() for msg in pack.msgs])
        yield service


def _count(packs: list[MsgPack]) -> int:
    return sum(len(pack.msgs) for pack in packs)


def run(directory: Path, *, total: int = 256 << 20, count: int = 7) -> list[Ratio]:
    """Run all measurements: `total` bytes of payloads a run, `count` pairs each."""
    results = []
    for payload_bytes in (1 << 10, 64 << 10):
        packs = packs_of(payload_bytes, total // payload_bytes)
        label = f"{payload_bytes >> 10} KiB messages"
        results += [
            pairs(
                f"produce, {label}",
                "messages/s",
                partial(stream_produce, directory, packs),
                partial(plain_append, directory, packs),
                count,
            ),
            pairs(
                f"consume, {label}",
                "messages/s",
                partial(stream_consume, directory, packs, LogMsgStream),
                partial(plain_read, directory, packs),
                count,
            ),
            pairs(
                f"consume by ticks, {label}",
                "messages/s",
                partial(stream_consume, directory, packs, LogTtMsgStream),
                partial(plain_read, directory, packs),
                count,
            ),
        ]
    return results


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for result in run(target, total=32 << 20, count=3):
        print(json.dumps(asdict(result)))
