"""A redrive takes what is its pipeline's own, once, wherever it was cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from millrace.base.errors import ChannelNotFound, LogUnavailable
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.errors import redrive as redriving
from millrace.flows.errors.listing import error_page
from millrace.flows.errors.redrive import Progress, Redriven, redrive
from millrace.flows.errors.selection import EVERYTHING, Selection
from millrace.flows.errors.topic import headers_of
from millrace.flows.records import TRANSFORMATION, Failure, Record
from millrace.flows.sinks.delta.sink import OUTPUTS
from millrace.flows.sources.kafka.topics import Topics
from millrace.pipelines.declaration import pipeline_of
from millrace.storage.table import open_table
from tests.flows.brokers_in_process import Brokers, brokers

SHARED = "shared-errors"


@pytest.fixture
def kafka() -> Iterator[Brokers]:
    with brokers() as made:
        yield made


def _pipeline(kafka: Brokers, name: str) -> Flow:
    return pipeline_of(
        {
            "id": name,
            "source": {"kind": "kafka", "bootstrap": [kafka.address], "topics": [f"{name}-in"]},
            "sink": {"kind": "delta", "table": name},
            "errors": {"topic": SHARED},
        }
    )


def _fail(kafka: Brokers, name: str, offsets: range, *, partition: int = 0) -> None:
    """What the worker of `name` put into the topic for records at `offsets`."""

    def one(offset: int) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
        value = json.dumps({"of": name, "number": offset}).encode()
        failure = Failure(Record(f"{name}-in", 0, offset, b"k", value, 0), TRANSFORMATION, "cast", "CAST", "no int")
        return b"k", value, list(headers_of(failure, flow=name, task=f"{name}-in-0").items())

    kafka.send(SHARED, map(one, offsets), partition)


def _written(settings: Settings, name: str) -> list[Any]:
    table = open_table(settings.table_uri(f"{OUTPUTS}/{name}"))
    return (
        []
        if table is None
        else sorted(json.loads(row["document"])["of"] for row in table.dataset().to_table().to_pylist())
    )


def test_a_dry_run_before_anything_failed_counts_no_records(
    kafka: Brokers, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: object) -> Any:
        raise ChannelNotFound("there is no topic shared-errors: create it")

    monkeypatch.setattr(Topics, "partitions", missing)
    assert redrive(settings, _pipeline(kafka, "ours"), dry_run=True) == Redriven()
    with pytest.raises(ChannelNotFound):
        redrive(settings, _pipeline(kafka, "ours"))


def test_of_a_shared_topic_a_redrive_takes_and_a_list_shows_the_pipeline_s_own(
    kafka: Brokers, settings: Settings
) -> None:
    ours = _pipeline(kafka, "ours")
    _fail(kafka, "ours", range(3))
    _fail(kafka, "theirs", range(4))
    kafka.send(SHARED, [(b"k", b"{}", []), (b"k", b"{}", [("__connect.errors.topic", b"x")])])
    page = error_page(settings, ours, EVERYTHING)
    assert {row.topic for row in page.errors} == {"ours-in"}
    assert (len(page.errors), page.total) == (3, 3)
    counted = redrive(settings, ours)
    assert (counted.looked_at, counted.selected, counted.written, counted.others) == (3, 3, 3, 6)
    assert _written(settings, "ours") == ["ours"] * 3
    named = redrive(settings, ours, Selection(ids=("0-3", "0-4")), again=True)
    assert (named.selected, named.written) == (0, 0), "not by name either"


class Cut(BaseException):
    """The process is gone."""


def test_one_that_dies_behind_its_last_word_is_not_done_again(
    kafka: Brokers, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = _pipeline(kafka, "ours")
    for partition in (0, 1):
        _fail(kafka, "ours", range(partition * 3, partition * 3 + 3), partition=partition)
    told: list[dict[str, Any]] = []

    def tell(progress: Progress) -> bool:
        told.append(json.loads(json.dumps(progress.to_json())))
        return False

    def dies(name: str) -> None:
        if name == "redrive.done" and told[-1]["places"] == told[-1]["ends"]:
            raise Cut

    with monkeypatch.context() as patched:
        patched.setattr(redriving, "hit", dies)
        with pytest.raises(Cut):
            redrive(settings, ours, tell=tell)
    assert told[-1]["places"] == told[-1]["ends"]
    ended = redrive(settings, ours, behind=Progress(**told[-1]), tell=tell)
    assert (ended.looked_at, ended.written) == (6, 6)
    assert [kafka.position("millrace-ours-redrive", SHARED, each) for each in (0, 1)] == [3, 3]
    assert redrive(settings, ours).looked_at == 0, "nothing is left to do"


def test_brokers_that_take_no_position_are_an_error_that_is_tried_again(
    kafka: Brokers, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = _pipeline(kafka, "ours")
    _fail(kafka, "ours", range(2))

    class Refusing:
        def commit(self, **_: Any) -> None:
            raise KafkaException(KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE))

        def close(self) -> None:
            pass

    monkeypatch.setattr(redriving, "consumer_of", lambda *_: Refusing())
    with pytest.raises(LogUnavailable, match="position of the redrive") as caught:
        redrive(settings, ours)
    assert caught.value.retriable
