"""What a connector sends again after a restart is left out, or applied whole: rows end as the database's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.flows.debezium.repeats import SOURCES, Repeats, Source


class Sent(NamedTuple):
    """A record of the topic: a change of the database, by its place there."""

    change: int
    key: bytes


def _source(change: int, name: str = "shop", **more: object) -> Source:
    return Source(connector="mariadb", name=name, file="bin.000007", pos=100 + change // 2, row=change % 2, **more)  # type: ignore[arg-type]


@st.composite
def _topics(draw: st.DrawFn) -> tuple[list[Sent], int]:
    """Changes of a few keys, as a connector sends them that is restarted again and again; and its longest repeat."""
    keys = draw(st.lists(st.sampled_from([b"1", b"2", b"3"]), min_size=1, max_size=25))
    sent: list[Sent] = []
    at = longest = 0
    while at < len(keys):
        upto = draw(st.integers(at + 1, len(keys)))
        sent += [Sent(change, keys[change]) for change in range(at, upto)]
        at = upto
        if draw(st.booleans()):
            back = draw(st.integers(0, at))
            longest = max(longest, at - back)
            at = back
            if draw(st.integers(0, 3)) == 0 or len(sent) > 200:
                at = upto
    return sent, longest


@given(_topics(), st.integers(1, 12), st.data())
def test_rows_end_as_in_the_database(topic: tuple[list[Sent], int], size: int, data: st.DataObject) -> None:
    """Also if batches are tried again, and if the topic's compaction removed older records of a key."""
    sent, longest = topic
    records = list(enumerate(sent))
    clean = data.draw(st.integers(0, len(records)))
    last = {each.key: offset for offset, each in records[:clean]}
    compacted = data.draw(st.booleans())
    if compacted:
        records = [(offset, each) for offset, each in records if offset >= clean or last[each.key] == offset]
    repeats, rows, applied = Repeats(size), dict[bytes, int](), list[int]()
    place = 0
    while place < len(records):
        batch = records[place : place + data.draw(st.integers(1, 6))]
        tries = data.draw(st.integers(1, 3))
        for left in range(tries, 0, -1):
            taken = [
                each for offset, each in batch if not repeats.is_repeat(_source(each.change), "u", each.key, offset)
            ]
            if left == 1:  # the others failed in the sink, and took no effect
                rows |= {each.key: each.change for each in taken}
                applied += [each.change for each in taken]
        place += len(batch)
    assert rows == {each.key: each.change for each in sorted(sent)}
    assert len(repeats) <= size
    if longest <= size and not compacted:
        assert applied == sorted(set(applied)), "each change once, in order"


def _left_out(repeats: Repeats, sources: Sequence[Source], *, offset: int = 0) -> list[bool]:
    return [repeats.is_repeat(each, "u", b"1", offset + place) for place, each in enumerate(sources)]


def test_positions_of_postgres_follow_commits_not_places() -> None:
    """The change at 10 was made before the one at 20, and committed after it."""

    def source(commit: int, lsn: int) -> Source:
        return Source(connector="postgresql", name="shop", sequence=f'["{commit}","{lsn}"]', lsn=lsn)

    events = [source(5, 20), source(25, 10), source(25, 30)]
    repeats = Repeats(10)
    assert _left_out(repeats, events) == [False] * 3
    assert _left_out(repeats, events[1:], offset=3) == [True, True]


def test_a_row_of_a_snapshot_is_never_left_out_and_ends_what_is_known() -> None:
    repeats = Repeats(10)
    row = _source(3, snapshot="incremental")
    assert _left_out(repeats, [_source(1), row, row, _source(1)]) == [False] * 4


def test_a_failover_to_a_log_that_counts_anew_loses_nothing() -> None:
    repeats = Repeats(100)
    before = [_source(each, ts_ms=each) for each in range(50, 60)]
    after = [_source(each, ts_ms=1_000 + each) for each in range(60)]
    assert not any(_left_out(repeats, before))
    assert not any(_left_out(repeats, after, offset=10))


def test_connectors_of_one_topic_are_apart_and_bounded() -> None:
    repeats = Repeats(4)
    for number in range(SOURCES * 2):
        assert _left_out(repeats, [_source(each, f"s{number}") for each in range(8)], offset=8 * number) == [False] * 8
    assert len(repeats) == SOURCES * 4
    assert _left_out(repeats, [_source(7, f"s{SOURCES * 2 - 1}")], offset=8 * SOURCES * 2) == [True]


@pytest.mark.parametrize(
    "source",
    [
        Source(connector="postgresql", name="s", lsn=5, sequence="no list"),
        Source(connector="mariadb", name="s", file="bin", pos=4),
        Source(connector="vitess", name="s", ts_ms=1),
    ],
)
def test_without_an_order_nothing_is_left_out(source: Source) -> None:
    assert _left_out(Repeats(4), [source, source]) == [False, False]


def test_a_version_grows_from_change_to_change_of_a_row() -> None:
    numbers = [
        Source(file="bin.000009", pos=999_999, row=3).version(),
        Source(file="bin.000010", pos=4, row=0).version(),
        Source(file="bin.000010", pos=4, row=1).version(),
        Source(file="bin.000010", pos=5, row=0).version(),
    ]
    assert numbers == sorted(set(numbers))
    assert Source(lsn=7).version() == 7
    for wrong in (Source(), Source(file="bin.000001", pos=4, row=1 << 11), Source(lsn=-1), Source(lsn="7")):
        with pytest.raises(ValueError, match="version to offset"):
            wrong.version()


def test_a_batch_that_is_tried_again_keeps_what_came_before_it() -> None:
    repeats = Repeats(100)
    assert not any(_left_out(repeats, [_source(each) for each in range(6)]))
    for _ in range(3):
        assert not any(_left_out(repeats, [_source(4), _source(5)], offset=4)), "records are no repeats of themselves"
    assert all(_left_out(repeats, [_source(each) for each in range(6)], offset=6))
