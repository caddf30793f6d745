"""The environment of alembic: runs missing migrations in the transaction of the given connection."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], version_table="pipeline_schema", transactional_ddl=True
)
context.run_migrations()
