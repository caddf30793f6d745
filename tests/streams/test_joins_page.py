"""The page about joins does what it says.

An interval join of two collections, outer rows once no partner can come, state that goes.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import millrace.testing
from tests.docs.pages import python_blocks
from tests.docs.test_examples import run as run_block

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]
DAY = datetime(2026, 11, 24, tzinfo=UTC)


def test_an_interval_join_gives_pairs_and_in_time_the_rows_without_one(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "data"))
    [page] = python_blocks("docs/joins.md")
    with millrace.testing.deployment(tmp_path / "data") as db:
        orders = db.create_collection("orders", {"id": "int64", "ordered": "timestamp"}, key="id")
        payments = db.create_collection("payments", {"order_id": "int64", "paid": "timestamp"}, key="order_id")
        db.create_collection("paid_orders", {"id": "int64", "paid": "timestamp?"}, key="id")

        def come(minutes: int, order: int, paid: int | None = None) -> None:
            orders.insert([{"id": order, "ordered": DAY + timedelta(minutes=minutes)}])
            if paid is not None:
                payments.insert([{"order_id": order, "paid": DAY + timedelta(minutes=paid)}])

        def joined() -> tuple[dict[int, Any], int]:
            db.settle()
            names: dict[str, Any] = {}
            run_block(page.text, names)
            assert names["query"].awaitTermination(120)
            db.settle()
            state = names["query"].lastProgress["stateOperators"][0]["numRowsTotal"]
            return {row["id"]: row["paid"] for row in db.collection("paid_orders").read().to_pylist()}, state

        come(0, 1, paid=30)
        come(5, 2)
        come(6, 3, paid=90)
        found, kept = joined()
        assert found == {1: DAY + timedelta(minutes=30)}, "the others may be paid yet"
        come(400, 4, paid=401)
        joined()
        come(800, 5, paid=801)
        found, left = joined()
        paid = {1: 30, 4: 401, 5: 801}
        assert found == {2: None, 3: None, **{each: DAY + timedelta(minutes=at) for each, at in paid.items()}}
        assert left <= kept, "what no partner can come for is forgotten"
