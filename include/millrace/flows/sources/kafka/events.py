"""A Kafka source of the format debezium: its declaration as rules for the decoder of events."""

from __future__ import annotations

from typing import Any

from millrace.flows.debezium.events import Rules, Schemas
from millrace.flows.debezium.model import FORMAT
from millrace.flows.sources.kafka.model import KafkaSource


def event_rules_of(source: Any) -> Rules | None:
    """Return the rules for the events of `source`; None if its values are documents."""
    if not isinstance(source, KafkaSource) or source.format != FORMAT:
        return None
    declared = source.debezium
    return Rules(
        unwrapped=declared.unwrapped,
        key=declared.key,
        types=tuple(declared.types.items()),
        truncates=declared.truncates,
        versions=declared.version == "position",
        repeats=declared.repeats,
    )


def registry_of(source: Any) -> Schemas | None:
    """Return the registry of `source`; None if it has none. Raises InvalidSettings if fastavro is not installed."""
    if not isinstance(source, KafkaSource) or source.format != FORMAT or source.debezium.registry is None:
        return None
    from millrace.flows.debezium.registry import SchemaRegistry

    return SchemaRegistry(source.debezium.registry)
