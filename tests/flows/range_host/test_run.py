"""A pipeline run on a real Kafka and a real OpenSearch.

In = out + errors + filtered, by content, and again without effect.
"""

from __future__ import annotations

import json
import pickle
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from millrace.base.errors import InvalidSettings, MillraceError
from millrace.base.metrics import Metrics
from millrace.flows.declare.flow import Flow
from millrace.flows.errors.redrive import redrive
from millrace.flows.errors.selection import Selection
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.positions import change_positions, positions_of
from millrace.flows.range_host.status import State, metrics_path
from millrace.flows.range_host.supervision import Supervision, read_status, want
from millrace.pipelines.declaration import pipeline_of
from tests.flows.range_host.flights import Flights
from tests.waiting import until


def _to_the_end(flights: Flights, *, metrics: Metrics | None = None, pipeline: Flow | None = None) -> dict[str, int]:
    return run(
        FlowRun(flights.settings, pipeline or flights.pipeline),
        stop=threading.Event(),
        until_end=True,
        metrics=metrics,
    )


@pytest.mark.slow
def test_what_comes_in_is_in_the_index_or_in_the_error_topic(tmp_path: Path) -> None:
    flights, metrics = Flights(tmp_path), Metrics()
    flights.send((f"k{n}", {"flight": str(n)} if n % 10 else {"flight": "bad"}) for n in range(1000))
    flights.send([("k1", None), ("k2", b"{"), ("k3", {"flight": 3000})])
    reached = _to_the_end(flights, metrics=metrics)
    assert sum(reached.values()) == 1003
    index = flights.index()
    expected = {f"k{n}": n for n in range(1000) if n % 10 and n != 1} | {"k3": 3000}
    assert {key: value["flight"] for key, value in index.items()} == expected
    assert all(index[key]["_version"] == flights.sent[key][1] for key in index if key != "k2")
    errors = flights.errors()
    assert len(errors) == 101
    told = {message.key().decode(): dict(message.headers()) for message in errors}
    assert told["k10"]["__connect.errors.topic"] == flights.id.encode()
    assert told["k10"]["__connect.errors.class.name"] == b"number"
    assert told["k10"]["__connect.errors.exception.class.name"] == b"CAST"
    assert told["k10"]["__connect.errors.connector.name"] == flights.id.encode()
    assert told["k2"]["__connect.errors.stage"] == b"VALUE_CONVERTER"
    partition, offset = flights.sent["k10"]
    assert told["k10"]["__connect.errors.partition"] == str(partition).encode()
    assert told["k10"]["__connect.errors.offset"] == str(offset).encode()
    by_key = {message.key(): message.value() for message in errors}
    assert by_key[b"k10"] == json.dumps({"flight": "bad"}).encode()
    status = read_status(flights.settings, flights.id)
    assert (status.state, sum(task.lag for task in status.tasks)) == (State.STOPPED, 0)
    assert [sum(getattr(task, f"records_{name}") for task in status.tasks) for name in ("in", "out", "error")] == [
        1003,
        902,
        101,
    ]
    page = metrics_path(flights.settings, flights.id).read_text()  # as the worker left it at its end
    for family in (
        "flow_rows_total",
        "flow_lag_records",
        "flow_latency_seconds_count",
        "flow_bulks_total",
        "flow_retries_total",
    ):
        assert f"millrace_{family}" in page
    for family in ("flow_cpu_seconds_total", "flow_memory_bytes"):
        told_of = re.search(rf'^millrace_{family}{{flow="{flights.id}"}} (.*)$', page, re.MULTILINE)
        assert told_of is not None
        assert float(told_of[1]) > 0, family
    for family in ("flow_lane_cpu_seconds_total", "flow_lane_range_bytes"):
        by_task = re.findall(
            rf'^millrace_{family}{{flow="{flights.id}",lane="{flights.id}-[01]"}} (.*)$', page, re.MULTILINE
        )
        assert len(by_task) == 2
        assert all(float(each) > 0 for each in by_task), family
    assert all(task.cpu_seconds > 0 and task.range_bytes > 0 for task in status.tasks)
    # The consumer group says where it stands, for other tools.
    consumer = Consumer({"bootstrap.servers": flights.kafka.address, "group.id": flights.pipeline.consumer_group})
    places = consumer.committed([TopicPartition(flights.id, number) for number in range(2)], timeout=20)
    assert {f"{flights.id}-{place.partition}": place.offset for place in places} == reached
    consumer.close()
    # Again, from the beginning: the same documents in the same versions.
    change_positions(flights.settings, flights.id, dict.fromkeys(reached, 0))
    assert _to_the_end(flights) == reached
    assert flights.index() == index


@pytest.mark.slow
def test_a_redrive_brings_what_can_be_mended_and_twice_is_as_once(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1)
    flights.send(
        [("a", {"flight": "1x"}), ("b", {"flight": 2}), ("c", b"{"), ("d", {"flight": "4x"}), ("d", {"flight": 5})]
    )
    _to_the_end(flights)
    assert {key: value["flight"] for key, value in flights.index().items()} == {"b": 2, "d": 5}
    mended = pipeline_of(
        {**flights.declared, "steps": [{"kind": "compute", "fields": {"flight": "size(string(doc.flight))"}}]}
    )
    counted = redrive(flights.settings, mended, Selection(kind="CAST"), dry_run=True)
    assert (counted.looked_at, counted.selected, counted.written) == (3, 2, 0)
    chosen = redrive(flights.settings, mended, Selection(kind="CAST"))
    assert (chosen.selected, chosen.written, chosen.stale, chosen.failed_again) == (2, 1, 1, 0)
    index = flights.index()
    # What came later stays: the older record of d does not go over it.
    assert {key: value["flight"] for key, value in index.items()} == {"a": 2, "b": 2, "d": 5}
    everything = redrive(flights.settings, mended)
    assert (everything.written, everything.stale, everything.failed_again) == (1, 1, 1)
    assert flights.index() == index
    assert redrive(flights.settings, mended).looked_at == 0
    assert redrive(flights.settings, mended, again=True).looked_at == 3


@pytest.mark.slow
def test_what_the_sink_refuses_stops_the_task_with_its_cause_until_it_is_recovered(tmp_path: Path) -> None:
    flights = Flights(
        tmp_path,
        partitions=1,
        sink={"create_index": False},
        failure_threshold=2,
        recovery={"interval_minutes": 60, "attempts": 3},
    )
    flights.send([("a", {"flight": 1})])
    definition, stop, metrics = FlowRun(flights.settings, flights.pipeline), threading.Event(), Metrics()
    thread = threading.Thread(target=run, args=(definition,), kwargs={"stop": stop, "metrics": metrics})
    thread.start()
    try:
        task = f"{flights.id}-0"
        supervision = Supervision(flights.settings, flights.pipeline)
        until(lambda: task in supervision.tasks and supervision.tasks[task].failed)
        known = supervision.tasks[task]
        assert (known.failures, known.code) == (2, "SINK_REFUSED")
        assert flights.id in known.cause
        assert known.retry_at is not None
        assert known.retry_at - time.time() > 3000
        failed = f'millrace_flow_failed_lanes{{flow="{flights.id}"}} 1.0'
        until(lambda: failed in metrics.render().decode(), "the failed task is told of")
        assert "millrace_flow_failures_total{" in metrics.render().decode()
        # Mended, and asked for: it goes on at once.
        from opensearchpy import OpenSearch

        OpenSearch(flights.opensearch.url).indices.create(index=flights.id)
        want(flights.settings, flights.id, restart="failed")
        until(lambda: positions_of(flights.settings, flights.id)[task].position)
        # Paused, it takes nothing; resumed, it goes on.
        want(flights.settings, flights.id, paused=True)
        until(lambda: read_status(flights.settings, flights.id).state is State.PAUSED)
        flights.send([("b", {"flight": 2})])
        until(lambda: read_status(flights.settings, flights.id).tasks[0].lag)
        assert set(flights.index()) == {"a"}
        want(flights.settings, flights.id, paused=False)
        until(lambda: not read_status(flights.settings, flights.id).tasks[0].lag)
        assert set(flights.index()) == {"a", "b"}
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


@pytest.mark.slow
def test_documents_that_the_index_holds_newer_are_counted_as_stale_and_not_as_out(tmp_path: Path) -> None:
    from opensearchpy import OpenSearch

    flights = Flights(tmp_path, partitions=1)
    client, metrics = OpenSearch(flights.opensearch.url), Metrics()
    client.index(index=flights.id, id="k", body={"flight": 9}, params={"version": 50, "version_type": "external"})
    flights.send([("k", {"flight": 1}), ("other", {"flight": 2})])
    _to_the_end(flights, metrics=metrics)
    (task,) = read_status(flights.settings, flights.id).tasks
    assert (task.records_in, task.records_out, task.records_stale) == (2, 1, 1)
    assert f'{{flow="{flights.id}",lane="{flights.id}-0",outcome="stale"}} 1.0' in metrics.render().decode()
    assert flights.index()["k"]["flight"] == 9


@pytest.mark.slow
def test_latest_begins_at_the_end_and_error_asks_for_an_offset(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1, source={"offset_reset": "latest"})
    flights.send([("a", {"flight": 1})])
    FlowRun(flights.settings, flights.pipeline).prepare()
    flights.send([("b", {"flight": 2})])
    _to_the_end(flights)
    assert set(flights.index()) == {"b"}
    asking = pipeline_of(
        {**flights.declared, "id": f"{flights.id}-e", "source": {**flights.declared["source"], "offset_reset": "error"}}
    )
    with pytest.raises(InvalidSettings, match="no position"):
        _to_the_end(flights, pipeline=asking)
    change_positions(flights.settings, asking.id, {f"{flights.id}-0": 0})
    assert _to_the_end(flights, pipeline=asking) == {f"{flights.id}-0": 2}


@pytest.mark.slow
def test_a_topic_that_was_made_anew_is_an_error_however_many_records_it_has(tmp_path: Path) -> None:
    from confluent_kafka.cimpl import NewTopic

    flights = Flights(tmp_path, partitions=1)
    flights.send((f"k{n}", {"flight": n}) for n in range(5))
    task = f"{flights.id}-0"
    assert _to_the_end(flights) == {task: 5}
    flights.admin.delete_topics([flights.id])[flights.id].result(30)
    until(lambda: flights.id not in flights.admin.list_topics(timeout=20).topics, "the topic is gone")
    flights.admin.create_topics([NewTopic(flights.id, 1, 1)])[flights.id].result(30)
    flights.send((f"n{n}", {"flight": n}) for n in range(9))
    definition = FlowRun(flights.settings, flights.pipeline)
    definition.prepare()
    planner = definition.planner()
    (work,) = planner.plan(planner.ends(), max_bytes=1 << 20)
    done = definition.run(work)
    planner.close()
    assert done.failure is not None
    assert (done.failure.code, done.position) == ("LOG_REGRESSED", 5)
    assert "created again" in done.failure.message
    # Whoever sets the offset knows it.
    change_positions(flights.settings, flights.id, {task: 0})
    assert _to_the_end(flights) == {task: 9}
    assert {f"n{n}" for n in range(9)} <= set(flights.index())


@pytest.mark.slow
def test_a_partition_that_was_added_while_it_was_stopped_is_read_from_its_beginning(tmp_path: Path) -> None:
    from confluent_kafka.cimpl import NewPartitions

    flights = Flights(tmp_path, partitions=1, source={"offset_reset": "latest"})
    flights.send([("before", {"flight": 1})])
    _to_the_end(flights)
    flights.admin.create_partitions([NewPartitions(flights.id, 2)])[flights.id].result(30)
    until(lambda: len(flights.admin.list_topics(flights.id, timeout=20).topics[flights.id].partitions) == 2)
    producer = Producer({"bootstrap.servers": flights.kafka.address})  # the other one knows one partition
    producer.produce(flights.id, b'{"flight": 2}', "late", partition=1)
    assert producer.flush(60) == 0
    assert _to_the_end(flights) == {f"{flights.id}-0": 1, f"{flights.id}-1": 1}
    assert set(flights.index()) == {"late"}


@pytest.mark.slow
def test_what_goes_out_does_not_come_in_again_under_another_name_of_the_brokers(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1)
    elsewhere = flights.kafka.address.replace("127.0.0.1", "localhost")
    looped = pipeline_of({**flights.declared, "errors": {"topic": flights.id, "cluster": {"bootstrap": [elsewhere]}}})
    with pytest.raises(InvalidSettings, match="read again"):
        FlowRun(flights.settings, looped).prepare()


@pytest.mark.slow
def test_a_range_that_fails_is_tried_in_ever_smaller_ones_so_that_what_works_is_done(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1)
    flights.send((f"k{n}", {"flight": n}) for n in range(1000))
    definition = FlowRun(flights.settings, flights.pipeline)
    definition.prepare()
    planner = definition.planner()
    task, supervision = f"{flights.id}-0", Supervision(flights.settings, flights.pipeline)
    shares = []
    for _ in range(4):
        (work,) = planner.plan(planner.ends(), max_bytes=1 << 30)
        shares.append(work.share)
        supervision.failed(task, code="SINK_BUSY", cause="told to")
    assert shares == [1, 2, 4, 8]
    (work,) = planner.plan(planner.ends(), max_bytes=1 << 30)
    done = definition.run(replace(work, share=400))
    assert 0 < done.position <= 100, "40,000 records at once, by 400"
    planner.close()
    definition.stop_tasks()


@pytest.mark.slow
def test_of_two_workers_one_is_fenced_and_nothing_is_lost(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1)
    flights.send((f"k{n}", {"flight": n}) for n in range(200))
    first, second = (FlowRun(flights.settings, flights.pipeline) for _ in range(2))
    first.prepare()
    planner = first.planner()
    (work,) = planner.plan(planner.ends(), max_bytes=1 << 20)
    done = first.run(work)
    assert _to_the_end(flights) == {f"{flights.id}-0": 200}
    flights.send([("late", {"flight": 1})])
    result = first.committer(None).commit([done])
    assert (len(result.committed), len(result.fenced)) == (0, 1)
    assert _to_the_end(flights) == {f"{flights.id}-0": 201}
    failed = second.run(replace(work, start=10_000, end=10_001))
    assert failed.failure is not None
    assert failed.failure.code == "LOG_REGRESSED"
    planner.close()
    first.stop_tasks()
    second.stop_tasks()


@pytest.mark.slow
def test_a_restart_of_all_reaches_tasks_in_other_processes_of_spark(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1)
    driver = FlowRun(flights.settings, flights.pipeline)
    driver.prepare()
    elsewhere: FlowRun = pickle.loads(pickle.dumps(driver))  # as Spark's worker has it
    planner, committer = driver.planner(), driver.committer(None)
    tasks = []
    for number, restart in enumerate(["", "", "failed", "all", ""]):
        if restart:
            want(flights.settings, flights.id, restart=restart)
        flights.send([(f"k{number}", {"flight": number})])
        (work,) = planner.plan(planner.ends(), max_bytes=1 << 20)
        done = elsewhere.run(work)
        assert done.failure is None
        assert len(committer.commit([done]).committed) == 1
        (task,) = elsewhere._tasks.values()
        tasks.append(task[1])
    assert [task is tasks[0] for task in tasks] == [True, True, True, False, False]
    assert tasks[3] is tasks[4]
    assert len(flights.index()) == 5
    planner.close()
    committer.close()
    elsewhere.stop_tasks()


@pytest.mark.slow
def test_a_position_that_retention_removed_is_an_error_that_names_the_earliest(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1)
    flights.send((f"k{n}", {"flight": n}) for n in range(20))
    definition = FlowRun(flights.settings, flights.pipeline)
    definition.prepare()
    place = TopicPartition(flights.id, 0, 10)
    flights.admin.delete_records([place])[place].result(30)
    planner = definition.planner()
    (work,) = planner.plan(planner.ends(), max_bytes=1 << 20)
    done = definition.run(work)
    assert done.failure is not None
    assert (done.failure.code, done.position) == ("POSITION_TRUNCATED", 0)
    assert "the earliest is 10" in done.failure.message
    planner.close()
    change_positions(flights.settings, flights.id, {f"{flights.id}-0": 10})
    assert _to_the_end(flights) == {f"{flights.id}-0": 20}
    assert set(flights.index()) == {f"k{n}" for n in range(10, 20)}


@pytest.mark.slow
def test_brokers_that_ask_who_comes_get_an_answer(tmp_path: Path) -> None:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    from millrace.base.settings import Settings
    from millrace.brokers.kafka import KafkaBroker
    from tests import running_brokers

    with KafkaBroker(tmp_path / "kafka", settings=Settings(), sasl=True) as kafka:
        known = kafka.credentials
        assert known is not None
        client: dict[str, str | int | float | bool] = {
            "bootstrap.servers": kafka.address, "security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN",
            "sasl.username": known.username, "sasl.password": known.password,
        }  # fmt: skip
        admin, producer = AdminClient(client), Producer(client)
        admin.create_topics([NewTopic("guarded", 1, 1)])["guarded"].result(30)
        producer.produce("guarded", b'{"a": 1}', "k")
        assert producer.flush(30) == 0

        def declared(password: str) -> Flow:
            security = {
                "protocol": "SASL_PLAINTEXT",
                "mechanism": "PLAIN",
                "username": known.username,
                "password": password,
            }
            source = {
                "kind": "kafka",
                "bootstrap": [kafka.address],
                "topics": ["guarded"],
                "security": security,
                "socket_timeout_ms": 5000,
            }
            sink = {
                "kind": "opensearch",
                "hosts": [running_brokers.opensearch().url],
                "index_base": "asked-who-comes",
                "create_index": True,
            }
            return pipeline_of({"id": "guarded", "source": source, "sink": sink})

        settings = Settings(data_dir=tmp_path / "data")
        reached = run(FlowRun(settings, declared(known.password)), stop=threading.Event(), until_end=True)
        assert reached == {"guarded-0": 1}
        with pytest.raises(MillraceError, match="guarded"):
            run(FlowRun(settings, declared("wrong")), stop=threading.Event(), until_end=True)
