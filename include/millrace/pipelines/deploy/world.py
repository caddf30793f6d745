"""The actions of a pipeline's saga on its Kafka, its OpenSearch, and this machine.

A created thing is recorded with its cluster (``input:flights <id>``): a pipeline may be pointed to another cluster
before it is deleted, and a thing of the same name there belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from opensearchpy import OpenSearch

from millrace.base.errors import InvalidArgument
from millrace.flows.declare.flow import Flow
from millrace.flows.errors.topic import make_error_topic
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.range_host import topic_admin
from millrace.flows.sinks.kafka.model import KafkaSink
from millrace.flows.sinks.opensearch import index as indices
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.deploy.reach import require_reachable
from millrace.pipelines.store.records import Record

SECONDS: Final = 15.0


class RealWorld:
    """The protocol World of the runner."""

    def __init__(self, deployment: Deployment, pipeline_of: Callable[[Record], Flow]) -> None:
        """`pipeline_of` returns a record's pipeline with its secrets."""
        self._deployment, self._pipeline_of = deployment, pipeline_of

    def plan(self, step: str, record: Record) -> tuple[str, ...]:
        pipeline = self._pipeline_of(record)
        if step == "index_base" and isinstance(pipeline.sink, OpenSearchSink):
            require_reachable(pipeline)
            sink = pipeline.sink
            with _client(sink) as client:
                home = indices.cluster_of(client, sink)
                if indices.exists(client, sink):
                    return ()
            if not sink.create_index:
                raise InvalidArgument(f"there is no index {sink.index_base!r}: create it, or set sink.create_index")
            return (f"{sink.index_base} {home}",)
        if step == "topics":
            require_reachable(pipeline)
            topic_admin.require_no_loop(pipeline)
            found = []
            for kind, cluster, topics in _topics(pipeline):
                there = topic_admin.look(cluster)
                missing = [topic for topic in topics if topic not in there.topics]
                if missing and kind == "error" and not pipeline.errors.create:
                    raise InvalidArgument(f"there is no error topic {missing[0]!r}: create it, or set errors.create")
                found += [f"{kind}:{topic} {there.cluster}" for topic in missing]
            return tuple(dict.fromkeys(found))
        return (record.id,) if step == "deployment" else ()

    def make(self, step: str, record: Record, things: tuple[str, ...]) -> None:
        pipeline = self._pipeline_of(record)
        if step == "index_base" and isinstance(pipeline.sink, OpenSearchSink) and things:
            with _client(pipeline.sink) as client:
                indices.make(client, pipeline.sink)
        elif step == "topics":
            for kind, cluster, _ in _topics(pipeline):
                names = [name for name, _ in _of(kind, things)]
                if kind == "error" and names:
                    make_error_topic(pipeline)
                else:
                    topic_admin.make(cluster, names)
        elif step == "deployment":
            self._deployment.write(pipeline)

    def undo(self, step: str, record: Record, things: tuple[str, ...]) -> tuple[str, ...]:
        if not things:
            return ()
        pipeline = self._pipeline_of(record)
        if step == "deployment":
            self._deployment.stop(record.id)
            self._deployment.release(pipeline)
            self._deployment.remove(record.id)
            return ()
        gone: set[str] = set()
        if step == "index_base" and isinstance(pipeline.sink, OpenSearchSink):
            with _client(pipeline.sink) as client:
                here = indices.cluster_of(client, pipeline.sink)
                for thing in things:
                    index, _, home = thing.partition(" ")
                    if home == here:
                        indices.remove(client, pipeline.sink, index)
                        gone.add(thing)
        elif step == "topics":
            for kind, cluster, _ in _topics(pipeline):
                recorded = _of(kind, things)
                here = topic_admin.look(cluster).cluster if recorded else ""
                topic_admin.delete(cluster, [name for name, home in recorded if home == here])
                gone |= {f"{kind}:{name} {home}" for name, home in recorded if home == here}
        return tuple(thing for thing in things if thing not in gone)


def _of(kind: str, things: Iterable[str]) -> list[tuple[str, str]]:
    """Return name and cluster of the things of `kind`."""
    found = [each.partition(":")[2].partition(" ") for each in things if each.startswith(f"{kind}:")]
    return [(name, home) for name, _, home in found]


def _topics(pipeline: Flow) -> list[tuple[str, KafkaCluster, tuple[str, ...]]]:
    """Return kind, cluster and names of the pipeline's topics."""
    found: list[tuple[str, KafkaCluster, tuple[str, ...]]] = []
    if isinstance(pipeline.source, KafkaSource):
        found.append(("input", pipeline.source, pipeline.source.topics))
    if isinstance(pipeline.sink, KafkaSink):
        found.append(("output", pipeline.sink, (pipeline.sink.topic,)))
    if pipeline.errors.collection is None:
        found.append(("error", pipeline.errors_cluster, (pipeline.errors_topic,)))
    return found


@contextmanager
def _client(sink: OpenSearchSink) -> Iterator[OpenSearch]:
    client = indices.client_of(sink, seconds=SECONDS)
    try:
        yield client
    finally:
        client.close()
