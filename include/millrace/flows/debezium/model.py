"""The declarations of Debezium's events: for a Kafka source that reads them, and for a Kafka sink that writes them."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, StringConstraints, field_validator, model_validator

from millrace.flows.debezium.types import declared_converter
from millrace.flows.declare.addresses import check_address
from millrace.flows.declare.part import Part, Secret, check_certificates, words

FORMAT: Final = "debezium"


def _url(text: str) -> str:
    check_address(text.partition("://")[2].partition("/")[0])
    return text


def _certificates(text: str) -> str:
    check_certificates(text)
    return text


ColumnName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=255)]


class Registry(Part):
    """A schema registry, for records in Avro."""

    url: Annotated[
        str, StringConstraints(pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$", max_length=500), AfterValidator(_url)
    ] = words("a URL with Confluent's API; for Apicurio: http://host:8080/apis/ccompat/v7")
    user: str = words("of basic authentication", default="", max_length=256)
    password: Secret = words("of the user; write-only", default=Secret(""))
    ca: Annotated[str, AfterValidator(_certificates)] = words(
        "CA certificates (PEM) for the registry; empty: the system's", default="", max_length=1 << 18
    )


class Debezium(Part):
    """The decoding of Debezium's events in a topic."""

    unwrapped: bool = words(
        "whether the connector unwraps its events (ExtractNewRecordState): a value is the row", default=False
    )
    key: tuple[ColumnName, ...] = words(
        "columns of the key, if the records' keys do not have it", default=(), max_length=32
    )
    types: dict[ColumnName, str] = words(
        'the types of columns of records without a schema: Date, MicroTimestamp, "Decimal(2)", bytes, ...',
        default_factory=dict,
        max_length=1000,
    )
    truncates: Literal["error", "ignore", "apply"] = words(
        "how a truncation of the table is handled: an error, nothing, or the removal of all"
        " rows, which needs a topic of one"
        " partition",
        default="error",
    )
    version: Literal["offset", "position"] = words(
        "what orders the changes of a row in an index: offsets of the topic, or positions in the database's log (lsn,"
        " file and pos), which hold until a failover",
        default="offset",
    )
    repeats: int = words(
        "events of a connector that are remembered, to leave out those that it sends again after a restart; 0: none",
        default=65_536,
        ge=0,
        le=1 << 20,
    )
    registry: Registry | None = words("the registry of Avro schemas", default=None)

    @field_validator("types")
    @classmethod
    def _known(cls, types: dict[str, str]) -> dict[str, str]:
        for kind in types.values():
            declared_converter(kind)
        return types

    @model_validator(mode="after")
    def _fits(self) -> Debezium:
        if len(set(self.key)) < len(self.key):
            raise ValueError("key: each column once")
        if self.unwrapped and self.version == "position":
            raise ValueError("version: an unwrapped event has no position of the database: use offset")
        return self


class DebeziumEvents(Part):
    """The encoding of events in a topic."""

    collection: str = words(
        "the collection whose key and columns the events have; empty: the source's", default="", max_length=255
    )
    schemas: bool = words("whether each key and value has its schema, as with schemas.enable", default=False)
    tombstones: bool = words("whether a delete is followed by a record without a value", default=True)
    upserts: Literal["u", "c"] = words(
        "the op of a row that may replace another: u, whose before is null, or c, for readers that need a before in u",
        default="u",
    )
    name: str = words("the events' source.name; empty: millrace", default="", max_length=249)


__all__ = ["FORMAT", "Debezium", "DebeziumEvents", "Registry"]
