"""The append host across a switch of the log's backend.

What it answers stands, what landed behind the end is repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import LogUnavailable
from millrace.log.generations.service import GenerationsService, open_deployment_log
from millrace.message import builders
from millrace.message.ids import EARLIEST, LogId, generation_start
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.node.ingest.ingester import check_not_regressed
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState
from tests.node.append.samples import PCHANNEL, commit_wal, insert, opening


@pytest.fixture
def service(tmp_path: Path) -> Iterator[GenerationsService]:
    with open_deployment_log(tmp_path / "log") as opened:
        opened.create(PCHANNEL)
        yield opened


@pytest.fixture
def host(service: GenerationsService) -> Iterator[AppendHost]:
    with AppendHost(service, ChannelState.new) as opened:
        opened.append(PCHANNEL, opening()).results()
        newer = builders.term_opening(term=2, chain_version=2, config={})
        opened.append(PCHANNEL, encode_entry([newer])).results()
        yield opened


def barrier() -> bytes:
    return encode_entry([builders.alter_wal(term=2, generation=1, log="rocksmq")])


def row(sequence: int) -> bytes:
    return encode_entry([replace(insert(7, producer=5, sequence=sequence), term=2)])


def add_generation(service: GenerationsService) -> None:
    """The list with a next generation, and the log in it, as the switch makes both."""
    service.file.change(lambda list_: list_.with_next("rocksmq", {PCHANNEL: EARLIEST}))
    service.backend(1).create(PCHANNEL)


def eventually(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        threading.Event().wait(0.005)


def test_an_append_behind_the_barrier_is_never_answered_and_its_repeat_goes_to_the_new_log(
    service: GenerationsService, host: AppendHost
) -> None:
    assert host.append(PCHANNEL, row(0)).result().message_id.log_id.generation == 0
    ended = host.append(PCHANNEL, barrier()).result().message_id.log_id
    assert host.state(PCHANNEL).position == generation_start(1)
    with pytest.raises(LogUnavailable, match="append again"):
        host.append(PCHANNEL, row(1))  # the list does not say yet where the log goes on
    add_generation(service)
    eventually(lambda: PCHANNEL in service.file.refresh().items[0].ends)
    assert service.file.generations.items[0].ends[PCHANNEL] == ended.following()
    repeated = host.append(PCHANNEL, row(1)).result()
    assert repeated.message_id.log_id.generation == 1
    rows = [entry for entry in all_rows(service) if entry["producer_id"] == 5]
    assert [(entry["sequence"], entry["reason"]) for entry in rows] == [(0, None), (1, None)]


def all_rows(service: GenerationsService) -> list[dict[str, object]]:
    """The chain's rows over the whole log, through a handle of its own."""
    log, state, found = service.open(PCHANNEL), ChannelState.new(PCHANNEL), []
    while (entries := log.read(state.position)).batch.num_rows:
        outcome = Chain().process(state, entries)
        found += outcome.messages.to_pylist() + outcome.rejections.to_pylist()
        state = outcome.state
    return found


def test_open_transactions_and_ticks_go_on_in_the_new_log(service: GenerationsService, host: AppendHost) -> None:
    begin = insert(7).vchannel
    scope = {"vchannel": begin, "collection_id": 1, "term": 2}
    host.append(PCHANNEL, encode_entry([builders.begin_txn(9, **scope)])).result()
    host.append(PCHANNEL, encode_entry([replace(insert(7, txn_id=9), term=2)])).result()
    add_generation(service)
    ended = host.append(PCHANNEL, barrier()).result()
    eventually(lambda: PCHANNEL in service.file.refresh().items[0].ends)
    committed = host.append(PCHANNEL, encode_entry([builders.commit_txn(9, **scope)])).result()
    assert committed.time_tick > ended.time_tick
    assert committed.message_id.log_id.generation == 1


def test_a_batch_with_the_barrier_and_what_raced_past_it_ends_at_the_barrier(
    service: GenerationsService, host: AppendHost
) -> None:
    before = host.append(PCHANNEL, row(0)).result().message_id.log_id
    host.close()
    add_generation(service)
    old = service.backend(0).open(PCHANNEL)
    ids = old.append([barrier(), row(1)])
    with AppendHost(service, ChannelState.new) as other:
        repeated = other.append(PCHANNEL, row(1), deadline=10.0) if _passed(other, service) else None
        assert repeated is not None
        assert repeated.result().message_id.log_id.generation == 1
    assert service.file.generations.items[0].ends[PCHANNEL] == ids[0].following()
    assert before < ids[0]


def _passed(host: AppendHost, service: GenerationsService) -> bool:
    host.state(PCHANNEL)
    eventually(lambda: PCHANNEL in service.file.refresh().items[0].ends)
    return True


def test_a_node_commits_across_the_switch_and_waits_where_it_is_not_recorded_yet(
    service: GenerationsService, host: AppendHost, tmp_path: Path
) -> None:
    host.append(PCHANNEL, row(0)).result()
    host.append(PCHANNEL, barrier()).result()
    first = commit_wal(service, tmp_path / "wal")
    state = host.state(PCHANNEL)
    with pytest.raises(LogUnavailable, match="switch"):
        check_not_regressed(service.open(PCHANNEL), state)
    add_generation(service)
    eventually(lambda: PCHANNEL in service.file.refresh().items[0].ends)
    check_not_regressed(service.open(PCHANNEL), state)
    host.append(PCHANNEL, row(1)).result()
    assert commit_wal(service, tmp_path / "wal") > first


def test_a_host_that_starts_behind_the_barrier_records_it(service: GenerationsService, host: AppendHost) -> None:
    host.append(PCHANNEL, barrier()).result()
    state = host.state(PCHANNEL)
    host.close()
    add_generation(service)
    with AppendHost(service, lambda _: state) as other:
        assert other.state(PCHANNEL).position == generation_start(1)
        eventually(lambda: PCHANNEL in service.file.refresh().items[0].ends)
        assert other.append(PCHANNEL, row(0)).result().message_id.log_id >= LogId(*generation_start(1))
