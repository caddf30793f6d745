"""Logs of few bytes and many messages, and what a host holds at the most while it takes one.

    python -m tests.node.append.storms <folder> <host: server or task>

prints, a line a storm, how many messages were judged and by how many bytes the process grew at the most, as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from millrace.base.metrics import Metrics
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.builders import flush_all
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_columns, encode_entry
from millrace.node.append.host import AppendHost
from millrace.node.ingest.ingester import IngestPlan, run_ingest
from millrace.tables.wal.table import WalTable
from millrace.wal.state import ChannelState
from tests.node.append.samples import PCHANNEL, VCHANNELS, opening

MESSAGES: Final = 10_000
OPENING_MESSAGES: Final = 3


def _transactions() -> list[bytes]:
    """Each begins and commits, and holds nothing."""
    types = np.tile([MessageType.BEGIN_TXN, MessageType.COMMIT_TXN], MESSAGES // 2)
    ids = np.repeat(np.arange(1, MESSAGES // 2 + 1), 2)
    payloads = [b""] * MESSAGES
    return [encode_columns(type=types, vchannel=VCHANNELS[0], payloads=payloads, term=1, collection_id=1, txn_id=ids)]


STORMS: Final[dict[str, Callable[[], list[bytes]]]] = {
    "empty entries": lambda: [b""] * MESSAGES,
    "garbage": lambda: [b"garbage"] * MESSAGES,
    "empty transactions": _transactions,
    "FlushAll in one entry": lambda: [
        encode_columns(type=MessageType.FLUSH_ALL, vchannel="", payloads=[b""] * MESSAGES, term=1)
    ],
    "FlushAll in an entry each": lambda: [encode_entry([flush_all(term=1)])] * MESSAGES,
}

REFUSED: Final = ("empty entries", "garbage")
"""What no host takes: it has to stand in the log already, as a broker's other writers may put it there."""


def take(folder: Path, host: str, kind: str) -> dict[str, object]:
    """Have a host take the storm in a log of its own, and say what that took."""
    storm = STORMS[kind]()
    with RocksMQ(folder / "log") as service:
        service.create(PCHANNEL)
        if host == "server":
            metrics = Metrics()
            with AppendHost(service, ChannelState.new, metrics=metrics) as append_host:
                append_host.append(PCHANNEL, opening()).results()
                before = _begin()
                if kind in REFUSED:
                    service.open(PCHANNEL).append(storm)
                    append_host.tick(PCHANNEL, persist=False, deadline=300.0)
                    labels = {"pchannel": PCHANNEL, "reason": "MALFORMED"}
                    told = metrics.registry.get_sample_value("millrace_wal_rejected_message_total", labels)
                    judged = int(told or 0)
                else:
                    judged = len(append_host.append(PCHANNEL, storm, deadline=300.0))
                grown = _resident("VmHWM") - before
        else:
            wal = WalTable.create(folder / "wal")
            log = service.open(PCHANNEL)
            log.append([*opening(), *storm])
            plan = IngestPlan(base=wal.position(PCHANNEL), end=log.end(), max_bytes=1 << 40)
            before = _begin()
            report = run_ingest(plan, log=log, table=Path(wal.uri))
            grown = _resident("VmHWM") - before
            assert report.failure is None, report.failure
            judged = report.totals.messages + report.totals.rejections - OPENING_MESSAGES
    return {"kind": kind, "judged": judged, "grown": grown}


def _begin() -> int:
    """Bytes that the process has resident; the greatest it comes to counts from here on."""
    # What an earlier storm left free would hide what this one takes.
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _resident("VmRSS")


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


if __name__ == "__main__":
    for number, each in enumerate(STORMS):
        print(json.dumps(take(Path(sys.argv[1]) / str(number), sys.argv[2], each)), flush=True)
