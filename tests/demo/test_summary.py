"""What the demo says at its end can be pasted."""

from __future__ import annotations

import io

from rich.console import Console

import millrace.testing
from millrace.demo import summary
from tests.docs.deployment import streaming
from tests.docs.test_examples import run


def test_the_line_for_duckdb_asks_the_demos_rows_by_public_names() -> None:
    with millrace.testing.deployment() as db:
        flights = db.create_collection("flights", {"id": "int64", "origin": "string"}, key="id")
        flights.insert([{"id": 1, "origin": "JFK"}, {"id": 2, "origin": "EWR"}, {"id": 3, "origin": "JFK"}])
        shown = io.StringIO()
        summary._print_places(db.settings, flights.definition, Console(file=shown, width=60))
        [line] = [each for each in shown.getvalue().splitlines() if each.strip().startswith("DuckDB")]
        code = line.strip().removeprefix("DuckDB").strip()
        assert "millrace." in code
        assert "from millrace" not in code, "a user imports millrace alone"
        with streaming(db.settings):
            assert "JFK" in run(code, {})
