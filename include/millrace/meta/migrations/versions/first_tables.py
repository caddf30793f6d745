"""The tables of a meta store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    state = op.create_table(
        "meta_state",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("compacted", sa.BigInteger, nullable=False),
        sa.Column("leases", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(state, [{"id": 1, "revision": 0, "compacted": 0, "leases": 0}])
    for name, second_key in (("meta_entry", False), ("meta_history", True)):
        op.create_table(
            name,
            sa.Column("key", sa.String(256), primary_key=True),
            sa.Column("modified", sa.BigInteger, primary_key=second_key, nullable=False),
            sa.Column("value", sa.LargeBinary(512 * 1024)),
            sa.Column("created", sa.BigInteger, nullable=False),
            sa.Column("lease", sa.BigInteger, nullable=False),
        )
    op.create_index("meta_entry_lease", "meta_entry", ["lease"])
    op.create_index("meta_history_modified", "meta_history", ["modified"])
    op.create_table(
        "meta_lease",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("renewals", sa.BigInteger, nullable=False),
    )
