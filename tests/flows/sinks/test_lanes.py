"""How the OpenSearch sink shares out actions and reads answers, without a server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.flows.records import Action, Record
from millrace.flows.sinks.models import OpenSearchSink as Declared
from millrace.flows.sinks.opensearch import sink as sinks
from millrace.flows.sinks.opensearch.bulk import Item, Verdict, send
from millrace.flows.sinks.opensearch.sink import OpenSearchSink
from millrace.flows.sinks.sink import Verdicts
from tests.flows.sinks.batches import put


def _action(offset: int, key: str, version: int | None = None) -> Action:
    return Action(Record("in", 0, offset, key.encode(), b"{}", 0), key, b"{}", version)


@settings(max_examples=30, deadline=None)
@given(keys=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60), lanes=st.integers(2, 5))
def test_all_actions_of_an_id_go_one_way_in_their_order(keys: list[str], lanes: int) -> None:
    """So that without versions the last of them is what stays, however long each bulk takes."""
    sink = OpenSearchSink(
        Declared(hosts=("http://h:1",), index_base="i", ids="key", versions=False, requests=lanes),
        flush_items=7,
        flush_bytes=1 << 20,
    )
    went: dict[str, list[int]] = {}
    lock, lanes_of, one_lane = threading.Lock(), dict[str, int](), sink._lane
    numbers = count()

    def lane(actions: Sequence[Action]) -> Verdicts:
        with lock:
            number = next(numbers)
            for each in actions:
                assert lanes_of.setdefault(each.id, number) == number, "two lanes have actions of one id"
        return one_lane(actions)

    def sent(client: Any, path: str, actions: Sequence[Action], **_: Any) -> list[Item]:
        assert len({each.id for each in actions}) == len(actions), "one of each id in a bulk"
        with lock:
            for each in actions:
                went.setdefault(each.id, []).append(each.record.offset)
        return [Item(Verdict.DONE)] * len(actions)

    sink._target = sinks.Target()
    sink._clock = lambda: 0.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sinks, "send", sent)
        patched.setattr(sink, "_lane", lane)
        told = [_action(offset, key) for offset, key in enumerate(keys)]
        assert put(sink, told).acknowledged == len(told)
    sink.close()
    for key, places in went.items():
        assert places == [offset for offset, each in enumerate(keys) if each == key]


@pytest.mark.parametrize(
    ("version", "reason", "verdict"),
    [
        (None, "[k]: version conflict, required seqNo [3]", Verdict.AGAIN),
        (7, "[k]: version conflict, current version [7] is higher or equal to the one provided [7]", Verdict.REPEATED),
        (7, "[k]: version conflict, current version [9] is higher or equal to the one provided [7]", Verdict.STALE),
    ],
)
def test_a_conflict_is_sent_again_where_no_version_says_that_something_newer_is_there(
    version: int | None, reason: str, verdict: Verdict
) -> None:
    error = {"type": "version_conflict_engine_exception", "reason": reason}
    answer = {"errors": True, "items": [{"index": {"status": 409, "error": error}}]}
    client: Any = SimpleNamespace(transport=SimpleNamespace(perform_request=lambda *_, **__: answer))
    (item,) = send(client, "/i", [_action(0, "k", version)], refresh=False)
    assert item.verdict is verdict


def test_what_an_action_of_the_same_range_replaced_before_is_told_again_and_not_stale() -> None:
    """A range that a crash repeats meets its own newer documents."""
    sink = OpenSearchSink(
        Declared(hosts=("http://h:1",), index_base="i", ids="key", requests=1), flush_items=10, flush_bytes=1 << 20
    )
    sink._target, sink._clock = sinks.Target(), lambda: 0.0
    held = {"a": 9, "b": 50}

    def sent(client: Any, path: str, actions: Sequence[Action], **_: Any) -> list[Item]:
        return [Item(Verdict.STALE, there=held[each.id]) for each in actions]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sinks, "send", sent)
        done = put(sink, [_action(3, "a", 3), _action(4, "b", 4), _action(9, "a", 9), _action(10, "a", 8)])
    # The last one came behind the newer one, and was never written.
    assert (done.acknowledged, done.repeated, done.stale) == (4, 2, 2)
    sink.close()
