"""Quality: check the laws on the WAL, segments and checkpoints, and each collection's suite, since the last check.

`check` runs Great Expectations in a job. It fails if a critical expectation failed, and its report names them. A failed
expectation blocks truncation and VACUUM until a later check passes over the same range, or until *quality_release*. If
everything passed, the task updates the asset `quality_passed`. You can set the range: time ticks, or timestamps with
their zone. Users' suites are in the data folder under `quality/<collection>.json` (docs/quality.md).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from millrace.operations.quality.declaration import QUALITY
from millrace_airflow.assets import quality_passed
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator


def must_pass(report: dict[str, Any]) -> None:
    """Fail the task for good if a critical expectation failed: the same data fail again."""
    failed = [f"{each['table']} {each['expectation']}" for each in report["failed"] if each["critical"]]
    if failed:
        raise AirflowFailException(f"critical expectations failed: {', '.join(failed)}; blocks: {report['blocks']}")


with operation_dag(
    QUALITY,
    doc=__doc__,
    schedule="12,42 * * * *",
    deadline=timedelta(hours=1),
) as dag:
    JobOperator(task_id="check", operation=QUALITY, outlets=[quality_passed], check=must_pass)
