"""Kafka as the log, beside what every backend promises (tests/conformance).

Its topics, limits, logins and retention.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from kafka.admin import KafkaAdminClient
from typer.testing import CliRunner

from millrace.base.errors import (
    ChannelNotFound,
    EntryTooLarge,
    InvalidSettings,
    LogUnavailable,
    PositionTruncated,
)
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.client.database import connect
from millrace.commands.main import app
from millrace.log.kafka.service import Kafka, open_location
from millrace.log.kafka.settings import KafkaPartition, KafkaSettings
from millrace.log.kafka.writer import KafkaWriter
from millrace.log.registry import open_service
from millrace.message.ids import EARLIEST, LogId
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.ingest.ingester import IngestReport, run_ingest
from millrace.node.ingest.log_connection import LogConnection
from millrace.node.range_loop.schedule import START
from millrace.rpc.remote_log import RemoteLogService
from millrace.tables.wal.table import WalTable
from tests import running_brokers
from tests.conformance.backends import deployment_name
from tests.conformance.reading import read_all
from tests.node.log_samples import accepted, opening, tick
from tests.node.schedules import log_schedule

DEADLINE = 30.0
WORDS = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("word", "string", False)), "id")


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return deployment_name(tmp_path)


@pytest.fixture
def location(prefix: str) -> str:
    return f"{running_brokers.kafka().address}/{prefix}"


@pytest.fixture
def service(location: str) -> Iterator[Kafka]:
    with open_location(location, {"max_entry_bytes": 100_000}) as service:
        service.create("p")
        yield service


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker of these tests alone, with SASL/PLAIN, which they may kill."""
    with KafkaBroker(tmp_path_factory.mktemp("guarded"), settings=Settings(), sasl=True).start() as broker:
        yield broker


@pytest.fixture
def logged_in(guarded: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> KafkaBroker:
    assert guarded.credentials is not None
    for name, value in guarded.credentials.environment().items():
        monkeypatch.setenv(name, value)
    return guarded


def plain_producer() -> Producer:
    return Producer({"bootstrap.servers": running_brokers.kafka().address, "linger.ms": 0})


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "options", "words"),
    [
        ("", {}, "location of a Kafka log"),
        ("host", {}, "location of a Kafka log"),
        ("host:1,:2", {}, "location of a Kafka log"),
        ("host:1/a b", {}, "prefix"),
        ("host:1", {"sasl.password": "x"}, "MILLRACE_LOG_PASSWORD"),
        ("host:1", {"ssl.key.password": "x"}, "MILLRACE_LOG_PASSWORD"),
        ("host:1", {"acks": "1"}, "unknown kafka setting"),
        ("host:1", {"enable.idempotence": "false"}, "not an option of the URL"),
        ("host:1", {"max_entry_bytes": "many"}, "whole number"),
        ("host:1", {"max_entry_bytes": "0"}, "between"),
        ("host:1", {"fsync": "perhaps"}, "true or false"),
        ("host:1", {"replication_factor": "2", "min_insync_replicas": "3"}, "not be more"),
    ],
)
def test_settings_that_cannot_be_right_are_refused_with_what_is_allowed(
    location: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidSettings, match=words):
        KafkaSettings.of(location, options)


@pytest.mark.parametrize("url", ["kafka://user:secret@host:1/p", "kafka://host:1/p?a=1&a=2", "kafka://host:1/p?a"])
def test_a_url_with_credentials_or_malformed_options_is_refused_and_shows_no_secret(url: str) -> None:
    with pytest.raises(InvalidSettings) as raised:
        open_service(url)
    assert "secret" not in str(raised.value)


def test_topics_have_the_deployments_prefix_and_names_of_any_kind() -> None:
    settings = KafkaSettings.of("host:1/a.b", {})
    names = ["p0", "by-dev-rootcoord-dml_0", "ä ö", ".", "a.b", "x_5F", "%41", "\n"]
    topics = [settings.topic(name) for name in names]
    assert [settings.decode_name(topic) for topic in topics] == names
    # Kafka takes '.' and '_' for one another in its metrics, and refuses names that collide so.
    assert len({topic.replace(".", "_") for topic in topics}) == len(names)
    others = ["a.p0", "a.b", "a.b.", "a.b.p0.x", "a.b.p_zz", "a.b._", "a.b._FF"]
    assert [settings.decode_name(topic) for topic in others] == [None] * len(others)


# --- topics -----------------------------------------------------------------------------------------------------------


def test_a_topic_keeps_everything_and_the_brokers_give_the_stamps(service: Kafka) -> None:
    found = service.configs(service.settings.partition_of("p"))
    assert {name: found[name] for name in service.settings.topic_configs()} == service.settings.topic_configs()
    assert (found["retention.ms"], found["cleanup.policy"]) == ("-1", "delete")
    assert found["message.timestamp.type"] == "LogAppendTime"


def test_a_topic_that_would_lose_entries_by_itself_is_refused(service: Kafka) -> None:
    topic = service.settings.topic("other")
    admin = KafkaAdminClient(bootstrap_servers=running_brokers.kafka().address)
    admin.create_topics({topic: {"num_partitions": 1, "replication_factor": 1, "configs": {"retention.ms": "1000"}}})
    admin.close()
    with pytest.raises(InvalidSettings, match=r"retention\.ms=-1 \(it has 1000\)"):
        service.open("other")


def test_any_kafka_client_reads_and_writes_the_same_entries(service: Kafka) -> None:
    log, topic = service.open("p"), service.settings.topic("p")
    log.append([b"ours"])
    producer = plain_producer()
    producer.produce(topic, b"theirs", partition=0)
    producer.flush(DEADLINE)
    assert [value for _, value in read_all(log)] == [b"ours", b"theirs"]
    consumer = Consumer({"bootstrap.servers": running_brokers.kafka().address, "group.id": "somebody"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[bytes | None] = []
    until = time.monotonic() + DEADLINE
    while len(values) < 2 and time.monotonic() < until:
        values += [message.value() for message in consumer.consume(2, 1.0)]
    consumer.close()
    assert values == [b"ours", b"theirs"]


@contextmanager
def intruder(topic: str) -> Iterator[None]:
    """Somebody else who writes to a topic all the while."""
    producer, stop = plain_producer(), threading.Event()

    def intrude() -> None:
        while not stop.is_set():
            producer.produce(topic, b"theirs", partition=0)
            producer.poll(0.001)

    writing = threading.Thread(target=intrude)
    writing.start()
    try:
        yield
    finally:
        stop.set()
        writing.join(DEADLINE)
        producer.flush(DEADLINE)


@pytest.mark.slow
def test_an_append_beside_another_writer_gets_the_ids_of_its_own_entries(service: Kafka) -> None:
    log = service.open("p")
    ours = {}
    with intruder(service.settings.topic("p")):
        for number in range(200):
            values = [b"%d.%d" % (number, index) for index in range(5)]
            ours |= dict(zip(log.append(values), values, strict=True))
    entries = dict(read_all(log))
    assert {entry_id: entries[entry_id] for entry_id in ours} == ours
    assert len(entries) > len(ours)


@pytest.mark.slow
def test_values_of_one_append_between_which_another_writer_wrote_are_looked_up(service: Kafka) -> None:
    """Reports are asked of some values alone (a hundred bytes each: of every 600th or so).

    The others are in between.
    """
    service.create("shared")
    log = service.open("shared")
    answers: list[tuple[Sequence[LogId], list[bytes]]] = []
    until = time.monotonic() + DEADLINE
    with intruder(service.settings.topic("shared")):
        while not any(len(values) <= ids[-1].entry - ids[0].entry for ids, values in answers) or len(answers) < 3:
            assert time.monotonic() < until, "nobody ever wrote between values of one append"
            values = [b"%d.%d" % (len(answers), index) + b"-" * 100 for index in range(30_000)]
            answers.append((log.append(values), values))
    entries = dict(read_all(log))
    for ids, values in answers:
        assert [entries[each] for each in ids] == values


def test_of_equal_records_by_several_writers_the_first_ones_are_taken_and_what_is_gone_is_an_error() -> None:
    topic = [b"a", b"b", b"x", b"b", b"b", b"c"]
    gone = False

    def read(start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        if gone:
            raise PositionTruncated("gone", earliest=(0, 9))
        return iter(list(enumerate(topic))[start:stop])

    writer = KafkaWriter(KafkaSettings.of("localhost:9092/p", {}), KafkaPartition("t"), exists=lambda: True, read=read)
    assert writer._all_places([b"a", b"b", b"b", b"c"], [0, 3], [0, 5]) == [0, 1, 3, 5]
    assert writer._all_places([b"a", b"b", b"c"], [0, 1, 2], [0, 4, 5]) == [0, 4, 5]
    with pytest.raises(LogUnavailable, match="producer's sequence"):
        writer._all_places([b"a", b"z", b"c"], [0, 2], [0, 5])
    gone = True
    with pytest.raises(LogUnavailable, match="producer's sequence"):
        writer._all_places([b"a", b"b", b"c"], [0, 2], [0, 5])
    assert list(writer._all_places([b"a", b"b"], [0, 1], [7, 8])) == [7, 8]


@pytest.mark.slow
def test_large_appends_of_several_callers_at_once_all_get_their_ids(service: Kafka) -> None:
    service.create("crowd")
    log = service.open("crowd")
    batch = pa.array([b"%06d" % number + b"x" * 1000 for number in range(8000)], pa.large_binary())
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: log.append(batch), range(9)))
    for ids in answers:
        assert all(a < b for a, b in pairwise(ids))
    assert len({each for ids in answers for each in ids}) == 9 * 8000


# --- limits -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_into_the_clients_queue_waits_for_room(location: str) -> None:
    with open_location(location, {"queue_bytes": 1 << 20, "max_entry_bytes": 200_000}) as service:
        service.create("small")
        log = service.open("small")
        values = [bytes([number % 256]) * 150_000 for number in range(100)]
        ids = log.append(values)
        assert read_all(log, max_bytes=4 << 20) == list(zip(ids, values, strict=True))


def test_entries_are_bounded_by_what_the_topic_takes_whatever_the_settings_say(service: Kafka, location: str) -> None:
    with open_location(location, {"max_entry_bytes": 50 << 20}) as wide:
        log = wide.open("p")
        with pytest.raises(EntryTooLarge):
            log.append([b"small", b"x" * (2 << 20)])
        assert log.append([b"x" * (1 << 20)]) == [LogId(0, 0)]


@pytest.mark.slow
def test_an_entry_refused_in_the_midst_of_an_append_fails_all_of_it_and_nothing_stands_behind_it(location: str) -> None:
    with open_location(location, {"max_entry_bytes": 8 << 20}) as service:
        service.create("narrowed")
        log, topic = service.open("narrowed"), service.settings.topic("narrowed")
        log.append([b"first"])
        admin = AdminClient({"bootstrap.servers": running_brokers.kafka().address})
        entry = ConfigEntry("max.message.bytes", str(2 << 20), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(DEADLINE)
        until = time.monotonic() + DEADLINE
        while service.configs(KafkaPartition(topic))["max.message.bytes"] != str(2 << 20):
            assert time.monotonic() < until
        values = [b"%04d" % number * 250 for number in range(4000)]
        for _ in range(5):  # the client tells what stopped it before or behind what became of the entry
            with pytest.raises(EntryTooLarge):
                log.append([*values, b"x" * (4 << 20), *values])
        found = [value for _, value in read_all(log)]
        places = [place for place, value in enumerate(found) if value == values[0]] + [len(found)]
        assert found[0] == b"first"
        for start, stop in pairwise(places):
            assert found[start:stop] == values[: stop - start]
        log.append([b"last"])
        assert [value for _, value in read_all(log)] == [*found, b"last"]


def test_a_host_that_appends_and_reads_never_loads_the_administration(service: Kafka, location: str) -> None:
    program = f"""
import sys
from millrace.log.kafka.service import open_location
with open_location({location!r}, {{}}) as service:
    log = service.open(service.names()[0])
    end = log.append([b"a"])[0].following()
    assert log.end() == end
    assert log.read(end, timeout=0.0).next == end
    print("kafka" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "False\n"


@pytest.mark.slow
def test_a_topic_that_is_gone_under_a_handle_is_no_channel_any_more(service: Kafka, location: str) -> None:
    with open_location(location, {}) as other:
        for name in ["p", "q", "r", "s", "t"]:  # brokers take a deletion in a moment after it was answered
            if name != "p":
                service.create(name)
            log = service.open(name)
            log.append([b"a"])
            other.drop(name)
            with pytest.raises(ChannelNotFound):
                log.describe()
            with pytest.raises(ChannelNotFound):
                log.read(EARLIEST)


def test_retention_gives_up_what_is_old_or_beyond_the_size_but_nothing_that_is_needed(service: Kafka) -> None:
    log = service.open("p")
    ids = [log.append([b"x" * 10_000])[0] for _ in range(50)]
    log.enforce_retention(allowed=ids[40], retention_ms=3_600_000)
    assert log.describe().begin == EARLIEST
    log.enforce_retention(allowed=ids[40], retention_bytes=400_000)
    assert EARLIEST < log.describe().begin < ids[20]
    log.enforce_retention(allowed=ids[40], retention_ms=1)
    assert log.describe().begin == ids[40]
    with pytest.raises(PositionTruncated) as raised:
        log.read(ids[39])
    assert raised.value.earliest == tuple(ids[40])


def test_a_log_that_is_whole_verifies(service: Kafka) -> None:
    log = service.open("p")
    log.append([b"x" * 1000] * 300)
    log.truncate(LogId(0, 100))
    report = log.verify()
    assert (report.entries, report.bytes, report.first_bad) == (200, 200_000, None)


# --- brokers that refuse, are away, or come back ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_login_by_sasl_plain_serves_every_call(logged_in: KafkaBroker) -> None:
    with open_service(logged_in.url) as service:
        service.create("sasl")
        log = service.open("sasl")
        ids = log.append([b"a", b"b"])
        assert read_all(log) == list(zip(ids, [b"a", b"b"], strict=True))
        service.move_group("g", "sasl", ids[1])
        assert (service.group_position("g", "sasl"), service.groups()) == (ids[1], ["g"])
        log.truncate(ids[1])
        assert log.describe().begin == ids[1]
        service.drop("sasl")


def test_a_login_without_or_with_a_wrong_password_is_refused_and_the_error_shows_none(
    guarded: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MILLRACE_LOG_{name}", raising=False)
    with pytest.raises(InvalidSettings, match="MILLRACE_LOG_USERNAME"):
        open_service(guarded.url)
    monkeypatch.setenv("MILLRACE_LOG_USERNAME", "millrace")
    monkeypatch.setenv("MILLRACE_LOG_PASSWORD", "not-the-secret")
    with pytest.raises(InvalidSettings, match="refuse") as raised:
        open_service(guarded.url + "&deadline=5")
    assert "not-the-secret" not in str(raised.value)


@pytest.mark.slow
def test_without_a_broker_every_call_fails_within_its_deadline_and_works_again_when_one_is_back(
    logged_in: KafkaBroker,
) -> None:
    with open_service(logged_in.url + "&deadline=3") as service:
        service.create("back")
        log = service.open("back")
        ids = log.append([b"before"])
        logged_in.kill()
        begun = time.monotonic()
        for call in (lambda: log.append([b"lost", b"too"]), lambda: log.read(EARLIEST), log.describe, service.names):
            with pytest.raises(LogUnavailable):
                call()
        assert time.monotonic() - begun < DEADLINE
        logged_in.start()
        ids += _when_back(lambda: log.append([b"after"]))
        entries = read_all(log)
        # What was purged was never sent: nobody was there to take it.
        assert entries == list(zip(ids, [b"before", b"after"], strict=True))


@pytest.mark.slow
def test_an_append_that_is_under_way_when_the_broker_is_killed_is_acknowledged_when_it_is_back(
    logged_in: KafkaBroker,
) -> None:
    with open_service(logged_in.url) as service:
        service.create("patient")
        log = service.open("patient")
        ids = log.append([b"0"])
        appended: list[LogId] = []
        values = [b"%d" % number + b"x" * 1000 for number in range(20_000)]
        appender = threading.Thread(target=lambda: appended.extend(log.append(values)))
        appender.start()
        log.read(ids[0].following(), timeout=DEADLINE)  # some of it is there
        logged_in.kill()
        logged_in.start()
        appender.join(DEADLINE * 2)
        assert not appender.is_alive()
        assert read_all(log) == list(zip([*ids, *appended], [b"0", *values], strict=True))


@pytest.mark.slow
def test_a_deployment_works_through_the_logs_server_and_only_hosts_of_ours_log_in(
    logged_in: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path, log=logged_in.url, append_deadline=DEADLINE)
    with connect(settings=settings) as client:
        client.catalog.ensure_pchannels(1)
        collection = client.catalog.create_collection("words", WORDS)
        producer = client.new_producer()
        producer.insert(collection, pa.table({"id": [1, 2, 3], "word": ["a", "b", "c"]}))
        producer.delete(collection, [2])
        # The streaming node reads the brokers directly.
        with LogConnection(settings).service() as direct:
            assert not isinstance(direct, RemoteLogService)
            ingest_to_end(settings, direct)
        table = client.collection("words").read(deadline=DEADLINE)
        assert dict(zip(table["id"].to_pylist(), table["word"].to_pylist(), strict=True)) == {1: "a", 3: "c"}
        monkeypatch.setenv("MILLRACE_LOG", settings.log)
        for name in ("USERNAME", "PASSWORD"):
            monkeypatch.delenv(f"MILLRACE_LOG_{name}")
        for words in (["log", "describe"], ["log", "verify"], ["log", "truncate", "--dry-run"], ["status"]):
            result = CliRunner().invoke(app, [*words, "--data", str(tmp_path)])
            assert result.exit_code == 0, result.output
        client.connection.service.shutdown()


@pytest.mark.parametrize("goes_on", [False, True], ids=["it ends early", "it goes on with other entries"])
def test_a_log_that_lost_what_the_wal_has_is_planned_and_says_so(service: Kafka, tmp_path: Path, goes_on: bool) -> None:
    path = Path(WalTable.create(tmp_path / "wal").uri)

    def work() -> list[IngestReport]:
        planner = log_schedule(service, WalTable.open(path), parked=tmp_path / "parked")
        plans = planner.plan(planner.next_offset(START))
        return [run_ingest(plan, log=service.open("p"), table=path) for plan in plans]

    service.open("p").append([opening(), accepted(), accepted(), accepted()])
    reports = work()
    assert [report.failure for report in reports] == [None]
    WalCommitter(WalTable.open(path)).commit(reports)
    service.drop("p")
    service.create("p")
    service.open("p").append([opening(), accepted()])
    if goes_on:
        service.open("p").append([accepted(), tick(), accepted()])
    failures = [report.failure for report in work()]
    assert [(failure.code, failure.retriable) for failure in failures if failure] == [("LOG_REGRESSED", False)]


def _when_back(append: object) -> list[LogId]:
    until = time.monotonic() + DEADLINE
    while True:
        try:
            return append()  # type: ignore[operator,no-any-return]
        except LogUnavailable:
            assert time.monotonic() < until
