"""Topic metadata for hosts that only append or read, through the client that they have open anyway.

Every process that opens a log needs these calls. Importing kafka-python (:mod:`millrace.log.kafka.admin`) would cost
each of them a third of a second of CPU.
"""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined] # exported, but not by name

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import ChannelNotFound, InvalidSettings, LogUnavailable
from millrace.log.kafka.reader import NOT_FOUND_CODES, REFUSED_CODES
from millrace.log.kafka.settings import KafkaPartition, KafkaSettings

_PAUSE: Final = 0.05
_ONE_ANSWER: Final = 5.0
"""Timeout of one request in seconds, within the deadline."""


def partition_counts(settings: KafkaSettings, consumer: Consumer, topic: str | None = None) -> dict[str, int]:
    """Return the number of partitions of every topic, or of one topic (empty if it does not exist).

    Raises LogUnavailable, InvalidSettings.
    """
    deadline = Deadline.after(settings.deadline)
    while True:
        error: KafkaError | None = None
        try:
            # A request for one topic may report that it does not exist; a request for all omits it.
            asked = {} if topic is None else {"topic": topic}
            found = consumer.list_topics(timeout=_remaining(deadline), **asked)
            each = None if topic is None else found.topics.get(topic)
            if each is not None and each.error is not None:
                error = each.error
                if error.code() in NOT_FOUND_CODES and found.brokers:
                    return {}
            elif found.brokers:  # a broker that just started may know neither others nor topics
                return {name: len(topic_.partitions) for name, topic_ in found.topics.items() if topic_.error is None}
        except KafkaException as raised:
            error = raised.args[0]
        _pause(settings, "listing topics", error, deadline)


def read_topic_configs(settings: KafkaSettings, consumer: Consumer, place: KafkaPartition) -> dict[str, str]:
    """Return the settings of a partition's topic.

    Raises ChannelNotFound, InvalidSettings if its number of partitions is not as configured.
    """
    found = partition_counts(settings, consumer, place.topic).get(place.topic, 0)
    if found == 0 or (settings.is_shared(place) and found <= place.partition):
        raise ChannelNotFound(f"there is no {place}: create its channel first")
    if found != 1 and not settings.is_shared(place):
        raise InvalidSettings(
            f"topic {place.topic} has {found} partitions: a log has one (for PChannels that share a topic, see"
            " kafka.partitions)"
        )
    deadline = Deadline.after(settings.deadline)
    client = AdminClient(settings.rdkafka())
    resource = ConfigResource(ConfigResource.Type.TOPIC, place.topic)
    while True:
        error: KafkaError | None = None
        try:
            seconds = _remaining(deadline)
            asked = client.describe_configs([resource], request_timeout=seconds)[resource]
            answered: dict[str, Any] = asked.result(timeout=seconds)
            return {name: str(entry.value) for name, entry in answered.items()}
        except KafkaException as raised:
            error = raised.args[0]
            if error.code() in NOT_FOUND_CODES:
                raise ChannelNotFound(f"there is no {place}: create its channel first") from raised
        except FutureTimeout:
            pass
        _pause(settings, f"looking at topic {place.topic}", error, deadline)


def _remaining(deadline: Deadline) -> float:
    return deadline.remaining(minimum=0.1, maximum=_ONE_ANSWER)


def _pause(settings: KafkaSettings, what: str, error: KafkaError | None, deadline: Deadline) -> None:
    """Wait before the next attempt.

    Raises InvalidSettings if a retry is useless, LogUnavailable at the deadline.
    """
    words = "no answer" if error is None else error.str()
    if error is not None and error.code() in REFUSED_CODES:
        raise InvalidSettings(f"{what}: the brokers at {settings.brokers} refuse it: {words}")
    if deadline.remaining() <= _PAUSE:
        raise LogUnavailable(
            f"{what} did not finish within {settings.deadline:.0f} s: are the brokers at {settings.brokers} up?"
            f" ({words})"
        )
    deadline.pause(jittered(_PAUSE))
