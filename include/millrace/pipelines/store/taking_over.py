"""Pipelines that were kept in the data folder before the settings named a database: taken over into it once, when it is first opened.

Who goes by the file from then on fails: its table of pipelines has another name.
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
    """Whether what this database held lies in another one now."""
    return sa.inspect(db).has_table(_TAKEN)


def take_over(old: sa.Engine, new: sa.Engine, upgrade: Callable[[sa.Connection], None]) -> None:
    """Move the pipelines of the SQLite `old`, brought to this build's form by `upgrade`, into `new`, all or none; nothing where that was
    done. Raises PipelineExists where both have a pipeline of one id, MetaUnavailable, UnsupportedVersion.
    """
    # As a writer of both: what another process still writes into the old one is waited for.
    with transaction(old) as source:
        if was_taken_over(source):
            return
        upgrade_exclusively(source, upgrade)
        with transaction(new) as target:
            _copy(source, target)
        hit("pipelines.taken")  # the next attempt finds them there
        source.exec_driver_sql(f"alter table {PIPELINE.name} rename to {_TAKEN}")


def _copy(source: sa.Connection, target: sa.Connection) -> None:
    made = sa.select(PIPELINE.c.id, PIPELINE.c.created_at)
    ours = {row.id: row.created_at for row in source.execute(made)}
    there = {row.id: row.created_at for row in target.execute(made)}
    if both := sorted(name for name, at in ours.items() if there.get(name, at) != at):
        raise PipelineExists(
            f"the data folder and the database that MILLRACE_META_STORE names both have a pipeline {both[0]!r}: delete one of them,"
            " by a service whose settings name the place that it is in"
        )
    if ours and ours.keys() <= there.keys():
        return
    known = set(target.scalars(sa.select(QUOTA.c.account)))
    wanted: dict[sa.Table, sa.Select[Any]] = {
        PIPELINE: sa.select(PIPELINE),
        SECRET: sa.select(SECRET),
        ROLE: sa.select(ROLE).where(
            ROLE.c.pipeline.in_(ours)
        ),  # and not of one that is gone, and may have a namesake there
        EVENT: sa.select(*(each for each in EVENT.c if each is not EVENT.c.id)).order_by(EVENT.c.id),  # numbered there
        QUOTA: sa.select(QUOTA).where(QUOTA.c.account.not_in(known)),
    }
    for table, rows in wanted.items():
        if found := [dict(row._mapping) for row in source.execute(rows)]:
            target.execute(sa.insert(table), found)
