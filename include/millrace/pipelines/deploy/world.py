"""What the steps of a pipeline's saga do: on its Kafka, its OpenSearch, and this machine."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from typing import Any, Final

import httpx

from millrace.base.errors import InvalidArgument, LogUnavailable, SinkBusy, SinkRefused
from millrace.pipelines.deploy.deployment import Deployment
from millrace.pipelines.model.kafka import KafkaCluster
from millrace.pipelines.model.pipeline import Pipeline
from millrace.pipelines.model.sinks import KafkaSink, OpenSearchSink
from millrace.pipelines.model.sources import KafkaSource
from millrace.pipelines.store.records import Record

SECONDS: Final = 15.0


class RealWorld:
    """The protocol World of the runner."""

    def __init__(self, deployment: Deployment, pipeline_of: Callable[[Record], Pipeline]) -> None:
        """`pipeline_of` gives a record's pipeline with its secrets."""
        self._deployment, self._pipeline_of = deployment, pipeline_of

    def plan(self, step: str, record: Record) -> tuple[str, ...]:
        pipeline = self._pipeline_of(record)
        if step == "index_base" and isinstance(pipeline.sink, OpenSearchSink):
            with _client(pipeline.sink) as client:
                if _ask(client, "HEAD", pipeline.sink.index_base, allowed=(200, 404)).status_code == 200:
                    return ()
            if not pipeline.sink.create_index:
                raise InvalidArgument(
                    f"there is no index {pipeline.sink.index_base!r}: make it, or say sink.create_index"
                )
            return (pipeline.sink.index_base,)
        if step == "topics":
            found = []
            for kind, cluster, topics in _topics(pipeline):
                there = _existing(cluster, topics)
                missing = [topic for topic in topics if topic not in there]
                if missing and kind == "error" and not pipeline.errors.create:
                    raise InvalidArgument(f"there is no error topic {missing[0]!r}: make it, or say errors.create")
                found += [f"{kind}:{topic}" for topic in missing]
            return tuple(dict.fromkeys(found))
        return (record.id,) if step == "deployment" else ()

    def make(self, step: str, record: Record, things: tuple[str, ...]) -> None:
        pipeline = self._pipeline_of(record)
        if step == "index_base" and isinstance(pipeline.sink, OpenSearchSink):
            with _client(pipeline.sink) as client:
                for index in things:
                    answer = _ask(client, "PUT", index, body=pipeline.sink.index_body, allowed=(200, 400))
                    if answer.status_code == 400 and "resource_already_exists" not in answer.text:
                        raise SinkRefused(f"the index {index!r} cannot be made: {answer.text[:500]}")
        elif step == "topics":
            for kind, cluster, _ in _topics(pipeline):
                _change(cluster, _of(kind, things), make=True)
        elif step == "deployment":
            self._deployment.write(pipeline)

    def undo(self, step: str, record: Record, things: tuple[str, ...]) -> None:
        if not things:
            return
        if step == "deployment":
            self._deployment.remove(record.id)
            return
        pipeline = self._pipeline_of(record)
        if step == "index_base" and isinstance(pipeline.sink, OpenSearchSink):
            with _client(pipeline.sink) as client:
                for index in things:
                    _ask(client, "DELETE", index, allowed=(200, 404))
        elif step == "topics":
            for kind, cluster, _ in _topics(pipeline):
                _change(cluster, _of(kind, things), make=False)


def _of(kind: str, things: Iterable[str]) -> list[str]:
    return [each.partition(":")[2] for each in things if each.startswith(f"{kind}:")]


def _topics(pipeline: Pipeline) -> list[tuple[str, KafkaCluster, tuple[str, ...]]]:
    """Kind, cluster, names."""
    found: list[tuple[str, KafkaCluster, tuple[str, ...]]] = []
    if isinstance(pipeline.source, KafkaSource):
        found.append(("input", pipeline.source, pipeline.source.topics))
    if isinstance(pipeline.sink, KafkaSink):
        found.append(("output", pipeline.sink, (pipeline.sink.topic,)))
    found.append(("error", pipeline.errors_cluster, (pipeline.errors_topic,)))
    return found


def _admin(cluster: KafkaCluster) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient(dict(KafkaCluster.client_settings(cluster)))


def _existing(cluster: KafkaCluster, topics: Iterable[str]) -> set[str]:
    from confluent_kafka import KafkaException

    try:
        known = _admin(cluster).list_topics(timeout=SECONDS).topics
    except KafkaException as error:
        raise LogUnavailable(f"Kafka at {', '.join(cluster.bootstrap)}: {error.args[0].str()}") from None
    return {topic for topic in topics if topic in known}


def _change(cluster: KafkaCluster, topics: list[str], *, make: bool) -> None:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.cimpl import NewTopic

    if not topics:
        return
    admin = _admin(cluster)
    done = (
        admin.create_topics([NewTopic(topic, num_partitions=1) for topic in topics], operation_timeout=SECONDS)
        if make
        else admin.delete_topics(topics, operation_timeout=SECONDS)
    )
    for topic, future in done.items():
        try:
            future.result(timeout=2 * SECONDS)
        except KafkaException as error:
            so_already = KafkaError.TOPIC_ALREADY_EXISTS if make else KafkaError.UNKNOWN_TOPIC_OR_PART
            if error.args[0].code() == so_already:
                continue
            kind = LogUnavailable if error.args[0].retriable() else SinkRefused
            raise kind(f"topic {topic}: {error.args[0].str()}") from None
        except TimeoutError:
            raise LogUnavailable(f"topic {topic}: Kafka gave no answer in {2 * SECONDS:.0f} s") from None


def _client(sink: OpenSearchSink) -> httpx.Client:
    verify: Any = ssl.create_default_context(cadata=sink.ca) if sink.ca else True
    login = (sink.username, sink.password.get_secret_value()) if sink.username else None
    return httpx.Client(base_url=sink.hosts[0], auth=login, verify=verify, timeout=SECONDS)


def _ask(
    client: httpx.Client, method: str, index: str, *, allowed: tuple[int, ...], body: Any = None
) -> httpx.Response:
    try:
        answer = client.request(method, f"/{index}", json=body if method == "PUT" else None)
    except httpx.HTTPError as error:
        raise SinkBusy(f"OpenSearch at {client.base_url}: {error}", retry_after=1.0) from None
    if answer.status_code not in allowed:
        raise SinkRefused(
            f"OpenSearch at {client.base_url}: {method} {index}: {answer.status_code} {answer.text[:300]}"
        )
    return answer
