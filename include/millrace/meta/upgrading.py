"""A meta store's tables are brought to this build's form."""

from __future__ import annotations

import sqlalchemy as sa

from millrace.base.errors import UnsupportedVersion


def upgrade(
    db: sa.Connection,
    *,
    migrations: str = "millrace.meta:migrations",
    version_table: str = "meta_version",
    whose: str = "the meta store's",
) -> None:
    """Run the migrations that the database lacks, in the transaction that `db` is in. Raises UnsupportedVersion for tables
    of a newer build. Another room's tables in the same database have `migrations` and a `version_table` of their own."""
    from alembic import command
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", migrations)
    config.attributes["connection"] = db
    steps = ScriptDirectory.from_config(config)
    found = MigrationContext.configure(db, opts={"version_table": version_table}).get_current_revision()
    if found == steps.get_current_head():
        return
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise UnsupportedVersion(f"{whose} tables are of version {found}: use the build that made them") from error
