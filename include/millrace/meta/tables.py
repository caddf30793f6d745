"""The tables of the SQL meta store after the newest migration."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from millrace.meta.store import MAX_KEY, MAX_VALUE

METADATA: Final = sa.MetaData()

KEY: Final = sa.String(MAX_KEY).with_variant(
    mysql.VARCHAR(MAX_KEY, charset="ascii", collation="ascii_bin"), "mysql", "mariadb"
)
"""Keys are compared and ordered by their bytes; SQLite does so by default."""
VALUE: Final = sa.LargeBinary(MAX_VALUE)
SECONDS: Final = sa.Float().with_variant(mysql.DOUBLE(), "mysql", "mariadb")


def _entry_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("value", VALUE),
        sa.Column("created", sa.BigInteger, nullable=False),
        sa.Column("lease", sa.BigInteger, nullable=False),
    ]


STATE: Final = sa.Table(
    "meta_state",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("compacted", sa.BigInteger, nullable=False),
    sa.Column("leases", sa.BigInteger, nullable=False),
)
"""One row: the newest revision, the earliest readable one, and the last lease granted."""

ENTRY: Final = sa.Table(
    "meta_entry",
    METADATA,
    sa.Column("key", KEY, primary_key=True),
    sa.Column("modified", sa.BigInteger, nullable=False),
    *_entry_columns(),
    sa.Index("meta_entry_lease", "lease"),
)
"""The current entries."""

HISTORY: Final = sa.Table(
    "meta_history",
    METADATA,
    sa.Column("key", KEY, primary_key=True),
    sa.Column("modified", sa.BigInteger, primary_key=True),
    *_entry_columns(),
    sa.Index("meta_history_modified", "modified"),
)
"""The effect of each revision; a null value is a delete."""

LEASE: Final = sa.Table(
    "meta_lease",
    METADATA,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("seconds", SECONDS, nullable=False),
    sa.Column("renewals", sa.BigInteger, nullable=False),
)
