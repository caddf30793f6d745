"""Backup: copy the whole deployment into a folder of backups while it runs.

One task, one job. It pins the tables at consistent versions, copies the log's tail and the coordinator's file as of one
moment, and links files that the previous backup already has. The manifest, written last, completes the backup. A backup
contains everything that was acknowledged before the run began. The newest `keep` backups stay; older ones are removed.

Runs daily if the setting `backup_dir` names a folder, otherwise only by hand. It does not include Airflow's own state
and secrets. To restore: `millrace backup restore` (docs/restore.md).
"""

from __future__ import annotations

from datetime import timedelta

from millrace.base.settings import Settings
from millrace.operations.backup.declaration import BACKUP
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator

with operation_dag(
    BACKUP,
    doc=__doc__,
    schedule="43 2 * * *" if Settings.load().backup_dir else None,
    deadline=timedelta(hours=6),
) as dag:
    JobOperator(task_id="backup", operation=BACKUP)
