"""The real brokers of a test run: each one is started when a test first needs it, once, and stopped at the run's end.

A test takes a prefix (Kafka) or namespace of its own on it, and leaves it alone otherwise; one that stops or
kills a broker starts its own.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from millrace.base.settings import Settings
from millrace.brokers.etcd import EtcdServer
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.mariadb import MariaDbServer
from millrace.brokers.opensearch import OpenSearchServer
from millrace.brokers.postgres import PostgresServer
from millrace.brokers.pulsar import PulsarBroker
from millrace.brokers.server import LocalServer
from tests import s3_server

_RUNNING: dict[str, LocalServer] = {}
_FOLDERS: list[Path] = []


def kafka() -> KafkaBroker:
    """A Kafka for this run."""
    found = _RUNNING.get("kafka")
    if found is None:
        found = _RUNNING["kafka"] = KafkaBroker(_folder("kafka"), settings=Settings()).start()
    assert isinstance(found, KafkaBroker)
    return found


def pulsar() -> PulsarBroker:
    """A Pulsar for this run."""
    found = _RUNNING.get("pulsar")
    if found is None:
        found = _RUNNING["pulsar"] = PulsarBroker(_folder("pulsar"), settings=Settings()).start()
    assert isinstance(found, PulsarBroker)
    return found


def etcd() -> EtcdServer:
    """An etcd for this run."""
    found = _RUNNING.get("etcd")
    if found is None:
        found = _RUNNING["etcd"] = EtcdServer(_folder("etcd"), settings=Settings()).start()
    assert isinstance(found, EtcdServer)
    return found


def mariadb() -> MariaDbServer:
    """A MariaDB for this run. A test makes databases of its own on it."""
    found = _RUNNING.get("mariadb")
    if found is None:
        found = _RUNNING["mariadb"] = MariaDbServer(_folder("mariadb"), settings=Settings()).start()
    assert isinstance(found, MariaDbServer)
    return found


def postgres() -> PostgresServer:
    """A PostgreSQL for this run. A test makes databases of its own on it."""
    found = _RUNNING.get("postgres")
    if found is None:
        found = _RUNNING["postgres"] = PostgresServer(_folder("postgres"), settings=Settings()).start()
    assert isinstance(found, PostgresServer)
    return found


def opensearch() -> OpenSearchServer:
    """An OpenSearch for this run. A test takes indices of its own on it."""
    found = _RUNNING.get("opensearch")
    if found is None:
        found = _RUNNING["opensearch"] = OpenSearchServer(_folder("opensearch"), settings=Settings()).start()
    assert isinstance(found, OpenSearchServer)
    return found


def stop_all() -> None:
    """Stop what runs, and remove its data."""
    s3_server.stop()
    for broker in _RUNNING.values():
        broker.stop()
    _RUNNING.clear()
    for folder in _FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)
    _FOLDERS.clear()


def _folder(name: str) -> Path:
    _FOLDERS.append(Path(tempfile.mkdtemp(prefix=f"millrace-{name}-")))
    return _FOLDERS[-1]
