"""A quality run on a real deployment.

What is right passes, what breaks a law is found, recorded, and blocks removal.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from millrace.base.errors import InvalidSuite, QualityBlocked
from millrace.base.settings import Settings
from millrace.message import builders
from millrace.node.flush.definition import flush_to_end
from millrace.operations.quality.declaration import QualityParams
from millrace.operations.quality.gate import blocked, require_unblocked
from millrace.operations.quality.quarantine import quarantined, release_blocks
from millrace.operations.quality.results import read_results
from millrace.operations.quality.run import QualityReport, run
from millrace.runtime.progress import Progress
from millrace.tables.collections.data_tables import rows_uri
from tests.tables.wal_maker import Collection, WalMaker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    settings = Settings(data_dir=tmp_path_factory.mktemp("quality") / "data", spark_cores=2)
    maker = WalMaker(settings)
    maker.open()
    collection = Collection(maker)
    collection.create()
    for vchannel in collection.vchannels:
        keys = collection.keys_of(vchannel, 6)
        rows: dict[str, list[object]] = {"id": list(keys), "body": [f"body {key}" for key in keys]}
        collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
        # The same rows from a file, in place of those: the suites see each once.
        file = collection.stage(f"load/{vchannel}.parquet", rows)
        collection.append(vchannel, collection.imported([file], vchannel=vchannel, replace=True))
        collection.append(vchannel, collection.delete(keys[:1], vchannel=vchannel))
        collection.append(vchannel, collection.insert({"id": keys[:1], "body": ["again"]}, vchannel=vchannel))
        collection.append(
            vchannel, collection.insert({"id": keys[:1], "body": ["wrong"]}, vchannel=vchannel, partition=9)
        )
    for pchannel in maker.pchannels:
        maker.append(pchannel, [builders.flush_all(term=1)])
    maker.commit()
    flush_to_end(settings)
    return settings


@pytest.fixture
def copy(deployment: Settings, tmp_path: Path) -> Settings:
    shutil.copytree(deployment.data_dir, tmp_path / "data")
    return Settings(data_dir=tmp_path / "data", spark_cores=2)


@pytest.fixture
def check(spark: SparkSession) -> Callable[..., QualityReport]:
    def checked(settings: Settings, **params: object) -> QualityReport:
        chosen = QualityParams.parse({"data_docs": False, **params})
        return run(settings, chosen, Progress(), session_factory=lambda: nullcontext(spark))

    return checked


@pytest.mark.slow
def test_a_sound_deployment_passes_and_is_not_read_twice(copy: Settings, check: Callable[..., QualityReport]) -> None:
    first = check(copy, data_docs=True)
    assert (first.passed, first.failed, first.blocks) == (True, (), ())
    assert first.summary == f"All {first.expectations:,} expectations on {len(first.tables)} tables passed."
    assert first.tables["wal"]["rows"] > 10
    assert first.tables["wal/rejections"]["rows"] == 2
    assert first.tables["collections/1"]["rows"] == 12
    assert first.docs is not None
    assert "tick_step" in "".join(path.read_text() for path in Path(first.docs).parent.rglob("*.html"))
    again = check(copy, tables=["wal", "collections"], full=True)
    assert again.passed
    assert set(again.tables) == {"wal/rejections", "wal/channels"}, "what is not new is left out"
    assert read_results(copy, run_id=first.run_id).num_rows == first.expectations
    assert blocked(copy) == []


class Beside(Progress):
    """Whenever a run says something, rows are written, committed and flushed beside it."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__()
        self._write = write

    def update(self, words: str, *, done: float | None = None, **figures: float | int | str) -> None:
        self._write()


@pytest.mark.slow
def test_what_is_written_and_flushed_beside_a_run_is_no_fault(tmp_path: Path, spark: SparkSession) -> None:
    settings = Settings(data_dir=tmp_path / "data", spark_cores=2)
    maker = WalMaker(settings)
    collection = Collection(maker)
    maker.open()
    collection.create()
    keys = {name: iter(collection.keys_of(name, 40)) for name in collection.vchannels}

    def write() -> None:
        for vchannel, unused in keys.items():
            key = next(unused)
            collection.append(vchannel, collection.insert({"id": [key], "body": ["x"]}, vchannel=vchannel))
            collection.append(vchannel, collection.delete([key - 1], vchannel=vchannel))
        for pchannel in maker.pchannels:
            maker.append(pchannel, [builders.flush_all(term=1)])
        maker.commit()
        flush_to_end(settings)

    write()
    params = QualityParams.parse({"data_docs": False})
    report = run(settings, params, Beside(write), session_factory=lambda: nullcontext(spark))
    assert (report.failed, report.blocks) == ((), ())
    assert blocked(settings) == []


@pytest.mark.slow
def test_a_tick_that_stands_twice_is_found_blocks_removal_and_is_looked_at_again(
    copy: Settings, check: Callable[..., QualityReport]
) -> None:
    _double_the_last_message(copy)
    report = check(copy, tables=["wal"])
    assert not report.passed
    assert report.summary.startswith(f"{len(report.failed)} of ")
    assert report.summary.endswith(" removals.")
    found = {(each.table, each.expectation): each for each in report.failed}
    assert {("wal", "ticks-increase"), ("wal", "ids-unique"), ("wal/channels", "messages-as-committed")} <= found.keys()
    assert found["wal", "ticks-increase"].unexpected == 1
    assert json.loads(found["wal", "ids-unique"].sample[0])["pchannel"] == "p0"
    with pytest.raises(QualityBlocked) as caught:
        require_unblocked(copy, what="truncation")
    assert set(caught.value.blocks) == set(report.blocks)
    assert check(copy, tables=["wal"]).tables["wal"]["rows"] == report.tables["wal"]["rows"], (
        "the range is not passed by"
    )
    release_blocks(copy, [block.id for block in blocked(copy)], by="a person", note="known")
    require_unblocked(copy, what="truncation")
    assert "wal" not in check(copy, tables=["wal"]).tables, "what a person accepted counts as checked"


@pytest.mark.slow
def test_what_users_ask_for_is_checked_beside_the_schema_and_its_slice_can_be_quarantined(
    copy: Settings, check: Callable[..., QualityReport]
) -> None:
    suite = {
        "expectations": [
            {
                "type": "expect_column_values_to_match_regex",
                "kwargs": {"column": "body", "regex": "^body "},
                "meta": {"name": "body-form"},
            },
            {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 1000}, "severity": "warning"},
        ]
    }
    path = copy.data_dir / "quality" / "things.json"
    path.parent.mkdir()
    path.write_text(json.dumps(suite))
    report = check(copy, tables=["collections"], quarantine=True)
    failed = {each.expectation: each for each in report.failed}
    assert failed["user:body-form"].unexpected == 2
    assert not report.passed
    (one,) = quarantined(copy, 1)
    assert (one.expectation, one.id) == ("user:body-form", report.blocks[0])
    assert len(report.blocks) == 1, "a warning blocks nothing"
    suite["expectations"][0]["type"] = "expect_column_values_to_match_a_wish"
    path.write_text(json.dumps(suite))
    with pytest.raises(InvalidSuite, match=r"things\.json: expectations\[0\] \(expect_column_values_to_match_a_wish\)"):
        check(copy, tables=["collections"])


@pytest.mark.slow
def test_rows_that_a_segment_counted_and_its_collection_lacks_are_found(
    copy: Settings, check: Callable[..., QualityReport]
) -> None:
    assert check(copy, tables=["segments"]).passed
    DeltaTable(str(Path(rows_uri(copy, 1)))).delete("_vchannel = 'p0_1v0' and body = 'again'")
    report = check(copy, tables=["segments"], start="0")
    assert [(each.expectation, each.unexpected) for each in report.failed] == [("rows-as-stored", 1)]


@pytest.mark.slow
def test_a_row_that_is_gone_from_a_data_file_fails_rows_as_stored(
    copy: Settings, check: Callable[..., QualityReport]
) -> None:
    """No commit tells of it, and the file is as long as its commit says: only its rows can."""
    table = DeltaTable(str(Path(rows_uri(copy, 1))))
    file = max((Path(uri.removeprefix("file://")) for uri in table.file_uris()), key=lambda each: each.stat().st_size)
    _lose_a_row(file)
    report = check(copy, tables=["segments"], start="0")
    assert [(each.expectation, each.unexpected) for each in report.failed] == [("rows-as-stored", 1)]
    assert not report.passed
    with pytest.raises(QualityBlocked):
        require_unblocked(copy, what="truncation")


def _lose_a_row(file: Path) -> None:
    """Write the Parquet file anew without its last row, at the same length.

    What is missing is made up in its footer.
    """
    size, rows = file.stat().st_size, pq.ParquetFile(file).read()
    rows = rows.slice(0, rows.num_rows - 1)
    options = {"compression": "zstd", "store_schema": False, "write_statistics": False}
    for key, padding in itertools.product(("p", "pad", "padding"), range(size)):  # the length's own length may step
        with pq.ParquetWriter(file, rows.schema, **options) as writer:
            writer.write_table(rows)
            writer.add_key_value_metadata({key: "-" * padding})
        if file.stat().st_size == size:
            return
    raise AssertionError("no footer makes up for the row")


def _double_the_last_message(settings: Settings) -> None:
    table = DeltaTable(str(Path(settings.wal_uri)))
    files = [uri for uri in table.file_uris() if "kind=message" in uri and "pchannel=p0" in uri]
    rows = pq.ParquetFile(files[0].removeprefix("file://")).read().slice(0, 1)
    date = files[0].partition("/date=")[2].partition("/")[0]
    rows = rows.append_column("kind", pa.array(["message"])).append_column("pchannel", pa.array(["p0"]))
    rows = rows.append_column("date", pa.array([date]).cast(pa.date32()))
    write_deltalake(table, rows.cast(pa.schema(table.schema().to_arrow())), mode="append")
