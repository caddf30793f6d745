"""Administration of a deployment's topics and consumer groups on Kafka, through kafka-python's client.

It uses one connection, opened on first use, and runs one call at a time. Transient failures are retried until the
deadline. Every failure is raised as one of Millrace's errors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import kafka.errors as errors
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.protocol.consumer import FetchRequest
from kafka.record import MemoryRecords
from kafka.structs import OffsetAndMetadata

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    ChannelExists,
    ChannelNotFound,
    InvalidArgument,
    InvalidSettings,
    LogCorrupted,
    LogUnavailable,
    MillraceError,
)
from millrace.log.kafka.markers import OffsetOutOfRange
from millrace.log.kafka.settings import KafkaPartition, KafkaSettings

# Failures are raised with their reason; the client would also log every attempt.
logging.getLogger("kafka").setLevel(logging.CRITICAL)

_PAUSE: Final = 0.05
_LOOK_BYTES: Final = 1 << 20
"""Bytes fetched from a partition to inspect its batches."""
_FETCH_VERSION: Final = 12
"""Newest protocol version that addresses topics by name."""
_T = TypeVar("_T")

_REFUSED: Final = (
    errors.SaslAuthenticationFailedError,
    errors.UnsupportedSaslMechanismError,
    errors.TopicAuthorizationFailedError,
    errors.ClusterAuthorizationFailedError,
    errors.GroupAuthorizationFailedError,
)


class BatchInfo(NamedTuple):
    """A batch of a partition, as the broker stores it."""

    first: int
    last: int
    """First and last offset, both inclusive; some in between may be missing after compaction."""
    control: bool
    """Whether it is the broker's own record of how a transaction ended."""


class KafkaAdmin:
    """Broker calls of a log service other than appends and reads. Thread-safe."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._client: KafkaAdminClient | None = None
        self._closed = False

    def create(self, topic: str, partitions: int = 1) -> None:
        """Create a topic.

        Raises ChannelExists.
        """
        wanted = {
            topic: {
                "num_partitions": partitions,
                "replication_factor": self._settings.replication_factor,
                "configs": self._settings.topic_configs(),
            }
        }

        def call(client: KafkaAdminClient, milliseconds: int) -> None:
            client.create_topics(wanted, timeout_ms=milliseconds)

        try:
            self._call(f"making topic {topic}", call)
        except errors.TopicAlreadyExistsError:
            raise ChannelExists(f"topic {topic} exists already") from None
        self._call(f"waiting for topic {topic}", lambda client, ms: client.wait_for_topics([topic], timeout_ms=ms))

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Increase a topic's partitions to `partitions`.

        Raises ChannelExists if it has that many already.
        """

        def call(client: KafkaAdminClient, milliseconds: int) -> None:
            client.create_partitions({topic: partitions}, timeout_ms=milliseconds)

        def wait(client: KafkaAdminClient, _: int) -> None:
            if sum(each["leader_id"] >= 0 for each in _partitions(client, topic)) < partitions:
                raise errors.LeaderNotAvailableError

        try:
            self._call(f"adding partitions to topic {topic}", call)
        except errors.InvalidPartitionsError:
            raise ChannelExists(f"topic {topic} has {partitions} partitions already") from None
        self._call(f"waiting for the partitions of topic {topic}", wait)

    def delete(self, topic: str) -> None:
        """Delete a topic with all its records.

        Raises ChannelNotFound.
        """
        try:
            self._call(f"deleting topic {topic}", lambda client, ms: client.delete_topics([topic], timeout_ms=ms))
        except errors.UnknownTopicOrPartitionError:
            raise ChannelNotFound(f"topic {topic} does not exist: create its channel first") from None

    def delete_records(self, place: KafkaPartition, offset: int) -> None:
        """Delete the records before `offset`.

        Raises InvalidArgument beyond the end.
        """

        def call(client: KafkaAdminClient, milliseconds: int) -> None:
            client.delete_records({TopicPartition(*place): offset}, timeout_ms=milliseconds)

        try:
            self._call(f"truncating {place}", call)
        except errors.OffsetOutOfRangeError:
            raise InvalidArgument(f"offset {offset} lies beyond the end of {place}") from None

    def partition_size(self, place: KafkaPartition) -> int:
        """Return the bytes of a partition on the disk of its largest replica."""

        def call(client: KafkaAdminClient, _: int) -> int:
            sizes = [
                partition["partition_size"]
                for broker in client.describe_log_dirs({place.topic: [place.partition]})
                for directory in broker["log_dirs"]
                for each in directory["topics"]
                if each["name"] == place.topic
                for partition in each["partitions"]
                if partition["partition_index"] == place.partition
            ]
            return max(sizes, default=0)

        return self._call(f"measuring {place}", call)

    def batches(self, place: KafkaPartition, offset: int) -> list[BatchInfo]:
        """Return the batches from the one with `offset` on, about a megabyte of them; an empty list at the end.

        Raises OffsetOutOfRange, LogCorrupted if a control batch fails its checksum.
        """

        async def fetch(client: KafkaAdminClient) -> list[BatchInfo]:
            partition = TopicPartition(*place)
            (leader,) = await client._async_get_leader_for_partitions({partition})
            topic = FetchRequest.FetchTopic
            wanted = topic.FetchPartition(
                partition=place.partition, fetch_offset=offset, partition_max_bytes=_LOOK_BYTES
            )
            request = FetchRequest(
                max_wait_ms=0, min_bytes=0, max_bytes=_LOOK_BYTES, isolation_level=0, session_id=0, session_epoch=-1,
                topics=[topic(topic=place.topic, partitions=[wanted])], forgotten_topics_data=[], rack_id="",
                max_version=_FETCH_VERSION,
            )  # fmt: skip
            response = await client._manager.send(request, node_id=leader)
            (found,) = response.responses[0].partitions
            error = errors.for_code(found.error_code)
            if error is not errors.NoError:
                raise error
            return [_batch(each, place) for each in MemoryRecords(found.records or b"")]

        try:
            return self._call(f"looking at {place}", lambda client, _: client._manager.run(fetch, client))
        except errors.OffsetOutOfRangeError:
            raise OffsetOutOfRange from None

    def groups(self) -> list[str]:
        """Return all consumer groups of the brokers."""
        listed: list[dict[str, Any]] = self._call("listing consumer groups", lambda client, _: client.list_groups())
        return [str(each["group_id"]) for each in listed]

    def committed_offset(self, group: str, place: KafkaPartition) -> int | None:
        """Return a group's committed offset in a partition."""
        partition = TopicPartition(*place)
        found = self._call(
            f"asking for consumer group {group}", lambda client, _: client.list_group_offsets({group: [partition]})
        )
        position = found.get(group, {}).get(partition)
        return None if position is None or position.offset < 0 else int(position.offset)

    def commit_offset(self, group: str, place: KafkaPartition, offset: int) -> None:
        """Commit a group's offset in a partition.

        Raises ChannelNotFound.
        """
        position = {TopicPartition(*place): OffsetAndMetadata(offset, "", -1)}

        def call(client: KafkaAdminClient, _: int) -> None:
            for error in client.alter_group_offsets(group, position).values():
                if error is not errors.NoError:
                    raise error

        try:
            self._call(f"moving consumer group {group}", call)
        except errors.UnknownTopicOrPartitionError:
            raise ChannelNotFound(f"there is no {place}: create its channel first") from None

    def delete_group(self, group: str, place: KafkaPartition | None = None) -> None:
        """Delete a group, or its offset in one partition. No effect if it does not exist."""

        def call(client: KafkaAdminClient, _: int) -> None:
            if place is not None:
                client.delete_group_offsets(group, [TopicPartition(*place)])
                return
            result = client.delete_groups([group])[group]
            if result != "OK":
                raise getattr(errors, result, errors.UnknownError)

        try:
            self._call(f"deleting consumer group {group}", call)
        except errors.GroupIdNotFoundError:
            pass

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop()

    def _call(self, what: str, call: Callable[[KafkaAdminClient, int], _T]) -> _T:
        """Run `call(client, milliseconds left)` and retry transient failures.

        Raises kafka-python's other errors.
        """
        deadline = Deadline.after(self._settings.deadline)
        while True:
            left = deadline.remaining()
            if not self._lock.acquire(timeout=left):
                raise LogUnavailable(f"{what} did not finish within {self._settings.deadline:.0f} s: Kafka is busy")
            try:
                if self._closed:
                    raise LogUnavailable("this log service is closed: open it again")
                return call(self._connected(max(0.1, left)), max(100, int(left * 1000)))
            except MillraceError:
                raise
            except _REFUSED as error:
                self._drop()
                raise InvalidSettings(f"{what}: the brokers at {self._settings.brokers} refuse it: {error}") from error
            except (errors.KafkaError, OSError, TimeoutError) as error:
                if isinstance(error, errors.KafkaError) and not _passes(error):
                    raise
                self._drop()  # a failed connection may be half open: use a new one
                if deadline.remaining() <= _PAUSE:
                    raise LogUnavailable(
                        f"{what} did not finish within {self._settings.deadline:.0f} s, its effect is unknown: are"
                        " the brokers"
                        f" at {self._settings.brokers} up? ({type(error).__name__}: {error})"
                    ) from error
            finally:
                self._lock.release()
            deadline.pause(jittered(_PAUSE))

    def _connected(self, seconds: float) -> KafkaAdminClient:
        if self._client is None:
            milliseconds = int(min(seconds, self._settings.deadline) * 1000)
            self._client = KafkaAdminClient(
                **self._settings.kafka_python(),
                bootstrap_timeout_ms=milliseconds,
                request_timeout_ms=max(1000, milliseconds),
                reconnect_backoff_max_ms=1000,
            )
        return self._client

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            try:
                client.close()
            except Exception:  # the client is discarded in any case
                return


def _partitions(client: KafkaAdminClient, topic: str) -> list[dict[str, Any]]:
    """Return the brokers' description of a topic's partitions.

    Raises the brokers' error.
    """
    described = client.describe_topics([topic])[0]
    error = errors.for_code(described["error_code"])
    if error is not errors.NoError:
        raise error
    partitions: list[dict[str, Any]] = described["partitions"]
    return partitions


def _batch(found: Any, place: KafkaPartition) -> BatchInfo:
    control = found.magic >= 2 and found.is_control_batch
    if control and not found.validate_crc():
        raise LogCorrupted(f"the control batch at {found.base_offset} of {place} fails its checksum")
    last = found.last_offset if found.magic >= 2 else found.base_offset
    return BatchInfo(found.base_offset, last, control)


def _passes(error: errors.KafkaError) -> bool:
    """Return whether a failure is transient: of the connection, or of brokers that move."""
    if isinstance(error, errors.UnknownTopicOrPartitionError):
        return False  # kafka-python would wait until the topic exists
    return bool(getattr(error, "retriable", False))
