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
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_serializer,
    model_validator,
)

from millrace.base.errors import InvalidArgument, InvalidStream
from millrace.flows.declare.part import TopicName
from millrace.flows.guarantee import OFFERED, Guarantee
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.flows.sources.kafka.model import RECORD_COLUMNS, RECORD_TIME, KafkaSource
from millrace.message.ids import resolve_tick
from millrace.streams.operators.declared import Operation, duration

_NAME: Final = r"^[a-z][a-z0-9_]{0,62}$"
_FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_DELAY: Final = r"^\d+ (second|minute|hour|day)s?$"

SINKS: Final = ("collection", "delta", "kafka", "opensearch", "function")


def _function(value: object) -> object:
    """A function by the name under which another process imports it."""
    if callable(value):
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        value = f"{module}:{name}"
    if value is not None and not (isinstance(value, str) and _FUNCTION.fullmatch(value)):
        raise ValueError(
            f"{value!r} is no module:function that another process can import: define it at a module's top"
        )
    return value


def _moment(value: object) -> object:
    if value is None or value == "now":
        return value
    try:
        resolve_tick(value)  # type: ignore[arg-type] # checked there
    except InvalidArgument as error:
        raise ValueError(str(error)) from None
    return value


Function = Annotated[Any, BeforeValidator(_function)]
"""A function, or its name ``module:function``; kept as its name."""
Place = Annotated[str | int | None, BeforeValidator(_moment)]
"""A tick, a moment in ISO 8601, or "now"."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Watermark(_Model):
    """Which column is the event time, and how late a row may be that still counts."""

    column: str
    """Of the rows; or ``_log_time`` of a collection's rows (when a row became visible, by its time tick), or
    ``_record_time`` of a topic's records (the record's timestamp)."""
    delay: str = Field(default="0 seconds", pattern=_DELAY)
    max_ahead: str | None = Field(default=None, pattern=_DELAY)
    """How far an event time may be ahead of its log time; an operator puts later rows aside. Default: no bound."""

    @property
    def ahead(self) -> timedelta | None:
        return None if self.max_ahead is None else duration(self.max_ahead)


class From(_Model):
    """What a stream reads: a collection's changes."""

    collection: str
    channels: tuple[str, ...] = ()
    """Of which VChannels, or of those on which PChannels; none: of all."""
    columns: tuple[str, ...] = ()
    """Which of its columns and of those of changes; none: all."""
    kinds: Literal["all", "inserts", "skip others"] = "skip others"
    after: Place = None
    """Where it begins: behind a tick or moment, or behind "now"; default: at the collection's beginning."""
    snapshot: Place = None
    """Or with the rows that are visible at a tick or "now"."""
    watermark: Watermark | None = None
    max_bytes: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_beginning(self) -> From:
        if self.after is not None and self.snapshot is not None:
            raise ValueError("it begins behind a tick (after) or with a snapshot, not both")
        return self

    @property
    def target(self) -> str:
        """What it is called in lists and graphs."""
        return f"collection:{self.collection}"

    @property
    def table(self) -> str:
        """The name of its rows in `sql`."""
        return self.collection

    def identity(self) -> dict[str, Any]:
        """What decides which rows it gives: where it begins, and how fast it reads, is not part of it."""
        kept = self.model_dump(mode="json", exclude={"after", "snapshot", "max_bytes"})
        if not self.channels:
            del kept["channels"]
        if self.watermark is not None and self.watermark.max_ahead is None:
            del kept["watermark"]["max_ahead"]
        return kept


def _cluster(value: object) -> object:
    """The brokers' addresses alone stand for a cluster without TLS and SASL."""
    return {"bootstrap": [each.strip() for each in value.split(",")]} if isinstance(value, str) else value


class FromTopics(_Model):
    """What a stream reads: records of Kafka topics."""

    kafka: Annotated[KafkaCluster, BeforeValidator(_cluster)]
    """The brokers: ``host:port`` with commas, or a mapping with ``bootstrap``, ``security``, ``socket_timeout_ms``."""
    topics: Annotated[tuple[TopicName, ...], Field(min_length=1, max_length=64)]
    name: str = ""
    """The name of its rows in `sql`; default: the topic's."""
    columns: dict[str, str] = {}
    """Fields of the values, JSON objects, with their types ("int64"; "string?" may be missing or null). Empty: values
    stay bytes, in ``_value``."""
    record: tuple[str, ...] = ()
    """Columns of the record beside them: ``_key``, ``_value``, ``_headers``, ``_topic``, ``_partition``, ``_offset``,
    ``_record_time``. Without `columns` the default is all of them."""
    start: Annotated[str | int, BeforeValidator(lambda each: each if each == "earliest" else _moment(each))] = (
        "earliest"
    )
    """Where it begins: "earliest", "now", or with the records of a moment on."""
    tombstones: Literal["error", "ignore"] = "error"
    """With `columns`, whether a record without a value is put aside or left out."""
    dead_letters: str | None = None
    """A collection for records that do not decode. Without it they are kept in the stream's folder."""
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    group: str = Field(default="", max_length=249, pattern=r"^[A-Za-z0-9._-]*$")
    """A consumer group that offsets are committed to for other tools; default: ``millrace-<stream>``."""
    watermark: Watermark | None = None
    max_bytes: int = Field(default=64 << 20, gt=0)
    """Of a micro-batch, about."""
    max_records: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> FromTopics:
        if len(set(self.topics)) < len(self.topics):
            raise ValueError("topics: each once")
        if len(self.topics) > 1 and not self.name:
            raise ValueError("several topics are one table: say its 'name'")
        for each in self.record:
            if each not in RECORD_COLUMNS:
                raise ValueError(f"record: {each!r} is none of {', '.join(RECORD_COLUMNS)}")
        if self.watermark is not None and self.watermark.max_ahead is not None:
            raise ValueError("watermark.max_ahead compares with the log time of rows, and records have none")
        return self

    @property
    def target(self) -> str:
        """What it is called in lists and graphs."""
        return f"kafka:{','.join(self.topics)}"

    @property
    def table(self) -> str:
        """The name of its rows in `sql`."""
        return self.name or self.topics[0]

    @property
    def record_columns(self) -> tuple[str, ...]:
        """The columns of the record that its rows have."""
        given = self.record or (() if self.columns else RECORD_COLUMNS)
        marked = self.watermark is not None and self.watermark.column == RECORD_TIME
        return (*given, RECORD_TIME) if marked and RECORD_TIME not in given else given

    def kafka_source(self, stream: str) -> KafkaSource:
        """How the topics are read by `stream`."""
        return KafkaSource(
            **{name: getattr(self.kafka, name) for name in KafkaCluster.model_fields},
            topics=self.topics,
            group=self.group or f"millrace-{stream}",
            isolation=self.isolation,
        )

    def identity(self) -> dict[str, Any]:
        """What decides which rows it gives. A topic's own id tells it from one of its name on other brokers."""
        return self.model_dump(
            mode="json", include={"topics", "name", "columns", "record", "tombstones", "isolation", "watermark"}
        )


def _kind_of_source(value: object) -> str:
    names: Any = value if isinstance(value, dict) else ()
    return _TOPICS if isinstance(value, FromTopics) or "kafka" in names or "topics" in names else _COLLECTION


_COLLECTION: Final = "<collection>"
_TOPICS: Final = "<topics>"
"""Tags of the kinds of sources, which no path of an error shows."""
Source = Annotated[
    Annotated[From, Tag(_COLLECTION)] | Annotated[FromTopics, Tag(_TOPICS)], Discriminator(_kind_of_source)
]


class Into(_Model):
    """Where a stream's rows go: exactly one of `collection`, `delta`, `kafka`, `opensearch` and `function`."""

    collection: str | None = None
    mode: Literal["append", "upsert", "changes"] = "append"
    partition: str | None = None
    partition_by: str | None = None
    dead_letters: str | None = None
    """A collection for rows that the sink refuses one by one: of a collection, of a topic, of an index."""
    create: bool = False
    """Create the collection, with the columns that the stream gives, if there is none when it starts."""
    delta: str | None = None
    """The path of a Delta table."""
    merge_schema: bool = False
    kafka: Annotated[KafkaCluster | None, BeforeValidator(_cluster)] = None
    """The brokers: ``host:port`` with commas, or a mapping with ``bootstrap``, ``security``, ``socket_timeout_ms``."""
    topic: str | None = None
    key: str | None = None
    """Of Kafka the column with a message's key; of OpenSearch the columns of a document's id, and of a collection that
    is created those of its primary key, with commas."""
    opensearch: OpenSearchSink | None = None
    """An index: ``hosts``, ``index_base``, and the other fields of a pipeline's sink (docs/pipelines.md)."""
    function: Function = None
    """Called with each micro-batch's DataFrame and number."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that `key` lists. Empty, a collection that is created gets a generated primary key."""
        return tuple(each.strip() for each in (self.key or "").split(",") if each.strip())

    @property
    def path(self) -> str:
        """The path of the Delta table."""
        return str(getattr(self, "delta"))  # noqa: B009 - no handle of delta-rs, which that name is elsewhere

    @property
    def kind(self) -> str:
        return next(name for name in SINKS if getattr(self, name) is not None)

    @property
    def target(self) -> str:
        """What it is called in lists and graphs."""
        kind = self.kind
        if self.opensearch is not None:
            return f"{kind}:{self.opensearch.index_base}"
        return f"{kind}:{self.topic}" if kind == "kafka" else f"{kind}:{getattr(self, kind)}"

    @model_validator(mode="after")
    def _one_kind(self) -> Into:
        given = [name for name in SINKS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a sink is one of {', '.join(SINKS)}; this has {', '.join(given) or 'none'}")
        if (self.kafka is None) != (self.topic is None):
            raise ValueError("a Kafka sink has its servers (kafka) and a topic")
        mine = {
            "collection": ("mode", "partition", "partition_by", "dead_letters", "create", "key"),
            "delta": ("merge_schema",),
        }
        mine |= {"kafka": ("topic", "key", "dead_letters"), "opensearch": ("key", "dead_letters"), "function": ()}
        others = {name for kind, names in mine.items() if kind != given[0] for name in names} - set(mine[given[0]])
        odd = sorted(name for name in others if getattr(self, name) != type(self).model_fields[name].default)
        if odd:
            raise ValueError(f"{odd[0]!r} says nothing of a {given[0]} sink")
        if given[0] == "collection" and self.key is not None and not self.create:
            raise ValueError("'key' is that of a collection that the stream creates: say 'create: true'")
        if self.opensearch is not None and not self.keys:
            raise ValueError("an OpenSearch sink has ids by columns: say 'key'")
        if self.create and self.mode != "append" and not self.keys:
            raise ValueError(f"a collection that is created for the mode {self.mode!r} has a primary key: say 'key'")
        return self

    @field_serializer("kafka")
    def _brokers(self, cluster: KafkaCluster | None) -> Any:
        """As it was declared: the addresses alone, where they say all."""
        if cluster is None or cluster != KafkaCluster(bootstrap=cluster.bootstrap):
            return cluster
        return ",".join(cluster.bootstrap)

    def identity(self) -> dict[str, Any]:
        """What decides what becomes of its rows. Of OpenSearch that is the index, however it is reached."""
        kept = self.model_dump(mode="json", exclude={"opensearch"})
        if self.opensearch is not None:
            kept["opensearch"] = self.opensearch.index_base
        if self.kafka is not None:
            kept["kafka"] = ",".join(self.kafka.bootstrap)
        if not self.create:
            del kept["create"]
        return kept


class Table(_Model):
    """A collection as a table to join with: its rows at one moment, for the whole run."""

    collection: str
    columns: tuple[str, ...] = ()
    at: Place = None
    """A tick, a moment, or "now": when the query starts, again each time it does. Default: that."""


class Stream(_Model):
    """A declared stream. :meth:`of` raises InvalidStream, which names each field; the constructor pydantic's error."""

    name: str = Field(pattern=_NAME)
    source: Annotated[Source, BeforeValidator(lambda each: {"collection": each} if isinstance(each, str) else each)]
    transform: Function = None
    sql: str | None = None
    """Instead of a transform: a query over a table with the name of the collection, or of the topic."""
    tables: dict[str, Table] = {}
    """Collections that rows are joined with, by the name they have in `sql`, or as which the transform gets them."""
    operator: Operation | None = None
    """The operator after the transform: windows, deduplication, a pattern, an as-of join (docs/operators.md)."""
    late: Annotated[
        Into | None, BeforeValidator(lambda each: {"collection": each} if isinstance(each, str) else each)
    ] = None
    """Where the rows go that the operator puts aside; without one they lie in its table alone."""
    sink: Annotated[Into, BeforeValidator(lambda each: {"collection": each} if isinstance(each, str) else each)]
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

    @model_validator(mode="after")
    def _fits_together(self) -> Stream:
        if self.transform is not None and self.sql is not None:
            raise ValueError("a stream has a transform or sql, not both")
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
        """All that it reads, as :attr:`Into.target` calls it, its source first."""
        joined = None if self.operator is None else self.operator.as_of
        more = [each.collection for each in self.tables.values()] + ([] if joined is None else [joined.collection])
        return tuple(dict.fromkeys([self.source.target, *(f"collection:{each}" for each in more)]))

    @property
    def writes(self) -> tuple[str, ...]:
        """What it writes, as :attr:`Into.target` calls it."""
        return (self.sink.target,) if self.late is None else (self.sink.target, self.late.target)

    @classmethod
    def of(cls, value: object, *, where: str = "a stream") -> Stream:
        """Return the stream that a dict (from YAML, say) declares. Raises InvalidStream, naming each wrong field."""
        try:
            return value if isinstance(value, cls) else cls.model_validate(value)
        except ValidationError as error:
            raise InvalidStream(f"{where}: {words(error)}") from None

    def fingerprint(self) -> str:
        """Identify the declaration of a checkpoint: covers everything that decides which rows the stream gives."""
        kept = self.model_dump(mode="json", include={"transform", "sql", "output_mode", "version"})
        kept["source"], kept["sink"] = self.source.identity(), self.sink.identity()
        # An omitted optional field adds nothing, so that checkpoints from before it existed continue.
        kept |= self.model_dump(mode="json", include={"tables", "operator", "late"}, exclude_defaults=True)
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def words(error: ValidationError) -> str:
    """What pydantic found, field by field, in one line."""
    found = []
    for each in error.errors():
        place = ".".join(str(part) for part in each["loc"] if part not in (_COLLECTION, _TOPICS)) or "it"
        found.append(f"{place}: {each['msg'].removeprefix('Value error, ')}")
    return "; ".join(found)


def function_of(name: str) -> Callable[..., Any]:
    """The function ``module:function``. Raises InvalidStream where it cannot be had."""
    import importlib

    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidStream(f"the function {name} cannot be had: {error}; is its module on PYTHONPATH?") from error
    if not callable(found):
        raise InvalidStream(f"{name} is no function")
    return found
