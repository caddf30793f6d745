"""Joins by time and deduplication of a stream, against loops over the whole."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.streams.keyed.in_process import Run
from millrace.streams.operators.joins import AsOf, Distinct
from tests.streams.operators.cuts import Row, alike, disordered, streamed

SCHEMA = pa.schema(
    [("k", pa.utf8()), ("t", pa.int64()), ("v", pa.int64()), ("right", pa.bool_()), ("gone", pa.bool_())]
)
rows_of = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.sampled_from(["x", "y", None]),
            "t": st.integers(0, 20),
            "v": st.integers(0, 4),
            "right": st.booleans(),
            "gone": st.sampled_from([False, False, None, True]),
        }
    ),
    max_size=20,
)


def joined(rows: list[Row], tolerance: int | None, versioned: bool, inner: bool) -> list[Row]:
    found = []
    for left in (row for row in rows if not row["right"]):
        before = [row for row in rows if row["right"] and row["k"] == left["k"] is not None and row["t"] <= left["t"]]
        last = max(before, key=lambda row: (row["t"], row["v"], (row["gone"] is None, row["gone"])), default=None)
        if last is not None and (
            (versioned and last["gone"]) or (tolerance is not None and left["t"] - last["t"] > tolerance)
        ):
            last = None
        if last is not None or not inner:
            found.append(
                {
                    "k": left["k"],
                    "t": left["t"],
                    "v": left["v"],
                    "since": last and last["t"],
                    "value": last and last["v"],
                }
            )
    return found


@given(
    st.data(),
    rows_of,
    st.integers(0, 5),
    st.integers(1, 3),
    st.sampled_from([None, 0, 4]),
    st.booleans(),
    st.booleans(),
)
@profile(max_examples=60)
def test_a_row_gets_the_last_version_before_it(
    data: st.DataObject, rows: list[Row], delay: int, shards: int, tolerance: int | None, versioned: bool, inner: bool
) -> None:
    operator = AsOf(
        ("k",),
        "t",
        "right",
        ("k", "t", "v"),
        (("t", "since"), ("v", "value")),
        tolerance,
        "gone" if versioned else None,
        inner,
    )
    found, late, taken = streamed(operator, SCHEMA, data.draw(disordered(rows, delay)), delay, shards)
    assert alike(found) == alike(joined(rows, tolerance, versioned, inner))
    assert (late, taken) == ([], len(rows))


@given(st.data(), rows_of, st.integers(0, 5), st.integers(1, 3), st.sampled_from([None, 0, 1, 4]))
@profile(max_examples=60)
def test_each_key_once_within_a_time(
    data: st.DataObject, rows: list[Row], delay: int, shards: int, within: int | None
) -> None:
    last: dict[str | None, int] = {}
    meant = []
    for row in sorted(rows, key=lambda row: (row["t"], row["v"], row["right"], (row["gone"] is None, row["gone"]))):
        if row["k"] not in last or (within is not None and row["t"] - last[row["k"]] > within):
            last[row["k"]] = row["t"]
            meant.append(row)
    found, late, taken = streamed(
        Distinct(("k",), "t", within), SCHEMA, data.draw(disordered(rows, delay)), delay, shards
    )
    assert alike(found) == alike(meant)
    assert (late, taken) == ([], len(rows))


@pytest.mark.slow
def test_state_is_one_version_a_key_and_none_behind_the_tolerance() -> None:
    bounded = Run(AsOf(("k",), "t", "right", ("k",), (("v", "value"),), 10), SCHEMA, 0)
    endless = Run(AsOf(("k",), "t", "right", ("k",), (("v", "value"),)), SCHEMA, 0)
    assert "forever" in endless.warnings[0]
    for at in range(100):
        each = {"k": f"k{at}", "t": at, "v": 1, "gone": False}
        rows = pa.Table.from_pylist([each | {"right": True}, each | {"right": False}], SCHEMA)
        bounded.batch(rows)
        endless.batch(rows)
    assert bounded.state_rows < 16
    assert endless.state_rows == 102


def at(*rows: tuple[str, int, bool]) -> pa.Table:
    return pa.Table.from_pylist(
        [{"k": k, "t": t, "v": t, "right": right, "gone": False} for k, t, right in rows], SCHEMA
    )


def test_a_version_as_old_as_the_tolerance_is_kept_while_a_row_may_come_that_asks_for_it() -> None:
    run = Run(AsOf(("k",), "t", "right", ("t",), (("v", "value"),), 10), SCHEMA, 0)
    for rows in (at(("x", 1, True), ("y", 11, True), ("y", 11, False)), at(), at(("x", 11, False))):
        run.batch(rows)
    assert {"t": 11, "value": 1} in run.finish().output.to_pylist()


def test_a_key_is_kept_for_as_long_as_another_row_of_it_is_left_out() -> None:
    run = Run(Distinct(("k",), "t", 10), SCHEMA, 0)
    given_ = [run.batch(rows) for rows in (at(("x", 1, False), ("y", 11, False)), at(), at(("x", 11, False)))]
    given_.append(run.finish())
    assert [(row["k"], row["t"]) for step in given_ for row in step.output.to_pylist()] == [("x", 1), ("y", 11)]


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not a boolean column"):
        Run(AsOf(("k",), "t", "v", ("k",), (("v", "value"),)), SCHEMA, 0)
    with pytest.raises(InvalidArgument, match="no column other"):
        Run(AsOf(("other",), "t", "right", ("k",), (("v", "value"),)), SCHEMA, 0)
    with pytest.raises(InvalidArgument, match="the same name"):
        Run(AsOf(("k",), "t", "right", ("k",), (("v", "k"),)), SCHEMA, 0)


def test_of_versions_of_one_time_the_last_in_order_counts() -> None:
    schema = pa.schema([*SCHEMA, ("tick", pa.int64())])
    rows = [
        {"k": "x", "t": 1, "v": 9, "right": True, "gone": True, "tick": 1},
        {"k": "x", "t": 1, "v": 1, "right": True, "gone": False, "tick": 2},
        {"k": "x", "t": 2, "v": 0, "right": False, "gone": False, "tick": 3},
    ]
    for order, meant in ((("tick",), 1), ((), None)):
        run = Run(AsOf(("k",), "t", "right", ("k",), (("v", "value"),), 10, "gone", order=order), schema, 0)
        run.batch(pa.Table.from_pylist(rows, schema))
        assert run.finish().output.column("value").to_pylist() == [meant]


def test_rows_at_the_watermark_wait_for_the_others_of_their_time() -> None:
    run = Run(AsOf(("k",), "t", "right", ("k",), (("v", "value"),), 10), SCHEMA, 5)
    for rows in [[("x", 5, False), ("y", 10, False), ("y", 10, True)], [("x", 5, True), ("y", 11, False)]]:
        run.batch(
            pa.Table.from_pylist(
                [{"k": k, "t": t, "v": 1, "right": right, "gone": False} for k, t, right in rows], SCHEMA
            )
        )
    assert {"k": "x", "value": 1} in run.finish().output.to_pylist()
