"""Find, create and delete topics, and identify their cluster."""

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
from millrace.flows.kafka.brokers import admin_settings, checked_metadata
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.sinks.kafka.model import KafkaSink
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.topics import error_of, logger

SECONDS: Final = 15.0
_HEALTH_SECONDS: Final = 2.0
_HEALTH_EVERY: Final = 10.0


class Found(NamedTuple):
    """The id and topics of a cluster."""

    cluster: str
    """Its id, which does not change with its brokers."""
    topics: frozenset[str]


def look(cluster: KafkaCluster, *, seconds: float = SECONDS) -> Found:
    """Ask the brokers for id and topics. Raises LogUnavailable, InvalidSettings (login refused, forbidden address)."""
    try:
        known = checked_metadata(_admin(cluster).list_topics(timeout=seconds))
    except KafkaException as error:
        raise error_of(error.args[0], f"Kafka at {', '.join(cluster.bootstrap)}") from None
    return Found(str(known.cluster_id), frozenset(known.topics))


def require_no_loop(flow: Flow) -> None:
    """Raise InvalidSettings if a flow reads its own output.

    That is the case if its error or output topic is a topic of its source, in the same cluster under any address.
    Raises as :func:`look`.
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
    """A check whether brokers answer, cached for a few seconds so that frequent queries cost nothing. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at, self._said = 0.0, ""

    def look(self, cluster: KafkaCluster) -> str:
        """Return ``ok`` or the error's code."""
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
    """Delete topics; missing ones are ignored. Raises as :func:`look`."""
    names = list(topics)
    if names:
        admin = _admin(cluster)  # keep a reference until all is answered: closing it cancels its requests
        for topic, done in admin.delete_topics(names, operation_timeout=SECONDS).items():
            _settled(topic, done, allowed=(KafkaError.UNKNOWN_TOPIC_OR_PART,))


def _settled(topic: str, done: Any, *, allowed: tuple[int, ...]) -> int:
    """Wait for the result; return 0, or the code of an error in `allowed`. Raises others, and LogUnavailable."""
    try:
        done.result(timeout=2 * SECONDS)
    except KafkaException as error:
        code = int(error.args[0].code())
        if code in allowed:
            return code
        raise error_of(error.args[0], f"topic {topic}") from None
    except TimeoutError:
        raise LogUnavailable(f"topic {topic}: Kafka did not answer within {2 * SECONDS:.0f} s") from None
    return 0


def _admin(cluster: KafkaCluster) -> AdminClient:
    return AdminClient(dict(admin_settings(cluster)), logger=logger)
