"""The tables of pipelines."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NAME = sa.String(255).with_variant(sa.String(255, collation="utf8mb4_bin"), "mysql", "mariadb")
_TEXT = sa.Text().with_variant(sa.Text(1 << 24), "mysql", "mariadb")
_BYTES = sa.LargeBinary().with_variant(sa.LargeBinary(1 << 24), "mysql", "mariadb")
_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_INNODB: Any = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
}


def upgrade() -> None:
    turn = op.create_table("pipeline_turn", sa.Column("id", sa.Integer, primary_key=True), **_INNODB)
    op.bulk_insert(turn, [{"id": 1}])
    op.create_table(
        "pipeline",
        sa.Column("id", _NAME, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("wanted", sa.String(16), nullable=False),
        sa.Column("account", _NAME, nullable=False),
        sa.Column("name", _NAME, nullable=False),
        sa.Column("cpus", sa.Float, nullable=False),
        sa.Column("memory_mib", sa.BigInteger, nullable=False),
        sa.Column("declaration", _TEXT, nullable=False),
        sa.Column("saga", _TEXT, nullable=False),
        sa.Column("created_by", _NAME, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        **_INNODB,
    )
    op.create_table(
        "pipeline_secret",
        sa.Column("pipeline", _NAME, primary_key=True),
        sa.Column("path", _NAME, primary_key=True),
        sa.Column("value", _BYTES, nullable=False),
        **_INNODB,
    )
    op.create_table(
        "pipeline_role",
        sa.Column("pipeline", _NAME, primary_key=True),
        sa.Column("principal", _NAME, primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Index("pipeline_role_principal", "principal"),
        **_INNODB,
    )
    op.create_table(
        "pipeline_event",
        sa.Column("id", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("pipeline", _NAME, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("who", _NAME, nullable=False),
        sa.Column("what", sa.String(64), nullable=False),
        sa.Column("detail", _TEXT, nullable=False),
        sa.Index("pipeline_event_of", "pipeline", "id"),
        **_INNODB,
    )
    op.create_table(
        "pipeline_quota",
        sa.Column("account", _NAME, primary_key=True),
        sa.Column("pipelines", sa.BigInteger, nullable=False),
        sa.Column("cpus", sa.Float, nullable=False),
        sa.Column("memory_mib", sa.BigInteger, nullable=False),
        **_INNODB,
    )
