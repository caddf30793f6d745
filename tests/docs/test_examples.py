"""The examples of the pages run as pasted, on a deployment of their own."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import millrace
from millrace.base.data_folder import KNOWN_ENTRIES
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.node.publish.definition import publish_to_end
from millrace.operations.backup import deployment_id
from millrace.operations.checkpoint.recovery_checkpoints import recovery_checkpoints_uri as recovery_checkpoints_uri
from millrace.operations.quality.results import quality_path
from millrace.tables.collections.bases import bases_uri
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.tables.wal.trims import trims_uri
from tests.docs.deployment import commit_what_the_logs_hold, flush_what_is_committed, streaming
from tests.docs.pages import blocks, python_blocks, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


TICKS = 8
"""An upper bound of the time ticks that the reads of these tests append to a PChannel."""


def run(block: str, names: dict[str, Any]) -> str:
    """Run a block of a page with the names of `names`, which it extends. Return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "<page>", "exec"), names)
    return printed.getvalue()


def key_rows(rows: pa.Table) -> list[tuple[int, str]]:
    return sorted(zip(rows["id"].to_pylist(), rows["name"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """One deployment for all examples. The cache folder is the user's, so jars are fetched only once."""
    return Settings(data_dir=tmp_path_factory.mktemp("examples") / "data", spark_cores=2)


@pytest.fixture(scope="module")
def readme(settings: Settings) -> Iterator[dict[str, Any]]:
    """The names of the README's example after two runs, with the log server still running."""
    names: dict[str, Any] = {"settings": settings, "data": settings.data_dir}
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("MILLRACE_DATA", str(settings.data_dir))
            names["printed"] = [run(python_blocks("README.md")[0].text, names) for _ in range(2)]
        yield names
    finally:
        with connect(settings=settings) as client:
            client.connection.service.shutdown()


def caught_up(settings: Settings, *, flushed: bool) -> None:
    with connect(settings=settings) as client:
        commit_what_the_logs_hold(client, settings)
    if flushed:
        flush_what_is_committed(settings)


def test_the_readmes_example_runs_and_its_read_gives_what_it_says(
    readme: dict[str, Any], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_DATA", str(settings.data_dir))
    assert readme["printed"][0] == blocks("README.md")[1].text
    first, second = ([line.split()[0] for line in each.splitlines()] for each in readme["printed"])
    once = ["delete", "insert", "delete", "delete", "insert"]  # an upsert, a delete, a transaction
    assert (first, second) == (once, once * 2)
    caught_up(settings, flushed=False)
    printed = run(python_blocks("README.md")[1].text, readme)
    assert "Cyd" in printed
    assert "Dan" in printed
    assert "Ada" not in printed
    assert "Bob" not in printed
    assert printed.count("Dan") == 1, "the second run took the place of the first"


def test_the_queries_of_the_tables_page_give_the_visible_rows(
    readme: dict[str, Any], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_DATA", str(settings.data_dir))
    caught_up(settings, flushed=True)
    publish_to_end(settings)
    plain = [block.text for block in python_blocks("docs/tables.md") if not block.mark]
    assert len(plain) == 3
    names: dict[str, Any] = {}
    with streaming(settings):
        for block in plain:
            run(block, names)
    names["db"].close()
    expected = [(3, "Cyd"), (4, "Dan")]
    assert key_rows(names["rows"]) == key_rows(names["attached"]) == key_rows(pa.table(names["visible"])) == expected
    assert names["stored"].num_rows == 2 * 4, "of two runs: files keep what deletes hit"
    counts = {kind: (messages, rows) for kind, messages, rows in names["by_type"]}
    assert counts["UPSERT"] == (2, 6)
    assert counts["INSERT"] == (2, 2)
    assert counts["DELETE"] == (4, 6)


def test_every_folder_of_a_deployment_is_in_the_operating_page(readme: dict[str, Any], settings: Settings) -> None:
    caught_up(settings, flushed=True)
    made = {path.name for path in settings.data_dir.iterdir()}
    made |= {settings.run_path.name, settings.spark_checkpoint_path("q").parent.name, settings.parked_path.name}
    # What operations add once they have run.
    made |= {
        Path(recovery_checkpoints_uri(settings)).name,
        quality_path(settings).name,
        "derived",
        "staged",
        "restores",
    }
    made |= {Path(bases_uri(Path(settings.wal_uri))).name, Path(trims_uri(Path(settings.wal_uri))).name}
    # What the first backup, and people, add.
    made |= {deployment_id.DEPLOYMENT_FILE, "inbox"}
    cells = [row[0] for row in table("docs/operating.md", "The data folder")]
    named = {place.strip().split("/")[0] for cell in cells for place in cell.split(",")}
    assert made <= named
    assert named == KNOWN_ENTRIES


@pytest.mark.spark
@pytest.mark.slow
def test_the_spark_query_of_the_tables_page_gives_the_visible_rows(
    readme: dict[str, Any], settings: Settings, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_DATA", str(settings.data_dir))
    caught_up(settings, flushed=True)
    publish_to_end(settings)
    (block,) = [block.text for block in python_blocks("docs/tables.md") if block.mark == "spark"]
    names: dict[str, Any] = {"millrace": millrace, "users": readme["users"]}  # of the page's first block
    with streaming(settings):
        run(block, names)
        assert sorted((row["id"], row["name"]) for row in names["visible"].collect()) == [(3, "Cyd"), (4, "Dan")]
    assert names["published"].count() == 2


@pytest.mark.parametrize("lost", [["tables", "deletes", "segments", "checkpoints"], ["wal"]])
def test_tables_that_the_operating_page_calls_computable_come_back_the_same(
    readme: dict[str, Any], settings: Settings, lost: list[str]
) -> None:
    caught_up(settings, flushed=True)

    def content() -> tuple[list[Any], dict[str, Any], int]:
        rows = read_arrow(settings, readme["users"].id, with_ticks=True)
        wal = WalTable.open(Path(settings.wal_uri))
        totals = {name: wal.position(name).totals for name in wal.pchannels()}
        snapshot = WalSnapshot.open(Path(settings.wal_uri))
        assert snapshot is not None
        return sorted(map(str, rows.to_pylist())), totals, max(map(snapshot.last_tick, snapshot.pchannels()))

    before = content()
    for name in lost:
        shutil.rmtree(settings.data_dir / name)
    caught_up(settings, flushed=True)
    # The rows are the same. The last tick becomes a WAL row only when a message follows it, or when the WAL is rebuilt.
    rows, totals, last_tick = content()
    assert rows == before[0]
    assert last_tick >= before[2]
    for name, total in totals.items():
        assert total.rejections == before[1][name].rejections
        assert 0 <= total.messages - before[1][name].messages <= TICKS
