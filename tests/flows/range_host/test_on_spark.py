"""Spark runs a pipeline by the same definition: tasks on workers, positions committed by the driver."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millrace.base.metrics import Metrics
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.positions import positions_of
from millrace.flows.range_host.status import State
from millrace.flows.range_host.supervision import read_status
from millrace.node.range_loop.query import start_query
from tests.flows.range_host.flights import Flights


@pytest.mark.slow
def test_a_query_takes_a_topic_into_the_index_and_goes_on_where_it_stood(spark: SparkSession, tmp_path: Path) -> None:
    flights = Flights(tmp_path)
    flights.send((f"k{n}", {"flight": n if n % 10 else "bad"}) for n in range(500))
    definition = FlowRun(flights.settings, flights.pipeline)
    assert pickle.loads(pickle.dumps(definition)) == definition
    for turn in (1, 2):
        query = start_query(spark, definition, metrics=Metrics(), available_now=True)
        query.awaitTermination(100)
        assert query.exception() is None
        places = positions_of(flights.settings, flights.id).values()
        assert sum(place.position for place in places) == 499 + turn
        flights.send([("late", {"flight": turn})])
    assert {key: value["flight"] for key, value in flights.index().items()} == {
        f"k{n}": n for n in range(500) if n % 10
    } | {"late": 1}
    assert len(flights.errors()) == 50
    assert read_status(flights.settings, flights.id).state is State.RUNNING
    definition.end()
    assert read_status(flights.settings, flights.id).state is State.STOPPED
