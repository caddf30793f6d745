"""A stream as its user declares it, in Python or YAML: the same fields in both, each checked on its own.

    STREAMS = [Stream(name="hourly",
                      source=From(collection="flights", watermark=Watermark(column="time_hour", delay="1 day")),
                      transform=hourly, sink=Into(collection="flights_by_hour", mode="upsert"), output_mode="update")]

A transform is a function from a DataFrame to a DataFrame, stored as ``module:function``, so that a declaration is data
and the job that runs it finds the function. Nothing here imports Spark: Airflow parses declarations.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, field_validator, model_validator

from millrace.base.errors import InvalidStream
from millrace.flows.declare import spellings
from millrace.flows.declare.part import Part, said
from millrace.flows.declare.rows import Function
from millrace.flows.declare.rows import Table as Table
from millrace.flows.declare.rows import Watermark as Watermark
from millrace.flows.declare.rows import function_of as function_of
from millrace.flows.guarantee import OFFERED, Guarantee
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sinks.delta.model import DeltaSink
from millrace.flows.sinks.function.model import FunctionSink
from millrace.flows.sinks.kafka.model import KafkaSink
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.streams.operators.declared import Operation

_NAME: Final = r"^[a-z][a-z0-9_]{0,62}$"

RowSink = CollectionSink | DeltaSink | KafkaSink | OpenSearchSink | FunctionSink
"""Sinks that take rows."""
_AnySource = Annotated[CollectionSource | KafkaSource, Field(discriminator="kind"), BeforeValidator(spellings.source)]
_AnySink = Annotated[RowSink, Field(discriminator="kind"), BeforeValidator(spellings.sink)]

From = CollectionSource
"""What a stream reads: a collection's changes."""


def FromTopics(**fields: Any) -> KafkaSource:
    """Return what a stream reads: records of Kafka topics, with the brokers as `kafka`. Raises pydantic's error."""
    return KafkaSource.model_validate(spellings.source({"kind": "kafka"} | fields if "kafka" not in fields else fields))


def Into(**fields: Any) -> RowSink:
    """Return where a stream's rows go: `collection`, `delta`, `kafka`, `opensearch` or `function`, with its fields.

    Raises pydantic's error.
    """
    found: RowSink = TypeAdapter(_AnySink).validate_python(fields)
    return found


def letters_of(sink: RowSink) -> str | None:
    """Return the collection for rows that `sink` refuses one by one."""
    return None if isinstance(sink, DeltaSink | FunctionSink) else sink.dead_letters


class Stream(Part):
    """A declared stream. :meth:`of` raises InvalidStream, which names each field; the constructor pydantic's error."""

    name: str = Field(pattern=_NAME)
    source: _AnySource
    transform: Function = None
    sql: str | None = None
    """Instead of a transform: a query over a table with the name of the collection, or of the topic."""
    tables: dict[str, Table] = Field(default_factory=dict)
    """Collections that rows are joined with, by the name they have in `sql`, or as which the transform gets them."""
    operator: Operation | None = None
    """The operator after the transform: windows, deduplication, a pattern, an as-of join (docs/operators.md)."""
    late: _AnySink | None = None
    """Where the rows go that the operator puts aside; without one they lie in its table alone."""
    sink: _AnySink
    guarantee: Guarantee | None = None
    output_mode: Literal["append", "update"] = "append"
    """Of aggregates: "append" gives a window once, when the watermark has passed it; "update" each time it changed."""
    seconds: float = Field(default=1.0, ge=0.0, le=86400.0)
    """Between the beginnings of two micro-batches."""
    group: str | None = Field(default=None, pattern=_NAME)
    """Streams of one group share a driver, and so a DAG: light ones need none each."""
    version: int = Field(default=1, ge=1)
    """Raise it when the transform changes what it computes."""
    words: str = ""

    @field_validator("source", "sink", "late")
    @classmethod
    def _of_rows(cls, part: Part | None) -> Part | None:
        for name in [] if part is None else said(part, part.of_documents):
            raise ValueError(f"{name} is for documents, and a Spark query has rows: leave it out")
        return part

    @model_validator(mode="after")
    def _fits_together(self) -> Stream:
        if self.transform is not None and self.sql is not None:
            raise ValueError("a stream has a transform or sql, not both")
        if isinstance(self.source, KafkaSource) and len(self.source.topics) > 1 and not self.source.name:
            raise ValueError("source: several topics are one table: say its 'name'")
        if self.tables and self.transform is None and self.sql is None:
            raise ValueError("tables are joined by a transform or sql: say how")
        if self.operator is not None and self.source.watermark is None:
            raise ValueError("an operator needs source.watermark: the event time, and for how long it waits")
        if self.operator is not None and self.output_mode != "append":
            raise ValueError("an operator gives each answer once: output_mode 'append'")
        if self.operator is None and self.source.watermark is not None and self.source.watermark.max_ahead is not None:
            raise ValueError(
                "rows ahead of the log are put aside by an operator (source.watermark.max_ahead), and there is none"
            )
        if self.late is not None and self.operator is None:
            raise ValueError("late rows are put aside by an operator, and there is none")
        offered = OFFERED[self.sink.kind]
        if self.guarantee is not None and self.guarantee not in offered:
            raise ValueError(f"a {self.sink.kind} sink offers {', '.join(offered)}, not {self.guarantee}")
        return self

    @property
    def chosen_guarantee(self) -> Guarantee:
        return self.guarantee or OFFERED[self.sink.kind][0]

    @property
    def job(self) -> str:
        """Who runs it: its group, or itself."""
        return self.group or self.name

    @property
    def reads(self) -> tuple[str, ...]:
        """All that it reads, as the parts' `target` calls it, its source first."""
        joined = None if self.operator is None else self.operator.as_of
        more = [each.collection for each in self.tables.values()] + ([] if joined is None else [joined.collection])
        return tuple(dict.fromkeys([self.source.target, *(f"collection:{each}" for each in more)]))

    @property
    def writes(self) -> tuple[str, ...]:
        """What it writes, as the parts' `target` calls it."""
        return (self.sink.target,) if self.late is None else (self.sink.target, self.late.target)

    @classmethod
    def of(cls, value: object, *, where: str = "a stream") -> Stream:
        """Return the stream that a dict (from YAML, say) declares. Raises InvalidStream, naming each wrong field."""
        try:
            return value if isinstance(value, cls) else cls.model_validate(value)
        except ValidationError as error:
            raise InvalidStream(f"{where}: {words(error, value)}") from None

    def fingerprint(self) -> str:
        """Identify the declaration of a checkpoint: covers everything that decides which rows the stream gives."""
        kept = self.model_dump(mode="json", include={"transform", "sql", "output_mode", "version"})
        kept["source"], kept["sink"] = self.source.identity(), spellings.sink_identity(self.sink)
        # An omitted optional field adds nothing, so that checkpoints from before it existed continue.
        kept |= self.model_dump(mode="json", include={"tables", "operator"}, exclude_defaults=True)
        if self.late is not None:
            kept["late"] = spellings.stream_sink(self.late)
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def words(error: ValidationError, value: object) -> str:
    """Return what pydantic found in `value`, field by field, in one line."""
    found = []
    for each in error.errors():
        place = ".".join(str(part) for part in spellings.as_written(each["loc"], value)) or "it"
        if each["type"] == "union_tag_invalid":
            place = f"{place}.kind"
        found.append(f"{place}: {each['msg'].removeprefix('Value error, ')}")
    return "; ".join(found)
