"""A name of a broker that leads where no pipeline may reach.

No client is made, and what brokers tell is looked at, too.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
from confluent_kafka.admin import BrokerMetadata, ClusterMetadata

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.flows.errors.topic import ErrorTopic
from millrace.flows.kafka.brokers import checked_metadata
from millrace.flows.range_host import topic_admin
from millrace.flows.sinks.kafka.model import KafkaSink
from millrace.flows.sinks.kafka.sink import made
from millrace.flows.sources.kafka.topics import Reader, Topics
from millrace.pipelines.declaration import pipeline_of

THERE: dict[str, Any] = {"kind": "kafka", "bootstrap": ["rebound.test:9092"], "topics": ["in"]}


@pytest.fixture(autouse=True)
def rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    """``rebound.test`` leads to where a cloud hands out keys."""

    def resolved(host: str, *_: Any, **__: Any) -> list[Any]:
        address = "169.254.169.254" if host == "rebound.test" else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def test_no_client_is_made_for_brokers_whose_name_leads_elsewhere_by_now() -> None:
    sink = {"kind": "kafka", "bootstrap": THERE["bootstrap"], "topic": "out"}
    pipeline = pipeline_of({"id": "x", "source": THERE, "sink": sink})
    source = pipeline.source
    assert source.kind == "kafka"
    assert isinstance(pipeline.sink, KafkaSink)
    for connect in (
        lambda: Topics(source, "g").partitions(),
        lambda: Reader(source, "g", "in", 0),
        lambda: topic_admin.look(source),
        lambda: topic_admin.make(source, ["in"]),
        lambda: topic_admin.delete(source, ["in"]),
        lambda: ErrorTopic(pipeline),
        lambda: made(pipeline.sink, Settings(), flow="x", flush=pipeline.flush),
    ):
        with pytest.raises(InvalidSettings, match=r"rebound\.test: a broker at a forbidden address"):
            connect()


def test_brokers_that_name_such_a_one_are_refused() -> None:
    def named(*hosts: str) -> ClusterMetadata:
        told = ClusterMetadata()
        for place, host in enumerate(hosts):
            told.brokers[place] = BrokerMetadata()
            told.brokers[place].host = host
        return told

    assert checked_metadata(told := named("broker.test", "127.0.0.1")) is told
    with pytest.raises(InvalidSettings, match=r"rebound\.test"):
        checked_metadata(named("broker.test", "rebound.test"))
