"""Rows of a micro-batch on their way from the tasks to the driver, without Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from millrace.base.settings import Settings
from millrace.flows.sinks.memory import Folder
from millrace.flows.spark_host.micro_batches import _opened, _Staging


def test_tasks_stage_rows_where_the_driver_reads_them(places: Settings, tmp_path: Path) -> None:
    """A bucket for workers of other machines, plain files for those of this one."""
    folder: Folder = f"{places.tables}/staged" if places.tables else tmp_path
    rows = pa.record_batch({"n": list(range(10))})
    (report,) = _Staging(folder)(iter([rows, rows]))
    (said,) = report.to_pylist()
    assert said["rows"] == 20
    with _opened(folder, said["path"]) as file, pa.ipc.open_file(file) as reader:
        assert [reader.get_batch(each) for each in range(reader.num_record_batches)] == [rows, rows]
    assert list(_Staging(folder)(iter([]))) == []
