"""Kafka with TLS: brokers that show a certificate, clients that check it, and clients that must show one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

from millrace.base.errors import InvalidSettings, LogUnavailable, PositionTruncated
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.client.database import connect
from millrace.log.registry import open_service
from millrace.message.ids import EARLIEST
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.ingest.log_connection import LogConnection
from tests.certificates import certificate
from tests.conformance.reading import read_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DEADLINE = 30.0
WORDS = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("word", "string", False)), "id")


class Pem(NamedTuple):
    """A certificate and its key."""

    certificate: Path
    key: Path


class Tls(NamedTuple):
    """A broker and the files of both sides."""

    broker: KafkaBroker
    server: Pem
    client: Pem
    stranger: Pem
    """Signed by nobody the other side knows."""

    def url(self, *options: str, protocol: str) -> str:
        """The broker's URL with these options."""
        return f"kafka://{self.broker.address}/tls?" + "&".join([f"security.protocol={protocol}", *options])


def tls_properties(protocol: str, server: Pem, client: Pem, *, auth: str) -> dict[str, str]:
    """What makes a Kafka's listener speak TLS with PEM files."""
    store = server.certificate.with_suffix(".store.pem")
    store.write_text(server.key.read_text() + server.certificate.read_text())
    trusted = server.certificate.with_suffix(".trusted.pem")
    trusted.write_text(server.certificate.read_text() + client.certificate.read_text())
    return {
        "listener.security.protocol.map": f"CLIENT:{protocol},CONTROLLER:PLAINTEXT",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(store),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(trusted),
        "ssl.client.auth": auth,
    }


def broker_in(folder: Path, protocol: str, *, auth: str = "none", address: str = "127.0.0.1") -> Tls:
    """A broker that is not started yet; its certificate is for `address`."""
    (folder / "stranger").mkdir(parents=True)
    server = Pem(*certificate(folder, "broker", address=address))
    client = Pem(*certificate(folder, "client"))
    properties = tls_properties(protocol, server, client, auth=auth)
    if address != "127.0.0.1":
        properties["ssl.endpoint.identification.algorithm"] = ""  # it talks to itself, too
    broker = KafkaBroker(folder / "data", settings=Settings(), sasl=protocol.startswith("SASL"), properties=properties)
    return Tls(broker, server, client, Pem(*certificate(folder / "stranger", "broker")))


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    """TLS, and a login by password inside of it."""
    made = broker_in(tmp_path_factory.mktemp("login"), "SASL_SSL")
    with made.broker.start():
        yield made


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    """TLS where clients show a certificate as well."""
    made = broker_in(tmp_path_factory.mktemp("mutual"), "SSL", auth="required")
    with made.broker.start():
        yield made


@pytest.fixture
def logged_in(login: Tls, monkeypatch: pytest.MonkeyPatch) -> Tls:
    assert login.broker.credentials is not None
    for name, value in login.broker.credentials.environment().items():
        monkeypatch.setenv(name, value)
    return login


def refused(url: str) -> str:
    """The reason why a log at `url` cannot be used; it is told within the deadline."""
    begun = time.monotonic()
    with pytest.raises((InvalidSettings, LogUnavailable)) as raised, open_service(url + "&deadline=5") as service:
        service.create("never")
    assert time.monotonic() - begun < DEADLINE
    return str(raised.value)


def works(url: str, name: str) -> None:
    """Every call of a log: made, appended to, read, a group moved, truncated, dropped."""
    with open_service(url) as service:
        service.create(name)
        log = service.open(name)
        ids = log.append([b"a", b"b" * 100_000, b"c"])
        assert read_all(log) == list(zip(ids, [b"a", b"b" * 100_000, b"c"], strict=True))
        service.move_group("readers", name, ids[2])
        assert service.group_position("readers", name) == ids[2]
        log.truncate(ids[1])
        with pytest.raises(PositionTruncated):
            log.read(EARLIEST)
        assert log.describe().bytes > 0
        service.drop_group("readers")
        service.drop(name)
        assert name not in service.names()


def test_a_deployment_works_with_tls_and_a_login(logged_in: Tls, tmp_path: Path) -> None:
    url = logged_in.url("sasl.mechanism=PLAIN", f"ssl.ca.location={logged_in.server.certificate}", protocol="SASL_SSL")
    works(url, "p")
    settings = Settings(data_dir=tmp_path, log=url, append_deadline=DEADLINE)
    with connect(settings=settings) as client:
        client.catalog.ensure_pchannels(1)
        collection = client.catalog.create_collection("words", WORDS)
        client.new_producer().insert(collection, pa.table({"id": [1, 2], "word": ["a", "b"]}))
        # The streaming node reads the brokers directly.
        with LogConnection(settings).service() as direct:
            ingest_to_end(settings, direct)
        assert client.collection("words").read(deadline=DEADLINE).num_rows == 2
        client.connection.service.shutdown()


def test_a_client_shows_its_certificate_where_the_brokers_ask_for_one(mutual: Tls) -> None:
    trusted = f"ssl.ca.location={mutual.server.certificate}"

    def shown(pem: Pem) -> tuple[str, str]:
        return f"ssl.certificate.location={pem.certificate}", f"ssl.key.location={pem.key}"

    works(mutual.url(trusted, *shown(mutual.client), protocol="SSL"), "p")
    refused(mutual.url(trusted, protocol="SSL"))
    refused(mutual.url(trusted, *shown(mutual.stranger), protocol="SSL"))


@pytest.mark.parametrize(
    "options",
    [
        lambda tls: tls.url("sasl.mechanism=PLAIN", protocol="SASL_SSL"),
        lambda tls: tls.url("sasl.mechanism=PLAIN", f"ssl.ca.location={tls.stranger.certificate}", protocol="SASL_SSL"),
        lambda tls: tls.url("sasl.mechanism=PLAIN", protocol="SASL_PLAINTEXT"),
    ],
    ids=["the host's authorities do not know it", "another authority", "without tls"],
)
def test_a_broker_whose_certificate_is_not_trusted_gets_no_login_and_the_error_comes_in_time(
    logged_in: Tls, options: Callable[[Tls], str]
) -> None:
    said = refused(options(logged_in))
    assert logged_in.broker.credentials is not None
    assert logged_in.broker.credentials.password not in said


def test_a_certificate_of_another_host_is_refused_unless_the_check_is_turned_off(tmp_path: Path) -> None:
    made = broker_in(tmp_path, "SSL", address="192.0.2.1")
    trusted = f"ssl.ca.location={made.server.certificate}"
    with made.broker.start():
        refused(made.url(trusted, protocol="SSL"))
        works(made.url(trusted, "ssl.endpoint.identification.algorithm=none", protocol="SSL"), "p")
