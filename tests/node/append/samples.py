"""A small deployment for the tests of append host and scan.

A log, a collection on it, its producers and its ``wal`` table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from millrace.log.protocol import LogService
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message import builders
from millrace.message.ids import LogId
from millrace.message.keys import vchannel_index
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestPlan, run_ingest
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import Chain, ChainOutcome
from millrace.wal.state import ChannelState

PCHANNEL = "p0"
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")
VCHANNELS = ("p0_1v0", "p0_1v1")
SMALL_FILES = RocksMQSettings(segment_bytes=4 << 20, spare_files=0)


@contextmanager
def open_log(folder: Path, *pchannels: str) -> Iterator[RocksMQ]:
    """A log in `folder` with empty PChannels."""
    with RocksMQ(folder, settings=SMALL_FILES) as service:
        for pchannel in pchannels:
            service.create(pchannel)
        yield service


def opening(pchannel: str = PCHANNEL, **config: int) -> list[bytes]:
    """Entries that open term 1 and make collection 1 with one partition on two VChannels of `pchannel`."""
    vchannels = [name.replace(PCHANNEL, pchannel) for name in VCHANNELS]
    term = builders.term_opening(term=1, chain_version=1, config=config)
    made = [
        builders.create_collection(
            "users", SCHEMA, vchannel=name, vchannels=vchannels, collection_id=1, partitions={"all": 1}, term=1
        )
        for name in vchannels
    ]
    return [encode_entry([term]), encode_entry(made)]


def home(key: int, pchannel: str = PCHANNEL) -> str:
    """The VChannel of a key."""
    return VCHANNELS[vchannel_index(pa.array([key]), len(VCHANNELS))[0]].replace(PCHANNEL, pchannel)


def keys_of(vchannel: str, count: int) -> list[int]:
    """The first `count` keys that belong to `vchannel`."""
    pchannel = vchannel.rpartition("_")[0]
    return [key for key in range(count * 8 + 64) if home(key, pchannel) == vchannel][:count]


def insert(
    key: int,
    *,
    producer: int = 0,
    sequence: int = 0,
    txn_id: int = 0,
    body: bytes = b"body",
    vchannel: str | None = None,
    pchannel: str = PCHANNEL,
) -> MutableMessage:
    """An insert of one row."""
    return builders.insert(
        pa.record_batch([pa.array([key]), pa.array([body])], schema=SCHEMA.arrow()),
        vchannel=vchannel or home(key, pchannel),
        collection_id=1,
        partition_id=1,
        term=1,
        txn_id=txn_id,
        producer_id=producer,
        epoch=1 if producer else 0,
        sequence=sequence,
    )


def transaction(txn_id: int, keys: Sequence[int], *, vchannel: str, commit: bool = True) -> list[MutableMessage]:
    """Begin, an insert a key, and Commit or Rollback."""
    end = builders.commit_txn if commit else builders.rollback_txn
    return [
        builders.begin_txn(txn_id, vchannel=vchannel, collection_id=1, term=1),
        *(insert(key, txn_id=txn_id, vchannel=vchannel) for key in keys),
        end(txn_id, vchannel=vchannel, collection_id=1, term=1),
    ]


def judged(service: LogService, pchannel: str = PCHANNEL) -> ChainOutcome:
    """The chain's own answer about the whole log."""
    return Chain().process(ChannelState.new(pchannel), service.open(pchannel).read(LogId(0, 0), max_bytes=1 << 30))


def commit_wal(service: LogService, wal: Path, pchannel: str = PCHANNEL, *, end: LogId | None = None) -> int:
    """Bring the ``wal`` table up to `end` (default: the log's end), as the streaming node does; its last tick."""
    table = WalTable.create(wal)
    log = service.open(pchannel)
    plan = IngestPlan(base=table.position(pchannel), end=end or log.describe().end, max_bytes=1 << 30)
    report = run_ingest(plan, log=log, table=wal)
    assert report.failure is None, report.failure
    WalCommitter(table).commit([report])
    return WalTable.open(wal).last_tick(pchannel)
