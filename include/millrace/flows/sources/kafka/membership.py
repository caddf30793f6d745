"""A runner's membership in Kafka's consumer group, which divides a source's partitions among all runners of a flow.

The runner itself is the member: its loop polls, without a thread. The member never reads a record; the tasks read their
assigned partitions. ``sessionTimeoutMs`` and ``maxPollIntervalMs`` have their usual meaning: a runner that is dead or
suspended for the one, or whose loop does not poll within the other, loses its partitions. A runner that restarts with
the same `instance` name within the session retains them (static membership).
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from millrace.base.errors import InvalidSettings, LogFenced, LogUnavailable, MillraceError
from millrace.flows.kafka.brokers import admin_settings
from millrace.flows.kafka.cluster import KafkaSecurity
from millrace.flows.sources.division import Division
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.topics import consumer_of, error_of, logger
from millrace.flows.sources.source import task_of

_HEARTBEAT_MS: Final = 3_000
"""Longest time between two heartbeats, Kafka's default. At least three fit in a session."""
_POLL_SECONDS: Final = 0.05
_COMMIT_SECONDS: Final = 10.0


class Membership:
    """One member of a group. One thread at a time."""

    def __init__(self, source: KafkaSource, group: str, *, topics: Sequence[str] = (), instance: str = "") -> None:
        """Join the group.

        `topics` are the present topics of a source with a pattern. `instance` is a name that no other runner has at the
        same time, and that this one has again after a restart.
        """
        self._source, self._group = source, group
        self._held: set[str] = set()
        self._came: set[str] = set()
        self._went: set[str] = set()
        self.joined = False
        """Whether the group has assigned this member its share, which may be empty."""
        chosen: dict[str, str | int] = {
            "partition.assignment.strategy": "cooperative-sticky",
            "heartbeat.interval.ms": max(1, min(_HEARTBEAT_MS, source.session_timeout_ms // 3)),
        }
        if instance:
            chosen["group.instance.id"] = instance
        self._consumer = consumer_of(source, group, **chosen)
        self._topics: list[str] = []
        self._subscribe(source.topics or topics)

    @property
    def session_seconds(self) -> float:
        """Return ``sessionTimeoutMs`` in seconds."""
        return self._source.session_timeout_ms / 1000

    def follow(self, lanes: Iterable[tuple[str, int]]) -> None:
        """Share the topics of these partitions from now on. Raises LogUnavailable, InvalidSettings."""
        self._subscribe({topic for topic, _ in lanes})

    def _subscribe(self, topics: Iterable[str]) -> None:
        if (wanted := sorted(topics)) == self._topics:
            return
        try:
            self._consumer.subscribe(wanted, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)
        except KafkaException as error:
            raise error_of(error.args[0], f"consumer group {self._group}") from None
        self._topics = wanted

    def poll(self) -> Division:
        """Stay in the group, and return the changes since the last poll.

        Call it at least every ``maxPollIntervalMs``. Raises LogFenced if another runner has this one's instance name.
        """
        self._serve()
        found = Division(frozenset(self._held), frozenset(self._came & self._held), frozenset(self._went))
        self._came.clear()
        self._went.clear()
        return found

    def wait_joined(self, seconds: float) -> None:
        """Wait until the group has assigned this member its share. Raises LogUnavailable if that takes longer."""
        end = time.monotonic() + seconds
        while not self.joined:
            if time.monotonic() > end:
                raise LogUnavailable(f"consumer group {self._group}: no assignment within {seconds:.0f} s")
            self._serve()

    def _serve(self) -> None:
        message = self._consumer.poll(0.0 if self.joined else _POLL_SECONDS)
        error = None if message is None else message.error()
        if error is None:
            return
        if error.fatal():
            raise LogFenced(f"consumer group {self._group}: {error.str()}: another worker has this one's name")
        if error.code() in (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED):
            raise InvalidSettings(f"consumer group {self._group}: the brokers refuse it: {error.str()}")

    def commit(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Commit (topic, partition, offset) of held partitions, for other tools. Errors are ignored."""
        places = [
            TopicPartition(topic, partition, offset)
            for topic, partition, offset in offsets
            if task_of(topic, partition) in self._held
        ]
        if places:
            try:
                self._consumer.commit(offsets=places, asynchronous=True)
            except KafkaException as error:
                logger.warning("the consumer group's offsets were not updated: %s", error)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._consumer.close()

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self.joined = True
        if places:
            consumer.incremental_assign(places)
            consumer.pause(places)  # the tasks read; if the member read, too, it would fetch everything twice
        for each in places:
            task = task_of(each.topic, each.partition)
            self._held.add(task)
            self._came.add(task)

    def _revoked(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        if places:
            consumer.incremental_unassign(places)
        for each in places:
            task = task_of(each.topic, each.partition)
            self._held.discard(task)
            self._went.add(task)


def leave(source: KafkaSource, group: str, instances: Sequence[str]) -> None:
    """Remove runners with these names from the group; others get their partitions at once.

    librdkafka leaves a static member in its group until its session ends, and has no call for this, so kafka-python
    does it. Errors are logged, since the session ends anyway.
    """
    from kafka.admin import KafkaAdminClient, MemberToRemove
    from kafka.errors import KafkaError as WireError

    try:
        admin_settings(source)  # checks the addresses
        admin = KafkaAdminClient(**_wire_settings(source))
        try:
            admin.remove_group_members(group, [MemberToRemove(group_instance_id=each) for each in instances])
        finally:
            admin.close()
    except (MillraceError, WireError, OSError) as error:
        logger.warning("consumer group %s: its members leave when their session ends: %s", group, error)


def _wire_settings(source: KafkaSource) -> dict[str, Any]:
    """Return the settings of kafka-python's clients."""
    security = source.security
    found: dict[str, Any] = {
        "bootstrap_servers": list(source.bootstrap),
        "security_protocol": security.protocol,
        "request_timeout_ms": max(source.socket_timeout_ms, 1_000),
        "bootstrap_timeout_ms": max(source.socket_timeout_ms, 1_000),
    }
    if security.mechanism:
        found |= {
            "sasl_mechanism": security.mechanism,
            "sasl_plain_username": security.username,
            "sasl_plain_password": security.password.get_secret_value(),
        }
    if security.protocol.endswith("SSL"):
        found["ssl_context"] = _tls(security)
    return found


def _tls(security: KafkaSecurity) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=security.ca or None)
    if security.certificate:
        with TemporaryDirectory() as folder:  # readable by this user only; ssl accepts only files
            path = Path(folder) / "client.pem"
            path.write_text(f"{security.key.get_secret_value()}\n{security.certificate}\n")
            context.load_cert_chain(path)
    return context


def members(source: KafkaSource, group: str, *, seconds: float = _COMMIT_SECONDS) -> Mapping[str, str]:
    """Return the hosts of the group's members, by member id. Raises LogUnavailable, InvalidSettings."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient(dict(admin_settings(source)), logger=logger)
    try:
        description = admin.describe_consumer_groups([group], request_timeout=seconds)[group].result(
            timeout=2 * seconds
        )
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
            return {}
        raise error_of(error.args[0], f"consumer group {group}") from None
    except TimeoutError:
        raise LogUnavailable(f"consumer group {group}: the brokers did not answer within {seconds:.0f} s") from None
    return {each.member_id: str(each.host) for each in description.members}
