"""The golden deployment: where its archive lies, how its log's server is started on a copy, and what is known of it.

A folder, wherever it was unpacked, holds a whole deployment and what belongs to its clients:

    data/      the data folder            spool/    of a producer whose rows never reached the log
    between/   the log's second generation (an embedded log outside of the data folder, named by a relative URL)
    streams/   message streams            backups/  one backup of data/
    trimmed/   a deployment of its own whose WAL was trimmed by its retention

The generation's URL is relative so that no path of the machine that made it stands in there: whoever reads the log from
its beginning does so in that folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings
from millrace.client.consume.positions import FilePositions
from millrace.client.database import Database, connect
from millrace.log.generations.service import open_deployment_log
from millrace.log.protocol import LogService
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message.ids import LogId
from millrace.msgstream.channels import MsgChannels
from millrace.msgstream.messages import GenericMsg
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.stream import LogMsgStream
from millrace.msgstream.tick_stream import LogTtMsgStream
from millrace.rpc.launch import APPEND_HOST
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import read_checkpoints
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.table import WalTable

HERE = Path(__file__).parent
ARCHIVE = HERE / "deployment-1.tar.xz"
FACTS = HERE / "deployment-1.json"
LOG = {"segment_bytes": 16 << 10, "spare_files": 0, "max_entry_bytes": 1 << 20}
PATIENCE = 60.0
WRITER = 7
"""Id of the producer whose rows are most of it."""
GROUP = "readers"
STREAMS = StreamSettings(timeout=20.0)


def unpacked(folder: Path, archive_of: Path = ARCHIVE) -> Path:
    """A copy of a deployment in `folder`."""
    with tarfile.open(archive_of) as archive:
        archive.extractall(folder, filter="data")
    return folder


def facts(of: Path = FACTS) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(of.read_text(encoding="utf-8"))
    return found


def settings_of(root: Path, data: str = "data") -> Settings:
    return Settings(
        data_dir=root / data,
        cache_dir=root / "cache",
        append_retry_delay=0.05,
        append_deadline=20.0,
        read_deadline=20.0,
    )


class Server:
    """The log's server of the deployment in `root`, which runs in that folder."""

    def __init__(self, root: Path, data: str) -> None:
        self._root = root
        self._settings = settings_of(root, data)
        self._start()
        self.client = _connected(self._settings, self._process)

    def _start(self) -> None:
        arguments = [f"--set={name}={value}" for name, value in LOG.items()]
        command = [sys.executable, "-m", "millrace.log.server.main", "--data", str(self._settings.log_path), *arguments]
        plain = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        with (self._root / "server.out").open("ab") as output:
            self._process = subprocess.Popen(
                [*command, f"--extension={APPEND_HOST}"], cwd=self._root, stdout=output, stderr=output, env=plain
            )

    def stop(self) -> None:
        self.client.connection.service.shutdown()
        self._process.wait(timeout=PATIENCE)

    def put_below(self, pchannel: str, values: list[bytes]) -> list[LogId]:
        """Put bytes that the server would refuse straight into the log; the server starts anew behind it."""
        self.stop()
        with (
            open_deployment_log(self._settings.log_path, settings=LOG) as service,
            closing(service.open(pchannel)) as log,
        ):
            ids = list(log.append(values))
        self._start()
        _connected(self._settings, self._process).close()
        return ids

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def serving(root: Path, data: str = "data") -> Iterator[Server]:
    """A server of the deployment in `root`, and a client of it."""
    server = Server(root, data)
    try:
        with server.client:
            yield server
            server.stop()
    finally:
        server.kill()


@contextmanager
def served(root: Path, data: str = "data") -> Iterator[Database]:
    """A client of the deployment in `root`, whose log's server runs in that folder meanwhile."""
    with serving(root, data) as server:
        yield server.client


def _connected(settings: Settings, server: subprocess.Popen[bytes]) -> Database:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return connect(settings=settings, start=False)
        except LogUnavailable:
            if server.poll() is not None or time.monotonic() > until:
                raise
        server.poll()


def rows(settings: Settings, collection: int, *, at: int | None = None) -> list[dict[str, Any]]:
    """What a read finds, in the order of the key, as JSON has it.

    Of `at` it is known that the WAL has all up to there.
    """
    known = None if at is None else {f"dml_{number}": at for number in range(3)}
    found = read_arrow(settings, collection, at=at, deadline=0.0, confirmed=known)
    key = found.column_names[0]
    return [json.loads(json.dumps(row, default=str)) for row in found.sort_by(key).to_pylist()]


def of_wal(settings: Settings) -> dict[str, Any]:
    """By PChannel what its WAL says: rows, their digest, position, a digest of its state, rejections by reason."""
    wal = WalTable.open(settings.wal_uri)
    checkpoints = read_checkpoints(open_table(settings.checkpoints_uri))
    reasons: dict[str, Counter[str]] = {}
    rejected = pc.field("kind") == "rejection"
    rejections = wal.table.dataset().to_table(columns=["pchannel", "reason"], filter=rejected)
    for row in rejections.to_pylist():
        reasons.setdefault(row["pchannel"], Counter())[row["reason"]] += 1
    found = {}
    for name in wal.pchannels():
        position = wal.position(name)
        state, data = position.state, position.state_bytes
        assert state is not None
        assert data is not None
        found[name] = {
            "messages": position.totals.messages,
            "rejections": position.totals.rejections,
            "digest": str(position.totals.digest),
            "last_tick": position.last_tick,
            "position": str(position.position),
            "state": hashlib.sha256(data).hexdigest(),
            "open_transactions": [txn.id for _, txn in state.open_txns()],
            "reasons": dict(sorted(reasons.get(name, Counter()).items())),
            "flushed_tick": checkpoints[name].time_tick if name in checkpoints else 0,
        }
    return found


def of_catalog(client: Database) -> dict[str, Any]:
    """Collections, dropped ones too, and terms."""
    return {
        "collections": [
            {
                "id": each.id,
                "name": each.name,
                "state": each.state,
                "vchannels": list(each.vchannels),
                "schemas": [schema.to_json() for schema in each.schemas],
                "partitions": each.partitions,
            }
            for each in client.catalog.collections(dropped=True)
        ],
        "terms": {each.name: each.term for each in client.catalog.pchannels()},
    }


def of_log(log: LogService) -> dict[str, Any]:
    """By PChannel where its log begins and ends, and where the log's own consumer groups stand."""
    found: dict[str, Any] = {}
    for name in log.names():
        handle = log.open(name)
        described = handle.describe()
        handle.close()
        found[name] = {"begin": str(described.begin), "end": str(described.end)}
    groups = {group: {name: str(log.group_position(group, name)) for name in log.names()} for group in log.groups()}
    return {"pchannels": found, "groups": groups}


def of_positions(settings: Settings) -> dict[str, dict[str, int]]:
    positions = FilePositions(settings.data_dir / "coord")
    try:
        return positions.groups()
    finally:
        positions.close()


@contextmanager
def streams(root: Path) -> Iterator[RocksMQ]:
    """The log with the message streams."""
    with RocksMQ(root / "streams", settings=RocksMQSettings(**LOG)) as service:
        yield service


def of_streams(service: LogService) -> dict[str, Any]:
    """Channels with their owners, and what two groups have still to get."""
    described = MsgChannels(service).describe_channels().descriptions
    names = [each.channel_name for each in described]
    left: dict[str, list[int]] = {}
    for group, kind in (("plain", LogMsgStream), ("ticking", LogTtMsgStream)):
        with kind(service, settings=STREAMS.with_({"auto_ack": False})) as stream:
            stream.as_consumer(names, group)
            stream.start()
            pack = stream.consume()
            left[group] = sorted(msg.id for msg in pack.msgs if isinstance(msg, GenericMsg))
    return {
        "channels": {
            each.channel_name: {"owner": each.owner.role, "attributes": each.attributes} for each in described
        },
        "left": left,
    }


def people_rows(*keys: int, city: str = "Oslo", **more: list[Any]) -> pa.Table:
    """Rows of the collection `people`."""
    return pa.table(
        {
            "id": list(keys),
            "name": [f"name {key}" for key in keys],
            "city": [city] * len(keys),
            "tags": pa.array([[f"t{key % 3}", None] if key % 2 else None for key in keys], pa.list_(pa.string())),
            **more,
        }
    )
