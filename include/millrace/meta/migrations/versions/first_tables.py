"""The tables of a meta store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from millrace.meta.tables import KEY, SECONDS, VALUE

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables. Each statement may have run before: MariaDB keeps the DDL of a migration that was killed."""
    op.create_table(
        "meta_state",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("compacted", sa.BigInteger, nullable=False),
        sa.Column("leases", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
    state = sa.table("meta_state", *map(sa.column, ("id", "revision", "compacted", "leases")))
    first = sa.select(sa.literal(1), sa.literal(0), sa.literal(0), sa.literal(0)).where(
        ~sa.exists(sa.select(state.c.id).select_from(state))
    )
    op.execute(sa.insert(state).from_select(["id", "revision", "compacted", "leases"], first))
    for name, second_key in (("meta_entry", False), ("meta_history", True)):
        op.create_table(
            name,
            sa.Column("key", KEY, primary_key=True),
            sa.Column("modified", sa.BigInteger, primary_key=second_key, nullable=False),
            sa.Column("value", VALUE),
            sa.Column("created", sa.BigInteger, nullable=False),
            sa.Column("lease", sa.BigInteger, nullable=False),
            if_not_exists=True,
        )
    op.create_index("meta_entry_lease", "meta_entry", ["lease"], if_not_exists=True)
    op.create_index("meta_history_modified", "meta_history", ["modified"], if_not_exists=True)
    op.create_table(
        "meta_lease",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("seconds", SECONDS, nullable=False),
        sa.Column("renewals", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
