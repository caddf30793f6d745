"""Who writes a log: one owner at a time, and one that another took over from opens a newer term
and goes on, in the same process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from millrace.base.errors import AppendRejected, LogBusy, LogFenced
from millrace.base.metrics import Metrics
from millrace.message import builders
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost, HostSettings
from millrace.rpc.tail import Evicted
from millrace.wal.reasons import Reason
from millrace.wal.state import ChannelState
from tests.conformance.conftest import Deployment
from tests.node.append.samples import PCHANNEL, insert, opening

SECONDS = 20.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        threading.Event().wait(0.01)


def opens(host: AppendHost, term: int) -> None:
    host.append(PCHANNEL, encode_entry([builders.term_opening(term=term, chain_version=1, config={})])).results()


def writes(host: AppendHost, key: int, term: int) -> None:
    host.append(PCHANNEL, encode_entry([replace(insert(key), term=term)])).results()


def is_refused(host: AppendHost, key: int, term: int) -> None:
    """An older term's message has no effect: its backend does not take it, or the chain rejects it."""
    with pytest.raises((LogFenced, AppendRejected)) as raised:
        writes(host, key, term)
    assert getattr(raised.value, "reason", Reason.TERM_FENCED) == Reason.TERM_FENCED


def test_of_two_writers_one_alone_can_append_where_the_backend_fences(deployment: Deployment) -> None:
    deployment.service.create(PCHANNEL)
    declared = deployment.promises.declared
    if declared.local:  # held by one process: nobody else comes as far as a log
        assert declared.fences
        with pytest.raises(LogBusy):
            deployment.another()
        return
    first = deployment.service.open(PCHANNEL)
    first.append([b"first"])
    with deployment.another() as other:
        other.open(PCHANNEL).append([b"second"])
        if declared.fences:
            with pytest.raises(LogFenced):
                first.append([b"third"])
        else:
            first.append([b"third"])


def test_an_owner_that_was_taken_over_from_follows_on_and_goes_on_once_it_opens_a_newer_term(
    deployment: Deployment,
) -> None:
    deployment.service.create(PCHANNEL)
    if deployment.promises.declared.local:
        with pytest.raises(LogBusy):
            deployment.another()
        return
    registry = CollectorRegistry()
    settings, metrics = HostSettings(tick_interval=0.0), Metrics(registry=registry)

    def ticks() -> float:
        labels = {"pchannel": PCHANNEL, "reason": "idle"}
        return registry.get_sample_value("millrace_wal_sync_time_tick_total", labels) or 0.0

    with (
        deployment.another() as other,
        AppendHost(deployment.service, ChannelState.new, settings=settings, metrics=metrics) as first,
        AppendHost(other, ChannelState.new, settings=HostSettings(tick_interval=60.0)) as second,
    ):
        first.append(PCHANNEL, opening()).results()
        writes(first, 1, term=1)
        until(lambda: ticks() > 0)
        before = ticks()
        opens(second, 2)
        writes(second, 2, term=2)
        until(lambda: ticks() > before)  # it would like to append a tick, which must not park it
        is_refused(first, 3, term=1)
        writes(second, 4, term=2)
        until(lambda: first.state(PCHANNEL).position >= second.state(PCHANNEL).position)
        opens(first, 3)
        writes(first, 5, term=3)
        is_refused(second, 6, term=2)
        opens(second, 4)
        writes(second, 7, term=4)
        is_refused(first, 8, term=3)
        until(lambda: first.state(PCHANNEL).to_bytes() == second.state(PCHANNEL).to_bytes())
        found = second.tail(PCHANNEL, 0, timeout=0.0)
        assert not isinstance(found, Evicted)
        inserts = [row for batch in found.batches for row in batch.to_pylist() if row["type"] == "INSERT"]
        assert [row["term"] for row in inserts] == [1, 2, 2, 3, 4]
