"""The backends that the conformance suite runs on: one line each.

A factory opens (or makes) the deployment that lives in a directory, with MAX_ENTRY_BYTES as the limit of an entry and
files as small as the backend allows. Closing the service and calling the factory again with the same directory is a
restart. On a broker, which all tests of a run share, the directory's name is the deployment's.

Where backends keep the protocol in different ways, `promises_of` says which way is whose: nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from millrace.base.file_lock import LockedFile
from millrace.base.log_backends import LogBackend, backend_of
from millrace.log.protocol import LogService
from millrace.log.registry import open_service
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.log.server.flight import LogServer
from millrace.rpc.discovery import ServerRecord, remove_record, write_record
from millrace.rpc.remote_log import RemoteLogService
from tests import running_brokers
from tests.conformance.switching import Switching, behind_an_empty_generation

MAX_ENTRY_BYTES = 1 << 20

SETTINGS = RocksMQSettings(segment_bytes=128 << 10, spare_files=2, max_entry_bytes=MAX_ENTRY_BYTES, lock_wait=0.5)


class Served(RemoteLogService):
    """The embedded log over the wire: a server in this process and its client, closed together."""

    server: LogServer
    record: ServerRecord
    published: LockedFile

    @classmethod
    def over(cls, directory: Path) -> Served:
        draft = ServerRecord.of_this_process("")
        server = LogServer(RocksMQ(directory, settings=SETTINGS), tokens=[draft.token])
        record = replace(draft, address=server.address)
        published = write_record(directory, record)
        served = cls.connect(directory, start=False)
        served.server, served.record, served.published = server, record, published
        return served

    def close(self) -> None:
        super().close()
        if not self.server.gate.closed:
            self.server.close()
            remove_record(Path(self._folder), self.record)
            self.published.close()


def embedded(url: str) -> RocksMQ:
    """The embedded log at a URL, with the settings of the suite."""
    return RocksMQ(unquote(urlsplit(url).path), settings=SETTINGS)


def kafka(directory: Path) -> LogService:
    """A prefix of its own on the run's Kafka, read and written without a server between."""
    return open_service(f"kafka://{running_brokers.kafka().address}/{deployment_name(directory)}", BROKER_SETTINGS)


def kafka_partitions(directory: Path) -> LogService:
    """The same, where dml_0 is a partition of the deployment's topic; other PChannels have their own."""
    settings = BROKER_SETTINGS | {"partitions": 2}
    return open_service(f"kafka://{running_brokers.kafka().address}/{deployment_name(directory)}", settings)


def pulsar(directory: Path) -> LogService:
    """A prefix of its own on the run's Pulsar, read and written without a server between."""
    broker = running_brokers.pulsar()
    return open_service(
        f"{broker.namespace_url}/{deployment_name(directory)}", {"admin": broker.admin_url} | BROKER_SETTINGS
    )


def deployment_name(directory: Path) -> str:
    """A name that no other directory has."""
    return "t" + sha256(str(directory).encode()).hexdigest()[:16]


BROKER_SETTINGS = {"max_entry_bytes": MAX_ENTRY_BYTES}

BACKENDS: dict[str, Callable[[Path], LogService]] = {
    "rocksmq": lambda directory: RocksMQ(directory, settings=SETTINGS),
    "rocksmq behind its server": Served.over,
    "rocksmq behind an empty generation": lambda directory: behind_an_empty_generation(directory, embedded),
    "rocksmq switched under way": lambda directory: Switching(directory, open_backend=embedded),
    "kafka": kafka,
    "kafka with partitions": kafka_partitions,
    "pulsar": pulsar,
}


PARAMETERS = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("kafka with partitions", "pulsar") else name
    for name in sorted(BACKENDS)
]
"""The backends as parameters of a test. `make test` runs the suite on the embedded log and on one broker."""


@dataclass(frozen=True)
class Promises:
    """How a backend keeps what the protocol leaves to it."""

    declared: LogBackend
    """What it says of itself: the suite holds it to that."""
    dense: bool = False
    """Its ids are (0, 0), (0, 1) and so on, so that EARLIEST may be an entry's id."""
    destroys: bool = True
    """dml_0 can be destroyed; a partition of a topic cannot, and that is refused."""


def promises_of(backend: str) -> Promises:
    """By the name of BACKENDS, whose first word is the backend's scheme."""
    declared = backend_of(backend.split()[0])
    return Promises(declared, dense=declared.scheme == "kafka", destroys=backend != "kafka with partitions")
