"""A whole pipeline: source, steps, sink and error handling. API, store, deployment and worker pass it to each other.

    pipeline = Pipeline.parse({"id": "flights", "source": {"kind": "kafka", ...}, "sink": {"kind": "opensearch", ...}})
    Pipeline.parse(pipeline.to_json(), secrets=pipeline.secrets()) == pipeline

Secrets are separate: `to_json` omits them, `secrets` returns them by path, and `parse` restores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from millrace.flows.declare.errors import Errors as Errors
from millrace.flows.declare.expressions import UNCOMPILED
from millrace.flows.declare.part import (
    MAX_DEPTH,
    Part,
    Problem,
    check_depth,
    invalid,
    problems_of,
    said,
    secrets_of,
    with_secrets,
    words,
)
from millrace.flows.declare.steps import AnyStep, TemplateId
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.registry import Sink, Source, source_kinds
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sinks.delta.model import DeltaSink
from millrace.flows.sinks.kafka.model import KafkaSink
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.flows.sources.kafka.model import KafkaSource

AIRFLOW: Final = "airflow"
VERSION: Final = 1
"""Of a declaration's form. A new field is optional, so that an older declaration means what it meant."""

PipelineId: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
"""Also a part of names of topics, folders, runs and consumer groups."""


class Recovery(Part):
    """A task that failed is started again by the supervisor."""

    interval_minutes: float = words(
        "watchWorkersIntervalMin: first pause before a failed task starts again", default=5, ge=0.001, le=1440
    )
    factor: float = words("the next pause is so many times longer", default=2, ge=1, le=10)
    longest_minutes: float = words("longest pause", default=60, ge=0.001, le=10_080)
    attempts: int = words(
        "recoveries in a row that came to nothing, before the task stays failed; 0: none", default=10, ge=0, le=10_000
    )


class Resources(Part):
    """The workers, and the limits of each."""

    cpus: float = words("cores", default=1, ge=0.1, le=256)
    memory_mib: int = words("memory", default=1024, ge=128, le=1 << 20)
    tasks: int = words("ranges that run at once; 0: one for each core", default=0, ge=0, le=1024)
    workers: int = words(
        "worker processes on this machine; of topics, more than one need source.assignment: group",
        default=1,
        ge=1,
        le=64,
    )


class Pipeline(Part):
    """The declaration of one pipeline."""

    live: ClassVar[frozenset[str]] = frozenset({"name", "description", "account", "labels"})
    """What may change while it runs; any other change restarts its tasks, gracefully."""

    version: Literal[1] = words("of this form", default=VERSION)
    id: PipelineId = words("unique, for ever")
    name: str = words("what people call it", default="", max_length=200)
    description: str = words("", default="", max_length=4000)
    account: str = words("of whom it is", default="", max_length=256)
    labels: dict[str, str] = words("of yours", default_factory=dict, max_length=64)
    source: Source
    steps: Annotated[tuple[AnyStep, ...], Field(max_length=100)] = words("in this order", default=())
    sink: Sink
    errors: Errors = words("the error topic", default_factory=Errors)
    failure_threshold: int = words(
        "failureThreshold: failures of a task in a row before it stops with their cause, to be recovered later",
        default=10,
        ge=1,
        le=1_000_000,
    )
    flush: Flush = words("when a bulk goes out", default_factory=Flush)
    recovery: Recovery = words("of failed tasks", default_factory=Recovery)
    resources: Resources = words("limits of the worker", default_factory=Resources)
    deployment: Literal["service", "airflow"] = words(
        "who starts its worker and keeps it alive: the service, or a DAG of Airflow, on Spark", default="service"
    )

    @model_validator(mode="before")
    @classmethod
    def _not_too_deep(cls, value: Any) -> Any:
        check_depth(value, 2 * MAX_DEPTH)
        return value

    @field_validator("source", "sink")
    @classmethod
    def _of_documents(cls, part: Part) -> Part:
        for name in said(part, part.of_rows):
            raise ValueError(f"{name} is for rows, and a pipeline has documents: leave it out")
        return part

    @model_validator(mode="after")
    def _fits(self) -> Self:
        made = any(isinstance(step, TemplateId) for step in self.steps)
        wanted = getattr(self.sink, "ids", None) == "template"
        if wanted and not made:
            raise ValueError(
                "sink.ids is template, and no step is template_id: add one, or take ids by position or key"
            )
        numbered = source_kinds()[self.source.kind].numbered
        if not numbered and (isinstance(self.sink, DeltaSink) or getattr(self.sink, "ids", "key") == "position"):
            raise ValueError(
                f"sink: records of a {self.source.kind} share their positions, so use ids by key or template, and no"
                " Delta table"
            )
        if not isinstance(self.source, KafkaSource) and self.errors.cluster is None and self.errors.collection is None:
            raise ValueError(
                "errors.cluster: the source has no brokers, so say where the error topic is, or errors.collection"
            )
        if self.errors.collection is not None:
            for part in (self.source, self.sink):
                if getattr(part, "collection", None) == self.errors.collection:
                    raise ValueError("errors.collection is that of the source or the sink: dead letters need their own")
        if source_kinds()[self.source.kind].feeder and self.deployment == AIRFLOW:
            raise ValueError(f"source: a {self.source.kind} is captured by a worker: say deployment: service")
        if (
            isinstance(self.source, KafkaSource)
            and self.errors.collection is None
            and self.source.reads(self.errors_topic)
            and self.errors.cluster is None
        ):
            raise ValueError("errors.topic is a topic of the source: what fails would come again for ever")
        if not self.divided and self.resources.workers > 1:
            raise ValueError(
                "resources.workers: several workers divide a topic's partitions by its consumer group: say"
                " source.assignment: group"
            )
        if self.divided and self.deployment == AIRFLOW:
            raise ValueError(
                "source.assignment, resources.workers: on Spark one query reads all lanes, in as many tasks as the"
                " cluster has cores: say all, and one worker, or deployment: service"
            )
        if isinstance(self.sink, CollectionSink) and self.sink.history is not None:
            if not source_kinds()[self.source.kind].ordered_by_key:
                raise ValueError(f"sink.history: a {self.source.kind} may have changes of one key in several lanes")
            if isinstance(self.source, KafkaSource) and len(self.source.topics) != 1 and not self.sink.divided:
                raise ValueError(
                    "sink.history: changes of one key come from one topic, whose partitions are by that key"
                )
        output = getattr(self.sink, "topic", None)
        comes_back = isinstance(self.source, KafkaSource) and isinstance(output, str) and self.source.reads(output)
        if comes_back and self._one_cluster():
            raise ValueError("sink.topic is a topic of the source: what goes out would come in again for ever")
        return self

    @model_validator(mode="after")
    def _events_have_columns(self) -> Self:
        """Events of a collection's changes have its columns."""
        if isinstance(self.sink, KafkaSink):
            named = getattr(self.source, "collection", "")
            object.__setattr__(self, "sink", self.sink.with_columns_of(named))
        return self

    @model_validator(mode="after")
    def _fits_tables(self) -> Self:
        if isinstance(self.sink, CollectionSink) and (self.sink.create or self.sink.on_schema_change == "alter"):
            if not source_kinds()[self.source.kind].tables:
                raise ValueError(
                    f"sink.create, sink.on_schema_change: a {self.source.kind} does not say which columns its records"
                    " have: create the collection"
                )
            if self.steps:
                raise ValueError(
                    "sink.create, sink.on_schema_change: the collection has the table's columns, and steps may give"
                    " others: leave out the steps, or create the collection"
                )
        several = len(getattr(self.source, "names", ())) > 1
        if several and isinstance(self.sink, CollectionSink) and not self.sink.divided:
            raise ValueError(
                f"sink.collection: each table has its own collection: name it by the table, as in"
                f" '{{table}}' or '{self.sink.collection}_{{table}}'"
            )
        return self

    def _one_cluster(self) -> bool:
        ours, theirs = getattr(self.source, "bootstrap", ()), getattr(self.sink, "bootstrap", ())
        return bool(set(ours) & set(theirs))

    @classmethod
    def parse(cls, value: Any, *, secrets: Mapping[str, str] | None = None, compiled: bool = True) -> Self:
        """Return the pipeline that `value` (JSON) declares, with `secrets` by path where `value` has none.

        Without `compiled`, its expressions and JSON Schemas are not compiled: a stranger's may take for ever
        (`pipelines/samples`). Raises PipelineInvalid with a problem for each wrong field (`problems`).
        """
        if not isinstance(value, Mapping):
            raise invalid([Problem("", "is an object with id, source and sink", "type")])
        whole: Any = value
        try:
            whole = with_secrets(value, secrets or {})
            return cls.model_validate(whole, context={UNCOMPILED: not compiled})
        except ValidationError as error:
            raise invalid(problems_of(error, whole)) from None
        except RecursionError:
            raise invalid([Problem("", "is nested too deep", "depth")]) from None

    def to_json(self) -> dict[str, Any]:
        """As JSON, without secrets; of one declaration always the same text."""
        found: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for part, declared in (("source", self.source), ("sink", self.sink)):
            for name in declared.of_rows:
                found[part].pop(name, None)
        for path in self.secret_paths():
            place = found
            *folders, last = path.split(".")
            for folder in folders:
                place = place[folder]
            del place[last]
        return found

    def secrets(self) -> dict[str, str]:
        """What `to_json` leaves out, in plain: by path, those that are set."""
        return secrets_of(self)

    def secret_paths(self) -> list[str]:
        """Where secrets may stand, set or not."""
        return sorted(_secret_paths(self))

    @property
    def errors_topic(self) -> str:
        return self.errors.topic or f"{self.id}.errors"

    @property
    def errors_cluster(self) -> KafkaCluster:
        if self.errors.cluster is not None:
            return self.errors.cluster
        assert isinstance(self.source, KafkaSource), "checked when it was made"
        return self.source

    @property
    def group(self) -> str:
        """The consumer group that positions are mirrored to."""
        return (self.source.group if isinstance(self.source, KafkaSource) else "") or f"millrace-{self.id}"

    @property
    def divided(self) -> bool:
        """Whether several workers divide the lanes: of topics by the consumer group, of others by leases."""
        if isinstance(self.source, KafkaSource):
            return self.source.assignment == "group"
        return self.resources.workers > 1

    def topics(self) -> dict[str, tuple[str, ...]]:
        """Its topics of Kafka by what they are for: ``input``, ``output``, ``error``."""
        output = () if isinstance(self.sink, CollectionSink | DeltaSink) else getattr(self.sink, "topic", None)
        return {
            "input": self.source.topics if isinstance(self.source, KafkaSource) else (),
            "output": (output,) if isinstance(output, str) else (),
            "error": () if self.errors.collection is not None else (self.errors_topic,),
        }

    def unordered(self) -> Problem | None:
        """Say why the sink's versions cannot order two documents of one id; None if the declaration allows it.

        Not a part of `parse`, so that pipelines of earlier builds still load.
        """
        sink, source = self.sink, self.source
        if not isinstance(sink, OpenSearchSink) or not isinstance(source, KafkaSource):
            return None
        if (
            not sink.versions or sink.ids == "position" or sink.version_field is not None or len(source.topics) == 1
        ):  # a pattern may match several
            return None
        words = (
            f"the versions are offsets, and those of {len(source.topics) or 'several'} topics order no two documents"
            " of one id: name the field that does, or say sink.versions: false (the later one wins)"
        )
        return Problem("sink.version_field", words, "versions")

    def restarts(self, other: Self) -> list[str]:
        """The fields in which `other` differs so that a running pipeline has to start again with them."""
        return sorted(
            name
            for name in type(self).model_fields
            if name not in self.live and getattr(self, name) != getattr(other, name)
        )


def _secret_paths(part: Any) -> set[str]:
    from pydantic import BaseModel, SecretStr

    found: set[str] = set()
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, SecretStr):
            found.add(name)
        elif isinstance(value, BaseModel):
            found |= {f"{name}.{inner}" for inner in _secret_paths(value)}
    return found
