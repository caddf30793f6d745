"""Backup: the whole deployment into a folder of backups, while it runs.

One task, one job. Tables are pinned at versions that fit each other, the log's tail and the coordinator's file are copied as of
one moment, files that the backup before has are linked from there; the manifest, written last, makes it a backup. What
was acknowledged before the run began is in it. `keep` backups stay, older ones go.

Once a day where the setting `backup_dir` names a folder, else by hand alone. Airflow's own state and secrets are no part of
it. To restore: `millrace backup restore` (docs/restore.md).
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
