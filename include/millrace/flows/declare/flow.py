"""The declaration of a flow: a source, a transform, a sink, and how it runs. One model for Python, YAML and the API.

    FLOWS = [Flow(name="hourly",
                  source=CollectionSource(collection="flights", watermark=Watermark(column="time_hour", delay="1 day")),
                  transform=Transform(function=hourly, output_mode="update"),
                  sink=CollectionSink(collection="flights_by_hour", mode="upsert"))]

The transform decides the host: steps over JSON documents run in the range loop of a worker process; SQL, a function of
a DataFrame and operators run in a Spark query. Nothing here imports Spark: Airflow parses declarations.

Secrets are separate: `to_json` omits them, `secrets` returns them by path, and `parse` restores them. Declarations in
the spellings of earlier builds are the same flows (`spellings.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias, Union, cast

from pydantic import BaseModel, Field, SecretStr, StringConstraints, ValidationError, model_validator

from millrace.base.errors import InvalidStream, PipelineInvalid
from millrace.flows.declare import spellings
from millrace.flows.declare.errors import Errors
from millrace.flows.declare.expressions import UNCOMPILED
from millrace.flows.declare.part import (
    MAX_DEPTH,
    Part,
    Problem,
    check_depth,
    invalid,
    misplaced,
    problems_of,
    said,
    secrets_of,
    with_secrets,
    words,
    written,
)
from millrace.flows.declare.rows import Function, Table
from millrace.flows.declare.steps import AnyStep, TemplateId
from millrace.flows.declare.worker import AIRFLOW, CONTINUOUS, Recovery, Resources, Schedule
from millrace.flows.guarantee import OFFERED, Guarantee, level
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.registry import Sink, Source, promise_of, sink_kinds, source_kinds
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sinks.delta.model import DeltaSink
from millrace.flows.sinks.function.model import FunctionSink
from millrace.flows.sinks.kafka.model import KafkaSink
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.status import Host
from millrace.streams.operators.declared import Operation

FlowName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
"""Also a part of names of topics, folders, runs, DAGs and consumer groups."""
JobName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]

RowSource: TypeAlias = CollectionSource | KafkaSource
"""Sources of rows."""
RowSink: TypeAlias = CollectionSink | DeltaSink | KafkaSink | OpenSearchSink | FunctionSink
"""Sinks of rows."""
LateSink = Annotated[RowSink, Field(discriminator="kind")]
if TYPE_CHECKING:
    _AnySink: TypeAlias = Sink
else:
    _AnySink = Annotated[
        Union[(*(each.model for each in sink_kinds().values()), FunctionSink)],
        Field(discriminator="kind"),
    ]
_ROW_SOURCES: Final = (CollectionSource, KafkaSource)
_OF_ROWS: Final = frozenset({"late", "seconds", "group"})
_OF_DOCUMENTS: Final = frozenset({"failure_threshold", "recovery", "resources", "deployment"})


class Transform(Part):
    """The transform of a source's records: steps over documents; or SQL or a function, then an operator, over rows.

    A list is short for `steps`, and a text or a function is short for `function`.
    """

    steps: Annotated[tuple[AnyStep, ...], Field(max_length=100)] = words(
        "over JSON documents, in this order", default=()
    )
    sql: str | None = words(
        "a query over a table named like the collection or topic; it may use Spark's windows",
        default=None,
    )
    function: Function = words("or a function of a DataFrame, module:function", default=None)
    tables: dict[str, Table] = words(
        "collections to join with, by their name in the query or their parameter of the function",
        default_factory=dict,
    )
    operator: Operation | None = words(
        "after the query or function: windows, distinct, pattern (MATCH_RECOGNIZE) or as_of, with its state",
        default=None,
    )
    output_mode: Literal["append", "update"] = words(
        "for aggregates: append writes a window once, when the watermark has passed it; update, each time it changes",
        default="append",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return {"steps": value}
        return {"function": value} if isinstance(value, str) or callable(value) else value


class Flow(Part):
    """A declared flow. :meth:`of` and :meth:`parse` name each wrong field; the constructor raises pydantic's error."""

    live: ClassVar[frozenset[str]] = frozenset({"title", "description", "account", "labels"})
    """Fields that may change while the flow runs. Any other change restarts its tasks, gracefully."""

    spelling: ClassVar[spellings.Spelling] = "flow"
    """The form that it was declared in, for the paths of problems. Not part of the declaration or its equality."""

    name: FlowName = words("unique; never reused")
    title: str = words("the name in the user interface", default="", max_length=200)
    description: str = words("", default="", max_length=4000)
    account: str = words("the owner", default="", max_length=256)
    labels: dict[str, str] = words("your own labels", default_factory=dict, max_length=64)
    source: Source
    transform: Transform = words("without one, documents or rows are not changed", default_factory=Transform)
    sink: _AnySink
    late: LateSink | None = words(
        "the sink of late rows that the operator puts aside; without one they are only in its table", default=None
    )
    errors: Errors = words("the place of failed records, retries and limits", default_factory=Errors)
    guarantee: Guarantee | None = words("default: the strongest of the source and the sink", default=None)
    schedule: Schedule = words(
        "continuous, or when Airflow starts a run, in UTC: a cron expression, @hourly, @daily, @weekly, @monthly or"
        " @yearly; a run ends at the source's end as of its start",
        default=CONTINUOUS,
        max_length=200,
    )
    version: int = words("increase it when the transform computes something else", default=1, ge=1)
    host: Host | None = words(
        "range: the range loop of a worker process, over documents; spark: a streaming query, over rows; default: the"
        " one that the transform, the source and the sink need",
        default=None,
    )
    group: JobName | None = words(
        "flows of one group share a Spark driver and a DAG; useful for light flows", default=None
    )
    seconds: float = words(
        "from the start of one micro-batch of Spark to the start of the next", default=1.0, ge=0.0, le=86_400.0
    )
    failure_threshold: int = words(
        "failureThreshold: failures of a task in a row before it stops with their cause; recovery restarts it later",
        default=10,
        ge=1,
        le=1_000_000,
    )
    flush: Flush = words("when a bulk is sent", default_factory=Flush)
    recovery: Recovery = words("of failed tasks", default_factory=Recovery)
    resources: Resources = words("limits of the worker", default_factory=Resources)
    deployment: Literal["service", "airflow"] = words(
        "what starts its worker and keeps it running: the service, or a DAG of Airflow, on Spark", default="service"
    )

    @model_validator(mode="before")
    @classmethod
    def _not_too_deep(cls, value: Any) -> Any:
        check_depth(value, 2 * MAX_DEPTH)
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        rows, documents = list(self._of_rows()), list(self._of_documents())
        # A declaration is frozen for its users. Fields that it leaves open are filled in here, before it is returned.
        if self.host is None:
            object.__setattr__(self, "host", "spark" if rows else "range")
        if self.scheduled and self.group is not None:
            raise misplaced("group", "flows of a group share a driver that always runs: leave out group or schedule")
        if self.host == "spark":
            for path, what in documents:
                raise misplaced(path, f"{what} for documents, but a Spark query processes rows: leave it out")
            self._require_rows()
            self._lend_letters()
            self._require_skipped()
        else:
            for path, what in rows:
                raise misplaced(path, f"{what} for rows, but the range loop processes documents: leave it out")
            self._require_documents()
        return self

    def _of_rows(self) -> Iterator[tuple[str, str]]:
        """Yield path and description of each part that only a Spark query can run."""
        for name in said(self, _OF_ROWS):
            yield name, f"{name} is"
        for name in said(self.transform, set(Transform.model_fields) - {"steps"}):
            yield "transform", f"{name} is"
        if isinstance(self.row_sink, FunctionSink):
            yield "sink", "a function is"
        if getattr(self.sink, "create", False) and not (
            self.transform.steps or source_kinds()[self.source.kind].tables
        ):
            yield "sink", "create is"
        for path, part in (("source", self.source), ("sink", self.sink)):
            for name in said(part, part.of_rows):
                yield path, f"{name} is"

    def _of_documents(self) -> Iterator[tuple[str, str]]:
        """Yield path and description of each part that only the range loop can run."""
        if self.transform.steps:
            yield "transform", "steps are"
        for name in said(self, _OF_DOCUMENTS):
            yield name, f"{name} is"
        if not isinstance(self.source, _ROW_SOURCES):
            yield "source", f"a {self.source.kind} is"
        if self.sink.kind not in OFFERED:
            yield "sink", f"a {self.sink.kind} is"
        for path, part in (("source", self.source), ("sink", self.sink), ("late", self.late)):
            for name in [] if part is None else said(part, part.of_documents):
                yield path, f"{name} is"

    def _require_rows(self) -> None:
        transform, source = self.transform, self.row_source
        if transform.function is not None and transform.sql is not None:
            raise ValueError("a transform is a function or sql, not both")
        if isinstance(source, KafkaSource) and len(source.topics) > 1 and not source.name:
            raise ValueError("source: several topics form one table: set its 'name'")
        if transform.tables and transform.function is None and transform.sql is None:
            raise ValueError("tables need a function or sql that joins them: add one")
        if self.errors_in_topic:
            self._require_errors()
        operator, mark = transform.operator, source.watermark
        if operator is not None and mark is None:
            raise ValueError("an operator needs source.watermark: declare the event time and its delay")
        if operator is not None and transform.output_mode != "append":
            raise ValueError("an operator writes each result once: set output_mode to 'append'")
        if operator is None and mark is not None and mark.max_ahead is not None:
            raise ValueError(
                "source.watermark.max_ahead needs an operator, which puts rows ahead of the log aside: add one"
            )
        if self.late is not None and operator is None:
            raise ValueError("a sink of late rows needs an operator, which puts them aside: add one")
        if isinstance(self.sink, OpenSearchSink) and not self.sink.keys:
            raise ValueError("an OpenSearch sink takes ids from columns: set 'key'")
        offered = OFFERED[self.sink.kind]
        if self.guarantee is not None and self.guarantee not in offered:
            raise ValueError(f"a {self.sink.kind} sink offers {', '.join(offered)}, not {self.guarantee}")

    def _lend_letters(self) -> None:
        """Use the dead letters of `errors` for the parts that name none."""
        for name in ("source", "sink", "late"):
            part = getattr(self, name)
            if self.errors.collection and getattr(part, "dead_letters", "") is None:
                lent = part.model_copy(update={"dead_letters": self.errors.collection})
                object.__setattr__(self, name, lent)

    def _require_skipped(self) -> None:
        lanes = (f"stream-{self.name}", f"stream-{self.name}/late")
        for each in self.errors.skip:
            if each.row is not None and each.lane not in lanes:
                raise ValueError(f"errors.skip: the lane of a row is {' or '.join(lanes)}")
            if each.row is None and not isinstance(self.source, KafkaSource):
                raise ValueError(
                    f"errors.skip: a collection's rows have no positions: give the row of a micro-batch of {lanes[0]}"
                )
        if self.errors.skip and not letters_place(self):
            raise ValueError("errors.skip: skipped records need a place: set errors.collection or errors.topic")

    def _require_documents(self) -> None:
        kind = source_kinds()[self.source.kind]
        made = any(isinstance(step, TemplateId) for step in self.transform.steps)
        if getattr(self.sink, "ids", None) == "template" and not made:
            raise ValueError("sink.ids is template, but no step is template_id: add one, or use ids by position or key")
        if not kind.numbered and (isinstance(self.sink, DeltaSink) or getattr(self.sink, "ids", "key") == "position"):
            raise ValueError(
                f"sink: records of a {self.source.kind} share their positions, so use ids by key or template, and no"
                " Delta table"
            )
        self._require_errors()
        if any(each.row is not None for each in self.errors.skip):
            raise ValueError(
                "errors.skip: only flows on Spark have rows: name records of the range loop by position alone"
            )
        self._require_collections()
        if isinstance(self.sink, KafkaSink):
            object.__setattr__(self, "sink", self.sink.with_columns_of(getattr(self.source, "collection", "")))
        if kind.feeder and self.deployment == AIRFLOW:
            raise ValueError(f"source: a {self.source.kind} is captured by a worker: set deployment to service")
        if not self.divided and self.resources.workers > 1:
            raise ValueError(
                "resources.workers: several workers share a topic's partitions by its consumer group: set"
                " source.assignment to group"
            )
        if self.divided and self.deployment == AIRFLOW:
            raise ValueError(
                "source.assignment, resources.workers: on Spark one query reads all lanes, in as many tasks as the"
                " cluster has cores: use assignment all and one worker, or deployment service"
            )
        output = getattr(self.sink, "topic", None)
        comes_back = isinstance(self.source, KafkaSource) and isinstance(output, str) and self.source.reads(output)
        if comes_back and set(getattr(self.source, "bootstrap", ())) & set(getattr(self.sink, "bootstrap", ())):
            raise ValueError(
                "sink.topic is a topic of the source, which would read its own output forever: choose another"
            )
        if self.guarantee is not None and self.guarantee != self.chosen_guarantee:
            raise ValueError(f"guarantee: from a {self.source.kind} to this {self.sink.kind} it is {self.promise}")

    def _require_collections(self) -> None:
        sink, source = self.sink, self.source
        if not isinstance(sink, CollectionSink):
            return
        if sink.create or sink.on_schema_change == "alter":
            if not source_kinds()[source.kind].tables:
                raise ValueError(
                    f"sink.create, sink.on_schema_change: the columns of a {source.kind}'s records are unknown:"
                    " create the collection"
                )
            if self.transform.steps:
                raise ValueError(
                    "sink.create, sink.on_schema_change: the collection has the table's columns, and steps may change"
                    " them: leave out the steps, or create the collection"
                )
        if len(getattr(source, "names", ())) > 1 and not sink.divided:
            raise ValueError(
                f"sink.collection: each table has its own collection: name it by the table, as in"
                f" '{{table}}' or '{sink.collection}_{{table}}'"
            )
        if sink.history is not None:
            if not source_kinds()[source.kind].ordered_by_key:
                raise ValueError(f"sink.history: a {source.kind} may have changes of one key in several lanes")
            if isinstance(source, KafkaSource) and len(source.topics) != 1 and not sink.divided:
                raise ValueError(
                    "sink.history: changes of one key must come from one topic that is partitioned by that key"
                )

    def _require_errors(self) -> None:
        errors, source = self.errors, self.source
        if not isinstance(source, KafkaSource) and errors.cluster is None and errors.collection is None:
            raise ValueError(
                "errors.cluster: the source has no brokers: set the error topic's brokers, or errors.collection"
            )
        if errors.collection is not None:
            for part in (source, self.sink):
                if getattr(part, "collection", None) == errors.collection:
                    raise ValueError("errors.collection is also the source's or the sink's collection: use another one")
        elif isinstance(source, KafkaSource) and errors.cluster is None and source.reads(self.errors_topic):
            raise ValueError(
                "errors.topic is a topic of the source, which would read failed records again: use another one"
            )

    # --- how it is read and shown ------------------------------------------------------------------------------------

    @classmethod
    def parse(
        cls,
        value: Any,
        *,
        spelling: spellings.Spelling = "flow",
        secrets: Mapping[str, str] | None = None,
        compiled: bool = True,
    ) -> Self:
        """Return the flow that `value` (JSON) declares, with `secrets` by path where `value` has none.

        `spelling` is the form of `value`: this one, or that of a stream or a pipeline of earlier builds. Without
        `compiled`, expressions and JSON Schemas are not compiled: those of an untrusted user may take unlimited time
        (`flows/samples`). Raises PipelineInvalid with a problem for each wrong field (`problems`).
        """
        if not isinstance(value, Mapping):
            raise invalid([Problem("", f"is an object with {spellings.NAME[spelling]}, source and sink", "type")])
        whole: Any = value
        try:
            given = with_secrets(value, secrets or {})
            check_depth(given, 2 * MAX_DEPTH)
            whole = spellings.plain(given, spelling)
            made = cls.model_validate(whole, context={UNCOMPILED: not compiled})
        except spellings.Misspelled as error:
            raise invalid([Problem(error.field, str(error), "value_error")]) from None
        except ValidationError as error:
            found = problems_of(error, whole)
            reported = [each._replace(field=spellings.as_written(each.field, value, spelling)) for each in found]
            raise invalid(reported) from None
        except ValueError as error:
            raise invalid([Problem("", str(error), "value_error")]) from None
        except RecursionError:
            raise invalid([Problem("", "is nested too deep", "depth")]) from None
        object.__setattr__(made, "spelling", spelling)
        return made

    @classmethod
    def of(cls, value: object, *, where: str = "a flow", spelling: spellings.Spelling = "flow") -> Self:
        """Return the flow that a dict (from YAML, say) declares. Raises InvalidStream, naming each wrong field."""
        if isinstance(value, cls):
            return value
        try:
            return cls.parse(value, spelling=spelling)
        except PipelineInvalid as error:
            problems = "; ".join(f"{each['field'] or 'it'}: {each['message']}" for each in error.problems)
            raise InvalidStream(f"{where}: {problems}") from None

    def to_json(self, *, unset: bool = True) -> dict[str, Any]:
        """Return the declaration as JSON, without defaults and secrets.

        Without `unset`, a default that was given is included, so that the defaults of a service do not replace it.
        """
        return written(self, given=not unset)

    def secrets(self) -> dict[str, str]:
        """Return the secrets that are set, in plain text, by path. `to_json` omits them."""
        return secrets_of(self)

    def secret_paths(self) -> list[str]:
        """Return the paths of all fields for secrets, set or not."""
        return sorted(_secret_paths(self))

    # --- on either host ----------------------------------------------------------------------------------------------

    @property
    def promise(self) -> str:
        """The guarantee and how it is met, in words."""
        return promise_of(self.source, self.sink, rows=self.host == "spark", chosen=self.guarantee)

    @property
    def chosen_guarantee(self) -> Guarantee:
        return level(self.promise)

    @property
    def scheduled(self) -> bool:
        """Whether it runs by a schedule, each run up to the source's end as of its start."""
        return self.schedule != CONTINUOUS

    def restarts(self, other: Self) -> list[str]:
        """Return the fields of `other` whose changes require a restart of the running flow."""
        return sorted(
            name
            for name in type(self).model_fields
            if name not in self.live and getattr(self, name) != getattr(other, name)
        )

    # --- on Spark ----------------------------------------------------------------------------------------------------

    @property
    def row_source(self) -> RowSource:
        """The source, of a flow on Spark."""
        return cast(RowSource, self.source)

    @property
    def row_sink(self) -> RowSink:
        """The sink, of a flow on Spark."""
        return cast(RowSink, self.sink)

    @property
    def job(self) -> str:
        """The Spark job that runs it: its group's, or its own."""
        return self.group or self.name

    @property
    def reads(self) -> tuple[str, ...]:
        """Targets (see the parts' `target`) that a flow on Spark reads, its source first."""
        operator = self.transform.operator
        joined = None if operator is None else operator.as_of
        more = [each.collection for each in self.transform.tables.values()]
        more += [] if joined is None else [joined.collection]
        return tuple(dict.fromkeys([self.row_source.target, *(f"collection:{each}" for each in more)]))

    @property
    def writes(self) -> tuple[str, ...]:
        """Targets (see the parts' `target`) that a flow on Spark writes."""
        return (self.row_sink.target,) if self.late is None else (self.row_sink.target, self.late.target)

    def fingerprint(self) -> str:
        """Identify the declaration of a checkpoint: covers everything that decides which rows the flow gives."""
        # Field by field as in earlier builds, so that their checkpoints continue.
        transform = self.transform.model_dump(mode="json", include={"sql", "output_mode"})
        identity: dict[str, Any] = {**transform, "transform": self.transform.function, "version": self.version}
        identity["source"], identity["sink"] = self.row_source.identity(), spellings.sink_identity(self.sink)
        # An omitted optional field adds nothing, so that checkpoints from before it existed continue.
        identity |= self.transform.model_dump(mode="json", include={"tables", "operator"}, exclude_defaults=True)
        if self.late is not None:
            identity["late"] = spellings.stream_sink(self.late)
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    # --- in the range loop -------------------------------------------------------------------------------------------

    @property
    def errors_in_topic(self) -> bool:
        """Whether dead letters go to an error topic. On Spark, only if the declaration names it or its brokers."""
        named = self.errors.topic is not None or self.errors.cluster is not None
        return self.errors.collection is None and (named or self.host == "range")

    @property
    def errors_topic(self) -> str:
        return self.errors.topic or f"{self.name}.errors"

    @property
    def errors_cluster(self) -> KafkaCluster:
        if self.errors.cluster is not None:
            return self.errors.cluster
        assert isinstance(self.source, KafkaSource), "checked by the constructor"
        return self.source

    @property
    def consumer_group(self) -> str:
        """The consumer group that positions are mirrored to."""
        return (self.source.group if isinstance(self.source, KafkaSource) else "") or f"millrace-{self.name}"

    @property
    def divided(self) -> bool:
        """Whether several workers divide the lanes: of topics by the consumer group, of others by leases."""
        if isinstance(self.source, KafkaSource):
            return self.source.assignment == "group"
        return self.resources.workers > 1

    def topics(self) -> dict[str, tuple[str, ...]]:
        """Its Kafka topics by their use: ``input``, ``output``, ``error``."""
        output = () if isinstance(self.sink, CollectionSink | DeltaSink) else getattr(self.sink, "topic", None)
        return {
            "input": self.source.topics if isinstance(self.source, KafkaSource) else (),
            "output": (output,) if isinstance(output, str) else (),
            "error": (self.errors_topic,) if self.errors_in_topic else (),
        }

    def unordered(self) -> Problem | None:
        """Return why the sink's versions cannot order two documents of one id, or None if they can.

        Not a part of `parse`, so that declarations of earlier builds still load.
        """
        sink, source = self.sink, self.source
        if self.host == "spark" or not isinstance(sink, OpenSearchSink) or not isinstance(source, KafkaSource):
            return None
        if (
            not sink.versions or sink.ids == "position" or sink.version_field is not None or len(source.topics) == 1
        ):  # a pattern may match several
            return None
        text = (
            f"versions are offsets, which cannot order documents of {len(source.topics) or 'several'} topics"
            " with one id: name a field that does, or set sink.versions to false (the later one wins)"
        )
        return Problem("sink.version_field", text, "versions")


def letters_of(flow: Flow, sink: RowSink) -> str | None:
    """Return the collection for rows that `sink` of a flow on Spark refuses one by one."""
    return None if isinstance(sink, FunctionSink) else getattr(sink, "dead_letters", None) or flow.errors.collection


def has_letters(flow: Flow, sink: RowSink) -> bool:
    """Return whether rows that `sink` of a flow on Spark refuses one by one are put aside."""
    return letters_of(flow, sink) is not None or (flow.errors_in_topic and not isinstance(sink, FunctionSink))


def letters_place(flow: Flow) -> str:
    """Return the name of a flow's place for dead letters. Empty if it has none; it then stops at the first failure."""
    collection = flow.errors.collection or getattr(flow.sink, "dead_letters", None)
    if collection is None and flow.host == "spark" and not flow.errors_in_topic:
        return getattr(flow.source, "dead_letters", None) or ""
    return collection or flow.errors_topic


def _secret_paths(part: Any) -> set[str]:
    found: set[str] = set()
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, SecretStr):
            found.add(name)
        elif isinstance(value, BaseModel):
            found |= {f"{name}.{inner}" for inner in _secret_paths(value)}
    return found
