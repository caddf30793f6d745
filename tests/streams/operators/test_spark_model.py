"""Spark's own joins and windows as the model has them.

In all they give what the whole gives, however the streams are cut and disordered. Spark itself is held against the
model in test_on_spark.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from tests.streams.operators.cuts import disordered
from tests.streams.operators.spark_model import (
    OUTER,
    Join,
    JoinKind,
    Marks,
    Row,
    Sessions,
    Side,
    Windows,
    of_all,
    of_times,
    of_windows,
)

KINDS: tuple[JoinKind, ...] = ("inner", "left", "right", "full", "semi")
rows_of = st.lists(
    st.fixed_dictionaries({"k": st.sampled_from(["x", "y", None]), "t": st.integers(0, 40), "v": st.integers(0, 4)}),
    max_size=16,
)


def interval(left: Row, right: Row) -> bool:
    return bool(left["t"] <= right["t"] <= left["t"] + 6)


def same_window(left: Row, right: Row) -> bool:
    return bool(left["t"] // 5 == right["t"] // 5)


def anyhow(left: Row, right: Row) -> bool:
    return True


CONDITIONS: dict[str, tuple[Callable[[Row, Row], bool], Callable[[], tuple[Side, Side]]]] = {
    "interval": (interval, lambda: of_times(0, 6)),
    "windows": (same_window, lambda: of_windows(5)),
    "whatever the times": (anyhow, of_all),
}


def whole(kind: JoinKind, matches: Callable[[Row, Row], bool], left: list[Row], right: list[Row]) -> list[Any]:
    """The join of all rows at once."""
    pairs = [
        (i, j)
        for i, one in enumerate(left)
        for j, other in enumerate(right)
        if one["k"] == other["k"] and (kind == "full" or one["k"] is not None) and matches(one, other)
    ]
    with_left, with_right = {i for i, _ in pairs}, {j for _, j in pairs}
    if kind == "semi":
        return [(left[i], None) for i in sorted(with_left)]
    found: list[Any] = [(left[i], right[j]) for i, j in pairs]
    if kind in ("left", "full"):
        found += [(row, None) for i, row in enumerate(left) if i not in with_left]
    if kind in ("right", "full"):
        found += [(None, row) for j, row in enumerate(right) if j not in with_right]
    return found


def counted(found: Sequence[Any]) -> Counter[str]:
    return Counter(repr(each) for each in found)


@given(
    st.data(),
    rows_of,
    rows_of,
    st.sampled_from(KINDS),
    st.sampled_from(sorted(CONDITIONS)),
    st.integers(0, 8),
    st.booleans(),
)
@profile(max_examples=150)
def test_a_join_of_streams_is_that_of_the_rows_it_took(
    data: st.DataObject, left: list[Row], right: list[Row], kind: JoinKind, condition: str, delay: int, patient: bool
) -> None:
    matches, sides = CONDITIONS[condition]
    batches = [data.draw(disordered(rows, delay)) for rows in (left, right)]
    join = Join(kind, matches, sides(), Marks((delay + 1, delay + 1) if patient else (0, delay)))
    found = []
    for number in range(max(map(len, batches))):
        found += join.batch(*(each[number] if number < len(each) else [] for each in batches))
    keyless = [sum(row["k"] is None for row in rows) * (kind not in OUTER[n]) for n, rows in enumerate((left, right))]
    assert len(join.taken[0]) + len(join.taken[1]) + join.late == len(left) + len(right) - sum(keyless)
    if patient:
        assert join.late == 0
    if condition != "whatever the times":
        found += join.finish()
        assert join.state_rows == 0
        meant = counted(whole(kind, matches, *join.taken))
        if kind == "semi" and not patient:
            assert counted(found) <= meant, "a row behind the watermark, though not late, may be given up too early"
        else:
            assert counted(found) == meant
    elif kind in ("inner", "semi"):
        assert counted(found) == counted(whole(kind, matches, left, right))
        assert (join.late, join.state_rows) == (0, len(left) + len(right) - sum(keyless))


@given(st.data(), rows_of, rows_of, st.sampled_from(["left", "right", "full"]))
@profile(max_examples=50)
def test_a_row_without_a_partner_comes_out_once_none_can_come_and_no_earlier(
    data: st.DataObject, left: list[Row], right: list[Row], kind: JoinKind
) -> None:
    join = Join(kind, interval, of_times(0, 6), Marks((0, 0)))
    batches = [data.draw(disordered(rows, 4)) for rows in (left, right)]
    for number in range(max(map(len, batches))):
        mark = join.marks.now
        for one, other in join.batch(*(each[number] if number < len(each) else [] for each in batches)):
            if other is None and one is not None:
                assert one["t"] + 6 < mark
            if one is None and other is not None:
                assert other["t"] < mark
        for side in join.sides:
            assert not [row for row, _ in side.state if side.over(row, mark)]


@given(st.data(), rows_of, st.sampled_from([(5, 5), (6, 2)]), st.integers(0, 8), st.booleans())
@profile(max_examples=80)
def test_windows_of_a_stream_are_those_of_the_rows_they_took(
    data: st.DataObject, rows: list[Row], shape: tuple[int, int], delay: int, patient: bool
) -> None:
    batches = data.draw(disordered(rows, delay))
    appended, updated = (
        Windows(*shape, mode, Marks((delay + 1 if patient else 0,)))
        for mode in ("append", "update")  # type: ignore[arg-type]
    )
    once = [each for rows in batches for each in appended.batch(rows)] + appended.finish()
    newest = {each[:3]: each for rows in batches for each in updated.batch(rows)}
    wanted: dict[tuple[Any, int, int], tuple[int, int]] = {}
    for row, start in appended.taken:
        count, total = wanted.get((row["k"], start, start + shape[0]), (0, 0))
        wanted[row["k"], start, start + shape[0]] = (count + 1, total + row["v"])
    assert counted(once) == counted([(*place, *each) for place, each in wanted.items()])
    assert counted(once) == counted(list(newest.values())), "the last update is the answer"
    if patient:
        assert len(appended.taken) == len(rows) * shape[0] // shape[1]


@given(st.data(), rows_of, st.integers(0, 8))
@profile(max_examples=80)
def test_sessions_of_a_stream_are_those_of_the_whole(data: st.DataObject, rows: list[Row], delay: int) -> None:
    cut, one = (Sessions(3, Marks((delay + 1,))) for _ in range(2))
    found = [each for rows in data.draw(disordered(rows, delay)) for each in cut.batch(rows)] + cut.finish()
    assert counted(found) == counted(one.batch(rows) + one.finish())
    assert sum(each[3] for each in found) == len(rows)
