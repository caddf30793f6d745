"""The tables of pipelines as the newest migration leaves them."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

METADATA: Final = sa.MetaData()
_NUMBER: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

TURN: Final = sa.Table("pipeline_turn", METADATA, sa.Column("id", sa.Integer, primary_key=True))
"""One row whose lock serialises writers on MariaDB."""

PIPELINE: Final = sa.Table(
    "pipeline",
    METADATA,
    sa.Column("id", sa.String(255), primary_key=True),
    sa.Column("version", sa.BigInteger),
    sa.Column("phase", sa.String(16)),
    sa.Column("wanted", sa.String(16)),
    sa.Column("account", sa.String(255)),
    sa.Column("name", sa.String(255)),
    sa.Column("cpus", sa.Float),
    sa.Column("memory_mib", sa.BigInteger),
    sa.Column("declaration", sa.Text),
    sa.Column("saga", sa.Text),
    sa.Column("created_by", sa.String(255)),
    sa.Column("created_at", sa.Double),
    sa.Column("changed_at", sa.Double),
)

SECRET: Final = sa.Table(
    "pipeline_secret",
    METADATA,
    sa.Column("pipeline", sa.String(255), primary_key=True),
    sa.Column("path", sa.String(255), primary_key=True),
    sa.Column("value", sa.LargeBinary),
)

ROLE: Final = sa.Table(
    "pipeline_role",
    METADATA,
    sa.Column("pipeline", sa.String(255), primary_key=True),
    sa.Column("principal", sa.String(255), primary_key=True),
    sa.Column("role", sa.String(16)),
)

EVENT: Final = sa.Table(
    "pipeline_event",
    METADATA,
    sa.Column("id", _NUMBER, primary_key=True, autoincrement=True),
    sa.Column("pipeline", sa.String(255)),
    sa.Column("at", sa.Double),
    sa.Column("who", sa.String(255)),
    sa.Column("what", sa.String(64)),
    sa.Column("detail", sa.Text),
)

QUOTA: Final = sa.Table(
    "pipeline_quota",
    METADATA,
    sa.Column("account", sa.String(255), primary_key=True),
    sa.Column("pipelines", sa.BigInteger),
    sa.Column("cpus", sa.Float),
    sa.Column("memory_mib", sa.BigInteger),
)
"""The quota of an account's pipelines; the account ``*`` stands for each account without a row."""
