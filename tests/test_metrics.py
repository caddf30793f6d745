"""Metrics: one table of names, one attribute each, no global registry, an endpoint that comes and goes."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from millrace.base.metrics import FAMILIES, NAMES, NAMESPACE, Metrics, observe_many


def test_every_family_is_an_attribute_and_appears_under_its_full_name() -> None:
    metrics = Metrics()
    for name, family in FAMILIES.items():
        metric = getattr(metrics, name)
        if family.labels:
            metric.labels(*("x" for _ in family.labels))
    exposed = set(re.findall(r"^# TYPE (\S+) ", metrics.render().decode(), re.MULTILINE))
    assert set(NAMES) <= exposed
    assert {name for name in exposed if not name.endswith("_created")} == set(NAMES)


def test_values_by_the_thousand_count_as_one_by_one() -> None:
    at_once, one_by_one = Metrics(), Metrics()
    values = np.array([0.0, 256.0, 257.0, 1e5, 1e9, 300.0])
    observe_many(at_once.wal_append_message_bytes.labels("p0"), values)
    for value in values:
        one_by_one.wal_append_message_bytes.labels("p0").observe(value)

    def told(metrics: Metrics) -> list[str]:
        return [line for line in metrics.render().decode().splitlines() if "_created" not in line]

    assert told(at_once) == told(one_by_one)


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert family.description.endswith(".")
        if family.kind == "counter":
            assert name.endswith("_total"), name


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    first, second = Metrics(), Metrics()
    first.wal_parked.labels(pchannel="p0").set(1)
    assert b'millrace_wal_parked{pchannel="p0"} 1.0' in first.render()
    assert b'pchannel="p0"' not in second.render()
    assert not any(metric.name.startswith("millrace") for metric in REGISTRY.collect())


def test_a_value_that_was_reported_can_be_fetched_until_the_server_is_closed() -> None:
    metrics = Metrics()
    metrics.wal_rejected_message_total.labels(pchannel="p0", reason="TOO_LARGE").inc(3)
    server = metrics.serve(0)
    address = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert b'millrace_wal_rejected_message_total{pchannel="p0",reason="TOO_LARGE"} 3.0' in answer.read()
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10)


def test_some_test_sees_each_family_move() -> None:
    """By name alone; that it moves is what those tests assert."""
    words: set[str] = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    told = {word.removeprefix(f"{NAMESPACE}_") for word in words}
    told |= {re.sub("_(count|sum|bucket)$", "", word) for word in told}
    assert not [name for name in FAMILIES if name not in told]
