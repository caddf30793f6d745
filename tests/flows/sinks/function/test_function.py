"""A function as a sink, without Spark.

What it is called for, by its guarantee, where it raises and where it does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import InvalidArgument
from millrace.flows.batch import Batch
from millrace.flows.guarantee import Guarantee
from millrace.flows.sinks.function.sink import FunctionSink
from millrace.flows.sinks.sink import Verdicts


@pytest.mark.parametrize(
    ("guarantee", "wanted"),
    [("at least once", [(0, "a"), (0, "a"), (1, "b"), (1, "b")]), ("at most once", [(0, "a"), (1, "b")])],
)
def test_a_batch_that_comes_again_is_given_again_at_least_once_and_left_out_at_most_once(
    tmp_path: Path, guarantee: Guarantee, wanted: list[tuple[int, str]]
) -> None:
    called: list[tuple[int, Any]] = []

    def take(frame: Any, batch_id: int) -> None:
        called.append((batch_id, frame))
        if len(called) == 1:
            raise RuntimeError("once")

    def write(batch_id: int, frame: Any) -> Verdicts:
        return FunctionSink(tmp_path / "sink", take, guarantee=guarantee).write(
            Batch("query", batch_id, batch_id + 1, frame=lambda: frame)
        )

    with pytest.raises(RuntimeError, match="once"):
        write(0, "a")
    assert write(0, "a").again == (guarantee == "at most once")
    assert not write(1, "b").again
    assert write(1, "b").again == (guarantee == "at most once")
    assert called == wanted


def test_a_function_cannot_be_exactly_once_by_itself(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="one of 'at least once', 'at most once'"):
        FunctionSink(tmp_path, print, guarantee="exactly once")
