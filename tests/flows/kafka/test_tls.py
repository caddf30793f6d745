"""TLS, SASL and client certificates towards Kafka, TLS and a login towards OpenSearch.

Who is known comes in, who is not is told so.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from confluent_kafka.cimpl import NewTopic
from opensearchpy import OpenSearch

from millrace.base.errors import LogUnavailable, MillraceError, SinkBusy, SinkRefused
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.flows.batch import Batch
from millrace.flows.declare.stream import stream_of
from millrace.flows.range_host import topic_admin
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.registry import sink_of
from millrace.flows.sinks.sink import Verdicts
from millrace.flows.spark_host.frames import sink_of as sink_of_stream
from millrace.pipelines.declaration import pipeline_of
from tests import running_brokers
from tests.certificates import certificate
from tests.flows.faulty import Faulty

pytestmark = pytest.mark.slow

USER, PASSWORD = "ada", "s3cret-of-ada"


def _property(pem: Path) -> str:
    """A PEM file as a line of a .properties file."""
    return pem.read_text().strip().replace("\n", "\\n")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: certificate(folder, name) for name in ("broker", "client", "stranger", "search")}


@pytest.fixture(scope="module")
def kafka(
    tmp_path_factory: pytest.TempPathFactory, certificates: dict[str, tuple[Path, Path]]
) -> Iterator[KafkaBroker]:
    """One that asks for TLS, a certificate that it knows, and a login."""
    chain, key = certificates["broker"]
    known = "\\n".join(_property(certificates[name][0]) for name in ("broker", "client"))
    properties = {
        "listener.security.protocol.map": "CLIENT:SASL_SSL,CONTROLLER:PLAINTEXT",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": _property(chain),
        "ssl.keystore.key": _property(key),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": known,
        "listener.name.client.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "listener.name.client.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
    }
    folder = tmp_path_factory.mktemp("kafka-tls")
    with KafkaBroker(folder, settings=Settings(), sasl=True, properties=properties) as made:
        admin = AdminClient(_client(made, certificates))
        scram = UserScramCredentialUpsertion(
            USER, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), PASSWORD.encode()
        )
        admin.alter_user_scram_credentials([scram])[USER].result(30)
        admin.create_topics([NewTopic("guarded", 1, 1)])["guarded"].result(30)
        yield made


def _client(kafka: KafkaBroker, certificates: dict[str, tuple[Path, Path]]) -> dict[str, Any]:
    login = kafka.credentials
    assert login is not None
    return {
        "bootstrap.servers": kafka.address,
        "security.protocol": "sasl_ssl",
        "sasl.mechanism": "PLAIN",
        "sasl.username": login.username,
        "sasl.password": login.password,
        "ssl.ca.pem": certificates["broker"][0].read_text(),
        "ssl.certificate.pem": certificates["client"][0].read_text(),
        "ssl.key.pem": certificates["client"][1].read_text(),
    }


class Guarded(Faulty):
    """A way to the real OpenSearch that speaks TLS and asks for a login."""

    def __init__(self, address: str, chain: Path, key: Path) -> None:
        super().__init__(address)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        kind = self._server.RequestHandlerClass
        serve = kind._serve  # type: ignore[attr-defined]

        def asks(handler: Any) -> None:
            if handler.headers.get("authorization") == expected:
                return serve(handler)
            handler.rfile.read(int(handler.headers.get("content-length") or 0))
            return handler.answer(
                401, b'{"error": {"type": "security_exception", "reason": "who are you"}, "status": 401}'
            )

        for method in ("GET", "POST", "PUT", "HEAD", "DELETE"):
            setattr(kind, f"do_{method}", asks)

    @property
    def url(self) -> str:
        return super().url.replace("http:", "https:")


@pytest.fixture
def search(certificates: dict[str, tuple[Path, Path]]) -> Iterator[Guarded]:
    made = Guarded(running_brokers.opensearch().address, *certificates["search"])
    yield made
    made.close()


def _declared(
    kafka: KafkaBroker, search: Guarded, certificates: dict[str, tuple[Path, Path]], **security: Any
) -> dict[str, Any]:
    known = {
        "protocol": "SASL_SSL",
        "mechanism": "SCRAM-SHA-512",
        "username": USER,
        "password": PASSWORD,
        "ca": certificates["broker"][0].read_text(),
        "certificate": certificates["client"][0].read_text(),
        "key": certificates["client"][1].read_text(),
        **security,
    }
    source = {
        "kind": "kafka", "bootstrap": [kafka.address], "topics": ["guarded"], "security": known,
        "socket_timeout_ms": 4000,
    }  # fmt: skip
    sink = {
        "kind": "opensearch", "hosts": [search.url], "index_base": "guarded", "create_index": True, "ids": "key",
        "username": USER, "password": PASSWORD, "ca": certificates["search"][0].read_text(),
    }  # fmt: skip
    return {"id": "guarded", "source": source, "sink": sink}


def test_who_is_known_to_both_carries_documents(
    tmp_path: Path, kafka: KafkaBroker, search: Guarded, certificates: dict[str, tuple[Path, Path]]
) -> None:
    producer = Producer(_client(kafka, certificates))
    for number in range(20):
        producer.produce("guarded", json.dumps({"n": number}) if number % 5 else b"{", str(number))
    assert producer.flush(30) == 0
    pipeline = pipeline_of(_declared(kafka, search, certificates))
    reached = run(FlowRun(Settings(data_dir=tmp_path / "data"), pipeline), stop=threading.Event(), until_end=True)
    assert reached == {"guarded-0": 20}
    client = OpenSearch(running_brokers.opensearch().url)
    client.indices.refresh(index="guarded")
    assert client.count(index="guarded")["count"] == 16
    assert PASSWORD not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.json"))


def test_a_stream_s_sink_is_let_in_by_the_security_that_it_declares(
    tmp_path: Path, kafka: KafkaBroker, search: Guarded, certificates: dict[str, tuple[Path, Path]]
) -> None:
    admin = AdminClient(_client(kafka, certificates))  # kept until it is answered
    admin.create_topics([NewTopic("rows", 1, 1)])["rows"].result(30)
    cluster = {
        name: value
        for name, value in _declared(kafka, search, certificates)["source"].items()
        if name in ("bootstrap", "security", "socket_timeout_ms")
    }
    rows = pa.RecordBatch.from_pylist([{"id": number} for number in range(5)])

    def put(cluster: Any) -> Verdicts:
        sink = {"kafka": cluster, "topic": "rows"}
        stream = stream_of({"name": "rows", "source": "flights", "sink": sink, "sql": "select id from flights"})
        opened = sink_of_stream(Settings(data_dir=tmp_path / "data"), stream, tmp_path / "sink")
        try:
            return opened.write(Batch("rows", 0, 1, rows=[rows]))
        finally:
            opened.close()

    assert put(cluster).acknowledged == 5
    with pytest.raises((SinkBusy, SinkRefused)) as refused:
        put({**cluster, "security": cluster["security"] | {"password": "guess"}})
    assert "guess" not in str(refused.value)


@pytest.mark.parametrize("wrong", ["password", "authority", "certificate", "no certificate", "no TLS"])
def test_brokers_let_nobody_else_in_and_nothing_is_told_that_is_secret(
    kafka: KafkaBroker, search: Guarded, certificates: dict[str, tuple[Path, Path]], wrong: str
) -> None:
    others: dict[str, dict[str, Any]] = {
        "password": {"password": "another-secret"},
        "authority": {"ca": certificates["stranger"][0].read_text()},
        "certificate": {
            "certificate": certificates["stranger"][0].read_text(), "key": certificates["stranger"][1].read_text(),
        },
        "no certificate": {"certificate": "", "key": ""},
        "no TLS": {"protocol": "SASL_PLAINTEXT", "ca": "", "certificate": "", "key": ""},
    }  # fmt: skip
    pipeline = pipeline_of(_declared(kafka, search, certificates, **others[wrong]))
    with pytest.raises(MillraceError) as caught:
        topic_admin.look(pipeline.errors_cluster)
    assert isinstance(caught.value, LogUnavailable) or caught.value.code == "INVALID_SETTINGS"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"password": "another-secret"}, SinkRefused),
        ({"ca": ""}, SinkBusy),
        ({"ca": "stranger"}, SinkBusy),
    ],
    ids=["password", "the system's authorities", "another authority"],
)
def test_opensearch_lets_nobody_else_in_and_is_believed_by_its_certificate(
    kafka: KafkaBroker,
    search: Guarded,
    certificates: dict[str, tuple[Path, Path]],
    change: dict[str, Any],
    error: type[MillraceError],
) -> None:
    declared = _declared(kafka, search, certificates)
    declared["sink"] |= change
    if change.get("ca") == "stranger":
        declared["sink"]["ca"] = certificates["stranger"][0].read_text()
    pipeline = pipeline_of(declared)
    sink = sink_of(pipeline.sink, Settings(), flow=pipeline.name, flush=pipeline.flush)
    with pytest.raises(error) as caught:
        sink.open()
    assert "secret" not in str(caught.value)
    sink.close()
