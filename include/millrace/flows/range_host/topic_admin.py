"""Topics looked for, made and taken away; and which cluster they are in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millrace.base.errors import InvalidSettings, LogUnavailable, MillraceError
from millrace.flows.declare.flow import Flow
from millrace.flows.kafka.brokers import admin_settings, looked_at
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.sinks.kafka.model import KafkaSink
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.topics import error_of, logger

SECONDS: Final = 15.0
_HEALTH_SECONDS: Final = 2.0
_HEALTH_EVERY: Final = 10.0


class Found(NamedTuple):
    """What a cluster has."""

    cluster: str
    """Its id, which stays when brokers come and go."""
    topics: frozenset[str]


def look(cluster: KafkaCluster, *, seconds: float = SECONDS) -> Found:
    """Raises LogUnavailable, InvalidSettings (the brokers refuse the login, or are where no flow may reach)."""
    try:
        known = looked_at(_admin(cluster).list_topics(timeout=seconds))
    except KafkaException as error:
        raise error_of(error.args[0], f"Kafka at {', '.join(cluster.bootstrap)}") from None
    return Found(str(known.cluster_id), frozenset(known.topics))


def require_no_loop(flow: Flow) -> None:
    """Raise InvalidSettings if a flow reads what it writes.

    That is: its error or output topic is one of its source's, in the same cluster under whatever name. Raises as
    :func:`look`.
    """
    source = flow.source
    if not isinstance(source, KafkaSource):
        return
    written: list[tuple[str, KafkaCluster, str]] = []
    if flow.errors.collection is None:
        written.append(("errors.topic", flow.errors_cluster, flow.errors_topic))
    if isinstance(flow.sink, KafkaSink):
        written.append(("sink.topic", flow.sink, flow.sink.topic))
    for field, cluster, topic in written:
        if source.reads(topic) and look(cluster).cluster == look(source).cluster:
            raise InvalidSettings(
                f"{field}: {topic} at {', '.join(cluster.bootstrap)} is also the source's topic: the output would be"
                " read again"
            )


class BrokersLook:
    """Whether brokers answer, checked at most every few seconds: frequent queries cost them nothing. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at, self._said = 0.0, ""

    def look(self, cluster: KafkaCluster) -> str:
        """``ok``, or the error's code."""
        with self._lock:
            if not self._said or time.monotonic() - self._at > _HEALTH_EVERY:
                try:
                    look(cluster, seconds=_HEALTH_SECONDS)
                    self._said = "ok"
                except MillraceError as error:
                    self._said = error.code
                self._at = time.monotonic()
            return self._said


def make(cluster: KafkaCluster, topics: Iterable[str], *, settings: Mapping[str, str] | None = None) -> None:
    """Create topics of one partition, with the brokers' default of replicas; existing ones stay.

    `settings` are omitted if the brokers do not allow them. Raises as :func:`look`.
    """
    config = dict(settings or {})
    admin = _admin(cluster)
    for topic in topics:
        code = _made(admin, NewTopic(topic, num_partitions=1, config=config))
        if code == KafkaError.POLICY_VIOLATION and config:
            _made(admin, NewTopic(topic, num_partitions=1))


def _made(admin: AdminClient, topic: NewTopic) -> int:
    done = admin.create_topics([topic], operation_timeout=SECONDS)[topic.topic]
    return _settled(topic.topic, done, allowed=(KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.POLICY_VIOLATION))


def delete(cluster: KafkaCluster, topics: Iterable[str]) -> None:
    """Take them away; no effect where there is none. Raises as :func:`look`."""
    names = list(topics)
    if names:
        admin = _admin(cluster)  # kept until all is answered: what it was asked ends with it
        for topic, done in admin.delete_topics(names, operation_timeout=SECONDS).items():
            _settled(topic, done, allowed=(KafkaError.UNKNOWN_TOPIC_OR_PART,))


def _settled(topic: str, done: Any, *, allowed: tuple[int, ...]) -> int:
    """The code of an allowed error; 0: it was done."""
    try:
        done.result(timeout=2 * SECONDS)
    except KafkaException as error:
        code = int(error.args[0].code())
        if code in allowed:
            return code
        raise error_of(error.args[0], f"topic {topic}") from None
    except TimeoutError:
        raise LogUnavailable(f"topic {topic}: Kafka gave no answer in {2 * SECONDS:.0f} s") from None
    return 0


def _admin(cluster: KafkaCluster) -> AdminClient:
    return AdminClient(dict(admin_settings(cluster)), logger=logger)
