"""pipeline-config.yaml as the reference document writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings, PipelineInvalid
from millrace.flows.declare.configuration import Configuration
from millrace.pipelines.declaration import pipeline_of

WRITTEN = """\
server:
  httpPort: 13012            # the port
  flushMiB: 5
  flushItems: 10000
  flushIntervalSec: 3
  failureThreshold: 10
  watchWorkersIntervalMin: 5

kafka:
  sessionTimeoutMs: 45000
  socketTimeoutMs: 60000
  maxPollIntervalMs: 300000
  autoOffsetReset: earliest

mq:
  mqHost: kafka-headless.resource.svc.cluster.local.
  mqPort: 9097
  username: anyrobot
  password: xxxxxx

log:
  logLevel: info
  developMode: false
  maxAge: 100
  maxBackups: 20
  maxSize: 100
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "pipeline-config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_the_document_writes_are_the_defaults(tmp_path: Path) -> None:
    read = Configuration.load(_file(tmp_path, WRITTEN))
    plain = Configuration()
    assert (read.server, read.kafka, read.log) == (plain.server, plain.kafka, plain.log)
    assert Configuration.load(_file(tmp_path, "")) == plain
    assert "xxxxxx" not in repr(read)


def test_a_pipeline_that_names_no_brokers_gets_those_of_mq(tmp_path: Path) -> None:
    text = WRITTEN.replace("flushItems: 10000", "flushItems: 7").replace("earliest", "latest")
    read = Configuration.load(_file(tmp_path, text))
    sink = {"kind": "opensearch", "hosts": ["http://h:9200"], "index_base": "f"}
    made = pipeline_of(read.with_defaults({"id": "f", "source": {"kind": "kafka", "topics": ["f"]}, "sink": sink}))
    source = made.source
    assert source.kind == "kafka"
    assert source.bootstrap == ("kafka-headless.resource.svc.cluster.local.:9097",)
    assert source.security.client_settings() == {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "anyrobot",
        "sasl.password": "xxxxxx",
    }
    assert (made.flush.items, source.offset_reset) == (7, "latest")
    own = {"kind": "kafka", "topics": ["f"], "bootstrap": ["b:1"], "offset_reset": "error"}
    made = pipeline_of(read.with_defaults({"id": "f", "source": own, "sink": sink, "flush": {"items": 9}}))
    assert made.source.kind == "kafka"
    assert (made.source.bootstrap, made.source.offset_reset, made.flush.items) == (("b:1",), "error", 9)


def test_the_error_topic_of_a_collection_s_pipeline_is_on_mq_s_brokers_where_it_names_none(tmp_path: Path) -> None:
    read = Configuration.load(_file(tmp_path, WRITTEN.replace("socketTimeoutMs: 60000", "socketTimeoutMs: 700")))
    declared = {
        "id": "f",
        "source": {"kind": "collection", "collection": "c"},
        "sink": {"kind": "collection", "collection": "d"},
    }
    for given in ({}, {"errors": {"topic": "e"}}, {"errors": {"cluster": {}}}):
        made = pipeline_of(read.with_defaults({**declared, **given}))
        assert made.errors_cluster.bootstrap == ("kafka-headless.resource.svc.cluster.local.:9097",)
        assert (made.errors_cluster.security.username, made.errors_cluster.socket_timeout_ms) == ("anyrobot", 700)
    own = {**declared, "errors": {"cluster": {"bootstrap": ["b:1"]}}}
    assert pipeline_of(read.with_defaults(own)).errors_cluster.bootstrap == ("b:1",)
    own = {**own, "source": {"kind": "kafka", "topics": ["t"]}}
    assert pipeline_of(read.with_defaults(own)).errors_cluster.socket_timeout_ms == 700
    assert pipeline_of(read.with_defaults({**own, "errors": None})).errors_cluster.bootstrap[0].startswith("kafka-")
    with pytest.raises(PipelineInvalid, match="errors"):
        pipeline_of(read.with_defaults({**declared, "errors": 7}))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("server: {httpPort: 70000}", "server.httpPort"),
        ("server: {flushMib: 5}", "server.flushMib"),
        ("kafka: {autoOffsetReset: never}", "kafka.autoOffsetReset"),
        ("- a", "the file"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML"),
        ("[" * 1200, "not YAML"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InvalidSettings, match=told):
        Configuration.load(_file(tmp_path, text))


def test_a_password_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pipeline-config.yaml"
    file.write_text("mq: {mqHost: k, username: u, password: '${env:MQ_PASSWORD}'}\n")
    monkeypatch.setenv("MQ_PASSWORD", "hunter2")
    assert Configuration.load(file).mq.password.get_secret_value() == "hunter2"
    monkeypatch.delenv("MQ_PASSWORD")
    with pytest.raises(InvalidSettings, match="the environment has no MQ_PASSWORD"):
        Configuration.load(file)
