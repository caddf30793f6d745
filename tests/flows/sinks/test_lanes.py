"""How the OpenSearch sink shares out actions and reads answers, without a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import date
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import BatchRefused, SinkBusy
from millrace.flows.batch import Batch
from millrace.flows.declare.errors import Errors
from millrace.flows.isolation import Attempts, Isolation
from millrace.flows.records import Action, Record
from millrace.flows.sinks.opensearch import sink as sinks
from millrace.flows.sinks.opensearch.bulk import Busy, Item, TooLarge, Verdict, send
from millrace.flows.sinks.opensearch.model import OpenSearchSink as Declared
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


@pytest.mark.parametrize("requests", [1, 3])
def test_a_busy_answer_says_what_was_taken_before_it(requests: int) -> None:
    declared = Declared(hosts=("http://h:1",), index_base="i", ids="key", requests=requests, patience_ms=0)
    sink = OpenSearchSink(declared, flush_items=5, flush_bytes=1 << 20, sleep=lambda _: None)
    sink._target, sink._clock = sinks.Target(), lambda: 0.0
    taken: set[int] = set()
    lock = threading.Lock()

    def sent(client: Any, path: str, actions: Sequence[Action], **_: Any) -> list[Item]:
        offsets = [each.record.offset for each in actions]
        if 40 in offsets:
            raise Busy("not now")
        with lock:
            taken.update(offset for offset in offsets if offset % 10)
        return [Item(Verdict.DONE if offset % 10 else Verdict.FAILED, "ODD", "odd") for offset in offsets]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sinks, "send", sent)
        with pytest.raises(SinkBusy) as caught:
            put(sink, [_action(offset, f"k{offset}") for offset in range(100)])
    assert caught.value.taken == taken
    assert taken
    sink.close()


def test_a_size_that_was_refused_is_not_offered_again_for_a_while() -> None:
    sink = OpenSearchSink(
        Declared(hosts=("http://h:1",), index_base="i", ids="key", requests=1), flush_items=1000, flush_bytes=64_000
    )
    sink._target, sink._clock = sinks.Target(), lambda: 0.0
    refused: list[int] = []

    def sent(client: Any, path: str, actions: Sequence[Action], **_: Any) -> list[Item]:
        if len(actions) > 100:
            refused.append(len(actions))
            raise TooLarge("HTTP_413", "too large")
        return [Item(Verdict.DONE)] * len(actions)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sinks, "send", sent)
        assert put(sink, [_action(offset, f"k{offset}") for offset in range(10_000)]).acknowledged == 10_000
    assert len(refused) < 10, "of more than a hundred bulks"
    sink.close()


def test_of_many_indices_one_that_takes_nothing_is_its_documents_trouble() -> None:
    declared = Declared(
        hosts=("http://h:1",),
        index_base="i",
        ids="key",
        requests=1,
        versions=False,
        create_index=True,
        index_suffix="-{m}",
        tombstones="error",
    )
    sink = OpenSearchSink(declared, flush_items=1000, flush_bytes=1 << 20)
    sink._target, sink._clock = sinks.Target(), lambda: 0.0

    def sent(client: Any, path: str, actions: Sequence[Action], *, indices: Sequence[str], **_: Any) -> list[Item]:
        closed = Item(Verdict.REFUSED, "index_closed_exception", "closed")
        return [closed if index == "i-old" else Item(Verdict.DONE) for index in indices]

    documents = [
        _action(offset, f"k{offset}")._replace(body=b'{"m":"old"}' if offset in (3, 50) else b'{"m":"new"}')
        for offset in range(100)
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sinks, "send", sent)
        with pytest.raises(BatchRefused, match="index_closed_exception"):
            put(sink, documents)
        way = Isolation(sink.write, Errors(tries=1))
        found = way.run(Batch("in-0", 0, 100, documents=documents), Attempts())
    assert (found.error, found.verdicts.acknowledged) == (None, 98)
    assert [each.record.offset for each in found.verdicts.failures] == [3, 50]
    sink.close()


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


def test_rows_have_versions_by_which_a_later_batch_and_a_later_query_win(tmp_path: Path) -> None:
    versions: list[tuple[str, int | None, bytes | None]] = []

    def sent(client: Any, path: str, actions: Sequence[Action], *, equal_wins: bool, **_: Any) -> list[Item]:
        assert equal_wins, "of one batch the last row of an id stays, and a repeated batch replaces itself"
        versions.extend((each.id, each.version, each.body) for each in actions)
        return [Item(Verdict.DONE)] * len(actions)

    def write(folder: str, number: int, rows: list[dict[str, Any]]) -> Verdicts:
        declared = Declared(hosts=("http://h:1",), index_base="i", ids="key", requests=1)
        sink = OpenSearchSink(declared, flush_items=10, flush_bytes=1 << 20, memory=tmp_path / folder, key=("k",))
        sink._target, sink._clock = sinks.Target(), lambda: 0.0
        return sink.write(Batch.of_rows("query", number, pa.Table.from_pylist(rows).to_batches()))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sinks, "send", sent)
        for number in (0, 1, 1):
            write("one", number, [{"k": "a", "n": number}])
        patched.setattr(time, "time", lambda: 2e9)
        write("later", 0, [{"k": "a", "n": 5, "t": date(2026, 1, 2)}, {"k": "b", "n": 6}])
        done = write("later", 1, [{"k": None, "n": 7}])
        write("later", 2, [{"k": "a", "n": None, "_change": "delete"}])
    assert [(each.kind, each.record.position) for each in done.failures] == [("NO_KEY", "query-1-0")]
    found = [version for _, version, _ in versions]
    assert found[1] == found[2]
    assert found[0] < found[1] < found[3] == found[4] < found[5]
    assert versions[0][2] == b'{"k": "a", "n": 0}'
    assert b'"t": "2026-01-02"' in (versions[3][2] or b"")
    assert versions[-1][2] is None
