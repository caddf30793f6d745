"""Move the pipelines of the data folder into a database, once, when it is first opened after the settings name it.

Processes that still use the file then fail: its table of pipelines has another name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa

from millrace.base.errors import PipelineExists
from millrace.base.failpoint import hit
from millrace.meta.sql_engine import transaction, upgrade_exclusively
from millrace.pipelines.store.tables import EVENT, PIPELINE, QUOTA, ROLE, SECRET

_TAKEN: Final = f"{PIPELINE.name}_taken_over"


def was_taken_over(db: sa.Connection) -> bool:
    """Return whether the content of this database has been moved to another one."""
    return sa.inspect(db).has_table(_TAKEN)


def take_over(old: sa.Engine, new: sa.Engine, upgrade: Callable[[sa.Connection], None]) -> None:
    """Move all pipelines of the SQLite `old`, migrated by `upgrade`, into `new`; does nothing if that was done.

    Raises PipelineExists if both have a pipeline of the same id, MetaUnavailable, UnsupportedVersion.
    """
    # Lock both as a writer, and so wait for writes of other processes to the old one.
    with transaction(old) as source:
        if was_taken_over(source):
            return
        upgrade_exclusively(source, upgrade)
        with transaction(new) as target:
            _copy(source, target)
        hit("pipelines.taken")  # the next attempt finds them in the new one
        source.exec_driver_sql(f"alter table {PIPELINE.name} rename to {_TAKEN}")


def _copy(source: sa.Connection, target: sa.Connection) -> None:
    made = sa.select(PIPELINE.c.id, PIPELINE.c.created_at)
    ours = {row.id: row.created_at for row in source.execute(made)}
    there = {row.id: row.created_at for row in target.execute(made)}
    if both := sorted(name for name, at in ours.items() if there.get(name, at) != at):
        raise PipelineExists(
            f"both the data folder and the database of MILLRACE_META_STORE have a pipeline {both[0]!r}: delete one,"
            " with a service whose settings name its database"
        )
    if ours and ours.keys() <= there.keys():
        return
    known = set(target.scalars(sa.select(QUOTA.c.account)))
    wanted: dict[sa.Table, sa.Select[Any]] = {
        PIPELINE: sa.select(PIPELINE),
        SECRET: sa.select(SECRET),
        ROLE: sa.select(ROLE).where(ROLE.c.pipeline.in_(ours)),  # and not a deleted one whose name may exist there
        EVENT: sa.select(*(each for each in EVENT.c if each is not EVENT.c.id)).order_by(
            EVENT.c.id
        ),  # ids are assigned there
        QUOTA: sa.select(QUOTA).where(QUOTA.c.account.not_in(known)),
    }
    for table, rows in wanted.items():
        if found := [dict(row._mapping) for row in source.execute(rows)]:
            target.execute(sa.insert(table), found)
